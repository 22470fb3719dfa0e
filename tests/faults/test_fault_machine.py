"""Puts, commits, kills, reopenings, growth, reads and a second writer in any order, against the store in memory."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
from unittest import mock

import hypothesis.strategies as st
import numpy as np
from fault_cases import MANIFEST, NAME, Case, open_for_writing
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trak_lite.errors import BusyError, MissingStoreError, StateError
from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore
from trak_lite.store._failpoints import FAILPOINTS

CASE = Case(11, 3, 4, "float16")
MOST_ROWS = 22
WRITERS = (0, 1)
ROWS = st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=8, unique=True)


class Killed(BaseException):
    """The process is gone; what the disk holds at this moment is all that is left."""


class StoreMachine(RuleBasedStateMachine):
    """Two writers, a reader and a fate.

    The oracle holds the rows that were acknowledged. A row of a put that was killed may be done or not; if it is, the
    values are those of an attempt that was killed, and the oracle learns them when they can first be read. Every
    attempt has values of its own, so that a mixture of two would show.
    """

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "0.zarr")
        self.case = CASE
        self.memory = MemoryFeatureStore(MANIFEST)
        self.oracle = self.memory.create_table(NAME, self.case.spec)
        self.unsure = {row: set() for row in range(MOST_ROWS)}
        self.attempts = 0
        self.lives = 0
        self.writers = {}
        self.claims = {writer: set() for writer in WRITERS}
        self.seen = np.zeros(self.case.num_rows, bool)
        self.no_syncs = mock.patch.object(os, "fsync", return_value=None)
        self.no_syncs.start()

    def teardown(self):
        self.writers.clear()
        self.no_syncs.stop()
        shutil.rmtree(self.folder)

    @initialize()
    def make(self):
        self.open_writer(0)

    @rule(writer=st.sampled_from(WRITERS))
    def open_writer(self, writer):
        if writer not in self.writers:
            self.writers[writer] = open_for_writing(self.path, self.case)

    @rule(writer=st.sampled_from(WRITERS))
    def close(self, writer):
        if writer in self.writers:
            self.writers.pop(writer)[0].close()
            self.claims[writer].clear()

    @rule(writer=st.sampled_from(WRITERS))
    def die_between_puts(self, writer):
        """Its handles go without a word, as those of a killed process do; the other writer lives on."""
        self.writers.pop(writer, None)
        self.claims[writer].clear()

    @rule(writer=st.sampled_from(WRITERS), rows=ROWS)
    def put(self, writer, rows):
        rows = self.within(rows)
        if writer not in self.writers:
            return
        table, values, chunks = self.begin(writer, rows)
        done = self.done_or_unsure(rows)
        try:
            table.put(rows, values)
        except BusyError:
            assert chunks & self.claims[1 - writer]
        except StateError:
            assert done
            assert table.done()[rows].any()
        else:
            self.learn(rows, values)

    @rule(
        writer=st.sampled_from(WRITERS),
        rows=ROWS,
        step=st.sampled_from(FAILPOINTS),
        count=st.integers(1, 3),
    )
    def be_killed_in_a_put(self, writer, rows, step, count):
        """Everybody dies, and the next writers find what the disk held at that step."""
        rows = self.within(rows)
        if writer not in self.writers:
            return
        table, values, _ = self.begin(writer, rows)
        try:
            with self.killing(f"{step}:{count}"):
                table.put(rows, values)
        except Killed:
            for row in rows:
                if not self.oracle.done()[row]:
                    self.unsure[row].add(self.attempts)
            self.move_on()
        except (BusyError, StateError):
            pass
        else:
            self.learn(rows, values)

    @rule(writer=st.sampled_from(WRITERS), step=st.sampled_from(FAILPOINTS), count=st.integers(1, 3))
    def be_killed_in_recovery(self, writer, step, count):
        if writer in self.writers:
            return
        try:
            with self.killing(f"{step}:{count}"):
                self.writers[writer] = open_for_writing(self.path, self.case)
        except Killed:
            self.move_on()

    @precondition(lambda self: len(self.writers) == 1 and self.case.num_rows < MOST_ROWS)
    @rule(more=st.integers(1, 5))
    def grow(self, more):
        """A writer alone makes the table longer; the rows of its edge stay as they are."""
        size = min(self.case.num_rows + more, MOST_ROWS)
        ((writer, (store, _)),) = self.writers.items()
        self.claims[writer].clear()
        self.writers[writer] = store, store.grow_table(NAME, size)
        self.oracle = self.memory.grow_table(NAME, size)
        self.case = dataclasses.replace(self.case, num_rows=size)
        self.seen = np.append(self.seen, np.zeros(size - len(self.seen), bool))

    @precondition(lambda self: self.writers)
    @rule(rows=ROWS, refused=st.sampled_from(["repeated", "NaN", "beyond"]))
    def put_nonsense(self, rows, refused):
        table, rows = next(iter(self.writers.values()))[1], self.within(rows)
        values = self.case.values(rows)
        if refused == "repeated":
            rows, values = [*rows, rows[0]], self.case.values([*rows, rows[0]])
        elif refused == "NaN":
            values["w"][-1] = np.nan
        else:
            rows = [*rows[:-1], self.case.num_rows]
        before = table.done()
        try:
            table.put(rows, values)
        except ValueError:
            assert (table.done() == before).all()
        else:
            raise AssertionError(f"{refused} rows were accepted")

    @invariant()
    def every_handle_agrees_with_the_oracle(self):
        for table in self.tables():
            done = table.done()
            assert done[self.oracle.done()].all()
            assert done[self.seen].all()
            assert all(self.unsure[row] for row in np.flatnonzero(done & ~self.oracle.done()).tolist())
            self.seen |= done
            committed = table.committed_chunks()
            assert all(done[list(self.case.rows_of(chunk))].all() for chunk in committed)
            for chunk in committed:
                self.compare(table, chunk)

    @invariant()
    def what_is_complete_is_committed_unless_a_writer_has_died(self):
        if any(self.unsure.values()) or not self.writers:
            return
        table = next(iter(self.writers.values()))[1]
        assert table.committed_chunks() == self.oracle.committed_chunks()
        assert table.complete == self.oracle.complete
        if table.complete:
            assert table.content_key() == self.oracle.content_key()

    def within(self, rows):
        """Return these rows, those beyond the table as it is now brought inside."""
        return list(dict.fromkeys(row % self.case.num_rows for row in rows))

    def begin(self, writer, rows):
        self.attempts += 1
        chunks = {self.case.chunk_of(row) for row in rows}
        self.claims[writer] |= chunks
        return self.writers[writer][1], self.case.values(rows, self.attempts), chunks

    def learn(self, rows, values):
        self.oracle.put(rows, values)
        for row in rows:
            self.unsure[row].clear()

    def done_or_unsure(self, rows):
        return any(self.oracle.done()[row] or self.unsure[row] for row in rows)

    @contextlib.contextmanager
    def killing(self, failpoint):
        """Die at a failpoint: keep a copy of the disk as it is then, and let nothing that follows change it."""

        def die(pid, number):
            self.lives += 1
            shutil.copytree(self.path, os.path.join(self.folder, f"{self.lives}.zarr"))
            raise Killed

        with (
            mock.patch.dict(os.environ, {"TRAK_LITE_FAILPOINT": failpoint}),
            mock.patch.object(os, "kill", die),
        ):
            yield

    def move_on(self):
        self.writers.clear()
        for claims in self.claims.values():
            claims.clear()
        self.path = os.path.join(self.folder, f"{self.lives}.zarr")

    def tables(self):
        for _, table in self.writers.values():
            yield table
        try:
            with ZarrFeatureStore.open(self.path) as store:
                yield store.open_table(NAME)
        except MissingStoreError:
            assert not self.oracle.done().any()

    def compare(self, table, chunk):
        """What can be read is what was acknowledged; what nobody knew until now is what one attempt has put."""
        rows = list(self.case.rows_of(chunk))
        found = {name: table.read_chunk(chunk, name) for name in ("features", "q", "w")}
        for place, row in enumerate(rows):
            here = {name: values[place : place + 1] for name, values in found.items()}
            if not self.oracle.done()[row]:
                assert any(same(here, self.case.values([row], attempt)) for attempt in self.unsure[row])
                self.learn([row], here)
        for name, values in found.items():
            np.testing.assert_array_equal(values, self.oracle.read_chunk(chunk, name))


def same(left, right):
    return all(left[name].tobytes() == right[name].tobytes() for name in right)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)
