"""Gram matrices, damping and solves, products of features and the best rows, against dense NumPy."""

import itertools
import json

import numpy as np
import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trak_lite.errors import InvalidInputError, NonFiniteError, SingularKernelError, StateError
from trak_lite.linalg.gram import GramAccumulator
from trak_lite.linalg.kernel import (
    DEFAULT_SHARES,
    KernelSettings,
    factorise,
    precondition,
)
from trak_lite.linalg.products import score_block, self_scores, unit_segments
from trak_lite.linalg.topk import TopK
from trak_lite.methods import AbstractKernelMethod
from trak_lite.types import FeatureLayout, Segment

pytestmark = pytest.mark.quick
NUM_ROWS, NUM_TARGETS, WIDTH, NUM_CHECKPOINTS = 300, 6, 7, 3
JOINT = FeatureLayout.joint(WIDTH)
SPLIT = FeatureLayout((Segment("conv", 0, 3), Segment("head", 3, 7)))


def random_rows(num_rows=NUM_ROWS, width=WIDTH, *, seed=0, dtype=torch.float64):
    return torch.randn(num_rows, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_weights(num_rows=NUM_ROWS, *, seed=1):
    return torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dependent_rows(num_rows=NUM_ROWS, *, seed=0):
    rows = random_rows(num_rows, seed=seed)
    rows[:, 6] = rows[:, 0] - 3.0 * rows[:, 2] + 0.1 * rows[:, 5]
    return rows


def gram(blocks, weights=None, *, layout):
    """Return the gram matrix of every segment."""
    sums = GramAccumulator(layout, torch.device("cpu"))
    parts = [None] * len(blocks) if weights is None else weights.split([len(block) for block in blocks])
    for block, some in zip(blocks, parts, strict=True):
        sums.add(block, some)
    return sums.result()


def joint_gram(rows=None, weights=None):
    return gram([random_rows() if rows is None else rows], weights, layout=JOINT)[0]


def factorised(matrix, values, **given):
    """Return the kernel of one segment."""
    (kernel,) = factorise([matrix], values, layout=FeatureLayout.joint(matrix.shape[-1]), **given)
    return kernel


def solve(rows, targets, num_rows=NUM_ROWS, weights=None, **values):
    kernel = factorised(joint_gram(rows, weights), KernelSettings(**values), num_rows=num_rows)
    return kernel.solve(targets)


# ---- gram
@given(cuts=st.lists(st.integers(0, NUM_ROWS), max_size=8))
@settings(max_examples=40, deadline=None)
def test_gram_is_the_sum_of_weighted_outer_products_with_the_same_bits_in_any_blocks(cuts):
    rows, weights = random_rows(), random_weights()
    bounds = [0, *sorted(cuts), NUM_ROWS]
    blocks = [rows[a:b].requires_grad_() for a, b in itertools.pairwise(bounds)]
    (matrix,) = gram(blocks, weights, layout=JOINT)
    assert torch.equal(matrix, joint_gram(rows, weights))
    assert not matrix.requires_grad
    assert torch.equal(rows, random_rows())
    assert torch.equal(weights, random_weights())
    expected = reference.kernel(random_rows().numpy(), random_weights().numpy(), lambda_reg=0.0)
    np.testing.assert_allclose(matrix.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_features_are_accumulated_in_float64(dtype):
    """65504 is float16's largest number: its square and any sum of squares would overflow there."""
    rows = random_rows().to(dtype)
    rows[:, 0] = 6e4
    matrix, exact = joint_gram(rows), rows.double().numpy()
    assert matrix.dtype == torch.float64
    np.testing.assert_allclose(matrix.numpy(), exact.T @ exact, rtol=1e-12, atol=1e-5)


@pytest.mark.parametrize("width", [256, 300, 700])
def test_a_gram_of_several_panels_is_whole_and_symmetric(width):
    rows = random_rows(width=width)
    (matrix,) = gram(rows.split(90), layout=FeatureLayout.joint(width))
    torch.testing.assert_close(matrix, rows.T @ rows, rtol=1e-12, atol=1e-11)
    assert torch.equal(matrix[600:, :256], matrix[:256, 600:].T)


# ---- damping and solves
@pytest.mark.parametrize("num_rows", [NUM_ROWS, 4])
def test_the_default_lambda_is_a_share_of_the_root_mean_square_of_eigenvalues(num_rows):
    """Of those that can be above zero: at most one per row, unless the matrix is a fitted Fisher information."""
    matrix = joint_gram(random_rows()[:num_rows])
    squares = np.square(np.linalg.eigvalsh(matrix.numpy()))
    expected = 0.2 * np.sqrt(squares[-num_rows:].mean())
    before = matrix.clone()
    kernel = factorised(matrix.tril(), KernelSettings(), num_rows=num_rows)  # reads only the lower triangle
    fisher = factorised(matrix, KernelSettings(weighting="fisher"), num_rows=num_rows)
    given = factorised(matrix, KernelSettings(damping=5.0, lambda_reg=0.25), num_rows=num_rows)
    assert torch.equal(matrix, before)
    assert kernel.lambda_reg == pytest.approx(expected, rel=1e-12)
    assert fisher.lambda_reg == pytest.approx(0.02 * np.sqrt(squares.mean()), rel=1e-12)
    assert given.lambda_reg == 0.25


def test_the_shares_are_those_of_the_version_of_the_methods():
    """Stored scores are found by the version of a method, not by the shares: change both together."""
    assert DEFAULT_SHARES == {"curvature": 0.2, "none": 0.2, "fisher": 0.02}
    assert AbstractKernelMethod.version == 1


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("num_rows", [5, NUM_ROWS])
@pytest.mark.parametrize("converges", [True, False])
def test_a_singular_kernel_may_be_solved_by_its_pseudo_inverse(num_rows, rescale, converges, monkeypatch):
    """Fewer rows than features, or dependent features; a kernel that has an inverse keeps its bits.

    Also where LAPACK's usual routine does not converge.
    """

    def failing(matrix):
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    if not converges:
        monkeypatch.setattr(torch.linalg, "eigh", failing)
    rows, targets = dependent_rows(num_rows), random_rows(3, seed=2)
    matrix, values = joint_gram(rows), KernelSettings(damping=0.0, rescale_inverse=rescale)
    kernel = factorised(matrix, values, num_rows=num_rows, allow_singular=True)
    assert kernel.is_pseudo_inverse
    assert kernel.width == WIDTH
    assert kernel.factor.shape == (WIDTH, min(num_rows, WIDTH - 1))
    inverse = np.linalg.pinv(rows.numpy().T @ rows.numpy(), rcond=1e-10, hermitian=True)
    inverse /= np.abs(inverse).mean() if rescale else 1.0
    np.testing.assert_allclose(kernel.solve(targets).numpy(), targets.numpy() @ inverse, rtol=1e-7)
    expected = np.einsum("ij,jk,ik->i", targets.numpy(), inverse, targets.numpy())
    np.testing.assert_allclose(kernel.quadratic_form(targets).numpy(), expected, rtol=1e-7)
    damped = KernelSettings(damping=0.1, rescale_inverse=rescale)
    kernels = [factorised(matrix, damped, num_rows=num_rows, allow_singular=some) for some in (False, True)]
    assert torch.equal(*(kernel.solve(targets) for kernel in kernels))


@pytest.mark.parametrize("seed", range(10))
def test_dependent_features_without_damping_are_refused_despite_rounding(seed):
    """Rounding makes the last pivot a tiny number of either sign; both must be caught."""
    said = r"numerically singular at lambda = 0.* Use a larger damping, or damping=None"
    with pytest.raises(SingularKernelError, match=said):
        solve(dependent_rows(seed=seed), random_rows(2), damping=0.0)


def few_rows(layout, count, blocks=7):
    """Return weighted rows where the layout is wider than their number, gram matrices elsewhere, and those of all."""
    rows, weights = random_rows(count, layout.width), random_weights(count)
    sums = GramAccumulator(layout, rows.device, num_rows=count)
    for some, theirs in zip(rows.split(blocks), weights.split(blocks), strict=True):
        sums.add(some, theirs)
    return sums.result(), gram([rows], weights, layout=layout)


def both_kernels(layout, count, values, **options):
    """Kernels of few rows and those of their gram, and targets: train rows as well."""
    found = [
        factorise(some, KernelSettings(**values), num_rows=count, layout=layout, **options)
        for some in few_rows(layout, count)
    ]
    rows = random_rows(count, layout.width)
    return *found, torch.cat([random_rows(5, layout.width, seed=2), rows[:5]])


@pytest.mark.parametrize(
    ("count", "sides"), [(300, (True, False)), (301, (False, False)), (15, (True, True))]
)
@pytest.mark.parametrize("values", [{}, {"damping": 1.0}, {"lambda_reg": 0.3}, {"weighting": "none"}])
def test_a_kernel_of_few_rows_is_factorised_on_their_side_and_solves_the_same(count, sides, values):
    layout = FeatureLayout((Segment("wide", 0, 400), Segment("narrow", 400, 420)))
    kernels, expected, targets = both_kernels(layout, count, values)
    assert tuple(kernel.rows is not None for kernel in kernels) == sides
    assert [kernel.width for kernel in kernels] == [400, 20]
    for kernel, alone, segment in zip(kernels, expected, layout.segments, strict=True):
        assert kernel.factor.shape[0] == min(count, segment.width) or kernel.rows is None
        assert kernel.lambda_reg == pytest.approx(alone.lambda_reg, rel=1e-12)
        columns = targets[:, segment.start : segment.stop]
        for ask in ("solve", "quadratic_form"):
            pair = [getattr(one, ask)(columns) for one in (kernel, alone)]
            torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-12)
    for ask in (precondition, self_scores):
        pair = [ask(targets, some, layout=layout) for some in (kernels, expected)]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=0)


