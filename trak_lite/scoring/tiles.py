"""Compute a table of scores from tables of features, tile by tile.

Shapes: N train rows, M targets, K feature width, C checkpoints.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import copied_ahead, wide_dtype
from trak_lite.core.ranks import Ranks
from trak_lite.linalg.products import score_block
from trak_lite.run.tables import FEATURES, OUT_TO_LOSS, SCORES, as_tensor
from trak_lite.store import AbstractRowTable
from trak_lite.store.sharing import SharedRows

WhereQ = Literal["outside", "inside", "off"]

_TILE_ROWS = 1024


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScoreTerm:
    """One checkpoint's summand of the scores: the products of its train rows with its targets."""

    train: AbstractRowTable
    """Features of the train rows, complete."""
    targets: Tensor
    """``(M, K)`` float32 or float64 (:func:`~trak_lite.linalg.products.product_dtype`), multiplied by
    (H + lambda I)^-1 and by the checkpoint's weight. The products are computed on their device."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to blocks of train rows, ``(b, K) -> (b, K)``; ``None`` applies nothing."""


def tile_ranges(num_rows: int, chunk_rows: int, *, share: tuple[int, int] = (0, 1)) -> Iterator[range]:
    """Yield the rows of every tile of N rows. Tiles do not cross the chunks of the score table.

    ``share`` ``(r, n)`` yields the r-th of n parts of the chunks.

    Example:
        >>> list(tile_ranges(3000, 2048))
        [range(0, 1024), range(1024, 2048), range(2048, 3000)]
        >>> list(tile_ranges(3000, 2048, share=(0, 2)))
        [range(0, 1024), range(1024, 2048)]
    """
    part, num_parts = share
    num_chunks = -(-num_rows // chunk_rows)
    for chunk in range(part * num_chunks // num_parts, (part + 1) * num_chunks // num_parts):
        stop = min((chunk + 1) * chunk_rows, num_rows)
        for start in range(chunk * chunk_rows, stop, _TILE_ROWS):
            yield range(start, min(start + _TILE_ROWS, stop))


def score_rows(
    scores: AbstractRowTable,
    terms: Sequence[ScoreTerm],
    *,
    q: WhereQ = "outside",
    label: str,
    column: str = SCORES,
    progress: bool | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Fill the pending rows of a score table by one term per checkpoint, beside other processes."""
    with SharedRows(scores, _TILE_ROWS, label=label, progress=progress, ranks=ranks) as work:
        for batches in work.rounds():  # all rows of a round are put before the next
            tiles = (
                (rows, score_tile(terms, range(int(rows[0]), int(rows[-1]) + 1), q=q)) for rows in batches
            )
            for rows, tile in copied_ahead(tiles):
                work.put(rows, {column: tile[rows - rows[0]]})


def score_tile(terms: Sequence[ScoreTerm], rows: range | NDArray[np.int64], *, q: WhereQ) -> Tensor:
    r"""Return the scores of some train rows, ``(rows, M)`` float32, by one term per checkpoint.

    Row i is :math:`\sum_c \phi_{c,i} t_c^\top` with the terms' targets t. For ``q="outside"`` the sum is multiplied by
    the mean of :math:`q_{c,i}` over checkpoints, for ``"inside"`` each summand by :math:`q_{c,i}`. A range of rows is
    read through a memory map without a copy.
    """
    tile = summed_products(terms, rows, q)
    return tile if q != "outside" else tile.mul_(mean_q(terms, rows).to(tile)[:, None])


def summed_products(terms: Sequence[ScoreTerm], rows: range | NDArray[np.int64], q: WhereQ) -> Tensor:
    """Return the sum of the terms' products for some rows, ``(rows, M)``. Applies q only if it is ``"inside"``."""
    device = terms[0].targets.device
    tile = torch.zeros(len(rows), len(terms[0].targets), dtype=torch.float32, device=device)
    for term in terms:
        weights = _out_to_loss(term, rows) if q == "inside" else None
        for start, block in _pieces(term.train, FEATURES, rows):
            part = slice(start, start + len(block))
            features = as_tensor(block, device)
            if term.transform is not None:
                features = term.transform(features)
            score_block(
                features,
                term.targets,
                out=tile[part],
                row_weights=None if weights is None else weights[part],
            )
    return tile


def mean_q(terms: Sequence[ScoreTerm], rows: range | NDArray[np.int64]) -> Tensor:
    """Return the mean of q over the terms' checkpoints, ``(rows,)``, summed in float64."""
    device = terms[0].targets.device
    total = torch.zeros(len(rows), dtype=wide_dtype(device), device=device)
    for term in terms:
        total += _out_to_loss(term, rows)
    return total / len(terms)


def _out_to_loss(term: ScoreTerm, rows: range | NDArray[np.int64]) -> Tensor:
    """Return q of some rows, ``(rows,)``."""
    parts = _pieces(term.train, OUT_TO_LOSS, rows)
    return torch.cat([as_tensor(np.array(part), term.targets.device) for _, part in parts])


def _pieces(
    table: AbstractRowTable, column: str, rows: range | NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield ``(position, values)`` for some rows: memory-mapped pieces of a range, otherwise one copy."""
    if isinstance(rows, range):
        for start, values in table.blocks(column, rows.start, rows.stop):
            yield start - rows.start, values
    else:
        yield 0, table.read_rows(column, rows)
