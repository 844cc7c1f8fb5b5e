"""Pages for tests: a parser that sees what a reader sees, and results worth a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift import LCCS, METHODS, Adaptation, Method, Preprocess, Support, adapt
from fewshift.lab.demo import Demo, DemoRow
from fewshift.trust.calibration import calibration_of
from fewshift.trust.evidence import Evidence, Weakness
from fewshift.trust.guard import Rule, Verdict
from fewshift.trust.held_out import ImageAnswers

EVIL = ('<script>alert("1")</script>', '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }} &lt; $x$", "never \udcff seen")
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """What a reader of the page finds: its elements, words, and tags left open or closed twice."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.source = page if isinstance(page, str) else page.read_text("utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self._data: list[str] = []
        self.feed(self.source)
        self.close()
        self.words = " ".join(" ".join(self._data).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self._data.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def network(layers: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [part for _ in range(layers) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, len(EVIL)))
    return model.eval()


def noise(count: int, size: int = 6) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def adapted(method: str | Method = "lccs", model: nn.Module | None = None) -> Adaptation:
    """Two images of each of three classes; the fourth class has none."""
    support = (noise(6), torch.arange(6) % 3)
    return adapt(model or network(), support, method=method, classes=EVIL, validate=None)


def once(method: str | Method = "lccs") -> Adaptation:
    """The same, computed once; do not change it."""
    return _adapted_once(method)


_adapted_once = cache(adapted)


@cache
def bare() -> Adaptation:
    """One layer and no notes: its page has few figures, which take most of the time."""
    return replace(adapted(LCCS(epochs=1), network(layers=1)), notes={}, layers=())


def demonstration() -> Demo:
    example = once()
    rows = (
        DemoRow("source", None, (50.0, 52.0)),
        DemoRow("testtime-bn", None, (51.0, 51.0)),
        DemoRow("lccs", example.support.shots, (60.0, 64.0)),
    )
    pictures = torch.linspace(0, 1, 12 * 16).view(12, 1, 4, 4)
    return Demo(rows, 2, 97.5, pictures, 1 - pictures, 1234, example, 3.0)


def held_out(
    labels: list[int], source: list[int], adapted: list[int], images: list[int] | None = None, classes: int = len(EVIL)
) -> ImageAnswers:
    """Held-out predictions, one per image unless `images` says which image each belongs to."""
    logits = [5 * torch.nn.functional.one_hot(torch.tensor(each), classes).double() for each in (source, adapted)]
    numbers = torch.tensor(images or range(len(labels)))
    return ImageAnswers(numbers, torch.arange(len(labels)) % 2, torch.tensor(labels), *logits)


HELD = held_out([0, 1, 2, 0, 1, 2], [0, 1, 3, 3, 3, 2], [1, 1, 2, 2, 3, 2])  # one lost, one won, one still wrong
STEPS = Preprocess(None, None, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
BYTES = torch.randint(0, 256, (6, 3, 6, 6), generator=torch.Generator().manual_seed(0)).byte()


def with_evidence(
    held: ImageAnswers = HELD, result: Adaptation | None = None, *, weak: bool = False, **facts: Any
) -> Adaptation:
    """An adaptation as if these had been its held-out predictions, on these pixels."""
    evidence = Evidence(held.gain(weak=weak), held, weakness=Weakness.ONE_SHOT if weak else None)
    pictures = Support(STEPS.normalise(BYTES), torch.arange(6) % 3, EVIL)
    known = {"verdict": Verdict(True, Rule.STRENGTH), "support": pictures, "preprocess": STEPS}
    return replace(result or bare(), evidence=evidence, calibration=calibration_of(held), **(known | facts))


def rejected() -> Adaptation:
    support = (noise(6), torch.arange(6) % 3)
    return adapt(network(), support, method=LCCS(grid=3, epochs=1), classes=EVIL, accept=1000)


def of_vectors() -> Adaptation:
    """Numbers that are no pictures."""
    generator = torch.Generator().manual_seed(2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    support = (torch.randn(12, 5, generator=generator) + 1, torch.arange(12) % 2)
    return adapt(model, support, method=METHODS["finetune-head"](epochs=20, lr=1.0), accept="always")


def of_many_classes(classes: int = 100) -> Adaptation:
    """Random predictions, but for some that are always the same."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(200) % classes
    before, after = (torch.randint(classes, (200,), generator=generator) for _ in range(2))
    before[:40], after[:80] = 7, 9
    held = held_out(labels.tolist(), before.tolist(), after.tolist(), classes=classes)
    return with_evidence(held, classes=None, support=Support(noise(200), labels))


def on_labelled() -> Adaptation:
    labelled = Support(STEPS.normalise(255 - BYTES), torch.arange(6) % 3, EVIL)
    return with_evidence(validation=labelled)


def of_forty_pictures() -> Adaptation:
    support = Support(noise(40, 160), torch.arange(40) % 3, EVIL)
    return with_evidence(held_out([0] * 40, [0] * 40, [1] * 40), support=support)


def without_labels() -> Adaptation:
    return adapt(network(), None, method="adabn", unlabelled=noise(6), classes=EVIL)


JUDGED: dict[str, Callable[[], Adaptation]] = {
    "evidence": lambda: with_evidence(result=once()),
    "rejected": cache(rejected),
    "weak": lambda: with_evidence(weak=True),
    "unnamed": lambda: with_evidence(classes=None),
    "vectors": of_vectors,
    "many classes": of_many_classes,
    "labelled": on_labelled,
    "forty": of_forty_pictures,
    "unlabelled": without_labels,
}
