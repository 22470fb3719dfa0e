"""Is a store as it was written? What is not, and which rows can be had back by computing them again."""

from __future__ import annotations

import os

from trak_lite.errors import ReadOnlyStoreError
from trak_lite.store._check_report import Finding, Report, SetAside
from trak_lite.store.disk.check import StoreLook
from trak_lite.store.disk.repair import TableRepair, repair_list
from trak_lite.store.remote.check import verify_remote
from trak_lite.store.remote.place import RemotePlace, resolve_place

__all__ = ["Finding", "Report", "SetAside", "verify_store"]


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
    root = os.path.realpath(place)
    look = StoreLook.at(root)
    if not repair:
        return Report(root, tuple(look.findings), look.tally)
    if not os.access(root, os.W_OK | os.X_OK):
        raise ReadOnlyStoreError(
            f"{root} cannot be written, so nothing was repaired. Make the folder writable."
        )
    repairs = [TableRepair(table, found) for table, found in look.tables.items()]
    moved = repair_list(root, look)
    for each in repairs:
        each.run()
    busy = [finding for each in repairs for finding in each.busy]
    moved += [part for each in repairs for part in each.set_aside]
    if moved or look.list_damaged:
        look = StoreLook.at(root)
    return Report(root, (*look.findings, *busy), look.tally, tuple(moved))
