"""What a user calls: every operation of the package in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, Unpack

import torch
from torch import Tensor, nn

from fewshift.core._progress import Listener, Progress, Stage, counted, plan, stage, told_to
from fewshift.core.delta import Delta, apply, revert
from fewshift.core.labels import Augment
from fewshift.core.losses import Loss
from fewshift.core.method import Method, Needs
from fewshift.core.network import Network, list_layers
from fewshift.core.support import Support
from fewshift.deploy.bulk import Predictions, PredictOptions, predict_files
from fewshift.deploy.listing import Files
from fewshift.deploy.merged import merge
from fewshift.errors import FewshiftError
from fewshift.images.formats import looks_like_an_image
from fewshift.images.inputs import Steps, as_labelled, left_out
from fewshift.images.sliding_window import Size
from fewshift.methods.catalog import method_from_words, method_of, sized
from fewshift.models.cards import known_card
from fewshift.models.libraries import load
from fewshift.opening import Opened, blank_images, looking_first, open_networks, open_target
from fewshift.report.comparison import Comparison
from fewshift.report.learning_curve import LearningCurve
from fewshift.report.results import Adaptation, Inspection, layer_reports
from fewshift.trust import comparison
from fewshift.trust import learning_curve as curve
from fewshift.trust.calibration import calibrate
from fewshift.trust.choice import adapted_to, fit_chosen, stages_of
from fewshift.trust.evaluation import Evaluation, evaluate_networks
from fewshift.trust.evidence import gather
from fewshift.trust.guard import Accept, check_accept, decide
from fewshift.trust.leaks import find_leaks, refuse_leaks, refuse_repeats
from fewshift.trust.sanity import believed, look_after
from fewshift.trust.shift import shift

__all__ = ["Listener", "apply", "counted", "known_card", "left_out", "load", "method_from_words", "method_of", "revert"]
__all__ += ["looks_like_an_image", "merge", "shift", "told_to"]


def adapt(
    model: nn.Module,
    support: Any,
    *,
    method: str | Method = "auto",
    unlabelled: Any = None,
    shots: int | None = None,
    loss: Loss | None = None,
    preprocess: Steps = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    validate: Any = "cv",
    accept: Accept = "not-worse",
    size: str | None = None,
    drop_suspects: bool = False,
    check: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Progress = None,
) -> Adaptation:
    """Fit `model` to the place that `support` comes from.

    `support` is a folder of class folders (or one with images/ and labels/), a CSV or JSON file or a list of (path,
    label), tensors (images, labels), a dataset of such pairs or batches of them; None for a method that looks at
    `unlabelled` images alone. `shots` draws that many images per class (with pixel labels: in all). `preprocess`, a
    `Preprocess` or any function, makes a tensor of a picture; a network from `fewshift.load` or timm knows; a delta
    cannot store a function. Without `classes`, class names in alphabetical order are the network's outputs.

    `method` is a name or a method; "auto" is our best answer. Its `size` is "any", or "small" for a delta of kilobytes:
    BatchNorm and the head alone. `validate` is where the evidence comes from: "cv" (the support, cross-validated),
    "loo" (one image left out at a time), other labelled images of the target, or None. `accept` is the guard: "not-
    worse" (the evidence for it is stronger than chance), "better", a number of points that the whole interval has to
    exceed, a callable that takes the gain, or "always". A rejected adaptation comes back as the source network.
    `drop_suspects` adapts once more without images whose label looks wrong: `dropped` of the result. What else looks
    wrong is in `warnings`; labels in another order than the outputs are an error, unless `check` is false. `progress`
    is True for a bar, or a callable (what, done, total).

    The model is never changed, nor is the global random state; the same arguments and seed give the same result.
    """
    began = time.perf_counter()
    check_accept(accept)
    chosen = sized(method_of(method), size)
    if chosen.needs is Needs.STREAM:
        raise FewshiftError(
            f"{chosen.name} adapts while it predicts a stream: feed batches to METHODS['{chosen.name}']().adapt(...)"
        )
    with told_to(progress, "adapting"), plan(looking_first(chosen, stages_of(chosen, validate, twice=drop_suspects))):
        opened = open_target(
            model, support, unlabelled, needs=chosen, loss=loss, preprocess=preprocess, augment=augment,
            classes=classes, shots=shots, head=head, seed=seed, device=device,
        ).checked(refuse=check)  # fmt: skip
        judges = opened.evidence_from(validate, preprocess)
        result = _adapted(opened, chosen, judges, accept, seed)
        if drop_suspects and opened.target.support is not None and result.suspects:
            left = replace(opened.target, support=result.suspects.removed_from(opened.target.support))
            again = _adapted(replace(opened, target=left), chosen, judges, accept, seed)
            result = replace(again, dropped=tuple(result.suspects))
    return replace(result, seconds=time.perf_counter() - began).settled()


def _adapted(opened: Opened, method: Method, judges: str | Support | None, accept: Accept, seed: int) -> Adaptation:
    """Fit, gather the evidence, calibrate and decide."""
    began = time.perf_counter()
    network, target = opened.network, opened.target
    fitted, choice = stage("fitting")(fit_chosen)(network, target, method, seed)
    cautions = look_after(opened.cautions, network, fitted.predictor, target)
    evidence = believed(gather(network, target, method, fitted, choice, judges, seed), cautions)
    # of several candidates, the temperature is that of the one that was taken
    held = choice.answers[choice.chosen] if choice is not None and judges == "cv" else evidence.held
    predictor, calibration = calibrate(network, fitted.predictor, held, opened.images, evidence.gain)
    verdict = decide(accept, evidence)
    candidate = network.as_given(predictor).to(opened.home)
    return Adaptation(
        model=candidate if verdict.accepted else network.as_given(network.with_tensors({})).to(opened.home),
        source=opened.model,
        method=method,
        verdict=verdict,
        evidence=evidence,
        choice=choice,
        calibration=calibration,
        candidate=candidate,
        layers=layer_reports(network, fitted),
        notes=fitted.notes | ({"temperature": calibration.temperature} if calibration and calibration.applied else {}),
        support=target.support,
        validation=judges if isinstance(judges, Support) else None,
        unlabelled=target.unlabelled,
        classes=opened.classes,
        preprocess=opened.preprocess,
        warnings=cautions,
        seed=seed,
        seconds=time.perf_counter() - began,
    )


def compare(
    model: nn.Module,
    support: Any,
    methods: Sequence[str | Method | type[Method]] = ("source", "adabn", "auto"),
    *,
    unlabelled: Any = None,
    shots: int | None = None,
    loss: Loss | None = None,
    preprocess: Steps = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    validate: Any = "cv",
    select: str | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Progress = None,
) -> Comparison:
    """Judge several methods on the same images; no method has seen the image it is asked about.

    `methods` are names or methods; other arguments are as for `adapt`. `validate` is "cv", "loo", or labelled images of
    the place that are not in the support: then every method is fitted once, to all of the support.

    `select` is a rule to choose a method by: "best" takes the lowest held-out cross-entropy, "clear" does so only if
    `adapt` would hand it over, and otherwise takes the source network. A method that fails has a row that says why.
    """
    began = time.perf_counter()
    if select not in (None, *comparison.RULES):
        raise FewshiftError(f"select={select!r} is no rule: choose 'best', 'clear' or None")
    if isinstance(methods, str) or not hasattr(methods, "__iter__"):
        raise FewshiftError(f"methods={methods!r} is no list: give a list of names")
    chosen = [method_of(method) for method in methods]
    comparison.comparable(chosen)
    if validate is None:
        raise FewshiftError("methods are compared on held-out images: choose 'cv' or 'loo', or give labelled images")
    if support is None and isinstance(validate, str) and not Path(validate).exists():
        raise FewshiftError("methods are compared by labels: pass a support set, or labelled images as validate")
    needs = next((method for method in chosen if method.needs is Needs.UNLABELLED), chosen[0])
    opened = open_target(
        model, support, unlabelled, needs=needs, loss=loss, preprocess=preprocess, augment=augment,
        classes=classes, shots=shots, head=head, seed=seed, device=device,
    )  # fmt: skip
    judges = opened.evidence_from(validate, preprocess)
    assert judges is not None  # validate is not None
    comparison.check_labels(opened.network, opened.target, judges, seed)
    with told_to(progress, "comparing") as listener:
        rows, source = comparison.rank(opened.network, opened.target, chosen, judges, seed, listener)
    return Comparison(
        rows=rows,
        source=source,
        select=select,
        validate="labelled images" if isinstance(judges, Support) else judges,
        network=type(opened.model).__name__,
        support=opened.target.support,
        seed=seed,
        seconds=time.perf_counter() - began,
    )


def learning_curve(
    model: nn.Module,
    support: Any,
    *,
    method: str | Method = "auto",
    shots: Sequence[int] | None = None,
    draws: int = curve.DRAWS,
    labelled: Any = None,
    unlabelled: Any = None,
    loss: Loss | None = None,
    preprocess: Steps = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Progress = None,
) -> LearningCurve:
    """How the gain of adapting `model` grows with k, the labelled images per class, and from where on it does not.

    For every k of `shots`, k images of each class (with pixel labels: in all) are drawn from the support, `draws`
    times. The network is adapted to them, and both networks predict images that no k of the draw has seen. Without
    `shots` these are 1, 2, 3, 5, 10, 20, 50 and so on up to the most that leave one image of each class to judge by;
    smaller shots leave more. With `labelled`, images of the place outside the support, those judge, and k goes up to
    all images of the support. Other arguments are as for `adapt`.

    Nothing is rejected: where adaptation hurts, the gain is below zero.
    """
    began = time.perf_counter()
    chosen = method_of(method)
    if chosen.needs in (Needs.STREAM, Needs.UNLABELLED):
        raise FewshiftError(
            f"{chosen.name} does not learn from labelled images, so more of them change nothing: choose another method"
        )
    if not isinstance(draws, int) or isinstance(draws, bool) or draws < 1:
        raise FewshiftError(f"draws={draws!r} is no number of draws: give 1, 2, ...")
    if support is None:
        raise FewshiftError("a learning curve needs labelled target images: pass a support set")
    with told_to(progress, "measuring the learning curve"), plan([Stage("adaptations", 1)]):
        opened = open_target(
            model, support, unlabelled, needs=chosen, loss=loss, preprocess=preprocess, augment=augment,
            classes=classes, head=head, seed=seed, device=device,
        )  # fmt: skip
        network = opened.network
        pool = opened.target.need_support(chosen.name).checked(network.output)
        others = None if labelled is None else opened.labelled_apart(labelled, preprocess).checked(network.output)
        if others is None:
            refuse_repeats(pool)
        ks = curve.checked_shots(shots, pool, outside=others is not None)
        places = curve.rotated(curve.strata(pool), ks[-1], draws, seed)
        adapted = adapted_to(network, opened.target, chosen, seed)
        measured = curve.measure(network.model, adapted, pool, others, ks, places)
    flat_from, step = measured.verdict()
    return LearningCurve(
        source=100 * float(measured.before.mean()),
        points=measured.points,
        flat_from=flat_from,
        step=step,
        draws=draws,
        images=len(measured.images.unique()),
        outside=others is not None,
        method=chosen,
        network=type(opened.model).__name__,
        support=pool,
        seed=seed,
        seconds=time.perf_counter() - began,
    )


def predict(
    model: nn.Module,
    images: Files,
    *,
    delta: Delta | str | Path | None = None,
    out: str | Path | TextIO | None = None,
    preprocess: Steps = None,
    classes: Sequence[str] | None = None,
    progress: Progress = None,
    **options: Unpack[PredictOptions],
) -> Predictions:
    """Predict image files: a class and its probability for each, or a class for every pixel.

    `images` is a folder, a file, a pattern ("photos/*.jpg"), a list of files ("@files.txt"), "-" for one on standard
    input, or several of these. `delta`, an adaptation or its file, is applied to a copy of `model` first. `preprocess`
    and `classes` come from the arguments, else from the delta, else from the network's card. A network with one output
    per image gives a table, `out` is its CSV file: rows are written as they come. If `out` is a folder, or a new name
    without a suffix, Parquet parts have the rows; `engine="ray"` computes them on Ray. A network that labels pixels
    writes label maps and overlays into the folder `out`; `window=` and `stride=`, in preprocessed pixels, let it see
    large images in parts. Images that cannot be read are in `broken` of the result; `strict=True` stops at the first.

    `resume=True` skips images that the same run has predicted there, `overwrite=True` replaces them. `top=3` adds the
    next classes, `all_probabilities=True` those of all, `with_source=True` what the network says without the delta.
    `batch_size=32`, `workers=0` (processes that read images) and `device=None` change the speed alone.
    """
    networks, steps, names = open_networks(model, delta, preprocess, classes)
    if steps is None:
        raise FewshiftError(
            f"how the {type(model).__name__} wants its images is not known: pass preprocess=, as to adapt"
        )
    with told_to(progress, "predicting"), plan([Stage("images", 1)]):
        return predict_files(networks, images, steps, names, out=out, **options)


def evaluate(
    model: nn.Module,
    labelled: Any,
    *,
    delta: Delta | str | Path | None = None,
    support: Any = None,
    preprocess: Steps = None,
    classes: Sequence[str] | None = None,
    window: Size | None = None,
    stride: Size | None = None,
    progress: Progress = None,
) -> Evaluation:
    """Accuracy per class on labelled images, or IoU per class on labelled pixels; with a `delta`, before and after it.

    `labelled` is whatever `adapt` takes as `support`: a folder, a file, a list, tensors, a dataset, or batches of
    them. `preprocess` and `classes` come from the arguments, else from the delta, else from the network's card.
    `support`, the images that the network was adapted to, makes an image in both sets an error. `window` and `stride`,
    in preprocessed pixels, let a network that labels pixels see large images in parts.
    """
    networks, steps, names = open_networks(model, delta, preprocess, classes)
    *_, network = networks.values()
    images = as_labelled(labelled, steps, names, network=network, window=window, stride=stride)
    if support is not None:
        refuse_leaks(find_leaks(support, images, preprocess=steps))
    with told_to(progress, "evaluating"):
        return evaluate_networks(networks, images, window=window, stride=stride)


def inspect(
    model: nn.Module, images: Tensor | None = None, *, head: str | None = None, size: int | None = None
) -> Inspection:
    """What can be adapted in a network, and what cannot.

    With `images`, or an empty one of `size` pixels, it is run once: then head, order and unused layers are known too.
    """
    if images is None and size is not None:
        images = blank_images(model, size)
    network = list_layers(model) if images is None else Network.of(model, images, head)
    kind, parameters = type(network.model).__name__, sum(parameter.numel() for parameter in model.parameters())
    return Inspection(kind, parameters, network.layers, network.skipped, network.head, network.classes)
