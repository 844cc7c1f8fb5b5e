"""SFDA: its pure functions against naive loops, and what its training promises; its steps: test_sfda_naive."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fewshift import FewshiftError, Target
from fewshift.core.support import Unlabelled
from fewshift.methods import sfda as module
from fewshift.methods.sfda import SFDA, nearest, normalised_entropy, prototypes, share, threshold, two_heads_loss
from tests.helpers.networks import make_support, make_tiny, state

QUICK = SFDA(steps=5, memory_every=2, batch_size=8)
IMAGES = make_support().images  # 15


def target(images=IMAGES, augment=None):
    return Target(unlabelled=Unlabelled(images, augment))


def changed(method, model=None, seed=0):
    """The names of the tensors that differ afterwards."""
    model = model or make_tiny()
    before, after = state(model), state(method.adapt(model, target(), seed))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def cloud(seed, n=40, classes=5):
    """Logits, their probabilities and normalised entropies."""
    logits = 2 * torch.randn(n, classes, generator=torch.Generator().manual_seed(seed)).double()
    return logits, logits.softmax(1), normalised_entropy(logits)


# the pure functions


def test_the_entropy_is_normalised_by_that_of_guessing():
    _, p, entropies = cloud(0)
    expected = [-sum(value * math.log(value) for value in row) / math.log(5) for row in p.tolist()]
    assert entropies.tolist() == pytest.approx(expected)
    assert float(normalised_entropy(torch.zeros(1, 5))) == pytest.approx(1)
    assert float(normalised_entropy(1000 * torch.eye(5))[0]) == 0


def naive_threshold(predicted, entropies, classes):
    smallest = []
    for c in range(classes):
        mine = [h for label, h in zip(predicted.tolist(), entropies.tolist(), strict=True) if label == c]
        if mine:
            smallest.append(min(mine))
    return max(smallest)


def naive_prototypes(p, entropies, tau, most):
    lists = []
    for c in range(p.shape[1]):
        mine = [i for i, row in enumerate(p.tolist()) if row.index(max(row)) == c and entropies[i] <= tau]
        if not mine:
            column = p[:, c].tolist()
            mine = [column.index(max(column))]
        lists.append(sorted(mine, key=lambda i: float(entropies[i])))
    length = min(max(len(mine) for mine in lists), most)
    return [[mine[j % len(mine)] for j in range(length)] for mine in lists]


@pytest.mark.parametrize("missing", [None, 2])
@pytest.mark.parametrize("most", [100, 3])
@pytest.mark.parametrize("seed", range(4))
def test_threshold_and_prototypes_agree_with_a_naive_loop(seed, most, missing):
    _, p, h = cloud(seed)
    if missing is not None:
        p[:, missing] *= 1e-3  # nothing is predicted to be of this class
    predicted = p.argmax(1)
    tau = threshold(predicted, h, 5)
    assert float(tau) == naive_threshold(predicted, h, 5)
    assert prototypes(p, h, tau, most).tolist() == naive_prototypes(p, h, float(tau), most)


@pytest.mark.parametrize("seed", range(8))
def test_every_class_has_a_prototype_and_the_one_that_sets_tau_has_exactly_one(seed):
    _, p, h = cloud(seed)
    predicted = p.argmax(1)
    tau = threshold(predicted, h, 5)
    chosen = prototypes(p, h, tau, 100)
    counts = [len(row.unique()) for row in chosen]
    setter = int(predicted[(h == tau).nonzero().item()])
    assert min(counts) == counts[setter] == 1
    assert max(counts) == chosen.shape[1]
    for label, row in enumerate(chosen):
        assert (predicted[row] == label).all()
        assert (h[row] <= tau).all()


def test_a_class_that_nothing_is_predicted_to_be_takes_the_image_most_probably_of_it():
    p = torch.tensor([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.4, 0.3, 0.3], [0.5, 0.3, 0.2]])
    h = torch.tensor([0.1, 0.2, 0.9, 0.8])
    tau = threshold(p.argmax(1), h, 3)
    assert float(tau) == pytest.approx(0.2)
    assert prototypes(p, h, tau, 100).tolist() == [[0], [1], [2]]


def naive_nearest(feature, memory):
    """Cosine similarity to all prototypes averaged per class; the filter with distances 1 - cos."""

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    cosines = [[cosine(feature, prototype) for prototype in row] for row in memory]
    means = [sum(row) / len(row) for row in cosines]
    order = sorted(range(len(means)), key=lambda c: -means[c])
    farthest = max(1 - value for value in cosines[order[0]])
    return order[0], farthest < min(1 - value for value in cosines[order[1]])


def memory(seed, classes=4, count=3, width=6):
    """Prototypes around a direction per class, and features around the same directions."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 1, width, generator=generator).double()
    prototypes = centres + 0.5 * torch.randn(classes, count, width, generator=generator).double()
    features = centres.repeat(1, 5, 1).flatten(0, 1) + torch.randn(5 * classes, width, generator=generator).double()
    return features, F.normalize(prototypes, dim=2)


