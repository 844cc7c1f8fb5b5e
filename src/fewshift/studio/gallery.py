"""The images of one folder: each has a number that the page knows it by, and no file outside the folder has one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files
from fewshift.images.inputs import images_below, left_out
from fewshift.images.scenes import Pairing, scene_layout
from fewshift.report.left_out import passed_over

OUTSIDE = "a link that leads outside the folder: it is not opened"


@dataclass(frozen=True)
class GalleryImage:
    """One image: its number, its path below the folder, and its file."""

    number: int
    name: str
    file: Path


class Gallery:
    """All images below a folder. A number stays with its file, also when the folder is looked through again."""

    def __init__(self, folder: str | Path) -> None:
        if not Path(folder).is_dir():
            raise FewshiftError(f"no such folder {folder}: check the path")
        self.folder = Path(folder).absolute()  # other processes may be at another place
        self.scenes: Pairing | None = scene_layout(self.folder)  # where pixels have labels
        self.root = images_below(self.folder)
        self._real = self.root.resolve()
        self._lock = threading.Lock()
        self._images: list[GalleryImage] = []
        self._numbers: dict[str, int] = {}
        self.note = ""  # why there are no images, or which files were passed over
        self.look_again()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> GalleryImage:
        return self._images[number]

    @property
    def images(self) -> Sequence[GalleryImage]:
        """All images, in the order of their numbers."""
        return self._images[:]

    def look_again(self) -> int:
        """Take in files that are new; returns how many there are."""
        with self._lock:
            before = len(self._images)
            try:
                files = image_files(self.root)
                passed = left_out(self.folder)
                self.note = "" if passed is None else f"left out: {passed_over(passed)}"
            except FewshiftError as error:
                files, self.note = [], str(error)
            for file in files:
                name = file.relative_to(self.root).as_posix()
                if name not in self._numbers:
                    self._numbers[name] = len(self._images)
                    self._images.append(GalleryImage(len(self._images), name, file))
            return len(self._images) - before

    def number_of(self, file: str | Path) -> int | None:
        """The number of a file, however its path is written; None if it is not among the images."""
        path = Path(file)
        for inside, root in ((path, self.root), (path.absolute(), self.root.absolute()), (path.resolve(), self._real)):
            if inside.is_relative_to(root) and (name := inside.relative_to(root).as_posix()) in self._numbers:
                return self._numbers[name]
        return None

    def opened_file(self, number: int) -> Path:
        """The file of an image, once it is sure that it lies below the folder."""
        file = self._images[number].file
        if not file.resolve().is_relative_to(self._real):
            raise FewshiftError(f"{file} is {OUTSIDE}")
        return file

    def label_file(self, number: int) -> Path | None:
        """The file with the label of every pixel, if there is one below the folder."""
        if self.scenes is None:
            return None
        shared = Path(self._images[number].name).with_suffix("").as_posix()
        if not shared.endswith(self.scenes.image_end):
            return None
        name = shared.removesuffix(self.scenes.image_end) + self.scenes.label_end + ".png"
        file = self.scenes.labels / name
        inside = file.resolve().is_relative_to(self.scenes.labels.resolve())
        return file if inside and file.is_file() else None
