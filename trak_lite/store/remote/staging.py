"""Chunks in the staging folder of a remote store: listing, reading and removing them."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from trak_lite.errors import BusyError, CorruptStoreError
from trak_lite.store._base import AbstractRowTable
from trak_lite.store._checksums import crc32c
from trak_lite.store._failpoints import failpoint
from trak_lite.store.disk.chunk_files import TableFiles
from trak_lite.store.disk.files import file_size, map_file, named_errors, remove_file
from trak_lite.store.disk.staging import StagedChunk

__all__ = ["complete_chunks", "is_complete", "remove_chunk", "staged_contents"]

logger = logging.getLogger(__name__)


def complete_chunks(files: TableFiles) -> list[int]:
    """Return the chunks of a staging folder that are complete, ascending."""
    return sorted(set.intersection(*(column.list_visible() for column in files.columns)))


def is_complete(files: TableFiles, chunk: int) -> bool:
    """Return whether a chunk of a staging folder is complete."""
    return all(file_size(column.visible(chunk)) is not None for column in files.columns)


def staged_contents(files: TableFiles, table: AbstractRowTable, chunk: int) -> list[NDArray[Any]]:
    """Return the bytes of each stored array of a complete chunk, after checking them against the commit record.

    Raises:
        CorruptStoreError: If a checksum differs.
    """
    recorded = table.checksums(chunk)
    contents = []
    for column in files.columns:
        path = column.visible(chunk)
        with named_errors("Reading", path):
            content = map_file(path, column.chunk_bytes)
        if crc32c(content) != recorded[column.name]:
            raise CorruptStoreError(
                f"{path} changed after it was written: its checksum is {crc32c(content):08x}, recorded "
                f"{recorded[column.name]:08x}. It was not put anywhere. Remove it, check the disk, and run again."
            )
        contents.append(content)
    return contents


def remove_chunk(files: TableFiles, chunk: int) -> None:
    """Delete the staged files of a chunk that is committed remotely.

    If another process holds the chunk, nothing is deleted; that process detects the commit when it uploads the chunk.
    """
    with named_errors("Removing staged files of", files.describe(chunk)):
        try:
            stage = StagedChunk.lock(files, chunk)
        except BusyError as error:
            logger.info("Not removed here, because another writer has it: %s", error)
            return
        try:
            for column in files.columns:
                for path in (column.visible(chunk), column.staged(chunk)):
                    if file_size(path) is not None:
                        remove_file(path)
                        failpoint("staged_file_removed")
            stage.discard_log()
        finally:
            stage.close()
