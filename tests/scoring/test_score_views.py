"""Methods on the same stored rows against plain NumPy, and the laws that all of them obey."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from view_cases import (
    KERNELS,
    METHODS,
    WIDTHS,
    WITH_LAYOUT,
    Drawn,
    checkpoint_products,
    dense_scores,
    drawn,
)

from trak_lite.data.columns import Column
from trak_lite.errors import InvalidInputError, SingularKernelError
from trak_lite.linalg.kernel import eigenpath_segments, precondition_path
from trak_lite.linalg.products import score_block, unit_segments
from trak_lite.methods import AbstractMethod, Fisher, GaussNewton, GradCos, GradDot, TracIn, as_method
from trak_lite.scoring.matrix import DampingPath, StreamedMatrix, group_sums, top_rows
from trak_lite.types import FeatureLayout

QS = ("outside", "inside", "off")
QUICK = settings(max_examples=10, deadline=None)


@st.composite
def drawn_methods(draw: st.DrawFn) -> AbstractMethod:
    name = draw(st.sampled_from(sorted(METHODS)))
    weights = st.sampled_from((None, (0.5, 0.2, 0.1), (1.0, -1.0, 0.0)))
    fields: dict[str, Any] = {"q": draw(st.sampled_from(QS)), "checkpoint_weights": draw(weights)}
    if name in WITH_LAYOUT:
        fields["layout"] = draw(st.sampled_from(("stored", "joint")))
    return METHODS[name](**fields)


methods = drawn_methods()
seeds = st.integers(0, 2**16)


def with_q(products: np.ndarray, rows: Drawn, q: str, weights: Any = None) -> np.ndarray:
    """Combine what checkpoints say, by the definition."""
    a = np.full(len(products), 1 / len(products)) if weights is None else np.array(weights)
    factors = {"outside": rows.q.mean(0)[None], "inside": rows.q, "off": np.ones((1, 1))}[q]
    return np.einsum("c,cnm->nm", a, products * factors[:, :, None])


# ------------------------------------------------------------------------ against the definition


@pytest.mark.parametrize("weights", [None, (0.1, 0.02, 3.0), (1.0, -1.0, 0.0)], ids=["mean", "rates", "base"])
@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_equals_its_definition(name: str, q: Any, weights: Any) -> None:
    rows = drawn()

    scores = dense_scores(rows.source(METHODS[name](q=q, checkpoint_weights=weights)))

    expected = with_q(checkpoint_products(rows, name), rows, q, weights)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_tracin_is_the_product_with_learning_rates_for_weights() -> None:
    rows = drawn()

    scores = dense_scores(rows.source(TracIn(learning_rates=(0.1, 0.02, 3.0))))

    dot = GradDot(q="inside", checkpoint_weights=(0.1, 0.02, 3.0))
    np.testing.assert_array_equal(scores, dense_scores(rows.source(dot)))


@pytest.mark.parametrize("name", WITH_LAYOUT)
def test_a_joint_reading_puts_all_segments_under_one_kernel(name: str) -> None:
    rows = drawn()

    scores = dense_scores(rows.source(METHODS[name](layout="joint", q="inside")))

    expected = with_q(checkpoint_products(rows, name, segments=((0, 5),)), rows, "inside")
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(scores, dense_scores(rows.source(METHODS[name](q="inside"))))


def test_both_readings_of_the_segments_keep_their_kernels_side_by_side() -> None:
    rows = drawn()
    stored = rows.source()
    first = dense_scores(stored)
    joint = rows.source(GaussNewton(damping=1.0, layout="joint"))
    joint.store = stored.store
    dense_scores(joint)
    cached = stored.store._contents.cache

    assert {name for name in cached if name.startswith("gram-ckpt-0")} == {
        "gram-ckpt-0-curvature",
        "gram-ckpt-0-curvature-2",
    }
    np.testing.assert_array_equal(dense_scores(stored), first)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, {}) for name in METHODS), *((name, {"layout": "joint"}) for name in WITH_LAYOUT)],
)
@pytest.mark.parametrize("q", QS)
def test_self_influence_is_the_diagonal_of_every_method(name: str, q: Any, layout: dict[str, Any]) -> None:
    rows = drawn()
    itself = Drawn(rows.train, rows.train, rows.q, rows.w)
    source = itself.source(METHODS[name](q=q, checkpoint_weights=(0.5, 1.0, -0.2), **layout))

    own = source.self_influence()

    np.testing.assert_allclose(own, np.diagonal(dense_scores(source)), rtol=1e-4, atol=1e-6)


def test_a_row_without_gradient_has_cosine_zero() -> None:
    rows = drawn()
    rows.train[:, 3] = 0

    source = rows.source(GradCos(q="inside"))

    assert not dense_scores(source)[3].any()
    assert source.self_influence()[3] == 0


def test_weights_of_rows_multiply_them_in_any_dtype() -> None:
    rows, targets, weights = torch.randn(300, 4), torch.randn(3, 4), torch.rand(300)

    for train in (rows, rows.half()):
        expected = (train.float() * weights[:, None]) @ targets.T
        torch.testing.assert_close(score_block(train, targets, row_weights=weights), expected)


# ------------------------------------------------------------------------ laws


@QUICK
@given(seed=seeds, method=methods, data=st.data())
def test_scores_follow_any_reordering_of_rows_and_targets(
    seed: int, method: AbstractMethod, data: Any
) -> None:
    rows = drawn(seed=seed)
    order = data.draw(st.permutations(range(20)))
    columns = data.draw(st.permutations(range(4)))

    moved = dense_scores(rows.reordered(order, columns).source(method))

    np.testing.assert_allclose(moved, dense_scores(rows.source(method))[order][:, columns], 1e-4, 1e-5)


@QUICK
@given(seed=seeds, method=methods, data=st.data())
def test_scores_add_up_over_groups_of_rows_and_targets(seed: int, method: AbstractMethod, data: Any) -> None:
    source = drawn(seed=seed).source(method)
    labels = data.draw(st.lists(st.sampled_from("abc"), min_size=20, max_size=20))
    columns = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    dense = dense_scores(source).astype(np.float64)

    sums, names, numbers, counts = group_sums(
        StreamedMatrix(source), Column.of(labels, 20, "rows"), Column.of(columns, 4, "targets")
    )

    assert (list(names), list(numbers)) == (sorted(set(labels)), sorted(set(columns)))
    for i, name in enumerate(names):
        for j, number in enumerate(numbers):
            part = dense[np.array(labels) == name][:, np.array(columns) == number]
            assert sums[i, j] == pytest.approx(part.sum(), rel=1e-9, abs=1e-9)
            assert counts[i, j] == part.size


@QUICK
@given(
    seed=seeds,
    name=st.sampled_from(WITH_LAYOUT),
    q=st.sampled_from(QS),
    powers=st.tuples(*[st.integers(-8, 8) for _ in WIDTHS]),
)
def test_the_scale_of_the_features_of_a_segment_changes_nothing(
    seed: int, name: str, q: Any, powers: tuple[int, ...]
) -> None:
    rows = drawn(seed=seed)

    scaled = rows.scaled(tuple(2.0**power for power in powers))

    expected = dense_scores(rows.source(METHODS[name](q=q)))
    np.testing.assert_allclose(dense_scores(scaled.source(METHODS[name](q=q))), expected, 1e-4, 1e-5)


@QUICK
@given(
    seed=seeds,
    name=st.sampled_from(KERNELS),
    layout=st.sampled_from(("stored", "joint")),
    q=st.sampled_from(QS),
    dampings=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4),
)
def test_a_path_of_dampings_equals_separate_solves(
    seed: int, name: str, layout: Any, q: Any, dampings: list[float]
) -> None:
    rows = drawn(seed=seed)
    fields = {"layout": layout, "q": q}

    path = DampingPath(rows.source(METHODS[name](**fields)), "test", dampings).numpy()

    for scores, damping in zip(path, dampings, strict=True):
        expected = dense_scores(rows.source(METHODS[name](damping=damping, **fields)))
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@QUICK
@given(seed=seeds, method=methods, k=st.integers(1, 25), sign=st.sampled_from(("helpful", "harmful")))
def test_the_best_rows_without_the_matrix_are_those_of_the_matrix(
    seed: int, method: AbstractMethod, k: int, sign: Any
) -> None:
    rows = drawn(seed=seed)
    rows.train = np.round(rows.train)  # rows repeat below, so that scores tie
    rows = rows.reordered(np.arange(20) % 8)
    source = rows.source(method)
    dense = dense_scores(source)

    best = top_rows(source.tiles(), 4, k, sign=sign)

    order = np.argsort(-dense if sign == "helpful" else dense, axis=0, kind="stable")[:k].T
    np.testing.assert_array_equal(best.indices, order)
    np.testing.assert_array_equal(best.scores, np.take_along_axis(dense.T, order, 1))


# ------------------------------------------------------------------------ the path


def test_a_path_answers_for_one_target_and_for_the_best_rows() -> None:
    path = DampingPath(drawn().source(), "test", [0.1, 10])
    dense = path.numpy()

    assert dense.shape == path.shape == (2, 20, 4)
    np.testing.assert_array_equal(path.numpy(target=-1), dense[:, :, 3])
    best = path.top(5)
    np.testing.assert_array_equal(
        best.indices, np.argsort(-dense, axis=1, kind="stable")[:, :5].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        path.top(5, target=2, sign="harmful").scores, np.sort(dense[:, :, 2])[:, :5]
    )
    assert "(0.1, 10.0)" in repr(path)


def test_a_segment_without_signal_adds_nothing_at_any_damping() -> None:
    rows = drawn()
    rows.train[:, :, 3:] = 0

    path = DampingPath(rows.source(), "test", [0.5]).numpy()[0]

    np.testing.assert_allclose(
        path, dense_scores(rows.source(GaussNewton(damping=0.5))), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("method", "dampings", "message"),
    [
        (GaussNewton(), [], "dampings is empty"),
        (GaussNewton(), [1, -1], "damping must be a finite number of at least 0"),
        (GradDot(), [1], "GradDot has no kernel, so it has no damping"),
    ],
    ids=["none", "negative", "without-a-kernel"],
)
def test_a_path_of_nothing_is_refused(method: AbstractMethod, dampings: list[float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DampingPath(drawn().source(method), "test", dampings)


def test_a_path_through_a_singular_kernel_says_so() -> None:
    rows = drawn(num_rows=2)

    with pytest.raises(SingularKernelError, match=r"singular at lambda = 0"):
        DampingPath(rows.source(), "test", [1, 0])
    with pytest.raises(SingularKernelError, match="every segment is zero"):
        eigenpath_segments([torch.zeros(5, 5)], layout=FeatureLayout.joint(5))


def test_a_path_of_another_layout_is_refused() -> None:
    kernels = eigenpath_segments([torch.eye(5)], layout=FeatureLayout.joint(5))

    with pytest.raises(InvalidInputError, match="segments of the layout have"):
        eigenpath_segments([torch.eye(4)], layout=FeatureLayout.joint(5))
    with pytest.raises(InvalidInputError, match=r"rows, 6"):
        precondition_path(torch.ones(2, 5), kernels, [1], layout=FeatureLayout.joint(6), num_rows=9)


# ------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "trakk"}, r"method must be a name of .*Did you mean 'TRAK'"),
        ({"name": "ekfak"}, "Did you mean 'EKFAC'"),
        ({"name": None}, "method must be a name of"),
        ({"layout": "module"}, "layout must be one of"),
        ({"name": "GradCos", "layout": "module"}, "layout must be one of"),
        ({"name": "TRAK", "layout": "module"}, "layout must be one of"),
        ({"name": "TracIn", "q": "off"}, r"Unknown fields of TracIn: \['q'\]"),
        ({"name": "TracIn", "learning_rates": (0.0,)}, "learning_rates must be finite.* not all zero"),
        ({"q": "both"}, "q must be one of"),
        ({"damping": -1.0}, "damping must be a finite number of at least 0"),
        ({"name": "GradDot", "damping": 1.0}, r"Unknown fields of GradDot: \['damping'\]"),
        ({"checkpoint_weights": ()}, "finite numbers that are not all zero"),
        ({"checkpoint_weights": (0.0, 0.0)}, "not all zero"),
        ({"checkpoint_weights": (1.0, float("nan"))}, "finite"),
        ({"checkpoint_weights": ("a",)}, "finite"),
        ({"checkpoint_weights": 3}, "finite"),
    ],
)
def test_settings_that_no_score_can_be_made_with_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        as_method({"name": "GaussNewton", **wrong})


def test_weights_that_are_not_as_many_as_checkpoints_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"has 2 numbers, but 3 checkpoints"):
        drawn().source(GaussNewton(checkpoint_weights=(1, 2)))
    with pytest.raises(InvalidInputError, match=r"learning_rates has 2 numbers, but 3 checkpoints"):
        drawn().source(TracIn(learning_rates=(1, 2)))


@given(
    method=methods
    | st.builds(GaussNewton, damping=st.none() | st.floats(0, 10))
    | st.builds(Fisher, damping=st.none() | st.floats(0, 10), seed=st.integers(0, 9))
    | st.builds(TracIn, learning_rates=st.sampled_from((None, (0.5, 0.2)))),
)
def test_what_is_stored_of_a_method_tells_all_its_settings(method: AbstractMethod) -> None:
    assert as_method(json.loads(json.dumps(method.to_json()))) == method


def test_rows_of_another_width_have_no_unit_segments() -> None:
    with pytest.raises(InvalidInputError, match=r"\(rows, 5\), got shape \(2, 4\)"):
        unit_segments(torch.ones(2, 4), layout=FeatureLayout.joint(5))
    with pytest.raises(InvalidInputError, match="one number for each of the 2 train rows"):
        score_block(torch.ones(2, 4), torch.ones(3, 4), row_weights=torch.ones(3))
