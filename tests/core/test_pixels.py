"""Pixel labels: the same methods, the same numbers, whatever the size of the images and however they pass."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import fewshift
from fewshift import LCCS, METHODS, FewshiftError, Network, Support, Target
from fewshift.core.losses import at_labels, cross_entropy
from fewshift.core.network import logits_of
from fewshift.methods.finetune import L2
from tests.helpers.networks import STREET_CLASSES, Street, mixed_sizes, scenes, street, unsettle

# losses and labels


def test_coarse_answers_are_upsampled_to_the_labels():
    support = scenes()
    fine, coarse = street(), street(coarse=True)
    assert Network.of(coarse, support.images).output == (STREET_CLASSES, 8, 12)
    logits = at_labels(coarse(support.images)["out"], support.labels)
    assert torch.allclose(logits, fine(support.images)["out"], atol=1e-6)
    settings = {"epochs": 2, "batch_size": 5}
    adapted = [LCCS(**settings).adapt(model, Target(support)) for model in (fine, coarse)]
    for name, tensor in adapted[0].state_dict().items():
        assert torch.allclose(tensor, adapted[1].state_dict()[name], atol=1e-5)


def test_the_loss_is_that_of_the_labelled_pixels_alone():
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    labels[0, :2] = 255
    naive = [
        -logits[n, :, y, x].log_softmax(0)[labels[n, y, x]]
        for n in range(2)
        for y in range(4)
        for x in range(5)
        if labels[n, y, x] != 255
    ]
    assert torch.allclose(cross_entropy(logits, labels), torch.stack(naive).mean())


def test_the_loss_over_chunks_weighs_by_labelled_pixels():
    support = scenes()
    support.labels[0, :10] = 255
    answers = torch.randn(5, STREET_CLASSES, 16, 24)
    loss = support.loss_of(cross_entropy, answers.split(2))
    assert loss == pytest.approx(float(cross_entropy(answers, support.labels)), abs=1e-6)


@pytest.mark.parametrize("name", ["lccs", "l2", "finetune-bn", "finetune-head", "finetune-features"])
def test_an_image_without_labelled_pixels_contributes_nothing(name):
    model, plain = street(), scenes()
    images = torch.cat([plain.images, scenes(1, seed=9).images * 3])
    labels = torch.cat([plain.labels, torch.full((1, 16, 24), 255)])
    with_it = METHODS[name](epochs=2).adapt(model, Target(Support(images, labels)))
    without = METHODS[name](epochs=2).adapt(model, Target(plain))
    assert torch.equal(with_it(plain.images)["out"], without(plain.images)["out"])
    assert torch.isfinite(with_it(images)["out"]).all()


@pytest.mark.parametrize("name", ["lccs", "l2", "l2-sp", "finetune-bn", "finetune-head", "finetune-features", "adabn"])
@pytest.mark.parametrize("support", [scenes(), mixed_sizes()], ids=["one size", "different sizes"])
def test_every_few_shot_method_takes_pixel_labels_and_returns_the_plain_network(name, support):
    model = street()
    before = copy.deepcopy(model.state_dict())
    method = METHODS[name](**({} if name == "adabn" else {"epochs": 2}))
    result = fewshift.adapt(model, support, method=method, validate=None)
    assert type(result.model) is type(model)
    model.load_state_dict(result.model.state_dict(), strict=True)
    assert torch.isfinite(result.model(support.images[0][None])["out"]).all()
    assert all(torch.equal(before[key], tensor) for key, tensor in result.source.state_dict().items() if "aux" in key)


@pytest.mark.parametrize("name", ["tent", "testtime-bn", "alpha-bn"])
def test_streaming_methods_take_networks_with_pixel_logits(name):
    support = scenes()
    logits = logits_of(METHODS[name]().adapt(street(), Target(support))(support.images))
    assert logits.shape == (5, STREET_CLASSES, 16, 24)
    assert torch.isfinite(logits).all()


def test_lccs_learns_four_numbers_a_layer_from_one_image_at_a_time():
    support = scenes()
    fitted = LCCS(epochs=3).fit(street(), Target(support))
    assert fitted.notes["parameters"] == 4 * 3
    assert fitted.notes["steps"] == 3 * 5
    assert fitted.notes["classifier"] == "source"
    assert LCCS(epochs=1, n=3).fit(street(), Target(support)).notes["parameters"] == 2 * (4 + 4) + (4 + 2)
    # the pooling branch has one position per image: n = 1 for its deviations


def test_fine_tuning_pixels_holds_the_source_statistics_by_default():
    model, support = street(), scenes()
    tuned = L2(epochs=1).adapt(model, Target(support))
    assert torch.equal(tuned.stem[1].running_mean, model.stem[1].running_mean)
    assert L2(epochs=1).fit(model, Target(support)).notes["bn"] == "source_frozen"


def test_the_heads_of_segmentation_networks_are_found():
    images = torch.randn(2, 3, 32, 32)
    assert Network.of(street(), torch.randn(2, 3, 16, 24)).head == "head"
    torchs = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    network = Network.of(torchs.eval(), images)
    assert network.head is None  # the sum of two: neither gives the output
    deeplab = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4, aux_loss=True
    )
    network = Network.of(deeplab.eval(), images)
    assert network.head == "classifier.4"
    assert network.output == (4, 32, 32)


# other people's networks


def networks():
    smp = pytest.importorskip("segmentation_models_pytorch")
    segmentation = torchvision.models.segmentation
    return {
        "smp": lambda: smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=STREET_CLASSES),
        "torchvision": lambda: segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=STREET_CLASSES, aux_loss=True
        ),
    }


@pytest.mark.parametrize("name", ["smp", "torchvision"])
def test_networks_of_the_libraries_are_adapted_merged_loaded_and_used(name, tmp_path):
    torch.manual_seed(0)
    model = networks()[name]().eval()
    support = scenes(2, (32, 32))
    result = fewshift.adapt(model, support, method=LCCS(init=0.5, epochs=1), validate=None)
    file = result.delta.save(tmp_path / "street.safetensors")
    applied = fewshift.apply(model, file)
    fresh = networks()[name]().eval()
    fresh.load_state_dict(applied.state_dict(), strict=True)

    def answer(network):
        with torch.no_grad():
            output = network(support.images)
        return output["out"] if isinstance(output, dict) else output

    assert torch.equal(answer(fresh), answer(result.model))
    assert not torch.equal(answer(fresh), answer(model))
    skipped = [layer.name for layer in result.layers if layer.skipped == "never executed"]
    assert skipped == []  # torchvision runs its auxiliary head in evaluation mode too


# what cannot be


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda support: support.labels[:, 5, :3].fill_(7),
            r"label 7 \(15 pixels\) is out of range .* 0 to 3, 255 to ignore",
        ),
        (lambda support: support.labels.fill_(255), "every pixel of the support is ignored"),
    ],
)
def test_labels_that_cannot_be_are_named_with_their_counts(change, sentence):
    support = scenes()
    change(support)
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.adapt(street(), support)


def test_a_network_that_answers_images_is_refused_for_pixels(tiny):
    support = scenes(size=(8, 8))
    with pytest.raises(FewshiftError, match=r"shape \(\), and its labels \(8, 8\)"):
        fewshift.adapt(tiny, support)


def test_a_network_that_answers_pixels_is_refused_for_images():
    images = scenes(4).images
    with pytest.raises(FewshiftError, match=r"shape \(16, 24\), and each image has one label"):
        L2().adapt(street(), Target(Support(images, torch.arange(4))))


def test_answers_in_other_proportions_are_refused():
    class Squared(Street):
        def forward(self, images):
            return F.interpolate(super().forward(images)["out"], (8, 8))

    with pytest.raises(FewshiftError, match=r"\(8x8\).*\(24x16\)"):
        fewshift.adapt(unsettle(Squared()), scenes())


def test_labels_of_another_size_than_the_image_are_refused():
    support = scenes()
    with pytest.raises(FewshiftError, match=r"image 0 .*24x16 .*12x16"):
        fewshift.adapt(street(), Support(support.images, support.labels[:, :, ::2]))


def test_different_sizes_in_one_minibatch_are_refused():
    with pytest.raises(FewshiftError, match=r"images of 3 different sizes .* take one at a time"):
        fewshift.adapt(street(), mixed_sizes(), method=LCCS(batch_size=3), validate=None)


class Divisible(Street):
    """Refuses sizes that are no multiples of 16, as many decoders do."""

    def forward(self, images):
        if any(side % 16 for side in images.shape[2:]):
            raise RuntimeError("sides must be divisible by 16")
        return super().forward(images)


def test_a_network_that_wants_multiples_is_given_padded_images():
    torch.manual_seed(0)
    model, support = unsettle(Divisible()), scenes(3, (20, 24))
    result = fewshift.adapt(model, support, method=LCCS(epochs=1), validate=None)
    assert result.support.images.shape == (3, 3, 32, 32)
    assert torch.equal(result.support.images[:, :, :20, :24], support.images)
    assert (result.support.labels[:, 20:] == 255).all()
    assert result.support.counts == support.counts


@pytest.mark.parametrize("name", ["delta-reg", "l2-sp", "finetune-features"])
def test_images_of_different_sizes_are_taken_by_every_method_that_trains(name):
    predictor = METHODS[name](epochs=1).adapt(street(), Target(mixed_sizes()))
    assert torch.isfinite(predictor(mixed_sizes().images[0][None])["out"]).all()


class Says(Street):
    """Returns its answer among other things."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, images):
        return self.wrap(super().forward(images)["out"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: {"aux": out * 0, "main": out},
        lambda out: {"loss": out.sum(), "anything": out},
        lambda out: (out.sum(), out),
        lambda out: [out, out[:, :2]],
        lambda out: out.half(),
    ],
    ids=["dict", "loss and one", "loss first", "list", "half"],
)
def test_the_main_output_is_found(wrap):
    model, support = unsettle(Says(wrap)), scenes(2)
    assert Network.of(model, support.images).output == (STREET_CLASSES, 16, 24)


