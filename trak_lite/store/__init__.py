"""Rows on disk: tables of feature rows that are either done, and right, or pending.

:class:`ZarrFeatureStore` keeps them as zarr v3 arrays and survives being killed at any moment;
:class:`MemoryFeatureStore` keeps the same contract in memory, and
:class:`RemoteFeatureStore` in an object store. A further one subclasses :class:`AbstractFeatureStore` and
:class:`AbstractRowTable` and proves itself with ``trak_lite.testing.StoreTests``. Nothing here knows a model or torch.
"""

from trak_lite.store._base import NEEDED_UNTIL as NEEDED_UNTIL
from trak_lite.store._base import AbstractFeatureStore as AbstractFeatureStore
from trak_lite.store._base import AbstractRowTable as AbstractRowTable
from trak_lite.store._base import Difference as Difference
from trak_lite.store._base import TableSpec as TableSpec
from trak_lite.store._check_report import Finding as Finding
from trak_lite.store._check_report import Report as Report
from trak_lite.store._check_report import SetAside as SetAside
from trak_lite.store._columns import DTYPES as DTYPES
from trak_lite.store._columns import Column as Column
from trak_lite.store._columns import StoredRows as StoredRows
from trak_lite.store._columns import dtype_fingerprint as dtype_fingerprint
from trak_lite.store._grid import chunk_rows_for as chunk_rows_for
from trak_lite.store._names import check_name as check_name
from trak_lite.store.disk.zarr_store import ZarrFeatureStore as ZarrFeatureStore
from trak_lite.store.manifest import FORMAT as FORMAT
from trak_lite.store.manifest import Manifest as Manifest
from trak_lite.store.memory import MemoryFeatureStore as MemoryFeatureStore
from trak_lite.store.places import create_store as create_store
from trak_lite.store.places import open_store as open_store
from trak_lite.store.places import verify_store as verify_store
from trak_lite.store.remote.objects import AbstractObjects as AbstractObjects
from trak_lite.store.remote.place import RemotePlace as RemotePlace
from trak_lite.store.remote.place import resolve_place as resolve_place
from trak_lite.store.remote.remote_store import RemoteFeatureStore as RemoteFeatureStore

__all__ = [
    "DTYPES",
    "FORMAT",
    "NEEDED_UNTIL",
    "AbstractFeatureStore",
    "AbstractObjects",
    "AbstractRowTable",
    "Column",
    "Difference",
    "Finding",
    "Manifest",
    "MemoryFeatureStore",
    "RemoteFeatureStore",
    "RemotePlace",
    "Report",
    "SetAside",
    "StoredRows",
    "TableSpec",
    "ZarrFeatureStore",
    "check_name",
    "chunk_rows_for",
    "create_store",
    "dtype_fingerprint",
    "open_store",
    "resolve_place",
    "verify_store",
]
