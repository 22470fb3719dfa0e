"""Single bits of the metadata, records and kept arrays of a finished store: is a flip noticed, or harmless?

A reader of a changed store is refused by name or sees exactly the right rows, settings and tables, and ``check_store``
names what a reader refuses.
"""

import dataclasses
import os
import zlib

import numpy as np
from fault_cases import Violated
from fault_damage import files_in, kind_of

from trak_lite.errors import IncompleteStoreError, StoreError
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore, check_store

METHOD = {"name": "TRAK", "damping": 0.00390625}
MANIFEST = Manifest({"seed": 0, "dataset": {"num_rows": 11, "digest": "4f"}}, {"method": METHOD})
_ROWS = (Column("features", 3, "float16"), Column("q", None, "float32"))
SPECS = {
    "ckpt-0": TableSpec(6, (Column("features", 3, "int8"), _ROWS[1]), 4, {"weights": "a0", "model_id": 0}),
    "targets/one/ckpt-0": TableSpec(6, _ROWS, 4, {"weights": "a0", "targets": "71"}),
}
"""Every kind of metadata in few bytes: each of their bits is flipped."""


def build(root):
    """Make a finished store, of values that no other row and no other table has."""
    with ZarrFeatureStore.create(root, MANIFEST) as store:
        for path, spec in SPECS.items():
            draw = np.random.default_rng(zlib.crc32(path.encode())).standard_normal
            shapes = {column.name: (spec.num_rows, *filter(None, [column.width])) for column in spec.columns}
            values = {name: draw(shape).astype("f4") for name, shape in shapes.items()}
            store.create_table(path, spec, {"name": f"of {path}"}).put(0, values)
        store.cache("gram", "key", np.eye(2))


def contents(root):
    """Return everything that a reader of a store is told.

    Raises:
        StoreError: If it is refused something.
    """
    with ZarrFeatureStore.open(root) as store:
        told = {"": (store.manifest.fingerprint, store.manifest.made_with, store.table_names())}
        for path in store.table_names():
            table = store.open_table(path)
            rows = [table.read(column.name).tobytes() for column in table.spec.columns]
            told[path] = (dataclasses.astuple(table.spec), store.attributes(path), table.content_key(), rows)
        gram = store.cached("gram", "key")  # where it is none, it is computed again
        told["gram"] = (np.eye(2) if gram is None else gram).tobytes()
        return told


def outcome(root, right):
    """Return what becomes of a changed store.

    Raises:
        Violated: If a reader is told something else than the right contents, or is refused and verifying finds nothing.
    """
    incomplete, refused = False, None
    try:
        told = contents(root)
    except StoreError as error:
        refused, incomplete = error, isinstance(error, IncompleteStoreError)
    else:
        if told != right:
            differing = [key for key in right.keys() | told.keys() if told.get(key) != right.get(key)]
            raise Violated(f"a reader is told other contents without a word: {differing}", wrong=1)
    try:
        named = bool(check_store(root).findings)
    except StoreError:
        named = True
    if refused is not None and not incomplete and not named:
        raise Violated(f"verifying finds nothing, and a reader is refused: {refused}")
    if incomplete:
        return "pending"
    return "named" if named or refused is not None else "harmless"


def try_flip(root, right, path, byte, bit):
    """Flip one bit, and return what becomes of the store; the bit is flipped back."""
    with open(f"{root}/{path}", "rb") as file:
        before = file.read()
    changed = bytearray(before)
    changed[byte] ^= 1 << bit
    try:
        with open(f"{root}/{path}", "wb") as file:
            file.write(changed)
        return outcome(root, right)
    finally:
        with open(f"{root}/{path}", "wb") as file:
            file.write(before)


def flip_many(folder, totals, pick=None, count=None):
    """Flip every bit of all metadata and records, or as many as are to be drawn; count the outcomes."""
    root = os.path.join(folder, "sound.zarr")
    build(root)
    right, broken = contents(root), []
    if check_store(root).findings:
        raise Violated("a new store has findings")
    names = [path for path in files_in(root) if kind_of(path) != "chunk"]
    sizes = {path: os.path.getsize(f"{root}/{path}") for path in names}
    chosen = [(path, byte, bit) for path in names for byte in range(sizes[path]) for bit in range(8)]
    for path, byte, bit in chosen if count is None else pick.sample(chosen, count):
        what = f"bit flips of {kind_of(path)}"
        try:
            found = try_flip(root, right, path, byte, bit)
        except Exception as error:  # whatever is no StoreError is what is looked for
            broken.append(f"{path}, byte {byte}, bit {bit}: {type(error).__name__}: {error}")
            found = "BROKEN"
        totals[what] += 1
        totals[f"{what}: {found}"] += 1
    if broken:
        raise Violated(f"{len(broken)} flips: " + "\n".join(broken[:20]), wrong=len(broken))
