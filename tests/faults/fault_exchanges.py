"""Metadata and whole pieces of a finished store, changed in any way: is it noticed, or harmless?

A small store with two checkpoints, a target set, two score tables and kept gram matrices. A reader of a changed one is
refused by name or sees exactly the right rows, settings and tables, and ``check_store`` names what a reader refuses.
"""

import contextlib
import dataclasses
import os
import shutil

import numpy as np
from fault_cases import Violated
from fault_damage import edited_json, files_in, kind_of

from trak_lite.errors import IncompleteStoreError, StoreError
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore, check_store
from trak_lite.store._checksums import crc32c

METHOD = {"name": "TRAK", "damping": 0.00390625}
MANIFEST = Manifest({"seed": 0, "dataset": {"num_rows": 11, "digest": "4f"}}, {"method": METHOD})
_ROWS = (Column("features", 3, "float16"), Column("q", None, "float32"), Column("w", None, "float32"))
_SCORES = (Column("scores", 2, "float32"),)
SPECS = {
    "ckpt-0": TableSpec(11, _ROWS, 4, {"weights": "a0", "model_id": 0}),
    "ckpt-1": TableSpec(11, _ROWS, 4, {"weights": "a1", "model_id": 1}),
    "packed": TableSpec(11, (Column("features", 3, "int4"),), 4),
    "targets/one/ckpt-0": TableSpec(6, _ROWS[:2], 4, {"weights": "a0", "targets": "71"}),
    "targets/one/ckpt-1": TableSpec(6, _ROWS[:2], 4, {"weights": "a1", "targets": "71"}),
    "scores/one": TableSpec(11, _SCORES, 4, {"targets": "71", "method": METHOD}),
    "scores/two": TableSpec(11, _SCORES, 4, {"targets": "72", "method": METHOD}),
}
FEW = {
    "ckpt-0": TableSpec(6, (Column("features", 3, "int8"), _ROWS[1]), 4, {"weights": "a0", "model_id": 0}),
    "targets/one/ckpt-0": SPECS["targets/one/ckpt-0"],
}
"""Every kind of metadata in few bytes: each of their bits is flipped."""
GRAMS = ("gram-ckpt-0", "gram-ckpt-1")


def rows_of(path, spec, rows):
    """Return values that no other row and no other table has."""
    draw = np.random.default_rng(crc32c(path.encode())).standard_normal
    whole = {
        column.name: draw((spec.num_rows, *([] if column.width is None else [column.width])))
        for column in spec.columns
    }
    return {name: array[rows].astype("f4") for name, array in whole.items()}


def build(root, specs):
    """Make a store of these tables."""
    resume(root, specs)
    with ZarrFeatureStore.create(root, MANIFEST) as store:
        for number, name in enumerate(GRAMS):
            store.cache(name, f"key {number}", np.eye(2) + number)


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
        for number, name in enumerate(GRAMS):
            gram = store.cached(name, f"key {number}")  # where it is none, it is computed again
            told[name] = (np.eye(2) + number if gram is None else gram).tobytes()
        return told


def resume(root, specs):
    """Run to the end with the right rows, as the whole script again would."""
    with ZarrFeatureStore.create(root, MANIFEST) as store:
        for path, spec in specs.items():
            table = store.create_table(path, spec, {"name": f"of {path}"})
            pending = table.pending()
            if len(pending):
                table.put(pending, rows_of(path, spec, pending))


def outcome(root, right):
    """Return what becomes of a changed store.

    Raises:
        Violated: If a reader is told something else than the right contents, or is refused and verifying finds nothing.
    """
    incomplete = False
    try:
        told = contents(root)
    except StoreError as error:
        refused, incomplete = error, isinstance(error, IncompleteStoreError)
    else:
        refused = None
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


def flips(root):
    """Yield ``(path, byte, bit)`` of every bit of every file but the chunks."""
    for path in files_in(root):
        if kind_of(path) != "chunk":
            for byte in range(os.path.getsize(f"{root}/{path}")):
                for bit in range(8):
                    yield path, byte, bit


