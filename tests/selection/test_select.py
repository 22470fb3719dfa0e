"""Selections against brute force in plain Python and float64: every method, ties, duplicates, groups, tiles."""

from __future__ import annotations

import datetime
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from held_scores import held_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from view_cases import drawn

from trak_lite.errors import InvalidInputError, NonFiniteError, StateError, UnknownNameError
from trak_lite.methods import GradDot
from trak_lite.selection import select

pytestmark = pytest.mark.quick

QUICK = settings(max_examples=40, deadline=None)
DELTA = 0.1


def group_means(row: Any, labels: Any) -> dict[Any, float]:
    means = {}
    for label in sorted(set(labels)):
        own = [float(score) for score, of in zip(row, labels, strict=True) if of == label]
        means[label] = sum(own) / len(own)
    return means


def value_of(means: dict[Any, float], reduction: str) -> float:
    total = sum(means.values())
    return {"mean": total / len(means), "sum": total, "max": max(means.values())}[reduction]


def reference_values(scores: Any, labels: Any, reduction: str, sign: str) -> list[float]:
    factor = 1.0 if sign == "helpful" else -1.0
    return [value_of(group_means(factor * row.astype(float), labels), reduction) for row in scores]


def reference_top(values: Any, k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda row: (-values[row], row))[:k]


def reference_quotas(labels: Any, k: int) -> dict[Any, int]:
    """Give one row at a time to the label with the fewest that has rows left."""
    sizes = {label: list(labels).count(label) for label in sorted(set(labels))}
    taken = dict.fromkeys(sizes, 0)
    for _ in range(k):
        label = min((one for one in sizes if taken[one] < sizes[one]), key=lambda one: taken[one])
        taken[label] += 1
    return taken


def reference_balanced(values: Any, labels: Any, quotas: dict[Any, int]) -> list[int]:
    chosen = []
    for label, count in quotas.items():
        own = [row for row in reference_top(values, len(values)) if labels[row] == label]
        chosen += own[:count]
    return sorted(chosen, key=lambda row: (-values[row], row))


def reference_cosines(features: Any) -> np.ndarray:
    """The mean over checkpoints, pair by pair."""
    num_rows = len(features[0])
    cosines = np.zeros((num_rows, num_rows))
    for rows in np.asarray(features, dtype=np.float64):
        for i in range(num_rows):
            for j in range(num_rows):
                norms = np.linalg.norm(rows[i]) * np.linalg.norm(rows[j])
                cosines[i, j] += (rows[i] @ rows[j] / norms if norms else 0.0) / len(features)
    return cosines


def reference_greedy(values, features, k: int, alpha: float, pool: int) -> tuple[list[int], list[float]]:
    """Evaluate the objective anew for every candidate of every step."""
    candidates = sorted(reference_top(values, pool))
    cosines = reference_cosines(features)
    scale = np.sqrt(np.mean([values[row] ** 2 for row in candidates])) or 1.0

    def objective(rows: list[int]) -> float:
        information = np.linalg.slogdet(np.eye(len(rows)) + cosines[np.ix_(rows, rows)] / DELTA)[1]
        return sum(values[row] for row in rows) / scale + alpha * information / np.log(1 + 1 / DELTA)

    chosen: list[int] = []
    redundancy = []
    for _ in range(k):
        left = [row for row in candidates if row not in chosen]
        gains = {row: objective([*chosen, row]) - objective(chosen) for row in left}
        best = min(row for row in gains if gains[row] > max(gains.values()) - 1e-9)
        inner = cosines[np.ix_(chosen, chosen)] + DELTA * np.eye(len(chosen))
        explained = cosines[best, chosen] @ np.linalg.solve(inner, cosines[chosen, best]) if chosen else 0.0
        redundancy.append(explained / cosines[best, best] if cosines[best, best] else 0.0)
        chosen.append(best)
    return chosen, redundancy


