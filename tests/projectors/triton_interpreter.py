"""Runs the package's Triton kernels without a GPU: in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch

import trak_lite.projectors as package
from trak_lite.projectors._kernels import usable_kernels

PREFIX = "triton"

if torch.cuda.is_available():
    interpreted = pytest.mark.skip(
        reason="Triton imported for its interpreter could not run on the GPU later"
    )
else:
    interpreted = pytest.mark.usefixtures("interpreter")  # of the test's module


@contextlib.contextmanager
def fresh_kernels(*, interpret: bool) -> Iterator[None]:
    """Let kernel modules be imported anew, interpreted or to be compiled; those from before come back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
        before = _take_kernel_modules()
        _forget_choices()
        try:
            yield
        finally:
            _take_kernel_modules()
            for name, module in before.items():
                sys.modules[name] = module
                parent, _, attribute = name.rpartition(".")
                setattr(sys.modules[parent], attribute, module)
            _forget_choices()


def _forget_choices() -> None:
    usable_kernels.cache_clear()


def _take_kernel_modules() -> dict:
    """Remove and return the imported kernel modules."""
    inside = [name for name in sys.modules if name.startswith(f"{package.__name__}.")]
    names = [name for name in inside if name.rpartition(".")[2].startswith(PREFIX)]
    for name in names:
        parent, _, attribute = name.rpartition(".")
        delattr(sys.modules[parent], attribute)
    return {name: sys.modules.pop(name) for name in names}
