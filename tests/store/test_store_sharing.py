"""Several handles and processes on one store: each row once, locks end with their holder, and who is waited for."""

import errno
import fcntl
import gc
import itertools
import mmap
import os
import signal
import socket
import time
from unittest import mock

import numpy as np
import pytest
import store_cases as cases
from store_cases import LONG, SPEC, check_all, finish, open_for_writing, raises, sized, values, writing

from trak_lite.errors import BusyError, HeldHereError, StateError, StoreError
from trak_lite.store import TableSpec, sharing


@pytest.fixture
def table(path):
    """The long table, empty, open for writing in this process."""
    with writing(path, LONG) as opened:
        yield opened


def until(condition):
    """Wait for what another process is about to do."""
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for ten minutes")


def test_a_chunk_has_one_writer_who_is_named(path, victims):
    store, table = open_for_writing(path)
    table.put(0, values([0]))
    message = victims.run("put_row", path, 1)
    assert "rows 0 to 3 (chunk 0)" in message
    assert f"pid {os.getpid()} on {socket.gethostname()}"[:60] in message
    assert victims.run("put_row", path, 5) == "put"
    assert np.flatnonzero(table.done()).tolist() == [0, 5]
    other, rows = open_for_writing(path)
    with pytest.raises(HeldHereError, match="this process already writes them through another open store"):
        rows.put(1, values([1]))
    store.close()
    rows.put(1, values([1]))
    other.close()
    assert victims.run("put_row", path, 2) == "put"


def test_locks_end_with_their_holder(path, victims):
    """A handle that is forgotten, and a forked child (a data loader's worker) that outlives a killed run by seconds."""
    store, table = open_for_writing(path)
    table.put(0, values([0]))
    del store, table
    gc.collect()
    status, _ = victims.wait(victims.start("die_before_a_child", path, 1))
    assert status == -signal.SIGKILL
    assert victims.run("put_row", path, 2) == "put"
    finish(path)


def test_a_forked_child_is_one_more_writer(path, victims):
    assert victims.run("write_beside_a_child", path) == [0, *range(4, 11)]
    check_all(path)


def test_a_lock_ends_also_if_the_log_cannot_be_looked_at(path, table):
    claimed = table.claim(0)
    claimed.__enter__()
    with mock.patch("os.fstat", side_effect=OSError(errno.EIO, "broken")):
        raises(OSError, "broken", claimed.__exit__, None, None, None)
    with writing(path, LONG) as other, other.claim(0) as pending:
        assert len(pending) == LONG.chunk_rows


