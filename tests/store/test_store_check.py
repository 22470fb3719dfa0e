"""Verification finds what is damaged, and nothing else; a repair costs the damaged rows, and no other row."""

import errno
import itertools
import os
import shutil
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import (
    LONG,
    MANIFEST,
    NAME,
    SPEC,
    allow_reading_alone,
    check_all,
    commit_log,
    content,
    done_rows,
    finish,
    flip,
    flipped,
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

from trak_lite.errors import (
    CorruptStoreError,
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    ReadOnlyStoreError,
    StoreError,
)
from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore, check_store
from trak_lite.store._failpoints import FAILPOINTS, REPAIR_FAILPOINTS
from trak_lite.store.disk import check_chunk as _chunk_look
from trak_lite.store.disk import chunk_maps as _chunk_maps

DONE = range(10)


@pytest.fixture
def mixed(path):
    """Chunks 0 and 1 committed; of chunk 2 the rows 8 and 9 are staged in two puts, row 10 is pending."""
    make_mixed(path)
    return path


def make_mixed(path):
    with writing(path) as table:
        for start, count in ((0, 8), (8, 1), (9, 1)):
            table.put(start, values(range(start, start + count)))


def places(report):
    return [
        (f.chunk, None if f.rows is None else list(f.rows), f.column)
        for f in report.findings
        if f.level == "damage"
    ]


def link(path):
    aside = path.split("run.zarr")[0] + "elsewhere"
    os.rename(path, aside)
    os.symlink(aside, path)


def replace_by_folder(path):
    os.unlink(path)
    os.mkdir(path)


def replace_by_pipe(path):
    os.unlink(path)
    os.mkfifo(path)


def names_below(path):
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names)


def contents(path):
    """The bytes of every plain file below a folder that is not empty."""
    files = names_below(path)
    return [
        whole
        for file in files
        if os.path.isfile(file) and not os.path.islink(file) and (whole := content(file))
    ]


def resize(path, size):
    overwrite(path, (content(path) * 2)[:size])


def key(name):
    return lambda path: folder(path, name)


FOUR, EIGHT = [4, 5, 6, 7], list(range(8))
DAMAGE = {
    "a flipped bit": (key("features/c.1.0"), flip, [(1, FOUR, "features")], FOUR),
    "a chunk cut short": (key("q/c.1"), lambda p: resize(p, 15), [(1, FOUR, "q")], FOUR),
    "an empty chunk": (key("q/c.1"), lambda p: resize(p, 0), [(1, FOUR, "q")], FOUR),
    "a longer chunk": (key("q/c.1"), lambda p: resize(p, 17), [(1, FOUR, "q")], FOUR),
    "a missing column": (key("w/c.1"), os.unlink, [(1, FOUR, None)], FOUR),
    "a linked chunk": (key("w/c.1"), link, [(1, FOUR, "w")], FOUR),
    "a folder for a chunk": (key("w/c.1"), replace_by_folder, [(1, FOUR, "w")], FOUR),
    "a pipe for a chunk": (key("w/c.1"), replace_by_pipe, [(1, FOUR, "w")], FOUR),
    "a chunk outside the grid": (key("q/c.7"), lambda p: overwrite(p, b"x"), [(7, None, "q")], []),
    "a flipped bit in a commit record": (commit_log, flip, [(0, EIGHT[:4], None)], EIGHT[:4]),
    "a lost commit log": (commit_log, os.unlink, [(0, EIGHT[:4], None), (1, FOUR, None)], EIGHT),
    "a linked commit log": (
        commit_log,
        link,
        [(None, None, None), (0, EIGHT[:4], None), (1, FOUR, None)],
        EIGHT,
    ),
    "a flipped bit in a staged row": (lambda p: staged(p, 2, "q"), flip, [(2, [8], None)], [8]),
    "a missing staged column": (lambda p: staged(p, 2, "w"), os.unlink, [(2, [8, 9], None)], [8, 9]),
    "a staged column cut short": (lambda p: staged(p, 2, "w"), lambda p: resize(p, 5), [(2, [9], None)], [9]),
    "a linked staged column": (lambda p: staged(p, 2, "w"), link, [(2, [8, 9, 10], None)], [8, 9]),
    "a flipped bit in a row record": (
        lambda p: row_log(p, 2),
        lambda p: flip(p, 90),
        [(2, [8, 9, 10], None)],
        [9],
    ),
    "a linked row log": (lambda p: row_log(p, 2), link, [(2, [8, 9, 10], None)], [8, 9]),
    "a linked row log of a committed chunk": (
        lambda p: row_log(p, 1),
        lambda p: os.symlink("/elsewhere", p),
        [(1, FOUR, None)],
        [],
    ),
}


