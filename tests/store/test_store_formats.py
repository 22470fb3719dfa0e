"""A finished store is plain zarr: other tools read it bitwise and without complaint."""

import json
import os
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from late import Late
from store_cases import MANIFEST, NAME, SPEC, content, folder, make, raises, values, writing

from trak_lite.store import Column, TableSpec, ZarrFeatureStore
from trak_lite.store._grid import chunk_rows_for

zarr = Late("zarr")


@pytest.fixture
def full(path):
    with ZarrFeatureStore.create(path, MANIFEST) as made:
        made.cache("ckpt-0/gram", "key", np.eye(2))
    with writing(path) as table:
        table.put(0, values(range(6)))
        array = zarr.open(folder(path, "q"), mode="r")[:]  # NaN until a chunk is committed, never staged rows
        np.testing.assert_array_equal(array[:4], values(range(4))["q"])
        assert np.isnan(array[4:]).all()
        table.put(6, values(range(6, 11)))
    return path


@pytest.mark.quick
def test_plain_zarr_reads_every_column_bitwise(full):
    """And walks the whole store without a warning, which is an error here: strange files are where it does not look."""
    for name, expected in values(range(11)).items():
        array = zarr.open(f"{full}/{NAME}/{name}", mode="r")
        assert array.dtype == expected.dtype
        assert array[:].tobytes() == expected.tobytes()
    assert np.isnan(np.fromfile(folder(full, "q/c.2"), "<f4")).tolist() == [False, False, False, True]
    names = {name for name, _ in zarr.open_group(full, mode="r").members(max_depth=None)}
    columns = {f"{NAME}/{column}" for column in ("features", "q", "w")}
    assert names == {"targets", "targets/test", NAME, ".cache", ".tables"} | columns
    group = zarr.open_group(full, mode="r")
    assert group.attrs["trak_lite"]["fingerprint"] == MANIFEST.fingerprint
    assert group[NAME].attrs["trak_lite"]["fingerprint"] == SPEC.fingerprint


def test_documents_are_those_that_zarr_would_write(full, tmp_path):
    """Key by key: whoever reads them knows nothing of who has written them."""
    made = zarr.create_array(
        f"{tmp_path}/made", shape=(11, 3), chunks=(4, 3), dtype="<f2", compressors=None, filters=None,
        fill_value=np.nan, chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=("row", "features_dim"),
    )  # fmt: skip
    ours = folder(full, "features")
    assert made.metadata.to_dict() == zarr.open_array(ours, mode="r").metadata.to_dict()
    assert json.loads(content(f"{tmp_path}/made/zarr.json")) == json.loads(content(f"{ours}/zarr.json"))


def test_a_mapped_chunk_can_be_shared_with_torch_and_not_be_harmed(full):
    """The pages are private: even an array that was made writable leaves the file alone."""
    with ZarrFeatureStore.open(full) as made:
        table = made.open_table(NAME)
        rows = table.read_chunk(0, "q")
        rows.flags.writeable = True
        rows[:] = 0
        assert not table.read_chunk(0, "q").flags.writeable
    np.testing.assert_array_equal(np.fromfile(folder(full, "q/c.0"), "<f4"), values(range(4))["q"])


def test_a_store_is_used_without_torch_and_zarr(path, victims):
    imported = victims.run("modules", path)
    assert "trak_lite.store" in imported
    assert not {"torch", "zarr"} & set(imported)


LOOKS = ("lstat", "stat", "open", "listdir", "scandir", "access", "readlink")


def test_opening_looks_at_each_file_at_most_once(tmp_path, monkeypatch):
    """So that 100,000 chunks open in seconds: the size of each file is asked for once, and nothing else per chunk."""
    counts = []
    for chunks in (10, 30):
        path, spec = str(tmp_path / f"{chunks}"), TableSpec(chunks, SPEC.columns, 1)
        make(path, range(chunks), spec)
        with monkeypatch.context() as patched:
            looks = {name: mock.Mock(wraps=getattr(os, name)) for name in LOOKS}
            for name, look in looks.items():
                patched.setattr(os, name, look)
            with ZarrFeatureStore.open(path) as made:
                assert made.open_table(NAME).complete
        counts.append(Counter({name: look.call_count for name, look in looks.items()}))
    assert counts[1] - counts[0] == {"lstat": 20 * len(SPEC.columns)}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "expected"),
    [
        (10**7, 8192, 8192),  # 64 MiB of rows
        (10**7, 8193, 4096),  # the power of two below
        (10**7, 1 << 30, 32),  # never fewer
        (50_000, 8192, 1024),  # a 64th of the table, rounded up to a power of two
        (16_384, 1, 256),
        (16_385, 1, 512),
        (2048, 1, 256),  # a commit for every 256 rows
        (70, 1, 128),  # one chunk
        (1, 1, 32),
        *(
            (10**8, Column("features", 2048, dtype).arrays[0].row_bytes, rows)  # of the widest array
            for dtype, rows in (("float32", 8192), ("float16", 16384), ("int8", 32768), ("int4", 65536))
        ),
    ],
)
def test_a_chunk_is_a_power_of_two_of_rows(num_rows, row_bytes, expected):
    assert chunk_rows_for(num_rows, row_bytes) == expected


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "expected"),
    [(5000, 4, 8192), (10**6, 4, 1 << 18), (10**6, 3 << 10, 16_384), (5000, 4000, 256), (5000, 1 << 21, 32)],
)
def test_a_chunk_of_cheap_rows_has_a_mebibyte_or_all_rows(num_rows, row_bytes, expected):
    assert chunk_rows_for(num_rows, row_bytes, cheap=True) == expected


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1.5, 1)])
def test_a_chunk_size_needs_sizes(sizes):
    raises(ValueError, "integer of at least 1", chunk_rows_for, *sizes)
