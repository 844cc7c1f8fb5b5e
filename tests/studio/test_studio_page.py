"""The page in a real browser, from an empty folder to a kept delta.

With FEWSHIFT_SCREENSHOTS=FOLDER the same walk leaves the pictures of docs/studio.md there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from torch import nn

import fewshift
from fewshift.studio.serving import Studio
from tests.helpers.studio import write_digits

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SHOTS = os.environ.get("FEWSHIFT_SCREENSHOTS")
EACH, LABELS = (40, 5) if SHOTS else (5, 2)  # images of each class, and labels
LONG = 60_000  # milliseconds
NASTY = "<img src=x onerror=document.title='hacked'>.png"
PHONE = 390
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(element =>
  element.getBoundingClientRect().width > 0 && element.getBoundingClientRect().right > innerWidth + 0.5
  && getComputedStyle(element).position !== 'fixed').map(element => element.outerHTML.slice(0, 120))"""
NAMELESS = """[...document.querySelectorAll('button, a, input, select, [role=img], svg')].filter(element => {
  if (element.closest('[aria-hidden=true]') || !element.getClientRects().length) return false;
  const labels = element.labels ? [...element.labels].map(label => label.textContent).join('') : '';
  return !(element.getAttribute('aria-label') || element.textContent.trim() || labels.trim());
}).map(element => element.outerHTML.slice(0, 120))"""


@dataclass
class Visitor:
    """A tab that visits a studio, what it asked for and what it logged."""

    browser: Browser
    studio: Studio
    width: int = 1200
    scheme: Literal["light", "dark"] = "light"
    asked: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        size: Any = {"width": self.width, "height": 800}
        context = self.browser.new_context(viewport=size, color_scheme=self.scheme, is_mobile=self.width < 500)
        self.page: Page = context.new_page()
        self.page.set_default_timeout(LONG)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.logged.append(message.text))
        self.page.on("pageerror", lambda error: self.logged.append(error.message))
        self.page.goto(self.studio.address)
        self.page.wait_for_selector("#view > *")

    def step(self, name: str) -> None:
        self.page.evaluate(f"location.hash = '{name}'")
        self.page.wait_for_selector(f"body[data-step={name}]")

    def image(self) -> str:
        """The name of the image that is to be labelled."""
        return str(self.page.text_content(".stage figcaption"))

    def shows(self, name: str) -> None:
        """Wait until an image is shown."""
        shown = "name => document.querySelector('.stage figcaption')?.textContent === name"
        self.page.wait_for_function(shown, arg=name)

    def press(self, key: str, *, moves: bool = True) -> None:
        """Press a key; with `moves`, wait until another image is shown."""
        before = self.image()
        self.page.keyboard.press(key)
        if moves:
            changed = "name => document.querySelector('.stage figcaption')?.textContent !== name"
            self.page.wait_for_function(changed, arg=before)

    def saved(self, labels: int) -> None:
        """Wait until the page says that so many labels are on disk."""
        self.page.wait_for_function(f"() => document.querySelector('#tally')?.textContent.startsWith('{labels} label')")

    def clean(self) -> bool:
        """Whether nothing was logged, and no request left this machine."""
        here = f"http://127.0.0.1:{self.studio.keys.port}/"
        return self.logged == [] and all(address.startswith(here) for address in self.asked)

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.wait_for_timeout(400)  # what moves comes to rest
            self.page.screenshot(path=Path(SHOTS) / f"studio-{name}.png")


