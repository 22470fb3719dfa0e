"""Marks of the columns of batches: which lists, tuples and arrays are divided with the samples, and which are not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from trak_lite.data.batches import (
    ArrayColumn,
    ListColumn,
    TupleColumn,
    flatten_batch,
    holds_tensors,
    is_column,
    is_sized,
    is_sparse,
    map_tensors,
    parts_of,
)
from trak_lite.errors import InvalidInputError, refuse_signal
from trak_lite.types import Batch


@final
class ColumnMarks:
    """Marks the columns of the batches of one source, so that they are divided with the samples.

    The first batch of several samples decides what a column is, and not the length in each batch: a list that all
    samples share has as many entries as some batch has samples.
    """

    def __init__(self) -> None:
        self._places: frozenset[int] | None = None
        """Of the columns among the lists, tuples and arrays of a batch; ``None`` before a batch of several samples."""

    def marked(self, batch: Batch, alone: Callable[[], Batch | None] = lambda: None) -> Batch:
        """Return the batch with its columns marked; an invalid batch is returned as it is.

        ``alone`` returns the first sample as a batch of its own, if there is one to compare with.

        Raises:
            InvalidInputError: If a tensor is sparse, all samples share one, or each sample has tensors of its own.
        """
        leaves, sized = parts_of(batch)
        sparse = next((leaf for leaf in leaves if leaf.layout != torch.strided and is_sparse(leaf)), None)
        if sparse is not None:
            raise InvalidInputError(
                f"The batch holds a sparse tensor ({sparse.layout}) of shape {tuple(sparse.shape)}, whose samples "
                "cannot be taken by their numbers. Make it dense in collate (tensor.to_dense()), and sparse again in "
                "the model if it needs that."
            )
        size = len(leaves[0]) if leaves else 0
        if any(len(leaf) != size for leaf in leaves):
            return batch
        if self._places is None and size > 1:
            one = alone()
            if one is not None:
                _refuse_shared(leaves, parts_of(one)[0])
                _refuse_lists(batch, one, size)
            of_one = [] if one is None else parts_of(one)[1]
            comparable = len(of_one) == len(sized)
            self._places = frozenset(
                index
                for index, value in enumerate(sized)
                if len(value) == size and (not comparable or len(of_one[index]) == 1)
            )
        # Of one sample alone, what has one entry counts as a column.
        indices = range(len(sized)) if self._places is None else self._places
        if not indices:
            return batch
        counter = itertools.count()

        def mark(value: Any) -> Any:
            if not is_sized(value) or next(counter) not in indices or len(value) != size:
                return value
            if isinstance(value, np.ndarray):
                return value.view(ArrayColumn)
            return ListColumn(value) if isinstance(value, list) else TupleColumn(value)

        return map_tensors(lambda tensor: tensor, batch, mark)


def _refuse_shared(leaves: Sequence[Tensor], of_one: Sequence[Tensor]) -> None:
    size = len(leaves[0])
    if len(leaves) != len(of_one):  # a collate function may leave parts out
        return
    shared = [leaf for leaf, single in zip(leaves, of_one, strict=True) if leaf.shape == single.shape]
    if shared:
        raise InvalidInputError(
            f"The batch of {size} samples holds a tensor of shape {tuple(shared[0].shape)}, and so does a batch of one "
            "sample: all samples share it. Axis 0 of every tensor of a batch is the sample axis. Keep what samples "
            "share in the model or the task, or repeat it for every sample."
        )


def _refuse_lists(batch: Batch, one: Batch, size: int, name: str = "batch") -> None:
    """Raise if a list holds the tensors of one sample in each entry, though its tensors seem to fit the batch."""
    entries, of_one = _entries(batch, name) or {}, _entries(one, name) or {}
    grows = is_sized(batch) and len(entries) == size and len(of_one) == 1
    # The one sample's tensors would have one row each; numbers, which have no axis, are not divided.
    if grows and {len(leaf) for leaf in flatten_batch(one)[0]} == {size}:
        raise InvalidInputError(
            f"{name} is a {type(batch).__name__} of {size} entries that hold the tensors of one sample each, in a "
            f"batch of {size} samples. Such entries are not divided with the samples: axis 0 of every tensor is the "
            "sample axis. Pad and stack them in collate, one tensor for all samples, and leave the padding out in the "
            "model."
        )
    for key in entries.keys() & of_one.keys():
        _refuse_lists(entries[key], of_one[key], size, key)


def undivided(batch: Batch) -> list[str]:
    """Return the names of what has as many entries as samples, and is not divided with them: text, bytes, a deque."""
    size, names = next((len(leaf) for leaf in flatten_batch(batch)[0]), 0), list[str]()

    def walk(value: Any, name: str) -> None:
        entries = _entries(value, name)
        if entries is not None:
            for key, entry in entries.items():
                walk(entry, key)
        elif not isinstance(value, Tensor) and not is_column(value):
            try:
                if len(value) == size > 1:
                    names.append(f"{name} ({type(value).__name__})")
            except Exception as error:  # a class without a length
                refuse_signal(error)

    walk(batch, "batch")
    return names


def _entries(value: Any, name: str) -> dict[str, Any] | None:
    """Return the entries of a container that may hold tensors, by their names; ``None`` of anything else."""
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": entry for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f"{name}.{f.name}": getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list) and holds_tensors(value):
        return {f"{name}[{index}]": entry for index, entry in enumerate(value)}
    return None
