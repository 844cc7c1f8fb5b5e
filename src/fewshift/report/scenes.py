"""Pictures of pixel labels for a page: images, labels and predictions side by side."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from fewshift.core.labels import PIXELS
from fewshift.core.losses import IGNORE
from fewshift.core.metrics import mean_iou
from fewshift.core.support import Support
from fewshift.errors import FewshiftError
from fewshift.images.cityscapes import RGB
from fewshift.images.label_files import BLACK, Palette, colour_table, indexed, palette_of
from fewshift.images.preprocess import Preprocess
from fewshift.images.sliding_window import label_map
from fewshift.report.render import rendered
from fewshift.trust.evaluation import PixelEvaluation, Sizes

WRONG: RGB = (214, 40, 57)
LARGEST = 480  # pixels of a thumbnail's longer side: sharp at a quarter of a wide page
TINY = 64  # pixels of a longer side that shows every one of them
NAMED = 3  # classes that a picture's text names
EXTREMES = 3  # scenes that a page shows of those that gained most, and of those that lost most


def photograph(pixels: Tensor) -> Image.Image:
    """An image (channels, H, W) of bytes, grey or in colour."""
    return Image.fromarray(pixels.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def mistakes(labels: Tensor, predictions: Tensor) -> Image.Image:
    """Wrong pixels in red, unlabelled ones in black, right ones transparent."""
    wrong = (labels != predictions).byte().masked_fill(labels == IGNORE, IGNORE)
    image = indexed(wrong, (BLACK, WRONG))
    image.info["transparency"] = 0
    return image


def encoded(image: Image.Image, kind: str, **options: Any) -> str:
    """A picture as text, for a page or a record."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


class Thumbnail(NamedTuple):
    """A picture inside a page: a data URI, its size in pixels, and what it shows in words."""

    data: str
    width: int
    height: int
    alt: str


def thumbnail(image: Image.Image, alt: str, largest: int = LARGEST) -> Thumbnail:
    """A picture small enough for a page: label maps and tiny pictures as PNG, with exact colours; others as JPEG."""
    exact = image.mode == "P" or max(image.size) < TINY
    kind, options = ("png", {"optimize": True}) if exact else ("jpeg", {"quality": 82})
    scale = min(1.0, largest / max(image.size))
    width, height = size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    if size != image.size:
        small = image.resize(size, Image.Resampling.NEAREST if image.mode == "P" else Image.Resampling.LANCZOS)
        small.info.update(image.info)
        image = small
    return Thumbnail(f"data:image/{kind};base64,{encoded(image, kind, **options)}", width, height, alt)


@dataclass(frozen=True)
class Scene:
    """One image with its labels and the predictions of networks, in the order in which they are shown."""

    name: str
    pixels: Tensor  # (channels, H, W), bytes
    labels: Tensor  # (H, W)
    answers: Mapping[str, Tensor]  # by network, (H, W)
    scores: Mapping[str, float] | None = None  # the IoU of the answers, where these pictures are smaller


def side_by_side(
    scenes: Sequence[Scene], classes: Sequence[str] | None = None, palette: Palette | None = None, *, key: str
) -> Markup:
    """The HTML of scenes, one per row: the image, its labels, and the answers with their IoU.

    Without names, classes are numbers. `key` is unique on the page.
    """
    present = _present(scenes)
    names = classes or [str(label) for label in range(1 + max(set(present) - {IGNORE}, default=0))]
    colours = palette or palette_of(names)
    table = colour_table(colours)
    legend = [(_name(label, names), f"rgb({', '.join(map(str, table[label]))})") for label in present]
    rows = [_row(scene, names, colours) for scene in scenes]
    return Markup(rendered("scenes.html", rows=rows, legend=legend, key=key))


def support_scenes(
    support: Support, networks: Mapping[str, nn.Module], preprocess: Preprocess | None, most: int
) -> list[Scene]:
    """The first images of a support set with the answers of each network; none unless its pixels have labels."""
    pairs = list(zip(support.images, support.labels, strict=True))
    if not all(image.ndim == 3 and len(image) in (1, 3) and labels.shape == image.shape[1:] for image, labels in pairs):
        return []
    return [
        Scene(
            name=f"image {number}",
            pixels=as_bytes(image, preprocess),
            labels=labels.cpu(),
            answers={name: label_map(network, image).labels.cpu() for name, network in networks.items()},
        )
        for number, (image, labels) in enumerate(pairs[:most], 1)
    ]


@dataclass(frozen=True)
class ScenePanel:
    """One picture of a row; for an answer also a picture of its mistakes."""

    title: str
    picture: Thumbnail
    wrong: Thumbnail | None = None


