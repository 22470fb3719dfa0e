"""Random matrices within a memory budget: kept while they fit, drawn again block by block where they do not.

Shapes: p rows of a parameter's matrix (its gradient entries), K columns (``proj_dim``), n rows of a block.
Numerics: entries are float32 numbers; a float64 product uses the same numbers, widened. On CUDA, float32 products with
signs are computed by a Triton kernel that generates the same signs on the fly, or by torch operations without triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from trak_lite.core.validate import one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import ProjectionType
from trak_lite.projectors._kernels import usable_kernels
from trak_lite.projectors._scratch import empty_buffer
from trak_lite.projectors.random.hash import (
    AbstractEntries,
    GaussianEntries,
    RademacherEntries,
    parameter_key,
)

_CPU_WORKSPACE = 4 << 20  # stays in a core's cache
_ACCELERATOR_WORKSPACE = 256 << 20  # large enough to hide the launches
_CAST_BYTES = 2 << 20  # gradients of another dtype or device are converted in pieces of about this size
_COPY_BYTES = 256 << 20  # gradients on another device than a kernel are copied in pieces of about this size

_ENTRIES: dict[ProjectionType, type[AbstractEntries]] = {
    ProjectionType.rademacher: RademacherEntries,
    ProjectionType.normal: GaussianEntries,
}


@final
class HashedMatrices:
    """Matrices drawn from the hash, identical on every device: those of one model at a time.

    The first rows of each parameter's matrix stay resident, in the order in which parameters first come, until the
    budget is used up; all other rows are drawn into one scratch every time. The numbers are the same either way. Not
    safe for use by several threads at once.
    """

    has_float64: ClassVar[bool] = True
    """Whether products with float64 gradients can be summed in float64."""

    def __init__(
        self, proj_type: ProjectionType, proj_dim: int, *, memory_budget: int, precision: str = "ieee"
    ) -> None:
        """Store the settings; nothing is drawn or allocated.

        The budget limits matrices and workspaces, in bytes. ``precision``, ``"ieee"`` or ``"tf32"``, is that of the
        Triton kernel's products.

        Raises:
            InvalidInputError: If the budget does not hold the scratch for a single row, or the entries have no
                products of this precision.
        """
        self._entries_type = _ENTRIES[proj_type]
        self._has_signs = proj_type == ProjectionType.rademacher
        if one_of(["ieee", "tf32"], precision=precision) != "ieee" and not self._has_signs:
            raise InvalidInputError(
                f"precision={precision!r} is for the signs of a Rademacher projection, got {proj_type.value} "
                "entries. Leave precision at 'ieee'."
            )
        self._precision = precision
        self._proj_dim = proj_dim
        self._memory_budget = positive_int(memory_budget=memory_budget)
        self._width = self._entries_type.width(proj_dim)
        if self._workspace_bytes(1) > memory_budget:
            raise InvalidInputError(
                f"memory_budget={memory_budget} bytes does not hold one row of a matrix with "
                f"proj_dim={proj_dim}. Give at least {self._workspace_bytes(1)} bytes."
            )
        self.clear()

    def fingerprint(self) -> dict[str, Any]:
        """Return ``kind``, the name of the family in the store's manifest, and the precision if it is not float32's."""
        precision = {} if self._precision == "ieee" else {"precision": self._precision}
        return {"kind": f"dense_{self._entries_type.kind}", **precision}

    def clear(self) -> None:
        """Free all matrices and workspaces; they are generated again when needed."""
        self._owner: tuple[int, torch.device] | None = None
        self._resident: dict[str, Tensor] = {}
        self._entries: AbstractEntries | None = None
        self._num_rows = 0

    def add_product_(self, total: Tensor, rows: Tensor, *, seed: int, model_id: int, name: str) -> None:
        """Add ``rows @ matrix`` of one parameter to ``total``, ``(b, K)`` float32 or float64.

        The gradient rows ``(b, p)`` may be on any device.
        """
        key = parameter_key(seed, model_id, name, self._entries_type.stream)
        kernel = None
        if self._has_signs and total.dtype == torch.float32:
            kernel = usable_kernels(_load, "Dense Rademacher projections", total.device, rows.dtype)
        if kernel is not None:  # it generates the signs on the fly, without a matrix in memory
            for start, piece in _pieces(rows, total.device, rows.dtype, _COPY_BYTES):
                kernel.add_signed_product_(total, piece, key, start, precision=self._precision)
            return
        entries = self._prepare(model_id, total.device)
        for start, drawn in self._blocks(entries, name, key, rows.shape[1], total.dtype):
            matrix = drawn[:, : self._proj_dim].to(total.dtype)
            columns = rows[:, start : start + len(matrix)]
            for first, piece in _pieces(columns, matrix.device, matrix.dtype, _CAST_BYTES):
                total.addmm_(piece, matrix[first : first + piece.shape[1]])

    def _prepare(self, model_id: int, device: torch.device) -> AbstractEntries:
        """Drop the matrices of another model or device."""
        if self._entries is not None and self._owner == (model_id, device):
            return self._entries
        self.clear()
        self._owner = (model_id, device)
        most = _CPU_WORKSPACE if device.type == "cpu" else _ACCELERATOR_WORKSPACE
        fixed = self._workspace_bytes(0)
        share = min(most, self._memory_budget // 4, self._memory_budget - fixed)
        self._num_rows = max(1, share // (self._workspace_bytes(1) - fixed))
        self._entries = self._entries_type(self._proj_dim, self._num_rows, device)
        return self._entries

    def _workspace_bytes(self, num_rows: int) -> int:
        """Return the bytes of the scratch and of a float32 and a float64 block of ``num_rows`` rows."""
        return self._entries_type.scratch_bytes(self._proj_dim, num_rows) + num_rows * self._width * (4 + 8)

    def _blocks(
        self, entries: AbstractEntries, name: str, key: int, num_rows: int, dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a matrix as ``(first row, rows (n, width))``, top to bottom; rows are valid until the next call.

        Of a dtype other than float32 they are converted, so that they are at most one block.
        """
        resident = self._resident_rows(entries, name, key, num_rows)
        num_resident = resident.shape[0]
        step = max(1, num_resident) if dtype == torch.float32 else self._num_rows
        for start in range(0, num_resident, step):
            yield start, resident[start : start + step]
        block = self._empty(min(self._num_rows, num_rows - num_resident))
        for start in range(num_resident, num_rows, self._num_rows):
            yield start, entries.draw_(block[: num_rows - start], key, start)

    def _resident_rows(self, entries: AbstractEntries, name: str, key: int, num_rows: int) -> Tensor:
        """Return the rows ``(r, width)`` of the parameter that stay in memory, drawn on the first call."""
        if name not in self._resident:
            held = sum(matrix.nbytes for matrix in self._resident.values())
            held += self._workspace_bytes(self._num_rows)
            num_resident = min(num_rows, (self._memory_budget - held) // (4 * self._width))
            matrix = self._empty(num_resident)
            for start in range(0, num_resident, self._num_rows):
                entries.draw_(matrix[start : start + self._num_rows], key, start)
            self._resident[name] = matrix
        return self._resident[name][:num_rows]

    def _empty(self, num_rows: int) -> Tensor:
        assert self._owner is not None, "the device must be set before allocating"
        return empty_buffer(num_rows, self._width, dtype=torch.float32, device=self._owner[1])


def _load() -> ModuleType:
    from trak_lite.projectors.dense import triton as _triton_dense

    return _triton_dense


def _pieces(
    rows: Tensor, device: torch.device, dtype: torch.dtype, most_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield rows ``(b, p)`` as ``(first entry, rows (b, n))`` of a dtype on a device, in pieces if they are copied."""
    if rows.dtype == dtype and rows.device == device:
        yield 0, rows
        return
    width = max(1, most_bytes // (dtype.itemsize * max(1, rows.shape[0])))
    for start in range(0, rows.shape[1], width):
        yield start, rows[:, start : start + width].to(device, dtype)
