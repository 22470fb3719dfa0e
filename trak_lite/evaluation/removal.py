"""Effect on a target of retraining the model without the target's highest-scoring train rows.

Make the masks with :func:`~trak_lite.evaluation.removal_masks`; retraining j belongs to target j.

Shapes: M targets, R seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite._validate import positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation._arrays import coverage, finite_array

__all__ = ["LossRise", "target_loss_rise"]


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
    before: ArrayLike,
    after: ArrayLike,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> LossRise:
    """Return the increase of target losses after removal of their highest-scoring rows (QLD).

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
    tail = (1.0 - coverage(confidence)) / 2.0
    rng = np.random.default_rng(seed)
    draws = [
        rise[rng.integers(0, len(rise), len(rise))].mean()
        for _ in range(positive_int(num_resamples=num_resamples))
    ]
    low, high = np.quantile(draws, [tail, 1.0 - tail])
    return LossRise(float(rise.mean()), rise, (float(low), float(high)), confidence)
