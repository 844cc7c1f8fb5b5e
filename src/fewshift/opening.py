"""The front door's hinge: network, images, labels, seed and device, opened once for everything that users call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core._arguments import checked_model, checked_names
from fewshift.core._progress import Stage
from fewshift.core.delta import Delta
from fewshift.core.labels import Augment
from fewshift.core.losses import Loss, users_loss
from fewshift.core.method import Method, Needs
from fewshift.core.network import Network, like
from fewshift.core.probing import running
from fewshift.core.randomness import checked_seed
from fewshift.core.soundness import refuse_broken_weights
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.images.class_names import some
from fewshift.images.inputs import Steps, as_support, as_unlabelled
from fewshift.images.preprocess import FileSteps, Preprocess, as_steps
from fewshift.models.cards import known_card, refuse_other_order
from fewshift.report.cautions import warn_about
from fewshift.trust.held_out import INSIDE
from fewshift.trust.leaks import find_leaks, refuse_leaks, refuse_repeats
from fewshift.trust.sanity import Caution, Known, half_way_answers, look_before, source_answers

ASKING, LOOKING = "asking", "looking"  # the stages of `Opened.checked`
LOOK_COST = 3.0  # passes over the support
MULTIPLES = (8, 16, 32, 64)  # of pixels, that networks with strides may insist on


def looking_first(method: Method, stages: Sequence[Stage]) -> list[Stage]:
    """The stages of an adaptation, of which one fit costs 1, after a look at the images."""
    cost = max(method.cost, 1.0)  # without an epoch there is nothing to pass
    return [Stage(ASKING, 1 / cost), Stage(LOOKING, LOOK_COST / cost), *stages]


def blank_images(model: nn.Module, size: int) -> Tensor:
    """Two empty images of so many pixels, as the network takes them."""
    steps = known_card(model).preprocess
    if not isinstance(size, int) or size < 1:
        raise FewshiftError(f"size={size!r} is no number of pixels: give 1, 2, ...")
    return torch.zeros(2, steps.channels if steps else 3, size, size)


@dataclass(frozen=True)
class Opened:
    """A network and what it is to be fitted to."""

    network: Network  # where it is to run
    model: nn.Module  # as the user has it
    target: Target
    images: Tensor  # a few of the target's
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    home: torch.device  # of the user's network
    named: bool = True  # something says in which order the outputs are
    cautions: tuple[Caution, ...] = ()

    def checked(self, *, refuse: bool) -> Opened:
        """The same, with what looks wrong; labels that do not fit the outputs are an error if `refuse`."""
        network, target, card = self.network, self.target, known_card(self.model)
        with progress.stage(ASKING):
            answers = source_answers(network, target)
        with progress.stage(LOOKING):
            half_way = half_way_answers(network, target)
            known = Known(network, target, card, self.preprocess, self.named, answers, half_way)
            return replace(self, cautions=look_before(known, refuse=refuse))

    def labelled_apart(self, source: Any, preprocess: Steps) -> Support:
        """Labelled images to judge by, none of them in the support, as the network takes them."""
        if isinstance(source, str) and not Path(source).exists():
            raise FewshiftError(
                f"validate={source!r} is no folder or file: choose 'cv', 'loo' or None, or give labelled images"
            )
        support = self.target.support
        names = self.classes or (None if support is None else support.classes)
        labelled = as_support(source, steps_for(self.model, preprocess), None, names, network=self.model)
        if support is not None:
            refuse_leaks(find_leaks(support, labelled))
        alone = Target(labelled)
        _, fitted = fitting(self.model, alone, alone.some_images("judging", "labelled images"), self.network.head)
        return fitted.need_support("judging")

    def evidence_from(self, validate: Any, preprocess: Steps) -> str | Support | None:
        """What `validate` means: a way to hold out images of the support, other labelled images, or nothing."""
        if validate is None:
            return None
        if not (isinstance(validate, str) and validate in INSIDE):
            return self.labelled_apart(validate, preprocess)
        if self.target.support is not None:
            refuse_repeats(self.target.support)
        return validate


def open_target(
    model: nn.Module,
    support: Any,
    unlabelled: Any = None,
    *,
    needs: Method,
    loss: Loss | None = None,
    preprocess: Steps = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    shots: int | None = None,
    head: str | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Opened:
    """Read what a user passes: tensors, datasets, folders; and look at the network once.

    Preprocessing and class names that the arguments do not give are those that the network is known by: from
    `fewshift.load`, or from timm.
    """
    checked_seed(seed)
    if augment is not None and not callable(augment):
        raise FewshiftError(
            f"augment={augment!r} is no function: give one that takes an image and returns a view of it"
        )
    model = checked_model(model)
    card, chosen = known_card(model), checked_names(classes)
    refuse_other_order(card, chosen)
    steps, names = steps_for(model, preprocess), card.classes if chosen is None else chosen
    labelled = (
        None if support is None else as_support(support, steps, augment, names, shots=shots, seed=seed, network=model)
    )
    target = Target(labelled, as_unlabelled(unlabelled, steps, augment, labelled), users_loss(loss))
    if needs.needs is Needs.UNLABELLED:
        target.need_unlabelled(needs.name)
    wanted = "target images" if needs.needs is Needs.NOTHING else f"{needs.needs.value} images"
    images = target.some_images(needs.name, wanted)
    network, target = fitting(model, target, images, head)
    _refuse_other_images(network, target, images)
    if names is None and target.support is not None:
        _refuse_other_count(target.support, network)
    return Opened(
        network=network if device is None else moved(network, device),
        model=model,
        target=target,
        images=images,
        preprocess=steps if isinstance(steps, Preprocess) else None,
        classes=names if target.support is None else target.support.classes,
        home=like(network.model, images).device,
        named=names is not None,
    )


def _refuse_other_count(support: Support, network: Network) -> None:
    """One sentence when the classes of a support, which nobody has named in order, are not as many as the outputs."""
    names, outputs = support.classes, network.classes
    if names is None or outputs is None or len(names) == outputs:
        return
    missing = len(names) < outputs
    after = "a class without images is allowed then" if missing else "and remove the classes that it does not know"
    raise FewshiftError(
        f"the network has {outputs} classes and the images have {len(names)} ({some(names, 10)}), so it is not known "
        f"which output is which: name all {outputs} in the order of the outputs, --classes A,B,... (classes=[...]); "
        f"{after}"
    )


def open_networks(
    model: nn.Module,
    delta: Delta | str | Path | None,
    preprocess: Steps,
    classes: Sequence[str] | None,
) -> tuple[dict[str, nn.Module], Any, tuple[str, ...] | None]:
    """The source network, and the adapted one if there is a delta; their preprocessing and classes, where known.

    The preprocessing is a `Preprocess`, a `Transform` or None.
    """
    model = checked_model(model)
    refuse_broken_weights(model)
    card, chosen = known_card(model), checked_names(classes)
    refuse_other_order(card, chosen)
    steps: FileSteps | None = card.preprocess
    names = card.classes
    networks = {"source": model}
    if delta is not None:
        made = getattr(delta, "delta", delta)  # an adaptation has one
        change = made if isinstance(made, Delta) else Delta.load(made)
        networks["adapted"] = change.apply(model, chosen)
        steps = Preprocess.from_json(dict(change.preprocess)) if change.preprocess else steps
        names = change.classes or names
    used = as_steps(preprocess) or steps
    stored = Preprocess.from_json(dict(change.preprocess)) if delta is not None and change.preprocess else None
    warn_about(card, used if isinstance(used, Preprocess) else None, stored)
    return networks, used, names if chosen is None else chosen


def steps_for(model: nn.Module, preprocess: Steps) -> FileSteps | None:
    """How a picture becomes a tensor: as the argument says, or as the network is known to want it."""
    return known_card(model).preprocess if preprocess is None else as_steps(preprocess)


def _refuse_other_images(network: Network, target: Target, images: Tensor) -> None:
    """Raise an error if the network takes the labelled images and not those without labels."""
    if target.support is None or target.unlabelled is None:
        return
    other = target.unlabelled.batch(torch.zeros(1, dtype=torch.long))
    if other.shape[1:] != images.shape[1:]:
        with running(other), torch.no_grad():
            network.model(like(network.model, other))


def fitting(model: nn.Module, target: Target, images: Tensor, head: str | None) -> tuple[Network, Target]:
    """The view, and the target with pictures padded where the network takes only multiples of some size."""
    support = target.support
    if support is None or (isinstance(support.images, Tensor) and support.kind.stratified):
        return Network.of(model, images, head), target

    def view_of(support: Support) -> Network:
        sizes = {image.shape: image[None] for image in support.images}
        first, *_ = [Network.of(model, image, head) for image in sizes.values()]
        return first

    try:
        return view_of(support), target
    except FewshiftError:
        for multiple in MULTIPLES:
            padded = support.padded(multiple)
            with suppress(FewshiftError):
                return view_of(padded), replace(target, support=padded)
        raise


def moved(network: Network, device: torch.device | str) -> Network:
    """The view of a copy on that device, or one sentence when there is none."""
    try:
        return replace(network, model=network.with_tensors({}).to(torch.device(device)))
    except (RuntimeError, AssertionError) as error:
        raise FewshiftError(f"device {device} cannot be used ({str(error).splitlines()[0]}): choose another") from error
