"""Subset masks: sizes, strata, distinctness, removal."""

import math
from collections import Counter

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.evaluation import leave_one_out_masks, removal_masks, subset_masks


@given(n=st.integers(4, 40), s=st.integers(1, 12), alpha=st.floats(0.2, 0.8), seed=st.integers(0, 5))
def test_every_subset_keeps_exactly_alpha_of_the_rows(n, s, alpha, seed):
    masks = subset_masks(n, s, alpha=alpha, seed=seed)

    assert masks.shape == (s, n)
    assert masks.dtype == np.bool_
    assert set(masks.sum(axis=1).tolist()) == {round(alpha * n)}


@given(strata=st.lists(st.sampled_from("abc"), min_size=4, max_size=40), alpha=st.floats(0.2, 0.8))
def test_strata_keep_alpha_of_their_rows_up_to_one(strata, alpha):
    masks = subset_masks(len(strata), 3, alpha=alpha, strata=strata)

    assert set(masks.sum(axis=1).tolist()) == {round(alpha * len(strata))}
    for label, count in Counter(strata).items():
        kept = masks[:, np.array(strata) == label].sum(axis=1)
        assert set(kept.tolist()) <= {math.floor(alpha * count), math.floor(alpha * count) + 1}
        assert len(set(kept.tolist())) == 1


def test_no_subset_comes_twice_before_every_subset_came_once():
    masks = subset_masks(5, 25, alpha=0.4)  # there are 10

    counts = Counter(mask.tobytes() for mask in masks[:10])
    assert len(counts) == 10
    assert sorted(Counter(mask.tobytes() for mask in masks).values()) == [2] * 5 + [3] * 5


def test_more_subsets_begin_with_the_same_ones():
    np.testing.assert_array_equal(subset_masks(30, 4, seed=3), subset_masks(30, 9, seed=3)[:4])


def test_rows_are_kept_equally_often():
    share = subset_masks(20, 2000, alpha=0.3).mean(axis=0)

    np.testing.assert_allclose(share, 0.3, atol=5 * np.sqrt(0.3 * 0.7 / 2000))


def test_seeds_draw_different_subsets():
    assert (subset_masks(30, 1, seed=0) != subset_masks(30, 1, seed=1)).any()


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 0.01, 0.99, float("nan")])
def test_a_subset_must_be_a_proper_one(alpha):
    with pytest.raises(InvalidInputError, match="alpha must lie between 0 and 1 and select at least one"):
        subset_masks(10, 2, alpha=alpha)


def test_strata_must_be_one_per_row():
    with pytest.raises(InvalidInputError, match=r"one value per row, \(4,\), got \(3,\)"):
        subset_masks(4, 1, strata=[0, 0, 1])


@pytest.mark.parametrize("sign", ["helpful", "harmful"])
def test_removal_takes_the_top_rows_of_each_target(sign):
    scores = np.random.default_rng(0).integers(-3, 4, (12, 5)).astype(float)  # with ties

    masks = removal_masks(scores, 4, sign=sign)

    expected, _ = reference.top_k(scores, 4, sign=sign)
    for mask, rows in zip(masks, expected, strict=True):
        assert set(np.flatnonzero(~mask).tolist()) == set(rows.tolist())


def test_removal_must_leave_a_row():
    with pytest.raises(InvalidInputError, match="there are 3 rows, got k = 3"):
        removal_masks(np.ones((3, 2)), 3)


def test_removal_refuses_scores_that_are_not_finite_or_no_matrix():
    with pytest.raises(
        NonFiniteError, match=r"1 of 4 values of scores are NaN or infinite, first at \[1, 0\]"
    ):
        removal_masks([[0.0, 1.0], [np.nan, 1.0]], 1)
    with pytest.raises(
        InvalidInputError, match=r"scores must be a matrix that is not empty, got shape \(3,\)"
    ):
        removal_masks([0.0, 1.0, 2.0], 1)


def test_leave_one_out_leaves_one_row_out():
    np.testing.assert_array_equal(~leave_one_out_masks(6, [4, 1]), np.eye(6, dtype=bool)[[4, 1]])


@pytest.mark.parametrize(
    ("rows", "seen"), [([3], r"rows 0 to 2, got \[3\]"), ([], "at least one"), ([0.5], "list of integers")]
)
def test_rows_left_out_must_exist(rows, seen):
    with pytest.raises(InvalidInputError, match=seen):
        leave_one_out_masks(3, rows or np.array([], dtype=np.int64))
