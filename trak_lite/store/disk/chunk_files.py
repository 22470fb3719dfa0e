"""Paths of a table's files, the index of its committed chunks, and how a chunk is committed.

A chunk is committed when each of its column files has its final name and a log holds its commit record. A commit writes
and syncs the files, writes and syncs the record, and renames the files to their final names. If the process is killed
in between, the row log still has all rows, and the next writer of the chunk commits it again. The record is synced
before the first file gets its final name, so a reader that lists the folders before it reads the logs finds a record
for every listed file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError, StateError
from trak_lite.store._checksums import crc32c
from trak_lite.store._columns import StoredArray, TableSpec
from trak_lite.store._failpoints import failpoint
from trak_lite.store._values import short_list
from trak_lite.store.disk.documents import identity_of, own_attributes, parse_zarr_json, read_zarr_bytes
from trak_lite.store.disk.files import (
    Descriptors,
    file_size,
    list_folder,
    make_folder,
    named_errors,
    remove_file,
    rename,
    sync_files,
    sync_folder,
    sync_folders,
    write_all,
    zeros,
)
from trak_lite.store.disk.folders import names_in
from trak_lite.store.disk.records import CommitLog, CommitLogs, CommitRecord

# These are subfolders of the first column: zarr tools list the folder of a group and complain about unknown names,
# but they never list the folder of an array.
STAGE = ".stage"
COMMITS = ".commits"
SET_ASIDE = ".set-aside"

_STAGED_NAME = re.compile(r"(0|[1-9][0-9]{0,17})[-.].+")
_MATRIX_KEY = re.compile(r"c\.(0|[1-9][0-9]{0,17})\.0")
_VECTOR_KEY = re.compile(r"c\.(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class ColumnFiles:
    """Files of one stored array of a table: one per chunk, all of the same size; the last one is padded."""

    name: str
    folder: str
    stage: str
    shape: tuple[int, ...]
    """Shape of a chunk."""
    dtype: np.dtype[Any]
    row_bytes: int
    fill: float
    """Fill value of the padding."""

    @property
    def chunk_bytes(self) -> int:
        """Size of each file in bytes."""
        return self.shape[0] * self.row_bytes

    def visible(self, chunk: int) -> str:
        """Return the final path of a chunk; the file name is its zarr key."""
        return f"{self.folder}/c.{chunk}" + (".0" if len(self.shape) == 2 else "")

    def staged(self, chunk: int) -> str:
        """Return the path of a chunk while it is being published."""
        return f"{self.stage}/{chunk}-{self.name}"

    def list_visible(self) -> set[int]:
        """Return the chunks whose file has its final name."""
        with named_errors("Listing", self.folder):
            numbers = map(self.chunk_of, list_folder(self.folder))
            return {chunk for chunk in numbers if chunk is not None}

    def chunk_of(self, name: str) -> int | None:
        """Return the chunk with this final file name, or ``None`` if it is not the name of a chunk."""
        found = (_MATRIX_KEY if len(self.shape) == 2 else _VECTOR_KEY).fullmatch(name)
        return None if found is None else int(found[1])


@final
class TableFiles:
    """Paths of a table."""

    def __init__(
        self, folder: str, spec: TableSpec, *, root: str, identity: str, stage: str | None = None
    ) -> None:
        """Derive the paths; row logs are in ``stage``, on a local disk, or else in the folder of the first column."""
        self.folder = folder
        self.spec = spec
        self.root = root
        self.identity = identity
        self.where = os.path.join(root, folder)
        """Folder or address of the table, for messages; ``folder`` is absolute on a disk, and a key elsewhere."""
        self._record: tuple[bytes, dict[str, Any]] = (b"", {})
        first = f"{folder}/{spec.columns[0].name}"
        self.stage = stage or f"{first}/{STAGE}"
        self.commits = f"{first}/{COMMITS}"
        self.set_aside = f"{first}/{SET_ASIDE}"
        self.by_column = {c.name: tuple(map(self._column_files, c.arrays)) for c in spec.columns}
        self.columns = tuple(itertools.chain(*self.by_column.values()))
        self.num_chunks = -(-spec.num_rows // spec.chunk_rows)

    def _column_files(self, array: StoredArray) -> ColumnFiles:
        shape, folder = array.shape(self.spec.chunk_rows), f"{self.folder}/{array.name}"
        dtype = array.stored_dtype
        return ColumnFiles(array.name, folder, self.stage, shape, dtype, array.row_bytes, array.fill)

    def rows_in(self, chunk: int) -> int:
        """Return the number of rows of a chunk, according to the spec."""
        return min(self.spec.chunk_rows, self.spec.num_rows - chunk * self.spec.chunk_rows)

    def rows_on_disk(self, chunk: int) -> int:
        """Return the number of rows of a chunk in ``zarr.json``, which may have grown; 0 if there is no such chunk."""
        num_rows = self.record().get("num_rows")
        rows = num_rows if isinstance(num_rows, int) else self.spec.num_rows
        return max(min(self.spec.chunk_rows, rows - chunk * self.spec.chunk_rows), 0)

    def rows_of(self, chunk: int) -> range:
        """Return the rows of a chunk."""
        first = chunk * self.spec.chunk_rows
        return range(first, first + self.rows_in(chunk))

    def record(self) -> dict[str, Any]:
        """Return the record in the table's ``zarr.json`` now (empty: no file); CorruptStoreError if it is damaged."""
        text = read_zarr_bytes(self.folder) or b""
        if text != self._record[0]:
            own = (
                own_attributes(parse_zarr_json(text, f"{self.folder}/zarr.json"), self.folder) if text else {}
            )
            self._record = text, own
        return self._record[1]

    def row_log(self, chunk: int) -> str:
        """Return the path of the row log of an unfinished chunk, which is also its lock file."""
        return f"{self.stage}/{chunk}.rows"

    def staged_paths(self, chunk: int) -> list[str]:
        """Return the paths of the row log and the staged files of a chunk."""
        return [self.row_log(chunk), *(column.staged(chunk) for column in self.columns)]

    def describe(self, chunk: int) -> str:
        """Return a description of a chunk for error messages."""
        rows = self.rows_of(chunk)
        return f"rows {rows.start} to {rows.stop - 1} (chunk {chunk}) of {self.where}"

    def require_sizes(
        self,
        record: CommitRecord,
        sizes: Mapping[str, int | None],
        *,
        is_counted: bool,
        remedy: Callable[[int], str],
    ) -> None:
        """Raise CorruptStoreError unless a chunk has the sizes of its record and of the table, and its rows count."""
        expected = {column.name: column.chunk_bytes for column in self.columns}
        recorded = {name: size for name, (size, _) in record.columns.items()}
        if not (sizes == expected == recorded and is_counted):
            raise CorruptStoreError(
                f"The files of {self.describe(record.chunk)} have {sizes} bytes; expected {expected}, "
                f"recorded {recorded} for {record.rows} rows. {remedy(record.chunk)}"
            )

    def staged_chunks(self) -> set[int]:
        """Return the chunks that have staged files."""
        found = (_STAGED_NAME.fullmatch(name) for name in names_in(self.stage))
        return {int(match[1]) for match in found if match and int(match[1]) < self.num_chunks}

    def marks(self) -> NDArray[np.bool_]:
        """Return a mask of all rows, filled with ``False``; CorruptStoreError if memory does not suffice for it."""
        rows = self.spec.num_rows
        what = f"A list of the {rows} rows of {self.folder}"
        return zeros(rows, what=what, besides=8 * rows).view(np.bool_)

    def make_folders(self) -> None:
        """Create the stage and commit folders if they are missing; some tools do not copy empty folders.

        A table that was dropped meanwhile is a StoreError: parent folders are not created.
        """
        for folder in (self.stage, self.commits):
            with named_errors("Making", folder), contextlib.suppress(FileExistsError):
                make_folder(folder)
                sync_folder(os.path.dirname(folder))


