"""Norms of a batch's gradients, computed without the matrix of gradients."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from trak_lite.core.devices import add_at_, full_float32, precise
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock, LookupBlock, SummedBlock

_CANCELLED = 1e-3
"""A squared norm below this share of its upper bound (no cancellation) is too inexact in float32: recomputed."""
_MOST_HELD = 256 << 20
"""Bytes of factors on an accelerator that are held to recompute norms from."""


@final
class GradientNorms:
    """Sums the squared norms of one batch's gradients block by block.

    Whether a norm has to be recomputed is known on the device first. On an accelerator this is asked once for many
    blocks, which are held until then: a question per block would make the host wait for each.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._squares: Tensor | None = None
        self._waiting: list[tuple[int, Tensor, tuple[Tensor, FactoredBlock] | None]] = []
        """First row and squared norms of blocks on accelerators, in order; where these are too inexact, and factors."""
        self._held = 0

    def add(self, block: GradientBlock) -> None:
        """Add one block; each parameter of a sample must be added exactly once."""
        if not isinstance(block, FactoredBlock) or block.inputs.device.type == "cpu":
            self.add_squares(squared_norms(block), block.start)
            return
        squares, doubt = _factored_norms(block)
        self._waiting.append((block.start, squares, doubt))
        if doubt is not None:
            self._held += sum(part.nbytes for part in (block.inputs, block.output_grads))
        if self._held > _MOST_HELD:
            self._settle()

    def add_squares(self, squares: Tensor, start: int) -> None:
        """Add the squared norms ``(b,)`` of one block, whose first row is sample ``start``."""
        if self._waiting:  # the order of the sums is that of the blocks
            self._waiting.append((start, squares, None))
            return
        if self._squares is None:
            self._squares = squares.new_zeros(self._num_samples)
        self._squares[start : start + len(squares)] += squares.to(self._squares.device)

    def squared(self) -> Tensor:
        """Return the squared norms of all blocks so far, ``(B,)``, in at least float32."""
        self._settle()
        return (
            torch.zeros(self._num_samples, dtype=torch.float32, device="cpu")
            if self._squares is None
            else self._squares
        )

    def _settle(self) -> None:
        """Add the squared norms of the blocks that wait, after one question to the device."""
        waiting, self._waiting, self._held = self._waiting, [], 0
        asked = [(squares, *doubt) for _, squares, doubt in waiting if doubt is not None]
        if asked:
            device = asked[0][1].device
            answers = torch.cat([cancelled.to(device) for _, cancelled, _ in asked]).cpu()
            parts = torch.split(answers, [len(cancelled) for _, cancelled, _ in asked])
            for (squares, _, block), answer in zip(asked, parts, strict=True):
                _recompute(squares, block, answer)
        for start, squares, _ in waiting:
            self.add_squares(squares, start)


@torch.no_grad()
def squared_norms(block: GradientBlock) -> Tensor:
    r"""Return the squared norms ``(b,)`` of one block's gradients, in at least float32.

    The gradient of a factored block is not formed where that is cheaper; the block's squared norm is
    :math:`\sum_{s,t} \langle g_s, g_t \rangle \langle x_s, x_t \rangle` (Goodfellow, arXiv:1510.01799; Li et al.,
    arXiv:2110.05679).
    """
    if isinstance(block, DenseBlock | SummedBlock):
        return precise(block.dense()).square().sum(1)
    if isinstance(block, LookupBlock):
        return sums_by_row(block)[1].square().sum((1, 2))
    squares, doubt = _factored_norms(block)
    if doubt is not None:
        _recompute(squares, block, doubt[0].cpu())
    return squares


def _recompute(squares: Tensor, block: FactoredBlock, cancelled: Tensor) -> None:
    """Recompute squared norms ``(b,)`` in place where ``cancelled``, ``(b,)`` on the host, is true."""
    if not bool(cancelled.any()):
        return
    rows = cancelled.nonzero().squeeze(1).to(squares.device)
    x, g = precise(block.inputs), precise(block.output_grads)
    with full_float32(squares.device):
        squares[rows] = (g[rows].transpose(1, 2) @ x[rows]).square().sum((1, 2))


@torch.no_grad()
def _factored_norms(block: FactoredBlock) -> tuple[Tensor, tuple[Tensor, FactoredBlock] | None]:
    """Return the squared norms ``(b,)`` of gradients in factors, in full float32; and where they are too inexact."""
    x, g = precise(block.inputs), precise(block.output_grads)
    positions, d_in, d_out = x.shape[1], x.shape[2], g.shape[2]
    with full_float32(x.device):  # also if the gradients are computed in TF32
        if positions * (d_in + d_out) >= 2 * d_in * d_out:
            return (g.transpose(1, 2) @ x).square().sum((1, 2)), None
        squares = ((g @ g.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2))
    largest = (g.norm(dim=2) * x.norm(dim=2)).sum(1).square()
    return squares, (squares < _CANCELLED * largest, block)


def sums_by_row(block: LookupBlock) -> tuple[Tensor, Tensor]:
    """Return an embedding table's gradients with the values of equal rows summed, in at least float32.

    These are rows ``(b, T)``, distinct within each sample, and values ``(b, T, d)``. Unused entries of T are row 0 with
    values of zero.
    """
    order = block.rows.argsort(dim=1, stable=True)
    rows = block.rows.gather(1, order)
    values = precise(block.values).gather(1, order.unsqueeze(2).expand_as(block.values))
    new = torch.ones_like(rows, dtype=torch.bool)
    new[:, 1:] = rows[:, 1:] != rows[:, :-1]
    index = new.cumsum(1) - 1  # index of each row among the distinct rows of its sample
    first = torch.arange(len(index), device=index.device).unsqueeze(1) * index.shape[1]
    sums = add_at_(torch.zeros_like(values).flatten(0, 1), 0, (first + index).flatten(), values.flatten(0, 1))
    return torch.zeros_like(rows).scatter_(1, index, rows), sums.view_as(values)
