"""Requests that fail, writers that die, writers that race, listings that lag: no row is lost, none is wrong."""

import contextlib
import itertools
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from store_cases import MANIFEST, NAME, SPEC, open_remote, values

from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    IncompleteStoreError,
    MissingStoreError,
    StateError,
    StoreError,
    UnsupportedStoreError,
)
from trak_lite.store import AbstractObjects, RemotePlace
from trak_lite.store.disk.records import CommitRecord
from trak_lite.store.disk.zarr_table import ZarrRowTable
from trak_lite.store.remote.remote_store import RemoteFeatureStore

FIRST = f"{NAME}/features/c.0.0"
RECORD = f"{NAME}/features/.commits/c.0.1.log"


class Bucket(AbstractObjects):
    """Objects in a dict, with a hook before and after each request, and a listing that can be held back."""

    def __init__(self):
        self.kept = {}
        self.before = self.after = lambda request, key: None
        self.listing = None
        self.requests = []

    url = "bucket://run.zarr"

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
        return {
            key: len(content)
            for key, content in kept.items()
            if key.startswith(f"{folder}/" if folder else "")
        }

    def folders(self, folder):
        start = f"{folder}/" if folder else ""
        below = [key[len(start) :] for key in self.kept if key.startswith(start)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def delete(self, key):
        self._asked("delete", key)
        self.kept.pop(key, None)


class Machine:
    """A place for the bucket with a staging folder of its own, and one run at a time."""

    def __init__(self, bucket, folder):
        self.folder = folder
        self.place = RemotePlace(bucket, staging=folder)
        self.run = contextlib.nullcontext()

    def store(self):
        """Give up the store of the run before, and open one for the next."""
        self.run.__exit__(None, None, None)
        self.run = RemoteFeatureStore.create(self.place, MANIFEST)
        return self.run

    def table(self):
        return self.store().create_table(NAME, SPEC)

    def reader(self):
        return RemoteFeatureStore.open(self.place).open_table(NAME)


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def here(bucket, tmp_path):
    return Machine(bucket, tmp_path / "here")


@pytest.fixture
def there(bucket, tmp_path):
    return Machine(bucket, tmp_path / "there")


def other_values(rows):
    return {name: array + 1 for name, array in values(rows).items()}


def check_rows(table, expected=values):
    for name, array in expected(range(SPEC.num_rows)).items():
        np.testing.assert_array_equal(table.read(name), array)


def finish(machine):
    table = machine.table()
    pending = table.pending()
    for rows in np.split(pending, range(2, len(pending), 2)) if len(pending) else []:
        table.put(rows, values(rows))
    check_rows(machine.reader())


def failing(request, key):
    def fail(seen, at):
        if (seen, at) == (request, key):
            raise StoreError("the line is dead")

    return fail


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("key", [FIRST, f"{NAME}/q/c.0", f"{NAME}/w/c.0", RECORD])
def test_a_request_that_fails_leaves_the_rows_staged(bucket, here, there, key, moment):
    """Whether it failed or only its answer was lost; another machine sees a chunk or none, and never half of one."""
    table = here.table()
    setattr(bucket, moment, failing("create", key))
    with pytest.raises(StoreError, match="the line is dead"):
        table.put(0, values(range(5)))
    assert here.reader().done()[:4].all()
    assert there.reader().committed_chunks() in ([], [0])
    setattr(bucket, moment, lambda request, key: None)

    again = here.table()
    assert again.committed_chunks() == [0]
    assert set(range(4)).isdisjoint(again.pending())
    finish(here)
    check_rows(there.reader())


def test_what_is_not_committed_is_computed_again_elsewhere(bucket, here, there):
    """A machine without the staging folder takes every chunk that is committed, and no other row."""
    here.table().put(0, values(range(7)))
    assert there.table().pending().tolist() == list(range(4, 11))
    finish(there)
    check_rows(here.reader())


@pytest.mark.parametrize("writer", [values, other_values])
def test_what_a_dead_writer_left_uncommitted_is_used_or_replaced(bucket, here, there, writer):
    """Its objects are no rows; they are replaced once the commit record is won, if their bytes differ."""
    bucket.before = failing("create", RECORD)
    with pytest.raises(StoreError):
        here.table().put(0, writer(range(4)))
    bucket.before = lambda request, key: None

    assert FIRST in bucket.kept
    assert there.table().committed_chunks() == []
    finish(there)
    puts = [key for request, key in bucket.requests if request == "put"]
    assert puts == ([] if writer is values else [FIRST, f"{NAME}/q/c.0", f"{NAME}/w/c.0"])
    check_rows(here.table())


def test_a_dead_writer_that_wakes_up_changes_nothing(bucket, here, there):
    """Its staged rows are dropped when the table is opened, and what the other one has committed stays."""
    bucket.before = failing("create", RECORD)
    with pytest.raises(StoreError):
        here.table().put(0, other_values(range(4)))
    bucket.before = lambda request, key: None
    finish(there)
    kept = dict(bucket.kept)

    assert here.table().complete
    assert bucket.kept == kept
    check_rows(here.reader())


@pytest.mark.parametrize("moment", [FIRST, f"{NAME}/w/c.0", RECORD])
def test_a_lost_race_leaves_the_winner_untouched(bucket, here, there, moment):
    """Whenever the other one commits; the loser is told who has won, and goes on with the rows that are pending."""
    slow, fast = here.table(), there.table()
    slow.put(0, other_values(range(3)))

    def overtake(request, key):
        if (request, key) == ("create", moment) and not fast.committed_chunks():
            bucket.before = lambda request, key: None
            fast.put(0, values(range(4)))
            self_kept.update(bucket.kept)

    self_kept = {}
    bucket.before = overtake
    with pytest.raises(BusyError, match=r"pid \d+ on .* has committed rows 0 to 3 \(chunk 0\).*other bytes"):
        slow.put(3, other_values([3]))
    assert bucket.kept == self_kept
    assert slow.pending().tolist() == list(range(4, 11))
    assert slow.committed_chunks() == [0]
    finish(here)


def test_a_race_for_the_same_bytes_is_no_conflict(bucket, here, there):
    slow, fast = here.table(), there.table()
    slow.put(0, values(range(3)))
    fast.put(0, values(range(4)))
    slow.put(3, values([3]))
    assert slow.committed_chunks() == [0]
    finish(here)


def test_a_chunk_that_is_committed_elsewhere_is_refused_before_a_row_is_staged(bucket, here, there):
    table = here.table()
    there.table().put(0, values(range(4)))
    with pytest.raises(StateError, match=r"rows 0 to 3 \(chunk 0\).* are done already"):
        table.put(0, values([0]))
    assert not list(here.folder.rglob("0-features"))


def test_a_listing_that_lags_costs_work_and_nothing_else(bucket, here, there):
    """Rows that it does not show are pending, not readable, and computed again to the same end."""
    table = here.table()
    bucket.listing = dict(bucket.kept)
    table.put(0, values(range(4)))
    reader = there.reader()
    assert not reader.done().any()
    with pytest.raises(IncompleteStoreError):
        reader.read_chunk(0, "q")
    late = there.table()
    late.put(0, values(range(4)))
    bucket.listing = None
    finish(there)
    assert sum(key.startswith(f"{NAME}/features/.commits/c.0.") for key in bucket.kept) == 1


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "checksum"),
        (lambda b: b[:-1], "bytes"),
        (lambda b: b + b"0", "bytes"),
    ],
)
def test_a_damaged_object_is_named_and_can_be_made_anew(bucket, here, there, damage, problem):
    """Reading and verifying name object, rows and what to do; doing it makes exactly these rows pending."""
    finish(here)
    bucket.kept[FIRST] = damage(bucket.kept[FIRST])

    with pytest.raises(CorruptStoreError, match=rf"rows 0 to 3 \(chunk 0\).*Remove {FIRST}"):
        there.reader().read_chunk(0, "features")
    report = RemoteFeatureStore.open(here.place).check()
    (finding,) = report.findings
    assert (finding.level, finding.table, finding.chunk, finding.rows) == ("damage", NAME, 0, range(4))
    assert problem in finding.finding
    assert finding.next_step == f"remove {FIRST}, then featurize again"

    del bucket.kept[FIRST]
    with pytest.raises(IncompleteStoreError):
        there.reader().read_chunk(0, "features")
    assert there.table().pending().tolist() == [0, 1, 2, 3]
    finish(there)
    assert RemoteFeatureStore.open(here.place).check().ok


