"""Blocks, memory and spacing of checkpoints do not change scores, and memory stays within its budget."""

import numpy as np
import pytest
import torch
from torch import nn
from unrolled_cases import CLASSES, WIDTH, halves, loss, margin, recipe, replayed, targets

from trak_lite.unrolled import SGD, Adam, TrainingRun, unrolled
from trak_lite.unrolled.program import Operations

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")

MANY = targets(count=5)
MADE = {"optimizer": Adam(lr=0.02, eps_root=1e-6), "epochs": 3, "clip_norm": 0.5}


@pytest.fixture(scope="module")
def run():
    return recipe(**MADE).train()


@pytest.mark.parametrize(
    "settings",
    [{"block": 1}, {"block": 2}, {"block": 100}, {"max_bytes": 1}, {"max_bytes": 200_000, "block": 5}],
    ids=str,
)
def test_blocks_and_memory_do_not_change_scores(run, settings):
    """But for the last bit: they are the derivatives in float64, rounded to float32."""
    np.testing.assert_array_max_ulp(replayed(run, MANY, **settings), replayed(run, MANY, block=5), maxulp=1)


SPACINGS = [
    ({"checkpoints": "sqrt"}, [0, 3, 6, 9]),
    ({"checkpoints": "log"}, [0, 1, 5, 7, 8, 9]),
    ({"checkpoints": "all"}, list(range(10))),
    ({"interval": 1}, list(range(10))),
    ({"interval": 6}, [0, 6, 9]),
    ({"interval": 1000}, [0, 9]),
]


@pytest.mark.parametrize("max_bytes", [1, 2 << 30])
@pytest.mark.parametrize(("spacing", "numbers"), SPACINGS)
def test_every_spacing_stores_its_states_and_gives_the_same_bits(tmp_path, run, spacing, numbers, max_bytes):
    """With the least memory, segments are halved down to two states."""
    one = replayed(run, MANY, block=3, max_bytes=max_bytes)
    made = recipe(**MADE)
    other = made.train(tmp_path, **spacing)
    assert other.num_steps == 9
    assert made.train(**spacing).states.numbers() == other.states.numbers() == numbers
    assert replayed(other, MANY, block=3, max_bytes=max_bytes).tobytes() == one.tobytes()
    torch.testing.assert_close(other.final.parameters, run.final.parameters, rtol=0, atol=0)


def peak(run, data, **settings):
    with Operations() as meter:
        unrolled(run, data, margin, **settings)
    return meter.peak_bytes


def test_the_meter_of_memory():
    """Views and results in place take nothing, and what is gone is not counted."""
    with Operations() as meter:
        one = torch.zeros(1000)
        for _ in range(3):
            two = one.view(10, 100) + 1
            two.add_(1).t()
            del two
        three = torch.zeros(500)
    assert meter.peak_bytes == 8000
    assert len(three) == 500


def wide(seed):
    return nn.Sequential(
        nn.Linear(WIDTH, 200), nn.GELU(), nn.Linear(200, 60), nn.GELU(), nn.Linear(60, CLASSES)
    )


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
@pytest.mark.parametrize("case", BUDGETS)
def test_a_replay_stays_within_its_memory(case):
    settings, max_bytes = dict(BUDGETS[case]), 4 << 20
    data, few = halves(settings.pop("rows", 64), 0), halves(settings.pop("targets", 60), 1)
    spacing = {key: settings.pop(key) for key in ("checkpoints", "interval") if key in settings}
    settings["epochs"] = None if "steps" in settings else settings.get("epochs", 1)
    made = recipe(settings.pop("model", wide), loss, data, **{"batch_size": 16, **settings})
    run = made.train(**spacing)
    run.metasmoothness()
    # with one target a large step takes more
    least = peak(run, halves(1, 1), max_bytes=1) if case == "a large step" else 0
    assert peak(run, few, max_bytes=max_bytes) <= max(max_bytes, 1.1 * least + max_bytes / 2)


def test_a_larger_budget_is_used_for_larger_blocks(monkeypatch):
    """Of several blocks each repeats the steps of the run; that of one takes at least a quarter of its budget."""
    made = recipe(wide, data=halves(16, 0), optimizer=SGD(lr=0.01), epochs=1, train_id="nothing is repeated")
    run, few = made.train(interval=4), halves(40, 1)
    run.metasmoothness()
    steps, step, found = [], TrainingRun.step, []
    monkeypatch.setattr(TrainingRun, "step", lambda run, *args: steps.append(args[1]) or step(run, *args))
    for budget in (2 << 20, 8 << 20):
        steps.clear()
        used = peak(run, few, max_bytes=budget)
        found.append(steps.count(2))
        assert budget / 4 < used <= budget
    assert found[0] >= 3 * found[1] >= 3
