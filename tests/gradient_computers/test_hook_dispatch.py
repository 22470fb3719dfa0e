"""Which operations a pass intercepts, and what later passes over the same shapes do in another way than the first."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, assert_equals_autograd, by_loop, hooked, make, wavy
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


@pytest.mark.parametrize("through_a_layer", [True, False])
def test_a_gradient_inside_the_forward_pass_is_refused_if_it_depends_on_parameters(
    through_a_layer: bool,
) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        first = net.a(x)
        hidden = net.norm(first)
        if hidden.requires_grad:
            (inner,) = torch.autograd.grad(
                hidden.sin().sum(), first if through_a_layer else hidden, create_graph=True
            )
            hidden = hidden + inner
        return net.b(hidden)  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward, self_check=False)
    batch = (x(),)

    for _ in range(2):
        if through_a_layer:
            with pytest.raises(UnsupportedModelError, match="itself computes a gradient"):
                blocks_of(computer, batch)
        else:
            assert_equals_autograd(model, collect_gradients(computer, batch), batch)


def test_a_copy_of_a_parameter_is_a_parameter() -> None:
    copies: list[nn.Linear] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        copies.append(copy.deepcopy(net.a))
        return net.b(net.a(x) + copies[-1](x).detach())  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward, self_check=False)
    batch = (x(),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    assert {type(p) for made in copies for p in made.parameters()} == {nn.Parameter}
    assert torch.equal(copies[-1](batch[0]), model.a(batch[0]))


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda net, x: net.b(x * torch.as_tensor(net.norm.weight)), id="torch.as_tensor"),
        pytest.param(lambda net, x: net.b(x * nn.Parameter(net.norm.weight)), id="another parameter"),
        pytest.param(
            lambda net, x: net.b(x * 2 if type(net.b.weight) is nn.Parameter else net.a(x)), id="its class"
        ),
    ],
)
def test_a_model_that_fails_with_other_classes_of_its_parameters_runs_with_a_mode(
    forward: Callable[..., Tensor],
) -> None:
    model, computer = hooked(Net, forward)
    batch = (x(),)

    for _ in range(3):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    (plan,) = computer._plans.values()
    assert not plan.has_plain_tensors


def test_a_subclass_that_appears_in_a_later_batch_is_followed() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = net.a(x)
        out = net.b(hidden.as_subclass(Tagged) if net.tags else hidden)
        return (out * 2 if type(out) is Tagged else out).as_subclass(Tensor)

    model, computer = hooked(Net, forward, self_check=False)
    batch = (x(),)

    for tags in (False, False, True, True):
        model.tags = tags
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)


class Negated(torch.autograd.Function):
    """Changes its incoming gradient in place, which autograd forbids and does not notice."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return -value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.neg_()


def test_a_backward_pass_in_python_that_changes_gradients_changes_no_rows() -> None:
    model, computer = hooked(Net, lambda net, x: net.b(Negated.apply(net.a(x)) + net.norm.weight))
    batch = (x(),)

    for _ in range(3):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)


def test_another_thread_may_train_the_model_during_the_backward_pass() -> None:
    found: list[Tensor] = []

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, net: Net, x: Tensor) -> Tensor:
            ctx.net, ctx.x = net, x.detach()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
            def train() -> None:
                with torch.enable_grad():
                    weight = ctx.net.b.weight
                    found.extend(torch.autograd.grad(F.linear(ctx.x[:1], weight).sin().sum(), weight))

            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            return None, grad

    model, computer = hooked(Net, lambda net, x: net.b(Waits.apply(net, net.a(x))), self_check=False)
    batch = (x(),)

    for _ in range(2):
        found.clear()
        rows = collect_gradients(computer, batch)
        hidden = model.a(batch[0])[:1].detach()
        expected = torch.autograd.grad(F.linear(hidden, model.b.weight).sin().sum(), model.b.weight)
        torch.testing.assert_close(found[-1], expected[0])
        for name, value in by_loop(model, wavy, batch).items():
            torch.testing.assert_close(rows[name], value)


def test_a_pass_that_failed_is_freed_at_once() -> None:
    def passes() -> list[Any]:
        return [found for found in gc.get_objects() if type(found) is engine.GradientPass]

    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = net.a(x)
        if net.fails:
            raise FloatingPointError
        return net.b(hidden)  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward, self_check=False)
    model.fails = False
    blocks_of(computer, (x(),))
    model.fails = True
    batch = (x(),)
    before = set(map(id, passes()))
    gc.disable()
    try:
        with pytest.raises(FloatingPointError):
            blocks_of(computer, batch)
        assert {id(found) for found in passes()} <= before
    finally:
        gc.enable()


def test_complex_factors_are_conjugated() -> None:
    model, computer = hooked(
        Net,
        lambda net, x: net.b(torch.fft.ifft(torch.fft.fft(net.a(x)) * torch.fft.fft(net.norm.weight)).real),
    )
    batch = (x(),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_with_kernels_of_one_entry(groups: int, stride: int) -> None:
    class Pointwise(nn.Module):
        def __init__(self, forward: Callable[..., Tensor]) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 1, stride, groups=groups)
            self.norm = nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))  # type: ignore[no-any-return]

    model, computer = hooked(Pointwise, lambda: None)  # type: ignore[arg-type, return-value]
    batch = (torch.randn(3, 4, 7, 7, dtype=torch.float64),)

    for _ in range(2):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    with torch.autocast("cpu", torch.bfloat16):
        # A float64 convolution is not cast, so its gradient is not either.
        rows = collect_gradients(computer, batch)["conv.weight"]
    assert_equals_autograd(model, {**collect_gradients(computer, batch), "conv.weight": rows}, batch)


def test_tensors_of_the_model_may_require_grad() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        x.requires_grad_()
        return net.b(net.norm(x.sin())) + net.a(x).sum(1, keepdim=True)  # type: ignore[no-any-return]

    model, computer = hooked(Net, forward)
    batch = (x(),)

    for _ in range(3):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)


@pytest.mark.parametrize("collected", [True, False])
def test_a_hook_of_the_model_that_changes_a_gradient_changes_the_rows(
    collected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = net.norm(net.a(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: 2 * grad)
        return net.b(hidden.relu())  # type: ignore[no-any-return]

    if not collected:
        monkeypatch.setattr(engine, "_COLLECTED_BYTES", -1)
    model, computer = hooked(Net, forward)
    batch = (x(),)

    for _ in range(3):
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
