"""Which row makes a batch fail, and why; whether stored rows, recomputed, still are the same.

Digests of samples, weights and settings do not cover everything that a row depends on: a forward method, an attribute
or an unsaved buffer of the model, a helper of the task, the collate function. All of these change the numbers of a row.
So a few done rows are recomputed whenever a table is continued, and compared within rounding.

Shapes: B samples of a batch, n rows that are compared, K feature width.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import full_float32
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.random import row_noise
from trak_lite.data.batches import flatten_batch, rows_in_batches, take_rows, undivided
from trak_lite.data.datasets import RowNumbers, Rows, spread_rows
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    TrakLiteError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.hooks.engine import UnexpectedPathError
from trak_lite.gradient_computers.randomness import refuse_changed_parameters
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models._adapters import changed_parameters, parameter_versions
from trak_lite.models.sharded import class_of, is_sharded
from trak_lite.store import AbstractRowTable, Column
from trak_lite.types import Batch, FeatureLayout, OutputTerms

PROBED_ROWS: Final = 8
"""Largest number of rows of a table that are recomputed."""
_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Allowed relative difference of a row between processors, batch sizes and gradient computers, by dtype.

About three times the square root of the dtype's precision. Rounding alone changes float32 rows by 1e-6 to 1e-5 of their
norm; a ReLU or a maximum that takes the other branch changes them more."""
_REDUCED: Final = 2e-2
"""The same for float32 on an accelerator, whose products may be rounded to the 11 bits of TF32."""
_MOST_NOISE: Final = 1e-1
"""Largest relative difference that the measured rounding of a row may excuse."""
_NOISE_FACTOR: Final = 16.0
_SCALAR_ROUNDING: Final = 64 * float(np.finfo(np.float32).eps)
_SCALE_BITS: Final = 2.0**-15
"""Relative rounding of the largest entry of a quantised row."""
STEPS: Final = {"int8": 127, "int4": 7}
"""Largest integer of each quantised dtype."""
_HALF_SPACING: Final = {"float16": (2.0**-11, 2.0**-25), "float32": (2.0**-24, 0.0)}
"""Relative and absolute rounding of a stored entry."""
_MOST_LOST: Final = {"float16": 0.1, "int8": 0.5, "int4": 0.9}
"""Share of the norm of a module that its storage may lose. int8 and int4 lose 0.02 and 0.4 of modules of small MLPs and
CNNs after training, and change their scores by 1 % and 15 %; int4 often loses half of one in other models."""
_MOST_MOVED: Final = 0.05
"""By which f of a text may change where rounding moves drawn labels."""
_DRAWN: Final = "with drawn labels, "
_OF_FIT: Final = (*OutputTerms._fields, *(f"{_DRAWN}{name}" for name in OutputTerms._fields))
"""What of a train row is noted beside a fit."""

_NOT_NAMED: Final = ("torch", "trak_lite", "contextlib")
"""Packages whose lines are not named in an error of the model or the task."""

Values = Mapping[str, NDArray[Any]]


@contextmanager
def naming_rows(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, rows: RowNumbers, what: str
) -> Iterator[None]:
    """Name the dataset's row in an error about a sample, and the tensors in an error of the model or the task.

    The model and the task run inside the block on a batch, whose samples are ``rows`` ``(B,)`` of the dataset ``what``.

    Raises:
        InvalidInputError: If the model or the task raises an error, which becomes the cause.
        UnsupportedModelError: If the block changes parameters of the model, or hooks refuse the operations of the
            batch.
    """
    with _naming_undivided(batch), _naming_rows(model, task, batch, rows, what):
        yield


