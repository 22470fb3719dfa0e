"""Shared types: gradient blocks, model output terms and feature layouts.

Shapes: N train rows, M targets, B samples of a batch, P gradient entries per sample,
K feature width (``proj_dim``), T positions of a sequence, C checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

__all__ = [
    "Batch",
    "BlockSink",
    "DenseBlock",
    "FactoredBlock",
    "FeatureLayout",
    "GradientBlock",
    "LookupBlock",
    "OutputTerms",
    "ParameterChoice",
    "ParameterShapes",
    "Segment",
    "SingleBlock",
    "SummedBlock",
    "num_entries",
    "scaled_rows",
]

Batch: TypeAlias = Any
"""A tuple, list, mapping, dataclass or tensor whose tensors all have the samples on axis 0."""

ParameterShapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of the differentiated parameters by canonical name, in model order."""

ParameterChoice: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]
"""Parameters by name or pattern (``"layers.*.weight"``), or by the class of the module that owns them."""


def num_entries(parameters: ParameterShapes) -> int:
    """Return P, the number of gradient entries per sample.

    Example:
        >>> num_entries({"weight": (3, 4), "bias": (3,)})
        15
    """
    return sum(math.prod(shape) for shape in parameters.values())


def by_name(gradients: Tensor, parameters: ParameterShapes) -> dict[str, Tensor]:
    """Return gradients ``(m, P)`` as views ``(m, *shape)`` by parameter name, parameters in model order."""
    sizes = [math.prod(shape) for shape in parameters.values()]
    parts = gradients.split(sizes, 1)  # type: ignore[no-untyped-call]  # torch has no types here
    pairs = zip(parameters.items(), parts, strict=True)
    return {name: part.reshape(len(part), *shape) for (name, shape), part in pairs}


class _SingleBlock:
    """Per-sample gradients of one parameter, in the form that its layer produces: no sum of blocks."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """The block itself; the terms of a :class:`SummedBlock`."""
        return (self,)

    _carrier: ClassVar[str]
    """Name of the tensor ``(b, ...)`` of which the gradients are a linear function."""

    @property
    def carrier(self) -> Tensor:
        """The tensor ``(b, ...)`` of which the gradients are a linear function."""
        return cast("Tensor", getattr(self, self._carrier))

    @property
    def num_samples(self) -> int:
        """Number of samples b in this block."""
        return self.carrier.shape[0]

    def _tensors(self) -> dict[str, Tensor]:
        values = {one.name: getattr(self, one.name) for one in fields(cast("Any", self))}
        return {name: value for name, value in values.items() if hasattr(value, "detach")}

    def samples(self, which: slice | Sequence[int]) -> Any:
        """Return some samples as a block of the same type with ``start=0``; a slice gives views, a list copies."""
        changes: dict[str, Any] = {name: value[which] for name, value in self._tensors().items()}
        return replace(cast("Any", self), start=0, **changes)

    def scaled(self, factors: Tensor) -> Any:
        """Return the block with the gradient of sample i times ``factors[i]``, in the block's dtype."""
        return replace(cast("Any", self), **{self._carrier: scaled_rows(self.carrier, factors)})

    def moved(self, device: str | torch.device | None) -> Any:
        """Return the block on a device (``None`` stays) and without its graph."""
        device = device or self.carrier.device
        changes = {name: value.detach().to(device) for name, value in self._tensors().items()}
        return replace(cast("Any", self), **changes)

    def by_entry(self, factors: Tensor) -> LookupBlock | None:
        """Return the block with entry p of every gradient times ``factors[p]``, in the parameter's shape.

        ``None`` if the gradients have to be formed for it.
        """
        return None

    def narrowed(self, columns: Tensor) -> tuple[Any, Tensor]:
        """Return the block and ``columns`` ``(m, parameter.numel())`` without entries that all gradients lack."""
        return self, columns


