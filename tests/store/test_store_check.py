"""Damaged bytes cost rows or raise: a check finds them and nothing else, and a repair costs the damaged rows alone."""

import errno
import itertools
import mmap
import os
import shutil
import time
from collections import Counter

import numpy as np
import pytest
import store_cases as cases
from store_cases import NAME, SPEC, content, finish, flip, folder, overwrite, raises, reading, row_log, values

from trak_lite import errors
from trak_lite.errors import (
    CorruptStoreError,
    IncompleteStoreError,
    MissingStoreError,
    ReadOnlyStoreError,
    StoreError,
)
from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore, check_store


@pytest.fixture
def half(path, request):
    """Chunk 1 is staged in two puts, of row 4 and of rows 5 and 6; the others have no row."""
    spec = getattr(request, "param", SPEC)
    with cases.writing(path, spec) as table:
        table.put(4, values([4], spec))
        table.put(5, values([5, 6], spec))
    return path


def places(report):
    """Chunk, rows and column of each damage."""
    damage = (finding for finding in report.findings if finding.level == "damage")
    return [(f.chunk, None if f.rows is None else list(f.rows), f.column) for f in damage]


def link(path):
    cases.link_away(path, path.split("run.zarr")[0] + "elsewhere")


def replace_by(make):
    return lambda path: (os.unlink(path), make(path))


def resize(size):
    return lambda path: overwrite(path, (content(path) * 2)[:size])


def key(name):
    return lambda path: folder(path, name)


LOG = cases.commit_log
LOG_1, LOG_2, STAGED_2 = (key(f"features/.stage/{n}") for n in ("1.rows", "2.rows", "2-w"))
FOUR, EIGHT = [4, 5, 6, 7], list(range(8))
ZERO_LOST, ONE_LOST, TWO_LOST = (0, EIGHT[:4], None), (1, FOUR, None), (2, [8, 9, 10], None)
DAMAGE = {
    "a flipped bit": (key("features/c.1.0"), flip, [(1, FOUR, "features")], FOUR),
    "a chunk cut short": (key("q/c.1"), resize(15), [(1, FOUR, "q")], FOUR),
    "an empty chunk": (key("q/c.1"), resize(0), [(1, FOUR, "q")], FOUR),
    "a longer chunk": (key("q/c.1"), resize(17), [(1, FOUR, "q")], FOUR),
    "a missing column": (key("w/c.1"), os.unlink, [ONE_LOST], FOUR),
    "a linked chunk": (key("w/c.1"), link, [(1, FOUR, "w")], FOUR),
    "a folder for a chunk": (key("w/c.1"), replace_by(os.mkdir), [(1, FOUR, "w")], FOUR),
    "a pipe for a chunk": (key("w/c.1"), replace_by(os.mkfifo), [(1, FOUR, "w")], FOUR),
    "a chunk outside the grid": (key("q/c.7"), lambda p: overwrite(p, b"x"), [(7, None, "q")], []),
    "a flipped bit in a commit record": (LOG, flip, [ZERO_LOST], EIGHT[:4]),
    "a lost commit log": (LOG, os.unlink, [ZERO_LOST, ONE_LOST], EIGHT),
    "a linked commit log": (LOG, link, [(None, None, None), ZERO_LOST, ONE_LOST], EIGHT),
    "a flipped bit in a staged row": (str, lambda p: cases.flip_row(p, 2, "q"), [(2, [8], None)], [8]),
    "a linked file to publish": (STAGED_2, lambda p: (overwrite(p, b""), link(p)), [TWO_LOST], []),
    "a flipped bit in a frame": (LOG_2, lambda p: flip(p, 70), [TWO_LOST], [8]),
    "a linked row log": (LOG_2, link, [TWO_LOST], [8, 9]),
    "and one of a committed chunk": (LOG_1, lambda p: os.symlink("/elsewhere", p), [ONE_LOST], []),
}


def contents(path):
    names = [name for name in cases.files_below(path) if os.path.isfile(name) and not os.path.islink(name)]
    return Counter(whole for whole in map(content, names) if whole)


