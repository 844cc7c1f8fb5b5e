"""How often labels in another order than the outputs are noticed, and how often clean ones are taken for such.

The digits need no data. With --data-root and --weights the same is done for pacs-<target>.safetensors in that folder,
which takes minutes per network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fewshift
from fewshift.core.draws import draw_support
from fewshift.core.network import Network
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.images.inputs import as_support
from fewshift.lab.datasets import digits
from fewshift.models.cards import Card, known_card
from fewshift.trust.sanity import CautionKind, Known, half_way_answers, look_before, source_answers

SHOTS = 5
ABOUT_LABELS = (CautionKind.PERMUTED, CautionKind.SWAPPED)


def shifted(classes: int, seed: int) -> list[int]:
    return [(label + 1) % classes for label in range(classes)]


def in_a_ring(classes: int, seed: int) -> list[int]:
    return moved(classes, seed, 3)


def swapped(classes: int, seed: int) -> list[int]:
    return moved(classes, seed, 2)


def moved(classes: int, seed: int, many: int) -> list[int]:
    """So many classes, drawn at random, each under the name of the next."""
    ring = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))[:many].tolist()
    order = list(range(classes))
    for label, name in zip(ring, [*ring[1:], ring[0]], strict=True):
        order[label] = name
    return order


DAMAGES: dict[str, Callable[[int, int], list[int]]] = {
    "clean": lambda classes, seed: list(range(classes)),
    "shifted": shifted,
    "ring": in_a_ring,
    "swapped": swapped,
}


def of_digits(source: str, place: str) -> tuple[nn.Module, Tensor, Tensor]:
    images, labels = digits.PLACES[place].read()
    pool = draw_support(labels, 100, 99)
    return digits.source_network(source), digits.normalise(images[pool]), labels[pool]


def of_pacs(target: str, data_root: Path, weights: Path) -> tuple[nn.Module, Tensor, Tensor]:
    network = fewshift.load(weights=weights / f"pacs-{target}.safetensors")
    card = known_card(network)
    pool = as_support(data_root / "pacs" / target, card.preprocess, None, card.classes, shots=20, seed=1234)
    return network, torch.as_tensor(pool.images), pool.targets


def verdict(known: Known) -> str:
    try:
        cautions = look_before(known)
    except FewshiftError:
        return "refused"
    return "warned" if any(caution.kind in ABOUT_LABELS for caution in cautions) else "passed"


def show(name: str, network: nn.Module, images: Tensor, labels: Tensor, draws: int) -> None:
    view = Network.of(network, images[:2])
    counts = {damage: {"refused": 0, "warned": 0, "passed": 0} for damage in DAMAGES}
    right = torch.zeros(2)
    for seed in range(draws):
        drawn = draw_support(labels, SHOTS, seed)
        clean = Target(Support(images[drawn], labels[drawn]))
        answers, half_way = source_answers(view, clean), half_way_answers(view, clean)
        assert answers is not None
        assert half_way is not None
        right += torch.tensor(
            [float((each.argmax(1) == labels[drawn]).double().mean()) for each in (answers, half_way)]
        )
        for damage, order in DAMAGES.items():
            renamed = torch.tensor(order(int(labels.max()) + 1, seed))[labels[drawn]]
            known = Known(view, Target(Support(images[drawn], renamed)), Card(), None, True, answers, half_way)
            counts[damage][verdict(known)] += 1
    shares = ", ".join(f"{100 * float(share) / draws:.0f}" for share in right)
    rows = "   ".join(f"{damage}: {row['refused']}, {row['warned']}" for damage, row in counts.items())
    print(f"{name:24} right {shares} %   refused, warned of {draws}   {rows}", flush=True)


def main(data_root: Path | None, weights: Path | None, targets: Sequence[str], draws: int) -> None:
    if data_root and weights:
        for target in targets:
            show(f"pacs, {target}", *of_pacs(target, data_root, weights), draws)
        return
    for source, place in (("mnist", "uci"), ("uci", "mnist")):
        show(f"digits, {source} to {place}", *of_digits(source, place), draws)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--targets", nargs="+", default=["art_painting", "cartoon", "photo", "sketch"])
    parser.add_argument("--draws", type=int, default=50)
    options = parser.parse_args()
    main(options.data_root, options.weights, options.targets, options.draws)
