"""The tiny network, its losses and its optimisers as formulas: what tests compare a method with, step by step.

Nothing here calls the package. A naive method is written on top of it from the method's description alone; it may share
the order of the minibatches with the package, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

TOLERANCE = 1e-9  # in float64
EPS = {"bn1": 1e-5, "bn2": 1e-3}
Snapshot = list[Tensor]  # everything that is trained, after one step


class Formulas:
    """`make_tiny()` as a table of float64 tensors; BatchNorm is written out.

    `training` normalises with the batch's biased variance. `momentum` is how far the running statistics then follow,
    with the unbiased one.
    """

    def __init__(self, model: nn.Module, momentum: float = 0.1) -> None:
        self.momentum = momentum
        self.training = False
        self.maps: dict[str, Tensor] = {}  # what the convolutions gave in the last forward pass
        self.tensors = {
            name: tensor.detach().clone().double()
            for name, tensor in model.state_dict().items()
            if not name.endswith("num_batches_tracked")
        }

    def copy(self) -> Formulas:
        twin = object.__new__(Formulas)
        twin.momentum, twin.training, twin.maps = self.momentum, self.training, {}
        twin.tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return twin

    def names(self, *parts: str) -> list[str]:
        """Names of parameters that begin with one of these, in the order of the network."""
        order = ("conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias")
        return [name for name in (*order, "fc.weight", "fc.bias") if name.startswith(parts)]

    def snapshot(self, names: Iterable[str]) -> Snapshot:
        return [self.tensors[name].detach().clone() for name in names]

    def normalised(self, layer: str, z: Tensor) -> Tensor:
        if self.training:
            count = z.numel() // z.shape[1]
            mean = z.sum((0, 2, 3)) / count
            var = (z - mean.view(1, -1, 1, 1)).square().sum((0, 2, 3)) / count
            for name, batch in (("running_mean", mean), ("running_var", var * count / (count - 1))):
                key = f"{layer}.{name}"
                self.tensors[key] = (1 - self.momentum) * self.tensors[key] + self.momentum * batch.detach()
        else:
            mean, var = self.tensors[f"{layer}.running_mean"], self.tensors[f"{layer}.running_var"]
        sigma = (var + EPS[layer]).sqrt()
        gamma, beta = self.tensors[f"{layer}.weight"], self.tensors[f"{layer}.bias"]
        mean, sigma, gamma, beta = (row.view(1, -1, 1, 1) for row in (mean, sigma, gamma, beta))
        return gamma * (z - mean) / sigma + beta

    def features(self, images: Tensor) -> Tensor:
        self.maps["conv1"] = F.conv2d(images.double(), self.tensors["conv1.weight"], padding=1)
        hidden = self.normalised("bn1", self.maps["conv1"]).clamp(min=0)
        self.maps["conv2"] = F.conv2d(hidden, self.tensors["conv2.weight"], padding=1)
        hidden = (hidden + self.normalised("bn2", self.maps["conv2"])).clamp(min=0)
        return hidden.mean((2, 3))

    def head(self, features: Tensor) -> Tensor:
        return features @ self.tensors["fc.weight"].T + self.tensors["fc.bias"]

    def __call__(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def use_statistics_of(self, images: Tensor) -> None:
        """Put the biased statistics of these images, layer after layer, in the place of the running ones."""
        with torch.no_grad():
            for layer in EPS:
                self.training = False
                self.features(images)  # the layers before this one have the new statistics already
                pixels = self.maps[layer.replace("bn", "conv")].transpose(0, 1).flatten(1)
                mean = pixels.mean(1)
                self.tensors[f"{layer}.running_mean"] = mean
                self.tensors[f"{layer}.running_var"] = (pixels - mean[:, None]).square().mean(1)


def gradients(loss: Tensor, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    names = list(names)
    slopes = torch.autograd.grad(loss, [tensors[name] for name in names], retain_graph=True)
    return dict(zip(names, slopes, strict=True))


def track(tensors: dict[str, Tensor], names: Iterable[str]) -> None:
    """Let these tensors have gradients."""
    for name in names:
        tensors[name] = tensors[name].detach().clone().requires_grad_()


class HandSGD:
    """v <- m v + g + decay w; w <- w - rate v, or with Nesterov w - rate (g + decay w + m v)."""

    def __init__(self, momentum: float, decay: float = 0.0, *, nesterov: bool = False) -> None:
        self.momentum, self.decay, self.nesterov = momentum, decay, nesterov
        self.velocity: dict[str, Tensor] = {}

    def step(self, tensors: dict[str, Tensor], slopes: Mapping[str, Tensor], rate: float) -> None:
        for name, slope in slopes.items():
            down = slope + self.decay * tensors[name].detach()
            self.velocity[name] = self.momentum * self.velocity.get(name, torch.zeros_like(down)) + down
            way = down + self.momentum * self.velocity[name] if self.nesterov else self.velocity[name]
            tensors[name] = (tensors[name] - rate * way).detach().requires_grad_()


class HandAdam:
    """m <- b1 m + (1 - b1) g; s <- b2 s + (1 - b2) g^2; w <- w - rate m' / (sqrt(s') + 1e-8), both made unbiased."""

    def __init__(self, first: float = 0.9, second: float = 0.999) -> None:
        self.first, self.second, self.done = first, second, 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def step(self, tensors: dict[str, Tensor], slopes: Mapping[str, Tensor], rate: float) -> None:
        self.done += 1
        for name, slope in slopes.items():
            mean, square = self.moments.get(name, (torch.zeros_like(slope), torch.zeros_like(slope)))
            mean = self.first * mean + (1 - self.first) * slope
            square = self.second * square + (1 - self.second) * slope * slope
            self.moments[name] = mean, square
            way = mean / (1 - self.first**self.done) / ((square / (1 - self.second**self.done)).sqrt() + 1e-8)
            tensors[name] = (tensors[name] - rate * way).detach().requires_grad_()


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over images of log sum_c exp(logit_c) - logit_label."""
    each = [torch.log(torch.exp(row).sum()) - row[label] for row, label in zip(logits, labels.tolist(), strict=True)]
    return torch.stack(each).mean()


