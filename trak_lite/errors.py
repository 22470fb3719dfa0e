"""Exceptions of trak_lite.

Each one also derives from the matching built-in error, so ``except ValueError`` keeps working. Where the original
TRAK raises a built-in error (``AssertionError`` from an ``assert``), the error that ``TRAKer`` raises derives from it.
A message states what was found, what was expected and what to do next. Messages may quote names from untrusted stores
or configs, so terminal control characters are escaped (:func:`printable`).
"""

from __future__ import annotations

import errno
import functools
import inspect
import re
import signal
import traceback

__all__ = [
    "MODEL_FAILURES",
    "AssertedInputError",
    "BusyError",
    "CheckpointError",
    "CorruptStoreError",
    "HeldHereError",
    "IncompleteStoreError",
    "InvalidInputError",
    "ManifestMismatchError",
    "MissingPackageError",
    "MissingStoreError",
    "NonFiniteError",
    "PrecisionError",
    "RankError",
    "ReadOnlyStoreError",
    "RetrainingError",
    "ShortageError",
    "SingularKernelError",
    "StateError",
    "StoreError",
    "StoreFullError",
    "TrakLiteError",
    "UnknownExperimentError",
    "UnknownNameError",
    "UnknownTaskError",
    "UnsupportedModelError",
    "UnsupportedStoreError",
    "WorkerLostError",
    "printable",
    "refuse_machine_failure",
    "refuse_signal",
    "summary",
]


def printable(text: str) -> str:
    r"""Return a text with its non-printable characters, except newlines, escaped as in a string literal.

    Names in untrusted stores may hold escape sequences, carriage returns, text direction controls or lone surrogates,
    which would control a terminal or make an encoder fail.

    Example:
        >>> printable("a" + chr(27) + "[2J")
        'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


class TrakLiteError(Exception):
    """Base class of all trak_lite errors."""

    def __str__(self) -> str:
        """Return the message with non-printable characters escaped."""
        return printable(super().__str__())


class InvalidInputError(TrakLiteError, ValueError):
    """An argument, a batch or a dataset is invalid."""


class AssertedInputError(InvalidInputError, AssertionError):
    """Arguments contradict each other; the original TRAK raises ``AssertionError`` here."""


class UnknownNameError(InvalidInputError, KeyError):
    """A name is unknown; the message lists the nearest known names."""

    def __str__(self) -> str:
        """Return the message without the quotes that ``KeyError`` adds."""
        return printable(Exception.__str__(self))


class UnknownTaskError(UnknownNameError):
    """The task is neither a known name nor a model output function."""


class NonFiniteError(InvalidInputError):
    """A model output, an out-to-loss gradient or a feature is NaN or infinite."""


class PrecisionError(InvalidInputError):
    """The storage dtype cannot represent the features (overflow or underflow)."""


class CheckpointError(InvalidInputError, RuntimeError):
    """A checkpoint cannot be read, or does not fit the model."""


class UnsupportedModelError(TrakLiteError, RuntimeError):
    """The gradient computer cannot differentiate this model sample by sample."""


class MissingPackageError(TrakLiteError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


class StateError(TrakLiteError, RuntimeError, AssertionError):
    """A step was called before the steps it depends on."""


class UnknownExperimentError(StateError, UnknownNameError):
    """The experiment has no scores."""


class RankError(TrakLiteError, RuntimeError):
    """Another process of the same distributed run failed, was lost or made a different call."""


class RetrainingError(TrakLiteError, RuntimeError):
    """The user's training or output function failed while models were retrained on subsets."""


class ShortageError(TrakLiteError, MemoryError):
    """The machine has no memory, threads or file descriptors left."""


class WorkerLostError(TrakLiteError, RuntimeError):
    """A DataLoader worker process died or was killed."""


class SingularKernelError(TrakLiteError, ValueError, RuntimeError):
    """The kernel matrix cannot be inverted at the requested damping."""


class StoreError(TrakLiteError, OSError):
    """Base class of errors about stored rows."""


