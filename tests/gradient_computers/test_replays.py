"""Replays of recorded passes: the same bits as the pass, or the pass itself."""

import argparse
import array
import collections
import contextvars
import ctypes
import functools
import gc
import itertools
import logging
import math
import operator
import random
import sys
import threading
import time
import types
import warnings
import weakref
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack as exported

from trak_lite import Normalization
from trak_lite.data.batches import flatten_batch
from trak_lite.errors import UnsupportedModelError
from trak_lite.featurizing.normalized import RowNormalizer
from trak_lite.featurizing.passes import compute_features
from trak_lite.gradient_computers import (
    HookGradientComputer,
    IterativeGradientComputer,
    collect_gradients,
    recording,
)
from trak_lite.gradient_computers.batch_kinds import leaves_of
from trak_lite.gradient_computers.replays import Replays, _close
from trak_lite.gradient_computers.tape import Tape
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors._kernels import as_operation
from trak_lite.projectors.select import select_projector
from trak_lite.types import OutputTerms

NUM_BATCHES = 24
TASK = resolve_task("image_classification")
CALLS = contextvars.ContextVar("calls", default=0)
READ_OUTSIDE = {"factor": 1.0, "calls": 0, **dict.fromkeys(range(64))}  # more than what is compared
FACTOR, SETTINGS = 1.0, types.SimpleNamespace(factor=1.0)
ARGUMENTS, REPLACED = argparse.Namespace(factor=1.0), types.SimpleNamespace(factor=1.0)
OF_CONTEXT = contextvars.ContextVar("factor", default=1.0)
ONES, WEIGHT = np.ones(3, dtype=np.float32), torch.ones(3)
CONFIG = {"factor": 1.0, "weight": torch.ones(3)}
POOL, THREAD = futures.ThreadPoolExecutor(1), threading.local()


class Unsized(tuple):
    """A tuple that is one thing, as irreps of e3nn."""

    def __len__(self):
        raise NotImplementedError


class Net(nn.Module):
    """A perceptron, and what a case changes: all that runs, what happens before it, a factor of its logits."""

    def __init__(self, run=None, *, does=None, factor=None, buffers=(), **held):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.run, self.does, self.factor = run, does, factor
        for name, value in held.items():
            setattr(self, name, value)
        for name, value in dict(buffers).items():
            self.register_buffer(name, value)

    def forward(self, x):
        if self.does is not None:
            self.does(self, x)
        logits = self.logits(x) if self.run is None else self.run(self, x)
        return logits if self.factor is None else logits * self.factor(self, x)

    def logits(self, x):
        return self.last(torch.tanh(self.first(x)))


# ---- What is replayed
def pooled(s, x):
    """Pools to one value, after which torch changes the strides of the result in place."""
    x = s.first(x[:, None]).transpose(1, 2).contiguous().transpose(1, 2)
    return s.last(F.adaptive_avg_pool1d(x, 1).flatten(1))


def normalised(s, x):
    return s.last(s.norm(s.first(x)))


def trained_norm():
    norm = nn.BatchNorm1d(7)
    norm.running_mean.normal_()
    return norm


def without_grad_in_part(s, x):
    with torch.no_grad():
        return torch.sigmoid(s.first(x)).mean(1, keepdim=True)


def writes_into_its_own_copy(s, x):
    x = x.clone()
    x[:, 0] = 0
    return s.logits(x.mul_(2))


def cached_by_shape(s, x):
    if x.shape not in s.cache:
        s.cache[x.shape] = torch.full((len(x), 1), 2.0)
    return s.cache[x.shape]


def sorts(s, x):
    logits = s.logits(x)
    values, order = logits.topk(2, 1)
    return logits.scatter(1, order, values * 2)


def checks_its_classes(s, x):
    """Torch reads the smallest and the largest class, which differ from batch to batch, to check them."""
    return F.one_hot(x[:, 0].abs().mul(2).long().clamp(max=2), num_classes=3)


def leaves_a_mask_out(s, x):
    """Its first sample is not padded; nearly every batch has a sample that is."""
    logits, padded = s.logits(x), x[:, :1] >= 0
    return logits + torch.where(padded, s.padding, 0.0) if bool(padded.any()) else logits


def succeeds(operation, *given, **settings):
    """Return whether an operation does, whose result nobody uses."""
    try:
        operation(*given, **settings)
    except (IndexError, RuntimeError):
        return False
    return True


def attending():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    forward = lambda s, x: s.last(s.block(s.first(x[:, :, None])).mean(1))  # noqa: E731
    return Net(forward, first=nn.Linear(1, 8), last=nn.Linear(8, 3), block=block)


def compiled():
    model = Net(lambda s, x: s.last(torch.tanh(s.compiled(x))))
    model.compiled = torch.compile(model.first, backend="eager")
    return model


def traced():
    with warnings.catch_warnings(action="ignore"):
        scaled = torch.jit.trace(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), torch.ones(2, 3))
    return Net(lambda s, x: scaled(s.logits(x)))


def of_inference():
    with torch.inference_mode():
        shift = torch.ones(3)
    return Net(lambda s, x: s.logits(x) + s.shift.clone(), shift=shift)


def convolved():
    forward = lambda s, x: s.last(torch.relu(s.first(x[:, None])).flatten(1))  # noqa: E731
    return Net(forward, first=nn.Conv1d(1, 4, 3), last=nn.Linear(12, 3))


class Weight(nn.Parameter):
    """A parameter of a class of its own, which overrides no function."""


REPLAYED = {
    "perceptron": Net,
    "has parameters of a class": lambda: Net(lambda s, x: s.logits(x) + s.shift, shift=Weight(torch.randn(3))),
    "replaces a buffer": lambda: Net(does=counts, buffers={"calls": torch.zeros(())}),
    "convolution": convolved,
    "pooled": lambda: Net(pooled, first=nn.Conv1d(1, 4, 3), last=nn.Linear(4, 3)),
    "attention": attending,
    "recurrent": lambda: Net(lambda s, x: s.last(s.first(x[:, None].expand(-1, 3, -1))[0][:, -1]),
                             first=nn.LSTM(5, 6, batch_first=True), last=nn.Linear(6, 3)),
    "looked up": lambda: Net(lambda s, x: s.last(s.first(x.abs().long().clamp(max=8)).mean(1)),
                             first=nn.Embedding(9, 5), last=nn.Linear(5, 3)),
    "normalised by buffers": lambda: Net(normalised, norm=trained_norm()),
    "without grad in part": lambda: Net(factor=without_grad_in_part),
    "writes into its own copy": lambda: Net(writes_into_its_own_copy),
    "cached by shape": lambda: Net(factor=cached_by_shape, cache={}),
    "checkpointed": lambda: Net(lambda s, x: s.last(torch.tanh(checkpoint(s.first, x, use_reentrant=False)))),
    "compiled": compiled,
    "sorted": lambda: Net(sorts),
    "reads the same value": lambda: Net(factor=lambda s, x: 2.0 if bool((x < 100).all()) else 3.0),
    "checks its classes": lambda: Net(factor=checks_its_classes),
    "of inference": of_inference,
    "leaves a mask out": lambda: Net(leaves_a_mask_out, padding=nn.Parameter(torch.randn(3))),
    "fails for its shape": lambda: Net(factor=lambda s, x: 2.0 if succeeds(x.view, -1, 7) else 3.0),
    "constants of Python": lambda: Net(factor=lambda s, x: torch.tensor([1.0, 2.0, 3.0]) * torch.from_numpy(ONES)),
    "constants of a trace": traced,
    "holds tuples without a length": lambda: Net(parts=[Unsized((1.0, 2.0))]),
    "has no rule": lambda: Net(lambda s, x: torch.lerp(s.logits(x), s.shift, 0.5), shift=nn.Parameter(torch.randn(3))),
}  # fmt: skip


# ---- What a recording of operations cannot see
class CountsInItsClass(Net):
    calls = 0


class Slots:
    __slots__ = ("calls",)
    in_all = 0

    def __init__(self):
        self.calls = 0


class Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: torch.from_numpy(x.detach().numpy() * 2))
    backward = staticmethod(lambda ctx, grad: grad * 2)


def counts(s, x):
    s.calls = s.calls + 1


def counts_in_its_class(s, x):
    type(s).calls += 1


def counts_outside(s, x):
    READ_OUTSIDE["calls"] += 1


def counts_in_slots(s, x):
    s.slots.calls += 1


def counts_in_another_class(s, x):
    Slots.in_all += 1


