"""Committed chunks as arrays that are mapped (on a network file system: read), checked once, kept for a while."""

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
from trak_lite.store.disk.files import file_size, map_file, named_errors
from trak_lite.store.disk.mounts import is_network
from trak_lite.store.disk.records import CommitRecord

__all__ = ["ChunkMaps"]

_KEPT_BYTES = 256 << 20  # a pass over a table that is mapped already costs no page fault
_KEPT = 4096  # maps; Linux allows a process 65530
_KEPT_WHERE_READ = 4  # each takes memory of its own; buffers are not reused, as arrays may outlive their turn


@final
class ChunkMaps:
    """The last few mapped chunks of a table.

    Each chunk's checksum is compared the first time that it is touched, and again where it was committed anew or its
    file has another inode, size or modification time since: whoever asks for it again is not given bytes that were
    written into the file meanwhile. An array that was handed out before shows them, as it is a map of the file. Bytes
    that change below the file system are found by the first touch of another table, or by verifying. The pages are
    private: whatever happens to an array, the file keeps its bytes.
    """

    def __init__(
        self, files: TableFiles, index: ChunkIndex, *, check: bool = True, mapped: bool | None = None
    ) -> None:
        """Hold no chunk yet.

        Args:
            files: Of the table.
            index: What is committed.
            check: Whether checksums are compared.
            mapped: Whether files are mapped; ``None`` reads them where they are on a network file system.
        """
        self._files = files
        self._index = index
        self._check = check
        self._mapped = not is_network(os.stat(files.folder).st_dev) if mapped is None else mapped
        self._kept = _KEPT if self._mapped else _KEPT_WHERE_READ
        self._maps: OrderedDict[tuple[str, int, int], NDArray[Any]] = OrderedDict()
        self._kept_bytes = 0
        self._seen: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """State of each file when it was mapped last, or its checksum compared."""

    def get(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        """Return the rows of a committed chunk, ``(rows, width)`` or ``(rows,)``, not writable.

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
            _RECENT.use(self, key)
        return array.view()  # a flag that the caller sets is the caller's

    def clear(self) -> None:
        """Let go of the maps; arrays that were handed out stay valid."""
        self._maps.clear()
        self._kept_bytes = 0

    def forget(self, key: tuple[str, int, int]) -> None:
        """Let go of one map, if it is still kept."""
        array = self._maps.pop(key, None)
        self._kept_bytes -= 0 if array is None else array.nbytes

    def _map(self, column: ColumnFiles, record: CommitRecord, key: tuple[str, int, int]) -> NDArray[Any]:
        path = column.visible(record.chunk)
        size, checksum = record.columns[column.name]
        with named_errors("Mapping", path):
            state = _state(path)  # before the bytes: what is written from here on changes it again
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
    """Return what changes with the bytes of a file: device, inode, size, modification time; nothing if it is gone."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@final
class _Recent:
    """The maps of all tables that the running thread has, in the order of their last use.

    A map holds a file descriptor (Python's mmap keeps a copy of it), and a process may have a thousand and twenty-four:
    without a bound over all tables, those of some hundred checkpoints would take them all.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def use(self, maps: ChunkMaps, key: tuple[str, int, int]) -> None:
        """Note that a map is used now, and let go of those that were not used for longest, of any table."""
        order: OrderedDict[tuple[int, tuple[str, int, int]], weakref.ref[ChunkMaps]]
        order = self._of_thread.__dict__.setdefault("order", OrderedDict())
        order[id(maps), key] = weakref.ref(maps)
        order.move_to_end((id(maps), key))
        while len(order) > _most_maps():
            (_, oldest), owner = order.popitem(last=False)
            table = owner()
            if table is not None:
                table.forget(oldest)


def _most_maps() -> int:
    """Return how many maps are kept: a quarter of the file descriptors that the process may have."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _KEPT if allowed < 0 else max(min(allowed // 4, _KEPT), 1)


_RECENT = _Recent()
