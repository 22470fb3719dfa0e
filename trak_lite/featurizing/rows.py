"""Compute the features of a batch, and fill a table with the features of a dataset.

Shapes: N train rows, B samples of a batch, K feature width.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import HostCopy, float32_products, one_behind, undisturbed
from trak_lite.core.eval_caches import passes_undone
from trak_lite.data.batches import (
    batch_size,
    flatten_batch,
    is_equal,
    is_same_batch,
    map_tensors,
    move_batch,
    take_rows,
)
from trak_lite.data.datasets import RowNumbers, Rows, spread_rows
from trak_lite.errors import (
    BusyError,
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    PrecisionError,
    StateError,
    refuse_machine_failure,
)
from trak_lite.featurizing.normalized import RowNormalizer
from trak_lite.featurizing.row_checks import (
    STEPS,
    LostModules,
    SampleRows,
    Values,
    differences,
    done_rows,
    naming_rows,
    recomputed,
    refuse_the_row,
    rounding_of,
    some_rows,
)
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.normalization import Normalization
from trak_lite.gradient_computers.reference import SeenDtypes, fits_in_float64, in_float64, widened
from trak_lite.modelout_functions import ModelCall
from trak_lite.modelout_functions._inputs import deferring_checks
from trak_lite.modelout_functions.packed import without_cache
from trak_lite.models.optimizers import AdamStates
from trak_lite.models.sharded import Turns, is_sharded
from trak_lite.parallel.ranks import Ranks
from trak_lite.parallel.sharing import LazyTable, SharedRows
from trak_lite.projectors import AbstractProjector
from trak_lite.projectors._scratch import is_scratch
from trak_lite.run.tables import CAPTURED, FEATURES, GRADIENT_NORM, LOSS_CURVATURE, OUT_TO_LOSS
from trak_lite.store import Column, TableSpec
from trak_lite.types import Batch, OutputTerms

logger = logging.getLogger(__name__)

_NEXT_TO_NOTHING = 1e-3  # relative to the median norm of a batch
_SQUARES_UNDERFLOW = 1e-15
_PADDED = "Leave the padding out of f (a mask), pad all samples to one length, or use batch_size=1."
_PADDING = f"how far its batch is padded, and so do all rows. {_PADDED}"
_OTHERS = (
    "what the collate function computes from a whole batch (a number of samples or tokens, a mean, a largest value), "
    "and so do all rows. Compute it from each sample, or use batch_size=1."
)
_ROUNDED_16_BITS = 0.02  # of f, by which rounding changes it if other kernels are used
_ROUNDED = 1e-5  # the same in float32
_CACHED = (
    "texts that are packed into one row (position_ids begin anew) see each other, because model.config.use_cache is "
    "True. The trainers of Transformers and TRL train without a cache, which keeps them apart: set "
    "model.config.use_cache = False. If your training did fill the cache, the rows are right as they are."
)
_ZERO = (
    "The gradient of f is zero in every kept parameter, so these rows add nothing to scores. Look at adapters that are "
    "merged or disabled, at unused parts of the model, and at parameters that are frozen or left out (grad_wrt)."
)
_COMPARED = (
    "f of a sample alone does not depend on the weights, because f compares the samples of a batch (in-batch "
    "negatives, ranks, mined pairs). Put the other samples into the row, or let f capture a fixed set of them."
)
_NUM_COLLATED = 8
"""Samples of a batch that are collated alone, to find a padded one."""
_MAX_ROUNDING = 1e-2  # that the cast may take of a row's norm; float16 itself rounds to 5e-4


def compute_features(
    computer: AbstractGradientComputer,
    projector: AbstractProjector,
    batch: Batch,
    *,
    model_id: int,
    rows: RowNumbers,
    what: str,
    normalizer: RowNormalizer | None = None,
    to_come: float | None = None,
) -> tuple[Tensor, OutputTerms, Tensor | None]:
    """Return the feature rows ``(B, K)`` of a batch in float32 or better, its f, q and w, and the gradients' norms.

    A ``normalizer`` normalises the features, and measures the norms ``(B,)`` before it does so. ``rows`` ``(B,)`` of
    the dataset ``what`` are for messages. ``to_come`` is the number of batches that will follow, if it is known; after
    the last one, call ``computer.confirm()``.
    """
    computer.name_rows(f"{what} (model id {model_id})", rows)
    device = next(computer.model.parameters()).device

    def work() -> list[Tensor]:
        accumulator = projector.accumulator(
            batch_size(batch), model_id=model_id, parameters=computer.parameters
        )
        if normalizer is None:
            terms = computer.stream_gradients(batch, accumulator.add)
            return [accumulator.features().detach(), *terms]
        terms = normalizer.stream(computer, batch, accumulator.add)
        return [normalizer.scale(accumulator.features().detach()), *terms, normalizer.norms()]

    setting = (model_id, None if normalizer is None else normalizer.setting)
    with (
        float32_products(device, computer.float32_products),
        deferring_checks(),
        naming_rows(computer.model, computer.modelout_fn, batch, rows, what),
    ):
        features, output, q, w, *norms = computer.run(batch, projector, setting, work, is_scratch, to_come)
    return features, OutputTerms(output, q, w), norms[0] if norms else None


@final
@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Results of one batch, on the model's device."""

    wanted: RowNumbers
    """``(B,)`` rows of the samples in the table."""
    numbers: RowNumbers
    """``(B,)`` row numbers in messages."""
    what: str
    """Name of the samples in messages."""
    batch: Batch
    computer: AbstractGradientComputer
    features: Tensor
    terms: OutputTerms
    more: Mapping[str, Tensor]
    """Values of further columns of the table, ``(B,)`` each."""

    def finite(self) -> Tensor:
        """Return whether f, q, w and all features of every sample are finite, ``(4, B)``, on their device."""
        features = self.features
        # A sum takes a sixteenth of the time. It may overflow, so that it can only tell that all is well.
        is_well = features.device.type == "cpu" and bool(features.sum().isfinite())
        finite = (
            features.new_ones(len(features), dtype=torch.bool) if is_well else features.isfinite().all(dim=1)
        )
        return torch.stack([*(term.isfinite().to(features.device) for term in self.terms), finite])

    def refuse_non_finite(self, finite: NDArray[np.bool_]) -> None:
        """Raise the most specific error if any number is NaN or infinite, by what :meth:`finite` returned."""
        if finite.all():
            return
        positions = np.flatnonzero(~finite.all(axis=0)).tolist()
        rows, computer = self.numbers[positions], self.computer
        samples = take_rows(self.batch, positions)
        refuse_the_row(computer.model, computer.modelout_fn, samples, rows, self.what)
        names = (*OutputTerms._fields, "feature")
        culprit = next(name for name, mask in zip(names, finite, strict=True) if not mask.all())
        raise NonFiniteError(
            f"The {culprit.replace('_', ' ')} of rows {some_rows(rows)} of {self.what} is NaN or infinite. Nothing of "
            "this batch was stored. Look at these samples and at the checkpoint's weights; if the model runs in half "
            "precision, run it in float32."
        )

    def beside(self) -> dict[str, Tensor]:
        """Return the values of all columns but the features, ``(B,)`` each."""
        terms = self.terms
        return {OUT_TO_LOSS: terms.out_to_loss_grad, LOSS_CURVATURE: terms.loss_curvature, **self.more}

    def values(self) -> Values:
        """Return the results by column, and f as ``output``, without the rounding of storage."""
        columns = {FEATURES: self.features, "output": self.terms.output, **self.beside()}
        return {name: tensor.detach().cpu().double().numpy() for name, tensor in columns.items()}