def counts_in_a_tensor():
    return Net(does=lambda s, x: s.calls.add_(1), buffers={"calls": torch.zeros(())})


def keeps_its_input(s, x):
    s.input = x


def selects_by_mask(s, x):
    logits = s.logits(x)
    doubled = logits.clone()
    doubled[logits > 0] = doubled[logits > 0] * 2
    return doubled


def with_a_hook():
    model = Net()
    model.first.register_forward_hook(lambda module, args, result: result * 2)
    return model


def by_neighbours(s, x):
    return s.last(torch.tanh(torch.sparse.mm(s.neighbours, s.first(x).T).T))


def doubles(is_positive):
    """A net that doubles the logits of samples above -9, as all of the test are, in a way that no operation shows."""
    return Net(factor=lambda s, x: torch.where(is_positive(x.detach()[:, :1].clone().add_(9)), 2.0, 1.0))


def by_pointer(x):
    values = (ctypes.c_float * len(x)).from_address(x.data_ptr())
    return torch.tensor([[value > 0] for value in values])


def split_by_a_tensor(x):
    _, positive = torch.tensor_split(x[:, 0].argsort(), (x <= 0).sum().view(1))
    return torch.zeros(len(x), 1).index_fill(0, positive, 1.0) > 0


def split_by_a_named_tensor(x):
    place = (x <= 0).sum().view(1)
    return x[:, :1] * 0 + torch.tensor_split(tensor_indices_or_sections=place, input=x)[1].numel() > 0


def writes_by_a_list(x):
    found = torch.zeros_like(x)
    found[:, [x.argmax() * 0]] = 1.0
    return found > 0


def packs(x):
    """Pads longer sequences in the place of samples above -9."""
    lengths = (x[:, 0].sort(descending=True).values > 0).long() + 1
    packed = pack_padded_sequence(x.new_ones(len(x), 2, 1), lengths.cpu(), batch_first=True)
    padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=2)
    return padded.sum(1)[x[:, 0].argsort(descending=True).argsort()] > 1


def drops_by_a_seed(s, x):
    """Leaves the random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return 1 + 0 * F.dropout(x, 0.5).sum()


class Reading(torch.Tensor):
    """A tensor whose class reads it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.sign:
            return torch.tensor([[row[0] > 0] for row in args[0].as_subclass(torch.Tensor).tolist()])
        return super().__torch_function__(func, types, args, kwargs)


def overridable(x):
    """As functions of torch are."""
    if has_torch_function_unary(x):
        return handle_torch_function(overridable, (x,), x)
    return torch.tensor([[row[0] > 0] for row in x.tolist()])


def without_modes(x):
    with torch._C.DisableTorchFunction():
        return torch.tensor([[row[0] > 0] for row in x.tolist()])


def split_by_an_overload(x):
    place = (x[:, 0] <= 0).sum().cpu().view(1)
    pieces = torch.ops.aten.tensor_split.tensor_indices_or_sections(x, place)
    return x[:, :1] * 0 + pieces[1].numel() > 0


class Row:
    """Scalars that torch takes for a sequence."""

    def __init__(self, scalars):
        self.scalars = scalars

    def __len__(self):
        return len(self.scalars)

    def __getitem__(self, place):
        return self.scalars[place]


def by_the_memory_of_another(x):
    given = torch.zeros(len(x), 1, device=x.device)
    given.data = x.data
    return given > 0


def in_a_thread(x):
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x > 0).result()


def in_a_thread_after_a_collection(x):
    found = in_a_thread(x)
    gc.collect(0)
    return found


def in_a_thread_that_holds_it(x):
    def work():
        THREAD.positive = x > 0
        return THREAD.positive

    return POOL.submit(work).result()


@torch.jit.script
def listed(x: torch.Tensor) -> torch.Tensor:
    values: list[float] = x[:, 0].double().tolist()
    return torch.tensor([[value] for value in values]).to(x.device) > 0


@torch.jit.script
def split(x: torch.Tensor) -> torch.Tensor:
    place = (x[:, 0] <= 0).sum().cpu().view(1)
    return x[:, :1] * 0 + torch.tensor_split(x, place)[1].numel() > 0


@torch.jit.script
def formatted(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] * 0 + float("{}".format(int("-" in "{}".format(x.min())))) <= 0  # noqa: UP032


@torch.jit.script
def formatted_by_percent(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] * 0 + float("%s" % int("-" in "%s" % x.min())) <= 0  # noqa: UP031


@torch.jit.script
def listed_by_another(x: torch.Tensor) -> torch.Tensor:
    return listed(x)


class Listing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return listed_by_another(x)


def listing():
    """The method that reads is not the model's forward."""
    return Net(
        factor=lambda s, x: torch.where(s.listing(x.detach()[:, :1] + 9), 2.0, 1.0),
        listing=torch.jit.script(Listing()),
    )


NOT_REPLAYED = {
    "counts in itself": lambda: Net(does=counts, calls=0),
    "counts in its class": lambda: CountsInItsClass(does=counts_in_its_class),
    "counts outside": lambda: Net(does=counts_outside),
    "counts in another class": lambda: Net(does=counts_in_another_class),
    "counts in slots": lambda: Net(does=counts_in_slots, slots=Slots()),
    "counts in a context": lambda: Net(does=lambda s, x: CALLS.set(CALLS.get() + 1)),
    "counts in an array": lambda: Net(does=lambda s, x: np.add(s.calls, 1, out=s.calls), calls=np.zeros(100_000)),
    "counts in a tensor": counts_in_a_tensor,
    "keeps a list": lambda: Net(does=lambda s, x: s.sizes.append(len(x)), sizes=[]),
    "keeps its input": lambda: Net(does=keeps_its_input),
    "fills a cache": lambda: Net(does=lambda s, x: s.double(s.double.cache_info().currsize),
                                 double=functools.lru_cache(maxsize=None)(lambda number: 2 * number)),
    "moves an iterator": lambda: Net(factor=lambda s, x: next(s.ones), ones=itertools.cycle([1.0])),
    "draws in Python": lambda: Net(factor=lambda s, x: 1.0 if random.random() >= 0 else 0.0),
    "draws in NumPy": lambda: Net(factor=lambda s, x: 1.0 if np.random.rand() >= 0 else 0.0),  # noqa: NPY002
    "draws by a generator of Python": lambda: Net(
        factor=lambda s, x: 1.0 if s.rng.random() >= 0 else 0.0, rng=random.Random(0)
    ),
    "draws by a generator of NumPy": lambda: Net(
        factor=lambda s, x: 1.0 if s.rng.random() >= 0 else 0.0, rng=np.random.default_rng(0)
    ),
    "draws by a state of NumPy": lambda: Net(
        factor=lambda s, x: 1.0 if s.rng.random() >= 0 else 0.0, rng=np.random.RandomState(0)
    ),
    "draws in a thread": lambda: Net(
        factor=lambda s, x: 1.0 if POOL.submit(lambda: torch.rand(()).item()).result() >= 0 else 0.0
    ),
    "dropped": lambda: Net(factor=lambda s, x: 1 + 0 * F.dropout(x, 0.5).sum()),
    "reads through NumPy": lambda: Net(
        factor=lambda s, x: torch.from_numpy(x.detach().numpy().max(1, keepdims=True).copy())
    ),
    "reads a list": lambda: Net(factor=lambda s, x: torch.tensor([[max(row)] for row in x.tolist()])),
    "reads by pointer": lambda: doubles(by_pointer),
    "reads a list in TorchScript": lambda: doubles(lambda x: listed_by_another(x)),
    "splits by a tensor in TorchScript": lambda: doubles(lambda x: split(x)),
    "formats a tensor in TorchScript": lambda: doubles(lambda x: formatted(x)),
    "formats a tensor by percent in TorchScript": lambda: doubles(lambda x: formatted_by_percent(x)),
    "reads a list in a TorchScript module": listing,
    "packs sequences": lambda: doubles(packs),
    "drops by a seed of its own": lambda: Net(factor=drops_by_a_seed),
    "reads in a class of its own": lambda: doubles(lambda x: torch.sign((x + 0).as_subclass(Reading))),
    "reads in a function that classes override": lambda: doubles(overridable),
    "reads without modes": lambda: doubles(without_modes),
    "splits by an overload": lambda: doubles(split_by_an_overload),
    "reads scalars in a sequence of its own": lambda: doubles(
        lambda x: torch.tensor(Row(list(x[:, 0])), device=x.device)[:, None] > 0
    ),
    "reads by DLPack": lambda: doubles(lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)) > 0),
    "reads by DLPack of another name": lambda: doubles(lambda x: torch.from_dlpack(exported(x)) > 0),
    "reads scalars in a list": lambda: doubles(lambda x: torch.tensor(list(x[:, 0]))[:, None] > 0),
    "reads entries of a list": lambda: doubles(lambda x: torch.BoolTensor(list(x > 0))[:, None].to(x.device)),
    "reads scalars in a queue": lambda: doubles(
        lambda x: torch.tensor(collections.deque(x[:, 0]), device=x.device)[:, None] > 0
    ),
    "indexes by a list": lambda: doubles(lambda x: x.new_ones(len(x), 2)[:, [(x > 0).all().long()]] > 0),
    "writes by a list": lambda: doubles(writes_by_a_list),
    "makes a parameter": lambda: doubles(lambda x: nn.Parameter(x) > 0),
    "applies Python": lambda: doubles(lambda x: x.apply_(abs) > 0),
    "splits by a tensor": lambda: doubles(split_by_a_tensor),
    "splits by a named tensor": lambda: doubles(split_by_a_named_tensor),
    "selects by mask": lambda: Net(selects_by_mask),
    "is given the memory of another": lambda: doubles(by_the_memory_of_another),
    "computes in a thread": lambda: doubles(in_a_thread),
    "computes in a thread, and collects": lambda: doubles(in_a_thread_after_a_collection),
    "computes in a thread that holds it": lambda: doubles(in_a_thread_that_holds_it),
    "computes in a thread, and takes a view": lambda: doubles(lambda x: in_a_thread(x[:, 0])[:, None]),
    "catches a failure": lambda: Net(factor=lambda s, x: 2.0 if succeeds(torch.linalg.cholesky, -x.T @ x) else 3.0),
    "catches a failed check": lambda: Net(
        factor=lambda s, x: 2.0 if succeeds(F.one_hot, x.abs().mul(9).long(), num_classes=1) else 3.0
    ),
    "names a proxy": lambda: Net(factor=lambda s, x: PROXY.factor),
    "holds too much to compare": lambda: Net(held={number: [0.0] * 300 for number in range(40)}),
    "has a hook": with_a_hook,
    "own function": lambda: Net(lambda s, x: Double.apply(s.logits(x))),
    "sparse buffer": lambda: Net(by_neighbours, buffers={"neighbours": torch.eye(7).to_sparse()}),
    "sparse attribute": lambda: Net(by_neighbours, neighbours=torch.eye(7).to_sparse()),
}  # fmt: skip


