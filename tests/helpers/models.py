"""A tiny network with a name, cards beside its weights, and the sentences with which loading is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.models import libraries as models

NAME = "timm:test_resnet"
SEVEN = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
HALF = Preprocess(144, 128, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic")


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def refused(pattern: str, *arguments: object, **keywords: object) -> str:
    """The one sentence with which `load` refuses."""
    with pytest.raises(FewshiftError, match=pattern) as caught:
        models.load(*arguments, **keywords)  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def card(weights: Path, **content: object) -> None:
    weights.with_suffix(".json").write_text(json.dumps(content))
