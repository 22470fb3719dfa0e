"""File operations: syncing, locking and conversion of errors.

No symbolic link is followed, so that a store from elsewhere cannot make a command read or change a file outside of it.
The path of a store has its own links resolved. Every folder below is opened relative to the one above it: a link is
refused even if it appears between a check and the operation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.failpoints import failpoint
from trak_lite.errors import (
    CorruptStoreError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
    UnsupportedStoreError,
    refuse_machine_failure,
)

logger = logging.getLogger(__name__)

READING_NEEDS_LESS = (
    "Make the folder writable, or use another path. A store that is there can be read without: "
    "trak_lite.store.open_store(path, mode='r')."
)
"""What to do about a folder that cannot be written; attributors read such a store by themselves, and have no mode."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_PLAIN_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ENXIO}
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_ZEROS = bytes(1 << 20)
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ON_THE_WAY = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH needs no right to list the folder


@contextlib.contextmanager
def named_errors(doing: str, path: str) -> Iterator[None]:
    """Convert an :class:`OSError` to the matching :class:`StoreError`, with the failed operation and a remedy."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        refuse_machine_failure(error)
        failure = f"{doing} {path} failed: {error.strerror or error}."
        if error.errno in _FULL:
            remedy = (
                "Raise the limit of a file's size (ulimit -f)"
                if error.errno == errno.EFBIG
                else "Free some space"
            )
            raise StoreFullError(
                f"{failure} The rows stay pending and the store is intact. {remedy} and put them again."
            ) from error
        if error.errno in _READ_ONLY and _may_not_be_read(error.filename):
            raise StoreError(
                f"{failure} Give this user the right to read {error.filename}, and open it again."
            ) from error
        if error.errno in _READ_ONLY:
            raise ReadOnlyStoreError(f"{failure} {READING_NEEDS_LESS}") from error
        if error.errno == errno.ELOOP:
            raise CorruptStoreError(
                f"{failure} It is a symbolic link, which a store does not follow. Replace it by the file itself."
            ) from error
        if error.errno in _NO_PLAIN_FILE:
            raise CorruptStoreError(
                f"{failure} Another kind of file is at the path of a file or folder of the store. Restore the right "
                "one, or remove it."
            ) from error
        if error.errno in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise UnsupportedStoreError(
                f"{failure} The file system does not do what a store needs, such as locks (flock). Use a path on "
                "another one, such as a local disk."
            ) from error
        raise StoreError(
            f"{failure} Rows not reported as done stay pending; check the disk, then run again."
        ) from error


def _may_not_be_read(path: str | None) -> bool:
    """Return whether the user lacks permission to read the file or to access its folder."""
    if path is None:
        return False
    return not os.access(os.path.dirname(path) or ".", os.X_OK) or (
        os.path.lexists(path) and not os.access(path, os.R_OK)
    )


@contextlib.contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder of a path, and the name in it; CorruptStoreError for a link on the way."""
    *folders, name = list(filter(None, path.split("/"))) or ["."]
    reached = "" if path.startswith("/") else "."
    fd = os.open(reached or "/", _ON_THE_WAY)
    try:
        for folder in folders:
            reached = f"{reached}/{folder}"
            outer, fd = fd, _inner_folder(fd, folder, _ON_THE_WAY, reached)
            os.close(outer)  # after fd is another one: an interrupt here must not close it twice
        reached = path
        yield fd, name
    except StoreError:
        raise
    except OSError as error:
        error.filename = reached  # it would be the name alone
        raise
    finally:
        os.close(fd)


def _inner_folder(fd: int, name: str, flags: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=fd)
    except OSError as error:
        # Linux reports a link as ENOTDIR, other systems as ELOOP.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and stat.S_ISLNK(
            os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
        ):
            raise CorruptStoreError(
                f"{path} is a symbolic link, which a store does not follow. Replace it by the folder itself."
            ) from error
        raise


def refuse_links(path: str) -> None:
    """Raise CorruptStoreError if a path, which need not exist, or a folder on the way to it is a symbolic link."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _parent(path) as (folder, name):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise CorruptStoreError(
                f"{path} is a symbolic link, which is not followed. Replace it by the folder itself."
            )


def open_folder(path: str) -> int:
    """Open a folder to list, sync or lock it; raise CorruptStoreError if it, or one on the way, is a link."""
    with _parent(path) as (folder, name):
        return _inner_folder(folder, name, _FOLDER | os.O_RDONLY, path)


def open_file(path: str, flags: int) -> int:
    """Open a regular file; does not follow links, block on pipes, or let child programs inherit the descriptor.

    A pipe, a device, a folder, or a symbolic link on the way is a CorruptStoreError.
    """
    with _parent(path) as (folder, name):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):  # opening some has effects
                raise _no_plain_file(path)
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_plain_file(path)
    return fd


@contextlib.contextmanager
def opened_file(path: str, flags: int) -> Iterator[int]:
    """Open a file until the context exits; see :func:`open_file`."""
    fd = open_file(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def write_file(path: str, data: bytes, *, sync: bool = False) -> None:
    """Write a new file."""
    with opened_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        write_all(fd, data, 0)
        if sync:
            os.fsync(fd)


def replace_file(path: str, data: bytes, *, scratch: str, step: str | None = None) -> None:
    """Write a file, replacing an existing one: after a crash it is the old or the new one.

    It is written and synced as ``scratch`` and renamed; ``step`` is the failpoint between the two.
    """
    try:
        write_file(scratch, data, sync=True)
        if step is not None:
            failpoint(step)
        rename(scratch, path)
    finally:
        remove_file(scratch, missing_ok=True)
    sync_folder(os.path.dirname(path))


def rename(source: str, target: str) -> None:
    """Rename a file or folder; replaces a file at ``target``."""
    with _parent(source) as (old, name), _parent(target) as (new, new_name):
        os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)


def remove_file(path: str, *, missing_ok: bool = False) -> None:
    """Delete a file, or a link itself."""
    with contextlib.suppress(*[FileNotFoundError] * missing_ok), _parent(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def remove_tree(path: str, *, ignore_errors: bool = False) -> None:
    """Delete a folder and its content."""
    with contextlib.suppress(*[OSError] * ignore_errors), _parent(path) as (folder, name):
        shutil.rmtree(name, dir_fd=folder)


def make_folder(path: str) -> None:
    """Create a folder; its parent must exist."""
    with _parent(path) as (folder, name):
        os.mkdir(name, dir_fd=folder)


def list_folder(path: str) -> list[str]:
    """Return the names in a folder."""
    fd = open_folder(path)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def refuse_other_names(fd: int, path: str) -> None:
    """Raise CorruptStoreError if an open file has other names: writing to it would change a file elsewhere."""
    if os.fstat(fd).st_nlink > 1:
        raise _shared_file(path)


def read_file(path: str, *, most: int, remedy: str) -> bytes:
    """Return the bytes of a regular file; of more than ``most`` a CorruptStoreError with ``remedy``, which helps."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CorruptStoreError(f"{path} has {size} bytes, expected at most {most}. {remedy}")
        return file.read(size)


