"""Commands on scenes: what `adapt`, `predict` and `evaluate` do when every pixel has a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fewshift.cli.console import print_json, print_table, progress_bar
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fewshift.data import Preprocess
    from fewshift.data.scenes import Scenes
    from fewshift.models import Loaded
    from fewshift.report.scenes import Scene, Scores
    from fewshift.target import Support
    from fewshift.windows import LabelMap

EXTREMES = 3  # images that a page shows of those that gained most, and of those that lost most


@dataclass(frozen=True)
class View:
    """How much of an image a network sees at once, in preprocessed pixels; None is all of it."""

    window: int | None = None
    stride: int | None = None

    def labels(self, network: nn.Module, image: torch.Tensor) -> LabelMap:
        """Label one image."""
        from fewshift.windows import label_map

        return label_map(network, image, window=self.window, stride=self.stride)

    def answer(self, network: nn.Module, steps: Preprocess, file: Path) -> tuple[int, ...]:
        """The shape of the network's answer to an image: (classes,) or (classes, height, width)."""
        from fewshift.data import open_image
        from fewshift.windows import output_shape

        return output_shape(network, steps(open_image(file, steps.mode)), self.window, self.stride)

    def refuse(self) -> None:
        """One sentence where there is nothing to look at through a window."""
        if self.window is not None or self.stride is not None:
            raise FewshiftError("this network gives one answer for an image: leave out --window and --stride")


def open_scenes(root: Path, loaded: Loaded, steps: Preprocess, view: View) -> Scenes | None:
    """The labelled scenes of a folder, with the network's classes; None for a folder that has none."""
    from fewshift.data import image_files
    from fewshift.data.scenes import scene_folder, scene_layout

    where = scene_layout(root)
    if where is None:
        return None
    shape = view.answer(loaded.model, steps, image_files(where.images)[0])
    if len(shape) != 3:
        raise FewshiftError(
            f"{root} has pixel labels, and {loaded.name} gives one answer for an image: "
            "make one folder per class, or use a network that labels pixels"
        )
    return scene_folder(root, steps, class_names(loaded, shape))


def class_names(loaded: Loaded, shape: tuple[int, ...]) -> tuple[str, ...]:
    """A name for each output of the network; numbers where it has none."""
    names = loaded.classes or tuple(map(str, range(shape[0])))
    if len(names) != shape[0]:
        raise FewshiftError(
            f"{len(names)} class names and {shape[0]} outputs of {loaded.name}: name its outputs with --classes, "
            "in their order"
        )
    return names


def draw_scenes(scenes: Scenes, shots: int | None, seed: int) -> Support:
    """A support set of `shots` images in all, or of all there are; the draw for k is part of the draw for k + 1."""
    import torch

    from fewshift.target import Support

    if shots is not None and shots > len(scenes):
        raise FewshiftError(
            f"there are {len(scenes)} labelled images, {shots} shots asked: "
            f"add {shots - len(scenes)} or ask for {len(scenes)}"
        )
    if shots is not None:
        order = torch.randperm(len(scenes), generator=torch.Generator().manual_seed(seed))
        scenes = scenes.subset(order[:shots].tolist())
    images, labels = zip(*(scenes[index] for index in range(len(scenes))), strict=True)
    return Support(images, labels, scenes.classes)


# --- predict


def predict_scenes(
    loaded: Loaded,
    steps: Preprocess,
    names: Sequence[str],
    view: View,
    root: Path,
    files: Sequence[Path],
    out: Path | None,
    as_json: bool,
) -> None:
    """Write a label map in the size of each image, and an overlay to look at."""
    import torch

    from fewshift.data import open_image
    from fewshift.data.colours import palette_of
    from fewshift.data.scenes import PALETTE_FILE
    from fewshift.files import whole
    from fewshift.report.scenes import resized_labels, write_labels, write_overlay

    palette, folder = palette_of(names), _folder(out, root, steps)
    targets = _targets(root, files, folder)
    pixels = torch.zeros(len(names), dtype=torch.long)
    written = []
    with progress_bar() as tell:
        for done, (file, target) in enumerate(zip(files, targets, strict=True), 1):
            image = open_image(file, steps.mode)
            found = view.labels(loaded.model, steps(image))
            labels = resized_labels(found.labels, image.size)
            write_labels(target["labels"], labels, palette)
            write_overlay(target["overlay"], image, labels, palette)
            pixels += labels.flatten().long().bincount(minlength=len(names))
            paths = {key: str(path) for key, path in ({"file": file} | target).items()}
            written.append(paths | {"confidence": round(float(found.confidence.mean()), 6)})
            tell("images", done, len(files))
    with whole(folder / PALETTE_FILE) as draft:
        lines = (f"{' '.join(map(str, colour))} {name}\n" for colour, name in zip(palette, names, strict=True))
        draft.write_text("".join(lines), encoding="utf-8")
    counts = dict(zip(names, pixels.tolist(), strict=True))
    if as_json:
        print_json({"images": written, "pixels": counts})
        return
    rows = [[name, f"{it:,}", f"{100 * it / sum(counts.values()):.1f}"] for name, it in counts.items() if it]
    print_table(f"{len(files)} images labelled", ["class", "pixels", "%"], rows)
    typer.echo(f"label maps: {folder / 'labels'}, to look at: {folder / 'overlays'}")


