"""Scores of a target set: one table for the attributor's method, and one for each other method.

The session of a call finds or computes what they are made of.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.devices import float64_device
from trak_lite.core.json_text import digest_of, shown
from trak_lite.core.progress import Stages
from trak_lite.core.ranks import Ranks
from trak_lite.core.validate import some_of
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import Rows
from trak_lite.errors import BusyError, InvalidInputError, ManifestMismatchError, StateError
from trak_lite.featurizing.session import KnownSource, Run
from trak_lite.featurizing.settings import AttributorSettings, row_widths
from trak_lite.featurizing.stored_settings import StoredSettings, refuse_other_settings
from trak_lite.featurizing.targets import TargetSet
from trak_lite.methods import AbstractMethod
from trak_lite.methods.base import MadeScores, MatrixParts
from trak_lite.models.checkpoints import count_checkpoints, iterate_checkpoints
from trak_lite.run import tables
from trak_lite.run.workspace import Workspace, naming_dropped
from trak_lite.scoring.index import indexed_top
from trak_lite.scoring.matrix import AbstractScoreMatrix, StoredMatrix, StreamedMatrix, top_and_bottom
from trak_lite.scoring.records import ScoreEntries, shown_settings
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.tiles import score_rows
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, TableSpec
from trak_lite.store.manifest import compare_fingerprints, differing_keys


def stored_scores(
    workspace: Workspace,
    settings: AttributorSettings | StoredSettings,
    name: str,
    method: AbstractMethod,
    *,
    dense: bool = True,
    run: Run | None = None,
) -> Scores:
    """Return the scores of a target set and a method from the store.

    ``dense=False`` computes scores from the stored rows on access, with the checkpoints that the targets have features
    of. ``run`` has the model, settings and store of the scores; it is ``None`` without a model. Raises as
    :meth:`trak_lite.Attributor.scores`.
    """
    if not dense and not method.multiplies_rows:
        raise InvalidInputError(f"{method.name} scores are stored whole. Leave out dense=False.")
    store = workspace.reader()
    if run is not None:
        workspace.compare(store.manifest, run.settings.manifest(None))
    path = tables.score_path(store, name, method, settings.method) if dense else None
    with naming_dropped(store) as train_tables:
        if path is not None:
            described = _finished_table(store, name, method, path, is_default=method == settings.method).spec
            digests = list(described.fingerprint["checkpoints"])
        else:
            digests = _digests_of_targets(store, name, method, train_tables)
            if run is not None and len(set(method.weights(len(digests)))) > 1:
                tables.require_order({digest: train_tables[digest] for digest in digests}, run.last)
        train = list(tables.complete_tables(store, digests, train_tables).values())
        if path is not None:
            _refuse_outgrown(name, described, train[0].spec)
        else:
            described = store.open_table(tables.target_table_path(name, method, train[0])).spec
    targets = described.fingerprint.get("targets", {})
    source = ScoreSource(
        store, train, name, method, layout=settings.layout, target_identity=targets, device=settings.device
    )
    if path is None:
        source.check_targets()
    asked = {} if run is None else run.asked_task()
    if asked:
        compare_fingerprints(
            {"task": targets.get("task", {})},
            asked,
            where=f"targets {name!r}",
            remedy="Pass the task that these targets were scored with, or none.",
        )
    return _scores(workspace, settings, source, run, path)


def source_of_stored(store: AbstractFeatureStore, scores: Scores) -> ScoreSource:
    """Return the source of stored scores in an open store, with products in float64."""
    settings = scores.run.settings
    path = tables.score_path(store, scores.name, scores.method, settings.method)
    described = store.open_table(path).spec.fingerprint
    train = list(tables.complete_tables(store, list(described["checkpoints"])).values())
    return ScoreSource(
        *(store, train, scores.name, scores.method),
        layout=settings.layout,
        target_identity=described.get("targets", {}),
        device=float64_device(settings.device),
    )


def _scores(
    workspace: Workspace,
    settings: AttributorSettings | StoredSettings,
    source: ScoreSource,
    run: Run | None,
    path: str | None,
    *,
    shown: Mapping[str, Any] | None = None,
    ends: NDArray[np.float64] | None = None,
) -> Scores:
    """Return the scores in the complete table at a path, or, without one, scores that are computed on access.

    See :meth:`ScoreResult.scores`.
    """
    made = source.store.manifest.made_with.get("settings")
    matrix: AbstractScoreMatrix
    if path is not None:
        # The targets' features may be gone: scores outlast them, and a killed drop_checkpoint removes them first.
        entries = ScoreEntries(source.store, path, workspace)
        matrix, shown = StoredMatrix(entries.table()), source.store.attributes(path)
    else:
        path, entries = tables.target_folder(source.name, source.method), None
        matrix = StreamedMatrix(source, ends)
    return Scores(
        matrix,
        source.name,
        source.method,
        source.store.manifest,
        shown_settings(
            source.method,
            **(shown or {}),
            **_shown_task(source.target_identity),
            checkpoints=len(source.train),
            proj_dim=made.get("proj_dim") if isinstance(made, Mapping) else None,
            features=row_widths(settings.layout),
        ),
        row_source=source,
        known_run=run,
        location=None if workspace.path is None else f"{workspace.path}:{path}",
        entries=entries,
    )


def _shown_task(targets: Any) -> dict[str, Any]:
    """Return name and settings of the task in the identity of targets; nothing if it is that of the train rows."""
    task = targets.get("task") if isinstance(targets, Mapping) else None
    if task is None:
        return {}
    described = task if isinstance(task, Mapping) else {}
    name, settings = described.get("name"), described.get("settings")
    shown: dict[str, Any] = {"task": name if isinstance(name, str) and name else "custom"}
    # The same task with other settings is another output, such as log p and the margin of a text.
    return shown | ({"task_settings": settings} if isinstance(settings, Mapping) and settings else {})


def _finished_table(
    store: AbstractFeatureStore, name: str, method: AbstractMethod, path: str, *, is_default: bool
) -> AbstractRowTable:
    """Return the complete table of the scores of a target set; ``is_default`` for the attributor's method."""
    if not store.has_table(path):
        how, argument = ("", "") if is_default else (f" made with {method}", ", method=...")
        other = [
            store.open_table(score_path).spec.fingerprint.get("method")
            for score_path in tables.score_paths(store, name)
        ]
        if other:
            raise StateError(
                f"There are no scores {name!r} made with {method}; there are some made with method="
                f"{some_of(map(shown, other))}. Pass this method to read them, or call "
                f"score(data, name={name!r}{argument})."
            )
        raise StateError(
            f"There are no scores {name!r}{how}; there are {some_of(tables.scored_names(store)) or 'none'}. "
            f"Call score(data, name={name!r}{argument})."
        )
    table = store.open_table(path)
    compare_fingerprints(
        {"method": table.spec.fingerprint.get("method", {})},
        {"method": method.to_json()},
        where=path,
        remedy=f"Pass the method that they were computed with: scores({name!r}, method=...).",
    )
    if not table.complete:
        raise StateError(f"The scores {name!r} are not finished. Call score(...) again; it resumes.")
    return table


