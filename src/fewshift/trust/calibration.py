"""Whether a network's probabilities can be believed: one temperature, fitted on held-out answers.

softmax(logits / T) is less sure with T > 1 and surer with T < 1; no prediction changes. A classifier that adaptation
replaced or trained has a scale of its own, and the images it was fitted to say little about it. Answers to held-out
images do: T minimises their cross-entropy. If the network's output is the head's, dividing the head's weight and bias
by T divides the logits, and the network stays a plain network.

The networks that answered had fewer images than the one that is handed over, and its T may differ. So a temperature is
applied only if it makes the network less sure (T > 1; overconfidence does harm), and only if that clearly helps: the
cross-entropy of images that T was not fitted to has to fall by more than its standard error. docs/trust.md has rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.heads import gives_output
from fewshift.core.losses import TEMPERATURES, temperature
from fewshift.core.metrics import calibration_error
from fewshift.core.network import Network
from fewshift.trust.gain import Gain
from fewshift.trust.held_out import HeldOut, ImageAnswers

LEAST = 20  # held-out predictions that a temperature needs
PARTS = 10  # temperatures that cross-fitting fits, at most
DRAWS = 200  # of labels, for the error that chance makes


class NotApplied(Enum):
    """Why a temperature is not applied."""

    NO_HEAD = "no last linear layer is known"
    SOURCE_HEAD = "the classifier is the source's"
    WEAK = "the evidence is weak"
    TOO_FEW = "the held-out predictions are too few"
    NO_SIGNAL = "its answers do not tell the classes apart"
    SURE_ENOUGH = "it is not overconfident"
    NO_FALL = "on other images it would not clearly lower the cross-entropy"
    NOT_LAST = "something comes after the last linear layer"


@dataclass(frozen=True)
class Calibration:
    """How far confidence and accuracy differ on held-out images: expected calibration errors, shares from 0 to 1.

    `after` is honest: each prediction is scaled by the temperature of the other images. All errors are rough. With 35
    images the 15 bins hold a few each, and a network that is right exactly as often as it is sure shows an error of
    0.1 to 0.2. `chance` is that error for these predictions; smaller differences mean nothing.
    """

    temperature: float  # of the adapted network, fitted on all held-out predictions
    before: float  # the source network's error
    uncalibrated: float  # the adapted one's, without a temperature
    after: float  # the adapted one's, each prediction under the temperature of the other images
    chance: float
    predictions: int
    loss_change: float  # of the cross-entropy, by these temperatures; negative is better
    loss_error: float  # its standard error
    refused: NotApplied | None = None  # why the temperature is not applied

    @property
    def applied(self) -> bool:
        """Whether the adapted network's head is divided by the temperature."""
        return self.refused is None


def calibrate(
    network: Network, predictor: nn.Module, held: HeldOut | None, images: Tensor, gain: Gain | None
) -> tuple[nn.Module, Calibration | None]:
    """The predictor under the temperature that held-out images give it, where they are enough to tell."""
    if not isinstance(held, ImageAnswers) or gain is None:
        return predictor, None
    calibration = calibration_of(held)
    if calibration is None:
        return predictor, None
    return calibrated(network, predictor, calibration, images, weak=gain.weak)


def calibration_of(held: ImageAnswers) -> Calibration | None:
    """The errors of both networks; None where a single image leaves nothing to fit to."""
    logits, labels = held.adapted.double(), held.labels
    images = len(held.images.unique())
    if images < 2:
        return None
    scaled = logits / temperatures_of_others(held, logits).unsqueeze(1)
    after, before = (F.cross_entropy(answers, labels, reduction="none") for answers in (scaled, logits))
    return Calibration(
        temperature=temperature(logits, labels),
        before=calibration_error(held.source.softmax(1), labels),
        uncalibrated=calibration_error(logits.softmax(1), labels),
        after=calibration_error(scaled.softmax(1), labels),
        chance=chance_error(scaled.softmax(1)),
        predictions=len(labels),
        loss_change=float((after - before).mean()),
        loss_error=float((after - before).std()) / math.sqrt(images),
    )


