"""Whatever names image files leads to the same files."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fewshift import FewshiftError
from fewshift.deploy.listing import listed
from tests.helpers.pictures import picture, save

NAMES = ("a/1.png", "a/2.jpg", "b/3.png")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        save(tmp_path / "photos" / name, picture(4, 4))
    (tmp_path / "photos/notes.txt").touch()
    return Path("photos")


def typed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("photos", NAMES),
        (["photos/b", "photos/a/2.jpg"], ("b/3.png", "a/2.jpg")),
        ("photos/*/*.png", ("a/1.png", "b/3.png")),
        ("photos/**", NAMES),
        (["photos/b/*", "photos/a"], ("b/3.png", "a/1.png", "a/2.jpg")),
    ],
)
def test_folders_files_and_patterns_are_listed_in_the_order_given(photos: Path, words, expected) -> None:
    assert listed(words).files == [photos / name for name in expected]


@pytest.mark.parametrize(
    "content", [b"photos/b/3.png\n\nphotos/a\n", b"photos/b/3.png\r\nphotos/a", b"photos/b/3.png\0photos/a\0"]
)
def test_a_list_and_standard_input_name_files_and_folders(photos: Path, monkeypatch, content: bytes) -> None:
    expected = [photos / name for name in ("b/3.png", "a/1.png", "a/2.jpg")]
    Path("files.txt").write_bytes(content)
    assert listed("@files.txt").files == expected
    typed(monkeypatch, content)
    assert listed(["-"]).files == expected


def test_a_name_in_a_list_may_have_no_file(photos: Path) -> None:
    Path("files.txt").write_text("photos/gone.png\nphotos/a/1.png\n")
    assert listed("@files.txt").files == [photos / "gone.png", photos / "a/1.png"]


def test_the_common_folder_contains_all_files(photos: Path) -> None:
    assert listed([photos / "a/1.png", photos / "b/3.png"]).root == photos.absolute()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("photos/*.bmp", r"no image matches photos/\*\.bmp"),
        ("@nowhere.txt", r"cannot read the list nowhere\.txt"),
        ("@empty.txt", r"empty\.txt names no images"),
        ("photoz", "no such folder photoz"),
        ([], "there are no images"),
    ],
)
def test_words_that_name_nothing_are_refused(photos: Path, words, facts: str) -> None:
    Path("empty.txt").touch()
    with pytest.raises(FewshiftError, match=facts):
        listed(words)
