"""The fine-tuning family: the invariants of its cards, against plain PyTorch loops."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fewshift import METHODS, FewshiftError, Network, Target
from fewshift.core.network import features
from fewshift.core.randomness import minibatches
from fewshift.methods._finetuning import POLICIES
from fewshift.methods.delta_reg import DeltaReg
from fewshift.methods.finetune import L2, FinetuneBN, FinetuneFeatures, FinetuneHead
from fewshift.methods.flute import Flute, balanced_minibatches, centroid_loss
from fewshift.methods.l2sp import L2SP
from fewshift.methods.late_fusion import LateFusion
from fewshift.methods.lp_ft import LPFT
from tests.helpers.networks import make_support, make_tiny, same_state, scenes, state, street, unsettle


def adapted(method, model=None, support=None, seed=0):
    return method.adapt(model or make_tiny(), Target(support or make_support()), seed)


def answers(method, **kwargs):
    with torch.no_grad():
        return adapted(method, **kwargs)(make_support(seed=3).images)


def naive_loop(model, support, parameters, optimizer, epochs, *, train_bn):
    """What anyone would write: ten lines of PyTorch with the minibatches of seed 0."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if train_bn:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train()
    chosen = [p.requires_grad_(True) for name, p in model.named_parameters() if parameters(name)]
    optimizer = optimizer(chosen)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for indices in minibatches(len(support), 32, generator):
            optimizer.zero_grad()
            F.cross_entropy(model(support.images[indices]), support.labels[indices]).backward()
            optimizer.step()
    return model.eval()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=4e-4)


