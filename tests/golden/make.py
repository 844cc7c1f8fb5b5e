"""What the program does, frozen: `python -m tests.golden.make [FOLDER]` writes it, `tests/test_golden.py` compares.

A change that means to alter what is written here writes it again in the same commit, and the commit says why. Exact
hashes hold for one version of torch on one kind of processor (`environment.json`); elsewhere the test falls back to the
rounded numbers beside them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from click.testing import Result
from torch import Tensor, nn
from typer.testing import CliRunner

import fewshift
from fewshift import METHODS, Support, Target, draw_support
from fewshift.cli import app
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from fewshift.lab.bench.features import GRIDS, load_grid
from fewshift.lab.datasets import digits
from fewshift.models.libraries import load
from fewshift.report import prose
from fewshift.report.results import Adaptation
from tests.helpers.networks import make_support, make_tiny

HERE = Path(__file__).parent
SEEDS = (0, 1)
LISTS = ("methods", "algorithms", "recipes", "datasets", "grids")
# settings that keep the slow methods quick; all others run as they come
QUICK: dict[str, dict[str, Any]] = {
    "lp-ft": {"epochs": 2, "probe_epochs": 3},
    "delta-reg": {"epochs": 1},
    "finetune-bn": {"epochs": 3},
    "finetune-features": {"epochs": 3},
    "l2": {"epochs": 3},
    "l2-sp": {"epochs": 3},
    "flute": {"epochs": 2},
    "shot": {"epochs": 2, "batch_size": 8, "lr": 0.01},
    "sfda": {"steps": 4, "memory_every": 2, "batch_size": 8},
    "sdda": {"epochs": 2, "start_epoch": 1, "batch_size": 8, "size": 8, "width": 4},
}


def environment() -> dict[str, Any]:
    """What the last bit of a result depends on, beside the program: other processors add in another order."""
    return {"torch": torch.__version__, "vectors": torch.backends.cpu.get_cpu_capability(), "processor": processor()}


def processor() -> str:
    """Maker, family and model of this machine's processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    facts = dict(reversed([re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line]))
    return " ".join(facts.get(name, "") for name in ("vendor_id", "cpu family", "model"))


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# methods


def places() -> dict[str, tuple[nn.Module, Support, Tensor]]:
    """Two networks, each with a support set and images to predict."""
    images, labels = digits.uci()
    steps = digits.PREPROCESS
    images = steps.normalise(images)
    chosen = draw_support(labels, 2, seed=0)
    return {
        "tiny": (make_tiny(), make_support(), make_support(seed=2).images),
        "digits": (load("digits"), Support(images[chosen], labels[chosen]), images[:64]),
    }


def fitted(name: str, model: nn.Module, support: Support, images: Tensor, seed: int) -> dict[str, Any]:
    """One method: what it changed, and what it predicts."""
    unlabelled = Unlabelled(support.images) if METHODS[name].needs is Needs.UNLABELLED else None
    predictor = METHODS[name](**QUICK.get(name, {})).adapt(model, Target(support, unlabelled), seed=seed)
    before, after = model.state_dict(), predictor.state_dict()
    changed = [key for key in before if key in after and not torch.equal(before[key], after[key])]
    with torch.no_grad():
        logits = predictor(images)
    return {
        "changed": len(changed),
        "tensors": sha256(*(key.encode() + tensor_bytes(after[key]) for key in sorted(changed))),
        "predictions": sha256(tensor_bytes(logits.argmax(1))),
        "logits": sha256(tensor_bytes(logits)),
        "rounded": [round(float(value), 2) for value in logits[0]],
    }


def methods() -> dict[str, Any]:
    """Every method on both networks with two seeds."""
    results = {}
    for place, (model, support, images) in places().items():
        for name in METHODS:
            for seed in SEEDS:
                results[f"{place}/{name}/{seed}"] = fitted(name, model, support, images, seed)
    return results


@cache
def adapted(place: str, method: str, seed: int) -> Adaptation:
    """What `adapt` hands over, without timings."""
    model, support, _ = places()[place]
    chosen = {} if method == "default" else {"method": method}
    with stopped_clock():
        return fewshift.adapt(model, support, seed=seed, **chosen)


