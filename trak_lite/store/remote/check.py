"""Read-only check of a remote store."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, final

from trak_lite.errors import StoreError, UnsupportedStoreError
from trak_lite.store._base import TableSpec
from trak_lite.store._check_report import Finding, Report, Tally
from trak_lite.store._checksums import crc32c
from trak_lite.store._names import is_name
from trak_lite.store.disk.check import missing_store
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.documents import DROPPED, identity_of
from trak_lite.store.disk.entries import ENTRIES, StoreEntries, entry_of
from trak_lite.store.disk.listing import TABLES, decode_entry, entry_name, listed_path, lost_table
from trak_lite.store.disk.metadata import (
    check_array,
    check_hidden,
    manifest_from_json,
    misnamed,
    own_attributes,
    parse_zarr_json,
    table_from_json,
)
from trak_lite.store.disk.records import CommitRecord
from trak_lite.store.remote.index import decode_log
from trak_lite.store.remote.objects import AbstractObjects

__all__ = ["check_remote"]

_METADATA = "zarr.json"
_REMOVE = "remove it, then featurize again"
_RESTORE = "restore zarr.json from a backup, or use another address"


def check_remote(objects: AbstractObjects, *, repair: bool) -> Report:
    """Fetch every chunk of a remote store and compare it with its commit record.

    Raises:
        MissingStoreError: If there is no store.
        ManifestMismatchError: If the store has the format of another trak_lite version.
        UnsupportedStoreError: If ``repair`` is set.
    """
    if repair:
        raise UnsupportedStoreError(
            f"{objects.url} cannot be repaired in an object store, where nothing can be renamed. Check it without "
            "repairing, and remove the objects that the report names, or copy the store to a local disk."
        )
    return RemoteLook(objects).report()


@final
class RemoteLook:
    """Checks one remote store from a single listing of its objects."""

    def __init__(self, objects: AbstractObjects) -> None:
        self._objects = objects
        self._findings: list[Finding] = []
        self._tally = Tally()
        self._sizes: dict[str, int] = {}
        self._record: Mapping[str, Any] | None = None
        self._identities: dict[str, str] = {}

    def report(self) -> Report:
        """List all objects, fetch all chunks, and compare them with the records; see :func:`check_remote`."""
        text = self._objects.get(_METADATA)
        if text is None:
            raise missing_store(self._objects.url)
        try:
            record = own_attributes(parse_zarr_json(text, self._where(_METADATA)), self._objects.url)
        except StoreError as error:
            self._add("damage", None, str(error), _RESTORE)
        else:
            manifest_from_json(record, self._objects.url)
            self._record = record
        self._sizes = self._objects.sizes("")
        tables = {
            path: TableFiles(path, spec, root=self._objects.url, identity=self._identities[path])
            for path, spec in self._tables().items()
        }
        self._list()
        for path, files in tables.items():
            self._table(path, files)
        entries = StoreEntries(self._objects, self._objects.url, self._record)
        for name, wrong in entries.problems():
            self._add("damage", None, f"the entry {name!r} {wrong}", entries.remedy(wrong))
        for key in sorted(self._sizes):
            folder, _, name = key.rpartition("/")
            listed = folder == TABLES and listed_path(name) is not None
            entry = folder in (TABLES, ENTRIES) and entry_of(name) is not None
            known = listed or entry or name == _METADATA
            if not known and not any(_belongs(key, files) for files in tables.values()):
                self._add("note", None, f"{key!r} belongs to no table", "remove it if it is not needed")
        return Report(self._objects.url, tuple(self._findings), self._tally)

    def _tables(self) -> dict[str, TableSpec]:
        """Return the specs of the tables with valid metadata; report the others."""
        keys = sorted(key for key in self._sizes if key.endswith(f"/{_METADATA}"))
        documents, tables, groups = {}, {}, {""}
        for key, text in self._objects.get_many(keys).items():
            folder = key.removesuffix(f"/{_METADATA}")
            try:
                documents[folder] = parse_zarr_json(text or b"", self._where(key))
            except StoreError as error:
                self._add("damage", folder, str(error), _RESTORE)
        for folder in sorted(documents):  # a group before what is in it
            document, parts = documents[folder], folder.split("/")
            is_listed = f"{TABLES}/{entry_name(folder)}" in self._sizes
            try:
                if folder == TABLES:
                    check_hidden(document, self._where(folder))
                is_array = document.get("node_type") == "array" and "/".join(parts[:-1]) not in groups
                if any(part.startswith(".") for part in parts) or (is_array and not is_listed):
                    continue
                record = own_attributes(document, self._where(folder))
                if not all(map(is_name, parts)):
                    raise misnamed(self._where(folder))
                where = self._where(f"{folder}/{_METADATA}")
                if "columns" in record:
                    # if the store's metadata is damaged (already reported), trust the table's
                    origin = str(self._record["origin"] if self._record else record.get("store"))
                    spec = table_from_json(record, folder, origin, where=where)
                    self._identities[folder] = identity_of(record)
                    for array in spec.arrays:
                        found = documents.get(f"{folder}/{array.name}")
                        check_array(found, self._where(folder), array, spec)
                    tables[folder] = spec
                    continue
                groups.add(folder)
                if (record or is_listed) and DROPPED not in record:
                    finding = f"{where} describes neither a table nor a group of tables"
                    self._add("damage", folder, finding, _RESTORE)
            except StoreError as error:
                self._add("damage", folder, str(error), _RESTORE)
        return tables

    def _list(self) -> None:
        """Compare the list of tables with the tables found."""
        if f"{TABLES}/{_METADATA}" not in self._sizes:
            self._add("damage", None, f"{TABLES}/{_METADATA}, the list of tables, is missing", _RESTORE)
        start = f"{TABLES}/"
        names = [key.removeprefix(start) for key in self._sizes if key.startswith(start)]
        paths = {path for path in map(listed_path, names) if path is not None}
        texts = self._objects.get_many(f"{TABLES}/{entry_name(path)}" for path in sorted(paths))
        for path, (key, text) in zip(sorted(paths), texts.items(), strict=True):
            if text is None:
                continue  # dropped since it was listed
            try:
                if self._objects.get(f"{path}/{_METADATA}") is None and self._objects.get(key) is not None:
                    raise lost_table(path, where=self._objects.url)
                identity = decode_entry(text, path, where=self._where(key))
            except StoreError as error:
                self._add("damage", path, str(error), f"restore it from a backup, or remove {key}")
                continue
            if self._identities.get(path, identity) != identity:
                finding = "another table than the one that the store lists under this path"
                self._add("damage", path, finding, "put the right objects back")

    def _table(self, path: str, files: TableFiles) -> None:
        latest = self._records(path, files)
        tally = Tally(tables=1, pending_rows=files.spec.num_rows)
        for chunk in range(files.num_chunks):
            present = [column for column in files.columns if column.visible(chunk) in self._sizes]
            record = latest.pop(chunk, None)
            if record is None:
                if present:
                    text = "put and not committed: a writer is running, or was killed"
                    self._add("note", path, text, "nothing: the next writer finishes it", files, chunk)
            elif len(present) < len(files.columns):
                text = "committed once; objects of it were removed"
                self._add("note", path, text, "featurize again: these rows are pending", files, chunk)
            elif self._chunk(path, files, record):
                rows = files.rows_in(chunk)
                size = sum(column.chunk_bytes for column in files.columns)
                tally.add(Tally(0, 1, size, rows, -rows))
        self._tally.add(tally)
        for chunk in sorted(latest):
            text = f"a commit record of chunk {chunk}; the table has {files.num_chunks}"
            self._add("damage", path, text, "remove the record")

    def _records(self, path: str, files: TableFiles) -> dict[int, CommitRecord]:
        latest: dict[int, CommitRecord] = {}
        keys = [key for key in self._sizes if key.startswith(f"{files.commits}/")]
        for key, text in self._objects.get_many(keys).items():
            records, damaged = decode_log(text or b"")
            if damaged or not records:
                finding = f"{key} is not a commit record, or is damaged"
                self._add("damage", path, finding, _REMOVE)
            for record in records:
                if record.table != files.identity:
                    self._add("damage", path, f"{key} is a commit record of another table", _REMOVE)
                elif record.chunk not in latest or latest[record.chunk].generation < record.generation:
                    latest[record.chunk] = record
        return latest

    def _chunk(self, path: str, files: TableFiles, record: CommitRecord) -> bool:
        """Compare every column of a committed chunk with its record; return whether all match."""
        problems: dict[ColumnFiles, str | None] = {}
        if record.rows != files.rows_in(record.chunk):
            text = f"committed with {record.rows} rows, the chunk has {files.rows_in(record.chunk)}"
            problems[files.columns[0]] = text
        else:
            for column in files.columns:
                key = column.visible(record.chunk)
                checksum = functools.partial(self._checksum, key)
                problems[column] = record.problem(column.name, self._sizes[key], column.chunk_bytes, checksum)
        for column, problem in problems.items():
            if problem is not None:
                remedy = f"remove {column.visible(record.chunk)}, then featurize again"
                self._add("damage", path, problem, remedy, files, record.chunk, column.name)
        return not any(problems.values())

    def _checksum(self, key: str) -> int:
        return crc32c(self._objects.get(key) or b"")

    def _add(
        self,
        level: Literal["damage", "note"],
        table: str | None,
        text: str,
        next_step: str,
        files: TableFiles | None = None,
        chunk: int | None = None,
        column: str | None = None,
    ) -> None:
        rows = None if files is None or chunk is None else files.rows_of(chunk)
        self._findings.append(Finding(level, table, text, next_step, chunk, rows, column))

    def _where(self, key: str) -> str:
        return f"{self._objects.url}/{key}"


def _belongs(key: str, files: TableFiles) -> bool:
    """Return whether a key is a chunk of the table's grid or in its folder of commit records."""
    folder, _, name = key.rpartition("/")
    chunks = [column.chunk_of(name) for column in files.columns if folder == column.folder]
    return folder == files.commits or any(chunk is not None and chunk < files.num_chunks for chunk in chunks)
