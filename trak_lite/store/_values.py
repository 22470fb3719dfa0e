"""Validation of rows and arrays before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import some_of
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.store._columns import Column, StoredRows, TableSpec
from trak_lite.store._grid import Run, contiguous_runs
from trak_lite.store._names import path_parts

_LONGEST_KEY = 1024
_KINDS = "biuf"


_Rows = range | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Validated and encoded rows, ready to be written."""

    runs: Mapping[int, Sequence[Run]]
    """Runs of consecutive rows, by chunk."""
    arrays: tuple[NDArray[Any], ...]
    """Stored arrays of the table, C-contiguous, with rows in the order of the runs."""


def check_block(
    rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]], spec: TableSpec
) -> RowBlock:
    """Validate rows and values of a ``put`` and return them in stored form; see :meth:`AbstractRowTable.put`."""
    inputs = _given_arrays(values, spec)
    index = _row_index(rows, len(inputs[0]), spec.num_rows)
    arrays = tuple(
        stored
        for array, column in zip(inputs, spec.columns, strict=True)
        for stored in StoredRows.encode(column, _cast(array, column, index)).arrays
    )
    if isinstance(index, range):
        return RowBlock(_by_chunk(contiguous_runs(index.start, len(index), spec.chunk_rows)), arrays)
    order = np.argsort(index)
    ascending = index[order]
    borders = [0, *(np.flatnonzero(np.diff(ascending) != 1) + 1).tolist(), len(ascending)]
    runs = (
        run
        for start, stop in itertools.pairwise(borders)
        for run in contiguous_runs(int(ascending[start]), stop - start, spec.chunk_rows, offset=start)
    )
    return RowBlock(_by_chunk(runs), tuple(np.ascontiguousarray(array[order]) for array in arrays))


def _given_arrays(values: Mapping[str, NDArray[Any]], spec: TableSpec) -> list[NDArray[Any]]:
    names = [column.name for column in spec.columns]
    if not isinstance(values, Mapping) or set(values) != set(names):
        actual = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
        raise InvalidInputError(
            f"Expected values for the columns {names}, got {actual}. Give one array per column."
        )
    arrays = [_given_array(values[column.name], column) for column in spec.columns]
    counts = {column.name: len(array) for column, array in zip(spec.columns, arrays, strict=True)}
    if len(set(counts.values())) > 1:
        raise InvalidInputError(
            f"The columns have different numbers of rows: {counts}. Give the same rows for all columns."
        )
    if not len(arrays[0]):
        raise InvalidInputError("There is no row in the values. Put at least one row at a time.")
    return arrays


def _given_array(array: object, column: Column) -> NDArray[Any]:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInputError(
            f"{column.name} must be a NumPy array of a real floating dtype, got {kind}. Convert it first."
        )
    expected = 1 if column.width is None else 2
    if array.ndim != expected or (expected == 2 and array.shape[1] != column.width):
        shape = "(b,)" if column.width is None else f"(b, {column.width})"
        raise InvalidInputError(
            f"{column.name} must have the shape {shape}, got {array.shape}. "
            "Give one row per sample and the width that the table was created with."
        )
    return array


def _row_index(rows: object, count: int, num_rows: int) -> _Rows:
    """Return the row of each value: a range if the rows are consecutive, else an array."""
    index: _Rows
    if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
        index = range(int(rows), int(rows) + count)
    else:
        index = _listed_rows(rows, count)
    low, high = (index.start, index.stop - 1) if isinstance(index, range) else (index.min(), index.max())
    if low < 0 or high >= num_rows:
        raise InvalidInputError(
            f"Rows {low} to {high} do not fit into a table of {num_rows} rows. Expected rows of 0 to {num_rows - 1}."
        )
    return index


def _listed_rows(rows: Any, count: int) -> _Rows:
    listed = np.asarray(rows)
    if listed.ndim != 1 or listed.dtype.kind not in "iu" or len(listed) != count:
        raise InvalidInputError(
            f"rows must be the first row of a run, or one integer per value ({count} of them), "
            f"got {listed.dtype} of shape {listed.shape}."
        )
    index: NDArray[np.int64] = listed.astype(np.int64)
    if len(index) == 1 or (np.diff(index) == 1).all():
        return range(int(index[0]), int(index[-1]) + 1)
    distinct, times = np.unique(index, return_counts=True)
    if len(distinct) < count:
        raise InvalidInputError(
            f"Rows are repeated in one put: {some_of(distinct[times > 1])}. Give each row once."
        )
    return index


def _cast(array: NDArray[Any], column: Column, index: _Rows) -> NDArray[Any]:
    """Cast values to the column's ``value_dtype``, little-endian on every machine."""
    dtype = np.dtype(column.value_dtype).newbyteorder("<")
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is reported below, with row numbers
        cast: NDArray[Any] = np.ascontiguousarray(array, dtype=dtype)
    # NumPy emulates isfinite for float16; testing the exponent bits is 20 times faster
    is_half = dtype.itemsize == 2
    if not (int((cast.view("<u2") & 0x7FFF).max()) < 0x7C00 if is_half else np.isfinite(cast).all()):
        _raise_non_finite(array, cast, column, np.asarray(index))
    return cast


def _raise_non_finite(
    array: NDArray[Any], cast: NDArray[Any], column: Column, index: NDArray[np.int64]
) -> None:
    finite_before = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if not finite_before.all():
        raise NonFiniteError(
            f"{column.name} is NaN or infinite in rows {some_of(index[~finite_before])}. Nothing was written. "
            "If they are products of rows, these are too large for float32: multiply f by a constant."
        )
    overflown = ~np.isfinite(cast).reshape(len(cast), -1).all(axis=1)
    advice = " Use dtype float32." if column.dtype == "float16" else ""
    raise NonFiniteError(
        f"{column.name} does not fit into {cast.dtype.name} in rows {some_of(index[overflown])}: the largest "
        f"magnitude is {np.abs(array[overflown]).max():.4g}, the limit {float(np.finfo(cast.dtype).max):.4g}. "
        f"Nothing was written.{advice}"
    )


def _by_chunk(ascending: Iterable[Run]) -> dict[int, list[Run]]:
    return {chunk: list(runs) for chunk, runs in itertools.groupby(ascending, lambda run: run.chunk)}


def check_derived(name: str, key: str, array: NDArray[Any]) -> None:
    """Raise InvalidInputError for a bad name, a key that is too long, or a non-numeric array."""
    path_parts(name, what="cache")
    if not isinstance(key, str) or len(key) > _LONGEST_KEY:
        raise InvalidInputError(
            f"A cache key must be a string of at most {_LONGEST_KEY} characters, got {str(key)[:40]!r}. Use a digest."
        )
    if not isinstance(array, np.ndarray) or array.dtype.kind not in _KINDS:
        raise InvalidInputError(
            f"Only arrays of numbers can be stored, got {getattr(array, 'dtype', type(array))}."
        )
