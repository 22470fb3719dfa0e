"""The linear datamodeling score against SciPy, and its bootstrap against a plain loop that sorts anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, spearmanr

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.evaluation import (
    compare_datamodeling_scores,
    leave_one_out_correlation,
    leave_one_out_masks,
    linear_datamodeling_score,
    subset_masks,
    summed_scores,
)


def problem(num_subsets=12, num_targets=7, noise=1.0, seed=0):
    rng = np.random.default_rng(seed)
    masks = subset_masks(20, num_subsets, seed=seed)
    truth = rng.normal(size=(20, num_targets))
    scores = truth + noise * rng.normal(size=truth.shape)
    return scores, masks, masks @ truth + 0.1 * rng.normal(size=(num_subsets, num_targets))


def plain_spearman(predicted, actual):
    if len(set(actual)) == 1:
        return np.nan
    return 0.0 if len(set(predicted)) == 1 else spearmanr(predicted, actual).statistic


@given(
    pairs=st.lists(
        st.tuples(*[st.integers(-2, 2)] * 4),
        min_size=2,
        max_size=12,
    ).filter(lambda rows: len({row[2] for row in rows}) > 1)
)
def test_each_target_has_the_spearman_correlation_of_scipy_also_on_ties(pairs):
    table = np.array(pairs, dtype=float)

    found = linear_datamodeling_score(table[:, :2], None, table[:, 2:], num_resamples=1)

    expected = np.array([plain_spearman(table[:, j], table[:, 2 + j]) for j in (0, 1)])
    np.testing.assert_allclose(found.per_target, expected, atol=1e-12)
    assert found.mean == pytest.approx(np.nanmean(expected), abs=1e-12)
    assert found.num_constant == np.isnan(expected).sum()


def test_scores_are_summed_over_the_rows_of_each_subset():
    scores, masks, outputs = problem()
    sums = np.array([[scores[mask, j].sum() for j in range(scores.shape[1])] for mask in masks])

    np.testing.assert_allclose(summed_scores(scores, masks), sums, atol=1e-12)
    np.testing.assert_array_equal(
        linear_datamodeling_score(scores, masks, outputs).per_target,
        linear_datamodeling_score(sums, None, outputs).per_target,
    )


def test_the_interval_has_the_spread_of_resampled_subsets_and_targets():
    scores, masks, outputs = problem(num_subsets=8, num_targets=4)
    predicted, rng = masks @ scores, np.random.default_rng(5)
    means = []
    for _ in range(40):
        s, t = rng.integers(0, 8, 8), rng.integers(0, 4, 4)
        means.append(np.nanmean([plain_spearman(predicted[s, j], outputs[s, j]) for j in t]))

    found = linear_datamodeling_score(scores, masks, outputs, num_resamples=40, seed=5, confidence=0.9)

    half = norm.ppf(0.95) * np.std(means)
    np.testing.assert_allclose(found.interval, [found.mean - half, found.mean + half], atol=1e-12)


def test_the_interval_is_wider_with_fewer_subsets():
    widths = []
    for count in (6, 60):
        low, high = linear_datamodeling_score(*problem(count, 30), num_resamples=200).interval
        widths.append(high - low)

    assert widths[0] > 2 * widths[1]


def test_intervals_of_few_subsets_cover_the_expected_score():
    """Predictions and outputs with a known correlation; 8 subsets, nominal 95 %."""
    covered = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        predicted = rng.normal(size=(8, 25)) + rng.normal(
            size=(8, 1)
        )  # targets share what subsets do to them
        outputs = 0.4 * predicted + rng.normal(size=(8, 25)) + rng.normal(size=(8, 1))
        expected = 6 / np.pi * np.arcsin(0.4 / np.sqrt(0.4**2 + 1) / 2)
        low, high = linear_datamodeling_score(predicted, None, outputs, num_resamples=200).interval
        covered += low <= expected <= high

    assert covered >= 36


def test_the_interval_of_a_correlation_ends_at_one():
    scores, masks, outputs = problem(num_subsets=4, noise=0.0)

    assert linear_datamodeling_score(scores, masks, outputs).interval[1] <= 1.0


def test_targets_that_never_change_are_left_out_of_the_mean_and_counted():
    scores, masks, outputs = problem()
    outputs[:, 2] = 1.5

    found = linear_datamodeling_score(scores, masks, outputs)

    others = np.delete(np.arange(outputs.shape[1]), 2)
    assert np.isnan(found.per_target[2])
    assert found.num_constant == 1
    assert found.mean == linear_datamodeling_score(scores[:, others], masks, outputs[:, others]).mean
    assert "12 subsets, 6 targets, 1 constant targets left out" in str(found)


def test_scores_that_are_all_equal_count_as_zero():
    scores, masks, outputs = problem()
    scores[:, 0] = 0.0

    assert linear_datamodeling_score(scores, masks, outputs).per_target[0] == 0.0


def test_only_the_order_of_predictions_matters():
    scores, masks, outputs = problem()
    scale = np.linspace(0.5, 3, scores.shape[1])

    assert (
        linear_datamodeling_score(scores * scale, masks, np.exp(outputs)).mean
        == linear_datamodeling_score(scores, masks, outputs).mean
    )


def test_a_comparison_is_the_difference_of_both_scores():
    scores, masks, outputs = problem()
    rough = problem(noise=4.0)[0]

    found = compare_datamodeling_scores(scores, rough, masks, outputs)

    means = [linear_datamodeling_score(s, masks, outputs).mean for s in (scores, rough)]
    assert found.mean == pytest.approx(means[0] - means[1], abs=1e-12)
    assert found.interval[0] < found.mean < found.interval[1]


def test_a_comparison_of_equal_methods_is_exactly_zero():
    scores, masks, outputs = problem()

    assert compare_datamodeling_scores(scores, 2 * scores, masks, outputs).interval == (0.0, 0.0)


def test_leave_one_out_correlation_is_the_score_of_leave_one_out_masks():
    scores, _, _ = problem()
    rows = [3, 0, 11, 7, 19]
    outputs = -scores[rows] + np.random.default_rng(1).normal(size=(5, scores.shape[1]))

    found = leave_one_out_correlation(scores, rows, outputs)

    expected = linear_datamodeling_score(scores, leave_one_out_masks(20, rows), outputs)
    np.testing.assert_allclose(found.per_target, expected.per_target, atol=1e-12)


def test_an_interval_without_a_resample_that_has_an_order_is_nan():
    found = linear_datamodeling_score([[0.0], [1.0]], None, [[0.0], [1.0]], num_resamples=1, seed=0)

    assert found.mean == 1.0
    assert np.isnan(found.interval).all()


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"scores": np.ones((12, 7))}, "scores have 12 train rows, masks 20.*masks=None"),
        ({"scores": np.ones((9, 7))}, r"scores have 9 train rows, masks 20; they must agree\.$"),
        ({"outputs": np.ones((12, 6))}, r"Predictions have shape \(12, 7\), outputs \(12, 6\)"),
        ({"outputs": np.ones((12, 7))}, "The outputs of all 7 targets are the same for all 12 subsets"),
        ({"masks": np.ones((12, 20))}, "masks must be a boolean matrix"),
        ({"confidence": 1.0}, "confidence must lie between 0 and 1, got 1.0"),
        ({"num_resamples": 0}, "num_resamples must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_correlated_is_refused(change, seen):
    scores, masks, outputs = problem()

    with pytest.raises(InvalidInputError, match=seen):
        linear_datamodeling_score(**{"scores": scores, "masks": masks, "outputs": outputs, **change})


def test_one_subset_has_no_correlation():
    with pytest.raises(InvalidInputError, match="needs at least 2 of them, got 1"):
        linear_datamodeling_score([[1.0]], None, [[1.0]])


def test_outputs_must_be_finite():
    scores, masks, outputs = problem()
    outputs[3, 1] = np.inf

    with pytest.raises(NonFiniteError, match=r"values of outputs are NaN or infinite, first at \[3, 1\]"):
        linear_datamodeling_score(scores, masks, outputs)
