"""Several writers claim the chunks of one table: each row once, what the dead leave, and who is waited for."""

import fcntl
import itertools
import os
import signal
import socket
import time

import numpy as np
import pytest
from store_cases import LONG, SPEC, check_all, folder, open_for_writing, open_remote, reading, values, writing

from trak_lite.errors import BusyError, CorruptStoreError, HeldHereError, StateError
from trak_lite.parallel import sharing
from trak_lite.parallel.ranks import Ranks
from trak_lite.parallel.sharing import LazyTable, SharedRows, plan_batches
from trak_lite.store.disk import zarr_table as _zarr_table

CHUNKS = LONG.num_rows // LONG.chunk_rows


@pytest.fixture
def table(path):
    """The table, empty, open for writing in this process."""
    with writing(path, LONG) as opened:
        yield opened


def until(condition):
    """Wait for what another process is about to do."""
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for ten minutes")


def fill(work, every=None):
    """Compute and put what is this process's share; return its rows."""
    put = []
    for rows in itertools.chain.from_iterable(work.rounds()):
        if every is not None:
            every(rows)
        work.put(rows, values(rows, LONG))
        put += rows.tolist()
    return put


@pytest.mark.parametrize("writers", [2, 3])
def test_every_row_is_put_once_and_a_reader_sees_whole_chunks_only(path, victims, writers):
    with writing(path, LONG):
        pass
    started = [victims.start("share", path, 3) for _ in range(writers)]
    seen = set()
    with reading(path) as reader:
        while len(seen) < CHUNKS:
            for chunk in set(reader.committed_chunks()) - seen:
                expected = values(range(*reader.chunk_range(chunk)), LONG)
                for name, column in expected.items():
                    np.testing.assert_array_equal(reader.read_chunk(chunk, name), column)
                seen.add(chunk)
    answers = [victims.wait(pid) for pid in started]
    assert [status for status, _ in answers] == [0] * writers
    assert sorted(row for _, rows in answers for row in rows) == list(range(LONG.num_rows))
    check_all(path, LONG)


@pytest.mark.parametrize(
    "failpoint", ["rows_written:4", "rows_recorded:4", "commit_synced:2", "column_published:3"]
)
def test_what_killed_writers_left_is_taken_over_row_by_row_by_another_number_of_them(
    path, victims, failpoint
):
    with writing(path, LONG):
        pass
    for count in (1, 2):
        started = [victims.start("share", path, 3, failpoint=failpoint) for _ in range(count)]
        assert [victims.wait(pid)[0] for pid in started] == [-signal.SIGKILL] * count
    with reading(path) as reader:
        pending = reader.pending().tolist()
    assert 0 < len(pending) < LONG.num_rows

    started = [victims.start("share", path, 5) for _ in range(3)]
    answers = [victims.wait(pid)[1] for pid in started]
    assert sorted(itertools.chain.from_iterable(answers)) == pending
    check_all(path, LONG)


def test_a_holder_that_dies_is_noticed_while_it_is_waited_for(path, table, victims, monkeypatch, capsys):
    """All else is done first; then its chunk is taken over, without the rows that it had put."""
    holder = victims.start("hold", path, 0, 3)
    until(lambda: table.done()[:3].all())

    def wait(seconds):
        assert table.committed_chunks() == list(range(1, CHUNKS))
        os.kill(holder, signal.SIGKILL)
        victims.wait(holder)

    monkeypatch.setattr(sharing.time, "sleep", wait)
    with SharedRows(table, 3, label="rows", progress=True) as work:
        put = fill(work)

    assert set(put) == set(range(3, LONG.num_rows))
    assert work.written == len(put) == LONG.num_rows - 3
    printed = capsys.readouterr().err
    assert "waiting for other writers" in printed
    assert f"{LONG.num_rows}/{LONG.num_rows}" in printed
    table.close()
    check_all(path, LONG)


def test_a_holder_that_lives_is_waited_for_and_what_it_did_is_counted(path, table, victims):
    """The other process returns only when this one has put its rows."""
    with table.claim(5) as pending:
        other = victims.start("share", path, 4)
        until(lambda: len(table.committed_chunks()) == CHUNKS - 1)
        table.put(pending, values(pending, LONG))
        status, put = victims.wait(other)
    assert status == 0
    assert sorted(put) == sorted(set(range(LONG.num_rows)) - set(pending.tolist()))


