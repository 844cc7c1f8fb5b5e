"""What a training leaves on disk: weights and a card after every epoch, and what is needed to go on from there.

Each file appears whole or not at all (`fewshift.files.whole`): a kill or a full disk leaves the last good one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.files import whole


@dataclass(frozen=True)
class Checkpoint:
    """Where a training is kept: `w.safetensors`, its card `w.json`, and `w.resume` until the last epoch is done.

    `facts` is what the card says from the beginning. `decides` names those on which the weights depend: a training
    is not resumed with others.
    """

    file: Path
    facts: Mapping[str, Any]
    decides: tuple[str, ...] = ()

    @property
    def card(self) -> Path:
        """The file that tells what the weights are."""
        return self.file.with_suffix(".json")

    @property
    def state(self) -> Path:
        """The file from which a training goes on."""
        return self.file.with_suffix(".resume")

    def write(self, model: nn.Module, found: Mapping[str, Any]) -> None:
        """Write the weights, and a card that also says what was found out."""
        from safetensors.torch import save

        # copies, so that tensors shared by two layers are written twice; in the ordinary layout
        tensors = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in model.state_dict().items()
        }
        weights = save(tensors, metadata={"made by": "fewshift train"})
        self._put({self.card: self._told(found), self.file: weights})

    def describe(self, found: Mapping[str, Any]) -> None:
        """Write the card alone."""
        self._put({self.card: self._told(found)})

    def weights(self) -> dict[str, Tensor]:
        """The weights that were written last."""
        from safetensors.torch import load_file

        return dict(load_file(self.file))

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write what is needed to go on."""
        buffer = io.BytesIO()
        torch.save({**state, "run": json.dumps(self._run())}, buffer)
        self._put({self.state: buffer.getvalue()})

    def kept(self) -> dict[str, Any] | None:
        """What an interrupted training left; None if there is none, one sentence if it was another training."""
        if not self.state.is_file():
            return None
        try:
            state = torch.load(self.state, map_location="cpu", weights_only=True)
            run = json.loads(state["run"])
        except Exception as error:  # readers raise whatever a broken file leads them to
            raise FewshiftError(
                f"{self.state} is damaged ({type(error).__name__}): remove it to begin again"
            ) from error
        self._check_same(run)
        return dict(state)

    def finished(self) -> dict[str, Any] | None:
        """The card of this very training if it is done."""
        try:
            card = json.loads(self.card.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(card, dict) or not card.get("finished") or not self.file.is_file() or self.state.exists():
            return None
        return card if {key: card.get(key) for key in self.decides} == self._run() else None

    def close(self) -> None:
        """Remove what was needed to go on: the training is done."""
        self.state.unlink(missing_ok=True)

    def _run(self) -> dict[str, Any]:
        """The deciding facts as JSON gives them back."""
        return dict(json.loads(json.dumps({key: self.facts.get(key) for key in self.decides})))

    def _check_same(self, run: Mapping[str, Any]) -> None:
        then, now = _flat(run), _flat(self._run())
        for key in [*now, *then]:
            if then.get(key) != now.get(key):
                raise FewshiftError(
                    f"the training in {self.state} has {key} {then.get(key)!r} and this one {now.get(key)!r}: "
                    "resume it as it was begun, or remove the file"
                )

    def _told(self, found: Mapping[str, Any]) -> bytes:
        return json.dumps({**self.facts, **found}, indent=1).encode()

    def _put(self, files: Mapping[Path, bytes]) -> None:
        """All of these files, or none: they are written in full before the first one takes its place."""
        path = self.file
        try:
            with ExitStack() as drafts:
                for path, data in files.items():
                    drafts.enter_context(whole(path)).write_bytes(data)
        except OSError as error:
            kept = "the last good checkpoint is kept" if self.file.exists() else "there is no checkpoint yet"
            resume = ", then go on with --resume" if self.state.exists() else ""
            raise FewshiftError(f"cannot write {path}: {error.strerror}, {kept}: make room{resume}") from error


def fill(model: nn.Module, state: Mapping[str, Tensor], classes: int, name: str, arch: str) -> None:
    """Load weights into a network; the head is left as it is if the weights have another number of classes.

    Weights of a classifier also fill the encoder of a segmentation network, if they have all of it. Otherwise
    everything has to fit, and the first tensor that does not is named.
    """
    own = model.state_dict()
    encoder = getattr(model, "encoder", None)
    if isinstance(encoder, nn.Module) and not any(key.startswith("encoder.") for key in state):
        own = _as_in_library(encoder.state_dict(), state)
        parts = {_first(key) for key in own}
        state = {key: it for key, it in state.items() if _first(key) in parts}  # without the classifier's top
        classes = -1  # an encoder has no head
    kept = {key for key, it in own.items() if key in state and _is_other_head(it, state[key], classes)}
    counters = {key for key in own if key not in state and key.endswith("num_batches_tracked")}
    for key, tensor in own.items():
        found = f"is {tuple(state[key].shape)}" if key in state else "is missing"
        if key not in kept | counters and (key not in state or state[key].shape != tensor.shape):
            raise _other(name, arch, f"{key} {found}, {tuple(tensor.shape)} expected")
    if unknown := [key for key in state if key not in own]:
        raise _other(name, arch, f"{unknown[0]} is not known there")
    with torch.no_grad():
        for key in own.keys() - kept - counters:
            own[key].copy_(state[key])


def _other(name: str, arch: str, fact: str) -> FewshiftError:
    return FewshiftError(f"{name} is a checkpoint of another architecture than {arch}: {fact}: name its own --arch")


def _as_in_library(encoder: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an encoder under the names that its library has, before some of which it puts "model."."""
    prefix = "" if any(key in state for key in encoder) else "model."
    return {key.removeprefix(prefix): it for key, it in encoder.items()}


def _first(key: str) -> str:
    return key.partition(".")[0]


def _is_other_head(own: Tensor, found: Tensor, classes: int) -> bool:
    """Whether two tensors differ in the number of classes alone."""
    return own.shape != found.shape and own.shape[:1] == (classes,) and own.shape[1:] == found.shape[1:]


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested facts under one name: what a recipe says about lr is "recipe lr"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{before}{key} ") if isinstance(value, Mapping) else {before + key: value}
    return flat
