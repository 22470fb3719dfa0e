"""Scores from features: the formulas of the method against the dense reference."""

import numpy as np
import pytest
import reference
import torch

from trak_lite.errors import InvalidInputError
from trak_lite.linalg.kernel import KernelSettings, factorise_segments, gram, precondition
from trak_lite.linalg.products import score_block, self_scores, unit_segments
from trak_lite.types import FeatureLayout, Segment

NUM_ROWS, NUM_TARGETS, WIDTH, NUM_CHECKPOINTS = 300, 6, 8, 3
JOINT = FeatureLayout.joint(WIDTH)
SPLIT = FeatureLayout((Segment("a", 0, 3), Segment("b", 3, 4), Segment("c", 4, 8)))
LAYOUTS = pytest.mark.parametrize("layout", [JOINT, SPLIT], ids=["joint", "per-module"])


def random_tensors(*shape, seed, count=NUM_CHECKPOINTS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(count)]


TRAIN = random_tensors(NUM_ROWS, WIDTH, seed=0)
TARGETS = random_tensors(NUM_TARGETS, WIDTH, seed=1)
Q = [torch.sigmoid(x) for x in random_tensors(NUM_ROWS, seed=2)]
W = [q * (1 - q) for q in Q]


def products(train, weights, targets, *, layout=JOINT, settings=None):
    """One checkpoint: gram, factors, targets, scores."""
    settings = settings or KernelSettings()
    weights = None if settings.weighting == "none" else weights
    matrices = gram(train.split(100), weights, layout=layout)
    kernels = factorise_segments(matrices, settings, num_rows=len(train), layout=layout)
    return score_block(train, precondition(targets, kernels, layout=layout))


def native_scores(**options):
    """All checkpoints, as the method defines them: mean of products times mean of q."""
    per_checkpoint = [products(*one, **options) for one in zip(TRAIN, W, TARGETS, strict=True)]
    return torch.stack(per_checkpoint).mean(0) * torch.stack(Q).mean(0)[:, None]


@LAYOUTS
@pytest.mark.parametrize(
    "values",
    [{}, {"damping": 0.01}, {"damping": 0.0}, {"lambda_reg": 5.0}, {"weighting": "none", "damping": 3.0}],
    ids=str,
)
def test_scores_match_the_dense_reference(layout, values):
    scores = native_scores(layout=layout, settings=KernelSettings(**values))

    expected = reference.kernel_scores(
        *([x.numpy() for x in arrays] for arrays in (TRAIN, Q, W, TARGETS)),
        segments=[(s.start, s.stop) for s in layout.segments],
        where_q="outside",
        **values,
    )
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("lambda_reg", [0.0, 0.1, 0.5])
def test_rescaled_inverse_gives_the_scores_of_the_original_trak(lambda_reg):
    num_entries = 20
    train, targets = random_tensors(NUM_ROWS, num_entries, seed=3), random_tensors(4, num_entries, seed=4)
    matrices = random_tensors(num_entries, WIDTH, seed=5)
    settings = KernelSettings(weighting="none", lambda_reg=lambda_reg, rescale_inverse=True)

    per_checkpoint = [
        products(g @ r / num_entries**0.5, None, t @ r / num_entries**0.5, settings=settings)
        for g, t, r in zip(train, targets, matrices, strict=True)
    ]
    scores = torch.stack(per_checkpoint).mean(0) * torch.stack(Q).mean(0)[:, None]

    expected = reference.trak_scores(
        *([x.numpy() for x in arrays] for arrays in (train, Q, targets, matrices)), lambda_reg=lambda_reg
    )
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float16, 1e-2)])
def test_narrow_features_score_close_to_float64(dtype, rtol):
    scores = products(TRAIN[0].to(dtype), W[0], TARGETS[0].to(dtype))

    expected = products(TRAIN[0], W[0], TARGETS[0])
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, expected, rtol=rtol, atol=rtol * float(expected.abs().mean()))


def test_per_module_scores_are_the_sum_of_separate_computations():
    together = products(TRAIN[0], W[0], TARGETS[0], layout=SPLIT)

    alone = [
        products(
            TRAIN[0][:, s.start : s.stop],
            W[0],
            TARGETS[0][:, s.start : s.stop],
            layout=FeatureLayout.joint(s.width),
        )
        for s in SPLIT.segments
    ]
    torch.testing.assert_close(together, sum(alone), rtol=1e-12, atol=1e-14)


def test_relative_damping_makes_scores_independent_of_the_scale_of_each_segment():
    scales = torch.tensor([1e-3] * 3 + [1.0] + [1e4] * 4, dtype=torch.float64)

    scaled = products(TRAIN[0] * scales, W[0], TARGETS[0] * scales, layout=SPLIT)

    torch.testing.assert_close(
        scaled, products(TRAIN[0], W[0], TARGETS[0], layout=SPLIT), rtol=1e-10, atol=1e-14
    )


def test_permuting_train_rows_permutes_rows_of_scores():
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))

    permuted = products(TRAIN[0][order], W[0][order], TARGETS[0])

    torch.testing.assert_close(permuted, products(TRAIN[0], W[0], TARGETS[0])[order], rtol=1e-10, atol=1e-14)


