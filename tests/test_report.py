"""Pages: self-contained, escaped, accessible, and the same for the same result."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
import torch
from PIL import Image
from torch import nn

from fewshift import LCCS, METHODS, Adaptation, FewshiftError, Method, adapt
from fewshift.adaptation import LayerReport
from fewshift.demo import Demo, Row
from fewshift.method import Needs
from fewshift.report import adaptation_page, demo_page, figures

EVIL = ('<script>alert("1")</script>', '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }} &lt; $x$", "never \udcff seen")
VOID = {"meta", "img", "br", "hr", "link", "input"}

METHODS_WITH_A_SUPPORT: dict[str, Method] = {
    name: method()
    for name, method in METHODS.items()
    # a page is about a delta, and here one class has no image, which leaves nearest centroids nothing to say
    if method.returns == "plain network" and method.needs is not Needs.UNLABELLED and name != "flute"
}
UNUSUAL: dict[str, Method] = {
    "greedy": LCCS(init="greedy", grid=3),
    "convex": LCCS(combination="convex", epochs=2),
    "no gradient": LCCS(epochs=0),
    "no start": LCCS(init=None, epochs=1),
    "head trained": LCCS(classifier="finetuned", classifier_epochs=2, epochs=1),
}


class Page(HTMLParser):
    """What a reader of the page finds: its elements, words, and tags left open or closed twice."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text("utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words = " ".join((self.words + " " + data).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def network(layers: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [part for _ in range(layers) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, len(EVIL)))
    return model.eval()


def adapted(method: str | Method = "lccs", model: nn.Module | None = None) -> Adaptation:
    """Two images of each of three classes; the fourth class has none."""
    images = torch.rand(6, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return adapt(model or network(), (images, torch.arange(6) % 3), method=method, classes=EVIL, validate=None)


def demonstration() -> Demo:
    example = adapted()
    rows = (
        Row("source", None, (50.0, 52.0)),
        Row("testtime-bn", None, (51.0, 51.0)),
        Row("lccs", example.support.shots, (60.0, 64.0)),
    )
    pictures = torch.linspace(0, 1, 12 * 16).view(12, 1, 4, 4)
    return Demo(rows, 2, 97.5, pictures, 1 - pictures, 1234, example, 3.0)


PAGES: dict[str, Callable[[Path], Path]] = {
    **{
        name: lambda path, method=method: adaptation_page(adapted(method), path)
        for name, method in (METHODS_WITH_A_SUPPORT | UNUSUAL).items()
    },
    "demo": lambda path: demo_page(demonstration(), path),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, folder: Path) -> Page:
    return Page(PAGES[request.param](folder / f"{request.param}.html"))


@pytest.fixture(scope="module")
def lccs() -> Adaptation:
    return adapted()


@pytest.fixture(scope="module")
def lccs_page(lccs: Adaptation, folder: Path) -> Page:
    return Page(adaptation_page(lccs, folder / "lccs once.html"))


@pytest.fixture(scope="module")
def untouched() -> Adaptation:
    return adapted("source")


def test_a_page_needs_nothing_but_itself(page: Page) -> None:
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "foreignobject"}
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in {"src", "href", "xlink:href", "srcset", "action"}
    ]
    assert all(str(it).startswith(("data:", "#")) for it in addresses)
    assert not re.search(r"@import|url\((?!#)", page.source)


def test_every_tag_that_opens_closes(page: Page) -> None:
    assert page.mismatched == []
    assert page.open == []


def test_every_figure_says_what_it_shows(page: Page) -> None:
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert len(str(svg["aria-label"])) > 30
    assert all(len(str(image["alt"])) > 30 for image in page.all("img"))
    assert len(page.all("figure")) == len(page.all("svg")) + len(page.all("img")) == len(page.all("figcaption"))


def test_ids_are_unique_and_every_reference_finds_its_own(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page.source)) <= set(ids)


def test_every_colour_of_a_figure_follows_the_theme(page: Page) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL):
        bare = re.sub(r"var\(--\w+, #\w{6}\)", "", svg)
        assert not re.search(r"(fill|stroke): (#|black|white)", bare)


def test_names_are_text_whatever_they_contain(folder: Path, lccs: Adaptation) -> None:
    layers = (LayerReport("<b>bold", "<i>kind", 3), LayerReport("other", "<u>kind", 0, skipped="<s>reason"))
    page = Page(adaptation_page(replace(lccs, layers=layers, reason="<em>fine"), folder / "evil.html"))
    assert not {tag for tag, _ in page.elements} & {"script", "b", "i", "u", "s", "em", "img"}
    for name in (*EVIL[:3], "never ? seen", "<b>bold", "<i>kind", "<u>kind", "<s>reason", "<em>fine"):
        assert name in page.words


def test_a_page_says_that_nothing_was_held_out(lccs: Adaptation, lccs_page: Page) -> None:
    assert "none was held out" in lccs_page.words
    assert lccs.reason in lccs_page.words


