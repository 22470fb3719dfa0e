"""Progress bars, and a note on ``KeyboardInterrupt`` that states the progress."""

from __future__ import annotations

import os
import threading
import warnings
from types import TracebackType
from typing import Self, final

import torch
from tqdm import TqdmWarning

with warnings.catch_warnings():  # a notebook without ipywidgets shows text bars, which needs no advice
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["KeptProgress", "distributed_rank", "progress_bar"]


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar whose lock is local to this process.

    tqdm shares a lock with forked processes; one that is killed while holding it would block all others forever.
    """


def _renew_lock() -> None:
    _Bar.set_lock(threading.RLock())


_renew_lock()
os.register_at_fork(after_in_child=_renew_lock)  # another thread may hold it at the moment of a fork


def progress_bar(
    total: int, done: int = 0, *, label: str, unit: str = "row", progress: bool | None = None
) -> _Bar:
    """Return a progress bar with label, percentage, remaining time and rate.

    In a distributed run only rank 0 shows it.

    Args:
        total: Number of units of work.
        done: Units that are already done.
        label: Label of the bar.
        unit: Name of a unit.
        progress: Whether to show the bar; ``None`` shows it only on a terminal.
    """
    hidden = None if progress is None else not progress
    return _Bar(
        total=total, initial=done, desc=label, unit=unit, disable=True if distributed_rank() else hidden
    )


def distributed_rank() -> int:
    """Return this process's rank according to ``torch.distributed`` or the launcher's ``RANK``, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    launched = os.environ.get("RANK", "")
    return int(launched) if launched.isdecimal() else 0


@final
class KeptProgress:
    """Progress of work whose results are saved one by one; on Ctrl-C, a note states how many units are done.

    Example:
        >>> try:
        ...     with KeptProgress(5, 2, label="Featurizing", progress=False) as done:
        ...         done.advance(1)
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt as interrupt:
        ...     print(interrupt.__notes__)
        ['Featurizing: at least 3 of 5 rows are done.']
    """

    def __init__(
        self, total: int, done: int = 0, *, label: str, unit: str = "row", progress: bool | None = None
    ) -> None:
        """Show the bar; the arguments are those of :func:`progress_bar`."""
        self._total, self._done = total, done
        self._label, self._unit = label, unit
        self._bar = progress_bar(total, done, label=label, unit=unit, progress=progress)

    def advance(self, count: int) -> None:
        """Count saved units; a negative count subtracts."""
        self._done += count
        self._bar.update(count)

    def say(self, text: str) -> None:
        """Show a text next to the bar until the next call."""
        self._bar.set_postfix_str(text)

    def __enter__(self) -> Self:
        """Return the progress."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the bar; add a note on the progress to a ``KeyboardInterrupt``."""
        self._bar.close()
        if isinstance(error, KeyboardInterrupt):
            # "At least": the interrupt may come between saving a result and counting it.
            error.add_note(f"{self._label}: at least {self._done} of {self._total} {self._unit}s are done.")
