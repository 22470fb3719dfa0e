"""Masks of train rows for retraining: random subsets, all but the highest-scoring rows, all but one.

Shapes: N train rows, M targets, S subsets, R seeds. A mask is ``(S, N)`` boolean, ``True`` where the row is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import integer_at_least, one_of, positive_int, row_numbers
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation._arrays import coverage, finite_array, finite_matrix


def subset_masks(
    num_rows: int, num_subsets: int, *, alpha: float = 0.5, seed: int = 0, strata: ArrayLike | None = None
) -> NDArray[np.bool_]:
    """Draw random subsets of the train rows, each of ``round(alpha * N)`` rows.

    A subset is drawn again only after all possible subsets have been drawn. The first subsets do not depend on
    ``num_subsets``, so :func:`~trak_lite.verify` uses existing retrainings if it is increased.

    Args:
        num_rows: N.
        num_subsets: S.
        alpha: Share of rows that a subset keeps, above 0 and below 1; published scores mostly use 0.5.
        seed: Seed of the draw, at least 0.
        strata: ``(N,)`` group of every row (such as its label): every subset keeps the same number of rows of a group,
            a share alpha of it, rounded down or up such that the sizes add up.

    Returns:
        ``(S, N)``, ``True`` where a row is kept.

    Raises:
        InvalidInputError: If a number is out of range, a subset would be empty or whole, or strata are not one per
            row.

    Example:
        >>> subset_masks(6, 2, alpha=0.5, strata=[0, 0, 1, 1, 1, 1]).sum(axis=1).tolist()
        [3, 3]
    """
    num_rows, num_subsets = positive_int(num_rows=num_rows), positive_int(num_subsets=num_subsets)
    size = round(alpha * num_rows) if 0.0 < alpha < 1.0 else 0
    if not 0 < size < num_rows:
        raise InvalidInputError(
            f"alpha must lie between 0 and 1 and select at least one of the {num_rows} rows but not all, got {alpha!r}."
        )
    groups = _groups(num_rows, strata)
    sizes = _apportion([len(group) for group in groups], alpha, size)
    possible = math.prod(math.comb(len(group), count) for group, count in zip(groups, sizes, strict=True))
    rng = np.random.default_rng(integer_at_least(0, seed=seed))  # None would draw others at each call
    masks = np.zeros((num_subsets, num_rows), np.bool_)
    drawn: set[bytes] = set()
    for mask in masks:
        if len(drawn) == possible:
            drawn.clear()  # all subsets were drawn: restart, so that all occur about equally often
        while not mask.any() or np.packbits(mask).tobytes() in drawn:
            mask[:] = False
            for group, count in zip(groups, sizes, strict=True):
                mask[rng.permutation(group)[:count]] = True
        drawn.add(np.packbits(mask).tobytes())
    return masks


def removal_masks(
    scores: ArrayLike, k: int, *, sign: Literal["helpful", "harmful"] = "helpful"
) -> NDArray[np.bool_]:
    """Return for every target a mask of the train set without the target's k highest- or lowest-scoring rows.

    Args:
        scores: ``(N, M)`` finite; positive is helpful.
        k: Number of rows to remove, below N.
        sign: ``"helpful"`` removes the largest scores, ``"harmful"`` the smallest; of equal scores the lower row
            number first.

    Returns:
        ``(M, N)``: mask j keeps all but the k rows of target j.

    Raises:
        InvalidInputError: If scores are not a matrix, ``sign`` is unknown, or ``k`` is out of range.
        NonFiniteError: If a score is NaN or infinite.

    Example:
        >>> removal_masks([[3.0], [1.0], [3.0]], 1).tolist()
        [[False, True, True]]
    """
    values = finite_matrix(scores, "scores")
    one_of(("helpful", "harmful"), sign=sign)
    k = positive_int(k=k)
    if k >= len(values):
        raise InvalidInputError(
            f"k must be smaller than the number of train rows: there are {len(values)} rows, got k = {k}."
        )
    order = np.argsort(-values if sign == "helpful" else values, axis=0, kind="stable")[:k]
    masks = np.ones(values.T.shape, np.bool_)
    np.put_along_axis(masks, order.T, False, axis=1)
    return masks


@final
@dataclass(frozen=True, slots=True, eq=False)
class LossRise:
    """Increase of target losses after removal and retraining."""

    mean: float
    """Mean of ``per_target``."""
    per_target: NDArray[np.float64]
    """``(M,)`` loss after minus loss before."""
    interval: tuple[float, float]
    """Bootstrap interval of the mean over targets."""
    confidence: float
    """Nominal coverage of the interval."""


def target_loss_rise(
    before: ArrayLike, after: ArrayLike, *, num_resamples: int = 1000, seed: int = 0, confidence: float = 0.95
) -> LossRise:
    """Return the increase of target losses after removal of their highest-scoring rows (QLD).

    Make the masks with :func:`removal_masks`; retraining j belongs to target j.

    Args:
        before: ``(M,)`` losses of the model trained on all rows.
        after: ``(M,)`` losses after removal and retraining, or ``(R, M)`` for several seeds, which are averaged.
        num_resamples: Bootstrap resamples over targets (each target has its own retrainings).
        seed: Seed of the bootstrap.
        confidence: Nominal coverage, above 0 and below 1.

    Raises:
        InvalidInputError: If shapes do not fit.
        NonFiniteError: If a loss is NaN or infinite.

    Example:
        >>> target_loss_rise([1.0, 2.0], [1.5, 3.5]).mean
        1.0
    """
    first, last = finite_array(before, "before"), finite_array(after, "after")
    if first.ndim != 1 or not first.size or last.shape[-1:] != first.shape or last.ndim > 2 or not last.size:
        raise InvalidInputError(
            f"before must be (M,) and after (M,) or (R, M), got {first.shape} and {last.shape}."
        )
    rise = (last if last.ndim == 1 else last.mean(axis=0)) - first
    tail = (1.0 - coverage(confidence=confidence)) / 2.0
    rng = np.random.default_rng(integer_at_least(0, seed=seed))
    draws = [
        rise[rng.integers(0, len(rise), len(rise))].mean()
        for _ in range(positive_int(num_resamples=num_resamples))
    ]
    low, high = np.quantile(draws, [tail, 1.0 - tail])
    return LossRise(float(rise.mean()), rise, (float(low), float(high)), confidence)


def leave_one_out_masks(num_rows: int, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return one mask per given row that leaves out this row.

    Args:
        num_rows: N.
        rows: The rows to leave out, one per mask.

    Returns:
        ``(len(rows), N)``.

    Raises:
        InvalidInputError: If a row is out of range.

    Example:
        >>> leave_one_out_masks(3, [2, 0]).tolist()
        [[True, True, False], [False, True, True]]
    """
    num_rows = positive_int(num_rows=num_rows)
    left_out = row_numbers(num_rows, "the train data", rows=rows)
    if not len(left_out):
        raise InvalidInputError("rows must contain at least one row number, got none.")
    masks = np.ones((len(left_out), num_rows), np.bool_)
    masks[np.arange(len(left_out)), left_out] = False
    return masks


def _groups(num_rows: int, strata: ArrayLike | None) -> list[NDArray[np.int64]]:
    if strata is None:
        return [np.arange(num_rows)]
    labels = np.asarray(strata)
    if labels.shape != (num_rows,):
        raise InvalidInputError(f"strata must have one value per row, ({num_rows},), got {labels.shape}.")
    try:
        _, group = np.unique(labels, return_inverse=True)
    except TypeError as error:  # values of several types have no order
        kinds = sorted({type(label).__name__ for label in labels})
        raise InvalidInputError(
            f"strata must be values of one type, numbers or texts, got {kinds}. Replace missing ones by a value of "
            "this type."
        ) from error
    return np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])


def _apportion(counts: Sequence[int], alpha: float, size: int) -> list[int]:
    """Distribute a subset's size over strata by the largest remainder method."""
    quotas = alpha * np.asarray(counts)
    sizes = np.floor(quotas).astype(np.int64)
    first = np.argsort(sizes - quotas, kind="stable")[: size - int(sizes.sum())]
    sizes[first] += 1
    return [int(size) for size in sizes]
