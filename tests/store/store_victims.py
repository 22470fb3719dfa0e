"""Processes to be killed: one process imports the store once and forks a victim per order, read as JSON lines."""

import errno
import importlib.util
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

import forking
import numpy as np
from store_cases import LONG, NAME, PACKED, SPEC, failing_call, open_for_writing, open_remote, values

from trak_lite.errors import BusyError, StoreError, StoreFullError
from trak_lite.store import Column, Manifest, TableSpec, check_store, create_store, open_store

SPECS = {"plain": SPEC, "packed": PACKED}


def put_all(table, spec, done, batch):
    """Put all pending rows; note each batch after ``put`` has returned."""
    pending = table.pending()
    for start in range(0, len(pending), batch):
        rows = pending[start : start + batch]
        table.put(rows, values(rows, spec))
        with open(done, "a") as file:
            file.write("".join(f"{row}\n" for row in rows))


def write(path, done, batch, spec="plain"):
    put_all(open_for_writing(path, SPECS[spec])[1], SPECS[spec], done, batch)


def write_remote(folder, done, batch):
    """The same into a store below a folder of objects, staged beside it."""
    with open_remote(folder) as (_, table):
        put_all(table, SPEC, done, batch)


def store_entry(path):
    """Replace an entry, then drop it."""
    with open_store(path, "r+") as store:
        store.put_entry("a", "key", np.ones(3))
        store.drop_entry("a")


def die_before_a_child(path, row):
    """Hold a chunk, fork a child that lives on (as a data loader's worker does), and die."""
    _, table = open_for_writing(path)
    table.put(row, values([row]))
    if os.fork() == 0:
        os.close(forking.answers)
        time.sleep(3)
        return
    os.kill(os.getpid(), signal.SIGKILL)


def create(path, seed):
    """Create a store and a table beside others who do the same."""
    try:
        create_store(path, Manifest({"seed": seed})).create_table(NAME, SPEC)
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
    """Claim chunk by chunk what nobody else holds, until all is committed; return the rows that were put here."""
    _, table = open_for_writing(path, LONG)
    put = []
    while not table.complete:
        for chunk in range(table.num_chunks):
            try:
                with table.claim(chunk) as pending:
                    for start in range(0, len(pending), batch):
                        rows = pending[start : start + batch]
                        table.put(rows, values(rows, LONG))
                        put += rows.tolist()
            except BusyError:
                continue
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


def show_a_failed_commit(path):
    """Show the local variables of an error, as a debugger or a log may, after its rows were cut off the row log."""
    spec = TableSpec(8, (Column("features", 4096, "float32"),), 8)
    _, table = open_for_writing(path, spec)
    table.put(0, values(range(4), spec))
    try:
        with failing_call("fsync", 1, OSError(errno.ENOSPC, "No space left on device")):
            table.put(4, values(range(4, 8), spec))
    except StoreFullError as error:
        "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    return table.pending().tolist()


def repair(path):
    return str(check_store(path, repair=True))


def drop(path, name):
    open_store(path, "r+").drop_table(name)


def grow(path, num_rows):
    """Give the table more rows and put those that are pending."""
    table = open_store(path, "r+").grow_table(NAME, num_rows)
    for row in table.pending().tolist():
        table.put(row, values([row]))


def modules(path):
    """What is imported once a store was used."""
    put_row(path, 0)
    return list(sys.modules)


if __name__ == "__main__":
    forking.serve(globals())
