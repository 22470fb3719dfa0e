"""The original TRAK's names: its constructors and its scale, chunks of parameters.

tests/traker holds names, repeated columns and projectors of one's own against the original; the laws have others.
"""

import functools
import inspect
import math

import pytest
import torch
import trak.projectors as original
from projection_cases import random_gradients

import trak_lite.projectors as ours
from trak_lite.errors import InvalidInputError
from trak_lite.types import DenseBlock

P, K = 30, 12
NATIVE = {"rademacher": ours.RademacherProjector, "normal": ours.GaussianProjector}
DENSE = ["BasicProjector", "BasicSingleBlockProjector", "CudaProjector"]
SHAPES = {"a": (4, 5), "b": (), "c": (9,)}
gradients = functools.partial(random_gradients, SHAPES, 4, dtype=torch.float32)


def make(name, proj_type="rademacher", *, grad_dim=P, proj_dim=K, seed=0, **kwargs):
    arguments = {"grad_dim": grad_dim, "proj_dim": proj_dim, "seed": seed}
    arguments |= {"proj_type": proj_type, "device": "cpu"}
    if name == "CudaProjector":
        arguments["max_batch_size"] = 32
    return getattr(ours, name)(**{**arguments, **kwargs})


def test_constructors_have_the_arguments_of_the_original_in_its_order():
    for name in (*DENSE, "AbstractProjector", "ChunkedCudaProjector", "NoOpProjector"):
        makers = (getattr(room, name).__init__ for room in (original, ours))
        theirs, own = (inspect.signature(maker).parameters for maker in makers)
        expected = [key for key, value in theirs.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
        assert list(own)[: len(expected)] == expected
    assert {kind.value for kind in original.ProjectionType} == {kind.value for kind in ours.ProjectionType}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("proj_type", NATIVE)
def test_features_are_those_of_the_native_projector_without_its_scale(name, proj_type):
    """Also of another dtype, and with arguments that have no effect."""
    grads = gradients()
    wide = {key: grad.double() for key, grad in grads.items()}
    native = NATIVE[proj_type](K, seed=3).project(grads, 2) * math.sqrt(K)
    for kind in (proj_type, ours.ProjectionType(proj_type)):
        for options in ({}, {"block_size": 1}, {"block_size": 7}, {"max_batch_size": 8}):
            made = make(name, kind, seed=3, **options)
            torch.testing.assert_close(made.project(grads, 2), native)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert make(name, dtype=dtype).project(wide, 0).dtype == dtype
    assert make(name).project(wide, 0).dtype == torch.float32
    assert make(name, grad_dim=0).project(torch.zeros(2, 29), 0).shape == (2, K)


# ---- chunks
def chunked(seeds=(0, 1), sizes=(21, 9), dtype=torch.float32):
    parts = [make("CudaProjector", grad_dim=n, seed=seed) for seed, n in zip(seeds, sizes, strict=True)]
    return ours.ChunkedCudaProjector(parts, max(sizes), list(sizes), 8, torch.device("cpu"), dtype)


def test_chunks_are_the_sum_of_their_projectors(monkeypatch):
    grads = gradients()
    first = make("CudaProjector", grad_dim=21, seed=0).project({"a": grads["a"], "b": grads["b"]}, 5)
    second = make("CudaProjector", grad_dim=9, seed=1).project({"c": grads["c"]}, 5)
    projector, freed = chunked(), []
    torch.testing.assert_close(projector.project(grads, 5), first + second)
    assert chunked(dtype=torch.float64).project(grads, 0).dtype == torch.float64
    assert projector.fingerprint() == chunked((0, 1)).fingerprint() != chunked((0, 2)).fingerprint()
    for part in projector.projector_per_chunk:
        monkeypatch.setattr(part, "free_memory", lambda part=part: freed.append(part))
    projector.free_memory()
    assert freed == list(projector.projector_per_chunk)


def test_chunks_of_a_tensor_are_independent_even_with_one_seed():
    projectors = [make("CudaProjector", grad_dim=20, proj_dim=400, seed=0) for _ in range(2)]
    rows = ours.ChunkedCudaProjector(projectors, 20, [20, 20], 8, "cpu", torch.float32).project(
        torch.eye(40), 0
    )
    assert abs(float((rows[:20] * rows[20:]).mean())) < 5 / math.sqrt(20 * 400)


class Seen(ours.AbstractProjector):
    """Written for the original, with ``__init__`` and ``project`` alone."""

    def __init__(self):
        super().__init__(P, 1, 0, "na", "cpu")

    def project(self, grads, model_id):
        self.grads = grads
        return grads["c"].sum(1, keepdim=True)


def test_a_projector_of_ones_own_gets_whole_gradients_without_a_copy_or_a_graph():
    projector, grads = Seen(), {name: grad.requires_grad_() for name, grad in gradients().items()}
    accumulator = projector.accumulator(4, model_id=0, parameters=SHAPES)
    for name in reversed(grads):
        accumulator.add(DenseBlock(name, grads[name]))
    assert not accumulator.features().requires_grad
    found, given = ([(name, g.data_ptr()) for name, g in some.items()] for some in (projector.grads, grads))
    assert found == given


class Nothing(ours.AbstractProjector):
    def __init__(self):
        super().__init__(0, 1, 0, "na", "cpu")


# ---- errors
def added(projector, block):
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
        (lambda: ours.ChunkedCudaProjector([], P, [], 8, "cpu", torch.float32), "at least one chunk"),
        (lambda: ours.ChunkedCudaProjector([make("CudaProjector", proj_dim=k) for k in (K, 13)], P, [P, P], 8, "cpu",
                                           torch.float32), "Expected one projector per chunk"),
        (lambda: added(Nothing(), DenseBlock("b", torch.zeros(2, 5))), r"has shape \(5,\) per .* expected \(9,\)"),
        (lambda: Nothing().project(gradients(), 0), "defines neither accumulator nor project"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()
