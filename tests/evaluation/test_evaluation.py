"""Ranks, datamodeling scores, subsets, removal, detection and BM25 against SciPy, formulas and loops."""

import itertools
import math
import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from late import Late

from trak_lite import evaluation
from trak_lite.errors import InvalidInputError, NonFiniteError

stats = Late("scipy.stats")
UNTIMED = settings(
    deadline=None
)  # the first example imports a package, and other work may take the processor
TIED_SCORES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30)
TIED_PAIRS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30)


@pytest.mark.quick
@UNTIMED
@given(rows=TIED_SCORES)
def test_auc_is_the_share_of_pairs_in_order_and_ties_count_half(rows):
    scores, labels = zip(*rows, strict=True)
    assume(0 < sum(labels) < len(labels))
    assert evaluation.auc(scores, labels) == pytest.approx(share_in_order(scores, labels), abs=1e-12)


def share_in_order(scores, labels):
    """Of the pairs of a row with the label and one without, those in which the former has the larger score."""
    right, wrong = ([s for s, y in zip(scores, labels, strict=True) if y == label] for label in (True, False))
    return np.mean([(a > b) + (a == b) / 2 for a, b in itertools.product(right, wrong)])


@UNTIMED
@given(rows=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=5), data=st.data())
def test_precision_is_the_average_over_all_orders_of_tied_scores(rows, data):
    k = data.draw(st.integers(1, len(rows)))
    precisions = []
    for order in itertools.permutations(rows):
        ranked = sorted(order, key=lambda row: -row[0])  # stable: ties stay in the order of the permutation
        precisions.append(sum(label for _, label in ranked[:k]) / k)
    scores, labels = zip(*rows, strict=True)
    for number in (k, np.int8(k), torch.tensor(k, dtype=torch.uint8)):
        assert evaluation.precision_at(number, scores, labels) == pytest.approx(
            np.mean(precisions), abs=1e-12
        )


def test_a_narrow_integer_does_not_overflow():
    assert evaluation.precision_at(np.uint8(200), np.arange(600.0), np.arange(600) >= 300) == 1.0


@pytest.mark.quick
@UNTIMED
@given(pairs=TIED_PAIRS)
def test_spearman_agrees_with_scipy_also_on_ties(pairs):
    a, b = zip(*pairs, strict=True)
    assume(len(set(a)) > 1 and len(set(b)) > 1)
    assert evaluation.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


# The linear datamodeling score

without_interval = partial(evaluation.linear_datamodeling_score, num_resamples=1)


def problem(num_subsets=12, num_targets=7, noise=1.0, seed=0):
    rng = np.random.default_rng(seed)
    masks = evaluation.subset_masks(20, num_subsets, seed=seed)
    truth = rng.normal(size=(20, num_targets))
    scores = truth + noise * rng.normal(size=truth.shape)
    return scores, masks, masks @ truth + 0.1 * rng.normal(size=(num_subsets, num_targets))


def plain_spearman(predicted, actual):
    if len(set(actual)) == 1:
        return np.nan
    return 0.0 if len(set(predicted)) == 1 else stats.spearmanr(predicted, actual).statistic


ROWS_OF_FOUR = st.lists(st.tuples(*[st.integers(-2, 2)] * 4), min_size=2, max_size=12)


@UNTIMED
@given(pairs=ROWS_OF_FOUR.filter(lambda rows: len({row[2] for row in rows}) > 1))
def test_each_target_has_the_spearman_correlation_of_scipy_also_on_ties(pairs):
    table = np.array(pairs, dtype=float)
    found = without_interval(table[:, :2], None, table[:, 2:])
    expected = np.array([plain_spearman(table[:, j], table[:, 2 + j]) for j in (0, 1)])
    np.testing.assert_allclose(found.per_target, expected, atol=1e-12)
    assert found.mean == pytest.approx(np.nanmean(expected), abs=1e-12)
    assert found.num_constant == np.isnan(expected).sum()


