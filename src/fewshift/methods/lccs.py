"""LCCS: learn, from a few labelled images, how to combine source and support BatchNorm statistics.

Zhang, Shen, Zhang and Foo, "Few-Shot Adaptation of Pre-Trained Networks for Domain Shift", IJCAI 2022.

Every BatchNorm layer gets mu = M eta and sigma = S rho. The columns of M and S are the source's statistics, the
support's, and the directions in which the support's images differ. Only eta and rho are learned: 2 (n + 1) numbers
per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshift.core import _progress as progress
from fewshift.core.heads import centroids, cosine_logits, nearest_centroid_head, train_head
from fewshift.core.loop import Course, fit
from fewshift.core.losses import Loss, mean_entropy
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import Moments, Normal, merged, normalised, source_layers
from fewshift.core.network import (
    Network,
    batchnorm,
    channels_last,
    head_inputs,
    like,
    linear,
    logits_of,
    refuse_unadaptable,
)
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.reading import Blend, read_by_ema, read_support, tied
from fewshift.core.spans import Convex, Linear, Span, spanning_vectors
from fewshift.core.support import MINIBATCH, Support, Target
from fewshift.errors import FewshiftError
from fewshift.trust.gain import SOURCE, HeldOut, SupportLoss, choose, folds_of, gathered

MOST_CANDIDATES = 1001
CLASSIFIERS = ("finetuned", "ncc", "source")  # the preferred one first
EMA = "minibatches, exponential average"
NCC_SHOTS = 5  # from here on the paper replaces the source classifier by nearest centroids


@dataclass(frozen=True)
class Variant:
    """Where the paper, read correctly, and the authors' released code differ."""

    steps: Literal["every minibatch", "last minibatch"]  # of an epoch, on which the optimiser takes a step
    drop_last: bool  # an incomplete minibatch is left out
    stale: bool  # inference uses the statistics from before the last step
    borrow_scale: bool  # the directions of sigma are scaled by the singular values of the means
    guard: bool  # layers that see one position per image, or reach sigma <= 0, are taken care of
    double: bool  # adaptation runs in float64


VARIANTS = {
    "paper": Variant("every minibatch", False, stale=False, borrow_scale=False, guard=True, double=False),
    "released": Variant("last minibatch", True, stale=True, borrow_scale=True, guard=False, double=True),
}


