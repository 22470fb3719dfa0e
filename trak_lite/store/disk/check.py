"""Read-only, lock-free check of a whole disk store.

It can run while writers are active, whose unfinished rows are not reported, and on a store that is too damaged to open.
This module checks the folder tree, the metadata and unknown files; ``check_chunk`` checks the chunks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from trak_lite.errors import ManifestMismatchError, MissingStoreError, StoreError
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.store._check_report import Finding, Tally
from trak_lite.store._names import is_name
from trak_lite.store.disk.check_chunk import REPAIR, ChunkLook
from trak_lite.store.disk.chunk_files import COMMITS, SET_ASIDE, STAGE, ColumnFiles, TableFiles
from trak_lite.store.disk.documents import identity_of
from trak_lite.store.disk.entries import CACHE, ENTRIES, HiddenFiles, disk_entries, entry_of
from trak_lite.store.disk.folders import is_old, names_in
from trak_lite.store.disk.listing import TABLES, TableList, listed_path, lost_table
from trak_lite.store.disk.metadata import (
    attributes_from_json,
    check_array,
    check_hidden,
    manifest_from_json,
    misnamed,
    read_attributes,
    read_zarr_json,
    refuse_undescribed,
    sizes_under_way,
    table_from_json,
)
from trak_lite.store.disk.records import CommitLogs

__all__ = ["StoreLook", "TableLook", "missing_store"]

_METADATA = "zarr.json"
_SCRATCH = re.compile(r".+\.safetensors\.new-[0-9a-f]{32}")
_LEFT = re.compile(r"\.(new|dropped-.+)-[0-9a-f]{32}")
_LIST_AGAIN = "check with --repair, which lists the tables that exist"
_NEXT_WRITER = "nothing: the next writer does it"
_PUT_BACK_TABLE = "put the right folder back, or remove this one and check with --repair"
_NOT_OURS = "remove it if it is not needed"
_PUT_BACK = "replace it by the folder"
_RESTORE = "restore zarr.json from a backup, or use another path"


def missing_store(root: str) -> MissingStoreError:
    """Return the error for a path without a store."""
    return MissingStoreError(
        f"There is no store at {root}: no zarr.json in it. Check the path, or featurize first."
    )


@final
@dataclass(slots=True)
class StoreLook:
    """Check of a store: the folder tree, the metadata and all tables."""

    root: str
    findings: list[Finding] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    tables: dict[str, TableLook] = field(default_factory=dict)
    """Checks of the tables with valid metadata, by path."""
    entries: list[str] = field(default_factory=list)
    """Tables whose list entry a repair sets aside: damaged entries, and those of lost tables."""
    list_damaged: bool = False
    """Whether the folder of the list must be recreated."""
    record: dict[str, Any] | None = None
    """Record of the store; ``None`` if its metadata is damaged."""
    wrong_entries: list[str] = field(default_factory=list)
    """Entries of the store (arrays, not tables) that are not as they were written."""
    _identities: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, root: str) -> StoreLook:
        """Check a store.

        Raises:
            MissingStoreError: If there is neither store metadata nor a table.
            ManifestMismatchError: If the store has the format of another trak_lite version.
        """
        look = cls(root)
        look._root()
        if os.path.isdir(root):
            folder = f"{root}/{TABLES}"
            # Read the list before the folders, so that the folder of each listed table is visited.
            names = names_in(folder) if os.path.isdir(folder) and not os.path.islink(folder) else []
            look._group(root, ())
            if not os.path.islink(folder):  # reported as a link
                look._list(names)
                look._entries()
        if not os.path.lexists(f"{root}/{_METADATA}") and not look.tables:
            raise missing_store(root)
        for table in look.tables.values():
            look.findings += table.findings()
            look.tally.add(table.tally)
        look._leftovers()
        return look

    def _leftovers(self) -> None:
        """Report intermediate tables that are no longer needed because the tables computed from them are complete."""
        for path, table in self.tables.items():
            until = self.tables.get(str(table.files.attributes().get(NEEDED_UNTIL)))
            if until is not None and not until.tally.pending_rows:
                text = f"left over: it was needed until {until.path} was complete"
                self.findings.append(Finding("note", path, text, "nothing: the next run drops it"))

    def _root(self) -> None:
        try:
            record = read_attributes(self.root)
        except StoreError as error:
            self._damage(None, str(error), _RESTORE)
            return
        if record is None:
            self._damage(None, f"{self.root}/{_METADATA} is missing", _RESTORE)
            return
        if "columns" in record:
            raise MissingStoreError(
                f"{self.root} is a table inside a store. Give the path of the store itself."
            )
        try:
            manifest_from_json(record, self.root)
            self.record = record
        except ManifestMismatchError:
            raise  # an unknown format cannot be checked
        except StoreError as error:
            self._damage(None, str(error), _RESTORE)

    def _group(self, folder: str, parts: tuple[str, ...]) -> None:
        for name in sorted(names_in(folder)):
            inside = (*parts, name)
            try:
                self._entry(f"{folder}/{name}", inside)
            except StoreError as error:
                self._damage("/".join(inside), str(error), _RESTORE)

    def _entry(self, path: str, inside: tuple[str, ...]) -> None:
        name = inside[-1]
        if name == _METADATA:
            return  # already read by the caller
        if os.path.islink(path):
            self._damage("/".join(inside), "a symbolic link, which is not followed", _PUT_BACK)
        elif inside in ((CACHE,), (ENTRIES,)):
            self._hidden(path, name)
        elif inside == (TABLES,):
            pass  # checked last
        elif os.path.isdir(path) and is_name(name):
            self._folder(path, inside)
        elif not name.startswith("."):
            if os.path.lexists(f"{path}/{_METADATA}"):
                raise misnamed(path)  # its rows would be missed silently
            self._stray(path)
        else:
            self._stray(path)

    def _list(self, names: Sequence[str]) -> None:
        """Compare the names in the folder of the list of tables with the tables found."""
        tables = TableList(self.root)
        try:
            check_hidden(read_zarr_json(tables.folder), tables.folder)
        except StoreError as error:
            self.list_damaged = True
            self._damage(None, f"{error} The list of tables is there", _LIST_AGAIN)
        for name in sorted(names):
            if _LEFT.fullmatch(name):
                self._scratch(f"{tables.folder}/{name}")
            elif name != _METADATA and listed_path(name) is None is entry_of(name) and name != SET_ASIDE:
                self._stray(f"{tables.folder}/{name}")
        paths = sorted({*filter(None, map(listed_path, names)), *self._identities})
        lost = tables.lost(paths)
        for path in paths:
            try:
                if path in lost:
                    raise lost_table(path, where=self.root)
                self._listed(tables, path)
            except StoreError as error:
                is_damaged = path not in self._identities and os.path.lexists(f"{self.root}/{path}")
                if os.path.lexists(tables.entry(path)) and not is_damaged:
                    self.entries.append(path)
                self._damage(path, str(error), _LIST_AGAIN)

    def _listed(self, tables: TableList, path: str) -> None:
        identity, found = tables.identity(path), self._identities.get(path)
        if identity is None and os.path.lexists(f"{self.root}/{path}/{_METADATA}"):
            if tables.identity(path) is None and is_old(f"{self.root}/{path}/{_METADATA}"):
                self._note(f"the table {path!r} is not listed: its creation was interrupted", _NEXT_WRITER)
        elif None not in (identity, found) and identity != found:
            record = read_attributes(f"{self.root}/{path}") or {}
            if record and identity_of(record) == found and tables.identity(path) == identity:
                self._damage(
                    path, "another table than the one that the store lists under this path", _PUT_BACK_TABLE
                )

    def _hidden(self, path: str, folder: str) -> None:
        """Check the folder of cached arrays or of entries; the entries themselves are checked last."""
        try:
            check_hidden(read_zarr_json(path), path)
        except StoreError as error:
            self._note(str(error), "remove the file: the next writer creates it again")
        for name in sorted(names_in(path)):
            if _SCRATCH.fullmatch(name):
                self._scratch(f"{path}/{name}")
            elif folder == ENTRIES and name != _METADATA and entry_of(name) is None:
                self._stray(f"{path}/{name}")
        for name in HiddenFiles(self.root).damaged_arrays() if folder == CACHE else ():
            self._note(f"the derived array {name!r} is damaged", "nothing: it is ignored")

    def _entries(self) -> None:
        """Compare the entries with their marks and with the store."""
        entries = disk_entries(self.root, self.record)
        try:
            wrong = dict(entries.problems())
        except StoreError as error:
            self._damage(None, f"the entries were not checked: {error}", _PUT_BACK)
            return
        self.wrong_entries = list(wrong)
        for name, text in wrong.items():
            self._damage(None, f"the entry {name!r} {text}", entries.remedy(text))

    def _scratch(self, path: str) -> None:
        if is_old(path):
            self._note(f"{path!r}: left by a creation or removal that was interrupted", _NEXT_WRITER)

    def _folder(self, path: str, inside: tuple[str, ...]) -> None:
        record = read_attributes(path)
        if record is None:
            self._without_metadata(path, inside)
        elif "columns" in record:
            self._table(path, inside, record)
        else:
            if record:
                text = f"{path}/{_METADATA} describes neither a table nor a group of tables"
                self._damage("/".join(inside), text, _RESTORE)
            self._group(path, inside)

    def _without_metadata(self, path: str, inside: tuple[str, ...]) -> None:
        names = names_in(path)
        links = [name for name in names if os.path.islink(f"{path}/{name}")]
        if any(os.path.lexists(f"{path}/{name}/{_METADATA}") for name in names):
            self._damage("/".join(inside), f"{path}/{_METADATA} is missing", _RESTORE)
            if not any(os.path.isdir(f"{path}/{name}/{COMMITS}") for name in names):
                self._group(path, inside)  # a group of tables, not a table
        elif links:  # links may replace tables
            for name in links:
                self._damage("/".join((*inside, name)), "a symbolic link, which is not followed", _PUT_BACK)
        elif os.path.isdir(path):  # False if it has just been dropped
            self._stray(path)

    def _table(self, path: str, inside: tuple[str, ...], record: dict[str, Any]) -> None:
        table = "/".join(inside)
        try:
            # if the store's metadata is damaged (already reported), trust the table's
            origin = str(self.record["origin"] if self.record else record.get("store"))
            spec = table_from_json(record, table, origin, where=f"{path}/{_METADATA}")
            self._identities[table] = identity_of(record)
            attributes_from_json(record, where=f"{path}/{_METADATA}")
            refuse_undescribed(path, spec)
        except StoreError as error:
            self._damage(table, str(error), _RESTORE)
            return
        for name in sorted(set(names_in(path)) - {_METADATA, *(array.name for array in spec.arrays)}):
            self._stray(f"{path}/{name}")
        before = len(self.findings)
        for array in spec.arrays:
            try:
                found = read_zarr_json(f"{path}/{array.name}")
                check_array(found, path, array, spec, under_way=sizes_under_way(record))
            except StoreError as error:
                self._damage(table, str(error), _RESTORE, column=array.name)
        if len(self.findings) == before:
            files = TableFiles(path, spec, root=self.root, identity=self._identities[table])
            self.tables[table] = TableLook(table, files)
            for size in sizes_under_way(record):
                text = f"growing it to {size} rows was interrupted, or is under way"
                self.findings.append(Finding("note", table, text, "grow it again, or leave it as it is"))
        else:  # with a wrong shape, valid chunks would look damaged and be set aside
            text = "its chunks were not checked: its metadata must be restored first"
            self.findings.append(Finding("note", table, text, "check again afterwards"))

    def _damage(self, table: str | None, text: str, next_step: str, *, column: str | None = None) -> None:
        self.findings.append(Finding("damage", table, text, next_step, column=column))

    def _note(self, text: str, next_step: str) -> None:
        self.findings.append(Finding("note", None, text, next_step))

    def _stray(self, path: str) -> None:
        self._note(f"{os.path.relpath(path, self.root)!r} belongs to no table", _NOT_OURS)


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