@contextmanager
def _naming_rows(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, rows: RowNumbers, what: str
) -> Iterator[None]:
    versions = {} if is_sharded(model) else parameter_versions(model)
    try:
        yield
        refuse_changed_parameters(model, changed_parameters(model, versions))
    except InvalidInputError:
        _refuse_the_row(model, task, batch, rows, what)
        raise
    except UnexpectedPathError as error:
        raise type(error)(f"{error} The batch has rows {_some(rows)} of {what}.") from error
    except (TrakLiteError, torch.OutOfMemoryError):
        raise
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        leaves, _ = flatten_batch(batch)
        shapes = ", ".join(
            f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"
            for leaf in leaves
        )
        first = next(iter(str(error).splitlines()), "")
        failed, advice = _failed(error, model, task)
        raise InvalidInputError(
            f"{failed} failed on a batch of {what} (rows {_some(rows)}) with tensors {shapes}: "
            f"{type(error).__name__}: {first}. {advice}"
        ) from error


def _failed(error: BaseException, model: nn.Module, task: AbstractModelOutput) -> tuple[str, str]:
    """Return whether the model or the task failed, with the last line outside torch and this package, and advice."""
    frames = list(traceback.walk_tb(error.__traceback__))
    codes = {frame.f_code for frame, _ in frames}
    # A task may call other modules, and one of the original TRAK's interface calls the model itself.
    is_of_model = ModelCall.__call__.__code__ in codes or any(
        frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        for frame, _ in frames
    )
    is_of_task = getattr(type(task).evaluate, "__code__", None) in codes and not is_of_model
    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in frames
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_NAMED
    ]
    line = lines[-1] if lines else ""
    if is_of_task:
        return (
            f"The task{line}",
            "Check that the task takes such batches, and the outputs of the model for them.",
        )
    return (
        f"{class_of(model).__name__}{line}",
        "Check that the samples have the shapes and dtypes that the model takes, and that the task passes them as the "
        "model expects.",
    )


@contextmanager
def _naming_undivided(batch: Batch) -> Iterator[None]:
    """Name what is not divided with the samples in an error about a batch."""
    try:
        yield
    except (InvalidInputError, UnsupportedModelError) as error:
        if names := undivided(batch):
            error.args = (
                f"{error} Not divided with the samples: {', '.join(names[:5])}. If there is one entry per sample, let "
                "collate make a list, a tuple, an array or a tensor of it.",
            )
        raise


def finite_numbers(features: Tensor, terms: OutputTerms) -> Tensor:
    """Return whether f, q, w and all features of every sample are finite, ``(4, B)``, on their device."""
    # A sum takes a sixteenth of the time. It may overflow, so that it can only tell that all is well.
    is_well = features.device.type == "cpu" and bool(features.sum().isfinite())
    finite = features.new_ones(len(features), dtype=torch.bool) if is_well else features.isfinite().all(dim=1)
    return torch.stack([*(term.isfinite().to(features.device) for term in terms), finite])


def refuse_non_finite(
    finite: NDArray[np.bool_], rows: RowNumbers, what: str, computer: AbstractGradientComputer, batch: Batch
) -> None:
    """Raise the most specific error if any number of a batch is NaN or infinite.

    ``finite`` is ``(4, B)`` from :func:`finite_numbers`; ``rows`` ``(B,)`` are those of the samples in the dataset.

    Raises:
        InvalidInputError: If the output function itself refuses a sample (a label out of range).
        NonFiniteError: Otherwise; names the rows.
    """
    if finite.all():
        return
    positions = np.flatnonzero(~finite.all(axis=0)).tolist()
    _refuse_the_row(computer.model, computer.modelout_fn, take_rows(batch, positions), rows[positions], what)
    names = (*OutputTerms._fields, "feature")
    culprit = next(name for name, mask in zip(names, finite, strict=True) if not mask.all())
    raise NonFiniteError(
        f"The {culprit.replace('_', ' ')} of rows {_some(rows[positions])} of {what} is NaN or infinite. Nothing of "
        "this batch was stored. Look at these samples and at the checkpoint's weights; if the model runs in half "
        "precision, run it in float32."
    )


