"""Which operations a pass intercepts, and what later passes over the same shapes do in another way than the first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, assert_equals_autograd, by_loop, hooked, make
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.gradient_computers.hooks import engine
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import GradientBlock, samples_of


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 3), nn.LayerNorm(4)
        self.function = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def x(count: int = 3, *shape: int) -> Tensor:
    return torch.randn(count, *shape, 4, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def blocks_of(computer: HookGradientComputer, batch: Any) -> list[GradientBlock]:
    found: list[GradientBlock] = []
    computer.stream_gradients(batch, lambda block: found.append(samples_of(block, slice(None))))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_first_pass_a_later_one_and_one_with_hooks_give_the_same_bits_in_the_same_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make(CASES[name])
    computer = HookGradientComputer(model, resolve_task(CASES[name].output), self_check=False)

    first, later = blocks_of(computer, batch), blocks_of(computer, batch)
    monkeypatch.setattr(engine, "_COLLECTED_BYTES", -1)
    hooks = blocks_of(computer, batch)

    expected = by_loop(model, CASES[name].output, batch)
    for found in (first, later, hooks):
        assert [(block.name, block.start) for block in found] == [(b.name, b.start) for b in first]
        assert {block.name for block in found} == set(expected)
        for block, other in zip(found, first, strict=True):
            assert torch.equal(block.dense(), other.dense()), block.name
    for name, value in expected.items():
        rows = torch.cat([block.dense() for block in later if block.name == name])
        torch.testing.assert_close(rows, value.reshape(len(value), -1), rtol=1e-9, atol=1e-11)


def test_the_gradients_of_small_models_are_collected() -> None:
    _, computer = hooked(Net, lambda net, x: net.b(net.norm(net.a(x))))
    blocks_of(computer, (x(),))
    (plan,) = computer._plans.values()
    size = sum(step.num_bytes for step in plan.steps_for(3).values())

    assert size == 3 * (4 + 4 + 3) * 8
    assert plan.all_bound(3, size)
    assert not plan.all_bound(3, size - 1)
    assert not plan.all_bound(2, size)  # no pass over two samples has run


class Running(TorchFunctionMode):
    """Records the names of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_only_operations_on_parameters_are_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    _, computer = hooked(Net, lambda net, x: net.b(net.norm(net.a(x.sin()).relu()).cos()))
    blocks_of(computer, (x(),))
    seen: list[str] = []
    intercept = engine.GradientPass._intercept

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return intercept(self, func, types, args, kwargs)

    monkeypatch.setattr(engine.GradientPass, "_intercept", counted)
    blocks_of(computer, (x(),))

    operations = [name for name in seen if name != "__get__"]  # the device of a parameter
    assert operations == [
        "linear",
        "layer_norm",
        "layer_norm",
        "linear",
    ]  # in torch.nn.functional, then in torch


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_have_their_class_again_after_a_pass(fails: bool) -> None:
    during: list[type] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        net.merged = net.a.weight.t()  # type: ignore[assignment]
        during.append(type(net.a.weight))
        if fails and len(during) > 3:
            raise FloatingPointError
        return net.b(x @ net.merged)  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward, self_check=False)
    blocks_of(computer, (x(),))
    if fails:
        with pytest.raises(FloatingPointError):
            blocks_of(computer, (x(),))

    assert during[2] is not nn.Parameter
    assert issubclass(during[2], nn.Parameter)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert type(model.merged) is Tensor
    assert torch.equal(model.a.weight.relu(), F.relu(model.a.weight.detach()))


def test_a_parameter_in_a_closure_and_in_a_list_is_intercepted() -> None:
    held: list[nn.Parameter] = []
    model, computer = hooked(Net, lambda net, x: net.a(x) @ torch.stack(held).t())
    held += [model.norm.weight, model.norm.bias]
    batch = (x(),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)


def test_another_thread_may_use_the_model_during_the_forward_pass() -> None:
    found: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = net.a(x)

        def infer() -> None:
            found.append(F.linear(x, net.b.weight, net.b.bias))

        thread = threading.Thread(target=infer)
        thread.start()
        thread.join()
        return net.b(hidden)  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward, self_check=False)
    batch = (x(),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
        last = collect_gradients(computer, batch), found[-1]
        assert torch.equal(last[1], model.b(batch[0]))


class Tagged(Tensor):
    """A tensor subclass of somebody else."""


def test_tensor_subclasses_are_followed() -> None:
    model, computer = hooked(
        Net, lambda net, x: net.b(net.norm(net.a(x).as_subclass(Tagged))).as_subclass(Tensor)
    )
    batch = (x(),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    (plan,) = computer._plans.values()
    assert not plan.has_plain_tensors


class OwnParameter(nn.Parameter):
    """A parameter class of somebody else."""


def test_parameter_subclasses_are_followed() -> None:
    model, computer = hooked(Net, lambda net, x: net.b(net.a(x)))
    model.a.weight = OwnParameter(model.a.weight.detach())
    batch = (x(),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    assert type(model.a.weight) is OwnParameter


@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_result_that_is_changed_in_place_has_the_gradient_before_the_change(shape: tuple[int, ...]) -> None:
    model, computer = hooked(
        Net, lambda net, x: net.b(F.silu(net.a(x), inplace=True).mul_(x).sum(1, keepdim=True))
    )
    batch = (x(3, *shape) if shape else x(3, 1),)

    for _ in range(3):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)


def test_the_default_device_may_be_set() -> None:
    model, computer = hooked(Net, lambda net, x: net.b(net.norm(net.a(x))))
    batch = (x(),)
    with torch.device("cpu"), Running() as running:
        for _ in range(2):
            assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    assert "linear" in running.names


def test_a_gradient_inside_the_forward_pass_is_refused_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = net.a(x)
        if net.differentiates and hidden.requires_grad:
            (inner,) = torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)
            hidden = hidden + inner
        return net.b(hidden)  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward, self_check=False)
    model.differentiates = True

    with pytest.raises(UnsupportedModelError, match="itself computes a gradient"):
        blocks_of(computer, (x(),))
