"""Atomic creation of folders: built under a scratch name, synced and renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    list_folder,
    make_folder,
    named_errors,
    open_folder,
    opened_file,
    remove_tree,
    rename,
    sync_folder,
)

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
_MOST_TRIES = 100
_ABANDONED_AFTER = 60.0  # seconds; a creator locks its scratch folder within microseconds


def names_in(folder: str) -> list[str]:
    """Return the names in a folder; empty if there is no folder, because some tools do not copy empty folders."""
    with named_errors("Listing", folder):
        try:
            return list_folder(folder)
        except FileNotFoundError:
            return []


def make_folders(path: str) -> None:
    """Create a folder and its parents, and sync their names to the disk."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent)
    with contextlib.suppress(FileExistsError):  # another process was first
        make_folder(path)
    sync_folder(parent)


@contextlib.contextmanager
def scratch_folder(final: str) -> Iterator[str]:
    """Yield a new scratch folder next to ``final``, locked until the context exits; see :func:`publish_folder`."""
    parent, name = os.path.split(final)
    prefix = f".{name}.new-"
    with os.scandir(parent) as entries:
        folders = [e.path for e in entries if e.name.startswith(prefix) and e.is_dir(follow_symlinks=False)]
    for abandoned in filter(is_old, folders):  # of killed creators, which lock theirs no longer
        with _locked_if_free(abandoned) as free:
            if free:
                remove_tree(abandoned, ignore_errors=True)  # another process may be removing it too
    with building(os.path.join(parent, prefix), contextlib.nullcontext()) as scratch:
        yield scratch


@contextlib.contextmanager
def building(prefix: str, lock: AbstractContextManager[None]) -> Iterator[str]:
    """Yield a new folder, locked until the context exits, whose path begins with ``prefix``; delete it on errors.

    The lock given is held until the folder is locked, so that a sweep does not delete it; see :func:`is_free`.
    """
    with lock:
        for _ in range(_MOST_TRIES):
            scratch = f"{prefix}{uuid.uuid4().hex}"
            fd = _new_locked_folder(scratch)
            if fd is not None:
                break
        else:
            raise OSError(
                errno.EAGAIN, "new folders are deleted or locked by another process at once", prefix
            )
    try:
        yield scratch
    except BaseException:
        remove_tree(scratch, ignore_errors=True)  # because the cause is re-raised
        raise
    finally:
        os.close(fd)


def _new_locked_folder(path: str) -> int | None:
    """Create a folder and lock it; ``None`` if a sweep, by whose clock it is old, deletes it before it is locked."""
    make_folder(path)
    try:
        fd = open_folder(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        swept = not os.path.lexists(path)
    except OSError as error:
        swept = isinstance(error, BlockingIOError)  # else the file system has no locks, and nothing is swept
    if swept:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def _locked_if_free(path: str) -> Iterator[bool]:
    """Lock a file or folder; yield ``False`` if it is locked or does not exist, or the file system has no locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False  # held by a running creator, or no lock support: never delete
        yield free
    finally:
        os.close(fd)


def is_free(path: str) -> bool:
    """Return whether a file or folder exists and is unlocked; ``False`` if the file system has no locks."""
    with _locked_if_free(path) as free:
        return free


def publish_folder(scratch: str, final: str) -> bool:
    """Sync a finished folder and rename it to ``final``; return ``False`` and delete it if ``final`` exists."""
    for folder, _, files in os.walk(scratch, topdown=False):
        for file in files:
            with opened_file(os.path.join(folder, file), os.O_RDONLY) as fd:
                os.fsync(fd)
        sync_folder(folder)
    failpoint("folder_built")
    try:
        rename(scratch, final)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        remove_tree(scratch)
        return False
    failpoint("folder_published")
    sync_folder(os.path.dirname(final))
    return True


def is_old(path: str) -> bool:
    """Return whether a file or folder exists and was changed longer ago than a running creator leaves it unlocked."""
    try:
        return time.time() - os.lstat(path).st_mtime > _ABANDONED_AFTER
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose file then replaces the one at ``path``: after a crash it is the old or the new.

    Errors of the operating system are those of :func:`named_errors`.
    """
    with named_errors("Writing", str(path)):
        make_folders(str(path.parent))
        os.close(open_folder(str(path.parent)))  # raises if it is a link
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            partial.open("wb").close()  # safetensors raises no OSError
            mode = partial.stat().st_mode
            yield partial
            partial.chmod(mode)  # safetensors lets the owner alone read
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            rename(str(partial), str(path))
        finally:
            partial.unlink(missing_ok=True)
