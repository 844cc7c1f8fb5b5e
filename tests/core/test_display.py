"""Results at a glance: short in a terminal, a card in a notebook, never a tensor; bars where the user looks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import fewshift
from tests.helpers.networks import make_support, make_tiny

CLASSES = ["<b>ant</b>", "bee", "cat"]


@pytest.fixture(scope="module")
def results():
    model, support = make_tiny(), make_support()
    result = fewshift.adapt(model, support, classes=CLASSES)
    return {
        "adaptation": result,
        "delta": result.delta,
        "support": result.support,
        "inspection": fewshift.inspect(model, size=8),
        "comparison": fewshift.compare(model, support, ["source", "adabn"]),
        "curve": fewshift.learning_curve(model, support, method="adabn", shots=[1, 2]),
        "shift": fewshift.shift(model, support.images),
        "evaluation": fewshift.evaluate(model, support, classes=CLASSES),
    }


KINDS = ["adaptation", "delta", "support", "inspection", "comparison", "curve", "shift", "evaluation"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_a_few_lines_without_tensors(results, kind):
    text = repr(results[kind])
    assert len(text) < 1500
    assert len(text.splitlines()) <= 15
    assert "tensor(" not in text
    assert repr(results[kind]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_notebook_shows_the_same_facts_as_a_card(results, kind):
    page = results[kind]._repr_html_()
    assert len(page) < 5000
    assert "<table>" in page
    assert "<b>ant" not in page


def test_an_adaptation_says_verdict_gain_and_size(results):
    result = results["adaptation"]
    text = repr(result)
    assert result.recommendation.advice.value in text.splitlines()[0]
    assert f"{result.gain.point:+.1f} points" in text
    assert f"{len(result.delta.bits)} tensors" in text


def test_a_rejected_or_unplain_adaptation_has_a_repr_too():
    model, support = make_tiny(), make_support()
    rejected = fewshift.adapt(model, support, method="adabn", accept=200)
    assert "not recommended" in repr(rejected)
    assert "late-fusion" in repr(fewshift.adapt(model, support, method="late-fusion", validate=None))


def shown(monkeypatch, call):
    """What a notebook was asked to display while `call` ran."""
    pages: list[str] = []
    handle = SimpleNamespace(update=pages.append)
    display = SimpleNamespace(HTML=str, display=lambda page, display_id: handle)
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    call()
    return pages


@pytest.mark.parametrize(
    "call",
    [
        lambda: fewshift.adapt(make_tiny(), make_support(), progress=True),
        lambda: fewshift.compare(make_tiny(), make_support(), ["source", "adabn"], progress=True),
        lambda: fewshift.shift(make_tiny(), make_support().images, progress=True),
    ],
)
def test_progress_shows_bars_in_a_notebook_and_clears_them(monkeypatch, call):
    pages = shown(monkeypatch, call)
    assert any("<progress" in page for page in pages)
    assert pages[-1] == ""


def test_progress_in_a_terminal_is_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    fewshift.adapt(make_tiny(), make_support(), progress=True)
    written = capsys.readouterr()
    assert "adapting" in written.err
    assert written.out == ""


def test_without_progress_nothing_is_written(capsys):
    for progress in (None, False):
        fewshift.adapt(make_tiny(), make_support(), method="adabn", progress=progress)
    assert capsys.readouterr() == ("", "")
