"""One front door: folders, tensors, cards and commands lead to the same adaptation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.main import get_command

import fewshift
from fewshift import FewshiftError, Preprocess
from fewshift.cli import app
from fewshift.studio import serve
from tests.helpers.networks import make_tiny

CLASSES = ("ant", "bee", "cat")
STEPS = Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
RESEARCH = {"demo", "train", "bench", "report", "list"}  # of the lab: not part of the front door


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Weights with a card, and four photographs of each class."""
    save_file(make_tiny().state_dict(), tmp_path / "w.safetensors")
    card = {"classes": CLASSES, "crop": 8, "mean": [0.5] * 3, "std": [0.25] * 3}
    (tmp_path / "w.json").write_text(json.dumps(card))
    generator = torch.Generator().manual_seed(0)
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = torch.randint(0, 120, (8, 8, 3), generator=generator)
            pixels[:, :, label] += 120
            Image.fromarray(pixels.byte().numpy()).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path


def load(place: Path) -> torch.nn.Module:
    return fewshift.load("tests.helpers.networks:make_tiny", place / "w.safetensors")


def weights(result: fewshift.Adaptation) -> dict[str, torch.Tensor]:
    return dict(result.candidate.state_dict())


def same(left: fewshift.Adaptation, right: fewshift.Adaptation) -> bool:
    return all(torch.equal(tensor, weights(right)[name]) for name, tensor in weights(left).items())


def test_a_loaded_network_knows_how_it_wants_its_images(place: Path) -> None:
    known = fewshift.adapt(load(place), place / "photos", method="adabn", validate=None)
    spelled = fewshift.adapt(
        make_tiny(), place / "photos", method="adabn", validate=None, preprocess=STEPS, classes=CLASSES
    )
    assert same(known, spelled)
    assert known.classes == spelled.classes == CLASSES
    assert known.delta.preprocess == STEPS.to_json()


def test_the_adapted_network_knows_it_too(place: Path) -> None:
    adapted = fewshift.adapt(load(place), place / "photos", method="adabn", validate=None).model
    rows = fewshift.predict(adapted, place / "photos").rows
    assert {row.name for row in rows} <= set(CLASSES)


def test_a_timm_model_is_asked_for_its_own_preprocessing(place: Path) -> None:
    model = timm.create_model("resnet18", num_classes=3)
    result = fewshift.adapt(model, place / "photos", method="source", validate=None)
    own = timm.data.resolve_model_data_config(model)
    assert result.preprocess is not None
    assert (result.preprocess.crop, result.preprocess.mean) == (own["input_size"][-1], tuple(own["mean"]))


def as_table(place: Path, numbers: str = "*", name: str = "labels.csv") -> Path:
    """A CSV of the photographs with these numbers."""
    files = sorted((place / "photos").glob(f"*/{numbers}.png"))
    table = place / name
    table.write_text("".join(f"{file.relative_to(place)},{file.parent.name}\n" for file in files))
    return table


def test_every_form_of_labels_gives_the_same_adaptation(place: Path) -> None:
    files = sorted((place / "photos").glob("*/*.png"))
    tasks = [{"data": {"image": str(file)}, "annotations": [{"result": [choice(file.parent.name)]}]} for file in files]
    (place / "tasks.json").write_text(json.dumps(tasks))
    tensors = [STEPS(Image.open(file)) for file in files], [CLASSES.index(file.parent.name) for file in files]
    dataset = torch.utils.data.TensorDataset(torch.stack(tensors[0]), torch.tensor(tensors[1]))
    forms = (
        as_table(place),
        place / "tasks.json",
        [(file, file.parent.name) for file in files],
        torch.utils.data.DataLoader(dataset, 5),
    )
    expected = fewshift.adapt(load(place), place / "photos", method="lccs", seed=1)
    for form in forms:
        result = fewshift.adapt(load(place), form, method="lccs", seed=1)
        assert same(result, expected)
        assert (result.classes, result.gain) == (CLASSES, expected.gain)


def choice(name: str) -> dict[str, object]:
    return {"type": "choices", "value": {"choices": [name]}}


