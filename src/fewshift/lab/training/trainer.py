"""The one trainer: plain PyTorch, any algorithm, one label for an image or for each of its pixels.

A training follows from its seed. Everything random in epoch e comes from (seed, e) and the rate from the step's number,
so that what an interrupted training needs is its weights, its optimiser and the number of the epoch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core.layout import channels_last
from fewshift.core.loop import step as take_step
from fewshift.core.losses import at_labels
from fewshift.core.network import Network, logits_of
from fewshift.core.randomness import checked_seed, private_randomness
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Batch, Task, Trainee
from fewshift.lab.training.augment import Augment, augmentation, check_augment
from fewshift.lab.training.batches import Batches, check_batches, count_steps, order, planned_steps, stage
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.gather import Sources
from fewshift.lab.training.recipes import MOMENTUM, SCHEDULES, Moment, Recipe

MOST_BYTES = 4 * 2**30  # of one batch as floats


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to: means over its steps, and the score on held-out source images."""

    loss: float
    accuracy: float
    validation: float | None
    seconds: float


@dataclass(frozen=True)
class Standing:
    """How far a training is, after a step; both means are over the epoch so far."""

    moment: Moment
    loss: float
    accuracy: float


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
    _check(sources, recipe, algorithm, checked_seed(seed))
    augment = augmentation(recipe.augment, sources.seen_size(recipe), sources.labels)
    with private_randomness(stage(seed, 0)):
        own = algorithm.modify(copy.deepcopy(model).requires_grad_(True))
        trainee = algorithm.trainee(own, _task(own, sources, recipe, augment))
    trainee.to(memory_format=torch.channels_last)  # a tenth to a third faster on a CPU
    optimizer = _optimizer(trainee, recipe)
    epochs: list[Epoch] = []
    best: dict[str, Tensor] = {}
    if resume and checkpoint is not None and (state := checkpoint.kept()) is not None:
        epochs = _restored(checkpoint, state, trainee, optimizer)
        best = {} if recipe.patience is None else _best(checkpoint, trainee.model)
    done, total = count_steps(sources, recipe, seed, len(epochs)), planned_steps(sources, recipe, seed)
    while len(epochs) < recipe.epochs and not is_enough(epochs, recipe.patience):
        epoch, began = len(epochs), time.perf_counter()
        indices = order(sources, recipe, seed, epoch)
        # where nobody has counted the steps to come, their number is a guess for whoever watches
        now = Moment(done, total or done + (recipe.epochs - epoch) * len(indices), epoch, recipe.epochs)
        with private_randomness(stage(seed, epoch + 1)), torch.enable_grad():
            trainee.before_epoch(epoch)
            batches = Batches(sources, indices, augment, algorithm.views)
            loss, right = _pass(trainee, batches, optimizer, recipe, now, hear)
            trainee.after_epoch(epoch, sources)
        _check_finite(trainee.model, epoch)
        done += len(indices)
        reached = score(trainee.model, sources, recipe.batch_size)
        epochs.append(Epoch(loss, right, reached, time.perf_counter() - began))
        if (better := kept_epoch(epochs, recipe.patience) == epoch) and recipe.patience is not None:
            best = {name: tensor.clone() for name, tensor in trainee.model.state_dict().items()}
        if checkpoint is not None:
            if epoch == 0:
                checkpoint.close()  # of a training that this one writes over
            if better:
                checkpoint.write(trainee.model, results_of(sources, epochs, recipe.patience))
            checkpoint.keep(_state(trainee, optimizer, epochs))
        if hear_epoch is not None:
            hear_epoch(epoch, epochs[-1])
    trained = trainee.release().to(memory_format=torch.contiguous_format)
    if (kept := kept_epoch(epochs, recipe.patience)) < len(epochs) - 1:
        trained.load_state_dict(best, strict=True)
    if checkpoint is not None:
        _finish(checkpoint, trained, results_of(sources, epochs, recipe.patience))
    return Trained(trained, tuple(epochs), kept)


def kept_epoch(epochs: Sequence[Epoch], patience: int | None) -> int:
    """The epoch whose weights count: the last; with patience the first that has the best score."""
    if patience is None:
        return len(epochs) - 1
    return max(range(len(epochs)), key=lambda index: (epochs[index].validation or 0.0, -index))


def is_enough(epochs: Sequence[Epoch], patience: int | None) -> bool:
    """Whether so many epochs in a row were no better that training stops."""
    return bool(epochs) and patience is not None and len(epochs) - 1 - kept_epoch(epochs, patience) >= patience


def results_of(sources: Sources, epochs: Sequence[Epoch], patience: int | None) -> dict[str, Any]:
    """What the card says about the epochs so far."""
    kept = kept_epoch(epochs, patience)
    reached = epochs[kept].validation
    scores = {} if reached is None else {f"source_validation_{sources.labels.metric}": round(100 * reached, 2)}
    held_out = 0 if sources.validation is None else len(sources.validation)
    return {
        **scores,
        "images": {"train": len(sources.train), "source_validation": held_out},
        "kept_epoch": kept + 1,
        "history": [asdict(epoch) for epoch in epochs],
        "finished": False,
    }


@torch.no_grad()
def score(model: nn.Module, sources: Sources, at_once: int) -> float | None:
    """The metric of such labels on the held-out source images."""
    if sources.validation is None:
        return None
    model.eval()
    classes, pool = len(sources.classes), sources.validation
    counts = torch.zeros(classes, classes, dtype=torch.long)
    for pixels, labels in pool.batches(torch.arange(len(pool)).split(at_once)):
        images = channels_last(sources.preprocess.normalise(pixels))
        logits = at_labels(logits_of(model(images)), labels)
        counts += sources.labels.tally(labels.long(), logits.argmax(1), classes)
    return sources.labels.score(counts)


