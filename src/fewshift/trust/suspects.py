"""Suspects: support images whose label contradicts what networks predict that were not fitted to them.

Confident learning (Northcutt, Jiang and Chuang, 2021) with a margin: few images make thresholds rough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from fewshift.core.draws import others
from fewshift.core.losses import temperature
from fewshift.core.outputs import NO_ANSWER, REMEDY
from fewshift.core.support import Support
from fewshift.errors import FewshiftError
from fewshift.trust.gain import Gain
from fewshift.trust.held_out import HeldOut, ImageAnswers

MARGIN = 2.0  # a suspect's predicted class is at least this many times as probable as its label


@dataclass(frozen=True)
class Suspect:
    """A support image whose label looks wrong."""

    position: int  # in the support, from 0
    file: Path | None  # None if the image did not come from a file
    label: int
    label_name: str
    label_probability: float
    predicted: int
    predicted_name: str
    predicted_probability: float


@dataclass(frozen=True)
class Suspects(Sequence[Suspect]):
    """The suspects of a support, the least plausible label first, and the evidence without them."""

    images: tuple[Suspect, ...] = ()
    gain_without: Gain | None = None  # on the other held-out images; None without suspects, or if others judge

    @overload
    def __getitem__(self, index: int) -> Suspect: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Suspect, ...]: ...
    def __getitem__(self, index: int | slice) -> Suspect | tuple[Suspect, ...]:
        return self.images[index]

    def __iter__(self) -> Iterator[Suspect]:
        return iter(self.images)

    def __len__(self) -> int:
        return len(self.images)

    def removed_from(self, support: Support) -> Support:
        """The support without its suspects, or an error if nothing would be left."""
        if len(self) == len(support):
            raise FewshiftError(
                f"all {len(support)} labels of the support look wrong: check the order of the classes, or keep them"
            )
        return support.part(others(_positions(self), len(support)))


def find_suspects(
    support: Support, answers: Sequence[HeldOut], judged: HeldOut | None = None, *, weak: bool = False
) -> Suspects:
    """The suspects by held-out answers about a support; none with pixel labels, or where no class has two images.

    `answers` are those of every candidate. `judged` are those that the evidence rests on, if they are about the
    support; `weak` says that such evidence is.
    """
    networks = [held for held in answers if isinstance(held, ImageAnswers)]
    if not networks:
        return Suspects()
    images, labels, probabilities = held_out_probabilities(networks)
    names = support.classes or tuple(str(label) for label in range(probabilities.shape[1]))
    suspects = []
    for row, predicted in contradicted(labels, probabilities).items():
        position, label = int(images[row]), int(labels[row])
        suspects.append(
            Suspect(
                position=position,
                file=None if support.files is None else support.files[position],
                label=label,
                label_name=names[label],
                label_probability=float(probabilities[row, label]),
                predicted=predicted,
                predicted_name=names[predicted],
                predicted_probability=float(probabilities[row, predicted]),
            )
        )
    suspects.sort(key=lambda suspect: suspect.label_probability - suspect.predicted_probability)
    return Suspects(tuple(suspects), _gain_without(suspects, judged, weak))


def suspected(answers: Sequence[HeldOut]) -> float:
    """The share of labels that look wrong; 0 with pixel labels."""
    networks = [held for held in answers if isinstance(held, ImageAnswers)]
    if not networks:
        return 0.0
    images, labels, probabilities = held_out_probabilities(networks)
    return len(contradicted(labels, probabilities)) / len(images)


def held_out_probabilities(networks: Sequence[ImageAnswers]) -> tuple[Tensor, Tensor, Tensor]:
    """Images (n,), labels (n,), and the mean probabilities (n, classes) of the source network and all adapted ones.

    Each network has its best temperature. Where adaptation fits wrong labels, the source network objects; where the
    source network fails, the adapted ones speak.
    """
    first = networks[0]
    images, rows = first.images.unique(return_inverse=True)
    logits = [first.source, *(network.adapted for network in networks)]
    finite = [each for each in logits if torch.isfinite(each).all()]
    if not finite:
        raise FewshiftError(f"{NO_ANSWER} for held-out images, before and after adaptation: {REMEDY}")
    tempered = torch.stack([(each / temperature(each, first.labels)).softmax(1) for each in finite]).mean(0)
    sums = tempered.new_zeros(len(images), tempered.shape[1]).index_add_(0, rows, tempered)
    labels = first.labels.new_empty(len(images)).index_copy_(0, rows, first.labels)
    return images, labels, sums / rows.bincount()[:, None]


def contradicted(labels: Tensor, probabilities: Tensor, margin: float = MARGIN) -> Mapping[int, int]:
    """The rows whose label looks wrong, and the class that each looks like.

    Class c is confident of a row if p_c is at least the mean p_c of the rows with label c. A row looks like the most
    probable of the classes that are confident of it. Its label looks wrong if that is another class, and `margin` times
    as probable as the label. A class with a single image is never confident: its mean is that image's own.
    """
    own = probabilities.gather(1, labels[:, None]).flatten()
    counts = labels.bincount(minlength=probabilities.shape[1])
    thresholds = torch.zeros_like(probabilities[0]).index_add_(0, labels, own) / counts
    confident = (probabilities >= thresholds) & (counts > 1)
    best, predicted = probabilities.where(confident, probabilities.new_tensor(-1.0)).max(1)
    wrong = (predicted != labels) & (best >= margin * own)
    return {row: int(predicted[row]) for row in wrong.nonzero().flatten().tolist()}


def _gain_without(suspects: Sequence[Suspect], judged: HeldOut | None, weak: bool) -> Gain | None:
    """What the other held-out images say; None if there are none."""
    if judged is None or not suspects:
        return None
    rows = ~torch.isin(judged.images, _positions(suspects))
    return judged.part(rows).gain(weak=weak) if rows.any() else None


def _positions(suspects: Sequence[Suspect]) -> Tensor:
    return torch.tensor([suspect.position for suspect in suspects], dtype=torch.long)
