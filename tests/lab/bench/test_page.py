"""The page of a run: every grid with its table, its gaps, and exactly the figures its records allow."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.runs import report_run
from tests.helpers.pages import Page
from tests.helpers.runs import (
    ALPHAS,
    BN,
    FEATURES,
    GRIDS,
    HEAD,
    LCCS,
    ONE_POINT,
    PER_CLASS,
    PLAIN,
    SOURCE,
    embedded,
    fill,
    invented,
    score_of,
    undrawn,
)

KINDS = {  # how the caption of a kind of figure begins, or what only it says
    "batch": "against test batch size",
    "alpha": "against alpha",
    "k": "against k",
    "v": "the v that the search chose",
    "objective": "of a fixed v (above)",
    "layers": "in each layer",
    "adapt": "Seconds of adaptation:",
    "answer": "Milliseconds for an answer",
    "confusion": "for each true class (row)",
    "features": "standardisation by layer",
}


def page_of(folder: Path, text: str, drawn: bool = False, **how: Any) -> Page:
    """The page of one grid; without `drawn` its figures are empty and say what they show."""
    fill(folder, "grid", text, **how)
    with nullcontext() if drawn else undrawn():
        return Page(report_run(folder).page)


def kinds(page: Page) -> set[str]:
    return {kind for kind, words in KINDS.items() if words in page.words}


def alt(page: Page, begins: str) -> str:
    """What the one figure says that begins so."""
    [label] = [svg["aria-label"] for svg in page.all("svg") if str(svg["aria-label"]).startswith(begins)]
    return str(label)


def over(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f} ± {statistics.pstdev(values):.1f}"


def percents(shots: int | None = None, method: str = "lccs", batch: int = 128, alpha: float = 1) -> list[float]:
    """Per seed the mean over both targets, written out."""
    base = 20 if method == "source" else 25 + (shots or 0)
    return [
        statistics.fmean(
            100 * (base + seed * 2 + south * 3 + batch // 32 - int(alpha) // 5) / PER_CLASS for south in (0, 1)
        )
        for seed in (0, 1, 2)
    ]


@pytest.fixture(scope="module")
def whole(page_of_all_grids: Path) -> Page:
    return Page(page_of_all_grids)


@pytest.fixture(scope="module")
def sections(whole: Page) -> dict[str, Page]:
    """The part of each grid, by the name of its file."""
    parts = re.findall(r"<section.*?</section>", whole.source, flags=re.DOTALL)
    return dict(zip(sorted(GRIDS), map(Page, parts), strict=True))


def test_the_page_needs_nothing_but_itself(whole: Page) -> None:
    assert not {tag for tag, _ in whole.elements} & {"script", "link", "iframe", "object", "embed", "base", "img"}
    addresses = [
        attributes[name]
        for _, attributes in whole.elements
        for name in ("src", "href", "xlink:href")
        if name in attributes
    ]
    assert all(str(address).startswith("#") for address in addresses)
    assert not re.search(r"@import|url\((?!#)", whole.source)


def test_the_page_is_well_formed_and_its_ids_are_unique(whole: Page) -> None:
    assert whole.mismatched == []
    assert whole.open == []
    ids = [attributes["id"] for _, attributes in whole.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', whole.source)) <= set(ids)


def test_every_figure_says_what_it_shows(whole: Page) -> None:
    assert len(whole.all("figure")) == len(whole.all("svg")) == len(whole.all("figcaption")) > 20
    for svg in whole.all("svg"):
        assert svg["role"] == "img"
        assert len(str(svg["aria-label"])) > 30


def test_every_colour_of_a_figure_follows_the_theme(whole: Page) -> None:
    for svg in re.findall(r"<svg.*?</svg>", whole.source, flags=re.DOTALL):
        bare = re.sub(r"var\(--\w+, #\w{6}\)", "", svg)
        assert not re.search(r"(fill|stroke): (#|black|white)", bare)


def test_the_page_is_small(page_of_all_grids: Path) -> None:
    assert page_of_all_grids.stat().st_size < 1_500_000  # eight grids


def test_several_grids_have_a_list_of_contents(whole: Page, tmp_path: Path) -> None:
    assert [link["href"] for link in whole.all("a")] == [f"#grid-{number}" for number in range(1, len(GRIDS) + 1)]
    assert page_of(tmp_path / "run", ONE_POINT).all("a") == []


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    pages = [
        report_run(fill(tmp_path / where / "run", "one", ONE_POINT)).page.read_bytes() for where in ("here", "there")
    ]
    assert pages[0] == pages[1]


def test_the_page_tells_when_with_what_and_how_to_go_on(tmp_path: Path) -> None:
    page = page_of(tmp_path / "my run", ONE_POINT)
    assert "12 of 12 experiments done, 2027-01-15 08:00 UTC to 2027-01-15 08:11 UTC, in 6.0 minutes" in page.words
    assert "fewshift 0.1.0, torch 2.6.0" in page.words
    assert "fewshift bench 'my run'/grids/*.toml --out 'my run'" in page.words


LEARNED = {"v", "layers", "adapt", "answer", "confusion"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", {"k", *LEARNED}),
        ("batches", {"batch", *LEARNED}),
        ("alphas", {"alpha", *LEARNED}),
        ("objective", {"objective", *LEARNED}),
        ("many", {"k", *LEARNED}),
        ("seconds", {"k", *LEARNED}),
        ("chosen", {"k", *LEARNED}),
    ],
)
def test_each_kind_of_figure_appears_exactly_when_its_data_is_there(
    sections: dict[str, Page], name: str, expected: set[str]
) -> None:
    assert kinds(sections[name]) == expected


def test_rows_with_one_point_or_no_labels_have_fewer_figures(tmp_path: Path) -> None:
    assert kinds(page_of(tmp_path / "one", ONE_POINT)) == LEARNED
    source = page_of(tmp_path / "source", HEAD.format(title="x") + SOURCE)
    assert kinds(source) == {"adapt", "answer", "confusion"}


def test_a_grid_without_records_has_a_table_and_no_figures(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", PLAIN, keep=lambda _: False)
    assert page.all("svg") == []
    assert "0 of 18 cells done, 0 failed, 18 missing" in page.words


def test_the_table_has_mean_spread_and_the_papers_value(tmp_path: Path) -> None:
    text = PLAIN.replace("shots = [1, 5]", "shots = [1, 5]\npaper.north = {1 = 61.5}")
    page = page_of(tmp_path / "run", text)
    north = over([100 * (25 + 1 + seed * 2 + 4) / PER_CLASS for seed in (0, 1, 2)])
    assert f"LCCS 1 {north} paper 61.5" in page.words
    assert f"<strong>{over(percents(5))}</strong>" in page.source.replace("&plusmn;", "±")  # the average
    assert "Accuracy in %: mean ± population standard deviation over n = 3 seeds" in page.words
    assert "none was chosen on test labels" in page.words


def test_a_cell_with_fewer_seeds_says_so(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", PLAIN, keep=lambda cell: cell.seed < 2 or cell.target == "south")
    assert "n = 2" in page.words
    assert "15 of 18 cells done, 0 failed, 3 missing" in page.words


def test_seconds_and_blends_are_not_ranked(sections: dict[str, Page]) -> None:
    seconds = sections["seconds"].source
    assert not re.search(r"<strong>|<em>", seconds)
    assert "6.50 &plusmn; 0.82" in seconds  # 5.5, 6.5, 7.5


def test_failures_are_told_in_words_and_missing_cells_counted(tmp_path: Path) -> None:
    def result(cell: Cell) -> dict[str, Any]:
        return {"error": "no <such> network"} if cell.method == "lccs" and cell.seed == 0 else invented(cell)

    page = page_of(tmp_path / "run", PLAIN, result=result, keep=lambda cell: cell.seed < 2)
    assert "8 of 18 cells done, 4 failed, 6 missing" in page.words
    assert "no <such> network (4 cells: lccs from net to north, k = 1, seed 0; " in page.words


def test_a_seed_counts_in_an_average_only_with_all_its_targets(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", PLAIN, keep=lambda cell: (cell.seed, cell.target) != (2, "south"))
    assert f"LCCS: {over(percents(1)[:2])} at 1, {over(percents(5)[:2])} at 5" in alt(page, "Accuracy in % against k")


def test_accuracy_against_k_has_the_rows_without_labels_as_levels(sections: dict[str, Page]) -> None:
    label = alt(sections["plain"], "Accuracy in % against k")
    assert f"Source: {over(percents(method='source'))} throughout" in label
    assert f"LCCS: {over(percents(1))} at 1, {over(percents(5))} at 5" in label


def test_a_method_with_and_without_labels_is_a_line_and_a_level(tmp_path: Path) -> None:
    adabn = '\n[[rows]]\nmethod = "adabn"\nlabel = "AdaBN"\n'
    page = page_of(tmp_path / "run", HEAD.format(title="x") + adabn + adabn + "shots = [1, 5]\n")
    label = alt(page, "Accuracy in % against k")
    assert f"AdaBN: {over(percents(0))} throughout; AdaBN: {over(percents(1))} at 1" in label


def test_accuracy_against_batch_size_joins_the_rows_of_one_method(sections: dict[str, Page]) -> None:
    label = alt(sections["batches"], "Accuracy in % against test batch size")
    small, large = percents(0, batch=8), percents(0, batch=128)
    assert f"BN: {over(small)} at 8, {over(large)} at 128" in label
    assert f"LCCS, k = 5: {over(percents(5))} throughout" in label


def test_accuracy_against_alpha_begins_with_the_classes_as_found(sections: dict[str, Page]) -> None:
    label = alt(sections["alphas"], "Accuracy in % against alpha")
    assert f"LCCS, k = 5: {over(percents(5))} at 1, {over(percents(5, alpha=10))} at 10" in label


def test_methods_that_depend_on_the_batch_have_one_picture_over_alpha_for_each_size(tmp_path: Path) -> None:
    sizes = ", ".join(f"{{batch_size = {size}, alpha = {alpha}.0}}" for size in (8, 64) for alpha in (1, 10))
    page = page_of(tmp_path / "run", HEAD.format(title="x") + BN.format(conditions=sizes))
    assert page.words.count("against alpha") == 2
    assert "shuffled, batches of 8" in page.words
    assert "shuffled, batches of 64" in page.words


def test_many_rows_are_split_into_readable_pictures_with_lccs_in_each(sections: dict[str, Page]) -> None:
    labels = [str(svg["aria-label"]) for svg in sections["many"].all("svg") if "against k" in str(svg["aria-label"])]
    assert len(labels) == 2
    assert all(label.count("LCCS: ") == 1 and label.count(" at 10") <= 8 for label in labels)
    assert sum(label.count("row ") for label in labels) == 12


def test_the_chosen_blends_are_counted_once_for_each_draw_and_target(sections: dict[str, Page]) -> None:
    label = alt(sections["alphas"], "How often each v was chosen")
    counts = [1 if times == "once" else int(times) for times in re.findall(r"v = [\d.]+ (once|\d+)", label)]
    assert sum(counts) == 2 * 3
    assert "k = 5: v = 0.5 6 times" in label


def test_losses_over_v_stand_beside_the_test_score(sections: dict[str, Page]) -> None:
    label = alt(sections["objective"], "Over the blend v")
    mean = statistics.fmean(100 * (30 + seed) / PER_CLASS for seed in (0, 1, 2))
    assert f"On test images the best v is v = 0.5 ({mean:.4g})" in label
    assert re.search(r"Cross-entropy is least at v = 0.5 \(1\.\d+\); chosen: v = 0.5 6 times", label)
    assert "Entropy is least at v = 0.5" in label


def test_weights_of_layers_are_means_over_the_seeds_at_the_largest_k(
    sections: dict[str, Page], page_of_all_grids: Path
) -> None:
    cells = Grid.load(page_of_all_grids.parent / "grids" / "plain.toml").cells()
    north = [
        invented(cell)["layers"] for cell in cells if (cell.method, cell.target, cell.shots) == ("lccs", "north", 5)
    ]
    means = [statistics.fmean(layers[f"bn{number}"]["rho"][1] for layers in north) for number in range(4)]
    label = alt(sections["plain"], "Weight of the support's standard deviation")
    assert f"north: {min(means):.3f} to {max(means):.3f}" in label


def test_costs_are_seconds_of_adaptation_and_milliseconds_of_an_answer(sections: dict[str, Page]) -> None:
    page = sections["plain"]
    assert "LCCS, k = 5: 6.5" in alt(page, "Seconds of adaptation")  # 5.5, 6.5, 7.5
    assert "LCCS, k = 5: 3" in alt(page, "Milliseconds for an answer")  # 0.45 s for 150 images


def test_an_answer_costs_what_it_does_on_the_largest_stream_of_a_fit(tmp_path: Path) -> None:
    def result(cell: Cell) -> dict[str, Any]:
        result = invented(cell)
        if cell.condition.alpha:  # fewer images counted, but the same predictions and the same clock
            result["tally"] = [[count // 10 for count in row] for row in result["tally"]]
        return result

    assert "LCCS, k = 5: 3." in alt(page_of(tmp_path / "run", ALPHAS, result=result), "Milliseconds for an answer")


def test_matrices_compare_the_source_with_the_best_row_of_lccs(sections: dict[str, Page]) -> None:
    page = sections["plain"]
    rights = [25 + 5 + seed * 2 + 4 for seed in (0, 1, 2)]
    percent = 100 * sum(rights) / (3 * PER_CLASS)
    assert alt(page, "Confusion matrix of LCCS, k = 5 on north").endswith(f": {percent:.1f}% of 450 images right.")
    before = 100 * sum(20 + seed * 2 + 4 for seed in (0, 1, 2)) / (3 * PER_CLASS)
    assert f"ant {before:.1f} {percent:.1f} {percent - before:+.1f}" in page.words
    assert "LCCS, k = 1 on north" not in page.words


@pytest.mark.parametrize(
    ("count", "numbers", "names", "listed"),
    [(12, True, True, True), (31, False, False, True), (41, False, False, False)],
)
def test_matrices_of_many_classes_say_less(
    tmp_path: Path, count: int, numbers: bool, names: bool, listed: bool
) -> None:
    classes = [f"kind{number}" for number in range(count)]
    page = page_of(tmp_path / "run", ONE_POINT, drawn=True, result=lambda cell: invented(cell, classes=classes))
    [svg] = re.findall(r'<svg[^>]*aria-label="Confusion matrix of Source on north.*?</svg>', page.source, re.DOTALL)
    assert (">52</text>" in svg) == numbers  # 20 + 2 + 4 of 50
    assert ("kind7<" in svg) == names
    assert ('<th scope="row">kind7</th>' in page.source) == listed


def test_features_are_shown_before_and_after_the_layer(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", FEATURES, result=embedded)
    assert kinds(page) == {"features"}
    assert "north, as found, source statistics" in alt(page, "(a) shift: features before")
    assert alt(page, "(a) shift: features after").endswith("gap 1.50.")
    assert page.all("table") == []
    assert "How to read" not in page.words
    assert page_of(tmp_path / "other", FEATURES, keep=lambda _: False).all("svg") == []


def test_the_source_network_beside_a_row_is_its_own(tmp_path: Path) -> None:
    other = SOURCE.replace('"Source"', '"Other"') + 'source = "stronger"\n'
    page = page_of(
        tmp_path / "run",
        HEAD.format(title="x") + other + SOURCE + LCCS.format(shots=[5]),
        result=lambda cell: invented(cell, lambda each: 45 if each.source == "stronger" else score_of(each)),
    )
    assert "Source on north" in page.words
    assert "Other on north" not in page.words


def test_a_class_without_images_is_left_blank(tmp_path: Path) -> None:
    def result(cell: Cell) -> dict[str, Any]:
        result = invented(cell)
        result["tally"][1] = [0, 0, 0]
        return result

    assert "bee \N{EN DASH} \N{EN DASH} \N{EN DASH}" in page_of(tmp_path / "run", PLAIN, result=result).words


def test_records_of_an_older_version_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    def older(cell: Cell) -> dict[str, Any]:
        return {key: value for key, value in invented(cell).items() if key not in ("classes", "layers", "versions")}

    assert kinds(page_of(tmp_path / "run", PLAIN, result=older)) == {"k", "v", "adapt", "answer"}


def test_names_are_text_whatever_they_contain(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    text = ONE_POINT.replace("One point", evil).replace('"LCCS"', f'"_{evil} $x$"').replace('"Source"', '"源 <b>bold"')
    text = text.replace('"north"', '"<i>north"').replace("shots = [5]", "shots = [1, 5]")
    classes = (evil, '"><img src=x onerror=alert(1)>', "_under & <u>line")
    page = page_of(tmp_path / "<s>run", text, drawn=True, result=lambda cell: invented(cell, classes=classes))
    assert not {tag for tag, _ in page.elements} & {"script", "b", "i", "img", "s"}
    assert page.mismatched == []
    for name in (evil, f"_{evil} $x$", "源 <b>bold", "<i>north", *classes, "<s>run"):
        assert name in page.words


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match="there is no run in"):
        report_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
