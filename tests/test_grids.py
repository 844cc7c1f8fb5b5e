"""The grids: every file loads, every cell can be built, and the paper's values are the printed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fewshift.bench.grid import Grid, Row
from fewshift.method import Needs
from fewshift.methods import METHODS

GRIDS = sorted((Path(__file__).parents[1] / "grids").glob("*.toml"))
DOMAINS = {
    "digits": {"uci"},
    "pacs": {"art_painting", "cartoon", "photo", "sketch"},
    "visda": {"validation"},
    "camelyon17": {"test"},
    "iwildcam": {"test"},
    "office31": {"amazon", "dslr", "webcam"},
    "officehome": {"Art", "Clipart", "Product", "Real World"},
}
each_grid = pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)


def grid(name: str) -> Grid:
    return Grid.load(GRIDS[0].parent / f"{name}.toml")


def row_of(name: str, label: str, **condition: object) -> Row:
    """The row with this label, the first of which the condition has these values."""
    return next(
        row
        for row in grid(name).rows
        if row.label == label and all(getattr(row.conditions[0], key) == value for key, value in condition.items())
    )


def printed(row: Row) -> list[tuple[str, str | None, float]]:
    """The paper's values as (target, shots or None, value)."""
    found: list[tuple[str, str | None, float]] = []
    for target, value in (row.paper or {}).items():
        found += [(target, k, v) for k, v in value.items()] if isinstance(value, dict) else [(target, None, value)]
    return found


def test_there_is_a_grid_for_every_table_that_is_about_classification():
    names = {path.stem for path in GRIDS}
    tables = ("main_comparison", "streaming", "few_shot", "office31", "officehome", "stages", "choice_of_n")
    tables += ("tied_greedy_convex", "classifier", "selected_v", "objective", "cost", "smoke")
    assert all(any(name.startswith(table) for name in names) for table in tables)


@each_grid
def test_cells_are_there_and_each_is_another_experiment(path):
    cells = Grid.load(path).cells()
    assert cells
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(cell.build().name == cell.method for cell in cells)


