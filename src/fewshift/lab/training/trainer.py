"""The one trainer: plain PyTorch, any algorithm, one label for an image or for each of its pixels.

A training follows from its seed. Everything random in epoch e comes from (seed, e) and the rate from the step's number,
so that what an interrupted training needs is its weights, its optimiser and the number of the epoch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewshift.core.losses import IGNORE, at_labels
from fewshift.core.metrics import accuracy, mean_iou, pixel_tally, tally
from fewshift.core.network import Network, channels_last, logits_of
from fewshift.core.randomness import checked_seed, private_randomness
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Batch, Learner, Task
from fewshift.lab.training.augment import Augment, augmentation, check_augment
from fewshift.lab.training.batches import by_domain, check_batches, shuffled
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.gather import Sources
from fewshift.lab.training.recipes import Recipe
from fewshift.lab.training.schedules import SCHEDULES, Moment

MOST_BYTES = 4 * 2**30  # of one batch as floats
BY_EPOCH = ("constant", "cosine")  # schedules that do not ask how many steps there are
AT_ONCE = 64  # images that are evaluated together; with pixel labels as many as are trained on together


@dataclass(frozen=True)
class Standing:
    """How far a training is, after a step; both means are over the epoch so far."""

    moment: Moment
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to: means over its steps, and the score on held-out source images."""

    loss: float
    accuracy: float
    validation: float | None
    seconds: float


@dataclass(frozen=True)
class Trained:
    """The network, in evaluation mode, and its epochs. `kept` is the one it is from: the last, or the best."""

    model: nn.Module
    epochs: tuple[Epoch, ...]
    kept: int


Hear = Callable[[Standing], None]
HearEpoch = Callable[[int, Epoch], None]


def train(
    model: nn.Module,
    sources: Sources,
    recipe: Recipe,
    algorithm: Algorithm,
    *,
    seed: int = 0,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    hear: Hear | None = None,
    hear_epoch: HearEpoch | None = None,
) -> Trained:
    """Train a copy of `model` on the source images; write it after every epoch if there is a checkpoint.

    With `resume`, go on after the last epoch that the checkpoint has: the result is the one of an uninterrupted
    training, bit for bit on the same machine. The given model and the global random state are untouched.
    """
    if torch.is_inference_mode_enabled():
        raise FewshiftError("training needs gradients: call it outside torch.inference_mode()")
    _check(sources, recipe, checked_seed(seed))
    algorithm.check_recipe(recipe, sources)
    size = seen_size(sources, recipe)
    augment = augmentation(recipe.augment, size)
    with private_randomness(stage(seed, 0)):
        own = algorithm.modify(copy.deepcopy(model).requires_grad_(True))
        learner = algorithm.learner(own, _task(own, sources, recipe, size))
    learner.to(memory_format=torch.channels_last)  # a tenth to a third faster on a CPU
    optimizer = _optimizer(learner, recipe)
    epochs: list[Epoch] = []
    best: dict[str, Tensor] = {}
    if resume and checkpoint is not None and (state := checkpoint.kept()) is not None:
        epochs = _restored(checkpoint, state, learner, optimizer)
        best = {} if recipe.patience is None else _best(checkpoint, learner.model)
    done = count_steps(sources, recipe, seed, len(epochs))
    # batches by domain are counted only for a schedule that asks; otherwise those to come are a guess for who hears it
    guess = recipe.domains_per_batch is not None and recipe.schedule in BY_EPOCH
    total = 0 if guess else count_steps(sources, recipe, seed, recipe.epochs)
    while len(epochs) < recipe.epochs and not _is_enough(epochs, recipe.patience):
        epoch, began = len(epochs), time.perf_counter()
        indices = order(sources, recipe, seed, epoch)
        now = Moment(done, total or done + (recipe.epochs - epoch) * len(indices), epoch, recipe.epochs)
        with private_randomness(stage(seed, epoch + 1)), torch.enable_grad():
            learner.before_epoch(epoch)
            batches = Batches(sources, indices, augment, algorithm.views)
            loss, right = _pass(learner, batches, optimizer, recipe, now, hear)
            learner.after_epoch(epoch, sources)
        _check_finite(learner.model, epoch)
        done += len(indices)
        reached = score(learner.model, sources, recipe.batch_size if sources.dense else AT_ONCE)
        epochs.append(Epoch(loss, right, reached, time.perf_counter() - began))
        better = _kept(epochs, recipe.patience) == epoch
        if better and recipe.patience is not None:
            best = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
        if checkpoint is not None:
            if epoch == 0:
                checkpoint.close()  # of a training that this one writes over
            if better:
                checkpoint.write(learner.model, _found(sources, epochs, recipe))
            checkpoint.keep(_state(learner, optimizer, epochs))
        if hear_epoch is not None:
            hear_epoch(epoch, epochs[-1])
    trained = learner.release().to(memory_format=torch.contiguous_format)
    if (kept := _kept(epochs, recipe.patience)) < len(epochs) - 1:
        trained.load_state_dict(best, strict=True)
    if checkpoint is not None:
        _finish(checkpoint, trained, _found(sources, epochs, recipe))
    return Trained(trained, tuple(epochs), kept)


