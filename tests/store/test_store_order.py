"""What a power cut may take: every rename stands after the syncs that it depends on."""

import os
import time

import pytest
from store_cases import MANIFEST, NAME, SPEC, commit_log, folder, open_for_writing, staged, values

from trak_lite.store import ZarrFeatureStore
from trak_lite.store.disk.listing import entry_name


@pytest.fixture
def steps(monkeypatch):
    """Every sync and rename, in the order in which they end; a sync takes longer than a rename."""
    seen = []
    rename = os.rename

    def record_sync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        time.sleep(0.005)
        seen.append(("sync", path))

    def record_rename(source, target, *, src_dir_fd, dst_dir_fd):
        old, new = (os.readlink(f"/proc/self/fd/{fd}") for fd in (src_dir_fd, dst_dir_fd))
        seen.append(("rename", f"{old}/{source}", f"{new}/{target}"))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    return seen


def test_a_chunk_is_synced_then_recorded_then_visible(path, steps):
    _, table = open_for_writing(path)
    table.put(0, values(range(3)))
    steps.clear()
    table.put(3, values([3]))

    names = ["features", "q", "w"]
    keys = [folder(path, key) for key in ("features/c.0.0", "q/c.0", "w/c.0")]
    log = commit_log(path)
    synced, recorded, visible = steps[:3], steps[3:5], steps[5:8]
    assert sorted(synced) == sorted(("sync", staged(path, 0, name)) for name in names)  # all at once
    assert recorded == [("sync", os.path.dirname(log)), ("sync", log)]
    assert visible == [("rename", staged(path, 0, name), key) for name, key in zip(names, keys, strict=True)]
    folders = [*(folder(path, name) for name in names), folder(path, "features", ".stage")]
    assert sorted(steps[8:]) == sorted(("sync", name) for name in folders)


def test_a_batch_is_not_synced(path, steps):
    _, table = open_for_writing(path)
    steps.clear()
    table.put(0, values(range(3)))
    assert steps == []


def test_a_store_and_a_table_are_synced_before_they_have_a_name(path, steps):
    ZarrFeatureStore.create(path, MANIFEST).create_table(NAME, SPEC)

    renamed = [step for step in steps if step[0] == "rename"]
    *published, (_, scratch, entry) = renamed
    assert entry == f"{path}/.tables/{entry_name(NAME)}"  # listed when it is there, and no earlier
    assert steps.index(("sync", scratch)) < steps.index(renamed[-1])
    assert steps[-1] == ("sync", f"{path}/.tables")
    assert [target for _, _, target in published] == [
        path,
        f"{path}/targets",
        f"{path}/targets/test",
        folder(path),
    ]
    for step in published:
        _, scratch, target = step
        place = steps.index(step)
        synced = {name.replace(scratch, target) for _, name, *_ in steps[:place]}
        made = {os.path.join(parent, name) for parent, _, files in os.walk(target) for name in files}
        made = {name for name in made if name != entry}
        made |= {parent for parent, _, _ in os.walk(target)}
        below = {other for _, _, other in published if other != target and other.startswith(target)}
        expected = {name for name in made if not any(name.startswith(other) for other in below)}
        assert expected <= synced
        assert steps[place + 1] == ("sync", os.path.dirname(target))


def test_new_parent_folders_are_synced(tmp_path, steps):
    ZarrFeatureStore.create(tmp_path / "a" / "b" / "run.zarr", MANIFEST)
    assert steps[:2] == [("sync", str(tmp_path)), ("sync", str(tmp_path / "a"))]