class Run:
    """Streams batches through one computer, and counts how often the pass itself runs."""

    def __init__(self, model, task=TASK, **settings):
        self.computer = HookGradientComputer(model, task, **settings)
        self.passes, self.to_come = 0, math.inf

    def __call__(self, batch):
        work = functools.partial(self.work, batch)
        return self.computer.run(batch, self.computer.model, (), work, self.to_come)

    def work(self, batch):
        self.passes += 1
        sums = {}

        def sink(block):
            sums[block.name] = sums.get(block.name, 0) + block.dense()

        terms = self.computer.stream_gradients(batch, sink)
        return [torch.cat([sums[name] for name in self.computer.parameters], 1), *terms]


def batches(count=NUM_BATCHES, size=4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(size, 5, generator=generator)
        yield x, torch.randint(3, (size,), generator=generator)


def reference(model, batch, task=TASK):
    grads = collect_gradients(IterativeGradientComputer(model, task, self_check=False), batch)
    return torch.cat([grad.flatten(1) for grad in grads.values()], 1)


def made(build):
    torch.manual_seed(0)
    return build().eval()


def replaying(build, **settings):
    """Return a model and a run of it whose batches are replayed by now, if they can be."""
    model = made(build)
    run = Run(model, **settings)
    for batch in batches(7):
        run(batch)
    return model, run


def reads_outside():
    return Net(factor=lambda s, x: READ_OUTSIDE["factor"])


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.quick) if kind == "perceptron" else kind for kind in REPLAYED],
)
def test_replays_have_the_bits_of_the_pass(kind):
    """Results are not overwritten by later batches."""
    run, plain = Run(made(REPLAYED[kind])), Run(made(REPLAYED[kind]), self_check=False)
    plain.to_come = 0  # no batch is worth a recording
    results = [run(batch) for batch in batches(10)]
    for batch, found in zip(batches(10), results, strict=True):
        assert all(map(torch.equal, found, plain(batch)))
    assert run.passes < 10, "what can be replayed is replayed from the seventh batch on"
    assert plain.passes == 10


@pytest.mark.parametrize("build", NOT_REPLAYED.values(), ids=NOT_REPLAYED)
def test_what_a_recording_cannot_see_runs_the_pass_and_the_log_says_why(build, caplog):
    model = made(build)
    run, told = Run(model, self_check=False), 0
    with caplog.at_level(logging.INFO, "trak_lite"):
        for number, batch in enumerate(batches(9), 1):
            found = run(batch)[0]
            told += "are not replayed: " in caplog.text
            if number == 1 or told:
                torch.testing.assert_close(found, reference(model, batch), rtol=1e-4, atol=1e-6)
            if told == 2:
                break
    assert run.passes == number, "what can be replayed is replayed from the fifth batch on"
    assert caplog.text.count(f"Passes of {type(model).__name__} are not replayed: ") == 1
    if build is counts_in_a_tensor:
        assert "it writes into a tensor" in caplog.text


@pytest.mark.parametrize("enabled", [True, False])
def test_a_recording_leaves_the_garbage_collector_as_it_was(enabled):
    gc.freeze()
    before = gc.get_freeze_count()
    try:
        (gc.enable if enabled else gc.disable)()
        _, run = replaying(REPLAYED["perceptron"])
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert run.passes < 7, "it was recorded"
    assert gc.get_freeze_count() > 0.9 * before, "some of them are no longer used"


def test_a_weight_that_changes_while_a_pass_is_recorded_is_noticed():
    """The pass is not run again, which would change nothing more."""
    written = []

    def write(s, x):
        if type(_get_current_dispatch_mode()).__name__ == "Tape" and not written:
            written.append(True)
            with torch.no_grad():
                s.first.weight.add_(0.5)

    computer, projector = HookGradientComputer(made(lambda: Net(does=write)), TASK), CountSketchProjector(16)
    settings = {"model_id": 0, "rows": np.arange(4), "what": "train", "to_come": math.inf}
    features = (compute_features(computer, projector, batch, **settings) for batch in batches())
    with pytest.raises(UnsupportedModelError, match="writes into 1 of its parameters"):
        list(features)
    assert written


