"""What a training leaves on disk: weights and a card after every epoch, and what is needed to go on from there.

Each file appears whole or not at all (`fewshift.core._files.whole`): a kill or a full disk leaves the last good one.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from fewshift.core._files import UnwrittenError, whole
from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_json, read_json


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

    @property
    def lock(self) -> Path:
        """The file that is there while a training writes the others."""
        return self.file.resolve().with_suffix(".lock")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training into the same file; what one that died left behind does not."""
        lock = FileLock(self.lock, blocking=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise FewshiftError(
                f"another training writes {self.file}: wait until it is done, or choose another --out"
            ) from error
        except OSError as error:
            raise FewshiftError(f"cannot write {self.lock}: {error.strerror}: choose another --out") from error
        try:
            yield
        finally:
            self.lock.unlink(missing_ok=True)
            lock.release()

    def check_free(self) -> None:
        """Raise one sentence when another training, or this one, is already finished here, or nobody knows what is."""
        if not self.file.exists() and not self.card.exists():
            return
        card = self._read_card()
        instead = "choose another --out, or write over it with --overwrite"
        if card is None:
            raise FewshiftError(f"{self.file} or its card is there and does not say how it was trained: {instead}")
        if difference := self._difference(card):
            key, then, now = difference
            raise FewshiftError(f"the training in {self.file} has {key} {then!r} and this one {now!r}: {instead}")
        if card.get("finished") and self.file.is_file():
            raise FewshiftError(f"the training in {self.file} is finished: train it again with --overwrite")

    def write(self, model: nn.Module, results: Mapping[str, Any]) -> None:
        """Write the weights, and a card that adds these results to the facts."""
        from safetensors.torch import save

        # copies, so that tensors shared by two layers are written twice; in the ordinary layout
        tensors = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in model.state_dict().items()
        }
        weights = save(tensors, metadata={"made by": "fewshift train"})
        self._put({self.card: self._card_text(results), self.file: weights})

    def describe(self, results: Mapping[str, Any]) -> None:
        """Write the card alone."""
        self._put({self.card: self._card_text(results)})

    def weights(self) -> dict[str, Tensor]:
        """The weights that were written last; one sentence if they cannot be read."""
        from safetensors.torch import load_file

        try:
            return dict(load_file(self.file))
        except Exception as error:  # readers raise whatever a broken file leads them to
            fault = "damaged" if self.file.is_file() else "missing"
            raise FewshiftError(
                f"the weights {self.file} that go with {self.state} are {fault}: begin anew with --overwrite"
            ) from error

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write what is needed to go on, after a line that tells whether it is still what was written."""
        buffer = io.BytesIO()
        torch.save({**state, "run": json.dumps(self._run())}, buffer)
        content = buffer.getvalue()
        self._put({self.state: _digest(content) + content})

    def kept(self) -> dict[str, Any] | None:
        """What an interrupted training left; None if there is none, one sentence if it was another training."""
        if not self.state.is_file():
            return None
        try:
            content = _checked(self.state.read_bytes())
            state = dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
            run = dict(parsed_json(state["run"], self.state, "remove it"))
        except Exception as error:  # readers raise whatever a broken file leads them to
            raise self.damaged() from error
        if difference := self._difference(run):
            key, then, now = difference
            raise FewshiftError(
                f"the training in {self.state} has {key} {then!r} and this one {now!r}: "
                "resume it as it was begun, choose another --out, or begin anew with --overwrite"
            )
        return state

    def damaged(self) -> FewshiftError:
        """The sentence about a resume state from which nothing can go on."""
        return FewshiftError(f"the resume state {self.state} is damaged: remove it and begin anew with --overwrite")

    def finished(self) -> dict[str, Any] | None:
        """The card of this very training if it is done."""
        card = self._read_card()
        if card is None or not card.get("finished") or not self.file.is_file() or self.state.exists():
            return None
        return None if self._difference(card) else card

    def close(self) -> None:
        """Remove what is needed to go on: the training is done, or begun anew."""
        self.state.unlink(missing_ok=True)

    def _run(self) -> dict[str, Any]:
        """The deciding facts as JSON gives them back."""
        return dict(json.loads(json.dumps({key: self.facts.get(key) for key in self.decides})))

    def _read_card(self) -> dict[str, Any] | None:
        try:
            card = read_json(self.card, self.card, "mend or remove it")
        except FewshiftError:
            return None
        return card if isinstance(card, dict) else None

    def _difference(self, run: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """The first deciding fact that another training has otherwise: its name, theirs, and ours."""
        then, now = _flat({key: run.get(key) for key in self.decides}), _flat(self._run())
        keys = (key for key in [*now, *then] if then.get(key) != now.get(key))
        return next(((key, then.get(key), now.get(key)) for key in keys), None)

    def _card_text(self, results: Mapping[str, Any]) -> bytes:
        return json.dumps({**self.facts, **results}, indent=1).encode()

    def _put(self, files: Mapping[Path, bytes]) -> None:
        """All of these files, or none: they are written in full before the first one takes its place."""
        try:
            with ExitStack() as drafts:
                for path, data in files.items():
                    drafts.enter_context(whole(path)).write_bytes(data)
        except UnwrittenError as error:
            kept = "the last good checkpoint is kept" if self.file.exists() else "there is no checkpoint yet"
            resume = ", then go on with --resume" if self.state.exists() else ""
            raise FewshiftError(
                f"cannot write {error.path}: {error.reason}, {kept}: free some space{resume}"
            ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _checked(written: bytes) -> bytes:
    """What stands after the line that tells its digest."""
    digest, line, content = written.partition(b"\n")
    if digest + line != _digest(content):
        raise ValueError("other bytes than were written")
    return content


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested facts under one name: what a recipe says about lr is "recipe lr"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{before}{key} ") if isinstance(value, Mapping) else {before + key: value}
    return flat
