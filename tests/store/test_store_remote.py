"""Object stores whose requests fail, writers that race, listings that lag: no row is lost, none is wrong."""

import contextlib
import itertools
import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import store_cases as cases
from store_cases import MANIFEST, NAME, SPEC, check_rows, crc32c, open_remote, put_pending, raises, values

from trak_lite import errors
from trak_lite.errors import BusyError, CorruptStoreError, MissingStoreError, StateError, StoreError
from trak_lite.store import RemotePlace, create_store, open_store

FIRST = f"{NAME}/features/c.0.0"
OBJECTS = [FIRST, f"{NAME}/q/c.0", f"{NAME}/w/c.0"]
RECORD = f"{NAME}/features/.commits/c.0.1.log"


class Machine:
    """A place for the bucket with a staging folder of its own, and one run at a time."""

    def __init__(self, bucket, folder):
        self.folder = folder
        self.place = RemotePlace(bucket, staging=folder)
        self.run = contextlib.nullcontext()

    def store(self):
        """Give up the store of the run before, and open one for the next."""
        self.run.__exit__(None, None, None)
        self.run = create_store(self.place, MANIFEST)
        return self.run

    def table(self):
        return self.store().create_table(NAME, SPEC)

    def reader(self):
        return open_store(self.place).open_table(NAME)

    def check(self):
        return open_store(self.place).check()

    def finish(self):
        put_pending(self.table())
        check_rows(self.reader())


@pytest.fixture
def bucket():
    return cases.Bucket()


@pytest.fixture
def here(bucket, tmp_path):
    return Machine(bucket, tmp_path / "here")


@pytest.fixture
def there(bucket, tmp_path):
    return Machine(bucket, tmp_path / "there")


def killed_at(bucket, key, machine, attempt=0):
    """A writer whose request for an object fails while it commits the first chunk."""
    with bucket.failing("create", key), pytest.raises(StoreError, match="the line is dead"):
        machine.table().put(0, values(range(4), attempt=attempt))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("key", [*OBJECTS, RECORD])
def test_a_request_that_fails_leaves_the_rows_staged(bucket, here, there, key, moment):
    """Whether it failed or only its answer was lost; another machine sees a chunk or none, and never half of one."""
    table = here.table()
    with bucket.failing("create", key, moment), pytest.raises(StoreError, match="the line is dead"):
        table.put(0, values(range(5)))
    assert here.reader().done()[:4].all()
    assert there.reader().committed_chunks() in ([], [0])
    if key == FIRST and moment == "before":  # the same handle goes on as well
        with table.claim(0) as pending:
            assert pending.tolist() == []
        assert there.reader().committed_chunks() == [0]
    again = here.table()
    assert again.committed_chunks() == [0]
    assert set(range(4)).isdisjoint(again.pending())
    here.finish()
    check_rows(there.reader())


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_a_dead_writer_left_uncommitted_is_used_or_replaced(bucket, here, there, attempt):
    """Its objects are replaced once the commit record is won, if they differ; if it wakes up, it changes nothing."""
    killed_at(bucket, RECORD, here, attempt)
    assert FIRST in bucket.kept
    assert there.table().committed_chunks() == []
    there.finish()
    puts = [key for request, key in bucket.requests if request == "put"]
    assert puts == (OBJECTS if attempt else [])
    kept = dict(bucket.kept)
    assert here.table().complete
    assert bucket.kept == kept
    check_rows(here.reader())


@pytest.mark.parametrize("moment", [FIRST, OBJECTS[2], RECORD])
def test_a_lost_race_leaves_the_winner_untouched(bucket, here, there, moment):
    """Whenever the other one commits; the loser is told who has won, and goes on with the rows that are pending."""
    slow, fast = here.table(), there.table()
    slow.put(0, values(range(3), attempt=1))
    kept = {}

    def overtake(request, key):
        if (request, key) == ("create", moment) and not fast.committed_chunks():
            bucket.before = lambda request, key: None
            fast.put(0, values(range(4)))
            kept.update(bucket.kept)

    bucket.before = overtake
    with pytest.raises(BusyError, match=r"pid \d+ on .* has committed rows 0 to 3 \(chunk 0\).*other bytes"):
        slow.put(3, values([3], attempt=1))
    assert bucket.kept == kept
    assert slow.pending().tolist() == list(range(4, 11))
    assert slow.committed_chunks() == [0]
    here.finish()


