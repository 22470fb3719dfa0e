"""Where a store can be: addresses, what they need, copies from one place to another, and network file systems."""

import os
import shutil
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import zarr
from store_cases import MANIFEST, NAME, SPEC, open_remote, reading, values, writing

from trak_lite.cli import main
from trak_lite.errors import InvalidInputError, StoreError, UnsupportedStoreError
from trak_lite.store import RemotePlace, ZarrFeatureStore, check_store, create_store, open_store
from trak_lite.store.disk import files, mounts
from trak_lite.store.remote.objects_fsspec import FsspecObjects
from trak_lite.store.remote.place import resolve_place
from trak_lite.store.remote.remote_store import RemoteFeatureStore

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


def fill(table):
    pending = table.pending()
    table.put(pending, values(pending))


def check_plain(group):
    """zarr reads what was put, with nothing of ours in between."""
    for name, expected in values(range(SPEC.num_rows)).items():
        np.testing.assert_array_equal(group[f"{NAME}/{name}"][:], expected)


def test_plain_zarr_reads_a_finished_store_through_fsspec(url, cache):
    with create_store(resolve_place(url), MANIFEST) as store:
        fill(store.create_table(NAME, SPEC))
    check_plain(zarr.open_group(zarr.storage.FsspecStore.from_url(url, read_only=True), mode="r"))


def test_plain_zarr_reads_a_finished_store_through_obstore(tmp_path):
    with open_remote(tmp_path) as (_, table):
        fill(table)
    objects = obstore_store.LocalStore(tmp_path / "objects")
    check_plain(zarr.open_group(zarr.storage.ObjectStore(objects, read_only=True), mode="r"))


def test_a_store_that_is_copied_to_a_disk_is_a_local_store(tmp_path):
    """With every record; nothing is left to do and nothing is strange."""
    with open_remote(tmp_path) as (_, table):
        fill(table)
        key = table.content_key()
    shutil.copytree(tmp_path / "objects", tmp_path / "copy.zarr")

    report = check_store(tmp_path / "copy.zarr")
    assert (report.findings, report.tally.done_rows) == ((), 11)
    with reading(str(tmp_path / "copy.zarr")) as table:
        assert table.content_key() == key
    with writing(str(tmp_path / "copy.zarr")) as table:
        assert not len(table.pending())


def test_a_local_store_that_is_copied_to_an_address_is_a_store_there(tmp_path):
    """Chunks that were committed; rows that were staged stay on the disk."""
    with writing(str(tmp_path / "local.zarr")) as table:
        table.put(0, values(range(9)))
    shutil.copytree(tmp_path / "local.zarr", tmp_path / "objects")

    with open_remote(tmp_path) as (store, table):
        assert table.committed_chunks() == [0, 1]
        assert table.pending().tolist() == [8, 9, 10]
        fill(table)
        assert store.check().ok
        for name, expected in values(range(11)).items():
            np.testing.assert_array_equal(table.read(name), expected)


def test_rows_are_staged_in_the_cache_folder_and_removed_when_committed(url, cache):
    """The folder depends on the address and the settings, and holds no chunk that is at the address."""
    with create_store(resolve_place(url), MANIFEST) as store:
        table = store.create_table(NAME, SPEC)
        table.put(0, values(range(6)))
        (root,) = (cache / "trak_lite" / "staging").glob("*.zarr")
        assert [path.name for path in root.rglob("*-features")] == ["1-features"]
        fill(table)
        assert list(root.rglob("*-features")) == list(root.rglob("c.*")) == []
    assert RemotePlace(url).staging_root(MANIFEST) == str(root)
    assert RemotePlace(url + "2").staging_root(MANIFEST) != str(root)


def test_a_reader_writes_nothing(url, cache):
    with create_store(resolve_place(url), MANIFEST) as store:
        fill(store.create_table(NAME, SPEC))
    shutil.rmtree(cache)
    objects = dict(fsspec.filesystem("memory").store)
    with open_store(resolve_place(url)) as store:
        store.open_table(NAME).read("q")
        assert store.cached("gram", "key") is None
    assert fsspec.filesystem("memory").store == objects
    assert not cache.exists()


def test_the_command_checks_an_address(url, cache, capsys):
    with create_store(resolve_place(url), MANIFEST) as store:
        fill(store.create_table(NAME, SPEC))
    assert main(["check", url]) == 0
    assert "11 rows done, 0 pending, 3 chunks" in capsys.readouterr().out
    assert main(["check", url, "--repair"]) == 2
    assert "cannot be repaired in an object store" in capsys.readouterr().err
    assert main(["check", f"{url}-none"]) == 2


@pytest.mark.parametrize("where", ["runs/digits.zarr", "./a:b", Path("runs")])
def test_local_paths_stay_paths(where):
    assert resolve_place(where) == os.fspath(where)


@pytest.mark.parametrize("where", [3, None, "file:///tmp/run.zarr", "nothing-known://bucket"])
def test_what_is_no_place_is_refused(where):
    with pytest.raises(InvalidInputError, match="Expected a"):
        resolve_place(where)


def test_a_store_of_obstores_is_a_place(tmp_path):
    place = resolve_place(obstore_store.LocalStore(tmp_path))
    assert resolve_place(place) is place
    assert str(tmp_path) in str(place)
    assert f"of pid {os.getpid()}" in str(resolve_place(obstore_store.MemoryStore()))


