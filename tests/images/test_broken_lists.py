"""Lists of labels and colours that somebody broke: one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fewshift import FewshiftError
from fewshift.images.label_files import read_palette
from fewshift.images.label_lists import read_label_list
from fewshift.lab.datasets.layouts import read_list
from tests.helpers.pictures import save

COCO = {
    "images": [{"id": 1, "file_name": "a.png"}],
    "annotations": [{"image_id": 1, "category_id": 3}],
    "categories": [{"id": 3, "name": "cat"}],
}
TASK = {"id": 7, "data": {"image": "a.png"}, "annotations": []}
BROKEN: dict[str, Any] = {
    "an image that is a number": [{"image": 5.5, "choice": "cat"}],
    "a file name that is a list": COCO | {"images": [{"id": 1, "file_name": ["a.png"]}]},
    "a task without text": [TASK | {"data": {"image": 5}}],
    "an identifier that is a list": COCO | {"images": [{"id": [1], "file_name": "a.png"}]},
    "categories that are a word": COCO | {"categories": "cat"},
    "annotations that are a number": COCO | {"annotations": 5},
    "a name that no file can have": [{"image": "x" * 5000 + ".png", "choice": "cat"}],
    "a name with a zero": [{"image": "a\0.png", "choice": "cat"}],
    "an address that is none": [{"image": "http://[::1/b.png", "choice": "cat"}],
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_export_is_one_sentence(tmp_path: Path, content: Any) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "labels.json").write_text(json.dumps(content))
    with pytest.raises(FewshiftError, match=r"labels\.json") as caught:
        read_label_list(tmp_path / "labels.json")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, '[{"image": ' + "9" * 5000 + "}]"])
def test_an_export_without_end_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(FewshiftError, match=r"labels\.json is not JSON"):
        read_label_list(tmp_path / "labels.json")


def test_a_cell_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text('path,label\n"' + "x" * 200_000 + '",cat\n')
    with pytest.raises(FewshiftError, match=r"labels\.csv cannot be read"):
        read_label_list(tmp_path / "labels.csv")


@pytest.mark.parametrize("number", ["9" * 5000, "٣" * 20, "256"])
def test_a_colour_without_end_is_one_sentence(tmp_path: Path, number: str) -> None:
    (tmp_path / "palette.txt").write_text(f"1 2 3 road\n1 {number} 3 sky\n", encoding="utf-8")
    with pytest.raises(FewshiftError, match=r"line 2 of .*palette\.txt"):
        read_palette(tmp_path / "palette.txt")


def test_a_label_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"a.png 1\nb.png {'9' * 5000}\n")
    with pytest.raises(FewshiftError, match=r"line 2 of .*list\.txt"):
        read_list(tmp_path / "list.txt", tmp_path, 3)
