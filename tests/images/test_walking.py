"""Links to folders are followed, each folder once; what is no ordinary file is named, and nothing waits for a pipe."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import fewshift
from fewshift.deploy.listing import listed
from fewshift.errors import FewshiftError
from fewshift.fleet.places import named
from fewshift.images.folders import image_files, labelled_folder, open_image
from fewshift.images.label_lists import read_label_list
from fewshift.images.scenes import Pairing
from fewshift.report.left_out import passed_over
from tests.helpers.pictures import AS_IS, pattern, save, save_scene


def below(root: Path) -> list[str]:
    """The images of a folder, by both ways to list them."""
    names = [str(file.relative_to(root)) for file in image_files(root)]
    assert [str(file.relative_to(root)) for file in listed(root).files] == names
    return names


def test_a_linked_folder_is_read_like_a_folder(tmp_path: Path) -> None:
    save(tmp_path / "disk" / "deep" / "2.png")
    save(tmp_path / "photos" / "1.png")
    (tmp_path / "photos" / "more").symlink_to(tmp_path / "disk")
    assert below(tmp_path / "photos") == ["1.png", "more/deep/2.png"]


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    save(tmp_path / "photos" / "a" / "1.png")
    (tmp_path / "photos" / "a" / "up").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "itself").symlink_to(tmp_path / "photos" / "itself")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "photos")
    save(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "photos" / "b").symlink_to(tmp_path / "elsewhere")
    assert below(tmp_path / "photos") == ["a/1.png", "b/2.png"]


def test_a_folder_that_is_reached_twice_is_read_once_and_by_its_own_name_where_it_has_one(tmp_path: Path) -> None:
    save(tmp_path / "photos" / "z" / "1.png")
    save(tmp_path / "disk" / "inner" / "2.png")
    (tmp_path / "photos" / "a").symlink_to(tmp_path / "photos" / "z")
    (tmp_path / "photos" / "b").symlink_to(tmp_path / "disk" / "inner")
    (tmp_path / "photos" / "c").symlink_to(tmp_path / "disk")
    assert below(tmp_path / "photos") == ["b/2.png", "z/1.png"]


def test_a_link_to_a_hidden_folder_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "photos" / ".versions" / "3" / "1.png")
    (tmp_path / "photos" / "newest").symlink_to(Path(".versions") / "3")
    assert below(tmp_path / "photos") == ["newest/1.png"]


def test_a_pipe_and_a_socket_are_named_and_not_waited_for(tmp_path: Path) -> None:
    photo = save(tmp_path / "photos" / "1.png")
    os.mkfifo(tmp_path / "photos" / "2.png")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(tmp_path / "photos" / "camera.jpg"))
    assert image_files(tmp_path / "photos") == [photo]
    left = fewshift.left_out(tmp_path / "photos")
    assert left is not None
    assert (left.count, left.files) == (2, ())
    assert passed_over(left) == "2.png (not an ordinary file), camera.jpg (not an ordinary file)"


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = save(tmp_path / "photos" / "1.png")
    (tmp_path / "photos" / "private").mkdir()
    scandir = os.scandir

    def refusing(path: str):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # root may look everywhere
    assert image_files(tmp_path / "photos") == [photo]
    left = fewshift.left_out(tmp_path / "photos")
    assert left is not None
    assert passed_over(left) == "private (a folder that cannot be looked into)"


def test_a_pipe_that_is_given_as_an_image_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    for read in (lambda path: open_image(path, "RGB"), image_files, lambda path: listed([path])):
        with pytest.raises(FewshiftError, match=r"a\.png is not an ordinary file"):
            read(tmp_path / "a.png")
    with pytest.raises(FewshiftError, match=r"link\.png is not an ordinary file"):
        open_image(tmp_path / "link.png", "RGB")


def test_a_pipe_in_a_list_of_labels_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("path,label\na.png,cat\n")
    assert len(named({"yard": tmp_path / "labels.csv"}, "settings")[0].key) == 16
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(FewshiftError, match=r"pipe\.csv: not an ordinary file"):
        read_label_list(tmp_path / "pipe.csv")


def test_labels_of_pixels_may_be_behind_a_link(tmp_path: Path) -> None:
    save_scene(tmp_path / "disk", "a", pattern(6, 6))
    for folder in ("images", "labels"):
        (tmp_path / "scenes" / folder).mkdir(parents=True)
        (tmp_path / "scenes" / folder / "more").symlink_to(tmp_path / "disk" / folder)
    images, labels = Pairing(tmp_path / "scenes/images", tmp_path / "scenes/labels").files()
    assert [len(images), len(labels)] == [1, 1]


def test_the_key_of_a_place_changes_with_an_image_behind_a_link(tmp_path: Path) -> None:
    save(tmp_path / "yard" / "cat" / "1.png")
    image = save(tmp_path / "disk" / "2.png")
    (tmp_path / "yard" / "cat" / "more").symlink_to(tmp_path / "disk")
    assert len(labelled_folder(tmp_path / "yard", AS_IS)) == 2
    before = named({"yard": tmp_path / "yard"}, "")[0].key
    image.write_bytes(image.read_bytes() + b"x")
    assert named({"yard": tmp_path / "yard"}, "")[0].key != before
