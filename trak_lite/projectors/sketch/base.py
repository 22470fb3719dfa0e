"""What the sketches of vectors and of matrices share: hash keys, the choice of kernels, embedding tables.

Shapes: b rows (samples), n gradient entries of a parameter, K columns (``proj_dim``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from trak_lite.projectors._kernels import usable_kernels
from trak_lite.projectors._scratch import Scratch, in_pieces, scratch_bytes, sum_dtype
from trak_lite.projectors.random.hash import Stream, parameter_key
from trak_lite.types import LookupBlock


@dataclass(frozen=True, slots=True)
class Keys:
    """Makes the hash keys of one copy of one parameter's sketch."""

    seed: int
    model_id: int
    name: str
    copy: int = 0

    def __call__(self, stream: Stream) -> int:
        """Return the key of a stream."""
        return parameter_key(self.seed, self.model_id, self.name, stream, self.copy)


def triton_kernels(rows: Tensor) -> ModuleType | None:
    """Return the module of the sketches' Triton kernels, or ``None`` if they do not support these gradients."""
    return usable_kernels(_load, "Sketches", rows.device, rows.dtype)


def _load() -> ModuleType:
    from trak_lite.projectors.sketch import triton as _triton_sketch

    return _triton_sketch


def form_tables(dense: Callable[[Tensor, Scratch], Tensor], block: LookupBlock, scratch: Scratch) -> Tensor:
    """Return features ``(b, K)`` of gradients of table rows; dense gradients are formed for a few samples at a time."""
    dtype = sum_dtype(block.values.dtype)
    entries = max(1, block.num_rows * block.values.shape[2])

    def features(rows: Tensor, values: Tensor) -> Tensor:
        return dense(LookupBlock(block.name, rows, values.to(dtype), block.num_rows).dense(), scratch)

    return in_pieces(
        features, block.rows, block.values, scratch_bytes(block.values.device) // (dtype.itemsize * entries)
    )
