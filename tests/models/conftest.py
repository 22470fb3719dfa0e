"""Rows that show which weights were loaded."""

import itertools

import pytest
import torch
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.store import open_store

ONE_ROW = TensorDataset(torch.ones(1, 3))


def half_of_squares(call, batch):
    """Its gradient is the weights."""
    return (sum(p.square().sum() for p in call.parameters.values()) / 2).expand(len(batch[0]))


@pytest.fixture
def load(tmp_path):
    """Return what featurizes one row with the checkpoints of a source: the summary, and the row of each checkpoint."""
    numbers = itertools.count()

    def load(model, source, loader=None, task=half_of_squares, **settings):
        path = tmp_path / f"{next(numbers)}.zarr"
        defaults = {"projector": "none", "layout": "joint", "dtype": "float32", "progress": False}
        defaults |= {"gradient_computer": "iterative", "method": "GradDot"}
        attributor = Attributor(model, task, path, **{**defaults, **settings})
        summary = attributor.featurize(ONE_ROW, source, checkpoint_loader=loader)
        with open_store(path) as store:
            return summary, [store.open_table(name).read("features")[0] for name in store.table_names()]

    return load
