"""Normalisation layers that stand in a network in the place of BatchNorm, or beside it.

Two families. Instance normalisation has no statistics of its own: each image is normalised by itself. Whitening makes
the channels of a group uncorrelated, not only of variance 1; its matrices come from Newton's iteration, which has sound
gradients where an eigen-decomposition has none.

None of these layers is a BatchNorm layer, except the half of an IBN layer that is one.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.errors import FewshiftError

EPS = 1e-5
TILE = 2**20  # values that are centred at a time: 4 MB, which a cache holds


def inverse_root(covariance: Tensor, iterations: int) -> Tensor:
    """About covariance^(-1/2), of (..., d, d) matrices, by Newton's iteration.

    S = covariance / trace has its eigenvalues in (0, 1]; P_0 = 1, P_(k+1) = (3 P_k - P_k^3 S) / 2, and the result is
    P / sqrt(trace): exact for d = 1, otherwise in the limit. Q = P S is carried beside P, with which rounding errors
    die out; by P alone they grow, and beyond ten steps there is nothing else left.
    """
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    beside = (covariance / trace).flatten(0, -3)
    one = torch.eye(covariance.shape[-1]).to(covariance).expand_as(beside)
    root = one
    for step in range(iterations):
        # (3 - P Q) / 2, in this order, and at first P = 1
        factor = torch.baddbmm(one, root, beside, beta=1.5, alpha=-0.5) if step else 1.5 * one - 0.5 * beside
        root = torch.bmm(factor, root) if step else factor
        if step < iterations - 1:
            beside = torch.bmm(beside, factor)
    return root.view_as(covariance) * trace.rsqrt()


def image_moments(maps: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The means (N, C) and covariances (N, C / d, d, d), in groups of d channels, of each of the maps (N, C, L).

    Covariances are biased: sums over the L positions, divided by L.
    """
    _, means, covariances = _Moments.apply(maps, group)
    return means, covariances


