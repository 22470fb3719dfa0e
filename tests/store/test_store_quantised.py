"""int8 and int4 on disk: plain zarr reads them with the lines that stand beside them, and damage in them is found."""

import json
import os

import numpy as np
import pytest
import store_cases
import zarr
from store_cases import (
    MANIFEST,
    NAME,
    PACKED,
    content,
    edit,
    flipped,
    folder,
    overwrite,
    reading,
    staged,
    writing,
)

from trak_lite.errors import CorruptStoreError
from trak_lite.store import Column, MemoryFeatureStore, TableSpec, ZarrFeatureStore, check_store
from trak_lite.store._columns import StoredRows
from trak_lite.store._failpoints import FAILPOINTS
from trak_lite.store._grid import chunk_rows_for

DTYPES = pytest.mark.parametrize("dtype", ["int8", "int4"])
ROWS = np.random.default_rng(0).standard_normal((11, 5)).astype(np.float32)
ROWS[4] = 0


def spec_of(dtype, width=5):
    return TableSpec(11, (Column("features", width, dtype), Column("q", None, "float32")), 4)


def values(rows, width=5):
    return {"features": ROWS[rows, :width], "q": ROWS[rows, 0]}


def fill(path, dtype, width=5):
    with writing(path, spec_of(dtype, width)) as table:
        table.put(0, values(slice(0, 11), width))
        return table.read("features")


def plain_rows(path):
    """What the lines in the attributes make of the table's zarr group, with NumPy alone."""
    group = zarr.open_group(f"{path}/{NAME}", mode="r")
    scope = {"group": group, "np": np}
    exec("\n".join(group["features"].attrs["trak_lite"]["to_float32"]), scope)
    return scope["rows"]


@DTYPES
@pytest.mark.parametrize("width", [1, 4, 5])
def test_plain_zarr_and_the_lines_in_the_attributes_give_the_rows_bitwise(path, dtype, width):
    read = fill(path, dtype, width)
    rows = plain_rows(path)
    assert (rows.dtype, rows.shape) == (np.float32, (11, width))
    assert rows.tobytes() == read.tobytes()


@DTYPES
def test_the_lines_are_three_at_most_and_stand_in_the_documentation(dtype):
    lines = Column("features", 5, dtype).recipe
    assert 0 < len(lines) <= 3
    documented = Column.__doc__.replace('"', "'")
    for line in lines:
        assert line.replace(":5]", ":width]") in documented
    assert Column("features", 5, "float16").recipe == ()


def test_int4_is_packed_two_per_byte_low_half_first(path):
    """Entries 7, -7, 0 of a row with scale 1: bytes 0xF and 0x1, then 0x8 and a padding of 0x8."""
    spec = TableSpec(1, (Column("features", 3, "int4"),), 32)
    with writing(path, spec) as table:
        table.put(0, {"features": np.array([[7.0, -7.0, 0.0]])})
    group = zarr.open_group(f"{path}/{NAME}", mode="r")
    assert group["features"][:].tolist() == [[0x1F, 0x88]]
    assert group["features_scale"][:].tolist() == [1.0]


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [("float32", 8192), ("float16", 4096), ("int8", 2052), ("int4", 1028)]
)
def test_a_row_takes_the_bytes_that_it_says(path, dtype, row_bytes):
    """On disk: the chunk files together, over the rows of a chunk."""
    spec = TableSpec(32, (Column("features", 2048, dtype),), 32)
    with writing(path, spec) as table:
        table.put(0, {"features": np.ones((32, 2048))})
    files = [
        os.path.join(at, name) for at, _, names in os.walk(folder(path)) for name in names if name[:2] == "c."
    ]
    assert sum(map(os.path.getsize, files)) == 32 * row_bytes
    assert spec.row_bytes == row_bytes


@DTYPES
def test_unwritten_rows_read_as_nan_elsewhere(path, dtype):
    """By the fill of the scale; the integers are one that no row holds, so the padding is known as well."""
    with writing(path, spec_of(dtype)) as table:
        table.put(0, values(slice(0, 6)))
    rows = plain_rows(path)
    assert np.isfinite(rows[:4]).all()
    assert np.isnan(rows[4:]).all()


@DTYPES
def test_the_last_chunk_is_padded_with_what_no_row_holds(path, dtype):
    fill(path, dtype)
    last = np.frombuffer(content(folder(path, "features", "c.2.0")), np.int8 if dtype == "int8" else np.uint8)
    assert (last.reshape(4, -1)[3] == {"int8": -128, "int4": 0}[dtype]).all()
    assert np.isnan(np.frombuffer(content(folder(path, "features_scale", "c.2")), "<f4")[3])


@DTYPES
def test_xarray_opens_a_quantised_table(path, dtype):
    xarray = pytest.importorskip("xarray")
    fill(path, dtype)
    with xarray.open_zarr(folder(path), consolidated=False) as table:
        assert table["features"].dims == ("row", "features_dim")
        assert table["features_scale"].dims == ("row",)