READS = {
    "bool": lambda x: bool((x < 100).all()),
    "sign of a zero": lambda x: math.copysign(1.0, (0 * (100 - x.max())).item()) > 0,
    "allclose": lambda x: torch.allclose(x, x.clamp(max=100.0)),
    "factorisation": lambda x: succeeds(torch.linalg.cholesky, torch.eye(2) * (100 - x.max())),
    "inverse": lambda x: succeeds(torch.linalg.inv, torch.eye(2) * torch.relu(100 - x.max())),
    "eigenvalues": lambda x: succeeds(torch.linalg.eigh, torch.eye(4) / (x.max() < 100)),
    "checked factors": lambda x: succeeds(
        torch.linalg.cholesky_ex, torch.eye(2) * (100 - x.max()), check_errors=True
    ),
    "reduction": lambda x: succeeds(
        torch.index_reduce, torch.ones(9), 0, x[:, 0].abs().long() // 100, torch.ones(len(x)), "amax"
    ),
    "index": lambda x: succeeds(torch.index_select, torch.ones(100), 0, x[:, 0].abs().long()),
    "entropy": lambda x: succeeds(F.binary_cross_entropy, x.abs() / 100, x.sigmoid()),
    "assertion": lambda x: succeeds(torch._assert_async, x.max() < 100),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_batch_in_which_python_reads_another_value_runs_the_pass(read):
    """Or in which an operation fails whose result nobody uses."""
    model, run = replaying(lambda: Net(factor=lambda s, x: 2.0 if read(x) else 3.0))
    x, y = next(batches(1))
    x = x + 1000
    before = run.passes
    assert before < 7
    torch.testing.assert_close(run((x, y))[0], reference(model, (x, y)))
    assert run.passes == before + 1


def put(path, make):
    """Return a change of a model that puts something in the place of what it has there."""

    def change(model):
        owner, _, name = path.rpartition(".")
        owner = operator.attrgetter(owner)(model) if owner else model
        setattr(owner, name, make(getattr(owner, name)))

    return change


WEIGHTS = {
    "changed": lambda model: nn.init.constant_(model.first.weight, 0.3),
    "other data": put("first.weight.data", lambda old: old * 3),
    "loaded": lambda model: model.load_state_dict({n: v * 5 for n, v in model.state_dict().items()}),
}


def renames_a_buffer(model):
    buffers = vars(model)["_buffers"]
    buffers["gain"] = buffers.pop("loss")


def overrides(model):
    del Bare.marker
    Bare.gain = lambda self: 6.0


CHANGES = {
    **WEIGHTS,
    "a parameter": put("first.weight", lambda old: nn.Parameter(old.detach() * 4)),
    "an attribute": put("scale", lambda old: 6.0),
    "a configuration": lambda model: vars(model.config["layers"][0]).update(scale=6.0),
    "frozen": put("last.weight.requires_grad", lambda old: False),
    "a hook": lambda model: model.first.register_forward_hook(lambda module, args, result: result * 7),
    "a module": put("first", lambda old: nn.Linear(5, 7)),
    "an alias of a module": lambda model: setattr(model, "head", model.layers[1]),
    "a name of a module": lambda model: operator.setitem(model.named, "gain", model.named.pop("loss")),
    "a name of a buffer": renames_a_buffer,
    "a layer once more": lambda model: model.extras.append(model.extra),
    "a shape at the same place": put("table.data", lambda old: old[:1]),
    "a module in a list": lambda model: setattr(model.held["modules"][0], "value", 6.0),
    "a distribution": put("prior.scale", lambda old: old * 6),
    "a dict of its class": lambda model: OfClass.settings.update(scale=6.0),
    "an object of its class": lambda model: vars(OfClass.more).update(scale=6.0),
    "other data of a tensor": put("shift.data", lambda old: old + 1),
    "a tensor of inference": torch.inference_mode()(lambda model: model.frozen.fill_(6.0)),
    "an array": lambda model: operator.setitem(model.held["array"], 0, 6.0),
    "an array of objects": lambda model: operator.setitem(model.held["objects"], 0, 6.0),
    "an array of Python": lambda model: operator.setitem(model.held["numbers"], 0, 6.0),
    "bytes": lambda model: operator.setitem(model.held["bytes"], 0, 6),
    "a deque": lambda model: operator.setitem(model.held["deque"], 0, 6.0),
    "slots": lambda model: setattr(model.held["slots"], "calls", 6.0),
    "a long list": lambda model: operator.setitem(model.held["list"], 300, 6.0),
    "a list in lists": lambda model: operator.setitem(model.held["lists"][0][0][0][0], 0, 6.0),
    "a method of its class": lambda model: setattr(OfClass, "gain", lambda self: 6.0),
    "a cached method of its class": lambda model: setattr(
        OfClass, "cached", functools.cache(lambda self: 6.0)
    ),
    "a method of a subclass": lambda model: setattr(Bare, "gain", lambda self: 6.0),
    "a key": lambda model: model.held["named"].update({"gain": model.held["named"].pop("loss")}),
    "a name": lambda model: vars(model.held["object"]).update(gain=vars(model.held["object"]).pop("loss")),
    "its own name": lambda model: vars(model).update(gains=vars(model).pop("losses")),
    "an override in place of another attribute": overrides,
    "an attribute of its class": lambda model: setattr(OfClass, "offset", 6.0),
    "an attribute of a dict": lambda model: setattr(model.held["subclass"], "scale", 6.0),
    "what a partial function holds": lambda model: model.held["partial"].keywords["by"].update(scale=6.0),
    "what the object of a method holds": lambda model: model.held["method"]().update(scale=6.0),
    "what the object of a built-in method holds": lambda model: model.held["built-in"].__self__.update(
        scale=6.0
    ),
    "mangled slots": lambda model: model.held["mangled"].put(6.0),
    "the order of layers": put("layers", lambda old: nn.ModuleList(reversed(old))),
}


class OfClass(Net):
    offset = 1.0
    settings, more = {"scale": 1.0}, types.SimpleNamespace(scale=1.0)

    def gain(self):
        return 1.0

    @functools.cache  # noqa: B019
    def cached(self):
        return 1.0


class Bare(OfClass):
    """Has no method of its own."""

    marker = 1


class Named(dict[str, float]):
    scale = 1.0


class Mangled:
    __slots__ = ("__value",)

    def __init__(self, value=1.0):
        self.__value = value

    def put(self, value):
        self.__value = value

    def get(self):
        return self.__value


def held():
    """Return numbers in what an attribute may hold."""
    slots = Slots()
    slots.calls = 1.0
    return {
        "array": np.ones(2),
        "objects": np.array([1.0, None]),
        "numbers": array.array("d", [1.0]),
        "bytes": bytearray(b"\x01"),
        "deque": collections.deque([1.0]),
        "slots": slots,
        "list": [1.0] * 301,
        "named": {"loss": 1.0},
        "object": types.SimpleNamespace(loss=1.0),
        "mangled": Mangled(),
        "subclass": Named(),
        "partial": functools.partial(lambda by: by["scale"], by={"scale": 1.0}),
        "lists": [[[[[1.0]]]]],
        "method": Mangled({"scale": 1.0}).get,
        "built-in": {"scale": 1.0}.get,
        "modules": [nn.Threshold(0.0, 1.0)],
    }


def product_of(held):
    """Return the product of the numbers."""
    firsts = [held[name][0] for name in ("array", "objects", "numbers", "bytes", "deque")]
    firsts += [6.0 if "gain" in held["named"] else 1.0, 6.0 if hasattr(held["object"], "gain") else 1.0]
    firsts += [held["mangled"].get(), held["subclass"].scale, held["partial"](), held["modules"][0].value]
    firsts += [held["method"]()["scale"], held["built-in"]("scale")]
    return math.prod(
        [*map(float, firsts), held["slots"].calls, held["list"][300], held["lists"][0][0][0][0][0]]
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_between_batches_counts_at_once(change, monkeypatch):
    def changing(s, x):
        x = s.logits(x) * s.scale * s.config["layers"][0].scale * s.gain() * s.cached() * product_of(s.held)
        x = x * s.offset * s.settings["scale"] * s.more.scale * s.prior.scale * len(s.table)
        x = x * s.shift.exp() * s.frozen.mul(2.0)
        x = x * math.prod(6.0 if "gain" in held else 1.0 for held in (s.named, dict(s.named_buffers())))
        x = x * (6.0 if "gains" in vars(s) else 1.0)
        for extra in (s.head, s.extra, *s.extras):
            x = torch.tanh(extra(x))
        for layer in s.layers:
            x = torch.tanh(layer(x))
        return x

    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    config = {"layers": [types.SimpleNamespace(scale=1.0)]}
    for name in ("gain", "cached", "offset"):
        monkeypatch.setattr(OfClass, name, vars(OfClass)[name])  # back after the test
    monkeypatch.setattr(OfClass, "settings", {"scale": 1.0})
    monkeypatch.setattr(OfClass, "more", types.SimpleNamespace(scale=1.0))
    with torch.inference_mode():
        frozen = torch.ones(3)
    tensors = {
        "shift": torch.zeros(3),
        "frozen": frozen,
        "prior": torch.distributions.Normal(0.0, torch.ones(3)),
    }
    modules = {"layers": layers, "head": layers[0], "named": nn.ModuleDict({"loss": nn.Identity()})}
    modules |= {"extra": (tanh := nn.Tanh()), "extras": nn.ModuleList([tanh])}
    buffers = {"table": torch.ones(2), "loss": torch.ones(3)}
    model, run = replaying(
        lambda: Bare(
            changing, scale=1.0, config=config, held=held(), losses=1.0, buffers=buffers, **tensors, **modules
        )
    )
    assert run.passes < 7
    change(model)
    try:
        for batch in batches(3):
            torch.testing.assert_close(run(batch)[0], reference(model, batch))
    finally:
        Bare.marker = 1
        if "gain" in vars(Bare):
            del Bare.gain


class Task(AbstractModelOutput):
    """A task that is a class, with factors in all places."""

    factor = 1.0

    def __init__(self):
        self.settings, self.factors = types.SimpleNamespace(factor=1.0), {"own": 1.0}
        self.teacher = nn.Threshold(0.0, 1.0)

    def evaluate(self, call, batch):
        factor = (
            self.factor * self.settings.factor * self.factors["own"] * self.teacher.value * SETTINGS.factor
        )
        output = call(batch[0]).sum(1) * factor * FACTOR
        return OutputTerms(output, torch.ones_like(output).detach(), torch.zeros_like(output).detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda task, put: put.setattr(Task, "factor", 2.0),
        lambda task, put: put.setattr(task.settings, "factor", 2.0),
        lambda task, put: put.setitem(task.factors, "own", 2.0),
        lambda task, put: put.setattr(task.teacher, "value", 2.0),
        lambda task, put: put.setattr(SETTINGS, "factor", 2.0),
        lambda task, put: put.setitem(globals(), "FACTOR", 2.0),
    ],
    ids=["class", "object", "dict", "module", "settings", "global"],
)
def test_a_change_of_a_task_that_is_a_class_counts_at_once(change, monkeypatch):
    task, model = Task(), made(Net)
    run = Run(model, task)
    for number, batch in enumerate(batches(13)):
        if number == 10:
            assert run.passes < 10
            change(task, monkeypatch)
        torch.testing.assert_close(run(batch)[0], reference(model, batch, task))


class Settings:
    factor = 1.0


class Derived(Settings): ...


class Proxy:
    """As those of web frameworks outside of a request."""

    def __getattribute__(self, name):
        if name == "factor":
            return 2.0
        raise RuntimeError("working outside of the context")


PROXY = Proxy()


class Reader:
    def __call__(self, s, x):
        return FACTOR


def by_factor(one, s, x):
    return one * FACTOR


def of_a_cell():
    factor = 1.0

    def put(value):
        nonlocal factor
        factor = value

    return lambda s, x: factor, put


class Shadowing(Settings):
    """Gets an attribute of its own in place of that of its base class."""


ZERO = types.SimpleNamespace(factor=0.0)
OF_CLASS, PARTS = Settings(), types.SimpleNamespace(part=types.SimpleNamespace(factor=1.0))


class Scale:
    """Reads attributes of its own and of an object that it holds."""

    def __init__(self):
        self.factor, self.settings = 1.0, Settings()

    def __call__(self, s, x):
        return self.factor * self.settings.factor

    def method(self, s, x):
        return self.factor * self.settings.factor


CALLED, METHOD, IMPORTED = Scale(), Scale(), types.ModuleType("imported_by_a_task")
IMPORTED.FACTOR, IMPORTED.weight = 1.0, torch.ones(3)
sys.modules[IMPORTED.__name__] = IMPORTED


def by_settings(settings, s, x):
    return settings.factor


def imports(s, x):
    from imported_by_a_task import FACTOR

    return FACTOR


def own(owner, name="factor"):
    """Return a function that gives an object or a class an attribute, or takes it away where the value is 1."""

    def put(value):
        if value != 1.0:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    return put


def sets(owner, name="factor"):
    """Return a function that gives an object or a class another value of an attribute."""
    return lambda value: setattr(owner, name, value)


GLOBAL = functools.partial(operator.setitem, globals(), "FACTOR")
OUTSIDE = {
    "an object in place of its class": (lambda s, x: OF_CLASS.factor, own(OF_CLASS)),
    "a class in place of its base": (lambda s, x: Shadowing.factor, own(Shadowing)),
    "a part of an object": (lambda s, x: PARTS.part.factor, sets(PARTS.part)),
    "a default": (lambda s, x, settings=SETTINGS: settings.factor, sets(SETTINGS)),
    "a default by name": (lambda s, x, *, settings=SETTINGS: settings.factor, sets(SETTINGS)),
    "an argument of a partial function": (functools.partial(by_settings, SETTINGS), sets(SETTINGS)),
    "an import": (imports, sets(IMPORTED, "FACTOR")),
    "an attribute of what is called": (lambda s, x: CALLED(s, x), sets(CALLED)),
    "a part of what is called": (lambda s, x: CALLED(s, x), own(CALLED.settings)),
    "an attribute of the object of a method": (METHOD.method, sets(METHOD)),
    "a part of the object of a method": (METHOD.method, own(METHOD.settings)),
    "a global": (lambda s, x: FACTOR, GLOBAL),
    "a class": (lambda s, x: Settings.factor, sets(Settings)),
    "an entry of a dict": (
        lambda s, x: CONFIG["factor"],
        functools.partial(operator.setitem, CONFIG, "factor"),
    ),
    "an object": (lambda s, x: SETTINGS.factor, sets(SETTINGS)),
    "the sign of a zero": (
        lambda s, x: 2.0 if math.copysign(1.0, ZERO.factor) < 0 else 1.0,
        lambda value: setattr(ZERO, "factor", value * (-0.0 if value == 2.0 else 0.0)),
    ),
    "a context": (lambda s, x: OF_CONTEXT.get(), OF_CONTEXT.set),
    "a cell": of_a_cell(),
    "a function inside": (lambda s, x: sum(FACTOR for _ in range(1)), GLOBAL),
    "a base class": (lambda s, x: Derived.factor, sets(Settings)),
    "an object that is called": (Reader(), GLOBAL),
    "a partial function": (functools.partial(by_factor, 1.0), GLOBAL),
    "arguments of a command": (lambda s, x: ARGUMENTS.factor, sets(ARGUMENTS)),
}


@pytest.mark.parametrize(("read", "put"), OUTSIDE.values(), ids=OUTSIDE)
def test_batches_in_which_code_finds_another_value_outside_the_model_run_the_pass(read, put):
    """Those with the value of the recording are replayed; the value of the last one is not that of the end."""
    put(1.0)
    model, run = replaying(lambda: Net(factor=read))
    before, batch = run.passes, next(batches(1))
    assert before < 7
    for number, value in enumerate((2.0, torch.tensor(3.0), None), 1):
        put(1.0 if value is None else value)
        torch.testing.assert_close(run(batch)[0], reference(model, batch))
        # What a partial function or a method holds may count as an attribute, whose change ends the recordings.
        is_attribute = isinstance(read, functools.partial | types.MethodType) and run.passes == before + 3
        assert run.passes == before + min(number, 2) or is_attribute
    put(2.0)
    run.computer.confirm()
    for batch in batches(10):
        torch.testing.assert_close(run(batch)[0], reference(model, batch))
    assert run.passes < before + 12, "a value that stays is recorded"
    put(1.0)


class Criterion(nn.Module):
    """A loss with weights and a state of its own, as a task reads it."""

    def __init__(self):
        super().__init__()
        self.last, self.scale, self.more = nn.Linear(3, 3), 1.0, {"shift": 0.0}
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, logits):
        outputs = (self.last(logits) * self.scale - self.centre + self.more["shift"]).square().sum(1)
        return outputs * (3.0 if self.training else 1.0)


