"""Coefficients of one BatchNorm layer: how its spanning vectors are combined, and what may be learned of that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewshift.core.moments import Normal, Span


class Linear:
    """Free coefficients: eta and rho start at (1 - v, v, 0, ..., 0) and may go anywhere."""

    def __init__(self, span: Span, v: float, *, split: bool) -> None:
        self.span = span
        # the first two stay in float32 where the released code kept them so, and are promoted on use
        first = torch.float32 if split else span.mean.dtype
        start = torch.tensor([1 - v, v], dtype=first, device=span.mean.device)
        rest = [matrix.new_zeros(matrix.shape[1] - 2) for matrix in (span.mean, span.std)]
        self._parameters = [nn.Parameter(it) for it in (start.clone(), rest[0], start.clone(), rest[1])]

    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves."""
        return [parameter for parameter in self._parameters if parameter.numel()]

    def normal(self) -> Normal:
        """mu = M eta, sigma = S rho."""
        eta, rho = self._coefficients()
        return self.span.combine(eta, rho)

    def project(self) -> None:
        """Nothing to hold."""

    def values(self) -> dict[str, list[float]]:
        """The coefficients as plain numbers."""
        eta, rho = self._coefficients()
        return {"eta": eta.tolist(), "rho": rho.tolist()}

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        eta, more_eta, rho, more_rho = self._parameters
        return torch.cat([eta.to(more_eta), more_eta]), torch.cat([rho.to(more_rho), more_rho])


class Convex:
    """One weight a per moment, held in [0, 1]: (1 - a) source + a support."""

    def __init__(self, span: Span, v: float, *, split: bool) -> None:
        del split
        self.span = span
        self._weights = nn.Parameter(span.mean.new_full((2,), v))

    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves."""
        return [self._weights]

    def normal(self) -> Normal:
        """mu = (1 - a) mu_s + a mu_spt, sigma likewise with its own weight."""
        return self.span.combine(*self._coefficients())

    def project(self) -> None:
        """Back to the nearest convex combination."""
        with torch.no_grad():
            self._weights.clamp_(0, 1)

    def values(self) -> dict[str, list[float]]:
        """The coefficients as plain numbers."""
        eta, rho = self._coefficients()
        return {"eta": eta.tolist(), "rho": rho.tolist()}

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        return torch.stack([1 - self._weights, self._weights], 1).unbind(0)  # type: ignore[return-value]
