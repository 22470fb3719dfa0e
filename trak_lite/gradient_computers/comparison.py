"""Comparison of some samples' gradients with autograd's on each sample alone, in doubt also in float64."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from trak_lite.data.batches import batch_size, map_tensors, take_rows
from trak_lite.errors import MODEL_FAILURES, refuse_machine_failure
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
from trak_lite.gradient_computers.samples import WIDTH, Samples
from trak_lite.gradient_computers.self_check import SelfCheckError
from trak_lite.models.sharded import class_of, is_sharded
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error that counts as rounding without further checks."""
_TIES = {torch.float64: 1e-8, torch.float32: 2e-2, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Relative error that a max or a ReLU may cause if rounding decides a tie differently; leads to further checks."""
_SPREAD = 8.0
"""Allowed error as a multiple of the difference between two references."""
_MOST_REPEATED = 8
"""Samples of a batch whose f is compared from pass to pass."""


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
    widths = [min(p.numel(), WIDTH) for p in kept.values()]
    with torch._C.DisableTorchFunction(), torch.no_grad():
        parts = [*torch.split(actual - expected, widths), *torch.split(expected, widths)]
        sizes = torch.stack(torch._foreach_norm(parts)).tolist()
    differences = {}
    for (name, p), error, norm in zip(kept.items(), sizes[: len(kept)], sizes[len(kept) :], strict=True):
        number = torch.finfo(p.dtype)
        unit = 4 * number.smallest_normal * number.eps * math.sqrt(p.numel())
        differences[name] = _Difference(error, norm, unit)
    return differences


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative error that counts as rounding in the narrowest of some dtypes."""
    return max((_ROUNDING.get(dtype, 1e-2) for dtype in dtypes), default=0.0)


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
    norms = (difference.norm for difference in differences.values())
    largest = max(filter(math.isfinite, norms), default=0.0)  # NaN is found where rows are stored
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
        advice = computer.advice_for(batch)
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
    alone = [take_rows(batch, [row]) for row in range(min(batch_size(batch), _MOST_REPEATED))]
    for is_wide in (True, False) if fits_in_float64(computer.model) else (False,):
        try:
            with in_float64(computer.model) if is_wide else nullcontext():
                parts = [map_tensors(widened, part) for part in alone] if is_wide else alone
                values = torch.stack([outputs_of(computer, parts) for _ in range(4)])
        except (torch.OutOfMemoryError, *MODEL_FAILURES) as error:
            refuse_machine_failure(error)
            continue
        if differ(values, 1e-5 if is_wide else 1e-3):
            raise SelfCheckError(
                f"{class_of(computer.model).__name__}: f of the same sample has other values in other passes, so its "
                "gradient is not defined. Something draws random numbers that torch.manual_seed does not set (random, "
                "NumPy, a generator of its own), or changes what it reads. Expected an f of the sample and the weights "
                "alone: draw from a seed in the row, as the task 'diffusion' does, or use a constant."
            )
        return
