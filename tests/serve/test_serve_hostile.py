"""Hostile requests and hostile content, with what each gets."""

import contextlib
import os
import re
import socket
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest
from report_cases import Parsed, digest
from serve_cases import FORM, HOSTILE, marks_in, pages_in, served

from trak_lite import cli

MOST_BYTES = 64 << 10
PAGES = ["/", "/?target=1", "/review", "/?target=99", "/nowhere", "/?set=%3Cscript%3Ealert(1)%3C/script%3E"]
PAGES += ["/effects?where-label=1"]


@pytest.fixture(scope="module")
def token(client):
    return client.token()


@pytest.mark.parametrize("path", [*PAGES, "/marks.csv"])
def test_html_is_text_and_nothing_but_this_server_is_allowed(client, path):
    answer = client.get(path)
    page = Parsed(answer.text)
    assert [name for name, _ in page.elements].count("script") == (path != "/marks.csv")
    assert not [found for _, found in page.elements if any(key.startswith("on") for key in found)]
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    if path == "/?target=1":
        assert HOSTILE in page.text  # as the target's text
        assert page.all("option", value=HOSTILE)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == policy["form-action"] == "'self'"
    assert not re.search(r"unsafe|\*|https?:", answer.headers["content-security-policy"])
    for kind in ("style", "script"):
        for inside in re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.S):
            assert digest(inside) in policy[f"{kind}-src"].split()
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", answer.text)


PATHS = ["/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/..%2f..%2fetc%2fpasswd"]
PATHS += ["/marks.csv/../../etc/passwd", "/review/..%5c..%5cetc", "/%00", "/?set=../../etc/passwd"]
PATHS += ["/?set=ckpt-0", "/review?set=%2Fetc%2Fpasswd", "/static/x.js"]


def test_tricks_with_paths_lead_nowhere(client):
    for path in PATHS:
        answer = client.get(path)
        assert answer.status == 404, path
        assert "root:" not in answer.text


HUGE = "9" * 5000
NO_NUMBERS = [HUGE, f"-{HUGE}", "-1", "-0", "1e3", "\u0663", "\0", "1\0", " 1", "1_0", "0x1", "nan"]
NO_NUMBERS += ["\ud7ff", "<b>"]
NO_NAMES = [HUGE, "-1", "\u0663", "\0", "held-out\0", "..", "<b>"]
NO_ROWS = {"from": NO_NUMBERS, "set": NO_NAMES}
WRONG = {
    "/?": {"target": [*NO_NUMBERS, "6"], **NO_ROWS, "text": ["x" * 9000, " "]},
    "/?target=0&": {"k": [*NO_NUMBERS, "0", "51"], "where-\0": ["x"], "where-": ["x"], "where-no": ["1"]},
    "/review?": {"done": [*NO_NUMBERS, "40"], **NO_ROWS, "show": NO_NAMES, "where-no": ["1"]},
    "/effects?": {**NO_ROWS, "show": NO_NAMES, "where-no": ["1"], "done": ["1"]},
}


@pytest.mark.parametrize("path", WRONG)
def test_wrong_parameters_get_400_or_404_and_a_sentence(client, path):
    for name, values in WRONG[path].items():
        for pairs in [*([(name, value)] for value in values), [(name, "0")] * 2]:
            answer = client.get(f"{path}{urlencode(pairs)}")
            assert answer.status in (400, 404), (path, name, str(pairs)[:80])
            assert re.search('id="status"[^>]*>[^<]{20,}', answer.text), (path, name, str(pairs)[:80])


def test_an_unknown_parameter_is_named_with_the_known_ones(client):
    start, review = "set, target, k, from, text, tokens, where-COLUMN", "set, show, from, done, where-COLUMN"
    for path, name, known in (("/?targets=1", "targets", start), ("/review?k=3", "k", review)):
        answer = client.get(path)
        assert answer.status == 400
        assert f"Unknown parameter '{name}'. Known: {known}." in Parsed(answer.text).text


def test_values_that_match_nothing_are_no_failure(client):
    for value in [*NO_NUMBERS, f"0.{HUGE}", "1e999", "-inf", "\ufffe"]:
        for path in ("/?target=0&", "/review?"):
            assert client.get(f"{path}{urlencode({'where-label': value})}").status == 200, value[:20]


