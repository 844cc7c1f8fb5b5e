"""What `adapt` and `inspect` hand back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fewshift import __version__
from fewshift.core._display import Displayed, byte_size
from fewshift.core.delta import Delta
from fewshift.core.method import Fitted, Method
from fewshift.core.network import Layer, Network, Skipped
from fewshift.core.support import Support, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.report import cautions, choosing, prose, suspects
from fewshift.report.recommendation import Recommendation, recommendation
from fewshift.trust.calibration import Calibration
from fewshift.trust.choice import Choice
from fewshift.trust.evidence import Evidence
from fewshift.trust.gain import LEVEL, Gain
from fewshift.trust.guard import Verdict
from fewshift.trust.sanity import Caution
from fewshift.trust.shift import Shift, shift
from fewshift.trust.suspects import Suspect, Suspects, find_suspects

REMEMBERED = ("point", "low", "high", "images", "wins", "losses", "before", "after")  # of a gain, in a delta
MORE = "model, delta.save(file), report(file)"


@dataclass(frozen=True)
class LayerReport:
    """One normalisation layer: what adaptation did to it, or why it was left alone."""

    name: str
    kind: str
    channels: int
    skipped: str | None = None
    details: dict[str, Any] | None = None  # coefficients and shift, as the method noted them


def layer_reports(network: Network, fitted: Fitted) -> tuple[LayerReport, ...]:
    """Every normalisation layer, those that were left alone last."""
    adapted = [
        LayerReport(layer.name, layer.kind, layer.channels, details=fitted.layers.get(layer.name))
        for layer in network.layers
    ]
    skipped = [LayerReport(layer.name, layer.kind, 0, skipped=layer.reason) for layer in network.skipped]
    return tuple(adapted + skipped)


@dataclass(frozen=True, repr=False)
class Adaptation(Displayed):
    """The adapted network with everything needed to judge, keep or undo it."""

    model: nn.Module
    source: nn.Module
    method: Method
    verdict: Verdict
    evidence: Evidence
    choice: Choice | None  # between the candidates of a composite method
    calibration: Calibration | None  # None where nothing was held out, or pixels have labels
    candidate: nn.Module  # the adapted network, whether it was accepted or not
    layers: tuple[LayerReport, ...]
    notes: dict[str, Any]
    support: Support | None
    validation: Support | None  # labelled images apart from the support, where the evidence comes from such
    unlabelled: Unlabelled | None
    classes: tuple[str, ...] | None
    preprocess: Preprocess | None
    seed: int
    seconds: float
    warnings: tuple[Caution, ...] = ()  # what looked wrong before adaptation
    dropped: tuple[Suspect, ...] = ()  # images that a first adaptation had and this one has not

    @property
    def accepted(self) -> bool:
        """Whether `model` is the adapted network; otherwise it is the source network."""
        return self.verdict.accepted

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return prose.reason(self.verdict, self.evidence)

    @cached_property
    def recommendation(self) -> Recommendation:
        """What changed, how sure that is and what to do, for the person who decides."""
        return recommendation(self)

    @property
    def gain(self) -> Gain | None:
        """What held-out images say; None where nothing could be, or was to be, held out."""
        return self.evidence.gain

    @cached_property
    def delta(self) -> Delta:
        """What changed, and nothing else: nothing if the adaptation was rejected."""
        if self.accepted:
            return self.candidate_delta
        with suppress(FewshiftError):  # a candidate that is no plain network has none
            return replace(self.candidate_delta, bits={}, adapted=self.candidate_delta.source)
        return self._delta(self.model)

    @cached_property
    def candidate_delta(self) -> Delta:
        """What would have changed, had it been accepted."""
        return self._delta(self.candidate)

    @cached_property
    def shift(self) -> Shift | None:
        """How far the images are from what the source network was trained on; None where that cannot be seen."""
        images = self.unlabelled if self.support is None else self.support.images
        with suppress(FewshiftError):
            return shift(self.source, images)
        return None

    @cached_property
    def suspects(self) -> Suspects:
        """Support images whose label looks wrong, and the gain without them; none where none could be held out."""
        judged = None if self.validation is not None else self.evidence.held
        answers = [judged] if self.choice is None else self.choice.answers.values()
        known = [held for held in answers if held is not None]
        weak = self.gain is not None and self.gain.weak
        return Suspects() if self.support is None else find_suspects(self.support, known, judged, weak=weak)

    def settled(self) -> Adaptation:
        """The same, with the delta of the networks as they are now: they are the user's, who may change them."""
        with suppress(FewshiftError):  # what is no plain network has no delta
            _ = self.delta, self.candidate_delta
        return self

    def _delta(self, model: nn.Module) -> Delta:
        return Delta.between(
            self.source,
            model,
            method=self.method.name,
            settings=self.method.settings(),
            classes=self.classes,
            preprocess=None if self.preprocess is None else self.preprocess.to_json(),
            seed=self.seed,
            shots=None if self.support is None else self.support.shots,
            version=__version__,
            outcome=self._outcome,
        )

    @property
    def _outcome(self) -> dict[str, Any]:
        """What a delta remembers: plain values that depend on the inputs alone, not on the clock."""
        gain, evidence = self.gain, self.evidence
        return {
            "accepted": self.accepted,
            "rule": self.verdict.rule.value,
            "chosen": None if self.choice is None else self.choice.chosen,
            "gain": None
            if gain is None
            else {name: round(getattr(gain, name), 2) for name in REMEMBERED} | {"level": LEVEL},
            "missing": None if evidence.missing is None else evidence.missing.value,
            "weakness": None if evidence.weakness is None else evidence.weakness.value,
            "labelled": 0 if self.support is None else len(self.support),
            "unlabelled": 0 if self.unlabelled is None else len(self.unlabelled),
        }

    @property
    def title(self) -> str:
        """What it is, and the verdict."""
        return f"Adaptation of {type(self.source).__name__}: {self.recommendation.advice.value}"

    @property
    def facts(self) -> dict[str, str]:
        """Method, images, gain and size; `report` writes the whole page."""
        chosen = "" if self.choice is None else f", which took {self.choice.chosen}"
        gain = "" if self.gain is None else f"{self.gain.point:+.1f} points, {prose.interval(self.gain)}"
        facts = {"method": self.method.name + chosen, "images": prose.looked_at(self)}
        facts["gain"] = gain or prose.missing(self.evidence)
        with suppress(FewshiftError):  # what is no plain network has no delta
            facts["delta"] = f"{prose.counted(len(self.delta.bits), 'tensor')}, {byte_size(self.delta.nbytes)}"
        return facts | {"suspects": str(len(self.suspects)) if self.suspects else "none", "more": MORE}

    def report(
        self, path: str | Path, delta: str | Path | None = None, *, origin: Mapping[str, Any] | None = None
    ) -> Path:
        """Write one self-contained HTML page that a colleague can read.

        `delta` is where the delta is kept, `origin` what else the page shall say about where it comes from.
        """
        from fewshift.report.pages import adaptation_page

        return adaptation_page(self, path, delta, origin)

    def to_json(self) -> dict[str, Any]:
        """Everything but the networks, as JSON knows it."""
        without = self.suspects.gain_without
        return {
            "accepted": self.accepted,
            "advice": self.recommendation.advice.value,
            "recommendation": list(self.recommendation.lines),
            "reason": self.reason,
            "warnings": [cautions.plain(caution) for caution in self.warnings],
            "gain": None if self.gain is None else asdict(self.gain),
            "facts": prose.facts(self.evidence),
            "suspects": [suspects.plain(suspect) for suspect in self.suspects],
            "gain_without_suspects": None if without is None else asdict(without),
            "dropped": [suspects.plain(suspect) for suspect in self.dropped],
            "calibration": None if self.calibration is None else _plain(self.calibration),
            "method": self.method.name,
            "settings": self.method.settings(),
            "chosen": None if self.choice is None else self.choice.chosen,
            "why": choosing.chosen(self),
            "candidates": [] if self.choice is None else choosing.candidates(self.choice),
            "seconds": self.seconds,
            "notes": self.notes,
            "layers": [
                {"name": layer.name, "skipped": layer.skipped, **(layer.details or {})} for layer in self.layers
            ],
        }


