"""Triton kernels without a GPU: in the interpreter on CPU tensors, or compiled and not launched."""

import contextlib
import logging
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import trak_lite.projectors as package
from trak_lite.projectors._kernels import tested_kernels
from trak_lite.projectors.random.hash import RademacherEntries, Stream, hash_signs, parameter_key

KEY = parameter_key(3, 1, "weight", Stream.RADEMACHER)
PLACES = ("sketch.base", "dense.matrices")
"""Modules that choose between Triton and torch."""
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block of threads may use

if torch.cuda.is_available():
    interpreted = pytest.mark.skip(
        reason="Triton imported for its interpreter could not run on the GPU later"
    )
else:
    interpreted = pytest.mark.usefixtures("interpreter")  # of the test's module


def signs_of(num_entries, proj_dim, start=0):
    """Rows of the sign matrix of ``KEY``, drawn by torch."""
    entries = RademacherEntries(proj_dim, max(1, num_entries), torch.device("cpu"))
    out = torch.empty(num_entries, RademacherEntries.width(proj_dim))
    return entries.draw_(out, KEY, start)[:, :proj_dim]


def signs_from(key, first, count):
    """Signs of the entries of a long vector, drawn by torch."""
    return hash_signs(key, first, count, device=torch.device("cpu"))


def kernels_of():
    """The modules of kernels, which need triton when they are imported."""
    from trak_lite.projectors.dense import triton as dense
    from trak_lite.projectors.sketch import triton as sketch
    from trak_lite.projectors.sketch import triton_matrix as matrices
    from trak_lite.projectors.sketch import triton_vector as vectors

    return SimpleNamespace(dense=dense, sketch=sketch, vectors=vectors, matrices=matrices)


def use_on(patch, *devices):
    """Let the kernels be tried on these devices alone."""
    patch.setattr(f"{package.__name__}._kernels._DEVICES", frozenset(devices))


def choose_anew():
    """Forget which devices were found to run the kernels."""
    tested_kernels.cache_clear()


@contextlib.contextmanager
def fresh_kernels(*, interpret):
    """Let kernel modules be imported anew, interpreted or to be compiled; those from before come back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
        before = _take_kernel_modules()
        choose_anew()
        try:
            yield
        finally:
            _take_kernel_modules()
            for name, module in before.items():
                sys.modules[name] = module
                parent, _, attribute = name.rpartition(".")
                setattr(sys.modules[parent], attribute, module)
            choose_anew()


def _take_kernel_modules():
    """Remove and return the imported kernel modules."""
    inside = [name for name in sys.modules if name.startswith(f"{package.__name__}.")]
    names = [name for name in inside if name.rpartition(".")[2].startswith("triton")]
    for name in names:
        parent, _, attribute = name.rpartition(".")
        delattr(sys.modules[parent], attribute)
    return {name: sys.modules.pop(name) for name in names}


@contextlib.contextmanager
def in_the_interpreter():
    """Use interpreted kernels on the CPU; yields their modules."""
    pytest.importorskip("triton", reason="needs triton, which the test extra installs on Linux")
    with fresh_kernels(interpret=True), pytest.MonkeyPatch.context() as patch:
        use_on(patch, "cpu")
        yield kernels_of()


def recorded_launches(patch):
    """Return the list to which the interpreter adds the constants of every launch."""
    from triton.runtime.interpreter import GridExecutor

    found, launch = [], GridExecutor.__call__
    noted = lambda self, *args, **named: found.append(named) or launch(self, *args, **named)  # noqa: E731
    patch.setattr(GridExecutor, "__call__", noted)
    return found


# ---- fixtures, which the test modules take over by name
@pytest.fixture(scope="module")
def interpreter():
    with in_the_interpreter() as kernels:
        yield kernels


@pytest.fixture
def launches(interpreter, monkeypatch):
    return recorded_launches(monkeypatch)


@pytest.fixture
def forget_choices():
    """Each device's choice of the kernels is made anew, and again after the test."""
    choose_anew()
    yield
    choose_anew()


@pytest.fixture
def no_warning(forget_choices, caplog):
    """The kernels are chosen: where they are not, there is a warning."""
    with caplog.at_level(logging.WARNING, "trak_lite"):
        yield
    assert not caplog.records, caplog.text


# ---- compiled, without a GPU
@dataclass
class Compiler:
    """A driver of Triton for a GPU that is not there: it compiles, and keeps what would be launched."""

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

    get_current_stream = staticmethod(lambda device: 0)
    get_device_interface = staticmethod(lambda: torch.cuda)
    utils = property(lambda self: self)

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.capability]}

    def load_binary(self, name, binary, shared, device):
        import triton

        report = _disassembled(binary, triton.knobs.nvidia.cuobjdump.path, "-res-usage")
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


def _disassembled(binary, tool, *options):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([tool, *options, file.name], check=True, capture_output=True, text=True).stdout


def machine_code(path):
    """Return the instructions of a compiled kernel."""
    import triton

    return _disassembled(path.read_bytes(), triton.knobs.nvidia.nvdisasm.path, "-c")
