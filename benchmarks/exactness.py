"""Whether adaptation is exact on one network: what it gives, beside a naive computation of the same.

The network gets BatchNorm statistics and affine parameters away from what its images give, four images of another
distribution, and five questions (`examine`). All is computed in float64, where rounding is far from everything else; in
float32 where a network insists on it. What rounding may do is measured: the reference answers again with its images
moved by a few units in the last place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import fewshift
from fewshift import LCCS, Delta, FewshiftError, Network, Support, Target
from fewshift.core.outputs import main_output

SIZES = (64, 96, 128)  # pixels; then the network's own size, if that is no more than
LARGEST = 256
SHARE = 0.4  # of the target's statistics in the blend
IMAGES, FRESH = 4, 3
MARGIN = 1e4  # so many times what the last place of the images does is rounding, in passes over hundreds of layers
LEAST = {torch.float64: 1e-9, torch.float32: 1e-5}  # of the largest logit


def layers_of(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def examine(model: nn.Module, own_size: int, pixels: bool, facts: dict[str, Any]) -> bool:
    """Ask the five questions; whether all answers are yes. What they rest on is written into `facts`.

    - Blend: does the adapted network give what the source network gives once a naive loop has set the statistics of
      each BatchNorm layer?
    - Learned: after one epoch of LCCS, does the merged network give what the source network gives with the learned
      statistics as its running statistics?
    - Apply: does the delta make the adapted network of the source network, bit for bit?
    - Revert: does it make the source network again, bit for bit?
    - Alone: does an image get the same logits alone as beside others?
    """
    size = runnable_size(model, [*SIZES, own_size])
    model, dtype = in_double(model, size)
    facts |= {"size": size, "dtype": str(dtype).removeprefix("torch.")}
    generator = torch.Generator().manual_seed(1)
    home, place, fresh = (
        torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)
        for count in (2 * IMAGES, IMAGES, FRESH)
    )
    place, fresh = 1.5 * place + 0.8, 1.5 * fresh + 0.8
    unsettle(model, home, generator)
    labels = torch.arange(IMAGES) % 2
    support = Support(place, labels[:, None, None].expand(-1, size, size) if pixels else labels)

    reference = with_blend(model, place, SHARE)
    expected = logits(reference, fresh)
    source = logits(model, fresh)
    scale = float(expected.abs().max())
    noise = float((logits(reference, fresh * (1 + 4 * torch.finfo(dtype).eps)) - expected).abs().max())
    allowed = max(MARGIN * noise, LEAST[dtype] * scale)
    facts |= {"scale": scale, "allowed": allowed, "moved": float((expected - source).abs().max())}

    network, target = Network.of(model, support.pictures), Target(support)
    adapted = LCCS(init=SHARE, epochs=0, classifier="source").adapt(network, target)
    facts["blend"] = float((logits(adapted, fresh) - expected).abs().max())
    facts["alone"] = float((logits(adapted, fresh[:1]) - logits(adapted, fresh)[:1]).abs().max())
    delta = Delta.between(model, adapted)
    applied = fewshift.apply(model, delta)
    facts["applied"] = same_bits(applied, adapted)
    facts["reverted"] = same_bits(fewshift.revert(applied, delta), model)
    del adapted, applied, reference
    facts["learned"] = learned_difference(network, target, fresh)
    differences = [facts[what] for what in ("blend", "learned", "alone")]
    sees = facts["moved"] > 100 * allowed  # an adaptation that changes nothing would pass every question
    if not sees:
        facts["reason"] = "the statistics change no logit by more than rounding, so that nothing can be seen"
    return sees and facts["applied"] and facts["reverted"] and all(each <= allowed for each in differences)


def runnable_size(model: nn.Module, sizes: Sequence[int]) -> int:
    """The first size that the network accepts."""
    refusal: Exception | None = None
    for size in sizes:
        if size <= LARGEST:
            try:
                logits(model, torch.zeros(2, 3, size, size))
            except Exception as error:  # networks refuse in every way
                refusal = error
            else:
                return size
    raise FewshiftError(f"the network runs on no image of up to {LARGEST} pixels ({refusal}): raise LARGEST")


def in_double(model: nn.Module, size: int) -> tuple[nn.Module, torch.dtype]:
    """The network in float64; as it is where its forward insists on float32."""
    double = copy.deepcopy(model).double()
    try:
        answer = logits(double, torch.zeros(2, 3, size, size, dtype=torch.float64))
    except Exception:  # two types in one operation
        return model, torch.float32
    return (double, torch.float64) if answer.dtype == torch.float64 else (model, torch.float32)


@torch.no_grad()
def unsettle(model: nn.Module, images: Tensor, generator: torch.Generator) -> None:
    """Statistics near those of the images, as training would leave them, and affine parameters near 1 and 0."""

    def near(module: _BatchNorm, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        draws = [torch.rand(mean.shape, generator=generator).to(mean) for _ in range(4)]
        if module.affine:
            module.weight.copy_(0.5 + draws[0])
            module.bias.copy_(0.4 * draws[1] - 0.2)
        return mean + (var + module.eps).sqrt() * (draws[2] - 0.5), var * (0.5 + draws[3]) + 1e-3

    set_statistics(model, images, near)


def with_blend(model: nn.Module, images: Tensor, share: float) -> nn.Module:
    """The source network whose running statistics are the blend with those of the images, layer after layer."""
    result = copy.deepcopy(model)
    sources = {id(each): (each.running_mean.clone(), each.running_var.clone()) for each in layers_of(result).values()}

    def blend(module: _BatchNorm, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        old_mean, old_var = sources[id(module)]
        std = (1 - share) * (old_var + module.eps).sqrt() + share * (var + module.eps).sqrt()
        return (1 - share) * old_mean + share * mean, std.square() - module.eps

    set_statistics(result, images, blend)
    return result


Choose = Callable[[_BatchNorm, Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def set_statistics(model: nn.Module, images: Tensor, choose: Choose) -> None:
    """Write into each BatchNorm layer what `choose` makes of the mean and variance of its input, before it runs.

    A layer that runs several times pools its inputs. Its first runs cannot know the last, so the images pass three
    times, and what a pass has pooled is held in the next.
    """
    held: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}
    for _ in range(3):
        inputs = passed(model, images, choose, held)
        held = {module: moments(parts) for module, parts in inputs.items() if len(parts) > 1}
        if not held:
            return
    for module, pooled in held.items():
        write(module, *choose(module, *pooled))


def passed(
    model: nn.Module, images: Tensor, choose: Choose, held: Mapping[_BatchNorm, tuple[Tensor, Tensor]]
) -> dict[_BatchNorm, list[Tensor]]:
    """One pass: what entered each layer, (channels, values) for each of its runs."""
    inputs: dict[_BatchNorm, list[Tensor]] = {}

    def hook(module: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = args[0] if args else next(iter(kwargs.values()))
        inputs.setdefault(module, []).append(entering.transpose(0, 1).flatten(1).clone())
        write(module, *choose(module, *(held[module] if module in held else moments(inputs[module]))))

    with ExitStack() as hooks:
        for module in layers_of(model).values():
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        model(images)
    return inputs


def write(module: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    module.running_mean.copy_(mean)
    module.running_var.copy_(var)


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    values = torch.cat(list(parts), 1)
    return values.mean(1), values.var(1, correction=0)


def learned_difference(network: Network, target: Target, fresh: Tensor) -> float:
    """How far the merged network is from the source network with the learned statistics as running statistics."""
    method = LCCS(init=SHARE, epochs=1, classifier="source")
    stages = method.stages(network, target, seed=0)
    merged = network.as_given(method.with_classifier(stages, "source").predictor)
    expected = network.with_tensors({})
    layers = layers_of(expected)
    for name, normal in stages.learned.normals.items():
        write(layers[name], normal.mean, normal.std.square() - layers[name].eps)
    return float((logits(merged, fresh) - logits(expected, fresh)).abs().max())


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    return main_output(model(images.clone()))


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
