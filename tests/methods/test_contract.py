"""The promises of every method; a method is tested the moment it is listed."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch

from fewshift import METHODS, FewshiftError, Support, Target
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from tests.helpers.methods import quick
from tests.helpers.networks import make_support, make_tiny, same_state, state

# settings under which a method is the source network
FROZEN = {"lr": 0.0, "bn": "source_frozen"}
NEUTRAL: dict[str, dict] = {
    "source": {},
    "testtime-bn": {"prior": 1e12},
    "alpha-bn": {"alpha": 1.0},
    "lccs": {"init": None, "epochs": 0, "classifier": "source"},
    "finetune-bn": {"epochs": 0, "bn": "source_frozen"},
    "finetune-head": {"epochs": 0},
    "finetune-features": FROZEN,
    "l2": FROZEN,
    "l2-sp": FROZEN,
    "delta-reg": FROZEN,
    "late-fusion": {"weight": 1.0},
    "lp-ft": {"epochs": 0, "probe_epochs": 0},
    "shot": {"epochs": 0},
    "sfda": {"steps": 0},
    "sdda": {"epochs": 0, "start_epoch": 0},
}
# what may differ from the source afterwards (prefixes of tensor names)
BODY = ("conv", "bn")
AFFINE = ("bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias")
MAY_CHANGE: dict[str, tuple[str, ...]] = {
    "auto": (*BODY, "fc."),
    "blend": AFFINE,
    "blend-head": (*AFFINE, "fc."),
    "blend-all": (*BODY, "fc."),
    "source": (),
    "adabn": AFFINE,
    "lccs": (*AFFINE, "fc."),
    "finetune-bn": ("bn",),
    "finetune-head": ("fc.",),
    "finetune-features": BODY,
    "l2": (*BODY, "fc."),
    "l2-sp": (*BODY, "fc."),
    "delta-reg": (*BODY, "fc."),
    "flute": ("bn", "fc."),
    "lp-ft": (*BODY, "fc."),
    "shot": BODY,
    "sfda": (*BODY, "fc."),
    "sdda": (*BODY, "fc."),
}


def target_for(name: str, support: Support) -> Target:
    """The support, and for a method that asks for them the same images without labels."""
    unlabelled = METHODS[name].needs is Needs.UNLABELLED
    return Target(support, Unlabelled(support.images, support.augment) if unlabelled else None)


def is_plain(name: str) -> bool:
    return METHODS[name].returns == "plain network"


@pytest.fixture(params=list(METHODS))
def name(request):
    return request.param


def predict(predictor, images):
    with torch.no_grad():
        return predictor(images)


def test_the_given_model_is_unchanged_bit_for_bit(name):
    model = make_tiny().train()
    model.fc.requires_grad_(False)
    before, flags = state(model), [parameter.requires_grad for parameter in model.parameters()]
    predictor = quick(name).adapt(model, target_for(name, make_support()))
    predict(predictor, make_support(seed=2).images)
    assert same_state(before, state(model))
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_the_same_arguments_and_seed_give_the_same_predictor(name):
    images = make_support(seed=2).images
    support = make_support()
    noisy = copy.copy(support)
    object.__setattr__(noisy, "augment", lambda image: image + 0.1 * torch.randn_like(image))
    first, second = (predict(quick(name).adapt(make_tiny(), target_for(name, noisy), seed=3), images) for _ in range(2))
    assert torch.equal(first, second)


def test_the_global_random_state_is_untouched(name):
    support = make_support()
    object.__setattr__(support, "augment", lambda image: image + random.random() + np.random.rand())
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    predict(quick(name).adapt(make_tiny(), target_for(name, support)), support.images)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert all(np.array_equal(left, right) for left, right in zip(numpy_state, np.random.get_state(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_follow_the_networks_type_and_are_finite_with_one_row_per_image(name, dtype):
    images = make_support(4, seed=2).images.to(dtype)
    predictor = quick(name).adapt(make_tiny().to(dtype), target_for(name, make_support()))
    answer = predict(predictor, images)
    assert answer.dtype == dtype
    assert answer.shape == (12, 3)
    assert torch.isfinite(answer).all()


def test_missing_inputs_give_one_clear_error(name):
    if METHODS[name].needs is Needs.NOTHING:
        pytest.skip("needs nothing")
    with pytest.raises(FewshiftError, match=rf"^{name} needs .*: pass "):
        quick(name).adapt(make_tiny(), Target())


def test_the_fields_survive_json(name):
    method = quick(name)
    assert METHODS[name](**json.loads(json.dumps(method.settings()))) == method


def test_with_neutral_settings_it_is_the_source_network(name):
    if name not in NEUTRAL:
        pytest.skip("has no neutral setting: statistics always come from the target")
    support = make_support()
    model = make_tiny()
    predictor = METHODS[name](**NEUTRAL[name]).adapt(model, target_for(name, support))
    answer = predict(predictor, support.images)
    assert torch.allclose(answer.softmax(1), model(support.images).softmax(1), atol=1e-6)
    if is_plain(name):
        assert torch.allclose(answer, model(support.images), atol=1e-6)


def test_only_the_tensors_named_on_its_card_change(name):
    if not is_plain(name):
        pytest.skip(f"returns a {METHODS[name].returns}")
    model = make_tiny()
    before, after = state(model), state(quick(name).adapt(model, target_for(name, make_support())))
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert all(key.startswith(MAY_CHANGE[name]) for key in changed)
    assert bool(changed) == (name != "source")


def test_few_shot_predictors_do_not_depend_on_batch_mates_and_streaming_ones_do(name):
    images = make_support(4, seed=2).images
    predictor = quick(name).adapt(make_tiny(), target_for(name, make_support()))
    together, alone = predict(predictor, images), torch.cat([predict(predictor, image[None]) for image in images])
    assert torch.isfinite(alone).all()
    assert torch.allclose(together, alone, atol=1e-5) == (METHODS[name].needs is not Needs.STREAM)


def test_few_shot_predictors_are_plain_networks_that_load_strictly(name):
    if not is_plain(name):
        pytest.skip(f"returns a {METHODS[name].returns}")
    predictor = quick(name).adapt(make_tiny(), target_for(name, make_support()))
    fresh = make_tiny(seed=5)
    assert type(predictor) is type(fresh)
    fresh.load_state_dict(predictor.state_dict(), strict=True)
    images = make_support(seed=2).images
    assert torch.allclose(predict(fresh.eval(), images), predict(predictor, images), atol=1e-6)
    assert not predictor.training