def _folder(out: Path | None, root: Path, steps: Preprocess) -> Path:
    """Where to write, or one sentence why not."""
    if out is None:
        raise FewshiftError("this network labels every pixel: pass --out FOLDER for its label maps and overlays")
    if steps.crop is not None:
        raise FewshiftError(
            f"the preprocessing crops images to {steps.crop} pixels, and those outside would have no label: "
            "leave out --crop, or take it out of the card"
        )
    if out.exists() and not out.is_dir():
        raise FewshiftError(f"{out} is not a folder: choose another --out")
    if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise FewshiftError(f"{out} lies among the images: choose an --out that is not inside {root}")
    return out


def _targets(root: Path, files: Sequence[Path], out: Path) -> list[dict[str, Path]]:
    """A label map and an overlay for each image, by its path below `root`; what exists is not written over."""
    from fewshift.data.scenes import PALETTE_FILE

    paths = [Path(file.name) if file == root else file.relative_to(root) for file in files]
    counts = Counter(path.with_suffix("") for path in paths)
    # a.jpg beside a.png: then both keep their endings
    names = [path if counts[path.with_suffix("")] > 1 else path.with_suffix("") for path in paths]
    targets = [{"labels": out / "labels" / f"{it}.png", "overlay": out / "overlays" / f"{it}.jpg"} for it in names]
    taken = [it for target in targets for it in target.values() if it.exists()]
    if taken or (out / PALETTE_FILE).exists():
        raise FewshiftError(f"{(*taken, out / PALETTE_FILE)[0]} exists already: choose another --out, or remove it")
    for folder in {it.parent for target in targets for it in target.values()}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FewshiftError(f"cannot write into {folder}: {error.strerror}: choose another --out") from error
    return targets


# --- evaluate


@dataclass(frozen=True)
class Judged:
    """Networks on labelled scenes. Answers are not kept: what a page shows is asked for again."""

    networks: Mapping[str, nn.Module]
    scenes: Scenes
    view: View

    @cached_property
    def scores(self) -> Scores:
        """One tally over all pixels for each network, and the IoU of every image."""
        import torch

        from fewshift.metrics import mean_iou, pixel_tally
        from fewshift.report.scenes import Scores

        count = len(self.scenes.classes)
        tallies = {name: torch.zeros(count, count, dtype=torch.long) for name in self.networks}
        images: dict[str, list[float]] = {name: [] for name in self.networks}
        with progress_bar() as tell:
            for index in range(len(self.scenes)):
                scene = self.scene(index)
                for name, answer in scene.answers.items():
                    found = pixel_tally(scene.labels.long(), answer.long(), count)
                    tallies[name] += found
                    images[name].append(mean_iou(found))
                tell("images", index + 1, len(self.scenes))
        if not any(counts.any() for counts in tallies.values()):
            raise FewshiftError(f"no pixel of these {len(self.scenes)} images is labelled: label some")
        return Scores(self.scenes.classes, tallies, images, self.scenes.palette)

    def scene(self, index: int) -> Scene:
        """One image, its labels, and what each network says."""
        from fewshift.report.scenes import Scene

        pixels, labels = self.scenes.pixels(index)
        image = self.scenes.preprocess.normalise(pixels)
        answers = {name: self.view.labels(network, image).labels for name, network in self.networks.items()}
        return Scene(self.scenes.files[index].name, pixels, labels, answers)

    def page(self, path: Path, origin: Mapping[str, Any]) -> Path:
        """Write a page with the images that gained and that lost most."""
        from fewshift.report.html import evaluation_page

        gained, lost = ([self.scene(index) for index in chosen] for chosen in self.scores.extremes(EXTREMES))
        return evaluation_page(self.scores, gained, lost, path, origin=origin)


def print_scores(scores: Scores, page: Path | None, as_json: bool) -> None:
    """The IoU of each class, their mean, and the share of pixels that is right, in percent."""
    networks = list(scores.tallies)
    count, pixels = len(next(iter(scores.images.values()))), sum(scores.pixels)
    if as_json:
        per_class = {
            name: {"pixels": own, "iou": dict(zip(networks, values, strict=True))} for name, own, values in scores.rows
        }
        facts = {"images": count, "pixels": pixels, "mean_iou": scores.mean_iou, "pixel_accuracy": scores.accuracy}
        print_json(facts | {"per_class": per_class, "report": None if page is None else str(page)})
        return
    rows = [[name, f"{own:,}", *map(_percent, values)] for name, own, values in scores.rows]
    rows.append(["mean IoU", "-", *map(_percent, scores.mean_iou.values())])
    rows.append(["pixel accuracy", f"{pixels:,}", *map(_percent, scores.accuracy.values())])
    print_table(f"IoU in %, {count} images", ["class", "pixels", *(f"{name} IoU" for name in networks)], rows)
    if page is not None:
        typer.echo(f"report: {page} ({page.stat().st_size:,} bytes)")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
