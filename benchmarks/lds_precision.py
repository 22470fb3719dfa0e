"""LDS of rows whose gradients were computed in lower precision, against those of float32.

Ground truth and problems are those of ``benchmarks.lds.table``, the scores those of the default method, over all
subsets and targets, with their 95 % interval. ``difference`` compares with float32 by the same subsets and targets.
``scores`` is the relative difference of the scores, in the Frobenius norm.

- autocast: passes of the model under autocast in bfloat16 or float16 (``autocast_dtype`` of a gradient computer).
- bfloat16 model: weights, activations and gradients in bfloat16.
- TF32: ``float32_products="tf32"``: products of the model, of its gradients and of features round float32 to 10 bits
  of mantissa, and add in float32. CPUs do not have TF32: these rows are computed on the simulated accelerator of
  tests/device, which rounds in the same places.

Features are stored in float16, as by default, and scored in float64. Model weights are cached in runs/lds.

Run:  python -m benchmarks.lds_precision [--settings digits_mlp digits_cnn] [--checkpoints run]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from benchmarks.gpu.bench import STAND_IN, Bench
from benchmarks.lds.methods import BATCH, Problem
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.truth import estimate, full_runs, lds, load
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import parser_of, save_parts, surroundings
from trak_lite import Attributor
from trak_lite.evaluation import compare_datamodeling_scores
from trak_lite.gradient_computers import HookGradientComputer

RESULTS = FOLDER / "lds_precision.json"
CHOICES = ("digits_mlp", "digits_cnn")
FLOAT32 = "float32"


def scores(
    problem: Problem,
    which: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> np.ndarray:
    """Return the scores ``(N, M)`` of the default method; ``settings`` are those of the gradient computer."""

    def cast(rows: TensorDataset) -> TensorDataset:
        return TensorDataset(*(part.to(dtype) if part.is_floating_point() else part for part in rows.tensors))

    states = [
        {name: value.to(dtype) for name, value in state.items()} for state in problem.checkpoints(which)
    ]
    with tempfile.TemporaryDirectory() as folder:
        attributor = Attributor(
            problem.model().to(device=device, dtype=dtype),
            problem.setting.task,
            f"{folder}/store",
            gradient_computer=partial(HookGradientComputer, self_check=False, **settings),
            batch_size=BATCH,
            progress=False,
        )
        attributor.featurize(cast(problem.train), states)
        return attributor.score(cast(problem.targets)).numpy().copy()


WAYS: dict[str, Callable[[Problem, str], np.ndarray]] = {
    FLOAT32: scores,
    "TF32": partial(scores, device=STAND_IN, float32_products="tf32"),
    "autocast bfloat16": partial(scores, autocast_dtype=torch.bfloat16),
    "autocast float16": partial(scores, autocast_dtype=torch.float16),
    "bfloat16 model": partial(scores, dtype=torch.bfloat16),
}


def figures(name: str, which: str) -> dict[str, Any]:
    """Return LDS, difference from float32 and change of the scores by precision."""
    setting, truth = SETTINGS[name], load(SETTINGS[name])
    problem = Problem(setting, full_runs(setting, 1))
    found: dict[str, Any] = {}
    exact = WAYS[FLOAT32](problem, which)
    for way, compute in WAYS.items():
        values = exact if way == FLOAT32 else compute(problem, which)
        found[way] = lds(values, truth)
        if way != FLOAT32:
            difference = compare_datamodeling_scores(values, exact, truth.masks, truth.outputs.mean(1))
            change = float(np.linalg.norm(values - exact) / np.linalg.norm(exact))
            found[way] |= {"difference": estimate(difference), "scores": change}
    return found


def main() -> None:
    """Measure every precision, write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--settings", nargs="+", default=list(CHOICES), choices=list(SETTINGS))
    parser.add_argument("--checkpoints", default="run", choices=["run", "final"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    Bench.open(STAND_IN, small=False)
    for name in args.settings:
        part = {f"{name}, {args.checkpoints}": figures(name, args.checkpoints)}
        save_parts(RESULTS, surroundings(), part)


if __name__ == "__main__":
    main()
