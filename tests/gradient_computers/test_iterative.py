"""The iterative computer where a model or a batch does not allow one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import IterativeGradientComputer, collect_gradients
from trak_lite.modelout_functions import resolve_task

pytestmark = pytest.mark.quick

IMAGES = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def squares(model: Callable[..., Tensor], batch: Any) -> Tensor:
    return model(*batch).square().sum(1)


def gradients(model: nn.Module, *batch: Any) -> dict[str, Tensor]:
    return collect_gradients(IterativeGradientComputer(model.double(), resolve_task(squares)), batch)


class Layer(nn.Module):
    """A linear layer and what is done with its result."""

    def __init__(self, after: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.after(self.linear(x), *others)


def test_a_model_that_branches_on_its_batch_is_differentiated_for_each_sample_alone() -> None:
    """One forward pass over the batch would take one branch for all samples."""
    torch.manual_seed(0)
    model = Layer(lambda y: y.sin() if y.sum() > 0 else y.exp()).double()
    branches = {bool(model.linear(row).sum() > 0) for row in IMAGES}
    names = ["linear.weight", "linear.bias"]

    found = gradients(model, IMAGES)

    assert branches == {True, False}
    expected = reference.per_sample_gradients(model, squares, reference.samples_of((IMAGES,)), names)
    for name in names:
        np.testing.assert_allclose(found[name].numpy(), expected[name], rtol=1e-10)


def test_a_model_that_takes_one_sample_at_a_time_is_never_run_on_more() -> None:
    model = Layer(lambda y: y.view(1, 4))

    found = gradients(model, IMAGES)

    expected = reference.per_sample_gradients(
        model, squares, reference.samples_of((IMAGES,)), ["linear.weight"]
    )
    np.testing.assert_allclose(found["linear.weight"].numpy(), expected["linear.weight"], rtol=1e-10)


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (lambda y: y / y.squeeze().norm(dim=1, keepdim=True), "IndexError: Dimension out of range"),
        (lambda y: nn.functional.group_norm(y, 4), "ValueError: Expected more than 1 value per channel"),
    ],
    ids=["squeezed", "group of one entry"],
)
def test_a_model_that_cannot_run_on_one_sample_is_named(after: Callable[..., Tensor], cause: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"Layer runs on a batch, but not on one .*{cause}"):
        gradients(Layer(after), IMAGES)


def test_a_model_that_does_not_run_at_all_fails_with_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        gradients(nn.Linear(3, 4), IMAGES)

    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged),
    ],
    ids=["sparse", "nested"],
)
def test_a_batch_that_cannot_be_sliced_is_named(other: Callable[[], Tensor]) -> None:
    with pytest.raises(InvalidInputError, match=r"Sample 0 cannot be taken out of its batch .*to_dense"):
        gradients(Layer(lambda y, _: y), IMAGES, other())
