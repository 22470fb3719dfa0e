"""Conformance kit for feature stores: laws of every store, wherever its rows are.

Subclass it in a test file and define how a store is created and opened; pytest runs the laws::

    class TestMyStore(StoreTests):
        def create(self, path, manifest):
            return MyStore.create(path, manifest)

        def open(self, path, mode):
            return MyStore.open(path, mode)

The kit does not cover what only a store on disk guarantees (kills, full disks, damaged files).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trak_lite.errors import (
    BusyError,
    IncompleteStoreError,
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    NonFiniteError,
    ReadOnlyStoreError,
    StateError,
)
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, Manifest, TableSpec
from trak_lite.testing._quantised_rows import MANIFEST, QuantisedRowTests

__all__ = ["StoreTests"]

_SPEC = TableSpec(
    num_rows=11,
    columns=(Column("features", 3, "float16"), Column("q", None, "float32")),
    chunk_rows=4,
    fingerprint={"checkpoint": "abc", "shape": [1, 2]},
)
_BAD_NAMES = ["", "..", ".hidden", "a/../b", "/a", "a//b", "a b", "é", "x" * 65, "zarr.json", "a/", 3]


def _values(rows: Any, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return values for the given rows; they depend on row and seed, and are exact in the stored dtypes."""
    matrix = np.random.default_rng(seed).standard_normal((_SPEC.num_rows, 3)).astype(np.float16)
    vector = np.random.default_rng(seed + 1).standard_normal(_SPEC.num_rows).astype(np.float32)
    return {"features": matrix[rows], "q": vector[rows]}


def _fill(table: AbstractRowTable) -> None:
    table.put(0, _values(slice(0, _SPEC.num_rows)))


