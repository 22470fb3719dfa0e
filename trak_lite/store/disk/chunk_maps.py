"""Cache of committed chunks as memory-mapped arrays (on a network file system: read), with checksum verification."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict
from typing import Any, final

from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError, IncompleteStoreError
from trak_lite.store._checksums import crc32c
from trak_lite.store.disk.chunk_files import ChunkIndex, ColumnFiles, TableFiles
from trak_lite.store.disk.files import file_size, is_network, map_file, named_errors
from trak_lite.store.disk.records import CommitRecord

_KEPT_BYTES = 256 << 20  # another pass over a mapped table costs no page faults
_KEPT = 4096  # maximum number of maps; Linux allows 65530 per process
_KEPT_WHERE_READ = 4  # each copy takes memory; buffers are not reused, because callers may keep the arrays


@final
class ChunkMaps:
    """LRU cache of the mapped chunks of a table.

    The checksum of a chunk is compared on first use, and again if the chunk was recommitted or the inode, size or
    modification time of its file changed. Later requests therefore never return bytes that were written to the file
    meanwhile; an array returned earlier may show them, because it maps the file. Changes below the file system are
    detected only when the store is reopened or verified. The pages are private: writes to an array do not change the
    file.
    """

    def __init__(
        self, files: TableFiles, index: ChunkIndex, *, check: bool = True, mapped: bool | None = None
    ) -> None:
        self._files = files
        self._index = index
        self._check = check
        self._mapped = not is_network(os.stat(files.folder).st_dev) if mapped is None else mapped
        self._kept = _KEPT if self._mapped else _KEPT_WHERE_READ
        self._maps: OrderedDict[tuple[str, int, int], NDArray[Any]] = OrderedDict()
        self._kept_bytes = 0
        self._seen: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """State of each file when its checksum was last compared."""

    def get(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        """Return the rows of a committed chunk, ``(rows, width)`` or ``(rows,)``, read-only.

        Raises:
            CorruptStoreError: If size or checksum contradict the commit record.
            IncompleteStoreError: If the file was removed.
        """
        key = column.name, record.chunk, record.generation
        array = self._maps.get(key)
        if array is not None and self._check and _state(column.visible(record.chunk)) != self._seen[key]:
            self._kept_bytes -= self._maps.pop(key).nbytes
            array = None
        if array is None:
            array = self._map(column, record, key)
            self._maps[key] = array
            self._kept_bytes += array.nbytes
            while len(self._maps) > 1 and (self._kept_bytes > _KEPT_BYTES or len(self._maps) > self._kept):
                self._kept_bytes -= self._maps.popitem(last=False)[1].nbytes
        self._maps.move_to_end(key)
        if self._mapped:
            _note_use(self, key)
        return array.view()  # so that flags set by the caller do not affect the cache

    def clear(self) -> None:
        """Release all maps; arrays returned earlier stay valid."""
        self._maps.clear()
        self._kept_bytes = 0

    def forget(self, key: tuple[str, int, int]) -> None:
        """Release one map if it is cached."""
        array = self._maps.pop(key, None)
        self._kept_bytes -= 0 if array is None else array.nbytes

    def _map(self, column: ColumnFiles, record: CommitRecord, key: tuple[str, int, int]) -> NDArray[Any]:
        path = column.visible(record.chunk)
        size, checksum = record.columns[column.name]
        with named_errors("Mapping", path):
            state = _state(path)  # taken before mapping, so that later writes change it
            content = self._whole(path, size, record.chunk)
        if self._check and self._seen.get(key) != state:
            found = crc32c(content)
            if found != checksum:
                raise CorruptStoreError(
                    f"{path}, {self._files.describe(record.chunk)}: the checksum differs from the commit record: "
                    f"{found:08x}, recorded {checksum:08x}. {self._index.remedy(record.chunk)}"
                )
            self._seen[key] = state
        array = content.view(column.dtype).reshape(column.shape)[: self._files.rows_in(record.chunk)]
        array.flags.writeable = False
        return array

    def _whole(self, path: str, size: int, chunk: int) -> NDArray[Any]:
        seen = file_size(path)
        if seen is None:
            raise IncompleteStoreError(
                f"{path} was removed after it was committed: {self._files.describe(chunk)} are pending. "
                "Run again to compute them."
            )
        if seen != size:
            raise CorruptStoreError(
                f"{path}, {self._files.describe(chunk)}: {seen} bytes, expected {size}. {self._index.remedy(chunk)}"
            )
        return map_file(path, size, mapped=self._mapped)


def _state(path: str) -> tuple[int, ...]:
    """Return device, inode, size and modification time of a file; empty if it does not exist."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_RECENT = threading.local()
"""LRU order of the maps of all tables, for each thread.

Each map holds a file descriptor, because Python's mmap duplicates it. A process often has a limit of 1024; without a
bound over all tables, those of some hundred checkpoints would exhaust it.
"""


def _note_use(maps: ChunkMaps, key: tuple[str, int, int]) -> None:
    """Mark a map as used and release the least recently used maps of any table above the limit.

    This is a quarter of the process's file descriptor limit, at most ``_KEPT``.
    """
    order: OrderedDict[tuple[int, tuple[str, int, int]], weakref.ref[ChunkMaps]]
    order = _RECENT.__dict__.setdefault("order", OrderedDict())
    order[id(maps), key] = weakref.ref(maps)
    order.move_to_end((id(maps), key))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    while len(order) > (_KEPT if allowed < 0 else max(min(allowed // 4, _KEPT), 1)):
        (_, oldest), owner = order.popitem(last=False)
        table = owner()
        if table is not None:
            table.forget(oldest)
