"""Derivatives through training on scikit-learn's digits: predict what leaving rows out of this run changes.

A recipe trains a small network with GELU. ``unrolled`` replays the training backwards and gives the exact derivative
of every target's margin by the weight of every train row. Two tests follow: the run is repeated without random rows
(``verify_run``), and without the rows that help one target most. Measured: rank correlations of 0.993, 0.990 and 0.984
with 1, 5 and 10 % of the rows left out. Without its 10 most helpful rows a target's margin falls by the predicted
amount and up to a third more, because each of these rows is worth more when the others are gone.

Run:  python examples/unrolled.py   (15 seconds of CPU time; the run stays in runs/unrolled/, and the same call resumes)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Rows, Scores, verify_run
from trak_lite.evaluation.verdict import OneRunVerdict
from trak_lite.modelout_functions import ImageClassificationModelOutput, ModelCall
from trak_lite.unrolled import SGD, Recipe, TrainingRun, unrolled

TARGETS = 60
REMOVED = 10


def load_data(num_train: int) -> tuple[TensorDataset, TensorDataset]:
    """Return train digits and 60 held-out digits."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.data[order] / 16.0).float()
    labels = torch.from_numpy(digits.target[order]).long()
    held_out = slice(num_train, num_train + TARGETS)
    return TensorDataset(images[:num_train], labels[:num_train]), TensorDataset(
        images[held_out], labels[held_out]
    )


def build_model(seed: int) -> nn.Module:
    """Return a new network; torch's generator is seeded before the call."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def loss(model: ModelCall, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of every row."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


@torch.no_grad()
def margins(model: nn.Module, targets: TensorDataset) -> NDArray[np.float64]:
    """Return log p / (1 - p) of the label of every target, ``(M,)``."""
    return (
        ImageClassificationModelOutput().evaluate(ModelCall(model), targets.tensors).output.double().numpy()
    )


def without_best_rows(
    run: TrainingRun, scores: Scores, targets: TensorDataset, target: int
) -> tuple[float, float]:
    """Repeat the run without the rows that help a target most; return the predicted and the actual change."""
    best = scores.top(REMOVED, target=target)
    kept = np.setdiff1d(np.arange(scores.shape[0]), best.indices)
    repeated = run.leave_out_fn(kept, run.recipe.seed)
    change = margins(repeated, targets) - margins(run.model(), targets)
    return -float(best.scores.sum()), float(change[target])


def main(
    num_train: int = 1200, epochs: int = 10, budget: int = 20, out: Path = Path("runs/unrolled")
) -> OneRunVerdict:
    """Return the verdict on the scores."""
    train, held_out = load_data(num_train)
    recipe = Recipe(build_model, loss, train, SGD(lr=0.02, momentum=0.9), batch_size=50, epochs=epochs)
    run = recipe.train(out / f"{num_train}-{epochs}")
    print(f"trained {run.num_steps} steps; metasmoothness {run.metasmoothness():.3f}")

    targets = Rows(held_out, batch_size=TARGETS)
    scores = unrolled(run, targets, "image_classification", name="held-out")
    verdict = verify_run(scores, run, targets, budget=budget, task="image_classification")
    print(verdict)

    print(f"\nmargin without the {REMOVED} most helpful rows: predicted and actual change")
    for target in range(3):
        predicted, actual = without_best_rows(run, scores, held_out, target)
        print(f"target {target}, a {held_out[target][1]}: {predicted:+.3f} {actual:+.3f}")
        assert actual < 0
        assert 0.7 < predicted / actual < 1.1
    assert run.metasmoothness() > 0.9
    assert all(found.mean > 0.9 for share, found in verdict.lds if share <= 0.1)
    return verdict


if __name__ == "__main__":
    main()
