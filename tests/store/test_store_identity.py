"""Rows, records, entries and metadata belong to one table of one store: those of another are refused."""

import os
import shutil

import numpy as np
import pytest
import store_cases as cases
from late import Late
from store_cases import MANIFEST, SPEC, copy_over, exchange, flip, open_remote, overwrite, raises, values

from trak_lite.errors import CorruptStoreError
from trak_lite.store import Manifest, TableSpec, ZarrFeatureStore, check_store, create_store, open_store

zarr = Late("zarr")

ZERO, ONE = (TableSpec(11, SPEC.columns, 4, {"weights": digest}) for digest in ("a0", "a1"))
SPECS = {"ckpt-0": ZERO, "ckpt-1": ONE, "scores/one": ZERO, "scores/two": ONE}


def rows(path):
    """The rows of a table: those of no other."""
    return values(range(11), attempt=list(SPECS).index(path))


def make(store, names=tuple(SPECS)):
    for name in names:
        store.create_table(name, SPECS[name]).put(0, rows(name))


@pytest.fixture
def several(path):
    with ZarrFeatureStore.create(path, Manifest(MANIFEST.fingerprint, {"damping": 0.00390625})) as store:
        make(store)
    return path


def contents_of(path):
    """Everything that a reader is told of a store."""
    with ZarrFeatureStore.open(path) as store:
        tables = {name: store.open_table(name) for name in store.table_names()}
        read = {name: {a: table.read(a).tobytes() for a in ARRAYS} for name, table in tables.items()}
        return store.manifest, {name: table.spec for name, table in tables.items()}, read


ARRAYS = ("features", "q", "w")
PIECES = {
    "folders of checkpoints": lambda p: exchange(f"{p}/ckpt-0", f"{p}/ckpt-1"),
    "metadata exchanged": lambda p: exchange(f"{p}/ckpt-0/zarr.json", f"{p}/ckpt-1/zarr.json"),
    "metadata copied": lambda p: copy_over(f"{p}/ckpt-0/zarr.json", f"{p}/ckpt-1/zarr.json"),
    "arrays exchanged": lambda p: [exchange(f"{p}/ckpt-0/{a}", f"{p}/ckpt-1/{a}") for a in ARRAYS],
    "arrays copied": lambda p: [copy_over(f"{p}/ckpt-1/{a}", f"{p}/ckpt-0/{a}") for a in ARRAYS],
    "one array": lambda p: copy_over(f"{p}/ckpt-1/features", f"{p}/ckpt-0/features"),
    "a folder renamed": lambda p: os.rename(f"{p}/ckpt-1", f"{p}/ckpt-7"),
    "a folder copied": lambda p: shutil.copytree(f"{p}/ckpt-1", f"{p}/ckpt-2"),
    "entries exchanged": lambda p: exchange(f"{p}/.tables/ckpt-0", f"{p}/.tables/ckpt-1"),
}
LOCAL = {
    "folders of scores": lambda p: exchange(f"{p}/scores/one", f"{p}/scores/two"),
    "records exchanged": lambda p: exchange(f"{p}/ckpt-0/features/.commits", f"{p}/ckpt-1/features/.commits"),
    "a chunk": lambda p: exchange(f"{p}/ckpt-0/features/c.0.0", f"{p}/ckpt-0/features/c.1.0"),
}
COMPUTED_ANEW = {"arrays copied", "arrays exchanged", "records exchanged"}


@pytest.mark.parametrize("change", [*PIECES, *LOCAL])
def test_pieces_of_another_table_are_refused(several, change):
    """Their bytes and checksums are right, and they are in the wrong place; rows are set aside and computed anew."""
    before = contents_of(several)
    (PIECES | LOCAL)[change](several)
    raises(CorruptStoreError, None, contents_of, several)
    assert not check_store(several).ok
    if change not in COMPUTED_ANEW:
        return
    check_store(several, repair=True)
    with ZarrFeatureStore.open(several, "r+") as store:
        for name in SPECS:
            table = store.open_table(name)
            if len(pending := table.pending()):
                table.put(pending, {key: array[pending] for key, array in rows(name).items()})
    assert contents_of(several) == before
    assert check_store(several).ok


@pytest.mark.parametrize("change", [*PIECES, "lost"])
def test_pieces_of_another_table_are_refused_in_an_object_store(tmp_path, change):
    with open_remote(tmp_path) as (store, _):
        make(store, ["ckpt-0", "ckpt-1"])
        assert store.check().ok
    objects = f"{tmp_path}/objects"
    shutil.rmtree(f"{objects}/ckpt-1") if change == "lost" else PIECES[change](objects)
    with open_remote(tmp_path, "r") as (store, _):
        assert not store.check().ok
        with pytest.raises(CorruptStoreError):
            {name: store.open_table(name).read("features") for name in store.table_names()}


def test_a_staged_chunk_of_another_table_is_pending(path):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        for name in ("ckpt-0", "ckpt-1"):
            store.create_table(name, SPECS[name]).put(0, values([0, 1]))
    copy_over(f"{path}/ckpt-1/features/.stage", f"{path}/ckpt-0/features/.stage")
    with ZarrFeatureStore.open(path) as store:
        assert not store.open_table("ckpt-0").done().any()
        assert store.open_table("ckpt-1").done().sum() == 2


