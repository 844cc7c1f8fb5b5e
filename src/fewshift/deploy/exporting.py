"""The front of export: a network, or the result of an adaptation, becomes a file that runs elsewhere.

No file is written before the same images went through PyTorch and through the runtime, and both agreed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fewshift import __version__
from fewshift.core._arguments import checked_path
from fewshift.core._display import Displayed, byte_size
from fewshift.core._files import whole, writing
from fewshift.core._progress import Progress, Stage, plan, stage, told_to
from fewshift.core.delta import Delta
from fewshift.core.hooks import keep_input
from fewshift.deploy import exported_programs, onnx_files, openvino_files
from fewshift.deploy.agreement import TOLERANCE, Agreement, ImageSample, Runner, compare_runs, runnable, sample_of
from fewshift.deploy.edge import Session
from fewshift.deploy.export_subjects import Subject
from fewshift.deploy.site_files import refuse_other_source, site_of, takes_bytes
from fewshift.deploy.site_format import BaseFile
from fewshift.deploy.tracing import Exportable, exportable, trace
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps, output_names
from fewshift.images.preprocess import Preprocess

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "openvino": ".xml", "site": ".site"}
RUNTIMES = {"onnx": "onnxruntime", "torch": "torch", "openvino": "openvino", "site": "onnxruntime"}
STAGES = (Stage("tracing", 3), Stage("writing", 4), Stage("comparing", 2))


@dataclass(frozen=True, repr=False)
class Export(Displayed):
    """A network in a file, and how far it agrees with the network in PyTorch."""

    path: Path
    format: str
    agreement: Agreement
    opset: int | None
    size: tuple[int | None, int | None]  # height and width that it takes; None where they are free
    in_bytes: bool  # whether scaling and normalisation are in the graph
    classes: tuple[str, ...] | None
    preprocess: Preprocess | None
    changed: int | None  # tensors, of a site
    nbytes: int  # of all its files

    @property
    def title(self) -> str:
        """What it is, and where."""
        return f"Export of a network: {self.path}"

    @property
    def runtime(self) -> str:
        """The package that it was compared by."""
        return RUNTIMES[self.format]

    @property
    def files(self) -> tuple[Path, ...]:
        """What was written."""
        return tuple(self.path.with_suffix(suffix) for suffix in _suffixes(self.format))

    @property
    def facts(self) -> dict[str, str]:
        """Format, input and agreement."""
        agreed = self.agreement
        height, width = ("any" if side is None else str(side) for side in self.size)
        opset = "" if self.opset is None else f", opset {self.opset}"
        changed = "" if self.changed is None else f", {self.changed} tensors"
        return {
            "format": f"{self.format}{opset}{changed}, {byte_size(self.nbytes)}",
            "images": (
                "uint8 (N, height, width, channels)" if self.in_bytes else "float32 (N, channels, height, width)"
            )
            + f", {height} x {width} pixels",
            "compared on": f"{agreed.images} {agreed.source.value}, in batches of {agreed.batch_sizes[0]} and "
            f"{agreed.batch_sizes[1]}",
            "largest difference": f"{agreed.difference:.1e} of logits up to {agreed.largest:.3g}, by {self.runtime}",
            "equal answers": f"{100 * agreed.equal:.2f} %",
        }

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        agreed = self.agreement
        return {
            "files": [str(file) for file in self.files],
            "format": self.format,
            "opset": self.opset,
            "bytes": self.nbytes,
            "size": list(self.size),
            "with_preprocessing": self.in_bytes,
            "classes": None if self.classes is None else list(self.classes),
            "preprocess": None if self.preprocess is None else self.preprocess.to_json(),
            "changed_tensors": self.changed,
            "runtime": self.runtime,
            "images": agreed.images,
            "images_are": agreed.source.value,
            "batch_sizes": list(agreed.batch_sizes),
            "largest_difference": agreed.difference,
            "largest_logit": agreed.largest,
            "equal_answers": agreed.equal,
        }


def export(
    model: Any,
    path: str | Path,
    *,
    delta: Delta | str | Path | None = None,
    base: str | Path | None = None,
    format: str | None = None,
    with_preprocessing: bool = False,
    images: Any = None,
    preprocess: Steps = None,
    classes: Sequence[str] | None = None,
    opset: int | None = None,
    progress: Progress = None,
) -> Export:
    """Write a network to a file that runs without its code, and check that it says the same there.

    `model` is the result of `adapt`, or a network; `delta` is applied to a copy first. The format follows from the
    suffix, or `format` says it: "onnx" (.onnx), "torch" (.pt2, torch.export), "openvino" (.xml and .bin), "site"
    (.site: what is different from `base`, the source network as ONNX; `fewshift.deploy.edge.Session` applies it
    without PyTorch). Batches may have any size, and so may images where the network labels pixels and allows it.

    With `with_preprocessing` the graph takes uint8 images (N, height, width, channels), RGB, already resized and
    cropped, and scales and normalises them. Class names and preprocessing are in the file: from the arguments, else
    from the adaptation or delta, else from the network's card.

    Before anything is written, the same images go through PyTorch and the runtime, alone and in a batch: `images` (a
    folder, files, or a tensor), else those of the adaptation, else made ones. A larger difference than rounding leaves
    is an error. A rejected adaptation is one too: pass `result.model`, the source network, if that is meant.
    """
    out = checked_path(path, "the output")
    kind = _format_of(out, format, base, opset)
    subject = Subject.of(model, delta, preprocess, classes)
    subject.refuse_overwriting([out.with_suffix(suffix) for suffix in _suffixes(kind)], delta, base)
    with told_to(progress), plan(STAGES), _files(out, _suffixes(kind)) as drafts:
        sample = sample_of(images, subject.images, subject.unlabelled, subject.steps, type(subject.model).__name__)
        if base is not None:
            return _as_site(out, drafts, subject, sample, BaseFile(checked_path(base, "the base")))
        return _as_network(out, kind, drafts, subject, sample, with_preprocessing, opset)


def _as_network(
    out: Path, kind: str, drafts: Sequence[Path], subject: Subject, sample: ImageSample, in_bytes: bool,
    opset: int | None,
) -> Export:  # fmt: skip
    """Trace, write to memory, compare, and only then write to disk."""
    steps = subject.need_steps() if in_bytes else None
    plain = exportable(subject.model, None)
    keep_input(plain)
    sample, output = _seen_by(plain, subject, sample, steps)
    module = exportable(subject.model, steps)
    with stage("tracing"):
        program = trace(module, sample.images[0], any_size=len(output) > 1)
    facts, chosen, size = subject.facts(sample.images[0].shape[0], in_bytes), None, _sizes(program, in_bytes)
    facts["input"]["size"] = size
    with stage("writing"):
        if kind == "torch":
            contents = [exported_programs.as_program(program, facts)]
            run: Runner = exported_programs.program_runner(contents[0])
        else:
            chosen = onnx_files.check_opset(onnx_files.OPSET if opset is None else opset)
            onnx, size = onnx_files.as_onnx(program, module, chosen, facts, facts["input"]["layout"])
            contents, run = [onnx], onnx_files.onnx_runner(onnx)
            if kind == "openvino":
                facts["input"]["size"] = size
                contents = list(openvino_files.as_openvino(onnx, facts))
                run = openvino_files.openvino_runner(*contents)
    agreement = _agreed(plain, run, sample, RUNTIMES[kind])
    for draft, content in zip(drafts, contents, strict=True):
        draft.write_bytes(content)
    return Export(
        out, kind, agreement, chosen, (size[0], size[1]), in_bytes, subject.classes, subject.stored_steps,
        changed=None, nbytes=sum(map(len, contents)),
    )  # fmt: skip


def _as_site(out: Path, drafts: Sequence[Path], subject: Subject, sample: ImageSample, base: BaseFile) -> Export:
    """What is different from the base, applied to it as a device does."""
    refuse_other_source(base, subject.source)
    steps = subject.need_steps() if takes_bytes(base) else None
    plain = exportable(subject.model, None)
    keep_input(plain)
    sample, _ = _seen_by(plain, subject, sample, steps)
    stored = None if subject.stored_steps is None else subject.stored_steps.to_json()
    about = {"version": __version__, **(subject.about or {})}
    site = site_of(base, exportable(subject.model, steps), subject.classes, stored, about)
    content = site.to_bytes()
    drafts[0].write_bytes(content)
    session = Session(base.path, drafts[0])
    agreement = _agreed(plain, session.run, sample, RUNTIMES["site"])
    height, width = session.input["size"]
    return Export(
        out, "site", agreement, None, (height, width), takes_bytes(base), subject.classes, subject.stored_steps,
        changed=len(site.tensors), nbytes=len(content),
    )  # fmt: skip


def _seen_by(
    plain: Exportable, subject: Subject, sample: ImageSample, steps: Preprocess | None
) -> tuple[ImageSample, tuple[int, ...]]:
    """The images as the network takes them, and the shape of its output; refuse names for other outputs."""
    sample, output = runnable(plain, sample)
    if subject.classes is not None:
        output_names(subject.classes, output[0])
    if len(output) == 1 and len({image.shape for image in sample.images}) > 1:
        raise FewshiftError("the images have different sizes: give a preprocessing with a crop, or images of one size")
    return (sample if steps is None else sample.in_bytes(steps)), output


def _agreed(plain: Exportable, run: Runner, sample: ImageSample, runtime: str) -> Agreement:
    """The agreement, or an error if there is none."""
    try:
        agreement = compare_runs(plain, run, sample)
    except FewshiftError:
        raise
    except Exception as error:  # runtimes have types of their own for what they cannot do
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise FewshiftError(f"{runtime} cannot run the exported network ({line}): choose another format") from error
    if not agreement.good:
        raise FewshiftError(
            f"the exported network differs: by {agreement.difference:.2g} for logits up to {agreement.largest:.2g}, "
            f"more than {TOLERANCE:g} of them, in {runtime}; {100 * agreement.equal:.1f} % of answers are equal; "
            "nothing was written: choose another format, or look for random numbers in its forward"
        )
    return agreement


def _format_of(out: Path, format: str | None, base: Any, opset: int | None) -> str:
    """The format that suffix and arguments name, or one sentence when they contradict each other."""
    known = {suffix: name for name, suffix in SUFFIXES.items()}
    if format is not None and format not in SUFFIXES:
        raise FewshiftError(f"format {format!r} is not known: choose one of {', '.join(SUFFIXES)}")
    kind = format or known.get(out.suffix)
    if kind is None:
        raise FewshiftError(f"{out} does not say its format: end it in one of {', '.join(known)}")
    if out.suffix != SUFFIXES[kind]:
        raise FewshiftError(f"{out} does not end in {SUFFIXES[kind]}, as files of format {kind} do: rename it")
    if (kind == "site") != (base is not None):
        raise FewshiftError(
            "a site file holds what is different from a base network: pass base=, the ONNX file of the source network"
            if base is None
            else f"only a site file has a base: end {out} in .site, or leave out the base"
        )
    if opset is not None:
        onnx_files.check_opset(opset)
        if kind in ("torch", "site"):
            raise FewshiftError(f"format {kind} has no opset: leave it out")
    if kind != "torch":
        onnx_files.need_packages("onnx", onnx_files.PACKAGES)
    if kind == "openvino":
        onnx_files.need_packages("openvino", openvino_files.PACKAGES)
    return kind


def _suffixes(kind: str) -> tuple[str, ...]:
    return (".xml", ".bin") if kind == "openvino" else (SUFFIXES[kind],)


def _sizes(program: Any, in_bytes: bool) -> list[int | None]:
    """Height and width that the graph takes; None where they are free."""
    name = program.graph_signature.user_inputs[0]
    shape = next(node for node in program.graph.nodes if node.name == name).meta["val"].shape
    sides = shape[1:3] if in_bytes else shape[2:4]
    return [side.node.maybe_as_int() if isinstance(side, torch.SymInt) else int(side) for side in sides]


@contextmanager
def _files(out: Path, suffixes: Sequence[str]) -> Iterator[list[Path]]:
    """Temporary paths that become the files if the block succeeds; a full disk is one sentence."""
    remedy = "nothing is left there; free some space, or choose another folder"
    with writing(out, remedy), ExitStack() as stack:
        yield [stack.enter_context(whole(out.with_suffix(suffix))) for suffix in suffixes]
