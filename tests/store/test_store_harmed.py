"""One to three things done to any files of a store in any state: right rows or a named error, in little memory.

``TRAK_LITE_HARMED_EXAMPLES=10000`` draws on; hypothesis shrinks what it finds.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import (
    NAME,
    SPEC,
    Killed,
    check_all,
    content,
    crc32c,
    do_harm,
    dying,
    edit_document,
    exchange,
    failpoints,
    files_below,
    folder,
    link_away,
    open_for_writing,
    overwrite,
    put_pending,
    row_seed,
    values,
    writing,
)

from trak_lite.errors import IncompleteStoreError, MissingStoreError, StoreError
from trak_lite.store import ZarrFeatureStore, check_store

EXAMPLES = int(os.environ.get("TRAK_LITE_HARMED_EXAMPLES", "60"))
SECONDS = 20
HALF_DONE = [name for name in failpoints.FAILPOINTS[3:] if name != "column_taken_back"]
STATES = ("complete", "half", "new", *HALF_DONE)
STRANGE = (None, True, -1, 0, 1, 2, 3, 10**18, 10**30, 1.5, "", "x", "../x", "\ud800", "c" * 300)
STRANGE += ([], [[]], [1], {}, {"a": 1}, float("nan"), float("inf"))


def put_all(path):
    with writing(path) as table:
        put_pending(table, 3)


def make(path, state):
    """Make a store that is complete, has chunks that are staged in part, is new, or was killed at a step."""
    if state in HALF_DONE:
        with (
            contextlib.suppress(Killed),
            dying(f"{state}:2", lambda: shutil.copytree(path, f"{path}-killed")),
        ):
            put_all(path)
        shutil.rmtree(path)
        os.rename(f"{path}-killed", path)
        return
    store, table = open_for_writing(path)
    with store:
        if state == "complete":
            put_pending(table, 3)
            store.cache("gram", "key", np.eye(2))
        for row in (2, 0, 8, 9, 5, 10, 7) if state == "half" else ():
            table.put(row, values([row]))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store in each state; what is drawn must not depend on names and lengths that differ between two of them."""
    root = tmp_path_factory.mktemp("made")
    for state in STATES:
        make(str(root / state), state)
    return root


# What is done to the files.


def plain(path):
    return [name for name in files_below(path) if stat.S_ISREG(os.lstat(name).st_mode)]


def begin(name):
    with open(name, "rb") as file:  # which may be giant by now
        return file.read(1 << 20)


def drawn(path, pick):
    """A file, each kind being as likely as any other."""
    kinds = {}
    for name in plain(path):
        inside, suffix = os.path.basename(os.path.dirname(name)), name.rpartition(".")[2]
        kinds.setdefault(inside if inside[0] == "." else suffix == "json", []).append(name)
    return pick.choice(kinds[pick.choice(sorted(kinds, key=str))])


def replace(name, whole):
    if os.path.isdir(name) and not os.path.islink(name):
        shutil.rmtree(name)
    else:
        os.unlink(name)
    if whole is not None:
        overwrite(name, whole)


def edited(whole, pick):
    """JSON with one value, somewhere inside, replaced or removed."""
    document, places = json.loads(whole), []

    def visit(value):
        for key in (
            [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        ):
            places.append((value, key))
            visit(value[key])

    visit(document)
    parent, key = pick.choice(places)
    if pick.random() < 0.2:
        del parent[key]
    else:
        parent[key] = pick.choice(STRANGE)
    return json.dumps(document).encode()


def other_bytes(path, pick):
    name = drawn(path, pick)
    whole, piece = begin(name), pick.randbytes(pick.choice([1, 4, 24, 512]))
    at = pick.randrange(len(whole) + 1)
    others = [whole[:at] + piece + whole[at + cut :] for cut in (0, len(piece))]
    replace(name, pick.choice([*others, whole * 2, *map(begin, plain(path))]))


def craft(path, pick):
    """Nonsense under checksums that are right."""
    name = drawn(path, pick)
    whole = begin(name)
    if name.endswith("zarr.json") or ".tables" in name:
        deep = whole.replace(b"null", b"[" * 9999 + b"]" * 9999, 1)
        changed = pick.choice([edited(whole, pick), b"[" * 100_000, deep])
    elif ".commits" in name:
        bodies = [line.rpartition(b"\t")[0] for line in whole.splitlines()]
        bodies = [pick.choice([edited(body, pick), b"[" * 100_000, b"7", b"{}", body]) for body in bodies]
        changed = b"".join(body + b"\t%08x\n" % crc32c(body) for body in bodies)
    elif name.endswith(".log"):
        changed = whole.ljust(64, b"\0")[:64]
        for _ in range(5):
            body = struct.pack("<QIII", *(pick.choice([0, 1, 2**31, 2**32 - 1]) for _ in range(4)))
            changed += body + struct.pack("<I", crc32c(body, start=pick.choice([0, row_seed()])))
    elif ".cache" in name:
        size = 8 + int.from_bytes(whole[:8], "little")
        dtype = pick.choice([b'"O"', b'"F99"', b'"F32"', b"__import__('os')", b"(" * 90])
        given = whole[8:size]
        shape = re.sub(rb"\[\d+,\d+\]", b"[-1,%d]" % 2**70, given, count=1)
        header = pick.choice([given.replace(b'"F64"', dtype, 1), shape, b"[" * 100_000, given[:20]])
        changed = len(header).to_bytes(8, "little") + header + whole[size:]
    else:
        name = re.sub(r"c\.\d+", f"c.{pick.choice([0, 1, 7, 10**6, 10**17])}", name)
        changed = whole
    overwrite(name, changed)


def lie(path, pick):
    """Say another size in the table and in its arrays, so that they agree."""
    axis = pick.randrange(2)
    size = pick.choice([1, 2, 2**20, 2**26, 2**27, 2**31, 2**32, 2**40, 10**18, 10**30])

    def change(document):
        if "shape" in document:
            grid = document["chunk_grid"]["configuration"]["chunk_shape"]
            (document["shape"], grid)[axis][0] = size
        else:
            document["attributes"]["trak_lite"][("num_rows", "chunk_rows")[axis]] = size

    for where in ("", "features", "q", "w"):
        edit_document(folder(path, where, "zarr.json"), change)


def no_file(path, pick):
    """Put a giant file, a folder, a pipe, a link or nothing in the place of a file or folder."""
    names = plain(path)
    name = pick.choice(names + sorted({os.path.dirname(name) for name in names} - {path}))
    how = pick.choice(["giant", "folder", "pipe", "endless", "link", "nothing"])
    if how == "giant" and name in names:
        os.truncate(name, 1 << 40)
    elif how == "link":
        link_away(name, f"{path}-{pick.random()}")
    else:
        replace(name, None)
        put = {"folder": os.mkdir, "pipe": os.mkfifo, "endless": lambda at: os.symlink("/dev/zero", at)}
        put.get(how, lambda at: None)(name)


WAYS = {
    "one byte or all": lambda path, pick: do_harm(
        drawn(path, pick), pick.choice(("flip", "cut", "remove", "zero", "append")), pick.randrange(2**16)
    ),
    "other bytes": other_bytes,
    "craft": craft,
    "exchange": lambda path, pick: exchange(*pick.sample(plain(path), 2)),
    "no file": no_file,
    "lie": lie,
}
UNFIT = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError)
"""What a way runs into where another one was before it."""


