"""Eigenbases of the factors, and gradients in eigenbasis coordinates.

Shapes: b samples, T positions, a unit's matrix ``(rows, width)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trak_lite._devices import eigh_of_positive
from trak_lite.errors import NonFiniteError
from trak_lite.featurizing.kronecker.covariances import precise, sample_slices
from trak_lite.featurizing.kronecker.units import Unit
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock

__all__ = ["Eigenbasis", "GradientJoiner", "UnitGradient", "decomposed"]


def decomposed(factor: Tensor, *, what: str) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues and eigenvectors of a factor, or the diagonal and ``None`` for a diagonal factor.

    Args:
        factor: ``(d, d)``, or ``(d,)`` for a diagonal factor.
        what: Name of the factor in messages.

    Returns:
        Values ``(d,)``, at least 0, and vectors ``(d, d)`` as columns, in the dtype and on the device of the factor.

    Raises:
        NonFiniteError: If an entry is NaN or infinite.
    """
    if not bool(factor.isfinite().all()):
        raise NonFiniteError(
            f"The sums of {what} hold NaN or infinity. Look for a sample whose gradient is not finite; gradients in "
            "float16 overflow easily."
        )
    if factor.dim() == 1:
        return factor, None
    values, vectors = eigh_of_positive((factor + factor.T) / 2)
    return values.clamp(min=0), vectors


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
@dataclass(frozen=True, slots=True, eq=False)
class Eigenbasis:
    """Coordinates in which the curvature of a unit is approximated by a diagonal."""

    unit: Unit
    outputs: Tensor | None
    """``(rows, rows)`` eigenvectors as columns; ``None`` does not rotate this side."""
    inputs: Tensor | None
    """``(width, width)`` in the same form."""

    def rotated(self, gradient: UnitGradient) -> Iterator[tuple[slice, Tensor]]:
        """Yield samples and their gradients ``(b, rows, width)`` in this basis, a few samples at a time."""
        block = gradient.block
        rows, width = self.unit.rows, self.unit.width
        for samples in sample_slices(block.num_samples, rows * width):
            if isinstance(block, FactoredBlock) and self._factors_are_cheaper(block):
                x, g = self.factors(block, samples)
                yield samples, g.transpose(1, 2) @ x
            else:
                yield samples, self._turn(gradient.matrices(samples))

    def factors(self, block: FactoredBlock, samples: slice) -> tuple[Tensor, Tensor]:
        """Return the factors ``(b, T, width)`` and ``(b, T, rows)`` of a weight and its bias in this basis."""
        x, g = precise(block.inputs[samples]), precise(block.output_grads[samples])
        if self.outputs is not None:
            g = g @ self.outputs.to(g)
        if self.inputs is None:
            ones = x.new_ones(*x.shape[:2], self.unit.width - self.unit.columns)
            return torch.cat([x, ones], 2), g
        vectors = self.inputs.to(x)
        turned = x @ vectors[: self.unit.columns]
        return (turned if self.unit.bias is None else turned.add_(vectors[-1])), g

    def back(self, matrices: Tensor) -> Tensor:
        """Transform matrices ``(b, rows, width)`` from this basis to parameter coordinates."""
        if self.outputs is not None:
            matrices = self.outputs.to(matrices) @ matrices
        return matrices if self.inputs is None else matrices @ self.inputs.to(matrices).T

    @torch.no_grad()
    def add_squares(self, gradient: UnitGradient, total: Tensor) -> None:
        """Add the squares of some samples' gradients in this basis to ``total``, ``(rows, width)``."""
        block = gradient.block
        if isinstance(block, FactoredBlock) and block.inputs.shape[1] == 1:
            # The square of an outer product is the outer product of the squares: no gradient is formed.
            x, g = self.factors(block, slice(None))
            total += g.squeeze(1).square_().T @ x.squeeze(1).square_()
            return
        for _, turned in self.rotated(gradient):
            total += turned.square_().sum(0)

    def _turn(self, matrices: Tensor) -> Tensor:
        if self.outputs is not None:
            matrices = self.outputs.to(matrices).T @ matrices
        return matrices if self.inputs is None else matrices @ self.inputs.to(matrices)

    def _factors_are_cheaper(self, block: FactoredBlock) -> bool:
        rows, width = self.unit.rows, self.unit.width
        return block.inputs.shape[1] * (rows**2 + width**2) <= rows * width * (rows + width)


@final
class GradientJoiner:
    """A block sink that joins the weight and bias blocks of a unit."""

    def __init__(self, units: Sequence[Unit], take: Callable[[UnitGradient], None]) -> None:
        """Store the arguments.

        Args:
            units: Units whose blocks are used; blocks of other parameters are ignored.
            take: Called with the gradients of a unit for each chunk of samples.
        """
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
        if unit.bias is None:
            self._take(UnitGradient(unit, block, None))
        elif isinstance(block, FactoredBlock):  # its output gradients sum up to the gradient of the bias
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
