"""What benchmarks share: their options, worker processes, time, growth of memory, the environment, and results."""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import resource
import signal
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
    before = resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    yield growth
    growth.mib = max(0, resident_kib("VmHWM") - before) / 1024


def resident_kib(field: str) -> int:
    """Return a size of this process in KiB; 0 if the system does not tell it."""
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
    work: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a function of a benchmark on one thread of a new process; a failure is a result too.

    Args:
        work: A function of a module.
        *arguments: JSON values.
        environment: Additional environment variables.

    Returns:
        JSON values that the function returns, or ``{"fails": its last error}``.
    """
    # A benchmark that is run with python -m has the name __main__.
    module = sys.modules[work.__module__].__spec__.name  # type: ignore[union-attr]
    limits = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measuring", module, work.__name__, json.dumps(arguments)],
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


def run_forked(work: Callable[[], dict[str, Any]], *, cpu_limit: int, memory_limit: int) -> dict[str, Any]:
    """Run a function in a fork of this process, which has imported its modules; a failure is a result too.

    Args:
        work: What to run. Its output to the terminal is discarded.
        cpu_limit: CPU seconds after which the process is ended.
        memory_limit: Limit of its address space in bytes.

    Returns:
        The result of the function, or ``{"fails": the error}``.
    """
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)

    def body() -> None:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, cpu_limit + 10))
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
        try:
            sender.send(work())
        except Exception as error:  # any error of a method is its result
            lines = str(error).strip().splitlines() or [""]
            sender.send({"fails": f"{type(error).__name__}: {lines[0]}"[:200]})

    process = processes.Process(target=body)
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:  # ended without a result
        process.join()
        too_long = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        reason = (
            f"takes more than {cpu_limit} s of CPU time" if too_long else f"exit status {process.exitcode}"
        )
        return {"fails": reason}
    process.join()
    return found


def parser_of(doc: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that shows the docstring of a benchmark; ``--out`` is where results go, by default ``out``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out is not None:
        parser.add_argument("--out", type=Path, default=RESULTS / out)
    return parser


def surroundings(*, peers: bool = True) -> dict[str, Any]:
    """Return the machine and the versions for which figures were measured, also those of the installed peers."""
    import torch

    here = {
        "machine": platform.machine(),
        "processor": _processor(),
        "torch": torch.__version__,
        "threads": 1,
    }
    if not peers:
        return here
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {**here, "peers": {name: installed[name] for name in PEERS if name in installed}}


def file_system(folder: str) -> str:
    """Return the type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(point), kind) for point, kind in mounts if Path(folder).is_relative_to(point))[1]


def _processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return found.group(1) if found else platform.processor()


def save_parts(path: Path, here: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Print parts and write JSON; keep other parts of the file that were measured in the same environment.

    Several processes may save to one file: each waits for the others.
    """
    for name, figures in parts.items():
        print(name, json.dumps(figures, default=float), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        before = json.loads(text) if text else {}
        old = before["parts"] if all(before.get(name) == value for name, value in here.items()) else {}
        text = json.dumps({**here, "parts": {**old, **parts}}, indent=1, default=float) + "\n"
        file.truncate(0)
        file.write(text)


if __name__ == "__main__":  # of run_worker
    function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    print(json.dumps(function(*json.loads(sys.argv[3])), default=float))
