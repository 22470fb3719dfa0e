"""Mislabel detection: how well a ranking of train rows finds wrong labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from trak_lite.evaluation.ranking import auc, precision_at

__all__ = ["MislabelDetection", "mislabel_detection"]


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
    looked_at = count if k is None else k
    precision = precision_at(looked_at, suspicion, flags)
    return MislabelDetection(area, precision, precision * looked_at / count, looked_at, count / len(flags))
