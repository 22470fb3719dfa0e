"""Batch axes of tensors, found by comparing two batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The axis of a tensor that holds the B samples, with ``multiple`` entries each."""

    axis: int
    multiple: int = 1
    """Entries per sample on the axis: 1 for a plain batch axis, T if tokens are flattened into it."""
    sample_major: bool = True
    """Whether a flattened axis is ``(B, T)``, samples together, or ``(T, B)``."""

    def for_shape(self, shape: Sequence[int], num_samples: int) -> BatchAxis | None:
        """Return this axis of a tensor of this shape for ``num_samples``, or ``None`` if they do not fit."""
        if self.axis >= len(shape):
            return None
        if self.multiple == 1:
            return self if shape[self.axis] == num_samples else None
        multiple, rest = divmod(shape[self.axis], num_samples)
        if rest:
            return None
        return self if multiple == self.multiple else replace(self, multiple=multiple)


def batch_axis(two: Sequence[int], three: Sequence[int]) -> BatchAxis | str | None:
    """Find the batch axis from a tensor's shapes in a batch of two and in a batch of three equal samples.

    Returns:
        The batch axis, ``None`` if the shape does not depend on the batch, or a message why there is none.

    Example:
        >>> batch_axis((2, 7), (3, 7))
        BatchAxis(axis=0, multiple=1, sample_major=True)
        >>> batch_axis((5, 14), (5, 21)).multiple
        7
        >>> batch_axis((2, 2), (3, 3))
        'more than one axis of its shape (2, 2) grows with the batch'
    """
    if len(two) != len(three):
        return f"its number of axes depends on the batch size ({tuple(two)} and {tuple(three)})"
    grown = [axis for axis, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if not grown:
        return None
    if len(grown) > 1:
        return f"more than one axis of its shape {tuple(two)} grows with the batch"
    (axis,) = grown
    multiple = three[axis] - two[axis]
    if multiple < 1 or two[axis] != 2 * multiple:
        return f"its axis {axis} has {two[axis]} entries for 2 samples and {three[axis]} for 3"
    return BatchAxis(axis, multiple)


def by_sample(tensor: Tensor, axis: BatchAxis, num_samples: int) -> Tensor:
    """Return a view ``(B, *sample)``; ``sample`` has an axis of size ``multiple`` in place of the batch axis.

    Example:
        >>> by_sample(torch.zeros(4, 6, 5), BatchAxis(1, multiple=2), 3).shape
        torch.Size([3, 4, 2, 5])
    """
    if axis.axis == 0 and axis.sample_major:
        if axis.multiple == 1:
            return tensor.unsqueeze(1)  # a fraction of the time
        return torch.unflatten(tensor, 0, (num_samples, axis.multiple))
    sizes = (num_samples, axis.multiple) if axis.sample_major else (axis.multiple, num_samples)
    return torch.unflatten(tensor, axis.axis, sizes).movedim(axis.axis + (not axis.sample_major), 0)


def sum_to_parameter(grads: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum ``(B, *sample)`` over the sample axes that broadcasting added to a tensor of this shape.

    Example:
        >>> sum_to_parameter(torch.ones(2, 3, 4, 5), (4, 1)).shape
        torch.Size([2, 4, 1])
    """
    extra = grads.dim() - 1 - len(shape)
    if extra:
        grads = grads.sum(tuple(range(1, 1 + extra)))
    return grads.sum_to_size(len(grads), *shape)
