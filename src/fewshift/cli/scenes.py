"""Commands on scenes: what `adapt`, `predict` and `evaluate` do when every pixel has a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fewshift.cli.console import print_json, print_table, progress_bar
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fewshift.cli.loading import Loaded
    from fewshift.images import Preprocess
    from fewshift.images.scenes import Scenes
    from fewshift.images.sliding_window import LabelMap
    from fewshift.report.scenes import Scene, Scores

EXTREMES = 3  # images that a page shows of those that gained most, and of those that lost most


@dataclass(frozen=True)
class View:
    """How much of an image a network sees at once, in preprocessed pixels; None is all of it."""

    window: int | None = None
    stride: int | None = None

    def labels(self, network: nn.Module, image: torch.Tensor) -> LabelMap:
        """Label one image."""
        from fewshift.images.sliding_window import label_map

        return label_map(network, image, window=self.window, stride=self.stride)

    def answer(self, network: nn.Module, steps: Preprocess, files: Sequence[Path]) -> tuple[int, ...]:
        """The shape of the network's answer to the first image that can be read: (classes,) or (classes, h, w)."""
        from fewshift.images import open_image
        from fewshift.images.sliding_window import output_shape

        refusal = FewshiftError("there are no images: give some")
        for number, file in enumerate(files):
            try:
                image = steps(open_image(file, steps.mode))
            except FewshiftError as error:
                refusal = refusal if number else error
                continue
            return output_shape(network, image, self.window, self.stride)
        raise refusal

    def refuse(self) -> None:
        """One sentence where there is nothing to look at through a window."""
        if self.window is not None or self.stride is not None:
            raise FewshiftError("this network gives one answer for an image: leave out --window and --stride")


def open_scenes(root: Path, loaded: Loaded, steps: Preprocess, view: View) -> Scenes | None:
    """The labelled scenes of a folder, with the network's classes; None for a folder that has none."""
    from fewshift.images import image_files
    from fewshift.images.scenes import scene_folder, scene_layout

    where = scene_layout(root)
    if where is None:
        return None
    shape = view.answer(loaded.model, steps, image_files(where.images))
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


# --- predict


@dataclass(frozen=True)
class Output:
    """A folder of label maps, and what becomes of those that are in it already."""

    folder: Path | None
    overwrite: bool = False
    resume: bool = False

    def checked(self, root: Path) -> Path:
        """Where to write, or one sentence why not."""
        if self.folder is None:
            raise FewshiftError("this network labels every pixel: pass --out FOLDER for its label maps and overlays")
        if self.folder.exists() and not self.folder.is_dir():
            raise FewshiftError(f"{self.folder} is not a folder: choose another --out")
        if root.is_dir() and self.folder.resolve().is_relative_to(root.resolve()):
            raise FewshiftError(f"{self.folder} lies among the images: choose an --out that is not inside {root}")
        if (self.folder / "labels").is_dir() and root.resolve().is_relative_to((self.folder / "images").resolve()):
            raise FewshiftError(f"{self.folder / 'labels'} has the labels of these images: choose another --out")
        return self.folder

    def check(self, folder: Path, targets: Sequence[Mapping[str, Path]], run: str) -> None:
        """One sentence if files would be written over that are not to be."""
        from fewshift.images.label_files import PALETTE_FILE, origin_of

        if self.overwrite:
            return
        taken = [it for target in targets for it in target.values() if it.exists()]
        if not self.resume and (taken or (folder / PALETTE_FILE).exists()):
            raise FewshiftError(
                f"{(*taken, folder / PALETTE_FILE)[0]} exists already: pass --resume to go on, --overwrite to replace "
                "it, or choose another --out"
            )
        for file in (it["labels"] for it in targets if it["labels"].exists()):
            if (origin_of(file) or ("",))[0].partition(" ")[0] != run:
                raise FewshiftError(
                    f"{file} is not by this network, classes and options: pass --overwrite to replace it, or choose "
                    "another --out"
                )

    def refuse(self) -> None:
        """One sentence where there is no folder to go on with."""
        if self.overwrite or self.resume:
            raise FewshiftError(
                "this network gives one answer for an image, and a table is always written anew: leave out "
                "--overwrite and --resume"
            )


