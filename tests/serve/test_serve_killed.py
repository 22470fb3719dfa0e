"""The command in a process of its own, killed during requests: marks, store and scores survive."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serve_cases import TEXT, Client, marks_in

from trak_lite.store import check_store

MOMENTS = ("table_listed:1", "rows_recorded:1", "chunk_published:1")
"""Where a store stops while the rows of a text are written."""


@contextmanager
def command(folder: Path, failpoint: str = "") -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """Run ``trak-lite serve`` on a free port; kill it at the end if it still runs."""
    options = ["--recipe", str(folder / "recipe.py"), "--checkpoints", str(folder / "trained")]
    arguments = [
        sys.executable,
        "-m",
        "trak_lite",
        "serve",
        str(folder / "run.zarr"),
        "--port",
        "0",
        *options,
    ]
    environment = {**os.environ, "TRAK_LITE_FAILPOINT": failpoint}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    with process:
        try:
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:")
            yield Client(int(line.split(":")[2].split("/")[0])), process
        finally:
            process.kill()


def results(client: Client, **params: Any) -> list[str]:
    """The rows and scores on the page of a target."""
    text = client.get("/", **params).text
    return re.findall(r'data-row="(\d+)".*?class="score">([^<]+)<', text, re.S)


def test_a_kill_during_a_request_loses_nothing(copy, tmp_path):
    never_killed, acknowledged = shutil.copytree(copy, tmp_path / "never-killed"), {}
    with command(never_killed) as (client, _):
        client.post("/ask", {"token": client.token(), "text": TEXT})
        expected, stored = results(client, text=TEXT), results(client, target=2)
        assert len(expected) == len(stored) == 10
    for row, moment in enumerate(MOMENTS):
        with command(copy, moment) as (client, process):
            form = {"token": client.token()}
            assert client.post("/mark", {**form, "row": row, "mark": "drop"}).status == 303
            acknowledged[str(row)] = {"mark": "drop", "label": ""}
            with pytest.raises(OSError, match=r"losed|reset"):
                client.post("/ask", {**form, "text": TEXT})
            assert process.wait(60) == -signal.SIGKILL, moment
        assert check_store(copy / "run.zarr").ok
        assert marks_in(copy) == acknowledged
    with command(copy) as (client, process):
        assert results(client, target=2) == stored
        assert client.post("/ask", {"token": client.token(), "text": TEXT}).status == 303
        assert results(client, text=TEXT) == expected
        assert marks_in(copy) == acknowledged
        process.send_signal(signal.SIGINT)  # the way to end it
        assert process.wait(60) == 0
