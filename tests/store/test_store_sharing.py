"""Several handles, processes and histories on one store."""

import fcntl
import gc
import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import LONG, check_all, finish, open_for_writing, reading, values, writing

from trak_lite.errors import BusyError, StateError
from trak_lite.store.disk import staging as _staging
from trak_lite.store.disk import zarr_table as _zarr_table


def test_a_chunk_has_one_writer_who_is_named(path, victims):
    store, table = open_for_writing(path)
    table.put(0, values([0]))

    message = victims.run("put_row", path, 1)
    assert "rows 0 to 3 (chunk 0)" in message
    assert f"pid {os.getpid()} on {os.uname().nodename}"[:60] in message
    assert victims.run("put_row", path, 5) == "put"
    assert np.flatnonzero(table.done()).tolist() == [0, 5]
    store.close()
    assert victims.run("put_row", path, 1) == "put"


def test_a_second_store_in_this_process_is_told_so(path):
    store, table = open_for_writing(path)
    other, rows = open_for_writing(path)
    table.put(0, values([0]))
    with pytest.raises(BusyError, match="this process already writes them through another open store"):
        rows.put(1, values([1]))
    store.close()
    rows.put(1, values([1]))
    other.close()


@pytest.mark.parametrize("looks", range(1, 6))
def test_a_reader_that_sees_a_commit_between_two_looks_loses_no_row(path, monkeypatch, looks):
    """The writer renames the files after the reader has looked at some of them."""
    store, table = open_for_writing(path)
    table.put(0, values([0, 1, 2]))
    look, seen = _staging.file_size, []

    def late(name):
        found = look(name)
        seen.append(name)
        if len(seen) == looks:
            monkeypatch.setattr(_staging, "file_size", look)
            table.put(3, values([3]))
        return found

    with reading(path) as reader:
        monkeypatch.setattr(_staging, "file_size", late)
        assert reader.done()[:3].all()
        assert reader.done()[:4].all()
        assert reader.committed_chunks() == [0]
    store.close()


def test_a_commit_record_cut_off_by_ctrl_c_hides_no_later_one(path, monkeypatch):
    """The line is whole, its offset not yet counted: a next line of the same length in its place would go unread."""
    store, table = open_for_writing(path, LONG)
    pwrite = os.pwrite

    def interrupted(fd, data, offset):
        written = pwrite(fd, data, offset)
        if b'"chunk"' in bytes(data):
            monkeypatch.setattr(os, "pwrite", pwrite)
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.put(0, values(range(8), LONG))
    assert not table.done().any()

    table.put(8, values(range(8, 16), LONG))
    assert np.flatnonzero(table.done()).tolist() == list(range(8, 16))
    store.close()


