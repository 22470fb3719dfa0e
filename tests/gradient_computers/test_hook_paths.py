"""Later passes that differ from the first: rows elsewhere, other paths, caches, classes, threads and copies."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Tagged, assert_exact, assert_same, by_loop, hooked, rows, wavy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import resolve_task

WAVY = resolve_task(wavy)

# Kernels and caches


class Experts(nn.Module):
    """Stacked experts that sorted tokens are multiplied with in one operation."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, experts), nn.Parameter(torch.randn(experts, 8, 4))
        self.one_operation = True

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=len(self.experts)).cumsum(0)
        if self.one_operation:
            out = torch._grouped_mm(flat[order], self.experts.transpose(1, 2), offs=ends.to(torch.int32))
        else:
            parts = flat[order].tensor_split(ends[:-1])
            out = torch.cat([part @ own.T for part, own in zip(parts, self.experts, strict=True)])
        return (out[order.argsort()] * share[:, None]).view(*x.shape[:-1], 8)


@pytest.mark.parametrize("length", [1, 4])
def test_a_grouped_product_equals_one_product_per_expert_in_float64(length: int) -> None:
    """Of rows that are sorted by expert already, too."""
    torch.manual_seed(0)
    model, x = Experts(), rows(5, length).float()
    reference = Experts().double()
    reference.load_state_dict(model.state_dict())
    reference.one_operation = False
    computer = HookGradientComputer(model, resolve_task(lambda call, batch: wavy(call, batch)))
    order = model.router(x[:, 0]).argmax(-1).argsort(stable=True)

    for batch in (x, x[order], x.flip(0), x[order]):
        found = collect_gradients(computer, (batch,))
        expected = by_loop(reference, wavy, (batch.double(),))
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-3, atol=1e-3)
    assert "grouped matmul" in computer.explain((x,))["experts"].why


def test_what_the_first_run_caches_does_not_look_like_moved_rows() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        """Computes an index in its first run, and reads it from then on."""
        if s.index is None:
            s.index = (torch.arange(4).flip(0) * 2 + 1) // 2
        return s.a(x) * s.embed.weight[s.index].sum(0)

    model, computer = hooked(forward)
    model.index = None
    assert computer.explain((rows(5, 4),))["a.weight"].why == "linear"
    model.index = None
    assert_exact(model, (rows(5, 4),))


def test_another_choice_of_parameters_is_seen_by_the_next_pass() -> None:
    model, computer = hooked(lambda s, x: s.b(s.a(x)), grad_wrt=["a.weight"])
    for name in ("a.weight", "b.bias"):
        computer.grad_wrt = [name]
        assert_exact(model, (rows(2),), computer=computer, names=[name])


# The classes of parameters and tensors


class OwnParameter(nn.Parameter):
    """A parameter class of somebody else."""


def test_a_subclass_that_appears_in_a_later_batch_is_followed() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        hidden = s.a(x)
        out = s.b(hidden.as_subclass(Tagged) if s.tags else hidden)
        return (out * 2 if type(out) is Tagged else out).as_subclass(Tensor)

    model, computer = hooked(forward, self_check=False)
    for tags in (False, False, True, True):
        model.tags = tags
        assert_exact(model, (rows(3),), computer=computer)


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_have_their_class_again_after_a_pass(fails: bool) -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        s.merged = s.a.weight.t()
        if s.fails:
            raise FloatingPointError
        return s.b(x @ s.merged)

    model, computer = hooked(forward, self_check=False)
    model.fails, model.b.weight = False, OwnParameter(model.b.weight.detach())
    for _ in range(2):
        assert_exact(model, (rows(3),), computer=computer)
    if fails:
        model.fails = True
        with pytest.raises(FloatingPointError):
            collect_gradients(computer, (rows(3),))

    classes = {name: type(p) for name, p in model.named_parameters()}
    assert classes.pop("b.weight") is OwnParameter
    assert {*classes.values()} == {nn.Parameter}
    assert type(model.merged) is Tensor
    assert torch.equal(model.a.weight.relu(), F.relu(model.a.weight.detach()))


def test_a_copy_of_a_parameter_is_a_parameter() -> None:
    copies: list[nn.Linear] = []

    def forward(s: Net, x: Tensor) -> Tensor:
        copies.append(copy.deepcopy(s.a))
        return s.b(s.a(x) + copies[-1](x).detach())

    model, computer = hooked(forward, self_check=False)
    for _ in range(2):
        assert_exact(model, (rows(3),), computer=computer)
        collect_gradients(computer, (rows(3),))
    assert {type(p) for made in copies for p in made.parameters()} == {nn.Parameter}
    assert torch.equal(copies[-1](rows(3)), model.a(rows(3)))


class Running(TorchFunctionMode):
    """Records the names of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_the_default_device_may_be_set_and_modes_of_others_see_the_model() -> None:
    model, computer = hooked(lambda s, x: s.b(s.norm(s.a(x))))

    with torch.device("cpu"), Running() as running:
        for _ in range(2):
            found = collect_gradients(computer, (rows(3),))

    assert "linear" in running.names
    assert_same(found, by_loop(model, wavy, (rows(3),)))


# Threads


def in_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class Waits(torch.autograd.Function):
    """The identity; another thread uses a weight meanwhile, and trains it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, found: list[Tensor], x: Tensor) -> Tensor:
        ctx.weight, ctx.found, ctx.x = weight, found, x.detach()
        in_a_thread(lambda: found.append(F.linear(x, weight)))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        def train() -> None:
            with torch.enable_grad():
                value = F.linear(ctx.x[:1], ctx.weight).sin().sum()
            ctx.found.extend(torch.autograd.grad(value, ctx.weight))

        in_a_thread(train)
        return None, None, grad


def test_another_thread_may_use_and_train_the_model_meanwhile() -> None:
    found: list[Tensor] = []
    model, computer = hooked(lambda s, x: s.b(Waits.apply(s.b.weight, found, s.a(x))), self_check=False)
    x = rows(3)

    for _ in range(2):
        found.clear()
        got = collect_gradients(computer, (x,))
        used, trained = found[-2:]
        hidden = model.a(x).detach()
        assert torch.equal(used, F.linear(hidden, model.b.weight))
        loss = F.linear(hidden[:1], model.b.weight).sin().sum()
        torch.testing.assert_close(trained, torch.autograd.grad(loss, model.b.weight)[0])
        assert_same(got, by_loop(model, wavy, (x,)))
