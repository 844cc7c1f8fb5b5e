"""Choosing between candidates on held-out images, and the method `auto` that proposes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import fewshift
from fewshift import LCCS, METHODS, FewshiftError, Network, Support, Target
from fewshift.core.method import Composite, Fitted, Needs
from fewshift.methods import _stages
from fewshift.methods.auto import Auto
from fewshift.methods.catalog import method_from_words
from fewshift.methods.finetune import L2
from fewshift.trust.choice import Choice, choose, cross_validate, fit_chosen
from fewshift.trust.held_out import ImageAnswers, folds_of
from tests.helpers.networks import make_support, make_tiny, same_state, scenes, state, street

QUICK = Auto(epochs=1)
CLASSIFIERS = ["finetuned", "ncc", "source"]
OTHERS = make_support(2, seed=9)


def answers(labels: list[int], **candidates: list[int]) -> dict[str, ImageAnswers]:
    """Sure answers of each candidate; even images are one fold, odd ones another."""
    images = torch.arange(len(labels))
    logits = {name: 5.0 * F.one_hot(torch.tensor(answer), 3).double() for name, answer in candidates.items()}
    source = torch.zeros(len(labels), 3).double()
    return {
        name: ImageAnswers(images, images % 2, torch.tensor(labels), source, adapted)
        for name, adapted in logits.items()
    }


# the rule


def test_the_best_candidate_on_held_out_images_is_chosen():
    candidates = answers([0, 1, 2, 0, 1, 2, 0, 1], bad=[1, 2, 0, 1, 2, 0, 1, 2], good=[0, 1, 2, 0, 1, 2, 0, 0])
    assert choose(candidates) == "good"


def test_a_candidate_that_is_better_by_luck_is_not_chosen():
    # of twelve images two become right and one becomes wrong: no more than a standard error
    truth = [0, 1, 2] * 4
    first, second = [1, 2, *truth[2:]], [*truth[:11], 0]
    assert choose(answers(truth, first=first, second=second)) == "first"
    assert choose(answers(truth * 9, first=first * 9, second=second * 9)) == "second"


def test_rows_alone_can_be_asked():
    truth = [0, 1, 2, 0, 1, 2, 0, 1]
    candidates = answers(truth, first=[0, 1, 2, 0, 2, 0, 1, 2], second=[1, 2, 0, 1, 1, 2, 0, 1])
    assert choose(candidates, torch.arange(4)) == "first"
    assert choose(candidates, torch.arange(4, 8)) == "second"


def test_no_image_has_a_say_in_which_candidate_answers_it():
    # each candidate is right in one fold alone, so the other fold always chooses the one that is wrong here
    truth = [0, 1, 2, 0, 1, 2, 0, 1]
    even = [label if row % 2 == 0 else (label + 1) % 3 for row, label in enumerate(truth)]
    odd = [label if row % 2 == 1 else (label + 1) % 3 for row, label in enumerate(truth)]
    held = Choice(answers(truth, even=even, odd=odd), "even").held
    assert (held.adapted.argmax(1) != held.labels).all()


# cross-validation


@pytest.mark.parametrize("shots", [2, 5])
def test_held_out_answers_are_those_of_networks_adapted_to_the_other_images(shots):
    method, model, support = L2(epochs=2), make_tiny(), make_support(shots)
    folds = folds_of(support, "cv", 3)
    network = Network.of(model, support.images)
    choice = cross_validate(network, Target(support), method, folds, 3)
    held = choice.answers["l2"]
    assert choice.chosen == "l2"
    for number, fold in enumerate(folds):
        rest = torch.tensor([position for position in range(len(support)) if position not in fold.tolist()])
        adapted = method.adapt(model, Target(Support(support.images[rest], support.labels[rest])), 3)
        rows = held.folds == number
        assert torch.equal(held.images[rows], fold)
        with torch.no_grad():
            assert torch.allclose(held.adapted[rows], adapted(support.images[fold]).double(), atol=1e-6)
            assert torch.allclose(held.source[rows], model(support.images[fold]).double(), atol=1e-6)


@dataclass(frozen=True)
class Toy(Composite):
    """Candidates that multiply the head; "broken" cannot do with fewer than 15 images, "never" not at all."""

    name: ClassVar[str] = "toy"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "the head"
    factors: ClassVar[dict[str, float]] = {"broken": 3.0, "never": 3.0, "upside down": -1.0, "as it is": 1.0}

    names: str = "upside down,as it is"

    def candidates(self, network: Network, target: Target) -> tuple[str, ...]:
        return tuple(self.names.split(","))

    def fits(self, network: Network, target: Target, seed: int) -> Callable[[str], Fitted]:
        def fit(name: str) -> Fitted:
            if name == "never" or (name == "broken" and len(target.need_support("toy")) < 15):
                raise FewshiftError(f"{name} has too few images: label more")
            head = f"{network.head}.weight"
            return Fitted(network.with_tensors({head: self.factors[name] * network.model.state_dict()[head]}))

        return fit


def easy() -> tuple[nn.Module, Support]:
    """A network, and images with the labels that it gives them."""
    model, images = make_tiny(), make_support(20).images
    with torch.no_grad():
        model.fc.bias -= model(images).mean(0)  # all classes occur
        return model, Support(images, model(images).argmax(1))


def test_the_chosen_candidate_is_fitted_to_all_images():
    model, support = easy()
    fitted, choice = fit_chosen(model, Target(support), Toy(), 0)
    assert choice is not None
    assert choice.chosen == "as it is"
    assert torch.equal(fitted.predictor(support.images), model(support.images))


def test_a_candidate_that_cannot_be_fitted_without_a_fold_is_no_candidate():
    model, support = easy()
    _, choice = fit_chosen(model, Target(support.part(torch.arange(15))), Toy("broken,as it is"), 0)
    assert choice is not None
    assert list(choice.answers) == ["as it is"]


def test_where_no_candidate_can_be_fitted_the_error_is_the_last_ones():
    model, support = easy()
    with pytest.raises(FewshiftError, match="never has too few images"):
        fit_chosen(model, Target(support.part(torch.arange(15))), Toy("broken,never"), 0)


def test_a_single_candidate_needs_no_cross_validation():
    model, support = easy()
    fitted, choice = fit_chosen(model, Target(support), Toy("upside down"), 0)
    assert choice is None
    assert torch.equal(fitted.predictor.fc.weight, -model.fc.weight)


def test_where_nothing_can_be_held_out_the_preferred_candidate_is_taken():
    fitted, choice = fit_chosen(street(), Target(scenes(1)), Toy(), 0)
    assert choice is None
    assert torch.equal(fitted.predictor.head.weight, -street().head.weight)


def test_a_plain_method_is_its_own_choice():
    model, support = make_tiny(), make_support(3)
    fitted, choice = fit_chosen(model, Target(support), L2(epochs=1), 4)
    assert choice is None
    assert same_state(state(fitted.predictor), state(L2(epochs=1).adapt(model, Target(support), 4)))


# auto


def least_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each row under the temperature that scipy finds best for all of them."""
    best = minimize_scalar(
        lambda log: float(F.cross_entropy(logits / math.exp(log), labels)), bounds=(-4.6, 4.6), method="bounded"
    )
    return F.cross_entropy(logits / math.exp(best.x), labels, reduction="none")


