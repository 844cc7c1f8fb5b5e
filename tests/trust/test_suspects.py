"""Suspects: which labels look wrong, and what the evidence is without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cleanlab.filter import find_label_issues
from torch import Tensor

import fewshift
from fewshift import FewshiftError, Support, draw_support
from fewshift.core.losses import temperature
from fewshift.lab.bench.damage import damaged
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.copies import load_domain
from fewshift.methods.auto import Auto
from fewshift.report.suspects import dropped, looks_wrong
from fewshift.trust.held_out import ImageAnswers, PixelAnswers
from fewshift.trust.suspects import Suspect, Suspects, contradicted, find_suspects, held_out_probabilities

NAMES = ("ant", "bee", "cat")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_labels(seed: int, rows: int = 40, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Labels and probabilities; every third label is another class than the one that the probabilities are drawn to."""
    truth = torch.arange(rows) % classes
    labels = torch.where(torch.arange(rows) % 3 == 0, (truth + 1 + seed % 2) % classes, truth)
    return labels, (2 * F.one_hot(truth, classes) + noise(rows, classes, seed=seed)).softmax(1)


def support(labels: list[int], files: tuple[Path, ...] | None = None) -> Support:
    return Support(torch.zeros(len(labels), 3, 2, 2), torch.tensor(labels), NAMES, files=files)


def answers(labels: list[int], source: list[int], adapted: list[int], sure: float = 4.0) -> ImageAnswers:
    """Sure predictions, each image once."""
    logits = [sure * F.one_hot(torch.tensor(classes), 3).double() for classes in (source, adapted)]
    images = torch.arange(len(labels))
    return ImageAnswers(images, images % 2, torch.tensor(labels), *logits)


LABELS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
SEEN = [0, 0, 0, 2, 1, 1, 1, 1, 2, 2, 2, 2]  # image 3 looks like a cat


@pytest.mark.parametrize("seed", range(6))
def test_without_a_margin_the_suspects_are_those_of_cleanlab(seed):
    labels, probabilities = random_labels(seed)
    issues = find_label_issues(labels.numpy(), probabilities.numpy(), filter_by="confident_learning", n_jobs=1)
    rows = contradicted(labels, probabilities, margin=0)
    # cleanlab spares a label that is the most probable class, which any margin above 1 does too
    assert [row for row in rows if probabilities[row].argmax() != labels[row]] == issues.nonzero()[0].tolist()
    assert issues.any()


@pytest.mark.parametrize("seed", range(6))
def test_a_suspect_looks_like_the_most_probable_class_that_reaches_its_own_mean(seed):
    labels, probabilities = random_labels(seed)
    expected = {}
    for row, label in enumerate(labels.tolist()):
        reached = {}
        for other in range(probabilities.shape[1]):
            mine = [float(probabilities[at, other]) for at in range(len(labels)) if labels[at] == other]
            if float(probabilities[row, other]) >= sum(mine) / len(mine):
                reached[other] = float(probabilities[row, other])
        best = max(reached, key=lambda other: reached[other], default=label)
        if best != label and reached[best] >= 2 * float(probabilities[row, label]):
            expected[row] = best
    assert contradicted(labels, probabilities, margin=2) == expected
    assert expected


def test_an_image_is_named_with_its_file_its_label_and_what_it_looks_like():
    files = tuple(Path(f"photos/{number}.png") for number in range(12))
    (suspect,) = find_suspects(support(LABELS, files), [answers(LABELS, SEEN, SEEN)])
    assert (suspect.position, suspect.file) == (3, Path("photos/3.png"))
    assert (suspect.label, suspect.label_name, suspect.predicted, suspect.predicted_name) == (0, "ant", 2, "cat")
    assert suspect.predicted_probability > 0.5 > 2 * suspect.label_probability


def test_probabilities_are_the_mean_of_the_source_and_every_candidate_at_their_own_temperatures():
    labels = torch.arange(12) % 3
    images = torch.arange(12) // 2 * 2  # each image twice
    logits = [scale * (noise(12, 3, seed=seed) + F.one_hot(labels[images], 3)) for seed, scale in enumerate((1, 4, 9))]
    held = [ImageAnswers(images, images % 2, labels[images], logits[0], adapted) for adapted in logits[1:]]
    positions, known, probabilities = held_out_probabilities(held)
    assert known.tolist() == labels[positions].tolist()
    for row, position in enumerate(positions.tolist()):
        mine = [(each / temperature(each, labels[images])).softmax(1)[images == position].mean(0) for each in logits]
        assert torch.allclose(probabilities[row], sum(mine) / 3)


