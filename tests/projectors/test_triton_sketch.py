"""The Triton kernels of the sketches in the interpreter and on a GPU, and all kernels as they are compiled for GPUs.

Compiled are the product's own launches, with a driver that does not launch; gradients are tensors without memory.
"""

import importlib.util
import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton_cases
from projection_cases import accumulated, assert_close, factors
from projection_cases import random32 as random

from trak_lite.projectors import CountSketchProjector, RademacherProjector
from trak_lite.testing import ProjectorTests
from trak_lite.types import FactoredBlock

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


interpreter, launches = triton_cases.interpreter, triton_cases.launches
forget_choices, no_warning = triton_cases.forget_choices, triton_cases.no_warning


def sketched(grads, proj_dim, shape=None, **settings):
    """Features of dense gradients ``(b, n)`` of a parameter, or of (inputs, output_grads)."""
    projector = CountSketchProjector(proj_dim, seed=3, factors="form", **settings)
    if not isinstance(grads, tuple):
        return projector.project({"w": grads.unflatten(1, shape) if shape else grads}, 1)
    block = FactoredBlock("w", *grads)
    options = {"num_samples": block.num_samples, "parameters": {"w": shape}, "model_id": 1}
    return accumulated(projector, [block], **options)


def by_torch(*arguments, **settings):
    with pytest.MonkeyPatch.context() as patch:
        triton_cases.use_on(patch)
        return sketched(*arguments, **settings)


def assert_same_bits(launches, *arguments, **settings):
    sketched(random(1, 8), 4)  # the kernels are checked when they are first used
    launches.clear()
    actual = sketched(*arguments, **settings)
    assert launches, "the kernel did not run"
    expected = by_torch(*arguments, **settings)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


# ---- in the interpreter
WIDE = {"vectors": {"_TILE_COLUMNS": 8192, "_TILE_ROWS": 2}, "matrices": {"_MATRIX_COLUMNS": 256}}
"""Few programs with many columns each: the interpreter takes its time for every program."""
SHAPES = [
    ((2, 64), 512),
    ((40, 70), 1000),
    ((92, 66), 70),
    ((88, 64), 70),
    ((24, 68), 20),
    ((70, 65), 65),
    ((2, 64), 7),
]
STRIDED = {
    "transposed": lambda n: random(n, 5).T,
    "every second entry": lambda n: random(5, 2 * n)[:, ::2],
    "cut out": lambda n: random(9, n + 30)[::2, 7 : n + 7],
    "expanded": lambda n: random(1, n).expand(5, n),
}
ROWS = {
    **{name: random(3, 420, dtype=dtype) for dtype, name in DTYPES.items()},
    **{name: make(420) for name, make in STRIDED.items()},
    "zeros": torch.zeros(3, 420),
}


def factors_of(shape, x, g):
    return random(3, 2, shape[1], dtype=x), random(3, 2, shape[0], seed=1, dtype=g)


BITS = {
    **{f"a tile, {n} of K = {k}": (random(b, n), k, None)
       for n, k, b in ((1, 1, 1), (60, 1, 2), (5, 7, 33), (700, 512, 3), (2100, 1000, 35), (800, 5000, 2))},
    **{f"tiles, {n}": (random(2, n), k, None) for n, k in ((70_000, 512), (100_000, 1000), (100_001, 33_000))},
    **{f"matrix {shape}, {k}": (random(9, shape[0] * shape[1]), k, shape) for shape, k in SHAPES},
    **{f"{name} {shape}": (rows, 100, shape) for name, rows in ROWS.items() for shape in ((420,), (6, 70))},
    **{f"factors of {x}, {g}": (factors_of(shape, x, g), 100, shape) for x, g, shape in (
        (torch.float16, torch.float16, (20, 70)),
        (torch.float32, torch.float64, (20, 70)),
        (torch.bfloat16, torch.float32, (20, 70)),
        (torch.float32, torch.float32, (10, 6)),  # a vector
    )},
}  # fmt: skip


def widen(modules, monkeypatch):
    """Let programs compute the tiles of :data:`WIDE`."""
    for module, settings in WIDE.items():
        for name, value in settings.items():
            monkeypatch.setattr(getattr(modules, module), name, value)


