"""Memory of projections: sums of features, reusable buffers, and limits on their size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from trak_lite.core.devices import SCRATCH

_CPU_SCRATCH_BYTES = 8 << 20  # fits into a cache
_ACCELERATOR_SCRATCH_BYTES = 256 << 20  # large enough to hide the cost of kernel launches
_MOST_VIEWS = 1 << 16


def empty_buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor that later calls can write to, also if created in inference mode."""
    with torch.inference_mode(False):  # inference tensors are read-only outside inference mode
        return torch.empty(shape, dtype=dtype, device=device)


@final
@dataclass(eq=False)
class FeatureRows:
    """Sums of features ``(B, K)``: at first zeros, one for every dtype of gradients so that their order is free."""

    _num_samples: int
    _width: int
    _device: str | torch.device | None
    """``None`` for the device of the first gradients."""
    _sums: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def of(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the sums of features of this dtype, made at the first call; ``device`` is that of the gradients."""
        if dtype not in self._sums:
            self._device = self._device or device
            shape = (self._num_samples, self._width)
            self._sums[dtype] = empty_buffer(*shape, dtype=dtype, device=torch.device(self._device)).zero_()
        return self._sums[dtype]

    def add(self, features: Tensor) -> None:
        """Add features of the whole batch, with at most one operation."""
        self._device = self._device or features.device
        features, total = features.to(self._device), self._sums.get(features.dtype)
        self._sums[features.dtype] = features if total is None else total + features

    def whole(self, device: torch.device | None = None) -> Tensor:
        """Return all sums; without gradients float32 zeros, on ``device`` or the CPU if no device was chosen."""
        if not self._sums:
            self.of(torch.float32, device or torch.device("cpu"))
        # Of float32 and float64, the sum is float64.
        return functools.reduce(torch.add, (self._sums[dtype] for dtype in sorted(self._sums, key=str)))


@final
class Scratch:
    """Scratch memory of one thread; new memory costs a page fault for every 4 KiB. Not thread-safe."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def get(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory of a shape; calls with the same ``use`` return the same memory."""
        count = math.prod(shape)
        flat = self._flat.get((use, dtype, device))
        if flat is None or len(flat) < count:
            flat = self._flat[use, dtype, device] = empty_buffer(count, dtype=dtype, device=device)
            SCRATCH.add(flat.untyped_storage())
            self._views.clear()  # they point to the old memory
        return flat[:count].view(shape)

    def views(self, owner: int, whole: Tensor, starts: Sequence[int], width: int) -> list[Tensor]:
        """Return ``whole[:, start : start + width]`` for every start, cached: creating a view costs more than using it.

        ``whole`` is memory of this scratch, and ``owner`` a number of the list of starts.
        """
        key = (owner, len(whole), whole.dtype)
        if key not in self._views:
            if sum(map(len, self._views.values())) > _MOST_VIEWS:
                self._views.clear()
            self._views[key] = [whole[:, start : start + width] for start in starts]
        return self._views[key]


def scratch_bytes(device: torch.device) -> int:
    """Return the largest number of bytes of gradients that may exist at once on a device."""
    return _CPU_SCRATCH_BYTES if device.type == "cpu" else _ACCELERATOR_SCRATCH_BYTES


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of these dtypes, or products of factors, are summed."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def form(output_grads: Tensor, inputs: Tensor, scratch: Scratch) -> Tensor:
    """Return the product of factors ``(b, R, T)`` and ``(b, T, w)`` in their :func:`sum_dtype`.

    It is in scratch memory, which the next call overwrites.
    """
    dtype = sum_dtype(inputs.dtype, output_grads.dtype)
    shape = (len(inputs), output_grads.shape[1], inputs.shape[2])
    formed = scratch.get("formed", shape, dtype, inputs.device)
    if multiplies_halves(output_grads, inputs):
        return torch.bmm(output_grads, inputs, out_dtype=dtype, out=formed)
    # For one position this is an outer product, which bmm computes at half the speed.
    product = torch.mul if inputs.shape[1] == 1 else torch.bmm
    # with out=, autocast does not change the dtype
    product(output_grads.to(dtype), inputs.to(dtype), out=formed)
    return formed


def multiplies_halves(one: Tensor, other: Tensor) -> bool:
    """Return whether a device multiplies two factors of 16 bits as they are, and sums in float32.

    Such products are exact in float32, so that nothing is lost, and units for matrices take a tenth of the time.
    """
    halves = (torch.bfloat16, torch.float16)
    return one.device.type == "cuda" and one.dtype == other.dtype and one.dtype in halves


def in_pieces(
    features: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor, num_samples: int
) -> Tensor:
    """Return the features of two tensors of samples, computed for ``num_samples`` of them at a time, at least one."""
    pieces = zip(*(torch.split(tensor, max(1, num_samples)) for tensor in (one, other)), strict=True)
    parts = [features(*piece) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
