"""Folders of runs with invented results, as `bench` would leave them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from markupsafe import escape

from fewshift.lab.bench.cell import Cell, FeatureCell
from fewshift.lab.bench.features import load_grid
from fewshift.lab.bench.record import Records

HEAD = 'title = "{title}"\ndataset = "toy"\nsource = "net"\ntargets = ["north", "south"]\nseeds = [0, 1, 2]\n'
LCCS = '\n[[rows]]\nmethod = "lccs"\nlabel = "LCCS"\nshots = {shots}\n'
SOURCE = '\n[[rows]]\nmethod = "source"\nlabel = "Source"\n'
BN = '\n[[rows]]\nmethod = "testtime-bn"\nlabel = "BN"\nconditions = [{conditions}]\n'

PLAIN = HEAD.format(title="Plain") + SOURCE + LCCS.format(shots=[1, 5])
ONE_POINT = HEAD.format(title="One point") + SOURCE + LCCS.format(shots=[5])
BATCHES = (
    HEAD.format(title="Batches")
    + SOURCE
    + BN.format(conditions="{batch_size = 8}")
    + BN.format(conditions="{batch_size = 128}")
    + LCCS.format(shots=[5])
)
ALPHAS = HEAD.format(title="Alphas") + "".join(
    row + condition
    for condition in ("conditions = [{}]\n", "conditions = [{alpha = 10.0}]\n")
    for row in (SOURCE, LCCS.format(shots=[5]))
)
SEARCH = '\n[[rows]]\nmethod = "lccs"\nlabel = "by {0}"\nshots = [1]\nsettings = {{epochs = 0, objective = "{0}"}}\n'
FIXED = '\n[[rows]]\nmethod = "lccs"\nlabel = "v = {0}"\nshots = [1]\nsettings = {{epochs = 0, init = {0}}}\n'
OBJECTIVE = HEAD.format(title="Objective") + "".join(
    [*(FIXED.format(v) for v in (0.0, 0.5, 1.0)), SEARCH.format("cross-entropy"), SEARCH.format("entropy")]
)
MANY = HEAD.format(title="Many rows") + "".join(
    f'\n[[rows]]\nmethod = "adabn"\nlabel = "row {row}"\nshots = [1, 5, 10]\nsettings = {{batch_size = {row + 1}}}\n'
    for row in range(12)
)
SECONDS = HEAD.format(title="Seconds") + 'measure = "adapt_seconds"\n' + LCCS.format(shots=[1, 5])
CHOSEN = HEAD.format(title="Blends") + 'measure = "v"\n' + LCCS.format(shots=[1, 5])
FEATURES = """title = "Features"
dataset = "toy"
source = "net"
[[comparisons]]
label = "(a) shift"
first = {domain = "north"}
second = {domain = "south", statistics = "batch"}
"""
GRIDS = {"plain": PLAIN, "batches": BATCHES, "alphas": ALPHAS, "objective": OBJECTIVE,
         "many": MANY + LCCS.format(shots=[1, 5, 10]), "seconds": SECONDS, "chosen": CHOSEN,
         "features": FEATURES}  # fmt: skip

ANIMALS = ("ant", "bee", "cat")
PER_CLASS = 50  # images
Score = Callable[[Cell], int]


def score_of(cell: Cell) -> int:
    """Images answered right of each class, a different number for every cell."""
    base = 20 if cell.method == "source" else 25 + (cell.shots or 0)
    tail = round(cell.condition.alpha or 1) // 5
    return base + cell.seed * 2 + (cell.target == "south") * 3 + cell.condition.batch_size // 32 - tail


def invented(cell: Cell, score: Score = score_of, classes: Sequence[str] = ANIMALS) -> dict[str, Any]:
    """A result as a run would write it, with `score` images of each class right and the others taken for the next."""
    right, size = score(cell), len(classes)
    dice = random.Random(cell.fit_key)
    tally = [[0] * size for _ in classes]
    for row in range(size):
        tally[row][row] = right
        tally[row][(row + 1) % size] += PER_CLASS - right
    settings, notes, layers = cell.build().settings(), {}, {}
    if cell.method == "lccs":
        curve = [{"v": v / 4, "loss": 1 + abs(v / 4 - 0.5) + dice.random() / 10} for v in range(5)]
        notes = {"v": min(curve, key=lambda point: point["loss"])["v"], "grid": curve}
        if settings["init"] != "grid":
            notes = {"v": settings["init"], "grid": []}
        weights = [{"eta": [dice.random(), dice.random()], "rho": [dice.random(), dice.random()]} for _ in range(4)]
        layers = {f"bn{number}": layer for number, layer in enumerate(weights)}
    return {
        "accuracy": right / PER_CLASS,
        "macro_recall": right / PER_CLASS,
        "macro_f1": right / PER_CLASS,
        "tally": tally,
        "classes": list(classes),
        "notes": notes,
        "layers": layers,
        "seconds": {"adapt": (cell.shots or 0) + 0.5 + cell.seed, "predict": 0.15 * size},
        "versions": {"fewshift": "0.1.0", "torch": "2.6.0"},
    }


def embedded(cell: FeatureCell) -> dict[str, Any]:
    """Points on a line for one sample and on another for the second."""
    points = [[[float(x), 0.0] for x in range(6)], [[float(x), 4.0] for x in range(6)]]
    names = [cell.first.label, cell.second.label]
    result = {"layer": "bn9", "classes": list(ANIMALS), "labels": [[0, 0, 1, 1, 2, 2]] * 2, "samples": names}
    return result | {"before": points, "after": points, "gap_before": 0.25, "gap_after": 1.5, "notes": {}}


def fill(
    folder: Path,
    name: str,
    text: str,
    result: Callable[[Cell], dict[str, Any]] = invented,
    keep: Callable[[Cell], bool] = lambda _: True,
) -> Path:
    """A folder as if the grid had been run into it."""
    records = Records(folder)
    (folder / "grids").mkdir(exist_ok=True)
    grid = folder / "grids" / f"{name}.toml"
    grid.write_text(text, encoding="utf-8")
    lines = []
    for number, cell in enumerate(filter(keep, load_grid(grid).cells())):
        record = {"key": cell.key, "cell": cell.to_json(), "began": 1.8e9 + 60 * number, "seconds": 30.0}
        outcome = result(cell)
        record |= {"error": outcome["error"]} if "error" in outcome else {"result": outcome}
        lines.append(json.dumps(record) + "\n")
    with records.file.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return folder


def by_blend(cell: Cell) -> dict[str, Any]:
    """Best at v = 0.5; a loss of the first seed is not a number, which figures leave out."""
    right = {0.0: 20, 0.5: 30, 1.0: 10}.get(cell.settings.get("init"), 25) + cell.seed
    result = invented(cell, lambda _: right)
    for point in result["notes"]["grid"][: 1 - cell.seed]:
        point["loss"] = float("nan")
    return result


@contextmanager
def undrawn() -> Iterator[None]:
    """Within the block figures are not drawn: each is an empty SVG that says what it would show."""

    def empty(paint: object, key: str, alt: str, **_: object) -> str:
        return f'<svg role="img" aria-label="{escape(alt)}"></svg>'

    with patch("fewshift.report.figures.drawn", empty), patch("fewshift.report.run_figures.drawn", empty):
        yield
