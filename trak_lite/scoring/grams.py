"""The kernels of a store's checkpoints: gram matrices that are made once, by one rank or by all, and kept.

Shapes: N train rows, K feature width, k columns of one segment.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.featurizing.fisher import FisherFits, split_squares
from trak_lite.linalg.kernel import GramAccumulator, KernelSettings, SegmentKernel, factorise_segments
from trak_lite.methods import AbstractMethod, Fisher
from trak_lite.parallel.ranks import AbstractRanks
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
    """Return the gram matrix of one checkpoint's train rows, segment by segment.

    Matrices computed from the rows are stored under a key of the rows' checksums.

    Args:
        store: Holds the rows.
        path: Their table.
        settings: Which matrix.
        layout: Segments of a row.
        device: Where the products run, and where the result is.
        fisher: The method whose fit is read, for ``weighting="fisher"``.

    Raises:
        StateError: If that was not fitted.
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
    ranks: AbstractRanks,
) -> None:
    """Make and keep the gram matrices that a store lacks, all ranks together; one rank makes them when it needs them.

    Each rank adds up chunks that follow each other, and rank 0 gets the sum of their sums. Where ranks are more than
    chunks, they make those of several checkpoints at once. Memory: one checkpoint's matrices on each rank, on rank 0
    two.

    Args:
        store: Open for writing.
        paths: Tables of the train rows, one per checkpoint, complete, all of them with the same chunks.
        settings: The kernel.
        layout: Segments of a row.
        device: Where the products run.
        ranks: Those that make them.
    """
    if settings.weighting == "fisher" or ranks.size == 1:
        return
    said = ranks.broadcast(
        "list of missing gram matrices",
        lambda: json.dumps([path for path in paths if not has_kernel(store, path, settings, layout)]),
    )
    lacking, num_chunks = json.loads(said), store.open_table(paths[0]).num_chunks
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
    """Return the part of the work that a rank has, and which of its chunks.

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
            weights = as_tensor(np.array(table.read_chunk(chunk, LOSS_CURVATURE)), device)
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
    """Return the factorised kernel of one checkpoint's train rows, segment by segment; see :func:`grams_of`.

    ``allow_singular`` is that of :func:`~trak_lite.linalg.factorise`.
    """
    matrices = grams_of(store, path, settings, layout, device=device, fisher=fisher)
    num_rows = store.open_table(path).spec.num_rows
    return factorise_segments(
        matrices, settings, num_rows=num_rows, layout=layout, allow_singular=allow_singular
    )


def has_kernel(
    store: AbstractFeatureStore, path: str, settings: KernelSettings, layout: FeatureLayout
) -> bool:
    """Whether the gram matrices of these rows are stored."""
    name, key = _gram_key(store.open_table(path), path, settings, layout)
    return store.cached(name, key) is not None


def _gram_key(
    table: AbstractRowTable, path: str, settings: KernelSettings, layout: FeatureLayout
) -> tuple[str, str]:
    """Return the name and key that a gram matrix is kept under."""
    # Both readings of rows with several segments, each by itself and all as one, are kept.
    segments = f"-{len(layout.segments)}" if len(layout.segments) > 1 else ""
    name = f"gram-{path.replace('/', '-')}-{settings.weighting}{segments}"
    # A digest: the layout names every module, and keys of the store have a bounded length.
    return name, hashlib.sha256(f"{table.content_key()}|{layout.to_json()}".encode()).hexdigest()


def fisher_of(method: AbstractMethod) -> Fisher | None:
    """Return the method if its matrices were fitted to drawn labels, else ``None``."""
    return method if isinstance(method, Fisher) else None
