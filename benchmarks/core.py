"""Speed and memory of LCCS as ratios measured in one run: `make bench`.

Everything runs on one thread, in rounds that alternate between both sides of a ratio. The fastest round counts: shared
machines are noisy, and noise only ever adds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from fewshift import LCCS, Network, Support, Target
from fewshift.core.moments import moments
from fewshift.core.reading import read, tied
from fewshift.core.source_layer import SourceLayer
from fewshift.core.spans import spanning_vectors
from fewshift.methods.lccs import Start

torch.set_num_threads(1)
BATCH = 32


def support(images: int = 35, classes: int = 7, size: int = 224) -> Support:
    generator = torch.Generator().manual_seed(0)
    return Support(torch.randn(images, 3, size, size, generator=generator), torch.arange(images) % classes)


def network(name: str = "resnet18", classes: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return getattr(torchvision.models, name)(weights=None, num_classes=classes).eval()


def fastest(rounds: int, **works: Callable[[], object]) -> dict[str, float]:
    """Seconds of each piece of work, the fastest of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: min(values) for name, values in times.items()}


def epoch_of(method: LCCS, model: nn.Module, labelled: Support) -> Callable[[], object]:
    """One gradient epoch of LCCS; the stages before it are already done."""
    _, view, labelled = method._prepare(Network.of(model, labelled.images), labelled)
    start = Start(tied(view, 0.5))
    spans = method._span(view, labelled, start)
    return lambda: method._learn(view, spans, labelled, start.blend, F.cross_entropy, 0)


def plain_epoch(model: nn.Module, labelled: Support, names: Callable[[str, nn.Module], bool]) -> Callable[[], object]:
    """One epoch of a plain PyTorch loop that trains the parameters of some modules, statistics frozen."""
    model = copy.deepcopy(model).requires_grad_(False)
    chosen = [
        p for name, module in model.named_modules() if names(name, module) for p in module.parameters(recurse=False)
    ]
    for parameter in chosen:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(chosen, lr=1e-3)

    def epoch() -> None:
        for indices in torch.randperm(len(labelled)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(labelled.images[indices]), labelled.labels[indices]).backward()
            optimizer.step()

    return epoch


def is_bn(_: str, module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


def show(what: str, ratio: float, goal: str) -> None:
    print(f"{what:<72} {ratio:6.3f}   goal {goal}", flush=True)


@torch.no_grad()
def forward(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def gradient_epochs(rounds: int) -> None:
    model, labelled = network(), support()
    seconds = fastest(
        rounds,
        lccs=epoch_of(LCCS(epochs=1), model, labelled),
        bn=plain_epoch(model, labelled, is_bn),
        full=plain_epoch(model, labelled, lambda *_: True),
    )
    show("LCCS epoch / plain epoch of BN weight and bias (n = 35)", seconds["lccs"] / seconds["bn"], "<= 1.08")
    show("LCCS epoch / plain epoch of full fine-tuning", seconds["lccs"] / seconds["full"], "<= 0.65")


def whole_adaptation(rounds: int) -> None:
    model, labelled = network(), support()
    seconds = fastest(
        rounds,
        adapt=lambda: LCCS().adapt(model, Target(labelled)),
        forward=lambda: forward(model, labelled.images),
    )
    show(
        "LCCS().adapt / one forward pass over the support (ResNet-18, 35 images)",
        seconds["adapt"] / seconds["forward"],
        "<= 30",
    )


def merged_inference(rounds: int) -> None:
    model, labelled = network(), support(8)
    adapted = LCCS(epochs=0, init=0.5).adapt(model, Target(labelled))
    seconds = fastest(
        4 * rounds, adapted=lambda: forward(adapted, labelled.images), source=lambda: forward(model, labelled.images)
    )
    show("merged inference / source inference", seconds["adapted"] / seconds["source"], "= 1.00")


def decompositions() -> None:
    """OfficeHome's size: n = N = 325 images of 65 classes, ResNet-50 at 224 px."""
    model, labelled = network("resnet50", 65), support(325, 65)
    _, view, labelled = LCCS()._prepare(Network.of(model, labelled.images), labelled)
    began = time.perf_counter()
    seen = read(view, [labelled.images], tied(view, 0.5)).moments
    one_read = time.perf_counter() - began
    began = time.perf_counter()
    for layer in view.layers:
        spanning_vectors(seen[layer.name], SourceLayer.of(view.model.get_submodule(layer.name)), 325)
    spent = time.perf_counter() - began
    part = Support(labelled.images[:64], labelled.labels[:64])
    one_epoch = fastest(1, epoch=epoch_of(LCCS(epochs=1), model, part))["epoch"] * 325 / 64
    whole = 11 * one_read + spent + 10 * one_epoch
    show("decompositions / whole adaptation (ResNet-50, N = n = 325)", spent / whole, "<= 0.10")


def peak(work: str) -> None:
    """Run in a process of its own: print its peak resident memory in kB (Linux)."""
    model, labelled = network(), support()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    if work == "lccs":
        LCCS(epochs=2).adapt(model, Target(labelled))
    else:
        epoch = plain_epoch(model, labelled, is_bn)
        epoch(), epoch()
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def peak_memory(rounds: int) -> None:
    def of(work: str) -> float:
        runs = [subprocess.check_output([sys.executable, __file__, "--peak", work]) for _ in range(rounds)]
        return statistics.median(int(run) for run in runs)

    show("peak memory of LCCS().adapt / of BN-only fine-tuning (whole process)", of("lccs") / of("bn"), "<= 1.10")


def moments_share(rounds: int) -> None:
    z = torch.randn(35, 64, 56, 56)
    seconds = fastest(4 * rounds, moments=lambda: moments(z), var_mean=lambda: torch.var_mean(z, (0, 2, 3)))
    show("moments of a layer / torch.var_mean of it", seconds["moments"] / seconds["var_mean"], "< 1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", choices=["lccs", "bn"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="leave out OfficeHome's size, which takes minutes")
    options = parser.parse_args()
    if options.peak:
        peak(options.peak)
    else:
        gradient_epochs(options.rounds)
        whole_adaptation(options.rounds)
        merged_inference(options.rounds)
        moments_share(options.rounds)
        peak_memory(options.rounds)
        if not options.quick:
            decompositions()