SIGNS, REDUCTIONS = ("helpful", "harmful"), ("mean", "sum", "max")
TASKS = np.array(["b", "a", "b", "c", "c", "c", "c"])  # 1, 2 and 4 targets: means without rounding


CASES = st.tuples(*map(st.sampled_from, (SIGNS, REDUCTIONS, (False, True), (False, True))))


@QUICK
@given(st.integers(0, 2**16), st.integers(1, 60), CASES)
def test_top_and_less_equal_a_sort_with_many_ties(seed, k, case):
    """Among some rows, the selection is that of these rows alone."""
    sign, reduction, grouped, filtered = case
    generator = np.random.default_rng(seed)
    values = generator.integers(-2, 3, (generator.integers(1, 60), 7)) * 4.0
    mask = generator.random(len(values)) < 0.5
    mask[-1] = True
    rows = np.flatnonzero(mask) if filtered else np.arange(len(values))
    labels = TASKS if grouped else np.arange(7)
    expected = reference_values(values[rows], labels, reduction, sign)
    factor = 1.0 if sign == "helpful" else -1.0
    more = {"sign": sign, "reduction": reduction, "target_groups": TASKS if grouped else None}
    for method in ("top", "less"):
        chosen = select(values, k, method, where=mask if filtered else None, **more)
        order = reference_top([round(value, 9) for value in expected], min(k, len(rows)))
        assert chosen.indices.tolist() == rows[order].tolist()
        np.testing.assert_allclose(chosen.scores, [factor * expected[row] for row in order], atol=1e-12)
        for row, label, best in zip(chosen.indices, chosen.best_targets, chosen.best_scores, strict=True):
            means = group_means(factor * values[row], labels)
            assert label == max(means, key=means.get)
            assert best == factor * means[label]
        assert chosen.num_rows == len(values)
        assert chosen.settings.get("chosen_from", len(rows)) == len(rows)


def test_the_defaults_are_the_mean_and_for_less_the_maximum():
    scores = np.array([[3.0, -3.0], [1.0, 1.0], [0.0, 0.5]])
    assert select(scores, 3).indices.tolist() == [1, 2, 0]
    assert select(scores, 3, "less").indices.tolist() == [0, 1, 2]
    assert select(scores, 1, "less").best_targets.tolist() == [0]
    assert select(scores, 1, "less", sign="harmful").indices.tolist() == [0]


def test_the_result_does_not_depend_on_tiles():
    """Scores come in three tiles, and greedy reads their stored rows; the array comes at once."""
    rows = drawn(num_checkpoints=1, num_rows=2500)
    scores = rows.scores(GradDot())
    arguments: dict[str, Any] = {
        "top": {},
        "less": {"where": np.arange(2500) % 3 > 0},
        "balanced": {"groups": np.arange(2500) % 3},
        "greedy": {"features": rows.train[0]},
    }
    for method, more in arguments.items():
        whole = select(scores.numpy(), 20, method, **more)
        parts = select(scores, 20, method, **({} if method == "greedy" else more))
        np.testing.assert_array_equal(parts.indices, whole.indices)
        np.testing.assert_array_equal(parts.scores, whole.scores)


def test_many_rows_pass_through_a_small_buffer():
    """More rows than are held at a time, in several pieces: ascending, descending and tied."""
    rng = np.random.default_rng(0)
    for column in (np.arange(30_000), -np.arange(30_000), rng.integers(0, 50, 30_000)):
        values = np.zeros((30_000, 128), np.float32)
        values[:, 0] = column
        labels = rng.integers(0, 3, 30_000)
        expected = np.lexsort((np.arange(30_000), -column))
        np.testing.assert_array_equal(select(values, 700).indices, expected[:700])
        balanced = select(values, 701, "balanced", groups=labels, quotas={0: 1, 1: 700})
        ones = expected[labels[expected] == 1][:700]
        assert set(balanced.indices) == {*ones, *expected[labels[expected] == 0][:1]}


