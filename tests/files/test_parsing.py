"""JSON and TOML from anybody: data that can be used, or one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fewshift import FewshiftError
from fewshift.files.parsing import DEEPEST, parsed_json, parsed_word, read_json, read_toml

BROKEN_JSON = {
    "nothing": b"",
    "half": b'{"a": ',
    "deep beyond the interpreter": b"[" * 100_000,
    "deep": b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1),
    "deep tables": b'{"a": ' * 200 + b"1" + b"}" * 200,
    "five thousand digits": b'{"a": ' + b"9" * 5000 + b"}",
    "five hundred digits": b'{"a": [-' + b"9" * 500 + b"]}",
    "half a character": rb'{"a": "\ud800"}',
    "no text": b"\xff\xfe\x00\xd8",
}
BROKEN_TOML = {
    "half": b"a = ",
    "no text": b"\xff",
    "deep": b"a = " + b"[" * 5000 + b"]" * 5000,
    "deep by dots": b"a" + b".a" * 50_000 + b" = 1",
    "deep by quoted dots": b'"a"' + b'."a"' * 200 + b" = 1",
    "five thousand digits": b"a = " + b"9" * 5000,
    "long": b"a = 1 #" + b"x" * 2**18,
}


@pytest.mark.parametrize("content", BROKEN_JSON.values(), ids=BROKEN_JSON.keys())
def test_json_that_nobody_can_use_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(FewshiftError, match=r"the card .*file\.json is not JSON \(.+\): mend it") as caught:
        read_json(file, f"the card {file}", "mend it")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 200


@pytest.mark.parametrize("content", BROKEN_TOML.values(), ids=BROKEN_TOML.keys())
def test_toml_that_nobody_can_use_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.toml"
    file.write_bytes(content)
    with pytest.raises(FewshiftError, match=r"file\.toml is no TOML file \(.+\): mend it") as caught:
        read_toml(file, file, "mend it")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", "folder", "a\0b"])
def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for read in (read_json, read_toml):
        with pytest.raises(FewshiftError, match=r"the file cannot be read \(.+\): check it"):
            read(tmp_path / name, "the file", "check it")


def test_what_json_and_toml_are_for_is_read_as_their_own_readers_read_it(tmp_path: Path) -> None:
    value = {
        "a": [1, 2.5, None, True, "ü😀"],
        "b": {"c": [[[]]]},
        "n": 2**100,
        "e": "\\ud800 is text",
        "file": "caf\udce9.jpg",
    }
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value).encode()):
        assert parsed_json(text, "", "") == value
    (tmp_path / "f.toml").write_text("a.b = [1.5, 2.5]\n[[rows]]\nx = {y = 'z'}\n")
    assert read_toml(tmp_path / "f.toml", "", "") == {"a": {"b": [1.5, 2.5]}, "rows": [{"x": {"y": "z"}}]}


def test_a_hundred_levels_are_read_and_one_more_is_not() -> None:
    parsed_json("[" * DEEPEST + "]" * DEEPEST, "", "")
    with pytest.raises(FewshiftError, match="deeper than 100"):
        parsed_json("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "", "")


@pytest.mark.parametrize(
    ("word", "value"),
    [("5", 5), ("[1, 2]", [1, 2]), ("null", None), ("ncc", "ncc"), ("[" * 9999, "[" * 9999), ("9" * 5000, "9" * 5000)],
)
def test_a_word_is_json_where_it_can_be(word: str, value: object) -> None:
    assert parsed_word(word) == value