@pytest.mark.quick
def test_scores_are_summed_over_the_rows_of_each_subset():
    scores, masks, outputs = problem()
    sums = np.array([[scores[mask, j].sum() for j in range(scores.shape[1])] for mask in masks])
    np.testing.assert_allclose(evaluation.summed_scores(scores, masks), sums, atol=1e-12)
    whole = without_interval(scores, masks, outputs)
    np.testing.assert_array_equal(whole.per_target, without_interval(sums, None, outputs).per_target)
    rough = problem(noise=4.0)[0]
    compared = evaluation.compare_datamodeling_scores(scores, rough, masks, outputs, num_resamples=100)
    other = without_interval(rough, masks, outputs)
    assert compared.mean == pytest.approx(whole.mean - other.mean, abs=1e-12)
    assert compared.interval[0] < compared.mean < compared.interval[1]
    same = evaluation.compare_datamodeling_scores(scores, 2 * scores, masks, outputs, num_resamples=100)
    assert same.interval == (0.0, 0.0)


def test_sums_are_exact_so_that_equal_predictions_are_ties():
    """Of values of all sizes, whose sums cancel, and of constants that binary numbers do not have."""
    rng = np.random.default_rng(0)
    masks = evaluation.subset_masks(56, 10, seed=0)
    wide = np.ldexp(
        rng.normal(size=(56, 4)), rng.integers([-9, -60, -400, -1074], [9, 60, 400, 960], (56, 4))
    )
    wide[28:] = -wide[:28]
    expected = [[math.fsum(column[mask]) for column in wide.T] for mask in masks]
    np.testing.assert_array_equal(evaluation.summed_scores(wide, masks), expected)
    order = rng.permutation(56)
    np.testing.assert_array_equal(evaluation.summed_scores(wide[order], masks[:, order]), expected)
    found = without_interval(np.tile([0.1, 1 / 3, 0.0], (56, 1)), masks, rng.normal(size=(10, 3)))
    np.testing.assert_array_equal(found.per_target, 0.0)
    with pytest.raises(NonFiniteError, match="Sums of the scores are beyond float64"):
        evaluation.summed_scores(np.full((56, 1), 1e308), masks)


def test_intervals_have_the_spread_of_resampled_subsets_and_targets():
    """Also with ties and columns that never change; the lead of a method is that on the same resamples."""
    rng = np.random.default_rng(3)
    outputs = rng.normal(size=(12, 9))
    first, second = outputs + rng.normal(size=(12, 9)), np.round(outputs + 3 * rng.normal(size=(12, 9)))
    outputs[:, 4], second[:, 2] = 1.0, 0.0
    drawn, means = np.random.default_rng(7), []
    for _ in range(50):
        s, t = drawn.integers(0, 12, 12), drawn.integers(0, 9, 9)
        both = [np.nanmean([plain_spearman(one[s, j], outputs[s, j]) for j in t]) for one in (first, second)]
        means.append([*both, both[0] - both[1]])
    settings = {"masks": None, "outputs": outputs, "num_resamples": 50, "seed": 7, "confidence": 0.9}
    found = [evaluation.linear_datamodeling_score(one, **settings) for one in (first, second)]
    found.append(evaluation.compare_datamodeling_scores(first, second, **settings))
    for one, half in zip(found, stats.norm.ppf(0.95) * np.std(means, axis=0), strict=True):
        np.testing.assert_allclose(one.interval, [one.mean - half, one.mean + half], atol=1e-12)


def test_intervals_of_few_subsets_cover_the_expected_score():
    """Predictions and outputs with a known correlation; 8 subsets, nominal 95 %."""
    covered = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        shared = rng.normal(size=(2, 8, 1))  # targets share what subsets do to them
        predicted = rng.normal(size=(8, 25)) + shared[0]
        outputs = 0.4 * predicted + rng.normal(size=(8, 25)) + shared[1]
        expected = 6 / np.pi * np.arcsin(0.4 / np.sqrt(0.4**2 + 1) / 2)
        low, high = evaluation.linear_datamodeling_score(predicted, None, outputs, num_resamples=100).interval
        covered += low <= expected <= high
    assert covered >= 36


