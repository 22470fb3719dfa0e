"""Memory and time of ``trak_lite.selection.select`` on stored scores of 10,000 to a million train rows.

A store on a disk holds random features (64 values per row) and their scores for 32 targets. Each method chooses 500
rows, in a separate process. ``mib`` is the growth of the resident set at its highest; the chunks are read, not mapped,
because pages of mapped files count as resident until the system needs their memory. All tables have chunks of 8192
rows; by default chunks grow with the table up to a limit. ``seconds`` are CPU seconds. ``balanced`` takes ten labels.

Run:  python -m benchmarks.bench_selection [--rows 10000 100000 1000000]
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import cpu_seconds, memory_growth, parser_of, run_worker, save_parts, surroundings
from trak_lite.methods import GradDot
from trak_lite.run.tables import (
    FEATURES,
    LOSS_CURVATURE,
    OUT_TO_LOSS,
    feature_table_spec,
    score_table_spec,
    target_path,
)
from trak_lite.scoring.matrix import StoredMatrix
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.tiles import score_rows
from trak_lite.selection import select
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Manifest, ZarrFeatureStore
from trak_lite.types import FeatureLayout

WIDTH, TARGETS, CHOSEN = 64, 32, 500
BATCH = 8192
CPU = torch.device("cpu")
METHODS: dict[str, dict[str, Any]] = {"top": {}, "less": {}, "balanced": {}, "greedy": {}}


def features_table(store: AbstractFeatureStore, path: str, num_rows: int, seed: int) -> AbstractRowTable:
    """Write random features, with q = w = 1."""
    spec = feature_table_spec(num_rows, WIDTH, "float32", {"model_id": 0})
    table = store.create_table(path, replace(spec, chunk_rows=min(BATCH, num_rows)))
    rng = np.random.default_rng(seed)
    for start in range(0, num_rows, BATCH):
        rows = np.arange(start, min(start + BATCH, num_rows))
        ones = np.ones(len(rows), np.float32)
        values = rng.standard_normal((len(rows), WIDTH), dtype=np.float32)
        table.put(rows, {FEATURES: values, OUT_TO_LOSS: ones, LOSS_CURVATURE: ones})
    return table


def source_of(store: AbstractFeatureStore) -> ScoreSource:
    train = [store.open_table("ckpt-0")]
    layout = FeatureLayout.joint(WIDTH)
    return ScoreSource(store, train, "random", GradDot(), layout=layout, target_identity={}, device=CPU)


def build(folder: str, num_rows: int) -> None:
    """Write a store with features and scores."""
    store = ZarrFeatureStore.create(f"{folder}/run.zarr", Manifest({}))
    features_table(store, "ckpt-0", num_rows, seed=0)
    features_table(store, target_path("random", 0), TARGETS, seed=1)
    spec = replace(score_table_spec(num_rows, TARGETS, {}), chunk_rows=BATCH)
    table = store.create_table("scores", spec)
    score_rows(table, source_of(store).terms(), label="scores", progress=False)


def worker(folder: str, method: str) -> dict[str, Any]:
    """Select from the store, after a selection from a few scores that imports and warms up everything."""
    store = ZarrFeatureStore.open(f"{folder}/run.zarr", mapping="never")
    matrix = StoredMatrix(store.open_table("scores"))
    source = source_of(store)
    scores = Scores(matrix, "random", source.method, source.store.manifest, {}, row_source=source)
    small = np.random.default_rng(0).standard_normal((2000, TARGETS), dtype=np.float32)
    more: dict[str, Any] = {}
    if method == "balanced":
        more = {"groups": (np.arange(len(scores)) % 10).astype(np.uint8)}
    warm = {"balanced": {"groups": np.arange(2000) % 10}, "greedy": {"features": small}}.get(method, {})
    select(small, 10, method, **warm)
    with memory_growth() as growth:
        seconds = cpu_seconds(lambda: select(scores, CHOSEN, method, **more))
    return {"mib": growth.mib, "seconds": seconds}


def main() -> None:
    """Measure every method at every number of rows, write JSON."""
    parser = parser_of(__doc__, "selection.json")
    parser.add_argument("--rows", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_rows in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            build(folder, num_rows)
            for method in METHODS:
                figures = run_worker(worker, folder, method)
                save_parts(args.out, surroundings(), {f"{method} / {num_rows}": figures})


if __name__ == "__main__":
    main()