class Reads:
    def task(self, call, batch):
        return CRITERION(call(batch[0]))


CRITERION = IMPORTED.criterion = Criterion()


def as_a_default(call, batch, criterion=CRITERION):
    return criterion(call(batch[0]))


def through_a_function(call, batch):
    return as_a_default(call, batch)


def of_a_closure(criterion):
    return lambda call, batch: criterion(call(batch[0]))


class Called(Reads):
    """A task that is called, and a class whose attributes are read."""

    criterion = CRITERION
    __slots__ = ("part",)

    def __call__(self, call, batch):
        return CRITERION(call(batch[0]))

    @staticmethod
    def method(logits):
        return CRITERION(logits)


class Holding:
    def __init__(self):
        self.parts = [CRITERION]

    def loss(self, logits):
        return self.compute(logits)

    def compute(self, logits):
        return self.parts[0](logits)


class OfCriterion(AbstractModelOutput):
    def evaluate(self, call, batch):
        output = CRITERION(call(batch[0]))
        return OutputTerms(output, torch.ones_like(output).detach(), torch.zeros_like(output).detach())


def of_a_slot():
    read = Called()
    read.part = types.SimpleNamespace(loss=CRITERION)
    return lambda call, batch: read.part.loss(call(batch[0]))


TASKS_WITH_MODULES = {
    "a global": lambda call, batch: CRITERION(call(batch[0])),
    "a closure": of_a_closure(CRITERION),
    "a default": as_a_default,
    "a function": through_a_function,
    "a partial function": functools.partial(as_a_default, criterion=CRITERION),
    "a method": Reads().task,
    "a list": (lambda held: lambda call, batch: held[1](call(batch[0])))([None, CRITERION]),
    "a dict in a default": lambda call, batch, held={"loss": CRITERION}: held["loss"](call(batch[0])),
    "an object": of_a_slot(),
    "a method of an object": (lambda held: lambda call, batch: held.loss(call(batch[0])))(Holding()),
    "a class": lambda call, batch: Called.criterion(call(batch[0])),
    "a module": lambda call, batch: IMPORTED.criterion(call(batch[0])),
    "a static method": lambda call, batch: Called.method(call(batch[0])),
    "an object that is called": Called(),
    "a cached function": (lambda read: lambda call, batch: read()(call(batch[0])))(
        functools.cache(lambda: CRITERION)
    ),
    "a task that is a class": OfCriterion(),
}
CHANGES_OF_MODULES = {
    "mode": lambda module: module.train(not module.training),
    "attribute": lambda module: setattr(module, "scale", module.scale + 1.0),
    "entry": lambda module: module.more.update(shift=module.more["shift"] + 1.0),
    "buffer": lambda module: setattr(module, "centre", module.centre + 1.0),
    "submodule": lambda module: setattr(module, "last", nn.Linear(3, 3)),
    "hook": lambda module: module.last.register_forward_hook(lambda *given: given[2] * 2.0),
}


