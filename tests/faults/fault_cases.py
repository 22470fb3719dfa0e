"""What the faults are done to: a table whose values tell their row, a run that fills it, and what must hold after."""

import contextlib
import functools
import os
import re
import tempfile
from dataclasses import dataclass

import numpy as np

from trak_lite.errors import BusyError, IncompleteStoreError, MissingStoreError, StateError
from trak_lite.store import Column, Manifest, MemoryFeatureStore, TableSpec, ZarrFeatureStore

MANIFEST = Manifest({"seed": 0, "projector": {"kind": "countsketch"}}, {"torch": "2"})
NAME = "targets/val/ckpt-0"
ATTRIBUTES = {"checkpoint": "ckpt.pt"}
ROOTS = ("run.zarr", "a run with spaces.zarr", "läuf-№1 実行.zarr")

_PRIME = 2003
_TARGETS = 3


class Violated(Exception):
    """A promise of the store does not hold."""

    def __init__(self, message, *, lost=0, wrong=0, unequal=0):
        super().__init__(message)
        self.counts = {"lost": lost, "wrong": wrong, "unequal": unequal}


@dataclass(frozen=True)
class Case:
    """One table."""

    num_rows: int
    width: int
    chunk_rows: int
    dtype: str

    @classmethod
    def drawn(cls, pick, *, most_rows=90):
        """Small tables, with and without an edge, some with rows that cross pages of the disk."""
        width = pick.choice([1, 3, 8, 300 if pick.random() < 0.3 else 16])
        chunk_rows = pick.choice([1, 2, 4, 7, 16, 32])
        fewest = min(2 * chunk_rows, most_rows)
        return cls(pick.randint(fewest, most_rows), width, chunk_rows, pick.choice(["float16", "float32"]))

    @property
    def spec(self):
        columns = (
            Column("features", self.width, self.dtype),
            Column("q", None, "float32"),
            Column("w", None, "float32"),
        )
        return TableSpec(self.num_rows, columns, self.chunk_rows, {"checkpoint": "abc"})

    @property
    def num_chunks(self):
        return -(-self.num_rows // self.chunk_rows)

    def values(self, rows, attempt=0):
        """Values that no other row and no other attempt has, exact in float16."""
        rows = np.asarray(rows, dtype=np.int64)
        made = {}
        for place, column in enumerate(self.spec.columns):
            ramp = np.arange(column.width or 1) * 31 + place * 7 + attempt * 613
            numbers = ((1 + rows[:, None]) * 1009 + ramp) % _PRIME - _PRIME // 2
            made[column.name] = (
                (numbers / 8).astype(column.dtype).reshape((len(rows), -1)[: 1 + bool(column.width)])
            )
        return made

    def chunk_of(self, row):
        return row // self.chunk_rows

    def rows_of(self, chunk):
        return range(chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.num_rows))

    def complete_chunks(self, rows):
        """Return those of some rows whose whole chunk is among them."""
        chunks = [set(self.rows_of(chunk)) for chunk in range(self.num_chunks)]
        return set().union(*(chunk for chunk in chunks if chunk <= set(rows)))


def open_for_writing(path, case):
    store = ZarrFeatureStore.create(path, MANIFEST)
    return store, store.create_table(NAME, case.spec, ATTRIBUTES)


def fill(table, case, pick, acknowledge):
    """Put pending rows in batches drawn at random, until none is left or others hold all that are; count the busy.

    ``acknowledge(rows)`` is called each time ``put`` has returned.
    """
    busy = 0
    held = set()
    while True:
        free = [row for row in table.pending().tolist() if case.chunk_of(row) not in held]
        if not free:
            return busy
        chunk = case.chunk_of(pick.choice(free))
        mine = [row for row in free if case.chunk_of(row) == chunk or pick.random() < 0.1]
        if pick.random() < 0.3:
            pick.shuffle(mine)
        rows = mine[: pick.choice([1, 2, 3, 5, 16, case.num_rows])]
        try:
            table.put(rows, case.values(rows))
        except BusyError as error:
            if not re.search(r"pid \d+ on |this process already|unnamed", str(error)):
                raise Violated(f"a busy chunk does not name its holder: {error}") from error
            held |= {case.chunk_of(row) for row in rows}
            busy += 1
        except StateError as error:
            if not table.done()[rows].any():
                raise Violated(f"pending rows are refused: {error}") from error
        else:
            acknowledge(rows)


