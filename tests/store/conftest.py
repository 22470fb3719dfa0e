"""The process that forks victims, shared by the tests of this folder."""

import functools
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from forking import Forks
from store_cases import make, path_of, values, writing

from trak_lite.store import ZarrFeatureStore

pytest.register_assert_rewrite("store_laws")  # a failing law shows its values


class Victims(Forks):
    """Starts actions of ``store_victims`` in processes of their own."""

    def run(self, action, *arguments):
        status, answer = self.wait(self.start(action, *arguments))
        assert status == 0
        return answer

    def killed(self, failpoint, action, *arguments):
        """Return whether the process died at the failpoint (and did not just get to the end)."""
        status, _ = self.wait(self.start(action, *arguments, failpoint=failpoint))
        assert status in (0, -signal.SIGKILL)
        return status != 0


@pytest.fixture(scope="session")
def victims():
    started = Victims(str(Path(__file__).with_name("store_victims.py")))
    yield started
    started.close()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.zarr")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return what makes a copy of a store at a path: each kind of store is written once."""

    @functools.cache
    def made(write):
        path = str(tmp_path_factory.mktemp("once") / "run.zarr")
        write(path)
        return path

    return lambda write, path: shutil.copytree(made(write), path)


def write_mixed(path):
    with writing(path) as table:
        for start, count in ((0, 8), (8, 1), (9, 1)):
            table.put(start, values(range(start, start + count)))
    with ZarrFeatureStore.open(path, "r+") as store:
        store.cache("gram", "key", np.eye(2))


@pytest.fixture
def full(path, once):
    return once(lambda path: make(path, range(11)), path)


@pytest.fixture
def mixed(path, once):
    """Chunks 0 and 1 committed; of chunk 2 the rows 8 and 9 are staged in two puts, row 10 is pending."""
    return once(write_mixed, path)


@pytest.fixture
def steps(monkeypatch):
    """Every sync and rename, in the order in which they end; a sync takes longer than a rename."""
    seen, rename = [], os.rename

    def record_sync(fd):
        name = path_of(fd)
        time.sleep(0.005)
        seen.append(("sync", name))

    def record_rename(source, target, *, src_dir_fd, dst_dir_fd):
        seen.append(("rename", f"{path_of(src_dir_fd)}/{source}", f"{path_of(dst_dir_fd)}/{target}"))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    return seen
