"""Everything that only a GPU can show, in one command of at most ten minutes.

Parts, most valuable first: the tests that need a GPU (``tests``); features against those of the CPU (``features``);
whole passes, their replays and CUDA graphs of them against plain passes (``replays``); per-sample gradient engines
against plain passes (``gradients``); the network of the functorch notebook
(``simple_cnn``); projection of 64 x 10^8 against reading the same bytes, and against traker with fast_jl
(``projection``); GPT-2 small and a Llama of 1.2 billion parameters in bfloat16 (``language``); products of scores
against bandwidth and peak (``scoring``); two ranks on one GPU (``ranks``).

Every part runs in a separate process with a time limit, and so does every case of it: a crash or a hang costs one
case. A line of JSON is written as soon as a case has ended, with the device, torch and the commit. A case that was
measured on this device is not measured again; one that failed is. Times are wall times between two synchronisations
of the device, medians of interleaved rounds.

Run:      python -m benchmarks.gpu [--parts tests features ...] [--budget 600] [--again]
Rehearse: python -m benchmarks.gpu --device stand_in --small
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.measuring import RESULTS, ROOT

WORKER = "benchmarks.gpu.worker"
START_SECONDS = 60  # until a worker has imported its libraries and reached the device
RESULT = ('{"begins": ', '{"case": ', '{"device": ')
"""Begins of a worker's lines; libraries print others."""
Line = dict[str, Any]


def run_worker(part: str, cases: list[str], options: argparse.Namespace, deadline: float) -> Iterator[Line]:
    """Run a worker and yield its results; after its last line, the reason if a case did not end."""
    command = [sys.executable, "-m", WORKER, part, options.device, *["--small"] * options.small]
    limit = PARTS[part].case_seconds if part in PARTS else START_SECONDS
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "--cases", *cases],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        begun, expired = cases[0] if cases else part, threading.Event()
        timer = _timer(process, expired, min(START_SECONDS + limit, deadline - time.monotonic()))
        try:
            for text in process.stdout:
                line = json.loads(text) if text.startswith(RESULT) else {}
                if "begins" in line:
                    timer.cancel()
                    begun = line["begins"]
                    timer = _timer(process, expired, min(limit, deadline - time.monotonic()))
                elif line:
                    begun = ""
                    yield line
            status = process.wait()
        finally:
            timer.cancel()
            process.stdout.close()
            if process.returncode != 0:
                _end(process)
        if begun:
            errors.seek(0)
            yield {"case": begun, "fails": _reason(status, expired.is_set(), errors.read())}


def _timer(process: subprocess.Popen[str], expired: threading.Event, seconds: float) -> threading.Timer:
    """Start to wait; when the time is over, the worker and its children are ended."""

    def end() -> None:
        expired.set()
        _end(process)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    return timer


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker and its children: first by SIGTERM, which torchrun passes on to its ranks."""
    for sent, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 1)):
        until = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):  # raised when no process of the group is left
            os.killpg(process.pid, sent)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def _reason(status: int, expired: bool, errors: str) -> str:
    if expired:
        return "did not end within its time"
    last = [line.strip() for line in errors.splitlines() if line.strip()][-1:]
    return f"the process ended with status {status}: {' '.join(last)}"[:300]


def run_part(part: str, cases: list[str], options: argparse.Namespace, deadline: float) -> Iterator[Line]:
    """Yield the results of the cases; a worker is started again after a case that failed, without it."""
    deadline = min(deadline, time.monotonic() + PARTS[part].seconds)
    while cases and time.monotonic() < deadline:
        for line in run_worker(part, cases, options, deadline):
            cases = [case for case in cases if case != line["case"]]
            yield line
    for case in cases:
        yield {"case": case, "not run": "the time of the part is over"}


def measured(path: Path, device: str, small: bool) -> set[tuple[str, str]]:
    """Return part and case of the results of a device in a file; failures are measured again."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else iter(())
    return {
        (line["part"], line["case"])
        for line in lines
        if (line["device"], line["small"]) == (device, small) and not {"fails", "not run"} & line.keys()
    }


def commit() -> str:
    """Return the commit of this checkout, marked if files were changed; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    """Measure what is missing; the exit status is 1 if a case failed or time ran out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, stand_in, cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for the rehearsal")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--budget", type=float, default=600, help="seconds in all")
    parser.add_argument("--again", action="store_true", help="measure cases that are in the file, too")
    parser.add_argument("--out", type=Path, help="default: results/gpu.jsonl, of a rehearsal runs/gpu.jsonl")
    options = parser.parse_args()
    options.out = options.out or (ROOT / "runs" if options.small else RESULTS) / "gpu.jsonl"
    begun = time.monotonic()
    deadline = begun + options.budget
    (found,) = run_worker("device", [], options, deadline)
    if "fails" in found:
        print(found["fails"], file=sys.stderr)
        return 1
    fixed = {**found, "small": options.small, "torch": torch.__version__, "commit": commit()}
    done = set() if options.again else measured(options.out, found["device"], options.small)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    complete = True
    with open(options.out, "a", encoding="utf-8") as file:
        for part in options.parts:
            cases = [case for case in PARTS[part].cases(options.small) if (part, case) not in done]
            for line in run_part(part, cases, options, deadline):
                elapsed = round(time.monotonic() - begun, 1)
                text = json.dumps({"part": part, **line, **fixed, "at_s": elapsed})
                print(text, flush=True)
                file.write(text + "\n")
                file.flush()
                complete &= "fails" not in line and "is over" not in line.get("not run", "")
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