@dataclass(frozen=True)
class SceneRow:
    """The pictures of a scene, and its score in words."""

    name: str
    score: str
    panels: Sequence[ScenePanel]


def changed_most(evaluation: PixelEvaluation, most: int = EXTREMES) -> tuple[list[Scene], list[Scene]]:
    """The scenes that gained most from adaptation, and those that lost most."""
    gained, lost = ([_scene(evaluation, index) for index in chosen] for chosen in evaluation.extremes(most))
    return gained, lost


def _scene(evaluation: PixelEvaluation, index: int) -> Scene:
    if evaluation.scene is None:
        raise FewshiftError("this evaluation has no images to show: make it with fewshift.evaluate")
    scene = evaluation.scene(index)
    return Scene(scene.name, as_bytes(scene.image, evaluation.preprocess), scene.labels, scene.predictions)


def counted_at(sizes: Sizes) -> str:
    """At which sizes pixels were counted, in words."""
    same = list(sizes.files) == list(sizes.counted)
    note = "the size of the files" if same else f"as the network sees them (files: {_extents(sizes.files)})"
    return f"counted at {_extents(sizes.counted)} pixels, {note}"


def _extents(sizes: Sequence[tuple[int, int]]) -> str:
    extents = [f"{width}x{height}" for width, height in sizes]
    return extents[0] if len(extents) == 1 else f"{len(extents)} sizes from {extents[0]} to {extents[-1]}"


def image_iou(labels: Tensor, answer: Tensor, classes: int) -> float:
    """The mean IoU of one image over the classes that occur in it or are predicted; NaN without a labelled pixel."""
    return mean_iou(PIXELS.tally(labels.long(), answer.long(), classes))


def change_of(scores: Sequence[float]) -> str:
    """The last score less the first, from the rounded numbers that stand beside it."""
    return f"{round(scores[-1], 1) - round(scores[0], 1):+.1f}"


def _row(scene: Scene, classes: Sequence[str], palette: Palette) -> SceneRow:
    truth = ScenePanel(
        "labels", thumbnail(indexed(scene.labels, palette), _alt("Labels", scene.labels, scene, classes))
    )
    panels = [ScenePanel("image", thumbnail(photograph(scene.pixels), f"{scene.name}, the image.")), truth]
    for network, answer in scene.answers.items():
        share = (answer != scene.labels)[scene.labels != IGNORE].double().mean().nan_to_num(0).item()
        picture = thumbnail(indexed(answer, palette), _alt(f"Answer of {network}", answer, scene, classes))
        alt = f"{scene.name}, where {network} is wrong: {share:.1%} of the labelled pixels."
        panels.append(ScenePanel(network, picture, thumbnail(mistakes(scene.labels, answer), alt)))
    return SceneRow(scene.name, _score(scene, len(classes)), panels)


def _score(scene: Scene, classes: int) -> str:
    known = scene.scores or {name: image_iou(scene.labels, labels, classes) for name, labels in scene.answers.items()}
    scores = [100 * known[name] for name in scene.answers]
    if any(map(math.isnan, scores)):
        return "no labelled pixel"
    change = f" ({change_of(scores)})" if len(scores) > 1 else ""
    return "mean IoU " + " \N{RIGHTWARDS ARROW} ".join(f"{score:.1f}" for score in scores) + change


def _alt(what: str, labels: Tensor, scene: Scene, classes: Sequence[str]) -> str:
    """A text with the largest classes of a picture."""
    counts = labels.flatten().long().bincount(minlength=IGNORE + 1)
    order = counts.argsort(descending=True, stable=True)[:NAMED].tolist()
    shares = [f"{_name(label, classes)} {counts[label] / labels.numel():.0%}" for label in order if counts[label]]
    return f"{what}, {scene.name}: {', '.join(shares)}."


def _name(label: int, classes: Sequence[str]) -> str:
    return classes[label] if label < len(classes) else "not labelled" if label == IGNORE else str(label)


def _present(scenes: Sequence[Scene]) -> list[int]:
    """The labels that occur in any picture, in their order; unlabelled pixels come last."""
    pictures = [picture for scene in scenes for picture in (scene.labels, *scene.answers.values())]
    return sorted({label for picture in pictures for label in picture.unique().tolist()})


def as_bytes(image: Tensor, preprocess: Preprocess | None) -> Tensor:
    """A preprocessed image with its original values; if the steps are unknown, from darkest to brightest."""
    image = image.detach().cpu().float()
    if preprocess is None or preprocess.channels != len(image):
        low, high = image.amin(), image.amax()
        shares = (image - low) / (high - low).clamp(min=1e-12)
    else:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocess.mean, preprocess.std))
        shares = image * std + mean
    return (shares.clamp(0, 1) * 255).round().byte()