def _overflowing(values: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {**values, "features": np.array([[1.0, 2.0, 3.0], [1.0, 1e6, 3.0]])}


def _poisoned(values: dict[str, NDArray[Any]], number: float) -> dict[str, NDArray[Any]]:
    values["q"][1] = number
    return values


class StoreTests(QuantisedRowTests):
    """Laws of every store; each test gets a new folder."""

    @pytest.fixture
    def table(self, store: AbstractFeatureStore) -> AbstractRowTable:
        """A table of 11 pending rows."""
        return store.create_table("ckpt-0", _SPEC)

    def test_settings_come_back_as_they_were_given(self, path: str, store: AbstractFeatureStore) -> None:
        """The manifest that is read equals the manifest that was written."""
        assert self.open(path, "r").manifest == store.manifest == MANIFEST

    def test_creating_again_opens_the_same_store(self, path: str, table: AbstractRowTable) -> None:
        """Rows survive a second ``create``; ``made_with`` is not compared."""
        table.put(0, _values(slice(0, 4)))

        again = self.create(path, Manifest(MANIFEST.fingerprint, {"trak_lite": "other"}))
        assert again.create_table("ckpt-0", _SPEC).committed_chunks() == [0]

    def test_other_settings_are_refused_key_by_key(self, path: str, store: AbstractFeatureStore) -> None:
        """The error names only the key that differs, at any depth, with both values."""
        with pytest.raises(ManifestMismatchError, match=r"projector\.seed is 0 there, 1 here\.") as caught:
            self.create(path, Manifest({"proj_dim": 3, "projector": {"kind": "rademacher", "seed": 1}}))
        assert "proj_dim" not in str(caught.value)

    def test_settings_without_a_json_form_are_refused(self, path: str) -> None:
        """A fingerprint that is no JSON value is refused."""
        with pytest.raises(InvalidInputError, match="JSON"):
            self.create(path, Manifest({"seed": float("nan")}))

    @pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 11])
    def test_what_is_put_is_what_is_read(self, path: str, table: AbstractRowTable, batch: int) -> None:
        """All ways of reading give the bits that were put, for every batch size, also where a batch crosses chunks."""
        for start in range(0, 11, batch):
            table.put(start, _values(slice(start, min(start + batch, 11))))

        expected = _values(slice(0, 11))
        read = self.open(path, "r").open_table("ckpt-0")
        for name, values in expected.items():
            assert read.read(name).dtype == values.dtype
            np.testing.assert_array_equal(read.read(name), values)
            np.testing.assert_array_equal(read.read_rows(name, [9, 0, 4, 9]), values[[9, 0, 4, 9]])
            blocks = list(read.chunks(name))
            assert [start for start, _ in blocks] == [0, 4, 8]
            np.testing.assert_array_equal(np.concatenate([rows for _, rows in blocks]), values)

    @pytest.mark.parametrize("seed", range(4))
    def test_rows_come_in_any_order(self, table: AbstractRowTable, seed: int) -> None:
        """Values belong to their row numbers for every order and grouping of the rows."""
        order = np.random.default_rng(seed).permutation(11)
        for rows in np.array_split(order, 1 + seed):
            table.put(rows if seed % 2 else rows.tolist(), _values(rows))

        for name, values in _values(slice(0, 11)).items():
            np.testing.assert_array_equal(table.read(name), values)

    def test_values_are_cast_to_the_column(self, table: AbstractRowTable) -> None:
        """Values are rounded once to the dtype of the column; their memory order does not matter."""
        wide = np.asfortranarray(np.random.default_rng(0).standard_normal((11, 3)))
        table.put(0, {"features": wide, "q": wide[:, 0]})

        np.testing.assert_array_equal(table.read("features"), wide.astype(np.float16))
        np.testing.assert_array_equal(table.read("q"), wide[:, 0].astype(np.float32))

    def test_values_are_copied(self, table: AbstractRowTable) -> None:
        """Changing the buffer after ``put`` does not change the stored rows."""
        buffer = _values(slice(0, 11))
        table.put(0, buffer)
        buffer["features"][:] = 0

        np.testing.assert_array_equal(table.read("features"), _values(slice(0, 11))["features"])

    def test_rows_are_done_as_soon_as_they_are_put(self, path: str, table: AbstractRowTable) -> None:
        """Every handle sees the rows, also a handle that is opened while the chunk is incomplete."""
        table.put([2, 9], _values([2, 9]))

        for seen in (table, self.open(path, "r").open_table("ckpt-0")):
            assert np.flatnonzero(seen.done()).tolist() == [2, 9]
            assert seen.pending().tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 10]
            assert seen.committed_chunks() == []
            assert not seen.complete

    def test_an_open_reader_sees_what_is_put_later(self, path: str, table: AbstractRowTable) -> None:
        """A reader that was opened earlier sees rows that a writer puts later."""
        reader = self.open(path, "r").open_table("ckpt-0")
        _fill(table)

        assert reader.complete
        np.testing.assert_array_equal(reader.read("q"), table.read("q"))

    def test_pending_rows_are_not_readable(self, table: AbstractRowTable) -> None:
        """A chunk is readable only when all its rows are done; fill values are never returned."""
        table.put(0, _values(slice(0, 7)))

        assert table.committed_chunks() == [0]
        np.testing.assert_array_equal(table.read_chunk(0, "q"), _values(slice(0, 4))["q"])
        with pytest.raises(IncompleteStoreError, match=r"Rows 4 to 7 .* 1 of 4 are pending"):
            table.read_chunk(1, "features")
        with pytest.raises(IncompleteStoreError):
            table.read("q")
        with pytest.raises(IncompleteStoreError):
            table.read_rows("q", [5])
        with pytest.raises(IncompleteStoreError):
            table.content_key()

    def test_work_goes_on_where_it_stopped(self, path: str, store: AbstractFeatureStore) -> None:
        """A second handle finds the rows of the first one and adds the others."""
        store.create_table("ckpt-0", _SPEC).put(0, _values(slice(0, 6)))
        store.close()

        again = self.open(path, "r+").create_table("ckpt-0", _SPEC)
        again.put(again.pending(), _values(again.pending()))
        np.testing.assert_array_equal(again.read("features"), _values(slice(0, 11))["features"])

    def test_a_done_row_never_changes(self, table: AbstractRowTable) -> None:
        """A done row can be put again neither in a complete nor in an incomplete chunk."""
        table.put(0, _values(slice(0, 6)))
        for rows in (0, 5, [6, 5], [10, 3]):
            index = range(rows, rows + 1) if isinstance(rows, int) else rows
            with pytest.raises(StateError, match="done already"):
                table.put(rows, _values(list(index), seed=7))

        assert np.flatnonzero(table.done()).tolist() == [0, 1, 2, 3, 4, 5]
        table.put(6, _values(slice(6, 11)))
        np.testing.assert_array_equal(table.read("features"), _values(slice(0, 11))["features"])

    @pytest.mark.parametrize(
        ("rows", "change"),
        [
            pytest.param(0, lambda v: {"features": v["features"]}, id="a missing column"),
            pytest.param(0, lambda v: {**v, "w": v["q"]}, id="an unknown column"),
            pytest.param(0, lambda v: list(v.values()), id="no mapping"),
            pytest.param(0, lambda v: {**v, "features": v["features"][:, :2]}, id="too narrow"),
            pytest.param(0, lambda v: {**v, "features": v["q"]}, id="a vector for a matrix"),
            pytest.param(0, lambda v: {**v, "q": v["features"]}, id="a matrix for a vector"),
            pytest.param(0, lambda v: {**v, "q": v["q"][:1]}, id="fewer rows in one column"),
            pytest.param(0, lambda v: {k: x[:0] for k, x in v.items()}, id="no rows"),
            pytest.param(0, lambda v: {**v, "q": v["q"].astype(np.int64)}, id="integers"),
            pytest.param(0, lambda v: {**v, "q": v["q"].astype(np.complex64)}, id="complex numbers"),
            pytest.param(0, lambda v: {**v, "q": v["q"].tolist()}, id="a list"),
            pytest.param(10, lambda v: v, id="a run past the end"),
            pytest.param(-1, lambda v: v, id="a run before the start"),
            pytest.param([0, 11], lambda v: v, id="a row past the end"),
            pytest.param([0, -1], lambda v: v, id="a negative row"),
            pytest.param([3, 3], lambda v: v, id="a repeated row"),
            pytest.param([3], lambda v: v, id="fewer rows than values"),
            pytest.param([[3, 4]], lambda v: v, id="rows in two dimensions"),
            pytest.param([0.0, 1.0], lambda v: v, id="rows that are not integers"),
            pytest.param([True, False], lambda v: v, id="a mask"),
            pytest.param(True, lambda v: v, id="a boolean"),
            pytest.param(0, lambda v: _poisoned(v, np.nan), id="NaN"),
            pytest.param(0, lambda v: _poisoned(v, -np.inf), id="infinity"),
            pytest.param(0, _overflowing, id="float16 overflow"),
        ],
    )
    def test_a_refused_put_changes_nothing(
        self, path: str, table: AbstractRowTable, rows: Any, change: Any
    ) -> None:
        """An invalid ``put`` writes nothing, and valid values for the same rows can be put afterwards."""
        with pytest.raises(InvalidInputError):
            table.put(rows, change(_values([0, 1])))

        assert not table.done().any()
        _fill(table)
        np.testing.assert_array_equal(table.read("features"), _values(slice(0, 11))["features"])

    @pytest.mark.parametrize("number", [np.nan, np.inf])
    def test_rows_that_are_not_finite_are_named(self, table: AbstractRowTable, number: float) -> None:
        """The error names the row numbers of the table, not the positions in the batch."""
        with pytest.raises(NonFiniteError, match=r"q is NaN or infinite in rows 4\."):
            table.put([9, 4], _poisoned(_values([9, 4]), number))

    def test_float16_overflow_names_the_row_and_the_way_out(self, table: AbstractRowTable) -> None:
        """A value that overflows in float16 raises an error that suggests float32."""
        with pytest.raises(
            NonFiniteError, match=r"in rows 6: the largest magnitude is 1e\+06, .*Use dtype float32"
        ):
            table.put(5, _overflowing(_values([5, 6])))

    def test_read_arrays_are_not_for_writing(self, table: AbstractRowTable) -> None:
        """``read_chunk`` returns read-only arrays; ``read`` and ``read_rows`` return copies."""
        _fill(table)

        with pytest.raises(ValueError, match="read-only"):
            table.read_chunk(0, "q")[0] = 1
        table.read("q")[:] = 0
        table.read_rows("q", [0])[:] = 0
        np.testing.assert_array_equal(table.read("q"), _values(slice(0, 11))["q"])

    def test_reading_what_does_not_exist_is_refused(self, table: AbstractRowTable) -> None:
        """Unknown columns, chunks and rows raise an error."""
        _fill(table)

        with pytest.raises(InvalidInputError, match=r"no column 'p'.*features"):
            table.read_chunk(0, "p")
        for chunk in (-1, 3):
            with pytest.raises(InvalidInputError, match="3 chunks"):
                table.read_chunk(chunk, "q")
        for rows in ([11], [-1], [0.5], [[0]]):
            with pytest.raises(InvalidInputError, match="ows"):
                table.read_rows("q", rows)  # type: ignore[arg-type]
        assert table.read_rows("features", []).shape == (0, 3)

    def test_tables_are_listed_in_natural_order(self, store: AbstractFeatureStore) -> None:
        """Numbers in names are compared as numbers at every depth; a prefix selects a group of tables."""
        names = ["ckpt-2", "ckpt-10", "targets/b/ckpt-1", "targets/a/ckpt-10", "targets/a/ckpt-9"]
        for name in names[::-1]:
            store.create_table(name, _SPEC)

        listed = ["ckpt-2", "ckpt-10", "targets/a/ckpt-9", "targets/a/ckpt-10", "targets/b/ckpt-1"]
        assert store.table_names() == listed
        assert store.table_names("targets/a") == ["targets/a/ckpt-9", "targets/a/ckpt-10"]
        assert store.table_names("scores") == []

    def test_a_missing_table_is_an_error_that_names_the_others(self, store: AbstractFeatureStore) -> None:
        """The error lists the existing tables."""
        store.create_table("ckpt-7", _SPEC)
        for ask in (store.open_table, store.attributes):
            with pytest.raises(MissingStoreError, match=r"'ckpt-8'.*ckpt-7"):
                ask("ckpt-8")

    def test_a_table_is_opened_as_it_was_created(self, path: str, store: AbstractFeatureStore) -> None:
        """Shape, fingerprint and attributes are stored."""
        store.create_table("ckpt-0", _SPEC, {"source": ("a.pt", 1)})

        again = self.open(path, "r")
        assert again.open_table("ckpt-0").spec == _SPEC
        assert again.attributes("ckpt-0") == {"source": ["a.pt", 1]}

    def test_attributes_are_stored_and_not_compared(self, store: AbstractFeatureStore) -> None:
        """The attributes of the first ``create_table`` stay."""
        store.create_table("ckpt-0", _SPEC, {"source": "a.pt"})
        store.create_table("ckpt-0", _SPEC, {"source": "b.pt"})
        assert store.attributes("ckpt-0") == {"source": "a.pt"}

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (TableSpec(12, _SPEC.columns, 4, _SPEC.fingerprint), "num_rows is 11 there, 12 here"),
            (TableSpec(11, _SPEC.columns, 8, _SPEC.fingerprint), "chunk_rows is 4 there, 8 here"),
            (TableSpec(11, _SPEC.columns[:1], 4, _SPEC.fingerprint), "columns has 2 entries there, 1 here"),
            (TableSpec(11, _SPEC.columns, 4, {"checkpoint": "abd"}), "checkpoint is 'abc' there, 'abd' here"),
        ],
    )
    def test_a_table_of_another_shape_is_refused(
        self, store: AbstractFeatureStore, spec: TableSpec, message: str
    ) -> None:
        """The error names each key that differs with both values."""
        store.create_table("ckpt-0", _SPEC)
        with pytest.raises(ManifestMismatchError, match=message):
            store.create_table("ckpt-0", spec)

    @pytest.mark.parametrize(
        "spec",
        [
            TableSpec(0, _SPEC.columns, 4),
            TableSpec(11, _SPEC.columns, 0),
            TableSpec(11, (), 4),
            TableSpec(11, (_SPEC.columns[0], _SPEC.columns[0]), 4),
            TableSpec(11, (Column("features", 0, "float16"),), 4),
            TableSpec(11, (Column("features", 3, "int16"),), 4),
            TableSpec(11, (Column("features", None, "int8"),), 4),
            TableSpec(11, (Column("a", 3, "int4"), Column("a_scale", None, "float32")), 4),
            TableSpec(11, (Column("a" * 60, 3, "int8"),), 4),
            TableSpec(11, (Column("../x", 3, "float16"),), 4),
            TableSpec(11, _SPEC.columns, 4, {"set": {1, 2}}),
        ],
    )
    def test_a_table_that_cannot_exist_is_refused(self, store: AbstractFeatureStore, spec: TableSpec) -> None:
        """An invalid spec creates nothing."""
        with pytest.raises(InvalidInputError):
            store.create_table("ckpt-0", spec)
        assert store.table_names() == []

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_names_that_are_no_folder_names_are_refused(self, store: AbstractFeatureStore, name: Any) -> None:
        """All methods that take a name refuse it."""
        with pytest.raises(InvalidInputError):
            store.create_table(name, _SPEC)
        with pytest.raises(InvalidInputError):
            store.open_table(name)
        with pytest.raises(InvalidInputError):
            store.cache(name, "key", np.zeros(1))
        with pytest.raises(InvalidInputError):
            store.put_entry(name, "key", np.zeros(1))

    def test_a_table_is_no_group_and_a_group_no_table(self, store: AbstractFeatureStore) -> None:
        """A table contains no tables, and a group of tables cannot become a table."""
        store.create_table("targets/test", _SPEC)
        for name in ("targets/test/ckpt-0", "targets/test/features"):
            with pytest.raises(InvalidInputError, match="is a table"):
                store.create_table(name, _SPEC)
        with pytest.raises(InvalidInputError, match="is a group"):
            store.create_table("targets", _SPEC)
        with pytest.raises(InvalidInputError, match="is a group"):
            store.open_table("targets")

    def test_a_store_for_reading_refuses_to_write(self, path: str, table: AbstractRowTable) -> None:
        """Creating tables and putting rows raise an error; a derived array is not stored, without an error."""
        table.put(0, _values(slice(0, 2)))
        reader = self.open(path, "r")

        assert not reader.writable
        with pytest.raises(ReadOnlyStoreError):
            reader.create_table("ckpt-0", _SPEC)
        with pytest.raises(ReadOnlyStoreError):
            reader.open_table("ckpt-0").put(2, _values([2, 3]))
        reader.cache("gram", "key", np.zeros(1))
        assert reader.cached("gram", "key") is None
        assert table.done().sum() == 2

    def test_a_closed_store_refuses_to_write(self, path: str, table: AbstractRowTable) -> None:
        """Leaving a ``with`` block closes the store; its rows stay."""
        with self.open(path, "r+") as store:
            other = store.create_table("ckpt-1", _SPEC)
            _fill(other)
        with pytest.raises(StateError, match="closed"):
            other.put(0, _values([0]))
        with pytest.raises(StateError, match="closed"):
            store.create_table("ckpt-2", _SPEC)
        assert self.open(path, "r").open_table("ckpt-1").complete

    def test_the_content_key_depends_on_the_contents_alone(self, store: AbstractFeatureStore) -> None:
        """The key does not depend on the order of rows or on the batch size; a changed value changes it."""
        keys = []
        for name, order, seed in (("a", range(11), 0), ("b", range(10, -1, -1), 0), ("c", range(11), 1)):
            table = store.create_table(name, _SPEC)
            for row in order:
                table.put(row, _values([row], seed=seed))
            keys.append(table.content_key())

        assert keys[0] == keys[1] != keys[2]

    def test_a_dropped_table_is_gone(self, path: str, store: AbstractFeatureStore) -> None:
        """Other tables stay, a new table can have the name, and old handles cannot write into the new table."""
        old = store.create_table("ckpt-0", _SPEC)
        old.put(0, _values(slice(0, 6)))
        _fill(store.create_table("ckpt-1", _SPEC))
        store.drop_table("ckpt-0")

        assert store.table_names() == ["ckpt-1"]
        for ask in (store.open_table, store.drop_table):
            with pytest.raises(MissingStoreError, match=r"'ckpt-0'.*ckpt-1"):
                ask("ckpt-0")
        assert not store.create_table("ckpt-0", _SPEC).done().any()
        with pytest.raises(StateError, match="dropped"):
            old.put(0, _values(slice(0, 6)))
        assert self.open(path, "r").open_table("ckpt-1").complete

    @pytest.mark.parametrize("done", [0, 4, 9, 11])
    @pytest.mark.parametrize("more", [1, 3, 4, 5, 9])
    def test_a_grown_table_keeps_its_rows(
        self, path: str, store: AbstractFeatureStore, done: int, more: int
    ) -> None:
        """Rows stay and new rows are pending, for a full, partly filled or empty last chunk."""
        table = store.create_table("ckpt-0", _SPEC)
        if done:
            table.put(0, _values(slice(0, done)))
        grown = store.grow_table("ckpt-0", 11 + more)

        assert grown.spec.num_rows == 11 + more
        assert self.open(path, "r").open_table("ckpt-0").pending().tolist() == list(range(done, 11 + more))
        for start in range(done, 11 + more, 2):
            rows = [row for row in (start, start + 1) if row < 11 + more]
            grown.put(rows, _values([row % 11 for row in rows]))
        expected = _values([row % 11 for row in range(11 + more)])
        read = self.open(path, "r").open_table("ckpt-0")
        for name, values in expected.items():
            np.testing.assert_array_equal(read.read(name), values)
        assert store.grow_table("ckpt-0", 11 + more).complete

    def test_a_grown_table_equals_one_made_with_all_its_rows(self, store: AbstractFeatureStore) -> None:
        """A grown table has the same spec and content key as a table created with all rows."""
        whole = store.create_table("ckpt-1", _SPEC)
        _fill(whole)
        small = TableSpec(6, _SPEC.columns, 4, _SPEC.fingerprint)
        store.create_table("ckpt-0", small).put(0, _values(slice(0, 6)))
        grown = store.grow_table("ckpt-0", 11)
        grown.put(6, _values(slice(6, 11)))

        assert grown.spec == whole.spec
        assert grown.content_key() == whole.content_key()

    def test_a_table_never_loses_rows(self, path: str, table: AbstractRowTable) -> None:
        """A table cannot shrink, and a handle that was opened before growing cannot put rows."""
        store = self.open(path, "r+")
        with pytest.raises(InvalidInputError, match="cannot shrink: it has 11 rows"):
            store.grow_table("ckpt-0", 10)
        old = store.open_table("ckpt-0")
        store.grow_table("ckpt-0", 12)
        with pytest.raises(StateError):
            old.put(0, _values([0]))
        with pytest.raises(MissingStoreError):
            store.grow_table("ckpt-1", 12)

    def test_a_store_for_reading_refuses_to_change_tables(self, path: str, table: AbstractRowTable) -> None:
        """Dropping, growing and merging raise an error."""
        reader = self.open(path, "r")
        for change in (
            lambda: reader.drop_table("ckpt-0"),
            lambda: reader.grow_table("ckpt-0", 12),
            lambda: reader.merge([reader]),
        ):
            with pytest.raises(ReadOnlyStoreError):
                change()
        assert table.spec == _SPEC

    def test_done_rows_of_an_unfinished_chunk_can_be_copied(self, path: str, table: AbstractRowTable) -> None:
        """``read_done`` returns only done rows, as new arrays."""
        table.put([9, 0, 2], _values([9, 0, 2]))
        table.put(4, _values(slice(4, 8)))
        reader = self.open(path, "r").open_table("ckpt-0")

        for chunk, expected in ((0, [0, 2]), (1, [4, 5, 6, 7]), (2, [9])):
            rows, values = reader.read_done(chunk)
            assert rows.tolist() == expected
            for name, array in _values(expected).items():
                assert values[name].dtype == array.dtype
                np.testing.assert_array_equal(values[name], array)
            values["q"][:] = 0
        np.testing.assert_array_equal(table.read_chunk(1, "q"), _values(slice(4, 8))["q"])
        with pytest.raises(InvalidInputError, match="3 chunks"):
            reader.read_done(3)

    def test_checksums_are_those_of_committed_chunks(self, table: AbstractRowTable) -> None:
        """Equal contents have equal checksums; a chunk that is not committed has none."""
        table.put(0, _values(slice(0, 4)))
        table.put(4, _values(slice(0, 4)))
        assert table.checksums(0) == table.checksums(1)
        assert sorted(table.checksums(0)) == ["features", "q"]
        with pytest.raises(IncompleteStoreError, match="Rows 8 to 10"):
            table.checksums(2)

    def test_equal_stores_do_not_differ(self, path: str, store: AbstractFeatureStore) -> None:
        """``diff`` is empty for equal rows, in any order of putting and in committed and incomplete chunks."""
        other = self.create(f"{path}-other", MANIFEST)
        for each, order in ((store, [0, 9, 4, 6]), (other, [6, 4, 9, 0])):
            table = each.create_table("ckpt-0", _SPEC)
            for row in order:
                table.put([row, row + 1], _values([row, row + 1]))
        assert store.diff(other) == other.diff(store) == ()

    def test_differences_are_named(self, path: str, store: AbstractFeatureStore) -> None:
        """``diff`` names different settings, tables, fingerprints, done rows, and bytes of chunks and rows."""
        other = self.create(f"{path}-other", Manifest({**MANIFEST.fingerprint, "proj_dim": 4}))
        for each, seed, rows in ((store, 0, 10), (other, 1, 9)):
            each.create_table("ckpt-0", _SPEC).put(0, _values(slice(0, rows), seed=seed))
        store.create_table("ckpt-1", _SPEC)
        store.create_table("ckpt-2", TableSpec(11, _SPEC.columns, 4, {"checkpoint": "x"}))
        other.create_table("ckpt-2", TableSpec(12, _SPEC.columns, 4, {"checkpoint": "y"}))

        found = [str(difference) for difference in store.diff(other)]
        assert found[0] == "manifest: proj_dim: 3 here, 4 there"
        assert found[1] == "ckpt-0: row 9: done here, pending there"
        assert [text.split(": checksum")[0] for text in found[2:6]] == [
            f"ckpt-0: {name} in rows {rows}"
            for rows in ("0 to 3 (chunk 0)", "4 to 7 (chunk 1)")
            for name in ("features", "q")
        ]
        assert found[6:] == [
            "ckpt-0: row 8: other bytes here, other bytes there",
            "ckpt-1: table: present here, absent there",
            "ckpt-2: checkpoint: x here, y there",
            "ckpt-2: table num_rows: 11 here, 12 there",
        ]
        assert [(d.table, d.what, d.there, d.here) for d in other.diff(store)][:2] == [
            (None, "proj_dim", 3, 4),
            ("ckpt-0", "row 9", "done", "pending"),
        ]

    def test_a_merge_takes_what_is_missing(self, path: str, store: AbstractFeatureStore) -> None:
        """Missing rows and tables come from complete, incomplete and overlapping parts; merging twice adds nothing."""
        store.create_table("ckpt-0", _SPEC, {"source": "here"}).put(0, _values(slice(0, 3)))
        parts = [self.create(f"{path}-{number}", MANIFEST) for number in range(2)]
        parts[0].create_table("ckpt-0", _SPEC).put(2, _values(slice(2, 7)))
        parts[1].create_table("ckpt-0", _SPEC).put([8, 10, 0], _values([8, 10, 0]))
        parts[1].create_table("targets/a", _SPEC, {"source": "part"}).put(0, _values(slice(0, 11)))

        assert store.merge(parts) == {"ckpt-0": 6, "targets/a": 11}
        merged = store.open_table("ckpt-0")
        assert merged.pending().tolist() == [7, 9]
        merged.put([7, 9], _values([7, 9]))
        for name in ("ckpt-0", "targets/a"):
            for column, values in _values(slice(0, 11)).items():
                np.testing.assert_array_equal(store.open_table(name).read(column), values)
        assert store.attributes("targets/a") == {"source": "part"}
        assert store.merge(parts) == {"ckpt-0": 0, "targets/a": 0}

    def test_a_claimed_chunk_takes_rows_of_its_holder_alone(self, path: str, table: AbstractRowTable) -> None:
        """Other handles get ``BusyError``, can put rows into other chunks, and can claim the chunk afterwards."""
        with table.claim(1) as pending:
            assert pending.tolist() == [4, 5, 6, 7]
            table.put(4, _values(slice(4, 5)))
            other = self.open(path, "r+").open_table("ckpt-0")
            with pytest.raises(BusyError, match=r"rows 4 to 7 \(chunk 1\)"):
                other.put(5, _values(slice(5, 6)))
            with pytest.raises(BusyError, match=r"rows 4 to 7 \(chunk 1\)"), other.claim(1):
                pass
            with pytest.raises(BusyError, match="claimed already"), table.claim(1):
                pass
            other.put(0, _values(slice(0, 1)))
            table.put(8, _values(slice(8, 9)))
        with other.claim(1) as pending:
            assert pending.tolist() == [5, 6, 7]
            other.put(5, _values(slice(5, 8)))
        with table.claim(1) as pending:
            assert pending.tolist() == []
        np.testing.assert_array_equal(table.read_chunk(1, "q"), _values(slice(4, 8))["q"])

    def test_a_chunk_is_given_up_when_the_block_fails(self, path: str, table: AbstractRowTable) -> None:
        """An error inside the block releases the chunk; its rows stay."""
        table.put(9, _values(slice(9, 10)))
        with pytest.raises(StateError, match="done already"), table.claim(2):
            table.put(9, _values(slice(9, 10)))
        with self.open(path, "r+").open_table("ckpt-0").claim(2) as pending:
            assert pending.tolist() == [8, 10]

    def test_only_a_writer_claims_a_chunk_that_there_is(self, path: str, table: AbstractRowTable) -> None:
        """A missing chunk and a store opened for reading raise an error."""
        with pytest.raises(InvalidInputError, match="no chunk 3"), table.claim(3):
            pass
        reader = self.open(path, "r").open_table("ckpt-0")
        with pytest.raises(ReadOnlyStoreError), reader.claim(0):
            pass

    def test_the_fingerprint_is_replaced_only_if_it_is_the_known_one(
        self, path: str, store: AbstractFeatureStore
    ) -> None:
        """Repeating the call has no effect; if the known fingerprint differs, the error names the key."""
        known = dict(MANIFEST.fingerprint)
        given = {**known, "dataset": {"num_rows": 12}}
        store.replace_fingerprint(known, given)
        store.replace_fingerprint(known, given)
        for seen in (store.manifest, self.open(path, "r").manifest):
            assert seen == Manifest(given, MANIFEST.made_with)
        with pytest.raises(ManifestMismatchError, match=r"dataset\.num_rows is 12 there, 'absent' here"):
            self.open(path, "r+").replace_fingerprint(known, {**known, "dataset": {"num_rows": 13}})
        with pytest.raises(ReadOnlyStoreError):
            self.open(path, "r").replace_fingerprint(given, known)
        with pytest.raises(InvalidInputError, match="JSON"):
            store.replace_fingerprint(given, {"seed": float("nan")})
        assert store.manifest.fingerprint == given

    @pytest.mark.parametrize("rows", [3, 11])
    def test_a_merge_refuses_rows_that_contradict(
        self, path: str, store: AbstractFeatureStore, rows: int
    ) -> None:
        """The error names the rows, and nothing is copied from that part."""
        store.create_table("ckpt-0", _SPEC).put(0, _values(slice(0, rows)))
        part = self.create(f"{path}-part", MANIFEST)
        part.create_table("ckpt-1", _SPEC)
        changed = _values(slice(0, 11))
        changed["q"][1] += 1
        part.create_table("ckpt-0", _SPEC).put(0, changed)

        with pytest.raises(InvalidInputError, match=r"ckpt-0: rows 1 of .* differ in their bytes"):
            store.merge([part])
        assert store.table_names() == ["ckpt-0"]
        assert store.open_table("ckpt-0").done().sum() == rows

    def test_a_merge_refuses_other_settings(self, path: str, store: AbstractFeatureStore) -> None:
        """Different settings of the store or of a table raise an error that names the key."""
        store.create_table("ckpt-0", _SPEC)
        other = self.create(f"{path}-other", Manifest({**MANIFEST.fingerprint, "proj_dim": 4}))
        with pytest.raises(ManifestMismatchError, match="proj_dim is 3 there, 4 here"):
            store.merge([other])
        part = self.create(f"{path}-part", MANIFEST)
        part.create_table("ckpt-0", TableSpec(11, _SPEC.columns, 4, {"checkpoint": "abd"}))
        with pytest.raises(ManifestMismatchError, match="checkpoint is 'abc' there, 'abd' here"):
            store.merge([part])

    @pytest.mark.parametrize(
        "array",
        [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
            np.array(2.5),
            np.zeros((0, 3), np.int64),
            np.array([True, False]),
        ],
    )
    def test_a_derived_array_is_stored_under_its_key(
        self, path: str, store: AbstractFeatureStore, array: NDArray[Any]
    ) -> None:
        """Shape, dtype and values are stored; another key or name finds nothing; a later array replaces it."""
        store.cache("ckpt-0/gram", "v1", np.zeros(7))
        store.cache("ckpt-0/gram", "v2", array)

        found = self.open(path, "r").cached("ckpt-0/gram", "v2")
        assert found is not None
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        assert store.cached("ckpt-0/gram", "v1") is None
        assert store.cached("gram", "v2") is None

    def test_an_entry_is_there_for_every_handle_until_it_is_dropped(
        self, path: str, store: AbstractFeatureStore
    ) -> None:
        """An entry is found only under its key, replaced by a later one, and listed by prefix."""
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        store.put_entry("verdicts/a", "v1", np.zeros(7))
        store.put_entry("verdicts/a", "v2", array)
        store.put_entry("runs", "key", np.arange(3, dtype=np.uint8))

        reader = self.open(path, "r")
        found = reader.entry("verdicts/a", "v2")
        assert found is not None
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        assert reader.entry("verdicts/a", "v1") is None
        assert reader.entry("verdicts/b", "v2") is None
        assert reader.entry_names() == ["runs", "verdicts/a"]
        assert reader.entry_names("verdicts") == ["verdicts/a"]
        assert reader.table_names() == []
        with pytest.raises(ReadOnlyStoreError):
            reader.put_entry("verdicts/a", "v2", array)
        with pytest.raises(ReadOnlyStoreError):
            reader.drop_entry("verdicts/a")

        store.drop_entry("verdicts/a")
        store.drop_entry("verdicts/a")
        assert self.open(path, "r").entry("verdicts/a", "v2") is None
        assert store.entry_names() == ["runs"]

    def test_only_numbers_are_stored_as_derived_arrays(self, store: AbstractFeatureStore) -> None:
        """Arrays of objects and keys that are too long raise an error."""
        with pytest.raises(InvalidInputError, match="arrays of numbers"):
            store.cache("gram", "key", np.array([object()]))
        with pytest.raises(InvalidInputError, match="cache key"):
            store.cache("gram", "k" * 1025, np.zeros(1))
