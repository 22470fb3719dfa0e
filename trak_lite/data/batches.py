"""Operations on nested batches: tensors in tuples, lists, mappings and dataclasses, with samples on axis 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite._devices import to_device
from trak_lite.errors import InvalidInputError
from trak_lite.types import Batch

DEFAULT_BATCH_SIZE: Final = 32
_LARGEST_DEFAULT: Final = 256
_DENSE: Final = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm)
"""Modules of perceptrons that hold parameters."""
_MOST_VALUES: Final = 1 << 25
"""Of the per-sample gradients of a batch, if a gradient computer holds all of them: 128 MiB in float32."""
_FEWEST_BATCHES: Final = 4
"""Of a small train set, whose run can resume between them."""


def default_batch_size(model: nn.Module, num_rows: int) -> int:
    """Return the samples per pass if the user sets none: 32, or up to 256 for perceptrons.

    A batch of a small perceptron costs nearly the same for 32 and for 256 rows. The size depends on the modules and N
    only, and not on a measured time, so that each run over the same data computes the same batches. Of a model with
    other parameters (convolutions, embeddings), their number does not bound the memory of a row, and batches gain less.

    Args:
        model: Its parameters decide.
        num_rows: N; at least 4 batches remain.
    """
    holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    if not all(type(module) in _DENSE for module in holders):
        return DEFAULT_BATCH_SIZE
    num_values = sum(parameter.numel() for parameter in model.parameters())
    size = _LARGEST_DEFAULT
    while size > DEFAULT_BATCH_SIZE and (
        size * num_values > _MOST_VALUES or -(-num_rows // size) < _FEWEST_BATCHES
    ):
        size //= 2
    return size


def rows_in_batches(rows: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return row numbers ``(n,)`` divided into consecutive batches of ``size``; the last one may be smaller."""
    return np.split(rows, range(size, len(rows), size))


def map_tensors(
    function: Callable[[Tensor], Any], batch: Batch, other: Callable[[Any], Any] = lambda value: value
) -> Batch:
    """Return the batch with ``function`` applied to each tensor.

    Containers keep their type, except that any mapping (a ``BatchEncoding``, a ``UserDict``) becomes a plain
    ``dict``. To everything else (a list or tuple without tensors, an array, a number) ``other`` is applied.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value, other) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init}
        changes = {name: map_tensors(function, value, other) for name, value in values.items()}
        return dataclasses.replace(batch, **changes)
    if isinstance(batch, tuple | list) and _holds_tensors(batch):
        parts = [map_tensors(function, item, other) for item in batch]
        if isinstance(batch, list):
            return parts
        # A named tuple takes its fields as separate arguments.
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return other(batch)


def _holds_tensors(batch: Batch) -> bool:
    if isinstance(batch, Mapping):
        return any(map(_holds_tensors, batch.values()))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return any(_holds_tensors(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init)
    if isinstance(batch, tuple | list):
        return any(map(_holds_tensors, batch))
    return isinstance(batch, Tensor)


def is_column(value: Any, size: int) -> bool:
    """Return whether a value without tensors has one entry per sample of a batch of B = ``size`` samples.

    Collate functions return columns that are no numbers as lists or tuples, and some return NumPy arrays.
    """
    return _is_sized(value) and len(value) == size


def _is_sized(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")  # no named tuple
    return is_list or (isinstance(value, np.ndarray) and value.ndim > 0)


def has_columns(batch: Batch) -> bool:
    """Return whether a batch has columns beside its tensors; see :func:`is_column`."""
    size, found = batch_size(batch), list[Any]()
    map_tensors(lambda tensor: tensor, batch, lambda value: found.append(is_column(value, size)))
    return any(found)


def flatten_batch(batch: Batch) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the per-sample tensors of a batch and a function that rebuilds the batch from replacements.

    Zero-dimensional tensors are not per sample; they are left out and kept by the rebuild.
    """
    leaves: list[Tensor] = []
    map_tensors(lambda tensor: leaves.append(tensor) if tensor.dim() else None, batch)

    def rebuild(tensors: Sequence[Tensor]) -> Batch:
        replacement = iter(tensors)
        return map_tensors(lambda tensor: next(replacement) if tensor.dim() else tensor, batch)

    return leaves, rebuild


def batch_size(batch: Batch) -> int:
    """Return B, the common number of samples of all tensors in the batch.

    Raises:
        InvalidInputError: If the batch holds no tensor with a sample axis, or its tensors disagree on B.
    """
    leaves, _ = flatten_batch(batch)
    if not leaves:
        raise InvalidInputError(
            f"The batch ({type(batch).__name__}) holds no tensor with a sample axis. "
            "Expected tensors with the samples on axis 0, alone or in a tuple, list, dict or dataclass."
        )
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        raise InvalidInputError(
            "The tensors of the batch disagree on the number of samples: shapes "
            f"{[tuple(leaf.shape) for leaf in leaves]}. Axis 0 of every tensor must be the sample axis."
        )
    return sizes.pop()


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with every tensor on ``device``; copies from the host to an accelerator are not waited for."""
    return map_tensors(lambda tensor: to_device(tensor, device), batch)


def take_rows(batch: Batch, rows: int | slice | Sequence[int]) -> Batch:
    """Return the samples ``rows`` of a batch; of an integer one sample without a sample axis.

    Lists, tuples and arrays without tensors that have one entry per sample are divided too; see :func:`is_column`.
    """
    size = batch_size(batch)

    def taken(value: Any) -> Any:
        if not is_column(value, size):
            return value
        if isinstance(rows, int | slice) or isinstance(value, np.ndarray):
            return value[rows]
        chosen = [value[row] for row in rows]
        return chosen if isinstance(value, list) else tuple(chosen)

    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, batch, taken)


def refuse_shared(batch: Batch, alone: Batch) -> None:
    """Raise if a tensor or column of a batch of several samples is not divided among them.

    Args:
        batch: At least two samples.
        alone: The first of them, collated on its own.

    Raises:
        InvalidInputError: If something has one entry per sample in the batch, and more or fewer in that of one sample:
            it has as many entries as the batch has samples by chance.
    """
    size, here, own = batch_size(batch), _sized(batch), _sized(alone)
    pairs = (
        zip(here, own, strict=False) if len(here) == len(own) else ()
    )  # a collate function may leave parts out
    shared = [what for (what, length), (_, of_one) in pairs if length == size and of_one != 1]
    if shared:
        raise InvalidInputError(
            f"The batch of {size} samples holds {shared[0]}, which a batch of one sample holds as a whole, too: all "
            "samples share it. Axis 0 of every tensor, list and array of a batch is the sample axis. Keep what samples "
            "share in the model or the task, or repeat it for every sample."
        )


def _sized(batch: Batch) -> list[tuple[str, int]]:
    """Return what has a length among the tensors and other values of a batch, with its length, in order."""
    found: list[tuple[str, int]] = []

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.dim():
            found.append((f"a tensor of shape {tuple(value.shape)}", len(value)))
        elif not isinstance(value, Tensor) and _is_sized(value):
            found.append((f"{type(value).__name__} of {len(value)} entries", len(value)))

    map_tensors(add, batch, add)
    return found
