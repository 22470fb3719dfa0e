"""Locking of all staged chunks of a table, to drop it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from trak_lite.errors import BusyError
from trak_lite.store.disk.chunk_files import STAGE
from trak_lite.store.disk.files import Descriptors
from trak_lite.store.disk.folders import names_in
from trak_lite.store.disk.records import HOLDER_BYTES

__all__ = ["stage_locked"]


@contextlib.contextmanager
def stage_locked(folder: str) -> Iterator[None]:
    """Hold the locks of all staged chunks of a table; its metadata may be damaged.

    Raises:
        BusyError: If another writer holds one of the locks; names the writer.
    """
    held = Descriptors()
    try:
        for path in _row_logs(folder):
            with contextlib.suppress(FileNotFoundError):  # the chunk has just been committed
                _lock(held, path, folder)
        yield
    finally:
        held.close()


def _row_logs(folder: str) -> Iterator[str]:
    for column in names_in(folder):
        stage = f"{folder}/{column}/{STAGE}"
        if os.path.isdir(stage) and not os.path.islink(f"{folder}/{column}"):
            yield from (f"{stage}/{name}" for name in names_in(stage) if name.endswith(".log"))


def _lock(held: Descriptors, path: str, folder: str) -> None:
    fd = held.open(path, os.O_RDWR)  # NFS grants exclusive locks only on files opened for writing
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, HOLDER_BYTES, 0).decode("ascii", "replace").strip()
        raise BusyError(
            f"{folder}: another writer ({holder or 'unnamed'}) holds rows of it, so it was not dropped. "
            "Wait for it to finish, or stop it."
        ) from None
