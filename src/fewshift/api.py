"""The front door: adapt a network, and everything one may want to know about the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift import __version__
from fewshift.core import _progress as progress_
from fewshift.core.delta import Delta
from fewshift.core.labels import Augment
from fewshift.core.losses import Loss, cross_entropy
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Layer, Network, Skipped, like, list_layers
from fewshift.core.randomness import checked_seed
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images import Preprocess
from fewshift.images.inputs import as_support, as_unlabelled
from fewshift.methods.catalog import METHODS
from fewshift.methods.lccs import LCCS
from fewshift.trust.calibration import Calibration, calibrated, calibration_of
from fewshift.trust.gain import Gain, HeldOut, choose
from fewshift.trust.guard import Accept, Evidence, check_accept, decide, gather
from fewshift.trust.leaks import find_leaks, refuse_leaks, refuse_repeats
from fewshift.trust.shift import Shift, shift

INSIDE = ("cv", "loo")  # ways to get evidence from the support itself
MULTIPLES = (8, 16, 32, 64)  # of pixels, that networks with strides may insist on


@dataclass(frozen=True)
class LayerReport:
    """One normalisation layer: what adaptation did to it, or why it was left alone."""

    name: str
    kind: str
    channels: int
    skipped: str | None = None
    details: dict[str, Any] | None = None  # coefficients and shift, as the method noted them


@dataclass(frozen=True)
class Adaptation:
    """The adapted network with everything needed to judge, keep or undo it."""

    model: nn.Module
    source: nn.Module
    method: Method
    accepted: bool
    reason: str
    evidence: Evidence
    calibration: Calibration | None  # None where nothing was held out, or pixels have labels
    candidate: nn.Module  # the adapted network, whether it was accepted or not
    layers: tuple[LayerReport, ...]
    notes: dict[str, Any]
    support: Support | None
    validation: Support | None  # labelled images apart from the support, where the evidence comes from such
    unlabelled: Unlabelled | None
    classes: tuple[str, ...] | None
    preprocess: Preprocess | None
    seed: int
    seconds: float

    @property
    def gain(self) -> Gain | None:
        """What held-out images say; None where nothing could be, or was to be, held out."""
        return self.evidence.gain

    @cached_property
    def delta(self) -> Delta:
        """What changed, and nothing else: nothing if the adaptation was rejected."""
        return self._delta(self.model)

    @cached_property
    def candidate_delta(self) -> Delta:
        """What would have changed, had it been accepted."""
        return self._delta(self.candidate)

    @cached_property
    def shift(self) -> Shift | None:
        """How far the images are from what the source network was trained on; None where that cannot be seen."""
        images = self.unlabelled if self.support is None else self.support.images
        with suppress(FewshiftError):
            return shift(self.source, images)
        return None

    def _delta(self, model: nn.Module) -> Delta:
        return Delta.between(
            self.source,
            model,
            method=self.method.name,
            settings=self.method.settings(),
            classes=self.classes,
            preprocess=None if self.preprocess is None else self.preprocess.to_json(),
            seed=self.seed,
            shots=None if self.support is None else self.support.shots,
            version=__version__,
        )

    def report(self, path: str | Path, delta: str | Path | None = None) -> Path:
        """Write one self-contained HTML page that a colleague can read; `delta` is where the delta is kept."""
        from fewshift.report import adaptation_page

        return adaptation_page(self, path, delta)


def adapt(
    model: nn.Module,
    support: Any,
    *,
    method: str | Method = "lccs",
    unlabelled: Any = None,
    loss: Loss | None = None,
    preprocess: Preprocess | Callable[[Any], Tensor] | None = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    validate: Any = "cv",
    accept: Accept = "not-worse",
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: progress_.Listener | None = None,
) -> Adaptation:
    """Fit `model` to the place that `support` comes from.

    `support` is a pair of tensors (images, labels), a dataset of such pairs, or a folder of class folders (then
    `preprocess` says how an image becomes a tensor); None for a method that looks at `unlabelled` images alone, which
    are a tensor, a dataset or a folder. Without `classes`, folders in alphabetical order are the network's outputs.

    `validate` is where the evidence comes from: "cv" (the support, cross-validated), "loo" (one image left out at a
    time), labelled images of the target that are not in the support, or None. `accept` is the guard: "not-worse"
    (something speaks for it, nothing against it), "better", a number of points that the whole interval has to exceed, a
    callable that is shown the gain, or "always". What is rejected comes back as the source network.

    The name "lccs" alone, cross-validated, stands for LCCS(classifier="evidence"). The given model is never changed,
    nor is the global random state; the same arguments and seed give the same result.
    """
    began = time.perf_counter()
    check_accept(accept)
    chosen = recommended(method) if _is_word(validate, "cv") else method_of(method)
    if chosen.needs is Needs.STREAM:
        raise FewshiftError(
            f"{chosen.name} adapts to a stream of batches while it predicts: "
            f"call fewshift.METHODS['{chosen.name}']().adapt(model, target) and feed it batches"
        )
    checked_seed(seed)
    target = Target(
        None if support is None else as_support(support, preprocess, augment, classes),
        as_unlabelled(unlabelled, preprocess, augment),
        loss or cross_entropy,
    )
    if chosen.needs is Needs.UNLABELLED:
        target.need_unlabelled(chosen.name)
    with progress_.told_to(progress):
        wanted = "target images" if chosen.needs is Needs.NOTHING else f"{chosen.needs.value} images"
        images = target.some_images(chosen.name, wanted)
        network, target = fitting(model, target, images, head)
        home = like(network.model, images).device
        network_there = network if device is None else moved(network, device)
        inside = validate is None or _is_word(validate, *INSIDE)
        given = validate if inside else labelled_apart(validate, preprocess, target, classes)
        if _is_word(validate, *INSIDE) and target.support is not None:
            refuse_repeats(target.support.images)
        fitted = chosen.fit(network_there, target, seed)
        evidence = gather(network_there, target, chosen, fitted, given, seed)
        predictor, calibration = _calibrated(network_there, fitted, evidence, images)
    verdict = decide(accept, evidence)
    names = None if classes is None else tuple(classes)
    candidate = predictor.to(home)
    divided = {"temperature": calibration.temperature} if calibration and calibration.applied else {}
    return Adaptation(
        model=candidate if verdict.accepted else network.with_tensors({}),
        source=model,
        method=chosen,
        accepted=verdict.accepted,
        reason=verdict.reason,
        evidence=evidence,
        calibration=calibration,
        candidate=candidate,
        layers=_layer_reports(network.layers, network.skipped, fitted.layers),
        notes=fitted.notes | divided,
        support=target.support,
        validation=None if inside else given,
        unlabelled=target.unlabelled,
        classes=names if target.support is None else target.support.classes,
        preprocess=preprocess if isinstance(preprocess, Preprocess) else None,
        seed=seed,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class Inspection:
    """What can be adapted in a network, and what cannot, before any data."""

    kind: str
    parameters: int
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    head: str | None
    classes: int | None

    @property
    def affine_parameters(self) -> int:
        """BatchNorm weights and biases: what fine-tuning BatchNorm would learn."""
        return sum(2 * layer.channels for layer in self.layers if layer.affine)

    @property
    def coefficients(self) -> int:
        """What LCCS learns with n = 1: four numbers per layer."""
        return 4 * len(self.layers)


def inspect(model: nn.Module, images: Tensor | None = None, head: str | None = None) -> Inspection:
    """Look at a network. With `images` it is run once: then head, order and layers never executed are known too."""
    network = list_layers(model) if images is None else Network.of(model, images, head)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Inspection(type(model).__name__, parameters, network.layers, network.skipped, network.head, network.classes)


def recommended(method: str | Method | type[Method]) -> Method:
    """A name alone stands for the settings that did best where evidence is gathered."""
    return LCCS(classifier="evidence") if method == LCCS.name else method_of(method)


def labelled_apart(given: Any, preprocess: Any, target: Target, classes: Sequence[str] | None) -> Support:
    """Labelled images to judge by, none of which is in the support."""
    own = target.support.classes if target.support is not None else None
    if isinstance(given, str) and not Path(given).exists():
        raise FewshiftError(
            f"validate={given!r} is neither a way nor a folder: choose 'cv', 'loo' or None, or give labelled images"
        )
    labelled = as_support(given, preprocess, None, classes or own)
    if target.support is not None:
        refuse_leaks(find_leaks(target.support.images, labelled.images))
    return labelled


def _calibrated(
    network: Network, fitted: Fitted, evidence: Evidence, images: Tensor
) -> tuple[nn.Module, Calibration | None]:
    """The predictor under the temperature that held-out images give it, where they are enough to tell."""
    held, gain = evidence.held, evidence.gain
    if not isinstance(held, HeldOut) or gain is None:
        return fitted.predictor, None
    # where a method chose between several ways, the temperature is that of the way it took
    answers = held.candidates.get(choose(held)) if held is fitted.held else None
    found = calibration_of(held, answers)
    if found is None:
        return fitted.predictor, None
    return calibrated(network, fitted.predictor, found, images, weak=gain.weak)


def _is_word(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value in words


def method_of(method: str | Method | type[Method]) -> Method:
    """A method by name with its default settings, or the one given."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if method not in METHODS:
        raise FewshiftError(f"there is no method '{method}': choose one of {', '.join(METHODS)}")
    return METHODS[method]()


