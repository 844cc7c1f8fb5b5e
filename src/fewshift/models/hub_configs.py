"""What `config.json` and `preprocessor_config.json` of timm and Hugging Face say, in the words of a card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from fewshift.errors import FewshiftError
from fewshift.files.parsing import read_json, whole_number

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PREFIX = "hf:"
TASK = "ForImageClassification"
CONVNEXT_SQUEEZES_FROM = 384  # pixels; below, ConvNextImageProcessor crops
TIMM_CROP = 0.875  # timm's share of the image where a config does not say


def card_of_config(path: Path) -> dict[str, Any] | None:
    """The card that a `config.json` amounts to; None if it is neither timm's nor that of an image classifier."""
    config = _read(path)
    if isinstance(config.get("architecture"), str):
        return _known(_timm(config))
    if image_classifier(config) is None:
        return None
    return _known(
        {
            "arch": f"{PREFIX}{path.parent}",
            "classes": _class_names(config.get("id2label")),
            **preprocessing(path.parent),
        }
    )


def image_classifier(config: Mapping[str, Any]) -> str | None:
    """The class of transformers that a config names, if that is an image classifier."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.endswith(TASK) else None


def preprocessing(folder: Path) -> dict[str, Any]:
    """The steps in a folder's `preprocessor_config.json`; nothing if there is none."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    steps = _read(path)
    if steps.get("do_flip_channel_order"):
        raise FewshiftError(
            f"{path} wants blue before red (do_flip_channel_order), and images are read here with red first: "
            "wrap the network in a module that flips the channels"
        )
    try:
        return {**_sizes(steps), **_normalisation(steps), **_interpolation(steps.get("resample"))}
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise FewshiftError(f"{path} cannot be read ({error!r}): write a card with fewshift card") from error


def saved_weights(folder: Path) -> Path:
    """The weights that `save_pretrained` wrote into a folder."""
    if not (folder / CONFIG).is_file():
        raise FewshiftError(
            f"{PREFIX}{folder} is no folder with a {CONFIG}: name one that save_pretrained wrote, or download it first"
        )
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FewshiftError(
            f"{folder} has no {path.name}: write it with save_pretrained, in one file; other files are not read"
        )
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's `config.json`; nothing if it is none."""
    return _read(folder / CONFIG)


def _timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """A card from timm's hub format, in which older files have no `pretrained_cfg` and say everything at the top."""
    steps = config.get("pretrained_cfg")
    steps = steps if isinstance(steps, dict) else config
    card: dict[str, Any] = {
        "arch": f"timm:{config['architecture']}",
        "classes": _class_names(config.get("label_names") or steps.get("label_names") or config.get("id2label")),
        "mean": steps.get("mean"),
        "std": steps.get("std"),
        "interpolation": steps.get("interpolation"),
    }
    with suppress(KeyError, TypeError, ValueError, ArithmeticError):
        _, height, width = steps["input_size"]
        if height == width and steps.get("crop_mode") in (None, "center", "squash"):
            card |= {"resize": math.floor(height / steps.get("crop_pct", TIMM_CROP)), "crop": height}
            card["squeeze"] = True if steps.get("crop_mode") == "squash" else None
    return card


def _sizes(steps: Mapping[str, Any]) -> dict[str, Any]:
    size, crop = steps.get("size"), steps.get("crop_size")
    sizes: dict[str, Any] = {"resize": None, "crop": None}
    if steps.get("do_resize", True) and size is not None:
        sizes = _resized(size if isinstance(size, dict) else {"shortest_edge": size}, steps.get("crop_pct"))
    if steps.get("do_center_crop", False) and crop is not None:
        sizes["crop"] = crop if isinstance(crop, int) else _square(crop)
    return sizes


def _resized(size: Mapping[str, Any], share: float | None) -> dict[str, Any]:
    if "shortest_edge" not in size:
        return {"resize": _square(size), "crop": None, "squeeze": True}
    edge = int(size["shortest_edge"])
    if share is None:
        return {"resize": edge, "crop": None}
    if edge >= CONVNEXT_SQUEEZES_FROM:
        return {"resize": edge, "crop": None, "squeeze": True}
    return {"resize": int(edge / share), "crop": edge}


def _square(size: Mapping[str, Any]) -> int:
    if size["height"] != size["width"]:
        raise ValueError(f"{size['height']}x{size['width']} is not square")
    return int(size["height"])


def _normalisation(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and deviation for values in [0, 1], where theirs may be for other ranges."""
    scale = 255 * (steps.get("rescale_factor", 1 / 255) if steps.get("do_rescale", True) else 1.0)
    offset = 1.0 if steps.get("rescale_offset") else 0.0  # EfficientNet's: x * factor - 1
    mean, std = [0.0] * 3, [1.0] * 3
    if steps.get("do_normalize", True):
        mean, std = steps["image_mean"], steps["image_std"]
    deviation = [value**2 for value in std] if steps.get("include_top") else std  # EfficientNet divides twice
    return {
        "mean": [(value + offset) / scale for value in mean],
        "std": [value / scale for value in deviation],
    }


def _interpolation(resample: Any) -> dict[str, str]:
    return {} if resample is None else {"interpolation": Image.Resampling(resample).name.lower()}


def _class_names(names: Any) -> list[str] | None:
    """The class names in their order. Of equal ones, each gets its number; names that say nothing are none."""
    if isinstance(names, dict):
        keys = {whole_number(key): str(name) for key, name in names.items()}
        numbers = {number: name for number, name in keys.items() if number is not None}
        names = [numbers[key] for key in sorted(numbers)] if sorted(numbers) == list(range(len(names))) else None
    if not isinstance(names, list) or len(names) < 2 or _say_nothing(names):
        return None
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def _say_nothing(names: Sequence[Any]) -> bool:
    """Whether these are transformers' own names for classes without names, or no names."""
    return any(not isinstance(name, str) for name in names) or all(
        name == f"LABEL_{number}" for number, name in enumerate(names)
    )


def _known(card: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in card.items() if value is not None or key in ("resize", "crop")}


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one for any other content, which is not ours to judge."""
    try:
        data = read_json(path, path, "mend or remove it")
    except FewshiftError:
        return {}
    return data if isinstance(data, dict) else {}
