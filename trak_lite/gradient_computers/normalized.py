"""Normalised feature rows in one pass, and a gradient computer with normalised gradients.

A feature row is linear in the gradient. If one factor scales a sample's whole gradient, the finished feature row is
scaled instead, so no gradient is held until its norm is known.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite._devices import in_float64
from trak_lite.data.batches import batch_size
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers._base import AbstractGradientComputer, collect_gradients
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

__all__ = ["NormalizedGradientComputer", "RowNormalizer"]


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


class NormalizedGradientComputer(AbstractGradientComputer):
    """Streams the blocks of another gradient computer, scaled sample by sample.

    With the scope ``global`` no block can be scaled before all norms are known, so every batch is streamed twice: two
    forward and two backward passes. No block is held, and norms are computed from the factors where that is cheaper.
    With the scope ``module`` one pass is enough; the blocks of a module are held until all of them are there. If only
    feature rows are needed, :class:`RowNormalizer` takes one pass for both scopes.
    """

    def __init__(self, computer: AbstractGradientComputer, normalization: Normalization) -> None:
        """Wrap a computer.

        Args:
            computer: Computes the gradients; this object takes over its model, task and kept parameters.
            normalization: The normalisation of the gradients.
        """
        super().__init__(
            computer.model,
            computer.modelout_fn,
            computer.grad_dim,
            computer.dtype,
            computer.device,
            computer.grad_wrt,
        )
        self.computer = computer
        self.normalization = normalization

    def load_model_params(self, model: nn.Module) -> None:
        """Use this model for all later calls."""
        self.computer.load_model_params(model)
        self.model = model

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Return the scaled gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
        return collect_gradients(self, batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``; it is not scaled."""
        return self.computer.compute_loss_grad(batch)

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the data rows of the next batch; see :class:`AbstractGradientComputer`."""
        self.computer.name_rows(what, rows)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the wrapped computer, and the normalisation if its kind is not ``none``."""
        return {**self.computer.fingerprint(), **self.normalization.fingerprint()}

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the scaled blocks of a batch to ``sink``.

        Args:
            batch: B samples, on the model's device.
            sink: Called with every block; the block is freed when the call returns.

        Returns:
            f, q and w of the batch, each ``(B,)``, detached and not scaled.

        Raises:
            InvalidInputError: If the batch or the output function's result has the wrong form.
            UnsupportedModelError: If the wrapped computer cannot differentiate the model, or two passes over one
                batch give different f.
        """
        self.computer.grad_wrt = self.grad_wrt  # a caller may have set it on this object
        if self.normalization.kind == "none":
            return self.computer.stream_gradients(batch, sink)
        if self.normalization.scope == "module":
            return RowNormalizer(self.normalization, batch_size(batch)).stream(self.computer, batch, sink)
        return self._stream_twice(batch, sink)

    def _stream_twice(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        norms = GradientNorms(batch_size(batch))
        first = self.computer.stream_gradients(batch, norms.add)
        factors = self.normalization.factors(norms.squared())
        second = self.computer.stream_gradients(
            batch, lambda block: sink(_scaled(block, factors[block.start :]))
        )
        _refuse_two_outputs(first.output, second.output)
        return second


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


def _refuse_two_outputs(first: Tensor, second: Tensor) -> None:
    """Raise if the two passes over a batch gave different f, so that the norms do not fit the gradients."""
    first, second = in_float64(first), in_float64(second)
    gaps = (first - second).abs()
    # Tolerance for half precision and for atomic sums on a GPU. NaN is not refused here.
    allowed = 1e-2 * second.abs() + 1e-3 * second.abs().mean()
    if not bool((gaps > allowed).any()):
        return
    gap = float(gaps.max())
    raise UnsupportedModelError(
        f"Two passes over one batch gave f that differ by up to {gap:.3g}, so the norms found by the first do not "
        "belong to the gradients of the second. The model draws random numbers: call model.eval(), or normalise by "
        "module (scope='module'), which takes one pass."
    )
