"""Estimates cost, bytes and hours of large runs, and makes the tables of docs/scale.md.

Rates without a GPU are read from benchmarks/results. No GPU was measured: its rates are assumptions, each an argument
with a default that the page lists.

Run:  python docs/scale_plan.py --rows 1e7 --gpus 8 --width 1024 --segments 12 --gpu-price 2
      python docs/tables.py        (rewrites the tables of the pages)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trak_lite.run.tables import feature_table_spec

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
HOUR, GB, TB = 3600.0, 1e9, 1e12
ROWS = (10**6, 10**8, 10**9)
GPUS = (1, 64, 1024)
SHAPES = ((1, 512), (1, 2048), (16, 512), (16, 2048), (1, 16384))
"""Segments and K of the tables: one joint kernel, one kernel per module, and one kernel that is too wide."""
MODELS = (
    ("1e7 parameters, 64 tokens", 1e7, 64),
    ("2.5e7 parameters, 256 tokens", 2.5e7, 256),
    ("GPT, 1.24e8 parameters, 512 tokens", 124e6, 512),
    ("7e9 parameters, 2048 tokens", 7e9, 2048),
)
"""Name, parameters, tokens of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Assumed rates and sizes, which were not measured."""

    parameters: float = 124e6
    """Number of parameters of the model."""
    tokens: float = 512
    """Tokens per row; a forward and a backward pass take 6 FLOP per parameter and token."""
    gpu_model_flops: float = 1e14
    """FLOP/s that a GPU sustains in forward and backward passes."""
    gpu_float32_flops: float = 3e13
    """FLOP/s that a GPU sustains in float32 products: scores."""
    gpu_float64_flops: float = 2e13
    """FLOP/s that a GPU sustains in float64 products: gram matrices and their factorisation."""
    gpu_top_rate: float = 1e10
    """Scores per second that a GPU searches for the top rows."""
    disk: float = 2e10
    """Bytes per second of the shared file system, for all processes together."""
    network: float = 1e9
    """Bytes per second that a process sends in an all-reduce, by gloo over TCP from the CPU."""
    gpu_price: float = 2.5
    """Price of a GPU hour, in any currency."""
    targets: float = 1000
    """Number of targets M that are scored at once."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured rates of one CPU thread, and ratios."""

    to_plain: float
    """Time of featurizing divided by that of forward and backward, per further batch of the GPT (featurize.json)."""
    write: float
    """Bytes of rows per CPU second that a process writes to a store (store.json)."""
    read: float
    """Bytes of rows per CPU second that a process reads and multiplies with one target (store.json)."""
    claim: float
    """CPU seconds to claim a chunk (scale_out.json)."""
    look: float
    """CPU seconds, per chunk of the store, to list what is committed once (scale_out.json)."""
    files_per_chunk: float
    """Files per chunk of a finished table (scale_out.json)."""
    cpu_gram: float
    """FLOP per CPU second of a gram matrix with K = 2048 (scale_out.json)."""
    cpu_score: float
    """FLOP per CPU second of scores for 512 targets (scale_out.json)."""
    cpu_top: float
    """Scores per CPU second of the search for the top rows (scale_out.json)."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run with one checkpoint; each further checkpoint costs as much again."""

    rows: int
    gpus: int
    segments: int = 1
    width: int = 2048
    """K of a segment."""
    dtype: str = "float16"