# What must hold.


def look(path, done, whole):
    """Read all there is; return the errors that refuse something. What is read is right, and was put before."""
    refusals = []

    def probe(read):
        try:
            return read()
        except IncompleteStoreError:
            return None  # pending rows are no damage
        except StoreError as error:
            refusals.append(error)
            return None

    store = probe(lambda: ZarrFeatureStore.open(path))
    with store or contextlib.nullcontext():
        table = store and (probe(store.table_names), probe(lambda: store.open_table(NAME)))[1]
        if table is None:
            return refusals
        assert store.cached("gram", "key") is None or (store.cached("gram", "key") == np.eye(2)).all()
        if whole:
            assert (table.spec.num_rows, table.spec.chunk_rows) == (SPEC.num_rows, SPEC.chunk_rows)
        seen = probe(table.done)
        for chunk in probe(table.committed_chunks) or ():
            for column in table.spec.columns:
                read = probe(lambda: table.read_chunk(chunk, column.name))  # noqa: B023
                if whole and read is not None:
                    np.testing.assert_array_equal(read, values(range(*table.chunk_range(chunk)))[column.name])
        for read in (table.content_key, lambda: table.read_done(0), lambda: table.read("features")):
            probe(read)
        if whole and seen is not None:
            assert not (seen & ~done).any()
            rows = np.flatnonzero(seen)
            for column in table.spec.columns if len(rows) else ():
                read = probe(lambda: table.read_rows(column.name, rows))  # noqa: B023
                assert read is None or read.tobytes() == values(rows)[column.name].tobytes()
    return refusals


def is_sound(path):
    try:
        report = check_store(path)
    except StoreError:
        return False
    return report.ok and bool(str(report))


def resumes(path):
    """Run to the end and compare every row; return whether the store lets itself be resumed."""
    try:
        put_all(path)
        check_all(path)
    except StoreError:
        return False
    return True


def hung(number, frame):
    raise TimeoutError(f"more than {SECONDS} seconds")


@contextlib.contextmanager
def bounded():
    """A block that may take 20 seconds and half a gibibyte beside what is in use."""
    before, limit = signal.signal(signal.SIGALRM, hung), resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(content("/proc/self/statm").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 29), limit[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[*HealthCheck],
)
@given(
    state=st.sampled_from(STATES),
    ways=st.lists(st.sampled_from([*WAYS]), min_size=1, max_size=3),
    pick=st.randoms(use_true_random=False),
)
def test_a_harmed_store_gives_right_rows_or_a_named_error(made, tmp_path_factory, state, ways, pick):
    """For a reader, a check, a run that goes on, and after a repair; where sizes are lies, no row is compared."""
    root = tmp_path_factory.mktemp("harmed")
    path, whole = str(root / "run.zarr"), "lie" not in ways
    shutil.copytree(made / state, path)
    with ZarrFeatureStore.open(path) as store:
        done = store.open_table(NAME).done()
    for way in ways:
        with contextlib.suppress(*UNFIT):
            WAYS[way](path, pick)
    with bounded():
        refusals = look(path, done, whole)
        # Of a table that is gone as a whole nothing tells.
        damaged = [error for error in refusals if not isinstance(error, MissingStoreError)]
        assert all("run.zarr" in str(error) for error in refusals)
        assert not (damaged and is_sound(path)), damaged
        if whole and not resumes(path):
            with contextlib.suppress(StoreError):
                check_store(path, repair=True)
                assert check_store(path, repair=True).set_aside == ()
            look(path, done | True, whole)  # any row may have been put before the run was refused
            resumes(path)
    shutil.rmtree(root)