@dataclass(frozen=True)
class Batches:
    """The batches of one epoch: read, augmented, normalised."""

    sources: Sources
    order: Sequence[Tensor]
    augment: Augment
    views: int = 1

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        steps = self.sources.preprocess
        for indices, (pixels, labels) in zip(self.order, self.sources.train.batches(self.order), strict=True):
            pairs = [self.augment(pixels, labels) for _ in range(self.views)]
            yield Batch(
                views=tuple(channels_last(steps.normalise(images)) for images, _ in pairs),
                labels=pairs[0][1].long(),
                domains=self.sources.domains[indices],
            )


def stage(seed: int, number: int, part: int = 0) -> int:
    """The seed of one stage of a training: 0 before the first epoch, then one for each; part 1 is for its order."""
    return int(np.random.SeedSequence([seed, number, part]).generate_state(1)[0])


def order(sources: Sources, recipe: Recipe, seed: int, epoch: int) -> list[Tensor]:
    """The batches of an epoch, as indices of training images."""
    generator = torch.Generator().manual_seed(stage(seed, epoch + 1, 1))
    if recipe.domains_per_batch is None:
        return shuffled(len(sources.train), recipe.batch_size, generator)
    return by_domain(sources.domains, recipe.batch_size, recipe.domains_per_batch, generator)


def count_steps(sources: Sources, recipe: Recipe, seed: int, epochs: int) -> int:
    """How many batches the first so many epochs have; only those by domain have to be made to be counted."""
    if recipe.domains_per_batch is None:
        return epochs * (len(sources.train) // recipe.batch_size)
    return sum(len(order(sources, recipe, seed, epoch)) for epoch in range(epochs))


def seen_size(sources: Sources, recipe: Recipe) -> tuple[int, int]:
    """The height and width of the images that a training step sees."""
    if not sources.dense and (side := sources.preprocess.crop) is not None:
        return side, side
    height, width = sources.train.batch(torch.tensor([0]))[0].shape[-2:]
    return min(recipe.crop or height, height), min(recipe.crop or width, width)


@torch.no_grad()
def score(model: nn.Module, sources: Sources, at_once: int) -> float | None:
    """Accuracy, or with pixel labels the mean IoU, on the held-out source images."""
    if sources.validation is None:
        return None
    model.eval()
    classes, pool = len(sources.classes), sources.validation
    count = pixel_tally if sources.dense else tally
    counts = torch.zeros(classes, classes, dtype=torch.long)
    for pixels, labels in pool.batches(torch.arange(len(pool)).split(at_once)):
        images = channels_last(sources.preprocess.normalise(pixels))
        logits = at_labels(logits_of(model(images)), labels)
        counts += count(labels.long(), logits.argmax(1), classes)
    return mean_iou(counts) if sources.dense else accuracy(counts)


def _pass(
    learner: Learner,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    begin: Moment,
    hear: Hear | None,
) -> tuple[float, float]:
    """One epoch: the mean loss of its steps, and the share of images or pixels that was right while it learned."""
    share = SCHEDULES[recipe.schedule]
    total, right, seen = 0.0, 0, 0
    for done, batch in enumerate(batches):
        now = begin._replace(step=begin.step + done)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share(now)
            if recipe.optimizer == "heavy-ball" and now.step:
                # v = m v + lr g; p -= v, where SGD has v = m v + g; p -= lr v: the same if m follows the rate
                before = now._replace(step=now.step - 1, epoch=now.epoch - (done == 0))
                group["momentum"] = recipe.momentum * share(before) / share(now)
        optimizer.zero_grad(set_to_none=True)
        everything, value = _counted(batch.labels), 0.0
        for part in _parts(batch, recipe.accumulate):
            loss, logits = learner.loss(part)
            counted = _counted(part.labels)
            weight = counted / max(1, everything)
            (loss * weight).backward()
            value += float(loss.detach()) * weight
            right += int((logits.detach().argmax(1) == part.labels).sum())
            seen += counted
        if not math.isfinite(value):
            raise FewshiftError(f"the loss became {value} in epoch {now.epoch + 1}: lower lr")
        optimizer.step()
        learner.after_step()
        total += value
        if hear is not None:
            hear(Standing(now._replace(step=now.step + 1), total / (done + 1), right / max(1, seen)))
    return total / max(1, len(batches)), right / max(1, seen)


def _parts(batch: Batch, count: int) -> list[Batch]:
    """A batch in `count` parts: every count-th image, so that each part has images of all its domains."""
    if count == 1:
        return [batch]
    return [
        Batch(
            tuple(channels_last(view[start::count]) for view in batch.views),
            batch.labels[start::count],
            batch.domains[start::count],
        )
        for start in range(count)
    ]


def _counted(labels: Tensor) -> int:
    """How many labels the mean of a loss is over."""
    return int((labels != IGNORE).sum()) if labels.ndim > 1 else len(labels)


def _optimizer(learner: Learner, recipe: Recipe) -> torch.optim.Optimizer:
    groups = learner.groups(recipe.lr, recipe.head_rate)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        groups,
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    )


