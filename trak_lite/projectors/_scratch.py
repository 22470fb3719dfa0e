"""Scratch memory of projections: buffers that are used again, and how much may exist at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

__all__ = ["Scratch", "empty_buffer", "form", "scratch_bytes", "sum_dtype"]

_CPU_SCRATCH_BYTES = 8 << 20  # stays in a cache
_ACCELERATOR_SCRATCH_BYTES = 256 << 20  # large enough to hide the launches
_MOST_VIEWS = 1 << 16


def empty_buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor that can be written in later calls, whatever mode this call runs in."""
    with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
        return torch.empty(shape, dtype=dtype, device=device)


@final
class Scratch:
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
            whole: ``(b, n)`` memory of this scratch.
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


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return what gradients of a dtype, or of factors of these dtypes, are added up in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def form(output_grads: Tensor, inputs: Tensor, scratch: Scratch) -> Tensor:
    """Return the product of factors, in memory of the scratch that the next call overwrites.

    Args:
        output_grads: ``(b, R, T)``.
        inputs: ``(b, T, w)`` of the same dtype.
        scratch: Of this thread.

    Returns:
        ``(b, R, w)``.
    """
    shape = (len(inputs), output_grads.shape[1], inputs.shape[2])
    formed = scratch.get("formed", shape, inputs.dtype, inputs.device)
    # One position is an outer product, which a batched matrix product makes at half the speed.
    product = torch.mul if inputs.shape[1] == 1 else torch.bmm
    product(output_grads, inputs, out=formed)  # a product into given memory stays in its dtype under autocast
    return formed
