"""Bytes that no store writes, checksums and all: refused by name, followed nowhere, and never a reason to allocate."""

import ast
import contextlib
import json
import os
import pickle
import re
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import zarr
from store_cases import (
    MANIFEST,
    NAME,
    SPEC,
    check_all,
    commit_log,
    content,
    edit,
    finish,
    folder,
    open_for_writing,
    overwrite,
    reading,
    row_log,
    snapshot,
    staged,
    values,
    writing,
)

import trak_lite
from trak_lite._validate import parse_json
from trak_lite.errors import (
    CorruptStoreError,
    IncompleteStoreError,
    InvalidInputError,
    ManifestMismatchError,
    ReadOnlyStoreError,
    StoreError,
)
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore, check_store
from trak_lite.store._checksums import crc32c
from trak_lite.store.disk.documents import table_identity
from trak_lite.store.disk.files import named_errors, zeros
from trak_lite.store.disk.listing import entry_name
from trak_lite.store.disk.records import (
    HOLDER_BYTES,
    CommitLogs,
    CommitRecord,
    encode_row,
    holder_line,
    holder_lives,
)

PACKAGE = Path(trak_lite.__file__).parent
MEBIBYTE = 1 << 20
IDENTITY = table_identity(NAME, MANIFEST.digest(), SPEC)
SEED = crc32c(IDENTITY.encode())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("made") / "run.zarr")
    store, table = open_for_writing(path)
    with store:
        table.put(0, values(range(8)))
        table.put(8, values([8, 9]))
        store.cache("gram", "key", np.eye(2))
    return path


@pytest.fixture
def mixed(made, path):
    """Chunks 0 and 1 committed; of chunk 2 the rows 8 and 9 are staged; and a derived array."""
    shutil.copytree(made, path)
    return path


def derived(path):
    return os.path.join(path, ".cache", "gram.safetensors")


def with_header(whole, change):
    """A file of safetensors with another header, whose length is told rightly."""
    size = 8 + int.from_bytes(whole[:8], "little")
    header = change(whole[8:size])
    return len(header).to_bytes(8, "little") + header + whole[size:]


def lying(old, new):
    """Return what puts other text into the header."""

    def change(header):
        assert old in header
        return header.replace(old, new, 1)

    return lambda whole: with_header(whole, change)


def read_everything(path):
    """Read all there is, by every way in; return the errors."""
    ways = (
        lambda: ZarrFeatureStore.open(path).cached("gram", "key"),
        lambda: ZarrFeatureStore.open(path).table_names(),
        lambda: ZarrFeatureStore.open(path).attributes(NAME),
        lambda: ZarrFeatureStore.open(path).open_table(NAME).read_chunk(0, "q"),
        lambda: ZarrFeatureStore.open(path).open_table(NAME).done(),
        lambda: open_for_writing(path)[1].pending(),
        lambda: check_store(path),
    )
    errors = []
    for way in ways:
        try:
            way()
        except StoreError as error:
            errors.append(error)
    return errors


@contextlib.contextmanager
def peak_below(size):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


# What JSON has not, and what is not what stands there.


@pytest.mark.parametrize("noted", [7, [[]], "x", None])
def test_attributes_that_are_no_mapping_are_refused(mixed, noted):
    edit(folder(mixed, "zarr.json"), lambda record: record.update(attributes=noted))
    with (
        ZarrFeatureStore.open(mixed) as store,
        pytest.raises(CorruptStoreError, match=r"ckpt-0/zarr\.json records \w+ as attributes.* Restore"),
    ):
        store.attributes(NAME)
    assert not check_store(mixed).ok


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("which", ["", NAME])
def test_a_fingerprint_with_a_number_that_json_has_not_is_refused(mixed, which, number):
    place = os.path.join(mixed, which, "zarr.json")
    text = re.sub(rb'("seed": |"checkpoint": )(0|"abc")', rb"\g<1>" + number, content(place))
    assert number in text
    overwrite(place, text)
    with pytest.raises(CorruptStoreError, match=rf"{which}/zarr\.json is not JSON .*finite"):
        open_for_writing(mixed)


@pytest.mark.parametrize("levels", [130, 900, 100_000])
def test_metadata_nested_without_end_are_refused(mixed, levels):
    place = os.path.join(mixed, "zarr.json")
    overwrite(place, content(place).replace(b'"seed": 0', b'"seed": ' + b"[" * levels + b"]" * levels))
    with pytest.raises(CorruptStoreError, match=r"zarr\.json is not JSON"):
        ZarrFeatureStore.create(mixed, MANIFEST)


def test_what_may_be_recorded_can_be_read_back(tmp_path):
    """The limit on what is written lies under the limit on what is read."""

    def nested(levels):
        return {"a": nested(levels - 1)} if levels else 0

    kept = Manifest(nested(96))
    ZarrFeatureStore.create(tmp_path / "kept.zarr", kept).close()
    assert ZarrFeatureStore.create(tmp_path / "kept.zarr", kept).manifest == kept
    with pytest.raises(InvalidInputError, match="nested more than 96 levels"):
        ZarrFeatureStore.create(tmp_path / "refused.zarr", Manifest(nested(97)))


