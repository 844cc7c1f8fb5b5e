"""The server of the studio: it listens on this machine alone, in this thread or in one of its own."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from torch import nn

from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps
from fewshift.images.preprocess import as_steps
from fewshift.studio.adapting import Adaptations
from fewshift.studio.security import HERE, Keys
from fewshift.studio.server import application
from fewshift.studio.tasks import EXPORT
from fewshift.studio.workbench import Workbench

STARTING = 20.0  # seconds
BACKLOG = 128


class Studio:
    """A running studio: `address` is what a browser opens. Use it in a `with` block, or call `close`."""

    def __init__(
        self,
        model: nn.Module,
        images: str | Path,
        *,
        labels: str | Path | None = None,
        out: str | Path | None = None,
        classes: Sequence[str] | None = None,
        preprocess: Steps = None,
        port: int = 0,
        options: Mapping[str, Any] | None = None,
        origin: Mapping[str, str] | None = None,
        exporter: str = EXPORT,
        seed: int | None = None,
    ) -> None:
        self._socket = listening(port)
        try:
            steps = as_steps(preprocess)
            self.bench = Workbench(model, images, labels=labels, out=out, classes=classes, preprocess=steps, seed=seed)
        except BaseException:
            self._socket.close()
            raise
        self.work = Adaptations(self.bench, options=options, origin=origin, exporter=exporter)
        self.keys = Keys(self._socket.getsockname()[1])
        config = uvicorn.Config(
            application(self.bench, self.work, self.keys),
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """What a browser opens; the token in it is new for each start."""
        return self.keys.address

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self.bench.answers.start()
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def start(self) -> Self:
        """Serve in a thread of its own."""
        self.bench.answers.start()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(STARTING)
        return self

    def written(self, form: str) -> Path:
        """Write the labels as "csv", "label-studio", "folders" or "links", and close; nothing is served."""
        try:
            return self.bench.write_labels(form)
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving and everything that runs in the background; labels are on disk already."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STARTING)
            self._thread = None
        self.work.close()
        self.bench.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _serve(self, ready: threading.Event) -> None:
        async def serve() -> None:
            task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.01)
            ready.set()
            await task

        asyncio.run(serve())


def listening(port: int) -> socket.socket:
    """A socket of this machine alone; 0 takes any free port."""
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise FewshiftError(f"port={port!r} is no port: give 0 for any free one, or 1024 to {2**16 - 1}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HERE, port))
        listener.listen(BACKLOG)  # a browser that comes before the server waits
    except OSError as error:
        listener.close()
        raise FewshiftError(
            f"port {port} cannot be used ({error.strerror}): leave it out, or choose another"
        ) from error
    return listener


def open_page(studio: Studio, *, browser: bool, tell: Callable[[str], None] | None = None) -> None:
    """Say where the page is, and let the browser of this machine open it."""
    (tell or (lambda line: print(line, file=sys.stderr, flush=True)))(studio.address)
    if browser:
        threading.Thread(target=webbrowser.open, args=(studio.address,), daemon=True).start()
