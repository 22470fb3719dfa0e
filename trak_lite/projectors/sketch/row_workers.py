"""Runs a function on slices of rows, in threads that use one core each.

Each operation of a sketch is short, and OpenMP splits it over its threads. With two threads on two cores that other
processes used as well, row workers took 1.7 to 2.2 times less wall time for factors of 64 positions (1.8 to 2.6 times
less CPU time) and 1.5 to 1.9 times less for dense vectors, and the same time for dense matrices. Blocks that one thread
sketches in about a millisecond (factors of one position) took longer. The figures, for three instruction sets, are in
``benchmarks/results/row_workers.json``, made by ``benchmarks/row_workers.py``.
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
"""Smallest number of rows of a slice; with fewer, the overhead of calls exceeds the gain of another core."""


@final
class RowWorkers:
    """Runs a function on slices of rows, in at most ``torch.get_num_threads()`` threads. Not thread-safe."""

    def __init__(self) -> None:
        """Start without threads."""
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0
        self._process = os.getpid()
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[RowWorkers], tuple[()]]:
        """Copy and pickle without threads and scratch memory."""
        return RowWorkers, ()

    def run(self, count: int, function: Callable[[slice, Scratch], _T]) -> list[_T]:
        """Return ``function(rows, scratch)`` for slices that cover ``count`` rows, in order.

        An exception of the function is raised after all slices have ended; with several, that of the first slice.
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
        if (
            self._pool is not None and self._process == os.getpid()
        ):  # a forked process does not have the threads
            self._pool.shutdown()
        self._pool, self._size, self._local = None, 0, threading.local()

    def _threads(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._size < count or self._process != os.getpid():
            self.clear()
            self._pool, self._size, self._process = _single_core_threads(count), count, os.getpid()
        return self._pool

    def _call(self, function: Callable[[slice, Scratch], _T], rows: slice) -> _T:
        with torch.no_grad():  # the grad mode is per thread
            return function(rows, self._workspace())

    def _workspace(self) -> Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        return scratch


def _single_core_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of started threads, each set to use one core."""
    own = torch.get_num_threads()
    started = threading.Barrier(count)
    pool = ThreadPoolExecutor(count, thread_name_prefix="sketch")
    try:
        for ready in [pool.submit(_use_one_core, started) for _ in range(count)]:
            ready.result()
    finally:
        started.abort()  # if a thread could not be started, the others must not wait for it
        torch.set_num_threads(own)  # the workers change the default of threads that start later
    return pool


def _use_one_core(started: threading.Barrier) -> None:
    torch.get_num_threads()  # without this call, the first operation of a thread resets its number to the caller's
    torch.set_num_threads(1)
    started.wait()  # every thread of the pool must run this function