@pytest.mark.parametrize("task", TASKS_WITH_MODULES.values(), ids=TASKS_WITH_MODULES)
def test_a_change_of_a_module_that_a_task_reads_by_name_counts_at_once(task):
    """As often as the module changes, and also where it changes back."""
    task, model = resolve_task(task), made(Net)
    CRITERION.__init__()
    for change in CHANGES_OF_MODULES.values():
        run = Run(model, task)
        for batch in batches(8):
            run(batch)
        assert run.passes < 8
        for batch in batches(2):
            change(CRITERION)
            torch.testing.assert_close(run(batch)[0], reference(model, batch, task))
        run.computer.confirm()


def test_an_object_outside_the_model_that_is_replaced_runs_the_pass(monkeypatch):
    monkeypatch.setitem(globals(), "REPLACED", types.SimpleNamespace(factor=1.0))
    model, run = replaying(lambda: Net(factor=lambda s, x: REPLACED.factor))
    monkeypatch.setitem(globals(), "REPLACED", types.SimpleNamespace(factor=2.0))
    batch, before = next(batches(1)), run.passes
    torch.testing.assert_close(run(batch)[0], reference(model, batch))
    assert run.passes == before + 1


def test_a_variable_of_a_script_with_the_name_of_an_attribute_ends_no_replays(monkeypatch):
    run = Run(made(lambda: Net(factor=lambda s, x: x.new_tensor(2.0).real)))
    for number, batch in enumerate(batches(12)):
        monkeypatch.setitem(globals(), "real", float(number))
        run(batch)
    assert run.passes < 10


@pytest.mark.parametrize(("count", "found"), [(31, "by the next comparison"), (NUM_BATCHES, "at the end")])
def test_a_value_outside_the_model_that_changes_ends_the_run_with_the_rows_since_a_comparison(
    count, found, monkeypatch
):
    monkeypatch.setitem(READ_OUTSIDE, "factor", 1.0)
    run = Run(made(reads_outside))
    for number, batch in enumerate(batches(count)):
        run.computer.name_rows("train", np.arange(4 * number, 4 * number + 4))
        run(batch)
    READ_OUTSIDE["factor"] = 2.0

    def end():
        if found == "at the end":
            run.computer.confirm()
        else:
            run.computer.name_rows("train", np.arange(4 * count, 4 * count + 4))
            run(next(batches(1)))

    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value") as caught:
        end()
    np.testing.assert_array_equal(caught.value.rows["train"], np.arange(4 * 16, 4 * count))


def replays_another_shape(run):
    for number, batch in enumerate(batches(NUM_BATCHES, 6)):
        run.computer.name_rows("train", np.arange(200 + 6 * number, 206 + 6 * number))
        run(batch)


def makes_room_for_another_shape(run):
    for size in (5, 6):
        for batch in batches(12, size):
            run(batch)


@pytest.mark.parametrize(
    ("then", "at_once"),
    [
        (replays_another_shape, False),
        (makes_room_for_another_shape, True),
    ],
)
def test_a_value_outside_the_model_that_changes_is_noticed_whatever_follows(then, at_once, monkeypatch):
    """Batches of other shapes do not read it."""
    monkeypatch.setattr("trak_lite.gradient_computers.replays._MOST_RECORDINGS", 2)

    def finished(factor):
        monkeypatch.setitem(READ_OUTSIDE, "factor", 1.0)
        run = Run(made(lambda: Net(factor=lambda s, x: READ_OUTSIDE["factor"] if len(x) == 4 else 1.0)))
        for number, batch in enumerate(batches()):
            run.computer.name_rows("train", np.arange(4 * number, 4 * number + 4))
            run(batch)
        assert run.passes < NUM_BATCHES
        READ_OUTSIDE["factor"] = factor
        then(run)
        if factor == 1.0 or not at_once:
            run.computer.confirm()

    finished(1.0)
    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value") as caught:
        finished(2.0)
    assert set(range(4 * 16, 4 * NUM_BATCHES)) <= set(caught.value.rows["train"].tolist())


def test_the_memory_of_batches_that_wait_for_a_comparison_is_bounded(monkeypatch):
    run = Run(made(Net))
    for pair in zip(batches(), batches(size=6), strict=True):
        for batch in pair:
            run(batch)
    run.computer.confirm()
    monkeypatch.setattr("trak_lite.gradient_computers.replays._MOST_BYTES", 1)
    passes = []
    for size in (4, 4, 6, 6, 4):
        before = run.passes
        run(next(batches(size=size)))
        passes.append(run.passes - before)
    assert passes == [0, 0, 1, 1, 0], "one batch may wait, whatever its size"


def test_a_tensor_of_the_model_that_changes_is_no_error_after_the_last_batch():
    """Replays of both shapes read the tensor; after it has changed there are batches of one."""
    model = made(lambda: Net(factor=lambda s, x: s.scale.exp(), scale=torch.zeros(1)))
    run = Run(model)
    for pair in zip(batches(), batches(size=6), strict=True):
        for batch in pair:
            run(batch)
    assert run.passes < 2 * NUM_BATCHES
    model.scale.fill_(2.0)
    batch = next(batches(1))
    torch.testing.assert_close(run(batch)[0], reference(model, batch))
    run.computer.confirm()


GIVEN = types.SimpleNamespace(weight=torch.ones(3), part=types.SimpleNamespace(weight=torch.ones(3)))
GIVEN_IN_TURN = {
    "a global": (lambda s, x: WEIGHT, functools.partial(operator.setitem, globals(), "WEIGHT")),
    "an attribute": (lambda s, x: GIVEN.weight, sets(GIVEN, "weight")),
    "a part": (lambda s, x: GIVEN.part.weight, sets(GIVEN.part, "weight")),
    "a module": (lambda s, x: IMPORTED.weight, sets(IMPORTED, "weight")),
    "an entry of a dict": (
        lambda s, x: CONFIG["weight"],
        functools.partial(operator.setitem, CONFIG, "weight"),
    ),
}


@pytest.mark.parametrize(("read", "put"), GIVEN_IN_TURN.values(), ids=GIVEN_IN_TURN)
def test_another_tensor_or_number_of_numpy_that_a_name_is_given_runs_the_pass(read, put):
    model, run = replaying(lambda: Net(factor=read))
    assert run.passes < 7
    for number, batch in enumerate(batches(5), 2):
        put(torch.full((3,), float(number)) if number % 2 else np.float32(number))
        torch.testing.assert_close(run(batch)[0], reference(model, batch))
    put(torch.ones(3))


def test_an_array_that_the_pass_makes_a_tensor_of_is_read_anew():
    array = np.ones(3, dtype=np.float32)
    model, run = replaying(lambda: Net(factor=lambda s, x: torch.from_numpy(array).exp()))
    passes = run.passes
    for number, batch in enumerate(batches(5)):
        array[:] = number / 10
        torch.testing.assert_close(run(batch)[0], reference(model, batch))
    assert run.passes < passes + 5


def by_numpy(tensor, number):
    tensor.numpy()[:] = number


def by_a_fused_optimizer(tensor, number):
    tensor.grad = torch.full_like(tensor, float(number))
    torch.optim.SGD([tensor], lr=0.1, fused=True).step()


CHANGES_OF_TENSORS = {
    "NumPy": by_numpy,
    "data": lambda tensor, number: tensor.data.fill_(float(number)),
    "a fused optimizer": by_a_fused_optimizer,
    "an operation": lambda tensor, number: tensor.fill_(float(number)),
    "other strides": lambda tensor, number: tensor[:, 0].fill_(float(number)) is tensor.t_(),
}


