"""The hook computer on whole models, against one forward and backward pass per sample in float64."""

from __future__ import annotations

import pytest
import torch
from models import CASES, Case, RoutedMixture, by_loop, classify, make, tokens
from torch import Tensor

from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import resolve_task


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10) -> None:
    assert list(found) == list(expected)
    scale = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=1e-12 * max(scale, 1), msg=lambda m, n=name: f"{n}: {m}"
        )


EVERY = {**CASES, "mixture of experts, routed": Case(RoutedMixture, tokens(4), classify)}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY.keys())
def test_gradients_of_a_whole_model_equal_one_backward_pass_per_sample(case: Case, count: int) -> None:
    model, batch = make(case, count)

    found = collect_gradients(HookGradientComputer(model, resolve_task(case.output)), batch)

    assert_same(found, by_loop(model, case.output, batch))
