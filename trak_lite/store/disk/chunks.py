"""Committed chunks of a table, a cache of their contents, and how a chunk is committed on a disk.

A chunk is committed when each of its column files has its final name and a log holds its commit record. A commit writes
and syncs the files, writes and syncs the record, and renames the files to their final names. If the process is killed
in between, the row log still has all rows, and the next writer of the chunk commits it again. The record is synced
before the first file gets its final name, so a reader that lists the folders before it reads the logs finds a record
for every listed file.
"""

from __future__ import annotations

import os
import resource
import shlex
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    Descriptors,
    file_size,
    named_errors,
    remove_file,
    rename,
    stamp,
    sync_files,
    sync_folders,
    write_all,
)
from trak_lite.core.mapped import is_network, map_file
from trak_lite.core.validate import some_of
from trak_lite.errors import CorruptStoreError, IncompleteStoreError, StateError
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.documents import identity_of
from trak_lite.store.disk.records import CommitLog, CommitLogs, CommitRecord

_KEPT_BYTES = 256 << 20  # another pass over a mapped table costs no page faults
_KEPT = 4096  # maximum number of maps; Linux allows 65530 per process
_KEPT_WHERE_READ = 4  # each copy takes memory; buffers are not reused, because callers may keep the arrays

Contents: TypeAlias = Sequence[Sequence[NDArray[np.uint8]]]
"""Bytes of each stored array of a chunk, in pieces, including padding."""
_Key: TypeAlias = tuple[str, int, int]
"""Array, chunk and generation."""