def final_scores(store, table):
    """A gram matrix, kept in the store, and a product over the features: ``(N, 3)`` float64."""
    blocks = [rows.astype(np.float64) for _, rows in table.chunks("features")]
    key = table.content_key()
    gram = store.cached(f"{NAME}/gram", key)
    if gram is None:
        gram = sum((block.T @ block for block in blocks), start=np.eye(blocks[0].shape[1]))
        store.cache(f"{NAME}/gram", key, gram)
    targets = np.sin(np.arange(gram.shape[0] * _TARGETS, dtype=np.float64)).reshape(-1, _TARGETS)
    preconditioned = np.linalg.solve(np.array(gram), targets)
    return np.concatenate([block @ preconditioned for block in blocks]) * table.read("q")[:, None]


@functools.cache
def undisturbed(case):
    """Scores and content key of a run that nothing disturbed, on disk and in memory."""
    memory = MemoryFeatureStore(MANIFEST)
    rows = memory.create_table(NAME, case.spec)
    rows.put(0, case.values(range(case.num_rows)))
    with tempfile.TemporaryDirectory() as folder:
        store, table = open_for_writing(f"{folder}/run.zarr", case)
        with store:
            table.put(0, case.values(range(case.num_rows)))
            scores, key = final_scores(store, table), table.content_key()
    if final_scores(memory, rows).tobytes() != scores.tobytes() or rows.content_key() != key:
        raise Violated("an undisturbed run on disk differs from one in memory", unequal=1)
    return scores, key


def check_rows(table, case, chunks=None):
    """Raise if a committed chunk holds anything but the values of its rows."""
    for chunk in table.committed_chunks() if chunks is None else chunks:
        rows = case.rows_of(chunk)
        expected_rows = case.values(rows)
        for name in (column.name for column in table.spec.columns):
            expected, found = expected_rows[name], table.read_chunk(chunk, name)
            if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
                wrong = sum(
                    row.tobytes() != right.tobytes() for row, right in zip(found, expected, strict=False)
                )
                raise Violated(f"{wrong} rows of chunk {chunk} are wrong in {name}", wrong=wrong)


def check_acknowledged(table, acknowledged):
    """Return the mask of done rows; raise if an acknowledged row is not among them."""
    done = table.done()
    lost = [row for row in sorted(acknowledged) if not done[row]]
    if lost:
        raise Violated(f"acknowledged rows {lost} are pending", lost=len(lost))
    return done


def check_as_reader(path, case, acknowledged, *, made=False):
    """What a reader must find after a fault: the acknowledged rows, right values, and pending rows refused.

    Args:
        path: Of the store.
        case: What is in it.
        acknowledged: Rows that must be done.
        made: Whether ``create_table`` had returned, so that the table must be there.
    """
    try:
        with ZarrFeatureStore.open(path) as store:
            table = store.open_table(NAME)
            done = check_acknowledged(table, acknowledged)
            check_rows(table, case)
            pending = np.flatnonzero(~done)
            if len(pending):
                chunk = case.chunk_of(int(pending[0]))
                with contextlib.suppress(IncompleteStoreError):
                    table.read_chunk(chunk, "q")
                    raise Violated(f"chunk {chunk} has pending rows and can be read")
    except MissingStoreError as error:
        if acknowledged or made:
            raise Violated(f"the table is gone: {error}", lost=len(acknowledged)) from error


def finish(path, case, pick, acknowledged=()):
    """Resume the run to its end: every row is there and right, with the scores of an undisturbed run."""
    store, table = open_for_writing(path, case)
    with store:
        check_acknowledged(table, acknowledged)
        check_rows(table, case)
        fill(table, case, pick, lambda rows: None)
    scores, key = undisturbed(case)
    with ZarrFeatureStore.open(path, "r+") as store:
        table = store.open_table(NAME)
        check_rows(table, case, range(case.num_chunks))
        if not table.complete or table.pending().size:
            raise Violated(f"rows {table.pending()} are pending after the end", lost=table.pending().size)
        for _ in range(2):  # the second time with the gram matrix that the first has kept
            if final_scores(store, table).tobytes() != scores.tobytes() or table.content_key() != key:
                raise Violated("the final scores differ from those of an undisturbed run", unequal=1)
    left = os.listdir(os.path.join(path, NAME, "features", ".stage"))
    if left:
        raise Violated(f"{left} are left over in the stage")


def check_with_plain_zarr(path, case):
    """Another tool reads the finished store bitwise."""
    import zarr

    for name, expected in case.values(range(case.num_rows)).items():
        found = zarr.open(os.path.join(path, NAME, name), mode="r")[:]
        if found.tobytes() != expected.tobytes():
            raise Violated(f"plain zarr reads other values of {name}", wrong=case.num_rows)
