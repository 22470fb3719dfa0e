"""Commit records of committed chunks, and the line that names the writer of a chunk.

A commit record is one line: JSON that includes the table's identity, a tab, and the CRC-32C of the JSON in hex. Each
writer appends to its own commit log.

Records with a wrong checksum or of another table are ignored. Torn writes, flipped bits and exchanged files can
therefore make rows pending, but never yield wrong rows.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, final

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    Descriptors,
    file_size,
    is_named,
    named_errors,
    open_file,
    sync_folder,
    write_all,
)
from trak_lite.core.folders import names_in
from trak_lite.core.garbage import no_collection
from trak_lite.errors import StoreError

HOLDER_BYTES = 64
_HIGHEST_PID = (1 << 31) - 1
_LONGEST_LINE = 1 << 20  # a commit record has about 100 bytes plus 100 per column


def holder_lives(path: str) -> bool:
    """Return whether the process named in a row log is running on this machine; ``False`` if there is no log."""
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            line = file.read(HOLDER_BYTES)
    except FileNotFoundError:
        return False
    match = re.fullmatch(rb"pid ([0-9]{1,10}) on .*", line.strip())
    if match is None or not 0 < (pid := int(match[1])) <= _HIGHEST_PID or line != holder_line(pid):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is running, as another user
    return True


def holder_line(pid: int | None = None) -> bytes:
    """Return the line that names a process of this machine (``None``: this one) in a row log, for messages."""
    line = f"pid {os.getpid() if pid is None else pid} on {socket.gethostname()}".encode("ascii", "replace")
    return line[: HOLDER_BYTES - 1].ljust(HOLDER_BYTES - 1) + b"\n"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """Record of a committed chunk: size and checksum of each of its files."""

    chunk: int
    generation: int
    """Number of commits of this chunk so far; the highest is valid. It grows if a deleted chunk is committed again."""
    rows: int
    columns: Mapping[str, tuple[int, int]]
    """Size in bytes and CRC-32C of each file, by array name."""
    table: str
    """Identity of the table."""
    writer: str | None = None
    """Process that committed the chunk (remote stores only); used in messages, never compared."""

    def problem(self, name: str, actual: int, expected: int, checksum: Callable[[], int]) -> str | None:
        """Return how the bytes of an array contradict the record, or ``None``.

        Their number is ``actual``, ``expected`` by the shape of the table; the CRC-32C is computed only if it is right.
        """
        size, recorded = self.columns.get(name, (None, None))
        if not actual == size == expected:
            return f"{actual} bytes, expected {expected}, the commit record says {size}"
        crc = checksum()
        return None if crc == recorded else f"checksum {crc:08x}, the commit record says {recorded or 0:08x}"

    def encode(self) -> bytes:
        """Return the record as a line of a commit log."""
        body = json.dumps(
            {
                "table": self.table,
                "chunk": self.chunk,
                "generation": self.generation,
                "rows": self.rows,
                "columns": {name: list(pair) for name, pair in self.columns.items()},
                **({} if self.writer is None else {"writer": self.writer}),
            },
            separators=(",", ":"),
        ).encode()
        return body + b"\t%08x\n" % crc32c(body)

    @classmethod
    def decode(cls, line: bytes) -> CommitRecord | None:
        """Return the record of a line, or ``None`` if the line is invalid."""
        body, _, checksum = line.rpartition(b"\t")
        if not body or len(body) > _LONGEST_LINE or checksum != b"%08x" % crc32c(body):
            return None
        try:
            fields = json.loads(body.decode())  # str, so that json.loads need not detect the encoding
            columns = {name: (_count(size), _count(crc)) for name, (size, crc) in fields["columns"].items()}
            writer = None if fields.get("writer") is None else str(fields["writer"])
            chunk, generation, rows = (_count(fields[key]) for key in ("chunk", "generation", "rows"))
            table = fields["table"]
            return cls(chunk, generation, rows, columns, table, writer) if isinstance(table, str) else None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None  # valid checksum, but not a commit record


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"Expected a count, got {value!r}.")


@final
class CommitLogs:
    """Incremental reader of the commit logs of all writers of a table; counts and ignores records of other tables."""

    def __init__(self, folder: str, table: str) -> None:
        self._folder = folder
        self._table = table
        self._read_to: dict[str, int] = {}
        self.latest: dict[int, CommitRecord] = {}
        self.damaged: dict[str, int] = {}
        """Number of invalid lines of each log, by file name."""
        self.foreign: dict[str, int] = {}
        """Number of records of other tables in each log, by file name."""

    def poll(self) -> None:
        """Read what was appended since the last poll."""
        # The garbage collector would take half of the time to read many records.
        with named_errors("Reading the commit logs in", self._folder), no_collection():
            for name in self._names():
                self._read_on(name)

    def poll_each(self) -> dict[str, StoreError]:
        """Read what was appended since the last poll; return the errors of unreadable logs, by file name."""
        failures: dict[str, StoreError] = {}
        for name in self._names():
            try:
                with named_errors("Reading", os.path.join(self._folder, name)):
                    self._read_on(name)
            except StoreError as error:
                failures[name] = error
        return failures

    def _names(self) -> list[str]:
        return [name for name in names_in(self._folder) if name.endswith(".log")]

    def _read_on(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        if file_size(path) in (None, self._read_to.get(name, 0)):
            return
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            while self._read_lines(name, file):
                pass

    def _read_lines(self, name: str, file: BinaryIO) -> bool:
        """Read the next complete lines of a log; return whether there may be more."""
        offset = self._read_to.get(name, 0)
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        text = file.read(max(min(size - offset, _LONGEST_LINE), 0))
        whole = text.rfind(b"\n") + 1  # an incomplete last line is read again by the next poll
        for line in text[:whole].splitlines():
            record = CommitRecord.decode(line)
            if record is None:
                self.damaged[name] = self.damaged.get(name, 0) + 1
            elif record.table != self._table:
                self.foreign[name] = self.foreign.get(name, 0) + 1
            elif (latest := self.latest.get(record.chunk)) is None or latest.generation < record.generation:
                self.latest[record.chunk] = record
        self._read_to[name] = offset + whole
        if len(text) == _LONGEST_LINE and not whole:  # too long for a record: ignore the rest of the log
            self.damaged[name] = self.damaged.get(name, 0) + 1
            self._read_to[name] = size
        return whole > 0


@final
class CommitLog:
    """Commit log of this writer; the file is created by the first commit."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files = Descriptors()
        self._fd: int | None = None
        self._path = ""
        self._size = 0

    def append(self, record: CommitRecord) -> None:
        """Append a record and sync it to the disk."""
        if self._fd is not None and not is_named(self._path, self._fd):
            self.close()  # set aside by a repair, or table dropped: nobody reads this file
        if self._fd is None:
            self._path = os.path.join(self._folder, f"{uuid.uuid4().hex}.log")
            self._fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            sync_folder(self._folder)
        line = record.encode()
        try:
            write_all(self._fd, line, self._size)
            self._size += len(line)
            failpoint("commit_written")
            os.fsync(self._fd)
        except BaseException:
            self.close()  # readers may have seen the line, so the next record starts a new log
            raise

    def close(self) -> None:
        """Close the log; the next record starts a new one."""
        self._files.close()
        self._fd, self._size = None, 0
