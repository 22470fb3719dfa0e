"""Dense projectors: against dense NumPy, within their memory budget, for every kind of gradient."""

from __future__ import annotations

import functools
import math
import weakref

import numpy as np
import projection_reference as reference
import pytest
import torch
from projection_cases import LargestTensor, random, random_gradients

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import GaussianProjector, RademacherProjector
from trak_lite.projectors.dense import matrices as matrices_module
from trak_lite.projectors.random import entries as entries_module
from trak_lite.types import DenseBlock, FactoredBlock

KINDS = {"rademacher": RademacherProjector, "gaussian": GaussianProjector}
BUDGET = 600_000
SHAPES = {"conv": (3, 2, 2), "scale": (), "bias": (5,), "empty": (0, 4)}
gradients = functools.partial(random_gradients, SHAPES)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def expected_features(
    kind: str,
    grads: dict[str, torch.Tensor],
    proj_dim: int,
    *,
    seed: int,
    model_id: int,
    magnitudes: bool = False,
):
    """The dense product; with ``magnitudes`` that with the absolute entries of the matrices."""
    total = np.zeros((next(iter(grads.values())).shape[0], proj_dim))
    for name, grad in grads.items():
        rows = grad.double().numpy().reshape(grad.shape[0], math.prod(grad.shape[1:]))
        matrix = reference.matrix(kind, (rows.shape[1], proj_dim), seed=seed, model_id=model_id, name=name)
        total += rows @ (np.abs(matrix) if magnitudes else matrix)
    return total / math.sqrt(proj_dim)


@pytest.mark.parametrize("proj_dim", [1, 31, 32, 33, 70])
@pytest.mark.parametrize(("seed", "model_id"), [(0, 0), (7, 3)])
def test_features_equal_the_dense_product(kind, proj_dim, seed, model_id):
    grads = gradients()
    features = KINDS[kind](proj_dim, seed=seed).project(grads, model_id)

    assert features.dtype == torch.float64
    expected = expected_features(kind, grads, proj_dim, seed=seed, model_id=model_id)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_a_tensor_of_gradients_is_one_parameter_without_a_name(kind):
    grads = random(3, 20)

    features = KINDS[kind](8).project(grads, 0)
    expected = expected_features(kind, {"": grads}, 8, seed=0, model_id=0)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_gradients_are_accumulated_in_float32(kind, dtype):
    grads = gradients(dtype=dtype)
    features = KINDS[kind](40).project(grads, 0)

    assert features.dtype == torch.float32
    expected = expected_features(kind, grads, 40, seed=0, model_id=0)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_float16_gradients_are_cast_in_pieces_with_no_float16_arithmetic(kind, monkeypatch):
    monkeypatch.setattr("trak_lite.projectors.dense.projectors._CAST_BYTES", 64)
    grads = {"w": torch.full((4, 100), 60_000.0, dtype=torch.float16)}  # two of them overflow float16

    features = KINDS[kind](16).project(grads, 0)
    expected = expected_features(kind, grads, 16, seed=0, model_id=0)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-5, atol=1e-5 * 60_000)


