"""Storage of single arrays by name and key.

The folder ``.cache`` holds arrays that can be recomputed, ``.entries`` those that cannot, such as fits and run records.
Each array is one safetensors file, which is replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import Any, final

from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError, StoreError
from trak_lite.store._content import (
    ARRAY_SUFFIX,
    array_file_name,
    array_name,
    decode_array,
    encode_array,
    encoded_size,
)
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

__all__ = ["CACHE", "ENTRIES", "ArrayFolder", "damaged_arrays"]

CACHE, ENTRIES = ".cache", ".entries"
_LONGEST_HEAD = 4096
"""Maximum size in bytes of the header from which the file size is read."""


@final
class ArrayFolder:
    """The arrays in one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def get(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the array with this name and key, or ``None`` if it is missing or damaged."""
        path = self._path(name)
        with named_errors("Reading", path):
            return decode_array(_content(path), name, key)

    def names(self) -> list[str]:
        """Return the names of all arrays."""
        found = names_in(self._folder) if os.path.isdir(self._folder) else []
        return sorted(array_name(name) for name in found if name.endswith(ARRAY_SUFFIX))

    def is_damaged(self, name: str) -> bool:
        """Whether the file of an array exists but is damaged."""
        path = self._path(name)
        return os.path.lexists(path) and not _is_whole(path)

    def put(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Write an array, replacing any array of the same name."""
        path = self._path(name)
        scratch = f"{path}.new-{uuid.uuid4().hex}"
        with named_errors("Keeping", path):
            with new_file(scratch, encode_array(name, key, array)):
                rename(scratch, path)
            sync_folder(self._folder)

    def remove(self, name: str) -> None:
        """Delete an array if it exists."""
        path = self._path(name)
        with named_errors("Removing", path), contextlib.suppress(FileNotFoundError):
            remove_file(path)
            sync_folder(self._folder)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, array_file_name(name))


def damaged_arrays(folder: str) -> list[str]:
    """Return the names of the damaged array files in a folder."""
    names = sorted(name for name in names_in(folder) if name.endswith(ARRAY_SUFFIX))
    return [name for name in names if not _is_whole(f"{folder}/{name}")]


def _is_whole(path: str) -> bool:
    try:
        with named_errors("Reading", path):
            return decode_array(_content(path), array_name(os.path.basename(path))) is not None
    except StoreError:
        return False


def _content(path: str) -> bytes:
    """Return the content of a file; empty if it is missing, not a regular file, or its header implies another size."""
    try:
        size = file_size(path) or 0
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            if encoded_size(file.read(_LONGEST_HEAD)) != size:
                return b""
        return read_file(path, most=size, remedy="Another process is writing it.")
    except (FileNotFoundError, CorruptStoreError):
        return b""  # missing, a link or folder, or being replaced
