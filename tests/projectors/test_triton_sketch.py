"""The Triton kernels of the sketches: in the interpreter, compiled without a GPU, and on one."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from projection_cases import random32 as random
from triton_interpreter import fresh_kernels, interpreted

from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors._kernels import usable_kernels
from trak_lite.projectors._scratch import Scratch
from trak_lite.projectors.random.hash import hash_signs
from trak_lite.projectors.sketch import base as _sketch
from trak_lite.projectors.sketch import vector as _vector_sketch
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.matrix import MatrixSketch
from trak_lite.projectors.sketch.vector import VectorSketch
from trak_lite.testing.projectors import ProjectorTests
from trak_lite.types import DenseBlock, FactoredBlock

CPU = torch.device("cpu")
KEYS = Keys(3, 1, "weight")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def interpreter():
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with fresh_kernels(interpret=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sketch, "_KERNEL_DEVICES", frozenset({"cpu"}))
        yield


@pytest.fixture
def kernels(interpreter):
    from trak_lite.projectors.sketch import triton as _triton_sketch

    return _triton_sketch


@pytest.fixture
def wide_programs(kernels, monkeypatch):
    """Few programs with many columns each: the interpreter takes its time for every program."""
    monkeypatch.setattr(kernels, "_TILE_COLUMNS", 8192)
    monkeypatch.setattr(kernels, "_TILE_ROWS", 2)
    monkeypatch.setattr(kernels, "_MATRIX_COLUMNS", 256)


@pytest.fixture
def forget_choices():
    """Each device's choice of the kernels is made anew, and again after the test."""
    usable_kernels.cache_clear()
    yield
    usable_kernels.cache_clear()


def vector_sketch(num_entries: int, proj_dim: int, device: torch.device = CPU) -> VectorSketch:
    return VectorSketch(num_entries, proj_dim, KEYS, device=device)


def matrix_sketch(shape: tuple[int, int], proj_dim: int, device: torch.device = CPU) -> MatrixSketch:
    return MatrixSketch(shape, proj_dim, KEYS, device=device, method="form")