def test_parameters_of_mixed_precision_give_the_widest_features(kind):
    grads = gradients()
    grads["bias"] = grads["bias"].float()
    grads["scale"] = grads["scale"].bfloat16()
    projector = KINDS[kind](12)
    features = projector.project(grads, 0)

    assert features.dtype == torch.float64
    # Six entries are summed in float32, five of the bias and the scale, in an order of the processor's own: each entry
    # goes through seven roundings at most, of 2**-24 of the sum of the absolute products so far.
    narrow = {name: grads[name].abs() for name in ("bias", "scale")}
    most = expected_features(kind, narrow, 12, seed=0, model_id=0, magnitudes=True)
    expected = expected_features(kind, grads, 12, seed=0, model_id=0)
    for given in (grads, dict(reversed(grads.items()))):
        error = np.abs(projector.project(given, 0).numpy() - expected)
        assert (error <= 7 * 2.0**-24 * most + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_chosen_dtype_is_the_dtype_of_the_features(kind, dtype):
    grads = gradients(dtype=torch.float32)
    features = KINDS[kind](12, dtype=dtype).project(grads, 0)

    assert features.dtype == dtype
    expected = expected_features(kind, grads, 12, seed=0, model_id=0)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    np.testing.assert_allclose(features.double().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_a_feature_row_of_one_precision_is_a_smaller_projectors_row(kind):
    """The matrix of a smaller K is the left part of a larger one: only the scale differs."""
    grads = gradients()
    small, large = (KINDS[kind](k).project(grads, 0) * math.sqrt(k) for k in (20, 90))

    torch.testing.assert_close(small, large[:, :20], rtol=1e-12, atol=1e-12)


def test_unequal_layouts_in_memory_do_not_matter(kind):
    grad = random(4, 2, 3, 5)
    strided = grad.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    expanded = random(1, 2, 3, 5).expand(4, 2, 3, 5)
    projector = KINDS[kind](9)

    # Not the same bits: how a product of matrices rounds may depend on where its operands lie.
    torch.testing.assert_close(
        projector.project({"w": strided}, 0), projector.project({"w": grad}, 0), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(
        projector.project({"w": expanded}, 0),
        projector.project({"w": expanded.contiguous()}, 0),
        rtol=1e-12,
        atol=1e-12,
    )


def test_gradients_that_require_grad_leave_no_graph(kind):
    grads = {"w": random(2, 3).requires_grad_()}

    assert not KINDS[kind](4).project(grads, 0).requires_grad


def test_a_projector_first_used_in_inference_mode_works_outside_of_it(kind):
    grads = {"a": random(4, 3000, dtype=torch.float32)}  # more than the budget: workspaces are written again
    projector = KINDS[kind](100, memory_budget=BUDGET)
    with torch.inference_mode():
        inside = projector.project(grads, 0)

    assert torch.equal(projector.project(grads, 0), inside)
    wide = projector.project({name: grad.double() for name, grad in grads.items()}, 0)
    torch.testing.assert_close(wide.float(), inside.clone(), rtol=1e-4, atol=1e-4)


def test_no_parameter_at_all_gives_zero_features(kind):
    accumulator = KINDS[kind](6).accumulator(3, model_id=0, parameters=SHAPES)

    assert torch.equal(accumulator.features(), torch.zeros(3, 6))


def test_features_can_be_read_twice(kind):
    accumulator = KINDS[kind](6).accumulator(3, model_id=0, parameters=SHAPES)
    accumulator.add(DenseBlock("bias", random(3, 5)))

    assert torch.equal(accumulator.features(), accumulator.features())


# ---- memory


@pytest.fixture
def buffers(monkeypatch):
    """Counts the bytes of live buffers of matrices and workspaces: ``(now, most)``."""
    entries_module.normal_quantiles()  # shared by the whole process
    count = {"now": 0, "most": 0}
    make = entries_module.empty_buffer

    def release(nbytes: int) -> None:
        count["now"] -= nbytes

    def counted(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = make(*shape, dtype=dtype, device=device)
        weakref.finalize(buffer, release, buffer.nbytes)
        count["now"] += buffer.nbytes
        count["most"] = max(count["most"], count["now"])
        return buffer

    monkeypatch.setattr(entries_module, "empty_buffer", counted)
    monkeypatch.setattr(matrices_module, "empty_buffer", counted)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_entries", [200, 1000, 3000])
def test_no_more_than_the_budget_is_ever_held(kind, dtype, num_entries, buffers):
    grads = {"a": random(4, num_entries, dtype=dtype), "b": random(4, 300, dtype=dtype)}
    projector = KINDS[kind](100, memory_budget=BUDGET)

    with LargestTensor() as largest:
        for model_id in (0, 1):
            projector.project(grads, model_id)

    assert buffers["most"] <= BUDGET
    assert largest.nbytes <= BUDGET
    assert projector._map.matrices.peak_bytes <= BUDGET
    assert buffers["most"] <= projector._map.matrices.peak_bytes


def test_a_matrix_that_fits_is_drawn_once_per_model(kind):
    grads = {"a": random(4, 500), "b": random(4, 70)}
    projector = KINDS[kind](64)

    for _ in range(3):
        projector.project(grads, 0)
    assert projector._map.matrices.rows_drawn == 570
    projector.project(grads, 1)
    assert projector._map.matrices.rows_drawn == 2 * 570


def test_of_a_matrix_that_does_not_fit_only_the_rest_is_drawn_again(kind):
    grads = {"a": random(4, 3000, dtype=torch.float32)}
    projector = KINDS[kind](100, memory_budget=BUDGET)

    projector.project(grads, 0)
    assert projector._map.matrices.rows_drawn == 3000
    projector.project(grads, 0)
    again = projector._map.matrices.rows_drawn - 3000
    kept = 3000 - again
    assert BUDGET / 4 / 512 < kept < BUDGET / 400  # a row takes 400 or, padded, 512 bytes
    assert 0 < again < 3000


def test_freed_memory_is_gone(kind, buffers):
    projector = KINDS[kind](100, memory_budget=BUDGET)
    projector.project(gradients(), 0)
    assert buffers["now"] > 0

    projector.free_memory()
    assert buffers["now"] == 0
    assert projector._map.matrices.held_bytes == 0


def test_another_model_takes_the_place_of_the_last_one(kind, buffers):
    projector = KINDS[kind](100)
    projector.project(gradients(), 0)
    held = buffers["now"]
    projector.project(gradients(), 1)

    assert buffers["now"] == held


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [300_000, 600_000, 5_000_000, 1 << 30])
def test_features_do_not_depend_on_the_memory_budget(kind, dtype, budget):
    """Beyond the rounding of a product that is summed in other pieces."""
    grads = {"a": random(5, 2000, dtype=dtype), "b": random(5, 70, dtype=dtype)}
    whole = KINDS[kind](100, memory_budget=1 << 30).project(grads, 0)
    projector = KINDS[kind](100, memory_budget=budget)

    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for _ in range(2):  # drawn, and kept
        torch.testing.assert_close(projector.project(grads, 0), whole, rtol=tolerance, atol=50 * tolerance)


def test_two_models_in_turn_keep_their_matrices_apart(kind):
    grads = gradients()
    projector = KINDS[kind](16)
    alone = [KINDS[kind](16).project(grads, model_id) for model_id in (0, 1)]
    accumulators = [projector.accumulator(4, model_id=i, parameters=SHAPES) for i in (0, 1)]
    for name, grad in grads.items():
        for accumulator in accumulators:
            accumulator.add(DenseBlock(name, grad))

    for accumulator, expected in zip(accumulators, alone, strict=True):
        assert torch.equal(accumulator.features(), expected)


# ---- settings and errors


def test_fingerprints_tell_kind_seed_size_and_scale(kind):
    fingerprint = KINDS[kind](8, seed=3).fingerprint()

    assert fingerprint == {
        "kind": f"dense_{kind}",
        "proj_dim": 8,
        "seed": 3,
        "version": 1,
        "scaled": True,
    }


def test_a_seed_may_be_any_integer(kind):
    assert KINDS[kind](4, seed=np.int64(3)).fingerprint() == KINDS[kind](4, seed=3).fingerprint()
    grads = random(1, 50)
    features = [KINDS[kind](64, seed=seed).project(grads, 0) for seed in (-1, 2**64 - 1, 2**80, 0)]

    assert len({tuple(row.flatten().tolist()) for row in features}) == 4


@pytest.mark.parametrize("seed", [1.5, "0", None, True])
def test_a_seed_that_is_no_integer_is_refused(kind, seed):
    with pytest.raises(InvalidInputError, match="seed must be an integer"):
        KINDS[kind](4, seed=seed)


@pytest.mark.parametrize("proj_dim", [0, -1, 2.0, True])
def test_a_proj_dim_that_is_no_positive_integer_is_refused(kind, proj_dim):
    with pytest.raises(InvalidInputError, match="proj_dim must be an integer of at least 1"):
        KINDS[kind](proj_dim)


def test_a_dtype_that_is_not_floating_point_is_refused(kind):
    with pytest.raises(
        InvalidInputError, match=r"dtype must be a floating-point dtype or None, got torch\.int32"
    ):
        KINDS[kind](4, dtype=torch.int32)


def test_a_memory_budget_too_small_for_one_row_is_refused_with_the_least_that_works(kind):
    with pytest.raises(InvalidInputError, match="Give at least") as caught:
        KINDS[kind](1000, memory_budget=1000)
    least = int(str(caught.value).split("at least ")[1].split()[0])

    grads = random(2, 40)
    tight = KINDS[kind](1000, memory_budget=least).project(grads, 0)
    torch.testing.assert_close(tight, KINDS[kind](1000).project(grads, 0), rtol=1e-12, atol=1e-12)
    with pytest.raises(InvalidInputError, match="memory_budget"):
        KINDS[kind](1000, memory_budget=least - 1)


def test_gradients_that_disagree_on_the_batch_size_are_refused(kind):
    with pytest.raises(InvalidInputError, match="agree on the number of samples"):
        KINDS[kind](4).project({"a": random(2, 3), "b": random(3, 3)}, 0)


@pytest.mark.parametrize("grads", [{}, {"a": torch.tensor(1.0)}])
def test_gradients_without_a_sample_axis_are_refused(kind, grads):
    with pytest.raises(InvalidInputError, match="on axis 0"):
        KINDS[kind](4).project(grads, 0)


def test_a_gradient_tensor_that_is_not_a_matrix_is_refused(kind):
    with pytest.raises(InvalidInputError, match=r"must be \(B, P\), got shape \(2, 3, 4\)"):
        KINDS[kind](4).project(random(2, 3, 4), 0)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (DenseBlock("other", torch.zeros(3, 5)), "'other', which is not among the 4 parameters"),
        (DenseBlock("bias", torch.zeros(3, 6)), r"has shape \(6,\) per sample, expected \(5,\)"),
        (
            DenseBlock("conv", torch.zeros(3, 2, 2, 3)),
            r"has shape \(2, 2, 3\) per sample, expected \(3, 2, 2\)",
        ),
        (DenseBlock("bias", torch.zeros(4, 5)), "covers rows 0 to 4 of a batch of 3"),
        (DenseBlock("bias", torch.zeros(2, 5), start=2), "covers rows 2 to 4 of a batch of 3"),
        (DenseBlock("bias", torch.zeros(2, 5), start=-1), "covers rows -1 to 1 of a batch of 3"),
        (DenseBlock("bias", torch.zeros(3, 5, dtype=torch.int64)), r"dtype torch\.int64, expected floating"),
        (FactoredBlock("conv", torch.zeros(3, 1, 4), torch.zeros(3, 1, 2)), r"has shape \(2, 4\) per sample"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(kind, block, message):
    accumulator = KINDS[kind](4).accumulator(3, model_id=0, parameters=SHAPES)

    with pytest.raises(InvalidInputError, match=message):
        accumulator.add(block)


def test_factors_of_a_convolution_count_as_its_flattened_gradient(kind):
    inputs, output_grads = random(2, 5, 4), random(2, 5, 3, seed=1)
    accumulator = KINDS[kind](8).accumulator(2, model_id=0, parameters=SHAPES)
    accumulator.add(FactoredBlock("conv", inputs, output_grads))

    product = torch.einsum("bto,bti->boi", output_grads, inputs).reshape(2, 3, 2, 2)
    expected = KINDS[kind](8).project({"conv": product}, 0)
    torch.testing.assert_close(accumulator.features(), expected, rtol=1e-12, atol=1e-12)


def test_factors_of_a_transposed_parameter_are_refused(kind):
    accumulator = KINDS[kind](4).accumulator(3, model_id=0, parameters={"w": (4, 2)})

    with pytest.raises(InvalidInputError, match=r"has shape \(2, 4\) per sample, expected \(4, 2\)"):
        accumulator.add(FactoredBlock("w", torch.zeros(3, 1, 4), torch.zeros(3, 1, 2)))


def test_gradients_of_no_entries_are_projected_to_zero(kind):
    assert torch.equal(KINDS[kind](4).project(torch.zeros(3, 0), 0), torch.zeros(3, 4))


@pytest.mark.cuda
def test_features_are_the_same_on_cuda_up_to_rounding(kind):
    grads = {"a": random(8, 3000), "b": random(8, 50)}
    host = KINDS[kind](130).project(grads, 0)
    device = KINDS[kind](130, device="cuda").project(grads, 0)

    torch.testing.assert_close(device.cpu(), host, rtol=1e-12, atol=1e-11)


@pytest.mark.cuda
def test_a_projector_without_a_device_follows_the_gradients(kind):
    projector = KINDS[kind](8)

    for device in ("cpu", "cuda", "cpu"):
        assert projector.project(random(2, 30).to(device), 0).device.type == device
