"""Abstract base class of a table: rows that are either done or pending."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.json_text import canonical_json
from trak_lite.core.validate import row_numbers, some_of
from trak_lite.errors import IncompleteStoreError, InvalidInputError, ReadOnlyStoreError, StateError
from trak_lite.store._columns import Column, StoredRows, TableSpec
from trak_lite.store._grid import shape_to_json


class AbstractRowTable(ABC):
    """Rows of one table. A row is done or pending; a done row never changes, even if the process is killed.

    ``StoreTests`` in ``tests/store/store_laws.py`` checks these guarantees:

    - Rows read equal the rows put, bitwise. In a quantised column they are within half the row's scale, with the same
      bits in every store.
    - Once ``put`` returns, the rows survive a kill of the process.
    - Pending rows are never readable.
    - A ``put`` that raises changes nothing.
    - All tables opened from the same path report the same done rows.
    - ``put`` and ``claim`` raise a ``ReadOnlyStoreError`` if the store was opened for reading.
    """

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """Shape, columns and fingerprint of the table."""

    @abstractmethod
    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Write rows.

        Args:
            rows: First row of a contiguous run, or the row of each value (distinct, any order).
            values: For each column an array ``(b, width)`` or ``(b,)`` of a real floating dtype. It is cast to the
                column's ``value_dtype`` and, for a quantised column, then quantised.

        Raises:
            InvalidInputError: For wrong columns, shapes or dtypes, rows out of range or repeated.
            NonFiniteError: If a value is NaN or infinite, before or after the cast; names the rows.
            StateError: If a row is already done.
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
        rows = self.done()  # first, because it refuses more rows than memory can list
        starts = np.arange(0, self.spec.num_rows, self.spec.chunk_rows)
        done = np.add.reduceat(rows, starts, dtype=np.int64)
        return np.diff(starts, append=self.spec.num_rows) - done

    @property
    def complete(self) -> bool:
        """Whether every row is committed and therefore readable."""
        return len(self.committed_chunks()) == self.num_chunks

    @property
    def num_chunks(self) -> int:
        """Number of chunks, committed or not."""
        spec = self.spec
        return -(-spec.num_rows // spec.chunk_rows)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the row range ``(start, stop)`` of a chunk, without ``stop``; InvalidInputError if there is none."""
        spec, num_chunks = self.spec, self.num_chunks
        if not 0 <= chunk < num_chunks:
            raise InvalidInputError(
                f"There is no chunk {chunk}: the table has {num_chunks} chunks, counted from 0."
            )
        start = chunk * spec.chunk_rows
        return start, min(start + spec.chunk_rows, spec.num_rows)

    def column(self, name: str) -> Column:
        """Return a column by name; InvalidInputError if there is none."""
        columns = {column.name: column for column in self.spec.columns}
        if name not in columns:
            raise InvalidInputError(f"There is no column {name!r}. Expected one of {list(columns)}.")
        return columns[name]

    @abstractmethod
    def committed_chunks(self) -> list[int]:
        """Return the chunks that are complete and readable, ascending."""

    @abstractmethod
    def stored_chunk(self, chunk: int, column: str) -> StoredRows:
        """Return the rows of a committed chunk as stored, in one commit; see :meth:`read_chunk`. Only for reading."""

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
        """Return a whole column as one new array; IncompleteStoreError if a row is pending."""
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
        wanted = row_numbers(self.spec.num_rows, "the table", rows=rows)
        out = self._empty(column, len(wanted))
        chunk_of, row_in = np.divmod(wanted, self.spec.chunk_rows)
        for chunk in np.unique(chunk_of).tolist():
            here = chunk_of == chunk
            out[here] = self.stored_chunk(chunk, column)[row_in[here]].decode()
        return out

    def _empty(self, column: str, num_rows: int) -> NDArray[Any]:
        schema = self.column(column)
        return np.empty((num_rows,) if schema.width is None else (num_rows, schema.width), schema.value_dtype)

    def chunks(self, column: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield ``(first row, rows)`` for each chunk, in order."""
        for chunk in range(self.num_chunks):
            yield self.chunk_range(chunk)[0], self.read_chunk(chunk, column)

    @abstractmethod
    def checksums(self, chunk: int) -> dict[str, int]:
        """Return the recorded CRC-32C of each array of a committed chunk, by array name; a disk store reads no rows.

        The checksum covers the whole chunk; a partial last chunk is padded with the fill value. It is an
        IncompleteStoreError if the chunk is not committed.
        """

    @abstractmethod
    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the done rows of a chunk and their values, as new arrays. Used to copy unfinished tables.

        Unlike :meth:`read_chunk`, it also returns rows of an uncommitted chunk, each verified against its row record.

        Returns:
            The rows, ascending, ``(b,)``, and for each column ``(b, width)`` or ``(b,)``; ``b`` may be 0.
        """

    def content_key(self) -> str:
        """Return a digest of the shape and all rows, equal in every store; IncompleteStoreError if a row is pending."""
        if not self.complete:
            committed = set(self.committed_chunks())
            self._raise_incomplete(next(chunk for chunk in itertools.count() if chunk not in committed))
        digest = hashlib.sha256(canonical_json(shape_to_json(self.spec)).encode())
        for chunk in range(self.num_chunks):
            digest.update(canonical_json(self.checksums(chunk)).encode())
        return digest.hexdigest()

    @property
    def _where(self) -> str:
        """Name of the table in messages."""
        return "the table"

    def _are_done(self, rows: Sequence[int] | NDArray[np.int64]) -> StateError:
        """Return the error for rows that are put again."""
        return StateError(
            f"Rows {some_of(rows)} of {self._where} are done already. "
            "Put pending rows only; pending() lists them."
        )

    def _raise_incomplete(self, chunk: int) -> NoReturn:
        first, stop = self.chunk_range(chunk)
        pending = int((~self.done()[first:stop]).sum())
        rows = f"Rows {first} to {stop - 1} (chunk {chunk}) of {self._where} are"
        if not pending:
            raise IncompleteStoreError(
                f"{rows} done and not committed yet. If their writer was killed, make its call again: opening the "
                "table for writing, open_store(path, 'r+').open_table(...), commits them."
            )
        raise IncompleteStoreError(
            f"{rows} not complete: {pending} of {stop - first} are pending. Featurize them first; pending() lists them."
        )


def opened_for_reading(where: str) -> ReadOnlyStoreError:
    """Return the error of a write. Attributors open a store that they cannot write for reading, and have no mode."""
    return ReadOnlyStoreError(
        f"{where} was opened for reading: it cannot be written, or was opened with mode='r'. Make the folder writable, "
        "or use another path. If you opened it with mode='r': trak_lite.store.open_store(path, mode='r+')."
    )
