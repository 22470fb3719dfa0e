"""What the sketches of single parameters share: keys, the contract, and memory that is used again.

Shapes: b rows (samples), n gradient entries of a parameter, K columns (``proj_dim``).
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import final

import torch
from torch import Tensor

from trak_lite.projectors.random.entries import empty_buffer
from trak_lite.projectors.random.hash import Stream, parameter_key
from trak_lite.types import FactoredBlock, LookupBlock

__all__ = [
    "AbstractSketch",
    "Keys",
    "Workspace",
    "form",
    "form_tables",
    "scratch_bytes",
    "sum_dtype",
    "triton_kernels",
]

logger = logging.getLogger(__name__)

_CPU_SCRATCH_BYTES = 8 << 20  # stays in a cache
_ACCELERATOR_SCRATCH_BYTES = 256 << 20  # large enough to hide the launches
_MOST_VIEWS = 1 << 16
_KERNEL_DEVICES = frozenset({"cuda"})  # where the Triton kernels are tried


@dataclass(frozen=True, slots=True)
class Keys:
    """Makes the hash keys of one copy of one parameter's sketch."""

    seed: int
    model_id: int
    name: str
    copy: int = 0

    def __call__(self, stream: Stream, *parts: int) -> int:
        """Return the key of a stream, and of a part of it where it has several."""
        return parameter_key(self.seed, self.model_id, self.name, stream, self.copy, *parts)


@final
class Workspace:
    """Scratch memory of one thread: fresh memory costs a page fault for every 4 KiB. Not for several threads."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def get(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory of a shape; the same memory at every call for the same use."""
        count = math.prod(shape)
        flat = self._flat.get((use, dtype, device))
        if flat is None or len(flat) < count:
            flat = self._flat[use, dtype, device] = empty_buffer(count, dtype=dtype, device=device)
            self._views.clear()  # they show the memory that was given up
        return flat[:count].view(shape)

    def views(self, owner: int, whole: Tensor, starts: Sequence[int], width: int) -> list[Tensor]:
        """Return ``whole[:, start : start + width]`` for every start; making them takes longer than a short addition.

        Args:
            owner: Tells one list of starts from another.
            whole: ``(b, n)`` memory of this workspace.
            starts: First columns.
            width: Columns of each.
        """
        key = (owner, len(whole), whole.dtype)
        if key not in self._views:
            if sum(map(len, self._views.values())) > _MOST_VIEWS:
                self._views.clear()
            self._views[key] = [whole[:, start : start + width] for start in starts]
        return self._views[key]


def scratch_bytes(device: torch.device) -> int:
    """Return how many bytes of gradient may exist at once on a device."""
    return _CPU_SCRATCH_BYTES if device.type == "cpu" else _ACCELERATOR_SCRATCH_BYTES


class AbstractSketch(ABC):
    """A sparse random linear map from one parameter's gradient (n entries) to K features, entries +1 and -1.

    Law: the features of a row given as dense gradient are the same bits on every device, whatever other rows there
    are; given as factors or as rows of a table they agree up to rounding.
    """

    @abstractmethod
    def dense(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, n)``, in float32, or float64 for float64."""

    @abstractmethod
    def factored(self, block: FactoredBlock, workspace: Workspace) -> Tensor:
        """Return features ``(b, K)`` of gradients in factors, in float32, or float64 for float64."""

    @abstractmethod
    def looked_up(self, block: LookupBlock, workspace: Workspace) -> Tensor:
        """Return features ``(b, K)`` of gradients of table rows, in float32, or float64 for float64."""


def triton_kernels(rows: Tensor) -> ModuleType | None:
    """Return the module of the sketches' Triton kernels, or ``None`` where they cannot read these gradients."""
    kernels = _usable_kernels(rows.device) if rows.device.type in _KERNEL_DEVICES else None
    return kernels if kernels is not None and rows.dtype in kernels.DTYPES else None


@functools.cache
def _usable_kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels' module, or ``None``, with one logged line, where it cannot be used."""
    try:
        from trak_lite.projectors.sketch import triton as _triton_sketch
    except ImportError as error:
        reason: str | None = f"triton cannot be imported ({error})"
    else:
        reason = _triton_sketch.why_unusable(device)
        if reason is None:
            return _triton_sketch
    logger.warning(
        "Sketches on %s use torch operations instead of the Triton kernels: %s. "
        "The features are the same; it takes longer.",
        device,
        reason,
    )
    return None


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return what gradients of a dtype, or of factors of these dtypes, are added up in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def form(output_grads: Tensor, inputs: Tensor, workspace: Workspace) -> Tensor:
    """Return the product of factors, in memory of the workspace that the next call overwrites.

    Args:
        output_grads: ``(b, R, T)``.
        inputs: ``(b, T, w)`` of the same dtype.
        workspace: Of this thread.

    Returns:
        ``(b, R, w)``.
    """
    shape = (len(inputs), output_grads.shape[1], inputs.shape[2])
    formed = workspace.get("formed", shape, inputs.dtype, inputs.device)
    # One position is an outer product, which a batched matrix product makes at half the speed.
    product = torch.mul if inputs.shape[1] == 1 else torch.bmm
    product(output_grads, inputs, out=formed)  # a product into given memory stays in its dtype under autocast
    return formed


def form_tables(sketch: AbstractSketch, block: LookupBlock, workspace: Workspace) -> Tensor:
    """Return features ``(b, K)`` of gradients of table rows that are formed a few samples at a time."""
    dtype = sum_dtype(block.values.dtype)
    entries = max(1, block.num_rows * block.values.shape[2])
    step = max(1, scratch_bytes(block.values.device) // (dtype.itemsize * entries))
    parts = [
        sketch.dense(LookupBlock(block.name, rows, values.to(dtype), block.num_rows).dense(), workspace)
        for rows, values in zip(torch.split(block.rows, step), torch.split(block.values, step), strict=True)
    ]
    return torch.cat(parts)
