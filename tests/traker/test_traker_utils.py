"""The small functions of trak_lite.utils agree with the original's."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from traker_cases import make_model, original

from trak_lite import utils
from trak_lite.errors import InvalidInputError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def theirs():
    original()
    return importlib.import_module("trak.utils")


def gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (2, 3), "scale": (), "bias": (4,)}
    return {name: torch.randn(5, *shape, generator=generator) for name, shape in shapes.items()}


def test_vectorize_puts_gradients_side_by_side_also_into_a_given_tensor(theirs):
    expected, arr = theirs.vectorize(gradients(), device="cpu"), torch.empty(5, 11)

    assert utils.vectorize(gradients(), arr) is arr
    for found in (utils.vectorize(gradients()), utils.vectorize(gradients(), device="cpu"), arr):
        assert torch.equal(found, expected)


def test_vectorize_refuses_gradients_that_disagree():
    with pytest.raises(InvalidInputError, match=r"different numbers of samples: \[2, 3\]"):
        utils.vectorize({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)})


def test_parameters_are_counted_and_flattened_in_order(theirs):
    model = make_model("cnn")
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight

    assert utils.get_num_params(model) == theirs.get_num_params(model)
    assert utils.get_num_params(tied) == 9
    parameters = list(model.parameters())
    assert torch.equal(utils.parameters_to_vector(parameters), theirs.parameters_to_vector(parameters))


@pytest.mark.parametrize("name", ["bn.running_mean", "running_var", "a.num_batches_tracked", "conv.weight"])
def test_buffers_are_told_by_name(theirs, name):
    assert utils.is_not_buffer(0, [name]) == theirs.is_not_buffer(0, [name])


@pytest.mark.parametrize("batch_size", [8, 2**26, 2**27, 2**28])
def test_chunks_hold_whole_parameters_below_the_limit(theirs, batch_size):
    """The parameters have 9, 30, 20 and 4 entries; the limit is 2^32 - 1 over the batch size."""
    model = nn.ModuleList(
        [nn.Linear(3, 3, bias=False), nn.Linear(5, 6, bias=False), nn.Linear(4, 5), nn.Linear(2, 2)]
    )
    limit, chunks = utils.get_parameter_chunk_sizes(model, batch_size)

    assert limit == (2**32 - 1) // batch_size
    assert sum(chunks) == utils.get_num_params(model)
    boundaries = torch.tensor([0, *(p.numel() for p in model.parameters())]).cumsum(0).tolist()
    assert set(torch.tensor(chunks).cumsum(0).tolist()) <= set(boundaries)
    assert all(size < limit or size in [p.numel() for p in model.parameters()] for size in chunks)
    if max(p.numel() for p in model.parameters()) < limit:
        assert (limit, chunks) == tuple(theirs.get_parameter_chunk_sizes(model, batch_size))
