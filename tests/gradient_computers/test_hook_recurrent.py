"""Recurrent layers: against one backward pass per sample, and as an operation against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from models import by_loop
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.gradient_computers.hooks.rules.recurrent import run_recurrent
from trak_lite.modelout_functions import resolve_task

quick = settings(max_examples=8, deadline=None, derandomize=True, database=None)

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN with tanh": nn.RNN,
    "RNN with ReLU": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPERATIONS = {
    "LSTM": ("lstm", torch.lstm),
    "GRU": ("gru", torch.gru),
    "RNN with tanh": ("tanh", torch.rnn_tanh),
    "RNN with ReLU": ("relu", torch.rnn_relu),
}
LENGTHS = {"padded": None, "packed in order": [5, 4, 4, 1], "packed in another order": [3, 5, 1, 4]}


class Reader(nn.Module):
    """A recurrent layer over padded or packed sequences, and the parts of its result that f depends on."""

    def __init__(self, rnn: nn.RNNBase, reads: str = "outputs and states", *, ordered: bool = False) -> None:
        super().__init__()
        self.rnn = rnn
        self.reads = reads
        self.ordered = ordered

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return ``(B, d)`` of sequences ``(B, 5, 3)``."""
        first = self.rnn.batch_first
        x = x if first else x.transpose(0, 1)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.ordered)
        outputs, state = self.call(x)
        if lengths is not None:
            outputs = pad_packed_sequence(outputs, batch_first=first, total_length=5)[0]
        outputs = outputs if first else outputs.transpose(0, 1)
        states = state if isinstance(state, tuple) else (state,)
        found = [outputs.flatten(1)] if "outputs" in self.reads else []
        if "state" in self.reads:
            found += [value.transpose(0, 1).flatten(1) for value in states]
        if "cell" in self.reads:
            found.append(states[1].transpose(0, 1).flatten(1))
        return torch.cat(found, 1)

    def call(self, x: Any) -> Any:
        return self.rnn(x)