def test_the_bar_counts_rows_whoever_put_them(path, table, victims, capsys):
    with SharedRows(table, 3, label="rows", progress=True) as work:
        victims.run("share", path, 8)
        assert fill(work) == []
    assert f"{LONG.num_rows}/{LONG.num_rows}" in capsys.readouterr().err
    assert work.written == 0


def test_a_held_chunk_names_the_holders_host_and_process(path, table, victims):
    holder = victims.start("hold", path, 2, 1)
    until(lambda: table.done()[16])
    with pytest.raises(
        BusyError, match=rf"rows 16 to 23 \(chunk 2\).*pid {holder} on {socket.gethostname()}"[:60]
    ):
        table.claim(2).__enter__()
    with pytest.raises(BusyError, match=f"pid {holder} on"):
        table.put(17, values([17], LONG))
    os.kill(holder, signal.SIGKILL)
    victims.wait(holder)
    with table.claim(2) as pending:
        assert pending.tolist() == list(range(17, 24))


def test_a_process_that_holds_a_chunk_itself_does_not_wait_for_itself(path, table):
    """Two open stores in one notebook: without the error the second one would wait for ever."""
    other_store, other = open_for_writing(path, LONG)
    with (
        other.claim(0),
        SharedRows(table, 3, label="rows", progress=False) as work,
        pytest.raises(HeldHereError, match="this process already writes them"),
    ):
        fill(work)
    assert len(fill(SharedRows(table, 3, label="rows", progress=False))) == LONG.num_rows
    other_store.close()


def test_a_claim_of_a_chunk_whose_writer_died_before_the_commit_commits_it(path, monkeypatch):
    store, table = open_for_writing(path, LONG)
    other_store, other = open_for_writing(path, LONG)
    with monkeypatch.context() as patched:
        patched.setattr(_zarr_table.ZarrRowTable, "_commit", lambda self, stage: None)
        table.put(0, values(range(8), LONG))
    store.close()
    with other.claim(0) as pending:
        assert pending.tolist() == []
    assert other.committed_chunks() == [0]
    other_store.close()


def test_a_claim_that_finds_staged_rows_changed_is_refused_and_gives_the_chunk_up(path, monkeypatch):
    store, table = open_for_writing(path, LONG)
    other_store, other = open_for_writing(path, LONG)
    with monkeypatch.context() as patched:
        patched.setattr(_zarr_table.ZarrRowTable, "_commit", lambda self, stage: None)
        table.put(0, values(range(8), LONG))
    store.close()

    def corrupt(self, log):
        raise CorruptStoreError("Staged bytes changed.")

    with monkeypatch.context() as patched:
        patched.setattr(_zarr_table.StagedChunk, "commit", corrupt)
        with pytest.raises(CorruptStoreError), other.claim(0):
            pass
    with other.claim(0):
        pass
    assert other.committed_chunks() == [0]
    other_store.close()


def test_claimed_chunks_stay_open_however_many_others_are_written(path, monkeypatch):
    monkeypatch.setattr(_zarr_table, "_OPEN_CHUNKS", 1)
    store, table = open_for_writing(path, LONG)
    other_store, other = open_for_writing(path, LONG)
    with table.claim(0), table.claim(1):
        for chunk in range(2, 6):
            table.put(chunk * 8, values([chunk * 8], LONG))
        for chunk in (0, 1):
            with pytest.raises(BusyError), other.claim(chunk):
                pass
        with other.claim(2):
            pass
    with other.claim(0), other.claim(1):
        pass
    store.close()
    other_store.close()


def test_processes_that_meet_part_at_random(path, table, victims):
    """Who finds the first chunk held starts somewhere else, and comes round to the beginning."""
    starts = set()
    with SharedRows(table, 8, label="rows", progress=False) as work:
        other = victims.start("hold", path, 0, 1)
        until(lambda: table.done()[0])
        for _ in range(20):
            for rows in next(work.rounds()):
                starts.add(int(rows[0]))
                break
            work._give_up()
            work._next = 0
        os.kill(other, signal.SIGKILL)
        victims.wait(other)
    assert len(starts) > 5
    assert 0 not in starts


