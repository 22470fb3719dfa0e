"""Normalised feature rows in one pass, and normalised gradients for those who want them.

A feature row is linear in the gradient: where a sample's whole gradient is to be scaled by one number, its finished row
is scaled instead, so no gradient waits for its norm.
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
    """Makes the feature rows of one batch those of normalised gradients, and measures the gradients on the way.

    With the scope ``global`` the blocks pass as they are, and :meth:`scale` scales the finished rows. With the scope
    ``module`` the blocks of a module wait for each other and are scaled before they go on; the rows are finished then.
    """

    def __init__(self, normalization: Normalization, num_samples: int) -> None:
        """Start a batch.

        Args:
            normalization: What the gradients are divided by; nothing, where only their norms are wanted.
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
        for held in waiting.values():  # of modules with a parameter that never came, which counts as zero
            self._release(held, sink)
        return terms

    def scale(self, features: Tensor) -> Tensor:
        """Return the rows ``(B, K)`` of the normalised gradients, given those of the blocks that went to the sink."""
        if self._by_module or self._normalization.kind == "none":
            return features
        factors = self._normalization.factors(self._norms.squared())
        return _times(features, factors)

    def norms(self) -> Tensor:
        """Return the norms ``(B,)`` of the gradients as they came, not normalised."""
        return self._norms.squared().sqrt()

    def _measured(self, block: GradientBlock) -> GradientBlock:
        self._norms.add(block)
        return block

    def _release(self, held: _Waiting, sink: BlockSink) -> None:
        factors = self._normalization.factors(functools.reduce(torch.add, held.squares))
        while held.blocks:  # each is freed as soon as the sink has it
            sink(_scaled(held.blocks.pop(0), factors))


@dataclass(slots=True)
class _Waiting:
    """The blocks of a module, for one chunk of samples, that have come so far."""

    blocks: list[GradientBlock] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)


class NormalizedGradientComputer(AbstractGradientComputer):
    """Streams the blocks of another gradient computer, scaled sample by sample.

    With the scope ``global`` no block can be scaled before all norms are known, so every batch is streamed twice: two
    forward and two backward passes; no block is held, and no gradient is formed for its norm where the factors are
    cheaper. With the scope ``module`` one pass is enough, and the blocks of a module wait for each other. Where only
    feature rows are wanted, :class:`RowNormalizer` takes one pass in both.
    """

    def __init__(self, computer: AbstractGradientComputer, normalization: Normalization) -> None:
        """Wrap a computer.

        Args:
            computer: Gives the gradients; its model, task and kept parameters are this one's.
            normalization: What they are divided by.
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
        """Differentiate this model's parameters from now on."""
        self.computer.load_model_params(model)
        self.model = model

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Return the scaled gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
        return collect_gradients(self, batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``; it is not scaled."""
        return self.computer.compute_loss_grad(batch)

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Say which rows of which data the next batch is of; see :class:`AbstractGradientComputer`."""
        self.computer.name_rows(what, rows)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the wrapped computer, and the normalisation if there is one."""
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
        self.computer.grad_wrt = self.grad_wrt  # which a caller may have set on this object
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
    # The product is formed in the factors' dtype: 1 / norm may be out of reach for a half-precision gradient.
    shaped = factors[: len(rows)].to(rows.device).view(-1, *[1] * (rows.dim() - 1))
    return (rows * shaped).to(rows.dtype)


def _refuse_two_outputs(first: Tensor, second: Tensor) -> None:
    """Raise if the pass that found the norms is not the pass whose gradients they scale."""
    first, second = in_float64(first), in_float64(second)
    gaps = (first - second).abs()
    # As far apart as half precision and atomic sums on a GPU bring two runs of one pass; NaN is for others to refuse.
    allowed = 1e-2 * second.abs() + 1e-3 * second.abs().mean()
    if not bool((gaps > allowed).any()):
        return
    gap = float(gaps.max())
    raise UnsupportedModelError(
        f"Two passes over one batch gave f that differ by up to {gap:.3g}, so the norms found by the first do not "
        "belong to the gradients of the second. The model draws random numbers: call model.eval(), or normalise by "
        "module (scope='module'), which takes one pass."
    )
