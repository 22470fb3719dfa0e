"""Rows of a batch, sliced over threads that each run on one core.

A sketch is many short operations. Split within each operation over two OpenMP threads, one of which the system has
put aside, they take up to a hundred times longer; split over rows, each thread works on its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar, final

import torch

from trak_lite.projectors._scratch import Scratch

__all__ = ["RowWorkers"]

_T = TypeVar("_T")
_FEWEST_ROWS = 8
"""Rows below which a slice costs more in calls than the other core gives back."""


@final
class RowWorkers:
    """Runs a function on slices of rows, on as many threads as torch may use. Not for several callers at once."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0
        self._process = os.getpid()
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[RowWorkers], tuple[()]]:
        """Copy as new: threads and scratch memory do not travel."""
        return RowWorkers, ()

    def run(self, count: int, function: Callable[[slice, Scratch], _T]) -> list[_T]:
        """Return ``function(rows, scratch)`` for slices that cover ``count`` rows, in order.

        An exception of the function is raised when all slices have come to an end, that of the first slice first.
        """
        threads = min(torch.get_num_threads(), count // _FEWEST_ROWS)
        if threads <= 1:
            return [self._call(function, slice(0, count))]
        bounds = [count * part // threads for part in range(threads + 1)]
        slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        pool = self._threads(threads)
        futures = [pool.submit(self._call, function, rows) for rows in slices]
        wait(futures)
        return [future.result() for future in futures]

    def clear(self) -> None:
        """Drop threads and scratch memory."""
        if self._pool is not None and self._process == os.getpid():  # a fork has no threads that could end
            self._pool.shutdown()
        self._pool, self._size, self._local = None, 0, threading.local()

    def _threads(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._size < count or self._process != os.getpid():
            self.clear()
            self._pool, self._size, self._process = _single_core_threads(count), count, os.getpid()
        return self._pool

    def _call(self, function: Callable[[slice, Scratch], _T], rows: slice) -> _T:
        with torch.no_grad():  # the mode is each thread's own
            return function(rows, self._workspace())

    def _workspace(self) -> Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        return scratch


def _single_core_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads that have all been started and told to use one core each."""
    own = torch.get_num_threads()
    started = threading.Barrier(count)
    pool = ThreadPoolExecutor(count, thread_name_prefix="sketch")
    try:
        for ready in [pool.submit(_use_one_core, started) for _ in range(count)]:
            ready.result()
    finally:
        started.abort()  # if one could not be started, the others do not wait for it
        torch.set_num_threads(own)  # what the workers set is what threads that start later would begin with
    return pool


def _use_one_core(started: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread that never asked takes the caller's number at its first operation
    torch.set_num_threads(1)
    started.wait()  # so that every thread of the pool comes by here
