"""A fleet on a real Ray: what one process gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import fewshift
from fewshift import Delta
from tests.helpers.fleet import STEPS, fill
from tests.helpers.networks import make_tiny, same_state

pytestmark = pytest.mark.slow


def test_ray_writes_the_deltas_of_one_process(ray: object, tmp_path: Path) -> None:
    for seed, name in enumerate(("door", "gate")):
        fill(tmp_path / "places" / name, seed)
    options = {"method": "adabn", "accept": "always", "preprocess": STEPS}
    here, there = (
        fewshift.adapt_sites(make_tiny(), tmp_path / "places", tmp_path / engine, engine=engine, **options)
        for engine in ("local", "ray")
    )
    assert [(row.place, row.verdict, row.gain) for row in here.rows] == [
        (row.place, row.verdict, row.gain) for row in there.rows
    ]
    for row in here.rows:
        one, other = (Delta.load(tmp_path / engine / f"{row.place}.safetensors") for engine in ("local", "ray"))
        assert same_state(one.bits, other.bits)