@dataclass(frozen=True)
class LCCS(Method):
    """Linear combination coefficients for BatchNorm statistics; every field is an ablation of the paper.

    - n: support vectors per layer: a number, "k*classes" (1 with pixel labels), or a fraction of explained variance
      such as 0.9.
    - init: "grid" (one v for all layers), "greedy" (layer by layer), a number v, or None (source only).
    - grid: how many values of v from 0 to 1; the largest of equally good ones is taken.
    - epochs, lr, batch_size: the gradient stage (Adam); 0 epochs stop after the initialisation. Minibatches hold 32
      images, with pixel labels one, unless batch_size says otherwise.
    - combination: "linear", or "convex" (one weight in [0, 1] per layer and moment, n = 1).
    - objective: "cross-entropy", or "entropy" (labels unused).
    - classifier: "source", "finetuned" (for classifier_epochs), "ncc", "auto" = source below 5 shots, NCC from 5, or
      "evidence": finetuned, unless another does clearly better on support images held out in turn. The source's
      classifier stays where a class has a single image or none.
    - statistics: "exact" (one pass over the whole support per candidate), "ema" (init_epochs augmented epochs), or
      "auto" = exact unless there is an augmentation.
    - variant: "paper", or "released" = the authors' code with its quirks.
    - gradient_head: the head of the gradient stage, "source" or "ncc".
    - min_sigma: a floor for sigma; gamma_floor: a floor for |gamma| of dead channels; adapt_dtype: "float64" for
      reference runs.
    """

    name: ClassVar[str] = "lccs"
    paper: ClassVar[str] = "Zhang et al., IJCAI 2022"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "BatchNorm weight and bias (statistics where a layer has none); the head if replaced"

    n: int | float | str = "k*classes"
    init: str | float | None = "grid"
    grid: int = 11
    epochs: int = 10
    lr: float = 1e-3
    batch_size: int | None = None
    combination: str = "linear"
    objective: str = "cross-entropy"
    classifier: str = "auto"
    classifier_epochs: int = 10
    statistics: str = "auto"
    init_epochs: int = 10
    variant: str = "paper"
    gradient_head: str = "source"
    min_sigma: float | None = None
    gamma_floor: float | None = None
    adapt_dtype: str | None = None

    def check(self) -> None:
        """Only settings that make sense."""
        _one_of("combination", self.combination, ("linear", "convex"))
        _one_of("objective", self.objective, ("cross-entropy", "entropy"))
        _one_of("classifier", self.classifier, ("source", "finetuned", "ncc", "auto", "evidence"))
        _one_of("statistics", self.statistics, ("exact", "ema", "auto"))
        _one_of("variant", self.variant, tuple(VARIANTS))
        _one_of("gradient_head", self.gradient_head, ("source", "ncc"))
        _one_of("adapt_dtype", self.adapt_dtype, (None, "float32", "float64"))
        if isinstance(self.init, str):
            _one_of("init", self.init, ("grid", "greedy"))
        elif self.init is not None and not 0 <= self.init <= 1:
            raise FewshiftError(f"init={self.init} is not a blend: give a number from 0 (source) to 1 (support)")
        if isinstance(self.n, str):
            _one_of("n", self.n, ("k*classes",))
        elif not (self.n >= 1 if isinstance(self.n, int) else 0 < self.n < 1):
            raise FewshiftError(f"n={self.n} is neither a count nor a fraction: give 1, 2, ... or for example 0.9")
        self.at_least(grid=2, init_epochs=1, batch_size=1)
        if self.grid > MOST_CANDIDATES:
            raise FewshiftError(f"grid={self.grid} is too large: give at most {MOST_CANDIDATES}")

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Initialise, span, learn, classify: the four stages of the paper."""
        support = target.need_support(self.name)
        network = Network.of(network, target.some_images(self.name, "support images"))
        refuse_unadaptable(network)
        network, workshop, support = self._prepare(network, support.checked(network.output))
        loss = mean_entropy if self.objective == "entropy" else target.cost

        stages = self._stages(workshop, support, loss, seed)
        start, spans, learned = stages.start, stages.spans, stages.learned
        held = self._evidence(workshop, support, target, loss, seed) if self.classifier == "evidence" else None
        kind = self._choose_classifier(workshop, support) if held is None else _kind(choose(held))
        head = self._classify(workshop, learned.normals, support, target.cost, kind, seed)

        return Fitted(
            network.with_tensors(merged(network, learned.normals) | head.tensors),
            layers=_layer_notes(workshop, spans, learned),
            notes={
                "v": _common(start.blend),
                "grid": start.curve,
                "statistics": start.route,
                "steps": learned.steps,
                "parameters": learned.parameters,
                "support_loss": learned.course.losses,
                "epoch_seconds": learned.course.epoch_seconds,
                "classifier": head.kind,
                "classifier_loss": head.losses,
            },
            held=held,
            support_loss=self._support_loss(start, support),
        )

    def _stages(self, network: Network, support: Support, loss: Loss, seed: int) -> Stages:
        """Initialise, span, learn."""
        start = self._initialise(network, support, loss, seed)
        spans = self._span(network, support, start)
        return Stages(start, spans, self._learn(network, spans, support, start.blend, loss, seed))

    def _support_loss(self, start: Start, support: Support) -> SupportLoss | None:
        """What the initial blend did for the labels of the support; None where they were not asked, or per pixel."""
        if not start.curve or self.objective == "entropy" or not support.kind.centroids:
            return None
        return SupportLoss(next(iter(start.blend.values())), start.curve[0]["loss"], start.loss, len(support))

    def _evidence(self, network: Network, support: Support, target: Target, loss: Loss, seed: int) -> HeldOut | None:
        """Cross-validate the classifiers: the other stages are run once for each fold, whatever stands on top.

        A class that is not adapted to would be forgotten by a new classifier, and no held-out image could tell: then
        the source's is kept.
        """
        folds = [] if not support.kind.centroids else folds_of(support, "cv", seed)
        if not folds:
            return None
        complete = len(support.counts) == network.classes and support.shots > 1
        kinds = CLASSIFIERS if complete and network.head is not None else ("source",)

        def answer(kept: Support, held: Support) -> dict[str, Tensor]:
            normals = self._stages(network, kept, loss, seed).learned.normals
            found = {SOURCE: _logits(network.model, held)}
            for kind in kinds:
                try:
                    head = self._classify(network, normals, kept, target.cost, kind, seed)
                except (
                    FewshiftError
                ):  # a classifier that cannot be trained, in half precision for example, is no candidate
                    continue
                model = normalised(network, normals)
                state = model.state_dict()
                with torch.no_grad():
                    for name, tensor in head.tensors.items():
                        state[name].copy_(tensor)
                found[_candidate(kind)] = _logits(model, held)
            return found

        return gathered(support, folds, answer)

    @property
    def _quirks(self) -> Variant:
        return VARIANTS[self.variant]

    def _prepare(self, network: Network, support: Support) -> tuple[Network, Network, Support]:
        """The network to merge into (dead channels lifted if asked), and network and support to adapt with."""
        if self.gamma_floor is not None:
            network = replace(network, model=network.with_tensors(_lifted(network, self.gamma_floor)))
        model = network.with_tensors({}).requires_grad_(False)
        if self.adapt_dtype is not None or self._quirks.double:
            model = model.to(torch.float64 if self._quirks.double else getattr(torch, str(self.adapt_dtype)))
        if like(model, torch.empty(0)).dtype != torch.float32:
            return network, replace(network, model=model), support.prepared(lambda images: like(model, images))
        model = model.to(memory_format=torch.channels_last)  # in double precision it would be slower
        support = support.prepared(lambda images: channels_last(like(model, images)))
        return network, replace(network, model=model), support

    # stage 1

    def _initialise(self, network: Network, support: Support, loss: Loss, seed: int) -> Start:
        """The blend of source and support statistics to start from."""
        candidates = [step / (self.grid - 1) for step in range(self.grid)]
        if not isinstance(self.init, str):
            return Start(tied(network, float(self.init or 0)))
        best: Start | None = None
        if self.init == "grid":
            curve = []
            for v in progress.track(candidates, "initialisation"):
                tried = self._try(network, support, loss, tied(network, v), seed)
                curve.append({"v": v, "loss": tried.loss})
                best = _better(best, tried)
            return replace(_found(best), curve=curve)

        blend = tied(network, 0.0)  # later layers stay at the source until it is their turn
        for layer in progress.track(network.layers, "initialisation, layer by layer"):
            best = None
            for v in candidates:
                best = _better(best, self._try(network, support, loss, {**blend, layer.name: v}, seed))
            blend = _found(best).blend
        return _found(best)

    def _try(self, network: Network, support: Support, loss: Loss, blend: Blend, seed: int) -> Start:
        """A candidate: statistics estimated under this blend and held, its loss on the plain support."""
        if self.statistics == "exact" or (self.statistics == "auto" and support.augment is None):
            reading = read_support(network, support, blend)
            return Start(blend, support.loss_of(loss, reading.logits), reading.moments, route=reading.route)
        with private_randomness(seed) as generator:  # the same views for every candidate
            views = (
                support.batch(indices)[0]
                for _ in range(self.init_epochs)
                for indices in self._minibatches(support, generator)
            )
            estimates = read_by_ema(network, views, blend)
        source = source_layers(network)
        held = {name: source[name].blend(estimate, blend[name]) for name, estimate in estimates.items()}
        with torch.no_grad():
            model = normalised(network, held)
            answers = [logits_of(model(images)) for images, _ in support.chunks(support.minibatch(self.batch_size))]
        return Start(blend, support.loss_of(loss, answers), route=EMA)

    # stage 2

    def _span(self, network: Network, support: Support, start: Start) -> dict[str, Span]:
        """Spanning vectors from one pass over the whole plain support under the chosen blend."""
        seen = start.moments or read_support(network, support, start.blend).moments
        n = self._support_vectors(support)
        source = source_layers(network)
        return {
            name: spanning_vectors(
                seen[name], source[name], n, borrow_scale=self._quirks.borrow_scale, guard=self._quirks.guard
            )
            for name in seen
        }

    def _support_vectors(self, support: Support) -> int | float:
        if self.combination == "convex":
            return 1
        return self.n if not isinstance(self.n, str) else 1 if not support.kind.centroids else len(support)

    # stage 3

    def _learn(
        self, network: Network, spans: Mapping[str, Span], support: Support, blend: Blend, loss: Loss, seed: int
    ) -> Learned:
        """Untie the layers and move every coefficient by gradient descent; the spanning vectors are constants."""
        make = Convex if self.combination == "convex" else Linear
        coefficients = {name: make(span, blend[name], split=self._quirks.double) for name, span in spans.items()}
        parameters = [parameter for it in coefficients.values() for parameter in it.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        source, model = source_layers(network), network.model

        def normals() -> dict[str, Normal]:
            return {name: self._floored(it.normal()) for name, it in coefficients.items()}

        def logits(images: Tensor) -> Tensor:
            affine: dict[str, Tensor] = {}
            for name, normal in normals().items():
                dtype = cast(Tensor, batchnorm(model, name).running_mean).dtype
                weight, bias = source[name].affine(normal)
                affine |= {f"{name}.weight": weight.to(dtype), f"{name}.bias": bias.to(dtype)}
            # a module registered under two names is swapped once, by the name it is known by here
            return logits_of(functional_call(model, affine, (images,), tie_weights=False))

        def project() -> None:
            for it in coefficients.values():
                it.project()

        answer = logits if self.gradient_head == "source" else _centroid_logits(network, model, support, logits)

        def cost(indices: Tensor) -> Tensor:
            images, labels = support.batch(indices)
            return loss(answer(images), labels)

        with private_randomness(seed) as generator:
            course = fit(
                cost,
                lambda: self._epoch(support, generator),
                optimizer,
                self._effective_epochs(),
                after_step=project,
            )
        with torch.no_grad():
            final = normals()
        self._refuse_degenerate(final)
        return Learned(
            final,
            {name: it.values() for name, it in coefficients.items()},
            course,
            steps=int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0,
            parameters=sum(parameter.numel() for parameter in parameters),
        )

    def _minibatches(self, support: Support, generator: torch.Generator) -> list[Tensor]:
        size = support.minibatch(self.batch_size)
        return minibatches(len(support), size, generator, drop_last=self._quirks.drop_last)

    def _epoch(self, support: Support, generator: torch.Generator) -> list[Tensor]:
        """The minibatches of one epoch on which a step is taken."""
        batches = self._minibatches(support, generator)
        return batches[-1:] if self._quirks.steps == "last minibatch" else batches

    def _effective_epochs(self) -> int:
        """The released code takes one step per epoch and never uses the last one, unless a head is trained after."""
        lost = self._quirks.stale and self.classifier != "finetuned" and self.epochs > 0
        return self.epochs - 1 if lost else self.epochs

    def _floored(self, normal: Normal) -> Normal:
        return normal if self.min_sigma is None else Normal(normal.mean, normal.std.clamp(min=self.min_sigma))

    def _refuse_degenerate(self, normals: Mapping[str, Normal]) -> None:
        for name, normal in normals.items():
            if not (torch.isfinite(normal.mean).all() and torch.isfinite(normal.std).all()):
                raise FewshiftError(f"the statistics of layer '{name}' are not finite: lower lr or epochs")
            if self._quirks.guard and (normal.std <= 0).any():
                count = int((normal.std <= 0).sum())
                raise FewshiftError(
                    f"{count} channels of layer '{name}' reached a standard deviation of zero or less: "
                    "lower lr or epochs, or set min_sigma"
                )

    # stage 4

    def _classify(
        self, network: Network, normals: Mapping[str, Normal], support: Support, loss: Loss, kind: str, seed: int
    ) -> Head:
        """The head's new tensors, if it is to change, with the adapted statistics held."""
        if kind == "source":
            return Head(kind)
        name = network.need_head(f"classifier='{kind}'")
        model = normalised(network, normals)
        if kind == "ncc":
            return Head(kind, nearest_centroid_head(network, model, support))
        layer = linear(model, name).requires_grad_(True)
        optimizer = torch.optim.Adam(layer.parameters(), lr=self.lr)
        with private_randomness(seed) as generator:
            losses = train_head(
                model,
                name,
                support,
                loss,
                lambda: self._epoch(support, generator),
                optimizer,
                self.classifier_epochs,
            )
        return Head(kind, {f"{name}.{key}": tensor.detach() for key, tensor in layer.named_parameters()}, losses)

    def _choose_classifier(self, network: Network, support: Support) -> str:
        if self.classifier == "ncc" and not support.kind.centroids:
            raise FewshiftError("nearest centroids classify images, not pixels: use classifier='source' or 'finetuned'")
        if self.classifier not in ("auto", "evidence"):
            return self.classifier
        enough = support.shots >= NCC_SHOTS and len(support.counts) == network.classes
        return "ncc" if enough and network.head is not None and support.kind.centroids else "source"


