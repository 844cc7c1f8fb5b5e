"""Pictures of pixel labels: files for programs, overlays for people, and scenes side by side for a page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from fewshift.core.losses import IGNORE
from fewshift.core.metrics import accuracy, mean_iou, per_class_iou, pixel_tally
from fewshift.core.support import Support
from fewshift.images import Preprocess
from fewshift.images.cityscapes import RGB
from fewshift.images.label_files import BLACK, Palette, colour_table, indexed, palette_of
from fewshift.images.sliding_window import label_map
from fewshift.report.render import rendered

WRONG: RGB = (214, 40, 57)
LARGEST = 480  # pixels of a thumbnail's longer side: sharp at a quarter of a wide page
TINY = 64  # pixels of a longer side that shows every one of them
NAMED = 3  # classes that a picture's text names


def photograph(pixels: Tensor) -> Image.Image:
    """An image (channels, H, W) of bytes, grey or in colour."""
    return Image.fromarray(pixels.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def mistakes(labels: Tensor, predictions: Tensor) -> Image.Image:
    """Wrong pixels in red, unlabelled ones in black, right ones transparent."""
    wrong = (labels != predictions).byte().masked_fill(labels == IGNORE, IGNORE)
    image = indexed(wrong, (BLACK, WRONG))
    image.info["transparency"] = 0
    return image


class Thumbnail(NamedTuple):
    """A picture inside a page: a data URI, its size in pixels, and what it shows in words."""

    data: str
    width: int
    height: int
    alt: str


def thumbnail(image: Image.Image, alt: str, largest: int = LARGEST) -> Thumbnail:
    """Small enough for a page: labels, and what has few pixels, as PNG, which mixes no colours, photographs as JPEG."""
    exact = image.mode == "P" or max(image.size) < TINY
    kind, options = ("png", {"optimize": True}) if exact else ("jpeg", {"quality": 82})
    scale = min(1.0, largest / max(image.size))
    width, height = size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    if size != image.size:
        small = image.resize(size, Image.Resampling.NEAREST if image.mode == "P" else Image.Resampling.LANCZOS)
        small.info.update(image.info)
        image = small
    file = io.BytesIO()
    image.save(file, kind, **options)
    data = base64.b64encode(file.getvalue()).decode()
    return Thumbnail(f"data:image/{kind};base64,{data}", width, height, alt)


@dataclass(frozen=True)
class Scene:
    """One image with its labels, and what networks say about it, in the order in which they are shown."""

    name: str
    pixels: Tensor  # (channels, H, W), bytes
    labels: Tensor  # (H, W)
    answers: Mapping[str, Tensor]  # by network, (H, W)
    scores: Mapping[str, float] | None = None  # the IoU of the answers, where these pictures are smaller than they


def side_by_side(
    scenes: Sequence[Scene], classes: Sequence[str] | None = None, palette: Palette | None = None, *, key: str
) -> Markup:
    """Every scene as a row of a page: the image, its labels, and the answers with their IoU.

    Without names, classes are numbers. `key` tells several figures of one page apart.
    """
    present = _present(scenes)
    names = classes or [str(it) for it in range(1 + max((it for it in present if it != IGNORE), default=0))]
    colours = palette or palette_of(names)
    table = colour_table(colours)
    legend = [(_name(it, names), f"rgb({', '.join(map(str, table[it]))})") for it in present]
    rows = [_row(scene, names, colours) for scene in scenes]
    return Markup(rendered("scenes.html", rows=rows, legend=legend, key=key))


def support_scenes(
    support: Support, networks: Mapping[str, nn.Module], preprocess: Preprocess | None, most: int
) -> list[Scene]:
    """The first images of a support set, answered by each network; none where it has no pictures with pixel labels."""
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
class Panel:
    """One picture of a row; for an answer also where it is wrong."""

    title: str
    picture: Thumbnail
    wrong: Thumbnail | None = None


@dataclass(frozen=True)
class Row:
    """The pictures of a scene, and what they say in words."""

    name: str
    score: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Sizes:
    """At which sizes (width, height) pixels were counted, and which their files have: a score depends on it."""

    counted: Sequence[tuple[int, int]]
    files: Sequence[tuple[int, int]]

    def __str__(self) -> str:
        same = list(self.files) == list(self.counted)
        own = "the size of the files" if same else f"as the network sees them (files: {_extents(self.files)})"
        return f"counted at {_extents(self.counted)} pixels, {own}"


def _extents(sizes: Sequence[tuple[int, int]]) -> str:
    told = [f"{width}x{height}" for width, height in sizes]
    return told[0] if len(told) == 1 else f"{len(told)} sizes from {told[0]} to {told[-1]}"


@dataclass(frozen=True)
class Scores:
    """How right networks are on labelled scenes: one tally over all pixels each, and the IoU of every image."""

    classes: tuple[str, ...]
    tallies: Mapping[str, Tensor]
    images: Mapping[str, Sequence[float]]  # NaN for an image without a labelled pixel
    palette: Palette | None = None
    sizes: Sizes | None = None

    @property
    def pixels(self) -> list[int]:
        """Labelled pixels of each class."""
        counts: list[int] = next(iter(self.tallies.values())).sum(1).tolist()
        return counts

    @property
    def mean_iou(self) -> dict[str, float | None]:
        """In percent, over the classes that occur or that the network predicts."""
        return {name: _percent(mean_iou(counts)) for name, counts in self.tallies.items()}

    @property
    def accuracy(self) -> dict[str, float]:
        """The share of labelled pixels that is right, in percent."""
        return {name: 100 * accuracy(counts) for name, counts in self.tallies.items()}

    @property
    def rows(self) -> list[tuple[str, int, list[float | None]]]:
        """Name, pixels and IoU by each network, in percent, of the classes that occur or are predicted."""
        scores = [per_class_iou(counts).tolist() for counts in self.tallies.values()]
        rows = zip(
            self.classes,
            self.pixels,
            ([_percent(it) for it in values] for values in zip(*scores, strict=True)),
            strict=True,
        )
        return [row for row in rows if row[2] != [None] * len(scores)]

    @property
    def better(self) -> int:
        """Images whose IoU rose."""
        return sum(it > 0 for it in self.changes)

    @property
    def worse(self) -> int:
        """Images whose IoU fell."""
        return sum(it < 0 for it in self.changes)

    @property
    def same(self) -> int:
        """Images whose IoU stayed, or that have no labelled pixel."""
        return len(self.changes) - self.better - self.worse

    @cached_property
    def changes(self) -> list[float]:
        """What the last network's IoU is above the first's, image by image."""
        first, *_, last = self.images.values()
        return [after - before for before, after in zip(first, last, strict=True)]

    def extremes(self, most: int) -> tuple[list[int], list[int]]:
        """The images that gained most and those that lost most, best and worst first."""
        judged = [it for it, change in enumerate(self.changes) if not math.isnan(change)]
        order = sorted(judged, key=self.changes.__getitem__)
        lost = [it for it in order if self.changes[it] < 0]
        gained = [it for it in reversed(order) if self.changes[it] > 0]
        return gained[:most], lost[:most]


def image_iou(labels: Tensor, answer: Tensor, classes: int) -> float:
    """The mean IoU of one image over the classes that occur in it or are predicted; NaN without a labelled pixel."""
    return mean_iou(pixel_tally(labels.long(), answer.long(), classes))


def change_of(scores: Sequence[float]) -> str:
    """What the last is above the first, as the rounded numbers beside it say."""
    return f"{round(scores[-1], 1) - round(scores[0], 1):+.1f}"


def _percent(share: float) -> float | None:
    return None if math.isnan(share) else 100 * share


def _row(scene: Scene, classes: Sequence[str], palette: Palette) -> Row:
    truth = Panel("labels", thumbnail(indexed(scene.labels, palette), _alt("Labels", scene.labels, scene, classes)))
    panels = [Panel("image", thumbnail(photograph(scene.pixels), f"{scene.name}, the image.")), truth]
    for network, answer in scene.answers.items():
        share = (answer != scene.labels)[scene.labels != IGNORE].double().mean().nan_to_num(0).item()
        picture = thumbnail(indexed(answer, palette), _alt(f"Answer of {network}", answer, scene, classes))
        alt = f"{scene.name}, where {network} is wrong: {share:.1%} of the labelled pixels."
        panels.append(Panel(network, picture, thumbnail(mistakes(scene.labels, answer), alt)))
    return Row(scene.name, _score(scene, len(classes)), panels)


def _score(scene: Scene, classes: int) -> str:
    known = scene.scores or {name: image_iou(scene.labels, it, classes) for name, it in scene.answers.items()}
    scores = [100 * known[name] for name in scene.answers]
    if any(map(math.isnan, scores)):
        return "no labelled pixel"
    change = f" ({change_of(scores)})" if len(scores) > 1 else ""
    return "mean IoU " + " \N{RIGHTWARDS ARROW} ".join(f"{it:.1f}" for it in scores) + change


def _alt(what: str, labels: Tensor, scene: Scene, classes: Sequence[str]) -> str:
    """The largest classes of a picture, for those who cannot see it."""
    counts = labels.flatten().long().bincount(minlength=IGNORE + 1)
    order = counts.argsort(descending=True, stable=True)[:NAMED].tolist()
    shares = [f"{_name(it, classes)} {counts[it] / labels.numel():.0%}" for it in order if counts[it]]
    return f"{what}, {scene.name}: {', '.join(shares)}."


def _name(label: int, classes: Sequence[str]) -> str:
    return classes[label] if label < len(classes) else "not labelled" if label == IGNORE else str(label)


def _present(scenes: Sequence[Scene]) -> list[int]:
    """The labels that occur in any picture, in their order; unlabelled pixels come last."""
    pictures = [picture for scene in scenes for picture in (scene.labels, *scene.answers.values())]
    return sorted({label for picture in pictures for label in picture.unique().tolist()})


def as_bytes(image: Tensor, preprocess: Preprocess | None) -> Tensor:
    """A preprocessed image as it was; if how it was preprocessed is not known, darkest to brightest."""
    image = image.detach().cpu().float()
    if preprocess is None or preprocess.channels != len(image):
        low, high = image.amin(), image.amax()
        shares = (image - low) / (high - low).clamp(min=1e-12)
    else:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocess.mean, preprocess.std))
        shares = image * std + mean
    return (shares.clamp(0, 1) * 255).round().byte()
