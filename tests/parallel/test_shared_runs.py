"""Processes that featurize and score on one path at the same moment, with nothing between them but its files."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_cases as cases
import torch
from forked import forkserver
from rank_cases import BATCH, N, R, contents
from tiny_runs import labelled
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import ManifestMismatchError, MissingStoreError, StateError
from trak_lite.methods import EKFAC
from trak_lite.store import ZarrFeatureStore, check_store

ROWS = 2 * N  # of two checkpoints


class Started:
    """A process that does a job, forked off one that has imported torch and never ran it."""

    def __init__(self, job: Callable[..., Any], *arguments: Any) -> None:
        self._answers = forkserver().SimpleQueue()
        self._process = forkserver().Process(target=cases.answered, args=(self._answers, job, *arguments))
        self._process.start()
        self.pid: int = self._process.pid

    def end(self) -> Any:
        """Wait for the end; return the answer."""
        self._process.join(600)
        code = self._process.exitcode
        self.kill()  # one that waits for ever must not keep the others waiting
        assert code == 0
        return self._answers.get()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def all_ends(count: int, *arguments: Any) -> list[int]:
    """Return how many rows each of some processes wrote that featurize together."""
    started = [Started(cases.featurize_together, *arguments) for _ in range(count)]
    return [process.end() for process in started]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, np.ndarray]]:
    """What one process writes."""
    found: dict[int, dict[str, np.ndarray]] = {}

    def of(count: int) -> dict[str, np.ndarray]:
        if count not in found:
            path = tmp_path_factory.mktemp("alone") / "a.zarr"
            all_ends(1, str(path), count)
            found[count] = contents(path)
        return found[count]

    return of


def check_same(path: Path, expected: dict[str, np.ndarray]) -> None:
    found = contents(path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert check_store(path).findings == ()


def committed(path: Path, name: str) -> int:
    """Return the number of finished chunks of a table."""
    try:
        with ZarrFeatureStore.open(path) as store:
            return len(store.open_table(name).committed_chunks()) if name in store.table_names() else 0
    except MissingStoreError:
        return 0


def wait_for_rows(path: Path) -> None:
    """Wait until a row is stored, in a chunk that is not finished perhaps."""
    while True:
        try:
            with ZarrFeatureStore.open(path) as store:
                if "ckpt-0" in store.table_names() and store.open_table("ckpt-0").done().any():
                    return
        except MissingStoreError:
            pass
        time.sleep(0.002)


@pytest.mark.parametrize(("count", "workers"), [(2, 0), (3, 0), (2, 1)])
def test_processes_featurize_every_row_once_and_end_with_the_bits_of_one(
    tmp_path: Path, alone: Any, count: int, workers: int
) -> None:
    path = tmp_path / "a.zarr"
    written = all_ends(count, str(path), N, workers)

    assert sum(written) == ROWS
    check_same(path, alone(N))


def test_nobody_waits_at_the_end_of_a_checkpoint_while_there_are_others(tmp_path: Path, alone: Any) -> None:
    path, chunks = tmp_path / "a.zarr", N // R + 1
    slow = Started(cases.held_up, str(path), BATCH + 1)
    wait_for_rows(path)
    fast = Started(cases.held_up, str(path), N)
    while committed(path, "ckpt-1") < chunks:
        time.sleep(0.01)
    assert committed(path, "ckpt-0") < chunks, "its first chunk is held"
    slow.kill()

    assert fast.end() == ROWS - BATCH, "all but the batch that was put before"
    found, expected = contents(path), alone(N)
    of_weights = [expected[f"ckpt-{number}/features"].tobytes() for number in range(2)]
    assert {found[f"ckpt-{number}/features"].tobytes() for number in range(2)} == set(of_weights)


# ------------------------------------------------------------------------ what others do beside a call

TRAIN, TARGETS = labelled(40), labelled(4, seed=1)


def attributor(path: Path | str) -> Attributor:
    torch.manual_seed(0)
    return Attributor(torch.nn.Linear(4, 3), "image_classification", path, proj_dim=8, progress=False)


def states(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"weight": torch.full((3, 4), k + 1.0), "bias": torch.arange(3.0)} for k in range(number)]


def of_three(path: Path | str) -> Attributor:
    """An attributor with rows of three checkpoints, of which it computes those that are missing."""
    made = attributor(path)
    made.featurize(TRAIN, states(3))
    return made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A store with rows of three checkpoints, and the scores by all of them and without the second one."""
    path = tmp_path_factory.mktemp("three") / "a.zarr"
    of_three(path)
    both, left = (of_three(shutil.copytree(path, path.with_name(f"{n}.zarr"))) for n in range(2))
    left.drop_checkpoint("ckpt-1")
    return path, [made.score(TARGETS, "t").numpy() for made in (both, left)]


