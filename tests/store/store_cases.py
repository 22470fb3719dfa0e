"""A small table, its values as a function of the row, and what a test wants to know of a folder."""

import contextlib
import json
import os

import numpy as np

from trak_lite.store import Column, Manifest, RemotePlace, TableSpec, ZarrFeatureStore
from trak_lite.store.disk.documents import sealed
from trak_lite.store.remote.remote_store import RemoteFeatureStore

MANIFEST = Manifest({"seed": 0, "projector": {"kind": "rademacher"}})
NAME = "targets/test/ckpt-0"
SPEC = TableSpec(
    num_rows=11,
    columns=(Column("features", 3, "float16"), Column("q", None, "float32"), Column("w", None, "float32")),
    chunk_rows=4,
    fingerprint={"checkpoint": "abc"},
)
PACKED = TableSpec(11, (Column("features", 5, "int4"), Column("q", None, "float32")), 4)
LONG = TableSpec(256, (Column("features", 8, "float16"), Column("q", None, "float32")), 8)


def values(rows, spec=SPEC):
    """Values that no other row has, exact in float16."""
    rows = np.asarray(rows, dtype=np.int64)
    made = {}
    for place, column in enumerate(spec.columns):
        shape = (len(rows),) if column.width is None else (len(rows), column.width)
        ramp = np.arange(np.prod(shape[1:], dtype=int)).reshape(shape[1:])
        made[column.name] = ((1 + rows.reshape(-1, *[1] * (len(shape) - 1))) * 8 + ramp + place / 4).astype(
            column.value_dtype
        )
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


@contextlib.contextmanager
def reading(path):
    with ZarrFeatureStore.open(path, "r") as store:
        yield store.open_table(NAME)


@contextlib.contextmanager
def open_remote(folder, mode="r+", staging="staging"):
    """A store and its table below a folder that obstore takes for a bucket; another staging is another machine."""
    from obstore.store import LocalStore

    place = RemotePlace(LocalStore(f"{folder}/objects", mkdir=True), staging=f"{folder}/{staging}")
    with (
        RemoteFeatureStore.create(place, MANIFEST)
        if mode == "r+"
        else RemoteFeatureStore.open(place) as store
    ):
        yield store, store.create_table(NAME, SPEC) if mode == "r+" else store.open_table(NAME)


def check_all(path, spec=SPEC):
    """Every row is there and right, and nothing is left over in the stage."""
    with reading(path) as table:
        assert table.complete
        for name, expected in values(range(spec.num_rows), spec).items():
            np.testing.assert_array_equal(table.read(name), expected)
    assert os.listdir(folder(path, "features", ".stage")) == []


def finish(path, spec=SPEC, batch=2):
    """Resume: put what is pending, and check every row."""
    with writing(path, spec) as table:
        pending = table.pending()
        for start in range(0, len(pending), batch):
            rows = pending[start : start + batch]
            table.put(rows, values(rows, spec))
    check_all(path, spec)


def folder(path, *parts):
    return os.path.join(path, NAME, *parts)


def row_log(path, chunk):
    return folder(path, "features", ".stage", f"{chunk}.log")


def staged(path, chunk, column):
    return folder(path, "features", ".stage", f"{chunk}-{column}")


def commit_log(path):
    (name,) = os.listdir(folder(path, "features", ".commits"))
    return folder(path, "features", ".commits", name)


def snapshot(path):
    """Every file below a folder with its bytes."""
    found = {}
    for parent, folders, files in os.walk(path):
        found.update({os.path.join(parent, name): None for name in folders})
        for name in files:
            with open(os.path.join(parent, name), "rb") as file:
                found[os.path.join(parent, name)] = file.read()
    return found


def overwrite(path, content):
    with open(path, "wb") as file:
        file.write(content)


def content(path):
    with open(path, "rb") as file:
        return file.read()


def edit(path, change):
    """Change what trak_lite records in a ``zarr.json``, under a checksum that is right."""
    document = json.loads(content(path))
    change(document["attributes"]["trak_lite"])
    document["attributes"]["trak_lite"] = sealed(document["attributes"]["trak_lite"])
    overwrite(path, json.dumps(document).encode())


def flipped(data, byte, bit):
    """The bytes with one bit turned over."""
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def flip(path, byte=0):
    """Turn one bit of a file over."""
    overwrite(path, flipped(content(path), byte, 3))


def done_rows(path):
    with reading(path) as table:
        return np.flatnonzero(table.done()).tolist()


def allow_reading_alone(monkeypatch):
    """Let every call fail that writes to a disk or takes a lock."""
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


def on_the_way(call, *arguments):
    """Whether a call opens a folder only to reach a file below it: of these there are many, and all are alike."""
    return call.__name__ == "open" and bool(arguments[1] & os.O_PATH)