def pooled(means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
    """The means (1, C) and covariances (1, C / d, d, d) of all positions of all images, from those of each image."""
    mean = means.mean(0, keepdim=True)
    apart = (means - mean).view(*covariances.shape[:-1], 1)
    return mean, (covariances + apart * apart.mT).mean(0, keepdim=True)


def transformed(maps: Tensor, matrices: Tensor, shifts: Tensor) -> Tensor:
    """A x + b at every position of maps (N, C, L): A is (N, C / d, d, d), a matrix for each group, b is (N, C)."""
    output: Tensor = _Transformed.apply(maps, matrices, shifts)
    return output


class InstanceNorm(nn.InstanceNorm2d):
    """Each channel of each image with mean 0 and variance 1, then gamma and beta if it has them.

    Unlike torch's it leaves channels side by side in memory where they are so, and an image of one position is beta.
    """

    def __init__(self, channels: int, affine: bool = True) -> None:
        super().__init__(channels, EPS, affine=affine)

    def begin_as(self, batchnorm: _BatchNorm) -> None:
        """Take over gamma and beta, if there are any."""
        _take_affine(self, batchnorm)

    def forward(self, images: Tensor) -> Tensor:
        """As many groups as channels: instance normalisation is this case of group normalisation."""
        if images.is_contiguous():
            return torch.group_norm(images, self.num_features, self.weight, self.bias, self.eps)
        maps, means, variances = _Moments.apply(images.flatten(2), 1)  # with channels side by side, torch is slow
        scales = (variances.view_as(means) + self.eps).rsqrt() * (1 if self.weight is None else self.weight)
        shifts = -scales * means + (0 if self.bias is None else self.bias)
        return transformed(maps, scales[:, :, None, None], shifts).view_as(images)


class InstanceBatchNorm(nn.Module):
    """IBN: instance normalisation of the first channels, BatchNorm of the rest."""

    def __init__(self, channels: int, share: float = 0.5) -> None:
        super().__init__()
        first = int(channels * share)
        if not 0 < first < channels:
            raise FewshiftError(f"a share of {share} of {channels} channels leaves one side empty: choose another")
        self.instance, self.batch = InstanceNorm(first), nn.BatchNorm2d(channels - first)

    def begin_as(self, batchnorm: _BatchNorm) -> None:
        """Both sides take over gamma and beta of their channels, BatchNorm also the statistics."""
        first, state = self.instance.num_features, batchnorm.state_dict()
        for side, channels in ((self.instance, slice(first)), (self.batch, slice(first, None))):
            own = side.state_dict()
            for name in own.keys() & state.keys():
                own[name].copy_(state[name][channels] if state[name].ndim else state[name])
        self.batch.eps, self.batch.momentum = batchnorm.eps, batchnorm.momentum

    def forward(self, images: Tensor) -> Tensor:
        """Each side by itself."""
        memory = torch.contiguous_format if images.is_contiguous() else torch.channels_last
        first, rest = images.split([self.instance.num_features, self.batch.num_features], 1)
        by_image = self.instance(first.contiguous(memory_format=memory))
        by_batch = self.batch(rest.contiguous(memory_format=memory))
        if by_batch.requires_grad:  # BatchNorm's gradient is five times slower on a slice
            by_batch.register_hook(lambda gradient: gradient.contiguous(memory_format=memory))
        return torch.cat([by_image, by_batch], 1)


class Whitening(nn.Module, abc.ABC):
    """gamma W (x - mu) + beta, with one W for each group of channels.

    Running statistics are decay * running + (1 - decay) * batch.
    """

    def __init__(self, channels: int, group: int, iterations: int = 5, decay: float = 0.9) -> None:
        super().__init__()
        if group < 1 or channels % group:
            raise FewshiftError(f"{channels} channels cannot be whitened in groups of {group}: choose a divisor")
        self.channels, self.group, self.iterations, self.decay = channels, group, iterations, decay
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.running_mean: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))

    def extra_repr(self) -> str:
        """What it was made with."""
        return f"{self.channels}, group={self.group}, iterations={self.iterations}, decay={self.decay}"

    def begin_as(self, batchnorm: _BatchNorm) -> None:
        """Take over gamma, beta and the statistics: variances make a covariance without correlations."""
        _take_affine(self, batchnorm)
        if batchnorm.running_mean is not None and batchnorm.running_var is not None:
            self.running_mean.copy_(batchnorm.running_mean)
            self._begin_from(batchnorm.running_var, batchnorm.eps)

    def forward(self, images: Tensor) -> Tensor:
        """In single precision at least: products of half numbers are too coarse for Newton's iteration."""
        with torch.autocast(images.device.type, enabled=False):
            maps = images.float() if images.dtype.itemsize < 4 else images
            maps = maps.flatten(2) if maps.ndim > 2 else maps.unsqueeze(2)
            if self.training and maps.shape[0] * maps.shape[2] < 2:
                raise FewshiftError("one position has no covariance to whiten in training: give more or larger images")
            return self._whitened(maps).view_as(images).to(images.dtype)

    @abc.abstractmethod
    def _whitened(self, maps: Tensor) -> Tensor:
        """Of maps (N, C, L)."""

    @abc.abstractmethod
    def _begin_from(self, variance: Tensor, eps: float) -> None:
        """Start the running second moments as those of a BatchNorm layer."""

    def _follow(self, running: Tensor, batch: Tensor) -> None:
        with torch.no_grad():
            running.lerp_(batch.detach().view_as(running).to(running), 1 - self.decay)

    def _scaled(self, maps: Tensor, whitening: Tensor, offset: Tensor) -> Tensor:
        """gamma W (x + offset) + beta, where W and the offset are those of each image, or one for all."""
        matrices = self.weight.view(-1, self.group, 1) * whitening
        shifts = self.bias + (matrices @ offset.view(len(offset), *matrices.shape[1:-1], 1)).flatten(1)
        count = len(maps)
        return transformed(maps, matrices.expand(count, -1, -1, -1), shifts.expand(count, -1))


