"""Staged chunks: writing rows, committing complete chunks, and locking those of a table that is dropped.

The rows of a chunk are written to one staged file per stored array. A row log next to these files records which rows
are written; the lock on the log is the lock on the chunk. Once every row is done, a commit performs these steps: sync
the files, write and sync the commit record, rename the files to their final names, remove the log. If the process is
killed between two steps, the next writer of the chunk recovers it: it moves files that have their final name back to
the stage, compares the rows with their records, and commits the chunk if all rows are valid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import BusyError, CorruptStoreError, HeldHereError
from trak_lite.store._checksums import crc32c
from trak_lite.store._failpoints import failpoint
from trak_lite.store._grid import Run
from trak_lite.store.disk.chunk_files import STAGE, ColumnFiles, TableFiles
from trak_lite.store.disk.files import (
    Descriptors,
    file_size,
    is_named,
    map_file,
    read_file,
    refuse_other_names,
    remove_file,
    rename,
    reserve,
    sync_files,
    sync_folder,
    sync_folders,
    write_all,
    zeros,
)
from trak_lite.store.disk.folders import names_in
from trak_lite.store.disk.records import (
    HOLDER_BYTES,
    RECORD_BYTES,
    CommitLog,
    CommitRecord,
    RowRecord,
    decode_rows,
    encode_row,
    holder_line,
)

__all__ = [
    "Progress",
    "StagedChunk",
    "StagedRows",
    "read_row_log",
    "stage_locked",
]

_LARGEST_LOG = 1 << 30


def read_row_log(files: TableFiles, chunk: int) -> bytes:
    """Return the bytes of the row log of a chunk; empty if there is no log.

    Raises:
        CorruptStoreError: If the log is longer than possible for the number of rows.
    """
    most = min(HOLDER_BYTES + RECORD_BYTES * _most_recorded(files), _LARGEST_LOG)
    try:
        return read_file(files.row_log(chunk), most=most, remedy=_set_aside(files, chunk))
    except FileNotFoundError:
        return b""


def _most_recorded(files: TableFiles) -> int:
    """Return the maximum total of rows in a row log; rows recur if staged bytes are lost and written again."""
    return 8 * files.spec.chunk_rows + 1024


def _set_aside(files: TableFiles, chunk: int) -> str:
    return (
        f"It is the row log of {files.describe(chunk)}. The command 'trak-lite check {shlex.quote(files.root)} "
        "--repair' sets it aside: the rows become pending, and running again computes them."
    )


@final
class StagedRows:
    """Row log and bytes of an uncommitted chunk, as they are now. Needs no lock and writes nothing."""

    def __init__(self, files: TableFiles, chunk: int) -> None:
        self.log = read_row_log(files, chunk)
        self._files, self._chunk = files, chunk
        self._views = [self._bytes_of(column) for column in files.columns]

    def _bytes_of(self, column: ColumnFiles) -> NDArray[np.uint8]:
        """Return the bytes of a stored array, ``(chunk_rows, row_bytes)``; the next writer would pad with zeros too."""
        content = _present_bytes(column, self._chunk)
        if len(content) < column.chunk_bytes:
            what = f"A file of {self._files.describe(self._chunk)} in {column.name}"
            padded = zeros(column.chunk_bytes, what=what)
            padded[: len(content)] = content
            content = padded
        return content.reshape(column.shape[0], -1)

    def checksums(self) -> dict[str, tuple[int, int]]:
        """Return size and checksum of each stored array, as in a commit record."""
        columns = zip(self._files.columns, self._views, strict=True)
        return {column.name: (column.chunk_bytes, crc32c(view)) for column, view in columns}

    def checksum(self, start: int, count: int) -> int:
        """Return the checksum of rows over all stored arrays, as in a row record."""
        return crc32c(*(view[start : start + count] for view in self._views))

    def done(self, record: CommitRecord | None = None) -> NDArray[np.bool_]:
        """Return a mask of the done rows: those whose bytes match a row record.

        If all bytes match the commit record, its rows are done as well, because a power cut may have lost the row log,
        which is not synced.
        """
        done = np.zeros(self._files.rows_in(self._chunk), np.bool_)
        for entry in self._sound_records():
            done[entry.start : entry.start + entry.count] = True
        if record is not None and not done[: record.rows].all() and record.columns == self.checksums():
            done[: record.rows] = True
        return done

    def values(self, done: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """Return a copy of some rows of each stored array."""
        return {
            column.name: view.reshape(-1).view(column.dtype).reshape(column.shape)[: len(done)][done]
            for column, view in zip(self._files.columns, self._views, strict=True)
        }

    def sound_log(self) -> bytes:
        """Return a row log with only the valid records."""
        seed = self._files.row_seed
        lines = (encode_row(e.chunk, e.start, e.count, e.checksum, seed=seed) for e in self._sound_records())
        return self.log[:HOLDER_BYTES].ljust(HOLDER_BYTES) + b"".join(lines)

    def _sound_records(self) -> Iterator[RowRecord]:
        """Yield the records whose rows match their checksum, except those that add no new row.

        Raises:
            CorruptStoreError: If the records list the same rows too often; verifying them all would take too long.
        """
        files, chunk = self._files, self._chunk
        done = np.zeros(files.rows_in(chunk), np.bool_)
        left = _most_recorded(files)
        for entry in decode_rows(self.log, seed=files.row_seed):
            rows = slice(entry.start, entry.start + entry.count)
            if entry.chunk != chunk or rows.stop > len(done) or done[rows].all():
                continue
            left -= entry.count
            if left < 0:
                raise CorruptStoreError(
                    f"{files.row_log(chunk)} lists {len(done)} rows more than once. {_set_aside(files, chunk)}"
                )
            if self.checksum(entry.start, entry.count) == entry.checksum:
                done[rows] = True
                yield entry


def _present_bytes(column: ColumnFiles, chunk: int) -> NDArray[np.uint8]:
    # Without the lock, the writer may rename the file in either direction between two attempts.
    for path in (column.staged(chunk), column.visible(chunk), column.staged(chunk)):
        size = file_size(path)
        if size is not None:
            with contextlib.suppress(FileNotFoundError):
                return map_file(path, min(size, column.chunk_bytes))
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a staged chunk when its lock was released; valid as long as the row log is unchanged."""

    log_inode: int
    log_size: int
    done: NDArray[np.bool_]


