"""Rows whose sample no shape tells (routed experts, sorted and ragged samples): the gradient tells it, exactly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, DenseMixture, RoutedMixture, by_loop, classify, make, squares, tokens
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import (
    HookGradientComputer,
    choose_gradient_computer,
    collect_gradients,
    register_gradient_rule,
)
from trak_lite.gradient_computers.hooks.owners import Arrangement, SampleCode, sketch
from trak_lite.gradient_computers.hooks.plan.rearranging import leaves_of
from trak_lite.gradient_computers.hooks.registry import unregister_gradient_rule
from trak_lite.modelout_functions import ModelCall, resolve_task


def same(found: dict[str, Tensor], model: nn.Module, batch: Any, output: Any) -> None:
    expected = by_loop(model, output, batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equals_the_loop(model: nn.Module, batch: Any, output: Any = classify, **settings: Any) -> None:
    computer = HookGradientComputer(model, resolve_task(output), **settings)
    same(collect_gradients(computer, batch), model, batch, output)


class Expert(nn.Module):
    """Every kind of operation that has rows: norm, linear, bare parameters, and a fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 6)
        self.scale, self.slope = nn.Parameter(torch.randn(5)), nn.PReLU(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.slope(self.up(self.norm(x)) * self.scale))


class Mixture(DenseMixture):
    """The two best experts of each token, each run on its own tokens, and left out where it has none."""

    def __init__(self, expert: Callable[[], nn.Module] = Expert, best: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(expert() for _ in range(4))
        self.router, self.best = nn.Linear(6, 4), best

    def mixed(self, flat: Tensor) -> Tensor:
        share, chosen = self.router(flat).softmax(-1).topk(self.best)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                rows, places = torch.where(mask)
                mixed.index_add_(0, rows, (share[rows, places, None] * expert(flat[rows])).to(flat))
        return mixed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.mixed(x.reshape(-1, 6)).view_as(x))


class ByMask(Mixture):
    """One expert per token, read and written by a mask; an expert without tokens runs on none."""

    def mixed(self, flat: Tensor) -> Tensor:
        share, chosen = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mixed[chosen == i] = expert(flat[chosen == i])
        return mixed * share[:, None]


