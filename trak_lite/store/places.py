"""Create, open and check stores in a local folder or in an object store."""

from __future__ import annotations

import os
from typing import Literal

from trak_lite.store._check_report import Report
from trak_lite.store.disk.check import check_folder
from trak_lite.store.disk.check_run import RUN, check_run
from trak_lite.store.disk.zarr_store import ZarrFeatureStore
from trak_lite.store.manifest import Manifest
from trak_lite.store.remote.check import check_remote
from trak_lite.store.remote.place import RemotePlace, resolve_place
from trak_lite.store.remote.remote_store import RemoteFeatureStore


def create_store(place: str | RemotePlace, manifest: Manifest) -> ZarrFeatureStore | RemoteFeatureStore:
    """Create a store, or open an existing one with the same settings for writing."""
    if isinstance(place, RemotePlace):
        return RemoteFeatureStore.create(place, manifest)
    return ZarrFeatureStore.create(place, manifest)


def open_store(
    place: str | RemotePlace, mode: Literal["r", "r+"] = "r"
) -> ZarrFeatureStore | RemoteFeatureStore:
    """Open an existing store."""
    if isinstance(place, RemotePlace):
        return RemoteFeatureStore.open(place, mode)
    return ZarrFeatureStore.open(os.path.expanduser(place), mode)


def check_store(path: str | os.PathLike[str] | RemotePlace, *, repair: bool = False) -> Report:
    """Check a store: rows, records, entries and metadata against their checksums, and tables against their list.

    Without ``repair`` it takes no lock and writes nothing. It can run while writers are active, whose unfinished rows
    are not reported, and on a store that is too damaged to open. It reads the committed and staged bytes once.

    Args:
        path: Folder of the store, or its address in an object store, or the folder of a run of
            :mod:`trak_lite.unrolled`. Repair works only in the folder of a store, also in that of a run.
        repair: Whether to move damaged chunks into ``.set-aside/`` of their table's first column. Their rows become
            pending, and the next featurize recomputes exactly those. A listed table whose folder is lost is removed
            from the list, and an entry that is not as it was written is set aside. Nothing is deleted; chunks locked by
            a writer are skipped. If killed, repeat the call.

    Returns:
        The findings; after a repair, the remaining findings and what was set aside.

    Raises:
        MissingStoreError: If there is no store.
        ManifestMismatchError: If the store has the format of another trak_lite version.
        ReadOnlyStoreError: If ``repair`` is set and the store cannot be written.
        UnsupportedStoreError: If ``repair`` is set and the store is in an object store.
        StoreError: If ``repair`` is set and a file cannot be renamed.
    """
    if isinstance(place := resolve_place(path), RemotePlace):
        return check_remote(place.objects, repair=repair)
    if os.path.lexists(f"{place}/{RUN}") and not os.path.lexists(f"{place}/zarr.json"):
        return check_run(place, repair=repair)
    return check_folder(place, repair=repair)
