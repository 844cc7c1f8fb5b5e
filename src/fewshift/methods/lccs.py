"""LCCS: learn, from a few labelled images, how to combine source and support BatchNorm statistics.

Zhang, Shen, Zhang and Foo, "Few-Shot Adaptation of Pre-Trained Networks for Domain Shift", IJCAI 2022.

Every BatchNorm layer gets mu = M eta and sigma = S rho. The columns of M and S are the source's statistics, the
support's, and the directions in which the support's images differ. Only eta and rho are learned: 2 (n + 1) numbers
per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshift.core import _progress as progress
from fewshift.core.adaptable import refuse_unmergeable, refuse_without_gradients
from fewshift.core.heads import nearest_centroid_head, train_head
from fewshift.core.loop import fit
from fewshift.core.losses import Loss, mean_entropy
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import merged, normalised, source_layers
from fewshift.core.network import Network, batchnorm, like, linear, logits_of
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.reading import Blend, read_support, tied
from fewshift.core.source_layer import Normal
from fewshift.core.spans import Convex, Linear, Span, spanning_vectors
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.methods._stages import (
    VARIANTS,
    Learned,
    Stages,
    Start,
    Variant,
    apart,
    best_by_layer,
    best_common,
    by_average,
    exactly,
)

MOST_CANDIDATES = 1001
EMA_EPOCHS = 10  # over random views, for each blend that is tried
NCC_SHOTS = 5  # from here on the paper replaces the source classifier by nearest centroids


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
    - classifier: "source", "finetuned" (for classifier_epochs), "ncc", or "auto" = source below 5 shots, NCC from 5.
    - statistics: "exact" (one pass over the whole support per candidate), "ema" (ten augmented epochs),
      "leave-one-out" (each image is judged with the statistics of the others; not in the paper), or "auto" = exact
      unless there is an augmentation.
    - variant: "paper", or "released" = the authors' code with its quirks.
    - min_sigma: a floor for sigma; gamma_floor: a floor for |gamma| of dead channels; adapt_dtype: "float64" for
      reference runs.
    """

    name: ClassVar[str] = "lccs"
    paper: ClassVar[str] = "Zhang et al., IJCAI 2022"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "BatchNorm weight and bias (statistics where a layer has none); the head if replaced"
    verified: ClassVar[str] = (
        "`tests/methods/test_lccs_naive.py`: the loss of every v to 1e-9, the coefficients to 1e-6 and the answers "
        "to 1e-5, against the four stages of the paper, and against the quirks of the released code"
    )

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
    variant: str = "paper"
    min_sigma: float | None = None
    gamma_floor: float | None = None
    adapt_dtype: str | None = None

    def check(self) -> None:
        """Only settings that make sense."""
        self.one_of(
            combination=("linear", "convex"),
            objective=("cross-entropy", "entropy"),
            classifier=("source", "finetuned", "ncc", "auto"),
            statistics=("exact", "ema", "leave-one-out", "auto"),
            variant=tuple(VARIANTS),
            adapt_dtype=(None, "float32", "float64"),
        )
        if isinstance(self.init, str):
            self.one_of(init=("grid", "greedy"))
        elif self.init is not None and not 0 <= self.init <= 1:
            raise FewshiftError(f"init={self.init} is not a blend: give a number from 0 (source) to 1 (support)")
        if isinstance(self.n, str):
            self.one_of(n=("k*classes",))
        elif not (self.n >= 1 if isinstance(self.n, int) else 0 < self.n < 1):
            raise FewshiftError(f"n={self.n} is neither a count nor a fraction: give 1, 2, ... or for example 0.9")
        self.at_least(grid=2, batch_size=1)
        if self.grid > MOST_CANDIDATES:
            raise FewshiftError(f"grid={self.grid} is too large: give at most {MOST_CANDIDATES}")

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Initialise, span, learn, classify: the four stages of the paper."""
        network = Network.of(network, target.some_images(self.name, "support images"))
        stages = self.stages(network, target, seed)
        return self.with_classifier(stages, self._chosen_classifier(stages))

    def stages(self, network: Network, target: Target, seed: int) -> Stages:
        """Initialise, span, learn: all that comes before the classifier."""
        support = target.need_support(self.name)
        refuse_unmergeable(network)
        if self.epochs:
            refuse_without_gradients(network)
        network, working, support = self._prepare(network, support.checked(network.output))
        loss = mean_entropy if self.objective == "entropy" else target.cost
        tries = self.grid if self.init == "grid" else self.grid * len(network.layers) if self.init == "greedy" else 0
        # a step needs the way back too
        with progress.plan([("initialising", tries), ("learning", 3 * self.epochs)]):
            with progress.stage("initialising"):
                start = self._initialise(working, support, loss, seed)
            with progress.stage("learning"):
                spans = self._span(working, support, start)
                learned = self._learn(working, spans, support, start.blend, loss, seed)
        return Stages(network, working, support, target.cost, seed, start, spans, learned)

    def with_classifier(self, stages: Stages, kind: str) -> Fitted:
        """The fourth stage: the adapted network with this classifier."""
        head, head_losses = self._classify(stages, kind)
        start, learned = stages.start, stages.learned
        return Fitted(
            stages.network.with_tensors(merged(stages.network, learned.normals) | head),
            layers=stages.layer_notes(),
            notes={
                "v": start.v,
                "grid": start.curve,
                "statistics": start.route,
                "steps": learned.steps,
                "parameters": learned.parameters,
                "support_loss": learned.course.losses,
                "epoch_seconds": learned.course.epoch_seconds,
                "classifier": kind,
                "classifier_loss": head_losses,
            },
        )

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
        working = replace(network, model=network.with_layout(model))
        return network, working, support.prepared(working.laid_out)

    def _initialise(self, network: Network, support: Support, loss: Loss, seed: int) -> Start:
        """The blend of source and support statistics to start from."""
        if not isinstance(self.init, str):
            return Start(tied(network, float(self.init or 0)))

        def views() -> Iterator[Tensor]:
            with private_randomness(seed) as generator:  # the same views for every blend
                for _ in range(EMA_EPOCHS):
                    for indices in self._minibatches(support, generator):
                        yield support.batch(indices)[0]

        way = self.statistics
        if way == "auto":
            way = "exact" if support.augment is None else "ema"
        size = support.minibatch(self.batch_size)
        attempt = {
            "exact": lambda: exactly(network, support, loss),
            "leave-one-out": lambda: apart(network, support, loss),
            "ema": lambda: by_average(network, support, loss, size, views),
        }[way]()
        return (best_common if self.init == "grid" else best_by_layer)(network, attempt, self.grid)

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
        return self.n if not isinstance(self.n, str) else len(support) if support.kind.centroids else 1

    def _learn(
        self, network: Network, spans: Mapping[str, Span], support: Support, blend: Blend, loss: Loss, seed: int
    ) -> Learned:
        """Untie the layers and move every coefficient by gradient descent; the spanning vectors are constants."""
        make = Convex if self.combination == "convex" else Linear
        coefficients = {name: make(span, blend[name], split=self._quirks.double) for name, span in spans.items()}
        parameters = [parameter for layer in coefficients.values() for parameter in layer.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        source, model = source_layers(network), network.model

        def normals() -> dict[str, Normal]:
            return {name: self._floored(layer.normal()) for name, layer in coefficients.items()}

        def logits(images: Tensor) -> Tensor:
            affine: dict[str, Tensor] = {}
            for name, normal in normals().items():
                dtype = cast(Tensor, batchnorm(model, name).running_mean).dtype
                weight, bias = source[name].affine(normal)
                affine |= {f"{name}.weight": weight.to(dtype), f"{name}.bias": bias.to(dtype)}
            # a module registered under two names is swapped once, by the name it is known by here
            return logits_of(functional_call(model, affine, (images,), tie_weights=False))

        def project() -> None:
            for layer in coefficients.values():
                layer.project()

        def cost(indices: Tensor) -> Tensor:
            images, labels = support.batch(indices)
            return loss(logits(images), labels)

        with private_randomness(seed) as generator:
            batches = partial(self._epoch, support, generator)
            course = fit(cost, batches, optimizer, self._effective_epochs(), after_step=project)
        with torch.no_grad():
            final = normals()
        self._refuse_degenerate(final)
        return Learned(
            final,
            {name: layer.values() for name, layer in coefficients.items()},
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

    def _classify(self, stages: Stages, kind: str) -> tuple[dict[str, Tensor], list[float]]:
        """The head's new tensors, if it is to change, and the losses of its training; adapted statistics are held."""
        if kind == "source":
            return {}, []
        network, support = stages.working, stages.support
        name = network.need_head(f"classifier='{kind}'")
        model = normalised(network, stages.learned.normals)
        if kind == "ncc":
            return nearest_centroid_head(network, model, support), []
        layer = linear(model, name).requires_grad_(True)
        optimizer = torch.optim.Adam(layer.parameters(), lr=self.lr)
        with private_randomness(stages.seed) as generator:
            batches = partial(self._epoch, support, generator)
            losses = train_head(model, name, support, stages.loss, batches, optimizer, self.classifier_epochs)
        return {f"{name}.{key}": tensor.detach() for key, tensor in layer.named_parameters()}, losses

    def _chosen_classifier(self, stages: Stages) -> str:
        network, support = stages.working, stages.support
        if self.classifier == "ncc" and not support.kind.centroids:
            raise FewshiftError("nearest centroids classify images, not pixels: use classifier='source' or 'finetuned'")
        if self.classifier != "auto":
            return self.classifier
        enough = support.shots >= NCC_SHOTS and len(support.counts) == network.classes
        return "ncc" if enough and network.head is not None and support.kind.centroids else "source"


def _lifted(network: Network, floor: float) -> dict[str, Tensor]:
    """The weights of affine layers with |gamma| below the floor moved up to it."""
    state = network.model.state_dict()
    names = [f"{layer.name}.weight" for layer in network.layers if layer.affine]
    return {name: torch.where(state[name].abs() < floor, floor, state[name]) for name in names}
