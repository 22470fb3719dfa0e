"""Ranks are killed and other numbers of ranks go on; ``python -m benchmarks.scale_out kills`` does it for longer.

The agents are those of torchrun. They and their ranks are forked off a process that has imported torch.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import forkserver

from benchmarks.scaling import recorded_run
from benchmarks.scaling.killed_ranks import (
    Job,
    Round,
    Strike,
    Undisturbed,
    Violated,
    on_disk,
    undisturbed,
)

JOB = Job(sync=False)


def agent(world: int, folder: Path, job: Job, name: str) -> None:
    """Do what torchrun does; what it prints goes into a file beside the store."""
    with (folder / f"{name}.txt").open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)

    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.02,
        start_method="fork",
    )
    elastic_launch(config, forked_rank)(folder, job)


def forked_rank(folder: Path, job: Job) -> None:
    """Run as a rank that torchrun starts, which has no sockets of its agent.

    A rank that holds the agent's end of a connection open would never learn that the agent was killed.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
    recorded_run.run(folder, job)


class Forked:
    """An agent that is forked instead of started."""

    def __init__(self, world: int, folder: Path, job: Job, name: str) -> None:
        self._process = forkserver().Process(target=agent, args=(world, folder, job, name))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Undisturbed]:
    """The folder of one rank that nobody disturbs, and what it computed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, undisturbed(folder, JOB, Forked)


@pytest.mark.parametrize(
    ("strikes", "last_world"),
    [
        ([Strike(2, "rank", "featurize", 0.3), Strike(1, "rank", "featurize", 0.5)], 3),
        ([Strike(3, "host", "featurize", 0.6), Strike(4, "rank", "score", 0.1)], 1),
        ([Strike(1, "agent", "start", 0.5), Strike(2, "agent", "featurize", 0.4)], 4),
    ],
    ids=["ranks", "a host, and a rank that scores", "agents"],
)
def test_killed_ranks_lose_nothing_and_other_numbers_of_ranks_go_on(
    tmp_path: Path, finished: tuple[Path, Undisturbed], strikes: list[Strike], last_world: int
) -> None:
    """Bits of one process, a sound store, nothing computed twice but what killed ranks had in flight."""
    round_ = Round(tmp_path, JOB, finished[1], Forked, patience=2.0)

    round_.run(strikes, last_world)

    assert round_.counts["starts"] == 3
    assert round_.counts["kills"] + round_.counts["starts that ended before their kill"] == 2


class Copied:
    """In place of a start: the finished folder of another one, whose logs get the name of this one."""

    pid = 0

    def __init__(self, finished: Path) -> None:
        self._finished = finished

    def __call__(self, _: int, folder: Path, __: Job, name: str) -> Copied:
        (folder / recorded_run.LOGS).mkdir()
        for log in (self._finished / recorded_run.LOGS).iterdir():
            (folder / recorded_run.LOGS / f"{name}.1").write_bytes(log.read_bytes())
        (folder / recorded_run.STORE).symlink_to(self._finished / recorded_run.STORE)
        return self


WRONG: dict[str, dict[str, Any]] = {
    "rows of ckpt-1/features are wrong": {"name": "ckpt-1/features", "factor": 1 + 1e-7},
    "Scores are off": {"name": "scores/targets/scores", "factor": 1.001},
    "1 rows were computed twice": {"row": (1, 0)},
    r"s0 computed rows that were on disk: .*1.*20": {"before": (1, 20)},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_round_notices_wrong_numbers_and_rows_that_are_computed_again(
    tmp_path: Path, finished: tuple[Path, Undisturbed], said: str
) -> None:
    folder, found = finished
    wrong, expected = WRONG[said], dict(found.contents)
    if "name" in wrong:
        expected[wrong["name"]] = expected[wrong["name"]] * np.float32(wrong["factor"])
    round_ = Round(tmp_path, JOB, Undisturbed(expected, 1, 1), Copied(folder))
    name, _ = round_.start(1)
    assert on_disk(tmp_path, JOB).all()
    if "before" in wrong:
        round_.starts[name][wrong["before"]] = True
    again = np.array(wrong.get("row", (0, -1)), "<i4")  # the latter is no row
    (tmp_path / recorded_run.LOGS / f"{name}.2").write_bytes(again.tobytes())
    check = round_.compare if "name" in wrong else round_.count_rows
    with pytest.raises(Violated, match=said):
        check()
