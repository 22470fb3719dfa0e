"""What every rank of the kill loop runs: an unchanged ``Attributor`` script, whose data write down who loads which row.

Run:  torchrun --nproc-per-node=2 benchmarks/scaling/recorded_run.py FOLDER [JSON OF A JOB]
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.featurizing.rows import RowWork
from trak_lite.store import _grid

STORE, LOGS = "run.zarr", "loads"
BEGUN, SCORING, ENDED = -1, -2, -3
"""Stand in a log in place of a row."""
_RECORD = np.dtype([("checkpoint", "<i4"), ("row", "<i4")])


@dataclass(frozen=True, slots=True)
class Job:
    """What is featurized and scored; the defaults take a test a fraction of a second."""

    rows: int = 300
    chunk_rows: int = 32
    """Of the smallest chunks that a table may have."""
    batch: int = 7
    width: int = 8
    """Channels of the model."""
    proj_dim: int = 16
    targets: int = 5
    checkpoints: int = 2
    sync: bool = True
    """Wait for the disk, as a user's run does. A kill leaves the page cache alone."""

    @property
    def rows_of_all(self) -> int:
        """Rows over all checkpoints."""
        return self.rows * self.checkpoints

    def to_json(self) -> str:
        """Return the job as an argument of a command line."""
        return json.dumps(asdict(self))


class LoadLog:
    """A file for each process, to which it appends: what is written survives any kill of the process."""

    def __init__(self, folder: Path) -> None:
        (folder / LOGS).mkdir(exist_ok=True)
        name = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}.{os.getpid()}"
        self._file = os.open(folder / LOGS / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.checkpoint = 0
        self.pauses = False

    def write(self, row: int) -> None:
        if not self.pauses:
            os.write(self._file, np.array((self.checkpoint, row), _RECORD).tobytes())


def read_log(path: Path) -> np.ndarray:
    """Return ``(records, 2)``: checkpoint and row."""
    whole = path.read_bytes()
    records = np.frombuffer(whole[: len(whole) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    return np.stack([records["checkpoint"], records["row"]], axis=1)


def last_row(path: Path) -> int:
    """Return the row of the last record, or what stands in its place."""
    with path.open("rb") as file:
        file.seek(-_RECORD.itemsize, os.SEEK_END)
        return int(np.frombuffer(file.read(), _RECORD)["row"][0])


class RecordedRows(TensorDataset):
    """Rows that write down that they are loaded."""

    def __init__(self, log: LoadLog, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self._log = log

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        """Write down the row, and return it."""
        self._log.write(row)
        return super().__getitem__(row)

    __getitems__ = None  # or a loader would take the tensors' rows past the log


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10


def model_of(job: Job) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, job.width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * job.width, 10),
    )


def run(folder: Path, job: Job) -> None:
    """Featurize and score, as any script would; only the rows are counted."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")  # for the message of a round
    _grid._FEWEST_ROWS_PER_COMMIT = job.chunk_rows
    _grid.CHEAP_CHUNK_BYTES = 0
    if not job.sync:
        os.fsync = lambda fd: None
    log = LoadLog(folder)
    torch.manual_seed(0)
    model = model_of(job)

    def load(number: int) -> dict[str, Tensor]:
        log.checkpoint = number
        draw = torch.Generator().manual_seed(number)
        return {
            name: 0.3 * torch.randn(value.shape, generator=draw) for name, value in model.state_dict().items()
        }

    attributor = Attributor(
        model,
        "image_classification",
        folder / STORE,
        proj_dim=job.proj_dim,
        dtype="float32",
        batch_size=job.batch,
        progress=False,
    )
    check = RowWork._compare

    def unrecorded(*given: Any) -> bool:
        # A few rows that are done are computed again to be compared: no row is written by that.
        log.pauses = True
        try:
            return check(*given)
        finally:
            log.pauses = False

    RowWork._compare = unrecorded
    log.write(BEGUN)
    train = RecordedRows(log, *images(job.rows, seed=0))
    attributor.featurize(Rows(train, name="train"), range(job.checkpoints), checkpoint_loader=load)
    log.write(SCORING)
    attributor.score(TensorDataset(*images(job.targets, seed=1)))
    log.write(ENDED)


if __name__ == "__main__":
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    run(Path(sys.argv[1]), Job(**given))
