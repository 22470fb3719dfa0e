"""CountSketch over many seeds: unbiased, and of no more variance than hashed buckets and signs of every entry have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trak_lite.projectors import CountSketchProjector

NUM_PAIRS = 24


def law(x: np.ndarray, y: np.ndarray, proj_dim: int) -> np.ndarray:
    """Variance of <phi x, phi y> of rows if every entry had a bucket and a sign of its own."""
    dots, products = np.sum(x * y, 1), np.sum(x**2 * y**2, 1)
    return (np.sum(x**2, 1) * np.sum(y**2, 1) + dots**2 - 2 * products) / proj_dim


def gaussian(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((NUM_PAIRS, 2, *shape))


def heavy(d_out: int, d_in: int) -> np.ndarray:
    """Outer products with a few features of 20 to 30, the same in both of a pair."""
    rng = np.random.default_rng(1)
    g, x = rng.standard_normal((NUM_PAIRS, 2, d_out)), rng.standard_normal((NUM_PAIRS, 2, d_in))
    for pair in range(NUM_PAIRS):
        g[pair][:, rng.choice(d_out, 2, replace=False)] *= rng.uniform(20, 30, 2)
        x[pair][:, rng.choice(d_in, 3, replace=False)] *= rng.uniform(20, 30, 3)
    return g[..., :, None] * x[..., None, :]


def columns_half_of_k_apart() -> np.ndarray:
    """The one place where the signs of meeting entries are not independent."""
    rows = np.zeros((1, 2, 6, 64))
    rows[..., [1, 1 + 4]] = 1
    return rows


@pytest.mark.parametrize(
    ("grads", "proj_dim", "num_seeds", "bound", "noise"),
    [
        *((kind(24, 96), 128, 400, 1.0, 0.14) for kind in (gaussian, heavy)),
        *((kind(24, 66), 22, 400, 1.0, 0.14) for kind in (gaussian, heavy)),
        *((kind(24, 96).reshape(-1, 2, 2304), 64, 400, 1.0, 0.14) for kind in (gaussian, heavy)),
        *((gaussian(*shape), 512, 80, 1.0, 0.16) for shape in ((90_000,), (100, 256))),
        (columns_half_of_k_apart(), 8, 800, 8 / 7, 0.36),
    ],
    ids=lambda value: str(value.shape) if isinstance(value, np.ndarray) else None,
)
def test_inner_products_are_unbiased_with_a_variance_of_at_most_the_law(
    grads, proj_dim, num_seeds, bound, noise
):
    """The mean of squared error over variance is within four standard errors of its bound.

    Of several tiles, or of a matrix of many rows and columns, what never meets is too little to be seen.
    """
    x, y = grads.reshape(len(grads), 2, -1).swapaxes(0, 1)
    true = np.stack([np.sum(x * y, 1), np.sum(x * x, 1)])
    rows, found = torch.from_numpy(grads).flatten(0, 1), []
    for seed in range(num_seeds):
        features = CountSketchProjector(proj_dim, seed=seed).project({"w": rows}, 0).double().numpy()
        found.append(np.stack([np.sum(features[::2] * features[n::2], 1) for n in (1, 0)]))
    errors = np.stack(found) - true
    ratios = (errors**2 / np.stack([law(x, y, proj_dim), law(x, x, proj_dim)])).mean((1, 2))
    standard_error = float(ratios.std()) / math.sqrt(num_seeds)

    assert (np.abs(errors.mean(0)) <= 4 * errors.std(0) / math.sqrt(num_seeds)).all()
    assert ratios.mean() < bound + 4 * standard_error < bound + noise
    if num_seeds == 80:
        assert ratios.mean() > 1 - 4 * standard_error
