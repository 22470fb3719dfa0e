"""Norms and weighted sums of gradients, against the gradients themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import CASES, by_loop, make

from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    HookGradientComputer,
    gradient_norms,
    weighted_gradient,
)
from trak_lite.gradient_computers.reductions import GradientNorms, squared_norms
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import DenseBlock, LookupBlock


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", ["GPT-2", "U-Net", "DLRM"])
def test_norms_are_those_of_the_full_gradients(name: str, chunk_size: int | None) -> None:
    case = CASES[name]
    model, batch = make(case)

    norms = gradient_norms(
        HookGradientComputer(model, resolve_task(case.output), chunk_size=chunk_size), batch
    )

    rows = torch.cat([value.flatten(1) for value in by_loop(model, case.output, batch).values()], 1)
    torch.testing.assert_close(norms, rows.norm(dim=1), rtol=1e-10, atol=0)


def test_an_empty_batch_has_no_norms() -> None:
    case = CASES["small CNN"]
    model, (images, labels) = make(case)

    norms = gradient_norms(HookGradientComputer(model, resolve_task(case.output)), (images[:0], labels[:0]))

    assert norms.shape == (0,)


def test_norms_of_blocks_in_any_order_and_precision_add_up() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 3, 2), torch.randn(5, 3, dtype=torch.float64)
    norms = GradientNorms(5)

    norms.add(DenseBlock("weight", weight[2:].requires_grad_(), start=2))
    norms.add(DenseBlock("bias", bias))
    norms.add(DenseBlock("weight", weight[:2]))

    expected = torch.cat([weight.double().flatten(1), bias], 1).square().sum(1)
    torch.testing.assert_close(norms.squared().double(), expected.detach(), rtol=1e-6, atol=0)
    assert torch.equal(GradientNorms(3).squared(), torch.zeros(3))


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_a_weighted_sum_is_the_sum_of_weighted_rows(computer) -> None:
    case = CASES["small CNN"]
    model, batch = make(case)
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)

    found = weighted_gradient(computer(model, resolve_task(case.output)), batch, weights)

    for name, rows in by_loop(model, case.output, batch).items():
        torch.testing.assert_close(found[name], torch.tensordot(weights, rows, 1), rtol=1e-9, atol=1e-12)


def test_one_weight_per_sample_is_needed() -> None:
    case = CASES["small CNN"]
    model, batch = make(case)

    with pytest.raises(InvalidInputError, match=r"shape \(3,\) for a batch of 4"):
        weighted_gradient(HookGradientComputer(model, resolve_task(case.output)), batch, torch.ones(3))


def test_the_norm_of_a_table_adds_up_what_came_to_one_row_first():
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([[2, 0, 2, 2], [1, 1, 3, 0]])
    values = torch.randn(2, 4, 5, generator=generator)
    values[0, 3] = -values[0, 0] - values[0, 2]  # row 2 of the first sample cancels to nothing
    block = LookupBlock("table", rows, values, 4)

    expected = [np.linalg.norm(table) ** 2 for table in block.grad.double().numpy()]

    np.testing.assert_allclose(squared_norms(block).numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(block.grad[0, 0], values[0, 1])


def test_a_row_of_a_table_holds_the_sum_of_its_lookups():
    rows, values = torch.tensor([[2, 0, 2]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])

    assert LookupBlock("table", rows, values, 3).grad.tolist() == [[[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]]
