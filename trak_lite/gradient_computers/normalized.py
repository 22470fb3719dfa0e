"""Normalised feature rows in one pass.

A feature row is linear in the gradient. If one factor scales a sample's whole gradient, the finished feature row is
scaled instead, so no gradient is held until its norm is known.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from trak_lite.gradient_computers._base import AbstractGradientComputer
from trak_lite.gradient_computers.normalization import Normalization
from trak_lite.gradient_computers.reductions import GradientNorms, squared_norms
from trak_lite.types import (
    Batch,
    BlockSink,
    DenseBlock,
    FactoredBlock,
    GradientBlock,
    LookupBlock,
    OutputTerms,
    SummedBlock,
)

__all__ = ["RowNormalizer"]


@final
class RowNormalizer:
    """Computes the feature rows of one batch's normalised gradients, and the gradient norms, in one pass.

    With the scope ``global`` the blocks pass unchanged, and :meth:`scale` scales the finished rows. With the scope
    ``module`` the blocks of a module are held until all of them are there, then scaled and passed on; :meth:`scale`
    returns the rows unchanged.
    """

    def __init__(self, normalization: Normalization, num_samples: int) -> None:
        """Start a batch.

        Args:
            normalization: The normalisation; ``kind="none"`` only computes the norms.
            num_samples: B.
        """
        self._normalization = normalization
        self._by_module = normalization.kind != "none" and normalization.scope == "module"
        self._norms = GradientNorms(num_samples)

    def stream(self, computer: AbstractGradientComputer, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the blocks of the batch to ``sink``; see :meth:`AbstractGradientComputer.stream_gradients`."""
        if not self._by_module:
            return computer.stream_gradients(batch, lambda block: sink(self._measured(block)))
        groups = Counter(map(self._normalization.group, computer.parameters))
        waiting: dict[tuple[str, int], _Waiting] = {}

        def take(block: GradientBlock) -> None:
            group = self._normalization.group(block.name)
            held = waiting.setdefault((group, block.start), _Waiting())
            held.blocks.append(block)
            squares = squared_norms(block)
            held.squares.append(squares)
            self._norms.add_squares(squares, block.start)
            if len(held.blocks) == groups[group]:
                self._release(waiting.pop((group, block.start)), sink)

        terms = computer.stream_gradients(batch, take)
        for held in waiting.values():  # modules of which a block is missing; its gradient counts as zero
            self._release(held, sink)
        return terms

    def scale(self, features: Tensor) -> Tensor:
        """Return the feature rows ``(B, K)`` of the normalised gradients, given those of the streamed blocks."""
        if self._by_module or self._normalization.kind == "none":
            return features
        factors = self._normalization.factors(self._norms.squared())
        return _times(features, factors)

    def norms(self) -> Tensor:
        """Return the norms ``(B,)`` of the gradients before normalisation."""
        return self._norms.squared().sqrt()

    def _measured(self, block: GradientBlock) -> GradientBlock:
        self._norms.add(block)
        return block

    def _release(self, held: _Waiting, sink: BlockSink) -> None:
        factors = self._normalization.factors(functools.reduce(torch.add, held.squares))
        while held.blocks:  # each block is freed after the sink took it
            sink(_scaled(held.blocks.pop(0), factors))


@dataclass(slots=True)
class _Waiting:
    """The blocks of a module received so far, for one chunk of samples."""

    blocks: list[GradientBlock] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)


def _scaled(block: GradientBlock, factors: Tensor) -> GradientBlock:
    """Return a block with the gradient of sample i times ``factors[i]``."""
    if isinstance(block, DenseBlock):
        return DenseBlock(block.name, _times(block.grad, factors), block.start)
    if isinstance(block, SummedBlock):
        return replace(block, parts=tuple(_scaled_part(part, factors) for part in block.parts))
    return _scaled_part(block, factors)


def _scaled_part(block: FactoredBlock | LookupBlock, factors: Tensor) -> FactoredBlock | LookupBlock:
    if isinstance(block, LookupBlock):
        return replace(block, values=_times(block.values, factors))
    return replace(block, output_grads=_times(block.output_grads, factors))


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    # Multiply in the factors' dtype: 1 / norm may overflow half precision.
    shaped = factors[: len(rows)].to(rows.device).view(-1, *[1] * (rows.dim() - 1))
    return (rows * shaped).to(rows.dtype)
