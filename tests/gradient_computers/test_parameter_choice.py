"""Which parameters gradients are kept for, by name, by pattern and by the class of their module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    choose_gradient_computer,
    collect_gradients,
    select_parameters,
)
from trak_lite.modelout_functions import resolve_task

pytestmark = pytest.mark.quick


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (nn.Linear, ["0.weight", "0.bias", "2.1.weight", "2.1.bias"]),
        ([nn.LayerNorm], ["1.weight", "1.bias"]),
        ([nn.LayerNorm, "*.1.weight"], ["1.weight", "1.bias", "2.1.weight"]),
        ("2.1.bias", ["2.1.bias"]),
    ],
)
def test_a_class_stands_for_what_its_modules_own(choice: Any, expected: list[str]) -> None:
    assert list(select_parameters(network(), choice)) == expected


def test_a_container_owns_nothing_that_its_children_own() -> None:
    with pytest.raises(
        InvalidInputError, match=r"names the class Sequential.*Classes that do: \['LayerNorm', 'Linear'\]"
    ):
        select_parameters(network(), ["0.bias", nn.Sequential])


def test_a_class_that_the_model_has_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"no module of that class in Sequential owns a parameter"):
        select_parameters(network(), [nn.Conv2d])


def test_a_class_that_is_no_module_is_no_name_either() -> None:
    with pytest.raises(InvalidInputError, match=r"Unknown parameter names in grad_wrt: \[<class 'int'>\]"):
        select_parameters(network(), [int])  # type: ignore[list-item]


def test_a_parametrized_weight_counts_as_its_modules_own() -> None:
    model = nn.Sequential(orthogonal(nn.Linear(3, 3)), nn.LayerNorm(3))

    assert list(select_parameters(model, nn.Linear)) == ["0.bias", "0.parametrizations.weight.original"]


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_every_computer_takes_a_class(computer: Any) -> None:
    model, batch = network(), (torch.randn(3, 4),)
    task = resolve_task(lambda call, batch: call(batch[0]).square().sum(1))

    found = collect_gradients(computer(model, task, grad_wrt=[nn.LayerNorm]), batch)

    whole = collect_gradients(computer(model, task), batch)
    assert list(found) == ["1.weight", "1.bias"]
    torch.testing.assert_close(found["1.weight"], whole["1.weight"])
    assert choose_gradient_computer(model, task, batch, nn.LayerNorm)[0] == "hook"
