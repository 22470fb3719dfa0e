"""Intervals for effects of removed sets, from sets whose removal was measured by retraining.

Sums of scores predict small changes of a model. How far they are off depends on the size of the set, and on whether its
rows act in the same direction: without a whole class, models change several times more than the sums say. The measured
sets (trials) that resemble the set in question therefore calibrate its prediction and give the interval.

Source of the intervals: weighted conformal prediction (Tibshirani et al., arXiv:1904.06019) with one exchangeable unit
per trial, whose targets share its weight (Dunn et al., arXiv:1809.07441). Weights by similarity: Guan,
arXiv:2106.08460.

Shapes: J trials, M targets. Numerics: float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Self, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.errors import InvalidInputError
from trak_lite.evaluation._arrays import coverage, finite_array, finite_matrix

__all__ = [
    "EffectInterval",
    "Trials",
    "concentration_of",
    "conformal_quantile",
    "fewest_trials",
    "standardised_sum",
]

Array = NDArray[np.float64]

_SHARE_WIDTH, _CONCENTRATION_WIDTH, _TARGET_WIDTH = 1.0, 0.7, 0.5
"""Standard deviations of the weights: over the log of share and concentration, and over asinh of a target's sum."""
_WIDENED: Final = (1.0, 1.4, 2.0)
"""Factors of these: the first with one and a half times the trials that an interval needs, or the last."""
_BEYOND: Final = (1.05, 1.5)
"""Largest ratios of a set's share and concentration to the largest of the trials: effects grow faster than sums."""
_STEPS: Final = 30
"""Updates of the variance of residuals."""
_LEAST_VARIANCE: Final = 0.01
"""Lower bound of the variance of a residual, in mean squared residuals."""


class EffectInterval(NamedTuple):
    """Predicted changes of the outputs of all targets."""

    predicted: Array
    """``(M,)`` calibrated prediction; minus the summed scores where there is no interval."""
    half_width: Array
    """``(M,)`` half of the interval; infinite for targets that too few trials resemble."""
    similar: Array
    """``(M,)`` sum of the weights of the trials; a trial that equals the set, with an equal target, has weight 1."""


def conformal_quantile(residuals: ArrayLike, weights: ArrayLike, level: float) -> float:
    """Return the quantile of absolute residuals that those of a new set stay below with probability ``level``.

    The new set has weight 1 and an infinite residual. The residuals of a trial share its weight. For trials and a new
    set that are exchangeable (weights of 1), the probability for a random target of the new set is at least ``level``.

    Args:
        residuals: ``(J, M)``, not negative.
        weights: ``(J,)`` of the trials, from 0 to 1, or ``(J, M)`` of their targets, which sum to that of the trial.
        level: Above 0 and below 1.

    Returns:
        The quantile; infinity if the weights sum to less than ``level / (1 - level)``.

    Raises:
        InvalidInputError: If the level is out of range or shapes do not fit.

    Example:
        >>> conformal_quantile([[3.0], [1.0], [2.0]], [1.0, 1.0, 1.0], 0.75)
        3.0
        >>> conformal_quantile([[3.0], [1.0], [2.0]], [1.0, 1.0, 1.0], 0.5)
        2.0
    """
    values, mass = finite_matrix(residuals, "residuals"), finite_array(weights, "weights")
    if mass.shape not in (values.shape, values.shape[:1]):
        raise InvalidInputError(f"weights must be ({len(values)},) or {values.shape}, got {mass.shape}.")
    if mass.ndim == 1:
        mass = np.repeat(mass[:, None] / values.shape[1], values.shape[1], axis=1)
    order = np.argsort(values, axis=None, kind="stable")
    reached = np.cumsum(mass.reshape(-1)[order]) >= coverage(level=level) * (mass.sum() + 1.0) - 1e-9
    return float(values.reshape(-1)[order[np.argmax(reached)]]) if reached.any() else np.inf