class MissingStoreError(StoreError, FileNotFoundError):
    """The path holds no store, or the store lacks the table."""


class ManifestMismatchError(StoreError, ValueError, AssertionError):
    """The store, or a table in it, was made with different settings."""


class CorruptStoreError(StoreError):
    """Bytes on disk contradict the store's metadata or checksums."""


class IncompleteStoreError(StoreError):
    """Requested rows have not been written yet."""


class BusyError(StoreError, BlockingIOError):
    """Another writer holds the lock of this part of the store."""


class HeldHereError(BusyError):
    """This process holds the lock itself, through another open store object, so waiting would never end."""


class ReadOnlyStoreError(StoreError, PermissionError):
    """The store was opened read-only, or its folder is not writable."""


class UnsupportedStoreError(StoreError, NotImplementedError):
    """The store's location does not support the operation safely."""


class StoreFullError(StoreError):
    """The disk has no room for the rows."""


MODEL_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
)
"""Exceptions that a user's model or output function may raise for a batch that does not fit it."""

_SIGNALS = tuple(map(int, signal.valid_signals()))
_DONE_STAYS = "Finished rows are stored; the same call computes the others."


def summary(error: BaseException) -> str:
    """Return an error's type and the first line of its message, without the colours of torch's messages."""
    text = re.sub("\x1b\\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {next(iter(text.splitlines()), 'no message')}"


def refuse_machine_failure(error: BaseException) -> None:
    """Raise a specific error if a failure is caused by the machine rather than by the model or the data.

    PyTorch raises most of these as :class:`RuntimeError`, which a user's model may raise too. Other failures return.

    Raises:
        Exception: The error itself, if :func:`refuse_signal` raises it.
        ShortageError: If memory, threads or file descriptors are exhausted.
        WorkerLostError: If a DataLoader worker process died.
    """
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, RuntimeError) and first.startswith("DataLoader worker"):
        raise WorkerLostError(
            f"A worker process of the DataLoader ended unexpectedly ({first}). Out of memory is the most common cause. "
            f"{_DONE_STAYS} Use fewer workers (num_workers), or look at the system's log."
        ) from error
    refuse_signal(error)  # after torch's own handler, which raises the error above
    if isinstance(error, TrakLiteError):
        return
    no_room = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if no_room or "can't allocate memory" in first:
        raise ShortageError(
            f"There is not enough memory ({summary(error)}). {_DONE_STAYS} Use a "
            "smaller batch_size or proj_dim, fewer processes on this machine, or raise its limit (ulimit -v)."
        ) from error
    if isinstance(error, RuntimeError) and "can't start new thread" in first:
        raise ShortageError(
            f"No thread could be started ({first}): memory, or the number of processes (ulimit -u), is exhausted. "
            f"{_DONE_STAYS} Use fewer processes on this machine, or raise the limit."
        ) from error
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise ShortageError(
            f"No file descriptor is left ({first}). {_DONE_STAYS} Close open files, or raise the limit (ulimit -n)."
        ) from error


def refuse_signal(error: BaseException) -> None:
    """Raise an error again if a signal handler raised it (a timeout, a launcher that ends its ranks).

    Such an error ends the call, whatever it interrupted; handled like one of the model, it would be lost.
    """
    codes = set()
    for handler in filter(callable, map(signal.getsignal, _SIGNALS)):
        while isinstance(handler, functools.partial):
            handler = handler.func
        function = getattr(handler, "__func__", handler)  # of a method
        called = function if hasattr(function, "__code__") else type(function).__call__
        # A decorator's own code is that of all functions that it decorates.
        codes.add(getattr(inspect.unwrap(called), "__code__", None))
    cause: BaseException | None = error
    visited = set[int]()  # an error may be its own cause
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        if any(frame.f_code in codes for frame in frames):
            raise error
        context = None if cause.__suppress_context__ else cause.__context__
        caught = None if context is None else context.__traceback__
        # An error that the caller was handling before was caught in a frame outside.
        cause = cause.__cause__ or (context if caught is not None and caught.tb_frame in frames else None)
