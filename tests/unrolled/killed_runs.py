"""A training and its replay in a process that kills itself at its n-th step, or shortly before or after a file."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import CLASSES, WIDTH, N, loss, margin, vectors

from trak_lite.unrolled import Adam, Recipe, TrainingRun, replay, states, unrolled


def dropping(seed):
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Dropout(0.2), nn.Linear(5, CLASSES)).double()


def whole(path, fatal=0):
    """Train and replay in two blocks; die at the event number ``fatal``, counted from 1. Return the scores' bytes."""
    torch.set_num_threads(1)
    if fatal:
        die_at(fatal)
    made = Recipe(
        dropping,
        loss,
        TensorDataset(*vectors(N, 0)),
        Adam(lr=0.02, eps_root=1e-6),
        batch_size=4,
        epochs=4,
        clip_norm=0.5,
        accumulate=2,
    )
    run = made.train(path)
    few = TensorDataset(*vectors(4, 1))
    return unrolled(run, few, margin, block=2).numpy().tobytes()


def die_at(fatal):
    """Count steps, adjoint steps, and the moments before and after every file is in its place."""
    left = [fatal]

    def event():
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        def call(*args, **kwargs):
            event()
            found = function(*args, **kwargs)
            event()
            return found

        return call

    TrainingRun.step = counted(TrainingRun.step)
    replay._Replay._adjoint = counted(replay._Replay._adjoint)
    states.save_file = counted(states.save_file)
    Path.replace = counted(Path.replace)
    Path.unlink = counted(Path.unlink)


def files(folder):
    """The bytes of every state by file name."""
    return {file.name: file.read_bytes() for file in sorted(Path(folder, "states").glob("[0-9]*"))}
