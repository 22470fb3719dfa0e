r"""The linear datamodeling score: rank correlation of summed scores with outputs of models retrained on subsets.

Source: section 2 of Park et al., "TRAK: Attributing Model Behavior at Scale" (arXiv:2303.14186): for each target,
Spearman's correlation over subsets between :math:`\sum_{i \in S} \text{score}_i` and the output of a model trained
on S; then the mean over targets.

Shapes: N train rows, M targets, S subsets. Numerics: float64; ranks are exact multiples of one half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import integer_at_least, positive_int, row_numbers
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation._arrays import coverage, exact_sums, finite_array, finite_matrix

FEWEST_SUBSETS: Final = 5
"""With fewer the order of the subsets is right by chance in more than 2.5 % of cases (1 of 24 for 4 subsets)."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class LinearDatamodelingScore:
    """Linear datamodeling score with a confidence interval."""

    mean: float
    """Mean of ``per_target`` over the targets that have a value."""
    per_target: NDArray[np.float64]
    """``(M,)`` Spearman correlations; NaN for targets whose outputs are the same for all subsets."""
    interval: tuple[float, float]
    """Interval of the mean over subsets and targets; see :func:`linear_datamodeling_score`."""
    confidence: float
    """Nominal coverage of the interval."""
    num_subsets: int
    num_constant: int
    """Targets left out of the mean because their outputs are the same for all subsets."""

    def __str__(self) -> str:
        low, high = self.interval
        left_out = f", {self.num_constant} constant targets left out" if self.num_constant else ""
        return (
            f"{self.mean:.3f} [{low:.3f}, {high:.3f}] over {self.num_subsets} subsets, "
            f"{len(self.per_target) - self.num_constant} targets{left_out}"
        )


@final
@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """Difference of two methods' linear datamodeling scores on the same subsets and targets."""

    mean: float
    """First minus second."""
    interval: tuple[float, float]
    """Paired bootstrap interval: both methods use the same resamples, so shared noise cancels."""
    confidence: float
    """Nominal coverage of the interval."""


@final
@dataclass(frozen=True, slots=True)
class NoiseCeiling:
    """Upper limit of the linear datamodeling score due to the noise of training seeds."""

    between_seeds: float
    """Spearman correlation over subsets of the outputs of two seeds: mean over pairs of seeds and targets."""
    reliability: float
    """The same for the mean over all R seeds and another mean of R seeds (Spearman-Brown)."""
    ceiling: float
    """Expected score of a perfect method, on the mean over all R seeds: the root of the reliability."""


def seed_noise_ceiling(outputs: ArrayLike) -> NoiseCeiling:
    """Return the expected score of a perfect method, estimated from the agreement between seeds.

    With r the correlation between two seeds, the correlation between two means of R seeds is
    ``R r / (1 + (R - 1) r)``, and that between such a mean and its expectation is the square root. This is exact for
    Pearson's correlation with equal noise, and an approximation for ranks and for the mean over targets. Negative r
    counts as 0.

    Args:
        outputs: ``(S, R, M)`` finite, of at least 2 subsets and 2 seeds.

    Raises:
        InvalidInputError: If there is only one seed or subset, or every target is constant.
        NonFiniteError: If an output is NaN or infinite.

    Example:
        >>> seed_noise_ceiling([[[1.0], [2.0]], [[2.0], [3.0]], [[3.0], [9.0]]]).ceiling
        1.0
    """
    values = finite_array(outputs, "outputs")
    if values.ndim != 3 or values.shape[1] < 2:
        raise InvalidInputError(
            f"outputs must be (subsets, seeds, targets) with at least 2 seeds, got shape {values.shape}. Retrain with "
            "several seeds, such as seeds=(0, 1)."
        )
    num_seeds = values.shape[1]
    subsets, targets = np.ones(len(values)), np.ones(values.shape[2])
    ranks = (_ranked_outputs([], values[:, seed]).deviations(subsets) for seed in range(num_seeds))
    # Both orders: a target that is constant for one seed counts only as the prediction.
    pairs = itertools.permutations(ranks, 2)
    between = float(np.mean([_mean(_correlations(*pair, subsets), targets) for pair in pairs]))
    reliability = num_seeds * between / (1 + (num_seeds - 1) * between) if between > 0 else 0.0
    return NoiseCeiling(between, reliability, math.sqrt(reliability))