def by_torch(sketch, rows):
    """Features of dense rows, or of (inputs, output_grads), by the torch operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sketch, "_KERNEL_DEVICES", frozenset())
        return features(sketch, rows)


def features(sketch, rows):
    if isinstance(rows, tuple):
        return sketch.factored(FactoredBlock("weight", *rows), Scratch())
    return sketch.dense(rows, Scratch())


def assert_same_bits(sketch, rows) -> None:
    expected = by_torch(sketch, rows)
    actual = features(sketch, rows)

    assert sketch._kernel is not None, "the kernel did not run"
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


# ---- vectors, in the interpreter


@interpreted
@pytest.mark.parametrize(
    ("num_entries", "proj_dim", "num_rows"),
    [(1, 1, 1), (60, 1, 2), (5, 7, 33), (700, 512, 3), (2100, 1000, 35), (800, 5000, 2)],
)
def test_vectors_of_one_tile_have_the_bits_of_torch(kernels, num_entries, proj_dim, num_rows):
    assert_same_bits(vector_sketch(num_entries, proj_dim), random(num_rows, num_entries))


@interpreted
@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize(("num_entries", "proj_dim"), [(70_000, 512), (100_000, 1000), (100_001, 33_000)])
def test_vectors_of_several_tiles_have_the_bits_of_torch(num_entries, proj_dim):
    sketch = vector_sketch(num_entries, proj_dim)

    assert len(sketch._offsets) > 1
    assert_same_bits(sketch, random(2, num_entries))


@interpreted
@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize("segments", [1, 2, 100])
def test_segments_of_tiles_are_added_after_each_other(kernels, monkeypatch, segments):
    """Short segments, a few in a launch; the last has fewer tiles, the last tile fewer entries."""
    monkeypatch.setattr(_vector_sketch, "_SEGMENT", 3)
    monkeypatch.setattr(kernels, "scratch_bytes", lambda device: segments * 2 * 32_000 * 4)
    sketch = vector_sketch(10 * 32_000 + 100, 1000)

    assert len(sketch._offsets) == 11
    assert_same_bits(sketch, random(2, sketch._num_entries))


@interpreted
def test_the_order_of_additions_is_what_makes_the_bits_equal(kernels, monkeypatch):
    """With segments of other lengths the sum is the same up to rounding alone."""
    options = {"width": 8, "offsets": [3, 0, 7, 5] * 18, "sign_key": 5, "fold_offsets": [0], "fold_key": 0}
    rows = random(4, 576)
    sums = [kernels.VectorKernel(segment=segment, device=CPU, **options)(rows) for segment in (32, 72)]

    assert not torch.equal(*sums)
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("first", [2**37 - 64, 2**37, 2**38 + 64])
def test_words_of_signs_beyond_two_to_the_32_take_the_high_word_into_the_key(kernels, first):
    """Entry 2**37 has the sign word 2**32; all entries are one number in memory, which the strides allow."""
    width, key = 64, 12345
    rows = torch.ones(1, 1).expand(1, first + 2 * width)
    sums = torch.empty(2, 1, width)
    offsets = torch.zeros(2, dtype=torch.int32)
    kernels.ring_sums(sums, rows, offsets, key, first=first // width, segment=1)

    assert torch.equal(sums.flatten(), hash_signs(key, first, 2 * width, device=CPU))


@interpreted
def test_entries_beyond_two_to_the_31_are_read_where_they_lie(kernels):
    width, key = 64, 5
    first = 2**31 - width
    memory = np.zeros(2 * (first + 2 * width), dtype=np.float16)  # pages that nobody writes take no memory
    rows = torch.from_numpy(memory).view(2, -1)
    rows[:, first:] = torch.arange(4 * width).view(2, -1)
    sums = torch.empty(1, 2, width)
    kernels.ring_sums(
        sums, rows, torch.tensor([0, 3], dtype=torch.int32), key, first=first // width, segment=2
    )

    tiles = (rows[:, first:].float() * hash_signs(key, first, 2 * width, device=CPU)).view(2, 2, width)
    assert torch.equal(sums[0], tiles[:, 0] + tiles[:, 1].roll(3, 1))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_every_dtype_have_the_bits_of_torch(dtype):
    assert_same_bits(vector_sketch(90, 20), random(3, 90, dtype=dtype))


STRIDED = {
    "transposed": lambda n: random(n, 5).T,
    "every second entry": lambda n: random(5, 2 * n)[:, ::2],
    "cut out": lambda n: random(9, n + 30)[::2, 7 : n + 7],
    "expanded": lambda n: random(1, n).expand(5, n),
}


@interpreted
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_vectors_with_any_strides_are_read_where_they_lie(make):
    assert_same_bits(vector_sketch(90, 20), make(90))


@interpreted
@pytest.mark.parametrize("sketch", [vector_sketch(0, 4), vector_sketch(6, 4), matrix_sketch((3, 70), 4)])
def test_no_rows_and_no_entries_give_no_features_and_zeros(sketch):
    num_entries = getattr(sketch, "_num_entries", 210)
    assert_same_bits(sketch, torch.zeros(0, num_entries))
    assert_same_bits(sketch, torch.zeros(3, num_entries))


# ---- matrices, in the interpreter

SHAPES = [
    ((2, 64), 512),
    ((40, 70), 1000),
    ((92, 66), 70),
    ((88, 20), 70),
    ((24, 52), 20),
    ((70, 65), 65),
    ((3, 5), 1),
    ((1, 1), 1),
]


@interpreted
@pytest.mark.parametrize(("shape", "proj_dim"), SHAPES)
def test_matrices_have_the_bits_of_torch(shape, proj_dim):
    assert_same_bits(matrix_sketch(shape, proj_dim), random(9, shape[0] * shape[1]))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_every_dtype_have_the_bits_of_torch(dtype):
    assert_same_bits(matrix_sketch((20, 70), 100), random(3, 1400, dtype=dtype))


@interpreted
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_matrices_with_any_strides_are_read_where_they_lie(make):
    assert_same_bits(matrix_sketch((6, 70), 100), make(420))


@interpreted
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_spoils_no_other(value):
    for sketch in (vector_sketch(280, 20), matrix_sketch((4, 70), 20)):
        rows = random(3, 280)
        rows[1, 7] = value
        assert features(sketch, rows).isfinite().all(1).tolist() == [True, False, True]


@interpreted
def test_every_block_of_columns_lists_its_rows_once_and_in_natural_order(kernels):
    sketch = matrix_sketch((300, 100), 256)
    block = sketch._blocks[1]  # rows 256 .. 299
    part = kernels.MatrixPart(block.rows, block.columns, block.shifts, block.row_signs, block.column_signs)
    listed, bounds, groups = kernels._row_lists(part, 256)

    assert groups == 1
    for place, first in enumerate([0, 64, 128, 192, 256, 320, 384, 448]):
        rows = [row for row, shift in enumerate(block.starts) if shift < first + 64 and shift + 100 > first]
        here = listed[bounds[place] : bounds[place + 1]].tolist()
        assert [code >> 32 for code in here] == [256 + row for row in rows]
        assert [code >> 1 & 0x7FFFFFFF for code in here] == [block.starts[row] for row in rows]
        assert [1.0 - 2.0 * (code & 1) for code in here] == [block.signs[row] for row in rows]
    assert len(bounds) == 9


# ---- factors, in the interpreter


@interpreted
@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize(("positions", "budget"), [(1, 1), (3, 2 * 128 * 20 * 4)])
def test_a_gradient_formed_in_small_pieces_has_the_bits_of_the_whole(kernels, monkeypatch, positions, budget):
    """Pieces of one sample and some rows, of some samples and some rows; the products are exact."""
    monkeypatch.setattr(kernels, "scratch_bytes", lambda device: budget)
    inputs, output_grads = (random(3, positions, size, seed=size).mul(50).round() for size in (20, 300))
    output_grads *= 2.0 ** torch.arange(300).remainder(
        23
    )  # a row of the gradient is exact, a sum of rows is not
    sketch = matrix_sketch((300, 20), 290)
    whole = (output_grads.transpose(1, 2).double() @ inputs.double()).flatten(1)

    assert torch.equal(whole.float().double(), whole)
    assert torch.equal(features(sketch, (inputs, output_grads)), by_torch(sketch, whole.float()))


@interpreted
@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize(("bands", "most_parts"), [(1, 2), (2, 4), (7, 65535), (100, 2), (100, 65535)])
def test_whole_rows_of_blocks_are_added_apart(kernels, monkeypatch, bands, most_parts):
    """Pieces of one sample and one row of blocks, of several samples, of all; each block has sums of its own."""
    monkeypatch.setattr(kernels, "scratch_bytes", lambda device: bands * 64 * 70 * 8)
    monkeypatch.setattr(kernels, "_MOST_PARTS", most_parts)
    inputs, output_grads = (random(3, 2, size, seed=size).double() for size in (70, 150))
    sketch = matrix_sketch((150, 70), 64)
    whole = (output_grads.transpose(1, 2) @ inputs).flatten(1)
    made = features(sketch, (inputs, output_grads))

    assert sketch._kernel is not None, "the kernel did not run"
    torch.testing.assert_close(made, by_torch(sketch, whole), rtol=0, atol=1e-11)


@interpreted
@pytest.mark.parametrize(
    ("inputs_dtype", "output_grads_dtype"),
    [(torch.float16, torch.float16), (torch.float32, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_factors_of_every_dtype_are_formed_as_torch_does(inputs_dtype, output_grads_dtype):
    factors = (random(3, 2, 70, dtype=inputs_dtype), random(3, 2, 20, seed=1, dtype=output_grads_dtype))

    assert_same_bits(matrix_sketch((20, 70), 100), factors)


@interpreted
def test_vectors_in_factors_reach_the_kernel():
    assert_same_bits(vector_sketch(60, 16), (random(3, 2, 6), random(3, 2, 10, seed=1)))


# ---- the choice of the kernels


@interpreted
class TestCountSketchProjectorOnTheKernels(ProjectorTests):
    def make_projector(self, proj_dim, *, seed):
        return CountSketchProjector(proj_dim, seed=seed)


@interpreted
@pytest.mark.parametrize("copies", [1, 2])
def test_a_projector_gives_the_same_bits_with_and_without_the_kernels(monkeypatch, copies):
    grads = {"a": random(4, 5, 70), "b": random(4, seed=1), "c": random(4, 3, 2, 2)}
    with_kernels = CountSketchProjector(40, copies=copies).project(grads, 1)
    monkeypatch.setattr(_sketch, "_KERNEL_DEVICES", frozenset())

    assert torch.equal(with_kernels, CountSketchProjector(40, copies=copies).project(grads, 1))


@interpreted
def test_dtypes_that_the_kernels_do_not_read_stay_with_torch():
    sketch = vector_sketch(30, 8)
    sketch.dense(random(2, 30).to(torch.float8_e5m2), Scratch())

    assert sketch._kernel is None


@interpreted
def test_the_kernels_pass_their_own_check_here(kernels):
    assert kernels.why_unusable(CPU) is None


@interpreted
@pytest.mark.parametrize("launcher", ["ring_sums", "MatrixKernel"])
def test_kernels_that_give_other_features_are_not_used(kernels, monkeypatch, launcher):
    class Zeros:
        def __init__(self, *args):
            pass

        def dense(self, rows):
            return torch.zeros(15, 70)

    monkeypatch.setattr(
        kernels, launcher, Zeros if launcher == "MatrixKernel" else lambda sums, *_, **__: sums.zero_()
    )

    assert kernels.why_unusable(CPU) == "they give other features on this device than the torch operations"


@interpreted
def test_kernels_that_cannot_run_are_replaced_by_torch_with_one_logged_line(
    kernels, monkeypatch, caplog, forget_choices
):
    def launch(*args, **options):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(kernels, "ring_sums", launch)
    sketches = [vector_sketch(30, 8), matrix_sketch((3, 70), 8)]
    with caplog.at_level(logging.WARNING, "trak_lite"):
        made = [features(sketch, random(2, n)) for sketch, n in zip(sketches, (30, 210), strict=True)]

    assert len(caplog.records) == 1
    assert "they do not run on this device (RuntimeError: Failed to find C compiler.)" in caplog.text
    assert torch.equal(made[0], by_torch(sketches[0], random(2, 30)))
    assert torch.equal(made[1], by_torch(sketches[1], random(2, 210)))


def test_without_triton_torch_makes_the_features_with_one_logged_line(monkeypatch, caplog, forget_choices):
    monkeypatch.setattr(_sketch, "_KERNEL_DEVICES", frozenset({"cpu"}))
    sketch, rows = vector_sketch(30, 8), random(2, 30)
    with fresh_kernels(interpret=True), caplog.at_level(logging.WARNING, "trak_lite"):
        monkeypatch.setitem(sys.modules, "triton", None)
        made = [features(sketch, rows) for _ in range(2)]

    assert len(caplog.records) == 1
    assert "triton cannot be imported" in caplog.text
    assert torch.equal(made[0], by_torch(sketch, rows))
    assert torch.equal(made[1], made[0])


# ---- compiled, without a GPU


@pytest.fixture(scope="module")
def compile_only():
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with fresh_kernels(interpret=False):
        from trak_lite.projectors.sketch import triton as _triton_sketch

        yield _triton_sketch


@pytest.fixture
def compiled(compile_only, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = compile_only
    blocks = {
        "_ring_sums": {"block_rows": kernels._TILE_ROWS, "block_columns": kernels._TILE_COLUMNS},
        "_matrix_sums": {
            "block_rows": kernels._MATRIX_ROWS,
            "block_columns": kernels._MATRIX_COLUMNS,
            "unroll": kernels._MATRIX_UNROLL,
            "apart": False,
        },
    }
    blocks["_tile_sums"] = blocks["_ring_sums"]
    options = {
        "_ring_sums": {"num_warps": kernels._TILE_WARPS},
        "_tile_sums": {"num_warps": kernels._TILE_WARPS},
        "_matrix_sums": {"num_warps": kernels._MATRIX_WARPS, **kernels._REGISTERS},
    }
    return lambda name, dtype, capability, **others: compile_kernel(
        getattr(kernels, name),
        dtype,
        capability,
        {"entry_stride": 1, **blocks[name], **others},
        options[name],
    )


def compile_kernel(kernel, dtype: str, capability: int, constants: dict, options: dict):
    """Compile for gradients whose entries are neighbours in memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    gradient, total = f"*{dtype}", "*fp64" if dtype == "fp64" else "*fp32"
    types = {
        **dict.fromkeys(["rows_ptr", "grads_ptr"], gradient),
        **dict.fromkeys(["lists_ptr", "bounds_ptr", "facts_ptr"], "*i64"),
        **dict.fromkeys(["row_stride", "sample_stride", "origin", "crossing", "first_tile"], "i64"),
        "sums_ptr": total,
        **dict.fromkeys(["offsets_ptr", "fold_offsets_ptr"], "*i32"),
        "signs_ptr": "*fp32",
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr")
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def machine_code(compiled, folder) -> str:
    import triton

    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", folder / "kernel.cubin"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("name", ["_ring_sums", "_tile_sums", "_matrix_sums"])
def test_neighbours_in_memory_are_read_by_neighbouring_lanes(compiled, name, dtype):
    """The layout of the reads has columns, not rows, on the lanes of a warp."""
    layout = compiled(name, dtype, 90).asm["ttgir"]

    load = next(
        line for line in layout.splitlines() if "tt.load" in line and f"x!tt.ptr<{kind(dtype)}>" in line
    )
    blocked = re.search(r"#blocked\d*", load)[0]
    definition = next(line for line in layout.splitlines() if line.startswith(f"{blocked} = "))
    assert "threadsPerWarp = [1, 32]" in definition
    assert "order = [1, 0]" in definition


def kind(dtype: str) -> str:
    return {"fp16": "f16", "fp32": "f32", "fp64": "f64"}[dtype]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("name", "reads"),
    [("_ring_sums", 32), ("_tile_sums", 32), ("_matrix_sums", 64), ("_matrix_sums apart", 64)],
)
def test_reads_are_under_way_together_and_no_register_is_spilled(compiled, tmp_path, name, reads, capability):
    name, _, apart = name.partition(" ")
    others = {"apart": True} if apart else {}
    code = machine_code(compiled(name, "fp32", capability, **others), tmp_path)

    instructions = re.findall(r"\b(LDG|FFMA|STL|LDL)\b", code)
    assert "STL" not in instructions
    assert "LDL" not in instructions
    first_sum = instructions.index("FFMA")
    assert instructions[:first_sum].count("LDG") >= reads
    assert "LDG" not in instructions[first_sum:]


