"""Hostile requests and hostile content, with what each gets."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install '.[serve]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")

from report_cases import Parsed
from serve_cases import HOSTILE, Client, finished_run, marks_in, pages_in, served

from trak_lite.serve.guard import MOST_BYTES
from trak_lite.serve.marks import Mark

FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("ran"))


@pytest.fixture(scope="module")
def client(ran: Path) -> Iterator[Client]:
    with served(pages_in(ran)) as opened:
        yield opened


@pytest.fixture
def token(client: Client) -> str:
    return re.search('name="token" value="([^"]+)"', client.get("/").text)[1]


PAGES = ["/", "/?target=1", "/review", "/?target=99", "/nowhere", "/?set=%3Cscript%3Ealert(1)%3C/script%3E"]


@pytest.mark.parametrize("path", PAGES)
def test_html_in_rows_labels_and_parameters_is_text(client: Client, path: str) -> None:
    answer = client.get(path)
    page = Parsed(answer.text)

    assert [name for name, _ in page.elements].count("script") == 1
    assert not [found for _, found in page.elements if any(key.startswith("on") for key in found)]
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    if path == "/?target=1":
        assert HOSTILE in page.text  # as the target's text
        assert page.all("option", value=HOSTILE)


@pytest.mark.parametrize("path", [*PAGES, "/marks.csv"])
def test_every_answer_allows_nothing_but_this_server_and_its_own_script(client: Client, path: str) -> None:
    answer = client.get(path)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))

    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == policy["form-action"] == "'self'"
    assert not re.search(r"unsafe|\*|https?:", answer.headers["content-security-policy"])
    for kind in ("style", "script"):
        for inside in re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.S):
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy[f"{kind}-src"].split()
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/marks.csv/../../etc/passwd",
        "/review/..%5c..%5cetc",
        "/%00",
        "/?set=../../etc/passwd",
        "/?set=ckpt-0",
        "/review?set=%2Fetc%2Fpasswd",
        "/static/x.js",
    ],
)
def test_tricks_with_paths_lead_nowhere(client: Client, path: str) -> None:
    answer = client.request("GET", path)
    assert answer.status == 404
    assert "root:" not in answer.text


HUGE = "9" * 5000
NO_NUMBERS = [
    HUGE,
    f"-{HUGE}",
    "-1",
    "-0",
    "1e3",
    "\u0663",
    "\0",
    "1\0",
    " 1",
    "1_0",
    "0x1",
    "nan",
    "\ud7ff",
    "<b>",
]
NO_NAMES = [HUGE, "-1", "\u0663", "\0", "held-out\0", "..", "<b>"]
WRONG = {
    "/?": {
        "target": [*NO_NUMBERS, "6"],
        "from": NO_NUMBERS,
        "set": NO_NAMES,
        "text": ["x" * 9000, " "],
    },
    "/?target=0&": {"k": [*NO_NUMBERS, "0", "51"], "where-\0": ["x"], "where-": ["x"], "where-no": ["1"]},
    "/review?": {
        "done": [*NO_NUMBERS, "40"],
        "from": NO_NUMBERS,
        "set": NO_NAMES,
        "show": NO_NAMES,
        "where-no": ["1"],
    },
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in WRONG.items() for name in names])
def test_wrong_parameters_get_400_or_404_and_a_sentence(client: Client, path: str, name: str) -> None:
    values = WRONG[path][name]
    queries = [*(urlencode({name: value}) for value in values), urlencode([(name, "0"), (name, "0")])]
    for query in queries:
        answer = client.get(f"{path}{query}")
        assert answer.status in (400, 404), query[:80]
        assert re.search('id="status"[^>]*>[^<]{20,}', answer.text), query[:80]


@pytest.mark.parametrize("name", ["row", "mark", "label"])
def test_wrong_fields_of_a_mark_get_400_or_404_and_change_nothing(
    client: Client, ran: Path, token: str, name: str
) -> None:
    right = {"token": token, "row": "1", "mark": "flip", "label": "2"}
    wrong = {"row": [*NO_NUMBERS, "40", ""], "mark": [*NO_NAMES, ""], "label": ["x" * 201]}[name]
    bodies = [urlencode({**right, name: value}) for value in wrong]
    bodies.append(urlencode([*right.items(), (name, "3")]))
    if name != "label":
        bodies.append(urlencode({key: value for key, value in right.items() if key != name}))
    for body in bodies:
        answer = client.request("POST", "/mark", body.encode(), {"Content-Type": FORM})
        assert answer.status in (400, 404), body[:99]
    assert marks_in(ran) == {}


def test_values_that_match_nothing_are_no_failure(client: Client) -> None:
    for value in [*NO_NUMBERS, f"0.{HUGE}", "1e999", "-inf", "\ufffe"]:
        for path in ("/?target=0&", "/review?"):
            assert client.get(f"{path}{urlencode({'where-label': value})}").status == 200, value[:20]


@pytest.mark.parametrize("kind", ["pipe", "link", "rows"])
def test_marks_that_cannot_be_read_are_said_and_block_no_page(ran: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(ran / "run.zarr", tmp_path / "run.zarr")
    path = tmp_path / "run.marks.json"
    pages = pages_in(tmp_path, recipe=False)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    else:
        pages.marks.put(1, Mark("keep"))
        path.write_text(path.read_text().replace('"1"', '"1000000000"'))
    with served(pages) as opened:
        token = re.search('name="token" value="([^"]+)"', opened.get("/?target=0").text or "")
        assert token is None  # no form
        fields = {"token": pages.token, "row": "2", "mark": "keep"}
        for answer in (opened.get("/review"), opened.get("/marks.csv"), opened.post("/mark", fields)):
            assert answer.status == 500
            assert "run.marks.json" in answer.text
        assert opened.get("/?target=0").status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "127.0.0.1/evil",
        "127.0.0.1:port",
        "0.0.0.0",
        "",
    ],
)
def test_another_host_is_refused(client: Client, host: str) -> None:
    """A name that was rebound to this address."""
    answer = client.request("GET", "/", headers={"Host": host})
    assert answer.status == 421
    assert "held-out" not in answer.text


def test_this_host_has_two_names(client: Client) -> None:
    for host in ("127.0.0.1", f"127.0.0.1:{client.port}", "localhost", "LOCALHOST:1234"):
        assert client.request("GET", "/", headers={"Host": host}).status == 200
    with client.raw() as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert re.match(rb"HTTP/1\.1 4\d\d ", raw.recv(100))


def test_a_form_without_the_token_changes_nothing(client: Client, ran: Path, token: str) -> None:
    fields = {"row": 1, "mark": "drop"}
    own = f"http://127.0.0.1:{client.port}"
    refused = [
        client.post("/mark", fields),
        client.post("/mark", {**fields, "token": ""}),
        client.post("/mark", {**fields, "token": token[:-1]}),
        client.post("/mark", {**fields, "token": "é" * 43}),
        client.post("/ask", {"text": "1 2 3 4 1"}),
        client.post("/mark", {**fields, "token": token}, Origin="http://evil.example"),
        client.post("/mark", {**fields, "token": token}, Origin="null"),
        client.post("/mark", {**fields, "token": token}, **{"Sec-Fetch-Site": "cross-site"}),
    ]
    assert [answer.status for answer in refused] == [403] * 8
    assert client.request("GET", f"/mark?row=1&mark=drop&token={token}").status == 405
    assert client.request("POST", "/mark", b"{}", {"Content-Type": "application/json"}).status == 415
    assert client.request("POST", "/mark", b"\xff=\xff", {"Content-Type": FORM}).status == 400
    assert client.request("POST", "/mark", b"a=1&" * 70, {"Content-Type": FORM}).status == 400
    assert marks_in(ran) == {}
    assert not list(ran.glob("run.zarr/targets/asked-*"))

    for wrong in (
        {"row": 40},
        {"row": -1},
        {"row": "x"},
        {"mark": "burn"},
        {"mark": "flip", "label": "x" * 201},
    ):
        answer = client.post("/mark", {**fields, **wrong, "token": token})
        assert answer.status in (400, 404), wrong
    assert marks_in(ran) == {}
    assert client.post("/mark", {**fields, "token": token}, Origin=own).status == 303
    assert marks_in(ran) == {"1": {"mark": "drop", "label": ""}}
    client.post("/mark", {**fields, "mark": "clear", "token": token})


def test_other_sites_may_link_to_a_page_but_not_use_it(client: Client) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert client.request("GET", "/", headers=link).status == 200
    assert client.request("GET", "/", headers=image).status == 403
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answers = [client.request("OPTIONS", "/mark", headers=asked), client.get("/")]
    assert answers[0].status == 403
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]


def test_a_redirect_stays_on_this_server(client: Client, token: str) -> None:
    fields = {
        "token": token,
        "row": 2,
        "mark": "clear",
        "set": "//evil.example",
        "from": "http://evil.example",
    }
    place = client.post("/mark", fields).headers["location"]
    assert place.startswith("/review?")
    assert "//evil" not in place


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_10_mb_gets_413_and_is_not_read(client: Client, chunked: bool) -> None:
    size = 10 << 20
    kind = b"Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}".encode()
    head = b"POST /mark HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + FORM.encode() + b"\r\n" + kind
    part = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n" if chunked else b"x" * (1 << 16)
    with client.raw() as raw:
        raw.sendall(head + b"\r\n\r\n")
        try:
            for _ in range(size >> 16):
                raw.sendall(part)
        except OSError:  # closed meanwhile
            pass
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")
    assert client.get("/").status == 200


def test_a_body_at_the_limit_is_read(client: Client, token: str) -> None:
    head = f"token={token}&row=3&mark=clear&label="
    body = head + "x" * (MOST_BYTES - len(head))
    assert client.request("POST", "/mark", body.encode(), {"Content-Type": FORM}).status == 303
    assert client.request("POST", "/mark", body.encode() + b"x", {"Content-Type": FORM}).status == 413


def closed(raw: socket.socket) -> bytes:
    """Read until the server closes the connection; return what it sent."""
    found = b""
    try:
        while part := raw.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_slow_clients_are_disconnected_and_hold_nobody_up(ran: Path) -> None:
    with served(pages_in(ran), patience=1.0) as opened:
        nothing, half, body, reader = (opened.raw() for _ in range(4))
        half.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        body.sendall(b"POST /mark HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nab")
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert opened.get("/").status == 200

        assert closed(nothing) == b""
        assert closed(half) == b""
        assert closed(body).startswith(b"HTTP/1.1 408 ")
        kept = opened.raw()
        kept.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200 ")
        kept.sendall(b"GET /rev")  # the second request on a connection
        assert b"HTTP/1.1" not in closed(kept)

        try:  # asks for many pages and reads none
            for _ in range(4000):
                reader.sendall(b"GET /review HTTP/1.1\r\nHost: localhost\r\n\r\n")
        except OSError:
            pass
        answers = closed(reader).count(b"HTTP/1.1 200 ")
        assert answers < 4000
        assert opened.get("/").status == 200
        for raw in (nothing, half, body, reader, kept):
            raw.close()


def connections_of(port: int) -> list[str]:
    """Return the connections of a port that the system holds for the server, in /proc/net/tcp: without the listener."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line[3] for line in lines if line[1].endswith(f":{port:04X}") and line[3] != "0A"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a socket option of Linux")
