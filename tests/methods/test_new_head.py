"""The mixture of the source's head and the classes' directions, and how labels choose between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.heads import leaning_rows
from fewshift.methods._new_head import PULL, SHARES, USUAL, HeldOutHeads, LinearHead, MixedHead

CLASSES, FEATURES = 4, 12


def places(images: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Centres of the classes, and features around them with their labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * F.normalize(torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.arange(CLASSES).repeat_interleave(images)
    points = centres[labels] + spread * torch.randn(len(labels), FEATURES, generator=generator, dtype=torch.float64)
    return centres, points, labels


def folds(count: int) -> list[Tensor]:
    return [torch.arange(start, count, 3) for start in range(3)]


def head(rows: Tensor) -> LinearHead:
    return LinearHead(rows, torch.zeros(len(rows), dtype=torch.float64))


def test_with_the_whole_share_the_sources_head_predicts_as_before() -> None:
    centres, points, labels = places(5, 1.0)
    source = LinearHead(centres, torch.linspace(-1, 1, CLASSES, dtype=torch.float64))
    mixed = MixedHead.of(source, points, labels, None).at(1.0)
    ratio = mixed.answers(points) / source.answers(points)
    assert torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio))


def test_with_no_share_rows_are_the_classes_directions() -> None:
    centres, points, labels = places(5, 1.0)
    source = head(torch.roll(centres, 1, 0))
    mixed = MixedHead.of(source, points, labels, None).at(0.0)
    expected = leaning_rows(points, labels, source.rows, PULL)
    assert torch.allclose(F.normalize(mixed.rows, dim=1), expected)
    assert torch.equal(mixed.bias, torch.zeros(CLASSES, dtype=torch.float64))


def test_a_mixture_answers_with_the_mixture_of_both_answers() -> None:
    centres, points, labels = places(5, 1.0)
    mixture = MixedHead.of(head(centres), points, labels, None)
    mean = 0.3 * mixture.stays.answers(points) + 0.7 * mixture.new.answers(points)
    assert torch.allclose(mixture.at(0.3).answers(points), mean)


def test_labels_keep_a_head_that_is_right() -> None:
    centres, points, labels = places(5, 0.3)
    assert HeldOutHeads.of(head(centres), points, labels, None, folds(len(labels))).share() == USUAL


def test_labels_overrule_a_head_that_is_wrong() -> None:
    centres, points, labels = places(8, 0.3)
    wrong = head(torch.roll(centres, 1, 0))
    heads = HeldOutHeads.of(wrong, points, labels, None, folds(len(labels)))
    assert (wrong.answers(points).argmax(1) == labels).sum() == 0
    assert torch.equal(heads.answers[heads.share()].argmax(1), labels)


def test_held_out_answers_come_from_heads_that_were_made_without_the_image() -> None:
    centres, points, labels = places(4, 1.0)
    source = head(centres)
    parts = folds(len(labels))
    answers = HeldOutHeads.of(source, points, labels, None, parts).answers
    for fold in parts:
        rest = [place for place in range(len(labels)) if place not in fold.tolist()]
        alone = MixedHead.of(source, points[rest], labels[rest], None)
        for share in SHARES:
            assert torch.allclose(answers[share][fold], alone.at(share).answers(points[fold]))


def test_unlabelled_images_move_the_new_rows_towards_themselves() -> None:
    centres, points, labels = places(5, 1.0)
    _, beside, _ = places(50, 0.2)
    source = head(torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    alone, together = (MixedHead.of(source, points, labels, more).new.rows for more in (None, beside))
    near = [F.cosine_similarity(rows, centres, dim=1).mean() for rows in (alone, together)]
    assert near[1] > near[0]


def test_a_head_without_a_bias_gets_zeros() -> None:
    layer = nn.Linear(FEATURES, CLASSES, bias=False)
    assert torch.equal(LinearHead.of(layer).bias, torch.zeros(CLASSES, dtype=torch.float64))
