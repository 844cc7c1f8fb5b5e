"""Passes over target images in which every layer sees what the new statistics of the layers below it produce.

The images go as one batch where that is possible. Where it is not, because their sizes differ or they do not fit into
memory together, they go in chunks and all routes give the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core import _progress as progress
from fewshift.core._memory import free_memory
from fewshift.core.moments import (
    Moments,
    Normal,
    Rule,
    SourceLayer,
    before_layers,
    concatenated,
    moments,
    normalised,
    normalising,
    source_layers,
    write_affine,
)
from fewshift.core.network import Layer, Network, batchnorm, logits_of
from fewshift.core.support import Support
from fewshift.errors import FewshiftError

Blend = Mapping[str, float]  # layer name -> weight of the target's statistics


def tied(network: Network, v: float) -> Blend:
    """The same weight in every layer."""
    return {layer.name: v for layer in network.layers}


@dataclass(frozen=True)
class Reading:
    """One layer-consistent look at a set of images: what each layer saw, and what the network answered."""

    moments: dict[str, Moments]
    logits: tuple[Tensor, ...]  # one for each chunk of images
    route: str  # how the images passed


def read_support(network: Network, support: Support, blend: Blend) -> Reading:
    """Pass the whole support, together if it fits into half of the memory there is."""
    size, frugal = support.at_once, support.at_once is not None
    if size is None:
        free = free_memory(support.images[0].device)
        needed = network.bytes_to_pass(support.images)
        frugal = free is not None and needed > free / 2
        size = max(1, int(len(support) * free / 2 / needed)) if free is not None and frugal else None
    return read(network, [images for images, _ in support.chunks(size)], blend, frugal=frugal)


@torch.no_grad()
def read(network: Network, chunks: Sequence[Tensor], blend: Blend, *, frugal: bool = False) -> Reading:
    """Pass images; every layer blends the source's statistics with those of its current input over all chunks.

    One chunk is one batch. Several (images of different sizes) go in step: each waits before a layer until all have
    arrived there, which takes the memory of one batch. `frugal` takes the memory of one chunk, and for every layer
    another pass up to it. All routes give the same numbers.

    A layer that is executed several times pools the moments of its calls. Its earlier calls cannot know the later
    ones, so such a network is passed three times, each pass starting from what the one before has pooled.
    """
    source = source_layers(network)
    repeated = {layer.name for layer in network.layers if (layer.calls or 1) > 1}
    route = ONE_BATCH if len(chunks) == 1 else LAYER_BY_LAYER if frugal else IN_STEP
    seen: dict[str, Moments] = {}

    def once(name: str, current: Moments) -> Normal:
        seen[name] = current
        return source[name].blend(current.normal(source[name].eps), blend[name])

    if not repeated:
        return Reading(seen, PASSES[route](network, source, chunks, once), route)

    for _ in range(3):
        before, calls = dict(seen), dict[str, list[Moments]]()

        def pooling(name: str, current: Moments) -> Normal:
            calls.setdefault(name, []).append(current)  # noqa: B023  (used within the same turn of the loop)
            pooled = concatenated(calls[name])  # noqa: B023
            known = before.get(name, pooled) if name in repeated else pooled  # noqa: B023
            return once(name, known)

        PASSES[route](network, source, chunks, pooling)
        seen = {name: concatenated(parts) for name, parts in calls.items()}
    working = normalised(network, {name: once(name, seen[name]) for name in list(seen)})
    return Reading(seen, tuple(logits_of(working(images)) for images in chunks), route)


def _as_one_batch(
    network: Network, source: Mapping[str, SourceLayer], chunks: Sequence[Tensor], rule: Rule
) -> tuple[Tensor, ...]:
    working = network.copy()
    with normalising(network, working, source, rule):
        return tuple(logits_of(working(images)) for images in chunks)


def _in_step(
    network: Network, source: Mapping[str, SourceLayer], chunks: Sequence[Tensor], rule: Rule
) -> tuple[Tensor, ...]:
    """Each chunk passes in a thread and a working copy of its own; one of them runs at a time."""
    copies = [network.copy() for _ in chunks]
    meeting = _Meeting(network, copies, source, rule)
    with ThreadPoolExecutor(len(chunks)) as threads:
        passes = [threads.submit(meeting.attend, index, images) for index, images in enumerate(chunks)]
    return tuple(it.result() for it in sorted(passes, key=lambda it: isinstance(it.exception(), _LeftAloneError)))


class _Meeting:
    """Where the passes of several chunks wait for each other before every BatchNorm layer."""

    def __init__(
        self, network: Network, copies: Sequence[nn.Module], source: Mapping[str, SourceLayer], rule: Rule
    ) -> None:
        self._network, self._copies, self._source, self._rule = network, copies, source, rule
        self._turn = threading.Condition()  # who holds its lock runs; waiting lets the next one run
        self._here: dict[int, tuple[str, Moments]] = {}
        self._round, self._failed = 0, False

    def attend(self, index: int, images: Tensor) -> Tensor:
        """Pass one chunk."""
        working = self._copies[index]

        def hook(name: str, _: _BatchNorm, inputs: Tensor) -> None:
            self._arrive(index, name, moments(inputs))

        with self._turn, torch.no_grad(), before_layers(self._network, working, hook):  # each thread has its own mode
            try:
                return logits_of(working(images))
            except BaseException:
                self._failed = True
                self._turn.notify_all()
                raise

    def _arrive(self, index: int, name: str, seen: Moments) -> None:
        self._here[index] = name, seen
        if len(self._here) < len(self._copies):
            round_ = self._round
            self._turn.wait_for(lambda: self._failed or self._round > round_)
            if self._failed:
                raise _LeftAloneError
            return
        names = {it for it, _ in self._here.values()}
        if len(names) > 1:
            raise FewshiftError(
                f"the network runs layer '{name}' for one image and others for another: preprocess them to one size"
            )
        pooled = concatenated([self._here[it][1] for it in sorted(self._here)])
        normal = self._rule(name, pooled)
        if normal is not None:
            for working in self._copies:
                write_affine(batchnorm(working, name), self._source[name], normal)
        self._here.clear()
        self._round += 1
        self._turn.notify_all()


class _LeftAloneError(Exception):
    """Another chunk's pass failed, and this one cannot go on without it."""


