"""Pages in a real browser: everything is drawn, fits a phone, and nothing is said, asked or loaded.

Chromium is driven by its own protocol through two pipes, messages of JSON that end in a NUL byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fewshift.lab.bench.page import run_page
from fewshift.report import adaptation_page, demo_page
from tests.helpers.runs import FEATURES, GRIDS, embedded, fill
from tests.report.test_pages import JUDGED, demonstration

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60  # seconds, on a machine that has other things to do
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-dev-shm-usage", "--disable-extensions", "--mute-audio")  # fmt: skip

UNDRAWN = """[
  ...[...document.querySelectorAll('svg')].filter(it => {
    const box = it.getBoundingClientRect();
    return !(box.width > 50 && box.height > 30 && it.getBBox().width > 0);
  }).map(it => it.getAttribute('aria-label')),
  ...[...document.images].filter(it => !(it.complete && it.naturalWidth > 0)).map(it => it.alt),
]"""
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(it =>
  !it.parentElement.closest('.box, pre, svg') && it.getBoundingClientRect().right > screen.width + 0.5
).map(it => it.outerHTML.slice(0, 120))"""
CLIPPED = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(it => {
    const box = it.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map(it => it.textContent + ' in: ' + svg.getAttribute('aria-label').slice(0, 60));
})"""
SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll('svg text')].map(it => it.getBBox().height
  * it.ownerSVGElement.getBoundingClientRect().width / it.ownerSVGElement.viewBox.baseVal.width))"""


class Browser:
    """One tab of a headless Chromium, and all that it reported."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        # the protocol's descriptors are 3 and 4, whatever numbers our pipes have
        wires = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        if {theirs_in, theirs_out} & {3, 4}:
            wires = f'exec 8<&{theirs_in} 9>&{theirs_out}; exec 3<&8 4>&9; exec "$@"'
        command = [program, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", wires, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.count = 0
        self.rest = b""
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        tabs = self.ask("Target.getTargets")["targetInfos"]
        tab = next(it["targetId"] for it in tabs if it["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for part in ("Runtime", "Log", "Network", "Page"):
            self.ask(f"{part}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        limit = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0.0, limit - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self.into, 1 << 20)
            assert got, "the browser has gone"
            self.rest += got
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Load a page from disk with all its folds open."""
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        self.ask("Page.navigate", url=page.as_uri())
        while not any(it.get("method") == "Page.loadEventFired" for it in self.events):
            self.events.append(self._next())
        self.tell("document.querySelectorAll('details').forEach(it => { it.open = true; })")

    def tell(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def reported(self, *methods: str) -> list[Any]:
        return [it["params"] for it in self.events if it.get("method") in methods]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.out, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.into)


def works(program: str) -> bool:
    """Whether it is a browser, and not a note that one could be installed."""
    return subprocess.run([program, "--version"], capture_output=True, timeout=PATIENCE, check=False).returncode == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(works, filter(None, map(shutil.which, NAMES))), None)
    if program is None:
        pytest.skip(f"no browser found: install one of {', '.join(NAMES)} to check pages in it")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module", params=["run", "demo", "evidence", "rejected", "many classes", "forty"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "run"
    if request.param == "demo":
        folder.mkdir()
        return demo_page(demonstration(), folder / "demo.html")
    if request.param in JUDGED:
        folder.mkdir()
        return adaptation_page(JUDGED[request.param](), folder / "adaptation.html")
    for name, text in GRIDS.items():
        fill(folder, name, text)
    return run_page(fill(folder, "features", FEATURES, embedded))


@pytest.mark.parametrize("width", [390, 1200])
def test_every_figure_is_drawn_and_no_word_of_it_is_cut_off(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    assert browser.tell("document.querySelectorAll('figure svg, figure img').length") > 3
    assert browser.tell(UNDRAWN) == []
    assert browser.tell(CLIPPED) == []


def test_a_phone_shows_all_without_scrolling_sideways(browser: Browser, page: Path) -> None:
    browser.open(page, 390)
    assert browser.tell("window.innerWidth") == 390
    assert browser.tell(TOO_WIDE) == []
    assert browser.tell("document.documentElement.scrollWidth") <= 390
    assert browser.tell(SMALLEST_LETTERS) > 7


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_logged_and_nothing_is_loaded_but_the_page(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, 1200, dark)
    requests = [it["request"]["url"] for it in browser.reported("Network.requestWillBeSent")]
    assert [it for it in requests if not it.startswith("data:")] == [page.as_uri()]
    assert browser.reported("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []


def test_the_theme_reaches_into_the_figures(browser: Browser, page: Path) -> None:
    colours = []
    for dark in (False, True):
        browser.open(page, 1200, dark)
        colours.append(browser.tell("getComputedStyle(document.querySelector('svg text')).fill"))
    assert colours == ["rgb(28, 28, 32)", "rgb(231, 229, 224)"]


def test_the_checks_would_notice(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><meta name="viewport" content="width=device-width"><img src="gone.png" alt="gone">'
        '<svg viewBox="0 0 9 9" width="0" height="0" aria-label="empty"></svg>'
        '<div style="width: 900px">wide</div><script>console.log("said")</script>'
    )
    browser.open(page, 390)
    assert browser.tell(UNDRAWN) == ["empty", "gone"]
    assert len(browser.tell(TOO_WIDE)) == 1
    assert browser.reported("Runtime.consoleAPICalled")
    assert len(browser.reported("Network.requestWillBeSent")) == 2