@pytest.mark.parametrize(("settings", "spec"), [(Manifest({"seed": 1}), ZERO), (MANIFEST, ONE)])
def test_a_table_of_another_store_is_refused(several, tmp_path, settings, spec):
    """Of other settings, in the same place and of the same shape; and one of other rows."""
    with ZarrFeatureStore.create(tmp_path / "other", settings) as store:
        store.create_table("ckpt-0", spec).put(0, rows("scores/one"))
    copy_over(f"{tmp_path}/other/ckpt-0", f"{several}/ckpt-0")
    with pytest.raises(CorruptStoreError, match=r"of another store|is another table than the one"):
        ZarrFeatureStore.open(several).open_table("ckpt-0")
    report = check_store(several, repair=True)
    assert "ckpt-0" in {finding.table for finding in report.findings if finding.level == "damage"}
    assert report.set_aside == ()


@pytest.mark.parametrize("lost", ["ckpt-1", "scores", "scores/two"])
def test_a_table_that_is_lost_is_named(several, lost):
    """A copy that broke off must not become a score over fewer checkpoints."""
    before = contents_of(several)
    shutil.rmtree(f"{several}/{lost}")
    one = "ckpt-1" if lost == "ckpt-1" else "scores/two"
    with ZarrFeatureStore.open(several, "r+") as store:
        for ask in (store.table_names, lambda: store.open_table(one), lambda: store.create_table(one, ONE)):
            raises(CorruptStoreError, rf"The table '{lost}.*' of .*run\.zarr is lost", ask)
    assert not check_store(several).ok
    report = check_store(several, repair=True)  # to do without the rows is the user's decision
    assert report.ok
    assert {moved.table for moved in report.set_aside} == {name for name in SPECS if name.startswith(lost)}
    with ZarrFeatureStore.open(several, "r+") as store:
        make(store, [name for name in SPECS if name.startswith(lost)])
    assert contents_of(several) == before


def test_a_table_whose_metadata_are_lost_is_named_by_a_listing(several):
    """To do without its rows, the user removes the rest: a repair deletes nothing."""
    os.remove(f"{several}/ckpt-1/zarr.json")
    with ZarrFeatureStore.open(several) as store:
        raises(
            CorruptStoreError,
            r"'ckpt-1'.* is lost.* remove what is left of it and call check",
            store.table_names,
        )
    steps = [finding.next_step for finding in check_store(several, repair=True).findings]
    assert any("remove this one and check with --repair" in step for step in steps)
    shutil.rmtree(f"{several}/ckpt-1")
    assert check_store(several, repair=True).ok


def test_a_list_that_is_lost_is_named_and_made_anew(several):
    before = contents_of(several)
    shutil.rmtree(f"{several}/.tables")
    raises(CorruptStoreError, "the list of the store's tables", ZarrFeatureStore.open, several)
    assert not check_store(several).ok
    assert check_store(several, repair=True).ok
    assert contents_of(several) == before
    with ZarrFeatureStore.open(several, "r+") as store:
        for name in SPECS:
            store.open_table(name)
    assert sorted(os.listdir(f"{several}/.tables")) == sorted(["zarr.json", *map(cases.entry_name, SPECS)])


def test_what_others_note_beside_is_left_alone(several):
    """Attributes of other tools, and zarr's consolidated metadata."""
    before = contents_of(several)
    zarr.open_group(several, mode="r+").attrs["note"] = "mine"
    zarr.open_group(f"{several}/ckpt-0", mode="r+").attrs["note"] = "mine"
    zarr.open_array(f"{several}/ckpt-0/features", mode="r+").attrs["note"] = "mine"
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(several)
    assert contents_of(several) == before
    assert check_store(several).ok


def test_appended_data_leave_the_tables_in_their_store(several):
    """The settings of the store change, and what its tables are bound to does not."""
    before = contents_of(several)
    with ZarrFeatureStore.open(several, "r+") as store:
        store.replace_fingerprint(MANIFEST.fingerprint, {**MANIFEST.fingerprint, "dataset": {"num_rows": 13}})
        store.grow_table("ckpt-0", 13).put([11, 12], values([11, 12]))
        store.create_table("ckpt-2", SPEC)
    with ZarrFeatureStore.open(several) as store:
        assert store.table_names() == ["ckpt-0", "ckpt-1", "ckpt-2", "scores/one", "scores/two"]
        assert store.open_table("ckpt-1").read("q").tobytes() == before[2]["ckpt-1"]["q"]
        assert store.open_table("ckpt-0").complete
    assert check_store(several).findings == ()


