"""Small networks and supports to adapt, and how to compare them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift import Support

STREET_CLASSES = 4


class Tiny(nn.Module):
    """Two convolutions with BatchNorm, a residual sum, a linear head; statistics and affine away from 0 and 1."""

    def __init__(self, classes: int = 3, width: int = 6, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, eps=1e-3)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.bn1(self.conv1(images)).relu()
        hidden = (hidden + self.bn2(self.conv2(hidden))).relu()
        return self.fc(self.drop(hidden.mean((2, 3))))


def unsettle(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every BatchNorm layer statistics and affine parameters of its own, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            shape = module.running_mean.shape
            module.running_mean.copy_(torch.randn(shape, generator=generator) * 0.3)
            module.running_var.copy_(torch.rand(shape, generator=generator) + 0.5)
            if module.weight is not None:
                with torch.no_grad():
                    module.weight.copy_(torch.rand(shape, generator=generator) + 0.5)
                    module.bias.copy_(torch.randn(shape, generator=generator) * 0.2)
    model.eval()
    return model


def make_tiny(classes: int = 3, seed: int = 0, **kwargs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return unsettle(Tiny(classes, **kwargs), seed)


def make_support(shots: int = 5, classes: int = 3, size: int = 8, seed: int = 1, channels: int = 3) -> Support:
    """Images of another place: each class its own pattern, brighter and wider than the source's statistics."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, channels, size, size, generator=generator)
    labels = torch.arange(classes).repeat(shots)
    noise = torch.randn(len(labels), channels, size, size, generator=generator)
    return Support(1.5 * (patterns[labels] + 0.7 * noise) + 0.8, labels)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Shared(nn.Module):
    """One BatchNorm layer used twice, at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, images):
        hidden = self.bn(self.conv(images)).relu()
        return self.fc(self.bn(self.again(hidden)).relu().mean((2, 3)))


class Street(nn.Module):
    """A small street-scene network: strides, an image-pooling branch that sees 1x1 maps, an unused auxiliary head."""

    def __init__(self, coarse: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3, 1, 1), nn.BatchNorm2d(12), nn.ReLU())
        self.pool = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.aux = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(18, STREET_CLASSES, 1)
        self.coarse = coarse

    def forward(self, images):
        features = self.body(self.stem(images))
        pooled = self.pool(features).expand(-1, -1, *features.shape[2:])
        coarse = self.head(torch.cat([features, pooled], 1))
        if self.coarse:
            return {"out": coarse}
        return {"out": F.interpolate(coarse, images.shape[2:], mode="bilinear", align_corners=False)}


def street(coarse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return unsettle(Street(coarse))


def scenes(count: int = 5, size: tuple[int, int] = (16, 24), seed: int = 0) -> Support:
    """Images whose labels follow from their colours, a strip of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, *size, generator=generator) * 1.5 + 0.7
    labels = (images[:, 0] > 0.7).long() + 2 * (images[:, 1] > 0.7).long()
    labels[:, :3] = 255
    return Support(images, labels)


def mixed_sizes() -> Support:
    parts = [scenes(1, size, seed) for seed, size in enumerate([(16, 24), (20, 16), (12, 30)])]
    return Support(tuple(part.images[0] for part in parts), tuple(part.labels[0] for part in parts))
