"""Later passes that differ from the first: rows elsewhere, other paths, caches, classes, threads and copies."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Forward, Net, assert_exact, assert_same, by_loop, hooked, rows, wavy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import resolve_task

WAVY = resolve_task(wavy)

# Rows that are in place in some batches only


def sorted_whole(s: Net, x: Tensor) -> Tensor:
    order = x.flatten(1).sum(1).argsort()
    hidden = torch.tanh(s.norm(s.a(x[order]))) + 0.1
    return s.b(hidden[order.argsort()]) * s.p


def sorted_without_rule(use: Forward) -> Forward:
    """Sorted rows go through an operation whose rule does not apply: rows in place have their tags still."""

    def forward(s: Net, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return s.c(torch.tanh(use(s, x[order]))[order.argsort()])

    return forward


SORTED: dict[str, tuple[Forward, tuple[int, ...]]] = {
    "rows": (sorted_whole, (6,)),
    "positions": (sorted_whole, (6, 3)),
    "two passes": (sorted_whole, (70,)),
    "alpha": (sorted_without_rule(lambda s, x: torch.addmm(s.p, x, s.a.weight, alpha=2.0)), (6,)),
    "beta": (sorted_without_rule(lambda s, x: torch.addmm(s.p, x, s.a.weight, beta=0.5)), (66,)),
    "row": (sorted_without_rule(lambda s, x: torch.addmm(s.row, x, s.a.weight)), (6,)),
    "linear": (sorted_without_rule(lambda s, x: F.linear(x, s.a.weight, s.row)), (6,)),
}


@pytest.mark.parametrize("self_check", [False, True])
@pytest.mark.parametrize(("forward", "shape"), SORTED.values(), ids=SORTED)
def test_rows_that_are_in_place_in_one_batch_may_be_elsewhere_in_the_next(
    forward: Forward, shape: tuple[int, ...], self_check: bool
) -> None:
    model, computer = hooked(forward, self_check=self_check)
    mixed = rows(*shape)
    ordered = mixed[mixed.flatten(1).sum(1).argsort()]

    for batch in (ordered, mixed, ordered.flip(0), ordered, mixed[:1]):
        assert_exact(model, (batch,), computer=computer)


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


# Paths that values choose, and caches


def padded(count: int, *places: int) -> tuple[Tensor]:
    x = rows(count, 5, seed=count)
    for place in places:
        x[place, 3:, 0] = 0.0
    return (x,)


class Padded(nn.Module):
    """Attention that leaves its mask out if no sample of the batch is padded, as Hugging Face's models do."""

    def __init__(self, exact: bool = True) -> None:
        super().__init__()
        self.qkv, self.bias, self.exact = nn.Linear(4, 12), nn.Parameter(torch.randn(1, 2, 5, 5)), exact

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        bias, real = self.bias, x[..., 0] != 0
        if not bool(real.all()):
            bias = torch.where(real[:, None, None], bias, -30.0)
            bias = bias if self.exact else bias + 0.5 * torch.where(real[:, None, None], bias, 0.0)
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("places", [(), (2,), (0, 1), (0, 1, 2, 3)], ids=str)
def test_a_path_that_other_samples_choose_is_planned_from_one_of_them(places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Padded().double()
    computer = HookGradientComputer(model, WAVY)

    for batch in (padded(4, *places), padded(4), padded(4, 3), padded(4, *places), padded(2, 1)):
        assert_exact(model, batch, computer=computer)
    assert "choice" in HookGradientComputer(model, WAVY).explain(padded(2, 1))["bias"].why


def test_a_path_that_changes_other_samples_gradients_or_that_no_sample_takes_alone_is_refused() -> None:
    torch.manual_seed(0)
    computer = HookGradientComputer(Padded(exact=False).double(), WAVY)
    collect_gradients(computer, padded(4))
    with pytest.raises(UnsupportedModelError, match="self-check failed"):
        collect_gradients(computer, padded(4, 2))

    def alone(s: Net, x: Tensor) -> Tensor:
        """Runs one operation more if the batch has samples of both signs, which no sample alone has."""
        signs = x[:, 0] > 0
        out = s.a(x)
        return out if bool(signs.all()) or not bool(signs.any()) else out + s.a.bias

    x = rows(4)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0])
    with pytest.raises(UnsupportedModelError, match="operations"):
        collect_gradients(hooked(alone)[1], (x,))


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


# Operations with a rule of their own


def attended(shape: tuple[int, ...], scale: float | None, empty: bool) -> Forward:
    """Attention with a bias made of a parameter, of which one row may hide every key."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in x.repeat(1, 1, 3).chunk(3, -1))
        bias = s.bias * 1.0
        if empty:
            bias = bias.masked_fill(torch.eye(5, dtype=torch.bool)[2][:, None], float("-inf"))
        return F.scaled_dot_product_attention(q, k.sin(), v, attn_mask=bias, scale=scale)

    return forward


@pytest.mark.parametrize("shape", [(1, 2, 5, 5), (2, 5, 5), (5, 5), (1, 2, 1, 5)], ids=str)
@pytest.mark.parametrize(("scale", "empty"), [(None, False), (0.3, False), (None, True)])
def test_the_bias_of_attention_is_exact(shape: tuple[int, ...], scale: float | None, empty: bool) -> None:
    model, computer = hooked(attended(shape, scale, empty))
    model.bias = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    assert_exact(model, (rows(4, 5),), computer=computer)
    assert computer.explain((rows(4, 5),))["bias"].why.startswith("attention")


EINSUMS = [
    ("bth,hnd->btnd", (4, 2, 3), "einsum"),
    ("tbh,hnd->tbnd", (4, 2, 3), "einsum"),
    ("bth,ho->bto", (4, 3), "einsum"),
    ("oh,bth->bot", (3, 4), "einsum"),
    ("bth,th->bh", (3, 4), "einsum"),
    ("bth,th->bh", (1, 4), "vmap"),
    ("bth,thk->bt", (3, 4, 2), "vmap"),
    ("b...h,hk->b...k", (4, 2), "vmap"),
    ("bth,hh->bt", (4, 4), "vmap"),
]


@pytest.mark.parametrize(("equation", "shape", "how"), EINSUMS)
def test_products_in_einstein_notation_are_exact(equation: str, shape: tuple[int, ...], how: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        if equation.startswith("tb"):
            return torch.einsum(equation, x.transpose(0, 1), s.weight).transpose(0, 1)
        return torch.einsum(equation, *((s.weight, x) if equation.startswith("oh") else (x, s.weight)))

    model, computer = hooked(forward)
    model.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    assert_exact(model, (rows(5, 3),), computer=computer)
    assert computer.explain((rows(5, 3),))["weight"].why.startswith(how)


def test_choices_between_parameters_equal_autograd() -> None:
    """One of them broadcast."""
    model, computer = hooked(
        lambda s, x: torch.where(x > 0, s.p, s.row.mT[:3]) * x + torch.where(x > 1, 2.0, s.p)
    )

    assert_exact(model, (rows(5, 3),), computer=computer)
    assert computer.explain((rows(5, 3),))["p"].why == "choice"


# The classes of parameters and tensors


class Tagged(Tensor):
    """A tensor subclass of somebody else."""


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