def zeros(size: int, *, what: str, besides: int = 0) -> NDArray[np.uint8]:
    """Return ``size`` zero bytes for ``what``; the pages take no memory until they are written.

    If memory does not suffice for it and ``besides`` more, raise CorruptStoreError: the size may be damaged metadata.
    """
    try:
        np.empty(besides, np.uint8)
        return np.zeros(size, np.uint8)
    except MemoryError as error:
        raise CorruptStoreError(
            f"{what} needs {size + besides} bytes of memory, which are not available. If its metadata was damaged, "
            "restore it from a backup; else use a machine with more memory."
        ) from error


@final
class Descriptors:
    """File descriptors that are closed together, at the latest when this object is garbage-collected."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        # Not at exit: finalizers then run newest first, and the owner's finalizer still needs the files. The operating
        # system closes them and releases their locks.
        weakref.finalize(self, _close_all, self.fds).atexit = False

    def __bool__(self) -> bool:
        """Whether any descriptor is open."""
        return bool(self.fds)

    def open(self, path: str, flags: int) -> int:
        """Open a file and return its descriptor."""
        fd = open_file(path, flags)
        self.fds.append(fd)
        return fd

    def close(self) -> None:
        """Close all descriptors, which releases their locks."""
        _close_all(self.fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def stamp(path: str) -> tuple[int, ...]:
    """Return what differs if a file or folder is replaced or a file is written to; empty if it is missing."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_named(path: str, fd: int) -> bool:
    """Return whether ``path`` still refers to the open file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(fd))


def with_real_folder(path: str) -> str:
    """Return the path with the links of its folder, which the user has named, resolved; the file must be no link."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


@contextlib.contextmanager
def locked_file(path: str) -> Iterator[None]:
    """Hold the lock of a file until the context exits; waits for other holders, which may replace the file."""
    path = with_real_folder(path)
    while True:
        # NFS grants exclusive locks only on files opened for writing.
        with opened_file(path, os.O_RDWR) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not is_named(path, fd):
                continue  # the previous holder replaced the file
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # explicit, because a child forked meanwhile shares the lock
            return


def write_all(fd: int, data: NDArray[Any] | bytes, offset: int) -> None:
    """Write a C-contiguous array or a byte string at an offset."""
    rest = memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
    while len(rest):
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def reserve(fd: int, size: int) -> None:
    """Set the size of a file and reserve its disk space, so that a full disk raises now."""
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


def sync_files(fds: Sequence[int]) -> None:
    """Sync open files to the disk, all at once: a disk writes several in little more time than one.

    After a failed sync, Linux marks the pages as clean, so that a later one succeeds without writing them: write the
    files again.
    """
    _at_once([lambda fd=fd: os.fsync(fd) for fd in fds])  # type: ignore[misc]


def sync_folders(paths: Iterable[str]) -> None:
    """Sync folders, all at once; see :func:`sync_folder`."""
    _at_once([functools.partial(sync_folder, path) for path in paths])


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Run every call, all but the last in threads of their own; raise the first error, or an interrupt meanwhile."""
    errors: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:
            errors[number] = error

    threads = []
    try:
        for number in range(len(calls)):
            if number + 1 < len(calls):
                threads.append(
                    threading.Thread(target=run, args=(number,), name="trak_lite sync", daemon=True)
                )
                try:
                    threads[-1].start()
                    continue
                except RuntimeError as error:  # the machine has no further thread
                    logger.debug("Syncs one file after the other: %s", error)
            run(number)
    finally:
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as error:
                    # The caller closes the files, which a thread may still sync.
                    errors.append(error)
    for failure in errors:
        if failure is not None:
            raise failure


def sync_folder(path: str) -> None:
    """Sync a folder, so that created, renamed and removed names reach the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_size(path: str, *, alone: bool = False) -> int | None:
    """Return the size of a regular file in bytes, or ``None`` if it does not exist.

    With ``alone``, because it is written to, another name of it is a CorruptStoreError.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise _no_plain_file(path)
    if alone and status.st_nlink > 1:
        raise _shared_file(path)
    return status.st_size


def _no_plain_file(path: str) -> CorruptStoreError:
    return CorruptStoreError(f"{path} is not a plain file. Put the store's own file there, or remove it.")


def _shared_file(path: str) -> CorruptStoreError:
    return CorruptStoreError(
        f"{path} has other names (hard links), and writing to it would change those files too. Replace it by a copy."
    )
