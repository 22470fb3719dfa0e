"""Kronecker-factored curvatures of a store's checkpoints: fitted on its train rows, and kept beside them.

Arrays are derived results of the store, keyed by the checkpoint's weights, the train rows and the settings of the fit;
one fit is kept per checkpoint, and a fit that was cut off goes on at the pass that it was in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trak_lite._progress import progress_bar
from trak_lite.data.batches import move_batch
from trak_lite.data.datasets import Rows, evenly_spread
from trak_lite.errors import ReadOnlyStoreError, StateError
from trak_lite.featurizing.kronecker import (
    KroneckerCurvature,
    KroneckerSettings,
    fit_curvature,
    is_fitted,
    kept_units,
    loaded,
)
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.store import AbstractFeatureStore, Manifest
from trak_lite.store.manifest import kept_json
from trak_lite.types import Batch, ParameterShapes

__all__ = ["CurvatureFits"]

_RECORD = "ekfac/record"
_VERSION = 1


@final
class CurvatureFits:
    """The fits of one store: all of the same settings."""

    def __init__(self, store: AbstractFeatureStore, model: nn.Module, parameters: ParameterShapes) -> None:
        """Hold where the fits are, and of what.

        Args:
            store: The store, open.
            model: Holds the weights of a checkpoint when it is fitted.
            parameters: The kept parameters.
        """
        self._store = store
        self._model = model
        self._names = list(parameters)

    def begin(
        self, settings: KroneckerSettings, task: AbstractModelOutput, dataset: Mapping[str, Any]
    ) -> None:
        """Make these the settings of the store's fits; fits of other settings or rows count as absent from then on.

        Raises:
            ReadOnlyStoreError: If the store was opened for reading.
            InvalidInputError: If the task does not have what the settings ask for.
        """
        if not self._store.writable:
            raise ReadOnlyStoreError(
                f"The store at {self._store.path} was opened for reading, so a fit could not be kept. Make it writable."
            )
        record = {
            "version": _VERSION,
            "settings": settings.decided(task).to_json(),
            "dataset": Manifest(dataset).digest(),
        }
        text = json.dumps(record, sort_keys=True).encode()
        self._store.cache(_RECORD, "record", np.frombuffer(text, dtype=np.uint8))

    def record(self) -> dict[str, Any]:
        """Return what the fits were made with, as JSON values.

        Raises:
            StateError: If there is no fit, or rows were appended to the train data since.
        """
        found = self._store.cached(_RECORD, "record")
        if found is None:
            raise StateError(
                "No curvature was fitted, which kernel='ekfac' needs. Call fit_curvature(train_data) first."
            )
        record = kept_json(found, what=f"The record of EK-FAC fits in {self._store.path}")
        if record.get("dataset") != Manifest(self._store.manifest.fingerprint.get("dataset", {})).digest():
            raise StateError(
                "The curvature was fitted on other train rows than there are by now: rows were appended since. Call "
                "fit_curvature(train_data) again."
            )
        return record

    def has(self, digest: str) -> bool:
        """Whether the checkpoint with these weights is fitted to the end."""
        return is_fitted(kept_units(self._model, self._names), self._keeper(digest))

    def curvature(self, digest: str, device: torch.device) -> KroneckerCurvature:
        """Return the curvature of the checkpoint with these weights.

        Raises:
            StateError: If it was not fitted, or not to the end.
        """
        record = self.record()
        if not self.has(digest):
            raise StateError(
                f"The curvature of the checkpoint with weights {digest[:12]} was not fitted with {record['settings']}, "
                "or not to the end. Call fit_curvature(train_data, ...) again, which goes on there."
            )
        return loaded(kept_units(self._model, self._names), self._keeper(digest), device)

    def fit(
        self,
        digest: str,
        task: AbstractModelOutput,
        rows: Rows,
        *,
        device: torch.device,
        label: str,
        progress: bool | None,
    ) -> None:
        """Fit the checkpoint that the model holds, or what is missing of it.

        Args:
            digest: Of its weights.
            task: Its loss is the one whose curvature is fitted.
            rows: The train rows.
            device: Where the model is.
            label: What the progress bar is called.
            progress: Show the bar; ``None`` shows it on a terminal only.
        """
        settings = KroneckerSettings(**self.record()["settings"])
        wanted = evenly_spread(len(rows), settings.max_rows)

        def batches() -> Iterator[tuple[NDArray[np.int64], Batch]]:
            plan = np.split(wanted, range(rows.batch_size, len(wanted), rows.batch_size))
            with progress_bar(len(wanted), label=label, progress=progress) as bar:
                for numbers, batch in rows.batches(plan):
                    yield numbers, move_batch(batch, device)
                    bar.update(len(numbers))

        fit_curvature(
            self._model,
            task,
            batches,
            settings=settings,
            grad_wrt=self._names,
            keeper=self._keeper(digest),
            num_rows=len(rows),
        )

    def _keeper(self, digest: str) -> _StoredArrays:
        key = Manifest({**self.record(), "weights": digest, "parameters": self._names}).digest()
        return _StoredArrays(self._store, f"ekfac/{digest[:16]}", key)


@final
class _StoredArrays:
    """An array keeper: derived arrays of a store, under one key."""

    def __init__(self, store: AbstractFeatureStore, folder: str, key: str) -> None:
        self._store = store
        self._folder = folder
        self._key = key

    def get(self, name: str, /) -> NDArray[Any] | None:
        return self._store.cached(f"{self._folder}/{name}", self._key)

    def __setitem__(self, name: str, array: NDArray[Any], /) -> None:
        self._store.cache(f"{self._folder}/{name}", self._key, array)
