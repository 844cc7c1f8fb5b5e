"""How many images a person must look at until every class has five labels: the studio's order against chance.

A simulated person labels what is shown. The table also has the share of images that the network had right before:
among all images, and among the first five labels of each class. An order that shows images the network has right
already would flatter it. "most probable" is such an order, and is not what the studio does.

    python benchmarks/studio_order.py --data-root data/ --weights networks/

needs PACS in data/pacs and pacs-<target>.safetensors in networks/. With --adapt it also fits the network to the first
five labels of each class, for the first draws, and reports the accuracy on all other images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fewshift
from fewshift.api import known_card
from fewshift.images.folders import ImageFolder, labelled_folder
from fewshift.studio.order import Order, beliefs
from fewshift.studio.tasks import answered

WANTED = 5
Array = np.ndarray[Any, Any]
Choose = Callable[[Mapping[int, int], set[int]], int]


def main(data_root: Path, weights: Path, targets: Sequence[str], draws: int, adapting: int) -> None:
    print(f"until every class has {WANTED}, {draws} draws: images looked at, mean (90 % of draws below)")
    columns = ("target", "images", "rarest", "order", "looked at", "right, labelled", "right, all")
    print("{:14}{:>8}{:>8}  {:15}{:>12}{:>17}{:>12}".format(*columns))
    for target in targets:
        model = fewshift.load(None, weights / f"pacs-{target}.safetensors")
        card = known_card(model)
        images = labelled_folder(data_root / "pacs" / target, card.preprocess, card.classes)
        probabilities, features = looked_at(model, images)
        truth = np.array(images.labels)
        right = probabilities.argmax(1) == truth
        balanced = np.mean([right[truth == label].mean() for label in np.unique(truth)])
        rarest = np.bincount(truth).min() / len(truth)
        for name, order in orders(probabilities, features).items():
            runs = [labelled_until(truth, order(seed)) for seed in range(draws)]
            looks = [len(run) for run in runs]
            sampled = np.mean([right[first_of_each(run)].mean() for run in runs])
            amount = f"{np.mean(looks):.0f} ({np.quantile(looks, 0.9):.0f})"
            facts = f"{target:14}{len(truth):8,}{rarest:8.1%}  {name:15}{amount:>12}"
            print(f"{facts}{sampled:17.1%}{balanced:12.1%}", flush=True)
            for seed, run in enumerate(runs[:adapting]):
                accuracy = adapted_accuracy(model, images, first_of_each(run))
                print(f"    draw {seed}: {accuracy:.1f} % of the other images right after adapting", flush=True)


def looked_at(model: torch.nn.Module, images: ImageFolder) -> tuple[Array, Array]:
    """What the studio's background process knows about all images."""
    parts = list(answered(model, images.preprocess, tuple(enumerate(images.files)), print))
    assert [number for numbers, _, _ in parts for number in numbers] == list(range(len(images)))
    return np.concatenate([part[1] for part in parts]), np.concatenate([part[2] for part in parts])


def orders(probabilities: Array, features: Array) -> dict[str, Callable[[int], Choose]]:
    """Each order, by the seed of its draw."""
    known = range(len(probabilities))

    def spread(seed: int) -> Choose:
        order = Order(probabilities.shape[1], seed)
        return lambda labels, free: order.next(1, free, labels, known, probabilities, features)[0]

    def chance(seed: int) -> Choose:
        order = iter(np.random.default_rng(seed).permutation(len(probabilities)).tolist())
        return lambda labels, free: next(order)

    def probable(seed: int) -> Choose:
        random = np.random.default_rng(seed)

        def choose(labels: Mapping[int, int], free: set[int]) -> int:
            counts = np.bincount(list(labels.values()), minlength=probabilities.shape[1])
            wanted = random.choice(np.flatnonzero(counts == counts.min()))
            belief = beliefs(probabilities, features, labels)[:, wanted]
            belief[list(labels)] = -1
            return int(belief.argmax())

        return choose

    return {"studio": spread, "random": chance, "most probable": probable}


def labelled_until(truth: Array, choose: Choose) -> dict[int, int]:
    """The labels of a person who labels until every class has enough, in their order."""
    labels: dict[int, int] = {}
    free, counts = set(range(len(truth))), np.zeros(truth.max() + 1, dtype=int)
    while counts.min() < WANTED:
        image = choose(labels, free)
        labels[image] = int(truth[image])
        free.discard(image)
        counts[truth[image]] += 1
    return labels


def first_of_each(labels: Mapping[int, int]) -> list[int]:
    """The first five images of each class."""
    classes: dict[int, list[int]] = {}
    for image, label in labels.items():
        classes.setdefault(label, []).append(image)
    return [image for own in classes.values() for image in own[:WANTED]]


def adapted_accuracy(model: torch.nn.Module, images: ImageFolder, chosen: list[int]) -> float:
    """Percent of the other images right, once adapted to the chosen ones; the mean over classes."""
    result = fewshift.adapt(model, images.subset(chosen), accept="always")
    rest = images.subset(sorted(set(range(len(images))) - set(chosen)))
    numbered = tuple(enumerate(rest.files))
    parts = [probabilities for _, probabilities, _ in answered(result.model, images.preprocess, numbered, print)]
    right, truth = np.concatenate(parts).argmax(1) == np.array(rest.labels), np.array(rest.labels)
    return 100 * float(np.mean([right[truth == label].mean() for label in np.unique(truth)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--targets", nargs="+", default=["art_painting", "cartoon", "photo", "sketch"])
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--adapt", type=int, default=0, metavar="DRAWS", help="adapt to so many draws of each order")
    options = parser.parse_args()
    main(options.data_root, options.weights, options.targets, options.draws, options.adapt)