def orders(total: int, size: int, epochs: int, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """For each epoch the positions of its minibatches: one generator, one permutation per epoch."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(total, generator=generator).split(size) for _ in range(epochs)]


@contextmanager
def every_step() -> Iterator[list[Snapshot]]:
    """Within the block, collect what any optimiser of PyTorch trains, after each of its steps."""
    steps: list[Snapshot] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        steps.append([tensor.detach().clone() for group in optimizer.param_groups for tensor in group["params"]])

    handle = register_optimizer_step_post_hook(note)
    try:
        yield steps
    finally:
        handle.remove()


def assert_same_course(ours: list[Snapshot], naive: list[Snapshot], tolerance: float = TOLERANCE) -> None:
    """The same number of steps, equal after each of them; and the last one went somewhere."""
    assert len(ours) == len(naive)
    for number, (mine, theirs) in enumerate(zip(ours, naive, strict=True), 1):
        assert shapes(mine) == shapes(theirs), f"step {number}"
        gap = farthest(mine, theirs)
        assert gap < tolerance, f"step {number} is {gap:.1e} away"
    before = next(step for step in naive[-2::-1] if shapes(step) == shapes(naive[-1]))
    assert farthest(naive[-1], before) > 1e3 * tolerance


def shapes(snapshot: Snapshot) -> list[torch.Size]:
    return [tensor.shape for tensor in snapshot]


def farthest(left: Snapshot, right: Snapshot) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def assert_same_network(ours: nn.Module, naive: Formulas, tolerance: float = TOLERANCE) -> None:
    """Every tensor, running statistics included."""
    state = ours.state_dict()
    for name, tensor in naive.tensors.items():
        assert state[name].dtype == torch.float64
        assert float((state[name] - tensor.detach()).abs().max()) < tolerance, name