@pytest.mark.parametrize("change", CHANGES_OF_TENSORS.values(), ids=CHANGES_OF_TENSORS)
@pytest.mark.parametrize("holder", ["the model", "a closure"])
def test_tensors_that_are_no_parameters_or_buffers_are_read_anew(change, holder):
    """Their values change without a new version; what depends on them alone is computed again."""
    tensor = torch.ones(3, 3)

    def factor(s, x):
        held = tensor if s.held is None else s.held[0]
        return held.exp().sum(0) + held[1]

    model = made(lambda: Net(factor=factor, held=[tensor] if holder == "the model" else None))
    run = Run(model)
    for number, batch in enumerate(batches()):
        if number >= 7:
            change(tensor, number / 10)
        torch.testing.assert_close(run(batch)[0], reference(model, batch))
    assert run.passes < NUM_BATCHES - 5 or change is CHANGES_OF_TENSORS["other strides"]
    run.computer.confirm()


class Raising:
    """Its attributes cannot be looked at."""

    __slots__ = ("unset",)

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize("change", ["an attribute and a value elsewhere", "hooks of all modules", "errors"])
def test_right_rows_end_no_run(change):
    """What changes together with a value outside the model belongs to the next batches."""
    values = {"factor": 1.0}
    factor = (lambda s, x: values["factor"]) if change.startswith("an") else None
    run = Run(made(lambda: Net(factor=factor, **({"odd": Raising()} if change == "errors" else {}))))
    for batch in batches():
        run(batch)
    assert (run.passes == NUM_BATCHES) == (change == "errors")
    model, hook = run.computer.model, None
    if change == "hooks of all modules":
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, result: 2 * result)
    elif change != "errors":
        model.mode, values["factor"] = 2, 2.0
    try:
        for batch in batches(3):
            torch.testing.assert_close(run(batch)[0], reference(model, batch))
        run.computer.confirm()
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("more", [0, 1, 4])
def test_a_graph_hides_no_value_that_changed_before_it_was_captured(more, monkeypatch):
    """On a CPU the recording stands for the graph."""

    def capture(replays, kind, leaves, to_come):
        if READ_OUTSIDE["factor"] == 2.0 and kind.graph is None:
            kind.graph, kind.confirmed = kind.recording.__call__, False

    def rows():
        """Change the factor after the first replay; end some batches after the second, whose rows are wrong."""
        run, replays, left = Run(made(reads_outside), self_check=False), 0, more
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


def test_a_replay_before_other_paths_is_compared_at_the_end(monkeypatch):
    def clamps(s, x):
        x = x.clamp(max=100.0) if bool((x > 100).any()) else x
        return s.logits(x) * READ_OUTSIDE["factor"]

    def finished(factor):
        run = Run(made(lambda: Net(clamps)), self_check=False)
        monkeypatch.setitem(READ_OUTSIDE, "factor", 1.0)
        for number, (x, y) in enumerate(batches(), 1):
            run((x + 1000 if number > 17 else x, y))
        READ_OUTSIDE["factor"] = factor
        run.computer.confirm()
        run(next(batches(1)))
        return run

    assert finished(1.0).passes > NUM_BATCHES - 17
    with pytest.raises(UnsupportedModelError, match="counter, a cache, a global value"):
        finished(2.0)


@pytest.fixture
def repeating_inputs():
    with recording.repeating_inputs():
        yield


def multiplies_in_place(s, x):
    hidden = torch.tanh(s.first(x))
    return s.last(hidden.clone().mul_(2.0))


def scales_a_product_in_place(s, x):
    """A product of more than two axes is a view that does not say so."""
    hidden = torch.tanh(s.first(x))[:, :, None]
    scores = torch.matmul(hidden, hidden.mT)
    scores /= 2.0
    return s.last((scores @ hidden)[:, :, 0])


@pytest.mark.parametrize("logits", [Net.logits, multiplies_in_place, scales_a_product_in_place])
def test_other_labels_of_the_same_inputs_run_what_depends_on_labels_alone(logits, monkeypatch, request):
    """Until the inputs, or a weight, change in place; after the run, or a pass, nothing is kept."""
    ran, real = list[int](), recording._compiled

    def counted(steps, *given):
        replay, constants = real(steps, *given)
        return lambda *inputs: ran.append(len(steps)) or replay(*inputs), constants

    monkeypatch.setattr(recording, "_compiled", counted)
    model, run = replaying(lambda: Net(logits))
    (whole,) = set(ran)
    x = torch.randn(4, 5)
    for _ in range(2):
        ran.clear()
        run((x, torch.randint(3, (4,))))
        assert ran == [whole], "only where inputs are known to be repeated"
    request.getfixturevalue("repeating_inputs")

    def check(*expected):
        batch = x, torch.randint(3, (4,))
        ran.clear()
        found = run(batch)
        torch.testing.assert_close(found[0], reference(model, batch))
        for one, other in zip(found, run.work(batch), strict=True):
            assert torch.equal(one, other)
        assert ran == [*expected]

    check(whole)
    ran.clear()
    run((x, torch.randint(3, (4,))))
    first, second = ran
    assert first + second == whole
    assert min(first, second) > 0
    check(second)
    x.mul_(0.5)
    check(first, second)
    check(second)
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    check(first, second)
    x = x.clone()
    check(first, second)
    (halves,) = (kind.recording._halves for kind in run.computer._replays._kinds.values())
    assert halves.kept is not None
    run.computer.confirm()
    assert halves.kept is None
    check(first, second)
    run(next(batches(1, size=7)))
    assert halves.kept is None, "a pass over a batch of another shape runs without it"
    check(first, second)
    with torch.overrides.BaseTorchFunctionMode():  # is not replayed
        run((x, torch.zeros(4, dtype=torch.long)))
    assert halves.kept is None


