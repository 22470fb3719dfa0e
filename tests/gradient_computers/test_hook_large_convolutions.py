"""Large convolutions are formed sample by sample on a CPU: the same numbers as in one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trak_lite.gradient_computers import HookGradientComputer, IterativeGradientComputer, collect_gradients
from trak_lite.gradient_computers.hooks.rules import convolutions
from trak_lite.modelout_functions import resolve_task


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("large", [1, 1 << 40])
def test_weight_gradients_do_not_depend_on_how_they_are_formed(
    monkeypatch: pytest.MonkeyPatch, large: int, groups: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=groups), nn.Flatten()).double()
    batch = (torch.randn(3, 2, 15, 15, dtype=torch.float64),)
    task = resolve_task(lambda call, batch: call(batch[0]).square().sum(1))
    monkeypatch.setattr(convolutions, "_LARGE", large)
    monkeypatch.setattr(convolutions, "_factors_are_smaller", lambda *_: False)

    grads = collect_gradients(HookGradientComputer(model, task), batch)

    for name, value in collect_gradients(IterativeGradientComputer(model, task), batch).items():
        torch.testing.assert_close(grads[name], value, rtol=1e-10, atol=1e-13)
