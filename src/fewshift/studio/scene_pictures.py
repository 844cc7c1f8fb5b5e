"""Pictures of scenes: a photograph beneath the labels of its pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from fewshift.images.folders import open_image
from fewshift.images.label_files import Encoding, Palette, overlay, resized_labels
from fewshift.images.preprocess import Preprocess
from fewshift.images.sliding_window import label_map

SHOWN = 6  # scenes before and after
SIDE = 640  # pixels of the longer side


def labelled_picture(file: Path, label_file: Path, encoding: Encoding, palette: Palette, side: int) -> Image.Image:
    """A photograph beneath the labels of a file."""
    picture = _photograph(file, side)
    labels = torch.from_numpy(encoding.read(label_file))
    return overlay(picture, resized_labels(labels, picture.size), palette)


def seen_by(network: nn.Module, file: Path, steps: Preprocess, palette: Palette) -> Image.Image:
    """A photograph beneath what a network says about its pixels."""
    whole = replace(steps, crop=None)
    answer = label_map(network, whole(open_image(file, steps.mode)))
    picture = _photograph(file, SIDE)
    return overlay(picture, resized_labels(answer.labels, picture.size), palette)


def _photograph(file: Path, side: int) -> Image.Image:
    picture = open_image(file, "RGB")
    picture.thumbnail((side, side))
    return picture
