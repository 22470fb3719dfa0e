r"""Units: parameters that share one pair of Kronecker factors, such as the weight and bias of a layer; their gradients.

A bias is the weight of an additional input that is always 1 (the homogeneous coordinate of Martens & Grosse,
arXiv:1503.05671, section 2.1), so a weight ``(d_out, d_in)`` and its bias are one matrix ``(d_out, d_in + 1)``.

In the first pass of a fit :class:`UnitSums` sums the two factors of every unit over rows and positions. For a linear
layer they are :math:`\sum a a^\top` of its inputs and :math:`\sum g g^\top` of its output gradients; for a
convolution the inputs are patches, and both sums also go over positions (Grosse & Martens, arXiv:1602.01407). For a
parameter without factored gradients, the squares of its gradients are summed per entry.

Shapes: b samples, a unit's matrix ``(rows, width)``.
Numerics: products in the gradients' dtype, at least float32; sums in float64 where the device has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from trak_lite.core.devices import add_at_, precise, wide_dtype
from trak_lite.errors import InvalidInputError
from trak_lite.featurizing.gradient_norms import sums_by_row
from trak_lite.modelout_functions.language_modeling import IGNORED
from trak_lite.projectors._base import sample_pieces
from trak_lite.types import Batch, DenseBlock, FactoredBlock, GradientBlock, LookupBlock, ParameterShapes

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ENTRY_BYTES = 16
"""Of a gradient entry that is formed, and of what is computed from it."""
_SAME = 1e-3
"""Relative difference up to which the gradient of a bias equals the sum of the weight's output gradients."""


def sample_slices(num_samples: int, entries: int) -> Iterator[slice]:
    """Return slices of samples, such that gradients of ``entries`` numbers per sample fit into memory."""
    return sample_pieces(num_samples, _ENTRY_BYTES * entries)