@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("num_subsets", [2, 3, 4, 5, pytest.param(6, marks=pytest.mark.campaign)])
def test_of_all_orders_of_few_subsets_at_most_one_in_forty_is_no_chance(num_subsets, num_targets):
    """Without a relation all orders are equally likely, and targets may say the same."""
    orders = list(itertools.permutations(range(num_subsets)))
    predicted, above, below = np.arange(num_subsets), 0, 0
    for seed, order in enumerate(orders):
        pair = (np.repeat(np.array(one, float)[:, None], num_targets, axis=1) for one in (predicted, order))
        found = evaluation.linear_datamodeling_score(
            next(pair), None, next(pair), num_resamples=20, seed=seed
        )
        assert found.interval[0] < found.interval[1]
        above, below = above + (found.interval[0] > 0), below + (found.interval[1] < 0)
    assert max(above, below) <= len(orders) / 40
    assert (above > 0) == (num_subsets >= 5), "a perfect order of 5 subsets is a proof"


def test_an_interval_without_spread_has_that_of_all_permutations():
    rng = np.random.default_rng(0)
    outputs, other = rng.normal(size=(2, 5, 3))
    outputs[:, 1] = other[:, 1] = 2.0  # left out
    orders = [list(order) for order in itertools.permutations(range(5))]
    kept = (0, 2)
    by_chance = np.array([
        [np.mean([plain_spearman(one[order, j], outputs[:, j]) for j in kept]) for one in (outputs, other)]
        for order in orders
    ])  # fmt: skip
    half = stats.norm.ppf(0.95) * by_chance[:, 0].std()
    found = evaluation.linear_datamodeling_score(outputs, None, outputs, num_resamples=20, confidence=0.9)
    np.testing.assert_allclose(found.interval, [1 - half, 1], atol=1e-12)
    half = stats.norm.ppf(0.975) * (by_chance[:, 0] - by_chance[:, 1]).std()
    found = evaluation.compare_datamodeling_scores(outputs, other, None, outputs, num_resamples=1)
    np.testing.assert_allclose(found.interval, [found.mean - half, found.mean + half], atol=1e-12)


def test_many_subsets_of_few_targets_need_no_matrix_of_subsets():
    scores, outputs = np.random.default_rng(0).normal(size=(2, 2000, 1))
    tracemalloc.start()
    try:
        low, high = evaluation.linear_datamodeling_score(scores, None, outputs, num_resamples=2).interval
        assert tracemalloc.get_traced_memory()[1] < 8 * 2000**2 / 4
    finally:
        tracemalloc.stop()
    assert low < 0 < high


def test_the_interval_of_a_correlation_ends_at_one_and_is_everything_for_fewer_than_five_subsets():
    scores, masks, outputs = problem(num_subsets=5, noise=0.0)
    assert evaluation.linear_datamodeling_score(scores, masks, outputs).interval[1] <= 1.0
    for some in (masks[:4], masks[:2]):
        found = evaluation.linear_datamodeling_score(scores, some, some @ scores)
        assert (found.mean, found.interval) == (pytest.approx(1.0), (-1.0, 1.0))
        lead = evaluation.compare_datamodeling_scores(scores, -scores, some, some @ scores)
        assert (lead.mean, lead.interval) == (pytest.approx(2.0), (-2.0, 2.0))


def test_targets_that_never_change_are_left_out_of_the_mean_and_counted():
    scores, masks, outputs = problem()
    scores[:, 0], outputs[:, 2] = 0.0, 1.5
    found = without_interval(scores, masks, outputs)
    others = np.delete(np.arange(outputs.shape[1]), 2)
    assert found.per_target[0] == 0.0, "scores that are all equal count as zero"
    assert np.isnan(found.per_target[2])
    assert found.num_constant == 1
    assert found.mean == without_interval(scores[:, others], masks, outputs[:, others]).mean
    assert "12 subsets, 6 targets, 1 constant targets left out" in str(found)


