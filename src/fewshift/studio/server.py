"""The web side: which address answers what. Whatever takes time happens off the event loop."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_json
from fewshift.studio.adapting import Adaptations
from fewshift.studio.labels_store import ConflictError
from fewshift.studio.scene_pictures import labelled_picture
from fewshift.studio.security import REPORT_POLICY, Guard, Keys
from fewshift.studio.thumbnails import SIDES, SmallPicture, Thumbnails, encoded_picture, small_picture
from fewshift.studio.workbench import WANTED, Workbench

STATIC = files("fewshift.studio") / "static"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
MOST_ROWS = 200  # of one answer
MOST_NEXT = 8

Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """JSON in ASCII: names of files may hold bytes that are no text."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The text of a value."""
        return json.dumps(content).encode("ascii")


def application(bench: Workbench, work: Adaptations, keys: Keys) -> Guard:
    """The application, behind its guard."""
    pages, asked, done = _Pages(bench, work, keys), _Questions(bench, work), _Changes(bench, work)
    routes = [
        Route("/", pages.page),
        Route("/static/{name}", pages.static),
        Route("/picture/{number:int}", pages.picture),
        Route("/scene/{when}/{number:int}", pages.scene),
        Route("/report", pages.report),
        *(Route(f"/api/{name}", _answering(getattr(asked, name))) for name in _public(asked)),
        *(Route(f"/api/{name}", _changing(getattr(done, name)), methods=["POST"]) for name in _public(done)),
    ]
    return Guard(Starlette(routes=routes), keys)


def _public(thing: object) -> list[str]:
    return [name for name in vars(type(thing)) if not name.startswith("_")]


