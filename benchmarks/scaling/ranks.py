"""The ranks of ``speed`` and ``memory``, and their start under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks import models
from benchmarks.bench_featurize import dataset, digit_batches
from benchmarks.measuring import ROOT, Growth, memory_growth, resident_kib
from trak_lite import Attributor, Rows

PROJ_DIM, BATCH, TARGETS = 512, 32, 64
_SAMPLING = 0.005  # seconds


def start(world: int, module: str, folder: Path, *arguments: str) -> tuple[float, list[dict[str, Any]]]:
    """Run ``python -m module folder arguments`` in one-thread ranks; return wall seconds and each rank's figures.

    Raises:
        RuntimeError: If a rank fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "-m", module, str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(f"{module} failed with {world} ranks:\n{done.stderr[-3000:]}")
    wall = time.monotonic() - begun
    return wall, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def keep(folder: Path, figures: dict[str, Any]) -> None:
    """Save the figures of this rank for the process that started it."""
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(figures))


def digits(rows: int) -> TensorDataset:
    """Return the given number of rows, by repeating the 1797 digits."""
    images, labels = dataset(digit_batches(57)).tensors
    index = torch.arange(rows) % len(images)
    return TensorDataset(images[index], labels[index])


def attributor(path: Path) -> Attributor:
    """Return the attributor of all measurements: the digits CNN, one kernel of K = 512."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.digits_cnn().eval()
    return Attributor(
        model,
        "image_classification",
        path,
        proj_dim=PROJ_DIM,
        layout="joint",
        batch_size=BATCH,
        progress=False,
    )


def warm_up(folder: Path) -> None:
    """Load libraries, in all ranks on one store."""
    made = attributor(folder / "warm.zarr")
    made.featurize(Rows(digits(256), name="warm"))
    made.score(Rows(digits(8), name="warm"), "warm")


def wait_for_all(folder: Path, what: str) -> None:
    """Wait until every rank has reached this call."""
    (folder / f"{what}-{os.environ['RANK']}").touch()
    while len(list(folder.glob(f"{what}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.002)


@contextmanager
def anonymous_growth() -> Iterator[tuple[Growth, Growth]]:
    """Measure the growth of the resident set, and of the part that no file backs, sampled every 5 ms."""
    anonymous, before, most, ended = Growth(), resident_kib("RssAnon"), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not ended.wait(_SAMPLING):
            most = max(most, resident_kib("RssAnon"))

    sampler = threading.Thread(target=sample)
    with memory_growth() as whole:
        sampler.start()
        try:
            yield whole, anonymous
        finally:
            ended.set()
            sampler.join()
    anonymous.mib = max(0, most - before) / 1024
