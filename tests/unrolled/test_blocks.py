"""Blocks, memory and spacing of checkpoints do not change scores, and memory stays within its budget."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from unrolled_cases import CLASSES, WIDTH, loss, margin, recipe, vectors

from trak_lite.data.datasets import rows_of
from trak_lite.modelout_functions import resolve_task
from trak_lite.unrolled import SGD, Adam, unrolled
from trak_lite.unrolled.optimizers import State
from trak_lite.unrolled.replay import MAX_BYTES, _Replay
from trak_lite.unrolled.runs import repeatable

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")

MANY = TensorDataset(*vectors(5, 1))
MADE = {"optimizer": Adam(lr=0.02, eps_root=1e-6), "epochs": 3, "clip_norm": 0.5}


class Silent:
    def advance(self, count):
        pass


def columns(run, places, max_bytes=MAX_BYTES):
    """Derivatives of some targets in one block, float64 (m, N)."""
    replay = _Replay(
        run, resolve_task(margin), rows_of(MANY, what="targets"), max_bytes=max_bytes, progress=False
    )
    with repeatable(run.device):
        return replay._block(np.asarray(places), None, Silent())


@pytest.fixture(scope="module")
def run():
    return recipe(**MADE).train()


@pytest.mark.quick
def test_a_block_equals_its_targets_one_by_one(run):
    together = columns(run, range(5))

    alone = torch.cat([columns(run, [place]) for place in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-14)
    assert together.dtype == torch.float64


@pytest.mark.parametrize("max_bytes", [1, 200_000, 1_000_000])
def test_memory_does_not_change_derivatives(run, max_bytes):
    np.testing.assert_allclose(
        columns(run, range(5), max_bytes), columns(run, range(5)), rtol=1e-9, atol=1e-13
    )


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_scores_do_not_depend_on_the_block(run, block):
    found = unrolled(run, MANY, margin, block=block).numpy()

    np.testing.assert_allclose(found, unrolled(run, MANY, margin).numpy(), rtol=1e-6, atol=1e-12)


SPACINGS = [
    {"checkpoints": "sqrt"},
    {"checkpoints": "log"},
    {"checkpoints": "all"},
    {"interval": 1},
    {"interval": 3},
    {"interval": 1000},
]


@pytest.fixture(scope="module", params=[1, MAX_BYTES])
def one_by_memory(run, request):
    return request.param, unrolled(run, MANY, margin, block=3, max_bytes=request.param).numpy()


@pytest.mark.parametrize("spacing", SPACINGS)
def test_every_spacing_gives_the_same_bits(tmp_path, run, spacing, one_by_memory):
    """With the least memory, segments are halved down to two states."""
    max_bytes, one = one_by_memory
    other = recipe(**MADE).train(tmp_path, **spacing)

    found = unrolled(other, MANY, margin, block=3, max_bytes=max_bytes).numpy()

    assert found.tobytes() == one.tobytes()
    for name, value in other.final.parameters.items():
        assert torch.equal(value, run.final.parameters[name])


@pytest.mark.parametrize(
    ("spacing", "expected"),
    [
        ({"checkpoints": "sqrt"}, [0, 3, 6, 9]),
        ({"checkpoints": "log"}, [0, 1, 5, 7, 8, 9]),
        ({"checkpoints": "all"}, list(range(10))),
        ({"interval": 6}, [0, 6, 9]),
        ({"interval": 99}, [0, 9]),
    ],
)
def test_stored_states(tmp_path, spacing, expected):
    made = recipe(**MADE)
    assert made.num_steps == 9

    for path in (None, tmp_path):
        assert made.train(path, **spacing).states.numbers() == expected


class Peak(TorchDispatchMode):
    """The largest sum of bytes of all tensors that are made in its context and alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        known = {
            id(leaf.untyped_storage())
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in known:
                self._watch(leaf.untyped_storage())
        return found

    def _watch(self, storage):
        if id(storage) not in self._alive:
            size = storage.nbytes()
            self.now += size
            self._alive[id(storage)] = weakref.finalize(storage, self._freed, id(storage), size)
        self.peak = max(self.peak, self.now)

    def _freed(self, key, size):
        self.now -= size
        del self._alive[key]


def test_the_meter_of_memory():
    with Peak() as meter:
        one = torch.zeros(1000)
        for _ in range(3):
            two = one.view(10, 100) + 1
            del two
    assert (meter.now, meter.peak) == (4000, 8000)


def wide(seed):
    return nn.Sequential(
        nn.Linear(WIDTH, 200), nn.GELU(), nn.Linear(200, 60), nn.GELU(), nn.Linear(60, CLASSES)
    )


def halves(count, seed):
    inputs, labels = vectors(count, seed)
    return inputs.float(), labels


def narrow(seed):
    return nn.Linear(WIDTH, CLASSES)


BUDGETS = {
    "sgd": {"optimizer": SGD(lr=0.05)},
    "momentum": {"optimizer": SGD(lr=0.05, momentum=0.9), "checkpoints": "sqrt"},
    "long segments": {"optimizer": Adam(lr=1e-3), "epochs": 3, "interval": 99, "targets": 30},
    "adam": {"optimizer": Adam(lr=1e-3), "clip_norm": 1.0},
    "more rows than parameters": {"optimizer": SGD(lr=0.05), "model": narrow, "rows": 20_000, "steps": 2},
    "a large step": {"optimizer": SGD(lr=0.05), "batch_size": 4000, "rows": 8000, "steps": 1, "targets": 8},
    "accumulation": {"optimizer": SGD(lr=0.05), "batch_size": 400, "rows": 800, "accumulate": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [4 << 20])
@pytest.mark.parametrize("case", BUDGETS)
def test_a_replay_stays_within_its_memory(case, max_bytes):
    settings = dict(BUDGETS[case])
    data = TensorDataset(*halves(settings.pop("rows", 64), 0))
    few = TensorDataset(*halves(settings.pop("targets", 60), 1))
    spacing = {key: settings.pop(key) for key in ("checkpoints", "interval") if key in settings}
    settings["epochs"] = None if "steps" in settings else settings.get("epochs", 1)
    made = recipe(settings.pop("model", wide), loss, data, **{"batch_size": 16, **settings})
    run = made.train(**spacing)
    run.metasmoothness()

    with Peak() as meter:
        unrolled(run, few, margin, max_bytes=max_bytes)

    least = 0
    if case == "a large step":  # with one target it takes more
        with Peak() as alone:
            columns_of_one(run)
        least = alone.peak
    assert meter.peak <= max(max_bytes, 1.1 * least + max_bytes / 2)


def columns_of_one(run):
    few = rows_of(TensorDataset(*halves(1, 1)), what="targets")
    replay = _Replay(run, resolve_task(margin), few, max_bytes=1, progress=False)
    with repeatable(run.device):
        replay._block(np.arange(1), None, Silent())


def test_chunks_use_their_memory():
    """The chunk that is chosen takes between half and all of the memory for it, one twice as large takes more."""
    budget = 4 << 20
    run = recipe(wide, loss, TensorDataset(*halves(64, 0)), SGD(lr=0.05), batch_size=16).train()
    few = rows_of(TensorDataset(*halves(200, 1)), what="targets")
    replay = _Replay(run, resolve_task(margin), few, max_bytes=budget, progress=False)
    chunk = replay._chunk(1)
    assert 4 < chunk < 200

    def peak(count):
        state, columns = run.states.get(0), torch.zeros(count, 64)
        cotangents = State(
            {name: p.expand(count, *p.shape).clone() for name, p in state.parameters.items()}, {}
        )
        with repeatable(run.device), Peak() as meter:
            replay._adjoint(0, state, cotangents, columns, count)
        return meter.peak

    assert budget / 4 < peak(chunk) <= 1.05 * budget / 2
    assert peak(2 * chunk) > budget / 2


def test_chunks_are_the_same_in_every_replay(run):
    few = rows_of(MANY, what="targets")
    sizes = set()
    for _ in range(5):
        replay = _Replay(run, resolve_task(margin), few, max_bytes=1 << 20, progress=False)
        sizes.add((replay._one, replay._more, replay._chunk(3)))
    assert len(sizes) == 1


def test_a_larger_budget_takes_larger_blocks():
    run = recipe(wide, loss, TensorDataset(*halves(32, 0)), SGD(lr=0.01)).train()
    few = rows_of(TensorDataset(*halves(300, 1)), what="targets")

    sizes = [
        _Replay(run, resolve_task(margin), few, max_bytes=size << 20, progress=False)._most
        for size in (1, 4, 16)
    ]

    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] >= 8 * sizes[0]