@final
class ChunkIndex:
    """Index of the committed chunks of a table on a disk, as of the last refresh."""

    keeps_rows = False

    def __init__(self, files: TableFiles) -> None:
        self._files = files
        self._logs = CommitLogs(files.commits, files.identity)
        self.committed: dict[int, CommitRecord] = {}
        self._log = CommitLog(files.commits)

    def refresh(self) -> None:
        """Update the index from the folders and logs.

        Raises:
            CorruptStoreError: If a chunk file has no commit record or differs from it in size.
            StateError: If the table was dropped and created again with other settings.
        """
        visible = [column.list_visible() for column in self._files.columns]
        self._logs.poll()
        self._refuse_remade()
        for chunks in visible:
            if chunks and max(chunks) >= self._files.num_chunks and self._files.rows_on_disk(max(chunks)):
                # The table has grown since it was opened here.
                chunks.intersection_update(range(self._files.num_chunks))
        everywhere = set.intersection(*visible)
        self._refuse_strangers(set.union(*visible))
        known = self.committed
        self.committed = {
            chunk: self._logs.latest[chunk]
            for chunk in everywhere
            if chunk in known or self._is_whole(chunk, self._logs.latest[chunk])
        }
        self._close_finished_log()

    def look_at(self, chunk: int) -> CommitRecord | None:
        """Read one chunk's state: return its commit record, or ``None`` if it is not committed now."""
        visible = [file_size(column.visible(chunk)) is not None for column in self._files.columns]
        self._logs.poll()
        self._refuse_remade()
        if any(visible):
            self._refuse_strangers({chunk})
        self.committed.pop(chunk, None)
        if all(visible) and (record := self._logs.latest[chunk]).rows >= self._files.rows_in(chunk):
            self.committed[chunk] = record
        return self.committed.get(chunk)

    def publish(self, chunk: int, contents: Sequence[Sequence[NDArray[np.uint8]]]) -> None:
        """Commit a complete chunk, whose lock is held. After an interruption, repeat the call.

        ``contents`` are the bytes of each stored array, in pieces, including padding.
        """
        columns = self._files.columns
        left = [column for column in columns if file_size(column.visible(chunk)) is not None]
        for column in left:  # of an interrupted commit, or of one with fewer rows before the table has grown
            remove_file(column.visible(chunk))
            failpoint("column_removed")
        sync_folders(column.folder for column in left)
        held = Descriptors()
        try:
            for column, pieces in zip(columns, contents, strict=True):
                _remove_if_there(column.staged(chunk))  # left by an interrupted commit
                fd, size = held.open(column.staged(chunk), os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0
                for piece in pieces:
                    write_all(fd, piece, size)
                    size += len(piece)
            sync_files(held.fds)
        except OSError:
            for column in columns:
                _remove_if_there(column.staged(chunk))  # frees the full disk
            raise
        finally:
            held.close()
        failpoint("columns_synced")
        latest = self._logs.latest.get(chunk)
        sums = {
            column.name: (column.chunk_bytes, crc32c(*pieces))
            for column, pieces in zip(columns, contents, strict=True)
        }
        generation = 1 if latest is None else latest.generation + 1
        record = CommitRecord(chunk, generation, self._files.rows_in(chunk), sums, self._files.identity)
        self._log.append(record)
        failpoint("commit_synced")
        for column in columns:
            rename(column.staged(chunk), column.visible(chunk))
            failpoint("column_published")
        self.sync()
        failpoint("chunk_published")
        self.committed[chunk] = record
        self._close_finished_log()

    def refuse_grown(self, chunk: int) -> None:
        """Raise if the locked chunk has grown since the table was opened: padding would overwrite the new rows."""
        rows = self._files.rows_in(chunk)
        if rows < self._files.spec.chunk_rows and self._files.rows_on_disk(chunk) > rows:
            raise StateError(f"{self._files.where} has grown since it was opened. Open it again to put rows.")

    def sync(self) -> None:
        """Sync the names of the files of all chunks."""
        sync_folders([*(column.folder for column in self._files.columns), self._files.stage])

    def close(self) -> None:
        """Close the commit log; the next commit starts a new one."""
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
                f"{self._files.folder} holds files of the chunks {short_list(outside)}, but its "
                f"{self._files.spec.num_rows} rows make {self._files.num_chunks} chunks. Remove those files."
            )
        unrecorded = sorted(chunk for chunk in chunks if chunk not in self._logs.latest)
        if unrecorded:
            raise CorruptStoreError(
                f"{self._files.folder} holds files of the chunks {short_list(unrecorded)} without a commit record: "
                f"they were not written for this table, or a log in {self._files.commits} is damaged. "
                f"{self.remedy(unrecorded[0])}"
            )

    def _is_whole(self, chunk: int, record: CommitRecord) -> bool:
        sizes = {column.name: file_size(column.visible(chunk)) for column in self._files.columns}
        if None in sizes.values():
            return False  # removed after it was listed
        rows, done = self._files.rows_in(chunk), record.rows
        is_counted = 0 < done <= rows or rows < done <= self._files.rows_on_disk(chunk)
        self._files.require_sizes(record, sizes, is_counted=is_counted, remedy=self.remedy)
        return done >= rows

    def remedy(self, chunk: int) -> str:
        """Return instructions for repairing a damaged chunk."""
        paths = ", ".join(column.visible(chunk) for column in self._files.columns)
        return (
            f"Remove {paths}: the rows become pending, and running again computes them. The command 'trak-lite check "
            f"{shlex.quote(self._files.root)} --repair' does it without deleting."
        )


def _remove_if_there(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove_file(path)