@pytest.fixture(params=DAMAGE.values(), ids=DAMAGE.keys())
def case(request, mixed):
    """A damaged store: its path, where the findings must be, and which rows are lost."""
    place, damage, expected, lost = request.param
    damage(place(mixed))
    return mixed, expected, lost


def test_damage_is_named_by_table_chunk_rows_and_column(case):
    path, expected, _ = case
    report = check_store(path)

    assert not report.ok
    assert places(report) == expected
    assert {finding.table for finding in report.findings} == {NAME}
    assert all(finding.next_step for finding in report.findings)


def test_a_repair_costs_exactly_the_damaged_rows(case):
    path, _, lost = case
    report = check_store(path, repair=True)

    assert report.ok
    assert report.set_aside
    assert done_rows(path) == [row for row in DONE if row not in lost]
    assert report.tally.pending_rows == 1 + len(lost)
    finish(path)
    assert check_store(path).ok


def test_a_repair_deletes_nothing(case):
    path, _, _ = case
    before = contents(path)
    check_store(path, repair=True)

    kept = contents(path)
    for whole in before:
        kept.remove(whole)  # raises where it is gone


def test_a_second_repair_finds_nothing_to_do(case):
    path, _, _ = case
    check_store(path, repair=True)
    before = names_below(path)
    report = check_store(path, repair=True)

    assert report.ok
    assert report.set_aside == ()
    assert names_below(path) == before


def test_every_damage_at_once_is_reported_and_repaired(path):
    make_mixed(path)
    for name in ("a flipped bit in a commit record", "a flipped bit", "a flipped bit in a staged row"):
        place, damage, _, _ = DAMAGE[name]
        damage(place(path))
    flip(staged(path, 2, "features"), 6)

    assert places(check_store(path)) == [
        (0, EIGHT[:4], None),
        (1, FOUR, "features"),
        (2, [8, 9], None),
    ]
    assert check_store(path, repair=True).ok
    assert done_rows(path) == []
    finish(path)


def test_a_sound_store_is_called_so(path):
    assert_sound(path, lambda table: None, (1, 0, 0, 0, 11))
    assert_sound(path, lambda table: table.put(0, values(range(6))), (1, 1, 56, 6, 5))
    assert_sound(path, lambda table: table.put(6, values(range(6, 11))), (1, 3, 168, 11, 0))


def assert_sound(path, act, tally):
    with writing(path) as table:
        act(table)
    report = check_store(path)
    assert report.ok
    assert report.findings == ()
    seen = report.tally
    assert (seen.tables, seen.chunks, seen.bytes, seen.done_rows, seen.pending_rows) == tally


def test_the_report_is_an_aligned_table(mixed):
    flip(folder(mixed, "features/c.1.0"))
    titles, row, total = str(check_store(mixed)).splitlines()

    assert titles.split() == ["level", "table", "chunk", "rows", "column", "finding", "next", "step"]
    assert row.startswith(f"damage  {NAME}  1      4 to 7  features  checksum ")
    assert titles.index("finding") == row.index("checksum")
    assert total.startswith(f"{mixed}: 1 damage, 0 notes; 1 table, 6 rows done, 5 pending")


def test_a_repair_says_where_it_put_things(mixed):
    flip(folder(mixed, "features/c.1.0"))
    report = check_store(mixed, repair=True)

    (moved,) = report.set_aside
    assert (moved.table, moved.chunk, moved.rows) == (NAME, 1, (range(4, 8),))
    assert sorted(os.listdir(moved.folder)) == ["features-c.1.0", "q-c.1", "w-c.1"]
    assert f"chunk 1 (rows 4 to 7 are pending) of {NAME} is in {moved.folder}" in str(report)


def test_rows_of_which_nothing_is_left_are_pending_and_no_damage(mixed):
    for name in ("features/c.1.0", "q/c.1", "w/c.1"):
        os.unlink(folder(mixed, name))
    report = check_store(mixed)

    assert report.ok
    assert [(f.level, f.chunk, f.finding) for f in report.findings] == [
        ("note", 1, "committed once; its files were set aside or removed")
    ]


