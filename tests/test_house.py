"""The rules that keep the source tree readable: where modules lie, how long they are, who imports whom."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fewshift

PACKAGE = Path(fewshift.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 350
LONGEST_FUNCTION = 60
MOST_AT_THE_TOP = 4
MOST_THAT_ASK = 3
OPEN_TO_COMMANDS = {"api", "lab", "report", "studio", "errors", "cli"}


def test_the_tree_was_found() -> None:
    assert len(MODULES) > 50


def test_at_most_four_modules_lie_at_the_top_level() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


def test_no_file_is_longer_than_350_lines() -> None:
    lengths = {name(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    too_long = [f"{module}: {count} lines" for module, count in lengths.items() if count > LONGEST_FILE]
    assert not too_long, "\n".join(too_long)


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = {f"{name(path)}:{node.name}": length(node, path) for path in MODULES for node in functions(path)}
    too_long = [f"{function}: {count} lines" for function, count in lengths.items() if count > LONGEST_FUNCTION]
    assert not too_long, "\n".join(too_long)


def test_no_class_name_is_defined_twice() -> None:
    counts = Counter(node.name for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    repeated = [class_name for class_name, count in counts.items() if count > 1]
    assert not repeated, "\n".join(repeated)


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    names = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert names & sys.stdlib_module_names == set()


def test_at_most_three_modules_ask_whether_every_pixel_has_a_label() -> None:
    askers = [name(path) for path in MODULES if any(map(asks_about_pixels, ast.walk(tree(path))))]
    assert len(askers) <= MOST_THAT_ASK, "\n".join(askers)


def test_commands_use_only_what_a_python_user_can_reach() -> None:
    commands = [path for path in MODULES if room(path) == "cli"]
    offences = [f"{name(path)} imports {used}" for path in commands for used in imports(path) if hidden(used)]
    assert not offences, "\n".join(offences)


def test_nothing_but_commands_imports_the_lab() -> None:
    others = [path for path in MODULES if room(path) not in ("cli", "lab")]
    offences = [name(path) for path in others if any(used.split(".")[0] == "lab" for used in imports(path))]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("if support.dense: pass", True),
        ("def read(dense): pass", True),
        ("kind.unit == 'pixel'", True),
        ("support.kind is not PIXELS", True),
        ("isinstance(kind, PixelLabels)", True),
        ("kind = PIXELS if labels.ndim == 3 else IMAGES", True),
        ("from fewshift.core.labels import PIXELS", False),
        ("Collection('camvid', labels=PIXELS)", False),
        ("support.kind.folds(5)", False),
    ],
)
def test_a_question_about_pixels_is_told_from_an_answer(code: str, asks: bool) -> None:
    assert any(map(asks_about_pixels, ast.walk(ast.parse(code)))) is asks


def asks_about_pixels(node: ast.AST) -> bool:
    """Whether the node asks if every pixel has a label; `labels=PIXELS` states it and does not ask."""
    match node:
        case ast.Attribute(attr="dense") | ast.Name(id="dense") | ast.arg(arg="dense") | ast.keyword(arg="dense"):
            return True
        case ast.Compare(left=ast.Attribute(attr="unit")):
            return True
        case ast.Compare(left=left, comparators=others):
            return any(isinstance(side, ast.Name) and side.id in ("PIXELS", "IMAGES") for side in (left, *others))
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            return any(isinstance(kind, ast.Name) and kind.id.endswith("Labels") for kind in ast.walk(kinds))
        case ast.IfExp(body=body, orelse=orelse):
            return any(isinstance(side, ast.Name) and side.id == "PIXELS" for side in (body, orelse))
    return False


def length(node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> int:
    """Lines of a function; the option list of a command, or of its twin in Python, does not count."""
    first = node.body[0].lineno if room(path) in ("cli", "api") else node.lineno
    return (node.end_lineno or first) - first + 1


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imports(path: Path) -> Iterator[str]:
    """What a module imports of the package when it runs, as `room.module` or as a name of the package itself."""
    for node in ast.walk(running(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("fewshift.") for alias in node.names if ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(PACKAGE.parent).parts[: -node.level]
            module = ".".join((*parents, *filter(None, [node.module]))) if node.level else node.module or ""
            if module == "fewshift":
                yield from (alias.name for alias in node.names)
            elif ours(module):
                yield module.removeprefix("fewshift.")


def ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "fewshift"


def hidden(used: str) -> bool:
    """Whether an import of a command reaches past the front door."""
    public = {"fewshift", *fewshift.__all__}
    return used not in public and used.split(".", maxsplit=1)[0] not in OPEN_TO_COMMANDS


def running(path: Path) -> ast.Module:
    """The module without what only type checkers read."""

    class Typeless(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if typing_only else self.generic_visit(node)

    return Typeless().visit(ast.parse(path.read_text("utf-8")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def room(path: Path) -> str:
    """The folder of the package in which a module lies, or its own name at the top level."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))