def predict_scenes(
    loaded: Loaded,
    steps: Preprocess,
    names: Sequence[str],
    view: View,
    root: Path,
    files: Sequence[Path],
    out: Output,
    as_json: bool,
) -> None:
    """Write a label map in the size of each image, and an overlay to look at; images that are broken come last."""
    import torch

    from fewshift.images.label_files import palette_of
    from fewshift.report.prose import counted

    folder, palette = out.checked(root), palette_of(names)
    if steps.crop is not None:
        typer.echo(f"the crop to {steps.crop} pixels is left out: every pixel of an image gets a label", err=True)
        steps = replace(steps, crop=None)
    run = _Run(loaded.model, steps, view, palette, _fingerprint(loaded.model, steps, names, view))
    targets = _targets(root, files, folder)
    out.check(folder, targets, run.name)
    _make_folders(targets)
    _write_palette(folder, names, palette)
    pixels, written, broken = torch.zeros(len(names), dtype=torch.long), [], []
    with progress_bar() as tell:
        for done, (file, target) in enumerate(zip(files, targets, strict=True), 1):
            labels, confidence, error = run.labelled(file, target, out.resume)
            if labels is None:
                broken.append({"file": str(file), "error": error})
            else:
                pixels += labels.flatten().long().bincount(minlength=len(names))
                paths = {key: str(path) for key, path in ({"file": file} | target).items()}
                written.append(paths | {"confidence": round(confidence, 6)})
            tell("images", done, len(files))
    counts = dict(zip(names, pixels.tolist(), strict=True))
    if as_json:
        print_json({"images": written, "pixels": counts, "broken": broken})
    else:
        rows = [[name, f"{it:,}", f"{100 * it / sum(counts.values()):.1f}"] for name, it in counts.items() if it]
        print_table(f"{counted(len(written), 'image')} labelled", ["class", "pixels", "%"], rows)
        typer.echo(f"label maps: {folder / 'labels'}, to look at: {folder / 'overlays'}")
    if broken:
        raise FewshiftError(
            f"{len(broken)} of {counted(len(files), 'image')} could not be labelled, the first because "
            f"{broken[0]['error']}, then pass --resume"
        )


@dataclass(frozen=True)
class _Run:
    """One network on one image after the other. A label file tells from which run it is, so that others can go on."""

    network: nn.Module
    steps: Preprocess
    view: View
    palette: Sequence[tuple[int, int, int]]
    name: str

    def labelled(
        self, file: Path, target: Mapping[str, Path], resume: bool
    ) -> tuple[torch.Tensor | None, float, str | None]:
        """The labels of an image and how sure they are, written, or what is wrong with the image."""
        from fewshift.images import open_image
        from fewshift.images.label_files import origin_of, resized_labels, write_labels, write_overlay

        try:
            name = f"{self.name} {_content(file)}"
            known = origin_of(target["labels"]) if resume and target["overlay"].is_file() else None
            if known is not None and known[0] == name:
                return _stored(target["labels"]), known[1], None
            image = open_image(file, self.steps.mode)
            tensor = self.steps(image)
        except FewshiftError as error:
            return None, 0.0, str(error) if str(file) in str(error) else f"{file}: {error}"
        answer = self.view.labels(self.network, tensor)
        labels, confidence = resized_labels(answer.labels, image.size), float(answer.confidence.mean())
        write_overlay(target["overlay"], image, labels, self.palette)
        write_labels(
            target["labels"], labels, self.palette, origin=(name, confidence)
        )  # last: it tells that all is done
        return labels, confidence, None


def _content(file: Path) -> str:
    """A word that changes when an image does."""
    import hashlib

    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise FewshiftError(f"{file} cannot be read ({error.strerror}): replace or remove it") from error


def _stored(file: Path) -> torch.Tensor:
    import numpy as np
    import torch

    from fewshift.images.preprocess import opened

    with opened(file) as image:
        return torch.from_numpy(np.array(image))


def _fingerprint(network: nn.Module, steps: Preprocess, names: Sequence[str], view: View) -> str:
    """A word for everything that a label map depends on but the image."""
    import hashlib

    import torch

    facts = hashlib.sha256(repr((type(network).__name__, steps, tuple(names), view)).encode())
    for name, tensor in network.state_dict().items():
        facts.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            facts.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return facts.hexdigest()[:16]


def _write_palette(folder: Path, names: Sequence[str], palette: Sequence[tuple[int, int, int]]) -> None:
    """What the colours of the label maps mean; written first, so that whatever is there can be read."""
    from fewshift.core._files import whole
    from fewshift.images.label_files import PALETTE_FILE

    lines = (f"{' '.join(map(str, colour))} {name}\n" for colour, name in zip(palette, names, strict=True))
    with whole(folder / PALETTE_FILE) as draft:
        draft.write_text("".join(lines), encoding="utf-8")