@pytest.fixture(scope="module")
def served(
    network: nn.Module, tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> Iterator[tuple[Studio, Path]]:
    """A studio on an empty folder; a folder of digits is ready to be copied there."""
    place = tmp_path_factory.mktemp("page")
    (place / "camera-7").mkdir()
    with contextlib.chdir(place):  # so that the page shows short paths
        exporter = "tests.helpers.studio:fake_export"
        with Studio(network, "camera-7", seed=0, options={"seed": 0}, exporter=exporter) as studio:
            yield studio, place / "camera-7"


@pytest.fixture
def visit(served: tuple[Studio, Path], browser: Browser) -> Iterator[Callable[..., Visitor]]:
    def visiting(width: int = 1200, scheme: Literal["light", "dark"] = "light") -> Visitor:
        return Visitor(browser, served[0], width, scheme)

    yield visiting
    for context in browser.contexts:
        context.close()


def test_from_an_empty_folder_to_a_kept_delta(served: tuple[Studio, Path], visit: Callable[..., Visitor]) -> None:
    visitor = visit()
    truth = look_at_images(visitor, served[1])
    labels = label_by_keys(visitor, truth)
    result = adapt_to_labels(visitor)
    decide_to_keep(visitor, result, 10 * EACH - len(labels))
    assert visitor.page.title() != "hacked"
    assert "token" not in visitor.page.url
    assert visitor.clean(), (visitor.logged, visitor.asked)


def look_at_images(visitor: Visitor, folder: Path) -> dict[str, str]:
    """An empty folder, then images, then what the network says about them; returns the class of each file."""
    page = visitor.page
    page.wait_for_selector("text=There are no images yet")
    truth = write_digits(folder, EACH)
    (folder / NASTY).write_bytes(b"no picture")
    page.click("button:has-text('Look again')")
    page.wait_for_selector(".shift.shifted, .shift.alike")
    page.wait_for_selector("li.unreadable")
    page.wait_for_selector(f".shift >> text={10 * EACH + 1} images; 1 cannot be read")
    page.wait_for_function("() => !document.querySelector('.grid').textContent.includes('\u2026')")
    visitor.shot("look")
    return truth


def label_by_keys(visitor: Visitor, truth: dict[str, str]) -> dict[str, str]:
    """Keys, undo, skip, not any of these, and a reload in the middle; returns the labels."""
    page, store = visitor.page, visitor.studio.bench.store
    page.keyboard.press("b")
    page.wait_for_selector(".stage img")
    first = visitor.image()
    visitor.press(truth[first])
    visitor.saved(1)
    assert store.labels() == {first: truth[first]}
    page.keyboard.press("u")
    visitor.shows(first)
    visitor.saved(0)
    assert store.labels() == {}
    visitor.press("s")
    second = visitor.image()
    visitor.press("x")
    named: dict[str, str] = {}
    while len(set(named.values())) < 10 or min(Counter(named.values()).values()) < LABELS:
        name = visitor.image()
        assert name not in named  # no image comes twice
        visitor.press(truth[name])
        named[name] = truth[name]
        if len(named) == 7:
            visitor.saved(7)
            here = visitor.image()
            page.reload()
            visitor.shows(here)
            visitor.saved(7)
        if len(named) == 33:
            visitor.shot("label")
    visitor.saved(len(named))
    labels = store.labels()
    assert labels == named
    assert {store.mark(name).state for name in (first, second)} == {"skipped", "none of these"}
    return labels


def adapt_to_labels(visitor: Visitor) -> dict[str, Any]:
    """One button, progress, and the verdict by itself; returns what was written down."""
    page = visitor.page
    page.keyboard.press("c")
    page.fill("#place-name", "Camera 7, hall B")
    page.click("button:has-text('Adapt the network')")
    page.wait_for_selector("[role=progressbar]")
    page.wait_for_selector(f"text={len(visitor.studio.bench.store.labels())} labels in 10 classes")
    if SHOTS:
        page.wait_for_function("() => document.querySelector('.progress').getAttribute('aria-valuenow') > 10")
    visitor.shot("adapt")
    page.wait_for_selector(".verdict")
    file = visitor.studio.bench.out / "Camera-7-hall-B" / "result.json"
    result: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert str(page.text_content(".advice")).lower() == result["advice"]
    assert result["recommendation"][0].lower() in str(page.text_content(".headline")).lower()
    spoken = page.get_attribute(".verdict svg", "aria-label") or ""
    best = re.search(r"the best guess is ([+-]\d+)", spoken)
    assert best is not None
    assert abs(int(best[1]) - result["gain"]["point"]) <= 0.5  # a browser rounds halves up, Python to even numbers
    return result


def decide_to_keep(visitor: Visitor, result: dict[str, Any], others: int) -> None:
    """Images whose answer flipped come first; export, report, keep."""
    page, studio = visitor.page, visitor.studio
    page.wait_for_selector(f"section >> text=Of {others} images without a label")
    order = page.eval_on_selector_all(".flips li", "items => items.map(item => item.className)")
    changed, same = order.count("changed"), order.count("same")
    assert changed > 0
    assert order[: changed + same] == ["changed"] * changed + ["same"] * same
    visitor.shot("decide")
    page.click("button:has-text('Export ONNX')")
    page.wait_for_selector(".kept >> text=ONNX")
    outcome = studio.work.need_outcome()
    assert outcome.onnx.read_bytes() == b"onnx of %d" % outcome.delta.stat().st_size
    page.click("button:has-text('Save the report')")
    page.wait_for_selector("text=The report is")
    assert (studio.bench.out / "Camera-7-hall-B-report.html").exists()
    page.click("button:has-text('Keep')")
    page.wait_for_selector(".kept >> text=decision.json")
    decision = json.loads((outcome.folder / "decision.json").read_text("utf-8"))
    assert decision["decision"] == "kept"
    assert fewshift.Delta.load(outcome.delta).outcome["accepted"] is result["accepted"]


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (1200, "light")])
def test_every_step_fits_the_screen_and_names_its_controls(
    visit: Callable[..., Visitor], width: int, scheme: Literal["light", "dark"]
) -> None:
    visitor = visit(width, scheme)
    for step, ready in (("look", ".grid li"), ("label", ".stage *"), ("adapt", ".job *"), ("decide", ".column *")):
        visitor.step(step)
        visitor.page.wait_for_selector(ready)
        assert visitor.page.evaluate(TOO_WIDE) == []
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visitor.page.evaluate(NAMELESS) == []
        if width == PHONE:
            visitor.shot(f"phone-{step}")
    assert visitor.clean(), visitor.logged