def parts(name: str) -> dict[str, Any]:
    """Return the measured parts of one file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["parts"]
    return found


def measured() -> Measured:
    """Return the rates of the last measurement."""
    gpt = parts("featurize")["gpt-512"]["tools"]["trak_lite"]
    store, rates = parts("store"), parts("scale_out")["rates"]
    return Measured(
        to_plain=gpt["further_to_plain"],
        write=32 * 8192 / (1e-6 * store["write"]["store_us"]),
        read=32768 * 4096 / store["read"]["1"]["store_s"],
        claim=1e-6 * rates["claim_us"],
        look=1e-3 * rates["look_ms"] / 10_000,
        files_per_chunk=rates["files_per_chunk"],
        cpu_gram=1e9 * rates["gram_gflops"]["2048"],
        cpu_score=1e9 * rates["score_gflops"]["512"],
        cpu_top=rates["top_scores_per_s"],
    )


def row_bytes(run: Run) -> int:
    """Return the bytes of one row on disk: features, q and w."""
    return feature_table_spec(run.rows, run.segments * run.width, run.dtype, {}).row_bytes


def chunk_rows(run: Run) -> int:
    """Return the number of rows of a chunk."""
    return feature_table_spec(run.rows, run.segments * run.width, run.dtype, {}).chunk_rows


def chunks(run: Run) -> int:
    """Return the number of chunks."""
    return -(-run.rows // chunk_rows(run))


def stages(run: Run, found: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the seconds of every stage, without overlap of stages.

    Gram matrices and scores are divided among all GPUs, gradients by whole chunks. The factorisation is not divided.
    """
    total = run.rows * row_bytes(run)
    turns = -(-chunks(run) // run.gpus)
    rows_of_one = min(turns * chunk_rows(run), run.rows)
    plain = 6 * assumed.parameters * assumed.tokens / assumed.gpu_model_flops
    numbers, squares = run.segments * run.width, run.segments * run.width**2
    look = found.claim + found.look * chunks(run)
    return {
        "gradients": rows_of_one * found.to_plain * plain,
        "writing": total / min(assumed.disk, run.gpus * found.write),
        "claims": turns * look,
        "gram": 2.0 * run.rows * squares / assumed.gpu_float64_flops / run.gpus,
        "all-reduce": 2 * (run.gpus - 1) / run.gpus * 8 * squares / assumed.network,
        "factorisation": squares * run.width / 3 / assumed.gpu_float64_flops,
        "reading": 2 * total / min(assumed.disk, run.gpus * found.read),
        "scores": 2.0 * run.rows * numbers * assumed.targets / assumed.gpu_float32_flops / run.gpus,
        "top rows": run.rows * assumed.targets / assumed.gpu_top_rate / run.gpus,
    }


def cost(run: Run, seconds: dict[str, float], assumed: Assumed) -> float:
    """Return the cost of the GPUs for the time of all stages."""
    return sum(seconds.values()) / HOUR * run.gpus * assumed.gpu_price


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column is text and whose others are figures."""
    titles = list(head)
    ruler = ["---", *["--:"] * (len(titles) - 1)]
    lines = (f"| {' | '.join(cells)} |" for cells in [titles, *rows])
    first = next(lines)
    return "\n".join([first, f"|{'|'.join(ruler)}|", *lines]) + "\n"


def number(value: float) -> str:
    """Return a number with two significant digits, or as a whole number with separators from 10 on."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes, hours or days."""
    if seconds < 1e-3:
        return "< 1 ms"
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (100 * HOUR, HOUR, "h")):
        if seconds < limit:
            return f"{number(seconds / unit)} {name}"
    return f"{number(seconds / 24 / HOUR)} d"


def shape(run: Run) -> str:
    """Return segments and K as text."""
    return f"{run.width:,}" if run.segments == 1 else f"{run.segments} x {run.width:,}"


def scale_rates() -> str:
    """Return the table of measured and assumed rates."""
    found, assumed = measured(), Assumed()
    lines = [
        ("featurizing / (forward and backward), GPT", f"{found.to_plain:.2f}", "featurize.json"),
        ("rows put into a store, per CPU second", f"{found.write / GB:.1f} GB", "store.json"),
        ("rows read and multiplied, per CPU second", f"{found.read / GB:.1f} GB", "store.json"),
        ("claiming a chunk", f"{1e6 * found.claim:.0f} µs", "scale_out.json"),
        ("listing the commits of 10,000 chunks", f"{1e7 * found.look:.0f} ms", "scale_out.json"),
        ("files per chunk", f"{found.files_per_chunk:.1f}", "scale_out.json"),
        ("gram, one CPU thread", f"{found.cpu_gram / 1e9:.0f} GFLOP/s", "scale_out.json"),
        ("scores, one CPU thread", f"{found.cpu_score / 1e9:.0f} GFLOP/s", "scale_out.json"),
        (
            "search for top rows, one CPU thread",
            f"{found.cpu_top / 1e6:.0f} million scores/s",
            "scale_out.json",
        ),
        ("parameters of the model", f"{assumed.parameters:.3g}", "assumed"),
        ("tokens per row", f"{assumed.tokens:g}", "assumed"),
        ("GPU, forward and backward", f"{assumed.gpu_model_flops:.0e} FLOP/s", "assumed"),
        ("GPU, float32 products", f"{assumed.gpu_float32_flops:.0e} FLOP/s", "assumed"),
        ("GPU, float64 products", f"{assumed.gpu_float64_flops:.0e} FLOP/s", "assumed"),
        ("GPU, search for top rows", f"{assumed.gpu_top_rate:.0e} scores/s", "assumed"),
        ("shared file system", f"{assumed.disk / GB:.0f} GB/s", "assumed"),
        ("network, per process", f"{assumed.network / GB:.0f} GB/s", "assumed"),
        ("price of a GPU hour", f"{assumed.gpu_price:g}", "assumed"),
        ("targets", f"{assumed.targets:g}", "assumed"),
    ]
    return markdown(["rate", "figure", "from"], lines)


