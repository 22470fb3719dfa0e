"""Stores by where they are: a folder on this machine, or an address in an object store."""

from __future__ import annotations

import os
from typing import Literal

from trak_lite.store._check_report import Report
from trak_lite.store.disk.repair import check_folder
from trak_lite.store.disk.zarr_store import ZarrFeatureStore
from trak_lite.store.manifest import Manifest
from trak_lite.store.remote.check import verify_remote
from trak_lite.store.remote.place import RemotePlace, resolve_place
from trak_lite.store.remote.remote_store import RemoteFeatureStore

__all__ = ["create_store", "open_store", "verify_store"]


def create_store(place: str | RemotePlace, manifest: Manifest) -> ZarrFeatureStore | RemoteFeatureStore:
    """Make a store at a place, or open the one that is there for writing if it was made with the same settings."""
    if isinstance(place, RemotePlace):
        return RemoteFeatureStore.create(place, manifest)
    return ZarrFeatureStore.create(place, manifest)


def open_store(
    place: str | RemotePlace, mode: Literal["r", "r+"] = "r"
) -> ZarrFeatureStore | RemoteFeatureStore:
    """Open the store at a place."""
    if isinstance(place, RemotePlace):
        return RemoteFeatureStore.open(place, mode)
    return ZarrFeatureStore.open(place, mode)


def verify_store(path: str | os.PathLike[str] | RemotePlace, *, repair: bool = False) -> Report:
    """Compare a store's rows, records and metadata with their checksums, and the tables with the list of tables.

    Takes no lock and writes nothing, unless it repairs; works beside writers, whose rows in flight are no finding,
    and on a store so damaged that it cannot be opened. Costs one pass over the committed and staged bytes.

    Args:
        path: Folder of the store, or its address in an object store, where nothing can be repaired.
        repair: Whether to rename damaged chunks into ``.set-aside/`` of their table's first column. Their rows are
            pending then, and the next featurize computes exactly those. A table that the store lists and that is lost
            is taken from the list. Nothing is deleted; chunks that a writer holds are left alone. May be killed at any
            moment, and repeated.

    Returns:
        What is found; after a repair, what is still found and what was set aside.

    Raises:
        MissingStoreError: If there is no store.
        ManifestMismatchError: If another version of trak_lite made it, with another format.
        ReadOnlyStoreError, UnsupportedStoreError, StoreError: If it is to be repaired and cannot be written, is in an
            object store, or a file cannot be renamed.
    """
    if isinstance(place := resolve_place(path), RemotePlace):
        return verify_remote(place.objects, repair=repair)
    return check_folder(place, repair=repair)
