"""The number of rows to take of each label.

Shapes: N train rows, G labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trak_lite._validate import one_of, some_of
from trak_lite.data.columns import Column
from trak_lite.errors import InvalidInputError


def quotas_of(groups: Column, k: int, quotas: str | Mapping[Any, int]) -> NDArray[np.int64]:
    """Return the number of rows to take of each label, ``(G,)``; they add up to k.

    Args:
        groups: Labels of the train rows.
        k: Number of rows to take, at most N.
        quotas: ``"equal"``, ``"proportional"``, or a number per label.

    Example:
        >>> groups = Column.of(list("aaaaab"), 6, "groups")
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


def _given(groups: Column, k: int, quotas: Mapping[Any, int]) -> NDArray[np.int64]:
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
