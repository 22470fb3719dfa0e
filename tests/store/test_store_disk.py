"""The disk: what is made on it and in which order, and one that is full, broken, shared or not writable."""

import errno
import fcntl
import itertools
import logging
import os
import tempfile
import threading
import time
from unittest import mock

import numpy as np
import pytest
import store_cases as cases
from late import Late
from store_cases import MANIFEST, NAME, SPEC, folder, raises, snapshot, staged, values, writing

from trak_lite import errors
from trak_lite.errors import (
    ManifestMismatchError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
    StoreFullError,
    UnsupportedStoreError,
)
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore, check_store

zarr = Late("zarr")

COLUMNS = ("features", "q", "w")
CTRL_C, STOPPED, BROKEN = KeyboardInterrupt(), SystemExit(143), OSError(errno.EIO, "broken")


# Faults.


@pytest.mark.parametrize("errors", [(BROKEN,), (CTRL_C,), (STOPPED,), (CTRL_C, STOPPED)])
@pytest.mark.parametrize("call", ["open", "pwrite", "posix_fallocate", "fsync", "rename", "unlink"])
def test_any_call_may_fail(tmp_path, call, errors):
    """Whichever call it is: rows already put stay done, the rest can be put at once by the same process.

    The second error comes at the next such call: inside the clean-up.
    """
    for count in itertools.count(1, 3 if call == "open" else 1):  # of some seventy, every third
        path = str(tmp_path / f"{count}.zarr")
        store, table = cases.open_for_writing(path)
        table.put(0, values(range(3)))
        refused = None
        with cases.failing_call(call, count, *errors) as left:
            try:
                table.put(3, values(range(3, 11)))
            except (StoreError, KeyboardInterrupt, SystemExit) as error:
                refused = error
        assert refused is None or isinstance(refused, StoreError) == isinstance(errors[0], OSError)
        done = set(range(3 if refused else 11))
        for chunk in table.committed_chunks():
            done |= set(range(*table.chunk_range(chunk)))
        with cases.reading(path) as reader:
            for seen in (table, reader):
                assert set(np.flatnonzero(seen.done()).tolist()) == done
                assert {row for chunk in range(3) for row in seen.read_done(chunk)[0].tolist()} == done
        cases.put_pending(table, 11)
        store.close()
        cases.finish(path)
        if len(left) == len(errors):  # there is no such call any more
            assert not refused
            break
    assert count >= 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "error"),
    [
        *((code, StoreFullError) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        *((code, ReadOnlyStoreError) for code in (errno.EROFS, errno.EACCES, errno.EPERM)),
        *((code, UnsupportedStoreError) for code in (errno.ENOLCK, errno.ENOSYS)),
        (errno.EIO, StoreError),
    ],
)
def test_an_error_of_the_system_gets_a_name_and_keeps_its_cause(path, code, error):
    _, table = cases.open_for_writing(path)
    failure = OSError(code, os.strerror(code))
    with cases.failing_call("pwrite", 1, failure), pytest.raises(StoreError) as caught:
        table.put(0, values([0]))
    assert type(caught.value) is error
    assert f"Writing rows to {path}/{NAME} failed: {os.strerror(code)}." in str(caught.value)
    assert ("(ulimit -f)" in str(caught.value)) == (code == errno.EFBIG)
    assert caught.value.__cause__.errno == code
    table.put(0, values([0]))


@pytest.mark.quick
@pytest.mark.parametrize(("rows", "size"), [(range(8), 11), (range(0, 160, 4), 160)])
def test_a_full_disk_refuses_the_whole_batch_and_frees_what_it_took(path, rows, size):
    """Also of chunks that did not stay open: only so many row logs are open at a time."""
    with writing(path, cases.sized(size)) as table:
        table.put(1, values([1]))
        before = os.path.getsize(cases.row_log(path, 0))
        last = len(range(0, rows[-1] + 1, SPEC.chunk_rows))
        given, said = sorted({*rows} - {1}), r"No space left on device.*stay pending.*Free some space"
        with cases.failing_call("posix_fallocate", last, OSError(errno.ENOSPC, "No space left on device")):
            raises(StoreFullError, said, table.put, given, values(given))
        assert os.listdir(folder(path, "features", ".stage")) == ["0.rows"]
        assert os.path.getsize(cases.row_log(path, 0)) == before
        assert table.done().nonzero()[0].tolist() == [1]
        table.put(0, values([0]))
    cases.finish(path, cases.sized(size))


