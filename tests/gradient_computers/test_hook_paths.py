"""Plans of models whose runs differ: rows in place in some batches only, caches, and paths chosen by values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import DenseMixture, by_loop, squares
from torch import Tensor, nn

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import resolve_task


def same(computer: HookGradientComputer, model: nn.Module, batch: Any, **tolerances: float) -> None:
    expected = by_loop(model, squares, batch)
    found = collect_gradients(computer, batch)
    assert list(found) == list(expected)
    limits = tolerances or {"rtol": 1e-10, "atol": 1e-11}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}", **limits)


class Sorted(nn.Module):
    """Rows in the order of a value, and back: where they are depends on the batch."""

    def __init__(self, back: bool = True) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.scale, self.back = nn.Parameter(torch.randn(3)), back

    def forward(self, x: Tensor) -> Tensor:
        order = x.flatten(1).sum(1).argsort()
        hidden = torch.tanh(self.norm(self.inner(x[order]))) + 0.1
        hidden = hidden[order.argsort()] if self.back else hidden
        return self.outer(hidden) * self.scale


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4), (70, 4)], ids=["rows", "positions", "two passes"])
def test_rows_that_are_in_place_in_one_batch_may_be_elsewhere_in_the_next(
    shape: tuple[int, ...], self_check: bool
) -> None:
    torch.manual_seed(0)
    model = Sorted().double()
    computer = HookGradientComputer(model, resolve_task(squares), self_check=self_check)
    mixed = torch.randn(shape, dtype=torch.float64)
    ordered = mixed[mixed.flatten(1).sum(1).argsort()]

    for rows in (ordered, mixed, ordered.flip(0), ordered, mixed[:1]):
        same(computer, model, (rows,))


class Mixtures(DenseMixture):
    """Two layers of routed experts with tied routers, and dense operations around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

    def mixed(self, flat: Tensor) -> Tensor:
        share, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            if len(rows):
                out.index_add_(0, rows, share[rows, None] * expert(flat[rows]))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(2):
            x = x + self.mixed(self.norm(x).reshape(-1, 6)).view_as(x)
        return self.head(x)


@pytest.mark.parametrize("kept", [True, False], ids=["the same sizes", "other sizes"])
def test_later_batches_with_other_routes_are_exact(kept: bool) -> None:
    torch.manual_seed(1)
    model = Mixtures().double()
    computer = HookGradientComputer(model, resolve_task(squares), self_check=False)

    for count in (5, 5, 5, 5) if kept else (5, 3, 5, 1):
        batch = (torch.randn(count, 3, 4, dtype=torch.float64),)
        same(computer, model, batch)
    assert "rows found" in computer.explain(batch)["head.weight"].why


