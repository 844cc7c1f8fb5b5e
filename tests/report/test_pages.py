"""Pages: self-contained, escaped, accessible, and the same for the same result."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from PIL import Image
from torch import nn

from fewshift import LCCS, METHODS, Adaptation, FewshiftError, Method, Preprocess, Support, adapt
from fewshift.api import LayerReport
from fewshift.core.method import Needs
from fewshift.lab.demo import Demo, DemoRow
from fewshift.report import adaptation_page, demo_page, figures
from fewshift.report import prose as words
from fewshift.report.judged import flipped, judged
from fewshift.trust.calibration import calibration_of
from fewshift.trust.gain import HeldOut, gain_of
from fewshift.trust.guard import Evidence

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
        DemoRow("source", None, (50.0, 52.0)),
        DemoRow("testtime-bn", None, (51.0, 51.0)),
        DemoRow("lccs", example.support.shots, (60.0, 64.0)),
    )
    pictures = torch.linspace(0, 1, 12 * 16).view(12, 1, 4, 4)
    return Demo(rows, 2, 97.5, pictures, 1 - pictures, 1234, example, 3.0)


once = cache(adapted)


def told(
    labels: list[int], source: list[int], adapted: list[int], images: list[int] | None = None, classes: int = len(EVIL)
) -> HeldOut:
    """Held-out answers, one per image unless `images` says of which."""
    logits = [5 * torch.nn.functional.one_hot(torch.tensor(it), classes).double() for it in (source, adapted)]
    numbers = torch.tensor(images or range(len(labels)))
    return HeldOut(torch.tensor(labels), numbers, torch.arange(len(labels)) % 2, *logits)


HELD = told([0, 1, 2, 0, 1, 2], [0, 1, 3, 3, 3, 2], [1, 1, 2, 2, 3, 2])  # one lost, one won, one still wrong


STEPS = Preprocess(None, None, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
PIXELS = torch.randint(0, 256, (6, 3, 6, 6), generator=torch.Generator().manual_seed(0)).byte()


def with_evidence(held: HeldOut = HELD, *, weak: bool = False, **facts: Any) -> Adaptation:
    """The adaptation above as if these had been its held-out answers, to these pixels."""
    gain = gain_of(held, weak=weak)
    evidence = Evidence(gain, held, "classes have a single image: weak evidence" if weak else "")
    pictures = Support(STEPS.normalise(PIXELS), torch.arange(6) % 3, EVIL)
    known = {"reason": f"accepted: {gain.words}", "support": pictures, "preprocess": STEPS}
    return replace(once(), evidence=evidence, calibration=calibration_of(held), **(known | facts))


def rejected() -> Adaptation:
    images = torch.rand(6, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    support = (images, torch.arange(6) % 3)
    return adapt(network(), support, method=LCCS(grid=3, epochs=1), classes=EVIL, accept=1000)


def of_vectors() -> Adaptation:
    """Numbers that are no pictures."""
    generator = torch.Generator().manual_seed(2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    support = (torch.randn(12, 5, generator=generator) + 1, torch.arange(12) % 2)
    return adapt(model, support, method=METHODS["finetune-head"](epochs=20, lr=1.0), accept="always")


def of_many_classes(classes: int = 100) -> Adaptation:
    """Answers at random, but for some that are always the same."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(200, 3, 6, 6, generator=generator)
    labels = torch.arange(200) % classes
    source, adapted = (torch.randint(classes, (200,), generator=generator) for _ in range(2))
    source[:40], adapted[:80] = 7, 9
    held = told(labels.tolist(), source.tolist(), adapted.tolist(), classes=classes)
    return with_evidence(held, classes=None, support=Support(images, labels))


def on_labelled() -> Adaptation:
    labelled = Support(STEPS.normalise(255 - PIXELS), torch.arange(6) % 3, EVIL)
    return with_evidence(validation=labelled)


def of_forty_large_pictures() -> Adaptation:
    images = torch.rand(40, 3, 160, 160, generator=torch.Generator().manual_seed(1))
    support = Support(images, torch.arange(40) % 3, EVIL)
    return with_evidence(told([0] * 40, [0] * 40, [1] * 40), support=support)


