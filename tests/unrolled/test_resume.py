"""A training or a replay that is killed anywhere continues to the same bits."""

import signal

import numpy as np
import pytest
import torch
from forked import forkserver
from killed_runs import files, whole
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import images, margin, recipe

from trak_lite.unrolled import SGD, Adam, TrainingRun, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")

KILLS = 12


def killed(path, fatal):
    """Return whether the process died at the event (and did not get to the end)."""
    process = forkserver().Process(target=whole, args=(str(path), fatal))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
def test_kills_at_random_moments_end_in_the_same_bits(tmp_path):
    scores = whole(tmp_path / "undisturbed")
    expected = files(tmp_path / "undisturbed")
    rng = np.random.default_rng(0)
    deaths = finished = 0

    while deaths < KILLS:
        path = tmp_path / f"killed-{finished}"
        while killed(path, int(rng.integers(1, 70))):
            deaths += 1
        finished += 1

        assert files(path) == expected
        assert whole(path) == scores
        assert not list((path / "replays").glob("*"))


def test_a_second_call_continues_and_does_not_train_again(tmp_path, monkeypatch):
    whole(tmp_path)
    steps = []
    step = TrainingRun.step
    monkeypatch.setattr(TrainingRun, "step", lambda run, *args: steps.append(args[1]) or step(run, *args))

    whole(tmp_path)

    assert steps == []


def convolutions(seed):
    layers = [nn.Conv2d(2, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(32, 3)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def transposed(seed):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 40), nn.GELU(), nn.Linear(40, 3))
    model[1].weight = nn.Parameter(model[1].weight.detach().T.contiguous().T)
    return model


@pytest.mark.parametrize("build", [convolutions, transposed])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)])
def test_layouts_that_files_do_not_keep_do_not_change_bits(tmp_path, build, optimizer):
    inputs, labels = images(32, 0)
    data = TensorDataset(inputs.float(), labels)
    made = recipe(build, data=data, optimizer=optimizer, batch_size=16, epochs=3, clip_norm=0.5)
    whole_run, again = (made.train(tmp_path / name, interval=2) for name in ("a", "b"))
    for number in (4, 6):
        (tmp_path / "b" / "states" / f"{number:09d}.safetensors").unlink()

    again = made.train(tmp_path / "b", interval=2)

    assert files(tmp_path / "a") == files(tmp_path / "b")
    for name, value in again.final.parameters.items():
        assert torch.equal(value, made.train().final.parameters[name])
    few = TensorDataset(inputs[:3].float(), labels[:3])
    scores = [
        unrolled(run, few, margin, block=2).numpy().tobytes() for run in (whole_run, again, made.train())
    ]
    assert scores[0] == scores[1] == scores[2]
