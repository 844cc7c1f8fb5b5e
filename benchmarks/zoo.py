"""The zoo: is the merged network exact for every architecture with BatchNorm that timm and torchvision have?

Each gets random weights and the five questions of `exactness.py`.

Records are kept in `--out`, and a run goes on where the last one ended. The run fails if an architecture is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import platform
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import chain, zip_longest
from types import FrameType
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torchvision import models

import fewshift
from exactness import examine, layers_of
from fewshift import FewshiftError
from fewshift.jobs.ledger import Ledger
from fewshift.jobs.sweep import WorkPlan, missing, sweep

MOST = 60e6  # parameters
CLASSES = 5
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
            torch.manual_seed(0)
            model = architecture.make().eval()
            exact = examine(model, architecture.own_size(model), architecture.pixels, facts)
            return {"verdict": EXACT if exact else WRONG, **facts}
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
    try:
        with torch.device("meta"):
            model = architecture.make()
    except NotImplementedError:  # it computes with tensors while it is made
        model = architecture.make()
    if not layers_of(model):
        return NO_BATCHNORM
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count / 1e6:.0f} million parameters" if count >= MOST else None


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
