"""A label for every pixel of an image of any size, seen whole or through a sliding window.

The network's memory depends on the window, not on the image: of the canvas of class probabilities, only the rows that
a later window still touches are kept. The image and the result, a byte and a float per pixel, are kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.copies import structural_copy
from fewshift.core.losses import IGNORE
from fewshift.core.network import copied_like, like, logits_of
from fewshift.errors import FewshiftError

Size = int | tuple[int, int]  # of a square, or (height, width)

ENOUGH = 64  # pixels of a side for which any network that labels pixels has more than one output
MULTIPLES = (1, 8, 16, 32, 64)  # encoders halve an image three to six times, and some want no remainder


@dataclass(frozen=True)
class LabelMap:
    """The predicted class of every pixel, and its mean probability."""

    labels: Tensor  # (H, W), uint8
    confidence: Tensor  # (H, W), float32


def label_map(model: nn.Module, image: Tensor, *, window: Size | None = None, stride: Size | None = None) -> LabelMap:
    """Label a preprocessed image (channels, H, W), whole or through windows that overlap.

    A window is cut to the image. The stride is two thirds of the window by default, and the last window of a row or
    column ends where the image ends. Logits coarser than the window are upsampled bilinearly. Where windows overlap,
    probabilities are averaged, not logits: logits have no common zero and scale, so one window could outvote the
    others, while with probabilities each has one vote.

    If a network refuses the size, as some want multiples of 32, the last row and column are repeated up to a multiple.
    """
    _check(image)
    network = evaluating(model)
    picture = like(network, image)
    tops, lefts, (height, width) = _grid(image, window, stride)
    over_rows, over_columns = _covered(image, 1, tops, height), _covered(image, 2, lefts, width)
    labels = image.new_empty(image.shape[1:], dtype=torch.uint8)
    confidence = torch.empty_like(labels, dtype=torch.float32)
    multiples: Sequence[int] = MULTIPLES
    canvas = picture.new_empty(0)
    for top, end in zip(tops, [*tops[1:], image.shape[1]], strict=True):
        for left in lefts:
            view = picture[None, :, top : top + height, left : left + width]
            scores, multiples = _probabilities(network, view, multiples)
            if not canvas.numel():
                canvas = scores.new_zeros(len(scores), height, image.shape[2])
            canvas[:, :, left : left + width] += scores
        votes, best = canvas[:, : end - top].max(0)  # no later window begins above `end`
        labels[top:end] = best
        confidence[top:end] = votes.to(confidence) / (over_rows[top:end, None] * over_columns)
        _scroll(canvas, end - top)
    if confidence.isnan().any():
        raise FewshiftError("the network's output is NaN: check its weights and the preprocessing")
    return LabelMap(labels, confidence)


def output_shape(
    model: nn.Module, image: Tensor, window: Size | None = None, stride: Size | None = None
) -> tuple[int, ...]:
    """The shape of the output for an image, or for its first window: (classes,) or (classes, height, width).

    A map of one pixel counts as one output per image if it stays one pixel when a small image is enlarged.
    """
    _check(image)
    network = evaluating(model)
    _, _, (height, width) = _grid(image, window, stride)
    view = like(network, image)[None, :, :height, :width]
    shape = tuple(_answer(network, view, MULTIPLES)[0].shape[1:])
    if len(shape) == 3 and math.prod(shape[1:]) == 1:
        large = F.interpolate(view, (max(height, ENOUGH), max(width, ENOUGH)))
        try:
            shape = tuple(_answer(network, large, MULTIPLES)[0].shape[1:])
        except FewshiftError:  # a network for images of one size does not label pixels
            return shape[:1]
    return shape[:1] if math.prod(shape[1:]) == 1 else shape


def evaluating(model: nn.Module) -> nn.Module:
    """The network in evaluation mode; for one in training mode, a copy that shares its weights."""
    return structural_copy(model) if any(module.training for module in model.modules()) else model


def _check(image: Tensor) -> None:
    if image.ndim != 3 or not image.is_floating_point():
        kind = str(image.dtype).removeprefix("torch.")
        raise FewshiftError(
            f"the image is {kind} of shape {tuple(image.shape)}: give one preprocessed image (channels, height, width)"
        )


def _grid(image: Tensor, window: Size | None, stride: Size | None) -> tuple[list[int], list[int], tuple[int, int]]:
    """The first rows and the first columns of windows, and their size, cut to the image."""
    if stride is not None and window is None:
        raise FewshiftError(f"stride {stride} without a window: give the window's size too")
    rows, columns = image.shape[1:]
    asked = (rows, columns) if window is None else _pair(window)
    if min(asked) < 1:
        raise FewshiftError(f"a window of {asked[0]} x {asked[1]} pixels is empty: give at least 1")
    extent = min(asked[0], rows), min(asked[1], columns)
    steps = tuple(max(1, 2 * side // 3) for side in asked) if stride is None else _pair(stride)
    for side, step in zip(asked, steps, strict=True):
        if not 1 <= step <= side:
            raise FewshiftError(f"a stride of {step} leaves gaps between windows of {side}: give 1 to {side} pixels")
    tops, lefts = (_starts(*each) for each in zip(image.shape[1:], extent, steps, strict=True))
    return tops, lefts, extent


def _starts(total: int, side: int, step: int) -> list[int]:
    """The starts of windows that cover everything; the last one is moved back to end where the image ends."""
    return [*range(0, total - side, step), total - side]


def _covered(image: Tensor, dimension: int, starts: Sequence[int], side: int) -> Tensor:
    """How many windows cover each row (1) or column (2); for a pixel it is the product."""
    counts = image.new_zeros(image.shape[dimension], dtype=torch.float32)
    for start in starts:
        counts[start : start + side] += 1
    return counts


def _scroll(canvas: Tensor, rows: int) -> None:
    """Move a canvas (classes, H, W) up in place, with empty rows from below."""
    kept = canvas[:, rows:].clone()
    canvas[:, : kept.shape[1]] = kept
    canvas[:, kept.shape[1] :] = 0


def _probabilities(network: nn.Module, window: Tensor, multiples: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """Class probabilities of every pixel of a window (1, channels, H, W), and the multiple it was padded to."""
    logits, multiple = _answer(network, window, multiples)
    if logits.ndim != 4 or len(logits) != 1:
        raise FewshiftError(
            f"the network's output for an image has shape {tuple(logits.shape)}: "
            "give a network with one number per class for every pixel"
        )
    if not 2 <= logits.shape[1] <= IGNORE:
        raise FewshiftError(
            f"the network has {logits.shape[1]} outputs per pixel: label maps hold 2 to {IGNORE} classes"
        )
    height, width = _padded_size(window, multiple)
    if logits.shape[2:] != (height, width):
        logits = F.interpolate(logits, (height, width), mode="bilinear", align_corners=False)
    return logits[0, :, : window.shape[2], : window.shape[3]].float().softmax(0), (multiple,)


def _answer(network: nn.Module, window: Tensor, multiples: Sequence[int]) -> tuple[Tensor, int]:
    """The logits of a window, padded to the first of `multiples` that the network accepts, and that multiple."""
    refusal: Exception | None = None
    for multiple, padded in _paddings(window, multiples):
        try:
            with torch.no_grad():
                return logits_of(network(copied_like(network, padded))), multiple
        except FewshiftError:
            raise
        except torch.OutOfMemoryError as error:
            size = f"{window.shape[2]} x {window.shape[3]}"
            raise FewshiftError(f"{size} pixels at once do not fit into memory: give a smaller window") from error
        except Exception as error:  # refusals have no type of their own
            refusal = refusal or error
    lines = str(refusal).strip().splitlines() or [type(refusal).__name__]
    raise FewshiftError(
        f"the network cannot run on an image of shape {tuple(window.shape[1:])} ({lines[0].rstrip('.')}): "
        "check size, channels and preprocessing"
    ) from refusal


def _paddings(window: Tensor, multiples: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The window, its last row and column repeated up to each multiple; repeated sizes are left out."""
    seen = set()
    for multiple in multiples:
        height, width = size = _padded_size(window, multiple)
        if size not in seen:
            seen.add(size)
            below, right = height - window.shape[2], width - window.shape[3]
            yield multiple, F.pad(window, (0, right, 0, below), mode="replicate") if below or right else window


def _padded_size(window: Tensor, multiple: int) -> tuple[int, int]:
    height, width = (-(-side // multiple) * multiple for side in window.shape[2:])
    return height, width


def _pair(size: Size) -> tuple[int, int]:
    sides: Sequence[Any] = size if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and not isinstance(side, bool) for side in sides):
        raise FewshiftError(f"a size of {size!r} pixels: give a whole number, or two as (height, width)")
    return int(sides[0]), int(sides[1])
