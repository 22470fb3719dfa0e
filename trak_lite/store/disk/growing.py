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
from collections.abc import Iterator
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
        with _changed(files.folder, files.commits) as group:
            record = group["attributes"]["trak_lite"]
            record[GROWS_TO] = sorted({*sizes_under_way(record), num_rows})
        failpoint("growth_announced")
        for column in files.columns:
            with _changed(f"{files.folder}/{column.name}", files.commits) as array:
                array["shape"] = [num_rows, *array["shape"][1:]]
            failpoint("array_grown")
        with _changed(files.folder, files.commits) as group:
            record = group["attributes"]["trak_lite"]
            record["num_rows"] = num_rows
            del record[GROWS_TO]
        failpoint("table_grown")
        if os.path.getsize(files.row_log(last)) == 0:
            lock.discard_log()  # created by the lock
    finally:
        lock.close()


@contextlib.contextmanager
def changed_metadata(folder: str) -> Iterator[dict[str, Any]]:
    """Yield the record of a group for modification and write it when the context exits; locked against others."""
    with locked_file(f"{folder}/zarr.json"), _changed(folder, folder) as document:
        yield document["attributes"]["trak_lite"]


@contextlib.contextmanager
def _changed(folder: str, scratch_folder: str) -> Iterator[dict[str, Any]]:
    """Yield the ``zarr.json`` of a folder for modification; replace the file when the context exits."""
    path, scratch = f"{folder}/zarr.json", f"{scratch_folder}/.zarr.json.new-{uuid.uuid4().hex}"
    document = read_zarr_json(folder)
    if document is None:
        raise CorruptStoreError(f"{path} is missing. Restore it from a backup, or use another path.")
    yield document
    own = document["attributes"].get("trak_lite", {})
    if CHECKSUM in own:
        document["attributes"]["trak_lite"] = sealed(own)
    with new_file(scratch, encode_document(document)):
        rename(scratch, path)
    sync_folder(folder)