class ByOrder(Mixture):
    """Tokens are sorted by expert, cut into one piece per expert, and put back."""

    def mixed(self, flat: Tensor) -> Tensor:
        share, chosen = self.router(flat).softmax(-1).topk(self.best)
        order = chosen.flatten().argsort()
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        pieces = flat[order // self.best].split(sizes)
        out = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        out = out[order.argsort()] * share.reshape(-1, 1)
        return out.view(len(flat), self.best, 6).sum(1)


class Stacked(Mixture):
    """All experts in one parameter, of which the ones with tokens are read (Mixtral)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"up": torch.randn(4, 5, 6), "down": torch.randn(4, 6, 5)})

    def mixed(self, flat: Tensor) -> Tensor:
        share, chosen = self.router(flat).softmax(-1).topk(self.best)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        mixed = torch.zeros_like(flat)
        for expert in mask.sum((1, 2)).greater(0).nonzero():
            place, rows = torch.where(mask[expert].squeeze(0))
            h = F.linear(
                F.silu(F.linear(flat[rows], self.experts["up"][expert[0]])), self.experts["down"][expert[0]]
            )
            mixed.index_add_(0, rows, h * share[rows, place, None])
        return mixed


@pytest.mark.parametrize("count", [1, 4, 19])
@pytest.mark.parametrize(
    "build",
    [RoutedMixture, lambda: Mixture(best=1), Mixture, ByMask, ByOrder, Stacked],
    ids=["by index", "top 1", "top 2", "by mask", "by order", "stacked"],
)
def test_gradients_of_routed_experts_equal_one_backward_pass_per_sample(
    build: Callable[[], nn.Module], count: int
) -> None:
    model, batch = make(Case(build, tokens(5), classify), count)

    assert_equals_the_loop(model, batch)


def test_more_samples_than_one_pass_can_tell_take_another() -> None:
    model, batch = make(Case(RoutedMixture, tokens(2), classify), 67)

    assert_equals_the_loop(model, batch)


def send_everything_to(model: nn.Module, expert: int) -> None:
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(F.one_hot(torch.tensor(expert), len(model.router.bias)))


@pytest.mark.parametrize("build", [lambda: Mixture(best=1), ByMask], ids=["left out", "run on no rows"])
def test_an_expert_without_rows_has_gradient_zero(build: Callable[[], nn.Module]) -> None:
    model, batch = make(Case(build, tokens(5), classify))
    send_everything_to(model, 2)

    assert_equals_the_loop(model, batch, strict=True)

    found = collect_gradients(HookGradientComputer(model, resolve_task(classify)), batch)
    idle = [name for name in found if name.startswith("experts.") and not name.startswith("experts.2")]
    assert len(idle) == 3 * 8
    assert not any(bool(found[name].any()) for name in idle)


def test_experts_that_the_examined_sample_never_reached_are_exact_in_later_batches() -> None:
    model, batch = make(Case(Mixture, tokens(5), classify), 5)
    computer = HookGradientComputer(model, resolve_task(classify))
    alike = (torch.full((5, 5), 3), batch[1])
    collect_gradients(computer, alike)

    same(collect_gradients(computer, batch), model, batch, classify)


def test_the_coverage_says_how_routed_rows_were_found_and_who_had_none() -> None:
    model, batch = make(Case(lambda: Mixture(best=1), tokens(5), classify))
    send_everything_to(model, 1)

    coverage = HookGradientComputer(model, resolve_task(classify)).explain(batch)

    assert coverage["experts.1.up.weight"].why == "linear, rows found by their gradients"
    assert coverage["experts.1.slope.weight"].how == "fallback"
    assert coverage["experts.0.up.weight"].how == "zero"
    assert coverage["experts.0.up.weight"].why.startswith("no row of these samples reaches it")


class Scaled(torch.autograd.Function):
    """Hidden from everything but autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Opaque(nn.Module):
    def __init__(self, factors: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight).tanh()


class OpaqueLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.fixture
def _rules():
    @register_gradient_rule(Opaque)
    def scaled(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Tensor]:
        x = args[0]
        return {"weight": grad * (1 - (x * module.weight).tanh() ** 2) * x}

    @register_gradient_rule(OpaqueLinear)
    def linear(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Any]:
        return {"weight": (args[0].unsqueeze(1), grad.unsqueeze(1)), "bias": grad}

    yield
    unregister_gradient_rule(Opaque)
    unregister_gradient_rule(OpaqueLinear)


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize(
    "expert", [Opaque, lambda: OpaqueLinear(6, 6)], ids=["gradients per row", "factors per row"]
)
def test_a_rule_of_an_experts_module_gives_rows_that_are_summed_by_sample(
    expert: Callable[[], nn.Module],
) -> None:
    for build in (lambda: Mixture(expert), lambda: ByMask(expert)):
        model, batch = make(Case(build, tokens(5), classify), 5)
        assert_equals_the_loop(model, batch)
        send_everything_to(model, 1)
        assert_equals_the_loop(model, batch)


class Odd(nn.Module):
    """Operations whose rows no rule knows, or which have none: every entry is found by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.mix = nn.Bilinear(6, 6, 6), nn.Parameter(torch.randn(6, 6))
        self.power, self.left = nn.Parameter(torch.tensor([0.7])), nn.Parameter(torch.randn(6, 6))
        self.conv, self.up = nn.Conv1d(1, 2, 3, padding=1), nn.ConvTranspose1d(2, 1, 1)
        self.group, self.rms = nn.GroupNorm(1, 2), nn.RMSNorm(6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("nd,de->ne", self.pair(x, x.sin()), self.mix)
        z = self.up(self.group(self.conv(self.rms(x).unsqueeze(1)))).squeeze(1)
        w = (self.left @ x.t()).t() + x @ self.left
        return self.normed(y + torch.sigmoid(z) ** self.power - w.div(self.power, rounding_mode=None))


@pytest.mark.parametrize("count", [1, 5])
def test_operations_without_known_rows_are_exact_too(count: int) -> None:
    for build in (lambda: Mixture(Odd), lambda: ByMask(Odd)):
        model, batch = make(Case(build, tokens(3), classify), count)
        assert_equals_the_loop(model, batch)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.shift, self.row = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).mul_(self.scale).add_(self.shift)
        return h.relu_() - self.row.expand(len(x), -1)


def test_in_place_operations_and_expanded_parameters_of_an_expert_are_exact() -> None:
    model, batch = make(Case(lambda: ByMask(InPlace), tokens(5), classify), 5)

    assert_equals_the_loop(model, batch)


def test_a_checkpointed_expert_runs_again_in_every_backward_pass() -> None:
    class Recomputed(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model, batch = make(Case(lambda: Mixture(Recomputed), tokens(5), classify), 5)

    assert_equals_the_loop(model, batch)


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_below_the_experts_is_differentiated_more_than_once(
    recurrent: type[nn.RNNBase],
) -> None:
    class AfterRecurrence(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = recurrent(6, 6, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.rnn(self.embed(ids))[0]
            return self.head(x + self.mixed(x.reshape(-1, 6)).view_as(x))

    model, batch = make(Case(AfterRecurrence, tokens(4), classify), 5)

    assert_equals_the_loop(model, batch)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, **settings: Any) -> None:
        super().__init__()
        self.rnn, self.out = kind(6, 5, **settings), nn.Linear(settings.get("proj_size", 5), 6)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, x.cos(), x.sin()], int(self.rnn.batch_first))
        return self.out(self.rnn(steps)[0].select(int(self.rnn.batch_first), 2))


@pytest.mark.parametrize(
    "expert",
    [
        Recurrent,
        lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2),
        lambda: Recurrent(nn.LSTM, proj_size=2),
    ],
    ids=["GRU", "LSTM", "LSTM with a projection"],
)
def test_recurrent_experts_are_exact(expert: Callable[[], nn.Module]) -> None:
    model, batch = make(Case(lambda: Mixture(expert), tokens(3), classify), 6)

    assert_equals_the_loop(model, batch)


def test_sequences_that_are_parts_of_samples_are_summed_by_sample() -> None:
    """Sentences of a text go through a recurrent layer as if they were samples, along either axis."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            steps = self.first(x.flatten(0, 1))[0].transpose(0, 1)
            return self.second(steps)[0][-1].unflatten(0, x.shape[:2])

    torch.manual_seed(0)
    assert_equals_the_loop(Text().double(), (torch.randn(4, 5, 3, 3, dtype=torch.float64),), squares)


def test_chunks_of_a_routed_batch_give_the_same_rows() -> None:
    model, batch = make(Case(Mixture, tokens(5), classify), 7)

    assert_equals_the_loop(model, batch, chunk_size=3)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, None), (torch.float32, torch.bfloat16)])
