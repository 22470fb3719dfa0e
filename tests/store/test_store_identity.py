"""Rows, records and metadata belong to one table of one store: those of another are refused, a lost table is named."""

import contextlib
import json
import os
import shutil
import threading

import numpy as np
import pytest
import zarr
from store_cases import (
    MANIFEST,
    NAME,
    SPEC,
    content,
    edit,
    flipped,
    open_remote,
    overwrite,
    values,
    writing,
)

from trak_lite.errors import CorruptStoreError, InvalidInputError, MissingStoreError, StoreError
from trak_lite.store import Manifest, TableSpec, ZarrFeatureStore, check_store
from trak_lite.store._failpoints import LIST_FAILPOINTS
from trak_lite.store.disk.listing import TableList, entry_name

ZERO, ONE = (TableSpec(11, SPEC.columns, 4, {"weights": digest}) for digest in ("a0", "a1"))
SPECS = {"ckpt-0": ZERO, "ckpt-1": ONE, "scores/one": ZERO, "scores/two": ONE}


def rows(path):
    """The rows of a table: those of no other."""
    return {name: array + list(SPECS).index(path) for name, array in values(range(11)).items()}


@pytest.fixture
def several(path):
    with ZarrFeatureStore.create(path, Manifest(MANIFEST.fingerprint, {"damping": 0.00390625})) as store:
        for name, spec in SPECS.items():
            store.create_table(name, spec).put(0, rows(name))
    return path


def contents_of(path):
    """Everything that a reader is told of a store."""
    with ZarrFeatureStore.open(path) as store:
        tables = {name: store.open_table(name) for name in store.table_names()}
        read = {
            name: {column.name: table.read(column.name).tobytes() for column in table.spec.columns}
            for name, table in tables.items()
        }
        specs = {name: table.spec for name, table in tables.items()}
        return store.manifest, specs, read


def exchange(one, other):
    os.rename(one, f"{one}-aside")
    os.rename(other, one)
    os.rename(f"{one}-aside", other)


def over(one, other):
    shutil.rmtree(other) if os.path.isdir(other) else os.unlink(other)
    shutil.copytree(one, other) if os.path.isdir(one) else shutil.copyfile(one, other)


ARRAYS = ("features", "q", "w")
PIECES = {
    "folders of checkpoints": lambda p: exchange(f"{p}/ckpt-0", f"{p}/ckpt-1"),
    "folders of scores": lambda p: exchange(f"{p}/scores/one", f"{p}/scores/two"),
    "metadata exchanged": lambda p: exchange(f"{p}/ckpt-0/zarr.json", f"{p}/ckpt-1/zarr.json"),
    "metadata copied": lambda p: over(f"{p}/ckpt-0/zarr.json", f"{p}/ckpt-1/zarr.json"),
    "arrays exchanged": lambda p: [exchange(f"{p}/ckpt-0/{a}", f"{p}/ckpt-1/{a}") for a in ARRAYS],
    "arrays copied": lambda p: [over(f"{p}/ckpt-1/{a}", f"{p}/ckpt-0/{a}") for a in ARRAYS],
    "one array": lambda p: over(f"{p}/ckpt-1/features", f"{p}/ckpt-0/features"),
    "records exchanged": lambda p: exchange(
        f"{p}/scores/one/features/.commits", f"{p}/scores/two/features/.commits"
    ),
    "a chunk": lambda p: exchange(f"{p}/ckpt-0/features/c.0.0", f"{p}/ckpt-0/features/c.1.0"),
    "a folder renamed": lambda p: os.rename(f"{p}/ckpt-1", f"{p}/ckpt-7"),
    "a folder copied": lambda p: shutil.copytree(f"{p}/ckpt-1", f"{p}/ckpt-2"),
    "entries exchanged": lambda p: exchange(f"{p}/.tables/ckpt-0", f"{p}/.tables/ckpt-1"),
}


@pytest.mark.parametrize("change", PIECES.values(), ids=PIECES.keys())
def test_pieces_of_another_table_are_refused(several, change):
    """Their bytes and checksums are right, and they are in the wrong place."""
    change(several)
    with pytest.raises(CorruptStoreError):
        contents_of(several)
    assert not check_store(several).ok


