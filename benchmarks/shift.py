"""How often `fewshift.shift` raises an alarm: on images of the source, where it should not, and on images of elsewhere.

What each layer sees of each image is read once. Then N images are drawn again and again, and judged alone or against
other images of the source. The digits need no data. With --data-root and --weights the same is done for the networks
in that folder: pacs-<target>.safetensors, whose source images are the published validation lists of the other three
domains, and camvid-dusk.safetensors, which was trained on the frames of the day.

--corruptions asks how many images it takes to notice a corruption: of images of the network's own source that it was
not trained on, clean and corrupted at three strengths, how many draws of N raise an alarm?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fewshift.core.distance import Seen, look
from fewshift.core.support import Unlabelled
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.materials import open_materials
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.copies import from_list, load_scenes
from fewshift.lab.datasets.corruptions import OPERATIONS, STRENGTHS, corrupted
from fewshift.lab.datasets.domain import Domain
from fewshift.models import libraries as models
from fewshift.models.cards import known_card
from fewshift.trust.shift import judged

COUNTS = (1, 2, 3, 5, 10, 20, 50, 100)
AGAINST = 50  # source images
OF_CORRUPTED = (1, 5, 20, 50)  # images
CORRUPTED_DRAWS = 10
POOL = 200  # images that are corrupted and drawn from
View = dict[str, Seen]


def main(draws: int, data_root: Path | None, weights: Path | None) -> None:
    print(f"alarms in % of {draws} draws of N images")
    print(f"{'':58}" + "".join(f"{f'N={count}':>7}" for count in COUNTS))
    for source, other in (("mnist", "uci"), ("uci", "mnist")):
        show_digits(source, other, draws)
    if data_root is not None and weights is not None:
        for target in find_collection("pacs").domains:
            if (file := weights / f"pacs-{target}.safetensors").is_file():
                show_pacs(file, target, data_root, draws)
        if (file := weights / "camvid-dusk.safetensors").is_file():
            show_camvid(file, data_root, draws)


def show_digits(source: str, other: str, draws: int) -> None:
    network, (images, labels) = digits.source_network(source), digits.split(source)[1]

    def seen(images: torch.Tensor) -> View:
        return view(network, digits.normalise(images))

    own, elsewhere = seen(images), seen(digits.PLACES[other].read()[0])
    show_both(source, "its held-out digits", own, other, elsewhere, draws)
    show(f"{source}: three quarters of the contrast", seen(0.75 * images), draws)
    show(f"{source}: blurred", seen(torch.nn.functional.avg_pool2d(images, 3, 1, 1)), draws)
    show(f"{source}: held-out digits of one class", seen(images[labels == 3]), draws)


def show_pacs(file: Path, target: str, root: Path, draws: int) -> None:
    known, loaded = find_collection("pacs"), models.load(None, file)
    assert known_card(loaded).preprocess is not None
    views = {}
    for domain in known.domains:
        names = root / "pacs_splits" / f"{domain}_crossval_kfold.txt"
        images = from_list(names, root / "pacs", known.classes, 1, preprocess=known_card(loaded).preprocess)
        views[domain] = view(loaded, images)
    sources = [domain for domain in known.domains if domain != target]
    mixture = joined([views[domain] for domain in sources])
    show_both(f"PACS without {target}", "the three domains", mixture, target, views[target], draws)
    show(f"PACS without {target}: {sources[0]} alone", views[sources[0]], draws)


def show_camvid(file: Path, root: Path, draws: int) -> None:
    loaded = models.load(None, file)
    day, dusk = (
        view(loaded, load_scenes("camvid", time, root, known_card(loaded).preprocess), most=120)
        for time in ("day", "dusk")
    )
    show_both("CamVid by day", "day", day, "dusk", dusk, draws)


def show_both(name: str, own_name: str, own: View, other_name: str, other: View, draws: int) -> None:
    """Images of the source and of elsewhere, alone and against images of the source."""
    show(f"{name}: {own_name}", own, draws)
    show(f"{name}: {own_name}, against {AGAINST}", own, draws, own)
    show(f"{name}: {other_name}", other, draws)
    show(f"{name}: {other_name}, against {AGAINST}", other, draws, own)


def corruption_rows(weights: Path | None, data_root: Path | None, draws: int) -> None:
    """How many draws of N images of a network's own source raise an alarm, clean and corrupted."""
    files = sorted(weights.glob("pacs-*.safetensors")) if weights is not None and data_root is not None else []
    materials = open_materials(str(data_root) if data_root else None, str(weights) if weights else None)
    print(f"alarms in % of {draws} draws of N clean images, and in {CORRUPTED_DRAWS} draws of corrupted ones for the")
    print(f"strengths 1/2/3; the last column is one image against {AGAINST} clean ones")
    print(f"{'':40}" + "".join(f"{column:>12}" for column in (*(f"N={count}" for count in OF_CORRUPTED), "1 against")))
    for source in ("mnist", "uci", *(file.stem for file in files)):
        cell = Cell("digits" if source in digits.PLACES else "pacs", source, OWN_SOURCE, "source")
        pool = materials.domain(cell)
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
        show_corruptions(source, materials.network(cell), pool.subset(order[:POOL]).cached(), draws)