@QUICK
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from("abcd")), min_size=1, max_size=50),
    st.integers(1, 50),
    st.sampled_from(SIGNS),
)
def test_balanced_takes_the_best_rows_of_each_label(rows, k, sign):
    values, labels = np.array([[value] for value, _ in rows], float), [label for _, label in rows]
    chosen = select(values, k, "balanced", groups=labels, sign=sign)
    expected = reference_values(values, [0], "mean", sign)
    quotas = reference_quotas(labels, min(k, len(rows)))
    assert chosen.indices.tolist() == reference_balanced(expected, labels, quotas)
    assert chosen.groups.tolist() == [labels[row] for row in chosen.indices]


def test_proportional_quotas_are_largest_remainders():
    labels = ["a"] * 50 + ["b"] * 30 + ["c"] * 20
    for k, expected in ((10, [5, 3, 2]), (7, [4, 2, 1]), (1, [1, 0, 0]), (100, [50, 30, 20])):
        found = select(np.zeros((100, 1)), k, "balanced", groups=labels, quotas="proportional").groups
        assert [found.tolist().count(label) for label in "abc"] == expected
    some = {"groups": labels, "quotas": "proportional", "where": np.arange(100) < 80}  # without a "c"
    assert select(np.zeros((100, 1)), 8, "balanced", **some).groups.tolist() == ["a"] * 5 + ["b"] * 3


DAYS = np.array(["2024-01-01", "2024-01-02"], "datetime64[ns]")


@pytest.mark.parametrize(("pair", "quotas"), [
    ([1.0, None], {1.0: 2, float("nan"): 1}),
    ([1.0, None], {"1": 2, "nan": 1}),
    ([7, 8], {"7": 1, 7.0: 1, 8: 1}),
    ([True, None], {True: 2, None: 1}),
    (np.array([2.0, 1], object), {2: 2, 1: 1}),
    (np.array([True, False], object), {1: 2, 0: 1}),
    (np.array([1, 2], "timedelta64[s]"), {datetime.timedelta(seconds=1): 2, "2 seconds": 1}),
    (["a", None], {"a": 2, "None": 1}),
    (DAYS, dict(zip(DAYS, (2, 1), strict=True))),
    (DAYS, {"2024-01-01": 2, datetime.date(2024, 1, 2): 1}),
    (list(DAYS.astype("datetime64[D]").tolist()), {DAYS[0]: 2, "2024-01-02": 1}),
], ids=str)  # fmt: skip
def test_quotas_name_labels_as_filters_do(pair, quotas):
    chosen = select(np.arange(6.0)[:, None], 3, "balanced", groups=[*pair] * 3, quotas=quotas)
    assert chosen.indices.tolist() == [5, 4, 2]
    assert sorted(chosen.settings["quotas"].values()) == [1, 2]
    few = {label: 2 * count for label, count in quotas.items()}
    with pytest.raises(InvalidInputError, match="from 0 to the number of rows with the label"):
        select(np.arange(6.0)[:, None], 6, "balanced", groups=[*pair] * 3, quotas=few)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("sign", SIGNS)
def test_greedy_maximises_its_objective_step_by_step(alpha, sign):
    rng = np.random.default_rng(3)
    values = rng.normal(size=(24, 3)).astype(np.float32)
    features = rng.normal(size=(24, 6)).astype(np.float32)
    features[7], features[9], features[11] = features[3], -2 * features[3], 0.0  # copies, and a row of zeros
    expected = reference_values(values, range(3), "mean", sign)
    for k, pool in ((1, 24), (9, 15), (10**6, None)):
        chosen = select(values, k, "greedy", sign=sign, features=features, diversity=alpha, pool=pool)
        rows, redundancy = reference_greedy(expected, [features], min(k, 24), alpha, pool or 24)
        assert chosen.indices.tolist() == rows
        np.testing.assert_allclose(chosen.redundancy, redundancy, atol=1e-9)


