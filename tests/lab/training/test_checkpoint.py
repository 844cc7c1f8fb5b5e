"""What a training leaves on disk, and how it goes on from there."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from fewshift import FewshiftError
from fewshift.lab.training.checkpoint import Checkpoint
from tests.helpers.networks import make_tiny, same_state, state
from tests.helpers.training import (
    RECIPE,
    StoppedError,
    make_checkpoint,
    stop_in_epoch,
)
from tests.helpers.training import run_plain as run


def test_a_training_is_not_resumed_as_another(tmp_path):
    with pytest.raises(StoppedError):
        run(checkpoint=make_checkpoint(tmp_path, seed=0), hear=stop_in_epoch(1))
    with pytest.raises(FewshiftError, match=r"has seed 0 and this one 1: resume it as it was begun"):
        run(checkpoint=make_checkpoint(tmp_path, seed=1), resume=True)
    other = replace(make_checkpoint(tmp_path, seed=0), facts={"recipe": replace(RECIPE, lr=1.0).settings(), "seed": 0})
    with pytest.raises(FewshiftError, match=r"has recipe lr 0.05 and this one 1.0"):
        run(checkpoint=other, resume=True)
    make_checkpoint(tmp_path).state.write_bytes(b"no state")
    with pytest.raises(FewshiftError, match=r"w.resume is damaged: remove it and begin anew with --overwrite"):
        run(checkpoint=make_checkpoint(tmp_path), resume=True)


def test_a_training_begun_anew_leaves_the_one_before_until_its_first_epoch_is_done(tmp_path):
    with pytest.raises(StoppedError):
        run(checkpoint=make_checkpoint(tmp_path, seed=0), hear=stop_in_epoch(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoppedError):
        run(seed=1, checkpoint=make_checkpoint(tmp_path, seed=1), hear=stop_in_epoch(0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    anew = run(seed=1, checkpoint=make_checkpoint(tmp_path, seed=1))
    assert same_state(make_checkpoint(tmp_path, seed=1).weights(), state(anew.model))
    assert same_state(state(anew.model), state(run(seed=1).model))


def test_a_resume_state_of_which_one_bit_is_another_is_one_sentence(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    with pytest.raises(StoppedError):
        run(checkpoint=checkpoint, hear=stop_in_epoch(1))
    good = checkpoint.state.read_bytes()
    for place in (0, 64, 65, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        checkpoint.state.write_bytes(bad)
        with pytest.raises(FewshiftError, match=r"the resume state .* is damaged"):
            run(checkpoint=checkpoint, resume=True)
    checkpoint.state.write_bytes(good)
    assert same_state(state(run(checkpoint=checkpoint, resume=True).model), state(run().model))


@pytest.mark.parametrize("change", [{"trainee": {}}, {"optimizer": {}}, {"epochs": [{"loss": 1.0}]}, {"epochs": 3}])
def test_a_resume_state_of_other_contents_is_one_sentence(tmp_path, change):
    checkpoint = make_checkpoint(tmp_path)
    with pytest.raises(StoppedError):
        run(checkpoint=checkpoint, hear=stop_in_epoch(1))
    checkpoint.keep({**checkpoint.kept(), **change})
    with pytest.raises(FewshiftError, match=r"the resume state .* is damaged"):
        run(checkpoint=checkpoint, resume=True)


def test_weights_are_read_to_go_on_only_where_the_best_are_kept(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    patient = replace(RECIPE, patience=3)
    with pytest.raises(StoppedError):
        run(patient, checkpoint=checkpoint, hear=stop_in_epoch(1))
    checkpoint.file.write_bytes(b"no weights")
    with pytest.raises(FewshiftError, match=r"the weights .* are damaged: begin anew with --overwrite"):
        run(patient, checkpoint=checkpoint, resume=True)
    checkpoint.file.unlink()
    with pytest.raises(FewshiftError, match=r"the weights .* are missing: begin anew with --overwrite"):
        run(patient, checkpoint=checkpoint, resume=True)
    save_file(make_tiny(5).state_dict(), checkpoint.file)
    with pytest.raises(FewshiftError, match=r"the weights .* are of another network"):
        run(patient, checkpoint=checkpoint, resume=True)
    checkpoint.file.unlink()
    resumed = run(checkpoint=checkpoint, resume=True)
    assert same_state(checkpoint.weights(), state(resumed.model))
    assert same_state(state(resumed.model), state(run().model))


def test_weights_that_are_lost_after_the_last_epoch_are_written_again(tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path)
    monkeypatch.setattr(Checkpoint, "close", lambda _: None)
    done = run(checkpoint=checkpoint)
    monkeypatch.undo()
    checkpoint.file.unlink()
    run(checkpoint=checkpoint, resume=True)
    assert same_state(checkpoint.weights(), state(done.model))
    assert checkpoint.finished() is not None


def test_a_training_into_a_file_keeps_others_out_of_it(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    checkpoint.lock.touch()  # of a process that died
    with (
        checkpoint.alone(),
        pytest.raises(FewshiftError, match=r"another training writes .*w.safetensors: wait until it is done"),
        make_checkpoint(tmp_path).alone(),
    ):
        pass
    assert not checkpoint.lock.exists()
    with checkpoint.alone():
        assert checkpoint.lock.name == "w.lock"


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    checkpoint, good = make_checkpoint(tmp_path), {}
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if good and "w.safetensors" in path.name:
            write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FewshiftError, match=f"{checkpoint.file}: No space left .*kept.*--resume"):
        run(checkpoint=checkpoint, hear_epoch=lambda *_: good.update(checkpoint.weights()))
    assert same_state(checkpoint.weights(), good)
    assert len(json.loads(checkpoint.card.read_text())["history"]) == 1  # the card is that of these weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.json", "w.resume", "w.safetensors"]
    monkeypatch.undo()
    assert same_state(state(run(checkpoint=checkpoint, resume=True).model), state(run().model))
