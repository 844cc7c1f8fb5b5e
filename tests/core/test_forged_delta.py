"""Deltas that were made to harm, with a digest that is right: everywhere a delta enters, they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import fewshift
from fewshift import Delta, FewshiftError, Sites
from fewshift.core.delta import Fingerprint
from fewshift.deploy.site_folder import Fit, site_facts
from tests.helpers.networks import Shared, make_tiny, same_state, state, unsettle

NAME = "bn1.weight"


def honest() -> Delta:
    about = {"settings": {}, "version": "1", "classes": ("ant", "bee", "cat")}
    outcome = {"accepted": True, "rule": "gain", "labelled": 3, "unlabelled": 0}
    return Delta.between(make_tiny(), make_tiny(seed=3), method="lccs", outcome=outcome, **about)


def with_bits(**bits: torch.Tensor) -> Delta:
    delta = honest()
    return replace(delta, bits=delta.bits | {name.replace("__", "."): value for name, value in bits.items()})


def not_numbers() -> Delta:
    """With a fingerprint of its own that is right."""
    adapted = make_tiny(seed=3)
    with torch.no_grad():
        adapted.bn1.weight[2] = torch.nan
    return Delta.between(make_tiny(), adapted)


FORGED: dict[str, Callable[[], Delta]] = {
    "a shape that is broadcast": lambda: with_bits(bn1__weight=torch.ones(1, dtype=torch.int32)),
    "another shape": lambda: with_bits(bn1__weight=torch.ones(3, 2, dtype=torch.int32)),
    "a shape that broadcasts the network": lambda: with_bits(bn1__weight=torch.ones(5, 6, dtype=torch.int32)),
    "another type": lambda: with_bits(bn1__weight=torch.ones(6, dtype=torch.int64)),
    "a smaller type": lambda: with_bits(bn1__weight=torch.ones(6, dtype=torch.uint8)),
    "a tensor that is not there": lambda: with_bits(bn9__weight=torch.ones(6, dtype=torch.int32)),
    "other values": lambda: with_bits(bn1__weight=torch.ones(6, dtype=torch.int32)),
    "NaN": lambda: with_bits(bn1__weight=torch.full((6,), 0x7FC00000, dtype=torch.int32)),
    "NaN with a fingerprint of its own": not_numbers,
    "a tensor less": lambda: replace(
        honest(), bits={name: bits for name, bits in honest().bits.items() if name != NAME}
    ),
    "another fingerprint": lambda: replace(honest(), adapted=Fingerprint(honest().adapted.architecture, "0" * 64)),
}


def merge(file: Path) -> Any:
    return fewshift.merge(make_tiny(), file, file.with_name("merged.safetensors"))


def predict(file: Path) -> Any:
    return fewshift.predict(make_tiny(), [torch.zeros(3, 8, 8)], delta=file)


def sites(file: Path) -> Any:
    return Sites(make_tiny(), file.parent)[file.stem](torch.zeros(2, 3, 8, 8))


def export(file: Path) -> Any:
    return fewshift.export(make_tiny(), file.with_suffix(".onnx"), delta=file)


DOORS: dict[str, Callable[[Path], Any]] = {
    "apply": lambda file: fewshift.apply(make_tiny(), file),
    "merge": merge,
    "predict": predict,
    "evaluate": lambda file: fewshift.evaluate(
        make_tiny(), (torch.zeros(3, 3, 8, 8), torch.tensor([0, 1, 2])), delta=file
    ),
    "sites": sites,
    "export": export,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())
@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
def test_a_forged_delta_is_refused_at_every_door(tmp_path: Path, forged, door) -> None:
    file = forged().save(tmp_path / "camera.safetensors")
    with pytest.raises(FewshiftError, match="make it again with `fewshift adapt`") as caught:
        door(file)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["camera.safetensors"]


def test_reverting_a_forged_delta_is_refused() -> None:
    source, adapted = make_tiny(), make_tiny(seed=3)
    delta = Delta.between(source, adapted)
    forged = replace(delta, bits=delta.bits | {NAME: torch.ones(6, dtype=torch.int32)})
    with pytest.raises(FewshiftError, match="another network than its fingerprint says"):
        forged.revert(adapted)
    with pytest.raises(FewshiftError, match="no change of this network"):
        replace(delta, bits=delta.bits | {NAME: torch.ones(1, dtype=torch.int32)}).revert(adapted)


def test_the_list_of_sites_says_that_a_forged_delta_does_not_fit(tmp_path: Path) -> None:
    honest().save(tmp_path / "good.safetensors")
    with_bits(bn1__weight=torch.ones(6, dtype=torch.int32)).save(tmp_path / "forged.safetensors")
    facts = {site.name: site for site in site_facts(tmp_path, Fit.to(make_tiny()))}
    assert facts["good"].fits
    assert not facts["forged"].fits
    assert "fingerprint" in facts["forged"].problem


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["fewshift"])


WRONG_HEADERS: dict[str, Any] = {
    "method": {"method": 5},
    "settings": {"settings": []},
    "classes in one word": {"classes": "abc"},
    "classes of numbers": {"classes": [1, 2, 3]},
    "preprocess": {"preprocess": "resize"},
    "seed": {"seed": "one"},
    "shots": {"shots": -1},
    "version": {"version": None},
    "source": {"source": "here"},
    "more in a fingerprint": {"source": {"architecture": "a", "weights": "b", "more": "c"}},
    "adapted": {"adapted": {"architecture": 1, "weights": 2}},
    "outcome": {"outcome": 5},
    "rule": {"outcome": {"accepted": True}},
    "gain": {"outcome": {"accepted": True, "rule": "x", "gain": {"point": "much"}}},
    "labelled": {"outcome": {"accepted": True, "rule": "x", "labelled": "many"}},
    "digest": {"digest": 5},
    "format": {"format": "two"},
    "another field": {"colour": "red"},
}


@pytest.mark.parametrize("wrong", WRONG_HEADERS.values(), ids=WRONG_HEADERS.keys())
def test_a_header_of_wrong_types_is_no_delta(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = honest().save(tmp_path / "d.safetensors")
    save_file(honest().bits, file, {"fewshift": json.dumps(header_of(file) | wrong)})
    with pytest.raises(FewshiftError, match=r"d\.safetensors is not a whole fewshift delta: make it again"):
        Delta.load(file)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500, '{"seed": ' + "9" * 5000 + "}", "5", ""]
)
def test_a_header_that_breaks_readers_is_one_sentence(tmp_path: Path, text: str) -> None:
    save_file(honest().bits, tmp_path / "d.safetensors", {"fewshift": text})
    with pytest.raises(FewshiftError, match=r"d\.safetensors is not (JSON|a whole)") as caught:
        Delta.load(tmp_path / "d.safetensors")
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_tensors_that_are_no_bits_are_no_delta(tmp_path: Path) -> None:
    file = honest().save(tmp_path / "d.safetensors")
    save_file({NAME: torch.ones(6)}, file, {"fewshift": json.dumps(header_of(file))})
    with pytest.raises(FewshiftError, match="is not a whole fewshift delta"):
        Delta.load(file)


def test_a_module_that_is_registered_twice_changes_once_and_reverts() -> None:
    class Twice(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.other_name = self.bn

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return unsettle(Twice(), seed)

    source, adapted = made(0), made(1)
    delta = Delta.between(source, adapted)
    assert not any(name.startswith("other_name") for name in delta.bits)
    assert same_state(state(delta.apply(source)), state(adapted))
    assert same_state(state(delta.revert(adapted)), state(source))


class Counting(nn.Module):
    """A network that counts its passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_tiny()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.inner(images)


def test_a_network_that_counts_its_passes_opens_one_site_after_the_other(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 4)):
        adapted = Counting()
        adapted.inner = make_tiny(seed=seed)
        Delta.between(Counting(), adapted).save(tmp_path / f"{name}.safetensors")
    sites, images = Sites(Counting(), tmp_path), torch.ones(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(sites["a"](images), make_tiny(seed=3)(images))
        assert torch.allclose(sites["b"](images), make_tiny(seed=4)(images))
