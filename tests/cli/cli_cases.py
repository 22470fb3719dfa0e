"""A small recipe and config for tests of the command line, and what their runs leave."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trak_lite import Attributor, cli
from trak_lite.store import open_store

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


RECORDS = ("runs", "run records, format 1")
"""Name and key of the entry of a store with the records of its runs."""


def write_case(folder: Path, *, recipe: str = RECIPE, more: str = "", config: str = CONFIG) -> str:
    (folder / "recipe.py").write_text(recipe)
    (folder / "run.yaml").write_text(config.format(folder=folder) + more)
    return str(folder / "run.yaml")


def done(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is wrong use; return its one line."""
    capsys.readouterr()
    try:
        status = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), (status, out, err)
    assert err.startswith("trak-lite")
    return err


def typed(folder: Path) -> list[str]:
    """The recipe, as the user names it when a recorded run is repeated."""
    return ["--recipe", str(folder / "recipe.py")]


def functions(folder: Path) -> dict[str, Any]:
    return runpy.run_path(str(folder / "recipe.py"))


def opened(folder: Path, path: str = "run.zarr") -> Attributor:
    return Attributor.open(folder / path, functions(folder)["build_model"]())


def scores(folder: Path, name: str = "held-out", path: str = "run.zarr") -> np.ndarray:
    return opened(folder, path).scores(name).numpy()


def records(store: Any) -> list[dict[str, Any]]:
    with open_store(store) as kept:
        entry = kept.entry(*RECORDS)
    return [] if entry is None else json.loads(entry.tobytes())


def put_records(store: Any, content: Any) -> None:
    """Replace the records of a store, as anyone can who may write there: their checksum fits."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    with open_store(store, "r+") as kept:
        kept.put_entry(*RECORDS, np.frombuffer(text, np.uint8).copy())