def test_a_fingerprint_of_half_a_character_has_a_digest(mixed):
    """JSON can say it, UTF-8 cannot."""
    edit(f"{mixed}/zarr.json", lambda record: record["fingerprint"].update(seed="\ud800"))
    with ZarrFeatureStore.open(mixed) as store:
        assert store.manifest.digest() != MANIFEST.digest()


def test_a_fingerprint_of_a_table_that_is_a_list_is_refused(mixed):
    edit(folder(mixed, "zarr.json"), lambda record: record.update(fingerprint=[["checkpoint", "abc"]]))
    with pytest.raises(CorruptStoreError, match="does not describe a table"):
        ZarrFeatureStore.open(mixed).open_table(NAME)


@pytest.mark.parametrize("which", ["targets", "targets/test"])
def test_a_group_with_the_metadata_of_a_table_is_refused(mixed, which):
    overwrite(f"{mixed}/{which}/zarr.json", content(folder(mixed, "zarr.json")))
    with pytest.raises(CorruptStoreError, match=rf"{which}/zarr\.json describes the table of '{NAME}'"):
        ZarrFeatureStore.open(mixed).open_table(NAME)


def test_metadata_that_went_round_in_a_circle_are_refused(mixed):
    """A group says that it is a table, the table says that it is an array, and the array that it is a group."""
    group, table, array = (f"{mixed}/{name}/zarr.json" for name in ("targets/test", NAME, f"{NAME}/q"))
    whole = [content(place) for place in (table, array, group)]
    for place, other in zip((group, table, array), whole, strict=True):
        overwrite(place, other)
    with pytest.raises(CorruptStoreError, match=r"test/zarr\.json describes the table of"):
        ZarrFeatureStore.open(mixed).open_table(NAME)


@pytest.mark.parametrize("which", ["targets", "targets/test"])
def test_a_group_that_describes_something_else_is_reported(mixed, which):
    edit(f"{mixed}/{which}/zarr.json", lambda record: record.update(num_rows=11))
    assert ZarrFeatureStore.open(mixed).table_names() == [NAME]
    report = check_store(mixed)
    assert not report.ok
    assert report.tally.done_rows == 10  # what is inside is looked at


def test_a_link_in_a_group_without_metadata_is_refused_and_reported(mixed):
    os.remove(f"{mixed}/targets/zarr.json")
    shutil.move(f"{mixed}/targets/test", f"{mixed}/elsewhere")
    os.symlink("nowhere", f"{mixed}/targets/test")
    with pytest.raises(CorruptStoreError, match="is a symbolic link"):
        ZarrFeatureStore.open(mixed).open_table("targets/test")
    report = check_store(mixed)
    assert not report.ok
    assert "targets/test" in {finding.table for finding in report.findings if finding.level == "damage"}


@pytest.mark.parametrize("how", ["a group's", "no columns"])
def test_a_table_with_the_metadata_of_a_group_is_refused(mixed, how):
    if how == "a group's":
        overwrite(folder(mixed, "zarr.json"), content(f"{mixed}/targets/zarr.json"))
    else:
        edit(folder(mixed, "zarr.json"), lambda record: record.pop("columns"))
    for use in (
        lambda: ZarrFeatureStore.open(mixed).open_table(NAME),
        lambda: open_for_writing(mixed),
        lambda: ZarrFeatureStore.open(mixed).table_names(),
    ):
        with pytest.raises(CorruptStoreError, match=r"ckpt-0(/\w+)?/zarr\.json"):
            use()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_table_that_has_lost_a_column_is_refused_and_its_chunks_are_not_judged(mixed, place):
    edit(folder(mixed, "zarr.json"), lambda record: record["columns"].pop(place))
    lost = SPEC.columns[place].name
    with pytest.raises(CorruptStoreError, match="is another table than the one that the store lists"):
        ZarrFeatureStore.open(mixed).open_table(NAME)
    report = check_store(mixed, repair=True)
    assert not report.ok
    assert report.set_aside == ()
    os.unlink(f"{mixed}/.tables/{entry_name(NAME)}")
    with pytest.raises(CorruptStoreError, match=rf"does not name the arrays \['{lost}'\].* Restore"):
        ZarrFeatureStore.open(mixed).open_table(NAME)


@pytest.mark.parametrize("which", ["targets", "targets/test", NAME])
def test_tables_are_not_missed_without_a_word(mixed, which):
    """A score over all checkpoints must not become one over those that are left."""
    shutil.rmtree(f"{mixed}/{which}")
    with pytest.raises(CorruptStoreError, match=rf"The table '{NAME}' of .* is lost.* Restore"):
        ZarrFeatureStore.open(mixed).table_names()


# Derived arrays: nothing of them is evaluated.


class Evil:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


