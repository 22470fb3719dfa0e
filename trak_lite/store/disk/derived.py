"""Files in the hidden folders of a disk store, each replaced atomically.

The folder ``.cache`` holds arrays that can be recomputed, ``.entries`` those that cannot; see ``entries``.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from typing import Any, final

from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError, StoreError
from trak_lite.store._content import ARRAY_SUFFIX, array_file_name, decode_array, encode_array, encoded_size
from trak_lite.store.disk.files import (
    file_size,
    named_errors,
    new_file,
    open_file,
    read_file,
    remove_file,
    rename,
    sync_folder,
)
from trak_lite.store.disk.folders import names_in

__all__ = ["CACHE", "HiddenFiles"]

CACHE = ".cache"
_LONGEST_HEAD = 4096
"""Maximum size in bytes of a file that is no array, and of the header from which an array's file size is read."""


@final
@dataclass(frozen=True, slots=True)
class HiddenFiles:
    """Files of a store by key, ``"folder/name"``: the part of the methods of objects that entries need."""

    root: str
    """Folder of the store."""

    def get(self, key: str) -> bytes | None:
        """Return the content of a file, ``None`` if it is missing; empty if it is no plain file or of another size.

        Raises:
            StoreError: If it cannot be read.
        """
        path = f"{self.root}/{key}"
        with named_errors("Reading", path):
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
            with new_file(scratch, content):
                rename(scratch, path)
            sync_folder(os.path.dirname(path))

    def delete(self, key: str) -> None:
        """Delete a file if it exists."""
        path = f"{self.root}/{key}"
        with named_errors("Removing", path), contextlib.suppress(FileNotFoundError):
            remove_file(path)
            sync_folder(os.path.dirname(path))

    def sizes(self, folder: str) -> list[str]:
        """Return the keys of all files in a folder."""
        return [f"{folder}/{name}" for name in names_in(f"{self.root}/{folder}")]

    def cached(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the cached array with this name and key, or ``None`` if it is missing or damaged."""
        found = decode_array(self.get(f"{CACHE}/{array_file_name(name)}") or b"", name)
        return None if found is None or (found.key, found.bound) != (key, ()) else found.array

    def damaged_arrays(self) -> list[str]:
        """Return the names of damaged files of cached arrays."""
        names = sorted(name for name in names_in(f"{self.root}/{CACHE}") if name.endswith(ARRAY_SUFFIX))
        return [name for name in names if not self._is_whole(name)]

    def _is_whole(self, file: str) -> bool:
        name = file.removesuffix(ARRAY_SUFFIX).replace("%", "/")
        try:
            return decode_array(self.get(f"{CACHE}/{file}") or b"", name) is not None
        except StoreError:
            return False

    def cache(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Cache an array, replacing any array of the same name."""
        self.put(f"{CACHE}/{array_file_name(name)}", encode_array(name, key, array))