class Experts(nn.Module):
    """Stacked experts that sorted tokens are multiplied with in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 8, 4))
        self.one_operation = True

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=3).cumsum(0)
        if self.one_operation:
            weight = self.experts.transpose(1, 2)
            out = torch._grouped_mm(flat[order], weight, offs=ends.to(torch.int32))
        else:
            rows = flat[order].tensor_split(ends[:-1])
            out = torch.cat([part @ own.T for part, own in zip(rows, self.experts, strict=True)])
        return (out[order.argsort()] * share[:, None]).view(*x.shape[:-1], 8)


def test_a_grouped_product_equals_one_product_per_expert_in_float64() -> None:
    torch.manual_seed(0)
    model = Experts()
    computer = HookGradientComputer(model, resolve_task(squares))
    for _ in range(3):
        batch = (torch.randn(5, 4, 4),)
        found = collect_gradients(computer, batch)
        reference = Experts().double()
        reference.load_state_dict(model.state_dict())
        reference.one_operation = False
        expected = by_loop(reference, squares, (batch[0].double(),))
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-4)
    assert "grouped matmul" in computer.explain(batch)["experts"].why


class Caching(nn.Module):
    """Computes an index in its first run, and reads it from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.index = nn.Linear(3, 3), nn.Parameter(torch.randn(5, 3)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.index is None:
            self.index = (torch.arange(4).flip(0) * 2 + 1) // 2
        return self.linear(x) * self.table[self.index].sum(0)


def test_what_the_first_run_caches_does_not_look_like_moved_rows() -> None:
    torch.manual_seed(0)
    model, batch = Caching().double(), (torch.randn(5, 4, 3, dtype=torch.float64),)

    coverage = HookGradientComputer(model, resolve_task(squares)).explain(batch)

    assert coverage["linear.weight"].why == "linear"
    model.index = None
    same(HookGradientComputer(model, resolve_task(squares)), model, batch)


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


def padded(count: int, *places: int) -> tuple[Tensor]:
    x = torch.randn(count, 5, 4, dtype=torch.float64)
    for place in places:
        x[place, 3:, 0] = 0.0
    return (x,)


@pytest.mark.parametrize("places", [(), (2,), (0, 1), (0, 1, 2, 3)])
def test_a_path_that_other_samples_choose_is_planned_from_one_of_them(places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Padded().double()
    computer = HookGradientComputer(model, resolve_task(squares))

    for batch in (padded(4, *places), padded(4), padded(4, 3), padded(4, *places), padded(2, 1)):
        same(computer, model, batch)
    coverage = HookGradientComputer(model, resolve_task(squares)).explain(padded(2, 1))
    assert "choice" in coverage["bias"].why


def test_a_path_that_changes_other_samples_gradients_is_refused() -> None:
    torch.manual_seed(0)
    computer = HookGradientComputer(Padded(exact=False).double(), resolve_task(squares))

    collect_gradients(computer, padded(4))
    with pytest.raises(UnsupportedModelError, match="self-check failed"):
        collect_gradients(computer, padded(4, 2))


class Alone(nn.Module):
    """Runs one operation more if the batch has samples of both signs, which no sample alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        signs = x[:, 0] > 0
        out = self.linear(x)
        return out if bool(signs.all()) or not bool(signs.any()) else out + self.linear.bias


def test_a_path_that_no_sample_takes_alone_is_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0])
    computer = HookGradientComputer(Alone().double(), resolve_task(squares))

    with pytest.raises(UnsupportedModelError, match="operations"):
        collect_gradients(computer, (x,))


class Product(nn.Module):
    """An einsum of the input with a parameter."""

    def __init__(self, equation: str, shape: tuple[int, ...], swapped: bool = False) -> None:
        super().__init__()
        self.weight, self.equation, self.swapped = nn.Parameter(torch.randn(shape)), equation, swapped

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and self.equation.startswith("tb"):
            x = x.transpose(0, 1)
        operands = (self.weight, x) if self.swapped else (x, self.weight)
        out = torch.einsum(self.equation, *operands)
        return out.transpose(0, 1) if self.equation.startswith("tb") else out


@pytest.mark.parametrize(
    ("build", "how"),
    [
        (lambda: Product("bth,hnd->btnd", (4, 2, 3)), "einsum"),
        (lambda: Product("tbh,hnd->tbnd", (4, 2, 3)), "einsum"),
        (lambda: Product("bth,ho->bto", (4, 3)), "einsum"),
        (lambda: Product("oh,bth->bot", (3, 4), swapped=True), "einsum"),
        (lambda: Product("bth,th->bh", (3, 4)), "einsum"),
        (lambda: Product("bth,th->bh", (1, 4)), "vmap"),
        (lambda: Product("bth,thk->bt", (3, 4, 2)), "vmap"),
        (lambda: Product("b...h,hk->b...k", (4, 2)), "vmap"),
        (lambda: Product("bth,hh->bt", (4, 4)), "vmap"),
    ],
)
def test_products_in_einstein_notation_equal_autograd(build: Callable[[], nn.Module], how: str) -> None:
    torch.manual_seed(0)
    model, batch = build().double(), (torch.randn(5, 3, 4, dtype=torch.float64),)
    computer = HookGradientComputer(model, resolve_task(squares))

    same(computer, model, batch)
    assert computer.explain(batch)["weight"].why.startswith(how)


class Attention(nn.Module):
    """Attention with a bias made of a parameter, and an option per flag."""

    def __init__(self, shape: tuple[int, ...], scale: float | None = None, empty: bool = False) -> None:
        super().__init__()
        self.bias, self.scale, self.empty = nn.Parameter(torch.randn(shape)), scale, empty

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in x.chunk(3, -1))
        bias = self.bias * 1.0
        if self.empty:
            bias = bias.masked_fill(torch.eye(5, dtype=torch.bool)[2][:, None], float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)


@pytest.mark.parametrize("shape", [(1, 2, 5, 5), (2, 5, 5), (5, 5), (1, 2, 1, 5)])
@pytest.mark.parametrize(("scale", "empty"), [(None, False), (0.3, False), (None, True)])
def test_the_bias_of_attention_equals_autograd(
    shape: tuple[int, ...], scale: float | None, empty: bool
) -> None:
    torch.manual_seed(0)
    model = Attention(shape, scale, empty).double()
    batch = (torch.randn(4, 5, 12, dtype=torch.float64),)
    computer = HookGradientComputer(model, resolve_task(squares))

    same(computer, model, batch)
    assert computer.explain(batch)["bias"].why.startswith("attention")


class Dropped(Attention):
    """Attention with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in x.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.bias, 0.5)


def test_the_bias_of_attention_with_dropout_is_differentiated_with_the_same_draws() -> None:
    torch.manual_seed(0)
    model, batch = Dropped((1, 2, 5, 5)).double(), (torch.randn(4, 5, 12, dtype=torch.float64),)
    computer = HookGradientComputer(model, resolve_task(squares), self_check=False)
    collect_gradients(computer, batch)

    torch.manual_seed(3)
    found = collect_gradients(computer, batch)["bias"].sum(0)

    torch.manual_seed(3)
    out = model(*batch)
    (expected,) = torch.autograd.grad((out * out.cos()).sum(), [model.bias])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


class Choice(nn.Module):
    """A choice between two parameters, one of them broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, self.one, self.other) * x + torch.where(x > 1, 2.0, self.one)


def test_choices_between_parameters_equal_autograd() -> None:
    torch.manual_seed(0)
    model, batch = Choice().double(), (torch.randn(5, 3, 4, dtype=torch.float64),)
    computer = HookGradientComputer(model, resolve_task(squares))

    same(computer, model, batch)
    assert computer.explain(batch)["one"].why == "choice"


class SortedWithoutRule(nn.Module):
    """Sorted rows go through an operation whose rule does not apply: rows in place have their tags still."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.outer = kind, nn.Linear(4, 2)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.row = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        hidden = x[order]
        match self.kind:
            case "alpha":
                hidden = torch.addmm(self.bias, hidden, self.weight, alpha=2.0)
            case "beta":
                hidden = torch.addmm(self.bias, hidden, self.weight, beta=0.5)
            case "row":
                hidden = torch.addmm(self.row, hidden, self.weight)
            case "linear":
                hidden = F.linear(hidden, self.weight, self.row)
        return self.outer(torch.tanh(hidden)[order.argsort()])


@pytest.mark.parametrize("rows", [6, 70])
@pytest.mark.parametrize("kind", ["alpha", "beta", "row", "linear"])
def test_rows_in_place_of_an_operation_without_a_rule(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    model = SortedWithoutRule(kind).double()
    computer = HookGradientComputer(model, resolve_task(squares), self_check=False)
    mixed = torch.randn(rows, 4, dtype=torch.float64)
    ordered = mixed[mixed.sum(1).argsort()]

    for batch in (mixed, ordered, ordered, mixed, ordered):
        same(computer, model, (batch,))


class SortedExperts(nn.Module):
    """Rows sorted by expert, in one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.outer = nn.Parameter(torch.randn(2, 16, 16)), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=2).cumsum(0).to(torch.int32)
        hidden = torch._grouped_mm(x[order], self.experts, offs=ends)
        return self.outer(torch.tanh(hidden)[order.argsort()])


def test_rows_of_a_grouped_product_that_are_sorted_already() -> None:
    torch.manual_seed(0)
    model = SortedExperts()
    computer = HookGradientComputer(model, resolve_task(squares), self_check=False)
    mixed = torch.randn(6, 16)
    ordered = mixed[(mixed[:, 0] > 0).long().argsort(stable=True)]

    for batch in (mixed, ordered, ordered.abs(), mixed):
        same(computer, model, (batch,), rtol=1e-4, atol=1e-4)


def test_another_choice_of_parameters_is_seen_by_the_next_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    computer = HookGradientComputer(model, resolve_task(squares), grad_wrt=["0.weight"])
    batch = (torch.randn(2, 3, dtype=torch.float64),)

    assert list(collect_gradients(computer, batch)) == ["0.weight"]
    computer.grad_wrt = ["1.bias"]
    assert list(collect_gradients(computer, batch)) == ["1.bias"]