HEADS = {
    "objects": lying(b'"F64"', b'"O"'),
    "a dtype that there is not": lying(b'"F64"', b'"F99"'),
    "no syntax": lying(b'"F64"', b"(((("),
    "a call": lying(b'"F64"', b"__import__('os')"),
    "another dtype": lying(b'"F64"', b'"F32"'),
    "another dtype of the same size": lying(b'"F64"', b'"I64"'),
    "a negative shape": lying(b"[2,2]", b"[-2,-2]"),
    "a shape beyond the file": lying(b"[2,2]", b"[2,2000000000000000]"),
    "offsets beyond the file": lying(b"[0,32]", b"[0,2000000000000000]"),
    "a shape within the file": lying(b"[2,2]", b"[2,1]"),
    "another shape of the same size": lying(b"[2,2]", b"[4,1]"),
    "parts that overlap": lying(b"[32,", b"[30,"),
    "no array": lying(b'"array"', b'"arrow"'),
    "cut short": lambda whole: whole[:20],
    "a header longer than the file": lambda whole: b"\xff" * 7 + b"\x7f" + whole[8:],
    "a header deeper than a stack": lambda whole: with_header(whole, lambda _: b"[" * 100_000),
    "null bytes": lying(b'"F64"', b'"\0\0\0"'),
    "a third part": lambda whole: safetensors.numpy.save(
        {**safetensors.numpy.load(whole), "more": np.zeros(1)}
    ),
    "an account that is no JSON": lambda whole: safetensors.numpy.save(
        {**safetensors.numpy.load(whole), "about": np.frombuffer(pickle.dumps(Evil()), np.uint8)}
    ),
    "an account of numbers": lambda whole: safetensors.numpy.save(
        {**safetensors.numpy.load(whole), "about": np.zeros((2, 2))}
    ),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_derived_array_that_is_no_array_is_as_good_as_none(mixed, head):
    overwrite(derived(mixed), head(content(derived(mixed))))
    with ZarrFeatureStore.open(mixed, "r+") as store:
        assert store.cached("gram", "key") is None
        assert "derived array" in check_store(mixed).findings[0].finding
        store.cache("gram", "key", np.eye(2))
        np.testing.assert_array_equal(store.cached("gram", "key"), np.eye(2))


def test_a_pickle_is_never_loaded(mixed, tmp_path, monkeypatch):
    """In the one place of a store that is neither Zarr nor JSON."""
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "evil.npy", np.array([Evil()]), allow_pickle=True)
    torch.save(Evil(), tmp_path / "evil.pt")
    whole = safetensors.numpy.load(content(derived(mixed)))
    inside = safetensors.numpy.save({**whole, "about": np.frombuffer(pickle.dumps(Evil()), np.uint8)})
    for payload in (
        content(tmp_path / "evil.npy"),
        content(tmp_path / "evil.pt"),
        pickle.dumps(Evil()),
        inside,
    ):
        overwrite(derived(mixed), payload)
        assert ZarrFeatureStore.open(mixed).cached("gram", "key") is None
        check_store(mixed)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    "kept", [np.zeros((0, 3)), np.array(2.5), np.arange(5, dtype=">i4"), np.array([True])]
)
def test_a_derived_array_of_any_shape_is_read_back(path, kept):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.cache("kept", "key", kept)
        found = store.cached("kept", "key")
    stored = kept.astype(kept.dtype.newbyteorder("<"))  # the same numbers, little endian
    assert (found.dtype, found.shape, found.tobytes()) == (stored.dtype, stored.shape, stored.tobytes())


@pytest.mark.parametrize("array", [np.array(["a"]), np.zeros(1, "M8[s]"), np.zeros(1, [("a", "f4")])])
def test_only_numbers_are_kept(path, array):
    with ZarrFeatureStore.create(path, MANIFEST) as store, pytest.raises(InvalidInputError, match="numbers"):
        store.cache("kept", "key", array)


ON_REQUEST = {
    ("cli/recipes.py", "exec"): "the recipe, a Python file that the user's config names, and nothing else",
    (
        "models/checkpoints.py",
        "torch.load",
    ): "weights_only is an argument, which stands for True where nobody gives it",
}
NAMES_OF_PICKLE = {"Pickler", "PicklingError", "UnpicklingError"}
"""Errors that are caught, and the class that writes: nothing that reads."""