def total(model: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    """Return a number per sample in which every entry of the result counts differently: ``(B,)``."""
    out = model(*batch)
    return (out * torch.cos(3 * out + torch.arange(out.shape[1]))).sum(1)


def assert_equals_the_loop(model: nn.Module, *batch: Tensor, how: str = "rule", output: Any = total) -> None:
    """Compare with the loop, and the way that the gradients came with the one that is expected."""
    model = model.double().eval()
    for p in model.parameters():
        nn.init.normal_(p)
    computer = HookGradientComputer(model, resolve_task(output))

    found = collect_gradients(computer, batch)

    expected = by_loop(model, output, batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
    coverage = computer.explain(batch)
    assert {line.how for line in coverage} <= {how, "zero"}, str(coverage)


def sequences(count: int) -> Tensor:
    return torch.randn(count, 5, 3, dtype=torch.float64)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("kind", KINDS)
@quick
@given(
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    hidden=st.integers(1, 4),
    reads=st.sampled_from(["outputs", "state", "outputs and states"]),
)
def test_every_form_of_a_recurrent_layer(
    kind: str, lengths: list[int] | None, hidden: int, reads: str, **options: Any
) -> None:
    torch.manual_seed(0)
    layers = options.pop("layers")
    model = Reader(KINDS[kind](3, hidden, layers, **options), reads, ordered=lengths == [5, 4, 4, 1])

    assert_equals_the_loop(model, sequences(4), *([torch.tensor(lengths)] if lengths else []))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_samples(kind: str, count: int) -> None:
    torch.manual_seed(0)
    model, batch = Reader(KINDS[kind](3, 2, batch_first=True)).double(), (sequences(count),)

    found = collect_gradients(HookGradientComputer(model, resolve_task(total)), batch)

    rows = by_loop(model, total, batch) if count else {}
    for name, p in model.named_parameters():
        expected = rows.get(name, p.detach().new_zeros(0, *p.shape))
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_gradient_that_comes_by_the_cell_state_alone(
    bidirectional: bool, lengths: list[int] | None
) -> None:
    torch.manual_seed(0)
    model = Reader(nn.LSTM(3, 2, 2, bidirectional=bidirectional, batch_first=True), "cell")

    assert_equals_the_loop(model, sequences(4), *([torch.tensor(lengths)] if lengths else []))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_with_projections_falls_back(bidirectional: bool) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, 2, proj_size=2, bidirectional=bidirectional, batch_first=True)

    assert_equals_the_loop(Reader(lstm), sequences(3), how="fallback")


class FromALearnedState(Reader):
    """The first state is a parameter, the same for every sample, or made of the sample by a linear layer."""

    def __init__(self, rnn: nn.RNNBase, *, shared: bool) -> None:
        super().__init__(rnn)
        self.shared = shared
        self.start = nn.Parameter(torch.zeros(2, 1, rnn.hidden_size)) if shared else nn.Linear(3, 4)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        self.first = x[:, 0]
        return super().forward(x, lengths)

    def call(self, x: Any) -> Any:
        if self.shared:
            state = self.start.expand(-1, len(self.first), -1)
        else:
            state = self.start(self.first).view(-1, 2, 2).transpose(0, 1)
        state = state.contiguous()
        return self.rnn(x, (state, state.sin()) if isinstance(self.rnn, nn.LSTM) else state)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_state_that_depends_on_parameters(kind: str, shared: bool, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    model = FromALearnedState(KINDS[kind](3, 2, bidirectional=True, batch_first=True), shared=shared)

    assert_equals_the_loop(model, sequences(4), *([torch.tensor(lengths)] if lengths else []))


@pytest.mark.parametrize("kept", ["rnn.weight_ih_l0", "rnn.weight_hh_l1", "rnn.bias_hh_l0"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_one_parameter_of_the_layer(kind: str, kept: str) -> None:
    torch.manual_seed(0)
    model = Reader(KINDS[kind](3, 2, 2, batch_first=True)).double()
    batch = (sequences(3),)

    found = collect_gradients(HookGradientComputer(model, resolve_task(total), grad_wrt=[kept]), batch)

    expected = by_loop(model, total, batch, [kept])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_two_layers_that_share_their_weights() -> None:
    """Both directions of a layer, and a second layer, read the same parameters."""
    torch.manual_seed(0)
    rnn = nn.GRU(3, 3, 2, batch_first=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(rnn, f"{name}_l1", getattr(rnn, f"{name}_l0"))

    assert_equals_the_loop(Reader(rnn), sequences(3))


class InPlace(Reader):
    """Changes what the layer read, or what it returned, in place."""

    def __init__(self, rnn: nn.RNNBase, changed: str) -> None:
        super().__init__(rnn)
        self.changed = changed
        self.embed = nn.Linear(3, 3)

    def call(self, x: Any) -> Any:
        x = self.embed(x)
        outputs, state = self.rnn(x)
        (x if self.changed == "input" else outputs).mul_(2)
        return outputs, state


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_may_be_changed_in_place(kind: str) -> None:
    torch.manual_seed(0)
    assert_equals_the_loop(InPlace(KINDS[kind](3, 2, batch_first=True), "output"), sequences(3))


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_changed_in_place_is_refused(kind: str) -> None:
    model = InPlace(KINDS[kind](3, 2, batch_first=True), "input").double()

    with pytest.raises(UnsupportedModelError, match="changed in place after the layer read it"):
        collect_gradients(HookGradientComputer(model, resolve_task(total)), (sequences(3),))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_little(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # oneDNN's LSTM in bfloat16 needs AVX-512
    torch.manual_seed(0)
    model, batch = Reader(KINDS[kind](3, 4, batch_first=True)), (sequences(3).float(),)
    task = resolve_task(lambda call, batch: call(*batch).sin().sum(1))

    half = collect_gradients(HookGradientComputer(model, task, autocast_dtype=torch.bfloat16), batch)

    full = collect_gradients(HookGradientComputer(model, task), batch)
    for name, value in full.items():
        assert half[name].dtype == torch.float32
        assert (half[name] - value).norm() < 0.05 * value.norm(), name


# The recurrence as an operation


def operands(kind: str, *, packed: bool, bidirectional: bool) -> tuple[list[Any], list[Tensor]]:
    """Return arguments of torch's operation for two layers, and those that require grad."""
    torch.manual_seed(0)
    rnn = KINDS[kind](3, 2, 2, bidirectional=bidirectional, batch_first=True).double()
    shape = (4 if bidirectional else 2, 4, 2)
    state = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x = sequences(4)
    if packed:
        x, sizes, *_ = pack_padded_sequence(x, torch.tensor([5, 4, 4, 1]), batch_first=True)
    x.requires_grad_()
    first = tuple(state) if kind == "LSTM" else state[0]
    rest = [list(rnn._flat_weights), True, 2, 0.0, False, bidirectional]
    args = [x, sizes, first, *rest] if packed else [x, first, *rest, True]
    return args, [x, *(state if kind == "LSTM" else state[:1]), *rnn._flat_weights]


def summed(results: tuple[Tensor, ...]) -> Tensor:
    return sum((i + value * value.cos()).sin().sum() for i, value in enumerate(results, 1))


def run(kind: str, args: list[Any]) -> tuple[Tensor, ...]:
    return run_recurrent(OPERATIONS[kind][0], args, num_samples=4, order=None, tap=lambda value, *_: value)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_all_gradients_equal_those_of_torch(kind: str, packed: bool, bidirectional: bool) -> None:
    """Weights that autograd is to differentiate get their summed gradient: nothing is lost in silence."""
    args, wanted = operands(kind, packed=packed, bidirectional=bidirectional)

    results = run(kind, args)

    expected = OPERATIONS[kind][1](*args)
    torch.testing.assert_close(results, tuple(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(summed(results), wanted),
        torch.autograd.grad(summed(expected), wanted),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_pass_gives_the_same(kind: str) -> None:
    args, wanted = operands(kind, packed=False, bidirectional=True)
    value = summed(run(kind, args))

    once = torch.autograd.grad(value, wanted, retain_graph=True)

    torch.testing.assert_close(torch.autograd.grad(value, wanted), once, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_the_gradient_raises(kind: str) -> None:
    args, wanted = operands(kind, packed=False, bidirectional=False)
    value = summed(run(kind, args))

    with pytest.raises(UnsupportedModelError, match="create_graph=True"):
        torch.autograd.grad(value, wanted, create_graph=True)


class Penalised(Reader):
    """The result is the slope of the outputs in the inputs."""

    def call(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        outputs, state = self.rnn(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return slope, state


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_differentiates_its_recurrence_twice_is_refused(kind: str) -> None:
    """Without the self-check, which would find it too."""
    model = Penalised(KINDS[kind](3, 2, batch_first=True), "outputs").double()
    computer = HookGradientComputer(model, resolve_task(total), self_check=False)

    with pytest.raises(UnsupportedModelError, match="create_graph=True"):
        collect_gradients(computer, (sequences(3),))


class Cells(nn.Module):
    """A cell that Python steps through: its output is computed from the state that it returns beside it."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = cell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = h = None
        total = 0
        for step in x.unbind(1):
            state = self.cell(step, state)
            h = state[0] if isinstance(state, tuple) else state
            total = total + h.sin()
        return total + h + (state[1] if isinstance(state, tuple) else 0)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_cell_that_steps_through_a_sequence_is_exact(cell: type[nn.RNNCellBase], steps: int) -> None:
    torch.manual_seed(0)
    model, batch = Cells(cell).double(), (torch.randn(3, steps, 4, dtype=torch.float64),)

    def output(call: Any, batch: Any) -> Tensor:
        return call(batch[0]).square().sum(1)

    found = collect_gradients(HookGradientComputer(model, resolve_task(output), self_check=False), batch)

    for name, value in by_loop(model, output, batch).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


class SteppedLSTM(nn.Module):
    """LSTMs of linear maps over a packed sequence, step by step, as in Opacus' DPLSTM.

    The last states are collected by a loop over samples; backward in time, samples are added at later steps.
    """

    def __init__(self, layers: int, directions: int) -> None:
        super().__init__()
        widths = [3] + [4 * directions] * (layers - 1)
        self.inputs, self.states = (
            nn.ModuleList(nn.ModuleList(nn.Linear(d, 16) for _ in range(directions)) for d in sizes)
            for sizes in (widths, [4] * layers)
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        data, sizes, _, back = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        steps, last = list(data.split(sizes.tolist())), []
        for inputs, states in zip(self.inputs, self.states, strict=True):
            outputs = []
            for number, cell in enumerate(zip(inputs, states, strict=True)):
                found = self.run(cell, steps[::-1] if number else steps)
                outputs.append([h for h, _ in found][:: -1 if number else 1])
                state = torch.zeros(len(x), 4, dtype=x.dtype)
                for sample, length in enumerate(lengths.sort(descending=True).values.tolist()):
                    state[sample] = found[-1 if number else length - 1][1][sample]
                last.append(state[back])
            steps = [torch.cat(parts, 1) for parts in zip(*outputs, strict=True)]
        every = PackedSequence(torch.cat(steps), sizes, unsorted_indices=back)
        return torch.cat(
            [pad_packed_sequence(every, batch_first=True, total_length=5)[0].flatten(1), *last], 1
        )

    def run(self, cell: tuple[nn.Module, nn.Module], steps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        h = c = steps[0].new_zeros(0, 4)
        found = []
        for step in steps:
            new = step.new_zeros(max(len(step) - len(h), 0), 4)
            h, c = (torch.cat([state[: len(step)], new]) for state in (h, c))
            i, f, g, o = (cell[0](step) + cell[1](h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append((h, c))
        return found


@pytest.mark.parametrize("lengths", [[5, 4, 4, 1], [3, 5, 1, 4, 1], [2, 2, 2], [4]], ids=str)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_packed_sequence_that_is_stepped_through_is_exact(
    layers: int, directions: int, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    model, batch = SteppedLSTM(layers, directions), (sequences(len(lengths)), torch.tensor(lengths))

    assert_equals_the_loop(model, *batch)


def test_lengths_may_differ_from_those_that_the_model_was_examined_with() -> None:
    torch.manual_seed(0)
    model = SteppedLSTM(1, 2).double().eval()
    computer = HookGradientComputer(model, resolve_task(total))

    for lengths in ([2, 2, 2], [1, 5, 3, 3], [4, 1]):
        batch = (sequences(len(lengths)), torch.tensor(lengths))
        found = collect_gradients(computer, batch)
        for name, value in by_loop(model, total, batch).items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
