"""CountSketch over many seeds: unbiased, and of no more variance than hashed buckets and signs of every entry have.

24 pairs of gradients of every kind. ``ratio`` is the mean of squared error over variance, with its standard error over
seeds: 1 % for Gaussian gradients, up to 3.8 % for heavy ones. Bounds are four standard errors.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trak_lite.projectors import CountSketchProjector

NUM_SEEDS, NUM_PAIRS = 400, 24
SHAPES = {"one block": ((24, 96), 128), "blocks": ((24, 66), 22), "vector": ((2304,), 64)}


def law(x: np.ndarray, y: np.ndarray, proj_dim: int) -> float:
    """Variance of <phi x, phi y> if every entry had a bucket and a sign of its own."""
    dot, products = np.sum(x * y), np.sum(x**2 * y**2)
    return float((np.sum(x**2) * np.sum(y**2) + dot**2 - 2 * products) / proj_dim)


def pairs(kind: str, d_out: int, d_in: int) -> np.ndarray:
    """Return ``(pairs, 2, d_out, d_in)``: Gaussian matrices, or outer products with a few features of 20 to 30."""
    rng = np.random.default_rng(kind == "heavy")
    if kind == "gaussian":
        return rng.standard_normal((NUM_PAIRS, 2, d_out, d_in))
    g, x = rng.standard_normal((NUM_PAIRS, 2, d_out)), rng.standard_normal((NUM_PAIRS, 2, d_in))
    for pair in range(NUM_PAIRS):  # the same features in both of a pair
        g[pair][:, rng.choice(d_out, 2, replace=False)] *= rng.uniform(20, 30, 2)
        x[pair][:, rng.choice(d_in, 3, replace=False)] *= rng.uniform(20, 30, 3)
    return g[..., :, None] * x[..., None, :]


def products(features: torch.Tensor) -> np.ndarray:
    """Return ``(pairs, 2)``: inner product and squared norm of every pair's features ``(pairs, 2, K)``."""
    x, y = features.double().unbind(-2)
    return torch.stack([(x * y).sum(-1), (x * x).sum(-1)], -1).numpy()


def errors(grads: np.ndarray, proj_dim: int, seeds: int) -> np.ndarray:
    """Errors ``(seeds, pairs, 2)`` of inner products and squared norms of gradients ``(pairs, 2, *shape)``."""
    rows, found = torch.from_numpy(grads).flatten(0, 1), []
    for seed in range(seeds):
        features = CountSketchProjector(proj_dim, seed=seed).project({"w": rows}, 0)
        found.append(products(features.view(-1, 2, proj_dim)))
    return np.stack(found) - products(torch.from_numpy(grads).flatten(2))


def ratio(grads: np.ndarray, found: np.ndarray, proj_dim: int) -> tuple[float, float]:
    """Mean of squared errors over the variances of the law, and its standard error over seeds."""
    expected = np.array([[law(x, y, proj_dim), law(x, x, proj_dim)] for x, y in grads])
    per_seed = (found**2 / expected).mean((1, 2))
    return float(per_seed.mean()), float(per_seed.std() / math.sqrt(len(per_seed)))


@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
@pytest.mark.parametrize("where", SHAPES)
def test_inner_products_are_unbiased_with_a_variance_of_at_most_the_law(where, kind):
    shape, proj_dim = SHAPES[where]
    grads = pairs(kind, *((24, 96) if len(shape) == 1 else shape)).reshape(-1, 2, *shape)
    found = errors(grads, proj_dim, NUM_SEEDS)
    mean, standard_error = ratio(grads, found, proj_dim)
    assert (np.abs(found.mean(0)) < 4 * found.std(0) / math.sqrt(NUM_SEEDS)).all()
    assert mean < 1 + 4 * standard_error < 1.14


@pytest.mark.parametrize(("shape", "proj_dim"), [((90_000,), 512), ((100, 256), 512)])
def test_gradients_without_structure_have_the_variance_of_the_law(shape, proj_dim):
    """Of several tiles, or a matrix of many rows and columns, what never meets is too little to be seen."""
    grads = np.random.default_rng(5).standard_normal((NUM_PAIRS, 2, *shape))
    mean, standard_error = ratio(grads, errors(grads, proj_dim, 80), proj_dim)
    assert abs(mean - 1) < 4 * standard_error < 0.16


def test_columns_half_of_k_apart_have_no_more_variance_than_the_law():
    """The one place where the signs of meeting entries are not independent."""
    proj_dim, rows = 8, np.zeros((6, 64))
    rows[:, [1, 1 + 4]] = 1
    grads = np.stack([rows, rows])[None]
    mean, standard_error = ratio(grads, errors(grads, proj_dim, 2 * NUM_SEEDS), proj_dim)
    assert mean < proj_dim / (proj_dim - 1) + 4 * standard_error < 1.5
