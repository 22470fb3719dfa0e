"""Makes torch's PrivateUse1 the stand-in accelerator; once per process, which should therefore be one's own."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("stand_in.cpp")


def why_unbuildable():
    """Return why the stand-in cannot be compiled here, or None."""
    if not sys.platform.startswith("linux"):
        return "the stand-in accelerator is compiled on Linux only"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the stand-in accelerator with"
    return None


def built(folder):
    """Return the compiled library; one process compiles it, the others wait."""
    text = SOURCE.read_bytes() + torch.__version__.encode()
    library = folder / f"stand_in-{hashlib.sha256(text).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "stand_in.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            # -O1 compiles as fast as -O0, and runs of the product take half the time.
            options = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS")
            command = ["g++", *options, str(SOURCE), "-o", str(made)]
            from torch.utils.cpp_extension import include_paths, library_paths  # imports setuptools

            command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
            command += ["-ltorch", "-ltorch_cpu", "-lc10"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}"]
            subprocess.run(command, check=True)
            made.rename(library)
    return library


class Module(types.ModuleType):
    """``torch.stand_in``: what ``torch.cuda`` is to CUDA."""

    def __init__(self, ops):
        super().__init__("torch.stand_in")
        self.ops = ops
        self.device_count = ops.device_count
        self.current_device = ops.current_device
        self.is_available = self.is_initialized = lambda: True
        self.init = self._lazy_init = lambda: None
        self._is_in_bad_fork = lambda: False
        self.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
        self.current_stream = lambda device=None: torch.Stream(f"stand_in:{self.index(device)}")

        module = self

        class device:
            def __init__(self, given):
                self.index = module.index(given)

            def __enter__(self):
                self.before = ops.current_device()
                ops.set_device(self.index)

            def __exit__(self, *_):
                ops.set_device(self.before)

        self.device = self._DeviceGuard = device

    def index(self, device=None):
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.ops.current_device() if index is None else index

    def set_device(self, device):
        self.ops.set_device(self.index(device))

    def synchronize(self, device=None):
        self.ops.synchronize()

    def get_rng_state(self, device="stand_in"):
        return self.ops.rng_state(self.index(device))

    def set_rng_state(self, state, device="stand_in"):
        self.ops.set_rng_state(self.index(device), state)

    def manual_seed(self, seed):
        self.ops.seed(self.ops.current_device(), seed)

    def manual_seed_all(self, seed):
        for index in range(self.device_count()):
            self.ops.seed(index, seed)


def load(library):
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("stand_in")
    module = Module(torch.ops.stand_in)
    torch._register_device_module("stand_in", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
