"""Where a store can be: addresses and what they need, and network file systems, whose files are not mapped."""

import copy
import mmap
import os
import pickle
import shutil
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from store_cases import MANIFEST, NAME, SPEC, check_rows, make, open_remote, put_pending, raises, values

from trak_lite.cli import main
from trak_lite.core import mapped
from trak_lite.errors import InvalidInputError, StoreError, UnsupportedStoreError
from trak_lite.store import RemotePlace, ZarrFeatureStore, create_store, open_store

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
obstore_store = pytest.importorskip("obstore.store", reason="obstore is not installed")


@pytest.fixture
def url():
    yield f"memory://{uuid.uuid4().hex}/run.zarr"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache folder, where rows are staged unless another folder is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def finished(url):
    with create_store(RemotePlace(url), MANIFEST) as store:
        put_pending(store.create_table(NAME, SPEC))


def test_rows_are_staged_in_the_cache_folder_and_removed_when_committed(url, cache):
    """The folder depends on the address and the settings, and holds no chunk that is at the address."""
    with create_store(RemotePlace(url), MANIFEST) as store:
        table = store.create_table(NAME, SPEC)
        table.put(0, values(range(6)))
        (root,) = (cache / "trak_lite" / "staging").glob("*.zarr")
        assert [path.name for path in root.rglob("*.rows")] == ["1.rows"]
        put_pending(table)
        assert not [path for path in root.rglob("*") if path.is_file()]
    assert RemotePlace(url).staging_root(MANIFEST) == str(root)
    assert RemotePlace(url + "2").staging_root(MANIFEST) != str(root)


def test_a_reader_writes_nothing(url, cache):
    finished(url)
    shutil.rmtree(cache)
    objects = dict(fsspec.filesystem("memory").store)
    with open_store(RemotePlace(url)) as store:
        check_rows(store.open_table(NAME))
        assert store.cached("gram", "key") is None
    assert fsspec.filesystem("memory").store == objects
    assert not cache.exists()


def test_the_command_checks_an_address(url, cache, capsys):
    finished(url)
    assert main(["check", url]) == 0
    assert "11 rows done, 0 pending, 3 chunks" in capsys.readouterr().out
    assert main(["check", url, "--repair"]) == 2
    assert "cannot be repaired in an object store" in capsys.readouterr().err
    assert main(["check", f"{url}-none"]) == 2


@pytest.mark.quick
@pytest.mark.parametrize("where", [3, None, "file:///tmp/run.zarr", "nothing-known://bucket"])
def test_what_is_no_place_is_refused(where):
    raises(InvalidInputError, "Expected a", RemotePlace, where)


@pytest.mark.parametrize("where", ["./a:b", Path("runs/digits.zarr")])
def test_local_paths_stay_paths(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    with create_store(where, MANIFEST) as store:
        assert store.path == str(tmp_path / where)


def test_a_place_is_named(tmp_path):
    place = RemotePlace(obstore_store.LocalStore(tmp_path))
    assert str(tmp_path) in str(place)
    assert str(pickle.loads(pickle.dumps(place))) == str(copy.deepcopy(place)) == str(place)
    memory = obstore_store.MemoryStore()
    assert str(RemotePlace(memory)) == f"MemoryStore {id(memory):#x} of process {os.getpid()}"
    assert str(RemotePlace("s3://bucket/run.zarr", options={"region": "eu-west-1"})) == "s3://bucket/run.zarr"


@pytest.mark.parametrize("url", ["s3://bucket/run.zarr", "memory://bucket/run.zarr"])
def test_a_missing_package_is_named(monkeypatch, url):
    for name in ("obstore", "obstore.store", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    raises(UnsupportedStoreError, r"pip install -e '\.\[remote\]\'", RemotePlace, url)


def test_a_place_that_does_not_answer_is_named(tmp_path):
    """The package's own error becomes one that says what was asked for, where, and what to do."""
    (tmp_path / "objects" / "zarr.json" / "x").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"objects.*zarr.json"), open_remote(tmp_path):
        pass


# Network file systems.

TABLE = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
36 22 0:52 / /home rw,relatime shared:1 - nfs4 server:/home rw,hard
37 22 0:53 / /mnt/with\\040space rw shared:2 master:1 - cifs //server/share rw
38 22 0:54 / /bucket rw,nosuid - fuse.s3fs s3fs rw
39 22 0:55 / /dev/shm rw - tmpfs tmpfs rw
40 22 0:56 / /scratch rw - lustre 10.0.0.1@tcp:/fs rw
41 22 8:1 / /usb rw - fuseblk /dev/sda1 rw
42 22 x:y / /odd rw - nfs server:/odd rw
nonsense
43 22 0:57 / /cut rw -
"""


def test_network_file_systems_are_told_by_the_mount_table():
    assert mapped.network_devices(TABLE) == {os.makedev(0, minor) for minor in (52, 53, 54, 56)}
    assert mapped.network_devices("") == frozenset()


@pytest.fixture
def mount_table(tmp_path, monkeypatch):
    """Makes the mount table say of what kind the file system of the test's folder is; of none, there is no table."""

    def say(kind):
        device, table = os.stat(tmp_path).st_dev, tmp_path / "mountinfo"
        if kind is not None:
            table.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} thing rw\n")
        monkeypatch.setattr(mapped, "_MOUNTS", str(table))
        mapped.is_network.cache_clear()

    yield say
    mapped.is_network.cache_clear()


MAPPED = [("ext4", "auto"), (None, "auto"), ("nfs4", "always")]


@pytest.mark.parametrize(("kind", "mapping"), [*MAPPED, ("nfs4", "auto"), ("ext4", "never")])
def test_chunks_on_a_network_file_system_are_read_not_mapped(path, monkeypatch, mount_table, kind, mapping):
    """What is read is the same either way, and arrays that were handed out keep their rows."""
    make(path, range(11))
    mount_table(kind)
    mapped, real = [], mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *a, **k: mapped.append(a) or real(*a, **k))
    with ZarrFeatureStore.open(path, mapping=mapping) as store:
        table = store.open_table(NAME)
        kept = [table.read_chunk(chunk, "features") for chunk in range(3)]
        check_rows(table)
    np.testing.assert_array_equal(np.concatenate(kept), values(range(11))["features"])
    assert bool(mapped) == ((kind, mapping) in MAPPED)


def test_resuming_on_a_network_file_system_maps_nothing(path, monkeypatch, mount_table):
    """Staged rows are proven, and derived arrays found, by reading as well."""
    make(path, range(6))
    mount_table("nfs")
    monkeypatch.setattr(mmap, "mmap", None)
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        table = store.create_table(NAME, SPEC)
        assert table.pending().tolist() == list(range(6, 11))
        put_pending(table)
        store.cache("gram", "key", np.eye(3))
        np.testing.assert_array_equal(store.cached("gram", "key"), np.eye(3))
        check_rows(table)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(path, monkeypatch):
    make(path, range(11))
    real, looks = os.dup, []

    def shrinks(fd):
        looks.append(os.readlink(f"/proc/self/fd/{fd}"))
        os.truncate(looks[-1], 15)
        return real(fd)

    with ZarrFeatureStore.open(path, mapping="never") as store:
        table = store.open_table(NAME)
        monkeypatch.setattr(os, "dup", shrinks)
        with pytest.raises(StoreError, match="was truncated while it was read, 1 bytes before its end"):
            table.read_chunk(1, "q")
    assert looks == [f"{path}/{NAME}/q/c.1"]