def test_a_page_tells_the_evidence_in_plain_words(folder: Path) -> None:
    result = adapt(network(), (torch.randn(12, 3, 8, 8), torch.arange(12) % 3), method=LCCS(grid=3, epochs=1))
    page = Page(adaptation_page(result, folder / "evidence.html"))
    assert result.gain is not None
    assert f"f 12 held-out images, {result.gain.wins} became right and {result.gain.losses} became wrong" in page.words
    assert "none was held out" not in page.words


def test_classes_without_an_image_are_named(lccs_page: Page) -> None:
    assert "Without any image: never ? seen." in lccs_page.words


def test_the_summary_counts(lccs_page: Page) -> None:
    assert "LCCS fitted this Sequential to 6 labelled images of 3 classes (k = 2 of each)" in lccs_page.words
    assert "kept the classifier" in lccs_page.words
    # weight and bias of two layers of three channels, four bytes each
    assert "4 of its 16 tensors differ now, 48 bytes in all" in lccs_page.words


def test_all_settings_versions_and_fingerprints_are_told(lccs: Adaptation, lccs_page: Page) -> None:
    for name, value in lccs.method.settings().items():
        assert f"{name} {value}" in lccs_page.words
    assert f"torch {torch.__version__}" in lccs_page.words
    assert lccs.delta.source.weights in lccs_page.words
    assert lccs.delta.adapted.weights in lccs_page.words


def test_sections_without_data_disappear(untouched: Adaptation, folder: Path) -> None:
    page = Page(adaptation_page(untouched, folder / "nothing.html"))
    assert page.all("svg") == []
    assert not re.search("What changed|How it was learned|Use it", page.words)


def test_long_tables_are_folded_and_short_ones_are_not(folder: Path, lccs_page: Page) -> None:
    deep = adapted("adabn", network(layers=21))
    assert "All 21 layers" in Page(adaptation_page(deep, folder / "deep.html")).words
    assert lccs_page.all("details") == []


def test_layers_left_alone_are_listed_with_the_reason(folder: Path) -> None:
    model = network()
    model.insert(1, nn.InstanceNorm2d(3))
    words = Page(adaptation_page(adapted("adabn", model), folder / "skipped.html")).words
    assert "1 InstanceNorm2d instance normalisation has no source statistics to blend" in words


def test_a_single_draw_has_no_spread(folder: Path) -> None:
    demo = demonstration()
    rows = tuple(replace(row, accuracies=row.accuracies[:1]) for row in demo.rows)
    words = Page(demo_page(replace(demo, rows=rows, draws=1), folder / "single.html")).words
    assert "lccs 2 60.0 +10.0 1" in words
    assert "Over 1 draw of the labelled images, 50.0% becomes 60.0%" in words


def test_the_demo_table_has_mean_spread_and_paired_gain(folder: Path) -> None:
    words = Page(demo_page(demonstration(), folder / "table.html")).words
    assert "source \N{EN DASH} 51.0 ± 1.0 \N{EN DASH} 2" in words
    assert "lccs 2 62.0 ± 2.0 +11.0 ± 1.0 2" in words  # 10 and 12 points over the source
    assert "the same 1,234 other images" in words


def test_the_same_result_gives_the_same_bytes(folder: Path, lccs: Adaptation, lccs_page: Page) -> None:
    again = replace(adapted(), seconds=lccs.seconds)
    assert Page(adaptation_page(again, folder / "again.html")).source == lccs_page.source


def test_the_readers_own_plot_settings_are_neither_used_nor_changed() -> None:
    plain = figures.loss_curve([1.0, 0.5], key="loss", alt="falling")
    with matplotlib.rc_context({"font.size": 30, "axes.linewidth": 5, "xtick.direction": "in"}):
        before = dict(matplotlib.rcParams)
        assert figures.loss_curve([1.0, 0.5], key="loss", alt="falling") == plain
        assert dict(matplotlib.rcParams) == before


def test_curves_with_holes_are_drawn() -> None:
    svg = figures.grid_curve({0.0: float("nan"), 0.5: 1.0, 1.0: float("inf")}, 0.5, key="grid", alt="holes")
    assert "v = 0.5" in svg


def test_strips_show_the_pictures_pixel_for_pixel() -> None:
    above, below = torch.zeros(3, 1, 2, 2), torch.ones(2, 3, 2, 2)
    data, width, height = figures.strips(above, below, columns=3, gap=1)
    image = Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))
    assert image.size == (width, height) == (8, 9)
    assert image.getpixel((7, 1)) == (0, 0, 0, 255)
    assert image.getpixel((2, 0))[3] == 0  # between two pictures
    assert image.getpixel((0, 8)) == (255, 255, 255, 255)
    assert image.getpixel((7, 8))[3] == 0  # no third picture below


@pytest.mark.parametrize("where", ["missing/page.html", "taken"])
def test_a_path_that_cannot_be_written_is_one_error_and_leaves_nothing(
    tmp_path: Path, untouched: Adaptation, where: str
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(FewshiftError, match="cannot write"):
        adaptation_page(untouched, tmp_path / where)
    assert [it.name for it in tmp_path.rglob("*")] == ["taken"]


def test_a_result_writes_its_own_page(tmp_path: Path, untouched: Adaptation) -> None:
    path = untouched.report(tmp_path / "page.html")
    assert path == tmp_path / "page.html"
    assert Page(path).words.startswith("Sequential, left as it is")
