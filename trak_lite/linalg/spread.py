r"""Agreement of checkpoints, or of independent runs, on scores.

Shapes: G groups (checkpoints, or runs of some checkpoints each), b train rows, M targets.
Numerics: float64, or float32 on a device without float64.

Source: the standard error is the jackknife that leaves out one group (Tukey 1958; Efron, "The Jackknife, the Bootstrap
and Other Resampling Plans", 1982, chapter 3), linearised for the product of two means; the expected agreement of means
is from Spearman (1910) and Brown (1910).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trak_lite.core.devices import wide_dtype
from trak_lite.errors import StateError


@torch.no_grad()
def standard_error(
    values: Iterable[Tensor],
    shares: Sequence[float],
    factors: Sequence[Tensor],
    factor_shares: Sequence[float],
) -> Tensor:
    r"""Return the standard errors of the product of two weighted means over groups, ``(b, M)``.

    Group g has the share :math:`s_g` of the weights of the mean :math:`\bar k`, and :math:`r_g` of those of
    :math:`\bar q`. Without the group their product falls, in the first order, by

    .. math:: u_g = \bar q \frac{s_g}{1 - s_g} (k_g - \bar k) + \bar k \frac{r_g}{1 - r_g} (q_g - \bar q),

    and the standard error is :math:`\sqrt{\frac{G - 1}{G} \sum_g u_g^2}`, where G counts for the first summand only the
    groups with :math:`s_g > 0`. If all :math:`k_g` have one variance, its square is in expectation not below the
    variance of :math:`\bar k`, and up to twice it if few groups have nearly all of the weight. (The linearised variance
    of a ratio,
    :math:`\frac{G}{G - 1} \sum_g s_g^2 (k_g - \bar k)^2`, is below it unless the shares are equal.) Unequal shares
    leave a rounding error of about 1e-8 of the product in float64. Memory: four tiles.

    Args:
        values: Summand :math:`s_g k_g` ``(b, M)`` of each group, times G.
        shares: Weights :math:`s_g` in any unit, not negative; at least two are not 0.
        factors: Summand :math:`r_g q_g` ``(b,)`` of each group, times G.
        factor_shares: Weights :math:`r_g` in any unit, as ``shares``.

    Example:
        >>> values = [torch.tensor([[value]]) for value in (1.0, 2.0, 3.0)]
        >>> standard_error(values, [1, 1, 1], [torch.ones(1)] * 3, [1, 1, 1])
        tensor([[0.5774]], dtype=torch.float64)
    """
    count = len(shares)
    relative = [[count * share / math.fsum(each) for share in each] for each in (shares, factor_shares)]
    factor_mean = torch.zeros((), device="cpu")
    for number, factor in enumerate(factors, 1):
        factor_mean = factor_mean + (factor - factor_mean) / number
    factor_mean = factor_mean[:, None]
    is_weighted = len(set(shares)) > 1
    weighted = sum(share > 0 for share in shares)
    ratio = math.sqrt((weighted - 1) * count / (weighted * (count - 1)))  # 1 if each has a share
    mean = value_mean = squares = products = column_mean = column_squares = torch.zeros((), device="cpu")
    for number, (part, factor, share, factor_share) in enumerate(
        zip(values, factors, *relative, strict=True), 1
    ):
        # (G - 1) u = mean(q) value + mean(k) (column - 2 mean(q)); values and columns are those of equal shares.
        raised, factor_raised = ((count - 1) / (count - each) for each in (share, factor_share))
        raised *= ratio
        value = part.to(wide_dtype(part.device))
        if number == 1:
            value_mean, squares, products = (torch.zeros_like(value) for _ in range(3))
            mean = torch.zeros_like(value) if is_weighted else value_mean
        if is_weighted:
            mean += (value - mean) / number
            value = value * raised
        excess = raised * share + factor_raised * factor_share - 2
        column = factor.to(value)[:, None] * factor_raised - factor_mean * excess
        # Welford's update avoids differences of large sums.
        before, column_before = value - value_mean, column - column_mean
        value_mean += before / number
        column_mean = column_mean + column_before / number
        after = column - column_mean
        squares += before * (value - value_mean)
        products += before * after
        column_squares = column_squares + column_before * after
    total = factor_mean.square() * squares
    total += 2 * factor_mean * mean * products
    total += mean.square() * column_squares
    total += count * (factor_mean * value_mean + mean * (column_mean - 2 * factor_mean)).square()
    return total.clamp_(min=0).div_(count * (count - 1)).sqrt_()


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


def expected_agreement(single: Tensor, num_groups: float) -> Tensor:
    """Return the expected correlation between means over G groups, given that between single groups.

    Args:
        single: ``(M,)`` as :func:`agreement` returns it.
        num_groups: G; for a weighted mean the number of groups of equal weight whose mean is as noisy.

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
