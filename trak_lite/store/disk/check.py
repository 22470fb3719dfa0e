"""Read-only, lock-free check of a whole store, on a disk or in an object store.

It can run while writers are active, whose unfinished rows are not reported, and on a store that is too damaged to open.
This module checks the folder tree, the metadata and unknown files, and the tables of a disk; ``check_chunk`` checks
their chunks, and ``remote.check`` those of an object store.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, final

from trak_lite.errors import ManifestMismatchError, MissingStoreError, StoreError
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.store._check_report import Finding, Tally
from trak_lite.store._columns import TableSpec
from trak_lite.store._names import is_name
from trak_lite.store.disk.check_chunk import REPAIR, ChunkLook
from trak_lite.store.disk.chunk_files import COMMITS, SET_ASIDE, STAGE, ColumnFiles, TableFiles
from trak_lite.store.disk.documents import (
    DROPPED,
    attributes_from_json,
    check_array,
    check_hidden,
    identity_of,
    manifest_from_json,
    misnamed,
    own_attributes,
    read_zarr_json,
    refuse_undescribed,
    sizes_under_way,
    table_from_json,
)
from trak_lite.store.disk.entries import CACHE, ENTRIES, Files, HiddenFiles, Lock, StoreEntries, entry_of
from trak_lite.store.disk.folders import is_old, names_in
from trak_lite.store.disk.listing import TABLES, TableList, listed_path, lost_table
from trak_lite.store.disk.records import CommitLogs

OTHER_TABLE = "another table than the one that the store lists under this path"
_METADATA = "zarr.json"
_SCRATCH = re.compile(r".+\.safetensors\.new-[0-9a-f]{32}")
_LEFT = re.compile(r"\.(new|dropped-.+)-[0-9a-f]{32}")
NEXT_WRITER = "nothing: the next writer does it"
_PUT_BACK_TABLE = "put the right folder back, or remove this one and check with --repair"
_NOT_OURS = "remove it if it is not needed"
_PUT_BACK = "replace it by the folder"
_RESTORE = "restore zarr.json from a backup, or use another path"


def missing_store(root: str) -> MissingStoreError:
    """Return the error for a path without a store."""
    return MissingStoreError(
        f"There is no store at {root}: no zarr.json in it. Check the path, or featurize first."
    )


class AnyTableLook(Protocol):
    """Check of the rows of one table."""

    tally: Tally

    def findings(self) -> list[Finding]:
        """Check the table once and return all findings."""


class StoreLook(ABC):
    """Check of a store: the folder tree, the metadata, the list of tables and the entries.

    A subclass says how a store is read. Paths are relative to the store, which itself is ``""``.
    """

    _list_again = "check with --repair, which lists the tables that exist"

    def __init__(self, where: str, files: Files, lock: Lock | None = None) -> None:
        self.where = where
        self._files, self._lock = files, lock
        self.findings: list[Finding] = []
        self.tally = Tally()
        self.tables: dict[str, AnyTableLook] = {}
        """Checks of the tables with valid metadata, by path."""
        self.list_damaged = False
        """Whether the folder of the list must be recreated."""
        self.record: dict[str, Any] | None = None
        """Record of the store; ``None`` if its metadata is damaged."""
        self.wrong_entries: list[str] = []
        """Entries of the store (arrays, not tables) that are not as they were written."""
        self._identities: dict[str, str] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._strays: list[Finding] = []

    @abstractmethod
    def _names(self, folder: str) -> Iterable[str]: ...

    @abstractmethod
    def _is_link(self, path: str) -> bool: ...

    @abstractmethod
    def _is_folder(self, path: str) -> bool: ...

    @abstractmethod
    def _has(self, path: str) -> bool: ...

    @abstractmethod
    def _document(self, folder: str) -> dict[str, Any] | None: ...

    @abstractmethod
    def _list(self, names: Iterable[str]) -> None:
        """Compare the tables in the list, whose folder holds these names, with the tables found."""

    @abstractmethod
    def _scratch(self, path: str) -> None:
        """Report what an interrupted creation or removal left."""

    @abstractmethod
    def _table_look(self, path: str, spec: TableSpec) -> AnyTableLook: ...

    def look(self) -> None:
        """Check the store; MissingStoreError without metadata and tables, ManifestMismatchError for another format."""
        self._root()
        if self._is_folder(""):
            # Read the list before the folders, so that the folder of each listed table is visited.
            names = [] if self._is_link(TABLES) else list(self._names(TABLES))
            self._group("")
            if not self._is_link(TABLES):  # reported as a link
                self._list_folder(names)
                self._list(names)
                self._check_entries()
        if not self._has(_METADATA) and not self.tables:
            raise missing_store(self.where)
        for table in self.tables.values():
            self.findings += table.findings()
            self.tally.add(table.tally)
        for path, attributes in self._attributes.items():
            until = str(attributes.get(NEEDED_UNTIL))
            if until in self.tables and not self.tables[until].tally.pending_rows:
                text = f"left over: it was needed until {until} was complete"
                self.findings.append(Finding("note", path, text, "nothing: the next run drops it"))
        self.findings += self._strays

    def _root(self) -> None:
        record = None
        try:
            record = self._attributes_of("")
            if record is None:
                self._damage(None, f"{self.where}/{_METADATA} is missing", _RESTORE)
            elif "columns" not in record:
                manifest_from_json(record, self.where)
                self.record = record
        except ManifestMismatchError:
            raise  # an unknown format cannot be checked
        except StoreError as error:
            self._damage(None, str(error), _RESTORE)
        if record and "columns" in record:
            raise MissingStoreError(
                f"{self.where} is a table inside a store. Give the path of the store itself."
            )

    def _attributes_of(self, folder: str) -> dict[str, Any] | None:
        document = self._document(folder)
        return None if document is None else own_attributes(document, self._at(folder))

    def _at(self, path: str) -> str:
        return f"{self.where}/{path}".rstrip("/")

    def _group(self, folder: str) -> None:
        for name in sorted(self._names(folder)):
            path = f"{folder}/{name}".lstrip("/")
            try:
                self._look_at(path, name)
            except StoreError as error:
                self._damage(path, str(error), _RESTORE)

    def _look_at(self, path: str, name: str) -> None:
        if name == _METADATA:
            return  # already read by the caller
        if self._is_link(path):
            self._damage(path, "a symbolic link, which is not followed", _PUT_BACK)
        elif path in (CACHE, ENTRIES):
            self._hidden(path)
        elif path == TABLES:
            pass  # checked last
        elif self._is_folder(path) and is_name(name):
            self._folder(path)
        elif not name.startswith(".") and self._has(f"{path}/{_METADATA}"):
            raise misnamed(self._at(path))  # its rows would be missed silently
        else:
            self._stray(path)

    def _list_folder(self, names: Iterable[str]) -> None:
        try:
            check_hidden(self._document(TABLES), self._at(TABLES))
        except StoreError as error:
            self.list_damaged = True
            self._damage(None, f"{error} The list of tables is there", self._list_again)
        for name in sorted(names):
            if _LEFT.fullmatch(name):
                self._scratch(f"{TABLES}/{name}")
            elif name != _METADATA and listed_path(name) is None is entry_of(name) and name != SET_ASIDE:
                self._stray(f"{TABLES}/{name}")

    def _hidden(self, path: str) -> None:
        """Check the folder of cached arrays or of entries; the entries themselves are checked last."""
        for name in sorted(self._names(path)):
            if _SCRATCH.fullmatch(name):
                self._scratch(f"{path}/{name}")
            elif path == ENTRIES and name != _METADATA and entry_of(name) is None:
                self._stray(f"{path}/{name}")

    def store_entries(self) -> StoreEntries:
        """Return the entries of the store, which may be any store's if its metadata is damaged."""
        return StoreEntries(self._files, self.where, self.record, self._lock)

    def _check_entries(self) -> None:
        """Compare the entries with their marks and with the store."""
        entries = self.store_entries()
        try:
            wrong = dict(entries.problems())
        except StoreError as error:
            self._damage(None, f"the entries were not checked: {error}", _PUT_BACK)
            return
        self.wrong_entries = list(wrong)
        for name, text in wrong.items():
            self._damage(None, f"the entry {name!r} {text}", entries.remedy(text))

    def _folder(self, path: str) -> None:
        record = self._attributes_of(path)
        if record is None:
            self._without_metadata(path)
        elif "columns" in record:
            self._table(path, record)
        elif DROPPED not in record:  # otherwise its objects are being deleted
            if record:
                text = f"{self._at(path)}/{_METADATA} describes neither a table nor a group of tables"
                self._damage(path, text, _RESTORE)
            self._group(path)

    def _without_metadata(self, path: str) -> None:
        names = list(self._names(path))
        links = [name for name in names if self._is_link(f"{path}/{name}")]
        if any(self._has(f"{path}/{name}/{_METADATA}") for name in names):
            self._damage(path, f"{self._at(path)}/{_METADATA} is missing", _RESTORE)
            if not any(self._is_folder(f"{path}/{name}/{COMMITS}") for name in names):
                self._group(path)  # a group of tables, not a table
        elif links:  # links may replace tables
            for name in links:
                self._damage(f"{path}/{name}", "a symbolic link, which is not followed", _PUT_BACK)
        elif self._is_folder(path):  # False if it has just been dropped
            self._stray(path)

    def _table(self, path: str, record: dict[str, Any]) -> None:
        where = self._at(path)
        try:
            # if the store's metadata is damaged (already reported), trust the table's
            origin = str(self.record["origin"] if self.record else record.get("store"))
            spec = table_from_json(record, path, origin, where=f"{where}/{_METADATA}")
            self._identities[path] = identity_of(record)
            attributes = attributes_from_json(record, where=f"{where}/{_METADATA}")
            others = set(self._names(path)) - {_METADATA, *(array.name for array in spec.arrays)}
            refuse_undescribed(where, [name for name in others if self._has(f"{path}/{name}/{_METADATA}")])
        except StoreError as error:
            self._damage(path, str(error), _RESTORE)
            return
        for name in sorted(others):
            self._stray(f"{path}/{name}")
        before = len(self.findings)
        for array in spec.arrays:
            try:
                found = self._document(f"{path}/{array.name}")
                check_array(found, where, array, spec, under_way=sizes_under_way(record))
            except StoreError as error:
                self._damage(path, str(error), _RESTORE, column=array.name)
        if len(self.findings) == before:
            self.tables[path], self._attributes[path] = self._table_look(path, spec), attributes
            for size in sizes_under_way(record):
                text = f"growing it to {size} rows was interrupted, or is under way"
                self.findings.append(Finding("note", path, text, "grow it again, or leave it as it is"))
        else:  # with a wrong shape, valid chunks would look damaged and be set aside
            text = "its chunks were not checked: its metadata must be restored first"
            self.findings.append(Finding("note", path, text, "check again afterwards"))

    def _damage(self, table: str | None, text: str, next_step: str, *, column: str | None = None) -> None:
        self.findings.append(Finding("damage", table, text, next_step, column=column))

    def _note(self, text: str, next_step: str) -> None:
        self.findings.append(Finding("note", None, text, next_step))

    def _stray(self, path: str) -> None:
        self._strays.append(Finding("note", None, f"{path!r} belongs to no table", _NOT_OURS))


