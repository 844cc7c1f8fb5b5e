"""`python -m tests.chaos`: kill, run again, compare. Exit code 1 if anything differs."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random

from tests.chaos.comparison import Facts, differences, drafts
from tests.chaos.material import write_material
from tests.chaos.studio import StudioVictim
from tests.chaos.victims import COMMANDS, Kills, Victim

VICTIMS = {victim.name: victim for victim in (*COMMANDS, StudioVictim())}


def main() -> int:
    """Every victim, so many rounds; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="disturbed runs of each command")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; the same seed plans the same kills")
    parser.add_argument("--only", action="append", choices=sorted(VICTIMS), help="this command; may be given again")
    parser.add_argument("--keep", type=Path, help="a new folder for what the runs leave, which is kept")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        home = asked.keep or Path(scratch)
        home.mkdir(parents=True, exist_ok=asked.keep is None)
        write_material(home)
        outcomes = [_suffers(VICTIMS[name], home, asked.rounds, asked.seed) for name in asked.only or VICTIMS]
    hit, late = (sum(kills[place] for kills, _ in outcomes) for place in range(2))
    wrong = [line for _, lines in outcomes for line in lines]
    print(f"{hit} kills hit, {late} came when the command had ended, differences: {len(wrong)}")
    for line in wrong:
        print(f"  {line}")
    return 1 if wrong else 0


def _suffers(victim: Victim | StudioVictim, home: Path, rounds: int, seed: int) -> tuple[Kills, list[str]]:
    """The kills of a victim, and what differed."""
    calm = _new(home / f"{victim.name}-calm")
    effort = victim.undisturbed(calm)
    expected = _facts(victim, calm)
    hit, late, wrong = 0, 0, []
    for number in range(rounds):
        out = _new(home / f"{victim.name}-{number}")
        random = Random(f"{seed} {victim.name} {number}")
        try:
            kills = victim.disturbed(out, random, effort)
            hit, late = hit + kills.hit, late + kills.late
            found = differences(expected, _facts(victim, out))
        except Exception as error:  # a crash is a difference too
            found = [f"{type(error).__name__}: {error}"]
        wrong += [f"{victim.name}, round {number}: {line}" for line in found]
        print(f"{victim.name}, round {number}: {'; '.join(found) or 'the same'}", flush=True)
    print(f"{victim.name}: {hit} of {hit + late} kills hit in {rounds} rounds, differences: {len(wrong)}", flush=True)
    return Kills(hit, late), wrong


def _facts(victim: Victim | StudioVictim, out: Path) -> Facts:
    return {**victim.left(out), "drafts": drafts(out)}


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
