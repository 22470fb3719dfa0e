"""Results that take one pass over a matrix of scores: top rows, group sums, and scores at several dampings.

Shapes: N train rows, M targets, b rows of a tile, k top rows per target, L dampings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from trak_lite.core.validate import one_of, positive_int, real_at_least, target_number
from trak_lite.data.columns import Column
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.topk import TopK, TopRows, not_finite
from trak_lite.scoring.matrix import AbstractScoreMatrix, HeldMatrix, Sign, StreamedMatrix
from trak_lite.scoring.source import ScoreSource

Tiles: TypeAlias = Callable[[NDArray[np.bool_] | None], Iterator[tuple[int, NDArray[Any]]]]
"""As :meth:`trak_lite.Scores.tiles`."""


class GroupSums(NamedTuple):
    """Scores summed over groups of train rows, of targets, or both."""

    sums: NDArray[np.float64]
    """``(train groups, target groups)``; each ungrouped row or target is a group."""
    train_groups: NDArray[Any]
    """Label of each row of ``sums``."""
    target_groups: NDArray[Any]
    """Label of each column of ``sums``."""
    counts: NDArray[np.int64]
    """Number of scores in each of the ``sums``."""

    @property
    def means(self) -> NDArray[np.float64]:
        """``sums / counts``: the mean score of a row of the group for a target of the group."""
        return self.sums / self.counts


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowChoice:
    """The train rows to consider, and the weights of their scores."""

    wanted: NDArray[np.bool_] | None = None
    """``(N,)`` whether a row is considered; ``None`` considers all."""
    weights: NDArray[np.float64] | None = None
    """``(N,)`` factor of each row's scores; ``None`` for 1."""

    def parts(self, tiles: Tiles) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield ``(row numbers, (b, M) scores)`` of the wanted rows in order, multiplied by the weights in float64."""
        for start, tile in tiles(self.wanted):
            rows = np.arange(start, start + len(tile))
            if self.wanted is not None:
                here = self.wanted[rows]
                rows, tile = rows[here], tile[here]
            yield rows, tile if self.weights is None else tile * self.weights[rows, None]


def chosen_top(
    matrix: AbstractScoreMatrix, k: int, choice: RowChoice, *, target: int | None = None, sign: Sign
) -> TopRows:
    """Return the k strongest wanted rows by weighted score, ``(M, k)``, or ``(1, k)`` for one target.

    Of equal scores the lower row is first. If fewer rows are wanted, all of them are returned.
    """
    matrix.require_all_rows()
    columns = slice(None) if target is None else slice(target, target + 1)
    best = TopK(matrix.shape[1] if target is None else 1, k, sign=sign)
    done = 0  # TopK numbers the wanted rows only: its rows are consecutive
    for rows, scores in choice.parts(matrix.tiles):
        part = np.array(scores[:, columns])
        if not np.isfinite(part).all():
            row, column = np.argwhere(~np.isfinite(part))[0].tolist()
            raise not_finite(int(rows[row]), column if target is None else target, float(part[row, column]))
        best.update(done, torch.from_numpy(part))
        done += len(rows)
    indices, values = (tensor.cpu().numpy() for tensor in best.result())
    numbers = indices if choice.wanted is None else np.flatnonzero(choice.wanted)[indices]
    return TopRows(numbers, values.astype(np.float32))


def strongest(scores: NDArray[np.float32], mask: NDArray[np.bool_], k: int, sign: Sign) -> TopRows:
    """Return the k strongest of the rows in a mask, with their scores, each ``(k,)`` or shorter."""
    if not mask.any():
        return TopRows(np.flatnonzero(mask), scores[:0])
    rows = chosen_top(HeldMatrix(scores[:, None]), k, RowChoice(mask), sign=sign)
    return TopRows(rows.indices[0], rows.scores[0])


def group_sums(
    matrix: AbstractScoreMatrix, train_labels: Column | None, target_labels: Column | None, choice: RowChoice
) -> GroupSums:
    """Return scores summed over groups, in one pass and float64.

    Memory: one tile in float64, and the sums. Without labels, each wanted row or each target is a group; groups without
    a wanted row are left out.
    """
    matrix.require_all_rows()
    num_rows, num_targets = matrix.shape
    train = _each(num_rows) if train_labels is None else train_labels
    if choice.wanted is not None:  # without the labels that no wanted row has; the other rows have any place
        kept = np.bincount(train.places[choice.wanted], minlength=len(train.labels)) > 0
        train = Column(train.labels[kept], (np.cumsum(kept) - 1).clip(min=0)[train.places])
    targets = _each(num_targets) if target_labels is None else target_labels
    train_of, target_of = torch.from_numpy(train.places), torch.from_numpy(targets.places)
    sums = torch.zeros(len(train.labels), len(targets.labels), dtype=torch.float64, device="cpu")
    for rows, tile in choice.parts(matrix.tiles):
        scores = torch.from_numpy(tile.astype(np.float64))
        if target_labels is not None:
            empty = torch.zeros(len(tile), len(targets.labels), dtype=torch.float64, device="cpu")
            scores = empty.index_add_(1, target_of, scores)
        sums.index_add_(0, train_of[torch.from_numpy(rows)], scores)
    indices = train.places if choice.wanted is None else train.places[choice.wanted]
    sizes = np.bincount(indices, minlength=len(train.labels))
    counts = np.multiply.outer(sizes, targets.sizes).astype(np.int64)
    return GroupSums(sums.numpy(), train.labels, targets.labels, counts)


def _each(count: int) -> Column:
    """Return the column that makes each row a group."""
    return Column(np.arange(count), np.arange(count))


@final
class DampingPath:
    """Scores at several dampings, from one sum over the train rows per checkpoint.

    ``source`` gives rows and settings; the method's damping is ignored. See :meth:`trak_lite.Scores.damping_path`.

    Every access reads the train rows once for all dampings. Memory: the targets multiplied by (H + lambda I)^-1 at
    every damping, ``C * L * M * K`` numbers, and one tile.
    """

    def __init__(
        self, source: ScoreSource, name: str, dampings: Sequence[float | None], targets: slice
    ) -> None:
        self.dampings = tuple(
            None if damping is None else real_at_least(0.0, damping=float(damping)) for damping in dampings
        )
        if not self.dampings:
            raise InvalidInputError("dampings is empty. Give at least one, such as [0.1, 1, 10].")
        self._name = name
        self._matrix = StreamedMatrix(source, _terms=source.path_terms(self.dampings, targets))

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(L, N, M)``: dampings, train rows, targets."""
        num_rows, num_columns = self._matrix.shape
        return len(self.dampings), num_rows, num_columns // len(self.dampings)

    def __repr__(self) -> str:
        _, num_rows, num_targets = self.shape
        return (
            f"DampingPath({self._name!r}: {num_rows} train rows x {num_targets} targets at {self.dampings})"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Let ``np.asarray(path)`` read all scores, ``(L, N, M)``."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def numpy(self, *, target: int | None = None) -> NDArray[np.float32]:
        """Return the scores at every damping, ``(L, N, M)``, or ``(L, N)`` for one target."""
        num_dampings, num_rows, num_targets = self.shape
        column = slice(None) if target is None else target_number(target, num_targets, self._name)
        shape = self.shape if target is None else (num_dampings, num_rows)
        out = np.empty(shape, np.float32)
        for start, tile in self._matrix.tiles():
            scores = tile.reshape(len(tile), num_dampings, num_targets)
            out[:, start : start + len(tile)] = scores[:, :, column].swapaxes(0, 1)
        return out

    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows at every damping, ``(L, len(indices), M)``."""
        num_dampings, _, num_targets = self.shape
        tile = self._matrix.rows(indices)
        return tile.reshape(len(tile), num_dampings, num_targets).swapaxes(0, 1)

    def top(self, k: int, *, target: int | None = None, sign: Sign = "helpful") -> TopRows:
        """Return the k most helpful (or harmful) rows at every damping, ``(L, M, k)``, or ``(L, k)`` for one target."""
        num_dampings, _, num_targets = self.shape
        k = positive_int(k=k)
        one_of(("helpful", "harmful"), sign=sign)
        number = None if target is None else target_number(target, num_targets, self._name)
        best, shape = chosen_top(self._matrix, k, RowChoice(), sign=sign), (num_dampings, num_targets, -1)
        rows = TopRows(best.indices.reshape(shape), best.scores.reshape(shape))
        return rows if number is None else TopRows(rows.indices[:, number], rows.scores[:, number])
