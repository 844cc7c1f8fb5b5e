"""Pages and figures of the documentation, written from invented records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.result_docs import KEPT, write_docs
from fewshift.report import compared_figures
from tests.helpers.runs import FEATURES, embedded, fill, invented

PLACES = """title = "Two places"
dataset = "toy"
source = "net-{target}"
targets = ["north", "south"]
seeds = [0, 1]
paper_networks = "ResNet-18, ERM"

[[rows]]
method = "source"
label = "Source model"
paper = {north = 55.0, south = 65.0}

[[rows]]
method = "lccs"
label = "LCCS"
shots = [1, 5]
paper.average = {1 = 70.0, 5 = 80.0}
"""

# 50 images of each of three classes; 1.8e9 seconds are 2027-01-15
PAGE = f"""# Two places

<!-- Written by `fewshift report` from records: what is changed here by hand is lost. -->

toy; targets north and south; 2 draws; 150 test images of each. Source networks: `net-{{target}}` (timm:resnet18, erm, 224 px). The paper's values, in brackets, are of ResNet-18, ERM.

    fewshift bench runs/run/grids/two_places.toml --out runs/run --data-root DATA --weights NETWORKS
    fewshift report runs/run --docs docs

Measured on 2027-01-15; commit 1234567, fewshift 0.1.0, torch 2.6.0.

Bold is the best of a column and italics the second, where the lead over the next, seed by seed, exceeds its standard error.

Accuracy in %, mean ± population standard deviation (n seeds) [paper]. Settings are fixed per method; none was chosen on test labels.

| method | k | north | south | average |
|---|---|---|---|---|
| Source model | - | 51.0 ± 1.0 (2) [55.0] | 61.0 ± 1.0 (2) [65.0] | 56.0 ± 1.0 (2) [60.0] |
| LCCS | 1 | _61.0 ± 1.0 (2)_ | _71.0 ± 1.0 (2)_ | _66.0 ± 1.0 (2) [70.0]_ |
| LCCS | 5 | **71.0 ± 1.0 (2)** | **81.0 ± 1.0 (2)** | **76.0 ± 1.0 (2) [80.0]** |

{KEPT}
"""  # noqa: E501 - a page has long lines


def right(cell: Cell) -> int:
    """Of 50: 25 by the source network in the north, 5 more in the south and with each step of k, 1 more in draw 1."""
    return 25 + 5 * (cell.target == "south") + {None: 0, 1: 5, 5: 10}[cell.shots] + cell.seed


def result(cell: Cell) -> dict[str, Any]:
    made = invented(cell, right)
    network = {"arch": "timm:resnet18", "algorithm": "erm", "pixels": 224}
    return made | {"network": network, "versions": made["versions"] | {"commit": "1234567"}}


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of few pixels are quick to write."""
    monkeypatch.setattr(compared_figures, "DOTS", 20)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fill(tmp_path / "run", "two_places", PLACES, result)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_page_is_what_a_person_would_write(run, tmp_path):
    docs = tmp_path / "docs"
    written = write_docs([run], docs)
    assert written.pages == (docs / "two-places.md",)
    assert (docs / "two-places.md").read_text("utf-8") == PAGE


def test_the_same_records_give_the_same_bytes(run, tmp_path):
    docs = tmp_path / "docs"
    write_docs([run], docs)
    first = bytes_of(docs)
    write_docs([run], docs)
    assert bytes_of(docs) == first
    assert first.keys() == {"two-places.md", "accuracy-over-k.png"}
    assert first["accuracy-over-k.png"].startswith(b"\x89PNG")


def test_what_was_written_by_hand_is_kept_and_the_rest_is_written_again(run, tmp_path):
    docs = tmp_path / "docs"
    write_docs([run], docs)
    page = docs / "two-places.md"
    by_hand = "\nThe south is *warmer*.\n\n| a | table |\n|---|---|\n\n    indented\n"
    page.write_text(page.read_text("utf-8").replace("51.0", "99.9") + by_hand, "utf-8")
    write_docs([run], docs)
    assert page.read_text("utf-8") == PAGE + by_hand