def adaptations() -> dict[str, Any]:
    """The evidence and the delta of the default and of methods that do not choose."""
    results = {}
    for place, seed in (("tiny", 1), ("digits", 0)):
        for method in ("default", "adabn", "l2-sp"):
            result = adapted(place, method, seed)
            delta = result.candidate_delta
            results[f"{place}/{method}/{seed}"] = {
                "accepted": result.accepted,
                "reason": result.reason,
                "facts": prose.facts(result.evidence),
                "delta": sha256(*(key.encode() + tensor_bytes(delta.bits[key]) for key in sorted(delta.bits))),
            }
    return results


# commands, grids


def command(*words: str) -> str:
    """The output of a command, plain."""
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    with patch("typer.rich_utils.MAX_WIDTH", 100):  # typer reads its own variable once, when it is imported
        result: Result = CliRunner().invoke(app, list(words), prog_name="fewshift", env=plain)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)


def helps() -> str:
    """Every command's help."""
    from typer.main import get_command

    names = list(get_command(app).commands)  # type: ignore[attr-defined]
    texts = [command("--help"), *(command(name, "--help") for name in sorted(names))]
    return "\n".join(re.sub(r"[ \t]+\n", "\n", text) for text in texts)


def lists() -> dict[str, Any]:
    """What `fewshift list` tells; models are those of other libraries and change with them."""
    return {what: json.loads(command("list", what, "--json"))[what] for what in LISTS}


def keys() -> dict[str, Any]:
    """The keys of all cells of all grids."""
    grids = {}
    for path in sorted(GRIDS.glob("*.toml")):
        cells = sorted({cell.key for cell in load_grid(path).cells()})
        grids[path.stem] = {"cells": len(cells), "keys": sha256(*(key.encode() for key in cells))}
    return grids


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Within the block no time passes, so that nothing that is written has timings."""
    with patch.object(time, "perf_counter", lambda: 0.0), patch.object(time, "time", lambda: 1_700_000_000.0):
        yield


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of the smoke grid, which leave a run to make a page of; the page shall not name today's commit."""
    with stopped_clock(), patch("fewshift.lab.bench.provenance.commit", lambda _: None):
        command("bench", "smoke", "--out", str(folder), "--json")
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return sorted((_without_timings(line) for line in lines), key=lambda line: str(line["key"]))


def _without_timings(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_timings(each)
            for key, each in value.items()
            if not re.search("seconds|began|versions|machine|host", key)
        }
    return value


def run_page(folder: Path) -> str:
    """The page of the smoke grid's run."""
    with stopped_clock():
        command("report", str(folder))
    return masked((folder / "report.html").read_text(encoding="utf-8"))


def adaptation_page(folder: Path) -> str:
    """The page of one adaptation of the digits network."""
    with stopped_clock():
        path = adapted("digits", "default", 0).report(folder / "page.html")
    return masked(path.read_text(encoding="utf-8"))


def masked(page: str) -> str:
    """A page with the pictures in it as hashes, and without versions."""
    page = re.sub(r'data:[^"]+', lambda match: f"data {sha256(match[0].encode())[:16]}", page)
    page = re.sub(r"<svg.*?</svg>", lambda match: f"svg {sha256(match[0].encode())[:16]}", page, flags=re.DOTALL)
    page = re.sub(r"<style.*?</style>", lambda match: f"style {sha256(match[0].encode())[:16]}", page, flags=re.DOTALL)
    return page.replace(torch.__version__, "TORCH").replace(fewshift.__version__, "VERSION")


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def makers(scratch: Path) -> dict[str, Callable[[], str]]:
    """Each file of the folder, and how it is made; later ones may need what earlier ones left in `scratch`."""
    return {
        "environment.json": lambda: as_json(environment()),
        "methods.json": lambda: as_json(methods()),
        "adaptations.json": lambda: as_json(adaptations()),
        "help.txt": helps,
        "lists.json": lambda: as_json(lists()),
        "keys.json": lambda: as_json(keys()),
        "records.json": lambda: as_json(records(scratch / "run")),
        "run-page.html": lambda: run_page(scratch / "run"),
        "adaptation-page.html": lambda: adaptation_page(scratch),
    }


def main() -> None:
    """Write every file."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in makers(Path(scratch)).items():
            began = time.perf_counter()
            (folder / name).write_text(make(), encoding="utf-8")
            print(f"{name}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