class PublishedChunks(ABC):
    """Committed chunks of a table, as of the last refresh, and a cache of their contents.

    A subclass says how chunks are listed, created and loaded.
    """

    keeps_rows: bool
    """Whether the rows of a chunk that cannot be published stay done: another call publishes it."""

    def __init__(self, files: TableFiles, latest: dict[int, CommitRecord], *, check: bool) -> None:
        """Find no chunk yet; ``latest`` are all records, which the subclass reads, ``check`` compares checksums."""
        self.committed: dict[int, CommitRecord] = {}
        self._files = files
        self._latest = latest
        self._check = check
        self._most_kept = _KEPT
        self._kept: OrderedDict[_Key, NDArray[Any]] = OrderedDict()
        self._kept_bytes = 0

    @abstractmethod
    def refresh(self) -> None:
        """Find out which chunks are committed; CorruptStoreError if one contradicts its record."""

    @abstractmethod
    def look_at(self, chunk: int, *, locked: bool = False) -> CommitRecord | None:
        """Return the commit record of a chunk, or ``None`` if it is not committed now.

        If it is ``locked`` and has grown since the table was opened, this raises: padding would overwrite the new rows.
        """

    @abstractmethod
    def publish(self, chunk: int, contents: Contents) -> None:
        """Commit a complete chunk, whose lock is held. After an interruption, repeat the call."""

    @abstractmethod
    def sync(self) -> None:
        """Make sure that published chunks stay published after a power cut."""

    @abstractmethod
    def remedy(self, chunk: int) -> str:
        """Return instructions for repairing a damaged chunk."""

    @abstractmethod
    def _load(self, column: ColumnFiles, record: CommitRecord, key: _Key) -> NDArray[np.uint8]:
        """Return the bytes of an array of a committed chunk.

        It is a CorruptStoreError if they contradict its record, and an IncompleteStoreError if they were removed.
        """

    def _is_outdated(self, column: ColumnFiles, key: _Key) -> bool:
        """Whether the kept content of a chunk must be loaded again."""
        return False

    def get(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        """Return the rows of a committed chunk, ``(rows, width)`` or ``(rows,)``, read-only."""
        key = column.name, record.chunk, record.generation
        if key in self._kept and self._is_outdated(column, key):
            self.forget(key)
        if key not in self._kept:
            content = self._load(column, record, key).view(column.dtype).reshape(column.shape)
            array = content[: self._files.rows_in(record.chunk)]
            array.flags.writeable = False
            self._kept[key] = array
            self._kept_bytes += array.nbytes
            while len(self._kept) > 1 and (
                self._kept_bytes > _KEPT_BYTES or len(self._kept) > self._most_kept
            ):
                self.forget(next(iter(self._kept)))
        self._kept.move_to_end(key)
        return self._kept[key].view()  # so that flags set by the caller do not affect the cache

    def close(self) -> None:
        """Release all chunks, and files that are written to; arrays returned earlier stay valid."""
        self._kept.clear()
        self._kept_bytes = 0

    def forget(self, key: _Key) -> None:
        """Release one chunk if it is kept."""
        array = self._kept.pop(key, None)
        self._kept_bytes -= 0 if array is None else array.nbytes

    def _next_generation(self, chunk: int) -> int:
        latest = self._latest.get(chunk)
        return 1 if latest is None else latest.generation + 1

    def _record_of(self, chunk: int, contents: Contents) -> CommitRecord:
        """Return the record of a chunk that is about to be committed."""
        sums = {
            column.name: (column.chunk_bytes, crc32c(*pieces))
            for column, pieces in zip(self._files.columns, contents, strict=True)
        }
        generation, rows = self._next_generation(chunk), self._files.rows_in(chunk)
        return CommitRecord(chunk, generation, rows, sums, self._files.identity)

    def _require_sizes(
        self, record: CommitRecord, sizes: Mapping[str, int | None], *, is_counted: bool
    ) -> None:
        """Raise CorruptStoreError unless a chunk has the sizes of its record and of the table, and its rows count."""
        expected = {column.name: column.chunk_bytes for column in self._files.columns}
        recorded = {name: size for name, (size, _) in record.columns.items()}
        if not (sizes == expected == recorded and is_counted):
            raise CorruptStoreError(
                f"The files of {self._files.describe(record.chunk)} have {sizes} bytes; expected {expected}, "
                f"recorded {recorded} for {record.rows} rows. {self.remedy(record.chunk)}"
            )


@final
class FolderChunks(PublishedChunks):
    """Committed chunks of a table on a disk, memory-mapped (on a network file system: read).

    The checksum of a chunk is compared on first use, and again if the chunk was recommitted or the inode, size or
    modification time of its file changed. Later requests therefore never return bytes that were written to the file
    meanwhile; an array returned earlier may show them, because it maps the file. Changes below the file system are
    detected only when the store is reopened or verified. The pages are private: writes to an array do not change the
    file.
    """

    keeps_rows = False

    def __init__(self, files: TableFiles, *, check: bool = True, mapped: bool | None = None) -> None:
        self._logs = CommitLogs(files.commits, files.identity)
        super().__init__(files, self._logs.latest, check=check)
        self._log = CommitLog(files.commits)
        self._mapped = not is_network(os.stat(files.folder).st_dev) if mapped is None else mapped
        self._most_kept = _KEPT if self._mapped else _KEPT_WHERE_READ
        self._seen: dict[_Key, tuple[int, ...]] = {}
        """State of each file when its checksum was last compared."""

    def refresh(self) -> None:
        """Update the index from the folders and logs; StateError if the table was dropped and created again."""
        visible = [column.list_visible() for column in self._files.columns]
        self._logs.poll()
        self._refuse_remade()
        for chunks in visible:
            if chunks and max(chunks) >= self._files.num_chunks and self._files.rows_on_disk(max(chunks)):
                # The table has grown since it was opened here.
                chunks.intersection_update(range(self._files.num_chunks))
        everywhere = set.intersection(*visible)
        self._refuse_strangers(set.union(*visible))
        committed = self.committed
        self.committed = {
            chunk: self._latest[chunk]
            for chunk in everywhere
            if chunk in committed or self._is_whole(chunk, self._latest[chunk])
        }
        self._close_finished_log()

    def look_at(self, chunk: int, *, locked: bool = False) -> CommitRecord | None:
        """Return the commit record of a chunk; see :meth:`PublishedChunks.look_at`."""
        rows = self._files.rows_in(chunk)
        if locked and rows < self._files.spec.chunk_rows and self._files.rows_on_disk(chunk) > rows:
            raise StateError(f"{self._files.where} has grown since it was opened. Open it again to put rows.")
        visible = [file_size(column.visible(chunk)) is not None for column in self._files.columns]
        self._logs.poll()
        self._refuse_remade()
        if any(visible):
            self._refuse_strangers({chunk})
        self.committed.pop(chunk, None)
        if all(visible) and (record := self._latest[chunk]).rows >= rows:
            self.committed[chunk] = record
        return self.committed.get(chunk)

    def publish(self, chunk: int, contents: Contents) -> None:
        """Commit a complete chunk, whose lock is held. After an interruption, repeat the call."""
        columns = self._files.columns
        left = [column for column in columns if file_size(column.visible(chunk)) is not None]
        for column in left:  # of an interrupted commit, or of one with fewer rows before the table has grown
            remove_file(column.visible(chunk))
            failpoint("column_removed")
        sync_folders(column.folder for column in left)
        held = Descriptors()
        try:
            for column, pieces in zip(columns, contents, strict=True):
                remove_file(column.staged(chunk), missing_ok=True)  # left by an interrupted commit
                fd, size = held.open(column.staged(chunk), os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0
                for piece in pieces:
                    write_all(fd, piece, size)
                    size += len(piece)
            sync_files(held.fds)
        except OSError:
            for column in columns:
                remove_file(column.staged(chunk), missing_ok=True)  # frees the full disk
            raise
        finally:
            held.close()
        failpoint("columns_synced")
        record = self._record_of(chunk, contents)
        self._log.append(record)
        failpoint("commit_synced")
        for column in columns:
            rename(column.staged(chunk), column.visible(chunk))
            failpoint("column_published")
        self.sync()
        failpoint("chunk_published")
        self.committed[chunk] = record
        self._close_finished_log()

    def sync(self) -> None:
        """Sync the names of the files of all chunks."""
        sync_folders([*(column.folder for column in self._files.columns), self._files.stage])

    def close(self) -> None:
        """Release all chunks, and the commit log; the next commit starts a new one."""
        super().close()
        self._log.close()

    def _close_finished_log(self) -> None:
        """Close the commit log of a complete table, so that it does not keep a file descriptor open."""
        if len(self.committed) >= self._files.num_chunks:
            self._log.close()

    def _refuse_remade(self) -> None:
        """Raise if the table was dropped and created again with another identity; file names would be the same."""
        stored = self._files.record()
        if stored and identity_of(stored) != self._files.identity:
            raise StateError(
                f"{self._files.folder} was dropped after it was opened, and created again for other rows. Open it "
                "again, or put these rows into another table."
            )

    def _refuse_strangers(self, chunks: set[int]) -> None:
        outside = sorted(chunk for chunk in chunks if chunk >= self._files.num_chunks)
        if outside:
            raise CorruptStoreError(
                f"{self._files.folder} holds files of the chunks {some_of(outside)}, but its "
                f"{self._files.spec.num_rows} rows make {self._files.num_chunks} chunks. Remove those files."
            )
        unrecorded = sorted(chunk for chunk in chunks if chunk not in self._latest)
        if unrecorded:
            raise CorruptStoreError(
                f"{self._files.folder} holds files of the chunks {some_of(unrecorded)} without a commit record: "
                f"they were not written for this table, or a log in {self._files.commits} is damaged. "
                f"{self.remedy(unrecorded[0])}"
            )

    def _is_whole(self, chunk: int, record: CommitRecord) -> bool:
        sizes = {column.name: file_size(column.visible(chunk)) for column in self._files.columns}
        if None in sizes.values():
            return False  # removed after it was listed
        rows, done = self._files.rows_in(chunk), record.rows
        is_counted = 0 < done <= rows or rows < done <= self._files.rows_on_disk(chunk)
        self._require_sizes(record, sizes, is_counted=is_counted)
        return done >= rows

    def remedy(self, chunk: int) -> str:
        """Return instructions for repairing a damaged chunk."""
        paths = ", ".join(column.visible(chunk) for column in self._files.columns)
        return (
            f"Remove {paths}: the rows become pending, and running again computes them. The command 'trak-lite check "
            f"{shlex.quote(self._files.root)} --repair' does it without deleting."
        )

    def get(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        """Return the rows of a committed chunk; see :meth:`PublishedChunks.get`."""
        array = super().get(column, record)
        if self._mapped:
            _note_use(self, (column.name, record.chunk, record.generation))
        return array

    def _is_outdated(self, column: ColumnFiles, key: _Key) -> bool:
        return self._check and stamp(column.visible(key[1])) != self._seen[key]

    def _load(self, column: ColumnFiles, record: CommitRecord, key: _Key) -> NDArray[np.uint8]:
        path = column.visible(record.chunk)
        size, checksum = record.columns[column.name]
        with named_errors("Mapping", path):
            state = stamp(path)  # taken before mapping, so that later writes change it
            content = self._whole(path, size, record.chunk)
        if self._check and self._seen.get(key) != state:
            computed = crc32c(content)
            if computed != checksum:
                raise CorruptStoreError(
                    f"{path}, {self._files.describe(record.chunk)}: the checksum differs from the commit record: "
                    f"{computed:08x}, recorded {checksum:08x}. {self.remedy(record.chunk)}"
                )
            self._seen[key] = state
        return content

    def _whole(self, path: str, size: int, chunk: int) -> NDArray[np.uint8]:
        actual = file_size(path)
        if actual is None:
            raise IncompleteStoreError(
                f"{path} was removed after it was committed: {self._files.describe(chunk)} are pending. "
                "Run again to compute them."
            )
        if actual != size:
            raise CorruptStoreError(
                f"{path}, {self._files.describe(chunk)}: {actual} bytes, expected {size}. {self.remedy(chunk)}"
            )
        return map_file(path, size, mapped=self._mapped)


_RECENT = threading.local()
"""LRU order of the maps of all tables, for each thread.

Each map holds a file descriptor, because Python's mmap duplicates it. A process often has a limit of 1024; without a
bound over all tables, those of some hundred checkpoints would exhaust it.
"""


def _note_use(chunks: FolderChunks, key: _Key) -> None:
    """Mark a map as used; of more than a quarter of the file descriptors or ``_KEPT`` maps, release the oldest used."""
    order: OrderedDict[tuple[int, _Key], weakref.ref[FolderChunks]]
    order = _RECENT.__dict__.setdefault("order", OrderedDict())
    order[id(chunks), key] = weakref.ref(chunks)
    order.move_to_end((id(chunks), key))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    while len(order) > (_KEPT if allowed < 0 else max(min(allowed // 4, _KEPT), 1)):
        (_, oldest), owner = order.popitem(last=False)
        table = owner()
        if table is not None:
            table.forget(oldest)
