"""A network and a folder of images, made to fit each other before the page opens."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image
from torch import nn

from fewshift.api import known_card
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps, output_names
from fewshift.images.preprocess import FileSteps, Preprocess, as_steps
from fewshift.images.scenes import Scenes, scene_folder
from fewshift.images.sliding_window import output_shape
from fewshift.studio.gallery import Gallery

BLANK = (256, 256)  # pixels of the empty picture that shows what a network's output looks like


def opened_outputs(
    model: nn.Module, preprocess: Steps, names: Sequence[str] | None, gallery: Gallery
) -> tuple[FileSteps, tuple[str, ...]]:
    """The preprocessing, and a name for each output; one sentence where network and folder do not fit."""
    steps = known_card(model).preprocess if preprocess is None else as_steps(preprocess)
    if steps is None:
        raise FewshiftError(
            f"how the {type(model).__name__} wants its images is not known: pass preprocess=, as to adapt"
        )
    shape = output_shape(model, steps(Image.new(steps.mode, BLANK)), None, None)
    if len(shape) > 1 and gallery.scenes is None:
        raise FewshiftError(
            f"the {type(model).__name__} labels every pixel, and {gallery.folder} has no images/ and labels/: paint "
            "labels with another program and put them there"
        )
    if len(shape) == 1 and gallery.scenes is not None:
        raise FewshiftError(
            f"{gallery.folder} has images/ and labels/ for pixels, and the {type(model).__name__} has one output per "
            f"image: give {gallery.scenes.images}, or a network that labels pixels"
        )
    return steps, output_names(names, shape[0])


def opened_scenes(gallery: Gallery, steps: FileSteps, names: Sequence[str]) -> Scenes | None:
    """The scenes that have label files; None where images have one label each."""
    if gallery.scenes is None:
        return None
    if not isinstance(steps, Preprocess):
        raise FewshiftError("labels of pixels need a Preprocess: pass preprocess=fewshift.Preprocess(...)")
    return scene_folder(gallery.folder, steps, names, wanted=labelled_scenes(gallery))


def labelled_scenes(gallery: Gallery) -> frozenset[str]:
    """The names, without folders and suffixes, of the images that have label files."""
    assert gallery.scenes is not None
    end = gallery.scenes.image_end
    with_labels = (image for image in gallery.images if gallery.label_file(image.number) is not None)
    return frozenset(image.file.stem.removesuffix(end) for image in with_labels)
