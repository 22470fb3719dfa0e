"""Rounds of the fault campaign that mount file systems: an ext4 image, a small tmpfs, a mount to read."""

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import time

import numpy as np
import store_cases
from fault_power import tree
from fault_rounds import check_reader, complete_chunks, fill_as_room_comes
from store_cases import LONG, MANIFEST, open_for_writing, values

from trak_lite.errors import ReadOnlyStoreError
from trak_lite.store import ZarrFeatureStore


def power_cut_image(this):
    """Copy the image of a mounted ext4 in the middle of a run, mount the copy, and see."""
    image, done = os.path.join(this.folder, "image"), os.path.join(this.folder, "done")
    with open(image, "wb") as file:
        file.truncate(8 << 20)
    command("mkfs.ext4", "-q", "-b", "1024", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
    with mounted(os.path.join(this.folder, "mounted"), "-o", "loop", image) as place:
        path = os.path.join(place, "run.zarr")
        pid = this.forks.start("write", path, done, 3, "long", 0.01, synced=True)
        try:
            for _ in range(this.pick.randint(1, 4)):
                time.sleep(this.pick.uniform(0, 0.3))
                _check_copy(this, image, pid, done)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            this.forks.wait(pid)
        this.finish(path, LONG)


def acknowledged(path):
    """The rows whose ``put`` has returned, as a victim noted them; a line cut off by a kill was no acknowledgement."""
    if not os.path.exists(path):
        return []
    return [int(line) for line in store_cases.content(path).rpartition(b"\n")[0].split()]


def _check_copy(this, image, pid, done):
    rows, before, copy = set(acknowledged(done)), None, os.path.join(this.folder, "copy")
    with contextlib.suppress(ProcessLookupError), _stopped(pid):
        for _ in range(50):  # equal to itself a moment later: nothing was written while it was copied
            whole = store_cases.content(image)
            if whole == before:
                break
            before = whole
    store_cases.overwrite(copy, before)
    with mounted(os.path.join(this.folder, "after"), "-o", "loop", copy) as place:
        path = os.path.join(place, "run.zarr")
        check_reader(path, complete_chunks(rows, LONG), made=bool(rows))
        this.finish(path, LONG)
    this.totals["power cuts of an ext4 image"] += 1


@contextlib.contextmanager
def _stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def small_disk(this):
    """A real full disk, a small tmpfs; room comes back piece by piece."""
    with mounted(os.path.join(this.folder, "small"), "-t", "tmpfs", "-o", "size=4m", "tmpfs") as small:
        ballast, path = os.path.join(small, "ballast"), os.path.join(small, "run.zarr")
        with open(ballast, "wb") as file:
            room = this.pick.choice([0, 4, 16, 60, 200]) << 10
            os.posix_fallocate(file.fileno(), 0, (4 << 20) - (64 << 10) - room)

        def shrink(full):
            os.truncate(ballast, max(os.path.getsize(ballast) - this.pick.choice([4096, 16384]), 0))

        fill_as_room_comes(this, path, shrink)
        os.truncate(ballast, 0)
        this.finish(path)


def read_only(this):
    """A mount that may only be read: reading works, writing is refused, and not a byte changes."""
    path = os.path.join(this.folder, "run.zarr")
    store, table = open_for_writing(path, this.spec)
    table.put(0, values(range(this.pick.randint(1, this.spec.num_rows)), this.spec))
    noted = np.flatnonzero(table.done()).tolist()
    store.close()
    before = tree(path)
    with mounted(path, "--bind", path):
        command("mount", "-o", "remount,bind,ro", path)
        check_reader(path, noted)
        for use, given in ((ZarrFeatureStore.open, "r+"), (ZarrFeatureStore.create, MANIFEST)):
            store_cases.raises(ReadOnlyStoreError, None, use, path, given)
    assert tree(path) == before, "reading has changed the store"
    this.totals["read-only stores"] += 1
    this.finish(path)


@functools.cache
def may_mount():
    """Return whether this process may mount file systems, images of disks included."""
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if tried.returncode == 0:
            command("umount", folder)
        return tried.returncode == 0


def command(*words):
    """Run a program and wait for it to succeed."""
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder, *options):
    """Mount something on a folder, which is made if it is not there."""
    os.makedirs(folder, exist_ok=True)
    command("mount", *options, folder)
    try:
        yield folder
    finally:
        command("umount", "-l", folder)


NEED_MOUNTS = {each.__name__: each for each in (power_cut_image, small_disk, read_only)}
