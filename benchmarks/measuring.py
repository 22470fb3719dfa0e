"""Measurements of benchmarks: worker processes, time, growth of memory, and the environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PEERS = ("traker", "dattri", "opacus", "backpack-for-pytorch", "kronfluence")


@dataclass(slots=True)
class Growth:
    """Growth of memory during a block of code."""

    mib: float | None = None
    """Growth of the resident set at its highest, in MiB; ``None`` where the system does not tell (not Linux)."""


@contextmanager
def memory_growth() -> Iterator[Growth]:
    """Measure the growth of the resident set during the block; the result is set when the block ends."""
    growth = Growth()
    if not Path("/proc/self/clear_refs").exists():
        yield growth
        return
    before = _resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    yield growth
    growth.mib = max(0, _resident_kib("VmHWM") - before) / 1024


def _resident_kib(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found.group(1)) if found else 0


def cpu_seconds(function: Callable[[], Any], repeats: int = 1) -> float:
    """Return the mean CPU time of a call."""
    return _seconds(time.process_time, function, repeats)


def wall_seconds(function: Callable[[], Any], repeats: int = 1) -> float:
    """Return the mean wall time of a call."""
    return _seconds(time.perf_counter, function, repeats)


def _seconds(clock: Callable[[], float], function: Callable[[], Any], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        function()
    return (clock() - start) / repeats


def run_worker(
    module: str, *arguments: str, threads: int = 1, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``python -m module arguments`` and return the JSON of its last line; a failure is a result too.

    Args:
        module: Module to run, in a separate process.
        *arguments: Its command-line arguments.
        threads: Number of threads of OpenMP and MKL.
        environment: Additional environment variables.

    Returns:
        The printed JSON, or ``{"fails": its last error}``.
    """
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **limits, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning): |wrong gradients", line)]
    return {"fails": (errors or lines or [f"exit status {done.returncode}"])[-1][:200]}


def surroundings(threads: int = 1) -> dict[str, Any]:
    """Return the machine and the versions for which figures were measured."""
    import torch

    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "torch": torch.__version__,
        "threads": threads,
        "peers": {name: installed[name] for name in PEERS if name in installed},
    }


def _processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return found.group(1) if found else platform.processor()


def save_parts(path: Path, here: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Write JSON; keep other parts of the file that were measured in the same environment."""
    before = json.loads(path.read_text()) if path.exists() else {}
    old = before["parts"] if all(before.get(name) == value for name, value in here.items()) else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**here, "parts": {**old, **parts}}, indent=1) + "\n")
