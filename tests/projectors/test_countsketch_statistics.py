"""CountSketch over many seeds: unbiased, with the variance that meeting entries explain and never more than the law.

400 seeds and 24 pairs of gradients of every kind. ``ratio`` is the mean of squared error over expected variance, with
its standard error over seeds: 1 % for Gaussian gradients, up to 3.8 % for heavy ones. Bounds are four standard errors.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from trak_lite.projectors import CountSketchProjector

NUM_SEEDS, NUM_PAIRS = 400, 24
SHAPES = {"one block": ((24, 96), 128), "blocks": ((24, 66), 22), "vector": ((2304,), 64)}
KINDS = ("gaussian", "heavy")


def law(x: np.ndarray, y: np.ndarray, proj_dim: int, *, copies: int = 1) -> float:
    """Variance of <phi x, phi y> for ``copies`` hashed buckets and signs of every entry."""
    dot, products = np.sum(x * y), np.sum(x**2 * y**2)
    return float((np.sum(x**2) * np.sum(y**2) + dot**2 - 2 * products / copies) / proj_dim)


def variance(x: np.ndarray, y: np.ndarray, chance: np.ndarray) -> float:
    """Sum over pairs of the chance to meet times (x_i y_j + x_j y_i)^2, for independent signs."""
    a, b = x.ravel(), y.ravel()
    return float(a**2 @ chance @ b**2 + (a * b) @ chance @ (a * b))


def vector_law(x: np.ndarray, y: np.ndarray, proj_dim: int, *, copies: int = 1) -> float:
    """The variance for vectors of one tile: entries in one block of the ring never meet."""
    within = variance(x, y, vector_chance(x.size, proj_dim))
    between = (
        np.sum(x**2) * np.sum(y**2) + np.sum(x * y) ** 2
    ) / proj_dim  # of two copies, whatever the entries
    return float((within + (copies - 1) * between) / copies)


@functools.cache
def vector_chance(size: int, proj_dim: int) -> np.ndarray:
    width = min(max(1, 32768 // proj_dim), math.ceil(size / proj_dim)) * proj_dim
    apart = np.abs(np.arange(size)[:, None] - np.arange(size))
    return np.minimum(1, np.minimum(apart, width - apart) / proj_dim) / proj_dim


def matrix_law(x: np.ndarray, y: np.ndarray, proj_dim: int) -> float:
    """The variance for matrices: entries of one block's row or column never meet."""
    return variance(x, y, matrix_chance(*x.shape, proj_dim)) + meeting_in_twos(x, y, proj_dim)


@functools.cache
def matrix_chance(d_out: int, d_in: int, proj_dim: int) -> np.ndarray:
    row, column = (axis.ravel() for axis in np.indices((d_out, d_in)))
    apart = (row[:, None] != row) & (column[:, None] != column)
    block = row // proj_dim * d_in + column // proj_dim
    return np.where(block[:, None] == block, apart / max(1, proj_dim - 1), 1 / proj_dim)


def meeting_in_twos(x: np.ndarray, y: np.ndarray, proj_dim: int) -> float:
    """(i, j) and (k, l) meet exactly if (i, l) and (k, j) do, with the same sign, where l = j + K/2."""
    total, half = 0.0, proj_dim // 2
    for j in range(x.shape[1] - half if proj_dim % 2 == 0 else 0):
        if j % proj_dim >= half:
            continue  # j + K/2 is in the next block
        for first in range(0, len(x), proj_dim):
            x_j, x_l, y_j, y_l = (m[first : first + proj_dim, c] for m in (x, y) for c in (j, j + half))
            weight = np.outer(x_j, y_l) + np.outer(y_j, x_l)
            np.fill_diagonal(weight, 0)
            total += np.sum(weight * weight.T) / (proj_dim - 1)
    return float(total)


def pairs(kind: str, d_out: int, d_in: int) -> np.ndarray:
    """Return ``(pairs, 2, d_out, d_in)``: Gaussian matrices, or outer products with a few features of 20 to 30."""
    rng = np.random.default_rng(KINDS.index(kind))
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


