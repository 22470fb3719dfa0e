"""Rows with a decaying spectrum, their scores by plain NumPy, and a process that builds an index and is killed."""

from __future__ import annotations

import os
import signal
from typing import Any, Final

import numpy as np
import torch
from view_cases import Drawn, Given, GivenTerms, checkpoint_products, scores_of, with_q

from trak_lite import Attributor
from trak_lite.methods import AbstractMethod, GaussNewton
from trak_lite.store import ZarrFeatureStore

C, WIDTHS = 2, (40, 24)
K = sum(WIDTHS)
METHOD: Final = GaussNewton(damping=0.3)


def features(count: int, seed: int) -> np.ndarray:
    """Draw rows ``(C, N, K)`` that share directions between checkpoints; variances fall like 1 / j."""
    shared = np.random.default_rng((seed, 0)).normal(size=(count, K)) / np.sqrt(np.arange(1, K + 1))
    rows = []
    for c in range(C):
        mixing = np.random.default_rng((c, 99)).normal(size=(K, K))
        own = np.random.default_rng((seed, c, 1)).normal(size=(count, K)) * 0.05
        rows.append((shared @ mixing + own).astype(np.float32))
    return np.stack(rows)


def decaying(num_rows: int, num_targets: int, seed: int = 1) -> Drawn:
    q, w = np.random.default_rng(2).uniform(0.2, 1, size=(2, C, num_rows)).astype(np.float32)
    return Drawn(features(num_rows, 0), features(num_targets, seed), q, w, WIDTHS)


def brute_force(rows: Drawn, method: AbstractMethod = METHOD) -> np.ndarray:
    """Return all scores ``(N, M)`` by NumPy in float64."""
    products = checkpoint_products(rows, method.name, getattr(method, "damping", 0.0))
    return with_q(products, rows, method.q, method.checkpoint_weights)


def build_and_die(folder: str, targets: np.ndarray, puts: int) -> None:
    """Build the index in this process, which is killed after some puts into its tables."""
    torch.set_num_threads(1)
    created, left = ZarrFeatureStore.create_table, puts

    def create(self: Any, path: str, *args: Any) -> Any:
        table = created(self, path, *args)
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

    ZarrFeatureStore.create_table = create
    made = Attributor.open(folder, Given(WIDTHS), GivenTerms())
    scores_of(made, targets, dense=False, k=3, recall=0.9)