@pytest.mark.parametrize("values", [{"damping": 1e-9}, {"damping": 0.1, "rescale_inverse": True}])
def test_few_rows_with_little_damping_or_a_rescaled_inverse_have_a_kernel_of_features(values):
    (kernel,), (expected,), targets = both_kernels(FeatureLayout.joint(40), 20, values)
    assert (kernel.rows, kernel.factor.shape) == (None, (40, 40))
    torch.testing.assert_close(kernel.solve(targets), expected.solve(targets), rtol=1e-5, atol=0)


def test_few_rows_without_damping_are_refused_or_pseudo_inverted_as_their_gram():
    layout, values = FeatureLayout.joint(40), KernelSettings(damping=0.0)
    (kernel,), (expected,), targets = both_kernels(layout, 20, {"damping": 0.0}, allow_singular=True)
    torch.testing.assert_close(kernel.solve(targets), expected.solve(targets), rtol=1e-8, atol=1e-12)
    messages = set()
    for matrices in few_rows(layout, 20):
        with pytest.raises(SingularKernelError) as caught:
            factorise(matrices, values, num_rows=20, layout=layout)
        messages.add(str(caught.value))
    (message,) = messages
    assert message.endswith(
        "Use damping > 0, damping=None (a share of the eigenvalues), or at most 20 features."
    )


