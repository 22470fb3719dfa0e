"""A training and its replay in a process that kills itself at an event: a step, an update, a file in its place."""

import os
import signal
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from unrolled_cases import N, dropping, recipe, replayed, vectors

from trak_lite.unrolled import Adam, TrainingRun


def whole(path, fatal=0):
    """Train and replay in two blocks; die at the event number ``fatal``, counted from 1. Return the scores' bytes."""
    torch.set_num_threads(1)
    data, optimizer = TensorDataset(*vectors(N, 0)), Adam(lr=0.02, eps_root=1e-6)
    made = recipe(dropping, data=data, optimizer=optimizer, epochs=4, clip_norm=0.5, accumulate=2)
    if fatal:
        die_at(fatal, type(TrainingRun(made, None, None).program))
    return replayed(made.train(path), block=2).tobytes()


def die_at(fatal, program):
    """Count the moments before and after every step, every update and every change of a file's name."""
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
    program.update = counted(program.update)
    os.rename = counted(os.rename)
    os.unlink = counted(os.unlink)


def files(folder):
    """The bytes of every state by file name."""
    return {file.name: file.read_bytes() for file in sorted(Path(folder, "states").glob("[0-9]*"))}