def test_a_page_that_is_all_by_hand_is_not_overwritten_and_nothing_else_is_written(run, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "two-places.md").write_text("# Mine\n")
    fill(run, "another", PLACES.replace("Two places", "Another"), result)
    with pytest.raises(FewshiftError, match=r"two-places\.md was not written by `fewshift report`: move it"):
        write_docs([run], docs)
    assert bytes_of(docs) == {"two-places.md": b"# Mine\n"}


def test_a_grid_in_two_runs_is_refused(run, tmp_path):
    other = fill(tmp_path / "other", "two_places", PLACES, result)
    with pytest.raises(FewshiftError, match="the grid two_places is in two runs, run and other"):
        write_docs([run, other], tmp_path / "docs")


def test_records_without_network_and_commit_say_so_and_missing_cells_are_counted(tmp_path):
    run = fill(
        tmp_path / "run", "two_places", PLACES, lambda cell: invented(cell, right), keep=lambda cell: cell.seed == 0
    )
    write_docs([run], tmp_path / "docs")
    page = (tmp_path / "docs" / "two-places.md").read_text("utf-8")
    assert "Source networks: `net-{target}`. The paper's" in page
    assert "; commit not recorded, fewshift 0.1.0, torch 2.6.0. 6 of 12 cells have a result.\n" in page
    assert "1 draw; " in page
    assert "Bold is" not in page  # a single draw has no standard error


def test_a_grid_of_the_package_is_called_by_its_name_while_it_is_the_same(tmp_path):
    from fewshift.lab.bench.features import GRIDS

    text = (GRIDS / "smoke.toml").read_text("utf-8")
    halved = 'precision = "bfloat16"\n' + text
    grids = {"same": text, "changed": text.replace("seeds = [0, 1, 2]", "seeds = [0, 1]"), "halved": halved}
    for name, grid in grids.items():
        write_docs([fill(tmp_path / name, "smoke", grid)], tmp_path / f"{name}-docs")
    command = {name: (tmp_path / f"{name}-docs" / "smoke.md").read_text("utf-8") for name in grids}
    assert "\n    fewshift bench smoke --out runs/halved --precision bfloat16\n" in command["halved"]
    assert "\n    fewshift bench smoke --out runs/same\n" in command["same"]
    assert "\n    fewshift bench runs/changed/grids/smoke.toml --out runs/changed\n" in command["changed"]


def test_source_networks_of_rows_are_named(tmp_path):
    grid = PLACES.replace('label = "LCCS"', 'label = "LCCS"\nsource = "other-{target}"')
    write_docs([fill(tmp_path / "run", "two_places", grid, result)], tmp_path / "docs")
    page = (tmp_path / "docs" / "two-places.md").read_text("utf-8")
    assert "Source networks: `net-{target}` and `other-{target}` (timm:resnet18" in page


def test_a_grid_without_results_has_no_page(run, tmp_path):
    fill(run, "failed", PLACES.replace("net-", "other-"), lambda _: {"error": "it was dark"})
    assert [path.name for path in write_docs([run], tmp_path / "docs").pages] == ["two-places.md"]


def test_features_and_judged_adaptations_have_pages_of_their_own_kind(tmp_path):
    def judged(cell: Cell) -> dict[str, Any]:
        accuracy = {"source": 0.5, "candidate": 0.6, "returned": 0.6}
        return invented(cell, right) | {"trust": {"accuracy": accuracy, "accepted": True, "reason": "so", "gain": None}}

    run = fill(tmp_path / "run", "features", FEATURES, embedded)
    shots_alone = PLACES[: PLACES.index("[[rows]]")] + 'validate = "cv"\n' + PLACES[PLACES.rindex("[[rows]]") :]
    fill(run, "guarded", shots_alone, judged)
    write_docs([run], tmp_path / "docs")
    features, guarded = ((tmp_path / "docs" / f"{name}.md").read_text("utf-8") for name in ("features", "guarded"))
    assert "| (a) shift | 0.25 | 1.50 |" in features
    assert "toy; 300 images a sample. Source networks: `net`." in features
    assert "| LCCS | 1 | 4 | 50.0 ± 0.0 | +10.0 ± 0.0 | +10.0 ± 0.0 | - | 100.0 % |" in guarded
    assert "- Met: 100.0 % of the attainable gain was kept" in guarded
    assert guarded.index("attainable gain was kept") < guarded.index("## Scores of the networks that were returned")
