"""Parts on a real Ray: when workers are killed in the middle, nothing is lost and nothing is there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

import fewshift
from fewshift import PartPredictions
from tests.helpers.fleet import OnceDeadly, OnceDeadlySteps
from tests.helpers.pictures import picture, save

pytestmark = pytest.mark.slow
COUNT = 24


def test_killed_readers_and_predictors_lose_nothing_and_repeat_nothing(ray: object, tmp_path: Path, capfd: Any) -> None:
    photos = tmp_path / "photos"
    for index in range(COUNT):
        save(photos / f"{index:02}.png", picture(8, 8, seed=index))
    save(photos / "13.png", np.full((8, 8, 3), (1, 2, 3)))  # whoever reads it first is killed
    (photos / "20.png").write_bytes(b"no image")
    traps = tmp_path / "reader", tmp_path / "predictor"
    model, steps = OnceDeadly(traps[1], after=3).eval(), OnceDeadlySteps(traps[0])

    def predict(engine: str, **options: Any) -> PartPredictions:
        result = fewshift.predict(
            model, photos, preprocess=steps, out=tmp_path / engine, engine=engine, batch_size=2, part_size=7, **options
        )
        assert isinstance(result, PartPredictions)
        return result

    here = predict("local")
    assert all(trap.exists() for trap in traps)
    there = predict("ray")
    assert not any(trap.exists() for trap in traps)  # both were killed
    assert there.to_json() == here.to_json() | {"folder": str(tmp_path / "ray")}
    assert parquet.read_table(tmp_path / "ray").equals(parquet.read_table(tmp_path / "local"))
    (tmp_path / "ray/part-00002.parquet").unlink()
    again = predict("ray", resume=True)
    assert (again.predicted, again.earlier, again.unreadable) == (6, 17, 1)
    assert parquet.read_table(tmp_path / "ray").equals(parquet.read_table(tmp_path / "local"))
    assert capfd.readouterr() == ("", "")
