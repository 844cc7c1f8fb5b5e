"""Every fine-tuning method's epoch beside the same loop written plainly in PyTorch, as ratios measured in one run."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from core import fastest, network, show, support
from fewshift import METHODS, Network, Target
from fewshift.methods._finetuning import trainable, tune
from fewshift.methods.delta_reg import DeltaReg, maps

BATCH, EPOCHS = 32, 2


def plain(
    model: nn.Module, labelled, part: str, *, train_bn: bool, extra: Callable | None = None
) -> Callable[[], None]:
    """The loop anyone would write."""

    def loop() -> None:
        ours = copy.deepcopy(model).eval().requires_grad_(False)
        if train_bn:
            for module in ours.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.train()
        chosen = [p.requires_grad_(True) for name, p in ours.named_parameters() if PARTS[part](name)]
        optimizer = torch.optim.SGD(chosen, lr=1e-3, momentum=0.9, weight_decay=4e-4)
        for _ in range(EPOCHS):
            for indices in torch.randperm(len(labelled)).split(BATCH):
                optimizer.zero_grad()
                loss = F.cross_entropy(ours(labelled.images[indices]), labelled.labels[indices])
                if extra is not None:
                    loss = loss + extra(ours)
                loss.backward()
                optimizer.step()

    return loop


PARTS = {
    "all": lambda name: True,
    "body": lambda name: not name.startswith("fc"),
    "bn": lambda name: "bn" in name or "downsample.1" in name,
    "head": lambda name: name.startswith("fc"),
}


def towards_start(model: nn.Module) -> Callable[[nn.Module], torch.Tensor]:
    start = [p.detach().clone() for p in model.parameters()]
    return lambda ours: (
        2e-4 * sum((p - q).square().sum() for p, q in zip(ours.parameters(), start, strict=True) if p.requires_grad)
    )


def main(rounds: int) -> None:
    model, labelled = network(), support()
    view = Network.of(model, labelled.images)
    rows = {
        "finetune-features": plain(model, labelled, "body", train_bn=True),
        "l2": plain(model, labelled, "all", train_bn=True),
        "l2-sp": plain(model, labelled, "all", train_bn=True, extra=towards_start(model)),
        "flute": plain(model, labelled, "bn", train_bn=True),
        "finetune-bn": plain(model, labelled, "bn", train_bn=False),
        "finetune-head": plain(model, labelled, "head", train_bn=False),
        "late-fusion": plain(model, labelled, "head", train_bn=False),
    }
    for name, loop in rows.items():
        none, some = METHODS[name](epochs=0), METHODS[name](epochs=EPOCHS)
        seconds = fastest(
            rounds,
            before=lambda method=none: method.adapt(view, Target(labelled)),
            ours=lambda method=some: method.adapt(view, Target(labelled)),
            plain=loop,
        )
        if name in ("finetune-head", "late-fusion"):
            show(f"{name}: everything / {EPOCHS} epochs in plain PyTorch", seconds["ours"] / seconds["plain"], "< 1")
        else:
            ratio = (seconds["ours"] - seconds["before"]) / seconds["plain"]
            show(f"{name}: epoch / the same loop in plain PyTorch", ratio, "<= 1.10")
    delta_reg(rounds)


def delta_reg(rounds: int) -> None:
    """Without its attention, which costs one partial pass per filter, once, before the epochs."""
    model, labelled = network(), support()
    view, method = Network.of(model, labelled.images), DeltaReg("train_running", EPOCHS, batch_size=BATCH)
    watched = method._watched(view, labelled)
    weights = {name: torch.full((n,), 1 / n) for name, n in zip(watched, (64, 128, 256, 512), strict=True)}

    def ours() -> None:
        trained = trainable(view, "train_running")
        with maps(trained, watched) as own:
            tune(
                view,
                labelled,
                Target(labelled),
                "all",
                method,
                0,
                model=trained,
                penalty=lambda trained: method.penalty(view, trained, own, weights),
            )

    def plainly() -> None:
        frozen, free = copy.deepcopy(model).eval(), copy.deepcopy(model).train()
        kept: dict[tuple[bool, str], torch.Tensor] = {}
        for which, net in ((False, frozen), (True, free)):
            for name in watched:
                net.get_submodule(name).register_forward_hook(
                    lambda _, __, out, key=(which, name): kept.__setitem__(key, out)
                )
        optimizer = torch.optim.SGD(free.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(EPOCHS):
            for indices in torch.randperm(len(labelled)).split(BATCH):
                optimizer.zero_grad()
                loss = F.cross_entropy(free(labelled.images[indices]), labelled.labels[indices])
                with torch.no_grad():
                    frozen(labelled.images[indices])
                for name in watched:
                    gap = (kept[True, name] - kept[False, name]).square().flatten(2).mean(2)
                    loss = loss + 0.005 * (gap * weights[name] * len(weights[name])).sum()
                (loss + 0.005 * sum(p.square().sum() for p in free.fc.parameters())).backward()
                optimizer.step()

    seconds = fastest(rounds, ours=ours, plain=plainly)
    show("delta-reg: epoch / the same loop in plain PyTorch", seconds["ours"] / seconds["plain"], "<= 1.10")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    main(parser.parse_args().rounds)
