"""What a mixed batch of several sites costs, as ratios to the source network measured in one run: `make bench`.

32 images of eight sites in one call, against the source network on the same 32 images; one thread, rounds that
alternate, the fastest of each counts. A site changes every BatchNorm layer's affine parameters and the head, as LCCS
does. Also: the same in the memory format in which convolutions are fastest, sites that change all tensors (one pass
for each), opening, and the bytes that a site takes.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from fewshift import Delta, Sites

torch.set_num_threads(1)
IMAGES, SITES, CLASSES = 32, 8, 7
NETWORKS = {"resnet18": 224, "mobilenetv3_large_100": 224, "efficientnet_b0": 224, "test_resnet": 64}


def fastest(rounds: int, **works: Callable[[], object]) -> dict[str, float]:
    """Seconds of each piece of work, the fastest of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: min(values) for name, values in times.items()}


@torch.no_grad()
def adapted(model: nn.Module, seed: int, everything: bool) -> nn.Module:
    """The network with other BatchNorm affine parameters and another head, or with all parameters changed."""
    generator, result = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    head = result.get_classifier()
    for module in result.modules():
        if everything or module is head or isinstance(module, nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return result


@torch.no_grad()
def forward(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def write(model: nn.Module, folder: Path, everything: bool = False) -> list[str]:
    """A folder of sites, and for each image the name of one."""
    folder.mkdir()
    for number in range(SITES):
        Delta.between(model, adapted(model, number, everything)).save(folder / f"camera-{number}.safetensors")
    return [f"camera-{number % SITES}" for number in range(IMAGES)]


def show(what: str, value: str, goal: str = "") -> None:
    print(f"{what:<76} {value:>9}   {goal}", flush=True)


def speed(name: str, size: int, rounds: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES).eval()
    images = torch.randn(IMAGES, 3, size, size)
    of = write(model, folder / "small")
    mixed(f"{name}, {size} px", model, images, Sites(model, folder / "small"), of, rounds)
    model.to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
    sites = Sites(model, folder / "small")
    mixed(f"{name}, {size} px, channels last", model, images, sites, of, rounds)
    network = sum(tensor.nbytes for tensor in model.state_dict().values())
    show(f"{name}: bytes in memory for each site / the network's", f"{sites.nbytes / SITES / network:.4f}")


def mixed(what: str, model: nn.Module, images: Tensor, sites: Sites, of: list[str], rounds: int) -> None:
    expected = torch.cat([sites[site](images[[row]]) for row, site in enumerate(of)])
    apart = (sites(images, of=of) - expected).abs().max() / expected.abs().max()
    seconds = fastest(rounds, source=lambda: forward(model, images), mixed=lambda: sites(images, of=of))
    show(f"{what}: speed of {SITES} sites / source", f"{seconds['source'] / seconds['mixed']:.3f}", "goal >= 0.8")
    show(f"{what}: largest difference to one by one / largest logit", f"{apart:.1e}", "goal <= 1e-5")
    assert sites.one_pass


def larger(name: str, size: int, rounds: int, folder: Path) -> None:
    """Sites that change every tensor: grouped."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES).eval()
    images = torch.randn(IMAGES, 3, size, size)
    of = write(model, folder / "large", everything=True)
    sites = Sites(model, folder / "large")
    seconds = fastest(rounds, source=lambda: forward(model, images), grouped=lambda: sites(images, of=of))
    what = f"{name}, {size} px: speed of {SITES} sites that change all tensors / source"
    show(what, f"{seconds['source'] / seconds['grouped']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="names of timm")
    options = parser.parse_args()
    for chosen in options.networks:
        with tempfile.TemporaryDirectory() as work:
            pixels = NETWORKS.get(chosen, 224)
            speed(chosen, pixels, options.rounds, Path(work))
            if chosen == "resnet18":
                larger(chosen, pixels, options.rounds, Path(work))
