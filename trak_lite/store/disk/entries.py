"""Arrays in the hidden folders of a store, each replaced atomically.

The folder ``.cache`` holds those that can be computed again, ``.entries`` those that cannot, such as fits, verdicts,
columns and run records.

An entry is a file in ``.entries/``. It holds the identifier of its store and a version, which every write draws. The
mark of the entry in ``.tables/`` lists the versions that the file may have; ``-`` stands for no file. A write adds its
version to the mark, replaces the file, and removes the other versions from the mark. A killed write thus leaves the old
entry or the new one, and an entry of another store, an earlier one, or a removed one is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    file_size,
    named_errors,
    open_file,
    read_file,
    remove_file,
    replace_file,
    sync_folder,
)
from trak_lite.core.folders import names_in
from trak_lite.core.json_text import parse_json
from trak_lite.errors import CorruptStoreError, InvalidInputError, StoreError
from trak_lite.store._names import path_parts
from trak_lite.store.disk.listing import TABLES, decode_entry, encode_entry, entry_name

ARRAY_SUFFIX: Final = ".safetensors"
CACHE = ".cache"
_LONGEST_HEAD = 4096
"""Maximum size in bytes of a file that is no array, and of the header from which an array's file size is read."""
_LONGEST_DOCUMENT = 64 << 20
ENTRIES = ".entries"
_NO_FILE: Final = "-"
_MARK: Final = f"{ENTRIES}%"
"""Start of the name of a mark; no table has such a name."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedArray:
    """The content of a file that :func:`encode_array` made."""

    array: NDArray[Any]
    key: str
    bound: tuple[str, ...]
    """Identifier of the store and version of an entry; empty for a cached array."""


def encode_array(name: str, key: str, array: NDArray[Any], bound: tuple[str, ...] = ()) -> bytes:
    """Return the bytes of a safetensors file that holds an array with its name and key, and what it is bound to.

    The tensor ``about`` is UTF-8 JSON with these, and the CRC-32C of them and of dtype, shape and values.
    """
    values = np.asarray(array, order="C")
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    about = {"name": name, "key": key, "crc32c": _array_checksum(name, key, values, bound)}
    text = json.dumps({**about, **({"bound": bound} if bound else {})}).encode()
    return safetensors.numpy.save({"array": values, "about": np.frombuffer(text, np.uint8)})


def decode_array(content: bytes, name: str) -> DecodedArray | None:
    """Return the content of a file of :func:`encode_array`; ``None`` if it is damaged or has another name."""
    try:
        arrays = safetensors.numpy.load(content)
        about = parse_json(arrays["about"])
        array, key, bound = arrays["array"], about["key"], tuple(about.get("bound", ()))
        right = (about["name"], len(arrays), len(bound)) in ((name, 2, 0), (name, 2, 2))
        if right and all(isinstance(text, str) for text in (key, *bound)):
            right = _array_checksum(name, key, array, bound) == about["crc32c"]
            return DecodedArray(array, key, bound) if right else None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None


def encoded_size(head: bytes) -> int | None:
    """Return the file size that a safetensors header implies; ``None`` if ``head`` is not such a header."""
    start = 8 + int.from_bytes(head[:8], "little")
    try:
        parts = parse_json(head[8:start])
        return start + int(max(part["data_offsets"][1] for part in parts.values()))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
        return None


def array_file_name(name: str) -> str:
    """Return the file name of an array; unique because no array name contains ``%``."""
    return "%".join(path_parts(name, what="cache")) + ARRAY_SUFFIX


def _array_checksum(name: str, key: str, array: NDArray[Any], bound: tuple[str, ...]) -> int:
    what = json.dumps([name, key, array.dtype.str, array.shape, *bound]).encode()
    return crc32c(what, np.ascontiguousarray(array))


Lock = Callable[[], AbstractContextManager[None]]


class Files(Protocol):
    """Files or objects of a store by key."""

    def get(self, key: str) -> bytes | None:
        """Return the content of a file, ``None`` if it is missing."""

    def put(self, key: str, content: bytes) -> None:
        """Write a file, replacing an existing one."""

    def delete(self, key: str) -> None:
        """Delete a file if it exists."""

    def sizes(self, folder: str) -> Iterable[str]:
        """Return the keys of all files in a folder."""

    def folders(self, folder: str) -> Iterable[str]:
        """Return the names of the folders in a folder."""


def entry_files(name: str) -> tuple[str, str]:
    """Return the keys of an entry and of its mark."""
    return f"{ENTRIES}/{array_file_name(name)}", f"{TABLES}/{entry_name(f'{ENTRIES}/{name}')}"


def entry_of(file: str) -> str | None:
    """Return the name of an entry by the name of its file or of its mark; ``None`` if it is neither."""
    name = file.removesuffix(ARRAY_SUFFIX) if file.endswith(ARRAY_SUFFIX) else file.removeprefix(_MARK)
    try:
        return None if name == file else "/".join(path_parts(name.replace("%", "/"), what="entry"))
    except InvalidInputError:
        return None


@final
@dataclass(frozen=True, slots=True)
class StoreEntries:
    """The entries of one store."""

    files: Files
    where: str
    """Path or address of the store, for messages."""
    store: str | None
    """Identifier of the store; ``None`` accepts entries of any, because the metadata of the store is damaged."""
    lock: Lock | None = None
    """Excludes other writers; an object store has no lock."""

    def get(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the entry with this name and key, or ``None``; raise if it is not what the store has written."""
        entry, wrong = self._read(name)
        if wrong is not None:
            raise CorruptStoreError(f"The entry {name!r} of {self.where} {wrong}. What helps: {self.remedy}.")
        return entry.array if entry is not None and entry.key == key else None

    def put(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Store an entry, replacing any of the same name."""
        file, version = entry_files(name)[0], uuid.uuid4().hex
        with self.lock() if self.lock else contextlib.nullcontext():
            self._mark(name, {*(self._versions(name) or {_NO_FILE}), version})
            failpoint("entry_announced")
            self.files.put(file, encode_array(name, key, array, (str(self.store), version)))
            failpoint("entry_replaced")
            self._mark(name, {version})
        if self.lock is None:
            # Another machine may have replaced the entry before the mark was written.
            last = decode_array(self.files.get(file) or b"", name)
            if last is not None and last.bound and last.bound[1] != version:
                self._mark(name, {last.bound[1]})

    def drop(self, name: str) -> None:
        """Delete an entry if it exists."""
        file, mark = entry_files(name)
        with self.lock() if self.lock else contextlib.nullcontext():
            if (versions := self._versions(name)) is not None:
                self._mark(name, {*versions, _NO_FILE})
            self.files.delete(file)
            failpoint("entry_removed")
            self.files.delete(mark)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted; also of those that were removed without the store."""
        files, marks = (
            {
                name
                for key in self.files.sizes(folder)
                if (name := entry_of(key.rpartition("/")[2])) is not None
            }
            for folder in (ENTRIES, TABLES)
        )
        # The mark alone is left of an entry whose first write, or removal, was interrupted.
        return sorted(
            files | {name for name in marks - files if _NO_FILE not in (self._versions(name) or ())}
        )

    @property
    def remedy(self) -> str:
        """What to do about an entry that is wrong."""
        if self.lock is None:
            return f"restore its objects below {ENTRIES} and {TABLES}, or remove them, and store it again"
        return f"restore {ENTRIES} and {TABLES}, or call check_store(path, repair=True), and store it again"

    def problems(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
        """Yield the names of entries, among these or all, that are not as they were written, and what is wrong."""
        for name in self.names() if names is None else names:
            try:
                wrong = self._read(name)[1]
            except StoreError as error:
                wrong = f"cannot be read: {error}"
            if wrong is not None:
                yield name, wrong

    def _read(self, name: str) -> tuple[DecodedArray | None, str | None]:
        """Return an entry, and what is wrong with it."""
        keys = entry_files(name)
        while True:
            content, mark = contents = tuple(self.files.get(key) for key in keys)
            entry = None if content is None else decode_array(content, name)
            wrong = self._wrong(name, entry, content, mark)
            if wrong is None or contents == tuple(self.files.get(key) for key in keys):
                return entry, wrong
            # Otherwise a writer changed it between the two reads: read again.

    def _wrong(
        self, name: str, entry: DecodedArray | None, content: bytes | None, mark: bytes | None
    ) -> str | None:
        allowed = {_NO_FILE} if mark is None else self._decoded(name, mark)
        if allowed is None:
            return f"has a damaged mark in {TABLES}"
        if content is None:
            return None if _NO_FILE in allowed else "was removed, but not by the store"
        if entry is None:
            return "is damaged"
        if not entry.bound or self.store not in (None, entry.bound[0]):
            return "belongs to another store"
        return None if entry.bound[1] in allowed else "is not the one that the store lists"

    def _versions(self, name: str) -> set[str] | None:
        """Return the versions in a mark; ``None`` without one, or if it is damaged."""
        mark = self.files.get(entry_files(name)[1])
        return None if mark is None else self._decoded(name, mark)

    def _decoded(self, name: str, mark: bytes) -> set[str] | None:
        try:
            return set(decode_entry(mark, f"{ENTRIES}/{name}", where=self.where).split())
        except CorruptStoreError:
            return None

    def _mark(self, name: str, versions: set[str]) -> None:
        self.files.put(entry_files(name)[1], encode_entry(f"{ENTRIES}/{name}", " ".join(sorted(versions))))


@final
@dataclass(frozen=True, slots=True)
class HiddenFiles:
    """Files of a store by key, ``"folder/name"``: the methods of objects that documents and entries need."""

    root: str

    def get(self, key: str) -> bytes | None:
        """Return the content of a file, ``None`` if it is missing; empty if it is no plain file or of another size.

        A ``zarr.json`` that is no plain file is a CorruptStoreError.
        """
        path = f"{self.root}/{key}"
        with named_errors("Reading", path):
            if os.path.basename(path) == "zarr.json":
                try:
                    remedy = "Restore it from a backup, or use another path."
                    return read_file(path, most=_LONGEST_DOCUMENT, remedy=remedy)
                except (FileNotFoundError, NotADirectoryError):
                    return None
            try:
                size = file_size(path) or 0
                if key.endswith(ARRAY_SUFFIX):
                    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
                        if encoded_size(file.read(_LONGEST_HEAD)) != size:
                            return b""
                most = size if key.endswith(ARRAY_SUFFIX) else _LONGEST_HEAD
                return read_file(path, most=most, remedy="Another process is writing it.")
            except FileNotFoundError:
                return None
            except CorruptStoreError:
                return b""  # a link or folder, or being replaced

    def put(self, key: str, content: bytes) -> None:
        """Write a file, replacing an existing one."""
        path = f"{self.root}/{key}"
        scratch = (
            f"{path if key.endswith(ARRAY_SUFFIX) else os.path.dirname(path) + '/'}.new-{uuid.uuid4().hex}"
        )
        with named_errors("Keeping", path):
            replace_file(path, content, scratch=scratch)

    def delete(self, key: str) -> None:
        """Delete a file if it exists."""
        path = f"{self.root}/{key}"
        with named_errors("Removing", path), contextlib.suppress(FileNotFoundError):
            remove_file(path)
            sync_folder(os.path.dirname(path))

    def sizes(self, folder: str) -> list[str]:
        """Return the keys of all files in a folder."""
        return [f"{folder}/{name}" for name in names_in(f"{self.root}/{folder}")]

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; in that of the store, if ``folder`` is empty."""
        path = os.path.join(self.root, folder)
        names = names_in(path) if os.path.isdir(path) else []
        return [name for name in names if os.path.isdir(os.path.join(path, name))]