@pytest.mark.parametrize("source", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_can_run_what_it_reads(source):
    """No pickle, no eval; torch and NumPy load with their own guards on."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not names & {"marshal", "shelve", "dill", "cloudpickle", "joblib"}
            assert not (isinstance(node, ast.ImportFrom) and node.module == "pickle")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            assert node.attr in NAMES_OF_PICKLE
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if (source.relative_to(PACKAGE).as_posix(), called) in ON_REQUEST:
                continue
            assert called not in ("eval", "exec", "__import__")
            assert called != "torch.load" or given.get("weights_only") == "True"
            assert "allow_pickle" not in given or given["allow_pickle"] == "False"


def test_whoever_reads_weights_unpickles_only_when_told_to():
    trees = {
        source.relative_to(PACKAGE).as_posix(): ast.parse(source.read_text(encoding="utf-8"))
        for source in sorted(PACKAGE.rglob("*.py"))
    }
    given = {
        (name, ast.unparse(node.value))
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "weights_only"
    }
    defaults = {
        ast.unparse(default)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if argument.arg == "weights_only" and default is not None
    }

    passed_on = {(name, "weights_only") for name in ("models/checkpoints.py", "integrations/lightning.py")}
    assert {pair for pair in given if pair[1] != "True"} == passed_on
    assert defaults == {"True"}


# Sizes that are lies.

SMALL = {
    "store": lambda path: os.path.join(path, "zarr.json"),
    "table": lambda path: folder(path, "zarr.json"),
    "array": lambda path: folder(path, "q/zarr.json"),
    "commit log": commit_log,
    "row log": lambda path: row_log(path, 2),
    "derived array": derived,
}
"""Files that are read as a whole, or whose end is looked at."""


@pytest.mark.parametrize("place", SMALL.values(), ids=SMALL.keys())
def test_a_file_of_a_tebibyte_is_not_read(mixed, place):
    """It is sparse: it takes no room on the disk, and would take all there is in memory."""
    os.truncate(place(mixed), 1 << 40)
    with peak_below(8 * MEBIBYTE):
        errors = read_everything(mixed)
    assert all("most" in str(error) for error in errors)
    assert errors or place in (commit_log, derived)  # of which the part that is theirs is as good as before


@pytest.mark.parametrize("key", ["features/c.0.0", "features/.stage/2-q"])
def test_a_chunk_of_a_tebibyte_is_not_read(mixed, key):
    os.truncate(folder(mixed, key), 1 << 40)
    with peak_below(8 * MEBIBYTE):
        errors = read_everything(mixed)
    assert all(str(1 << 40) in str(error) for error in errors)
    assert bool(errors) == key.startswith("features/c")


def test_a_giant_row_log_costs_its_chunk_and_no_other(mixed):
    os.truncate(row_log(mixed, 2), 1 << 40)
    with pytest.raises(CorruptStoreError, match=r"2\.log has 1\d+ bytes.*rows 8 to 10 \(chunk 2\).*--repair"):
        ZarrFeatureStore.open(mixed).open_table(NAME).done()
    assert not check_store(mixed).ok
    assert check_store(mixed, repair=True).ok
    with reading(mixed) as table:
        assert np.flatnonzero(table.done()).tolist() == list(range(8))
    finish(mixed)


def test_a_giant_row_log_of_a_committed_chunk_costs_nothing(mixed):
    overwrite(row_log(mixed, 0), b"")
    os.truncate(row_log(mixed, 0), 1 << 40)
    assert check_store(mixed).ok
    with reading(mixed) as table:
        assert np.flatnonzero(table.done()).tolist() == list(range(10))
    finish(mixed)


def resize_table(path, num_rows, chunk_rows):
    """Say another size in the table and in its arrays, so that they agree."""
    edit(folder(path, "zarr.json"), lambda record: record.update(num_rows=num_rows, chunk_rows=chunk_rows))
    for column in ("features", "q", "w"):
        document = json.loads(content(folder(path, column, "zarr.json")))
        document["shape"][0] = num_rows
        document["chunk_grid"]["configuration"]["chunk_shape"][0] = chunk_rows
        overwrite(folder(path, column, "zarr.json"), json.dumps(document).encode())


@pytest.mark.parametrize(
    ("num_rows", "chunk_rows"), [(1 << 33, 4), (1 << 60, 4), (11, 1 << 27), (10**30, 10**29)]
)
def test_a_table_that_no_machine_holds_is_refused(mixed, num_rows, chunk_rows):
    resize_table(mixed, num_rows, chunk_rows)
    with peak_below(8 * MEBIBYTE), pytest.raises(CorruptStoreError, match="does not describe a table"):
        ZarrFeatureStore.open(mixed).open_table(NAME)
    assert not check_store(mixed).ok


@pytest.mark.parametrize("chunk_rows", [5, 1 << 26])
def test_chunks_of_a_size_that_the_files_have_not_are_refused(mixed, chunk_rows):
    resize_table(mixed, 11, chunk_rows)
    with (
        peak_below(MEBIBYTE),
        pytest.raises(CorruptStoreError, match="is another table than the one that the store lists"),
    ):
        ZarrFeatureStore.open(mixed).open_table(NAME)


def test_nothing_is_allocated_for_rows_that_are_not_there(path):
    """Eight gigabytes are claimed, and no row is on the disk."""
    spec = TableSpec(1 << 20, (Column("features", 4096, "float16"),), 32)
    with writing(path, spec):
        pass
    with (
        reading(path) as table,
        peak_below(32 * MEBIBYTE),
        pytest.raises(IncompleteStoreError, match="Rows 0 to 31"),
    ):
        table.read("features")


def test_memory_that_there_is_not_is_an_error_of_the_store():
    with pytest.raises(CorruptStoreError, match=r"A list needs 1152921504606846978 bytes of memory.*restore"):
        zeros(2, what="A list", besides=1 << 60)


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec((1 << 32) + 1, SPEC.columns, 4),
        TableSpec(4, SPEC.columns, (1 << 26) + 1),
        TableSpec(4, (Column("features", 1 << 45, "float32"),), 4),
    ],
)
def test_a_table_that_could_not_be_opened_is_not_made(path, spec):
    with (
        ZarrFeatureStore.create(path, MANIFEST) as store,
        pytest.raises(InvalidInputError, match=r"up to \d+, got \d+"),
    ):
        store.create_table(NAME, spec)


def test_a_row_log_that_names_rows_without_end_is_refused(mixed):
    """Each record is compared with its bytes: a small log could keep a reader busy for hours."""
    log = bytes(HOLDER_BYTES) + encode_row(2, 0, 3, 0, seed=SEED) * 400
    overwrite(row_log(mixed, 2), log)
    with pytest.raises(CorruptStoreError, match=r"lists 3 rows more than once.*--repair"):
        ZarrFeatureStore.open(mixed).open_table(NAME).done()
    assert check_store(mixed, repair=True).ok
    finish(mixed)


def test_records_of_many_losses_are_read(mixed):
    """Rows that were lost and put again, some hundred times."""
    log = content(row_log(mixed, 2))
    overwrite(
        row_log(mixed, 2), log[:HOLDER_BYTES] + encode_row(2, 0, 3, 0, seed=SEED) * 300 + log[HOLDER_BYTES:]
    )
    finish(mixed)


@pytest.mark.parametrize("value", [True, 1.5, -1, "1", None, [1]])
@pytest.mark.parametrize("key", ["chunk", "generation", "rows", "size", "crc"])
def test_a_commit_record_counts_in_whole_numbers(key, value):
    found = {"chunk": 1, "generation": 1, "rows": 4, "size": 16, "crc": 7, key: value}
    columns = {"q": [found.pop("size"), found.pop("crc")]}
    body = json.dumps({**found, "columns": columns, "table": "id"}).encode()
    assert CommitRecord.decode(body + b"\t%08x" % crc32c(body)) is None
    right = {"chunk": 1, "generation": 1, "rows": 4, "columns": {"q": [16, 7]}}
    for table, known in (("id", True), (1, False)):
        body = json.dumps({**right, "table": table}).encode()
        assert (CommitRecord.decode(body + b"\t%08x" % crc32c(body)) is not None) == known


def test_a_line_without_end_ends_a_commit_log(mixed):
    log = commit_log(mixed)
    with open(log, "ab") as file:
        file.write(b"x" * (3 << 20) + b"\n")
    logs = CommitLogs(os.path.dirname(log), IDENTITY)
    for _ in range(2):
        logs.poll()
        assert sorted(logs.latest) == [0, 1]
        assert logs.damaged == {os.path.basename(log): 1}
    assert check_store(mixed).ok
    finish(mixed)


def test_a_commit_log_is_read_in_pieces(tmp_path):
    """Ten thousand records are more than one piece, and one of them stands across its end."""
    lines = [CommitRecord(chunk, 1, 4, {"q": (16, chunk)}, "id").encode() for chunk in range(20_000)]
    overwrite(tmp_path / "a.log", b"".join(lines)[:-1])
    logs = CommitLogs(str(tmp_path), "id")
    logs.poll()
    assert (len(logs.latest), logs.damaged) == (19_999, {})
    overwrite(tmp_path / "a.log", b"".join(lines))
    logs.poll()
    assert [logs.latest[chunk].columns["q"][1] for chunk in range(20_000)] == list(range(20_000))


@pytest.mark.parametrize("pid", [0, 2**31, 9_999_999_999])
def test_a_number_that_is_no_process_does_not_live(pid):
    assert not holder_lives(holder_line(pid))
    assert holder_lives(holder_line(os.getpid()))


def lose_the_records(path):
    """As if the last commit had been interrupted between two columns, and the log lost since."""
    rows = crc32c(*(values(range(4, 8))[name] for name in ("features", "q", "w")))
    os.rename(folder(path, "w/c.1"), staged(path, 1, "w"))
    overwrite(row_log(path, 1), bytes(HOLDER_BYTES) + encode_row(1, 0, 4, rows, seed=SEED))
    overwrite(commit_log(path), content(commit_log(path)).splitlines(keepends=True)[0])


def put_a_stranger_beside_the_stage(path):
    overwrite(folder(path, "features/c.2.0"), b"stranger")


@pytest.mark.parametrize("harm", [lose_the_records, put_a_stranger_beside_the_stage])
def test_what_a_reader_refuses_is_damage_and_the_repair_keeps_the_rows(mixed, harm):
    """A column that is visible without a commit record; the others are still in the stage."""
    harm(mixed)
    with pytest.raises(CorruptStoreError, match="without a commit record"):
        ZarrFeatureStore.open(mixed).open_table(NAME)
    assert not check_store(mixed).ok
    report = check_store(mixed, repair=True)
    assert report.ok
    with reading(mixed) as table:
        assert np.flatnonzero(table.done()).tolist() == list(range(10))
    if harm is put_a_stranger_beside_the_stage:
        assert content(os.path.join(report.set_aside[0].folder, "features-c.2.0")) == b"stranger"
    finish(mixed)


# What is no file.


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("place", SMALL.values(), ids=SMALL.keys())
def test_what_is_no_file_is_refused_and_never_waited_for(mixed, place, put):
    harmed = place(mixed)
    os.unlink(harmed)
    put(harmed)
    errors = read_everything(mixed)
    assert errors or place is derived  # which is as good as none
    assert all(re.search(r"is not a plain file\. Put|is missing|no store", str(error)) for error in errors)


def test_a_pipe_for_a_row_log_is_never_written_to(mixed):
    os.unlink(row_log(mixed, 2))
    os.mkfifo(row_log(mixed, 2))
    with pytest.raises(CorruptStoreError, match=r"2\.log is not a plain file"):
        open_for_writing(mixed)
    assert check_store(mixed, repair=True).ok
    finish(mixed)


def test_a_file_for_a_folder_is_refused(mixed):
    shutil.rmtree(folder(mixed, "features/.commits"))
    overwrite(folder(mixed, "features/.commits"), b"x")
    with pytest.raises(
        CorruptStoreError, match=r"Listing .*\.commits failed.* Restore the right one, or remove it"
    ):
        ZarrFeatureStore.open(mixed).open_table(NAME)


@pytest.mark.parametrize("hidden", ["the file", "its folder"])
def test_a_file_that_may_not_be_read_asks_for_the_right_to_read_it(tmp_path, monkeypatch, hidden):
    """Not for a folder that can be written, nor for mode='r'."""
    place = str(tmp_path / "zarr.json")
    overwrite(place, b"x")
    refused = {"the file": os.R_OK, "its folder": os.X_OK}[hidden]
    monkeypatch.setattr(os, "access", lambda path, mode: mode != refused)
    with (
        pytest.raises(
            StoreError, match=r"Permission denied\. Give this user the right to read .*zarr\.json"
        ) as caught,
        named_errors("Reading", place),
    ):
        raise PermissionError(13, "Permission denied", place)
    assert not isinstance(caught.value, ReadOnlyStoreError)


def test_a_file_that_may_be_read_and_not_be_written_asks_for_the_right_to_write_it(tmp_path):
    with pytest.raises(ReadOnlyStoreError, match="mode='r'"), named_errors("Writing", "x"):
        raise PermissionError(13, "Permission denied", str(tmp_path / "new"))


# Names and links.

BAD_NAMES = (
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "a..b",
    "/etc",
    "a//b",
    "a/",
    ".hidden",
    "a b",
    "a\0",
    "ä",
    "a\n",
    "x" * 65,
)
BAD_NAMES += ("zarr.json", "a/zarr.json", "ZARR.JSON", "a\\b", "~", "$HOME", "a:b", "%2e%2e")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_name_leads_out_of_the_store(path, name):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        before = snapshot(os.path.dirname(path))
        uses = [
            lambda: store.create_table(name, SPEC),
            lambda: store.open_table(name),
            lambda: store.drop_table(name),
            lambda: store.grow_table(name, 12),
            lambda: store.attributes(name),
            lambda: store.cached(name, "key"),
            lambda: store.cache(name, "key", np.eye(2)),
            lambda: store.create_table("t", TableSpec(4, (Column(name, 2, "float32"),), 4)),
        ]
        if name:
            uses.append(lambda: store.table_names(name))
        for use in uses:
            with pytest.raises(InvalidInputError, match="name"):
                use()
        assert snapshot(os.path.dirname(path)) == before


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_column_that_leads_out_of_the_store_is_refused_on_reading(mixed, name):
    edit(folder(mixed, "zarr.json"), lambda record: record["columns"][1].update(name=name))
    with pytest.raises(CorruptStoreError, match="does not describe a table"):
        ZarrFeatureStore.open(mixed).open_table(NAME)
    assert not check_store(mixed).ok


LINKED = [
    ".tables",
    "targets",
    NAME,
    f"{NAME}/q",
    f"{NAME}/features/.stage",
    f"{NAME}/features/.commits",
    f"{NAME}/zarr.json",
    f"{NAME}/q/zarr.json",
    f"{NAME}/q/c.0",
    f"{NAME}/features/.stage/2.log",
    f"{NAME}/features/.stage/2-q",
    ".cache",
    ".cache/gram.safetensors",
]
ACTIONS = {
    "read": lambda path: ZarrFeatureStore.open(path).open_table(NAME).read_chunk(0, "q"),
    "names": lambda path: ZarrFeatureStore.open(path).table_names(),
    "write": lambda path: finish(path),
    "grow": lambda path: ZarrFeatureStore.open(path, "r+").grow_table(NAME, 30),
    "cached": lambda path: ZarrFeatureStore.open(path).cached("gram", "key"),
    "cache": lambda path: ZarrFeatureStore.open(path, "r+").cache("gram", "key", np.ones((2, 2))),
    "verify": lambda path: check_store(path),
    "repair": lambda path: check_store(path, repair=True),
    "diff": lambda path: ZarrFeatureStore.open(path).diff(sound(path)),
    "diff, from the other": lambda path: sound(path).diff(ZarrFeatureStore.open(path)),
    "merge": lambda path: ZarrFeatureStore.open(path, "r+").merge([sound(path)]),
    "merge, from the other": lambda path: sound(path).merge([ZarrFeatureStore.open(path)]),
    "drop": lambda path: ZarrFeatureStore.open(path, "r+").drop_table(NAME),
}


def read_rows_and_marks(path):
    with reading(path) as table:
        table.read_chunk(0, "q")
        table.done()


def sound(path):
    return ZarrFeatureStore.create(f"{path}-sound", MANIFEST)


@pytest.mark.parametrize("linked", LINKED)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_no_link_is_followed_out_of_the_store(mixed, linked, action):
    """What the link points to stays as it was, to the byte; what it holds is not taken for the store's."""
    outside = os.path.join(os.path.dirname(mixed), "outside", "held")
    os.mkdir(os.path.dirname(outside))
    shutil.move(f"{mixed}/{linked}", outside)
    os.symlink(outside, f"{mixed}/{linked}")
    before = snapshot(os.path.dirname(outside))

    with contextlib.suppress(StoreError):
        action(mixed)
    assert snapshot(os.path.dirname(outside)) == before


@pytest.mark.parametrize("linked", [name for name in LINKED if "cache" not in name])
def test_a_link_in_a_table_is_refused_and_reported(mixed, linked):
    os.rename(f"{mixed}/{linked}", f"{mixed}-outside")
    os.symlink(f"{mixed}-outside", f"{mixed}/{linked}")
    with pytest.raises(CorruptStoreError, match=r"symbolic link|not a plain file"):
        read_rows_and_marks(mixed)
    assert any(re.search("link|plain file", finding.finding) for finding in check_store(mixed).findings)


@pytest.mark.parametrize("linked", [".tables", NAME, f"{NAME}/features", f"{NAME}/q"])
def test_no_link_is_followed_that_appears_after_the_look(mixed, linked, monkeypatch):
    """A repair looks for damage, then asks for the right to write; the link appears between the two."""
    for name in ("c.0.0", "c.1.0"):
        overwrite(folder(mixed, f"features/{name}"), b"damaged")
    overwrite(folder(mixed, "q/c.1"), b"damaged")
    overwrite(f"{mixed}/.tables/lost", b"damaged")
    outside, before = f"{mixed}-outside", []

    def allowed(path, mode):
        shutil.move(f"{mixed}/{linked}", outside)
        os.symlink(outside, f"{mixed}/{linked}")
        before.append(snapshot(outside))
        return True

    monkeypatch.setattr(os, "access", allowed)
    with pytest.raises(CorruptStoreError, match="is a symbolic link"):
        check_store(mixed, repair=True)
    assert [snapshot(outside)] == before


@pytest.mark.parametrize("name", ["2.log", "2-q"])
def test_a_file_with_another_name_elsewhere_is_not_written_to(mixed, name):
    """A hard link: its bytes are those of a file outside of the store."""
    path, outside = folder(mixed, f"features/.stage/{name}"), f"{mixed}-outside"
    os.link(path, outside)
    before = content(outside)
    with pytest.raises(CorruptStoreError, match="hard links"):
        finish(mixed)
    assert not check_store(mixed).ok
    assert check_store(mixed, repair=True).ok
    finish(mixed)
    check_all(mixed)
    assert content(outside) == before


def test_many_unknown_files_are_listed_once_and_named_in_part(mixed, monkeypatch):
    calls, real = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda *where: calls.append(where) or real(*where))
    check_store(mixed)
    few = len(calls)
    for number in range(1000):
        overwrite(f"{mixed}/.tables/x{number}", b"")
        overwrite(f"{mixed}/y{number}", b"")
    calls.clear()
    report = check_store(mixed)

    assert len(calls) <= few + 2
    assert len(report.findings) >= 2000
    assert len(str(report)) < 100_000
    assert "1900 more findings" in str(report)


