"""Who may ask the studio for what: this machine, with the token of the address, from the studio's own page.

- The server listens on 127.0.0.1 alone.
- The address that is opened has a random token; the answer to it sets a cookie (HttpOnly, SameSite=Strict).
- `Host` has to be this server's: a name that someone else points at 127.0.0.1 is refused.
- What changes something has to come from the page itself (`Origin`), as JSON, and is bounded in size.
- NetworkAnswers forbid other sites to frame, sniff or script them.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HERE = "127.0.0.1"
MOST_BYTES = 64 * 1024  # of a request
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Keys:
    """The token of the address, and the value of the cookie that it is exchanged for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.token, self.session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.cookie = f"fewshift-{port}"  # cookies do not tell ports apart

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{HERE}:{self.port}/?token={self.token}"

    def hosts(self) -> tuple[str, ...]:
        """The names of this server."""
        return f"{HERE}:{self.port}", f"localhost:{self.port}"

    def opens(self, scope: Scope) -> bool:
        """Whether a request has the token, or the cookie."""
        tokens = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])
        if scope["path"] == "/" and _same(tokens[0], self.token):
            return True
        jar: SimpleCookie = SimpleCookie()
        for cookie in Headers(scope=scope).getlist("cookie"):
            try:
                jar.load(cookie)
            except CookieError:
                return False
        morsel = jar.get(self.cookie)
        return morsel is not None and _same(morsel.value, self.session)

    def set_cookie(self) -> str:
        """The header that hands out the cookie."""
        return f"{self.cookie}={self.session}; Path=/; HttpOnly; SameSite=Strict"


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


class Guard:
    """Stands before the application and lets through only what may pass."""

    def __init__(self, app: ASGIApp, keys: Keys, most_bytes: int = MOST_BYTES) -> None:
        self.app, self.keys, self.most = app, keys, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with one sentence, or pass on with bounds and headers."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no sockets
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        answer: ASGIApp = self.app if refusal is None else PlainTextResponse(refusal[1], refusal[0])
        await answer(scope, _Bounded(receive, self.most), _with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.keys.hosts():
            return 421, "this server has another name: open the address that fewshift studio printed"
        if origin is not None and origin != f"http://{host}":
            return 403, "the request comes from another page"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            navigates = (
                scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
            )
            if not navigates:
                return 403, "the request comes from another page"
        if not self.keys.opens(scope):
            return 403, "the address has no valid token: open the address that fewshift studio printed"
        return self._bad_change(scope, headers) if scope["method"] not in ("GET", "HEAD") else None

    def _bad_change(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        if scope["method"] != "POST":
            return 405, "there is nothing to do that way"
        if headers.get("origin") is None:
            return 403, "the request does not say which page it comes from"
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "only JSON is taken; files are not"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.most:
            return 413, f"a request has at most {self.most} bytes"
        return None


class _Bounded:
    """Counts what a request brings."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._left = receive, most, most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, f"a request has at most {self._most} bytes")  # more than was announced
        return message


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            added: list[Any] = [(name, value) for name, value in more if name not in present]
            message["headers"] = [*message["headers"], *added]
        await send(message)

    return sending