def test_permuting_targets_permutes_columns_of_scores():
    order = torch.tensor([3, 0, 5, 1, 4, 2])

    permuted = products(TRAIN[0], W[0], TARGETS[0][order])

    torch.testing.assert_close(
        permuted, products(TRAIN[0], W[0], TARGETS[0])[:, order], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_row_has_the_same_scores_in_every_block(dtype):
    train = TRAIN[0].to(dtype)

    pieces = torch.cat([score_block(piece, TARGETS[0]) for piece in train.split([1, 170, 129])])

    torch.testing.assert_close(pieces, score_block(train, TARGETS[0]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("train_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target_dtype", [torch.float16, torch.float32])
def test_products_never_accumulate_below_float32(train_dtype, target_dtype):
    """8 x 250 x 250 is past float16's largest number."""
    train, targets = (
        torch.full((2, WIDTH), 250.0, dtype=train_dtype),
        torch.full((1, WIDTH), 250.0, dtype=target_dtype),
    )

    scores = score_block(train, targets)

    assert scores.dtype == torch.float32
    assert scores.tolist() == [[500000.0], [500000.0]]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("train_dtype", [torch.float16, torch.float32])
def test_scores_add_up_over_checkpoints_in_place(out_dtype, train_dtype):
    out = torch.full((NUM_ROWS, NUM_TARGETS), float("nan"), dtype=out_dtype)

    for number, (train, targets) in enumerate(zip(TRAIN, TARGETS, strict=True)):
        returned = score_block(train.to(train_dtype), targets.float(), out=out, accumulate=number > 0)

    assert returned is out
    expected = sum(
        a.to(train_dtype).double() @ b.float().double().T for a, b in zip(TRAIN, TARGETS, strict=True)
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("rescale_inverse", [False, True])
def test_self_scores_are_the_diagonal_of_the_train_by_train_scores(layout, rescale_inverse):
    settings = KernelSettings(rescale_inverse=rescale_inverse)
    kernels = factorise_segments(
        gram([TRAIN[0]], W[0], layout=layout), settings, num_rows=NUM_ROWS, layout=layout
    )

    own = self_scores(TRAIN[0], kernels, layout=layout)

    dense = products(TRAIN[0], W[0], TRAIN[0], layout=layout, settings=settings)
    torch.testing.assert_close(own, dense.diagonal(), rtol=1e-10, atol=0.0)


def test_self_scores_of_narrow_features_are_computed_in_float64():
    kernels = factorise_segments(
        gram([TRAIN[0]], layout=JOINT), KernelSettings(), num_rows=NUM_ROWS, layout=JOINT
    )
    narrow = TRAIN[0].half()

    torch.testing.assert_close(
        self_scores(narrow, kernels, layout=JOINT), self_scores(narrow.double(), kernels, layout=JOINT)
    )


def cosine(train, targets):
    layout = FeatureLayout.joint(train.shape[1])
    return score_block(unit_segments(train, layout=layout), unit_segments(targets, layout=layout))


def test_scores_of_targets_themselves_are_the_plain_product():
    scores = score_block(TRAIN[0], TARGETS[0])

    np.testing.assert_allclose(
        scores.numpy(), TRAIN[0].numpy() @ TARGETS[0].numpy().T, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-5)]
)
def test_cosine_is_the_product_over_both_norms(dtype, rtol):
    train, targets = TRAIN[0].to(dtype), TARGETS[0].to(dtype)

    a, b = train.double().numpy(), targets.double().numpy()
    expected = a @ b.T / np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    np.testing.assert_allclose(cosine(train, targets).double().numpy(), expected, rtol=rtol, atol=rtol)


def test_cosine_is_right_where_squares_leave_the_range_of_the_dtype():
    tiny, huge = torch.tensor([[3e-30, 4e-30]]), torch.tensor([[3e30, 4e30], [-4e30, 3e30]])

    torch.testing.assert_close(cosine(tiny, huge), torch.tensor([[1.0, 0.0]]), rtol=1e-6, atol=1e-6)


def test_cosine_with_a_zero_row_is_zero():
    zero = torch.zeros(1, 2)

    assert cosine(zero, torch.ones(1, 2)).item() == 0.0
    assert cosine(torch.ones(1, 2), zero).item() == 0.0


@pytest.mark.parametrize(
    ("train", "targets"),
    [
        (torch.ones(3, 2), torch.ones(3, 4)),
        (torch.ones(3), torch.ones(3)),
        (torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2)),
        (torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64)),
    ],
    ids=["widths", "axes", "integer-train", "integer-targets"],
)
def test_products_refuse_sides_that_do_not_fit(train, targets):
    with pytest.raises(InvalidInputError, match="must be floating tensors"):
        score_block(train, targets)


def test_products_refuse_two_devices():
    with pytest.raises(InvalidInputError, match="Train rows are on cpu and targets on meta"):
        score_block(torch.ones(3, 2), torch.ones(3, 2, device="meta"))


@pytest.mark.parametrize(
    "out", [torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.float16)], ids=["shape", "dtype"]
)
def test_scores_refuse_a_result_tensor_that_cannot_hold_them(out):
    with pytest.raises(InvalidInputError, match="out must be a float32 or float64 tensor"):
        score_block(torch.ones(3, 4), torch.ones(2, 4), out=out)


def test_accumulating_needs_a_tensor_to_add_to():
    with pytest.raises(InvalidInputError, match="accumulate=True needs the tensor to add to"):
        score_block(torch.ones(3, 4), torch.ones(2, 4), accumulate=True)


@pytest.mark.parametrize("rows", [torch.ones(2, WIDTH - 1), torch.ones(WIDTH)])
def test_self_scores_refuse_rows_of_another_layout(rows):
    kernels = factorise_segments(
        gram([TRAIN[0]], layout=JOINT), KernelSettings(), num_rows=NUM_ROWS, layout=JOINT
    )

    with pytest.raises(InvalidInputError, match="do not fit a layout"):
        self_scores(rows, kernels, layout=JOINT)
    with pytest.raises(InvalidInputError, match="do not fit a layout"):
        self_scores(TRAIN[0], kernels, layout=SPLIT)