def temperatures_of_others(held: ImageAnswers, logits: Tensor) -> Tensor:
    """(n,): for each prediction, the temperature of the predictions for images outside its fold."""
    _, folds = held.folds.unique(return_inverse=True)
    if len(folds.unique()) == 1:  # a single fold is halved
        folds = held.images.unique(return_inverse=True)[1] % 2
    degrees = torch.empty(len(held.labels), dtype=torch.float64)
    for number in range(PARTS):
        mine = folds % PARTS == number
        foreign = ~torch.isin(held.images, held.images[mine])
        if mine.any():
            degrees[mine] = temperature(logits[foreign], held.labels[foreign])
    return degrees


def chance_error(probabilities: Tensor) -> float:
    """The error that these probabilities would show on average, were they right exactly as often as they are sure."""
    generator = torch.Generator().manual_seed(0)
    sure, answers = probabilities.double().max(1)
    errors = []
    for _ in range(DRAWS):
        missed = torch.rand(len(sure), generator=generator, dtype=torch.float64) > sure
        errors.append(calibration_error(probabilities, (answers + missed) % probabilities.shape[1]))
    return math.fsum(errors) / DRAWS


def calibrated(
    network: Network, predictor: nn.Module, calibration: Calibration, images: Tensor, *, weak: bool
) -> tuple[nn.Module, Calibration]:
    """The predictor with its head divided by the temperature, where that is sound; otherwise as it is, and why.

    A head that is the source's stays so, bit for bit.
    """
    refused = _refused(network, predictor, calibration, images, weak)
    if refused:
        return predictor, replace(calibration, refused=refused)
    state = predictor.state_dict()
    head = {name: state[name] for name in _head_tensors(network, state)}
    degree = calibration.temperature
    if any(tensor.dtype.itemsize < 4 for tensor in head.values()):
        # the nearest power of two: any other quotient is rounded so much that predictions could flip
        degree = 2.0 ** round(math.log2(degree))
    if degree == 1:
        return predictor, replace(calibration, refused=NotApplied.SURE_ENOUGH)
    divided = {name: (tensor.double() / degree).to(tensor.dtype) for name, tensor in head.items()}
    # a copy: what a predictor did not change may be the source's own memory
    copied = replace(network, model=predictor).with_tensors(divided)
    return copied, replace(calibration, temperature=degree)


def _refused(
    network: Network, predictor: nn.Module, calibration: Calibration, images: Tensor, weak: bool
) -> NotApplied | None:
    source, state = network.model.state_dict(), predictor.state_dict()
    names = _head_tensors(network, source)
    if not names or not all(name in state for name in names):
        return NotApplied.NO_HEAD
    if all(torch.equal(source[name], state[name]) for name in names):
        return NotApplied.SOURCE_HEAD
    if weak:
        return NotApplied.WEAK
    if unsound := _unsound(calibration):
        return unsound
    return None if gives_output(predictor, str(network.head), images) else NotApplied.NOT_LAST


def _unsound(calibration: Calibration) -> NotApplied | None:
    """What is wrong with the temperature itself."""
    if calibration.predictions < LEAST:
        return NotApplied.TOO_FEW
    if calibration.temperature == float(TEMPERATURES[-1]):
        return NotApplied.NO_SIGNAL
    if calibration.temperature <= 1:
        return NotApplied.SURE_ENOUGH
    clear = calibration.loss_change < -calibration.loss_error
    return None if clear else NotApplied.NO_FALL


def _head_tensors(network: Network, state: dict[str, Tensor]) -> list[str]:
    names = () if network.head is None else (f"{network.head}.weight", f"{network.head}.bias")
    return [name for name in names if name in state]