@pytest.mark.parametrize(
    "name", ["q/notes.txt", "features/.stage/9-q", "features/.commits/x", "features/.stage/odd"]
)
def test_a_file_that_belongs_to_nothing_is_noted(mixed, name):
    overwrite(folder(mixed, name), b"x")
    report = check_store(mixed)

    assert report.ok
    (finding,) = report.findings
    assert (finding.level, finding.table) == ("note", NAME)
    assert repr(os.path.basename(name)) in finding.finding


@pytest.mark.parametrize("name", ["notes.txt", "targets/.hidden", "targets/a b/x", "scratch/x", f"{NAME}/x"])
def test_a_file_outside_the_columns_is_noted(mixed, name):
    os.makedirs(os.path.dirname(f"{mixed}/{name}"), exist_ok=True)
    overwrite(f"{mixed}/{name}", b"x")
    report = check_store(mixed)

    assert report.ok
    assert ["belongs to no table" in finding.finding for finding in report.findings] == [True]


def test_a_scratch_folder_is_noted_once_it_is_old(mixed):
    for name in (".new", ".dropped-ckpt-0"):
        os.mkdir(f"{mixed}/.tables/{name}-{'0' * 32}")
        assert check_store(mixed).findings == ()
        os.utime(f"{mixed}/.tables/{name}-{'0' * 32}", (time.time() - 3600,) * 2)
        (finding,) = check_store(mixed).findings
        assert finding.level == "note"
        assert "interrupted" in finding.finding
        ZarrFeatureStore.open(mixed, "r+").close()
        assert check_store(mixed).findings == ()


def test_a_damaged_derived_array_is_noted(mixed):
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.cache("gram", "key", np.eye(3))
    assert check_store(mixed).findings == ()
    overwrite(f"{mixed}/.cache/scratch.safetensors.new-{'0' * 32}", b"")
    assert check_store(mixed).findings == ()
    for damage in (lambda p: flip(p, 200), lambda p: overwrite(p, b""), link):
        shutil.copy(f"{mixed}/.cache/gram.safetensors", f"{mixed}/.cache/copy.safetensors")
        if damage is link:
            os.symlink("gram.safetensors", f"{mixed}/.cache/link.safetensors")
        else:
            damage(f"{mixed}/.cache/copy.safetensors")
        report = check_store(mixed)
        assert report.ok
        assert "derived array" in report.findings[0].finding


@pytest.mark.parametrize("torn", [None, b"", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"node_type": "array"}'])
@pytest.mark.parametrize("which", ["", NAME, f"{NAME}/q", "targets"])
def test_torn_metadata_is_a_finding_and_the_rest_is_looked_at(mixed, torn, which):
    with ZarrFeatureStore.open(mixed, "r+") as store:
        store.create_table("other", SPEC).put(0, values(range(4)))
    flip(f"{mixed}/other/q/c.0")
    os.unlink(f"{mixed}/{which}/zarr.json")
    if torn is not None:
        overwrite(f"{mixed}/{which}/zarr.json", torn)
    report = check_store(mixed)

    damage = [(f.table, f.chunk) for f in report.findings if f.level == "damage"]
    assert ("other", 0) in damage
    assert (which.removesuffix("/q") or None, None) in damage
    assert not check_store(mixed, repair=True).ok
    assert not os.path.lexists(f"{mixed}/other/q/c.0")


@pytest.mark.parametrize("key", [b'"chunk_rows": 4', b'"num_rows": 11', b'"width": 3'])
def test_metadata_that_contradict_each_other_cost_no_chunk(mixed, key):
    """A chunk is never judged, let alone set aside, by a shape that may be wrong."""
    text = content(folder(mixed, "zarr.json"))
    assert key in text
    overwrite(folder(mixed, "zarr.json"), text.replace(key, key[:-1] + b"8"))
    report = check_store(mixed, repair=True)

    assert not report.ok
    assert report.set_aside == ()
    overwrite(folder(mixed, "zarr.json"), text)
    assert check_store(mixed).findings == ()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    pick=st.integers(0, 99),
    harm=st.sampled_from(["flip", "cut", "remove", "zero", "append"]),
    number=st.integers(0, 2**16),
)
def test_whatever_is_harmed_there_is_a_report(tmp_path_factory, pick, harm, number):
    """Any file of a store, its metadata too; and what the repair leaves can be looked at again."""
    path = str(tmp_path_factory.mktemp("harmed") / "run.zarr")
    make_mixed(path)
    files = names_below(path)
    do_harm(files[pick % len(files)], harm, number)
    try:
        check_store(path, repair=True)
    except (MissingStoreError, ManifestMismatchError):
        assert files[pick % len(files)] == f"{path}/zarr.json"
        return
    report = check_store(path, repair=True)
    assert report.set_aside == ()
    if report.ok:
        check_done_rows(path)


