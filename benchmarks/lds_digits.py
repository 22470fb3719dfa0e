"""Linear datamodeling score (LDS) of the methods of trak_lite, of other packages and of baselines.

Ground truth: outputs of models retrained on random halves of the train rows (``benchmarks.lds.truth``), averaged
over seeds, in ``benchmarks/data``. All methods use the same models trained on all data, the same train rows and
targets. ``chosen on`` is the LDS on even subsets and even targets, by which the defaults of trak_lite were chosen.
``LDS`` is that on odd subsets and odd targets, with its 95 % bootstrap interval over subsets and targets. ``final
model`` is the end of one run, ``run`` all its checkpoints. Seconds are CPU seconds on one thread for features and
scores, without the training of these models. ``ceiling`` is the LDS of a perfect method, given the noise between
seeds. The datamodel is a regression on the retrainings that defaults were chosen on: it needs many trainings, where
the other methods need one.

Run:  python -m benchmarks.lds_digits [--settings digits_mlp ...] [--methods default ...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lds.methods import METHODS, TEXT_METHODS, Problem, fitted_datamodel
from benchmarks.lds.peers import PEERS, TEXT_PEERS
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.truth import Truth, full_runs, load
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import cpu_seconds, run_worker, save_parts, surroundings
from trak_lite.evaluation import linear_datamodeling_score, seed_noise_ceiling

RESULTS = FOLDER / "lds.json"
NUM_RUNS = 5
DATAMODEL = "datamodel of the chosen-on subsets"
ALL = {**METHODS, **PEERS, **TEXT_METHODS, **TEXT_PEERS}


def worker(setting_name: str, method: str, out: str) -> None:
    """Run one method, save its scores and print its figures."""
    torch.set_num_threads(1)
    setting = SETTINGS[setting_name]
    problem = Problem(setting, full_runs(setting, NUM_RUNS))
    found: list[Any] = []
    seconds = cpu_seconds(lambda: found.append(ALL[method](problem)))
    np.save(out, found[0].scores)
    figures = {"checkpoints": found[0].num_models, "K": found[0].proj_dim, "row_bytes": found[0].row_bytes}
    figures |= {"note": found[0].note} if found[0].note else {}
    print(json.dumps({**figures, "seconds": seconds}))


def halves(truth: Truth) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return masks, outputs and target numbers of the half for choosing and of the half for reporting."""
    found = {}
    for name, first in (("chosen_on", 0), ("lds", 1)):
        targets = np.arange(first, truth.outputs.shape[2], 2)
        found[name] = (truth.masks[first::2], truth.outputs[first::2].mean(1)[:, targets], targets)
    return found


def judged(truth: Truth, scores: np.ndarray) -> dict[str, Any]:
    """Return the LDS on both halves."""
    found = {}
    for name, (masks, values, targets) in halves(truth).items():
        score = linear_datamodeling_score(scores[:, targets], masks, values)
        found[name] = {"mean": score.mean, "interval": list(score.interval)}
    return found


def row(setting: str, method: str, truth: Truth) -> dict[str, Any]:
    """Run a method in a separate process and evaluate its scores; a failure is a row too."""
    if method == DATAMODEL:
        masks, _, _ = halves(truth)["chosen_on"]
        datamodel = fitted_datamodel(masks, truth.outputs[::2].mean(1))
        return {"checkpoints": datamodel.num_models, **judged(truth, datamodel.scores)}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/scores.npy"
        figures = run_worker("benchmarks.lds_digits", "--worker", setting, method, out)
        if "fails" in figures:
            return figures
        return {**figures, **judged(truth, np.load(out))}


def line(method: str, figures: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "fails" in figures:
        return f"| {method} | fails: {figures['fails'][:60]} | | | | | |"
    low, high = figures["lds"]["interval"]
    cells = [method, *(figures.get(name) for name in ("checkpoints", "K", "row_bytes"))]
    seconds = figures.get("seconds")
    cells += [None if seconds is None else f"{seconds:.0f}", f"{figures['chosen_on']['mean']:.3f}"]
    cells += [f"{figures['lds']['mean']:.3f} [{low:.3f}, {high:.3f}]"]
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def main() -> None:
    """Run every method on every setting, print a table, write JSON."""
    methods = [*ALL, DATAMODEL]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--methods", nargs="*", default=methods, choices=methods)
    parser.add_argument("--worker", nargs=3, metavar=("SETTING", "METHOD", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    for name in args.settings:
        truth = load(SETTINGS[name])
        full_runs(SETTINGS[name], NUM_RUNS)
        ceiling = seed_noise_ceiling(truth.outputs).ceiling
        num_subsets, num_seeds, num_targets = truth.outputs.shape
        print(
            f"\n{name}: {num_subsets} subsets x {num_seeds} seeds, {num_targets} targets, ceiling {ceiling:.3f}\n"
        )
        print("| method | models | K | bytes per row | CPU s | chosen on | LDS |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for method in args.methods:
            is_text = SETTINGS[name].task == "causal_language_modeling"
            if method in {**TEXT_METHODS, **TEXT_PEERS} and not is_text:
                continue
            figures = row(name, method, truth)
            print(line(method, figures), flush=True)
            save_parts(
                args.out, surroundings(), {f"{name} / {method}": figures, f"{name} / ceiling": ceiling}
            )


if __name__ == "__main__":
    main()
