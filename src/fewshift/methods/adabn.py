"""AdaBN: the target's own BatchNorm statistics in place of the source's.

Li et al., "Revisiting Batch Normalization for Practical Domain Adaptation", 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.method import Fitted, Method, Needs
from fewshift.network import Network, like, refuse_unadaptable
from fewshift.statistics import merged, read, source_layers, tied
from fewshift.target import Target


@dataclass(frozen=True)
class AdaBN(Method):
    """Statistics of the whole support in one pass, each layer seeing what the new statistics below it produce."""

    name: ClassVar[str] = "adabn"
    paper: ClassVar[str] = "Li et al., 2016"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "BatchNorm weight and bias (statistics where a layer has none)"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """The network with the support's statistics; labels are not looked at."""
        images = target.need_support(self.name).images
        network = Network.of(network, images)
        refuse_unadaptable(network)
        source = source_layers(network)
        seen = read(network, like(network.model, images), tied(network, 1.0)).moments
        normals = {name: it.normal(source[name].eps) for name, it in seen.items()}
        return Fitted(network.with_tensors(merged(network, normals)))
