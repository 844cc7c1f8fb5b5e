"""A network may write into its input: the images stay as they are, and so does the result."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import fewshift
from fewshift import METHODS, Network, Preprocess, Sites, Target
from fewshift.core.hooks import keeps_input
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from tests.helpers.hard_networks import MEAN, STD, InPlace, Scaling, Sometimes, WithoutGradients, made, twin
from tests.helpers.methods import quick
from tests.helpers.networks import Street, make_support, make_tiny, same_state, scenes, state, unsettle


@pytest.fixture
def pair():
    network = made(InPlace)
    return network, twin(network, Scaling)


def untouched(call, *images):
    """What the call gives, after a look at the images."""
    before = [image.clone() for image in images]
    result = call()
    assert all(map(torch.equal, images, before))
    return result


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_adapts_a_network_that_writes_into_its_input(pair, name):
    support, more = make_support(), make_support(seed=3).images
    target = Target(support, Unlabelled(more))
    ours, expected = (untouched(lambda m=m: quick(name).adapt(m, target), support.images, more) for m in pair)
    if METHODS[name]().plain:
        assert same_state(state(ours), state(expected))
    else:
        fresh = make_support(seed=7).images
        given = fresh.clone() if METHODS[name].needs is not Needs.STREAM else fresh
        assert torch.equal(ours(given), expected(fresh))


@pytest.mark.parametrize("method", ["auto", "lccs", "adabn"])
@pytest.mark.parametrize("validate", ["cv", "loo", "images"])
def test_adapt_judges_it_as_its_twin(pair, method, validate):
    if method == "auto" and validate == "loo":
        pytest.skip("minutes")
    support, other = make_support(shots=2), make_support(shots=2, seed=9)
    judges = (other.images, other.labels) if validate == "images" else validate
    ours, expected = (
        untouched(
            lambda m=m: fewshift.adapt(m, support, method=quick(method), validate=judges, accept="always"),
            support.images,
            other.images,
        )
        for m in pair
    )
    assert same_state(state(ours.model), state(expected.model))
    assert ours.gain == expected.gain
    assert type(ours.model) is InPlace
    assert not keeps_input(ours.model)


def test_evaluate_shift_inspect_and_compare_leave_images_as_they_are(pair):
    support = make_support(shots=3)
    images, labels = support.images, support.labels
    for call in (
        lambda m: fewshift.evaluate(m, (images, labels)).to_json(),
        lambda m: fewshift.shift(m, images).score,
        lambda m: fewshift.inspect(m, images).layers,
        lambda m: [row.accuracy for row in fewshift.compare(m, (images, labels), ["source", "adabn"]).rows],
        lambda m: fewshift.learning_curve(m, (images, labels), method="adabn", draws=1).points,
    ):
        ours, expected = (untouched(lambda m=m, call=call: call(m), images) for m in pair)
        assert ours == expected


def test_scenes_are_labelled_as_by_the_twin():
    class Scene(Street):
        def forward(self, images):
            return super().forward((images - MEAN) / STD)

    class SceneInPlace(Street):
        def forward(self, images):
            return super().forward(images.sub_(MEAN).div_(STD))

    torch.manual_seed(0)
    network = unsettle(SceneInPlace())
    plain = twin(network, Scene)
    support = scenes(3)
    for call in (
        lambda m: fewshift.evaluate(m, support).to_json(),
        lambda m: fewshift.evaluate(m, support, window=8, stride=4).to_json(),
        lambda m: state(fewshift.adapt(m, support, method="lccs", accept="always").model)["stem.1.weight"].tolist(),
    ):
        ours, expected = (untouched(lambda m=m, call=call: call(m), support.images) for m in (network, plain))
        assert ours == expected


def test_images_of_different_sizes_are_predicted_by_both_networks_alike(pair, tmp_path):
    network, plain = pair
    for number, size in enumerate([(8, 8), (10, 8), (8, 8)]):
        Image.new("RGB", size, (40 * number, 90, 200)).save(tmp_path / f"{number}.png")
    delta = fewshift.adapt(network, make_support(), method="adabn", accept="always").delta
    steps = Preprocess(None, None, (0.5,) * 3, (0.2,) * 3)
    ours, expected = (
        fewshift.predict(m, tmp_path, delta=delta, preprocess=steps, classes=["a", "b", "c"], with_source=True)
        for m in (network, plain)
    )
    assert ours.to_json() == expected.to_json()


def test_sites_leave_images_as_they_are(pair, tmp_path):
    support = make_support(shots=2)
    for number, place in enumerate((0, 2)):
        moved = support.images + place
        result = fewshift.adapt(pair[0], (moved, support.labels), method="adabn", accept="always", validate=None)
        result.delta.save(tmp_path / f"{number}.safetensors")
    images = make_support(seed=4).images[:4]
    for of in (["0"] * 4, ["0", "1", None, "0"]):
        ours, expected = (untouched(lambda m=m, of=of: Sites(m, tmp_path)(images, of=of), images) for m in pair)
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["network.pt2", "network.onnx"])
def test_export_leaves_images_as_they_are(pair, name, tmp_path):
    images = make_support().images
    exported = untouched(lambda: fewshift.export(pair[0], tmp_path / name, images=images), images)
    assert exported.agreement.good


@pytest.mark.parametrize("kind", [InPlace, Sometimes, WithoutGradients])
@pytest.mark.parametrize("method", ["adabn", "lccs", "auto"])
def test_it_does_not_matter_when_a_network_writes(kind, method):
    support = make_support(shots=4)
    network = made(kind)
    result = untouched(lambda: fewshift.adapt(network, support, method=quick(method), accept="always"), support.images)
    untouched(lambda: fewshift.learning_curve(network, support, method="adabn", draws=1), support.images)
    expected = fewshift.adapt(twin(network, Scaling), support, method=quick(method), accept="always")
    assert same_state(state(result.model), state(expected.model))


def test_a_network_that_is_handed_over_works_on_its_input_itself(tiny, support):
    assert not keeps_input(fewshift.adapt(tiny, support, method="adabn", accept="always").model)


def test_one_output_for_two_classes_is_found_without_writing_into_the_images():
    class Single(InPlace):
        def __init__(self):
            super().__init__(classes=1)

    support = make_support(classes=2)
    network = untouched(lambda: Network.of(made(Single), support.images), support.images)
    assert (network.single, network.head, network.classes) == (True, "fc", 2)


def test_a_hook_of_its_author_may_write_into_the_input_too():
    network, twin_of_it = make_tiny(), make_tiny()
    network.register_forward_pre_hook(lambda _, inputs: (inputs[0].mul_(2),))
    twin_of_it.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    support = make_support()
    ours, expected = (
        untouched(lambda m=m: fewshift.adapt(m, support, method=quick("lccs"), validate=None).model, support.images)
        for m in (network, twin_of_it)
    )
    assert same_state(state(ours), state(expected))
