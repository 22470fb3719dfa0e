"""Processes to be killed: one process imports the store once and forks a victim per order, read as JSON lines."""

import errno
import importlib.util
import itertools
import os
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
from store_cases import LONG, MANIFEST, NAME, SPEC, failing_call, open_for_writing, put_pending, values

from trak_lite import errors
from trak_lite.store import Column, TableSpec, create_store, open_store

SPECS = {"plain": SPEC, "long": LONG}


def write(path, done, batch, spec="plain", pause=0):
    """Put all pending rows; note each batch after ``put`` has returned."""

    def note(rows):
        with open(done, "a") as file:
            file.write("".join(f"{row}\n" for row in rows))
        time.sleep(pause)

    put_pending(open_for_writing(path, SPECS[spec])[1], batch, note)


def die_before_a_child(path, row):
    """Hold a chunk, fork a child that lives on (as a data loader's worker does), and die."""
    _, table = open_for_writing(path)
    table.put(row, values([row]))
    if os.fork() == 0:
        os.close(forking.answers)
        time.sleep(3)
        return
    os.kill(os.getpid(), signal.SIGKILL)


def write_beside_a_child(path):
    """Hold a chunk, and fork a child that finds it held and fills the others through the handle that it inherited."""
    _, table = open_for_writing(path)
    table.put(0, values([0]))
    child = os.fork()
    if child == 0:
        try:
            table.put(1, values([1]))
        except errors.BusyError:
            table.put(4, values(range(4, 11)))
        os._exit(0)
    os.waitpid(child, 0)
    done = np.flatnonzero(table.done()).tolist()
    table.put(1, values(range(1, 4)))
    return done


def look_as_nobody(path):
    """Read all that there is as a user who may only read, or not even that, and try to write.

    Return the rows of q that are done, the names of the errors of those who write, and the messages of the others.
    """
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    rows, refused, messages = [], [], []

    def read(use):
        try:
            with open_store(path) as store:
                use(store)
        except errors.IncompleteStoreError:
            pass  # pending rows are no damage
        except errors.StoreError as error:
            messages.append(str(error))

    read(lambda store: store.table_names())
    read(lambda store: store.attributes(NAME))
    for chunk, column in itertools.product(range(3), ("features", "q", "w")):
        read(lambda store, c=chunk, name=column: store.open_table(NAME).read_chunk(c, name))
    read(lambda store: [rows.extend(store.open_table(NAME).read_done(c)[1]["q"].tolist()) for c in range(3)])
    for write in (lambda: open_store(path, "r+"), lambda: create_store(path, MANIFEST)):
        try:
            write()
        except errors.StoreError as error:
            refused.append(type(error).__name__)
    return rows, refused, messages


def put_row(path, row):
    _, table = open_for_writing(path)
    try:
        table.put(row, values([row]))
    except errors.BusyError as error:
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
            except errors.BusyError:
                continue
    return put


def hold(path, chunk, rows):
    _, table = open_for_writing(path, LONG)
    with table.claim(chunk) as pending:
        table.put(pending[:rows], values(pending[:rows], LONG))
        time.sleep(600)


def show_a_failed_commit(path):
    """Show the local variables of an error, as a debugger or a log may, after its rows were cut off the row log."""
    spec = TableSpec(8, (Column("features", 4096, "float32"),), 8)
    _, table = open_for_writing(path, spec)
    table.put(0, values(range(4), spec))
    try:
        with failing_call("fsync", 1, OSError(errno.ENOSPC, "No space left on device")):
            table.put(4, values(range(4, 8), spec))
    except errors.StoreFullError as error:
        "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    return table.pending().tolist()


def modules(path):
    """What is imported once a store was used."""
    put_row(path, 0)
    return list(sys.modules)


if __name__ == "__main__":
    forking.serve(globals())
