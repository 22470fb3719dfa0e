"""What a store keeps beside a table of scores: verdicts on them, and the predictions that they were tested with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import OneRunVerdict, Predictions
from trak_lite.run.tables import one_run_path, predictions_path, verdict_path
from trak_lite.run.workspace import Workspace
from trak_lite.store import AbstractFeatureStore, Manifest
from trak_lite.store.manifest import stored_json

__all__ = ["ScoreRecord"]

_VerdictType = TypeVar("_VerdictType", Verdict, OneRunVerdict)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScoreRecord:
    """The entries that belong to a table of scores. They are found only as long as its values stay as they are."""

    store: AbstractFeatureStore
    path: str
    """Of the table."""
    workspace: Workspace | None = None
    """Opens the store for writing; ``None`` if ``store`` is open for it."""

    def verdict(self) -> Verdict | None:
        """Return the verdict of ``verify``; ``None`` if there is none for the current values.

        Raises:
            CorruptStoreError: If the stored entry is not a verdict.
        """
        return self._verdict(verdict_path(self.path), Verdict, "verdict")

    def one_run_verdict(self) -> OneRunVerdict | None:
        """Return the last verdict of one run, as :meth:`verdict`."""
        return self._verdict(one_run_path(self.path), OneRunVerdict, "verdict of one run")

    def predictions(self) -> Predictions | None:
        """Return the predictions that ``verify`` stored; ``None`` if there are none for the current values."""
        found = self.store.entry(predictions_path(self.path), self._key())
        return None if found is None else Predictions(*found)

    def put(self, verdict: Verdict | OneRunVerdict, predictions: NDArray[np.float64] | None = None) -> None:
        """Store a verdict, beside one of the other kind, and the pairs of its :class:`Predictions`."""
        if self.workspace is not None:
            with self.workspace.opened(Manifest(self.store.manifest.fingerprint)) as opened:
                ScoreRecord(opened.store(), self.path).put(verdict, predictions)
            return
        kind = one_run_path if isinstance(verdict, OneRunVerdict) else verdict_path
        text = json.dumps(verdict.to_json()).encode()
        entries: dict[str, NDArray[Any]] = {kind(self.path): np.frombuffer(text, np.uint8).copy()}
        if predictions is not None:
            entries[predictions_path(self.path)] = predictions
        for entry, values in entries.items():
            self.store.put_entry(entry, self._key(), values)

    def _key(self) -> str:
        return self.store.open_table(self.path).content_key()

    def _verdict(self, entry: str, kind: type[_VerdictType], named: str) -> _VerdictType | None:
        found = self.store.entry(entry, self._key())
        what = f"The {named} on {self.path} in {self.store.path}"
        try:
            return None if found is None else kind.from_json(stored_json(found, what=what))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptStoreError(
                f"{what} cannot be read ({error!r:.200}). Verify the scores again."
            ) from error
