"""File systems of a test's own, where this process may mount any."""

import contextlib
import functools
import os
import subprocess
import tempfile


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
