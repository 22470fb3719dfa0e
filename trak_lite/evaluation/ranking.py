"""Rank statistics with exact treatment of ties, and mislabel detection.

Shapes: n examples. Numerics: float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation._arrays import finite_array


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the area under the ROC curve.

    This is the probability that a positive ranks above a negative; a tie counts as 1/2.

    Args:
        scores: ``(n,)`` finite; higher means more likely positive.
        labels: ``(n,)`` booleans, or integers 0 and 1.

    Raises:
        InvalidInputError: If shapes differ, a label is neither 0 nor 1, or one of the two classes is missing.
        NonFiniteError: If a score is NaN or infinite.

    Example:
        >>> auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1])
        0.875
    """
    values, positive = _scores_and_labels(scores, labels)
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        raise InvalidInputError(
            f"AUC needs both classes, got {num_positive} positive and {num_negative} negative labels."
        )
    wins = _average_ranks(values)[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(wins / (num_positive * num_negative))


def precision_at(k: int, scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the share of positives among the k highest scores.

    If the k-th score is tied, the result is the expectation over all orders of equal scores.

    Args:
        k: Between 1 and n.
        scores: ``(n,)`` finite; higher means more likely positive.
        labels: ``(n,)`` booleans, or integers 0 and 1.

    Raises:
        InvalidInputError: If shapes differ, a label is neither 0 nor 1, or k is out of range.
        NonFiniteError: If a score is NaN or infinite.

    Example:
        >>> precision_at(2, [3.0, 1.0, 1.0], [1, 1, 0])
        0.75
    """
    values, positive = _scores_and_labels(scores, labels)
    k = positive_int(k=k)
    if k > len(values):
        raise InvalidInputError(f"k must be at most the number of scores, {len(values)}, got {k}.")
    cut = np.partition(values, len(values) - k)[len(values) - k]
    above, tied = values > cut, values == cut
    slots = k - int(above.sum())
    return float((positive[above].sum() + slots * positive[tied].mean()) / k)


@final
@dataclass(frozen=True, slots=True)
class MislabelDetection:
    """How well a ranking finds mislabeled train rows."""

    auc: float
    """Probability that a mislabeled row ranks above a clean row."""
    precision: float
    """Share of mislabeled rows among the k highest; ``base_rate`` for a random ranking."""
    recall: float
    """Share of the mislabeled rows that are among the k highest."""
    k: int
    """Number of highest-ranked rows inspected."""
    base_rate: float
    """Share of mislabeled rows in the train set."""


def mislabel_detection(
    suspicion: ArrayLike, mislabeled: ArrayLike, *, k: int | None = None
) -> MislabelDetection:
    """Evaluate a ranking of train rows against known wrong labels.

    Args:
        suspicion: ``(N,)`` finite; higher is more suspect. Use ``scores.self_influence()`` or any other ranking.
        mislabeled: ``(N,)`` booleans, or 0 and 1.
        k: Number of rows to inspect; ``None`` for the number of mislabeled rows, where precision equals recall.

    Raises:
        InvalidInputError: If shapes differ, no row or every row is mislabeled, or k is out of range.
        NonFiniteError: If a value is NaN or infinite.

    Example:
        >>> mislabel_detection([0.9, 0.1, 0.8, 0.2], [1, 0, 0, 0])
        MislabelDetection(auc=1.0, precision=1.0, recall=1.0, k=1, base_rate=0.25)
    """
    area = auc(suspicion, mislabeled)  # checks both arrays
    flags = np.asarray(mislabeled).astype(np.bool_)
    count = int(flags.sum())
    looked_at = count if k is None else positive_int(k=k)
    precision = precision_at(looked_at, suspicion, flags)
    return MislabelDetection(area, precision, precision * looked_at / count, looked_at, count / len(flags))


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's rank correlation; tied values share their average rank.

    Args:
        a: ``(n,)`` finite, not all equal.
        b: ``(n,)`` finite, not all equal.

    Raises:
        InvalidInputError: If shapes differ, or all values of one side are equal.
        NonFiniteError: If a value is NaN or infinite.

    Example:
        >>> round(spearman([1.0, 2.0, 3.0], [0.0, 5.0, 1.0]), 6)
        0.5
    """
    first, second = _finite_vector(a, "a"), _finite_vector(b, "b")
    _same_length(first, second, "a", "b")
    for name, values in (("a", first), ("b", second)):
        if not len(values) or values.min() == values.max():
            raise InvalidInputError(
                f"The {len(values)} values of {name} are all equal, so they have no order to correlate. "
                "Leave such vectors out."
            )
    x, y = _average_ranks(first), _average_ranks(second)
    x -= x.mean()
    y -= y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _average_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1; equal values share their mean rank."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[group]


def _scores_and_labels(scores: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values, flags = _finite_vector(scores, "scores"), np.asarray(labels)
    _same_length(values, flags, "scores", "labels")
    if not np.isin(flags, (0, 1)).all():
        raise InvalidInputError(
            f"labels must be booleans, or 0 and 1, got values {np.unique(flags)[:5].tolist()}."
        )
    return values, flags.astype(bool)


def _finite_vector(values: ArrayLike, name: str) -> NDArray[np.float64]:
    shape = np.shape(values)
    if len(shape) != 1:
        raise InvalidInputError(f"{name} must be one-dimensional, got shape {shape}.")
    return finite_array(values, name)


def _same_length(first: NDArray[Any], second: NDArray[Any], first_name: str, second_name: str) -> None:
    if first.shape != second.shape:
        raise InvalidInputError(
            f"{first_name} and {second_name} must have one shape (n,), got {first.shape} and {second.shape}."
        )
