"""The tools that imitate faults do what they say, and see what they are there to see."""

import copy
import os
import random

import pytest
from fault_cases import Case, Violated, check_as_reader, check_rows, fill, open_for_writing
from fault_power import EXTREMES, SECTOR, Cut, Recorder, Synced, plant, tree

NOTHING, ALL = Cut(0.0, 0.0, journal=False), Cut(1.0, 1.0, journal=False)
CASE = Case(5, 2, 2, "float32")


def record(root, changes):
    """Return the disk that saw the changes made in a new folder."""
    os.mkdir(root)
    with Recorder(root) as recorder:
        changes(str(root))
    return recorder.disk()


def states(disk, journal=False):
    """Return every tree that cuts before the end leave, as a set of what is in it."""
    pick = random.Random(0)
    cuts = [Cut(pick.random(), pick.random(), journal) for _ in range(300)]
    found = (disk.after(disk.moments[-1], cut, pick) for cut in (*EXTREMES, *cuts))
    return {tuple(sorted(state.items())) for state in found}


def write(path, data, *, sync=False, offset=0):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(fd, data, offset)
    if sync:
        os.fsync(fd)
    os.close(fd)


def sync_folder(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def unsynced(root):
    write(f"{root}/x", DATA)


def synced(root):
    write(f"{root}/x", b"kept", sync=True)


def synced_with_its_name(root):
    synced(root)
    sync_folder(root)


def renamed_and_removed(root):
    write(f"{root}/x", b"1", sync=True)
    os.rename(f"{root}/x", f"{root}/y")
    os.unlink(f"{root}/y")


def two_folders(root):
    os.mkdir(f"{root}/a")
    os.mkdir(f"{root}/b")


def moved(root):
    two_folders(root)
    write(f"{root}/a/x", b"kept", sync=True)
    for folder in (f"{root}/a", root):
        sync_folder(folder)
    os.rename(f"{root}/a/x", f"{root}/b/y")


DATA, ZEROS = b"a" * SECTOR + b"b", bytes(SECTOR)
TORN = {b"", ZEROS + b"\0", b"a" * SECTOR, b"a" * SECTOR + b"\0", ZEROS + b"b", DATA}
A, B = ("a", None), ("b", None)
MOVED = {(A, ("a/x", b"kept"), B), (A, B, ("b/y", b"kept"))}


@pytest.mark.parametrize(
    ("changes", "journal", "expected"),
    [
        (unsynced, False, {(), *((("x", content),) for content in TORN)}),
        (synced, False, {(), (("x", b"kept"),)}),
        (synced_with_its_name, False, {(("x", b"kept"),)}),
        (
            renamed_and_removed,
            False,
            {(), (("x", b"1"),), (("y", b"1"),)},
        ),  # each change needs the earlier ones
        *((moved, journal, MOVED) for journal in (False, True)),  # whole or not at all
        (two_folders, False, {(), (A,), (B,), (A, B)}),  # without a journal names survive in any order
        (two_folders, True, {(), (A,), (A, B)}),
    ],
)
def test_what_a_cut_leaves(tmp_path, changes, journal, expected):
    assert states(record(tmp_path / "disk", changes), journal) == expected


def test_what_was_there_at_the_start_is_kept(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "old").write_bytes(b"old")
    with Recorder(tmp_path / "disk") as recorder:
        write(str(tmp_path / "disk" / "old"), b"new")
    assert states(recorder.disk()) == {(("old", b"old"),), (("old", b"new"),)}


def test_a_file_written_behind_the_recorder_is_found_when_it_is_synced(tmp_path):
    def changes(root):
        with open(f"{root}/x", "wb") as file:
            file.write(b"found")
        sync_folder(root)

    assert (("x", b"found"),) in states(record(tmp_path / "disk", changes))


@pytest.mark.quick
def test_a_change_that_is_not_recorded_is_an_error(tmp_path):
    def changes(root):
        write(f"{root}/x", b"seen")
        with open(f"{root}/x", "wb") as file:
            file.write(b"unseen")

    with pytest.raises(AssertionError, match="teach Recorder"):
        record(tmp_path / "disk", changes)


def test_a_tree_is_planted_as_it_was(tmp_path):
    found = {"a": None, "a/b": None, "a/x": b"1", "y": b""}
    plant(found, tmp_path / "there")
    assert tree(tmp_path / "there") == found


def test_power_cuts_show_a_store_that_does_not_sync(tmp_path):
    """The same run without one of its kinds of sync loses rows, or cannot be opened, after some cut."""

    def changes(root):
        store, table = open_for_writing(f"{root}/run.zarr", CASE)
        fill(table, CASE, random.Random(0), lambda rows: None)
        store.close()

    disk = record(tmp_path / "disk", changes)
    unsynced = copy.copy(disk)
    unsynced.steps = [step for step in disk.steps if not isinstance(step, Synced)]
    unsynced.moments = range(len(unsynced.steps) + 1)
    pick, seen = random.Random(0), []
    for honest, number in ((disk, 0), (unsynced, 1)):
        plant(honest.after(honest.moments[-1], NOTHING, pick), tmp_path / f"{number}")
        try:
            check_as_reader(str(tmp_path / f"{number}" / "run.zarr"), CASE, range(5), made=True)
        except Violated:
            seen.append(number)
    assert seen == [1]


def test_a_wrong_row_and_a_lost_row_are_seen(tmp_path):
    store, table = open_for_writing(str(tmp_path / "run.zarr"), CASE)
    wrong = CASE.values([0, 1])
    wrong["q"][1] += 1
    table.put(0, wrong)
    with pytest.raises(Violated, match="1 rows of chunk 0 are wrong in q") as caught:
        check_rows(table, CASE)
    assert caught.value.counts["wrong"] == 1
    store.close()
    with pytest.raises(Violated, match=r"acknowledged rows \[2\] are pending") as caught:
        check_as_reader(str(tmp_path / "run.zarr"), CASE, {0, 2})
    assert caught.value.counts["lost"] == 1