def test_greedy_reads_the_stored_rows_of_all_checkpoints():
    rows = drawn(num_checkpoints=3, num_rows=20)
    scores = rows.scores()
    chosen = select(scores, 8, "greedy", pool=14)
    values = reference_values(scores.numpy(), range(4), "mean", "helpful")
    expected, redundancy = reference_greedy(values, rows.train, 8, 1.0, 14)
    assert chosen.indices.tolist() == expected
    np.testing.assert_allclose(chosen.redundancy, redundancy, atol=1e-9)
    assert chosen.settings["pool"] == 14
    assert chosen.settings["targets"] == "test"


def test_copies_of_the_best_row_do_not_crowd_out_the_others():
    features = np.concatenate([np.repeat(np.eye(6)[:1], 10, 0), np.eye(6)[1:]])
    scores = np.concatenate([np.full(10, 1.2), np.full(5, 1.0)])[:, None]
    assert select(scores, 6).indices.tolist() == [0, 1, 2, 3, 4, 5]
    chosen = select(scores, 6, "greedy", features=features, pool=15)
    assert chosen.indices.tolist() == [0, 10, 11, 12, 13, 14]
    np.testing.assert_allclose(chosen.redundancy, 0.0, atol=1e-12)
    second = select(scores[:10], 2, "greedy", features=features[:10])
    assert second.indices.tolist() == [0, 1]
    assert second.redundancy[1] == pytest.approx(1 / 1.1)
    nearly = np.array([[1.0], [1.0 + 1e-12]])  # equal gains: the lower row, not that of the larger value
    assert select(nearly, 1, "greedy", features=np.eye(2)).indices.tolist() == [0]


def test_the_pool_has_a_default_and_a_selection_among_some_rows_is_that_of_these_alone():
    values, features = (np.random.default_rng(k).normal(size=(300, 2 + k)) for k in range(2))
    mask = np.arange(300) % 7 == 2
    some = select(values, 20, "greedy", features=features, where=mask)
    pools = [select(values, k, "greedy", features=features).settings["pool"] for k in (20, 100)]
    assert pools == [80, 300]
    alone = select(values[mask], 20, "greedy", features=features[mask])
    assert some.indices.tolist() == np.flatnonzero(mask)[alone.indices].tolist()


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-30, 1e200, 1e307])
def test_the_units_of_scores_and_features_do_not_matter(scale):
    values, features = (np.random.default_rng(k).uniform(-1, 1, (30, 3)) for k in range(2))
    expected = select(values, 8, "greedy", features=features)
    for units in ((scale, 1.0), (1.0, scale)):
        chosen = select(units[0] * values, 8, "greedy", features=units[1] * features)
        assert chosen.indices.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(chosen.redundancy, expected.redundancy, atol=1e-9)


@pytest.mark.parametrize("method", ["top", "greedy"])
def test_a_sum_beyond_float64_is_refused(method):
    more = {"features": np.eye(3)} if method == "greedy" else {}
    with pytest.raises(NonFiniteError, match=r"sum of the scores of train row 1 .* Divide all scores"):
        select(np.array([[1.0, 1.0], [1e308, 1e308], [2.0, 2.0]]), 2, method, reduction="sum", **more)


@pytest.mark.parametrize(
    "form", [torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.double, torch.nn.Parameter]
)
def test_tensors_are_taken_as_their_values(form):
    values = form(torch.arange(30.0).reshape(10, 3) % 7)
    plain = np.array(values.tolist())
    for method, more in (("top", {}), ("greedy", {"features": values})):
        plain_more = {"features": plain} if more else {}
        expected = select(plain, 4, method, **plain_more)
        for k in (4, np.int64(4), np.uint8(4), torch.tensor(4)):
            chosen = select(values, k, method, **more)
            assert chosen.indices.tolist() == expected.indices.tolist()
            np.testing.assert_array_equal(chosen.scores, expected.scores)


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    scores, features = (
        np.lib.format.open_memmap(tmp_path / name, mode="w+", dtype=np.float32, shape=(400_000, width))
        for name, width in (("s.npy", 16), ("f.npy", 8))
    )
    scores[:] = np.sin(np.arange(400_000))[:, None]
    cases = ("top", {}), ("less", {"target_groups": np.arange(16) % 4}), ("greedy", {"pool": 200})
    for method, more in cases:
        peaks = []
        for n in (70_000, 400_000):
            own = {"features": features[:n]} if method == "greedy" else {}
            tracemalloc.start()
            assert len(select(scores[:n], 50, method, **more, **own)) == 50
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[1] < 1.2 * peaks[0], method


