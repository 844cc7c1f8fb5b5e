"""The promise of every reader: it returns, or it raises one sentence. Never a traceback, a hang, or somebody's code.

`make fuzz SECONDS=600` tries other cases than these, for as long as one likes; `fuzzing.py` says how to repeat one.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from fewshift import FewshiftError
from tests.fuzz import fuzzing
from tests.fuzz.fuzzing import FuzzedReader, GoodFile, fuzz
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.fuzz.readers import READERS

SHARES = sum(reader.share for reader in READERS)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_reader_returns_or_raises_one_sentence(reader: FuzzedReader, tmp_path: Path) -> None:
    tried = fuzz(reader, tmp_path, fuzzing.SECONDS * reader.share / SHARES)
    print(f"{reader.name}: {tried} cases")  # pytest -s shows it


GOOD = GoodFile("a.json", b'{"a": [1, 2, {"b": "c"}]}', changed_json)


def test_the_name_of_a_case_decides_its_bytes() -> None:
    for number in range(50):
        name = f"toy:0:{number}"
        assert fuzzing.case(name, [GOOD]) == fuzzing.case(name, [GOOD])
    assert len({fuzzing.case(f"toy:0:{number}", [GOOD])[1] for number in range(50)}) > 30
    assert changed_bytes(b"abc" * 30, Random(1)) != changed_bytes(b"abc" * 30, Random(2))


@pytest.mark.parametrize(
    ("raised", "words"),
    [(KeyError("a"), "KeyError: 'a'"), (RecursionError("deep"), "RecursionError"), (None, "took more than")],
)
def test_a_reader_that_breaks_its_promise_is_found_and_its_file_is_kept(
    tmp_path: Path, monkeypatch, raised: Exception | None, words: str
) -> None:
    monkeypatch.setattr(fuzzing, "FAILURES", tmp_path / "failures")
    monkeypatch.setattr(fuzzing, "PATIENCE", 0.05)

    def read(path: Path) -> None:
        if path.read_bytes() == GOOD.content:
            return
        if raised is not None:
            raise raised
        while True:
            pass

    reader = FuzzedReader("toy", lambda _: [GOOD], read)
    with pytest.raises(AssertionError, match=words) as caught:
        fuzz(reader, tmp_path, 1.0)
    assert "FUZZ_CASE=toy:" in str(caught.value)
    assert (tmp_path / "failures" / next(iter(path.name for path in (tmp_path / "failures").iterdir()))).is_file()


def test_time_only_cuts_the_number_of_cases(tmp_path: Path, monkeypatch) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(fuzzing, "CASES", 30)
    monkeypatch.setattr(fuzzing, "ONLY", "")

    def read(path: Path) -> None:
        seen.append(path.read_bytes())
        if len(seen) % 2:
            raise FewshiftError("not this one: take another")

    reader = FuzzedReader(
        "toy", lambda _: [GOOD], lambda path: None if path.read_bytes() == GOOD.content else read(path)
    )
    assert fuzz(reader, tmp_path, 100.0) == 30
    whole, seen[:] = list(seen), []
    assert fuzz(reader, tmp_path, -1.0) == 1
    assert seen == whole[: len(seen)]
