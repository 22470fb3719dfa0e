"""LDS of plain rows, of rows scaled by Adam's second moments, and of LESS, on problems trained with AdamW.

Ground truth and problems are those of ``benchmarks.lds.table``. The models are one run on all data, with the state of
the optimizer at its checkpoints: all of them, or the last. The LDS is over all subsets and targets, with its 95 %
interval; ``difference`` compares with plain rows and the same method, by the same subsets and targets.

Run:  python -m benchmarks.lds_optimizer [--settings digits_gelu_adam ...]
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.lds.methods import Problem
from benchmarks.lds.settings import SETTINGS, Setting
from benchmarks.lds.training import train
from benchmarks.lds.truth import FULL_RUN_SEED, estimate, lds, load
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import parser_of, save_parts, surroundings
from trak_lite.evaluation import compare_datamodeling_scores
from trak_lite.methods import LESS, TRAK, AbstractMethod, GaussNewton, GradCos, GradDot

RESULTS = FOLDER / "lds_optimizer.json"
CHOICES = ("digits_gelu_adam", "diamonds", "package_words")
LINEAR: dict[str, AbstractMethod] = {
    "GaussNewton": GaussNewton(),
    "GaussNewton, q outside": GaussNewton(q="outside"),
    "not weighted": TRAK(damping=None, layout="stored", q="inside"),
    "dot product": GradDot(),
    "cosine": GradCos(q="inside", layout="joint"),
}


def learning_rates(setting: Setting, num_rows: int) -> list[float]:
    """Return the mean learning rate of the epoch before each checkpoint."""
    steps = math.ceil(num_rows / setting.batch_size)
    total = setting.epochs * steps
    rates = setting.learning_rate * (1 + np.cos(np.pi * np.arange(total) / total)) / 2
    return [float(rates[(epoch - 1) * steps : epoch * steps].mean()) for epoch in setting.checkpoint_epochs]


def figures(name: str) -> dict[str, Any]:
    """Return the LDS of a problem by checkpoints, rows and method."""
    setting, truth = SETTINGS[name], load(SETTINGS[name])
    num_rows = len(setting.data()[0])
    run = train(setting, np.ones((1, num_rows), dtype=bool), [FULL_RUN_SEED], with_optimizer=True)[0]
    rates = learning_rates(setting, num_rows)
    problem = Problem(setting, [[states["model"] for states in run]])
    found: dict[str, Any] = {}
    plain: dict[str, np.ndarray] = {}
    for which, count in (("run", len(run)), ("final", 1)):
        less = {"LESS": LESS(learning_rates=rates[-count:]), "dot product": GradDot(q="off")}
        for rows, methods in (("none", LINEAR), ("adam", LINEAR), ("adam_update", less)):
            with tempfile.TemporaryDirectory() as folder:
                attributor = problem.attributor(folder, normalize=rows, dtype="float32")
                attributor.featurize(problem.train, run[-count:])
                for label, method in methods.items():
                    scores = attributor.score(problem.targets, method=replace(method), dense=False).numpy()
                    key = f"{which}, {rows}, {label}"
                    found[key] = lds(scores, truth)
                    plain.setdefault(f"{which}, {label}", scores)
                    if rows == "adam":
                        base = plain[f"{which}, {label}"]
                        outputs = truth.outputs.mean(1)
                        difference = compare_datamodeling_scores(scores, base, truth.masks, outputs)
                        found[key]["difference"] = estimate(difference)
    return found


def main() -> None:
    """Measure, write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--settings", nargs="*", default=list(CHOICES), choices=list(SETTINGS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.settings:
        save_parts(RESULTS, surroundings(), {name: figures(name)})


if __name__ == "__main__":
    main()