@dataclass(frozen=True)
class Start:
    """Where the gradient stage starts: a blend, its loss, and what the layers saw if the whole support was passed."""

    blend: Blend
    loss: float = float("nan")
    moments: dict[str, Moments] | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    route: str | None = None  # how the images passed


@dataclass(frozen=True)
class Learned:
    """What the gradient stage found."""

    normals: dict[str, Normal]
    coefficients: dict[str, dict[str, list[float]]]
    course: Course
    steps: int
    parameters: int


@dataclass(frozen=True)
class Stages:
    """What the first three stages found."""

    start: Start
    spans: dict[str, Span]
    learned: Learned


@dataclass(frozen=True)
class Head:
    """Which classifier stands on top, and its tensors where it is not the source's."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def _candidate(kind: str) -> str:
    return f"{kind} classifier"


def _kind(candidate: str) -> str:
    return candidate.removesuffix(" classifier")


@torch.no_grad()
def _logits(model: nn.Module, support: Support) -> Tensor:
    return torch.cat([logits_of(model(images)) for images, _ in support.chunks(MINIBATCH)])


def _centroid_logits(
    network: Network, model: nn.Module, support: Support, logits: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Cosines to the centroids of the plain support under the current statistics, the centroids held."""
    head = network.need_head("gradient_head='ncc'")
    if not support.kind.centroids:
        raise FewshiftError("nearest centroids classify images, not pixels: use gradient_head='source'")

    def answer(images: Tensor) -> Tensor:
        with head_inputs(model, head) as seen:
            with torch.no_grad():
                logits(support.pictures)
            logits(images)
        plain, views = (it.flatten(1) for it in seen)
        return cosine_logits(views, centroids(plain, support.targets, int(network.classes or 0)))

    return answer


