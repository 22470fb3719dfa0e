"""Finds which row makes a batch fail, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.data.batches import flatten_batch, take_rows
from trak_lite.data.datasets import RowNumbers
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    NonFiniteError,
    TrakLiteError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.hooks.engine import UnexpectedPathError
from trak_lite.gradient_computers.randomness import refuse_changed_parameters
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models._adapters import parameter_versions
from trak_lite.models.sharded import class_of, is_sharded
from trak_lite.types import Batch, OutputTerms


@contextmanager
def naming_rows(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, rows: RowNumbers, what: str
) -> Iterator[None]:
    """Name the dataset's row in an error about a sample, and the tensors in an error of the model itself.

    The model and the task run inside the block on a batch, whose samples are ``rows`` ``(B,)`` of the dataset ``what``.

    Raises:
        InvalidInputError: If the model raises an error, which becomes the cause.
        UnsupportedModelError: If the block changes parameters of the model, or hooks refuse the operations of the
            batch.
    """
    versions = {} if is_sharded(model) else parameter_versions(model)
    try:
        yield
        now = parameter_versions(model)
        refuse_changed_parameters(
            model, {name for name, version in versions.items() if now.get(name, version) != version}
        )
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
        seen = ", ".join(
            f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"
            for leaf in leaves
        )
        first = next(iter(str(error).splitlines()), "")
        raise InvalidInputError(
            f"{class_of(model).__name__} failed on a batch of {what} (rows {_some(rows)}) with tensors {seen}: "
            f"{type(error).__name__}: {first}. Check that the samples have the shapes and dtypes that the model takes, "
            "and that the task passes them as the model expects."
        ) from error


def finite_numbers(features: Tensor, terms: OutputTerms) -> Tensor:
    """Return whether f, q, w and all features of every sample are finite, ``(4, B)``, on their device."""
    return torch.stack(
        [*(term.isfinite().to(features.device) for term in terms), features.isfinite().all(dim=1)]
    )


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
