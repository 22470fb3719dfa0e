"""Labels of train rows and of targets, and the number of rows to take of each label.

Shapes: N train rows, M targets, G labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite._validate import known_names, one_of, some_of
from trak_lite.errors import InvalidInputError

__all__ = ["Grouping", "column_of", "quotas_of"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Rows or targets with a label each."""

    labels: NDArray[Any]
    """``(G,)`` distinct labels, sorted."""
    places: NDArray[np.int64]
    """Index of each row's label among them."""

    @classmethod
    def of(cls, labels: ArrayLike, count: int, what: str) -> Self:
        """Number the labels of ``count`` rows.

        Raises:
            InvalidInputError: If there is not one label per row, or the labels cannot be sorted.
        """
        values = np.asarray(labels)
        if values.shape != (count,):
            raise InvalidInputError(
                f"{what} must hold one label for each of {count}, got an array of shape {values.shape}."
            )
        try:
            distinct, places = np.unique(values, return_inverse=True)
        except TypeError as error:
            raise InvalidInputError(
                f"The labels in {what} are of several types, which cannot be sorted ({error}). Use one type, such as "
                "strings, without None."
            ) from error
        return cls(distinct, places.astype(np.int64))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """``(G,)`` number of rows of each label."""
        return np.bincount(self.places, minlength=len(self.labels)).astype(np.int64)


def column_of(data: Any, name: str) -> ArrayLike:
    """Return a column of a ``datasets.Dataset``, a pandas frame or a mapping of arrays.

    Raises:
        InvalidInputError: If the data have no named columns.
        UnknownNameError: If there is no such column; the message lists the nearest.
    """
    names = next(
        (found for kind in ("column_names", "columns") if (found := getattr(data, kind, None)) is not None),
        data.keys() if isinstance(data, Mapping) else None,
    )
    if names is None:
        raise InvalidInputError(
            f"groups={name!r} names a column, and {type(data).__name__} has no named columns. Give data= as a "
            "datasets.Dataset, a pandas frame or a mapping of arrays, or the labels themselves as groups."
        )
    known_names([name], [str(one) for one in names], what="columns")
    return np.asarray(data[name])


def quotas_of(groups: Grouping, k: int, quotas: str | Mapping[Any, int]) -> NDArray[np.int64]:
    """Return the number of rows to take of each label, ``(G,)``; they add up to k.

    Args:
        groups: Labels of the train rows.
        k: Number of rows to take, at most N.
        quotas: ``"equal"``, ``"proportional"``, or a number per label.

    Raises:
        InvalidInputError: If a mapping has an unknown label, more rows than a label has, or does not add up to k.

    Example:
        >>> groups = Grouping.of(list("aaaaab"), 6, "groups")
        >>> quotas_of(groups, 4, "equal").tolist()
        [3, 1]
    """
    if isinstance(quotas, Mapping):
        return _given(groups, k, quotas)
    if one_of(("equal", "proportional"), quotas=quotas) == "equal":
        return _equal(groups.sizes, k)
    return _proportional(groups.sizes, k)


def _equal(sizes: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Share k equally. Labels with fewer rows give all of them; the first of the others take what does not divide."""
    level, above = 0, k  # bounds of the largest number that every label can give, if it has as many rows
    while above - level > 0:
        middle = (level + above + 1) // 2
        level, above = (middle, above) if np.minimum(sizes, middle).sum() <= k else (level, middle - 1)
    taken = np.minimum(sizes, level)
    taken[np.flatnonzero(sizes > level)[: k - int(taken.sum())]] += 1
    return taken


def _proportional(sizes: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Share k in proportion to the sizes, by largest remainders; of equal remainders the first label gets more."""
    total = int(sizes.sum())
    exact = [int(size) * k for size in sizes]  # Python integers, as the products may exceed 64 bits
    taken = np.array([product // total for product in exact], dtype=np.int64)
    remainders = np.array([-(product % total) for product in exact], dtype=np.int64)
    taken[np.argsort(remainders, kind="stable")[: k - int(taken.sum())]] += 1
    return taken


def _given(groups: Grouping, k: int, quotas: Mapping[Any, int]) -> NDArray[np.int64]:
    sizes = dict(zip(groups.labels.tolist(), groups.sizes.tolist(), strict=True))
    wrong = [
        f"{label!r}: {count!r} of {sizes.get(label, 0)}"
        for label, count in quotas.items()
        if isinstance(count, bool)
        or not isinstance(count, int | np.integer)
        or not 0 <= count <= sizes.get(label, 0)
    ]
    if wrong:
        raise InvalidInputError(
            f"quotas must be whole numbers from 0 to the number of rows with the label, got {some_of(wrong)}."
        )
    total = sum(quotas.values())
    if total != k:
        raise InvalidInputError(f"quotas add up to {total}, and k is {k}. Make them equal.")
    return np.array([quotas.get(label, 0) for label in sizes], dtype=np.int64)
