"""LDS of the default method at several dampings, with q inside and outside, on problems where no default was chosen.

Ground truth and problems are those of ``benchmarks.lds.table``. All checkpoints of one run on all data are used. The
LDS is over all subsets and targets, with its 95 % interval; ``None`` is the default damping.

Run:  python -m benchmarks.lds_damping [--settings digits_relu ...] [--dampings 3 10]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from typing import Any

import torch

from benchmarks.lds.methods import BATCH, Problem
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.truth import full_runs, load
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import save_parts, surroundings
from trak_lite import Attributor
from trak_lite.evaluation import linear_datamodeling_score

RESULTS = FOLDER / "lds_damping.json"


def figures(name: str, dampings: list[float]) -> dict[str, Any]:
    """Return the LDS of a problem by q and damping."""
    setting = SETTINGS[name]
    truth = load(setting)
    problem = Problem(setting, full_runs(setting, 1))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        attributor = Attributor(
            problem.model(), setting.task, f"{folder}/store", batch_size=BATCH, progress=False
        )
        attributor.featurize(problem.train, problem.checkpoints("run"))
        for q in ("inside", "outside"):
            for damping in (None, *dampings):
                changes = {"q": q} if damping is None else {"q": q, "damping": damping}
                method = replace(attributor.method, **changes)
                scores = attributor.score(problem.targets, method=method, dense=False).numpy()
                score = linear_datamodeling_score(scores, truth.masks, truth.outputs.mean(1))
                low, high = score.interval
                found[f"q {q}, damping {damping}"] = {"mean": score.mean, "interval": [low, high]}
                print(f"| {name} | {q} | {damping} | {score.mean:.3f} [{low:.3f}, {high:.3f}] |", flush=True)
    return found


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--dampings", nargs="*", type=float, default=[3.0, 10.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| problem | q | damping | LDS |")
    print("|---|---|--:|--:|")
    for name in args.settings:
        save_parts(RESULTS, surroundings(), {name: figures(name, args.dampings)})


if __name__ == "__main__":
    main()