@pytest.mark.parametrize("seed", range(4))
def test_pseudo_labels_and_the_filter_agree_with_a_naive_loop(seed):
    features, prototypes = memory(seed)
    labels, confident = nearest(features, prototypes)
    expected = [naive_nearest(row, prototypes.tolist()) for row in features.tolist()]
    assert list(zip(labels.tolist(), confident.tolist(), strict=True)) == expected
    assert 0 < confident.sum() < len(features)


def test_the_average_decides_not_the_nearest_single_prototype():
    directions = F.normalize(torch.tensor([[[1.0, 0.0], [-1.0, 0.2]], [[1.0, 0.6], [1.0, 0.6]]]), dim=2)
    labels, confident = nearest(torch.tensor([[2.0, 0.0]]), directions)
    assert labels.tolist() == [1]
    assert confident.tolist() == [False]  # a prototype of the other class is nearer


def test_the_filter_depends_on_the_two_nearest_classes_only():
    features, prototypes = memory(0)
    labels, confident = nearest(features[:1], prototypes)
    means = torch.einsum("f,cpf->cp", F.normalize(features[0], dim=0), prototypes).mean(1)
    last = int(means.argmin())
    moved = prototypes.clone()
    moved[last] = -F.normalize(features[0], dim=0)
    assert torch.equal(labels, nearest(features[:1], moved)[0])
    assert torch.equal(confident, nearest(features[:1], moved)[1])


def test_the_share_of_prototypes_goes_from_zero_to_almost_one_at_half_time():
    assert share(0, 5000) == 0
    assert share(1250, 5000) == pytest.approx(2 / (1 + math.exp(-5)) - 1)
    assert share(2500, 5000) > 0.9999


def test_the_filtered_mean_is_over_the_whole_minibatch():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 6, 3, generator=generator).double()
    source_labels, labels = torch.randint(3, (2, 6), generator=generator)
    confident = torch.tensor([True, False, False, True, False, False])

    def cross_entropy(row, label):
        return math.log(sum(math.exp(value) for value in row)) - row[label]

    expected = 0.7 * sum(cross_entropy(first[i].tolist(), source_labels[i]) for i in range(6)) / 6
    expected += 0.3 * sum(cross_entropy(second[i].tolist(), labels[i]) for i in (0, 3)) / 6
    loss = two_heads_loss(first, second, source_labels, labels, confident, 0.3)
    assert float(loss) == pytest.approx(float(expected))


# the method


def test_the_first_step_trains_the_body_but_not_the_head_of_the_prototypes():
    assert changed(SFDA(steps=1)) == {name for name in make_tiny().state_dict() if not name.startswith("fc.")}


def test_later_steps_train_everything():
    assert changed(QUICK) == set(make_tiny().state_dict())


@pytest.mark.parametrize("memory", ["eval", "train"])
def test_prototypes_come_from_plain_images_or_from_training_views(memory, monkeypatch):
    looked = []
    original = module.predictions

    def watched(model, *args, **kwargs):
        looked.append(model.bn1.training)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(module, "predictions", watched)
    fitted = SFDA(steps=4, memory_every=2, memory=memory, batch_size=4).fit(
        make_tiny(), target(augment=torch.zeros_like)
    )
    assert looked == [False, *[memory == "train"] * 2, False]  # source, two memories, the result
    tracked = 4 + 2 * 3 * (memory == "train")  # full minibatches of 4 out of 15
    assert fitted.predictor.bn1.num_batches_tracked == tracked


def test_minibatches_of_one_image_are_left_out():
    fitted = SFDA(steps=10, memory_every=10, batch_size=7).fit(make_tiny(), target())
    assert sum(fitted.notes["pseudo_labels"][0]) == 10 * 7


def test_every_memory_is_noted():
    notes = QUICK.fit(make_tiny(), target()).notes
    for name in ("loss", "tau", "prototypes", "confident", "pseudo_labels"):
        assert len(notes[name]) == 3
    assert all(0 <= value <= 1 for value in (*notes["tau"], *notes["confident"]))


def test_an_unknown_memory_is_refused():
    with pytest.raises(FewshiftError, match="memory='both'"):
        SFDA(memory="both")
