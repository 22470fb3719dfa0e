"""Whose rows are whose: moved by integers, cut by Python, dropped; and what ordinary models do not pay for it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, assert_equals_autograd, hooked, make, wavy
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from trak_lite.data.batches import take_rows
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import (
    HookGradientComputer,
    collect_gradients,
)
from trak_lite.gradient_computers.hooks.owners import SampleCode
from trak_lite.gradient_computers.hooks.plan.probe import Plan, make_plan
from trak_lite.modelout_functions import ModelCall


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 4))
        self.embed = nn.Embedding(9, 4)
        self.function = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


made = functools.partial(hooked, Net)


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(
        count, *(shape or (4,)), generator=torch.Generator().manual_seed(count), dtype=torch.float64
    )


def assert_equals_the_loop(model: nn.Module, computer: HookGradientComputer, batch: Any) -> None:
    assert_equals_autograd(model, collect_gradients(computer, batch), batch)


def plan_of(
    model: nn.Module, batch: Any, evaluate: Callable[..., Tensor] = wavy, call: Any = ModelCall
) -> Plan:
    kept = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return make_plan(model, kept, batch, lambda part: evaluate(call(model), part))


# Rows moved by integers


def dispatched(s: Net, x: Tensor, expert: Tensor) -> Tensor:
    """Switch-style: an expert's rows are written into a buffer one after the other."""
    h, hot = s.a(x), F.one_hot(expert, 3)
    place = ((hot.cumsum(0) - 1) * hot).sum(1)
    buffer = h.new_zeros(3, len(x), 4)
    buffer[expert, place] = h
    return s.c(torch.bmm(buffer, s.experts)[expert, place].tanh())


def dispatched_by_view(s: Net, x: Tensor, expert: Tensor) -> Tensor:
    """The same, written through a view of the buffer."""
    h, hot = s.a(x), F.one_hot(expert, 3)
    place = ((hot.cumsum(0) - 1) * hot).sum(1)
    buffer = h.new_zeros(3, len(x), 4)
    buffer.view(-1, 4)[expert * len(x) + place] = h
    return s.c(torch.bmm(buffer, s.experts)[expert, place].tanh())


def dispatched_by_product(s: Net, x: Tensor, expert: Tensor) -> Tensor:
    """The same by matrix products with zeros and ones."""
    h, hot = s.a(x), F.one_hot(expert, 3)
    place = ((hot.cumsum(0) - 1) * hot).sum(1)
    where = (hot[:, :, None] * F.one_hot(place, len(x))[:, None, :]).to(h)
    buffer = torch.einsum("bec,bd->ecd", where, h)
    return s.c(torch.einsum("bec,ecd->bd", where, torch.bmm(buffer, s.experts)).tanh())


def ranks(keys: Tensor) -> Tensor:
    i = torch.arange(len(keys))
    before = (keys[:, None] == keys) & (i[:, None] > i)
    return ((keys[:, None] > keys) | before).sum(1)


def ranked(s: Net, x: Tensor, keys: Tensor) -> Tensor:
    rank = ranks(keys)
    return s.c(s.a(torch.zeros_like(x).index_copy(0, rank, x)).tanh()[rank])


def gathered(s: Net, x: Tensor, keys: Tensor) -> Tensor:
    rank = ranks(keys)
    index = rank[:, None].expand(-1, 4)
    moved = torch.zeros_like(x).scatter(0, index, x)
    return s.c(s.a(moved).tanh().gather(0, index))


def looked_up(s: Net, x: Tensor, keys: Tensor) -> Tensor:
    rank = ranks(keys)
    back = torch.zeros_like(rank).scatter(0, rank, torch.arange(len(x)))
    return s.c(s.a(F.embedding(back, x)).tanh().index_select(0, rank))


def taken(s: Net, x: Tensor, keys: Tensor) -> Tensor:
    rank = ranks(keys)
    moved = torch.zeros_like(x).index_put((rank,), x)
    index = rank[:, None].expand(-1, 4)
    return s.c(torch.take_along_dim(s.a(moved).tanh(), index, 0))