def test_leave_one_out_correlation_is_the_score_of_leave_one_out_masks():
    scores, _, _ = problem()
    rows = [3, 0, 11, 7, 19]
    outputs = -scores[rows] + np.random.default_rng(1).normal(size=(5, scores.shape[1]))
    found = evaluation.leave_one_out_correlation(scores, rows, outputs)
    expected = without_interval(scores, evaluation.leave_one_out_masks(20, rows), outputs)
    np.testing.assert_allclose(found.per_target, expected.per_target, atol=1e-12)
    np.testing.assert_array_equal(~evaluation.leave_one_out_masks(6, [4, 1]), np.eye(6, dtype=bool)[[4, 1]])


# Subsets and removal
@UNTIMED
@given(strata=st.lists(st.sampled_from("abc"), min_size=4, max_size=40), alpha=st.floats(0.2, 0.8))
def test_every_subset_keeps_alpha_of_the_rows_and_of_each_stratum_up_to_one(strata, alpha):
    for groups in (None, strata):
        masks = evaluation.subset_masks(len(strata), 3, alpha=alpha, strata=groups)
        assert (masks.shape, masks.dtype) == ((3, len(strata)), np.bool_)
        assert set(masks.sum(axis=1).tolist()) == {round(alpha * len(strata))}
    for label, count in Counter(strata).items():
        kept = set(masks[:, np.array(strata) == label].sum(axis=1).tolist())
        assert kept <= {math.floor(alpha * count), math.floor(alpha * count) + 1}
        assert len(kept) == 1


def test_subsets_come_equally_often_and_begin_with_those_of_fewer():
    masks = evaluation.subset_masks(5, 25, alpha=0.4)  # there are 10
    assert len({mask.tobytes() for mask in masks[:10]}) == 10
    assert sorted(Counter(mask.tobytes() for mask in masks).values()) == [2] * 5 + [3] * 5
    few, many = (evaluation.subset_masks(30, count, seed=3) for count in (4, 9))
    np.testing.assert_array_equal(few, many[:4])
    assert (evaluation.subset_masks(30, 1, seed=0) != evaluation.subset_masks(30, 1, seed=1)).any()
    share = evaluation.subset_masks(20, 2000, alpha=0.3).mean(axis=0)
    np.testing.assert_allclose(share, 0.3, atol=5 * np.sqrt(0.3 * 0.7 / 2000))


@pytest.mark.parametrize("sign", ["helpful", "harmful"])
def test_removal_takes_the_top_rows_of_each_target(sign):
    scores = np.random.default_rng(0).integers(-3, 4, (12, 5)).astype(float)  # with ties
    masks = evaluation.removal_masks(scores, 4, sign=sign)
    expected, _ = reference.top_k(scores, 4, sign=sign)
    for mask, rows in zip(masks, expected, strict=True):
        assert set(np.flatnonzero(~mask).tolist()) == set(rows.tolist())


def test_the_loss_rise_is_after_minus_before_averaged_over_seeds():
    after = np.array([[2.0, 2.0, 4.0], [4.0, 3.0, 3.0]])
    found = evaluation.target_loss_rise(np.array([1.0, 2.0, 4.0]), after)
    np.testing.assert_array_equal(found.per_target, [2.0, 0.5, -0.5])
    assert found.mean == 2 / 3
    assert found.interval[0] < found.mean < found.interval[1]
    after = np.random.default_rng(0).normal(1.0, 2.0, 400)
    found = evaluation.target_loss_rise(np.zeros(400), after)
    half = 1.96 * after.std() / 20  # of a normal distribution
    np.testing.assert_allclose(found.interval, [found.mean - half, found.mean + half], atol=0.1 * half)


@pytest.mark.parametrize("k", [None, 30, np.int64(30)])
def test_detection_counts_what_is_wrong_among_the_k_most_suspicious_rows(k):
    rng = np.random.default_rng(0)
    wrong = rng.random(200) < 0.1
    suspicion = rng.normal(size=200) + wrong
    hits = sum(wrong[row] for row in sorted(range(200), key=lambda row: -suspicion[row])[: k or wrong.sum()])
    found = evaluation.mislabel_detection(suspicion, wrong, k=k)
    assert found.auc == pytest.approx(share_in_order(suspicion, wrong), abs=1e-12)
    assert found.precision == pytest.approx(hits / (k or wrong.sum()), abs=1e-12)
    assert found.recall == pytest.approx(hits / wrong.sum(), abs=1e-12)
    assert (found.k, found.base_rate) == (k or wrong.sum(), wrong.mean())


