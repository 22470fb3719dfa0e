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
import store_cases as cases
from late import Late
from store_cases import NAME, SPEC, commit_log, content, edit, finish, folder, overwrite, raises, snapshot

import trak_lite
from trak_lite import errors
from trak_lite.errors import CorruptStoreError, IncompleteStoreError, InvalidInputError, StoreError
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore, check_store

zarr = Late("zarr")

PACKAGE = Path(trak_lite.__file__).parent
MEBIBYTE = 1 << 20


def derived(path):
    return os.path.join(path, ".cache", "gram.safetensors")


def open_table(path):
    return ZarrFeatureStore.open(path).open_table(NAME)


def read_everything(path):
    ways = (
        lambda: ZarrFeatureStore.open(path).cached("gram", "key"),
        lambda: ZarrFeatureStore.open(path).table_names(),
        lambda: ZarrFeatureStore.open(path).attributes(NAME),
        lambda: open_table(path).read_chunk(0, "q"),
        lambda: open_table(path).done(),
        lambda: cases.open_for_writing(path)[1].pending(),
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


# Metadata.


def replaced(old, new, where=""):
    """Put other text into a ``zarr.json``, as it stands there."""

    def harm(path):
        name = os.path.join(path, where, "zarr.json")
        assert old in content(name)
        overwrite(name, content(name).replace(old, new))

    return harm


def seed_is(text):
    return replaced(b'"seed": 0', b'"seed": ' + text)


def torn(where, whole):
    """Leave something else of a ``zarr.json``, or nothing."""

    def harm(path):
        os.unlink(f"{path}/{where}/zarr.json")
        if whole is not None:
            overwrite(f"{path}/{where}/zarr.json", whole)

    return harm


def table_record(change):
    return lambda path: edit(folder(path, "zarr.json"), change)


def table_says(**record):
    return table_record(lambda found: found.update(record))


def resized(num_rows, chunk_rows):
    return lambda path: cases.say_sizes(path, num_rows=num_rows, chunk_rows=chunk_rows)


def circle(path):
    """A group says that it is a table, the table that it is an array, and the array that it is a group."""
    group, table, array = (f"{path}/{name}/zarr.json" for name in ("targets/test", NAME, f"{NAME}/q"))
    for place, other in zip((group, table, array), map(content, (table, array, group)), strict=True):
        overwrite(place, other)


def lost_column(place):
    return table_record(lambda record: record["columns"].pop(place))


def renamed_column(name):
    return table_record(lambda record: record["columns"][1].update(name=name))


def without_list_entry(harm):
    return lambda path: (harm(path), os.unlink(f"{path}/.tables/{cases.entry_name(NAME)}"))


def given_away(where, of):
    return lambda path: overwrite(f"{path}/{where}/zarr.json", content(f"{path}/{of}/zarr.json"))


def folder_renamed(name):
    return lambda path: os.rename(folder(path), os.path.join(path, name))


BAD_NAMES = ["", ".", "..", "../x", "a/../b", "a..b", "/etc", "a//b", "a/", ".hidden", "a b", "a\0", "ä"]
BAD_NAMES += ["a\n", "a\\b", "~", "$HOME", "a:b", "%2e%2e", "x" * 65, "zarr.json", "a/zarr.json", "ZARR.JSON"]
CODED = (b'"float32"', b'"float32"', b'"bytes"', b'"NaN"')
NO_TABLE = "does not describe a table"
NOT_THAT = "is another table than the one"
NOT_LISTED = "is another table than the one that the store lists"
NO_JSON = r"zarr\.json is not JSON"
NO_ATTRIBUTES = r"ckpt-0/zarr\.json records \w+ as attributes.* Restore"
LOST = rf"The table '{NAME}' of .* is lost.* Restore"
METADATA = [
    *((seed_is(n), r"/zarr\.json is not JSON .*finite") for n in (b"NaN", b"1e999")),
    *((replaced(b'"abc"', n, NAME), rf"{NAME}/{NO_JSON} .*finite") for n in (b"NaN", b"-Infinity")),
    *((seed_is(b"[" * n + b"]" * n), f"{NO_JSON}.*nested") for n in (130, 100_000)),
    (table_says(fingerprint=[["checkpoint", "abc"]]), NO_TABLE),
    (table_says(num_rows=-1), NO_TABLE),
    (table_says(num_rows="11"), NO_TABLE),
    (table_says(chunk_rows=0), NO_TABLE),
    (table_says(columns=[{"name": "q"}]), NO_TABLE),
    (table_says(columns=7), NO_TABLE),
    *((table_says(attributes=noted), NO_ATTRIBUTES) for noted in (7, [[]], "x", None)),
    *((resized(*sizes), NO_TABLE) for sizes in ((1 << 33, 4), (1 << 60, 4), (11, 1 << 27), (10**30, 10**29))),
    *((resized(11, chunk_rows), NOT_THAT) for chunk_rows in (5, 1 << 26)),
    *(
        (replaced(size, size[:-1] + b"8", NAME), "does not match its checksum")
        for size in (b'"chunk_rows": 4', b'"num_rows": 11', b'"width": 3')
    ),
    # A changed setting is refused by its checksum, a torn document as what it is; neither is ever made anew.
    (seed_is(b"1"), "does not match its checksum"),
    (replaced(b'"abc"', b'"abd"', NAME), "does not match its checksum"),
    (replaced(b"ckpt-0", b"ckpt-1", NAME), "does not match its checksum|does not desc"),
    (replaced(b'"trak_lite"', b'"trak_lhte"', NAME), "does not desc|lost"),
    *(
        (replaced(old, new, f"{NAME}/q"), r"q/zarr\.json contradicts its table: ")
        for old, new in zip(CODED, (b'"float30"', b'"float64"', b'"zstd"', b"0"), strict=True)
    ),
    *((torn(NAME, left), r"zarr\.json") for left in (None, b"", b"\xff", b"[]", b'{"node_type": "array"}')),
    *((torn(place, b"{"), r"zarr\.json") for place in ("", "targets", NAME, f"{NAME}/q")),
    *((torn(place, b"null"), r"zarr\.json") for place in ("", "targets", NAME, f"{NAME}/q")),
    (torn(f"{NAME}/q", None), r"zarr\.json"),
    *((lost_column(place), NOT_LISTED) for place in range(3)),
    *(
        (without_list_entry(lost_column(place)), rf"does not name the arrays \['{name}'\].* Restore")
        for place, name in enumerate(("features", "q", "w"))
    ),
    *((renamed_column(name), NO_TABLE) for name in BAD_NAMES),
    (given_away("targets", NAME), rf"targets/zarr\.json describes the table of '{NAME}'"),
    (given_away("targets/test", NAME), rf"test/zarr\.json describes the table of '{NAME}'"),
    (given_away(NAME, "targets"), r"ckpt-0(/\w+)?/zarr\.json"),
    (table_record(lambda record: record.pop("columns")), r"ckpt-0(/\w+)?/zarr\.json"),
    (circle, r"test/zarr\.json describes the table of"),
    *((lambda path, n=n: shutil.rmtree(f"{path}/{n}"), LOST) for n in ("targets", "targets/test", NAME)),
    *(
        (folder_renamed(name), "no table or group can have the name")
        for name in ("ckpt 0", "ckpt-0 (copy)", "x" * 65, "k\x1b[31m", "ZARR.JSON", "a..b")
    ),
]


@pytest.mark.parametrize(("harm", "message"), METADATA)
def test_metadata_that_make_no_sense_are_refused_and_cost_no_chunk(mixed, harm, message):
    """By every way into the store, in little memory, and by a check; a chunk is never judged by them."""
    harm(mixed)
    before = snapshot(mixed)
    with peak_below(8 * MEBIBYTE):
        errors = read_everything(mixed)
        assert snapshot(mixed).items() >= before.items()
        report = check_store(mixed, repair="is lost" not in message and message != NOT_THAT)
    assert any(re.search(message, str(error)) for error in errors), errors
    assert all(isinstance(error, CorruptStoreError) for error in errors), errors
    assert not report.ok
    assert not any(moved.chunk is not None for moved in report.set_aside)


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
        assert store.manifest.digest() != cases.MANIFEST.digest()


@pytest.mark.parametrize("which", ["targets", "targets/test"])
def test_a_group_that_describes_something_else_is_reported(mixed, which):
    edit(f"{mixed}/{which}/zarr.json", lambda record: record.update(num_rows=11))
    assert ZarrFeatureStore.open(mixed).table_names() == [NAME]
    report = check_store(mixed)
    assert not report.ok
    assert report.tally.done_rows == 10  # what is inside is looked at


FURTHER = {'"b': False, '"other": 1, "a': False, '"other": {"must_understand": false}, "a': True}


@pytest.mark.parametrize(("text", "ok"), FURTHER.items())
def test_a_document_is_sound_if_zarr_opens_it(mixed, text, ok):
    replaced(b'"attributes"', text.encode() + b'ttributes"', f"{NAME}/w")(mixed)
    try:
        zarr.open_array(folder(mixed, "w"), mode="r")
        opens = True
    except (TypeError, ValueError, zarr.errors.BaseZarrError):
        opens = False
    assert check_store(mixed).ok == opens == ok


ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e\r\n"


def test_what_a_store_says_tells_a_terminal_nothing(mixed):
    edit(os.path.join(mixed, "zarr.json"), lambda own: own["fingerprint"].update({ESCAPE: ESCAPE}))
    os.mkdir(os.path.join(mixed, f"x{ESCAPE}"))
    edit(os.path.join(mixed, NAME, "zarr.json"), lambda own: own["columns"][0].update(name=ESCAPE))
    report = check_store(mixed)
    with pytest.raises(errors.ManifestMismatchError) as mismatch:
        ZarrFeatureStore.create(mixed, cases.MANIFEST)
    with pytest.raises(CorruptStoreError) as refused:
        open_table(mixed)
    for text in (str(report), str(mismatch.value), str(refused.value)):
        assert "x1b]0;title" in text
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert len(str(report).splitlines()) == 2 + len(report.findings)  # no newline of a name makes a line


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


# Derived arrays: nothing of them is evaluated.


class Evil:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def with_header(change):
    """A file of safetensors with another header, whose length is told rightly."""

    def changed(whole):
        size = 8 + int.from_bytes(whole[:8], "little")
        header = change(whole[8:size])
        return len(header).to_bytes(8, "little") + header + whole[size:]

    return changed


def lying(old, new):
    def change(header):
        assert old in header
        return header.replace(old, new, 1)

    return with_header(change)


def with_array(**arrays):
    return lambda whole: safetensors.numpy.save({**safetensors.numpy.load(whole), **arrays})


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
    "a header deeper than a stack": with_header(lambda _: b"[" * 100_000),
    "null bytes": lying(b'"F64"', b'"\0\0\0"'),
    "a third part": with_array(more=np.zeros(1)),
    "an account that is no JSON": with_array(about=np.frombuffer(pickle.dumps(Evil()), np.uint8)),
    "an account of numbers": with_array(about=np.zeros((2, 2))),
    "a pickle": lambda whole: pickle.dumps(Evil()),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_derived_array_that_is_no_array_is_as_good_as_none(mixed, tmp_path, monkeypatch, head):
    monkeypatch.chdir(tmp_path)
    overwrite(derived(mixed), head(content(derived(mixed))))
    with ZarrFeatureStore.open(mixed, "r+") as store:
        assert store.cached("gram", "key") is None
        assert "derived array" in check_store(mixed).findings[0].finding
        store.cache("gram", "key", np.eye(2))
        np.testing.assert_array_equal(store.cached("gram", "key"), np.eye(2))
    assert not (tmp_path / "unpickled").exists()


ON_REQUEST = {
    ("cli/recipes.py", "exec"): "the recipe, a Python file that the user's config names, and nothing else",
    ("gradient_computers/recording.py", "exec"): "names that it numbers itself, and nothing that it reads",
    ("models/checkpoints.py", "torch.load"): "weights_only is an argument, True where nobody gives it",
}
NAMES_OF_PICKLE = {"Pickler", "PicklingError", "UnpicklingError"}  # errors, and what writes: none reads
BOUNDED_ELSEWHERE = {
    "core/json_text.py",  # the bounds themselves
    "methods/base.py",  # what was written just before
    "store/disk/records.py",  # a line of at most a mebibyte
    "store/manifest.py",  # what was written by canonical_json just before
    "store/_grid.py",
}
NAMED_BY_READERS = re.compile(
    r"marshal|shelve|dill|pickle|joblib|weights_only|json\.load|torch\.load|__import__|(?<![\w.])(eval|exec)\("
)
"""Files without these words need not be parsed."""


def test_no_module_can_run_what_it_reads_and_json_is_read_with_bounds():
    """No pickle, no eval; torch and NumPy load with their own guards on, which a user alone can take off."""
    parses, given, defaults = set(), set(), set()
    for source in sorted(PACKAGE.rglob("*.py")):
        name, text = source.relative_to(PACKAGE).as_posix(), source.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if NAMED_BY_READERS.search(text) else ():
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                assert not names & {"marshal", "shelve", "dill", "cloudpickle", "joblib"}, name
                assert not (isinstance(node, ast.ImportFrom) and node.module == "pickle"), name
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pickle":
                assert node.attr in NAMES_OF_PICKLE, name
            elif isinstance(node, ast.FunctionDef):
                options = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                defaults |= {ast.unparse(d) for one, d in options if one.arg == "weights_only" and d}
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
                guards = [one for one in node.keywords if one.arg in ("weights_only", "allow_pickle")]
                words = {keyword.arg: ast.unparse(keyword.value) for keyword in guards}
                parses |= {name} if called in ("json.loads", "json.load") else set()
                given |= {(name, words["weights_only"])} if "weights_only" in words else set()
                if (name, called) not in ON_REQUEST:
                    assert called not in ("eval", "exec", "__import__"), name
                    assert called != "torch.load" or words.get("weights_only") == "True", name
                    assert words.get("allow_pickle", "False") == "False", name
    assert {name for name in parses if not name.startswith("testing/")} == BOUNDED_ELSEWHERE
    assert {pair for pair in given if pair[1] != "True"} == {
        (name, "weights_only") for name in ("models/checkpoints.py", "integrations/lightning.py")
    }
    assert defaults == {"True"}


# Sizes that are lies.

SMALL = {
    "store": lambda path: os.path.join(path, "zarr.json"),
    "table": lambda path: folder(path, "zarr.json"),
    "array": lambda path: folder(path, "q/zarr.json"),
    "commit log": commit_log,
    "row log": lambda path: cases.row_log(path, 2),
    "derived array": derived,
}
"""Files that are read as a whole, or whose end is looked at."""
EACH_SMALL = pytest.mark.parametrize("place", SMALL.values(), ids=SMALL.keys())


@pytest.mark.parametrize("place", [*SMALL.values(), lambda path: folder(path, "q/c.0")])
def test_a_file_of_a_tebibyte_is_not_read(mixed, place):
    """It is sparse: it takes no room on the disk, and would take all there is in memory."""
    os.truncate(place(mixed), 1 << 40)
    with peak_below(8 * MEBIBYTE):
        errors = read_everything(mixed)
    assert all(str(1 << 40) in str(error) for error in errors)
    # Of these, the part that is theirs is as good as before.
    assert bool(errors) == (place not in (commit_log, derived, SMALL["row log"]))


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_giant_row_log_costs_no_row(mixed, chunk):
    with open(cases.row_log(mixed, chunk), "ab") as log:
        log.truncate(1 << 40)
    with peak_below(8 * MEBIBYTE):
        assert cases.done_rows(mixed) == list(range(10))
    assert check_store(mixed, repair=True).ok
    finish(mixed)


def test_nothing_is_allocated_for_rows_that_are_not_there(path):
    """Eight gigabytes are claimed, and no row is on the disk."""
    with cases.writing(path, TableSpec(1 << 20, (Column("features", 4096, "float16"),), 32)):
        pass
    with cases.reading(path) as table, peak_below(32 * MEBIBYTE):
        raises(IncompleteStoreError, "Rows 0 to 31", table.read, "features")


def commit_lines(path):
    return content(commit_log(path)).splitlines(keepends=True)


@pytest.mark.parametrize("value", [True, 1.5, -1, "1", None, [1]])
@pytest.mark.parametrize("key", ["chunk", "generation", "rows", "size", "crc", "table"])
def test_a_commit_record_counts_in_whole_numbers_and_names_its_table(mixed, key, value):
    """A record that does not is none: the chunk that it should prove has no record."""
    first, second = commit_lines(mixed)
    record = json.loads(first.rpartition(b"\t")[0])
    if key in ("size", "crc"):
        record["columns"]["q"][key == "crc"] = value
    else:
        record[key] = value
    body = json.dumps(record).encode()
    overwrite(commit_log(mixed), body + b"\t%08x\n" % cases.crc32c(body) + second)
    raises(CorruptStoreError, "chunks 0 without a commit record", open_table, mixed)


def test_a_commit_log_with_a_line_without_end_or_many_lines_is_read(mixed):
    """In pieces: thousands of records are more than one, and one of them stands across its end."""
    lines = commit_lines(mixed)
    overwrite(commit_log(mixed), lines[0] * 8_000 + lines[1])
    assert cases.done_rows(mixed) == list(range(10))
    with open(commit_log(mixed), "ab") as file:
        file.write(b"x" * (3 << 20) + b"\n")
    assert cases.done_rows(mixed) == list(range(10))
    assert check_store(mixed).ok
    finish(mixed)


def lose_the_records(path):
    """As if the last commit had been interrupted between two columns, and the log lost since."""
    rows = cases.values(range(4, 8))
    content_of = b"".join(rows[column.name].tobytes() for column in SPEC.columns)
    os.unlink(folder(path, "w/c.1"))
    overwrite(cases.row_log(path, 1), bytes(64) + cases.frame(cases.log_mark(1), [(0, 4)], content_of))
    overwrite(commit_log(path), commit_lines(path)[0])


def put_a_stranger_beside_the_stage(path):
    overwrite(folder(path, "features/c.2.0"), b"stranger")


@pytest.mark.parametrize("harm", [lose_the_records, put_a_stranger_beside_the_stage])
def test_what_a_reader_refuses_is_damage_and_the_repair_keeps_the_rows(mixed, harm):
    """A column that is visible without a commit record; the others are still in the stage."""
    harm(mixed)
    raises(CorruptStoreError, "without a commit record", open_table, mixed)
    assert not check_store(mixed).ok
    report = check_store(mixed, repair=True)
    assert report.ok
    assert cases.done_rows(mixed) == list(range(10))
    if harm is put_a_stranger_beside_the_stage:
        assert content(os.path.join(report.set_aside[0].folder, "features-c.2.0")) == b"stranger"
    finish(mixed)


@pytest.mark.parametrize("where", ["", NAME, f"{NAME}/q"])
def test_a_large_zarr_json_is_refused_in_little_memory(where, mixed):
    path = os.path.join(mixed, where, "zarr.json")
    overwrite(path, content(path).replace(b"{", b'{"x": [' + b"[]," * (3 << 20) + b"[]],", 1))
    with peak_below(64 * MEBIBYTE):
        errors = read_everything(mixed)
    assert errors
    assert all("more than 2097152 values" in str(error) for error in errors)
    assert not check_store(mixed).ok


def test_metadata_of_a_large_model_are_within_the_bounds(path):
    """A hundred thousand modules: name, start and stop of every segment."""
    layout = [[f"model.layers.{i}.query_projection", 512 * i, 512 * (i + 1)] for i in range(100_000)]
    manifest = Manifest({"layout": layout})
    ZarrFeatureStore.create(path, manifest).close()
    assert ZarrFeatureStore.open(path).manifest == manifest


# What is no file, and links.


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
@EACH_SMALL
def test_what_is_no_file_is_refused_and_never_waited_for(mixed, place, put):
    """Nor is a pipe ever written to."""
    harmed = place(mixed)
    os.unlink(harmed)
    put(harmed)
    errors = read_everything(mixed)
    assert errors or place is derived  # which is as good as none
    assert all(re.search(r"is not a plain file\. Put|is missing|no store", str(error)) for error in errors)
    if place is SMALL["row log"]:
        raises(CorruptStoreError, r"2\.rows is not a plain file", cases.open_for_writing, mixed)
        assert check_store(mixed, repair=True).ok
        finish(mixed)


def test_a_file_for_a_folder_is_refused(mixed):
    shutil.rmtree(folder(mixed, "features/.commits"))
    overwrite(folder(mixed, "features/.commits"), b"x")
    said = r"Listing .*\.commits failed.* Restore the right one, or rem"
    raises(CorruptStoreError, said, open_table, mixed)


LINKED = [".tables", "targets", NAME, ".cache", ".cache/gram.safetensors"]
LINKED += [f"{NAME}/{name}" for name in ("q", "zarr.json", "q/zarr.json", "q/c.0")]
LINKED += [f"{NAME}/features/{name}" for name in (".stage", ".commits", ".stage/2.rows")]


def read_rows_and_marks(path):
    with cases.reading(path) as table:
        table.read_chunk(0, "q")
        table.done()


def sound(path):
    return ZarrFeatureStore.create(f"{path}-sound", cases.MANIFEST)


ACTIONS = {
    "read": lambda path: open_table(path).read_chunk(0, "q"),
    "names": lambda path: ZarrFeatureStore.open(path).table_names(),
    "write": finish,
    "grow": lambda path: ZarrFeatureStore.open(path, "r+").grow_table(NAME, 30),
    "cached": lambda path: ZarrFeatureStore.open(path).cached("gram", "key"),
    "cache": lambda path: ZarrFeatureStore.open(path, "r+").cache("gram", "key", np.ones((2, 2))),
    "check": check_store,
    "repair": lambda path: check_store(path, repair=True),
    "diff": lambda path: ZarrFeatureStore.open(path).diff(sound(path)),
    "diff, from the other": lambda path: sound(path).diff(ZarrFeatureStore.open(path)),
    "merge": lambda path: ZarrFeatureStore.open(path, "r+").merge([sound(path)]),
    "merge, from the other": lambda path: sound(path).merge([ZarrFeatureStore.open(path)]),
    "drop": lambda path: ZarrFeatureStore.open(path, "r+").drop_table(NAME),
}


@pytest.mark.parametrize("linked", LINKED)
def test_no_link_is_followed_out_of_the_store(mixed, tmp_path, linked):
    """What it points to stays as it was, to the byte, and is not taken for the store's; reader and check say so."""
    for number, action in enumerate(ACTIONS.values()):
        path, outside = str(tmp_path / f"{number}.zarr"), str(tmp_path / f"outside-{number}" / "held")
        shutil.copytree(mixed, path)
        os.mkdir(os.path.dirname(outside))
        cases.link_away(f"{path}/{linked}", outside)
        before = snapshot(os.path.dirname(outside))
        if action is ACTIONS["read"] and "cache" not in linked:
            raises(CorruptStoreError, r"symbolic link|not a plain file", read_rows_and_marks, path)
            findings = check_store(path).findings
            assert any(re.search("link|plain file", finding.finding) for finding in findings)
        with contextlib.suppress(StoreError):
            action(path)
        assert snapshot(os.path.dirname(outside)) == before, action


@pytest.mark.parametrize("linked", [".tables", NAME, f"{NAME}/features", f"{NAME}/q"])
def test_no_link_is_followed_that_appears_after_the_look(mixed, linked, monkeypatch):
    """A repair looks for damage, then asks for the right to write; the link appears between the two."""
    for name in ("features/c.0.0", "features/c.1.0", "q/c.1"):
        overwrite(folder(mixed, name), b"damaged")
    overwrite(f"{mixed}/.tables/lost", b"damaged")
    outside, before = f"{mixed}-outside", []

    def allowed(path, mode):
        cases.link_away(f"{mixed}/{linked}", outside)
        before.append(snapshot(outside))
        return True

    monkeypatch.setattr(os, "access", allowed)
    raises(CorruptStoreError, "is a symbolic link", check_store, mixed, repair=True)
    assert [snapshot(outside)] == before


def test_a_file_with_another_name_elsewhere_is_not_written_to(mixed):
    """A hard link: its bytes are those of a file outside of the store."""
    path, outside = cases.row_log(mixed, 2), f"{mixed}-outside"
    os.link(path, outside)
    before = content(outside)
    raises(CorruptStoreError, "hard links", finish, mixed)
    assert not check_store(mixed).ok
    assert check_store(mixed, repair=True).ok
    finish(mixed)
    assert content(outside) == before


def test_nothing_is_put_where_a_link_leads(mixed):
    """The folder that a repair makes when it first needs it."""
    outside = f"{mixed}-outside"
    os.mkdir(outside)
    os.symlink(outside, folder(mixed, "features", ".set-aside"))
    overwrite(folder(mixed, "q/c.0"), b"damaged")
    raises(CorruptStoreError, "symbolic link", check_store, mixed, repair=True)
    assert os.listdir(outside) == []


@pytest.mark.parametrize("name", [".new-", ".dropped-targets%test%ckpt-0-"])
def test_a_link_with_a_scratch_folders_name_is_left_alone(mixed, name):
    os.mkdir(f"{mixed}-outside")
    overwrite(f"{mixed}-outside/kept", b"x")
    os.utime(f"{mixed}-outside", (0, 0))
    os.symlink(f"{mixed}-outside", f"{mixed}/.tables/{name}{'0' * 32}")
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.create_table("other", SPEC)
        store.drop_table(NAME)
    assert os.listdir(f"{mixed}-outside") == ["kept"]


def test_a_link_in_a_group_without_metadata_is_refused_and_named_by_a_check(mixed):
    os.remove(f"{mixed}/targets/zarr.json")
    cases.link_away(f"{mixed}/targets/test", f"{mixed}-outside")
    said = r"is a symbolic link.*Replace it by the folder itself"
    raises(CorruptStoreError, said, ZarrFeatureStore.open(mixed).open_table, "targets/test")
    findings = check_store(mixed).findings
    assert "targets/test" in {finding.table for finding in findings if finding.level == "damage"}