def test_the_name_of_its_last_holder_in_a_log_does_not_say_who_holds_a_chunk_now(path, table):
    """A new holder has the lock a moment before its name is there; the last one must wait for it, not give up."""
    table.put([0], values([0], LONG))
    table.close()
    with writing(path, LONG) as again:
        fd = os.open(cases.folder(path, "features", ".stage", "0.rows"), os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(BusyError) as busy, again.claim(0):
            pass
        assert not isinstance(busy.value, HeldHereError)
        os.close(fd)
        with again.claim(0) as pending:
            assert len(pending) == LONG.chunk_rows - 1


def test_what_a_writer_remembers_of_a_log_ends_with_the_log(path):
    """A file system gives the inode of a deleted log to the next one, for example after the chunk was set aside."""
    with writing(path) as table:
        table.put(0, values([0, 1]))
        with table.claim(0):
            pass
        cases.overwrite(cases.row_log(path, 0), b"")
        cases.make(path, [2])
        with table.claim(0) as pending:
            assert pending.tolist() == [0, 1, 3]
            assert cases.done_rows(path) == [2]
            table.put(0, values([0, 1]))
    finish(path)


def test_a_chunk_that_cannot_be_looked_at_is_let_go(path):
    """Also while the error is kept, as it is in a notebook."""
    broken = "lstat", lambda name: "c.0" in os.path.basename(name), OSError(errno.EIO, "broken")
    with writing(path) as table, writing(path) as other:
        table.put(0, values([0]))
        with cases.failing_for(*broken), pytest.raises(StoreError, match="broken") as kept:
            table.claim(0).__enter__()
        other.put(1, values([1]))
        assert kept.value
    finish(path)


def test_rows_are_counted_while_writers_begin_one_chunk_after_the_other(path):
    spec = sized(400)
    with writing(path, spec) as table, cases.reading(path) as reader:
        begun, listdir = iter(range(0, 400, 4)), os.listdir

        def late(where):
            if os.readlink(f"/proc/self/fd/{where}").endswith(".stage"):
                row = next(begun)
                table.put(row, values([row]))
            return listdir(where)

        with mock.patch.object(os, "listdir", late):
            assert reader.done().any()
        assert 0 < next(begun) < 40


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
    raises(KeyboardInterrupt, None, table.put, 0, values(range(8), LONG))
    assert not table.done().any()
    table.put(8, values(range(8, 16), LONG))
    assert np.flatnonzero(table.done()).tolist() == list(range(8, 16))
    store.close()


def test_rows_may_be_scattered_over_more_chunks_than_stay_open(path, monkeypatch):
    """Files are closed and locks dropped beyond the limit, nothing is lost by it, and claimed chunks stay held."""
    spec = TableSpec(160, LONG.columns, 2)
    order = np.random.default_rng(0).permutation(spec.num_rows)
    opened = len(os.listdir("/proc/self/fd"))
    maps, real = [], mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *a, **k: maps.append(a) or real(*a, **k))
    with writing(path, spec) as table:
        other_store, other = open_for_writing(path, spec)
        most = 0
        with table.claim(0) as held:
            for rows in np.split(order, range(5, len(order), 5)):
                rows = rows[rows >= 2]
                table.put(rows, values(rows, spec))
                most = max(most, len(os.listdir("/proc/self/fd")) - opened)
            with pytest.raises(BusyError), other.claim(0):
                pass
            table.put(held, values(held, spec))
        other_store.close()
    assert most <= 3 * 33 + 20, "files of more chunks than stay open"
    assert len(maps) == 80, "a log is read once, when its chunk is committed"
    assert len(os.listdir("/proc/self/fd")) == opened
    check_all(path, spec)


# Rows that several processes share.


def fill(work, spec=LONG):
    """Compute and put what is this process's share; return its rows."""
    put = []
    for rows in itertools.chain.from_iterable(work.rounds()):
        work.put(rows, values(rows, spec))
        put += rows.tolist()
    return put


def shared(table, batch=3, **options):
    return sharing.SharedRows(table, batch, label="rows", progress=False, **options)


def test_a_holder_that_dies_is_noticed_while_it_is_waited_for(path, table, victims, monkeypatch, capsys):
    """All else is done first; then its chunk is taken over, without the rows that it had put."""
    holder = victims.start("hold", path, 0, 3)
    until(lambda: table.done()[:3].all())

    def wait(seconds):
        assert table.committed_chunks() == list(range(1, table.num_chunks))
        os.kill(holder, signal.SIGKILL)
        victims.wait(holder)

    monkeypatch.setattr(sharing.time, "sleep", wait)
    with sharing.SharedRows(table, 3, label="rows", progress=True) as work:
        put = fill(work)
    assert set(put) == set(range(3, LONG.num_rows))
    assert work.written == len(put) == LONG.num_rows - 3
    printed = capsys.readouterr().err
    assert "waiting for other writers" in printed
    assert f"{LONG.num_rows}/{LONG.num_rows}" in printed
    table.close()
    check_all(path, LONG)


def test_the_bar_counts_rows_whoever_put_them(path, table, victims, capsys):
    with sharing.SharedRows(table, 3, label="rows", progress=True) as work:
        victims.run("share", path, 8)
        assert fill(work) == []
    assert f"{LONG.num_rows}/{LONG.num_rows}" in capsys.readouterr().err
    assert work.written == 0


def test_a_process_that_holds_a_chunk_itself_does_not_wait_for_itself(path, table):
    """Two open stores in one notebook: without the error the second one would wait for ever."""
    other_store, other = open_for_writing(path, LONG)
    with other.claim(0), shared(table) as work, pytest.raises(HeldHereError, match="already writes them"):
        fill(work)
    assert len(fill(shared(table))) == LONG.num_rows
    other_store.close()