def test_an_object_that_is_removed_under_a_reader_is_pending(bucket, here):
    finish(here)
    reader = here.reader()
    del bucket.kept[FIRST]
    with pytest.raises(IncompleteStoreError, match="removed after it was committed"):
        reader.read_chunk(0, "features")
    finish(here)
    np.testing.assert_array_equal(reader.read_chunk(0, "features"), values(range(4))["features"])


def test_verifying_tells_what_is_in_flight_and_what_is_not_ours(bucket, here):
    """Notes, not damage; a damaged document and a record that is none are damage."""
    bucket.before = failing("create", RECORD)
    with pytest.raises(StoreError):
        here.table().put(0, values(range(4)))
    bucket.before = lambda request, key: None
    bucket.kept["notes.txt"] = b"hello"
    store = RemoteFeatureStore.open(here.place)
    report = store.check()
    assert report.ok
    assert [f.finding for f in report.findings] == [
        "put and not committed: a writer is running, or was killed",
        "'notes.txt' belongs to no table",
    ]
    assert (report.tally.tables, report.tally.pending_rows) == (1, 11)

    bucket.kept[RECORD] = b"no record\n"
    bucket.kept["ckpt-9/zarr.json"] = b"{"
    found = store.check()
    assert not found.ok
    assert [f.table for f in found.findings if f.level == "damage"] == ["ckpt-9", NAME]
    with pytest.raises(CorruptStoreError, match=f"{RECORD} is not a commit record. Remove it"):
        here.table()
    with pytest.raises(UnsupportedStoreError, match="remove the objects that the report names"):
        store.check(repair=True)
    bucket.kept["zarr.json"] = b"{}"
    assert not store.check().ok
    del bucket.kept["zarr.json"]
    with pytest.raises(MissingStoreError):
        store.check()