@final
class DiskLook(StoreLook):
    """Check of a store in a local folder."""

    def __init__(self, root: str) -> None:
        super().__init__(root, HiddenFiles(root), TableList(root).locked)
        self.tables: dict[str, TableLook] = {}  # type: ignore[assignment]
        self.entries: list[str] = []
        """Tables whose list entry a repair sets aside: damaged entries, and those of lost tables."""
        self.look()

    def _names(self, folder: str) -> list[str]:
        return names_in(self._at(folder))

    def _is_link(self, path: str) -> bool:
        return os.path.islink(self._at(path))

    def _is_folder(self, path: str) -> bool:
        return os.path.isdir(self._at(path))

    def _has(self, path: str) -> bool:
        return os.path.lexists(self._at(path))

    def _document(self, folder: str) -> dict[str, Any] | None:
        return read_zarr_json(self._at(folder))

    def _table_look(self, path: str, spec: TableSpec) -> TableLook:
        identity = self._identities[path]
        return TableLook(path, TableFiles(self._at(path), spec, root=self.where, identity=identity))

    def _hidden(self, path: str) -> None:
        try:
            check_hidden(self._document(path), self._at(path))
        except StoreError as error:
            self._note(str(error), "remove the file: the next writer creates it again")
        super()._hidden(path)
        for name in HiddenFiles(self.where).damaged_arrays() if path == CACHE else ():
            self._note(f"the derived array {name!r} is damaged", "nothing: it is ignored")

    def _list(self, names: Iterable[str]) -> None:
        tables = TableList(self.where)
        paths = sorted({*filter(None, map(listed_path, names)), *self._identities})
        lost = tables.lost(paths)
        for path in paths:
            try:
                if path in lost:
                    raise lost_table(path, where=self.where)
                self._listed(tables, path)
            except StoreError as error:
                is_damaged = path not in self._identities and self._has(path)
                if os.path.lexists(tables.entry(path)) and not is_damaged:
                    self.entries.append(path)
                self._damage(path, str(error), self._list_again)

    def _listed(self, tables: TableList, path: str) -> None:
        identity, found = tables.identity(path), self._identities.get(path)
        metadata = f"{path}/{_METADATA}"
        if identity is None and self._has(metadata):
            if tables.identity(path) is None and is_old(self._at(metadata)):
                self._note(f"the table {path!r} is not listed: its creation was interrupted", NEXT_WRITER)
        elif None not in (identity, found) and identity != found:
            record = self._attributes_of(path)
            if record and identity_of(record) == found and tables.identity(path) == identity:
                self._damage(path, OTHER_TABLE, _PUT_BACK_TABLE)

    def _scratch(self, path: str) -> None:
        if is_old(self._at(path)):
            text = f"{self._at(path)!r}: left by a creation or removal that was interrupted"
            self._note(text, NEXT_WRITER)


