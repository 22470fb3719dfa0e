"""A store or a table is either there, complete, or it is not there."""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time

import pytest
import zarr
from store_cases import MANIFEST, NAME, SPEC, check_all, finish, snapshot, values, writing

from trak_lite.errors import CorruptStoreError, InvalidInputError, ManifestMismatchError, StoreError
from trak_lite.store import Manifest, ZarrFeatureStore, check_store
from trak_lite.store.disk import zarr_store
from trak_lite.store.manifest import FORMAT


def scratch_names(parent):
    return [name for name in os.listdir(parent) if ".new-" in name]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_an_interrupted_creation_leaves_no_half_store(tmp_path, victims, count):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed(f"folder_built:{count}", "write", path, done, 11)

    assert os.path.exists(path) == (count > 1)
    assert len(scratch_names(tmp_path if count == 1 else f"{path}/.tables")) == 1
    if count > 1:
        assert ZarrFeatureStore.open(path).table_names() == []
        assert "new" not in str(list(zarr.open_group(path, mode="r").members(max_depth=None)))
    finish(path)
    if count > 1:  # swept by the next writer, at once
        assert scratch_names(f"{path}/.tables") == []


def test_what_a_killed_creation_left_is_removed_later(tmp_path, victims):
    """Once it is old, and unless somebody is still at it."""
    path = str(tmp_path / "run.zarr")
    assert victims.killed("folder_built:1", "create", path, 0)
    (abandoned,) = scratch_names(tmp_path)
    (tmp_path / ".run.zarr.new-living").mkdir()
    living = os.open(tmp_path / ".run.zarr.new-living", os.O_RDONLY)
    fcntl.flock(living, fcntl.LOCK_EX)
    (tmp_path / ".run.zarr.new-young").mkdir()
    for name in (abandoned, ".run.zarr.new-living"):
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)

    ZarrFeatureStore.create(path, MANIFEST)
    os.close(living)
    assert sorted(scratch_names(tmp_path)) == [".run.zarr.new-living", ".run.zarr.new-young"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_creation_that_fails_cleans_up(tmp_path, monkeypatch, error):
    def fail(*arguments, **keywords):
        raise error

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises((KeyboardInterrupt, StoreError)):
        ZarrFeatureStore.create(tmp_path / "run.zarr", MANIFEST)
    assert os.listdir(tmp_path) == []


def test_one_of_many_creators_wins_and_the_others_compare(tmp_path, victims):
    for attempt in range(3):
        path = str(tmp_path / f"{attempt}.zarr")
        started = [(seed, victims.start("create", path, seed)) for seed in (0, 1, 0, 1, 0, 1)]
        answers = {(seed, victims.wait(pid)[1]) for seed, pid in started}

        winner = ZarrFeatureStore.open(path).manifest.fingerprint["seed"]
        assert answers == {(winner, "made"), (1 - winner, "ManifestMismatchError")}
        assert ZarrFeatureStore.open(path).table_names() == [NAME]
        assert scratch_names(tmp_path) == []


def test_whoever_is_second_opens_what_the_first_made(tmp_path, monkeypatch):
    """The rename finds the name taken."""
    path = str(tmp_path / "run.zarr")
    rename = os.rename

    def too_late(source, target, **folders):
        monkeypatch.setattr(os, "rename", rename)
        ZarrFeatureStore.create(path, MANIFEST)
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", too_late)
    with pytest.raises(ManifestMismatchError, match="seed is 0 there, 7 here"):
        ZarrFeatureStore.create(path, Manifest({**MANIFEST.fingerprint, "seed": 7}))
    assert os.listdir(tmp_path) == ["run.zarr"]


def test_a_folder_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    before = snapshot(tmp_path)
    for name in ("run.zarr", "file"):
        with pytest.raises(CorruptStoreError, match="exists and is not a store"):
            ZarrFeatureStore.create(tmp_path / name, MANIFEST)
    assert snapshot(tmp_path) == before


def test_a_table_does_not_replace_a_foreign_folder(path):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        os.makedirs(f"{path}/ckpt-0")
        with open(f"{path}/ckpt-0/notes", "w") as file:
            file.write("x")
        with pytest.raises(StoreError, match="no table 'ckpt-0'"):
            store.create_table("ckpt-0", SPEC)
    assert os.listdir(f"{path}/ckpt-0") == ["notes"]


@pytest.mark.parametrize(
    "name",
    [
        "with space.zarr",
        "Zürich & 東京.zarr",
        'it\'s "quoted".zarr',
        "a#b?c%20d.zarr",
        "x::y",
        "a/b/c.zarr",
        "plain",
    ],
)
def test_any_path_will_do(tmp_path, name):
    path = str(tmp_path / name)
    with writing(path) as table:
        table.put(0, values(range(11)))
    check_all(path)


def test_a_relative_path_outlives_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ZarrFeatureStore.create("run.zarr", MANIFEST)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.create_table(NAME, SPEC).put(0, values(range(11)))
    check_all(str(tmp_path / "run.zarr"))


def test_an_empty_folder_and_a_dangling_link_become_stores(tmp_path):
    (tmp_path / "empty").mkdir()
    os.symlink(tmp_path / "target.zarr", tmp_path / "link.zarr")
    for name in ("empty", "link.zarr"):
        with writing(str(tmp_path / name)) as table:
            table.put(0, values(range(11)))
    check_all(str(tmp_path / "target.zarr"))


def test_another_maker_is_worth_a_warning(path, caplog):
    ZarrFeatureStore.create(path, Manifest({"seed": 0}, {"torch": "2.10"}))
    with caplog.at_level(logging.WARNING):
        ZarrFeatureStore.create(path, Manifest({"seed": 0}, {"torch": "2.13"}))
    assert "2.10" in caplog.text


def test_only_the_present_format_is_written(path):
    with pytest.raises(InvalidInputError, match="writes format 3, got 4"):
        ZarrFeatureStore.create(path, Manifest({}, {}, FORMAT + 1))
    assert not os.path.exists(path)


def test_a_store_that_another_creates_between_two_looks_is_opened(path, monkeypatch):
    look = zarr_store.read_attributes

    def late(folder):
        found = look(folder)
        monkeypatch.setattr(zarr_store, "read_attributes", look)
        ZarrFeatureStore.create(path, MANIFEST).close()
        return found

    monkeypatch.setattr(zarr_store, "read_attributes", late)

    assert ZarrFeatureStore.create(path, MANIFEST).manifest == MANIFEST


def test_a_group_goes_with_its_last_table_unless_one_is_made_in_it(path, monkeypatch):
    """The group is removed between the look for it and the creation of a table in it, and the other way round."""
    store, other = (ZarrFeatureStore.create(path, MANIFEST) for _ in range(2))
    store.create_table("targets/a/x", SPEC)
    store.create_table("targets/b/x", SPEC)
    store.drop_table("targets/b/x")
    assert sorted(os.listdir(f"{path}/targets")) == ["a", "zarr.json"]

    def before(name, last, call):
        real = getattr(os, name)

        def patched(*arguments, **named):
            if arguments[-1] == last:
                monkeypatch.setattr(os, name, real)
                call()
            return real(*arguments, **named)

        monkeypatch.setattr(os, name, patched)

    before("rename", "y", lambda: store.drop_table("targets/a/x"))
    other.create_table("targets/a/y", SPEC)
    assert store.table_names() == ["targets/a/y"]


@pytest.mark.parametrize("name", ["unlink", "rmdir", "rename"])
def test_a_group_that_goes_while_a_table_is_made_in_it_is_never_damaged(path, monkeypatch, name):
    """A table is published in the group just before a step of its removal, and the process ends after this step."""
    store, other = (ZarrFeatureStore.create(path, MANIFEST) for _ in range(2))
    store.create_table("targets/a/y", SPEC)
    real = {each: getattr(os, each) for each in ("unlink", "rmdir", "rename")}
    built, wanted, published = (threading.Event() for _ in range(3))

    class Killed(BaseException):
        pass

    def patched(*arguments, **named):
        folder = named.get("dir_fd", named.get("src_dir_fd"))
        step = os.readlink(f"/proc/self/fd/{folder}"), arguments[0]
        if arguments[-1] == "z" and not built.is_set():
            built.set()
            assert wanted.wait(30)
            real["rename"](*arguments, **named)
            published.set()
        elif (
            built.is_set()
            and not wanted.is_set()
            and step
            in (
                (f"{path}/targets/a", "zarr.json"),
                (f"{path}/targets", "a"),
            )
        ):
            wanted.set()
            assert published.wait(30)
            with contextlib.suppress(OSError):
                real[name](*arguments, **named)
            raise Killed
        else:
            real[name if arguments[-1] != "z" else "rename"](*arguments, **named)

    creator = threading.Thread(target=other.create_table, args=("targets/a/z", SPEC))
    monkeypatch.setattr(os, "rename", patched)
    creator.start()
    assert built.wait(30)
    monkeypatch.undo()
    monkeypatch.setattr(os, name, patched)
    with contextlib.suppress(Killed):
        store.drop_table("targets/a/y")
    monkeypatch.undo()
    wanted.set()
    creator.join(30)
    assert check_store(path).findings == ()
    other.create_table("targets/a/x", SPEC)
    assert sorted(zarr.open_group(f"{path}/targets/a", mode="r").group_keys()) == ["x", "z"]


def test_a_kill_while_a_group_goes_leaves_a_sound_store(path, victims):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.create_table("targets/a/y", SPEC)
    assert victims.killed("group_renamed:1", "drop", path, "targets/a/y")
    assert check_store(path).findings == ()
    with ZarrFeatureStore.open(path, "r+") as store:
        assert os.listdir(f"{path}/targets") == os.listdir(f"{path}/.tables") == ["zarr.json"]
        store.create_table("targets/a/y", SPEC)
        assert list(zarr.open_group(f"{path}/targets/a", mode="r").group_keys()) == ["y"]
