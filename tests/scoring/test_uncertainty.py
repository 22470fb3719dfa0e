"""Standard errors and agreement over checkpoints and runs, against plain formulas on dense arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from late import Late
from view_cases import DEFAULT, METHODS, Drawn, checkpoint_products, drawn, with_q

from trak_lite.errors import InvalidInputError

stats = Late("scipy.stats")

RUNS, MEMBERS = ["x", "y", "x", "z"], ([0, 2], [1], [3])


def of_groups(rows, members, name="GaussNewton", q="outside"):
    """What each group of checkpoints alone scores, ``(G, N, M)``, with the mean q of the group."""
    parts = [rows.part(list(group)) for group in members]
    return np.stack([with_q(checkpoint_products(part, name), part, q) for part in parts])


def mean_spearman(groups):
    """The mean over pairs of groups ``(G, n, M)``, for each target."""
    return np.array(
        [
            np.mean(
                [stats.spearmanr(a[:, target], b[:, target]).statistic for a, b in combinations(groups, 2)]
            )
            for target in range(groups.shape[2])
        ]
    )


@pytest.mark.parametrize("name", ["GaussNewton", "GradDot", "GradCos"])
@pytest.mark.parametrize("q", ["inside", "off"])
def test_a_mean_has_the_standard_error_of_leaving_out_one_checkpoint(name, q):
    """The exact jackknife: each checkpoint is left out, and the rest is scored again."""
    rows = drawn(num_checkpoints=4)
    left = of_groups(rows, combinations(range(4), 3), name, q)
    expected = np.sqrt(3 / 4 * ((left - left.mean(0)) ** 2).sum(0))

    errors = rows.scores(METHODS[name](q=q)).standard_error()

    np.testing.assert_allclose(errors, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("q", ["outside", "off"])
@pytest.mark.parametrize("runs", [None, RUNS])
def test_checkpoints_or_runs_are_the_unit_of_a_product_of_two_means(q, runs):
    rows = drawn(num_checkpoints=4)
    members = MEMBERS if runs else [[c] for c in range(4)]
    share = len(members) / 4
    k = np.stack([share * checkpoint_products(rows)[m].sum(0) for m in members])
    factors = np.ones((len(members), 1, 1))
    if q == "outside":
        factors = np.stack([share * rows.q[m].astype(np.float64).sum(0) for m in members])[:, :, None]
    change = factors.mean(0) * (k - k.mean(0)) + k.mean(0) * (factors - factors.mean(0))
    expected = np.sqrt((change**2).sum(0) / (len(members) * (len(members) - 1)))

    scores = rows.scores(replace(DEFAULT, q=q))

    def check(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)

    check(scores.standard_error(runs=runs), expected)
    check(scores.standard_error([19, 3, 3], runs=runs), expected[[19, 3, 3]])
    check(scores.standard_error([3, 7], target=-1, runs=runs), expected[[3, 7], 3])
    check(scores.standard_error(target=1, runs=runs), expected[:, 1])
    pairs = np.array([[0, 19], [5, 5], [7, 2], [1, 3]])
    check(scores.standard_error(pairs, runs=runs), np.take_along_axis(expected.T, pairs, 1))


@pytest.mark.quick
@pytest.mark.parametrize("q", ["outside", "inside", "off"])
def test_reliability_ranks_what_each_run_alone_scores(q):
    """Some scores are zero, and tie; the expected agreement of means is by the formula of Spearman and Brown."""
    rows = drawn(num_checkpoints=4)
    rows.train[:, 3:9] = 0
    scores = rows.scores(replace(DEFAULT, q=q))
    kernels, factors = checkpoint_products(rows), rows.q.astype(np.float64)[:, :, None]
    each = {"outside": lambda m: factors[m].mean(0), "off": lambda m: 1.0}
    alone = np.stack(
        [
            (kernels[m] * factors[m]).mean(0) if q == "inside" else kernels[m].mean(0) * each[q](m)
            for m in MEMBERS
        ]
    )
    expected = mean_spearman(alone.astype(np.float32))

    found = scores.reliability(runs=RUNS, threshold=0.2)

    np.testing.assert_allclose(found.agreement, expected, atol=1e-12)
    positive = expected.clip(min=0)
    np.testing.assert_allclose(found.expected, 3 * positive / (1 + 2 * positive))
    np.testing.assert_array_equal(found.reliable, found.expected >= 0.2)
    # The kernel is that of all rows: only the rows that are ranked are fewer.
    some = scores.reliability(runs=RUNS, max_rows=10)
    np.testing.assert_allclose(some.agreement, mean_spearman(alone[:, ::2].astype(np.float32)), atol=1e-12)


def test_checkpoints_that_say_the_same_have_no_error_and_agree():
    one = drawn(num_checkpoints=1)
    same = Drawn(*(np.repeat(part, 3, axis=0) for part in (one.train, one.targets, one.q, one.w)))
    scores = same.scores()

    assert not scores.standard_error().any()
    np.testing.assert_allclose(scores.reliability().agreement, 1)
    np.testing.assert_allclose(scores.checkpoint_agreement(), 1)


def test_scores_without_an_order_agree_with_nothing():
    rows = drawn()
    rows.train[0] = 0

    agreement = rows.scores(METHODS["GradDot"](q="off")).checkpoint_agreement()

    np.testing.assert_array_equal(agreement[0, 1:], 0)
    assert agreement[1, 2] != 0


def test_subtracted_base_models_have_errors_over_runs():
    rows = drawn(num_checkpoints=4)
    k = checkpoint_products(rows)
    each = np.stack([2 * (k[0] - k[1]), 2 * (k[2] - k[3])])

    scores = rows.scores(replace(DEFAULT, q="off", checkpoint_weights=(1, -1, 1, -1)))

    expected = each.std(0, ddof=1) / np.sqrt(2)
    np.testing.assert_allclose(scores.standard_error(runs=[0, 0, 1, 1]), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("checkpoints", "view", "runs", "message"),
    [
        (4, {}, ["a", "b"], "runs has 2 labels, but 4 checkpoints"),
        (4, {}, ["a"] * 4, "at least 2 runs, got 1"),
        (
            4,
            {"checkpoint_weights": (1, -1, 1, -1)},
            None,
            "the checkpoints are not repeats of one measurement",
        ),
        (1, {}, None, "at least 2 checkpoints, got 1"),
    ],
)
def test_groups_that_mean_nothing_are_refused(checkpoints, view, runs, message):
    scores = drawn(num_checkpoints=checkpoints).scores(replace(DEFAULT, **view))

    with pytest.raises(InvalidInputError, match=message):
        scores.standard_error(runs=runs)
    with pytest.raises(InvalidInputError, match=message):
        scores.reliability(runs=runs)
