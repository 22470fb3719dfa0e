"""Removal test (QLD): retraining without the most helpful train rows of a target, by several methods.

For some targets of every problem the 1 % and the 5 % of the train rows with the highest scores for the target are
removed, the model is trained again, and the target is evaluated. ``fall`` is f before minus f after, ``loss rise``
the loss after minus the loss before, as means over targets and seeds with their 95 % bootstrap intervals over targets;
``per target`` holds the values behind them, for paired differences between methods.
The model before is that of all rows with the same seed. A good method makes f fall the most. The rows are removed by

* a method of trak_lite and the other package with the highest LDS on the problem, from the scores that
  ``benchmarks.lds.table --keep FOLDER`` has stored,
* ``nearest``: similarity that uses no model: BM25 of texts, otherwise the negative Euclidean distance of inputs,
* ``random``: rows drawn for each target.

Run:  python -m benchmarks.lds.removal --keep FOLDER [--settings digits_mlp ...] [--ours "default, run"]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lds.settings import SETTINGS, Setting
from benchmarks.lds.table import DEFAULT, best_peer, kept
from benchmarks.lds.table import RESULTS as TABLE
from benchmarks.lds.training import Weights, outputs, target_losses, trained
from benchmarks.lds.truth import FULL_RUN_SEED, estimate, full_runs
from benchmarks.measuring import parser_of, save_parts, surroundings
from trak_lite.evaluation import bm25, removal_masks, target_loss_rise

SHARES = (0.01, 0.05)
NUM_TARGETS = 15


def similarity(setting: Setting) -> np.ndarray:
    """Return ``(N, M)`` similarities of inputs, without a model."""
    inputs, _, target_inputs, _ = setting.data()
    if inputs.is_floating_point():
        return -torch.cdist(target_inputs.flatten(1), inputs.flatten(1)).T.numpy()
    if setting.task == "causal_language_modeling":
        return bm25(
            *([bytes(row).decode("latin-1") for row in part.tolist()] for part in (inputs, target_inputs))
        )
    return bm25(inputs.tolist(), target_inputs.tolist())


def scores_of(setting: Setting, method: str, keep: Path) -> np.ndarray:
    """Return the scores ``(N, M)`` by which a method orders the train rows."""
    if method == "nearest":
        return similarity(setting)
    if method == "random":
        shape = (len(setting.data()[0]), len(setting.data()[2]))
        return np.random.default_rng(0).random(shape)
    return np.load(kept(keep, setting.name, method))


def removed(setting: Setting, scores: np.ndarray, targets: np.ndarray, num_seeds: int) -> dict[str, Any]:
    """Return fall and loss rise by the share of rows that is removed."""
    before = [run[-1] for run in full_runs(setting, num_seeds)]
    found = {}
    for share in SHARES:
        count = max(1, round(share * len(scores)))
        masks = removal_masks(scores[:, targets].astype(np.float64), count)
        after = [trained(setting, masks, [FULL_RUN_SEED + place] * len(masks)) for place in range(num_seeds)]
        values = {}
        for name, evaluate in (("fall", _minus_outputs), ("loss rise", target_losses)):
            first = np.mean([evaluate(setting, weights)[targets] for weights in before], axis=0)
            last = [
                [evaluate(setting, weights)[target] for weights, target in zip(models, targets, strict=True)]
                for models in after
            ]
            rise = target_loss_rise(first, last)
            per_target = [float(f"{value:.5g}") for value in rise.per_target]
            values[name] = {**estimate(rise), "per target": per_target}
        found[f"{share:.0%}"] = {"rows": count, **values}
    return found


def _minus_outputs(setting: Setting, weights: Weights) -> np.ndarray:
    return -outputs(setting, weights)


def methods_of(name: str, ours: str, keep: Path) -> Sequence[str]:
    """Return the methods of a problem: those without kept scores are left out."""
    parts = json.loads(TABLE.read_text())["parts"]
    named = [method for method in (ours, best_peer(parts, name)) if method is not None]
    return [*(method for method in named if kept(keep, name, method).exists()), "nearest", "random"]


def main() -> None:
    """Retrain, write JSON after every row."""
    parser = parser_of(__doc__, "lds_removal.json")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument(
        "--keep", type=Path, required=True, help="folder of the scores of benchmarks.lds.table"
    )
    parser.add_argument("--ours", default=DEFAULT, help="method of trak_lite")
    parser.add_argument("--methods", nargs="*", help="only these, such as nearest and random")
    parser.add_argument("--targets", type=int, default=NUM_TARGETS)
    parser.add_argument("--seeds", type=int, default=1, help="retrainings per target, each with another seed")
    parser.add_argument("--missing", action="store_true", help="skip rows that are in the file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.settings:
        setting = SETTINGS[name]
        targets = np.linspace(0, len(setting.data()[2]) - 1, args.targets).astype(int)
        for method in args.methods or methods_of(name, args.ours, args.keep):
            done = json.loads(args.out.read_text())["parts"] if args.missing and args.out.exists() else {}
            if f"{name} / {method}" in done:
                continue
            figures = removed(setting, scores_of(setting, method, args.keep), targets, args.seeds)
            about = {"targets": args.targets, "seeds": args.seeds}
            save_parts(args.out, surroundings(peers=False), {f"{name} / {method}": {**figures, **about}})


if __name__ == "__main__":
    main()