@pytest.mark.parametrize(
    ("old", "new", "ok"),
    [
        ('"attributes"', '"bttributes"', False),
        ('"attributes"', '"other": 1, "attributes"', False),
        ('"attributes"', '"other": {"must_understand": false}, "attributes"', True),
    ],
)
def test_a_document_is_sound_if_zarr_opens_it(mixed, old, new, ok):
    path = folder(mixed, "w/zarr.json")
    overwrite(path, content(path).replace(old.encode(), new.encode()))
    try:
        zarr.open_array(folder(mixed, "w"), mode="r")
        opens = True
    except (TypeError, ValueError, zarr.errors.BaseZarrError):
        opens = False
    assert check_store(mixed).ok == opens == ok


@pytest.mark.parametrize("name", [".set-aside", ".cache"])
def test_nothing_is_put_where_a_link_leads(mixed, name):
    """The folders that a store makes when it first needs them."""
    outside, place = (
        f"{mixed}-outside",
        folder(mixed, "features", name) if name == ".set-aside" else f"{mixed}/{name}",
    )
    os.mkdir(outside)
    shutil.rmtree(place, ignore_errors=True)
    os.symlink(outside, place)
    overwrite(folder(mixed, "q/c.0"), b"damaged")
    with ZarrFeatureStore.open(mixed, "r+") as store:
        put = {
            ".cache": lambda: store.cache("gram", "key", np.eye(2)),
            ".set-aside": lambda: store.check(repair=True),
        }
        with pytest.raises(CorruptStoreError, match="is a symbolic link"):
            put[name]()
    assert os.listdir(outside) == []


