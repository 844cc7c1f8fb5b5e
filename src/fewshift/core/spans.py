"""Spanning vectors of a BatchNorm layer's statistics, and the coefficients that combine them.

A layer normalises with mu = M eta and sigma = S rho. The columns of M and S are constants; eta and rho are learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewshift.core.moments import Moments
from fewshift.core.source_layer import Normal, SourceLayer
from fewshift.errors import FewshiftError

NULL = 1e-10  # a spanning vector shorter than this fraction of the data it came from is rounding noise


@dataclass(frozen=True)
class Span:
    """The spanning vectors of one layer, as columns: source, support, then the directions of the support's images."""

    mean: Tensor  # (C, 1 + n_mean)
    std: Tensor  # (C, 1 + n_std)

    def combine(self, eta: Tensor, rho: Tensor) -> Normal:
        """mu = M eta, sigma = S rho."""
        return Normal(self.mean @ eta, self.std @ rho)


def spanning_vectors(
    seen: Moments, source: SourceLayer, n: int | float, *, borrow_scale: bool = False, guard: bool = True
) -> Span:
    """[source, support mean, U S ...] and the same for standard deviations; n support vectors in each.

    A fraction n in (0, 1) takes, for each moment, the fewest directions that explain that part of the variance.
    `borrow_scale` gives the directions of the standard deviations the singular values of the means, as the released
    code does. Without `guard` a layer with one position per image is an error, as in the released code.
    """
    support = seen.normal(source.eps)
    means, stds = seen.mean.T, seen.image_std(source.eps).T
    single = not bool((seen.count > 1).all())
    if single and not guard:
        raise FewshiftError(
            "a BatchNorm layer sees one position per image, where the released code divides by zero: "
            "use variant='paper'"
        )
    mean_vectors, mean_values = directions(means, support.mean)
    if single:  # no spatial variance per image: the pooled deviation is the only support vector
        std_vectors, std_values = stds.new_zeros(len(stds), 0), stds.new_zeros(0)
    else:
        std_vectors, std_values = directions(stds, support.std)
    std_scale = mean_values if borrow_scale and not single else std_values
    return Span(
        _columns(source.normal.mean, support.mean, mean_vectors * mean_values, kept(mean_values, n)),
        _columns(source.normal.std, support.std, std_vectors * std_scale, kept(std_values, n)),
    )


def directions(columns: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and values of `columns` (C, N), the direction of `first` taken out.

    Z - u u^T Z with u = first / |first|. Values that are rounding noise become zero. Signs are fixed (the entry of
    largest magnitude is positive), so that the same data give the same vectors.
    """
    norm = torch.linalg.vector_norm(first)
    left = columns
    if norm > 1e-12:  # a dead layer has no direction to take out
        u = (first / norm).unsqueeze(1)
        left = columns - u @ (u.T @ columns)
    vectors, values, _ = torch.linalg.svd(left, full_matrices=False)
    values = torch.where(values > NULL * torch.linalg.matrix_norm(columns), values, 0)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1, 1), values


def kept(values: Tensor, n: int | float) -> int:
    """How many directions to keep besides the pooled vector."""
    if isinstance(n, int):
        return min(n - 1, len(values))
    energy = values.square().cumsum(0)
    if not len(values) or energy[-1] == 0:
        return 0
    return int((energy < n * energy[-1]).sum()) + 1


def _columns(source: Tensor, support: Tensor, directions: Tensor, count: int) -> Tensor:
    columns = [source.unsqueeze(1), support.unsqueeze(1).to(source), directions[:, :count].to(source)]
    return torch.cat(columns, 1)


class Linear:
    """Free coefficients: eta and rho start at (1 - v, v, 0, ..., 0), without bounds."""

    def __init__(self, span: Span, v: float, *, split: bool) -> None:
        self.span = span
        # `split`: the released code keeps the first two in float32 and promotes them on use
        first = torch.float32 if split else span.mean.dtype
        start = torch.tensor([1 - v, v], dtype=first, device=span.mean.device)
        rest = [matrix.new_zeros(matrix.shape[1] - 2) for matrix in (span.mean, span.std)]
        self._parameters = [nn.Parameter(value) for value in (start.clone(), rest[0], start.clone(), rest[1])]

    def parameters(self) -> list[nn.Parameter]:
        """The tensors to optimise."""
        return [parameter for parameter in self._parameters if parameter.numel()]

    def normal(self) -> Normal:
        """mu = M eta, sigma = S rho."""
        return self.span.combine(*self._coefficients())

    def project(self) -> None:
        """Nothing: the coefficients have no bounds."""

    def values(self) -> dict[str, list[float]]:
        """The coefficients as plain numbers."""
        eta, rho = self._coefficients()
        return {"eta": eta.tolist(), "rho": rho.tolist()}

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        eta, more_eta, rho, more_rho = self._parameters
        return torch.cat([eta.to(more_eta), more_eta]), torch.cat([rho.to(more_rho), more_rho])


class Convex:
    """One weight a in [0, 1] for each moment: (1 - a) source + a support."""

    def __init__(self, span: Span, v: float, *, split: bool) -> None:
        del split
        self.span = span
        self._weights = nn.Parameter(span.mean.new_full((2,), v))

    def parameters(self) -> list[nn.Parameter]:
        """The tensors to optimise."""
        return [self._weights]

    def normal(self) -> Normal:
        """mu = (1 - a) mu_s + a mu_spt, sigma likewise with its own weight."""
        return self.span.combine(*self._coefficients())

    def project(self) -> None:
        """Move to the nearest convex combination."""
        with torch.no_grad():
            self._weights.clamp_(0, 1)

    def values(self) -> dict[str, list[float]]:
        """The coefficients as plain numbers."""
        eta, rho = self._coefficients()
        return {"eta": eta.tolist(), "rho": rho.tolist()}

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        return torch.stack([1 - self._weights, self._weights], 1).unbind(0)  # type: ignore[return-value]