NAMED = {"source": [0] * 10}
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("k must be an integer of at least 1", "top", {"k": 0}),
    ("k must be an integer", "top", {"k": 2.0}),
    ("k must be an integer", "top", {"k": np.float64(2)}),
    ("k must be an integer", "top", {"k": True}),
    ("k must be an integer", "top", {"k": np.int64(0)}),
    ("Did you mean 'less'", "lesss", {}),
    ("sign must be", "top", {"sign": "bad"}),
    ("reduction must be", "top", {"reduction": "median"}),
    ("target_groups must hold 3 labels", "top", {"target_groups": [0]}),
    ("groups belong to method='balanced'", "top", {"groups": [0] * 10}),
    ("pool belong to method='greedy'", "top", {"pool": 5}),
    ("needs groups", "balanced", {}),
    ("must hold 10 labels", "balanced", {"groups": [0] * 9}),
    ("cannot be sorted", "balanced", {"groups": [1j, "a"] * 5}),
    ("data=", "balanced", {"groups": "source"}),
    ("no named columns", "balanced", {"groups": "source", "data": [1]}),
    ("Nearest known: ['source']", "balanced", {"groups": "sourc", "data": NAMED}),
    ("not the name", "balanced", {"groups": [0] * 10, "data": NAMED}),
    ("add up to 3", "balanced", {"groups": [0, 1] * 5, "quotas": {0: 3}}),
    ("from 0 to the number of rows", "balanced", {"k": 6, "groups": [0, 1] * 5, "quotas": {0: 6}}),
    ("'x': 2 of 0", "balanced", {"groups": [0] * 10, "quotas": {"x": 2}}),
    ("quotas must be", "balanced", {"groups": [0] * 10, "quotas": "even"}),
    ("needs features", "greedy", {}),
    ("(10, K)", "greedy", {"features": np.ones((9, 2))}),
    ("at least k", "greedy", {"features": np.ones((10, 2)), "pool": 1}),
    ("diversity", "greedy", {"features": np.ones((10, 2)), "diversity": -1}),
    ("candidate row", "greedy", {"features": np.full((10, 2), np.nan)}),
]
UNKNOWN = ("Did you mean", "sign must", "reduction must", "Nearest known", "quotas must")


@pytest.mark.parametrize(("words", "method", "more"), REFUSED, ids=[one[0] for one in REFUSED])
def test_refusals_say_what_to_do(words, method, more):
    error = UnknownNameError if words.startswith(UNKNOWN) else InvalidInputError
    with pytest.raises(NonFiniteError if words == "candidate row" else error, match=re.escape(words)):
        select(np.arange(30.0).reshape(10, 3), **{"k": 2, "method": method, **more})


def test_scores_that_are_not_finite_no_matrix_or_without_stored_rows_are_refused():
    values = np.zeros((10, 3))
    values[6, 2] = np.nan
    with pytest.raises(NonFiniteError, match="train row 6 for target 2 is nan"):
        select(values, 2)
    for more in ({}, {"features": np.ones((9, 2))}):  # said before a score is read
        with pytest.raises(InvalidInputError, match=r"needs features|\(10, K\)"):
            select(values, 2, "greedy", **more)
    for wrong in (np.zeros(3), np.zeros((0, 2)), np.array([["a"]])):
        with pytest.raises(InvalidInputError, match="real numbers"):
            select(wrong, 1)
    with pytest.raises(StateError, match="not computed from stored rows"):
        select(held_scores(np.ones((10, 3))), 2, "greedy")
