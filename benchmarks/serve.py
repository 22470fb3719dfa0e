"""Latency of ``trak-lite serve`` on the shipped examples: p50, p95 and the longest of 200 requests of 8 clients.

The server is a process of its own, started by the command line with one thread of arithmetic. Every request opens a
connection and reads the whole page. ``first``: seconds of the first page of each kind, immediately after the start.
After a pause for the preparation in the background: ``target``, pages of drawn targets, half of them with a filter
where the recipe has columns; ``review``, pages of the review list; ``ask`` (if the recipe makes samples of texts), new
texts of one client, from sending the form to the complete page of the result; ``tokens`` (if the recipe has tokens),
pages of drawn targets with coloured tokens, of one client.

Run:  python -m benchmarks.serve [--examples digits stdlib_lm] [--folder FOLDER]
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from benchmarks.measuring import ROOT, parser_of, save_parts, surroundings, wall_seconds

EXAMPLES = {"digits": ("where-label", [str(label) for label in range(10)]), "stdlib_lm": ("where-source", [])}
"""The column of a filter, and its values."""
REQUESTS, CLIENTS, ASKED = 200, 8, 20
PREPARATION = 30
"""Seconds without requests; enough for the preparation of both examples."""


def trak_lite(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "trak_lite", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@contextmanager
def server(store: Path, recipe: Path) -> Iterator[tuple[int, int]]:
    """Start the command on a free port; yield the port and the number of the process."""
    command = trak_lite("serve", str(store), "--recipe", str(recipe), "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split(":")[2].split("/")[0]), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def page(port: int, path: str, form: dict[str, str] | None = None) -> tuple[str, str]:
    """Return the text of a page, and where a form leads."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request(*(("GET", path) if form is None else ("POST", path, urlencode(form), kind)))
    answer = connection.getresponse()
    text, place = answer.read().decode(), answer.getheader("location", "")
    connection.close()
    if answer.status not in (200, 303):
        raise RuntimeError(f"{path}: {answer.status} {text[-300:]}")
    return text, place


def latencies(port: int, paths: list[str]) -> dict[str, float]:
    """Return the quantiles in seconds of requests by all clients at once."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(lambda path: wall_seconds(lambda: page(port, path)), paths))
    return summary(found)


def summary(found: list[float]) -> dict[str, float]:
    p50, p95 = np.quantile(found, [0.5, 0.95]).tolist()
    return {
        "requests": len(found),
        "p50": round(p50, 4),
        "p95": round(p95, 4),
        "longest": round(max(found), 4),
    }


def in_turn(process: int, works: list[Callable[[], Any]]) -> dict[str, float]:
    """Return the quantiles in seconds of requests of one client, and the server's mean processor time (Linux)."""
    before = processor_seconds(process)
    figures = summary([wall_seconds(work) for work in works])
    return {**figures, "processor": round((processor_seconds(process) - before) / len(works), 4)}


def processor_seconds(process: int) -> float:
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def asked(port: int, process: int) -> dict[str, float]:
    """Return the figures of new texts that are scored one after the other."""

    def ask(number: int) -> None:
        token = re.search('name="token" value="([^"]+)"', page(port, "/")[0])[1]
        text = f"def heappush_{number}(heap, item):\n    heap.append(item)\n    _siftdown(heap, 0, len(heap)-1)\n"
        _, place = page(port, "/ask", {"token": token, "text": text})
        assert "most helpful" in page(port, place)[0]

    return in_turn(process, [partial(ask, number) for number in range(ASKED)])


def measured(example: str, folder: Path) -> dict[str, Any]:
    """Make the run of an example if it is not there, serve it, and return the figures."""
    store = folder / f"{example}.zarr"
    config = ROOT / "configs" / f"{example}.yaml"
    places = ["--path", str(store), "--checkpoints", str(folder / f"{example}-trained")]
    made = trak_lite("run", str(config), *places, "--progress", "false")
    subprocess.run(made, check=True, env=environment(), stdout=subprocess.DEVNULL)
    rng = np.random.default_rng(0)
    column, values = EXAMPLES[example]
    with server(store, ROOT / "examples" / "recipes" / f"{example}.py") as (port, process):
        count = int(re.search(r"([\d,]+) targets in", page(port, "/")[0])[1].replace(",", ""))
        first = {
            "target": round(wall_seconds(lambda: page(port, "/?target=0")), 4),
            "review": round(wall_seconds(lambda: page(port, "/review")), 4),
        }
        time.sleep(PREPARATION)
        targets = [f"/?target={target}" for target in rng.integers(count, size=REQUESTS)]
        if values:
            targets[::2] = [f"{path}&{column}={rng.choice(values)}" for path in targets[::2]]
        starts = rng.integers(20, size=REQUESTS) * 25
        figures = {
            "first": first,
            "target": latencies(port, targets),
            "review": latencies(port, [f"/review?from={start}" for start in starts]),
        }
        if 'id="text"' in page(port, "/")[0]:
            figures["ask"] = asked(port, process)
        if 'id="colour"' in page(port, "/?target=0")[0]:
            drawn = rng.integers(count, size=ASKED)
            paths = [f"/?target={target}&tokens=1" for target in drawn]
            figures["tokens"] = in_turn(process, [partial(page, port, path) for path in paths])
    return figures


def main() -> None:
    """Measure every example, write JSON."""
    parser = parser_of(__doc__, "serve.json")
    parser.add_argument("--examples", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument(
        "--folder", type=Path, help="where finished runs are kept; default: a temporary folder"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for example in args.examples:
            figures = measured(example, args.folder or Path(scratch))
            figures["load"] = round(os.getloadavg()[1], 1)
            here = {**surroundings(), "cores": os.cpu_count(), "clients": CLIENTS}
            save_parts(args.out, here, {example: figures})


if __name__ == "__main__":
    main()
