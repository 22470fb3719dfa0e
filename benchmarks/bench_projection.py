"""Projectors alone: one-thread CPU time relative to one read of the gradients, and peak memory.

All projectors of one K run alternately in one process, on the same 64 gradients of p entries. A figure is the median
of its rounds, and a ratio to a floor is the median of the ratios within a round. The read floor is ``x.sum()``. The
copy, into existing memory, is the minimum for any method that writes the gradients once. "From factors", the
gradients are never formed; the floor is still that of the formed gradients. Peak memory is the growth of the
resident set while a projector is created and runs once, in a separate process, beyond the gradients (Linux only).

Time and memory of dense projections are proportional to p. They are measured on fewer entries (trak_lite's with
proportionally less memory for its matrix) in the first two rounds, and scaled; ``scaled_from`` records this.

``--factors`` measures both ways to sketch factors, beside the choice of the sketch's cost model, and fits the model's
constants.

Peers: traker 0.3.2, whose CPU default is ``BasicProjector`` normal (the default of the class is float32, that of
``TRAKer`` float16), and dattri 0.3.0 (CPU default: normal), created again for every batch as dattri does.

Run:  python -m benchmarks.bench_projection [--large | --factors] [--rounds 5] [--proj-dims 512 2048 8192]
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import measuring
from benchmarks.measuring import cpu_seconds, memory_growth, run_worker
from trak_lite.projectors import (
    AbstractProjector,
    CountSketchProjector,
    GraSSProjector,
    MaskProjector,
    RademacherProjector,
    TwoSidedProjector,
)
from trak_lite.projectors._scratch import Scratch
from trak_lite.projectors.dense.projectors import DEFAULT_MEMORY_BUDGET
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.matrix import MatrixSketch, fourier_is_cheaper, has_many_pieces
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock

BATCH = 64
SHAPES = {10**6: (1000, 1000), 10**7: (2500, 4000)}
PROJ_DIMS = (512, 2048, 8192)
SCALED = 50_000  # entries on which dense projections are timed: a block of the peers' matrix is 20 MB
SCALED_MEMORY = 20_000
SLOW_ROUNDS = 2
BATCH_SECONDS = 0.15  # short calls are repeated until one measurement takes about this long
GOALS = {512: 80, 2048: 300}  # times faster than the original's CPU default
FLOOR_GOAL = 2.0
READ, COPY, ORIGINAL, OURS = "read", "copy", "traker normal", "countsketch"
# So that memory that was freed is given back and the growth of the next K starts from nothing.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Gradients of one matrix parameter of ``p = d_out * d_in`` entries."""

    rows: Tensor
    """``(B, p)``."""
    shape: tuple[int, int]
    """``(d_out, d_in)``."""
    stand_for: float
    """How many times as many entries they are measured for."""

    @classmethod
    def draw(
        cls, entries: int, p: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> Inputs:
        """Draw gradients of some entries, the same in every process, to represent gradients of p entries."""
        torch.manual_seed(0)
        rows = torch.randn(BATCH, entries, device=device, dtype=dtype)
        return cls(rows, SHAPES.get(entries, (1, entries)), p / entries)

    def factors(self, positions: int) -> FactoredBlock:
        """Draw gradients of the same shape, device and dtype in factors."""
        inputs, output_grads = (
            torch.randn(BATCH, positions, size, device=self.rows.device, dtype=self.rows.dtype)
            for size in reversed(self.shape)
        )
        return FactoredBlock("weight", inputs, output_grads)


def project(projector: AbstractProjector, block: GradientBlock, shape: tuple[int, ...]) -> Tensor:
    """Project a batch that consists of one block."""
    accumulator = projector.accumulator(block.num_samples, model_id=0, parameters={block.name: shape})
    accumulator.add(block)
    return accumulator.features()


def on_vector(make: Callable[[int], AbstractProjector]) -> Callable[[Inputs, int], Call]:
    """trak_lite: gradients of a parameter without rows and columns."""
    return lambda inputs, proj_dim: partial(
        project, make(proj_dim), DenseBlock("weight", inputs.rows), inputs.rows.shape[1:]
    )


def on_matrix(inputs: Inputs, proj_dim: int) -> Call:
    """trak_lite: the same numbers as gradients of a matrix."""
    block = DenseBlock("weight", inputs.rows.unflatten(1, inputs.shape))
    return partial(project, CountSketchProjector(proj_dim), block, inputs.shape)


def on_factors(make: Callable[[int], AbstractProjector], positions: int) -> Callable[[Inputs, int], Call]:
    """trak_lite: gradients of a matrix in factors."""
    return lambda inputs, proj_dim: partial(project, make(proj_dim), inputs.factors(positions), inputs.shape)


def rademacher(inputs: Inputs, proj_dim: int) -> Call:
    """trak_lite: dense; the same share of the matrix is in memory as for all p entries."""
    budget = round(DEFAULT_MEMORY_BUDGET / inputs.stand_for)
    return on_vector(partial(RademacherProjector, memory_budget=budget))(inputs, proj_dim)


def traker(kind: str, dtype: torch.dtype = torch.float32) -> Callable[[Inputs, int], Call]:
    """The original's projector, which stores the block of its matrix and draws it again."""

    def prepare(inputs: Inputs, proj_dim: int) -> Call:
        from trak.projectors import BasicProjector, ProjectionType

        size, device = inputs.rows.shape[1], torch.device("cpu")
        projector = BasicProjector(size, proj_dim, 0, ProjectionType(kind), device, dtype=dtype)
        return lambda: projector.project(inputs.rows, model_id=0)

    return prepare


def dattri(kind: str) -> Callable[[Inputs, int], Call]:
    """The projection of dattri's TRAK, which creates a projector for every batch."""

    def prepare(inputs: Inputs, proj_dim: int) -> Call:
        from dattri.func.projection import random_project

        x = inputs.rows
        return lambda: random_project(x, len(x), proj_dim, 32, proj_type=kind)(x)

    return prepare


def read(inputs: Inputs, proj_dim: int) -> Call:
    """Read every entry once."""
    return inputs.rows.sum


def copy(inputs: Inputs, proj_dim: int) -> Call:
    """Read every entry and write it to memory that was used before."""
    target = torch.zeros_like(inputs.rows)
    return partial(target.copy_, inputs.rows)


METHODS: dict[str, Callable[[Inputs, int], Call]] = {
    READ: read,
    COPY: copy,
    OURS: on_vector(CountSketchProjector),
    "countsketch, matrix": on_matrix,
    "countsketch, factors T=1": on_factors(CountSketchProjector, 1),
    "countsketch, factors T=64": on_factors(CountSketchProjector, 64),
    "two_sided, factors T=1": on_factors(TwoSidedProjector.of_width, 1),
    "two_sided, factors T=64": on_factors(TwoSidedProjector.of_width, 64),
    "mask": on_vector(MaskProjector),
    "grass": on_vector(GraSSProjector),
    "rademacher": rademacher,
    ORIGINAL: traker("normal"),
    "traker normal, float16": traker("normal", torch.float16),
    "traker rademacher": traker("rademacher"),
    "dattri normal": dattri("normal"),
    "dattri rademacher": dattri("rademacher"),
    "dattri random_mask": dattri("random_mask"),
}
PEERS_SLOW = (
    ORIGINAL,
    "traker normal, float16",
    "traker rademacher",
    "dattri normal",
    "dattri rademacher",
)
SLOW = ("rademacher", *PEERS_SLOW)


def repeats_for(call: Call) -> int:
    """Return the number of calls that take about ``BATCH_SECONDS``; the call has run once."""
    return max(1, min(10, round(BATCH_SECONDS / max(1e-4, cpu_seconds(call)))))


# ---------------------------------------------------------------- one thread, CPU time


def time_worker(p: int, proj_dim: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of every round of every method, for all p entries."""
    torch.set_num_threads(1)
    whole, part = Inputs.draw(p, p), Inputs.draw(min(p, SCALED), p)
    calls: dict[str, Call] = {}
    found: dict[str, Any] = {"seconds": {}, "fails": {}}
    for name, prepare in METHODS.items():
        try:
            calls[name] = prepare(part if name in SLOW else whole, proj_dim)
        except ImportError as error:
            found["fails"][name] = str(error)
    repeats = {}
    for name, call in calls.items():
        if name not in PEERS_SLOW:  # theirs do the same at every call
            call()
        repeats[name] = 1 if name in SLOW else repeats_for(call)
    for turn in range(rounds):
        for name, call in calls.items():
            if turn < SLOW_ROUNDS or name not in SLOW:
                seconds = cpu_seconds(call, repeats[name]) * (part.stand_for if name in SLOW else 1)
                found["seconds"].setdefault(name, []).append(seconds)
    return found


def memory_worker(name: str, p: int, proj_dims: list[int]) -> dict[str, float | None]:
    """Return the growth of memory by K while a method is created and runs once, for all p entries."""
    torch.set_num_threads(1)
    inputs = Inputs.draw(min(p, SCALED_MEMORY) if name in SLOW else p, p)
    METHODS[name](Inputs.draw(512, 512), 8)()  # libraries
    found: dict[str, float | None] = {}
    for proj_dim in proj_dims:
        with memory_growth() as growth:
            METHODS[name](inputs, proj_dim)()
        found[str(proj_dim)] = None if growth.mib is None else growth.mib * inputs.stand_for
    return found


def summary(
    seconds: Mapping[str, list[float]], memory: Mapping[str, dict[str, Any]], p: int, proj_dim: int
) -> dict[str, Any]:
    """Return the figures of every method at one K."""
    rows: dict[str, Any] = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        rows[name] = {"cpu_ms": 1e3 * median, "range_ms": [1e3 * min(times), 1e3 * max(times)]}
        for floor in (READ, COPY):
            pairs = zip(times, seconds[floor], strict=False)
            rows[name][f"to_{floor}"] = statistics.median(a / b for a, b in pairs)
        if ORIGINAL in seconds:
            rows[name]["faster_than_original"] = statistics.median(seconds[ORIGINAL]) / median
        rows[name]["peak_mib"] = memory.get(name, {}).get(str(proj_dim))
        if name in SLOW and p > SCALED:
            rows[name]["scaled_from"] = {"p": SCALED, "p_for_memory": SCALED_MEMORY}
    return rows


def one_thread(p: int, proj_dims: list[int], rounds: int) -> dict[str, Any]:
    """Measure all methods for all K, print tables, and return the results."""
    memory = {}
    for name in METHODS:
        if name in (READ, COPY):
            continue
        memory[name] = run_worker(memory_worker, name, p, proj_dims, environment=EXACT_MEMORY)
        print(name, memory[name], file=sys.stderr, flush=True)
    part: dict[str, Any] = {"batch": BATCH, "rounds": rounds, "proj_dims": {}}
    for proj_dim in proj_dims:
        found = run_worker(time_worker, p, proj_dim, rounds)
        if "seconds" not in found:
            raise RuntimeError(f"The worker of K = {proj_dim} failed: {found['fails']}")
        rows = summary(found["seconds"], memory, p, proj_dim)
        part["proj_dims"][str(proj_dim)] = {"methods": rows, "fails": found["fails"]}
        print_rows(rows, found["fails"], p, proj_dim)
    return part


def print_rows(rows: Mapping[str, Any], fails: Mapping[str, str], p: int, proj_dim: int) -> None:
    """Print the Markdown table of one K, and the goals."""
    print(f"\n64 gradients of {p:,} entries, K = {proj_dim}; * scaled\n")
    print("| method | CPU ms | x read | x copy | original takes | peak MiB |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, row in rows.items():
        mark = "*" if "scaled_from" in row else ""
        faster = f"{row['faster_than_original']:.1f}x" if "faster_than_original" in row else ""
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}{mark}"
        print(
            f"| {name} | {row['cpu_ms']:.1f}{mark} | {row['to_read']:.2f} | {row['to_copy']:.2f} | {faster} | {peak} |"
        )
    for name, why in fails.items():
        print(f"- {name} fails: {why}")
    ours = rows[OURS]
    print(f"\nGoal: {OURS} at most {FLOOR_GOAL}x the read floor: {ours['to_read']:.2f}x.")
    if proj_dim in GOALS and "faster_than_original" in ours:
        faster = ours["faster_than_original"]
        print(
            f"Goal: at least {GOALS[proj_dim]}x faster than the original's default: {faster:.0f}x.",
            flush=True,
        )


# ---------------------------------------------------------------- the cost model of factors

FACTORS = [
    (shape, positions, proj_dim)
    for shape, positions in [
        ((1024, 1024), 1),
        ((128, 1024), 1),
        ((1000, 128), 64),
        ((768, 192), 64),
        ((192, 768), 64),
        ((64, 288), 64),
        ((512, 512), 8),
        ((4096, 64), 1),  # many short rows
    ]
    for proj_dim in PROJ_DIMS
]
FACTORS_BATCH = 32


def factors_worker(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the milliseconds of both ways for every (shape, T, K), and the choice of the model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = []
    for shape, positions, proj_dim in FACTORS:
        block = FactoredBlock(
            "weight",
            torch.randn(FACTORS_BATCH, positions, shape[1]),
            torch.randn(FACTORS_BATCH, positions, shape[0]),
        )
        calls = {}
        for way in ("form", "fourier"):
            sketch = MatrixSketch(
                shape, proj_dim, Keys(0, 0, "weight"), device=torch.device("cpu"), method=way
            )
            calls[way] = partial(sketch.factored, block, Scratch())
            calls[way]()
        repeats = {way: repeats_for(call) for way, call in calls.items()}
        times: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(rounds):
            for way, call in calls.items():
                times[way].append(1e3 * cpu_seconds(call, repeats[way]))
        row = {way: statistics.median(values) for way, values in times.items()}
        taken = "fourier" if fourier_is_cheaper(shape, positions, proj_dim=proj_dim) else "form"
        found.append({"shape": shape, "positions": positions, "proj_dim": proj_dim, "taken": taken, **row})
    return {"rows": found}


def fitted_constants(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the cost model's constants (nanoseconds) of matrices whose rows are added one by one.

    They have the smallest relative errors of the measured times.
    """
    rows = [row for row in rows if not has_many_pieces(row["shape"], row["proj_dim"])]
    form, transforms = [], []
    for row in rows:
        (d_out, d_in), size = row["shape"], row["proj_dim"]
        blocks = -(-d_out // size) * -(-d_in // size)
        adds = d_out * -(-d_in // size)
        form.append([2 * row["positions"] * d_out * d_in, d_out * d_in, adds / FACTORS_BATCH])
        transforms.append((1 + 2 * row["positions"] * blocks) * size * math.log2(size))
    formed, fourier = (
        torch.tensor([row[way] for row in rows], dtype=torch.float64) * 1e6 / FACTORS_BATCH
        for way in ("form", "fourier")
    )
    design = torch.tensor(form, dtype=torch.float64) / formed[:, None]
    product, addition, row_cost = torch.linalg.lstsq(
        design, torch.ones_like(formed)[:, None]
    ).solution.flatten()
    return {
        "_PRODUCT": float(product),
        "_ADDITION": float(addition),
        "_ROW": float(row_cost),
        "_TRANSFORM": float((fourier / torch.tensor(transforms)).median()),
    }


def factors(rounds: int) -> dict[str, Any]:
    """Measure both ways to sketch factors, print a table, return the part of the file."""
    found = run_worker(factors_worker, rounds)
    if "fails" in found:
        raise RuntimeError(f"The worker failed: {found['fails']}")
    rows = found["rows"]
    print("| parameter | T | K | form ms | fourier ms | taken | costs, of the best |")
    print("|---|--:|--:|--:|--:|---|--:|")
    for row in rows:
        row["regret"] = row[row["taken"]] / min(row["form"], row["fourier"])
        print(
            f"| {row['shape'][0]} x {row['shape'][1]} | {row['positions']} | {row['proj_dim']} | {row['form']:.2f} "
            f"| {row['fourier']:.2f} | {row['taken']} | {row['regret']:.2f} |"
        )
    fitted = fitted_constants(rows)
    print("Constants that fit:", ", ".join(f"{name} = {value:.3g}" for name, value in fitted.items()))
    return {"batch": FACTORS_BATCH, "rounds": rounds, "cases": rows, "fitted_ns": fitted}


def main() -> None:
    """Run the requested measurements, print tables, write JSON."""
    parser = measuring.parser_of(__doc__, "projection.json")
    parser.add_argument("--large", action="store_true", help="10 million entries instead of 1 million")
    parser.add_argument("--factors", action="store_true", help="both ways to sketch factors")
    parser.add_argument("--proj-dims", type=int, nargs="*", default=list(PROJ_DIMS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    p = 10**7 if args.large else 10**6
    if args.factors:
        parts = {"factors": factors(args.rounds)}
    else:
        parts = {f"p={p:.0e}": one_thread(p, args.proj_dims, args.rounds)}
    measuring.save_parts(args.out, measuring.surroundings(), parts)


if __name__ == "__main__":
    main()
