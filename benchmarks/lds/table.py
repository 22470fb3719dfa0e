"""Accuracy and cost of attribution methods of trak_lite, of other packages and of baselines, on every problem.

Ground truth (``benchmarks.lds.truth``): outputs of models retrained on random halves of the train rows. All methods
use the same models trained on all data, the same train rows and targets. ``final model`` is the end of one run,
``run`` all its checkpoints. Figures of a row:

LDS: linear datamodeling score over all subsets and targets, with its 95 % bootstrap interval; outputs are averaged
    over seeds.
one-run LDS: the same with models that were retrained with the seed of the attributed run, on fewer subsets.
chosen on, other half: only on the problems on which defaults of trak_lite were chosen, the LDS on even subsets and
    targets, by which they were chosen, and on odd subsets and targets.
mislabel AUC: where labels are wrong, the area under the ROC curve of finding these rows by the negative mean of their
    scores over all targets. Every method has this ranking; no score of a row for itself is needed.
CPU s: CPU seconds on one thread for features and scores, without the training of the models and without imports.
bytes per row: what is stored for a train row, over all checkpoints; empty if rows are not stored.

``ceiling`` is the LDS of a perfect method, given the noise between seeds. The datamodel is a regression on the
retrainings that defaults were chosen on: it needs many trainings, where the other methods need one. A method that
raises an error or takes more than the limit of CPU time is a row with the reason.

With ``--keep FOLDER`` the scores ``(N, M)`` of each method are stored in ``FOLDER/<problem>/<method>.npy`` as float16.
Each target's scores are multiplied by a power of two, which changes no rank correlation over subsets.

Run:  python -m benchmarks.lds.table [--settings digits_mlp ...] [--methods default, run ...] [--missing]
"""

from __future__ import annotations

import importlib
import json
import math
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import grad, vmap

from benchmarks.lds.data import flipped_rows
from benchmarks.lds.methods import METHODS, TEXT_METHODS, Problem, fitted_datamodel
from benchmarks.lds.peers import PEERS, TEXT_PEERS
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.truth import Truth, full_runs, lds, load, load_one_run
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import cpu_seconds, parser_of, run_forked, save_parts, surroundings
from trak_lite.evaluation import mislabel_detection, seed_noise_ceiling

RESULTS = FOLDER / "lds.json"
NUM_RUNS = 5
DATAMODEL = "datamodel of the chosen-on subsets"
DEFAULT = "default, run"
"""The method of trak_lite that others are compared with."""
ALL = {**METHODS, **PEERS, **TEXT_METHODS, **TEXT_PEERS}
GROUPS = {"ours": {**METHODS, **TEXT_METHODS, DATAMODEL: None}, "peers": {**PEERS, **TEXT_PEERS}}
CHOSEN_ON = ("digits_mlp", "digits_cnn", "python_lm")
"""Problems on whose even subsets and targets the defaults of trak_lite were chosen."""
MISLABELED = ("digits_mlp", "digits_cnn")
CPU_LIMIT, MEMORY_LIMIT = 1200, 14 * 2**30
MODULES = {
    "traker": "trak",
    "dattri": "dattri.algorithm",
    "kronfluence": "kronfluence",
    "captum": "captum.influence",
    "bergson": "bergson",
}
"""Of other packages by the first word of the method's name: imported before the time is taken."""


def figures_of(setting_name: str, method: str, out: str) -> dict[str, Any]:
    """Run one method, save its scores and return its figures."""
    setting = SETTINGS[setting_name]
    problem = Problem(setting, full_runs(setting, runs_of(method)))
    if method.split()[0] in MODULES:
        importlib.import_module(MODULES[method.split()[0]])
    found: list[Any] = []
    seconds = cpu_seconds(lambda: found.append(ALL[method](problem)))
    np.save(out, found[0].scores)
    figures = {"checkpoints": found[0].num_models, "K": found[0].proj_dim, "row_bytes": found[0].row_bytes}
    figures |= {"note": found[0].note} if found[0].note else {}
    return {**figures, "seconds": seconds}


def runs_of(method: str) -> int:
    """Return the number of runs on all data that a method uses."""
    return NUM_RUNS if re.search(rf"{NUM_RUNS} (final models|runs)$", method) else 1


def applies(setting: str, method: str) -> bool:
    """Return whether a method is meant for a problem."""
    is_text = SETTINGS[setting].task == "causal_language_modeling"
    if method == DATAMODEL:
        return setting in CHOSEN_ON
    return is_text or method not in {**TEXT_METHODS, **TEXT_PEERS}


def halves(truth: Truth) -> dict[str, tuple[Truth, np.ndarray]]:
    """Return subsets and target numbers of the half for choosing and of the half for reporting."""
    found = {}
    for name, first in (("chosen_on", 0), ("lds", 1)):
        half = Truth(truth.masks[first::2], truth.outputs[first::2, :, first::2])
        found[name] = half, np.arange(first, truth.outputs.shape[2], 2)
    return found


