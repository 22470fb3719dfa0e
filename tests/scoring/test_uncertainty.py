"""Standard errors and agreement over checkpoints and runs, against plain formulas on dense arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from view_cases import DEFAULT, METHODS, Drawn, checkpoint_products, dense_scores, drawn

from trak_lite.errors import InvalidInputError, StateError
from trak_lite.linalg.spread import Spread, agreement, expected_agreement
from trak_lite.methods import AbstractMethod

pytestmark = pytest.mark.quick

RUNS = ["x", "y", "x", "z"]


def jackknife(rows: Drawn, method: AbstractMethod = DEFAULT) -> np.ndarray:
    """Leave out one checkpoint after the other and score again: the exact jackknife, ``(N, M)``."""
    count = len(rows.train)
    left = []
    for out in range(count):
        keep = [c for c in range(count) if c != out]
        part = Drawn(rows.train[keep], rows.targets[keep], rows.q[keep], rows.w[keep])
        left.append(dense_scores(part.source(method)).astype(np.float64))
    stacked = np.stack(left)
    return np.sqrt((count - 1) / count * ((stacked - stacked.mean(0)) ** 2).sum(0))


@pytest.mark.parametrize("name", ["GaussNewton", "GradDot", "GradCos"])
@pytest.mark.parametrize("q", ["inside", "off"])
def test_a_mean_has_the_standard_error_of_leaving_out_one_checkpoint(name: str, q: Any) -> None:
    rows, method = drawn(num_checkpoints=4), METHODS[name](q=q)

    errors = rows.source(method).standard_error(None, slice(None), None)

    np.testing.assert_allclose(errors, jackknife(rows, method), rtol=1e-3, atol=1e-6)


def test_with_q_outside_it_is_that_of_the_product_of_two_means() -> None:
    rows = drawn(num_checkpoints=4)
    k, q = checkpoint_products(rows), rows.q.astype(np.float64)[:, :, None]
    change = q.mean(0) * (k - k.mean(0)) + k.mean(0) * (q - q.mean(0))

    errors = rows.source(replace(DEFAULT, q="outside")).standard_error(None, slice(None), None)

    np.testing.assert_allclose(errors, np.sqrt((change**2).sum(0) / (4 * 3)), rtol=1e-3, atol=1e-6)


def test_with_many_checkpoints_it_is_close_to_leaving_out_one() -> None:
    rows = drawn(num_checkpoints=25)

    errors = rows.source().standard_error(None, slice(None), None)

    np.testing.assert_allclose(errors, jackknife(rows), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("q", ["outside", "off"])
def test_runs_are_the_unit_where_they_are_given(q: Any) -> None:
    rows = drawn(num_checkpoints=4)
    k = checkpoint_products(rows)
    members = [[0, 2], [1], [3]]
    sums = np.stack([3 / 4 * k[m].sum(0) for m in members])
    factors = (
        np.stack([3 / 4 * rows.q[m].sum(0) for m in members])[:, :, None]
        if q == "outside"
        else np.ones((3, 1, 1))
    )
    change = factors.mean(0) * (sums - sums.mean(0)) + sums.mean(0) * (factors - factors.mean(0))

    errors = rows.source(replace(DEFAULT, q=q)).standard_error(None, slice(None), RUNS)

    np.testing.assert_allclose(errors, np.sqrt((change**2).sum(0) / (3 * 2)), rtol=1e-3, atol=1e-6)


def test_some_rows_and_targets_get_the_errors_of_the_whole() -> None:
    source = drawn(num_checkpoints=4).source()
    every = source.standard_error(None, slice(None), RUNS)

    some = source.standard_error(np.array([19, 3, 3]), slice(1, 3), RUNS)
    pairs = np.array([[0, 19], [5, 5], [7, 2], [1, 3]])

    np.testing.assert_allclose(some, every[[19, 3, 3], 1:3], rtol=1e-5)
    np.testing.assert_allclose(
        source.pair_errors(pairs, RUNS), np.take_along_axis(every.T, pairs, 1), rtol=1e-5
    )


def test_pairs_beyond_one_piece_of_rows_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    source = drawn().source()
    pairs = np.array([[0, 19, 4], [5, 5, 1], [7, 2, 18], [1, 3, 3]])
    whole = source.pair_errors(pairs, None)
    monkeypatch.setattr("trak_lite.scoring.source._PAIR_ROWS", 2)

    np.testing.assert_allclose(source.pair_errors(pairs, None), whole, rtol=1e-5)


def test_checkpoints_that_say_the_same_have_no_error() -> None:
    one = drawn(num_checkpoints=1)
    same = Drawn(*(np.repeat(part, 3, axis=0) for part in (one.train, one.targets, one.q, one.w)))

    assert not same.source().standard_error(None, slice(None), None).any()
    np.testing.assert_allclose(same.source().reliability(None, threshold=0.5, max_rows=99).agreement, 1)


def test_standard_errors_cover_the_truth_about_as_often_as_they_claim() -> None:
    """Checkpoints drawn around one truth: two standard errors hold it in about 95 % of cases (t with 11 degrees)."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    spread, total = Spread(), torch.zeros_like(truth)
    for _ in range(12):
        value = truth + torch.randn(200, 5, generator=generator, dtype=torch.float64)
        total += value / 12
        spread.add(value)

    held = ((total - truth).abs() <= 2.2 * spread.standard_error()).double().mean()

    assert 0.93 < held < 0.97