def test_thumbnails_are_walked_by_keys_and_labelled_in_place(visit: Callable[..., Visitor], served: Any) -> None:
    studio, _ = served
    visitor = visit()
    page = visitor.page
    page.wait_for_selector(".grid li")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    row = page.evaluate("Number(document.activeElement.closest('li').dataset.number)")
    name, version = studio.bench.gallery[row].name, studio.bench.store.version
    page.keyboard.press("4")
    page.wait_for_function("() => document.querySelector('#status').textContent.includes('saved on disk')")
    assert studio.bench.store.mark(name).label == "4"
    assert studio.bench.store.version == version + 1
    page.keyboard.press("Enter")
    page.wait_for_selector(".stage figcaption")
    assert visitor.image() == name
    page.keyboard.press("?")
    assert page.is_visible("#help-title")
    assert visitor.clean(), visitor.logged


def test_counts_that_were_asked_for_before_a_label_do_not_take_the_label_back(
    visit: Callable[..., Visitor], served: Any
) -> None:
    studio, _ = served
    visitor = visit()
    page = visitor.page
    visitor.step("label")
    page.wait_for_selector(".stage figcaption")
    held: list[Any] = []
    page.route("**/pulse*", lambda route: held.append((route, route.fetch())))
    while not held:
        page.wait_for_timeout(50)
    before = len(studio.bench.store.labels())
    page.keyboard.press("6")
    visitor.saved(before + 1)
    route, late = held[0]
    with page.expect_response("**/pulse*"):
        route.fulfill(response=late)
    page.wait_for_timeout(100)  # the page takes the late counts in
    page.keyboard.press("r")  # it draws the tally again
    assert str(page.text_content("#tally")).startswith(f"{before + 1} label")
    shown = page.eval_on_selector_all(
        ".choice", "rows => rows.map(row => parseInt(row.querySelector('small').textContent))"
    )
    assert shown == list(studio.bench.counts().values())


def test_the_tally_follows_labels_of_another_tab(visit: Callable[..., Visitor], served: Any) -> None:
    studio, _ = served
    visitor = visit()
    visitor.step("label")
    visitor.page.wait_for_selector(".stage figcaption")
    visitor.page.focus("button:has-text('Undo')")
    number = studio.bench.next("elsewhere", "random", 1)[0]["number"]
    studio.bench.mark(
        number, "labelled", "3", studio.bench.record(studio.bench.gallery[number])["version"], "elsewhere"
    )
    visitor.saved(len(studio.bench.store.labels()))
    assert "Undo" in visitor.page.evaluate("document.activeElement.textContent")  # keys stay where they were


def test_two_tabs_do_not_overwrite_each_other(visit: Callable[..., Visitor], served: Any) -> None:
    studio, _ = served
    number = studio.bench.next("elsewhere", "random", 1)[0]["number"]
    name = studio.bench.gallery[number].name
    visitors = [visit(), visit()]
    for visitor in visitors:
        visitor.page.evaluate(f"sessionStorage.setItem('image', {number})")
        visitor.step("label")
        visitor.page.wait_for_selector(".stage figcaption")
        assert visitor.image() == name
    visitors[0].press("1")
    visitors[0].page.wait_for_function("() => document.querySelector('#status').textContent.includes('saved on disk')")
    visitors[1].page.keyboard.press("2")
    visitors[1].page.wait_for_selector("#alerts .alert >> text=changed elsewhere")
    assert studio.bench.store.mark(name).label == "1"
    visitors[1].page.wait_for_function(
        "name => document.querySelector('.stage figcaption')?.textContent === name", arg=name
    )
    assert "1" in str(visitors[1].page.text_content(".now b"))