@final
class StagedChunk:
    """A staged chunk that this process has locked for writing."""

    def __init__(self, files: TableFiles, chunk: int, log: Descriptors, log_fd: int) -> None:
        self.chunk = chunk
        self.done: NDArray[np.bool_] = np.zeros(files.rows_in(chunk), np.bool_)
        self.log_size = HOLDER_BYTES
        self._files = files
        self._open = log
        self._log_fd = log_fd
        self._column_fds: list[int] = []
        self._generation = 1
        self._proof: CommitRecord | None = None

    @classmethod
    def lock(cls, files: TableFiles, chunk: int) -> StagedChunk:
        """Lock a chunk.

        Raises:
            BusyError: If another writer holds the lock; names the writer.
            HeldHereError: If this process already holds the lock.
        """
        path = files.row_log(chunk)
        while True:
            log = Descriptors()
            fd = log.open(path, os.O_RDWR | os.O_CREAT)
            refuse_other_names(fd, path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                error = _busy_error(files.describe(chunk), fd)
                log.close()
                raise error from None
            if is_named(path, fd):
                stage = cls(files, chunk, log, fd)
                _HELD.add(stage)
                return stage
            log.close()  # the previous holder committed the chunk and removed the log: try again

    def holds(self, fd: int) -> bool:
        """Return whether this object holds the lock of the row log opened as ``fd``."""
        return bool(self._open) and os.path.samestat(os.fstat(self._log_fd), os.fstat(fd))

    @property
    def complete(self) -> bool:
        """Whether every row is done."""
        return bool(self.done.all())

    @property
    def progress(self) -> Progress:
        """Progress of the chunk, to be kept after its lock is released."""
        return Progress(os.fstat(self._log_fd).st_ino, self.log_size, self.done)

    def take_back(self, visible: Sequence[ColumnFiles]) -> None:
        """Move files of an uncommitted chunk from their final names back to the stage."""
        for column in visible:
            if file_size(column.staged(self.chunk)) is None:
                rename(column.visible(self.chunk), column.staged(self.chunk))
            else:
                remove_file(column.visible(self.chunk))  # a leftover; the staged file is current
            failpoint("column_taken_back")

    def note_committed(self, record: CommitRecord, visible: Sequence[ColumnFiles]) -> None:
        """Record the committed rows of a grown chunk in its row log, before its files move back to the stage.

        Unlike other row records, this one is synced, so that committed rows still survive a power cut.

        Raises:
            CorruptStoreError: If the files do not match the commit record.
        """
        staged = StagedRows(self._files, self.chunk)
        if staged.done()[: record.rows].all():
            return
        if record.columns != staged.checksums():
            if len(visible) < len(self._files.columns):
                return  # an earlier call moved files back and rows were added; the row log decides
            raise CorruptStoreError(
                f"The files of {self._files.describe(self.chunk)} contradict their commit record. Call "
                "check_store(path, repair=True): the rows become pending, and running again computes them."
            )
        end = HOLDER_BYTES + max(len(staged.log) - HOLDER_BYTES, 0) // RECORD_BYTES * RECORD_BYTES
        write_all(self._log_fd, holder_line(), 0)
        checksum = staged.checksum(0, record.rows)
        record_bytes = encode_row(self.chunk, 0, record.rows, checksum, seed=self._files.row_seed)
        write_all(self._log_fd, record_bytes, end)
        os.fsync(self._log_fd)
        sync_folder(self._files.stage)
        failpoint("outgrown_rows_noted")

    def prepare(
        self, record: CommitRecord | None, known: Progress | None, *, roll_forward: bool = False
    ) -> None:
        """Open the staged files, reserve their disk space and determine which rows are done.

        Args:
            record: Latest commit record of the chunk, if there is one.
            known: Progress when this process last held the lock.
            roll_forward: Whether rows are also done if all bytes match ``record``. ``False`` after a failed commit,
                because the error reported its rows as pending.
        """
        log = read_row_log(self._files, self.chunk)
        try:
            write_all(self._log_fd, holder_line(), 0)
            for column in self._files.columns:
                fd = self._open.open(column.staged(self.chunk), os.O_RDWR | os.O_CREAT)
                refuse_other_names(fd, column.staged(self.chunk))
                reserve(fd, column.chunk_bytes)
                self._column_fds.append(fd)
        except OSError:
            if len(log) <= HOLDER_BYTES and record is None:
                self._remove()  # no row is done: remove the files to free the full disk
            raise
        failpoint("stage_reserved")
        self._generation = 1 if record is None else record.generation + 1
        self._proof = record if roll_forward else None
        self.log_size += max(len(log) - HOLDER_BYTES, 0) // RECORD_BYTES * RECORD_BYTES
        inode = os.fstat(self._log_fd).st_ino
        if known is not None and (known.log_inode, known.log_size) == (inode, len(log)):
            self.done = known.done
        else:
            self.done = StagedRows(self._files, self.chunk).done(self._proof)

    def write(self, start: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Write consecutive rows, given as one block per stored array. Once this returns, they survive a kill."""
        count = len(arrays[0])
        for fd, column, array in zip(self._column_fds, self._files.columns, arrays, strict=True):
            write_all(fd, array, start * column.row_bytes)
            failpoint("column_written")
        failpoint("rows_written")
        entry = encode_row(self.chunk, start, count, crc32c(*arrays), seed=self._files.row_seed)
        write_all(self._log_fd, entry, self.log_size)
        failpoint("rows_recorded")
        self.log_size += RECORD_BYTES
        self.done[start : start + count] = True

    def forget(self, log_size: int, runs: Sequence[Run]) -> None:
        """Make rows pending again after writing them failed."""
        if self._open:
            os.ftruncate(self._log_fd, log_size)
            self.log_size = log_size
        for run in runs:
            self.done[run.rows] = False

    def commit(self, log: CommitLog) -> CommitRecord:
        """Commit the complete chunk and release its lock.

        Raises:
            CorruptStoreError: If staged bytes no longer match their records; those rows become pending.
        """
        self._pad()
        record = self._proven_record()
        columns = self._files.columns
        sync_files(
            dict(zip(self._column_fds, (column.staged(self.chunk) for column in columns), strict=True))
        )
        failpoint("columns_synced")
        log.append(record)
        failpoint("commit_synced")
        for column in columns:
            rename(column.staged(self.chunk), column.visible(self.chunk))
            failpoint("column_published")
        sync_folders([*(column.folder for column in columns), self._files.stage])
        failpoint("chunk_published")
        self.discard_log()
        failpoint("chunk_settled")
        return record

    def discard_log(self) -> None:
        """Delete the row log and release the lock."""
        remove_file(self._files.row_log(self.chunk))
        self.close()

    def close(self) -> None:
        """Release the lock; done rows stay done."""
        self._open.close()

    def _pad(self) -> None:
        rows = len(self.done)
        for fd, column in zip(self._column_fds, self._files.columns, strict=True):
            missing = column.shape[0] - rows
            if missing:
                padding = np.full((missing, *column.shape[1:]), column.fill, column.dtype)
                write_all(fd, padding, rows * column.row_bytes)

    def _proven_record(self) -> CommitRecord:
        staged = StagedRows(self._files, self.chunk)
        sums, proof = staged.checksums(), self._proof
        if staged.done().all() or (
            proof is not None and (proof.rows, proof.columns) == (len(self.done), sums)
        ):
            return CommitRecord(self.chunk, self._generation, len(self.done), sums, self._files.identity)
        raise CorruptStoreError(
            f"Staged bytes of {self._files.describe(self.chunk)} changed after they were written. Check the disk, and "
            "put the rows again that pending() lists."
        )

    def _remove(self) -> None:
        for column in self._files.columns:
            if file_size(column.staged(self.chunk)) is not None:
                remove_file(column.staged(self.chunk))
        self.discard_log()


_HELD: weakref.WeakSet[StagedChunk] = weakref.WeakSet()


def _busy_error(where: str, log_fd: int) -> BusyError:
    # The holder line in the log is unreliable: a new holder writes it late, and containers may share host and pid.
    if any(stage.holds(log_fd) for stage in list(_HELD)):
        return HeldHereError(
            f"{where}: this process already writes them through another open store. Close that one first."
        )
    return BusyError(
        f"{where}: another writer ({_holder(log_fd)}) holds them. "
        "Wait for it to finish, stop it, or give this process other rows."
    )


@contextlib.contextmanager
def stage_locked(folder: str) -> Iterator[None]:
    """Hold the locks of all staged chunks of a table; its metadata may be damaged.

    Raises:
        BusyError: If another writer holds one of the locks; names the writer.
    """
    held = Descriptors()
    try:
        for path in _row_logs(folder):
            with contextlib.suppress(FileNotFoundError):  # the chunk has just been committed
                _lock(held, path, folder)
        yield
    finally:
        held.close()


def _row_logs(folder: str) -> Iterator[str]:
    for column in names_in(folder):
        stage = f"{folder}/{column}/{STAGE}"
        if os.path.isdir(stage) and not os.path.islink(f"{folder}/{column}"):
            yield from (f"{stage}/{name}" for name in names_in(stage) if name.endswith(".log"))


def _lock(held: Descriptors, path: str, folder: str) -> None:
    fd = held.open(path, os.O_RDWR)  # NFS grants exclusive locks only on files opened for writing
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"{folder}: another writer ({_holder(fd)}) holds rows of it, so it was not dropped. "
            "Wait for it to finish, or stop it."
        ) from None


def _holder(log_fd: int) -> str:
    return os.pread(log_fd, HOLDER_BYTES, 0).decode("ascii", "replace").strip() or "unnamed"