@pytest.mark.parametrize("moment", range(6))
def test_a_checkpoint_that_is_dropped_while_targets_are_scored_is_named(
    tmp_path: Path, three: tuple[Path, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    made = of_three(shutil.copytree(three[0], tmp_path / "a.zarr"))
    opened, calls = ZarrFeatureStore.open_table, count()

    def dropping(self: ZarrFeatureStore, path: str) -> Any:
        if path == "ckpt-1" and next(calls) == moment:
            monkeypatch.setattr(ZarrFeatureStore, "open_table", opened)
            attributor(tmp_path / "a.zarr").drop_checkpoint("ckpt-1")
        return opened(self, path)

    monkeypatch.setattr(ZarrFeatureStore, "open_table", dropping)
    try:
        found = made.score(TARGETS, "t").numpy()
    except StateError as error:
        assert "ckpt-1" in str(error) or "no features for 1" in str(error)  # noqa: PT017  (or the right scores)
        return
    assert any(np.allclose(found, scores, rtol=1e-3) for scores in three[1])


@pytest.mark.parametrize(("checkpoints", "dropped"), [(1, False), (2, False), (2, True)])
def test_whoever_waits_is_told_in_time_which_process_holds_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int, dropped: bool
) -> None:
    """And that the checkpoint is missing, if it is dropped meanwhile."""
    path, seconds, said = tmp_path / "a.zarr", {"now": 0.0}, []
    holder = Started(cases.held_up, str(path), BATCH)
    while not Path(f"{path}.held").exists():
        time.sleep(0.002)
    os.kill(holder.pid, signal.SIGSTOP)

    def pause(length: float) -> None:
        seconds["now"] += length
        if seconds["now"] > 320:  # it goes away at last
            holder.kill()
            with ZarrFeatureStore.open(path, mode="r+") as store:
                if dropped and "ckpt-0" in store.table_names():
                    store.drop_table("ckpt-0")

    def warned(_: Any, text: str, *given: Any) -> None:
        said.append((seconds["now"], text % given))

    train, weights = Rows(cases.data(N), name="data"), cases.states(cases.network(), checkpoints)
    missed = "is not in the store any more: another process has dropped it"
    cases.small_chunks()
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", pause)
        patched.setattr(time, "monotonic", lambda: seconds["now"])
        patched.setattr(logging.Logger, "warning", warned)
        with pytest.raises(StateError, match=missed) if dropped else nullcontext():
            cases.attributor(path).featurize(train, weights)
    cases.small_chunks(256)

    assert len(said) == 2, said
    for (moment, text), due in zip(said, (30, 300), strict=True):
        assert due <= moment < due + 2
        assert f"pid {holder.pid} on {socket.gethostname()}" in text
        assert "If that process was stopped or hangs, end it on its host (kill -9 and its pid)" in text
        assert "rows that it has written stay, and this process computes the rest" in text


# ------------------------------------------------------------------------ names


@pytest.mark.quick
def test_a_relative_path_stays_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = attributor("a.zarr")
    made.featurize(TRAIN)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")

    assert made.featurize(TRAIN).rows_written == 0
    assert made.score(TARGETS, "t").shape == (40, 4)
    assert list((tmp_path / "sub").iterdir()) == []


def test_settings_of_a_store_that_another_process_makes_meanwhile_are_compared(tmp_path: Path) -> None:
    tensors = torch.randn(40, 4), torch.arange(40) % 3
    model, path = torch.nn.Linear(4, 3), tmp_path / "a.zarr"
    others = [Attributor(model, "image_classification", path, proj_dim=8, seed=1, progress=False)]

    class Meanwhile(TensorDataset):
        def __getitem__(self, row: int) -> Any:
            if others:
                others.pop().featurize(Rows(TensorDataset(*tensors), name="same"))
            return super().__getitem__(row)

    with pytest.raises(ManifestMismatchError, match=r"projector\.seed is 1 there, 0 here"):
        attributor(tmp_path / "a.zarr").featurize(Rows(Meanwhile(*tensors), name="same"))


@pytest.mark.quick
def test_dampings_that_agree_in_six_digits_have_targets_of_their_own(tmp_path: Path) -> None:
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN)
    methods = [EKFAC(damping=damping) for damping in (0.1234566, 0.123457, 0.1234574, 1e20)]
    scores = [made.score(TARGETS, "t", method=method).numpy() for method in methods]

    folders = [path for path in (tmp_path / "a.zarr/preconditioned/t").iterdir() if path.is_dir()]
    assert len(folders) == len({array.tobytes() for array in scores}) == len(methods)


def test_processes_append_rows_together(tmp_path: Path, alone: Any) -> None:
    path = tmp_path / "a.zarr"
    all_ends(2, str(path))
    before = contents(path)["ckpt-0/features"]

    written = all_ends(3, str(path), N + R + 1)

    assert sum(written) == 2 * (R + 1)
    found, expected = contents(path), alone(N + R + 1)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-4, err_msg=name)
    np.testing.assert_array_equal(found["ckpt-0/features"][:N], before)
