"""`fewshift studio`: the address, the labels without a page, and mistakes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fewshift.errors import FewshiftError
from fewshift.images.label_lists import read_label_list
from fewshift.studio import MISSING, open_studio, serving
from tests.helpers.networks import make_tiny
from tests.helpers.studio import write_digits


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_digits(tmp_path / "photos", 1)
    return tmp_path / "photos"


def test_the_address_is_printed_and_the_page_is_served(command, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[serving.Studio] = []
    monkeypatch.setattr(serving.Studio, "run", lambda studio: (served.append(studio), studio.close()))
    done = command("studio", "--model", "digits", "--images", photos, "--no-browser")
    assert done.code == 0
    assert re.fullmatch(r"studio: http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\n", done.stdout)
    assert served[0].address in done.stdout
    assert served[0].bench.out == photos.with_name("photos-studio")


def test_labels_are_written_without_a_page(command, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("photos/form-000.png,3\nphotos/form-001.png,5\n")
    words = ("--model", "digits", "--images", photos, "--labels", tmp_path / "labels.csv", "--write", "label-studio")
    done = command("studio", *words, "--out", tmp_path / "out")
    assert done.stdout.strip() == str(tmp_path / "out" / "label-studio.json")
    rows = read_label_list(tmp_path / "out" / "label-studio.json").rows
    assert [(file.name, label) for file, label in rows] == [("form-000.png", "3"), ("form-001.png", "5")]


@pytest.mark.parametrize(
    "words", [("--images", "missing"), ("--images", "photos/form-000.png"), ("--labels", "none.csv")]
)
def test_a_wrong_path_is_one_sentence(
    command, photos: Path, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    images = () if words[0] == "--images" else ("--images", "photos")
    done = command("studio", "--model", "digits", *images, *words)
    assert done.code == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_without_the_extra_one_sentence_says_what_to_install(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("fewshift.studio.ser")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(FewshiftError) as refusal:
        open_studio(make_tiny(), photos)
    assert str(refusal.value) == MISSING