def test_a_derived_array_under_another_name_and_an_entry_are_as_good_as_none(several):
    """What was stored for a store is not taken for what can be computed again, whoever copies it into the cache."""
    with ZarrFeatureStore.open(several, "r+") as store:
        for number, name in enumerate(("one", "two", "three")):
            store.cache(name, "the same key", np.eye(2) + number)
        store.put_entry("three", "the same key", np.eye(2))
        exchange(f"{several}/.cache/one.safetensors", f"{several}/.cache/two.safetensors")
        assert store.cached("one", "the same key") is None
        assert store.cached("three", "the same key") is not None
        copy_over(f"{several}/.entries/three.safetensors", f"{several}/.cache/three.safetensors")
        assert store.cached("three", "the same key") is None


# Entries: what cannot be computed again is kept where the rows are.

FILE, MARK = ".entries/verdicts%a.safetensors", ".tables/.entries%verdicts%a"
B_FILE, B_MARK = FILE.replace("%a", "%b"), MARK.replace("%a", "%b")


def take(*names):
    """Copy files or folders of the other store over those of this one."""
    return lambda own, other: [copy_over(f"{other}/{name}", f"{own}/{name}") for name in names]


def from_beside(name):
    return lambda own, _: copy_over(f"{own.with_name(name)}/{FILE}", f"{own}/{FILE}")


ENTRIES = {
    "the folder of another store": take(".entries"),
    "the folder of another store with its marks": take(".entries", ".tables"),
    "the entry of another store": take(FILE),
    "the entry of another store with its mark": take(FILE, MARK),
    "another entry of the store": lambda own, _: copy_over(own / B_FILE, own / FILE),
    "and with its mark": lambda o, _: (copy_over(o / B_FILE, o / FILE), copy_over(o / B_MARK, o / MARK)),
    "an earlier one": from_beside("earlier"),
    "that of a copy of the store": from_beside("copy"),
    "removed": lambda own, _: (own / FILE).unlink(),
    "removed with its folder": lambda own, _: shutil.rmtree(own / ".entries"),
    "removed mark": lambda own, _: (own / MARK).unlink(),
    "damaged mark": lambda own, _: flip(own / MARK, -1),
    "damaged": lambda own, _: flip(own / FILE, -1),
    "a link for the folder": lambda own, _: (
        os.rename(own / ".entries", own.with_name("away")),
        os.symlink(own.with_name("away"), own / ".entries"),
    ),
    "a file for the folder": lambda o, _: (shutil.rmtree(o / ".entries"), overwrite(o / ".entries", b"")),
}


@pytest.mark.parametrize("kind", ["folder", "object store"])
@pytest.mark.parametrize("change", ENTRIES)
def test_an_entry_that_the_store_has_not_written_is_refused(tmp_path, kind, change):
    """Two stores of the same fingerprint, as two runs of one script make them."""
    own, other, names = tmp_path / "own", tmp_path / "other", ["verdicts/a", "verdicts/b"]
    remote = kind == "object store"

    def place(folder):
        return cases.remote_place(folder, objects=".") if remote else str(folder)

    def write(folder, start):
        with create_store(place(folder), Manifest({"seed": 0})) as store:
            for number, name in enumerate(names):
                store.put_entry(name, "key", np.arange(start + number, start + 4.0))

    if remote and "for the folder" in change:
        pytest.skip("an object store has neither links nor folders")
    write(own, 0)
    for copy in ("earlier", "copy"):
        shutil.copytree(own, tmp_path / copy)
    for folder, start in ((own, 1), (other, 2), (tmp_path / "copy", 3)):
        write(folder, start)
    assert check_store(place(own)).ok
    ENTRIES[change](own, other)

    with open_store(place(own)) as store:
        if "for the folder" not in change:
            assert store.entry_names("verdicts") == names
        with pytest.raises(CorruptStoreError, match=r"entry 'verdicts/a' of|symbolic link|\.entries"):
            store.entry("verdicts/a", "key")
    report = check_store(place(own))
    assert not report.ok
    if "for the folder" in change:
        assert not check_store(own, repair=True).ok
        assert change.startswith("a file") or (tmp_path / "away/verdicts%a.safetensors").exists()
        return
    assert "the entry 'verdicts/a'" in str(report)
    if not remote:
        assert check_store(own, repair=True).set_aside
        assert check_store(own).ok
        with open_store(own) as store:
            assert store.entry("verdicts/a", "key") is None
    write(own, 5)
    with open_store(place(own)) as store:
        np.testing.assert_array_equal(store.entry("verdicts/a", "key"), np.arange(5, 9.0))
    assert check_store(place(own)).ok


def test_a_store_without_an_identifier_has_its_origin(tmp_path):
    """As the first ones that were written."""
    path = tmp_path / "run.zarr"
    ZarrFeatureStore.create(path, Manifest({})).close()
    cases.edit(path / "zarr.json", lambda record: record.pop("id"))
    with open_store(path, mode="r+") as store:
        store.put_entry("columns/a", "key", np.arange(3.0))
    assert check_store(path).ok
    with open_store(path) as store:
        np.testing.assert_array_equal(store.entry("columns/a", "key"), np.arange(3.0))
    cases.edit(path / "zarr.json", lambda record: record.update(id=5, made_with=[]))
    with pytest.raises(CorruptStoreError, match=r"store: made_with is \[\], id is 5\. Restore"):
        open_store(path)