@pytest.mark.parametrize("name", ["_ring_sums", "_tile_sums", "_matrix_sums"])
def test_small_numbers_are_not_flushed_to_zero(compiled, name):
    assert ".ftz" not in compiled(name, "fp32", 90).asm["ptx"]


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_entries", "proj_dim"), [(1, 1), (700, 512), (100_000, 1000), (5_000_000, 2048), (300_000, 40_000)]
)
def test_vectors_on_a_gpu_have_the_bits_of_the_cpu(num_entries, proj_dim, dtype):
    rows = random(3, num_entries, dtype=dtype)
    sketch = vector_sketch(num_entries, proj_dim, torch.device("cuda"))
    made = features(sketch, rows.cuda())

    assert sketch._kernel is not None, "the kernel did not run"
    assert torch.equal(made.cpu(), features(vector_sketch(num_entries, proj_dim), rows))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "proj_dim"), [*SHAPES, ((1000, 1200), 512), ((700, 3000), 2048)])
def test_matrices_on_a_gpu_have_the_bits_of_the_cpu(shape, proj_dim, dtype):
    rows = random(9, shape[0] * shape[1], dtype=dtype)
    sketch = matrix_sketch(shape, proj_dim, torch.device("cuda"))
    made = features(sketch, rows.cuda())

    assert sketch._kernel is not None, "the kernel did not run"
    assert torch.equal(made.cpu(), features(matrix_sketch(shape, proj_dim), rows))