LOOPS = {
    "l2": (L2(), lambda name: True, sgd, True),
    "finetune-features": (FinetuneFeatures(), lambda name: not name.startswith("fc"), sgd, True),
    "finetune-head": (FinetuneHead(), lambda name: name.startswith("fc"), sgd, False),
    "finetune-bn": (
        FinetuneBN(bn="train_running"),
        lambda name: name.startswith("bn"),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        True,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_it_is_the_plain_loop(name):
    method, parameters, optimizer, train_bn = LOOPS[name]
    support = make_support(shots=12)
    expected = naive_loop(make_tiny(), support, parameters, optimizer, 10, train_bn=train_bn)
    trained = adapted(method, support=support)
    for key, tensor in expected.state_dict().items():
        assert torch.allclose(trained.state_dict()[key].double(), tensor.double(), atol=1e-5), key


def test_no_epochs_on_the_supports_statistics_is_adabn():
    assert torch.allclose(answers(FinetuneBN(epochs=0)), answers(METHODS["adabn"]()), atol=1e-5)


def test_statistics_belong_to_the_final_weights():
    support = make_support()
    model = adapted(FinetuneBN(lr=0.05), support=support)
    z = model.conv2(model.bn1(model.conv1(support.images)).relu()).transpose(0, 1).flatten(1)
    assert torch.allclose(model.bn2.running_mean, z.mean(1), atol=1e-5)
    assert torch.allclose(model.bn2.running_var, z.var(1, correction=0), rtol=1e-4)


def test_training_mode_alone_moves_the_statistics_by_a_closed_form():
    """lr = 0 and ten single-batch epochs: 0.9^10 of the source's running mean stay."""
    support, model = make_support(), make_tiny()
    trained = adapted(FinetuneFeatures(lr=0.0), model, support)
    z = model.conv1(support.images).transpose(0, 1).flatten(1)
    kept = 0.9**10
    assert torch.allclose(trained.bn1.running_mean, kept * model.bn1.running_mean + (1 - kept) * z.mean(1), atol=1e-5)
    assert not torch.allclose(answers(FinetuneFeatures(lr=0.0)), make_tiny()(make_support(seed=3).images), atol=1e-3)


def test_l2_sp_and_plain_finetuning_nearly_coincide_at_the_papers_strength():
    support = make_support()
    plain = adapted(L2(weight_decay=0.0), support=support)
    for method in (L2(), L2SP()):
        trained = adapted(method, support=support)
        for mine, other in zip(trained.parameters(), plain.parameters(), strict=True):
            assert (mine - other).norm() <= 1e-3 * other.norm() + 1e-6


@pytest.mark.parametrize("bn", POLICIES)
@pytest.mark.parametrize("name", ["finetune-bn", "finetune-head", "finetune-features", "l2", "l2-sp", "lp-ft"])
def test_every_policy_is_available_and_finite(name, bn):
    settings = {"probe_epochs": 1} if name == "lp-ft" else {}
    assert torch.isfinite(answers(METHODS[name](bn=bn, epochs=1, **settings), support=make_support(1))).all()


@pytest.mark.parametrize("name", ["finetune-bn", "l2", "lp-ft"])
def test_an_unknown_policy_is_refused(name):
    with pytest.raises(FewshiftError, match="bn='mine'"):
        METHODS[name](bn="mine")


def test_without_penalties_they_are_plain_finetuning_bit_for_bit():
    plain = state(adapted(L2(weight_decay=0.0)))
    assert same_state(plain, state(adapted(L2SP(alpha=0.0, beta=0.0))))
    assert same_state(plain, state(adapted(DeltaReg(alpha=0.0, beta=0.0))))


def test_decay_without_data_gradient_is_geometric():
    target = Target(make_support(), loss=lambda logits, labels: logits.sum() * 0)
    model = make_tiny()
    trained = L2(momentum=0.0, lr=0.1, weight_decay=0.5, epochs=7).adapt(model, target)
    assert torch.allclose(trained.conv1.weight, model.conv1.weight * (1 - 0.1 * 0.5) ** 7, atol=1e-6)


@pytest.mark.parametrize("scope", ["all", "weights"])
def test_the_starting_point_costs_nothing_and_pulls_in_proportion(scope):
    model = make_tiny().requires_grad_(True)
    network = Network.of(model, make_support().images)
    method = L2SP(alpha=0.3, beta=0.7, scope=scope)
    penalty = method.penalty(network, model)
    own = [model.fc.weight] if scope == "weights" else list(model.fc.parameters())
    head = 0.7 / 2 * sum(p.square().sum().item() for p in own)
    assert penalty(torch.empty(0)).item() == pytest.approx(head)
    start = model.conv1.weight.detach().clone()
    with torch.no_grad():
        model.conv1.weight += 0.1
        model.bn1.weight += 0.1
    penalty(torch.empty(0)).backward()
    assert torch.allclose(model.conv1.weight.grad, 0.3 * (model.conv1.weight - start))
    assert (model.bn1.weight.grad is None) == (scope == "weights")
    assert torch.allclose(model.fc.weight.grad, 0.7 * model.fc.weight)


def test_a_network_that_is_nothing_but_a_head_is_decayed_towards_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    expected = state(adapted(L2(weight_decay=0.5), model))
    for name, tensor in state(adapted(L2SP(beta=0.5), model)).items():
        assert torch.allclose(tensor, expected[name], atol=1e-6)


def test_a_strong_pull_freezes_the_body():
    model = make_tiny()
    free, held = (adapted(L2SP(alpha=alpha, momentum=0.0), model) for alpha in (0.0, 500.0))
    moved = [(net.conv1.weight - model.conv1.weight).norm().item() for net in (free, held)]
    assert moved[1] < 0.3 * moved[0]


# late fusion


def test_fusion_lies_between_its_two_heads():
    source = make_tiny()
    images = make_support(seed=3).images
    tuned = answers(FinetuneHead(lr=0.1)).softmax(1)
    for weight in (0.0, 0.25, 1.0):
        fused = answers(LateFusion(weight=weight, lr=0.1))
        expected = weight * source(images).softmax(1) + (1 - weight) * tuned
        assert torch.allclose(fused.exp(), expected, atol=1e-5)
        assert torch.allclose(fused.exp().sum(1), torch.ones(len(images)), atol=1e-5)


def test_fused_logits_are_one_linear_layer_of_a_plain_network():
    fused = adapted(LateFusion(scores="logits", lr=0.1))
    tuned, source = adapted(FinetuneHead(lr=0.1)), make_tiny()
    assert type(fused) is type(source)
    assert torch.allclose(fused.fc.weight, (tuned.fc.weight + source.fc.weight) / 2, atol=1e-6)
    images = make_support(seed=3).images
    assert torch.allclose(fused(images), (tuned(images) + source(images)) / 2, atol=1e-5)


def test_the_body_computes_its_features_once_without_augmentation():
    model, calls = make_tiny(), []
    model.conv1.register_forward_hook(lambda *_: calls.append(1))
    for name in ("finetune-head", "late-fusion"):
        calls.clear()
        METHODS[name](epochs=50).adapt(model, Target(make_support()))
    assert len(calls) <= 5  # looking at the network, its layout and its head, and the features; not fifty epochs


# FLUTE


def test_without_steps_on_source_statistics_it_is_nearest_centroids_of_source_features():
    """scikit-learn's NearestCentroid on unit features agrees where centroids of raw and unit features do."""
    from sklearn.neighbors import NearestCentroid

    model, support, queries = make_tiny(), make_support(), make_support(20, seed=1).images
    predictor = adapted(Flute(epochs=0, stats="source"), model, support)
    points, tests = (F.normalize(features(model, "fc", images), dim=1).numpy() for images in (support.images, queries))
    raw = features(model, "fc", support.images)
    centres = torch.stack([F.normalize(raw[support.labels == label].mean(0), dim=0) for label in range(3)])
    reference = NearestCentroid().fit(points, support.labels.numpy())
    reference.centroids_ = centres.numpy()
    assert (predictor(queries).argmax(1).numpy() == reference.predict(tests)).all()


def test_the_loss_is_cross_entropy_of_cosines_to_the_minibatchs_own_means():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(7, 5, generator=generator)
    labels = torch.tensor([4, 4, 1, 1, 1, 9, 9])  # other classes are not in the minibatch
    centres = {label: points[labels == label].mean(0) for label in (1, 4, 9)}
    rows = torch.stack([torch.stack([F.cosine_similarity(p, c, dim=0) for c in centres.values()]) for p in points])
    assert rows.abs().max() <= 1
    expected = F.cross_entropy(rows, torch.tensor([1, 1, 0, 0, 0, 2, 2]))
    assert float(centroid_loss(points, labels)) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(centroid_loss(points * 10, labels), centroid_loss(points, labels), atol=1e-6)


def test_with_one_shot_a_detached_centroid_gives_its_own_class_no_gradient():
    points = torch.eye(3, requires_grad=True)
    centroid_loss(points, torch.arange(3), detach=True).backward()
    assert points.grad.diagonal().abs().max() < 1e-6


def test_minibatches_have_the_classes_as_evenly_as_the_support():
    labels = torch.arange(7).repeat_interleave(10)
    batches = balanced_minibatches(labels, 32, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(batches).tolist()) == list(range(70))
    assert all(
        labels[batch].bincount(minlength=7).max() - labels[batch].bincount(minlength=7).min() <= 1 for batch in batches
    )


# LP-FT


def test_at_one_shot_nothing_is_held_out_and_both_stages_run_in_full():
    notes = LPFT(epochs=2, probe_epochs=3).fit(make_tiny(), Target(make_support(1))).notes
    assert (notes["probe_epochs"], notes["epochs"]) == (3, 2)


def test_epochs_are_chosen_inside_the_support_by_the_lowest_held_out_loss():
    notes = LPFT(epochs=4, probe_epochs=10, lr=0.02).fit(make_tiny(), Target(make_support(3))).notes
    assert len(notes["held_out_loss"]) == 5
    assert notes["epochs"] == min(range(5), key=notes["held_out_loss"].__getitem__)
    steps = [0, 1, 2, 5, 10]
    assert notes["probe_epochs"] == steps[min(range(5), key=notes["probe_held_out_loss"].__getitem__)]


def test_probing_comes_first_and_leaves_the_body_alone():
    probed = adapted(LPFT(epochs=0, probe_epochs=5, folds=2))
    source = make_tiny()
    assert torch.equal(probed.conv1.weight, source.conv1.weight)
    assert not torch.equal(probed.fc.weight, source.fc.weight)


# strange networks


def test_heads_can_be_trained_without_any_batchnorm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3))
    for name in ("finetune-head", "finetune-features", "l2", "l2-sp", "lp-ft", "late-fusion"):
        settings = {"probe_epochs": 2} if name == "lp-ft" else {}
        assert torch.isfinite(answers(METHODS[name](epochs=1, **settings), model=model)).all()
    with pytest.raises(FewshiftError, match="such as finetune-head"):
        adapted(FinetuneBN(), model)


