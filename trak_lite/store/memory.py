"""Feature store in memory, for tests and for runs that need not be resumed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.checksums import crc32c
from trak_lite.core.validate import one_of
from trak_lite.errors import HeldHereError, StateError
from trak_lite.store._columns import Column, StoredRows, TableSpec
from trak_lite.store._grid import grown_spec, plain_json, plain_manifest
from trak_lite.store._table import AbstractRowTable
from trak_lite.store._values import check_block
from trak_lite.store.disk.documents import store_record
from trak_lite.store.disk.recorded import RecordedFeatureStore
from trak_lite.store.manifest import Manifest, replaced_fingerprint


@dataclass(frozen=True, slots=True)
class _MemoryRows:
    """State shared by all handles of a table."""

    spec: TableSpec
    attributes: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    """Stored arrays, ``(num_chunks * chunk_rows, width)`` each; pending rows and padding hold the fill value."""
    done: NDArray[np.bool_]
    claims: dict[int, MemoryFeatureStore] = field(default_factory=dict)
    """Claimed chunks, each with the store handle that claimed it."""

    @classmethod
    def empty(cls, spec: TableSpec, attributes: dict[str, Any]) -> _MemoryRows:
        rows = -(-spec.num_rows // spec.chunk_rows) * spec.chunk_rows
        arrays = {a.name: np.full(a.shape(rows), a.fill, a.stored_dtype) for a in spec.arrays}
        return cls(spec, attributes, arrays, np.zeros(spec.num_rows, np.bool_))


@dataclass(slots=True)
class _Contents:
    """State shared by all handles of a store."""

    manifest: Manifest
    tables: dict[str, _MemoryRows] = field(default_factory=dict)


class _Files(dict[str, bytes]):
    """Entries and cached arrays by key."""

    def put(self, key: str, content: bytes) -> None:
        self[key] = content

    def delete(self, key: str) -> None:
        self.pop(key, None)

    def sizes(self, folder: str) -> list[str]:
        return [key for key in self if key.startswith(f"{folder}/")]

    def folders(self, folder: str) -> list[str]:
        return []


@final
@dataclass(frozen=True, slots=True, eq=False)
class MemoryRowTable(AbstractRowTable):
    """Rows of one table of a :class:`MemoryFeatureStore`."""

    _path: str
    _rows: _MemoryRows
    _store: MemoryFeatureStore

    @property
    def spec(self) -> TableSpec:
        """Shape, columns and fingerprint of the table."""
        return self._rows.spec

    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Store rows; see :meth:`AbstractRowTable.put`."""
        self._store.require_writable(self._path, self._rows)
        block = check_block(rows, values, self.spec)
        spans = []
        for chunk, runs in block.runs.items():
            self._refuse_claimed(chunk)
            first = chunk * self.spec.chunk_rows
            spans += [(slice(first + run.rows.start, first + run.rows.stop), run.source) for run in runs]
        done = [span.start + i for span, _ in spans for i in np.flatnonzero(self._rows.done[span]).tolist()]
        if done:
            raise self._are_done(done)
        for span, source in spans:
            for target, array in zip(self._rows.arrays.values(), block.arrays, strict=True):
                target[span] = array[source]
            self._rows.done[span] = True

    @contextlib.contextmanager
    def claim(self, chunk: int) -> Iterator[NDArray[np.int64]]:
        """Lock a chunk until the context exits; see :meth:`AbstractRowTable.claim`."""
        self._store.require_writable(self._path, self._rows)
        first, stop = self.chunk_range(chunk)
        self._refuse_claimed(chunk)
        if chunk in self._rows.claims:
            raise HeldHereError(
                f"Chunk {chunk} of {self._path} is claimed already through this store. Claim it once."
            )
        self._rows.claims[chunk] = self._store
        try:
            yield np.flatnonzero(~self._rows.done[first:stop]) + first
        finally:
            self._rows.claims.pop(chunk, None)

    def done(self) -> NDArray[np.bool_]:
        """Return a mask of the done rows, ``(num_rows,)``."""
        return self._rows.done.copy()

    def committed_chunks(self) -> list[int]:
        """Return the chunks that are complete and readable, ascending."""
        return [chunk for chunk in range(self.num_chunks) if self._is_complete(chunk)]

    def stored_chunk(self, chunk: int, column: str) -> StoredRows:
        """Return the rows of a complete chunk; see :meth:`AbstractRowTable.stored_chunk`."""
        first, stop = self.chunk_range(chunk)
        schema = self.column(column)
        self._require_complete(chunk)
        rows = self._stored(schema)[first:stop]
        for array in rows.arrays:
            array.flags.writeable = False
        return rows

    def checksums(self, chunk: int) -> dict[str, int]:
        """Return the CRC-32C of each array of a complete chunk."""
        self._require_complete(chunk)
        rows = slice(chunk * self.spec.chunk_rows, (chunk + 1) * self.spec.chunk_rows)
        return {name: crc32c(array[rows]) for name, array in self._rows.arrays.items()}

    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the done rows of a chunk and their values; see :meth:`AbstractRowTable.read_done`."""
        first, stop = self.chunk_range(chunk)
        rows = np.flatnonzero(self._rows.done[first:stop]) + first
        return rows, {column.name: self._stored(column)[rows].decode() for column in self.spec.columns}

    @property
    def _where(self) -> str:
        return self._path

    def _stored(self, column: Column) -> StoredRows:
        return StoredRows(column, tuple(self._rows.arrays[array.name] for array in column.arrays))

    def _refuse_claimed(self, chunk: int) -> None:
        if self._rows.claims.get(chunk, self._store) is not self._store:
            first, stop = self.chunk_range(chunk)
            raise HeldHereError(
                f"rows {first} to {stop - 1} (chunk {chunk}) of {self._path}: another handle of this process holds "
                "them. Wait for it to finish, or put other rows."
            )

    def _require_complete(self, chunk: int) -> None:
        if not self._is_complete(chunk):
            self._raise_incomplete(chunk)

    def _is_complete(self, chunk: int) -> bool:
        first, stop = self.chunk_range(chunk)
        return bool(self._rows.done[first:stop].all())


@final
class MemoryFeatureStore(RecordedFeatureStore):
    """Feature store in memory. Its tables exist while the store or a reopened handle exists.

    Example:
        >>> store = MemoryFeatureStore(Manifest({"seed": 0}))
        >>> store.path is None, store.writable, store.reopen("r").writable
        (True, True, False)
    """

    def __init__(self, manifest: Manifest) -> None:
        self._contents = _Contents(plain_manifest(manifest))
        files, record = _Files(), store_record(self.manifest)
        super().__init__("memory", self.manifest, record, files, cache=files, writable=True)

    def reopen(self, mode: Literal["r", "r+"] = "r") -> MemoryFeatureStore:
        """Return another handle on the same tables, for reading or for writing."""
        one_of(("r", "r+"), mode=mode)
        handle = copy.copy(self)
        handle._writable, handle._closed = mode == "r+", False
        return handle

    @property
    def manifest(self) -> Manifest:
        """Settings that the store was created with."""
        return self._contents.manifest

    @property
    def path(self) -> None:  # type: ignore[override]
        """``None``, because the store is in memory."""

    def require_writable(self, path: str, rows: _MemoryRows) -> None:
        """Raise unless this handle is open for writing, and ``rows`` is still the current state of the table."""
        self._require_writable()
        if self._contents.tables.get(path) is not rows:
            raise StateError(f"{path} was dropped or has grown. Open the table again.")

    def drop_table(self, path: str) -> None:
        """Delete a table and all its rows."""
        self._require_writable()
        self._require_table(path)
        del self._contents.tables[path]

    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Append pending rows to a table."""
        self._require_writable()
        self._require_table(path)
        rows = self._contents.tables[path]
        spec = grown_spec(rows.spec, num_rows)
        if spec != rows.spec:
            grown = _MemoryRows.empty(spec, rows.attributes)
            for name, array in rows.arrays.items():
                grown.arrays[name][: len(array)] = array
            grown.done[: len(rows.done)] = rows.done
            self._contents.tables[path] = grown
        return self.open_table(path)

    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Replace the fingerprint of the manifest; see :meth:`AbstractFeatureStore.replace_fingerprint`."""
        self._require_writable()
        given = plain_json(dict(given), what="The manifest's fingerprint")
        self._contents.manifest = replaced_fingerprint(
            self.manifest, known, given, where="The store in memory"
        )

    def _created(self, path: str, spec: TableSpec, attributes: Mapping[str, Any]) -> MemoryRowTable:
        if self._table_record(path) is None:
            self._contents.tables[path] = _MemoryRows.empty(spec, dict(attributes))
        return self.open_table(path)

    def open_table(self, path: str) -> MemoryRowTable:
        """Open an existing table, for writing if the store is writable."""
        self._require_table(path)
        return MemoryRowTable(path, self._contents.tables[path], self)

    def _group(self, path: str) -> dict[str, Any] | None:
        rows = self._contents.tables.get(path)
        if rows is None:
            return {} if any(self._tables_below(f"{path}/", set())) else None
        return {"columns": rows.spec.columns, "attributes": rows.attributes}

    def _spec(self, record: Mapping[str, Any], path: str) -> TableSpec:
        return self._contents.tables[path].spec

    def _tables_below(self, start: str, listed: Set[str], *, nested: bool = True) -> Iterator[str]:
        paths = (path for path in self._contents.tables if path.startswith(start))
        return (path for path in paths if nested or "/" not in path[len(start) :])

    def _is_lost(self, path: str) -> bool:
        return False
