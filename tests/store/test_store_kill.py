"""kill -9 at every step loses nothing that was acknowledged, never shows a half chunk, and is no damage."""

import itertools
import os
import shutil
import signal

import numpy as np
import pytest
from store_cases import (
    LONG,
    MANIFEST,
    NAME,
    PACKED,
    SPEC,
    check_all,
    check_committed,
    check_rows,
    commit_log,
    content,
    done_rows,
    entry_name,
    failpoints,
    finish,
    flip,
    flip_row,
    folder,
    open_remote,
    overwrite,
    put_pending,
    reading,
    row_log,
    sized,
    snapshot,
    values,
    writing,
)

from trak_lite.errors import CorruptStoreError, MissingStoreError
from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore, check_store

STEPS = [name for name in failpoints.FAILPOINTS if name != "column_removed"]
RECOVERY = failpoints.FAILPOINTS[failpoints.FAILPOINTS.index("columns_synced") :]
# A put into one chunk reserves nothing.
FILLING = failpoints.FAILPOINTS[failpoints.FAILPOINTS.index("column_written") :]
GROWTHS = [(name, 11, 11 + more) for name in failpoints.GROWTH_FAILPOINTS for more in (1, 3, 4, 5)]
GROWTHS += [(name, 9, 15) for name in FILLING]


