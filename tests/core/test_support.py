"""Support sets: nested, disjoint from evaluation, checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshift import FewshiftError, Support, draw_support
from fewshift.core.draws import others
from fewshift.core.losses import cross_entropy
from fewshift.core.randomness import minibatches

LABELS = torch.arange(7).repeat(40)[torch.randperm(280, generator=torch.Generator().manual_seed(0))]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 20))
def test_draws_are_nested_in_k_balanced_and_disjoint_from_evaluation(seed, k):
    small, large = draw_support(LABELS, k, seed), draw_support(LABELS, k + 1, seed)
    assert set(small.tolist()) < set(large.tolist())
    assert LABELS[small].bincount().tolist() == [k] * 7
    rest = others(small, len(LABELS))
    assert not set(rest.tolist()) & set(small.tolist())
    assert len(rest) + len(small) == len(LABELS)
    assert torch.equal(small, draw_support(LABELS, k, seed))


def test_another_seed_draws_other_images():
    assert set(draw_support(LABELS, 5, 0).tolist()) != set(draw_support(LABELS, 5, 1).tolist())


def test_asking_for_more_than_a_class_has_names_the_class():
    with pytest.raises(FewshiftError, match="class 'otter' has 2 images, 5 shots asked: add 3 or ask for 2"):
        draw_support([0] * 9 + [1] * 2, 5, 0, ["seal", "otter"])


@pytest.mark.parametrize(
    ("total", "sizes", "dropped"), [(35, [32, 3], [32]), (70, [32, 32, 6], [32, 32]), (7, [7], [7])]
)
def test_an_epoch_is_a_permutation_and_only_an_incomplete_minibatch_is_dropped(total, sizes, dropped):
    batches = minibatches(total, 32, torch.Generator().manual_seed(0))
    assert [len(batch) for batch in batches] == sizes
    assert sorted(torch.cat(batches).tolist()) == list(range(total))
    assert [len(batch) for batch in minibatches(total, 32, torch.Generator().manual_seed(0), drop_last=True)] == dropped


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(3).long(), "2 images but 3 labels"),
        (torch.zeros(0, 3, 4, 4), torch.zeros(0).long(), "empty"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), "images are uint8"),
        (torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1]), "image 1 of the support contains NaN"),
        (torch.zeros(2, 3), torch.zeros(2), "labels are not integers"),
    ],
)
def test_unusable_supports_are_refused_in_one_sentence(images, labels, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        Support(images, labels)


@pytest.mark.parametrize(
    ("labels", "classes", "sentence"),
    [
        ([1, 1], None, "every support image is of class 1"),
        ([0, 3], None, r"label 3 \(1 image\) .*3 outputs.*0 to 2"),
        ([0, -1], None, r"label -1 \(1 image\) is out of range"),
        ([0, 1], ("a", "b"), "2 class names for a network with 3 outputs"),
    ],
)
def test_labels_that_do_not_fit_the_network_are_refused(labels, classes, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        Support(torch.zeros(2, 3), torch.tensor(labels), classes).checked((3,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(4,), (4, 2, 2)], ids=["images", "pixels"])
def test_integer_labels_of_any_type_mean_the_same(dtype, shape):
    wanted = torch.tensor([0, 1, 1, 0]).reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
    support = Support(torch.rand(4, 3, 2, 2), wanted.to(dtype))
    assert support.labels.dtype == torch.int64
    assert torch.equal(support.targets, wanted)
    logits = torch.rand(4, 2, *shape[1:])
    assert support.loss_of(cross_entropy, [logits]) == pytest.approx(float(F.cross_entropy(logits, wanted)))


def test_labels_of_different_sizes_are_integers_of_one_type():
    sizes = [(2, 2), (3, 2)]
    images = [torch.rand(3, *size) for size in sizes]
    support = Support(images, [torch.ones(size, dtype=torch.uint8) for size in sizes])
    assert [label.dtype for label in support.labels] == [torch.int64] * 2


def test_an_augmentation_may_not_change_the_shape():
    support = Support(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]), augment=lambda image: image[:, :2])
    with pytest.raises(FewshiftError, match="augment changed an image"):
        support.batch(torch.tensor([0]))


@pytest.mark.parametrize("k", [0, -1, 1.5, "2", None, True])
def test_a_draw_of_no_number_of_images_is_one_sentence(k):
    with pytest.raises(FewshiftError, match="is no number of images: give 1 or more"):
        draw_support(LABELS, k, 0)


@pytest.mark.parametrize(
    ("labels", "fact"),
    [
        (LABELS[:, None], "have shape"),
        (LABELS.view(2, 10, 14), "have shape"),
        (LABELS.double(), "are not integers"),
        (["ant", "bee"], "are not integers"),
        (np.array([object(), None]), "are not integers"),
        (None, "are not integers"),
    ],
)
def test_labels_that_are_no_class_numbers_are_one_sentence(labels, fact):
    with pytest.raises(FewshiftError, match=f"labels {fact}.*: give (one class index|class indices)"):
        draw_support(labels, 1, 0)


@pytest.mark.parametrize("kind", [np.uint16, np.uint64, np.int8])
def test_class_numbers_of_any_type_are_drawn_alike(kind):
    assert torch.equal(draw_support(LABELS.numpy().astype(kind), 3, 0), draw_support(LABELS, 3, 0))
