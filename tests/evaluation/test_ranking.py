"""Rank statistics against scikit-learn, SciPy and enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.evaluation import auc, precision_at, spearman

pytestmark = pytest.mark.quick

TIED_SCORES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30)
TIED_PAIRS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30)


@given(rows=TIED_SCORES)
def test_auc_agrees_with_scikit_learn_also_on_ties(rows):
    scores, labels = zip(*rows, strict=True)
    assume(0 < sum(labels) < len(labels))

    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_of_distinct_scores_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=500), rng.integers(0, 2, 500)

    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("labels", [[0, 0], [1, 1], []])
def test_auc_needs_both_classes(labels):
    with pytest.raises(InvalidInputError, match="AUC needs both classes"):
        auc(np.arange(len(labels)), labels)


@given(rows=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=5), data=st.data())
def test_precision_is_the_average_over_all_orders_of_tied_scores(rows, data):
    k = data.draw(st.integers(1, len(rows)))
    precisions = []
    for order in itertools.permutations(rows):
        ranked = sorted(order, key=lambda row: -row[0])  # stable: ties stay in the order of the permutation
        precisions.append(sum(label for _, label in ranked[:k]) / k)

    scores, labels = zip(*rows, strict=True)
    assert precision_at(k, scores, labels) == pytest.approx(np.mean(precisions), abs=1e-12)


@pytest.mark.parametrize(
    ("k", "seen"), [(0, "k must be an integer"), (4, "at most the number of scores, 3, got 4")]
)
def test_precision_refuses_k_out_of_range(k, seen):
    with pytest.raises(InvalidInputError, match=seen):
        precision_at(k, [1.0, 2.0, 3.0], [0, 1, 1])


@given(pairs=TIED_PAIRS)
def test_spearman_agrees_with_scipy_also_on_ties(pairs):
    a, b = zip(*pairs, strict=True)
    assume(len(set(a)) > 1 and len(set(b)) > 1)

    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_spearman_sees_only_the_order():
    a = np.random.default_rng(0).normal(size=50)

    assert spearman(a, np.exp(3 * a)) == pytest.approx(1.0, abs=1e-15)
    assert spearman(a, -(a**3)) == pytest.approx(-1.0, abs=1e-15)


@pytest.mark.parametrize("values", [[2.0, 2.0, 2.0], [1.0], []])
def test_spearman_of_values_without_an_order_is_refused(values):
    with pytest.raises(InvalidInputError, match="values of a are all equal"):
        spearman(values, np.arange(len(values)))


@pytest.mark.parametrize("statistic", [auc, lambda s, y: precision_at(1, s, y), spearman])
def test_values_that_are_not_finite_are_refused(statistic):
    with pytest.raises(NonFiniteError, match=r"1 of 3 values of .* are NaN or infinite, first at 1"):
        statistic([0.0, float("nan"), 1.0], [0, 1, 1])


@pytest.mark.parametrize("statistic", [auc, lambda s, y: precision_at(1, s, y), spearman])
def test_lengths_must_agree(statistic):
    with pytest.raises(InvalidInputError, match=r"must have one shape \(n,\), got \(2,\) and \(3,\)"):
        statistic([0.0, 1.0], [0, 1, 1])


@pytest.mark.parametrize("statistic", [auc, lambda s, y: precision_at(1, s, y), spearman])
def test_vectors_must_have_one_axis(statistic):
    with pytest.raises(InvalidInputError, match="must be one-dimensional"):
        statistic([[0.0, 1.0]], [[0, 1]])


@pytest.mark.parametrize("statistic", [auc, lambda s, y: precision_at(1, s, y)])
def test_labels_must_be_two_classes(statistic):
    with pytest.raises(
        InvalidInputError, match=r"labels must be booleans, or 0 and 1, got values \[0, 1, 2\]"
    ):
        statistic([0.0, 1.0, 2.0], [0, 1, 2])
