"""Compute the features of the batches of a dataset, and look at what f of a sample depends on in its batch.

Shapes: B samples of a batch, K feature width.
Source: TRAK (arXiv:2303.14186), section 3; numbers as in the native method of trak_lite.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import float32_products, undisturbed
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.normalization import Normalization
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
from trak_lite.errors import InvalidInputError, NonFiniteError, refuse_machine_failure
from trak_lite.featurizing.normalized import RowNormalizer
from trak_lite.featurizing.row_checks import (
    SampleRows,
    Values,
    naming_rows,
    refuse_the_row,
    rounding_of,
    some_rows,
)
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.randomness import refusing_changes
from trak_lite.gradient_computers.reference import SeenDtypes, fits_in_float64, in_float64, widened
from trak_lite.modelout_functions import ModelCall
from trak_lite.modelout_functions._inputs import deferring_checks
from trak_lite.modelout_functions.packed import without_cache
from trak_lite.models.optimizers import AdamStates
from trak_lite.models.sharded import is_sharded
from trak_lite.projectors import AbstractProjector
from trak_lite.run.tables import FEATURES, GRADIENT_NORM, LOSS_CURVATURE, OUT_TO_LOSS
from trak_lite.types import Batch, OutputTerms

logger = logging.getLogger(__name__)

PADDED = "Leave the padding out of f (a mask), pad all samples to one length, or use batch_size=1."
_PADDING = f"how far its batch is padded, and so do all rows. {PADDED}"
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
_NUM_COLLATED = 8
"""Samples of a batch that are collated alone, to find a padded one."""


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
        with deferring_checks(), refusing_changes(computer.model):
            if normalizer is None:
                terms = computer.stream_gradients(batch, accumulator.add)
                return [accumulator.features().detach(), *terms]
            terms = normalizer.stream(computer, batch, accumulator.add)
            return [normalizer.scale(accumulator.features().detach()), *terms, normalizer.norms()]

    setting = (model_id, None if normalizer is None else normalizer.setting)
    with (
        float32_products(device, computer.float32_products),
        naming_rows(computer.model, computer.modelout_fn, batch, rows, what),
    ):
        features, output, q, w, *norms = computer.run(batch, projector, setting, work, to_come)
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
    norms: Tensor | None
    """``(B,)`` of the gradients before normalisation, if they were measured."""

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
        if culprit == "feature" and self.norms is not None and bool(self.norms[positions].isinf().all()):
            raise NonFiniteError(
                f"The norm of the gradient of rows {some_rows(rows)} of {self.what} is beyond float32, which holds the "
                "squares of gradients up to about 1e19. Nothing of this batch was stored. Multiply f by a constant."
            )
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
        return ComputedRows(wanted, numbers, self.rows.what, batch, computer, features, terms, more, norms)

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