def acknowledged(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [int(line) for line in file]


def look(path, acked, repaired):
    """A reader finds every acknowledged row, every committed chunk is right, and nothing is damaged."""
    try:
        with ZarrFeatureStore.open(path) as store:
            there = store.table_names() == [NAME]
    except MissingStoreError:
        there = False
    assert there == os.path.exists(folder(path, "zarr.json"))  # whether or not it is listed
    if not there:
        assert not acked
        return
    with reading(path) as table:
        done = table.done()
        assert done[acked].all()
        check_committed(table)
    before = snapshot(path)
    report = check_store(path)
    assert (report.ok, report.tally.done_rows) == (True, done.sum())
    if repaired:
        assert check_store(path, repair=True).set_aside == ()
        assert snapshot(path) == before


def every_kill(tmp_path, victims, failpoint, prepare, order):
    """Yield a store, and the rows put, for each time that a step is reached: its writer was killed at that step."""
    for count in itertools.count(1):
        path, done = str(tmp_path / f"{count}.zarr"), str(tmp_path / f"{count}.done")
        prepare(path)
        if not victims.killed(
            f"{failpoint}:{count}", order[0], path, *(done if x is ... else x for x in order[1:])
        ):
            assert count > 1, "the step was never reached"
            return
        yield path, acknowledged(done)
        shutil.rmtree(path, ignore_errors=True)


def rows_put(count):
    """Return what makes a table of so many rows, all of them put."""

    def prepare(path):
        with writing(path, sized(count)) as table:
            table.put(0, values(range(count)))

    return prepare


@pytest.mark.parametrize("failpoint", [*STEPS, *failpoints.LIST_FAILPOINTS])
def test_a_kill_at_any_step_loses_nothing(tmp_path, victims, failpoint):
    """What creations left is swept by the next writer."""
    for path, acked in every_kill(tmp_path, victims, failpoint, lambda path: None, ("write", ..., 3)):
        look(path, acked, failpoint not in STEPS[:2])
        finish(path)
        assert check_store(path).findings == ()
        assert sorted(os.listdir(f"{path}/.tables")) == sorted(["zarr.json", entry_name(NAME)])


@pytest.mark.parametrize("failpoint", STEPS)
def test_a_kill_of_a_quantised_table_ends_with_the_bits_of_memory(tmp_path, victims, failpoint):
    """Integers and scales are committed by one record."""
    memory = MemoryFeatureStore(MANIFEST).create_table(NAME, PACKED)
    memory.put(0, values(range(11), PACKED))
    for path, acked in every_kill(
        tmp_path, victims, failpoint, lambda path: None, ("write", ..., 3, "packed")
    ):
        with writing(path, PACKED) as table:
            assert table.done()[acked].all()
            put_pending(table)
            assert table.content_key() == memory.content_key()


LEFT = {
    "column_published:1": "features visible",
    "column_published:2": "features, q visible",
    "column_published:3": "0.rows still in the stage",
    "chunk_published:1": "0.rows still in the stage",
}


@pytest.mark.parametrize("second", [*RECOVERY, "column_removed:2"])
@pytest.mark.parametrize("first", LEFT)
def test_a_kill_during_recovery_loses_nothing(tmp_path, victims, second, first):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed(first, "write", path, done, 3)
    (finding,) = check_store(path).findings
    assert (finding.level, finding.chunk) == ("note", 0)
    assert LEFT[first] in finding.finding
    shutil.copytree(path, f"{path}-copy")
    with writing(f"{path}-copy") as table:
        assert table.done()[acknowledged(done)].all()
    victims.killed(second, "write", path, done, 3)
    look(path, acknowledged(done), repaired=True)
    finish(path)


@pytest.mark.parametrize(("failpoint", "had", "size"), GROWTHS)
def test_growing_may_be_killed_at_any_step(tmp_path, victims, failpoint, had, size):
    """By rows within the last chunk, to its end, and over it; and filling what is new."""
    for path, _ in every_kill(tmp_path, victims, failpoint, rows_put(had), ("grow", size)):
        look(path, range(had), repaired=had == 11)
        with ZarrFeatureStore.open(path, "r+") as store:
            table = store.grow_table(NAME, size)
            assert table.done()[:had].all()
            put_pending(table, 1)
        check_all(path, sized(size))
        assert check_store(path).findings == ()


def test_a_growth_that_was_interrupted_leaves_the_old_size_and_may_be_taken_further(tmp_path, victims):
    path = str(tmp_path / "run.zarr")
    rows_put(11)(path)
    for size, count in ((20, 2), (13, 1)):
        assert victims.killed(f"array_grown:{count}", "grow", path, size)
        with reading(path) as table:
            assert table.spec == SPEC
            check_rows(table)
    noted = [finding.finding for finding in check_store(path).findings if finding.chunk is None]
    assert [text.split(" was")[0] for text in noted] == ["growing it to 13 rows", "growing it to 20 rows"]
    with ZarrFeatureStore.open(path, "r+") as store:
        store.grow_table(NAME, 11)
        assert check_store(path).findings == ()
        put_pending(store.grow_table(NAME, 15))
    check_all(path, sized(15))


@pytest.mark.parametrize("failpoint", failpoints.REPAIR_FAILPOINTS)
def test_a_repair_may_be_killed_at_any_step(tmp_path, victims, failpoint):
    """Then a writer resumes, or a second repair finishes; either way no sound row is lost and no wrong one is read."""

    def prepare(path):
        with writing(path) as table:
            for start, count in ((0, 8), (8, 1), (9, 1)):
                table.put(start, values(range(start, start + count)))
        flip(folder(path, "q/c.1"))
        flip_row(path, 2, "w")

    for path, _ in every_kill(tmp_path, victims, failpoint, prepare, ("repair",)):
        shutil.copytree(path, f"{path}-copy", symlinks=True)
        assert check_store(path, repair=True).ok
        assert done_rows(path) == [0, 1, 2, 3, 9]
        finish(path)
        with writing(f"{path}-copy") as table:
            put_pending(table)
        assert check_store(f"{path}-copy", repair=True).ok
        finish(f"{path}-copy")


def test_a_table_is_dropped_as_a_whole_also_by_a_kill(tmp_path, victims):
    """What it left is swept by the next writer, noted once it is old, and stands in nobody's way."""
    path, listed = str(tmp_path / "run.zarr"), str(tmp_path / "run.zarr" / ".tables")
    rows_put(11)(path)
    assert victims.killed("table_renamed:1", "drop", path, NAME)
    with ZarrFeatureStore.open(path) as store:
        assert store.table_names() == []
    assert check_store(path).findings == ()
    (left,) = (name for name in os.listdir(listed) if "dropped" in name)
    os.utime(f"{listed}/{left}", (0, 0))
    (finding,) = check_store(path).findings
    assert (finding.level, "interrupted" in finding.finding) == ("note", True)
    with ZarrFeatureStore.open(path, "r+") as store:
        assert os.listdir(listed) == ["zarr.json"]
        with pytest.raises(MissingStoreError):
            store.drop_table(NAME)
        assert not store.create_table(NAME, SPEC).done().any()
        store.drop_table(NAME)
    assert os.listdir(f"{path}/targets") == ["zarr.json"]


def test_a_kill_while_a_group_goes_leaves_a_sound_store(tmp_path, victims):
    path = str(tmp_path / "run.zarr")
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.create_table("targets/a/y", SPEC)
    assert victims.killed("group_renamed:1", "drop", path, "targets/a/y")
    assert check_store(path).findings == ()
    with ZarrFeatureStore.open(path, "r+") as store:
        assert os.listdir(f"{path}/targets") == os.listdir(f"{path}/.tables") == ["zarr.json"]
        store.create_table("targets/a/y", SPEC)
    assert check_store(path).findings == ()


@pytest.mark.parametrize("failpoint", failpoints.ENTRY_FAILPOINTS)
def test_a_killed_write_leaves_the_old_entry_or_the_new_one(tmp_path, victims, failpoint):
    path = str(tmp_path / "run.zarr")
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.put_entry("a", "key", np.zeros(3))
    assert victims.killed(failpoint, "store_entry", path)
    assert check_store(path).ok
    with ZarrFeatureStore.open(path, "r+") as store:
        found = store.entry("a", "key")
        assert found is None if failpoint == "entry_removed" else found.tolist() in ([0] * 3, [1] * 3)
        store.put_entry("a", "key", np.full(3, 2.0))
        assert store.entry("a", "key").tolist() == [2] * 3


# What a commit record proves.


@pytest.fixture
def recorded(tmp_path, victims):
    """A writer was killed when its first commit record was synced, and no column visible."""
    path = str(tmp_path / "run.zarr")
    assert victims.killed("commit_synced:1", "write", path, str(tmp_path / "done"), 11)
    return path


def test_a_commit_log_torn_before_the_rename_costs_nothing(recorded):
    """The record may be torn while no column has its final name: then it does not exist."""
    whole = content(commit_log(recorded))
    for cut in (*range(0, len(whole), 3), len(whole) - 1):
        overwrite(commit_log(recorded), whole[:cut])
        assert done_rows(recorded) == [0, 1, 2, 3]
    finish(recorded)


def test_a_commit_record_without_its_files_proves_no_row(recorded):
    """A power cut may take the row log, which is not synced, before the files have their final names."""
    overwrite(row_log(recorded, 0), b"")
    assert done_rows(recorded) == []
    assert check_store(recorded).ok
    finish(recorded)


# On the way to an object store.


@pytest.mark.parametrize("failpoint", ["object_put", "commit_put", "chunk_settled"])
def test_a_kill_on_the_way_to_the_object_store_loses_nothing(tmp_path, victims, failpoint):
    """Neither for a run that goes on here nor, by turns, for one on another machine."""
    pytest.importorskip("obstore")
    kills = every_kill(tmp_path, victims, failpoint, os.mkdir, ("write_remote", ..., 3))
    for number, (path, acked) in enumerate(kills):
        with open_remote(path, "r") as (_, table):
            assert table.done()[acked].all()
            check_committed(table)
        with open_remote(path, staging="staging" if number % 2 else "other") as (store, table):
            put_pending(table)
            check_rows(table)
            assert store.check().findings == ()


def test_a_kill_while_a_leftover_is_replaced_loses_nothing(tmp_path, victims):
    """The record is won, some objects still have the dead writer's bytes: nobody reads them as rows."""
    pytest.importorskip("obstore")
    with open_remote(tmp_path, staging="dead") as (_, table):
        table.put(0, values(range(4), attempt=1))
    (tmp_path / "objects" / NAME / "features" / ".commits" / "c.0.1.log").unlink()
    for step in ("commit_put:1", "leftover_replaced:1", "leftover_replaced:1"):
        assert victims.killed(step, "write_remote", str(tmp_path), str(tmp_path / "done"), 11)
        with (
            open_remote(tmp_path, "r", staging="none") as (_, table),
            pytest.raises(CorruptStoreError, match="wait if it runs"),
        ):
            table.read("w")
    with open_remote(tmp_path) as (store, table):
        assert table.committed_chunks() == [0]
        put_pending(table)
        check_rows(table)
        assert store.check().findings == ()


# Several writers.


@pytest.mark.parametrize("failpoint", ["rows_written:4", "rows_recorded:4", "commit_synced:2"])
def test_what_killed_writers_left_is_taken_over_row_by_row_by_another_number_of_them(
    tmp_path, victims, failpoint
):
    """Each row is put once, and a reader beside them sees whole chunks, and more of them each time."""
    path = str(tmp_path / "run.zarr")
    with writing(path, LONG):
        pass
    for count in (1, 2):
        started = [victims.start("share", path, 3, failpoint=failpoint) for _ in range(count)]
        assert [victims.wait(pid)[0] for pid in started] == [-signal.SIGKILL] * count
    with reading(path) as reader:
        pending = reader.pending().tolist()
        assert 0 < len(pending) < LONG.num_rows
        started = [victims.start("share", path, 5) for _ in range(3)]
        committed, done = set(), reader.done()
        while not reader.complete:
            now, rows = set(reader.committed_chunks()), reader.done()
            assert committed <= now
            assert (rows | ~done).all()
            check_committed(reader)
            report = check_store(path)
            assert report.ok, str(report)
            committed, done = now, rows
    answers = [victims.wait(pid)[1] for pid in started]
    assert sorted(itertools.chain.from_iterable(answers)) == pending
    check_all(path, LONG)
