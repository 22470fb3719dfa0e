"""Finding wrong labels: do the rows that a ranking puts first have them?"""

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
    """Chance that a mislabeled row outranks a clean one."""
    precision: float
    """Share of mislabeled rows among the k highest; by chance it is ``base_rate``."""
    recall: float
    """Share of the mislabeled rows that are among the k highest."""
    k: int
    """Rows looked at."""
    base_rate: float
    """Share of mislabeled rows in the train set."""


def mislabel_detection(
    suspicion: ArrayLike, mislabeled: ArrayLike, *, k: int | None = None
) -> MislabelDetection:
    """Compare a ranking of train rows with the labels that are known to be wrong.

    Args:
        suspicion: ``(N,)`` finite; higher is more suspect. ``scores.self_influence()``, or any other ranking.
        mislabeled: ``(N,)`` booleans, or 0 and 1.
        k: Rows that one would look at; ``None`` takes as many as are mislabeled, where precision equals recall.

    Raises:
        InvalidInputError: If shapes differ, no row or every row is mislabeled, or k is out of range.
        NonFiniteError: If a value is NaN or infinite.

    Example:
        >>> mislabel_detection([0.9, 0.1, 0.8, 0.2], [1, 0, 0, 0])
        MislabelDetection(auc=1.0, precision=1.0, recall=1.0, k=1, base_rate=0.25)
    """
    area = auc(suspicion, mislabeled)  # which checks both
    flags = np.asarray(mislabeled).astype(np.bool_)
    count = int(flags.sum())
    looked_at = count if k is None else k
    precision = precision_at(looked_at, suspicion, flags)
    return MislabelDetection(area, precision, precision * looked_at / count, looked_at, count / len(flags))
