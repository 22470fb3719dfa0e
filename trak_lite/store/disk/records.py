"""Records of what is done: rows of a staged chunk, and committed chunks.

Row record: 24 bytes, little-endian: chunk (8), first row in the chunk (4), rows (4), CRC-32C of the rows' bytes over
all columns (4), CRC-32C of the record (4), which starts with that of the table's identity. They follow a 64-byte line
that names the process holding the chunk.
Commit record: one line of JSON with the table's identity, a tab, its CRC-32C in hex; one log per writer, only ever
appended to.
A record that does not match its own checksum does not exist, nor does one of another table: torn tails, flipped bits
and exchanged files cost rows, never wrong ones.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, final

from trak_lite.errors import StoreError
from trak_lite.store._checksums import crc32c
from trak_lite.store._failpoints import failpoint
from trak_lite.store.disk.files import (
    Descriptors,
    file_size,
    is_named,
    named_errors,
    open_file,
    sync_folder,
    write_all,
)
from trak_lite.store.disk.folders import names_in

__all__ = [
    "HOLDER_BYTES",
    "RECORD_BYTES",
    "CommitLog",
    "CommitLogs",
    "CommitRecord",
    "RowRecord",
    "damaged_records",
    "decode_rows",
    "encode_row",
    "holder_line",
    "holder_lives",
    "read_holder",
]

_ROW = struct.Struct("<QIII")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _ROW.size + _CHECK.size
HOLDER_BYTES = 64
_HIGHEST_PID = (1 << 31) - 1
_LONGEST_LINE = 1 << 20  # a commit record has a hundred bytes and a hundred more for each column


@dataclass(frozen=True, slots=True)
class RowRecord:
    """Rows of a staged chunk whose bytes have been written."""

    chunk: int
    start: int
    count: int
    checksum: int


def encode_row(chunk: int, start: int, count: int, checksum: int, *, seed: int) -> bytes:
    """Return a row record as bytes; ``seed`` is the checksum of the table's identity."""
    body = _ROW.pack(chunk, start, count, checksum)
    return body + _CHECK.pack(crc32c(body, start=seed))


def decode_rows(log: bytes, *, seed: int) -> Iterator[RowRecord]:
    """Yield the valid records of a row log.

    Example:
        >>> torn = bytes(64) + encode_row(0, 0, 2, 7, seed=1) + encode_row(0, 2, 2, 9, seed=1)[:-1]
        >>> list(decode_rows(torn, seed=1)), list(decode_rows(torn, seed=2))
        ([RowRecord(chunk=0, start=0, count=2, checksum=7)], [])
    """
    for offset in range(HOLDER_BYTES, len(log) - RECORD_BYTES + 1, RECORD_BYTES):
        body = log[offset : offset + _ROW.size]
        if _CHECK.unpack_from(log, offset + _ROW.size)[0] == crc32c(body, start=seed):
            yield RowRecord(*_ROW.unpack(body))


def damaged_records(log: bytes, *, seed: int) -> int:
    """Return how many records of a row log do not match their own checksum; a torn tail is no record.

    Zeros are none either: a power cut may leave them where a record was not written yet.

    Example:
        >>> damaged_records(bytes(64) + encode_row(0, 0, 2, 7, seed=1) + bytes(24) + b"x" * 24 + b"torn", seed=1)
        1
    """
    whole = max(len(log) - HOLDER_BYTES, 0) // RECORD_BYTES
    slots = (log[HOLDER_BYTES + i * RECORD_BYTES :][:RECORD_BYTES] for i in range(whole))
    written = sum(any(slot) for slot in slots)
    return written - sum(1 for _ in decode_rows(log, seed=seed))


def read_holder(path: str) -> bytes:
    """Return the line of a row log that names the process holding the chunk, nothing where there is no log."""
    try:
        fd = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read(HOLDER_BYTES)


def holder_lives(log: bytes) -> bool:
    """Return whether the process that a row log names runs on this machine; it may be writing at this moment."""
    found = re.fullmatch(rb"pid ([0-9]{1,10}) on .*", log[:HOLDER_BYTES].strip())
    if found is None or not 0 < (pid := int(found[1])) <= _HIGHEST_PID:
        return False
    if log[:HOLDER_BYTES] != holder_line(pid):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it runs, and belongs to somebody else
    return True