def test_the_error_of_a_failed_commit_can_be_shown(path, victims):
    """Whoever shows it reads what its frames hold: maps of a row log would be of bytes that are gone."""
    assert victims.run("show_a_failed_commit", path) == [4, 5, 6, 7]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_without_fallocate_files_are_filled_with_zeros(path, monkeypatch, code):
    """Behind rows that are there already."""
    cases.make(path, [1])
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(code, "unsupported")))
    if code is None:
        monkeypatch.delattr(os, "posix_fallocate")
    with writing(path) as table:
        table.put(0, values([0]))
        assert table.pending().tolist() == list(range(2, 11))
    cases.finish(path)


def test_an_interrupt_waits_for_the_syncs_of_all_files(path, monkeypatch):
    """Their descriptors are closed afterwards."""
    _, table = cases.open_for_writing(path)
    join, synced, interrupts = threading.Thread.join, [], [KeyboardInterrupt()]

    def slow(fd):
        name = cases.path_of(fd)
        time.sleep(0.05 if threading.current_thread() is not threading.main_thread() else 0)
        synced.append(name)

    def interrupted(thread, timeout=None):
        if interrupts:
            raise interrupts.pop()
        join(thread, timeout)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    raises(KeyboardInterrupt, None, table.put, 0, values(range(4)))
    assert sorted(synced) == [staged(path, 0, name) for name in COLUMNS]


@pytest.mark.parametrize("broken", [["features"], ["q"], COLUMNS])
def test_files_whose_sync_failed_are_written_again(path, monkeypatch, broken):
    """Otherwise a second sync succeeds without writing anything."""
    _, table = cases.open_for_writing(path)
    written, real = {}, os.pwrite
    files = [staged(path, 0, column) for column in broken]

    def record(fd, data, at):
        written.setdefault(cases.path_of(fd), []).append((at, bytes(data)))
        return real(fd, data, at)

    with cases.failing_for("fsync", lambda fd: cases.path_of(fd) in files, BROKEN):
        raises(StoreError, "broken", table.put, 0, values(range(4)))
    assert table.pending().tolist() == list(range(11))
    monkeypatch.setattr(os, "pwrite", record)
    table.put(0, values(range(4)))
    for name, file in zip(broken, files, strict=True):
        assert written[file] == [(0, values(range(4))[name].tobytes())]


