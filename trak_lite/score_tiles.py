"""From tables of features to a table of scores, tile by tile.

Shapes: N train rows, M targets, K feature width, C checkpoints.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.pipeline import (
    FEATURES,
    LOSS_CURVATURE,
    OUT_TO_LOSS,
    as_tensor,
    plan_batches,
    progress_bar,
)
from trak_lite.scoring import KernelSettings, SegmentKernel, factorise_segments, gram, score_block
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, TableSpec, chunk_rows_for
from trak_lite.types import FeatureLayout

__all__ = ["SCORES", "has_kernel", "kernels_of", "score_rows", "score_table_spec"]

SCORES = "scores"
_TILE_ROWS = 1024


def score_table_spec(num_rows: int, num_targets: int, fingerprint: Mapping[str, Any]) -> TableSpec:
    """Return the table of scores ``(num_rows, num_targets)`` in float32."""
    return TableSpec(
        num_rows,
        (Column(SCORES, num_targets, "float32"),),
        chunk_rows_for(num_rows, 4 * num_targets),
        fingerprint,
    )


def kernels_of(
    store: AbstractFeatureStore,
    path: str,
    settings: KernelSettings,
    layout: FeatureLayout,
    *,
    device: torch.device,
) -> list[SegmentKernel]:
    """Return the factorised kernel of one checkpoint's train rows, segment by segment.

    The gram matrices are kept in the store, keyed by the checksums of the rows that they were made from.
    """
    table = store.open_table(path)
    name, key = _gram_key(table, path, settings, layout)
    flat = store.cached(name, key)
    if flat is None:
        weighted = settings.weighting == "curvature"
        grams = gram(
            (as_tensor(rows, device) for _, rows in table.blocks(FEATURES)),
            torch.from_numpy(table.read(LOSS_CURVATURE)).to(device) if weighted else None,
            layout=layout,
        )
        flat = np.concatenate([matrix.cpu().numpy().reshape(-1) for matrix in grams])
        store.cache(name, key, flat)
    sizes = [segment.width**2 for segment in layout.segments]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    matrices = [
        torch.from_numpy(part.reshape(segment.width, segment.width).copy()).to(device)
        for part, segment in zip(parts, layout.segments, strict=True)
    ]
    return factorise_segments(matrices, settings, num_rows=table.spec.num_rows, layout=layout)


def has_kernel(
    store: AbstractFeatureStore, path: str, settings: KernelSettings, layout: FeatureLayout
) -> bool:
    """Whether :func:`kernels_of` was called for these rows before."""
    name, key = _gram_key(store.open_table(path), path, settings, layout)
    return store.cached(name, key) is not None


def _gram_key(
    table: AbstractRowTable, path: str, settings: KernelSettings, layout: FeatureLayout
) -> tuple[str, str]:
    """Return the name and key that a gram matrix is kept under."""
    return f"gram-{path.replace('/', '-')}-{settings.weighting}", f"{table.content_key()}|{layout.to_json()}"


def score_rows(
    scores: AbstractRowTable,
    train: Sequence[AbstractRowTable],
    preconditioned: Sequence[Tensor],
    *,
    device: torch.device,
    label: str,
    progress: bool | None = None,
) -> int:
    r"""Fill the pending rows of a score table.

    Row i is :math:`\frac1C\sum_c \phi_{c,i} t_c^\top \cdot \frac1C\sum_c q_{c,i}` with preconditioned targets t.

    Args:
        scores: Made by :func:`score_table_spec`.
        train: The C feature tables of the train rows, complete.
        preconditioned: For each checkpoint the targets behind its kernel, ``(M, K)`` on ``device``.
        device: Where the products run.
        label: What the progress bar is called.
        progress: Show the bar; ``None`` shows it on a terminal only.

    Returns:
        Number of rows written.
    """
    plan = plan_batches(scores.pending(), scores.spec.chunk_rows, _TILE_ROWS)
    with progress_bar(plan, scores.spec.num_rows, label, progress) as bar:
        for rows in plan:
            first, last = int(rows[0]), int(rows[-1]) + 1
            tile = _score_tile(train, preconditioned, first, last, device)
            scores.put(rows, {SCORES: tile[rows - first]})
            bar.update(len(rows))
    return sum(map(len, plan))


def _score_tile(
    train: Sequence[AbstractRowTable],
    preconditioned: Sequence[Tensor],
    first: int,
    last: int,
    device: torch.device,
) -> NDArray[np.float32]:
    """Return the scores of train rows ``first:last``, ``(rows, M)``."""
    tile = torch.zeros(last - first, len(preconditioned[0]), device=device)
    out_to_loss = np.zeros(last - first)
    for table, targets in zip(train, preconditioned, strict=True):
        for start, rows in table.blocks(FEATURES, first, last):
            tile[start - first : start - first + len(rows)] += score_block(as_tensor(rows, device), targets)
        for start, values in table.blocks(OUT_TO_LOSS, first, last):
            out_to_loss[start - first : start - first + len(values)] += values
    weights = torch.from_numpy(out_to_loss / len(train) ** 2).to(device=device, dtype=tile.dtype)
    return (tile * weights[:, None]).cpu().numpy()
