"""A disk that is full, broken or not writable: a named error, rows that stay pending, a store that goes on."""

import errno
import itertools
import os
import threading
import time

import numpy as np
import pytest
from store_cases import (
    MANIFEST,
    NAME,
    SPEC,
    allow_reading_alone,
    check_all,
    content,
    finish,
    on_the_way,
    open_for_writing,
    reading,
    snapshot,
    staged,
    values,
    writing,
)

from trak_lite.errors import ReadOnlyStoreError, StateError, StoreError, StoreFullError
from trak_lite.store import ZarrFeatureStore
from trak_lite.store.disk import files
from trak_lite.store.disk.files import named_errors

pytestmark = pytest.mark.quick


class Fault:
    """Makes one call of a function in ``os`` fail, but no folder that is opened on the way to a file."""

    def __init__(self, monkeypatch, name):
        self.left = 0
        self.error = None
        self._call = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments, **keywords):
        if not on_the_way(self._call, *arguments):
            self.left -= 1
            if self.left == 0:
                raise self.error
        return self._call(*arguments, **keywords)


def is_refused(table, error):
    """Put rows 3 to 10 and return whether that failed as it should where the system fails with ``error``."""
    if isinstance(error, KeyboardInterrupt):
        expected = KeyboardInterrupt
    else:
        expected = StoreFullError if error.errno == errno.ENOSPC else StoreError
    try:
        table.put(3, values(range(3, 11)))
    except expected:
        return True
    return False


def check_nothing_else_is_done(path, table, rows):
    """Done are the rows that were put before, and committed chunks: for this handle and for a new one."""
    for chunk in table.committed_chunks():
        rows = rows | set(range(*table.chunk_range(chunk)))
    with reading(path) as reader:
        for seen in (table, reader):
            assert set(np.flatnonzero(seen.done()).tolist()) == rows


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "full"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("call", ["open", "pwrite", "posix_fallocate", "fsync", "rename", "unlink"])
def test_any_call_may_fail_once(tmp_path, monkeypatch, call, error):
    """Whichever call it is: rows already put stay done, the rest can be put at once by the same process."""
    fault = Fault(monkeypatch, call)
    for count in itertools.count(1):
        path = str(tmp_path / f"{count}.zarr")
        store, table = open_for_writing(path)
        table.put(0, values(range(3)))
        fault.left, fault.error = count, error
        fired = is_refused(table, error)
        fault.left = 0
        check_nothing_else_is_done(path, table, {0, 1, 2} if fired else set(range(11)))
        pending = table.pending()
        if len(pending):
            table.put(pending, values(pending))
        store.close()
        finish(path)
        if not fired:
            break
    assert count >= 2


def test_a_full_disk_refuses_the_whole_batch_and_frees_what_it_took(path, monkeypatch):
    store, table = open_for_writing(path)
    before = snapshot(path)
    real, calls = os.posix_fallocate, []

    def full_at_the_second_chunk(fd, offset, size):
        calls.append(size)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_second_chunk)
    with pytest.raises(StoreFullError, match=r"No space left on device.*stay pending.*Free some space"):
        table.put(0, values(range(8)))
    assert not table.done().any()
    assert not any("1-" in name for name in set(snapshot(path)) - set(before))

    monkeypatch.setattr(os, "posix_fallocate", real)
    table.put(0, values(range(11)))
    store.close()
    check_all(path)


def test_a_limit_on_the_file_size_is_a_full_disk(path, victims):
    message, pending = victims.run("fill_disk", path)
    assert "File too large" in message
    assert pending == list(range(11))
    check_all(path)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_without_fallocate_files_are_filled_with_zeros(path, monkeypatch, code):
    """Also around rows that are there already."""
    with writing(path) as table:
        table.put(1, values([1]))
    os.truncate(staged(path, 0, "q"), 8)

    def unsupported(fd, offset, size):
        raise OSError(code, "unsupported")

    if code is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store, table = open_for_writing(path)
    table.put(0, values([0]))
    assert len(content(staged(path, 0, "q"))) == 16
    assert table.pending().tolist() == list(range(2, 11))
    store.close()
    finish(path)


