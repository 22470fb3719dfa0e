"""The list of a store's tables: one entry per table in ``.tables/``, with the table's path and identity.

A table is listed after its folder is published and before its first row is written; dropping it also removes the
entry. A listed table without a folder is therefore lost, which is reported as an error. A table that is not listed
results from an interrupted creation; it is valid, and the next writer lists it.

``.tables/`` also holds folders that are being created or removed (``.new-*``, ``.dropped-*``). Its ``zarr.json``
describes an empty array, so zarr tools do not list its contents.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import final

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    file_size,
    locked_file,
    make_folder,
    named_errors,
    read_file,
    remove_file,
    remove_tree,
    rename,
    replace_file,
    stamp,
    sync_folder,
)
from trak_lite.core.folders import building, is_free, names_in
from trak_lite.core.json_text import parse_json
from trak_lite.errors import CorruptStoreError
from trak_lite.store._names import is_name
from trak_lite.store.disk.documents import encode_document, hidden_document

TABLES = ".tables"
_METADATA = "zarr.json"
_NEW, _DROPPED = ".new-", ".dropped-"
_MOST_BYTES = 4096


def entry_name(path: str) -> str:
    """Return the file name of a table's entry; unique because no table name contains ``%``."""
    return path.replace("/", "%")


def listed_path(name: str) -> str | None:
    """Return the table path of an entry's file name, or ``None`` if it is not an entry."""
    return name.replace("%", "/") if all(map(is_name, name.split("%"))) else None


def encode_entry(path: str, identity: str) -> bytes:
    """Return the content of a table's entry: JSON, a tab, the CRC-32C of the JSON in hex, a newline."""
    body = json.dumps({"table": path, "identity": identity}, separators=(",", ":")).encode()
    return body + b"\t%08x\n" % crc32c(body)


def decode_entry(text: bytes, path: str, *, where: str) -> str:
    """Return the identity in a table's entry; CorruptStoreError if it is damaged or belongs to another table."""
    body, _, checksum = text.rpartition(b"\t")
    try:
        entry = parse_json(body) if checksum == b"%08x\n" % crc32c(body) else None
        if isinstance(entry, dict) and entry["table"] == path and isinstance(entry["identity"], str):
            return entry["identity"]
    except (ValueError, KeyError, RecursionError):
        pass  # valid checksum, but not an entry
    raise CorruptStoreError(
        f"{where} is not the entry of the table {path!r} in the list of the store: it is damaged, or belongs to "
        "another table. Restore it from a backup, or call check_store(path, repair=True), which lists the table "
        "again (in an object store, remove it)."
    )


def lost_table(path: str, *, where: str) -> CorruptStoreError:
    """Return the error for a table that is listed but missing."""
    return CorruptStoreError(
        f"The table {path!r} of {where} is lost: the store lists it, but {path}/{_METADATA} is missing. Restore the "
        "folder from a backup. To continue without its rows, remove what is left of it and call check_store(path, "
        f"repair=True) (in an object store, remove {TABLES}/{entry_name(path)} too), then featurize again."
    )


