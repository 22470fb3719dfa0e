"""Eigenbases of the factors, and gradients in their coordinates.

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
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock, samples_of

__all__ = ["Eigenbasis", "GradientJoiner", "UnitGradient", "decomposed"]


def decomposed(factor: Tensor, *, what: str) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues and eigenvectors of a factor, or the diagonal and ``None`` of one that is diagonal.

    Args:
        factor: ``(d, d)``, or ``(d,)``.
        what: How messages name it.

    Returns:
        Values ``(d,)``, never below 0, and vectors ``(d, d)`` as columns, in the dtype and on the device of the factor.

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
    """The gradients of a unit's matrix for some samples."""

    unit: Unit
    block: GradientBlock
    """Of the weight."""
    bias: Tensor | None
    """``(b, rows)`` of the bias, where the block does not tell it: output gradients, summed over positions, are it."""

    def matrices(self, samples: slice) -> Tensor:
        """Return the gradients ``(b, rows, width)`` of some of the samples."""
        part = samples_of(self.block, samples)
        grads = precise(part.dense()).reshape(part.num_samples, self.unit.rows, self.unit.columns)
        if self.unit.bias is None:
            return grads
        if isinstance(part, FactoredBlock):
            last = precise(part.output_grads).sum(1)
        else:
            last = grads.new_zeros(grads.shape[:2]) if self.bias is None else precise(self.bias[samples])
        return torch.cat([grads, last.unsqueeze(2)], 2)


@final
class Eigenbasis:
    """The coordinates in which a unit's curvature is taken to be diagonal."""

    def __init__(self, unit: Unit, outputs: Tensor | None, inputs: Tensor | None) -> None:
        """Store the eigenvectors.

        Args:
            unit: The unit.
            outputs: ``(rows, rows)`` as columns; ``None`` keeps that side's own coordinates.
            inputs: ``(width, width)`` likewise.
        """
        self.unit = unit
        self.outputs = outputs
        self.inputs = inputs

    def rotated(self, gradient: UnitGradient) -> Iterator[tuple[slice, Tensor]]:
        """Yield samples and their gradients ``(b, rows, width)`` in these coordinates, a few samples at a time."""
        block = gradient.block
        rows, width = self.unit.rows, self.unit.width
        for samples in sample_slices(block.num_samples, rows * width):
            if isinstance(block, FactoredBlock) and self._factors_are_cheaper(block):
                x, g = self.factors(block, samples)
                yield samples, g.transpose(1, 2) @ x
            else:
                yield samples, self._turn(gradient.matrices(samples))

    def factors(self, block: FactoredBlock, samples: slice) -> tuple[Tensor, Tensor]:
        """Return the factors ``(b, T, width)`` and ``(b, T, rows)`` of a weight and its bias in these coordinates."""
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
        """Return matrices ``(b, rows, width)`` of these coordinates in those of the parameters."""
        if self.outputs is not None:
            matrices = self.outputs.to(matrices) @ matrices
        return matrices if self.inputs is None else matrices @ self.inputs.to(matrices).T

    def _turn(self, matrices: Tensor) -> Tensor:
        if self.outputs is not None:
            matrices = self.outputs.to(matrices).T @ matrices
        return matrices if self.inputs is None else matrices @ self.inputs.to(matrices)

    def _factors_are_cheaper(self, block: FactoredBlock) -> bool:
        rows, width = self.unit.rows, self.unit.width
        return block.inputs.shape[1] * (rows**2 + width**2) <= rows * width * (rows + width)


@final
class GradientJoiner:
    """A block sink that puts the blocks of a unit together, as they come."""

    def __init__(self, units: Sequence[Unit], take: Callable[[UnitGradient], None]) -> None:
        """Wait for blocks.

        Args:
            units: Those whose blocks are wanted; blocks of other parameters are left out.
            take: Called with every unit's gradients, for each chunk of samples.
        """
        self._units = {name: unit for unit in units for name in unit.names}
        self._take = take
        self._waiting: dict[tuple[Unit, int], GradientBlock] = {}
        self._told: set[tuple[Unit, int]] = set()

    def add(self, block: GradientBlock) -> None:
        """Take one block of a batch."""
        unit = self._units.get(block.name)
        if unit is None:
            return
        key = (unit, block.start)
        if unit.bias is None:
            self._take(UnitGradient(unit, block, None))
        elif isinstance(block, FactoredBlock):  # whose output gradients tell the bias's
            self._told.add(key)
            self._waiting.pop(key, None)
            self._take(UnitGradient(unit, block, None))
        elif key in self._waiting:
            other = self._waiting.pop(key)
            weight, bias = (other, block) if block.name == unit.bias else (block, other)
            self._take(UnitGradient(unit, weight, bias.dense()))
        elif key not in self._told:
            self._waiting[key] = block

    def finish(self) -> None:
        """Hand out what never got its other half, with zeros in its place; ready for the next batch."""
        waiting, self._waiting = self._waiting, {}
        self._told.clear()
        for (unit, start), block in waiting.items():
            if block.name == unit.weight:
                self._take(UnitGradient(unit, block, None))
                continue
            bias = block.dense()
            zeros = bias.new_zeros(()).expand(len(bias), unit.rows, unit.columns)
            self._take(UnitGradient(unit, DenseBlock(unit.weight, zeros, start), bias))