def test_an_interrupt_waits_for_the_syncs_of_all_files(path, monkeypatch):
    """Their descriptors are closed afterwards."""
    _, table = open_for_writing(path)
    sync, join, synced, interrupts = os.fsync, threading.Thread.join, [], [KeyboardInterrupt()]

    def slow(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        time.sleep(0.05 if threading.current_thread() is not threading.main_thread() else 0)
        sync(fd)
        synced.append(name)

    def interrupted(thread, timeout=None):
        if interrupts:
            raise interrupts.pop()
        join(thread, timeout)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.put(0, values(range(4)))

    assert sorted(synced) == [staged(path, 0, name) for name in ("features", "q", "w")]


@pytest.mark.parametrize("broken", [["features"], ["q"], ["features", "q", "w"]])
def test_bytes_whose_sync_failed_are_written_again(path, monkeypatch, broken):
    """Otherwise a second sync succeeds without writing anything."""
    _, table = open_for_writing(path)
    written = written_after_failed_syncs(path, monkeypatch, broken)
    with pytest.raises(StoreError, match="broken"):
        table.put(0, values(range(4)))

    assert written == {staged(path, 0, name): [(0, values(range(4))[name].tobytes())] for name in broken}


def test_bytes_are_written_again_beside_a_file_that_cannot_be(path, monkeypatch):
    _, table = open_for_writing(path)
    written = written_after_failed_syncs(path, monkeypatch, ["features", "q", "w"])
    mapped = files.map_file

    def unreadable(name, size, **how):
        if name == staged(path, 0, "features"):
            raise OSError(errno.EIO, "unreadable")
        return mapped(name, size, **how)

    monkeypatch.setattr(files, "map_file", unreadable)
    with pytest.raises(StoreError, match="unreadable"):
        table.put(0, values(range(4)))

    for name in ("q", "w"):
        assert written[staged(path, 0, name)] == [(0, values(range(4))[name].tobytes())]


def written_after_failed_syncs(path, monkeypatch, broken):
    """Let syncs of these columns fail; return the list of what is written to each file afterwards."""
    written, real, sync = {}, os.pwrite, os.fsync

    def failing(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name in [staged(path, 0, column) for column in broken]:
            written[name] = []
            raise OSError(errno.EIO, "broken")
        sync(fd)

    def record(fd, data, at):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name in written:
            written[name].append((at, bytes(data)))
        return real(fd, data, at)

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr(os, "pwrite", record)
    return written


def test_a_chunk_is_synced_without_a_further_thread(path, monkeypatch):
    synced, sync = [], os.fsync
    with monkeypatch.context() as patched, writing(path) as table:

        def none_left(thread):
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", none_left)
        patched.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or sync(fd))
        table.put(0, values(range(4)))
    assert [staged(path, 0, name) for name in ("features", "q", "w")] == synced[:3]
    finish(path)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EFBIG, StoreFullError),
        (errno.EROFS, ReadOnlyStoreError),
        (errno.EACCES, ReadOnlyStoreError),
        (errno.EPERM, ReadOnlyStoreError),
        (errno.EIO, StoreError),
    ],
)
def test_an_error_of_the_system_gets_a_name_and_keeps_its_cause(code, error):
    with pytest.raises(error, match=r"Writing x failed: .*\.") as caught, named_errors("Writing", "x"):
        raise OSError(code, os.strerror(code))
    assert caught.value.__cause__.errno == code


def test_an_error_that_has_a_name_keeps_it():
    with pytest.raises(StateError), named_errors("Writing", "x"):
        raise StateError("seen")


def test_a_folder_that_cannot_be_written_is_refused_for_writing(path, monkeypatch):
    with writing(path):
        pass
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for use in (lambda: ZarrFeatureStore.open(path, "r+"), lambda: ZarrFeatureStore.create(path, MANIFEST)):
        with pytest.raises(ReadOnlyStoreError, match=r"cannot be written.*mode='r'"):
            use()
    assert ZarrFeatureStore.open(path).table_names() == [NAME]


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; the test above imitates the refusal"
)
def test_a_write_protected_folder_is_refused_for_writing(path):
    with writing(path):
        pass
    os.chmod(path, 0o500)
    with pytest.raises(ReadOnlyStoreError):
        ZarrFeatureStore.open(path, "r+")
    os.chmod(path, 0o700)


def test_a_disk_that_turns_read_only_is_an_error_of_its_own(path, monkeypatch):
    _, table = open_for_writing(path)
    real = os.open

    def refuse_writing(name, flags, *mode, **keywords):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(name, flags, *mode, **keywords)

    monkeypatch.setattr(os, "open", refuse_writing)
    with pytest.raises(ReadOnlyStoreError, match="Read-only file system"):
        table.put(0, values([0]))


def test_a_reader_writes_nothing_and_takes_no_lock(path, monkeypatch):
    """On a store with a committed chunk, a staged one and one that a writer left half published."""
    with writing(path) as table:
        table.put(0, values(range(6)))
    before = snapshot(path)
    allow_reading_alone(monkeypatch)
    with reading(path) as table:
        assert table.committed_chunks() == [0]
        assert table.pending().tolist() == [6, 7, 8, 9, 10]
        assert (table.read_chunk(0, "q") == values(range(4))["q"]).all()
    with ZarrFeatureStore.open(path) as store:
        assert store.cached("gram", "key") is None
        store.cache("gram", "key", values([0])["q"])
    assert snapshot(path) == before


@pytest.mark.parametrize("rows", [[0, 1, 2, 12], [0, 0], -1, 9])
def test_a_refused_put_writes_not_one_byte(path, rows):
    store, table = open_for_writing(path)
    table.put(4, values([4]))
    before = snapshot(path)
    for given in (values(range(4)), {"features": values(range(4))["features"]}):
        with pytest.raises(ValueError, match=r"."):
            table.put(rows, given)
    with pytest.raises(ValueError, match="float32"):
        table.put(0, {**values(range(4)), "features": values(range(4))["features"].astype("f8") + 1e5})
    assert snapshot(path) == before
    assert table.spec == SPEC
    store.close()


def test_a_put_onto_a_committed_chunk_leaves_the_disk_alone(path):
    store, table = open_for_writing(path)
    table.put(0, values(range(4)))
    before = snapshot(path)
    for rows in (range(2, 6), range(4)):
        with pytest.raises(StateError, match=r"rows 0 to 3 \(chunk 0\).* are done already"):
            table.put(rows, values(rows))
    assert snapshot(path) == before
    store.close()
