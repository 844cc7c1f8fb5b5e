"""Grids that somebody sent: text is data, and a mistake is one sentence that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.features import load_grid
from fewshift.lab.bench.grid import Grid

GRID = """
title = "Toy"
dataset = "toy"
source = "SOURCE"
targets = ["here", "there -> here"]
seeds = [0, 7]
rows = [{method = "source"}]
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
