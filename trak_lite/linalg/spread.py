r"""Agreement of checkpoints, or of independent runs, on scores.

Shapes: G groups (checkpoints, or runs of some checkpoints each), b train rows, M targets.
Numerics: float64, or float32 on a device without float64.

Source: the standard error is the infinitesimal jackknife (Jaeckel 1972; Efron, "The Jackknife, the Bootstrap and
Other Resampling Plans", 1982, chapter 6); the expected agreement of means is from Spearman (1910) and Brown (1910).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from trak_lite.core.devices import wide_dtype
from trak_lite.errors import StateError


@final
class Spread:
    r"""Standard errors of ``mean(values) * mean(factors)`` over groups, updated one group at a time.

    With values k, factors q and :math:`d_g = \bar q (k_g - \bar k) + \bar k (q_g - \bar q)`, the standard error is
    :math:`\sqrt{\sum_g d_g^2 / (G (G - 1))}`; without factors it is that of a mean. Memory: three tiles.

    Example:
        >>> spread = Spread()
        >>> for value in (1.0, 2.0, 3.0):
        ...     spread.add(torch.tensor([[value]]))
        >>> spread.standard_error()
        tensor([[0.5774]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._products = torch.zeros((), device="cpu")
        self._factor_mean = self._factor_squares = torch.zeros((), device="cpu")

    @torch.no_grad()
    def add(self, values: Tensor, factors: Tensor | None = None) -> None:
        """Add the values ``(b, M)`` of one group and the factors ``(b,)`` of its rows."""
        values = values.to(wide_dtype(values.device))
        column = values.new_ones(len(values), 1) if factors is None else factors.to(values)[:, None]
        if not self._count:
            zero = torch.zeros_like(values)
            self._mean, self._squares, self._products = zero, zero.clone(), zero.clone()
            self._factor_mean, self._factor_squares = torch.zeros_like(column), torch.zeros_like(column)
        self._count += 1
        # Welford's update avoids differences of large sums.
        before, factor_before = values - self._mean, column - self._factor_mean
        self._mean += before / self._count
        self._factor_mean += factor_before / self._count
        after = column - self._factor_mean
        self._squares += before * (values - self._mean)
        self._products += before * after
        self._factor_squares += factor_before * after

    @torch.no_grad()
    def standard_error(self) -> Tensor:
        """Return the standard errors ``(b, M)``.

        Raises:
            StateError: If fewer than two groups were added.
        """
        if self._count < 2:
            raise StateError(
                f"A standard error needs at least 2 checkpoints or runs, got {self._count}. Featurize more: "
                "checkpoints of one run cost no training."
            )
        total = self._factor_mean.square() * self._squares
        total += 2 * self._factor_mean * self._mean * self._products
        total += self._mean.square() * self._factor_squares
        return total.clamp_(min=0).div_(self._count * (self._count - 1)).sqrt_()


@torch.no_grad()
def agreement(groups: Sequence[Tensor]) -> Tensor:
    """Return the mean Spearman correlation between the groups' scores of each target, over all pairs of groups.

    Args:
        groups: At least two tensors ``(b, M)``, the scores of each group. Ties share their mean rank; if all scores of
            a target are equal, their correlation counts as 0.

    Returns:
        ``(M,)`` float64 between ``-1 / (G - 1)`` and 1.

    Example:
        >>> agreement([torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0], [5.0], [1.0]])])
        tensor([0.5000], dtype=torch.float64)
    """
    total: Tensor | None = None
    square_sum: Tensor | None = None
    for scores in groups:
        ranks = _unit_ranks(scores.T)
        total = ranks if total is None else total + ranks
        squares = ranks.square().sum(1)
        square_sum = squares if square_sum is None else square_sum + squares
    if total is None or square_sum is None or len(groups) < 2:
        raise StateError(
            f"Agreement needs at least 2 checkpoints or runs, got {len(groups)}. Featurize more checkpoints."
        )
    return (total.square().sum(1) - square_sum) / (len(groups) * (len(groups) - 1))


@torch.no_grad()
def pair_sums(groups: Sequence[Tensor]) -> Tensor:
    """Return the Spearman correlations of all pairs of groups, summed over targets; ties as in :func:`agreement`.

    Args:
        groups: Tensors ``(b, M)``, the scores of each group.

    Returns:
        ``(G, G)`` float64; its diagonal counts the targets whose scores are not all equal.

    Example:
        >>> pair_sums([torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0], [5.0], [1.0]])])
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]], dtype=torch.float64)
    """
    ranks = torch.stack([_unit_ranks(scores.T).flatten() for scores in groups])
    return ranks @ ranks.T


def expected_agreement(single: Tensor, num_groups: int) -> Tensor:
    """Return the expected correlation between means over G groups, given that between single groups.

    Args:
        single: ``(M,)`` as :func:`agreement` returns it.
        num_groups: G.

    Returns:
        ``(M,)`` between 0 and 1, by the Spearman-Brown formula; 0 if ``single`` is not positive.

    Example:
        >>> expected_agreement(torch.tensor([0.5, -0.1]), 3)
        tensor([0.7500, 0.0000])
    """
    positive = single.clamp(min=0)
    return num_groups * positive / (1 + (num_groups - 1) * positive)


def _unit_ranks(rows: Tensor) -> Tensor:
    """Return the ranks within each row, centred and of norm 1; zero if all values are equal."""
    values = rows.contiguous()
    ordered = values.sort(dim=1).values
    ranks = torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)
    wide = ranks.to(wide_dtype(ranks.device))
    centred = wide - wide.mean(1, keepdim=True)
    norms = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    unit: Tensor = centred / norms.masked_fill(norms == 0, 1.0)
    return unit