def _lifted(network: Network, floor: float) -> dict[str, Tensor]:
    """The weights of affine layers with |gamma| below the floor moved up to it."""
    state = network.model.state_dict()
    names = [f"{layer.name}.weight" for layer in network.layers if layer.affine]
    return {name: torch.where(state[name].abs() < floor, floor, state[name]) for name in names}


def _layer_notes(network: Network, spans: Mapping[str, Span], learned: Learned) -> dict[str, dict[str, Any]]:
    """Per layer: coefficients, effective n, the smallest sigma, and how far the support is from the source."""
    notes = {}
    for name, span in spans.items():
        mean, std = span.mean.T, span.std.T
        notes[name] = {
            **learned.coefficients[name],
            "n": [len(mean) - 1, len(std) - 1],
            "min_sigma": float(learned.normals[name].std.min()),
            "mean_shift": float(((mean[1] - mean[0]) / std[0]).square().mean().sqrt()),
            "std_ratio": float((std[1] / std[0]).log().mean().exp()),
        }
    return notes


def _better(best: Start | None, tried: Start) -> Start | None:
    """The one with the lower loss; of equally good ones the later, which has the larger v; never a NaN."""
    if tried.loss != tried.loss:
        return best
    return tried if best is None or tried.loss <= best.loss else best


def _found(best: Start | None) -> Start:
    if best is None:
        raise FewshiftError("the loss is NaN for every blend of statistics: check the images' preprocessing")
    return best


def _common(blend: Blend) -> float | dict[str, float]:
    values = set(blend.values())
    return values.pop() if len(values) == 1 else dict(blend)


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise FewshiftError(f"{field}={value!r} is unknown: choose one of {', '.join(map(str, allowed))}")
