"""How many wrong labels `adapt` names, and how many right ones: with two labels in five wrong, and with none.

The digits need no data. With --data-root and --weights the same is done for pacs-<target>.safetensors in that folder,
which takes minutes per adaptation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import fewshift
from fewshift.core.draws import draw_support
from fewshift.core.support import Support
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.damage import damaged
from fewshift.lab.bench.materials import Materials, open_materials

SHOTS = 5
PLACES = [("digits", "mnist", "uci"), ("digits", "uci", "mnist")]


def main(data_root: Path | None, weights: Path | None, targets: Sequence[str], draws: int) -> None:
    materials = open_materials(data_root and str(data_root), weights and str(weights))
    pacs = [("pacs", f"pacs-{target}", target) for target in targets] if data_root and weights else []
    print(f"k = {SHOTS}, {draws} draws       wrong labels named   right labels named, two in five wrong   none wrong")
    for dataset, source, target in pacs or PLACES:
        rows = {damage: [0, 0, 0, 0] for damage in ("wrong labels", None)}
        for damage, sums in rows.items():
            for seed in range(draws):
                cell = Cell(dataset, source, target, "auto", shots=SHOTS, seed=seed, damage=damage)
                sums[:] = [total + count for total, count in zip(sums, counts(cell, materials), strict=True)]
        wrong, clean = rows["wrong labels"], rows[None]
        shares = [f"{part} of {whole}" for part, whole in (wrong[:2], wrong[2:], clean[2:])]
        print(f"{source:17} {target:12} {shares[0]:>12} {shares[1]:>40} {shares[2]:>12}", flush=True)


def counts(cell: Cell, materials: Materials) -> tuple[int, int, int, int]:
    """Wrong labels that were named, wrong ones, right labels that were named, right ones."""
    domain = materials.domain(cell)
    drawn = draw_support(domain.labels, SHOTS, cell.seed, domain.classes)
    truth = labels = domain.labels[drawn]
    if cell.damage:
        drawn, labels = damaged(drawn, truth, cell.damage, len(domain.classes), cell.seed)
    support = Support(domain.images(drawn), labels, domain.classes)
    result = fewshift.adapt(materials.network(cell), support, accept="always", seed=cell.seed)
    wrong = (labels != truth).tolist()
    named = [wrong[suspect.position] for suspect in result.suspects]
    return sum(named), sum(wrong), len(named) - sum(named), len(wrong) - sum(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--targets", nargs="+", default=["art_painting", "cartoon", "photo", "sketch"])
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    main(options.data_root, options.weights, options.targets, options.draws)