def test_several_outputs_without_a_known_name_are_refused():
    with pytest.raises(FewshiftError, match=r"'a', 'b'.*logits"):
        Network.of(unsettle(Says(lambda out: {"a": out, "b": out})), scenes(2).images)


def test_an_augmentation_of_images_alone_is_refused_for_pixels():
    support = scenes(2)
    with pytest.raises(FewshiftError, match=r"augment cannot be called .* let it take \(image, labels\)"):
        fewshift.adapt(street(), support, method=LCCS(epochs=1), augment=lambda image: image, validate=None)


def test_checkpoints_with_an_auxiliary_head_are_loaded(tmp_path):
    from safetensors.torch import save_file

    from fewshift.models import libraries as models

    make = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large
    model = make(weights=None, weights_backbone=None, num_classes=STREET_CLASSES, aux_loss=True)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    loaded = models.load("torchvision:deeplabv3_mobilenet_v3_large", tmp_path / "w.safetensors")
    assert loaded.aux_classifier is not None


def test_nearest_centroids_are_for_images():
    with pytest.raises(FewshiftError, match="nearest centroids classify images, not pixels"):
        fewshift.adapt(street(), scenes(), method=LCCS(classifier="ncc"), validate=None)


def test_an_augmentation_of_pixels_changes_image_and_labels_alike():
    support = scenes()
    flipped = Support(support.images, support.labels, augment=lambda image, labels: (image.flip(-1), labels.flip(-1)))
    images, labels = flipped.batch(torch.tensor([1, 3]))
    assert torch.equal(images, support.images[[1, 3]].flip(-1))
    assert torch.equal(labels, support.labels[[1, 3]].flip(-1))
    cut = Support(support.images, support.labels, augment=lambda image, labels: (image[:, :8], labels))
    with pytest.raises(FewshiftError, match="let it change both alike"):
        cut.batch(torch.tensor([0]))


@pytest.mark.parametrize("few_bits", [False, True])
def test_a_head_is_found_before_upsampling_in_few_bits_too(few_bits):
    layers = (
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 3, 1),
        nn.UpsamplingBilinear2d(scale_factor=2),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=few_bits):
        assert Network.of(nn.Sequential(*layers), scenes(2).images).head == "2"
