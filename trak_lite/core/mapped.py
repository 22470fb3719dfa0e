"""Files as arrays: mapped into memory, unless their file system is on a network."""

from __future__ import annotations

import functools
import mmap
import os
import re

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.files import opened_file
from trak_lite.errors import CorruptStoreError

_MOUNTS = "/proc/self/mountinfo"
_NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|coda|davfs|fuse|glusterfs|gpfs|lustre|ncpfs|nfs|nfs4|orangefs|panfs|"
    r"pvfs2|smb3|smbfs|wekafs"
)


def map_file(path: str, size: int | None, *, mapped: bool | None = None) -> NDArray[np.uint8]:
    """Return the first ``size`` bytes of a file as a copy-on-write map; writes to the array do not change the file.

    ``size=None`` is the whole file, also one that another process replaces meanwhile.

    ``mapped=False`` reads the bytes instead; ``None`` reads them on a network file system, where an I/O error on a map
    would kill the process. So would touching the missing pages of a shorter file, which is a CorruptStoreError.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    with opened_file(path, os.O_RDONLY) as fd:
        status = os.fstat(fd)
        size = status.st_size if size is None else size
        if size == 0:
            return np.empty(0, np.uint8)
        if status.st_size < size:
            raise CorruptStoreError(f"{path} has {status.st_size} bytes, expected {size}: it was truncated.")
        if mapped is False or (mapped is None and is_network(status.st_dev)):
            return _read(fd, path, size)
        pages = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    return np.frombuffer(pages, np.uint8, size)


def _read(fd: int, path: str, size: int) -> NDArray[np.uint8]:
    content = np.empty(size, np.uint8)
    with os.fdopen(os.dup(fd), "rb") as file:
        left = size - file.readinto(content.data)
    if left:
        raise CorruptStoreError(f"{path} was truncated while it was read, {left} bytes before its end.")
    return content


def network_devices(mountinfo: str) -> frozenset[int]:
    """Return the device numbers of the network file systems in a mount table, a text as ``/proc/self/mountinfo``.

    FUSE file systems count as network file systems, because most of them are (s3fs, sshfs, gcsfuse).
    """
    devices = set()
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()[:1]
        if len(fields) < 3 or not kind or not _NETWORK.fullmatch(kind[0].partition(".")[0]):
            continue
        major, _, minor = fields[2].partition(":")
        if major.isdecimal() and minor.isdecimal():
            devices.add(os.makedev(int(major), int(minor)))
    return frozenset(devices)


@functools.lru_cache(maxsize=256)
def is_network(device: int) -> bool:
    """Return whether a device number (``st_dev``) is a network file system; ``False`` if the mount table is missing."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            return device in network_devices(file.read())
    except OSError:
        return False
