"""The original TRAK's names: its constructors, its scale, no repeated columns; and projectors written for it."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
import trak.projectors as original
from projection_cases import dense_blocks, random_gradients

import trak_lite.projectors as ours
from trak_lite.errors import InvalidInputError
from trak_lite.projectors import (
    AbstractProjector,
    ChunkedCudaProjector,
    GaussianProjector,
    ProjectionType,
    RademacherProjector,
)
from trak_lite.types import DenseBlock

P, K = 30, 12
NATIVE = {"rademacher": RademacherProjector, "normal": GaussianProjector}
DENSE = ["BasicProjector", "BasicSingleBlockProjector", "CudaProjector"]
SHAPES = {"a": (4, 5), "b": (), "c": (9,)}
gradients = functools.partial(random_gradients, SHAPES, 4, dtype=torch.float32)


def make(name: str, proj_type: str = "rademacher", *, grad_dim=P, proj_dim=K, seed=0, **kwargs):
    arguments = {
        "grad_dim": grad_dim,
        "proj_dim": proj_dim,
        "seed": seed,
        "proj_type": proj_type,
        "device": "cpu",
    }
    if name == "CudaProjector":
        arguments["max_batch_size"] = 32
    return getattr(ours, name)(**{**arguments, **kwargs})


def test_names_and_members_of_the_original_are_all_here():
    assert {kind.value for kind in original.ProjectionType} == {kind.value for kind in ProjectionType}
    theirs = {name for name in vars(original) if name.endswith("Projector")}
    assert theirs == {*DENSE, "AbstractProjector", "ChunkedCudaProjector", "NoOpProjector"}
    for name in theirs:
        assert name in ours.__all__
        arguments = [
            parameter.name
            for parameter in inspect.signature(getattr(original, name).__init__).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        assert list(inspect.signature(getattr(ours, name).__init__).parameters)[: len(arguments)] == arguments


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("proj_type", ["rademacher", "normal"])
def test_features_are_those_of_the_native_projector_without_its_scale(name, proj_type):
    grads = gradients()
    native = NATIVE[proj_type](K, seed=3).project(grads, 2) * math.sqrt(K)

    for kind in (proj_type, ProjectionType(proj_type)):
        torch.testing.assert_close(make(name, kind, seed=3).project(grads, 2), native)
    wide = {key: grad.double() for key, grad in grads.items()}
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert make(name, dtype=dtype).project(wide, 0).dtype == dtype
    assert make(name).project(wide, 0).dtype == torch.float32
    assert make(name, grad_dim=0).project(torch.zeros(2, 29), 0).shape == (2, K)


@pytest.mark.parametrize("options", [{"block_size": 1}, {"block_size": 7}, {"max_batch_size": 8}], ids=str)
def test_arguments_without_effect_do_not_change_the_features(options):
    expected = make("BasicProjector").project(gradients(), 0)
    assert torch.equal(make("BasicProjector", **options).project(gradients(), 0), expected)


# ---- chunks


def chunked(seeds=(0, 1), sizes=(21, 9), dtype: torch.dtype = torch.float32) -> ChunkedCudaProjector:
    parts = [make("CudaProjector", grad_dim=n, seed=seed) for seed, n in zip(seeds, sizes, strict=True)]
    return ChunkedCudaProjector(parts, max(sizes), list(sizes), 8, torch.device("cpu"), dtype)


def test_chunks_add_up_to_the_sum_of_their_projectors_in_any_order():
    grads = gradients()
    first = make("CudaProjector", grad_dim=21, seed=0).project({"a": grads["a"], "b": grads["b"]}, 5)
    second = make("CudaProjector", grad_dim=9, seed=1).project({"c": grads["c"]}, 5)
    accumulator = chunked().accumulator(4, model_id=5, parameters=SHAPES)
    for name in ("c", "b", "a"):
        accumulator.add(DenseBlock(name, grads[name][2:], start=2))
        accumulator.add(DenseBlock(name, grads[name][:2]))

    for features in (chunked().project(grads, 5), accumulator.features()):
        torch.testing.assert_close(features, first + second)
    assert chunked(dtype=torch.float64).project(grads, 0).dtype == torch.float64


def test_chunks_with_one_seed_are_the_whole_projection():
    whole = make("BasicProjector", seed=4).project(gradients(), 0)
    torch.testing.assert_close(chunked((4, 4)).project(gradients(), 0), whole)


def test_chunks_of_a_tensor_are_independent_even_with_one_seed():
    projectors = [make("CudaProjector", grad_dim=20, proj_dim=400, seed=0) for _ in range(2)]
    rows = ChunkedCudaProjector(projectors, 20, [20, 20], 8, "cpu", torch.float32).project(torch.eye(40), 0)
    assert abs(float((rows[:20] * rows[20:]).mean())) < 5 / math.sqrt(20 * 400)


def test_fingerprints_and_memory_are_those_of_all_chunks(monkeypatch):
    assert chunked((0, 1)).fingerprint() == chunked((0, 1)).fingerprint()
    assert chunked((0, 1)).fingerprint() != chunked((0, 2)).fingerprint()
    projector, freed = chunked(), []
    for part in projector.projector_per_chunk:
        monkeypatch.setattr(part, "free_memory", lambda part=part: freed.append(part))
    projector.free_memory()
    assert freed == list(projector.projector_per_chunk)


# ---- a projector written for the original, with ``__init__`` and ``project`` alone


class Recorder(AbstractProjector):
    """Returns the gradients side by side and remembers what it was given."""

    def __init__(self):
        super().__init__(P, P, 0, "na", "cpu")

    def project(self, grads, model_id):
        self.seen = (grads, model_id)
        return torch.cat([grad.reshape(grad.shape[0], grad[0].numel()) for grad in grads.values()], dim=1)


def recorded(blocks) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    projector = Recorder()
    accumulator = projector.accumulator(4, model_id=7, parameters=SHAPES)
    for block in blocks:
        accumulator.add(block)
    features = accumulator.features()
    assert projector.seen[1] == 7
    assert list(projector.seen[0]) == list(SHAPES)
    return projector.seen[0], features


def test_blocks_arrive_whole_and_in_the_order_of_the_model_without_a_graph_or_a_copy():
    grads = gradients()
    pieces = [
        DenseBlock(name, grads[name][start:stop], start)
        for name in ("c", "a", "b")
        for start, stop in ((3, 4), (0, 1), (1, 3))
    ]
    seen, features = recorded(pieces)
    for name, grad in seen.items():
        assert torch.equal(grad, grads[name])
    assert torch.equal(features, torch.cat([grads["a"].flatten(1), grads["b"][:, None], grads["c"]], 1))

    seen, features = recorded(dense_blocks({name: grad.requires_grad_() for name, grad in grads.items()}))
    assert seen["a"].data_ptr() == grads["a"].data_ptr()
    assert not features.requires_grad


class Nothing(AbstractProjector):
    def __init__(self):
        super().__init__(0, 1, 0, "na", "cpu")


# ---- errors


def added(projector: AbstractProjector, block: DenseBlock) -> None:
    projector.accumulator(2, model_id=0, parameters={"a": (21,), "b": (9,)}).add(block)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda name=name: make(name).project(torch.zeros(2, 29), 0), "29 entries per sample, but .* grad_dim=30")
          for name in DENSE),
        *((lambda name=name: make(name, "rademacherr"), "Did you mean 'rademacher'") for name in DENSE),
        (lambda: make("BasicProjector", block_size=0), "block_size must be"),
        (lambda: make("CudaProjector", max_batch_size=0), "max_batch_size must be"),
        (lambda: chunked(sizes=(15, 15)).project(gradients(), 0), r"do not divide into chunks of \[15, 15\]"),
        (lambda: chunked(sizes=(20, 1)).project(gradients(), 0), "do not divide into chunks"),
        (lambda: chunked().project(torch.zeros(2, 29), 0), "29 entries per sample, the chunks 30"),
        (lambda: added(chunked(), DenseBlock("z", torch.zeros(2, 3))), "'z', which is not among the 2 parameters"),
        (lambda: ChunkedCudaProjector([], P, [], 8, "cpu", torch.float32), "at least one chunk"),
        (lambda: ChunkedCudaProjector([make("CudaProjector"), make("CudaProjector", proj_dim=13)], P, [P, P], 8, "cpu",
                                      torch.float32), "Expected one projector per chunk"),
        (lambda: added(Recorder(), DenseBlock("b", torch.zeros(2, 5))), r"has shape \(5,\) per .* expected \(9,\)"),
        (lambda: Nothing().project(gradients(), 0), "defines neither accumulator nor project"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()