@dataclass(frozen=True, slots=True)
class DenseBlock(_SingleBlock):
    """Per-sample gradients of one parameter."""

    _carrier: ClassVar[str] = "grad"

    name: str
    """Canonical parameter name (the first in ``named_parameters()`` order where weights are tied)."""
    grad: Tensor
    """``(b, *parameter.shape)``, one row per sample."""
    start: int = 0
    """Batch row of ``grad[0]``; a block covers rows ``start:start + b`` if the computer works in chunks."""

    def dense(self) -> Tensor:
        """Return the gradient rows ``(b, parameter.numel())``."""
        return self.grad.reshape(self.grad.shape[0], math.prod(self.grad.shape[1:]))


@dataclass(frozen=True, slots=True)
class FactoredBlock(_SingleBlock):
    """Per-sample gradients of one matrix parameter, stored as factors: ``sum_t output_grads[t] (x) inputs[t]``."""

    _carrier: ClassVar[str] = "output_grads"

    name: str
    """Canonical parameter name; the parameter has shape ``(d_out, d_in)``."""
    inputs: Tensor
    """``(b, T, d_in)`` inputs of the layer."""
    output_grads: Tensor
    """``(b, T, d_out)`` gradient with respect to the layer's output."""
    start: int = 0
    """Batch row of the block's first sample."""

    def dense(self) -> Tensor:
        """Contract the factors to gradient rows ``(b, d_out * d_in)``."""
        columns = self.output_grads.transpose(1, 2)
        # With one position this is an outer product, for which a batched matrix product takes twice as long.
        rows = columns * self.inputs if self.inputs.shape[1] == 1 else columns @ self.inputs
        return rows.flatten(1)


@dataclass(frozen=True, slots=True)
class LookupBlock(_SingleBlock):
    """Per-sample gradients of an embedding table; each sample looks up a few of its rows."""

    _carrier: ClassVar[str] = "values"

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

    def by_entry(self, factors: Tensor) -> LookupBlock:
        """Multiply the values: the factor of a repeated row distributes over their sum."""
        return replace(self, values=self.values * factors[self.rows])

    def narrowed(self, columns: Tensor) -> tuple[LookupBlock, Tensor]:
        """Keep the U rows of the table that were looked up: ``(m, U * d)``."""
        distinct, rows = self.rows.unique(return_inverse=True)  # type: ignore[no-untyped-call]  # torch has no types here
        kept = columns.view(len(columns), self.num_rows, -1)[:, distinct].flatten(1)
        return replace(self, rows=rows, num_rows=len(distinct)), kept


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

    def samples(self, which: slice | Sequence[int]) -> SummedBlock:
        """Return some samples."""
        return SummedBlock(self.name, tuple(part.samples(which) for part in self.parts))

    def by_entry(self, factors: Tensor) -> None:
        """Return ``None``: the gradients have to be formed."""

    def scaled(self, factors: Tensor) -> SummedBlock:
        """Scale all parts."""
        return SummedBlock(self.name, tuple(part.scaled(factors) for part in self.parts))


def scaled_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Return row i of ``rows``, ``(b, ...)``, times ``factors[i]``, in the dtype of the rows."""
    # Multiply in the factors' dtype: 1 / norm may overflow half precision.
    shaped = factors[: len(rows)].to(rows.device).view(-1, *[1] * (rows.dim() - 1))
    return (rows * shaped).to(rows.dtype)


SingleBlock: TypeAlias = DenseBlock | FactoredBlock | LookupBlock
"""A block that is not a sum of blocks."""

GradientBlock: TypeAlias = DenseBlock | FactoredBlock | LookupBlock | SummedBlock
"""Per-sample gradients of one parameter, in the form that its layer produces."""

BlockSink: TypeAlias = Callable[[GradientBlock], None]
"""Callback that receives each block when it is computed; a block may be freed as soon as the call returns."""


def collect(block: GradientBlock, rows: dict[str, Tensor], num_samples: int) -> None:
    """Put the detached gradients of a block into the ``(num_samples, P)`` of its parameter; other rows are zero."""
    gradients = block.dense().detach()
    if len(gradients) == num_samples:
        rows[block.name] = gradients
        return
    if block.name not in rows:
        rows[block.name] = gradients.new_zeros(num_samples, gradients.shape[1])
    rows[block.name][block.start : block.start + len(gradients)] = gradients


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
