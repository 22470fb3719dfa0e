"""CountSketch of gradients in factors and of table rows: the map of the formed gradient, which is never formed."""

from __future__ import annotations

import pytest
import torch
from projection_cases import LargestTensor, random, set_threads

from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors import _scratch as scratch_module
from trak_lite.projectors._scratch import Scratch
from trak_lite.projectors.sketch import blocks as all_blocks
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.blocks import fourier_takes_less_time
from trak_lite.projectors.sketch.matrix import MatrixSketch, fourier_is_cheaper
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock, LookupBlock, SummedBlock

SHAPES = {
    "square": (70, 80),
    "convolution": (8, 3, 5, 5),
    "wide": (5, 300),
    "tall": (300, 64),
    "narrow": (40, 6),
}
METHODS = ("form", "fourier", "auto")


threads = pytest.fixture(set_threads)


def factors(
    shape: tuple[int, ...], positions: int, num_samples: int = 3, dtype: torch.dtype = torch.float64
) -> FactoredBlock:
    d_out, d_in = shape[0], torch.Size(shape[1:]).numel()
    inputs = random(num_samples, positions, d_in, seed=1, dtype=dtype)
    return FactoredBlock("w", inputs, random(num_samples, positions, d_out, seed=2, dtype=dtype))


def formed(block: FactoredBlock, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> DenseBlock:
    """The gradient itself, from factors in a wide dtype."""
    g, x = block.output_grads.to(dtype), block.inputs.to(dtype)
    return DenseBlock("w", torch.einsum("bto,bti->boi", g, x).reshape(-1, *shape))


def project(block: GradientBlock, shape: tuple[int, ...], proj_dim: int, **settings) -> torch.Tensor:
    projector = CountSketchProjector(proj_dim, **settings)
    accumulator = projector.accumulator(block.num_samples, model_id=3, parameters={"w": shape})
    accumulator.add(block)
    return accumulator.features()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest feature: rounding of a transform is spread over all of them."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-300))


# ---- factors


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("positions", [1, 2, 7])
@pytest.mark.parametrize("proj_dim", [33, 64, 500])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_factors_have_the_features_of_their_gradient(shape, proj_dim, positions, method):
    block = factors(shape, positions)

    features = project(block, shape, proj_dim, factors=method)
    assert features.dtype == torch.float64
    assert_close(features, project(formed(block, shape), shape, proj_dim), 1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_factors_of_lower_precision_are_multiplied_in_float32(shape, dtype, method):
    block = factors(shape, 4, dtype=dtype)
    features = project(block, shape, 100, factors=method)

    assert features.dtype == torch.float32
    assert_close(features.double(), project(formed(block, shape), shape, 100), 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [SHAPES["square"], SHAPES["narrow"]])
def test_products_beyond_float16_do_not_overflow(shape, method):
    d_out, d_in = shape
    block = FactoredBlock(
        "w", torch.full((2, 3, d_in), 600.0).half(), torch.full((2, 3, d_out), 700.0).half()
    )

    assert_close(
        project(block, shape, 64, factors=method).double(), project(formed(block, shape), shape, 64), 1e-5
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [SHAPES["square"], SHAPES["narrow"]])
def test_factors_of_two_precisions_have_features_of_the_wider(shape, method):
    block = factors(shape, 2)
    mixed = FactoredBlock("w", block.inputs.float(), block.output_grads)
    features = project(mixed, shape, 64, factors=method)

    assert features.dtype == torch.float64
    assert_close(features, project(formed(mixed, shape), shape, 64), 1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_the_layout_of_factors_in_memory_does_not_matter(method):
    shape, block = SHAPES["square"], factors(SHAPES["square"], 5)
    others = [
        FactoredBlock("w", block.inputs.mT.contiguous().mT, block.output_grads.mT.contiguous().mT),
        FactoredBlock(
            "w", *(t.movedim(0, 2).contiguous().movedim(2, 0) for t in (block.inputs, block.output_grads))
        ),
    ]
    for other in others:
        assert not other.inputs.is_contiguous()
        assert_close(
            project(other, shape, 64, factors=method), project(block, shape, 64, factors=method), 1e-12
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_samples_and_no_positions_have_their_features(shape, method):
    assert project(factors(shape, 2, num_samples=0), shape, 64, factors=method).shape == (0, 64)

    projector = CountSketchProjector(64, factors=method)  # with something in its scratch memory
    for positions in (2, 0):
        accumulator = projector.accumulator(3, model_id=0, parameters={"w": shape})
        accumulator.add(factors(shape, positions))
    assert torch.equal(accumulator.features(), torch.zeros(3, 64, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_factors_may_come_in_pieces_of_any_size(shape, method, threads, monkeypatch):
    """Rows of the batch in chunks, slices of threads, and scratch memory for a part of a sample."""
    block = factors(shape, 2, num_samples=20)
    whole = project(block, shape, 64, factors=method)
    monkeypatch.setattr(scratch_module, "_CPU_SCRATCH_BYTES", 3000)
    threads(2)
    accumulator = CountSketchProjector(64, factors=method).accumulator(
        20, model_id=3, parameters={"w": shape}
    )
    for start, stop in ((17, 20), (0, 17)):
        rows = slice(start, stop)
        accumulator.add(FactoredBlock("w", block.inputs[rows], block.output_grads[rows], start))

    assert_close(accumulator.features(), whole, 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [SHAPES["square"], SHAPES["narrow"]])
def test_autocast_of_the_caller_does_not_round_products(shape, method):
    block = factors(shape, 3, dtype=torch.float32)
    plain = project(block, shape, 64, factors=method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = project(block, shape, 64, factors=method)

    assert torch.equal(inside, plain)


def test_copies_of_factors_are_those_of_the_gradient():
    shape, block = SHAPES["square"], factors(SHAPES["square"], 2)
    expected = project(formed(block, shape), shape, 64, copies=3)

    for method in METHODS:
        assert_close(project(block, shape, 64, copies=3, factors=method), expected, 1e-10)


def test_factors_that_require_grad_leave_no_graph():
    block = factors(SHAPES["square"], 2)
    block.inputs.requires_grad_()
    block.output_grads.requires_grad_()

    for method in METHODS:
        assert not project(block, SHAPES["square"], 64, factors=method).requires_grad


@pytest.mark.parametrize(("method", "most"), [("form", 128 * 192), ("fourier", 8 * 2 * 512)])
def test_the_gradient_of_factors_is_never_formed_as_a_whole(method, most, threads, monkeypatch):
    """Forming takes 128 rows of one sample; transforms take a few vectors of K + d_in per position."""
    threads(1)
    monkeypatch.setattr(scratch_module, "_CPU_SCRATCH_BYTES", 64 << 10)
    shape, block = (512, 192), factors((512, 192), 2, num_samples=8)
    projector = CountSketchProjector(256, factors=method)
    with LargestTensor() as largest:
        accumulator = projector.accumulator(8, model_id=0, parameters={"w": shape})
        accumulator.add(block)
        accumulator.features()

    assert largest.entries <= most
    assert most <= shape[0] * shape[1] / 4  # of one sample's gradient


# ---- all blocks at once, as on accelerators


@pytest.mark.parametrize("budget", [1, 100_000, 1 << 28])
@pytest.mark.parametrize("proj_dim", [7, 64, 500])
@pytest.mark.parametrize("shape", [(60, 70), (90, 75), (50, 8), (64, 128)])
def test_all_blocks_at_once_have_the_features_of_the_gradient(shape, proj_dim, budget, monkeypatch):
    monkeypatch.setattr(all_blocks, "scratch_bytes", lambda device: budget)
    sketch = MatrixSketch(shape, proj_dim, Keys(3, 1, "w"), device=torch.device("cpu"))
    products, rows = factors(shape, 5), lookups(shape, 7)
    made = [sketch._at_once.convolved(products), sketch._at_once.formed(products)]
    made.append(sketch._at_once.looked_up(rows))

    whole = formed(products, shape).grad.flatten(1), table_of(rows, shape).flatten(1)
    for features, gradient in zip(made, (whole[0], *whole), strict=True):
        assert_close(features, sketch.dense(gradient.double(), Scratch()), 1e-12)


def test_no_samples_and_no_positions_have_no_features_and_zeros():
    sketch = MatrixSketch((60, 70), 64, Keys(3, 1, "w"), device=torch.device("cpu"))
    for samples, positions in ((0, 3), (2, 0)):
        block = FactoredBlock("w", torch.ones(samples, positions, 70), torch.ones(samples, positions, 60))
        for made in (sketch._at_once.convolved(block), sketch._at_once.formed(block)):
            assert torch.equal(made, torch.zeros(samples, 64))


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("proj_dim", [64, 512, 2048])
def test_more_positions_never_make_transforms_faster_than_forming_with_the_kernel(proj_dim, triton):
    answers = [
        fourier_takes_less_time((3072, 768), positions, proj_dim=proj_dim, samples=32, triton=triton)
        for positions in range(1, 600, 3)
    ]

    assert answers[0]
    assert answers == sorted(answers, reverse=True)


@pytest.mark.parametrize("shape", [(2304, 768), (768, 768), (3072, 768), (768, 3072)])
@pytest.mark.parametrize(("proj_dim", "samples"), [(256, 32), (256, 2), (2048, 2)])
def test_the_matrices_of_gpt_are_formed_in_a_few_launches(shape, proj_dim, samples):
    assert not fourier_takes_less_time(shape, 64, proj_dim=proj_dim, samples=samples)


def test_launches_count_less_for_more_samples():
    answers = [fourier_takes_less_time((768, 3072), 64, proj_dim=2048, samples=b) for b in range(1, 65)]
    assert answers == sorted(answers)
    assert answers[-1]


# ---- what is cheaper


@pytest.mark.parametrize("proj_dim", [64, 512, 2048, 8192])
@pytest.mark.parametrize(
    "shape", [(10, 128), (128, 1024), (768, 192), (1024, 1024), (4096, 768), (50_000, 768)]
)
def test_more_positions_never_make_transforms_cheaper_than_forming_again(shape, proj_dim):
    answers = [fourier_is_cheaper(shape, positions, proj_dim=proj_dim) for positions in range(1, 600, 3)]

    assert answers == sorted(answers, reverse=True)


def test_a_larger_matrix_never_makes_forming_cheaper():
    sides = [2**i for i in range(4, 12)]
    for positions in (1, 8, 64):
        answers = [fourier_is_cheaper((side, side), positions, proj_dim=4096) for side in sides]
        assert answers == sorted(answers)
        assert not answers[0]


@pytest.mark.parametrize(
    ("method", "transforms"), [("form", False), ("fourier", True), ("auto", True), ("auto", False)]
)
def test_the_choice_follows_the_cost_unless_it_is_made(method, transforms, monkeypatch):
    calls, rfft = [], torch.fft.rfft
    monkeypatch.setattr(torch.fft, "rfft", lambda *args, **kwargs: calls.append(1) or rfft(*args, **kwargs))
    monkeypatch.setattr("trak_lite.projectors.sketch.matrix.fourier_is_cheaper", lambda *_, **__: transforms)
    project(factors(SHAPES["square"], 2), SHAPES["square"], 64, factors=method)

    assert bool(calls) == transforms


# ---- rows of a table

TABLES = {"one block": (60, 70), "blocks": (300, 150), "narrow": (50, 8)}


def lookups(shape: tuple[int, int], positions: int, num_samples: int = 5, dtype=torch.float64) -> LookupBlock:
    generator = torch.Generator().manual_seed(positions)
    rows = torch.randint(shape[0], (num_samples, positions), generator=generator)
    rows[:, 1:3] = rows[:, :1]  # a row that is read three times
    return LookupBlock("w", rows, random(num_samples, positions, shape[1], dtype=dtype), shape[0])


def table_of(block: LookupBlock, shape: tuple[int, int]) -> torch.Tensor:
    table = torch.zeros(block.num_samples, *shape, dtype=torch.float64)
    for sample, rows in enumerate(block.rows.tolist()):
        for position, row in enumerate(rows):
            table[sample, row] += block.values[sample, position].double()
    return table


@pytest.mark.parametrize("positions", [0, 7, 400])
@pytest.mark.parametrize("proj_dim", [64, 500])
@pytest.mark.parametrize("shape", TABLES.values(), ids=TABLES)
def test_rows_of_a_table_have_the_features_of_the_table(shape, proj_dim, positions):
    block = lookups(shape, positions)
    features = project(block, shape, proj_dim, copies=2)

    assert features.dtype == torch.float64
    assert_close(features, project(DenseBlock("w", table_of(block, shape)), shape, proj_dim, copies=2), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [7, 400])
@pytest.mark.parametrize("shape", TABLES.values(), ids=TABLES)
def test_rows_of_a_table_are_added_up_in_float32(shape, positions, dtype):
    block = lookups(shape, positions, dtype=dtype)
    features = project(block, shape, 64)

    assert features.dtype == torch.float32
    assert_close(features.double(), project(DenseBlock("w", table_of(block, shape)), shape, 64), 1e-5)


@pytest.mark.parametrize("positions", [7, 400])
@pytest.mark.parametrize("shape", TABLES.values(), ids=TABLES)
def test_rows_of_a_table_have_the_same_bits_in_any_batch(shape, positions, threads, monkeypatch):
    block = lookups(shape, positions, num_samples=24, dtype=torch.float32)
    whole = project(block, shape, 64)
    monkeypatch.setattr(scratch_module, "_CPU_SCRATCH_BYTES", 20_000)
    threads(3)
    accumulator = CountSketchProjector(64).accumulator(24, model_id=3, parameters={"w": shape})
    for rows in (slice(17, 24), slice(0, 17)):
        accumulator.add(LookupBlock("w", block.rows[rows], block.values[rows], shape[0], rows.start))

    assert torch.equal(accumulator.features(), whole)


def test_a_large_table_is_never_formed(threads):
    threads(1)
    shape = (5000, 128)
    with LargestTensor() as largest:
        project(lookups(shape, 6), shape, 256)

    assert largest.entries < shape[0] * shape[1] / 10


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", TABLES.values(), ids=TABLES)
def test_a_table_that_is_also_a_matrix_has_the_sum_of_both(shape, method):
    rows, products = lookups(shape, 7, num_samples=3), factors(shape, 4)
    features = project(SummedBlock("w", (rows, products)), shape, 64, factors=method)

    whole = DenseBlock("w", table_of(rows, shape) + formed(products, shape).grad)
    assert_close(features, project(whole, shape, 64), 1e-10)


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_factors_and_tables_have_their_features_on_cuda(method):
    shape = SHAPES["square"]
    for block in (factors(shape, 3), lookups(shape, 7)):
        device = project(block, shape, 64, factors=method, device="cuda")
        assert device.is_cuda
        assert_close(device.cpu(), project(block, shape, 64), 1e-10)
