"""Schedule of the self-check: which samples of which batches are compared with autograd, and what a failure refuses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from trak_lite.data.batches import attributes_beside, flatten_batch, is_column
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.gradient_computers.samples import WIDTH
from trak_lite.models.tree import ModelTree
from trak_lite.types import Batch

_SAMPLES_AT_FIRST = 8
"""Number of samples compared in the first batch of a size."""
_LONGEST_GAP = 64
"""Largest number of batches of one structure from one check to the next."""
_MAX_STRUCTURES = 256
_MOST_FLAGS = 16
"""Values of the flags beside the tensors whose batches have a schedule of their own; those of others share one."""
_MOST_KEPT_BYTES = 1 << 26
"""Memory limit for the gradients held for comparison; two samples are always allowed."""
NamedRows = tuple[str, NDArray[np.int64]]
"""The name of some data, and rows of it."""
_Rows = Mapping[str, NDArray[np.int64]]
"""Row numbers by the name of their data."""


class SelfCheckError(UnsupportedModelError):
    """The gradient of a sample differs from autograd's."""

    rows: _Rows = MappingProxyType({})
    """Rows streamed without a check since the last check that passed."""


@dataclass(slots=True)
class _Progress:
    """State of the checks of one batch structure."""

    num_batches: int = 0
    """Since the first one of the largest size."""
    largest: int = 0
    num_checks: dict[int, int] = field(default_factory=dict)
    """Number of checks that passed, by batch size."""
    checked_sizes: set[int] = field(default_factory=set)
    """Batch sizes with such a check at the present weights."""


@final
class SelfCheck:
    """Schedule and results of the self-checks of one computer, by the structure of batches.

    The last entry of a structure is the state outside the batch, for which a failure counts.

    These samples are compared:

    - In the first batch of every size: up to eight, evenly spread from the first to the last.
    - In batches number 1, 2, 4, ... 64 of a structure, in every 64th after that (counted from the first one of the
      largest size), and after :meth:`renew` in the first batch of a known size: the first sample, the last, and a third
      whose position changes from check to check.

    If a sample differs, this batch and all later ones are refused, until :meth:`restart` or :meth:`renew`.
    """

    def __init__(self) -> None:
        self._progress: dict[Any, _Progress] = {}
        self._flags: dict[Any, set[Any]] = {}
        """By the rest of a structure, the flags that have a schedule of their own."""
        self._failed: dict[Any, str] = {}
        self._unconfirmed: dict[Any, list[NamedRows]] = {}
        """By structure, the data's name and rows of each batch after the last check that passed."""
        self._rows: NamedRows | None = None

    def restart(self) -> None:
        """Reset all checks; called when the model is replaced."""
        self._progress.clear()
        self._flags.clear()
        self._failed.clear()
        self._unconfirmed.clear()

    def renew(self) -> None:
        """Check the next batch of every structure and size; called when the model has other weights."""
        if self._failed:
            self.restart()
        for progress in self._progress.values():
            progress.checked_sizes.clear()
        self._unconfirmed.clear()

    def key(self, structure: Any) -> Any:
        """Return the structure by which a batch is scheduled: without flags that are others in every batch.

        Flags may choose the operations of a batch, so one sample of each such batch is compared off schedule.
        """
        *shapes, flags, outside = structure
        scheduled = self._flags.setdefault((*shapes, outside), set())
        if len(self._flags) > _MAX_STRUCTURES:
            del self._flags[next(iter(self._flags))]
        if len(scheduled) < _MOST_FLAGS:
            scheduled.add(flags)
        return structure if flags in scheduled else (*shapes, outside)

    def forget(self, structure: Any) -> None:
        """Reset the checks of a structure whose plan is made anew, unless that is for other weights."""
        if structure in self._progress and self._progress[structure].checked_sizes:
            del self._progress[structure]

    def is_due(self, structure: Any, size: int) -> bool:
        """Whether samples of the next batch of this structure are compared on schedule."""
        progress = self._progress.get(structure)
        return (
            progress is None or size not in progress.checked_sizes or is_scheduled(progress.num_batches + 1)
        )

    def is_first(self, structure: Any, size: int) -> bool:
        """Whether no batch of this structure had this size or a larger one."""
        progress = self._progress.get(structure)
        return progress is None or size > progress.largest

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the data rows of the next batch."""
        self._rows = (what, rows)

    def refuse_failed(self, structure: Any) -> None:
        """Raise if an earlier check failed, because gradients that are not checked may be wrong too."""
        if structure[-1] in self._failed:
            raise UnsupportedModelError(
                "The self-check failed for an earlier batch, so this computer cannot be used with the model: "
                f"{self._failed[structure[-1]]} "
                "To start again, call load_model_params or change the mode of the model."
            )

    def positions(
        self, structure: Any, size: int, kept: Kept, *, always: bool = False, whole: bool = False
    ) -> list[int]:
        """Return the positions to compare: ``always`` some, and ``whole`` all of the first batch of a size."""
        progress = self._progress.get(structure)
        is_new = progress is None or size not in progress.checked_sizes
        if progress is None or (is_new and (whole or size not in progress.num_checks)):
            per_sample = 8 * sum(min(p.numel(), WIDTH) for p in kept.values())
            most = max(2, min(_SAMPLES_AT_FIRST, _MOST_KEPT_BYTES // per_sample))
            count = size if whole else min(size, most)
            return [round(i * (size - 1) / max(count - 1, 1)) for i in range(count)]
        scheduled = is_new or is_scheduled(progress.num_batches + 1)
        if not (always or scheduled):
            return []
        turn = progress.num_checks.get(size, 0) % size
        return sorted({0, turn, size - 1}) if scheduled else [turn]

    @contextmanager
    def batch(
        self, structure: Any, size: int, positions: Sequence[int], *, confirms: bool = True
    ) -> Iterator[None]:
        """Record a batch that is streamed inside the block and compared at these positions.

        ``confirms`` is whether the comparison tells enough to trust the batches before.
        """
        rows, self._rows = self._rows, None
        try:
            yield
        except SelfCheckError as error:
            self.fail(error, structure, self.suspected())
            raise
        except UnsupportedModelError:
            self._rows = rows  # the batch may run again in another way
            raise
        progress = self._counted(structure, size)
        if positions:
            progress.num_checks[size] = progress.num_checks.get(size, 0) + 1
            progress.checked_sizes.add(size)
        if positions and confirms:
            self._unconfirmed.pop(structure, None)
        elif rows is not None:
            self._unconfirmed.setdefault(structure, []).append(rows)

    def replayed(self, structure: Any, size: int) -> list[NamedRows]:
        """Record a batch that was not streamed; return the data's name and its rows, if they are known."""
        rows, self._rows = self._rows, None
        self._counted(structure, size)
        if rows is None:
            return []
        self._unconfirmed.setdefault(structure, []).append(rows)
        return [rows]

    def _counted(self, structure: Any, size: int) -> _Progress:
        """Count a batch; return the state of its structure, as the newest."""
        progress = self._progress.pop(structure, None) or _Progress()
        # The trial of a few samples before the first batch does not count.
        progress.num_batches = progress.num_batches + 1 if size <= progress.largest else 1
        progress.largest = max(progress.largest, size)
        self._progress[structure] = progress
        if len(self._progress) > _MAX_STRUCTURES:
            del self._progress[next(iter(self._progress))]
        return progress

    def fail(self, error: SelfCheckError, structure: Any, suspected: _Rows) -> None:
        """Name the suspected rows in an error, and refuse all later batches in this state."""
        error.rows = suspected
        named = " and ".join(
            f"{len(rows)} rows of {what} ({', '.join(map(str, rows[:10].tolist()))}{', ...' if len(rows) > 10 else ''})"
            for what, rows in suspected.items()
        )
        if named:
            error.args = (
                f"{error} Batches after the last check that passed were not compared, and may be wrong too: {named}. "
                "The attribute rows of this error lists them; remove their stored rows before you continue.",
            )
        self._failed[structure[-1]] = str(error)

    def suspected(self, more: Iterable[NamedRows] = ()) -> dict[str, NDArray[np.int64]]:
        """Return the rows of all batches since the last check of their structure that passed, and ``more``."""
        by_name: dict[str, list[NDArray[np.int64]]] = {}
        for what, rows in itertools.chain(more, *self._unconfirmed.values()):
            by_name.setdefault(what, []).append(rows)
        return {what: np.unique(np.concatenate(parts)) for what, parts in by_name.items()}


