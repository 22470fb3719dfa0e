"""Tables that grow, are dropped or made anew, and stores that are merged, beside readers and writers from before."""

import errno
import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import store_cases as cases
from store_cases import MANIFEST, NAME, SPEC, done_rows, flip, folder, grow, raises, reading, values, writing

from trak_lite.errors import BusyError, CorruptStoreError, IncompleteStoreError, StateError, StoreError
from trak_lite.store import ZarrFeatureStore, check_store

MORE = pytest.mark.parametrize("more", [1, 3, 4, 5])
"""Rows by which the table of 11 rows in chunks of 4 grows: within its last chunk, to its end and over it."""


@pytest.fixture
def nine(path):
    """A finished table of nine rows: the last chunk has one."""
    cases.make(path, range(9), cases.sized(9))
    return path


def finish(path, num_rows):
    """Put what is pending, row by row, and check that all is right and sound."""
    with ZarrFeatureStore.open(path, "r+") as store:
        cases.put_pending(store.open_table(NAME), 1)
    cases.check_all(path, cases.sized(num_rows))
    report = check_store(path)
    assert (report.findings, report.tally.pending_rows) == ((), 0)


@pytest.mark.parametrize("had", [9, 11])
@MORE
def test_only_the_new_rows_are_pending_and_a_reader_from_before_sees_what_it_saw(path, had, more):
    """Also while the last chunk is filled, whose rows are done as they were."""
    cases.make(path, range(had), cases.sized(had))
    before = cases.content(folder(path, "features/c.1.0"))
    with reading(path) as table:
        held = table.read_chunk(2, "features")
        grow(path, had + more)
        assert cases.done_rows(path) == list(range(had))
        assert cases.content(folder(path, "features/c.1.0")) == before
        assert check_store(path).findings == ()
        with ZarrFeatureStore.open(path, "r+") as store:
            writer = store.open_table(NAME)
            raises(StateError, r"8 .* are done already", writer.put, 8, values([8]))
            for row in range(had, had + more):
                writer.put(row, values([row]))
                cases.check_rows(table)
                assert table.done().tolist() == [True] * had
        finish(path, had + more)
        assert table.committed_chunks() == [0, 1, 2]
        np.testing.assert_array_equal(held, values(range(8, had))["features"])


def test_files_that_are_being_replaced_are_no_damage_to_a_reader_from_before(full):
    """It knows the checksums of the old ones."""
    with reading(full) as reader:
        cases.check_rows(reader)
        grow(full, 12)

        def look():
            raises(IncompleteStoreError, r"Rows 8 to 10 \(chunk 2\)", reader.read_chunk, 2, "features")

        with ZarrFeatureStore.open(full, "r+") as store, cases.dying("column_published:1", look):
            raises(cases.Killed, None, store.open_table(NAME).put, 11, values([11]))
    finish(full, 12)


def test_the_rows_of_the_last_commit_are_logged_and_synced_before_the_table_grows(full, steps):
    grow(full, 13)
    assert steps[:2] == [("sync", cases.row_log(full, 2)), ("sync", folder(full, "features/.stage"))]
    assert folder(full, "zarr.json") in [step[-1] for step in steps[2:]]


@pytest.mark.parametrize(("row", "lost"), [(0, 8), (1, 9)])
def test_damage_to_a_chunk_that_is_filled_up_costs_the_rows_of_one_record(nine, row, lost):
    """The rows of the old commit have one record together, each new put has its own."""
    grow(nine, 13)
    with ZarrFeatureStore.open(nine, "r+") as store:
        store.open_table(NAME).put(9, values([9]))
        store.open_table(NAME).put(10, values([10]))
    cases.flip_row(nine, 2, "q", put=row)
    left = [each for each in range(11) if each != lost]
    assert done_rows(nine) == left
    assert check_store(nine, repair=True).ok
    assert done_rows(nine) == left
    finish(nine, 13)


def test_damage_to_the_last_chunk_is_never_read_by_a_growth(full):
    """Nor is a byte of it that changes afterwards: the rows are in the log."""
    shutil.copytree(full, f"{full}-copy")
    flip(folder(full, "q/c.2"))
    raises(CorruptStoreError, "checksum differs", grow, full, 13)
    assert check_store(full, repair=True).ok
    grow(full, 13)
    assert done_rows(full) == list(range(8))
    finish(full, 13)
    grow(f"{full}-copy", 13)
    flip(folder(f"{full}-copy", "q/c.2"))
    assert done_rows(f"{full}-copy") == list(range(11))
    finish(f"{full}-copy", 13)


def test_a_chunk_that_the_size_on_the_disk_does_not_explain_is_refused(full):
    """More chunks, or more rows in the last one, are a growing table only where its zarr.json says so."""
    cases.overwrite(folder(full, "q/c.3"), bytes(16))
    with pytest.raises(CorruptStoreError, match="chunks 3, but its 11 rows make 3 chunks"), reading(full):
        pass
    os.unlink(folder(full, "q/c.3"))
    grow(full, 12)
    finish(full, 12)

    cases.say_sizes(full, num_rows=11)
    with pytest.raises(CorruptStoreError, match=r"recorded .* for 4 rows"), reading(full):
        pass
    assert not check_store(full).ok


