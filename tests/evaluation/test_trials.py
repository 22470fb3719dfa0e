"""Intervals from measured sets: the quantile by hand, coverage of exchangeable sets, what is refused."""

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.evaluation.trials import (
    Trials,
    concentration_of,
    conformal_quantile,
    fewest_trials,
    standardised_sum,
)


def trials(predicted, measured, share=0.1, standard=None):
    predicted = np.asarray(predicted)
    unknown = np.zeros(predicted.shape[1])
    shares, standard = np.full(len(predicted), share), predicted if standard is None else standard
    return Trials(shares, predicted, standard, np.asarray(measured), unknown, unknown, 1)


@pytest.mark.quick
def test_the_quantile_is_the_one_that_is_counted_by_hand():
    """Nine sets and a new one, each a tenth of the mass, which the targets of a set share; the new one is infinite."""
    residuals = np.arange(1.0, 19.0).reshape(9, 2)
    assert conformal_quantile(residuals, np.ones(9), 0.9) == 18
    assert conformal_quantile(residuals, np.ones(9), 0.84) == 17
    assert conformal_quantile(residuals, np.ones(9), 0.05) == 1
    assert conformal_quantile(residuals, np.ones(9), 0.91) == np.inf
    # Masses of 1 : 3 : 6 to 1 for the new set: 1/11, 4/11, 10/11.
    weighted = [[5.0], [2.0], [7.0]]
    levels = (3 / 11, 4 / 11, 10 / 11, 0.92)
    assert [conformal_quantile(weighted, [1, 3, 6], level) for level in levels] == [2, 5, 7, np.inf]
    shared = np.array([[1, 0], [0, 3], [2, 4]])  # the targets that do not count have the other residuals
    assert conformal_quantile([[5.0, 9.0], [9.0, 2.0], [7.0, 1.0]], shared, 7 / 11) == 2
    assert conformal_quantile([[5.0, 9.0], [9.0, 2.0], [7.0, 1.0]], shared, 8 / 11) == 5
    assert [fewest_trials(level) for level in (0.5, 0.8, 0.9, 0.95)] == [1, 4, 9, 19]


@pytest.mark.parametrize(
    ("residuals", "weights", "level", "seen"),
    [
        (np.ones((3, 2)), np.ones(2), 0.9, r"weights must be \(3,\) or \(3, 2\), got \(2,\)"),
        (np.ones(3), np.ones(3), 0.9, "residuals must be a matrix"),
        (np.ones((3, 2)), np.ones(3), 1.0, "level must lie between 0 and 1, got 1.0"),
    ],
)
def test_what_has_no_quantile_is_refused(residuals, weights, level, seen):
    with pytest.raises(InvalidInputError, match=seen):
        conformal_quantile(residuals, weights, level)


def simulated(rng, count, num_targets=20):
    """Changes with noise that grows with the effect, and of which the targets of a set share a half."""
    predicted = rng.normal(size=(count, num_targets))
    noise = (rng.normal(size=(count, 1)) + rng.normal(size=predicted.shape)) / np.sqrt(2)
    change = 2.0 * np.minimum(predicted, 0) + 0.5 * np.maximum(predicted, 0)
    return predicted, change + (0.2 + 0.5 * np.abs(predicted)) * noise