@final
@dataclass(frozen=True, eq=False)
class RowPass:
    """One pass of the model over samples, which computes their features batch by batch."""

    rows: SampleRows
    computer_for: Callable[[Batch, RowNumbers], AbstractGradientComputer]
    """Returns the gradient computer for a batch and its rows."""
    projector: AbstractProjector
    _: KW_ONLY
    model_id: int
    """Number of the checkpoint."""
    device: torch.device
    normalization: Normalization
    adam: AdamStates | None = None
    """States of Adam at the checkpoint, if the normalisation needs them."""
    with_norms: bool = False
    """Whether the norms of the gradients before normalisation are measured."""
    divisor: float = 1.0
    """Of the features; the original TRAK divides by the root of P."""

    def compute(
        self, wanted: RowNumbers, batch: Batch, to_come: float | None = None, *, is_compared: bool = False
    ) -> ComputedRows:
        """Compute the features of a batch, rows ``wanted``; all passes of the model happen here.

        Rows that are compared with stored ones need no self-check.
        """
        batch = self.rows.prepared(move_batch(batch, self.device), wanted)
        numbers = self.rows.numbers(wanted)
        computer = self.computer_for(batch, numbers)
        normalizer = None
        if self.with_norms or self.normalization.kind != "none":
            normalizer = RowNormalizer(self.normalization, len(wanted), self.adam)
        with computer.unchecked() if is_compared else contextlib.nullcontext():
            features, terms, norms = compute_features(
                computer,
                self.projector,
                batch,
                model_id=self.model_id,
                rows=numbers,
                what=self.rows.what,
                normalizer=normalizer,
                to_come=to_come,
            )
        more = {GRADIENT_NORM: norms.float()} if self.with_norms and norms is not None else {}
        features = features if self.divisor == 1.0 else features / self.divisor
        return ComputedRows(wanted, numbers, self.rows.what, batch, computer, features, terms, more)

    def stream(
        self,
        plan: Iterable[RowNumbers],
        num_left: Callable[[], int],
        turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Iterator[ComputedRows]:
        """Yield the results of every batch of the plan, in order.

        Before each batch ``num_left`` returns the number of rows that are not done, ``turn`` the context of the pass.
        """
        computed: ComputedRows | None = None
        complete = False
        try:
            for wanted, batch in self.rows.batches(plan):
                if batch_size(batch) != len(wanted):
                    raise InvalidInputError(
                        f"Collating {len(wanted)} samples of {self.rows.what} gave a batch of {batch_size(batch)}. The "
                        "collate function must keep one entry per sample, in order."
                    )
                to_come = max(0, num_left() - len(wanted)) / self.rows.batch_size
                with turn():
                    computed = self.compute(wanted, batch, to_come)
                rows = self.rows
                is_whole = not is_sharded(computed.computer.model)
                if is_whole and isinstance(rows, Rows) and rows.is_to_look_at():
                    rows.may_pad = rows.may_pad and not self._look_at_padding(computed)
                    self._look_at_cache(computed)
                yield computed
            complete = True
        finally:
            if computed is not None:
                computed.computer.confirm(complete)

    def _look_at_padding(self, computed: ComputedRows) -> bool:
        """Warn if f of a sample of a batch is another one where the sample is collated on its own.

        Up to eight samples are compared. Return whether a padded one is among them or a warning was given, so that no
        later batch needs to be looked at.
        """
        wanted, f = computed.wanted, computed.terms.output.tolist()
        apart: list[tuple[float, int, float, bool, list[Batch]]] = []

        def collated(rows: RowNumbers, seed: int = 0) -> Batch:
            with undisturbed(seed):  # collate functions may draw masks
                [(_, batch)] = self.rows.batches([rows])
            return move_batch(batch, self.device)

        def is_drawn(row: int, alone: Batch, beside: Batch) -> bool:
            """Whether the tensors of a sample are others with other random numbers: it is another sample then."""
            one, at = wanted[row : row + 1], [row]
            pairs = [(alone, collated(one, seed)) for seed in (1, 2, 3)]
            pairs += [(beside, take_rows(collated(wanted, seed), at)) for seed in (1, 2)]
            leaves = [(flatten_batch(before)[0], flatten_batch(again)[0]) for before, again in pairs]
            return any(len(a) != len(b) or not all(map(is_equal, a, b)) for a, b in leaves)

        for row in spread_rows(len(wanted), _NUM_COLLATED).tolist():
            try:
                pair = [collated(wanted[row : row + 1]), take_rows(computed.batch, [row])]
                if not is_same_batch(*pair):
                    sizes, others = ([leaf.shape for leaf in flatten_batch(one)[0]] for one in pair)
                    output = float(self._evaluated(computed, pair[0]))
                    change = _change(output - f[row], f, row)
                    apart.append((change, row, output, sizes != others, pair))
            except Exception as error:  # a sample may be too short for the model, if it is not padded
                refuse_machine_failure(error)
                logger.debug("%s: a sample is not compared with itself alone: %s", self.rows.what, error)
        if not apart:
            return False
        change, row, output, is_padded, pair = max(apart, key=lambda one: one[0])
        if change > _ROUNDED and self._is_another(computed, pair, output, row) and not is_drawn(row, *pair):
            warnings.warn(
                f"f of row {wanted[row]} of {self.rows.what} is {f[row]:.5g} in its batch and {output:.5g} "
                f"alone: it depends on {_PADDING if is_padded else _OTHERS}",
                UserWarning,
                stacklevel=2,
            )
            return True
        return any(padded for _, _, _, padded, _ in apart)

    def _is_another(self, computed: ComputedRows, pair: Sequence[Batch], output: float, row: int) -> bool:
        """Whether f of a sample alone and beside others differs in float64, or else by more than its dtype rounds."""
        model, f = computed.computer.model, computed.terms.output.tolist()
        if fits_in_float64(model):
            try:
                with in_float64(model), SeenDtypes() as recorder:
                    alone, beside = (
                        float(self._evaluated(computed, map_tensors(widened, one))) for one in pair
                    )
            except Exception as error:  # the model may not run in float64
                refuse_machine_failure(error)
                logger.debug("%s: f is not compared in float64: %s", self.rows.what, error)
            else:
                if all(dtype.itemsize > 2 for dtype in recorder.dtypes):
                    return _change(alone - beside, f, row) > _ROUNDED
        return _change(output - f[row], f, row, 0.1) > rounding_of(model, self.device)

    def _look_at_cache(self, computed: ComputedRows) -> None:
        """Warn if f of packed rows is another one without the model's cache, which trainers turn off."""
        model = computed.computer.model
        batch = without_cache(model, computed.batch)
        if batch is None:
            return
        try:
            output = self._evaluated(computed, batch)
        except Exception as error:  # f may refuse a column that it does not know
            refuse_machine_failure(error)
            logger.debug("%s: packed rows are not compared without a cache: %s", self.rows.what, error)
            return
        f = computed.terms.output
        # Rounding in 16 bits hardly adds up; a weaker bound would hide most of what texts see of each other.
        rounding = min(rounding_of(model, self.device), _ROUNDED_16_BITS)
        if bool((output - f).abs().max() > rounding * float(f.abs().max())):
            warnings.warn(f"In the rows of {self.rows.what}, {_CACHED}", UserWarning, stacklevel=2)

    def _evaluated(self, computed: ComputedRows, batch: Batch) -> Tensor:
        """Return f of another batch for the model of some rows."""
        computer = computed.computer
        with (
            torch.enable_grad(),
            passes_undone(computer.model),
            float32_products(self.device, computer.float32_products),
        ):
            return computer.modelout_fn.evaluate(ModelCall(computer.model), batch).output.detach()


def _change(difference: float, f: Sequence[float], row: int, least: float = 0.01) -> float:
    """Return a difference relative to f of a sample, or to a part of the largest f: a small one may be rounded more."""
    return abs(difference) / (max(abs(f[row]), least * max(map(abs, f))) or 1.0)


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
    """The ranks that fill the same table; see :class:`~trak_lite.parallel.sharing.SharedRows`. They may hold parts of
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
                f"depends on the padding. {_PADDED}"
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
