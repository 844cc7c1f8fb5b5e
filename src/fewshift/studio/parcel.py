"""A network on its way to a process of its own.

It travels as bytes through a pipe, from this program to a process that this program started, and is never a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fewshift.errors import FewshiftError
from fewshift.images.preprocess import FileSteps


@dataclass(frozen=True)
class Parcel:
    """A network, its preprocessing, and the names of its outputs."""

    content: bytes = field(repr=False)
    classes: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, steps: FileSteps, classes: Sequence[str]) -> Parcel:
        """Pack them, or say why that is not possible."""
        try:
            return cls(pickle.dumps((model, steps)), tuple(classes))
        except Exception as error:  # whatever a user's class raises
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FewshiftError(
                f"the {type(model).__name__} or its preprocessing cannot be handed to another process ({why}): define "
                "its class, and its functions, at the top of a module that can be imported"
            ) from error

    def unpacked(self) -> tuple[nn.Module, FileSteps]:
        """The network and its preprocessing."""
        model, steps = pickle.loads(self.content)  # what `of` made in the process that started this one
        return model, steps