def test_records_that_contradict_the_table_are_damage(bucket, here):
    """Of a chunk that it has not, or with other rows than the chunk has."""
    finish(here)
    record = bucket.kept[RECORD]
    bucket.kept[f"{NAME}/features/.commits/c.7.1.log"] = bucket.kept[f"{NAME}/features/.commits/c.2.1.log"]
    assert RemoteFeatureStore.open(here.place).check().ok  # the name of a record says nothing
    decoded = CommitRecord.decode(record.splitlines()[0])
    for change in ({"chunk": 9}, {"rows": 3}):
        fields = {"chunk": 0, "generation": 2, "rows": 4, "columns": decoded.columns, "table": decoded.table}
        fields |= change
        bucket.kept[f"{NAME}/features/.commits/extra.log"] = CommitRecord(**fields).encode()
        assert not RemoteFeatureStore.open(here.place).check().ok
    with pytest.raises(CorruptStoreError, match="for 3 rows"):
        here.reader()


def test_a_staged_chunk_that_changed_is_not_put(bucket, here):
    """A bit that flips on the local disk stays there."""
    bucket.before = failing("create", FIRST)
    with pytest.raises(StoreError):
        here.table().put(0, values(range(4)))
    bucket.before = lambda request, key: None
    (path,) = here.folder.rglob("c.0.0")
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStoreError, match="changed after it was written"):
        here.table()
    assert FIRST not in bucket.kept


