"""Abstract base classes of feature stores: tables of rows that are either done or pending."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import InvalidInputError, printable
from trak_lite.store._columns import Column, StoredArray, StoredRows
from trak_lite.store.manifest import Manifest

__all__ = ["NEEDED_UNTIL", "AbstractFeatureStore", "AbstractRowTable", "Difference", "TableSpec"]

NEEDED_UNTIL = "needed_until"
"""Attribute of an intermediate table: path of the table computed from it. Once that is complete, this one is unused."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Shape of a table. All columns share the chunk grid and the record of done rows."""

    num_rows: int
    columns: tuple[Column, ...]
    chunk_rows: int
    """Rows per chunk. A chunk is the unit of committing, locking and memory mapping."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that determine the rows; compared key by key by ``create_table`` if the table exists."""

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The stored arrays of all columns, in column order."""
        return tuple(array for column in self.columns for array in column.arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk, over all columns."""
        return sum(column.row_bytes for column in self.columns)


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two stores.

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
    """Rows of one table. A row is done or pending; a done row never changes, even if the process is killed.

    ``StoreTests`` in ``tests/store/store_laws.py`` checks these guarantees:

    - Rows read equal the rows put, bitwise. In a quantised column they are within half the row's scale, with the same
      bits in every store.
    - Once ``put`` returns, the rows survive a kill of the process.
    - Pending rows are never readable.
    - A ``put`` that raises changes nothing.
    - All tables opened from the same path report the same done rows.
    """

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """Shape, columns and fingerprint of the table."""

    @abstractmethod
    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Write rows. Once this returns, they survive a kill of the process.

        Args:
            rows: First row of a contiguous run, or the row of each value (distinct, any order).
            values: For each column an array ``(b, width)`` or ``(b,)`` of a real floating dtype. It is cast to the
                column's ``value_dtype`` and, for a quantised column, then quantised.

        Raises:
            InvalidInputError: For wrong columns, shapes or dtypes, rows out of range or repeated.
            NonFiniteError: If a value is NaN or infinite, before or after the cast; names the rows.
            StateError: If a row is already done.
            ReadOnlyStoreError: If the store was opened for reading.
            StoreFullError: If the disk is full; the rows stay pending.
            BusyError: If another process writes the chunk.
        """

    @abstractmethod
    def claim(self, chunk: int) -> AbstractContextManager[NDArray[np.int64]]:
        """Lock a chunk: until the context exits, no other writer can put rows into it.

        Writers can thus share a table without further coordination: a writer that finds a chunk locked tries another
        one. Rows that a killed writer left in the chunk are recovered. ``put`` works as usual, also for other chunks.

        Args:
            chunk: Index of the chunk.

        Returns:
            Context manager that yields the pending rows of the chunk, ascending, ``(b,)``; empty if it is committed.

        Raises:
            InvalidInputError: If there is no such chunk.
            BusyError: If another writer holds the chunk; names its host and process.
            ReadOnlyStoreError: If the store was opened for reading.
            StoreFullError: If the disk is full.
        """

    @abstractmethod
    def done(self) -> NDArray[np.bool_]:
        """Return a mask of the done rows, ``(num_rows,)``; includes rows staged by writers that were killed."""

    def pending(self) -> NDArray[np.int64]:
        """Return the rows that are not done, ascending."""
        return np.flatnonzero(~self.done())

    def pending_by_chunk(self) -> NDArray[np.int64]:
        """Return the number of pending rows of each chunk, ``(num_chunks,)``."""
        starts = np.arange(0, self.spec.num_rows, self.spec.chunk_rows)
        done = np.add.reduceat(self.done(), starts, dtype=np.int64)
        return np.diff(starts, append=self.spec.num_rows) - done

    @property
    def complete(self) -> bool:
        """Whether every row is committed and therefore readable."""
        return len(self.committed_chunks()) == self.num_chunks

    @property
    def num_chunks(self) -> int:
        """Number of chunks, committed or not."""
        return -(-self.spec.num_rows // self.spec.chunk_rows)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the row range ``(start, stop)`` of a chunk; ``stop`` is exclusive.

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
            InvalidInputError: If there is no such column; names the existing ones.
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
        """Return the rows of a committed chunk as stored, memory-mapped where possible.

        All arrays come from the same commit. Do not write to them.

        Raises:
            IncompleteStoreError: If the chunk is not committed; names its rows.
            CorruptStoreError: If its size or checksum contradicts its commit record.
        """

    def read_chunk(self, chunk: int, column: str) -> NDArray[Any]:
        """Return the rows of a committed chunk, ``(rows, width)`` or ``(rows,)``, memory-mapped where possible.

        The array is read-only; copy it if it must outlive the table. For a quantised column it is a new float32 array,
        four (int8) or eight (int4) times as large as the chunk; :meth:`blocks` needs only a few MiB.

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
        """Yield ``(first row, rows)`` blocks of the committed rows ``start:stop``, in order.

        This is the preferred way to read a table. A block never spans two chunks. For a quantised column it has at
        most 256 rows, in a buffer that the next block overwrites. Do not write to the blocks.

        Raises:
            InvalidInputError: If ``start:stop`` exceeds the table.
            IncompleteStoreError: If a row is in an uncommitted chunk.
        """
        size, stop = self.spec.chunk_rows, self.spec.num_rows if stop is None else stop
        if not 0 <= start <= stop <= self.spec.num_rows:
            raise InvalidInputError(
                f"Rows {start} to {stop - 1} are not all in the table, which has rows 0 to {self.spec.num_rows - 1}."
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
        # Read every chunk first: an unreadable one raises before the output is allocated.
        for chunk in range(0 if missing is None else missing + 1):
            self.read_chunk(chunk, column)
        out = self._empty(column, self.spec.num_rows)
        for start, rows in self.blocks(column):
            out[start : start + len(rows)] = rows
        return out

    def read_rows(self, column: str, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[Any]:
        """Return the given rows of a column as a new array, in the given order.

        Raises:
            InvalidInputError: If a row is out of range, or ``rows`` are not integers.
            IncompleteStoreError: If a row is in an uncommitted chunk.
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
                f"Rows {wanted.min()} to {wanted.max()} are not all in the table, which has rows 0 to "
                f"{self.spec.num_rows - 1}."
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
        """Yield ``(first row, rows)`` for each chunk, in order."""
        for chunk in range(self.num_chunks):
            yield self.chunk_range(chunk)[0], self.read_chunk(chunk, column)

    @abstractmethod
    def checksums(self, chunk: int) -> dict[str, int]:
        """Return the recorded CRC-32C of each array of a committed chunk, by array name; a disk store reads no rows.

        The checksum covers the whole chunk; a partial last chunk is padded with the fill value.

        Raises:
            IncompleteStoreError: If the chunk is not committed.
        """

    @abstractmethod
    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the done rows of a chunk and their values, as new arrays. Used to copy unfinished tables.

        Unlike :meth:`read_chunk`, it also returns rows of an uncommitted chunk, each verified against its row record.

        Returns:
            The rows, ascending, ``(b,)``, and for each column ``(b, width)`` or ``(b,)``; ``b`` may be 0.
        """

    @abstractmethod
    def content_key(self) -> str:
        """Return a digest of the committed contents, for use in cache keys.

        Raises:
            IncompleteStoreError: If a row is pending.
        """


class AbstractFeatureStore(ABC):
    """A tree of named tables with one manifest.

    A table path consists of ``/``-separated names of ``[A-Za-z0-9._-]{1,64}`` and has at most 200 characters. Examples:
    ``ckpt-0``, ``targets/test/ckpt-0``, ``scores/test``.
    """

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Settings that the store was created with."""

    @property
    @abstractmethod
    def path(self) -> str | None:
        """Folder or address of the store; ``None`` for a store in memory."""

    @property
    @abstractmethod
    def writable(self) -> bool:
        """Whether the store is open for writing."""

    @abstractmethod
    def create_table(
        self, path: str, spec: TableSpec, attributes: Mapping[str, Any] | None = None
    ) -> AbstractRowTable:
        """Open a table for writing; create it if it does not exist.

        Args:
            path: Path of the table.
            spec: Shape and fingerprint.
            attributes: JSON values recorded at creation and never compared, such as the origin of a checkpoint.

        Raises:
            ManifestMismatchError: If the table exists with another shape or fingerprint; names every differing key.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def open_table(self, path: str) -> AbstractRowTable:
        """Open an existing table, for writing if the store is writable.

        Raises:
            MissingStoreError: If there is no such table; names the existing ones.
        """

    @abstractmethod
    def drop_table(self, path: str) -> None:
        """Delete a table and all its rows. Handles that are open on it can no longer put rows.

        The deletion is atomic: if the process is killed, the table either exists completely or not at all.

        Raises:
            MissingStoreError: If there is no such table; names the existing ones.
            BusyError: If another writer holds a chunk of it.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Append pending rows to a table; done rows stay done.

        A partial last chunk becomes uncommitted and is readable again once its new rows are done. Handles opened
        before the call can no longer put rows. The change is atomic; if the process is killed, repeat the call.

        Args:
            path: Path of the table.
            num_rows: New total number of rows.

        Returns:
            The table.

        Raises:
            InvalidInputError: If the table has more rows than that.
            MissingStoreError: If there is no such table.
            BusyError: If another writer holds its last chunk.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Replace the fingerprint of the manifest after a change that affects no stored row, such as appended data.

        The replacement is atomic. If several processes call this at once, one succeeds; for the others the call is a
        no-op if they give the same fingerprint.

        Args:
            known: Fingerprint that the caller expects to replace. If the stored one differs, nothing is changed.
            given: The new fingerprint.

        Raises:
            ManifestMismatchError: If the stored fingerprint equals neither ``known`` nor ``given``; names the differing
                keys.
            InvalidInputError: If ``given`` has no JSON form.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def diff(self, other: AbstractFeatureStore) -> tuple[Difference, ...]:
        """Return the differences between this store and another one; empty if they are equal.

        Compares manifests and table specs key by key, which rows are done, and the contents: committed chunks by
        checksum, uncommitted chunks byte by byte. Attributes are not compared.
        """

    @abstractmethod
    def merge(self, parts: Iterable[AbstractFeatureStore]) -> dict[str, int]:
        """Copy the rows that are missing here from other stores, for example from workers without a shared disk.

        Tables that are missing here are created. Each part is checked for conflicts before any of its rows is copied.
        After an interruption, repeat the call; it copies the rows that are still missing.

        Args:
            parts: Stores with the same manifest and the same table specs; they may be unfinished.

        Returns:
            For each table of the parts, the number of rows copied.

        Raises:
            ManifestMismatchError: If manifest, shape or fingerprint differ; names every differing key.
            InvalidInputError: If a row is done in both stores and its bytes differ; names the rows. Nothing is copied
                from that part.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def attributes(self, path: str) -> dict[str, Any]:
        """Return the attributes recorded when the table was created."""

    def has_table(self, path: str) -> bool:
        """Return whether there is a table with this path."""
        return path in self.table_names()

    @abstractmethod
    def table_names(self, prefix: str = "") -> list[str]:
        """Return the paths of all tables below ``prefix``, in natural order (``ckpt-2`` before ``ckpt-10``)."""

    @abstractmethod
    def cached(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the cached array with this name and key, or ``None``."""

    @abstractmethod
    def cache(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Cache a derived array, replacing any array of the same name. Does nothing if the store is read-only."""

    @abstractmethod
    def entry(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the entry with this name and key, or ``None``.

        Raises:
            CorruptStoreError: If the entry is damaged.
        """

    @abstractmethod
    def put_entry(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Store an array that cannot be recomputed, such as a run record or a fit.

        Unlike the cache, entries are always stored next to the rows, also in an object store. An existing entry of the
        same name is replaced.

        Raises:
            InvalidInputError: For a bad name, a key that is too long, or a non-numeric array.
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def entry_names(self, prefix: str = "") -> list[str]:
        """Return the names of all entries below ``prefix``, sorted."""

    @abstractmethod
    def drop_entry(self, name: str) -> None:
        """Delete an entry if it exists.

        Raises:
            ReadOnlyStoreError: If the store was opened for reading.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files and locks. Rows already put are safe."""

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()