def holder_line(pid: int | None = None) -> bytes:
    """Return the line that names a process in a row log: for people, and for the message of a busy chunk.

    Args:
        pid: Of the process, on this machine; ``None`` is this one.
    """
    line = f"pid {os.getpid() if pid is None else pid} on {socket.gethostname()}".encode("ascii", "replace")
    return line[: HOLDER_BYTES - 1].ljust(HOLDER_BYTES - 1) + b"\n"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One complete chunk: what every column file must be."""

    chunk: int
    generation: int
    """Counts the commits of this chunk; the highest is the law (a chunk that was deleted is committed again)."""
    rows: int
    columns: Mapping[str, tuple[int, int]]
    """Bytes and CRC-32C of each column file."""
    table: str
    """Identity of the table that the rows were put into."""
    writer: str | None = None
    """Who committed it, where no lock says so: for people, never compared with anything."""

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
        """Return the record of a line, ``None`` if the line does not match its checksum."""
        body, _, checksum = line.rpartition(b"\t")
        if not body or len(body) > _LONGEST_LINE or checksum != b"%08x" % crc32c(body):
            return None
        try:
            found = json.loads(body.decode())  # of bytes it would look for their encoding, line by line
            columns = {name: (_count(size), _count(crc)) for name, (size, crc) in found["columns"].items()}
            writer = None if found.get("writer") is None else str(found["writer"])
            chunk, generation, rows = (_count(found[key]) for key in ("chunk", "generation", "rows"))
            table = found["table"]
            return cls(chunk, generation, rows, columns, table, writer) if isinstance(table, str) else None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None  # somebody else's line under a right checksum: no record of ours


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"Expected a count, got {value!r}.")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector rest: it would look at all records again and again, and take half of the time."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()


@final
class CommitLogs:
    """The commit logs of all writers of a table, read as they grow."""

    def __init__(self, folder: str, table: str) -> None:
        """Read nothing yet.

        Args:
            folder: Of the logs.
            table: Identity of the table; records of others are counted, and passed over.
        """
        self._folder = folder
        self._table = table
        self._read_to: dict[str, int] = {}
        self.latest: dict[int, CommitRecord] = {}
        self.damaged: dict[str, int] = {}
        """How many lines of each log, by name, do not match their checksum."""
        self.foreign: dict[str, int] = {}
        """How many lines of each log are records of another table."""

    def poll(self) -> None:
        """Read what has been appended since the last time."""
        with named_errors("Reading the commit logs in", self._folder), _no_collection():
            for name in self._names():
                self._read_on(name)

    def poll_each(self) -> dict[str, StoreError]:
        """Read what has been appended; return what is wrong with the logs that cannot be read, by name."""
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
        """Read the next whole lines of a log; return whether there may be more of them."""
        offset = self._read_to.get(name, 0)
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        text = file.read(max(min(size - offset, _LONGEST_LINE), 0))
        whole = text.rfind(b"\n") + 1  # a line still being written, or torn, is looked at again next time
        for line in text[:whole].splitlines():
            record = CommitRecord.decode(line)
            if record is None:
                self.damaged[name] = self.damaged.get(name, 0) + 1
            elif record.table != self._table:
                self.foreign[name] = self.foreign.get(name, 0) + 1
            else:
                self._add(record)
        self._read_to[name] = offset + whole
        if len(text) == _LONGEST_LINE and not whole:  # this is no line of ours, and nothing behind it is read
            self.damaged[name] = self.damaged.get(name, 0) + 1
            self._read_to[name] = size
        return whole > 0

    def _add(self, record: CommitRecord) -> None:
        known = self.latest.get(record.chunk)
        if known is None or known.generation < record.generation:
            self.latest[record.chunk] = record


@final
class CommitLog:
    """The commit log of this writer, made when the first chunk is committed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files = Descriptors()
        self._fd: int | None = None
        self._path = ""
        self._size = 0

    def append(self, record: CommitRecord) -> None:
        """Write a record and bring it to the disk."""
        if self._fd is not None and not is_named(self._path, self._fd):
            self.close()  # a repair has set it aside, or the table was dropped: nobody would read what is added
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
            self.close()  # readers may have seen the line, whole or torn: the next record starts another log
            raise

    def close(self) -> None:
        """Close the log; the next record starts another one."""
        self._files.close()
        self._fd, self._size = None, 0
