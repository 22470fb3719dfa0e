"""A kill at any step loses nothing that was acknowledged, never shows a half chunk, and is no damage."""

import contextlib
import itertools
import os
import shutil
import signal
from unittest import mock

import numpy as np
import pytest
import store_cases as cases
from store_cases import LONG, NAME, PACKED, SPEC, Folder, Objects, failpoints, finish, put_pending, values

from trak_lite.cli import main
from trak_lite.errors import CorruptStoreError, IncompleteStoreError, MissingStoreError
from trak_lite.store import MemoryFeatureStore, check_store, create_store, open_store

STEPS = [name for name in failpoints.FAILPOINTS if name != "column_removed"]
RECOVERY = failpoints.FAILPOINTS[failpoints.FAILPOINTS.index("columns_synced") :]
# A put into one chunk reserves nothing.
FILLING = failpoints.FAILPOINTS[failpoints.FAILPOINTS.index("column_written") :]


def killed(place, failpoint, act, *given):
    """Return what is left, and the rows whose ``put`` had returned, if all die at a step; nothing if it is not reached.

    ``act(place, acked, *given)`` adds rows to ``acked``. The process has a number that none alive has.
    """
    left, acked = [], []
    root = f"{place.root}-{len(os.listdir(os.path.dirname(place.root)))}"
    last_look = cases.dying(failpoint, lambda: left.append((place.copied(root), tuple(acked))))
    with mock.patch.object(os, "getpid", return_value=1 << 23), contextlib.suppress(cases.Killed), last_look:
        act(place, acked, *given)
    return left[0] if left else None


def write(place, acked, spec=SPEC, batch=3):
    with place.create() as store:
        table = store.create_table(NAME, spec)
        put_pending(table, batch, acked.extend)


def grow(place, acked, size):
    with place.create() as store:
        put_pending(store.grow_table(NAME, size), 1, acked.extend)


def drop(place, acked, name=NAME):
    del acked[:]
    with place.create() as store:
        store.drop_table(name)


def replace_entry(place, acked):
    with place.create() as store:
        store.put_entry("a", "key", np.ones(3))
        store.drop_entry("a")


def repair(place, acked):
    place.check(repair=True)


def made(kind, root, rows=0):
    """A place; with rows, it has a table of so many, and an entry."""
    os.mkdir(root)
    place = kind(str(root))
    if rows:
        with place.create() as store:
            store.create_table(NAME, cases.sized(rows)).put(0, values(range(rows)))
            store.put_entry("a", "key", np.zeros(3))
    return place


WRITES = [(Folder, step, write, (), 0) for step in (*STEPS, *failpoints.LIST_FAILPOINTS)]
WRITES += [(Folder, step, write, (PACKED,), 0) for step in STEPS]
WRITES += [(Objects, step, write, (), 0) for step in ("object_put", "commit_put", "chunk_settled")]
GROWTHS = [(Folder, step, grow, (n,), 11) for step in failpoints.GROWTH_FAILPOINTS for n in (12, 14, 15, 16)]
GROWTHS += [(Folder, name, grow, (15,), 9) for name in FILLING]
OTHERS = [(Folder, "table_renamed", drop, (), 11)]
OTHERS += [(Folder, step, replace_entry, (), 11) for step in failpoints.ENTRY_FAILPOINTS]


@pytest.mark.parametrize(("kind", "step", "act", "given", "had"), [*WRITES, *GROWTHS, *OTHERS])
def test_a_kill_at_any_step_loses_nothing(tmp_path, kind, step, act, given, had):
    """At each time that the step is reached: a reader, a check and a repair find no damage, and the run is resumed."""
    for count in itertools.count(1):
        found = killed(made(kind, tmp_path / str(count), had), f"{step}:{count}", act, *given)
        if found is None:
            assert count > 1, "the step was never reached"
            return
        place, acked = found
        whole = [] if act is drop else [*range(had), *acked]
        if had:
            with place.read() as store:
                assert (store.entry("a", "key") is None) == (step == "entry_removed")
                assert store.entry_names() == ([] if step == "entry_removed" else ["a"])
        look(place, whole, changes=step in STEPS[:2] or had == 9)
        if count % 2 and kind is Objects:  # by turns the run goes on from another machine
            shutil.rmtree(f"{place.root}/staging")
            whole = []
        resume(place, whole, given[0] if act is grow else SPEC.num_rows, PACKED if PACKED in given else SPEC)
        for folder_of_one in tmp_path.iterdir():
            shutil.rmtree(folder_of_one)


