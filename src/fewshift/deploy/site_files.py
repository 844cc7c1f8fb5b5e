"""From an adapted network to a site file: the tensors in which it differs from a base network in an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fewshift.core.delta import Fingerprint
from fewshift.deploy.site_format import BaseFile, SiteFile, SiteTensor
from fewshift.deploy.tracing import Exportable
from fewshift.errors import FewshiftError


def takes_bytes(base: BaseFile) -> bool:
    """Whether the graph scales and normalises bytes."""
    return bool(base.facts["input"]["type"] == "uint8")


def refuse_other_source(base: BaseFile, source: nn.Module) -> None:
    """Refuse a network that is not the one in the file."""
    known, own = base.facts["fewshift"], Fingerprint.of(source)
    if own.architecture != known["architecture"]:
        raise FewshiftError(f"{base.path} has another network in it: give an export of this one as base")
    if own.weights != known["weights"]:
        raise FewshiftError(
            f"{base.path} has the same network with other weights in it: give an export of the source network, "
            "without a delta, as base"
        )


def site_of(
    base: BaseFile,
    adapted: Exportable,
    classes: Sequence[str] | None,
    steps: Mapping[str, Any] | None,
    about: Mapping[str, Any],
) -> SiteFile:
    """What is different in the adapted network.

    Tensors that the graph does not use, such as counters of batches, are not in the base and are left out.
    """
    tensors = {}
    for name, tensor in adapted.tensors().items():
        place = base.tensors.get(name)
        if place is None:
            continue
        values = _bytes(tensor)
        if (len(values), tuple(tensor.shape)) != (place.stop - place.start, place.shape):
            raise FewshiftError(f"tensor '{name}' has another shape in {base.path}: export the base again")
        if values != base.content[place.start : place.stop]:
            tensors[name] = SiteTensor(place.type, place.shape, values)
    names = None if classes is None else tuple(classes)
    return SiteFile(tensors, base.digest, base.facts["fewshift"]["weights"], names, steps, about)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
