"""Files: what reaches the disk when, and which error a failing call becomes. No symbolic link is followed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import (
    CorruptStoreError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
    refuse_machine_failure,
)
from trak_lite.store.disk.mounts import is_network

__all__ = [
    "Descriptors",
    "file_size",
    "is_named",
    "locked_file",
    "map_file",
    "named_errors",
    "open_file",
    "read_file",
    "reserve",
    "sync_file",
    "sync_folder",
    "write_all",
    "zeros",
]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_PLAIN_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ENXIO}
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_ZEROS = bytes(1 << 20)


@contextlib.contextmanager
def named_errors(doing: str, path: str) -> Iterator[None]:
    """Turn an :class:`OSError` into the named error that says what failed, where and what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        refuse_machine_failure(error)
        seen = f"{doing} {path} failed: {error.strerror or error}."
        if error.errno in _FULL:
            raise StoreFullError(
                f"{seen} The rows stay pending and the store is intact. Free some space and put them again."
            ) from error
        if error.errno in _READ_ONLY and _may_not_be_read(error.filename):
            raise StoreError(
                f"{seen} Give this user the right to read {error.filename}, and open it again."
            ) from error
        if error.errno in _READ_ONLY:
            raise ReadOnlyStoreError(
                f"{seen} Make the folder writable, open the store with mode='r', or use another path."
            ) from error
        if error.errno == errno.ELOOP:
            raise CorruptStoreError(
                f"{seen} It is a symbolic link, and inside a store none is followed. Put the file itself there."
            ) from error
        if error.errno in _NO_PLAIN_FILE:
            raise CorruptStoreError(
                f"{seen} Something else stands where the store keeps a file or a folder. Put that there, or remove it."
            ) from error
        raise StoreError(
            f"{seen} Rows not reported as done stay pending; check the disk, then run again."
        ) from error


def _may_not_be_read(path: str | None) -> bool:
    """Return whether a call failed because this user may not read what is there, or not look into its folder."""
    if path is None:
        return False
    return not os.access(os.path.dirname(path) or ".", os.X_OK) or (
        os.path.lexists(path) and not os.access(path, os.R_OK)
    )


def open_file(path: str, flags: int) -> int:
    """Open a plain file without following a link, waiting for a pipe, or passing it on to child programs.

    Raises:
        CorruptStoreError: If a pipe, a device or a folder is there instead.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_plain_file(path)
    return fd


def read_file(path: str, *, most: int, remedy: str) -> bytes:
    """Return the bytes of a file that is small by its nature.

    Args:
        path: Of the file.
        most: Bytes that it may have; of a larger one nothing is read.
        remedy: What to do where it is larger.

    Raises:
        CorruptStoreError: If it is larger, or no plain file.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        seen = os.fstat(file.fileno()).st_size
        if seen > most:
            raise CorruptStoreError(f"{path} has {seen} bytes, expected at most {most}. {remedy}")
        return file.read(seen)


def zeros(size: int, *, what: str, besides: int = 0) -> NDArray[np.uint8]:
    """Return that many bytes, of which nothing is in use before it is written.

    Args:
        size: In bytes.
        what: For the message.
        besides: Bytes that there must be room for as well.

    Raises:
        CorruptStoreError: If there is no room for them: a size that was read from a file may be anything.
    """
    try:
        np.empty(besides, np.uint8)
        return np.zeros(size, np.uint8)
    except MemoryError as error:
        raise CorruptStoreError(
            f"{what} takes {size + besides} bytes, and there is no room for them. If its metadata was damaged, "
            "restore it from a backup; else use a machine with more memory."
        ) from error


@final
class Descriptors:
    """File descriptors that are closed together, at the latest when their owner is collected."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        # Not at exit: finalizers run newest first there, and the owner's own one still needs the files. The operating
        # system closes them, and drops their locks.
        weakref.finalize(self, _close_all, self._fds).atexit = False

    def __bool__(self) -> bool:
        """Whether any is open."""
        return bool(self._fds)

    def open(self, path: str, flags: int) -> int:
        """Open one more file."""
        fd = open_file(path, flags)
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        """Close all; closing drops the locks that were taken on them."""
        _close_all(self._fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def is_named(path: str, fd: int) -> bool:
    """Return whether the open file is still the one that has the name."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


@contextlib.contextmanager
def locked_file(path: str) -> Iterator[None]:
    """Wait for the lock of a file that its holders may replace, and hold it while the block runs."""
    while True:
        held = Descriptors()
        fd = held.open(path, os.O_RDWR)  # NFS locks what is open for writing only
        fcntl.flock(fd, fcntl.LOCK_EX)
        if is_named(path, fd):
            break
        held.close()  # its last holder replaced it before the lock was taken
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        held.close()


def write_all(fd: int, data: NDArray[Any] | bytes, offset: int) -> None:
    """Write a C-contiguous array or a byte string at an offset."""
    rest = memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
    while len(rest):
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def reserve(fd: int, size: int) -> None:
    """Give a file its size and its room on the disk, so that a full disk shows now and as an error."""
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    for start in range(os.fstat(fd).st_size, size, len(_ZEROS)):
        write_all(fd, _ZEROS[: size - start], start)


def sync_file(fd: int, path: str) -> None:
    """Bring a file's bytes to the disk.

    After a failed sync Linux holds the bytes for clean: a later sync would succeed without writing them. They are
    written once more here, so that it does not.
    """
    try:
        os.fsync(fd)
    except OSError:
        content = map_file(path, os.fstat(fd).st_size)
        for start in range(0, len(content), len(_ZEROS)):
            write_all(fd, content[start : start + len(_ZEROS)], start)
        raise


def sync_folder(path: str) -> None:
    """Bring a folder's names to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def map_file(path: str, size: int, *, mapped: bool | None = None) -> NDArray[np.uint8]:
    """Map the first bytes of a file as an array; the file keeps its bytes whatever is written to the array.

    Args:
        path: The file.
        size: How many bytes.
        mapped: ``False`` reads them instead; ``None`` reads them where the file is on a network file system, because
            an I/O error on a map would kill the process.

    Raises:
        CorruptStoreError: If the file is shorter: touching the missing pages would kill the process.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    fd = open_file(path, os.O_RDONLY)
    try:
        found = os.fstat(fd)
        if found.st_size < size:
            raise CorruptStoreError(
                f"{path} has {found.st_size} bytes, expected {size}. Something cut it short."
            )
        if mapped is False or (mapped is None and is_network(found.st_dev)):
            return _read(fd, path, size)
        pages = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    return np.frombuffer(pages, np.uint8, size)


def _read(fd: int, path: str, size: int) -> NDArray[np.uint8]:
    content = np.empty(size, np.uint8)
    rest = content.data
    with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
        while len(rest):
            count = file.readinto(rest)
            if not count:
                raise CorruptStoreError(
                    f"{path} was cut short while it was read, {len(rest)} bytes before its end."
                )
            rest = rest[count:]
    return content


def file_size(path: str) -> int | None:
    """Return the size of a file, ``None`` where there is none.

    Raises:
        CorruptStoreError: If it is anything but a plain file.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise _no_plain_file(path)
    return found.st_size


def _no_plain_file(path: str) -> CorruptStoreError:
    return CorruptStoreError(f"{path} is not a plain file. Put the store's own file there, or remove it.")
