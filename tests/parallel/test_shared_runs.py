"""Processes that featurize and score on one path at the same moment, with nothing between them but its files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import forkserver
from shared_run_cases import BATCH, N, R, answer, answer_held_up, contents, run

from trak_lite.errors import MissingStoreError, StateError
from trak_lite.featurizing import session as featurizing
from trak_lite.store import ZarrFeatureStore, _grid, check_store

ROWS = 2 * N  # of two checkpoints


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes are forked off one that has imported torch, and never run it."""
    return forkserver()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[np.ndarray]]:
    """What one process writes."""
    found = {}

    def of(count: int) -> list[np.ndarray]:
        if count not in found:
            path = str(tmp_path_factory.mktemp("alone") / "a.zarr")
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(os, "fsync", os.fsync)  # given back, with the constant, when this ends
                patched.setattr(_grid, "_FEWEST_ROWS_PER_COMMIT", R)
                run(path, count)
            found[count] = contents(path, count)
        return found[count]

    return of


def start(processes: ForkServerContext, count: int, *arguments: Any) -> tuple[Any, list[Any]]:
    answers = processes.SimpleQueue()
    started = [processes.Process(target=answer, args=(answers, *arguments)) for _ in range(count)]
    for process in started:
        process.start()
    return answers, started


def finish(answers: Any, started: list[Any]) -> list[int]:
    for process in started:
        process.join(600)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()  # one that waits for ever must not keep the others waiting
    assert codes == [0] * len(started)
    return [answers.get() for _ in started]


def check_same(path: Path, expected: list[np.ndarray], count: int = N) -> None:
    found = contents(path, count)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert check_store(path).findings == ()


@pytest.mark.parametrize(("count", "workers"), [(2, 0), (3, 0), (2, 1)])
def test_processes_featurize_every_row_once_and_end_with_the_bits_of_one(
    tmp_path: Path, processes: ForkServerContext, alone: Any, count: int, workers: int
) -> None:
    path = tmp_path / "a.zarr"
    written = finish(*start(processes, count, str(path), N, workers))

    assert sum(written) == ROWS
    check_same(path, alone(N))


def test_after_a_kill_another_number_of_processes_goes_on(
    tmp_path: Path, processes: ForkServerContext, alone: Any
) -> None:
    path = tmp_path / "a.zarr"
    _, started = start(processes, 2, str(path))
    while not _done(path):
        time.sleep(0.002)
    os.kill(started[0].pid, signal.SIGKILL)  # the other one takes over
    started[1].join(600)
    started[1].kill()
    assert started[1].exitcode == 0
    check_same(path, alone(N))


def test_nobody_waits_at_the_end_of_a_checkpoint_while_there_are_others(
    tmp_path: Path, processes: ForkServerContext, alone: Any
) -> None:
    path, answers = tmp_path / "a.zarr", processes.SimpleQueue()
    slow, fast = (
        processes.Process(target=answer_held_up, args=(answers, str(path), row)) for row in (BATCH + 1, N)
    )
    slow.start()
    while not _done(path):
        time.sleep(0.01)
    fast.start()
    while _committed(path, "ckpt-1") < N // R + 1:
        time.sleep(0.01)
    assert _committed(path, "ckpt-0") < N // R + 1, "its first chunk is held"
    os.kill(slow.pid, signal.SIGKILL)
    fast.join(600)
    fast.kill()

    assert fast.exitcode == 0
    assert answers.get() == ROWS - BATCH, "all but the batch that was put before"
    with ZarrFeatureStore.open(path) as store:
        for model_id in (0, 1):
            found = store.open_table(f"ckpt-{model_id}").read("features")
            assert any(np.array_equal(found, values) for values in alone(N))


def test_a_checkpoint_that_is_dropped_meanwhile_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fill = str(tmp_path / "a.zarr"), featurizing.featurize_rows

    def filled_and_dropped(*given: Any, **named: Any) -> int:
        written = fill(*given, **named)
        with ZarrFeatureStore.open(path, mode="r+") as store:
            store.drop_table("ckpt-0")
        return written

    monkeypatch.setattr(featurizing, "featurize_rows", filled_and_dropped)
    monkeypatch.setattr(os, "fsync", os.fsync)  # given back, with the constant, when this ends
    monkeypatch.setattr(_grid, "_FEWEST_ROWS_PER_COMMIT", R)
    with pytest.raises(StateError, match="is not in the store any more: another process has dropped it"):
        run(path)


def _committed(path: Path, name: str) -> int:
    with ZarrFeatureStore.open(path) as store:
        return len(store.open_table(name).committed_chunks()) if name in store.table_names() else 0


def test_processes_append_rows_together(tmp_path: Path, processes: ForkServerContext, alone: Any) -> None:
    path = tmp_path / "a.zarr"
    finish(*start(processes, 2, str(path)))
    before = contents(path, N)

    written = finish(*start(processes, 3, str(path), N + R + 1))

    assert sum(written) == 2 * (R + 1)
    for mine, theirs in zip(contents(path, N + R + 1), alone(N + R + 1), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)
    with ZarrFeatureStore.open(path) as store:
        np.testing.assert_array_equal(store.open_table("ckpt-0").read("features")[:N], before[0])


def _done(path: Path) -> bool:
    try:
        with ZarrFeatureStore.open(path) as store:
            return "ckpt-0" in store.table_names() and store.open_table("ckpt-0").done().any()
    except MissingStoreError:
        return False