def summed_scores(scores: ArrayLike, masks: ArrayLike) -> NDArray[np.float64]:
    """Return the prediction of the scores for each subset: the sum over its rows.

    Sums are exact up to the rounding of the result, so that equal ones are equal in any order of the rows.

    Args:
        scores: ``(N, M)`` finite.
        masks: ``(S, N)`` boolean.

    Returns:
        ``(S, M)``.

    Raises:
        InvalidInputError: If shapes do not fit.
        NonFiniteError: If a score is NaN or infinite, or sums may be beyond float64.

    Example:
        >>> import numpy as np
        >>> summed_scores([[1.0], [2.0], [4.0]], np.array([[True, False, True]])).tolist()
        [[5.0]]
    """
    values, members = finite_matrix(scores, "scores"), np.asarray(masks)
    if members.dtype != np.bool_ or members.ndim != 2 or not members.size:
        raise InvalidInputError(
            f"masks must be a boolean matrix (subsets, train rows), got {members.dtype} of shape {members.shape}. "
            "Make them with trak_lite.evaluation.subset_masks."
        )
    if len(values) != members.shape[1]:
        summed = len(values) == len(members)
        hint = " If the scores are summed over subsets already, pass masks=None." if summed else ""
        raise InvalidInputError(
            f"scores have {len(values)} train rows, masks {members.shape[1]}; they must agree.{hint}"
        )
    return exact_sums(values, members)


