"""Stored rows without a model: drawn features of checkpoints, and what they score by plain NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from trak_lite.methods import TRAK, AbstractMethod, GaussNewton, GradCos, GradDot
from trak_lite.run.tables import FEATURES, LOSS_CURVATURE, OUT_TO_LOSS
from trak_lite.scoring.source import ScoreSource
from trak_lite.store import Column, Manifest, MemoryFeatureStore, TableSpec
from trak_lite.types import FeatureLayout, Segment

METHODS: Final[dict[str, Any]] = {
    "GaussNewton": partial(GaussNewton, damping=1.0),
    "TRAK": partial(TRAK, damping=1.0, layout="stored"),
    "GradDot": GradDot,
    "GradCos": GradCos,
}
"""Methods that need no fit, with a damping of 1 where they have one, and segments as they are stored."""
KERNELS: Final = ("GaussNewton", "TRAK")
WITH_LAYOUT: Final = ("GaussNewton", "TRAK", "GradCos")
DEFAULT: Final = GaussNewton(damping=1.0)

WIDTHS = (3, 2)
LAYOUT = FeatureLayout((Segment("a", 0, 3), Segment("b", 3, 5)))


@dataclass
class Drawn:
    """Features of every checkpoint: train ``(C, N, K)``, targets ``(C, M, K)``, q and w ``(C, N)``."""

    train: np.ndarray
    targets: np.ndarray
    q: np.ndarray
    w: np.ndarray

    def source(self, method: AbstractMethod = DEFAULT) -> ScoreSource:
        """Put the rows into a store in memory, in chunks of 7, and return what scores them."""
        store = MemoryFeatureStore(Manifest({}))
        train = [
            _table(store, f"ckpt-{c}", c, self.train[c], self.q[c], self.w[c]) for c in range(len(self.train))
        ]
        for c, rows in enumerate(self.targets):
            _table(store, f"targets/test/ckpt-{c}", c, rows, np.zeros(len(rows)), np.zeros(len(rows)))
        return ScoreSource(
            store,
            train,
            "test",
            method,
            layout=LAYOUT,
            device=torch.device("cpu"),
        )

    def reordered(self, rows: Any = slice(None), targets: Any = slice(None)) -> Drawn:
        return Drawn(self.train[:, rows], self.targets[:, targets], self.q[:, rows], self.w[:, rows])

    def scaled(self, factors: tuple[float, ...]) -> Drawn:
        columns = np.repeat(factors, WIDTHS).astype(np.float32)
        return Drawn(self.train * columns, self.targets * columns, self.q, self.w)


def drawn(num_checkpoints: int = 3, num_rows: int = 20, num_targets: int = 4, seed: int = 0) -> Drawn:
    generator = np.random.default_rng(seed)
    shape = (num_checkpoints, num_rows)
    return Drawn(
        generator.normal(size=(*shape, 5)).astype(np.float32),
        generator.normal(size=(num_checkpoints, num_targets, 5)).astype(np.float32),
        generator.uniform(0.1, 1, size=shape).astype(np.float32),
        generator.uniform(0.1, 1, size=shape).astype(np.float32),
    )


def dense_scores(source: ScoreSource) -> np.ndarray:
    """Return all scores ``(N, M)`` of a source."""
    return np.concatenate([tile.numpy() for _, tile in source.tiles()])


def checkpoint_products(
    rows: Drawn,
    name: str = "GaussNewton",
    damping: float = 1.0,
    segments: tuple[tuple[int, int], ...] = ((0, 3), (3, 5)),
) -> np.ndarray:
    """Return what each checkpoint says without q: ``(C, N, M)``, segment by segment, row by row."""
    products = np.zeros((len(rows.train), rows.train.shape[1], rows.targets.shape[1]))
    for c in range(len(rows.train)):
        for start, stop in segments:
            x = rows.train[c][:, start:stop].astype(np.float64)
            t = rows.targets[c][:, start:stop].astype(np.float64)
            if name == "GradCos":
                x = x / np.linalg.norm(x, axis=1, keepdims=True)
                t = t / np.linalg.norm(t, axis=1, keepdims=True)
            inverse = np.eye(stop - start)
            if name in KERNELS:
                weights = rows.w[c].astype(np.float64) if name == "GaussNewton" else np.ones(len(x))
                gram = sum(w * np.outer(row, row) for w, row in zip(weights, x, strict=True))
                inverse = np.linalg.inv(
                    gram + damping * np.trace(gram) / (stop - start) * np.eye(stop - start)
                )
            products[c] += x @ inverse @ t.T
    return products


def _table(store: MemoryFeatureStore, path: str, model_id: int, features: Any, q: Any, w: Any) -> Any:
    columns = (
        Column(FEATURES, 5, "float32"),
        Column(OUT_TO_LOSS, None, "float32"),
        Column(LOSS_CURVATURE, None, "float32"),
    )
    table = store.create_table(path, TableSpec(len(features), columns, 7, {"model_id": model_id}))
    table.put(
        np.arange(len(features)),
        {
            FEATURES: features.astype(np.float32),
            OUT_TO_LOSS: q.astype(np.float32),
            LOSS_CURVATURE: w.astype(np.float32),
        },
    )
    return table
