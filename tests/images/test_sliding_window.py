"""Label maps: the same as the plain forward pass, whatever the window, in the memory of a window."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fewshift import FewshiftError
from fewshift.images.sliding_window import label_map, output_shape
from fewshift.models import libraries as models
from tests.helpers.networks import same_state, state, unsettle


def made(*layers: nn.Module) -> nn.Module:
    return unsettle(nn.Sequential(*layers))


def context(classes: int = 4) -> nn.Module:
    """A pixel's answer depends on its neighbours, so windows disagree where they overlap."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return made(nn.Conv2d(3, 5, 5, padding=2), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, classes, 1))


def pointwise(classes: int = 4) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return made(nn.Conv2d(3, classes, 1))


def picture(height: int, width: int) -> Tensor:
    return torch.randn(3, height, width, generator=torch.Generator().manual_seed(height * 1000 + width))


class Strict(nn.Module):
    """Takes multiples of 32 alone and answers at a quarter of the size, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = context()
        self.sizes: list[tuple[int, ...]] = []
        self.eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if any(side % 32 for side in images.shape[2:]):
            raise RuntimeError("Wrong input shape.\nConsider padding")
        self.sizes.append(tuple(images.shape[2:]))
        return {"out": self.inner(images)[:, :, ::4, ::4], "aux": images}


def naive(model: nn.Module, image: Tensor, window: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Mean probabilities on a canvas of all classes and the whole image, window by window."""
    height, width = (min(pair) for pair in zip(window, image.shape[1:], strict=True))
    total, count = torch.zeros(4, *image.shape[1:]), torch.zeros(image.shape[1:])
    tops = {min(top, image.shape[1] - height) for top in range(0, image.shape[1], stride[0])}
    lefts = {min(left, image.shape[2] - width) for left in range(0, image.shape[2], stride[1])}
    for top, left in itertools.product(tops, lefts):
        with torch.no_grad():
            part = model(image[None, :, top : top + height, left : left + width])[0].softmax(0)
        total[:, top : top + height, left : left + width] += part
        count[top : top + height, left : left + width] += 1
    return total / count


@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    window=st.tuples(st.integers(1, 22), st.integers(1, 22)),
    shares=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_rows_that_scroll_by_equal_a_whole_canvas(size, window, shares):
    stride = tuple(max(1, int(share * side)) for share, side in zip(shares, window, strict=True))
    model, image = context(), picture(*size)
    expected = naive(model, image, window, stride)
    answer = label_map(model, image, window=window, stride=stride)
    confidence, labels = expected.max(0)
    torch.testing.assert_close(answer.confidence, confidence)
    clear = expected.topk(2, 0).values.diff(dim=0).abs()[0] > 1e-5  # a tie may fall either way
    assert torch.equal(answer.labels[clear].long(), labels[clear])


@pytest.mark.parametrize("window", [None, (20, 31), (20, 300), 1000])
def test_a_window_over_the_whole_image_is_the_plain_forward_pass(window):
    model, image = context(), picture(20, 31)
    with torch.no_grad():
        confidence, labels = model(image[None])[0].softmax(0).max(0)
    answer = label_map(model, image, window=window)
    assert torch.equal(answer.labels, labels.byte())
    assert torch.equal(answer.confidence, confidence)
    assert answer.labels.dtype == torch.uint8


@pytest.mark.parametrize("window", [1, 3, (7, 2), (4, 40)])
def test_a_network_without_context_answers_the_same_through_every_window(window):
    model, image = pointwise(), picture(13, 17)
    whole, parts = label_map(model, image), label_map(model, image, window=window)
    assert torch.equal(whole.labels, parts.labels)
    torch.testing.assert_close(whole.confidence, parts.confidence)


def test_coarse_logits_are_upsampled_bilinearly_before_the_softmax():
    coarse = made(nn.Conv2d(3, 4, 4, stride=4))
    image = picture(16, 24)
    with torch.no_grad():
        logits = F.interpolate(coarse(image[None]), (16, 24), mode="bilinear", align_corners=False)
    answer = label_map(coarse, image)
    assert torch.equal(answer.labels, logits.argmax(1)[0].byte())


def test_a_network_that_wants_multiples_gets_the_edge_repeated_and_the_answer_cut_back():
    model, image = Strict(), picture(50, 70)
    answer = label_map(model, image)
    padded = F.pad(image[None], (0, 26, 0, 14), mode="replicate")
    with torch.no_grad():
        logits = F.interpolate(model(padded)["out"], (64, 96), mode="bilinear", align_corners=False)
    assert torch.equal(answer.labels, logits.argmax(1)[0, :50, :70].byte())
    assert set(model.sizes) == {(64, 96)}


def test_what_the_network_takes_is_not_padded_and_what_it_refuses_is_found_out_once():
    model = Strict()
    label_map(model, picture(64, 64), window=32)
    assert set(model.sizes) == {(32, 32)}


