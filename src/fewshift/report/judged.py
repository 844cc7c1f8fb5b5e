"""What a page shows of held-out images: class by class, mistake by mistake, image by image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fewshift.core.metrics import tally
from fewshift.core.support import Support
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.preprocess import Preprocess
from fewshift.report.prose import sentence
from fewshift.report.scenes import Thumbnail, as_bytes, photograph, thumbnail
from fewshift.report.suspects import place
from fewshift.trust.held_out import ImageAnswers
from fewshift.trust.suspects import Suspect

if TYPE_CHECKING:
    from fewshift.report.results import Adaptation

SMALL = 320  # pixels of a picture's longer side: shown small, and larger on a click
MOST = 24  # images that a page shows
WRONG, RIGHT, STILL = "became wrong", "became right", "still wrong"


@dataclass(frozen=True)
class ClassRow:
    """One class: how many predictions for its held-out images were right, before and after."""

    name: str
    images: int
    predictions: int
    before: int
    after: int

    @property
    def change(self) -> int:
        """How many more are right than before."""
        return self.after - self.before


@dataclass(frozen=True)
class Pair:
    """How often images of one class were predicted as another, before and after."""

    truth: str
    answer: str
    before: int
    after: int


@dataclass(frozen=True)
class Flip:
    """A held-out image for which the source network and adapted ones predict different classes."""

    image: int  # counted from 1
    truth: str
    source: str
    adapted: tuple[tuple[str, int], ...]  # other predictions, and how often each was made
    asked: int  # how often the image was held out
    verdict: str
    picture: Thumbnail | None = None
    file: Path | None = None  # where the image comes from, if that is known

    @property
    def place(self) -> str:
        """The file, or the number of the image."""
        return f"image {self.image}" if self.file is None else str(self.file)

    @property
    def flips(self) -> int:
        """How often the prediction changed."""
        return sum(times for _, times in self.adapted)

    @property
    def answers(self) -> str:
        """What the adapted networks predicted; for an image held out several times, how often."""
        if self.asked == 1:
            return self.adapted[0][0]
        return ", ".join(f"{name} ({times} of {self.asked} times)" for name, times in self.adapted)


@dataclass(frozen=True)
class PicturedSuspect:
    """A support image whose label looks wrong: its file or number, and its picture if it is one."""

    suspect: Suspect
    place: str
    picture: Thumbnail | None


@dataclass(frozen=True)
class Judged:
    """All that a page shows of held-out predictions for whole images."""

    names: Sequence[str]
    rows: Sequence[ClassRow]
    before: Tensor  # (classes, classes) confusion of the source network
    after: Tensor  # of the adapted ones
    flips: Sequence[Flip]  # the first ones with pictures

    @property
    def repeated(self) -> bool:
        """Whether images were held out more than once."""
        return any(row.predictions > row.images for row in self.rows)

    @property
    def changed_rows(self) -> list[ClassRow]:
        """The classes with more or fewer right predictions than before, losses first."""
        return sorted((row for row in self.rows if row.after != row.before), key=lambda row: row.after - row.before)

    def count(self, verdict: str) -> int:
        """How many images have this verdict."""
        return sum(flip.verdict == verdict for flip in self.flips)

    def pairs(self, most: int) -> list[Pair]:
        """The mistakes whose number changed most."""
        change = (self.after - self.before).fill_diagonal_(0)
        order = change.abs().flatten().argsort(descending=True, stable=True)[:most].tolist()
        places = [divmod(place, len(self.names)) for place in order if change.flatten()[place]]
        return [Pair(self.names[i], self.names[j], int(self.before[i, j]), int(self.after[i, j])) for i, j in places]


def judged(result: Adaptation) -> Judged | None:
    """What to show; None without held-out predictions for whole images."""
    held = result.evidence.held
    if not isinstance(held, ImageAnswers):
        return None
    count = held.source.shape[1]
    names = [str(name) for name in result.classes or range(count)]
    source, adapted = held.source.argmax(1), held.adapted.argmax(1)
    images = result.support if result.validation is None else result.validation
    flips = flipped(held, names)
    shown = [_pictured(flip, images, result.preprocess) for flip in flips[:MOST] if images is not None]
    return Judged(
        names=names,
        rows=class_rows(held, names),
        before=tally(held.labels, source, count),
        after=tally(held.labels, adapted, count),
        flips=[*shown, *flips[len(shown) :]],
    )


def class_rows(held: ImageAnswers, names: Sequence[str]) -> list[ClassRow]:
    """A row for each class with held-out images."""
    before, after = (logits.argmax(1) == held.labels for logits in (held.source, held.adapted))
    rows = []
    for label in held.labels.unique().tolist():
        mine = held.labels == label
        images = len(held.images[mine].unique())
        rows.append(ClassRow(names[label], images, int(mine.sum()), int(before[mine].sum()), int(after[mine].sum())))
    return rows


def flipped(held: ImageAnswers, names: Sequence[str]) -> list[Flip]:
    """Every image whose prediction changed, once: those that became wrong first, then by how often it changed."""
    source, adapted = held.source.argmax(1), held.adapted.argmax(1)
    flips = []
    for image in held.images[source != adapted].unique().tolist():
        mine = held.images == image
        truth, before = int(held.labels[mine][0]), int(source[mine][0])
        others = Counter(label for label in adapted[mine].tolist() if label != before).most_common()
        verdict = WRONG if before == truth else RIGHT if others[0][0] == truth else STILL
        answers = tuple((names[label], times) for label, times in others)
        flips.append(Flip(image + 1, names[truth], names[before], answers, int(mine.sum()), verdict))
    order = (WRONG, RIGHT, STILL)
    return sorted(flips, key=lambda flip: (order.index(flip.verdict), -flip.flips, flip.image))


def _pictured(flip: Flip, images: Support, preprocess: Preprocess | None) -> Flip:
    """With its file, and with a thumbnail if the image is a picture."""
    flip = replace(flip, file=None if images.files is None else images.files[flip.image - 1])
    alt = f"{sentence(flip.place)}, {flip.truth}: {flip.source} to the source network, {flip.answers} once adapted."
    return replace(flip, picture=_small(images, flip.image - 1, alt, preprocess))


def pictured_suspects(result: Adaptation) -> list[PicturedSuspect]:
    """The support images whose label looks wrong, as many as a page shows."""
    if result.support is None:
        return []
    rows = []
    for suspect in result.suspects[:MOST]:
        name = place(suspect)
        alt = f"{sentence(name)}, labelled {suspect.label_name}, looks like {suspect.predicted_name}."
        picture = _small(result.support, suspect.position, alt, result.preprocess)
        rows.append(PicturedSuspect(suspect, name, picture))
    return rows


def _small(images: Support, position: int, alt: str, preprocess: Preprocess | None) -> Thumbnail | None:
    """A thumbnail of the whole file, if that can be read; else of what the network saw, if it is a picture."""
    if images.files is not None:
        with suppress(FewshiftError, OSError):
            return thumbnail(open_image(images.files[position], "RGB"), alt, SMALL)
    image = images.images[position]
    if image.ndim != 3 or len(image) not in (1, 3):
        return None
    return thumbnail(photograph(as_bytes(image, preprocess)), alt, SMALL)
