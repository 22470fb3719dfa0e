"""Kronecker-factored curvatures of the checkpoints of a store, fitted on its train rows and stored beside them.

The arrays are entries of the store. Their key is made of the weights, the train rows and the settings of the fit. One
fit is stored per checkpoint. An interrupted fit continues at the interrupted pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import nn

from trak_lite._progress import progress_bar
from trak_lite.data.datasets import RowNumbers, Rows, spread_rows
from trak_lite.featurizing.fisher import require_writable
from trak_lite.featurizing.kronecker.curvature import KroneckerCurvature, UnitArrays
from trak_lite.featurizing.kronecker.fit import fit_curvature, unit_arrays
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.run.tables import curvature_path
from trak_lite.store import AbstractFeatureStore, Manifest
from trak_lite.types import Batch

_VERSION = 1


@final
@dataclass(frozen=True, slots=True, eq=False)
class KroneckerFits:
    """Curvatures of the checkpoints of a store, fitted with the settings of a method; one fit per checkpoint."""

    store: AbstractFeatureStore
    model: nn.Module
    names: list[str]
    """The kept parameters."""
    method: EKFAC
    """Resolved for the task."""
    task: AbstractModelOutput

    def record(self) -> dict[str, Any]:
        """Return what determines the fits, as JSON values: the settings and the present train rows."""
        dataset = self.store.manifest.fingerprint.get("dataset", {})
        return {
            "version": _VERSION,
            "settings": self.method.fit_json(),
            "dataset": Manifest(dataset).digest(),
        }

    def has(self, digest: str) -> bool:
        """Whether the fit of the checkpoint with these weights is complete."""
        return all(found.is_complete() for found in self._arrays(digest))

    def curvature(self, digest: str, device: torch.device) -> KroneckerCurvature:
        """Return the curvature of the checkpoint with these weights; raises if it is not fitted."""
        return KroneckerCurvature.of(self._arrays(digest), device)

    def fit(
        self, digest: str, rows: Rows, device: torch.device, *, label: str, progress: bool | None
    ) -> None:
        """Fit the checkpoint that is loaded in the model, or the missing part of the fit."""
        require_writable(self.store)
        wanted = spread_rows(len(rows), self.method.max_rows)

        def batches() -> Iterator[tuple[RowNumbers, Batch]]:
            with progress_bar(len(wanted), label=label, progress=progress) as bar:
                for numbers, batch in rows.moved(wanted, device):
                    yield numbers, batch
                    bar.update(len(numbers))

        fit_curvature(
            self.model,
            self.task,
            batches,
            method=self.method,
            grad_wrt=self.names,
            keeper=self._keeper(digest),
            num_rows=len(rows),
        )

    def _arrays(self, digest: str) -> list[UnitArrays]:
        return unit_arrays(self.model, self.names, self._keeper(digest))

    def _keeper(self, digest: str) -> _StoredArrays:
        key = Manifest({**self.record(), "weights": digest, "parameters": self.names}).digest()
        return _StoredArrays(self.store, curvature_path(digest), key)


@final
@dataclass(frozen=True, slots=True)
class _StoredArrays:
    """An :class:`ArrayKeeper` whose arrays are entries of a store under one key."""

    store: AbstractFeatureStore
    folder: str
    key: str

    def get(self, name: str, /) -> NDArray[Any] | None:
        return self.store.entry(f"{self.folder}/{name}", self.key)

    def __setitem__(self, name: str, array: NDArray[Any], /) -> None:
        self.store.put_entry(f"{self.folder}/{name}", self.key, array)
