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

__all__ = ["LossRise", "flip_rate", "target_loss_rise"]


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


def flip_rate(before: ArrayLike, after: ArrayLike, *, among: ArrayLike | None = None) -> float:
    """Return the share of targets whose prediction flips after removal and retraining.

    Args:
        before: ``(M,)`` predicted classes (integers), or whether the margin is positive (booleans).
        after: ``(M,)`` the same after removal and retraining, or ``(R, M)`` for several seeds.
        among: ``(M,)`` booleans: the targets to count (such as those predicted correctly); ``None`` for all.

    Returns:
        Share of flipped predictions, over targets and seeds.

    Raises:
        InvalidInputError: If shapes do not fit, predictions are not discrete, or no target is counted.

    Example:
        >>> flip_rate([1, 0, 2], [1, 1, 2])
        0.3333333333333333
    """
    first, last = _classes(before, "before"), _classes(after, "after")
    counted = np.ones(first.shape, np.bool_) if among is None else np.asarray(among)
    if first.ndim != 1 or last.shape[-1:] != first.shape or last.ndim > 2 or counted.shape != first.shape:
        raise InvalidInputError(
            f"before and among must be (M,) and after (M,) or (R, M), got {first.shape}, {counted.shape} and "
            f"{last.shape}."
        )
    if counted.dtype != np.bool_ or not counted.any():
        raise InvalidInputError("among must be booleans that are True for at least one target.")
    return float((last != first)[..., counted].mean())


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


def _classes(values: ArrayLike, name: str) -> NDArray[np.generic]:
    """Return predicted classes; raise for floats, which would nearly always differ."""
    array = np.asarray(values)
    if array.dtype.kind not in "iub" or not array.size:
        raise InvalidInputError(
            f"{name} must be integers or booleans, got {array.dtype} of shape {array.shape}. "
            "For margins pass whether they are positive: margins > 0."
        )
    return array
