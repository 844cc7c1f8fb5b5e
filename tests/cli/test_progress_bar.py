"""One bar for a whole command, with an honest time left."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch

import fewshift
from fewshift.cli import console
from fewshift.cli.console import progress_bar
from fewshift.core import _progress as progress
from fewshift.report.remaining import Remaining
from tests.helpers.commands import network_options
from tests.helpers.networks import make_support, make_tiny


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_time_left_is_that_of_the_whole(clock):
    remaining = Remaining(clock)
    remaining((0.0, 0.25))
    assert remaining.seconds is None
    clock.now += 10
    remaining((0.25, 0.5))
    assert remaining.seconds == pytest.approx(30)


def test_within_a_long_step_the_time_left_falls_and_then_grows_but_never_ends_early(clock):
    remaining = Remaining(clock)
    remaining((0.0, 0.25))
    clock.now += 10
    remaining((0.25, 0.5))
    clock.now += 5
    assert remaining.seconds == pytest.approx(25)
    clock.now += 5
    assert remaining.seconds == pytest.approx(20)  # as long as the first quarter: this step should end now
    clock.now += 20  # it takes three times as long: half of the work in 40 seconds
    assert remaining.seconds == pytest.approx(40)
    assert remaining.share == 0.5


def test_the_words_name_the_share_and_the_time(clock):
    remaining = Remaining(clock)
    assert str(remaining) == "0 %, time left not known yet"
    remaining((0.0, 0.4))
    clock.now += 14
    remaining((0.4, 1.0))
    assert str(remaining) == "40 %, about 21 s left"
    clock.now += 0.001
    remaining((0.05, 0.1))
    assert str(remaining).endswith("about 4 min left")


def test_where_stderr_is_no_terminal_a_line_comes_every_few_seconds(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY", 0.05)
    with progress_bar(), progress.plan([("images", 1)]):
        for _ in progress.track(range(4), "images"):
            time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(re.fullmatch(r"[\w ]+: \d+ %, (about \d+ s left|time left not known yet)", line) for line in lines)
    shares = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert shares == sorted(shares)


def test_short_commands_print_no_progress_into_a_pipe(run, place):
    done = run("predict", *network_options(place), place / "photos")
    assert done.stderr == ""


@pytest.mark.parametrize("method", ["auto", "lccs", "lp-ft", "adabn"])
def test_an_adaptation_goes_from_nothing_to_all_without_a_step_back(method):
    heard = []
    with progress.watched_by(heard.append):
        fewshift.adapt(make_tiny(), make_support(4), method=method)
    shares = [share.done for share in heard]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, pytest.approx(1))
    assert len(set(shares)) > 5
    assert max(later - share for share, later in pairwise(shares)) < 0.5


def test_a_terminal_gets_one_bar(place):
    words = [sys.executable, "-m", "fewshift.cli", "adapt", *map(str, network_options(place))]
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"  # a terminal of its own
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--support", str(place / "photos"), "--accept", "always"],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "adapting" in done.stdout
    assert "-:--:--" not in done.stdout


def test_threads_are_those_asked_for(run, place):
    before = torch.get_num_threads()
    try:
        assert run("predict", *network_options(place), "--threads", before + 1, place / "photos").code == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
