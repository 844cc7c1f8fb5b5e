"""Names that differ only in punctuation stay apart, and a palette can be read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.label_files import palette_of, read_palette, write_palette
from fewshift.images.scenes import scene_folder
from tests.helpers.pictures import AS_IS, Array, pattern, save

COLOURS = ((10, 10, 10), (20, 20, 20), (30, 30, 30))


def painted(root: Path, names: tuple[str, ...]) -> Array:
    """One scene whose labels are painted in the colours of a palette; returns the lines of its pixels."""
    lines = pattern(6, 6, classes=len(names))
    save(root / "images" / "a.png", np.zeros((6, 6, 3)))
    save(root / "labels" / "a.png", np.array(COLOURS)[lines])
    text = "".join(f"{' '.join(map(str, colour))} {name}\n" for colour, name in zip(COLOURS, names, strict=False))
    (root / "palette.txt").write_text(text)
    return lines


def test_names_that_differ_in_a_sign_are_different_classes(tmp_path: Path) -> None:
    lines = painted(tmp_path, ("charge+", "charge-"))
    classes = ("none", "charge-", "charge+")
    labels = scene_folder(tmp_path, AS_IS, classes)[0][1].numpy()
    for line, name in enumerate(("charge+", "charge-")):
        assert (labels[lines == line] == classes.index(name)).all()


def test_a_name_that_is_spelled_otherwise_is_found_where_one_class_is_meant(tmp_path: Path) -> None:
    lines = painted(tmp_path, ("Traffic_Light", "ROAD"))
    labels = scene_folder(tmp_path, AS_IS, ("road", "traffic light"))[0][1].numpy()
    assert np.array_equal(labels, 1 - lines)


@pytest.mark.parametrize(
    ("own", "classes", "facts"),
    [
        (("charge +", "other"), ("charge+", "charge-", "other"), r"'charge \+' that the network does not know"),
        (("charge+", "charge-"), ("charge", "other"), r"'charge\+' and 'charge-', and the network one class 'charge'"),
        (("charge+", "charge"), ("charge+", "other"), r"'charge\+' and 'charge', and the network one class"),
    ],
)
def test_names_that_may_mean_several_classes_are_refused(
    tmp_path: Path, own: tuple[str, ...], classes: tuple[str, ...], facts: str
) -> None:
    painted(tmp_path, own)
    with pytest.raises(FewshiftError, match=rf"palette\.txt has .*{facts}"):
        scene_folder(tmp_path, AS_IS, classes)


def test_classes_that_differ_in_a_sign_have_different_colours() -> None:
    assert palette_of(("road", "sky")) == (cityscapes.PALETTE[0], cityscapes.PALETTE[10])
    assert len(set(palette_of(("road+", "road-")))) == 2


@pytest.mark.parametrize("name", ["road\n1 2 3 sky", "a\rb", "a\u2028b", " road", "road ", "", "  ", "caf\udce9"])
def test_a_name_that_would_not_be_read_back_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FewshiftError, match=r"cannot stand in a line of palette\.txt.*without line breaks"):
        write_palette(tmp_path / "palette.txt", ("sky", name), COLOURS[:2])
    assert not list(tmp_path.iterdir())


def test_other_names_are_read_back(tmp_path: Path) -> None:
    names = ("# hash", "traffic light", "1 2 3 4")
    assert read_palette(write_palette(tmp_path / "palette.txt", names, COLOURS)) == list(
        zip(names, COLOURS, strict=True)
    )


def test_classes_that_are_called_void_are_read_back(tmp_path: Path) -> None:
    names = ("a", "void", "Void")
    lines = painted(tmp_path, names)
    assert np.array_equal(scene_folder(tmp_path, AS_IS, names)[0][1].numpy(), lines)


def test_void_is_no_class_to_a_network_that_has_none_of_that_name(tmp_path: Path) -> None:
    lines = painted(tmp_path, ("a", "void"))
    assert np.array_equal(scene_folder(tmp_path, AS_IS, ("a",))[0][1].numpy(), np.where(lines == 1, 255, 0))


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b", "a")])
def test_a_name_of_two_classes_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(FewshiftError, match="the class name a occurs twice"):
        write_palette(tmp_path / "palette.txt", names, COLOURS[: len(names)])
    assert not list(tmp_path.iterdir())