NO_TEXTS = [None, "", "   ", "no numbers", "1 2 3 4 9", "1 0", "x" * 8193]
WRONG_FIELDS = [
    ("/mark", "row", [*NO_NUMBERS, "40", "", None], "row must be a whole number from 0 to 39"),
    ("/mark", "mark", [*NO_NAMES, "burn", "", None], "mark must be one of"),
    ("/mark", "label", ["x" * 201], "at most 200 characters"),
    ("/mark", "label", ["", " ", None], "needs its new label"),
    ("/ask", "text", NO_TEXTS, r"text is|no sample|labels\[0\] is 9|failed on a batch of the targets"),
]


@pytest.mark.parametrize(("path", "name", "values", "said"), WRONG_FIELDS)
def test_wrong_fields_of_a_form_change_nothing(client, ran, token, path, name, values, said):
    right = {"token": token, "row": "1", "mark": "flip", "label": "2", "text": "1 2 3 4 1"}
    forms = [{**right, name: value} for value in values if value is not None]
    forms += [{key: value for key, value in right.items() if key != name}] * (None in values)
    for form in forms:
        answer = client.post(path, form)
        assert answer.status in (400, 404), str(form)[:99]
        assert re.search(said, Parsed(answer.text).text), answer.text
    answer = client.post(path, [*right.items(), (name, "3")])
    assert (answer.status, "more than once" in answer.text) == (400, True)
    assert marks_in(ran) == {}
    assert not list(ran.glob("run.zarr/targets/asked-*"))


def test_a_form_of_others_changes_nothing(client, ran, token):
    fields = {"row": 1, "mark": "drop"}
    right = {**fields, "token": token}
    wrong = [fields, {**fields, "token": ""}, {**fields, "token": token[:-1]}, {**fields, "token": "é" * 43}]
    refused = [client.post("/mark", given) for given in wrong]
    refused += [client.post("/ask", {"text": "1 2 3 4 1"})]
    cross_site = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    headers = ({"Origin": "http://evil.example"}, {"Origin": "null"}, cross_site)
    refused += [client.post("/mark", right, **given) for given in headers]
    assert [answer.status for answer in refused] == [403] * 8
    assert client.get("/mark", **right).status == 405
    bodies = (b"{}", "application/json", 415), (b"\xff=\xff", FORM, 400), (b"a=1&" * 70, FORM, 400)
    for body, kind, status in bodies:
        assert client.request("POST", "/mark", body, {"Content-Type": kind}).status == status
    assert marks_in(ran) == {}
    assert not list(ran.glob("run.zarr/targets/asked-*"))
    moved = client.post("/mark", {**right, "set": "//evil.example", "from": "http://evil"}, Origin=client.url)
    assert moved.headers["location"].startswith("/review?")  # a redirect stays on this server
    assert "//evil" not in moved.headers["location"]
    assert marks_in(ran) == {"1": {"mark": "drop", "label": ""}}
    client.post("/mark", {**right, "mark": "clear"})


def test_marks_that_cannot_be_read_are_said_and_block_no_page(copy):
    """``test_serve_marks`` has links, and rows that there are not."""
    path, pages = copy / "run.marks.json", pages_in(copy, recipe=False)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with served(pages) as client:
        assert 'name="token"' not in client.get("/?target=0").text  # no form
        fields = {"token": pages.token, "row": "2", "mark": "keep"}
        for answer in (client.get("/review"), client.get("/marks.csv"), client.post("/mark", fields)):
            assert answer.status == 500
            assert "run.marks.json" in answer.text
        assert client.get("/?target=0").status == 200


OTHERS = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example"]
OTHERS += ["127.0.0.1/evil", "127.0.0.1:port", "0.0.0.0", ""]


