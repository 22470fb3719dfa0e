"""Gram matrices and kernels of a store's checkpoints, computed once, by one rank or by all, and stored.

Shapes: N train rows, K feature width, k columns of one segment.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.ranks import Ranks
from trak_lite.featurizing.fisher import FisherFits
from trak_lite.linalg.gram import GramAccumulator, keeps_rows
from trak_lite.linalg.kernel import KernelSettings, SegmentKernel, factorise
from trak_lite.methods import Fisher
from trak_lite.run.tables import FEATURES, LOSS_CURVATURE, as_tensor, table_path
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.types import FeatureLayout

CACHED_ROWS = 4096
"""Gram matrices of fewer rows are not stored: summing them again takes less time than writing and reading them."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Grams:
    """The gram matrices of the train rows of every checkpoint, one per segment, and their kernels.

    Matrices that are computed from many rows are stored under a key that depends on the rows' checksums.
    """

    store: AbstractFeatureStore
    settings: KernelSettings
    """Weighting and damping."""
    layout: FeatureLayout
    """Segments of a row."""
    device: torch.device
    """Device of the products and the results."""
    fisher: Fisher | None = None
    """The method whose fit is read, for ``weighting="fisher"``."""
    stores_all: bool = False
    """Store matrices of few rows too. ``TRAKer`` requires it: an id is finalized if its matrices are stored."""

    def of(self, table: AbstractRowTable) -> list[Tensor]:
        """Return the gram matrices of the rows of a table; raises if ``fisher`` was not fitted."""
        if self.fisher is not None:
            return FisherFits(self.store, self.fisher, self.layout).grams(
                table_path(table), device=self.device
            )
        name, key = self._key(table)
        flat = self.store.cached(name, key)
        if flat is not None:
            widths = [segment.width for segment in self.layout.segments]
            parts = np.split(flat, np.cumsum(np.square(widths))[:-1])
            return [
                torch.from_numpy(part.reshape(width, width).copy()).to(self.device)
                for part, width in zip(parts, widths, strict=True)
            ]
        matrices = self._summed(table, range(table.num_chunks))
        if self.stores_all or table.spec.num_rows >= CACHED_ROWS:
            self.store.cache(name, key, _flat(matrices))
        return matrices

    def are_stored(self, table: AbstractRowTable) -> bool:
        """Return whether the gram matrices of the rows of a table are stored."""
        return self.store.cached(*self._key(table)) is not None

    def kernels(self, table: AbstractRowTable, *, allow_singular: bool = False) -> list[SegmentKernel]:
        """Return the factorised kernels; ``allow_singular`` is passed to :func:`~trak_lite.linalg.kernel.factorise`."""
        return next(self._factorised(table, [self.settings], allow_singular=allow_singular))

    def at_dampings(
        self, table: AbstractRowTable, dampings: Sequence[float | None]
    ) -> Iterator[list[SegmentKernel]]:
        """Yield the factorised kernels at other dampings; the rows are summed once."""
        return self._factorised(
            table, [replace(self.settings, damping=one, lambda_reg=None) for one in dampings]
        )

    def make(self, train: Sequence[AbstractRowTable], ranks: Ranks) -> None:
        """Compute and store the missing gram matrices, with all ranks. With one rank, :meth:`of` computes them.

        Each rank sums consecutive chunks, and rank 0 receives the total. If there are more ranks than chunks, they
        compute the matrices of several checkpoints at once. Memory: the matrices of one checkpoint on each rank, of two
        on rank 0. The train tables are complete and have the same chunks.
        """
        if self.settings.weighting == "fisher" or ranks.size == 1 or self._keeps_rows(train[0].spec.num_rows):
            return
        lacking = ranks.broadcast(
            "list of missing gram matrices",
            lambda: [index for index, table in enumerate(train) if not self.are_stored(table)],
        )
        num_chunks = train[0].num_chunks
        at_once = max(1, ranks.size // num_chunks)
        for first in range(0, len(lacking), at_once):
            tables = [train[index] for index in lacking[first : first + at_once]]
            own_number, chunks = _share(ranks.rank, ranks.size, len(tables), num_chunks)
            sums = self._summed(tables[own_number], chunks)
            for number, table in enumerate(tables):
                matrices = sums if number == own_number else [torch.zeros_like(matrix) for matrix in sums]
                ranks.add_up(matrices)
                if ranks.rank == 0:
                    self.store.cache(*self._key(table), _flat(matrices))

    def _keeps_rows(self, num_rows: int) -> bool:
        """Return whether there are so few rows that a kernel is factorised on their side, without a gram matrix."""
        widest = max(segment.width for segment in self.layout.segments)
        return self.settings.weighting != "fisher" and not self.stores_all and keeps_rows(widest, num_rows)

    def _factorised(
        self, table: AbstractRowTable, every: Sequence[KernelSettings], *, allow_singular: bool = False
    ) -> Iterator[list[SegmentKernel]]:
        num_rows, layout = table.spec.num_rows, self.layout
        if self._keeps_rows(num_rows):
            summed = self._summed(table, range(table.num_chunks), keep_rows=True)
        else:
            summed = self.of(table)
        for settings in every:
            yield factorise(summed, settings, num_rows=num_rows, layout=layout, allow_singular=allow_singular)

    def _summed(self, table: AbstractRowTable, chunks: range, *, keep_rows: bool = False) -> list[Tensor]:
        """Return the gram matrices of the train rows in some chunks; with ``keep_rows`` the rows where they are few."""
        num_rows = table.spec.num_rows if keep_rows else None
        first_row = chunks.start * table.spec.chunk_rows
        sums = GramAccumulator(self.layout, self.device, first_row=first_row, num_rows=num_rows)
        for chunk in chunks:
            start, stop = table.chunk_range(chunk)
            weights = None
            if self.settings.weighting == "curvature":  # checked on the host
                weights = torch.from_numpy(np.array(table.read_chunk(chunk, LOSS_CURVATURE)))
            for first, rows in table.blocks(FEATURES, start, stop):
                here = None if weights is None else weights[first - start : first - start + len(rows)]
                sums.add(as_tensor(rows, self.device), here)
        return sums.result()

    def _key(self, table: AbstractRowTable) -> tuple[str, str]:
        # The name contains the number of segments: stored and joint matrices of the same rows may coexist.
        count = len(self.layout.segments)
        name = f"gram-{table_path(table)}-{self.settings.weighting}{f'-{count}' if count > 1 else ''}"
        # Hash the layout: it names every module, and store keys have a maximum length.
        return name, hashlib.sha256(f"{table.content_key()}|{self.layout.to_json()}".encode()).hexdigest()


def _share(rank: int, num_ranks: int, num_parts: int, num_chunks: int) -> tuple[int, range]:
    """Return the part (table) that a rank works on, and its chunks of that part.

    Example:
        >>> [_share(rank, 3, 1, 7) for rank in range(3)]
        [(0, range(0, 2)), (0, range(2, 4)), (0, range(4, 7))]
        >>> [_share(rank, 4, 2, 1) for rank in range(4)]
        [(0, range(0, 0)), (0, range(0, 1)), (1, range(0, 0)), (1, range(0, 1))]
    """
    part = rank * num_parts // num_ranks
    first = -(-part * num_ranks // num_parts)
    members = -(-(part + 1) * num_ranks // num_parts) - first
    start, stop = ((rank - first + step) * num_chunks // members for step in (0, 1))
    return part, range(start, stop)


def _flat(matrices: Sequence[Tensor]) -> NDArray[Any]:
    return np.concatenate([matrix.cpu().numpy().reshape(-1) for matrix in matrices])