def test_a_chunk_that_is_committed_elsewhere_is_taken_as_it_is(here, there):
    """A race for the same bytes is no conflict; later rows are refused before one is staged, and a claim is empty."""
    slow, fast = here.table(), there.table()
    slow.put(0, values(range(3)))
    slow.put(4, values([4]))
    fast.put(0, values(range(8)))
    slow.put(3, values([3]))
    assert slow.committed_chunks() == [0, 1]
    raises(StateError, r"rows 0 to 3 \(chunk 0\).* are done already", slow.put, 0, values([0]))
    with slow.claim(1) as pending:
        assert pending.tolist() == []
    assert not list(here.folder.rglob("[01].rows"))
    here.finish()


def test_a_listing_that_lags_costs_work_and_nothing_else(bucket, here, there):
    """Rows that it does not show are pending, not readable, and computed again to the same end."""
    table = here.table()
    bucket.listing = dict(bucket.kept)
    table.put(0, values(range(4)))
    reader = there.reader()
    assert not reader.done().any()
    raises(errors.IncompleteStoreError, None, reader.read_chunk, 0, "q")
    there.table().put(0, values(range(4)))
    bucket.listing = None
    there.finish()
    assert sum(key.startswith(f"{NAME}/features/.commits/c.0.") for key in bucket.kept) == 1


DAMAGE = [(lambda b: cases.flipped(b, -1, 0), "checksum"), (lambda b: b[:-1], "bytes")]
DAMAGE += [(lambda b: b + b"0", "bytes")]


@pytest.mark.parametrize(("damage", "problem"), DAMAGE)
def test_a_damaged_object_is_named_and_can_be_made_anew(bucket, here, there, damage, problem):
    """Reading and verifying name object, rows and what to do; doing it makes exactly these rows pending."""
    here.finish()
    before = there.reader()
    bucket.kept[FIRST] = damage(bucket.kept[FIRST])
    with pytest.raises(CorruptStoreError, match=rf"rows 0 to 3 \(chunk 0\).*Remove {FIRST}"):
        there.reader().read_chunk(0, "features")
    report = here.check()
    (finding,) = report.findings
    assert report.tally.chunks == 2
    assert (finding.level, finding.table, finding.chunk, finding.rows) == ("damage", NAME, 0, range(4))
    assert problem in finding.finding
    assert finding.next_step.startswith(f"remove {FIRST}, then make the call that computes the rows again")
    del bucket.kept[FIRST]
    for reader, message in ((before, "removed after it was committed"), (there.reader(), "Rows 0 to 3")):
        raises(errors.IncompleteStoreError, message, reader.read_chunk, 0, "features")
    assert there.table().pending().tolist() == [0, 1, 2, 3]
    there.finish()
    np.testing.assert_array_equal(before.read_chunk(0, "features"), values(range(4))["features"])
    assert here.check().ok


def test_verifying_tells_what_is_in_flight_and_what_is_not_ours(bucket, here):
    """Notes, not damage; a damaged document and a record that is none are damage."""
    killed_at(bucket, RECORD, here)
    bucket.kept["notes.txt"] = b"hello"
    store = open_store(here.place)
    report = store.check()
    assert report.ok
    in_flight, stranger = (f.finding for f in report.findings)
    assert in_flight == "put and not committed: a writer is running, or was killed"
    assert stranger == "'notes.txt' belongs to no table"
    assert (report.tally.tables, report.tally.pending_rows) == (1, 11)
    bucket.kept[RECORD] = b"no record\n"
    bucket.kept["ckpt-9/zarr.json"] = b"{"
    assert [f.table for f in store.check().findings if f.level == "damage"] == ["ckpt-9", NAME]
    raises(CorruptStoreError, f"{RECORD} is not a commit record. Remove it", here.table)
    raises(errors.UnsupportedStoreError, "remove the objects that the report names", store.check, repair=True)
    bucket.kept["zarr.json"] = b"{}"
    assert not store.check().ok
    del bucket.kept["zarr.json"]
    raises(MissingStoreError, None, store.check)


