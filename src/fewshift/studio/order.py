"""Which image to label next, so that every class is found soon and the labels stay a fair sample.

The class that has the fewest labels is looked for. An image is drawn with the probability that it belongs to that
class, which comes from two sources: what the network says (p), and how alike the image is to labelled ones (v, a
kernel on features):

    q_c  is proportional to  p_c^(1/2) (v_c + e^-8),        v_c = mean over labelled images j of c of e^(8 (cos_j - 1)).

Drawn, and not the most probable: the most probable images are those that the network has right already, and labels of
such images would flatter it. `benchmarks/studio_order.py` measures both. A class that was looked for ten times in vain
counts as if it had a label more: it may have no images at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SHARPNESS = 8.0  # of the kernel
TRUST = 0.5  # in the network: the exponent of its probabilities
LEAST = 1e-4  # probability of a class, whatever the network says
PATIENCE = 10  # images that are looked at in vain for a class
REMEMBERED = 20  # labelled images of a class that images are compared with
ENOUGH = 16  # answered images, from which on they are chosen by their answers


class Order:
    """Draws images to label; it remembers which class it looked for with each of them."""

    def __init__(self, classes: int, seed: int | None = None) -> None:
        self._classes = classes
        self._random = np.random.default_rng(seed)
        self._sought: dict[int, int] = {}  # image -> class

    def random(self, count: int, free: Collection[int]) -> list[int]:
        """Some of the free images, whatever they show."""
        images = np.array(sorted(free), dtype=int)
        return [int(image) for image in self._random.permutation(images)[:count]]

    def next(
        self,
        count: int,
        free: Collection[int],
        labels: Mapping[int, int],
        known: Sequence[int],
        probabilities: Array,
        features: Array,
    ) -> list[int]:
        """Some of the free images, the best first.

        `labels` are classes of images; rows of `probabilities` (n, classes) and `features` (n, d) belong to `known`
        images. Before there are enough of those, images are drawn at random.
        """
        rows = {image: row for row, image in enumerate(known)}
        open_rows = np.array([rows[image] for image in sorted(free) if image in rows], dtype=int)
        if len(open_rows) < min(ENOUGH, len(free)) or not len(open_rows):
            return self.random(count, free)
        labelled = {rows[image]: label for image, label in labels.items() if image in rows}
        belief = beliefs(probabilities, features, labelled)[open_rows]
        needs = self._counts(labels)
        chosen: list[int] = []
        for _ in range(min(count, len(open_rows))):
            wanted = int(self._random.choice(np.flatnonzero(needs == needs.min())))
            weights = belief[:, wanted] / belief[:, wanted].sum()
            place = int(self._random.choice(len(open_rows), p=weights))
            belief[place] = 0  # drawn once
            image = known[open_rows[place]]
            chosen.append(image)
            self._sought[image] = wanted
            needs[wanted] += 1
        return chosen

    def _counts(self, labels: Mapping[int, int]) -> Array:
        """(classes,): labels of each class, and one more for each ten images that were looked at in vain for it."""
        found = np.bincount(list(labels.values()), minlength=self._classes).astype(int)
        vain = Counter(wanted for image, wanted in self._sought.items() if labels.get(image, wanted) != wanted)
        more: Array = np.array([vain[label] // PATIENCE for label in range(self._classes)], dtype=int)
        counts: Array = found + more
        return counts


def beliefs(probabilities: Array, features: Array, labels: Mapping[int, int]) -> Array:
    """(n, classes): the probability that each image belongs to each class; `labels` are classes of rows."""
    centred = features - features.mean(0)
    points = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    alike = np.zeros_like(probabilities, dtype=float)
    for label in set(labels.values()):
        own = [row for row, other in labels.items() if other == label][-REMEMBERED:]
        alike[:, label] = np.exp(SHARPNESS * (points @ points[own].T - 1)).mean(1)
    scores = TRUST * np.log(probabilities.astype(float) + LEAST) + np.log(alike + np.exp(-SHARPNESS))
    belief = np.exp(scores - scores.max(1, keepdims=True))
    normalised: Array = belief / belief.sum(1, keepdims=True)
    return normalised