def look(place, acked, *, changes=False):
    """A reader finds every acknowledged row, every committed chunk is right, and nothing is damaged."""
    try:
        opened = place.read()
    except MissingStoreError:
        assert not acked
        return
    with opened as store:
        there = NAME in store.table_names()
        assert there == os.path.exists(f"{place.files}/{NAME}/zarr.json")  # whether or not it is listed
        entry = store.entry("a", "key")
        assert entry is None or entry.tolist() in ([0] * 3, [1] * 3)
        assert there or not acked
        if there:
            done = store.open_table(NAME).done()
            assert done[np.array(acked, int)].all()
            if store.open_table(NAME).spec.columns == SPEC.columns:
                cases.check_committed(store.open_table(NAME))
        before, report = cases.snapshot(place.files), place.check()
        assert report.ok, str(report)
        assert not there or not place.repairs or report.tally.done_rows == done.sum()
        if place.repairs and not changes:
            assert place.check(repair=True).set_aside == ()
            assert cases.snapshot(place.files) == before


def resume(place, acked, num_rows, spec):
    """Put what is pending: the bits are those of a store in memory, and nothing is left over."""
    memory = MemoryFeatureStore(cases.MANIFEST).create_table(NAME, cases.sized(num_rows, spec))
    memory.put(0, values(range(num_rows), spec))
    with place.create() as store:
        if NAME in store.table_names() and place.grows:
            table = store.grow_table(NAME, num_rows)
        else:
            table = store.create_table(NAME, memory.spec)
        assert table.done()[np.array(acked, int)].all()
        put_pending(table)
        assert table.content_key() == memory.content_key()
        for column in spec.columns:
            np.testing.assert_array_equal(table.read(column.name), memory.read(column.name))
        assert store.check().findings == ()
        store.put_entry("a", "key", np.full(3, 2.0))
        assert store.entry("a", "key").tolist() == [2] * 3
    listed = {"zarr.json", cases.entry_name(NAME), ".entries%a"}
    assert set(os.listdir(f"{place.files}/.tables")) == listed


LEFT = {
    "column_published:1": "features visible",
    "column_published:2": "features, q visible",
    "column_published:3": "0.rows still in the stage",
    "chunk_published:1": "0.rows still in the stage",
}


@pytest.mark.parametrize("second", [*RECOVERY, "column_removed:2"])
@pytest.mark.parametrize("first", LEFT)
def test_a_kill_during_recovery_loses_nothing(tmp_path, second, first):
    place, acked = killed(made(Folder, tmp_path / "0"), first, write)
    (finding,) = place.check().findings
    assert (finding.level, finding.chunk) == ("note", 0)
    assert LEFT[first] in finding.finding
    again = killed(place.copied(f"{place.root}-copy"), second, write)
    for left, more in [(place, ()), *([again] if again else [])]:
        look(left, [*acked, *more])
        resume(left, [*acked, *more], SPEC.num_rows, SPEC)


def test_a_growth_that_was_interrupted_leaves_the_old_size_and_may_be_taken_further(tmp_path):
    place = made(Folder, tmp_path / "0", 11)
    grown, _ = killed(place.copied(f"{place.root}-grown"), "table_grown:1", grow, 12)
    assert grown.check().findings == ()  # its last chunk has files of 11 rows, and a row log
    for size, count in ((20, 2), (13, 1)):
        place, _ = killed(place, f"array_grown:{count}", grow, size)
        with place.read() as store:
            assert store.open_table(NAME).spec == SPEC
        look(place, range(11))
    noted = [finding.finding for finding in place.check().findings if finding.chunk is None]
    assert [text.split(" was")[0] for text in noted] == ["growing it to 13 rows", "growing it to 20 rows"]
    with place.create() as store:
        store.grow_table(NAME, 11)
        assert place.check().findings == ()
    resume(place, range(11), 15, SPEC)


@pytest.mark.parametrize("step", failpoints.REPAIR_FAILPOINTS)
def test_a_repair_may_be_killed_at_any_step(tmp_path, mixed, step):
    """Then a writer resumes, or a second repair finishes; either way no sound row is lost and no wrong one is read."""
    for count in itertools.count(1):
        place = made(Folder, tmp_path / str(count))
        shutil.copytree(mixed, place.place)
        cases.flip(cases.folder(place.place, "q/c.1"))
        cases.flip_row(place.place, 2, "w")
        found = killed(place, f"{step}:{count}", repair)
        if found is None:
            assert count > 1
            return
        place, _ = found
        other = place.copied(f"{place.root}-other")
        assert place.check(repair=True).ok
        assert cases.done_rows(place.place) == [0, 1, 2, 3, 9]
        finish(place.place)
        with cases.writing(other.place) as table:
            put_pending(table)
        assert other.check(repair=True).ok
        finish(other.place)


