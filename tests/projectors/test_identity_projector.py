"""The identity: the gradients themselves, in model order."""

from __future__ import annotations

import functools

import pytest
import torch
from projection_cases import random_gradients

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import NoOpProjector
from trak_lite.types import DenseBlock, FeatureLayout

pytestmark = pytest.mark.quick

SHAPES = {"a": (2, 3), "b": (), "c": (4,)}
gradients = functools.partial(random_gradients, SHAPES, 5, dtype=torch.float32)


def test_columns_are_the_gradients_in_model_order_whatever_order_they_come_in():
    grads = gradients()
    accumulator = NoOpProjector().accumulator(5, model_id=0, parameters=SHAPES)
    for name in ("c", "a", "b"):
        accumulator.add(DenseBlock(name, grads[name]))

    expected = torch.cat([grads["a"].flatten(1), grads["b"][:, None], grads["c"]], dim=1)
    assert torch.equal(accumulator.features(), expected)


def test_the_width_is_the_number_of_gradient_entries_whatever_proj_dim_says():
    projector = NoOpProjector(grad_dim=3, proj_dim=99, seed=1, proj_type="na", block_size=3)

    assert projector.layout(SHAPES) == FeatureLayout.joint(11)
    assert projector.project(gradients(), 0).shape == (5, 11)


def test_a_tensor_comes_back_unchanged():
    grads = torch.arange(6.0).reshape(2, 3)

    assert torch.equal(NoOpProjector(0, 0).project(grads, 4), grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_the_gradients_is_kept(dtype):
    grads = {name: grad.to(dtype) for name, grad in gradients().items()}

    assert NoOpProjector().project(grads, 0).dtype == dtype


def test_mixed_dtypes_widen_in_either_order():
    grads = gradients()
    grads["b"] = grads["b"].double()
    for order in (["a", "b", "c"], ["b", "c", "a"]):
        accumulator = NoOpProjector().accumulator(5, model_id=0, parameters=SHAPES)
        for name in order:
            accumulator.add(DenseBlock(name, grads[name]))
        assert accumulator.features().dtype == torch.float64
        assert torch.equal(accumulator.features()[:, 6], grads["b"])


def test_no_block_at_all_gives_zeros():
    accumulator = NoOpProjector(device="cpu").accumulator(2, model_id=0, parameters=SHAPES)

    assert torch.equal(accumulator.features(), torch.zeros(2, 11))


def test_the_features_hold_no_reference_to_the_gradients():
    grads = gradients()
    features = NoOpProjector().project(grads, 0)
    before = features.clone()
    for grad in grads.values():
        grad.zero_()

    assert torch.equal(features, before)


def test_a_block_of_an_unknown_parameter_is_refused():
    accumulator = NoOpProjector().accumulator(2, model_id=0, parameters=SHAPES)

    with pytest.raises(InvalidInputError, match="'d', which is not among the 3 parameters"):
        accumulator.add(DenseBlock("d", torch.zeros(2, 1)))


def test_the_fingerprint_does_not_depend_on_what_has_no_effect():
    assert NoOpProjector(5, 6, 7).fingerprint() == NoOpProjector().fingerprint()
