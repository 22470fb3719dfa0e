"""Tables that grow or are dropped, stores that are merged: what only files on a disk can do wrong."""

import errno
import fcntl
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from store_cases import (
    MANIFEST,
    NAME,
    SPEC,
    check_all,
    commit_log,
    content,
    done_rows,
    flip,
    folder,
    on_the_way,
    open_for_writing,
    overwrite,
    reading,
    row_log,
    staged,
    values,
    writing,
)

from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    IncompleteStoreError,
    InvalidInputError,
    MissingStoreError,
    StateError,
    StoreError,
)
from trak_lite.store import ZarrFeatureStore, check_store
from trak_lite.store._failpoints import FAILPOINTS, GROWTH_FAILPOINTS
from trak_lite.store.disk import zarr_table as _zarr_table
from trak_lite.store.disk.documents import sealed

MORE = [1, 3, 4, 5]
"""Rows by which the table of 11 rows in chunks of 4 grows: within its last chunk, to its end and over it."""


@pytest.fixture
def full(path):
    make(path, 11)
    return path


@pytest.fixture
def nine(path):
    """A finished table of nine rows: the last chunk has one."""
    make(path, 9)
    return path


def make(path, num_rows):
    with writing(path, replace(SPEC, num_rows=num_rows)) as table:
        table.put(0, values(range(num_rows)))


def grow(path, num_rows):
    with ZarrFeatureStore.open(path, "r+") as store:
        store.grow_table(NAME, num_rows)


def put_pending(path):
    with ZarrFeatureStore.open(path, "r+") as store:
        table = store.open_table(NAME)
        for row in table.pending().tolist():
            table.put(row, values([row]))


def check_rows(path, num_rows):
    with reading(path) as table:
        assert table.spec.num_rows == num_rows
        for name, expected in values(range(num_rows)).items():
            np.testing.assert_array_equal(table.read(name), expected)
    report = check_store(path)
    assert report.findings == ()
    assert report.tally.pending_rows == 0


@pytest.mark.parametrize("more", MORE)
def test_only_the_new_rows_are_pending_and_the_full_chunks_stay_where_they_are(full, more):
    before = content(folder(full, "features/c.1.0"))
    grow(full, 11 + more)

    assert done_rows(full) == list(range(11))
    assert content(folder(full, "features/c.1.0")) == before
    assert check_store(full).findings == ()
    put_pending(full)
    check_rows(full, 11 + more)


@pytest.mark.parametrize("more", MORE)
def test_plain_zarr_reads_a_grown_table(full, more):
    grow(full, 11 + more)
    put_pending(full)
    for name, expected in values(range(11 + more)).items():
        array = zarr.open(folder(full, name), mode="r")
        assert array[:].tobytes() == expected.tobytes()
        assert array.chunks[0] == 4
    assert {name for name, _ in zarr.open_group(full, mode="r").members(max_depth=None)} >= {f"{NAME}/q"}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("failpoint", GROWTH_FAILPOINTS)
def test_growing_may_be_killed_at_any_step(tmp_path, victims, failpoint, more):
    deaths = 0
    for count in itertools.count(1):
        path, done = str(tmp_path / f"{count}.zarr"), str(tmp_path / f"{count}.done")
        victims.run("write", path, done, 11)
        if not victims.killed(f"{failpoint}:{count}", "grow", path, 11 + more):
            break
        deaths += 1
        assert done_rows(path)[:11] == list(range(11))
        assert check_store(path).ok
        assert check_store(path, repair=True).set_aside == ()
        grow(path, 11 + more)
        assert done_rows(path)[:11] == list(range(11))
        put_pending(path)
        check_rows(path, 11 + more)
    assert deaths >= 1


@pytest.mark.parametrize("failpoint", FAILPOINTS[FAILPOINTS.index("stage_reserved") :])
def test_filling_a_grown_table_may_be_killed_at_any_step(tmp_path, victims, failpoint):
    deaths = 0
    for count in itertools.count(1):
        path = str(tmp_path / f"{count}.zarr")
        make(path, 9)
        if not victims.killed(f"{failpoint}:{count}", "grow", path, 15):
            break
        deaths += 1
        assert done_rows(path)[:9] == list(range(9))
        assert check_store(path).ok
        put_pending(path)
        check_rows(path, 15)
    assert deaths >= 1