def try_flip(root, right, path, byte, bit):
    """Flip one bit, and return what becomes of the store; the bit is flipped back."""
    name = f"{root}/{path}"
    with open(name, "rb") as file:
        before = file.read()
    changed = bytearray(before)
    changed[byte] ^= 1 << bit
    try:
        with open(name, "wb") as file:
            file.write(changed)
        return outcome(root, right)
    finally:
        with open(name, "wb") as file:
            file.write(before)


def _places(root, pick, *, folders):
    """Return two paths of a store, mostly of the same name in different places."""
    below = [os.path.relpath(parent, root) for parent, _, _ in os.walk(root)][1:]
    found = below if folders else files_in(root)
    first = pick.choice(found)
    like = [path for path in found if os.path.basename(path) == os.path.basename(first) and path != first]
    second = pick.choice(like if like and pick.random() < 0.7 else found)
    return first, second


def exchange(root, pick):
    """Do one thing to files or folders of a store; return what."""
    folders = pick.random() < 0.6
    first, second = _places(root, pick, folders=folders)
    how = pick.choice(["exchange", "copy", "copy", "remove", "rename", "edit"])
    one, other, aside = f"{root}/{first}", f"{root}/{second}", f"{root}-aside"
    copy = shutil.copytree if folders else shutil.copyfile
    nested = f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")
    if how == "exchange" and not nested:
        os.rename(one, aside)
        os.rename(other, one)
        os.rename(aside, other)
    elif how == "copy" and not nested:
        copy(one, aside)
        shutil.rmtree(other) if folders else os.unlink(other)
        os.rename(aside, other)
    elif how == "rename":
        os.rename(one, f"{one}7")
    elif how == "edit" and not folders:
        with contextlib.suppress(ValueError), open(one, "rb+") as file:
            text, tab, _ = file.read().partition(b"\t")
            changed = edited_json(text, pick, (None, True, 0, 1, 2, "ckpt-1", "a1", [], {}))
            file.seek(0)
            file.truncate()
            file.write(changed + tab)
    elif how == "remove":
        shutil.rmtree(one) if folders else os.unlink(one)
    return f"{how} {first} {second}"


def try_exchange(folder, root, right, pick):
    """Change a copy of a store, and return what becomes of it, also after a run to the end."""
    changed = os.path.join(folder, "exchanged.zarr")
    shutil.copytree(root, changed)
    try:
        what = exchange(changed, pick)
        try:
            found = outcome(changed, right)
            with contextlib.suppress(StoreError):
                resume(changed, SPECS)
            outcome(changed, right)
        except Exception as error:
            error.add_note(what)
            raise
        return found
    finally:
        shutil.rmtree(changed)


def prepared(folder, specs):
    """Return the root of a new store and what a reader of it is told."""
    root = os.path.join(folder, "sound.zarr")
    build(root, specs)
    if check_store(root).findings:
        raise Violated("a new store has findings")
    return root, contents(root)


def tried(totals, found, what):
    """Count an outcome."""
    totals[what] += 1
    totals[f"{what}: {found}"] += 1


def flip_many(folder, totals, pick=None, count=None):
    """Flip every bit of all metadata and records, or as many as are to be drawn; count the outcomes."""
    root, right = prepared(folder, FEW)
    chosen = list(flips(root))
    if count is not None:
        chosen = pick.sample(chosen, count)
    broken = []
    for path, byte, bit in chosen:
        try:
            found = try_flip(root, right, path, byte, bit)
        except Exception as error:  # whatever is no StoreError is what is looked for
            broken.append(f"{path}, byte {byte}, bit {bit}: {type(error).__name__}: {error}")
            found = "BROKEN"
        tried(totals, found, f"bit flips of {kind_of(path)}")
    if broken:
        raise Violated(f"{len(broken)} of {len(chosen)} flips: " + "\n".join(broken[:20]), wrong=len(broken))


def exchange_many(folder, totals, pick, count):
    """Change files and folders in ``count`` drawn ways; count the outcomes."""
    root, right = prepared(folder, SPECS)
    for _ in range(count):
        tried(totals, try_exchange(folder, root, right, pick), "exchanges and edits")
