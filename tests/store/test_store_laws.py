"""Both stores obey the laws of the public conformance kit."""

import pytest

from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore
from trak_lite.testing.store import StoreTests


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