def _plain(calibration: Calibration) -> dict[str, Any]:
    refused = None if calibration.refused is None else calibration.refused.value
    return asdict(calibration) | {"applied": calibration.applied, "refused": refused}


@dataclass(frozen=True, repr=False)
class Inspection(Displayed):
    """What can be adapted in a network, and what cannot, before any data."""

    kind: str
    parameters: int
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    head: str | None
    classes: int | None

    @property
    def title(self) -> str:
        """What it is."""
        return f"Inspection of {self.kind}"

    @property
    def facts(self) -> dict[str, str]:
        """Counts, and the head."""
        return {
            "parameters": f"{self.parameters:,}, of them {self.affine_parameters:,} in BatchNorm",
            "adaptable": prose.counted(len(self.layers), "BatchNorm layer"),
            "left alone": prose.counted(len(self.skipped), "layer"),
            "head": self.head or "not known",
            "classes": "not known" if self.classes is None else str(self.classes),
        }

    @property
    def affine_parameters(self) -> int:
        """BatchNorm weights and biases: what fine-tuning BatchNorm would learn."""
        return sum(2 * layer.channels for layer in self.layers if layer.affine)

    @property
    def coefficients(self) -> int:
        """What LCCS learns with n = 1: four numbers per layer."""
        return 4 * len(self.layers)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        return asdict(self) | {"coefficients": self.coefficients, "affine_parameters": self.affine_parameters}
