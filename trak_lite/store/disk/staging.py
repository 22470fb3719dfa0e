"""Row logs: the rows of an unfinished chunk, and the lock of the chunk.

The rows of a chunk are appended to its row log until every row is there; then the chunk is published and the log
deleted. The lock on the log is the lock on the chunk. A log is a 64-byte line that names the process holding the chunk,
followed by frames, one for each put:

- a mark (8 bytes), which follows from the table's identity and the chunk;
- number of runs n (4), CRC-32C of the rows (4), both little-endian;
- n runs of consecutive rows: first row in the chunk (4), number of rows (4);
- CRC-32C of the frame so far (4);
- the rows: for each stored array of the table, its bytes of all these rows.

The rows are written before what precedes them, so a frame that is read is whole after a kill. A frame whose rows or
whose description do not match their checksum is ignored, and the next mark is searched for. Torn writes, flipped bits
and exchanged files can therefore make rows pending, but never yield wrong rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    Descriptors,
    is_named,
    open_file,
    refuse_other_names,
    remove_file,
    reserve,
    sync_folder,
    write_all,
)
from trak_lite.core.folders import names_in
from trak_lite.core.mapped import is_network
from trak_lite.errors import BusyError, CorruptStoreError, HeldHereError
from trak_lite.store._grid import Run
from trak_lite.store.disk.chunk_files import TableFiles
from trak_lite.store.disk.records import HOLDER_BYTES, holder_line

_FRAME = struct.Struct("<8sII")
_CHECK = struct.Struct("<I")
_MOST_HEAD = _FRAME.size + 8 + _CHECK.size
"""Bytes that precede the rows of a frame, per row, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The rows of one put in a row log."""

    runs: NDArray[np.int64]
    """First row in the chunk and number of rows of each run, ``(n, 2)``."""
    num_rows: int
    checksum: int
    head: slice
    """Bytes of the log that describe the rows."""
    rows: slice
    """Bytes of the log that hold the rows."""


def _mark(files: TableFiles, chunk: int) -> bytes:
    return hashlib.sha256(f"{files.identity}/{chunk}".encode()).digest()[:8]


def _is_begun(content: bytes, whole: bytes) -> bool:
    """Return whether these bytes are where a writer was killed: a description is written last, and zeros follow it."""
    return whole.startswith(content.rstrip(b"\0"))


@final
class StagedRows:
    """The frames of the row log of a chunk, as it is now. Needs no lock and writes nothing."""

    def __init__(self, files: TableFiles, chunk: int, *, mapped: bool = False) -> None:
        """Read the log; map it if its lock is held. Touching a map of a log that others shorten kills the process."""
        self._files, self._chunk = files, chunk
        self._mark, self._row_bytes = _mark(files, chunk), files.spec.row_bytes
        self._log: bytes | mmap.mmap = b""
        with contextlib.suppress(FileNotFoundError):
            self._log = self._open(mapped=mapped)
        self.frames: list[Frame] = []
        self.damaged = 0
        """Number of bytes of damaged frames. What a killed writer or a power cut has torn at the end does not count."""
        self.end = HOLDER_BYTES
        """Byte of the log at which the next frame starts."""
        self._scan()

    def _open(self, *, mapped: bool) -> bytes | mmap.mmap:
        spec = self._files.spec
        with os.fdopen(open_file(self._files.row_log(self._chunk), os.O_RDONLY), "rb") as file:
            status = os.fstat(file.fileno())
            # Rows are written again only after damage: what is longer is no log of this table.
            size = min(status.st_size, HOLDER_BYTES + 8 * spec.chunk_rows * (spec.row_bytes + _MOST_HEAD))
            if mapped and size and not is_network(status.st_dev):
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            return file.read(size)

    def _scan(self) -> None:
        offset = self.end
        while offset >= 0:
            frame = self._frame(offset)
            if frame is not None:
                self.frames.append(frame)
                self.damaged += offset - self.end
                offset = self.end = frame.rows.stop
            else:
                offset = self._log.find(self._mark, offset + 1)
        if not self._is_torn(self._log[self.end :]):
            self.damaged += len(self._log) - self.end

    def _is_torn(self, rest: bytes) -> bool:
        """Return whether a killed writer or a power cut may have left these bytes behind the last frame."""
        if len(rest) < _FRAME.size:
            return True
        mark, count, _ = _FRAME.unpack_from(rest)
        if mark != self._mark:
            return _is_begun(mark, self._mark)
        check = _FRAME.size + 8 * count
        if count > self._files.spec.chunk_rows:
            return False
        if check + _CHECK.size > len(rest):
            return True
        return _is_begun(rest[check : check + _CHECK.size], _CHECK.pack(crc32c(rest[:check])))

    def _frame(self, offset: int) -> Frame | None:
        spec, log = self._files.spec, self._log
        if log[offset : offset + 8] != self._mark or offset + _FRAME.size > len(log):
            return None
        _, count, checksum = _FRAME.unpack_from(log, offset)
        check = offset + _FRAME.size + 8 * count
        start = check + _CHECK.size
        if count > spec.chunk_rows or start > len(log):
            return None
        if log[check:start] != _CHECK.pack(crc32c(log[offset:check])):
            return None
        runs = np.frombuffer(log, "<u4", 2 * count, offset + _FRAME.size).reshape(-1, 2).astype(np.int64)
        num_rows = int(runs[:, 1].sum())
        stop = start + num_rows * self._row_bytes
        if stop > len(log) or (runs.sum(axis=1) > spec.chunk_rows).any():
            return None
        return Frame(runs, num_rows, checksum, slice(offset, start), slice(start, stop))

    def _sound(self) -> Iterator[Frame]:
        """Yield the frames whose rows match their checksum."""
        content = np.frombuffer(self._log, np.uint8)
        yield from (frame for frame in self.frames if crc32c(content[frame.rows]) == frame.checksum)

    def named(self) -> NDArray[np.bool_]:
        """Return a mask of the rows in all frames, ``(rows,)``."""
        return self._mask(self.frames)

    def done(self) -> NDArray[np.bool_]:
        """Return a mask of the rows that are done: those whose bytes match their checksum, ``(rows,)``."""
        return self._mask(self._sound())

    def _mask(self, frames: Iterable[Frame]) -> NDArray[np.bool_]:
        rows = np.zeros(self._files.rows_in(self._chunk), np.bool_)
        for frame in frames:
            for first, count in frame.runs.tolist():
                rows[first : first + count] = True
        return rows

    def pieces(self) -> tuple[NDArray[np.bool_], list[list[NDArray[np.uint8]]]]:
        """Return the mask of the done rows, ``(rows,)``, and their bytes in each stored array, in order of the rows."""
        frames = list(self._sound())
        frame_of = np.full(self._files.spec.chunk_rows, -1)
        index_of = np.zeros_like(frame_of)  # position of the row in its frame
        for number, frame in enumerate(frames):
            index = 0
            for first, count in frame.runs.tolist():
                frame_of[first : first + count] = number
                index_of[first : first + count] = np.arange(index, index + count)
                index += count
        rows = self._files.rows_in(self._chunk)
        changes = (np.diff(frame_of[:rows]) != 0) | (np.diff(index_of[:rows]) != 1)
        borders = [0, *(np.flatnonzero(changes) + 1).tolist(), rows]
        content = np.frombuffer(self._log, np.uint8)
        pieces: list[list[NDArray[np.uint8]]] = [[] for _ in self._files.columns]
        for row, stop in itertools.pairwise(borders):
            if frame_of[row] < 0:
                continue
            frame = frames[frame_of[row]]
            offset = frame.rows.start
            for column, parts in zip(self._files.columns, pieces, strict=True):
                start = offset + int(index_of[row]) * column.row_bytes
                parts.append(content[start : start + (stop - row) * column.row_bytes])
                offset += frame.num_rows * column.row_bytes
        return frame_of[:rows] >= 0, pieces

    def copy(self, *, sound: bool) -> bytes:
        """Return the log; if ``sound``, only with the rows that match their checksum."""
        if not sound:
            return self._log[:]
        parts = (self._log[frame.head.start : frame.rows.stop] for frame in self._sound())
        return self._log[:HOLDER_BYTES].ljust(HOLDER_BYTES) + b"".join(parts)


@final
class StagedChunk:
    """An unfinished chunk that this process has locked for writing."""

    def __init__(self, files: TableFiles, chunk: int, log: Descriptors, log_fd: int) -> None:
        self.chunk = chunk
        self.done: NDArray[np.bool_] = np.zeros(files.rows_in(chunk), np.bool_)
        self.log_size = HOLDER_BYTES
        """Bytes of the log up to the end of its last frame."""
        self.stamp: tuple[int, ...] = ()
        """Inode, size and modification time of the log when its lock was released; a later log may get its inode."""
        self._files = files
        self._open = log
        self._log_fd = log_fd

    @classmethod
    def lock(cls, files: TableFiles, chunk: int) -> StagedChunk:
        """Lock a chunk; BusyError names the writer that holds it, HeldHereError means this process."""
        path = files.row_log(chunk)
        while True:
            log = Descriptors()
            fd = log.open(path, os.O_RDWR | os.O_CREAT)
            refuse_other_names(fd, path)
            if not _locks(fd):
                with contextlib.closing(log):
                    raise _busy_error(files.describe(chunk), fd)
            if is_named(path, fd):
                stage = cls(files, chunk, log, fd)
                _HELD.add(stage)
                return stage
            log.close()  # the previous holder committed the chunk and removed the log: try again

    def holds(self, fd: int) -> bool:
        """Return whether this object holds the lock of the row log opened as ``fd``."""
        return bool(self._open) and os.path.samestat(os.fstat(self._log_fd), os.fstat(fd))

    @property
    def is_left(self) -> bool:
        """Whether an earlier holder has written rows, so that it did not finish what it began."""
        return os.fstat(self._log_fd).st_size > HOLDER_BYTES

    @property
    def complete(self) -> bool:
        """Whether every row is done."""
        return bool(self.done.all())

    def _stamp_of_log(self) -> tuple[int, ...]:
        status = os.fstat(self._log_fd)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def prepare(self, previous: StagedChunk | None = None) -> None:
        """Determine which rows are done; read the log if it has changed since ``previous``, which was closed."""
        if previous is not None and previous.stamp == self._stamp_of_log():
            self.log_size, self.done = previous.log_size, previous.done
        else:
            staged = StagedRows(self._files, self.chunk, mapped=True)
            self.log_size, self.done = staged.end, staged.done()
        os.ftruncate(self._log_fd, self.log_size)  # what a killed writer left
        write_all(self._log_fd, holder_line(), 0)

    def reserve(self, rows: int, runs: int) -> None:
        """Reserve disk space to write some rows, so that a full disk raises now."""
        size = rows * self._files.spec.row_bytes + _FRAME.size + 8 * runs + _CHECK.size
        reserve(self._log_fd, self.log_size + size)
        failpoint("stage_reserved")

    def write(self, runs: Sequence[tuple[int, int]], arrays: Sequence[NDArray[Any]]) -> None:
        """Append rows. Once this returns, they survive a kill.

        Args:
            runs: First row in the chunk and number of rows of each run.
            arrays: Their rows, one block per stored array, C-contiguous.
        """
        head = _FRAME.pack(_mark(self._files, self.chunk), len(runs), crc32c(*arrays))
        head += np.asarray(runs, "<u4").tobytes()
        head += _CHECK.pack(crc32c(head))
        end = self.log_size + len(head)
        for array in arrays:
            write_all(self._log_fd, array, end)
            end += array.nbytes
            failpoint("column_written")
        failpoint("rows_written")
        write_all(self._log_fd, head, self.log_size)
        failpoint("rows_recorded")
        self.log_size = end
        for first, count in runs:
            self.done[first : first + count] = True

    def sync(self) -> None:
        """Sync the log to the disk: its rows survive a power cut too."""
        os.fsync(self._log_fd)
        sync_folder(self._files.stage)

    def forget(self, log_size: int, runs: Sequence[Run]) -> None:
        """Make rows pending again after writing them failed; no map of the log may be used any more."""
        if self._open:
            os.ftruncate(self._log_fd, log_size)
            self.log_size = log_size
        for run in runs:
            self.done[run.rows] = False

    def contents(self) -> list[list[NDArray[np.uint8]]]:
        """Return the bytes of each stored array of the complete chunk, in pieces, including padding.

        If rows no longer match their checksum, they become pending, and a CorruptStoreError is raised.
        """
        done, contents = StagedRows(self._files, self.chunk, mapped=True).pieces()
        if not done.all():
            self.done = done
            raise CorruptStoreError(
                f"Staged bytes of {self._files.describe(self.chunk)} changed after they were written. Check the disk, "
                "and put the rows again that pending() lists."
            )
        for column, parts in zip(self._files.columns, contents, strict=True):
            padding = np.full((column.shape[0] - len(done), *column.shape[1:]), column.fill, column.dtype)
            parts.append(padding.reshape(-1).view(np.uint8))
        return contents

    def discard_log(self) -> None:
        """Delete the row log and what an interrupted commit left, and release the lock."""
        for column in self._files.columns:
            remove_file(column.staged(self.chunk), missing_ok=True)
        remove_file(self._files.row_log(self.chunk))
        self.close()

    def close(self) -> None:
        """Release the lock; done rows stay done."""
        try:
            if self._open:
                self.stamp = self._stamp_of_log()
        finally:
            self._open.close()


_HELD: weakref.WeakSet[StagedChunk] = weakref.WeakSet()


def _busy_error(where: str, log_fd: int) -> BusyError:
    # The holder line in the log is unreliable: a new holder writes it late, and containers may share host and pid.
    if any(stage.holds(log_fd) for stage in list(_HELD)):
        return HeldHereError(
            f"{where}: this process already writes them through another open store or attributor. Close it, or wait "
            "until it is done."
        )
    return BusyError(
        f"{where}: another writer ({_holder(log_fd)}) holds them. "
        "Wait for it to finish, stop it, or give this process other rows."
    )


@contextlib.contextmanager
def logs_locked(stages: Iterable[str], *, where: str) -> Iterator[None]:
    """Hold the locks of all row logs in some folders, to drop a table whose metadata may be damaged.

    Raises:
        BusyError: If another writer holds one of the locks; names the writer and the table (``where``).
    """
    held = Descriptors()
    try:
        for path in (
            f"{stage}/{name}" for stage in stages for name in names_in(stage) if name.endswith(".rows")
        ):
            with contextlib.suppress(FileNotFoundError):  # the chunk has just been committed
                fd = held.open(path, os.O_RDWR)  # NFS grants exclusive locks only on files opened for writing
                if not _locks(fd):
                    raise BusyError(
                        f"{where}: another writer ({_holder(fd)}) holds rows of it, so it was not dropped. "
                        "Wait for it to finish, or stop it."
                    )
        yield
    finally:
        held.close()


def _locks(fd: int) -> bool:
    """Lock an open file unless another writer holds its lock; return whether it is locked now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(log_fd: int) -> str:
    return os.pread(log_fd, HOLDER_BYTES, 0).decode("ascii", "replace").strip() or "unnamed"
