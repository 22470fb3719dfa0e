"""Several processes divide the blocks of a replay; no block is computed twice."""

import time

import numpy as np
import pytest
import torch
from forked import forkserver
from unrolled_cases import TARGETS, Dicts, dict_margin, margin, recipe, replayed, targets, vectors

from trak_lite import Rows
from trak_lite.unrolled import TrainingRun, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


class Meeting(Dicts):
    """Targets that are loaded once for their outputs, and once more by whoever replays their block."""

    def __init__(self, meet):
        super().__init__(*vectors(TARGETS, 1))
        self.meet = meet

    def __getitem__(self, index):
        if self.loads == TARGETS:
            self.meet()
        return super().__getitem__(index)


def scores_of(path, data, block):
    return unrolled(recipe().train(path), Rows(data, name="t"), dict_margin, block=block).numpy()


def beside_another(path, barrier, results):
    """Replay with others, which meet in the first block of each; report the targets that were replayed here."""
    torch.set_num_threads(1)
    data = Meeting(lambda: barrier.wait(100))
    scores = scores_of(path, data, 1)
    results.put((data.loads - TARGETS, scores.tobytes()))


def test_processes_divide_the_blocks(tmp_path):
    run = recipe().train(tmp_path / "run")
    run.metasmoothness()
    context = forkserver()
    barrier, results = context.Barrier(2), context.Queue()
    arguments = str(run.path), barrier, results
    processes = [context.Process(target=beside_another, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in processes]
    for process in processes:
        process.join()
    expected = replayed(recipe().train(), block=1)
    assert [scores for _, scores in found] == [expected.tobytes()] * 2
    counts = [count for count, _ in found]
    assert (sum(counts), min(counts) >= 1) == (TARGETS, True), counts
    assert not list((run.path / "replays").glob("*"))


def held(path, ready, leave):

    def hold():
        ready.set()
        leave.wait()

    scores_of(path, Meeting(hold), 2)


def test_a_block_of_a_process_that_ends_is_taken_over(tmp_path, caplog, monkeypatch):
    recipe().train(tmp_path / "run").metasmoothness()
    context = forkserver()
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=held, args=(str(tmp_path / "run"), ready, leave))
    process.start()
    assert ready.wait(100)

    def wait(seconds):
        process.kill()
        process.join()

    monkeypatch.setattr(time, "sleep", wait)
    with caplog.at_level("INFO"):
        found = scores_of(tmp_path / "run", Dicts(*vectors(TARGETS, 1)), 1)
    assert "Another process replays blocks of 2 targets" in caplog.text
    assert process.exitcode is not None, "it was waited for"
    np.testing.assert_array_equal(found, replayed(recipe().train(), block=2))


@pytest.mark.parametrize(
    ("ranks", "block", "expected"), [(1, None, 1), (2, None, 2), (3, None, 2), (9, None, 4), (3, 3, 2)]
)
def test_ranks_of_torchrun_divide_the_targets(monkeypatch, ranks, block, expected):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    made, steps, step = recipe(train_id="nothing is repeated").train(interval=3), [], TrainingRun.step
    monkeypatch.setattr(TrainingRun, "step", lambda run, *args: steps.append(args[1]) or step(run, *args))
    for launched in (False, True):
        if launched:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        steps.clear()
        unrolled(made, targets(), margin, block=block)
        # every block goes forward from the first state
        assert steps.count(1) == (expected if launched or block else 1)
