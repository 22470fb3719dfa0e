"""The command in a process of its own, killed during requests: marks, store and scores survive."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install '.[serve]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")

from serve_cases import TEXT, Client, finished_run, marks_in

from trak_lite.store import check_store


@contextmanager
def command(folder: Path, *options: str) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """Run ``trak-lite serve`` on a free port; kill it at the end if it still runs."""
    arguments = ["serve", str(folder / "run.zarr"), "--port", "0", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "trak_lite", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), process.stderr.read()
        yield Client(int(line.split(":")[2].split("/")[0])), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def token(client: Client) -> str:
    return re.search('name="token" value="([^"]+)"', client.get("/review").text)[1]


def results(client: Client, **params: Any) -> list[str]:
    """The rows and scores on the page of a target."""
    text = client.get("/", **params).text
    return re.findall(r'data-row="(\d+)".*?class="score">([^<]+)<', text, re.S)


def test_a_kill_during_a_request_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    ran = finished_run(tmp_path_factory.mktemp("ran"))
    shutil.copytree(ran, tmp_path / "never-killed")
    recipe = ("--recipe", str(ran / "recipe.py"), "--checkpoints", str(ran / "trained"))
    with command(tmp_path / "never-killed", *recipe) as (client, _):
        client.post("/ask", {"token": token(client), "text": TEXT})
        expected, stored = results(client, text=TEXT), results(client, target=2)
        assert len(expected) == len(stored) == 10

    acknowledged = {}
    for number in (1, 2, 4):  # the forward pass of the text that does not return
        (ran / "stop-at").write_text(str(number))
        with command(ran, *recipe) as (client, process):
            form = {"token": token(client)}
            assert client.post("/mark", {**form, "row": number, "mark": "drop"}).status == 303
            acknowledged[str(number)] = {"mark": "drop", "label": ""}
            failed: list[BaseException] = []
            asking = Thread(target=_ask, args=[client, {**form, "text": TEXT}, failed])
            asking.start()
            while not (ran / "stopped").exists():
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            asking.join()
            assert failed
        for name in ("stop-at", "stopped", "passes"):
            (ran / name).unlink()
        assert check_store(str(ran / "run.zarr")).ok
        assert marks_in(ran) == acknowledged

    with command(ran, *recipe) as (client, process):
        assert results(client, target=2) == stored
        assert client.post("/ask", {"token": token(client), "text": TEXT}).status == 303
        assert results(client, text=TEXT) == expected
        assert marks_in(ran) == acknowledged

        process.send_signal(signal.SIGINT)  # the way to end it
        assert process.wait(60) == 0


def _ask(client: Client, fields: dict[str, str], failed: list[BaseException]) -> None:
    try:
        client.post("/ask", fields)
    except OSError as error:
        failed.append(error)


def test_marks_that_were_acknowledged_survive_a_kill_and_another_process_refuses_the_port(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    ran = finished_run(tmp_path_factory.mktemp("ran"))
    done: list[int] = []

    def mark_all(client: Client, form: dict[str, str]) -> None:
        try:
            for row in range(40):
                if client.post("/mark", {**form, "row": str(row), "mark": "keep"}).status == 303:
                    done.append(row)
        except OSError:
            return

    with command(ran) as (client, process):
        busy = subprocess.run(
            [sys.executable, "-m", "trak_lite", "serve", str(ran / "run.zarr"), "--port", str(client.port)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert busy.returncode == 2
        assert "Pass another one: --port PORT" in busy.stderr

        marking = Thread(target=mark_all, args=[client, {"token": token(client)}])
        marking.start()
        while len(done) < 9:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        marking.join()

    found = [int(row) for row in marks_in(ran)]
    assert found[: len(done)] == done
    assert len(found) <= len(done) + 1
    with command(ran) as (client, _):
        assert client.get("/marks.csv").text.count("keep") == len(found)
