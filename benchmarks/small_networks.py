"""What `adapt` costs for small networks, in forward passes of the support, and where the time goes.

Three networks: a ResNet-20 as for CIFAR and three convolutions, at 32 px with random weights, and the digits network
that comes with the package. A pass is the time of a plain forward pass of all support images. Both are processor time
on one thread, in rounds that alternate, and medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fewshift
from core import show
from fewshift import Network, Support
from fewshift.core import heads, loop, losses, moments, network, probing, reading
from fewshift.core.draws import draw_support
from fewshift.lab.datasets import digits
from fewshift.methods import _refining
from fewshift.trust import held_out

CLASSES, SIZE = 10, 32
OTHER = "everything else"
HEADS = "heads: their rows and scales"
PARTS: dict[str, tuple[tuple[object, str], ...]] = {
    "looking at the network": ((Network, "of"), (probing, "find_head"), (heads, "gives_output")),
    "copies of the network": ((Network, "copy"), (Network, "with_tensors"), (network, "structural_copy")),
    "search for v: the network": ((reading, "read"),),
    "search for v: moments of inputs": ((moments, "moments"),),
    "search for v: blends in Python": (
        (moments.Moments, "of_others"),
        (moments.Moments, "normal"),
        (moments.SourceLayer, "blend"),
        (moments, "normalise_with"),
    ),
    "last layers: forward": ((loop, "fit"),),
    "last layers: backward": ((Tensor, "backward"),),
    "last layers: optimizer": ((torch.optim.SGD, "step"), (nn.utils, "clip_grad_norm_")),
    HEADS: ((heads, "trained_rows"), (heads, "best_scale"), (heads, "scores_apart"), (heads, "leaning_rows")),
    "answers to held-out images": (
        (_refining.Refinement, "_asked"),
        (_refining.Refinement, "_polish"),
        (held_out, "answers"),
    ),
    "temperatures": ((losses, "temperature"),),
}


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        wider = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if inputs == outputs else wider

    def forward(self, images: Tensor) -> Tensor:
        """Maps of half the size where the block has a stride."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images)))))
        return F.relu(inner + self.shortcut(images))


class Small(nn.Module):
    """A body and a head; a class of its own, so that its passes can be counted."""

    def __init__(self, *layers: nn.Module, features: int) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*layers, nn.Flatten()), nn.Linear(features, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(images))


def resnet20() -> nn.Module:
    torch.manual_seed(0)
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(one, other, 1 if one == other else 2) for one, other in pairwise(widths)]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return Small(*stem, *blocks, nn.AdaptiveAvgPool2d(1), features=64).eval()


def three_convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return Small(*layers, features=128 * (SIZE // 8) ** 2).eval()


def noise(k: int) -> Support:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES * k) % CLASSES
    return Support(torch.randn(len(labels), 3, SIZE, SIZE, generator=generator), labels)


def uci(k: int) -> Support:
    (images, labels), _ = digits.split("uci")
    chosen = draw_support(labels, k, 0)
    return Support(digits.normalise(images[chosen]), labels[chosen])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Support]]] = {
    "ResNet-20, 32 px": (resnet20, noise),
    "three convolutions, 32 px": (three_convolutions, noise),
    "digits network, 28 px": (digits.source_network, uci),
}


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def passes(model: nn.Module, labelled: Support, rounds: int) -> float:
    """The time of `adapt` / that of one forward pass of the support."""
    forward, whole = [], []
    with torch.no_grad():
        model(labelled.images)
    for _ in range(rounds):
        with torch.no_grad():
            forward += [seconds(lambda: model(labelled.images)) for _ in range(5)]
        whole.append(seconds(lambda: fewshift.adapt(model, labelled)))
    return statistics.median(whole) / statistics.median(forward)


def real_passes(model: nn.Module, labelled: Support) -> tuple[float, float]:
    """Forward passes of the whole support that `adapt` makes: without gradients, and with them."""
    images: Counter[bool] = Counter()

    def count(module: nn.Module, args: tuple[Tensor]) -> None:
        if type(module) is type(model):
            images[torch.is_grad_enabled()] += len(args[0])

    with register_module_forward_pre_hook(count):
        fewshift.adapt(model, labelled)
    return images[False] / len(labelled), images[True] / len(labelled)


def shares(model: nn.Module, labelled: Support) -> dict[str, float]:
    """The share of each part in the time of `adapt`, without the parts that it calls."""
    spent: Counter[str] = Counter()
    stack, since = [OTHER], time.process_time()

    def switch() -> None:
        nonlocal since
        now = time.process_time()
        spent[stack[-1]] += now - since
        since = now

    def timed(part: str, work: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **options: object) -> object:
            if stack[-1] == HEADS:  # its backward passes are its own
                return work(*args, **options)
            switch()
            stack.append(part)
            try:
                return work(*args, **options)
            finally:
                switch()
                stack.pop()

        return wrapper

    with ExitStack() as patches:
        for part, works in PARTS.items():
            for owner, name in works:
                patches.enter_context(replaced(owner, name, timed(part, getattr(owner, name))))
        since = time.process_time()
        fewshift.adapt(model, labelled)
        switch()
    total = sum(spent.values())
    return {part: spent[part] / total for part in (*PARTS, OTHER)}


@contextmanager
def replaced(owner: object, name: str, wrapper: Callable[..., object]) -> Iterator[None]:
    """Within the block, `wrapper` stands wherever the function was imported to."""
    original = getattr(owner, name)
    modules = [module for key, module in sys.modules.items() if key.startswith("fewshift")]
    with ExitStack() as patches:
        patches.enter_context(patch.object(owner, name, staticmethod(wrapper) if name == "of" else wrapper))
        for module in modules:
            if vars(module).get(name) is original:
                patches.enter_context(patch.object(module, name, wrapper))
        yield


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    profiles = {}
    for name, (make, support) in NETWORKS.items():
        model = make()
        for k in (1, 5, 10):
            what = f"adapt / a forward pass: {name}, k = {k}"
            show(what, passes(model, support(k), rounds), "<= 150")
        without, with_gradients = real_passes(model, support(5))
        print(f"  really made at k = 5: {without:.1f} without gradients, {with_gradients:.1f} with them", flush=True)
        profiles[name] = shares(model, support(5))
    print(f"\n{'share of the time of adapt, k = 5, in %':<40}" + "".join(f"{name:>28}" for name in profiles))
    for part in (*PARTS, OTHER):
        print(f"{part:<40}" + "".join(f"{100 * profile[part]:>28.1f}" for profile in profiles.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