def linear_datamodeling_score(
    scores: ArrayLike,
    masks: ArrayLike | None,
    outputs: ArrayLike,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> LinearDatamodelingScore:
    """Return the linear datamodeling score: Spearman correlation of summed scores with outputs of retrained models.

    Tied values share their mean rank. If the scores predict the same value for all subsets, the target's correlation
    counts as 0, so that constant predictions cannot raise a method's mean.

    The interval is the mean plus and minus a normal quantile times its bootstrap standard error. Each resample draws
    subsets and targets independently with replacement (Owen, "The pigeonhole bootstrap", arXiv:0712.1111). Both are
    sources of variance, and all targets share the same few retrainings, so resampling only targets would give
    intervals that are far too narrow. For crossed factors this bootstrap is conservative (too wide). In simulations
    (100 runs; 60 targets that share half of their variance; 5, 10, 20 and 60 subsets; true means of about .1, .5 and
    .75) the nominal 95 % interval covered the true mean in 95 to 100 % of the runs. Percentile intervals, which are
    biased towards 0 because subsets are drawn repeatedly, covered it in 68 to 100 %. The mean itself is biased towards
    0 with few subsets: by .08 for a true mean of .48 and 5 subsets.

    The bootstrap is too narrow for few subsets with few targets, or with targets that agree. Therefore an interval
    without 0 whose mean is within the normal quantile of its standard error over all permutations of the subsets
    (outputs that do not depend on the scores), and one without bootstrap spread, gets this width. With fewer than
    5 subsets it is [-1, 1].

    Args:
        scores: ``(N, M)``, or with ``masks=None`` the summed scores ``(S, M)``.
        masks: ``(S, N)`` boolean, the rows that each model was trained on; ``None`` if scores are already summed.
        outputs: ``(S, M)`` finite outputs of the retrained models, preferably the mean over several seeds.
        num_resamples: Bootstrap resamples.
        seed: Seed of the bootstrap.
        confidence: Nominal coverage, above 0 and below 1.

    Returns:
        Mean, per-target values, interval.

    Raises:
        InvalidInputError: If shapes do not fit, there are fewer than 2 subsets, or every target is constant.
        NonFiniteError: If a score or an output is NaN or infinite.

    Example:
        >>> import numpy as np
        >>> masks = np.array([[True, False], [False, True], [True, True]])
        >>> linear_datamodeling_score([[1.0], [2.0]], masks, [[0.1], [0.4], [0.9]]).mean
        1.0
    """
    ((score,), _) = compared_scores(
        [_predictions(scores, masks)],
        outputs,
        num_resamples=num_resamples,
        seed=seed,
        confidence=confidence,
    )
    return score


def compare_datamodeling_scores(
    first: ArrayLike,
    second: ArrayLike,
    masks: ArrayLike | None,
    outputs: ArrayLike,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> ScoreDifference:
    """Return the difference of two methods' linear datamodeling scores, first minus second.

    Each bootstrap resample draws subsets and targets once and evaluates both methods on them. For few subsets the
    interval is widened as that of :func:`linear_datamodeling_score`; with fewer than 5 it is [-2, 2].

    Args:
        first: ``(N, M)`` scores, or with ``masks=None`` the summed scores ``(S, M)``.
        second: Scores of the same shape.
        masks: ``(S, N)`` boolean, or ``None``.
        outputs: ``(S, M)``.
        num_resamples: Bootstrap resamples.
        seed: Seed of the bootstrap.
        confidence: Nominal coverage, above 0 and below 1.

    Raises:
        InvalidInputError: If shapes do not fit, there are fewer than 2 subsets, or every target is constant.
        NonFiniteError: If a score or an output is NaN or infinite.
    """
    (_, (difference,)) = compared_scores(
        [_predictions(scores, masks) for scores in (first, second)],
        outputs,
        num_resamples=num_resamples,
        seed=seed,
        confidence=confidence,
    )
    return difference


def compared_scores(
    predictions: Sequence[NDArray[np.float64]],
    outputs: ArrayLike,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[list[LinearDatamodelingScore], list[ScoreDifference]]:
    """Return the scores of several methods' predictions ``(S, M)``, and the first one's lead over each of the others.

    They equal those of :func:`linear_datamodeling_score` and :func:`compare_datamodeling_scores`. All are evaluated on
    the same resamples, and each resample is ranked once.
    """
    actual, ranked = _ranked_outputs(predictions, outputs), [_Ranked(one) for one in predictions]

    def correlations(subsets: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        deviations = actual.deviations(subsets)
        return [_correlations(one.deviations(subsets), deviations, subsets) for one in ranked]

    def means(subsets: NDArray[np.float64], targets: NDArray[np.float64]) -> list[float]:
        first, *others = correlations(subsets)
        return [_mean(one, targets) for one in (first, *others, *(first - other for other in others))]

    num_subsets = len(predictions[0])
    estimates = _bootstrapped(
        means,
        predictions[0].shape,
        _permuted_deviations(ranked, actual, num_subsets),
        num_resamples=num_resamples,
        seed=seed,
        confidence=confidence,
    )
    scores = []
    for (mean, (low, high)), per_target in zip(estimates, correlations(np.ones(num_subsets)), strict=False):
        interval, num_constant = (max(low, -1.0), min(high, 1.0)), int(np.isnan(per_target).sum())
        scores.append(
            LinearDatamodelingScore(mean, per_target, interval, confidence, num_subsets, num_constant)
        )
    return scores, [ScoreDifference(*one, confidence) for one in estimates[len(scores) :]]


def leave_one_out_correlation(
    scores: ArrayLike,
    rows: Sequence[int] | NDArray[np.integer],
    outputs: ArrayLike,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> LinearDatamodelingScore:
    """Correlate scores of rows with the outputs of models that were trained without them.

    This is the linear datamodeling score for :func:`~trak_lite.evaluation.leave_one_out_masks`: per target it compares
    a row's score with the decrease of the output without the row. One row has a small effect, so average many seeds.

    Args:
        scores: ``(N, M)``.
        rows: ``(R,)`` the rows that were left out.
        outputs: ``(R, M)`` outputs of the models trained without each of them.
        num_resamples: Bootstrap resamples, over rows and targets.
        seed: Seed of the bootstrap.
        confidence: Nominal coverage, above 0 and below 1.

    Raises:
        InvalidInputError: If shapes do not fit, a row is out of range, or every target is constant.
        NonFiniteError: If a score or an output is NaN or infinite.
    """
    values = finite_matrix(scores, "scores")
    # Use -score instead of total minus score: rounding of the difference would break ties.
    return linear_datamodeling_score(
        -values[row_numbers(len(values), "the train data", rows=rows)],
        None,
        outputs,
        num_resamples=num_resamples,
        seed=seed,
        confidence=confidence,
    )


@final
class _Ranked:
    """Sort order of S values for each of M targets; gives the ranks of any resample without sorting again."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        columns = np.ascontiguousarray(values.T)
        self._order = np.argsort(columns, axis=1, kind="stable")
        ordered = np.take_along_axis(columns, self._order, axis=1)
        # For every subset, in original order: start and end of its group of tied values in the sorted order.
        pairs = list(zip(ordered, columns, strict=True))
        self._first = np.stack([np.searchsorted(*pair, side="left") for pair in pairs])
        self._stop = np.stack([np.searchsorted(*pair, side="right") for pair in pairs])

    def deviations(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``(M, S)`` ranks minus their mean in a resample that has subset s ``counts[s]`` times."""
        below = np.zeros((len(self._order), len(counts) + 1))
        np.cumsum(counts[self._order], axis=1, out=below[:, 1:])
        sums = np.take_along_axis(below, self._first, axis=1) + np.take_along_axis(below, self._stop, axis=1)
        ranks: NDArray[np.float64] = (sums - counts.sum()) / 2.0
        return ranks


def _permuted_deviations(ranked: Sequence[_Ranked], actual: _Ranked, num_subsets: int) -> list[float]:
    """Return the standard deviation over permutations of the subsets of each mean, and of each lead of the first."""
    units = []
    for one in (actual, *ranked):
        ranks = one.deviations(np.ones(num_subsets))
        units.append(ranks / np.maximum(np.linalg.norm(ranks, axis=1, keepdims=True), 1e-300))
    outputs, *predicted = units
    scale = float(outputs.any(axis=1).sum()) * math.sqrt(num_subsets - 1)

    def norm(one: NDArray[np.float64]) -> float:
        """Return the norm of ``one.T @ outputs``, whose trace is the sum; rows of both factors have mean 0."""
        if len(one) > num_subsets:
            return float(np.linalg.norm(one.T @ outputs))
        return math.sqrt(max(float(np.sum((one @ one.T) * (outputs @ outputs.T))), 0.0))

    first, *others = predicted
    return [norm(one) / scale for one in (first, *others, *(first - other for other in others))]


def _bootstrapped(
    statistics: Callable[[NDArray[np.float64], NDArray[np.float64]], list[float]],
    shape: tuple[int, ...],
    permuted: Sequence[float],
    *,
    num_resamples: int,
    seed: int,
    confidence: float,
) -> list[tuple[float, tuple[float, float]]]:
    """Return statistics of the counts of each subset ``(S,)`` and each target ``(M,)``, with normal intervals.

    ``permuted`` are their standard deviations over permutations of the subsets.
    """
    rng = np.random.default_rng(integer_at_least(0, seed=seed))
    quantile = NormalDist().inv_cdf((1.0 + coverage(confidence=confidence)) / 2.0)
    draws = [
        statistics(*(np.bincount(rng.integers(0, n, n), minlength=n).astype(np.float64) for n in shape))
        for _ in range(positive_int(num_resamples=num_resamples))
    ]
    estimates: list[tuple[float, tuple[float, float]]] = []
    means = statistics(*map(np.ones, shape))
    for mean, drawn, by_chance in zip(means, zip(*draws, strict=True), permuted, strict=True):
        if shape[0] < FEWEST_SUBSETS:
            estimates.append((mean, (-2.0, 2.0)))
            continue
        there = [value for value in drawn if not math.isnan(value)]  # NaN if one subset is drawn S times
        half = quantile * float(np.std(there)) if there else 0.0
        if half < 1e-9 or half < abs(mean) <= quantile * by_chance:
            half = quantile * by_chance
        estimates.append((mean, (mean - half, mean + half)))
    return estimates


def _correlations(
    x: NDArray[np.float64], y: NDArray[np.float64], counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ``(M,)`` Spearman correlations of predicted and actual ranks ``(M, S)`` minus their means.

    NaN for constant outputs, 0 for constant predictions.
    """
    x_square, y_square = x**2 @ counts, y**2 @ counts
    covariance = (x * y) @ counts
    scale = np.sqrt(np.where(x_square > 0, x_square, 1.0) * np.where(y_square > 0, y_square, 1.0))
    return np.where(y_square > 0, covariance / scale, np.nan)


def _mean(correlations: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Return the mean over targets that are not NaN, weighted by ``counts``; NaN if there is none."""
    there = ~np.isnan(correlations)
    total = counts[there].sum()
    return float(correlations[there] @ counts[there] / total) if total else float("nan")


def _predictions(scores: ArrayLike, masks: ArrayLike | None) -> NDArray[np.float64]:
    """Return the predictions for each subset, ``(S, M)``; without masks the scores are already summed."""
    return finite_matrix(scores, "scores") if masks is None else summed_scores(scores, masks)


def _ranked_outputs(predictions: Sequence[NDArray[np.float64]], outputs: ArrayLike) -> _Ranked:
    """Return the sort order of the outputs after checking their shape and that at least one target is not constant."""
    actual = finite_matrix(outputs, "outputs")
    for predicted in predictions:
        if predicted.shape != actual.shape:
            raise InvalidInputError(
                f"Predictions have shape {predicted.shape}, outputs {actual.shape}; both must be (subsets, targets)."
            )
    if len(actual) < 2:
        raise InvalidInputError("A correlation over subsets needs at least 2 of them, got 1.")
    if (actual == actual[0]).all():
        raise InvalidInputError(
            f"The outputs of all {actual.shape[1]} targets are the same for all {len(actual)} subsets, so there is "
            "nothing to predict. Check the output function, and that train_fn uses the indices it is given."
        )
    return _Ranked(actual)
