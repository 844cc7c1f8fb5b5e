"""Whether a network's probabilities can be believed: one temperature, fitted on held-out answers.

softmax(logits / T) with T > 1 is less sure of itself, with T < 1 surer; no prediction changes. A classifier that
adaptation replaced or trained further has a scale of its own, which the few images it was fitted to say little about.
The answers to held-out images do: T is where their cross-entropy is least. Where the head's output is the network's,
dividing the head's weight and bias by T is the same as dividing the logits, so a plain network stays one.

The networks that were asked had fewer images than the one that is handed over, whose T may differ. So a temperature is
applied only if it makes a network less sure (T > 1; what is too sure does harm) and clearly: on images that it was not
fitted on, the cross-entropy has to fall by more than its standard error. docs/trust.md tells what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.heads import gives_output
from fewshift.core.metrics import calibration_error
from fewshift.core.network import Network
from fewshift.trust.gain import TEMPERATURES, HeldOut, temperature

LEAST = 20  # held-out predictions that a temperature is fitted to
PARTS = 10  # temperatures that cross-fitting fits, at most
SURE_ENOUGH = "it is not too sure of itself"
DRAWS = 200  # of answers that would be right as often as they are sure


@dataclass(frozen=True)
class Calibration:
    """How far confidence and accuracy are apart on held-out images: expected calibration errors, shares from 0 to 1.

    `after` is honest: each prediction is scaled by the temperature of the other images. All of them are rough. Over
    35 images the 15 bins hold a few each, and a network that is right exactly as often as it is sure shows an error of
    0.1 to 0.2 by chance; `chance` is that number for the predictions at hand. Smaller differences mean nothing.
    """

    temperature: float  # of the adapted network, fitted on all held-out predictions
    before: float  # the source network's error
    uncalibrated: float  # the adapted one's, as it came out
    after: float  # the same, each prediction under the temperature that the other images have
    chance: float
    predictions: int
    loss_change: float  # of the cross-entropy, by these temperatures; negative is better
    loss_error: float  # its standard error
    applied: bool = False
    reason: str = ""  # why it was not

    @property
    def words(self) -> str:
        """In plain words, in points: confidence and accuracy in percent."""
        before, plain, after, chance = (
            f"{100 * it:.0f}" for it in (self.before, self.uncalibrated, self.after, self.chance)
        )
        told = (
            f"confidence and accuracy are {before} points apart for the source network and {plain} for the adapted "
            f"one, over {self.predictions:,} held-out predictions (about {chance} would be chance)"
        )
        if self.applied:
            return f"{told}; dividing its classifier by a temperature of {self.temperature:.2f} makes it {after}"
        return f"{told}; no temperature was applied: {self.reason}"


def calibration_of(held: HeldOut, answers: Tensor | None = None) -> Calibration | None:
    """The errors of both networks; None where a single image leaves nothing to fit to.

    `answers` are those of the adapted network, where `held.adapted` mixes several ways to adapt.
    """
    logits, labels = (held.adapted if answers is None else answers).double(), held.labels
    images = len(held.images.unique())
    if images < 2:
        return None
    scaled = logits / temperatures_of_others(held, logits).unsqueeze(1)
    after, before = (F.cross_entropy(it, labels, reduction="none") for it in (scaled, logits))
    return Calibration(
        temperature=temperature(logits, labels),
        before=calibration_error(held.source.softmax(1), labels),
        uncalibrated=calibration_error(logits.softmax(1), labels),
        after=calibration_error(scaled.softmax(1), labels),
        chance=chance_error(scaled.softmax(1)),
        predictions=len(held),
        loss_change=float((after - before).mean()),
        loss_error=float((after - before).std()) / math.sqrt(images),
    )


def temperatures_of_others(held: HeldOut, logits: Tensor) -> Tensor:
    """(n,): for each prediction, the temperature of the predictions for images outside its fold."""
    found = torch.empty(len(held), dtype=torch.float64)
    for mine in _parts(held):
        foreign = ~torch.isin(held.images, held.images[mine])
        found[mine] = temperature(logits[foreign], held.labels[foreign])
    return found


def _parts(held: HeldOut) -> Iterator[Tensor]:
    """The predictions that share a temperature: folds, or halves of the images where there is a single fold."""
    _, folds = held.folds.unique(return_inverse=True)
    if len(folds.unique()) == 1:
        folds = held.images.unique(return_inverse=True)[1] % 2
    numbers = folds % PARTS
    yield from (numbers == it for it in numbers.unique())


def chance_error(probabilities: Tensor) -> float:
    """The error that these probabilities would show on average, were they right exactly as often as they are sure."""
    generator = torch.Generator().manual_seed(0)
    sure, said = probabilities.double().max(1)
    errors = []
    for _ in range(DRAWS):
        missed = torch.rand(len(sure), generator=generator, dtype=torch.float64) > sure
        errors.append(calibration_error(probabilities, (said + missed) % probabilities.shape[1]))
    return math.fsum(errors) / DRAWS


def calibrated(
    network: Network, predictor: nn.Module, found: Calibration, images: Tensor, *, weak: bool
) -> tuple[nn.Module, Calibration]:
    """The predictor with its head divided by the temperature, where that is sound; otherwise as it is, and why.

    A head that is the source's stays so, bit for bit.
    """
    reason = _reason(network, predictor, found, images, weak)
    if reason:
        return predictor, replace(found, reason=reason)
    state = predictor.state_dict()
    head = {name: state[name] for name in _head_tensors(network, state)}
    degree = _exact(found.temperature) if _is_half(head) else found.temperature
    if degree == 1:
        return predictor, replace(found, reason=SURE_ENOUGH)
    divided = {name: (tensor.double() / degree).to(tensor.dtype) for name, tensor in head.items()}
    # a copy: what a predictor did not change may be the source's own memory
    copied = replace(network, model=predictor).with_tensors(divided)
    return copied, replace(found, temperature=degree, applied=True)


def _reason(network: Network, predictor: nn.Module, found: Calibration, images: Tensor, weak: bool) -> str:
    """Why the temperature is not applied; empty where it is."""
    source, state = network.model.state_dict(), predictor.state_dict()
    names = _head_tensors(network, source)
    if not names or not all(name in state for name in names):
        return "no last linear layer is known"
    if all(torch.equal(source[name], state[name]) for name in names):
        return "the classifier is the source's"
    if weak:
        return "the evidence is weak"
    if unsound := _unsound(found):
        return unsound
    return "" if gives_output(predictor, str(network.head), images) else "something comes after the last linear layer"


def _unsound(found: Calibration) -> str:
    """What is wrong with the temperature itself."""
    if found.predictions < LEAST:
        return f"{found.predictions} held-out predictions are too few"
    if found.temperature == float(TEMPERATURES[-1]):
        return "its answers tell nothing apart"
    if found.temperature <= 1:
        return SURE_ENOUGH
    clear = found.loss_change < -found.loss_error
    return "" if clear else "on other images it would not clearly lower the cross-entropy"


def _head_tensors(network: Network, state: dict[str, Tensor]) -> list[str]:
    names = () if network.head is None else (f"{network.head}.weight", f"{network.head}.bias")
    return [name for name in names if name in state]


def _is_half(tensors: dict[str, Tensor]) -> bool:
    return any(torch.finfo(it.dtype).bits < 32 for it in tensors.values())


def _exact(degree: float) -> float:
    """The nearest power of two: in half precision any other quotient is rounded so much that predictions could flip."""
    return 2.0 ** round(math.log2(degree))
