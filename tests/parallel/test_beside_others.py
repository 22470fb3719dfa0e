"""What other processes do beside a call: hold rows for long, drop checkpoints; and what a path or a name stands for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import StateError
from trak_lite.methods import EKFAC
from trak_lite.parallel.sharing import Patience, SharedRows
from trak_lite.run.tables import target_folder
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore

pytestmark = pytest.mark.quick

N, M = 40, 4


def dataset(rows: int, seed: int) -> TensorDataset:
    generator = np.random.default_rng(seed)
    inputs = torch.from_numpy(generator.normal(size=(rows, 4)).astype(np.float32))
    return TensorDataset(inputs, torch.from_numpy(generator.integers(3, size=rows)))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)


def attributor(path: Path | str) -> Attributor:
    torch.manual_seed(0)
    return Attributor(nn.Linear(4, 3), "image_classification", path, proj_dim=8, progress=False)


def states(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"weight": torch.full((3, 4), k + 1.0), "bias": torch.arange(3.0)} for k in range(number)]


# ------------------------------------------------------------------------ waiting


def test_a_long_wait_is_said_once_after_30_seconds_and_again_ten_times_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = {"now": 0.0}
    asked: list[float] = []

    def holder() -> str:
        asked.append(seconds["now"])
        return "pid 7 on host a holds them."

    patience = Patience(
        sleep=lambda pause: seconds.update(now=seconds["now"] + pause), clock=lambda: seconds["now"]
    )
    while seconds["now"] < 320:
        patience.wait("for rows", holder)

    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "waiting for rows for 3" in said[0]
    assert "pid 7 on host a holds them. If that process was stopped or hangs, end it" in said[0]
    assert "rows that it has written stay, and this process computes the rest" in said[0]
    assert 30 <= asked[-2] < 32
    assert 300 <= asked[-1] < 302


def test_whoever_waits_for_rows_of_another_process_names_its_host_and_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = TableSpec(4, (Column("q", None, "float32"),), chunk_rows=4)
    path = str(tmp_path / "a.zarr")
    with ZarrFeatureStore.create(path, Manifest({})) as store:
        store.create_table("ckpt-0", spec)
    holder = hold(path)
    name = next(holder)
    seconds = {"now": 0.0}

    def pause(length: float) -> None:
        seconds["now"] += length
        if seconds["now"] > 60:
            next(holder, None)  # it goes away at last

    with ZarrFeatureStore.open(path, "r+") as store:
        table = store.open_table("ckpt-0")
        work = SharedRows(table, 4, label="rows", progress=False, pause=pause, clock=lambda: seconds["now"])
        with work:
            for batches in work.rounds():
                for rows in batches:
                    work.put(rows, {"q": np.ones(len(rows))})
        assert table.complete

    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert name in said[0]
    assert "kill -9" in said[0]


def hold(path: str) -> Iterator[str]:
    """Hold the first chunk of a table in a process of its own; yield its name, and end it when asked again."""
    import os
    import signal
    import socket

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with ZarrFeatureStore.open(path, "r+") as store, store.open_table("ckpt-0").claim(0):
            os.write(writing, b"held")
            signal.pause()
        os._exit(1)
    os.read(reading, 4)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield f"pid {pid} on {socket.gethostname()}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ------------------------------------------------------------------------ dropping


@pytest.mark.parametrize("moment", range(6))
def test_a_checkpoint_that_is_dropped_while_targets_are_scored_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN, states(3))
    opened = ZarrFeatureStore.open_table
    calls = count()

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
    left = attributor(tmp_path / "b.zarr")
    left.featurize(TRAIN, states(3))
    left.drop_checkpoint("ckpt-1")
    both = attributor(tmp_path / "c.zarr")
    both.featurize(TRAIN, states(3))
    assert any(np.allclose(found, other.score(TARGETS, "t").numpy(), rtol=1e-3) for other in (left, both))


# ------------------------------------------------------------------------ names


def test_a_relative_path_stays_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = attributor("a.zarr")
    made.featurize(TRAIN)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")

    assert made.featurize(TRAIN).rows_written == 0
    assert made.score(TARGETS, "t").shape == (N, M)
    assert list((tmp_path / "sub").iterdir()) == []


def test_dampings_that_agree_in_six_digits_have_targets_of_their_own(tmp_path: Path) -> None:
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN)
    methods = [EKFAC(damping=damping) for damping in (0.1234567, 0.12345674, 0.123457, 1e20)]
    scores = [made.score(TARGETS, "t", method=method).numpy() for method in methods]

    folders = {target_folder("t", method) for method in methods}
    found = [path for path in (tmp_path / "a.zarr/preconditioned/t").iterdir() if path.is_dir()]
    assert {f"preconditioned/t/{path.name}" for path in found} == folders
    assert len(folders) == len({array.tobytes() for array in scores}) == len(methods)
