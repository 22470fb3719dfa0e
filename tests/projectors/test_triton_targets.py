"""The Triton kernels as they are compiled at run time for A100, H100 and B200, and for more than 2**31 entries.

The product's own launches run with a driver that compiles and does not launch. Gradients are tensors without memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from projection_cases import random32 as random
from triton_interpreter import fresh_kernels, interpreted

from trak_lite.projectors.random.hash import Stream, parameter_key
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.matrix import MatrixSketch
from trak_lite.projectors.sketch.vector import VectorSketch

CPU, META = torch.device("cpu"), torch.device("meta")
KEYS = Keys(3, 1, "weight")
KEY = parameter_key(3, 1, "weight", Stream.RADEMACHER)
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block of threads may use
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
SPILLED = {("_ring_sums", 80, "*fp64"): 80}
"""Known spills in bytes. All others are errors."""


@dataclass
class Compiler:
    """A driver of Triton for a GPU that is not there."""

    capability: int = 90
    launches: list = field(default_factory=list)
    """Kernel, grid, types of arguments, values of arguments."""
    stacks: dict = field(default_factory=dict)
    """Bytes of memory to which a thread spills registers, by kernel, capability and type of its gradients."""
    source: object = None
    """What is compiled."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # kernels are cached by device

    def get_current_stream(self, device):
        return 0

    def get_device_interface(self):
        return torch.cuda

    @property
    def utils(self):
        return self

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.capability]}

    def load_binary(self, name, binary, shared, device):
        import triton

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (stack,) = re.findall(r"STACK:(\d+)", report)
        kind = self.source.signature[self.source.fn.arg_names[0]]
        self.stacks.setdefault((name, self.capability, kind), []).append(int(stack))
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        self.source = source
        names = [name for name, kind in source.signature.items() if kind != "constexpr"]

        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *given):
            values = dict(zip(source.fn.arg_names, given, strict=False))
            types = {name: source.signature[name] for name in names}
            self.launches.append((source.fn.__name__, (x, y, z), types, values))

        return launch


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with fresh_kernels(interpret=False):
        from trak_lite.projectors.dense import triton as dense
        from trak_lite.projectors.sketch import triton as sketch

        yield sketch, dense


@pytest.fixture(scope="module")
def only_compiled(kernels, tmp_path_factory):
    import triton

    with pytest.MonkeyPatch.context() as patch:
        made = Compiler()
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(triton.runtime.driver, "_active", made)
        yield made


@pytest.fixture
def compiler(only_compiled):
    """The driver, which all kernels hold once they are compiled."""
    only_compiled.capability = 90
    only_compiled.launches.clear()
    return only_compiled


def no_memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def vector(kernels, num_rows: int, num_entries: int, proj_dim: int, dtype: torch.dtype) -> None:
    sketch = VectorSketch(num_entries, proj_dim, KEYS, device=CPU)
    sketch._made_by(kernels[0])(no_memory(num_rows, num_entries, dtype=dtype))


def matrix(kernels, num_rows: int, shape: tuple[int, int], proj_dim: int, dtype: torch.dtype) -> None:
    sketch = MatrixSketch(shape, proj_dim, KEYS, device=CPU, method="form")
    sketch._made_by(kernels[0]).dense(no_memory(num_rows, shape[0] * shape[1], dtype=dtype))


def signs(kernels, num_rows: int, num_entries: int, proj_dim: int, dtype: torch.dtype, **options) -> None:
    total = no_memory(num_rows, proj_dim, dtype=torch.float32)
    kernels[1].add_signed_product_(total, no_memory(num_rows, num_entries, dtype=dtype), KEY, **options)


def code_of(kernel, capability: int, kind: str) -> list:
    """The compiled variants for gradients of a type."""
    found = kernel.device_caches[capability][0].values()
    return [made.asm for made in found if made.src.signature[kernel.arg_names[0]] == f"*{kind}"]


# ---- registers and shared memory


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("capability", SHARED)
def test_no_register_is_spilled(kernels, compiler, capability, dtype):
    """Triton refuses too much shared memory."""
    compiler.capability = capability
    vector(kernels, 64, 200_000, 2048, dtype)
    matrix(kernels, 64, (3, 512), 2048, dtype)
    for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
        signs(kernels, 64, 200_000, 8192, dtype, precision=precision)
    for name in ("_ring_sums", "_matrix_sums", "_signed_product"):
        case = name, capability, f"*{DTYPES[dtype]}"
        assert max(compiler.stacks[case]) <= SPILLED.get(case, 0), case