def without_labels() -> Adaptation:
    images = torch.rand(6, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return adapt(network(), None, method="adabn", unlabelled=images, classes=EVIL)


JUDGED: dict[str, Callable[[], Adaptation]] = {
    "evidence": with_evidence,
    "rejected": rejected,
    "weak": lambda: with_evidence(weak=True),
    "unnamed": lambda: with_evidence(classes=None),
    "vectors": of_vectors,
    "many classes": of_many_classes,
    "labelled": on_labelled,
    "forty": of_forty_large_pictures,
    "unlabelled": without_labels,
}
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


@pytest.fixture(scope="module")
def judged_page(folder: Path) -> Callable[[str], Page]:
    """The page of one of the adaptations with evidence, made once."""
    return cache(lambda name: Page(adaptation_page(JUDGED[name](), folder / f"{name}.html")))


@pytest.fixture(scope="module", params=[*PAGES, *JUDGED])
def page(request: pytest.FixtureRequest, folder: Path, judged_page: Callable[[str], Page]) -> Page:
    name = request.param
    return judged_page(name) if name in JUDGED else Page(PAGES[name](folder / f"{name}.html"))


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
    assert words.sentence(lccs.reason) in lccs_page.words


def test_a_page_tells_the_evidence_in_plain_words(folder: Path) -> None:
    result = adapt(network(), (torch.randn(12, 3, 8, 8), torch.arange(12) % 3), method=LCCS(grid=3, epochs=1))
    page = Page(adaptation_page(result, folder / "evidence.html"))
    assert result.gain is not None
    assert f"f 12 held-out images, {result.gain.wins} became right and {result.gain.losses} became wrong" in page.words
    assert "none was held out" not in page.words


def test_the_decision_stands_first_with_what_held_out_images_say(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("evidence")
    decision = "Accepted: of 6 held-out images, 1 became right and 1 became wrong: +0.0 points"
    assert page.words.index(decision) < page.words.index("Evidence")
    assert page.words.count("became right and") == 1
    assert "Of the 6 held-out images, 50.0 % were right before and 50.0 % after." in page.words


def test_a_rejected_adaptation_says_that_the_source_came_back_and_why(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("rejected")
    assert page.words.startswith("Sequential, left as it is: LCCS was rejected")
    assert "The adapted network was rejected, and the source network came back, bit for bit." in page.words
    assert re.search("Rejected: of .* held-out .* became right and .* not above 1000", page.words)
    assert "What the rejected network changed" in page.words
    assert rejected().candidate_delta.adapted.weights in page.words
    assert "There is nothing to undo" in page.words
    assert "fewshift adapt ... --out place.safetensors --write-rejected" in page.words
    assert "Use it, undo it" not in page.words


def test_unlabelled_images_show_a_shift_and_prove_nothing(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("unlabelled")
    assert "Accepted without evidence: there are no labels to judge by." in page.words
    assert "The 6 images" in page.words or "no sign of a shift in the 6 images" in page.words.lower()


def test_weak_evidence_is_called_so(judged_page: Callable[[str], Page]) -> None:
    assert "Weak evidence. Classes have a single image." in judged_page("weak").words
    assert "Weak evidence" not in judged_page("evidence").words


def test_every_class_tells_how_many_were_right_before_and_after(judged_page: Callable[[str], Page]) -> None:
    for label in range(3):
        mine = [row for row in range(6) if int(HELD.labels[row]) == label]
        before, after = (sum(int(it[row].argmax()) == label for row in mine) for it in (HELD.source, HELD.adapted))
        change = f"{after - before:+d}" if after != before else "\N{EN DASH}"
        assert f"{EVIL[label]} {len(mine)} {before} {after} {change}" in judged_page("evidence").words
        assert f" {label} {len(mine)} {before} {after} {change}" in judged_page("unnamed").words


def test_confusion_is_shown_before_and_after_side_by_side(judged_page: Callable[[str], Page]) -> None:
    labels = [str(it["aria-label"]) for it in judged_page("evidence").all("svg")]
    assert [it for it in labels if it.startswith("Confusion")] == [
        "Confusion matrix on held-out images, the source network: 3 of 6 answers right.",
        "Confusion matrix on held-out images, adapted: 3 of 6 answers right.",
    ]


def test_many_classes_have_a_table_of_the_mistakes_that_changed_most(judged_page: Callable[[str], Page]) -> None:
    result = of_many_classes()
    found = judged(result)
    page = judged_page("many classes")
    assert found is not None
    assert "Confusion matrix" not in page.source
    assert "All 100 classes" in page.words
    pairs = found.pairs(12)
    held = result.evidence.held
    counts = {
        (i, j): [sum(a == i and b == j for a, b in zip(held.labels.tolist(), it.argmax(1).tolist(), strict=True))
                 for it in (held.source, held.adapted)]
        for i, j in {(int(pair.truth), int(pair.answer)) for pair in pairs}
    }  # fmt: skip
    assert all(counts[int(it.truth), int(it.answer)] == [it.before, it.after] for it in pairs)
    changes = [abs(it.after - it.before) for it in pairs]
    assert changes == sorted(changes, reverse=True)
    assert all(it.truth != it.answer and change for it, change in zip(pairs, changes, strict=True))


def test_images_that_flipped_come_once_and_those_that_became_wrong_first() -> None:
    #                 image 0: 2 of 3 times wrong     1: right once      2: another mistake, 3: never
    held = told([0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 2, 2, 0, 3], [0, 1, 2, 2, 1, 1, 3], [0, 0, 0, 1, 1, 2, 3])
    names = list("abcd")
    found = flipped(held, names)
    assert [(it.image, it.truth, it.source, it.verdict) for it in found] == [
        (1, "a", "a", "became wrong"),
        (2, "b", "c", "became right"),
        (3, "c", "a", "still wrong"),
    ]
    assert [it.answers for it in found] == ["b (1 of 3 times), c (1 of 3 times)", "b (1 of 2 times)", "b"]
    assert [(it.flips, it.asked) for it in found] == [(2, 3), (1, 2), (1, 1)]


def shown_pixels(page: Page) -> list[torch.Tensor]:
    """The pictures of a page, (channels, height, width), bytes."""
    found = []
    for picture in page.all("img"):
        data = base64.b64decode(str(picture["src"]).removeprefix("data:image/png;base64,"))
        found.append(torch.tensor(list(Image.open(io.BytesIO(data)).tobytes())).view(6, 6, 3).permute(2, 0, 1).byte())
    return found


def test_a_page_shows_the_flipped_images_as_they_were(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("evidence")
    assert [str(it["alt"]).split(",")[0] for it in page.all("img")] == ["Image 1", "Image 3", "Image 4"]
    assert torch.equal(torch.stack(shown_pixels(page)), PIXELS[[0, 2, 3]])
    assert "3 images: 1 became wrong, 1 became right, 1 still wrong." in page.words


def test_evidence_on_other_labelled_images_shows_those(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("labelled")
    assert torch.equal(torch.stack(shown_pixels(page)), 255 - PIXELS[[0, 2, 3]])
    assert "labelled ones apart from the support" in page.words


def test_no_more_than_24_images_are_shown_and_the_others_are_counted(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("forty")
    assert len(page.all("img")) == 24
    assert "Here are 24, there are 16 more." in page.words
    assert len(page.source) < 400_000  # of noise, which no JPEG likes


def test_what_is_no_picture_is_listed(judged_page: Callable[[str], Page]) -> None:
    page = judged_page("vectors")
    assert page.all("img") == []
    assert re.search(r"image is before after \d+ [01] [01] [01] (became|still)", page.words)


def test_the_shift_of_every_layer_is_told(lccs: Adaptation, lccs_page: Page) -> None:
    assert lccs.shift is not None
    assert words.sentence(lccs.shift.words) in lccs_page.words
    for number, it in enumerate(lccs.shift.layers, 1):
        assert f"{number} {it.name} {it.score:.2f} {it.mean_shift:.3f} {it.std_ratio:.3f}" in lccs_page.words


def test_calibration_is_told_where_something_was_held_out(judged_page: Callable[[str], Page], lccs_page: Page) -> None:
    found = calibration_of(HELD)
    assert found is not None
    assert words.sentence(found.words) in judged_page("evidence").words
    assert "calibration" not in lccs_page.words


def test_what_held_out_images_chose_is_told(folder: Path) -> None:
    held = replace(HELD, candidates={"finetuned": HELD.adapted, "source": HELD.source})
    facts = {"method": LCCS(classifier="evidence"), "notes": once().notes | {"classifier": "ncc"}}
    page = Page(adaptation_page(with_evidence(held, **facts), folder / "chosen.html"))
    assert "Of 2 classifiers, held-out images chose nearest centroids." in page.words


def test_the_lines_to_copy_name_the_file(folder: Path, lccs: Adaptation) -> None:
    page = Page(adaptation_page(lccs, folder / "named.html", "a place's.safetensors"))
    assert 'source = fewshift.revert(adapted, "a place\'s.safetensors")' in page.words
    assert "--delta 'a place'\"'\"'s.safetensors' images/" in page.words
    assert "leave the delta out" in page.words
    assert "result.delta.save" not in page.words


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
    assert not re.search("What changed|How it was learned|Use it|Class by class|probabilities", page.words)
    assert "Is there a shift?" in page.words
    flat = nn.Sequential(nn.Flatten(), nn.Linear(108, len(EVIL))).eval()
    page = Page(adaptation_page(adapted("source", flat), folder / "flat.html"))
    assert page.all("svg") == []
    assert "Is there a shift?" not in page.words


def test_long_tables_are_folded_and_short_ones_are_not(folder: Path, lccs_page: Page) -> None:
    deep = adapted("adabn", network(layers=21))
    assert "All 21 layers" in Page(adaptation_page(deep, folder / "deep.html")).words
    assert lccs_page.all("details") == []


def test_layers_left_alone_are_listed_with_the_reason(folder: Path) -> None:
    model = network()
    model.insert(1, nn.InstanceNorm2d(3))
    page = Page(adaptation_page(adapted("adabn", model), folder / "skipped.html"))
    assert "1 InstanceNorm2d instance normalisation has no source statistics to blend" in page.words


def test_a_single_draw_has_no_spread(folder: Path) -> None:
    demo = demonstration()
    rows = tuple(replace(row, accuracies=row.accuracies[:1]) for row in demo.rows)
    page = Page(demo_page(replace(demo, rows=rows, draws=1), folder / "single.html"))
    assert "lccs 2 60.0 +10.0 1" in page.words
    assert "Over 1 draw of the labelled images, 50.0% becomes 60.0%" in page.words


def test_the_demo_table_has_mean_spread_and_paired_gain(folder: Path) -> None:
    page = Page(demo_page(demonstration(), folder / "table.html"))
    assert "source \N{EN DASH} 51.0 ± 1.0 \N{EN DASH} 2" in page.words
    assert "lccs 2 62.0 ± 2.0 +11.0 ± 1.0 2" in page.words  # 10 and 12 points over the source
    assert "the same 1,234 other images" in page.words


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
