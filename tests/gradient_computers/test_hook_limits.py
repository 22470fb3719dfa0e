"""Where hooks end: what is refused by name, what is reported, and what a batch may carry beside its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import by_loop, hooked, wavy
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    HookGradientComputer,
    choose_gradient_computer,
    collect_gradients,
)
from trak_lite.modelout_functions import ModelCall, resolve_task


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.function = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


made = functools.partial(hooked, Net)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(found: dict[str, Tensor], model: nn.Module, batch: Any) -> None:
    for name, value in by_loop(model, wavy, batch).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11)


# A gradient inside f


def force(s: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        energy = s.b(s.a(x).tanh()).tanh().sum()
        (found,) = torch.autograd.grad(energy, x, create_graph=True)
    return found


def test_a_gradient_taken_inside_f_is_refused_whether_or_not_samples_are_checked() -> None:
    for settings in ({}, {"self_check": False}):
        model, computer = made(force, **settings)

        with pytest.raises(UnsupportedModelError, match=r"itself computes a gradient through linear"):
            collect_gradients(computer, (rows(3, 4),))

    assert choose_gradient_computer(model, resolve_task(wavy), (rows(3, 4),))[0] != "hook"


# What a batch carries beside its tensors


def turned(s: Net, x: Tensor, turn: bool) -> Tensor:
    hidden = s.a(x).tanh()
    return s.b(hidden.transpose(0, 1)).transpose(0, 1).sin() if turn else s.b(hidden.sin())


def test_a_flag_in_the_batch_makes_another_structure_of_it() -> None:
    model, computer = made(lambda s, x, turn: s.b(x.transpose(0, 1)).transpose(0, 1) if turn else s.b(x))
    x = rows(4, 4, 4)
    for turn in (False, True, False):
        found = collect_gradients(computer, (x, turn))
        for i in range(4):
            value = wavy(ModelCall(model), (x[i : i + 1], turn)).sum()
            (expected,) = torch.autograd.grad(value, [model.b.weight])
            torch.testing.assert_close(found["b.weight"][i], expected, rtol=1e-10, atol=1e-11)


@dataclass
class Flagged:
    x: Tensor
    turn: bool


@pytest.mark.parametrize(
    "pack",
    [Flagged, lambda x, turn: {"x": x, "turn": turn}, lambda x, turn: {"x": x, "on" if turn else "off": 1}],
    ids=["dataclass", "mapping", "keys"],
)
def test_flags_are_seen_in_any_container(pack: Callable[..., Any]) -> None:
    def flag_of(batch: Any) -> bool:
        if isinstance(batch, dict):
            return "on" in batch or bool(batch.get("turn"))
        return batch.turn

    def evaluate(call: ModelCall, batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return call(x, flag_of(batch)).flatten(1).square().sum(1)

    torch.manual_seed(0)
    model, x = Net(turned).double(), rows(4, 4, 4)
    computer = HookGradientComputer(model, resolve_task(evaluate))
    kept = {turn: collect_gradients(computer, pack(x, turn)) for turn in (False, True)}

    for turn in (False, True):
        alone = HookGradientComputer(model, resolve_task(evaluate))
        for name, value in collect_gradients(alone, pack(x, turn)).items():
            torch.testing.assert_close(kept[turn][name], value, rtol=1e-10, atol=1e-12)


def test_only_the_newest_structures_are_remembered() -> None:
    _, computer = made(lambda s, x: s.a(x))
    for length in range(1, 71):
        collect_gradients(computer, (rows(1, length, 4),))

    lengths = [key[0][0][0][0] for key in computer._plans]
    assert lengths == list(range(7, 71))


# Random numbers that an operation draws itself


class Attending(nn.Module):
    """Keys and values are parameters; attention draws its own dropout mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 8)
        self.key, self.value = (nn.Parameter(torch.randn(1, 2, 3, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(-1, 2, 1, 4)
        return F.scaled_dot_product_attention(query, self.key, self.value, dropout_p=0.5).flatten(1)


def test_an_operation_that_runs_again_draws_the_same_mask() -> None:
    torch.manual_seed(0)
    model, batch = Attending().double(), (rows(5, 4),)
    computer = HookGradientComputer(model, resolve_task(wavy), self_check=False)
    collect_gradients(computer, batch)  # the model is examined
    torch.manual_seed(5)
    found = collect_gradients(computer, batch)
    after = torch.rand(3)
    torch.manual_seed(5)
    total = wavy(ModelCall(model), batch).sum()

    assert torch.equal(torch.rand(3), after)
    for (name, _), grad in zip(
        model.named_parameters(), torch.autograd.grad(total, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(found[name].sum(0), grad, rtol=1e-10, atol=1e-12)


# Hidden uses, reports and refusals


def hidden(s: Net, x: Tensor) -> Tensor:
    return s.b(x) + torch.func.vmap(lambda row: s.a(row).tanh())(x)


def test_without_strict_a_hidden_use_is_zero_also_where_samples_are_checked() -> None:
    model, computer = made(hidden, strict=False)

    found = collect_gradients(computer, (rows(3, 4),))

    assert not found["a.weight"].any()
    expected = by_loop(model, wavy, (rows(3, 4),))["b.weight"]
    torch.testing.assert_close(found["b.weight"], expected, rtol=1e-10, atol=1e-12)
    line = computer.explain((rows(3, 4),))["a.weight"]
    assert line.how == "refused"
    assert line.why.endswith("its rows are zero, as strict=False asks for")


def test_the_coverage_of_what_hooks_cannot_follow_names_it_for_every_parameter() -> None:
    _, computer = made(
        lambda s, x: torch.func.vmap(torch.func.grad(lambda row: s.a(row).tanh().sum()))(x) + s.b(x)
    )

    coverage = computer.explain((rows(3, 4),))

    assert {line.how for line in coverage} == {"refused"}
    assert all("Hooks cannot follow Net" in line.why for line in coverage)


def test_the_coverage_is_checked_as_a_run_is() -> None:
    def mixing(s: Net, x: Tensor) -> Tensor:
        return s.b(s.a(x) - s.a(x).detach().mean(0))

    _, computer = made(mixing)

    assert all("self-check failed" in line.why for line in computer.explain((rows(3, 4),)))


def test_an_empty_batch_explains_nothing() -> None:
    _, computer = made(lambda s, x: s.a(x))

    with pytest.raises(InvalidInputError, match="at least one sample"):
        computer.explain((rows(0, 4),))


def test_complex_parameters_are_refused_by_name() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.fft.fft(x) * self.weight).abs()

    computer = HookGradientComputer(Complex(), resolve_task(wavy))

    with pytest.raises(UnsupportedModelError, match=r"\['weight'\] are complex"):
        collect_gradients(computer, (rows(3, 4),))
    assert "are complex" in computer.explain((rows(3, 4),))["weight"].why


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_a_parameter_that_is_also_used_in_a_lower_precision_is_not_refused(inner: torch.dtype) -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        return s.a(x) + F.linear(x.to(inner), s.a.weight.to(inner)).double()

    model, computer = made(forward)

    found = collect_gradients(computer, (rows(5, 4),))["a.weight"]

    expected = by_loop(model, wavy, (rows(5, 4),))["a.weight"]
    assert float((found - expected).norm()) < 1e-2 * float(expected.norm())


def test_a_computer_that_was_called_inside_anothers_sink_works_afterwards() -> None:
    model, outer = made(lambda s, x: s.b(s.a(x).tanh()))
    inner = HookGradientComputer(model, resolve_task(wavy), grad_wrt="a.*")
    refused: list[UnsupportedModelError] = []

    def sink(block: Any) -> None:
        try:
            collect_gradients(inner, (rows(3, 4),))
        except UnsupportedModelError as error:
            refused.append(error)

    outer.stream_gradients((rows(3, 4),), sink)

    assert refused
    found = collect_gradients(inner, (rows(3, 4),))
    expected = by_loop(model, wavy, (rows(3, 4),), ["a.weight"])["a.weight"]
    torch.testing.assert_close(found["a.weight"], expected, rtol=1e-10, atol=1e-12)
