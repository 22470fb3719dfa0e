"""What the ranks of ``speed`` and ``memory`` do, and how they are started under torchrun."""

from __future__ import annotations

import json
import os
import re
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
from benchmarks.measuring import ROOT, Growth, memory_growth
from trak_lite import Attributor, Rows

PROJ_DIM, BATCH, TARGETS = 512, 32, 64
_SAMPLING = 0.005  # seconds


def start(world: int, module: str, folder: Path, *arguments: str) -> tuple[float, list[dict[str, Any]]]:
    """Run ``python -m module folder arguments`` in ranks of one thread; return wall seconds and what each kept.

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
    """Leave this rank's figures to the process that started it."""
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(figures))


def digits(rows: int) -> TensorDataset:
    """Return so many rows of the 1797 digits, over and over."""
    images, labels = dataset(digit_batches(57)).tensors
    index = torch.arange(rows) % len(images)
    return TensorDataset(images[index], labels[index])


def attributor(path: Path) -> Attributor:
    """Return what all measurements use: the digits CNN, one kernel of K = 512."""
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
    """Wait until every rank has come here."""
    (folder / f"{what}-{os.environ['RANK']}").touch()
    while len(list(folder.glob(f"{what}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.002)


@contextmanager
def anonymous_growth() -> Iterator[tuple[Growth, Growth]]:
    """Measure how far the resident set grows, and the part of it that no file backs, sampled every 5 ms."""
    anonymous, before, most, ended = Growth(), _anonymous_kib(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not ended.wait(_SAMPLING):
            most = max(most, _anonymous_kib())

    sampler = threading.Thread(target=sample)
    with memory_growth() as whole:
        sampler.start()
        try:
            yield whole, anonymous
        finally:
            ended.set()
            sampler.join()
    anonymous.mib = max(0, most - before) / 1024


def _anonymous_kib() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found.group(1)) if found else 0
