"""One pass over the scores: the top rows of the targets on the page, and the histogram of all scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from trak_lite.core.validate import positive_int, target_number
from trak_lite.data.columns import Where, wanted_rows
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.linalg.topk import TopK, TopRows
from trak_lite.report.content import ReportedScores

MOST_TARGETS: Final = 100
"""Number of targets on the page if the user selects none."""
_HALF: Final = 512
"""Bins on either side of 0."""
_SMALLEST: Final = 2.0**-149
"""The smallest float32 above 0."""


def chosen_targets(scores: ReportedScores, targets: Sequence[int] | None) -> list[int]:
    """Return the selected targets, by default the first ones."""
    count = scores.shape[1]
    if targets is None:
        return list(range(min(count, MOST_TARGETS)))
    numbers = [target_number(target, count, scores.name) for target in targets]
    if not numbers or len(set(numbers)) < len(numbers):
        raise InvalidInputError(
            f"targets must be one or more different numbers from 0 to {count - 1}, got {list(targets)!r:.80}."
        )
    return numbers


@final
@dataclass(slots=True, eq=False)
class Histogram:
    """Counts of numbers in bins of equal width, which doubles when a number lies outside of all bins.

    Example:
        >>> histogram = Histogram()
        >>> histogram.add(np.array([-1.0, 0.25, 0.3]))
        >>> counts, edges = histogram.bars(4)
        >>> counts.tolist(), edges.tolist()
        ([1, 0, 2], [-1.0, -0.5, 0.0])
    """

    _half_range: float = field(init=False, default=_SMALLEST)
    _counts: NDArray[np.int64] = field(init=False, default_factory=lambda: np.zeros(2 * _HALF, np.int64))

    def add(self, values: NDArray[Any]) -> None:
        """Count numbers of any shape."""
        values = values.astype(np.float64)
        largest = float(np.abs(values).max(initial=0.0))
        if not np.isfinite(largest):
            raise NonFiniteError("A score is NaN or infinite. Check the features and the kernel.")
        while largest >= self._half_range:
            pairs = self._counts.reshape(-1, 2).sum(1)
            self._counts = np.pad(pairs, (_HALF // 2, _HALF // 2))  # 0 stays an edge
            self._half_range *= 2
        # Exact: the width is a power of 2.
        bins = np.floor(values.reshape(-1) * (_HALF / self._half_range)).astype(np.int64) + _HALF
        self._counts += np.bincount(bins, minlength=2 * _HALF)

    def bars(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the counts of at most ``most`` bins and their left edges, without empty bins at the ends."""
        filled = np.flatnonzero(self._counts)
        if not filled.size:
            return np.zeros(0, np.int64), np.zeros(0)
        step = 1
        while filled[-1] // step - filled[0] // step + 1 > most:
            step *= 2
        first, last = filled[0] // step, filled[-1] // step + 1
        counts = self._counts.reshape(-1, step).sum(1)[first:last]
        width = self._half_range / _HALF * step
        return counts, -self._half_range + width * np.arange(first, last)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Scores that a report displays."""

    targets: list[int]
    """The m targets on the page."""
    helpful: TopRows
    """Their most helpful rows, ``(m, k)``."""
    harmful: TopRows
    """Their most harmful rows, ``(m, k)``."""
    histogram: Histogram
    """Histogram of the scores of all targets."""

    @classmethod
    def of(
        cls, scores: ReportedScores, targets: Sequence[int] | None, *, k: int, where: Where | None = None
    ) -> Self:
        """Read the scores once; arguments as in :func:`write_report`. Memory: one tile, ``4 k`` numbers per target."""
        columns = scores.columns if isinstance(where, Mapping) else {}
        wanted = None if where is None else wanted_rows(where, columns, scores.shape[0])
        shown = chosen_targets(scores, targets)
        ends = [TopK(len(shown), positive_int(k=k), sign=sign) for sign in ("helpful", "harmful")]
        histogram = Histogram()
        done = 0
        for start, tile in scores.tiles(wanted):
            if wanted is not None:
                tile = tile[wanted[start : start + len(tile)]]
            histogram.add(tile)
            part = torch.from_numpy(np.ascontiguousarray(tile[:, shown]))
            for best in ends:
                best.update(done, part)
            done += len(tile)
        numbers = np.arange(scores.shape[0]) if wanted is None else np.flatnonzero(wanted)
        results = (best.result() for best in ends)
        helpful, harmful = (TopRows(numbers[rows.numpy()], values.numpy()) for rows, values in results)
        return cls(shown, helpful, harmful, histogram)
