"""Per-sample gradients by plain autograd: one forward and one backward pass per sample.

A backward pass from one row of a batched forward pass still costs a whole batch, so B of them cost B times more than
B passes over one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trak_lite._batches import batch_size, take_rows
from trak_lite._validate import positive_int
from trak_lite.gradient_computers._base import (
    AbstractGradientComputer,
    autocast,
    autocast_fingerprint,
    check_terms,
    collect_gradients,
    differentiating_only,
    refuse_batch_statistics,
    refuse_detached,
    select_parameters,
)
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.types import Batch, BlockSink, DenseBlock, OutputTerms

__all__ = ["IterativeGradientComputer"]


class IterativeGradientComputer(AbstractGradientComputer):
    """A for-loop over ``torch.autograd.grad``: slower than the others, and needs nothing but autograd.

    Kept parameters are differentiated whether or not they are frozen, all others are not; gradients have
    their parameter's dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        grad_wrt: Iterable[str] | None = None,
        *,
        chunk_size: int | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Store the settings.

        Args:
            model: The module whose parameters are differentiated; it is not copied.
            task: Model output function.
            grad_dim: P, if the caller wants it checked.
            dtype: Accepted for the original's signature; gradients keep their parameter's dtype.
            device: Accepted for the original's signature; gradients live where the model lives.
            grad_wrt: Names of the parameters to keep gradients for; ``None`` keeps those that require grad.
            chunk_size: Samples whose gradients are held at once, ``chunk_size * P`` numbers; ``None`` holds a batch.
            autocast_dtype: Run the forward pass under autocast in this dtype (float16 or bfloat16).
        """
        super().__init__(model, task, grad_dim, dtype, device, grad_wrt)
        self.chunk_size = None if chunk_size is None else positive_int(chunk_size=chunk_size)
        self.autocast_dtype = autocast_dtype

    def load_model_params(self, model: nn.Module) -> None:
        """Differentiate this model's parameters from now on; values are looked up at every call."""
        self.model = model

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Return the per-sample gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
        return collect_gradients(self, batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``, detached."""
        with torch.no_grad(), autocast(self.model, self.autocast_dtype):
            terms = self.modelout_fn.evaluate(ModelCall(self.model), batch)
        return terms.out_to_loss_grad.detach().unsqueeze(-1)

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass one dense block per kept parameter (and chunk of samples) to ``sink``.

        Args:
            batch: B samples, on the model's device.
            sink: Called with every block; the block is freed when the call returns.

        Returns:
            f, q and w of the batch, each ``(B,)`` and detached.

        Raises:
            InvalidInputError: If the batch or the output function's result has the wrong form.
            UnsupportedModelError: If a layer mixes the samples of a batch, or f is cut off from autograd.
        """
        refuse_batch_statistics(self.model)
        count = batch_size(batch)
        kept = select_parameters(self.model, self.grad_wrt)
        step = self.chunk_size or max(count, 1)
        found = [self._empty(kept)]
        with differentiating_only(self.model, kept), torch.enable_grad():
            for start in range(0, max(count, 1), step):
                rows = range(start, min(start + step, count))
                grads = {name: p.new_zeros(len(rows), *p.shape) for name, p in kept.items()}
                for position, row in enumerate(rows):
                    found.append(self._sample(take_rows(batch, slice(row, row + 1)), position, kept, grads))
                for name in list(grads):
                    sink(DenseBlock(name, grads.pop(name).detach(), start))
        return OutputTerms(*(torch.cat(parts) for parts in zip(*(found[1:] or found), strict=True)))

    def fingerprint(self) -> dict[str, Any]:
        """Return the autocast dtype, if there is one."""
        return autocast_fingerprint(self.autocast_dtype)

    @staticmethod
    def _empty(kept: Mapping[str, nn.Parameter]) -> OutputTerms:
        nothing = next(iter(kept.values())).detach().new_empty(0)
        return OutputTerms(nothing, nothing, nothing)

    def _sample(
        self, one: Batch, position: int, kept: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
    ) -> OutputTerms:
        """Write the gradient of one sample's f into ``grads[name][position]``; return its terms, detached."""
        with autocast(self.model, self.autocast_dtype):
            terms = self.modelout_fn.evaluate(ModelCall(self.model), one)
        check_terms(terms, 1, self.modelout_fn)
        if not terms.output.requires_grad:
            refuse_detached(self.model, self.modelout_fn, one, kept)
        else:
            found = torch.autograd.grad(terms.output[0], list(kept.values()), allow_unused=True)
            for total, part in zip(grads.values(), found, strict=True):
                if part is not None:
                    total[position] = part
        return OutputTerms(*(term.detach() for term in terms))