def test_what_a_killed_drop_left_is_swept_and_stands_in_nobodys_way(tmp_path):
    """Of a table and of the group that held it alone: what is dropped is dropped as a whole."""
    for step, name in (("table_renamed", NAME), ("group_renamed", "targets/a/y")):
        place = made(Folder, tmp_path / step, 11)
        with place.create() as store:
            store.create_table("targets/a/y", SPEC)
        place, _ = killed(place, f"{step}:1", drop, name)
        assert place.check().findings == ()
        with place.create() as store:
            assert name not in store.table_names()
            assert not [left for left in os.listdir(f"{place.place}/.tables") if "dropped" in left]
            cases.raises(MissingStoreError, None, store.drop_table, name)
            assert not store.create_table(name, SPEC).done().any()
            for table in (NAME, "targets/a/y"):
                store.drop_table(table)
            targets = f"{place.place}/targets"
            assert not os.path.exists(targets) or os.listdir(targets) == ["zarr.json"]
        assert place.check().findings == ()


def test_a_commit_log_torn_before_the_rename_costs_nothing(tmp_path):
    """The record may be torn while no column has its final name: then it does not exist."""
    place, _ = killed(made(Folder, tmp_path / "0"), "commit_synced:1", write, SPEC, 11)
    whole = cases.content(cases.commit_log(place.place))
    for cut in (*range(0, len(whole), 3), len(whole) - 1):
        cases.overwrite(cases.commit_log(place.place), whole[:cut])
        assert cases.done_rows(place.place) == [0, 1, 2, 3]
    finish(place.place)


def test_rows_that_are_done_and_not_committed_are_called_so(tmp_path, capsys):
    """By the error of a reader and by each line of inspect, until the table is opened for writing."""
    place, _ = killed(made(Folder, tmp_path / "0"), "commit_synced:3", write, SPEC, 11)
    with open_store(place.place) as store:
        said = r"Rows 8 to 10 \(chunk 2\) of .* are done and not committed yet"
        cases.raises(IncompleteStoreError, said, store.open_table(NAME).read, "q")
    for left, line in (("1", "11 of 11 rows done, not committed yet"), ("none", "11 of 11 rows done")):
        main(["inspect", place.place])
        lines = capsys.readouterr().out.splitlines()
        assert f"  1 tables ({left} not finished), 0 entries" in lines
        assert f"  {NAME}  {line}" in lines
        with open_store(place.place, "r+") as store:
            store.open_table(NAME)
    with open_store(place.place) as store:
        store.open_table(NAME).read("q")


def test_a_kill_while_a_leftover_is_replaced_loses_nothing(tmp_path):
    """The record is won, some objects still have the dead writer's bytes: nobody reads them as rows."""
    place = made(Objects, tmp_path / "0")
    with create_store(place.place, cases.MANIFEST) as store:
        store.create_table(NAME, SPEC).put(0, values(range(4), attempt=1))
    os.unlink(f"{place.files}/{NAME}/features/.commits/c.0.1.log")
    shutil.rmtree(f"{place.root}/staging")
    for step in ("commit_put:1", "leftover_replaced:1", "leftover_replaced:1"):
        place, _ = killed(place, step, write, SPEC, 11)
        with cases.open_remote(place.root, "r", staging="none") as (_, table):
            cases.raises(CorruptStoreError, "wait if it runs", table.read, "w")
    resume(place, range(4), SPEC.num_rows, SPEC)


# Several writers, in processes that are killed.


@pytest.mark.parametrize("step", ["rows_written:4", "rows_recorded:4", "commit_synced:2"])
def test_what_killed_writers_left_is_taken_over_row_by_row_by_another_number_of_them(path, victims, step):
    """Each row is put once, and a reader beside them sees whole chunks, and more of them each time."""
    cases.make(path, spec=LONG)
    for count in (1, 2):
        started = [victims.start("share", path, 3, failpoint=step) for _ in range(count)]
        assert [victims.wait(pid)[0] for pid in started] == [-signal.SIGKILL] * count
    with cases.reading(path) as reader:
        pending = reader.pending().tolist()
        assert 0 < len(pending) < LONG.num_rows
        started = [victims.start("share", path, 5) for _ in range(3)]
        committed, done = set(), reader.done()
        while not reader.complete:
            now, rows = set(reader.committed_chunks()), reader.done()
            assert committed <= now
            assert (rows | ~done).all()
            cases.check_committed(reader)
            report = check_store(path)
            assert report.ok, str(report)
            committed, done = now, rows
    answers = [victims.wait(pid)[1] for pid in started]
    assert sorted(itertools.chain.from_iterable(answers)) == pending
    cases.check_all(path, LONG)