def taken_flat(s: Net, x: Tensor, keys: Tensor) -> Tensor:
    rank = ranks(keys)
    places = rank[:, None] * 4 + torch.arange(4)
    moved = torch.zeros_like(x).put_(places, x)
    return s.c(s.a(moved).tanh().take(places))


def sorted_by_python(s: Net, x: Tensor, keys: Tensor) -> Tensor:
    order = sorted(range(len(x)), key=lambda i: keys[i].item())
    return s.c(s.a(x[order]).tanh()[[order.index(i) for i in range(len(x))]])


MOVING = {
    f.__name__: f
    for f in (
        dispatched,
        dispatched_by_view,
        dispatched_by_product,
        ranked,
        gathered,
        looked_up,
        taken,
        taken_flat,
        sorted_by_python,
    )
}


@pytest.mark.parametrize("forward", MOVING.values(), ids=MOVING.keys())
def test_rows_that_integers_move_are_exact_in_batches_after_one_that_hides_it(
    forward: Callable[..., Tensor],
) -> None:
    model, computer = made(forward)
    assert_equals_the_loop(model, computer, (rows(8), torch.zeros(8, dtype=torch.long)))

    for seed in (1, 2):
        keys = torch.randint(3, (8,), generator=torch.Generator().manual_seed(seed))
        assert_equals_the_loop(model, computer, (rows(8), keys))


def compacted(s: Net, x: Tensor, mask: Tensor) -> Tensor:
    """As many rows as ever, whatever the mask."""
    flat, mask = s.a(x).flatten(0, 1), mask.flatten()
    index = torch.nonzero_static(mask, size=len(mask), fill_value=0)[:, 0]
    kept = (torch.arange(len(mask)) < mask.sum()).unsqueeze(1)
    return torch.zeros_like(flat).index_add(0, index, s.b(flat[index]).tanh() * kept).view_as(x)


def test_rows_compacted_to_a_fixed_number_are_exact() -> None:
    model, computer = made(compacted)
    assert_equals_the_loop(model, computer, (rows(4, 3, 4), torch.ones(4, 3, dtype=torch.bool)))

    mask = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    assert_equals_the_loop(model, computer, (rows(4, 3, 4), mask))


# Rows cut by what Python reads