def fewest_trials(level: float) -> int:
    """Return the number of equal trials that an interval needs at least.

    Example:
        >>> fewest_trials(0.9)
        9
    """
    return int(np.ceil(round(coverage(level=level) / (1.0 - level), 9)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """Sets of train rows, and how the outputs of models trained without them changed."""

    shares: Array
    """``(J,)`` share of the train rows in each set."""
    predicted: Array
    """``(J, M)`` minus the scores of each set, summed."""
    standard: Array
    """``(J, M)`` the same in standard deviations of random sets of the size; see :func:`standardised_sum`."""
    measured: Array
    """``(J, M)`` outputs without the set, minus outputs with all rows."""
    outputs: Array
    """``(M,)`` mean output of models trained on all rows."""
    noise: Array
    """``(M,)`` standard deviation of the outputs between models trained on all rows, with other seeds."""
    num_seeds: int
    """Models per set, whose outputs are averaged."""
    of_verdict: bool = False
    """Whether the sets are complements of the random subsets of a verdict, compared with each other."""

    def __len__(self) -> int:
        return len(self.shares)

    def __str__(self) -> str:
        sizes = [
            f"without {share:.1%} of the train rows ({here.sum()} sets): changes {_size(self.measured[here]):.3g}, "
            f"predicted {_size(self.predicted[here]):.3g}"
            for share in np.unique(self.shares)
            for here in [self.shares == share]
        ]
        first = (
            f"{len(self)} trial sets, {self.num_seeds} model{'s' * (self.num_seeds > 1)} each (root mean squares over "
            f"targets; between seeds {_size(self.noise):.3g})"
        )
        return "\n".join([first, *sizes])

    @classmethod
    def of_subsets(cls, summed: ArrayLike, retrained: ArrayLike, alpha: float, num_seeds: int) -> Self:
        """Return the trials that random subsets of the train rows make up, each compared with the other subsets.

        Args:
            summed: ``(S, m)`` scores summed over each subset.
            retrained: ``(S, m)`` outputs of the models trained on each.
            alpha: Share of the train rows in a subset.
            num_seeds: Models per subset.
        """
        changes = [values - values.mean(axis=0) for values in (np.asarray(summed), np.asarray(retrained))]
        count, num_targets = changes[0].shape
        predicted, measured = (change * (count / (count - 1)) for change in changes)
        unknown, deviation = np.full(num_targets, np.nan), changes[0].std(axis=0, ddof=1)
        standard = changes[0] / np.where(deviation > 0, deviation, 1.0)
        shares = np.full(count, 1.0 - alpha)
        return cls(shares, predicted, standard, measured, unknown, unknown, num_seeds, of_verdict=True)

    @property
    def concentration(self) -> Array:
        """``(J,)`` how much the rows of each set act in the same direction; about 1 for random sets."""
        return concentration_of(self.standard)

    def to_array(self) -> Array:
        """Return the trials as one array ``(J + 1, 1 + 3 M)``, as a store keeps them."""
        first = np.concatenate([[self.num_seeds], self.outputs, self.noise, np.zeros_like(self.noise)])
        rest = [self.shares[:, None], self.predicted, self.standard, self.measured]
        return np.concatenate([first[None], np.concatenate(rest, axis=1)])

    @classmethod
    def from_array(cls, array: Array) -> Self:
        """Return the trials that :meth:`to_array` made.

        Raises:
            ValueError: If the array is none of these.
        """
        if array.ndim != 2 or array.shape[0] < 2 or array.shape[1] < 4 or array.shape[1] % 3 != 1:
            raise ValueError(f"trials of shape {array.shape}")
        outputs, noise, _ = np.split(array[0, 1:], 3)
        predicted, standard, measured = np.split(array[1:, 1:], 3, axis=1)
        return cls(array[1:, 0], predicted, standard, measured, outputs, noise, int(array[0, 0]))

    def weights_for(self, share: float, concentration: float, standard: float, level: float = 0.9) -> Array:
        """Return the weights of the trials' targets for a target of a set, ``(J, M)``.

        The weight of a trial is that of its most similar target; its targets share it by their similarity.

        Args:
            share: Share of the train rows in the set.
            concentration: Of the set.
            standard: Sum of the target's scores over the set, in standard deviations of random sets.
            level: Of the interval.
        """
        of_trials = self.concentration
        weights = np.zeros(self.predicted.shape)
        largest = np.array([self.shares.max(), of_trials.max()]) * _BEYOND
        if share > largest[0] or concentration > largest[1]:
            return weights
        sets = (np.log(self.shares / share) / _SHARE_WIDTH) ** 2
        sets = sets + (np.log(of_trials / concentration) / _CONCENTRATION_WIDTH) ** 2
        targets = ((np.arcsinh(self.standard) - np.arcsinh(standard)) / _TARGET_WIDTH) ** 2
        for factor in _WIDENED:
            similar = np.exp(-0.5 * targets / factor**2)
            mass = np.exp(-0.5 * sets / factor**2) * similar.max(axis=1)
            weights = similar * (mass / np.maximum(similar.sum(axis=1), 1e-300))[:, None]
            if mass.sum() >= 1.5 * fewest_trials(level):
                break
        return weights

    def interval(
        self,
        predicted: ArrayLike,
        standard: ArrayLike,
        share: float,
        *,
        level: float = 0.9,
        target: int | None = None,
    ) -> EffectInterval:
        r"""Return the calibrated prediction for a set with its interval.

        Targets with similar standardised sums are treated together. Their predictions p are multiplied by a slope that
        is fitted by weighted least squares to the trials (locally linear in the log of the share). The variance of a
        residual is :math:`a + b\,p^2 + c\,s^2`: noise between seeds, errors in proportion to the effect, and errors in
        proportion to the share s of the rows, which remain where the effects of rows cancel. The half-width is the
        conformal quantile of the residuals of the trials, each predicted from the other trials, in units of their
        deviation.

        Args:
            predicted: ``(M,)`` minus the scores of the set, summed; any targets of the trials' kind.
            standard: ``(M,)`` the same, standardised as :attr:`standard`.
            share: Share of the train rows in the set.
            level: Nominal coverage.
            target: Compute the intervals of this target, and of those that resemble it, only.

        Raises:
            InvalidInputError: If the level is out of range.
            NonFiniteError: If a prediction is NaN or infinite.
        """
        asked, sums = finite_array(predicted, "predicted"), finite_array(standard, "standard")
        concentration = float(concentration_of(sums))
        interval = EffectInterval(asked.copy(), np.full(asked.shape, np.inf), np.zeros(asked.shape))
        bins = np.rint(np.arcsinh(sums) / _TARGET_WIDTH)
        for value in np.unique(bins if target is None else bins[target]):
            here = bins == value
            centre = float(np.sinh(value * _TARGET_WIDTH))
            weights = self.weights_for(share, concentration, centre, level)
            interval.similar[here] = weights.sum()
            if weights.sum() >= coverage(level=level) / (1.0 - level):
                pair = self._calibrated(asked[here], share, weights, level)
                interval.predicted[here], interval.half_width[here] = pair
        return interval

    def _calibrated(self, asked: Array, share: float, weights: Array, level: float) -> tuple[Array, Array]:
        """Return predictions and half-widths of some targets, from weights ``(J, M)``."""
        slope = np.log(self.shares / share)[:, None, None] ** np.arange(2)
        parts = self.predicted[:, :, None] * slope
        slopes, of_others = _slopes(parts, self.measured, weights)
        residuals = self.measured - np.einsum("jmp,jp->jm", parts, of_others)
        made = self.predicted, self.shares[:, None]
        variance = _Variance.of(*made, residuals, weights)
        quantile = conformal_quantile(np.abs(residuals) / variance.deviation(*made), weights, level)
        # Trials of one size do not tell the constant from the part that grows with the share.
        return asked * slopes[0], quantile * variance.deviation(asked, max(share, float(self.shares.min())))


def _size(values: Array) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def _slopes(parts: Array, measured: Array, weights: Array) -> tuple[Array, Array]:
    """Return least-squares coefficients of the parts ``(2,)``, and those without each trial ``(J, 2)``."""
    grams = np.einsum("jm,jmp,jmq->jpq", weights, parts, parts)
    products = np.einsum("jm,jmp,jm->jp", weights, parts, measured)
    total = grams.sum(axis=0)
    # Where all trials have one size the parts are collinear, and the first one shall explain the changes alone.
    ridge = np.diag([1e-8, 1e-2]) * total[0, 0] + 1e-300 * np.eye(2)
    coefficients = np.linalg.solve(total + ridge, products.sum(axis=0))
    of_others = np.linalg.solve(total - grams + ridge, (products.sum(axis=0) - products)[..., None])
    return coefficients, of_others[..., 0]


class _Variance(NamedTuple):
    """The variance of a residual: a constant, and parts in proportion to the squares of prediction and share."""

    factors: Array
    least: float

    @classmethod
    def of(cls, predicted: Array, shares: Array, residuals: Array, weights: Array) -> Self:
        """Return the most likely variance for normal residuals.

        Multiplicative updates keep the parts positive and increase the likelihood (Fevotte et al., 2009, for the
        Itakura-Saito divergence).
        """
        used = weights > 0
        terms = cls._terms(predicted, shares)[:, used]
        mass, values = weights[used], residuals[used] ** 2
        mean = max(float(np.average(values, weights=mass)), 1e-200)
        factors = mean / len(terms) / np.maximum(terms @ mass / mass.sum(), 1e-200)
        for _ in range(_STEPS):
            variance = np.maximum(factors @ terms, _LEAST_VARIANCE * mean)
            up, down = terms @ (mass * (values / variance / variance)), terms @ (mass / variance)
            factors = factors * np.sqrt(up / np.maximum(down, 1e-200))
        return cls(factors, _LEAST_VARIANCE * mean)

    @staticmethod
    def _terms(predicted: Array, shares: Array | float) -> Array:
        return np.stack(np.broadcast_arrays(1.0, predicted**2, np.square(shares)))

    def deviation(self, predicted: Array, shares: Array | float) -> Array:
        """Return the standard deviation of residuals, of the shape of the predictions."""
        terms = self._terms(predicted, shares)
        return np.sqrt(np.maximum(np.tensordot(self.factors, terms, 1), self.least))


def standardised_sum(predicted: Array, count: int, num_rows: int, mean: Array, deviation: Array) -> Array:
    """Return a set's sums of scores minus their mean for random sets of its size, in deviations of these, ``(M,)``.

    Args:
        predicted: ``(M,)`` minus the scores of the set, summed.
        count: Rows of the set.
        num_rows: N.
        mean: ``(M,)`` mean score of the train rows.
        deviation: ``(M,)`` standard deviation of the scores over train rows; where it is 0, so is the result.
    """
    spread = deviation * np.sqrt(count * max(1.0 - count / num_rows, 1.0 / num_rows))
    sums: Array = np.where(spread > 0, predicted + count * mean, 0.0) / np.where(spread > 0, spread, 1.0)
    return sums


def concentration_of(standard: Array) -> Array:
    """Return the root mean square over targets of standardised sums, at least 1e-3."""
    concentration: Array = np.maximum(np.sqrt(np.mean(np.square(standard), axis=-1)), 1e-3)
    return concentration
