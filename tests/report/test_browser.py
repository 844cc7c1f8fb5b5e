"""Pages in a real browser: everything is drawn, fits a phone, and nothing is logged or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from fewshift.report.pages import adaptation_page, demo_page
from tests.helpers.browser import Tab
from tests.helpers.fleet import fleet_of
from tests.helpers.pages import JUDGED, demonstration

INK = {"light": "rgb(28, 28, 32)", "dark": "rgb(231, 229, 224)"}

UNDRAWN = """[
  ...[...document.querySelectorAll('svg')].filter(svg => {
    const box = svg.getBoundingClientRect();
    return !(box.width > 50 && box.height > 30 && svg.getBBox().width > 0);
  }).map(svg => svg.getAttribute('aria-label')),
  ...[...document.images].filter(image => !(image.complete && image.naturalWidth > 0)).map(image => image.alt),
]"""
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(element =>
  !element.parentElement.closest('.box, pre, svg') && element.getBoundingClientRect().right > screen.width + 0.5
).map(element => element.outerHTML.slice(0, 120))"""
CLIPPED = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map(text => text.textContent + ' in: ' + svg.getAttribute('aria-label').slice(0, 60));
})"""
SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll('svg text')].map(text => text.getBBox().height
  * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width))"""

COLOURS = """[...document.querySelectorAll('svg')].map(svg => svg.querySelector('text'))
  .filter(Boolean).map(text => getComputedStyle(text).fill)"""


@pytest.fixture(scope="module", params=["run", "demo", "fleet", "evidence", "many classes", "forty"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, browser: object) -> Path:
    if request.param == "run":
        return request.getfixturevalue("page_of_all_grids")
    folder = tmp_path_factory.mktemp("pages")
    if request.param == "demo":
        return demo_page(demonstration(), folder / "demo.html")
    if request.param == "fleet":
        return fleet_of(30).report(folder / "fleet.html")
    return adaptation_page(JUDGED[request.param](), folder / "adaptation.html")


@pytest.mark.parametrize("width", [390, 1200])
def test_every_figure_is_drawn_and_no_word_of_it_is_cut_off(tab: Tab, page: Path, width: int) -> None:
    tab.open(page, width)
    assert tab.value("document.querySelectorAll('figure svg, figure img').length") > 0
    assert tab.value(UNDRAWN) == []
    assert tab.value(CLIPPED) == []


def test_a_phone_shows_all_without_scrolling_sideways(tab: Tab, page: Path) -> None:
    tab.open(page, 390)
    assert tab.value("window.innerWidth") == 390
    assert tab.value(TOO_WIDE) == []
    assert tab.value("document.documentElement.scrollWidth") <= 390
    assert tab.value(SMALLEST_LETTERS) > 7


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_logged_or_loaded_and_figures_follow_the_theme(tab: Tab, page: Path, scheme: str) -> None:
    tab.open(page, 1200, scheme)
    assert tab.loaded == [page.as_uri()]
    assert tab.logged == []
    assert all(colour == INK[scheme] for colour in tab.value(COLOURS))


def test_the_checks_would_notice(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><meta name="viewport" content="width=device-width"><img src="gone.png" alt="gone">'
        '<svg viewBox="0 0 9 9" width="0" height="0" aria-label="empty"></svg>'
        '<svg viewBox="0 0 60 40" width="60" height="40" aria-label="cut"><text x="50" y="20">cut off</text></svg>'
        '<div style="width: 900px">wide</div><script>console.log("logged"); missing()</script>'
    )
    tab.open(page, 390)
    assert tab.value(UNDRAWN) == ["empty", "gone"]
    assert tab.value(CLIPPED) == ["cut off in: cut"]
    assert len(tab.value(TOO_WIDE)) == 1
    assert "logged" in tab.logged
    assert any("missing" in line for line in tab.logged)
    assert len(tab.loaded) == 2
