"""RowWorkers: slices of rows on threads of one core each, which leave the caller's settings alone."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from projection_cases import set_threads

from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors.sketch.row_workers import RowWorkers

threads = pytest.fixture(set_threads)


@pytest.fixture
def workers():
    made = RowWorkers()
    yield made
    made.clear()


@pytest.fixture
def workers_alive():
    """Counts threads of row workers that a test has started and that have not ended."""
    before = set(threading.enumerate())
    return lambda: sum(
        thread.name.startswith("sketch") for thread in threading.enumerate() if thread not in before
    )


class OwnError(Exception):
    """Raised by the function that is run."""


@pytest.mark.parametrize("count", [0, 1, 7, 8, 16, 23, 24, 25, 100])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_slices_cover_all_rows_in_order(workers, threads, number, count):
    threads(number)
    slices = workers.run(count, lambda rows, _: rows)

    assert [row for rows in slices for row in range(rows.start, rows.stop)] == list(range(count))
    assert len(slices) == max(1, min(number, count // 8))


def test_results_are_in_the_order_of_the_rows_whichever_comes_first(workers, threads):
    threads(2)
    second_is_done = threading.Event()

    def function(rows: slice, _) -> int:
        if rows.start:
            second_is_done.set()
        else:
            assert second_is_done.wait(30)
        return rows.start

    assert workers.run(32, function) == [0, 16]


def test_a_single_slice_runs_in_the_thread_of_the_caller(workers, threads, workers_alive):
    threads(1)
    assert workers.run(100, lambda *_: threading.current_thread()) == [threading.current_thread()]
    threads(2)
    assert workers.run(15, lambda *_: threading.current_thread()) == [threading.current_thread()]
    assert workers_alive() == 0


def test_every_worker_uses_one_core_and_the_caller_as_many_as_before(workers, threads):
    threads(3)

    assert workers.run(60, lambda *_: torch.get_num_threads()) == [1, 1, 1]
    assert torch.get_num_threads() == 3
    assert ThreadPoolExecutor(1).submit(torch.get_num_threads).result() == 3  # a thread that starts later


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("enabled", [True, False])
def test_no_graph_is_made_and_the_callers_mode_stays(workers, threads, number, enabled):
    threads(number)
    with torch.set_grad_enabled(enabled):
        assert not any(workers.run(40, lambda *_: torch.is_grad_enabled()))
        assert torch.is_grad_enabled() == enabled


@pytest.mark.parametrize("number", [1, 3])
def test_an_exception_comes_out_when_every_slice_has_ended(workers, threads, number):
    threads(number)
    ended = []

    def function(rows: slice, _) -> None:
        if rows.start == 0:
            raise OwnError
        ended.append(rows.start)

    with pytest.raises(OwnError):
        workers.run(48, function)
    assert len(ended) == number - 1
    assert len(workers.run(48, lambda *_: None)) == number


def test_of_several_exceptions_the_first_slices_comes_out(workers, threads):
    threads(2)

    def function(rows: slice, _) -> None:
        raise OwnError(rows.start)

    with pytest.raises(OwnError, match="0"):
        workers.run(48, function)


def test_every_thread_keeps_its_own_scratch_memory(workers, threads):
    threads(2)
    together = threading.Barrier(2)

    def function(_, workspace) -> int:
        together.wait(30)  # so that each thread takes one slice
        return workspace.get("some", (3,), torch.float32, torch.device("cpu")).data_ptr()

    first, second = workers.run(16, function), workers.run(16, function)
    assert len(set(first)) == 2
    assert set(first) == set(second)


def test_more_threads_are_started_when_torch_may_use_more(workers, threads, workers_alive):
    for number, alive in ((2, 2), (3, 3), (2, 3)):
        threads(number)
        assert len(workers.run(60, lambda *_: None)) == number
        assert workers_alive() == alive


def test_threads_end_when_they_are_dropped_and_start_again(workers, threads, workers_alive):
    threads(2)
    for _ in range(2):
        workers.run(16, lambda *_: None)
        assert workers_alive() == 2
        workers.clear()
        assert workers_alive() == 0


def test_a_projector_that_is_freed_has_no_threads(threads, workers_alive):
    threads(2)
    projector = CountSketchProjector(8)
    projector.project(torch.ones(16, 20), 0)
    assert workers_alive() == 2

    projector.free_memory()
    assert workers_alive() == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_has_threads_of_its_own(workers, threads, copied):
    threads(2)
    workers.run(16, lambda *_: None)
    other = copied(workers)
    workers.clear()

    assert other.run(16, lambda rows, _: rows.start) == [0, 8]
    other.clear()


def test_a_thread_that_cannot_be_started_leaves_nothing_waiting(workers, threads, monkeypatch):
    threads(3)
    numbers, start = itertools.count(), threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if next(numbers) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.run(60, lambda *_: None)

    assert torch.get_num_threads() == 3
    assert len(workers.run(60, lambda *_: None)) == 3


def _project_in_child(projector: CountSketchProjector, grads: torch.Tensor, answers) -> None:
    torch.set_num_threads(2)
    features = projector.project(grads, 0)
    projector.free_memory()
    answers.put(features.tolist())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own(threads, workers_alive):
    """Those of the parent do not exist there: work given to them would never be done."""
    threads(2)
    projector, grads = CountSketchProjector(8), torch.arange(400.0).view(20, 20)
    features = projector.project(grads, 0)
    assert workers_alive() == 2

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_project_in_child, args=(projector, grads, answers))
    child.start()
    child.join(60)
    try:
        assert child.exitcode == 0
        assert answers.get() == features.tolist()
    finally:
        child.kill()
    assert torch.equal(projector.project(grads, 0), features)
    projector.free_memory()


def test_two_projectors_at_once_do_not_disturb_each_other(threads):
    threads(2)
    grads = torch.randn(40, 30, 70, generator=torch.Generator().manual_seed(0))
    expected = [CountSketchProjector(32, seed=seed).project({"w": grads}, 0) for seed in range(2)]

    def repeatedly(seed: int) -> list[torch.Tensor]:
        projector = CountSketchProjector(32, seed=seed)
        found = [projector.project({"w": grads}, 0) for _ in range(20)]
        projector.free_memory()
        return found

    with ThreadPoolExecutor(2) as callers:
        for features, found in zip(expected, callers.map(repeatedly, range(2)), strict=True):
            assert all(torch.equal(features, one) for one in found)
    assert torch.get_num_threads() == 2
