"""Conformance kit for feature stores: laws of every store, wherever its rows are.

Subclass it in a test file and define how a store is created and opened; pytest runs the laws::

    class TestMyStore(StoreTests):
        def create(self, path, manifest):
            return MyStore.create(path, manifest)

        def open(self, path, mode):
            return MyStore.open(path, mode)

The kit does not cover what only a store on disk guarantees (kills, full disks, damaged files). The reference of
quantised columns uses exact fractions.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

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
from trak_lite.store import Column, Manifest, TableSpec

__all__ = ["StoreTests"]

_MANIFEST = Manifest({"proj_dim": 3, "projector": {"kind": "rademacher", "seed": 0}}, {"trak_lite": "test"})
_BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "a..b",
    "/a",
    "a//b",
    "a/",
    ".hidden",
    "a b",
    "a\0",
    "é",
    "a\n",
]
_BAD_NAMES += ["a\\b", "~", "$HOME", "a:b", "%2e%2e", "x" * 65, "zarr.json", "a/zarr.json", "ZARR.JSON", 3]
_LARGEST = {"int8": 127, "int4": 7}
_QUANTISED = pytest.mark.parametrize("dtype", list(_LARGEST))
_DTYPES = pytest.mark.parametrize("dtype", ["float16", *_LARGEST])
_ALL = slice(None)


def _spec(dtype="float16", width=3, num_rows=11, chunk_rows=4):
    columns = (Column("features", width, dtype), Column("q", None, "float32"))
    return TableSpec(num_rows, columns, chunk_rows, {"checkpoint": "abc", "shape": [1, 2]})


_SPEC = _spec()


def _values(rows, seed=0, dtype="float16", width=3, num_rows=11):
    """Return values for the given rows; they depend on row and seed, and are exact in the stored dtypes.

    Rows to quantise have many magnitudes; one is zero, one the largest, others are half way between two integers.
    """
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((num_rows, width))
    vector = rng.standard_normal(num_rows).astype(np.float32)
    if dtype not in _LARGEST:
        return {"features": matrix.astype(np.float16)[rows], "q": vector[rows]}
    matrix *= 10.0 ** rng.integers(-30, 37, (num_rows, 1))
    matrix[1::4] = 0.5 * rng.integers(-13, 14, (len(matrix[1::4]), width))
    matrix[1::8, 0], matrix[5::8, 0] = 7, -127
    matrix[2], matrix[3] = 0, np.finfo(np.float32).max * np.resize([1, -1, 0.5, 0.01, -0.3], width)
    return {"features": matrix.astype(np.float32)[rows], "q": vector[rows]}


def _quantised(row, dtype):
    """Return the integers and the scale of a row."""
    mantissa, exponent = np.frexp(np.float32(np.abs(row).max()) / np.float32(_LARGEST[dtype]))
    scale = Fraction(int(mantissa * 2**16)) * Fraction(2) ** (int(exponent) - 16)
    if scale < Fraction(2) ** -126:
        return [0] * len(row), Fraction(0)
    return [round(Fraction(float(value)) / scale) for value in row], scale


def _stored(values, dtype):
    """Return what is read after the values were put."""
    if dtype not in _LARGEST:
        return values
    found = [_quantised(row, dtype) for row in values["features"]]
    rows = [[float(number * scale) for number in numbers] for numbers, scale in found]
    return {**values, "features": np.array(rows, np.float32)}


def _raises(error, match, use, *given):
    with pytest.raises(error, match=match):
        use(*given)


def _fill(table, dtype="float16"):
    table.put(0, _values(_ALL, dtype=dtype))
    return table


class StoreTests(ABC):
    """Laws of every store; each test gets a new folder."""

    @abstractmethod
    def create(self, path, manifest):
        """Create a store at the path, or open an existing one for writing."""

    @abstractmethod
    def open(self, path, mode):
        """Open the existing store at the path."""

    @pytest.fixture
    def path(self, tmp_path):
        return str(tmp_path / "run.zarr")

    @pytest.fixture
    def store(self, path):
        return self.create(path, _MANIFEST)

    @pytest.fixture
    def table(self, store):
        return store.create_table("ckpt-0", _SPEC)

    def test_creating_again_opens_the_same_store(self, path, store, table):
        """With its settings; rows survive a second ``create``; ``made_with`` is not compared."""
        assert self.open(path, "r").manifest == store.manifest == _MANIFEST
        table.put(0, _values(slice(0, 4)))
        again = self.create(path, Manifest(_MANIFEST.fingerprint, {"trak_lite": "other"}))
        assert again.create_table("ckpt-0", _SPEC).committed_chunks() == [0]

    def test_other_settings_are_refused_key_by_key(self, path, store):
        """The error names only the key that differs, at any depth, with both values; there must be a JSON form."""
        with pytest.raises(ManifestMismatchError, match=r"projector\.seed is 0 there, 1 here\.") as caught:
            self.create(path, Manifest({"proj_dim": 3, "projector": {"kind": "rademacher", "seed": 1}}))
        assert "proj_dim" not in str(caught.value)
        text = Manifest({"proj_dim": 3, "projector": {"kind": "rademacher", "seed": "0"}})
        _raises(ManifestMismatchError, r"projector\.seed is 0 there, '0' here", self.create, path, text)
        _raises(InvalidInputError, "JSON", self.create, f"{path}-new", Manifest({"seed": float("nan")}))

    @pytest.mark.parametrize("ordered", [True, False])
    @pytest.mark.parametrize(
        ("dtype", "width", "batch"),
        [
            *(("float16", 3, batch) for batch in (1, 2, 3, 4, 5, 11)),
            *((dtype, width, batch) for dtype in _LARGEST for width in (1, 4, 5) for batch in (2, 11)),
        ],
    )
    def test_what_is_put_is_what_is_read(self, path, store, dtype, width, batch, ordered):
        """All ways of reading give the bits that were put, in any order and where a batch crosses chunks.

        A quantised row is its integers times its scale.
        """
        table = store.create_table("ckpt-0", _spec(dtype, width))
        order = np.random.default_rng(batch).permutation(11)
        for start in range(0, 11, batch):
            rows = range(start, min(start + batch, 11)) if ordered else order[start : start + batch]
            table.put(start if ordered else rows, _values(list(rows), 0, dtype, width))
        read = self.open(path, "r").open_table("ckpt-0")
        for name, values in _stored(_values(_ALL, 0, dtype, width), dtype).items():
            assert read.read(name).dtype == values.dtype
            np.testing.assert_array_equal(read.read(name), values)
            np.testing.assert_array_equal(read.read_rows(name, [9, 0, 4, 9]), values[[9, 0, 4, 9]])
            np.testing.assert_array_equal(read.read_chunk(2, name), values[8:])
            blocks = list(read.chunks(name))
            assert [start for start, _ in blocks] == [0, 4, 8]
            np.testing.assert_array_equal(np.concatenate([rows for _, rows in blocks]), values)
            assert read.read_rows(name, []).shape == (0, *values.shape[1:])

    @_DTYPES
    def test_values_are_cast_to_the_column_and_copied(self, store, dtype):
        """Values are rounded once, quantised ones to float32 before; memory order and later changes do not matter."""
        wide = np.asfortranarray(np.random.default_rng(0).standard_normal((11, 3)))
        given = {"features": wide.astype(np.float32 if dtype in _LARGEST else np.float16), "q": wide[:, 0]}
        expected = _stored({**given, "q": wide[:, 0].astype(np.float32)}, dtype)
        table = store.create_table("ckpt-0", _spec(dtype))
        table.put(np.arange(11)[::-1], {"features": wide[::-1], "q": wide[::-1, 0]})
        wide[:] = 0
        for name, values in expected.items():
            np.testing.assert_array_equal(table.read(name), values)

    @_QUANTISED
    def test_rows_too_small_for_a_scale_are_zero(self, store, dtype):
        """Rows below the largest integer times the smallest normal float32 are zero; rows at this limit are not."""
        edge = np.float32(_LARGEST[dtype] * 2.0**-126)
        rows = np.array([[edge, -edge], [np.nextafter(edge, np.float32(0)), 0], [1e-45, 0]], np.float32)
        table = store.create_table("ckpt-0", _spec(dtype, 2, 3))
        table.put(0, {"features": rows, "q": np.zeros(3, np.float32)})
        np.testing.assert_array_equal(table.read("features"), [[edge, -edge], [0, 0], [0, 0]])

    @_QUANTISED
    def test_what_was_read_is_stored_as_the_same_bytes(self, store, dtype):
        """Reading a table and putting its values into another one gives the same content key and checksums.

        The scale is no column of its own, and has a checksum.
        """
        table = _fill(store.create_table("ckpt-0", _spec(dtype)), dtype)
        copy = store.create_table("ckpt-1", _spec(dtype))
        copy.put(0, {name: table.read(name) for name in ("features", "q")})
        assert copy.content_key() == table.content_key()
        assert copy.checksums(2) == table.checksums(2)
        assert sorted(table.checksums(0)) == ["features", "features_scale", "q"]
        _raises(InvalidInputError, "no column 'features_scale'", table.read, "features_scale")

    @pytest.mark.parametrize("dtype", ["float32", "float16", *_LARGEST])
    @pytest.mark.parametrize("ends", [(0, 700), (0, 0), (3, 4), (255, 257), (290, 601), (699, 700)])
    def test_blocks_are_the_requested_rows(self, store, dtype, ends):
        """Blocks cover the rows in order without a gap, and are read-only."""
        table = store.create_table("ckpt-0", _spec(dtype, 5, 700, 600))
        rows = np.random.default_rng(0).standard_normal((700, 5))
        table.put(0, {"features": rows, "q": rows[:, 0]})
        row, stop = ends
        for first, block in table.blocks("features", *ends):
            assert first == row
            assert not block.flags.writeable
            row += len(block)
            np.testing.assert_array_equal(block, table.read("features")[first:row])
            assert len(block) <= 256 or dtype.startswith("float")
        assert row == stop

    def test_rows_are_done_as_soon_as_they_are_put(self, path, store):
        """Every handle sees the rows, whenever it was opened, and a later run goes on where the first one stopped."""
        table = store.create_table("ckpt-0", _SPEC)
        before = self.open(path, "r").open_table("ckpt-0")
        table.put([2, 9], _values([2, 9]))
        for seen in (table, before, self.open(path, "r").open_table("ckpt-0")):
            assert np.flatnonzero(seen.done()).tolist() == [2, 9]
            assert seen.pending().tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 10]
            assert seen.committed_chunks() == []
            assert not seen.complete
        store.close()
        again = self.open(path, "r+").create_table("ckpt-0", _SPEC)
        again.put(again.pending(), _values(again.pending()))
        assert before.complete
        np.testing.assert_array_equal(before.read("features"), _values(_ALL)["features"])

    def test_pending_rows_are_not_readable(self, table):
        """A chunk is readable only when all its rows are done; fill values are never returned."""
        table.put(0, _values(slice(0, 7)))
        assert table.committed_chunks() == [0]
        np.testing.assert_array_equal(table.read_chunk(0, "q"), _values(slice(0, 4))["q"])
        _raises(IncompleteStoreError, r"Rows 4 to 7 .* 1 of 4 are pending", table.read_chunk, 1, "features")
        for ask in (lambda: table.read("q"), lambda: table.read_rows("q", [5]), table.content_key):
            _raises(IncompleteStoreError, None, ask)

    def test_a_done_row_never_changes(self, table):
        """A done row can be put again neither in a complete nor in an incomplete chunk."""
        table.put(0, _values(slice(0, 6)))
        for rows in (0, 5, [6, 5], [10, 3]):
            index = range(rows, rows + 1) if isinstance(rows, int) else rows
            _raises(StateError, "done already", table.put, rows, _values(list(index), seed=7))
        assert np.flatnonzero(table.done()).tolist() == [0, 1, 2, 3, 4, 5]
        table.put(6, _values(slice(6, 11)))
        np.testing.assert_array_equal(table.read("features"), _values(_ALL)["features"])

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
            # Beyond either end, repeated, fewer than the values, in two dimensions, no integers, a mask.
            *((rows, lambda v: v) for rows in (10, -1, [0, 11], [0, -1], [3, 3], [3], [[3, 4]], [0.0, 1.0])),
            *((rows, lambda v: v) for rows in ([True, False], True)),
        ],
    )
    def test_a_refused_put_changes_nothing(self, table, rows, change):
        """An invalid ``put`` writes nothing, and valid values for the same rows can be put afterwards."""
        _raises(InvalidInputError, None, table.put, rows, change(_values([0, 1])))
        assert not table.done().any()
        _fill(table)
        np.testing.assert_array_equal(table.read("features"), _values(_ALL)["features"])

    @pytest.mark.parametrize(
        ("dtype", "column", "number", "message"),
        [
            ("float16", "q", np.nan, r"q is NaN or infinite in rows 4\."),
            ("float16", "q", -np.inf, r"q is NaN or infinite in rows 4\."),
            ("float16", "features", 1e6, r"in rows 4: the largest magnitude is 1e\+06, .*Use dtype float32"),
            *((one, "features", np.nan, r"features is NaN or .* rows 4\.") for one in _LARGEST),
            *((one, "features", np.inf, r"features is NaN or .* rows 4\.") for one in _LARGEST),
            *((one, "features", 1e39, r"not fit into float32 in rows 4: .* is 1e\+39") for one in _LARGEST),
        ],
    )
    def test_rows_that_are_not_finite_are_named(self, store, dtype, column, number, message):
        """The error names the row numbers of the table, not the positions in the batch; nothing is written."""
        table = store.create_table("ckpt-0", _spec(dtype))
        values = {name: array.astype(np.float64) for name, array in _values([9, 4], dtype=dtype).items()}
        values[column].reshape(2, -1)[1, -1] = number
        _raises(NonFiniteError, message, table.put, [9, 4], values)
        assert not table.done().any()
        _fill(table, dtype)

    @_DTYPES
    def test_read_arrays_are_not_for_writing(self, store, dtype):
        """Rows of a chunk, as they are read and as they are stored, are read-only; ``read`` and ``read_rows`` copy."""
        table = _fill(store.create_table("ckpt-0", _spec(dtype)), dtype)
        stored = table.stored_chunk(0, "features").arrays
        for array in (table.read_chunk(0, "q"), table.read_chunk(0, "features"), *stored):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        table.read("q")[:] = 0
        table.read_rows("q", [0])[:] = 0
        np.testing.assert_array_equal(table.read("q"), _values(_ALL, dtype=dtype)["q"])

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda _, table: table.read_chunk(0, "p"), r"no column 'p'.*features"),
            *((lambda _, table, n=n: table.read_chunk(n, "q"), "3 chunks") for n in (-1, 3)),
            (lambda _, table: table.read_done(3), "3 chunks"),
            (lambda _, table: table.claim(3).__enter__(), "no chunk 3"),
            *((lambda _, table, r=r: table.read_rows("q", r), "ows") for r in ([11], [-1], [0.5], [[0]])),
            *(  # the range is not cut
                (lambda _, table, ends=ends: list(table.blocks("q", *ends)), "has rows 0 to 10")
                for ends in ((-1, 3), (4, 3), (0, 12))
            ),
            (lambda store, _: store.create_table("ckpt-0/x", _SPEC), "is a table"),
            (lambda store, _: store.create_table("ckpt-0/features", _SPEC), "is a table"),
            (lambda store, _: store.create_table("targets", _SPEC), "is a group"),
            (lambda store, _: store.open_table("targets"), "is a group"),
            (lambda store, _: store.cache("gram", "key", np.array([object()])), "arrays of numbers"),
            (lambda store, _: store.cache("gram", "k" * 1025, np.zeros(1)), "cache key"),
        ],
    )
    def test_what_there_cannot_be_is_refused_by_name(self, store, table, use, message):
        """Columns, chunks and rows that a table does not have, tables in tables, groups for tables, and no numbers."""
        store.create_table("targets/test", _SPEC)
        _fill(table)
        _raises(InvalidInputError, message, use, store, table)
        assert store.table_names() == ["ckpt-0", "targets/test"]

    def test_tables_are_listed_in_natural_order(self, store):
        """Numbers in names are compared as numbers at every depth; a prefix selects a group of tables."""
        names = ["ckpt-2", "ckpt-10", "targets/b/ckpt-1", "targets/a/ckpt-10", "targets/a/ckpt-9"]
        for name in names[::-1]:
            store.create_table(name, _SPEC)
        listed = ["ckpt-2", "ckpt-10", "targets/a/ckpt-9", "targets/a/ckpt-10", "targets/b/ckpt-1"]
        assert store.table_names() == listed
        assert store.table_names("targets/a") == ["targets/a/ckpt-9", "targets/a/ckpt-10"]
        assert store.table_names("scores") == []

    def test_a_table_is_opened_as_it_was_created(self, path, store):
        """Shape, fingerprint and attributes are stored; the attributes of the first ``create_table`` stay."""
        store.create_table("ckpt-0", _SPEC, {"source": ("a.pt", 1)})
        store.create_table("ckpt-0", _SPEC, {"source": "b.pt"})
        again = self.open(path, "r")
        assert again.open_table("ckpt-0").spec == _SPEC
        assert again.attributes("ckpt-0") == store.attributes("ckpt-0") == {"source": ["a.pt", 1]}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_rows": 12}, "num_rows is 11 there, 12 here"),
            ({"chunk_rows": 8}, "chunk_rows is 4 there, 8 here"),
            ({"columns": _SPEC.columns[:1]}, "columns has 2 entries there, 1 here"),
            ({"fingerprint": {"checkpoint": "abd"}}, "checkpoint is 'abc' there, 'abd' here"),
        ],
    )
    def test_a_table_of_another_shape_is_refused(self, store, change, message):
        """The error names each key that differs with both values."""
        store.create_table("ckpt-0", _SPEC)
        _raises(ManifestMismatchError, message, store.create_table, "ckpt-0", replace(_SPEC, **change))

    @pytest.mark.parametrize(
        "change",
        [
            *({"num_rows": 0}, {"chunk_rows": 0}, {"columns": ()}, {"fingerprint": {"set": {1, 2}}}),
            {"columns": (_SPEC.columns[0], _SPEC.columns[0])},
            {"columns": (Column("a", 3, "int4"), Column("a_scale", None, "float32"))},
            *({"columns": (Column(*one),)} for one in (("a", 0, "float16"), ("a", 3, "int16"))),
            *({"columns": (Column(*one),)} for one in (("a", None, "int8"), ("a" * 60, 3, "int8"))),
            {"columns": (Column("../x", 3, "float16"),)},
        ],
    )
    def test_a_table_that_cannot_exist_is_refused(self, store, change):
        """An invalid spec creates nothing."""
        _raises(InvalidInputError, None, store.create_table, "ckpt-0", replace(_SPEC, **change))
        assert store.table_names() == []

    def test_names_that_are_no_folder_names_are_refused(self, tmp_path, store):
        """All methods that take a name refuse it, and no file comes to be, in the store or outside of it."""
        before, zeros, said = sorted(tmp_path.rglob("*")), np.zeros(1), "name|must be a string"
        for name in _BAD_NAMES:
            for use in (store.open_table, store.drop_table, store.drop_entry, store.attributes):
                _raises(InvalidInputError, said, use, name)
            for use in (store.cached, store.entry):
                _raises(InvalidInputError, said, use, name, "key")
            for use in (store.cache, store.put_entry):
                _raises(InvalidInputError, said, use, name, "key", zeros)
            _raises(InvalidInputError, said, store.grow_table, name, 12)
            columns = (Column(name, 2, "float32"),)
            for given in ((name, _SPEC), ("t", TableSpec(4, columns, 4))):
                _raises(InvalidInputError, said, store.create_table, *given)
            if name:
                _raises(InvalidInputError, said, store.table_names, name)
        assert sorted(tmp_path.rglob("*")) == before
        assert store.table_names() == store.entry_names() == []

    def test_a_store_for_reading_refuses_to_write(self, path, store, table):
        """Every change raises an error; a derived array is not stored, without an error."""
        table.put(0, _values(slice(0, 2)))
        store.put_entry("runs", "key", np.zeros(1))
        reader = self.open(path, "r")
        opened = reader.open_table("ckpt-0")
        assert not reader.writable
        for change in (
            lambda: reader.create_table("ckpt-0", _SPEC),
            lambda: reader.drop_table("ckpt-0"),
            lambda: reader.grow_table("ckpt-0", 12),
            lambda: reader.merge([reader]),
            lambda: reader.put_entry("runs", "key", np.ones(1)),
            lambda: reader.drop_entry("runs"),
            lambda: opened.put(2, _values([2, 3])),
            lambda: opened.claim(0).__enter__(),
        ):
            _raises(ReadOnlyStoreError, None, change)
        reader.cache("gram", "key", np.zeros(1))
        assert reader.cached("gram", "key") is None
        assert (table.spec, table.done().sum()) == (_SPEC, 2)
        found = store.entry("runs", "key")
        assert found is not None
        assert not found.any()

    def test_a_closed_store_refuses_to_write(self, path, table):
        """Leaving a ``with`` block closes the store; its rows stay."""
        with self.open(path, "r+") as store:
            other = _fill(store.create_table("ckpt-1", _SPEC))
        _raises(StateError, "closed", other.put, 0, _values([0]))
        _raises(StateError, "closed", store.create_table, "ckpt-2", _SPEC)
        assert self.open(path, "r").open_table("ckpt-1").complete

    def test_the_content_key_depends_on_the_contents_alone(self, store):
        """The key does not depend on the order of rows or on the batch size; a changed value or shape changes it."""
        keys = []
        for name, order, seed in (("a", range(11), 0), ("b", range(10, -1, -1), 0), ("c", range(11), 1)):
            table = store.create_table(name, _SPEC)
            for row in order:
                table.put(row, _values([row], seed=seed))
            keys.append(table.content_key())
        assert keys[0] == keys[1] != keys[2]
        for name, width in (("d", None), ("e", 1)):  # the same bytes
            table = store.create_table(name, TableSpec(4, (Column("q", width, "float32"),), 4))
            table.put(0, {"q": np.ones(4 if width is None else (4, 1), np.float32)})
            keys.append(table.content_key())
        assert keys[3] != keys[4]

    def test_a_missing_or_dropped_table_is_an_error_that_names_the_others(self, path, store):
        """Other tables stay, a new table can have the name, and old handles cannot write into the new table."""
        old = store.create_table("ckpt-0", _SPEC)
        old.put(0, _values(slice(0, 6)))
        _fill(store.create_table("ckpt-1", _SPEC))
        store.drop_table("ckpt-0")
        assert store.table_names() == ["ckpt-1"]
        assert [store.has_table(name) for name in ("ckpt-0", "ckpt-1", "targets/a")] == [False, True, False]
        for ask in (store.open_table, store.drop_table, store.attributes):
            _raises(MissingStoreError, r"'ckpt-0'.*ckpt-1", ask, "ckpt-0")
        assert not store.create_table("ckpt-0", _SPEC).done().any()
        _raises(StateError, "dropped", old.put, 0, _values(slice(0, 6)))
        assert self.open(path, "r").open_table("ckpt-1").complete

    @pytest.mark.parametrize(
        ("dtype", "done", "more"),
        [
            *(("float16", done, more) for done in (0, 4, 9, 11) for more in (1, 3, 4, 5, 9)),
            *((dtype, 11, 5) for dtype in _LARGEST),
        ],
    )
    def test_a_grown_table_keeps_its_rows(self, path, store, dtype, done, more):
        """Rows stay and new rows are pending, for a full, partly filled or empty last chunk.

        In the end the table has the spec, the content key and the rows of one that was created with all rows.
        """
        size, values = 11 + more, _values(_ALL, 0, dtype, num_rows=11 + more)
        whole = store.create_table("ckpt-1", _spec(dtype, num_rows=size))
        whole.put(0, values)
        table = store.create_table("ckpt-0", _spec(dtype))
        if done:
            table.put(0, {name: array[:done] for name, array in values.items()})
        grown = store.grow_table("ckpt-0", size)
        assert grown.spec == whole.spec
        assert self.open(path, "r").open_table("ckpt-0").pending().tolist() == list(range(done, size))
        for start in range(done, size, 2):
            grown.put(start, {name: array[start : start + 2] for name, array in values.items()})
        read = self.open(path, "r").open_table("ckpt-0")
        assert read.content_key() == whole.content_key()
        for name, expected in _stored(values, dtype).items():
            np.testing.assert_array_equal(read.read(name), expected)
        assert store.grow_table("ckpt-0", size).complete

    def test_a_table_never_loses_rows(self, path, table):
        """A table cannot shrink, and a handle that was opened before growing cannot put rows."""
        store = self.open(path, "r+")
        _raises(InvalidInputError, "cannot shrink: it has 11 rows", store.grow_table, "ckpt-0", 10)
        old = store.open_table("ckpt-0")
        store.grow_table("ckpt-0", 12)
        _raises(StateError, None, old.put, 0, _values([0]))
        _raises(MissingStoreError, None, store.grow_table, "ckpt-1", 12)

    @_DTYPES
    def test_done_rows_of_an_unfinished_chunk_can_be_copied(self, path, store, dtype):
        """``read_done`` returns only done rows, as new arrays; quantised ones as float32."""
        table = store.create_table("ckpt-0", _spec(dtype))
        table.put([9, 0, 2], _values([9, 0, 2], dtype=dtype))
        table.put(4, _values(slice(4, 8), dtype=dtype))
        reader = self.open(path, "r").open_table("ckpt-0")
        for chunk, expected in ((0, [0, 2]), (1, [4, 5, 6, 7]), (2, [9])):
            rows, values = reader.read_done(chunk)
            assert rows.tolist() == expected
            for name, array in _stored(_values(expected, dtype=dtype), dtype).items():
                assert values[name].dtype == array.dtype
                np.testing.assert_array_equal(values[name], array)
            values["q"][:] = 0
        np.testing.assert_array_equal(table.read_chunk(1, "q"), _values(slice(4, 8), dtype=dtype)["q"])

    def test_checksums_are_those_of_committed_chunks(self, table):
        """Equal contents have equal checksums; a chunk that is not committed has none."""
        table.put(0, _values(slice(0, 4)))
        table.put(4, _values(slice(0, 4)))
        assert table.checksums(0) == table.checksums(1)
        assert sorted(table.checksums(0)) == ["features", "q"]
        _raises(IncompleteStoreError, "Rows 8 to 10", table.checksums, 2)

    def test_differences_are_named(self, path, store):
        """``diff`` names different settings, tables, fingerprints, done rows, and bytes of chunks and rows."""
        other = self.create(f"{path}-other", Manifest({**_MANIFEST.fingerprint, "proj_dim": 4}))
        for each, seed, rows in ((store, 0, 10), (other, 1, 9)):
            each.create_table("ckpt-0", _SPEC).put(0, _values(slice(0, rows), seed=seed))
        store.create_table("ckpt-1", _SPEC)
        store.create_table("ckpt-2", TableSpec(11, _SPEC.columns, 4, {"checkpoint": "x"}))
        other.create_table("ckpt-2", TableSpec(12, _SPEC.columns, 4, {"checkpoint": "y"}))
        found = [str(difference) for difference in store.diff(other)]
        assert found[0] == "manifest: proj_dim: 3 here, 4 there"
        assert found[1] == "ckpt-0: row 9: done here, pending there"
        chunks = [text.split(": checksum")[0] for text in found[2:6]]
        assert chunks[:2] == [f"ckpt-0: {name} in rows 0 to 3 (chunk 0)" for name in ("features", "q")]
        assert chunks[2:] == [f"ckpt-0: {name} in rows 4 to 7 (chunk 1)" for name in ("features", "q")]
        assert found[6:] == [
            "ckpt-0: row 8: other bytes here, other bytes there",
            "ckpt-1: table: present here, absent there",
            "ckpt-2: checkpoint: x here, y there",
            "ckpt-2: table num_rows: 11 here, 12 there",
        ]
        first, second = ((d.table, d.what, d.there, d.here) for d in other.diff(store)[:2])
        assert (first, second) == ((None, "proj_dim", 3, 4), ("ckpt-0", "row 9", "done", "pending"))

    @_DTYPES
    def test_a_merge_takes_what_is_missing(self, path, store, dtype):
        """Missing rows and tables come from complete, incomplete and overlapping parts; merging twice adds nothing."""

        def put(table, rows):
            table.put(rows, _values(rows, dtype=dtype))

        spec = _spec(dtype)
        put(store.create_table("ckpt-0", spec, {"source": "here"}), [0, 1, 2])
        parts = [self.create(f"{path}-{number}", _MANIFEST) for number in range(2)]
        put(parts[0].create_table("ckpt-0", spec), [2, 3, 4, 5, 6])
        put(parts[1].create_table("ckpt-0", spec), [8, 10, 0])
        whole = _fill(parts[1].create_table("targets/a", spec, {"source": "part"}), dtype)
        found = [str(difference) for difference in store.diff(parts[1])]
        assert "ckpt-0: rows 1 to 2: done here, pending there" in found
        assert "targets/a: table: absent here, present there" in found
        assert store.merge(parts) == {"ckpt-0": 6, "targets/a": 11}
        merged = store.open_table("ckpt-0")
        assert merged.pending().tolist() == [7, 9]
        put(merged, [7, 9])
        for name in ("ckpt-0", "targets/a"):
            table = store.open_table(name)
            assert table.content_key() == whole.content_key()
            for column, values in _stored(_values(_ALL, dtype=dtype), dtype).items():
                np.testing.assert_array_equal(table.read(column), values)
        assert store.attributes("targets/a") == {"source": "part"}
        assert store.merge(parts) == {"ckpt-0": 0, "targets/a": 0}

    @_DTYPES
    @pytest.mark.parametrize("rows", [3, 11])
    def test_a_merge_refuses_rows_that_contradict(self, path, store, rows, dtype):
        """The error names the rows, and nothing is copied from that part."""
        store.create_table("ckpt-0", _spec(dtype)).put(0, _values(slice(0, rows), dtype=dtype))
        part = self.create(f"{path}-part", _MANIFEST)
        part.create_table("ckpt-1", _spec(dtype))
        changed = _values(_ALL, dtype=dtype)
        changed["features"][1, 0] += 1
        changed["q"][2] += 1
        part.create_table("ckpt-0", _spec(dtype)).put(0, changed)
        _raises(InvalidInputError, r"ckpt-0: rows 1, 2 of .* differ in their bytes", store.merge, [part])
        assert store.table_names() == ["ckpt-0"]
        assert store.open_table("ckpt-0").done().sum() == rows

    def test_a_merge_refuses_other_settings(self, path, store):
        """Different settings of the store or of a table raise an error that names the key."""
        store.create_table("ckpt-0", _SPEC)
        other = self.create(f"{path}-other", Manifest({**_MANIFEST.fingerprint, "proj_dim": 4}))
        _raises(ManifestMismatchError, "proj_dim is 3 there, 4 here", store.merge, [other])
        part = self.create(f"{path}-part", _MANIFEST)
        part.create_table("ckpt-0", TableSpec(11, _SPEC.columns, 4, {"checkpoint": "abd"}))
        _raises(ManifestMismatchError, "checkpoint is 'abc' there, 'abd' here", store.merge, [part])

    def test_a_claimed_chunk_takes_rows_of_its_holder_alone(self, path, table):
        """Other handles get ``BusyError``, can put rows into other chunks, and can claim the chunk afterwards."""
        with table.claim(1) as pending:
            assert pending.tolist() == [4, 5, 6, 7]
            table.put(4, _values(slice(4, 5)))
            other = self.open(path, "r+").open_table("ckpt-0")
            _raises(BusyError, r"rows 4 to 7 \(chunk 1\)", other.put, 5, _values(slice(5, 6)))
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

    def test_a_chunk_is_given_up_when_the_block_fails(self, path, table):
        """An error inside the block releases the chunk; its rows stay."""
        table.put(9, _values(slice(9, 10)))
        with pytest.raises(StateError, match="done already"), table.claim(2):
            table.put(9, _values(slice(9, 10)))
        with self.open(path, "r+").open_table("ckpt-0").claim(2) as pending:
            assert pending.tolist() == [8, 10]

    def test_the_fingerprint_is_replaced_only_if_it_is_the_known_one(self, path, store):
        """Repeating the call has no effect; if the known fingerprint differs, the error names the key."""
        known = dict(_MANIFEST.fingerprint)
        given = {**known, "dataset": {"num_rows": 12}}
        store.replace_fingerprint(known, given)
        store.replace_fingerprint(known, given)
        for seen in (store.manifest, self.open(path, "r").manifest):
            assert seen == Manifest(given, _MANIFEST.made_with)
        with pytest.raises(ManifestMismatchError, match=r"dataset\.num_rows is 12 there, 'absent' here"):
            self.open(path, "r+").replace_fingerprint(known, {**known, "dataset": {"num_rows": 13}})
        with pytest.raises(ReadOnlyStoreError):
            self.open(path, "r").replace_fingerprint(given, known)
        _raises(InvalidInputError, "JSON", store.replace_fingerprint, given, {"seed": float("nan")})
        assert store.manifest.fingerprint == given

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
    def test_a_derived_array_and_an_entry_are_stored_under_their_key(self, path, store, array):
        """Shape, dtype and values are stored; another key or name finds nothing; a later array replaces it."""
        reader = self.open(path, "r")
        entries = (store.put_entry, store.entry, reader.entry)
        for put, get, read in ((store.cache, store.cached, reader.cached), entries):
            put("ckpt-0/gram", "v1", np.zeros(7))
            put("ckpt-0/gram", "v2", array)
            found = read("ckpt-0/gram", "v2")
            assert found is not None
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)
            assert get("ckpt-0/gram", "v1") is read("ckpt-0/gram", "v1") is None
            assert get("gram", "v2") is None

    def test_a_dropped_table_takes_none_with_it_whose_name_begins_as_its_own(self, path, store):
        for name in ("ckpt-1", "ckpt-10"):
            _fill(store.create_table(name, _spec()))
        store.drop_table("ckpt-1")
        reader = self.open(path, "r")
        assert reader.table_names() == ["ckpt-10"]
        assert reader.open_table("ckpt-10").read("features").shape == (11, 3)

    def test_an_entry_is_listed_until_it_is_dropped(self, path, store):
        store.put_entry("verdicts/a", "v2", np.zeros(7))
        store.put_entry("runs", "key", np.arange(3, dtype=np.uint8))
        reader = self.open(path, "r")
        assert reader.entry_names() == ["runs", "verdicts/a"]
        assert reader.entry_names("verdicts") == ["verdicts/a"]
        assert reader.table_names() == []
        store.drop_entry("verdicts/a")
        store.drop_entry("verdicts/a")
        assert self.open(path, "r").entry("verdicts/a", "v2") is None
        assert store.entry_names() == ["runs"]
