"""Every method, by name, and the table that `fewshift list methods` and docs/methods.md show.

A new method costs one file and one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from fewshift.core.method import Method
from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_word
from fewshift.methods.adabn import AdaBN
from fewshift.methods.alpha_bn import AlphaBN
from fewshift.methods.auto import Auto
from fewshift.methods.blend import Blend, BlendAll, BlendHead
from fewshift.methods.delta_reg import DeltaReg
from fewshift.methods.finetune import L2, FinetuneBN, FinetuneFeatures, FinetuneHead
from fewshift.methods.flute import Flute
from fewshift.methods.l2sp import L2SP
from fewshift.methods.late_fusion import LateFusion
from fewshift.methods.lccs import LCCS
from fewshift.methods.lp_ft import LPFT
from fewshift.methods.sdda import SDDA
from fewshift.methods.sfda import SFDA
from fewshift.methods.shot import SHOT
from fewshift.methods.source import Source
from fewshift.methods.tent import Tent
from fewshift.methods.testtime_bn import TestTimeBN

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Auto,
        Blend,
        BlendHead,
        BlendAll,
        Source,
        TestTimeBN,
        AlphaBN,
        Tent,
        AdaBN,
        FinetuneBN,
        FinetuneHead,
        FinetuneFeatures,
        L2,
        L2SP,
        DeltaReg,
        LateFusion,
        Flute,
        LPFT,
        LCCS,
        SHOT,
        SFDA,
        SDDA,
    )
}


def method_of(method: str | Method | type[Method]) -> Method:
    """A method by name with its default settings, or the method itself."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if not isinstance(method, str) or method not in METHODS:
        raise FewshiftError(f"there is no method '{method}': choose one of {', '.join(METHODS)}")
    return METHODS[method]()


def sized(method: Method, size: str | None) -> Method:
    """`auto` with this size of its delta; other methods have no such choice."""
    if size is None:
        return method
    if not isinstance(method, Auto):
        raise FewshiftError(f"size={size!r} is a choice of the method 'auto', not of '{method.name}': leave it out")
    return replace(method, size=size)


def method_from_words(name: str, words: Sequence[str]) -> Method:
    """A method with fields set from words such as epochs=20 or init=none."""
    method = type(method_of(name))
    known = {field.name for field in fields(method)}
    values: dict[str, Any] = {}
    for setting in words:
        key, _, value = setting.partition("=")
        if key not in known:
            raise FewshiftError(f"{name} has no setting '{key}': choose one of {', '.join(sorted(known)) or 'none'}")
        values[key] = parsed_word({"none": "null"}.get(value.lower(), value))
    return method(**values)


HEADER = """# Methods

Generated from the classes by `make docs`; `fewshift list methods` prints the same table. Every method is a frozen
dataclass whose fields are its settings: `fewshift.METHODS["lccs"](epochs=20)` in Python, `--method lccs --set
epochs=20` on the command line.

**How a method was verified** stands with it. "The formulas" are a second implementation, in the test, from
the method's description alone: its own forward pass, losses and optimiser, in float64. It shares the order of the
images with ours, and nothing else.
"""


def rows() -> list[dict[str, Any]]:
    """One row per method: name, class, paper, what it looks at, what it returns and changes, fields and defaults."""
    return [
        {
            "name": name,
            "class": method.__name__,
            "paper": method.paper,
            "looks at": method.needs.value,
            "returns": method.returns,
            "changes": method.changes,
            "settings": {field.name: field.default for field in fields(method)},
        }
        for name, method in METHODS.items()
    ]


def markdown() -> str:
    """The page docs/methods.md."""
    table = ["| name | looks at | returns | paper |", "|---|---|---|---|"]
    table += [
        f"| [`{row['name']}`](#{row['name']}) | {row['looks at']} | {row['returns']} | {row['paper']} |"
        for row in rows()
    ]
    return "\n".join([HEADER, *table, "", *(_section(row, METHODS[row["name"]]) for row in rows())])


def _section(row: dict[str, Any], method: type[Method]) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items()) or "-"
    module = inspect.getmodule(method)
    paper = (inspect.getdoc(module) or "").partition("\n\n")[2].partition("\n\n")[0] if module else ""
    cited = [paper.replace("\n", " ")] if row["paper"][0] not in "-b" and paper else []
    about = [
        f"`{row['class']}`. {inspect.getdoc(method)}",
        *cited,
        f"Changes: {row['changes']}.",
        f"Verified: {method.verified}.",
    ]
    return "\n\n".join([f"## {row['name']}", *about, f"Settings: `{settings}`.\n"])


if __name__ == "__main__":
    print(markdown())
