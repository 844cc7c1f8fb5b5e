"""Real networks through export: largest difference between PyTorch and the runtime, and the share of equal answers.

    python benchmarks/exports.py                        # ONNX, all networks
    python benchmarks/exports.py --format openvino timm:resnet18

Images are crops of scikit-learn's two photographs. Weights are random, with BatchNorm statistics that were read from
the same photographs, as training would leave them; each network is also exported as a site of itself, blended.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

import fewshift
from fewshift import FewshiftError, Preprocess
from fewshift.deploy.exporting import SUFFIXES

NETWORKS = (
    "timm:resnet18",
    "timm:resnet50",
    "timm:efficientnet_b0",
    "timm:efficientnet_lite0",
    "timm:mobilenetv3_small_100",
    "timm:regnetx_002",
    "timm:densenet121",
    "torchvision:resnet18",
    "torchvision:mobilenet_v2",
    "torchvision:shufflenet_v2_x1_0",
    "smp:deeplabv3plus/resnet18",
    "smp:unet/resnet18",
)
SIDE, CLASSES, CROPS = 224, 7, 8
STEPS = Preprocess(256, SIDE, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def photographs(folder: Path) -> Path:
    """Four crops of each of scikit-learn's photographs."""
    for number, photograph in enumerate(load_sample_images().images):
        height, width = photograph.shape[:2]
        for crop in range(CROPS // 2):
            left = crop * (width - height) // (CROPS // 2 - 1)
            square = np.ascontiguousarray(photograph[:, left : left + height])
            Image.fromarray(square).save(folder / f"{number}-{crop}.png")
    return folder


def network(name: str) -> nn.Module:
    """Random weights; statistics and affine parameters of BatchNorm away from 0 and 1."""
    torch.manual_seed(0)
    model = fewshift.load(name, "random", classes=[f"class {number}" for number in range(CLASSES)])
    return model.eval()


def settled(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """The network with statistics of the images, as training leaves them."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.5
    with torch.no_grad():
        for _ in range(4):
            model.train()(images)
    return model.eval()


def row(name: str, format: str, images: Path, folder: Path, with_preprocessing: bool) -> str:
    options = {"preprocess": STEPS, "images": images, "with_preprocessing": with_preprocessing}
    tensor = torch.stack([STEPS(Image.open(file)) for file in sorted(images.iterdir())])
    model = settled(network(name), tensor)
    base = fewshift.export(model, folder / f"base{SUFFIXES[format]}", **options)
    cells = [f"{base.agreement.difference:.1e}", f"{base.agreement.largest:.2g}", f"{100 * base.agreement.equal:.2f}"]
    if format == "onnx":
        adapted = fewshift.adapt(model, None, unlabelled=tensor, method="adabn", preprocess=STEPS)
        site = fewshift.export(adapted, folder / "one.site", base=base.path)
        agreed = site.agreement
        cells += [f"{site.nbytes / 1e3:.0f}", f"{agreed.difference:.1e}", f"{100 * agreed.equal:.2f}"]
    size = "any" if base.size == (None, None) else f"{base.size[0]} x {base.size[1]}"
    return f"| {name} | {size} | {base.nbytes / 1e6:.1f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--format", default="onnx", choices=["onnx", "torch", "openvino"])
    parser.add_argument("--with-preprocessing", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    site = " | site kB | its difference | its equal answers in %" if words.format == "onnx" else ""
    print(f"| network | pixels | MB | largest difference | largest logit | equal answers in %{site} |")
    print("|---|---|---" + "|---" * (3 + site.count("|")) + "|")
    with tempfile.TemporaryDirectory() as place:
        images = Path(place) / "images"
        images.mkdir()
        photographs(images)
        for name in words.networks or NETWORKS:
            try:
                line = row(name, words.format, images, Path(place), words.with_preprocessing)
            except FewshiftError as error:
                line = f"| {name} | {error} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
