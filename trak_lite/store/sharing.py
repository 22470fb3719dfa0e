"""Fill one table from several processes: each process claims whole chunks and skips chunks that others hold.

Processes do not communicate. The lock of a chunk names its writer, the commit of a chunk marks it as done, and the
lock of a dead process is free. This works for shells, SLURM arrays and machines with a common disk, and their number
may change.

Shapes: N rows of a table.
"""

from __future__ import annotations

import logging
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.progress import KeptProgress
from trak_lite.core.ranks import Ranks
from trak_lite.errors import BusyError, HeldHereError, StateError
from trak_lite.store import AbstractRowTable, TableSpec

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds
_LOOK_EVERY = 0.5  # seconds
_LONGEST_FOLLOWING = 30.0  # seconds
_SAID_AFTER = 30.0  # seconds
_SAID_AGAIN_AFTER = 10  # times as long


def plan_batches(pending: NDArray[np.int64], chunk_rows: int, rows_per_batch: int) -> list[NDArray[np.int64]]:
    """Group pending rows into batches on a fixed grid.

    The grid restarts at every chunk. A batch is therefore written by one record. A resumed run, or several processes,
    compute the same batches as one uninterrupted run, so the features agree bitwise.
    """
    if not len(pending):
        return []
    cells = (pending // chunk_rows) * chunk_rows + (pending % chunk_rows) // rows_per_batch
    return np.split(pending, np.flatnonzero(np.diff(cells)) + 1)


def pauses() -> Iterator[float]:
    """Yield the pause before each poll of other processes, in seconds: from 0.02, growing to 1."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE)


@final
class Patience:
    """Waits for other processes with growing pauses, and warns when the wait is long.

    A process that was stopped, or hangs on a dead device, holds its lock forever. It cannot be detected
    automatically, so the warning asks the user to end it.
    """

    def __init__(self, sleep: Callable[[float], None] | None = None) -> None:
        """Start a wait; ``sleep`` sleeps for some seconds, ``None`` is ``time.sleep``."""
        self._sleep = time.sleep if sleep is None else sleep
        self.reset()

    def reset(self) -> None:
        """Restart the pauses and the warning timer, because other processes have made progress."""
        self._pauses = pauses()
        self._began: float | None = None
        self._said_next = _SAID_AFTER

    def wait(self, purpose: str, holder: Callable[[], str]) -> None:
        """Sleep for the next pause; log what is waited for, and the holder, as in a ``BusyError``, if due."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
            logger.info("Waiting %s: %s", purpose, holder())
        elif now - self._began >= self._said_next:
            self._said_next *= _SAID_AGAIN_AFTER
            logger.warning(
                "Has been waiting %s for %.0f s: %s If that process was stopped or hangs, end it on its host "
                "(kill -9 and its pid): rows that it has written stay, and this process computes the rest.",
                purpose,
                now - self._began,
                holder(),
            )
        self._sleep(next(self._pauses))


def has_free_rows(table: AbstractRowTable) -> bool:
    """Return whether a table has uncommitted rows in a chunk that no process holds."""
    return not table.complete and holder_of(table) is None


def holder_of(table: AbstractRowTable) -> str | None:
    """Return the holder of the first uncommitted chunk of a table; ``None`` unless all of them are held."""
    holder, committed = None, {*table.committed_chunks()}
    for chunk in (chunk for chunk in range(table.num_chunks) if chunk not in committed):
        try:
            with table.claim(chunk):
                return None
        except BusyError as error:
            holder = holder or str(error)
    return holder


@dataclass(eq=False)
class LazyTable:
    """A table that is created when its first rows are put."""

    spec: TableSpec
    """Shape and fingerprint; those of an existing table are the same."""
    table: AbstractRowTable | None
    """The table, or ``None`` before its creation."""
    create: Callable[[], AbstractRowTable]
    find: Callable[[], AbstractRowTable | None] = lambda: None
    """Opens the table if another process has created it."""

    def look(self) -> bool:
        """Return whether the table exists; open it if another process has created it."""
        if self.table is None:
            self.table = self.find()
        return self.table is not None

    def pending(self) -> NDArray[np.int64]:
        """Return the pending rows, ascending."""
        return np.arange(self.spec.num_rows) if self.table is None else self.table.pending()

    def pending_by_chunk(self) -> NDArray[np.int64]:
        """Return the number of pending rows of every chunk."""
        if self.table is not None:
            return self.table.pending_by_chunk()
        starts = np.arange(0, self.spec.num_rows, self.spec.chunk_rows)
        return np.diff(starts, append=self.spec.num_rows)

    def committed_chunks(self) -> list[int]:
        """Return the chunks that are complete and readable, ascending."""
        return [] if self.table is None else self.table.committed_chunks()

    def has_column(self, name: str) -> bool:
        """Return whether the table has a column of this name."""
        return any(column.name == name for column in self.spec.columns)

    def claim(self, chunk: int) -> AbstractContextManager[NDArray[np.int64]]:
        """Claim a chunk of the table, which is created if it does not exist."""
        return self.created().claim(chunk)

    def put(self, rows: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Write rows to the table, which is created if it does not exist."""
        self.created().put(rows, values)

    def created(self) -> AbstractRowTable:
        """Return the table; create it if it does not exist."""
        if self.table is None:
            self.table = self.create()
        return self.table


@final
class SharedRows:
    """The pending rows of a table that this process computes: those of chunks that no other process holds.

    A process starts with the first chunk. If a chunk is held by another process, it continues at a random chunk, so
    that processes spread out over the table.
    """

    def __init__(
        self,
        table: AbstractRowTable | LazyTable,
        rows_per_batch: int,
        *,
        label: str,
        progress: bool | None,
        ranks: Ranks | None = None,
        pause: Callable[[float], None] | None = None,
        unit: str = "row",
    ) -> None:
        """Determine the pending rows.

        The batches are those of a grid of ``rows_per_batch``. The progress bar counts the finished ``unit`` of all
        processes. The failures of ``ranks`` that fill the table are checked while rows are put and while waiting; the
        first of them to arrive creates a table that does not exist. ``pause`` sleeps for some seconds while other
        processes hold all remaining chunks; ``None`` is ``time.sleep``.
        """
        self._ranks = Ranks() if ranks is None else ranks
        self._label = label
        self._pause = time.sleep if pause is None else pause
        self._patience = Patience(self._pause)
        self._busy: BusyError | None = None
        """The error of the last claim that failed; names the holder."""
        self.spec = table.spec
        self.written = 0
        """Number of rows that this process put."""
        self._table = table
        self._rows_per_batch = rows_per_batch
        left = table.pending_by_chunk()
        self.pending_at_first = int(left.sum())
        """Number of pending rows when this object was created."""
        committed = set(table.committed_chunks())
        self._left = {chunk: int(rows) for chunk, rows in enumerate(left) if chunk not in committed}
        """Uncommitted chunks, and their last known numbers of pending rows."""
        self._claims = ExitStack()
        self._claimed: set[int] = set()
        self._put: dict[int, int] = {}
        """Number of rows put in this round, by chunk."""
        self._next = 0
        self._looked = time.monotonic()
        self._done = KeptProgress(
            self.spec.num_rows,
            self.spec.num_rows - self.pending_at_first,
            label=label,
            unit=unit,
            progress=progress,
        )

    def rounds(self, *, wait: bool = True) -> Iterator[Iterable[NDArray[np.int64]]]:
        """Yield the batches ``(b,)`` of rows to compute and put, in rounds, until every row of the table is committed.

        Drawing a batch claims its chunk; a data loader may draw batches before they are computed. A round ends when
        other processes hold all remaining chunks; all of its batches must be put before the next round. This process
        waits for the others only between rounds, when it holds no chunk, so processes cannot deadlock. Without
        ``wait``, the rounds end there.
        """
        if isinstance(self._table, LazyTable) and not self._follow(self._table):
            yield [np.arange(min(self._rows_per_batch, self.spec.chunk_rows, self.spec.num_rows))]
            self._give_up()
        while self._look():
            pending = self._claim_next()
            if pending is None and not wait:
                break
            if pending is None:
                self._wait()
                continue
            self._done.say("")
            yield self._batches(pending)
            self._give_up()
            self._patience.reset()
        self._done.say("")

    def put(self, rows: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Put a batch of the current round.

        The first batch of a table is computed before the table exists, so its chunk cannot be claimed in advance. If
        another process has written these rows first, the batch is discarded. Rows of a chunk of an object store that
        another machine has committed are discarded as well.
        """
        chunk = int(rows[0]) // self.spec.chunk_rows
        if chunk not in self._claimed:
            pending = self._claim(chunk)
            if pending is None or not np.isin(rows, pending).all():
                return
        try:
            self._table.put(rows, values)
        except HeldHereError:
            raise
        except (BusyError, StateError) as error:
            if isinstance(error, StateError) and chunk not in self._table.committed_chunks():
                raise
            logger.info("Discarded a batch that another process has written: %s", error)
            self.written -= self._put.pop(chunk, 0)
            self._next = self._anywhere(self.spec.num_rows // self.spec.chunk_rows + 1)
            return
        self._note(chunk, self._left[chunk] - len(rows))
        self._put[chunk] = self._put.get(chunk, 0) + len(rows)
        self.written += len(rows)
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._ranks.watch()
            self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release all claims and close the bar. After Ctrl-C the bar reports the number of finished rows."""
        self._give_up()
        self._done.__exit__(kind, error, traceback)

    def _follow(self, table: LazyTable) -> bool:
        """Wait for the table if another process creates it; return whether the table exists."""
        if table.look() or self._ranks.comes_first(self._label):
            return table.table is not None
        self._next = 1  # chunk 0 is for the creator, which claims it only when the table exists
        end = time.monotonic() + _LONGEST_FOLLOWING  # the other process may have been killed
        for pause in pauses():
            if table.look() or time.monotonic() > end:
                break
            self._ranks.watch()
            self._pause(pause)
        return table.table is not None

    def _batches(self, pending: NDArray[np.int64] | None) -> Iterator[NDArray[np.int64]]:
        while pending is not None:
            yield from plan_batches(pending, self.spec.chunk_rows, self._rows_per_batch)
            pending = self._claim_next() if self._look() else None

    def _claim_next(self) -> NDArray[np.int64] | None:
        """Claim a chunk and return its pending rows, or ``None`` if other processes hold all remaining chunks."""
        free = [chunk for chunk in self._left if chunk not in self._claimed]
        at = bisect_left(free, self._next)
        while free:
            at %= len(free)
            chunk = free.pop(at)
            pending = self._claim(chunk)
            if pending is None:
                at = self._anywhere(len(free))
            elif len(pending):
                self._next = chunk + 1
                return pending
        return None

    def _anywhere(self, count: int) -> int:
        """Return a random number below ``count``, without changing the state of Python's global generator."""
        return random.SystemRandom().randrange(max(count, 1))

    def _claim(self, chunk: int) -> NDArray[np.int64] | None:
        """Claim a chunk and return its pending rows, or ``None`` if another process holds it."""
        try:
            pending = self._claims.enter_context(self._table.claim(chunk))
        except HeldHereError:
            raise  # this process holds it elsewhere: waiting would never end
        except BusyError as error:
            logger.debug("Skipped a chunk that another process holds: %s", error)
            self._busy = error
            return None
        self._claimed.add(chunk)
        self._note(chunk, len(pending))
        return pending

    def _look(self) -> bool:
        """Update the bar with newly committed chunks; return whether any chunk is left."""
        self._looked = time.monotonic()
        for chunk in self._left.keys() & set(self._table.committed_chunks()):
            self._note(chunk, 0)
            del self._left[chunk]
        return bool(self._left)

    def _note(self, chunk: int, left: int) -> None:
        """Set the number of pending rows of a chunk, and advance the bar."""
        self._done.advance(self._left[chunk] - left)
        self._left[chunk] = left

    def _give_up(self) -> None:
        """Release the claims. Their chunks are complete, unless something failed."""
        self._claims.close()
        self._claimed.clear()
        self._put.clear()

    def _wait(self) -> None:
        self._done.say("waiting for other writers")
        left = sum(self._left.values())
        self._patience.wait(
            f"for {left} rows that other processes compute",
            lambda: str(self._busy or "the store does not name these processes."),
        )
        before = len(self._left)
        if self._look():  # if no chunk is left, a failure of another rank no longer matters
            self._ranks.watch()
        if len(self._left) < before:
            self._patience.reset()