@final
class TableLook:
    """Check of one table."""

    def __init__(self, path: str, files: TableFiles) -> None:
        self.files = files
        self.tally = Tally(tables=1, pending_rows=files.spec.num_rows)
        self.damaged: dict[int, tuple[Finding, ...]] = {}
        """Findings of the damaged chunks, by chunk."""
        self.strangers: list[str] = []
        """Files of chunks outside the grid, and commit logs that are unreadable or contain foreign records."""
        self.path = path
        self._logs = CommitLogs(files.commits, files.identity)
        self._look = ChunkLook(path, files, self._logs)

    def findings(self) -> list[Finding]:
        """Check the table once and return all findings. Lists the folders before reading the logs, as readers do."""
        found: list[Finding] = []
        chunks: set[int] = set()
        try:
            for column in self.files.columns:
                found += self._column(column, chunks)
            found += self._stage(chunks)
            found += self._commit_logs()
        except StoreError as error:
            return [*found, Finding("damage", self.path, str(error), "put the folder back, readable")]
        chunks |= {chunk for chunk in self._logs.latest if 0 <= chunk < self.files.num_chunks}
        for chunk in sorted(chunks):
            found += self._chunk(chunk)
        return found

    def _chunk(self, chunk: int) -> tuple[Finding, ...]:
        state = self._look.settled(chunk)
        self.tally.done_rows += int(state.done.sum())
        self.tally.pending_rows -= int(state.done.sum())
        if state.visible and not state.damaged:
            self.tally.chunks += 1
            self.tally.bytes += state.bytes
        if state.damaged:
            self.damaged[chunk] = state.findings
        return state.findings

    def _column(self, column: ColumnFiles, chunks: set[int]) -> Iterator[Finding]:
        own = {_METADATA, STAGE, COMMITS, SET_ASIDE} if column is self.files.columns[0] else {_METADATA}
        for name in sorted(set(names_in(column.folder)) - own):
            chunk = column.chunk_of(name)
            if chunk is None:
                yield Finding("note", self.path, f"{name!r} is not a chunk", _NOT_OURS, column=column.name)
            elif chunk < self.files.num_chunks:
                chunks.add(chunk)
            elif not self.files.rows_on_disk(chunk):  # otherwise the table has grown during the check
                self.strangers.append(column.visible(chunk))
                text = f"{name}: the table has {self.files.num_chunks} chunks"
                yield Finding("damage", self.path, text, REPAIR, column=column.name, chunk=chunk)

    def _stage(self, chunks: set[int]) -> Iterator[Finding]:
        for name in sorted(names_in(self.files.stage)):
            number = re.match(r"[0-9]{1,18}", name)
            chunk = -1 if number is None else int(number[0])
            known = [os.path.basename(path) for path in self.files.staged_paths(chunk)]
            if name in known and chunk < self.files.num_chunks:
                chunks.add(chunk)
            else:
                yield Finding("note", self.path, f"{STAGE}/{name!r} belongs to no chunk", _NOT_OURS)

    def _commit_logs(self) -> Iterator[Finding]:
        for name in sorted(names_in(self.files.commits)):
            if not name.endswith(".log"):
                yield Finding("note", self.path, f"{COMMITS}/{name!r} is not a commit log", _NOT_OURS)
        for name, error in self._logs.poll_each().items():
            self.strangers.append(f"{self.files.commits}/{name}")
            yield Finding("damage", self.path, str(error), REPAIR)
        for name, lines in self._logs.foreign.items():
            self.strangers.append(f"{self.files.commits}/{name}")
            yield Finding("damage", self.path, f"commit log {name}: {lines} records of another table", REPAIR)
        for name, lines in self._logs.damaged.items():
            text = f"commit log {name}: {lines} of its lines do not match their checksum"
            yield Finding(
                "note", self.path, text, "nothing: a chunk without its record is reported separately"
            )