def drop_scores(store: AbstractFeatureStore, name: str, *, features: bool = False) -> None:
    """Permanently remove the scores of a target set, of all methods, and its ``features``, which it may have alone.

    Raises :class:`StateError` if there are no such scores.
    """
    paths, targets = tables.score_paths(store, name), tables.target_paths(store, name) if features else []
    # Preconditioned targets depend on the train data as well. After a kill there may be nothing else.
    preconditioned = store.table_names(tables.preconditioned_folder(name))
    if not (paths or preconditioned or targets):
        raise StateError(
            f"There are no scores {name!r}; there are {some_of(tables.scored_names(store)) or 'none'}."
        )
    measured = (entry for entry in store.entry_names("index") if entry.endswith(f"/measured/{name}"))
    kinds = (tables.verdict_path, tables.one_run_path, tables.predictions_path, tables.trials_path)
    tested = (of(path) for path in paths for of in kinds)
    for entry in (*measured, *tested):
        store.drop_entry(entry)
    # Scores are read with their targets, so they go first: a kill leaves targets without scores, from which the next
    # call scores.
    for path in dict.fromkeys([*paths, *preconditioned, *targets]):
        store.drop_table(path)


def _refuse_outgrown(name: str, scores: TableSpec, train: TableSpec) -> None:
    """Raise if train rows were appended after the scores were computed, because that changes the kernel."""
    if scores.num_rows < train.num_rows:
        raise StateError(
            f"The scores {name!r} have {scores.num_rows} train rows, but the store has {train.num_rows} now. Score "
            f"under another name, or drop_scores({name!r}) and score again."
        )