def _layer_by_layer(
    network: Network, source: Mapping[str, SourceLayer], chunks: Sequence[Tensor], rule: Rule
) -> tuple[Tensor, ...]:
    """For every execution of a layer all chunks pass up to it, the earlier ones normalising as they were told."""
    working, told = network.copy(), list[tuple[str, Normal | None]]()
    executions = sum(layer.calls or 1 for layer in network.layers)
    for _ in progress.track(range(executions), "statistics, layer by layer"):
        met: list[tuple[str, Moments]] = []
        for images in chunks:
            with _following(network, working, source, told, met), suppress(_SeenEnoughError):
                working(images)
        normal = rule(met[0][0], concatenated([it for _, it in met]))
        told.append((met[0][0], normal))
    answers = []
    for images in chunks:
        with _following(network, working, source, told, []):
            answers.append(logits_of(working(images)))
    return tuple(answers)


@contextmanager
def _following(
    network: Network,
    working: nn.Module,
    source: Mapping[str, SourceLayer],
    told: Sequence[tuple[str, Normal | None]],
    met: list[tuple[str, Moments]],
) -> Iterator[None]:
    """Within the block layers normalise as they were told, in this order; the pass stops at the first that was not."""
    orders = iter(told)

    def hook(name: str, module: _BatchNorm, inputs: Tensor) -> None:
        order = next(orders, None)
        if order is None:
            met.append((name, moments(inputs)))
            raise _SeenEnoughError
        if order[1] is not None:
            write_affine(module, source[name], order[1])

    with before_layers(network, working, hook):
        yield


ONE_BATCH, IN_STEP, LAYER_BY_LAYER = "one batch", "chunks in step", "chunks, layer by layer"
PASSES = {ONE_BATCH: _as_one_batch, IN_STEP: _in_step, LAYER_BY_LAYER: _layer_by_layer}


@torch.no_grad()
def read_by_ema(network: Network, batches: Iterable[Tensor], blend: Blend, old: float = 0.9) -> dict[str, Normal]:
    """The paper's estimate: support statistics move by EMA, on mean and biased variance, batch after batch.

    In each pass a layer first updates its estimate from its current input, then normalises with the blend.
    """
    source, working = source_layers(network), network.copy()
    mean: dict[str, Tensor] = {}
    var: dict[str, Tensor] = {}

    def rule(name: str, current: Moments) -> Normal:
        first = name not in mean
        mean[name] = current.pooled_mean if first else old * mean[name] + (1 - old) * current.pooled_mean
        var[name] = current.pooled_var if first else old * var[name] + (1 - old) * current.pooled_var
        return source[name].blend(estimate(name), blend[name])

    def estimate(name: str) -> Normal:
        return Normal(mean[name], (var[name] + source[name].eps).sqrt())

    with normalising(network, working, source, rule):
        for images in batches:
            working(images)
    return {name: estimate(name) for name in mean}


class _SeenEnoughError(Exception):
    """Stops a forward pass at the layer whose input was wanted."""


@torch.no_grad()
def pooled_exactly(network: Network, batches: Callable[[], Iterable[Tensor]]) -> dict[str, Normal]:
    """The statistics of images that do not fit into one batch, as if they had: one partial pass per layer.

    Each layer pools its inputs over all batches while the layers below it already use theirs, so the result depends
    neither on the size of the batches nor on their order.
    """
    source, working = source_layers(network), network.copy()
    normals: dict[str, Normal] = {}
    for layer in progress.track(network.layers, "statistics, layer by layer"):
        parts: list[Moments] = []

        def collect(_: nn.Module, args: tuple[Tensor], layer: Layer = layer, parts: list[Moments] = parts) -> None:
            parts.append(moments(args[0]).as_one())
            if layer.calls == 1:
                raise _SeenEnoughError

        handle = working.get_submodule(layer.name).register_forward_pre_hook(collect)
        for images in batches():
            with suppress(_SeenEnoughError):
                working(images)
        handle.remove()
        normals[layer.name] = concatenated(parts).normal(source[layer.name].eps)
        write_affine(batchnorm(working, layer.name), source[layer.name], normals[layer.name])
    return normals


@torch.no_grad()
def averaged_over_batches(
    network: Network, batches: Iterable[Tensor], weight: Callable[[int], float]
) -> dict[str, Normal]:
    """Running statistics of a pass in which every batch is normalised with its own, as in training.

    `weight(i)` is how much the i-th batch counts against what came before: 1 / (i + 1) averages all batches alike.
    The variances are unbiased ones, as BatchNorm stores them.
    """
    source, working = source_layers(network), network.copy()
    mean: dict[str, Tensor] = {}
    var: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def rule(name: str, current: Moments) -> Normal:
        new = weight(counts.get(name, 0)) if name in counts else 1.0
        counts[name] = counts.get(name, 0) + 1
        mean[name] = (1 - new) * mean.get(name, current.pooled_mean) + new * current.pooled_mean
        var[name] = (1 - new) * var.get(name, current.unbiased_var) + new * current.unbiased_var
        return current.normal(source[name].eps)

    with normalising(network, working, source, rule):
        for images in batches:
            working(images)
    return {name: Normal(mean[name], (var[name] + source[name].eps).sqrt()) for name in mean}
