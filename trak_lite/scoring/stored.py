"""Stored scores of a target set: one table for the attributor's method, and one for each other method."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._devices import float64_device
from trak_lite.errors import BusyError, InvalidInputError, StateError
from trak_lite.featurizing.session import Run
from trak_lite.linalg.kernel import KernelSettings, precondition
from trak_lite.methods import AbstractMatrixMethod, AbstractMethod, Unrolled
from trak_lite.parallel.ranks import Ranks
from trak_lite.run.settings import AttributorSettings, StoredSettings
from trak_lite.run.tables import (
    ERRORS,
    FEATURES,
    OUT_TO_LOSS,
    SCORES,
    complete_tables,
    drop_targets,
    one_run_path,
    plain_target_folder,
    preconditioned_folder,
    predictions_path,
    score_path,
    score_paths,
    score_table_spec,
    scored_names,
    table_path,
    target_folder,
    target_names,
    target_path,
    target_table_path,
    top_path,
    verdict_path,
)
from trak_lite.run.workspace import Workspace, naming_dropped
from trak_lite.scoring.grams import fisher_of, kernels_of
from trak_lite.scoring.index import indexed_top
from trak_lite.scoring.matrix import AbstractScoreMatrix, StoredMatrix, StreamedMatrix, top_and_bottom
from trak_lite.scoring.records import ScoreRecord
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.source import ScoreSource
from trak_lite.scoring.tiles import score_rows
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Manifest, TableSpec
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.types import FeatureLayout

__all__ = [
    "ScoreResult",
    "ScoredRows",
    "drop_scores",
    "score_source",
    "scored_rows",
    "stored_scores",
    "streamed_scores",
]

Array = NDArray[np.float64]


def stored_scores(
    workspace: Workspace,
    settings: AttributorSettings | StoredSettings,
    name: str,
    method: AbstractMethod,
    *,
    run: Run | None = None,
) -> Scores:
    """Return the scores of a target set whose matrix is stored.

    Args:
        workspace: Location of the store.
        settings: Layout, device and default method.
        name: Name of the target set.
        method: The method of the scores.
        run: The model, settings and store of the scores; ``None`` without a model.

    Raises:
        StateError: If the scores were never computed, or are not finished.
        ManifestMismatchError: If an attributor with another method made the scores.
    """
    store = workspace.reader()
    with naming_dropped(store) as paths:
        table, train = _finished_scores(store, name, method, settings.method, paths)
    _compare_tasks(table.spec.fingerprint.get("targets", {}), run, name)
    source = score_source(store, list(train.values()), name, method, settings)
    return _scores(workspace, settings, source, run, table=table)


def streamed_scores(
    workspace: Workspace,
    settings: AttributorSettings | StoredSettings,
    name: str,
    method: AbstractMethod,
    *,
    run: Run | None = None,
) -> Scores:
    """Return scores that are computed from the stored rows on access, with the checkpoints of the targets.

    Args:
        workspace: Location of the store.
        settings: Layout, device and default method.
        name: Name of the target set.
        method: The method of the scores.
        run: The model, settings and store of the scores; ``None`` without a model.

    Raises:
        StateError: If the targets have no features, or train rows are pending.
    """
    if isinstance(method, AbstractMatrixMethod):
        raise InvalidInputError(f"{method.name} scores are stored whole. Leave out dense=False.")
    store = workspace.reader()
    with naming_dropped(store) as paths:
        train = _scorable_tables(store, name, method, paths)
    source = score_source(store, train, name, method, settings)
    _compare_tasks(source.target_identity, run, name)
    return _scores(workspace, settings, source, run)


def _compare_tasks(targets: Mapping[str, Any], run: Run | None, name: str) -> None:
    """Raise if a task was given, and the targets were scored with another one."""
    given = {} if run is None else run.asked_task()
    if given:
        compare_fingerprints(
            {"task": targets.get("task", {})},
            given,
            where=f"targets {name!r}",
            remedy="Pass the task that these targets were scored with, or none.",
        )


def score_source(
    store: AbstractFeatureStore,
    train: Sequence[AbstractRowTable],
    name: str,
    method: AbstractMethod,
    settings: AttributorSettings | StoredSettings,
    *,
    ranks: Ranks | None = None,
) -> ScoreSource:
    """Return the source that computes scores from the rows of an open store, with all ``ranks`` or alone."""
    return ScoreSource(
        store, train, name, method, layout=settings.layout, device=settings.device, ranks=ranks
    )


def scored_rows(
    store: AbstractFeatureStore, scores: Scores, settings: AttributorSettings | StoredSettings
) -> ScoredRows:
    """Return the stored rows that stored scores were computed from."""
    method = scores.method
    path = score_path(scores.name, method, settings.method)
    digests = list(store.open_table(path).spec.fingerprint["checkpoints"])
    return ScoredRows(
        store=store,
        train=complete_tables(store, digests),
        name=scores.name,
        method=method,
        layout=method.layout_of(settings.layout),
        device=float64_device(settings.device),
    )


def _scores(
    workspace: Workspace,
    settings: AttributorSettings | StoredSettings,
    source: ScoreSource,
    run: Run | None,
    *,
    table: AbstractRowTable | None = None,
    ends: Array | None = None,
    shown: Mapping[str, Any] | None = None,
) -> Scores:
    """Return the scores in a complete table; without one, scores that are computed on access.

    Args:
        workspace: Location of the store.
        settings: Layout and default method.
        source: Computes the scores.
        run: The model, settings and store of the scores; ``None`` without a model.
        table: The table.
        ends: The most helpful and most harmful rows of every target, if known and without a table.
        shown: JSON values to show with scores without a table; those of a table are its attributes.
    """
    fields = source.method.to_json()
    if table is None:
        path, targets = target_folder(source.name, source.method), source.target_identity
        matrix: AbstractScoreMatrix = StreamedMatrix(source, ends)
    else:
        path = score_path(source.name, source.method, settings.method)
        matrix, targets = StoredMatrix(table), table.spec.fingerprint.get("targets", {})
        shown = source.store.attributes(path)
    return Scores(
        matrix,
        source,
        settings={
            **(shown or {}),
            **_name_of_task(targets),
            "checkpoints": source.num_checkpoints,
            "proj_dim": _widths(settings.layout),
            "method": fields.pop("name"),
            **fields,
        },
        location=None if workspace.path is None else f"{workspace.path}:{path}",
        run=run,
        record=None if table is None else ScoreRecord(source.store, path, workspace),
    )


def _name_of_task(targets: Any) -> dict[str, str]:
    """Return the name of the task in the identity of targets; nothing if it is that of the train rows."""
    task = targets.get("task") if isinstance(targets, Mapping) else None
    if task is None:
        return {}
    name = task.get("name") if isinstance(task, Mapping) else None
    return {"task": name if isinstance(name, str) and name else "custom"}


def _widths(layout: FeatureLayout) -> int | str:
    """Return the row width, or ``"segments x width"`` for several segments of the same width."""
    widths = {segment.width for segment in layout.segments}
    if len(layout.segments) == 1 or len(widths) > 1:
        return layout.width
    return f"{len(layout.segments)} x {widths.pop()}"


def _finished_scores(
    store: AbstractFeatureStore,
    name: str,
    method: AbstractMethod,
    base: AbstractMethod,
    paths: Mapping[str, str],
) -> tuple[AbstractRowTable, dict[str, AbstractRowTable]]:
    """Return the complete table of the scores of a target set, and the train tables by weights digest.

    Args:
        store: The store.
        name: Name of the target set.
        method: The method of the scores.
        base: The attributor's method.
        paths: Paths of the train tables by weights digest.

    Raises:
        StateError: If the scores were never computed, are not finished, or train rows were appended since.
        ManifestMismatchError: If an attributor with another method made the scores.
    """
    path = score_path(name, method, base)
    if path not in store.table_names():
        known = scored_names(store)
        how, given = ("", "") if method == base else (f" made with {method}", ", method=...")
        raise StateError(
            f"There are no scores {name!r}{how}; there are {known}. Call score(data, name={name!r}{given})."
        )
    table = store.open_table(path)
    compare_fingerprints(
        {"method": table.spec.fingerprint.get("method", {})},
        {"method": method.to_json()},
        where=path,
        remedy="Open the store with the method that the scores were computed with: Attributor.open(path, model, "
        "method=...).",
    )
    if not table.complete:
        raise StateError(f"The scores {name!r} are not finished. Call score(...) again; it resumes.")
    train = complete_tables(store, list(table.spec.fingerprint["checkpoints"]), paths)
    _refuse_outgrown(name, table.spec, next(iter(train.values())).spec)
    return table, train


def drop_scores(store: AbstractFeatureStore, name: str, *, features: bool = False) -> None:
    """Permanently remove the scores of a target set, of all methods.

    Args:
        store: Open for writing.
        name: Name of the target set.
        features: Also remove the features of the targets, which a set may have without scores.

    Raises:
        StateError: If there are no such scores.
        BusyError: If another process is computing some of them.
        ReadOnlyStoreError: If the store cannot be written.
    """
    found = score_paths(store, name)
    if features and drop_targets(store, name) and not found:
        return
    if not found:
        known = scored_names(store)
        raise StateError(f"There are no scores {name!r}; there are {known}.")
    # Preconditioned targets depend on the train data as well.
    for path in (*found, *store.table_names(preconditioned_folder(name))):
        store.drop_table(path)
    measured = (entry for entry in store.entry_names("index") if entry.endswith(f"/measured/{name}"))
    tested = (of(path) for path in found for of in (verdict_path, one_run_path, predictions_path))
    for entry in (*measured, *tested):
        store.drop_entry(entry)


def _refuse_outgrown(name: str, scores: TableSpec, train: TableSpec) -> None:
    """Raise if train rows were appended after the scores were computed, because that changes the kernel."""
    if scores.num_rows < train.num_rows:
        raise StateError(
            f"The scores {name!r} have {scores.num_rows} train rows, but the store has {train.num_rows} now. Score "
            f"under another name, or drop_scores({name!r}) and score again."
        )


def _scorable_tables(
    store: AbstractFeatureStore, name: str, method: AbstractMethod, paths: Mapping[str, str]
) -> list[AbstractRowTable]:
    """Return the train tables of the checkpoints that a target set has features for.

    Args:
        store: The store.
        name: Name of the target set.
        method: The method of the scores. It determines which features of the targets are used.
        paths: Paths of the train tables by weights digest.

    Raises:
        StateError: If no checkpoint has such features, or train rows are pending.
    """
    known = store.table_names(target_folder(name, method))
    features = {
        digest: target_table_path(name, method, store.open_table(path)) for digest, path in paths.items()
    }
    digests = [
        digest for digest, path in features.items() if path in known and store.open_table(path).complete
    ]
    if not digests:
        names = target_names(store, method)
        raise StateError(
            f"There are no features of targets {name!r}; stored targets: {names}. Call score(data, name={name!r})."
        )
    return list(complete_tables(store, digests, paths).values())


@final
class ScoreResult:
    """The stored scores of one target set and one method, in an open store."""

    def __init__(
        self,
        store: AbstractFeatureStore,
        train: Mapping[str, AbstractRowTable],
        name: str,
        method: AbstractMethod,
        base: AbstractMethod,
        identity: Mapping[str, Any],
        num_targets: int,
    ) -> None:
        tables = list(train.values())
        fingerprint = {
            "checkpoints": list(train),
            "targets": dict(identity),
            "train_rows": [table.content_key() for table in tables],
            "method": method.to_json(),
        }
        self._store = store
        self._train = train
        self._name = name
        self._method = method
        self._path = score_path(name, method, base)
        over_runs = isinstance(method, Unrolled) and len(method.runs) > 1
        self._spec = score_table_spec(tables[0].spec.num_rows, num_targets, fingerprint, errors=over_runs)

    def is_finished(self) -> bool:
        """Return whether the scores are stored with these settings and complete.

        Raises:
            ManifestMismatchError: If they were made with other targets, checkpoints or settings.
            StateError: If train rows were appended since.
        """
        if self._path not in self._store.table_names():
            return False
        table = self._store.open_table(self._path)
        _refuse_outgrown(self._name, table.spec, self._spec)
        there, here = table.spec.fingerprint, self._spec.fingerprint
        stored, given = len(there["checkpoints"]), len(here["checkpoints"])
        counts = (
            "" if stored == given else f" (the stored scores use {stored} checkpoints, this call {given})"
        )
        compare_fingerprints(
            there,
            here,
            where=f"{self._path}{counts}",
            remedy="Score these under another name, or pass the targets, checkpoints and method that they were "
            "computed with. A model that was trained again has other checkpoints: use another path for it, or "
            "score(..., checkpoints=...) with its own.",
        )
        return table.complete

    def fill(
        self,
        source: ScoreSource,
        *,
        device: torch.device,
        progress: bool | None,
    ) -> None:
        """Compute the pending rows of the score table, with the ranks of the source."""
        terms = source.terms()
        score_rows(
            self._store.create_table(self._path, self._spec),
            terms,
            q=source.method.q,
            device=device,
            label=f"Scoring {self._name!r}",
            progress=progress,
            ranks=source.ranks,
        )

    def put(
        self,
        matrix: NDArray[np.float32],
        errors: NDArray[np.float32] | None,
        attributes: Mapping[str, Any],
    ) -> None:
        """Store scores ``(N, M)`` that were computed elsewhere.

        Args:
            matrix: The scores.
            errors: Their standard errors over runs, ``(N, M)``; ``None`` unless they are a mean over runs.
            attributes: JSON values that are shown with the scores.

        Raises:
            InvalidInputError: If their shape is not that of the table.
        """
        shape = (self._spec.num_rows, self._spec.columns[0].width)
        if matrix.shape != shape:
            raise InvalidInputError(
                f"{self._method.name} gave scores of shape {matrix.shape}, but the store has {shape[0]} train rows and "
                f"there are {shape[1]} targets. Make the run with the train rows of the store, in their order."
            )
        table = self._store.create_table(self._path, self._spec, attributes)
        columns = {SCORES: matrix} if errors is None else {SCORES: matrix, ERRORS: errors}
        for start in range(0, len(matrix), self._spec.chunk_rows):
            rows = np.arange(start, min(start + self._spec.chunk_rows, len(matrix)))
            # A process that was killed here, or another one, has written some chunks.
            with contextlib.suppress(BusyError, StateError):
                table.put(rows, {column: values[rows] for column, values in columns.items()})

    def top_and_bottom(
        self, source: ScoreSource, k: int, recall: float | None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Return the k most helpful and most harmful rows of every target, and what to report of an index.

        Exact rows are read from the store's cache, or found in one pass over the stored rows, which the ranks of the
        source share. Nothing is cached if the store is read-only.

        Args:
            source: Computes the scores.
            k: Number of helpful and of harmful rows.
            recall: Share of the exact rows that suffices; ``None`` uses no index.
        """
        name, key = top_path(self._name), self.digest()
        rows = self._store.cached(name, key)
        enough = rows is not None and rows.shape[-1] >= min(k, source.num_rows)
        report: dict[str, Any] = {}
        # In an object store, the ranks may have different caches: compute unless all ranks have the rows.
        if not source.ranks.merged(enough, operator.and_):
            if recall is None:
                rows = top_and_bottom(source, k)
            else:
                identity = ("method", "checkpoints", "train_rows")
                found = indexed_top(
                    self._store, source, {one: self._spec.fingerprint[one] for one in identity}, k, recall
                )
                rows, report = found.ends, found.report()
            if source.ranks.rank == 0 and "candidates" not in report:
                self._store.cache(name, key, rows)
        return np.array(rows), {} if recall is None else {"recall": 1.0, **report}

    def scores(
        self, run: Run, *, dense: bool, ends: Array | None = None, shown: Mapping[str, Any] | None = None
    ) -> Scores:
        """Return the scores. They read from the store, also after it is closed.

        Args:
            run: The model, settings and store of the scores.
            dense: Return the stored matrix, which must be complete. ``False`` computes scores on access.
            ends: The most helpful and most harmful rows of every target, if known.
            shown: JSON values to show with the scores.
        """
        source = score_source(self._store, list(self._train.values()), self._name, self._method, run.settings)
        table = self._store.open_table(self._path) if dense else None
        return _scores(run.workspace, run.settings, source, run, table=table, ends=ends, shown=shown)

    def digest(self) -> str:
        """Return a digest of everything that the scores depend on."""
        return Manifest(self._spec.fingerprint).digest()


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """The stored rows that the scores of one target set are computed from."""

    store: AbstractFeatureStore
    """Holds the gram matrices."""
    train: Mapping[str, AbstractRowTable]
    """Feature tables of the train rows by the digest of the checkpoint's weights."""
    name: str
    """Name of the target set."""
    method: AbstractMethod
    """The method of the scores."""
    layout: FeatureLayout
    """Segments of a feature row, as the method uses them."""
    device: torch.device
    """Device of the products."""

    def require_kernel(self) -> KernelSettings:
        """Return the method's kernel settings.

        Raises:
            InvalidInputError: If the method has no kernel.
        """
        kernel = self.method.kernel
        if kernel is None:
            raise InvalidInputError(
                f"Scores of {self.method.name} have no kernel to calibrate. Verify them with calibrate=False, or "
                "calibrate those of GaussNewton, Fisher or TRAK."
            )
        return kernel

    def mean_out_to_loss(self) -> Array:
        """Return the mean q of every train row over checkpoints, ``(N,)``."""
        columns = [table.read(OUT_TO_LOSS) for table in self.train.values()]
        mean: Array = np.mean(columns, axis=0, dtype=np.float64)
        return mean

    def has_targets(self) -> bool:
        """Return whether plain (not preconditioned) target features are stored; EKFAC scores do not need them."""
        known = self.store.table_names(plain_target_folder(self.name))
        return all(
            target_path(self.name, table.spec.fingerprint["model_id"]) in known
            for table in self.train.values()
        )

    def targets(self, table: AbstractRowTable) -> Tensor:
        """Return the target features of a checkpoint, ``(M, K)`` float64."""
        rows = self.store.open_table(target_path(self.name, table.spec.fingerprint["model_id"])).read(
            FEATURES
        )
        return torch.from_numpy(rows).to(self.device, torch.float64)

    def preconditioned(self, table: AbstractRowTable, damping: float | None) -> Tensor:
        """Return the targets of a checkpoint multiplied by (H + lambda I)^-1, ``(M, K)`` float64."""
        kernel = replace(self.require_kernel(), damping=damping, lambda_reg=None)
        path, fisher = table_path(table), fisher_of(self.method)
        kernels = kernels_of(self.store, path, kernel, self.layout, device=self.device, fisher=fisher)
        return precondition(self.targets(table), kernels, layout=self.layout).double()
