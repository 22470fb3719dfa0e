"""Several processes divide the blocks of a replay; no block is computed twice."""

import time

import numpy as np
import pytest
import torch
from forked import forkserver
from unrolled_cases import margin, recipe, targets

from trak_lite.data.datasets import rows_of
from trak_lite.modelout_functions import resolve_task
from trak_lite.parallel.ranks import num_ranks
from trak_lite.parallel.sharing import Patience
from trak_lite.unrolled import TrainingRun, replay, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


def replayed(path, block, barrier, results):
    """Replay with others, slowly; report the blocks that were computed here, and the scores."""
    torch.set_num_threads(1)
    run = recipe().train(path)
    adjoint, calls = replay._Replay._adjoint, []

    def slow(self, number, *given):
        time.sleep(0.02)
        calls.append(number)
        return adjoint(self, number, *given)

    prepared = replay._Replay.progress

    def waiting(self, blocks):
        barrier.wait()
        calls.clear()  # those that memory is measured with
        return prepared(self, blocks)

    replay._Replay._adjoint, replay._Replay.progress = slow, waiting
    scores = unrolled(run, targets(), margin, block=block).numpy()
    results.put((len(calls), scores.tobytes()))


@pytest.mark.parametrize("block", [1, 2])
def test_processes_divide_the_blocks(tmp_path, block):
    run = recipe().train(tmp_path / "run")
    run.metasmoothness()
    context = forkserver()
    barrier, results = context.Barrier(2), context.Queue()
    given = (str(run.path), block, barrier, results)
    processes = [context.Process(target=replayed, args=given) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in processes]
    for process in processes:
        process.join()

    expected = unrolled(recipe().train(), targets(), margin, block=block).numpy()
    assert [scores for _, scores in found] == [expected.tobytes()] * 2
    steps = [count for count, _ in found]
    assert sum(steps) == 4 // block * run.num_steps
    assert min(steps) >= run.num_steps
    assert not list((run.path / "replays").glob("*"))


def held(path, ready, leave):
    """Hold the first block until another process is done with the others."""
    run = recipe().train(path)
    adjoint = replay._Replay._adjoint

    def stops(self, number, *given):
        found = adjoint(self, number, *given)
        if given[2] is not None:  # no measurement
            ready.set()
            leave.wait()
        return found

    replay._Replay._adjoint = stops
    unrolled(run, targets(), margin, block=2)


def test_a_block_of_a_process_that_ends_is_taken_over(tmp_path, caplog):
    run = recipe().train(tmp_path / "run")
    context = forkserver()
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=held, args=(str(run.path), ready, leave))
    process.start()
    assert ready.wait(100)
    waits = Patience.wait

    def wait(self, *given):
        process.kill()
        process.join()
        waits(self, *given)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(Patience, "wait", wait)
        found = unrolled(run, targets(), margin, block=1).numpy()

    assert "Another process replays blocks of 2 targets" in caplog.text
    expected = unrolled(recipe().train(), targets(), margin, block=2).numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_ranks_divide_the_targets(monkeypatch, ranks, expected):
    monkeypatch.setattr(replay, "num_ranks", lambda: ranks)
    run: TrainingRun = recipe().train()
    made = replay._Replay(
        run, resolve_task(margin), rows_of(targets(), what="targets"), max_bytes=1 << 30, progress=False
    )
    assert made.size(None) == expected
    assert made.size(3) == 3


def test_the_number_of_ranks_is_that_of_torchrun(monkeypatch):
    assert num_ranks() == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert num_ranks() == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert num_ranks() == 3
