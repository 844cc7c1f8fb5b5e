"""Networks that learn against each other: a class-conditional image generator and two discriminators."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (8, 16, 32, 64, 128, 256)  # sides of generated images: 4, doubled
DOMAIN_WIDTH = 256  # hidden units of the domain discriminator


class Generator(nn.Module):
    """Noise and a class -> an image in [-1, 1], by transposed convolutions from 4x4 pixels, as in DCGAN."""

    def __init__(self, noise: int, classes: int, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        widths = [width * 2**i for i in reversed(range(_doublings(size)))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(noise + classes, widths[0], 4, bias=False)]
        for before, after in pairwise(widths):
            layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, channels, 4, 2, 1), nn.Tanh()]
        self.layers = nn.Sequential(*layers).apply(_dcgan_weights)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """One image per row of noise, of the class in `labels`."""
        wanted = F.one_hot(labels, self.classes).to(noise)
        made: Tensor = self.layers(torch.cat([noise, wanted], 1)[:, :, None, None])
        return made


def image_discriminator(channels: int, size: int, width: int) -> nn.Sequential:
    """An image in [-1, 1] -> one logit, positive for real: the generator's mirror image."""
    widths = [width * 2**i for i in range(_doublings(size))]
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4), nn.Flatten(0)).apply(_dcgan_weights)


def domain_discriminator(features: int) -> nn.Sequential:
    """Features -> one logit, positive for generated."""
    return nn.Sequential(nn.Linear(features, DOMAIN_WIDTH), nn.ReLU(), nn.Linear(DOMAIN_WIDTH, 1), nn.Flatten(0))


def gradient_reversed(features: Tensor, weight: float) -> Tensor:
    """The same values; the gradient is multiplied by -weight."""
    same = features.view_as(features)
    if same.requires_grad:
        same.register_hook(lambda gradient: -weight * gradient)
    return same


def binary_loss(first: Tensor, second: Tensor) -> Tensor:
    """Binary cross-entropy of logits that should be positive for the first and negative for the second."""
    return F.binary_cross_entropy_with_logits(first, torch.ones_like(first)) + F.binary_cross_entropy_with_logits(
        second, torch.zeros_like(second)
    )


def _doublings(size: int) -> int:
    return SIZES.index(size) + 1


def _dcgan_weights(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(layer.weight, 0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1, 0.02)
