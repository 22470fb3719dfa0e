"""CountSketch: long vectors and large matrices, the same bits however gradients come, factors in any piece."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import projection_reference as reference
import pytest
import torch
from projection_cases import (
    Operators,
    accumulated,
    assert_close,
    dense_blocks,
    factors,
    lookups,
    random,
    random_gradients,
)

from trak_lite.projectors import CountSketchProjector
from trak_lite.types import DenseBlock

SHAPES = {
    "conv.weight": (8, 3, 5, 5),
    "scale": (),
    "empty": (0, 4),
    "wide": (3, 150),
    "tall": (150, 70),
    "vector": (3000,),
    "narrow": (20, 5),
}
NUM_SAMPLES = 27  # three slices of eight and more
SCRATCH = "trak_lite.projectors._scratch._CPU_SCRATCH_BYTES"


def gradients(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return random_gradients(SHAPES, NUM_SAMPLES, dtype=dtype)


def accumulate(projector, blocks, parameters=SHAPES) -> torch.Tensor:
    return accumulated(projector, blocks, num_samples=NUM_SAMPLES, parameters=parameters)


def project(block, shape: tuple[int, ...], proj_dim: int, **settings) -> torch.Tensor:
    projector = CountSketchProjector(proj_dim, **settings)
    return accumulated(projector, [block], num_samples=block.num_samples, parameters={"w": shape}, model_id=3)


# ---- the map


@pytest.mark.parametrize(
    ("shape", "proj_dim", "copies"),
    [
        ((70_000,), 5, 1),  # three tiles
        ((32_768,), 64, 1),  # one tile, full
        ((32_769,), 64, 1),  # and one entry more
        ((90_000,), 40_000, 1),  # K wider than a tile would be
        ((33_000,), 20_000, 2),  # tiles of K
        ((2_200_000,), 2048, 1),  # more than the 64 tiles of one segment
        ((150, 70), 64, 3),  # rows and columns of blocks, smaller at the ends
        ((8, 3, 5, 5), 600, 1),
        ((0, 4), 8, 1),
    ],
    ids=str,
)
def test_large_parameters_have_the_map_of_the_definition_and_its_transpose(shape, proj_dim, copies):
    grads, settings = random(1, *shape), {"seed": 2, "copies": copies}
    projector = CountSketchProjector(proj_dim, **settings)
    features = projector.project({"w": grads}, 1)
    rows = grads.reshape(1, math.prod(shape))
    expected = reference.sketch(rows.numpy(), shape, proj_dim, name="w", model_id=1, **settings)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-10, atol=1e-10)

    found = projector.adjoint(random(2, proj_dim, seed=1), model_id=1, parameters={"w": shape})["w"]
    assert found.shape == (2, *shape)
    products = rows @ found.reshape(2, rows.shape[1]).T
    torch.testing.assert_close(products, features @ random(2, proj_dim, seed=1).T)


# ---- golden values: what is stored on disk must be found again by every later version

GOLDEN = {
    ((2_200_000,), 2048, 1): "fbc20a801df85cbd4030fc344d5375ced90ed1815729a40c8f105abb733e7e6b",
    ((300, 500), 128, 1): "ed6619a6408fa7ff13fb14ec073a86acc17b9f3e85a5aefd3ed98241adb2f6c3",
    ((64, 32, 3, 3), 1000, 3): "3d22985fe05f6813b7b037d8639e846ffa6f9ab7faa823804b718044bad7e77d",
}


@pytest.mark.parametrize(("shape", "proj_dim", "copies"), GOLDEN)
def test_features_have_their_golden_digest(shape, proj_dim, copies):
    """Of integers from -8 to 8, exact in float32 in any order of addition."""
    count = 1 if len(shape) == 1 else 2
    grads = (torch.arange(count * math.prod(shape)) * 7919 % 17 - 8).float().view(count, *shape)
    projector = CountSketchProjector(proj_dim, seed=5, copies=copies)
    sums = projector.project({"layer.weight": grads}, 2) * math.sqrt(copies)
    exact = (sums.round() + 0.0).numpy().astype("<f4")  # no negative zeros
    assert float((sums - sums.round()).abs().max()) < 1e-2
    assert hashlib.sha256(exact.tobytes()).hexdigest() == GOLDEN[shape, proj_dim, copies]


# ---- the same bits


def test_parameters_are_added_up_in_the_order_of_the_model():
    """Another order is the same map, up to rounding; what waits for its turn may be of mixed precision."""
    blocks, projector = dense_blocks(gradients()), CountSketchProjector(100)
    other = dict(reversed(SHAPES.items()))
    assert_close(accumulate(projector, blocks, other), accumulate(projector, blocks), 1e-5)
    whole = [DenseBlock(block.name, block.grad.round()) for block in blocks]
    assert torch.equal(accumulate(projector, whole, other), accumulate(projector, whole))

    zero = [DenseBlock("tall", torch.zeros(NUM_SAMPLES, 150, 70))]
    some = [block for block in blocks if block.name != "tall"]
    assert torch.equal(accumulate(projector, some[::-1]), accumulate(projector, some + zero))
    mixed = [DenseBlock(b.name, b.grad.double() if b.name == "vector" else b.grad) for b in blocks]
    assert torch.equal(accumulate(projector, mixed[::-1]), accumulate(projector, mixed))


def test_in_the_order_of_a_backward_pass_features_of_two_parameters_at_most_are_held():
    """Sums that wait for their turn would take K numbers per parameter and row."""
    shapes = {f"p{i}": (3,) for i in range(40)}
    peaks = {}
    for backward in (True, False):
        accumulator = CountSketchProjector(4096).accumulator(8, model_id=0, parameters=shapes)
        names, held = (list(shapes)[::-1] if backward else list(shapes)), []
        for name in names:
            accumulator.add(DenseBlock(name, torch.ones(8, 3)))
            held.append(live_bytes(accumulator))
        peaks[backward] = max(held)

    assert peaks[True] <= 3 * 8 * 4096 * 4 < 39 * 8 * 4096 * 4 <= peaks[False]


def live_bytes(value: object, seen: set[int] | None = None) -> int:
    """Bytes of all ``(8, 4096)`` tensors that an object reaches."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, CountSketchProjector):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.shape == (8, 4096) else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(live_bytes(part, seen) for part in [*parts, *getattr(value, "__dict__", {}).values()])


