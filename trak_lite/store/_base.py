"""The contract of a feature store: tables of rows that are either done, and right, or pending."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import InvalidInputError, printable
from trak_lite.store._columns import Column, StoredArray, StoredRows
from trak_lite.store.manifest import Manifest

__all__ = ["NEEDED_UNTIL", "AbstractFeatureStore", "AbstractRowTable", "Difference", "TableSpec"]

NEEDED_UNTIL = "needed_until"
"""Attribute of a table whose rows others are made of: the path of that one, after whose end it is a leftover."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Shape of a table; all columns share one row grid and one record of what is done."""

    num_rows: int
    columns: tuple[Column, ...]
    chunk_rows: int
    """Rows of a chunk, the unit of committing, locking and mapping."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that determine the rows; compared key by key when the table is opened again."""

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The arrays on disk, column by column."""
        return tuple(array for column in self.columns for array in column.arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk, over all columns."""
        return sum(column.row_bytes for column in self.columns)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two stores differ.

    Example:
        >>> print(Difference("ckpt-0", "rows 4 to 7", "done", "pending"))
        ckpt-0: rows 4 to 7: done here, pending there
    """

    table: str | None
    """Path of the table; ``None`` for the manifest."""
    what: str
    here: Any
    there: Any

    def __str__(self) -> str:
        """Return the difference as a line of text."""
        return printable(f"{self.table or 'manifest'}: {self.what}: {self.here} here, {self.there} there")


class AbstractRowTable(ABC):
    """Rows of one table. A row is done or pending; a done row keeps its bytes, also when the process is killed.

    Laws, held by ``trak_lite.testing.StoreTests``: what was put is what is read, bitwise (quantised columns: within
    half the row's scale, the same bits in every store); when ``put`` returns, killing the process cannot lose the rows;
    pending rows are never readable; a refused ``put`` changes nothing; every table opened from the same path sees the
    same done rows.
    """

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """Shape, columns and fingerprint of the table."""

    @abstractmethod
    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Write rows durably enough that killing the process cannot lose them.

        Args:
            rows: First row of a contiguous run, or the row of each value (distinct, any order).
            values: For each column an array ``(b, width)`` or ``(b,)`` of a real floating dtype; it is cast to the
                column's dtype, and then quantised if the column is.

        Raises:
            InvalidInputError: For wrong columns, shapes or dtypes, rows out of range or repeated.
            NonFiniteError: If a value is NaN or infinite, before or after the cast; names the rows.
            StateError: If a row is done already.
            ReadOnlyStoreError: If the store was opened for reading.
            StoreFullError: If the disk is full; the rows stay pending.
            BusyError: If another process writes the chunk.
        """

    @abstractmethod
    def claim(self, chunk: int) -> AbstractContextManager[NDArray[np.int64]]:
        """Hold a chunk: as long as the block runs, nobody else puts rows into it.

        So writers share a table without knowing of each other: whoever finds a chunk held takes another one. What a
        dead writer left of a chunk is taken over. Rows are put as ever, into other chunks too.

        Args:
            chunk: Of the row grid.

        Returns:
            A context that gives the rows of the chunk that are pending, ascending ``(b,)``; none where it is committed.

        Raises:
            InvalidInputError: If there is no such chunk.
            BusyError: If another writer holds it; names its host and process.
            ReadOnlyStoreError: If the store was opened for reading.
            StoreFullError: If the disk has no room for the chunk.
        """

    @abstractmethod
    def done(self) -> NDArray[np.bool_]:
        """Return which rows are done, ``(num_rows,)``; includes rows staged by earlier, dead writers."""

    def pending(self) -> NDArray[np.int64]:
        """Return the rows that are not done, ascending."""
        return np.flatnonzero(~self.done())

    def pending_by_chunk(self) -> NDArray[np.int64]:
        """Return how many rows of every chunk are not done, ``(num_chunks,)``."""
        starts = np.arange(0, self.spec.num_rows, self.spec.chunk_rows)
        done = np.add.reduceat(self.done(), starts, dtype=np.int64)
        return np.diff(starts, append=self.spec.num_rows) - done

    @property
    def complete(self) -> bool:
        """Whether every row is committed and therefore readable."""
        return len(self.committed_chunks()) == self.num_chunks

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the row grid."""
        return -(-self.spec.num_rows // self.spec.chunk_rows)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk and the row after its last.

        Raises:
            InvalidInputError: If there is no such chunk.
        """
        if not 0 <= chunk < self.num_chunks:
            raise InvalidInputError(
                f"There is no chunk {chunk}: the table has {self.num_chunks} chunks, counted from 0."
            )
        start = chunk * self.spec.chunk_rows
        return start, min(start + self.spec.chunk_rows, self.spec.num_rows)

    def column(self, name: str) -> Column:
        """Return a column by name.

        Raises:
            InvalidInputError: If there is no such column; names the ones there are.
        """
        for column in self.spec.columns:
            if column.name == name:
                return column
        raise InvalidInputError(
            f"There is no column {name!r}. Expected one of {[column.name for column in self.spec.columns]}."
        )

    @abstractmethod
    def committed_chunks(self) -> list[int]:
        """Return the chunks that are complete and readable, ascending."""

    @abstractmethod
    def stored_chunk(self, chunk: int, column: str) -> StoredRows:
        """Return the rows of a committed chunk in the form in which they are stored, mapped where possible.

        The arrays must not be written to, and belong to one and the same commit.

        Raises:
            IncompleteStoreError: If the chunk is not committed; names its rows.
            CorruptStoreError: If its size or checksum contradicts its commit record.
        """

    def read_chunk(self, chunk: int, column: str) -> NDArray[Any]:
        """Return the rows of a committed chunk, ``(rows, width)`` or ``(rows,)``, mapped where possible.

        The array must not be written to; copy it to keep it beyond the table's life. Of a quantised column it is a
        new float32 array, four or eight times as large as the chunk: :meth:`blocks` needs a few MiB.

        Raises:
            IncompleteStoreError: If the chunk is not committed; names its rows.
            CorruptStoreError: If its size or checksum contradicts its commit record.
        """
        rows = self.stored_chunk(chunk, column).decode()
        rows.flags.writeable = False
        return rows

    def blocks(
        self, column: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield ``(first row, rows)`` pieces of the committed rows ``start:stop``, in order: the way to read a table.

        Pieces end where chunks end. Of a quantised column they have at most 256 rows, in a buffer that the next piece
        overwrites. They must not be written to.

        Raises:
            InvalidInputError: If ``start:stop`` reaches over an end of the table.
            IncompleteStoreError: If a row is in a chunk that is not committed.
        """
        size, stop = self.spec.chunk_rows, self.spec.num_rows if stop is None else stop
        if not 0 <= start <= stop <= self.spec.num_rows:
            raise InvalidInputError(
                f"Rows {start} to {stop - 1} were asked for, the table has rows 0 to {self.spec.num_rows - 1}."
            )
        for chunk in range(start // size, -(-stop // size)):
            first, last = max(start - chunk * size, 0), min(stop - chunk * size, size)
            for offset, rows in self.stored_chunk(chunk, column)[first:last].blocks():
                yield chunk * size + first + offset, rows

    def read(self, column: str) -> NDArray[Any]:
        """Return a whole column as one new array.

        Raises:
            IncompleteStoreError: If a row is pending; names the first.
        """
        committed = set(self.committed_chunks())
        missing = next((chunk for chunk in range(self.num_chunks) if chunk not in committed), None)
        # reading raises at the first chunk that cannot be read; nothing is allocated for rows that are not there
        for chunk in range(0 if missing is None else missing + 1):
            self.read_chunk(chunk, column)
        out = self._empty(column, self.spec.num_rows)
        for start, rows in self.blocks(column):
            out[start : start + len(rows)] = rows
        return out

    def read_rows(self, column: str, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[Any]:
        """Return some rows of a column as a new array, in the order asked for.

        Raises:
            InvalidInputError: If a row is out of range, or ``rows`` are not integers.
            IncompleteStoreError: If a row is in a chunk that is not committed.
        """
        wanted = np.asarray(rows)
        if wanted.size == 0:
            return self._empty(column, 0)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise InvalidInputError(
                f"rows must be a list of integers, got {wanted.dtype} of shape {wanted.shape}."
            )
        if wanted.min() < 0 or wanted.max() >= self.spec.num_rows:
            raise InvalidInputError(
                f"Rows {wanted.min()} to {wanted.max()} were asked for, "
                f"the table has rows 0 to {self.spec.num_rows - 1}."
            )
        out = self._empty(column, len(wanted))
        chunk_of, row_in = np.divmod(wanted.astype(np.int64), self.spec.chunk_rows)
        for chunk in np.unique(chunk_of).tolist():
            here = chunk_of == chunk
            out[here] = self.stored_chunk(chunk, column)[row_in[here]].decode()
        return out

    def _empty(self, column: str, num_rows: int) -> NDArray[Any]:
        found = self.column(column)
        return np.empty((num_rows,) if found.width is None else (num_rows, found.width), found.value_dtype)

    def chunks(self, column: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield ``(first row, rows)`` of every chunk in order."""
        for chunk in range(self.num_chunks):
            yield self.chunk_range(chunk)[0], self.read_chunk(chunk, column)

    @abstractmethod
    def checksums(self, chunk: int) -> dict[str, int]:
        """Return the CRC-32C of each array of a committed chunk, whole and padded with its fill; reads no row.

        Raises:
            IncompleteStoreError: If the chunk is not committed.
        """

    @abstractmethod
    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the rows of a chunk that are done, and their values, as new arrays: for copying unfinished tables.

        Unlike :meth:`read_chunk` it gives rows of a chunk that is not committed, each of them proven by its record.

        Returns:
            The rows, ascending, ``(b,)``, and for each column ``(b, width)`` or ``(b,)``; ``b`` may be 0.
        """

    @abstractmethod
    def content_key(self) -> str:
        """Return a digest of the committed contents, for keys of derived results.

        Raises:
            IncompleteStoreError: If a row is pending.
        """


class AbstractFeatureStore(ABC):
    """A named tree of tables under one manifest.

    Table paths are ``/``-separated names of ``[A-Za-z0-9._-]{1,64}``, at most 200 characters in all: ``ckpt-0``,
    ``targets/test/ckpt-0``, ``scores/test``.
    """

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The settings that the store was made with."""

    @property
    @abstractmethod
    def path(self) -> str | None:
        """Where the store lives; ``None`` in memory."""

    @property
    @abstractmethod
    def writable(self) -> bool:
        """Whether tables can be created and rows put."""

    @abstractmethod
    def create_table(
        self, path: str, spec: TableSpec, attributes: Mapping[str, Any] | None = None
    ) -> AbstractRowTable:
        """Open a table for writing, and create it first where it does not exist.

        Args:
            path: Name of the table in the tree.
            spec: Shape and fingerprint.
            attributes: JSON values recorded at creation and not compared (where a checkpoint came from).

        Raises:
            ManifestMismatchError: If the table exists with another shape or fingerprint; names every differing key.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def open_table(self, path: str) -> AbstractRowTable:
        """Open an existing table, for writing if the store is writable.

        Raises:
            MissingStoreError: If there is no such table; names the ones there are.
        """

    @abstractmethod
    def drop_table(self, path: str) -> None:
        """Remove a table and all its rows, for good; handles on it put no more rows.

        It is gone as a whole or there as a whole, whenever the process is killed.

        Raises:
            MissingStoreError: If there is no such table; names the ones there are.
            BusyError: If another writer holds rows of it.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Give a table more rows; the new ones are pending, and those that are done stay done.

        The last chunk, where it was not full, can be read again once its new rows are done. Handles from before put
        no more rows. Grown as a whole or not at all, whenever the process is killed; repeating it finishes it.

        Args:
            path: Name of the table in the tree.
            num_rows: How many rows it has then, new ones at the end.

        Returns:
            The table.

        Raises:
            InvalidInputError: If it has more rows already.
            MissingStoreError: If there is no such table.
            BusyError: If another writer fills its last chunk.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Give the manifest another fingerprint, for what may change and leaves every row as it is: appended data.

        Replaced as a whole or not at all, whenever the process is killed. Of several processes that do it at once one
        succeeds; the others may find what they wanted to give.

        Args:
            known: The fingerprint that the caller knows and has judged; nothing happens where it is another one by now.
            given: What to put in its place.

        Raises:
            ManifestMismatchError: If the store has neither of the two; names every differing key.
            InvalidInputError: If it has no JSON form.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def diff(self, other: AbstractFeatureStore) -> tuple[Difference, ...]:
        """Return what differs between this store and another one, nothing where they hold the same.

        Manifests and tables are compared key by key, rows by whether they are done, contents by their checksums (by
        their bytes where a chunk is not committed). Attributes are not compared.
        """

    @abstractmethod
    def merge(self, parts: Iterable[AbstractFeatureStore]) -> dict[str, int]:
        """Put the rows that this store misses and others have: of workers that had no shared disk.

        Tables that are missing here are created. Each part is compared before a row of it is put; a merge that was
        interrupted is repeated as a whole, and takes what is still missing.

        Args:
            parts: Stores with the same manifest, whose tables have the same shape and fingerprint; finished or not.

        Returns:
            The number of rows taken, for each table of the parts.

        Raises:
            ManifestMismatchError: If manifest, shape or fingerprint differ; names every differing key.
            InvalidInputError: If a row that both have differs in one byte; names the rows. Nothing is taken from
                that part.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def attributes(self, path: str) -> dict[str, Any]:
        """Return what was recorded beside a table when it was created."""

    @abstractmethod
    def table_names(self, prefix: str = "") -> list[str]:
        """Return the paths of all tables below ``prefix``, in natural order (``ckpt-2`` before ``ckpt-10``)."""

    @abstractmethod
    def cached(self, name: str, key: str) -> NDArray[Any] | None:
        """Return a derived array that was kept under this name and key, or ``None``."""

    @abstractmethod
    def cache(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Keep a derived array; a later one under the same name replaces it. Does nothing in a read-only store."""

    @abstractmethod
    def entry(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the entry that was put under this name and key, or ``None``.

        Raises:
            CorruptStoreError: If it is damaged.
        """

    @abstractmethod
    def put_entry(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Put an array that cannot be computed again: a verdict, a record of a run, a fit.

        It is kept where the rows are, in an object store too. A later one under the same name replaces it.

        Raises:
            InvalidInputError: For a bad name, a key that is too long, or an array that is not of numbers.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def entry_names(self, prefix: str = "") -> list[str]:
        """Return the names of all entries below ``prefix``, sorted."""

    @abstractmethod
    def drop_entry(self, name: str) -> None:
        """Remove an entry if there is one.

        Raises:
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files and locks; rows put so far are safe."""

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()
