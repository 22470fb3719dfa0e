"""Methods on the same stored rows against plain NumPy, and paths of dampings."""

from __future__ import annotations

import numpy as np
import pytest
from view_cases import KERNELS, METHODS, WITH_LAYOUT, Drawn, checkpoint_products, drawn, scores_of, with_q

from trak_lite.errors import InvalidInputError, SingularKernelError
from trak_lite.methods import GaussNewton, GradCos, GradDot

QS = ("outside", "inside", "off")
WEIGHTS = {"mean": None, "rates": (0.1, 0.02, 3.0), "base": (1.0, -1.0, 0.0)}
READINGS = [*((name, {}) for name in METHODS), *((name, {"layout": "joint"}) for name in WITH_LAYOUT)]


def close(found, expected, atol=1e-5):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


@pytest.fixture(scope="module")
def made():
    """The rows ``drawn()``; scores of every method are kept beside each other."""
    return drawn().attributor()


@pytest.mark.parametrize(("name", "layout"), READINGS, ids=str)
@pytest.mark.parametrize("q", QS)
def test_every_method_equals_its_definition(made, name, layout, q):
    """All segments under one kernel with a joint layout; the score of a row for itself is its self-influence."""
    rows = drawn()
    products = checkpoint_products(rows, name, joint=bool(layout))
    itself = checkpoint_products(Drawn(rows.train, rows.train, rows.q, rows.w), name, joint=bool(layout))
    for weights in WEIGHTS.values():
        method = METHODS[name](q=q, checkpoint_weights=weights, **layout)

        scores = scores_of(made, rows.targets, method=method, dense=weights is not None)

        close(scores.numpy(), with_q(products, rows, q, weights))
        close(scores.self_influence(), np.diagonal(with_q(itself, rows, q, weights)))


@pytest.mark.parametrize("method", [GaussNewton(damping=1.0), GradDot(q="inside"), GradCos(q="off")], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_several_tiles_are_scored_as_they_are_stored(method, dtype):
    rows = drawn(num_checkpoints=2, num_rows=1500)
    rounded = Drawn(rows.train.astype(dtype), rows.targets.astype(dtype), rows.q, rows.w)
    expected = with_q(checkpoint_products(rounded, method.name), rows, method.q)

    scores = scores_of(rows.attributor(dtype=dtype), rows.targets, method=method, dense=False)

    close(scores.numpy(), expected)
    close(scores.rows([4, 1499, 4, 1024]), expected[[4, 1499, 4, 1024]])
    np.testing.assert_array_equal(
        scores.top(9).indices, np.argsort(-scores.numpy(), axis=0, kind="stable")[:9].T
    )
    errors = scores.standard_error()
    close(scores.standard_error([1499, 1023, 3], target=1), errors[[1499, 1023, 3], 1])
    pairs = np.array([[0, 1499, 4], [1025, 5, 1], [7, 1200, 1023], [1, 3, 3]])
    close(scores.standard_error(pairs), np.take_along_axis(errors.T, pairs, 1))


def test_a_row_without_gradient_has_cosine_zero():
    rows = drawn()
    rows.train[:, 3] = 0

    scores = rows.scores(GradCos(q="inside"))

    assert not scores.numpy()[3].any()
    assert scores.self_influence()[3] == 0


@pytest.mark.parametrize("powers", [(-7, 6), (-66, -66), (-110, -110)])
@pytest.mark.parametrize("name", WITH_LAYOUT)
def test_the_scale_of_the_features_changes_nothing(name, powers):
    """Also that of all: the output may be in other units."""
    scaled = drawn().scaled((2.0 ** powers[0], 2.0 ** powers[1])).scores(METHODS[name]())

    close(scaled.numpy(), with_q(checkpoint_products(drawn(), name), drawn(), scaled.method.q))


@pytest.mark.parametrize("layout", ["stored", "joint"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_path_of_dampings_equals_separate_solves(made, name, layout):
    rows, dampings = drawn(), [1e-3, 0.7, 1e3]
    scores = scores_of(made, rows.targets, method=METHODS[name](layout=layout))

    path = scores.damping_path(dampings)

    for found, damping in zip(path.numpy(), dampings, strict=True):
        products = checkpoint_products(rows, name, damping, joint=layout == "joint")
        expected = with_q(products, rows, scores.method.q)
        close(found, expected, 1e-5 * np.abs(expected).max())
    close(path.rows([3, 19]), path.numpy()[:, [3, 19]])


def test_a_path_answers_for_one_target_and_for_the_best_rows(made):
    scores = scores_of(made, drawn().targets)
    path, some = scores.damping_path([0.1, 10]), scores.damping_path([0.1, 10], targets=slice(None, None, 2))
    dense = path.numpy()

    assert some.shape == (2, 20, 2)
    close(some.numpy(), dense[:, :, ::2])
    close(some.rows([5, 1]), dense[:, [5, 1], ::2])
    np.testing.assert_array_equal(some.top(2).indices, path.top(2).indices[:, ::2])
    assert dense.shape == path.shape == (2, 20, 4)
    assert "20 train rows x 4 targets at" in repr(path)
    np.testing.assert_array_equal(path.numpy(target=-1), dense[:, :, 3])
    order = np.argsort(-dense, axis=1, kind="stable")[:, :5].swapaxes(1, 2)
    np.testing.assert_array_equal(path.top(5).indices, order)
    worst = path.top(5, target=2, sign="harmful").scores
    np.testing.assert_array_equal(worst, np.sort(dense[:, :, 2])[:, :5])


def test_a_segment_without_signal_adds_nothing_at_any_damping():
    rows = drawn()
    rows.train[:, :, 3:] = 0
    alone = Drawn(rows.train[..., :3], rows.targets[..., :3], rows.q, rows.w, (3,))

    path = rows.scores().damping_path([0.5]).numpy()[0]

    close(path, with_q(checkpoint_products(alone, damping=0.5), rows, "outside"), 1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: drawn().scores().damping_path([]), InvalidInputError, "dampings is empty"),
        (lambda: drawn().scores().damping_path([1, -1]), InvalidInputError, "finite number of at least 0"),
        (
            lambda: drawn().scores(GradDot()).damping_path([1]),
            InvalidInputError,
            "GradDot has no kernel, so it has no damping",
        ),
        (
            lambda: drawn(num_rows=2).scores().damping_path([1, 0]),
            SingularKernelError,
            "singular at lambda = 0",
        ),
    ],
)
def test_what_has_no_answer_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
