"""Processes that write, read, create or are damaged, and may be killed at it.

A worker that hangs is ended by SIGALRM; its exit status tells.
"""

import importlib.util
import os
import random
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
from fault_cases import (
    MANIFEST,
    NAME,
    Case,
    Violated,
    check_acknowledged,
    check_as_reader,
    check_rows,
    fill,
    open_for_writing,
)
from forking import Forks

from trak_lite.errors import (
    IncompleteStoreError,
    ManifestMismatchError,
    MissingStoreError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
)
from trak_lite.store import Manifest, ZarrFeatureStore

PATIENCE = 90  # seconds until a worker counts as hanging
NOBODY = 65534


class Acknowledgements:
    """Rows whose ``put`` has returned, in a file that several processes append to and that outlives them."""

    def __init__(self, path):
        self.path = path
        self.rows = set()

    def __call__(self, rows):
        self.rows |= set(rows)
        with open(
            self.path, "ab", buffering=0
        ) as file:  # one write; not through os.open, which may be failing
            file.write("".join(f"{row}\n" for row in rows).encode())

    @staticmethod
    def read(path):
        """Return all rows in the file; a line cut off by a kill was no acknowledgement."""
        if not os.path.exists(path):
            return set()
        with open(path) as file:
            return {int(line) for line in file.read().rpartition("\n")[0].split()}


def write(path, case, acks, seed, slowly=False):
    """Put pending rows until none is left that is not held by others.

    Slowly, it waits between puts: the disk gets time to write back what nobody has synced.
    """
    case, pick, noted = Case(**case), random.Random(seed), Acknowledgements(acks)
    store, table = open_for_writing(path, case)
    with store:
        return fill(
            table, case, pick, lambda rows: (noted(rows), slowly and time.sleep(pick.uniform(0, 0.01)))
        )


class Interrupts:
    """Signals that raise where a write is going on, at most two at a time (the second one inside the clean-up)."""

    def __init__(self):
        self.count = 0
        self.left = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)

    def _raise(self, number, frame):
        if self.left:
            self.left -= 1
            self.count += 1
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)


def write_stubbornly(path, case, acks, seed):
    """Likewise; a Ctrl-C or a SIGTERM interrupts a put, and the same process goes on with the same handle."""
    case, pick, noted = Case(**case), random.Random(seed), Acknowledgements(acks)
    interrupts, handle, ended = Interrupts(), None, False
    while not ended:
        try:
            try:
                handle = handle or open_for_writing(
                    path, case
                )  # by threads of zarr's, which Python may not interrupt
                interrupts.left = 2
                check_acknowledged(handle[1], noted.rows)
                fill(handle[1], case, pick, noted)
                ended = True
                interrupts.left = 0
            except (KeyboardInterrupt, SystemExit):
                interrupts.left = 0
        except (KeyboardInterrupt, SystemExit):
            pass  # the second one came while the first one was on its way; there is no third
    handle[0].close()
    return interrupts.count


def write_on_full_disk(path, case, acks, seed, limit, ballast):
    """Likewise, on a disk that is full until the ballast goes, or under a limit on the size of files, step by step."""
    case, pick, noted = Case(**case), random.Random(seed), Acknowledgements(acks)
    full, handle = 0, None
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    while True:
        try:
            handle = handle or open_for_writing(path, case)
            fill(handle[1], case, pick, noted)
        except StoreFullError:
            full += 1
            if handle:
                check_acknowledged(handle[1], noted.rows)
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2 * limit * full, resource.RLIM_INFINITY))
            else:
                os.truncate(ballast, max(os.path.getsize(ballast) - pick.choice([4096, 16384]), 0))
        else:
            handle[0].close()
            return full


