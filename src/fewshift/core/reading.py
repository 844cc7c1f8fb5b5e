"""Passes over target images in which every layer sees what the new statistics of the layers below it produce.

The images pass as one batch if they can. If their sizes differ, or if they do not fit into memory together, they pass
in chunks. All routes give the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core import _progress as progress
from fewshift.core.moments import (
    Moments,
    Rule,
    before_layers,
    concatenated,
    moments,
    normalise_with,
    normalising,
    source_layers,
)
from fewshift.core.network import Network, batchnorm, free_memory, head_inputs, logits_of
from fewshift.core.source_layer import Normal, SourceLayer
from fewshift.core.support import Support
from fewshift.errors import FewshiftError

Source = Mapping[str, SourceLayer]  # layer name -> what the source network does there
Blend = Mapping[str, float]  # layer name -> weight of the target's statistics


def tied(network: Network, v: float) -> Blend:
    """The same weight in every layer."""
    return {layer.name: v for layer in network.layers}


@dataclass(frozen=True)
class Answer:
    """The logits of some images, and for one row of logits per image what entered the head."""

    logits: Tensor
    features: Tensor | None

    @classmethod
    def of(cls, network: Network, working: nn.Module, images: Tensor) -> Answer:
        """One pass of a working copy."""
        if network.head is None or len(network.output) != 1:
            return cls(logits_of(working(images)), None)
        with head_inputs(working, network.head) as seen:
            logits = logits_of(working(images))
        return cls(logits, seen[-1].flatten(1))


@dataclass(frozen=True)
class Reading:
    """One layer-consistent pass over a set of images: what each layer saw, and the network's answers."""

    moments: dict[str, Moments]
    answers: tuple[Answer, ...]  # one for each chunk of images
    route: str  # how the images passed

    @property
    def logits(self) -> tuple[Tensor, ...]:
        """One tensor for each chunk of images."""
        return tuple(answer.logits for answer in self.answers)

    @property
    def features(self) -> Tensor | None:
        """(N, features): what entered the head, image by image; None if no head is known or pixels have labels."""
        parts = [answer.features for answer in self.answers if answer.features is not None]
        return torch.cat(parts) if len(parts) == len(self.answers) else None


def read_support(
    network: Network,
    support: Support,
    blend: Blend,
    *,
    beside: Tensor | None = None,
    leave_out: bool = False,
    working: nn.Module | None = None,
) -> Reading:
    """Pass the whole support, as one batch if it fits into half of the free memory.

    Images `beside` it, of the same size, pass after it and share in the statistics. `leave_out` and `working` are those
    of `read`.
    """
    images = [part for part, _ in support.chunks(support.at_once)]
    total, frugal = len(support), support.at_once is not None
    if beside is not None:
        images, total = [*images, *beside.split(support.at_once or len(beside))], total + len(beside)
    if not frugal:
        free = free_memory(images[0].device)
        needed = network.bytes_to_pass(support.images) * total / len(support)
        frugal = free is not None and needed > free / 2
        size = max(1, int(total * free / 2 / needed)) if free is not None and frugal else total
        if isinstance(support.images, Tensor):
            images = list(torch.cat(images).split(size))
    return read(network, images, blend, frugal=frugal, leave_out=leave_out, working=working)


@torch.no_grad()
def read(
    network: Network,
    chunks: Sequence[Tensor],
    blend: Blend,
    *,
    frugal: bool = False,
    leave_out: bool = False,
    working: nn.Module | None = None,
) -> Reading:
    """Pass images; every layer blends the source's statistics with those of its current input over all chunks.

    One chunk is one batch. Several chunks (images of different sizes) pass in step: before every layer each waits for
    all others, which takes the memory of one batch. `frugal` takes the memory of one chunk, and one more partial pass
    for every layer.

    With `leave_out`, each image is normalised with the statistics of the *other* images: it cannot flatter itself.

    A layer that is executed several times pools the moments of its calls. Its earlier calls cannot know the later
    ones, so the images pass three times, and each pass starts from what the one before has pooled.

    `working`, a copy of the network, serves several readings: copying a small network takes as long as a pass.
    """
    source, working = source_layers(network), network.copy() if working is None else working
    repeated = {layer.name for layer in network.layers if (layer.calls or 1) > 1}
    route = ONE_BATCH if len(chunks) == 1 else LAYER_BY_LAYER if frugal else IN_STEP
    total = sum(map(len, chunks))
    calls_of = {layer.name: layer.calls or 1 for layer in network.layers}

    def blended(name: str, seen: Moments) -> Normal:
        eps = source[name].eps
        # a layer that folds frames or tokens into its batch has other rows than images: nothing is left out there
        runs, rest = divmod(len(seen.mean), total)
        apart = leave_out and rest == 0 and runs <= calls_of[name]
        return source[name].blend(seen.of_others(eps, total) if apart else seen.normal(eps), blend[name])

    def one_pass(held: Mapping[str, Moments]) -> tuple[dict[str, Moments], tuple[Answer, ...]]:
        """What each layer saw over all its calls, and the answers; layers in `held` normalise with what they hold."""
        calls: dict[str, list[Moments]] = {}

        def rule(name: str, current: Moments) -> Normal:
            calls.setdefault(name, []).append(current)
            if len(calls[name]) > calls_of[name]:
                _refuse_other_calls(name, calls_of[name])
            return blended(name, held[name] if name in held else concatenated(calls[name]))

        for name, layer in source.items():  # an earlier pass may have written into them
            layer.restore(batchnorm(working, name))
        answers = PASSES[route](network, working, source, chunks, rule)
        for name, parts in calls.items():
            if len(parts) < calls_of[name]:
                _refuse_other_calls(name, calls_of[name])
        return {name: concatenated(parts) for name, parts in calls.items()}, answers

    seen, answers = one_pass({})
    if not repeated:
        return Reading(seen, answers, route)
    for _ in range(2):
        seen, _ = one_pass({name: seen[name] for name in repeated})
    _, answers = one_pass(seen)  # every layer held
    return Reading(seen, answers, route)