def test_few_rows_of_a_silent_or_broken_segment_are_noticed_as_in_a_gram():
    layout = FeatureLayout((Segment("conv", 0, 30), Segment("head", 30, 60)))
    rows = random_rows(10, 60)
    rows[:, :30] = 0.0
    few = [rows[:, :30], rows[:, 30:]]
    silent, _ = factorise(few, KernelSettings(), num_rows=10, layout=layout)
    assert not silent.solve(torch.ones(2, 30)).any()
    few[1] = few[1] * torch.inf
    with pytest.raises(NonFiniteError, match="segment 'head' holds NaN"):
        factorise(few, KernelSettings(), num_rows=10, layout=layout)
    with pytest.raises(SingularKernelError, match="every segment is zero"):
        factorise([few[0], few[0]], KernelSettings(), num_rows=10, layout=layout)


def test_features_of_very_different_scale_are_not_taken_for_dependent():
    scales = torch.logspace(-8, 8, WIDTH, dtype=torch.float64)
    rows, targets = random_rows(), random_rows(3, seed=2)
    solved = solve(rows * scales, targets * scales, damping=0.0)
    torch.testing.assert_close(solved * scales, solve(rows, targets, damping=0.0), rtol=1e-10, atol=0.0)


def test_segments_are_solved_alone_and_one_without_signal_adds_nothing():
    targets, silent = random_rows(4, seed=2), random_rows()
    silent[:, :3] = 0.0
    for rows in (random_rows(), silent):
        matrices = gram([rows], random_weights(), layout=SPLIT)
        kernels = factorise(matrices, KernelSettings(), num_rows=NUM_ROWS, layout=SPLIT)
        solved = precondition(targets, kernels, layout=SPLIT)
        parts = [
            torch.zeros(4, part.width, dtype=torch.float64)
            if rows is silent and part.start == 0
            else factorised(m, KernelSettings(), num_rows=NUM_ROWS).solve(targets[:, part.start : part.stop])
            for part, m in zip(SPLIT.segments, matrices, strict=True)
        ]
        assert torch.equal(solved, torch.cat(parts, 1))