def _refuse_the_row(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, rows: RowNumbers, what: str
) -> None:
    """Run the output function eagerly on each sample alone; raise for the first sample that it refuses."""
    if is_sharded(model):
        return  # the other ranks would have to run it too
    for position, row in enumerate(rows):
        try:
            with torch.no_grad():
                task.evaluate(ModelCall(model), take_rows(batch, [position]))
        except InvalidInputError as error:
            raise type(error)(f"Row {row} of {what}: {error}") from error


def _some(rows: RowNumbers) -> str:
    shown = rows[:5].tolist()
    return f"{shown}" if len(rows) <= 5 else f"{shown} and {len(rows) - 5} more"


@final
@dataclass(frozen=True, slots=True)
class DoneRows:
    """Stored rows of a table."""

    rows: RowNumbers
    """``(n,)`` ascending."""
    values: Values
    """Values by column."""
    columns: tuple[Column, ...]


@final
@dataclass(frozen=True, slots=True)
class Computed:
    """The same rows, recomputed."""

    values: Values
    """Values by column; features ``(n, K)`` are floats before they are rounded for storage."""
    outputs: NDArray[Any]
    """f ``(n,)``; the allowed rounding of q and w depends on it."""


def done_rows(
    table: AbstractRowTable, wanted: RowNumbers | None = None, *, without: frozenset[int] = frozenset()
) -> DoneRows | None:
    """Return up to ``PROBED_ROWS`` done rows of a table, from its first and its last chunk; ``None`` without any.

    Reading a row reads its whole chunk (checksum, object store), so only two chunks are used. ``wanted`` are committed
    rows to return instead, ``without`` chunks to leave out.
    """
    committed = [chunk for chunk in table.committed_chunks() if chunk not in without]
    if wanted is None and committed:
        chunks = sorted({committed[0], committed[-1]})
        share = PROBED_ROWS // len(chunks)
        wanted = np.concatenate([_spread(np.arange(*table.chunk_range(chunk)), share) for chunk in chunks])
    if wanted is not None:
        values = {column.name: table.read_rows(column.name, wanted) for column in table.spec.columns}
        return DoneRows(wanted, values, table.spec.columns)
    sizes = np.diff(np.append(np.arange(0, table.spec.num_rows, table.spec.chunk_rows), table.spec.num_rows))
    for chunk in np.flatnonzero(table.pending_by_chunk() < sizes).tolist():
        if chunk in without:
            continue
        rows, values = table.read_done(chunk)
        if len(rows):
            chosen = _spread(np.arange(len(rows)), PROBED_ROWS)
            some = {name: column[chosen] for name, column in values.items()}
            return DoneRows(rows[chosen], some, table.spec.columns)
    return None


