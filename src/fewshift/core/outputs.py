"""What networks return: logits, somewhere in it; and one logit where there are two classes.

softmax([0, z]) gives the second class the probability sigmoid(z), so one logit is read as two. To methods such a
network has a head with the rows -w / 2 and w / 2, two classes like any others. What they make of it becomes one row
again, the second less the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError

NO_ANSWER = "the network's output is NaN or infinite"
REMEDY = "check its weights and the preprocessing"
MAIN = ("logits", "out", "output", "main", "pred", "seg", "sem_seg")  # names of the main output


def main_output(output: Any) -> Tensor:
    """The tensor of logits in what a network returns, as it is."""
    if isinstance(output, Tensor):
        return output
    named = getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    items: Iterable[Any] = output.items() if isinstance(output, Mapping) else ()
    if isinstance(output, (tuple, list)):
        items = enumerate(output)
    # a loss, which may come first, has no dimension
    tensors = {str(key): value for key, value in items if isinstance(value, Tensor) and value.ndim > 1}
    if not tensors:
        raise FewshiftError(
            f"the network returns {type(output).__name__}, which contains no logits: "
            "wrap it in a module that returns a tensor"
        )
    main = next((key for key in MAIN if key in tensors), None)
    if main is None and len(tensors) > 1 and isinstance(output, Mapping):
        raise FewshiftError(
            f"the network returns {', '.join(map(repr, tensors))}, and none of these names means logits: "
            "wrap it in a module that returns one tensor"
        )
    return tensors[main or next(iter(tensors))]


def unanswered(logits: Tensor) -> Tensor:
    """(N,): whether the logits of an image are no answer. They are NaN or infinite; -inf rules out a class."""
    rows = logits.flatten(1)
    return ~((rows < torch.inf).all(1) & (rows > -torch.inf).any(1))


def refuse_unanswered(logits: Tensor) -> Tensor:
    """The logits, or an error if some are no answer."""
    if count := int(unanswered(logits).sum()):
        images = "image" if count == 1 else "images"
        raise FewshiftError(f"{NO_ANSWER} for {count} {images}: {REMEDY}")
    return logits


def is_single(logits: Tensor) -> bool:
    """Whether these are one logit for each image."""
    return logits.ndim == 2 and logits.shape[1] == 1


def as_two(logits: Tensor) -> Tensor:
    """(N, 2): zero and the logit, if there is one for each image; other logits as they are."""
    return torch.cat([torch.zeros_like(logits), logits], 1) if is_single(logits) else logits


def give_two_rows(model: nn.Module, head: str | None, images: Tensor, single: Tensor) -> str | None:
    """Give the head two rows for its one, in place; None, and nothing changed, where that gives no two outputs."""
    if head is None:
        return None
    layer = model.get_submodule(head)
    _put(model, head, _with_rows(layer, lambda row: torch.cat([-row / 2, row / 2])))
    with torch.no_grad(), suppress(Exception):  # what follows the head may insist on one output
        two = main_output(model(images))
        if two.shape == (len(images), 2) and torch.allclose(two[:, 1:] - two[:, :1], single, rtol=1e-3, atol=1e-4):
            return head
    _put(model, head, layer)
    return None


def give_one_row(model: nn.Module, head: str) -> None:
    """Give the head one row for its two, in place: the second less the first."""
    _put(model, head, _with_rows(model.get_submodule(head), lambda rows: rows[1:] - rows[:1]))


def refuse_probability(outputs: Mapping[str, Tensor], single: Tensor) -> None:
    """Raise an error if a network's one output is the sigmoid of a layer's."""
    for name, output in outputs.items():
        if output.numel() == single.numel() and torch.allclose(output.sigmoid().flatten(), single.flatten()):
            raise FewshiftError(
                f"the network's one output is the sigmoid of '{name}', a probability and no logit: "
                "leave the sigmoid out"
            )


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)


def _with_rows(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a layer with other rows."""
    result: Any = copy.deepcopy(layer)
    for key, parameter in layer.named_parameters(recurse=False):
        setattr(result, key, nn.Parameter(change(parameter.detach()), requires_grad=parameter.requires_grad))
    rows = "out_features" if isinstance(layer, nn.Linear) else "out_channels"
    setattr(result, rows, len(result.weight))
    return result  # type: ignore[no-any-return]
