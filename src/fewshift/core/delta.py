"""Delta: what adaptation changed and nothing else, in a file of a few kilobytes.

A delta holds, for every tensor that changed, the exclusive or of its bits before and after. That is as small as the
new values, and works both ways exactly: source ^ delta = adapted, adapted ^ delta = source, bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core._arguments import checked_model, checked_names
from fewshift.core._display import Displayed, byte_size, few
from fewshift.core._files import whole
from fewshift.core.contents import bits_of, bytes_of, content_of, shape_of
from fewshift.core.copies import answering, refuse_foreign_state
from fewshift.core.delta_format import AGAIN, FORMATS, KEY, foreign, read_delta
from fewshift.core.soundness import refuse_broken_tensor, refuse_broken_weights
from fewshift.errors import FewshiftError

UNKNOWN = "not in this file, which an older fewshift wrote"
SHOWN = 12  # digits of a fingerprint


@dataclass(frozen=True)
class Fingerprint:
    """Which network this is: names, types and shapes of its tensors, and a hash of their content."""

    architecture: str
    weights: str

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """Computed from the state dict alone: about 0.1 s for a ResNet-18."""
        return cls.of_state(checked_model(model).state_dict())

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Fingerprint:
        """That of the network with this state."""
        architecture, weights = hashlib.sha256(), hashlib.sha256()
        for name, value in sorted(state.items()):
            architecture.update(f"{name} {shape_of(value)}\n".encode())
            for part in content_of(value, name):
                weights.update(part)
        return cls(architecture.hexdigest(), weights.hexdigest())


@dataclass(frozen=True, repr=False)
class Delta(Displayed):
    """The difference between a source network and the adapted one, with all that is needed to use it safely."""

    bits: dict[str, Tensor]
    source: Fingerprint
    adapted: Fingerprint
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    preprocess: Mapping[str, Any] | None = None
    seed: int | None = None
    shots: int | None = None
    version: str = ""
    outcome: Mapping[str, Any] | None = None  # of the adaptation: verdict, gain, evidence; no date, nor other timings

    @classmethod
    def between(cls, source: nn.Module, adapted: nn.Module, **about: Any) -> Delta:
        """The delta that turns `source` into `adapted`."""
        source, adapted = checked_model(source), checked_model(adapted)
        before, after = _state(source), _state(adapted)
        prints = Fingerprint.of(source), Fingerprint.of(adapted)
        if prints[0].architecture != prints[1].architecture:
            raise FewshiftError(
                f"this {type(adapted).__name__} is not the source network with other weights, so it has no delta: "
                "keep it as it is, or choose a method that returns a plain network"
            )
        bits = {
            name: bits_of(after[name]) ^ bits_of(before[name].to(after[name].device))
            for name, first in _first_names(before).items()
            if name == first
        }
        changed = {name: value.cpu() for name, value in bits.items() if value.any()}
        return cls(changed, *prints, **about)

    def apply(self, model: nn.Module, classes: Sequence[str] | None = None) -> nn.Module:
        """The adapted copy of the source network; refuses any other network."""
        self.refuse_other_classes(classes)
        self.refuse_other_network(Fingerprint.of(model))
        model = checked_model(model)
        adapted = _with_tensors(model, self.changed(_state(model)))
        refuse_broken_weights(adapted)
        return adapted

    def changed(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors that `apply` changes, as they are afterwards; `state` has to be the source network's.

        A tensor that several modules share is there under the name it has in each. A delta is a file that somebody may
        have made to harm: what it makes of the network has to be what it says.
        """
        changes = self._flipped(state, self.adapted)
        for name, tensor in changes.items():
            if tensor.is_floating_point() and tensor.isnan().any() and not state[name].isnan().any():
                raise FewshiftError(f"the delta makes {name} not a number in places: {AGAIN}")
            refuse_broken_tensor(name, tensor, isinstance(state[name], nn.Parameter), AGAIN)
        return changes

    def refuse_other_classes(self, classes: Sequence[str] | None) -> None:
        """An error if both the delta's classes and these are known, and differ."""
        names = checked_names(classes)
        if names is not None and self.classes is not None and names != self.classes:
            raise FewshiftError(
                f"the delta was made for classes {few(self.classes)}, not for {few(names)}: "
                "use the delta of these classes, in their order"
            )

    def refuse_other_network(self, fingerprint: Fingerprint) -> None:
        """An error unless this is the fingerprint of the source network."""
        _expect(fingerprint, self.source, "made for")

    def revert(self, model: nn.Module) -> nn.Module:
        """The source network again, bit for bit, from the adapted one."""
        _expect(Fingerprint.of(model), self.adapted, "applied to")
        return _with_tensors(model, self._flipped(_state(model), self.source))

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        header = json.dumps(self._header() | {"digest": self._digest()}, sort_keys=True)
        with whole(path) as draft:
            save_file({name: tensor.contiguous() for name, tensor in self.bits.items()}, draft, {KEY: header})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Delta:
        """Read a delta; a truncated, foreign or altered file is one clear error."""
        bits, digest, header = read_delta(path)
        try:
            header |= {key: Fingerprint(**header[key]) for key in ("source", "adapted")}
            header["classes"] = None if header["classes"] is None else tuple(header["classes"])
            delta = cls(bits, **header)
        except TypeError as error:  # fields that are not known here
            raise foreign(Path(path)) from error
        if delta._digest() != digest:
            raise FewshiftError(f"{path} was altered after it was written: {AGAIN}")
        return delta

    @property
    def title(self) -> str:
        """What it is."""
        return f"Delta of {self.method}" if self.method else "Delta"

    @property
    def facts(self) -> dict[str, str]:
        """What is known about the adaptation, the network and the file."""
        classes = None if self.classes is None else f"{len(self.classes)}: {', '.join(self.classes)}"
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        made = [f"fewshift {self.version}" if self.version else "", "" if self.seed is None else f"seed {self.seed}"]
        known = {
            "settings": settings,
            **(_outcome(self.outcome) if self.outcome is not None else {"verdict": UNKNOWN}),
            "k": "" if self.shots is None else str(self.shots),
            "classes": classes or "",
            "preprocess": ", ".join(f"{name}={value}" for name, value in (self.preprocess or {}).items()),
            "network": f"architecture {self.source.architecture[:SHOWN]}, weights {self.source.weights[:SHOWN]}",
            "changes": f"{len(self.bits)} tensors, {byte_size(self.nbytes)}",
            "made by": ", ".join(filter(None, made)),
        }
        return {name: value for name, value in known.items() if value}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that changed."""
        return sum(tensor.nbytes for tensor in self.bits.values())

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON knows it."""
        return self._header() | {"tensors": sorted(self.bits), "bytes": self.nbytes}

    def _header(self) -> dict[str, Any]:
        about = asdict(replace(self, bits={}))
        del about["bits"]
        if self.outcome is None:  # as files were written before there was one
            del about["outcome"]
        return {"format": FORMATS[self.outcome is not None]} | about

    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for name, tensor in sorted(self.bits.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(bytes_of(tensor))
        return digest.hexdigest()

    def _flipped(self, state: Mapping[str, Any], wanted: Fingerprint) -> dict[str, Tensor]:
        """The tensors that differ on the other side, if they make the network with that fingerprint."""
        first = _first_names(state)
        for name, bits in self.bits.items():
            if first.get(name) != name or not _is_bits_of(state[name], bits):
                raise FewshiftError(
                    f"the delta has {name} as {str(bits.dtype).removeprefix('torch.')} of shape {tuple(bits.shape)}, "
                    f"which is no change of this network: {AGAIN}"
                )
        flipped = {name: _xor(state[name], bits) for name, bits in self.bits.items()}
        changes = {name: flipped[first[name]] for name in first if first[name] in flipped}
        if Fingerprint.of_state({name: changes.get(name, state[name]) for name in state}) != wanted:
            raise FewshiftError(
                f"the delta makes another network than its fingerprint says, so it was altered: {AGAIN}"
            )
        return changes


def apply(model: nn.Module, delta: Delta | str | Path, classes: Sequence[str] | None = None) -> nn.Module:
    """The adapted copy of `model`; `delta` may be a file. `classes`, if given, must be the delta's."""
    return _loaded(delta).apply(model, classes)


def revert(model: nn.Module, delta: Delta | str | Path) -> nn.Module:
    """The source network again, bit for bit, from the adapted one."""
    return _loaded(delta).revert(model)


def _loaded(delta: Delta | str | Path) -> Delta:
    return delta if isinstance(delta, Delta) else Delta.load(delta)


def _expect(fingerprint: Fingerprint, wanted: Fingerprint, relation: str) -> None:
    if fingerprint.architecture != wanted.architecture:
        raise FewshiftError(
            f"the network has other tensors than the one this delta was {relation}: "
            "use the same architecture and number of classes"
        )
    if fingerprint.weights != wanted.weights:
        raise FewshiftError(
            f"the network has the same architecture but other weights than the one this delta was {relation}: "
            "load exactly those weights"
        )


def _with_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a network in evaluation mode, with some tensors in the place of its own."""
    refuse_foreign_state(model)
    result = answering(copy.deepcopy(model))
    state = result.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    return result


def _is_bits_of(tensor: Tensor, bits: Tensor) -> bool:
    expected = bits_of(tensor)
    return bits.dtype == expected.dtype and bits.shape == expected.shape


def _xor(tensor: Tensor, bits: Tensor) -> Tensor:
    """A tensor with some of its bits flipped."""
    return (bits_of(tensor) ^ bits.to(tensor.device)).view(tensor.dtype).view(tensor.shape)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """The state of a network as it is now: parameters themselves, and copies of buffers, which may count."""
    parameters = {id(parameter) for parameter in model.parameters()}
    kept: dict[int, Any] = {}
    state = {}
    for name, value in _state(model).items():
        own = value if id(value) in parameters or not isinstance(value, Tensor) else value.clone()
        state[name] = kept.setdefault(id(value), own)
    return state


def _state(model: nn.Module) -> dict[str, Any]:
    """The state of a network in which a tensor that several modules share is one object."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return state


def _first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """For every tensor its first name: a module registered twice, or a tensor of two modules, changes once.

    What is no tensor, or a quantised one, no method changes.
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(value), name)
        for name, value in state.items()
        if isinstance(value, Tensor) and not value.is_quantized
    }


def _outcome(outcome: Mapping[str, Any]) -> dict[str, str]:
    """The verdict and what it rests on, each in a few words."""
    gain = outcome.get("gain")
    facts = {
        "chosen": outcome.get("chosen") or "",
        "verdict": f"{'accepted' if outcome['accepted'] else 'rejected'} (rule: {outcome['rule']})",
        "evidence": outcome.get("missing") or "",
        "but": outcome.get("weakness") or "",
        "learned from": ", ".join(
            f"{outcome[kind]:,} {kind} images" for kind in ("labelled", "unlabelled") if outcome.get(kind)
        ),
    }
    if gain is not None:
        facts["gain"] = f"{gain['point']:+.1f} points, {100 * gain['level']:.0f} % interval "
        facts["gain"] += f"{gain['low']:+.1f} to {gain['high']:+.1f}"
        facts["evidence"] = f"{gain['images']} held-out images: {gain['before']:.1f} % right before, "
        facts["evidence"] += f"{gain['after']:.1f} % after"
    order = ("chosen", "verdict", "gain", "evidence", "but", "learned from")
    return {name: facts[name] for name in order if facts.get(name)}