def _state(learner: Learner, optimizer: torch.optim.Optimizer, epochs: Sequence[Epoch]) -> dict[str, Any]:
    """All that an interrupted training needs to go on."""
    return {
        "learner": learner.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs": [asdict(it) for it in epochs],
    }


def _finish(checkpoint: Checkpoint, trained: nn.Module, found: dict[str, Any]) -> None:
    if not checkpoint.file.is_file():  # lost since the last epoch
        checkpoint.write(trained, found)
    checkpoint.describe(found | {"finished": True})
    checkpoint.close()


def _restored(
    checkpoint: Checkpoint, state: dict[str, Any], learner: Learner, optimizer: torch.optim.Optimizer
) -> list[Epoch]:
    """Bring learner and optimiser to where a training was left; its epochs so far."""
    try:
        learner.load_state_dict(state["learner"], strict=True)
        optimizer.load_state_dict(state["optimizer"])
        return [Epoch(**it) for it in state["epochs"]]
    except Exception as error:  # whatever is missing there, or of another kind
        raise checkpoint.damaged() from error


def _best(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The weights of the best epoch so far, which are those on disk."""
    found = checkpoint.weights()
    if {name: it.shape for name, it in found.items()} != {name: it.shape for name, it in model.state_dict().items()}:
        raise FewshiftError(f"the weights {checkpoint.file} are of another network: begin anew with --overwrite")
    return found


def _check_finite(model: nn.Module, epoch: int) -> None:
    """One sentence when the last step of an epoch has made weights that are no numbers, which no loss has told yet."""
    if not all(bool(it.isfinite().all()) for it in model.state_dict().values() if it.is_floating_point()):
        raise FewshiftError(f"training diverged in epoch {epoch + 1}: lower lr or weight_decay")


def _check(sources: Sources, recipe: Recipe, seed: int) -> None:
    """What can be told before any work."""
    check_augment(recipe.augment, sources.dense)
    check_batches(sources.domains, recipe.batch_size, recipe.domains_per_batch)
    if sources.dense and recipe.label_smoothing:
        raise FewshiftError("label_smoothing is for images with one label: set it to 0")
    height, width = seen_size(sources, recipe)
    size = recipe.batch_size // recipe.accumulate * sources.preprocess.channels * height * width * 4
    if size > MOST_BYTES:
        raise FewshiftError(
            f"a batch of {recipe.batch_size} images of {width}x{height} pixels takes {size / 2**30:.0f} GB: "
            "lower size or batch_size, or raise accumulate"
        )


def _task(model: nn.Module, sources: Sources, recipe: Recipe, size: tuple[int, int]) -> Task:
    """Run the network once on images as it will see them; one sentence when they do not go together."""
    steps = sources.preprocess
    shape = (steps.channels, *size)
    view = Network.of(model, torch.zeros(2, *shape))
    kind = "each pixel" if sources.dense else "each image"
    if view.classes != len(sources.classes) or (len(view.output) > 1) != sources.dense:
        raise FewshiftError(
            f"the network answers an image with {' x '.join(map(str, view.output))} numbers, and {kind} has one of "
            f"{len(sources.classes)} classes: choose a network for them"
        )
    if sources.validation is not None and sources.dense:  # whole images, where training may see parts
        Network.of(model, steps.normalise(sources.validation.batch(torch.tensor([0, 0]))[0]))
    return Task(sources.classes, sources.names, sources.dense, view.head, recipe.label_smoothing, shape)


def _found(sources: Sources, epochs: Sequence[Epoch], recipe: Recipe) -> dict[str, Any]:
    """What the card says about the epochs so far."""
    kept = _kept(epochs, recipe.patience)
    metric = "mean_iou" if sources.dense else "accuracy"
    reached = epochs[kept].validation
    scores = {} if reached is None else {f"source_validation_{metric}": round(100 * reached, 2)}
    held_out = 0 if sources.validation is None else len(sources.validation)
    return {
        **scores,
        "images": {"train": len(sources.train), "source_validation": held_out},
        "kept_epoch": kept + 1,
        "history": [asdict(it) for it in epochs],
        "finished": False,
    }


def _kept(epochs: Sequence[Epoch], patience: int | None) -> int:
    """The epoch whose weights count: the last; with patience the first that has the best score."""
    if patience is None:
        return len(epochs) - 1
    return max(range(len(epochs)), key=lambda it: (epochs[it].validation or 0.0, -it))


def _is_enough(epochs: Sequence[Epoch], patience: int | None) -> bool:
    return bool(epochs) and patience is not None and len(epochs) - 1 - _kept(epochs, patience) >= patience
