"""Derived arrays (a gram matrix, say) that can be computed again: kept under a name and a key, or absent.

One file each: a plain ``.npy`` (``numpy.load`` reads it) followed by one line of JSON with the key and the CRC-32C of
the name, the key and all that stands before it. A file that does not match, or has another's name, is as good as none.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import uuid
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite._validate import parse_json
from trak_lite.errors import CorruptStoreError, StoreError
from trak_lite.store._checksums import crc32c
from trak_lite.store._names import path_parts
from trak_lite.store.disk.files import file_size, map_file, named_errors, open_file, sync_folder, write_all
from trak_lite.store.disk.folders import names_in

__all__ = ["CACHE", "DerivedArrays", "damaged_arrays"]

CACHE = ".cache"

_SUFFIX = ".npy"
_FOOTER = 16 << 10  # bytes at the end of a file among which its last line begins
_LONGEST_HEAD = 4 << 10
_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"(\{'descr': '([<>|]?[biufc][0-9]{1,2})', 'fortran_order': False, "
    rb"'shape': \(((?:[0-9]{1,18},? ?){0,32})\), \} *\n)",
    re.DOTALL,
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
            return _load(path, name, key)

    def put(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Keep an array; one under the same name is replaced at once or not at all."""
        path = self._path(name)
        values = np.asarray(array, order="C")
        head = _head(values)
        footer = json.dumps({"key": key, "crc32c": crc32c(head, values, start=_seed(name, key))})
        scratch = f"{path}.new-{uuid.uuid4().hex}"
        with named_errors("Keeping", path):
            fd = open_file(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                offset = 0
                for part in (head, values, f"\n{footer}\n".encode()):
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


def _seed(name: str, key: str) -> int:
    return crc32c(f"{name}\n{key}".encode("utf-8", "surrogatepass"))


def _is_whole(path: str) -> bool:
    try:
        with named_errors("Reading", path):
            name = os.path.basename(path).removesuffix(_SUFFIX).replace("%", "/")
            return _load(path, name) is not None
    except StoreError:
        return False


def _head(array: NDArray[Any]) -> bytes:
    """Return what stands before the numbers in a ``.npy``."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    return head.getvalue()


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the head of a ``.npy`` says."""

    start: int
    """Where the numbers begin."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where the numbers must end."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def parse(cls, head: bytes) -> _Layout | None:
        """Return the layout if the head is one that :func:`_head` writes; nothing of it is evaluated."""
        found = _HEAD.match(head)
        if found is None or len(found[2]) != int.from_bytes(found[1], "little"):
            return None
        shape = tuple(map(int, re.findall(rb"[0-9]+", found[4])))
        try:
            return cls(found.end(), np.dtype(found[3].decode()), shape)
        except TypeError:
            return None  # a number of a size that there is not


@dataclass(frozen=True, slots=True)
class _Footer:
    """The last line of a file."""

    key: str
    end: int
    """Where the ``.npy`` ends."""
    checksum: int

    @classmethod
    def parse(cls, tail: bytes, size: int) -> _Footer | None:
        """Return the footer that the last bytes of a file of that size hold, ``None`` if there is none."""
        start = tail.rfind(b"\n", 0, len(tail) - 1)
        try:
            footer = parse_json(tail[start + 1 :])
        except ValueError:
            return None
        if start < 0 or not isinstance(footer, dict):
            return None
        key, checksum = footer.get("key"), footer.get("crc32c")
        if not isinstance(key, str) or not isinstance(checksum, int):
            return None
        return cls(key, size - len(tail) + start, checksum)


def _load(path: str, name: str, key: str | None = None) -> NDArray[Any] | None:
    """Return the array in a file if it is whole, and kept under the name, and the key if one is given.

    Its two ends are read first: a file is mapped only where shape and dtype make the size that it has.
    """
    try:
        size = file_size(path) or 0
        head, tail = _ends(path, size)
        footer, layout = _Footer.parse(tail, size), _Layout.parse(head)
        if footer is None or layout is None or layout.end != footer.end or key not in (None, footer.key):
            return None
        content = map_file(path, footer.end)
    except (FileNotFoundError, CorruptStoreError):
        return None  # there is none, or no plain file, or another process has replaced it since
    if crc32c(content, start=_seed(name, footer.key)) != footer.checksum:
        return None
    array: NDArray[Any] = content[layout.start :].view(layout.dtype).reshape(layout.shape)
    return array


def _ends(path: str, size: int) -> tuple[bytes, bytes]:
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        head = file.read(_LONGEST_HEAD)
        file.seek(max(size - _FOOTER, 0))
        return head, file.read(_FOOTER)