@pytest.mark.cuda
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_rows_with_any_strides_on_a_gpu_have_the_bits_of_the_cpu(make):
    rows = make(4200)
    for here, there in (
        (vector_sketch(4200, 100), vector_sketch(4200, 100, torch.device("cuda"))),
        (matrix_sketch((60, 70), 100), matrix_sketch((60, 70), 100, torch.device("cuda"))),
    ):
        cuda_rows = (
            torch.empty_strided(rows.shape, rows.stride(), device="cuda").copy_(rows)
            if make is not (STRIDED["expanded"])
            else rows[:1].cuda().expand(rows.shape)
        )
        assert torch.equal(features(there, cuda_rows).cpu(), features(here, rows))


@pytest.mark.cuda
def test_a_row_on_a_gpu_has_the_same_bits_in_every_batch():
    grads = {"weight": random(70, 300, 200), "bias": random(70, 50_000, seed=1)}
    cuda = {name: grad.cuda() for name, grad in grads.items()}
    whole = CountSketchProjector(512).project(cuda, 0)

    for size in (1, 7, 64):
        some = CountSketchProjector(512).project({name: grad[:size] for name, grad in cuda.items()}, 0)
        assert torch.equal(some, whole[:size])
    assert torch.equal(whole.cpu(), CountSketchProjector(512).project(grads, 0))


