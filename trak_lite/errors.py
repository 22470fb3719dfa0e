"""Every exception that trak_lite raises on purpose.

Each one is also the built-in error that a caller would expect, so ``except ValueError`` keeps working. Where the
original TRAK raises a built-in error (``AssertionError`` of its ``assert`` statements), what ``TRAKer`` raises in its
place is that error, too.
A message says what was seen, what was expected and what to do next. What it quotes may come from a store or a config
of somebody else's: characters that a terminal might obey are escaped when it is shown (:func:`printable`).
"""

from __future__ import annotations

import errno

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
]


def printable(text: str) -> str:
    r"""Return a text in which every character but a newline can be seen; the others are escaped as in a literal.

    Escape sequences, carriage returns, characters that turn the direction of writing and lone surrogates come from
    names in stores of others, and a terminal would obey them, or an encoder fail.

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
    """Base of every error raised on purpose by trak_lite."""

    def __str__(self) -> str:
        """Return the message with every character visible."""
        return printable(super().__str__())


class InvalidInputError(TrakLiteError, ValueError):
    """An argument, a batch or a dataset is not what the called function accepts."""


class AssertedInputError(InvalidInputError, AssertionError):
    """Arguments that contradict each other, which the original TRAK refuses by ``assert``."""


class UnknownNameError(InvalidInputError, KeyError):
    """A name that stands for nothing: the nearest known ones are in the message."""

    def __str__(self) -> str:
        """Return the message; a ``KeyError`` would show it in quotes."""
        return printable(Exception.__str__(self))


class UnknownTaskError(UnknownNameError):
    """The task is neither a known name nor a model output function."""


class NonFiniteError(InvalidInputError):
    """A model output, an out-to-loss gradient or a feature is NaN or infinite."""


class PrecisionError(InvalidInputError):
    """The storage dtype cannot hold the features without losing them."""


class CheckpointError(InvalidInputError, RuntimeError):
    """A checkpoint cannot be read, or does not fit the model."""


class UnsupportedModelError(TrakLiteError, RuntimeError):
    """The gradient computer cannot differentiate this model sample by sample."""


class StateError(TrakLiteError, RuntimeError, AssertionError):
    """A step was called before the steps that it needs."""


class UnknownExperimentError(StateError, UnknownNameError):
    """No target of this experiment was scored."""


class RankError(TrakLiteError, RuntimeError):
    """Another process of the same distributed run failed, was lost, or does something else."""


class RetrainingError(TrakLiteError, RuntimeError):
    """A user's training or output function failed while models were trained on subsets."""


class ShortageError(TrakLiteError, MemoryError):
    """The machine gives no more memory, threads or file descriptors."""


class WorkerLostError(TrakLiteError, RuntimeError):
    """A process that loads the user's data was killed, or has died."""


class SingularKernelError(TrakLiteError, ValueError, RuntimeError):
    """The kernel matrix cannot be inverted at the damping that was asked for."""


class StoreError(TrakLiteError, OSError):
    """Base of everything that can go wrong with rows on disk."""


class MissingStoreError(StoreError, FileNotFoundError):
    """There is no store, or no such table in it, at the path."""


class ManifestMismatchError(StoreError, ValueError, AssertionError):
    """The store, or a table in it, was made with other settings."""


class CorruptStoreError(StoreError):
    """Bytes on disk contradict the store's own records."""


class IncompleteStoreError(StoreError):
    """Rows were asked for that have not been written yet."""


class BusyError(StoreError, BlockingIOError):
    """Another writer holds this part of the store."""


class HeldHereError(BusyError):
    """This process itself holds this part of the store, through another open store: waiting would not end."""


class ReadOnlyStoreError(StoreError, PermissionError):
    """The store was opened for reading, or its folder cannot be written."""


class UnsupportedStoreError(StoreError, NotImplementedError):
    """What was asked for cannot be done safely in the place where the store lives."""


class StoreFullError(StoreError):
    """The disk has no room for the rows."""


MODEL_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
"""What a user's own module or output function raises when it does not fit its batch."""

_DONE_STAYS = "Finished rows are kept; the same call computes the others."


def refuse_machine_failure(error: BaseException) -> None:
    """Raise the named error of a failure that is the machine's, not the model's or the data's; else return.

    PyTorch raises all of these as :class:`RuntimeError`, as a user's own model may.

    Raises:
        ShortageError: If memory, threads or file descriptors are used up.
        WorkerLostError: If a process of a DataLoader was lost.
    """
    if isinstance(error, TrakLiteError):
        return
    first = next(iter(str(error).splitlines()), "")
    no_room = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if no_room or "can't allocate memory" in first:
        raise ShortageError(
            f"There is no room in memory ({type(error).__name__}: {first or 'no message'}). {_DONE_STAYS} Use a "
            "smaller batch_size or proj_dim, fewer processes on this machine, or raise its limit (ulimit -v)."
        ) from error
    if isinstance(error, RuntimeError) and "can't start new thread" in first:
        raise ShortageError(
            f"No thread could be started ({first}): memory, or the number of processes (ulimit -u), is used up. "
            f"{_DONE_STAYS} Use fewer processes on this machine, or raise the limit."
        ) from error
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise ShortageError(
            f"No file descriptor is left ({first}). {_DONE_STAYS} Close what is open, or raise the limit (ulimit -n)."
        ) from error
    if isinstance(error, RuntimeError) and first.startswith("DataLoader worker"):
        raise WorkerLostError(
            f"A process of the DataLoader that loads the samples was lost ({first}). Out of memory is the most common "
            f"cause. {_DONE_STAYS} Use fewer workers (num_workers), or look at the system's log."
        ) from error
