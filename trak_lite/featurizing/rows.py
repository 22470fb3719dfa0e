"""Fill a table with the features of a dataset, in the dtype of the table, and compare stored rows with new ones.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from trak_lite.core.devices import HostCopy, one_behind
from trak_lite.core.ranks import Ranks
from trak_lite.data.batches import flatten_batch
from trak_lite.data.datasets import RowNumbers, Rows
from trak_lite.errors import BusyError, ManifestMismatchError, NonFiniteError, PrecisionError, StateError
from trak_lite.featurizing.passes import PADDED, ComputedRows, RowPass
from trak_lite.featurizing.row_checks import (
    STEPS,
    LostModules,
    Values,
    differences,
    recomputed,
    rounding_of,
)
from trak_lite.models.sharded import Turns
from trak_lite.run.repeats import done_rows
from trak_lite.run.tables import CAPTURED, FEATURES
from trak_lite.store import Column, TableSpec
from trak_lite.store.sharing import LazyTable, SharedRows
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

_NEXT_TO_NOTHING = 1e-3  # relative to the median norm of a batch
_SQUARES_UNDERFLOW = 1e-15
_ZERO = (
    "The gradient of f is zero in every kept parameter, so these rows add nothing to scores. Look at a function f that "
    "calls another model than its model_call, at adapters that are merged or disabled, at unused parts of the model, "
    "and at parameters that are frozen or left out (grad_wrt)."
)
_COMPARED = (
    "f of a sample alone does not depend on the weights, because f compares the samples of a batch (in-batch "
    "negatives, ranks, mined pairs). Put the other samples into the row, or let f capture a fixed set of them."
)
_MAX_ROUNDING = 1e-2  # that the cast may take of a row's norm; float16 itself rounds to 5e-4


@final
class HostRows:
    """Columns of one batch, on their way to the host: they are waited for once, by :meth:`put`."""

    def __init__(self, found: ComputedRows, spec: TableSpec, loss: LostModules | None = None) -> None:
        self._found, self._loss = found, LostModules() if loss is None else loss
        features = found.features
        self._column = spec.columns[0]
        stored, norms, lost = _in_storage_dtype(features, self._column)
        tensors = {FEATURES: stored, **{name: values.float() for name, values in found.beside().items()}}
        columns = {column.name: tensors[column.name] for column in spec.columns}
        self._names = tuple(columns)
        measured = features[: self._loss.num_measured].float()
        values = [found.finite(), norms, lost, measured, *columns.values()]
        self._copy = HostCopy(*(value.to(features.device) for value in values))  # one device, one wait
        self.is_done = self._copy.is_done

    def are_zero(self) -> bool:
        """Return whether all features are zero, after :meth:`put`."""
        return not self._copy.arrays()[self._names.index(FEATURES) - len(self._names)].any()

    def put(self, write: Callable[[RowNumbers, Values], None]) -> None:
        """Wait for the columns, check them, and write them to a table."""
        numbers, what = self._found.numbers, self._found.what
        finite, norms, lost, measured, *columns = self._copy.arrays()
        self._found.refuse_non_finite(finite)
        values = dict(zip(self._names, columns, strict=True))
        for name in self._found.more:
            lacking = numbers[~np.isfinite(values[name])]
            if lacking.size:
                raise NonFiniteError(
                    f"The {name.replace('_', ' ')} of rows {lacking[:5].tolist()} of {what} is NaN or beyond float32. "
                    "Nothing of this batch was stored. Look at these samples and at the checkpoint's weights."
                )
        wrong = np.flatnonzero(~(lost <= _MAX_ROUNDING))
        if wrong.size:
            first, dtype, loss = wrong[0], self._column.value_dtype, "entries beyond its range"
            if np.isfinite(lost[first]):
                dtype, loss = self._column.dtype, f"loses {lost[first]:.1%} of it"
            advice = "Multiply f by a constant, so that float32 holds its gradients."
            if dtype != "float32":
                advice = "Store float32 (Attributor: dtype='float32'; TRAKer: use_half_precision=False)."
            raise PrecisionError(
                f"{dtype} cannot hold the features of rows {numbers[wrong][:5].tolist()}: row {numbers[first]} has "
                f"norm {norms[first]:.3g} and {loss}. {advice}"
            )
        self._loss.add(measured, values[FEATURES], self._column)
        try:
            write(self._found.wanted, values)
        except StateError as error:
            raise BusyError(
                f"Another run wrote rows of {what} at the same time ({error}). Nothing is lost: wait until that run "
                "ends, then run again; its rows are found."
            ) from error


@final
@dataclass(frozen=True, eq=False)
class RowWork:
    """A table of features, the pass that computes its rows, and the ranks that fill it together."""

    table: LazyTable
    """Has a spec of :func:`feature_table_spec`, and one row per row of the pass. The first valid batch creates it, so
    invalid input leaves nothing on disk.
    """
    passes: RowPass
    """Only pending rows are loaded."""
    label: str
    _: KW_ONLY
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks that fill the same table; see :class:`~trak_lite.store.sharing.SharedRows`. They may hold parts of
    the model."""
    progress: bool | None = None
    """Show the bar; ``None`` shows it on a terminal only."""
    remedy: str = "use another path (for targets: another name)"
    loss: LostModules = field(default_factory=LostModules)

    def fill(self, *, wait: bool = True) -> int:
        """Featurize the pending rows of the table and write them batch by batch; return the number written here.

        Other processes may do the same at the same time. Each claims chunks that no other process holds, and finally
        waits for the chunks of the others; without ``wait`` it returns without them.
        """
        table, rows = self.table, self.passes.rows
        shared = SharedRows(
            *(table, rows.batch_size),
            label=self.label,
            progress=self.progress,
            ranks=self.ranks,
            pause=self._turns.pause,
        )
        own_chunks: set[int] = set()
        """Chunks that this process writes. Their rows are not compared, because it computed them itself."""
        with shared as work, self._turns:
            first = not self._compare(own_chunks)
            # Of a table that is continued, a few rows alone may be zero.
            are_new = work.pending_at_first == table.spec.num_rows
            are_zero = are_new and isinstance(rows, Rows) and rows.may_be_zero
            for plan in work.rounds(wait=wait):
                stream = self.passes.stream(
                    plan, lambda: work.pending_at_first - work.written, self._turns.batch
                )
                copies = ((found, HostRows(found, table.spec, self.loss)) for found in stream)
                # On an accelerator a batch is written when the next one is under way, so that the device has work.
                for found, copy in one_behind(copies):
                    written = work.written
                    copy.put(work.put)
                    are_zero = are_zero and copy.are_zero()
                    if work.written > written:
                        own_chunks.add(int(found.wanted[0]) // table.spec.chunk_rows)
                    # Another process may have made the table meanwhile, with other data or another model.
                    if first:
                        first = False
                        self._compare(own_chunks)
            if work.written < work.pending_at_first:  # others wrote the rest
                self._compare(own_chunks)
        if isinstance(rows, Rows) and are_zero and work.written:
            rows.may_be_zero = False
            why = _COMPARED if found.computer.compares_samples else _ZERO
            text = f"{self.label}: all {work.written:,} computed rows of {rows.what} are zero. {why}"
            warnings.warn(text, UserWarning, stacklevel=2)
        self.loss.warn(table.spec.columns[0], self.label)
        return work.written

    def check(self, wanted: RowNumbers | None = None) -> None:
        """Recompute a few done rows of the table, or those ``wanted``, and compare them within rounding.

        The cost is one pass over at most eight samples. :meth:`fill` does this itself.
        """
        with self._turns:
            self._compare((), wanted)

    def _compare(self, own: Collection[int], wanted: RowNumbers | None = None) -> bool:
        """Compare a few done rows outside the chunks ``own``; return whether there were any."""
        if CAPTURED in self.table.spec.fingerprint:
            logger.info(
                "%s: rows were captured with weights that are gone, and are not compared.", self.label
            )
            return True
        table = self.table.table
        stored = None if table is None else done_rows(table, wanted, without=own)
        if stored is not None:
            self.compare_with(*stored)
        return stored is not None

    def compare_with(self, wanted: RowNumbers, stored: Values) -> None:
        """Recompute rows of the table and compare them with the stored ones; see :meth:`check`."""
        rows = self.passes.rows
        rounding = 0.0

        def compute(wanted: RowNumbers, batch: Batch) -> Values:
            nonlocal rounding
            with self._turns.batch():
                computed = self.passes.compute(wanted, batch, is_compared=True)
            rounding = rounding_of(computed.computer.model, self.passes.device)
            return computed.values()

        found, alone = recomputed(rows, wanted, compute)
        columns = self.table.spec.columns
        differing = differences(columns, stored, found, lambda index: compute(*alone(index)), rounding)
        if differing:
            index, quantities = next(iter(differing.items()))
            raise ManifestMismatchError(
                f"{self.label}: row {rows.numbers(wanted)[index]} of {rows.what}, computed again, differs from "
                f"the stored row: {', '.join(quantities)} (allowed rounding: {rounding:g}; {len(differing)} of "
                f"{len(wanted)} recomputed rows differ). {self._cause(*alone(index))}"
            )

    def _cause(self, row: RowNumbers, sample: Batch) -> str:
        """Return the sentence of the message that explains why a row differs from the stored one."""
        _, again = next(self.passes.rows.batches([row]))
        pairs = list(zip(flatten_batch(sample)[0], flatten_batch(again)[0], strict=False))
        if any(one.shape != other.shape for one, other in pairs):
            return (
                "The sample has other shapes in other batches: it is padded to the longest sample of its batch, and f "
                f"depends on the padding. {PADDED}"
            )
        if not all(bool((one == other).all()) for one, other in pairs):
            return (
                "The sample itself changes from one access to the next (augmentation, noise, a random mask), so its "
                "rows cannot be compared with stored ones. Switch the randomness off, or draw it from a generator that "
                "is seeded with the index of the row."
            )
        return (
            "Something that rows depend on has changed: the samples, their transform or collation, the model's code, "
            "attributes or unsaved buffers, the task, or something that one of these reads. Undo the change, or "
            f"{self.remedy}."
        )

    @functools.cached_property
    def _turns(self) -> Turns:
        # A reference to self would keep the session, with a copy of the model, in a cycle.
        passes = self.passes
        # A batch of one row, whose pass a rank without a batch runs.
        first = functools.cache(lambda: next(passes.rows.batches([np.arange(1)])))
        return Turns(self.ranks.lockstep, lambda: passes.compute(*first()))


def _in_storage_dtype(features: Tensor, column: Column) -> tuple[Tensor, Tensor, Tensor]:
    """Return features in the dtype of a column, the norms of rows ``(B,)``, and the shares of these that are lost.

    A row that is very small compared with its batch (a sample that the model fits exactly) may lose more. Quantised
    columns take float32. The error of quantisation, at most half the row's scale per entry, is accepted, except in rows
    whose scale would be zero; no row can overflow because each row has its own scale.
    """
    stored = features.to(getattr(torch, column.value_dtype))
    if stored.dtype == features.dtype and not column.quantised:
        nothing = features.new_zeros(len(features))
        return stored, nothing, nothing
    wide = features.to(torch.promote_types(features.dtype, torch.float32))  # NumPy has no bfloat16
    norm = _norms(wide)
    error = _norms(stored.to(wide.dtype) - wide) if stored.dtype != features.dtype else torch.zeros_like(norm)
    if column.quantised:
        largest = torch.maximum(stored.amax(dim=1), -stored.amin(dim=1))
        is_lost = largest < STEPS[column.dtype] * torch.finfo(torch.float32).tiny
        error = torch.where(is_lost, norm, error)
    size = norm.clamp(min=_NEXT_TO_NOTHING * norm.nanmedian())
    return stored, norm, torch.where(norm > 0, error / size, 0.0)


def _norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norms ``(B,)`` of rows; squares neither over- nor underflow."""
    norms: Tensor = rows.norm(dim=1)
    if rows.device.type == "cpu" and bool(((norms >= _SQUARES_UNDERFLOW) & norms.isfinite()).all()):
        return norms  # a device is not asked, because its answer would be waited for
    largest = rows.abs().amax(dim=1, keepdim=True) if rows.shape[1] else rows.new_ones(len(rows), 1)
    largest = torch.where(largest > 0, largest, 1.0)
    norms = torch.linalg.vector_norm(rows / largest, dim=1)
    return norms.mul_(largest.squeeze(1))
