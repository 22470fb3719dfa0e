"""Whole models by the hook computer, against one forward and backward pass per sample in float64."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from models import (
    CASES,
    Case,
    RoutedMixture,
    assert_exact,
    assert_same,
    by_loop,
    classify,
    hooked,
    make,
    rows,
    tokens,
)
from torch import Tensor

from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    HookGradientComputer,
    choose_gradient_computer,
    collect_gradients,
)
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import GradientBlock, samples_of

EVERY = {**CASES, "mixture of experts, routed": Case(RoutedMixture, tokens(4), classify)}


def blocks_of(computer: HookGradientComputer, batch: Any) -> list[GradientBlock]:
    found: list[GradientBlock] = []
    computer.stream_gradients(batch, lambda block: found.append(samples_of(block, slice(None))))
    return found


@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY.keys())
def test_gradients_of_a_whole_model_equal_one_backward_pass_per_sample(case: Case, count: int) -> None:
    """By the computer that is chosen, whose later passes give the bits of the first one, in the same order."""
    model, batch = make(case, count)
    name, reason, computer = choose_gradient_computer(model, resolve_task(case.output), batch)
    assert (name, reason) == ("hook", "every kept parameter is covered")
    expected = by_loop(model, case.output, batch)
    scale = max(float(value.abs().max()) for value in expected.values())

    assert_same(collect_gradients(computer, batch), expected, atol=1e-12 * max(scale, 1))

    first, later = blocks_of(computer, batch), blocks_of(computer, batch)
    assert [(block.name, block.start) for block in later] == [(block.name, block.start) for block in first]
    for block, other in zip(later, first, strict=True):
        assert torch.equal(block.dense(), other.dense()), block.name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_runs_as_it_was_written() -> None:
    model, batch = make(CASES["GPT-2"])
    expected = by_loop(model, classify, batch)
    model.up = torch.compile(model.up, backend="eager")

    found = collect_gradients(HookGradientComputer(model, resolve_task(classify)), batch)

    for grad, value in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(grad, value, rtol=1e-10, atol=1e-12)


def test_another_look_at_a_parameter_is_no_other_path() -> None:
    """Recurrent layers ask for their weights' device again after ``functional_call``."""
    model, batch = make(CASES["LSTM tagger"])
    computer = assert_exact(model, batch, classify)
    collect_gradients(GRADIENT_COMPUTERS["iterative"](model, resolve_task(classify)), batch)
    torch.func.functional_call(model, dict(model.named_parameters()), batch[0])

    assert_exact(model, batch, classify, computer=computer)


@pytest.mark.parametrize("count", [3, 50_000], ids=["small", "megabytes"])
def test_a_hook_of_the_model_that_changes_a_gradient_changes_the_rows(count: int) -> None:
    """Small gradients are collected by autograd, large ones by hooks."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.norm(net.a(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: 2 * grad)
        return net.b(hidden.relu()) * net.p  # type: ignore[no-any-return]

    model, computer = hooked(forward, output=lambda call, batch: call(*batch).square().mean((1, 2)))
    batch = (rows(3, count),)
    expected = by_loop(model, lambda call, batch: call(*batch).square().mean((1, 2)), batch)

    for _ in range(2 if count == 3 else 1):
        assert_same(collect_gradients(computer, batch), expected, rtol=1e-9)


def test_what_a_failed_pass_held_is_freed_at_once() -> None:
    held: list[weakref.ref[Tensor]] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x)
        held.append(weakref.ref(hidden))
        if net.fails:
            raise FloatingPointError
        return net.b(hidden)  # type: ignore[no-any-return]

    model, computer = hooked(forward, self_check=False)
    model.fails = False
    blocks_of(computer, (rows(3),))
    model.fails = True
    gc.disable()
    try:
        with pytest.raises(FloatingPointError):
            blocks_of(computer, (rows(3),))
        assert held[-1]() is None
    finally:
        gc.enable()