@triton_cases.interpreted
@pytest.mark.parametrize("name", BITS)
def test_features_have_the_bits_of_torch(name, interpreter, launches, monkeypatch):
    grads, proj_dim, shape = BITS[name]
    if name.startswith("tiles"):
        widen(interpreter, monkeypatch)
    assert_same_bits(launches, grads, proj_dim, shape)
    if not isinstance(grads, tuple):
        assert sketched(grads[:0], proj_dim, shape).shape == (0, proj_dim)


@triton_cases.interpreted
@pytest.mark.parametrize("segments", [1, 2, 100])
def test_segments_of_tiles_are_added_after_each_other(launches, interpreter, monkeypatch, segments):
    """Short segments, a few in a launch; the last has fewer tiles, the last tile fewer entries."""
    widen(interpreter, monkeypatch)
    monkeypatch.setattr("trak_lite.projectors.sketch.vector._SEGMENT", 3)
    monkeypatch.setattr(interpreter.vectors, "scratch_bytes", lambda device: segments * 2 * 32_000 * 4)
    assert_same_bits(launches, random(2, 10 * 32_000 + 100), 1000)


@triton_cases.interpreted
@pytest.mark.parametrize("first", [2**37 - 64, 2**37, 2**38 + 64])
def test_words_of_signs_beyond_two_to_the_32_take_the_high_word_into_the_key(interpreter, first):
    """Entry 2**37 has the sign word 2**32; all entries are one number in memory, which the strides allow."""
    width, key = 64, 12345
    rows = torch.ones(1, 1).expand(1, first + 2 * width)
    sums = torch.empty(2, 1, width)
    offsets = torch.zeros(2, dtype=torch.int32)
    interpreter.vectors.ring_sums(sums, rows, offsets, key, first=first // width, segment=1)
    assert torch.equal(sums.flatten(), triton_cases.signs_from(key, first, 2 * width))


@triton_cases.interpreted
def test_entries_and_rows_beyond_two_to_the_31_are_read_where_they_lie(interpreter):
    """Rows are 2**31 entries apart, entries 2**26; memory that nobody writes takes no memory."""
    memory = torch.from_numpy(np.zeros(2**31 + 61 * 2**26, dtype=np.float16))
    rows = memory.as_strided((2, 60), (2**31 + 64, 2**26))
    rows.copy_(random(2, 60))
    for make in (lambda rows: sketched(rows, 16), lambda rows: RademacherProjector(40).project(rows, 0)):
        assert make(rows).any()
        assert torch.equal(make(rows), make(rows.clone()))
    wide = memory.as_strided((1, 192), (0, 2**24))
    assert torch.equal(sketched(wide, 40, (2, 96)), sketched(wide.clone(), 40, (2, 96)))


@triton_cases.interpreted
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_spoils_no_other(interpreter, value):
    rows = random(3, 280)
    rows[1, 7] = value
    found = [sketched(rows, 20, shape) for shape in (None, (4, 70))]
    for features in (*found, RademacherProjector(20).project(rows, 0)):
        assert features.isfinite().all(1).tolist() == [True, False, True]


@triton_cases.interpreted
@pytest.mark.parametrize(("bands", "most_parts"), [(1, 2), (2, 4), (7, 65535), (100, 2), (100, 65535)])
def test_whole_rows_of_blocks_are_added_apart(launches, interpreter, monkeypatch, bands, most_parts):
    """Pieces of one sample and one row of blocks, of several samples, of all; each block has sums of its own."""
    widen(interpreter, monkeypatch)
    monkeypatch.setattr(interpreter.matrices, "scratch_bytes", lambda device: bands * 64 * 70 * 8)
    monkeypatch.setattr(interpreter.matrices, "_MOST_BLOCKS", most_parts)
    inputs, output_grads = (random(3, 2, size, seed=size).double() for size in (70, 150))
    whole = (output_grads.mT @ inputs).flatten(1)
    made = sketched((inputs, output_grads), 64, (150, 70))
    assert launches[-1]["apart"], "the kernel did not run"
    assert_close(made, by_torch(whole, 64, (150, 70)), 1e-12)


# ---- the choice of the kernels
@triton_cases.interpreted
class TestProjectorsOnTheKernels(ProjectorTests):
    @pytest.fixture(autouse=True, params=[CountSketchProjector, RademacherProjector])
    def _small_programs(self, request, interpreter, monkeypatch):
        monkeypatch.setattr(interpreter.dense, "_STEPS", (1,))
        self.kind = request.param

    def make_projector(self, proj_dim, *, seed):
        options = {"dtype": torch.float32} if self.kind is RademacherProjector else {}
        return self.kind(proj_dim, seed=seed, **options)


@triton_cases.interpreted
def test_what_the_kernels_do_not_read_stays_with_torch_and_copies_do_not(launches):
    sketched(random(2, 30).to(torch.float8_e5m2), 8)
    assert launches == []
    assert_same_bits(launches, random(4, 350), 40, (5, 70), copies=2)


class Zeros:
    def __init__(self, *args):
        pass

    def dense(self, rows):
        return torch.zeros(15, 70)


def fails(error):
    def launch(*args, **options):
        raise error

    return launch


COMPILER = RuntimeError("Failed to find C compiler.")


def features_of_both():
    """Of a vector, a matrix, and a dense projection."""
    sketches = [sketched(random(2, 210), 8, shape) for shape in (None, (3, 70))]
    return [*sketches, RademacherProjector(40).project(random(2, 30), 0)]


def assert_made_by_torch(made, monkeypatch):
    triton_cases.use_on(monkeypatch)
    *sketches, product = features_of_both()
    assert all(torch.equal(found, expected) for found, expected in zip(made[:2], sketches, strict=True))
    assert_close(made[2], product, 1e-6)


@triton_cases.interpreted
@pytest.mark.usefixtures("forget_choices")
@pytest.mark.parametrize(
    ("kind", "launcher", "value", "reason"),
    [
        ("vectors", "ring_sums", fails(COMPILER), "they do not run on this device (RuntimeError: Failed to find C"),
        ("vectors", "ring_sums", fails(KeyError("maxnreg")), "they do not run on this device (KeyError: "),
        ("vectors", "ring_sums", lambda sums, *_, **__: sums.zero_(), "they give other features on this device than"),
        ("sketch", "MatrixKernel", Zeros, "they give other features on this device than the torch operations"),
        ("dense", "_launch", fails(COMPILER), "they do not run on this device (RuntimeError: Failed to find C"),
        ("dense", "_launch", lambda *_: None, "they give other features on this device than the torch operations"),
    ],
)  # fmt: skip
def test_kernels_that_fail_are_replaced_by_torch_with_one_logged_line(
    interpreter, monkeypatch, caplog, kind, launcher, value, reason
):
    assert interpreter.sketch.are_right(CPU)
    assert interpreter.dense.are_right(CPU)
    monkeypatch.setattr(getattr(interpreter, kind), launcher, value)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        made = [features_of_both() for _ in range(2)]
    assert len(caplog.records) == 1
    assert reason in caplog.text
    for features in made:
        assert_made_by_torch(features, monkeypatch)


@pytest.mark.usefixtures("forget_choices")
def test_without_triton_torch_makes_the_features_with_one_logged_line_for_each_use(monkeypatch, caplog):
    triton_cases.use_on(monkeypatch, "cpu")
    with triton_cases.fresh_kernels(interpret=True), caplog.at_level(logging.WARNING, "trak_lite"):
        monkeypatch.setitem(sys.modules, "triton", None)
        made = [features_of_both() for _ in range(2)]
    assert [record.args[0] for record in caplog.records] == ["Sketches", "Dense Rademacher projections"]
    assert caplog.text.count("triton cannot be imported") == 2
    for features in made:
        assert_made_by_torch(features, monkeypatch)


# ---- compiled, without a GPU
@pytest.fixture(scope="module")
def to_compile():
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with triton_cases.fresh_kernels(interpret=False):
        yield triton_cases.kernels_of()


@pytest.fixture(scope="module")
def only_compiled(to_compile, tmp_path_factory):
    import triton

    with pytest.MonkeyPatch.context() as patch:
        made = triton_cases.Compiler()
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        patch.setattr(triton.runtime.driver, "_active", made)
        yield made, folder


@pytest.fixture
def compiler(only_compiled, to_compile, monkeypatch):
    """The driver, which all kernels hold once they are compiled; the projectors take it on tensors without memory."""
    triton_cases.use_on(monkeypatch, "meta")
    for place, kernels in zip(triton_cases.PLACES, (to_compile.sketch, to_compile.dense), strict=True):
        name = f"trak_lite.projectors.{place}.usable_kernels"
        monkeypatch.setattr(name, lambda *_, kernels=kernels: kernels)
    only_compiled[0].capability = 90
    only_compiled[0].launches.clear()
    return only_compiled[0]


@pytest.fixture
def compiled(compiler, only_compiled, to_compile, monkeypatch):
    """Compiles what one call launches for gradients of a dtype; returns the files of a kernel, by their suffix."""

    def files(kernel, call, dtype, capability=90):
        for module in vars(to_compile).values():
            for value in vars(module).values():
                getattr(value, "device_caches", {}).clear()
        folder = only_compiled[1] / f"{len(list(only_compiled[1].iterdir()))}"
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        compiler.capability = capability
        call(dtype)
        # not those of what folds the sums of narrower gradients
        pointer = f"ptr<{DTYPES[dtype].replace('p', '')}>"
        (found,) = [path for path in folder.glob(f"*/{kernel}.ttir") if pointer in path.read_text()]
        return {file.suffix[1:]: file for file in found.parent.glob(f"{kernel}.*")}

    return files


def no_memory(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


def vector(dtype=torch.float32, num_rows=64, num_entries=200_000, proj_dim=2048):
    sketched(no_memory(num_rows, num_entries, dtype=dtype), proj_dim)


def tile(dtype=torch.float32):
    vector(dtype, num_entries=20_000)


def matrix(dtype=torch.float32):
    sketched(no_memory(64, 3 * 512, dtype=dtype), 2048, (3, 512))


def apart(dtype=torch.float32):
    sketched((no_memory(64, 2, 512, dtype=dtype), no_memory(64, 2, 300, dtype=dtype)), 2048, (300, 512))


def signs(dtype=torch.float32, num_rows=64, num_entries=200_000, proj_dim=8192, **settings):
    rows = no_memory(num_rows, num_entries, dtype=dtype)
    RademacherProjector(proj_dim, dtype=torch.float32, **settings).project(rows, 0)


LAUNCHED = {"_ring_sums": vector, "_tile_sums": tile, "_matrix_sums": matrix, "_signed_product": signs}
SPILLED = {("_ring_sums", 80, "*fp64"): 80}
"""Known spills in bytes. All others are errors."""


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("capability", triton_cases.SHARED)
def test_no_register_is_spilled(compiler, capability, dtype):
    """Triton refuses too much shared memory."""
    compiler.capability = capability
    for call in LAUNCHED.values():
        call(dtype)
    if dtype == torch.float32:
        signs(dtype, precision="tf32")
    for name in LAUNCHED:
        case = name, capability, f"*{DTYPES[dtype]}"
        assert max(compiler.stacks[case]) <= SPILLED.get(case, 0), case


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("name", "call", "reads"),
    [("_ring_sums", vector, 32), ("_tile_sums", tile, 32), ("_matrix_sums", matrix, 64), ("_matrix_sums", apart, 64)],
)  # fmt: skip
def test_reads_are_under_way_together_and_no_register_is_spilled(compiled, name, call, reads, capability):
    files = compiled(name, call, torch.float32, capability)
    instructions = re.findall(r"\b(LDG|FFMA|STL|LDL)\b", triton_cases.machine_code(files["cubin"]))
    assert not {"STL", "LDL"}.intersection(instructions)
    first_sum = instructions.index("FFMA")
    assert instructions[:first_sum].count("LDG") >= reads
    assert "LDG" not in instructions[first_sum:]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["_ring_sums", "_tile_sums", "_matrix_sums"])