def is_scheduled(number: int) -> bool:
    """Whether the batch with this number, counted from 1, is scheduled for a check."""
    return number & (number - 1) == 0 if number <= _LONGEST_GAP else number % _LONGEST_GAP == 0


def structure_of(batch: Batch) -> Any:
    """Return the shapes without the sample axis, the dtypes, and the flags beside the tensors of a batch."""
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in flatten_batch(batch)[0]), _flags(batch)


def _flags(batch: Batch) -> Any:
    """Return a batch's numbers, booleans and strings, which may control the model.

    A list without tensors holds per-sample data, and so does a column.
    """
    if is_column(batch):
        return None
    flags: tuple[Any, ...] | None = None
    if isinstance(batch, Mapping):
        flags = tuple((key, _flags(value)) for key, value in batch.items())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        flags = tuple(_flags(getattr(batch, f.name)) for f in dataclasses.fields(batch))
    elif isinstance(batch, tuple) or (isinstance(batch, list) and flatten_batch(batch)[0]):
        flags = tuple(map(_flags, batch))
    if flags is not None:
        beside = attributes_beside(batch)
        return (*flags, *((name, _flags(value)) for name, value in beside.items())) if beside else flags
    # 1, 1.0 and True are equal, and NaN is not equal to itself.
    return (type(batch), repr(batch)) if isinstance(batch, bool | int | float | str) else None


def draws_masks(tree: ModelTree) -> bool:
    """Whether dropout is active, so that two passes give different results."""
    dropouts = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    return any(
        module.training and (getattr(module, "p", 0.0) or getattr(module, "dropout", 0.0))
        for module in tree.modules
        if isinstance(module, dropouts)
    )
