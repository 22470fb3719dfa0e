"""Which row makes a batch fail, and why; whether stored rows, recomputed, still are the same.

Digests of samples, weights and settings do not cover everything that a row depends on: a forward method, an attribute
or an unsaved buffer of the model, a helper of the task, the collate function. All of these change the numbers of a row.
So a few done rows are recomputed whenever a table is continued, and compared within rounding.

Shapes: B samples of a batch, n rows that are compared, K feature width.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trak_lite.core.devices import full_float32
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.random import row_noise
from trak_lite.data.batches import flatten_batch, move_batch, rows_in_batches, take_rows, with_own_containers
from trak_lite.data.column_marks import undivided
from trak_lite.data.datasets import RowNumbers, Rows, spread_rows
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    ManifestMismatchError,
    TrakLiteError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers.hooks.engine import UnexpectedPathError
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models.sharded import class_of, is_sharded
from trak_lite.run.repeats import PROBED_ROWS
from trak_lite.store import Column
from trak_lite.types import Batch, FeatureLayout, OutputTerms

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
_NUM_MEASURED: Final = 4
"""Rows of each of the first two batches of a table whose loss in storage is measured by module."""
_MOST_MOVED: Final = 0.05
"""By which f of a text may change where rounding moves drawn labels."""
_DRAWN: Final = "with drawn labels, "
_OF_FIT: Final = (*OutputTerms._fields, *(f"{_DRAWN}{name}" for name in OutputTerms._fields))
"""What of a train row is noted beside a fit."""

_NOT_NAMED: Final = ("torch", "trak_lite", "contextlib")
"""Packages whose lines are not named in an error of the model or the task."""

Values = Mapping[str, NDArray[Any]]
"""Values of some rows by column."""


class SampleRows(Protocol):
    """Samples identified by row: a :class:`~trak_lite.data.datasets.Rows`, or samples derived from one."""

    @property
    def what(self) -> str:
        """Name of the samples in messages."""

    @property
    def batch_size(self) -> int:
        """Samples per pass."""

    def batches(self, plan: Iterable[RowNumbers], /) -> Iterator[tuple[RowNumbers, Batch]]:
        """Yield every list of rows in the plan with its batch."""

    def prepared(self, batch: Batch, rows: RowNumbers, /) -> Batch:
        """Return a batch, on the model's device, after any preparation that needs the model (such as drawn labels)."""

    def numbers(self, rows: RowNumbers, /) -> RowNumbers:
        """Return the row numbers to use in messages for some rows."""


