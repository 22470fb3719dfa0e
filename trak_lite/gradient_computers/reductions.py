"""Numbers about a batch's gradients that need no matrix of gradients: norms and weighted sums."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from trak_lite._devices import add_at_
from trak_lite.data.batches import batch_size
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers._base import AbstractGradientComputer
from trak_lite.gradient_computers.hooks.computer import HookGradientComputer
from trak_lite.gradient_computers.iterative import IterativeGradientComputer
from trak_lite.types import Batch, DenseBlock, FactoredBlock, GradientBlock, LookupBlock, SummedBlock

__all__ = ["GradientNorms", "gradient_norms", "squared_norms", "sums_by_row", "weighted_gradient"]

_CANCELLED = 1e-3
"""Share of its positions' sum that a squared norm falls below where they cancel, and lose the digits of float32."""


@final
class GradientNorms:
    """Adds up the squared norms of one batch's gradients, block by block, beside whatever else takes the blocks."""

    def __init__(self, num_samples: int) -> None:
        """Start at zero for a batch of ``num_samples``."""
        self._num_samples = num_samples
        self._squares: Tensor | None = None

    def add(self, block: GradientBlock) -> None:
        """Take one block; every parameter of a sample comes once."""
        self.add_squares(squared_norms(block), block.start)

    def add_squares(self, squares: Tensor, start: int) -> None:
        """Take the squared norms ``(b,)`` of one block, the first of which is that of sample ``start``."""
        if self._squares is None:
            self._squares = squares.new_zeros(self._num_samples)
        self._squares[start : start + len(squares)] += squares.to(self._squares.device)

    def squared(self) -> Tensor:
        """Return the squared norms of all blocks so far, ``(B,)``, in at least float32."""
        return torch.zeros(self._num_samples, device="cpu") if self._squares is None else self._squares


def gradient_norms(computer: AbstractGradientComputer, batch: Batch) -> Tensor:
    r"""Return the exact Euclidean norm of every sample's gradient over all kept parameters, ``(B,)``.

    A factored block never becomes a gradient where that is cheaper: its squared norm is
    :math:`\sum_{s,t} \langle g_s, g_t \rangle \langle x_s, x_t \rangle` (Goodfellow, arXiv:1510.01799; Li et al.,
    arXiv:2110.05679).

    Args:
        computer: Any gradient computer.
        batch: B samples.
    """
    norms = GradientNorms(batch_size(batch))
    computer.stream_gradients(batch, norms.add)
    return norms.squared().sqrt()


@torch.no_grad()
def squared_norms(block: GradientBlock) -> Tensor:
    """Return the squared norms ``(b,)`` of one block's gradients, in at least float32."""
    if isinstance(block, DenseBlock | SummedBlock):
        rows = block.dense()
        return rows.to(_wide(rows.dtype)).square().sum(1)
    if isinstance(block, LookupBlock):
        return _squared_norms_of_rows(block)
    x, g = (t.to(_wide(t.dtype)) for t in (block.inputs, block.output_grads))
    positions, d_in, d_out = x.shape[1], x.shape[2], g.shape[2]
    if positions * (d_in + d_out) >= 2 * d_in * d_out:
        return (g.transpose(1, 2) @ x).square().sum((1, 2))
    found = ((g @ g.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2))
    largest = (g.norm(dim=2) * x.norm(dim=2)).sum(1).square()
    cancelled = found < _CANCELLED * largest
    if bool(cancelled.any()):
        found[cancelled] = (g[cancelled].transpose(1, 2) @ x[cancelled]).square().sum((1, 2))
    return found


def _squared_norms_of_rows(block: LookupBlock) -> Tensor:
    """Return the squared norms ``(b,)`` of a table's gradients."""
    return sums_by_row(block)[1].square().sum((1, 2))


def sums_by_row(block: LookupBlock) -> tuple[Tensor, Tensor]:
    """Return a table's gradients with the values of one row added up, in at least float32.

    Returns:
        Rows ``(b, T)``, those of a sample different from each other, and values ``(b, T, d)``; what is left over of T
        is row 0 with values of zero.
    """
    order = block.rows.argsort(dim=1, stable=True)
    rows = block.rows.gather(1, order)
    values = block.values.to(_wide(block.values.dtype)).gather(1, order.unsqueeze(2).expand_as(block.values))
    new = torch.ones_like(rows, dtype=torch.bool)
    new[:, 1:] = rows[:, 1:] != rows[:, :-1]
    place = new.cumsum(1) - 1  # of each row among the different ones of its sample
    first = torch.arange(len(place), device=place.device).unsqueeze(1) * place.shape[1]
    sums = add_at_(torch.zeros_like(values).flatten(0, 1), 0, (first + place).flatten(), values.flatten(0, 1))
    return torch.zeros_like(rows).scatter_(1, place, rows), sums.view_as(values)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def weighted_gradient(computer: AbstractGradientComputer, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    r"""Return :math:`\sum_i w_i \nabla f(z_i)` by parameter name.

    The hook computer takes one ordinary backward pass once it has seen that the model does not mix samples; the
    iterative one adds its samples' gradients up one by one. Any other computer is streamed, and its blocks are summed.

    Args:
        computer: Any gradient computer.
        batch: B samples.
        weights: ``(B,)``.

    Returns:
        Tensors of the parameters' shapes, in model order; zero where f does not depend on one.

    Raises:
        InvalidInputError: If there is not one weight per sample.
        UnsupportedModelError: If the computer cannot differentiate the model sample by sample.
    """
    count = batch_size(batch)
    if tuple(weights.shape) != (count,):
        raise InvalidInputError(
            f"weights have shape {tuple(weights.shape)} for a batch of {count} samples, expected ({count},)."
        )
    if (
        isinstance(computer, HookGradientComputer | IterativeGradientComputer)
        and computer.differentiates_the_model
        and count
    ):
        return computer.weighted_sum(batch, weights)
    return _streamed_sum(computer, batch, weights)


def _streamed_sum(computer: AbstractGradientComputer, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    shapes = computer.parameters
    found: dict[str, Tensor] = {}

    def add(block: GradientBlock) -> None:
        own = weights[block.start : block.start + block.num_samples]
        if isinstance(block, FactoredBlock):
            g = block.output_grads * own.to(block.output_grads).view(-1, 1, 1)
            part = g.flatten(0, 1).t() @ block.inputs.flatten(0, 1)
        else:
            rows = block.dense()
            part = own.to(rows) @ rows
        part = part.reshape(shapes[block.name])
        found[block.name] = found[block.name] + part if block.name in found else part

    computer.stream_gradients(batch, add)
    return {name: found[name] for name in shapes}