def _answering(answer: Callable[[dict[str, str]], Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await _said(partial(answer, dict(request.query_params)))

    return endpoint


def _changing(change: Callable[[dict[str, Any]], Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            facts = parsed_json(await request.body() or b"{}", "the request", "load the page again")
        except FewshiftError as error:
            return PlainTextResponse(str(error), 400)
        if not isinstance(facts, dict):
            return PlainTextResponse("the request is no JSON object", 400)
        return await _said(partial(change, facts))

    return endpoint


async def _said(answer: Callable[[], Any]) -> Response:
    """The answer, or one sentence about a mistake."""
    try:
        return JsonResponse(await run_in_threadpool(answer))
    except ConflictError as error:
        return JsonResponse({"error": str(error), "conflict": True}, 409)
    except FewshiftError as error:
        return JsonResponse({"error": str(error)}, 400)
    except (KeyError, ValueError, TypeError, IndexError):
        return JsonResponse({"error": "the request cannot be understood: load the page again"}, 400)


class _Pages:
    """The page itself, and pictures."""

    def __init__(self, bench: Workbench, work: Adaptations, keys: Keys) -> None:
        self.bench, self.work, self.keys = bench, work, keys
        self.thumbnails = Thumbnails()

    async def page(self, request: Request) -> Response:
        content = (STATIC / "index.html").read_bytes()
        headers = {"Set-Cookie": self.keys.set_cookie(), "Cache-Control": "no-store"}
        return Response(content, media_type="text/html", headers=headers)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in {file.name for file in STATIC.iterdir()}:
            return PlainTextResponse("no such file", 404)
        kind = KINDS[name.rpartition(".")[2]]
        return Response((STATIC / name).read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})

    async def picture(self, request: Request) -> Response:
        number, size = request.path_params["number"], request.query_params.get("size", "small")
        if not 0 <= number < len(self.bench.gallery) or size not in SIDES:
            return PlainTextResponse("no such picture", 404)
        labels = request.query_params.get("labels") == "1"
        made = await run_in_threadpool(self._made, number, size, labels)
        if isinstance(made, str):
            content = (STATIC / "unreadable.svg").read_bytes()  # an error would only fill the browser's console
            return Response(
                content, media_type="image/svg+xml", headers={"Cache-Control": "no-store", "X-Unreadable": "1"}
            )
        return Response(made.content, media_type=made.kind, headers={"Cache-Control": "private, max-age=3600"})

    def _made(self, number: int, size: str, labels: bool) -> SmallPicture | str:
        """The picture, or why there is none."""
        gallery, scenes = self.bench.gallery, self.bench.scenes
        try:
            file = gallery.opened_file(number)
            key, label_file = (number, size, file.stat().st_mtime_ns), gallery.label_file(number)
            if labels and label_file is not None and scenes is not None:
                draw = partial(labelled_picture, file, label_file, scenes.encoding, scenes.palette, SIDES[size])
                return self.thumbnails.get((key, label_file.stat().st_mtime_ns), lambda: encoded_picture(draw()))
            return self.thumbnails.get(key, lambda: small_picture(file, size))
        except (FewshiftError, OSError) as error:
            why = str(error)
            self.bench.answers.broken[number] = why
            return why

    async def scene(self, request: Request) -> Response:
        when, number, outcome = request.path_params["when"], request.path_params["number"], self.work.outcome
        if outcome is None or when not in ("before", "after") or number >= len(outcome.scenes):
            return PlainTextResponse("no such picture", 404)
        content = await run_in_threadpool((outcome.folder / f"{when}-{number}.jpg").read_bytes)
        return Response(content, media_type="image/jpeg", headers={"Cache-Control": "no-store"})

    async def report(self, request: Request) -> Response:
        outcome = self.work.outcome
        if outcome is None:
            return PlainTextResponse("there is no report: adapt first", 404)
        headers = {"Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
        content = await run_in_threadpool(outcome.report.read_bytes)
        return Response(content, media_type="text/html", headers=headers)


class _Questions:
    """What the page asks; nothing is changed by it."""

    def __init__(self, bench: Workbench, work: Adaptations) -> None:
        self._bench, self._work = bench, work

    def studio(self, asked: dict[str, str]) -> dict[str, Any]:
        bench = self._bench
        return {
            "folder": _from_here(bench.gallery.folder),
            "out": _from_here(bench.out),
            "name": bench.gallery.folder.name,
            "network": bench.network,
            "classes": list(bench.classes),
            "wanted": WANTED,
            "pixels": bench.scenes is not None,
            "palette": [] if bench.scenes is None else [list(colour) for colour in bench.scenes.palette],
            "taken_in": bench.taken_in,
        }

    def pulse(self, asked: dict[str, str]) -> dict[str, Any]:
        bench = self._bench
        bench.answers.start()
        changed = bench.store.changed_since(int(asked.get("since", 0)))
        numbers = [bench.gallery.number_of(bench.gallery.root / name) for name in changed[-MOST_ROWS:]]
        return {
            "version": bench.store.version,
            "changed": [number for number in numbers if number is not None],
            "counts": bench.counts(),
            "tally": bench.tally(),
            "note": bench.gallery.note,
            "answers": bench.answers.to_json(),
            "work": self._work.to_json(),
        }

    def images(self, asked: dict[str, str]) -> dict[str, Any]:
        start, count = max(0, int(asked.get("start", 0))), min(MOST_ROWS, max(0, int(asked.get("count", 60))))
        words = {key: asked[key] for key in ("show", "label", "sort", "query") if key in asked}
        return self._bench.listing(start, count, **words)

    def image(self, asked: dict[str, str]) -> dict[str, Any]:
        return self._bench.details(self._number(asked["number"]))

    def next(self, asked: dict[str, str]) -> list[dict[str, Any]]:
        count = min(MOST_NEXT, max(1, int(asked.get("count", 1))))
        without = [int(number) for number in asked.get("without", "").split(",") if number]
        return self._bench.next(asked["tab"], asked.get("mode", "spread"), count, without)

    def result(self, asked: dict[str, str]) -> dict[str, Any] | None:
        return self._work.result()

    def flips(self, asked: dict[str, str]) -> dict[str, Any]:
        count = min(MOST_ROWS, max(0, int(asked.get("count", 24))))
        return self._work.flips(max(0, int(asked.get("start", 0))), count)

    def _number(self, text: str) -> int:
        number = int(text)
        if not 0 <= number < len(self._bench.gallery):
            raise IndexError(number)
        return number


def _from_here(path: Path) -> str:
    """A path as a person at the terminal would write it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path != here and path.is_relative_to(here) else str(path)


class _Changes:
    """What the page does."""

    def __init__(self, bench: Workbench, work: Adaptations) -> None:
        self._bench, self._work = bench, work

    def mark(self, facts: dict[str, Any]) -> dict[str, Any]:
        number, label = int(facts["number"]), facts.get("label")
        if not 0 <= number < len(self._bench.gallery) or not isinstance(label, str | None):
            raise IndexError(number)
        return self._bench.mark(number, str(facts["state"]), label, int(facts["base"]), str(facts["tab"])[:64])

    def undo(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        return self._bench.undo(str(facts["tab"])[:64])

    def again(self, facts: dict[str, Any]) -> dict[str, int]:
        return {"new": self._bench.look_again()}

    def write(self, facts: dict[str, Any]) -> dict[str, str]:
        return {"path": str(self._bench.write_labels(str(facts["form"])))}

    def adapt(self, facts: dict[str, Any]) -> dict[str, Any]:
        self._work.adapt(str(facts.get("name", "")), unlabelled=bool(facts.get("unlabelled")))
        return self._work.to_json()

    def curve(self, facts: dict[str, Any]) -> dict[str, Any]:
        self._work.measure_curve()
        return self._work.to_json()

    def stop(self, facts: dict[str, Any]) -> dict[str, Any]:
        self._work.stop(str(facts["what"]))
        return self._work.to_json()

    def keep(self, facts: dict[str, Any]) -> dict[str, Any]:
        return self._work.keep()

    def throw(self, facts: dict[str, Any]) -> dict[str, Any]:
        return self._work.throw_away()

    def export(self, facts: dict[str, Any]) -> dict[str, Any]:
        self._work.export()
        return self._work.to_json()

    def report(self, facts: dict[str, Any]) -> dict[str, str]:
        return {"path": str(self._work.save_report())}