def scale_bytes() -> str:
    """Return the table of bytes, chunks and files for all numbers of rows and shapes."""
    files = measured().files_per_chunk
    lines = []
    for segments, width in SHAPES:
        for rows in ROWS:
            run = Run(rows, 1, segments, width)
            total = [rows * row_bytes(Run(rows, 1, segments, width, t)) / TB for t in ("float16", "int4")]
            lines.append(
                [
                    shape(run),
                    f"{rows:.0e}",
                    f"{row_bytes(run):,}",
                    *(f"{number(value)} TB" for value in total),
                    f"{chunks(run):,}",
                    f"{chunks(run) * files:,.0f}",
                ]
            )
    return markdown(["K", "rows", "bytes per row", "float16", "int4", "chunks", "files"], lines)


def scale_hours() -> str:
    """Return the table of times and cost for all numbers of rows and GPUs, K = 2048 in one segment."""
    found, assumed, lines = measured(), Assumed(), []
    for rows in ROWS:
        for gpus in GPUS:
            run = Run(rows, gpus)
            seconds = stages(run, found, assumed)
            lines.append(
                [
                    f"{rows:.0e}",
                    f"{gpus:,}",
                    *(duration(seconds[s]) for s in ("gradients", "writing", "claims", "gram")),
                    *(duration(seconds[s]) for s in ("reading", "scores", "top rows")),
                    duration(sum(seconds.values())),
                    f"{cost(run, seconds, assumed):,.0f}",
                ]
            )
    titles = ["rows", "GPUs", "gradients", "writing", "claims", "gram", "reading", "scores", "top rows"]
    return markdown([*titles, "all", "cost"], lines)


def scale_widths() -> str:
    """Return the table of times by shape, for 1e8 rows on 64 GPUs."""
    found, assumed, lines = measured(), Assumed(), []
    names = ("gradients", "writing", "gram", "all-reduce", "factorisation", "reading", "scores")
    for segments, width in SHAPES:
        run = Run(10**8, 64, segments, width)
        seconds = stages(run, found, assumed)
        slowest = max(seconds, key=seconds.__getitem__)
        lines.append([shape(run), *(duration(seconds[name]) for name in names), slowest])
    return markdown(["K", *names, "slowest"], lines)


def scale_models() -> str:
    """Return the table of times by model, for 1e8 rows on 64 GPUs and 16 segments of K = 2048."""
    found, lines = measured(), []
    names = ("gradients", "writing", "gram", "reading", "scores", "top rows")
    for name, parameters, tokens in MODELS:
        assumed = Assumed(parameters=parameters, tokens=tokens)
        seconds = stages(Run(10**8, 64, 16), found, assumed)
        slowest = max(seconds, key=seconds.__getitem__)
        lines.append(
            [name, f"{6 * parameters * tokens:.0e}", *(duration(seconds[n]) for n in names), slowest]
        )
    return markdown(["model", "FLOP per row", *names, "slowest"], lines)


TABLES = (scale_rates, scale_bytes, scale_hours, scale_widths, scale_models)


def main() -> None:
    """Print the plan of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument(
        "--segments", type=int, default=1, help="1 is layout='joint'; otherwise one per module"
    )
    parser.add_argument("--width", type=int, default=2048, help="K of a segment")
    parser.add_argument("--dtype", choices=("float32", "float16", "int8", "int4"), default="float16")
    for name in (field.name for field in fields(Assumed)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Assumed(), name))
    given = vars(parser.parse_args())
    assumed = Assumed(**{field.name: given[field.name] for field in fields(Assumed)})
    run = Run(int(given["rows"]), given["gpus"], given["segments"], given["width"], given["dtype"])
    seconds = stages(run, measured(), assumed)
    print(f"bytes          {number(run.rows * row_bytes(run) / GB)} GB in {chunks(run):,} chunks")
    for name, value in seconds.items():
        print(f"{name:<14} {duration(value)}")
    print(f"all            {duration(sum(seconds.values()))}, cost {cost(run, seconds, assumed):,.0f}")


if __name__ == "__main__":
    main()
