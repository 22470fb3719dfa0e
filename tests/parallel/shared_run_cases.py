"""What the processes of ``test_shared_runs`` do; imported by each of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.store import ZarrFeatureStore, _grid

N, R = 300, 32
BATCH = 7


def data(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(N + R + 1, 4, generator=generator)[:count], torch.arange(count) % 3)


def states() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return [{name: torch.randn_like(value) for name, value in layers.state_dict().items()} for _ in range(2)]


def run(path: str, count: int = N, workers: int = 0) -> int:
    """Featurize two checkpoints and score; return how many rows of features this process wrote."""
    torch.set_num_threads(1)
    _grid._FEWEST_ROWS_PER_COMMIT = R
    os.fsync = lambda fd: None  # type: ignore[assignment]  # a kill leaves the page cache alone
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    made = Attributor(model, "image_classification", path, proj_dim=16, dtype="float32", progress=False)
    rows = data(count) if workers == 0 else Subset(data(count), range(count))  # tensors need no worker
    loader = DataLoader(rows, batch_size=BATCH, num_workers=workers)
    summary = made.featurize(loader, states(), append=True)
    made.score(data(5, seed=2), f"of-{count}")
    return summary.rows_written


class HeldUp(Dataset[Any]):
    """Data of which one row never comes."""

    def __init__(self, row: int) -> None:
        self._row, self._data = row, data(N)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        if row == self._row:
            time.sleep(3600)
        return self._data[row]


def held_up(path: str, row: int) -> int:
    """Featurize two checkpoints, and stop for ever at a row; return how many rows this process wrote."""
    torch.set_num_threads(1)
    _grid._FEWEST_ROWS_PER_COMMIT = R
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    made = Attributor(model, "image_classification", path, proj_dim=16, dtype="float32", progress=False)
    return made.featurize(Rows(HeldUp(row), batch_size=BATCH, name="data"), states()).rows_written


def answer_held_up(answers: Any, *arguments: Any) -> None:
    answers.put(held_up(*arguments))


def answer(answers: Any, *arguments: Any) -> None:
    answers.put(run(*arguments))


def contents(path: Path | str, count: int) -> list[np.ndarray]:
    """Every number of a finished store."""
    with ZarrFeatureStore.open(path) as store:
        tables = [
            store.open_table(name)
            for name in store.table_names()
            if not name.startswith(("scores", "targets")) or f"of-{count}" in name
        ]
        return [table.read(column.name) for table in tables for column in table.spec.columns]
