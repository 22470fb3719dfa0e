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


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Return the batch with ``function`` applied to each tensor.

    Containers keep their type, except that any mapping (a ``BatchEncoding``, a ``UserDict``) becomes a plain
    ``dict``. Values that are neither tensors nor containers are returned unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {
            f.name: map_tensors(function, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init
        }
        return dataclasses.replace(batch, **changes)
    if isinstance(batch, tuple):
        items = [map_tensors(function, item) for item in batch]
        # A named tuple takes its fields as separate arguments.
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [map_tensors(function, item) for item in batch]
    return batch


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


def take_rows(batch: Batch, rows: slice | Sequence[int]) -> Batch:
    """Return the samples ``rows`` of a batch."""
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, batch)
