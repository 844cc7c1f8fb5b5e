"""One case after the other: a file that is nearly right, or nothing at all, for a reader that has to stand it.

A case has a name, READER:SEED:NUMBER, which decides its bytes. How many cases are tried is decided by the settings:

    FUZZ_SECONDS   for all readers together, 20 by default; time only cuts the number of cases
    FUZZ_CASES     the most for each reader, 400 by default; 0 for as many as the time allows
    FUZZ_SEED      0 by default
    FUZZ_CASE      the name of the only case to try
    FUZZ_FOLDER    where the files of failing cases are written, build/fuzz by default
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from fewshift import FewshiftError
from tests.fuzz.mutations import garbage

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
CASES = int(os.environ.get("FUZZ_CASES", "400"))
SEED = os.environ.get("FUZZ_SEED", "0")
ONLY = os.environ.get("FUZZ_CASE", "")
FAILURES = Path(os.environ.get("FUZZ_FOLDER", ROOT / "build" / "fuzz"))
PATIENCE = 20.0  # seconds of the processor that one case may take
GARBAGE = 0.1  # of the cases have nothing of a good file

Change = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class GoodFile:
    """A file that is right, and how it is changed."""

    name: str
    content: bytes
    change: Change
    refused: bool = False  # with a sentence, even as it is


@dataclass(frozen=True)
class FuzzedReader:
    """A reader of files that people give us. It reads all there is to read, and checks what it got."""

    name: str
    files: Callable[[Path], Sequence[GoodFile]]  # made in a folder that may hold more than the file
    read: Callable[[Path], Any]
    share: float = 1.0  # of the time


class HangError(BaseException):
    """A case took too long; not an Exception, so that no reader takes it for a broken file."""


def names(reader: FuzzedReader) -> Iterator[str]:
    """The names of the cases, in their order; the one that was asked for alone, if it is this reader's."""
    if ONLY:
        yield from [ONLY] if ONLY.startswith(f"{reader.name}:") else []
        return
    yield from (f"{reader.name}:{SEED}:{number}" for number in (range(CASES) if CASES else count()))


def case(name: str, files: Sequence[GoodFile]) -> tuple[str, bytes]:
    """The name and the content of the file of a case."""
    draw = Random(name)
    good = draw.choice(files)
    if draw.random() < GARBAGE:
        return good.name, garbage(draw)
    return good.name, good.change(good.content, draw)


def tried(reader: FuzzedReader, folder: Path, files: Sequence[GoodFile], name: str) -> str | None:
    """What is wrong with a reader in one case; None if nothing is."""
    file, content = case(name, files)
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    try:
        with time_limit(PATIENCE), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about broken files
            reader.read(path)
    except FewshiftError as error:
        sentence = str(error)
        return None if sentence and sentence.isprintable() else f"an error of several lines: {sentence!r}"
    except (Exception, HangError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Within the block, so much time of the processor; then a HangError."""

    def stop(*_: object) -> None:
        raise HangError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(reader: FuzzedReader, folder: Path, seconds: float) -> int:
    """Try cases until they or the time are used up, and say how many; an AssertionError names the first bad one."""
    files = reader.files(folder)
    for good in files:
        (folder / good.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / good.name).write_bytes(good.content)
        with suppress(FewshiftError) if good.refused else nullcontext():
            reader.read(folder / good.name)  # what is right has to be read
    ends, done = time.process_time() + seconds, 0
    for name in names(reader):
        problem = tried(reader, folder, files, name)
        assert problem is None, _report(reader, files, name, problem)
        done += 1
        if time.process_time() > ends:
            break
    return done


def _report(reader: FuzzedReader, files: Sequence[GoodFile], name: str, problem: str) -> str:
    file, content = case(name, files)
    FAILURES.mkdir(parents=True, exist_ok=True)
    kept = FAILURES / f"{name.replace(':', '-')}-{Path(file).name}"
    kept.write_bytes(content)
    return (
        f"the reader of {reader.name} met {problem}\n  file: {kept}\n"
        f"  again: FUZZ_CASE={name} python -m pytest tests/fuzz -k {reader.name}"
    )