def write_and_fork(path, case, acks, seed, dies):
    """Put some rows, fork a child that lives on, and die, or go on beside a child that writes too."""
    case, pick, noted = Case(**case), random.Random(seed), Acknowledgements(acks)
    store, table = open_for_writing(path, case)
    rows = table.pending()[: pick.randint(1, case.num_rows)].tolist()
    table.put(rows, case.values(rows))
    noted(rows)
    child = os.fork()
    if child == 0:
        os.close(forking.answers)
        live_on(table, case, random.Random(seed + 1), None if dies else noted)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    fill(table, case, pick, noted)
    store.close()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def live_on(table, case, pick, noted):
    """Do what a forked child does: sleep (without ``noted``) or write; never returns."""
    status = 1
    try:
        if noted is None:
            time.sleep(1)
        else:
            fill(table, case, pick, noted)
        status = 0
    except BaseException:  # nothing may get past the end of a forked child
        traceback.print_exc()
    os._exit(status)


def poll(path, case, acks):
    """Read beside the writers until all is committed: rows that were done stay done, and none is ever wrong."""
    case, polls, before, seen = Case(**case), 0, None, set()
    while True:
        polls += 1
        acknowledged = Acknowledgements.read(acks)
        try:
            with ZarrFeatureStore.open(path) as store:
                table = store.open_table(NAME)
                for _ in range(5):
                    committed, done = set(table.committed_chunks()), check_acknowledged(table, acknowledged)
                    if not seen <= committed or (before is not None and (before & ~done).any()):
                        raise Violated("a row that was done for a reader no longer is", lost=1)
                    check_rows(table, case, committed - seen)
                    seen, before = committed, done
                check_rows(table, case)
                if table.complete:
                    return polls
        except MissingStoreError:
            if acknowledged:
                raise
        time.sleep(0.002)


def create(path, case, seed, jump):
    """Create beside others, by a clock that is off; say which settings won."""
    real = time.time
    time.time = lambda: real() + jump
    for _ in range(20):
        try:
            store = ZarrFeatureStore.create(path, Manifest({"seed": seed}))
            store.create_table(NAME, Case(**case).spec)
        except ManifestMismatchError as error:
            if "seed is" not in str(error):
                raise Violated(f"the mismatch is not named: {error}") from error
            return None
        except StoreError:
            if not jump:
                raise
        else:
            return seed
    raise Violated("creation failed 20 times")


def become_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def refuse_nobody(path, case):
    """As a user who may only read, or not even that: named errors, right values, not a byte written."""
    become_nobody()
    return check_read_only(path, case)


def look_as_nobody(path, case):
    """Read what there is as a user who may not read all of it; return the messages."""
    become_nobody()
    case, messages = Case(**case), []
    reads = [lambda store, table: store.table_names(), lambda store, table: store.attributes(NAME)]
    reads += [lambda store, table: table.read_rows("q", np.flatnonzero(table.done()))]
    for chunk in range(case.num_chunks):
        for column in ("features", "q", "w"):
            reads.append(lambda store, table, c=chunk, name=column: table.read_chunk(c, name))
    for read in reads:
        try:
            with ZarrFeatureStore.open(os.path.realpath(path)) as store:
                read(store, store.open_table(NAME))
        except IncompleteStoreError:
            continue  # pending rows are no damage
        except StoreError as error:
            messages.append(str(error))
    return messages


def check_read_only(path, case):
    """Reading works, writing is refused by name."""
    check_as_reader(path, Case(**case), ())
    for attempt in (
        lambda: ZarrFeatureStore.open(path, "r+"),
        lambda: ZarrFeatureStore.create(path, MANIFEST),
    ):
        try:
            attempt()
        except ReadOnlyStoreError:
            continue
        raise Violated("a store that cannot be written opens for writing")
    return "refused"


class Workers(Forks):
    """Starts actions in processes of their own."""

    def __init__(self):
        super().__init__(__file__, patience=PATIENCE)

    def wait(self, pid, *, may_die_by=()):
        """Return exit status and answer; raise if the process failed in a way that it must not."""
        status, answer = super().wait(pid)
        if status == 0 or -status in may_die_by:
            return status, answer
        if status > 0:
            raise Violated(f"a worker {answer.pop('failed')}", **answer)
        raise Violated(f"a worker died by signal {signal.Signals(-status).name}")

    def run(self, action, *arguments):
        """Run to the end and return the answer."""
        return self.wait(self.start(action, *arguments))[1]


if __name__ == "__main__":
    forking.serve(globals())