def test_a_writer_from_before_does_not_pad_over_new_rows(path):
    """It would commit the last chunk as it knows it, with padding where rows are now."""
    cases.make(path, range(10))
    old_store, old = cases.open_for_writing(path)
    with ZarrFeatureStore.open(path, "r+") as store:
        store.grow_table(NAME, 12).put(11, values([11]))
    for use in (lambda: old.put(10, values([10])), lambda: old.claim(2).__enter__()):
        raises(StateError, "has grown", use)
    old_store.close()
    assert done_rows(path) == [*range(10), 11]
    finish(path, 12)


def test_a_table_does_not_grow_while_its_last_chunk_is_being_filled(path):
    store, table = cases.open_for_writing(path)
    table.put(9, values([9]))
    with ZarrFeatureStore.open(path, "r+") as other:
        raises(BusyError, r"rows 8 to 10 \(chunk 2\)", other.grow_table, NAME, 12)
    assert store.grow_table(NAME, 12).pending().tolist() == [*range(9), 10, 11]
    store.close()


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "rename"])
def test_any_call_of_a_growth_may_fail(tmp_path, call):
    for count in itertools.count(1, 3 if call == "open" else 1):  # of many, every third
        path = str(tmp_path / f"{count}.zarr")
        cases.make(path, range(11))
        with ZarrFeatureStore.open(path, "r+") as store:
            store.open_table(NAME)
            try:
                with cases.failing_call(call, count, OSError(errno.EIO, "broken")) as left:
                    store.grow_table(NAME, 14)
            except StoreError:
                assert not left
            assert store.grow_table(NAME, 14).pending().tolist() == [11, 12, 13]
        assert check_store(path).findings == ()
        if left:
            break
    assert count >= 2


# Dropping.


def test_a_table_that_another_writer_fills_is_not_dropped(path):
    store, table = cases.open_for_writing(path)
    table.put(0, values([0]))
    with ZarrFeatureStore.open(path, "r+") as other:
        raises(BusyError, rf"{NAME}: another writer \(pid {os.getpid()} on", other.drop_table, NAME)
    assert done_rows(path) == [0]
    store.drop_table(NAME)
    assert store.table_names() == []
    store.close()


def test_a_reader_and_a_writer_of_a_dropped_table_are_told(full):
    for name in ("features/c.2.0", "q/c.2", "w/c.2"):
        os.unlink(folder(full, name))
    with ZarrFeatureStore.open(full, "r+") as store, reading(full) as reader:
        table, rows = store.open_table(NAME), reader.read_chunk(0, "q")
        assert table.pending().tolist() == [8, 9, 10]
        with ZarrFeatureStore.open(full, "r+") as other:
            other.drop_table(NAME)
        np.testing.assert_array_equal(rows, values(range(4))["q"])
        raises(IncompleteStoreError, "was removed", reader.read_chunk, 1, "q")
        raises(StoreError, "No such file", table.put, 8, values([8]))


def made_anew(path, fingerprint):
    with ZarrFeatureStore.open(path, "r+") as other:
        other.drop_table(NAME)
        table = other.create_table(NAME, replace(SPEC, fingerprint=fingerprint))
        table.put(range(4, 8), values(range(8, 12)))


def test_no_row_goes_into_and_none_comes_from_another_table_under_the_old_name(path):
    with writing(path) as writer, reading(path) as reader:
        made_anew(path, {"checkpoint": "another"})
        for use in (lambda: writer.put(0, values(range(4))), reader.done, lambda: reader.read_chunk(1, "q")):
            raises(StateError, "created again for other rows", use)


def test_a_writer_goes_on_in_a_table_made_anew_for_the_same_rows(path):
    with writing(path) as writer:
        writer.put(range(4), values(range(4)))
        made_anew(path, SPEC.fingerprint)
        pending = writer.pending()
        assert pending.tolist() == [*range(4), *range(8, 11)]
        writer.put(pending, values(pending))
    with reading(path) as table:
        assert table.complete
        np.testing.assert_array_equal(table.read("q")[pending], values(pending)["q"])


def test_a_commit_is_never_recorded_in_a_log_that_was_moved_away(path):
    with writing(path) as writer:
        writer.put(range(4), values(range(4)))
        log = Path(cases.commit_log(path))
        kept = log.read_bytes()
        log.rename(Path(path) / "moved.log")
        (log.parent / "copy.log").write_bytes(kept)
        writer.put(range(4, 11), values(range(4, 11)))
    cases.check_all(path)


# Merging.


def test_a_damaged_part_is_not_merged_and_stores_are_compared_without_reading_their_rows(tmp_path, full):
    """By the checksums of their commits: a difference in bytes that have no commit is for a check."""
    copy = str(tmp_path / "copy.zarr")
    shutil.copytree(full, copy)
    flip(folder(full, "q/c.1"))
    with ZarrFeatureStore.open(full) as part, ZarrFeatureStore.open(copy) as other:
        assert other.diff(part) == ()
        with ZarrFeatureStore.create(tmp_path / "merged.zarr", MANIFEST) as store:
            raises(CorruptStoreError, "checksum differs", store.merge, [part])
            check_store(full, repair=True)
            assert store.merge([part]) == {NAME: 3}
            assert store.open_table(NAME).pending().tolist() == [4, 5, 6, 7]
    os.unlink(cases.commit_log(copy))
    with ZarrFeatureStore.open(full) as here, ZarrFeatureStore.open(copy) as there:
        raises(CorruptStoreError, None, here.diff, there)