@pytest.mark.parametrize("url", ["s3://bucket/run.zarr", "memory://bucket/run.zarr"])
def test_a_missing_package_is_named(monkeypatch, url):
    for name in ("obstore", "obstore.store", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedStoreError, match=r"pip install trak-lite\[remote\]"):
        resolve_place(url)


def test_an_s3_address_is_opened_by_obstore():
    place = RemotePlace("s3://bucket/run.zarr", options={"region": "eu-west-1"})
    assert type(place.objects).__name__ == "ObstoreObjects"
    assert str(place) == "s3://bucket/run.zarr"


def test_fsspec_file_systems_that_look_first_and_write_then_are_refused(tmp_path):
    """Between the look and the write another writer fits."""
    filesystem = fsspec.filesystem("file")
    objects = FsspecObjects(filesystem, str(tmp_path), url="local")
    with pytest.raises(
        UnsupportedStoreError, match="LocalFileSystem cannot create an object only where there is none"
    ):
        RemoteFeatureStore.create(RemotePlace(objects, staging=tmp_path / "staging"), MANIFEST)


def test_a_place_that_does_not_answer_is_named(tmp_path):
    """The package's own error becomes one that says what was asked for, where, and what to do."""
    objects = obstore_store.LocalStore(tmp_path / "objects", mkdir=True)
    place = RemotePlace(objects, staging=tmp_path / "staging")
    (tmp_path / "objects" / "zarr.json").mkdir()
    (tmp_path / "objects" / "zarr.json" / "x").touch()
    with pytest.raises(StoreError, match=r"objects.*zarr.json"):
        RemoteFeatureStore.create(place, MANIFEST)


# ------------------------------------------------------------------ network file systems

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
    expected = {os.makedev(0, minor) for minor in (52, 53, 54, 56)}
    assert mounts.network_devices(TABLE) == expected
    assert mounts.network_devices("") == frozenset()


@pytest.fixture
def mount_table(tmp_path, monkeypatch):
    """Makes the mount table say of what kind the file system of the test's folder is."""

    def say(kind):
        device = os.stat(tmp_path).st_dev
        table = tmp_path / "mountinfo"
        table.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} thing rw\n")
        monkeypatch.setattr(mounts, "_MOUNTS", str(table))
        mounts.is_network.cache_clear()

    yield say
    mounts.is_network.cache_clear()


@pytest.mark.parametrize(
    ("kind", "mapping", "maps"),
    [("ext4", "auto", True), ("nfs4", "auto", False), ("nfs4", "always", True), ("ext4", "never", False)],
)
def test_chunks_on_a_network_file_system_are_read_not_mapped(
    tmp_path, monkeypatch, mount_table, kind, mapping, maps
):
    """What is read is the same either way, and arrays that were handed out keep their rows."""
    path = str(tmp_path / "run.zarr")
    with writing(path) as table:
        fill(table)
    mount_table(kind)
    mapped = []
    true_mmap = files.mmap.mmap
    monkeypatch.setattr(
        files.mmap, "mmap", lambda *args, **kwargs: mapped.append(1) or true_mmap(*args, **kwargs)
    )

    with ZarrFeatureStore.open(path, mapping=mapping) as store:
        table = store.open_table(NAME)
        kept = [table.read_chunk(chunk, name) for name in ("features", "q", "w") for chunk in range(3)]
        for name, expected in values(range(SPEC.num_rows)).items():
            np.testing.assert_array_equal(table.read(name), expected)
    np.testing.assert_array_equal(np.concatenate(kept[:3]), values(range(11))["features"])
    assert bool(mapped) == maps


def test_resuming_on_a_network_file_system_maps_nothing(tmp_path, monkeypatch, mount_table):
    """Staged rows are proven, and derived arrays found, by reading as well."""
    path = str(tmp_path / "run.zarr")
    with writing(path) as table:
        table.put(0, values(range(6)))
    mount_table("nfs")
    monkeypatch.setattr(files.mmap, "mmap", None)
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        table = store.create_table(NAME, SPEC)
        assert table.pending().tolist() == list(range(6, 11))
        fill(table)
        store.cache("gram", "key", np.eye(3))
        np.testing.assert_array_equal(store.cached("gram", "key"), np.eye(3))
        np.testing.assert_array_equal(table.read("q"), values(range(11))["q"])


def test_where_there_is_no_mount_table_files_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_MOUNTS", str(tmp_path / "none"))
    mounts.is_network.cache_clear()
    assert not mounts.is_network(os.stat(tmp_path).st_dev)
    mounts.is_network.cache_clear()


def test_an_unknown_way_of_mapping_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="mapping"):
        ZarrFeatureStore.open(tmp_path, mapping="sometimes")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "chunk"
    path.write_bytes(b"12345")
    true_fstat = os.fstat

    def longer(fd):
        found = true_fstat(fd)
        return os.stat_result((*found[:6], 6, *found[7:10]))

    monkeypatch.setattr(files.os, "fstat", longer)
    with pytest.raises(StoreError, match="was truncated while it was read, 1 bytes before its end"):
        files.map_file(str(path), 6, mapped=False)
