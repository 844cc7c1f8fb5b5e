"""Files to tensors and back: folders of images, scenes with a label for every pixel, and preprocessing."""

from fewshift.images.folders import IMAGE_SUFFIXES, ImageFolder, image_files, labelled_folder, open_image
from fewshift.images.label_files import Encoding
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.images.scenes import Scenes, scene_folder, scene_layout

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