def test_a_growth_that_was_interrupted_leaves_the_old_size_and_may_be_taken_further(tmp_path, victims):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    victims.run("write", path, done, 11)
    for size, count in ((20, 2), (13, 1)):
        assert victims.killed(f"array_grown:{count}", "grow", path, size)
        with reading(path) as table:
            assert table.spec == SPEC
            assert table.complete
    noted = [finding.finding for finding in check_store(path).findings if finding.chunk is None]
    assert [text.split(" was")[0] for text in noted] == ["growing it to 13 rows", "growing it to 20 rows"]
    grow(path, 11)
    assert check_store(path).findings == ()
    grow(path, 15)
    put_pending(path)
    check_rows(path, 15)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_the_old_commit_proves_its_rows_where_the_row_log_is_lost(tmp_path, victims, columns):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    victims.run("write", path, done, 11)
    assert victims.killed(f"column_taken_back:{columns}", "grow", path, 12)
    os.unlink(row_log(path, 2))

    assert done_rows(path) == list(range(11))
    put_pending(path)
    check_rows(path, 12)


def test_the_rows_of_the_old_commit_are_noted_and_synced_before_its_files_move(full, monkeypatch):
    grow(full, 13)
    steps, rename, fsync = [], os.rename, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))

    def renamed(source, target, *, src_dir_fd, dst_dir_fd):
        steps.append(os.path.join(os.readlink(f"/proc/self/fd/{src_dir_fd}"), source))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", renamed)
    store = ZarrFeatureStore.open(full, "r+")
    store.open_table(NAME).put(11, values([11]))
    store.close()

    assert steps[:3] == [row_log(full, 2), folder(full, "features/.stage"), folder(full, "features/c.2.0")]


@pytest.mark.parametrize(("row", "lost"), [(0, 8), (1, 9)])
def test_damage_to_a_chunk_that_is_filled_up_costs_the_rows_of_one_record(nine, row, lost):
    """The rows of the old commit have one record together, each new put has its own."""
    grow(nine, 13)
    with ZarrFeatureStore.open(nine, "r+") as store:
        store.open_table(NAME).put(9, values([9]))
        store.open_table(NAME).put(10, values([10]))
    flip(staged(nine, 2, "q"), 4 * row)

    left = [each for each in range(11) if each != lost]
    assert done_rows(nine) == left
    assert check_store(nine, repair=True).ok
    assert done_rows(nine) == left
    put_pending(nine)
    check_rows(nine, 13)


@pytest.mark.parametrize("where", ["before", "after"])
def test_damage_to_the_outgrown_chunk_is_never_read(full, where):
    if where == "before":
        flip(folder(full, "q/c.2"))
        grow(full, 13)
    else:
        grow(full, 13)
        flip(folder(full, "q/c.2"))
    assert done_rows(full) == list(range(8))
    assert [(f.chunk, f.level) for f in check_store(full).findings] == [(2, "damage")]
    with ZarrFeatureStore.open(full, "r+") as store, pytest.raises(CorruptStoreError, match="repair=True"):
        store.open_table(NAME).put(11, values([11]))

    assert check_store(full, repair=True).ok
    assert done_rows(full) == list(range(8))
    put_pending(full)
    check_rows(full, 13)


@pytest.mark.parametrize("more", MORE)
def test_a_reader_from_before_sees_what_it_saw(full, more):
    with reading(full) as table:
        held = table.read_chunk(2, "features")
        grow(full, 11 + more)
        assert table.done().tolist() == [True] * 11
        put_pending(full)
        assert table.committed_chunks() == [0, 1, 2]
        assert table.done().tolist() == [True] * 11
        for name, expected in values(range(11)).items():
            np.testing.assert_array_equal(table.read(name), expected)
        np.testing.assert_array_equal(held, values(range(8, 11))["features"])


def test_a_reader_from_before_misses_the_last_chunk_while_it_is_filled(nine):
    with reading(nine) as table:
        grow(nine, 13)
        store = ZarrFeatureStore.open(nine, "r+")
        store.open_table(NAME).put(10, values([10]))
        assert table.committed_chunks() == [0, 1]
        assert table.done().tolist() == [True] * 9
        with pytest.raises(IncompleteStoreError):
            table.read_chunk(2, "q")
        np.testing.assert_array_equal(table.read_done(2)[1]["q"], values([8])["q"])
        with pytest.raises(StateError, match=r"8 .* are done already"):
            store.open_table(NAME).put(8, values([8]))
        store.open_table(NAME).put(
            9,
            values(
                [
                    9,
                ]
            ),
        )
        store.open_table(NAME).put(11, values([11]))
        np.testing.assert_array_equal(table.read("q"), values(range(9))["q"])
        store.close()


