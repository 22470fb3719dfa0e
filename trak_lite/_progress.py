"""How far a piece of work is: a bar for whoever looks on, a note for whoever stops it."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Self, final

import torch
from tqdm.auto import tqdm

__all__ = ["KeptProgress", "distributed_rank", "progress_bar"]


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar whose lock belongs to this process.

    tqdm shares a lock with forked processes, and one that is killed while it holds the lock blocks all others for ever.
    """


def _renew_lock() -> None:
    _Bar.set_lock(threading.RLock())


_renew_lock()
os.register_at_fork(after_in_child=_renew_lock)  # another thread may hold it at the moment of a fork


def progress_bar(
    total: int, done: int = 0, *, label: str, unit: str = "row", progress: bool | None = None
) -> _Bar:
    """Return the bar that every long call shows: label, share, time that is left, rate.

    Of the processes of a distributed run, only rank 0 shows it.

    Args:
        total: Units of work.
        done: How many of them were done before.
        label: What the bar is called.
        unit: What is counted.
        progress: Show the bar; ``None`` shows it on a terminal only.
    """
    hidden = None if progress is None else not progress
    return _Bar(
        total=total, initial=done, desc=label, unit=unit, disable=True if distributed_rank() else hidden
    )


def distributed_rank() -> int:
    """Return this process's number in a distributed run, by torch or by the launcher's ``RANK``; else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    launched = os.environ.get("RANK", "")
    return int(launched) if launched.isdecimal() else 0


@final
class KeptProgress:
    """Progress of work whose results are kept one by one, so that what is counted as done survives a Ctrl-C.

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
        """Count units that are kept by now; a negative count takes some back."""
        self._done += count
        self._bar.update(count)

    def say(self, text: str) -> None:
        """Show a word beside the bar, until the next one."""
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
        """Close the bar; a Ctrl-C is told how far the work is."""
        self._bar.close()
        if isinstance(error, KeyboardInterrupt):
            # Between keeping a result and counting it, one more may be done.
            error.add_note(f"{self._label}: at least {self._done} of {self._total} {self._unit}s are done.")
