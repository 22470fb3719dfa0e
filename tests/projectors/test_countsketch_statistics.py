"""CountSketch over many seeds: unbiased, with the variance that meeting entries explain and never more than the law.

400 seeds and 24 pairs of gradients of every kind. ``ratio`` is the mean of squared error over expected variance, with
its standard error over seeds: 1 % for Gaussian gradients, up to 3.8 % for heavy ones. Bounds are four standard errors.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import sketch_reference as reference
import torch

from trak_lite.projectors import CountSketchProjector

NUM_SEEDS, NUM_PAIRS = 400, 24
SHAPES = {"one block": ((24, 96), 128), "blocks": ((24, 66), 22), "vector": ((2304,), 64)}
KINDS = ("gaussian", "outer", "heavy", "correlated")


def pairs(kind: str, d_out: int, d_in: int) -> np.ndarray:
    """Return ``(pairs, 2, d_out, d_in)``: Gaussian matrices or outer products of several kinds."""
    rng = np.random.default_rng(KINDS.index(kind))
    if kind == "gaussian":
        return rng.standard_normal((NUM_PAIRS, 2, d_out, d_in))
    g, x = rng.standard_normal((NUM_PAIRS, 2, d_out)), rng.standard_normal((NUM_PAIRS, 2, d_in))
    if kind == "heavy":  # a few features are 20 to 30 times as large, the same in both of a pair
        for pair in range(NUM_PAIRS):
            g[pair][:, rng.choice(d_out, 2, replace=False)] *= rng.uniform(20, 30, 2)
            x[pair][:, rng.choice(d_in, 3, replace=False)] *= rng.uniform(20, 30, 3)
    if kind == "correlated":
        x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    return g[..., :, None] * x[..., None, :]


def products(features: torch.Tensor) -> np.ndarray:
    """Return ``(pairs, 2)``: inner product and squared norm of every pair's features ``(pairs, 2, K)``."""
    x, y = features.double().unbind(-2)
    return torch.stack([(x * y).sum(-1), (x * x).sum(-1)], -1).numpy()


@functools.cache
def errors(where: str) -> dict[str, np.ndarray]:
    """Errors ``(seeds, pairs, 2)`` of inner products and squared norms, for every kind."""
    shape, proj_dim = SHAPES[where]
    size = (24, 96) if len(shape) == 1 else shape
    grads = torch.from_numpy(np.stack([pairs(kind, *size) for kind in KINDS]))
    rows, found = grads.reshape(-1, *shape), []
    for seed in range(NUM_SEEDS):
        features = CountSketchProjector(proj_dim, seed=seed).project({"w": rows}, 0)
        found.append(products(features.view(*grads.shape[:3], proj_dim)))
    truth = products(grads.flatten(3))
    return dict(zip(KINDS, np.stack(found, 1) - truth[:, None], strict=True))


@functools.cache
def variances(where: str, kind: str, exact: bool) -> np.ndarray:
    """Expected variances ``(pairs, 2)``: of the entries that can meet, or of the law."""
    shape, proj_dim = SHAPES[where]
    size = (24, 96) if len(shape) == 1 else shape
    law = reference.law if not exact else reference.vector_law if len(shape) == 1 else reference.matrix_law
    return expectations(pairs(kind, *size).reshape(-1, 2, *shape), proj_dim, law)


def expectations(grads: np.ndarray, proj_dim: int, law=reference.law, **settings) -> np.ndarray:
    """Variances ``(pairs, 2)`` of inner product and squared norm."""
    return np.array([[law(x, y, proj_dim, **settings), law(x, x, proj_dim, **settings)] for x, y in grads])


