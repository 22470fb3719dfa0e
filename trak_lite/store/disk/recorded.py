"""What all stores share: documents, the list of tables, entries and cached arrays."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Set
from typing import Any, Self

from numpy.typing import NDArray

from trak_lite.core.validate import some_of
from trak_lite.errors import (
    CorruptStoreError,
    InvalidInputError,
    MissingStoreError,
    StateError,
)
from trak_lite.store._base import AbstractFeatureStore
from trak_lite.store._columns import TableSpec
from trak_lite.store._grid import check_spec, flat_spec, plain_json
from trak_lite.store._names import is_name, natural_order, path_parts
from trak_lite.store._table import AbstractRowTable, opened_for_reading
from trak_lite.store._values import check_derived
from trak_lite.store.disk.documents import (
    attributes_from_json,
    misnamed,
    read_record,
    store_identifier,
    table_from_json,
)
from trak_lite.store.disk.entries import (
    CACHE,
    ENTRIES,
    Files,
    Lock,
    StoreEntries,
    array_file_name,
    decode_array,
    encode_array,
)
from trak_lite.store.disk.listing import TABLES, entry_name, listed_path, lost_table
from trak_lite.store.disk.row_table import RowTable
from trak_lite.store.manifest import Manifest, compare_fingerprints

logger = logging.getLogger(__name__)


class RecordedFeatureStore(AbstractFeatureStore):
    """A store whose groups and tables are described by ``zarr.json`` documents, and whose tables are listed.

    A subclass says where files are, and how a table is created, opened, grown and dropped.
    """

    def __init__(
        self,
        where: str,
        manifest: Manifest,
        record: Mapping[str, Any],
        files: Files,
        *,
        cache: Files,
        writable: bool,
        lock: Lock | None = None,
    ) -> None:
        self._where = where
        self._origin = record["origin"]
        self._manifest = manifest
        self._files = files
        self._cache = cache
        self._entries = StoreEntries(files, where, store_identifier(record), lock)
        self._writable = writable
        self._closed = False
        self._tables: dict[str, RowTable] = {}

    @property
    def manifest(self) -> Manifest:
        """Settings that the store was created with."""
        return self._manifest

    @property
    def path(self) -> str:
        """Folder of the store, with symbolic links resolved, or its address."""
        return self._where

    @property
    def writable(self) -> bool:
        """Whether the store is open for writing."""
        return self._writable and not self._closed

    def create_table(
        self, path: str, spec: TableSpec, attributes: Mapping[str, Any] | None = None
    ) -> AbstractRowTable:
        """Open a table for writing; create it if it does not exist."""
        self._require_writable()
        path_parts(path, what="table")
        spec = check_spec(spec)
        plain = plain_json(dict(attributes or {}), what="A table's attributes")
        table = self._created(path, spec, plain)
        compare_fingerprints(flat_spec(table.spec), flat_spec(spec), where=f"{self._where}/{path}")
        return table

    def attributes(self, path: str) -> dict[str, Any]:
        """Return the attributes recorded when the table was created."""
        return attributes_from_json(self._require_table(path), where=f"{self._where}/{path}/zarr.json")

    def has_table(self, path: str) -> bool:
        """Return whether there is a table with this path; the other tables are not read."""
        return self._table_record(path) is not None

    def table_names(self, prefix: str = "") -> list[str]:
        """Return the paths of all tables inside the group ``prefix``, in natural order."""
        return self._table_names("/".join((*path_parts(prefix, what="table"), "")) if prefix else "")

    def top_table_names(self) -> list[str]:
        """Return the paths of all tables outside of groups; no group is searched."""
        return self._table_names("", nested=False)

    def _table_names(self, start: str, *, nested: bool = True) -> list[str]:
        paths = (listed_path(key.rpartition("/")[2]) for key in self._files.sizes(TABLES))
        listed = {path for path in paths if path is not None and path.startswith(start)}
        if not nested:
            listed = {path for path in listed if "/" not in path}
        names = set(self._tables_below(start, listed, nested=nested))
        # Others were just created, or the metadata of a parent group is missing.
        names.update(path for path in listed - names if self._table_record(path) is not None)
        return sorted(names, key=natural_order)

    def cached(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the cached array with this name and key, or ``None`` if it is missing or damaged."""
        entry = decode_array(self._cache.get(f"{CACHE}/{array_file_name(name)}") or b"", name)
        return None if entry is None or (entry.key, entry.bound) != (key, ()) else entry.array

    def cache(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Cache a derived array, replacing any array of the same name."""
        check_derived(name, key, array)
        if self.writable:
            self._make_hidden(CACHE)
            self._cache.put(f"{CACHE}/{array_file_name(name)}", encode_array(name, key, array))

    def entry(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the entry with this name and key, or ``None``; see :class:`AbstractFeatureStore`."""
        return self._entries.get(name, key)

    def put_entry(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Store an array that cannot be recomputed; see :meth:`AbstractFeatureStore.put_entry`."""
        check_derived(name, key, array)
        self._require_writable()
        self._make_hidden(ENTRIES)
        self._entries.put(name, key, array)

    def entry_names(self, prefix: str = "") -> list[str]:
        """Return the names of all entries below ``prefix``, sorted."""
        start = f"{prefix}/" if prefix else ""
        return [name for name in self._entries.names() if name.startswith(start)]

    def drop_entry(self, name: str) -> None:
        """Delete an entry if it exists."""
        self._require_writable()
        self._entries.drop(name)

    def close(self) -> None:
        """Release files and locks. Rows already put are safe."""
        self._closed = True
        for table in self._tables.values():
            table.close()

    def _require_writable(self) -> None:
        if not self._writable:
            raise opened_for_reading(self._where)
        if self._closed:
            raise StateError(f"{self._where} was closed. Open it again.")

    def _made_with(self, manifest: Manifest) -> Self:
        """Return the store if it has these settings; warn if other versions made it."""
        self._manifest.check_same(manifest, where=self._where)
        if self._manifest.made_with != manifest.made_with:
            logger.warning(
                "%s was made with %s, this is %s.", self._where, self._manifest.made_with, manifest.made_with
            )
        return self

    def _make_hidden(self, folder: str) -> None:
        """Create the folder of cached arrays or of entries, if it does not exist, where files need a folder."""

    @abstractmethod
    def _created(self, path: str, spec: TableSpec, attributes: Mapping[str, Any]) -> AbstractRowTable:
        """Return the table at a path; create it with this spec and these attributes if there is none."""

    def _group(self, path: str) -> dict[str, Any] | None:
        """Return the record in the ``zarr.json`` of a table or group; ``None`` if there is none."""
        return read_record(self._files.get, path, where=self._where)

    def _has_document(self, path: str) -> bool:
        """Whether there is a ``zarr.json`` at a path, which may be damaged."""
        return self._files.get(f"{path}/zarr.json") is not None

    def _is_surely_there(self, path: str) -> bool:
        """Whether a listed table exists, if that can be told without reading its ``zarr.json``."""
        return False

    def _is_listed(self, path: str) -> bool:
        """Whether the list of tables has an entry of a table, which may be damaged."""
        return self._files.get(f"{TABLES}/{entry_name(path)}") is not None

    @abstractmethod
    def _is_lost(self, path: str) -> bool:
        """Whether a table is listed but missing; correct also while others create and drop it."""

    def _spec(self, record: Mapping[str, Any], path: str) -> TableSpec:
        return table_from_json(record, path, self._origin, where=f"{self._where}/{path}/zarr.json")

    def _require_table(self, path: str) -> dict[str, Any]:
        record = self._table_record(path)
        if record is None:
            tables = some_of(self.table_names()) or "none"
            raise MissingStoreError(f"There is no table {path!r} in {self._where}. Tables there: {tables}.")
        return record

    def _table_record(self, path: str) -> dict[str, Any] | None:
        """Return the record in a table's ``zarr.json``; ``None`` if there is no such table.

        InvalidInputError if a part of the path is a table, or the path a group; CorruptStoreError if a listed table is
        missing or not described.
        """
        parts = path_parts(path, what="table")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            record = self._group(above)
            if record is not None and "columns" in record:
                self._spec(record, above)  # raises if it was exchanged
                raise InvalidInputError(
                    f"{above!r} is a table, so there is no table {path!r} inside it. Rename it."
                )
        record = self._group(path)
        if record is None and self._is_lost(path):
            raise lost_table(path, where=self._where)
        if record is not None and "columns" not in record:
            if self._is_listed(path):
                raise CorruptStoreError(
                    f"{self._where}/{path}/zarr.json does not describe a table, but the store lists one there. Restore "
                    "the file from a backup, or use another path."
                )
            tables = some_of(self.table_names(path))
            raise InvalidInputError(f"{path!r} is a group of tables, not a table. Choose one of {tables}.")
        return record

    def _tables_below(self, start: str, listed: Set[str], *, nested: bool = True) -> Iterator[str]:
        """Yield the paths of the tables in a group, whose path ends in ``/``."""
        for name in self._files.folders(start.rstrip("/")):
            path = f"{start}{name}"
            if name.startswith("."):
                continue
            if not is_name(name):
                if self._has_document(path):
                    raise misnamed(f"{self._where}/{path}")
                continue
            is_table = path in listed and self._is_surely_there(path)
            record = None if is_table else self._group(path)
            if is_table or (record is not None and "columns" in record):
                yield path
            elif record is not None and nested:
                yield from self._tables_below(f"{path}/", listed)