def cut_by_numbers(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return _summed(s, torch.cat([x[i][:n] for i, n in enumerate(lengths.tolist())]), lengths)


def cut_by_tensors(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return _summed(s, torch.cat([x[i, : lengths[i]] for i in range(len(x))]), lengths)


def cut_by_sizes(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return _summed(s, torch.cat([x[i].narrow(0, 0, lengths[i]) for i in range(len(x))]), lengths)


def _summed(s: Net, pieces: Tensor, lengths: Tensor) -> Tensor:
    owner = torch.searchsorted(lengths.cumsum(0), torch.arange(len(pieces)), right=True)
    hidden = s.c(s.a(pieces).tanh())
    return torch.zeros(len(lengths), 3, dtype=hidden.dtype).index_add(0, owner, hidden)


@pytest.mark.parametrize("forward", [cut_by_numbers, cut_by_tensors, cut_by_sizes])
def test_ragged_rows_are_exact_where_the_first_samples_had_one_each(forward: Callable[..., Tensor]) -> None:
    model, computer = made(forward)
    assert_equals_the_loop(model, computer, (rows(6, 3, 4), torch.ones(6, dtype=torch.long)))

    for lengths in ([1, 1, 2, 0, 1, 1], [1, 2, 0, 1, 2, 0], [1, 0, 2, 1, 1, 1]):
        assert_equals_the_loop(model, computer, (rows(6, 3, 4), torch.tensor(lengths)))


# What ordinary models pay


def test_no_measured_model_pays_for_weighted_passes_or_a_check_of_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    measured = importlib.import_module("benchmarks.bench_gradients").CASES
    torch.manual_seed(0)
    for name, (build, batch, evaluate) in measured.items():
        plan = plan_of(build().eval(), take_rows(batch(), slice(0, 1)), evaluate, lambda model: model)

        assert (plan.routed, plan.flattened, plan.chooses_in_python) == (False, False, False), name


@pytest.mark.parametrize("name", CASES)
def test_no_whole_model_without_routing_pays_for_weighted_passes(name: str) -> None:
    case = CASES[name]
    model, batch = make(case)

    assert not plan_of(model, batch, case.output).routed


def last_token(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return s.c(s.a(x)[torch.arange(len(x)), lengths - 1])


def last_token_gathered(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return s.c(s.a(x).gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1))


def first_of_a_range(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return s.c(s.a(x)[list(range(len(x))), lengths - 1])


def words(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return s.c(s.embed(lengths) + s.embed.weight[lengths] + s.embed.weight.index_select(0, lengths))


def recurrent(s: Net, x: Tensor, lengths: Tensor) -> Tensor:
    if not hasattr(s, "rnn"):
        s.rnn = nn.LSTM(4, 4, batch_first=True).double()
    packed = pack_padded_sequence(s.a(x), lengths, batch_first=True, enforce_sorted=False)
    return s.c(s.rnn(packed)[1][0][-1])


@pytest.mark.parametrize("forward", [last_token, last_token_gathered, first_of_a_range, words, recurrent])
def test_an_index_that_moves_no_samples_costs_nothing(forward: Callable[..., Tensor]) -> None:
    model, computer = made(forward)
    batch = (rows(4, 3, 4), torch.tensor([2, 3, 1, 2]))
    model(*batch)

    assert not plan_of(model, batch).routed
    assert_equals_the_loop(model, computer, batch)


def test_what_the_output_function_moves_after_the_last_parameter_costs_nothing() -> None:
    def evaluate(call: ModelCall, batch: Any) -> Tensor:
        x, labels = batch
        logits = call(x).log_softmax(-1)
        order = labels.argsort(stable=True)
        sizes = labels.tolist()
        picked = logits[order][order.argsort()][torch.arange(len(x)), labels]
        return picked + logits.gather(1, labels[:, None])[:, 0] * len(sizes) / len(x)

    model, _ = made(lambda s, x: s.c(s.a(x)))

    assert not plan_of(model, (rows(4), torch.tensor([2, 0, 1, 2])), evaluate).routed


# What is refused


def limited(s: Net, x: Tensor, expert: Tensor) -> Tensor:
    """Experts that take the first three of their samples."""
    h = s.a(x)
    out = torch.zeros_like(h)
    for i in range(3):
        chosen = (expert == i).nonzero()[:, 0][:3]
        out = out.index_add(0, chosen, s.b(h[chosen]).tanh())
    return out


def test_after_a_failed_check_no_later_batch_is_taken() -> None:
    model, computer = made(limited)
    fits = (rows(6), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert_equals_the_loop(model, computer, fits)
    overfull = (rows(6), torch.tensor([0, 0, 0, 0, 1, 2]))
    messages = []
    for _ in range(6):
        try:
            collect_gradients(computer, overfull)
        except UnsupportedModelError as error:
            messages.append(str(error))
    assert messages[0].startswith("The self-check failed")

    for batch in (fits, take_rows(fits, slice(0, 2))):
        with pytest.raises(UnsupportedModelError, match="The self-check failed for an earlier batch"):
            collect_gradients(computer, batch)

    computer.load_model_params(model)
    assert_equals_the_loop(model, computer, fits)


def test_one_sample_is_checked_in_batches_number_one_two_four_and_eight() -> None:
    model, computer = made(lambda s, x: s.c(s.a(x)))
    runs: list[int] = []
    model.register_forward_pre_hook(lambda _, args: runs.append(len(args[0])))
    checked = []
    for number in range(1, 20):
        runs.clear()
        collect_gradients(computer, (rows(5),))
        if 1 in runs:
            checked.append(number)

    assert checked == [1, 2, 4, 8, 16]


def test_a_row_in_which_two_samples_cancel_has_no_owner() -> None:
    code = SampleCode(2)
    (weights,) = code.weights(torch.zeros(1))
    plain = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    tagged = torch.stack([(weights[0] - weights[1]) * torch.ones(2), weights[1] * plain[1]])

    assert code.owners(plain, [tagged], torch.float32) is None
