"""CountSketch on the CPU with and without row workers: CPU time and wall time, by instruction set and threads.

Both ways alternate in one process (five calls of A, five of B, A, B), so that a load of the machine falls on both.
"within" leaves the threads to torch, which splits every operation over them; "rows" is the projector as it is.

Run:  python -m benchmarks.row_workers [--rounds 6]   (writes benchmarks/results/row_workers.json)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch

from benchmarks.measuring import RESULTS, run_worker, surroundings
from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors._scratch import Scratch
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock

BATCH, PROJ_DIM = 64, 2048
_CALLS = 5
"""Calls measured in a row before the other way has its turn."""
SETS = {
    "none set": {},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
}


class _Within:
    """Runs the function on all rows at once, in the thread of the caller."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def run(self, count: int, function: Any) -> list[Any]:
        with torch.no_grad():
            return [function(slice(0, count), self._scratch)]


def blocks() -> dict[str, tuple[GradientBlock, tuple[int, ...]]]:
    """Return one block of each form that a sketch takes, and the shape of its parameter."""
    torch.manual_seed(0)
    return {
        "vector of 100,000": (DenseBlock("v", torch.randn(BATCH, 100_000)), (100_000,)),
        "matrix 512 x 512": (DenseBlock("m", torch.randn(BATCH, 512, 512)), (512, 512)),
        "small matrix 64 x 64": (DenseBlock("s", torch.randn(BATCH, 64, 64)), (64, 64)),
        "factors 768 x 768, T = 64": (
            FactoredBlock("f", torch.randn(BATCH, 64, 768), torch.randn(BATCH, 64, 768)),
            (768, 768),
        ),
        "factors 1024 x 1024, T = 1": (
            FactoredBlock("o", torch.randn(BATCH, 1, 1024), torch.randn(BATCH, 1, 1024)),
            (1024, 1024),
        ),
    }


def worker(rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of both ways, by threads and block."""
    found: dict[str, Any] = {"capability": torch.backends.cpu.get_cpu_capability(), "threads": {}}
    rows, within = CountSketchProjector(PROJ_DIM), CountSketchProjector(PROJ_DIM)
    within._workers = _Within()  # type: ignore[assignment]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, (block, shape) in blocks().items():
            times: dict[str, list[tuple[float, float]]] = {"rows": [], "within": []}
            for way, projector in (("rows", rows), ("within", within)) * rounds:
                for call in range(_CALLS + 2):
                    cpu, wall = time.process_time(), time.perf_counter()
                    projector.sketch(block, shape, 0)
                    if call > 1:  # the first calls start threads; OpenMP's still spin after the other way
                        times[way].append((time.process_time() - cpu, time.perf_counter() - wall))
            found["threads"].setdefault(str(threads), {})[name] = {
                way: {
                    "cpu_ms": round(1e3 * statistics.median(cpu for cpu, _ in seconds), 3),
                    "wall_ms": round(1e3 * statistics.median(wall for _, wall in seconds), 3),
                    "shortest_wall_ms": round(1e3 * min(wall for _, wall in seconds), 3),
                }
                for way, seconds in times.items()
            }
    return found


def main() -> None:
    """Measure all instruction sets, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(worker(given.rounds)))
        return
    parts = {}
    print(
        "| ATEN_CPU_CAPABILITY | threads | block | within: cpu, wall ms | rows: cpu, wall ms | wall, within / rows |"
    )
    print("|---|--:|---|--:|--:|--:|")
    for name, environment in SETS.items():
        found = run_worker(
            "benchmarks.row_workers",
            "--worker",
            "--rounds",
            str(given.rounds),
            threads=2,
            environment=environment,
        )
        if "fails" in found:
            raise RuntimeError(f"The worker with {name} failed: {found['fails']}")
        parts[name] = found
        for threads, by_block in found["threads"].items():
            for block, ways in by_block.items():
                a, b = ways["within"], ways["rows"]
                print(
                    f"| {name} ({found['capability']}) | {threads} | {block} | {a['cpu_ms']:.1f}, {a['wall_ms']:.1f} "
                    f"| {b['cpu_ms']:.1f}, {b['wall_ms']:.1f} | {a['wall_ms'] / b['wall_ms']:.2f} |",
                    flush=True,
                )
    here = {**surroundings(threads=2), "cores": os.cpu_count(), "batch": BATCH, "proj_dim": PROJ_DIM}
    here.pop("peers")
    here["rounds"] = given.rounds
    (RESULTS / "row_workers.json").write_text(json.dumps({**here, "parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
