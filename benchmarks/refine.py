"""Scores of unprojected gradients: streamed, of candidates, and by kronfluence, on two problems of ``benchmarks.lds``.

All methods use the final model of one run, on one thread. ``lds`` is the linear datamodeling score on all subsets and
targets, with its 95 % bootstrap interval. ``seconds`` are CPU seconds with all fits, ``mib`` is the growth of the
resident set at its highest. ``candidates``: stored rows (with the default settings) find c helpful and c harmful
candidates per target, by their default method or by EKFAC on the stored rows; ``overlap`` is the share of the 10 most
helpful rows of the full streamed scores among them, ``share`` are the gradients that one target takes (2 c / N),
``union`` those of all targets together. ``refine`` runs :class:`trak_lite.Refine` with the smallest c whose overlap
reaches .95.

Run:  python -m benchmarks.refine [--settings digits_cnn topics_lm] [--methods ...]
(the method kronfluence needs kronfluence 1.0.1 in the same environment; results of other runs are kept)
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lds.methods import LOG_P, MARGINS, Problem
from benchmarks.lds.peers import kronfluence
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.truth import Truth, full_runs, lds, load
from benchmarks.measuring import cpu_seconds, memory_growth, parser_of, run_worker, save_parts, surroundings
from trak_lite import Refine
from trak_lite.evaluation import seed_noise_ceiling
from trak_lite.methods import CG, EKFAC, AbstractMethod, GradDot
from trak_lite.modelout_functions import AbstractModelOutput

SETTING_NAMES = ("digits_cnn", "topics_lm")
REFINED = EKFAC(damping=0.1)
CANDIDATES = (10, 15, 20, 30, 40, 60, 80, 120, 160, 240)
SHOWN = 10
GOAL = 0.95


def streamed(problem: Problem, method: AbstractMethod, **settings: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the scores of all train rows without stored rows, and the convergence of a solver."""
    scores = problem.attributor(None, **settings).stream_scores(problem.train, problem.targets, method=method)
    found: dict[str, Any] = {}
    for convergence in scores.convergence:
        found["iterations"] = [int(convergence.iterations.min()), int(convergence.iterations.max())]
        found["residual"] = {
            "median": float(np.median(convergence.residuals)),
            "max": float(convergence.residuals.max()),
        }
    return scores.numpy(), found


def of_peer(problem: Problem, output: AbstractModelOutput | None = None) -> tuple[np.ndarray, dict[str, Any]]:
    """Return kronfluence's scores of the measured output, or of another one."""
    return kronfluence(replace(problem, output=output)).scores, {}


def candidates(coarse: np.ndarray, exact: np.ndarray) -> list[dict[str, float]]:
    """Return overlap and cost for some numbers of candidates."""
    order, best = np.argsort(-coarse, axis=0), np.argsort(-exact, axis=0)[:SHOWN]
    found = []
    for count in CANDIDATES:
        chosen = [np.union1d(rows[:count], rows[-count:]) for rows in order.T]
        overlap = np.mean([np.isin(top, rows).mean() for top, rows in zip(best.T, chosen, strict=True)])
        union = len(np.unique(np.concatenate(chosen)))
        share = np.mean([len(rows) for rows in chosen])
        found.append(
            {"c": count, "overlap": overlap, "share": share / len(coarse), "union": union / len(coarse)}
        )
    return found


def refined(problem: Problem) -> dict[str, Any]:
    """Return overlaps of candidates with full scoring, and the cost of a refinement."""
    exact, _ = streamed(problem, REFINED)
    made = problem.attributor(None)
    found: dict[str, Any] = {
        "K": made.projector.proj_dim,
        "row_bytes": made.row_bytes,
        "N": len(problem.train),
    }
    found["featurize_seconds"] = cpu_seconds(lambda: made.featurize(problem.train))
    for name, method in (("default", None), ("EKFAC", EKFAC())):
        coarse = made.score(problem.targets, method=method).numpy()
        parts = candidates(coarse, exact)
        enough = next((part["c"] for part in parts if part["overlap"] >= GOAL), CANDIDATES[-1])
        kept: list[Any] = []
        seconds = cpu_seconds(
            lambda method=method, enough=enough, kept=kept: kept.append(
                made.score(
                    problem.targets, method=method, refine=Refine(candidates=enough, method=REFINED)
                ).top(SHOWN)
            )
        )
        best = np.argsort(-exact, axis=0)[:SHOWN]
        overlap = np.mean([np.isin(a, b).mean() for a, b in zip(kept[0].indices, best.T, strict=True)])
        before = np.argsort(-coarse, axis=0)[:SHOWN]
        found[name] = {
            "candidates": parts,
            "overlap_before": np.mean([np.isin(a, b).mean() for a, b in zip(before.T, best.T, strict=True)]),
            "refine": {"c": enough, "overlap": overlap, "seconds": seconds},
        }
    return found


