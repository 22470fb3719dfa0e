"""Shape of a table, its columns, and the storage of their rows: as floats or quantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.store._quantised import QUANTISATION, QUANTISED, dequantise, quantise

DTYPES = ("float32", "float16", *QUANTISED)
"""Allowed values of ``Column.dtype``."""

_BLOCK_BYTES = 2 << 20  # so that dequantised rows fit into the CPU cache
_FEWEST_BLOCK_ROWS, _MOST_BLOCK_ROWS = 64, 256

_RECIPES = {
    "int8": ("scale = group['{name}_scale'][:]", "rows = group['{name}'][:] * scale[:, None]"),
    "int4": (
        "packed, scale = group['{name}'][:], group['{name}_scale'][:]",
        "numbers = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)[:, :{width}]",
        "rows = (numbers.astype('float32') - 8) * scale[:, None]",
    ),
}
"""NumPy lines that decode a quantised array to float32; written to the attributes of the zarr array."""


def dtype_fingerprint(dtype: str) -> dict[str, Any]:
    """Return the fingerprint keys that determine how features are rounded to a dtype."""
    return {"dtype": dtype, **({"quantisation": QUANTISATION} if dtype in QUANTISED else {})}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array on disk: ``(num_rows, width)``, or ``(num_rows,)`` where ``width`` is ``None``."""

    name: str
    width: int | None
    dtype: str
    """NumPy name."""
    fill: float
    """Fill value where no row is stored: NaN for floats; -128 for int8 and 0 for packed int4, whose scale is NaN."""

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the bytes on disk: little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return (self.width or 1) * self.stored_dtype.itemsize

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the array shape for a number of rows."""
        return (rows,) if self.width is None else (rows, self.width)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: ``(num_rows, width)``, or ``(num_rows,)`` where ``width`` is ``None``.

    Its dtype is ``"float32"`` or ``"float16"``, or it is quantised: ``"int8"`` or ``"int4"``. A quantised column is
    written and read as float32. It is stored as integers (int4: two per byte) and an array ``<name>_scale`` with one
    float32 per row. A row is read as integer times scale; the error is at most half the scale. The NumPy lines that
    decode such a column with plain zarr are in the array's attributes::

        group = zarr.open_group("run.zarr/ckpt-0", mode="r")
        scale = group["features_scale"][:]
        rows = group["features"][:] * scale[:, None]

    and for int4::

        packed, scale = group["features"][:], group["features_scale"][:]
        numbers = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)[:, :width]
        rows = (numbers.astype("float32") - 8) * scale[:, None]

    Example:
        >>> [Column("features", 2048, dtype).row_bytes for dtype in ("float32", "float16", "int8", "int4")]
        [8192, 4096, 2052, 1028]
    """

    name: str
    width: int | None
    dtype: str

    @property
    def quantised(self) -> bool:
        """Whether rows are stored as integers with a scale."""
        return self.dtype in QUANTISED

    @property
    def value_dtype(self) -> str:
        """NumPy name of the dtype of the rows when read."""
        return "float32" if self.quantised else self.dtype

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The stored arrays; the first one has the name of the column."""
        if not self.quantised:
            return (StoredArray(self.name, self.width, self.dtype, np.nan),)
        width = self.width or 1
        numbers = (
            StoredArray(self.name, width, "int8", -128)
            if self.dtype == "int8"
            else StoredArray(self.name, -(-width // 2), "uint8", 0)
        )
        return numbers, StoredArray(f"{self.name}_scale", None, "float32", np.nan)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk, including its scale."""
        return sum(array.row_bytes for array in self.arrays)

    @property
    def recipe(self) -> tuple[str, ...]:
        """NumPy lines that decode a quantised column to float32 from its zarr ``group``; empty if not quantised."""
        lines = _RECIPES.get(self.dtype, ())
        return tuple(line.format(name=self.name, width=self.width) for line in lines)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Shape of a table. All columns share the chunk grid and the record of done rows."""

    num_rows: int
    columns: tuple[Column, ...]
    chunk_rows: int
    """Rows per chunk. A chunk is the unit of committing, locking and memory mapping."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that determine the rows; compared key by key by ``create_table`` if the table exists."""

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The stored arrays of all columns, in column order."""
        return tuple(array for column in self.columns for array in column.arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk, over all columns."""
        return sum(column.row_bytes for column in self.columns)


@final
@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one column as stored. All stores use the same bytes for the same rows.

    Example:
        >>> rows = StoredRows.encode(Column("features", 3, "int8"), np.array([[254.0, -80.9, 0.0]], np.float32))
        >>> rows.arrays
        (array([[127, -40,   0]], dtype=int8), array([2.], dtype=float32))
        >>> rows.decode()
        array([[254., -80.,   0.]], dtype=float32)
    """

    column: Column
    arrays: tuple[NDArray[Any], ...]
    """One array for each of ``column.arrays``."""

    @classmethod
    def encode(cls, column: Column, rows: NDArray[Any]) -> Self:
        """Return the stored form of rows: ``(b, width)`` or ``(b,)``, finite, in the column's ``value_dtype``."""
        if not column.quantised:
            return cls(column, (rows,))
        numbers, scales = quantise(rows, column.dtype)
        return cls(column, (numbers, scales.astype("<f4", copy=False)))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, rows: slice | NDArray[Any]) -> StoredRows:
        return StoredRows(self.column, tuple(array[rows] for array in self.arrays))

    def decode(self) -> NDArray[Any]:
        """Return the rows in the column's ``value_dtype``: the stored array itself, or a new one if quantised."""
        return self._decode_into(self._buffer(len(self))) if self.column.quantised else self.arrays[0]

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield ``(first row, rows)``: one block if stored as floats, else blocks of 64 to 256 rows.

        Quantised blocks share one buffer: the next block overwrites it. Do not write to the blocks.
        """
        if not self.column.quantised:
            yield 0, self.decode()
            return
        by_bytes = _BLOCK_BYTES // (4 * (self.column.width or 1))
        size = max(_FEWEST_BLOCK_ROWS, min(_MOST_BLOCK_ROWS, by_bytes))
        buffer = self._buffer(min(size, len(self)))
        for start in range(0, len(self), size):
            rows = self[start : start + size]._decode_into(buffer)
            rows.flags.writeable = False
            yield start, rows

    def _buffer(self, rows: int) -> NDArray[np.float32]:
        width = self.arrays[0].shape[1] * (2 if self.column.dtype == "int4" else 1)
        return np.empty((rows, width), np.float32)

    def _decode_into(self, out: NDArray[np.float32]) -> NDArray[np.float32]:
        numbers, scales = self.arrays
        return dequantise(numbers, scales, self.column.dtype, self.column.width or 1, out)