def test_a_link_with_a_scratch_folders_name_is_left_alone(mixed):
    os.mkdir(f"{mixed}-outside")
    os.utime(f"{mixed}-outside", (0, 0))
    os.symlink(f"{mixed}-outside", f"{mixed}/.tables/.new-{'0' * 32}")
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.create_table("other", SPEC)
    assert os.path.isdir(f"{mixed}-outside")


def test_what_a_dropped_tables_name_links_to_is_kept(mixed):
    os.mkdir(f"{mixed}-outside")
    overwrite(f"{mixed}-outside/kept", b"x")
    os.symlink(f"{mixed}-outside", f"{mixed}/.tables/.dropped-targets%test%ckpt-0-{'0' * 32}")
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.drop_table(NAME)
    assert os.listdir(f"{mixed}-outside") == ["kept"]


def test_the_store_is_whole_again_without_the_link(mixed):
    """Following the advice: put the folder itself there."""
    shutil.move(folder(mixed), f"{mixed}-outside")
    os.symlink(f"{mixed}-outside", folder(mixed))
    with pytest.raises(CorruptStoreError, match="Replace it by the folder itself"), writing(mixed):
        pass
    os.unlink(folder(mixed))
    shutil.move(f"{mixed}-outside", folder(mixed))
    finish(mixed)
    check_all(mixed)
    assert not os.path.lexists(staged(mixed, 2, "q"))


ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e\r\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b" " * ((64 << 20) + 1), "67108865 bytes, expected at most 67108864"),
        (b"[" + b"[]," * (1 << 21) + b"[]]", "more than 2097152 values"),
        (b"{" + b",".join(b'"%d":0' % i for i in range((1 << 20) + 1)) + b"}", "more than 2097152 values"),
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 128 levels deep"),
        (b"[" * 200 + b"]" * 200, "nested more than 128 levels deep"),
        (b"[1e999]", "1e999 is not a finite number"),
        (b"[NaN]", "NaN is not a finite number"),
        (b"[" + b"9" * 5000 + b"]", "integer string conversion"),
        (b"\xff", "utf-8"),
        (b"", "Expecting value"),
    ],
    ids=["long", "lists", "keys", "deep", "deeper", "infinite", "nan", "digits", "bytes", "empty"],
)
def test_json_is_bounded_before_it_is_parsed(text, said):
    with peak_below(16 * MEBIBYTE), pytest.raises(ValueError, match=said):
        parse_json(text)


