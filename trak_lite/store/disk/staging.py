"""One chunk on its way from nothing to committed.

The rows of a chunk collect in one staged file per column. A row log beside them says which rows are there; the lock on
the log is the lock on the chunk. Once every row is done: sync the files, write and sync the commit record, give the
files their final names, remove the log. A kill between any two of these steps is repaired by whoever opens the chunk
next for writing: columns that already have their final name are taken back, the rows are proven against their
records, and the chunk is committed again if all are there.
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
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.files import (
    Descriptors,
    file_size,
    is_named,
    map_file,
    read_file,
    reserve,
    sync_file,
    sync_folder,
    write_all,
    zeros,
)
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

__all__ = ["Progress", "StagedChunk", "done_values", "proven_rows", "read_row_log", "sound_log"]

_LARGEST_LOG = 1 << 30


def read_row_log(files: TableFiles, chunk: int) -> bytes:
    """Return the bytes of the row log of a chunk, none where there is no log.

    Raises:
        CorruptStoreError: If it is longer than any log of so many rows.
    """
    most = min(HOLDER_BYTES + RECORD_BYTES * _most_recorded(files), _LARGEST_LOG)
    try:
        return read_file(files.row_log(chunk), most=most, remedy=_set_aside(files, chunk))
    except FileNotFoundError:
        return b""


def _most_recorded(files: TableFiles) -> int:
    """Return how many rows the records of a chunk can name: each once, and again after each loss of staged bytes."""
    return 8 * files.spec.chunk_rows + 1024


def _set_aside(files: TableFiles, chunk: int) -> str:
    return (
        f"It is the row log of {files.describe(chunk)}. The command 'trak-lite check {shlex.quote(files.root)} "
        "--repair' sets it aside: the rows become pending, and running again computes them anew."
    )


def proven_rows(files: TableFiles, chunk: int, log: bytes, record: CommitRecord | None) -> NDArray[np.bool_]:
    """Return which rows of an uncommitted chunk are done: their bytes match a row record.

    With a commit record that all bytes match, every row that it counts is done as well: a power cut may have taken
    the row log, which is never synced. Needs no lock and writes nothing.
    """
    return _proven(files, chunk, log, record, _map_columns(files, chunk))


def done_values(
    files: TableFiles, chunk: int, log: bytes, record: CommitRecord | None
) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
    """Return which rows of an uncommitted chunk are done, and a copy of those rows for each column."""
    views = _map_columns(files, chunk)
    done = _proven(files, chunk, log, record, views)
    values = {
        column.name: view.reshape(-1).view(column.dtype).reshape(column.shape)[: len(done)][done]
        for column, view in zip(files.columns, views, strict=True)
    }
    return done, values


def _proven(
    files: TableFiles,
    chunk: int,
    log: bytes,
    record: CommitRecord | None,
    views: Sequence[NDArray[np.uint8]],
) -> NDArray[np.bool_]:
    done = _replay(files, chunk, log, views)
    if record is not None and not done[: record.rows].all() and record.columns == _checksums(files, views):
        done[: record.rows] = True
    return done


def _map_columns(files: TableFiles, chunk: int) -> list[NDArray[np.uint8]]:
    """Return the bytes of an uncommitted chunk, for each column ``(chunk_rows, bytes of a row)``.

    What is missing of a file counts as zeros: that is how the next writer fills it up.
    """
    views = []
    for column in files.columns:
        content = _present_bytes(column, chunk)
        if len(content) < column.chunk_bytes:
            padded = zeros(column.chunk_bytes, what=f"A file of {files.describe(chunk)} in {column.name}")
            padded[: len(content)] = content
            content = padded
        views.append(content.reshape(column.shape[0], -1))
    return views


def _present_bytes(column: ColumnFiles, chunk: int) -> NDArray[np.uint8]:
    # Read without the lock: the writer may rename the file, either way, between any two looks at it.
    for path in (column.staged(chunk), column.visible(chunk), column.staged(chunk)):
        size = file_size(path)
        if size is not None:
            with contextlib.suppress(FileNotFoundError):
                return map_file(path, min(size, column.chunk_bytes))
    return np.empty(0, np.uint8)


def _checksums(files: TableFiles, views: Sequence[NDArray[np.uint8]]) -> dict[str, tuple[int, int]]:
    return {
        column.name: (column.chunk_bytes, crc32c(view))
        for column, view in zip(files.columns, views, strict=True)
    }


def _replay(
    files: TableFiles, chunk: int, log: bytes, views: Sequence[NDArray[np.uint8]]
) -> NDArray[np.bool_]:
    done = np.zeros(files.rows_in(chunk), np.bool_)
    for entry in _sound_records(files, chunk, log, views):
        done[entry.start : entry.start + entry.count] = True
    return done


def _sound_records(
    files: TableFiles, chunk: int, log: bytes, views: Sequence[NDArray[np.uint8]]
) -> Iterator[RowRecord]:
    """Yield the records that the bytes match, but for those that add no row to the ones before.

    Raises:
        CorruptStoreError: If they name rows without end: each is compared with its bytes, which takes time.
    """
    done = np.zeros(files.rows_in(chunk), np.bool_)
    left = _most_recorded(files)
    for entry in decode_rows(log, seed=files.row_seed):
        rows = slice(entry.start, entry.start + entry.count)
        if entry.chunk != chunk or rows.stop > len(done) or done[rows].all():
            continue
        left -= entry.count
        if left < 0:
            raise CorruptStoreError(
                f"{files.row_log(chunk)} names {len(done)} rows over and over. {_set_aside(files, chunk)}"
            )
        if crc32c(*(view[rows] for view in views)) == entry.checksum:
            done[rows] = True
            yield entry


def sound_log(files: TableFiles, chunk: int, log: bytes) -> bytes:
    """Return a row log that names the rows of an uncommitted chunk whose bytes match, and nothing else."""
    records = _sound_records(files, chunk, log, _map_columns(files, chunk))
    seed = files.row_seed
    lines = (
        encode_row(entry.chunk, entry.start, entry.count, entry.checksum, seed=seed) for entry in records
    )
    return log[:HOLDER_BYTES].ljust(HOLDER_BYTES) + b"".join(lines)


@dataclass(frozen=True, slots=True)
class Progress:
    """What was known of a staged chunk when its lock was given up; holds as long as the log is the same."""

    log_inode: int
    log_size: int
    done: NDArray[np.bool_]


@final
class StagedChunk:
    """A chunk that this process is filling, under its lock."""

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
        """Take the lock of a chunk.

        Raises:
            BusyError: If another writer holds it; names the writer.
            HeldHereError: If it is this process.
        """
        path = files.row_log(chunk)
        while True:
            log = Descriptors()
            fd = log.open(path, os.O_RDWR | os.O_CREAT)
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
            log.close()  # its last holder committed the chunk and removed the log before the lock was taken

    def holds(self, fd: int) -> bool:
        """Return whether this is the lock of the row log that is open."""
        return bool(self._open) and os.path.samestat(os.fstat(self._log_fd), os.fstat(fd))

    @property
    def complete(self) -> bool:
        """Whether every row is done."""
        return bool(self.done.all())

    @property
    def progress(self) -> Progress:
        """What is known of the chunk, to be remembered beyond the lock."""
        return Progress(os.fstat(self._log_fd).st_ino, self.log_size, self.done)

    def take_back(self, visible: Sequence[ColumnFiles]) -> None:
        """Move columns of a chunk that is not committed from their final names back to the stage."""
        for column in visible:
            if file_size(column.staged(self.chunk)) is None:
                os.rename(column.visible(self.chunk), column.staged(self.chunk))
            else:
                os.unlink(column.visible(self.chunk))  # a leftover: the staged file is the one being filled
            failpoint("column_taken_back")

    def note_committed(self, record: CommitRecord, visible: Sequence[ColumnFiles]) -> None:
        """Note the rows of a commit that the chunk has outgrown in its row log, before its files lose their names.

        Synced, unlike other row records: what was committed must outlive a power cut also from here on.

        Raises:
            CorruptStoreError: If the bytes contradict the commit record.
        """
        log = read_row_log(self._files, self.chunk)
        views = _map_columns(self._files, self.chunk)
        if _replay(self._files, self.chunk, log, views)[: record.rows].all():
            return
        if record.columns != _checksums(self._files, views):
            if len(visible) < len(self._files.columns):
                return  # taken back before, and filled since: what the row log proves is what there is
            raise CorruptStoreError(
                f"The files of {self._files.describe(self.chunk)} contradict their commit record. "
                "Verify the store with repair=True: the rows become pending, and running again computes them anew."
            )
        end = HOLDER_BYTES + max(len(log) - HOLDER_BYTES, 0) // RECORD_BYTES * RECORD_BYTES
        write_all(self._log_fd, holder_line(), 0)
        checksum = crc32c(*(view[: record.rows] for view in views))
        noted = encode_row(self.chunk, 0, record.rows, checksum, seed=self._files.row_seed)
        write_all(self._log_fd, noted, end)
        os.fsync(self._log_fd)
        sync_folder(self._files.stage)
        failpoint("outgrown_rows_noted")

    def prepare(
        self, record: CommitRecord | None, known: Progress | None, *, roll_forward: bool = False
    ) -> None:
        """Open and reserve the staged files and find out which rows are done.

        Args:
            record: Latest commit record of the chunk, if there is one.
            known: What this process knew when it last held the lock.
            roll_forward: Whether bytes that match ``record`` are done as well. Not so where a failed commit has been
                reported: its rows were promised to stay pending.
        """
        log = read_row_log(self._files, self.chunk)
        try:
            write_all(self._log_fd, holder_line(), 0)
            for column in self._files.columns:
                fd = self._open.open(column.staged(self.chunk), os.O_RDWR | os.O_CREAT)
                reserve(fd, column.chunk_bytes)
                self._column_fds.append(fd)
        except OSError:
            if len(log) <= HOLDER_BYTES and record is None:
                self._remove()  # nothing is done in it: do not keep a full disk full
            raise
        failpoint("stage_reserved")
        self._generation = 1 if record is None else record.generation + 1
        self._proof = record if roll_forward else None
        self.log_size += max(len(log) - HOLDER_BYTES, 0) // RECORD_BYTES * RECORD_BYTES
        inode = os.fstat(self._log_fd).st_ino
        if known is not None and (known.log_inode, known.log_size) == (inode, len(log)):
            self.done = known.done
        else:
            self.done = proven_rows(self._files, self.chunk, log, self._proof)

    def write(self, start: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Write consecutive rows, one array per column; when it returns, a kill cannot lose them."""
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
        """Make rows pending again whose writing failed half way."""
        if self._open:
            os.ftruncate(self._log_fd, log_size)
            self.log_size = log_size
        for run in runs:
            self.done[run.start : run.start + run.source.stop - run.source.start] = False

    def commit(self, log: CommitLog) -> CommitRecord:
        """Make the complete chunk visible, and give up the lock.

        Raises:
            CorruptStoreError: If staged bytes no longer match their records; those rows are pending again.
        """
        self._pad()
        record = self._proven_record()
        for fd, column in zip(self._column_fds, self._files.columns, strict=True):
            sync_file(fd, column.staged(self.chunk))
        failpoint("columns_synced")
        log.append(record)
        failpoint("commit_synced")
        for column in self._files.columns:
            os.rename(column.staged(self.chunk), column.visible(self.chunk))
            failpoint("column_published")
        for folder in (*(column.folder for column in self._files.columns), self._files.stage):
            sync_folder(folder)
        failpoint("chunk_published")
        self.discard_log()
        failpoint("chunk_settled")
        return record

    def discard_log(self) -> None:
        """Remove the row log of a committed chunk, and give up the lock."""
        os.unlink(self._files.row_log(self.chunk))
        self.close()

    def close(self) -> None:
        """Give up the lock; rows that are done stay done."""
        self._open.close()

    def _pad(self) -> None:
        rows = len(self.done)
        for fd, column in zip(self._column_fds, self._files.columns, strict=True):
            missing = column.shape[0] - rows
            if missing:
                padding = np.full((missing, *column.shape[1:]), column.fill, column.dtype)
                write_all(fd, padding, rows * column.row_bytes)

    def _proven_record(self) -> CommitRecord:
        views = _map_columns(self._files, self.chunk)
        sums = _checksums(self._files, views)
        log = read_row_log(self._files, self.chunk)
        proven = _replay(self._files, self.chunk, log, views)
        proof = self._proof
        if proven.all() or (proof is not None and (proof.rows, proof.columns) == (len(self.done), sums)):
            return CommitRecord(self.chunk, self._generation, len(self.done), sums, self._files.identity)
        raise CorruptStoreError(
            f"Staged bytes of {self._files.describe(self.chunk)} changed after they were written. "
            "pending() lists the rows that have to be put again; check the disk."
        )

    def _remove(self) -> None:
        for column in self._files.columns:
            if file_size(column.staged(self.chunk)) is not None:
                os.unlink(column.staged(self.chunk))
        self.discard_log()


_HELD: weakref.WeakSet[StagedChunk] = weakref.WeakSet()


def _busy_error(where: str, log_fd: int) -> BusyError:
    # Not by the name in the log: a new holder has not written its own at once, and containers share host and pid.
    if any(stage.holds(log_fd) for stage in list(_HELD)):
        return HeldHereError(
            f"{where}: this process already writes them through another open store. Close that one first."
        )
    name = os.pread(log_fd, HOLDER_BYTES, 0).decode("ascii", "replace").strip()
    return BusyError(
        f"{where}: another writer ({name or 'unnamed'}) holds them. "
        "Wait for it to finish, stop it, or give this process other rows."
    )