def test_a_chunk_that_the_size_on_the_disk_does_not_explain_is_refused(full):
    """More chunks, or more rows in the last one, are a growing table only where its zarr.json says so."""
    overwrite(folder(full, "q/c.3"), bytes(16))
    with pytest.raises(CorruptStoreError, match="its 11 rows make 3 chunks"), reading(full):
        pass
    os.unlink(folder(full, "q/c.3"))
    grow(full, 12)
    put_pending(full)
    for name in (f"{NAME}", *(f"{NAME}/{column.name}" for column in SPEC.columns)):
        shrink(f"{full}/{name}/zarr.json")
    with pytest.raises(CorruptStoreError, match=r"recorded .* for 4 rows"), reading(full):
        pass
    assert not check_store(full).ok


def shrink(path):
    with open(path) as file:
        document = json.load(file)
    if "shape" in document:
        document["shape"][0] = 11
    else:
        document["attributes"]["trak_lite"]["num_rows"] = 11
        document["attributes"]["trak_lite"] = sealed(document["attributes"]["trak_lite"])
    overwrite(path, json.dumps(document).encode())


def test_a_writer_from_before_does_not_pad_over_new_rows(path):
    """It would commit the last chunk as it knows it, with padding where rows are now."""
    with writing(path) as table:
        table.put(0, values(range(10)))
    old_store, old = open_for_writing(path)
    with ZarrFeatureStore.open(path, "r+") as store:
        table = store.grow_table(NAME, 12)
        table.put(11, values([11]))
    with pytest.raises(StateError, match="has grown since it was opened"):
        old.put(10, values([10]))
    old_store.close()
    assert done_rows(path) == [*range(10), 11]
    put_pending(path)
    check_rows(path, 12)


def test_a_chunk_that_a_writer_from_before_committed_is_taken_further(path):
    """It commits its last chunk while the size changes; the next writer finds fewer rows in it than it has."""
    with writing(path) as table:
        table.put(0, values(range(11)))
    grow(path, 12)
    grow(path, 13)
    assert done_rows(path) == list(range(11))
    put_pending(path)
    check_rows(path, 13)


def test_rows_stay_done_where_a_chunk_is_filled_up_while_it_is_looked_at(full, monkeypatch):
    """The rows of the old commit are neither in the row log, which is gone, nor in files that match the old record."""
    grow(full, 12)
    read_row_log, left = _zarr_table.read_row_log, [11]

    def read_late(files, chunk):
        if left:
            writer.put(left.pop(), values([11]))
        return read_row_log(files, chunk)

    with ZarrFeatureStore.open(full, "r+") as store, reading(full) as reader:
        writer = store.open_table(NAME)
        monkeypatch.setattr(_zarr_table, "read_row_log", read_late)
        done = reader.done()

    assert done.tolist() == [True] * 12


def test_a_table_does_not_grow_while_its_last_chunk_is_being_filled(path):
    store, table = open_for_writing(path)
    table.put(9, values([9]))
    other = ZarrFeatureStore.open(path, "r+")
    with pytest.raises(BusyError, match=r"rows 8 to 10 \(chunk 2\)"):
        other.grow_table(NAME, 12)
    other.close()
    assert store.grow_table(NAME, 12).pending().tolist() == [*range(9), 10, 11]
    store.close()


def test_of_two_who_grow_a_table_at_once_one_is_told(full, monkeypatch):
    """The other one grew it between the look at its size and the lock."""
    flock = fcntl.flock

    def late(fd, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        grow(full, 20)
        flock(fd, operation)

    store = ZarrFeatureStore.open(full, "r+")
    store.open_table(NAME)
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(BusyError, match="another number of rows now, because another writer has grown it"):
        store.grow_table(NAME, 15)
    assert store.open_table(NAME).spec.num_rows == 20
    assert store.grow_table(NAME, 21).spec.num_rows == 21
    store.close()


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "rename"])
def test_any_call_of_a_growth_may_fail(tmp_path, monkeypatch, call):
    real = getattr(os, call)
    for count in itertools.count(1):
        path = str(tmp_path / f"{count}.zarr")
        with writing(path) as table:
            table.put(0, values(range(11)))
        store = ZarrFeatureStore.open(path, "r+")
        store.open_table(NAME)
        left = [count]

        def fail(*arguments, left=left, **keywords):
            if not on_the_way(real, *arguments):
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.EIO, "broken")
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, call, fail)
        try:
            store.grow_table(NAME, 14)
        except StoreError:
            fired = True
        else:
            fired = False
        monkeypatch.setattr(os, call, real)
        assert store.grow_table(NAME, 14).pending().tolist() == [11, 12, 13]
        store.close()
        assert check_store(path).findings == ()
        if not fired:
            break
    assert count >= 2


