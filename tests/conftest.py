"""One thread, what every test may ask for, and a summary that says which tests need a browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fewshift import FewshiftError, Support, cli
from tests.helpers.browser import Tab
from tests.helpers.networks import make_support, make_tiny

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHARED = {  # modules that share what is slow to make: one large page, one Ray
    "tests/lab/bench/test_page.py": "pages",
    "tests/report/test_browser.py": "pages",
    "tests/lab/bench/test_ray.py": "ray",
    "tests/deploy/test_parts_on_ray.py": "ray",
    "tests/fleet/test_fleet_on_ray.py": "ray",
}
NO_BROWSER = f"no browser: install one of {', '.join(BROWSERS)}"


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """A test gives the same answer each time, in any order and company."""
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> nn.Module:
    return make_tiny()


@pytest.fixture
def support() -> Support:
    return make_support()


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process through the real entry point."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fewshift", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return Result(code, out.out, out.err)

    return run


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, started once; while it runs, the main thread cannot run an asyncio loop of its own."""
    from playwright.sync_api import sync_playwright

    program = next(filter(_works, filter(None, map(shutil.which, BROWSERS))), None)
    if program is None:
        pytest.skip(NO_BROWSER)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()


def _works(program: str) -> bool:
    """Whether it is a browser, and not a note that one could be installed."""
    return subprocess.run([program, "--version"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture(scope="session")
def page_of_all_grids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of every kind of grid, with every kind of figure."""
    from fewshift.lab.bench.runs import report_run
    from tests.helpers.runs import GRIDS, by_blend, embedded, fill, invented

    folder = tmp_path_factory.mktemp("runs") / "all"
    results = {"objective": by_blend, "features": embedded}
    for name, text in GRIDS.items():
        fill(folder, name, text, results.get(name, invented))
    return report_run(folder).page


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """A real Ray of two workers, started once."""
    from fewshift.jobs.on_ray import connected

    os.environ.setdefault("RAY_worker_niceness", "0")  # else its workers starve on a busy machine
    with ExitStack() as opened:
        for _ in range(2):  # it gives up when a machine is busy and it starts slowly
            with suppress(FewshiftError):
                opened.enter_context(connected(2, None))
                break
        with connected(2, None) as ray:
            yield ray


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    yield Tab(browser)
    for context in browser.contexts:
        context.close()


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Keep the tests of a module in one process, so that what they share is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return SHARED.get(module, module)

    return ByModule(config, log)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count tests without a browser apart from those skipped for other reasons."""
    if report.skipped and NO_BROWSER in str(report.longrepr):
        return "no browser", "b", "NO BROWSER"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in the summary how many pages no browser has seen."""
    if missing := len(terminalreporter.stats.get("no browser", [])):
        note = f"no browser: {missing} tests of pages in Chromium were not run; install one of {', '.join(BROWSERS)}"
        terminalreporter.write_line(note, yellow=True, bold=True)