def test_processes_that_meet_part_at_random(path, table, victims):
    """Who finds the first chunk held starts somewhere else, and comes round to the beginning."""
    starts = set()
    other = victims.start("hold", path, 0, 1)
    until(lambda: table.done()[0])
    for _ in range(12):
        with shared(table, 8) as work:
            starts.add(int(next(iter(next(work.rounds())))[0]))
    os.kill(other, signal.SIGKILL)
    victims.wait(other)
    assert len(starts) > 1  # of five, 12 times: none by chance would be another one in 2e-8 of the runs
    assert 0 not in starts


def test_a_table_comes_to_be_with_the_first_batch_and_only_one_of_two_first_batches_counts(path):
    store, _ = open_for_writing(path, LONG)
    made = []

    def create():
        made.append(store.create_table("ckpt-0", LONG))
        return made[-1]

    late = sharing.LazyTable(LONG, None, create)
    with shared(late) as work:
        rounds = work.rounds()
        (first,) = next(rounds)
        assert first.tolist() == [0, 1, 2]
        assert made == []
        store.create_table("ckpt-0", LONG).put(first, values(first, LONG))  # another process was faster
        work.put(first, values(first, LONG))
        assert work.written == 0
        for rows in itertools.chain.from_iterable(rounds):
            work.put(rows, values(rows, LONG))
    assert work.written == LONG.num_rows - 3
    assert late.table.read("q").tolist() == values(range(LONG.num_rows), LONG)["q"].tolist()
    store.close()


def test_a_first_batch_whose_chunk_is_held_by_then_is_left_out(path, table, victims):
    with shared(sharing.LazyTable(LONG, None, lambda: table)) as work:
        (first,) = next(work.rounds())
        holder = victims.start("hold", path, 0, 1)
        until(lambda: table.done()[0])
        work.put(first, values(first, LONG))
        assert work.written == 0
    os.kill(holder, signal.SIGKILL)
    victims.wait(holder)


def test_a_rank_that_waited_for_the_table_leaves_the_first_chunk_to_its_creator(table):
    class Second:
        """A rank that arrives after another one."""

        def __getattr__(self, name):
            return lambda *arguments: False

    found = iter([None, table])
    late = sharing.LazyTable(LONG, None, lambda: pytest.fail("It waits for the table."), lambda: next(found))
    with shared(late, ranks=Second()) as work:
        batches = itertools.chain.from_iterable(work.rounds())
        first = next(batches)
        assert first.tolist() == list(range(LONG.chunk_rows, LONG.chunk_rows + 3))
        work.put(first, values(first, LONG))
        for rows in batches:  # the chunk is not lost if its creator was killed
            work.put(rows, values(rows, LONG))
    assert table.complete


def test_batches_never_reach_over_a_chunk_and_keep_their_place_when_rows_are_missing():
    planned = sharing.plan_batches(np.array([0, 1, 4, 5, 6, 7, 8, 9]), 8, 3)
    assert [rows.tolist() for rows in planned] == [[0, 1], [4, 5], [6, 7], [8, 9]]
    assert sharing.plan_batches(np.array([], np.int64), 8, 3) == []


def test_a_chunk_that_another_machine_commits_while_its_batches_are_computed_is_left_to_it(path):
    one, two = (cases.open_remote(path, staging=name) for name in ("one", "two"))
    with one as (_, mine), two as (_, theirs), shared(mine, 2) as work:
        for batches in work.rounds():
            drawn = iter(batches)
            ahead = [next(drawn), next(drawn)]
            if not theirs.committed_chunks():
                theirs.put(range(4), values(range(4), attempt=1))
            for rows in itertools.chain([ahead[0], next(drawn), ahead[1]], drawn):
                work.put(rows, values(rows))
        assert (mine.complete, work.written) == (True, SPEC.num_rows - 4)
        np.testing.assert_array_equal(mine.read_chunk(0, "q"), values(range(4), attempt=1)["q"])


def test_rows_that_are_done_by_a_mistake_of_the_caller_are_still_refused(table):
    with shared(table, 4) as work:
        rows = next(iter(next(work.rounds())))
        work.put(rows, values(rows, LONG))
        raises(StateError, "done already", work.put, rows, values(rows, LONG))