def _targets(root: Path, files: Sequence[Path], folder: Path) -> list[dict[str, Path]]:
    """A label map and an overlay for each image, by its path below `root`."""
    paths = [Path(file.name) if file == root else file.relative_to(root) for file in files]
    counts = Counter(path.with_suffix("") for path in paths)
    # a.jpg beside a.png: then both keep their endings
    names = [path if counts[path.with_suffix("")] > 1 else path.with_suffix("") for path in paths]
    kinds = {"labels": ("labels", "png"), "overlay": ("overlays", "jpg")}
    return [{key: folder / place / f"{it}.{end}" for key, (place, end) in kinds.items()} for it in names]


def _make_folders(targets: Sequence[Mapping[str, Path]]) -> None:
    for place in {it.parent for target in targets for it in target.values()}:
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FewshiftError(f"cannot write into {place}: {error.strerror}: choose another --out") from error


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

        from fewshift.core.metrics import mean_iou, pixel_tally
        from fewshift.report.prose import counted
        from fewshift.report.scenes import Scores, Sizes

        count = len(self.scenes.classes)
        tallies = {name: torch.zeros(count, count, dtype=torch.long) for name in self.networks}
        images: dict[str, list[float]] = {name: [] for name in self.networks}
        seen, taken = set(), set()
        with progress_bar() as tell:
            for index in range(len(self.scenes)):
                scene = self.scene(index)
                seen.add((scene.labels.shape[1], scene.labels.shape[0]))
                taken.add(self.scenes.size(index))
                for name, answer in scene.answers.items():
                    found = pixel_tally(scene.labels.long(), answer.long(), count)
                    tallies[name] += found
                    images[name].append(mean_iou(found))
                tell("images", index + 1, len(self.scenes))
        if not any(counts.any() for counts in tallies.values()):
            raise FewshiftError(f"no pixel of {counted(len(self.scenes), 'image')} is labelled: label some")
        return Scores(self.scenes.classes, tallies, images, self.scenes.palette, Sizes(sorted(seen), sorted(taken)))

    def scene(self, index: int) -> Scene:
        """One image, its labels, and what each network says."""
        from fewshift.report.scenes import Scene

        pixels, labels = self.scenes.pixels(index)
        image = self.scenes.preprocess.normalise(pixels)
        answers = {name: self.view.labels(network, image).labels for name, network in self.networks.items()}
        return Scene(self.scenes.files[index].name, pixels, labels, answers)

    def page(self, path: Path, origin: Mapping[str, Any]) -> Path:
        """Write a page with the images that gained and that lost most."""
        from fewshift.report.pages import evaluation_page

        gained, lost = ([self.scene(index) for index in chosen] for chosen in self.scores.extremes(EXTREMES))
        return evaluation_page(self.scores, gained, lost, path, origin=origin)


def print_scores(scores: Scores, page: Path | None, as_json: bool) -> None:
    """The IoU of each class, their mean, and the share of pixels that is right, in percent."""
    from fewshift.report.prose import counted

    networks = list(scores.tallies)
    count, pixels = len(next(iter(scores.images.values()))), sum(scores.pixels)
    if as_json:
        per_class = {
            name: {"pixels": own, "iou": dict(zip(networks, values, strict=True))} for name, own, values in scores.rows
        }
        facts = {"images": count, "pixels": pixels, "mean_iou": scores.mean_iou, "pixel_accuracy": scores.accuracy}
        if scores.sizes is not None:
            facts |= {"sizes": {"counted": list(scores.sizes.counted), "files": list(scores.sizes.files)}}
        print_json(facts | {"per_class": per_class, "report": None if page is None else str(page)})
        return
    rows = [[name, f"{own:,}", *map(_percent, values)] for name, own, values in scores.rows]
    rows.append(["mean IoU", "-", *map(_percent, scores.mean_iou.values())])
    rows.append(["pixel accuracy", f"{pixels:,}", *map(_percent, scores.accuracy.values())])
    title = f"IoU in %, {counted(count, 'image')}{f', {scores.sizes}' if scores.sizes else ''}"
    print_table(title, ["class", "pixels", *(f"{name} IoU" for name in networks)], rows)
    if page is not None:
        typer.echo(f"report: {page} ({page.stat().st_size:,} bytes)")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
