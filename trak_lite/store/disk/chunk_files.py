"""Paths of the files of a table on a disk: of its stored arrays, chunk by chunk, and of what stands beside them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from trak_lite.core.files import (
    list_folder,
    make_folder,
    named_errors,
    sync_folder,
)
from trak_lite.core.folders import names_in
from trak_lite.errors import MissingStoreError
from trak_lite.store._columns import StoredArray, TableSpec
from trak_lite.store.disk.documents import read_record
from trak_lite.store.disk.entries import HiddenFiles

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
            try:
                numbers = map(self.chunk_of, list_folder(self.folder))
            except FileNotFoundError as error:
                raise MissingStoreError(
                    f"{os.path.dirname(self.folder)} was dropped after it was opened (drop_checkpoint, drop_scores, or "
                    "by hand). Score again, or open scores of what is left: attributor.scores(...)."
                ) from error
            return {chunk for chunk in numbers if chunk is not None}

    def chunk_of(self, name: str) -> int | None:
        """Return the chunk with this final file name, or ``None`` if it is not the name of a chunk."""
        match = (_MATRIX_KEY if len(self.shape) == 2 else _VECTOR_KEY).fullmatch(name)
        return None if match is None else int(match[1])


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
        return read_record(HiddenFiles(self.folder).get, "", where=self.folder) or {}

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

    def staged_chunks(self) -> set[int]:
        """Return the chunks that have staged files."""
        matches = (_STAGED_NAME.fullmatch(name) for name in names_in(self.stage))
        return {int(match[1]) for match in matches if match and int(match[1]) < self.num_chunks}

    def make_folders(self) -> None:
        """Create the stage and commit folders if they are missing; some tools do not copy empty folders.

        A table that was dropped meanwhile is a StoreError: parent folders are not created.
        """
        for folder in (self.stage, self.commits):
            with named_errors("Making", folder), contextlib.suppress(FileExistsError):
                make_folder(folder)
                sync_folder(os.path.dirname(folder))
