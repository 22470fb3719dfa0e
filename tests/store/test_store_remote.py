"""Stores in object stores obey the laws of every store, and look to zarr like any other."""

import uuid
from pathlib import Path

import numpy as np
import pytest

from trak_lite.errors import StoreError, UnsupportedStoreError
from trak_lite.parallel.sharing import SharedRows
from trak_lite.store import Column, Manifest, RemotePlace, TableSpec
from trak_lite.store.remote import table as _remote_table
from trak_lite.store.remote.remote_store import RemoteFeatureStore
from trak_lite.testing.store import StoreTests

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
obstore_store = pytest.importorskip("obstore.store", reason="obstore is not installed")


class RemoteStoreTests(StoreTests):
    """All laws but those of growing, which is refused with advice."""

    def place(self, path):
        raise NotImplementedError

    def create(self, path, manifest):
        return RemoteFeatureStore.create(self.place(path), manifest)

    def open(self, path, mode):
        return RemoteFeatureStore.open(self.place(path), mode)

    test_a_grown_table_keeps_its_rows = None
    test_a_grown_table_equals_one_made_with_all_its_rows = None
    test_a_table_never_loses_rows = None
    test_a_quantised_table_grows = None
    test_the_fingerprint_is_replaced_only_if_it_is_the_known_one = None

    def test_growing_is_refused_with_advice(self, store, table):
        assert store.grow_table("ckpt-0", table.spec.num_rows).spec == table.spec
        with pytest.raises(UnsupportedStoreError, match="Copy the store to a local disk, grow it there"):
            store.grow_table("ckpt-0", table.spec.num_rows + 1)
        with pytest.raises(UnsupportedStoreError, match="append the rows there and copy it back"):
            store.replace_fingerprint({}, {"seed": 1})


class TestMemoryThroughFsspec(RemoteStoreTests):
    @pytest.fixture(autouse=True)
    def _bucket(self, tmp_path):
        self.staging = tmp_path / "staging"
        self.bucket = uuid.uuid4().hex
        yield
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]

    def place(self, path):
        return RemotePlace(f"memory://{self.bucket}/{Path(path).name}", staging=self.staging)


class TestFolderThroughObstore(RemoteStoreTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def place(self, path):
        store = obstore_store.LocalStore(self.folder / "objects" / Path(path).name, mkdir=True)
        return RemotePlace(store, staging=self.folder / "staging")


SPEC = TableSpec(14, (Column("q", None, "float32"),), chunk_rows=4)


@pytest.fixture
def machines(tmp_path):
    """The same table as two machines see it, each with a staging folder of its own."""
    url = f"memory://{uuid.uuid4().hex}/run.zarr"
    stores = [
        RemoteFeatureStore.create(RemotePlace(url, staging=tmp_path / name), Manifest({})) for name in "ab"
    ]
    yield [store.create_table("ckpt-0", SPEC) for store in stores]
    for store in stores:
        store.close()
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def numbers(rows, plus=0):
    return {"q": np.asarray(rows, np.float32) + plus}


def test_a_chunk_that_another_machine_commits_first_is_its_own_and_the_rest_is_shared(machines):
    here, there = machines
    with SharedRows(here, 2, label="rows", progress=False) as work:
        for rows in (rows for batches in work.rounds() for rows in batches):
            if 2 in rows:  # the last batch of a chunk that was claimed here
                there.put(0, numbers(range(4), plus=100))
            work.put(rows, numbers(rows))
    assert work.written == 10
    expected = numbers(range(14))["q"]
    expected[:4] += 100
    for table in machines:
        np.testing.assert_array_equal(table.read("q"), expected)


def test_a_claim_of_what_another_machine_has_committed_gives_no_row_and_leaves_nothing_staged(machines):
    here, there = machines
    here.put(1, numbers([1]))
    there.put(0, numbers(range(4)))
    with here.claim(0) as pending:
        assert pending.tolist() == []
    assert not _remote_table._is_complete(here._staging, 0)
    assert here._staging.staged_chunks() == set()


def test_a_claim_puts_what_a_killed_writer_has_completed(machines, monkeypatch):
    here, there = machines
    with monkeypatch.context() as patched:
        patched.setattr(_remote_table.RemoteRowTable, "_publish", lambda self, chunk: None)
        here.put(0, numbers(range(4)))
    assert there.committed_chunks() == []
    with here.claim(0) as pending:
        assert pending.tolist() == []
    assert there.committed_chunks() == [0]


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_chunk_that_vanishes_from_the_stage_was_put_by_another_process_or_is_an_error(
    machines, monkeypatch, meanwhile
):
    here, there = machines

    def vanished(*arguments):
        if meanwhile:
            there.put(0, numbers(range(4)))
        raise StoreError("no such file")

    monkeypatch.setattr(_remote_table, "_staged_contents", _once(vanished, _remote_table._staged_contents))
    if meanwhile:
        here.put(0, numbers(range(4)))
        assert here.committed_chunks() == [0]
    else:
        with pytest.raises(StoreError, match="no such file"):
            here.put(0, numbers(range(4)))


def _once(first, then):
    """Call the first function the first time, and the other one after."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        return (first if len(calls) == 1 else then)(*arguments)

    return call
