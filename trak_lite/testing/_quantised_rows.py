"""Fixtures of the conformance kit for stores, and its laws of quantised columns.

The reference of these laws uses exact fractions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, Manifest, TableSpec

__all__ = ["MANIFEST", "QuantisedRowTests"]

MANIFEST = Manifest({"proj_dim": 3, "projector": {"kind": "rademacher", "seed": 0}}, {"trak_lite": "test"})
_LARGEST = {"int8": 127, "int4": 7}
_DTYPES = pytest.mark.parametrize("dtype", list(_LARGEST))


def _spec(dtype: str, width: int = 5, num_rows: int = 11, chunk_rows: int = 4) -> TableSpec:
    columns = (Column("features", width, dtype), Column("q", None, "float32"))
    return TableSpec(num_rows, columns, chunk_rows, {"checkpoint": "abc"})


def _values(rows: Any, width: int = 5, num_rows: int = 11, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return rows of many magnitudes, one of them zero, others half way between two integers."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((num_rows, width)) * 10.0 ** rng.integers(-30, 37, (num_rows, 1))
    matrix[1::4] = 0.5 * rng.integers(-13, 14, (len(matrix[1::4]), width))
    matrix[1::8, 0], matrix[5::8, 0] = 7, -127
    matrix[2] = 0
    vector = rng.standard_normal(num_rows).astype(np.float32)
    return {"features": matrix.astype(np.float32)[rows], "q": vector[rows]}


def _reference(row: NDArray[np.float32], dtype: str) -> tuple[list[int], Fraction]:
    """Return the integers and the scale of a row."""
    mantissa, exponent = np.frexp(np.float32(np.abs(row).max()) / np.float32(_LARGEST[dtype]))
    scale = Fraction(int(mantissa * 2**16)) * Fraction(2) ** (int(exponent) - 16)
    if scale < Fraction(2) ** -126:
        return [0] * len(row), Fraction(0)
    return [round(Fraction(float(value)) / scale) for value in row], scale


def _expected(rows: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    found = [_reference(row, dtype) for row in rows]
    return np.array([[float(number * scale) for number in numbers] for numbers, scale in found], np.float32)


def _fill(table: AbstractRowTable, width: int = 5) -> AbstractRowTable:
    num_rows = table.spec.num_rows
    table.put(0, _values(slice(0, num_rows), width, num_rows))
    return table


class QuantisedRowTests(ABC):
    """Laws of columns that are stored as integers with one scale per row; each test gets a fresh folder."""

    @abstractmethod
    def create(self, path: str, manifest: Manifest) -> AbstractFeatureStore:
        """Create a store at the path, or open an existing one for writing."""

    @abstractmethod
    def open(self, path: str, mode: Literal["r", "r+"]) -> AbstractFeatureStore:
        """Open the existing store at the path."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        """Path of the store."""
        return str(tmp_path / "run.zarr")

    @pytest.fixture
    def store(self, path: str) -> AbstractFeatureStore:
        """An empty store."""
        return self.create(path, MANIFEST)

    @_DTYPES
    @pytest.mark.parametrize("width", [1, 4, 5])
    @pytest.mark.parametrize("batch", [2, 11])
    def test_a_quantised_row_is_its_integers_times_its_scale(
        self, path: str, store: AbstractFeatureStore, dtype: str, width: int, batch: int
    ) -> None:
        """All ways of reading give the reference's bits; the column that is not quantised is unchanged."""
        table = store.create_table("ckpt-0", _spec(dtype, width))
        for start in range(0, 11, batch):
            table.put(start, _values(slice(start, start + batch), width))

        read = self.open(path, "r").open_table("ckpt-0")
        values = _values(slice(0, 11), width)
        expected = _expected(values["features"], dtype)
        assert read.read("features").dtype == np.float32
        np.testing.assert_array_equal(read.read("features"), expected)
        np.testing.assert_array_equal(read.read_rows("features", [9, 0, 4, 9]), expected[[9, 0, 4, 9]])
        np.testing.assert_array_equal(read.read_chunk(2, "features"), expected[8:])
        np.testing.assert_array_equal(np.concatenate([x for _, x in read.chunks("features")]), expected)
        np.testing.assert_array_equal(read.read("q"), values["q"])
        assert read.read_rows("features", []).shape == (0, width)

    @_DTYPES
    def test_a_quantised_entry_is_off_by_half_the_scale_at_most(
        self, store: AbstractFeatureStore, dtype: str
    ) -> None:
        """The bound holds without a tolerance, also for the largest rows of float32."""
        rows = _values(slice(0, 400), 5, 400)
        rows["features"][3] = np.finfo(np.float32).max * np.array([1, -1, 0.5, 0.01, -0.3], np.float32)
        table = store.create_table("ckpt-0", _spec(dtype, 5, 400, 64))
        table.put(0, rows)

        for put, read in zip(rows["features"], table.read("features"), strict=True):
            _, scale = _reference(put, dtype)
            errors = [abs(Fraction(float(a)) - Fraction(float(b))) for a, b in zip(put, read, strict=True)]
            assert max(errors) <= scale / 2

    @_DTYPES
    def test_rows_too_small_for_a_scale_are_zero(self, store: AbstractFeatureStore, dtype: str) -> None:
        """Rows below the largest integer times the smallest normal float32 are zero; rows at this limit are not."""
        edge = np.float32(_LARGEST[dtype] * 2.0**-126)
        rows = np.array([[edge, -edge], [np.nextafter(edge, np.float32(0)), 0], [1e-45, 0]], np.float32)
        table = store.create_table("ckpt-0", _spec(dtype, 2, 3))
        table.put(0, {"features": rows, "q": np.zeros(3, np.float32)})

        np.testing.assert_array_equal(table.read("features"), [[edge, -edge], [0, 0], [0, 0]])

    @_DTYPES
    def test_what_was_read_is_stored_as_the_same_bytes(self, store: AbstractFeatureStore, dtype: str) -> None:
        """Reading a table and putting its values into another one gives the same content key and checksums."""
        table = _fill(store.create_table("ckpt-0", _spec(dtype)))
        copy = store.create_table("ckpt-1", _spec(dtype))
        copy.put(0, {name: table.read(name) for name in ("features", "q")})

        assert copy.content_key() == table.content_key()
        assert copy.checksums(2) == table.checksums(2)

    @_DTYPES
    def test_values_are_cast_to_float32_before_they_are_quantised(
        self, store: AbstractFeatureStore, dtype: str
    ) -> None:
        """Input may be float64 in any memory order; changing the buffer after ``put`` has no effect."""
        wide = np.asfortranarray(np.random.default_rng(0).standard_normal((11, 5)))
        expected = _expected(wide.astype(np.float32), dtype)
        table = store.create_table("ckpt-0", _spec(dtype))
        table.put(np.arange(11)[::-1], {"features": wide[::-1], "q": wide[::-1, 0]})
        wide[:] = 0

        np.testing.assert_array_equal(table.read("features"), expected)

    @_DTYPES
    @pytest.mark.parametrize(
        ("number", "message"),
        [
            (np.nan, r"features is NaN or infinite in rows 3\."),
            (np.inf, r"features is NaN or infinite in rows 3\."),
            (1e39, r"features does not fit into float32 in rows 3: the largest magnitude is 1e\+39"),
        ],
    )
    def test_rows_without_a_finite_scale_are_refused(
        self, store: AbstractFeatureStore, dtype: str, number: float, message: str
    ) -> None:
        """The error names the rows, and nothing is written."""
        values = {name: array.astype(np.float64) for name, array in _values(slice(2, 4)).items()}
        values["features"][1, 2] = number
        table = store.create_table("ckpt-0", _spec(dtype))
        with pytest.raises(NonFiniteError, match=message):
            table.put(2, values)
        assert not table.done().any()

    @pytest.mark.parametrize("dtype", ["float32", "float16", *_LARGEST])
    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 700), (0, 0), (3, 4), (255, 257), (290, 601), (699, 700)]
    )
    def test_blocks_are_the_requested_rows(
        self, store: AbstractFeatureStore, dtype: str, start: int, stop: int
    ) -> None:
        """Blocks cover the rows in order without a gap, and are read-only."""
        table = store.create_table("ckpt-0", _spec(dtype, 5, 700, 600))
        rows = np.random.default_rng(0).standard_normal((700, 5))
        table.put(0, {"features": rows, "q": rows[:, 0]})

        row = start
        for first, block in table.blocks("features", start, stop):
            assert first == row
            assert not block.flags.writeable
            row += len(block)
            np.testing.assert_array_equal(block, table.read("features")[first:row])
            assert len(block) <= 256 or dtype.startswith("float")
        assert row == stop

    @pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 12)])
    def test_blocks_beyond_the_table_are_refused(
        self, store: AbstractFeatureStore, start: int, stop: int
    ) -> None:
        """Rows outside the table raise an error; the range is not cut."""
        table = _fill(store.create_table("ckpt-0", _spec("int8")))
        with pytest.raises(InvalidInputError, match="has rows 0 to 10"):
            list(table.blocks("features", start, stop))

    @_DTYPES
    def test_quantised_rows_are_not_for_writing(self, store: AbstractFeatureStore, dtype: str) -> None:
        """Rows that were read, their integers and their scales are read-only arrays."""
        table = _fill(store.create_table("ckpt-0", _spec(dtype)))
        for array in (table.read_chunk(0, "features"), *table.stored_chunk(0, "features").arrays):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1

    @_DTYPES
    def test_the_scale_is_no_column_of_its_own(self, store: AbstractFeatureStore, dtype: str) -> None:
        """The scale can be neither put nor read, and has a checksum."""
        table = _fill(store.create_table("ckpt-0", _spec(dtype)))
        with pytest.raises(InvalidInputError, match="no column 'features_scale'"):
            table.read("features_scale")
        assert sorted(table.checksums(0)) == ["features", "features_scale", "q"]

    @_DTYPES
    def test_a_quantised_table_grows(self, path: str, store: AbstractFeatureStore, dtype: str) -> None:
        """A grown table has the same contents as a table created with all rows."""
        whole = _fill(store.create_table("whole", _spec(dtype)))
        store.create_table("ckpt-0", _spec(dtype, num_rows=6)).put(0, _values(slice(0, 6)))
        grown = store.grow_table("ckpt-0", 11)
        grown.put(6, _values(slice(6, 11)))

        assert grown.content_key() == whole.content_key()
        np.testing.assert_array_equal(
            self.open(path, "r").open_table("ckpt-0").read("features"), whole.read("features")
        )

    @_DTYPES
    def test_quantised_stores_are_merged_bitwise(
        self, path: str, store: AbstractFeatureStore, dtype: str
    ) -> None:
        """Committed and incomplete chunks are merged; equal overlapping rows pass, and a changed row is named."""
        whole = self.create(f"{path}-whole", MANIFEST)
        expected = _fill(whole.create_table("ckpt-0", _spec(dtype)))
        store.create_table("ckpt-0", _spec(dtype)).put(0, _values(slice(0, 5)))
        part = self.create(f"{path}-part", MANIFEST)
        part.create_table("ckpt-0", _spec(dtype)).put(3, _values(slice(3, 11)))
        wrong = self.create(f"{path}-wrong", MANIFEST)
        wrong.create_table("ckpt-0", _spec(dtype)).put(4, _values(slice(4, 6), seed=1))

        assert "ckpt-0: rows 5 to 10: pending here, done there" in map(str, store.diff(whole))
        assert store.merge([part]) == {"ckpt-0": 6}
        assert store.open_table("ckpt-0").content_key() == expected.content_key()
        assert store.diff(whole) == ()
        with pytest.raises(InvalidInputError, match=r"rows 4, 5 of .* differ in their bytes"):
            store.merge([wrong])

    @_DTYPES
    def test_done_quantised_rows_of_an_unfinished_chunk_can_be_copied(
        self, path: str, store: AbstractFeatureStore, dtype: str
    ) -> None:
        """``read_done`` returns the done rows as float32."""
        store.create_table("ckpt-0", _spec(dtype)).put([9, 0, 2], _values([9, 0, 2]))
        reader = self.open(path, "r").open_table("ckpt-0")
        rows, values = reader.read_done(0)

        assert rows.tolist() == [0, 2]
        np.testing.assert_array_equal(values["features"], _expected(_values([0, 2])["features"], dtype))
        np.testing.assert_array_equal(values["q"], _values([0, 2])["q"])
        assert [len(reader.read_done(1)[0]), len(reader.read_done(2)[0])] == [0, 1]
