"""Lists of labelled files: tables, exports of Label Studio, COCO-style JSON, and lists in Python: all one support."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fewshift
from fewshift.errors import FewshiftError
from fewshift.images.inputs import as_labelled, as_support, as_unlabelled
from tests.helpers.pictures import AS_IS, picture, save

EIGHT = replace(AS_IS, resize=8, crop=8)
NAMES = ("bee", "cat", "dog")
LABELS = {"a.png": "dog", "b.png": "cat", "sub/c.png": "dog", "sub/d, e.png": "bee"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(LABELS):
        save(tmp_path / "set" / name, picture(9, 9, seed))
    return tmp_path / "set"


def check(source: Any, folder: Path, classes: tuple[str, ...] | None = NAMES) -> None:
    """The list gives every file its label, and the tensor that the file has."""
    support = as_support(source, EIGHT, classes=classes)
    files = support.files or ()
    assert sorted(files) == sorted(folder / name for name in LABELS)
    for file, image, label in zip(files, support.pictures, support.targets.tolist(), strict=True):
        assert NAMES[label] == LABELS[file.relative_to(folder).as_posix()]
        assert torch.equal(image, EIGHT(picture(9, 9, list(LABELS).index(file.relative_to(folder).as_posix()))))


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def table(delimiter: str, header: str = "", quote: str = '"') -> str:
    lines = [f"{quote}{name}{quote}{delimiter}{label}" for name, label in LABELS.items()]
    return "\n".join([header] * bool(header) + lines) + "\n"


# --- tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", ["", "path{}label", "Bild{}Klasse", "\ufefffile{}class"])
def test_a_table_has_paths_and_labels_with_any_delimiter_and_header(folder: Path, delimiter: str, header: str) -> None:
    check(write(folder / "labels.csv", table(delimiter, header.format(delimiter))), folder)
    check(str(write(folder / "labels.csv", table(delimiter, header.format(delimiter)))), folder, None)


def test_columns_are_found_by_their_names(folder: Path) -> None:
    rows = [f'7,{label},"{name}",0.9' for name, label in LABELS.items()]
    check(write(folder / "labels.csv", "\n".join(["id,label,file_name,score", *rows])), folder)


def test_paths_are_relative_to_the_table_or_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for place in (folder, Path("set")):
        rows = (f"{place / name}\t{label}\n" for name, label in LABELS.items())
        check(write(folder.parent / "l.tsv", "".join(rows)), folder)


def test_backslashes_of_another_system_are_slashes(folder: Path) -> None:
    check(write(folder / "l.csv", table(";").replace("/", "\\")), folder)


def test_labels_that_are_numbers_are_outputs_of_the_network(folder: Path) -> None:
    numbers = {name: NAMES.index(label) for name, label in LABELS.items()}
    path = write(folder / "l.csv", "".join(f'"{name}",{number}\n' for name, number in numbers.items()))
    check(path, folder)
    assert as_support(path, EIGHT).classes is None
    assert as_support(path, EIGHT).targets.tolist() == list(numbers.values())
    with pytest.raises(FewshiftError, match=r"a\.png has the label 2 .*numbers from 0 to 1"):
        as_support(path, EIGHT, classes=NAMES[:2])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("a.png,cat\nz.png,dog\n", r"no such image z\.png \(line 2 of .*l\.csv\).*relative to .*set"),
        ("a.png,cat\nb.png,\n", r"line 2 of .*l\.csv has no label"),
        ("a.png,cat\na.png,dog\n", r"a\.png has 2 labels in .*l\.csv \(cat, dog; line 2\)"),
        ("a.png,cat\nb.png,Dogs\n", r"l\.csv has a class 'Dogs' .*did you mean 'dog'"),
        ("just words\nand more\n", r"l\.csv is no table"),
        ("a.png,cat,1\nb.png,dog,2\n", r"3 columns and no header"),
        ("id,what,when\n1,2,3\n", r"columns id, what, when: name"),
        ("path,label\n", r"l\.csv has no labelled images"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_with_its_line(folder: Path, text: str, facts: str) -> None:
    with pytest.raises(FewshiftError, match=facts):
        as_support(write(folder / "l.csv", text), EIGHT, classes=NAMES)


def test_a_missing_list_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match=r"cannot read .*never\.csv: No such file"):
        as_support(tmp_path / "never.csv", EIGHT)


def test_a_damaged_picture_of_a_list_is_named(folder: Path) -> None:
    (folder / "b.png").write_bytes(b"\0\0\0\1Bud1")  # as .DS_Store begins
    with pytest.raises(FewshiftError, match=r"b\.png is not an image"):
        as_support(write(folder / "l.csv", table(",")), EIGHT)


# --- Label Studio


def task(number: int, image: str, *choices: str, cancelled: bool = False) -> dict[str, Any]:
    """A task as Label Studio 1.x exports it."""
    result = [{"type": "choices", "from_name": "choice", "to_name": "image", "value": {"choices": list(choices)}}]
    annotation = {"id": 100 + number, "was_cancelled": cancelled, "result": result}
    return {"id": number, "data": {"image": image}, "annotations": [annotation] if choices or cancelled else []}


ADDRESSES = {
    "relative": "{}",
    "local files": "/data/local-files/?d=home/me/set/{}",
    "web": "https://host/bucket/{}?token=1",
    "bucket": "s3://bucket/set/{}",
}


@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
def test_an_export_of_label_studio_finds_its_images(folder: Path, address: str) -> None:
    tasks = [task(number, address.format(name), label) for number, (name, label) in enumerate(LABELS.items())]
    check(write(folder / "project.json", tasks), folder)
    check(write(folder / "export" / "project.json", tasks), folder)


def test_an_uploaded_file_is_found_by_the_name_it_had(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save(tmp_path / "images" / name)
    tasks = [task(1, "/data/upload/3/0f3c9a1e-a.png", "cat"), task(2, "/data/upload/3/77aa00ff-b.png", "dog")]
    files = as_support(write(tmp_path / "project.json", tasks), EIGHT).files
    assert files == (tmp_path / "images" / "a.png", tmp_path / "images" / "b.png")


def test_the_short_export_of_label_studio_is_read_too(folder: Path) -> None:
    tasks = [{"image": name, "id": 4, "choice": label, "annotator": 1} for name, label in LABELS.items()]
    check(write(folder / "min.json", tasks), folder)


def test_tasks_without_a_label_are_left_out_and_named(folder: Path) -> None:
    tasks = [task(number, name, label) for number, (name, label) in enumerate(LABELS.items())]
    tasks += [task(8, "new.png"), task(9, "skipped.png", cancelled=True)]
    path = write(folder / "project.json", tasks)
    check(path, folder)
    left = as_support(path, EIGHT).left_out
    assert left is not None
    assert (left.count, left.files) == (2, (folder / "new.png", folder / "skipped.png"))


def test_two_labels_for_one_image_are_an_error_that_names_it(folder: Path) -> None:
    tasks = [task(1, "a.png", "cat"), task(2, "b.png", "dog", "cat")]
    with pytest.raises(FewshiftError, match=r"b\.png has 2 labels in .*\(cat, dog; task 2\)"):
        as_support(write(folder / "project.json", tasks), EIGHT)
    tasks = [task(1, "a.png", "cat"), task(2, "b.png", "dog")]
    tasks[1]["annotations"] += task(2, "b.png", "cat")["annotations"]  # two annotators disagree
    with pytest.raises(FewshiftError, match=r"b\.png has 2 labels"):
        as_support(write(folder / "project.json", tasks), EIGHT)


# --- COCO


def coco(*annotations: tuple[int, int]) -> dict[str, Any]:
    """Two categories and the images of the set, with (image, category) annotations."""
    return {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(LABELS)],
        "annotations": [{"id": 1, "image_id": image, "category_id": category} for image, category in annotations],
        "categories": [{"id": 11, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 7, "name": "bee"}],
    }


def test_coco_has_a_category_for_each_image(folder: Path) -> None:
    content = coco((0, 11), (1, 3), (2, 11), (2, 11), (3, 7))
    check(write(folder / "coco.json", content), folder)
    check(write(folder / "annotations" / "instances.json", content), folder, None)


def test_several_categories_in_one_image_are_an_error_that_names_it(folder: Path) -> None:
    with pytest.raises(FewshiftError, match=r"c\.png has 2 labels .*\(cat, dog; image 2\)"):
        as_support(write(folder / "coco.json", coco((0, 11), (2, 11), (2, 3))), EIGHT)


def test_images_without_an_annotation_are_left_out_and_named(folder: Path) -> None:
    path = write(folder / "coco.json", coco((0, 11), (1, 3)))
    assert len(as_support(path, EIGHT)) == 2
    left = fewshift.left_out(path)
    assert left is not None
    assert [file.name for file in left.files] == ["c.png", "d, e.png"]


@pytest.mark.parametrize("content", ["{", {"a": 1}, [1, 2], [{"id": 3}], {"images": [{}], "annotations": []}])
def test_other_json_is_one_sentence(folder: Path, content: Any) -> None:
    with pytest.raises(FewshiftError, match=r"l\.json (is not JSON|has no labelled images|cannot be read)"):
        as_support(write(folder / "l.json", content), EIGHT)


# --- in Python


def test_a_list_of_paths_and_labels_takes_names_and_numbers(folder: Path) -> None:
    rows = [(folder / name, label) for name, label in LABELS.items()]
    check(rows, folder)
    check(rows, folder, None)
    check([(str(path), NAMES.index(label)) for path, label in rows], folder)
    check([(path, np.int64(NAMES.index(label))) for path, label in rows], folder)
    check(([path for path, _ in rows], [label for _, label in rows]), folder)
    check((rows[0], *rows[1:]), folder)
    with pytest.raises(FewshiftError, match=r"a\.png has the label 1\.5: give the name of a class"):
        as_support([(folder / "a.png", 1.5), (folder / "b.png", 0)], EIGHT)
    with pytest.raises(FewshiftError, match="some images by name and some by number"):
        as_support([(folder / "a.png", "cat"), (folder / "b.png", 0)], EIGHT)


def test_two_pairs_are_not_two_columns(folder: Path) -> None:
    support = as_support([(folder / "a.png", "dog"), (folder / "b.png", "cat")], EIGHT)
    assert (support.classes, support.targets.tolist()) == (("cat", "dog"), [1, 0])


def test_lists_serve_as_unlabelled_images_and_for_evaluation(folder: Path) -> None:
    path = write(folder / "l.csv", table(","))
    rows = [(folder / name, label) for name, label in LABELS.items()]
    for source in (path, rows, [file for file, _ in rows]):
        unlabelled = as_unlabelled(source, EIGHT, None)
        assert unlabelled is not None
        assert len(unlabelled) == 4
    for source in (path, rows):
        labelled = as_labelled(source, EIGHT, NAMES)
        assert [int(label) for _, label in (labelled[index] for index in range(4))] == [2, 1, 2, 0]
