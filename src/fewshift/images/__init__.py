"""Images in: folders, scenes, the steps that turn an image into a tensor, and the digits that travel with the library.

`fewshift.lab.datasets.digits` is imported by name where it is wanted: it is a demonstration, and a command of its own.
"""

from fewshift.images.folders import IMAGE_SUFFIXES, ImageFolder, image_files, labelled_folder, open_image
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.images.scenes import Encoding, Scenes, scene_folder, scene_layout

__all__ = [
    "IMAGENET",
    "IMAGE_SUFFIXES",
    "Encoding",
    "ImageFolder",
    "Preprocess",
    "Scenes",
    "image_files",
    "labelled_folder",
    "open_image",
    "scene_folder",
    "scene_layout",
]
