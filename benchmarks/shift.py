"""How often `fewshift.shift` raises an alarm: on images of the source, where it should not, and of another place.

Every layer's view of every image is read once; then N images are drawn from it again and again. The digits need no
data. With --data-root and --weights (a folder of pacs-<target>.safetensors) the same is done for PACS: source images
are the published validation lists of the three training domains as one, and of one of them alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fewshift import models
from fewshift.data import digits
from fewshift.data.collections import find_collection
from fewshift.data.copies import from_list
from fewshift.shifts import Seen, judged, look
from fewshift.target import Unlabelled

COUNTS = (1, 2, 3, 5, 10, 20, 50, 100)
View = dict[str, Seen]


def main(draws: int, data_root: Path | None, weights: Path | None) -> None:
    print(f"alarms in % of {draws} draws of N images")
    print(f"{'':44}" + "".join(f"{f'N={count}':>7}" for count in COUNTS))
    for source, other in (("mnist", "uci"), ("uci", "mnist"))[: 0 if data_root else 2]:
        network, (own, labels) = digits.source_network(source), digits.split(source)[1]
        one = own[labels == 3]
        show(f"{source}: held-out images", seen(network, digits.normalise(own)), draws)
        show(f"{source}: {other}", seen(network, digits.normalise(digits.PLACES[other].read()[0])), draws)
        show(f"{source}: three quarters of the contrast", seen(network, digits.normalise(0.75 * own)), draws)
        blurred = torch.nn.functional.avg_pool2d(own, 3, 1, 1)
        show(f"{source}: blurred", seen(network, digits.normalise(blurred)), draws)
        show(f"{source}: held-out images of one class", seen(network, digits.normalise(one)), draws)
    if data_root is None or weights is None:
        return
    known = find_collection("pacs")
    for target in known.domains:
        loaded = models.load(None, weights / f"pacs-{target}.safetensors")
        assert loaded.preprocess is not None
        views = {}
        for domain in known.domains:
            file = data_root / "pacs_splits" / f"{domain}_crossval_kfold.txt"
            images = from_list(file, data_root / "pacs", known.classes, 1, preprocess=loaded.preprocess)
            views[domain] = seen(loaded.model, images)
        own = [domain for domain in known.domains if domain != target]
        show(f"pacs without {target}: the three domains", joined([views[it] for it in own]), draws)
        show(f"pacs without {target}: {target}", views[target], draws)
        show(f"pacs without {target}: {own[0]} alone", views[own[0]], draws)


def seen(network: nn.Module, images: object) -> View:
    return look(network, Unlabelled(images), most=2000)


def joined(views: Sequence[View]) -> View:
    return {
        name: Seen(*(torch.cat([getattr(it[name], what) for it in views]) for what in ("mean", "var")))
        for name in views[0]
    }


def show(what: str, view: View, draws: int) -> None:
    total = len(next(iter(view.values())).mean)
    rates = [rate(view, total, count, draws) if 2 * count <= total else None for count in COUNTS]
    print(f"{what:44}" + "".join(f"{'-' if it is None else f'{it:.1f}':>7}" for it in rates), flush=True)


def rate(view: View, total: int, count: int, draws: int) -> float:
    generator = torch.Generator().manual_seed(count)
    alarms = sum(judged(_part(view, torch.randperm(total, generator=generator)[:count])).shifted for _ in range(draws))
    return 100 * alarms / draws


def _part(view: View, indices: Tensor) -> View:
    return {name: it.part(indices) for name, it in view.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--data-root", type=Path, help="where pacs/ and pacs_splits/ lie")
    parser.add_argument("--weights", type=Path, help="a folder with pacs-<target>.safetensors")
    options = parser.parse_args()
    main(options.draws, options.data_root, options.weights)
