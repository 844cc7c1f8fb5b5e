"""One thread, what every test may ask for, and a summary that says which tests need a browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch import nn

from fewshift import Support, cli
from tests.helpers.networks import make_support, make_tiny

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ViewportSize

torch.set_num_threads(1)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = 500  # pixels: narrower screens are phones
NO_BROWSER = f"no browser: install one of {', '.join(BROWSERS)}"


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


@dataclass
class Tab:
    """One tab of the browser: what the page in it loaded, and what it logged."""

    browser: Browser
    requests: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)

    def open(self, path: Path, width: int, scheme: Literal["light", "dark"] = "light") -> None:
        """Load a page from disk with all its folds open; a narrow one as a phone would."""
        size: ViewportSize = {"width": width, "height": 800}
        context = self.browser.new_context(viewport=size, screen=size, color_scheme=scheme, is_mobile=width < PHONE)
        self.page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.logged.append(message.text))
        self.page.on("pageerror", lambda error: self.logged.append(error.message))
        self.page.goto(path.as_uri())
        self.value("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.page.evaluate(script)

    @property
    def loaded(self) -> list[str]:
        """Every address that was asked for, the page's own first; what the page carries itself does not count."""
        return [address for address in self.requests if not address.startswith("data:")]


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    yield Tab(browser)
    for context in browser.contexts:
        context.close()


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