@contextmanager
def naming_rows(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, rows: RowNumbers, what: str
) -> Iterator[None]:
    """Name the dataset's row in an error about a sample, and the tensors in an error of the model or the task.

    The model and the task run inside the block on a batch, whose samples are ``rows`` ``(B,)`` of the dataset ``what``.
    """
    with _naming_undivided(batch):
        try:
            yield
        except InvalidInputError:
            refuse_the_row(model, task, batch, rows, what)
            raise
        except UnexpectedPathError as error:
            raise type(error)(f"{error} The batch has rows {some_rows(rows)} of {what}.") from error
        except (TrakLiteError, torch.OutOfMemoryError):
            raise
        except MODEL_FAILURES as error:
            refuse_machine_failure(error)
            shapes = ", ".join(
                f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"
                for leaf in flatten_batch(batch)[0]
            )
            first = next(iter(str(error).splitlines()), "")
            failed, advice = _failed(error, model, task)
            raise InvalidInputError(
                f"{failed} failed on a batch of {what} (rows {some_rows(rows)}) with tensors {shapes}: "
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
    if not is_of_model and torch.autograd.grad.__code__ in codes:
        return (
            f"The backward pass of {class_of(model).__name__}{line}",
            "Its forward pass runs. Check the model's operations that have no derivative, the backward of every "
            "torch.autograd.Function, and a projector of your own.",
        )
    return (
        f"{class_of(model).__name__}{line}",
        "Check that the samples have the shapes and dtypes that the model takes, that the task passes them as the "
        "model expects, and that the model keeps no tensor with the size of an earlier batch.",
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


def refuse_the_row(
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


def some_rows(rows: RowNumbers) -> str:
    """Return the first rows and the number of the others."""
    shown = rows[:5].tolist()
    return f"{shown}" if len(rows) <= 5 else f"{shown} and {len(rows) - 5} more"


def recomputed(
    rows: SampleRows, wanted: RowNumbers, compute: Callable[[RowNumbers, Batch], Values]
) -> tuple[Values, Callable[[int], tuple[RowNumbers, Batch]]]:
    """Return values of some rows, computed in batches, and the function that returns the sample at an index alone."""
    plan = rows_in_batches(wanted, rows.batch_size)
    batches = [batch for part in plan for _, batch in rows.batches([part])]
    parts = [compute(*pair) for pair in zip(plan, batches, strict=True)]

    def alone(index: int) -> tuple[RowNumbers, Batch]:
        group, at = divmod(index, len(plan[0]))
        return wanted[index : index + 1], take_rows(batches[group], [at])

    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, alone


def rounding_of(model: nn.Module, device: torch.device) -> float:
    """Return the allowed relative difference between two computations of a row."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in _ROUNDING}
    rounding = max((_ROUNDING[dtype] for dtype in dtypes), default=_ROUNDING[torch.float32])
    return max(rounding, _REDUCED) if device.type != "cpu" and dtypes != {torch.float64} else rounding


def differences(
    columns: Sequence[Column],
    stored: Values,
    computed: Values,
    alone: Callable[[int], Values],
    rounding: float,
) -> dict[int, list[str]]:
    """Return what differs by more than rounding between stored rows and the same rows, recomputed.

    Recomputed features ``(n, K)`` are those before they are rounded for storage; f ``(n,)`` is there as ``output``.
    ``alone`` recomputes the row at a position in a batch of one: the difference measures the rounding of this row. The
    result has, by the position of each row that differs, the text of every quantity of it that differs.
    """
    errors = _errors(columns, stored, computed)
    suspects = np.flatnonzero(np.any([~(error <= rounding) for error in errors.values()], axis=0))
    differing: dict[int, list[str]] = {}
    for index in suspects.tolist():
        row = {name: values[index : index + 1] for name, values in computed.items()}
        # As if it were stored without rounding.
        noise = _errors([replace(column, dtype="float32") for column in columns], row, alone(index))
        wrong = [
            _difference(name, float(error[index]), stored[name][index], computed[name][index])
            for name, error in errors.items()
            if not error[index] <= max(rounding, min(_NOISE_FACTOR * float(noise[name][0]), _MOST_NOISE))
        ]
        if wrong:
            differing[index] = wrong
    return differing


@final
class LostModules:
    """Warns once of modules that storage loses, by a few rows of the first two batches of each table.

    Kernels and cosines of a module do not depend on its scale: they weigh it fully however small it is.
    """

    def __init__(self, layout: FeatureLayout | None = None) -> None:
        """Measure modules of a layout; ``None`` measures nothing."""
        self._layout = layout
        self._sums: list[NDArray[np.float64]] = []

    @property
    def num_measured(self) -> int:
        """Rows of the next batch to measure."""
        # More than two where copies of further batches are under way.
        return 0 if self._layout is None or len(self._sums) >= 2 else _NUM_MEASURED

    def add(self, features: NDArray[Any], stored: NDArray[Any], column: Column) -> None:
        """Measure rows ``(b, K)`` of a batch, and the same rows in the dtype of their column."""
        if not len(features):
            return
        wide = features.astype(np.float64)  # float32 squares would underflow
        if column.quantised:
            steps = np.maximum(wide.max(axis=1), -wide.min(axis=1))[:, None] / STEPS[column.dtype]
            errors = wide / np.where(steps > 0, steps, 1.0)
            np.rint(errors, out=errors)
            errors *= steps
        else:
            errors = stored[: len(wide)].astype(np.float64)
        errors -= wide
        self._sums.append(np.stack([np.einsum("bk,bk->k", part, part) for part in (wide, errors)]))

    def warn(self, column: Column, label: str) -> None:
        """Warn of the module that loses most if it is too much; the next table begins."""
        layout, sums, self._sums = self._layout, self._sums, []
        if layout is None or not sums:
            return
        starts = [segment.start for segment in layout.segments]
        squares, losses = np.add.reduceat(np.sum(sums, axis=0), starts, axis=1)
        shares = np.sqrt(np.divide(losses, squares, out=np.zeros_like(losses), where=squares > 0))
        worst, most = int(shares.argmax()), _MOST_LOST.get(column.dtype, np.inf)
        if shares[worst] <= most:
            return
        self._layout = None
        warnings.warn(
            f"{label}: {column.dtype} loses {shares[worst]:.2g} of the norm of the features of module "
            f"{layout.segments[worst].name!r}, and more than {most:g} in {(shares > most).sum()} of {len(shares)} "
            "modules, because they are far smaller than those of other modules. Kernels and cosines of modules do not "
            "depend on their size, so scores may be wrong. Store float32 (Attributor: dtype='float32').",
            UserWarning,
            stacklevel=2,
        )


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

    Raises if they differ from the ``stored`` ones, which were noted when a fit began.
    """

    def terms(numbers: RowNumbers, batch: Batch) -> Values:
        call, batch = ModelCall(model), move_batch(batch, device)
        with torch.enable_grad(), passes_undone(model), full_float32(device):
            values = [*task.evaluate(call, with_own_containers(batch))]
            if seed is not None:
                with torch.no_grad():
                    drawn = task.sample_labels(call, batch, row_noise(numbers, seed=seed, draw=0))
                values += task.evaluate(call, drawn)
        return {
            name: term.detach().cpu().double().numpy() for name, term in zip(_OF_FIT, values, strict=False)
        }

    wanted = spread_rows(len(rows), PROBED_ROWS)
    now, alone = recomputed(rows, wanted, terms)
    if stored is None:
        return np.stack([*now.values()])
    noted = dict(zip(_OF_FIT, stored, strict=False))
    columns = [Column(name, None, "float32") for name in now]
    rounding = rounding_of(model, device)
    differing, drawn = (
        differences(some, noted, now, lambda index: terms(*alone(index)), allowed)
        # Rounding moves some of the labels of a text, and perhaps the only one of a sample.
        for some, allowed in ((columns[:3], rounding), (columns[3:], max(rounding, _MOST_MOVED)))
    )
    if differing := differing or (drawn if len(drawn) > 1 else {}):
        index, quantities = next(iter(differing.items()))
        raise ManifestMismatchError(
            f"{label}: row {wanted[index]} of {rows.what} differs from what it was when the stored fit was made: "
            f"{', '.join(quantities)} (allowed rounding: {rounding:g}; {len(differing)} of {len(wanted)} compared rows "
            "differ). Something that the fit depends on has changed: the samples, the model's code, attributes or "
            "unsaved buffers, the task, or how it draws labels. Undo the change, use another path, or give the method "
            "another seed, which makes a new fit."
        )
    return np.stack([*now.values()])


def _errors(columns: Sequence[Column], stored: Values, computed: Values) -> dict[str, NDArray[np.float64]]:
    """Return, per column, the relative difference ``(n,)`` of every row beyond the rounding of storage."""
    curvature = np.abs(np.asarray(stored.get("loss_curvature", 0.0), np.float64))
    slack = _SCALAR_ROUNDING * (1 + np.abs(computed["output"].astype(np.float64))) * (1 + curvature)
    errors = {}
    for column in columns:
        if column.name not in computed:
            continue
        there = stored[column.name].astype(np.float64)
        here = computed[column.name].astype(np.float64)
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


def _difference(name: str, error: float, there: NDArray[Any], here: NDArray[Any]) -> str:
    if np.ndim(there):
        norms = np.linalg.norm(np.asarray(there, np.float64)), np.linalg.norm(np.asarray(here, np.float64))
        return f"{name} by {error:.2g} of their norm (norm {norms[0]:.4g} there, {norms[1]:.4g} here)"
    return f"{name} is {float(there):.5g} there, {float(here):.5g} here"
