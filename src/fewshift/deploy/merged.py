"""The adapted network as ordinary weights, for whoever knows nothing of deltas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from fewshift.core._arguments import checked_path
from fewshift.core._files import whole
from fewshift.core.delta import Delta
from fewshift.errors import FewshiftError
from fewshift.models.card_files import is_card
from fewshift.models.cards import in_library, known_card

PICKLED = (".pt", ".pth")  # what torch.load reads


def merge(model: nn.Module, delta: Delta | str | Path, out: str | Path, *, undo: bool = False) -> Path:
    """Write the adapted network as ordinary weights with a card beside them; with `undo`, the source network's.

    Files that the network or the delta came from are not written over.
    """
    out, card_file = _with_card(out)
    read = () if isinstance(delta, Delta) else (Path(delta),)
    delta = delta if isinstance(delta, Delta) else Delta.load(delta)
    network = delta.revert(model) if undo else delta.apply(model)
    known = known_card(model)
    came_from = [Path(known.weights)] if known.weights else []
    kept = {path.resolve() for path in (*came_from, *filter(None, [known.path]), *read)}
    for path in (out, card_file):
        if path.resolve() in kept:
            raise FewshiftError(f"{path} is a file that the network or the delta came from: choose another file")
    if card_file.exists() and not is_card(card_file):
        raise FewshiftError(f"{card_file}, where the card goes, is there already and is no card: choose another name")
    arch = known.arch if known.arch and in_library(known.arch) else None  # a card names no code to run
    card = {"arch": arch, "classes": delta.classes, "algorithm": known.algorithm, **(delta.preprocess or {})}
    for name, value in network.state_dict().items():
        if not isinstance(value, Tensor):
            raise FewshiftError(
                f"the network keeps a {type(value).__name__} in its state as '{name}', and a file of weights holds "
                "tensors alone: keep the delta, and apply it where the network runs"
            )
    with whole(out) as draft:
        if out.suffix in PICKLED:
            torch.save(network.state_dict(), draft)
        else:
            save_model(network, str(draft))
        with whole(card_file) as card_draft:
            text = json.dumps({key: value for key, value in card.items() if value is not None}, indent=1)
            card_draft.write_text(text, encoding="utf-8")
    return out


def _with_card(out: str | Path) -> tuple[Path, Path]:
    """The file of weights and the card beside it, or one sentence if they would be one file or none."""
    out = checked_path(out, "the output")
    if out.name in ("", "..") or out.suffix not in (*PICKLED, ".safetensors"):
        raise FewshiftError(f"cannot write weights to {str(out)!r}: name a file such as new.safetensors or new.pt")
    return out, out.with_suffix(".json")
