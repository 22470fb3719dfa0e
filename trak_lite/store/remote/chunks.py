"""Cache of committed chunks that are downloaded from an object store, with checksum verification."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError, IncompleteStoreError
from trak_lite.store._checksums import crc32c
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.records import CommitRecord
from trak_lite.store.remote.index import RemoteIndex
from trak_lite.store.remote.objects import AbstractObjects

__all__ = ["FetchedChunks"]

_KEPT_BYTES = 256 << 20


@final
class FetchedChunks:
    """LRU cache of the downloaded chunks of a table."""

    def __init__(
        self, objects: AbstractObjects, files: TableFiles, index: RemoteIndex, *, check: bool
    ) -> None:
        self._objects = objects
        self._files = files
        self._index = index
        self._check = check
        self._fetched: OrderedDict[tuple[str, int, int], NDArray[Any]] = OrderedDict()

    def get(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        """Return the rows of a committed chunk; see :meth:`ChunkMaps.get`."""
        key = column.name, record.chunk, record.generation
        if key not in self._fetched:
            self._fetched[key] = self._fetch(column, record)
            while len(self._fetched) > 1 and sum(a.nbytes for a in self._fetched.values()) > _KEPT_BYTES:
                self._fetched.popitem(last=False)
        self._fetched.move_to_end(key)
        return self._fetched[key].view()  # so that flags set by the caller do not affect the cache

    def clear(self) -> None:
        """Release all chunks; arrays returned earlier stay valid."""
        self._fetched.clear()

    def _fetch(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        chunk, (size, checksum) = record.chunk, record.columns[column.name]
        where = f"{column.visible(chunk)}, {self._files.describe(chunk)}"
        content = self._objects.get(column.visible(chunk))
        if content is None:
            raise IncompleteStoreError(
                f"{where}: the object was removed after it was committed, so the rows are pending. "
                "Run again to compute them."
            )
        if len(content) != size or (self._check and crc32c(content) != checksum):
            raise CorruptStoreError(
                f"{where}: {len(content)} bytes with the checksum {crc32c(content):08x}, the commit record says {size} "
                f"and {checksum:08x}. Its writer ({record.writer or 'unnamed'}) may still be replacing a leftover: "
                f"wait if it runs. {self._index.remedy(chunk)}"
            )
        array = np.frombuffer(content, column.dtype).reshape(column.shape)
        return array[: self._files.rows_in(chunk)]
