"""The front door: adapt a network, and everything one may want to know about the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift import progress as progress_
from fewshift.data import Preprocess, labelled_folder
from fewshift.delta import Delta
from fewshift.errors import FewshiftError
from fewshift.losses import Loss, cross_entropy
from fewshift.method import Method, Needs
from fewshift.methods import METHODS
from fewshift.network import Layer, Network, Skipped, list_layers
from fewshift.target import Augment, Support, Target
from fewshift.version import __version__


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
    gain: None  # evidence on held-out images; None while nothing is held out
    layers: tuple[LayerReport, ...]
    notes: dict[str, Any]
    support: Support
    preprocess: Preprocess | None
    seed: int
    seconds: float

    @cached_property
    def delta(self) -> Delta:
        """What changed, and nothing else."""
        return Delta.between(
            self.source,
            self.model,
            method=self.method.name,
            settings=self.method.settings(),
            classes=self.support.classes,
            preprocess=None if self.preprocess is None else self.preprocess.to_json(),
            seed=self.seed,
            shots=self.support.shots,
            version=__version__,
        )

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page that a colleague can read."""
        from fewshift.report import adaptation_page

        return adaptation_page(self, path)


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
    validate: None = None,
    accept: str = "always",
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: progress_.Listener | None = None,
) -> Adaptation:
    """Fit `model` to the place that `support` comes from.

    `support` is a pair of tensors (images, labels), a dataset of such pairs, or a folder of class folders (then
    `preprocess` turns an opened image into a tensor). The given model is never changed, nor is the global random
    state; the same arguments and seed give the same result.
    """
    began = time.perf_counter()
    if validate is not None:
        raise FewshiftError(f"validate={validate!r} is not available yet: pass validate=None")
    if accept != "always":
        raise FewshiftError(f"accept={accept!r} needs validation, which is not available yet: pass accept='always'")
    chosen = method_of(method)
    if chosen.needs is Needs.STREAM:
        raise FewshiftError(
            f"{chosen.name} adapts to a stream of batches, not to a support set: "
            f"call {type(chosen).__name__}().adapt(model, target) and feed it batches"
        )
    labelled = as_support(support, preprocess, augment, classes)
    home = next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))
    away = home if device is None else torch.device(device)
    with progress_.told_to(progress):
        network = Network.of(model, labelled.images, head)
        if away != home:
            network = replace(network, model=network.with_tensors({}).to(away))
        target = Target(labelled, unlabelled, loss or cross_entropy)
        fitted = chosen.fit(network, target, seed)
    adapted = fitted.predictor.to(home)
    for flagged, original in zip(adapted.parameters(), model.parameters(), strict=False):
        flagged.requires_grad_(original.requires_grad)
    return Adaptation(
        model=adapted,
        source=model,
        method=chosen,
        accepted=True,
        reason="accepted without validation, as asked (accept='always')",
        gain=None,
        layers=_layer_reports(network.layers, network.skipped, fitted.layers),
        notes=fitted.notes,
        support=labelled,
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


def method_of(method: str | Method) -> Method:
    """A method by name with its default settings, or the one given."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise FewshiftError(f"there is no method '{method}': choose one of {', '.join(METHODS)}")
    return METHODS[method]()


def as_support(
    support: Any,
    preprocess: Preprocess | Callable[[Any], Tensor] | None,
    augment: Augment | None,
    classes: Sequence[str] | None,
) -> Support:
    """A support set from tensors, a dataset, or a folder of class folders."""
    names = None if classes is None else tuple(classes)
    if isinstance(support, Support):
        return replace(support, augment=augment or support.augment, classes=names or support.classes)
    if isinstance(support, (str, Path)):
        if not isinstance(preprocess, Preprocess):
            raise FewshiftError(f"images from {support} need preprocessing: pass preprocess=fewshift.Preprocess(...)")
        folder = labelled_folder(support, preprocess, classes=names)
        tensors, labels = folder.tensors()
        return Support(tensors, labels, folder.classes, augment)
    if isinstance(support, (tuple, list)) and len(support) == 2 and all(isinstance(it, Tensor) for it in support):
        return Support(support[0], support[1], names, augment)
    try:
        pairs = [support[index] for index in range(len(support))]
        images = [pair[0] if preprocess is None else preprocess(pair[0]) for pair in pairs]
        labels = torch.as_tensor([int(pair[1]) for pair in pairs])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise FewshiftError(
            f"cannot read a support set from {type(support).__name__}: give (images, labels) tensors, "
            "a dataset of (image, label) pairs, or a folder of class folders"
        ) from error
    if not all(isinstance(image, Tensor) for image in images):
        raise FewshiftError("the dataset's images are not tensors: pass preprocess= to make them so")
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise FewshiftError(
            f"support images have different shapes {sorted(shapes)[:2]}: pass preprocess= with one crop size"
        )
    known = names or (tuple(support.classes) if isinstance(getattr(support, "classes", None), (list, tuple)) else None)
    return Support(torch.stack(images) if images else torch.empty(0, 1), labels, classes=known, augment=augment)


def _layer_reports(
    layers: tuple[Layer, ...], skipped: tuple[Skipped, ...], details: dict[str, dict[str, Any]]
) -> tuple[LayerReport, ...]:
    done = [LayerReport(it.name, it.kind, it.channels, details=details.get(it.name)) for it in layers]
    left = [LayerReport(it.name, it.kind, 0, skipped=it.reason) for it in skipped]
    return tuple(done + left)
