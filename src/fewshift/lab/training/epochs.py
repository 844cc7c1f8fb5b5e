"""What the epochs of a training came to, and which of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fewshift.lab.training.gather import Sources


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to: means over its steps, and the score on held-out source images."""

    loss: float
    accuracy: float
    validation: float | None
    seconds: float


def kept_epoch(epochs: Sequence[Epoch], patience: int | None) -> int:
    """The epoch whose weights count: the last; with patience the first that has the best score."""
    if patience is None:
        return len(epochs) - 1
    return max(range(len(epochs)), key=lambda index: (epochs[index].validation or 0.0, -index))


def is_enough(epochs: Sequence[Epoch], patience: int | None) -> bool:
    """Whether so many epochs in a row were no better that training stops."""
    return bool(epochs) and patience is not None and len(epochs) - 1 - kept_epoch(epochs, patience) >= patience


def results_of(sources: Sources, epochs: Sequence[Epoch], patience: int | None) -> dict[str, Any]:
    """What the card says about the epochs so far."""
    kept = kept_epoch(epochs, patience)
    reached = epochs[kept].validation
    scores = {} if reached is None else {f"source_validation_{sources.labels.metric}": round(100 * reached, 2)}
    held_out = 0 if sources.validation is None else len(sources.validation)
    return {
        **scores,
        "images": {"train": len(sources.train), "source_validation": held_out},
        "kept_epoch": kept + 1,
        "history": [asdict(epoch) for epoch in epochs],
        "finished": False,
    }
