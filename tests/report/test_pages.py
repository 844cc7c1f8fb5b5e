"""Pages: self-contained, escaped, accessible, and the same for the same result."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fewshift import LCCS, Adaptation, FewshiftError, Method
from fewshift.report import figures
from fewshift.report.judged import flipped, judged
from fewshift.report.pages import adaptation_page, demo_page
from fewshift.report.results import LayerReport
from fewshift.trust.choice import Choice
from tests.helpers.pages import (
    BYTES,
    EVIL,
    HELD,
    JUDGED,
    Page,
    adapted,
    bare,
    demonstration,
    held_out,
    network,
    once,
    with_evidence,
)

DASH = "\N{EN DASH}"
FITTED: dict[str, str | Method] = {  # each leaves other notes, and so other figures and columns
    "nothing": "source",
    "statistics": "adabn",
    "weights": "finetune-bn",
    "two stages": "lp-ft",
    "greedy": LCCS(init="greedy", grid=3),
    "convex": LCCS(combination="convex", epochs=2),
    "no gradient": LCCS(epochs=0),
    "head": LCCS(classifier="finetuned", classifier_epochs=2, epochs=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def page_of(folder: Path) -> Callable[[str], Page]:
    """The page of a result, made once."""

    @cache
    def make(name: str) -> Page:
        path = folder / f"{name}.html"
        if name == "demo":
            return Page(demo_page(demonstration(), path))
        return Page(adaptation_page(JUDGED[name]() if name in JUDGED else once(FITTED.get(name, name)), path))

    return make


@pytest.fixture(scope="module", params=["lccs", "demo", *FITTED, *JUDGED])
def page(request: pytest.FixtureRequest, page_of: Callable[[str], Page]) -> Page:
    return page_of(request.param)


def words_of(path: Path) -> str:
    return Page(path).words


def test_a_page_needs_nothing_but_itself(page: Page) -> None:
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "foreignobject"}
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in {"src", "href", "xlink:href", "srcset", "action"}
    ]
    assert all(str(address).startswith(("data:", "#")) for address in addresses)
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


def test_names_are_text_whatever_they_contain(folder: Path) -> None:
    layers = (LayerReport("<b>bold", "<i>kind", 3), LayerReport("other", "<u>kind", 0, skipped="<s>reason"))
    page = Page(adaptation_page(replace(bare(), layers=layers), folder / "evil.html"))
    assert not {tag for tag, _ in page.elements} & {"script", "b", "i", "u", "s", "em", "img"}
    for name in (*EVIL[:3], "never ? seen", "<b>bold", "<i>kind", "<u>kind", "<s>reason"):
        assert name in page.words


def test_a_page_says_that_nothing_was_held_out(page_of: Callable[[str], Page]) -> None:
    assert "none was held out" in page_of("lccs").words
    assert "none was held out" not in page_of("evidence").words
    assert "Accepted without evidence" in page_of("unlabelled").words


def test_the_verdict_stands_first_and_engineering_last(page_of: Callable[[str], Page]) -> None:
    words = page_of("evidence").words
    places = [
        words.index(part) for part in ("With caution", "3 of 6 held-out images right before, 3 after", "Class by class")
    ]
    places += [words.index("Where it comes from"), words.index("For engineers"), words.index("Accepted: ")]
    assert places == sorted(places)
    assert re.search("Accepted: .*6 held-out images.* 1 became right and 1 became wrong.*\\+0.0 points", words)


def test_a_rejected_adaptation_says_that_the_source_is_kept_and_why(page_of: Callable[[str], Page]) -> None:
    words = page_of("rejected").words
    assert re.match("Sequential, .*LCCS was rejected", words)
    assert re.search("Rejected: .*held-out .* became right and .*1000", words)
    assert "What the rejected network changed" in words
    assert JUDGED["rejected"]().candidate_delta.adapted.weights in words
    assert "fewshift adapt ... --out place.safetensors --write-rejected" in words
    assert "Use it, undo it" not in words


def test_a_command_that_names_a_delta_is_not_given_a_second_one(tmp_path: Path) -> None:
    origin = {"command": "fewshift adapt -w w.pt -s photos -o site.safetensors", "options": "--weights w.pt"}
    page = JUDGED["rejected"]().report(tmp_path / "page.html", origin=origin)
    assert "-o site.safetensors --write-rejected" in page.read_text("utf-8")


def test_weak_evidence_is_called_so(page_of: Callable[[str], Page]) -> None:
    assert re.search("Weak evidence.*single image", page_of("weak").words)
    assert "Weak evidence" not in page_of("evidence").words


def test_every_class_tells_how_many_were_right_before_and_after(page_of: Callable[[str], Page]) -> None:
    for label in range(3):
        mine = [row for row in range(6) if int(HELD.labels[row]) == label]
        before, after = (sum(int(row[i].argmax()) == label for i in mine) for row in (HELD.source, HELD.adapted))
        counts = f"{before} of {len(mine)} {after} of {len(mine)}"
        assert f"{EVIL[label]} {counts}" in page_of("evidence").words
        assert f" {label} {counts}" in page_of("unnamed").words


def test_confusion_is_shown_before_and_after_side_by_side(page_of: Callable[[str], Page]) -> None:
    labels = [str(svg["aria-label"]) for svg in page_of("evidence").all("svg")]
    before, after = (label for label in labels if label.startswith("Confusion"))
    assert re.search("source.*3 of 6", before)
    assert re.search("adapted.*3 of 6", after)


def test_many_classes_have_a_table_of_the_mistakes_that_changed_most(page_of: Callable[[str], Page]) -> None:
    page, result = page_of("many classes"), JUDGED["many classes"]()
    assert "Confusion matrix" not in page.source
    assert "All 100 classes" in page.words
    held, pairs = result.evidence.held, judged(result).pairs(12)
    counts = [
        [
            sum(map((int(pair.truth), int(pair.answer)).__eq__, zip(held.labels.tolist(), each, strict=True)))
            for each in (held.source.argmax(1).tolist(), held.adapted.argmax(1).tolist())
        ]
        for pair in pairs
    ]
    assert [[pair.before, pair.after] for pair in pairs] == counts
    changes = [abs(after - before) for before, after in counts]
    assert changes == sorted(changes, reverse=True)
    assert all(pair.truth != pair.answer and change for pair, change in zip(pairs, changes, strict=True))


def test_images_that_flipped_come_once_and_those_that_became_wrong_first() -> None:
    #                     image 0: 2 of 3 times wrong     1: right once      2: another mistake, 3: never
    held = held_out([0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 2, 2, 0, 3], [0, 1, 2, 2, 1, 1, 3], [0, 0, 0, 1, 1, 2, 3])
    flips = flipped(held, list("abcd"))
    assert [(flip.image, flip.truth, flip.source, flip.verdict) for flip in flips] == [
        (1, "a", "a", "became wrong"),
        (2, "b", "c", "became right"),
        (3, "c", "a", "still wrong"),
    ]
    assert [flip.answers for flip in flips] == ["b (1 of 3 times), c (1 of 3 times)", "b (1 of 2 times)", "b"]
    assert [(flip.flips, flip.asked) for flip in flips] == [(2, 3), (1, 2), (1, 1)]


def shown_pixels(page: Page) -> Tensor:
    """The pictures of a page, (pictures, channels, height, width), bytes."""
    codes = [str(picture["src"]).removeprefix("data:image/png;base64,") for picture in page.all("img")]
    pictures = [Image.open(io.BytesIO(base64.b64decode(code))).tobytes() for code in codes]
    return torch.tensor([list(picture) for picture in pictures]).view(-1, 6, 6, 3).permute(0, 3, 1, 2).byte()


def test_a_page_shows_the_flipped_images_as_they_were(page_of: Callable[[str], Page]) -> None:
    page = page_of("evidence")
    assert [str(image["alt"]).split(",")[0] for image in page.all("img")] == ["Image 1", "Image 3", "Image 4"]
    assert torch.equal(shown_pixels(page), BYTES[[0, 2, 3]])
    assert "3 images: 1 became wrong, 1 became right, 1 still wrong." in page.words


def test_evidence_on_other_labelled_images_shows_those(page_of: Callable[[str], Page]) -> None:
    assert torch.equal(shown_pixels(page_of("labelled")), 255 - BYTES[[0, 2, 3]])


def test_no_more_than_24_images_are_shown_and_the_others_are_counted(page_of: Callable[[str], Page]) -> None:
    page = page_of("forty")
    assert len(page.all("img")) == 24
    assert "16 more" in page.words
    assert len(page.source) < 400_000  # of noise, which no JPEG likes


def test_what_is_no_picture_is_listed(page_of: Callable[[str], Page]) -> None:
    page = page_of("vectors")
    assert page.all("img") == []
    assert re.search(r"image is before after image \d+ [01] [01] [01] (became|still)", page.words)


def test_the_shift_of_every_layer_is_told(page_of: Callable[[str], Page]) -> None:
    for number, layer in enumerate(once().shift.layers, 1):
        row = f"{number} {layer.name} {layer.score:.2f} {layer.mean_shift:.3f} {layer.std_ratio:.3f}"
        assert row in page_of("lccs").words


def test_calibration_is_told_where_something_was_held_out(page_of: Callable[[str], Page]) -> None:
    assert "calibration error" in page_of("evidence").words
    assert "calibration" not in page_of("lccs").words


def test_what_held_out_images_chose_is_told(folder: Path) -> None:
    answers = {"blend + all": HELD, "blend": replace(HELD, adapted=HELD.source)}
    choice = replace(Choice.of(answers), chosen="blend", large=("blend + all",))
    words = words_of(adaptation_page(with_evidence(choice=choice), folder / "chosen.html"))
    assert re.search("Blend was taken: .* right .blend . all", words)


def test_the_lines_to_copy_name_the_file(folder: Path) -> None:
    words = words_of(adaptation_page(bare(), folder / "named.html", "a place's.safetensors"))
    assert 'source = fewshift.revert(adapted, "a place\'s.safetensors")' in words
    assert "--delta 'a place'\"'\"'s.safetensors' images/" in words
    assert "result.delta.save" not in words


def test_classes_without_an_image_are_named(page_of: Callable[[str], Page]) -> None:
    assert re.search(r"ithout any image: never \? seen", page_of("lccs").words)


def test_the_summary_counts(page_of: Callable[[str], Page]) -> None:
    assert "6 labelled images of 3 classes (k = 2 of each)" in page_of("lccs").words
    # weight and bias of two layers of three channels, four bytes each
    assert re.search("4 of its 16 tensors .*48 bytes", page_of("lccs").words)


def test_all_settings_versions_and_fingerprints_are_told(page_of: Callable[[str], Page]) -> None:
    words = page_of("lccs").words
    for name, value in once().method.settings().items():
        assert f"{name} {value}" in words
    assert f"torch {torch.__version__}" in words
    assert once().delta.source.weights in words
    assert once().delta.adapted.weights in words


def test_sections_without_data_disappear(folder: Path, page_of: Callable[[str], Page]) -> None:
    words = page_of("nothing").words
    assert not re.search("What changed|How it was learned|Use it|Class by class|probabilities", words)
    assert "Is there a shift?" in words
    flat = nn.Sequential(nn.Flatten(), nn.Linear(108, len(EVIL))).eval()
    page = Page(adaptation_page(adapted("source", flat), folder / "flat.html"))
    assert page.all("svg") == []
    assert "Is there a shift?" not in page.words


def test_long_tables_are_folded_and_short_ones_are_not(folder: Path, page_of: Callable[[str], Page]) -> None:
    deep = adapted("adabn", network(layers=21))
    assert "All 21 layers" in words_of(adaptation_page(deep, folder / "deep.html"))
    assert page_of("lccs").all("details") == [{"class": "engineers"}]


def test_layers_left_alone_are_listed_with_the_reason(folder: Path) -> None:
    model = network()
    model.insert(1, nn.InstanceNorm2d(3))
    words = words_of(adaptation_page(adapted("adabn", model), folder / "skipped.html"))
    assert re.search("1 InstanceNorm2d .*no source statistics", words)


def test_a_single_draw_has_no_spread(folder: Path) -> None:
    demo = demonstration()
    rows = tuple(replace(row, accuracies=row.accuracies[:1]) for row in demo.rows)
    words = words_of(demo_page(replace(demo, rows=rows, draws=1), folder / "single.html"))
    assert "lccs 2 60.0 +10.0 1" in words


def test_the_demo_table_has_mean_spread_and_paired_gain(page_of: Callable[[str], Page]) -> None:
    words = page_of("demo").words
    assert f"source {DASH} 51.0 ± 1.0 {DASH} 2" in words
    assert "lccs 2 62.0 ± 2.0 +11.0 ± 1.0 2" in words  # 10 and 12 points over the source
    assert "1,234" in words


def test_the_same_result_gives_the_same_bytes(folder: Path, page_of: Callable[[str], Page]) -> None:
    again = replace(adapted(), seconds=once().seconds)
    assert Page(adaptation_page(again, folder / "again.html")).source == page_of("lccs").source


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
def test_a_path_that_cannot_be_written_is_one_error_and_leaves_nothing(tmp_path: Path, where: str) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(FewshiftError, match="cannot write"):
        adaptation_page(once("source"), tmp_path / where)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_a_result_writes_its_own_page(tmp_path: Path) -> None:
    result: Adaptation = once("source")
    assert result.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert "left as it is" in words_of(tmp_path / "page.html")