def test_the_least_plausible_label_comes_first():
    seen = [*SEEN[:11], 0]
    held = answers(LABELS, seen, seen)
    held.adapted[3] *= 0.5
    assert [suspect.position for suspect in find_suspects(support(LABELS), [held])] == [11, 3]


def test_a_network_with_infinite_answers_is_not_heard():
    held = answers(LABELS, SEEN, SEEN)
    diverged = replace(held, adapted=torch.full_like(held.adapted, torch.inf))
    assert find_suspects(support(LABELS), [held, diverged]) == find_suspects(support(LABELS), [held])


def test_an_image_does_not_look_like_a_class_with_a_single_image():
    labels, seen = [0, 0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 2, 1, 1, 1, 1, 2]
    assert not find_suspects(support(labels), [answers(labels, seen, seen)])


def test_one_image_of_each_class_leaves_nothing_to_tell():
    assert not find_suspects(support([0, 1, 2]), [answers([0, 1, 2], [1, 0, 2], [1, 0, 2])])


def test_pixel_labels_have_no_suspects():
    shares = torch.zeros(2)
    assert not find_suspects(support([0, 1]), [PixelAnswers(torch.arange(2), torch.zeros(2), *[shares] * 4)])


def test_the_gain_without_suspects_counts_the_other_images():
    held = answers(LABELS, source=[*SEEN[:8], 0, 0, 2, 2], adapted=SEEN)
    suspects = find_suspects(support(LABELS), [held], held)
    assert [suspect.position for suspect in suspects] == [3]
    assert suspects.gain_without.images == 11
    assert suspects.gain_without.over_images == pytest.approx(100 * 2 / 11)  # images 8 and 9 became right
    assert suspects.gain_without.after == pytest.approx(100)


def test_without_suspects_or_answers_of_judges_there_is_no_gain_without_them():
    clean = answers(LABELS, LABELS, LABELS)
    assert find_suspects(support(LABELS), [clean], clean).gain_without is None
    assert find_suspects(support(LABELS), [answers(LABELS, SEEN, SEEN)]).gain_without is None


def test_suspects_are_removed_from_a_support_but_never_all_of_its_images():
    suspects = Suspects(tuple(Suspect(at, None, 0, "ant", 0.1, 1, "bee", 0.8) for at in (2, 0)))
    assert suspects.removed_from(support([0, 1, 0, 2])).labels.tolist() == [1, 2]
    with pytest.raises(FewshiftError, match=r"all 2 labels.*order of the classes"):
        suspects.removed_from(support([0, 0]))


def test_sentences_name_five_images_by_file_or_number_and_count_the_rest():
    images = tuple(Suspect(at, None, 0, "ant", 0.1, 1, "bee", 0.876) for at in range(7))
    first = Suspect(0, Path("photos/7.jpg"), 0, "ant", 0.1, 1, "bee", 0.91)
    phrase = looks_wrong(Suspects((first, *images[1:])))
    assert phrase.startswith(
        "7 labels look wrong: photos/7.jpg (ant, looks like bee, 91 %), image 2 (ant, looks like bee"
    )
    assert "image 5" in phrase
    assert phrase.endswith("88 %) and 2 more")
    assert looks_wrong(Suspects()) == ""
    assert dropped(images[:1]) == "dropped 1 image whose label looks wrong: image 1 (ant, looks like bee, 88 %)"


@pytest.fixture(scope="module")
def mislabelled() -> tuple[Support, list[int]]:
    """Five of each digit, two labels in five wrong, and the positions of these."""
    domain = load_domain("digits", "uci", None)
    drawn = draw_support(domain.labels, 5, 0)
    _, labels = damaged(drawn, domain.labels[drawn], "wrong labels", 10, 0)
    return Support(domain.images(drawn), labels), (labels != domain.labels[drawn]).nonzero().flatten().tolist()


def test_most_wrong_labels_are_named_and_hardly_a_right_one(mislabelled):
    labelled, wrong = mislabelled
    result = fewshift.adapt(digits.source_network("mnist"), labelled, method=Auto(epochs=1))
    positions = {suspect.position for suspect in result.suspects}
    assert len(positions & set(wrong)) >= len(wrong) / 2
    assert len(positions - set(wrong)) <= (len(labelled) - len(wrong)) / 10
    assert result.suspects.gain_without.images == len(labelled) - len(positions)
