"""Several processes fill one table: each claims whole chunks, and leaves to the others what the others hold.

Nobody knows of anybody. The lock of a chunk says who writes it, its commit says that it is done, and a lock whose
holder died is free: shells, SLURM arrays and machines with a common disk need nothing else, and their number may
change.

Shapes: N rows of a table.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from trak_lite._progress import KeptProgress
from trak_lite.errors import BusyError, HeldHereError, StateError
from trak_lite.store import AbstractRowTable, TableSpec

__all__ = [
    "LazyTable",
    "Patience",
    "SharedRows",
    "always",
    "has_free_rows",
    "holder_of",
    "pauses",
    "plan_batches",
    "unwatched",
]

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds
_LOOK_EVERY = 0.5  # seconds
_LONGEST_FOLLOWING = 30.0  # seconds
_SAID_AFTER = 30.0  # seconds
_SAID_AGAIN_AFTER = 10  # times as long


def unwatched() -> None:
    """Look at nothing: the ``watch`` of a process that need not know of others."""


def plan_batches(pending: NDArray[np.int64], chunk_rows: int, rows_per_batch: int) -> list[NDArray[np.int64]]:
    """Group pending rows into batches on a grid that never changes.

    The grid starts anew at every chunk, so a batch is written by one record and a run that is killed and
    resumed computes the very batches that an undisturbed run computes: the features agree bitwise. So do those of
    several processes.
    """
    if not len(pending):
        return []
    cells = (pending // chunk_rows) * chunk_rows + (pending % chunk_rows) // rows_per_batch
    return np.split(pending, np.flatnonzero(np.diff(cells)) + 1)


def pauses() -> Iterator[float]:
    """Yield how long to wait before each next look at what others do, in seconds: longer and longer, up to one."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE)


