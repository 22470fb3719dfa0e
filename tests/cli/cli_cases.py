"""A small recipe and config for tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trak_lite import cli

RECIPE = '''
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def data(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def build_model(width: int = 4):
    """Return a perceptron.

    Args:
        width: Of its hidden layer.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def train_data(num_train: int = 40):
    return data(num_train, 1)


def target_data():
    return data(6, 2)


def train(indices, seed, *, num_train: int = 40, width: int = 4, steps: int = 3):
    x, y = (tensor[torch.as_tensor(indices)] for tensor in train_data(num_train).tensors)
    torch.manual_seed(seed)
    model = build_model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + 0.1 * seed)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield model.state_dict()


def render(index):
    return f"row {index}"
'''

CONFIG = """\
recipe: recipe.py
path: {folder}/run.zarr
checkpoints: {folder}/trained
task: image_classification
proj_dim: 16
score:
  name: held-out
"""


def write_case(folder: Path, *, recipe: str = RECIPE, more: str = "", config: str = CONFIG) -> str:
    """Write a recipe and a config beside it; return the config's path."""
    (folder / "recipe.py").write_text(recipe)
    (folder / "run.yaml").write_text(config.format(folder=folder) + more)
    return str(folder / "run.yaml")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is wrong use; return its one line."""
    capsys.readouterr()
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), (out, err)
    assert err.startswith("trak-lite: ")
    return err


def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, as a fixture; tests leave it as it is, or copy it."""
    folder = tmp_path_factory.mktemp("ran")
    assert cli.main(["run", write_case(folder)]) == 0
    return folder
