"""Per-sample gradients by plain autograd: one forward and one backward pass per sample.

A backward pass from one row of a batched forward pass still costs a whole batch, so B of them cost B times more than
B passes over one sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trak_lite._batches import take_rows
from trak_lite.gradient_computers._base import (
    AbstractStreamingComputer,
    differentiating_only,
    gradients_of,
    joined_terms,
    refuse_detached,
)
from trak_lite.types import Batch, BlockSink, DenseBlock, OutputTerms

__all__ = ["IterativeGradientComputer"]


class IterativeGradientComputer(AbstractStreamingComputer):
    """A for-loop over ``torch.autograd.grad``: slower than the others, and needs nothing but autograd.

    Kept parameters are differentiated whether or not they are frozen, all others are not; gradients have
    their parameter's dtype. With a ``chunk_size``, ``chunk_size * P`` numbers are held at once.
    """

    def _stream_samples(
        self, batch: Batch, count: int, kept: Mapping[str, nn.Parameter], sink: BlockSink
    ) -> OutputTerms:
        found = []
        with differentiating_only(self.model, kept), torch.enable_grad():
            for rows in self._chunks(count):
                size = rows.stop - rows.start
                grads = {name: p.detach().new_zeros(size, *p.shape) for name, p in kept.items()}
                for position in range(size):
                    row = rows.start + position
                    found.append(self._sample(take_rows(batch, slice(row, row + 1)), position, kept, grads))
                for name in list(grads):
                    sink(DenseBlock(name, grads.pop(name), rows.start))
        return joined_terms(found)

    def _sample(
        self, one: Batch, position: int, kept: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
    ) -> OutputTerms:
        """Write the gradient of one sample's f into ``grads[name][position]``; return its terms, detached."""
        terms = self.terms(one)
        if not terms.output.requires_grad:
            refuse_detached(self.model, self.modelout_fn, one, kept)
        else:
            for name, grad in gradients_of(terms.output[0], kept).items():
                grads[name][position] = grad
        return OutputTerms(*(term.detach() for term in terms))
