"""Sites: one network for many places, each with a delta of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshift.core._arguments import checked_model
from fewshift.core._display import Displayed, byte_size, few
from fewshift.core.adaptable import refuse_without_statistics
from fewshift.core.copies import structural_copy
from fewshift.core.hooks import keep_input
from fewshift.core.network import like, list_layers
from fewshift.core.outputs import main_output
from fewshift.core.probing import find_head, last_outputs, named_head
from fewshift.core.soundness import refuse_broken_weights
from fewshift.deploy.per_image import PerImage, UnmixableError
from fewshift.deploy.site_folder import Fit, read_site, refuse_unknown, site_folder
from fewshift.errors import FewshiftError

ROUNDING = 0.3  # times the root of a type's precision: 1e-4 in single precision, 1e-2 in half
LARGE = 0.1  # of the network's bytes: larger deltas are not all kept in memory


@dataclass(frozen=True)
class _Place:
    """The tensors of a site that differ from the source network's, and the names of its classes."""

    changes: Mapping[str, Tensor]
    classes: tuple[str, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.changes.values())


class Site:
    """One site of a folder: images in, logits out."""

    def __init__(self, sites: Sites, name: str, file: Path) -> None:
        self._sites = sites
        self.name = name
        self.file = file

    def __call__(self, images: Tensor) -> Tensor:
        """The logits of the network that is adapted to this site."""
        return self._sites(images, of=[self.name] * len(_tensor(images)))

    def __repr__(self) -> str:
        return f"Site '{self.name}' ({self.file})"