def test_neighbours_in_memory_are_read_by_neighbouring_lanes_and_small_numbers_are_kept(
    compiled, name, dtype
):
    """The layout of the reads has columns, not rows, on the lanes of a warp."""
    files = compiled(name, LAUNCHED[name], dtype)
    layout = files["ttgir"].read_text()
    pointer = f"x!tt.ptr<{DTYPES[dtype].replace('p', '')}>"
    load = next(line for line in layout.splitlines() if "tt.load" in line and pointer in line)
    blocked = re.search(r"#blocked\d*", load)[0]
    definition = next(line for line in layout.splitlines() if line.startswith(f"{blocked} = "))
    assert "threadsPerWarp = [1, 32]" in definition
    assert "order = [1, 0]" in definition
    assert ".ftz" not in files["ptx"].read_text()


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_signs_are_multiplied_in_float32_unless_tensor_cores_are_exact(compiled, capability, dtype):
    """float16 and bfloat16 are TF32 numbers, as signs are."""
    files = compiled("_signed_product", signs, dtype, capability)
    ptx = files["ptx"].read_text()
    assert ("fma.rn.f32" in ptx) == (dtype == torch.float32)
    assert ("mma" in ptx) == (dtype != torch.float32)
    assert "cp.async" in ptx  # several entries per instruction, asynchronously