def naive_choice(model: nn.Module, support: Support, epochs: int, seed: int) -> str:
    """Adapt by LCCS with each classifier and without each fold; leave the first only for a clearly smaller loss."""
    losses = {}
    for classifier in CLASSIFIERS:
        logits: list[Tensor] = []
        places: list[int] = []
        for fold in folds_of(support, "cv", seed):
            rest = torch.tensor([position for position in range(len(support)) if position not in fold.tolist()])
            kept = Support(support.images[rest], support.labels[rest])
            adapted = LCCS(epochs=epochs, classifier=classifier).adapt(model, Target(kept), seed)
            with torch.no_grad():
                logits.append(adapted(support.images[fold]).double())
            places += fold.tolist()
        rows = least_loss(torch.cat(logits), support.labels[places])
        losses[classifier] = torch.stack([rows[torch.tensor(places) == image].mean() for image in range(len(support))])
    best = min(CLASSIFIERS, key=lambda classifier: float(losses[classifier].mean()))
    change = losses[best] - losses[CLASSIFIERS[0]]
    clear = float(change.mean()) < -float(change.std()) / math.sqrt(len(support))
    return best if clear else CLASSIFIERS[0]


@pytest.mark.parametrize(("shots", "chosen"), [(3, "finetuned"), (4, "ncc")])
def test_auto_is_lccs_with_the_classifier_that_a_naive_cross_validation_chooses(shots, chosen):
    model, support, seed = make_tiny(), make_support(shots), 1
    result = fewshift.adapt(model, support, method=QUICK, seed=seed, accept="always")
    expected = naive_choice(model, support, QUICK.epochs, seed)
    assert result.choice.chosen == result.notes["classifier"] == expected == chosen
    lccs = LCCS(epochs=QUICK.epochs, classifier=expected).adapt(model, Target(support), seed)
    temperature = result.notes.get("temperature", 1.0)
    with torch.no_grad():
        assert torch.allclose(result.model(support.images), lccs(support.images) / temperature, atol=1e-5)


