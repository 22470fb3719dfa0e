"""Norms of gradients, against the gradients themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import CASES, by_loop, make
from torch import Tensor, nn

from trak_lite.data.batches import batch_size
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.gradient_computers.reductions import GradientNorms, squared_norms
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import Batch, DenseBlock, LookupBlock


def gradient_norms(computer: HookGradientComputer, batch: Batch) -> Tensor:
    norms = GradientNorms(batch_size(batch))
    computer.stream_gradients(batch, norms.add)
    return norms.squared().sqrt()


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


def test_the_norm_of_positions_that_cancel_keeps_its_digits() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, 1, 64), torch.randn(2, 1, 64)
    small = 1e-4 * torch.randn(2, 1, 64)
    model = nn.Linear(64, 64, bias=False)
    inputs, grads = torch.cat([x, x + small], 1), torch.cat([g, -g], 1)
    task = resolve_task(lambda call, batch: (call(batch[0]) * batch[1]).sum((1, 2)))

    norms = gradient_norms(HookGradientComputer(model, task), (inputs, grads))

    expected = (grads.double().transpose(1, 2) @ inputs.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-3, atol=0)


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
