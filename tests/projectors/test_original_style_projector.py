"""A projector written for the original TRAK, ``__init__`` and ``project`` alone, works on streamed blocks."""

from __future__ import annotations

import functools
import zlib

import pytest
import torch
from projection_cases import random_gradients

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import AbstractProjector
from trak_lite.testing.projectors import RandomProjectorTests
from trak_lite.types import DenseBlock, FactoredBlock

SHAPES = {"a": (2, 3), "b": (), "c": (4,)}
gradients = functools.partial(random_gradients, SHAPES, 5, dtype=torch.float32)


class Recorder(AbstractProjector):
    """Returns the gradients side by side and remembers what it was given."""

    def __init__(self, grad_dim, proj_dim, seed, proj_type, device):
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.seen = None

    def project(self, grads, model_id):
        self.seen = (grads, model_id)
        return torch.cat([grad.reshape(grad.shape[0], grad[0].numel()) for grad in grads.values()], dim=1)


def recorder() -> Recorder:
    return Recorder(11, 11, 0, "na", "cpu")


def check_seen(projector: Recorder, expected: dict[str, torch.Tensor]) -> None:
    grads, model_id = projector.seen
    assert model_id == 7
    assert list(grads) == list(expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name])


def test_blocks_in_any_order_and_chunk_arrive_whole_and_in_model_order():
    grads, projector = gradients(), recorder()
    accumulator = projector.accumulator(5, model_id=7, parameters=SHAPES)
    for name in ("c", "a", "b"):
        for start, stop in ((3, 5), (0, 1), (1, 3)):
            accumulator.add(DenseBlock(name, grads[name][start:stop], start))
    features = accumulator.features()

    check_seen(projector, grads)
    assert torch.equal(features, torch.cat([grads["a"].flatten(1), grads["b"][:, None], grads["c"]], dim=1))


def test_whole_blocks_arrive_without_a_copy():
    grads, projector = gradients(), recorder()
    accumulator = projector.accumulator(5, model_id=7, parameters=SHAPES)
    for name, grad in grads.items():
        accumulator.add(DenseBlock(name, grad))
    accumulator.features()

    check_seen(projector, grads)
    assert projector.seen[0]["a"].data_ptr() == grads["a"].data_ptr()


def test_gradients_arrive_without_their_graph():
    projector = recorder()
    accumulator = projector.accumulator(5, model_id=7, parameters={"c": (4,)})
    accumulator.add(DenseBlock("c", gradients()["c"].requires_grad_()))

    assert not accumulator.features().requires_grad


def test_a_parameter_that_never_comes_arrives_as_zeros():
    grads, projector = gradients(), recorder()
    accumulator = projector.accumulator(5, model_id=7, parameters=SHAPES)
    accumulator.add(DenseBlock("a", grads["a"].double()))
    accumulator.features()

    zeros = {"b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros(5, 4, dtype=torch.float64)}
    check_seen(projector, {"a": grads["a"].double(), **zeros})


def test_factored_blocks_arrive_as_dense_gradients():
    projector = recorder()
    inputs, output_grads = torch.randn(5, 2, 3), torch.randn(5, 2, 2)
    accumulator = projector.accumulator(5, model_id=7, parameters={"a": (2, 3)})
    accumulator.add(FactoredBlock("a", inputs, output_grads))
    accumulator.features()

    expected = torch.einsum("bto,bti->boi", output_grads, inputs)
    torch.testing.assert_close(projector.seen[0]["a"], expected)


def test_a_block_of_another_shape_is_refused():
    accumulator = recorder().accumulator(5, model_id=7, parameters=SHAPES)

    with pytest.raises(InvalidInputError, match=r"has shape \(5,\) per sample, expected \(4,\)"):
        accumulator.add(DenseBlock("c", torch.zeros(5, 5)))


class TestOriginalStyleProjector(RandomProjectorTests):
    """A projector with one generator-drawn matrix per name passes the whole kit."""

    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        class ByName(AbstractProjector):
            def __init__(self, grad_dim, proj_dim, seed, proj_type, device):
                super().__init__(grad_dim, proj_dim, seed, proj_type, device)

            def project(self, grads, model_id):
                total = 0
                for name, grad in grads.items():
                    rows = grad.flatten(1) if grad.dim() > 1 else grad[:, None]
                    key = zlib.crc32(f"{self.seed}/{model_id}/{name}".encode())
                    generator = torch.Generator().manual_seed(key)
                    matrix = torch.randn(rows.shape[1], self.proj_dim, generator=generator)
                    total = total + rows.double() @ matrix.double()
                return total / self.proj_dim**0.5

        return ByName(0, proj_dim, seed, "normal", "cpu")