def show_corruptions(source: str, network: nn.Module, pool: Domain, draws: int) -> None:
    def seen(domain: Domain) -> View:
        return view(network, domain.images(torch.arange(len(domain))))

    clean = seen(pool)
    print_rates(f"{source}: clean", [rates(clean, clean, draws)], "{:.1f}")
    for name in OPERATIONS:
        views = [seen(corrupted(pool, f"{name} {strength}")) for strength in STRENGTHS]
        print_rates(f"{source}: {name}", [rates(view, clean, CORRUPTED_DRAWS) for view in views], "{:.0f}")


def rates(seen: View, clean: View, draws: int) -> list[float]:
    """Alarms in percent for every N, and for one image against clean ones."""
    return [rate(seen, count, draws, None) for count in OF_CORRUPTED] + [rate(seen, 1, draws, clean)]


def print_rates(what: str, rows: Sequence[Sequence[float]], form: str) -> None:
    *alone, against = ("/".join(form.format(value) for value in column) for column in zip(*rows, strict=True))
    print(f"{what:40}" + "".join(f"{cell:>12}" for cell in (*alone, against)), flush=True)


def view(network: nn.Module, images: object, most: int = 2000) -> View:
    return look(network, Unlabelled(images), most=most)


def joined(views: Sequence[View]) -> View:
    return {
        name: Seen(*(torch.cat([getattr(view[name], what) for view in views]) for what in ("mean", "var")))
        for name in views[0]
    }


def show(what: str, seen: View, draws: int, source: View | None = None) -> None:
    taken = AGAINST if source is seen else 0
    cells = []
    for count in COUNTS:
        enough = size(seen) >= 2 * count + taken  # or all draws would be nearly the same
        cells.append(f"{rate(seen, count, draws, source):.1f}" if enough else "-")
    print(f"{what:58}" + "".join(f"{cell:>7}" for cell in cells), flush=True)


def rate(seen: View, count: int, draws: int, source: View | None) -> float:
    """Alarms in percent; images and those they are judged against never overlap."""
    generator, alarms = torch.Generator().manual_seed(count), 0
    for _ in range(draws):
        order = torch.randperm(size(seen), generator=generator)
        known = None
        if source is not None:
            others = order[count:] if source is seen else torch.randperm(size(source), generator=generator)
            known = {name: layer.part(others[:AGAINST]) for name, layer in source.items()}
        alarms += judged({name: layer.part(order[:count]) for name, layer in seen.items()}, known).shifted
    return 100 * alarms / draws


def size(seen: View) -> int:
    return len(next(iter(seen.values())).mean)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--data-root", type=Path, help="where pacs/ and pacs_splits/, and camvid/, lie")
    parser.add_argument("--weights", type=Path, help="a folder of networks")
    parser.add_argument("--corruptions", action="store_true", help="corruptions of the networks' own images instead")
    options = parser.parse_args()
    if options.corruptions:
        corruption_rows(options.weights, options.data_root, options.draws)
    else:
        main(options.draws, options.data_root, options.weights)
