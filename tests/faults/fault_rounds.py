"""Rounds of faults of the disk: each fills a store, does something to its disk, and checks every promise afterwards."""

import contextlib
import itertools
import os
import random
import resource
import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import store_cases
from fault_power import EXTREMES, KEPT, Cut, Recorder, plant
from forking import Forks
from store_cases import MANIFEST, NAME, check_committed, open_for_writing, reading, values

from trak_lite.errors import MissingStoreError, StoreError, StoreFullError
from trak_lite.store import Column, TableSpec, ZarrFeatureStore


@dataclass
class Round:
    """What one round works with."""

    forks: Forks
    pick: random.Random
    folder: str
    totals: Counter
    size: int
    """How many power cuts a round has."""
    spec: TableSpec = field(init=False)

    def __post_init__(self):
        self.spec = drawn_spec(self.pick)

    def finish(self, path, spec=None):
        """Resume to the end, and check everything."""
        with ZarrFeatureStore.create(path, MANIFEST) as store:
            if NAME in store.table_names():
                store.grow_table(NAME, (spec or self.spec).num_rows)
        store_cases.finish(path, spec or self.spec)
        for _ in range(2):  # the second time with the array that the first has kept
            with ZarrFeatureStore.open(path, "r+") as store:
                check_gram(store)
        self.totals["rows acknowledged"] += (spec or self.spec).num_rows


def drawn_spec(pick):
    """Small tables, with and without an edge, some with rows that cross pages of the disk."""
    columns = [Column("features", pick.choice([1, 3, 8, 16, 300]), pick.choice(["float16", "float32"]))]
    columns += [Column(name, None, "float32") for name in ("q", "w")]
    chunk_rows = pick.choice([1, 2, 4, 7, 16, 32])
    return TableSpec(pick.randint(2 * chunk_rows, 90), tuple(columns), chunk_rows, {"checkpoint": "abc"})


def fill(table, pick, acknowledge):
    """Put pending rows in batches drawn at random; ``acknowledge(rows)`` is called when ``put`` has returned."""
    while pending := table.pending().tolist():
        chunk = pick.choice(pending) // table.spec.chunk_rows
        rows = [row for row in pending if row // table.spec.chunk_rows == chunk or pick.random() < 0.1]
        if pick.random() < 0.3:
            pick.shuffle(rows)
        rows = rows[: pick.choice([1, 2, 3, 5, 16, 90])]
        table.put(rows, values(rows, table.spec))
        acknowledge(rows)


def check_gram(store):
    """An array that is derived from a finished table is kept with it, and is right or absent."""
    table = store.open_table(NAME)
    rows, key = table.read("features").astype(np.float64), table.content_key()
    if (kept := store.cached("gram", key)) is not None:
        np.testing.assert_array_equal(kept, rows.T @ rows)
    store.cache("gram", key, rows.T @ rows)


def check_reader(path, acknowledged, *, made=True):
    """A reader finds the acknowledged rows, and right values; a table that was made is there."""
    try:
        with reading(path) as table:
            lost = np.setdiff1d(np.array(sorted(acknowledged), int), np.flatnonzero(table.done()))
            assert not len(lost), f"acknowledged rows {lost} are pending"
            check_committed(table)
    except MissingStoreError:
        assert not made, "the table is gone"


# Power cuts.


def power_cut(this):
    """Cut at any change of any file: what was not synced is lost, torn or kept."""
    disk = _recorded_run(this, os.path.join(this.folder, "disk"))
    cuts = [(this.pick.choice(disk.moments), Cut.drawn(this.pick)) for _ in range(this.size)]
    for stop, cut in cuts:
        _check_cut(this, disk, stop, cut, again=this.pick.random() < 0.1)


def every_power_cut(this, every=1):
    """Cut before each and every change, in each of the four extreme ways; a kill is one of them."""
    this.spec = TableSpec(5, (Column("features", 2, "float16"), *this.spec.columns[1:]), 3)
    disk = _recorded_run(this, os.path.join(this.folder, "disk"))
    for stop, cut in list(itertools.product(disk.moments, EXTREMES))[::every]:
        _check_cut(this, disk, stop, cut, again=False)


def _recorded_run(this, root):
    """Make, or take up, a store under a recorder, fill it, reopening it now and then, and append the last row."""
    os.makedirs(root, exist_ok=True)
    first = replace(this.spec, num_rows=this.spec.num_rows - 1)
    with Recorder(root) as recorder:
        while True:
            with ZarrFeatureStore.create(os.path.join(root, "run.zarr"), MANIFEST) as store:
                known = NAME in store.table_names()
                table = store.open_table(NAME) if known else store.create_table(NAME, first)
                recorder.note(np.flatnonzero(table.done()).tolist())
                with contextlib.suppress(_Reopen):
                    fill(table, this.pick, lambda rows: _note(recorder, rows, this.pick))
                    table = store.grow_table(NAME, this.spec.num_rows)
                    fill(table, this.pick, lambda rows: _note(recorder, rows, this.pick))
                    check_gram(store)
                    return recorder.disk()


class _Reopen(Exception):
    """The writer is to close the store and open it again."""


def _note(recorder, rows, pick):
    recorder.note(rows)
    if pick.random() < 0.1:
        raise _Reopen


def _check_cut(this, disk, stop, cut, *, again):
    """Build what a cut leaves, check what had been promised by then, and finish the run.

    A kill, after which the disk has everything, takes no row; a power cut may take rows of incomplete chunks.
    """
    root = os.path.join(this.folder, "after")
    plant(disk.after(stop, cut, this.pick), root)
    this.totals["power cuts"] += 1
    noted = disk.noted(stop)
    rows = set(itertools.chain.from_iterable(noted))
    if cut != KEPT:
        rows = complete_chunks(rows, this.spec)
    path = os.path.join(root, "run.zarr")
    try:
        check_reader(path, rows, made=bool(noted))
        if again:
            second = _recorded_run(this, root)
            shutil.rmtree(root)
            _check_cut(this, second, this.pick.choice(second.moments), Cut.drawn(this.pick), again=False)
            return
        this.finish(path)
    except (AssertionError, StoreError) as error:
        error.add_note(f"{this.spec}, cut before step {stop}: {cut}")
        raise
    shutil.rmtree(root)


def complete_chunks(rows, spec):
    """Return those of some rows whose whole chunk is among them."""
    starts = range(0, spec.num_rows, spec.chunk_rows)
    chunks = [set(range(start, min(start + spec.chunk_rows, spec.num_rows))) for start in starts]
    return set().union(*(chunk for chunk in chunks if chunk <= rows))


# Disks that are full, or may not be written.


def full_disk(this):
    """A limit on the size of files, which grows piece by piece."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = this.pick.choice([512, 700, 1024, 4096, 20_000])

    def limit(full):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * max(2 * full, 1), before[1]))

    # Python renames bytecode into place that was cut at the limit, and every later process fails to import the module.
    keeps, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    limit(0)
    try:
        fill_as_room_comes(this, os.path.join(this.folder, "run.zarr"), limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = keeps
    this.finish(os.path.join(this.folder, "run.zarr"))


def fill_as_room_comes(this, path, more_room):
    """The same process goes on each time, with the handle that it has."""
    noted, store, table = [], None, None
    for full in itertools.count(1):
        try:
            if table is None:
                store, table = open_for_writing(path, this.spec)
            fill(table, this.pick, noted.extend)
            break
        except StoreFullError:
            if noted:
                check_reader(path, noted)
            more_room(full)
            this.totals["full disks"] += 1
    store.close()


KINDS = {each.__name__: each for each in (power_cut, every_power_cut, full_disk)}