@dataclass(frozen=True, slots=True)
class Unit:
    """One kept parameter as a matrix, or a layer's weight and bias as one matrix."""

    weight: str
    """Canonical name."""
    rows: int
    """d_out: the first axis of the weight; 1 for a parameter with fewer than two axes."""
    columns: int
    """d_in: all other axes of the weight together, without the bias."""
    bias: str | None = None
    """Canonical name of the bias, the last column of the matrix; ``None`` for a unit without one."""
    has_gaps: bool = True
    """Whether positions with zero input and zero output gradient may be padding, and are not counted."""

    @property
    def width(self) -> int:
        """Columns of the matrix, including the column of the bias."""
        return self.columns + (self.bias is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def apart(self) -> tuple[Unit, ...]:
        """Return the weight and the bias as separate units."""
        alone = replace(self, bias=None)
        return (alone,) if self.bias is None else (alone, Unit(self.bias, 1, self.rows))


def find_units(model: nn.Module, parameters: ParameterShapes) -> tuple[Unit, ...]:
    """Return the units of all kept parameters; every parameter is in exactly one unit.

    A bias is joined with its weight if both belong to one linear or convolution layer only. Every other parameter is a
    separate unit.

    Example:
        >>> find_units(nn.Linear(3, 2), {"weight": (2, 3), "bias": (2,)})
        (Unit(weight='weight', rows=2, columns=3, bias='bias', has_gaps=True),)
    """
    names = {id(p): name for name, p in model.named_parameters() if name in parameters}
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    units: dict[str, Unit] = {}
    for module in model.modules():
        if not isinstance(module, _LAYERS):
            continue
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if weight is None or id(weight) not in names:
            continue
        alone = bias is not None and owners[id(weight)] == owners[id(bias)] == 1
        shape = tuple(weight.shape)
        units[names[id(weight)]] = Unit(
            names[id(weight)],
            shape[0],
            math.prod(shape[1:]),
            names.get(id(bias)) if alone else None,
            has_gaps=isinstance(module, nn.Linear),
        )
    joined = {unit.bias for unit in units.values()}
    matrices = {name: shape if len(shape) >= 2 else (1, *shape) for name, shape in parameters.items()}
    return tuple(
        units.get(name) or Unit(name, shape[0], math.prod(shape[1:]))
        for name, shape in matrices.items()
        if name not in joined
    )


@final
@dataclass(frozen=True, slots=True)
class UnitGradient:
    """Gradients of a unit's matrix for some samples."""

    unit: Unit
    block: GradientBlock
    """Block of the weight."""
    bias: Tensor | None
    """Gradient of the bias ``(b, rows)``; ``None`` for a factored block, whose output gradients sum up to it."""

    def matrices(self, samples: slice) -> Tensor:
        """Return the gradients ``(b, rows, width)`` of some of the samples."""
        part = self.block.samples(samples)
        grads = precise(part.dense()).reshape(part.num_samples, self.unit.rows, self.unit.columns)
        if self.unit.bias is None:
            return grads
        if isinstance(part, FactoredBlock):
            last = precise(part.output_grads).sum(1)
        else:
            last = grads.new_zeros(grads.shape[:2]) if self.bias is None else precise(self.bias[samples])
        return torch.cat([grads, last.unsqueeze(2)], 2)


@final
class GradientJoiner:
    """A block sink that joins the weight and bias blocks of a unit."""

    def __init__(self, units: Sequence[Unit], take: Callable[[UnitGradient], None]) -> None:
        """Call ``take`` with the gradients of a unit for each chunk of samples; other parameters are ignored."""
        self._units = {name: unit for unit in units for name in unit.names}
        self._take = take
        self._waiting: dict[tuple[Unit, int], GradientBlock] = {}
        self._complete: set[tuple[Unit, int]] = set()

    def add(self, block: GradientBlock) -> None:
        """Take one block of a batch."""
        unit = self._units.get(block.name)
        if unit is None:
            return
        key = (unit, block.start)
        # The output gradients of a factored block sum up to the gradient of the bias.
        if unit.bias is None or isinstance(block, FactoredBlock):
            self._complete.add(key)
            self._waiting.pop(key, None)
            self._take(UnitGradient(unit, block, None))
        elif key in self._waiting:
            other = self._waiting.pop(key)
            weight, bias = (other, block) if block.name == unit.bias else (block, other)
            self._take(UnitGradient(unit, weight, bias.dense()))
        elif key not in self._complete:
            self._waiting[key] = block

    def finish(self) -> None:
        """Pass on blocks without a partner, with zeros for the missing one, and reset for the next batch."""
        waiting, self._waiting = self._waiting, {}
        self._complete.clear()
        for (unit, start), block in waiting.items():
            if block.name == unit.weight:
                self._take(UnitGradient(unit, block, None))
                continue
            bias = block.dense()
            zeros = bias.new_zeros(()).expand(len(bias), unit.rows, unit.columns)
            self._take(UnitGradient(unit, DenseBlock(unit.weight, zeros, start), bias))


@final
@dataclass(slots=True, eq=False)
class UnitSums:
    """Sums of one unit in the first pass, which start at zero."""

    unit: Unit
    max_side: int
    """A longer side has only its diagonal summed. If both sides are longer, squares of gradients are summed."""
    num_positions: float = 0.0
    outputs: Tensor | None = None
    """``(rows, rows)``, or ``(rows,)`` for a long side; ``None`` if there are no factors."""
    inputs: Tensor | None = None
    """``(width, width)`` or ``(width,)``."""
    squares: Tensor | None = None
    """``(rows, columns)`` for gradients without factors."""
    bias_squares: Tensor | None = None
    """``(1, rows)``."""
    dtype: torch.dtype = torch.float32
    _gap: Tensor | None = None
    """Sum of the weight's output gradients minus that of the gradients of the bias, ``(rows,)``."""
    _size: Tensor | float = 0.0
    """Sum of the absolute output gradients."""

    @property
    def is_factored(self) -> bool:
        """Whether the gradients are factored; raises if they are in some blocks and dense in others."""
        if self.inputs is not None and self.squares is not None and bool(self.squares.any()):
            raise InvalidInputError(
                f"The gradients of {self.unit.weight!r} are factored in some blocks and dense in others, which one "
                "pair of factors cannot represent. Use batches of one structure."
            )
        return self.inputs is not None

    @property
    def is_joint(self) -> bool:
        """Whether the gradient of the bias is the sum of the weight's output gradients, so both are one matrix."""
        if self.unit.bias is None or not self.is_factored or self._gap is None:
            return False
        return bool((self._gap.abs() <= _SAME * self._size).all())

    @torch.no_grad()
    def add(self, block: GradientBlock, masks: Sequence[Tensor] = ()) -> None:
        """Add the gradients of the weight or of the bias of some samples; see :func:`position_masks`."""
        if block.name == self.unit.bias:
            self._add_bias(block)
        elif (
            isinstance(block, FactoredBlock)
            # Factors of other shapes are not factors of the matrix (rows, columns) of the unit.
            and (block.output_grads.shape[2], block.inputs.shape[2]) == (self.unit.rows, self.unit.columns)
            and min(self.unit.rows, self.unit.width) <= self.max_side
        ):
            self._add_factors(block, masks)
        else:
            self._add_squares(block)

    def _add_factors(self, block: FactoredBlock, masks: Sequence[Tensor]) -> None:
        x, g = precise(block.inputs), precise(block.output_grads)
        if self.unit.has_gaps:
            x = _without_padding(x, g, [mask[block.start :][: len(x)] for mask in masks])
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        self.dtype = torch.promote_types(self.dtype, torch.promote_types(x.dtype, g.dtype))
        used = float(len(x))
        if self.unit.has_gaps and block.inputs.shape[1] > 1:  # without padding
            used = float((x.any(1) | g.any(1)).sum())
        self.num_positions += used
        if self.inputs is None or self.outputs is None:
            self.inputs = self._zeros(self.unit.width, x.device)
            self.outputs = self._zeros(self.unit.rows, g.device)
        _add_second_moments(self.outputs, g)
        _add_second_moments(self.inputs, x)
        if self.unit.bias is not None:
            # The second moments of a column of ones at the end of the rows.
            if self.inputs.dim() == 2:
                self.inputs[-1, :-1] += x.sum(0)
                self.inputs[:-1, -1] += x.sum(0)
            self.inputs.view(-1)[-1] += used
            wide = self.outputs.dtype
            gap = g.sum(0, dtype=wide)
            self._gap = gap if self._gap is None else self._gap + gap
            self._size = self._size + g.abs().sum(0, dtype=wide)

    def _add_bias(self, block: GradientBlock) -> None:
        grads = precise(block.dense())
        self.dtype = torch.promote_types(self.dtype, grads.dtype)
        wide = wide_dtype(grads.device)
        squares = grads.square().sum(0, dtype=wide).unsqueeze(0)
        self.bias_squares = squares if self.bias_squares is None else self.bias_squares.add_(squares)
        total = grads.sum(0, dtype=wide)
        self._gap = -total if self._gap is None else self._gap - total

    def _add_squares(self, block: GradientBlock) -> None:
        shape = (self.unit.rows, self.unit.columns)
        none = block.samples(slice(0, 0)).dense()
        self.dtype = torch.promote_types(self.dtype, precise(none).dtype)
        if self.squares is None:
            wide = wide_dtype(none.device)
            self.squares = torch.zeros(shape, dtype=wide, device=none.device)
        if isinstance(block, LookupBlock):
            rows, sums = sums_by_row(block)
            add_at_(self.squares, 0, rows.flatten(), sums.square().flatten(0, 1).to(self.squares.dtype))
            return
        for samples in sample_slices(block.num_samples, self.squares.numel()):
            grads = precise(block.samples(samples).dense())
            self.squares += grads.square().sum(0, dtype=self.squares.dtype).reshape(shape)

    def _zeros(self, side: int, device: torch.device) -> Tensor:
        shape = (side,) if side > self.max_side else (side, side)
        return torch.zeros(shape, dtype=wide_dtype(device), device=device)


def position_masks(batch: Batch) -> list[Tensor]:
    """Return which positions of the texts of a batch are no padding, ``(B, T)``, as its masks and labels say.

    A layer computes outputs for padding too. Their gradients are zero, but its inputs would count in the factors. Of
    texts in several columns (answers that are compared), the last masks are those of all, one after the other.
    """
    columns = batch if isinstance(batch, Mapping) else {}
    named = [value for name, value in columns.items() if str(name).endswith("attention_mask")]
    masks = [mask != 0 for mask in named if isinstance(mask, Tensor) and mask.dim() == 2]
    labels = columns.get("labels")  # of a decoder, which has other lengths
    if masks and isinstance(labels, Tensor) and labels.dim() == 2 and labels.shape != masks[0].shape:
        masks.append(labels != IGNORED)
    together = [torch.cat(part, 1) for part in (masks, masks[::-1])] if len(masks) > 1 else []
    return [*masks, *together]


def _without_padding(inputs: Tensor, grads: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Return the inputs ``(b, T, d)`` with zeros at the padding, by the first mask that fits the output gradients."""
    used, kept = grads.any(2), None
    for mask in reversed(masks):
        if mask.shape == used.shape:
            is_fit = ~(used & ~mask).any()
            kept = torch.where(is_fit, mask, torch.ones_like(mask) if kept is None else kept)
    return inputs if kept is None else inputs.masked_fill(~kept.unsqueeze(2), 0)


def _add_second_moments(total: Tensor, rows: Tensor) -> None:
    """Add the second moments of rows ``(p, d)`` to the first d entries of each axis of ``total``, full or diagonal."""
    width = rows.shape[1]
    if total.dim() == 1:
        total[:width] += rows.square().sum(0, dtype=total.dtype)
    else:
        total[:width, :width] += rows.T @ rows