def test_lists_judge_and_are_compared_with_the_support(place: Path) -> None:
    support, others = as_table(place, "[01]", "support.csv"), as_table(place, "[23]", "others.csv")
    model = load(place)
    result = fewshift.adapt(model, support, method="adabn", validate=others)
    assert result.validation is not None
    assert len(result.validation) == 6
    curve = fewshift.learning_curve(model, support, method="adabn", labelled=str(others), draws=1)
    assert curve.outside
    scores = fewshift.evaluate(model, others, support=support)
    assert sum(scores.labels) == 6
    with pytest.raises(FewshiftError, match=r"6 of the 6 support images are also .*ant/0\.png"):
        fewshift.evaluate(model, place / "photos", support=support)
    with pytest.raises(FewshiftError, match=r"also among"):
        fewshift.adapt(model, support, method="adabn", validate=as_table(place, "[12]"))


def test_a_function_preprocesses_wherever_files_are_read(place: Path) -> None:
    def function(image: Image.Image) -> torch.Tensor:
        return STEPS(image)

    options = {"preprocess": function, "classes": CLASSES}
    result = fewshift.adapt(make_tiny(), place / "photos", method="adabn", accept="always", **options)
    expected = fewshift.adapt(load(place), place / "photos", method="adabn", accept="always")
    assert same(result, expected)
    assert result.preprocess is result.delta.preprocess is None  # a file cannot store a function
    assert result.report(place / "page.html").stat().st_size > 10_000
    model, delta = make_tiny(), result.delta
    predicted = fewshift.predict(model, place / "photos", delta=delta, **options)
    assert predicted.rows == fewshift.predict(load(place), place / "photos", delta=expected.delta).rows
    scores = fewshift.evaluate(model, place / "photos", delta=delta, **options)
    assert scores.accuracy == fewshift.evaluate(load(place), place / "photos", delta=expected.delta).accuracy
    seen = fewshift.shift(model, place / "photos", preprocess=function)
    assert seen.score == fewshift.shift(load(place), place / "photos").score
    with pytest.raises(FewshiftError, match="not known: pass preprocess="):
        fewshift.predict(model, place / "photos", delta=delta)


def test_where_nobody_knows_it_is_one_sentence(place: Path) -> None:
    with pytest.raises(FewshiftError, match="preprocess="):
        fewshift.adapt(make_tiny(), place / "photos")


def test_shots_draw_as_many_images_of_every_class_and_larger_draws_contain_smaller_ones(place: Path) -> None:
    drawn = {}
    for shots in (1, 2, 3):
        result = fewshift.adapt(load(place), place / "photos", method="source", shots=shots, validate=None, seed=4)
        assert result.support is not None
        assert set(result.support.counts.values()) == {shots}
        drawn[shots] = set(map(str, result.support.files or ()))
    assert drawn[1] < drawn[2] < drawn[3]


def test_a_repeated_picture_is_named_by_its_files(place: Path) -> None:
    (place / "photos" / "bee" / "again.png").write_bytes((place / "photos" / "ant" / "0.png").read_bytes())
    with pytest.raises(FewshiftError, match=r"ant/0\.png.*bee/again\.png|bee/again\.png.*ant/0\.png"):
        fewshift.adapt(load(place), place / "photos", method="adabn")


def test_every_daily_command_is_a_call_in_python() -> None:
    commands = set(get_command(app).commands) - RESEARCH  # type: ignore[attr-defined]
    named = {name: getattr(fewshift, name.replace("-", "_"), None) for name in commands}
    named |= {"show": fewshift.Delta.load, "card": fewshift.write_card, "sites": fewshift.list_sites, "studio": serve}
    missing = [name for name, call in named.items() if not callable(call)]
    assert not missing


def test_the_command_writes_the_delta_that_python_makes(place: Path, command) -> None:
    out = place / "camera.safetensors"
    words = ["adapt", "--model", "tests.helpers.networks:make_tiny", "--weights", place / "w.safetensors"]
    words += ["--support", place / "photos", "--method", "adabn", "--accept", "always", "--out", out]
    assert command(*words).code == 0
    result = fewshift.adapt(load(place), place / "photos", method="adabn", accept="always")
    assert out.read_bytes() == result.delta.save(place / "python.safetensors").read_bytes()