@pytest.mark.parametrize(("place", "harm", "expected", "lost"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_repair_costs_exactly_the_damaged_rows(mixed, place, harm, expected, lost):
    """Damage is named by table, chunk, rows and column; a repair deletes nothing, a second one has nothing to do."""
    harm(place(mixed))
    report, before = check_store(mixed), contents(mixed)
    assert not report.ok
    assert places(report) == expected
    assert {finding.table for finding in report.findings} == {NAME}
    assert all(finding.next_step for finding in report.findings)
    report = check_store(mixed, repair=True)
    assert report.ok
    assert report.set_aside
    assert cases.done_rows(mixed) == [row for row in range(10) if row not in lost]
    assert report.tally.pending_rows == 1 + len(lost)
    assert before <= contents(mixed)
    names = cases.files_below(mixed)
    again = check_store(mixed, repair=True)
    assert (again.ok, again.set_aside, cases.files_below(mixed)) == (True, (), names)
    finish(mixed)
    assert check_store(mixed).ok


def test_a_repair_says_where_it_put_what_it_found_at_once(mixed):
    for name in ("a flipped bit in a commit record", "a flipped bit", "a flipped bit in a staged row"):
        place, harm, _, _ = DAMAGE[name]
        harm(place(mixed))
    cases.flip_row(mixed, 2, "features", put=1)
    assert places(check_store(mixed)) == [(0, EIGHT[:4], None), (1, FOUR, "features"), (2, [8, 9], None)]
    report = check_store(mixed, repair=True)
    (moved,) = (each for each in report.set_aside if each.chunk == 1)
    assert (report.ok, moved.table, moved.rows) == (True, NAME, (range(4, 8),))
    assert sorted(os.listdir(moved.folder)) == ["features-c.1.0", "q-c.1", "w-c.1"]
    assert f"chunk 1 (rows 4 to 7 are pending) of {NAME} is in {moved.folder}" in str(report)
    assert cases.done_rows(mixed) == []


@pytest.mark.parametrize(("count", "tally"), [(0, (0, 0, 0, 11)), (6, (1, 56, 6, 5)), (11, (3, 168, 11, 0))])
def test_a_sound_store_is_called_so(path, count, tally):
    """Also once a tool that drops empty folders has copied it."""
    with cases.writing(path) as table:
        if count:
            table.put(0, values(range(count)))
    if count == 11:
        os.rmdir(folder(path, "features", ".stage"))
    report = check_store(path)
    assert (report.ok, report.findings) == (True, ())
    seen = report.tally
    assert (seen.tables, seen.chunks, seen.bytes, seen.done_rows, seen.pending_rows) == (1, *tally)
    finish(path)


def test_a_finding_and_an_error_name_table_chunk_rows_both_checksums_and_the_repair(mixed):
    flip(folder(mixed, "q/c.1"))
    (finding,) = check_store(mixed).findings
    titles, row, total = str(check_store(mixed)).splitlines()
    assert row.startswith(f"damage  {NAME}  1      4 to 7  q       checksum ")
    assert titles.index("finding") == row.index("checksum")
    assert total.startswith(f"{mixed}: 1 damage, 0 notes; 1 table, 6 rows done, 5 pending")
    found, stored = finding.finding.split()[1].strip(","), finding.finding.split()[-1]
    assert found != stored
    with reading(mixed) as table, pytest.raises(CorruptStoreError) as caught:
        table.read_chunk(1, "q")
    said = [f"rows 4 to 7 (chunk 1) of {mixed}/{NAME}", f"{found}, recorded {stored}", folder(mixed, "q/c.1")]
    for part in (*said, f"'trak-lite check {mixed} --repair'"):
        assert part in str(caught.value)


IN_TABLE = [f"{NAME}/q/{name}" for name in ("notes.txt", "c.0.0.partial", "c.x", "c.00")]
IN_TABLE += [f"{NAME}/features/{name}" for name in (".stage/9-q", ".commits/x")]
OUTSIDE = ["notes.txt", "targets/.hidden", "targets/a b/x", "scratch/x", f"{NAME}/x", "notes (copy)/x"]


@pytest.mark.parametrize("name", [*IN_TABLE, *OUTSIDE])
def test_a_file_that_belongs_to_nothing_is_noted(mixed, name):
    os.makedirs(os.path.dirname(f"{mixed}/{name}"), exist_ok=True)
    overwrite(f"{mixed}/{name}", b"x")
    report = check_store(mixed)
    (finding,) = report.findings
    assert (report.ok, finding.level) == (True, "note")
    assert "run.zarr: sound, 1 note; " in str(report)
    if name in IN_TABLE:
        assert (finding.table, repr(os.path.basename(name)) in finding.finding) == (NAME, True)
    else:
        assert "belongs to no table" in finding.finding
    with ZarrFeatureStore.open(mixed) as store:
        assert store.table_names() == [NAME]
    with cases.writing(mixed) as table:
        cases.put_pending(table)
        cases.check_rows(table)


def test_a_scratch_folder_is_noted_once_it_is_old(mixed):
    for name in (".new", ".dropped-ckpt-0"):
        os.mkdir(f"{mixed}/.tables/{name}-{'0' * 32}")
        assert check_store(mixed).findings == ()
        os.utime(f"{mixed}/.tables/{name}-{'0' * 32}", (time.time() - 3600,) * 2)
        (finding,) = check_store(mixed).findings
        assert (finding.level, "interrupted" in finding.finding) == ("note", True)
        ZarrFeatureStore.open(mixed, "r+").close()
        assert check_store(mixed).findings == ()


def test_a_damaged_derived_array_is_noted_and_as_good_as_none(mixed):
    """Whichever byte it is, and wherever it ends; a scratch file and a link are left alone."""
    kept = f"{mixed}/.cache/gram.safetensors"
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.cache("gram", "key", np.eye(3))
        assert check_store(mixed).findings == ()
        overwrite(f"{mixed}/.cache/scratch.safetensors.new-{'0' * 32}", b"")
        assert check_store(mixed).findings == ()
        whole = content(kept)
        harmed = [cases.flipped(whole, byte, byte % 8) for byte in range(len(whole))]
        for each in [*harmed, *(whole[:cut] for cut in range(0, len(whole), 3))]:
            overwrite(kept, each)
            assert store.cached("gram", "key") is None
        report = check_store(mixed)
        assert (report.ok, "derived array" in report.findings[0].finding) == (True, True)
        store.cache("gram", "key", np.eye(3))
        np.testing.assert_array_equal(store.cached("gram", "key"), np.eye(3))
    os.symlink("gram.safetensors", f"{mixed}/.cache/link.safetensors")
    report = check_store(mixed)
    assert (report.ok, "derived array" in report.findings[0].finding) == (True, True)


def test_torn_metadata_is_a_finding_and_the_rest_is_looked_at(mixed):
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.create_table("other", cases.SPEC).put(0, values(range(4)))
    flip(f"{mixed}/other/q/c.0")
    overwrite(folder(mixed, "q", "zarr.json"), b"{")
    damage = [(f.table, f.chunk) for f in check_store(mixed).findings if f.level == "damage"]
    assert sorted(damage, key=str) == [("other", 0), (NAME, None)]
    assert not check_store(mixed, repair=True).ok
    assert not os.path.lexists(f"{mixed}/other/q/c.0")
    os.unlink(f"{mixed}/zarr.json")
    said = r"is a store without its zarr\.json.*Restore zarr\.json from a backup, or use another path\. "
    raises(CorruptStoreError, said, cases.open_for_writing, mixed)
    raises(MissingStoreError, said, ZarrFeatureStore.open, mixed)
    assert [f.level for f in check_store(mixed).findings if f.table is None] == ["damage"]


def test_a_disk_that_cannot_be_read_is_a_finding(mixed):
    error = OSError(errno.EIO, "Input/output error")
    with cases.failing_for("open", lambda name: str(name).startswith("c."), error):
        report = check_store(mixed)
    assert not report.ok
    assert {finding.chunk for finding in report.findings} == {0, 1}
    assert all("Input/output error" in finding.finding for finding in report.findings)


def test_a_repair_that_may_not_write_or_cannot_rename_says_so(mixed, monkeypatch):
    flip(folder(mixed, "q/c.1"))
    with ZarrFeatureStore.open(mixed) as store, pytest.raises(ReadOnlyStoreError, match="opened for reading"):
        store.check(repair=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        raises(ReadOnlyStoreError, "nothing was repaired", check_store, mixed, repair=True)

    with cases.failing_call("rename", 1, *[OSError(errno.EIO, "broken")] * 9):
        raises(StoreError, r"Setting aside files of .* failed: broken", check_store, mixed, repair=True)
    assert check_store(mixed, repair=True).ok


def test_an_open_store_repairs_itself_and_goes_on(mixed):
    """Its own locks, maps and memory of staged chunks do not stand in the way."""
    store, table = cases.open_for_writing(mixed)
    table.read_chunk(1, "q")
    flip(folder(mixed, "q/c.1"))
    cases.flip_row(mixed, 2, "w")
    assert store.check(repair=True).ok
    assert table.pending().tolist() == [4, 5, 6, 7, 8, 10]  # row 9 has a record of its own
    cases.put_pending(table, 1)
    store.close()
    cases.check_all(mixed)


def test_a_chunk_in_a_writers_hand_is_left_alone(path):
    store, table = cases.open_for_writing(path)
    table.put(0, values([0, 1]))
    cases.flip_row(path, 0, "q")
    report = check_store(path, repair=True)
    assert (report.ok, report.set_aside) == (False, ())
    assert "left alone" in report.findings[-1].finding
    store.close()
    assert check_store(path, repair=True).ok
    finish(path)


# Every byte.


def test_a_row_log_torn_at_any_byte_keeps_its_whole_frames(half):
    log, (_, (second, rows, _)) = content(row_log(half, 1)), cases.frames(half, 1)
    edges = {place + near for place in (64, second, rows) for near in (-1, 0, 1)}
    for cut in sorted(edges.union(range(0, len(log), 4)).intersection(range(len(log)))):
        overwrite(row_log(half, 1), log[:cut])
        assert cases.done_rows(half) == ([4] if cut >= second else [])
        assert check_store(half).ok
    for cut in (0, 63, 64, second, second + 9):
        shutil.copytree(half, f"{half}-{cut}")
        overwrite(row_log(f"{half}-{cut}", 1), log[:cut])
        finish(f"{half}-{cut}", batch=1)


def test_a_description_that_a_kill_cut_off_is_no_damage(half):
    """It is written last, and a kill may end the writing between two pages: zeros follow what was written."""
    log, (_, (second, rows, _)) = content(row_log(half, 1)), cases.frames(half, 1)
    for cut in range(second, rows):
        overwrite(row_log(half, 1), log[:cut] + bytes(rows - cut) + log[rows:])
        assert cases.done_rows(half) == [4]
        assert check_store(half).findings == ()
    finish(half)


@pytest.mark.parametrize(("half", "step"), [(SPEC, 3), (cases.PACKED, 9)], indirect=["half"])
def test_a_flipped_bit_in_a_row_log_costs_the_rows_of_its_frame(half, step):
    """Of the line that names the writer, nothing; of integers as of scales."""
    whole, (second, rows, _) = content(row_log(half, 1)), cases.frames(half, 1)[1]
    edges = {63, 64, second - 1, *range(second, second + 14), rows - 1, rows, len(whole) - 1}
    for byte in sorted(edges.union(range(0, len(whole), step))):
        overwrite(row_log(half, 1), cases.flipped(whole, byte, byte % 8))
        lost = set() if byte < 64 else {4} if byte < second else {5, 6}
        assert cases.done_rows(half) == sorted({4, 5, 6} - lost)
        # The length of the last frame may be torn.
        report = check_store(half)
        assert report.ok == (not lost) or byte in range(second + 8, second + 12)
        if byte >= rows:
            assert report.findings[0].finding == "the row log does not hold them"


def test_staged_rows_that_change_under_the_writer_are_not_committed(path):
    with cases.writing(path) as table:
        table.put(0, values(range(3)))
        cases.flip_row(path, 0, "q", row=1)
        raises(CorruptStoreError, "changed after they were written", table.put, 3, values([3]))
        assert table.committed_chunks() == []
        assert table.pending().tolist() == list(range(11))
    finish(path)


COMMITTED = [(key(name), "checksum differs", 1) for name in ("features/c.1.0", "q/c.1", "w/c.2")]
COMMITTED += [(cases.commit_log, "without a commit record", 3)]


@pytest.mark.parametrize(("place", "message", "step"), COMMITTED)
def test_a_flipped_bit_in_a_committed_chunk_or_its_record_is_never_read(full, place, message, step):
    file = place(full)
    whole = content(file)
    for byte in range(0, len(whole), step):
        overwrite(file, cases.flipped(whole, byte, byte % 8))
        with pytest.raises(CorruptStoreError, match=message), reading(full) as table:
            [table.read(name) for name in ("features", "q", "w")]
    if place is not cases.commit_log:  # the others are as before
        with reading(full) as table:
            for name, expected in values(range(4)).items():
                np.testing.assert_array_equal(table.read_chunk(0, name), expected)


# Readers.


@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
def test_a_chunk_of_another_size_is_refused(full, size):
    """Nor is a file mapped beyond its end: touching a page that it does not have would kill the process."""
    with reading(full) as table:
        resize(size)(folder(full, "q/c.1"))
        raises(CorruptStoreError, f"{size} bytes, expected 16", table.read_chunk, 1, "q")
    with pytest.raises(CorruptStoreError, match=rf"rows 4 to 7 \(chunk 1\).*'q': {size}"), reading(full):
        pass


@pytest.mark.parametrize("keys", [["features/c.1.0"], ["w/c.1"], ["features/c.1.0", "q/c.1", "w/c.1"]])
def test_a_deleted_chunk_is_pending_and_computed_again(full, keys):
    """A reader that has it mapped keeps its rows; one that has not is told."""
    lost, whole = keys[0].split("/")[0], len(keys) == 3
    with reading(full) as before:
        held = before.read_chunk(1, "q")
        for name in keys:
            os.unlink(folder(full, name))
        raises(IncompleteStoreError, "was removed", before.read_chunk, 1, lost)
    np.testing.assert_array_equal(held, values(FOUR)["q"])
    report = check_store(full)
    (finding,) = report.findings
    assert report.ok == whole
    assert (finding.level, finding.chunk, finding.finding) == (
        ("note", 1, "committed once; its files were set aside or removed")
        if whole
        else ("damage", 1, f"no file of the columns {lost}, and the row log does not hold them")
    )
    with reading(full) as table:
        assert table.pending().tolist() == FOUR
        assert table.committed_chunks() == [0, 2]
        for column in ("features", "q"):
            raises(IncompleteStoreError, "Rows 4 to 7", table.read_chunk, 1, column)
    if whole:
        cases.make(full, [4])
        assert check_store(full).findings == ()
    finish(full)


AGAIN = [(SPEC, "features/c.1.0"), (cases.PACKED, "features/c.1.0"), (cases.PACKED, "features_scale/c.1")]


@pytest.mark.parametrize(("spec", "file"), AGAIN)
def test_a_chunk_committed_again_may_hold_other_values(path, spec, file):
    """The record of the latest commit is the law, in whichever log it stands, also for those who had it open.

    Integers and scales are taken from one commit.
    """
    cases.make(path, range(11), spec)
    with reading(path) as before:
        assert before.committed_chunks() == [0, 1, 2]
        for attempt in range(1, 7 if spec is SPEC else 3):
            flip(folder(path, file))
            with pytest.raises(CorruptStoreError, match="checksum"), reading(path) as table:
                table.read("features")
            assert places(check_store(path)) == [(1, FOUR, file.split("/")[0])]
            check_store(path, repair=True)
            memory = MemoryFeatureStore(cases.MANIFEST).create_table(NAME, spec)
            memory.put(4, values(FOUR, spec, attempt=attempt))
            with cases.writing(path, spec) as table:
                assert table.pending().tolist() == FOUR
                table.put(4, values(FOUR, spec, attempt=attempt))
            with reading(path) as table:
                for reader, column in itertools.product((table, before), spec.columns):
                    expected = memory.read_chunk(1, column.name)
                    np.testing.assert_array_equal(reader.read_chunk(1, column.name), expected)
    assert check_store(path).ok


def test_never_reads_without_comparing_and_a_checksum_is_computed_once(full, monkeypatch):
    whole = content(folder(full, "q/c.1"))
    with ZarrFeatureStore.open(full) as store:
        table = store.open_table(NAME)
        first = table.read_chunk(1, "q")
        maps, real = [], mmap.mmap
        monkeypatch.setattr(mmap, "mmap", lambda *a, **k: maps.append(a) or real(*a, **k))
        np.testing.assert_array_equal(table.read_chunk(1, "q"), first)
        assert maps == []
        found = os.stat(folder(full, "q/c.1"))
        overwrite(
            folder(full, "q/c.1"), cases.flipped(whole, 0, 3)
        )  # and what is written later is compared again
        os.utime(folder(full, "q/c.1"), ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        raises(CorruptStoreError, "checksum differs", table.read_rows, "q", [4])
    with ZarrFeatureStore.open(full, check="never") as store:
        read = store.open_table(NAME).read_chunk(1, "q")
    assert (read != values(FOUR)["q"]).sum() == 1
    overwrite(folder(full, "q/c.1"), whole)
    with reading(full) as table:
        np.testing.assert_array_equal(table.read_chunk(1, "q"), values(FOUR)["q"])


OTHER = errors.ManifestMismatchError
FORMATS = [
    ({"format": 4}, OTHER, "has the format 4, .* reads the format 3.* Install a newer"),
    ({"format": 2}, OTHER, "has the format 2, .* reads the format 3.* Featurize again"),
    ({"format": "1"}, CorruptStoreError, "format is '1'"),
    ({"format": True}, CorruptStoreError, "format is True"),
    ({"fingerprint": []}, CorruptStoreError, r"fingerprint is \[\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), FORMATS)
def test_a_manifest_of_another_format_is_refused(full, change, error, message):
    cases.edit(os.path.join(full, "zarr.json"), lambda record: record.update(change))
    for mode in ("r", "r+"):
        raises(error, message, ZarrFeatureStore.open, full, mode)
    if change == {"format": 4}:
        raises(error, "Install a newer trak_lite", check_store, full)
