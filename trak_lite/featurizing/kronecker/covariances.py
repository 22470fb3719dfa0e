r"""Sums the two factors of every unit over rows and positions, in the first pass of a fit.

For a linear layer the factors are :math:`\sum a a^\top` of its inputs and :math:`\sum g g^\top` of its output gradients
(Martens & Grosse, arXiv:1503.05671); for a convolution the inputs are patches, and both sums also go over positions
(Grosse & Martens, arXiv:1602.01407). For a parameter without factored gradients, the squares of its gradients are
summed per entry.

Numerics: products in the gradients' dtype, at least float32; sums in float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trak_lite._devices import add_at_, wide_dtype
from trak_lite.errors import InvalidInputError
from trak_lite.featurizing.gradient_norms import sums_by_row
from trak_lite.featurizing.kronecker.units import Unit
from trak_lite.types import FactoredBlock, GradientBlock, LookupBlock

__all__ = ["UnitSums", "precise", "sample_slices"]

_SCRATCH = 1 << 22
"""Number of gradient entries that are formed at once."""

_SAME = 1e-3
"""Relative difference up to which the gradient of a bias equals the sum of the weight's output gradients."""


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or better."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sample_slices(num_samples: int, entries: int) -> Iterator[slice]:
    """Return slices of samples, such that gradients of ``entries`` numbers per sample fit into the scratch."""
    step = max(1, _SCRATCH // max(entries, 1))
    return (slice(start, min(start + step, num_samples)) for start in range(0, num_samples, step))


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
    _apart: tuple[Tensor, Tensor] | None = None

    @property
    def is_factored(self) -> bool:
        """Whether the gradients are factored.

        Raises:
            InvalidInputError: If gradients are factored in some blocks and dense in others.
        """
        if self.inputs is not None and self.squares is not None and bool(self.squares.any()):
            raise InvalidInputError(
                f"The gradients of {self.unit.weight!r} are factored in some blocks and dense in others, which one "
                "pair of factors cannot represent. Use batches of one structure."
            )
        return self.inputs is not None

    @property
    def is_joint(self) -> bool:
        """Whether the gradient of the bias is the sum of the weight's output gradients, so both are one matrix."""
        if self.unit.bias is None or not self.is_factored or self._apart is None:
            return False
        gap, size = self._apart
        return bool((gap.abs() <= _SAME * size).all())

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        """Add the gradients of the weight or of the bias of some samples."""
        if block.name == self.unit.bias:
            self._add_bias(block)
        elif isinstance(block, FactoredBlock) and self._has_short_side(block):
            self._add_factors(block)
        else:
            self._add_squares(block)

    def _has_short_side(self, block: FactoredBlock) -> bool:
        # Factors of other shapes are not factors of the matrix (rows, columns) of the unit.
        unit = self.unit
        fits = (block.output_grads.shape[2], block.inputs.shape[2]) == (unit.rows, unit.columns)
        return fits and min(unit.rows, unit.width) <= self.max_side

    def _add_factors(self, block: FactoredBlock) -> None:
        x, g = precise(block.inputs).flatten(0, 1), precise(block.output_grads).flatten(0, 1)
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
            _add_ones(self.inputs, x.sum(0), used)
            wide = self.outputs.dtype
            self._compare(g.sum(0, dtype=wide), g.abs().sum(0, dtype=wide))

    def _add_bias(self, block: GradientBlock) -> None:
        grads = precise(block.dense())
        self.dtype = torch.promote_types(self.dtype, grads.dtype)
        wide = wide_dtype(grads.device)
        squares = grads.square().sum(0, dtype=wide).unsqueeze(0)
        self.bias_squares = squares if self.bias_squares is None else self.bias_squares.add_(squares)
        total = grads.sum(0, dtype=wide)
        self._compare(-total, torch.zeros_like(total))

    def _add_squares(self, block: GradientBlock) -> None:
        """Add the squares of the weight gradients of some samples, per entry."""
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

    def _compare(self, gap: Tensor, size: Tensor) -> None:
        if self._apart is None:
            self._apart = (torch.zeros_like(gap), torch.zeros_like(size))
        self._apart = (self._apart[0] + gap, self._apart[1] + size)


def _add_second_moments(total: Tensor, rows: Tensor) -> None:
    """Add the second moments of rows ``(p, d)`` to the first d entries of each axis of ``total``, full or diagonal."""
    width = rows.shape[1]
    if total.dim() == 1:
        total[:width] += rows.square().sum(0, dtype=total.dtype)
    else:
        total[:width, :width] += rows.T @ rows


def _add_ones(total: Tensor, rows_sum: Tensor, count: float) -> None:
    """Add to ``total`` the second moments of a column of ones at the end of the rows."""
    if total.dim() == 1:
        total[-1] += count
        return
    total[-1, :-1] += rows_sum
    total[:-1, -1] += rows_sum
    total[-1, -1] += count
