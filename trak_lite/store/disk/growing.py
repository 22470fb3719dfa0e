"""Appending rows to a table by replacing its metadata; the table's own ``zarr.json`` is authoritative.

Growing takes three steps: record the target size in the table's ``zarr.json``, resize the arrays, then set the new size
in the table's ``zarr.json``. If the process is killed in between, the table has the old size; arrays may have either. A
partial last chunk is not rewritten until rows are put into it. Its commit record has fewer rows than the chunk has now,
so the chunk is no longer committed, but its rows are done.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from trak_lite.errors import BusyError, CorruptStoreError
from trak_lite.store._failpoints import failpoint
from trak_lite.store.disk.chunk_files import TableFiles
from trak_lite.store.disk.documents import CHECKSUM, GROWS_TO, encode_document, sealed
from trak_lite.store.disk.files import locked_file, new_file, rename, sync_folder
from trak_lite.store.disk.metadata import read_attributes, read_zarr_json, sizes_under_way
from trak_lite.store.disk.staging import StagedChunk

__all__ = ["changed_metadata", "grow"]


def grow(files: TableFiles, num_rows: int) -> None:
    """Append pending rows to a table, holding the lock of its last chunk.

    Raises:
        BusyError: If another writer holds that chunk, or the size of the table has just changed.
    """
    last = files.num_chunks - 1
    lock = StagedChunk.lock(files, last)
    try:
        if (read_attributes(files.folder) or {}).get("num_rows") != files.spec.num_rows:
            raise BusyError(
                f"{files.folder} has another number of rows now, because another writer has grown it. Open it again, "
                "then grow it."
            )
        _announce(files, num_rows)
        failpoint("growth_announced")
        for column in files.columns:
            _change(f"{files.folder}/{column.name}", files.commits, lambda array: _resize(array, num_rows))
            failpoint("array_grown")
        _change(files.folder, files.commits, lambda group: _settle(group, num_rows))
        failpoint("table_grown")
        if os.path.getsize(files.row_log(last)) == 0:
            lock.discard_log()  # created by the lock
    finally:
        lock.close()


def _announce(files: TableFiles, num_rows: int) -> None:
    def announce(group: dict[str, Any]) -> None:
        record = group["attributes"]["trak_lite"]
        record[GROWS_TO] = sorted({*sizes_under_way(record), num_rows})

    _change(files.folder, files.commits, announce)


def _resize(array: dict[str, Any], num_rows: int) -> None:
    array["shape"] = [num_rows, *array["shape"][1:]]


def _settle(group: dict[str, Any], num_rows: int) -> None:
    record = group["attributes"]["trak_lite"]
    record["num_rows"] = num_rows
    del record[GROWS_TO]


@contextlib.contextmanager
def changed_metadata(folder: str) -> Iterator[dict[str, Any]]:
    """Yield the record of a group for modification and write it when the context exits; locked against others."""
    with locked_file(f"{folder}/zarr.json"):
        document = _read(folder)
        yield document["attributes"]["trak_lite"]
        _replace(folder, folder, document)


def _change(folder: str, scratch: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Atomically modify the ``zarr.json`` of a folder."""
    document = _read(folder)
    change(document)
    _replace(folder, scratch, document)


def _read(folder: str) -> dict[str, Any]:
    path = f"{folder}/zarr.json"
    document = read_zarr_json(folder)
    if document is None:
        raise CorruptStoreError(f"{path} is missing. Restore it from a backup, or use another path.")
    return document


def _replace(folder: str, scratch_folder: str, document: dict[str, Any]) -> None:
    own = document["attributes"].get("trak_lite", {})
    if CHECKSUM in own:
        document["attributes"]["trak_lite"] = sealed(own)
    path, scratch = f"{folder}/zarr.json", f"{scratch_folder}/.zarr.json.new-{uuid.uuid4().hex}"
    with new_file(scratch, encode_document(document)):
        rename(scratch, path)
    sync_folder(folder)