def _digests_of_targets(
    store: AbstractFeatureStore, name: str, method: AbstractMethod, train: Mapping[str, AbstractRowTable]
) -> list[str]:
    """Return the digests of the checkpoints with targets that the method uses; raise if there are none, or some lack.

    The call that made a table has noted the checkpoints that it was for.
    """
    paths = store.table_names(tables.target_folder(name, method))
    features = {digest: tables.target_table_path(name, method, table) for digest, table in train.items()}
    there = {digest: path for digest, path in features.items() if path in paths}
    if not there:
        names = tables.target_names(store, method)
        raise StateError(
            f"There are no features of targets {name!r}; stored targets: {names}. Call score(data, name={name!r})."
        )
    some = there.values() if len(there) < len(features) else ()  # which may be all that the call was for
    begun = [store.attributes(path).get(tables.CHECKPOINTS) for path in some]
    asked = {*there, *(digest for noted in begun if isinstance(noted, list) for digest in noted)}
    digests = [digest for digest in features if digest in asked]
    lacking = [
        features[digest]
        for digest in digests
        if digest not in there or not store.open_table(there[digest]).complete
    ]
    if lacking:
        raise StateError(
            f"The features of targets {name!r} are not complete: {some_of(lacking)}. Call score(data, name={name!r}, "
            f"dense=False) with the same targets and method, which computes the rest, or drop_scores({name!r}, "
            "features=True) and score again."
        )
    return digests


