"""Folders of digits for the studio, a plain HTTP client for its server, and tasks that go wrong."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fewshift.errors import FewshiftError
from fewshift.lab.datasets import digits
from fewshift.studio.serving import Studio
from fewshift.studio.tasks import Send


def write_digits(folder: Path, each: int, suffix: str = "png") -> dict[str, str]:
    """So many UCI digits of each kind, in a mixed order; the class of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = digits.uci()
    chosen = [int(at) for label in range(10) for at in (labels == label).nonzero().flatten()[:each]]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0)).tolist()
    truth = {}
    for number, place in enumerate(order):
        name = f"form-{number:03d}.{suffix}"
        Image.fromarray((images[chosen[place], 0] * 255).byte().numpy()).save(folder / name)
        truth[name] = str(int(labels[chosen[place]]))
    return truth


@dataclass
class Client:
    """Asks a studio over HTTP, with its cookie and from its own page unless told otherwise."""

    studio: Studio
    cookie: str = field(init=False)

    def __post_init__(self) -> None:
        keys = self.studio.keys
        self.cookie = f"{keys.cookie}={keys.session}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.studio.keys.port}"

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content; a header that is None is left out."""
        usual: dict[str, str | None] = {"Host": self.host, "Cookie": self.cookie}
        if method != "GET":
            usual |= {"Origin": f"http://{self.host}", "Content-Type": "application/json"}
        usual |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.studio.keys.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None:
                usual.setdefault("Content-Length", str(len(body)))
            for name, value in usual.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, _, content = self.send("GET", path)
        assert status == 200, content
        return json.loads(content)

    def post(self, path: str, **facts: Any) -> tuple[int, Any]:
        status, _, content = self.send("POST", path, json.dumps(facts).encode())
        return status, json.loads(content)


@dataclass(frozen=True)
class Speaks:
    """Sends what it was given."""

    messages: tuple[tuple[Any, ...], ...]

    def work(self, send: Send) -> None:
        for message in self.messages:
            send(message)


class Refuses:
    """Raises a sentence."""

    def work(self, send: Send) -> None:
        raise FewshiftError("there are no labels: label some")


class Crashes:
    """Raises what nobody expects."""

    def work(self, send: Send) -> None:
        raise ZeroDivisionError("by zero")


class IsKilled:
    """Ends like a process that takes too much memory."""

    def work(self, send: Send) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleeps:
    """Takes longer than anyone waits."""

    def work(self, send: Send) -> None:
        send(("stage", "asleep"))
        time.sleep(600)


def fake_export(model: torch.nn.Module, path: Path, *, delta: Path) -> None:
    """Stands for `fewshift.export`."""
    assert isinstance(model, torch.nn.Module)
    path.write_bytes(b"onnx of " + str(len(delta.read_bytes())).encode())
