"""Lines on a full disk: all of them, or none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fewshift.files.appending import append_to, append_whole, disk_cure
from tests.helpers.disk import room_for


def test_what_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append_to(file, b"first\n")
    with room_for(10_000), pytest.raises(OSError, match="too large"):
        append_to(file, b"x" * 20_000)
    assert file.read_bytes() == b"first\n"
    append_to(file, b"second\n")
    assert file.read_bytes() == b"first\nsecond\n"


def test_a_system_that_takes_a_few_bytes_at_a_time_gets_all_of_them(tmp_path: Path, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))
    append_to(tmp_path / "lines", b"a line of some length\n")
    assert (tmp_path / "lines").read_bytes() == b"a line of some length\n"


def test_an_interrupt_leaves_no_half_of_a_line(tmp_path: Path, monkeypatch) -> None:
    write = os.write
    file = os.open(tmp_path / "lines", os.O_RDWR | os.O_CREAT)

    def interrupted(file: int, content: bytes) -> int:
        if content.startswith(b"half"):
            return write(file, content[:4])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        append_whole(file, b"half a line\n")
    os.close(file)
    assert (tmp_path / "lines").read_bytes() == b""


@pytest.mark.parametrize(("number", "cure"), [(errno.ENOSPC, "free some space"), (errno.EACCES, "choose another")])
def test_the_cure_is_room_where_room_is_missing(number: int, cure: str) -> None:
    assert disk_cure(OSError(number, os.strerror(number)), "choose another") == cure