def _pass(
    trainee: Trainee,
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
                group["momentum"] = MOMENTUM * share(before) / share(now)
        optimizer.zero_grad(set_to_none=True)
        labels, value = trainee.task.labels, 0.0
        everything = labels.weight(batch.labels)
        for part in _parts(batch, recipe.accumulate):
            with torch.autocast(part.images.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                loss, logits = _answered(trainee, part)
            counted = labels.weight(part.labels)
            weight = counted / max(1, everything)
            (loss * weight).backward()
            value += float(loss.detach()) * weight
            right += int((logits.detach().argmax(1) == part.labels).sum())
            seen += counted
        if not math.isfinite(value):
            raise FewshiftError(f"the loss became {value} in epoch {now.epoch + 1}: lower lr")
        take_step(optimizer)
        trainee.after_step()
        total += value
        if hear is not None:
            hear(Standing(now._replace(step=now.step + 1), total / (done + 1), right / max(1, seen)))
    return total / max(1, len(batches)), right / max(1, seen)


def _answered(trainee: Trainee, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss and the logits of a batch."""
    try:
        return trainee.loss(batch)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        raise FewshiftError(
            "the network flattens its maps with view(), which needs another order in memory than training has: use "
            "flatten() or reshape()"
        ) from error


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


def _optimizer(trainee: Trainee, recipe: Recipe) -> torch.optim.Optimizer:
    groups = trainee.groups(recipe.lr, recipe.head_rate)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        groups, lr=recipe.lr, momentum=MOMENTUM, nesterov=recipe.nesterov, weight_decay=recipe.weight_decay
    )


def _state(trainee: Trainee, optimizer: torch.optim.Optimizer, epochs: Sequence[Epoch]) -> dict[str, Any]:
    """All that an interrupted training needs to go on."""
    return {
        "trainee": trainee.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs": [asdict(epoch) for epoch in epochs],
    }


def _finish(checkpoint: Checkpoint, trained: nn.Module, results: dict[str, Any]) -> None:
    if not checkpoint.file.is_file():  # lost since the last epoch
        checkpoint.write(trained, results)
    checkpoint.describe(results | {"finished": True})
    checkpoint.close()


def _restored(
    checkpoint: Checkpoint, state: dict[str, Any], trainee: Trainee, optimizer: torch.optim.Optimizer
) -> list[Epoch]:
    """Bring trainee and optimiser to where a training was left; its epochs so far."""
    try:
        trainee.load_state_dict(state["trainee"], strict=True)
        optimizer.load_state_dict(state["optimizer"])
        return [Epoch(**epoch) for epoch in state["epochs"]]
    except Exception as error:  # whatever is missing there, or of another kind
        raise checkpoint.damaged() from error


def _best(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The weights of the best epoch so far, which are those on disk."""
    best, own = checkpoint.weights(), model.state_dict()
    if {name: best[name].shape for name in best} != {name: own[name].shape for name in own}:
        raise FewshiftError(f"the weights {checkpoint.file} are of another network: begin anew with --overwrite")
    return best


def _check_finite(model: nn.Module, epoch: int) -> None:
    """Raise one sentence when the last step of an epoch made weights that are no numbers: no loss has shown it yet."""
    tensors = (tensor for tensor in model.state_dict().values() if tensor.is_floating_point())
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise FewshiftError(f"training diverged in epoch {epoch + 1}: lower lr or weight_decay")


def _check(sources: Sources, recipe: Recipe, algorithm: Algorithm, seed: int) -> None:
    """Raise one sentence about what cannot work, before any work."""
    if torch.is_inference_mode_enabled():
        raise FewshiftError("training needs gradients: call it outside torch.inference_mode()")
    if sources.labels not in algorithm.kinds:
        raise FewshiftError(
            f"{algorithm.name} cannot learn from a label of each {sources.labels.unit}: use another algorithm"
        )
    check_augment(recipe.augment, sources.labels)
    check_batches(sources.domains, recipe.batch_size, recipe.domains_per_batch)
    height, width = sources.seen_size(recipe)
    size = recipe.batch_size // recipe.accumulate * sources.preprocess.channels * height * width * 4
    if size > MOST_BYTES:
        raise FewshiftError(
            f"a batch of {recipe.batch_size} images of {width}x{height} pixels takes {size / 2**30:.0f} GB: "
            "lower size or batch_size, or raise accumulate"
        )
    algorithm.check_recipe(recipe, sources)


def _task(model: nn.Module, sources: Sources, recipe: Recipe, augment: Augment) -> Task:
    """Run the network once on images as it will see them; raise one sentence when they do not go together."""
    steps, pair = sources.preprocess, torch.tensor([0, 0])
    pixels, labels = augment(*sources.train.batch(pair))
    view = Network.of(model, steps.normalise(pixels))
    sources.labels.check_answer(labels, view.output[1:])
    if view.classes != len(sources.classes):
        raise FewshiftError(
            f"the network has {view.classes} outputs and there are {len(sources.classes)} classes: "
            "choose a network for them"
        )
    if sources.validation is not None:  # whole images, where training may see parts
        Network.of(model, steps.normalise(sources.validation.batch(pair)[0]))
    shape = (steps.channels, *pixels.shape[-2:])
    return Task(sources.classes, sources.names, sources.labels, view.head, recipe.label_smoothing, shape)
