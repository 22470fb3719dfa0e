"""Stored target sets: their scores, the strongest rows under a filter, self-influence. Reading needs no model.

Shapes: N train rows, M targets.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import known_names, one_of, target_number
from trak_lite.data.columns import Column
from trak_lite.errors import InvalidInputError, StateError, StoreError
from trak_lite.methods import AbstractMethod
from trak_lite.report.page import visible
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import HeldKernels

_HELD_BYTES: Final = 1 << 28
_MOST_HELD: Final = 64
_Held = TypeVar("_Held")


@final
@dataclass(eq=False)
class Sets:
    """The target sets of a store. Columns of scores that were read are held, the last ones in at most 256 MiB."""

    names: Callable[[], list[str]]
    """Returns the names of the stored target sets."""
    opened: Callable[[str], Scores]
    """Returns the scores of one of them."""
    columns: Mapping[str, Column]
    """Columns of the train data by name."""
    num_rows: int
    """N."""
    refuse_changes: Callable[[], None]
    """Raises if the store has other train data or columns than these."""
    _kernels: dict[AbstractMethod, HeldKernels] = field(init=False, default_factory=dict)
    """Shared by all scores of the first method, because factorising a kernel takes longer than all the rest."""
    _scores: OrderedDict[str, Scores] = field(init=False, default_factory=OrderedDict)
    _contents: dict[str, str | None] = field(init=False, default_factory=dict)
    """What the tables of held scores contained when they were opened."""
    _read: OrderedDict[tuple[str, int], NDArray[np.float32]] = field(init=False, default_factory=OrderedDict)
    _orders: OrderedDict[str, tuple[NDArray[np.float32], NDArray[np.int64]]] = field(
        init=False, default_factory=OrderedDict
    )

    def chosen(self, name: str) -> str:
        """Return the name of a stored set, the first one for an empty name."""
        names = self.names()
        if not names:
            raise InvalidInputError("The store has no scores yet. Score targets first: trak-lite run CONFIG.")
        return one_of(names, set=name) if name else names[0]

    def scores(self, name: str) -> Scores:
        """Return the scores of a stored set, also if another process has made it again."""
        scores = _held(self._scores, name, lambda: self._sharing(self.opened(name)), most=_MOST_HELD)
        if self._contents.setdefault(name, content := _content(scores)) == content:
            return scores
        self.forget(name)
        return self.scores(name)

    def held(self, name: str) -> Scores | None:
        """Return the scores of a set if they are held."""
        return self._scores.get(name)

    def hold(self, name: str, scores: Scores) -> None:
        """Hold scores that are not among the stored sets."""
        _held(self._scores, name, lambda: self._sharing(scores), most=_MOST_HELD)

    def forget(self, name: str) -> None:
        """Do not hold the scores of a set any more, because it was removed from the store, or made again."""
        for held in (self._scores, self._contents, self._orders):
            held.pop(name, None)
        for key in [key for key in self._read if key[0] == name]:
            del self._read[key]

    def _sharing(self, scores: Scores) -> Scores:
        """Return the scores; their source uses the shared kernels if it has any."""
        if scores.method.multiplies_rows and (not self._kernels or scores.method in self._kernels):
            scores.source.hold_kernels(self._kernels.setdefault(scores.method, {}))
        return scores

    def column(self, name: str, target: int) -> NDArray[np.float32]:
        """Return the scores of all train rows for one target, ``(N,)``."""
        scores = self.scores(name)
        number = target_number(target, scores.shape[1], name)

        def read() -> NDArray[np.float32]:
            return np.concatenate([np.array(tile[:, number]) for _, tile in scores.tiles()])

        most = max(1, min(_MOST_HELD, _HELD_BYTES // (4 * self.num_rows)))
        return _held(self._read, (name, number), read, most=most)

    def by_self_influence(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the self-influence of all train rows ``(N,)``, and the rows from the largest to the smallest."""
        scores = self.scores(name)

        def ordered() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            values = scores.self_influence()
            return values, np.argsort(-values, kind="stable")

        return _held(self._orders, name, ordered, most=2)

    def passing(self, filters: Mapping[str, str]) -> NDArray[np.bool_]:
        """Return a mask of the train rows with the given values in the given columns, ``(N,)``."""
        known_names(filters, list(self.columns), what="columns")
        mask = np.ones(self.num_rows, bool)
        for name, value in filters.items():
            mask &= self.having(name, value)
        return mask

    def having(self, name: str, value: str) -> NDArray[np.bool_]:
        """Return a mask of the train rows with a value in a column, as the column's text or as a page shows it."""
        column, shown = self.columns[name], visible(value)
        mask = column.matches(value)
        return (
            mask if mask.any() else column.matches(*(text for text in column.texts if visible(text) == shown))
        )

    def columns_of(self, row: int) -> list[tuple[str, str]]:
        """Return the names and values of the columns of a row."""
        return [(name, column.text_of(row)) for name, column in self.columns.items()]


def scatter_of(scores: NDArray[np.float32]) -> tuple[float, float]:
    """Return the smallest and the largest value to expect of N scores that only scatter, as normal numbers do.

    Median and quartiles give mean and spread, so that a few large scores do not widen the range.
    """
    low, middle, high = np.quantile(scores, [0.25, 0.5, 0.75]).tolist()
    reach = (high - low) / 1.349 * math.sqrt(2 * math.log(max(len(scores), 2)))
    return middle - reach, middle + reach


def _content(scores: Scores) -> str | None:
    """Return a digest of stored scores; ``None`` for others, and if the table is gone or not finished."""
    with contextlib.suppress(StateError, StoreError):  # created again for other rows, or gone
        return None if scores.entries is None else scores.entries.table().content_key()
    return None


def _held(held: OrderedDict[Any, _Held], key: Any, make: Callable[[], _Held], *, most: int) -> _Held:
    """Return a held value, or make and hold it; the one that was not used for longest is dropped."""
    if key not in held:
        held[key] = make()
    held.move_to_end(key)
    while len(held) > most:
        held.popitem(last=False)
    return held[key]
