"""Rows with a decaying spectrum in a store on disk, their scores by plain NumPy, and a process that builds an index."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trak_lite.methods import AbstractMethod, GaussNewton
from trak_lite.run.tables import FEATURES, LOSS_CURVATURE, OUT_TO_LOSS
from trak_lite.scoring.index import IndexedTop, indexed_top
from trak_lite.scoring.source import ScoreSource
from trak_lite.store import AbstractFeatureStore, Column, Manifest, TableSpec, ZarrFeatureStore
from trak_lite.types import FeatureLayout, Segment

N, C, WIDTHS, CHUNK = 6000, 2, (40, 24), 512
K = sum(WIDTHS)
SEGMENTS = ((0, WIDTHS[0]), (WIDTHS[0], K))
LAYOUT = FeatureLayout(tuple(Segment(f"s{i}", *place) for i, place in enumerate(SEGMENTS)))
METHOD = GaussNewton(damping=0.3)


def features(count: int, checkpoint: int, seed: int) -> np.ndarray:
    """Draw rows that share directions between checkpoints; variances fall like 1 / j."""
    mixing = np.random.default_rng((checkpoint, 99)).normal(size=(K, K))
    shared = np.random.default_rng((seed, 0)).normal(size=(count, K)) / np.sqrt(np.arange(1, K + 1))
    own = np.random.default_rng((seed, checkpoint, 1)).normal(size=(count, K)) * 0.05
    return (shared @ mixing + own).astype(np.float32)


def factors(count: int, checkpoint: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng((seed, checkpoint, 2))
    return tuple(generator.uniform(0.2, 1, size=(2, count)).astype(np.float32))


def make(folder: Path, *, dtype: str = "float32", num_rows: int = N) -> ZarrFeatureStore:
    """Write the train rows of every checkpoint."""
    store = ZarrFeatureStore.create(folder, Manifest({}))
    for c in range(C):
        write(store, f"ckpt-{c}", c, features(num_rows, c, 0), *factors(num_rows, c, 0), dtype)
    return store


def add_targets(store: AbstractFeatureStore, name: str, count: int, seed: int) -> None:
    for c in range(C):
        zeros = np.zeros(count, np.float32)
        write(store, f"targets/{name}/ckpt-{c}", c, features(count, c, seed), zeros, zeros, "float32")


def write(
    store: AbstractFeatureStore, path: str, c: int, rows: np.ndarray, q: Any, w: Any, dtype: str
) -> None:
    columns = (
        Column(FEATURES, K, dtype),
        Column(OUT_TO_LOSS, None, "float32"),
        Column(LOSS_CURVATURE, None, "float32"),
    )
    spec = TableSpec(len(rows), columns, CHUNK, {"model_id": c, "weights": f"w{c}"})
    store.create_table(path, spec).put(0, {FEATURES: rows, OUT_TO_LOSS: q, LOSS_CURVATURE: w})


def source_of(store: AbstractFeatureStore, name: str, method: AbstractMethod = METHOD) -> ScoreSource:
    train = [store.open_table(f"ckpt-{c}") for c in range(C)]
    return ScoreSource(store, train, name, method, layout=LAYOUT, device=torch.device("cpu"))


def identity(source: ScoreSource) -> dict[str, Any]:
    return {
        "method": source.method.to_json(),
        "checkpoints": [f"w{c}" for c in range(C)],
        "train_rows": [table.content_key() for table in source.train],
    }


def top(
    store: AbstractFeatureStore, name: str, k: int, recall: float, method: AbstractMethod = METHOD
) -> IndexedTop:
    source = source_of(store, name, method)
    return indexed_top(store, source, identity(source), k, recall)


def brute_force(store: AbstractFeatureStore, name: str, method: AbstractMethod = METHOD) -> np.ndarray:
    """Return all scores ``(N, M)`` by NumPy in float64."""
    products, q = [], []
    for c, weight in enumerate(method.weights(C)):
        table = store.open_table(f"ckpt-{c}")
        x = table.read(FEATURES).astype(np.float64)
        t = store.open_table(f"targets/{name}/ckpt-{c}").read(FEATURES).astype(np.float64)
        q.append(table.read(OUT_TO_LOSS).astype(np.float64))
        found = np.zeros((len(x), len(t)))
        for start, stop in SEGMENTS:
            rows, targets = x[:, start:stop], t[:, start:stop]
            if method.name == "GradCos":
                rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
                targets = targets / np.linalg.norm(targets, axis=1, keepdims=True)
            if method.kernel is not None:
                gram = rows.T @ (rows * table.read(LOSS_CURVATURE)[:, None])
                damped = gram + method.damping * np.trace(gram) / (stop - start) * np.eye(stop - start)
                targets = np.linalg.solve(damped, targets.T).T
            found += rows @ targets.T
        products.append(weight * found * (q[-1][:, None] if method.q == "inside" else 1))
    return sum(products) * (np.mean(q, axis=0)[:, None] if method.q == "outside" else 1)


def build_and_die(folder: str, name: str, puts: int) -> None:
    """Build the index in this process, which is killed after some puts into its tables."""
    torch.set_num_threads(1)
    with ZarrFeatureStore.open(folder, "r+") as store:
        created = store.create_table
        left = puts

        def create(path: str, *args: Any) -> Any:
            table = created(path, *args)
            if not path.startswith("index/"):
                return table
            put = type(table).put

            def dying(self: Any, *given: Any) -> None:
                nonlocal left
                put(self, *given)
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            type(table).put = dying
            return table

        store.create_table = create
        top(store, name, 10, 0.9)