def test_a_chunk_is_synced_without_a_further_thread(path, monkeypatch):
    synced = []

    def none_left(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, writing(path) as table:
        patched.setattr(threading.Thread, "start", none_left)
        patched.setattr(os, "fsync", lambda fd: synced.append(cases.path_of(fd)))
        table.put(0, values(range(4)))
    assert [staged(path, 0, name) for name in COLUMNS] == synced[:3]
    cases.finish(path)


# Who may write, and what.


def test_a_folder_that_cannot_be_written_is_refused_for_writing(path, monkeypatch):
    cases.make(path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for use in (lambda: ZarrFeatureStore.open(path, "r+"), lambda: ZarrFeatureStore.create(path, MANIFEST)):
        raises(ReadOnlyStoreError, r"cannot be written.*another path\..*open_store\(path, mode='r'\)", use)
    with ZarrFeatureStore.open(path) as store:
        assert store.table_names() == [NAME]
        raises(
            ReadOnlyStoreError,
            r"opened for reading.*another path\..*open_store\(path, mode='r\+'\)",
            store.drop_table,
            NAME,
        )


@pytest.mark.parametrize(("denied", "said"), [(os.R_OK, "to read"), (os.X_OK, "to read"), (None, "mode='r'")])
def test_a_file_that_may_not_be_read_asks_for_the_right_to_read_it(path, monkeypatch, denied, said):
    """Not for a folder that can be written, nor for mode='r'; one that may be read, for the right to write."""
    cases.make(path)
    monkeypatch.setattr(os, "access", lambda name, mode: mode != denied)
    error = PermissionError(13, "Permission denied", f"{path}/zarr.json")
    refused = cases.failing_for("open", lambda name: name == "zarr.json", error)
    with refused, pytest.raises(StoreError, match=rf"Permission denied.*{said}") as caught:
        ZarrFeatureStore.open(path)
    assert isinstance(caught.value, ReadOnlyStoreError) == (denied is None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_a_user_who_may_only_read_reads_and_is_told_which_file_he_may_not_read(victims):
    """Of a store with a committed chunk and a staged one; writing is refused, and not a byte changes."""
    with tempfile.TemporaryDirectory() as root:  # where anybody may look, as not in pytest's folder
        path, rows = os.path.join(root, "run.zarr"), values(range(6))["q"].tolist()
        cases.make(path, range(6))
        for place in (root, *snapshot(root)):
            os.chmod(place, 0o755)
        before = snapshot(path)
        assert victims.run("look_as_nobody", path) == [rows, ["ReadOnlyStoreError"] * 2, []]
        for file in cases.files_below(path):
            os.chmod(file, 0)
            _, _, errors = victims.run("look_as_nobody", path)
            os.chmod(file, 0o755)
            name = os.path.relpath(file, path)
            told = any(name in error or f"{os.path.dirname(name)} failed" in error for error in errors)
            assert told or name == ".tables/zarr.json", name  # which is there for zarr's tools
        assert snapshot(path) == before


def test_a_reader_and_a_check_write_nothing_and_take_no_lock(path, monkeypatch):
    """On a store with a committed chunk and a staged one, and damage."""
    cases.make(path, range(6))
    before = snapshot(path)
    cases.allow_reading_alone(monkeypatch)
    with ZarrFeatureStore.open(path) as store:
        table = store.open_table(NAME)
        assert table.committed_chunks() == [0]
        assert table.pending().tolist() == [6, 7, 8, 9, 10]
        assert (table.read_chunk(0, "q") == values(range(4))["q"]).all()
        store.cache("gram", "key", values([0])["q"])
        assert store.cached("gram", "key") is None
        assert store.check().ok
    assert snapshot(path) == before
    monkeypatch.undo()
    cases.flip(folder(path, "q/c.0"))
    before = snapshot(path)
    cases.allow_reading_alone(monkeypatch)
    assert not check_store(path).ok
    assert snapshot(path) == before


@pytest.mark.quick
def test_a_refused_put_writes_not_one_byte(path):
    store, table = cases.open_for_writing(path)
    table.put(4, values(range(4, 8)))
    table.put(8, values([8]))
    before, four = snapshot(path), values(range(4))
    wide = {**four, "features": four["features"].astype("f8") + 1e5}
    for rows in ([0, 1, 2, 12], [0, 0], -1, 9):
        for given in (four, {"features": four["features"]}, wide):
            raises(ValueError, r".", table.put, rows, given)
    raises(ValueError, "float32", table.put, 0, wide)
    for rows in (range(6, 10), range(4, 8)):
        raises(StateError, r"rows 4 to 7 \(chunk 1\).* are done already", table.put, rows, values(rows))
    assert snapshot(path) == before
    store.close()


# Making a store.


def test_what_a_killed_creation_left_is_removed_later(tmp_path, victims):
    """Once it is old, and unless somebody is still at it."""
    path = str(tmp_path / "run.zarr")
    assert victims.killed("folder_built:1", "put_row", path, 0)
    (abandoned,) = (name for name in os.listdir(tmp_path) if ".new-" in name)
    for name in ("living", "young"):
        (tmp_path / f".run.zarr.new-{name}").mkdir()
    living = os.open(tmp_path / ".run.zarr.new-living", os.O_RDONLY)
    fcntl.flock(living, fcntl.LOCK_EX)
    for name in (abandoned, ".run.zarr.new-living"):
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    ZarrFeatureStore.create(path, MANIFEST)
    os.close(living)
    assert sorted(os.listdir(tmp_path)) == [".run.zarr.new-living", ".run.zarr.new-young", "run.zarr"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_creation_that_fails_cleans_up(tmp_path, error):
    with cases.failing_call("rename", 1, error), pytest.raises((KeyboardInterrupt, StoreError)):
        ZarrFeatureStore.create(tmp_path / "run.zarr", MANIFEST)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", ["made", "opened", "held"])
def test_a_creation_begins_anew_if_its_folder_is_swept_before_it_is_locked(tmp_path, moment, monkeypatch):
    """By a process whose clock is off: it deletes the folder, or holds its lock to do so."""
    opened, mkdir, flock = [], os.mkdir, fcntl.flock

    def sweep():
        monkeypatch.undo()
        (folder,) = tmp_path.glob(".run.zarr.new-*")
        opened.append(os.open(folder, os.O_RDONLY))
        if moment == "held":
            flock(opened[0], fcntl.LOCK_EX)
        else:
            folder.rmdir()

    if moment == "made":
        monkeypatch.setattr(os, "mkdir", lambda *a, **k: (mkdir(*a, **k), sweep()))
    else:
        monkeypatch.setattr(fcntl, "flock", lambda *a: (sweep(), flock(*a)))
    with ZarrFeatureStore.create(tmp_path / "run.zarr", MANIFEST) as store:
        assert store.table_names() == []
    os.close(opened[0])
    left = [name for name in os.listdir(tmp_path) if ".new-" in name]
    assert len(left) == (moment == "held")  # that process deletes it


@pytest.mark.parametrize("step", ["mkdir", "rename"])
def test_whoever_is_second_opens_what_the_first_made(tmp_path, step, monkeypatch):
    """The other one is faster after the first look, or after all is built and the name is taken."""
    path, mine, real = tmp_path / "run.zarr", Manifest({**MANIFEST.fingerprint, "seed": 7}), getattr(os, step)

    def late(*arguments, **keywords):
        monkeypatch.undo()
        ZarrFeatureStore.create(path, MANIFEST)
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, step, late)
    raises(ManifestMismatchError, "seed is 0 there, 7 here", ZarrFeatureStore.create, path, mine)
    assert os.listdir(tmp_path) == ["run.zarr"]


def test_a_folder_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "run.zarr").mkdir()
    for name in ("run.zarr/thesis.tex", "file"):
        (tmp_path / name).write_text("x")
    with ZarrFeatureStore.create(tmp_path / "other.zarr", MANIFEST) as store:
        (tmp_path / "other.zarr" / "ckpt-0").mkdir()
        (tmp_path / "other.zarr" / "ckpt-0" / "notes").write_text("x")
        before = snapshot(tmp_path)
        for name in ("run.zarr", "file"):
            with pytest.raises(errors.CorruptStoreError, match="exists and is not a store"):
                ZarrFeatureStore.create(tmp_path / name, MANIFEST)
        raises(StoreError, "no table 'ckpt-0'", store.create_table, "ckpt-0", SPEC)
    assert {name: found for name, found in snapshot(tmp_path).items() if "/." not in name} == {
        name: found for name, found in before.items() if "/." not in name
    }


ANY = ["plain", "with space.zarr", "Zürich & 東京.zarr", 'it\'s "quoted".zarr', "a#b?c%20d.zarr"]
ANY += ["x::y", "a/b/c.zarr"]


@pytest.mark.parametrize("name", ANY)
def test_any_path_will_do(tmp_path, monkeypatch, name):
    """A relative one outlives a change of folder."""
    monkeypatch.chdir(tmp_path)
    store = ZarrFeatureStore.create(name, MANIFEST)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with store:
        store.create_table(NAME, SPEC).put(0, values(range(11)))
    cases.check_all(str(tmp_path / name))


def test_an_empty_folder_and_a_dangling_link_become_stores(tmp_path):
    (tmp_path / "empty").mkdir()
    os.symlink(tmp_path / "target.zarr", tmp_path / "link.zarr")
    for name in ("empty", "link.zarr"):
        cases.finish(str(tmp_path / name))
    cases.check_all(str(tmp_path / "target.zarr"))
    with ZarrFeatureStore.open(tmp_path / "link.zarr") as store:  # a link at the root is followed once
        assert store.path == os.path.realpath(tmp_path / "target.zarr")


def test_another_maker_is_worth_a_warning(path, caplog):
    ZarrFeatureStore.create(path, Manifest({"seed": 0}, {"torch": "2.10"}))
    with caplog.at_level(logging.WARNING):
        ZarrFeatureStore.create(path, Manifest({"seed": 0}, {"torch": "2.13"}))
    assert "2.10" in caplog.text


def made(path):
    return cases.open_for_writing(path)[0]


NONE, WRONG = errors.MissingStoreError, errors.InvalidInputError
LARGE = [TableSpec((1 << 32) + 1, SPEC.columns, 4), TableSpec(4, SPEC.columns, (1 << 26) + 1)]
LARGE += [TableSpec(4, (Column("f", 1 << 45, "float32"),), 4)]
LONG_NAME = "/".join(["x" * 50, "x" * 50, "x" * 49, "x" * 49])
NO_NUMBERS = [np.array(["a"]), np.zeros(1, "M8[s]"), np.zeros(1, [("a", "f4")])]
OPTIONS = [
    (lambda p: ZarrFeatureStore.open(p, "w"), WRONG, "mode must be one of"),
    (lambda p: ZarrFeatureStore.open(p, check="always"), WRONG, "check must be one of"),
    (lambda p: ZarrFeatureStore.open(p, mapping="sometimes"), WRONG, "mapping"),
    (lambda p: ZarrFeatureStore.open(f"{p}-none"), NONE, "no store at"),
    (lambda p: ZarrFeatureStore.open(f"{p}-none", "r+"), NONE, "no store at"),
    (lambda p: ZarrFeatureStore.open(os.path.dirname(p)), NONE, "no store at"),
    *((lambda p, no=no: check_store(p + no), NONE, "no store at") for no in ("-none", "/..", "/zarr.json")),
    (lambda p: check_store(folder(p)), NONE, "is a table inside a store"),
    (lambda p: ZarrFeatureStore.create(f"{p}4", Manifest({}, {}, 4)), WRONG, "writes format 3, got 4"),
    (lambda p: made(p).drop_table("targets"), WRONG, "is a group of tables"),
    *((lambda p, s=spec: made(p).create_table("large", s), WRONG, r"up to \d+, got \d+") for spec in LARGE),
    (lambda p: made(p).create_table(LONG_NAME, SPEC), WRONG, "201 characters"),
    *((lambda p, array=array: made(p).cache("kept", "key", array), WRONG, "numbers") for array in NO_NUMBERS),
]


@pytest.mark.quick
@pytest.mark.parametrize(("use", "error", "message"), OPTIONS)
def test_what_a_store_cannot_be_asked_is_refused_by_name(path, use, error, message):
    cases.make(path)
    before = snapshot(os.path.dirname(path))
    raises(error, message, use, path)
    assert snapshot(os.path.dirname(path)) == before


# What a power cut may take: every rename stands after the syncs that it depends on.


def test_names_that_a_kill_left_unsynced_are_synced_before_the_row_log_goes(path, victims, monkeypatch):
    """Otherwise a power cut could take the names of the files, and the rows are nowhere else any more."""
    assert victims.killed("column_published:3", "write", path, f"{path}-done", 3)
    seen, unlink = [], os.unlink

    def gone(name, *, dir_fd):
        seen.append(f"{cases.path_of(dir_fd)}/{name}")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(cases.path_of(fd)))
    monkeypatch.setattr(os, "unlink", gone)
    with writing(path) as table:
        assert table.committed_chunks() == [0]
    log = cases.row_log(path, 0)
    assert {folder(path, name) for name in ("features", "q", "w")} <= set(seen[: seen.index(log)])


def test_a_store_and_a_table_are_synced_before_they_have_a_name(tmp_path, path, steps):
    ZarrFeatureStore.create(tmp_path / "a" / "b" / "run.zarr", MANIFEST)
    assert steps[:2] == [("sync", str(tmp_path)), ("sync", str(tmp_path / "a"))]  # new parents
    steps.clear()
    ZarrFeatureStore.create(path, MANIFEST).create_table(NAME, SPEC)
    renamed = [step for step in steps if step[0] == "rename"]
    *published, (_, scratch, entry) = renamed
    assert entry == f"{path}/.tables/{cases.entry_name(NAME)}"  # listed when it is there, and no earlier
    assert steps.index(("sync", scratch)) < steps.index(renamed[-1])
    assert steps[-1] == ("sync", f"{path}/.tables")
    targets = [path, f"{path}/targets", f"{path}/targets/test", folder(path)]
    assert [target for _, _, target in published] == targets
    for step in published:
        _, scratch, target = step
        place = steps.index(step)
        synced = {name.replace(scratch, target) for _, name, *_ in steps[:place]}
        made = {os.path.join(at, name) for at, _, files in os.walk(target) for name in files} - {entry}
        made |= {at for at, _, _ in os.walk(target)}
        below = [other for other in targets if other != target and other.startswith(target)]
        assert {name for name in made if not any(name.startswith(other) for other in below)} <= synced
        assert steps[place + 1] == ("sync", os.path.dirname(target))


def test_only_a_batch_that_completes_a_chunk_is_synced(path, steps):
    _, table = cases.open_for_writing(path)
    steps.clear()
    table.put(0, values(range(3)))
    assert steps == []
    table.put(3, values([3]))
    assert sorted(steps[:3]) == sorted(
        ("sync", cases.staged(path, 0, name)) for name in COLUMNS
    )  # all at once
