"""The ``(N, M)`` matrix of scores, stored, in memory or computed on access, and its strongest rows.

Shapes: N train rows, M targets, b rows of a tile, k top rows per target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from trak_lite.core.devices import copied_ahead
from trak_lite.core.ranks import Ranks
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.topk import TopK, TopRows
from trak_lite.run.tables import ERRORS, SCORES
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.tiles import ScoreTerm
from trak_lite.store import AbstractRowTable

Sign = Literal["helpful", "harmful"]
_ENDS: tuple[Sign, Sign] = ("helpful", "harmful")
_HELD_ROWS = 1024
"""Rows per tile of a matrix that has no tiles of its own."""


class AbstractScoreMatrix(ABC):
    """Scores of N train rows for M targets, read tile by tile."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""

    stored: ClassVar[bool] = True
    """Whether the scores are in a store or in memory, so that reading them computes nothing."""

    def tiles(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield ``(first row, (b, M) scores)`` of all train rows in order.

        ``wanted`` ``(N,)`` leaves out tiles without a wanted row; they are neither read nor computed.
        """
        for start in range(0, self.shape[0], _HELD_ROWS):
            rows = np.arange(start, min(start + _HELD_ROWS, self.shape[0]))
            if wanted is None or wanted[rows].any():
                yield start, self.rows(rows)

    @abstractmethod
    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""

    def kept_top(self, k: int, sign: Sign) -> TopRows | None:
        """Return the k strongest rows of every target if they are cached, else ``None``: one pass finds them."""
        return None

    def errors(self) -> NDArray[np.float32] | None:
        """Return the standard errors over runs ``(N, M)`` that are known without stored rows, else ``None``."""
        return None

    def require_all_rows(self) -> None:
        """Raise if only some rows of a target have scores."""
        return

    def numpy(self) -> NDArray[np.float32]:
        """Return all scores, ``(N, M)``."""
        out = np.empty(self.shape, np.float32)
        for start, tile in self.tiles():
            out[start : start + len(tile)] = tile
        return out


@final
@dataclass(frozen=True, eq=False)
class StoredMatrix(AbstractScoreMatrix):
    """Scores in a complete table with the column ``scores`` of shape ``(N, M)``."""

    _table: AbstractRowTable

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""
        return self._table.spec.num_rows, self._table.column(SCORES).width or 0

    def tiles(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the table's chunks, or those with a wanted row."""
        for chunk in range(self._table.num_chunks):
            start, stop = self._table.chunk_range(chunk)
            if wanted is None or wanted[start:stop].any():
                yield start, self._table.read_chunk(chunk, SCORES)

    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""
        return self._table.read_rows(SCORES, indices)

    def errors(self) -> NDArray[np.float32] | None:
        """Return the column of standard errors, if the table has one."""
        has_errors = any(column.name == ERRORS for column in self._table.spec.columns)
        return self._table.read(ERRORS) if has_errors else None


@final
@dataclass(frozen=True, eq=False)
class StreamedMatrix(AbstractScoreMatrix):
    """Scores that are computed from the stored rows on every read."""

    _source: ScoreSource
    _top: NDArray[np.float64] | None = None
    """The result of :func:`top_and_bottom`, if it is known."""
    _terms: Sequence[ScoreTerm] | None = None
    """One term per checkpoint, with M targets; ``None`` computes those of all targets on every read."""

    stored: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""
        num_targets = self._source.num_targets if self._terms is None else len(self._terms[0].targets)
        return self._source.num_rows, num_targets

    def tiles(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield tiles, or those with a wanted row, bitwise equal to those of a stored matrix."""
        yield from copied_ahead(self._source.tiles(self._terms, wanted=wanted))

    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""
        return self._source.scores_of(np.asarray(indices, dtype=np.int64), self._terms).cpu().numpy()

    def kept_top(self, k: int, sign: Sign) -> TopRows | None:
        """Return the k strongest rows of every target if at least k are cached, else ``None``."""
        if self._top is None or self._top.shape[-1] < min(k, self.shape[0]):
            return None
        indices, scores = self._top[_ENDS.index(sign)][:, :, :k]
        return TopRows(indices.astype(np.int64), scores.astype(np.float32))


@final
@dataclass(frozen=True, eq=False)
class HeldMatrix(AbstractScoreMatrix):
    """Scores in memory, ``(N, M)``."""

    _scores: NDArray[np.float32]
    _errors: NDArray[np.float32] | None = None
    """Their standard errors over runs, if they are a mean over runs."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""
        num_rows, num_targets = self._scores.shape
        return num_rows, num_targets

    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""
        return self._scores[np.asarray(indices, dtype=np.int64)]

    def errors(self) -> NDArray[np.float32] | None:
        """Return the standard errors, if they are known."""
        return self._errors


@final
@dataclass(frozen=True, eq=False)
class PartialMatrix(AbstractScoreMatrix):
    """Scores in memory of some train rows of every target; all others are NaN."""

    _num_rows: int
    _known: Sequence[TopRows]
    """Rows and scores of each target, rows ascending. They include the ``most`` most helpful and the ``most`` most
    harmful rows, or candidates for them."""
    _most: int
    """Number of rows that :meth:`kept_top` can return."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``."""
        return self._num_rows, len(self._known)

    def require_all_rows(self) -> None:
        """Raise if some rows have no score, because sums and choices among all rows would leave them out."""
        if any(len(rows) < self._num_rows for rows, _ in self._known):
            raise InvalidInputError(
                f"These scores hold the {self._most} most helpful and most harmful rows of every target, and groups, "
                "filters, weights and effects of sets (what_if, repair) need those of all rows. Compute them without k "
                "and refine."
            )

    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``, NaN where a score is not known."""
        wanted = np.asarray(indices, dtype=np.int64)
        out = np.full((len(wanted), len(self._known)), np.nan, np.float32)
        for target, (rows, scores) in enumerate(self._known):
            positions = np.searchsorted(rows, wanted).clip(max=len(rows) - 1)
            matches = rows[positions] == wanted
            out[matches, target] = scores[positions[matches]]
        return out

    def kept_top(self, k: int, sign: Sign) -> TopRows:
        """Return the k strongest of the known rows of every target; raises if fewer are known of each sign."""
        if k > self._most and self._most < self._num_rows:
            raise InvalidInputError(
                f"These scores hold the {self._most} most helpful and most harmful rows of every target, and top({k}) "
                "was requested. Compute them again with a larger k (or candidates)."
            )
        count = min(k, self._num_rows)
        best = [best_of(rows, sign, count) for rows in self._known]
        return TopRows(np.stack([one.indices for one in best]), np.stack([one.scores for one in best]))


def best_of(known: TopRows, sign: Sign, count: int) -> TopRows:
    """Return the strongest of some rows; of equal scores the lower row is first, as rows are ascending."""
    keys = -known.scores if sign == "helpful" else known.scores
    order = np.argsort(keys, kind="stable")[:count]
    return TopRows(known.indices[order], known.scores[order])


def top_and_bottom(
    source: ScoreSource, k: int, terms: Sequence[ScoreTerm] | None = None
) -> NDArray[np.float64]:
    """Return the k most helpful and most harmful rows of every target, ``(2, 2, M, min(k, N))``, from one pass.

    Axis 0 is helpful, harmful; axis 1 is row numbers, scores. The ranks of the source share the pass: each reads
    consecutive tiles, and the results are merged. Memory: one tile of scores and ``4 k`` numbers per target, for any N.
    """
    terms = source.terms() if terms is None else terms
    ranks = source.ranks
    tiles = source.tiles(terms, share=(ranks.rank, ranks.size))
    return top_and_bottom_of(tiles, len(terms[0].targets), k, ranks)


def top_and_bottom_of(
    tiles: Iterable[tuple[int, Tensor]], num_targets: int, k: int, ranks: Ranks
) -> NDArray[np.float64]:
    """Return the k highest and lowest scores of every target in the tiles of all ranks, as :func:`top_and_bottom`."""
    ends = [TopK(num_targets, k, sign=sign) for sign in _ENDS]
    has_rows = False
    for start, tile in tiles:
        for best in ends:
            best.update(start, tile)
        has_rows = True
    found = None
    if has_rows:
        found = np.array([[part.cpu().double().numpy() for part in best.result()] for best in ends])
    merged = ranks.merged(found, lambda one, other: merged_ends(one, other, k))
    assert merged is not None  # there is at least one row
    return merged


def merged_ends(
    one: NDArray[np.float64] | None, other: NDArray[np.float64] | None, k: int
) -> NDArray[np.float64] | None:
    """Return the merged top and bottom rows of two parts of the train rows; ``None`` is a part without rows."""
    if one is None or other is None:
        return other if one is None else one
    both = np.concatenate([one, other], axis=3)
    rows, scores = both.swapaxes(0, 1)
    order = np.lexsort((rows, scores * [[[-1.0]], [[1.0]]]))[:, None, :, :k]
    return np.take_along_axis(both, order, axis=3)


def checked_rows(rows: ArrayLike, shape: tuple[int, int], target: int | None = None) -> NDArray[np.int64]:
    """Return ``rows`` as int64, ``(n,)`` or ``(M, k)``; raise if a row of the ``(N, M)`` scores does not exist."""
    wanted = np.asarray(rows)
    num_rows, num_targets = shape
    fits = wanted.ndim == 1 or (wanted.ndim == 2 and target is None and len(wanted) == num_targets)
    whole = wanted.dtype.kind in "iu" and wanted.size > 0
    if not fits or not whole or wanted.min() < 0 or wanted.max() >= num_rows:
        raise InvalidInputError(
            f"rows must be whole numbers from 0 to {num_rows - 1}, (n,) or for all targets ({num_targets}, k), got "
            f"{wanted.dtype} of shape {wanted.shape}."
        )
    return wanted.astype(np.int64)
