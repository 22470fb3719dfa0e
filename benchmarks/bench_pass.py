"""Per-sample gradients of the zoo's published architectures, in units of a plain forward and backward pass.

All are tiny, so what is measured is the cost of a pass beside its arithmetic: Python between the operations. Time is
CPU time on one thread; the ratio is the median over interleaved pairs (all per-sample gradients of a batch, passed to a
sink that discards them; the plain pass over the same batch), without a self-check. ``us_per_module`` is the
difference of the two shortest times, divided by the number of modules with parameters.

``to_plain`` is the time of the batches of a long run, most of which replay a recorded pass; ``passed`` is that of the
pass itself, as in a run of few batches. ``replayed`` says whether replays took place. The package's comparisons of
replays with the pass are part of it.

Run:  python -m benchmarks.bench_pass [--batch 4 32] [--every 1] [--label NAME] [--only NAME ...]
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import RESULTS, cpu_seconds, parser_of, surroundings
from benchmarks.zoo import architectures
from trak_lite.errors import TrakLiteError
from trak_lite.gradient_computers.choice import choose_gradient_computer
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import GradientBlock, SummedBlock

BURST_SECONDS = 0.03
NUM_BATCHES = 16


class Projector:
    """Stands for what projects the gradients: recordings end with it."""


def tensors_of(block: GradientBlock) -> list[Tensor]:
    """Return the tensors of a block as the computer forms them."""
    parts = block.parts if isinstance(block, SummedBlock) else (block,)
    values = [getattr(part, field.name) for part in parts for field in dataclasses.fields(part)]
    return [value for value in values if isinstance(value, Tensor)]


def measured(name: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one architecture."""
    entry = architectures()[name]
    model, task = entry.make().eval(), resolve_task(entry.task)
    batch = entry.samples(batch_size, 1).batch(range(batch_size))
    task.prepare(model)
    computer = choose_gradient_computer(model, task, batch).computer
    computer.self_check = False
    kept = [p for p in model.parameters() if p.requires_grad]

    def plain() -> None:
        terms = task.evaluate(ModelCall(model), batch)
        torch.autograd.grad(terms.output.sum(), kept, allow_unused=True)

    passes = [0]

    def gradients() -> list[Tensor]:
        passes[0] += 1
        total: list[Tensor] = []
        terms = computer.stream_gradients(batch, lambda block: total.extend(tensors_of(block)))
        return [*terms, *total]

    def replayed() -> None:
        computer.run(batch, projector, (), gradients, math.inf)

    projector = Projector()
    for function in (gradients, plain):
        function()
        function()
    for _ in range(NUM_BATCHES):  # the recording, and its first comparisons
        replayed()
    passes[0] = 0
    count = max(1, int(BURST_SECONDS / max(cpu_seconds(plain), 1e-4)))
    triples = [
        tuple(cpu_seconds(function, count) for function in (gradients, plain, replayed))
        for _ in range(rounds)
    ]
    passes[0] -= rounds * count
    ours, theirs, _ = (min(times) for times in zip(*triples, strict=True))
    modules = sum(bool(module._parameters) for module in model.modules())
    return {
        "computer": type(computer).__name__.removesuffix("GradientComputer").lower(),
        "to_plain": round(statistics.median(c / b for _, b, c in triples), 2),
        "passed": round(statistics.median(a / b for a, b, _ in triples), 2),
        "replayed": passes[0] < rounds * count / 2,
        "plain_ms": round(theirs * 1e3, 2),
        "us_per_module": round((ours - theirs) / modules * 1e6),
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst ratio."""
    ratios = {name: row["to_plain"] for name, row in rows.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "architectures": len(rows),
        "median": statistics.median(ratios.values()),
        "median_of_passes": statistics.median(row["passed"] for row in rows.values()),
        "not_replayed": [name for name, row in rows.items() if not row["replayed"]],
        "median_us_per_module": statistics.median(row["us_per_module"] for row in rows.values()),
        "worst": {worst: ratios[worst]},
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--every", type=int, default=1, help="take every n-th architecture")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--label", default="current", help="name of the figures in the result")
    parser.add_argument("--only", nargs="+", help="names of architectures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "pass.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    names = args.only or list(architectures())[:: args.every]
    for batch_size in args.batch:
        rows = {}
        for name in names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    rows[name] = measured(name, batch_size, args.rounds)
                except TrakLiteError as error:
                    print(name, "is refused:", str(error).splitlines()[0])
                    continue
            print(batch_size, name, rows[name], flush=True)
        level = os.environ.get("ATEN_CPU_CAPABILITY", "native")
        key = f"{args.label}, batch {batch_size}, {level}"
        table[key] = {**surroundings(), "summary": summary(rows), "models": rows}
        print(key, table[key]["summary"])
        path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
