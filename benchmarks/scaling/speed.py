"""speed: wall time of featurizing the digits CNN with one and with two processes of one thread, alternately.

The time of featurizing starts when every rank has imported, built its model and featurized 256 rows of another
store. It ends when the last rank returns and all rows are on disk. The time of the whole command, including the
start of torchrun, imports and warm-up, is also reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scaling.ranks import (
    BATCH,
    PROJ_DIM,
    attributor,
    digits,
    keep,
    start,
    wait_for_all,
    warm_up,
)
from trak_lite import Rows

MODULE = "benchmarks.scaling.speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=80_000, help="so many that one process takes 20 seconds")
    parser.add_argument("--turns", type=int, default=2, help="of one process, then several")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure alternately; return medians, and ratios per turn."""
    turns: list[dict[int, dict[str, float]]] = []
    for _ in range(options.turns):
        turns.append({world: measure(world, options.rows) for world in options.worlds})
        print(turns[-1], flush=True)
    first, last = options.worlds[0], options.worlds[-1]
    ratios = {
        key: [turn[first][key] / turn[last][key] for turn in turns] for key in ("featurize_s", "command_s")
    }
    return {
        "goal": "2 processes at least 1.7x one",
        "case": f"digits CNN, K = {PROJ_DIM}, batches of {BATCH}, one thread per process",
        "rows": options.rows,
        "turns": [{str(world): figures for world, figures in turn.items()} for turn in turns],
        "faster": statistics.median(ratios["featurize_s"]),
        "faster_by_turn": ratios["featurize_s"],
        "faster_whole_command": statistics.median(ratios["command_s"]),
    }


def measure(world: int, rows: int) -> dict[str, float]:
    """Featurize a new store with the given number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        wall, ranks = start(world, MODULE, Path(folder), str(rows))
    seconds = max(rank["end"] for rank in ranks) - min(rank["begin"] for rank in ranks)
    return {
        "featurize_s": seconds,
        "rows_per_s": rows / seconds,
        "command_s": wall,
        "cpu_s_of_all": sum(rank["cpu_s"] for rank in ranks),
        "fewest_rows_of_a_rank": min(rank["rows"] for rank in ranks),
    }


def rank(folder: Path, rows: int) -> None:
    """Featurize, and store the start and end by a clock that all processes share."""
    warm_up(folder)
    made, data = attributor(folder / "run.zarr"), digits(rows)
    wait_for_all(folder, "ready")
    begin, cpu = time.monotonic(), time.process_time()
    summary = made.featurize(Rows(data, name="train"))
    figures = {"begin": begin, "end": time.monotonic(), "cpu_s": time.process_time() - cpu}
    keep(folder, {**figures, "rows": summary.rows_written})


if __name__ == "__main__":
    rank(Path(sys.argv[1]), int(sys.argv[2]))
