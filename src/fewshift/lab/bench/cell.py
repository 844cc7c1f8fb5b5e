"""Cells: one experiment each, named completely. The key of a cell is a hash of what differs from the defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any

from fewshift.core.method import Method
from fewshift.errors import FewshiftError
from fewshift.lab.bench.condition import Condition
from fewshift.methods.catalog import METHODS

OWN_SOURCE = "its own source"  # a target: images of the network's own domains that it was not trained on
LAST = "last"
STATISTICS = ("source", "batch")
MIXES = ("as found", "balanced")
PRECISIONS = ("float32", "bfloat16")

# how older records and grids are read: fields that have another name now, and settings that are gone, with the default
# they had; a cell with another value of such a setting is an experiment that can no longer be run
RENAMED = {"flaw": "damage"}
RETIRED: dict[str, dict[str, Any]] = {
    "lccs": {"gradient_head": "source", "init_epochs": 10, "gamma_floor": None, "adapt_dtype": None}
}


@dataclass(frozen=True)
class Cell:
    """A method with its settings, on a target domain, with k shots drawn by a seed, under a streaming condition.

    The support of `largest_support` shots is left out of the test images, so that all rows of a table share one test
    set. `max_test` caps that set, drawn with a fixed seed. `damage` is done to the support (see `damage.py`).
    `validate` judges the adaptation as `adapt` does: if it is rejected, the source network predicts. `unlabelled` is
    how many images the method sees without labels; none of them is a test image. `corruption` is done to all images of
    the target (see `lab/datasets/corruptions.py`). `precision` is what networks compute in, while they are fitted
    and on test images; weights, statistics and steps always have float32.
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
    unlabelled: int | None = None
    corruption: str | None = None
    precision: str = PRECISIONS[0]

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits; the same for the same experiment, wherever and whenever it is named."""
        return _hashed(self._changed())

    @property
    def fit_key(self) -> str:
        """The same for cells that differ only in the stream of test images."""
        return _hashed({name: value for name, value in self._changed().items() if name != "condition"})

    def build(self) -> Method:
        """The method with its settings."""
        return METHODS[self.method](**self.settings)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and words; settings are written out in full, because defaults may change."""
        return asdict(self) | {"settings": self.build().settings()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """The cell of a record, of this version or an older one."""
        values = current_names(data)
        method, settings = current_method(values["method"], values["settings"])
        condition = Condition(**values["condition"])
        return cls(**{**values, "method": method, "settings": settings, "condition": condition})

    def _changed(self) -> dict[str, Any]:
        defaults = METHODS[self.method]().settings()
        changed = {name: value for name, value in self.build().settings().items() if value != defaults[name]}
        named = {name: value for name, value in _changed(self).items() if name != "settings"}
        return named | ({"settings": changed} if changed else {})


@dataclass(frozen=True)
class Sample:
    """Images of a domain, and the statistics that standardise their features."""

    domain: str
    statistics: str = "source"
    classes: str = "as found"

    def __post_init__(self) -> None:
        for name, known in (("statistics", STATISTICS), ("classes", MIXES)):
            if getattr(self, name) not in known:
                raise FewshiftError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(known)}")

    @property
    def label(self) -> str:
        """The sample in words."""
        return f"{self.domain}, {self.classes}, {self.statistics} statistics"


@dataclass(frozen=True)
class FeatureCell:
    """One comparison of two samples of `images` images each, at one layer."""

    dataset: str
    source: str
    label: str
    first: Sample
    second: Sample
    layer: str = LAST
    images: int = 300
    batch_size: int = 32
    seed: int = 0

    @property
    def key(self) -> str:
        """The same for the same experiment."""
        return _hashed({"kind": "features", **_changed(self)})

    @property
    def fit_key(self) -> str:
        """The key: it shares nothing with other cells."""
        return self.key

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FeatureCell:
        """The cell of a record."""
        return cls(**{**data, "first": Sample(**data["first"]), "second": Sample(**data["second"])})


Experiment = Cell | FeatureCell


def current_key(record: Mapping[str, Any]) -> str:
    """The key of a record's cell as this version computes it; the stored one if the cell can no longer be built."""
    try:
        cell = record["cell"]
        return (FeatureCell if "first" in cell else Cell).from_json(cell).key
    except (AttributeError, KeyError, TypeError, ValueError, FewshiftError):  # settings may be anything
        return str(record["key"])


def current_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored cell or row, by the names they have now."""
    return {RENAMED.get(name, name): value for name, value in data.items()}


def current_method(method: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A method by the name it has now, without retired settings that have their old default."""
    retired = RETIRED.get(method, {})
    left = {name: value for name, value in settings.items() if name not in retired or value != retired[name]}
    return method, left


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, nested ones alike."""
    changed = {}
    for each in fields(value):
        now = getattr(value, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if now != default:
            changed[each.name] = _changed(now) if is_dataclass(now) else now
    return changed


def _hashed(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