@pytest.mark.parametrize("capability", [80, 90])
def test_signs_are_multiplied_in_float32_unless_tensor_cores_are_exact_or_chosen(
    kernels, compiler, capability
):
    """float16 and bfloat16 are TF32 numbers, as signs are."""
    kernel, compiler.capability = kernels[1]._signed_product, capability
    kernel.device_caches.clear()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        signs(kernels, 64, 200_000, 8192, dtype)
    for kind in ("fp16", "bf16", "fp32"):
        (asm,) = code_of(kernel, capability, kind)
        assert ("fma.rn.f32" in asm["ptx"]) == (kind == "fp32")
        assert ("mma" in asm["ptx"]) == (kind != "fp32")
        assert "cp.async" in asm["ptx"]  # several entries per instruction, asynchronously


# ---- more than 2**31 entries

SIZES = [(1, 2**31 + 7, 2048), (64, 3_000_000_019, 8192), (5000, 40_000_000, 512)]


def assert_launchable(launches: list) -> None:
    for name, grid, types, values in launches:
        assert grid[0] < 2**31, name
        assert max(grid[1:]) <= 65_535, (name, grid)
        for argument, kind in types.items():
            if kind[0] == "i" and isinstance(values[argument], int):
                bits = int(kind[1:])
                assert -(2 ** (bits - 1)) <= values[argument] < 2 ** (bits - 1), (name, argument)


@pytest.mark.parametrize(("num_rows", "num_entries", "proj_dim"), SIZES)
def test_launches_for_large_parameters_fit_the_grid(kernels, compiler, num_rows, num_entries, proj_dim):
    vector(kernels, num_rows, num_entries, proj_dim, torch.bfloat16)
    signs(kernels, num_rows, num_entries, proj_dim, torch.bfloat16)

    assert_launchable(compiler.launches)
    rings = [values for name, _, _, values in compiler.launches if name == "_ring_sums"]
    assert max(values["num_entries"] for values in rings) == num_entries
    widths = [values["num_entries"] for name, _, _, values in compiler.launches if name == "_signed_product"]
    groups = -(-num_rows // kernels[1]._MOST_ROWS)
    assert sum(widths) == groups * num_entries
    assert max(widths) <= 2**24


def test_strides_of_64_bits_reach_the_kernels(kernels, compiler):
    far = no_memory(1, 1, dtype=torch.float16).as_strided((1000, 1536), (2**33, 2**20))
    MatrixSketch((3, 512), 2048, KEYS, device=CPU, method="form")._made_by(kernels[0]).dense(far)
    VectorSketch(1536, 2048, KEYS, device=CPU)._made_by(kernels[0])(far)
    kernels[1].add_signed_product_(no_memory(1000, 2048, dtype=torch.float32), far, KEY)

    assert_launchable(compiler.launches)
    strides = {"_ring_sums": "row_stride", "_matrix_sums": "sample_stride", "_signed_product": "row_stride"}
    assert {types[strides[name]] for name, _, types, _ in compiler.launches} == {"i64"}


def test_gradients_are_addressed_with_64_bits(kernels, compiler):
    """No offset of 32 bits is added to a pointer to gradients."""
    vector(kernels, 64, 2**31 + 7, 2048, torch.float16)
    matrix(kernels, 64, (3, 512), 2048, torch.float16)
    signs(kernels, 64, 200_000, 8192, torch.float16)
    for kernel in (kernels[0]._ring_sums, kernels[0]._matrix_sums, kernels[1]._signed_product):
        for asm in code_of(kernel, 90, "fp16"):
            steps = re.findall(r"tt\.addptr %(\S+), .*ptr<f16>>?, (?:tensor<[\dx]*x)?(i\d+)", asm["ttir"])
            assert len(steps) >= 2, kernel
            assert {bits for _, bits in steps} == {"i64"}, (kernel, steps)


@pytest.fixture(scope="module")
def interpreter():
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with fresh_kernels(interpret=True):
        from trak_lite.projectors.dense import triton as dense
        from trak_lite.projectors.sketch import triton as sketch

        yield sketch, dense


@interpreted
def test_entries_and_rows_beyond_two_to_the_31_are_read_where_they_lie(interpreter):
    """Rows are 2**31 entries apart, entries 2**26; memory that nobody writes takes no memory."""
    sketches, dense = interpreter
    memory = torch.from_numpy(np.zeros(2**31 + 61 * 2**26, dtype=np.float16))
    rows = memory.as_strided((2, 60), (2**31 + 64, 2**26))
    rows.copy_(random(2, 60))
    near = rows.clone()

    for sketch in (
        VectorSketch(60, 16, KEYS, device=CPU),
        MatrixSketch((3, 20), 30, KEYS, device=CPU, method="form"),
    ):
        kernel = sketch._made_by(sketches)
        make = kernel if callable(kernel) else kernel.dense
        assert torch.equal(make(rows), make(near))
    totals = torch.zeros(2, 2, 40)
    for total, given in zip(totals, (rows, near), strict=True):
        dense.add_signed_product_(total, given, KEY)
    assert torch.equal(totals[0], totals[1])
    assert bool(totals.any())
