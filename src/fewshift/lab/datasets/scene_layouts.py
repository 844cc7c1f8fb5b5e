"""Layouts of data sets with a label for each pixel: in which folders a copy keeps images and label files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.label_files import Encoding
from fewshift.images.scenes import CITYSCAPES, Pairing
from fewshift.lab.datasets import street
from fewshift.lab.datasets.collection import Collection, check_count, find_home, no_domain


@dataclass(frozen=True)
class ScenePlace:
    """Where a copy may keep a domain: two folders, and how the names of their files end.

    In folder names {0} stands for the domain, "val", and {1} for its long name, "validation". `names` tells which
    images are the domain's, where a folder holds those of all.
    """

    images: str
    labels: str
    encoding: Encoding
    image_end: str = ""
    label_end: str = ""
    names: Callable[[Collection, str, Path, Path], frozenset[str]] | None = None

    def pairing(self, home: Path, domain: str) -> Pairing:
        """Its folders in a copy."""
        images, labels = (home / name.format(domain, LONG.get(domain)) for name in (self.images, self.labels))
        return Pairing(images, labels, self.image_end, self.label_end)


def read_scenes(collection: Collection, domain: str, root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...], Encoding]:
    """Read the first of the places of a layout that a copy has."""

    def place_of(home: Path, domain: str) -> ScenePlace | None:
        return next((place for place in PLACES[collection.layout] if place.pairing(home, domain).labelled()), None)

    home, there = find_home(collection, root, place_of)
    place = place_of(home, domain)
    if place is None:
        raise no_domain(collection, domain, home, there)
    where = place.pairing(home, domain)
    names = None if place.names is None else place.names(collection, domain, home, where.images)
    files, label_files = where.files(names)
    if names is not None and len(files) < len(names):
        missing = min(names - {file.stem for file in files})
        raise FewshiftError(
            f"{len(names):,} images of {domain!r} are listed and {len(files):,} found in {where.images}, the first "
            f"that is missing is {missing}: {collection.where}"
        )
    if len(files) != ALSO_PUBLISHED.get((collection.name, domain)):
        check_count(collection, domain, where.images, len(files))
    return files, label_files, place.encoding


def _listed(collection: Collection, domain: str, home: Path, _: Path) -> frozenset[str]:
    """Names from val.txt, from a list called as RobustNet's are, or from GTAV's split.mat."""
    lists = [home / f"{domain}.txt", home / f"{collection.name}_split_{domain}.txt"]
    for file in lists:
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            return frozenset(Path(line.split()[0]).stem for line in lines if line.strip())
    if (home / "split.mat").is_file():
        return _from_mat(home / "split.mat", domain)
    raise FewshiftError(
        f"which images of {collection.title} in {home} are those of {domain!r} is not known, {lists[0].name} is not "
        f"there: {collection.where}"
    )


def _from_mat(file: Path, domain: str) -> frozenset[str]:
    """Images are called after their numbers, 00001 and so on."""
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        return frozenset(f"{int(number):05d}" for number in loadmat(file)[f"{domain}Ids"].ravel())
    except Exception as error:  # readers raise whatever a broken file leads them to
        raise FewshiftError(
            f"{file} does not say which images are those of {domain!r}: extract it again, or write {domain}.txt with "
            "one name in each line"
        ) from error


def _sequence(_: Collection, domain: str, __: Path, images: Path) -> frozenset[str]:
    """CamVid's names begin with the sequence that an image is from."""
    stems = (path.stem for path in images.iterdir())
    return frozenset(stem for stem in stems if stem.startswith(street.CAMVID_SEQUENCES[domain]))


LONG = {"train": "training", "val": "validation"}
ALSO_PUBLISHED = {("gtav", "train"): 12_388}  # the list of RobustNet leaves 15 of its images out

TRAIN_IDS = Encoding(cityscapes.TRAIN_IDS)
VISTAS = Encoding(street.MAPILLARY_IDS)
GTAV = Encoding(cityscapes.CITYSCAPES_IDS, street.GTAV_COLOURS, strict=False)
SYNTHIA = Encoding(street.SYNTHIA_IDS, first_channel=True)

PLACES: dict[str, tuple[ScenePlace, ...]] = {
    "cityscapes": tuple(
        ScenePlace(f"{above[0]}leftImg8bit/{{0}}", f"{above[1]}gtFine/{{0}}", encoding, "_leftImg8bit", end)
        for above in (("", ""), ("leftImg8bit_trainvaltest/", "gtFine_trainvaltest/"))
        for end, encoding in CITYSCAPES.items()
    ),
    "bdd100k": (
        ScenePlace("images/10k/{0}", "labels/sem_seg/masks/{0}", TRAIN_IDS),
        ScenePlace("images/{0}", "labels/{0}", TRAIN_IDS, label_end="_train_id"),
        ScenePlace("seg/images/{0}", "seg/labels/{0}", TRAIN_IDS, label_end="_train_id"),
    ),
    "mapillary": (ScenePlace("{1}/images", "{1}/labels", VISTAS), ScenePlace("{1}/images", "{1}/v1.2/labels", VISTAS)),
    "gtav": (ScenePlace("images", "labels", GTAV, names=_listed),),
    "synthia": (
        ScenePlace("RGB", "GT/LABELS", SYNTHIA, names=_listed),
        ScenePlace("RAND_CITYSCAPES/RGB", "RAND_CITYSCAPES/GT/LABELS", SYNTHIA, names=_listed),
    ),
    "camvid": (
        ScenePlace("{0}/images", "{0}/labels", Encoding(street.CAMVID_IDS)),
        ScenePlace(
            "701_StillsRaw_full",
            "LabeledApproved_full",
            Encoding(colours=street.CAMVID_COLOURS),
            label_end="_L",
            names=_sequence,
        ),
    ),
    "streets": (ScenePlace("{0}/images", "{0}/labels", Encoding(street.STREETS_IDS)),),
}
