"""The automatic choice of a gradient computer, and its reason in the log and in the manifest."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same, by_loop
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.gradient_computers import choose_gradient_computer, collect_gradients
from trak_lite.modelout_functions import ModelCall, resolve_task


def total(call: ModelCall, batch: Any) -> Tensor:
    return call(batch[0]).sum(1)


class _OneAtATime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        row = x.reshape(1, 4)
        return self.linear(row) * row.sum().item()  # which vmap cannot read


@pytest.mark.quick
def test_the_functional_computer_is_next_and_the_iterative_one_last() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2).double(), (torch.randn(4, 3, dtype=torch.float64),)

    def loop(call: ModelCall, batch: Any) -> Tensor:
        return torch.stack([call(x).sum() for x in batch[0]])

    def branch(call: ModelCall, batch: Any) -> Tensor:
        return torch.stack([call(x).sum() * (2 if x.sum() > 0 else 1) for x in batch[0]])

    name, reason, _ = choose_gradient_computer(model, resolve_task(loop), batch, "weight")
    assert name == "functional"
    assert reason.startswith("hook: The model runs")
    name, reason, computer = choose_gradient_computer(model, resolve_task(branch), batch)
    assert name == "iterative"
    assert "functional: torch.func.vmap cannot transform" in reason
    assert_same(collect_gradients(computer, batch), by_loop(model, branch, batch))


def test_the_last_resort_is_tried_under_autocast_and_on_one_sample_at_a_time() -> None:
    seen: list[Any] = []

    def output(call: Any, batch: Any) -> Tensor:
        out = call(batch[0])
        seen.append(out.dtype)
        return out.float().sum(1)

    name, reason, _ = choose_gradient_computer(
        _OneAtATime(), resolve_task(output), (torch.ones(3, 4),), autocast_dtype=torch.bfloat16
    )

    assert name == "iterative"
    assert "hook: RuntimeError: shape '[1, 4]' is invalid" in reason
    assert {*seen} == {torch.bfloat16}


def test_manifest_and_log_hold_the_reason_of_a_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(6, 4), torch.randint(3, (6,)))
    for choice in ("auto", "hook"):
        path = tmp_path / f"{choice}.zarr"
        made = Attributor(
            model, task="image_classification", path=path, proj_dim=4, gradient_computer=choice, device="cpu"
        )
        with caplog.at_level(logging.INFO, "trak_lite"):
            made.featurize(data)
        stored = json.loads((path / "zarr.json").read_text())["attributes"]["trak_lite"]["made_with"]

        expected = "every kept parameter is covered" if choice == "auto" else None
        assert stored.get("gradient_computer_reason") == expected
        assert stored["settings"]["gradient_computer"] == "hook"
        Attributor.open(path, model, device="cpu").featurize(data)
    assert "'hook'" in caplog.text


class _Failing(nn.Linear):
    """Fails in its own way where the hooks' tensors read it."""

    def __init__(self, error: type[Exception], fails_always: bool) -> None:
        super().__init__(4, 3)
        self.error, self.fails_always, self.calls = error, fails_always, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails_always or self.calls == 1:
            raise self.error
        return super().forward(x)


class _Unknown(Exception):
    pass


@pytest.mark.parametrize("error", [AssertionError, ZeroDivisionError, _Unknown, NameError, OSError])
def test_any_failure_leads_to_the_next_computer_and_that_of_all_is_told(error: type[Exception]) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(3, 4),)

    name, reason, _ = choose_gradient_computer(_Failing(error, False), resolve_task(total), batch)
    assert (name, error.__name__ in reason) == ("functional", True)
    with pytest.raises(error):
        choose_gradient_computer(_Failing(error, True), resolve_task(total), batch)