def test_a_reader_that_stalls_loses_its_connection(ran: Path) -> None:
    """What fits into the buffers of the system is no longer the server's, which closes the connection in vain."""
    with served(pages_in(ran, recipe=False), patience=1.0) as opened:
        readers = [socket.socket() for _ in range(3)]
        for reader, count in zip(readers, (1, 3, 300), strict=True):
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", opened.port))
            reader.sendall(b"GET /review HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
        assert len(connections_of(opened.port)) == 3
        until = time.monotonic() + 60  # without a limit the system tries for minutes
        while connections_of(opened.port) and time.monotonic() < until:
            time.sleep(0.05)
        assert connections_of(opened.port) == []
        for reader in readers:
            reader.close()


def test_a_failure_of_the_recipe_is_a_page_and_the_server_goes_on(ran: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(ran, tmp_path / "copy")
    text = (
        (ran / "recipe.py").read_text()
        + """

def render(index):
    raise LookupError("<b>no row</b>")
"""
    )
    (tmp_path / "copy/recipe.py").write_text(text)
    with served(pages_in(tmp_path / "copy")) as opened:
        answer = opened.get("/", target=0)
        assert answer.status == 500
        assert "LookupError: <b>no row</b>" in Parsed(answer.text).text
        assert opened.get("/").status == 200
