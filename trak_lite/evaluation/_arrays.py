"""Input checks and standard forms of arrays, and sums of rows."""

from __future__ import annotations

import math
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.errors import InvalidInputError, NonFiniteError

_COLUMNS_AT_ONCE = 64


def finite_array(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return a finite float64 array of any shape."""
    array = np.asarray(values, dtype=np.float64)
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = bad[0].tolist()
        raise NonFiniteError(
            f"{len(bad)} of {array.size} values of {name} are NaN or infinite, first at "
            f"{where[0] if len(where) == 1 else where}."
        )
    return array


def finite_matrix(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return a finite float64 matrix with at least one row and one column."""
    array = finite_array(values, name)
    if array.ndim != 2 or not array.size:
        raise InvalidInputError(f"{name} must be a matrix that is not empty, got shape {array.shape}.")
    return array


def exact_sums(values: NDArray[np.float64], members: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the sums of subsets ``(S, N)`` of the rows of a matrix ``(N, M)``, exact up to one rounding each.

    Example:
        >>> exact_sums(np.array([[1e30], [0.5], [-1e30]]), np.array([[True, True, True]])).tolist()
        [[0.5]]
    """
    if values.shape[1] > _COLUMNS_AT_ONCE:  # the parts take three times the memory of the values
        columns = range(0, values.shape[1], _COLUMNS_AT_ONCE)
        sums = [exact_sums(values[:, first : first + _COLUMNS_AT_ONCE], members) for first in columns]
        return np.concatenate(sums, axis=1)
    if math.isinf(2.0 * len(values) * float(np.abs(values).max())):
        raise NonFiniteError(
            "Sums of the scores are beyond float64. Multiply the scores by a small constant."
        )
    left, counts, parts = values, members.astype(np.float64), list[NDArray[np.float64]]()
    while not parts or left.any():
        # Products of 0 or 1 with multiples of such a unit have exact sums in float64.
        unit = np.frexp(np.abs(left).max(axis=0))[1] + len(values).bit_length() - 53
        part = np.ldexp(np.rint(np.ldexp(left, -unit)), unit)
        parts.append(counts @ part)
        left = left - part
    if len(parts) <= 2:
        both: NDArray[np.float64] = np.sum(parts, axis=0)
        return both
    flat = zip(*(part.flat for part in parts), strict=True)
    return np.array([math.fsum(one) for one in flat]).reshape(parts[0].shape)


def coverage(**named: object) -> float:
    """Return the one keyword value as a float after checking that it lies between 0 and 1."""
    ((name, value),) = named.items()
    if not isinstance(value, Real) or not 0.0 < float(value) < 1.0:
        raise InvalidInputError(f"{name} must lie between 0 and 1, got {value!r}.")
    return float(value)