def test_low_precision_finds_the_same_rows(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    model, batch = make(Case(lambda: Mixture(best=1), tokens(5), classify), 20, dtype)
    send_everything_to(model, 2)  # rounding moves no token to another expert
    computer = HookGradientComputer(model, resolve_task(classify), autocast_dtype=autocast)

    found = collect_gradients(computer, batch)

    for name, value in by_loop(model, classify, batch).items():
        error = float((found[name] - value).norm())
        assert error <= (1e-5 if autocast is None else 0.1) * float(value.norm()) + 1e-5, name


def test_auto_takes_hooks_for_routed_experts() -> None:
    model, batch = make(Case(Mixture, tokens(5), classify))

    assert choose_gradient_computer(model, resolve_task(classify), batch)[0] == "hook"


@pytest.mark.parametrize(("build", "passes"), [(DenseMixture, 1), (RoutedMixture, 2)])
def test_only_models_that_route_pay_for_more_backward_passes(
    build: Callable[[], nn.Module], passes: int
) -> None:
    """Up to 64 samples have numbers of one digit, so there is one weighted pass and the plain one."""
    model, batch = make(Case(build, tokens(4), classify), 20)
    computer = HookGradientComputer(model, resolve_task(classify), self_check=False)
    collect_gradients(computer, batch)  # the model is examined
    seen: list[int] = []
    handle = model.head.register_forward_hook(
        lambda _, __, out: out.register_hook(lambda _: seen.append(1)) and None
    )

    collect_gradients(computer, batch)

    handle.remove()
    assert len(seen) == passes


# Samples in another order, or of unequal lengths


def squared(call: ModelCall, batch: Any) -> Tensor:
    return call(*batch).flatten(1).square().sum(1)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(3, 4), nn.Linear(4, 3)

    def rows(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).tanh())


