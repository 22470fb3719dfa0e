"""Weights for the parts of a score, fitted to a few retrained models and shrunk towards the default weights.

Shapes: F parts (checkpoint x module x damping x view), S subsets, M targets.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import InvalidInputError

_PENALTIES: Final = (1e-2, 1e-1, 1.0, 10.0, 100.0, np.inf)
"""Ridge penalties in units of the parts' mean square; an infinite penalty gives the default weights."""
_LEAST_SCALE: Final = 0.05
"""Lower bound of the default prediction's scale, for predictions that are uncorrelated or negatively correlated."""
_ROUNDING: Final = 1e-10
"""A part is constant if its standard deviation is below this share of its root mean square."""

Array = NDArray[np.float64]


def fit_weights(
    predictions: Array, outputs: Array, prior: Array, *, across: Literal["subsets", "targets"] = "subsets"
) -> Array:
    """Fit weights of the parts, whose weighted sum predicts the outputs, by ridge regression to the default weights.

    All targets have equal weight: outputs are divided by their standard deviation over subsets, predictions by that of
    the default prediction. The penalty is chosen by cross-validation that leaves one subset, or one target, out.

    Args:
        predictions: ``(F, S, M)`` predictions of each part.
        outputs: ``(S, M)`` outputs of the retrained models.
        prior: ``(F,)`` default weights, not all zero.
        across: What cross-validation leaves out: the weights are chosen for other subsets, or for other targets.

    Returns:
        ``(F,)`` weights on the scale of the default weights; the default weights if no penalty is better.

    Raises:
        InvalidInputError: If there are fewer than 3 subsets, or every target has constant outputs or predictions, or
            there is one usable target and another is left out.
    """
    if len(outputs) < 3:
        raise InvalidInputError(f"Calibration needs at least 3 subsets, got {len(outputs)}.")
    default = np.tensordot(prior, predictions, 1)
    spread, default_spread = outputs.std(axis=0), default.std(axis=0)
    usable = (spread > 0) & (default_spread > 0)
    if not usable.any():
        raise InvalidInputError(
            "For every target, the outputs or the default predictions are the same for all subsets, so there is "
            "nothing to calibrate on."
        )
    y = outputs[:, usable] / spread[usable]
    parts = predictions[:, :, usable] / default_spread[usable]
    if across == "targets" and y.shape[1] < 2:
        raise InvalidInputError("Calibration across targets needs at least 2 targets with outputs that vary.")
    errors = _errors(parts, y, prior, across)
    best = int(np.flatnonzero(errors == errors.min())[-1])
    scale = _scale(parts, y, prior)
    weights: Array = _ridge_path(parts, y, prior)[best] / scale
    return weights


def _errors(parts: Array, y: Array, prior: Array, across: Literal["subsets", "targets"]) -> Array:
    """Return the squared errors of every penalty on subsets, or targets, that are left out one by one."""
    before = () if across == "subsets" else (slice(None),)  # axes of y before that of what is left out
    everything = np.arange(y.shape[len(before)])
    errors = np.zeros(len(_PENALTIES))
    for left_out in everything:
        others, held_out = (*before, everything != left_out), (*before, left_out)
        path = _ridge_path(parts[:, *others], y[others], prior)
        # A subset is compared with the mean of the other subsets, a target with its own mean over subsets.
        if across == "subsets":
            mean, mean_parts = y[others].mean(axis=0), parts[:, *others].mean(axis=1)
        else:
            mean, mean_parts = y[held_out].mean(), parts[:, *held_out].mean(axis=1, keepdims=True)
        errors += ((y[held_out] - mean - path @ (parts[:, *held_out] - mean_parts)) ** 2).sum(axis=1)
    return errors


def _scale(parts: Array, y: Array, prior: Array) -> float:
    """Return the least-squares factor of the default prediction, at least ``_LEAST_SCALE``."""
    default = np.tensordot(prior, parts, 1)
    default = default - default.mean(axis=0)
    return max(float((default * y).sum() / (default**2).sum()), _LEAST_SCALE)


def _ridge_path(parts: Array, y: Array, prior: Array) -> Array:
    """Return the weights for every penalty, ``(penalties, F)``."""
    centred = (parts - parts.mean(axis=1, keepdims=True)).reshape(len(parts), -1).T
    truth = (y - y.mean(axis=0)).reshape(-1)
    start = _scale(parts, y, prior) * prior
    size = np.sqrt((centred**2).mean(axis=0))
    still = size <= _ROUNDING * np.sqrt((parts**2).mean(axis=(1, 2)))
    centred[:, still], size[still] = 0.0, 1.0  # so that the correction is zero
    standard = centred / size
    values, vectors = np.linalg.eigh(standard.T @ standard / len(standard))
    target = vectors.T @ (standard.T @ (truth - centred @ start) / len(standard))
    corrections = [vectors @ (target / (np.maximum(values, 0.0) + penalty)) / size for penalty in _PENALTIES]
    path: Array = start + np.array(corrections)
    return path