def test_a_drop_that_was_interrupted_is_finished_by_creating_anew(bucket, here, there):
    """In between there is no table, and no row of the old one comes back."""
    finish(here)
    store = here.store()
    bucket.before = failing("delete", FIRST)
    with pytest.raises(StoreError, match="the line is dead"):
        store.drop_table(NAME)
    bucket.before = lambda request, key: None
    assert RemoteFeatureStore.open(there.place).table_names() == []
    with pytest.raises(MissingStoreError):
        RemoteFeatureStore.open(there.place).open_table(NAME)
    assert not there.table().done().any()
    finish(there)


def test_staged_rows_of_a_table_that_was_made_anew_are_dropped(bucket, here, there):
    """They were computed for another table: its shape says so."""
    here.table().put(0, values(range(2)))
    store = there.store()
    store.drop_table(NAME)
    store.create_table(NAME, replace(SPEC, chunk_rows=8))
    reader = RemoteFeatureStore.open(here.place).open_table(NAME)
    assert not reader.done().any()
    again = here.store().open_table(NAME)
    assert again.spec.chunk_rows == 8
    assert not again.done().any()


def test_a_place_that_cannot_create_exclusively_is_refused(bucket, here):
    """Before anything is put there but the question itself, which is removed."""
    bucket.create = lambda key, content: bucket.kept.update({key: bytes(content)}) or True
    with pytest.raises(UnsupportedStoreError, match="created twice"):
        here.table()
    assert bucket.kept == {}


def test_a_place_with_something_else_in_it_is_refused(bucket, here):
    bucket.kept["photos/cat.jpg"] = b"x"
    with pytest.raises(CorruptStoreError, match="is not a store"):
        here.table()
    with pytest.raises(MissingStoreError):
        RemoteFeatureStore.open(here.place)


def test_rows_that_are_uploaded_and_unstaged_while_they_are_read_are_read_from_the_place(here, monkeypatch):
    """Another process of this machine completes the chunk between two looks."""
    table = here.table()
    table.put(0, values([0]))
    read_done = ZarrRowTable.read_done

    def read_late(staged, chunk):
        if staged is table._staged():
            monkeypatch.setattr(ZarrRowTable, "read_done", read_done)
            rest = table.pending()
            table.put(rest, values(rest))
            raise IncompleteStoreError("the file was removed after it was committed")
        return read_done(staged, chunk)

    monkeypatch.setattr(ZarrRowTable, "read_done", read_late)
    rows, found = table.read_done(0)
    assert rows.tolist() == list(range(*table.chunk_range(0)))
    for name, expected in values(rows).items():
        np.testing.assert_array_equal(found[name], expected)


def test_a_place_where_a_creator_was_killed_becomes_a_store(bucket, here):
    """The list of tables is put first: until the store's own document is there, anybody may make the store."""
    here.store()
    del bucket.kept["zarr.json"]
    assert list(bucket.kept) == [".tables/zarr.json"]
    here.table().put(0, values([0]))
    assert here.reader().done().tolist().count(True) == 1
    del bucket.kept["zarr.json"]  # tables are there: this is a damaged store, and not one that is being made
    with pytest.raises(CorruptStoreError, match="is not a store"):
        RemoteFeatureStore.create(here.place, MANIFEST)


@pytest.mark.parametrize("document", [f"{NAME}/zarr.json", f"{NAME}/q/zarr.json", "zarr.json"])
def test_damaged_documents_are_named(bucket, here, document):
    here.table()
    bucket.kept[document] = b"[]"
    with pytest.raises(CorruptStoreError, match=document):
        here.reader()


def test_reading_twice_fetches_once(bucket, here, there):
    finish(here)
    reader = there.reader()
    for _ in range(2):
        reader.read("features")
    fetched = [key for request, key in bucket.requests[-8:] if request == "get" and "/c." in key]
    assert len([key for key in fetched if ".commits" not in key]) <= 3


# ------------------------------------------------------------------ kill -9


