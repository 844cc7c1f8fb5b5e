"""A folder of sites: one delta for each place, whose name is that of its file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fewshift.core._arguments import checked_model, checked_names, checked_path
from fewshift.core.delta import Delta, Fingerprint, snapshot
from fewshift.errors import FewshiftError
from fewshift.models.cards import known_card

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SiteFacts:
    """What the file of a site says, and whether it fits a network."""

    name: str
    file: Path
    bytes: int
    date: datetime  # of the file: deltas store none
    method: str | None = None  # this and what follows is not known if the file cannot be read
    shots: int | None = None
    classes: tuple[str, ...] | None = None
    outcome: Mapping[str, Any] | None = None  # of the adaptation, as the delta stores it
    fits: bool | None = None  # None if no network was given
    problem: str | None = None  # why the file cannot be used

    @property
    def accepted(self) -> bool | None:
        """The verdict, where it is known."""
        return None if self.outcome is None else bool(self.outcome["accepted"])

    @property
    def gain(self) -> Mapping[str, Any] | None:
        """The gain with its interval, where there was evidence."""
        gain: Mapping[str, Any] | None = None if self.outcome is None else self.outcome.get("gain")
        return gain

    @property
    def chosen(self) -> str | None:
        """What a method that chooses has chosen."""
        return None if self.outcome is None else self.outcome.get("chosen")


@dataclass(frozen=True)
class Fit:
    """What a delta has to fit: a network's tensors, and its classes where they are known."""

    state: Mapping[str, Tensor]
    fingerprint: Fingerprint
    classes: tuple[str, ...] | None

    @classmethod
    def to(cls, model: nn.Module, classes: Sequence[str] | None = None) -> Fit:
        """The network's own; `classes` by default those on its card."""
        state = snapshot(checked_model(model))
        return cls(state, Fingerprint.of_state(state), checked_names(classes) or known_card(model).classes)

    def changes(self, delta: Delta) -> dict[str, Tensor]:
        """The tensors that are different with the delta; an error if it was made for another network or other classes.

        Also if it makes another network than it says, which takes a fingerprint: about 0.1 s for a ResNet-18.
        """
        delta.refuse_other_network(self.fingerprint)
        delta.refuse_other_classes(self.classes)
        return delta.changed(self.state)


def site_folder(folder: str | Path) -> dict[str, Path]:
    """The deltas of a folder by the names of their sites, in alphabetical order; there has to be one."""
    path = checked_path(folder, "the folder of sites")
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise FewshiftError(f"the folder of sites {path} {what}: give a folder with one delta for each site")
    found = (file for file in path.iterdir() if file.suffix == SUFFIX and file.is_file())
    files = {file.stem: file for file in sorted(found) if not file.name.startswith(".")}
    if not files:
        raise FewshiftError(
            f"there is no delta (*{SUFFIX}) in {path}: write some with `fewshift adapt --out {path / 'NAME'}{SUFFIX}`"
        )
    return files


def refuse_unknown(name: Any, known: Sequence[str], folder: Path) -> None:
    """An error, with the name that was probably meant, if there is no such site."""
    if name in known:
        return
    if not isinstance(name, str):
        raise FewshiftError(f"the name of a site is of type {type(name).__name__}: give the name of its file as text")
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(known[:5])}{', ...' * (len(known) > 5)}"
    raise FewshiftError(f"there is no site '{name}' in {folder}: {hint}")


def read_site(name: str, file: Path, fit: Fit) -> tuple[Delta, dict[str, Tensor]]:
    """The delta of a site and the tensors it changes, or one sentence that names the site if it cannot be used."""
    try:
        delta = Delta.load(file)
        return delta, fit.changes(delta)
    except FewshiftError as error:
        raise FewshiftError(f"site '{name}': {error}") from error


def site_facts(folder: str | Path, fit: Fit | None = None) -> tuple[SiteFacts, ...]:
    """What each file of the folder says; files that cannot be used are among them, with the reason."""
    return tuple(_facts(name, file, fit) for name, file in site_folder(folder).items())


def _facts(name: str, file: Path, fit: Fit | None) -> SiteFacts:
    stat = file.stat()
    known: dict[str, Any] = {"bytes": stat.st_size, "date": datetime.fromtimestamp(stat.st_mtime).astimezone()}
    try:
        delta = Delta.load(file)
    except FewshiftError as error:
        return SiteFacts(name, file, **known, fits=False, problem=str(error))
    known |= {"method": delta.method, "shots": delta.shots, "classes": delta.classes, "outcome": delta.outcome}
    try:
        if fit is not None:
            fit.changes(delta)
    except FewshiftError as error:
        return SiteFacts(name, file, **known, fits=False, problem=str(error))
    return SiteFacts(name, file, **known, fits=None if fit is None else True)
