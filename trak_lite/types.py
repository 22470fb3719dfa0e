"""Shared types: gradient blocks, model output terms and feature layouts.

Shapes: N train rows, M targets, B samples of a batch, P gradient entries per sample,
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
"""Shapes of the differentiated parameters by canonical name, in model order."""


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
    """Batch row of ``grad[0]``; a block covers rows ``start:start + b`` if the computer works in chunks."""

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.grad.shape[0]

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, parameter.numel())``."""
        return self.grad.reshape(self.grad.shape[0], math.prod(self.grad.shape[1:]))


@dataclass(frozen=True, slots=True)
class FactoredBlock:
    """Per-sample gradients of one matrix parameter, stored as factors: ``sum_t output_grads[t] (x) inputs[t]``."""

    name: str
    """Canonical parameter name; the parameter has shape ``(d_out, d_in)``."""
    inputs: Tensor
    """``(b, T, d_in)`` inputs of the layer."""
    output_grads: Tensor
    """``(b, T, d_out)`` gradient with respect to the layer's output."""
    start: int = 0
    """Batch row of the block's first sample."""

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.inputs.shape[0]

    def dense(self) -> Tensor:
        """Contract the factors to gradient rows ``(b, d_out * d_in)``."""
        columns = self.output_grads.transpose(1, 2)
        # With one position this is an outer product, for which a batched matrix product takes twice as long.
        rows = columns * self.inputs if self.inputs.shape[1] == 1 else columns @ self.inputs
        return rows.flatten(1)


@dataclass(frozen=True, slots=True)
class LookupBlock:
    """Per-sample gradients of an embedding table; each sample looks up a few of its rows."""

    name: str
    """Canonical parameter name; the parameter has shape ``(V, d)``."""
    rows: Tensor
    """``(b, T)`` int64 rows that were looked up, in ``[0, V)``; duplicates are allowed."""
    values: Tensor
    """``(b, T, d)`` gradients with respect to the looked-up vectors; those of a repeated row are summed."""
    num_rows: int
    """V, rows of the table."""
    start: int = 0
    """Batch row of the block's first sample."""

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.rows.shape[0]

    @property
    def grad(self) -> Tensor:
        """The dense gradients ``(b, V, d)``, recomputed at every access."""
        count, width = self.num_samples, self.values.shape[2]
        table = self.values.new_zeros(count * self.num_rows, width)
        first = self.rows.new_full((count, 1), self.num_rows).cumsum(0) - self.num_rows
        rows, values = (first + self.rows).flatten(), self.values.flatten(0, 1)
        if table.device.type == "cpu":
            table.index_add_(0, rows, values)
        else:  # on CUDA index_add_ sums in nondeterministic order; index_put_ sorts the indices first
            table.index_put_((rows,), values, accumulate=True)
        return table.view(count, self.num_rows, width)

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, V * d)``."""
        return self.grad.flatten(1)


@dataclass(frozen=True, slots=True)
class SummedBlock:
    """Per-sample gradients of a matrix with several uses (a tied embedding): the sum over its uses."""

    name: str
    """Canonical parameter name."""
    parts: tuple[FactoredBlock | LookupBlock, ...]
    """At least one block; all have the same samples and this ``name``."""

    @property
    def start(self) -> int:
        """Batch row of the block's first sample."""
        return self.parts[0].start

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.parts[0].num_samples

    @property
    def grad(self) -> Tensor:
        """The dense gradients ``(b, d_out * d_in)``, recomputed at every access."""
        return self.dense()

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, d_out * d_in)``."""
        total = self.parts[0].dense()
        for part in self.parts[1:]:
            total += part.dense()
        return total


GradientBlock: TypeAlias = DenseBlock | FactoredBlock | LookupBlock | SummedBlock
"""Per-sample gradients of one parameter, in the form that its layer produces."""

BlockSink: TypeAlias = Callable[[GradientBlock], None]
"""Callback that receives each block when it is computed; a block may be freed as soon as the call returns."""


def samples_of(block: GradientBlock, samples: slice | Sequence[int]) -> GradientBlock:
    """Return some samples of a block as a block of the same type. A slice gives views, a list gives copies.

    Args:
        block: Any block.
        samples: Indices of the samples within the block.

    Returns:
        A block with ``start=0``.
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
    """Per-sample results of a model output function, each of shape ``(B,)``."""

    output: Tensor
    """f(z), the attributed scalar; carries the autograd graph."""
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
        """Raise ``ValueError`` for gaps, overlaps and empty segments."""
        column = 0
        for segment in self.segments:
            if segment.start != column or segment.stop <= segment.start:
                raise ValueError(f"Segment {segment} does not start at column {column} or is empty.")
            column = segment.stop

    @classmethod
    def joint(cls, width: int) -> FeatureLayout:
        """Return a layout of one segment: all parameters are summed into the same columns (TRAK's layout)."""
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
        """Return the layout that :meth:`to_json` serialised."""
        return cls(tuple(Segment(str(name), int(start), int(stop)) for name, start, stop in rows))
