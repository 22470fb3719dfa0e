"""Replays of recorded passes: the same bits as the pass, or the pass itself."""

import contextvars
import ctypes
import functools
import itertools
import logging
import math
import random
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import UnsupportedModelError
from trak_lite.featurizing.rows import compute_features
from trak_lite.gradient_computers import (
    HookGradientComputer,
    IterativeGradientComputer,
    collect_gradients,
)
from trak_lite.gradient_computers.replays import Replays, _close
from trak_lite.gradient_computers.tape import Tape
from trak_lite.modelout_functions import resolve_task
from trak_lite.projectors._kernels import as_operation
from trak_lite.projectors.select import select_projector

NUM_BATCHES = 24
TASK = resolve_task("image_classification")
CALLS = contextvars.ContextVar("calls", default=0)
READ_OUTSIDE = {"factor": 1.0, "calls": 0}


class Net(nn.Module):
    """A perceptron; its children do something that a recording of operations might miss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Conv(Net):
    def set_up(self):
        self.first, self.last = nn.Conv1d(1, 4, 3), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x[:, None])).flatten(1))


class Pooled(Conv):
    """Pools to one value, after which torch changes the strides of the result in place."""

    def set_up(self):
        super().set_up()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x[:, None]).transpose(1, 2).contiguous().transpose(1, 2)
        return self.last(nn.functional.adaptive_avg_pool1d(x, 1).flatten(1))


class Attention(Net):
    def set_up(self):
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 3)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x):
        return self.last(self.block(self.first(x[:, :, None])).mean(1))


class Recurrent(Net):
    def set_up(self):
        self.first, self.last = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.first(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Looked(Net):
    def set_up(self):
        self.first, self.last = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.first(x.abs().long().clamp(max=8)).mean(1))


class NormalisedByBuffers(Net):
    def set_up(self):
        self.norm = nn.BatchNorm1d(7)
        self.norm.running_mean.normal_()

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class WithoutGradInPart(Net):
    def forward(self, x):
        with torch.no_grad():
            gate = torch.sigmoid(self.first(x)).mean(1, keepdim=True)
        return super().forward(x) * gate


class WritesIntoItsOwnCopy(Net):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = 0
        return super().forward(x.mul_(2))


class CachesByShape(Net):
    def set_up(self):
        self.cache = {}

    def forward(self, x):
        if x.shape not in self.cache:
            self.cache[x.shape] = torch.full((len(x), 1), 2.0)
        return super().forward(x) * self.cache[x.shape]


class Checkpointed(Net):
    def forward(self, x):
        return self.last(torch.tanh(checkpoint(self.first, x, use_reentrant=False)))


class Compiled(Net):
    def set_up(self):
        self.compiled = torch.compile(self.first, backend="eager")

    def forward(self, x):
        return self.last(torch.tanh(self.compiled(x)))


class Sorted(Net):
    def forward(self, x):
        logits = super().forward(x)
        values, order = logits.topk(2, 1)
        return logits.scatter(1, order, values * 2)


class ReadsSameValue(Net):
    def forward(self, x):
        return super().forward(x) * (2.0 if bool((x < 100).all()) else 3.0)


class ChecksItsClasses(Net):
    """Torch reads the smallest and the largest class, which differ from batch to batch, to check them."""

    def forward(self, x):
        classes = x[:, 0].abs().mul(2).long().clamp(max=2)
        return super().forward(x) * nn.functional.one_hot(classes, num_classes=3)


class LeavesAMaskOut(Net):
    """Its first sample is not padded; nearly every batch has a sample that is."""

    def set_up(self):
        self.padding = nn.Parameter(torch.randn(3))

    def forward(self, x):
        logits, padded = super().forward(x), x[:, :1] >= 0
        return logits + torch.where(padded, self.padding, 0.0) if bool(padded.any()) else logits


class CountsInItself(Net):
    def set_up(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class CountsOutside(Net):
    def forward(self, x):
        READ_OUTSIDE["calls"] += 1
        return super().forward(x)


class CountsInItsClass(Net):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class CountsInAContext(Net):
    def forward(self, x):
        CALLS.set(CALLS.get() + 1)
        return super().forward(x)


class Slots:
    __slots__ = ("calls",)
    in_all = 0


class CountsInSlots(Net):
    def set_up(self):
        self.slots = Slots()
        self.slots.calls = 0

    def forward(self, x):
        self.slots.calls += 1
        return super().forward(x)


class CountsInAnotherClass(Net):
    def forward(self, x):
        Slots.in_all += 1
        return super().forward(x)


class CountsInAnArray(Net):
    def set_up(self):
        self.calls = np.zeros(100_000)

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x)


class FillsACache(Net):
    def set_up(self):
        self.double = functools.lru_cache(maxsize=None)(lambda number: 2 * number)

    def forward(self, x):
        self.double(self.double.cache_info().currsize)
        return super().forward(x)


class CountsInATensor(Net):
    def set_up(self):
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class ReplacesABuffer(Net):
    def set_up(self):
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class KeepsAList(Net):
    def set_up(self):
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return super().forward(x)


class KeepsItsInput(Net):
    def forward(self, x):
        self.input = x
        return super().forward(x)


class MovesAnIterator(Net):
    def set_up(self):
        self.ones = itertools.cycle([1.0])

    def forward(self, x):
        return super().forward(x) * next(self.ones)


class DrawsInPython(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if random.random() >= 0 else 0.0)


class DrawsInNumPy(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if np.random.rand() >= 0 else 0.0)  # noqa: NPY002


class Dropped(Net):
    def forward(self, x):
        return super().forward(x) + 0 * nn.functional.dropout(x, 0.5).sum()


class ReadsThroughNumPy(Net):
    def forward(self, x):
        return super().forward(x) * torch.from_numpy(x.detach().numpy().max(1, keepdims=True).copy())


class ReadsAList(Net):
    def forward(self, x):
        return super().forward(x) * torch.tensor([[max(row)] for row in x.tolist()])


class Doubles(Net):
    """Doubles the logits of samples above -9, as all of the test are, in a way that no operation shows."""

    def forward(self, x):
        return super().forward(x) * self.factor(x.detach()[:, :1].clone().add_(9))


class ReadsByPointer(Doubles):
    def factor(self, x):
        values = (ctypes.c_float * len(x)).from_address(x.data_ptr())
        return torch.tensor([[2.0 if value > 0 else 1.0] for value in values])


class ReadsScalarsInAList(Doubles):
    def factor(self, x):
        return torch.where(torch.tensor(list(x[:, 0]))[:, None] > 0, 2.0, 1.0)


class MakesAParameter(Doubles):
    def factor(self, x):
        return torch.where(nn.Parameter(x) > 0, 2.0, 1.0)


class AppliesPython(Doubles):
    def factor(self, x):
        return torch.where(x.apply_(abs) > 0, 2.0, 1.0)


class SplitsByATensor(Doubles):
    def factor(self, x):
        order = x[:, 0].argsort()
        _, positive = torch.tensor_split(order, (x <= 0).sum().view(1))
        return torch.ones(len(x), 1).index_fill(0, positive, 2.0)


class SelectsByMask(Net):
    def forward(self, x):
        logits = super().forward(x)
        doubled = logits.clone()
        doubled[logits > 0] = doubled[logits > 0] * 2
        return doubled


class HasAHook(Net):
    def set_up(self):
        self.first.register_forward_hook(lambda module, args, result: result * 2)


class SparseBuffer(Net):
    def set_up(self):
        self.register_buffer("neighbours", torch.eye(7).to_sparse())

    def forward(self, x):
        return self.last(torch.tanh(torch.sparse.mm(self.neighbours, self.first(x).T).T))


class SparseAttribute(SparseBuffer):
    def set_up(self):
        self.neighbours = torch.eye(7).to_sparse()


class InferenceAttribute(Net):
    def set_up(self):
        with torch.inference_mode():
            self.shift = torch.ones(3)

    def forward(self, x):
        return super().forward(x) + self.shift.clone()


class ReadsOutside(Net):
    def forward(self, x):
        return super().forward(x) * READ_OUTSIDE["factor"]


class OwnFunction(Net):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def forward(self, x):
        return self.Double.apply(super().forward(x))


REPLAYED = [
    *(
        Net,
        Conv,
        Pooled,
        Attention,
        Recurrent,
        Looked,
        NormalisedByBuffers,
        WithoutGradInPart,
        WritesIntoItsOwnCopy,
    ),
    *(CachesByShape, Checkpointed, Compiled, Sorted, ReadsSameValue, InferenceAttribute, LeavesAMaskOut),
]
NOT_REPLAYED = [
    *(CountsInItself, CountsOutside, CountsInATensor, ReplacesABuffer, KeepsAList, KeepsItsInput),
    *(MovesAnIterator, DrawsInPython, DrawsInNumPy, ReadsThroughNumPy, ReadsAList, SelectsByMask),
    *(CountsInItsClass, CountsInAContext, CountsInSlots, CountsInAnotherClass, CountsInAnArray, FillsACache),
    *(HasAHook, OwnFunction, SparseBuffer, SparseAttribute),
    *(ReadsByPointer, ReadsScalarsInAList, MakesAParameter, AppliesPython, SplitsByATensor),
]


class Run:
    """Streams batches through one computer, and counts how often the pass itself runs."""

    def __init__(self, model, **settings):
        self.computer = HookGradientComputer(model, TASK, **settings)
        self.passes, self.to_come = 0, math.inf

    def __call__(self, batch):
        def work():
            self.passes += 1
            sums = {}

            def sink(block):
                sums[block.name] = sums.get(block.name, 0) + block.dense()

            terms = self.computer.stream_gradients(batch, sink)
            return [torch.cat([sums[name] for name in self.computer.parameters], 1), *terms]

        return self.computer.run(batch, self.computer.model, (), work, lambda _: False, self.to_come)


def batches(count=NUM_BATCHES, size=4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(size, 5, generator=generator)
        yield x, torch.randint(3, (size,), generator=generator)


def reference(model, batch):
    grads = collect_gradients(IterativeGradientComputer(model, TASK, self_check=False), batch)
    return torch.cat([grad.flatten(1) for grad in grads.values()], 1)


def made(kind):
    torch.manual_seed(0)
    return kind().eval()


QUICK = [pytest.param(kind, marks=pytest.mark.quick) if kind is Net else kind for kind in REPLAYED]


@pytest.mark.parametrize("kind", QUICK, ids=lambda kind: kind.__name__)
def test_replays_have_the_bits_of_the_pass(kind):
    run = Run(made(kind))
    for batch in batches():
        alone = Run(made(kind), self_check=False)  # its first batch is never a replay
        for found, expected in zip(run(batch), alone(batch), strict=True):
            assert torch.equal(found, expected)
    assert run.passes < 14, "most batches are replayed"


@pytest.mark.parametrize("kind", NOT_REPLAYED, ids=lambda kind: kind.__name__)
def test_what_a_recording_cannot_see_runs_the_pass(kind):
    model = made(kind)
    run = Run(model)
    for batch in batches():
        torch.testing.assert_close(run(batch)[0], reference(model, batch), rtol=1e-4, atol=1e-6)
    assert run.passes == NUM_BATCHES


def test_the_log_says_why_passes_are_not_replayed(caplog):
    run = Run(made(CountsInATensor))
    with caplog.at_level(logging.INFO, "trak_lite"):
        for batch in batches(6):
            run(batch)
    assert "CountsInATensor are not replayed: it writes into a tensor" in caplog.text


@pytest.mark.parametrize(
    "read",
    [lambda x: bool((x < 100).all()), lambda x: torch.allclose(x, x.clamp(max=100.0))],
    ids=["bool", "allclose"],
)
def test_a_batch_in_which_python_reads_another_value_runs_the_pass(read):
    class Reads(Net):
        def forward(self, x):
            return super().forward(x) * (2.0 if read(x) else 3.0)

    model = made(Reads)
    run = Run(model)
    for batch in batches():
        run(batch)
    x, y = next(batches(1))
    x = x + 1000
    before = run.passes
    torch.testing.assert_close(run((x, y))[0], reference(model, (x, y)))
    assert run.passes == before + 1


def change_weights(model):
    with torch.no_grad():
        model.first.weight.mul_(2)


def replace_data(model):
    model.first.weight.data = model.first.weight.data * 3


def replace_parameter(model):
    model.first.weight = nn.Parameter(model.first.weight.detach() * 4)


def load_other_weights(model):
    model.load_state_dict({name: value * 5 for name, value in model.state_dict().items()})


def change_attribute(model):
    model.scale = 6.0


def change_configuration(model):
    model.config["layers"][0].scale = 6.0


def freeze(model):
    model.last.weight.requires_grad_(False)


def add_hook(model):
    model.first.register_forward_hook(lambda module, args, result: result * 7)


def replace_module(model):
    model.first = nn.Linear(5, 7)


def exchange_layers(model):
    model.layers = nn.ModuleList(reversed(model.layers))


CHANGES = (
    *(
        change_weights,
        replace_data,
        replace_parameter,
        load_other_weights,
        change_attribute,
        change_configuration,
        freeze,
        add_hook,
    ),
    *(replace_module, exchange_layers),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_model_between_batches_counts_at_once(change):
    class Changing(Net):
        def set_up(self):
            self.scale = 1.0
            self.config = {"layers": [types.SimpleNamespace(scale=1.0)]}
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x):
            x = super().forward(x) * self.scale * self.config["layers"][0].scale
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = made(Changing)
    run = Run(model)
    for batch in batches():
        run(batch)
    change(model)
    for batch in batches(3):
        torch.testing.assert_close(run(batch)[0], reference(model, batch))


def test_a_value_outside_the_model_that_changes_ends_the_run_with_the_rows_since_the_last_comparison():
    READ_OUTSIDE["factor"] = 1.0
    run = Run(made(ReadsOutside))
    for number, batch in enumerate(batches(31)):
        run.computer.name_rows("train", np.arange(4 * number, 4 * number + 4))
        run(batch)
    READ_OUTSIDE["factor"] = 2.0
    run.computer.name_rows("train", np.arange(4 * 31, 4 * 32))
    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value") as caught:
        run(next(batches(1)))
    np.testing.assert_array_equal(caught.value.rows["train"], np.arange(4 * 16, 4 * 31))


def test_a_value_that_changes_after_the_last_comparison_is_found_at_the_end():
    READ_OUTSIDE["factor"] = 1.0
    run = Run(made(ReadsOutside))
    for number, batch in enumerate(batches()):
        run.computer.name_rows("train", np.arange(4 * number, 4 * number + 4))
        run(batch)
    READ_OUTSIDE["factor"] = 2.0
    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value") as caught:
        run.computer.confirm()
    np.testing.assert_array_equal(caught.value.rows["train"], np.arange(4 * 16, 4 * NUM_BATCHES))


@pytest.mark.parametrize("more", [0, 1, 4])
def test_a_graph_hides_no_value_that_changed_before_it_was_captured(more, monkeypatch):
    """On a CPU the recording stands for the graph."""

    def capture(replays, kind, leaves, to_come):
        if READ_OUTSIDE["factor"] == 2.0 and kind.graph is None:
            kind.graph, kind.confirmed = kind.recording.__call__, False

    def rows():
        """Change the factor after the first replay; end some batches after the second, whose rows are wrong."""
        run, replays, left = Run(made(ReadsOutside), self_check=False), 0, more
        for number, batch in enumerate(batches()):
            run.computer.name_rows("train", np.arange(4 * number, 4 * number + 4))
            before = run.passes
            if replays == 2:
                left -= 1
                if left < 0:
                    break
            run(batch)
            if run.passes == before and replays < 2:
                READ_OUTSIDE["factor"], replays = 2.0, replays + 1
                wrong.extend(range(4 * number, 4 * number + 4))
        run.computer.confirm()

    monkeypatch.setattr(Replays, "_capture", capture)
    monkeypatch.setattr("trak_lite.gradient_computers.replays._CAPTURED_AFTER", 2)
    monkeypatch.setitem(READ_OUTSIDE, "factor", 1.0)
    wrong = []
    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value") as caught:
        rows()
    assert len(wrong) == 8
    assert set(wrong) <= set(caught.value.rows["train"].tolist())


def test_a_replay_before_other_paths_is_compared_at_the_end():
    class Clamps(Net):
        def forward(self, x):
            x = x.clamp(max=100.0) if bool((x > 100).any()) else x
            return super().forward(x) * READ_OUTSIDE["factor"]

    def finished(factor):
        run = Run(made(Clamps), self_check=False)
        READ_OUTSIDE["factor"] = 1.0
        for number, (x, y) in enumerate(batches(), 1):
            run((x + 1000 if number > 17 else x, y))
        READ_OUTSIDE["factor"] = factor
        run.computer.confirm()
        run(next(batches(1)))
        return run

    assert finished(1.0).passes > NUM_BATCHES - 17
    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value"):
        finished(2.0)
    READ_OUTSIDE["factor"] = 1.0


@pytest.mark.parametrize(("to_come", "replayed"), [(0, False), (math.inf, True)])
def test_passes_are_recorded_if_enough_batches_follow(to_come, replayed):
    run = Run(made(Net))
    run.to_come = to_come
    for batch in batches():
        run(batch)
    assert (run.passes < NUM_BATCHES) == replayed


@pytest.mark.parametrize("sizes", [(4, 4, 4, 3), (4, 7)], ids=str)
def test_batches_of_other_sizes_have_their_own_recording(sizes):
    model = made(Conv)
    run = Run(model)
    for number, size in enumerate(sizes * 12):
        (batch,) = [list(batches(number + 1, size))[-1]]
        torch.testing.assert_close(run(batch)[0], reference(model, batch))
    assert run.passes < len(sizes) * 12


@pytest.mark.parametrize(
    ("limit", "sizes", "recorded"),
    [
        ({}, range(1, 13), 12),
        ({"_MOST_RECORDINGS": 8}, range(1, 13), 8),
        ({"_MOST_BYTES": 1}, range(1, 13), 1),
        ({"_MOST_RECORDINGS": 8}, [1 + n // 8 for n in range(96)], 12),
    ],
)
def test_batches_of_many_shapes_keep_a_bounded_number_of_recordings(
    limit, sizes, recorded, caplog, monkeypatch
):
    """Shapes in turn keep the recordings of some; shapes one after the other replace those that are over."""
    for name, value in limit.items():
        monkeypatch.setattr(f"trak_lite.gradient_computers.replays.{name}", value)
    model = made(Net)
    run = Run(model, self_check=False)
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        for size in [*sizes] * (96 // len(sizes)):
            batch = next(batches(1, size))
            torch.testing.assert_close(run(batch)[0], reference(model, batch))
    assert sum("is recorded" in record.message for record in caplog.records) == recorded
    assert run.passes < 96


def test_a_tensor_that_stands_twice_in_a_batch_runs_the_pass():
    model = made(Net)
    task = resolve_task(lambda call, batch: (call(batch[0]) + call(batch[1])).square().sum(1))
    one, other = (computer(model, task) for computer in (HookGradientComputer, IterativeGradientComputer))
    for x, _ in batches(8):
        found = one.run(
            *((x, x), model, (), lambda x=x: list(collect_gradients(one, (x, x)).values())),
            *(lambda _: False, math.inf),
        )
        for grad, expected in zip(found, collect_gradients(other, (x, x)).values(), strict=True):
            torch.testing.assert_close(grad, expected)


def test_after_a_failed_check_no_batch_is_replayed():
    class MixesLongBatches(Net):
        def forward(self, x):
            logits = super().forward(x)
            return logits + logits.mean(0) if len(x) == 6 else logits

    run = Run(made(MixesLongBatches))
    for batch in batches():
        run(batch)
    with pytest.raises(UnsupportedModelError, match="self-check failed"):
        run(next(batches(1, 6)))
    with pytest.raises(UnsupportedModelError, match="failed for an earlier batch"):
        run(next(batches(1)))


def test_what_a_model_keeps_is_freed_when_it_keeps_something_else():
    model = made(KeepsItsInput)
    run, kept = Run(model), []
    for x, y in batches():
        run((x, y))
        kept.append(weakref.ref(model.input))
        del x, y
    assert sum(found() is not None for found in kept) <= 2


def test_recordings_end_with_the_projector():
    class Held:
        def __init__(self):
            self.matrix = torch.randn(68, 3)

    model = made(Net)
    run = Run(model)
    projector = Held()
    matrix = weakref.ref(projector.matrix)

    def work(projector):
        return [collect_gradients(run.computer, batch)["last.bias"] @ projector.matrix[:3]]

    for batch in batches(12):
        of_batch = functools.partial(work, projector)
        run.computer.run(batch, projector, (), of_batch, lambda _: False, math.inf)
    run.computer.confirm(complete=False)  # as after a loop that was not finished
    del projector, of_batch
    assert matrix() is None


def test_autocast_and_modes_of_the_caller_run_the_pass():
    model = made(Net)
    run = Run(model)
    for batch in batches():
        run(batch)
    before = run.passes
    batch = next(batches(1))
    with torch.autocast("cpu", torch.bfloat16):
        run(batch)
    with torch.overrides.BaseTorchFunctionMode():
        run(batch)
    assert run.passes == before + 2


def test_a_bad_label_is_refused_in_a_replayed_kind_of_batch():
    run = Run(made(Net))
    for batch in batches():
        run(batch)
    x, _ = next(batches(1))
    with pytest.raises(ValueError, match="sample 1: labels"):
        run((x, torch.tensor([0, 5, 1, 1])))


def test_results_are_not_overwritten_by_the_next_batch():
    run = Run(made(Conv))
    found = [run(batch) for batch in batches()]
    again = Run(made(Conv), self_check=False)
    for batch, values in zip(batches(), found, strict=True):
        assert torch.equal(values[0], again(batch)[0])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_flag_beside_the_tensors_of_a_batch_counts(kind):
    class Flagged(Net):
        def forward(self, x, twice):
            hidden = torch.tanh(self.first(x))
            return self.last(hidden) + (self.last(hidden.sin()) if twice else 0)

    torch.manual_seed(0)
    model = Flagged().eval()
    task = resolve_task(lambda call, batch: call(batch[0], batch[1]).square().sum(1))
    one, other = (computer(model, task) for computer in (HookGradientComputer, IterativeGradientComputer))
    for x, _ in batches(6):
        for twice in (False, False, True):
            expected = collect_gradients(other, kind([x, twice]))
            for name, grad in collect_gradients(one, kind([x, twice])).items():
                torch.testing.assert_close(
                    grad, expected[name], msg=lambda text, name=name: f"{name}: {text}"
                )


@as_operation
def scaled(written, read, numbers):
    torch.mul(read[0], numbers[0], out=written)


def test_the_launch_of_a_kernel_is_recorded_and_repeated():
    def work(x):
        sums = torch.empty(2, 3)
        scaled(sums, [x + 1], [5])
        return [sums * 2]

    one, other = torch.randn(2, 3), torch.randn(2, 3)
    with Tape([one], []) as tape:
        found = work(one)
    assert torch.equal(found[0], (one + 1) * 5 * 2)
    assert torch.equal(tape.finish(found)(other)[0], (other + 1) * 5 * 2)


@pytest.mark.parametrize(("error", "is_used"), [(1e-6, True), (1e-3, False)])
def test_replays_of_a_pass_whose_own_bits_change_are_equal_up_to_rounding(error, is_used, monkeypatch):
    """As with atomic additions on a GPU, where this test pretends to be."""

    class Unsteady(Run):
        def __call__(self, batch):
            def work():
                self.passes += 1
                grads = collect_gradients(self.computer, batch)["last.weight"].flatten(1)
                return [grads * (1 + error * (self.passes % 2))]

            return self.computer.run(batch, self.computer.model, (), work, lambda _: False, math.inf)

    monkeypatch.setattr(Replays, "_is_unsteady", functools.partial(elsewhere, Replays._is_unsteady))
    model = made(Net)
    run = Unsteady(model, self_check=False)
    for batch in batches():
        expected = collect_gradients(IterativeGradientComputer(model, TASK), batch)["last.weight"].flatten(1)
        torch.testing.assert_close(run(batch)[0], expected, rtol=2 * error, atol=1e-6)
    assert (run.passes < NUM_BATCHES) == is_used


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([[1.0, math.nan], [2.0, 0.0]], [[1.000001, math.nan], [2.0, 0.0]], True),
        ([[1.0, 1.0], [2.0, 0.0]], [[1.0, math.nan], [2.0, 0.0]], False),
        ([[1.0, 1.0], [1e-9, 0.0]], [[1.0, 1.0], [0.0, 1e-9]], True),
        ([[2000.0, 1.0], [1.0, 0.0]], [[2000.0, 1.0], [1.001, 0.0]], True),
        ([[10.0, 1.0], [1.0, 0.0]], [[10.0, 1.0], [1.001, 0.0]], False),
        ([1.0, math.inf, 0.0], [1.0, math.inf, 1e-7], True),
        ([1.0, 2.0], [1.0, 2.1], False),
    ],
)
def test_rows_are_close_up_to_rounding_of_their_own_size(one, other, equal):
    assert _close(torch.tensor(one), torch.tensor(other), 1e-4) == equal


def elsewhere(is_unsteady, kind, computer, found, work):
    """Call with results that say that they are on another device."""

    class There(torch.Tensor):
        device = torch.device("cuda")

    return is_unsteady(kind, computer, [one.as_subclass(There) for one in found], work)


# ---- on a GPU


def featurized(model, to_come, projector="countsketch"):
    """Return the features of batches on a GPU, by the default projector and its kernels."""
    computer, made = HookGradientComputer(model, TASK), select_projector(projector, proj_dim=16)
    settings = {"model_id": 0, "rows": np.arange(4), "what": "train", "to_come": to_come}
    found = [
        compute_features(computer, made, tuple(part.cuda() for part in batch), **settings)[0]
        for batch in batches()
    ]
    computer.confirm()
    return found


ON_CPU = (
    *(InferenceAttribute, SparseAttribute, ReadsThroughNumPy, OwnFunction, CachesByShape, ReadsAList),
    *(ReadsByPointer, ReadsScalarsInAList, AppliesPython, SplitsByATensor),
)  # make or read tensors there


@pytest.fixture
def always_captured(monkeypatch):
    """However long the kernels take beside other processes."""
    monkeypatch.setattr("trak_lite.gradient_computers.cuda_graphs._waits_for_the_host", lambda *_: True)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "kind", [kind for kind in REPLAYED if kind not in ON_CPU], ids=lambda kind: kind.__name__
)
def test_on_a_gpu_a_graph_of_a_replay_has_the_bits_of_the_pass(kind, always_captured, caplog):
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        found = featurized(made(kind).cuda(), math.inf)
    graphs = "captured as a CUDA graph" in caplog.text
    assert graphs != (kind in (Attention, ReadsSameValue, WritesIntoItsOwnCopy)), (
        "these may wait for the device"
    )
    assert "other bits" not in caplog.text
    for one, other in zip(found, featurized(made(kind).cuda(), 0), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "projector", ["countsketch", "rademacher", "gaussian", "two_sided", "mask", "grass", "none"]
)
def test_on_a_gpu_graphs_hold_the_kernels_of_every_projector(projector, always_captured, caplog):
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        found = featurized(made(Net).cuda(), math.inf, projector)
    assert "captured as a CUDA graph" in caplog.text
    assert "other bits" not in caplog.text
    for one, other in zip(found, featurized(made(Net).cuda(), 0, projector), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "kind", [kind for kind in NOT_REPLAYED if kind not in ON_CPU], ids=lambda kind: kind.__name__
)
def test_on_a_gpu_what_a_recording_cannot_see_runs_the_pass(kind, caplog):
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        found = featurized(made(kind).cuda(), math.inf)
    assert "is captured" not in caplog.text
    for one, other in zip(found, featurized(made(kind).cuda(), 0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "change", [change_weights, replace_data, load_other_weights], ids=lambda change: change.__name__
)
def test_on_a_gpu_new_weights_are_those_of_the_next_graph(change, always_captured):
    model = made(Net).cuda()
    run = Run(model)
    for batch in batches():
        run(tuple(part.cuda() for part in batch))
    before = run.passes
    change(model)
    for batch in batches():
        batch = tuple(part.cuda() for part in batch)
        torch.testing.assert_close(run(batch)[0], reference(model, batch), rtol=1e-4, atol=1e-5)
    assert before < NUM_BATCHES
