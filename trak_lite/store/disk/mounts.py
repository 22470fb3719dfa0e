"""Detection of network file systems, where files are read, not mapped: an I/O error on a map kills the process."""

from __future__ import annotations

import functools
import os

__all__ = ["is_network", "network_devices"]

_MOUNTS = "/proc/self/mountinfo"
_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "davfs",
    "fuse",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb3",
    "smbfs",
    "wekafs",
}


def network_devices(mountinfo: str) -> frozenset[int]:
    """Return the device numbers of the network file systems in a mount table.

    FUSE file systems count as network file systems, because most of them are (s3fs, sshfs, gcsfuse).

    Args:
        mountinfo: Text in the format of ``/proc/self/mountinfo``; other lines are ignored.

    Example:
        >>> table = "36 35 0:52 / /home rw,relatime shared:1 - nfs4 server:/home rw,hard"
        >>> network_devices(table) == {os.makedev(0, 52)}
        True
    """
    devices = set()
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()[:1]
        if len(fields) < 3 or not kind or kind[0].partition(".")[0] not in _NETWORK:
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
