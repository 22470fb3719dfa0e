"""Gram matrices, damping and solves against dense NumPy."""

import itertools
import json

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from trak_lite._devices import wide_dtype
from trak_lite.errors import InvalidInputError, NonFiniteError, SingularKernelError
from trak_lite.linalg.kernel import (
    DEFAULT_SHARES,
    KernelSettings,
    eigenpath,
    factorise,
    factorise_segments,
    gram,
    precondition,
    precondition_path,
)
from trak_lite.methods import AbstractKernelMethod
from trak_lite.types import FeatureLayout, Segment

pytestmark = pytest.mark.quick

NUM_ROWS, WIDTH = 600, 7
JOINT = FeatureLayout.joint(WIDTH)
SPLIT = FeatureLayout((Segment("conv", 0, 3), Segment("head", 3, 7)))


def random_rows(num_rows=NUM_ROWS, width=WIDTH, *, seed=0, dtype=torch.float64):
    return torch.randn(num_rows, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_weights(num_rows=NUM_ROWS, *, seed=1):
    return torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_weighted_gram_is_the_sum_of_weighted_outer_products():
    rows, weights = random_rows(), random_weights()

    (matrix,) = gram([rows], weights, layout=JOINT)

    expected = reference.kernel(rows.numpy(), weights.numpy(), lambda_reg=0.0)
    np.testing.assert_allclose(matrix.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_gram_without_weights_counts_every_row_once():
    rows = random_rows()

    (matrix,) = gram([rows], layout=JOINT)

    np.testing.assert_allclose(matrix.numpy(), rows.numpy().T @ rows.numpy(), rtol=1e-12, atol=1e-12)


def test_each_segment_has_the_gram_of_its_own_columns():
    rows, weights = random_rows(), random_weights()

    matrices = gram([rows], weights, layout=SPLIT)

    alone = [gram([rows[:, a:b]], weights, layout=FeatureLayout.joint(b - a))[0] for a, b in ((0, 3), (3, 7))]
    for matrix, expected in zip(matrices, alone, strict=True):
        torch.testing.assert_close(matrix, expected, rtol=1e-13, atol=1e-13)


@given(cuts=st.lists(st.integers(0, NUM_ROWS), max_size=8))
def test_gram_is_bitwise_the_same_however_rows_are_spread_over_blocks(cuts):
    rows, weights = random_rows(), random_weights()
    bounds = [0, *sorted(cuts), NUM_ROWS]
    blocks = [rows[a:b] for a, b in itertools.pairwise(bounds)]

    (matrix,) = gram(blocks, weights, layout=JOINT)

    assert torch.equal(matrix, gram([rows], weights, layout=JOINT)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_features_are_accumulated_in_float64(dtype):
    """65504 is float16's largest number: its square and any sum of squares would overflow there."""
    rows = random_rows().to(dtype)
    rows[:, 0] = 6e4

    (matrix,) = gram([rows], layout=JOINT)

    exact = rows.to(torch.float64).numpy()
    assert matrix.dtype == torch.float64
    np.testing.assert_allclose(matrix.numpy(), exact.T @ exact, rtol=1e-12, atol=1e-5)


def test_a_coarse_gram_is_that_of_float32_products_added_up_in_float64():
    rows = random_rows(2500, dtype=torch.float32)

    matrices = gram(rows.split(700), layout=SPLIT, exact=False)

    for matrix, columns in zip(matrices, (rows[:, :3], rows[:, 3:7]), strict=True):
        parts = [part.T @ part for part in columns.split(1024)]
        assert matrix.dtype == torch.float64
        assert torch.equal(matrix, sum(part.double() for part in parts))
        assert torch.allclose(matrix, columns.double().T @ columns.double(), rtol=1e-5, atol=1e-3)


def test_gram_does_not_change_its_inputs():
    rows, weights = random_rows(), random_weights()

    gram([rows], weights, layout=JOINT)

    assert torch.equal(rows, random_rows())
    assert torch.equal(weights, random_weights())


def test_gram_of_rows_that_carry_a_graph_carries_none():
    (matrix,) = gram([random_rows().requires_grad_()], layout=JOINT)

    assert not matrix.requires_grad


def test_a_device_without_float64_accumulates_in_float32():
    assert wide_dtype(torch.device("mps")) == torch.float32
    assert wide_dtype(torch.device("cuda", 0)) == torch.float64


def test_gram_takes_blocks_of_one_device_only():
    with pytest.raises(InvalidInputError, match="A block is on meta, the ones before it on cpu"):
        gram([random_rows(), random_rows().to("meta")], layout=JOINT)


@pytest.mark.parametrize(
    "block",
    [torch.ones(3, WIDTH + 1), torch.ones(WIDTH), torch.ones(3, WIDTH, dtype=torch.int64)],
    ids=["width", "axes", "integers"],
)
def test_gram_refuses_blocks_that_are_not_rows_of_the_layout(block):
    with pytest.raises(InvalidInputError, match=r"Feature rows must be a floating tensor \(rows, 7\)"):
        gram([block], layout=JOINT)


@pytest.mark.parametrize("blocks", [[], [torch.ones(0, WIDTH)]], ids=["no-block", "empty-block"])
def test_gram_of_no_rows_is_refused(blocks):
    with pytest.raises(InvalidInputError, match="no rows to sum over"):
        gram(blocks, layout=JOINT)


def test_gram_needs_one_weight_per_row():
    with pytest.raises(InvalidInputError, match="13 weights but 12 rows"):
        gram([torch.ones(4, WIDTH)] * 3, torch.ones(13), layout=JOINT)


def test_gram_stops_reading_when_the_weights_run_out():
    with pytest.raises(InvalidInputError, match="5 weights but at least 8 rows"):
        gram([torch.ones(4, WIDTH)] * 100, torch.ones(5), layout=JOINT)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_row(bad):
    weights = random_weights()
    weights[4] = bad

    with pytest.raises(NonFiniteError, match="1 of 600 weights are NaN or infinite, the first at row 4"):
        gram([random_rows()], weights, layout=JOINT)


def test_a_negative_weight_is_refused_by_row():
    weights = random_weights()
    weights[[7, 9]] = -0.5

    with pytest.raises(InvalidInputError, match="2 of 600 weights are negative, the first at row 7"):
        gram([random_rows()], weights, layout=JOINT)


@pytest.mark.parametrize("weights", [torch.ones(NUM_ROWS, 1), torch.ones(NUM_ROWS, dtype=torch.int64)])
def test_weights_must_be_a_floating_vector(weights):
    with pytest.raises(InvalidInputError, match="weights must be a floating tensor"):
        gram([random_rows()], weights, layout=JOINT)


@pytest.mark.parametrize("settings", [{"damping": 0.1}, {"damping": 0.0}, {"lambda_reg": 3.0}], ids=str)
def test_solve_is_the_inverse_of_the_damped_kernel(settings):
    rows, weights, targets = random_rows(), random_weights(), random_rows(5, seed=2)
    (matrix,) = gram([rows], weights, layout=JOINT)

    solved = factorise(matrix, KernelSettings(**settings), num_rows=NUM_ROWS).solve(targets)

    expected = np.linalg.solve(
        reference.kernel(rows.numpy(), weights.numpy(), **settings), targets.numpy().T
    ).T
    np.testing.assert_allclose(solved.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 4])
def test_the_default_lambda_is_a_share_of_the_root_mean_square_of_eigenvalues(num_rows):
    """Of those that can be above zero: at most one per row, unless the matrix is a fitted Fisher information."""
    (matrix,) = gram([random_rows()[:num_rows]], layout=JOINT)
    squares = np.square(np.linalg.eigvalsh(matrix.numpy()))
    expected = 0.2 * np.sqrt(squares[-num_rows:].mean())

    kernel = factorise(matrix.tril(), KernelSettings(), num_rows=num_rows)  # reads only the lower triangle
    fisher = factorise(matrix, KernelSettings(weighting="fisher"), num_rows=num_rows)

    assert kernel.lambda_reg == pytest.approx(expected, rel=1e-12)
    assert fisher.lambda_reg == pytest.approx(0.02 * np.sqrt(squares.mean()), rel=1e-12)
    targets = random_rows(3, seed=2)
    both = precondition_path(
        targets, [eigenpath(matrix)], [None, 1.0], layout=JOINT, num_rows=num_rows, settings=KernelSettings()
    )
    torch.testing.assert_close(both[0], kernel.solve(targets), rtol=1e-8, atol=1e-12)


def test_an_absolute_lambda_overrides_the_damping():
    (matrix,) = gram([random_rows()], layout=JOINT)

    kernel = factorise(matrix, KernelSettings(damping=5.0, lambda_reg=0.25), num_rows=NUM_ROWS)

    assert kernel.lambda_reg == 0.25


def test_rescaled_inverse_has_mean_absolute_entry_one():
    (matrix,) = gram([random_rows()], layout=JOINT)

    inverse = factorise(matrix, KernelSettings(rescale_inverse=True), num_rows=NUM_ROWS).solve(
        torch.eye(WIDTH)
    )

    assert inverse.abs().mean().item() == pytest.approx(1.0, rel=1e-12)


def test_factorise_does_not_change_the_gram_matrix():
    (matrix,) = gram([random_rows()], layout=JOINT)
    before = matrix.clone()

    factorise(matrix, KernelSettings(), num_rows=NUM_ROWS)

    assert torch.equal(matrix, before)


def test_more_features_than_rows_without_damping_is_refused_with_both_numbers():
    rows = random_rows(5)
    (matrix,) = gram([rows], layout=JOINT)

    with pytest.raises(
        SingularKernelError, match=r"7 features, 5 train rows.*more features than rows.*Use damping > 0"
    ):
        factorise(matrix, KernelSettings(damping=0.0), num_rows=5)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("num_rows", [5, NUM_ROWS])
def test_a_singular_kernel_may_be_solved_by_its_pseudo_inverse(num_rows, rescale):
    """Fewer rows than features, or dependent features; a kernel that has an inverse keeps its bits."""
    rows, targets = random_rows(num_rows), random_rows(3, seed=2)
    rows[:, 6] = rows[:, 0] - 3.0 * rows[:, 2] + 0.1 * rows[:, 5]
    (matrix,) = gram([rows], layout=JOINT)
    settings = KernelSettings(damping=0.0, rescale_inverse=rescale)

    kernel = factorise(matrix, settings, num_rows=num_rows, allow_singular=True)

    assert kernel.is_pseudo_inverse
    assert kernel.width == WIDTH
    assert kernel.factor.shape == (WIDTH, min(num_rows, WIDTH - 1))
    inverse = np.linalg.pinv(rows.numpy().T @ rows.numpy(), rcond=1e-10, hermitian=True)
    inverse /= np.abs(inverse).mean() if rescale else 1.0
    np.testing.assert_allclose(kernel.solve(targets).numpy(), targets.numpy() @ inverse, rtol=1e-7)
    expected = np.einsum("ij,jk,ik->i", targets.numpy(), inverse, targets.numpy())
    np.testing.assert_allclose(kernel.quadratic_form(targets).numpy(), expected, rtol=1e-7)

    damped = KernelSettings(damping=0.1, rescale_inverse=rescale)
    solutions = [
        factorise(matrix, damped, num_rows=num_rows, allow_singular=allowed).solve(targets)
        for allowed in (False, True)
    ]
    assert torch.equal(*solutions)


def test_a_kernel_of_zeros_has_no_pseudo_inverse_either():
    with pytest.raises(SingularKernelError, match="is zero"):
        factorise(torch.zeros(3, 3), KernelSettings(damping=0.0), num_rows=9, allow_singular=True)


def test_more_features_than_rows_with_damping_is_solved():
    rows, targets = random_rows(5), random_rows(3, seed=2)
    (matrix,) = gram([rows], layout=JOINT)

    solved = factorise(matrix, KernelSettings(damping=0.1), num_rows=5).solve(targets)

    expected = np.linalg.solve(reference.kernel(rows.numpy(), np.ones(5), damping=0.1), targets.numpy().T).T
    np.testing.assert_allclose(solved.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("seed", range(20))
def test_dependent_features_without_damping_are_refused_despite_rounding(seed):
    """Rounding makes the last pivot a tiny number of either sign; both must be caught."""
    rows = random_rows(seed=seed)
    rows[:, 6] = rows[:, 0] - 3.0 * rows[:, 2] + 0.1 * rows[:, 5]
    (matrix,) = gram([rows], layout=JOINT)

    with pytest.raises(SingularKernelError, match="numerically singular at lambda = 0"):
        factorise(matrix, KernelSettings(damping=0.0), num_rows=NUM_ROWS)


def test_features_of_very_different_scale_are_not_taken_for_dependent():
    scales = torch.logspace(-8, 8, WIDTH, dtype=torch.float64)
    rows, targets = random_rows(), random_rows(3, seed=2)
    (matrix,) = gram([rows], layout=JOINT)
    (scaled,) = gram([rows * scales], layout=JOINT)
    undamped = KernelSettings(damping=0.0)

    solved = factorise(scaled, undamped, num_rows=NUM_ROWS).solve(targets * scales)

    expected = factorise(matrix, undamped, num_rows=NUM_ROWS).solve(targets)
    torch.testing.assert_close(solved * scales, expected, rtol=1e-10, atol=0.0)


def test_all_weights_zero_is_refused_with_the_cause():
    (matrix,) = gram([random_rows()], torch.zeros(NUM_ROWS), layout=JOINT)

    with pytest.raises(SingularKernelError, match=r"'joint' is zero.*weight of zero.*use weighting='none'"):
        factorise(matrix, KernelSettings(lambda_reg=1.0), num_rows=NUM_ROWS)
    with pytest.raises(SingularKernelError, match="'joint' is zero"):
        eigenpath(matrix)


def test_all_segments_zero_is_refused():
    matrices = gram([random_rows()], torch.zeros(NUM_ROWS), layout=SPLIT)

    with pytest.raises(SingularKernelError, match="every segment is zero"):
        factorise_segments(matrices, KernelSettings(), num_rows=NUM_ROWS, layout=SPLIT)


def test_a_segment_without_signal_adds_nothing():
    rows = random_rows()
    rows[:, :3] = 0.0
    kernels = factorise_segments(
        gram([rows], layout=SPLIT), KernelSettings(), num_rows=NUM_ROWS, layout=SPLIT
    )

    solved = precondition(random_rows(4, seed=2), kernels, layout=SPLIT)

    assert torch.equal(solved[:, :3], torch.zeros(4, 3, dtype=torch.float64))
    assert bool((solved[:, 3:] != 0).all())


def test_precondition_solves_each_segment_alone():
    rows, targets = random_rows(), random_rows(4, seed=2)
    matrices = gram([rows], random_weights(), layout=SPLIT)
    kernels = factorise_segments(matrices, KernelSettings(), num_rows=NUM_ROWS, layout=SPLIT)

    solved = precondition(targets, kernels, layout=SPLIT)

    for (start, stop), matrix in zip(((0, 3), (3, 7)), matrices, strict=True):
        alone = factorise(matrix, KernelSettings(), num_rows=NUM_ROWS).solve(targets[:, start:stop])
        assert torch.equal(solved[:, start:stop], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gram_matrix_that_is_not_finite_is_refused_by_segment(value):
    rows = random_rows()
    rows[17, 5] = value
    matrices = gram([rows], layout=SPLIT)

    with pytest.raises(NonFiniteError, match="segment 'head' holds NaN or infinite"):
        factorise_segments(matrices, KernelSettings(), num_rows=NUM_ROWS, layout=SPLIT)


@pytest.mark.parametrize("matrix", [torch.ones(2, 3), torch.ones(4), torch.ones(2, 2, dtype=torch.int64)])
def test_a_gram_matrix_must_be_square_and_floating(matrix):
    with pytest.raises(InvalidInputError, match="must be a square floating matrix"):
        factorise(matrix, KernelSettings(), num_rows=NUM_ROWS)


def test_matrices_of_another_layout_are_refused():
    with pytest.raises(InvalidInputError, match=r"widths \[7\] but the segments of the layout have \[3, 4\]"):
        factorise_segments(gram([random_rows()], layout=JOINT), KernelSettings(), num_rows=9, layout=SPLIT)


def test_kernels_of_another_layout_are_refused():
    (matrix,) = gram([random_rows()], layout=JOINT)
    kernel = factorise(matrix, KernelSettings(), num_rows=NUM_ROWS)

    with pytest.raises(InvalidInputError, match="The kernels have widths"):
        precondition(random_rows(2), [kernel], layout=SPLIT)


@pytest.mark.parametrize("targets", [torch.ones(2, 3), torch.ones(7), torch.ones(2, 7, dtype=torch.int32)])
def test_solves_refuse_targets_that_do_not_fit(targets):
    (matrix,) = gram([random_rows()], layout=JOINT)
    kernel = factorise(matrix, KernelSettings(), num_rows=NUM_ROWS)

    for solve in (kernel.solve, kernel.quadratic_form, lambda t: eigenpath(matrix).solve(t, 1.0)):
        with pytest.raises(InvalidInputError, match="Feature rows must be a floating tensor"):
            solve(targets)


@pytest.mark.parametrize("damping", [0.0, 1e-3, 1.0, 100.0])
def test_one_eigendecomposition_gives_the_solution_of_every_lambda(damping):
    rows, targets = random_rows(), random_rows(5, seed=2)
    (matrix,) = gram([rows], random_weights(), layout=JOINT)
    path = eigenpath(matrix)
    lambda_reg = damping * path.mean_eigenvalue

    separate = factorise(matrix, KernelSettings(lambda_reg=lambda_reg), num_rows=NUM_ROWS)

    torch.testing.assert_close(
        path.solve(targets, lambda_reg), separate.solve(targets), rtol=1e-10, atol=1e-14
    )


def test_an_eigenpath_refuses_a_lambda_at_which_the_kernel_is_singular():
    (matrix,) = gram([random_rows(5)], layout=JOINT)

    with pytest.raises(SingularKernelError, match="width 7 is numerically singular at lambda = 0"):
        eigenpath(matrix).solve(random_rows(2), 0.0)


def test_an_eigenpath_refuses_a_negative_lambda():
    (matrix,) = gram([random_rows()], layout=JOINT)

    with pytest.raises(InvalidInputError, match="lambda_reg must be a finite number of at least 0"):
        eigenpath(matrix).solve(random_rows(2), -1.0)


def test_settings_survive_json():
    settings = KernelSettings(weighting="none", damping=0.5, lambda_reg=2, rescale_inverse=True)

    assert KernelSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"weighting": "curvatur"}, "Did you mean 'curvature'"),
        ({"damping": -0.1}, "damping must be a finite number of at least 0, got -0.1"),
        ({"damping": float("nan")}, "damping must be a finite number"),
        ({"lambda_reg": float("inf")}, "lambda_reg must be a finite number"),
        ({"lambda_reg": "1"}, "lambda_reg must be a finite number"),
        ({"rescale_inverse": 1}, "rescale_inverse must be True or False, got 1"),
        ({"dampin": 1.0}, r"Unknown kernel settings: \['dampin'\].*damping"),
    ],
)
def test_bad_settings_are_refused_by_name(values, seen):
    with pytest.raises(InvalidInputError, match=seen):
        KernelSettings.from_json(values)


def test_a_matrix_for_which_lapack_does_not_converge_is_decomposed(monkeypatch):
    def failing(matrix):
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    rows = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = rows.T @ rows
    expected = np.linalg.eigvalsh(gram.numpy())
    monkeypatch.setattr(torch.linalg, "eigh", failing)

    found = eigenpath(gram)

    np.testing.assert_allclose(found.eigenvalues.numpy(), expected, rtol=0, atol=1e-13 * expected.max())
    torch.testing.assert_close(
        found.eigenvectors @ found.eigenvalues.diag() @ found.eigenvectors.T, gram, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(found.eigenvectors.T @ found.eigenvectors, torch.eye(9, dtype=gram.dtype))


def test_the_shares_are_those_of_the_version_of_the_methods():
    """Stored scores are found by the version of a method, not by the shares: change both together."""
    assert DEFAULT_SHARES == {"curvature": 0.2, "none": 0.2, "fisher": 0.02}
    assert AbstractKernelMethod.version == 1