# BM25
TEXTS = ["The cat sat on the mat.", "A dog and a cat", "dogs bark", "", "the dog the dog the dog"]
QUERIES = ["the DOG, the cat", "nothing known", "dog"]


def words(text):
    return text.lower().replace(".", "").replace(",", "").split()


def formula(query, k1, b):
    lengths = [len(words(text)) for text in TEXTS]
    for text, length in zip(TEXTS, lengths, strict=True):
        total = 0.0
        for token in words(query):
            containing = sum(token in words(other) for other in TEXTS)
            idf = math.log(1 + (len(TEXTS) - containing + 0.5) / (containing + 0.5))
            count = words(text).count(token)
            total += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * length / np.mean(lengths)))
        yield total


@pytest.mark.parametrize("settings", [{"k1": 1.5, "b": 0.75}, {"k1": 0.9, "b": 0.4}])
def test_bm25_is_its_formula_and_tokens_stand_for_their_text(settings):
    expected = np.array([list(formula(query, **settings)) for query in QUERIES]).T
    found = evaluation.bm25(TEXTS, QUERIES, **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not expected[:, 1].any()
    tokens = {word: number for number, word in enumerate({w for t in (*TEXTS, *QUERIES) for w in words(t)})}
    coded = [[[tokens[word] for word in words(text)] for text in texts] for texts in (TEXTS, QUERIES)]
    tensors = [list(map(torch.tensor, texts)) for texts in coded]
    arrays, lists = ([list(map(form, texts)) for texts in tensors] for form in (np.asarray, list))
    for train, targets in (coded, tensors, arrays, lists, (coded[0], tensors[1])):
        np.testing.assert_array_equal(evaluation.bm25(train, targets, **settings), found)


# What is refused
def lds(**change):
    scores, masks, outputs = problem()
    arguments = {"scores": scores, "masks": masks, "outputs": outputs, **change}
    return evaluation.linear_datamodeling_score(**arguments)


def first_precision(scores, labels):
    return evaluation.precision_at(1, scores, labels)


NAN, ONE, THREE = float("nan"), np.ones, [1.0, 2.0, 3.0]
STATISTICS = [evaluation.auc, first_precision, evaluation.spearman]
ALPHA = "alpha must lie between 0 and 1 and select at least one"
FIRST_AT_1 = "1 of 3 values of .* NaN or infinite, first at 1"
NOT_FINITE = [
    *((f, {"": ([0.0, NAN, 1.0], [0, 1, 1])}, FIRST_AT_1) for f in STATISTICS),
    (lds, {"outputs": np.full((12, 7), np.inf)}, r"84 of 84 values of outputs .* first at \[0, 0\]"),
    (evaluation.removal_masks, {"": ([[0.0, 1.0], [NAN, 1.0]], 1)}, r"1 of 4 values of scores .* first at \[1, 0\]"),
    (evaluation.target_loss_rise, {"": ([0.0, 0.0], [0.0, NAN])}, "1 of 2 values of after .* first at 1"),
]  # fmt: skip
INVALID = [
    *((f, {"": ([0.0, 1.0], [0, 1, 1])}, r"one shape \(n,\), got \(2,\) and \(3,\)") for f in STATISTICS),
    *((f, {"": ([[0.0, 1.0]], [[0, 1]])}, "must be one-dimensional") for f in STATISTICS),
    *((f, {"": (THREE, [0, 1, 2])}, r"booleans, or 0 and 1, got values \[0, 1, 2\]") for f in STATISTICS[:2]),
    *((evaluation.auc, {"": (THREE[: len(y)], y)}, "AUC needs both classes") for y in ([0, 0], [1, 1], [])),
    (evaluation.mislabel_detection, {"": ([0.0, 1.0], [0, 0])}, "AUC needs both classes"),
    (evaluation.precision_at, {"": (0, THREE, [0, 1, 1])}, "k must be an integer"),
    (evaluation.precision_at, {"": (4, THREE, [0, 1, 1])}, "at most the number of scores, 3, got 4"),
    *((evaluation.spearman, {"": (v, v)}, "values of a are all equal") for v in ([2.0, 2.0], [1.0], [])),
    (lds, {"scores": ONE((12, 7))}, "scores have 12 train rows, masks 20.*masks=None"),
    (lds, {"scores": ONE((9, 7))}, r"scores have 9 train rows, masks 20; they must agree\.$"),
    (lds, {"outputs": ONE((12, 6))}, r"Predictions have shape \(12, 7\), outputs \(12, 6\)"),
    (lds, {"outputs": ONE((12, 7))}, "outputs of all 7 targets are the same for all 12 subsets"),
    (lds, {"masks": ONE((12, 20))}, "masks must be a boolean matrix"),
    (lds, {"confidence": 1.0}, "confidence must lie between 0 and 1, got 1.0"),
    (lds, {"num_resamples": 0}, "num_resamples must be an integer of at least 1"),
    (evaluation.linear_datamodeling_score, {"": ([[1.0]], None, [[1.0]])}, "at least 2 of them, got 1"),
    *((evaluation.subset_masks, {"": (10, 2), "alpha": a}, ALPHA) for a in (0.0, 1.0, -0.5, 0.01, 0.99, NAN)),
    (evaluation.subset_masks, {"": (4, 1), "strata": [0, 0, 1]}, r"one value per row, \(4,\), got \(3,\)"),
    (evaluation.subset_masks, {"": (2, 1), "strata": [None, "a"]}, r"of one type.*got \['NoneType', 'str'\]"),
    (evaluation.removal_masks, {"": (ONE((3, 2)), 3)}, "there are 3 rows, got k = 3"),
    (evaluation.removal_masks, {"": ([0.0, 1.0], 1)}, r"a matrix that is not empty, got shape \(2,\)"),
    (evaluation.leave_one_out_masks, {"": (3, [3])}, r"between 0 and 2, got \[3\]"),
    (evaluation.leave_one_out_masks, {"": (3, [-1])}, r"between 0 and 2, got \[-1\]"),
    (evaluation.leave_one_out_masks, {"": (3, np.array([], dtype=np.int64))}, "at least one"),
    (evaluation.leave_one_out_masks, {"": (3, [0.5])}, "list of integers"),
    (evaluation.target_loss_rise, {"": ([0.0, 1.0], [0.0])}, r"before must be \(M,\).*got \(2,\) and \(1,\)"),
    *((f, {**given, "seed": seed}, f"seed must be an integer of at least 0, got {seed}")
      for f, given in ((evaluation.subset_masks, {"": (4, 1)}), (lds, {}),
                       (evaluation.target_loss_rise, {"": ([0.0], [0.0])})) for seed in (None, -1, 1.5)),
    (evaluation.target_loss_rise, {"": ([0.0], [0.0]), "confidence": 0.0},
     "confidence must lie between 0 and 1, got 0.0"),
    *((evaluation.bm25, {"": (texts, ["dog"])}, "no word in the train texts") for texts in ([], ["", "?"])),
    *((evaluation.bm25, {"": (["dog"], [text])}, "list of tokens") for text in ([[1, 2]], torch.ones(1, 2), 1)),
]  # fmt: skip
"""Function, arguments (those by position under the empty name), and what is said."""


@pytest.mark.parametrize(
    ("error", "function", "given", "said"),
    [*((NonFiniteError, *case) for case in NOT_FINITE), *((InvalidInputError, *case) for case in INVALID)],
)
def test_what_cannot_be_evaluated_is_refused(error, function, given, said):
    named = {name: value for name, value in given.items() if name}
    with pytest.raises(error, match=said):
        function(*given.get("", ()), **named)