def test_settings_survive_json():
    given = KernelSettings(weighting="none", damping=0.5, lambda_reg=2, rescale_inverse=True)
    assert KernelSettings.from_json(json.loads(json.dumps(given.to_json()))) == given


# ---- products
def random_tensors(*shape, seed, count=NUM_CHECKPOINTS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(count)]


TRAIN = random_tensors(NUM_ROWS, WIDTH, seed=0)
TARGETS = random_tensors(NUM_TARGETS, WIDTH, seed=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_row_has_the_same_scores_in_every_block(dtype):
    train = TRAIN[0].to(dtype)
    pieces = torch.cat([score_block(piece, TARGETS[0]) for piece in train.split([1, 170, 129])])
    torch.testing.assert_close(pieces, score_block(train, TARGETS[0]), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(pieces, train.double() @ TARGETS[0].T, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("train_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target_dtype", [torch.float16, torch.float32])
def test_products_never_accumulate_below_float32(train_dtype, target_dtype):
    """8 x 250 x 250 is past float16's largest number."""
    train = torch.full((2, 8), 250.0, dtype=train_dtype)
    scores = score_block(train, torch.full((1, 8), 250.0, dtype=target_dtype))
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[500000.0], [500000.0]]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("train_dtype", [torch.float16, torch.float32])
def test_scores_add_up_over_checkpoints_in_place(out_dtype, train_dtype):
    out = torch.zeros(NUM_ROWS, NUM_TARGETS, dtype=out_dtype)
    for train, targets in zip(TRAIN, TARGETS, strict=True):
        assert score_block(train.to(train_dtype), targets.float(), out=out) is out
    pairs = zip(TRAIN, TARGETS, strict=True)
    expected = sum(a.to(train_dtype).double() @ b.float().double().T for a, b in pairs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("train", "targets", "rtol"),
    [
        (TRAIN[0], TARGETS[0], 1e-12),
        (TRAIN[0].float(), TARGETS[0].float(), 1e-5),
        (TRAIN[0].half(), TARGETS[0].half(), 1e-5),
        (
            torch.tensor([[3e-30, 4e-30]]),
            torch.tensor([[3e30, 4e30], [-4e30, 3e30]]),
            1e-6,
        ),  # squares out of range
        (torch.zeros(1, 2), torch.ones(1, 2), 0),
        (torch.ones(1, 2), torch.zeros(1, 2), 0),
    ],
)
def test_cosine_is_the_product_over_both_norms_and_zero_for_zero_rows(train, targets, rtol):
    layout = FeatureLayout.joint(train.shape[1])
    found = score_block(unit_segments(train, layout=layout), unit_segments(targets, layout=layout))
    a, b = train.double().numpy(), targets.double().numpy()
    norms = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    expected = a @ b.T / np.where(norms == 0, 1, norms)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=rtol, atol=rtol)


# ---- the best rows
@st.composite
def score_streams(draw):
    """A matrix of few distinct values (so that ties abound), cut into tiles in any order."""
    num_rows, num_targets = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    count = num_rows * num_targets
    few = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0])
    values = draw(st.lists(few, min_size=count, max_size=count))
    cuts = sorted(draw(st.sets(st.integers(0, num_rows), max_size=6)) | {0, num_rows})
    tiles = draw(st.permutations(list(itertools.pairwise(cuts))))
    return np.array(values, dtype=np.float32).reshape(num_rows, num_targets), tiles


LARGER = random_rows(3000, 20).numpy(), [(a, min(a + 256, 3000)) for a in range(0, 3000, 256)]


