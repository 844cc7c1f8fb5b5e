"""A file is whole or not there; drafts of the dead go, those of the living stay; a full disk is a sentence."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fewshift.core import _files
from fewshift.core._files import LONGEST_NAME, UnwrittenError, remove_drafts, whole, writing
from fewshift.errors import FewshiftError
from tests.helpers.disk import room_for


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of folders that other tests wrote into."""
    monkeypatch.setattr(_files, "_cleared", set())


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[int]:
    """The number of another process that is in the middle of writing a file."""
    reading, telling = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child needs none
        process = os.fork()
    if not process:
        with whole(tmp_path / "a.txt") as draft:
            draft.write_text("half")
            os.write(telling, b"!")
            signal.pause()
    assert os.read(reading, 1) == b"!"
    yield process
    os.close(reading)
    os.close(telling)


def test_a_draft_of_a_living_process_stays_and_that_of_a_killed_one_goes(
    tmp_path: Path, new_process: None, writer: int
) -> None:
    (draft,) = tmp_path.iterdir()
    remove_drafts(tmp_path)
    living = draft.read_text()
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert living == "half"
    assert draft.exists()
    with whole(tmp_path / "b.txt") as other:  # another file of the same folder
        other.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


def test_drafts_of_other_programs_are_left_alone(tmp_path: Path, new_process: None) -> None:
    names = [".movie.mkv.part", "big.part", ".a.txt.k3j2h1g4.part", "notes.fewshift-1.txt"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / ".folder.fewshift-1.part").mkdir()
    (tmp_path / ".link.fewshift-1.part").symlink_to(tmp_path / "big.part")
    with whole(tmp_path / "a.txt") as draft:
        draft.write_text("new")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*names, ".folder.fewshift-1.part", ".link.fewshift-1.part", "a.txt"])


def test_two_drafts_of_one_file_do_not_disturb_each_other(tmp_path: Path, new_process: None) -> None:
    with whole(tmp_path / "a.txt") as first:
        first.write_text("first")
        remove_drafts(tmp_path)
        with whole(tmp_path / "a.txt") as second:
            second.write_text("second")
        assert (tmp_path / "a.txt").read_text() == "second"
    assert (tmp_path / "a.txt").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("letter", ["x", "ä", "\udcff"])
def test_a_name_of_any_length_that_a_file_may_have_can_be_written(tmp_path: Path, letter: str) -> None:
    name = letter * (LONGEST_NAME // len(os.fsencode(letter)))
    with whole(tmp_path / name) as draft:
        draft.write_text("new")
    assert (tmp_path / name).read_text() == "new"
    with pytest.raises(FewshiftError, match=r"has 25[67] bytes, .* at most 255: choose a shorter one"):
        whole(tmp_path / (name + letter)).__enter__()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_one_sentence_whoever_writes(tmp_path: Path) -> None:
    writers = {
        "bytes": lambda draft: draft.write_bytes(b"x" * 5000),
        "tensors": lambda draft: save_file({"a": torch.zeros(5000)}, draft),
    }
    for name, write in writers.items():
        fact = rf"cannot write .*{name}: File too large: free some space"
        with room_for(1000), pytest.raises(UnwrittenError, match=fact), whole(tmp_path / name) as draft:
            write(draft)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_block_that_is_not_about_room_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"source\.toml"), whole(tmp_path / "a.txt"):
        (tmp_path / "source.toml").read_text()


def test_an_outer_block_adds_what_to_do(tmp_path: Path) -> None:
    fact = r"^cannot write .*a\.txt: No space left on device: free some space, then go on$"
    with (
        pytest.raises(UnwrittenError, match=fact),
        writing(tmp_path / "folder", "free some space, then go on"),
        whole(tmp_path / "a.txt"),
    ):
        raise OSError(errno.ENOSPC, "whatever a library says")
