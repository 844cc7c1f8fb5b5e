"""The studio as a victim: a person labels, adapts and decides, and the power goes out in between."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.comparison import Facts, digest, is_whole_page, lines, without_timings
from tests.chaos.material import NETWORK
from tests.chaos.processes import PATIENCE, Effort, kill, start
from tests.chaos.victims import MOST_KILLS, Kills

WORDS = ["studio", *NETWORK, "--images", "../flat", "-o", "out", "--no-browser", "--size", "small"]
ADAPTED = "site"
POLLING = 0.1  # seconds
LATEST = 0.5  # seconds between a step and the kill


class PowerCutError(Exception):
    """The studio was killed."""


@dataclass
class Page:
    """What a browser does: the token becomes a cookie, and what is changed comes from the page itself."""

    address: str
    cookie: str = field(init=False, default="")

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        self.host = parts.netloc
        self.cookie = self._send("GET", f"/?{parts.query}")[1]["set-cookie"].partition(";")[0]

    def get(self, name: str, /, **words: Any) -> Any:
        query = "&".join(f"{key}={value}" for key, value in words.items())
        return self._send("GET", f"/api/{name}?{query}")[0]

    def post(self, name: str, /, **facts: Any) -> Any:
        return self._send("POST", f"/api/{name}", json.dumps(facts))[0]

    def _send(self, method: str, path: str, body: str | None = None) -> tuple[Any, dict[str, str]]:
        headers = {"Cookie": self.cookie, "Origin": f"http://{self.host}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise PowerCutError from error
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {content!r}")
        answered = content if path.startswith("/?") else json.loads(content)
        return answered, {key.lower(): value for key, value in response.getheaders()}


class Person:
    """Labels every image by its name, adapts and keeps; knows which labels the page has confirmed."""

    def __init__(self, page: Page, confirmed: dict[str, str], step: Callable[[], None]) -> None:
        self.page, self.confirmed, self.step = page, confirmed, step

    def work(self) -> None:
        rows = self.page.get("images", count=200)["images"]
        for row in sorted(rows, key=lambda row: row["number"]):
            self.label(row)
        self.step()
        if self.page.get("result") is None:
            self.page.post("adapt", name=ADAPTED)
            self.step()
            self.wait()
        self.step()
        if self.page.get("result").get("decision") is None:
            self.page.post("keep")

    def label(self, row: dict[str, Any]) -> None:
        self.step()
        truth = row["name"].split("-")[1]
        if row["state"] == "labelled" and row["label"] == truth:
            return
        self.page.post("mark", number=row["number"], state="labelled", label=truth, base=row["version"], tab="chaos")
        self.confirmed[row["name"]] = truth

    def wait(self) -> None:
        while (job := self.page.get("pulse")["work"]["jobs"]["adapt"])["state"] == "running":
            self.step()
            time.sleep(POLLING)
        if job["state"] != "done":
            raise RuntimeError(f"adapting {job['state']}: {job['sentence']}")


@dataclass(frozen=True)
class StudioVictim:
    """The studio, killed between two steps of a person or shortly after one has begun."""

    name: str = "studio"

    def undisturbed(self, out: Path) -> Effort:
        """Let a person work; steps stand for seconds."""
        steps = _Steps()
        with _opened(out) as (page, _):
            Person(page, {}, steps).work()
        return Effort(1, steps.taken)

    def disturbed(self, out: Path, random: Random, effort: Effort) -> Kills:
        """Kill it, look at what was confirmed, and go on."""
        confirmed: dict[str, str] = {}
        hits = 0
        planned = random.randint(1, MOST_KILLS)
        for _ in range(planned):
            with _opened(out) as (page, process), suppress(PowerCutError):
                steps = _Steps(process, random.randint(1, int(effort.whole)), random.uniform(0, LATEST))
                Person(page, confirmed, steps).work()
            hits += steps.cut
            _check_confirmed(out, confirmed)
        with _opened(out) as (page, _):
            Person(page, confirmed, _Steps()).work()
        _check_confirmed(out, confirmed)
        return Kills(hits, planned - hits)

    def left(self, out: Path) -> Facts:
        """Labels, the delta, the decision; versions of the journal count up by one."""
        journal = list(lines(out / "out/labels.jsonl"))
        place = out / "out" / ADAPTED
        folders = sorted(path.name for path in (out / "out").iterdir() if path.is_dir())
        return {
            "labels": {event["image"]: event["label"] for event in sorted(journal, key=lambda event: event["image"])},
            "versions": [event["version"] for event in journal] == list(range(1, len(journal) + 1)),
            "folders": folders,
            "delta": digest(place / f"{ADAPTED}.safetensors"),
            "page is whole": is_whole_page(place / "report.html"),
            "decisions": [without_timings(line) for line in lines(out / "out/decisions.jsonl")],
        }


class _Steps:
    """Counts what a person does; at one of the steps a timer starts that kills the studio, while the person goes on."""

    def __init__(self, process: subprocess.Popen[str] | None = None, moment: int = 0, later: float = 0.0) -> None:
        self.process, self.moment, self.later = process, moment, later
        self.taken, self.cut = 0, False

    def __call__(self) -> None:
        self.taken += 1
        if self.process is not None and self.taken == self.moment:
            threading.Timer(self.later, self._kill).start()

    def _kill(self) -> None:
        assert self.process is not None
        self.cut = self.process.poll() is None
        kill(self.process)


@contextmanager
def _opened(out: Path) -> Iterator[tuple[Page, subprocess.Popen[str]]]:
    process = start(WORDS, out, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said.startswith("studio: "):
            raise RuntimeError(f"the studio did not open: {said!r}")
        yield Page(said.removeprefix("studio: ").strip()), process
    finally:
        kill(process)
        if process.stdout is not None:
            process.stdout.close()


def _check_confirmed(out: Path, confirmed: dict[str, str]) -> None:
    """What the page has confirmed is on the disk, whatever came then."""
    content = (out / "out/labels.jsonl").read_bytes() if (out / "out/labels.jsonl").exists() else b""
    events = [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    stored = {event["image"]: event["label"] for event in events}
    lost = [image for image, label in confirmed.items() if stored.get(image) != label]
    if lost:
        raise RuntimeError(f"{len(lost)} confirmed labels are not on the disk, the first is {lost[0]}")
