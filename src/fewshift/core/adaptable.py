"""Networks whose BatchNorm statistics cannot be adapted, each refused in one sentence."""

from __future__ import annotations

from fewshift.core.folding import BATCH, OTHERWISE
from fewshift.core.loop import NO_GRADIENTS
from fewshift.core.network import COMPUTED, FUSED, UNUSED, Network, batchnorm
from fewshift.core.outside import READ_ELSEWHERE, STATISTICS
from fewshift.core.sharing import same_memory
from fewshift.errors import FewshiftError

REASONS = (COMPUTED, FUSED, OTHERWISE, READ_ELSEWHERE, UNUSED)  # why a network with BatchNorm layers has none to adapt


def refuse_unadaptable(network: Network) -> None:
    """Raise an error if the network has no BatchNorm statistics to adapt."""
    refuse_without_statistics(network)
    if not network.layers:
        known = next((layer for layer in network.skipped if layer.reason in REASONS), None)
        where = f"'{known.name}' is a {known.kind}: {known.reason}" if known else "it has no BatchNorm layer"
        raise FewshiftError(
            f"nothing to adapt in this network, {where}: use a network with BatchNorm (if it was fused for "
            "deployment, start from the weights before fusing), or a method that does without, such as finetune-head"
        )


def refuse_unmergeable(network: Network) -> None:
    """Raise an error if new statistics cannot be written into the plain network."""
    refuse_unadaptable(network)
    refuse_shared_statistics(network)


def refuse_without_gradients(network: Network) -> None:
    """Raise an error, before any work, if the network's forward disables the gradients that a method learns by."""
    if not network.learns:
        raise FewshiftError(NO_GRADIENTS)


def refuse_without_statistics(network: Network) -> None:
    """Raise an error if a BatchNorm layer always uses its batch: then a prediction depends on its batch mates."""
    for skipped in network.skipped:
        if skipped.reason == BATCH:
            raise FewshiftError(
                f"'{skipped.name}' is a {skipped.kind}: {BATCH}, so there is no source to start from, and a prediction "
                "depends on what else is in the batch: let it use its running statistics in evaluation mode"
            )
    for layer in network.layers:
        if batchnorm(network.model, layer.name).running_mean is None:
            raise FewshiftError(
                f"BatchNorm layer '{layer.name}' keeps no running statistics (track_running_stats=False), so there "
                "is no source to start from: use a network trained with running statistics"
            )


def refuse_shared_statistics(network: Network) -> None:
    """Raise an error if a layer's statistics, the only place for new ones, share memory with other tensors."""
    others = same_memory(network.model)
    for layer in network.layers:
        names = [f"{layer.name}.{key}" for key in STATISTICS]
        shared = next((name for name in names if name in others), None)
        if shared is None or network.carries_affine(layer):
            continue
        other = others[shared][0].rpartition(".")[0]
        raise FewshiftError(
            f"BatchNorm layers '{layer.name}' and '{other}' share their running statistics, and '{layer.name}' has "
            "no weight and bias of its own, so they cannot be adapted apart: give each layer its own statistics"
            if other != layer.name
            else f"the running statistics of BatchNorm layer '{layer.name}' share their memory, and it has no weight "
            "and bias of its own, so new ones cannot be written: give each statistic a tensor of its own"
        )
