"""Per-sample gradients by plain autograd: one forward and one backward pass per sample.

One batched forward pass with B backward passes, one per row, is not used: each of these costs as much as one over the
whole batch (measured: 1.2 to 13 times as long as this loop), and a model may branch on its batch, so that each f would
have to be compared with that of its sample alone.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn

from trak_lite.data.batches import take_rows
from trak_lite.errors import InvalidInputError, summary
from trak_lite.gradient_computers.parameters import Kept, differentiating_only
from trak_lite.gradient_computers.randomness import MIXES
from trak_lite.gradient_computers.reference import WRONG_ALONE, naming_graph_failures
from trak_lite.gradient_computers.streaming import AbstractStreamingComputer, joined_terms, refuse_detached
from trak_lite.types import Batch, BlockSink, DenseBlock, OutputTerms


class IterativeGradientComputer(AbstractStreamingComputer):
    """A for-loop over ``torch.autograd.grad``: slower than the other computers, but it needs only autograd.

    Only kept parameters are differentiated, frozen ones included; gradients have their parameter's dtype. With a
    ``chunk_size``, memory holds ``chunk_size * P`` gradient entries at once.

    The self-check compares with a backward pass whose operations read contiguous copies, because torch's backward pass
    over one sample gives wrong gradients for some memory layouts.
    """

    advice = (
        f"{WRONG_ALONE}. Use HookGradientComputer (gradient_computer='hook') or FunctionalGradientComputer "
        "('functional') otherwise."
    )

    _takes_samples_alone: ClassVar[bool] = True
    _warned_of: nn.Module | None = None

    @property
    def compares_samples(self) -> bool:
        """Whether f of a sample was seen to depend on the other samples of its batch."""
        return self._warned_of is self.model

    def look_at_mixing(self) -> None:
        """Warn of a model whose f of a sample depends on the other samples of its batch."""
        if self.compares_samples:
            return
        self._warned_of = self.model
        warnings.warn(
            f"{type(self.model).__name__}: {MIXES}. The rows are the gradients of f of every sample alone, with "
            "the padding of its batch. Of a training loss that compares samples (in-batch negatives, batch statistics) "
            "these are not the gradients: define f of one sample, use the task 'contrastive', put the other samples "
            "into the row, or let f capture a fixed set of them. If the batch has a list with an entry per sample (the "
            "boxes of an image), pad and stack its entries, because tensors are divided and lists of them are not.",
            UserWarning,
            stacklevel=2,
        )

    def _stream_samples(self, batch: Batch, count: int, kept: Kept, sink: BlockSink) -> OutputTerms:
        all_terms = []
        with differentiating_only(self.model.parameters(), kept), torch.enable_grad():
            for rows in self._chunks(count):
                size = rows.stop - rows.start
                grads = {name: p.detach().new_zeros(size, *p.shape) for name, p in kept.items()}
                for position in range(size):
                    terms, sample_grads = self._sample(rows.start + position, batch, kept)
                    all_terms.append(terms)
                    for name, grad in sample_grads.items():
                        grads[name][position] = grad
                for name in list(grads):
                    sink(DenseBlock(name, grads.pop(name), rows.start))
        return joined_terms(all_terms)

    def _sample(self, row: int, batch: Batch, kept: Kept) -> tuple[OutputTerms, dict[str, Tensor]]:
        """Return the detached terms of one sample, and the gradients of f; empty if f does not require grad."""
        try:
            one = take_rows(batch, slice(row, row + 1))
        except (RuntimeError, TypeError) as error:
            raise InvalidInputError(
                f"Sample {row} cannot be taken out of its batch ({summary(error)}). Expected tensors that can be "
                "sliced on axis 0; turn nested or sparse ones into padded or dense ones (to_padded_tensor, to_dense) "
                "in to_batch."
            ) from error
        with self._refusing(batch):
            terms = self.terms(one)
        grads = {}
        if terms.output.requires_grad:
            with naming_graph_failures(self.model):
                derivatives = torch.autograd.grad(terms.output[0], list(kept.values()), allow_unused=True)
            grads = {name: g.to_dense() for name, g in zip(kept, derivatives, strict=True) if g is not None}
        else:
            refuse_detached(self.model, self.modelout_fn, one, kept)
        return OutputTerms(*(term.detach() for term in terms)), grads

    def _message(self, error: BaseException) -> str:
        return (
            f"{type(self.model).__name__} runs on a batch, but not on one of its samples alone ({summary(error)}). "
            "Expected a model that accepts a batch of one: keep the sample axis (no squeeze() without an axis), and "
            "compute no statistics over the batch."
        )