@pytest.mark.cuda
@pytest.mark.parametrize("budget", [1 << 20, 1 << 28])
def test_factors_on_a_gpu_agree_with_the_cpu_up_to_the_rounding_of_products(monkeypatch, budget):
    from trak_lite.projectors.sketch import triton as _triton_sketch

    monkeypatch.setattr(_triton_sketch, "scratch_bytes", lambda device: budget)
    factors = (random(9, 5, 600), random(9, 5, 700, seed=1))
    sketch = matrix_sketch((700, 600), 512, torch.device("cuda"))
    made = features(sketch, tuple(factor.cuda() for factor in factors))

    assert sketch._kernel is not None, "the kernel did not run"
    torch.testing.assert_close(
        made.cpu(), features(matrix_sketch((700, 600), 512), factors), rtol=1e-4, atol=1e-3
    )


@pytest.mark.cuda
def test_entries_beyond_two_to_the_31_on_a_gpu_are_read_where_they_lie():
    rows = torch.zeros(1, 2**31 + 1000, dtype=torch.float16, device="cuda")
    rows[0, 2**31 + 5] = 2
    sketch = vector_sketch(rows.shape[1], 65_536, torch.device("cuda"))
    made = features(sketch, rows)

    place = (2**31 + 5) % 65_536 + sketch._offsets[-1]
    expected = torch.zeros(1, 65_536)
    expected[0, place % 65_536] = 2 * hash_signs(sketch._sign_key, 2**31 + 5, 1, device=CPU)[0]
    assert torch.equal(made.cpu(), expected)


