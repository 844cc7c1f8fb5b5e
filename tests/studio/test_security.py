"""The studio is for this machine and its own page alone."""

from __future__ import annotations

import json
import socket

import pytest

from fewshift.errors import FewshiftError
from fewshift.studio.security import MOST_BYTES, Keys
from fewshift.studio.serving import listening
from tests.helpers.studio import Client

MARK = json.dumps({"number": 0, "state": "skipped", "label": None, "base": 0, "tab": "t"}).encode()


def test_it_listens_on_this_machine_alone(quiet_studio: Client) -> None:
    port = quiet_studio.studio.keys.port
    assert quiet_studio.studio._socket.getsockname() == ("127.0.0.1", port)
    with socket.socket() as caller, pytest.raises(OSError, match="refused"):
        caller.connect(("127.0.0.2", port))


def test_a_port_that_is_taken_is_one_sentence(quiet_studio: Client) -> None:
    with pytest.raises(FewshiftError, match="cannot be used"):
        listening(quiet_studio.studio.keys.port)


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/api/studio", "/picture/0", "/static/main.js", "/report"])
def test_nothing_is_answered_without_the_token(quiet_studio: Client, path: str) -> None:
    status, headers, content = quiet_studio.send("GET", path, Cookie=None)
    assert status == 403
    assert b"token" in content
    assert "set-cookie" not in headers


def test_the_token_of_the_address_is_exchanged_for_a_cookie(quiet_studio: Client) -> None:
    keys = quiet_studio.studio.keys
    assert keys.address == f"http://127.0.0.1:{keys.port}/?token={keys.token}"
    status, headers, _ = quiet_studio.send("GET", f"/?token={keys.token}", Cookie=None)
    cookie, *options = headers["set-cookie"].split("; ")
    assert status == 200
    assert keys.token not in cookie
    assert {"HttpOnly", "SameSite=Strict"} <= set(options)
    assert quiet_studio.send("GET", "/api/studio", Cookie=cookie)[0] == 200
    assert quiet_studio.send("GET", "/api/studio", Cookie=cookie + "x")[0] == 403
    assert quiet_studio.send("GET", f"/api/studio?token={keys.token}", Cookie=None)[0] == 403


def test_every_start_has_a_token_of_its_own() -> None:
    tokens = {Keys(8000).token for _ in range(100)} | {Keys(8000).session for _ in range(100)}
    assert len(tokens) == 200
    assert all(len(token) >= 43 for token in tokens)  # 256 bits


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}", ""]
)
def test_another_name_for_this_machine_is_refused(quiet_studio: Client, host: str) -> None:
    named = host.format(port=quiet_studio.studio.keys.port)
    assert quiet_studio.send("GET", "/api/studio", Host=named)[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "https://{host}", "http://127.0.0.1:1", "null"])
def test_another_page_can_neither_ask_nor_change(quiet_studio: Client, origin: str) -> None:
    named = origin.format(host=quiet_studio.host)
    assert quiet_studio.send("POST", "/api/mark", MARK, Origin=named)[0] == 403
    assert quiet_studio.send("GET", "/api/studio", Origin=named)[0] == 403
    assert quiet_studio.studio.bench.store.version == 0


def test_a_change_says_which_page_it_comes_from(quiet_studio: Client) -> None:
    assert quiet_studio.send("POST", "/api/mark", MARK, Origin=None)[0] == 403
    assert quiet_studio.send("POST", "/api/mark", MARK, Sec_Fetch_Site="cross-site")[0] == 403
    assert quiet_studio.send("GET", "/picture/0", Sec_Fetch_Site="cross-site")[0] == 403
    assert quiet_studio.studio.bench.store.version == 0


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/%252e%252e%252fserver.py",
        "/static//etc/passwd",
        "/picture/../../secret.png",
        "/picture/..%2f..%2fsecret.png",
        "/picture/-1",
        "/picture/999",
        "/picture/0?size=../../secret",
        "/scene/before/0",
        "/scene/..%2f..%2fsecret/0",
        "/etc/passwd",
    ],
)
def test_no_path_leads_outside(quiet_studio: Client, path: str) -> None:
    assert quiet_studio.send("GET", path)[0] == 404


def test_a_link_that_leads_outside_is_shown_as_unreadable(quiet_studio: Client) -> None:
    gallery = quiet_studio.studio.bench.gallery
    number = gallery.number_of(gallery.root / "link.png")
    status, headers, content = quiet_studio.send("GET", f"/picture/{number}")
    assert (status, headers["x-unreadable"]) == (200, "1")
    assert b"<svg" in content
    assert "outside the folder" in quiet_studio.get(f"/api/image?number={number}")["broken"]


def test_an_image_that_cannot_be_read_is_shown_as_such(quiet_studio: Client) -> None:
    gallery = quiet_studio.studio.bench.gallery
    number = gallery.number_of(gallery.root / "noise.png")
    _, headers, _ = quiet_studio.send("GET", f"/picture/{number}")
    assert headers["x-unreadable"] == "1"
    assert "not an image" in quiet_studio.get(f"/api/image?number={number}")["broken"]
    listed = quiet_studio.get("/api/images?show=unreadable")
    assert "noise.png" in {image["name"] for image in listed["images"]}


@pytest.mark.parametrize(
    ("method", "kind", "status"),
    [
        ("POST", "multipart/form-data; boundary=x", 415),
        ("POST", "image/png", 415),
        ("POST", "text/plain", 415),
        ("PUT", "application/json", 405),
        ("DELETE", "application/json", 405),
    ],
)
def test_uploads_are_refused(quiet_studio: Client, method: str, kind: str, status: int) -> None:
    assert quiet_studio.send(method, "/api/mark", b"content", Content_Type=kind)[0] == status


def test_requests_are_bounded(quiet_studio: Client) -> None:
    large = b'{"tab": "' + b"x" * MOST_BYTES + b'"}'
    assert quiet_studio.send("POST", "/api/undo", large)[0] == 413
    chunk = b"%x\r\n" % len(large) + large + b"\r\n0\r\n\r\n"
    status, _, _ = quiet_studio.send("POST", "/api/undo", chunk, Content_Length=None, Transfer_Encoding="chunked")
    assert status == 413
    assert quiet_studio.send("POST", "/api/undo", b'{"tab": "x"}')[0] == 200


@pytest.mark.parametrize(
    "body", [b"no json", b"[1]", b'{"number": "x"}', b'{"number": 0}', b'{"number": -1, "state": "skipped"}']
)
def test_a_request_that_makes_no_sense_is_a_sentence(quiet_studio: Client, body: bytes) -> None:
    status, _, content = quiet_studio.send("POST", "/api/mark", body)
    assert status == 400
    assert b"Traceback" not in content


@pytest.mark.parametrize("path", ["/", "/api/studio", "/static/main.js", "/picture/0", "/nowhere"])
def test_every_answer_forbids_other_sites_to_use_it(quiet_studio: Client, path: str) -> None:
    _, headers, _ = quiet_studio.send("GET", path)
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