def test_json_of_a_large_model_is_within_the_bounds():
    """A hundred thousand modules: name, start and stop of every segment, names and shapes of all parameters."""
    modules = [f"model.layers.{i}.self_attention.query_projection" for i in range(100_000)]
    layout = [[name, 512 * i, 512 * (i + 1)] for i, name in enumerate(modules)]
    document = {"layout": layout, "parameters": {f"{name}.weight": [4096, 4096] for name in modules}}

    assert parse_json(json.dumps(document).encode()) == document


@pytest.mark.parametrize("where", ["", NAME, f"{NAME}/q"])
def test_a_large_zarr_json_is_refused_in_little_memory(where, mixed):
    path = os.path.join(mixed, where, "zarr.json")
    text = content(path).decode()
    overwrite(path, text.replace("{", '{"x": [' + "[]," * (3 << 20) + "[]],", 1).encode())

    with peak_below(64 * MEBIBYTE):
        errors = read_everything(mixed)
        report = check_store(mixed)
    assert errors
    assert all("more than 2097152 values" in str(error) for error in errors)
    assert not report.ok


@pytest.mark.parametrize("name", ["ckpt 0", "ckpt-0 (copy)", "x" * 65, "k\x1b[31m", "ZARR.JSON", "a..b"])
def test_a_table_under_a_name_that_none_can_have_is_told_by_reader_and_verify_alike(name, mixed):
    os.rename(folder(mixed), os.path.join(mixed, name))

    report = check_store(mixed)
    with pytest.raises(CorruptStoreError) as caught, ZarrFeatureStore.open(mixed) as store:
        store.table_names()
    # the table whose folder has got the name is lost from the list besides
    misnamed = [finding.finding for finding in report.findings if "is lost" not in finding.finding]
    assert misnamed == [str(caught.value)]
    assert not report.ok
    assert "no table or group can have the name" in str(caught.value)


