"""Every store obeys the laws of ``store_laws.py``: on disk, in memory, and in object stores."""

import uuid
from pathlib import Path

import pytest
from store_laws import StoreTests

from trak_lite.errors import UnsupportedStoreError
from trak_lite.store import (
    MemoryFeatureStore,
    RemotePlace,
    ZarrFeatureStore,
    check_store,
    create_store,
    open_store,
)


class TestZarrFeatureStore(StoreTests):
    def create(self, path, manifest):
        return ZarrFeatureStore.create(path, manifest)

    def open(self, path, mode):
        return ZarrFeatureStore.open(path, mode)


class TestMemoryFeatureStore(StoreTests):
    @pytest.fixture(autouse=True)
    def _stores(self):
        self.stores = {}

    def create(self, path, manifest):
        if path not in self.stores:
            self.stores[path] = MemoryFeatureStore(manifest)
        self.stores[path].manifest.check_same(manifest, where=path)
        return self.stores[path].reopen("r+")

    def open(self, path, mode):
        return self.stores[path].reopen(mode)


class RemoteStoreTests(StoreTests):
    """All laws but those of growing, which is refused with advice."""

    @pytest.fixture(autouse=True)
    def _places(self, tmp_path):
        self.folder, self.bucket = tmp_path, uuid.uuid4().hex

    def objects_at(self, path):
        raise NotImplementedError

    def create(self, path, manifest):
        return create_store(self.place(path), manifest)

    def open(self, path, mode):
        return open_store(self.place(path), mode)

    def place(self, path):
        return RemotePlace(self.objects_at(path), staging=self.folder / "staging" / Path(path).name)

    test_a_grown_table_keeps_its_rows = None
    test_a_table_never_loses_rows = None
    test_the_fingerprint_is_replaced_only_if_it_is_the_known_one = None

    def test_a_check_finds_every_table(self, path, store, table):
        report = check_store(self.place(path))
        assert (report.ok, report.tally.tables) == (True, len(store.table_names()))

    def test_growing_is_refused_with_advice(self, store, table):
        assert store.grow_table("ckpt-0", table.spec.num_rows).spec == table.spec
        with pytest.raises(UnsupportedStoreError, match="Copy the store to a local disk, grow it there"):
            store.grow_table("ckpt-0", table.spec.num_rows + 1)
        with pytest.raises(UnsupportedStoreError, match="append the rows there and copy it back"):
            store.replace_fingerprint({}, {"seed": 1})


class TestMemoryThroughFsspec(RemoteStoreTests):
    @pytest.fixture(autouse=True)
    def _cleared(self):
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        yield
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]

    def objects_at(self, path):
        return f"memory://{self.bucket}/{Path(path).name}"


class TestFolderThroughObstore(RemoteStoreTests):
    def objects_at(self, path):
        obstore = pytest.importorskip("obstore.store", reason="obstore is not installed")
        return obstore.LocalStore(self.folder / "objects" / Path(path).name, mkdir=True)