@pytest.mark.cuda
def test_the_kernels_run_on_the_gpu_that_the_gradients_are_on():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    block = DenseBlock("weight", random(4, 20, 70))
    with torch.cuda.device(0):
        made = CountSketchProjector(64).project({block.name: block.grad.to("cuda:1")}, 0)

    assert torch.equal(made.cpu(), CountSketchProjector(64).project({block.name: block.grad}, 0))


@interpreted
def test_a_compiler_that_fails_in_its_own_way_is_a_reason(kernels, monkeypatch):
    def fail(device):
        raise KeyError("Keyword argument maxnreg was specified but unrecognised")

    monkeypatch.setattr(kernels, "_vector_entries_are_right", fail)

    assert "KeyError" in kernels.why_unusable(CPU)


AMD = """
import torch
torch.version.hip = "6.4"  # as torch for AMD has it
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from trak_lite.projectors.dense import triton as _triton_dense
from trak_lite.projectors.sketch import triton as _triton_sketch

class Driver:
    def get_current_target(self): return GPUTarget("hip", "gfx942", 64)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def map_python_to_cpp_type(self, name): return "int"
    def get_device_interface(self): return torch.cuda
    def launcher_cls(self, *args, **named): raise RuntimeError("compiled, and no GPU to launch on")

driver.set_active(Driver())
cpu = torch.device("cpu")
for check in (_triton_sketch._vector_entries_are_right, _triton_sketch._matrix_entries_are_right):
    try:
        check(cpu)
    except RuntimeError as error:
        print(check.__name__, error)
print(_triton_dense.why_unusable(cpu))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_compile_for_amd(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", AMD], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout.count("compiled, and no GPU to launch on") == 3, done.stdout