class Largest(TorchDispatchMode):
    """The most elements that any tensor made in the block has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [out] if isinstance(out, Tensor) else [tensor for tensor in out or () if isinstance(tensor, Tensor)]
        self.numel = max(
            [self.numel, *(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in tensors)]
        )
        return out


def test_no_tensor_is_larger_than_one_row_of_windows():
    classes, image = 50, picture(400, 20)
    with Largest() as largest:
        label_map(pointwise(classes), image, window=20)
    assert largest.numel == max(classes * 20 * 20, image.numel())
    with Largest() as largest:
        label_map(pointwise(classes), image)
    assert largest.numel == classes * 400 * 20


def test_a_network_in_training_answers_as_in_evaluation_and_stays_as_it_was():
    model = context()
    expected = label_map(model, picture(9, 9))
    before = state(model.train())
    answer = label_map(model, picture(9, 9))
    assert torch.equal(answer.labels, expected.labels)
    assert model.training
    assert same_state(state(model), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_image_follows_the_network_in_type(dtype):
    answer = label_map(context().to(dtype), picture(9, 9), window=5)
    assert answer.confidence.dtype == torch.float32


def test_an_smp_network_is_answered_at_any_size():
    pytest.importorskip("segmentation_models_pytorch")
    network = models.load("smp:fpn/resnet18", "random", classes=["a", "b", "c"])
    answer = label_map(network, picture(33, 50))
    assert answer.labels.shape == (33, 50)
    assert output_shape(network, picture(33, 50))[0] == 3


def test_pixel_by_pixel_is_told_from_one_answer_for_an_image():
    assert output_shape(context(), picture(8, 9)) == (4, 8, 9)
    assert output_shape(context(), picture(80, 90), window=10) == (4, 10, 10)
    assert output_shape(Strict(), picture(8, 8)) == (4, 8, 8)
    assert output_shape(made(nn.AdaptiveAvgPool2d(1), nn.Flatten()), picture(8, 8)) == (3,)
    assert output_shape(made(nn.AdaptiveAvgPool2d(1)), picture(8, 8)) == (3,)


@pytest.mark.parametrize(("size", "window"), [((1, 1), None), ((4, 4), None), ((9, 9), 1), ((3, 200), None)])
def test_a_network_that_labels_pixels_is_known_by_the_smallest_image(size, window):
    coarse = made(nn.Conv2d(3, 4, 4, 4, padding=1))
    for network in (context(), coarse, Strict()):
        shape = output_shape(network, picture(*size), window)
        assert (len(shape), shape[0]) == (3, 4)
        assert label_map(network, picture(*size), window=window).labels.shape == size
    only_eight = made(nn.Conv2d(3, 5, 8), nn.Flatten(2), nn.Linear(1, 1), nn.Unflatten(2, (1, 1)))
    assert output_shape(only_eight, picture(8, 8)) == (5,)


def broken() -> nn.Module:
    model = context()
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    return model


MISTAKES = {
    "stride without window": (lambda: label_map(context(), picture(8, 8), stride=2), "without a window"),
    "gaps": (lambda: label_map(context(), picture(8, 8), window=4, stride=5), "leaves gaps between windows of 4"),
    "no stride": (lambda: label_map(context(), picture(8, 8), window=4, stride=0), "leaves gaps"),
    "no window": (lambda: label_map(context(), picture(8, 8), window=0), "is empty"),
    "half": (lambda: label_map(context(), picture(8, 8), window=8.5), "a size of 8.5 pixels: give a whole number"),
    "one side": (lambda: label_map(context(), picture(8, 8), window=(8,)), "a size of (8,) pixels"),
    "word": (lambda: label_map(context(), picture(8, 8), window="8"), "a size of '8' pixels"),
    "three": (lambda: label_map(context(), picture(8, 8), window=8, stride=(1, 2, 3)), "or two as (height, width)"),
    "batch": (lambda: label_map(context(), picture(8, 8)[None]), "give one preprocessed image"),
    "bytes": (lambda: label_map(context(), picture(8, 8).byte()), "image is uint8"),
    "channels": (lambda: label_map(context(), torch.zeros(1, 8, 8)), "cannot run on an image of shape (1, 8, 8)"),
    "one output": (lambda: label_map(pointwise(1), picture(8, 8)), "2 to 255 classes"),
    "too many": (lambda: label_map(pointwise(256), picture(8, 8)), "2 to 255 classes"),
    "classifier": (lambda: label_map(made(nn.Flatten()), picture(8, 8)), "every pixel"),
    "nan": (lambda: label_map(broken(), picture(8, 8)), "NaN"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake):
    act, sentence = MISTAKES[mistake]
    with pytest.raises(FewshiftError) as caught:
        act()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
