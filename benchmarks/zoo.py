"""The zoo: is the merged network exact for every architecture with BatchNorm that timm and torchvision have?

For each: random weights, BatchNorm statistics and affine parameters away from what its images give, four images of
another distribution, and five questions.

- Blend: does the adapted network give what the source network gives once a naive loop has set the statistics of each
  BatchNorm layer?
- Learned: after one epoch of LCCS, does the merged network give what the source network gives with the learned
  statistics as its running statistics?
- Apply: does the delta make the adapted network of the source network, bit for bit?
- Revert: does it make the source network again, bit for bit?
- Alone: does an image get the same logits alone as beside others?

All is computed in float64, where rounding is far from everything else; in float32 where a network insists on it. What
rounding may do is measured: the reference answers again with its images moved by a few units in the last place.

Records are kept in `--out`, and a run goes on where the last one ended. The run fails if an architecture is wrong.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import platform
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import chain, zip_longest
from types import FrameType
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision import models

import fewshift
from fewshift import LCCS, FewshiftError, Network, Support, Target
from fewshift.core.outputs import main_output
from fewshift.jobs.ledger import Ledger
from fewshift.jobs.sweep import WorkPlan, missing, sweep

MOST = 60e6  # parameters
CLASSES = 5
SIZES = (64, 96, 128)  # pixels; then the network's own size, if that is no more than
LARGEST = 256
SHARE = 0.4  # of the target's statistics in the blend
IMAGES, FRESH = 4, 3
MARGIN = 1e4  # so many times what the last place of the images does is rounding, in passes over hundreds of layers
LEAST = {torch.float64: 1e-9, torch.float32: 1e-5}  # of the largest logit
EXACT, REFUSED, WRONG, LATE, LEFT_OUT = "exact", "refused", "wrong", "out of time", "left out"
NO_BATCHNORM = "no BatchNorm"


class OutOfTime(BaseException):
    """The time of an architecture is over."""


@dataclass(frozen=True)
class Architecture:
    """A network of a library, by name: a job."""

    library: str
    name: str
    pixels: bool = False

    @property
    def key(self) -> str:
        """The name of its record."""
        return f"{self.library}.{self.name}"

    fit_key = key

    def to_json(self) -> dict[str, Any]:
        """What its record says of it."""
        return {"library": self.library, "name": self.name}

    def make(self) -> nn.Module:
        """The network with random weights."""
        if self.library == "timm":
            return timm.create_model(self.name, num_classes=CLASSES)
        slow = {"init_weights": False} if self.name in ("googlenet", "inception_v3") else {}
        alone = {"weights_backbone": None} if self.pixels else {}
        return models.get_model(self.name, weights=None, num_classes=CLASSES, **alone, **slow)

    def own_size(self, model: nn.Module) -> int:
        """The size of the images that the network was made for."""
        return int(model.default_cfg["input_size"][-1]) if self.library == "timm" else 224


def architectures(like: str) -> list[Architecture]:
    """All names that fit the pattern: the first of each family, then the second of each, and so on.

    A family is a module of timm, or a kind of torchvision's networks; a run that is stopped has seen most of them.
    """
    families = [
        *([Architecture("timm", name) for name in timm.list_models(module=module)] for module in timm.list_modules()),
        [Architecture("torchvision", name) for name in models.list_models(module=models)],
        [Architecture("torchvision", name, pixels=True) for name in models.list_models(module=models.segmentation)],
    ]
    turns = chain.from_iterable(zip_longest(*families))
    everything = {each.key: each for each in turns if each is not None}.values()
    return [each for each in everything if fnmatch.fnmatch(each.name, like) or fnmatch.fnmatch(each.key, like)]


# --- one architecture


def judged(architecture: Architecture, limit: float) -> dict[str, Any]:
    """The verdict on one architecture, with the facts that it rests on."""
    facts: dict[str, Any] = {}
    try:
        with within(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries think of their own defaults
            if reason := unfit(architecture):
                return {"verdict": LEFT_OUT, "reason": reason}
            return {"verdict": EXACT if examine(architecture, facts) else WRONG, **facts}
    except OutOfTime:
        return {"verdict": LATE, **facts}
    except FewshiftError as error:
        return {"verdict": REFUSED, "reason": str(error), **facts}
    except Exception as error:  # a traceback is never right
        return {"verdict": WRONG, "reason": f"{type(error).__name__}: {str(error)[:200]}", **facts}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop the block after so many seconds of computing: a busy machine changes no verdict."""

    def stop(_: int, __: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def unfit(architecture: Architecture) -> str | None:
    """Why the architecture is no part of the zoo, seen without its weights."""
    with torch.device("meta"):
        model = architecture.make()
    if not layers_of(model):
        return NO_BATCHNORM
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count / 1e6:.0f} million parameters" if count >= MOST else None


