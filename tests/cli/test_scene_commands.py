"""Commands on networks that label every pixel: real files in, label maps, scores and pages out."""
# ruff: noqa: F811 - fixtures are imported, and then are arguments

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import fewshift
from fewshift.images.scenes import scene_folder
from tests.cli.test_commands import SIZES, place, run  # noqa: F401

CLASSES = ("grass", "water", "stone")
FACTORY = "tests.cli.test_scene_commands:labeller"
STEPS = ["--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]
COLOURS = np.array([[90, 200, 80], [60, 90, 210], [190, 180, 170]])


class Labeller(nn.Module):
    """Takes a pixel for the class whose colour it resembles, after BatchNorm with the source's statistics."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.head = nn.Conv2d(3, num_classes, 1)
        colours = torch.tensor((COLOURS / 255 - 0.5) / 0.25, dtype=torch.float32)
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(3)[:, :, None, None])
            self.bn.running_mean.copy_(colours.mean(0))
            self.bn.running_var.copy_(colours.var(0, correction=0))
            prototypes = (colours - colours.mean(0)) / colours.std(0, correction=0)
            self.head.weight.copy_(prototypes[torch.arange(num_classes) % 3, :, None, None])
            self.head.bias.copy_(-prototypes[torch.arange(num_classes) % 3].square().sum(1) / 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.bn(self.stem(images)))}


def labeller(num_classes: int = 3) -> nn.Module:
    return Labeller(num_classes).eval()


def paint(root: Path, count: int, seed: int, size: tuple[int, int] = (20, 28)) -> None:
    """Scenes at dusk, three patches each with a strip without labels: the colours are darker and bluer."""
    generator = np.random.default_rng(seed)
    for name in ("images", "labels"):
        (root / name).mkdir(parents=True)
    for index in range(count):
        labels = np.full(size, index % 3, np.uint8)
        labels[:, size[1] // 2 :] = (index + 1) % 3
        labels[size[0] // 2 :, : size[1] // 3] = (index + 2) % 3
        pixels = COLOURS[labels] * [0.5, 0.55, 0.8] + [0, 5, 40] + generator.normal(0, 12, (*size, 3))
        labels[:2] = 255
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / "images" / f"{index}.png")
        Image.fromarray(labels).save(root / "labels" / f"{index}.png")


@pytest.fixture
def scenes(place: Path) -> Path:
    """Weights of a labeller, scenes to adapt to and others to judge by."""
    save_file(labeller().state_dict(), place / "labeller.safetensors")
    paint(place / "support", 5, seed=0)
    paint(place / "test", 7, seed=1)
    return place


def options(place: Path) -> list[object]:
    weights = place / "labeller.safetensors"
    return ["--model", FACTORY, "--weights", weights, *STEPS, "--classes", ",".join(CLASSES)]


def read(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.array(image)


def answer(model: nn.Module, file: Path) -> np.ndarray:
    """The plain forward pass on the plain image."""
    image = torch.from_numpy(read(file).astype(np.float32) / 255).permute(2, 0, 1)
    with torch.no_grad():
        return model(((image - 0.5) / 0.25)[None])["out"].argmax(1)[0].numpy()


def naive_iou(truth: np.ndarray, answers: np.ndarray, label: int) -> float:
    known = truth != 255
    both = ((truth == label) & (answers == label) & known).sum()
    return 100 * both / (((truth == label) | (answers == label)) & known).sum()


@pytest.fixture
def delta(run, scenes) -> Path:
    file = scenes / "dusk.safetensors"
    done = run("adapt", *options(scenes), "--support", scenes / "support", "--out", file)
    assert done.code == 0, done.stderr
    return file


def test_adapt_predict_and_evaluate_are_one_straight_line(run, scenes, delta):
    out = scenes / "answers"
    done = run("predict", *options(scenes), "--delta", delta, scenes / "test/images", "--out", out)
    assert done.code == 0, done.stderr
    adapted = fewshift.apply(labeller(), delta)
    expected = {file.name: answer(adapted, file) for file in (scenes / "test/images").iterdir()}
    for name, labels in expected.items():
        with Image.open(out / "labels" / name) as image:
            assert image.mode == "P"
        assert np.array_equal(read(out / "labels" / name), labels)
        assert (out / "overlays" / name).with_suffix(".jpg").is_file()

    found = run("evaluate", *options(scenes), "--delta", delta, scenes / "test", "--json")
    facts = json.loads(found.stdout)
    truth = np.stack([read(scenes / "test/labels" / name) for name in expected])
    for network, answers in (
        ("adapted", np.stack(list(expected.values()))),
        ("source", np.stack([answer(labeller(), scenes / "test/images" / name) for name in expected])),
    ):
        by_class = [naive_iou(truth, answers, label) for label in range(3)]
        own = [facts["per_class"][name]["iou"][network] for name in CLASSES]
        assert own == pytest.approx(by_class)
        assert facts["mean_iou"][network] == pytest.approx(np.mean(by_class))
        right = (truth == answers)[truth != 255].mean()
        assert facts["pixel_accuracy"][network] == pytest.approx(100 * right)
    assert facts["mean_iou"]["adapted"] > facts["mean_iou"]["source"] + 10
    assert facts["images"] == 7
    assert facts["pixels"] == (truth != 255).sum()
    table = run("evaluate", *options(scenes), "--delta", delta, scenes / "test").stdout
    assert all(word in table for word in (*CLASSES, "mean IoU", "pixel accuracy", "source IoU", "adapted IoU"))


def test_the_page_says_whether_images_were_looked_for_that_were_adapted_to(run, scenes, delta):
    page = scenes / "dusk.html"
    words = ["evaluate", *options(scenes), "--delta", delta, "--report", page]
    assert run(*words, scenes / "test").code == 0
    assert "this page cannot know" in page.read_text()
    assert run(*words, "--support", scenes / "support", scenes / "test").code == 0
    assert f"None of these images is among those of {scenes / 'support'}" in page.read_text()
    refused = run(*words, "--support", scenes / "support", scenes / "support")
    assert refused.code == 1
    assert "5 of the 5 support images are also among the 5 evaluation images" in refused.stderr


def test_the_page_shows_the_images_that_changed_most(run, scenes, delta):
    page = scenes / "dusk.html"
    done = run("evaluate", *options(scenes), "--delta", delta, scenes / "test", "--report", page, "--json")
    assert done.code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["report"] == str(page)
    gains = {}
    for file in sorted((scenes / "test/images").iterdir()):
        truth = read(scenes / "test/labels" / file.name)
        before, after = answer(labeller(), file), answer(fewshift.apply(labeller(), delta), file)
        present = [
            [label for label in range(3) if ((truth == label) | (it == label))[truth != 255].any()]
            for it in (before, after)
        ]
        old, new = (
            np.mean([naive_iou(truth, it, label) for label in labels])
            for it, labels in zip((before, after), present, strict=True)
        )
        gains[file.name] = round(new, 1) - round(old, 1)
    text = page.read_text()
    best = sorted(gains, key=gains.__getitem__)[-3:]
    for name in best:
        assert f"<b>{name}</b>" in text
        assert f"({gains[name]:+.1f})" in text
    assert f"better on {sum(it > 0 for it in gains.values())}" in " ".join(text.split())


def test_label_maps_have_the_size_of_the_original_image(run, scenes):
    Image.new("RGB", (31, 17), (60, 90, 210)).save(scenes / "wide.jpg")
    done = run("predict", *options(scenes), "--resize", 8, scenes / "wide.jpg", "--out", scenes / "out", "--json")
    facts = json.loads(done.stdout)
    assert read(scenes / "out/labels/wide.png").shape == (17, 31)
    assert read(scenes / "out/overlays/wide.jpg").shape == (17, 31, 3)
    assert facts["pixels"] == {"grass": 0, "water": 31 * 17, "stone": 0}


def test_names_that_collide_stay_apart(run, scenes):
    folder = scenes / "many"
    for name in ("a/x.png", "b/x.png", "b/x.jpg", "y.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / name)
    assert run("predict", *options(scenes), folder, "--out", scenes / "out").code == 0
    written = {str(it.relative_to(scenes / "out")) for it in (scenes / "out").rglob("*") if it.is_file()}
    names = ("a/x", "b/x.png", "b/x.jpg", "y")
    expected = {f"labels/{it}.png" for it in names} | {f"overlays/{it}.jpg" for it in names}
    assert written == expected | {"palette.txt"}


def test_answers_can_be_read_back_as_labels(run, scenes):
    out = scenes / "out"
    run("predict", *options(scenes), scenes / "test/images", "--out", out)
    (scenes / "test/images").rename(out / "images")
    again = scene_folder(out, fewshift.Preprocess(None, None, (0.5,) * 3, (0.25,) * 3))
    assert again.classes == CLASSES
    file = again.files[3]
    assert np.array_equal(again[3][1].numpy(), answer(labeller(), file))


def test_a_window_changes_nothing_for_a_network_without_context(run, scenes):
    whole = run("evaluate", *options(scenes), scenes / "test", "--json").stdout
    parts = run("evaluate", *options(scenes), scenes / "test", "--json", "--window", 9, "--stride", 4).stdout
    assert json.loads(whole) == json.loads(parts)
    for words in ([], ["--window", 7]):
        run("predict", *options(scenes), scenes / "test/images", "--out", scenes / f"out{len(words)}", *words)
    for file in (scenes / "out0/labels").iterdir():
        assert np.array_equal(read(file), read(scenes / "out2/labels" / file.name))


def test_shots_are_images_in_all_drawn_with_the_seed(run, scenes, monkeypatch):
    seen = []
    real = fewshift.adapt
    monkeypatch.setattr(
        fewshift, "adapt", lambda model, support, **rest: seen.append(support) or real(model, support, **rest)
    )
    done = run("adapt", *options(scenes), "--support", scenes / "support", "--shots", 2, "--seed", 3)
    assert done.code == 0, done.stderr
    assert "2 labelled images of 3 classes" in done.stdout
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3))[:2].tolist()
    for labels, index in zip(seen[0].labels, order, strict=True):
        assert np.array_equal(labels.numpy(), read(scenes / f"support/labels/{index}.png"))


def test_json_and_report_of_adapt_are_those_of_any_network(run, scenes):
    page = scenes / "r.html"
    words = ["adapt", *options(scenes), "--support", scenes / "support", "--report", page, "--json"]
    facts = json.loads(run(*words).stdout)
    assert facts["method"] == "lccs"
    assert [layer["name"] for layer in facts["layers"]] == ["bn"]
    assert "no evidence that it does so elsewhere" in " ".join(page.read_text().split())


def test_images_of_different_sizes_are_adapted_to_and_judged(run, scenes):
    paint(scenes / "mixed", 2, seed=2)
    paint(scenes / "more", 1, seed=3, size=(24, 12))
    for kind in ("images", "labels"):
        (scenes / "more" / kind / "0.png").rename(scenes / "mixed" / kind / "tall.png")
    done = run("adapt", *options(scenes), "--support", scenes / "mixed", "--report", scenes / "r.html")
    assert done.code == 0, done.stderr
    assert run("evaluate", *options(scenes), scenes / "mixed").code == 0


def test_cityscapes_is_read_as_it_is_published(run, place):
    for index in range(2):
        name, city = f"bonn_{index:06d}_000019", "train/bonn"
        for kind, end in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds")):
            folder = place / "city" / kind / city
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(index).integers(0, 255, (8, 12, 3)).astype(np.uint8)
            labels = np.array([[7] * 6 + [23] * 6] * 7 + [[0] * 12], np.uint8)  # road, sky, unlabelled
            Image.fromarray(pixels if kind == "leftImg8bit" else labels).save(folder / f"{name}_{end}.png")
    save_file(labeller(19).state_dict(), place / "nineteen.safetensors")
    words = ["--model", FACTORY, "--weights", place / "nineteen.safetensors", *STEPS]
    done = run("adapt", *words, "--support", place / "city", "--out", place / "d.safetensors")
    assert done.code == 0, done.stderr
    facts = json.loads(run("evaluate", *words, "--delta", place / "d.safetensors", place / "city", "--json").stdout)
    assert facts["pixels"] == 2 * 7 * 12
    assert facts["per_class"]["road"]["pixels"] == facts["per_class"]["sky"]["pixels"] == 84


def test_a_network_that_wants_multiples_of_32_labels_any_image(run, scenes):
    pytest.importorskip("segmentation_models_pytorch")
    words = ["--model", "smp:fpn/resnet18", "--weights", "random", *STEPS, "--classes", "a,b,c"]
    done = run("predict", *words, scenes / "test/images", "--out", scenes / "out", "--json")
    assert done.code == 0, done.stderr
    assert sum(json.loads(done.stdout)["pixels"].values()) == 7 * 20 * 28


def test_label_files_are_not_labelled(run, scenes):
    done = run("predict", *options(scenes), scenes / "test", "--out", scenes / "out")
    assert done.code == 0, done.stderr
    assert "7 images labelled" in done.stdout
    names = {file.name for file in (scenes / "test/images").iterdir()}
    assert {str(it.relative_to(scenes / "out/labels")) for it in (scenes / "out/labels").rglob("*")} == names


class Coarse(nn.Module):
    """A quarter of the size in each direction."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.head = nn.Conv2d(3, num_classes, 4, 4, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.bn(images))


def coarse(num_classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Coarse(num_classes).eval()


@pytest.mark.parametrize(("name", "side"), [("coarse", 4), ("labeller", 1)])
def test_an_image_of_one_answer_does_not_make_a_classifier(run, scenes, name, side):
    paint(scenes / "tiny", 2, seed=4)
    Image.new("RGB", (side, side)).save(scenes / "tiny/images/0.png")
    Image.new("L", (side, side)).save(scenes / "tiny/labels/0.png")
    words = ["--model", f"tests.cli.test_scene_commands:{name}", *STEPS, "--classes", ",".join(CLASSES)]
    for more in ([], ["--window", 1, "--stride", 1]):
        done = run("predict", *words, scenes / "tiny", "--out", scenes / f"out{len(more)}", *more)
        assert done.code == 0, done.stderr
        assert read(scenes / f"out{len(more)}/labels/0.png").shape == (side, side)
        assert run("evaluate", *words, scenes / "tiny", *more).code == 0
    done = run("adapt", *words, "--support", scenes / "tiny", "--accept", "always")
    assert done.code == 0, done.stderr
    tiny = scenes / "classes/grass/0.png"
    tiny.parent.mkdir(parents=True)
    Image.new("RGB", (side, side)).save(tiny)
    assert "labels every pixel" in run("evaluate", *words, scenes / "classes").stderr


def test_a_broken_image_is_told_at_the_end_and_the_rest_is_done(run, scenes):
    good = (scenes / "test/images/0.png").read_bytes()
    (scenes / "test/images/0.png").write_bytes(good[:60])
    words = ["predict", *options(scenes), scenes / "test/images", "--out", scenes / "out"]
    done = run(*words)
    assert done.code == 1
    assert "6 images labelled" in done.stdout
    assert "1 of 7 images could not be labelled, the first because" in done.stderr
    assert "0.png is damaged and cannot be decoded: replace or remove it, then pass --resume" in done.stderr
    assert "palette.txt" in {it.name for it in (scenes / "out").iterdir()}
    (scenes / "test/images/0.png").write_bytes(good)
    assert run(*words, "--resume").code == 0
    assert len(list((scenes / "out/labels").iterdir())) == len(list((scenes / "out/overlays").iterdir())) == 7


def test_a_run_that_was_stopped_goes_on_where_it_was(run, scenes, monkeypatch):
    from fewshift.cli.scenes import View

    words = ["predict", *options(scenes), scenes / "test/images", "--json"]
    expected = json.loads(run(*words, "--out", scenes / "whole").stdout)
    real, seen = View.labels, []

    def stopping(self, network, image):
        seen.append(image)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(self, network, image)

    monkeypatch.setattr(View, "labels", stopping)
    assert run(*words, "--out", scenes / "parts").code != 0
    assert len(list((scenes / "parts/labels").iterdir())) == 3
    (scenes / "parts/labels/2.png").unlink()  # as if between the overlay and the labels
    done = run(*words, "--out", scenes / "parts", "--resume")
    assert done.code == 0, done.stderr
    assert len(seen) == 4 + 7 - 2
    found = json.loads(done.stdout)
    assert found["pixels"] == expected["pixels"]
    assert [it["confidence"] for it in found["images"]] == [it["confidence"] for it in expected["images"]]
    for file in (scenes / "whole").rglob("*.*"):
        assert file.read_bytes() == (scenes / "parts" / file.relative_to(scenes / "whole")).read_bytes()


def test_only_what_is_by_the_same_network_is_gone_on_with(run, scenes, delta):
    words = ["predict", *options(scenes), scenes / "test/images", "--out", scenes / "out"]
    assert run(*words).code == 0
    before = snapshot(scenes / "out")
    for other in (["--delta", delta], ["--window", 8], ["--resize", 10]):
        done = run(*words, *other, "--resume")
        assert done.code == 1
        assert "0.png is not by this network, classes and options: pass --overwrite" in done.stderr
    assert snapshot(scenes / "out") == before
    assert run(*words, "--delta", delta, "--overwrite").code == 0
    adapted = fewshift.apply(labeller(), delta)
    for file in (scenes / "test/images").iterdir():
        assert np.array_equal(read(scenes / "out/labels" / file.name), answer(adapted, file))
    Image.new("RGB", (28, 20), (60, 90, 210)).save(scenes / "test/images/3.png")  # another image of the same name
    assert run(*words, "--delta", delta, "--resume").code == 0
    assert np.array_equal(read(scenes / "out/labels/3.png"), answer(adapted, scenes / "test/images/3.png"))


def test_predict_leaves_out_a_crop_and_evaluate_keeps_it(run, scenes):
    words = [*options(scenes), "--crop", 8]
    done = run("predict", *words, scenes / "test/images", "--out", scenes / "out")
    assert done.code == 0, done.stderr
    assert done.stderr.strip() == "the crop to 8 pixels is left out: every pixel of an image gets a label"
    for file in (scenes / "test/images").iterdir():
        assert np.array_equal(read(scenes / "out/labels" / file.name), answer(labeller(), file))
    found = run("evaluate", *words, scenes / "test")
    assert "7 images, counted at 8x8 pixels, as the network sees them (files: 28x20)" in found.stdout
    facts = json.loads(run("evaluate", *words, scenes / "test", "--json").stdout)
    assert facts["sizes"] == {"counted": [[8, 8]], "files": [[28, 20]]}
    assert facts["pixels"] <= 7 * 8 * 8


def test_one_image_is_not_called_images(run, scenes):
    paint(scenes / "one", 1, seed=5)
    assert "1 image labelled" in run("predict", *options(scenes), scenes / "one", "--out", scenes / "out").stdout
    assert "IoU in %, 1 image, counted at 28x20 pixels" in run("evaluate", *options(scenes), scenes / "one").stdout
    done = run("adapt", *options(scenes), "--support", scenes / "one", "--shots", 2)
    assert "there is 1 labelled image, 2 shots asked: add 1 or ask for 1" in done.stderr


def test_label_maps_have_the_colours_that_people_know(run, place):
    from fewshift.lab.datasets import street

    save_file(labeller(11).state_dict(), place / "eleven.safetensors")
    words = ["--model", FACTORY, "--weights", place / "eleven.safetensors", *STEPS]
    names = ["--classes", ",".join(street.CAMVID_CLASSES)]
    assert run("predict", *words, *names, place / "photos/ant", "--out", place / "out").code == 0
    lines = (place / "out/palette.txt").read_text().splitlines()
    assert lines[0] == "128 128 128 sky"
    with Image.open(next((place / "out/labels").iterdir())) as image:
        assert tuple(image.getpalette()[:33]) == tuple(it for colour in street.CAMVID_PALETTE for it in colour)


def test_classes_without_names_are_numbers(run, scenes):
    words = ["--model", FACTORY, "--weights", scenes / "labeller.safetensors", *STEPS]
    assert set(json.loads(run("evaluate", *words, scenes / "test", "--json").stdout)["per_class"]) == {"0", "1", "2"}


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


MISTAKES = {
    "no folder": (["predict", "test/images"], "pass --out FOLDER"),
    "a file": (["predict", "test/images", "--out", "labeller.safetensors"], "is not a folder"),
    "among the images": (["predict", "test", "--out", "test/out"], "lies among the images"),
    "over labels": (["predict", "test/images", "--out", "test", "--overwrite"], "has the labels of these images"),
    "labels": (["predict", "support/images", "--out", "test", "--resume"], "is not by this network, classes and opt"),
    "taken": (["predict", "support/images", "--out", "test"], "pass --resume to go on, --overwrite to replace it"),
    "window": (["predict", "test/images", "--out", "out", "--window", 4, "--stride", 5], "leaves gaps"),
    "stride alone": (["predict", "test/images", "--out", "out", "--stride", 5], "without a window"),
    "report alone": (["evaluate", "test", "--report", "r.html"], "pass --delta"),
    "class folders": (["evaluate", "photos", "--classes", "ant,bee,cat"], "labels every pixel"),
    "too few": (
        ["adapt", "--support", "support", "--shots", 6],
        "5 labelled images, 6 shots asked: add 1 or ask for 5",
    ),
    "too many names": (["predict", "test/images", "--out", "out", "--classes", "a,b,c,d"], "does not fit"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(run, scenes, mistake):
    (command, *words), sentence = MISTAKES[mistake]
    before = snapshot(scenes)
    words = [scenes / it if isinstance(it, str) and not it.startswith("-") and "," not in it else it for it in words]
    done = run(command, *options(scenes), *words)
    assert done.code == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert snapshot(scenes) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict", "photos", "--window", 4], "one answer for an image: leave out --window"),
        (["evaluate", "photos", "--window", 4], "one answer for an image: leave out --window"),
        (["predict", "photos", "--resume"], "leave out --overwrite and --resume"),
        (["evaluate", "test"], "has pixel labels"),
        (["adapt", "--support", "test"], "has pixel labels"),
    ],
)
def test_a_network_with_one_answer_for_an_image_is_told_apart(run, scenes, words, sentence):
    network = ["--model", "tests.cli.test_commands:small_network", "--weights", scenes / "w.safetensors", *SIZES]
    command, *rest = words
    done = run(command, *network, *(scenes / it if it in {"photos", "test"} else it for it in rest))
    assert done.code == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
