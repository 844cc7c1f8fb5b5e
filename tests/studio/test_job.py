"""Processes of their own: followed, stopped, and a crash is a sentence."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch import nn

from fewshift.errors import FewshiftError
from fewshift.studio.errand import DONE, FAILED, RUNNING, STOPPED, Errand, preload
from fewshift.studio.parcel import Parcel
from fewshift.studio.tasks import NO_EXPORT, ExportTask
from tests.helpers.networks import make_tiny
from tests.helpers.studio import Crashes, IsKilled, Refuses, Sleeps, Speaks

SOON = 60.0


@pytest.fixture(scope="module", autouse=True)
def _preloaded(network: nn.Module) -> None:
    preload(network)


def ended(job: Errand) -> Errand:
    job.wait(SOON)
    return job


def test_messages_arrive_in_order_and_the_process_is_another() -> None:
    heard: list[tuple[object, ...]] = []
    messages = (("share", 0.25, 0.5), ("stage", "folds, 1 of 4"), ("result", {"gain": 3}))
    job = ended(Errand("adapting", Speaks(messages), heard.append))
    assert tuple(heard) == messages
    assert (job.state, job.sentence, job.result, job.stage) == (DONE, "", {"gain": 3}, "folds, 1 of 4")
    assert job.remaining.share == 0.25
    assert job.pid != os.getpid()


def test_a_users_mistake_is_its_own_sentence() -> None:
    job = ended(Errand("adapting", Refuses()))
    assert (job.state, job.sentence) == (FAILED, "there are no labels: label some")


def test_a_crash_is_a_sentence_and_its_details_are_in_a_file(tmp_path: Path) -> None:
    job = ended(Errand("adapting", Crashes(), log=tmp_path / "crashes.log"))
    assert job.state == FAILED
    assert (
        job.sentence == f"adapting failed (ZeroDivisionError: by zero): the details are in {tmp_path / 'crashes.log'}"
    )
    assert "Traceback" in (tmp_path / "crashes.log").read_text()


def test_a_process_that_the_system_ends_is_a_sentence() -> None:
    job = ended(Errand("adapting", IsKilled()))
    assert job.state == FAILED
    assert "memory" in job.sentence


def test_a_job_can_be_stopped() -> None:
    job = Errand("adapting", Sleeps())
    while job.stage != "asleep":
        time.sleep(0.01)
    assert job.to_json()["state"] == RUNNING
    job.stop()
    assert job.state == STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(job.pid or 0, 0)


def test_a_network_that_cannot_travel_is_one_sentence() -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(FewshiftError, match="module that can be imported"):
        Parcel.of(Local(), None, ["a"])  # type: ignore[arg-type]


def test_a_network_travels_unchanged() -> None:
    tiny = make_tiny()
    model, _ = Parcel.of(tiny, None, ["a"]).unpacked()  # type: ignore[arg-type]
    assert all(model.state_dict()[name].equal(value) for name, value in tiny.state_dict().items())


@pytest.mark.parametrize("exporter", ["fewshift:no_such_function", "no_such_package:export"])
def test_a_missing_export_says_how_to_install_it(tmp_path: Path, exporter: str) -> None:
    parcel = Parcel.of(make_tiny(), None, ["a"])  # type: ignore[arg-type]
    with pytest.raises(FewshiftError, match="pip install") as refusal:
        ExportTask(parcel, tmp_path / "d.safetensors", tmp_path / "n.onnx", exporter).work(print)
    assert str(refusal.value) == NO_EXPORT
