"""rates: the rates for a plan of large runs, on one thread, in CPU time, from rows in memory.

- gram: float64 products of float16 rows, for several K; counted as 2 N K^2 floating point operations.
- factorise: damping and Cholesky, counted as K^3 / 3.
- score: float16 rows times M targets multiplied by the inverse kernel, counted as 2 N K M.
- top: scores per second in the search for the 20 most helpful and most harmful rows of every target.
- claim: claiming a chunk and releasing it; look: listing which of 10,000 chunks are committed.
- files: number of files per chunk of a finished table.
- all_reduce: bytes of a gram matrix per second of wall time, between two processes of this machine (gloo).

``benchmarks.bench_store`` measures reading and writing rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.bench_store import fill, make_table
from benchmarks.measuring import cpu_seconds
from benchmarks.scaling.ranks import keep, start
from trak_lite.linalg.gram import GramAccumulator
from trak_lite.linalg.kernel import KernelSettings, factorise
from trak_lite.linalg.products import score_block
from trak_lite.linalg.topk import TopK
from trak_lite.run.tables import feature_table_spec
from trak_lite.store import TableSpec
from trak_lite.types import FeatureLayout

MODULE = "benchmarks.scaling.rates"
WIDTHS = (512, 2048, 4096)
TARGETS = (1, 32, 512)
ROWS, TILE, K_OF_TOP = 4096, 1024, 20
CHUNKS, CHUNK_ROWS = 10_000, 32
REDUCED_MIB = 32  # of one gram with K = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--turns", type=int, default=3, help="of every measurement, of which the median counts"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every rate."""
    torch.set_num_threads(1)
    parts: dict[str, Callable[[int], Any]] = {
        "gram_gflops": lambda turns: {str(k): gram_rate(k, turns) for k in WIDTHS},
        "factorise_gflops": lambda turns: {str(k): factorise_rate(k, turns) for k in WIDTHS},
        "score_gflops": lambda turns: {str(count): score_rate(count, turns) for count in TARGETS},
        "top_scores_per_s": top_rate,
        "claim_us": claim_microseconds,
        "look_ms": look_milliseconds,
        "files_per_chunk": files_per_chunk,
        "all_reduce_gb_per_s": all_reduce_rate,
    }
    found = {}
    for name, measure in parts.items():
        found[name] = measure(options.turns)
        print(name, found[name], flush=True)
    return found


def seconds(call: Callable[[], Any], turns: int) -> float:
    """Return the median CPU time of a call, after one warm-up call."""
    call()
    return statistics.median(cpu_seconds(call) for _ in range(turns))


def some_rows(count: int, width: int) -> torch.Tensor:
    """Return seeded float16 rows."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)).half()


def gram(rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gram matrix of rows."""
    sums = GramAccumulator(FeatureLayout.joint(rows.shape[1]), rows.device)
    sums.add(rows, weights)
    return sums.result()[0]


def gram_rate(width: int, turns: int) -> float:
    """Return GFLOP/s of summing a gram matrix."""
    rows, weights = some_rows(ROWS, width), torch.ones(ROWS)
    return 2e-9 * ROWS * width**2 / seconds(lambda: gram(rows, weights), turns)


def factorise_rate(width: int, turns: int) -> float:
    """Return GFLOP/s of damping and factorising a gram matrix."""
    matrix = gram(some_rows(2 * width, width))
    given = {"num_rows": 2 * width, "layout": FeatureLayout.joint(width)}
    return 1e-9 * width**3 / 3 / seconds(lambda: factorise([matrix], KernelSettings(), **given), turns)


def score_rate(count: int, turns: int) -> float:
    """Return GFLOP/s of scoring rows against targets, K = 2048."""
    width = 2048
    tiles, targets = some_rows(ROWS, width).split(TILE), some_rows(count, width).float()
    return 2e-9 * ROWS * width * count / seconds(lambda: [score_block(t, targets) for t in tiles], turns)


def top_rate(turns: int) -> float:
    """Return the number of scores per second in the search for the most helpful and most harmful rows."""
    tiles = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(0)).split(TILE)

    def search() -> None:
        for sign in ("helpful", "harmful"):
            best = TopK(512, K_OF_TOP, sign=sign)
            for number, tile in enumerate(tiles):
                best.update(number * TILE, tile)

    return ROWS * 512 / seconds(search, turns)


def many_chunks() -> TableSpec:
    """Return a table of narrow rows in many chunks."""
    columns = feature_table_spec(CHUNKS * CHUNK_ROWS, 4, "float16", {}).columns
    return TableSpec(CHUNKS * CHUNK_ROWS, columns, CHUNK_ROWS)


def claim_microseconds(turns: int) -> float:
    """Return the CPU time of claiming a chunk and releasing it, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(folder, many_chunks())

        def claims() -> None:
            for chunk in range(500):
                with table.claim(chunk):
                    pass

        return 1e6 * seconds(claims, turns) / 500


def look_milliseconds(turns: int) -> float:
    """Return the CPU time of listing which of 10,000 chunks are committed, when most are known."""
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(folder, many_chunks())
        fill(table)
        return 1e3 * seconds(table.committed_chunks, turns)


def files_per_chunk(_: int) -> float:
    """Return the number of files that a chunk adds to a finished table."""
    counts = []
    for chunks in (8, 16):
        with tempfile.TemporaryDirectory() as folder:
            fill(make_table(folder, TableSpec(chunks * CHUNK_ROWS, many_chunks().columns, CHUNK_ROWS)))
            counts.append(sum(path.is_file() for path in Path(folder).rglob("*")))
    return (counts[1] - counts[0]) / 8


def all_reduce_rate(_: int) -> float:
    """Return GB/s of an all-reduce of a gram matrix between two processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        _, ranks = start(2, MODULE, Path(folder))
    return REDUCED_MIB / 1024 * 1.073741824 / max(rank["seconds"] for rank in ranks)


def rank(folder: Path) -> None:
    """Reduce a gram matrix over all ranks, several times."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    gram_like = torch.ones(REDUCED_MIB << 17, dtype=torch.float64)
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        distributed.all_reduce(gram_like)
        times.append(time.perf_counter() - begun)
    keep(folder, {"seconds": statistics.median(times[1:])})
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
