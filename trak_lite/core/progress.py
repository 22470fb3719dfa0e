"""Progress bars, lines where there is no terminal, and a note on ``KeyboardInterrupt`` that states the progress."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Self, TypeVar, final

import torch
from tqdm import TqdmWarning

with warnings.catch_warnings():  # a notebook without ipywidgets shows text bars, which needs no advice
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_LINE_EVERY: Final = 60.0  # seconds


@final
class Stages:
    """Progress over the checkpoints of one call: their number, and the time to the end of all of them.

    Bars that are made meanwhile read it.
    """

    def __init__(self, count: int | None, units: int, later: Sequence[int]) -> None:
        self._count, self._units, self._later, self._number = count, units, tuple(later), 0
        self._is_known = units > 0
        self._left, self._computed = 0, 0
        self._left_here, self._computed_here = 0, 0  # of the present bar
        self._began = self._began_here = self.said = time.monotonic()

    @classmethod
    @contextmanager
    def of(cls, count: int | None, units: int = 0, *, later: Sequence[int] = ()) -> Iterator[Self]:
        """Show these stages in all bars of the block: ``count`` checkpoints of ``units`` units each.

        Without ``units``, a checkpoint is expected to take as many as the one before it. If all checkpoints are visited
        again, ``later`` are the units of a checkpoint in each further pass.
        """
        stages = cls(count, units, later)
        token = _STAGES.set(stages)
        try:
            yield stages
        finally:
            _STAGES.reset(token)

    def each(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, each as the next stage."""
        for item in items:
            done, number = divmod(self._number, self._count or self._number + 1)
            units, *after = (self._units, *self._later)[done:] or (0,)
            self._left = units * ((self._count or 0) - number) + sum(after) * (self._count or 0)
            self._number += 1
            before = self._computed
            yield item
            if not self._is_known:
                self._units = self._computed - before or self._units

    @property
    def place(self) -> str:
        """``" (checkpoint 2 of 5)"``; empty if there is only one."""
        if self._number == 0 or self._count == 1:
            return ""
        if self._count is None:
            return f" (checkpoint {self._number})"
        return f" (checkpoint {(self._number - 1) % self._count + 1} of {self._count})"

    def begin(self, total: int, done: int) -> None:
        """Begin a bar of so many units, and leave out those that were already done."""
        self._left -= done
        self._left_here, self._computed_here = total - done, 0
        self._began_here = time.monotonic()

    def advance(self, count: int) -> None:
        """Count computed units."""
        self._left -= count
        self._computed += count
        self._left_here -= count
        self._computed_here += count

    @property
    def time_left(self) -> str:
        """The time to the end of all stages; empty if it is not known.

        The present bar goes on at its own rate. What follows takes the mean so far, with the time between bars.
        """
        if not self._count or not self._units or self._computed < 1 or self._left < 1:
            return ""
        now, here = time.monotonic(), min(max(self._left_here, 0), self._left)
        if self._computed_here < 1:
            here = 0
        seconds = (self._left - here) * (now - self._began) / self._computed
        seconds += here * (now - self._began_here) / max(self._computed_here, 1)
        return str(tqdm.format_interval(seconds))


def duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration(2.34), duration(200)
        ('2.3 s', '03:20')
    """
    return f"{seconds:.2g} s" if seconds < 99.5 else str(tqdm.format_interval(seconds))


_STAGES: ContextVar[Stages | None] = ContextVar("_STAGES", default=None)


def announce(text: str, progress: bool | None) -> None:
    """Write a text to the log, and to standard error if bars are shown there."""
    logger.info(text)
    if (sys.stderr.isatty() if progress is None else progress) and not distributed_rank():
        _Bar.write(text, file=sys.stderr)


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar whose lock is local to this process.

    tqdm shares a lock with forked processes; one that is killed while holding it would block all others forever.

    Where a bar would be shown on a terminal, and there is none, it writes one line a minute instead: to the log if that
    shows messages of level INFO, else to standard error.
    """

    writes_lines = False
    stages: Stages | None = None

    def start_lines(self, unit: str, total: int, done: float) -> None:
        """Write lines from now on, as no bar is shown."""
        self.writes_lines = True
        self._unit, self._all, self._first, self._now = unit, total, done, done
        self._began = self._said = time.monotonic()

    def update(self, n: float | None = 1) -> bool | None:
        if self.stages is not None and n:
            self.stages.advance(int(n))
            if self.stages.place and self.stages.time_left:
                self.set_postfix_str(f"all: {self.stages.time_left}", refresh=False)
        if self.writes_lines and n:
            self._now += n
            self._write_line_if_due()
        shown: bool | None = super().update(n)
        return shown

    def _write_line_if_due(self) -> None:
        stages, now = self.stages, time.monotonic()
        if now - (self._said if stages is None else stages.said) < _LINE_EVERY:
            return
        self._said = now
        left, rate = self._all - self._now, (self._now - self._first) / max(now - self._began, 1e-9)
        text = f"{self.label}: {self._now:,} of {self._all:,} {self._unit}s, {rate:.3g} a second"
        if rate > 0:
            text += f", {tqdm.format_interval(left / rate)} left"
        if stages is not None:
            stages.said = now
            text += f"; {stages.time_left} to the end of all" if stages.time_left else ""
        if logger.isEnabledFor(logging.INFO):
            logger.info(text)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _renew_lock() -> None:
    _Bar.set_lock(threading.RLock())


_renew_lock()
os.register_at_fork(after_in_child=_renew_lock)  # another thread may hold it at the moment of a fork


def progress_bar(
    total: int, done: int = 0, *, label: str, unit: str = "row", progress: bool | None = None
) -> _Bar:
    """Return a progress bar of ``total`` units, some of them done, with label, percentage, remaining time and rate.

    In a distributed run only rank 0 shows it. ``progress=None`` shows it on a terminal only, and without one writes a
    line a minute. The label, and the time to the end of all, are of the present :class:`Stages`.
    """
    stages = None if progress is False else _STAGES.get()
    if stages is not None:
        label += stages.place
        stages.begin(total, done)
    hidden = None if progress is None else not progress
    bar = _Bar(
        total=total, initial=done, desc=label, unit=unit, disable=True if distributed_rank() else hidden
    )
    bar.stages, bar.label = stages, label
    if progress is None and bar.disable and not distributed_rank():
        bar.start_lines(unit, total, done)
    return bar


def distributed_rank() -> int:
    """Return this process's rank according to ``torch.distributed`` or the launcher's ``RANK``, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    launched = os.environ.get("RANK", "")
    return int(launched) if launched.isdecimal() else 0


@final
class KeptProgress:
    """Progress of work whose results are saved one by one; on Ctrl-C, a note states how many units are done."""

    def __init__(
        self, total: int, done: int = 0, *, label: str, unit: str = "row", progress: bool | None = None
    ) -> None:
        """Show the bar; the arguments are those of :func:`progress_bar`."""
        self._done, self._all = done, f"{total} {unit}s"
        self._bar = progress_bar(total, done, label=label, unit=unit, progress=progress)

    def advance(self, count: int) -> None:
        """Count saved units; a negative count subtracts."""
        self._done += count
        self._bar.update(count)

    def say(self, text: str) -> None:
        """Show a text next to the bar until the next call."""
        self._bar.set_postfix_str(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._bar.close()
        if isinstance(error, KeyboardInterrupt):
            # "At least": the interrupt may come between saving a result and counting it.
            error.add_note(f"{self._bar.label}: at least {self._done} of {self._all} are done.")