@DTYPES
def test_disk_and_memory_hold_the_same_bytes(path, dtype):
    fill(path, dtype)
    memory = MemoryFeatureStore(MANIFEST).create_table(NAME, spec_of(dtype))
    memory.put(0, values(slice(0, 11)))
    with reading(path) as table:
        assert table.content_key() == memory.content_key()
        for chunk in range(3):
            assert table.checksums(chunk) == memory.checksums(chunk)
            ours, theirs = table.stored_chunk(chunk, "features"), memory.stored_chunk(chunk, "features")
            for one, other in zip(ours.arrays, theirs.arrays, strict=True):
                assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


@DTYPES
@pytest.mark.parametrize("file", ["features/c.1.0", "features_scale/c.1"])
def test_a_flipped_bit_in_integers_or_scales_is_found_and_repaired(path, dtype, file):
    expected = fill(path, dtype)
    overwrite(folder(path, file), flipped(content(folder(path, file)), 3, 1))
    with reading(path) as table, pytest.raises(CorruptStoreError, match="checksum"):
        table.read("features")

    report = check_store(path)
    assert [(f.chunk, f.rows, f.column) for f in report.findings] == [(1, range(4, 8), file.split("/")[0])]
    check_store(path, repair=True)
    with writing(path, spec_of(dtype)) as table:
        assert table.pending().tolist() == [4, 5, 6, 7]
        table.put(4, values(slice(4, 8)))
        np.testing.assert_array_equal(table.read("features"), expected)
    assert check_store(path).ok


@DTYPES
@pytest.mark.parametrize("array", ["features", "features_scale", "q"])
def test_a_flipped_bit_in_a_staged_row_makes_it_pending(path, dtype, array):
    with writing(path, spec_of(dtype)) as table:
        table.put(0, values(slice(0, 1)))
        table.put(1, values(slice(1, 3)))
    overwrite(staged(path, 0, array), flipped(content(staged(path, 0, array)), 0, 0))
    with reading(path) as table:
        assert table.pending().tolist() == [0, *range(3, 11)]


@DTYPES
def test_a_reader_takes_integers_and_scales_from_one_commit(path, dtype):
    """Where a chunk was set aside and committed with other rows since, never the old ones with the new scale."""
    fill(path, dtype)
    with reading(path) as table:
        table.read_chunk(0, "features")
        name = folder(path, "features_scale", "c.1")
        overwrite(name, flipped(content(name), 0, 0))
        check_store(path, repair=True)
        with writing(path, spec_of(dtype)) as writer:
            writer.put(4, {name: 3 * array for name, array in values(slice(4, 8)).items()})
            expected = writer.read_chunk(1, "features")
        np.testing.assert_array_equal(table.read_chunk(1, "features"), expected)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("failpoint", [name for name in FAILPOINTS if name != "column_taken_back"])
def test_a_killed_run_ends_with_the_same_bytes(path, victims, failpoint, count):
    """Integers and scales are committed by one record: a kill at any step parts none from the other."""
    assert victims.killed(f"{failpoint}:{count}", "write_packed", path)
    with writing(path, PACKED) as table:
        pending = table.pending()
        if len(pending):
            table.put(pending, store_cases.values(pending, PACKED))
        memory = MemoryFeatureStore(MANIFEST).create_table(NAME, PACKED)
        memory.put(0, store_cases.values(range(11), PACKED))
        assert table.content_key() == memory.content_key()


@pytest.mark.parametrize("version", [2, None, "1"])
def test_rows_of_another_quantisation_are_refused(path, version):
    """Before a number is read."""
    fill(path, "int8")
    edit(folder(path, "zarr.json"), lambda record: record["columns"][0].update(quantisation=version))
    with (
        ZarrFeatureStore.open(path) as store,
        pytest.raises(CorruptStoreError, match="quantisation of features is"),
    ):
        store.open_table(NAME)


@pytest.mark.parametrize("key", ["data_type", "fill_value", "codecs"])
def test_a_quantised_array_of_another_layout_is_refused(path, key):
    fill(path, "int8")
    name = folder(path, "features", "zarr.json")
    with open(name) as file:
        document = json.load(file)
    document[key] = {"data_type": "uint8", "fill_value": 0, "codecs": [{"name": "bytes"}, {"name": "zstd"}]}[
        key
    ]
    with open(name, "w") as file:
        json.dump(document, file)
    with ZarrFeatureStore.open(path) as store, pytest.raises(CorruptStoreError, match=f"{key} is"):
        store.open_table(NAME)


@pytest.mark.parametrize(("width", "rows"), [(16, 256), (2048, 256), (4096, 128), (100_000, 64)])
def test_rows_are_dequantised_in_blocks_of_64_to_256_in_one_buffer(width, rows):
    column = Column("features", width, "int4")
    stored = StoredRows(column, (np.zeros((300, width // 2), np.uint8), np.ones(300, np.float32)))
    blocks = list(stored.blocks())
    assert [len(block) for _, block in blocks] == [rows] * (300 // rows) + [300 % rows]
    assert len({block.__array_interface__["data"][0] for _, block in blocks}) == 1


def test_a_chunk_of_small_rows_has_more_of_them():
    """The chunk grows to 64 MiB of the widest array, whatever its dtype."""
    chunk_rows = [
        chunk_rows_for(10**8, Column("features", 2048, dtype).arrays[0].row_bytes)
        for dtype in ("float32", "float16", "int8", "int4")
    ]
    assert chunk_rows == [8192, 16384, 32768, 65536]