# ------------------------------------------------------------------------ agreement


def test_agreement_is_the_mean_of_the_rank_correlations_of_all_pairs() -> None:
    generator = np.random.default_rng(0)
    groups = [np.round(generator.normal(size=(30, 3)), 0) for _ in range(4)]  # rounded: ties

    found = agreement([torch.from_numpy(group) for group in groups])

    for target in range(3):
        pairs = [
            spearmanr(groups[a][:, target], groups[b][:, target]).statistic
            for a in range(4)
            for b in range(a)
        ]
        assert float(found[target]) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_scores_without_an_order_agree_with_nothing() -> None:
    flat, sloped = torch.ones(5, 1), torch.arange(5.0)[:, None]

    assert float(agreement([flat, sloped])) == 0
    with pytest.raises(StateError, match="at least 2 checkpoints or runs, got 1"):
        agreement([sloped])


@pytest.mark.parametrize("q", ["outside", "inside", "off"])
def test_reliability_ranks_what_each_run_alone_scores(q: Any) -> None:
    rows = drawn(num_checkpoints=4)
    alone = []
    for members in ([0, 2], [1], [3]):
        part = Drawn(rows.train[members], rows.targets[members], rows.q[members], rows.w[members])
        alone.append(torch.from_numpy(dense_scores(part.source(replace(DEFAULT, q=q)))))

    found = rows.source(replace(DEFAULT, q=q)).reliability(RUNS, threshold=0.2, max_rows=1000)

    np.testing.assert_allclose(found.agreement, agreement(alone), atol=1e-12)
    np.testing.assert_allclose(found.expected, expected_agreement(agreement(alone), 3))
    np.testing.assert_array_equal(found.reliable, found.expected >= 0.2)


def test_reliability_of_many_targets_is_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    source = drawn(num_targets=7).source()
    whole = source.reliability(None, threshold=0.5, max_rows=1000)
    monkeypatch.setattr("trak_lite.scoring.source._RANKED_VALUES", 3 * 20 * 2)

    pieces = source.reliability(None, threshold=0.5, max_rows=1000)

    np.testing.assert_allclose(pieces.agreement, whole.agreement)


def test_reliability_can_rank_evenly_spaced_rows_only() -> None:
    rows = drawn()
    some = rows.source().reliability(None, threshold=0.5, max_rows=10)

    # The kernel is that of all rows: only the rows that are ranked are fewer.
    groups = [
        torch.from_numpy(k * q[:, None])[::2] for k, q in zip(checkpoint_products(rows), rows.q, strict=True)
    ]
    np.testing.assert_allclose(some.agreement, agreement(groups))


def test_a_run_as_noisy_as_its_signal_agrees_by_half_and_three_of_them_by_three_quarters() -> None:
    """The expected agreement of means is what fresh means show, within sampling error."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, 1, generator=generator)
    runs = [truth + torch.randn(4000, 1, generator=generator) for _ in range(6)]

    single = agreement(runs[:3])
    fresh = spearmanr(sum(runs[:3]).flatten(), sum(runs[3:]).flatten()).statistic

    assert float(single) == pytest.approx(6 / np.pi * np.arcsin(0.5 / 2), abs=0.03)  # of Gaussian ranks
    assert float(expected_agreement(single, 3)) == pytest.approx(fresh, abs=0.03)


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("view", "runs", "message"),
    [
        ({}, ["a", "b"], "runs has 2 labels, but 4 checkpoints"),
        ({}, ["a"] * 4, "at least 2 runs, got 1"),
        ({"checkpoint_weights": (1, -1, 1, -1)}, None, "the checkpoints are not repeats of one measurement"),
    ],
)
def test_groups_that_mean_nothing_are_refused(view: Any, runs: Any, message: str) -> None:
    source = drawn(num_checkpoints=4).source(replace(DEFAULT, **view))

    with pytest.raises(InvalidInputError, match=message):
        source.standard_error(None, slice(None), runs)
    with pytest.raises(InvalidInputError, match=message):
        source.reliability(runs, threshold=0.5, max_rows=10)


def test_subtracted_base_models_have_errors_over_runs() -> None:
    rows = drawn(num_checkpoints=4)
    k = checkpoint_products(rows)
    each = np.stack([2 * (k[0] - k[1]), 2 * (k[2] - k[3])])

    errors = rows.source(replace(DEFAULT, q="off", checkpoint_weights=(1, -1, 1, -1))).standard_error(
        None, slice(None), [0, 0, 1, 1]
    )

    np.testing.assert_allclose(errors, each.std(0, ddof=1) / np.sqrt(2), rtol=1e-3, atol=1e-6)


def test_one_checkpoint_has_no_standard_error() -> None:
    with pytest.raises(InvalidInputError, match="at least 2 checkpoints, got 1"):
        drawn(num_checkpoints=1).source().standard_error(None, slice(None), None)
    with pytest.raises(StateError, match="at least 2 checkpoints or runs, got 0"):
        Spread().standard_error()
