"""One state machine for stores of every kind: whatever happens to it, a store holds what a plain dict says.

``TRAK_LITE_HISTORIES=10000 pytest -m campaign`` draws on.
"""

import contextlib
import dataclasses
import errno
import gc
import itertools
import os
import random
import resource
import shutil
import signal
import tempfile
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import store_cases as cases
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis.stateful import initialize, invariant, precondition, rule
from store_cases import MANIFEST, NAME, SPEC, UNFIT, WAYS, Folder, Killed, Memory, Objects, raises, values

from trak_lite import errors
from trak_lite.errors import BusyError, MissingStoreError, StateError, StoreError, StoreFullError
from trak_lite.store import Column, MemoryFeatureStore, TableSpec, ZarrFeatureStore

OTHER = "targets/test/ckpt-1"
MOST_ROWS = 22
SECONDS = 20
EXAMPLES = int(os.environ.get("TRAK_LITE_HISTORIES", "60"))
WRITERS = st.sampled_from((0, 1))
ROWS = st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=8, unique=True)
COUNTS = st.integers(1, 3)
PICKS = st.integers(0, 2**64 - 1).map(random.Random)
"""Hypothesis must not see what is drawn from files, whose lengths change with clocks and process numbers."""


class StoreMachine(stateful.RuleBasedStateMachine):
    """Two writers, a reader and a fate. ``known`` is the dict: row -> the attempt whose values were acknowledged."""

    def __init__(self, kind):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.numbers = itertools.count()
        self.place = self.new_place(kind)
        self.known, self.size, self.attempt = {}, SPEC.num_rows, 0
        self.entries, self.refused = {}, {}
        self.writers, self.held = {}, {0: set(), 1: set()}
        self.interrupted = False
        self.no_syncs = mock.patch.object(os, "fsync", return_value=None)
        self.no_syncs.start()

    def new_root(self):
        return os.path.join(self.folder, str(next(self.numbers)))

    def new_place(self, kind):
        os.mkdir(root := self.new_root())
        return kind(root)

    def copy_of_the_place(self):
        return self.place.copied(self.new_root())

    def teardown(self):
        self.close_all()
        self.no_syncs.stop()
        shutil.rmtree(self.folder)

    @initialize()
    def make(self):
        self.make_other()
        self.open_writer(0)

    def make_other(self):
        """A second table, complete, with other values: what is exchanged with it must not be taken for its rows."""
        with self.place.create() as store:
            store.create_table(OTHER, SPEC).put(0, values(range(SPEC.num_rows), attempt=9))
            store.cache("gram", "key", np.eye(2))

    # Handles.

    @rule(writer=WRITERS)
    def open_writer(self, writer):
        if writer in self.writers:
            return
        store = self.place.create()
        spec = dataclasses.replace(SPEC, num_rows=self.size)
        table = store.create_table(NAME, spec)
        self.writers[writer] = store, table
        proven = set(np.flatnonzero(table.done()).tolist()) & self.refused.keys() - self.known.keys()
        self.known |= {row: self.refused[row] for row in proven}
        self.interrupted = self.interrupted and len(self.writers) > 1

    @rule(writer=WRITERS)
    def close(self, writer):
        if writer in self.writers:
            self.writers.pop(writer)[0].close()
            self.held[writer].clear()

    def close_all(self):
        for writer in tuple(self.writers):
            self.close(writer)

    @precondition(lambda self: self.place.steps)
    @rule(writer=WRITERS)
    def die_between_puts(self, writer):
        """Its handles go without a word, as those of a killed process do; the other writer lives on."""
        self.writers.pop(writer, None)
        self.held[writer].clear()
        gc.collect()

    # Rows.

    @rule(writer=WRITERS, rows=ROWS)
    def put(self, writer, rows):
        if writer not in self.writers:
            return
        rows = self.within(rows)
        refused = any(row in self.known for row in rows)
        try:
            self.begin(writer, rows)
        except BusyError:
            assert {row // SPEC.chunk_rows for row in rows} & self.held[1 - writer]
        except StateError:
            assert refused
        else:
            assert not refused
            self.known.update(dict.fromkeys(rows, self.attempt))

    @rule(writer=WRITERS, chunk=st.integers(0, 5), count=st.integers(0, 4))
    def claim(self, writer, chunk, count):
        """Claim a chunk and put some of its pending rows; the other writer gets none of it meanwhile."""
        chunk %= -(-self.size // SPEC.chunk_rows)
        if writer not in self.writers:
            return
        table = self.writers[writer][1]
        try:
            with table.claim(chunk) as pending:
                rows = range(*table.chunk_range(chunk))
                assert pending.tolist() == [row for row in rows if row not in self.known]
                if 1 - writer in self.writers and len(pending):
                    raises(BusyError, None, self.writers[1 - writer][1].put, pending, values(pending))
                    self.held[1 - writer].add(chunk)
                if put := pending[:count].tolist():
                    self.begin(writer, put)
                    self.known.update(dict.fromkeys(put, self.attempt))
        except BusyError:
            assert chunk in self.held[1 - writer]
        else:
            self.held[writer].discard(chunk)
            self.held[1 - writer].discard(chunk)

    @precondition(lambda self: self.writers)
    @rule(rows=ROWS, refused=st.sampled_from(["repeated", "NaN", "beyond"]))
    def put_nonsense(self, rows, refused):
        table, rows = next(iter(self.writers.values()))[1], self.within(rows)
        rows = {"repeated": [*rows, rows[0]], "beyond": [*rows[:-1], self.size]}.get(refused, rows)
        given = values(rows)
        if refused == "NaN":
            given["w"][-1] = np.nan
        raises(ValueError, r".", table.put, rows, given)

    @precondition(lambda self: len(self.writers) == 1 and self.size < MOST_ROWS)
    @rule(more=st.integers(1, 5))
    def grow(self, more):
        ((writer, (store, _)),) = self.writers.items()
        size = min(self.size + more, MOST_ROWS)
        if not self.place.grows:
            raises(errors.UnsupportedStoreError, None, store.grow_table, NAME, size)
            return
        self.writers[writer] = store, store.grow_table(NAME, size)
        self.held[writer].clear()
        self.size = size

    @precondition(lambda self: len(self.writers) == 1)
    @rule()
    def drop_and_make_anew(self):
        ((writer, (store, old)),) = self.writers.items()
        store.drop_table(NAME)
        assert store.table_names() == [OTHER]
        self.known, self.size, self.refused = {}, SPEC.num_rows, {}
        self.held[writer].clear()
        self.writers[writer] = store, store.create_table(NAME, SPEC)
        raises(StateError, None, old.put, 0, values([0]))

    @precondition(lambda self: self.writers)
    @rule()
    def copy(self):
        """Merge what is done into a new store, and go on there."""
        self.close_all()
        new = self.new_place(type(self.place))
        with self.place.read() as old, new.create() as store:
            assert store.merge([old]) == {NAME: len(self.known), OTHER: SPEC.num_rows}
            assert store.diff(old) == ()
        self.place, self.entries, self.refused = new, {}, {}

    @precondition(lambda self: self.writers)
    @rule(name=st.sampled_from(["a", "b/c"]), drop=st.booleans())
    def put_entry(self, name, drop):
        store = next(iter(self.writers.values()))[0]
        self.attempt += 1
        if drop:
            store.drop_entry(name)
            self.entries.pop(name, None)
        else:
            store.put_entry(name, "key", np.array([self.attempt]))
            self.entries[name] = self.attempt

    # Faults.

    @precondition(lambda self: self.place.steps and self.writers)
    @rule(data=st.data(), rows=ROWS, count=COUNTS)
    def be_killed(self, data, rows, count):
        """Everybody dies at one step of one call, and those who come next find what the disk held then."""
        step = data.draw(st.sampled_from(self.place.steps))
        calls = {"put": self.put, "entry": self.put_entry, "open": self.reopen}
        if len(self.writers) == 1:
            calls |= {"drop": self.drop_and_make_anew} | ({"grow": self.grow} if self.place.grows else {})
        if self.size == MOST_ROWS:
            calls.pop("grow", None)
        name = data.draw(st.sampled_from(sorted(calls)))
        given = {"put": (next(iter(self.writers)), rows), "entry": ("a", False), "grow": (3,)}.get(name, ())
        rows, before, size, attempt = self.within(rows), dict(self.known), self.size, self.attempt
        lives = []
        try:
            with cases.dying(f"{step}:{count}", lambda: lives.append(self.copy_of_the_place())):
                calls[name](*given)
        except Killed:
            self.close_all()
            (self.place,) = lives
            self.interrupted = True
            self.settle(name, rows, before, {size, min(size + 3, MOST_ROWS), SPEC.num_rows}, attempt)

    def reopen(self):
        self.close_all()
        self.open_writer(0)

    def settle(self, name, rows, before, sizes, attempt):
        """Learn which of the two states that a killed call may leave was left: never one between them."""
        with self.place.read() as store:
            if name == "entry":
                found = store.entry("a", "key")
                assert found is None or found.tolist() in ([self.entries.get("a")], [attempt + 1])
                self.entries.pop("a", None)
                if found is not None:
                    self.entries["a"] = int(found[0])
            if NAME not in store.table_names():
                assert name in ("drop", "open")
                self.known, self.size = {}, SPEC.num_rows
                return
            table = store.open_table(NAME)
            assert table.spec.num_rows in (sizes if name in ("grow", "drop") else {self.size})
            self.size = table.spec.num_rows
            done = set(np.flatnonzero(table.done()).tolist())
        self.known = {} if name == "drop" and not done else before
        if name == "put":
            self.known |= {row: self.attempt for row in rows if row in done and row not in before}

    @precondition(lambda self: self.writers and self.place.steps)
    @rule(
        rows=ROWS,
        call=st.sampled_from(["open", "pwrite", "posix_fallocate", "fsync", "rename"]),
        count=st.integers(1, 12),
        code=st.sampled_from([errno.ENOSPC, errno.EIO]),
    )
    def fill_or_break_the_disk(self, rows, call, count, code):
        """The same process goes on; of the refused batch, the rows of a chunk are all done or all pending.

        Those that are pending may be done once a writer opens the table: if a commit record proves them.
        """
        writer, (_, table) = next(iter(self.writers.items()))
        rows, before = self.within(rows), dict(self.known)
        try:
            with cases.failing_call(call, count, OSError(code, "broken")):
                self.put(writer, rows)
        except StoreError as error:
            named = isinstance(error, StoreFullError)
            done = set(np.flatnonzero(table.done()).tolist())
            new = [row for row in rows if row in done and row not in before]
            self.known = before | dict.fromkeys(new, self.attempt)
            self.refused |= dict.fromkeys(set(rows) - set(self.known), self.attempt)
            for row in set(rows) - set(new) - set(before):
                assert row // SPEC.chunk_rows not in {each // SPEC.chunk_rows for each in new}
            self.interrupted = True
            if named != (code == errno.ENOSPC):
                raise AssertionError("an error of another name") from error

    @precondition(lambda self: self.writers and self.place.bucket)
    @rule(rows=ROWS, count=st.integers(1, 9), moment=st.sampled_from(["before", "after"]))
    def lose_the_line(self, rows, count, moment):
        """A request fails, or its answer is lost; rows that were staged stay done, and the next run goes on."""
        left = [count]

        def fail(request, key):
            left[0] -= 1
            if left[0] == 0:
                raise StoreError("the line is dead")

        rows, before, writer = self.within(rows), dict(self.known), next(iter(self.writers))
        setattr(self.place.bucket, moment, fail)
        try:
            self.put(writer, rows)
        except StoreError:
            left.clear()
        setattr(self.place.bucket, moment, lambda request, key: None)
        if not left:
            self.interrupted = True
            self.settle("put", rows, before, {self.size}, self.attempt)

    @precondition(lambda self: self.place.files)
    @rule(data=st.data(), pick=PICKS)
    def harm(self, data, pick):
        """One to three things done to any files: right rows or a named error, in little memory, also for a next run.

        It is done to a copy. Where sizes are lies, no row is compared.
        """
        ways = data.draw(st.lists(st.sampled_from(self.place.ways), min_size=1, max_size=3))
        self.close_all()
        kept, sizes = (self.place, self.known), "lie" not in ways
        self.place = self.copy_of_the_place()
        for way in ways:
            with contextlib.suppress(*UNFIT):
                WAYS[way](self.place.files, pick)
        with bounded():
            self.judge(ways, compared=sizes)
            if sizes:
                self.known = self.filled()
                if not self.goes_on() and self.place.repairs:
                    if self.checked(repair=True) is not None:
                        assert self.place.check(repair=True).set_aside == ()
                    self.look()  # any row may have been put before the run was refused
                    self.goes_on()
        self.place, self.known = kept

    def filled(self):
        """Return the dict once every pending row is put; those of a refused batch with the values they had then."""
        return {row: self.known.get(row, self.refused.get(row, 8)) for row in range(self.size)}

    def goes_on(self):
        """Put what is pending, and compare every row; return whether the store allows it."""
        try:
            with self.place.create() as store:
                table = store.create_table(NAME, dataclasses.replace(SPEC, num_rows=self.size))
                if len(pending := table.pending()):
                    table.put(pending, self.expected(pending.tolist(), self.known))
            with self.place.read() as store:
                table = store.open_table(NAME)
                for chunk in range(table.num_chunks):
                    self.compare(table, chunk, self.known)
                return table.complete
        except StoreError:
            return False

    def judge(self, what, *, compared=True):
        """Hold what a reader is told against the dict, and what a check says against that."""
        refusals = self.look(compared=compared)
        report = self.checked()
        assert report is None or str(report)
        assert all("run.zarr" in str(error) for error in refusals if self.place.repairs)
        # What is sound, and too large for this machine, is no damage.
        if any("bytes of memory" not in str(error) for error in refusals):
            assert report is None or not report.ok, (what, refusals)

    def checked(self, *, repair=False):
        """Return the report, or nothing if the store is too damaged for one."""
        try:
            return self.place.check(repair=repair)
        except StoreError:
            return None

    def look(self, *, compared=True):
        """Return the errors by which a reader is refused; all that it gets is right."""
        refusals = []
        try:
            with self.place.read() as store:
                cached = store.cached("gram", "key")
                assert cached is None or (cached == np.eye(2)).all()
                names = store.table_names()
                table = store.open_table(NAME) if NAME in names or self.known else None
                for each, known in ((table, self.known), (store.open_table(OTHER), None)):
                    if each and compared:
                        size = SPEC.num_rows if known is None else self.size
                        assert (each.spec.num_rows, each.spec.chunk_rows) == (size, SPEC.chunk_rows)
                    for chunk in range(min(each.num_chunks, MOST_ROWS) if each else 0):
                        try:
                            each.content_key() if not compared else self.compare(each, chunk, known)
                            each.read("features")
                        except errors.IncompleteStoreError:
                            continue
                        except StoreError as error:
                            refusals.append(error)
        except MissingStoreError:
            pass
        except StoreError as error:
            refusals.append(error)
        return refusals

    # The oracle.

    @invariant()
    def every_handle_agrees_with_the_dict(self):
        complete = [c for c in range(-(-self.size // SPEC.chunk_rows)) if self.is_complete(c)]
        with self.place.read() as reader:
            tables = [table for _, table in self.writers.values()]
            if self.known or NAME in reader.table_names():
                tables.append(reader.open_table(NAME))
            for table in tables:
                assert table.spec.num_rows == self.size
                assert np.flatnonzero(table.done()).tolist() == sorted(self.known)
                for chunk in range(table.num_chunks):
                    self.compare(table, chunk, self.known)
                committed = table.committed_chunks()
                assert committed == complete or (self.interrupted and set(committed) <= set(complete))
                if table.complete:
                    assert table.content_key() == self.content_key(table.spec)
            for name, attempt in self.entries.items():
                np.testing.assert_array_equal(reader.entry(name, "key"), [attempt])
            assert set(reader.entry_names()) == set(self.entries)

    @precondition(lambda self: type(self.place) is not Memory)
    @rule()
    def a_check_finds_no_damage(self):
        report = self.place.check()
        assert report.ok, str(report)
        if self.place.repairs and not self.writers:
            assert report.tally.done_rows - len(self.known) == SPEC.num_rows
            assert self.place.check(repair=True).set_aside == ()

    def is_complete(self, chunk):
        start = chunk * SPEC.chunk_rows
        return all(row in self.known for row in range(start, min(start + SPEC.chunk_rows, self.size)))

    def expected(self, rows, known):
        """The values of rows, each of its attempt; of the other table without ``known``."""
        attempts = [9 if known is None else known[row] for row in rows]
        each = [values([row], attempt=attempt) for row, attempt in zip(rows, attempts, strict=True)]
        return {name: np.concatenate([one[name] for one in each]) for name in values([0])}

    def compare(self, table, chunk, known):
        """Compare every done row of a chunk, also as it is mapped if it is committed; return the rows."""
        rows, found = table.read_done(chunk)
        rows = rows.tolist()
        for name, expected in self.expected(rows, known).items() if rows else ():
            np.testing.assert_array_equal(found[name], expected)
            if chunk in table.committed_chunks():
                np.testing.assert_array_equal(table.read_chunk(chunk, name), expected)
        return set(rows)

    def content_key(self, spec):
        table = MemoryFeatureStore(MANIFEST).create_table(NAME, spec)
        table.put(0, self.expected(range(self.size), self.known))
        return table.content_key()

    def within(self, rows):
        """Return these rows, those beyond the table as it is now brought inside."""
        return list(dict.fromkeys(row % self.size for row in rows))

    def begin(self, writer, rows):
        self.attempt += 1
        self.held[writer] |= {row // SPEC.chunk_rows for row in rows}
        self.writers[writer][1].put(rows, values(rows, attempt=self.attempt))


def hung(number, frame):
    raise TimeoutError(f"more than {SECONDS} seconds")


@contextlib.contextmanager
def bounded():
    """A block that may take 20 seconds and half a gibibyte beside what is in use."""
    before, limit = signal.signal(signal.SIGALRM, hung), resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(cases.content("/proc/self/statm").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 29), limit[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)


def run(kind, examples, steps):
    if kind is Objects:
        pytest.importorskip("obstore", reason="obstore is not installed; it is in the extra 'remote'")
    chosen = settings(deadline=None, derandomize=True, phases=(Phase.generate,), max_examples=examples)
    chosen = settings(chosen, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    stateful.run_state_machine_as_test(lambda: StoreMachine(kind), settings=chosen)


KINDS = pytest.mark.parametrize("kind", [Folder, Memory, Objects, cases.Faulty])


@KINDS
def test_a_store_holds_what_a_dict_says(kind):
    run(kind, 4 if kind is Folder else 2, 14)


@KINDS
def test_many_histories_end_as_a_dict_says(kind):
    run(kind, EXAMPLES, 30)


def test_more_rows_than_memory_can_list_are_refused_by_every_question(tmp_path):
    with ZarrFeatureStore.create(tmp_path / "run.zarr", MANIFEST) as store:
        table = store.create_table("large", TableSpec(1 << 32, (Column("f", 1, "float32"),), 1))
        with bounded():
            for ask in (table.content_key, table.done, table.pending_by_chunk, lambda: table.read("f")):
                raises(errors.CorruptStoreError, "of memory, which are not available", ask)