def test_other_folders_of_any_name_harm_nothing(mixed):
    os.mkdir(os.path.join(mixed, "notes (copy)"))

    report = check_store(mixed)
    assert report.ok
    assert [finding.finding for finding in report.findings] == ["'notes (copy)' belongs to no table"]
    with ZarrFeatureStore.open(mixed) as store:
        assert store.table_names() == [NAME]


def test_what_a_store_says_tells_a_terminal_nothing(mixed):
    edit(os.path.join(mixed, "zarr.json"), lambda own: own["fingerprint"].update({ESCAPE: ESCAPE}))
    os.mkdir(os.path.join(mixed, f"x{ESCAPE}"))
    edit(os.path.join(mixed, NAME, "zarr.json"), lambda own: own["columns"][0].update(name=ESCAPE))

    texts = [str(check_store(mixed))]
    with pytest.raises(ManifestMismatchError) as caught:
        ZarrFeatureStore.create(mixed, MANIFEST)
    texts.append(str(caught.value))
    with pytest.raises(CorruptStoreError) as refused, ZarrFeatureStore.open(mixed) as store:
        store.open_table(NAME)
    texts.append(str(refused.value))
    assert all("x1b]0;title" in text for text in texts)
    assert all(letter.isprintable() or letter == "\n" for text in texts for letter in text)
    # no newline of a name makes a line of its own
    assert len(texts[0].splitlines()) == 2 + len(check_store(mixed).findings)


BOUNDED_ELSEWHERE = {
    "_validate.py",  # parse_json itself
    "store/disk/records.py",  # a line of at most a mebibyte
    "store/manifest.py",  # what was written by canonical_json just before
    "store/_grid.py",
}


def test_json_is_read_with_bounds_everywhere():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if any(ast.unparse(call) in ("json.loads", "json.load") for call in calls):
            found.add(path.relative_to(PACKAGE).as_posix())
    assert {path for path in found if not path.startswith("testing/")} == BOUNDED_ELSEWHERE