def evaluated(setting: str, truth: Truth, scores: np.ndarray) -> dict[str, Any]:
    """Return the accuracy of scores ``(N, M)``."""
    found: dict[str, Any] = {"lds_all": lds(scores, truth)}
    one_run = load_one_run(SETTINGS[setting])
    if one_run is not None:
        found["lds_one_run"] = lds(scores, one_run)
    if setting in CHOSEN_ON:
        for name, (half, targets) in halves(truth).items():
            found[name] = lds(scores[:, targets], half)
    if setting in MISLABELED and scores.dtype != np.float16:
        found["mislabel_auc"] = mislabel_detection(-scores.mean(1, dtype=np.float64), flipped_rows()).auc
    return found


def row(setting: str, method: str, truth: Truth, keep: Path | None, cpu_limit: int) -> dict[str, Any]:
    """Run a method in a separate process and evaluate its scores; a failure is a row too."""
    if method == DATAMODEL:
        datamodel = fitted_datamodel(truth.masks[::2], truth.outputs[::2].mean(1))
        return {"checkpoints": datamodel.num_models, **evaluated(setting, truth, datamodel.scores)}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/scores.npy"
        work = partial(figures_of, setting, method, out)
        figures = run_forked(work, cpu_limit=cpu_limit, memory_limit=MEMORY_LIMIT)
        if "fails" in figures:
            return figures
        scores = np.load(out)
    wrong = ~np.isfinite(scores)
    if wrong.any():
        return {**figures, "fails": f"{wrong.mean():.0%} of its scores are NaN or infinite"}
    if keep is not None:
        path = kept(keep, setting, method)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, _halved(scores))
    return {**figures, **evaluated(setting, truth, scores)}


def kept(folder: Path, setting: str, method: str) -> Path:
    """Return the path of the kept scores of a method."""
    return folder / setting / f"{method}.npy"


def best_peer(parts: Mapping[str, Any], setting: str, max_seconds: float = math.inf) -> str | None:
    """Return the other package's method with the highest LDS on a problem; ``None`` if none was measured.

    Args:
        parts: Of the results.
        setting: Name of the problem.
        max_seconds: Only methods that take no more CPU time.
    """
    measured = {name: parts.get(f"{setting} / {name}", {}) for name in {**PEERS, **TEXT_PEERS}}
    values = {
        name: figures["lds_all"]["mean"]
        for name, figures in measured.items()
        if "lds_all" in figures and figures["seconds"] <= max_seconds
    }
    return max(values, key=values.__getitem__) if values else None


def _halved(scores: np.ndarray) -> np.ndarray:
    """Return float16 scores, each target's largest between 16,384 and 32,768."""
    largest = np.abs(scores).max(0, keepdims=True).astype(np.float64)
    exponents = np.frexp(np.where(largest > 0, largest, 1.0))[1]
    return np.ldexp(scores.astype(np.float64), 15 - exponents).astype(np.float16)


def main() -> None:
    """Run methods on problems, write JSON after every row; docs/tables.py makes the tables of the pages."""
    methods = [*ALL, DATAMODEL]
    parser = parser_of(__doc__, "lds.json")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--methods", nargs="*", default=methods, choices=[*methods, *GROUPS])
    parser.add_argument("--missing", action="store_true", help="skip rows that are in the file")
    parser.add_argument("--keep", type=Path, help="folder for the scores of every method")
    parser.add_argument("--evaluate", action="store_true", help="evaluate kept scores again; run no method")
    parser.add_argument("--cpu-limit", type=int, default=CPU_LIMIT, help="CPU seconds of a method")
    args = parser.parse_args()
    torch.set_num_threads(1)
    vmap(grad(torch.sum))(torch.ones(1, 1))  # imports for seconds when it is first called
    if args.evaluate and args.keep is None:
        parser.error("--evaluate needs --keep FOLDER")
    chosen = list(dict.fromkeys(one for name in args.methods for one in GROUPS.get(name, [name])))
    for name in args.settings:
        done = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
        truth = load(SETTINGS[name])
        ceiling = seed_noise_ceiling(truth.outputs).ceiling
        for method in chosen:
            before = done.get(f"{name} / {method}", {})
            if not applies(name, method):
                continue
            if args.evaluate:
                path = kept(args.keep, name, method)
                if not before or "fails" in before or not path.exists():
                    continue
                figures = before | evaluated(name, truth, np.load(path))
            elif args.missing and ("lds_all" in before or "fails" in before):
                continue
            else:
                full_runs(SETTINGS[name], runs_of(method))
                figures = row(name, method, truth, args.keep, args.cpu_limit)
            parts = {f"{name} / {method}": figures, f"{name} / ceiling": ceiling}
            save_parts(args.out, surroundings(peers=False), parts)  # the names of methods tell versions


if __name__ == "__main__":
    main()