@final
class ScoreResult:
    """The scores of one target set and one method in an open store, finished or not."""

    def __init__(self, source: ScoreSource, base: AbstractMethod, num_targets: int) -> None:
        self.source = source
        self._path = tables.score_path(source.store, source.name, source.method, base)
        fingerprint = {
            "checkpoints": source.digests,
            "targets": dict(source.target_identity),
            "train_rows": [table.content_key() for table in source.train],
            "method": source.method.to_json(),
        }
        self._spec = tables.score_table_spec(source.num_rows, num_targets, fingerprint)

    def is_finished(self) -> bool:
        """Return whether the scores are stored and complete.

        Raises :class:`ManifestMismatchError` if they were made with other targets, checkpoints or settings.
        """
        if not self.source.store.has_table(self._path):
            return False
        table = self.source.store.open_table(self._path)
        _refuse_outgrown(self.source.name, table.spec, self._spec)
        there, here = table.spec.fingerprint, self._spec.fingerprint
        changed = {key for key, *_ in differing_keys(there, here)}
        one, other = ([sorted(of[key]) for key in ("checkpoints", "train_rows")] for of in (there, here))
        if changed <= {"checkpoints", "train_rows"} and one[0] == other[0] and one[1] != other[1]:
            raise ManifestMismatchError(
                f"{self._path} was made from the same checkpoints and settings, but their train rows were computed "
                "again since and have other bits (another batch size or processor, or a checkpoint that was lost or "
                "dropped and got a new number, and with it another projection). "
                f"drop_scores({self.source.name!r}) and score again, or score under another name."
            )
        stored, passed = len(there["checkpoints"]), len(here["checkpoints"])
        counts = (
            "" if stored == passed else f" (the stored scores use {stored} checkpoints, this call {passed})"
        )
        compare_fingerprints(
            there,
            here,
            where=f"{self._path}{counts}",
            remedy="Score these under another name, or pass the targets, checkpoints and method that they were "
            "computed with. A model that was trained again has other checkpoints: use another path for it, or "
            "score(..., checkpoints=...) with its own.",
        )
        if not table.complete and table.spec.chunk_rows != self._spec.chunk_rows:
            raise ManifestMismatchError(
                f"{self._path} was begun in chunks of {table.spec.chunk_rows} rows, by another version of trak_lite; "
                f"this one has {self._spec.chunk_rows}. Call drop_scores({self.source.name!r}) and score again."
            )
        return table.complete

    def fill(self, *, progress: bool | None) -> None:
        """Compute the pending rows of the score table, with the ranks of the source."""
        terms = self.source.terms()
        score_rows(
            self.source.store.create_table(self._path, self._spec),
            terms,
            q=self.source.method.q,
            label=f"Scoring {self.source.name!r}",
            progress=progress,
            ranks=self.source.ranks,
        )

    def put(self, made: MadeScores) -> None:
        """Store scores that were computed elsewhere; raise if their shape is not that of the table."""
        shape = (self._spec.num_rows, self._spec.columns[0].width)
        if made.scores.shape != shape:
            raise InvalidInputError(
                f"{self.source.method.name} gave scores of shape {made.scores.shape}, but the store has {shape[0]} "
                f"train rows and there are {shape[1]} targets. Make the run with the train rows of the store, in their "
                "order."
            )
        shown = {"metasmoothness": list(made.metasmoothness)} if made.metasmoothness else {}
        columns = {tables.SCORES: made.scores}
        if made.errors is not None:
            columns[tables.ERRORS] = made.errors
        spec = replace(self._spec, columns=tuple(Column(name, shape[1], "float32") for name in columns))
        table = self.source.store.create_table(self._path, spec, shown)
        for rows in rows_in_batches(np.arange(len(made.scores)), self._spec.chunk_rows):
            # A process that was killed here, or another one, has written some chunks.
            with contextlib.suppress(BusyError, StateError):
                table.put(rows, {column: values[rows] for column, values in columns.items()})

    def top_and_bottom(self, k: int, recall: float | None) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Return the k most helpful and most harmful rows of every target, and what to report of an index.

        Exact rows are read from the store's cache, or found in one pass over the stored rows, which the ranks of the
        source share. Nothing is cached if the store is read-only. An index serves if a share of ``recall`` suffices.
        """
        source = self.source
        name, key = tables.top_path(source.name), digest_of(self._spec.fingerprint)
        rows = source.store.cached(name, key)
        enough = rows is not None and rows.shape[-1] >= min(k, source.num_rows)
        report: dict[str, Any] = {}
        # In an object store, the ranks may have different caches: compute unless all ranks have the rows.
        if not source.ranks.merged(enough, operator.and_):
            if recall is None:
                rows = top_and_bottom(source, k)
            else:
                identity = ("method", "checkpoints", "train_rows")
                described = {one: self._spec.fingerprint[one] for one in identity}
                rows, report = indexed_top(source, described, k, recall)
            if source.ranks.rank == 0 and "candidates" not in report:
                source.store.cache(name, key, rows)
        return np.array(rows), {} if recall is None else {"recall": 1.0, **report}

    def scores(
        self,
        run: Run,
        *,
        dense: bool,
        ends: NDArray[np.float64] | None = None,
        shown: Mapping[str, Any] | None = None,
    ) -> Scores:
        """Return the scores, which read from the store, also after it is closed.

        ``dense`` returns the stored matrix, which must be complete; otherwise scores are computed on access, and
        ``ends`` are the most helpful and most harmful rows, if known. ``shown`` are JSON values to show with the
        scores.
        """
        alone = replace(self.source, layout=run.settings.layout, ranks=Ranks())
        path = self._path if dense else None
        return _scores(run.workspace, run.settings, alone, run, path, shown=shown, ends=ends)


@contextmanager
def scoring_session(
    run: Run,
    targets: Rows,
    name: str,
    methods: Sequence[AbstractMethod],
    checkpoints: KnownSource,
    **asked: Any,
) -> Iterator[tuple[TargetSet, dict[str, AbstractRowTable], ScoreResult]]:
    """Open a session with all ranks: the targets, the complete train tables by weights digest, and the scores.

    Checkpoints that are given are loaded, and their missing target features are computed. The first of ``methods``
    is that of the scores; all of them weigh the checkpoints. ``asked`` are further JSON values, equal on all ranks.
    """
    method, held = methods[0], None if run.train is None else run.train.held
    with (
        run.joined(f"score {name!r}") as ranks,
        run.session(ranks=ranks, train=held) as session,
        naming_dropped(session.store) as train_tables,
    ):
        target_set = TargetSet(session, targets, name, method)
        used: list[str] | None = None
        if checkpoints[0] is not None:
            target_set.refuse_others()
            checkpoint_iter = iterate_checkpoints(*checkpoints)
            with Stages.of(count_checkpoints(*checkpoints), target_set.num_units) as stages:
                used = [target_set.add(one, train_tables) for one in stages.each(checkpoint_iter)]
        train = tables.complete_tables(session.store, used, train_tables)
        if used is None and any(len(set(one.weights(len(train)))) > 1 for one in methods):
            tables.require_order(train, run.last)
        source = ScoreSource(
            *(session.store, list(train.values()), name, method),
            layout=run.settings.layout,
            target_identity=target_set.identity,
            device=run.settings.device,
            ranks=ranks,
        )
        result = ScoreResult(source, run.settings.method, len(targets))
        refuse_other_settings({**result._spec.fingerprint, **asked}, ranks)
        yield target_set, train, result


def matrix_scores(
    run: Run, targets: Rows, name: str, method: AbstractMethod, checkpoints: KnownSource, parts: MatrixParts
) -> Scores:
    """Return the scores of a method that gives a whole matrix: the stored ones, or those that it makes."""
    made: MadeScores | None = None
    while True:
        opened = scoring_session(run, targets, name, [method], checkpoints)
        with opened as (target_set, train, result):
            target_set.find(train)
            target_set.compare(train)
            ranks = result.source.ranks
            finished = ranks.broadcast("whether they are there", result.is_finished)
            if not finished and made is not None:
                ranks.broadcast("the scores", partial(result.put, made))
            if finished or made is not None:
                return result.scores(run, dense=True)
        made = method.matrix(parts)  # between two sessions, because the parts open their own
