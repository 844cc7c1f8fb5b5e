"""Grids that somebody sent: text is data, and a mistake is one sentence that names the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.features import load_grid
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.grid_format import with_precision
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.runs import run_grids

GRID = """
title = "Toy"
dataset = "toy"
source = "SOURCE"
targets = ["here", "there -> here"]
seeds = [0, 7]
rows = [{method = "source"}]
"""

SMALL = """
title = "Toy"
dataset = "digits"
source = "mnist"
targets = ["uci"]
seeds = [0]
max_test = 20
rows = [{method = "source"}, {method = "adabn", shots = [1]}]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "toy.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_words_in_braces_stand_for_the_cells_own(tmp_path: Path) -> None:
    grid = Grid.load(written(tmp_path, GRID.replace("SOURCE", "net-{target}-{origin}-{seed}")))
    assert [cell.source for cell in grid.cells()] == [
        "net-here--0", "net-here--7", "net-here-there-0", "net-here-there-7",
    ]  # fmt: skip


@pytest.mark.parametrize("own", ["", 'precision = "float32"  # as ever\n'])
def test_another_precision_changes_a_grids_file_in_nothing_else(tmp_path: Path, own: str) -> None:
    rows = "".join('[[rows]]\nmethod = "lccs"\nshots = [1]\nlabel = "precision = 1"\n' for _ in range(2))
    text = GRID.replace('rows = [{method = "source"}]\n', own) + rows
    halved = Grid.load(written(tmp_path, with_precision(text, "bfloat16")))
    assert halved == replace(Grid.load(written(tmp_path, text)), precision="bfloat16")
    assert with_precision(GRID, "bfloat16").startswith(GRID)  # rows in brackets, without a table of their own


def test_a_run_keeps_its_grids_with_the_precision_it_was_given(tmp_path: Path) -> None:
    grid = written(tmp_path, SMALL)
    run_grids([grid], tmp_path / "run", precision="bfloat16")
    kept = Grid.load(tmp_path / "run" / "grids" / "toy.toml")
    assert kept.precision == "bfloat16"
    records = Records(tmp_path / "run").read()
    assert {cell.key for cell in kept.cells()} == records.keys()
    assert {record["cell"]["precision"] for record in records.values()} == {"bfloat16"}
    for precision in ("float16", ""):
        with pytest.raises(FewshiftError, match="is unknown: choose one of float32, bfloat16"):
            run_grids([grid], tmp_path / "other", precision=precision)
    with pytest.raises(FewshiftError, match="compares features, always in float32: run it without a precision"):
        run_grids(["features_digits"], tmp_path / "other", precision="bfloat16")
    assert not (tmp_path / "other").exists()


def test_a_target_that_looks_like_a_word_in_braces_is_not_replaced_again(tmp_path: Path) -> None:
    text = GRID.replace("SOURCE", "net-{target}").replace('"here", "there -> here"', '"{seed}"')
    assert {cell.source for cell in Grid.load(written(tmp_path, text)).cells()} == {"net-{seed}"}


@pytest.mark.parametrize(
    "source",
    [
        "{seed.__class__}",
        "{seed.__class__.__init__.__globals__}",
        "{target[0]}",
        "{target!r}",
        "{target:>9}",
        "{target:>999999999999}",
        "{}",
        "{0}",
        "{other}",
        "{{target}}",
        "{",
        "}",
    ],
)
@pytest.mark.parametrize("place", ["the grid", "a row"])
def test_other_things_in_braces_are_one_sentence(tmp_path: Path, source: str, place: str) -> None:
    text = GRID.replace("SOURCE", source if place == "the grid" else "net")
    if place == "a row":
        text = text.replace('method = "source"', f'method = "source", source = "{source}"')
    with pytest.raises(FewshiftError, match=r"toy\.toml has source = .*\{target\}, \{origin\}, \{seed\} stand for"):
        Grid.load(written(tmp_path, text))


FEATURES = """
title = "Features"
dataset = "toy"
source = "net"
[[comparisons]]
label = "shift"
first = {domain = "north"}
second = {domain = "south"}
"""
WRONG = {
    "rows of a number": (GRID, 'rows = [{method = "source"}]', "rows = 5"),
    "rows of words": (GRID, 'rows = [{method = "source"}]', 'rows = ["source"]'),
    "a huge seed": (GRID, "[0, 7]", f"[{10**30}]"),
    "digits": (GRID, "[0, 7]", f"[{'9' * 5000}]"),
    "depth": (GRID, 'rows = [{method = "source"}]', f"rows = {'[' * 5000}{']' * 5000}"),
    "comparisons of a number": (FEATURES, FEATURES[FEATURES.index("[[") :], "comparisons = 5"),
    "a title of numbers": (FEATURES, '"Features"', "5"),
    "a label of numbers": (FEATURES, '"shift"', "5"),
    "a domain of numbers": (FEATURES, '"north"', "5"),
    "a source of numbers": (FEATURES, '"net"', "5"),
    "images in words": (FEATURES, 'label = "shift"', 'label = "shift"\nimages = "many"'),
}


@pytest.mark.parametrize(("text", "old", "new"), WRONG.values(), ids=WRONG.keys())
def test_a_value_of_the_wrong_kind_is_one_sentence(tmp_path: Path, text: str, old: str, new: str) -> None:
    assert old in text
    with pytest.raises(FewshiftError, match=r"toy\.toml (has|is no TOML file)") as caught:
        load_grid(written(tmp_path, text.replace(old, new)))
    assert "\n" not in str(caught.value)