def _refuse_other_calls(name: str, usual: int) -> NoReturn:
    times = "once" if usual == 1 else f"{usual} times"
    raise FewshiftError(
        f"the network runs layer '{name}' {times} for two images and not so for these: let its forward pass a whole "
        "batch at once, not in chunks"
    )


def _as_one_batch(
    network: Network, working: nn.Module, source: Source, chunks: Sequence[Tensor], rule: Rule
) -> tuple[Answer, ...]:
    with normalising(network, working, source, rule):
        return tuple(Answer.of(network, working, images) for images in chunks)


def _in_step(
    network: Network, working: nn.Module, source: Source, chunks: Sequence[Tensor], rule: Rule
) -> tuple[Answer, ...]:
    """Each chunk passes in a thread and a working copy of its own; one thread runs at a time."""
    barrier = _Barrier(network, [working, *(network.copy() for _ in chunks[1:])], source, rule)
    with ThreadPoolExecutor(len(chunks)) as threads:
        passes = [threads.submit(barrier.run, index, images) for index, images in enumerate(chunks)]
    for chunk in passes:  # the pass that failed explains the others, which were only stopped
        if not isinstance(chunk.exception(), _OtherPassError):
            chunk.result()
    return tuple(chunk.result() for chunk in passes)


class _Barrier:
    """A barrier between the passes of several chunks: before every BatchNorm layer each waits for all others."""

    def __init__(self, network: Network, copies: Sequence[nn.Module], source: Source, rule: Rule) -> None:
        self._network, self._copies, self._source, self._rule = network, copies, source, rule
        self._turn = threading.Condition()  # the thread that holds its lock runs; waiting lets the next one run
        self._waiting: dict[int, tuple[str, Moments]] = {}  # chunk -> the layer before which it stands, and its input
        self._normals: list[Normal | None] = [None] * len(copies)  # with which each chunk goes on
        self._opened, self._failed = 0, False

    def run(self, index: int, images: Tensor) -> Answer:
        """The answer for one chunk."""
        working = self._copies[index]

        def hook(name: str, module: _BatchNorm, inputs: Tensor) -> Tensor | None:
            self._wait(index, name, moments(inputs))
            normal = self._normals[index]
            return None if normal is None else normalise_with(module, self._source[name], normal, inputs)

        with self._turn, torch.no_grad(), before_layers(self._network, working, hook):  # each thread has its own mode
            try:
                return Answer.of(self._network, working, images)
            except BaseException:
                self._failed = True
                self._turn.notify_all()
                raise

    def _wait(self, index: int, name: str, seen: Moments) -> None:
        self._waiting[index] = name, seen
        if len(self._waiting) < len(self._copies):
            opened = self._opened
            self._turn.wait_for(lambda: self._failed or self._opened > opened)
            if self._failed:
                raise _OtherPassError
            return
        if len({layer for layer, _ in self._waiting.values()}) > 1:
            raise FewshiftError(
                f"the network runs layer '{name}' for one image and another layer for another image: "
                "preprocess the images to one size"
            )
        parts = [self._waiting[chunk][1] for chunk in sorted(self._waiting)]
        normal, start = self._rule(name, concatenated(parts)), 0
        for chunk, part in enumerate(parts):
            self._normals[chunk] = None if normal is None else normal.rows(start, len(part.mean))
            start += len(part.mean)
        self._waiting.clear()
        self._opened += 1
        self._turn.notify_all()


class _OtherPassError(Exception):
    """The pass of another chunk failed, and this one cannot go on without it."""


def _layer_by_layer(
    network: Network, working: nn.Module, source: Source, chunks: Sequence[Tensor], rule: Rule
) -> tuple[Answer, ...]:
    """For every execution of a layer all chunks pass up to it; the executions before it repeat their statistics."""
    normals: list[Normal | None] = []

    def passed(start: int, images: Tensor) -> Answer:
        """The answer, if `normals` has the statistics of every execution; a stopped pass otherwise."""
        executed = count()

        def hook(name: str, module: _BatchNorm, values: Tensor) -> Tensor | None:
            place = next(executed)
            if place == len(normals):
                raise PassStopped(name, moments(values))
            normal = normals[place]
            own = None if normal is None else normal.rows(start, len(images))
            return None if own is None else normalise_with(module, source[name], own, values)

        with before_layers(network, working, hook):
            return Answer.of(network, working, images)

    executions = sum(layer.calls or 1 for layer in network.layers)
    starts = [0, *accumulate(len(images) for images in chunks[:-1])]
    for _ in progress.track(range(executions), "statistics, layer by layer"):
        inputs: list[tuple[Any, ...]] = []  # the layer's name, and what enters it
        for start, images in zip(starts, chunks, strict=True):
            try:
                passed(start, images)
            except PassStopped as stop:
                inputs.append(stop.args)
        normals.append(rule(inputs[0][0], concatenated([seen for _, seen in inputs])))
    return tuple(passed(start, images) for start, images in zip(starts, chunks, strict=True))


class PassStopped(Exception):  # noqa: N818  (it is no error)
    """Stops a forward pass at the layer whose input was wanted."""


ONE_BATCH, IN_STEP, LAYER_BY_LAYER = "one batch", "chunks in step", "chunks, layer by layer"
PASSES = {ONE_BATCH: _as_one_batch, IN_STEP: _in_step, LAYER_BY_LAYER: _layer_by_layer}