@pytest.mark.parametrize("change", ["arrays copied", "arrays exchanged", "records exchanged"])
def test_rows_of_another_table_are_set_aside_and_computed_anew(several, change):
    before = contents_of(several)
    PIECES[change](several)
    check_store(several, repair=True)
    with ZarrFeatureStore.open(several, "r+") as store:
        for name in SPECS:
            table = store.open_table(name)
            pending = table.pending()
            if len(pending):
                table.put(pending, {key: array[pending] for key, array in rows(name).items()})
    assert contents_of(several) == before
    assert check_store(several).ok


def test_a_staged_chunk_of_another_table_is_pending(path):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        for name in ("ckpt-0", "ckpt-1"):
            store.create_table(name, SPECS[name]).put(
                0, {key: array[:2] for key, array in rows(name).items()}
            )
    stages = [f"{path}/{name}/features/.stage" for name in ("ckpt-1", "ckpt-0")]
    over(*stages)
    with ZarrFeatureStore.open(path) as store:
        assert not store.open_table("ckpt-0").done().any()
        assert store.open_table("ckpt-1").done().sum() == 2


def test_a_table_of_another_store_is_refused(several, tmp_path):
    """Of other settings, in the same place and of the same shape; and one of other rows."""
    for other, settings, spec in (
        ("settings.zarr", Manifest({"seed": 1}), ZERO),
        ("rows.zarr", MANIFEST, ONE),
    ):
        with ZarrFeatureStore.create(tmp_path / other, settings) as store:
            store.create_table("ckpt-0", spec).put(0, rows("scores/one"))
        over(f"{tmp_path}/{other}/ckpt-0", f"{several}/ckpt-0")
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
    named = rf"The table '{lost}.*' of .*run\.zarr is lost"
    for ask in (
        lambda store: store.table_names(),
        lambda store: store.open_table("ckpt-1" if lost == "ckpt-1" else "scores/two"),
        lambda store: store.create_table("ckpt-1" if lost == "ckpt-1" else "scores/two", ONE),
    ):
        with ZarrFeatureStore.open(several, "r+") as store, pytest.raises(CorruptStoreError, match=named):
            ask(store)
    assert not check_store(several).ok
    report = check_store(several, repair=True)  # to do without the rows is the user's decision
    assert report.ok
    assert {moved.table for moved in report.set_aside} == {name for name in SPECS if name.startswith(lost)}
    with ZarrFeatureStore.open(several, "r+") as store:
        for name, spec in SPECS.items():
            table = store.create_table(name, spec)
            if name.startswith(lost):
                table.put(0, rows(name))
    assert contents_of(several) == before


def test_a_list_that_is_lost_is_named_and_made_anew(several):
    before = contents_of(several)
    shutil.rmtree(f"{several}/.tables")
    with pytest.raises(CorruptStoreError, match="the list of the store's tables"):
        ZarrFeatureStore.open(several)
    assert not check_store(several).ok
    assert check_store(several, repair=True).ok
    assert contents_of(several) == before
    with ZarrFeatureStore.open(several, "r+") as store:
        for name in SPECS:
            store.open_table(name)
    assert sorted(os.listdir(f"{several}/.tables")) == sorted(["zarr.json", *map(entry_name, SPECS)])


def metadata_of(path):
    found = [os.path.join(parent, "zarr.json") for parent, _, names in os.walk(path) if "zarr.json" in names]
    return found + [f"{path}/.tables/{entry_name(name)}" for name in SPECS]


