"""Networks that people write, and that are hard to adapt: each beside its plain twin with the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.networks import Tiny, unsettle

MEAN, STD = 0.4, 1.7


class ByKeyword(Tiny):
    """Calls its layers by keyword."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.bn1(input=self.conv1(input=images)).relu()
        hidden = (hidden + self.bn2(input=self.conv2(input=hidden))).relu()
        return self.fc(input=self.drop(input=hidden.mean((2, 3))))


class Scaling(Tiny):
    """Scales its input."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images - MEAN) / STD)


class InPlace(Tiny):
    """Scales its input where it lies."""

    def forward(self, images: Tensor) -> Tensor:
        images -= MEAN
        images /= STD
        return super().forward(images)


class Sometimes(InPlace):
    """Scales its input where it lies, but for two images."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.clone() if len(images) == 2 else images)


class WithoutGradients(InPlace):
    """Scales its input where it lies, but where gradients are wanted."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.clone() if torch.is_grad_enabled() else images)


class NoGradients(Tiny):
    """Disables gradients."""

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)


class Remembering(Tiny):
    """Has a state that is no tensor."""

    remembered: object = {"epochs": 3, "names": ["cat", "dog"], "table": torch.arange(3.0), "none": None}

    def get_extra_state(self) -> object:
        return self.remembered

    def set_extra_state(self, state: object) -> None:
        self.remembered = state


class Tied(nn.Module):
    """Three BatchNorm layers; the first two have one weight and bias, each has statistics of its own."""

    def __init__(self, width: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, classes)
        self.tie()

    def tie(self) -> None:
        self.bn2.weight, self.bn2.bias = self.bn1.weight, self.bn1.bias

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.bn1(self.conv1(images)).relu()
        hidden = (hidden + self.bn2(self.conv2(hidden))).relu()
        hidden = (hidden + self.bn3(self.conv3(hidden))).relu()
        return self.fc(hidden.mean((2, 3)))


class SameMemory(Tied):
    """Two parameters, but one memory."""

    def tie(self) -> None:
        for key in ("weight", "bias"):
            setattr(self.bn2, key, nn.Parameter(getattr(self.bn1, key).detach()))


class WeightOnly(Tied):
    """Only the weight is common."""

    def tie(self) -> None:
        self.bn2.weight = self.bn1.weight


class SameStatistics(Tied):
    """Statistics are common too."""

    def tie(self) -> None:
        super().tie()
        self.bn2.running_mean, self.bn2.running_var = self.bn1.running_mean, self.bn1.running_var


class Inside(Tied):
    """Weight and bias of one layer are one tensor."""

    def tie(self) -> None:
        self.bn2.bias = self.bn2.weight


class Untied(Tied):
    """The twin: the same values in tensors of their own."""

    def tie(self) -> None:
        pass


class Attending(Untied):
    """Weighs channels by the weights of its second BatchNorm layer, as normalisation-based attention does."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.bn1(self.conv1(images)).relu()
        attended = self.bn2(self.conv2(hidden))
        share = self.bn2.weight.data.abs() / self.bn2.weight.data.abs().sum()
        hidden = hidden + attended * (attended * share[:, None, None]).sigmoid()
        hidden = (hidden + self.bn3(self.conv3(hidden))).relu()
        return self.fc(hidden.mean((2, 3)))


def made(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    """A network of that kind with weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return unsettle(kind(), seed)


def twin(network: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A network of another kind with the same weights."""
    other = made(kind)
    tensors = {name: tensor for name, tensor in network.state_dict().items() if isinstance(tensor, Tensor)}
    other.load_state_dict(tensors)
    return other
