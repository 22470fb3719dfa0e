"""Compares the memory that tensors read: those of a state dict may be the model's, as they are or through views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def _parts(value: Any) -> Iterator[Tensor]:
    """Yield the tensor itself, or those that it is made of: shards, the values and scales of torchao."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def _is_known(part: Tensor) -> bool:
    """Whether a tensor says where its memory is: wrappers that hold none of their own have the address 0."""
    return part.layout is torch.strided and (part.data_ptr() != 0 or part.is_meta or part.numel() == 0)


def layout_of(value: Any) -> tuple[Any, ...] | None:
    """Return what is equal for tensors that read the same memory in the same way; ``None`` if it is not known."""
    parts = list(_parts(value))
    if not parts or not all(map(_is_known, parts)):
        return None
    return tuple((part.data_ptr(), part.dtype, part.device, part.shape, part.stride()) for part in parts)


def is_same(value: Any, other: Any) -> bool:
    """Return whether both are tensors that read the same memory in the same way."""
    return layout_of(value) is not None and layout_of(value) == layout_of(other)


def may_overlap(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether tensors on both sides may read the same memory, also through views or arrays of NumPy."""
    sides = [[part for value in side for part in _parts(value)] for side in (values, others)]
    if not all(map(_is_known, [*sides[0], *sides[1]])):
        return True
    spans = []
    for number, parts in enumerate(sides):
        for part in parts:
            memory = part.untyped_storage()
            spans.append((str(part.device), memory.data_ptr(), memory.data_ptr() + memory.nbytes(), number))
    ends: dict[tuple[str, int], int] = {}
    for device, begin, end, number in sorted(spans):
        if begin < ends.get((device, 1 - number), 0):
            return True
        ends[device, number] = max(end, ends.get((device, number), 0))
    return False
