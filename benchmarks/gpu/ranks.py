"""Part ``ranks``: one and two processes of torchrun that featurize one store, all on one device."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import models
from benchmarks.gpu.bench import Bench
from benchmarks.scaling.killed_ranks import contents
from benchmarks.scaling.ranks import keep, start, wait_for_all
from trak_lite import Attributor, Rows

MODULE = "benchmarks.gpu.ranks"
WORLDS = (1, 2)


def rank_cases(small: bool) -> dict[str, Callable[[Bench], dict[str, Any]]]:
    return {"two ranks": two_ranks}


def two_ranks(bench: Bench) -> dict[str, Any]:
    """Featurize with one process, then with two; the stored rows must have the same bits."""
    count = 96 if bench.small else 16_384
    found: dict[str, Any] = {"rows": count}
    stored = []
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            _, ranks = start(
                world, MODULE, Path(folder), str(bench.device), str(int(bench.small)), str(count)
            )
            rows = contents(Path(folder) / "run.zarr")
            stored.append({name: np.array(values) for name, values in rows.items()})
        seconds = max(rank["end"] for rank in ranks) - min(rank["begin"] for rank in ranks)
        found[f"rows_per_s_of_{world}"] = count / seconds
        found[f"rows_by_rank_of_{world}"] = [rank["rows"] for rank in ranks]
    found["faster"] = found["rows_per_s_of_2"] / found["rows_per_s_of_1"]
    found["equal"] = all(np.array_equal(rows, stored[1][path]) for path, rows in stored[0].items())
    return found


def rank(folder: Path, device: str, small: bool, count: int) -> None:
    """Featurize images beside the other ranks, and store the start and end by a clock that all processes share."""
    bench = Bench.open(device, small=small)
    torch.manual_seed(0)
    model = models.SimpleCNN().eval().to(bench.device)
    data = torch.utils.data.TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(10, (count,)))

    def attributor(name: str) -> Attributor:
        path = folder / name
        return Attributor(model, "image_classification", path, proj_dim=512, layout="joint", progress=False)

    attributor("warm.zarr").featurize(Rows(data, indices=range(64), name="warm"))
    made = attributor("run.zarr")
    wait_for_all(folder, "ready")
    begin = time.monotonic()
    summary = made.featurize(Rows(data, name="train"))
    keep(folder, {"begin": begin, "end": time.monotonic(), "rows": summary.rows_written})


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
