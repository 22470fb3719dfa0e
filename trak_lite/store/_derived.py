"""Derived arrays (a gram matrix, say) that can be computed again: kept under a name and a key, or absent.

One file each: a plain ``.npy`` (``numpy.load`` reads it) followed by one line of JSON with the key and the CRC-32C of
all that stands before it. A file that does not match is as good as none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import uuid
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError, InvalidInputError, StoreError
from trak_lite.store._checksums import crc32c
from trak_lite.store._files import file_size, map_file, named_errors, open_file, sync_folder, write_all
from trak_lite.store._folders import names_in
from trak_lite.store._names import path_parts

__all__ = ["CACHE", "DerivedArrays", "check_derived", "damaged_arrays"]

CACHE = ".cache"

_SUFFIX = ".npy"
_LONGEST_KEY = 1024
_FOOTER = 16 << 10  # bytes at the end of a file among which its last line begins


def check_derived(name: str, key: str, array: NDArray[Any]) -> None:
    """Raise unless the array can be kept under the name and the key.

    Raises:
        InvalidInputError: For a bad name, a key that is too long, or an array that only pickle could hold.
    """
    path_parts(name, what="cache")
    if not isinstance(key, str) or len(key) > _LONGEST_KEY:
        raise InvalidInputError(
            f"A cache key must be a string of at most {_LONGEST_KEY} characters, got {str(key)[:40]!r}. Use a digest."
        )
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise InvalidInputError(
            f"Only arrays of numbers can be kept, got {getattr(array, 'dtype', type(array))}."
        )


@final
class DerivedArrays:
    """Cached arrays in one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def get(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the array kept under the name and key, ``None`` if there is none that is whole."""
        path = self._path(name)
        with named_errors("Reading", path):
            size = file_size(path)
            if not size:
                return None
            try:
                content = map_file(path, size)
            except (FileNotFoundError, CorruptStoreError):
                return None  # replaced by another process since
        footer = _read_footer(content)
        if footer is None or footer.key != key or not footer.matches(content):
            return None
        return _parse(content[: footer.end])

    def put(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Keep an array; one under the same name is replaced at once or not at all."""
        path = self._path(name)
        head = io.BytesIO()
        values = np.asarray(array, order="C")
        np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
        footer = json.dumps({"key": key, "crc32c": crc32c(head.getvalue(), values)})
        scratch = f"{path}.new-{uuid.uuid4().hex}"
        with named_errors("Keeping", path):
            fd = open_file(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                offset = 0
                for part in (head.getvalue(), values, f"\n{footer}\n".encode()):
                    write_all(fd, part, offset)
                    offset += part.nbytes if isinstance(part, np.ndarray) else len(part)
                os.fsync(fd)
                os.rename(scratch, path)
            finally:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):  # it has its final name
                    os.unlink(scratch)
            sync_folder(self._folder)

    def _path(self, name: str) -> str:
        # '%' is in no name, so two names never share a file
        return os.path.join(self._folder, "%".join(path_parts(name, what="cache")) + _SUFFIX)


def damaged_arrays(folder: str) -> list[str]:
    """Return the names of the files in a folder of derived arrays that are not whole."""
    names = sorted(name for name in names_in(folder) if name.endswith(_SUFFIX))
    return [name for name in names if not _is_whole(f"{folder}/{name}")]


def _is_whole(path: str) -> bool:
    try:
        with named_errors("Reading", path):
            content = map_file(path, file_size(path) or 0)
    except StoreError:
        return False
    footer = _read_footer(content)
    return footer is not None and footer.matches(content)


@dataclass(frozen=True, slots=True)
class _Footer:
    """The last line of a file."""

    key: str
    end: int
    """Where the ``.npy`` ends."""
    checksum: int

    def matches(self, content: NDArray[np.uint8]) -> bool:
        """Return whether the ``.npy`` is the one that was written."""
        return crc32c(content[: self.end]) == self.checksum


def _read_footer(content: NDArray[np.uint8]) -> _Footer | None:
    """Return the footer of a file, ``None`` if there is none."""
    tail = content[-_FOOTER:].tobytes()
    start = tail.rfind(b"\n", 0, len(tail) - 1)
    try:
        footer = json.loads(tail[start + 1 :])
    except (ValueError, RecursionError):
        return None
    if start < 0 or not isinstance(footer, dict):
        return None
    key, checksum = footer.get("key"), footer.get("crc32c")
    if not isinstance(key, str) or not isinstance(checksum, int):
        return None
    return _Footer(key, len(content) - len(tail) + start, checksum)


def _parse(content: NDArray[np.uint8]) -> NDArray[Any]:
    head = io.BytesIO(content[: 64 << 10].tobytes())
    np.lib.format.read_magic(head)
    shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    array: NDArray[Any] = content[head.tell() :].view(dtype).reshape(shape)
    return array
