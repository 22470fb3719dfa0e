"""Small tables, values that tell their row, places of every kind, and what a test does to the files of a store.

The layout on disk (names of files, checksums over records) is known here and nowhere else in this folder.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import struct
from dataclasses import replace
from unittest import mock

import failpoints
import numpy as np
import pytest

from trak_lite.core.checksums import crc32c
from trak_lite.errors import StoreError
from trak_lite.store import (
    AbstractObjects,
    Column,
    Manifest,
    MemoryFeatureStore,
    RemotePlace,
    TableSpec,
    ZarrFeatureStore,
    check_store,
    create_store,
    open_store,
)
from trak_lite.store.disk.documents import identity_of, sealed, table_documents
from trak_lite.store.disk.listing import entry_name

__all__ = ["crc32c", "entry_name", "failpoints"]

MANIFEST = Manifest({"seed": 0, "projector": {"kind": "rademacher"}})
NAME = "targets/test/ckpt-0"
Q, W = (Column(name, None, "float32") for name in "qw")
SPEC = TableSpec(11, (Column("features", 3, "float16"), Q, W), 4, {"checkpoint": "abc"})
PACKED = TableSpec(11, (Column("features", 5, "int4"), Q), 4)
LONG = TableSpec(64, (Column("features", 8, "float16"), Q), 8)


def raises(error, match, use, *given, **named):
    """A call is refused, in these words."""
    with pytest.raises(error, match=match):
        use(*given, **named)


def sized(num_rows, spec=SPEC):
    return replace(spec, num_rows=num_rows)


def values(rows, spec=SPEC, attempt=0):
    """Values that no other row and no other of ten attempts has, exact in float16."""
    rows = np.asarray(rows, dtype=np.int64)
    made = {}
    for place, column in enumerate(spec.columns):
        shape = (len(rows),) if column.width is None else (len(rows), column.width)
        ramp = np.arange(np.prod(shape[1:], dtype=int)).reshape(shape[1:])
        first = (1 + rows.reshape(-1, *[1] * (len(shape) - 1))) * 8 + 192 * (attempt % 10)
        made[column.name] = (first + ramp + place / 4).astype(column.value_dtype)
    return made


def open_for_writing(path, spec=SPEC):
    store = ZarrFeatureStore.create(path, MANIFEST)
    return store, store.create_table(NAME, spec)


@contextlib.contextmanager
def writing(path, spec=SPEC):
    """The table, open for writing; closed at the end, so that the test can look at the disk alone."""
    store, table = open_for_writing(path, spec)
    with store:
        yield table


def make(path, rows=(), spec=SPEC):
    """A table that is closed, with these rows of one put."""
    with writing(path, spec) as table:
        if len(rows):
            table.put(rows, values(rows, spec))


def grow(path, num_rows):
    with ZarrFeatureStore.open(path, "r+") as store:
        store.grow_table(NAME, num_rows)


@contextlib.contextmanager
def reading(path):
    with ZarrFeatureStore.open(path, "r") as store:
        yield store.open_table(NAME)


def remote_place(folder, staging="staging", objects="objects"):
    """A folder that obstore takes for a bucket; another staging is another machine."""
    obstore = pytest.importorskip("obstore.store", reason="obstore is not installed (extra 'remote')")
    beside = f"{folder}-{staging}" if objects == "." else f"{folder}/{staging}"
    held = obstore.LocalStore(os.path.normpath(f"{folder}/{objects}"), mkdir=True)
    return RemotePlace(held, staging=beside)


@contextlib.contextmanager
def open_remote(folder, mode="r+", staging="staging"):
    place = remote_place(folder, staging)
    with create_store(place, MANIFEST) if mode == "r+" else open_store(place) as store:
        yield store, store.create_table(NAME, SPEC) if mode == "r+" else store.open_table(NAME)


def put_pending(table, batch=2, acknowledge=list):
    """Put what is pending, some rows at a time; ``acknowledge(rows)`` is called when ``put`` has returned."""
    pending = table.pending()
    for start in range(0, len(pending), batch):
        rows = pending[start : start + batch]
        table.put(rows, values(rows, table.spec))
        acknowledge(rows.tolist())


def check_rows(table, expected=values):
    assert table.complete
    for name, array in expected(range(table.spec.num_rows), table.spec).items():
        np.testing.assert_array_equal(table.read(name), array)


def check_committed(table):
    for chunk in table.committed_chunks():
        for name, expected in values(range(*table.chunk_range(chunk)), table.spec).items():
            np.testing.assert_array_equal(table.read_chunk(chunk, name), expected)


def check_all(path, spec=SPEC):
    """Every row is there and right, and nothing is left over in the stage."""
    with reading(path) as table:
        assert table.spec == spec
        check_rows(table)
    assert os.listdir(folder(path, "features", ".stage")) == []


def finish(path, spec=SPEC, batch=16):
    with writing(path, spec) as table:
        put_pending(table, batch)
    check_all(path, spec)


def done_rows(path):
    with reading(path) as table:
        return np.flatnonzero(table.done()).tolist()


# Files.


def path_of(fd):
    return os.readlink(f"/proc/self/fd/{fd}")


def folder(path, *parts):
    return os.path.join(path, NAME, *parts)


def row_log(path, chunk):
    return folder(path, "features", ".stage", f"{chunk}.rows")


def staged(path, chunk, column):
    return folder(path, "features", ".stage", f"{chunk}-{column}")


def commit_log(path):
    (name,) = os.listdir(folder(path, "features", ".commits"))
    return folder(path, "features", ".commits", name)


def files_below(path):
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names)


def snapshot(path):
    """Every file below a folder with its bytes; folders with ``None``."""
    found = {os.path.join(parent, name): None for parent, names, _ in os.walk(path) for name in names}
    return found | {name: content(name) for name in files_below(path)}


def log_mark(chunk):
    record = table_documents(NAME, MANIFEST.digest(), SPEC, {})[""]["attributes"]["trak_lite"]
    return hashlib.sha256(f"{identity_of(record)}/{chunk}".encode()).digest()[:8]


def frame(mark, runs, rows):
    """The frame of a row log for these rows, under checksums that are right."""
    head = mark + struct.pack("<II", len(runs), crc32c(rows))
    head += b"".join(struct.pack("<II", *run) for run in runs)
    return head + struct.pack("<I", crc32c(head)) + rows


def frames(path, chunk):
    """Where each frame of a row log begins, where its rows begin, and how many they are."""
    log, found, place = content(row_log(path, chunk)), [], 64
    mark = log[64:72]
    while (place := log.find(mark, place)) >= 0:
        (runs,) = struct.unpack_from("<I", log, place + 8)
        counts = struct.unpack_from(f"<{2 * runs}I", log, place + 16)[1::2]
        found.append((place, place + 16 + 8 * runs + 4, sum(counts)))
        place += 1
    return found


def flip_row(path, chunk, array, put=0, row=0):
    """Flip a bit of a row in the frame of one put."""
    _, place, count = frames(path, chunk)[put]
    for each in SPEC.arrays:
        if each.name == array:
            return flip(row_log(path, chunk), place + row * each.row_bytes)
        place += count * each.row_bytes
    raise KeyError(array)


def overwrite(path, content):
    with open(path, "wb") as file:
        file.write(content)


def content(path):
    with open(path, "rb") as file:
        return file.read()


def edit_document(path, change):
    document = json.loads(begin(path))
    change(document)
    record = document["attributes"].get("trak_lite", {})
    if "checksum" in record:
        document["attributes"]["trak_lite"] = sealed(record)
    overwrite(path, json.dumps(document).encode())


def edit(path, change):
    """Change what trak_lite records in a ``zarr.json``, under a checksum that is right."""

    def changed(document):
        change(record := document["attributes"]["trak_lite"])
        record["checksum"] = "to be made"

    edit_document(path, changed)


def flipped(data, byte, bit):
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def flip(path, byte=0):
    overwrite(path, flipped(content(path), byte, 3))


def exchange(one, other):
    os.rename(one, f"{one}-aside")
    os.rename(other, one)
    os.rename(f"{one}-aside", other)


def copy_over(one, other):
    shutil.rmtree(other) if os.path.isdir(other) else os.unlink(other)
    shutil.copytree(one, other) if os.path.isdir(one) else shutil.copyfile(one, other)


def link_away(path, outside):
    """Put a link in the place of a file or folder, which is moved away."""
    shutil.move(path, outside)
    os.symlink(outside, path)


# What strangers and broken disks do to files, drawn at random: bytes, checksums, sizes and kinds of files.

STRANGE = (None, True, -1, 0, 1, 2, 3, 10**18, 10**30, 1.5, "", "x", "../x", "\ud800", "c" * 300)
STRANGE += ([], [[]], [1], {}, {"a": 1}, float("nan"), float("inf"))


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


def put_in_place(name, whole):
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
        keys = {dict: list, list: lambda one: range(len(one))}.get(type(value), lambda _: ())
        for key in keys(value):
            places.append((value, key))
            visit(value[key])

    visit(document)
    parent, key = pick.choice(places)
    if pick.random() < 0.2:
        del parent[key]
    else:
        parent[key] = pick.choice(STRANGE)
    return json.dumps(document).encode()


def one_byte_or_all(path, pick):
    name, harm = drawn(path, pick), pick.choice(["flip", "cut", "remove", "zero", "append"])
    number, whole = pick.getrandbits(16), content(name)
    at = number % max(len(whole), 1)
    if harm == "remove":
        os.unlink(name)
    elif harm == "flip" and whole:
        overwrite(name, flipped(whole, at, number % 8))
    else:
        changed = {"cut": whole[:at], "zero": bytes(len(whole))}.get(harm, whole + b"x" * (1 + number % 99))
        overwrite(name, changed)


def other_bytes(path, pick):
    name = drawn(path, pick)
    whole, piece = begin(name), pick.randbytes(pick.choice([1, 4, 24, 512]))
    at = pick.randrange(len(whole) + 1)
    others = [whole[:at] + piece + whole[at + cut :] for cut in (0, len(piece))]
    put_in_place(name, pick.choice([*others, whole * 2, *map(begin, plain(path))]))


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
    elif name.endswith(".rows"):
        changed = whole.ljust(64, b"\0")[:64]
        for _ in range(5):
            ends = (0, 1, 2**31, 2**32 - 1)
            runs = [(pick.choice(ends), pick.choice(ends)) for _ in range(pick.randrange(4))]
            mark, size = log_mark(int(os.path.basename(name).partition(".")[0])), pick.choice([0, 14, 28])
            if sum(count for _, count in runs) * SPEC.row_bytes == size:
                runs.append((2**31, 1))  # otherwise a forged row, which no checksum tells from a true one
            changed += frame(mark, runs, pick.randbytes(size))
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


def say_sizes(path, **sizes):
    """Say another ``num_rows`` or ``chunk_rows`` in the table and in its arrays, so that they agree."""

    def change(document):
        if "shape" in document:
            grid = document["chunk_grid"]["configuration"]["chunk_shape"]
            for shape, name in ((document["shape"], "num_rows"), (grid, "chunk_rows")):
                shape[0] = sizes.get(name, shape[0])
        else:
            document["attributes"]["trak_lite"].update(sizes)

    for where in ("", "features", "q", "w"):
        edit_document(folder(path, where, "zarr.json"), change)


def lie(path, pick):
    size = pick.choice([1, 2, 2**20, 2**26, 2**27, 2**31, 2**32, 2**40, 10**18, 10**30])
    say_sizes(path, **{pick.choice(["num_rows", "chunk_rows"]): size})


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
        put_in_place(name, None)
        put = {"folder": os.mkdir, "pipe": os.mkfifo, "endless": lambda at: os.symlink("/dev/zero", at)}
        put.get(how, lambda at: None)(name)


def exchange_some(path, pick):
    """Two files change places, often of one kind: of two tables, two chunks, two columns."""
    names = plain(path)
    one = pick.choice(names)
    alike = [name for name in names if re.sub(r"\d+", "0", name) == re.sub(r"\d+", "0", one)]
    other = pick.choice(pick.choice([names, alike]))
    if other != one:
        exchange(one, other)


WAYS = {
    "one byte or all": one_byte_or_all,
    "other bytes": other_bytes,
    "craft": craft,
    "exchange": exchange_some,
    "no file": no_file,
    "lie": lie,
}
UNFIT = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError)
"""What a way runs into where another one was before it."""


# Faults of the system.


@contextlib.contextmanager
def failing_call(name, count, *errors):
    """Make calls of a function in ``os`` fail, from the ``count``-th on; yield the list of errors that did not come.

    Folders that are opened on the way to a file below are not counted: there are many, and all are alike.
    """
    call, seen, left = getattr(os, name), itertools.count(1), list(errors)

    def fail(*arguments, **keywords):
        if left and not (name == "open" and arguments[1] & os.O_PATH) and next(seen) >= count:
            raise left.pop(0)
        return call(*arguments, **keywords)

    with mock.patch.object(os, name, fail):
        yield left


@contextlib.contextmanager
def failing_for(name, which, error):
    """Make those calls of a function in ``os`` fail whose first argument is as ``which`` says."""
    real = getattr(os, name)

    def call(first, *more, **named):
        if which(first):
            raise error
        return real(first, *more, **named)

    with mock.patch.object(os, name, call):
        yield


class Killed(BaseException):
    """The process is gone; what the disk held at that moment is all that is left."""


@contextlib.contextmanager
def dying(failpoint, last_look):
    """End what is done at a failpoint; ``last_look()`` keeps what is on the disk then."""

    def die(pid, number):
        last_look()
        raise Killed

    with mock.patch.dict(os.environ, {"TRAK_LITE_FAILPOINT": failpoint}), mock.patch.object(os, "kill", die):
        yield


def allow_reading_alone(monkeypatch):
    real = os.open

    def only_reading(name, flags, *mode, **keywords):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        return real(name, flags, *mode, **keywords)

    def forbidden(*arguments, **keywords):
        raise AssertionError(arguments)

    monkeypatch.setattr(os, "open", only_reading)
    for name in ("mkdir", "rename", "unlink", "pwrite", "truncate", "ftruncate", "fsync", "posix_fallocate"):
        monkeypatch.setattr(os, name, forbidden)
    monkeypatch.setattr("fcntl.flock", forbidden)


class Bucket(AbstractObjects):
    """Objects in a dict, with a hook before and after each request, and a listing that can be held back."""

    url = "bucket://run.zarr"

    def __init__(self, kept=()):
        self.kept = dict(kept)
        self.before = self.after = lambda request, key: None
        self.listing = None
        self.requests = []

    def _asked(self, request, key):
        self.requests.append((request, key))
        self.before(request, key)

    def get(self, key):
        self._asked("get", key)
        return self.kept.get(key)

    def put(self, key, content):
        self._asked("put", key)
        self.kept[key] = bytes(content)
        self.after("put", key)

    def create(self, key, content):
        self._asked("create", key)
        if key in self.kept:
            return False
        self.kept[key] = bytes(content)
        self.after("create", key)
        return True

    def sizes(self, folder):
        kept = self.kept if self.listing is None else self.listing
        start = f"{folder}/" if folder else ""
        return {key: len(content) for key, content in kept.items() if key.startswith(start)}

    def folders(self, folder):
        start = f"{folder}/" if folder else ""
        below = [key[len(start) :] for key in self.kept if key.startswith(start)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def delete(self, key):
        self._asked("delete", key)
        self.kept.pop(key, None)

    @contextlib.contextmanager
    def failing(self, request, key, moment="before"):
        """Let a request of one object fail, before or after it has done its work."""

        def fail(seen, at):
            if (seen, at) == (request, key):
                raise StoreError("the line is dead")

        setattr(self, moment, fail)
        yield
        setattr(self, moment, lambda request, key: None)


# Places of every kind, as one who uses and copies them sees them.


class Folder:
    steps = (*failpoints.FAILPOINTS, *failpoints.LIST_FAILPOINTS, *failpoints.GROWTH_FAILPOINTS)
    steps += (*failpoints.DROP_FAILPOINTS, *failpoints.ENTRY_FAILPOINTS)
    grows = repairs = True
    ways = tuple(WAYS)
    bucket = None

    def __init__(self, root):
        self.root = root
        self.place = self.files = os.path.join(root, "run.zarr")

    def create(self):
        return create_store(self.place, MANIFEST)

    def read(self):
        return open_store(self.place)

    def check(self, *, repair=False):
        return check_store(self.place, repair=repair)

    def copied(self, root):
        shutil.copytree(self.root, root, symlinks=True)
        return type(self)(root)


class Objects(Folder):
    """A store in a folder that obstore takes for a bucket; both writers stage on one machine."""

    steps = (*failpoints.FAILPOINTS, *failpoints.REMOTE_FAILPOINTS, *failpoints.ENTRY_FAILPOINTS)
    grows = repairs = False
    ways = ("one byte or all", "other bytes", "exchange")

    def __init__(self, root):
        self.root = root
        self.files = os.path.join(root, "objects")
        self.place = remote_place(root)

    def copied(self, root):
        """The name of the staging folder follows from the address."""
        copy = super().copied(root)
        name = os.path.basename(self.place.staging_root(MANIFEST))
        if os.path.exists(f"{root}/staging/{name}"):
            os.rename(f"{root}/staging/{name}", copy.place.staging_root(MANIFEST))
        return copy


class Faulty(Objects):
    """A store in a dict, of which any request may fail."""

    files = None

    def __init__(self, root, kept=()):
        self.root = root
        self.bucket = Bucket(kept)
        self.place = RemotePlace(self.bucket, staging=os.path.join(root, "staging"))

    def copied(self, root):
        shutil.copytree(self.root, root)
        return Faulty(root, self.bucket.kept)


class Memory(Folder):
    """A store in memory: nothing can be killed or harmed."""

    steps, repairs, files = (), False, None

    def __init__(self, root):
        self.root = root
        self.store = MemoryFeatureStore(MANIFEST)

    def create(self):
        return self.store.reopen("r+")

    def read(self):
        return self.store.reopen("r")