def fitting(model: nn.Module, target: Target, images: Tensor, head: str | None) -> tuple[Network, Target]:
    """The view, and the target with pictures padded where the network takes only multiples of some size."""
    support = target.support
    if support is None or support.kind.centroids:
        return Network.of(model, images, head), target

    def look(given: Support) -> Network:
        sizes = {image.shape: image[None] for image in given.images}
        first, *_ = [Network.of(model, image, head) for image in sizes.values()]
        return first

    try:
        return look(support), target
    except FewshiftError:
        for multiple in MULTIPLES:
            padded = support.padded(multiple)
            with suppress(FewshiftError):
                return look(padded), replace(target, support=padded)
        raise


def moved(network: Network, device: torch.device | str) -> Network:
    """The view of a copy on that device, or one sentence when there is none."""
    try:
        return replace(network, model=network.with_tensors({}).to(torch.device(device)))
    except (RuntimeError, AssertionError) as error:
        raise FewshiftError(f"device {device} cannot be used ({str(error).splitlines()[0]}): choose another") from error


def _layer_reports(
    layers: tuple[Layer, ...], skipped: tuple[Skipped, ...], details: dict[str, dict[str, Any]]
) -> tuple[LayerReport, ...]:
    done = [LayerReport(it.name, it.kind, it.channels, details=details.get(it.name)) for it in layers]
    left = [LayerReport(it.name, it.kind, 0, skipped=it.reason) for it in skipped]
    return tuple(done + left)