def test_a_table_comes_to_be_with_the_first_batch_and_only_one_of_two_first_batches_counts(path):
    store, _ = open_for_writing(path, LONG)
    made = []

    def create():
        made.append(store.create_table("ckpt-0", LONG))
        return made[-1]

    late = LazyTable(LONG, None, create)
    with SharedRows(late, 3, label="rows", progress=False) as work:
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
    assert late.read_if_complete("q").tolist() == values(range(LONG.num_rows), LONG)["q"].tolist()
    store.close()


class Second(Ranks):
    """A rank that arrives after another one."""

    def comes_first(self, what):
        return False


def test_a_rank_that_waited_for_the_table_leaves_the_first_chunk_to_its_creator(path):
    store, table = open_for_writing(path, LONG)
    found = iter([None, table])
    late = LazyTable(LONG, None, lambda: pytest.fail("It waits for the table."), lambda: next(found))
    with SharedRows(late, 3, label="rows", progress=False, ranks=Second()) as work:
        batches = itertools.chain.from_iterable(work.rounds())
        drawn = [next(batches)]
        assert drawn[0].tolist() == list(range(LONG.chunk_rows, LONG.chunk_rows + 3))
        work.put(drawn[0], values(drawn[0], LONG))
        for rows in batches:  # the chunk is not lost if its creator was killed
            work.put(rows, values(rows, LONG))
    assert table.complete
    store.close()


def test_a_first_batch_whose_chunk_is_held_by_then_is_left_out(path, victims):
    store, table = open_for_writing(path, LONG)
    late = LazyTable(LONG, None, lambda: table)
    with SharedRows(late, 3, label="rows", progress=False) as work:
        (first,) = next(work.rounds())
        holder = victims.start("hold", path, 0, 1)
        until(lambda: table.done()[0])
        work.put(first, values(first, LONG))
        assert work.written == 0
    os.kill(holder, signal.SIGKILL)
    victims.wait(holder)
    store.close()


def test_a_table_that_has_grown_is_not_claimed_through_an_old_handle(path):
    store, table = open_for_writing(path)
    other_store, _ = open_for_writing(path)
    other_store.grow_table("targets/test/ckpt-0", 12)
    with pytest.raises(StateError, match="has grown"), table.claim(2):
        pass
    store.close()
    other_store.close()


def test_batches_never_reach_over_a_chunk_and_keep_their_place_when_rows_are_missing():
    assert [rows.tolist() for rows in plan_batches(np.array([0, 1, 4, 5, 6, 9]), 8, 3)] == [
        [0, 1],
        [4, 5],
        [6],
        [9],
    ]
    assert plan_batches(np.array([], np.int64), 8, 3) == []


def test_the_name_of_its_last_holder_in_a_log_does_not_say_who_holds_a_chunk_now(path, table):
    """A new holder has the lock a moment before its name is there; the last one must wait for it, not give up."""
    table.put([0], values([0], LONG))
    table.close()
    with writing(path, LONG) as again:
        fd = os.open(folder(path, "features", ".stage", "0.log"), os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(BusyError) as busy, again.claim(0):
            pass
        assert not isinstance(busy.value, HeldHereError)
        os.close(fd)
        with again.claim(0) as pending:
            assert len(pending) == LONG.chunk_rows - 1


def test_a_chunk_that_another_machine_commits_while_its_batches_are_computed_is_left_to_it(path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    with (
        open_remote(path, staging="one") as (_, mine),
        open_remote(path, staging="two") as (_, theirs),
        SharedRows(mine, 2, label="rows", progress=False) as work,
    ):
        for batches in work.rounds():
            drawn = iter(batches)
            ahead = [next(drawn), next(drawn)]
            if not theirs.committed_chunks():
                theirs.put(range(4), values(range(4)))
            for rows in itertools.chain([ahead[0], next(drawn), ahead[1]], drawn):
                work.put(rows, values(rows))
        assert (mine.complete, work.written) == (True, SPEC.num_rows - 4)


def test_rows_that_are_done_by_a_mistake_of_the_caller_are_still_refused(table):
    with SharedRows(table, 4, label="rows", progress=False) as work:
        rows = next(iter(next(work.rounds())))
        work.put(rows, values(rows, LONG))
        with pytest.raises(StateError, match="done already"):
            work.put(rows, values(rows, LONG))
