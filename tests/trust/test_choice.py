"""Choosing between candidates on held-out images, and the method `auto` that proposes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fewshift
from fewshift import LCCS, METHODS, FewshiftError, Network, Support, Target
from fewshift.core.method import Composite, Fitted, Needs, Proposal, Proposals
from fewshift.errors import DivergedError
from fewshift.methods.auto import Auto
from fewshift.methods.catalog import method_from_words
from fewshift.methods.finetune import L2
from fewshift.trust.choice import Choice, choose, cross_validate, fit_chosen
from fewshift.trust.held_out import ImageAnswers, PixelAnswers, folds_of
from fewshift.trust.shift import LayerShift, Shift
from tests.helpers.networks import make_support, make_tiny, same_state, state

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


@pytest.mark.parametrize(("wrong", "chosen"), [(6, "learned"), (7, "modest")])
def test_where_too_many_of_the_labels_look_wrong_the_last_candidate_is_taken(wrong, chosen):
    truth = [0, 1, 2] * 7
    labels = [(label + 1) % 3 if place < wrong else label for place, label in enumerate(truth)]
    choice = Choice.of(answers(labels, learned=truth, modest=truth))  # 6 and 7 of 21
    assert (choice.chosen, choice.doubtful) == (chosen, chosen == "modest")


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
    held = Choice.of(answers(truth, even=even, odd=odd)).held
    assert (held.adapted.argmax(1) != held.labels).all()


def shifted(far: float) -> Shift:
    """A shift of all layers by so many source deviations, far beyond chance."""
    layers = tuple(LayerShift(name, far, 1.0, 1e6, rank) for rank, name in enumerate(("bn1", "bn2"), 1))
    return Shift(layers, 9.0, 1.5, 20, 20)


def test_far_from_the_source_what_learns_most_is_preferred_and_near_it_what_learns_least():
    truth = [0, 1, 2, 0, 1, 2, 0, 1]
    alike = answers(truth, bold=truth, careful=truth)
    assert Choice.of(alike).chosen == "bold"
    assert Choice.of(alike, shift=shifted(0.4)).chosen == "bold"
    near = Choice.of(alike, shift=shifted(0.1))
    assert (near.near, near.chosen) == (True, "careful")
    assert torch.equal(near.held.adapted, alike["careful"].adapted)
    assert Choice.of(alike, decisive=False, shift=shifted(0.1)).chosen == "careful"


def test_near_the_source_another_candidate_has_to_be_clearly_better():
    truth = [0, 1, 2] * 8
    worse = [(label + 1) % 3 if row < 2 else label for row, label in enumerate(truth)]  # 2 of 24: 1.9 standard errors
    much_worse = [(label + 1) % 3 if row < 12 else label for row, label in enumerate(truth)]
    for careful, near, far in ((worse, "careful", "bold"), (much_worse, "bold", "bold")):
        candidates = answers(truth, bold=truth, careful=careful)
        assert Choice.of(candidates, shift=shifted(0.1)).chosen == near
        assert Choice.of(candidates, shift=shifted(0.4)).chosen == far


def test_pixels_are_many_labels_wherever_the_place_is():
    rows = torch.arange(4)
    scores = (torch.full((4,), 0.5),) * 4
    pixels = {name: PixelAnswers(rows, rows, *scores) for name in ("bold", "careful")}
    assert not Choice(pixels, "bold", ("bold", "careful"), shift=shifted(0.1)).near


# cross-validation


@pytest.mark.parametrize("shots", [2, 5])
def test_held_out_answers_are_those_of_networks_adapted_to_the_other_images(shots):
    method, model, support = L2(epochs=2), make_tiny(), make_support(shots)
    folds = folds_of(support, "cv", 3)
    network = Network.of(model, support.images)
    held = cross_validate(network, Target(support), method, folds, 3)
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
    """Candidates that multiply the head; "broken" goes astray without a fold, "large" counts as one that is large."""

    name: ClassVar[str] = "toy"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "the head"
    factors: ClassVar[dict[str, float]] = {"broken": 3.0, "large": 1.0, "upside down": -1.0, "as it is": 1.0}

    names: str = "upside down,as it is"
    folds: int = 2
    decisive: bool = True
    small: bool = False

    def allows(self, proposal: Proposal) -> bool:
        return proposal.small or not self.small

    def proposals(self, network: Network, target: Target, seed: int) -> Proposals:
        support = target.need_support("toy")

        def proposal(name: str) -> Proposal:
            head = f"{network.head}.weight"
            changed = network.with_tensors({head: self.factors[name] * network.model.state_dict()[head]})

            def held_out() -> list[Tensor]:
                if name == "broken":
                    raise DivergedError("the loss became NaN: lower lr")
                with torch.no_grad():
                    return [changed(images) for images, _ in support.chunks(1)]

            return Proposal(name, lambda: Fitted(changed), held_out, small=name != "large")

        folds = [torch.arange(len(support))[part :: self.folds] for part in range(self.folds)]
        return Proposals([proposal(name) for name in self.names.split(",")], folds, self.decisive)


def easy() -> tuple[nn.Module, Support]:
    """A network, and images with the labels that it gives them."""
    model, images = make_tiny(), make_support(20).images
    with torch.no_grad():
        model.fc.bias.zero_()
        model.fc.weight -= model.fc.weight.mean(0)
        model.fc.bias -= model(images).mean(0)  # all classes occur
        return model, Support(images, model(images).argmax(1))


def test_the_chosen_candidate_is_fitted_to_all_images():
    model, support = easy()
    fitted, choice = fit_chosen(model, Target(support), Toy(), 0)
    assert choice is not None
    assert choice.chosen == "as it is"
    assert torch.equal(fitted.predictor(support.images), model(support.images))


def test_a_candidate_that_goes_astray_is_no_candidate():
    model, support = easy()
    _, choice = fit_chosen(model, Target(support), Toy("broken,as it is"), 0)
    assert choice is not None
    assert list(choice.answers) == ["as it is"]


def test_where_every_candidate_goes_astray_the_error_says_so():
    model, support = easy()
    with pytest.raises(FewshiftError, match="became NaN"):
        fit_chosen(model, Target(support), Toy("broken"), 0)


def test_what_is_not_allowed_is_judged_but_not_chosen():
    model, support = easy()
    _, choice = fit_chosen(model, Target(support), Toy("large,upside down", small=True), 0)
    assert choice is not None
    assert (choice.chosen, choice.large) == ("upside down", ("large",))
    assert float(choice.answers["large"].losses.mean()) < float(choice.answers["upside down"].losses.mean())
    assert torch.equal(choice.held.adapted, choice.answers["upside down"].adapted)


def test_images_that_cannot_decide_leave_the_preference():
    model, support = easy()
    _, choice = fit_chosen(model, Target(support), Toy(decisive=False), 0)
    assert choice is not None
    assert choice.chosen == "upside down"
    assert torch.equal(choice.held.adapted, choice.answers["upside down"].adapted)


def test_where_nothing_can_be_held_out_the_preferred_candidate_is_taken():
    model, support = easy()
    fitted, choice = fit_chosen(model, Target(support), Toy(folds=0), 0)
    assert choice is None
    assert torch.equal(fitted.predictor.fc.weight, -model.fc.weight)


def test_a_plain_method_is_its_own_choice():
    model, support = make_tiny(), make_support(3)
    fitted, choice = fit_chosen(model, Target(support), L2(epochs=1), 4)
    assert choice is None
    assert same_state(state(fitted.predictor), state(L2(epochs=1).adapt(model, Target(support), 4)))


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
        fewshift.adapt(make_tiny(), make_support(4), method=Auto(epochs=1), validate=way) for way in ("cv", None)
    )
    assert judged.choice.chosen == unjudged.choice.chosen
    assert (unjudged.gain, judged.method) == (None, unjudged.method)


@pytest.mark.parametrize("name", ["auto", "lccs"])
def test_a_setting_changes_itself_and_nothing_else(name):
    changed, default = method_from_words(name, ["epochs=20"]), METHODS[name]()
    assert changed == replace(default, epochs=20)
    assert {key for key, value in changed.settings().items() if value != default.settings()[key]} == {"epochs"}
