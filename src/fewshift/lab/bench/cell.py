"""Cell: one experiment, named completely. Its key is a hash of all that decides its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fewshift.core.method import Method
from fewshift.lab.bench.condition import Condition
from fewshift.methods.catalog import METHODS

OWN_SOURCE = "its own source"  # a target: images of the domains a network was trained on that it never saw


@dataclass(frozen=True)
class Cell:
    """A method with its settings, on a target domain, with k shots drawn by a seed, under a streaming condition.

    `largest_support` is the k of the support whose images are left out of the evaluation, so that all rows of a table
    share one test set; `max_test` caps that set, drawn with a fixed seed. A `damage` spoils the support (see `damage`).
    `validate` judges the adaptation as `adapt` does: what is rejected is answered by the source network.
    """

    dataset: str
    source: str
    target: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shots: int | None = None
    seed: int = 0
    condition: Condition = field(default_factory=Condition)
    largest_support: int = 10
    max_test: int | None = None
    damage: str | None = None
    validate: str | None = None

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits; the same for the same experiment, wherever and whenever it is named."""
        return hashed(self.to_json())

    @property
    def fit_key(self) -> str:
        """The same for cells that differ in nothing but the stream of test images."""
        return hashed({key: value for key, value in self.to_json().items() if key != "condition"})

    def build(self) -> Method:
        """The method with its settings."""
        return METHODS[self.method](**self.settings)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and words; settings are completed by the method's defaults, which decide results too."""
        return asdict(self) | {"settings": self.build().settings()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """The same cell again."""
        return cls(**{**data, "condition": Condition(**data["condition"])})


def hashed(data: Mapping[str, Any]) -> str:
    """Options that are not set leave no trace, so that an option added later changes no key."""
    text = json.dumps({key: value for key, value in data.items() if value is not None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
