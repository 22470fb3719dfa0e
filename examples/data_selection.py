"""Data selection: train on the half of the train rows with the most helpful scores.

A fifth of the train labels of scikit-learn's digits is replaced by wrong labels. The script scores the train rows
for 300 clean digits, and trains again on the most helpful half, on random halves and on all rows. It compares the
losses on other digits, which are used neither for training nor for selection.

Measured, means over 5 seeds: loss 0.281 with the most helpful half, 0.468 with 5 random halves, 0.417 with all rows.
The worst seed of the helpful half (0.288) is better than the best seed of all random halves (0.436).

Run:  python examples/data_selection.py      (11 seconds of CPU time)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.retraining import retrain_many
from trak_lite.unrolled import Adam, Recipe, SubsetTraining

NUM_TRAIN, NUM_CHOOSING, FLIPPED = 1000, 300, 0.20


def load_data() -> tuple[Tensor, Tensor]:
    """Return all pixels ``(1797, 64)`` and labels; a fifth of the labels of the first 1000 rows are wrong."""
    rng = np.random.default_rng(0)
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    labels = labels[order].astype(np.int64)
    wrong = rng.choice(NUM_TRAIN, int(FLIPPED * NUM_TRAIN), replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
    return torch.from_numpy(pixels[order]).float() / 16, torch.from_numpy(labels)


def build_model(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def row_losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the loss of every row of a batch, ``(B,)``."""
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def most_helpful_half(x: Tensor, y: Tensor, training: SubsetTraining, seeds: Sequence[int]) -> np.ndarray:
    """Return the most helpful half of the train rows for the choosing digits, with one model per seed, ``(N,)``."""
    train = TensorDataset(x[:NUM_TRAIN], y[:NUM_TRAIN])
    choosing = slice(NUM_TRAIN, NUM_TRAIN + NUM_CHOOSING)
    everything = np.arange(NUM_TRAIN)
    models = [training(everything, seed) for seed in seeds]
    attributor = Attributor(models[0], task="image_classification", path=None, proj_dim=512)
    attributor.featurize(train, checkpoints=[model.state_dict() for model in models])
    scores = attributor.score(TensorDataset(x[choosing], y[choosing]), name="choosing")
    helped = scores.group(targets=np.zeros(NUM_CHOOSING)).sums[:, 0]
    return helped >= np.median(helped)


def main(epochs: int = 30, seeds: Sequence[int] = range(5)) -> dict[str, float]:
    """Return the mean loss on unseen digits after training on each selection of rows."""
    x, y = load_data()
    train = TensorDataset(x[:NUM_TRAIN], y[:NUM_TRAIN])
    recipe = Recipe(build_model, row_losses, train, Adam(lr=0.003), epochs=epochs, batch_size=50)
    training = recipe.train_fn
    helpful = most_helpful_half(x, y, training, [1000 + seed for seed in seeds])
    rng = np.random.default_rng(1)
    halves = [rng.permutation(NUM_TRAIN) < NUM_TRAIN // 2 for _ in range(5)]
    masks = np.stack([helpful, np.ones(NUM_TRAIN, dtype=bool), *halves])

    unseen = slice(NUM_TRAIN + NUM_CHOOSING, None)

    def losses(model: nn.Module) -> Tensor:
        return row_losses(model, (x[unseen], y[unseen]))

    by_choice_and_seed = retrain_many(training, masks, losses, seeds=seeds).outputs.mean(axis=2)
    found = {
        "the most helpful half": float(by_choice_and_seed[0].mean()),
        "a random half": float(by_choice_and_seed[2:].mean()),
        "all rows": float(by_choice_and_seed[1].mean()),
    }
    print(f"mean loss on {len(y[unseen])} unseen digits, {len(seeds)} seeds:")
    for name, loss in found.items():
        print(f"  trained on {name:22s} {loss:.3f}")
    worst, best = by_choice_and_seed[0].max(), by_choice_and_seed[2:].min()
    print(f"  worst seed of the helpful half {worst:.3f}, best of the random halves {best:.3f}")
    assert worst < best
    return found


if __name__ == "__main__":
    main()