def test_a_flipped_bit_of_metadata_is_named_or_harmless(several):
    """Every bit of one byte in sixteen; ``tests/faults`` draws more, and the campaign flips each."""
    right = contents_of(several)
    outcomes = set()
    for number, name in enumerate(metadata_of(several)):
        text = content(name)
        for byte in range(number, len(text), 16):
            overwrite(name, flipped(text, byte, byte // 16 % 8))
            try:
                assert contents_of(several) == right, (name, byte)
                outcomes.add("harmless")
            except StoreError:
                assert named(several), (name, byte)
                outcomes.add("named")
        overwrite(name, text)
    assert outcomes >= {"named"}
    assert contents_of(several) == right
    assert check_store(several).findings == ()


def named(path):
    try:
        return bool(check_store(path).findings)
    except StoreError:
        return True


@pytest.mark.parametrize(
    ("which", "old", "new"),
    [
        ("zarr.json", b"0.00390625", b"0.00790625"),  # the damping that scores are computed with: one bit
        ("ckpt-0/zarr.json", b'"a0"', b'"a1"'),
        ("ckpt-0/zarr.json", b'"table": "ckpt-0"', b'"table": "ckpt-1"'),
        ("ckpt-0/q/zarr.json", b'"float32"', b'"float30"'),
        ("scores/zarr.json", b'"trak_lite"', b'"trak_lhte"'),
    ],
)
def test_a_changed_setting_is_refused_by_its_checksum(several, which, old, new):
    text = content(f"{several}/{which}")
    assert old in text
    overwrite(f"{several}/{which}", text.replace(old, new))
    with pytest.raises(
        CorruptStoreError, match=r"zarr\.json (does not match its checksum|contradicts|does not desc|desc)"
    ):
        contents_of(several)
    assert not check_store(several).ok


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


def test_documents_are_those_that_zarr_would_write(several, tmp_path):
    """Key by key: whoever reads them knows nothing of who has written them."""
    made = zarr.create_array(
        f"{tmp_path}/made", shape=(11, 3), chunks=(4, 3), dtype="<f2", compressors=None, filters=None,
        fill_value=np.nan, chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=("row", "features_dim"),
    )  # fmt: skip
    assert (
        made.metadata.to_dict() == zarr.open_array(f"{several}/ckpt-0/features", mode="r").metadata.to_dict()
    )
    assert json.loads(content(f"{tmp_path}/made/zarr.json")) == json.loads(
        content(f"{several}/ckpt-0/features/zarr.json")
    )


def test_appended_data_leave_the_tables_in_their_store(several):
    """The settings of the store change, and what its tables are bound to does not."""
    before = contents_of(several)
    with ZarrFeatureStore.open(several, "r+") as store:
        store.replace_fingerprint(MANIFEST.fingerprint, {**MANIFEST.fingerprint, "dataset": {"num_rows": 13}})
        grown = store.grow_table("ckpt-0", 13)
        grown.put([11, 12], values([11, 12]))
        store.create_table("ckpt-2", SPEC)
    with ZarrFeatureStore.open(several) as store:
        assert store.table_names() == ["ckpt-0", "ckpt-1", "ckpt-2", "scores/one", "scores/two"]
        assert store.open_table("ckpt-1").read("q").tobytes() == before[2]["ckpt-1"]["q"]
        assert store.open_table("ckpt-0").complete
    assert check_store(several).findings == ()


@pytest.mark.parametrize("failpoint", ["folder_published:4", *(f"{name}:1" for name in LIST_FAILPOINTS)])
def test_a_kill_between_folder_and_list_leaves_a_table_or_none(path, tmp_path, victims, failpoint):
    done = str(tmp_path / "done")
    assert victims.killed(failpoint, "write", path, done, 11)
    assert check_store(path).ok
    with ZarrFeatureStore.open(path) as store:
        assert store.table_names() == [NAME]  # whether or not it is listed
    with writing(path) as table:
        table.put(0, values(range(11)))
    assert check_store(path).findings == ()
    assert sorted(os.listdir(f"{path}/.tables")) == sorted(["zarr.json", entry_name(NAME)])


def test_racing_creators_and_droppers_leave_a_list_that_is_right(path):
    ZarrFeatureStore.create(path, MANIFEST).close()
    errors = []

    def work(number):
        try:
            for _ in range(12):
                with ZarrFeatureStore.open(path, "r+") as store:
                    if number % 2:
                        with contextlib.suppress(MissingStoreError):  # dropped before it was opened
                            store.create_table("ckpt-0", ZERO)
                    else:
                        store.table_names()
                        with contextlib.suppress(MissingStoreError):
                            store.drop_table("ckpt-0")
        except Exception as error:  # every one is a finding
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert check_store(path).findings == ()
    with ZarrFeatureStore.open(path) as store:
        listed = {name for name in os.listdir(f"{path}/.tables") if name != "zarr.json"}
        assert listed == set(store.table_names())


def test_a_table_that_is_created_and_dropped_between_two_looks_is_not_lost(path, monkeypatch):
    """The entry that is seen may be of a later table than the folder that was not there."""
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.create_table("ckpt-0", ZERO)
    tables, is_there = TableList(path), TableList._is_there
    folder, entry = f"{path}/ckpt-0", tables.entry("ckpt-0")
    away = {folder: f"{path}.folder", entry: f"{path}.entry"}
    for there, elsewhere in away.items():
        os.rename(there, elsewhere)
    looks = []

    def look(self, name):
        looks.append(name)
        if len(looks) == 2:  # dropped again: first the folder goes
            os.rename(folder, f"{path}.dropped")
        found = is_there(self, name)
        if len(looks) == 1:  # created meanwhile
            for there, elsewhere in away.items():
                os.rename(elsewhere, there)
        return found

    monkeypatch.setattr(TableList, "_is_there", look)
    assert not tables.lost(["ckpt-0"])


def test_a_path_that_no_file_could_be_named_after_is_refused(path):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.create_table("/".join(["x" * 49] * 4), SPEC)
        with pytest.raises(InvalidInputError, match="201 characters"):
            store.create_table("/".join(["x" * 50, "x" * 50, "x" * 49, "x" * 49]), SPEC)


def test_a_derived_array_under_another_name_is_as_good_as_none(several):
    with ZarrFeatureStore.open(several, "r+") as store:
        for number, name in enumerate(("one", "two")):
            store.cache(name, "the same key", np.eye(2) + number)
        exchange(f"{several}/.cache/one.safetensors", f"{several}/.cache/two.safetensors")
        assert store.cached("one", "the same key") is None


def test_an_open_table_gives_no_bytes_that_were_written_after_it_was_compared(several):
    with ZarrFeatureStore.open(several) as store:
        table = store.open_table("scores/one")
        first = table.read_rows("q", [0]).copy()
        name = f"{several}/scores/one/q/c.0"
        whole = content(name)
        found = os.stat(name)
        overwrite(name, flipped(whole, 0, 3))
        os.utime(
            name, ns=(found.st_atime_ns, found.st_mtime_ns + 1)
        )  # the clock of the file system may be coarse
        with pytest.raises(CorruptStoreError, match="checksum differs"):
            table.read_rows("q", [0])
        overwrite(name, whole)
        os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns + 2))
        assert table.read_rows("q", [0]) == first


