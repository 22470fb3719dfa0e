"""Random matrices within a memory budget: kept while they fit, drawn again block by block where they do not.

Shapes: p rows of a parameter's matrix (its gradient entries), K columns (``proj_dim``), n rows of a block.
Numerics: entries are float32 numbers; a float64 product uses the same numbers, widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.projectors._scratch import empty_buffer
from trak_lite.projectors.random.entries import AbstractEntries
from trak_lite.projectors.random.hash import parameter_key

__all__ = ["MatrixCache"]

_CPU_WORKSPACE = 4 << 20  # stays in a core's cache
_ACCELERATOR_WORKSPACE = 256 << 20  # large enough to hide the launches


@final
class MatrixCache:
    """The matrices of one model at a time, in at most ``memory_budget`` bytes with all workspaces.

    The first rows of each parameter's matrix stay resident, in the order in which parameters first come,
    until the budget is used up; all other rows are drawn into one scratch every time. The numbers are the
    same either way. Not safe for use by several threads at once.
    """

    def __init__(
        self, entries: type[AbstractEntries], proj_dim: int, *, seed: int, memory_budget: int
    ) -> None:
        """Store the settings; nothing is drawn or allocated.

        Raises:
            InvalidInputError: If the budget does not hold the scratch for a single row.
        """
        self._entries_type = entries
        self._proj_dim = proj_dim
        self._seed = seed
        self._memory_budget = memory_budget
        self._width = entries.width(proj_dim)
        if self._workspace_bytes(1) > memory_budget:
            raise InvalidInputError(
                f"memory_budget={memory_budget} bytes does not hold one row of a matrix with "
                f"proj_dim={proj_dim}. Give at least {self._workspace_bytes(1)} bytes."
            )
        self.clear()

    def clear(self) -> None:
        """Free all matrices and workspaces."""
        self._owner: tuple[int, torch.device] | None = None
        self._resident: dict[str, Tensor] = {}
        self._entries: AbstractEntries | None = None
        self._block: Tensor | None = None
        self._wide: Tensor | None = None
        self._num_rows = 0
        self._reserved = 0

    def blocks(
        self, name: str, num_rows: int, *, model_id: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the parameter's matrix as ``(first row, rows (n, K))``, top to bottom.

        Args:
            name: Canonical parameter name.
            num_rows: p, number of entries of the parameter.
            model_id: The checkpoint; matrices of another one are dropped.
            dtype: float32 or float64.
            device: Device of the result; matrices on another device are dropped.

        Yields:
            A tensor that is valid until the next call.
        """
        entries = self._prepare(model_id, device)
        key = parameter_key(self._seed, model_id, name, self._entries_type.stream)
        resident = self._resident_rows(name, num_rows, key, entries)
        num_resident = resident.shape[0]
        if dtype == torch.float32 and num_resident:
            yield 0, resident[:, : self._proj_dim]
        elif num_resident:
            for start in range(0, num_resident, self._num_rows):
                yield start, self._widened(resident[start : start + self._num_rows], dtype)
        for start in range(num_resident, num_rows, self._num_rows):
            out = self._block_rows(min(self._num_rows, num_rows - start))
            yield start, self._widened(entries.draw_(out, key, start), dtype)

    def _prepare(self, model_id: int, device: torch.device) -> AbstractEntries:
        """Make the cache belong to this model and device."""
        if self._entries is not None and self._owner == (model_id, device):
            return self._entries
        self.clear()
        self._owner = (model_id, device)
        most = _CPU_WORKSPACE if device.type == "cpu" else _ACCELERATOR_WORKSPACE
        fixed = self._workspace_bytes(0)
        share = min(most, self._memory_budget // 4, self._memory_budget - fixed)
        self._num_rows = max(1, share // (self._workspace_bytes(1) - fixed))
        self._reserved = self._workspace_bytes(self._num_rows)
        self._entries = self._entries_type(self._proj_dim, self._num_rows, device)
        return self._entries

    def _workspace_bytes(self, num_rows: int) -> int:
        """Return the bytes of the scratch and of a float32 and a float64 block of ``num_rows`` rows."""
        return self._entries_type.scratch_bytes(self._proj_dim, num_rows) + num_rows * self._width * (4 + 8)

    def _resident_rows(self, name: str, num_rows: int, key: int, entries: AbstractEntries) -> Tensor:
        """Return the rows ``(r, width)`` of the parameter that stay in memory, drawn on the first call."""
        if name not in self._resident:
            held = self._reserved + sum(matrix.nbytes for matrix in self._resident.values())
            free = self._memory_budget - held
            num_resident = min(num_rows, free // (4 * self._width))
            matrix = self._empty(num_resident, torch.float32)
            for start in range(0, num_resident, self._num_rows):
                entries.draw_(matrix[start : start + self._num_rows], key, start)
            self._resident[name] = matrix
        return self._resident[name][:num_rows]

    def _block_rows(self, num_rows: int) -> Tensor:
        """Return the first rows of the scratch for rows that do not stay in memory."""
        if self._block is None:
            self._block = self._empty(self._num_rows, torch.float32)
        return self._block[:num_rows]

    def _widened(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the K columns of at most one block of rows in ``dtype``."""
        if dtype == torch.float32:
            return rows[:, : self._proj_dim]
        if self._wide is None:
            self._wide = self._empty(self._num_rows, torch.float64)
        return self._wide[: rows.shape[0]].copy_(rows)[:, : self._proj_dim]

    def _empty(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        assert self._owner is not None, "blocks() must set the device before allocating"
        return empty_buffer(num_rows, self._width, dtype=dtype, device=self._owner[1])