@final
class TableList:
    """The list of tables of one disk store."""

    def __init__(self, root: str) -> None:
        self.folder = f"{root}/{TABLES}"
        self._root = root

    def require(self) -> None:
        """Raise CorruptStoreError if the list is missing; without it, lost tables would go unnoticed."""
        with named_errors("Reading", self.folder):
            size = file_size(f"{self.folder}/{_METADATA}")
        if size is None:
            raise CorruptStoreError(
                f"{self.folder}/{_METADATA} is missing: the list of the store's tables. Restore the folder from a "
                "backup, or call check_store(path, repair=True), which lists the tables that exist."
            )

    def identity(self, path: str) -> str | None:
        """Return the identity of a listed table, ``None`` if it is not; CorruptStoreError if the entry is damaged."""
        entry = self.entry(path)
        with named_errors("Reading", entry):
            try:
                text = read_file(entry, most=_MOST_BYTES, remedy="Call check_store(path, repair=True).")
            except FileNotFoundError:
                return None
        return decode_entry(text, path, where=entry)

    def entry(self, path: str) -> str:
        """Return the path of the file of a table's entry."""
        return f"{self.folder}/{entry_name(path)}"

    def lost(self, paths: Iterable[str]) -> set[str]:
        """Return the tables that are listed but missing; takes no lock, and is correct during drops and creations."""
        stamps = {
            path: entry for path in paths if (entry := stamp(self.entry(path))) and not self._is_there(path)
        }
        names = names_in(self.folder) if stamps else ()
        dropped = {name[len(_DROPPED) : -33] for name in names if name.startswith(_DROPPED)}
        # An entry is created after its folder, and removed after the folder is renamed but before it is removed. While
        # the same entry exists, the folder must be in one of the two places, or the table is lost.
        return {
            path
            for path, entry in stamps.items()
            if entry_name(path) not in dropped and stamp(self.entry(path)) == entry
        }

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the list; waits for other holders, which release it quickly."""
        with contextlib.ExitStack() as stack:
            with named_errors("Locking", self._root):
                stack.enter_context(locked_file(f"{self._root}/{_METADATA}"))
            yield

    def add(self, path: str, identity: str) -> bool:
        """Add a table whose folder is published; return ``False`` if the table was dropped meanwhile."""
        with self.locked():
            if not self._is_there(path):
                return False
            entry = encode_entry(path, identity)
            replace_file(self.entry(path), entry, scratch=self._new(), step="entry_written")
        failpoint("table_listed")
        return True

    def drop(self, path: str) -> None:
        """Rename a table's folder, if it exists, and delete its entry; see :meth:`remove_dropped`."""
        folder = f"{self._root}/{path}"
        with self.locked():
            with contextlib.suppress(FileNotFoundError):  # dropped by another process, or lost
                rename(folder, f"{self.folder}/{_DROPPED}{entry_name(path)}-{uuid.uuid4().hex}")
                failpoint("table_renamed")
                sync_folder(os.path.dirname(folder))
                sync_folder(self.folder)
            self._unlist(path)

    def dropped(self, path: str) -> list[str]:
        """Return the renamed folders of a dropped table."""
        prefix = f"{_DROPPED}{entry_name(path)}-"
        names = (name for name in names_in(self.folder) if name.startswith(prefix))
        return [f"{self.folder}/{name}" for name in names if len(name) == len(prefix) + 32]

    def remove_dropped(self, path: str) -> None:
        """Delete the renamed folders of a dropped table."""
        for folder in self.dropped(path):
            _remove(folder)

    def drop_group(self, path: str) -> None:
        """Remove a group that holds nothing but its ``zarr.json``.

        A table that another process publishes in it meanwhile is not listed yet, so it has no rows. It goes too, and
        its creator creates group and table again.
        """
        folder, scratch = f"{self._root}/{path}", self._new()
        with self.locked():
            if names_in(folder) != [_METADATA]:
                return
            with contextlib.suppress(FileNotFoundError):
                rename(folder, scratch)  # at once: a group without its zarr.json would be damaged
                failpoint("group_renamed")
                sync_folder(os.path.dirname(folder))
                sync_folder(self.folder)
        _remove(scratch)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """Yield a new scratch folder, locked until the context exits, to be renamed by :func:`publish_folder`."""
        with building(f"{self.folder}/{_NEW}", self.locked()) as path:
            yield path

    def sweep(self) -> None:
        """Delete partly created or partly dropped folders of killed processes; running processes lock theirs."""
        names = names_in(self.folder)
        if not any(name.startswith((_NEW, _DROPPED)) for name in names):
            return
        left = []
        with self.locked():
            for name in names_in(self.folder):
                if name.startswith(_NEW) and is_free(f"{self.folder}/{name}"):
                    left.append(f"{self.folder}/{name}")
                elif name.startswith(_DROPPED):
                    left.append(f"{self.folder}/{name}")
                    path = listed_path(name[len(_DROPPED) : -33])
                    if path is not None and not self._is_there(path):
                        self._unlist(path)
        for path in left:
            _remove(path)

    def set_aside(self, paths: Iterable[str], folder: str) -> None:
        """Move the entries of tables to a folder; the caller holds the lock."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # another process was first
                rename(self.entry(path), f"{folder}/{entry_name(path)}")
        sync_folder(self.folder)

    def make(self) -> None:
        """Create the folder of the list, if missing, and the ``zarr.json`` that hides it from zarr tools."""
        with contextlib.suppress(FileExistsError):
            make_folder(self.folder)
        document = encode_document(hidden_document("tables"))
        replace_file(f"{self.folder}/{_METADATA}", document, scratch=self._new())
        sync_folder(self._root)

    def _new(self) -> str:
        return f"{self.folder}/{_NEW}{uuid.uuid4().hex}"

    def _is_there(self, path: str) -> bool:
        return os.path.lexists(f"{self._root}/{path}/{_METADATA}")

    def _unlist(self, path: str) -> None:
        remove_file(self.entry(path), missing_ok=True)
        sync_folder(self.folder)


def _remove(path: str) -> None:
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # another process is removing it too
            if os.path.isdir(path) and not os.path.islink(path):
                remove_tree(path)
            else:
                remove_file(path)