def test_a_single_leftover_image_does_not_make_a_batch():
    support = make_support(shots=11)  # 33 images: 32 and one
    assert torch.isfinite(answers(L2(epochs=1), support=support)).all()


def test_momenta_flags_and_modes_are_as_before():
    model = make_tiny()
    model.bn1.momentum = 0.37
    model.fc.requires_grad_(False)
    trained = adapted(L2(epochs=1), model)
    assert trained.bn1.momentum == 0.37
    assert [p.requires_grad for p in trained.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in trained.parameters())


class Scaled(nn.Module):
    """Something comes after the head."""

    def __init__(self):
        super().__init__()
        self.net = make_tiny()

    def forward(self, images):
        return 2 * self.net(images)


def test_a_head_with_something_after_it_is_trained_through_the_network():
    support = make_support()
    network = Network.of(Scaled(), support.images, head="net.fc")
    notes = FinetuneHead(epochs=1).fit(network, Target(support)).notes
    expected = F.cross_entropy(Scaled()(support.images), support.labels)
    assert notes["support_loss"][0] == pytest.approx(expected.item(), abs=1e-5)
    with pytest.raises(FewshiftError, match=r"more layers follow .net\.fc."):
        LateFusion().adapt(network, Target(support))


def test_steps_do_not_vanish_in_half_precision():
    model = make_tiny().bfloat16()
    trained = adapted(FinetuneHead(lr=0.1), model)
    assert trained.fc.weight.dtype == torch.bfloat16
    assert not torch.equal(trained.fc.weight, model.fc.weight)


def test_a_divergence_is_an_error_and_never_a_network_of_nans():
    for method in (L2(epochs=1, lr=1e30), FinetuneFeatures(epochs=1, lr=1e30), FinetuneBN(epochs=1, lr=1e30)):
        with pytest.raises(FewshiftError, match="lower lr"):
            adapted(method)


def test_what_flute_cannot_do_is_said_before_the_work():
    with pytest.raises(FewshiftError, match="not pixels"):
        Flute().adapt(street(), Target(scenes()))
    with pytest.raises(FewshiftError, match="an image of every class"):
        Flute().adapt(make_tiny(classes=4), Target(make_support()))


def test_a_minibatch_of_one_is_never_normalised_with_itself():
    torch.manual_seed(0)
    flat = unsettle(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    assert torch.isfinite(answers(L2(batch_size=1, epochs=1), model=flat)).all()