def test_a_table_that_is_not_listed_is_named_until_a_writer_lists_it(bucket, here):
    put_pending(here.table())
    (entry,) = (key for key in bucket.kept if key.startswith(".tables/") and not key.endswith("zarr.json"))
    del bucket.kept[entry]
    (note,) = here.check().findings
    assert note.level == "note"
    assert f"{NAME!r} is not listed" in note.finding
    here.table()
    assert not here.check().findings
    assert entry in bucket.kept
    check_rows(here.reader())


def test_a_document_in_another_place_is_refused_only_where_a_check_names_it(bucket, here):
    """Of the store, a group, a table, an array or the list of tables, each copied over each other."""
    spec, names = replace(SPEC, columns=SPEC.columns[1:2]), ["targets/one", "two"]
    with here.store() as store:
        for attempt, name in enumerate(names):
            store.create_table(name, spec).put(0, {"q": values(range(11), attempt=attempt)["q"]})
    refused = 0

    def read():
        with open_store(here.place) as store:
            return store.table_names(), [store.open_table(name).read("q").tolist() for name in names]

    sound, whole = read(), dict(bucket.kept)
    documents = [key for key in whole if key.endswith("zarr.json")]
    assert len(documents) == 7
    for one, other in itertools.permutations(documents, 2):
        bucket.kept[other] = whole[one]
        try:
            assert read() == sound
        except CorruptStoreError:
            refused += 1
            with contextlib.suppress(StoreError):
                assert not here.check().ok, (one, other)
        bucket.kept[other] = whole[other]
    for document in set(documents) - {".tables/zarr.json", "targets/zarr.json"}:
        bucket.kept[document] = b"[]"
        raises(CorruptStoreError, document, read)
        bucket.kept[document] = whole[document]
    assert refused == 42 - 6 - 1 - 2  # over the list; the store over the group; two arrays are alike
    bucket.kept[".tables/zarr.json"] = b"{}"
    assert not here.check().ok


@pytest.mark.parametrize("change", [{"chunk": 9}, {"rows": 3}])
def test_records_that_contradict_the_table_are_damage(bucket, here, change):
    """Of a chunk that it has not, or with other rows than the chunk has; the name of a record says nothing."""
    here.finish()
    extra = f"{NAME}/features/.commits/extra.log"
    bucket.kept[extra] = bucket.kept[f"{NAME}/features/.commits/c.2.1.log"]
    assert here.check().ok
    record = json.loads(bucket.kept[RECORD].rpartition(b"\t")[0]) | {"generation": 2} | change
    body = json.dumps(record).encode()
    bucket.kept[extra] = body + b"\t%08x\n" % crc32c(body)
    (finding,) = here.check().findings
    assert finding.level == "damage"
    if "rows" in change:
        raises(CorruptStoreError, "for 3 rows", here.reader)


def test_a_drop_that_was_interrupted_is_finished_by_creating_anew(bucket, here, there):
    """In between there is no table, and no row of the old one comes back."""
    here.finish()
    store = here.store()
    with bucket.failing("delete", FIRST), pytest.raises(StoreError, match="the line is dead"):
        store.drop_table(NAME)
    assert open_store(there.place).table_names() == []
    assert here.check().ok
    raises(MissingStoreError, None, there.reader)
    assert not there.table().done().any()
    there.finish()


def test_a_place_that_cannot_create_exclusively_is_refused(bucket, here):
    """Before anything is put there but the question itself, which is removed."""
    bucket.create = lambda key, content: bucket.kept.update({key: bytes(content)}) or True
    raises(errors.UnsupportedStoreError, "created twice", here.table)
    assert bucket.kept == {}


