"""The tools that imitate faults do what they say, and see what they are there to see."""

import copy
import os
import random

import pytest
from fault_power import EXTREMES, SECTOR, Cut, Recorder, Synced, plant, tree
from fault_rounds import check_reader
from store_cases import raises, values, writing

NOTHING = EXTREMES[0]


def record(root, changes):
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


def synced(root):
    write(f"{root}/x", b"kept", sync=True)


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
A, B, X, Y = ("a", None), ("b", None), (("x", b"1"),), (("y", b"1"),)
MOVED = {(A, ("a/x", b"kept"), B), (A, B, ("b/y", b"kept"))}


@pytest.mark.parametrize(
    ("changes", "journal", "expected"),
    [
        (lambda root: write(f"{root}/x", DATA), False, {(), *((("x", content),) for content in TORN)}),
        (synced, False, {(), (("x", b"kept"),)}),
        (lambda root: (synced(root), sync_folder(root)), False, {(("x", b"kept"),)}),
        (renamed_and_removed, False, {(), X, Y}),  # each change needs the earlier ones
        *((moved, journal, MOVED) for journal in (False, True)),  # whole or not at all
        (two_folders, False, {(), (A,), (B,), (A, B)}),  # without a journal names survive in any order
        (two_folders, True, {(), (A,), (A, B)}),
    ],
)
def test_what_a_cut_leaves(tmp_path, changes, journal, expected):
    assert states(record(tmp_path / "disk", changes), journal) == expected


def test_what_was_there_at_the_start_is_kept(tmp_path):
    plant({"a": None, "a/b": None, "a/x": b"old", "y": b""}, tmp_path / "disk")
    start = {"a": None, "a/b": None, "a/x": b"old", "y": b""}
    assert tree(tmp_path / "disk") == start
    with Recorder(tmp_path / "disk") as recorder:
        write(str(tmp_path / "disk" / "a" / "x"), b"new")
    assert states(recorder.disk()) == {tuple(sorted((start | {"a/x": x}).items())) for x in (b"old", b"new")}


@pytest.mark.quick
def test_a_change_that_is_not_recorded_is_an_error(tmp_path):
    def changes(root):
        write(f"{root}/x", b"seen")
        with open(f"{root}/x", "wb") as file:
            file.write(b"unseen")

    raises(AssertionError, "teach Recorder", record, tmp_path / "disk", changes)


def test_power_cuts_show_a_store_that_does_not_sync(tmp_path):
    """The same run without one of its kinds of sync loses rows, or cannot be opened, after some cut."""

    def changes(root):
        with writing(f"{root}/run.zarr") as table:
            table.put(0, values(range(11)))

    disk = record(tmp_path / "disk", changes)
    unsynced = copy.copy(disk)
    unsynced.steps = [step for step in disk.steps if not isinstance(step, Synced)]
    unsynced.moments = range(len(unsynced.steps) + 1)
    plant(disk.after(disk.moments[-1], NOTHING, random.Random(0)), tmp_path / "0")
    check_reader(str(tmp_path / "0" / "run.zarr"), range(11))
    plant(unsynced.after(unsynced.moments[-1], NOTHING, random.Random(0)), tmp_path / "1")
    raises(AssertionError, "the table is gone", check_reader, str(tmp_path / "1" / "run.zarr"), range(11))


def test_a_wrong_row_and_a_lost_row_are_seen(tmp_path):
    with writing(tmp_path / "run.zarr") as table:
        wrong = values(range(4))
        wrong["q"][1] += 1
        table.put(0, wrong)
    with pytest.raises(AssertionError, match=r"acknowledged rows \[5\] are pending"):
        check_reader(tmp_path / "run.zarr", {0, 5})
    raises(AssertionError, "Mismatched elements: 1 / 4", check_reader, tmp_path / "run.zarr", {0})
