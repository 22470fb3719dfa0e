"""Scores of a target set as a store has them: its finished matrix, or the stored rows that give it when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray

from trak_lite._devices import float64_device
from trak_lite.evaluation import Predictions, Verdict
from trak_lite.parallel.ranks import AbstractRanks
from trak_lite.run.score_settings import ScoreSettings
from trak_lite.run.settings import AttributorSettings, StoredSettings
from trak_lite.run.tables import complete_tables, score_path, target_folder
from trak_lite.run.workspace import Workspace, naming_dropped
from trak_lite.scoring.matrix import AbstractScoreMatrix, StoredMatrix, StreamedMatrix
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.stored import (
    ScoredRows,
    finished_scores,
    kept_predictions,
    kept_verdict,
    scorable_tables,
)
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.types import FeatureLayout

__all__ = ["KeptScores"]


def _widths(layout: FeatureLayout) -> int | str:
    """Return K, or how many segments there are of which width."""
    widths = {segment.width for segment in layout.segments}
    if len(layout.segments) == 1 or len(widths) > 1:
        return layout.width
    return f"{len(layout.segments)} x {widths.pop()}"


@final
class KeptScores:
    """Opens the scores of one store."""

    def __init__(self, workspace: Workspace, settings: AttributorSettings | StoredSettings) -> None:
        """Hold where the store is, and how its rows are laid out."""
        self._workspace = workspace
        self._settings = settings

    def path(self, name: str, settings: ScoreSettings) -> str:
        """Return where the scores of a target set, made in one way, are kept."""
        return score_path(name, settings, self._settings.default_scores)

    def stored(self, name: str, settings: ScoreSettings) -> Scores:
        """Return the scores whose matrix was kept.

        Raises:
            StateError: If they were never computed, or not finished.
        """
        store = self._workspace.reader()
        with naming_dropped(store):
            table = finished_scores(store, name, settings, self._settings.default_scores)
            made = ScoreSettings.from_fingerprint(table.spec.fingerprint)
            train = list(complete_tables(store, list(table.spec.fingerprint["checkpoints"])).values())
        path = self.path(name, settings)
        source = self.source(store, train, name, made)
        return self._scores(
            source,
            StoredMatrix(table),
            name,
            made,
            len(train),
            path,
            partial(kept_verdict, store, path),
            partial(kept_predictions, store, path),
        )

    def streamed(
        self,
        name: str,
        settings: ScoreSettings,
        digests: Sequence[str] | None = None,
        kept: NDArray[np.float64] | None = None,
    ) -> Scores:
        """Return scores that are computed when asked.

        Args:
            name: Name of the target set.
            settings: How they are made.
            digests: Weights of the checkpoints; ``None`` takes those that the targets were featurized with.
            kept: Both ends of every target's scores, if they were found already.

        Raises:
            StateError: If the targets have no features, or train rows are pending.
        """
        store = self._workspace.reader()
        with naming_dropped(store):
            train = scorable_tables(store, name, settings, digests)
        source = self.source(store, train, name, settings)
        return self._scores(
            source, StreamedMatrix(source, kept), name, settings, len(train), target_folder(name, settings)
        )

    def source(
        self,
        store: AbstractFeatureStore,
        train: Sequence[AbstractRowTable],
        name: str,
        settings: ScoreSettings,
        *,
        ranks: AbstractRanks | None = None,
    ) -> ScoreSource:
        """Return what computes scores from the rows of an open store, on some ranks together or here alone."""
        layout, device = self._settings.layout, self._settings.device
        return ScoreSource(store, train, name, settings, layout=layout, device=device, ranks=ranks)

    def rows(self, store: AbstractFeatureStore, path: str, name: str) -> ScoredRows:
        """Return the stored rows behind the scores that are kept at a path."""
        fingerprint = store.open_table(path).spec.fingerprint
        settings, layout = ScoreSettings.from_fingerprint(fingerprint), self._settings.layout
        return ScoredRows(
            store=store,
            train=complete_tables(store, list(fingerprint["checkpoints"])),
            name=name,
            settings=settings,
            layout=layout if settings.layout == "stored" else FeatureLayout.joint(layout.width),
            device=float64_device(self._settings.device),
        )

    def _scores(
        self,
        source: ScoreSource,
        matrix: AbstractScoreMatrix,
        name: str,
        settings: ScoreSettings,
        num_checkpoints: int,
        path: str,
        verdict: Callable[[], Verdict | None] = lambda: None,
        predictions: Callable[[], Predictions | None] = lambda: None,
    ) -> Scores:
        shown = {
            "checkpoints": num_checkpoints,
            "proj_dim": _widths(self._settings.layout),
            **settings.to_json(),
        }
        where = None if self._workspace.path is None else f"{self._workspace.path}:{path}"
        return Scores(
            matrix,
            source,
            name=name,
            settings=shown,
            where=where,
            verdict=verdict,
            predictions=predictions,
        )
