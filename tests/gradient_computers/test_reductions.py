"""Norms and weighted sums of gradients, against the gradients themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import CASES, by_loop, make
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    FunctionalGradientComputer,
    HookGradientComputer,
    IterativeGradientComputer,
)
from trak_lite.gradient_computers.reductions import (
    GradientNorms,
    gradient_norms,
    squared_norms,
    weighted_gradient,
)
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


class Centred(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b((hidden - hidden.mean(0) * 0.5).tanh())


def test_a_weighted_sum_of_a_model_that_mixes_samples_is_that_of_its_rows_or_refused() -> None:
    def output(call, batch):
        return call(batch[0]).sin().sum(1)

    torch.manual_seed(0)
    model, batch = Centred().double(), (torch.randn(4, 4, dtype=torch.float64),)
    weights = torch.randn(4, dtype=torch.float64)
    rows = by_loop(model, output, batch)
    for kind in (FunctionalGradientComputer, IterativeGradientComputer):
        found = weighted_gradient(kind(model, resolve_task(output)), batch, weights)
        for name, value in rows.items():
            torch.testing.assert_close(found[name], torch.einsum("b,b...->...", weights, value))
    with pytest.raises(UnsupportedModelError):
        weighted_gradient(HookGradientComputer(model, resolve_task(output)), batch, weights)


def test_a_weighted_sum_by_hooks_streams_its_first_batch_and_then_takes_one_pass() -> None:
    model, batch = nn.Linear(4, 3).double(), (torch.randn(4, 4, dtype=torch.float64),)
    seen: list[int] = []
    task = resolve_task(lambda call, batch: (seen.append(len(batch[0])), call(batch[0]).sin().sum(1))[1])
    computer = HookGradientComputer(model, task)
    for _ in range(2):
        weighted_gradient(computer, batch, torch.ones(4, dtype=torch.float64))
    seen.clear()

    weighted_gradient(computer, batch, torch.ones(4, dtype=torch.float64))

    assert seen == [4]


def test_chunks_of_a_weighted_sum_add_up() -> None:
    case = CASES["GPT-2"]
    model, batch = make(case, 5)
    weights = torch.randn(5, dtype=torch.float64)
    computer = HookGradientComputer(model, resolve_task(case.output), chunk_size=2)

    found = weighted_gradient(computer, batch, weights)

    for name, value in by_loop(model, case.output, batch).items():
        torch.testing.assert_close(found[name], torch.einsum("b,b...->...", weights, value))


def test_an_empty_batch_has_a_weighted_sum_of_zero() -> None:
    for kind in GRADIENT_COMPUTERS.values():
        model = nn.Linear(4, 3)
        found = weighted_gradient(
            kind(model, resolve_task(lambda call, batch: call(batch[0]).sum(1))),
            (torch.zeros(0, 4),),
            torch.zeros(0),
        )
        assert not any(value.any() for value in found.values())
        assert found["weight"].shape == (3, 4)