def rounding_of(model: nn.Module, device: torch.device) -> float:
    """Return the allowed relative difference between two computations of a row."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in _ROUNDING}
    rounding = max((_ROUNDING[dtype] for dtype in dtypes), default=_ROUNDING[torch.float32])
    return max(rounding, _REDUCED) if device.type != "cpu" and dtypes != {torch.float64} else rounding


def differences(
    stored: DoneRows, computed: Computed, alone: Callable[[int], Computed], rounding: float
) -> dict[int, list[str]]:
    """Return what differs by more than rounding between stored rows and the same rows, recomputed.

    ``alone`` recomputes the row at a position in a batch of one: the difference measures the rounding of this row. The
    result has, by the position of each row that differs, the text of every quantity of it that differs.
    """
    errors = _errors(stored, computed)
    suspects = np.flatnonzero(np.any([~(error <= rounding) for error in errors.values()], axis=0))
    differing: dict[int, list[str]] = {}
    for index in suspects.tolist():
        row = {name: values[index : index + 1] for name, values in computed.values.items()}
        # As if it were stored without rounding.
        unrounded = tuple(replace(column, dtype="float32") for column in stored.columns)
        noise = _errors(DoneRows(stored.rows[index : index + 1], row, unrounded), alone(index))
        wrong = [
            _difference(name, float(error[index]), stored, computed, index)
            for name, error in errors.items()
            if not error[index] <= max(rounding, min(_NOISE_FACTOR * float(noise[name][0]), _MOST_NOISE))
        ]
        if wrong:
            differing[index] = wrong
    return differing


def squares_and_losses(features: NDArray[Any], stored: NDArray[Any], column: Column) -> NDArray[np.float64]:
    """Return sums over some rows, per entry ``(2, K)``: of squared features, and of squared errors of their storage."""
    wide = features.astype(np.float64)  # float32 squares would underflow
    if column.quantised:
        steps = np.maximum(wide.max(axis=1), -wide.min(axis=1))[:, None] / STEPS[column.dtype]
        errors = wide / np.where(steps > 0, steps, 1.0)
        np.rint(errors, out=errors)
        errors *= steps
    else:
        errors = stored.astype(np.float64)
    errors -= wide
    return np.stack([np.einsum("bk,bk->k", part, part) for part in (wide, errors)])


def warn_of_lost_modules(
    sums: NDArray[np.float64], layout: FeatureLayout, column: Column, label: str
) -> bool:
    """Warn of the module whose features lose most in storage, and return whether it is too much.

    Kernels and cosines of a module do not depend on its scale: they weigh it fully however small it is.
    """
    squares, losses = np.add.reduceat(sums, [segment.start for segment in layout.segments], axis=1)
    shares = np.sqrt(np.divide(losses, squares, out=np.zeros_like(losses), where=squares > 0))
    worst, most = int(shares.argmax()), _MOST_LOST.get(column.dtype, np.inf)
    if shares[worst] <= most:
        return False
    warnings.warn(
        f"{label}: {column.dtype} loses {shares[worst]:.2g} of the norm of the features of module "
        f"{layout.segments[worst].name!r}, and more than {most:g} in {(shares > most).sum()} of {len(shares)} modules, "
        "because they are far smaller than those of other modules. Kernels and cosines of modules do not depend on "
        "their size, so scores may be wrong. Store float32 (Attributor: dtype='float32').",
        UserWarning,
        stacklevel=2,
    )
    return True


def compared_terms(
    stored: NDArray[np.float64] | None,
    model: nn.Module,
    task: AbstractModelOutput,
    rows: Rows,
    device: torch.device,
    *,
    seed: int | None,
    label: str,
) -> NDArray[np.float64]:
    """Return f, q and w of a few train rows, with a ``seed`` also for labels drawn from the model, ``(3 or 6, n)``.

    Raises:
        ManifestMismatchError: If they differ from the ``stored`` ones, which were noted when a fit began.
    """
    wanted = spread_rows(len(rows), PROBED_ROWS)
    plan = rows_in_batches(wanted, rows.batch_size)
    batches = [batch for part in plan for _, batch in rows.moved(part, device)]

    def terms(numbers: RowNumbers, batch: Batch) -> NDArray[np.float64]:
        call = ModelCall(model)
        with torch.enable_grad(), passes_undone(model), full_float32(device):
            values = [*task.evaluate(call, batch)]
            if seed is not None:
                with torch.no_grad():
                    drawn = task.sample_labels(call, batch, row_noise(numbers, seed=seed, draw=0))
                values += task.evaluate(call, drawn)
        return torch.stack([term.detach().cpu().double() for term in values]).numpy()

    def alone(index: int) -> Computed:
        group, at = divmod(index, len(plan[0]))
        return named(terms(wanted[index : index + 1], take_rows(batches[group], [at])))

    def named(values: NDArray[np.float64]) -> Computed:
        return Computed(dict(zip(_OF_FIT, values, strict=False)), values[0])

    now = np.concatenate([terms(*pair) for pair in zip(plan, batches, strict=True)], 1)
    if stored is None:
        return now
    columns = [Column(name, None, "float32") for name in _OF_FIT[: len(now)]]
    rounding = rounding_of(model, device)

    def differing_in(columns: Sequence[Column], rounding: float) -> dict[int, list[str]]:
        done = DoneRows(wanted, named(stored).values, tuple(columns))
        return differences(done, named(now), alone, rounding)

    differing = differing_in(columns[:3], rounding)
    # Rounding moves some of the labels of a text, and perhaps the only one of a sample.
    drawn = differing_in(columns[3:], max(rounding, _MOST_MOVED)) if seed is not None else {}
    if differing := differing or (drawn if len(drawn) > 1 else {}):
        index, quantities = next(iter(differing.items()))
        raise ManifestMismatchError(
            f"{label}: row {wanted[index]} of {rows.what} differs from what it was when the stored fit was made: "
            f"{', '.join(quantities)} (allowed rounding: {rounding:g}; {len(differing)} of {len(wanted)} compared rows "
            "differ). Something that the fit depends on has changed: the samples, the model's code, attributes or "
            "unsaved buffers, the task, or how it draws labels. Undo the change, use another path, or give the method "
            "another seed, which makes a new fit."
        )
    return now


def _spread(rows: RowNumbers, most: int) -> RowNumbers:
    """Return at most ``most`` evenly spread rows, with the first and the last one."""
    indices = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)
    return rows[np.unique(indices)]


def _errors(stored: DoneRows, computed: Computed) -> dict[str, NDArray[np.float64]]:
    """Return, per column, the relative difference ``(n,)`` of every row beyond the rounding of storage."""
    curvature = np.abs(np.asarray(stored.values.get("loss_curvature", 0.0), np.float64))
    slack = _SCALAR_ROUNDING * (1 + np.abs(computed.outputs.astype(np.float64))) * (1 + curvature)
    errors = {}
    for column in stored.columns:
        if column.name not in computed.values:
            continue
        there = stored.values[column.name].astype(np.float64)
        here = computed.values[column.name].astype(np.float64)
        if column.width is not None:
            errors[column.name] = _row_errors(there, here, column)
            continue
        size = np.maximum(np.abs(there), np.sqrt(np.mean(there**2)))
        errors[column.name] = _ratio(np.maximum(np.abs(here - there) - slack, 0.0), size)
    return errors


def _row_errors(there: NDArray[np.float64], here: NDArray[np.float64], column: Column) -> NDArray[np.float64]:
    norms = np.linalg.norm(there, axis=1)
    size = np.maximum(norms, np.median(norms))  # a very small row is mostly rounding
    largest = np.abs(there).max(axis=1)
    if column.quantised:
        rounded = 0.5 * largest[:, None] / STEPS[column.dtype]
    else:
        relative, absolute = _HALF_SPACING[column.dtype]
        rounded = relative * np.abs(there) + absolute
    error = _ratio(np.linalg.norm(np.maximum(np.abs(here - there) - rounded, 0.0), axis=1), size)
    if column.quantised:
        moved = np.abs(np.abs(here).max(axis=1) - largest) - _SCALE_BITS * largest
        error = np.maximum(error, _ratio(np.maximum(moved, 0.0), np.maximum(largest, np.median(largest))))
    return error


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``part / whole``: infinity where only ``whole`` is 0, and 0 where both are."""
    return np.divide(part, whole, out=np.where(part > 0, np.inf, 0.0), where=whole > 0)


def _difference(name: str, error: float, stored: DoneRows, computed: Computed, index: int) -> str:
    there, here = stored.values[name][index], computed.values[name][index]
    if np.ndim(there):
        norms = np.linalg.norm(np.asarray(there, np.float64)), np.linalg.norm(np.asarray(here, np.float64))
        return f"{name} by {error:.2g} of their norm (norm {norms[0]:.4g} there, {norms[1]:.4g} here)"
    return f"{name} is {float(there):.5g} there, {float(here):.5g} here"
