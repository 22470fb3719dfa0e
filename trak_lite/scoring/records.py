"""What a store keeps beside a table of scores: verdicts, the predictions that they were tested with, and trials."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import CorruptStoreError
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.trials import Trials
from trak_lite.evaluation.verdict import OneRunVerdict, Predictions
from trak_lite.methods import AbstractMethod
from trak_lite.run.tables import one_run_path, predictions_path, trials_path, verdict_path
from trak_lite.run.workspace import Workspace
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Manifest
from trak_lite.store.manifest import stored_json

_VerdictType = TypeVar("_VerdictType", Verdict, OneRunVerdict)
_VERDICTS: Final = {Verdict: (verdict_path, "verdict"), OneRunVerdict: (one_run_path, "verdict of one run")}
"""Path and name in messages of every kind of verdict."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScoreEntries:
    """The entries that belong to a table of scores. They are found only as long as its values stay as they are."""

    store: AbstractFeatureStore
    path: str
    """Of the table."""
    workspace: Workspace | None = None
    """Opens the store for writing; ``None`` if ``store`` is open for it."""

    def table(self) -> AbstractRowTable:
        """Return the table."""
        return self.store.open_table(self.path)

    def verdict(self, kind: type[_VerdictType]) -> _VerdictType | None:
        """Return the last verdict of a kind; ``None`` if there is none for the current values."""
        path, named = _VERDICTS[kind]
        content = self.store.entry(path(self.path), self.table().content_key())
        what = f"The {named} on {self.path} in {self.store.path}"
        try:
            return None if content is None else kind.from_json(stored_json(content, what=what))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptStoreError(
                f"{what} cannot be read ({error!r:.200}). Verify the scores again."
            ) from error

    def verdicts(self) -> list[Verdict | OneRunVerdict]:
        """Return the last verdict of every kind that there is."""
        return [one for one in (self.verdict(Verdict), self.verdict(OneRunVerdict)) if one is not None]

    def predictions(self) -> Predictions | None:
        """Return the predictions that ``verify`` stored; ``None`` if there are none for the current values."""
        pairs = self.store.entry(predictions_path(self.path), self.table().content_key())
        return None if pairs is None else Predictions(*pairs)

    def trials(self) -> Trials | None:
        """Return the trials that ``try_removals`` stored; ``None`` if there are none for the current values."""
        array = self.store.entry(trials_path(self.path), self.table().content_key())
        try:
            return None if array is None else Trials.from_array(array)
        except ValueError as error:
            raise CorruptStoreError(
                f"The trials of {self.path} in {self.store.path} cannot be read ({error}). Call try_removals again."
            ) from error

    def put_trials(self, trials: Trials) -> None:
        """Store trials; ``store`` is open for writing."""
        self.store.put_entry(trials_path(self.path), self.table().content_key(), trials.to_array())

    def put(self, verdict: Verdict | OneRunVerdict, predictions: NDArray[np.float64] | None = None) -> None:
        """Store a verdict, beside one of the other kind, and the pairs of its :class:`Predictions`."""
        if self.workspace is not None:
            with self.workspace.opened(Manifest(self.store.manifest.fingerprint)) as opened:
                ScoreEntries(opened.store(), self.path).put(verdict, predictions)
            return
        path, _ = _VERDICTS[type(verdict)]
        text = np.frombuffer(json.dumps(verdict.to_json()).encode(), np.uint8).copy()
        key = self.table().content_key()
        self.store.put_entry(path(self.path), key, text)
        if predictions is not None:
            self.store.put_entry(predictions_path(self.path), key, predictions)


def shown_settings(method: AbstractMethod, **first: Any) -> dict[str, Any]:
    """Return JSON values to show of scores: the first ones, the name of the method, and its fields."""
    fields = method.to_json()
    return {**first, "method": fields.pop("name"), **fields}