@pytest.mark.parametrize("spelling", ["w.safetensors", "w.json", "photos/../w.safetensors", "link.safetensors"])
def test_no_command_writes_over_what_it_reads(place: Path, command, spelling: str) -> None:
    (place / "link.safetensors").symlink_to(place / "w.safetensors")
    before = {name: (place / name).read_bytes() for name in ("w.safetensors", "w.json")}
    network = ["--model", "tests.helpers.networks:make_tiny", "--weights", place / "w.safetensors"]
    adapt = ["adapt", *network, "--support", place / "photos", "--method", "adabn", "--accept", "always"]
    for words in ([*adapt, "--out"], [*adapt, "--report"], ["predict", *network, place / "photos", "--out"]):
        assert command(*words, place / spelling).code == 2
    assert before == {name: (place / name).read_bytes() for name in before}


def test_predictions_do_not_replace_the_images(place: Path, command) -> None:
    image = place / "photos" / "ant" / "0.png"
    before = image.read_bytes()
    words = ["predict", "--model", "tests.helpers.networks:make_tiny", "--weights", place / "w.safetensors"]
    for images in (image, place / "photos"):
        assert command(*words, images, "--out", image).code == 2
    assert image.read_bytes() == before


def test_merging_does_not_replace_the_source(place: Path) -> None:
    net = load(place)
    delta = fewshift.adapt(net, place / "photos", method="adabn", validate=None).delta
    with pytest.raises(FewshiftError, match="choose another"):
        fewshift.merge(net, delta, place / "w.safetensors")


def test_a_rejected_adaptation_says_that_nothing_was_written(place: Path, command) -> None:
    words = ["adapt", "--model", "tests.helpers.networks:make_tiny", "--weights", place / "w.safetensors"]
    done = command(*words, "--support", place / "photos", "--method", "adabn", "--accept", 200, "--out", place / "d")
    assert done.code == 3
    assert "--write-rejected" in done.stdout
    assert not (place / "d").exists()


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda net, place: fewshift.adapt(net, place / "photos", shots=0), "shots=0"),
        (lambda net, place: fewshift.adapt(net, place / "photos", shots=1.5), "shots=1.5"),
        (lambda net, place: fewshift.predict(net, place / "photos", batch_size=0), "batch_size=0"),
        (lambda net, _: fewshift.predict(net, torch.zeros(1, 3, 8, 8)), "Tensor is no image file"),
        (lambda net, _: fewshift.evaluate(net, (torch.zeros(2, 3, 8, 8), torch.tensor([0, 7]))), "label 7"),
        (lambda *_: fewshift.load(5), "name.*int"),
        (lambda *_: fewshift.load("digits", 5), "weights.*int"),
        (lambda *_: fewshift.load("timm:resnet18", "random", classes="abc"), "classes='abc'.*list of names"),
        (lambda *_: fewshift.load("timm:resnet18", "random", classes=[1, 2]), "class name 1.*int"),
        (lambda *_: fewshift.inspect("x"), "nn.Module.*str"),
        (lambda net, _: fewshift.inspect(net, size="big"), "size='big'"),
        (lambda net, _: fewshift.inspect(net, "photos"), "images.*str"),
        (lambda _, place: fewshift.adapt("timm:resnet18", place / "photos"), "nn.Module.*str"),
        (lambda net, place: fewshift.adapt(net, place / "photos", classes=3), "classes=3.*int"),
        (lambda net, place: fewshift.adapt(net, place / "photos", method=["auto"]), "no method"),
        (lambda net, place: fewshift.adapt(net, place / "photos", progress=5), "progress=5.*True"),
        (lambda net, place: fewshift.compare(net, place / "photos", 5), "methods=5.*list"),
        (lambda _, place: fewshift.evaluate(5, place / "photos"), "nn.Module.*int"),
        (lambda net, place: fewshift.evaluate(net, place / "photos", classes="abc"), "classes='abc'"),
        (lambda net, place: fewshift.predict(net, place / "photos", classes="abc"), "classes='abc'"),
        (lambda net, place: fewshift.predict(net, place / "photos", delta=5), "delta.*int"),
        (lambda net, _: fewshift.apply(net, 5), "delta.*int"),
        (lambda net, _: fewshift.merge(net, fewshift.Delta.between(net, net), 5), "output.*int"),
        (lambda *_: fewshift.revert("x", fewshift.Delta.between(make_tiny(), make_tiny())), "nn.Module.*str"),
        (lambda *_: fewshift.Support([1], [2]), "images.*list"),
    ],
)
def test_a_mistake_in_python_is_one_sentence(place: Path, call, facts: str) -> None:
    with pytest.raises(FewshiftError, match=facts):
        call(load(place), place)
