"""Read-only, lock-free check of a whole store, on a disk or in an object store.

It can run while writers are active, whose unfinished rows are not reported, and on a store that is too damaged to open.
This module checks the folder tree, the metadata and unknown files; ``check_table`` checks the tables of a disk, and
``remote.check`` those of an object store.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, final

from trak_lite.core.files import named_errors, rename
from trak_lite.core.folders import is_old, make_folders, names_in
from trak_lite.errors import ManifestMismatchError, MissingStoreError, ReadOnlyStoreError, StoreError
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.store._check_report import Finding, Report, SetAside, Tally
from trak_lite.store._columns import TableSpec
from trak_lite.store._names import is_name
from trak_lite.store.disk.check_table import NOT_OURS, TableLook, set_aside_name
from trak_lite.store.disk.chunk_files import COMMITS, SET_ASIDE, TableFiles
from trak_lite.store.disk.documents import (
    DROPPED,
    attributes_from_json,
    check_array,
    check_hidden,
    identity_of,
    manifest_from_json,
    misnamed,
    read_document,
    read_record,
    refuse_undescribed,
    sizes_under_way,
    store_identifier,
    table_from_json,
)
from trak_lite.store.disk.entries import (
    ARRAY_SUFFIX,
    CACHE,
    ENTRIES,
    Files,
    HiddenFiles,
    Lock,
    StoreEntries,
    decode_array,
    entry_files,
    entry_of,
)
from trak_lite.store.disk.listing import TABLES, TableList, listed_path, lost_table

OTHER_TABLE = "another table than the one that the store lists under this path"
_METADATA = "zarr.json"
_SCRATCH = re.compile(r".+\.safetensors\.new-[0-9a-f]{32}")
_LEFT = re.compile(r"\.(new|dropped-.+)-[0-9a-f]{32}")
NEXT_WRITER = "nothing: the next writer does it"
_PUT_BACK_TABLE = "put the right folder back, or remove this one and check with --repair"
_PUT_BACK = "replace it by the folder"
_SCORES_OF_RUN = "scores.zarr"
_RESTORE = "restore zarr.json from a backup, or use another path"


def missing_store(root: str) -> MissingStoreError:
    """Return the error for a path without a store; of other things at the path it says what they are."""
    if os.path.isdir(f"{root}/{TABLES}"):
        return MissingStoreError(lost_metadata(root))
    what = "no zarr.json in it. Check the path, or featurize first."
    if os.path.isfile(root):
        what = "it is a file, and a store is a folder. Name that folder; a config names it as its path."
    elif os.path.isdir(f"{root}/{_SCORES_OF_RUN}"):
        what = f"it is the folder of a run. Its scores are in {root}/{_SCORES_OF_RUN}."
    return MissingStoreError(f"There is no store at {root}: {what}")


def lost_metadata(where: str) -> str:
    """Return the message for a store whose own ``zarr.json`` is gone, and whose rows may all be there."""
    return (
        f"{where} is a store without its zarr.json: its list of tables ({TABLES}) is there. Nothing was written. "
        "Restore zarr.json from a backup, or use another path. trak-lite check lists what is there."
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
        self._get: Callable[[str], bytes | None] = files.get
        """Reads a ``zarr.json``."""
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
            record = read_record(self._get, "", where=self.where)
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

    def _document(self, folder: str) -> dict[str, Any] | None:
        return read_document(self._get, folder, where=self.where)

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

    def _check_entries(self) -> None:
        """Compare the entries with their marks and with the store."""
        entries = self._entries()
        try:
            wrong = dict(entries.problems())
        except StoreError as error:
            self._damage(None, f"the entries were not checked: {error}", _PUT_BACK)
            return
        self.wrong_entries = list(wrong)
        for name, text in wrong.items():
            self._damage(None, f"the entry {name!r} {text}", entries.remedy)

    def _entries(self) -> StoreEntries:
        store = None if self.record is None else store_identifier(self.record)
        return StoreEntries(self._files, self.where, store, self._lock)

    def _folder(self, path: str) -> None:
        record = read_record(self._get, path, where=self.where)
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
                document = self._document(f"{path}/{array.name}")
                check_array(document, where, array, spec, under_way=sizes_under_way(record))
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
        self._strays.append(Finding("note", None, f"{path!r} belongs to no table", NOT_OURS))


@final
class DiskLook(StoreLook):
    """Check of a store in a local folder."""

    def __init__(self, root: str) -> None:
        super().__init__(root, HiddenFiles(root), TableList(root).locked)
        self.tables: dict[str, TableLook] = {}  # type: ignore[assignment]
        self.entries: list[str] = []
        """Tables whose list entry a repair sets aside: damaged entries, and those of lost tables."""
        self.look()

    def repair(self) -> list[SetAside]:
        """Set aside what is damaged; return it. The lists of this look are those of before."""
        moved = self._repair_list()
        for table in self.tables.values():
            table.repair()
        return moved + [part for table in self.tables.values() for part in table.set_aside]

    def _repair_list(self) -> list[SetAside]:
        """Set aside damaged entries of the list of tables, those of lost tables and wrong arrays; return them."""
        root, tables = self.where, TableList(self.where)
        with named_errors("Repairing the list of tables in", root):
            if self.list_damaged:
                tables.make()
            # Whether an entry belongs to the store is known only with the store's own metadata.
            wrong = [] if self.record is None else self.wrong_entries
            if not self.entries and not wrong:
                return []
            folder = f"{tables.folder}/{SET_ASIDE}/{set_aside_name('tables')}"
            with tables.locked():
                wrong = [
                    name for name, _ in self._entries().problems(wrong)
                ]  # some may be stored again since
                aside = [*self.entries, *(f"{ENTRIES}/{name}" for name in wrong)]
                if not aside:
                    return []
                make_folders(folder)
                tables.set_aside(aside, folder)
                for name in wrong:
                    with contextlib.suppress(FileNotFoundError):  # removed without the store
                        file = entry_files(name)[0]
                        rename(f"{root}/{file}", f"{folder}/{os.path.basename(file)}")
        return [SetAside(path, None, (), folder) for path in aside]

    def _names(self, folder: str) -> list[str]:
        return names_in(self._at(folder))

    def _is_link(self, path: str) -> bool:
        return os.path.islink(self._at(path))

    def _is_folder(self, path: str) -> bool:
        return os.path.isdir(self._at(path))

    def _has(self, path: str) -> bool:
        return os.path.lexists(self._at(path))

    def _table_look(self, path: str, spec: TableSpec) -> TableLook:
        identity = self._identities[path]
        return TableLook(path, TableFiles(self._at(path), spec, root=self.where, identity=identity))

    def _hidden(self, path: str) -> None:
        try:
            check_hidden(self._document(path), self._at(path))
        except StoreError as error:
            self._note(str(error), "remove the file: the next writer creates it again")
        super()._hidden(path)
        arrays = [name for name in self._names(path) if path == CACHE and name.endswith(ARRAY_SUFFIX)]
        for name in sorted(arrays):
            try:
                text = self._files.get(f"{path}/{name}") or b""
            except StoreError:
                text = b""
            if decode_array(text, name.removesuffix(ARRAY_SUFFIX).replace("%", "/")) is None:
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
                self._damage(path, str(error), _PUT_BACK_TABLE if is_damaged else self._list_again)

    def _listed(self, tables: TableList, path: str) -> None:
        identity, recorded = tables.identity(path), self._identities.get(path)
        metadata = f"{path}/{_METADATA}"
        if identity is None and self._has(metadata):
            if tables.identity(path) is None and is_old(self._at(metadata)):
                self._note(f"the table {path!r} is not listed: its creation was interrupted", NEXT_WRITER)
        elif None not in (identity, recorded) and identity != recorded:
            record = read_record(self._get, path, where=self.where)
            if record and identity_of(record) == recorded and tables.identity(path) == identity:
                self._damage(path, OTHER_TABLE, _PUT_BACK_TABLE)

    def _scratch(self, path: str) -> None:
        if is_old(self._at(path)):
            text = f"{self._at(path)!r}: left by a creation or removal that was interrupted"
            self._note(text, NEXT_WRITER)


def check_folder(folder: str | os.PathLike[str], *, repair: bool) -> Report:
    """Check and optionally repair a disk store; see :func:`~trak_lite.store.check_store`."""
    root = os.path.realpath(folder)
    look = DiskLook(root)
    if not repair:
        return Report(root, tuple(look.findings), look.tally)
    if not os.access(root, os.W_OK | os.X_OK):
        raise ReadOnlyStoreError(
            f"{root} cannot be written, so nothing was repaired. Make the folder writable."
        )
    moved = look.repair()
    busy = [finding for table in look.tables.values() for finding in table.busy]
    if moved or look.list_damaged or look.wrong_entries:
        look = DiskLook(root)
    return Report(root, (*look.findings, *busy), look.tally, tuple(moved))
