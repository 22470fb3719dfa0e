"""Per-sample gradients by plain autograd: one forward and one backward pass per sample.

One batched forward pass with B backward passes, one per row, is not used, because each of these backward passes costs
as much as one over the whole batch. On one CPU core, for six networks and 4 or 32 samples, it took 1.2 to 13 times as
long as this loop (an LSTM: 0.9 and 3.2). It took 0.4 to 0.8 times as long only where a sample takes about a millisecond
or less. Even there it takes 0.8 to 1.1 times as long if each f is compared with that of its sample alone, which is
needed because a model may branch on its batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trak_lite.data.batches import take_rows
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers._base import (
    AbstractStreamingComputer,
    differentiating_only,
    joined_terms,
    refuse_detached,
)
from trak_lite.gradient_computers.self_check import naming_graph_failures
from trak_lite.types import Batch, BlockSink, DenseBlock, OutputTerms

__all__ = ["IterativeGradientComputer"]


class IterativeGradientComputer(AbstractStreamingComputer):
    """A for-loop over ``torch.autograd.grad``: slower than the other computers, but it needs only autograd.

    Only kept parameters are differentiated, frozen ones included; gradients have their parameter's dtype. With a
    ``chunk_size``, memory holds ``chunk_size * P`` gradient entries at once.

    The self-check compares with a backward pass whose operations read contiguous copies, because torch's backward pass
    over one sample gives wrong gradients for some memory layouts.
    """

    advice = (
        "torch's own backward pass over one sample is wrong here: it depends on the memory layout of a tensor, such as "
        "a channels-last one that batch normalisation reads. Use HookGradientComputer (gradient_computer='hook') or "
        "FunctionalGradientComputer ('functional'), or call contiguous() in the model."
    )

    def _stream_samples(
        self, batch: Batch, count: int, kept: Mapping[str, nn.Parameter], sink: BlockSink
    ) -> OutputTerms:
        found = []
        with differentiating_only(self.model.parameters(), kept), torch.enable_grad():
            for rows in self._chunks(count):
                size = rows.stop - rows.start
                grads = {name: p.detach().new_zeros(size, *p.shape) for name, p in kept.items()}
                for position in range(size):
                    one = _taken_out(batch, rows.start + position)
                    terms, own = self._sample(one, batch, kept)
                    found.append(terms)
                    for name, grad in own.items():
                        grads[name][position] = grad
                for name in list(grads):
                    sink(DenseBlock(name, grads.pop(name), rows.start))
        return joined_terms(found)

    def _sample(
        self, one: Batch, batch: Batch, kept: Mapping[str, nn.Parameter]
    ) -> tuple[OutputTerms, dict[str, Tensor]]:
        """Return the detached terms of one sample, and the gradients of f; empty if f does not require grad."""
        with self._refusing(batch, self._message):
            terms = self.terms(one)
        grads = {}
        if terms.output.requires_grad:
            with naming_graph_failures(type(self.model).__name__):
                found = torch.autograd.grad(terms.output[0], list(kept.values()), allow_unused=True)
            grads = {name: g.to_dense() for name, g in zip(kept, found, strict=True) if g is not None}
        else:
            refuse_detached(self.model, self.modelout_fn, one, kept)
        return OutputTerms(*(term.detach() for term in terms)), grads

    def _message(self, error: BaseException) -> str:
        return (
            f"{type(self.model).__name__} runs on a batch, but not on one of its samples alone ({_named(error)}). "
            "Expected a model that accepts a batch of one: keep the sample axis (no squeeze() without an axis), and "
            "compute no statistics over the batch."
        )


def _taken_out(batch: Batch, row: int) -> Batch:
    """Return the batch of only the sample at ``row``.

    Raises:
        InvalidInputError: If a tensor of the batch cannot be sliced.
    """
    try:
        return take_rows(batch, slice(row, row + 1))
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"Sample {row} cannot be taken out of its batch ({_named(error)}). Expected tensors that can be sliced on "
            "axis 0; turn nested or sparse ones into padded or dense ones (to_padded_tensor, to_dense) in to_batch."
        ) from error


def _named(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