def test_candidates_share_their_stages(monkeypatch):
    passes = []
    read = _stages.read_support
    monkeypatch.setattr(_stages, "read_support", lambda *words: (passes.append(len(words[1])), read(*words))[1])
    support = make_support(5)
    result = fewshift.adapt(make_tiny(), support, method=QUICK)
    assert list(result.choice.answers) == CLASSIFIERS
    blends = LCCS().grid
    assert passes == [15] * blends + [12] * blends * 5  # once for all images and once for each fold, whoever answers


@pytest.mark.parametrize(
    "support",
    [make_support(1), make_support(2).part(torch.tensor([0, 3, 1, 4])), scenes(2)],
    ids=["one shot", "a class without images", "pixels"],
)
def test_where_no_held_out_image_could_tell_the_sources_classifier_stays(support):
    model = street() if support.kind.unit == "pixel" else make_tiny()
    result = fewshift.adapt(model, support, method=QUICK, accept="always", validate=None)
    assert result.choice is None
    assert result.notes["classifier"] == "source"
    head = "head" if support.kind.unit == "pixel" else "fc"
    assert not any(name.startswith(head) for name in result.delta.bits)


def test_in_half_precision_what_can_be_trained_is_chosen_from():
    result = fewshift.adapt(make_tiny().half(), make_support(5), method=QUICK)
    assert result.gain is not None
    assert result.choice.chosen in CLASSIFIERS


def test_where_the_source_is_right_nothing_is_gained():
    model, support = easy()
    result = fewshift.adapt(model, support, method=QUICK)
    assert (result.gain.wins, result.gain.before) == (0, 100)


def test_the_evidence_for_a_choice_is_honest_about_choosing():
    result = fewshift.adapt(make_tiny(), make_support(5), method=QUICK)
    held, candidates = result.evidence.held, result.choice.answers
    for fold in held.folds.unique().tolist():
        rows = held.folds == fold
        others = (~rows).nonzero().flatten()
        chosen = choose(candidates, others)
        assert torch.equal(held.adapted[rows], candidates[chosen].adapted[rows])


# a name means one thing


def test_lccs_is_the_papers_method_wherever_it_is_named():
    model, support = make_tiny(), make_support(1)
    assert fewshift.adapt(model, support, method="lccs", validate=None).method == LCCS()
    assert fewshift.compare(model, support, ["lccs"], validate=OTHERS).rows[0].method == LCCS()
    assert fewshift.learning_curve(model, support, method="lccs", draws=1, labelled=OTHERS).method == LCCS()


def test_what_is_recommended_is_auto():
    model, support = make_tiny(), make_support(1)
    assert fewshift.adapt(model, support, validate=None).method == Auto()
    assert fewshift.learning_curve(model, support, draws=1, labelled=OTHERS).method == Auto()


def test_without_evidence_auto_chooses_the_same():
    judged, unjudged = (
        fewshift.adapt(make_tiny(), make_support(4), method=QUICK, validate=way) for way in ("cv", None)
    )
    assert judged.choice.chosen == unjudged.choice.chosen
    assert (unjudged.gain, judged.method) == (None, unjudged.method)


@pytest.mark.parametrize("name", ["auto", "lccs"])
def test_a_setting_changes_itself_and_nothing_else(name):
    changed, default = method_from_words(name, ["epochs=20"]), METHODS[name]()
    assert changed == replace(default, epochs=20)
    assert {key for key, value in changed.settings().items() if value != default.settings()[key]} == {"epochs"}
