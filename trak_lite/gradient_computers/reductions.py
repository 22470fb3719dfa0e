"""Numbers about a batch's gradients that need no matrix of gradients: norms and weighted sums."""

from __future__ import annotations

import torch
from torch import Tensor

from trak_lite._batches import batch_size
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers._base import (
    AbstractGradientComputer,
    check_terms,
    differentiating_only,
    refuse_batch_statistics,
    select_parameters,
)
from trak_lite.modelout_functions import ModelCall
from trak_lite.types import Batch, DenseBlock, GradientBlock

__all__ = ["gradient_norms", "weighted_gradient"]


def gradient_norms(computer: AbstractGradientComputer, batch: Batch) -> Tensor:
    r"""Return the exact Euclidean norm of every sample's gradient over all kept parameters, ``(B,)``.

    A factored block never becomes a gradient where that is cheaper: its squared norm is
    :math:`\sum_{s,t} \langle g_s, g_t \rangle \langle x_s, x_t \rangle` (Goodfellow, arXiv:1510.01799; Li et al.,
    arXiv:2110.05679).

    Args:
        computer: Any gradient computer.
        batch: B samples.
    """
    squares: list[tuple[int, Tensor]] = []
    computer.stream_gradients(batch, lambda block: squares.append((block.start, _squared_norms(block))))
    total = squares[0][1].new_zeros(batch_size(batch))
    for start, part in squares:
        total[start : start + len(part)] += part
    return total.sqrt()


def _squared_norms(block: GradientBlock) -> Tensor:
    """Return the squared norms ``(b,)`` of one block, in at least float32."""
    if block.num_samples == 0:
        return torch.zeros(0)
    if isinstance(block, DenseBlock):
        return block.dense().to(_wide(block.grad.dtype)).square().sum(1)
    x, g = (t.to(_wide(t.dtype)) for t in (block.inputs, block.output_grads))
    positions, d_in, d_out = x.shape[1], x.shape[2], g.shape[2]
    if positions * (d_in + d_out) < 2 * d_in * d_out:
        return ((g @ g.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2)).clamp(min=0)
    return (g.transpose(1, 2) @ x).square().sum((1, 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def weighted_gradient(computer: AbstractGradientComputer, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    r"""Return :math:`\sum_i w_i \nabla f(z_i)` by parameter name, from one ordinary backward pass.

    Args:
        computer: Any gradient computer; its model, task and kept parameters count.
        batch: B samples.
        weights: ``(B,)``.

    Returns:
        Tensors of the parameters' shapes, in model order; zero where f does not depend on one.

    Raises:
        InvalidInputError: If there is not one weight per sample.
    """
    count = batch_size(batch)
    if tuple(weights.shape) != (count,):
        raise InvalidInputError(
            f"weights have shape {tuple(weights.shape)} for a batch of {count} samples, expected ({count},)."
        )
    model, task = computer.model, computer.modelout_fn
    refuse_batch_statistics(model)
    kept = select_parameters(model, computer.grad_wrt)
    with differentiating_only(model, kept), torch.enable_grad():
        output = check_terms(task.evaluate(ModelCall(model), batch), count, task).output
        zero = torch.zeros((), device=output.device, requires_grad=True)
        total = (output * weights.to(output)).sum() + zero
        grads = torch.autograd.grad(total, list(kept.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(kept.items(), grads, strict=True)
    }
