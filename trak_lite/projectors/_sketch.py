"""What the sketches of single parameters share: keys, the contract, and memory that is used again.

Shapes: b rows (samples), n gradient entries of a parameter, K columns (``proj_dim``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trak_lite.projectors._entries import empty_buffer
from trak_lite.projectors._hash import Stream, parameter_key
from trak_lite.types import FactoredBlock

__all__ = ["AbstractSketch", "Keys", "Workspace", "form", "scratch_bytes", "sum_dtype"]

_CPU_SCRATCH_BYTES = 8 << 20  # stays in a cache
_ACCELERATOR_SCRATCH_BYTES = 256 << 20  # large enough to hide the launches
_MOST_VIEWS = 1 << 16


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
    are; given as factors they agree up to the rounding of the products.
    """

    @abstractmethod
    def dense(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, n)``, in float32, or float64 for float64."""

    @abstractmethod
    def factored(self, block: FactoredBlock, workspace: Workspace) -> Tensor:
        """Return features ``(b, K)`` of gradients in factors, in float32, or float64 for float64."""


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
