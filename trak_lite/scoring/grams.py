"""Gram matrices and kernels of a store's checkpoints, computed once, by one rank or by all, and stored.

Shapes: N train rows, K feature width, k columns of one segment.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.featurizing.fisher import FisherFits, split_squares
from trak_lite.linalg.kernel import GramAccumulator, KernelSettings, SegmentKernel, factorise_segments
from trak_lite.methods import AbstractMethod, Fisher
from trak_lite.parallel.ranks import Ranks
from trak_lite.run.tables import FEATURES, LOSS_CURVATURE, as_tensor
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.types import FeatureLayout

__all__ = ["fisher_of", "grams_of", "has_kernel", "kernels_of", "make_grams"]


def grams_of(
    store: AbstractFeatureStore,
    path: str,
    settings: KernelSettings,
    layout: FeatureLayout,
    *,
    device: torch.device,
    fisher: Fisher | None = None,
) -> list[Tensor]:
    """Return the gram matrices of one checkpoint's train rows, one per segment.

    Matrices computed from the rows are stored under a key that depends on the rows' checksums.

    Args:
        store: Store of the rows.
        path: Table of the rows.
        settings: Weighting of the matrix.
        layout: Segments of a row.
        device: Device of the products and the result.
        fisher: The method whose fit is read, for ``weighting="fisher"``.

    Raises:
        StateError: If ``fisher`` was not fitted.
    """
    if fisher is not None:
        return FisherFits(store, fisher).grams(path, layout, device=device)
    table = store.open_table(path)
    name, key = _gram_key(table, path, settings, layout)
    flat = store.cached(name, key)
    if flat is None:
        flat = _flat(_summed(table, range(table.num_chunks), settings, layout, device))
        store.cache(name, key, flat)
    return split_squares(flat, layout, device=device)


def make_grams(
    store: AbstractFeatureStore,
    paths: Sequence[str],
    settings: KernelSettings,
    layout: FeatureLayout,
    *,
    device: torch.device,
    ranks: Ranks,
) -> None:
    """Compute and store the missing gram matrices, with all ranks. With one rank, :func:`grams_of` computes them.

    Each rank sums consecutive chunks, and rank 0 receives the total. If there are more ranks than chunks, they compute
    the matrices of several checkpoints at once. Memory: the matrices of one checkpoint on each rank, of two on rank 0.

    Args:
        store: Open for writing.
        paths: Tables of the train rows, one per checkpoint, all complete and with the same chunks.
        settings: The kernel.
        layout: Segments of a row.
        device: Device of the products.
        ranks: The ranks that share the work.
    """
    if settings.weighting == "fisher" or ranks.size == 1:
        return
    lacking = ranks.broadcast(
        "list of missing gram matrices",
        lambda: [path for path in paths if not has_kernel(store, path, settings, layout)],
    )
    num_chunks = store.open_table(paths[0]).num_chunks
    at_once = max(1, ranks.size // num_chunks)
    for first in range(0, len(lacking), at_once):
        tables = [store.open_table(path) for path in lacking[first : first + at_once]]
        own, chunks = _share(ranks.rank, ranks.size, len(tables), num_chunks)
        sums = _summed(tables[own], chunks, settings, layout, device)
        for number, (table, path) in enumerate(zip(tables, lacking[first:], strict=False)):
            matrices = sums if number == own else [torch.zeros_like(matrix) for matrix in sums]
            ranks.add_up(matrices)
            if ranks.rank == 0:
                store.cache(*_gram_key(table, path, settings, layout), _flat(matrices))


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


def _summed(
    table: AbstractRowTable,
    chunks: range,
    settings: KernelSettings,
    layout: FeatureLayout,
    device: torch.device,
) -> list[Tensor]:
    """Return the gram matrices of the train rows in some chunks."""
    sums = GramAccumulator(layout, device, first_row=chunks.start * table.spec.chunk_rows)
    for chunk in chunks:
        start, stop = table.chunk_range(chunk)
        weights = None
        if settings.weighting == "curvature":
            weights = torch.from_numpy(
                np.array(table.read_chunk(chunk, LOSS_CURVATURE))
            )  # checked on the host
        for first, rows in table.blocks(FEATURES, start, stop):
            here = None if weights is None else weights[first - start : first - start + len(rows)]
            sums.add(as_tensor(rows, device), here)
    return sums.result()


def _flat(matrices: Sequence[Tensor]) -> NDArray[Any]:
    return np.concatenate([matrix.cpu().numpy().reshape(-1) for matrix in matrices])


def kernels_of(
    store: AbstractFeatureStore,
    path: str,
    settings: KernelSettings,
    layout: FeatureLayout,
    *,
    device: torch.device,
    fisher: Fisher | None = None,
    allow_singular: bool = False,
) -> list[SegmentKernel]:
    """Return the factorised kernels of one checkpoint's train rows, one per segment; see :func:`grams_of`.

    ``allow_singular`` is passed to :func:`~trak_lite.linalg.factorise`.
    """
    matrices = grams_of(store, path, settings, layout, device=device, fisher=fisher)
    num_rows = store.open_table(path).spec.num_rows
    return factorise_segments(
        matrices, settings, num_rows=num_rows, layout=layout, allow_singular=allow_singular
    )


def has_kernel(
    store: AbstractFeatureStore, path: str, settings: KernelSettings, layout: FeatureLayout
) -> bool:
    """Return whether the gram matrices of these rows are stored."""
    name, key = _gram_key(store.open_table(path), path, settings, layout)
    return store.cached(name, key) is not None


def _gram_key(
    table: AbstractRowTable, path: str, settings: KernelSettings, layout: FeatureLayout
) -> tuple[str, str]:
    """Return the name and key that a gram matrix is stored under."""
    # The name contains the number of segments, because stored and joint matrices of the same rows may coexist.
    segments = f"-{len(layout.segments)}" if len(layout.segments) > 1 else ""
    name = f"gram-{path.replace('/', '-')}-{settings.weighting}{segments}"
    # Hash the layout: it names every module, and store keys have a maximum length.
    return name, hashlib.sha256(f"{table.content_key()}|{layout.to_json()}".encode()).hexdigest()


def fisher_of(method: AbstractMethod) -> Fisher | None:
    """Return the method if it is :class:`~trak_lite.methods.Fisher`, else ``None``."""
    return method if isinstance(method, Fisher) else None