# The same in an object store.


@pytest.fixture
def objects(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed; it is in the extra 'remote'")
    with open_remote(tmp_path) as (store, _):
        for name in ("ckpt-0", "ckpt-1"):
            store.create_table(name, SPECS[name]).put(0, rows(name))
    return f"{tmp_path}/objects"


REMOTE = {
    name: PIECES[name]
    for name in (
        "folders of checkpoints",
        "metadata exchanged",
        "metadata copied",
        "arrays exchanged",
        "arrays copied",
        "one array",
        "a folder renamed",
        "a folder copied",
        "entries exchanged",
    )
}


@pytest.mark.parametrize(
    "change", [*REMOTE.values(), lambda p: shutil.rmtree(f"{p}/ckpt-1")], ids=[*REMOTE.keys(), "lost"]
)
def test_pieces_of_another_table_are_refused_in_an_object_store(tmp_path, objects, change):
    change(objects)
    with open_remote(tmp_path, "r") as (store, _):
        assert not store.check().ok
        with pytest.raises(CorruptStoreError):
            {name: store.open_table(name).read("features") for name in store.table_names()}


def test_a_finished_remote_store_is_a_local_one(tmp_path, objects):
    with open_remote(tmp_path) as (store, table):
        table.put(0, values(range(11)))
        shutil.copytree(objects, tmp_path / "local.zarr")
        with ZarrFeatureStore.open(tmp_path / "local.zarr") as local:
            assert local.diff(store) == ()
    assert check_store(tmp_path / "local.zarr").findings == ()
    edit(f"{tmp_path}/local.zarr/ckpt-0/zarr.json", lambda record: record["fingerprint"].update(weights="a1"))
    assert not check_store(tmp_path / "local.zarr").ok
