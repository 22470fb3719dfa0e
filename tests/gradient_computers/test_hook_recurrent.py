"""Recurrent layers: against one backward pass per sample, and as an operation against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from models import assert_exact, rows, wavy
from test_hook_rules import COUNTS, MANY, Drawn, check, drawn, normal
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.gradient_computers.hooks.rules.recurrent import run_recurrent
from trak_lite.modelout_functions import resolve_task

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN with tanh": partial(nn.RNN, nonlinearity="tanh"),
    "RNN with ReLU": partial(nn.RNN, nonlinearity="relu"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Recurrent(nn.Module):
    """A recurrent layer over ``(B, T, d)``, all or some of whose results count."""

    def __init__(
        self,
        kind: Callable[..., nn.RNNBase],
        packing: str = "no",
        start: str = "zero",
        reads: str = "everything",
        **options: Any,
    ) -> None:
        super().__init__()
        self.rnn = kind(**{"input_size": 4, "hidden_size": 3, "batch_first": True, **options})
        self.scale = nn.Parameter(torch.ones(self.rnn.input_size))
        self.packing, self.start, self.reads = packing, start, reads
        states = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.first = nn.Parameter(torch.ones(states, 1, self.rnn.hidden_size)) if start == "learned" else None

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        axis, first = self.rnn.batch_first, self.first_state(x, state)
        x, total = x * self.scale, x.shape[1]
        x = x if axis else x.transpose(0, 1)
        if self.packing != "no":
            ends = torch.full_like(lengths, total) if self.packing == "sorted" else lengths.clamp(max=total)
            x = pack_padded_sequence(x, ends, axis, enforce_sorted=self.packing == "sorted")
        out, last = self.call(x, first)
        if self.packing != "no":
            out = pad_packed_sequence(out, axis, total_length=total)[0]
        states = [value.transpose(0, 1) for value in (last if isinstance(last, tuple) else (last,))]
        out = out if axis else out.transpose(0, 1)
        found = {"everything": [out, *states], "outputs": [out], "last": states[-1:]}[self.reads]
        return torch.cat([value.flatten(1) for value in found], 1)

    def call(self, x: Any, first: Any) -> Any:
        return self.rnn(x, first)

    def first_state(self, x: Tensor, state: Tensor | None) -> Any:
        if self.start == "zero":
            return None
        first = state.transpose(0, 1) if self.first is None else self.first.expand(-1, len(x), -1)
        first = (first * self.scale[0]).contiguous()  # depends on a parameter, and if given on the sample
        return (first, first.sin()) if isinstance(self.rnn, nn.LSTM) else first


@st.composite
def recurrent_layers(draw: st.DrawFn, kind: str) -> Drawn:
    bidirectional, start = draw(st.booleans()), draw(st.sampled_from(["zero", "given", "learned"]))
    layers, hidden, width = (draw(st.integers(1, 3)) for _ in range(3))
    count, length = draw(COUNTS), draw(st.integers(1, 4))
    model = partial(
        Recurrent,
        KINDS[kind],
        packing=draw(st.sampled_from(["no", "sorted", "unsorted"])),
        start=start,
        reads=draw(st.sampled_from(["everything", "everything", "outputs", "last"])),
        input_size=width,
        hidden_size=hidden,
        num_layers=layers,
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bidirectional=bidirectional,
    )
    lengths = partial(torch.randint, 1, length + 1, (count,))
    state = (normal(count, layers * (2 if bidirectional else 1), hidden),) if start == "given" else ()
    return Drawn(model, (normal(count, length, width), lengths, *state))


@every_kind
@drawn(max_examples=5)
@given(data=st.data())
def test_a_recurrent_layer_at_any_options_equals_the_loop(kind: str, data: st.DataObject) -> None:
    check(data.draw(recurrent_layers(kind)), only=data.draw(st.none() | st.integers(0, 9)))


@every_kind
@drawn(max_examples=2 * MANY)
@given(data=st.data())
def test_a_recurrent_layer_at_many_options_equals_the_loop(kind: str, data: st.DataObject) -> None:
    check(data.draw(recurrent_layers(kind)), only=data.draw(st.none() | st.integers(0, 9)))


@every_kind
@pytest.mark.parametrize("packing", ["unsorted", "no"])
def test_the_last_state_of_two_layers_and_directions(kind: str, packing: str) -> None:
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True}
    model = Recurrent(KINDS[kind], packing=packing, reads="last", **options).double()

    computer = assert_exact(model, (rows(4, 5), torch.tensor([3, 5, 1, 4])))
    assert {line.how for line in computer.explain((rows(4, 5), torch.tensor([3, 5, 1, 4])))} == {"rule"}


def test_an_lstm_with_projections_falls_back_and_layers_may_share_their_weights() -> None:
    torch.manual_seed(0)
    projected = Recurrent(nn.LSTM, num_layers=2, proj_size=2, bidirectional=True).double()
    computer = assert_exact(projected, (rows(3, 4),))
    assert computer.explain((rows(3, 4),))["rnn.weight_ih_l0"].how == "fallback"

    shared = Recurrent(nn.GRU, hidden_size=4, num_layers=2).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(shared.rnn, f"{name}_l1", getattr(shared.rnn, f"{name}_l0"))
    assert_exact(shared, (rows(3, 4),))


class InPlace(Recurrent):
    """Changes what the layer read, or what it returned, in place; or returns a slope of it."""

    changed = "output"

    def call(self, x: Any, first: Any) -> Any:
        if self.changed == "differentiated":
            x = x.detach().requires_grad_()
        outputs, state = self.rnn(x)
        if self.changed == "differentiated":
            (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            return slope, state
        (x if self.changed == "input" else outputs).mul_(2)
        return outputs, state


@every_kind
def test_outputs_may_be_changed_in_place_but_not_inputs_nor_be_derived_twice(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = InPlace(KINDS[kind], reads="outputs").double(), (rows(3, 4),)
    assert_exact(model, batch)

    for self_check in (True, False):
        computer = HookGradientComputer(model, resolve_task(wavy), self_check=self_check)
        model.changed = "input"
        with pytest.raises(UnsupportedModelError, match="changed in place after the layer read it"):
            collect_gradients(computer, batch)
        model.changed = "differentiated"
        computer = HookGradientComputer(model, resolve_task(wavy), self_check=self_check)
        with pytest.raises(UnsupportedModelError, match="create_graph=True"):
            collect_gradients(computer, batch)


@every_kind
def test_autocast_changes_little(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # oneDNN's LSTM in bfloat16 needs AVX-512
    torch.manual_seed(0)
    model, batch = Recurrent(KINDS[kind]), (rows(3, 5).float(),)
    task = resolve_task(lambda call, batch: call(*batch).sin().sum(1))

    half = collect_gradients(HookGradientComputer(model, task, autocast_dtype=torch.bfloat16), batch)

    for name, value in collect_gradients(HookGradientComputer(model, task), batch).items():
        assert half[name].dtype == torch.float32
        assert (half[name] - value).norm() < 0.05 * value.norm(), name


# The recurrence as an operation

OPERATIONS = {
    "LSTM": ("lstm", torch.lstm),
    "GRU": ("gru", torch.gru),
    "RNN with tanh": ("tanh", torch.rnn_tanh),
    "RNN with ReLU": ("relu", torch.rnn_relu),
}


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@every_kind
def test_results_and_all_gradients_equal_those_of_torch(kind: str, packed: bool, bidirectional: bool) -> None:
    """Weights that autograd is to differentiate get their summed gradient: nothing is lost in silence."""
    torch.manual_seed(0)
    rnn = KINDS[kind](3, 2, 2, bidirectional=bidirectional, batch_first=True).double()
    shape, weights = (4 if bidirectional else 2, 4, 2), list(rnn.parameters())
    state = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    state = state if kind == "LSTM" else state[:1]
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    if packed:
        x, sizes, *_ = pack_padded_sequence(x, torch.tensor([5, 4, 4, 1]), batch_first=True)
    x.requires_grad_()
    rest = [tuple(state) if kind == "LSTM" else state[0], weights, True, 2, 0.0, False, bidirectional]
    args = [x, sizes, *rest] if packed else [x, *rest, True]
    wanted = [x, *state, *weights]

    def summed(results: tuple[Tensor, ...]) -> Tensor:
        return sum((i + value * value.cos()).sin().sum() for i, value in enumerate(results, 1))

    name, operation = OPERATIONS[kind]
    results = run_recurrent(name, args, num_samples=4, order=None, tap=lambda value, *_: value)
    expected = tuple(operation(*args))
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(summed(expected), wanted)
    found = torch.autograd.grad(summed(results), wanted, retain_graph=True)
    torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-10)
    again = torch.autograd.grad(summed(results), wanted)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