def test_a_linked_folder_is_a_finding(mixed):
    for name in (f"{NAME}/features/.stage", f"{NAME}/features/.commits", f"{NAME}/q", NAME, "targets"):
        os.rename(f"{mixed}/{name}", f"{mixed}-aside")
        os.symlink(f"{mixed}-aside", f"{mixed}/{name}")
        report = check_store(mixed)
        assert not report.ok
        assert any("link" in finding.finding for finding in report.findings)
        os.unlink(f"{mixed}/{name}")
        os.rename(f"{mixed}-aside", f"{mixed}/{name}")
    assert check_store(mixed).ok


def test_a_path_without_a_store_is_missing(tmp_path, mixed):
    overwrite(tmp_path / "file", b"x")
    for path in (tmp_path / "nothing", tmp_path / "file", tmp_path):
        if path == tmp_path:
            shutil.move(mixed, f"{tmp_path}/.hidden")
        with pytest.raises(MissingStoreError, match="no store at"):
            check_store(path)


def test_a_table_is_not_a_store(mixed):
    with pytest.raises(MissingStoreError, match="is a table inside a store"):
        check_store(f"{mixed}/{NAME}")


def test_a_newer_format_is_not_judged(mixed):
    text = content(f"{mixed}/zarr.json").replace(b'"format": 3', b'"format": 4')
    overwrite(f"{mixed}/zarr.json", text)
    with pytest.raises(ManifestMismatchError, match="Install a newer trak_lite"):
        check_store(mixed)


def test_a_disk_that_cannot_be_read_is_a_finding(mixed, monkeypatch):
    def broken(path, size):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(_chunk_look, "stored_checksum", broken)
    report = check_store(mixed)
    assert [chunk for chunk, _, _ in places(report)] == [0, 0, 0, 1, 1, 1]
    assert all("Input/output error" in finding.finding for finding in report.findings)


def test_verifying_writes_nothing_and_takes_no_lock(mixed, monkeypatch):
    flip(folder(mixed, "q/c.1"))
    before = snapshot(mixed)
    allow_reading_alone(monkeypatch)
    with ZarrFeatureStore.open(mixed, "r") as store:
        assert not store.check().ok
    assert snapshot(mixed) == before


def test_a_store_opened_for_reading_is_not_repaired(mixed, monkeypatch):
    with (
        ZarrFeatureStore.open(mixed, "r") as store,
        pytest.raises(ReadOnlyStoreError, match="opened for reading"),
    ):
        store.check(repair=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ReadOnlyStoreError, match="nothing was repaired"):
        check_store(mixed, repair=True)


def test_a_repair_that_cannot_rename_says_so(mixed, monkeypatch):
    flip(folder(mixed, "q/c.1"))

    def fail(*arguments, **keywords):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StoreError, match=r"Setting aside files of .* failed: broken"):
        check_store(mixed, repair=True)
    monkeypatch.undo()
    assert check_store(mixed, repair=True).ok


def test_an_open_store_repairs_itself_and_goes_on(path):
    """Its own locks, maps and memory of staged chunks do not stand in the way."""
    store, table = open_for_writing(path)
    for rows in (range(8), [8], [9]):
        table.put(rows[0], values(rows))
    table.read_chunk(1, "q")
    flip(folder(path, "q/c.1"))
    flip(staged(path, 2, "w"))

    assert store.check(repair=True).ok
    assert table.pending().tolist() == [4, 5, 6, 7, 8, 10]  # row 9 has a record of its own
    for row in table.pending().tolist():
        table.put(row, values([row]))
    store.close()
    check_all(path)