def errors(grads: np.ndarray, proj_dim: int, seeds: int = NUM_SEEDS, **settings) -> np.ndarray:
    """Errors ``(seeds, pairs, 2)`` of inner products and squared norms of gradients ``(pairs, 2, *shape)``."""
    rows, found = torch.from_numpy(grads).flatten(0, 1), []
    for seed in range(seeds):
        features = CountSketchProjector(proj_dim, seed=seed, **settings).project({"w": rows}, 0)
        found.append(products(features.view(-1, 2, proj_dim)))
    return np.stack(found) - products(torch.from_numpy(grads).flatten(2))


def expectations(grads: np.ndarray, proj_dim: int, expected=law, **settings) -> np.ndarray:
    """Variances ``(pairs, 2)`` of inner product and squared norm."""
    return np.array(
        [[expected(x, y, proj_dim, **settings), expected(x, x, proj_dim, **settings)] for x, y in grads]
    )


def ratio(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Mean of squared errors over variances, and its standard error over seeds."""
    per_seed = (found**2 / expected).mean((1, 2))
    return float(per_seed.mean()), float(per_seed.std() / math.sqrt(len(per_seed)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", SHAPES)
def test_inner_products_are_unbiased_with_the_variance_of_the_entries_that_can_meet(where, kind):
    """Which is never above the law; a matrix may meet it up to K / (K - 1)."""
    shape, proj_dim = SHAPES[where]
    grads = pairs(kind, *((24, 96) if len(shape) == 1 else shape)).reshape(-1, 2, *shape)
    found = errors(grads, proj_dim)
    exact = expectations(grads, proj_dim, vector_law if len(shape) == 1 else matrix_law)
    most = expectations(grads, proj_dim)

    assert (np.abs(found.mean(0)) < 4 * found.std(0) / math.sqrt(NUM_SEEDS)).all()
    mean, standard_error = ratio(found, exact)
    assert abs(mean - 1) < 4 * standard_error < 0.16
    mean, standard_error = ratio(found, most)
    assert mean < 1 + 4 * standard_error < 1.14
    assert (exact <= most * proj_dim / (proj_dim - 1)).all()


@pytest.mark.parametrize(
    ("shape", "proj_dim", "copies", "expected"),
    [((90_000,), 512, 1, law), ((100, 256), 512, 1, law), ((40,), 32, 3, vector_law)],
    ids=["several tiles", "a large matrix", "copies are independent"],
)
def test_gradients_without_structure_have_the_variance_of_the_law(shape, proj_dim, copies, expected):
    """Of several tiles, or a matrix of many rows and columns, what never meets is too little to be seen."""
    power = 3 if copies > 1 else 1
    grads = np.random.default_rng(5 + (copies > 1)).standard_normal((NUM_PAIRS, 2, *shape)) ** power
    variances = expectations(grads, proj_dim, expected, copies=copies)
    found = errors(grads, proj_dim, 80 if copies == 1 else NUM_SEEDS, copies=copies)
    mean, standard_error = ratio(found, variances)

    assert abs(mean - 1) < 4 * standard_error < 0.16


def test_columns_half_of_k_apart_meet_in_twos():
    """The one place where the signs of meeting entries are not independent; it costs no more than the law."""
    proj_dim, rows = 8, np.zeros((6, 64))
    rows[:, [1, 1 + 4]] = 1
    expected = matrix_law(rows, rows, proj_dim)
    found = errors(np.stack([rows, rows])[None], proj_dim, 2 * NUM_SEEDS)
    mean, standard_error = ratio(found, np.full((1, 2), expected))

    assert meeting_in_twos(rows, rows, proj_dim) == pytest.approx(expected / 2)
    assert abs(mean - 1) < 4 * standard_error < 0.3
    assert expected <= law(rows, rows, proj_dim) * proj_dim / (proj_dim - 1)