def layers_of(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def examine(architecture: Architecture, facts: dict[str, Any]) -> bool:
    """Ask the five questions; whether all answers are yes."""
    torch.manual_seed(0)
    model = architecture.make().eval()
    size = runnable_size(model, [*SIZES, architecture.own_size(model)])
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
    support = Support(place, labels[:, None, None].expand(-1, size, size) if architecture.pixels else labels)

    reference = with_blend(model, place, SHARE)
    expected = logits(reference, fresh)
    source = logits(model, fresh)
    scale = float(expected.abs().max())
    noise = float((logits(reference, fresh * (1 + 4 * torch.finfo(dtype).eps)) - expected).abs().max())
    allowed = max(MARGIN * noise, LEAST[dtype] * scale)
    facts |= {"scale": scale, "allowed": allowed, "moved": float((expected - source).abs().max())}

    method = LCCS(init=SHARE, epochs=0, classifier="source")
    result = fewshift.adapt(model, support, method=method, validate=None, accept="always", check=False)
    facts["blend"] = float((logits(result.model, fresh) - expected).abs().max())
    facts["alone"] = float((logits(result.model, fresh[:1]) - logits(result.model, fresh)[:1]).abs().max())
    applied = fewshift.apply(model, result.delta)
    facts["applied"] = same_bits(applied, result.model)
    facts["reverted"] = same_bits(fewshift.revert(applied, result.delta), model)
    del result, applied, reference
    facts["learned"] = learned_difference(model, support, fresh)
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


def learned_difference(model: nn.Module, support: Support, fresh: Tensor) -> float:
    """How far the merged network is from the source network with the learned statistics as running statistics."""
    method = LCCS(init=SHARE, epochs=1, classifier="source")
    network = Network.of(model, support.pictures)
    stages = method.stages(network, Target(support), seed=0)
    merged = network.as_given(method.with_classifier(stages, "source").predictor)
    expected = copy.deepcopy(model)
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


# --- all of them


def show(verdicts: Mapping[str, Mapping[str, Any]], markdown: bool, waiting: int = 0) -> None:
    """The counts, and the names of those that are not exact; `waiting` names were not reached."""
    versions = {"fewshift": fewshift.__version__, "torch": torch.__version__, "timm": timm.__version__}
    versions |= {"torchvision": torchvision.__version__, "Python": platform.python_version()}
    print(f"{date.today().isoformat()}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    counts = Counter(result["verdict"] for result in verdicts.values())
    without = sum(result.get("reason") == NO_BATCHNORM for result in verdicts.values())
    asked, large = len(verdicts) - counts[LEFT_OUT], counts[LEFT_OUT] - without
    left_out = f"{without:,} have no BatchNorm, {large:,} have {MOST / 1e6:.0f} million parameters or more"
    print(f"\n{asked:,} of {len(verdicts):,} names were asked; {left_out}.")
    print(f"{waiting:,} more names were not reached: the run is not complete.\n" if waiting else "")
    if markdown:
        print("| verdict | architectures |\n|---|---|")
    for verdict in (EXACT, REFUSED, WRONG, LATE):
        print(f"| {verdict} | {counts[verdict]} |" if markdown else f"{verdict:12} {counts[verdict]:5}")
    singles = sum(result["verdict"] == EXACT and result["dtype"] == "float32" for result in verdicts.values())
    print(f"\n{singles} of the exact ones insist on float32; all others were computed in float64.")
    for verdict in (WRONG, REFUSED, LATE):
        named = {key: result for key, result in sorted(verdicts.items()) if result["verdict"] == verdict}
        if named:
            print(f"\n{verdict.capitalize()}:\n")
        for key, result in named.items():
            print(f"- {f'`{key}`' if markdown else key}: {words(result)}")


def words(result: Mapping[str, Any]) -> str:
    """What is not as it should be."""
    if "reason" in result or "allowed" not in result:
        return str(result.get("reason", f"size {result.get('size', 'not found')}"))
    off = [what for what in ("blend", "learned", "alone") if not result.get(what, 0) <= result["allowed"]]
    parts = [f"{what} off by {result[what]:.2g}" for what in off]
    parts += [f"not {what} bit for bit" for what in ("applied", "reverted") if not result.get(what, True)]
    return f"{', '.join(parts)} at a scale of {result['scale']:.2g} ({result['allowed']:.1g} allowed)"


def verdict_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a record says; a worker that died is no answer."""
    return record["result"] if "result" in record else {"verdict": WRONG, "reason": record["error"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/zoo", help="folder of the records; a run goes on where it ended")
    parser.add_argument("--like", default="*", help="names that fit this pattern, such as 'resnet*' or 'torchvision.*'")
    parser.add_argument("--limit", type=int, help="so many architectures, evenly spread")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--seconds", type=float, default=60.0, help="of computing, for each architecture")
    parser.add_argument("--recorded", action="store_true", help="ask nothing: show what the records in --out say")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/reliability.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = architectures(options.like)
    if options.limit is not None:
        jobs = [jobs[place * len(jobs) // options.limit] for place in range(min(options.limit, len(jobs)))]
    ledger = Ledger(options.out)
    began, left = time.time(), len(missing(jobs, ledger))
    done = 0

    def tell(record: Mapping[str, Any]) -> None:
        nonlocal done
        done += 1
        result = verdict_of(record)
        note = "" if result["verdict"] == EXACT else f": {words(result)}"
        spent = f"{record['seconds']:.1f} s, {time.time() - began:.0f} s in all"
        print(f"{done}/{left} {record['key']} {result['verdict']}{note} ({spent})", flush=True)

    if not options.recorded:
        plan = WorkPlan(float, (options.seconds,), judged, "architecture")
        sweep(jobs, ledger, plan, workers=options.workers, tell=tell)
    records = ledger.read()
    verdicts = {job.key: verdict_of(records[job.key]) for job in jobs if job.key in records}
    print()
    show(verdicts, options.markdown, len(jobs) - len(verdicts))
    if any(result["verdict"] == WRONG for result in verdicts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