def test_another_writers_memory_of_a_repaired_chunk_is_not_trusted(path, monkeypatch):
    """It has given up the lock and knows the rows by heart; the repair has struck one of them out."""
    monkeypatch.setattr("trak_lite.store.disk.zarr_table._OPEN_CHUNKS", 1)
    store, table = open_for_writing(path)
    table.put(8, values([8, 9]))
    table.put(0, values([0]))
    flip(staged(path, 2, "q"))

    assert check_store(path, repair=True).ok
    assert table.pending().tolist() == list(range(1, 11))
    pending = table.pending()
    table.put(pending, values(pending))
    store.close()
    check_all(path)


def test_a_chunk_in_a_writers_hand_is_left_alone(path):
    store, table = open_for_writing(path)
    table.put(0, values([0, 1]))
    flip(staged(path, 0, "q"))
    report = check_store(path, repair=True)

    assert not report.ok
    assert report.set_aside == ()
    assert "left alone" in report.findings[-1].finding
    store.close()
    assert check_store(path, repair=True).ok
    finish(path)


def test_a_store_that_is_being_written_has_no_findings(path, victims):
    with writing(path, LONG):
        pass
    writers = [victims.start("write_long", path, part, 2) for part in (0, 1)]
    seen = []
    while not seen or seen[-1].tally.pending_rows:
        seen.append(check_store(path))
        assert seen[-1].findings == ()
    assert [victims.wait(pid)[0] for pid in writers] == [0, 0]
    done = [report.tally.done_rows for report in seen]
    assert done == sorted(done)


@pytest.mark.parametrize("look", [1, 2])
def test_a_chunk_that_is_committed_while_it_is_looked_at_is_done(mixed, monkeypatch, look):
    """Its row log is gone before it is read, and its files were not visible yet when they were asked for."""
    looks = []
    read_row_log = _chunk_look.read_row_log

    def read_late(files, chunk):
        looks.append(chunk)
        if len(looks) == look:
            table.put([10], values([10]))
        return read_row_log(files, chunk)

    monkeypatch.setattr(_chunk_look, "read_row_log", read_late)
    if look == 2:  # the first one finds something, which is looked at again
        overwrite(row_log(mixed, 2), content(row_log(mixed, 2)) + b"x" * 24)
    with writing(mixed) as table:
        report = check_store(mixed)

    assert report.findings == ()
    assert report.tally.done_rows == 11


@pytest.mark.parametrize("failpoint", FAILPOINTS[2:])
def test_a_kill_is_no_damage_and_a_repair_changes_nothing(tmp_path, victims, failpoint):
    for count in itertools.count(1):
        path, done = str(tmp_path / f"{count}.zarr"), str(tmp_path / f"{count}.done")
        if not victims.killed(f"{failpoint}:{count}", "write", path, done, 3):
            break
        before = snapshot(path)
        report = check_store(path)
        assert report.ok
        assert check_store(path, repair=True).set_aside == ()
        assert snapshot(path) == before
        assert report.tally.done_rows == len(done_rows(path))
        finish(path)


def test_an_interrupted_commit_is_noted(tmp_path, victims):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed("column_published:2", "write", path, done, 11)
    (finding,) = check_store(path).findings
    assert (finding.level, finding.chunk) == ("note", 0)
    assert "features, q visible" in finding.finding

    assert victims.killed("column_taken_back:1", "write", path, done, 11)
    assert check_store(path).ok


def test_a_leftover_row_log_is_noted(tmp_path, victims):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed("chunk_published:1", "write", path, done, 4)
    (finding,) = check_store(path).findings
    assert (finding.level, finding.chunk) == ("note", 0)
    assert "0.log still in the stage" in finding.finding


@pytest.mark.parametrize("failpoint", REPAIR_FAILPOINTS)
def test_a_repair_may_be_killed_at_any_step(tmp_path, victims, failpoint):
    """Then a writer resumes, or a second repair finishes; either way no sound row is lost and no wrong one is read."""
    for count in itertools.count(1):
        path = str(tmp_path / f"{count}.zarr")
        make_mixed(path)
        flip(folder(path, "q/c.1"))
        flip(staged(path, 2, "w"))
        if not victims.killed(f"{failpoint}:{count}", "repair", path):
            break
        shutil.copytree(path, f"{path}-copy", symlinks=True)
        assert check_store(path, repair=True).ok
        assert done_rows(path) == [0, 1, 2, 3, 9]
        finish(path)
        finish_damaged(f"{path}-copy")
    assert count > 1


