"""Brittleness, rise of the target loss, and detection of wrong labels."""

import numpy as np
import pytest
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.evaluation import mislabel_detection, target_loss_rise
from trak_lite.evaluation.removal import flip_rate


def test_flips_are_counted_over_targets_and_seeds():
    before = np.array([0, 1, 2, 3])
    after = np.array([[0, 1, 2, 0], [1, 1, 2, 0]])

    assert flip_rate(before, after) == 3 / 8


def test_flips_are_counted_among_the_chosen_targets():
    margins = np.array([0.5, -0.2, 1.0])

    assert flip_rate(margins > 0, np.array([-1.0, 2.0, 1.0]) > 0, among=margins > 0) == 1 / 2


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (([0.5], [1.5]), "before must be integers or booleans, got float64.*margins > 0"),
        (([0, 1], [0, 1, 1]), r"got \(2,\), \(2,\) and \(3,\)"),
        (([[0, 1]], [[0, 1]]), r"before and among must be \(M,\)"),
    ],
)
def test_predictions_that_cannot_be_compared_are_refused(arguments, seen):
    with pytest.raises(InvalidInputError, match=seen):
        flip_rate(*arguments)


@pytest.mark.parametrize("among", [[False, False], [1, 0]])
def test_at_least_one_target_must_count(among):
    with pytest.raises(InvalidInputError, match="among must be booleans that are True for at least one"):
        flip_rate([0, 1], [0, 1], among=among)


def test_the_loss_rise_is_after_minus_before_averaged_over_seeds():
    before, after = np.array([1.0, 2.0, 4.0]), np.array([[2.0, 2.0, 4.0], [4.0, 3.0, 3.0]])

    found = target_loss_rise(before, after)

    np.testing.assert_array_equal(found.per_target, [2.0, 0.5, -0.5])
    assert found.mean == 2 / 3
    assert found.interval[0] < found.mean < found.interval[1]


def test_the_interval_of_the_loss_rise_agrees_with_the_normal_one_for_many_targets():
    after = np.random.default_rng(0).normal(1.0, 2.0, 400)

    found = target_loss_rise(np.zeros(400), after)

    half = 1.96 * after.std() / 20
    np.testing.assert_allclose(found.interval, [found.mean - half, found.mean + half], atol=0.1 * half)


@pytest.mark.parametrize(
    ("arguments", "options", "seen"),
    [
        (([0.0, 1.0], [0.0]), {}, r"before must be \(M,\).*got \(2,\) and \(1,\)"),
        (([0.0], [0.0]), {"confidence": 0.0}, "confidence must lie between 0 and 1, got 0.0"),
    ],
)
def test_losses_that_cannot_be_compared_are_refused(arguments, options, seen):
    with pytest.raises(InvalidInputError, match=seen):
        target_loss_rise(*arguments, **options)


def test_losses_must_be_finite():
    with pytest.raises(NonFiniteError, match="1 of 2 values of after are NaN or infinite, first at 1"):
        target_loss_rise([0.0, 0.0], [0.0, np.nan])


@pytest.mark.parametrize("k", [None, 30])
def test_detection_agrees_with_scikit_learn(k):
    rng = np.random.default_rng(0)
    wrong = rng.random(200) < 0.1
    suspicion = rng.normal(size=200) + wrong
    flagged = np.zeros(200, bool)
    flagged[np.argsort(-suspicion)[: k or wrong.sum()]] = True

    found = mislabel_detection(suspicion, wrong, k=k)

    assert found.auc == pytest.approx(roc_auc_score(wrong, suspicion), abs=1e-12)
    assert found.precision == pytest.approx(precision_score(wrong, flagged), abs=1e-12)
    assert found.recall == pytest.approx(recall_score(wrong, flagged), abs=1e-12)
    assert (found.k, found.base_rate) == (k or wrong.sum(), wrong.mean())


def test_detection_needs_both_kinds_of_rows():
    with pytest.raises(InvalidInputError, match="AUC needs both classes"):
        mislabel_detection([0.0, 1.0], [0, 0])