def test_strided_rows_are_copied_once_for_all_copies(monkeypatch):
    made, dense = [], DenseBlock.dense
    monkeypatch.setattr(DenseBlock, "dense", lambda block: made.append(block.num_samples) or dense(block))
    CountSketchProjector(16, copies=3).project({"w": random(32, 70, 4, dtype=torch.float32).mT}, 0)
    assert made == [32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "proj_dim"), [((21, 70), 8), ((40, 65), 33), ((3, 129), 8)])
def test_features_of_small_batches_have_the_bits_of_large_ones(shape, proj_dim, dtype):
    """Small batches are added by one operation, large ones row by row; the order is the same."""
    grads = random(400, *shape, dtype=dtype)
    whole = CountSketchProjector(proj_dim).project({"w": grads}, 0)
    parts = [CountSketchProjector(proj_dim).project({"w": part}, 0) for part in grads.split(37)]
    assert torch.equal(torch.cat(parts), whole)
    one = random(3, *shape, dtype=dtype)
    one[1, 1, 3] = float("inf")
    assert (
        CountSketchProjector(proj_dim).project({"w": one}, 0).isfinite().sum(1).tolist()[::2]
        == [proj_dim] * 2
    )
    assert int(CountSketchProjector(proj_dim).project({"w": one}, 0).isfinite().sum()) == 3 * proj_dim - 1


@pytest.mark.parametrize("positions", [None, 1, 30], ids=["dense", "one position", "many positions"])
def test_the_number_of_operations_does_not_grow_with_the_blocks_of_a_matrix(positions):
    """With K = 8 the larger matrix has 16 times as many blocks, and is in pieces of as many samples."""
    found = []
    for shape in ((16, 64), (64, 256)):
        block = DenseBlock("w", random(4, *shape)) if positions is None else factors(shape, positions, 4)
        projector = CountSketchProjector(8)
        for _ in range(2):  # the first draws the hash functions
            with Operators() as seen:
                accumulated(projector, [block], num_samples=4, parameters={"w": shape})
        found.append(seen.count)
    assert found[0] == found[1] < 60


def test_many_batch_sizes_do_not_mix_up_their_scratch_memory(monkeypatch):
    monkeypatch.setattr("trak_lite.projectors._scratch._MOST_VIEWS", 400)
    grads, projector = gradients(), CountSketchProjector(64)
    whole = projector.project(grads, 0)
    for size in (1, 5, 2, 7, 3, 6):
        some = projector.project({name: grad[:size] for name, grad in grads.items()}, 0)
        assert torch.equal(some, whole[:size])


def test_two_projectors_in_two_threads_do_not_disturb_each_other():
    grads = random(40, 30, 70, dtype=torch.float32)
    expected = [CountSketchProjector(32, seed=seed).project({"w": grads}, 0) for seed in range(2)]

    def repeatedly(seed: int) -> list[torch.Tensor]:
        projector = CountSketchProjector(32, seed=seed)
        return [projector.project({"w": grads}, 0) for _ in range(10)]

    with ThreadPoolExecutor(2) as callers:
        for features, found in zip(expected, callers.map(repeatedly, range(2)), strict=True):
            assert all(torch.equal(features, one) for one in found)


# ---- factors and rows of tables; the laws of all projectors have others


@pytest.mark.parametrize(("method", "most"), [("form", 128 * 192), ("fourier", 2 * 2 * 512)])
def test_the_gradient_of_factors_is_never_formed_as_a_whole(method, most, monkeypatch):
    """Forming takes 128 rows of one sample; transforms take a few vectors of K + d_in per position."""
    monkeypatch.setattr(SCRATCH, 64 << 10)
    shape, block = (512, 192), factors((512, 192), 2, num_samples=2)
    with Operators() as seen:
        project(block, shape, 256, factors=method)
    assert seen.entries <= most <= shape[0] * shape[1] / 4  # of one sample's gradient


@pytest.mark.parametrize(
    ("shape", "positions", "proj_dim", "transforms"),
    [
        ((1024, 1024), 1, 2048, True),
        ((768, 192), 8, 2048, True),
        ((768, 192), 9, 2048, False),
        ((70, 80), 14, 64, True),
        ((70, 80), 15, 64, False),
        ((16, 64), 1, 4096, False),
    ],
)
def test_factors_are_transformed_where_that_is_cheaper_unless_it_is_chosen(
    shape, positions, proj_dim, transforms, monkeypatch
):
    calls, rfft = [], torch.fft.rfft
    monkeypatch.setattr(torch.fft, "rfft", lambda *args, **kwargs: calls.append(1) or rfft(*args, **kwargs))
    for method, expected in (("auto", transforms), ("form", False), ("fourier", True)):
        calls.clear()
        project(factors(shape, positions, 1, torch.float32), shape, proj_dim, factors=method)
        assert bool(calls) == expected


def test_a_large_table_is_never_formed():
    shape = (5000, 128)
    with Operators() as seen:
        project(lookups(shape, 6), shape, 256)
    assert seen.entries < shape[0] * shape[1] / 10
