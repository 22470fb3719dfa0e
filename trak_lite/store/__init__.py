"""Feature stores: tables of feature rows, each of which is either done or pending.

:class:`ZarrFeatureStore` stores rows on disk as zarr v3 arrays; the process may be killed at any moment.
:class:`MemoryFeatureStore` implements the same contract in memory, and :class:`RemoteFeatureStore` in an object store.
A custom store subclasses :class:`AbstractFeatureStore` and :class:`AbstractRowTable` and is tested with
``StoreTests`` of ``tests/store/store_laws.py``. This package does not import torch.
"""

from trak_lite.store._base import AbstractFeatureStore as AbstractFeatureStore
from trak_lite.store._columns import Column as Column
from trak_lite.store._columns import TableSpec as TableSpec
from trak_lite.store._table import AbstractRowTable as AbstractRowTable
from trak_lite.store.disk.zarr_store import ZarrFeatureStore as ZarrFeatureStore
from trak_lite.store.manifest import Manifest as Manifest
from trak_lite.store.memory import MemoryFeatureStore as MemoryFeatureStore
from trak_lite.store.places import check_store as check_store
from trak_lite.store.places import create_store as create_store
from trak_lite.store.places import open_store as open_store
from trak_lite.store.remote.objects import AbstractObjects as AbstractObjects
from trak_lite.store.remote.place import RemotePlace as RemotePlace

__all__ = [
    "AbstractFeatureStore",
    "AbstractObjects",
    "AbstractRowTable",
    "Column",
    "Manifest",
    "MemoryFeatureStore",
    "RemotePlace",
    "TableSpec",
    "ZarrFeatureStore",
    "check_store",
    "create_store",
    "open_store",
]