class IterNormLayer(Whitening):
    """Whitening by the batch in training; at test by the running mean and the running whitening matrix."""

    def __init__(self, channels: int, group: int = 64, iterations: int = 5, decay: float = 0.9) -> None:
        super().__init__(channels, group, iterations, decay)
        self.running_whitening: Tensor
        self.register_buffer("running_whitening", torch.eye(group).repeat(channels // group, 1, 1))

    def _begin_from(self, variance: Tensor, eps: float) -> None:
        self.running_whitening.copy_((variance + eps).rsqrt().view(-1, self.group).diag_embed())

    def _whitened(self, maps: Tensor) -> Tensor:
        if not self.training:
            return self._scaled(maps, self.running_whitening[None], -self.running_mean[None])
        maps, means, covariances = _Moments.apply(maps, self.group)
        mean, covariance = pooled(means, covariances)
        whitening = inverse_root(covariance + EPS * torch.eye(self.group).to(maps), self.iterations)
        self._follow(self.running_mean, mean)
        self._follow(self.running_whitening, whitening)
        return self._scaled(maps, whitening, -mean)


class SwitchableWhiteningLayer(Whitening):
    """Whitening by a mixture of the batch's and the image's own moments; how much of each is learned.

    At test the batch's moments are the running ones. `tied`: one mixture for means and covariances.
    """

    def __init__(
        self, channels: int, group: int = 16, iterations: int = 5, decay: float = 0.99, tied: bool = False
    ) -> None:
        super().__init__(channels, group, iterations, decay)
        self.mean_logits = nn.Parameter(torch.zeros(2))  # batch, image
        self.covariance_logits = self.mean_logits if tied else nn.Parameter(torch.zeros(2))
        self.running_covariance: Tensor
        self.register_buffer("running_covariance", torch.eye(group).repeat(channels // group, 1, 1))

    def _begin_from(self, variance: Tensor, eps: float) -> None:
        self.running_covariance.copy_(variance.view(-1, self.group).diag_embed())

    def _whitened(self, maps: Tensor) -> Tensor:
        maps, means, covariances = _Moments.apply(maps, self.group)
        if self.training:
            batch_mean, batch_covariance = pooled(means, covariances)
            self._follow(self.running_mean, batch_mean)
            self._follow(self.running_covariance, batch_covariance)
        else:
            batch_mean, batch_covariance = self.running_mean[None], self.running_covariance[None]
        mean = batch_mean.lerp(means, self.mean_logits.softmax(0)[1])
        covariance = batch_covariance.lerp(covariances, self.covariance_logits.softmax(0)[1])
        whitening = inverse_root(covariance + EPS * torch.eye(self.group).to(maps), self.iterations)
        return self._scaled(maps, whitening, -mean)


def _take_affine(layer: nn.Module, batchnorm: _BatchNorm) -> None:
    with torch.no_grad():
        for name in ("weight", "bias"):
            own, learned = getattr(layer, name), getattr(batchnorm, name)
            if own is not None and learned is not None:
                own.copy_(learned)


class _Moments(torch.autograd.Function):
    """`image_moments`, and the maps again, for `transformed` and nothing else.

    The gradient of the moments is added, as one product, into the memory of the gradient that `transformed` has made.
    """

    @staticmethod
    def forward(ctx: Any, maps: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        channels, length = maps.shape[1:]
        means = maps.mean(2)
        # less the mean first, since large means leave nothing of small variances; a few images at a time, which
        # takes no memory to speak of
        few = max(1, TILE // (channels * length))
        tiles = zip(maps.split(few), means.split(few), strict=True)
        products = [
            _products(centred, centred, group) for tile, mean in tiles for centred in (tile - mean[:, :, None],)
        ]
        ctx.save_for_backward(maps, means)
        ctx.group = group
        return maps.view_as(maps), means, torch.cat(products) / length

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_maps: Tensor, d_means: Tensor, d_covariances: Tensor) -> tuple[Tensor, None]:
        maps, means = ctx.saved_tensors
        slopes = (d_covariances + d_covariances.mT) / maps.shape[2]
        _apply(slopes, maps, d_maps, add=True)
        centre = (slopes @ means.view(*slopes.shape[:-1], 1)).flatten(1)
        return d_maps.add_((d_means / maps.shape[2] - centre)[:, :, None]), None


class _Transformed(torch.autograd.Function):
    """`transformed`, into and out of whatever layout the maps have."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, matrices: Tensor, shifts: Tensor) -> Tensor:
        ctx.save_for_backward(maps, matrices)
        return _apply(matrices, maps, torch.empty_like(maps)).add_(shifts[:, :, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        maps, matrices = ctx.saved_tensors
        d_maps = _apply(matrices.mT, d_output, torch.empty_like(maps)) if ctx.needs_input_grad[0] else None
        return d_maps, _products(d_output, maps, matrices.shape[-1]), d_output.sum(2)


def _apply(matrices: Tensor, maps: Tensor, output: Tensor, add: bool = False) -> Tensor:
    """Write A x of every position into `output`, or add it there."""
    group = matrices.shape[-1]
    if group == 1:
        scales = matrices.reshape(*maps.shape[:2], 1)
        return output.addcmul_(maps, scales) if add else torch.mul(maps, scales, out=output)
    parts = (_parts(tensor, group, output) for tensor in (output, maps))
    for out, part, matrix in zip(*parts, _matrices(matrices, output), strict=True):
        if add:
            torch.baddbmm(out, matrix, part, out=out)
        else:
            torch.bmm(matrix, part, out=out)
    return output


def _products(left: Tensor, right: Tensor, group: int) -> Tensor:
    """Sums over positions of l r', (N, C / d, d, d)."""
    count, channels, _ = right.shape
    if group == 1:
        return (left * right).sum(2).view(count, channels, 1, 1)
    pairs = zip(_parts(left, group, right), _parts(right, group, right), strict=True)
    products = [torch.bmm(one, other.mT) for one, other in pairs]
    if len(products) > 1:
        return torch.stack(products, 1)
    return products[0].view(count, channels // group, group, group)


def _parts(maps: Tensor, group: int, like: Tensor) -> list[Tensor]:
    """Maps (N, C, L) as batches (n, d, L) of matrices, without copying what has the layout of `like`.

    Where an image has one channel after the other in memory, images and groups make one batch. Where it has channels
    side by side, each group is a batch of its own.
    """
    if like.is_contiguous():
        return [maps.reshape(-1, group, maps.shape[2])]
    return list(maps.split(group, 1))


def _matrices(matrices: Tensor, like: Tensor) -> list[Tensor]:
    """Matrices (N, C / d, d, d) in the batches of `_parts`."""
    return [matrices.flatten(0, 1)] if like.is_contiguous() else list(matrices.unbind(1))
