"""The original TRAK's names: its constructors and its scale, one map, no repeated columns."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import trak.projectors as original

import trak_lite.projectors as ours
from trak_lite.errors import InvalidInputError
from trak_lite.projectors import (
    ChunkedCudaProjector,
    CudaProjector,
    GaussianProjector,
    ProjectionType,
    RademacherProjector,
)
from trak_lite.types import DenseBlock

P, K = 30, 12
NATIVE = {"rademacher": RademacherProjector, "normal": GaussianProjector}


def make(
    name: str, proj_type: str = "rademacher", *, grad_dim: int = P, proj_dim: int = K, seed: int = 0, **kwargs
):
    arguments = dict(grad_dim=grad_dim, proj_dim=proj_dim, seed=seed, proj_type=proj_type, device="cpu")
    if name == "CudaProjector":
        arguments["max_batch_size"] = 32
    return getattr(ours, name)(**arguments, **kwargs)


DENSE = ["BasicProjector", "BasicSingleBlockProjector", "CudaProjector"]


def gradients(num_samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 5), "b": (), "c": (9,)}
    return {name: torch.randn(num_samples, *shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", [*DENSE, "ChunkedCudaProjector", "NoOpProjector", "AbstractProjector"])
def test_every_argument_of_the_original_is_accepted_in_its_place(name):
    theirs = [
        parameter.name
        for parameter in inspect.signature(getattr(original, name).__init__).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    mine = list(inspect.signature(getattr(ours, name).__init__).parameters)

    assert mine[: len(theirs)] == theirs


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("proj_type", ["rademacher", "normal"])
def test_features_are_those_of_the_native_projector_without_its_scale(name, proj_type):
    grads = gradients()
    native = NATIVE[proj_type](K, seed=3).project(grads, 2) * math.sqrt(K)

    torch.testing.assert_close(make(name, proj_type, seed=3).project(grads, 2), native)
    torch.testing.assert_close(make(name, ProjectionType(proj_type), seed=3).project(grads, 2), native)


def test_all_names_share_one_fingerprint_that_is_not_the_native_ones():
    fingerprints = [make(name).fingerprint() for name in DENSE]

    assert fingerprints[0] == fingerprints[1] == fingerprints[2]
    assert fingerprints[0] != RademacherProjector(K).fingerprint()
    assert fingerprints[0] != make("BasicProjector", "normal").fingerprint()


def test_columns_of_one_model_are_not_columns_of_the_next():
    """In the original, block 100 of model 0 is block 0 of model 1, for K > 10,000."""
    identity = torch.eye(8)
    rows = torch.cat(
        [make("BasicProjector", grad_dim=8, proj_dim=10_100).project(identity, i) for i in (0, 1)]
    )
    first, second = rows[:8], rows[8:]

    agreement = (first[:, 10_000:] * second[:, :100]).mean()
    assert abs(float(agreement)) < 5 / math.sqrt(800)


def test_block_one_of_seed_zero_is_not_block_zero_of_seed_1000():
    identity = torch.eye(8)
    zero, thousand = (
        make("BasicProjector", grad_dim=8, proj_dim=200, seed=seed).project(identity, 0) for seed in (0, 1000)
    )

    assert abs(float((zero[:, 100:] * thousand[:, :100]).mean())) < 5 / math.sqrt(800)


@pytest.mark.parametrize("block_size", [1, 7, 100])
def test_the_block_size_does_not_change_the_features(block_size):
    grads = gradients()

    assert torch.equal(
        make("BasicProjector", block_size=block_size).project(grads, 0),
        make("BasicProjector").project(grads, 0),
    )


def test_float64_gradients_are_cast_to_the_dtype_that_was_asked_for():
    grads = {name: grad.double() for name, grad in gradients().items()}

    assert make("BasicProjector").project(grads, 0).dtype == torch.float32
    assert make("BasicProjector", dtype=torch.float64).project(grads, 0).dtype == torch.float64
    assert make("BasicProjector", dtype=torch.float16).project(grads, 0).dtype == torch.float16


def test_arguments_of_other_projectors_have_no_effect():
    grads = gradients()

    assert torch.equal(
        make("BasicProjector", max_batch_size=8).project(grads, 0), make("BasicProjector").project(grads, 0)
    )


@pytest.mark.parametrize("name", DENSE)
def test_gradients_of_another_size_are_refused(name):
    with pytest.raises(InvalidInputError, match="29 entries per sample, but the projector has grad_dim=30"):
        make(name).project(torch.zeros(2, 29), 0)


def test_a_grad_dim_of_zero_accepts_any_gradient():
    assert make("BasicProjector", grad_dim=0).project(torch.zeros(2, 29), 0).shape == (2, K)


@pytest.mark.parametrize("name", DENSE)
def test_an_unknown_type_of_projection_is_refused_with_the_nearest_known(name):
    with pytest.raises(InvalidInputError, match="Did you mean 'rademacher'"):
        make(name, "rademacherr")


def test_sizes_that_are_no_positive_integers_are_refused():
    with pytest.raises(InvalidInputError, match="block_size must be"):
        make("BasicProjector", block_size=0)
    with pytest.raises(InvalidInputError, match="max_batch_size must be"):
        CudaProjector(P, K, 0, "normal", "cpu", 0)


# ---- chunks


def chunked(seeds: tuple[int, int] = (0, 1), sizes: tuple[int, int] = (21, 9)) -> ChunkedCudaProjector:
    projectors = [
        make("CudaProjector", grad_dim=size, seed=seed) for seed, size in zip(seeds, sizes, strict=True)
    ]
    return ChunkedCudaProjector(projectors, max(sizes), list(sizes), 8, torch.device("cpu"), torch.float32)


def test_chunks_add_up_to_the_sum_of_their_projectors():
    grads = gradients()
    first = make("CudaProjector", grad_dim=21, seed=0).project({"a": grads["a"], "b": grads["b"]}, 5)
    second = make("CudaProjector", grad_dim=9, seed=1).project({"c": grads["c"]}, 5)

    torch.testing.assert_close(chunked().project(grads, 5), first + second)


def test_chunks_with_one_seed_are_the_whole_projection():
    grads = gradients()

    torch.testing.assert_close(
        chunked((4, 4)).project(grads, 0), make("BasicProjector", seed=4).project(grads, 0)
    )


def test_chunks_of_a_tensor_are_independent_even_with_one_seed():
    identity = torch.eye(40)
    projectors = [make("CudaProjector", grad_dim=20, proj_dim=400, seed=0) for _ in range(2)]
    rows = ChunkedCudaProjector(projectors, 20, [20, 20], 8, "cpu", torch.float32).project(identity, 0)

    assert abs(float((rows[:20] * rows[20:]).mean())) < 5 / math.sqrt(20 * 400)


def test_chunks_take_blocks_in_any_order():
    grads = gradients()
    projector = chunked()
    shapes = {name: tuple(grad.shape[1:]) for name, grad in grads.items()}
    accumulator = projector.accumulator(4, model_id=0, parameters=shapes)
    for name in ("c", "b", "a"):
        accumulator.add(DenseBlock(name, grads[name][2:], start=2))
        accumulator.add(DenseBlock(name, grads[name][:2]))

    torch.testing.assert_close(accumulator.features(), projector.project(grads, 0))


def test_chunks_give_features_of_the_dtype_that_was_asked_for():
    projectors = [make("CudaProjector")]
    projector = ChunkedCudaProjector(projectors, P, [P], 8, None, torch.float64)

    assert projector.project(gradients(), 0).dtype == torch.float64


def test_chunked_fingerprints_tell_the_chunks_apart():
    assert chunked((0, 1)).fingerprint() == chunked((0, 1)).fingerprint()
    assert chunked((0, 1)).fingerprint() != chunked((0, 2)).fingerprint()


def test_chunks_free_their_projectors_memory():
    projector = chunked()
    projector.project(gradients(), 0)
    projector.free_memory()

    assert [part._map.matrices.held_bytes for part in projector.projector_per_chunk] == [0, 0]


def test_chunks_that_end_inside_a_parameter_are_refused():
    with pytest.raises(InvalidInputError, match=r"30 entries do not divide into chunks of \[15, 15\]"):
        chunked(sizes=(15, 15)).project(gradients(), 0)


def test_parameters_beyond_the_last_chunk_are_refused():
    with pytest.raises(InvalidInputError, match="do not divide into chunks"):
        chunked(sizes=(20, 1)).project(gradients(), 0)


def test_a_tensor_of_another_width_than_the_chunks_is_refused():
    with pytest.raises(InvalidInputError, match="29 entries per sample, the chunks 30"):
        chunked().project(torch.zeros(2, 29), 0)


def test_a_block_in_no_chunk_is_refused():
    accumulator = chunked().accumulator(2, model_id=0, parameters={"a": (21,), "b": (9,)})

    with pytest.raises(InvalidInputError, match="'z', which is in none of the chunks"):
        accumulator.add(DenseBlock("z", torch.zeros(2, 3)))


@pytest.mark.parametrize("projectors", [[], [make("CudaProjector"), make("CudaProjector", proj_dim=13)]])
def test_chunks_that_do_not_match_their_projectors_are_refused(projectors):
    with pytest.raises(InvalidInputError, match="Expected one projector per chunk, at least one chunk"):
        ChunkedCudaProjector(projectors, P, [P] * len(projectors), 8, "cpu", torch.float32)


def test_names_and_members_of_the_original_are_all_here():
    assert {kind.value for kind in original.ProjectionType} == {kind.value for kind in ProjectionType}
    theirs = {name for name in vars(original) if name.endswith("Projector")}
    assert theirs == {
        "AbstractProjector", "BasicProjector", "BasicSingleBlockProjector",
        "ChunkedCudaProjector", "CudaProjector", "NoOpProjector",
    }  # fmt: skip
    for name in theirs:
        assert name in ours.__all__