class Sorted(Layers):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        return self.rows(x[order])[order.argsort()]


class Packed(Layers):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        mapped = packed._replace(data=self.rows(packed.data))
        return pad_packed_sequence(mapped, batch_first=True, total_length=5)[0]


class Cut(Layers):
    """Rows of all samples one after the other, cut by numbers that Python reads."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.rows(torch.cat([x[i, : int(n)] for i, n in enumerate(lengths)]))
        owner = torch.repeat_interleave(torch.arange(len(x)), lengths)
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, owner, hidden)


class Masked(Layers):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        return torch.zeros_like(x).masked_scatter(mask[..., None], self.rows(x[mask]))


class SortedToPack(nn.Module):
    """Sorted by hand, because a packed sequence wants falling lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 3, batch_first=True, bidirectional=True), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(x[order], lengths, batch_first=True)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)
        return self.out(y)[order.argsort()]


class Tiled(Layers):
    """Unequal samples by what no operation tells: the sum of the lengths is on no tensor's shape but the rows'."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        places = [(i, t) for i in range(len(x)) for t in range(2 + (len(x) > 3 and i == 1))]
        i, t = torch.tensor(places).t()
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, i, self.rows(x[i, t]))


@pytest.mark.parametrize("lengths", [[5, 4, 2, 3], [2, 2, 1, 3], [1, 5, 3, 4], [1, 1, 1, 1]])
@pytest.mark.parametrize("build", [Sorted, Packed, Cut, Masked, SortedToPack])
def test_sorted_and_ragged_samples_are_exact_whatever_their_lengths(
    build: Callable[[], nn.Module], lengths: list[int]
) -> None:
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(4, 5, 3, dtype=torch.float64)

    assert_equals_the_loop(model, (x, torch.tensor(lengths)), squared)


def test_rows_of_another_number_than_examined_are_found_by_their_gradients() -> None:
    torch.manual_seed(0)
    model, x = Tiled().double(), torch.randn(5, 5, 3, dtype=torch.float64)
    batch = (x, torch.ones(5))
    computer = HookGradientComputer(model, resolve_task(squared), self_check=False)

    found = collect_gradients(computer, batch)

    rows = {name: torch.zeros_like(value) for name, value in found.items()}
    for i in range(5):
        out = squared(ModelCall(model), batch)[i]
        for name, grad in zip(rows, torch.autograd.grad(out, list(model.parameters())), strict=True):
            rows[name][i] = grad
    for name, value in rows.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


# What is refused


def test_routed_rows_that_mix_samples_are_refused_by_name() -> None:
    class Normalised(Expert):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.down(y - y.mean(0))

    model, batch = make(Case(lambda: ByMask(Normalised), tokens(5), classify))

    with pytest.raises(
        UnsupportedModelError, match=r"linear, which uses \['experts.*several samples depends"
    ):
        assert_equals_the_loop(model, batch, grad_wrt="experts.*")


def test_a_scalar_mixed_over_routed_rows_is_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.slope
            return y - y.mean(0)

    model, batch = make(Case(lambda: ByMask(Centred), tokens(5), classify))

    with pytest.raises(UnsupportedModelError, match=r"mul, which uses .*several samples depends"):
        assert_equals_the_loop(model, batch, grad_wrt="experts.*")


def test_a_limit_on_the_rows_of_an_expert_is_found_by_the_self_check() -> None:
    class Limited(ByMask):
        def mixed(self, flat: Tensor) -> Tensor:
            chosen = self.router(flat).argmax(-1)
            mixed = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().squeeze(1)[:6]
                mixed[rows] = expert(flat[rows])
            return mixed

    model, batch = make(Case(Limited, tokens(5), classify), 6)
    send_everything_to(model, 0)

    with pytest.raises(UnsupportedModelError, match="self-check"):
        assert_equals_the_loop(model, batch)


def test_a_gradient_that_is_not_finite_cannot_tell_its_sample() -> None:
    class Root(Expert):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.down(y + (y - y.detach()).sqrt())

    model, batch = make(Case(lambda: ByMask(Root), tokens(5), classify))

    with pytest.raises(UnsupportedModelError, match="is not finite"):
        assert_equals_the_loop(model, batch)


def test_one_use_with_and_without_samples_is_refused_in_a_routed_model() -> None:
    class Both(RoutedMixture):
        def forward(self, ids: Tensor) -> Tensor:
            shared = self.embed(torch.arange(4).unsqueeze(0)).mean()
            return super().forward(ids) * shared

    model, batch = make(Case(Both, tokens(4), classify))

    with pytest.raises(UnsupportedModelError, match="runs on samples and on what all samples share"):
        assert_equals_the_loop(model, batch)


# The parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 64, 65, 300])
def test_a_code_tells_the_sample_of_every_row(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    owners = torch.randint(count, (50,), generator=generator)
    rows = torch.randn(50, 7, generator=generator).to(dtype)
    rows[3] = 0
    code = SampleCode.for_gradients(count, [dtype])
    tagged = [sketch(rows * weights[owners, None]) for weights in code.weights(torch.zeros(1, dtype=dtype))]

    found = code.owners(sketch(rows), tagged, dtype)

    owners[3] = -1
    assert found is not None
    assert found.tolist() == owners.tolist()


def test_a_row_of_two_samples_has_no_owner_unless_it_is_rounding_noise() -> None:
    code = SampleCode(5, base=16)
    (weights,) = code.weights(torch.zeros(1, dtype=torch.float64))
    one, other = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)

    def owners(size: float) -> Tensor | None:
        plain = torch.stack([one, size * (one + other)])
        tagged = torch.stack([weights[1] * one, size * (weights[2] * one + weights[4] * other)])
        return code.owners(plain, [tagged], torch.float64)

    noise = owners(1e-15)
    assert owners(1.0) is None
    assert noise is not None
    assert noise.tolist() == [1, -1]


def test_rows_are_put_together_by_sample_with_the_first_again_where_there_are_fewer() -> None:
    arranged = Arrangement.of(torch.tensor([4, 1, -1, 4, 4]))

    assert arranged.samples.tolist() == [1, 4]
    assert arranged.rows.tolist() == [1, 1, 1, 0, 3, 4]
    assert arranged.real.tolist() == [True, False, False, True, True, True]
    assert arranged.take_gradients(torch.ones(5)).tolist() == [1, 0, 0, 1, 1, 1]
    assert arranged.placed(torch.ones(2), 5).tolist() == [0, 1, 0, 0, 1]


class Joined(nn.Module):
    """Rows in the order of a value, each beside a row that is made of a parameter for as many rows as there are."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.row, self.joined, self.made = nn.Parameter(torch.randn(1, 2)), nn.Linear(6, 3), made

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        rows = {
            "expanded": lambda: self.row.expand(len(x), -1),
            "multiplied": lambda: torch.ones(len(x), 1, dtype=x.dtype) @ self.row,
            "looked up": lambda: F.embedding(torch.zeros(len(x), dtype=torch.long), self.row),
        }[self.made]()
        return torch.tanh(self.joined(torch.cat([x[order], rows], 1)))[order.argsort()]


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("made", ["expanded", "multiplied", "looked up"])
def test_a_row_that_is_made_of_a_parameter_goes_with_the_sample_it_is_put_beside(
    made: str, self_check: bool
) -> None:
    torch.manual_seed(0)
    model, batch = Joined(made).double(), (torch.randn(7, 4, dtype=torch.float64),)

    assert_equals_the_loop(model, batch, squares, self_check=self_check)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_refused_by_name() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nested.as_nested_tensor([row[: 1 + i % 2] for i, row in enumerate(self.layer(x))])
            return rows.to_padded_tensor(0.0).flatten(1)

    with pytest.raises(UnsupportedModelError, match=r"nested tensor \(torch.nested\)"):
        collect_gradients(
            HookGradientComputer(Nested().double(), resolve_task(squares)),
            (torch.randn(3, 2, 4, dtype=torch.float64),),
        )


def test_leaves_are_those_of_tree_flatten() -> None:
    x = torch.ones(2)
    top = x.topk(1)
    nested = (
        (x, [1, 2.0, None, "a"], {"b": x, "a": (x, top)}),
        OrderedDict(k=[x]),
        slice(0, x),
        x.shape,
        ...,
    )
    found, expected = leaves_of(nested), tree_flatten(nested)[0]
    assert len(found) == len(expected)
    assert all(a is b for a, b in zip(found, expected, strict=True))