def test_this_host_has_two_names_and_other_sites_may_link_to_a_page_but_not_use_it(client):
    for host in OTHERS:
        answer = client.request("GET", "/", headers={"Host": host})
        assert answer.status == 421, host
        assert "held-out" not in answer.text
    for host in ("127.0.0.1", f"127.0.0.1:{client.port}", "localhost", "LOCALHOST:1234"):
        assert client.request("GET", "/", headers={"Host": host}).status == 200, host
    with client.raw() as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert re.match(rb"HTTP/1\.1 4\d\d ", raw.recv(100))
    for mode, status in (("navigate", 200), ("no-cors", 403)):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        assert client.request("GET", "/", headers=headers).status == status
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answers = [client.request("OPTIONS", "/mark", headers=asked), client.get("/")]
    assert answers[0].status == 403
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("asked", "chunked"), [("POST /mark", 0), ("POST /mark", 1), ("GET /", 0)])
def test_a_body_of_10_mb_gets_413_and_is_not_read(client, asked, chunked):
    size = 10 << 20
    kind = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    head = f"{asked} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\n{kind}\r\n\r\n"
    part = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n" if chunked else b"x" * (1 << 16)
    with client.raw() as raw:
        with contextlib.suppress(OSError):  # closed meanwhile
            raw.sendall(head.encode())
            for _ in range(size >> 16):
                raw.sendall(part)
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")
    assert client.get("/").status == 200


def test_a_body_at_the_limit_is_read(client, token):
    head = f"token={token}&row=3&mark=clear&label="
    for more, status in (("", 303), ("x", 413)):
        body = head + "x" * (MOST_BYTES - len(head)) + more
        assert client.post("/mark", body.encode()).status == status


GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n"


def closed(raw: socket.socket) -> bytes:
    """Read until the server closes the connection; return what it sent."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(1 << 16):
            found += part
    raw.close()
    return found


def test_slow_clients_are_disconnected_and_hold_nobody_up(ran):
    with served(pages_in(ran), patience=1.0) as client:
        nothing, half, body, unread, reader = (client.raw() for _ in range(5))
        half.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        body.sendall(b"POST /mark HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nab")
        unread.sendall(GET % b"/" + b"Content-Length: 9\r\n\r\nab")
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert client.get("/").status == 200
        assert closed(nothing) == closed(half) == b""
        assert closed(body).startswith(b"HTTP/1.1 408 ")
        assert closed(unread).startswith(b"HTTP/1.1 200 ")
        kept = client.raw()
        kept.sendall(GET % b"/" + b"\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200 ")
        kept.sendall(b"GET /rev")  # the second request on a connection
        assert b"HTTP/1.1" not in closed(kept)
        with contextlib.suppress(OSError):  # asks for many pages and reads none
            for _ in range(4000):
                reader.sendall(GET % b"/review" + b"\r\n")
        assert closed(reader).count(b"HTTP/1.1 200 ") < 4000
        assert client.get("/").status == 200


def connections_of(port: int) -> list[str]:
    """Return the connections of a port that the system holds for the server, in /proc/net/tcp: without the listener."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line[3] for line in lines if line[1].endswith(f":{port:04X}") and line[3] != "0A"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a socket option of Linux")
def test_a_reader_that_stalls_loses_its_connection(ran):
    """What fits into the buffers of the system is no longer the server's, which closes the connection in vain."""
    with served(pages_in(ran, recipe=False), patience=1.0) as client, contextlib.ExitStack() as stack:
        readers = [stack.enter_context(socket.socket()) for _ in range(3)]
        for reader, count in zip(readers, (1, 3, 300), strict=True):
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", client.port))
            reader.sendall((GET % b"/review" + b"\r\n") * count)
        assert len(connections_of(client.port)) == 3
        until = time.monotonic() + 60  # without a limit the system tries for minutes
        while connections_of(client.port) and time.monotonic() < until:
            time.sleep(0.05)
        assert connections_of(client.port) == []


def test_a_port_that_is_taken_is_refused(client, ran, capsys):
    taken, wrong = "Pass another one: --port PORT", "a whole number from 0 to 65535"
    for port, said in ((client.port, taken), ("1e9", wrong)):
        assert cli.main(["serve", str(ran / "run.zarr"), "--port", str(port)]) == 2
        assert said in capsys.readouterr().err


def test_a_failure_of_the_recipe_is_a_page_and_the_server_goes_on(copy):
    with (copy / "recipe.py").open("a") as file:
        file.write('\n\ndef predict(model, sample):\n    raise LookupError("<b>no output</b>")\n')
    with served(pages_in(copy)) as client:
        answer = client.get("/", target=0)
        assert answer.status == 500
        assert "LookupError: <b>no output</b>" in Parsed(answer.text).text
        assert client.get("/").status == 200