def test_a_dropped_table_leaves_nothing_on_the_disk(full):
    with ZarrFeatureStore.open(full, "r+") as store:
        store.drop_table(NAME)
        assert store.table_names() == []
    assert os.listdir(f"{full}/targets") == ["zarr.json"]
    assert check_store(full).findings == ()


def test_a_table_is_dropped_as_a_whole_also_by_a_kill(full, victims):
    assert victims.killed("table_renamed:1", "drop", full, NAME)
    assert ZarrFeatureStore.open(full).table_names() == []
    with ZarrFeatureStore.open(full, "r+") as store:
        assert store.table_names() == []
        assert os.listdir(f"{full}/targets/test") == ["zarr.json"]
        assert os.listdir(f"{full}/.tables") == ["zarr.json"]  # opening it for writing has swept
        with pytest.raises(MissingStoreError):
            store.drop_table(NAME)


def test_what_a_killed_drop_left_does_not_stand_in_the_way(full, victims):
    assert victims.killed("table_renamed:1", "drop", full, NAME)
    assert check_store(full).findings == ()
    (left,) = (name for name in os.listdir(f"{full}/.tables") if "dropped" in name)
    os.utime(f"{full}/.tables/{left}", (0, 0))
    (finding,) = check_store(full).findings
    assert (finding.level, "interrupted" in finding.finding) == ("note", True)

    with writing(full) as table:
        assert not table.done().any()
    with ZarrFeatureStore.open(full, "r+") as store:
        store.drop_table(NAME)
    assert os.listdir(f"{full}/targets") == ["zarr.json"]


def test_a_table_that_another_writer_fills_is_not_dropped(path):
    store, table = open_for_writing(path)
    table.put(0, values([0]))
    other = ZarrFeatureStore.open(path, "r+")
    with pytest.raises(BusyError, match=rf"{NAME}: another writer \(pid {os.getpid()} on"):
        other.drop_table(NAME)
    assert done_rows(path) == [0]
    store.drop_table(NAME)
    assert store.table_names() == []
    store.close()
    other.close()


def test_a_group_of_tables_is_not_dropped(full):
    with (
        ZarrFeatureStore.open(full, "r+") as store,
        pytest.raises(InvalidInputError, match="is a group of tables"),
    ):
        store.drop_table("targets")
    assert done_rows(full) == list(range(11))


def test_two_may_drop_the_same_table(full, monkeypatch):
    """The folder is removed by the other one while this one removes it."""
    real = shutil.rmtree

    def twice(name, **keywords):
        real(name, **keywords)
        real(name, **keywords)

    monkeypatch.setattr(shutil, "rmtree", twice)
    with ZarrFeatureStore.open(full, "r+") as store:
        store.drop_table(NAME)
    assert os.listdir(f"{full}/targets") == ["zarr.json"]


def test_two_may_drop_the_same_table_at_the_same_moment(full, monkeypatch):
    real = os.rename

    def renamed_before(source, target, **folders):
        real(source, target, **folders)
        real(source, f"{target}-twice", **folders)

    with ZarrFeatureStore.open(full, "r+") as store:
        monkeypatch.setattr(os, "rename", renamed_before)
        store.drop_table(NAME)
        monkeypatch.undo()
        assert store.table_names() == []
    assert os.listdir(f"{full}/targets") == ["zarr.json"]


def test_a_reader_of_a_dropped_table_keeps_the_rows_it_holds(full):
    with reading(full) as table:
        rows = table.read_chunk(0, "q")
        with ZarrFeatureStore.open(full, "r+") as store:
            store.drop_table(NAME)
        np.testing.assert_array_equal(rows, values(range(4))["q"])
        with pytest.raises(IncompleteStoreError, match="was removed"):
            table.read_chunk(1, "q")


def test_a_writer_of_a_dropped_table_is_told(full):
    store = ZarrFeatureStore.open(full, "r+")
    table = store.open_table(NAME)
    for name in ("features/c.2.0", "q/c.2", "w/c.2"):
        os.unlink(folder(full, name))
    assert table.pending().tolist() == [8, 9, 10]
    with ZarrFeatureStore.open(full, "r+") as other:
        other.drop_table(NAME)
    with pytest.raises(StoreError, match="No such file"):
        table.put(8, values([8]))
    store.close()


