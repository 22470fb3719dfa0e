"""What another process does between any two steps of a call is as if it came before or after that call."""

import contextlib
import fcntl
import itertools
import os
from unittest import mock

import numpy as np
import pytest
from store_cases import MANIFEST, NAME, SPEC, finish, flip, grow, make, reading, sized, values, writing

from trak_lite.errors import BusyError, InvalidInputError, MissingStoreError, StateError
from trak_lite.store import ZarrFeatureStore, check_store

CALLS = [(os, name) for name in ("open", "pwrite", "rename", "unlink", "mkdir", "rmdir", "listdir")]
CALLS += [(fcntl, "flock")]


class Waits(BaseException):
    """The other process would wait for a lock."""


@contextlib.contextmanager
def before_call(count, act):
    """Do something before the ``count``-th call of the system; yield a list that is empty once that call was made.

    What would wait for a lock comes after all. Folders that are opened on the way to a file are not counted.
    """
    left, late = [count], []
    flock = fcntl.flock

    def never_wait(fd, how):
        try:
            flock(fd, how if how == fcntl.LOCK_UN else how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise error if how & fcntl.LOCK_NB else Waits from error

    def counted(call):
        def calling(*arguments, **keywords):
            if left and not (call is real_open and arguments[1] & os.O_PATH):
                left[0] -= 1
                if left[0] == 0:
                    left.clear()
                    patches.close()
                    with mock.patch.object(fcntl, "flock", never_wait):
                        try:
                            act()
                        except Waits:
                            late.append(act)
            return call(*arguments, **keywords)

        return calling

    real_open = os.open
    with contextlib.ExitStack() as patches:
        for owner, name in CALLS:
            patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield left
    for each in late:
        each()


def for_writing(opened, path):
    return opened.enter_context(ZarrFeatureStore.open(path, "r+"))


def sure(fact):
    assert fact


def a_reader_and_a_commit(path, opened):
    writer = opened.enter_context(writing(path))
    writer.put(0, values([0, 1, 2]))
    reader = opened.enter_context(reading(path))
    return lambda: sure(reader.done()[:3].all()), lambda: writer.put(3, values([3]))


def a_check_and_a_commit(path, opened):
    writer = opened.enter_context(writing(path))
    writer.put(0, values(range(10)))

    def check():
        report = check_store(path)
        assert report.findings == ()
        assert report.tally.done_rows in (10, 11)

    return check, lambda: writer.put(10, values([10]))


def a_reader_and_the_filling_of_the_last_chunk(path, opened):
    """The rows of the old commit are neither in the row log, which is gone, nor in files that match the old record."""
    make(path, range(11))
    grow(path, 12)
    writer, reader = for_writing(opened, path).open_table(NAME), opened.enter_context(reading(path))
    return lambda: sure(reader.done()[:11].all()), lambda: writer.put(11, values([11]))


def an_opening_and_a_growth(path, opened):
    """A writer that knows the old size must leave the rows of the last chunk, which are in a row log, alone."""
    make(path, range(11))
    store = for_writing(opened, path)
    return lambda: sure(store.open_table(NAME).pending().tolist() in ([], [11])), lambda: grow(path, 12)


def two_growths(path, opened):
    """A table that has grown does not become smaller again."""
    make(path, range(11))
    store = for_writing(opened, path)
    store.open_table(NAME)

    def grow_more():
        grow(path, 20)
        opened.callback(lambda: sure(ZarrFeatureStore.open(path).open_table(NAME).spec.num_rows == 20))

    return lambda: store.grow_table(NAME, 15), grow_more


def two_puts(path, opened):
    """A lock on a log that is gone by then is no lock."""
    table, other = (opened.enter_context(writing(path)) for _ in range(2))
    other.put(0, values([0]))
    return lambda: table.put(1, values([1])), lambda: other.put(1, values([1, 2, 3]))


def a_commit_and_an_opening(path, opened):
    """Even where all rows are done and only the last steps are missing: the living writer's chunk is left alone."""
    table = opened.enter_context(writing(path))

    def look():
        with writing(path) as other:
            assert other.done()[:4].sum() in (0, 4)
            assert other.committed_chunks() == table.committed_chunks()

    return lambda: table.put(0, values(range(4))), look


def two_drops(path, opened):
    make(path, range(11))
    store, other = for_writing(opened, path), for_writing(opened, path)
    return lambda: store.drop_table(NAME), lambda: other.drop_table(NAME)


def a_creation_and_a_drop(path, opened):
    store, other = (opened.enter_context(ZarrFeatureStore.create(path, MANIFEST)) for _ in range(2))
    store.create_table(NAME, SPEC)
    return lambda: other.create_table(NAME, SPEC), lambda: store.drop_table(NAME)


def a_first_creation_and_a_drop(path, opened):
    """The folder of a table is there before the list has it."""
    store, other = (opened.enter_context(ZarrFeatureStore.create(path, MANIFEST)) for _ in range(2))
    return lambda: other.create_table(NAME, SPEC), lambda: store.drop_table(NAME)


def a_list_and_a_drop(path, opened):
    _, drop = a_creation_and_a_drop(path, opened)
    other = for_writing(opened, path)
    return other.table_names, drop


def in_a_group(path, opened):
    """A group goes with its last table, unless one is made in it."""
    store, other = (opened.enter_context(ZarrFeatureStore.create(path, MANIFEST)) for _ in range(2))
    store.create_table("targets/a/x", SPEC)
    return lambda: other.create_table("targets/a/y", SPEC), lambda: store.drop_table("targets/a/x")


def the_end_of_a_group_and_a_creation(path, opened):
    create, drop = in_a_group(path, opened)
    return drop, create


PAIRS = {
    a_reader_and_a_commit: (),
    a_check_and_a_commit: (),
    a_reader_and_the_filling_of_the_last_chunk: (),
    an_opening_and_a_growth: (),
    two_growths: (BusyError, InvalidInputError),
    two_puts: (BusyError, StateError),
    a_commit_and_an_opening: (),
    two_drops: (BusyError, MissingStoreError),
    a_creation_and_a_drop: (MissingStoreError,),
    a_first_creation_and_a_drop: (MissingStoreError,),
    a_list_and_a_drop: (),
    in_a_group: (),
    the_end_of_a_group_and_a_creation: (),
}


KEEPS = list(PAIRS)[:7]
"""Pairs after which the table is there."""


@pytest.mark.parametrize("start", range(1, 9))
@pytest.mark.parametrize("pair", PAIRS)
def test_a_call_may_come_between_any_two_steps_of_another(tmp_path, pair, start):
    """One of the two may be refused by name; no row is lost, and the store is sound."""
    for count in itertools.count(start, 8):
        path = str(tmp_path / f"{count}.zarr")
        with contextlib.ExitStack() as opened:
            first, second = pair(path, opened)

            def refusable(act):
                with contextlib.suppress(*PAIRS[pair]):
                    act()

            with before_call(count, lambda second=second: refusable(second)) as left:
                refusable(first)
        if left:
            assert count > 1
            return
        with ZarrFeatureStore.open(path) as store:
            names = store.table_names()
            size = store.open_table(NAME).spec.num_rows if NAME in names else 11
        assert names == ["targets/a/y"] if "group" in pair.__name__ else set(names) <= {NAME}
        assert (NAME in names) == (pair in KEEPS) or "creation_and" in pair.__name__
        finish(path, sized(size))
        assert check_store(path).findings == ()


def test_an_entry_that_is_stored_again_during_a_repair_stays(tmp_path):
    for count in itertools.count(1):
        path = str(tmp_path / f"{count}.zarr")
        with ZarrFeatureStore.create(path, MANIFEST) as store:
            store.put_entry("verdicts/a", "key", np.zeros(3))
            flip(f"{path}/.entries/verdicts%a.safetensors", -1)
            with before_call(count, lambda: store.put_entry("verdicts/a", "key", np.arange(3.0))) as left:
                check_store(path, repair=True)
            if left:
                assert count > 1
                return
            np.testing.assert_array_equal(store.entry("verdicts/a", "key"), np.arange(3.0))
        assert check_store(path).findings == ()