METHODS = {
    "GradDot": partial(streamed, method=GradDot()),
    "EKFAC, damping 0.1": partial(streamed, method=REFINED),
    "EKFAC, damping 1": partial(streamed, method=EKFAC()),
    "EKFAC of linear layers, damping 0.1": partial(streamed, method=REFINED, grad_wrt=[nn.Linear]),
    "EKFAC of margins, damping 0.1": partial(streamed, method=REFINED, task=MARGINS),
    "CG, damping 1, 10 iterations": partial(streamed, method=CG(max_iterations=10)),
    "CG, damping 1, 30 iterations": partial(streamed, method=CG(max_iterations=30)),
    "CG of drawn labels, damping 1, 10 iterations": partial(streamed, method=CG(max_iterations=10, draws=4)),
    "CG of drawn labels, damping 1, 30 iterations": partial(streamed, method=CG(max_iterations=30, draws=4)),
    **{
        f"CG of {rows} rows, damping {damping:g}, {steps} iterations": partial(
            streamed, method=CG(max_iterations=steps, max_rows=rows, damping=damping)
        )
        for rows, damping, steps in (
            (64, 1, 3),
            (64, 0.1, 3),
            (64, 0.1, 10),
            (256, 1, 3),
            (256, 0.1, 3),
            (256, 0.1, 10),
        )
    },
    "kronfluence": of_peer,
    "kronfluence of log p": partial(of_peer, output=LOG_P),
}
CANDIDATES_OF = "candidates"
TEXT_ONLY = ["EKFAC of linear layers, damping 0.1", "EKFAC of margins, damping 0.1", "kronfluence of log p"]
EXACT_CG = [name for name in METHODS if name.startswith("CG, ")]
"""Not run for the language model, where an iteration takes more than 10 CPU minutes for all targets."""


def worker(setting_name: str, method: str, out: str) -> dict[str, Any]:
    """Run one method, save its scores and return its figures."""
    setting = SETTINGS[setting_name]
    problem = Problem(setting, full_runs(setting, 1))
    if method == CANDIDATES_OF:
        return refined(problem)
    found: list[Any] = []
    with memory_growth() as growth:
        seconds = cpu_seconds(lambda: found.append(METHODS[method](problem)))
    scores, figures = found[0]
    np.save(out, scores)
    return {**figures, "seconds": seconds, "mib": growth.mib}


def row(setting: str, method: str, truth: Truth) -> dict[str, Any]:
    """Run a method in a separate process and evaluate its scores; a failure is a row too."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/scores.npy"
        figures = run_worker(worker, setting, method, out)
        if "fails" in figures or method == CANDIDATES_OF:
            return figures
        found = lds(np.load(out), truth)
        return {**figures, "lds": found["mean"], "interval": found["interval"]}


def main() -> None:
    """Run every method on every setting, write JSON."""
    names = [*METHODS, CANDIDATES_OF]
    parser = parser_of(__doc__, "refine.json")
    parser.add_argument("--settings", nargs="*", default=SETTING_NAMES, choices=list(SETTINGS))
    parser.add_argument("--methods", nargs="*", default=names, choices=names)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.settings:
        truth = load(SETTINGS[name])
        full_runs(SETTINGS[name], 1)
        ceiling = seed_noise_ceiling(truth.outputs).ceiling
        left_out = EXACT_CG if SETTINGS[name].task == "causal_language_modeling" else TEXT_ONLY
        for method in args.methods:
            if method in left_out:
                continue
            parts = {f"{name} / {method}": row(name, method, truth), f"{name} / ceiling": ceiling}
            save_parts(args.out, surroundings(), parts)


if __name__ == "__main__":
    main()
