"""What is exported: a network, a network with a delta, or the result of an adaptation, with all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from fewshift import __version__
from fewshift.core._arguments import checked_model, checked_names
from fewshift.core.delta import Delta, Fingerprint
from fewshift.core.soundness import refuse_broken_weights
from fewshift.core.support import Support, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps
from fewshift.images.preprocess import FileSteps, Preprocess, as_steps
from fewshift.models.cards import known_card, refuse_other_order


@runtime_checkable
class AdaptedNetwork(Protocol):
    """The result of an adaptation, as far as export looks at it."""

    model: nn.Module
    source: nn.Module
    support: Support | None
    unlabelled: Unlabelled | None
    classes: tuple[str, ...] | None
    preprocess: Preprocess | None

    @property
    def accepted(self) -> bool:
        """Whether `model` is the adapted network."""


@dataclass(frozen=True)
class Subject:
    """What is exported, and all that is known about it."""

    model: nn.Module
    source: nn.Module
    steps: FileSteps | None
    classes: tuple[str, ...] | None
    images: Any = None
    unlabelled: Unlabelled | None = None
    about: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: Any, delta: Any, preprocess: Steps, classes: Sequence[str] | None) -> Subject:
        """What a user passes, read; what the arguments say comes first."""
        names = checked_names(classes)
        if isinstance(model, nn.Module) or not isinstance(model, AdaptedNetwork):
            subject = cls._of_network(checked_model(model), delta, names)
        elif delta is not None:
            raise FewshiftError("the result of an adaptation has its own delta: pass the source network with delta=")
        elif not model.accepted:
            raise FewshiftError(
                "the adaptation was rejected, so there is no adapted network to export: pass result.model for the "
                "source network, or result.candidate for the rejected one"
            )
        else:
            support = None if model.support is None else model.support.images
            card = known_card(model.source)
            steps = card.preprocess if model.preprocess is None else model.preprocess
            subject = cls(model.model, model.source, steps, model.classes, support, model.unlabelled)
        refuse_other_order(known_card(subject.source), names)
        chosen = as_steps(preprocess)
        return replace(subject, steps=chosen or subject.steps, classes=names or subject.classes)

    @classmethod
    def _of_network(cls, model: nn.Module, delta: Any, names: tuple[str, ...] | None) -> Subject:
        card = known_card(model)
        refuse_broken_weights(model)
        if delta is None:
            return cls(model, model, card.preprocess, card.classes)
        change = delta if isinstance(delta, Delta) else Delta.load(delta)
        steps = Preprocess.from_json(dict(change.preprocess)) if change.preprocess else card.preprocess
        about = {"method": change.method, "outcome": change.outcome}
        return cls(change.apply(model, names), model, steps, change.classes or card.classes, about=about)

    def refuse_overwriting(self, outputs: Sequence[Path], *read: Any) -> None:
        """One sentence when a file would be written over one that is read."""
        weights = known_card(self.source).weights
        taken = [Path(file).resolve() for file in (*read, weights) if isinstance(file, (str, Path))]
        for output in outputs:
            if output.resolve() in taken:
                raise FewshiftError(f"{output} is read for this export: choose another file")

    def facts(self, channels: int, in_bytes: bool) -> dict[str, Any]:
        """What the file says about itself, beside the size of its images."""
        fingerprint, card = Fingerprint.of(self.model), known_card(self.source)
        steps = self.stored_steps
        return {
            "classes": self.classes,
            "preprocess": None if steps is None else steps.to_json(),
            "input": {
                "type": "uint8" if in_bytes else "float32",
                "layout": "NHWC" if in_bytes else "NCHW",
                "channels": channels,
            },
            "fewshift": {
                "version": __version__,
                "arch": card.arch,
                "architecture": fingerprint.architecture,
                "weights": fingerprint.weights,
                **(self.about or {}),
            },
        }

    @property
    def stored_steps(self) -> Preprocess | None:
        """The preprocessing, if a file can say it: a function is not said."""
        return self.steps if isinstance(self.steps, Preprocess) else None

    def need_steps(self) -> Preprocess:
        """The preprocessing, or one sentence when the graph cannot contain it."""
        if self.stored_steps is None:
            raise FewshiftError(
                f"how images of the {type(self.model).__name__} are scaled and normalised is not known: pass "
                "preprocess=fewshift.Preprocess(...), or leave out with_preprocessing"
            )
        return self.stored_steps