def assert_best(scores, tiles, k, sign):
    best = TopK(scores.shape[1], k, sign=sign)
    for start, stop in tiles:
        best.update(start, torch.from_numpy(scores[start:stop]))
    best.update(len(scores), torch.from_numpy(scores[:0]))  # changes nothing
    best.result()[1].fill_(7.0)  # a copy
    rows, values = best.result()
    expected_rows, expected_values = reference.top_k(scores, k, sign=sign)
    assert rows.dtype == torch.int64
    np.testing.assert_array_equal(rows.numpy(), expected_rows)
    np.testing.assert_array_equal(values.numpy(), expected_values)


@given(stream=score_streams(), k=st.integers(1, 50), sign=st.sampled_from(["helpful", "harmful"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_top_k_equals_a_stable_sort_of_the_dense_matrix(stream, k, sign):
    assert_best(*stream, k, sign)


@pytest.mark.parametrize("sign", ["helpful", "harmful"])
def test_distinct_scores_of_a_larger_stream_are_ranked_exactly(sign):
    assert_best(*LARGER, 37, sign)


def test_a_row_given_twice_is_refused_and_nothing_changes():
    best = TopK(1, 3)
    best.update(4, torch.ones(4, 1))
    best.update(0, torch.ones(4, 1))
    with pytest.raises(InvalidInputError, match="Rows 7:9 overlap rows 0:8, given before"):
        best.update(7, torch.full((2, 1), 9.0))
    assert best.result()[0].tolist() == [[0, 1, 2]]


# ---- errors
def grammed(block, weights=None):
    GramAccumulator(JOINT, torch.device("cpu")).add(block, weights)


def weighed(rows=slice(0, 0), value=0.0):
    weights = random_weights()
    weights[rows] = value
    return gram([random_rows()], weights, layout=JOINT)


def with_value(value):
    rows = random_rows()
    rows[17, 5] = value
    return gram([rows], layout=SPLIT)


def segments(matrices):
    return factorise(matrices, KernelSettings(), num_rows=NUM_ROWS, layout=SPLIT)


def kernel(**values):
    return factorised(joint_gram(), KernelSettings(**values), num_rows=NUM_ROWS)


def updated(block, first=0, num_targets=1, before=None):
    best = TopK(num_targets, 3)
    if before is not None:
        best.update(0, before)
    best.update(first, block)


NO_WEIGHT = torch.zeros(NUM_ROWS)
SINGULAR = r"7 features, 5 train rows.*more features than rows.*Use damping > 0"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gram([random_rows(), random_rows().to("meta")], layout=JOINT), InvalidInputError,
         "The rows are on meta, the sums on cpu"),
        *((lambda block=block: grammed(block), InvalidInputError, r"must be a floating tensor \(rows, 7\)")
          for block in (torch.ones(3, WIDTH + 1), torch.ones(WIDTH), torch.ones(3, WIDTH, dtype=torch.int64))),
        *((lambda rows=rows: unit_segments(rows, layout=JOINT), InvalidInputError,
           r"must be a floating tensor \(rows, 7\)")
          for rows in (torch.ones(2, 7, 1), torch.ones(2, 6), torch.ones(2, 7, dtype=torch.int64))),
        (lambda: grammed(torch.ones(4, WIDTH), torch.ones(5)), InvalidInputError, "5 weights but 4 rows"),
        *((lambda bad=bad: weighed(4, bad), NonFiniteError, "1 of 300 weights are NaN or infinite, the first at row 4")
          for bad in (float("nan"), float("inf"))),
        (lambda: weighed([7, 9], -0.5), InvalidInputError, "2 of 300 weights are negative, the first at row 7"),
        *((lambda w=w: grammed(random_rows(), w), InvalidInputError, "weights must be a floating tensor")
          for w in (torch.ones(NUM_ROWS, 1), torch.ones(NUM_ROWS, dtype=torch.int64), torch.tensor(1.0))),
        (lambda: solve(random_rows(5), random_rows(2), 5, damping=0.0), SingularKernelError, SINGULAR),
        (lambda: factorised(torch.zeros(3, 3), KernelSettings(damping=0.0), num_rows=9, allow_singular=True),
         SingularKernelError, "is zero"),
        (lambda: solve(random_rows(), random_rows(2), weights=NO_WEIGHT, lambda_reg=1.0), SingularKernelError,
         r"'joint' is zero.*weight of zero.*use weighting='none'"),
        (lambda: segments(gram([random_rows()], NO_WEIGHT, layout=SPLIT)), SingularKernelError,
         "every segment is zero"),
        *((lambda value=value: segments(with_value(value)), NonFiniteError, "segment 'head' holds NaN or infinite")
          for value in (float("nan"), float("inf"))),
        *((lambda m=m: factorised(m, KernelSettings(), num_rows=9), InvalidInputError, "a square floating matrix")
          for m in (torch.ones(2, 3), torch.ones(4), torch.ones(2, 2, dtype=torch.int64))),
        (lambda: segments(gram([random_rows()], layout=JOINT)), InvalidInputError,
         r"widths \[7\] but the segments of the layout have \[3, 4\]"),
        (lambda: precondition(random_rows(2), [kernel()], layout=SPLIT), InvalidInputError, "The kernels have widths"),
        *((lambda make=make, t=t: make(t), InvalidInputError, "Feature rows must be a floating tensor")
          for t in (torch.ones(2, 3), torch.ones(7), torch.ones(2, 7, dtype=torch.int32))
          for make in (kernel().solve, kernel().quadratic_form)),
        *((lambda values=values: KernelSettings.from_json(values), InvalidInputError, message)
          for values, message in [
              ({"weighting": "curvatur"}, "Did you mean 'curvature'"),
              ({"damping": -0.1}, "damping must be a finite number of at least 0, got -0.1"),
              ({"damping": float("nan")}, "damping must be a finite number"),
              ({"lambda_reg": float("inf")}, "lambda_reg must be a finite number"),
              ({"lambda_reg": "1"}, "lambda_reg must be a finite number"),
              ({"rescale_inverse": 1}, "rescale_inverse must be True or False, got 1"),
              ({"dampin": 1.0}, r"Unknown kernel settings: \['dampin'\].*damping"),
          ]),
        *((lambda a=a, b=b: score_block(a, b), InvalidInputError, "must be floating tensors")
          for a, b in [
              (torch.ones(3, 2), torch.ones(3, 4)),
              (torch.ones(3), torch.ones(3)),
              (torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2)),
              (torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64)),
          ]),
        (lambda: score_block(torch.ones(3, 2), torch.ones(3, 2, device="meta")), InvalidInputError,
         "Train rows are on cpu and targets on meta"),
        *((lambda out=out: score_block(torch.ones(3, 4), torch.ones(2, 4), out=out), InvalidInputError,
           "out must be a float32 or float64 tensor")
          for out in (torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.float16))),
        *((lambda rows=rows: self_scores(rows, [kernel()], layout=JOINT), InvalidInputError,
           r"must be a floating tensor \(rows, 7\)") for rows in (torch.ones(2, WIDTH - 1), torch.ones(WIDTH))),
        *((lambda kernels=kernels, layout=layout: self_scores(TRAIN[0], kernels, layout=layout), InvalidInputError,
           "The kernels have widths") for kernels, layout in (([kernel()], SPLIT), ([], JOINT))),
        *((lambda bad=bad: updated(torch.tensor([[0.0, 0.0], [0.0, bad]]), 10, 2), NonFiniteError,
           "train row 11 for target 1 is") for bad in (float("nan"), float("inf"), float("-inf"))),
        *((lambda block=block: updated(block, 0, 2), InvalidInputError,
           r"Scores must be a floating tensor \(rows, 2\)")
          for block in (torch.ones(2, 3), torch.ones(2), torch.ones(2, 2, dtype=torch.int64))),
        (lambda: updated(torch.ones(1, 1).double(), 1, before=torch.ones(1, 1)), InvalidInputError,
         r"torch.float64, the ones before them torch.float32"),
        (lambda: updated(torch.ones(1, 1), -1), InvalidInputError, "first_row must be at least 0, got -1"),
        (lambda: TopK(1, 3).result(), StateError, "TopK has seen no row"),
        (lambda: TopK(0, 1), InvalidInputError, "num_targets must be an integer of at least 1"),
        (lambda: TopK(1, 0), InvalidInputError, "k must be an integer of at least 1"),
        (lambda: TopK(1, 1, sign="helpfull"), InvalidInputError, "Did you mean 'helpful'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
