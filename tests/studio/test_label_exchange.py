"""Labels go out as they came in: class folders, tables, exports of Label Studio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from fewshift import Preprocess
from fewshift.errors import FewshiftError
from fewshift.images.folders import labelled_folder
from fewshift.images.label_lists import read_label_list
from fewshift.studio.label_exchange import write_class_folders, write_table, write_tasks
from fewshift.studio.workbench import Workbench
from tests.helpers.studio import write_digits

STEPS = Preprocess(8, 8, (0.5,), (0.5,))
ODD = ("a, b; c.png", 'quote".png', "na\u00efve \u732b.png", "deep/er/plain.png", "<img src=x onerror=alert(1)>.png")


@pytest.fixture
def labelled(tmp_path: Path) -> dict[Path, str]:
    """Files with odd names in photos/, and their classes."""
    write_digits(tmp_path / "spare", 1)
    labels = {}
    for number, name in enumerate(ODD):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "spare" / f"form-00{number}.png").rename(file)
        labels[file] = ("cat", "big dog")[number % 2]
    return labels


def resolved(rows: list[tuple[Path, str]]) -> dict[Path, str]:
    return {file.resolve(): label for file, label in rows}


def test_a_table_is_read_back(labelled: dict[Path, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    table = write_table(labelled, tmp_path / "elsewhere" / "deep" / "labels.csv")
    assert resolved(read_label_list(table).rows) == labelled


def test_an_export_for_label_studio_is_read_back(labelled: dict[Path, str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file = write_tasks(labelled, tmp_path / "out" / "tasks.json", tmp_path / "photos")
    assert resolved(read_label_list(file).rows) == labelled
    served = json.loads(file.read_text())[3]["data"]["image"]
    assert served == "/data/local-files/?d=photos/deep/er/plain.png"


@pytest.mark.parametrize("links", [False, True])
def test_class_folders_are_read_back(labelled: dict[Path, str], tmp_path: Path, links: bool) -> None:
    folder = write_class_folders(labelled, tmp_path / "classes", tmp_path / "photos", links=links)
    read = labelled_folder(folder, STEPS)
    found = {file.read_bytes(): read.classes[label] for file, label in zip(read.files, read.labels, strict=True)}
    assert found == {file.read_bytes(): label for file, label in labelled.items()}
    assert all(file.is_symlink() is links for file in read.files)


def test_class_folders_replace_nothing(labelled: dict[Path, str], tmp_path: Path) -> None:
    first = write_class_folders(labelled, tmp_path / "classes", tmp_path / "photos")
    second = write_class_folders(labelled, tmp_path / "classes", tmp_path / "photos")
    assert (first.name, second.name) == ("classes", "classes-2")


@pytest.mark.parametrize("name", ["../up", "a/b", "..", ".hidden", ""])
def test_a_class_that_cannot_be_a_folder_is_refused(labelled: dict[Path, str], tmp_path: Path, name: str) -> None:
    with pytest.raises(FewshiftError, match="cannot be the name of a folder"):
        write_class_folders(dict.fromkeys(labelled, name), tmp_path / "classes", tmp_path / "photos")
    assert not (tmp_path / "classes").exists()


def test_class_folders_among_the_images_are_taken_in(network: nn.Module, tmp_path: Path) -> None:
    truth = write_digits(tmp_path / "photos" / "7", 1)
    write_digits(tmp_path / "photos" / "unsorted", 1)
    bench = Workbench(network, tmp_path / "photos")
    assert bench.store.labels() == {f"7/{name}": "7" for name in truth}
    assert bench.taken_in == "10 labels taken in from class folders"
    bench.close()


def test_a_table_is_taken_in_once_and_what_it_names_elsewhere_is_counted(network: nn.Module, tmp_path: Path) -> None:
    truth = write_digits(tmp_path / "photos", 1)
    write_digits(tmp_path / "other", 1)
    rows = [f"photos/{name},{label}" for name, label in truth.items()] + ["other/form-000.png,3"]
    (tmp_path / "labels.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    bench = Workbench(network, tmp_path / "photos", labels=tmp_path / "labels.csv")
    assert bench.store.labels() == truth
    assert "1 in" in bench.taken_in
    assert "not in this folder" in bench.taken_in
    mark = bench.store.mark("form-000.png")
    bench.store.change("form-000.png", "skipped", None, base=mark.version, tab="t")
    bench.close()
    bench = Workbench(network, tmp_path / "photos", labels=tmp_path / "labels.csv")
    assert bench.store.mark("form-000.png").state == "skipped"
    bench.close()


def test_a_label_that_is_no_class_is_named(network: nn.Module, tmp_path: Path) -> None:
    write_digits(tmp_path / "photos", 1)
    (tmp_path / "labels.csv").write_text("photos/form-000.png,cat\n")
    with pytest.raises(FewshiftError, match=r"'cat'"):
        Workbench(network, tmp_path / "photos", labels=tmp_path / "labels.csv", classes=[str(n) for n in range(10)])


@pytest.mark.parametrize(
    ("form", "name"), [("csv", "labels.csv"), ("label-studio", "label-studio.json"), ("folders", "classes")]
)
def test_the_workbench_writes_what_adapt_reads(bench: Workbench, form: str, name: str) -> None:
    with pytest.raises(FewshiftError, match="no labels yet"):
        bench.write_labels(form)
    bench.mark(0, "labelled", "3", 0, "t")
    bench.mark(1, "labelled", "5", 0, "t")
    bench.mark(2, "none of these", None, 0, "t")
    path = bench.write_labels(form)
    assert path == bench.out / name
    rows = read_label_list(path).rows if path.is_file() else [(file, file.parent.name) for file in path.rglob("*.png")]
    assert sorted(label for _, label in rows) == ["3", "5"]