def test_parts_of_killed_workers_are_merged_and_finished(tmp_path, victims):
    """Each was killed at another step; not one row that they acknowledged is computed again."""
    parts = []
    for count, failpoint in enumerate(
        ("rows_recorded:2", "commit_synced:1", "column_published:2", "chunk_settled:2")
    ):
        part, done = str(tmp_path / f"{count}.zarr"), str(tmp_path / f"{count}.done")
        assert victims.killed(failpoint, "write", part, done, 3)
        parts.append(part)
    path = str(tmp_path / "run.zarr")
    stores = [ZarrFeatureStore.open(part) for part in parts]
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.merge(stores)
        expected = set().union(*map(done_rows, parts))
        assert set(done_rows(path)) == expected
        assert store.diff(stores[0])
    for each in stores:
        each.close()
    put_pending(path)
    check_rows(path, 11)


def test_a_merge_that_was_interrupted_is_repeated(tmp_path, full, monkeypatch):
    path = str(tmp_path / "merged.zarr")
    with ZarrFeatureStore.create(path, MANIFEST) as store, ZarrFeatureStore.open(full) as part:
        real, left = os.pwrite, [7]

        def fail(*arguments):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, "broken")
            return real(*arguments)

        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(StoreError, match="broken"):
            store.merge([part])
        monkeypatch.setattr(os, "pwrite", real)
        first = len(done_rows(path))
        assert first < 11
        assert store.merge([part]) == {NAME: 11 - first}
        assert store.diff(part) == ()
    check_rows(path, 11)


def test_a_damaged_part_is_not_merged(tmp_path, full):
    flip(folder(full, "q/c.1"))
    with (
        ZarrFeatureStore.create(tmp_path / "merged.zarr", MANIFEST) as store,
        ZarrFeatureStore.open(full) as part,
    ):
        with pytest.raises(CorruptStoreError, match="checksum differs"):
            store.merge([part])
        check_store(full, repair=True)
        assert store.merge([part]) == {NAME: 3}
        assert store.open_table(NAME).pending().tolist() == [4, 5, 6, 7]


def test_stores_are_compared_without_reading_their_rows(tmp_path, full, monkeypatch):
    """By the checksums of their commits: a difference in bytes that have no commit is for verify."""
    copy = str(tmp_path / "copy.zarr")
    shutil.copytree(full, copy)
    with ZarrFeatureStore.open(full) as here, ZarrFeatureStore.open(copy) as there:
        flip(folder(copy, "q/c.1"))
        assert here.diff(there) == ()
        os.unlink(commit_log(copy))
    with (
        ZarrFeatureStore.open(full) as here,
        ZarrFeatureStore.open(copy) as there,
        pytest.raises(CorruptStoreError),
    ):
        here.diff(there)


def _made_anew(path, fingerprint):
    """Drop the table and make it again, as another process would."""
    with ZarrFeatureStore.open(path, "r+") as other:
        other.drop_table(NAME)
        table = other.create_table(NAME, replace(SPEC, fingerprint=fingerprint))
        table.put(range(4, 8), values(range(8, 12)))


def test_no_row_goes_into_and_none_comes_from_another_table_under_the_old_name(path):
    with writing(path) as writer, reading(path) as reader:
        _made_anew(path, {"checkpoint": "another"})
        with pytest.raises(StateError, match="created again for other rows"):
            writer.put(0, values(range(4)))
        for look in (reader.done, lambda: reader.read_chunk(1, "q")):
            with pytest.raises(StateError, match="created again for other rows"):
                look()


def test_a_writer_goes_on_in_a_table_made_anew_for_the_same_rows(path):
    with writing(path) as writer:
        writer.put(range(4), values(range(4)))
        _made_anew(path, SPEC.fingerprint)
        pending = writer.pending()
        assert pending.tolist() == [*range(4), *range(8, 11)]
        writer.put(pending, values(pending))
    with reading(path) as table:
        assert table.complete
        np.testing.assert_array_equal(table.read("q")[pending], values(pending)["q"])


def test_a_commit_is_never_recorded_in_a_log_that_was_moved_away(path):
    with writing(path) as writer:
        writer.put(range(4), values(range(4)))
        (log,) = Path(folder(path, "features", ".commits")).iterdir()
        kept = log.read_bytes()
        log.rename(Path(path) / "moved.log")
        (log.parent / "copy.log").write_bytes(kept)
        writer.put(range(4, 11), values(range(4, 11)))
    check_all(path)
