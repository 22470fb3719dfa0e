"""The self-check looks at the batch in use: what two samples cannot show, it still finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_equals_autograd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import (
    HookGradientComputer,
    choose_gradient_computer,
    collect_gradients,
)
from trak_lite.modelout_functions import ModelCall, resolve_task


def output(call: ModelCall, batch: Any) -> Tensor:
    rows = call(*batch)
    return (rows * rows.cos()).flatten(1).sum(1)


class Net(nn.Module):
    """Two linear layers and whatever a case does with them."""

    def __init__(self, forward: Callable[..., Tensor], width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 3)
        self.p = nn.Parameter(torch.randn(4))
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def made(forward: Callable[..., Tensor]) -> tuple[Net, HookGradientComputer]:
    torch.manual_seed(0)
    model = Net(forward).double().eval()
    return model, HookGradientComputer(model, resolve_task(output))


def rows(count: int, *shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *(shape or (4,)), generator=generator, dtype=torch.float64)


MIXING = {
    "mean of the inputs": lambda s, x: s.a(x - x.mean(0) + x[:, :1]),
    "flip": lambda s, x: s.a(x.flip(0)),
    "detached mean": lambda s, x: s.b((s.a(x) - s.a(x).detach().mean(0) * 0.5).tanh()),
}


@pytest.mark.parametrize("forward", MIXING.values(), ids=MIXING.keys())
def test_a_first_batch_of_one_does_not_hide_that_samples_mix(forward: Callable[..., Tensor]) -> None:
    _, computer = made(forward)
    collect_gradients(computer, (rows(1),))

    with pytest.raises(UnsupportedModelError, match="self-check"):
        collect_gradients(computer, (rows(3),))


LARGE_ONLY = {
    "roll by two": (lambda s, x: s.a(x.roll(2, 0)), 5),
    "capacity": (
        lambda s, x: s.a(x) * (s.p.sum() * 0 + ((x[:, :1] > -9).long().cumsum(0) <= 2).double()),
        8,
    ),
}


@pytest.mark.parametrize(("forward", "size"), LARGE_ONLY.values(), ids=LARGE_ONLY.keys())
def test_mixing_that_two_samples_cannot_show_is_found_at_the_size_in_use(
    forward: Callable[..., Tensor], size: int
) -> None:
    _, computer = made(forward)

    with pytest.raises(UnsupportedModelError):
        collect_gradients(computer, (rows(size),))


def time_major(s: Net, x: Tensor) -> Tensor:
    count, steps = x.shape[:2]
    hidden = s.a(x.transpose(0, 1).reshape(steps * count, -1)).tanh()
    return s.b(hidden).view(steps, count, -1).transpose(0, 1)


def test_weights_that_were_zero_when_first_seen_do_not_mix_up_rows_later() -> None:
    model, computer = made(time_major)
    weight = model.b.weight.detach().clone()
    batch = (rows(3, 5, 4),)
    with torch.no_grad():
        model.b.weight.zero_()
    collect_gradients(computer, batch)
    with torch.no_grad():
        model.b.weight.copy_(weight)

    computer.load_model_params(model)
    grads = collect_gradients(computer, batch)

    assert_equals_autograd(model, grads, batch, output, atol=1e-12)


def ragged(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    kept = torch.cat([x[i, : int(n)] for i, n in enumerate(lengths)])
    owner = torch.repeat_interleave(torch.arange(len(x)), lengths)
    hidden = s.b(s.a(kept).tanh())
    return torch.zeros(len(x), 3, dtype=hidden.dtype).index_add(0, owner, hidden)


def test_rows_of_ragged_samples_are_not_mixed_up_where_their_number_divides() -> None:
    """The checked samples, first and last, have their rows where equal samples would."""
    model, computer = made(ragged)
    batch = (rows(4, 5, 4), torch.tensor([2, 1, 3, 2]))

    grads = collect_gradients(computer, batch)

    assert_equals_autograd(model, grads, batch, output, atol=1e-12)


def test_what_hooks_cannot_follow_is_a_named_refusal_and_auto_moves_on() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        return s.a(x) * torch.stack([s.p] * len(x))  # an operation on as many parameters as samples

    model, computer = made(forward)
    batch = (rows(3),)

    with pytest.raises(UnsupportedModelError, match="functional"):
        collect_gradients(computer, batch)

    name, reason, _ = choose_gradient_computer(model, resolve_task(output), batch)
    assert name != "hook"
    assert reason.startswith("hook: ")


def test_parameters_inside_a_checkpoint_are_right_or_refused_by_name() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        return s.b(checkpoint(lambda v: (v * s.p.exp()).tanh(), s.a(x), use_reentrant=False))

    model, computer = made(forward)
    batch = (rows(3),)
    try:
        grads = collect_gradients(computer, batch)
    except UnsupportedModelError:
        name, *_ = choose_gradient_computer(model, resolve_task(output), batch)
        assert name != "hook"
    else:
        assert_equals_autograd(model, grads, batch, output, atol=1e-12)


def test_scalars_and_named_operands_keep_their_meaning() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        return torch.addmm(s.p, x, s.a.weight, beta=0, alpha=2) + torch.sub(other=s.p, input=x)

    model, computer = made(forward)
    batch = (rows(3),)

    grads = collect_gradients(computer, batch)

    assert_equals_autograd(model, grads, batch, output, atol=1e-12)


class _Branching(nn.Module):
    """Takes the branch that the whole batch votes for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.sin() if x.sum() > 0 else y.exp()


def test_a_branch_that_goes_by_the_batch_is_found_in_any_of_its_samples():
    inputs = torch.ones(8, 4)
    inputs[4] = -1.0  # the only one that alone would take the other branch
    computer = HookGradientComputer(_Branching(), resolve_task(lambda model, batch: model(batch[0]).sum(1)))

    with pytest.raises(UnsupportedModelError, match="The self-check failed"):
        computer.stream_gradients((inputs,), lambda _: None)


def test_a_later_batch_of_a_model_that_branches_is_checked_at_one_sample_in_turn_and_then_refused():
    computer = HookGradientComputer(_Branching(), resolve_task(lambda model, batch: model(batch[0]).sum(1)))
    alike, unlike = torch.ones(3, 4), torch.ones(3, 4)
    unlike[1] = -1.0
    computer.stream_gradients((alike,), lambda _: None)

    found = []
    for _ in range(3):
        try:
            computer.stream_gradients((unlike,), lambda _: None)
        except UnsupportedModelError as error:
            found.append(str(error))

    assert "The self-check failed" in found[0]
    assert all("self-check failed for an earlier batch" in message for message in found[1:])
    with pytest.raises(UnsupportedModelError, match="self-check failed for an earlier batch"):
        computer.stream_gradients((alike,), lambda _: None)


class _OneAtATime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(1, 4).clone())


def test_auto_takes_what_runs_where_the_model_takes_one_sample_at_a_time():
    model, batch = _OneAtATime(), (torch.ones(5, 4),)
    name, reason, _ = choose_gradient_computer(model, resolve_task(output), batch)

    assert name in ("functional", "iterative")
    assert "hook: RuntimeError: shape '[1, 4]' is invalid" in reason


def test_auto_shows_the_error_of_a_model_that_never_runs():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        choose_gradient_computer(nn.Linear(3, 2), resolve_task(output), (torch.ones(5, 4),))
