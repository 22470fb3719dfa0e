"""Read-only check of a remote store."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Literal, final

from trak_lite.core.checksums import crc32c
from trak_lite.errors import StoreError, UnsupportedStoreError
from trak_lite.store._check_report import AGAIN, Finding, Report, Tally
from trak_lite.store._columns import TableSpec
from trak_lite.store.disk.check import NEXT_WRITER, OTHER_TABLE, StoreLook, missing_store
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.listing import TABLES, decode_entry, entry_name, listed_path, lost_table
from trak_lite.store.disk.records import CommitRecord
from trak_lite.store.remote.index import decode_log
from trak_lite.store.remote.objects import AbstractObjects

_METADATA = "zarr.json"
_REMOVE = f"remove it, then {AGAIN}"


def check_remote(objects: AbstractObjects, *, repair: bool) -> Report:
    """Fetch every chunk of a remote store and compare it with its commit record; errors as of ``check_store``."""
    if repair:
        raise UnsupportedStoreError(
            f"{objects.url} cannot be repaired in an object store, where nothing can be renamed. Check it without "
            "repairing, and remove the objects that the report names, or copy the store to a local disk."
        )
    if objects.get(_METADATA) is None:
        raise missing_store(objects.url)
    look = RemoteLook(objects)
    look.look()
    return Report(objects.url, tuple(look.findings), look.tally)


@final
class RemoteLook(StoreLook):
    """Check of a store in an object store, from a single listing of its objects."""

    _list_again = "restore it from a backup"

    def __init__(self, objects: AbstractObjects) -> None:
        super().__init__(objects.url, objects)
        self._objects = objects
        self._sizes = objects.sizes("")
        self._folders: dict[str, set[str]] = {"": set()}
        for key in self._sizes:
            while key:
                folder, _, name = key.rpartition("/")
                self._folders.setdefault(folder, set()).add(name)
                key = folder
        keys = (key for key in self._sizes if f"/{key}".endswith(f"/{_METADATA}"))
        self._get = objects.get_many(keys).get

    def _names(self, folder: str) -> Iterable[str]:
        return self._folders.get(folder, ())

    def _is_link(self, path: str) -> bool:
        return False

    def _is_folder(self, path: str) -> bool:
        return path in self._folders

    def _has(self, path: str) -> bool:
        return path in self._sizes or path in self._folders

    def _scratch(self, path: str) -> None:
        self._stray(path)

    def _table_look(self, path: str, spec: TableSpec) -> RemoteTableLook:
        files = TableFiles(path, spec, root=self.where, identity=self._identities[path])
        return RemoteTableLook(path, files, self._objects, self._sizes)

    def _list(self, names: Iterable[str]) -> None:
        paths = sorted(filter(None, map(listed_path, names)))
        for path in sorted(self._identities.keys() - set(paths)):
            unlisted = f"the table {path!r} is not listed: its creation was interrupted, or is under way"
            self._note(unlisted, NEXT_WRITER)
        texts = self._objects.get_many(f"{TABLES}/{entry_name(path)}" for path in paths)
        for path, (key, text) in zip(paths, texts.items(), strict=True):
            if text is None:
                continue  # dropped since it was listed
            try:
                if self._objects.get(f"{path}/{_METADATA}") is None and self._objects.get(key) is not None:
                    raise lost_table(path, where=self.where)
                identity = decode_entry(text, path, where=self._at(key))
            except StoreError as error:
                self._damage(path, str(error), f"restore it from a backup, or remove {key}")
                continue
            if self._identities.get(path, identity) != identity:
                self._damage(path, OTHER_TABLE, "put the right objects back")


@final
class RemoteTableLook:
    """Check of one table."""

    def __init__(self, path: str, files: TableFiles, objects: AbstractObjects, sizes: dict[str, int]) -> None:
        self.tally = Tally(tables=1, pending_rows=files.spec.num_rows)
        self._path, self._files, self._objects, self._sizes = path, files, objects, sizes
        self._found: list[Finding] = []

    def findings(self) -> list[Finding]:
        """Check the table once and return all findings."""
        files, latest = self._files, self._records()
        for chunk in range(files.num_chunks):
            present = [column for column in files.columns if column.visible(chunk) in self._sizes]
            record = latest.pop(chunk, None)
            if record is None:
                if present:
                    text = "put and not committed: a writer is running, or was killed"
                    self._add("note", text, "nothing: the next writer finishes it", chunk)
            elif len(present) < len(files.columns):
                text = "committed once; objects of it were removed"
                self._add("note", text, AGAIN, chunk)
            elif faults := list(self._faults(record)):
                for column, text in faults:
                    remedy = f"remove {column.visible(chunk)}, then {AGAIN}"
                    self._add("damage", text, remedy, chunk, column.name)
            else:
                rows = files.rows_in(chunk)
                self.tally.add(Tally(0, 1, sum(column.chunk_bytes for column in files.columns), rows, -rows))
        for chunk in sorted(latest):
            text = f"a commit record of chunk {chunk}; the table has {files.num_chunks}"
            self._add("damage", text, "remove the record")
        for key in sorted(key for key in self._sizes if key.startswith(f"{files.folder}/")):
            folder, _, name = key.rpartition("/")
            chunks = [column.chunk_of(name) for column in files.columns if folder == column.folder]
            is_chunk = any(chunk is not None and chunk < files.num_chunks for chunk in chunks)
            other = not any(key.startswith(f"{column.folder}/") for column in files.columns)  # noted as such
            if not (is_chunk or other or folder == files.commits or name == _METADATA):
                text = f"{key!r} belongs to no table"
                self._found.append(Finding("note", None, text, "remove it if it is not needed"))
        return self._found

    def _records(self) -> dict[int, CommitRecord]:
        latest: dict[int, CommitRecord] = {}
        keys = [key for key in self._sizes if key.startswith(f"{self._files.commits}/")]
        for key, text in self._objects.get_many(keys).items():
            records, damaged = decode_log(text or b"")
            if damaged or not records:
                self._add("damage", f"{key} is not a commit record, or is damaged", _REMOVE)
            for record in records:
                if record.table != self._files.identity:
                    self._add("damage", f"{key} is a commit record of another table", _REMOVE)
                elif record.chunk not in latest or latest[record.chunk].generation < record.generation:
                    latest[record.chunk] = record
        return latest

    def _faults(self, record: CommitRecord) -> Iterator[tuple[ColumnFiles, str]]:
        """Yield the columns of a committed chunk that contradict its record, and how."""
        rows = self._files.rows_in(record.chunk)
        if record.rows != rows:
            yield self._files.columns[0], f"committed with {record.rows} rows, the chunk has {rows}"
            return
        for column in self._files.columns:
            key = column.visible(record.chunk)
            checksum = functools.partial(self._checksum, key)
            fault = record.problem(column.name, self._sizes[key], column.chunk_bytes, checksum)
            if fault is not None:
                yield column, fault

    def _checksum(self, key: str) -> int:
        return crc32c(self._objects.get(key) or b"")

    def _add(
        self,
        level: Literal["damage", "note"],
        text: str,
        next_step: str,
        chunk: int | None = None,
        column: str | None = None,
    ) -> None:
        rows = None if chunk is None else self._files.rows_of(chunk)
        self._found.append(Finding(level, self._path, text, next_step, chunk, rows, column))