@each_grid
def test_a_file_says_what_it_mirrors_and_has_three_seeds(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert len(set(Grid.load(path).seeds)) >= 3


@each_grid
def test_targets_are_domains_of_the_data_set_and_no_network_is_judged_on_its_own(path):
    it = Grid.load(path)
    assert set(it.targets) <= DOMAINS[it.dataset]
    assert len(set(it.targets)) == len(it.targets)
    assert not any(it.source == f"{it.dataset}-from-{target.lower().replace(' ', '_')}" for target in it.targets)


@each_grid
def test_rows_are_told_apart_by_label_and_condition(path):
    seen = [(row.label, condition) for row in Grid.load(path).rows for condition in row.conditions]
    assert all(label for label, _ in seen)
    assert len(set(seen)) == len(seen)


@each_grid
def test_shots_are_given_to_those_who_look_at_a_support_and_fit_the_one_held_out(path):
    it = Grid.load(path)
    for row in it.rows:
        needs = METHODS[row.method].needs
        assert needs is Needs.EITHER or bool(row.shots) == (needs is Needs.SUPPORT)
        assert all(1 <= shots <= it.largest_support for shots in row.shots)


@each_grid
def test_the_papers_values_are_percentages_of_cells_of_the_row(path):
    it = Grid.load(path)
    for row in it.rows:
        values = printed(row)
        assert all(target in it.targets for target, _, _ in values)
        assert {k for _, k, _ in values} <= ({str(shots) for shots in row.shots} or {None})
        assert all(type(value) is float and 0 <= value <= 100 for _, _, value in values)
        assert not values or {target for target, _, _ in values} == set(it.targets)


def test_smoke_needs_no_data_root_and_is_small():
    it = grid("smoke")
    assert (it.dataset, it.source, it.targets) == ("digits", "mnist", ("uci",))
    assert it.max_test == 500
    assert len(it.cells()) == 15


def test_pacs_grids_cap_their_test_images_and_no_other_table_does():
    capped = {path.stem for path in GRIDS if Grid.load(path).max_test is not None}
    assert capped == {path.stem for path in GRIDS if "pacs" in path.stem} | {"smoke"}


@pytest.mark.parametrize(
    ("name", "label", "condition", "target", "shots", "value"),
    [
        ("main_comparison_pacs", "Source model", {}, "art_painting", None, 76.4),
        ("main_comparison_pacs", "+ Tent (SGD)", {}, "sketch", None, 68.2),
        ("main_comparison_pacs", "+ LCCS", {}, "sketch", "10", 79.4),
        ("main_comparison_pacs", "+ LCCS (released code)", {}, "art_painting", "5", 84.0),
        ("main_comparison_camelyon17", "+ Tent (Adam)", {}, "test", None, 64.1),
        ("main_comparison_iwildcam", "+ LCCS", {}, "test", "1", 31.8),
        ("main_comparison_visda", "+ Test-time BN", {}, "validation", None, 60.7),
        ("streaming_pacs", "+ Test-time BN", {"order": "sequential"}, "sketch", None, 27.4),
        ("streaming_pacs", "+ Tent (Adam)", {"batch_size": 64, "alpha": None}, "sketch", None, 80.1),
        ("streaming_pacs", "+ LCCS", {"alpha": 100}, "photo", "5", 92.5),
        ("streaming_visda", "+ Test-time BN", {"batch_size": 128, "alpha": None}, "validation", None, 61.9),
        ("streaming_visda", "+ Tent (SGD)", {"batch_size": 8, "alpha": 100}, "validation", None, 46.7),
        ("few_shot_pacs", "DELTA", {}, "sketch", "10", 75.4),
        ("few_shot_pacs", "FLUTE", {}, "art_painting", "1", 67.0),
        ("few_shot_camelyon17", "finetune BN", {}, "test", "5", 87.7),
        ("few_shot_visda", "finetune classifier", {}, "validation", "10", 77.4),
        ("office31_amazon", "LCCS*", {}, "dslr", "5", 91.8),
        ("office31_dslr", "SDDA", {}, "webcam", None, 98.2),
        ("office31_webcam", "SHOT", {}, "amazon", None, 74.3),
        ("officehome_art", "LCCS*", {}, "Real World", "5", 77.0),
        ("officehome_real_world", "SFDA", {}, "Clipart", None, 50.5),
        ("stages_visda", "gradient update", {}, "validation", "10", 68.6),
        ("choice_of_n_visda", "90% explained var", {}, "validation", "10", 71.4),
        ("choice_of_n_camelyon17", "n = 10", {}, "test", "1", 76.9),
        ("tied_greedy_convex_visda", "greedy initialization", {}, "validation", "1", 66.1),
        ("classifier_visda", "Nearest-centroid", {}, "validation", "1", 52.9),
    ],
)
def test_a_value_is_the_printed_one(name, label, condition, target, shots, value):
    assert (target, shots, value) in printed(row_of(name, label, **condition))


# the averages over domains which the paper prints beside its domains check every value that enters them; left out
# are two that its own entries contradict (few-shot DELTA at k = 10; streaming LCCS, alpha = 100, k = 1)
@pytest.mark.parametrize(
    ("name", "label", "condition", "average"),
    [
        ("main_comparison_pacs", "Source model", {}, [78.8]),
        ("main_comparison_pacs", "+ Test-time BN", {}, [81.1]),
        ("main_comparison_pacs", "+ Tent (Adam)", {}, [83.4]),
        ("main_comparison_pacs", "+ Tent (SGD)", {}, [81.4]),
        ("main_comparison_pacs", "+ LCCS", {}, [81.6, 85.8, 87.6]),
        ("main_comparison_pacs_mixstyle", "Source model", {}, [83.1]),
        ("main_comparison_pacs_mixstyle", "+ Tent (SGD)", {}, [84.4]),
        ("streaming_pacs", "+ Test-time BN", {"batch_size": 8}, [78.6]),
        ("streaming_pacs", "+ Test-time BN", {"batch_size": 32}, [83.3]),
        ("streaming_pacs", "+ Tent (Adam)", {"batch_size": 64}, [86.4]),
        ("streaming_pacs", "+ Tent (Adam)", {"order": "sequential"}, [37.1]),
        ("streaming_pacs", "+ Tent (Adam)", {"alpha": 100, "batch_size": 128}, [67.7]),
        ("streaming_pacs", "+ LCCS", {"alpha": 10}, [81.3, 84.9, 86.8]),
        ("streaming_pacs", "Source model", {"alpha": 100}, [76.9]),
        ("few_shot_pacs", "AdaBN", {}, [82.9, 85.5, 85.8]),
        ("few_shot_pacs", "finetune BN", {}, [79.0, 84.3, 85.4]),
        ("few_shot_pacs", "finetune classifier", {}, [82.5, 83.7, 83.8]),
        ("few_shot_pacs", "finetune feat. extractor", {}, [83.6, 86.0, 86.1]),
        ("few_shot_pacs", "L2", {}, [84.4, 85.8, 85.6]),
        ("few_shot_pacs", "L2-SP", {}, [84.4, 85.8, 85.6]),
        ("few_shot_pacs", "Late Fusion", {}, [83.2, 83.6, 83.6]),
        ("few_shot_pacs", "FLUTE", {}, [73.4, 85.8, 88.1]),
        ("few_shot_pacs", "LCCS", {}, [84.4, 87.1, 88.8]),
    ],
)
def test_domains_average_to_the_printed_average(name, label, condition, average):
    row = row_of(name, label, **condition)
    columns: dict[str | None, list[float]] = {}
    for _, shots, value in printed(row):
        columns.setdefault(shots, []).append(value)
    assert [sum(it) / len(it) for it in columns.values()] == pytest.approx(average, abs=0.1)
