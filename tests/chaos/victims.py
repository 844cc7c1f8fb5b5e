"""The commands that are killed: how each is run, run again, and what it has to leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.chaos.comparison import Facts, digest, is_whole_page, json_file, records, table
from tests.chaos.material import NETWORK
from tests.chaos.processes import Effort, run, run_until

MOST_KILLS = 2  # of one run
ANYWHERE = 0.2  # of the kills come at any moment, the others once the command has begun to write


class Kills(NamedTuple):
    """How many kills met the command at work, and how many came when it had ended."""

    hit: int
    late: int


@dataclass(frozen=True)
class Victim:
    """A command. It runs in a folder of its own beside the material; `again` are words for going on."""

    name: str
    words: tuple[str, ...]
    again: tuple[str, ...]
    left: Callable[[Path], Facts]

    def undisturbed(self, out: Path) -> Effort:
        """Run it once."""
        return run([*self.words, *self.again], out)

    def disturbed(self, out: Path, random: Random, effort: Effort) -> Kills:
        """Run it, kill it at random moments, and let it go on to its end."""
        hits = [self._killed(out, random, effort) for _ in range(random.randint(1, MOST_KILLS))]
        run([*self.words, *self.again], out)
        return Kills(sum(hits), len(hits) - sum(hits))

    def _killed(self, out: Path, random: Random, effort: Effort) -> bool:
        begin = 0.0 if random.random() < ANYWHERE else effort.first
        return run_until([*self.words, *self.again], out, random.uniform(begin, effort.whole))


def _adapted(out: Path) -> Facts:
    return {"delta": digest(out / "site.safetensors"), "page is whole": is_whole_page(out / "site.html")}


def _sites(out: Path) -> Facts:
    files = {file.name: digest(file) for file in sorted((out / "sites").glob("*.safetensors"))}
    return {"deltas": files, "records": records(out / "sites/.fleet/records.jsonl")}


def _benched(out: Path) -> Facts:
    grids = {file.name: digest(file) for file in (out / "run/grids").iterdir()}
    return {"records": records(out / "run/records.jsonl"), "grids": grids}


def _trained(out: Path) -> Facts:
    names = sorted(path.name for path in out.iterdir())
    return {"files": names, "weights": digest(out / "w.safetensors"), "card": json_file(out / "w.json")}


def _table(out: Path) -> Facts:
    return {"table": table(out / "rows.csv"), "record": json_file(out / "rows.csv.run.json")}


def _parts(out: Path) -> Facts:
    files = {file.name: digest(file) for file in sorted((out / "rows").glob("*.parquet"))}
    return {"parts": files, "run": json_file(out / "rows/_run.json")}


ADAPT = ("adapt", *NETWORK, "--method", "lccs", "--accept", "always")
PREDICT = ("predict", *NETWORK, "../many", "--batch-size", "16")
TRAIN = ("train", "digits", "--source", "uci", "--arch", "digits", "--epochs", "3", "--out", "w.safetensors")
COMMANDS = (
    Victim(
        "adapt", (*ADAPT, "--support", "../photos", "-o", "site.safetensors", "--report", "site.html"), (), _adapted
    ),
    Victim("sites", (*ADAPT, "--sites", "../places", "-o", "sites"), (), _sites),
    Victim("bench", ("bench", "../grid.toml", "-o", "run"), (), _benched),
    Victim("train", TRAIN, ("--resume",), _trained),
    Victim("predict", (*PREDICT, "-o", "rows.csv"), ("--resume",), _table),
    Victim("parts", (*PREDICT, "-o", "rows", "--part-size", "48"), ("--resume",), _parts),
)
