"""Processes to be killed: one process imports the store once and forks a victim per order, read as JSON lines."""

import importlib.util
import json
import os
import resource
import signal
import sys
import time
import traceback
import types

if __name__ == "__main__":  # the package without its front door, which imports torch: the store needs none
    package = types.ModuleType("trak_lite")
    package.__path__ = importlib.util.find_spec("trak_lite").submodule_search_locations
    sys.modules["trak_lite"] = package

import numpy as np
from forking import serve
from store_cases import LONG, NAME, PACKED, SPEC, open_for_writing, open_remote, values

from trak_lite.errors import BusyError, StoreError, StoreFullError
from trak_lite.store import Manifest, ZarrFeatureStore, check_store

ANSWERS = -1


def write(path, done, batch):
    """Put all pending rows; note each batch after ``put`` has returned."""
    _, table = open_for_writing(path)
    pending = table.pending()
    for start in range(0, len(pending), batch):
        rows = pending[start : start + batch]
        table.put(rows, values(rows))
        with open(done, "a") as file:
            file.write("".join(f"{row}\n" for row in rows))


def write_packed(path):
    """Put the rows of a quantised table, five at a time."""
    _, table = open_for_writing(path, PACKED)
    for rows in (range(5), range(5, 10), range(10, 11)):
        table.put(rows.start, values(rows, PACKED))


def write_long(path, part, parts):
    """Put the pending rows of every ``parts``-th chunk, three rows at a time."""
    _, table = open_for_writing(path, LONG)
    for chunk in range(part, table.num_chunks, parts):
        start, stop = table.chunk_range(chunk)
        pending = [row for row in table.pending().tolist() if start <= row < stop]
        for at in range(0, len(pending), 3):
            table.put(pending[at : at + 3], values(pending[at : at + 3], LONG))


def write_remote(folder, done, batch):
    """The same into a store below a folder of objects, staged beside it."""
    with open_remote(folder) as (_, table):
        pending = table.pending()
        for start in range(0, len(pending), batch):
            rows = pending[start : start + batch]
            table.put(rows, values(rows))
            with open(done, "a") as file:
                file.write("".join(f"{row}\n" for row in rows))


def store_entry(path):
    """Replace an entry, then drop it."""
    with ZarrFeatureStore.open(path, "r+") as store:
        store.put_entry("a", "key", np.ones(3))
        store.drop_entry("a")


def die_before_a_child(path, row):
    """Hold a chunk, fork a child that lives on (as a data loader's worker does), and die."""
    _, table = open_for_writing(path)
    table.put(row, values([row]))
    if os.fork() == 0:
        os.close(ANSWERS)
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def create(path, seed):
    """Create a store and a table beside others who do the same."""
    try:
        store = ZarrFeatureStore.create(path, Manifest({"seed": seed}))
        store.create_table(NAME, SPEC)
    except StoreError as error:
        return type(error).__name__
    return "made"


def put_row(path, row):
    """Put one row and say how it went."""
    _, table = open_for_writing(path)
    try:
        table.put(row, values([row]))
    except BusyError as error:
        return str(error)
    return "put"


def share(path, batch):
    """Take part in filling the table; return the rows that were put here."""
    from trak_lite.parallel.sharing import SharedRows

    _, table = open_for_writing(path, LONG)
    put = []
    with SharedRows(table, batch, label="rows", progress=False) as work:
        for batches in work.rounds():
            for rows in batches:
                before = work.written
                work.put(rows, values(rows, LONG))
                put += rows.tolist()[: work.written - before]
    return put


def hold(path, chunk, rows):
    """Claim a chunk, put some of its rows, and sit there until killed."""
    _, table = open_for_writing(path, LONG)
    with table.claim(chunk) as pending:
        table.put(pending[:rows], values(pending[:rows], LONG))
        time.sleep(600)


def fill_disk(path):
    """Put rows under a limit on the file size that is lifted after the first failure."""
    _, table = open_for_writing(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))
    try:
        table.put(0, values(range(11)))
    except StoreFullError as error:
        pending = table.pending()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        table.put(pending, values(pending))
        return [str(error), pending.tolist()]
    return None


def repair(path):
    """Set damaged chunks aside."""
    return str(check_store(path, repair=True))


def drop(path, name):
    """Drop a table."""
    ZarrFeatureStore.open(path, "r+").drop_table(name)


def grow(path, num_rows):
    """Give the table more rows and put those that are pending."""
    table = ZarrFeatureStore.open(path, "r+").grow_table(NAME, num_rows)
    for row in table.pending().tolist():
        table.put(row, values([row]))


def modules(path):
    """What is imported once a store was used."""
    put_row(path, 0)
    return list(sys.modules)


def run(order, pipe):
    """Carry out one order in a forked child; never returns."""
    global ANSWERS
    ANSWERS = pipe
    try:
        os.environ.update(order["environment"])
        answer = globals()[order["action"]](*order["arguments"])
        os.write(pipe, json.dumps(answer).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    serve(run)
