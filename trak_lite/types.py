"""The shared vocabulary: shapes, blocks, layouts.

Shapes: N train rows, M targets, B samples of a batch, P parameters that gradients are kept for,
K feature width (``proj_dim``), T positions of a sequence, C checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Batch",
    "BlockSink",
    "DenseBlock",
    "FactoredBlock",
    "FeatureLayout",
    "GradientBlock",
    "LookupBlock",
    "OutputTerms",
    "ParameterShapes",
    "Segment",
    "SummedBlock",
    "num_entries",
    "samples_of",
]

Batch: TypeAlias = Any
"""A tuple, list, mapping, dataclass or tensor whose tensors all have the samples on axis 0."""

ParameterShapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of the parameters that gradients are kept for, by canonical name, in model order."""


def num_entries(parameters: ParameterShapes) -> int:
    """Return P, the number of gradient entries per sample.

    Example:
        >>> num_entries({"weight": (3, 4), "bias": (3,)})
        15
    """
    return sum(math.prod(shape) for shape in parameters.values())


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """Per-sample gradients of one parameter."""

    name: str
    """Canonical parameter name (the first in ``named_parameters()`` order where weights are tied)."""
    grad: Tensor
    """``(b, *parameter.shape)``, one row per sample."""
    start: int = 0
    """Row of the batch that ``grad[0]`` belongs to; blocks of a chunked computer cover ``start:start + b``."""

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.grad.shape[0]

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, parameter.numel())``."""
        return self.grad.reshape(self.grad.shape[0], math.prod(self.grad.shape[1:]))


@dataclass(frozen=True, slots=True)
class FactoredBlock:
    """Per-sample gradients of one matrix parameter, kept as ``sum_t output_grads[t] (x) inputs[t]``."""

    name: str
    """Canonical parameter name; the parameter has shape ``(d_out, d_in)``."""
    inputs: Tensor
    """``(b, T, d_in)`` what the layer read."""
    output_grads: Tensor
    """``(b, T, d_out)`` gradient with respect to what the layer wrote."""
    start: int = 0
    """Row of the batch that sample 0 of the block belongs to."""

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.inputs.shape[0]

    def dense(self) -> Tensor:
        """Contract the factors to gradient rows ``(b, d_out * d_in)``."""
        columns = self.output_grads.transpose(1, 2)
        # One position is an outer product, which a batched matrix product makes at half the speed.
        rows = columns * self.inputs if self.inputs.shape[1] == 1 else columns @ self.inputs
        return rows.flatten(1)


@dataclass(frozen=True, slots=True)
class LookupBlock:
    """Per-sample gradients of a table, of which each sample read a few rows."""

    name: str
    """Canonical parameter name; the parameter has shape ``(V, d)``."""
    rows: Tensor
    """``(b, T)`` int64: the rows that were read, in ``[0, V)``; one may come again."""
    values: Tensor
    """``(b, T, d)`` gradient with respect to what was read; those of one row add up."""
    num_rows: int
    """V."""
    start: int = 0
    """Row of the batch that sample 0 of the block belongs to."""

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.rows.shape[0]

    @property
    def grad(self) -> Tensor:
        """The gradients ``(b, V, d)``, formed anew at every call."""
        count, width = self.num_samples, self.values.shape[2]
        table = self.values.new_zeros(count * self.num_rows, width)
        first = self.rows.new_full((count, 1), self.num_rows).cumsum(0) - self.num_rows
        rows, values = (first + self.rows).flatten(), self.values.flatten(0, 1)
        if table.device.type == "cpu":
            table.index_add_(0, rows, values)
        else:  # where index_add_ adds atomically, in any order, index_put_ sorts
            table.index_put_((rows,), values, accumulate=True)
        return table.view(count, self.num_rows, width)

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, V * d)``."""
        return self.grad.flatten(1)


@dataclass(frozen=True, slots=True)
class SummedBlock:
    """Per-sample gradients of a matrix that is used in two ways: the sum of what each of them gives."""

    name: str
    """Canonical parameter name."""
    parts: tuple[FactoredBlock | LookupBlock, ...]
    """At least one, all of these samples, each under this name."""

    @property
    def start(self) -> int:
        """Row of the batch that sample 0 of the block belongs to."""
        return self.parts[0].start

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.parts[0].num_samples

    @property
    def grad(self) -> Tensor:
        """The gradients ``(b, d_out * d_in)``, formed anew at every call."""
        return self.dense()

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, d_out * d_in)``."""
        total = self.parts[0].dense()
        for part in self.parts[1:]:
            total += part.dense()
        return total


GradientBlock: TypeAlias = DenseBlock | FactoredBlock | LookupBlock | SummedBlock
"""Per-sample gradients of one parameter, in whichever form the layer gives them."""

BlockSink: TypeAlias = Callable[[GradientBlock], None]
"""Takes blocks as they come; a block may be freed as soon as the call returns."""


def samples_of(block: GradientBlock, samples: slice | Sequence[int]) -> GradientBlock:
    """Return some samples of a block in the block's own form; a list of them is copied.

    Args:
        block: Any block.
        samples: Which of its samples, counted from its first.

    Returns:
        A block that starts at row 0.
    """
    if isinstance(block, SummedBlock):
        return SummedBlock(block.name, tuple(_part_of(part, samples) for part in block.parts))
    if isinstance(block, DenseBlock):
        return DenseBlock(block.name, block.grad[samples])
    return _part_of(block, samples)


def _part_of(
    block: FactoredBlock | LookupBlock, samples: slice | Sequence[int]
) -> FactoredBlock | LookupBlock:
    if isinstance(block, FactoredBlock):
        return FactoredBlock(block.name, block.inputs[samples], block.output_grads[samples])
    return LookupBlock(block.name, block.rows[samples], block.values[samples], block.num_rows)


class OutputTerms(NamedTuple):
    """What one forward pass of a model output function gives per sample, each of shape ``(B,)``."""

    output: Tensor
    """f(z): the scalar that is attributed; carries the autograd graph."""
    out_to_loss_grad: Tensor
    """q(z) = -dL/df, detached."""
    loss_curvature: Tensor
    """w(z) = d2L/df2, detached."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns ``start:stop`` of a feature row that share one kernel."""

    name: str
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """How the K columns of a feature row divide into segments, in order and without gaps."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        """Refuse gaps, overlaps and empty segments."""
        column = 0
        for segment in self.segments:
            if segment.start != column or segment.stop <= segment.start:
                raise ValueError(f"Segment {segment} does not start at column {column} or is empty.")
            column = segment.stop

    @classmethod
    def joint(cls, width: int) -> FeatureLayout:
        """One segment: all parameters summed into the same ``width`` numbers (TRAK's layout)."""
        return cls((Segment("joint", 0, width),))

    @property
    def width(self) -> int:
        """Feature width K."""
        return self.segments[-1].stop if self.segments else 0

    def to_json(self) -> list[list[str | int]]:
        """Return ``[[name, start, stop], ...]`` for the manifest."""
        return [[s.name, s.start, s.stop] for s in self.segments]

    @classmethod
    def from_json(cls, rows: list[list[Any]]) -> FeatureLayout:
        """Read what :meth:`to_json` wrote."""
        return cls(tuple(Segment(str(name), int(start), int(stop)) for name, start, stop in rows))
