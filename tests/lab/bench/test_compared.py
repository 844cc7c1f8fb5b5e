"""The data of the figures that stand beside the paper's, from invented records of several grids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.compared import averaged_grids, over_batch_sizes, over_imbalance, over_k
from fewshift.lab.bench.features import GRIDS, load_grid
from fewshift.lab.bench.folder import open_run
from fewshift.lab.bench.grid import Grid
from fewshift.report.compared_figures import METHOD_STYLES, ComparedCurve
from tests.helpers.runs import fill, invented

HEAD = """title = "{0}"
dataset = "toy"
source = "net"
targets = ["north", "south"]
seeds = [0, 1]
"""
PAPER = 'paper_networks = "ResNet-18, {0}"\n'


def row(method: str, **keys: str) -> str:
    lines = [f'method = "{method}"', *(f"{key.replace('__', '.')} = {value}" for key, value in keys.items())]
    return "\n[[rows]]\n" + "\n".join(lines) + "\n"


SHOTS = (
    HEAD.format("Few-shot")
    + PAPER.format("MixStyle")
    + row("adabn", shots="[1, 5]", paper__average="{1 = 60.0, 5 = 61.0}")
    + row("lccs", shots="[1, 5]", paper__average="{1 = 70.0, 5 = 80.0}")
    + row("lccs", label='"n = 1"', settings="{n = 1}", shots="[1, 5, 10]")
)
STREAMS = (
    HEAD.format("Streams")
    + PAPER.format("MixStyle")
    + row("source", paper="{north = 40.0, south = 50.0}")
    + "".join(
        row("testtime-bn", conditions=f"[{{batch_size = {size}}}]", paper__average=str(50.0 + size))
        for size in (8, 128)
    )
    + row("testtime-bn", conditions='[{order = "sequential"}]', paper__average="1.0")
    + row("lccs", shots="[1, 5]", paper__average="{1 = 70.0, 5 = 80.0}")
    + row("source", conditions="[{alpha = 10.0}]", paper__average="30.0")
    + row("testtime-bn", conditions="[{alpha = 10.0, batch_size = 8}]")
    + row("testtime-bn", conditions="[{alpha = 10.0, batch_size = 128}]", paper__average="31.0")
    + row("lccs", shots="[1, 5]", conditions="[{alpha = 10.0}]", paper__average="{1 = 1.0, 5 = 2.0}")
)
AUTO = HEAD.format("auto").replace("[0, 1]", "[0, 1, 2]") + row("lccs", shots="[1, 5]") + row("auto", shots="[1, 5]")
ERM = (
    HEAD.format("ERM")
    + PAPER.format("ERM")
    + row("source", paper__average="11.0")
    + row("lccs", shots="[1, 5]", paper__average="{1 = 12.0, 5 = 13.0}")
)

BASE = {"source": 10, "testtime-bn": 15, "adabn": 16, "lccs": 20, "auto": 30}


def right(cell: Cell) -> int:
    """Of 50 images, by hand: the base of the method, k, one for each draw, two in the south, less under a long tail."""
    streamed = (cell.condition.batch_size == 128) * 3 if cell.method == "testtime-bn" else 0
    tail = 4 if cell.condition.alpha else 0
    return BASE[cell.method] + (cell.shots or 0) + cell.seed + 2 * (cell.target == "south") + streamed - tail


def percent(of_fifty_in_the_north: int, draws: int = 2) -> list[float]:
    """The mean of both places: one of 50 more than in the north, and one more with each draw."""
    return [2.0 * (of_fifty_in_the_north + 1 + draw) for draw in range(draws)]


def result(cell: Cell) -> dict[str, Any]:
    return invented(cell, right)


def gathered(folder: Path, **grids: str):
    for name, text in grids.items():
        fill(folder, name, text, result)
    return averaged_grids([open_run(folder)])


def curves_of(figure) -> dict[str, ComparedCurve]:
    assert figure is not None
    return {curve.method: curve for curve in figure.curves}


def approx(points) -> Any:
    return {x: pytest.approx(value) for x, value in points.items()}


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    return gathered(tmp_path_factory.mktemp("run"), shots=SHOTS, streams=STREAMS, auto=AUTO, erm=ERM)


def test_against_k_every_method_has_its_own_values_and_the_papers(grids):
    figure = over_k(grids)
    curves = curves_of(figure)
    assert list(curves) == ["source", "adabn", "lccs", "auto"]
    assert figure.ticks == {1: "1", 5: "5"}
    assert curves["lccs"].ours == approx({1: percent(21), 5: percent(25)})
    assert curves["lccs"].paper == {1: 70.0, 5: 80.0}
    assert curves["auto"].ours == approx({1: percent(31, 3), 5: percent(35, 3)})
    assert curves["auto"].paper == {}
    assert curves["source"].level
    assert list(curves["source"].ours.values()) == [pytest.approx(percent(10))]
    assert list(curves["source"].paper.values()) == [45.0]  # the mean of its two places
    assert [curve.name for curve in figure.curves] == ["source network", "AdaBN", "LCCS", "auto"]


def test_the_papers_values_of_other_networks_do_not_mix(grids):
    figure = over_k(grids)
    assert figure.note.endswith("Networks: net. The paper's: ResNet-18, MixStyle.")
    assert (
        "toy, mean over 2 targets, 150 test images of each. Band: one standard deviation over 2 to 3 draws."
        in figure.note
    )
    others = [grid for grid in grids if grid.grid.title in ("ERM", "auto")]
    assert curves_of(over_k(others))["source"].paper == {0: 11.0}
    assert over_k(others).note.endswith("The paper's: ResNet-18, ERM.")


def test_against_batch_size_only_methods_that_see_batches_move(grids):
    figure = over_batch_sizes(grids)
    curves = curves_of(figure)
    assert list(curves) == ["source", "testtime-bn", "lccs", "auto"]
    assert figure.ticks == {8: "8", 128: "128"}
    assert curves["testtime-bn"].ours == approx({8: percent(15), 128: percent(18)})
    assert curves["testtime-bn"].paper == {8: 58.0, 128: 178.0}
    assert [method for method, curve in curves.items() if curve.level] == ["source", "lccs", "auto"]
    assert list(curves["lccs"].ours.values()) == [pytest.approx(percent(25))]
    assert list(curves["lccs"].paper.values()) == [80.0]
    assert [curve.name for curve in figure.curves][2:] == ["LCCS, k = 5", "auto, k = 5"]


def test_against_imbalance_streams_come_in_the_largest_batches(grids):
    figure = over_imbalance(grids)
    curves = curves_of(figure)
    assert list(curves) == ["source", "testtime-bn", "lccs"]  # auto was run with classes as found alone
    assert figure.ticks == {1: "as found", 10: "10"}
    assert curves["testtime-bn"].ours == approx({1: percent(18), 10: percent(14)})
    assert curves["testtime-bn"].paper == {1: 178.0, 10: 31.0}
    assert curves["lccs"].ours == approx({1: percent(25), 10: percent(21)})
    assert curves["lccs"].paper == {1: 80.0, 10: 2.0}
    assert curves["source"].paper == {1: 45.0, 10: 30.0}


def test_grids_join_only_where_data_sources_targets_and_networks_are_the_same(tmp_path):
    lone = ["source", "lccs"]
    for name, other in {
        "source": AUTO.replace('"net"', '"other"'),
        "dataset": AUTO.replace('"toy"', '"toys"'),
        "targets": AUTO.replace('["north", "south"]', '["north"]'),
    }.items():
        figure = over_k(gathered(tmp_path / name, erm=ERM, auto=other))
        assert list(curves_of(figure)) == lone, name

    def made_by(arch: str):
        return lambda cell: result(cell) | {"network": {"arch": arch}}

    for arch, methods in (("resnet18", ["source", "lccs", "auto"]), ("resnet50", lone)):
        runs = [fill(tmp_path / arch / "erm", "erm", ERM, made_by("resnet18"))]
        runs.append(fill(tmp_path / arch / "auto", "auto", AUTO, made_by(arch)))
        figure = over_k(averaged_grids(map(open_run, runs)))
        assert list(curves_of(figure)) == methods
        assert "Networks: resnet18." in figure.note


def test_a_seed_that_lacks_a_target_does_not_count(tmp_path):
    fill(tmp_path, "erm", ERM, result, keep=lambda cell: (cell.seed, cell.target) != (1, "south"))
    curves = curves_of(over_k(averaged_grids([open_run(tmp_path)])))
    assert curves["lccs"].ours == approx({1: percent(21, 1), 5: percent(25, 1)})


def test_without_a_line_that_moves_there_is_no_figure(tmp_path):
    grids = gathered(tmp_path, erm=ERM.replace("[1, 5]", "[5]"))
    assert [draw(grids) for draw in (over_k, over_batch_sizes, over_imbalance)] == [None, None, None]


def test_every_method_of_the_figures_has_a_style_of_its_own():
    assert len({style.colour for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)
    assert len({style.name for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)


def test_grids_with_values_of_the_paper_for_one_kind_of_network_name_it():
    several = {"segmentation", "sources_pacs"}  # their rows are of different networks
    grids = {path.stem: load_grid(path) for path in GRIDS.glob("*.toml")}
    printed = {name for name, grid in grids.items() if isinstance(grid, Grid) and any(row.paper for row in grid.rows)}
    named = {name for name, grid in grids.items() if isinstance(grid, Grid) and grid.paper_networks}
    assert named == printed - several