@pytest.mark.parametrize("name", ["_ring_sums", "_matrix_sums", "_signed_product"])
def test_gradients_are_addressed_with_64_bits(compiled, name):
    """No offset of 32 bits is added to a pointer to gradients."""
    files = compiled(name, LAUNCHED[name], torch.float16)
    pattern = r"tt\.addptr %(\S+), .*ptr<f16>>?, (?:tensor<[\dx]*x)?(i\d+)"
    steps = re.findall(pattern, files["ttir"].read_text())
    assert len(steps) >= 2
    assert {bits for _, bits in steps} == {"i64"}, steps


def assert_launchable(launches):
    for name, grid, types, values in launches:
        assert grid[0] < 2**31, name
        assert max(grid[1:]) <= 65_535, (name, grid)
        for argument, kind in types.items():
            if kind[0] == "i" and isinstance(values[argument], int):
                bits = int(kind[1:])
                assert -(2 ** (bits - 1)) <= values[argument] < 2 ** (bits - 1), (name, argument)


@pytest.mark.parametrize(
    ("num_rows", "num_entries", "proj_dim"),
    [(1, 2**31 + 7, 2048), (64, 3_000_000_019, 8192), (5000, 40_000_000, 512)],
)
def test_launches_for_large_parameters_fit_the_grid(compiler, num_rows, num_entries, proj_dim):
    vector(torch.bfloat16, num_rows, num_entries, proj_dim)
    signs(torch.bfloat16, num_rows, num_entries, proj_dim)
    assert_launchable(compiler.launches)
    rings = [values for name, _, _, values in compiler.launches if name == "_ring_sums"]
    assert max(values["num_entries"] for values in rings) == num_entries
    widths = [values["num_entries"] for name, _, _, values in compiler.launches if name == "_signed_product"]
    assert sum(widths) == -(-num_rows // 256) * num_entries  # rows come in groups of 256
    assert max(widths) <= 2**24


def test_strides_of_64_bits_reach_the_kernels(compiler, to_compile):
    far = no_memory(1, 1, dtype=torch.float16).as_strided((1000, 1536), (2**33, 2**20))
    sketched(far, 2048)
    sketched(far, 2048, (3, 512))
    to_compile.dense.add_signed_product_(no_memory(1000, 2048), far, triton_cases.KEY)
    assert_launchable(compiler.launches)
    names = {"_matrix_sums": "sample_stride"}
    strides = [types.get(names.get(name, "row_stride")) for name, _, types, _ in compiler.launches]
    assert len(compiler.launches) >= 3
    assert set(strides) == {"i64"}


AMD = """
import torch
torch.version.hip = "6.4"  # as torch for AMD has it
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from trak_lite.projectors.dense import triton as dense
from trak_lite.projectors.sketch import triton as sketch

class Driver:
    def get_current_target(self): return GPUTarget("hip", "gfx942", 64)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def map_python_to_cpp_type(self, name): return "int"
    def get_device_interface(self): return torch.cuda
    def launcher_cls(self, *args, **named): raise RuntimeError("compiled, and no GPU to launch on")

driver.set_active(Driver())
cpu = torch.device("cpu")
signs = torch.ones(1, 1, 70)
hashes = sketch.BlockHashes((3, 5), 70, torch.arange(70).view(1, 1, 70), signs, signs)
for run in (
    lambda: sketch.are_right(cpu),
    lambda: sketch.MatrixKernel(hashes, signs).dense(torch.eye(15)),
    lambda: dense.are_right(cpu),
):
    try:
        run()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_compile_for_amd(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", AMD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("compiled, and no GPU to launch on") == 3, done.stdout


# ---- on a GPU
@pytest.mark.cuda
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "proj_dim"),
    [
        *(((n,), k) for n, k in ((1, 1), (700, 512), (100_000, 1000), (5_000_000, 2048), (300_000, 40_000))),
        *SHAPES,
        ((1000, 1200), 512),
        ((700, 3000), 2048),
    ],
)
def test_features_on_a_gpu_have_the_bits_of_the_cpu(shape, proj_dim, dtype):
    """And the same bits in every batch."""
    rows = random(3, torch.Size(shape).numel(), dtype=dtype)
    found = sketched(rows.cuda(), proj_dim, shape)
    assert torch.equal(found.cpu(), sketched(rows, proj_dim, shape))
    assert torch.equal(sketched(rows[:1].cuda(), proj_dim, shape), found[:1])


@pytest.mark.cuda
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_rows_with_any_strides_on_a_gpu_have_the_bits_of_the_cpu(make):
    rows = make(4200)
    if make is STRIDED["expanded"]:
        there = rows[:1].cuda().expand(rows.shape)
    else:
        there = torch.empty_strided(rows.shape, rows.stride(), device="cuda").copy_(rows)
    for shape in (None, (60, 70)):
        assert torch.equal(sketched(there, 100, shape).cpu(), sketched(rows, 100, shape))


@pytest.mark.cuda
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("budget", [1 << 20, 1 << 28])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [0, 1, 9, 300])
def test_factors_on_a_gpu_agree_with_the_cpu_up_to_the_rounding_of_products(
    monkeypatch, budget, dtype, positions
):
    """Also factors of 16 bits, whose products are summed in float32.

    With the smaller budget a band of rows does not fit, and the factors are transformed.
    """
    matrix = "trak_lite.projectors.sketch.matrix"
    monkeypatch.setattr(triton_cases.kernels_of().matrices, "scratch_bytes", lambda device: budget)
    monkeypatch.setattr(f"{matrix}.scratch_bytes", lambda device: budget)
    monkeypatch.setattr(f"{matrix}.fourier_takes_less_time", lambda *_, **__: False)
    block = factors((700, 600), 5, positions, dtype)
    grads = block.inputs, block.output_grads
    made = sketched(tuple(factor.cuda() for factor in grads), 512, (700, 600))
    assert_close(made.cpu(), sketched(grads, 512, (700, 600)), 1e-5)


@pytest.mark.cuda
def test_entries_beyond_two_to_the_31_on_a_gpu_are_read_where_they_lie():
    size, place = 2**31 + 1000, 2**31 + 5
    rows = torch.zeros(1, size, dtype=torch.float16, device="cuda")
    rows[0, place] = 2
    found = sketched(rows, 65_536).cpu()
    units = torch.zeros(1, 65_536)
    units[0, int(found.abs().argmax())] = 1
    entry = CountSketchProjector(65_536, seed=3).adjoint(units.cuda(), model_id=1, parameters={"w": (size,)})
    assert found.abs().sum() == 2
    assert float(entry["w"][0, place]) * 2 == float(found.sum())


@pytest.mark.cuda
def test_the_kernels_run_on_the_gpu_that_the_gradients_are_on():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rows = random(4, 1400)
    with torch.cuda.device(0):
        made = sketched(rows.to("cuda:1"), 64, (20, 70))
        product = RademacherProjector(64).project(rows.to("cuda:1"), 0)
    assert torch.equal(made.cpu(), sketched(rows, 64, (20, 70)))
    assert_close(product.cpu(), RademacherProjector(64).project(rows, 0), 1e-4)
