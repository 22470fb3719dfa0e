"""One pass over the scores that keeps the best rows.

Shapes: N train rows, M targets, T groups of targets, G labels of train rows, b rows of a tile, k rows to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from trak_lite.data.columns import Column
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.scoring.choices import RowChoice
from trak_lite.scoring.matrix import AbstractScoreMatrix

Reduction = Literal["mean", "sum", "max"]
_TILE_VALUES = 1 << 20
"""Scores that are converted to float64 at a time."""
_FEWEST_HELD = 4096


@final
@dataclass(frozen=True, slots=True, eq=False)
class TargetGroups:
    """How the scores of a row for M targets become one value."""

    groups: Column | None
    """Label of each target; ``None`` makes each target a group."""
    reduction: Reduction
    """Of the means of the groups."""
    factor: float
    """-1 negates all scores first."""

    def of(
        self, tile: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the value of each row, its strongest group, and the mean of that group, ``(b,)`` each."""
        scores = np.ascontiguousarray(tile, dtype=np.float64)
        if self.groups is not None:
            order = np.argsort(self.groups.places, kind="stable")
            starts = np.concatenate([[0], np.cumsum(self.groups.sizes)[:-1]])
            scores = np.add.reduceat(scores[:, order], starts, axis=1) / self.groups.sizes
        scores = scores * self.factor + 0.0  # + 0.0 makes -0.0 equal to 0.0 in every comparison
        strongest = scores.argmax(axis=1)
        best = np.take_along_axis(scores, strongest[:, None], axis=1)[:, 0]
        if self.reduction == "max":
            return best, strongest, best
        values = scores.sum(axis=1) if self.reduction == "sum" else scores.mean(axis=1)
        return values, strongest, best


class Candidates(NamedTuple):
    """Rows with their values, ``(n,)`` each; larger values are better."""

    rows: NDArray[np.int64]
    """Numbers of train rows."""
    values: NDArray[np.float64]
    """The value of each row for all targets."""
    strongest: NDArray[np.int64]
    """Index of the group of targets with the largest mean score."""
    best: NDArray[np.float64]
    """That mean score."""
    places: NDArray[np.int64]
    """Index of the row's label."""

    def take(self, order: NDArray[np.int64] | NDArray[np.bool_]) -> Candidates:
        """Return some of the rows, in an order."""
        return Candidates._make(part[order] for part in self)

    def joined(self, other: Candidates) -> Candidates:
        """Return these rows, then the others."""
        return Candidates._make(map(np.concatenate, zip(self, other, strict=True)))


def real_matrix(values: ArrayLike, required: str, num_rows: int | None = None) -> NDArray[Any]:
    """Return values as a matrix of real numbers; raise ``required`` if they are none, or not of so many rows.

    Those of a tensor are detached; float32 takes the place of types that NumPy lacks.
    """
    if isinstance(values, Tensor):
        is_narrow = values.dtype.itemsize < 4 and values.is_floating_point()
        values = (values.float() if is_narrow else values).detach().cpu()
    array = np.asarray(values)
    is_matrix = array.ndim == 2 and array.size > 0 and array.dtype.kind in "iuf"
    if not is_matrix or num_rows not in (None, len(array)):
        raise InvalidInputError(f"{required}, got {array.dtype} of shape {array.shape}.")
    return array


def best_rows(
    matrix: AbstractScoreMatrix,
    targets: TargetGroups,
    quotas: NDArray[np.int64],
    label_of: NDArray[np.int64] | None = None,
    *,
    wanted: NDArray[np.bool_] | None = None,
) -> Candidates:
    """Return the best rows of each label, best first, from one pass over the scores.

    Of equal values the lower row is taken and comes first. Memory: one tile of scores, and 2 k rows. Quotas ``(G,)``
    are the number of rows to keep of each label, label_of ``(N,)`` the index of each row's label (``None``: all have
    one). Tiles without a wanted row are not read.
    """
    best = _BestOfLabels(quotas)
    for rows, tile in _parts(matrix, RowChoice(wanted)):
        if not np.isfinite(tile).all():
            row, target = np.argwhere(~np.isfinite(tile))[0].tolist()
            raise NonFiniteError(
                f"The score of train row {rows[row]} for target {target} is {tile[row, target]}. select needs finite "
                "scores of all rows; scores of stream_scores(k=...) or refine=... hold those of a few rows only. Use "
                "scores without k and refine, or check the features and the kernel."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            values, strongest, means = targets.of(tile)
        beyond = rows[~np.isfinite(values)]
        if len(beyond):
            raise NonFiniteError(
                f"The sum of the scores of train row {beyond[0]} over targets is beyond the range of float64. Divide "
                "all scores by a constant."
            )
        labels = np.zeros(len(tile), np.int64) if label_of is None else label_of[rows]
        best.add(Candidates(rows, values, strongest, means, labels))
    candidates = best.result()
    return candidates.take(np.lexsort((candidates.rows, -candidates.values)))


@final
class _BestOfLabels:
    """Keeps the best rows of each label from a stream of rows with ascending numbers."""

    def __init__(self, quotas: NDArray[np.int64]) -> None:
        """Keep ``quotas[g]`` rows of label g."""
        self._quotas = quotas
        self._cuts = np.where(quotas > 0, -np.inf, np.inf)  # a row has to be above the cut of its label
        self._most = max(2 * int(quotas.sum()), _FEWEST_HELD)
        self._held: Candidates | None = None

    def add(self, rows: Candidates) -> None:
        """Add rows; their numbers are above all numbers before, so equal values lose."""
        rows = rows.take(rows.values > self._cuts[rows.places])
        self._held = rows if self._held is None else self._held.joined(rows)
        if len(self._held.rows) > self._most:
            self._held = self._kept(self._held)

    def result(self) -> Candidates:
        assert self._held is not None  # scores have at least one row
        return self._kept(self._held)

    def _kept(self, held: Candidates) -> Candidates:
        """Return the best rows of each label, and raise the cuts of the labels that have all their rows."""
        ordered = held.take(np.lexsort((held.rows, -held.values, held.places)))
        starts = np.searchsorted(ordered.places, np.arange(len(self._quotas)))
        ranks = np.arange(len(ordered.rows)) - starts[ordered.places]
        last = ranks == self._quotas[ordered.places] - 1
        self._cuts[ordered.places[last]] = ordered.values[last]
        return ordered.take(ranks < self._quotas[ordered.places])


def _parts(
    matrix: AbstractScoreMatrix, choice: RowChoice
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield ``(row numbers, scores)`` of the chosen rows in order, at most about a million scores at a time."""
    for rows, tile in choice.parts(matrix.tiles):
        step = max(1, _TILE_VALUES // tile.shape[1])
        for first in range(0, len(tile), step):
            yield rows[first : first + step], tile[first : first + step]
