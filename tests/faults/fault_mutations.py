"""Mutated stores, drawn and shrunk by hypothesis: one to three things done to any files of a store in any state.

Opening, reading, verifying, repairing, resuming and reading what is kept of scores give a ``StoreError`` or exactly the
right numbers: never another error, a wrong number, a crash, more than a few seconds, or memory without end.
"""

import contextlib
import json
import logging
import os
import random
import signal
import traceback
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np
from fault_cases import NAME, Case, Violated, check_numbers, fill, open_for_writing
from fault_damage import (
    SECONDS,
    built_states,
    choose,
    content_of,
    craft,
    damage,
    files_in,
    limit_memory,
    look,
    replace,
    sealed,
)
from fault_power import plant
from hypothesis import HealthCheck, Phase, settings

from trak_lite.errors import MissingStoreError, StoreError
from trak_lite.store import ZarrFeatureStore, check_store

_UNFIT = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a way runs into where another one was before it."""


class Hung(Exception):
    """An example takes too long."""


def swap(root, pick):
    """Exchange two files."""
    files = files_in(root)
    first, second = choose(pick, files), choose(pick, files)
    if first != second:
        os.rename(f"{root}/{first}", f"{root}/kept")
        os.rename(f"{root}/{second}", f"{root}/{first}")
        os.rename(f"{root}/kept", f"{root}/{second}")
    return f"swap {first} and {second}"


def move_out(root, pick):
    """Put a link to the same bytes in the place of a file or a folder."""
    folders = sorted({os.path.dirname(path) for path in files_in(root)} - {""})
    path = choose(pick, files_in(root) + folders)
    outside = os.path.join(os.path.dirname(root), "outside")
    replace(outside, None)
    os.rename(f"{root}/{path}", outside)
    os.symlink(outside, f"{root}/{path}")
    return f"move {path} out"


def replace_folder(root, pick):
    """Put nothing, a file, a pipe or a link to nowhere in the place of a folder."""
    path = choose(pick, sorted({os.path.dirname(path) for path in files_in(root)} - {""}))
    replace(f"{root}/{path}", None)
    how = pick.choice(["nothing", "file", "pipe", "link"])
    if how == "file":
        replace(f"{root}/{path}", b"x")
    elif how == "pipe":
        os.mkfifo(f"{root}/{path}")
    elif how == "link":
        os.symlink("nowhere", f"{root}/{path}")
    return f"{how} for the folder {path}"


def lie(root, pick):
    """Say another size in the table and in its arrays, so that they agree."""
    key = pick.choice(["num_rows", "chunk_rows", "width"])
    size = pick.choice([1, 2, 2**20, 2**26, 2**27, 2**31, 2**32, 2**40, 10**18, 10**30])

    def change_table(document):
        record = document["attributes"]["trak_lite"]
        if key == "width":
            record["columns"][0]["width"] = size
        else:
            record[key] = size

    def change_array(document):
        chunk = document["chunk_grid"]["configuration"]["chunk_shape"]
        shape, axis = {"num_rows": (document["shape"], 0), "chunk_rows": (chunk, 0)}.get(key, (chunk, -1))
        shape[axis] = size
        if key == "width":
            document["shape"][-1] = size

    _edit(root, f"{NAME}/zarr.json", change_table)
    for column in ("features", "q", "w"):
        if key != "width" or column == "features":
            _edit(root, f"{NAME}/{column}/zarr.json", change_array)
    return f"say that {key} is {size}"


def _edit(root, path, change):
    if path not in files_in(root):
        return
    with contextlib.suppress(*_UNFIT):
        document = json.loads(content_of(root, path))
        change(document)
        own = document["attributes"].get("trak_lite", {})
        if "checksum" in own:
            document["attributes"]["trak_lite"] = sealed(own)
        replace(f"{root}/{path}", json.dumps(document).encode())


WAYS = {
    "damage": lambda root, pick: "; ".join(damage(root, pick)),
    "craft": lambda root, pick: "; ".join(craft(root, pick)),
    "swap": swap,
    "move out": move_out,
    "replace a folder": replace_folder,
    "lie": lie,
}


def examine(root, case, done, ways, pick):
    """Mutate a store and see what becomes of it; return the outcome.

    ``done`` are the rows of the sound store that are done; where sizes are lies it says nothing of the rows.
    """
    notes = []
    try:
        for way in ways:
            with contextlib.suppress(*_UNFIT):
                notes.append(way)
                notes[-1] = WAYS[way](root, pick)
        return examine_lie(root) if "lie" in ways else examine_mutated(root, case, done)
    except Exception as error:
        for note in notes:
            error.add_note(note)
        raise


def examine_mutated(root, case, done):
    """Read, verify and resume, and once more after a repair."""
    refusals = look(root, case, done)
    damaged = [error for error in refusals if not isinstance(error, MissingStoreError)]
    if sound(root) and damaged:  # of a table that is gone as a whole nothing tells
        raise Violated(f"called sound, and refused: {damaged[0]}")
    if resume(root, case):
        return "refused" if refusals else "harmless, or pending"
    with contextlib.suppress(StoreError):
        check_store(root, repair=True)
    look(root, case, np.ones_like(done))  # any row may have been put before the run was refused
    return "repaired" if resume(root, case) else "refused"


def sound(root):
    """Return whether verifying finds nothing damaged."""
    try:
        report = check_store(root)
    except StoreError:
        return False
    return report.ok and bool(str(report))


def resume(root, case):
    """Run to the end and compare every number; return whether the store let itself be resumed."""
    try:
        store, table = open_for_writing(root, case)
        with store:
            fill(table, case, random.Random(0), lambda rows: None)
        check_numbers(root, case)
    except StoreError:
        return False
    return True


def examine_lie(root):
    """Ask for everything: nothing is allocated, and nothing else than an error of the store comes of it."""
    sound(root)
    refused = 0
    for ask in (
        lambda table: table.done(),
        lambda table: table.pending(),
        lambda table: table.read("features"),
        lambda table: [table.read_chunk(chunk, "features") for chunk in table.committed_chunks()],
        lambda table: table.content_key(),
        lambda table: table.read_done(0),
    ):
        try:
            with ZarrFeatureStore.open(root) as store:
                ask(store.open_table(NAME))
        except StoreError:
            refused += 1
    return "refused" if refused else "harmless, or pending"


def mutate_many(folder, case, seed, count):
    """Mutate stores of one case in ``count`` ways; the last one that was begun is noted, in case it kills.

    Returns:
        How often each outcome was seen, and the smallest example that broke a promise, if one did.
    """
    case = Case(**case)
    states = built_states(folder, case, random.Random(f"{seed}/states"))
    limit_memory()
    signal.signal(signal.SIGALRM, _hang)
    logging.disable()  # of what made a store that says so itself
    tally, root = Counter(), os.path.join(folder, "mutated.zarr")

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(
        state=st.sampled_from(range(len(states))),
        ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=3),
        pick=st.randoms(use_true_random=False),
    )
    def run(state, ways, pick):
        before, done = states[state]
        plant(before, root)
        replace(os.path.join(folder, "example"), f"state {state}, {ways}".encode())
        signal.alarm(SECONDS)
        try:
            tally[examine(root, case, done, ways, pick)] += 1
        finally:
            signal.alarm(0)
            replace(root, None)

    try:
        run()
    except Exception as error:  # any other than a StoreError is what is looked for
        counts = error.counts if isinstance(error, Violated) else {}
        return {"tally": tally, "broken": {"trace": traceback.format_exc(), **counts}}
    return {"tally": tally, "broken": None}


def _hang(number, frame):
    raise Hung(f"more than {SECONDS} seconds")
