"""CountSketchProjector: the map that its definition says, with the same bits however gradients come."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sketch_reference as reference
import torch
from projection_cases import accumulated, dense_blocks, random, random_gradients, set_threads

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors.random.hash import Stream, hash_offsets, hash_permutation, hash_signs
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.vector import VectorSketch
from trak_lite.types import DenseBlock, FactoredBlock, LookupBlock, SummedBlock

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
accumulate = functools.partial(accumulated, num_samples=NUM_SAMPLES, parameters=SHAPES)


threads = pytest.fixture(set_threads)


def gradients(num_samples: int = NUM_SAMPLES, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return random_gradients(SHAPES, num_samples, dtype=dtype)


# ---- the map


@pytest.mark.parametrize("proj_dim", [13, 64, 100, 600])
@pytest.mark.parametrize(("seed", "model_id", "copies"), [(0, 0, 1), (7, 3, 3)])
def test_features_equal_the_map_of_the_definition(proj_dim, seed, model_id, copies):
    """Below and above K, K no power of two, nothing at all: every kind of shape, and their sum."""
    grads, projector = gradients(3, torch.float64), CountSketchProjector(proj_dim, seed=seed, copies=copies)
    total = np.zeros((3, proj_dim))
    for name, grad in grads.items():
        expected = reference.features(
            grad.reshape(3, math.prod(SHAPES[name])).numpy(),
            SHAPES[name],
            proj_dim,
            seed=seed,
            model_id=model_id,
            name=name,
            copies=copies,
        )
        np.testing.assert_allclose(
            projector.project({name: grad}, model_id).numpy(), expected, rtol=1e-10, atol=1e-11
        )
        total += expected

    features = projector.project(grads, model_id)
    assert features.dtype == torch.float64
    np.testing.assert_allclose(features.numpy(), total, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(4, 65), (300,), (3, 2), (), (0, 4)])
def test_a_single_feature_is_the_signed_sum_of_all_entries(shape):
    grads = random(2, *shape)
    expected = reference.features(grads.reshape(2, math.prod(shape)).numpy(), shape, 1, name="w")

    np.testing.assert_allclose(CountSketchProjector(1).project({"w": grads}, 0).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("num_entries", "proj_dim"),
    [
        (70_000, 5),  # three tiles
        (32_768, 64),  # one tile, full
        (32_769, 64),  # and one entry more
        (90_000, 40_000),  # K wider than a tile would be
        (33_000, 20_000),  # tiles of K
        (2_200_000, 2048),  # more than the 64 tiles of one segment
    ],
)
def test_long_vectors_equal_the_map_of_the_definition(num_entries, proj_dim):
    grads = random(1, num_entries)
    features = CountSketchProjector(proj_dim, seed=2).project(grads, 1)

    expected = reference.features(grads.numpy(), (num_entries,), proj_dim, seed=2, model_id=1)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_signs_of_entries_beyond_two_to_the_31_are_their_own():
    num_entries, keys = 2**31 + 40, Keys(3, 1, "table")
    sketch = VectorSketch(num_entries, 2048, keys, device=torch.device("cpu"))

    drawn = sketch._draw_signs(2**31 // 32_768).tolist()
    words = [reference.word_at(keys(Stream.TILE_SIGN), 2**26 + i) for i in range(2)]
    assert drawn == [-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(40)]


@pytest.mark.parametrize("shape", [(300,), (5, 70), (70, 70)])
def test_every_entry_is_added_to_one_feature(shape):
    size = math.prod(shape)
    matrix = CountSketchProjector(32).project({"w": torch.eye(size).view(size, *shape)}, 0)

    assert torch.equal(matrix.abs().sum(1), torch.ones(size))
    assert torch.equal(matrix.square().sum(1), torch.ones(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_gradients_are_added_up_in_float32(dtype):
    grad = torch.full((1, 40, 100), 60_000.0, dtype=dtype)  # two of them overflow float16
    features = CountSketchProjector(16).project({"w": grad}, 0)

    assert features.dtype == torch.float32
    rows = grad.double().flatten(1).numpy()
    np.testing.assert_allclose(
        features.numpy(), reference.features(rows, (40, 100), 16, name="w"), rtol=1e-5, atol=1
    )


def test_a_tensor_of_gradients_is_one_vector_without_a_name():
    grads = random(3, 200)

    assert torch.equal(
        CountSketchProjector(8).project(grads, 0), CountSketchProjector(8).project({"": grads}, 0)
    )


def test_entries_that_are_not_finite_stay_in_their_row():
    grads = gradients(3)
    clean = CountSketchProjector(8).project(grads, 0)
    grads["tall"][1, 0, 0] = math.nan
    features = CountSketchProjector(8).project(grads, 0)

    assert features[1].isnan().any()
    assert torch.equal(features[[0, 2]], clean[[0, 2]])


# ---- golden values: what is stored on disk must be found again by every later version


def integers(*shape: int) -> torch.Tensor:
    """Integers from -8 to 8, exact in float32 in any order of addition."""
    return (torch.arange(math.prod(shape)) * 7919 % 17 - 8).float().view(shape)


@pytest.mark.parametrize(
    ("shape", "proj_dim", "copies", "digest"),
    [
        ((2_200_000,), 2048, 1, "vector"),
        ((300, 500), 128, 1, "matrix"),
        ((64, 32, 3, 3), 1000, 3, "convolution"),
    ],
)
def test_features_have_their_golden_digest(shape, proj_dim, copies, digest):
    grads = integers(1 if len(shape) == 1 else 2, *shape)
    projector = CountSketchProjector(proj_dim, seed=5, copies=copies)
    sums = projector.project({"layer.weight": grads}, 2) * math.sqrt(copies)

    exact = (sums.round() + 0.0).numpy().astype("<f4")  # no negative zeros
    assert float((sums - sums.round()).abs().max()) < 1e-2
    assert hashlib.sha256(exact.tobytes()).hexdigest() == GOLDEN[digest]


GOLDEN = {
    "vector": "fbc20a801df85cbd4030fc344d5375ced90ed1815729a40c8f105abb733e7e6b",
    "matrix": "ed6619a6408fa7ff13fb14ec073a86acc17b9f3e85a5aefd3ed98241adb2f6c3",
    "convolution": "3d22985fe05f6813b7b037d8639e846ffa6f9ab7faa823804b718044bad7e77d",
}


def test_hash_streams_have_their_golden_values():
    keys, cpu = Keys(5, 2, "layer.weight", 1), torch.device("cpu")

    assert hash_offsets(keys(Stream.TILE_OFFSET), 0, 5, size=32_768) == [25943, 32323, 19407, 12939, 16681]
    assert hash_offsets(keys(Stream.FOLD_OFFSET), 3, 5, size=2048) == [505, 1643, 1712, 1903, 336]
    assert hash_permutation(keys(Stream.ROW_SHIFT, 1, 2), 10).tolist() == [2, 7, 4, 3, 8, 6, 9, 5, 0, 1]
    for stream, parts, expected in (
        (Stream.TILE_SIGN, (), "+-+------++--++-+---+-+-"),
        (Stream.FOLD_SIGN, (), "+-++++---++-++-+---+-++-"),
        (Stream.ROW_SIGN, (1, 2), "-+-+--+-++-+-+---+-++--+"),
        (Stream.COLUMN_SIGN, (1, 2), "-+--+-++---+++++-----+++"),
    ):
        signs = hash_signs(keys(stream, *parts), 20, 24, device=cpu).tolist()
        assert "".join("-" if sign < 0 else "+" for sign in signs) == expected


# ---- the same bits


@pytest.mark.parametrize("copies", [1, 3])
def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch(copies, threads):
    grads, projector = gradients(), CountSketchProjector(100, copies=copies)
    threads(1)
    whole = projector.project(grads, 0)
    for rows in ([4], [26, 3, 4], list(range(9, 25)), list(reversed(range(NUM_SAMPLES)))):
        some = projector.project({name: grad[rows] for name, grad in grads.items()}, 0)
        assert torch.equal(some, whole[rows])


def test_rows_have_the_same_bits_in_chunks():
    grads, projector = gradients(), CountSketchProjector(100)
    chunks = [
        DenseBlock(name, grad[start : start + 10], start)
        for start in (20, 0, 10)
        for name, grad in grads.items()
    ]

    assert torch.equal(accumulate(projector, chunks), accumulate(projector, dense_blocks(grads)))


def test_features_have_the_same_bits_in_any_order_of_blocks():
    blocks, projector = dense_blocks(gradients()), CountSketchProjector(100)
    forward = accumulate(projector, blocks)
    for order in (blocks[::-1], blocks[3:] + blocks[:3], blocks[::2] + blocks[1::2]):
        assert torch.equal(accumulate(projector, order), forward)


def test_another_order_of_parameters_is_the_same_map_up_to_rounding():
    """Parameters are added up in the order of the model: one model, one order."""
    blocks, projector = dense_blocks(gradients()), CountSketchProjector(100)
    other = dict(reversed(SHAPES.items()))

    torch.testing.assert_close(
        accumulate(projector, blocks, parameters=other), accumulate(projector, blocks), rtol=1e-5, atol=1e-4
    )
    whole = [DenseBlock(block.name, block.grad.round()) for block in blocks]
    assert torch.equal(accumulate(projector, whole, parameters=other), accumulate(projector, whole))


@pytest.mark.parametrize("copies", [1, 3])
def test_features_have_the_same_bits_on_any_number_of_threads(copies, threads):
    grads, found = gradients(), []
    projector = CountSketchProjector(100, copies=copies)
    for count in (1, 2, 3, 1):
        threads(count)
        found.append(projector.project(grads, 0))

    assert all(torch.equal(features, found[0]) for features in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_bits_of_its_values_in_float32(dtype):
    grads = gradients(dtype=dtype)
    wide = {name: grad.float() for name, grad in grads.items()}

    assert torch.equal(
        CountSketchProjector(100).project(grads, 0), CountSketchProjector(100).project(wide, 0)
    )


def strided(grad: torch.Tensor) -> torch.Tensor:
    return torch.stack([grad, grad], -1)[..., 0]


def transposed(grad: torch.Tensor) -> torch.Tensor:
    return grad.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("layout", [strided, transposed])
@pytest.mark.parametrize("count", [1, 3])
def test_the_layout_in_memory_does_not_matter(layout, count, threads):
    threads(count)
    grads, projector = gradients(), CountSketchProjector(100)
    others = {name: layout(grad) for name, grad in grads.items()}
    repeated = {name: grad[:1].expand_as(grad) for name, grad in grads.items()}
    whole = projector.project(grads, 0)

    assert not others["tall"].is_contiguous()
    assert torch.equal(projector.project(others, 0), whole)
    assert torch.equal(projector.project(repeated, 0), whole[:1].expand_as(whole))


def test_strided_rows_are_copied_once_for_all_copies(threads, monkeypatch):
    threads(2)
    made, dense = [], DenseBlock.dense
    monkeypatch.setattr(DenseBlock, "dense", lambda block: made.append(block.num_samples) or dense(block))
    CountSketchProjector(16, copies=3).project({"w": random(32, 70, 4, dtype=torch.float32).mT}, 0)

    assert made == [32]


def test_features_have_the_same_bits_after_memory_is_freed_and_from_another_projector():
    grads, projector = gradients(), CountSketchProjector(100, seed=4)
    before = projector.project(grads, 1)
    projector.project(gradients(5), 0)
    projector.free_memory()

    assert torch.equal(projector.project(grads, 1), before)
    assert torch.equal(CountSketchProjector(100, seed=4).project(grads, 1), before)


@pytest.mark.parametrize("count", [1, 3])
def test_inference_mode_of_the_caller_changes_nothing(count, threads):
    threads(count)
    grads, projector = gradients(), CountSketchProjector(100)
    with torch.inference_mode():
        inside = projector.project(grads, 0)
        accumulator = projector.accumulator(NUM_SAMPLES, model_id=0, parameters=SHAPES)
        for block in dense_blocks(grads)[:4]:
            accumulator.add(block)
    for block in dense_blocks(grads)[4:]:
        accumulator.add(block)

    assert torch.equal(projector.project(grads, 0), inside)
    assert torch.equal(accumulator.features(), inside)
    with torch.inference_mode():
        assert torch.equal(projector.project(grads, 0), inside)


def test_a_projector_can_be_copied_and_sent_to_another_process(threads):
    threads(2)
    grads, projector = gradients(), CountSketchProjector(100, seed=1, copies=2)
    features = projector.project(grads, 0)
    for other in (copy.deepcopy(projector), pickle.loads(pickle.dumps(projector))):
        assert other.fingerprint() == projector.fingerprint()
        assert not other._sketches
        assert torch.equal(other.project(grads, 0), features)


def test_two_models_in_turn_keep_their_maps_apart():
    grads, projector = gradients(), CountSketchProjector(16)
    alone = [CountSketchProjector(16).project(grads, model_id) for model_id in (0, 1)]
    accumulators = [projector.accumulator(NUM_SAMPLES, model_id=i, parameters=SHAPES) for i in (0, 1)]
    for block in dense_blocks(grads):
        for accumulator in accumulators:
            accumulator.add(block)

    assert not torch.equal(*alone)
    for accumulator, expected in zip(accumulators, alone, strict=True):
        assert torch.equal(accumulator.features(), expected)


def test_many_batch_sizes_do_not_mix_up_their_scratch_memory(monkeypatch):
    monkeypatch.setattr("trak_lite.projectors._scratch._MOST_VIEWS", 400)
    grads, projector = gradients(), CountSketchProjector(64)
    whole = projector.project(grads, 0)
    for size in (1, 5, 2, 7, 3, 6):
        some = projector.project({name: grad[:size] for name, grad in grads.items()}, 0)
        assert torch.equal(some, whole[:size])


# ---- what may come


def test_parameters_of_mixed_precision_give_the_widest_features():
    grads = gradients(dtype=torch.float64)
    grads["tall"], grads["wide"] = grads["tall"].float(), grads["wide"].bfloat16()
    blocks, projector = dense_blocks(grads), CountSketchProjector(16)
    features = accumulate(projector, blocks)

    assert features.dtype == torch.float64
    assert torch.equal(accumulate(projector, blocks[::-1]), features)
    wide = {name: grad.double() for name, grad in grads.items()}
    torch.testing.assert_close(features, projector.project(wide, 0), rtol=1e-5, atol=1e-4)


def test_rows_that_come_again_add_up():
    """A parameter that is used twice may come as two blocks, at any time."""
    blocks, projector = dense_blocks(gradients()), CountSketchProjector(16)
    twice = accumulate(projector, [*reversed(blocks), blocks[-1], blocks[2]])
    again = accumulate(projector, [blocks[-1], blocks[2]])

    torch.testing.assert_close(twice, accumulate(projector, blocks) + again, rtol=1e-5, atol=1e-4)


def test_a_missing_parameter_counts_as_zero_whatever_comes_after_it():
    blocks, projector = dense_blocks(gradients()), CountSketchProjector(16)
    zero = [DenseBlock("tall", torch.zeros(NUM_SAMPLES, 150, 70))]
    some = [block for block in blocks if block.name != "tall"]

    assert torch.equal(accumulate(projector, some[::-1]), accumulate(projector, some + zero))


def test_a_sketch_in_the_order_of_a_backward_pass_does_not_wait():
    accumulator = CountSketchProjector(16).accumulator(NUM_SAMPLES, model_id=0, parameters=SHAPES)
    for block in reversed(dense_blocks(gradients())):
        accumulator.add(block)
        assert not accumulator._waiting


def test_no_block_at_all_gives_zeros():
    assert torch.equal(accumulate(CountSketchProjector(6), []), torch.zeros(NUM_SAMPLES, 6))


def test_a_batch_without_samples_has_no_features():
    features = CountSketchProjector(6).project(gradients(0, torch.float64), 0)

    assert features.shape == (0, 6)
    assert features.dtype == torch.float64


def test_features_can_be_read_twice_and_leave_no_graph():
    accumulator = CountSketchProjector(6).accumulator(2, model_id=0, parameters={"w": (3, 70)})
    accumulator.add(DenseBlock("w", random(2, 3, 70).requires_grad_()))

    assert torch.equal(accumulator.features(), accumulator.features())
    assert not accumulator.features().requires_grad


# ---- settings and errors


def test_the_fingerprint_holds_what_determines_the_features():
    fingerprint = CountSketchProjector(
        8, seed=np.int64(3), copies=2, factors="form", device="cpu"
    ).fingerprint()

    assert fingerprint == {"kind": "countsketch", "proj_dim": 8, "seed": 3, "copies": 2, "version": 1}
    assert json.loads(json.dumps(fingerprint)) == fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"proj_dim": 0}, "proj_dim must be an integer of at least 1"),
        ({"proj_dim": 2.0}, "proj_dim must be an integer of at least 1"),
        ({"proj_dim": 8, "seed": 1.5}, "seed must be an integer"),
        ({"proj_dim": 8, "copies": 0}, "copies must be an integer of at least 1"),
        ({"proj_dim": 8, "factors": "fourrier"}, "Did you mean 'fourier'"),
    ],
)
def test_a_setting_out_of_range_is_refused(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        CountSketchProjector(**arguments)


@pytest.mark.parametrize(
    "grads", [{}, {"a": torch.tensor(1.0)}, {"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}]
)
def test_gradients_that_do_not_agree_on_a_batch_are_refused(grads):
    with pytest.raises(InvalidInputError, match="agree on the number of samples on axis 0"):
        CountSketchProjector(4).project(grads, 0)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (DenseBlock("other", torch.zeros(3, 5)), "'other', which is not among the 7 parameters"),
        (DenseBlock("wide", torch.zeros(3, 3, 6)), r"has shape \(3, 6\) per sample, expected \(3, 150\)"),
        (DenseBlock("wide", torch.zeros(4, 3, 150)), "covers rows 0 to 4 of a batch of 3"),
        (DenseBlock("wide", torch.zeros(3, 3, 150, dtype=torch.int64)), r"dtype torch\.int64, expected floating"),
        (FactoredBlock("wide", torch.zeros(3, 1, 3), torch.zeros(3, 1, 150)), r"expected \(3, 150\)"),
        (FactoredBlock("wide", torch.zeros(3, 1, 150), torch.zeros(1, 1, 3)), "with the same b and T"),
        (FactoredBlock("wide", torch.zeros(3, 2, 150), torch.zeros(3, 1, 3)), "with the same b and T"),
        (FactoredBlock("wide", torch.zeros(3, 1, 150), torch.zeros(3, 1, 3).int()), "floating-point factors"),
        (SummedBlock("wide", (FactoredBlock("wide", torch.zeros(3, 2, 150), torch.zeros(3, 1, 3)),)), "same b and T"),
        (LookupBlock("wide", torch.zeros(3, 1).long(), torch.zeros(3, 1, 150), 4), r"shape \(4, 150\)"),
    ],
)  # fmt: skip
def test_a_block_that_does_not_fit_is_refused(block, message):
    accumulator = CountSketchProjector(4).accumulator(3, model_id=0, parameters=SHAPES)

    with pytest.raises(InvalidInputError, match=message):
        accumulator.add(block)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_features_have_the_same_bits_on_cuda(dtype):
    grads = gradients(dtype=dtype)
    host = CountSketchProjector(100).project(grads, 0)
    device = CountSketchProjector(100, device="cuda").project(grads, 0)

    assert device.is_cuda
    assert torch.equal(device.cpu(), host)


def test_two_projectors_in_two_threads_do_not_disturb_each_other(threads):
    threads(2)
    grads = torch.randn(40, 30, 70, generator=torch.Generator().manual_seed(0))
    expected = [CountSketchProjector(32, seed=seed).project({"w": grads}, 0) for seed in range(2)]

    def repeatedly(seed: int) -> list[torch.Tensor]:
        projector = CountSketchProjector(32, seed=seed)
        return [projector.project({"w": grads}, 0) for _ in range(20)]

    with ThreadPoolExecutor(2) as callers:
        for features, found in zip(expected, callers.map(repeatedly, range(2)), strict=True):
            assert all(torch.equal(features, one) for one in found)


@pytest.mark.parametrize(
    ("shape", "proj_dim", "copies"),
    [
        ((7,), 24, 1),
        ((90_000,), 16, 2),  # several tiles, and a ring of several blocks
        ((2_200_000,), 16, 1),  # several segments of tiles
        ((50, 70), 16, 3),  # blocks with fewer rows and columns at the ends
        ((9, 80), 512, 1),
    ],
    ids=str,
)
def test_the_adjoint_is_the_transposed_matrix(shape: tuple[int, ...], proj_dim: int, copies: int) -> None:
    """The matrix is found column by column, by projecting gradients with one entry."""
    projector = CountSketchProjector(proj_dim, seed=3, copies=copies)
    size = math.prod(shape)
    rows = torch.randn(2, proj_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen = torch.linspace(0, size - 1, min(size, 6)).long()
    units = torch.zeros(len(chosen), size, dtype=torch.float64)
    units[torch.arange(len(chosen)), chosen] = 1
    columns = projector.project({"w": units.reshape(-1, *shape)}, model_id=5)

    found = projector.adjoint(rows, model_id=5, parameters={"w": shape})

    assert found["w"].shape == (2, *shape)
    torch.testing.assert_close(found["w"].flatten(1)[:, chosen], rows @ columns.T)


def test_the_adjoint_of_an_empty_parameter_is_empty() -> None:
    found = CountSketchProjector(8).adjoint(torch.ones(2, 8), model_id=0, parameters={"w": (0, 4)})

    assert found["w"].shape == (2, 0, 4)
