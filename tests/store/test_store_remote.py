"""Stores in object stores obey the laws of every store, and look to zarr like any other."""

import uuid
from pathlib import Path

import pytest

from trak_lite.errors import UnsupportedStoreError
from trak_lite.store import RemoteFeatureStore, RemotePlace
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

    def test_growing_is_refused_with_advice(self, store, table):
        assert store.grow_table("ckpt-0", table.spec.num_rows).spec == table.spec
        with pytest.raises(UnsupportedStoreError, match="Copy the store to a local disk, grow it there"):
            store.grow_table("ckpt-0", table.spec.num_rows + 1)


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
