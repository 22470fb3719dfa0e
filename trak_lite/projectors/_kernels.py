"""Choice between Triton kernels, which are an optional package, and torch operations; launches as torch operations."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trak_lite.errors import refuse_signal

logger = logging.getLogger(__name__)

Launch: TypeAlias = Callable[[Tensor, Sequence[Tensor], Sequence[int]], None]
"""Takes the tensor that a kernel writes, the tensors that it reads, and integers."""
_LAUNCHES: list[Launch] = []
_LOCK = threading.Lock()
_DEVICES = frozenset({"cuda"})  # where the kernels are tried
_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)  # of gradients that they read


def usable_kernels(
    load: Callable[[], ModuleType], users: str, device: torch.device, dtype: torch.dtype
) -> ModuleType | None:
    """Return the module that ``load`` imports, ``None`` if it cannot be used for gradients of a dtype on a device."""
    usable = device.type in _DEVICES and dtype in _DTYPES
    return tested_kernels(load, users, device) if usable else None


@functools.cache
def tested_kernels(load: Callable[[], ModuleType], users: str, device: torch.device) -> ModuleType | None:
    """Return the module that ``load`` imports; if it fails its test, log one warning about its users instead.

    A CUDA device is not sufficient: Triton needs a C compiler at run time and does not support old GPUs.
    """
    try:
        kernels = load()
    except ImportError as error:
        reason = f"triton cannot be imported ({error})"
    else:
        reason = "they give other features on this device than the torch operations"
        try:
            if kernels.are_right(device):
                return kernels
        except Exception as error:  # every compiler and driver raises other exceptions
            refuse_signal(error)
            reason = f"they do not run on this device ({type(error).__name__}: {error})"
    logger.warning(
        "%s on %s use torch operations instead of the Triton kernels: %s. "
        "The features are the same, but the projection is slower.",
        users,
        device,
        reason,
    )
    return None


def as_operation(launch: Launch) -> Launch:
    """Return a launch as a torch operation on the device of its tensors.

    Recordings of passes and torch's dispatch modes see operations only: a launch beside them would be left out of a
    replay.
    """
    with _LOCK:
        _library()
        number = len(_LAUNCHES)
        _LAUNCHES.append(launch)

    @functools.wraps(launch)
    def run(written: Tensor, read: Sequence[Tensor], numbers: Sequence[int]) -> None:
        torch.ops.trak_lite.launch.default(number, written, read, numbers)

    return run


@functools.cache
def _library() -> Any:
    """Define the operation, once per process; it ends with what is returned."""
    library: Any = torch.library.Library("trak_lite", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("launch(int number, Tensor(a!) written, Tensor[] read, int[] numbers) -> ()")
    library.impl("launch", _launch, "CompositeExplicitAutograd")
    return library


def _launch(number: int, written: Tensor, read: Sequence[Tensor], numbers: Sequence[int]) -> None:
    with torch.cuda.device(written.device) if written.is_cuda else contextlib.nullcontext():
        _LAUNCHES[number](written, read, numbers)
