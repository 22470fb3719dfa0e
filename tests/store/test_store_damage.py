"""Damaged bytes cost rows or raise; they are never read as rows."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from store_cases import (
    MANIFEST,
    NAME,
    check_all,
    commit_log,
    content,
    done_rows,
    finish,
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
    IncompleteStoreError,
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
)
from trak_lite.store import ZarrFeatureStore, check_store
from trak_lite.store.disk.documents import sealed
from trak_lite.store.disk.files import map_file

RUNS = [(4, 1), (5, 2), (7, 1)]  # (first row, rows) of chunk 1 as they were put, in this order


@pytest.fixture
def half(path):
    """A store whose chunk 1 is staged in three puts but for no row of the others."""
    with writing(path) as table:
        for start, count in RUNS[:2]:
            table.put(start, values(range(start, start + count)))
    return path


@pytest.fixture
def full(path):
    with writing(path) as table:
        table.put(0, values(range(11)))
    return path


def remove_chunk(path, chunk):
    for key in (f"features/c.{chunk}.0", f"q/c.{chunk}", f"w/c.{chunk}"):
        if os.path.exists(folder(path, key)):
            os.unlink(folder(path, key))


def test_a_row_log_torn_at_any_byte_keeps_its_whole_records(half):
    log = content(row_log(half, 1))
    assert len(log) == 64 + 2 * 24
    for cut in range(len(log)):
        overwrite(row_log(half, 1), log[:cut])
        assert done_rows(half) == ([4] if cut >= 64 + 24 else [])


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 87, 88, 111])
def test_a_run_resumes_after_a_torn_row_log(half, cut):
    overwrite(row_log(half, 1), content(row_log(half, 1))[:cut])
    finish(half, batch=1)


def test_a_flipped_bit_in_a_row_record_costs_its_rows_only(half):
    log = content(row_log(half, 1))
    for byte in range(len(log)):
        overwrite(row_log(half, 1), flipped(log, byte, byte % 8))
        lost = set() if byte < 64 else ({4} if byte < 88 else {5, 6})
        assert done_rows(half) == sorted({4, 5, 6} - lost)
    finish(half)


@pytest.mark.parametrize(("column", "row_bytes"), [("features", 6), ("q", 4), ("w", 4)])
def test_a_flipped_bit_in_a_staged_row_makes_it_pending(half, column, row_bytes):
    stage = content(staged(half, 1, column))
    for byte in range(len(stage)):
        overwrite(staged(half, 1, column), flipped(stage, byte, byte % 8))
        row = byte // row_bytes
        assert done_rows(half) == ([5, 6] if row == 0 else [4] if row < 3 else [4, 5, 6])
    finish(half)


@pytest.mark.parametrize(("size", "done"), [(None, []), (0, []), (9, [4]), (15, [4, 5, 6]), (17, [4, 5, 6])])
def test_a_staged_file_of_another_size_keeps_its_whole_rows(half, size, done):
    stage = content(staged(half, 1, "q"))
    os.unlink(staged(half, 1, "q"))
    if size is not None:
        overwrite(staged(half, 1, "q"), (stage + b"x")[:size])

    assert done_rows(half) == done
    finish(half)


def test_staged_rows_that_change_under_the_writer_are_not_committed(path):
    store, table = open_for_writing(path)
    table.put(0, values(range(3)))
    overwrite(staged(path, 0, "q"), flipped(content(staged(path, 0, "q")), 4, 0))

    with pytest.raises(CorruptStoreError, match="changed after they were written"):
        table.put(3, values([3]))
    assert table.committed_chunks() == []
    assert table.pending().tolist() == list(range(11))
    store.close()
    finish(path)


@pytest.mark.parametrize("key", ["features/c.1.0", "q/c.1", "w/c.2"])
def test_a_flipped_bit_in_a_committed_chunk_is_never_read(full, key):
    whole = content(folder(full, key))
    column, chunk = key.split("/")[0], int(key.split(".")[1])
    for byte in range(len(whole)):
        overwrite(folder(full, key), flipped(whole, byte, byte % 8))
        with reading(full) as table, pytest.raises(CorruptStoreError, match="checksum differs") as caught:
            table.read_chunk(chunk, column)
    assert folder(full, key) in str(caught.value)
    assert f"rows {4 * chunk} to" in str(caught.value)
    assert "Remove" in str(caught.value)


def test_following_the_advice_for_a_damaged_chunk_repairs_it(full):
    overwrite(folder(full, "q/c.1"), bytes(16))
    os.unlink(folder(full, "q/c.1"))
    assert done_rows(full) == [0, 1, 2, 3, 8, 9, 10]
    finish(full)


def test_a_damaged_chunk_leaves_the_others_readable(full):
    overwrite(folder(full, "features/c.1.0"), bytes(24))
    with reading(full) as table:
        np.testing.assert_array_equal(table.read_chunk(0, "features"), values(range(4))["features"])


@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
def test_a_chunk_of_another_size_is_refused(full, size):
    overwrite(folder(full, "q/c.1"), (content(folder(full, "q/c.1")) * 2)[:size])
    with pytest.raises(CorruptStoreError, match=rf"rows 4 to 7 \(chunk 1\).*'q': {size}"), reading(full):
        pass


def test_a_file_is_not_mapped_beyond_its_end(tmp_path):
    """Touching a page that the file does not have would kill the process."""
    overwrite(tmp_path / "chunk", b"12345")
    assert map_file(str(tmp_path / "chunk"), 5).tobytes() == b"12345"
    with pytest.raises(CorruptStoreError, match="has 5 bytes, expected 6"):
        map_file(str(tmp_path / "chunk"), 6)


def test_a_chunk_that_is_cut_short_under_a_reader_is_refused(full):
    with reading(full) as table:
        overwrite(folder(full, "q/c.1"), b"short")
        with pytest.raises(CorruptStoreError, match="5 bytes, expected 16"):
            table.read_chunk(1, "q")


@pytest.mark.parametrize("keys", [["features/c.1.0"], ["w/c.1"], ["features/c.1.0", "q/c.1", "w/c.1"]])
def test_a_deleted_chunk_is_pending_and_computed_again(full, keys):
    for key in keys:
        os.unlink(folder(full, key))
    with reading(full) as table:
        assert table.pending().tolist() == [4, 5, 6, 7]
        assert table.committed_chunks() == [0, 2]
        for column in ("features", "q"):
            with pytest.raises(IncompleteStoreError, match="Rows 4 to 7"):
                table.read_chunk(1, column)
    finish(full)


def test_a_chunk_committed_again_may_hold_other_values(full):
    """The record of the latest commit is the law, in whichever log it stands."""
    for attempt in range(1, 7):
        remove_chunk(full, 1)
        rows = range(10 * attempt, 10 * attempt + 4)
        with writing(full) as table:
            table.put(4, values(rows))
        with reading(full) as table:
            np.testing.assert_array_equal(table.read_chunk(1, "q"), values(rows)["q"])


def test_a_chunk_deleted_under_a_reader_is_incomplete(full):
    with reading(full) as table:
        remove_chunk(full, 2)
        with pytest.raises(IncompleteStoreError, match="was removed"):
            table.read_chunk(2, "q")


def test_rows_already_mapped_survive_the_loss_of_the_file(full):
    with reading(full) as table:
        rows = table.read_chunk(0, "q")
        remove_chunk(full, 0)
    np.testing.assert_array_equal(rows, values(range(4))["q"])


def test_a_foreign_chunk_is_refused(half):
    for key, size in (("features/c.2.0", 24), ("q/c.2", 16), ("w/c.2", 16)):
        overwrite(folder(half, key), bytes(size))
    with pytest.raises(CorruptStoreError, match=r"chunks 2 without a commit record.*c\.2\.0"), reading(half):
        pass


def test_a_chunk_outside_the_grid_is_refused(full):
    overwrite(folder(full, "q/c.3"), bytes(16))
    with pytest.raises(CorruptStoreError, match="chunks 3, but its 11 rows make 3 chunks"), reading(full):
        pass


def test_files_that_are_no_chunks_are_left_alone(full):
    for name in ("c.0.0.partial", "c.x", "notes.txt", "c.00"):
        overwrite(folder(full, "q", name), b"x")
    check_all(full)


def test_a_flipped_bit_in_a_commit_log_never_makes_wrong_rows(full):
    log = commit_log(full)
    whole = content(log)
    for byte in range(len(whole)):
        overwrite(log, flipped(whole, byte, byte % 8))
        with pytest.raises(CorruptStoreError, match="without a commit record"), reading(full):
            pass


def test_a_commit_log_torn_before_the_rename_costs_nothing(tmp_path, victims):
    """The record may be torn while no column has its final name: then it does not exist."""
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed("commit_synced:1", "write", path, done, 11)
    whole = content(commit_log(path))
    for cut in range(len(whole)):
        overwrite(commit_log(path), whole[:cut])
        assert done_rows(path) == [0, 1, 2, 3]
    finish(path)


def test_a_commit_record_outlives_the_row_log(tmp_path, victims):
    """A power cut may take the row log, which is never synced; the synced bytes match the synced record."""
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed("commit_synced:1", "write", path, done, 11)
    overwrite(row_log(path, 0), b"")

    with writing(path) as table:
        assert table.committed_chunks() == [0]
    finish(path)


def test_a_commit_record_without_its_bytes_proves_nothing(tmp_path, victims):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed("commit_synced:1", "write", path, done, 11)
    overwrite(row_log(path, 0), b"")
    overwrite(staged(path, 0, "q"), bytes(16))

    with writing(path) as table:
        assert table.pending().tolist() == list(range(11))
    finish(path)


def test_a_copy_without_the_empty_folders_is_whole(full, tmp_path):
    """Tools that copy files and drop empty folders lose nothing."""
    os.rmdir(folder(full, "features", ".stage"))
    with reading(full) as table:
        assert table.complete
    with writing(full) as table:
        assert table.complete
    check_all(full)


@pytest.mark.parametrize("torn", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"node_type": "array"}'])
@pytest.mark.parametrize("which", ["", NAME, f"{NAME}/q"])
def test_torn_metadata_is_refused_and_never_made_anew(full, torn, which):
    overwrite(os.path.join(full, which, "zarr.json"), torn)
    before = snapshot(full)

    with pytest.raises(CorruptStoreError, match=r"zarr\.json"):
        open_for_writing(full)
    assert snapshot(full) == before


def edited(path, change):
    with open(path) as file:
        document = json.load(file)
    change(document)
    own = document["attributes"].get("trak_lite")
    if own is not None and "checksum" in own:  # that the checksum is right is no proof that it makes sense
        document["attributes"]["trak_lite"] = sealed(own)
    with open(path, "w") as file:
        json.dump(document, file)


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("q/zarr.json", "shape", [12]),
        ("q/zarr.json", "shape", [10**15]),
        ("q/zarr.json", "data_type", "float64"),
        ("features/zarr.json", "codecs", [{"name": "zstd"}]),
        ("features/zarr.json", "fill_value", 0),
    ],
)
def test_an_array_that_contradicts_its_table_is_refused(full, where, key, value):
    edited(folder(full, where), lambda document: document.update({key: value}))
    with pytest.raises(CorruptStoreError, match=rf"contradicts its table: {key} is"), reading(full):
        pass


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_rows", -1), ("num_rows", "11"), ("chunk_rows", 0), ("columns", [{"name": "q"}]), ("columns", 7)],
)
def test_a_table_description_that_makes_no_sense_is_refused(full, key, value):
    edited(
        folder(full, "zarr.json"),
        lambda document: document["attributes"]["trak_lite"].update({key: value}),
    )
    with pytest.raises(CorruptStoreError, match="does not describe a table"), reading(full):
        pass


def test_an_array_without_metadata_is_refused(full):
    os.unlink(folder(full, "w/zarr.json"))
    with pytest.raises(CorruptStoreError, match=r"w/zarr\.json is missing"), reading(full):
        pass


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": 4}, ManifestMismatchError, "has the format 4, .* reads the format 3.* Install a newer"),
        ({"format": 2}, ManifestMismatchError, "has the format 2, .* reads the format 3.* Featurize again"),
        ({"format": "1"}, CorruptStoreError, "format is '1'"),
        ({"format": True}, CorruptStoreError, "format is True"),
        ({"fingerprint": []}, CorruptStoreError, "fingerprint is list"),
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_manifest_of_another_format_is_refused(full, mode, change, error, message):
    edited(
        os.path.join(full, "zarr.json"), lambda document: document["attributes"]["trak_lite"].update(change)
    )
    with pytest.raises(error, match=message):
        ZarrFeatureStore.open(full, mode)


def test_a_zarr_group_of_others_is_no_store(full):
    edited(os.path.join(full, "zarr.json"), lambda document: document.update(attributes={}))
    with pytest.raises(CorruptStoreError, match="does not describe a zarr group with trak_lite's"):
        ZarrFeatureStore.open(full)


@pytest.mark.parametrize("what", ["table", "column", "chunk", "stage", "log", "metadata"])
def test_no_link_inside_a_store_is_followed(full, tmp_path, what):
    target = {
        "table": folder(full),
        "column": folder(full, "q"),
        "chunk": folder(full, "q/c.0"),
        "stage": folder(full, "features/.stage"),
        "log": commit_log(full),
        "metadata": folder(full, "zarr.json"),
    }[what]
    shutil.move(target, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", target)

    if what == "stage":  # nothing of a complete table is staged
        assert "symbolic link" in str(check_store(full))
        return
    with pytest.raises(CorruptStoreError, match=r"symbolic link|not a plain file"), reading(full) as table:
        table.read_chunk(0, "q")


def test_a_linked_root_is_followed_once(full, tmp_path):
    os.symlink(full, tmp_path / "link.zarr")
    with ZarrFeatureStore.open(tmp_path / "link.zarr") as store:
        assert store.path == os.path.realpath(full)
        assert store.open_table(NAME).complete


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_folder_without_a_store_is_missing(tmp_path, mode):
    for name in ("nothing", "."):
        with pytest.raises(MissingStoreError, match="no store at"):
            ZarrFeatureStore.open(tmp_path / name, mode)


def test_an_unknown_mode_is_refused(full):
    with pytest.raises(InvalidInputError, match="mode must be one of"):
        ZarrFeatureStore.open(full, "w")


def test_a_damaged_derived_array_is_as_good_as_none(path):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.cache("gram", "key", np.arange(6.0))
        kept = os.path.join(path, ".cache", "gram.safetensors")
        whole = content(kept)
        for byte in range(len(whole)):
            overwrite(kept, flipped(whole, byte, byte % 8))
            found = store.cached("gram", "key")
            assert found is None
        for cut in range(len(whole)):
            overwrite(kept, whole[:cut])
            assert store.cached("gram", "key") is None
        store.cache("gram", "key", np.arange(6.0))
        np.testing.assert_array_equal(store.cached("gram", "key"), np.arange(6.0))


def test_a_derived_array_is_a_plain_safetensors_file(path):
    with ZarrFeatureStore.create(path, MANIFEST) as store:
        store.cache("ckpt-0/gram", "key", np.eye(3))
    found = load_file(os.path.join(path, ".cache", "ckpt-0%gram.safetensors"))
    np.testing.assert_array_equal(found["array"], np.eye(3))