def test_a_replay_is_divided_again_if_other_inputs_stay(request):
    """Those that stay from the first batch to the second may differ from those of later batches."""

    class Three(torch.nn.Module):
        def forward(self, x, mask, labels):
            return (x.exp() * mask.exp()).sum(1) * labels

    inputs = [torch.randn(4, 5), torch.rand(4, 5), torch.ones(4)]
    tape = Tape(inputs, [])
    with tape, torch.no_grad():
        found = Three()(*inputs)
    replay = tape.finish([found])
    request.getfixturevalue("repeating_inputs")
    used = []
    for text, mask in [(0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (3, 2), (3, 3), (3, 4)]:
        for place, number in ((0, text), (1, mask)):
            if not used or used[-1][place] != number:
                inputs[place] = inputs[place] + 1
        inputs[2] = torch.randn(4)
        (result,) = replay(*inputs)
        torch.testing.assert_close(result, Three()(*inputs), rtol=0, atol=0)
        used.append((text, mask, replay._halves and sorted(replay._halves.places)))
        assert sum(one.kept is not None for one in replay._divisions.values()) <= 1
    assert [places for *_, places in used] == [None, [1], *[[0, 1]] * 5, [0], [0]]


def test_a_lifted_tensor_is_its_argument():
    x = torch.randn(3)
    tape = Tape([x], [])
    with tape, torch.no_grad():
        found = torch.ops.aten.lift(x) * 2
    replay = tape.finish([found])
    assert replay.num_operations == 1
    assert torch.equal(replay(x + 1)[0], (x + 1) * 2)


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
    of_size = {size: next(batches(1, size)) for size in sizes}
    expected = {size: reference(model, batch) for size, batch in of_size.items()}
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        for size in [*sizes] * (96 // len(sizes)):
            torch.testing.assert_close(run(of_size[size])[0], expected[size])
    assert sum("is recorded" in record.message for record in caplog.records) == recorded
    assert run.passes < 96


def test_a_tensor_that_stands_twice_in_a_batch_runs_the_pass():
    model = made(Net)
    task = resolve_task(lambda call, batch: (call(batch[0]) + call(batch[1])).square().sum(1))
    one, other = (computer(model, task) for computer in (HookGradientComputer, IterativeGradientComputer))
    for x, _ in batches(8):
        work = lambda x=x: list(collect_gradients(one, (x, x)).values())  # noqa: E731
        found = one.run((x, x), model, (), work, math.inf)
        for grad, expected in zip(found, collect_gradients(other, (x, x)).values(), strict=True):
            torch.testing.assert_close(grad, expected)


class Scaled(dict[str, Any]):
    """A batch with an attribute."""

    scale = 1.0


def test_a_batch_that_holds_a_data_set_of_texts_is_not_compared_with_others():
    """Its tensors are found without a look at each text."""
    batch = Scaled(x=torch.ones(4, 5))
    batch.texts = ["a text"] * (1 << 18)
    start = time.process_time()
    assert leaves_of(batch)[0] is None
    assert len(flatten_batch(batch)[0]) == 1
    assert time.process_time() - start < 0.1, "some milliseconds; 1 s if all texts are looked at"


class Text(str):
    """A text with an attribute."""

    scale: float


class Short(float):
    """A number whose text leaves digits out."""

    __slots__ = ()
    __repr__ = lambda self: "number"  # noqa: E731


def with_scale(owner, scale):
    owner.scale = scale
    return owner


KINDS_OF_BATCHES = {
    "attribute": (lambda x, late: with_scale(Scaled(x=x), 5.0 if late else 2.0), lambda batch: batch.scale),
    "attribute of a text": (
        lambda x, late: {"x": x, "text": with_scale(Text("a"), 5.0 if late else 2.0)},
        lambda batch: batch["text"].scale,
    ),
    "key": (
        lambda x, late: {"x": x, True if late else 1: x + 0},
        lambda batch: 5.0 if any(key is True for key in batch) else 2.0,
    ),
    "key of the same text": (
        lambda x, late: {"x": x, "text": "a", Short(5.0 if late else 2.0): x + 0},
        lambda batch: sum(key for key in batch if isinstance(key, Short)),
    ),
    "quantized": (
        lambda x, late: {"x": x, "q": torch.quantize_per_tensor(x, 0.5 if late else 0.2, 0, torch.qint8)},
        lambda batch: batch["q"].q_scale(),
    ),
}


@pytest.mark.parametrize(("make", "factor"), KINDS_OF_BATCHES.values(), ids=KINDS_OF_BATCHES)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_differs_in_no_value_or_shape_is_another_kind_of_batch(make, factor):
    model, passes = made(Net), 0
    task = resolve_task(lambda call, batch: (call(batch["x"]) * factor(batch)).square().sum(1))
    one, other = (computer(model, task) for computer in (HookGradientComputer, IterativeGradientComputer))

    def work(batch):
        nonlocal passes
        passes += 1
        return list(collect_gradients(one, batch).values())

    for number, (x, _) in enumerate(batches(24)):
        batch = make(x, number >= 12)
        found = one.run(batch, model, (), lambda batch=batch: work(batch), math.inf)
        expected = collect_gradients(other, batch)
        for grad, value in zip(found, expected.values(), strict=True):
            torch.testing.assert_close(grad, value)
    assert passes < 24 or "text" in batch, "such a text is not compared"


def test_a_tensor_with_an_attribute_runs_the_pass():
    """The pass over the whole batch reads it, and a replay would not."""
    x, y = next(batches(1))
    assert leaves_of((x, y))[0] is not None
    assert leaves_of((with_scale(x, 2.0), y))[0] is None


def test_after_a_failed_check_no_batch_is_replayed():
    def mixes_long_batches(s, x):
        logits = s.logits(x)
        return logits + logits.mean(0) if len(x) == 6 else logits

    _, run = replaying(lambda: Net(mixes_long_batches))
    with pytest.raises(UnsupportedModelError, match="self-check failed"):
        run(next(batches(1, 6)))
    with pytest.raises(UnsupportedModelError, match="failed for an earlier batch"):
        run(next(batches(1)))


def test_what_a_model_keeps_is_freed_when_it_keeps_something_else():
    model = made(NOT_REPLAYED["keeps its input"])
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
        run.computer.run(batch, projector, (), of_batch, math.inf)
    run.computer.confirm(complete=False)  # as after a loop that was not finished
    del projector, of_batch
    assert matrix() is None


def test_autocast_and_modes_of_the_caller_run_the_pass():
    _, run = replaying(Net)
    before, batch = run.passes, next(batches(1))
    with torch.autocast("cpu", torch.bfloat16):
        run(batch)
    with torch.overrides.BaseTorchFunctionMode():
        run(batch)
    assert run.passes == before + 2


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_all_modules_run_the_pass(register):
    run = Run(made(Net))
    hook = register(lambda *_: None)
    try:
        for batch in batches(9):
            run(batch)
        assert run.passes == 9
    finally:
        hook.remove()
    for batch in batches(9):
        run(batch)
    assert run.passes < 18


def test_a_bad_label_is_refused_in_a_replayed_kind_of_batch():
    _, run = replaying(Net)
    x, _ = next(batches(1))
    with pytest.raises(ValueError, match="sample 1: labels"):
        run((x, torch.tensor([0, 5, 1, 1])))


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
        def work(self, batch):
            found = super().work(batch)
            return [found[0] * (1 + error * (self.passes % 2)), *found[1:]]

    monkeypatch.setattr(
        Replays, "_is_unsteady", staticmethod(functools.partial(elsewhere, Replays._is_unsteady))
    )
    model = made(Net)
    run = Unsteady(model, self_check=False)
    for batch in batches():
        torch.testing.assert_close(run(batch)[0], reference(model, batch), rtol=2 * error, atol=1e-6)
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


def elsewhere(is_unsteady, kind, own, found):
    """Call with results that say that they are on another device."""

    class There(torch.Tensor):
        device = torch.device("cuda")

    return is_unsteady(kind, own, [one.as_subclass(There) for one in found])


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


# These make or read tensors there, or are checked there alone.
ON_CPU = {"of inference", "sparse attribute", "reads through NumPy", "own function", "cached by shape"}
ON_CPU |= {"reads a list", "checks its classes", "reads by pointer", "reads scalars in a list"}
ON_CPU |= {"applies Python", "splits by a tensor", "catches a failed check", "constants of Python"}
ON_CPU |= {"constants of a trace"}


@pytest.fixture
def always_captured(monkeypatch):
    """However long the kernels take beside other processes."""
    monkeypatch.setattr("trak_lite.gradient_computers.cuda_graphs._waits_for_the_host", lambda *_: True)


PROJECTORS = ["rademacher", "gaussian", "two_sided", "mask", "grass", "none"]
WAIT = {"attention", "reads the same value", "writes into its own copy", "leaves a mask out"}
"""These may wait for the device."""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("kind", "projector"),
    [
        *((kind, "countsketch") for kind in REPLAYED if kind not in ON_CPU),
        *(("perceptron", projector) for projector in PROJECTORS),
    ],
)
def test_on_a_gpu_a_graph_of_a_replay_has_the_bits_of_the_pass(kind, projector, always_captured, caplog):
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        found = featurized(made(REPLAYED[kind]).cuda(), math.inf, projector)
    assert ("captured as a CUDA graph" in caplog.text) != (kind in WAIT)
    assert "other bits" not in caplog.text
    for one, other in zip(found, featurized(made(REPLAYED[kind]).cuda(), 0, projector), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [kind for kind in NOT_REPLAYED if kind not in ON_CPU])
def test_on_a_gpu_what_a_recording_cannot_see_runs_the_pass(kind, caplog):
    with caplog.at_level(logging.DEBUG, "trak_lite"):
        found = featurized(made(NOT_REPLAYED[kind]).cuda(), math.inf)
    assert "is captured" not in caplog.text
    for one, other in zip(found, featurized(made(NOT_REPLAYED[kind]).cuda(), 0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS)
def test_on_a_gpu_new_weights_are_those_of_the_next_graph(change, always_captured):
    model = made(Net).cuda()
    run = Run(model)
    for number, batch in enumerate((*batches(), *batches())):
        if number == NUM_BATCHES:
            assert run.passes < NUM_BATCHES
            change(model)
        batch = tuple(part.cuda() for part in batch)
        torch.testing.assert_close(run(batch)[0], reference(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["global", "module"])
@pytest.mark.parametrize("kind", ["none", "unit"])
def test_a_batch_that_is_streamed_again_has_the_same_rows_and_norms(kind, scope):
    """As after a pass that failed half way, and for comparisons."""
    model, batch = nn.Linear(4, 3), (torch.randn(4, 4), torch.arange(4) % 3)
    computer = HookGradientComputer(model, resolve_task("image_classification"))
    normalizer = RowNormalizer(Normalization(kind, scope=scope), 4)
    projector, found = CountSketchProjector(8), []
    for _ in range(2):
        accumulator = projector.accumulator(4, model_id=0, parameters=computer.parameters)
        normalizer.stream(computer, batch, accumulator.add)
        found.append((normalizer.scale(accumulator.features()), normalizer.norms()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
