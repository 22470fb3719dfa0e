"""Streaming top-k against a stable sort of the whole matrix."""

import itertools

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from trak_lite.errors import InvalidInputError, NonFiniteError, StateError
from trak_lite.linalg.topk import TopK


@st.composite
def score_streams(draw):
    """A matrix of few distinct values (so that ties abound), cut into tiles in any order."""
    num_rows, num_targets = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    values = draw(
        st.lists(st.integers(-2, 2), min_size=num_rows * num_targets, max_size=num_rows * num_targets)
    )
    cuts = sorted(draw(st.sets(st.integers(0, num_rows), max_size=6)) | {0, num_rows})
    tiles = draw(st.permutations(list(itertools.pairwise(cuts))))
    return np.array(values, dtype=np.float32).reshape(num_rows, num_targets), tiles


@given(stream=score_streams(), k=st.integers(1, 50), sign=st.sampled_from(["helpful", "harmful"]))
def test_top_k_equals_a_stable_sort_of_the_dense_matrix(stream, k, sign):
    scores, tiles = stream
    best = TopK(scores.shape[1], k, sign=sign)

    for start, stop in tiles:
        best.update(start, torch.from_numpy(scores[start:stop]))

    rows, values = best.result()
    expected_rows, expected_values = reference.top_k(scores, k, sign=sign)
    assert rows.dtype == torch.int64
    np.testing.assert_array_equal(rows.numpy(), expected_rows)
    np.testing.assert_array_equal(values.numpy(), expected_values)


@pytest.mark.parametrize("sign", ["helpful", "harmful"])
def test_distinct_scores_of_a_larger_stream_are_ranked_exactly(sign):
    scores = torch.randn(3000, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best = TopK(20, 37, sign=sign)

    for start in range(0, 3000, 256):
        best.update(start, scores[start : start + 256])

    rows, values = best.result()
    expected_rows, expected_values = reference.top_k(scores.numpy(), 37, sign=sign)
    np.testing.assert_array_equal(rows.numpy(), expected_rows)
    np.testing.assert_array_equal(values.numpy(), expected_values)


@pytest.mark.parametrize("sign", ["helpful", "harmful"])
def test_zero_and_minus_zero_are_a_tie(sign):
    best = TopK(1, 4, sign=sign)

    best.update(0, torch.tensor([[-0.0], [0.0], [-0.0], [0.0]]))

    assert best.result()[0].tolist() == [[0, 1, 2, 3]]


def test_fewer_rows_than_k_are_all_returned():
    best = TopK(2, 10)

    best.update(5, torch.tensor([[1.0, 4.0], [2.0, 3.0]]))

    rows, values = best.result()
    assert rows.tolist() == [[6, 5], [5, 6]]
    assert values.tolist() == [[2.0, 1.0], [4.0, 3.0]]


def test_update_and_result_leave_callers_tensors_alone():
    block = torch.tensor([[1.0], [2.0]])
    best = TopK(1, 2, sign="harmful")
    best.update(0, block)

    best.result()[1].fill_(7.0)

    assert block.tolist() == [[1.0], [2.0]]
    assert best.result()[1].tolist() == [[1.0, 2.0]]


def test_an_empty_tile_changes_nothing():
    best = TopK(1, 2)
    best.update(0, torch.ones(1, 1))

    best.update(1, torch.ones(0, 1))

    assert best.result()[0].tolist() == [[0]]


def test_a_row_given_twice_is_refused_and_nothing_changes():
    best = TopK(1, 3)
    best.update(4, torch.ones(4, 1))
    best.update(0, torch.ones(4, 1))

    with pytest.raises(InvalidInputError, match="Rows 7:9 overlap rows 0:8, given before"):
        best.update(7, torch.full((2, 1), 9.0))

    assert best.result()[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_is_refused_by_row_and_target(bad):
    best = TopK(2, 3)

    with pytest.raises(NonFiniteError, match="train row 11 for target 1 is"):
        best.update(10, torch.tensor([[0.0, 0.0], [0.0, bad]]))


@pytest.mark.parametrize("block", [torch.ones(2, 3), torch.ones(2), torch.ones(2, 2, dtype=torch.int64)])
def test_tiles_must_have_one_column_per_target(block):
    with pytest.raises(InvalidInputError, match=r"Scores must be a floating tensor \(rows, 2\)"):
        TopK(2, 3).update(0, block)


def test_tiles_must_have_one_dtype():
    best = TopK(1, 3)
    best.update(0, torch.ones(1, 1))

    with pytest.raises(InvalidInputError, match=r"torch.float64, the ones before them torch.float32"):
        best.update(1, torch.ones(1, 1, dtype=torch.float64))


def test_a_negative_first_row_is_refused():
    with pytest.raises(InvalidInputError, match="first_row must be at least 0, got -1"):
        TopK(1, 3).update(-1, torch.ones(1, 1))


def test_a_result_without_rows_is_refused():
    with pytest.raises(StateError, match="TopK has seen no row"):
        TopK(1, 3).result()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ({"num_targets": 0, "k": 1}, "num_targets must be an integer of at least 1"),
        ({"num_targets": 1, "k": 0}, "k must be an integer of at least 1"),
        ({"num_targets": 1, "k": 1, "sign": "helpfull"}, "Did you mean 'helpful'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, seen):
    with pytest.raises(InvalidInputError, match=seen):
        TopK(**arguments)