@pytest.mark.parametrize("failpoint", ["object_put", "commit_put", "staged_file_removed", "chunk_settled"])
def test_a_kill_on_the_way_to_the_object_store_loses_nothing(tmp_path, victims, failpoint):
    """Neither for a run that goes on here nor, by turns, for one on another machine."""
    pytest.importorskip("obstore")
    deaths = 0
    for count in itertools.count(1):
        folder = tmp_path / str(count)
        folder.mkdir()
        if not victims.killed(f"{failpoint}:{count}", "write_remote", str(folder), str(folder / "done"), 3):
            break
        deaths += 1
        done = (folder / "done").read_text().split() if (folder / "done").exists() else []
        with open_remote(folder, "r") as (_, table):
            assert table.done()[np.array(done, int)].all()
            for chunk in table.committed_chunks():
                expected = values(range(*table.chunk_range(chunk)))["features"]
                np.testing.assert_array_equal(table.read_chunk(chunk, "features"), expected)
        with open_remote(folder, staging="other" if count % 2 else "staging") as (store, table):
            pending = table.pending()
            if len(pending):
                table.put(pending, values(pending))
            check_rows(table)
            assert store.check().findings == ()
        shutil.rmtree(folder)
    assert deaths >= 3


def test_a_kill_while_a_leftover_is_replaced_loses_nothing(tmp_path, victims):
    """The record is won, some objects still have the dead writer's bytes: nobody reads them as rows."""
    pytest.importorskip("obstore")
    objects = tmp_path / "objects" / NAME
    with open_remote(tmp_path, staging="dead") as (_, table):
        table.put(0, other_values(range(4)))
    (objects / "features" / ".commits" / "c.0.1.log").unlink()
    for step in ("commit_put:1", "leftover_replaced:1", "leftover_replaced:1"):
        assert victims.killed(step, "write_remote", str(tmp_path), str(tmp_path / "done"), 11)
        with (
            open_remote(tmp_path, "r", staging="none") as (_, table),
            pytest.raises(CorruptStoreError, match="wait if it runs"),
        ):
            table.read("w")
    with open_remote(tmp_path) as (store, table):
        check_rows(table)
        assert store.check().findings == ()


def test_a_slow_creator_does_not_drop_what_another_has_staged(tmp_path):
    """B has found no table; A creates it and puts rows; B goes on.

    They are writers of one machine and share the staging folder: whatever B has seen before counts for nothing.
    """
    with open_remote(tmp_path) as (store, _):
        store.drop_table(NAME)
    with open_remote_store(tmp_path) as slow, open_remote_store(tmp_path) as other:
        real, looks = slow._table_record, []

        def look(parts):
            found = real(parts)
            if not looks:
                looks.append(found)
                other.create_table(NAME, SPEC).put(0, values(range(3)))
                other.close()
            return found

        slow._table_record = look
        table = slow.create_table(NAME, SPEC)
        assert looks == [None]
        assert np.flatnonzero(table.done()).tolist() == [0, 1, 2]


def test_a_dropper_does_not_take_what_another_has_created(tmp_path):
    """A drops a table and is slow to remove its objects; B creates it anew meanwhile, and waits for its turn."""
    with open_remote(tmp_path) as (store, table):
        table.put(0, values(range(11)))
        real, began, order = store._finish_dropping, threading.Event(), []

        def slow(path):
            began.set()
            other.join(0.5)  # it would be done by then, if nothing held it
            order.append("dropped")
            real(path)

        def create():
            began.wait()
            with open_remote_store(tmp_path) as again:
                again.create_table(NAME, SPEC).put(0, values(range(3)))
                order.append("created")

        other = threading.Thread(target=create)
        store._finish_dropping = slow
        other.start()
        store.drop_table(NAME)
        other.join()
    assert order == ["dropped", "created"]
    with open_remote_store(tmp_path) as store:
        assert np.flatnonzero(store.open_table(NAME).done()).tolist() == [0, 1, 2]


def open_remote_store(folder):
    from obstore.store import LocalStore

    return RemoteFeatureStore.open(
        RemotePlace(LocalStore(f"{folder}/objects"), staging=f"{folder}/staging"), "r+"
    )