class Sites(Displayed):
    """A network, and a folder with one delta (*.safetensors) for each site; the file's name is the site's.

        sites = fewshift.Sites(model, "sites/")
        sites["camera-7"](images)
        sites(images, of=["camera-7", "camera-2", None])    # a site for each image; None is the source network

    The folder is read at the start and by `reload()`; a delta when its site is first asked for. A delta that does not
    fit is refused then, and the other sites work. `classes` are by default those on the network's card; `head` names
    the last linear layer if something follows it. Several threads may call, and wait for each other.

    In memory there are the tensors of `model`, which this object shares and never changes, and what the deltas change;
    of deltas larger than a tenth of the network, those used last, together no more than the network has.
    """

    def __init__(
        self, model: nn.Module, folder: str | Path, classes: Sequence[str] | None = None, head: str | None = None
    ) -> None:
        refuse_broken_weights(checked_model(model))
        self._model = _sharing(structural_copy(model))
        keep_input(self._model)
        listed = list_layers(self._model)
        refuse_without_statistics(listed)
        self._layers = [layer.name for layer in listed.layers]
        self._folder = folder
        self._files = site_folder(folder)
        self._head = None if head is None else named_head(self._model, head)
        self._fit = Fit.to(self._model, classes)
        self._room = sum(tensor.nbytes for tensor in chain(self._model.parameters(), self._model.buffers()))
        self._versions = _versions(self._model)
        self._places: dict[str, _Place] = {}  # the last one was used last
        self._lock = threading.Lock()
        self._per_image: PerImage | None = None
        self._checked: set[str] = set()  # layers that are known to give each image its own answer
        self.one_pass: bool | None = None  # whether a batch of several sites takes one pass; None before there was one

    def __call__(self, images: Tensor, of: Sequence[str | None]) -> Tensor:
        """The logits of images of several sites; `of` names the site of each, or is None for the source network.

        Sites whose deltas change BatchNorm and the head alone are answered in one pass, each of the others in its own.
        """
        names = self._named(_tensor(images), of)
        with self._lock, torch.no_grad():
            self._refuse_changed_network()
            images = like(self._model, images)
            places = {name: self._place(name) for name in dict.fromkeys(names)}
            _refuse_other_meanings(places)
            if len(places) <= 1:
                return self._plain(images, next(iter(places.values()), _Place({})))
            return self._of_several(images, [places[name] for name in names])

    def __getitem__(self, name: str) -> Site:
        refuse_unknown(name, list(self._files), Path(self._folder))
        return Site(self, name, self._files[name])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def reload(self) -> None:
        """Read the folder again: files that are new, gone or written anew."""
        with self._lock:
            self._files = site_folder(self._folder)
            self._places.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in memory beside the network's."""
        return sum(place.nbytes for place in self._places.values())

    @property
    def title(self) -> str:
        """What it is."""
        return f"Sites of {type(self._model).__name__}"

    @property
    def facts(self) -> dict[str, str]:
        """The folder, its sites, and what they take."""
        one_pass = {None: "one pass for each site so far", True: "one pass", False: "one pass for each site"}
        return {
            "folder": str(self._folder),
            "sites": f"{len(self)}: {few(tuple(self))}",
            "in memory": f"{len(self._places)}, {byte_size(self.nbytes)} beside the network's {byte_size(self._room)}",
            "mixed batches": one_pass[self.one_pass],
        }

    def _named(self, images: Tensor, of: Any) -> list[str | None]:
        """The site of each image, checked."""
        if isinstance(of, str):
            raise FewshiftError(f"of={of!r} is one word: give a list with a site for each image, or call sites[{of!r}]")
        try:
            names = list(of)
        except TypeError:
            raise FewshiftError(f"of is of type {type(of).__name__}: give a list with a site for each image") from None
        if len(names) != len(images):
            raise FewshiftError(f"there are {len(images)} images and {len(names)} sites: name one for each image")
        for name in dict.fromkeys(name for name in names if name is not None):
            refuse_unknown(name, list(self._files), Path(self._folder))
        return names

    def _place(self, name: str | None) -> _Place:
        """What the delta of a site changes, from memory or from its file."""
        if name is None:
            return _Place({})
        place = self._places.pop(name, None)
        if place is None:
            delta, changes = read_site(name, self._files[name], self._fit)
            place = _Place(changes, delta.classes)
        self._places[name] = place
        large = [other for other, held in self._places.items() if held.nbytes > LARGE * self._room]
        while sum(self._places[other].nbytes for other in large) > self._room:
            del self._places[large.pop(0)]
        return place

    def _plain(self, images: Tensor, place: _Place) -> Tensor:
        """All images are of one site."""
        return self._logits(images, lambda: functional_call(self._model, dict(place.changes), (images,)))

    def _of_several(self, images: Tensor, places: Sequence[_Place]) -> Tensor:
        """Small deltas in one pass, larger ones each in its own."""
        per_image = self._prepared(images)
        taken = {id(place): per_image.takes(place.changes) for place in _each(places)}
        small = [row for row, place in enumerate(places) if taken[id(place)]]
        large = sorted(set(range(len(places))) - set(small))
        answers = {}
        for rows, answered in ((small, self._mixed), (large, self._by_site)):
            if rows:
                part = images if len(rows) == len(images) else images[rows]
                answers[tuple(rows)] = answered(part, [places[row] for row in rows])
        return _in_order(answers)

    def _mixed(self, images: Tensor, places: Sequence[_Place]) -> Tensor:
        """In one pass where the network allows it; otherwise one pass for each site."""
        assert self._per_image is not None  # prepared before
        per_image, changes = self._per_image, [place.changes for place in places]
        several = _each(places)
        if len(several) == 1:
            return self._plain(images, places[0])
        touched = set().union(*(per_image.touched(place.changes) for place in several))
        if self.one_pass is not False and not touched <= self._checked:
            self.one_pass = self._is_right(images, places)
            self._checked |= touched
        if self.one_pass:
            try:
                return self._logits(images, lambda: per_image(images, changes))
            except UnmixableError:
                self.one_pass = False
        return self._by_site(images, places)

    def _by_site(self, images: Tensor, places: Sequence[_Place]) -> Tensor:
        """One pass for each site."""
        rows: dict[int, list[int]] = {}
        for row, place in enumerate(places):
            rows.setdefault(id(place), []).append(row)
        return _in_order({tuple(own): self._plain(images[own], places[own[0]]) for own in rows.values()})

    def _is_right(self, images: Tensor, places: Sequence[_Place]) -> bool:
        """Whether one pass gives what a pass for each site gives, tried with two images of each site.

        A network may fold the batch into another dimension, use a layer's tensors without calling it, or have a fused
        activation that looks across channels: then it does not.
        """
        assert self._per_image is not None  # prepared before
        first = {id(place): row for row, place in reversed(list(enumerate(places)))}
        last = {id(place): row for row, place in enumerate(places)}
        chosen = [*first.values(), *last.values()]
        pictures, sites = images[chosen], [places[row] for row in chosen]
        expected = self._by_site(pictures, sites)
        try:
            found = main_output(self._per_image(pictures, [place.changes for place in sites]))
        except Exception:  # whatever the network says against it
            return False
        largest = max(1.0, float(expected.abs().nan_to_num(0, 0).max()))
        allowed = ROUNDING * torch.finfo(expected.dtype).eps ** 0.5 * largest
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True)

    def _prepared(self, images: Tensor) -> PerImage:
        """The network with its head found, which takes a pass over two images the first time."""
        if self._per_image is None:
            with last_outputs(self._model) as outputs:
                logits = self._logits(images[:2], lambda: self._model(images[:2]))
            head = self._head or find_head(self._model, outputs, logits)
            self._per_image = PerImage(self._model, self._layers, head)
        return self._per_image

    def _logits(self, images: Tensor, forward: Callable[[], Any]) -> Tensor:
        """What a pass gives, or one sentence why it gives nothing."""
        try:
            logits = main_output(forward())
        except (FewshiftError, UnmixableError):
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FewshiftError(
                f"the network cannot run on images of shape {tuple(images.shape)} ({reason}): "
                "check size, channels and preprocessing"
            ) from error
        if logits.ndim < 2 or len(logits) != len(images):
            raise FewshiftError(
                f"the network's output for {len(images)} images has shape {tuple(logits.shape)}: "
                "wrap it in a module that returns one row of logits per image"
            )
        return logits

    def _refuse_changed_network(self) -> None:
        """The tensors are shared with the user's network, which may have been trained since."""
        if _versions(self._model) != self._versions:
            raise FewshiftError(
                "the network was changed after its sites were opened, so their deltas do not fit: "
                "load its weights again and open the sites anew"
            )


