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


def results(client: Client, **params: Any) -> list[str]:
    """The rows and scores on the page of a target."""
    text = client.get("/", **params).text
    return re.findall(r'data-row="(\d+)".*?class="score">([^<]+)<', text, re.S)


def ask(client: Client, fields: dict[str, str], failed: list[BaseException]) -> None:
    try:
        client.post("/ask", fields)
    except OSError as error:
        failed.append(error)


def test_a_kill_during_a_request_loses_nothing(tmp_path):
    folder, never_killed = tmp_path / "ran", tmp_path / "never-killed"
    folder.mkdir()
    finished_run(folder)
    recipe = ("--recipe", str(folder / "recipe.py"), "--checkpoints", str(folder / "trained"))
    shutil.copytree(folder, never_killed)
    with command(never_killed, *recipe) as (client, _):
        client.post("/ask", {"token": client.token(), "text": TEXT})
        expected, stored = results(client, text=TEXT), results(client, target=2)
        assert len(expected) == len(stored) == 10

    acknowledged = {}
    for number in (1, 2, 4):  # the forward pass of the text that does not return
        (folder / "stop-at").write_text(str(number))
        with command(folder, *recipe) as (client, process):
            form = {"token": client.token()}
            assert client.post("/mark", {**form, "row": number, "mark": "drop"}).status == 303
            acknowledged[str(number)] = {"mark": "drop", "label": ""}
            failed: list[BaseException] = []
            asking = Thread(target=ask, args=[client, {**form, "text": TEXT}, failed])
            asking.start()
            while not (folder / "stopped").exists():
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            asking.join()
            assert failed
        for name in ("stop-at", "stopped", "passes"):
            (folder / name).unlink()
        assert check_store(str(folder / "run.zarr")).ok
        assert marks_in(folder) == acknowledged

    with command(folder, *recipe) as (client, process):
        assert results(client, target=2) == stored
        assert client.post("/ask", {"token": client.token(), "text": TEXT}).status == 303
        assert results(client, text=TEXT) == expected
        assert marks_in(folder) == acknowledged

        process.send_signal(signal.SIGINT)  # the way to end it
        assert process.wait(60) == 0
