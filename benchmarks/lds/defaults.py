"""LDS of kernel settings on every problem, and the setting that the other problems would choose for each problem.

The features are those of the default settings, for all checkpoints of one run (``run``) and for the last one
(``final``). A setting consists of the weighting of the kernel, the position of q and the rule for lambda. Rules, with
the eigenvalues e of a segment with k features, and N train rows:

- ``trace c``: lambda is c / 2048 of the trace (the default before, with c = 1)
- ``mean c``: c times the mean of the min(k, N) largest eigenvalues
- ``rms c``: c times their root mean square (for the Fisher information: of all k eigenvalues)
- ``weighted c``: c times the mean eigenvalue weighted by the eigenvalues, sum(e^2) / sum(e)
- ``descent c``: the filter of gradient descent, (1 - exp(-e / lambda)) / e instead of 1 / (e + lambda), with the lambda
  of ``weighted c``

For every problem the table has the LDS of the previous default, of the default, of the setting with the best mean LDS
on the other problems, and of the best setting. For language models the kernel is the Fisher information.

Run:  python -m benchmarks.lds.defaults [--settings digits_relu ...]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from benchmarks.lds.methods import Problem
from benchmarks.lds.settings import NEVER_SHOWN, SETTINGS
from benchmarks.lds.truth import Truth, full_runs, load
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import parser_of, save_parts, surroundings
from trak_lite.featurizing.fisher import FisherFits
from trak_lite.methods import Fisher, GradDot
from trak_lite.store import open_store
from trak_lite.types import Segment

RESULTS = FOLDER / "lds_defaults.json"
TEXT = "causal_language_modeling"
RULES: dict[str, tuple[float, ...]] = {
    "trace": (0.03, 0.1, 0.3, 1, 3, 5, 10),
    "mean": (0.5, 1, 2, 3, 5),
    "rms": (0.01, 0.02, 0.03, 0.1, 0.2, 0.3, 0.5),
    "weighted": (0.003, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06),
    "descent": (0.01, 0.02, 0.04),
}
BEFORE = {"others": "curvature, q inside, trace 1", TEXT: "fisher, q inside, trace 0.1"}
DEFAULT = {"others": "curvature, q outside, rms 0.2", TEXT: "fisher, q outside, rms 0.02"}


def ranks(values: NDArray[Any]) -> NDArray[Any]:
    """Return the ranks of every column, centred and of length 1."""
    found = rankdata(values, axis=0)
    found -= found.mean(0)
    norms = np.sqrt(np.square(found).sum(0))
    return found / np.where(norms > 0, norms, 1.0)


def lds(scores: Tensor, truth: Truth) -> float:
    """Return the linear datamodeling score over all subsets and targets."""
    predicted = truth.masks.astype(np.float32) @ scores.numpy()
    return float((ranks(predicted) * ranks(truth.outputs.mean(1))).sum(0).mean())


def scales(e: Tensor, width: int, num_rows: int) -> dict[str, float]:
    """Return the unit of lambda of every rule."""
    total, squares, count = float(e.sum()), float(e.square().sum()), min(width, num_rows)
    weighted = squares / total
    return {
        "trace": total / 2048,
        "mean": total / count,
        "rms": (squares / count) ** 0.5,
        "weighted": weighted,
        "descent": weighted,
    }


class Rotated:
    """Train rows and targets of a segment in the eigenbasis of its kernel."""

    def __init__(self, gram: Tensor, rows: Tensor, targets: Tensor) -> None:
        """Decompose the gram matrix; in float32, because lambda is above 1e-5 of the largest eigenvalue."""
        values, vectors = torch.linalg.eigh(gram.float())
        keep = values > values[-1] * 1e-7
        self.eigenvalues = values[keep].double()
        self._rows, self._targets = rows @ vectors[:, keep], vectors[:, keep].T @ targets.T

    def scores(self, rule: str, lambda_reg: float) -> Tensor:
        """Return the scores ``(N, M)`` of the segment."""
        e = self.eigenvalues
        inverse = (1 - torch.exp(-e / lambda_reg)) / e if rule == "descent" else 1 / (e + lambda_reg)
        return self._rows @ (inverse.float()[:, None] * self._targets)


class Sums:
    """Scores of a setting, summed over checkpoints."""

    def __init__(self) -> None:
        """Start at zero."""
        self.inside, self.outside, self.q = torch.zeros(()), torch.zeros(()), torch.zeros(())

    def add(self, products: Tensor, q: Tensor) -> None:
        """Add the products ``(N, M)`` and the q ``(N,)`` of a checkpoint."""
        self.inside, self.outside = self.inside + products * q[:, None], self.outside + products
        self.q = self.q + q

    def by_q(self) -> dict[str, Tensor]:
        """Return the scores by position of q."""
        return {"inside": self.inside, "outside": self.outside * self.q[:, None]}


def settings_of(
    segments: list[Segment],
    weights: Tensor | None,
    grams: list[Tensor] | None,
    rows: Tensor,
    targets: Tensor,
    add: Callable[[str, Tensor], None],
) -> None:
    """Call ``add`` with the name of every rule and its products of one checkpoint."""
    parts = []
    for number, segment in enumerate(segments):
        own, aims = rows[:, segment.start : segment.stop], targets[:, segment.start : segment.stop]
        weighted = own if weights is None else own * weights.sqrt()[:, None]
        gram = (weighted.T @ weighted) if grams is None else grams[number]
        if gram.any():
            parts.append((Rotated(gram, own, aims), segment.stop - segment.start))
    for rule, multiples in RULES.items():
        for multiple in multiples:
            products = torch.zeros(len(rows), len(targets))
            for part, width in parts:
                unit = scales(part.eigenvalues, width, len(rows) if grams is None else width)[rule]
                products += part.scores(rule, multiple * unit)
            add(f"{rule} {multiple}", products)


def figures(name: str) -> dict[str, dict[str, float]]:
    """Return the LDS of every setting, for ``run`` and ``final``."""
    setting = SETTINGS[name]
    truth, problem = load(setting), Problem(setting, full_runs(setting, 1))
    sums: dict[tuple[str, str, str], Sums] = {}
    with tempfile.TemporaryDirectory() as folder:
        attributor = problem.attributor(folder, method=Fisher() if setting.task == TEXT else GradDot())
        states = problem.checkpoints("run")
        attributor.featurize(problem.train, states)
        attributor.score(problem.targets, method=GradDot())
        segments = list(attributor.layout.segments)
        with open_store(f"{folder}/store") as store:
            for number in range(len(states)):
                train, targets = (
                    store.open_table(path) for path in (f"ckpt-{number}", f"targets/targets/ckpt-{number}")
                )
                rows, q, w = (
                    torch.from_numpy(train.read(column)).float()
                    for column in ("features", "out_to_loss", "loss_curvature")
                )
                aims = torch.from_numpy(targets.read("features")).float()
                kernels: dict[str, Any] = {"none": (None, None), "curvature": (w, None)}
                if setting.task == TEXT:
                    fits = FisherFits(store, Fisher(), attributor.layout)
                    grams = fits.grams(f"ckpt-{number}", device=torch.device("cpu"))
                    kernels = {"fisher": (None, grams)}
                groups = ("run", "final") if number == len(states) - 1 else ("run",)
                for kernel, (weights, grams) in kernels.items():

                    def add(rule: str, products: Tensor, kernel: str = kernel, q: Tensor = q) -> None:
                        for group in groups:  # noqa: B023  # called before the next checkpoint
                            sums.setdefault((group, kernel, rule), Sums()).add(products, q)

                    settings_of(segments, weights, grams, rows, aims, add)
    found: dict[str, dict[str, float]] = {"run": {}, "final": {}}
    for (group, kernel, rule), total in sums.items():
        for position, scores in total.by_q().items():
            found[group][f"{kernel}, q {position}, {rule}"] = round(lds(scores, truth), 4)
    return found


def leave_one_out(parts: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    """Return, for every problem, the LDS before, of the default, of the setting chosen on the others, and the best.

    Language models are compared among themselves, the other problems too.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in (False, True):
        names = [name for name in SETTINGS if name in parts and (SETTINGS[name].task == TEXT) == text]
        known = {name: parts[name][group] for name in names}
        kind = TEXT if text else "others"
        for name in names:
            others = [known[other] for other in names if other != name]
            common = [
                setting for setting in known[name] if others and all(setting in other for other in others)
            ]
            chosen = max(
                common or known[name],
                key=lambda setting: float(np.mean([other[setting] for other in others] or [0.0])),
            )
            best = max(known[name], key=known[name].__getitem__)
            found[name] = {
                "before": known[name][BEFORE[kind]],
                "default": known[name][DEFAULT[kind]],
                "chosen": [chosen, known[name][chosen]],
                "best": [best, known[name][best]],
            }
    return found


def main() -> None:
    """Measure, compare, write JSON."""
    parser = parser_of(__doc__)
    shown = [name for name in SETTINGS if name not in NEVER_SHOWN]
    parser.add_argument("--settings", nargs="*", default=shown, choices=shown)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.settings:
        save_parts(RESULTS, surroundings(), {name: figures(name)})
    parts = json.loads(RESULTS.read_text())["parts"]
    compared = {f"leave one out, {group}": leave_one_out(parts, group) for group in ("run", "final")}
    save_parts(RESULTS, surroundings(), compared)


if __name__ == "__main__":
    main()
