"""kill -9 at every step of the protocol loses nothing that was acknowledged and never shows a half chunk."""

import itertools
import os

import numpy as np
import pytest
from store_cases import check_all, finish, reading, values

from trak_lite.errors import MissingStoreError
from trak_lite.store import ZarrFeatureStore
from trak_lite.store._failpoints import FAILPOINTS

RECOVERY = "column_taken_back"


def acknowledged(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [int(line) for line in file]


def check_what_is_visible(path, acked):
    """A reader finds every acknowledged row done, and every committed chunk right."""
    try:
        ZarrFeatureStore.open(path)
    except MissingStoreError:
        assert not acked
        return
    if not ZarrFeatureStore.open(path).table_names():
        assert not acked
        return
    with reading(path) as table:
        assert table.done()[acked].all()
        for chunk in table.committed_chunks():
            rows = range(*table.chunk_range(chunk))
            for name, expected in values(rows).items():
                np.testing.assert_array_equal(table.read_chunk(chunk, name), expected)


@pytest.mark.parametrize("failpoint", [name for name in FAILPOINTS if name != RECOVERY])
def test_a_kill_at_any_step_loses_nothing(tmp_path, victims, failpoint):
    deaths = 0
    for count in itertools.count(1):
        path, done = str(tmp_path / f"{count}.zarr"), str(tmp_path / f"{count}.done")
        if not victims.killed(f"{failpoint}:{count}", "write", path, done, 3):
            break
        deaths += 1
        check_what_is_visible(path, acknowledged(done))
        finish(path)
    assert deaths >= 2
    check_all(path)


@pytest.mark.parametrize("second", FAILPOINTS[FAILPOINTS.index("columns_synced") :])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_kill_during_recovery_loses_nothing(tmp_path, victims, second, columns):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed(f"column_published:{columns}", "write", path, done, 11)
    victims.killed(second, "write", path, done, 11)

    check_what_is_visible(path, acknowledged(done))
    finish(path)


def test_recovery_from_a_half_visible_chunk_takes_columns_back(tmp_path, victims):
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    assert victims.killed("column_published:2", "write", path, done, 11)
    assert victims.killed(f"{RECOVERY}:2", "write", path, done, 11)
    finish(path)


@pytest.mark.parametrize("batch", [1, 4, 11])
def test_a_run_resumes_at_every_row(tmp_path, victims, batch):
    for row in range(11):
        path, done = str(tmp_path / f"{row}.zarr"), str(tmp_path / f"{row}.done")
        assert victims.killed(f"rows_recorded:{row + 1}", "write", path, done, 1)
        with reading(path) as table:
            assert table.pending().tolist() == list(range(row + 1, 11))
        finish(path, batch=batch)


def test_every_step_survives_a_kill_of_every_attempt(tmp_path, victims):
    """Killed at the n-th step again and again: each attempt gets further, the last one to the end."""
    path, done = str(tmp_path / "run.zarr"), str(tmp_path / "done")
    for attempt in itertools.count():
        if not victims.killed("column_written:5", "write", path, done, 2):
            break
        check_what_is_visible(path, acknowledged(done))
        assert attempt < 12
    check_all(path)