@final
class Patience:
    """Waits for other processes in longer and longer pauses, and says so when that takes long.

    A process that was stopped, or hangs on a dead device, holds its lock for ever: only a person can tell.

    Example:
        >>> from itertools import count
        >>> ticks = count(step=20)
        >>> patience = Patience(sleep=lambda seconds: None, clock=lambda: next(ticks))
        >>> for _ in range(3):
        ...     patience.wait("for chunk 3", lambda: "pid 7 on host a holds it.")
    """

    def __init__(
        self, *, sleep: Callable[[float], None] | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        """Begin to wait.

        Args:
            sleep: Lets some seconds pass; ``None`` is ``time.sleep``.
            clock: Returns seconds; ``None`` is ``time.monotonic``.
        """
        self._sleep = time.sleep if sleep is None else sleep
        self._clock = time.monotonic if clock is None else clock
        self.reset()

    def reset(self) -> None:
        """Count anew: others have done something."""
        self._pauses = pauses()
        self._began: float | None = None
        self._said_next = _SAID_AFTER

    def wait(self, purpose: str, holder: Callable[[], str]) -> None:
        """Let the next pause pass.

        Args:
            purpose: What is waited for: it follows "Waiting".
            holder: Returns who holds it, as the message of a ``BusyError`` says it; called when it is said.
        """
        now = self._clock()
        if self._began is None:
            self._began = now
            logger.info("Waiting %s: %s", purpose, holder())
        elif now - self._began >= self._said_next:
            self._said_next *= _SAID_AGAIN_AFTER
            logger.warning(
                "Has been waiting %s for %.0f s: %s If that process was stopped or hangs, end it on its host "
                "(kill -9 and its pid): what it has written stays, and this process takes over what it held.",
                purpose,
                now - self._began,
                holder(),
            )
        self._sleep(next(self._pauses))


def has_free_rows(table: AbstractRowTable) -> bool:
    """Whether a table has rows that are not committed, in a chunk that nobody holds at this moment."""
    committed = set(table.committed_chunks())
    for chunk in range(table.num_chunks):
        if chunk not in committed:
            with contextlib.suppress(BusyError), table.claim(chunk):
                return True
    return False


def holder_of(table: AbstractRowTable) -> str | None:
    """Return who holds the first chunk of a table that is not committed; ``None`` if nobody does."""
    committed = set(table.committed_chunks())
    first = next((chunk for chunk in range(table.num_chunks) if chunk not in committed), None)
    try:
        if first is not None:
            with table.claim(first):
                return None
    except BusyError as error:
        return str(error)
    return None


def always() -> bool:
    """Say yes: the ``leads`` of a process that need not know of others."""
    return True


class LazyTable:
    """A table that is created when its first rows are put."""

    def __init__(
        self,
        spec: TableSpec,
        existing: AbstractRowTable | None,
        create: Callable[[], AbstractRowTable],
        find: Callable[[], AbstractRowTable | None] = lambda: None,
    ) -> None:
        """Hold the table if it exists, and else how to create it.

        Args:
            spec: Shape and fingerprint; an existing table was opened with the same.
            existing: The table, if there is one.
            create: Creates it.
            find: Opens it, if another process has created it since.
        """
        self.spec = spec
        self._table = existing
        self._create = create
        self._find = find

    def look(self) -> bool:
        """Look whether the table has been created, by this process or another one."""
        if self._table is None:
            self._table = self._find()
        return self.exists

    @property
    def exists(self) -> bool:
        """Whether the table was created."""
        return self._table is not None

    @property
    def table(self) -> AbstractRowTable | None:
        """The table, once it was created."""
        return self._table

    def pending(self) -> NDArray[np.int64]:
        """Return the rows that are not done, ascending."""
        return np.arange(self.spec.num_rows) if self._table is None else self._table.pending()

    def pending_by_chunk(self) -> NDArray[np.int64]:
        """Return how many rows of every chunk are not done."""
        if self._table is not None:
            return self._table.pending_by_chunk()
        starts = np.arange(0, self.spec.num_rows, self.spec.chunk_rows)
        return np.diff(starts, append=self.spec.num_rows)

    def committed_chunks(self) -> list[int]:
        """Return the chunks that are complete and readable, ascending."""
        return [] if self._table is None else self._table.committed_chunks()

    def has_column(self, name: str) -> bool:
        """Whether the table has a column of this name."""
        return any(column.name == name for column in self.spec.columns)

    def read_if_complete(self, column: str) -> NDArray[Any] | None:
        """Return a whole column, or ``None`` while rows are pending."""
        return self._table.read(column) if self._table is not None and self._table.complete else None

    def claim(self, chunk: int) -> AbstractContextManager[NDArray[np.int64]]:
        """Hold a chunk, of the table that is created now at the latest; see :meth:`AbstractRowTable.claim`."""
        return self._created().claim(chunk)

    def put(self, rows: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Write rows; see :meth:`AbstractRowTable.put`."""
        self._created().put(rows, values)

    def _created(self) -> AbstractRowTable:
        if self._table is None:
            self._table = self._create()
        return self._table


@final
class SharedRows:
    """The pending rows of a table, of which this process takes what no other one holds.

    A process begins with the first chunk. Whenever it finds a chunk held, it goes on at another one drawn at random, so
    that processes spread out and seldom meet again.

    Example:
        >>> from trak_lite.store import Column, Manifest, MemoryFeatureStore
        >>> spec = TableSpec(5, (Column("q", None, "float32"),), chunk_rows=4)
        >>> table = MemoryFeatureStore(Manifest({})).create_table("ckpt-0", spec)
        >>> with SharedRows(table, 3, label="rows", progress=False) as work:
        ...     for batches in work.rounds():
        ...         for rows in batches:
        ...             print(rows.tolist())
        ...             work.put(rows, {"q": np.ones(len(rows))})
        [0, 1, 2]
        [3]
        [4]
        >>> work.written, table.complete
        (5, True)
    """

    def __init__(
        self,
        table: AbstractRowTable | LazyTable,
        rows_per_batch: int,
        *,
        label: str,
        progress: bool | None,
        watch: Callable[[], None] = unwatched,
        pause: Callable[[float], None] | None = None,
        leads: Callable[[], bool] = always,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "row",
    ) -> None:
        """Look at what is done.

        Args:
            table: To be filled. One that does not exist yet comes to be with the first batch that is put.
            rows_per_batch: Of the grid of batches.
            label: What the progress bar is called. It counts the rows that are done, whoever did them.
            progress: Show the bar; ``None`` shows it on a terminal only.
            watch: Called now and then, while rows are put and while others are waited for; what it raises ends the
                work, for which there is a reason elsewhere.
            pause: Lets some seconds pass while others hold all that is left; ``None`` sleeps.
            leads: Called if the table does not exist yet; where it says no, another process makes the first batch, and
                the table with it.
            clock: Returns seconds.
            unit: What the bar calls a row of the table.
        """
        self._leads = leads
        self._clock = clock
        self._patience = Patience(sleep=pause, clock=clock)
        self._busy: BusyError | None = None
        """What the last chunk that was found held says of its holder."""
        self._pause = time.sleep if pause is None else pause
        self.spec = table.spec
        self.written = 0
        """Rows that this process put."""
        self._table = table
        self._rows_per_batch = rows_per_batch
        left = table.pending_by_chunk()
        self.pending_at_first = int(left.sum())
        """Rows that were not done when this object was made."""
        committed = set(table.committed_chunks())
        self._left = {chunk: int(rows) for chunk, rows in enumerate(left) if chunk not in committed}
        """Chunks that are not committed, and how many of their rows are pending as far as is known."""
        self._claims = ExitStack()
        self._claimed: set[int] = set()
        self._put: dict[int, int] = {}
        """Rows put in this round, by chunk."""
        self._next = 0
        self._watch = watch
        self._looked = self._clock()
        self._done = KeptProgress(
            self.spec.num_rows,
            self.spec.num_rows - self.pending_at_first,
            label=label,
            unit=unit,
            progress=progress,
        )

    def rounds(self, *, wait: bool = True) -> Iterator[Iterable[NDArray[np.int64]]]:
        """Yield the batches of rows to compute and put, in rounds, until every row of the table is committed.

        Chunks are claimed as the batches are drawn, ahead of their computing where a data loader draws ahead. A round
        ends when others hold all that is left; they are waited for between two rounds only, when this process holds
        nothing: so no two processes ever wait for each other.

        Args:
            wait: Otherwise end where others hold all that is left.

        Yields:
            Batches ``(b,)`` of one chunk each; all of them must be put before the next round.
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

        The very first batch of a table is computed before there is a table to claim a chunk of. Where another process
        was faster with it, this one's is left out. So is a chunk of an object store that another machine has committed.
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
            logger.info("Computed in vain: %s", error)
            self.written -= self._put.pop(chunk, 0)
            self._next = self._anywhere(self.spec.num_rows // self.spec.chunk_rows + 1)
            return
        self._note(chunk, self._left[chunk] - len(rows))
        self._put[chunk] = self._put.get(chunk, 0) + len(rows)
        self.written += len(rows)
        if self._clock() - self._looked > _LOOK_EVERY:
            self._watch()
            self._look()

    def __enter__(self) -> Self:
        """Return the rows."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give up what is held, and close the bar; a Ctrl-C is told how many rows are done."""
        self._give_up()
        self._done.__exit__(kind, error, traceback)

    def _follow(self, table: LazyTable) -> bool:
        """Wait for the process that makes the first batch, if that is another one; return whether there is a table."""
        if table.look() or self._leads():
            return table.exists
        end = self._clock() + _LONGEST_FOLLOWING  # it may have been killed
        for pause in pauses():
            if table.look() or self._clock() > end:
                break
            self._watch()
            self._pause(pause)
        return table.exists

    def _batches(self, pending: NDArray[np.int64] | None) -> Iterator[NDArray[np.int64]]:
        while pending is not None:
            yield from plan_batches(pending, self.spec.chunk_rows, self._rows_per_batch)
            pending = self._claim_next() if self._look() else None

    def _claim_next(self) -> NDArray[np.int64] | None:
        """Claim a chunk and return its pending rows, ``None`` if others hold all that is left."""
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
        """Return a random number below ``count``, not from the caller's random numbers."""
        return random.SystemRandom().randrange(max(count, 1))

    def _claim(self, chunk: int) -> NDArray[np.int64] | None:
        """Claim a chunk and return its pending rows, ``None`` if another process holds it."""
        try:
            pending = self._claims.enter_context(self._table.claim(chunk))
        except HeldHereError:
            raise  # it would be waited for without end
        except BusyError as error:
            logger.debug("Left to its writer: %s", error)
            self._busy = error
            return None
        self._claimed.add(chunk)
        self._note(chunk, len(pending))
        return pending

    def _look(self) -> bool:
        """Count what was committed since the last look; return whether anything is left."""
        self._looked = self._clock()
        for chunk in self._left.keys() & set(self._table.committed_chunks()):
            self._note(chunk, 0)
            del self._left[chunk]
        return bool(self._left)

    def _note(self, chunk: int, left: int) -> None:
        """Show on the bar how many rows of a chunk are pending now."""
        self._done.advance(self._left[chunk] - left)
        self._left[chunk] = left

    def _give_up(self) -> None:
        """Give up the claims: of chunks that are full by now, unless something failed."""
        self._claims.close()
        self._claimed.clear()
        self._put.clear()

    def _wait(self) -> None:
        self._done.say("waiting for other writers")
        left = sum(self._left.values())
        self._patience.wait(
            f"for {left} rows that others hold", lambda: str(self._busy or "their writers are not named.")
        )
        before = len(self._left)
        if self._look():  # where nothing is left, nobody else is needed
            self._watch()
        if len(self._left) < before:
            self._patience.reset()
