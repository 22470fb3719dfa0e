"""CountSketch: long vectors and large matrices, the same bits however gradients come, factors in any piece."""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import projection_cases as cases
import pytest
import torch

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


def gradients(dtype=torch.float32):
    return cases.random_gradients(SHAPES, NUM_SAMPLES, dtype=dtype)


def accumulate(projector, blocks, parameters=SHAPES):
    return cases.accumulated(projector, blocks, num_samples=NUM_SAMPLES, parameters=parameters)


def project(block, shape, proj_dim, **settings):
    projector = CountSketchProjector(proj_dim, **settings)
    return cases.accumulated(
        projector, [block], num_samples=block.num_samples, parameters={"w": shape}, model_id=3
    )


# Features that are stored must be found again by every later version.
GOLDEN = {
    ((2_200_000,), 2048, 1): "fbc20a801df85cbd4030fc344d5375ced90ed1815729a40c8f105abb733e7e6b",  # over 64 tiles
    ((70_000,), 5, 1): "970b990c464061f84512dc6300c8d81a5b57ec48a6f4d6d3728a666d61f06a56",  # three tiles
    ((32_768,), 64, 1): "0100bd27b6773f7b277cc058143c40657dc9034d88a3b964b7245965ec63e865",  # one, full
    ((32_769,), 64, 1): "498e3595bc3efec9100813f21023f0283196e418fe06ec5951c45ecad695854a",  # and one entry
    ((90_000,), 40_000, 1): "dde9589cf02f10385dcfe0bfacedca1b2238d83140be91606c38431bd0ff1310",  # wider than a tile
    ((33_000,), 20_000, 2): "ac9e970c1b26e7f287c1eaf6b8ff73ccaa2f8e69611396c08a499de2698fb434",  # tiles of K
    ((300, 500), 128, 1): "ed6619a6408fa7ff13fb14ec073a86acc17b9f3e85a5aefd3ed98241adb2f6c3",
    ((150, 70), 64, 3): "cc1ec1c952e2dc997bc74da27aa9d821ad1ddad6d89911a3f39c579e993dcae0",
    ((64, 32, 3, 3), 1000, 3): "3d22985fe05f6813b7b037d8639e846ffa6f9ab7faa823804b718044bad7e77d",
    ((8, 3, 5, 5), 600, 1): "d207e3e3f76b50afad6f30ff664d78863e81879f73b38fec473d2f2b704f3bb1",
    ((0, 4), 8, 1): "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b",
}  # fmt: skip


@pytest.mark.parametrize(("shape", "proj_dim", "copies"), GOLDEN)
def test_features_have_their_golden_digest_and_the_adjoint_is_their_transpose(shape, proj_dim, copies):
    """Of integers from -8 to 8, exact in float32 in any order of addition."""
    count = 1 if len(shape) == 1 else 2
    grads = (torch.arange(count * math.prod(shape)) * 7919 % 17 - 8).float().view(count, *shape)
    projector = CountSketchProjector(proj_dim, seed=5, copies=copies)
    features = projector.project({"layer.weight": grads}, 2)
    sums = features * math.sqrt(copies)
    exact = (sums.round() + 0.0).numpy().astype("<f4")  # no negative zeros
    assert float((sums - sums.round()).abs().max()) < 1e-2
    assert hashlib.sha256(exact.tobytes()).hexdigest() == GOLDEN[shape, proj_dim, copies]
    rows = cases.random(2, proj_dim)
    found = projector.adjoint(rows, model_id=2, parameters={"layer.weight": shape})["layer.weight"]
    assert found.shape == (2, *shape)
    products = grads.double().flatten(1) @ found.flatten(1).T
    cases.assert_close(products, features.double() @ rows.T, 1e-5)


# ---- the same bits
def test_parameters_are_added_up_in_the_order_of_the_model():
    """Another order is the same map, up to rounding; what waits for its turn may be of mixed precision."""
    blocks, projector = cases.dense_blocks(gradients()), CountSketchProjector(100)
    other = dict(reversed(SHAPES.items()))
    cases.assert_close(accumulate(projector, blocks, other), accumulate(projector, blocks), 1e-5)
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


def live_bytes(value, seen=None):
    """Bytes of all ``(8, 4096)`` tensors that an object reaches."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, CountSketchProjector):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.shape == (8, 4096) else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return sum(live_bytes(part, seen) for part in [*parts, *held, *getattr(value, "__dict__", {}).values()])


def test_strided_rows_are_copied_once_for_all_copies(monkeypatch):
    made, dense = [], DenseBlock.dense
    monkeypatch.setattr(DenseBlock, "dense", lambda block: made.append(block.num_samples) or dense(block))
    CountSketchProjector(16, copies=3).project({"w": cases.random(32, 70, 4, dtype=torch.float32).mT}, 0)
    assert made == [32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "proj_dim"), [((21, 70), 8), ((40, 65), 33), ((3, 129), 8)])
def test_features_of_small_batches_have_the_bits_of_large_ones(shape, proj_dim, dtype):
    """Small batches are added by one operation, large ones row by row; the order is the same."""
    grads = cases.random(400, *shape, dtype=dtype)
    whole = CountSketchProjector(proj_dim).project({"w": grads}, 0)
    parts = [CountSketchProjector(proj_dim).project({"w": part}, 0) for part in grads.split(37)]
    assert torch.equal(torch.cat(parts), whole)
    one = cases.random(3, *shape, dtype=dtype)
    one[1, 1, 3] = float("inf")
    finite = CountSketchProjector(proj_dim).project({"w": one}, 0).isfinite().sum(1)
    assert finite.tolist() == [proj_dim, proj_dim - 1, proj_dim]


@pytest.mark.parametrize("positions", [None, 1, 30], ids=["dense", "one position", "many positions"])
def test_the_number_of_operations_does_not_grow_with_the_blocks_of_a_matrix(positions):
    """With K = 8 the larger matrix has 16 times as many blocks, and is in pieces of as many samples."""
    found = []
    for shape in ((16, 64), (64, 256)):
        block = (
            DenseBlock("w", cases.random(4, *shape))
            if positions is None
            else cases.factors(shape, positions, 4)
        )
        projector = CountSketchProjector(8)
        for _ in range(2):  # the first draws the hash functions
            with cases.Operators() as seen:
                cases.accumulated(projector, [block], num_samples=4, parameters={"w": shape})
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
    grads = cases.random(40, 30, 70, dtype=torch.float32)
    expected = [CountSketchProjector(32, seed=seed).project({"w": grads}, 0) for seed in range(2)]

    def repeatedly(seed):
        projector = CountSketchProjector(32, seed=seed)
        return [projector.project({"w": grads}, 0) for _ in range(10)]

    with ThreadPoolExecutor(2) as callers:
        for features, found in zip(expected, callers.map(repeatedly, range(2)), strict=True):
            assert all(torch.equal(features, one) for one in found)


# ---- factors and rows of tables; the laws of all projectors have others
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
        project(cases.factors(shape, positions, 1, torch.float32), shape, proj_dim, factors=method)
        assert bool(calls) == expected


def test_a_large_table_is_never_formed():
    shape = (5000, 128)
    with cases.Operators() as seen:
        project(cases.lookups(shape, 6), shape, 256)
    assert seen.entries < shape[0] * shape[1] / 10