def test_a_lock_on_a_log_that_is_gone_is_no_lock(path, monkeypatch):
    """Another writer commits the chunk between the opening of its log and the locking."""
    store, table = open_for_writing(path)
    other, rows = open_for_writing(path)
    rows.put(0, values([0]))
    flock = fcntl.flock

    def late(fd, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        rows.put(1, values([1, 2, 3]))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(StateError, match=r"rows 0 to 3 \(chunk 0\).* are done already"):
        table.put(1, values([1]))
    store.close()
    other.close()
    finish(path)


def test_a_store_that_is_forgotten_lets_go(path):
    store, table = open_for_writing(path)
    table.put(0, values([0]))
    del store, table
    gc.collect()
    finish(path)


def test_a_table_is_opened_once_per_store(path):
    """Otherwise the second one would find the chunks of the first one busy."""
    store, table = open_for_writing(path)
    table.put(0, values([0]))
    again = store.open_table("targets/test/ckpt-0")
    again.put(1, values([1]))
    assert np.flatnonzero(table.done()).tolist() == [0, 1]
    store.close()


def test_a_forked_child_does_not_keep_its_parents_locks(path, victims):
    """A data loader's worker may outlive a killed run by seconds; the next run need not wait for it."""
    status, _ = victims.wait(victims.start("die_before_a_child", path, 0))
    assert status == -signal.SIGKILL
    assert victims.run("put_row", path, 1) == "put"


def test_opening_for_writing_leaves_a_living_writers_chunk_alone(path, monkeypatch):
    """Even where all its rows are done and only the last steps are missing."""
    store, table = open_for_writing(path)
    monkeypatch.setattr(_zarr_table.ZarrRowTable, "_commit", lambda self, stage: None)
    table.put(0, values(range(4)))
    monkeypatch.undo()

    with writing(path) as other:
        assert other.committed_chunks() == []
        assert other.done()[:4].all()
    store.close()
    with writing(path) as other:
        assert other.committed_chunks() == [0]


def check_rows(table, chunks):
    for chunk in chunks:
        expected = values(range(*table.chunk_range(chunk)), LONG)
        for name in expected:
            np.testing.assert_array_equal(table.read_chunk(chunk, name), expected[name])


def test_readers_never_see_anything_half_done_while_two_writers_write(path, victims):
    with writing(path, LONG):
        pass
    writers = [victims.start("write_long", path, part, 2) for part in (0, 1)]
    with reading(path) as table:
        committed, done = set(), np.zeros(LONG.num_rows, bool)
        while not table.complete:
            now, rows = set(table.committed_chunks()), table.done()
            assert committed <= now
            assert (rows | ~done).all()
            check_rows(table, now - committed)
            committed, done = now, rows
    assert [victims.wait(pid)[0] for pid in writers] == [0, 0]
    check_all(path, LONG)


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_a_random_moment_loses_nothing(path, victims, seed):
    with writing(path, LONG):
        pass
    pick, before = random.Random(seed), np.zeros(LONG.num_rows, bool)
    for _ in range(3):
        pid = victims.start("write_long", path, 0, 1)
        time.sleep(pick.uniform(0.005, 0.04))
        os.kill(pid, signal.SIGKILL)
        victims.wait(pid)
        with reading(path) as table:
            now = table.done()
            check_rows(table, table.committed_chunks())
        assert (now | ~before).all()
        before = now
    finish(path, LONG, batch=50)


@pytest.mark.parametrize("kept", [1, 2, 32])
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_rows_may_be_scattered_over_more_chunks_than_stay_open(path, monkeypatch, kept, batch):
    """Files are closed and locks dropped beyond the limit, and nothing is lost by it."""
    monkeypatch.setattr(_zarr_table, "_OPEN_CHUNKS", kept)
    order = np.random.default_rng(kept).permutation(LONG.num_rows)
    opened = len(os.listdir("/proc/self/fd"))
    with writing(path, LONG) as table:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            table.put(rows, values(rows, LONG))
            assert len(os.listdir("/proc/self/fd")) <= opened + 3 * kept + 1
    assert len(os.listdir("/proc/self/fd")) == opened
    check_all(path, LONG)


def test_rows_put_by_others_while_the_lock_was_given_up_are_seen(path, monkeypatch):
    monkeypatch.setattr(_zarr_table, "_OPEN_CHUNKS", 1)
    store, table = open_for_writing(path)
    other, rows = open_for_writing(path)
    table.put(0, values([0]))
    table.put(4, values([4]))
    rows.put(1, values([1]))
    rows.put(8, values([8]))

    table.put([2, 3], values([2, 3]))
    assert table.committed_chunks() == [0]
    store.close()
    other.close()
    finish(path)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(11)),
    cuts=st.lists(st.integers(1, 10), max_size=6),
    reopened=st.sets(st.integers(0, 6)),
)
def test_any_history_ends_in_the_same_rows(tmp_path_factory, order, cuts, reopened):
    """Any order of rows, any batches, closed and opened in between: done is what was put, and it reads back."""
    path = str(tmp_path_factory.mktemp("history") / "run.zarr")
    store, table = open_for_writing(path)
    bounds = sorted({0, *cuts, 11})
    put = set()
    for step, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if step in reopened:
            store.close()
            store, table = open_for_writing(path)
        table.put(order[start:stop], values(order[start:stop]))
        put |= set(order[start:stop])
        assert set(np.flatnonzero(table.done()).tolist()) == put
        assert table.committed_chunks() == [c for c in range(3) if set(range(*table.chunk_range(c))) <= put]
    store.close()
    check_all(path)