def ratio(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Mean of squared errors over variances, and its standard error over seeds."""
    per_seed = (found**2 / expected).mean((1, 2))
    return float(per_seed.mean()), float(per_seed.std() / math.sqrt(len(per_seed)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", SHAPES)
def test_inner_products_are_unbiased(where, kind):
    found = errors(where)[kind]

    standard_error = found.std(0) / math.sqrt(NUM_SEEDS)
    assert (np.abs(found.mean(0)) < 4 * standard_error).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", SHAPES)
def test_the_variance_is_that_of_the_entries_that_can_meet(where, kind):
    mean, standard_error = ratio(errors(where)[kind], variances(where, kind, exact=True))

    assert abs(mean - 1) < 4 * standard_error < 0.16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", SHAPES)
def test_the_variance_is_never_above_the_law(where, kind):
    """The law: (|x|^2 |y|^2 + <x, y>^2 - 2 sum x_i^2 y_i^2) / K; a matrix may meet it up to K / (K - 1)."""
    proj_dim = SHAPES[where][1]
    expected = variances(where, kind, exact=False)
    mean, standard_error = ratio(errors(where)[kind], expected)

    assert mean < 1 + 4 * standard_error < 1.14
    assert (variances(where, kind, exact=True) <= expected * proj_dim / (proj_dim - 1)).all()


@pytest.mark.parametrize(("shape", "proj_dim"), [((90_000,), 512), ((100, 256), 512)])
def test_gradients_without_structure_have_the_variance_of_the_law(shape, proj_dim):
    """Several tiles, or a matrix of many rows and columns: what never meets is too little to be seen."""
    rng = np.random.default_rng(5)
    rows = torch.from_numpy(rng.standard_normal((2 * NUM_PAIRS, *shape)))
    pairs_of_rows = rows.view(NUM_PAIRS, 2, -1)
    expected = expectations(pairs_of_rows.numpy(), proj_dim)
    found = []
    for seed in range(80):
        features = CountSketchProjector(proj_dim, seed=seed).project({"w": rows}, 0)
        found.append(products(features.view(NUM_PAIRS, 2, -1)) - products(pairs_of_rows))
    mean, standard_error = ratio(np.stack(found), expected)

    assert abs(mean - 1) < 4 * standard_error < 0.16


def test_three_copies_have_the_variance_of_three_independent_sketches():
    proj_dim = 32
    rows = torch.from_numpy(np.random.default_rng(6).standard_normal((NUM_PAIRS, 2, 40)) ** 3)
    expected = expectations(rows.numpy(), proj_dim, reference.vector_law, copies=3)
    found = []
    for seed in range(NUM_SEEDS):
        features = CountSketchProjector(proj_dim, seed=seed, copies=3).project({"w": rows.flatten(0, 1)}, 0)
        found.append(products(features.view(NUM_PAIRS, 2, -1)) - products(rows))
    mean, standard_error = ratio(np.stack(found), expected)

    assert abs(mean - 1) < 4 * standard_error < 0.16


def test_columns_half_of_k_apart_meet_in_twos():
    """The one place where the signs of meeting entries are not independent; it costs no more than the law."""
    proj_dim, rows = 8, np.zeros((6, 64))
    rows[:, [1, 1 + 4]] = 1
    grads, expected, found = torch.from_numpy(rows[None]), reference.matrix_law(rows, rows, proj_dim), []
    for seed in range(2 * NUM_SEEDS):
        features = CountSketchProjector(proj_dim, seed=seed).project({"w": grads}, 0)
        found.append([[float(features.square().sum() - 12)]])
    mean, standard_error = ratio(np.array(found), np.array([[expected]]))

    assert reference._meeting_in_twos(rows, rows, proj_dim) == pytest.approx(expected / 2)
    assert abs(mean - 1) < 4 * standard_error < 0.3
    assert expected <= reference.law(rows, rows, proj_dim) * proj_dim / (proj_dim - 1)


def test_a_bucket_of_i_modulo_k_would_be_found_out():
    """The power of these tests: without hashed offsets, a heavy feature has the same few buckets in every row."""
    proj_dim, grads = 64, pairs("heavy", 24, 128).reshape(NUM_PAIRS, 2, -1)
    expected = expectations(grads, proj_dim)
    rng, found = np.random.default_rng(0), []
    for _ in range(NUM_SEEDS):
        signed = grads * rng.choice([-1.0, 1.0], grads.shape[-1])
        features = torch.from_numpy(signed.reshape(NUM_PAIRS, 2, -1, proj_dim).sum(2))
        found.append(products(features) - products(torch.from_numpy(grads)))

    assert ratio(np.stack(found), expected)[0] > 5
