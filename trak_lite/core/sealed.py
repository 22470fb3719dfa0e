"""Files with a checksum of their own.

Such a file is JSON, or a safetensors file, with the member ``"crc32c"`` (of its metadata), which begins with eight hex
digits: the CRC-32C of what the file is and of all its bytes, in which these digits count as zeros.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.checksums import crc32c
from trak_lite.core.files import file_size, named_errors, opened_file, with_real_folder, write_all
from trak_lite.core.mapped import map_file
from trak_lite.errors import CorruptStoreError

SEAL: Final = "crc32c"
BLANK: Final = "0" * 8
"""Start of the member before :func:`seal` fills it in."""
_SEAL = re.compile(rb'"crc32c": ?"([0-9a-f]{8})[ "]')


def seal(path: str, what: str) -> None:
    """Write the checksum of a file into it, whose member begins with :data:`BLANK`.

    ``what`` is the name of the content: a file that is read as another one has another checksum.
    """
    offset, digits = _seal_of(_mapped(path), what) or (0, b"")
    with opened_file(with_real_folder(path), os.O_WRONLY) as fd:
        write_all(fd, digits, offset)
        os.fsync(fd)


def sealed_content(path: str, what: str, *, required: bool = True, delete: str = "it") -> NDArray[np.uint8]:
    """Return the content of a file whose checksum is right; without ``required``, also of one that has none.

    Another file is a CorruptStoreError, in which ``delete`` is what a user must delete.
    """
    with named_errors("Reading", path):
        content = _mapped(path)
    check_seal(content, path, what, required=required, delete=delete)
    return content


def check_seal(
    content: NDArray[np.uint8], path: str, what: str, *, required: bool = True, delete: str = "it"
) -> None:
    """Raise as :func:`sealed_content` if the checksum of the content of a file is not right."""
    checksum = _seal_of(content, what)
    if checksum is None and required:
        raise CorruptStoreError(
            f"{path} has no checksum: it is damaged, or an earlier version of trak_lite wrote it. Delete {delete}, and "
            "make the call again."
        )
    if checksum is not None and content[checksum[0] :][:8].tobytes() != checksum[1]:
        raise CorruptStoreError(
            f"{path} does not match its checksum: it is damaged, or was exchanged. Delete {delete}, and make the "
            "call again."
        )


def _mapped(path: str) -> NDArray[np.uint8]:
    real = with_real_folder(path)
    if file_size(real) is None:
        raise FileNotFoundError(errno.ENOENT, "No such file", path)
    return map_file(real, None)


def _seal_of(content: NDArray[np.uint8], what: str) -> tuple[int, bytes] | None:
    """Return the place of the checksum in a file and its right digits; ``None`` if the file has no checksum."""
    length = int.from_bytes(content[:8].tobytes(), "little")
    head = content if content[:1].tobytes() == b"{" else content[: 8 + length]  # no search through tensors
    match = _SEAL.search(head.data)
    if match is None:
        return None
    start, stop = match.span(1)
    return start, b"%08x" % crc32c(what.encode(), content[:start], BLANK.encode(), content[stop:])
