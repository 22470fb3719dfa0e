"""int8 and int4 on disk: plain zarr reads them with the lines that stand beside them, and damage in them is found."""

import os

import numpy as np
import pytest
from late import Late
from store_cases import MANIFEST, NAME, content, edit, files_below, folder, raises, writing

from trak_lite.errors import CorruptStoreError
from trak_lite.store import Column, MemoryFeatureStore, TableSpec, ZarrFeatureStore

zarr = Late("zarr")

SIZES = [("float32", 8192), ("float16", 4096), ("int8", 2052), ("int4", 1028)]
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
    """The lines are three at most, and stand in the documentation."""
    read = fill(path, dtype, width)
    rows = plain_rows(path)
    assert (rows.dtype, rows.shape) == (np.float32, (11, width))
    assert rows.tobytes() == read.tobytes()
    scale = zarr.open_array(folder(path, "features_scale"), mode="r")
    assert scale.metadata.dimension_names == ("row",)
    lines = Column("features", width, dtype).recipe
    assert 0 < len(lines) <= 3
    assert Column("features", width, "float16").recipe == ()
    documented = Column.__doc__.replace('"', "'")
    for line in lines:
        assert line.replace(f":{width}]", ":width]") in documented


@DTYPES
def test_unwritten_and_padded_rows_are_told_from_all_others(path, dtype):
    """By the NaN of their scale; the integers are one that no row holds."""
    with writing(path, spec_of(dtype)) as table:
        table.put(0, values(slice(0, 6)))
        rows = plain_rows(path)
        assert np.isfinite(rows[:4]).all()
        assert np.isnan(rows[4:]).all()
        table.put(6, values(slice(6, 11)))
    last = np.frombuffer(content(folder(path, "features", "c.2.0")), np.int8 if dtype == "int8" else np.uint8)
    assert (last.reshape(4, -1)[3] == {"int8": -128, "int4": 0}[dtype]).all()
    assert np.isnan(np.frombuffer(content(folder(path, "features_scale", "c.2")), "<f4")[3])


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_a_row_takes_the_bytes_that_it_says(path, dtype, size):
    """On disk: the chunk files together, over the rows of a chunk."""
    spec = TableSpec(32, (Column("features", 2048, dtype),), 32)
    with writing(path, spec) as table:
        table.put(0, {"features": np.ones((32, 2048))})
    chunks = [name for name in files_below(folder(path)) if os.path.basename(name)[:2] == "c."]
    assert sum(map(os.path.getsize, chunks)) == 32 * size
    assert spec.row_bytes == size


@pytest.mark.parametrize("said", [2, None, "1"])
def test_rows_of_another_quantisation_are_refused(path, said):
    """Before a number is read."""
    fill(path, "int8")
    edit(folder(path, "zarr.json"), lambda record: record["columns"][0].update(quantisation=said))
    with ZarrFeatureStore.open(path) as store:
        raises(CorruptStoreError, "quantisation of features is", store.open_table, NAME)


@pytest.mark.parametrize(("width", "rows"), [(16, 256), (2048, 256), (4096, 128), (20_000, 64)])
def test_rows_are_dequantised_in_blocks_of_64_to_256_in_one_buffer(width, rows):
    table = MemoryFeatureStore(MANIFEST).create_table("t", TableSpec(300, (Column("f", width, "int4"),), 300))
    table.put(0, {"f": np.ones((300, width), np.float32)})
    blocks = list(table.blocks("f"))
    assert [len(block) for _, block in blocks] == [rows] * (300 // rows) + [300 % rows]
    assert len({block.__array_interface__["data"][0] for _, block in blocks}) == 1