@pytest.mark.parametrize(("level", "count"), [(0.9, 40), (0.8, 12), (0.5, 20)])
def test_intervals_of_exchangeable_sets_cover_at_least_their_level(level, count):
    """And at most that and the mass of the new set, twice."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(60):
        known = trials(*simulated(rng, count))
        asked, change = (part[0] for part in simulated(rng, 1))
        found = known.interval(asked, asked, 0.1, level=level)
        covered.append((np.abs(change - found.predicted) <= found.half_width).mean())
    spread = 2 * np.std(covered) / np.sqrt(len(covered))
    assert level - spread <= np.mean(covered) <= level + 2 / (0.6 * count + 1) + spread


def test_targets_are_calibrated_by_targets_that_move_alike():
    """Large falls are three times the prediction, small changes a half of it, and each has its own width."""
    rng = np.random.default_rng(1)
    standard = np.concatenate([rng.normal(size=(30, 20)) * 0.3, rng.normal(size=(30, 5)) - 12], axis=1)
    predicted = 0.2 * standard
    slopes = np.where(standard < -5, 3.0, 0.5)
    exact = trials(predicted, slopes * predicted, standard=standard)
    asked = standard[0]
    found = exact.interval(0.2 * asked, asked, 0.1)
    np.testing.assert_allclose(found.predicted, slopes[0] * predicted[0], rtol=0.01)
    assert found.half_width.max() < 0.01
    noise = rng.normal(size=predicted.shape) * np.where(standard < -5, np.abs(predicted), 0.05)
    noisy = trials(predicted, slopes * predicted + noise, standard=standard)
    found = noisy.interval(0.2 * asked, asked, 0.1)
    assert found.half_width[20:].min() > 10 * found.half_width[:20].max()
    only = noisy.interval(0.2 * asked, asked, 0.1, target=22)
    assert only.half_width[22] == found.half_width[22]
    assert np.isinf(only.half_width[:20]).all()


def test_slopes_follow_the_share():
    """Between the sizes of trials, the slope is that of the line through them over the log of the share."""
    rng = np.random.default_rng(7)
    predicted = rng.normal(size=(40, 20))
    shares = np.repeat([0.05, 0.2], 20)
    slopes = np.where(shares == 0.05, 1.0, 2.0)[:, None]
    zeros = np.zeros(20)
    known = Trials(shares, predicted, predicted, slopes * predicted, zeros, zeros, 1)
    for share, slope in ((0.05, 1.0), (0.1, 1.5), (0.2, 2.0)):
        found = known.interval(predicted[3], predicted[3], share)
        np.testing.assert_allclose(found.predicted, slope * predicted[3], rtol=0.02, atol=0.01)


def test_errors_that_grow_with_the_share_are_those_of_the_share_that_is_asked_for():
    """Sums of random rows grow with its root, what they miss with the share, and four targets are few."""
    rng = np.random.default_rng(9)
    shares, zeros = np.repeat([0.01, 0.02, 0.05, 0.1, 0.2], 12), np.zeros(4)
    covered, widths = {0.05: [], 0.2: []}, {0.05: [], 0.2: []}
    for _ in range(60):
        standard = rng.normal(size=(60, 4))
        predicted = standard * np.sqrt(shares)[:, None]
        measured = predicted + rng.normal(size=(60, 4)) * shares[:, None]
        known = Trials(shares, predicted, standard, measured, zeros, zeros, 1)
        for share in covered:
            asked, error = rng.normal(size=(2, 4))
            found = known.interval(asked * np.sqrt(share), asked, share)
            right = asked * np.sqrt(share) + share * error
            covered[share].append((np.abs(right - found.predicted) <= found.half_width).mean())
            widths[share].append(np.median(found.half_width))
    for share, shown in covered.items():
        assert 0.87 <= np.mean(shown) <= 0.98, (share, np.mean(shown))
        # 1.645 for 90 % of a normal distribution; wider, because a new set has the weight of a trial
        assert 1.5 < np.median(widths[share]) / share < 2.6


def test_trials_of_one_size_do_not_say_that_the_noise_of_smaller_sets_is_smaller():
    rng = np.random.default_rng(3)
    predicted, zeros = rng.normal(size=(60, 4)), np.zeros(4)
    noisy = predicted + rng.normal(size=(60, 4))  # between seeds: of any size
    known = Trials(np.full(60, 0.5), predicted, predicted, noisy, zeros, zeros, 1)
    first, *smaller = (
        np.mean([known.interval(zeros, standard, share).half_width for standard in predicted[:20]])
        for share in (0.5, 0.2, 0.05)
    )
    assert 1.5 < first < 2.5  # 1.645 for 90 % of a normal distribution
    assert min(smaller) > 0.9 * first


def test_trials_of_one_size_give_their_slope_to_sets_of_other_sizes():
    """To a size that differs by rounding, too."""
    predicted = np.random.default_rng(8).normal(size=(40, 20))
    known = trials(predicted, 1.5 * predicted, share=1 - 0.8)
    for share in (0.2, 0.1):
        found = known.interval(predicted[3], predicted[3], share)
        np.testing.assert_allclose(found.predicted, 1.5 * predicted[3], rtol=1e-3)


def test_a_trial_is_predicted_from_the_others():
    """One that sets the slope alone says nothing about the error of this slope."""
    predicted = np.full((12, 3), 0.01)
    predicted[0] = 10.0
    measured = np.zeros((12, 3))
    measured[0] = 50.0
    ones = np.ones((12, 3))
    found = trials(predicted, measured, standard=ones).interval(np.full(3, 5.0), ones[0], 0.1)
    np.testing.assert_allclose(found.predicted, 25.0, rtol=0.01)
    assert found.half_width.min() > 15


def test_changes_of_nothing_are_nothing():
    """No score and no change: no error from a division by 0."""
    nothing = trials(np.zeros((20, 3)), np.zeros((20, 3))).interval(np.zeros(3), np.zeros(3), 0.1)
    assert (nothing.predicted == 0).all()
    assert (nothing.half_width < 1e-6).all()


def test_trials_weigh_by_the_similarity_of_sets_and_targets():
    ones = np.ones((20, 4))
    known = trials(ones, ones)
    for share, concentration, standard, expected in (
        (0.1, 1.0, 1.0, 1.0),
        (0.1 / np.exp(0.7), 1.0, 1.0, np.exp(-0.5 * 0.49)),
        (0.1, np.exp(-0.49), 1.0, np.exp(-0.5 * 0.49)),
        (0.1, 1.0, np.sinh(np.arcsinh(1) + 0.35), np.exp(-0.5 * 0.49)),
        (0.1, np.exp(-1.4), 1.0, np.exp(-0.5)),  # widened twice: the sum of the others would be below 13.5
    ):
        found = known.weights_for(share, concentration, standard)
        np.testing.assert_allclose(found, np.full((20, 4), expected / 4), rtol=1e-9)
    known.standard[:, 1:] = -9.0  # one target of each is alike: it has the whole weight of its trial
    own = known.weights_for(0.1, float(known.concentration[0]), 1.0)
    np.testing.assert_allclose(own, np.tile([1.0, 0, 0, 0], (20, 1)), atol=1e-6)


def test_sets_that_no_trials_resemble_have_no_interval():
    rng = np.random.default_rng(3)
    predicted, measured = simulated(rng, 30)
    predicted, measured = 3 * predicted, 3 * measured
    known, asked = trials(predicted, measured, share=0.05), predicted[0]
    for share, factor in ((0.06, 1.0), (0.05, 1.9), (1e-4, 1.0), (0.05, 0.01)):
        found = known.interval(asked, factor * asked, share)
        assert np.isinf(found.half_width).all()
        np.testing.assert_array_equal(found.predicted, asked)
    assert np.isfinite(known.interval(asked, asked, 0.05).half_width).all()
    few = trials(predicted[:8], measured[:8], share=0.05)
    assert np.isinf(few.interval(asked, asked, 0.05).half_width).all()
    assert np.isfinite(few.interval(asked, asked, 0.05, level=0.6).half_width).all()
    extreme = asked.copy()
    extreme[4] = -300.0  # one target falls as none of a trial did
    found = known.interval(asked, np.where(np.arange(20) == 4, extreme, 0.2 * asked), 0.05)
    assert found.half_width[4] == np.inf
    with pytest.raises(NonFiniteError, match="predicted"):
        known.interval([np.nan], [0.0], 0.05)
    with pytest.raises(InvalidInputError, match="level must lie"):
        known.interval(asked, asked, 0.05, level=1.5)


def test_subsets_of_a_verdict_are_compared_with_the_other_subsets():
    rng = np.random.default_rng(4)
    summed, retrained = rng.normal(size=(2, 6, 3))
    found = Trials.of_subsets(summed, retrained, 0.6, 2)
    for j in range(6):
        others = np.arange(6) != j
        np.testing.assert_allclose(found.predicted[j], summed[j] - summed[others].mean(0))
        np.testing.assert_allclose(found.measured[j], retrained[j] - retrained[others].mean(0))
    np.testing.assert_allclose(found.shares, 0.4)
    np.testing.assert_allclose(found.standard, (summed - summed.mean(0)) / summed.std(0, ddof=1))
    assert (len(found), found.num_seeds, found.of_verdict) == (6, 2, True)


def test_random_sets_have_concentration_1_and_equal_rows_the_root_of_their_number():
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(400, 50)) + 3.0

    def concentration(rows, scores):
        summed = -scores[rows].sum(0), len(rows), 400, scores.mean(0), scores.std(0)
        return float(concentration_of(standardised_sum(*summed)))

    found = [concentration(rng.permutation(400)[:count], scores) for count in (4, 40, 200) for _ in range(40)]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(1.0, abs=0.05)
    alike = rng.normal(size=(400, 50))
    alike[:10] = alike[0]
    single = np.sqrt(np.mean(((alike[0] - alike.mean(0)) / alike.std(0)) ** 2))
    assert concentration(np.arange(10), alike) == pytest.approx(np.sqrt(10 / (1 - 10 / 400)) * single)
    assert (standardised_sum(np.zeros(2), 3, 400, np.zeros(2), np.zeros(2)) == 0).all()