def finish_damaged(path):
    """Resume without a repair; where the damaged file is still visible as a whole, the repair is needed after all."""
    with writing(path) as table:
        pending = table.pending()
        if len(pending):
            table.put(pending, values(pending))
    if not check_store(path).ok:
        assert check_store(path, repair=True).ok
    finish(path)


FILES = [
    lambda path: folder(path, "features/c.0.0"),
    lambda path: folder(path, "q/c.1"),
    lambda path: staged(path, 2, "features"),
    lambda path: staged(path, 2, "q"),
    lambda path: row_log(path, 2),
    commit_log,
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    harms=st.lists(
        st.tuples(
            st.sampled_from(FILES),
            st.sampled_from(["flip", "cut", "remove", "zero", "append"]),
            st.integers(0, 2**16),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_called_sound_is_right_and_a_repair_makes_it_sound(tmp_path_factory, harms):
    path = str(tmp_path_factory.mktemp("harmed") / "run.zarr")
    make_mixed(path)
    log = commit_log(path)
    for place, harm, number in harms:
        file = log if place is commit_log else place(path)
        if os.path.exists(file):
            do_harm(file, harm, number)
    if check_store(path).ok:
        check_done_rows(path)
    assert check_store(path, repair=True).ok
    check_done_rows(path)
    finish(path)
    assert check_store(path).ok


def do_harm(path, harm, number):
    whole = content(path)
    at = number % max(len(whole), 1)
    if harm == "remove":
        os.unlink(path)
    elif harm == "flip" and whole:
        overwrite(path, flipped(whole, at, number % 8))
    else:
        overwrite(
            path, {"cut": whole[:at], "zero": bytes(len(whole))}.get(harm, whole + b"x" * (number % 99))
        )


def check_done_rows(path):
    """What is committed reads right; what is staged is right as well, for it is committed without being put again."""
    with reading(path) as table:
        for chunk in table.committed_chunks():
            for name, expected in values(range(*table.chunk_range(chunk))).items():
                np.testing.assert_array_equal(table.read_chunk(chunk, name), expected)


def test_reading_names_table_chunk_rows_both_checksums_and_the_repair(mixed):
    flip(folder(mixed, "q/c.1"))
    with reading(mixed) as table, pytest.raises(CorruptStoreError) as caught:
        table.read_chunk(1, "q")
    message = str(caught.value)
    (finding,) = check_store(mixed).findings
    found, stored = finding.finding.split()[1].strip(","), finding.finding.split()[-1]
    assert found != stored
    for part in (
        f"rows 4 to 7 (chunk 1) of {mixed}/{NAME}",
        f"{found}, recorded {stored}",
        f"'trak-lite check {mixed} --repair'",
    ):
        assert part in message


def test_a_checksum_is_computed_on_the_first_touch_only(mixed, monkeypatch):
    monkeypatch.setattr(_chunk_maps, "_KEPT", 1)
    seen, real = [], _chunk_maps.crc32c
    monkeypatch.setattr(_chunk_maps, "crc32c", lambda array: seen.append(len(array)) or real(array))
    with reading(mixed) as table:
        for chunk, name in ((0, "q"), (1, "q"), (0, "q"), (0, "features"), (1, "q")):
            table.read_chunk(chunk, name)
    assert seen == [16, 16, 24]


def test_never_reads_without_comparing(mixed):
    flip(folder(mixed, "q/c.1"))
    with ZarrFeatureStore.open(mixed, check="never") as store:
        read = store.open_table(NAME).read_chunk(1, "q")
    assert (read != values(range(4, 8))["q"]).sum() == 1
    with pytest.raises(InvalidInputError, match="check must be one of"):
        ZarrFeatureStore.open(mixed, check="always")


def test_a_chunk_repaired_and_committed_again_is_read_by_those_who_had_it_open(mixed):
    """The reader's record is the old one; the bytes are new, and so is the latest record."""
    with reading(mixed) as table:
        assert table.committed_chunks() == [0, 1]
        flip(folder(mixed, "features/c.1.0"))
        check_store(mixed, repair=True)
        with writing(mixed) as writer:
            writer.put(4, values(range(14, 18)))
        for name, expected in values(range(14, 18)).items():
            np.testing.assert_array_equal(table.read_chunk(1, name), expected)


def test_a_store_in_memory_has_no_files_to_verify():
    assert not hasattr(MemoryFeatureStore(MANIFEST), "verify")