def test_a_place_where_a_creator_was_killed_becomes_a_store(bucket, here):
    """The list of tables is put first: until the store's own document is there, anybody may make the store."""
    here.store()
    del bucket.kept["zarr.json"]
    assert list(bucket.kept) == [".tables/zarr.json"]
    here.table().put(0, values([0]))
    assert here.reader().done().tolist().count(True) == 1
    del bucket.kept["zarr.json"]  # tables are there: this is a damaged store, and not one that is being made
    raises(CorruptStoreError, r"is a store without its zarr\.json.*from a backup", here.store)
    bucket.kept = {"photos/cat.jpg": b"x"}
    raises(CorruptStoreError, "is not a store", here.store)
    raises(MissingStoreError, None, here.reader)


def test_reading_twice_fetches_once(bucket, here, there):
    here.finish()
    reader = there.reader()
    bucket.requests.clear()
    for _ in range(2):
        reader.read("features")
    fetched = [key for request, key in bucket.requests if request == "get" and "/c." in key]
    rows = [f"{NAME}/features/c.{n}.0" for n in range(3)]
    assert sorted(key for key in fetched if ".commits" not in key) == rows


# Two processes of one machine.


def test_a_slow_creator_does_not_drop_what_another_has_staged(bucket, here):
    """It has found no table; another one creates the table and puts rows; then it goes on."""
    here.store()
    with create_store(here.place, MANIFEST) as other:

        def overtake(request, key):
            if (request, key) == ("get", f"{NAME}/zarr.json"):
                bucket.before = lambda request, key: None
                other.create_table(NAME, SPEC).put(0, values(range(3)))
                other.close()

        bucket.before = overtake
        table = here.run.create_table(NAME, SPEC)
        assert np.flatnonzero(table.done()).tolist() == [0, 1, 2]
    assert np.flatnonzero(here.table().done()).tolist() == [0, 1, 2]


def test_a_dropper_does_not_take_what_another_has_created(bucket, here):
    """One drops a table and is slow to remove its objects; another creates it anew, and waits for its turn."""
    here.table().put(0, values(range(11)))
    began, order = threading.Event(), []

    def slow(request, key):
        if (request, key) == ("delete", FIRST) and not began.is_set():
            began.set()
            other.join(0.5)  # it would be done by then, if nothing held it
            order.append("dropped")

    def create():
        began.wait()
        with create_store(here.place, MANIFEST) as again:
            again.create_table(NAME, SPEC).put(0, values(range(3)))
            order.append("created")

    other = threading.Thread(target=create)
    bucket.before = slow
    other.start()
    here.run.drop_table(NAME)
    other.join()
    assert order == ["dropped", "created"]
    assert np.flatnonzero(here.reader().done()).tolist() == [0, 1, 2]


# Copies from one kind of place to another.


def test_a_store_that_is_copied_to_a_disk_is_a_local_store_and_the_other_way_round(tmp_path):
    """With every record, nothing is left to do and nothing is strange; rows that were staged stay on the disk."""
    path = str(tmp_path / "copy.zarr")
    with open_remote(tmp_path) as (_, table):
        table.put(0, values(range(9)))
    shutil.copytree(tmp_path / "objects", path)
    with create_store(path, MANIFEST) as store, open_store(cases.remote_place(tmp_path, "none")) as remote:
        table = store.create_table(NAME, SPEC)
        assert table.committed_chunks() == [0, 1]
        assert store.diff(remote) == ()
        assert store.check().findings == ()
        table.put(8, values([8]))
    shutil.rmtree(tmp_path / "objects")
    shutil.copytree(path, tmp_path / "objects")
    with open_remote(tmp_path, staging="third") as (store, table):
        assert table.committed_chunks() == [0, 1]
        assert table.pending().tolist() == [8, 9, 10]
        put_pending(table)
        check_rows(table)
        assert store.check().ok
