"""Stores by where they are: a folder on this machine, or an address in an object store."""

from __future__ import annotations

from typing import Literal

from trak_lite.store.disk.zarr_store import ZarrFeatureStore
from trak_lite.store.manifest import Manifest
from trak_lite.store.remote.place import RemotePlace
from trak_lite.store.remote.remote_store import RemoteFeatureStore

__all__ = ["create_store", "open_store"]


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
