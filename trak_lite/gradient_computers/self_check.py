"""Self-check of the gradient computers: compares some samples' gradients with autograd's on each sample alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import wide_dtype
from trak_lite.data.batches import (
    attributes_beside,
    batch_size,
    flatten_batch,
    is_column,
    map_tensors,
    take_rows,
)
from trak_lite.errors import MODEL_FAILURES, UnsupportedModelError, refuse_machine_failure
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.gradient_computers.randomness import differ, draws_numbers, outputs_of, restoring_draws
from trak_lite.gradient_computers.reference import (
    CheckedComputer,
    SeenDtypes,
    fits_in_float64,
    gradients_alone,
    in_float64,
    widened,
)
from trak_lite.models.sharded import class_of, is_sharded
from trak_lite.models.tree import ModelTree
from trak_lite.types import Batch, BlockSink, GradientBlock

logger = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error that counts as rounding without further checks."""
_TIES = {torch.float64: 1e-8, torch.float32: 2e-2, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Relative error that a max or a ReLU may cause if rounding decides a tie differently; leads to further checks."""
_SPREAD = 8.0
"""Allowed error as a multiple of the difference between two references."""
_SAMPLES_AT_FIRST = 8
"""Number of samples compared in the first batch of a size."""
_LONGEST_GAP = 64
"""Largest number of batches of one structure from one check to the next."""
_MAX_STRUCTURES = 256
_MOST_FLAGS = 16
"""Values of the flags beside the tensors whose batches have a schedule of their own; those of others share one."""
_MOST_KEPT_BYTES = 1 << 26
"""Memory limit for the gradients held for comparison; two samples are always allowed."""
_MOST_ENTRIES = 1 << 20
"""Entries of the dense gradients of one parameter that are formed at a time; one sample is always allowed."""
_WIDTH, _PIECE, _STEP = 1 << 12, 1 << 18, 40503
NamedRows = tuple[str, NDArray[np.int64]]
"""The name of some data, and rows of it."""
_Rows = Mapping[str, NDArray[np.int64]]
"""Row numbers by the name of their data."""


class SelfCheckError(UnsupportedModelError):
    """The gradient of a sample differs from autograd's."""

    rows: _Rows = MappingProxyType({})
    """Rows streamed without a check since the last check that passed."""


class MixedSamplesError(SelfCheckError):
    """f of a sample is another one in half of its batch, so that other gradient computers must look for it, too."""


# ---------------------------------------------------------------- schedule


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
            per_sample = 8 * sum(min(p.numel(), _WIDTH) for p in kept.values())
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
        progress = self._progress.pop(structure, None) or _Progress()
        # The trial of a few samples before the first batch does not count.
        progress.num_batches = progress.num_batches + 1 if size <= progress.largest else 1
        progress.largest = max(progress.largest, size)
        self._progress[structure] = progress  # as the newest
        if len(self._progress) > _MAX_STRUCTURES:
            del self._progress[next(iter(self._progress))]
        if positions:
            progress.num_checks[size] = progress.num_checks.get(size, 0) + 1
            progress.checked_sizes.add(size)
        if positions and confirms:
            self._unconfirmed.pop(structure, None)
        elif rows is not None:
            self._unconfirmed.setdefault(structure, []).append(rows)

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

    @property
    def named(self) -> list[NamedRows]:
        """The data's name and rows of the next batch, if they are known."""
        return [] if self._rows is None else [self._rows]

    def suspected(self, more: Iterable[NamedRows] = ()) -> dict[str, NDArray[np.int64]]:
        """Return the rows of all batches since the last check of their structure that passed, and ``more``."""
        by_name: dict[str, list[NDArray[np.int64]]] = {}
        for what, rows in itertools.chain(more, *self._unconfirmed.values()):
            by_name.setdefault(what, []).append(rows)
        return {what: np.unique(np.concatenate(parts)) for what, parts in by_name.items()}


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative error that counts as rounding in the narrowest of some dtypes."""
    return max((_ROUNDING.get(dtype, 1e-2) for dtype in dtypes), default=0.0)


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


# ---------------------------------------------------------------- comparing


class Samples:
    """Collects from the streamed blocks the numbers by which some samples' gradients are compared.

    For a gradient with more than 4096 entries, these are 4096 sums of its entries with random signs. The sums are
    linear in the gradient, and they give the norm of a difference to within 2 %.
    """

    def __init__(self, positions: Sequence[int], kept: Kept, start: int = 0) -> None:
        """Prepare for the samples at these positions; ``start`` is the ``start`` of the block of position 0."""
        self.positions = list(positions)
        self._start, self._sizes = start, {name: p.numel() for name, p in kept.items()}
        widths = [min(size, _WIDTH) for size in self._sizes.values()]
        device = next(iter(kept.values())).device
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # One allocation: many small ones would fragment the memory that large gradients reuse.
            held = torch.zeros(len(positions), sum(widths), dtype=wide_dtype(device), device=device)
            self._of = dict(zip(kept, torch.split(held, widths, 1), strict=True))

    def sums(self, kept: Iterable[str]) -> Tensor:
        """Return the numbers ``(len(positions), W)`` of some parameters, in order."""
        with torch._C.DisableTorchFunction():
            return torch.cat([self._of[name] for name in kept], 1)

    def passing(self, sink: BlockSink) -> BlockSink:
        """Return a sink that collects from each block and passes it to ``sink``."""
        if not self.positions:
            return sink

        def take(block: GradientBlock) -> None:
            first, end = block.start - self._start, block.start - self._start + block.num_samples
            rows = [row for row, at in enumerate(self.positions) if first <= at < end]
            step = max(1, _MOST_ENTRIES // self._sizes[block.name])
            for some in (rows[i : i + step] for i in range(0, len(rows), step)):
                with torch._C.DisableTorchFunction():
                    part = block.samples([self.positions[row] - first for row in some])
                    self.add(some, block.name, part.dense())
            sink(block)

        return take

    def add(self, rows: slice | Sequence[int], name: str, grads: Tensor) -> None:
        """Store a parameter's flat gradients ``(b, P)`` for the samples at the indices ``rows`` of ``positions``."""
        with torch.no_grad():
            self._of[name][rows] = _sums(grads)


def _sums(rows: Tensor) -> Tensor:
    """Return the entries of gradients ``(b, P)`` or, if P is above 4096, 4096 sums of them with random signs."""
    wide = wide_dtype(rows.device)
    if rows.shape[1] <= _WIDTH:
        return rows.to(wide)
    total = torch.zeros(len(rows), _WIDTH, dtype=wide, device=rows.device)
    signs = _signs(rows.device)
    for number, piece in enumerate(torch.split(rows, _PIECE, 1)):
        start = number * _STEP % _PIECE
        signed = piece * signs[start : start + piece.shape[1]]
        if rest := -piece.shape[1] % _WIDTH:
            signed = nn.functional.pad(signed, (0, rest))
        # A sum of more than 64 numbers takes three times as long.
        total += signed.view(len(rows), -1, _WIDTH).sum(1)
    return total


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return random signs; each piece of a gradient uses another section of them."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(2, (2 * _PIECE,), generator=generator, dtype=torch.float32, device="cpu")
    return (2 * drawn - 1).to(device)


def _alone(computer: CheckedComputer, batch: Batch, row: int, kept: Kept, seed: int | None = None) -> Tensor:
    """Return the numbers ``(W,)`` of autograd's gradients for a row; see :class:`Samples`."""
    samples = Samples([row], kept)
    with restoring_draws(computer.model, seed):
        gradients_alone(computer, batch, row, kept, functools.partial(samples.add, slice(0, 1)))
    return samples.sums(kept)[0]


class _Difference(NamedTuple):
    """Difference between a parameter's gradient and the reference."""

    error: float
    norm: float
    unit: float
    """Absolute error that is always allowed: underflow in the gradient's dtype."""


_Differences = Mapping[str, _Difference]
_Limits = Mapping[str, float]
"""Allowed relative errors, by parameter."""


def _differences(actual: Tensor, expected: Tensor, kept: Kept) -> _Differences:
    """Return the differences between two gradients, given by their numbers ``(W,)``, by parameter name."""
    widths = [min(p.numel(), _WIDTH) for p in kept.values()]
    with torch._C.DisableTorchFunction(), torch.no_grad():
        parts = [*torch.split(actual - expected, widths), *torch.split(expected, widths)]
        sizes = torch.stack(torch._foreach_norm(parts)).tolist()
    differences = {}
    for (name, p), error, norm in zip(kept.items(), sizes[: len(kept)], sizes[len(kept) :], strict=True):
        number = torch.finfo(p.dtype)
        unit = 4 * number.smallest_normal * number.eps * math.sqrt(p.numel())
        differences[name] = _Difference(error, norm, unit)
    return differences


def compare(
    computer: CheckedComputer,
    batch: Batch,
    kept: Kept,
    samples: Samples,
    dtypes: Sequence[torch.dtype] = (),
    *,
    needs_whole: bool = False,
) -> None:
    """Raise if the gradient of a sample differs from autograd's by more than rounding.

    The reference's gradients are held one parameter at a time. Samples with an error beyond rounding are compared again
    in float64, with the same random numbers on both sides. An error that remains is then compared with the difference
    of two references, and refused if it is far larger. If the gradients are equal in float64, errors that a tie can
    explain are accepted. Random states are left as they are. ``samples`` is what was collected from the blocks, and
    ``dtypes`` are those of the model's computations, besides those of the parameters. ``needs_whole`` is
    whether a part of the batch may show less than the whole batch in float64.

    Raises:
        SelfCheckError: If a gradient differs; the message names the parameter.
    """
    inner = [*dtypes, *([] if computer.autocast_dtype is None else [computer.autocast_dtype])]
    if computer.float32_products == "tf32" and next(iter(kept.values())).device.type != "cpu":
        inner.append(torch.float16)  # TF32 has the mantissa of float16
    rounding, ties = (
        {name: max(table.get(dtype, 1e-2) for dtype in (p.dtype, *inner)) for name, p in kept.items()}
        for table in (_ROUNDING, _TIES)
    )
    sums, doubtful = samples.sums(kept), dict[int, _Differences]()
    for actual, position in zip(sums, samples.positions, strict=True):
        differences = _differences(actual, _alone(computer, take_rows(batch, [position]), 0, kept), kept)
        if _wrong(differences, rounding) is not None:
            doubtful[position] = differences
    if not doubtful:
        return
    # Equality of a part does not vouch for errors that no tie explains.
    needs_whole = needs_whole or any(_wrong(errors, ties) is not None for errors in doubtful.values())
    exact = _equal_in_float64(computer, batch, kept, list(doubtful), needs_whole)
    # Use a second pass only if the first one drew other random numbers: a model may cache values between passes.
    if draws_numbers(computer, take_rows(batch, [0])):
        again = _repeated(computer, batch, kept, list(doubtful))
        doubtful = {position: errors for position, (_, errors) in zip(doubtful, again, strict=True)}
    elif exact is not None:
        by_position = dict(zip(samples.positions, sums, strict=True))
        for (position, errors), right in zip(doubtful.items(), exact, strict=True):
            # In bfloat16 the reference may be less accurate than the compared gradient: torch sums the gradient of a
            # LayerNorm's bias over the positions in bfloat16.
            other = _differences(by_position[position], right, kept)
            doubtful[position] = {
                name: value._replace(error=min(value.error, other[name].error))
                for name, value in errors.items()
            }
    _refuse_beyond_spread(computer, batch, kept, doubtful, rounding, ties, exact is not None)


def _repeated(
    computer: CheckedComputer, batch: Batch, kept: Kept, positions: Sequence[int]
) -> Iterator[tuple[Tensor, _Differences]]:
    """Stream some samples again; yield each one's numbers and its differences from a reference with the same draws."""
    for again, part, rows in computer.repeated(batch, positions):
        samples = Samples(rows, kept)
        with restoring_draws(computer.model, 0):
            again.stream_gradients(part, samples.passing(lambda _: None))
        for actual, row in zip(samples.sums(kept), rows, strict=True):
            expected = _alone(again, take_rows(part, [row]), 0, kept, seed=0)
            yield actual, _differences(actual, expected, kept)


def _equal_in_float64(
    computer: CheckedComputer, batch: Batch, kept: Kept, positions: Sequence[int], needs_whole: bool
) -> list[Tensor] | None:
    """Raise if gradients differ in float64, where no tie is decided by rounding; return them if they are equal."""
    if not fits_in_float64(computer.model):
        return None
    computer.undo_passes()
    part, rows = batch, positions
    mode = SeenDtypes()
    try:
        with in_float64(computer.model), mode:
            part = map_tensors(widened, batch)
            if not needs_whole:
                part, rows = computer.enough_for(part, positions)
            repeats = list(_repeated(computer, part, kept, rows))
    except (torch.OutOfMemoryError, *MODEL_FAILURES) as error:
        refuse_machine_failure(error)
        logger.debug("Not compared in float64: %s", error)  # the model or the device does not support float64
        return None
    exact = dict.fromkeys(kept, max(_ROUNDING.get(dtype, 1e-2) for dtype in mode.dtypes))
    wrong = [differences for _, differences in repeats if _wrong(differences, exact) is not None]
    if wrong and mode.dtypes == {torch.float64}:
        _refuse(computer, batch, positions, wrong[0], exact)
    return None if wrong else [sums for sums, _ in repeats]


def _refuse_beyond_spread(
    computer: CheckedComputer,
    batch: Batch,
    kept: Kept,
    doubtful: Mapping[int, _Differences],
    rounding: _Limits,
    ties: _Limits,
    equal: bool,
) -> None:
    """Raise if an error is far larger than the difference between two references.

    ``doubtful`` has the differences by position; ``equal`` says whether the gradients are equal in float64.

    The two references are the sample alone, and a batch of copies of the sample with the size of the original batch.
    The copies run in the same kernels as the original batch, so that rounding decides their ties in the same way. The
    copies may also lose rows in the same way (a limit on an expert's rows). Unless equality in float64 excludes that,
    the difference between the references allows at most the error of a tie.
    """
    for position, differences in doubtful.items():
        if _wrong(differences, ties if equal else rounding) is None:
            continue
        copies = take_rows(batch, [position] * batch_size(batch))
        spread: _Differences = {}
        try:
            alone = _alone(computer, take_rows(copies, [0]), 0, kept, seed=0)
            spread = _differences(alone, _alone(computer, copies, position, kept, seed=0), kept)
        except MODEL_FAILURES as error:  # for example, a model that takes one sample at a time
            refuse_machine_failure(error)
            logger.debug("Not compared with copies: %s", error)
        largest = max((difference.norm for difference in spread.values()), default=0.0)
        limits = dict(ties)
        for name, difference in spread.items():
            limit = _SPREAD * difference.error / max(difference.norm, 1e-2 * largest, difference.unit)
            limits[name] = max(ties[name], limit) if equal else min(max(rounding[name], limit), ties[name])
        _refuse(computer, batch, [position], differences, limits)


def _wrong(differences: _Differences, allowed: _Limits) -> str | None:
    """Return the first parameter whose gradient differs by more than allowed, or ``None``."""
    largest = max(difference.norm for difference in differences.values())
    for name, difference in differences.items():
        if difference.error > allowed[name] * max(difference.norm, 1e-2 * largest) + difference.unit:
            return name
    return None


def _refuse(
    computer: CheckedComputer,
    batch: Batch,
    positions: Sequence[int],
    differences: _Differences,
    allowed: _Limits,
) -> None:
    name = _wrong(differences, allowed)
    if name is not None:
        refuse_changing(computer, take_rows(batch, positions))
        difference = differences[name]
        advice = computer.advice_for(batch_size(batch))
        if dict(computer.model.named_parameters())[name]._backward_hooks:
            advice = (
                f"{name!r} has tensor hooks (register_hook), which autograd applies to its gradient and this computer "
                "does not. Remove the hooks: EKFAC, CG and LiSSA do not apply them. Use gradient_computer='iterative' "
                "for the gradients that they return."
            )
        raise SelfCheckError(
            f"The self-check failed: the gradient of {name!r} differs from autograd's on one sample alone by "
            f"{difference.error:.3g}, where its norm is {difference.norm:.3g}. Expected equality up to rounding. "
            f"{advice}"
        )


def refuse_changing(computer: CheckedComputer, batch: Batch) -> None:
    """Raise if f of the same samples differs from pass to pass although torch draws the same numbers.

    It takes several passes, and is only called where the model would be refused, or a warning given, anyway.
    """
    if is_sharded(computer.model):  # every pass needs all ranks
        return
    computer.undo_passes()
    alone = [take_rows(batch, [row]) for row in range(min(batch_size(batch), _SAMPLES_AT_FIRST))]
    for is_wide in (True, False) if fits_in_float64(computer.model) else (False,):
        try:
            with in_float64(computer.model) if is_wide else nullcontext():
                parts = [map_tensors(widened, part) for part in alone] if is_wide else alone
                values = torch.stack([outputs_of(computer, parts) for _ in range(4)])
        except (torch.OutOfMemoryError, *MODEL_FAILURES) as error:
            refuse_machine_failure(error)
            continue
        if differ(values):
            raise SelfCheckError(
                f"{class_of(computer.model).__name__}: f of the same sample has other values in other passes, so its "
                "gradient is not defined. Something draws random numbers that torch.manual_seed does not set (random, "
                "NumPy, a generator of its own), or changes what it reads. Expected an f of the sample and the weights "
                "alone: draw from a seed in the row, as the task 'diffusion' does, or use a constant."
            )
        return