def _tensor(images: Any) -> Tensor:
    if not isinstance(images, Tensor):
        raise FewshiftError(f"images are of type {type(images).__name__}: give a tensor of preprocessed images")
    if images.ndim < 2:
        raise FewshiftError(f"images have shape {tuple(images.shape)}: give a batch, one image after the other")
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise FewshiftError(f"images are {kind}: preprocess them to floating point first")
    return images


def _sharing(model: nn.Module) -> nn.Module:
    """The same modules around the same memory, but not the same parameters: moving the other network moves none."""
    private: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = private.setdefault(id(parameter), nn.Parameter(parameter.detach(), requires_grad=False))
                module._parameters[name] = own
    return model


def _versions(model: nn.Module) -> list[int]:
    """How often each tensor was written to; a tensor of inference mode does not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in model.parameters()]


def _refuse_other_meanings(places: Mapping[str | None, _Place]) -> None:
    """An error if columns of logits would mean other classes for one image than for another."""
    known = {place.classes: name for name, place in places.items() if place.classes is not None}
    if len(known) > 1:
        (one, first), (other, second), *_ = known.items()
        raise FewshiftError(
            f"site '{first}' has classes {few(one)} and site '{second}' has {few(other)}: ask them in different batches"
        )


def _each(places: Sequence[_Place]) -> list[_Place]:
    """Every place once."""
    return list({id(place): place for place in places}.values())


def _in_order(answers: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """The rows of several answers, each where it belongs."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    first = next(iter(answers.values()))
    logits = first.new_empty(sum(map(len, answers)), *first.shape[1:])
    for rows, answer in answers.items():
        logits[list(rows)] = answer
    return logits
