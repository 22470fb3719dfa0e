"""A set of targets whose features are found in the store, or computed and stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from trak_lite.data.datasets import Rows
from trak_lite.featurizing.fits import MethodFits
from trak_lite.featurizing.kronecker.curvature import PreconditionedProjector
from trak_lite.featurizing.session import FeaturizingSession, TrainTables
from trak_lite.featurizing.stored_settings import refuse_other_settings
from trak_lite.methods import AbstractMethod
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.run.tables import (
    CHECKPOINTS,
    complete_tables,
    model_id_of,
    score_paths,
    table_path,
    target_folder,
    target_paths,
    target_table_path,
    without_fit,
)
from trak_lite.store import AbstractRowTable
from trak_lite.store.manifest import compare_fingerprints

_TO_READ = (
    "scores({name!r}) reads the stored scores, and score(..., checkpoints=...) names the weights to use."
)


@final
@dataclass(slots=True, eq=False)
class TargetSet:
    """The features of some targets that the scores of a method need, one table per checkpoint."""

    session: FeaturizingSession
    rows: Rows
    name: str
    method: AbstractMethod
    """The method of the scores. It determines which features are needed."""
    visited: set[str] = field(default_factory=set)
    """Digests of the weights whose features were computed, or compared."""

    identity: dict[str, Any] = field(init=False)
    """JSON values that identify the targets; if the method uses a curvature fit, they include the fit."""

    def __post_init__(self) -> None:
        self.identity = self.session.run.target_identity(self.rows)
        asked = {"targets": self.identity, "method": self.method.to_json()}
        refuse_other_settings(asked, self.session.ranks)
        if self.method.inverse is not None:
            self.identity["curvature"] = MethodFits(self.session).kronecker_fits(self.method.inverse).record()

    @property
    def num_units(self) -> int:
        """Rows of a checkpoint, as units of progress; 0 if a curvature may have to be fitted first."""
        return len(self.rows) if self.method.inverse is None else 0

    def refuse_others(self) -> None:
        """Raise :class:`ManifestMismatchError` if features or scores of other targets are stored under the name.

        Features that the method would read are of the same curvature fit, too. Of those of another method, one table is
        compared. Scores outlast the features of checkpoints that were dropped.
        """
        remedy = f"Score under another name, or call drop_scores({self.name!r}, features=True) first."
        own = f"{target_folder(self.name, self.method)}/"
        store = self.session.store
        features = target_paths(store, self.name)
        chosen = {path if path.startswith(own) else path.rpartition("/")[0]: path for path in features}
        for path in (*chosen.values(), *score_paths(store, self.name)):
            table = self.session.workspace.table(path)
            if table is not None:  # another process may have dropped it meanwhile
                stored, asked = table.spec.fingerprint.get("targets"), self.identity
                if not path.startswith(own):
                    stored, asked = without_fit(stored), without_fit(asked)
                compare_fingerprints({"targets": stored}, {"targets": asked}, where=path, remedy=remedy)

    def add(self, checkpoint: Checkpoint, known: TrainTables) -> str:
        """Load a checkpoint and compute its missing features; return the digest of its weights."""
        digest = self.session.load(checkpoint)
        train = complete_tables(self.session.store, [digest], known)
        self.session.check_train(train[digest])
        self._fill(train, digest, checkpoint.name)
        return digest

    def find(self, train: TrainTables) -> None:
        """Compute the missing features of all checkpoints, from any known source of their weights."""
        self.refuse_others()
        agreed = self.session.agreed
        waiting = {digest: table for digest, table in train.items() if not agreed(self._is_there(table))}
        fill = partial(self._fill, train)
        self.session.visit(waiting, fill, purpose="to score new targets", units=self.num_units)

    def compare(self, train: TrainTables) -> None:
        """Compute a few stored targets again, with the first checkpoint whose weights are available, and compare.

        This detects changes of the targets or the model; other weights of a file or of the model itself, featurized by
        another attributor, are refused. It does nothing if all stored targets were already compared, or if no weights
        are available.
        """
        session = self.session
        agreed = session.agreed
        there = {
            digest: table
            for digest, table in train.items()
            if digest not in self.visited and agreed(self._is_there(table))
        }
        if not there:
            return
        # A loader may have made other weights of a file than it has; earlier versions did not note it.
        plain = {
            digest: table
            for digest, table in train.items()
            if session.store.attributes(table_path(table)).get("has_loader") is False
        }
        others, is_compared = there.keys() - session.run.featurized, False
        for checkpoint, digest in session.loaded(there, []):
            if digest not in train:
                session.refuse_replaced(checkpoint, digest, plain, remedy=_TO_READ.format(name=self.name))
            if digest in there and not is_compared:
                is_compared = True
                session.check_train(train[digest])
                self._fill(train, digest, checkpoint.name)
            if is_compared and not others:
                return

    def _fill(self, train: TrainTables, digest: str, label: str) -> None:
        """Compute the missing features of the loaded checkpoint, and compare a few of the stored ones.

        Stored ones are not compared if the curvature that they were multiplied by is no longer stored, because another
        fit has replaced it; nor those of a solver that reads the train rows, which costs passes over them.
        """
        self.visited.add(digest)
        session, method, table = self.session, self.method, train[digest]
        settings, model_id = session.settings, model_id_of(table)
        projector, solver, fits = None, method.inverse, MethodFits(session)
        if solver is not None:
            if self._is_there(table) and (solver.reads_rows or not fits.kronecker_fits(solver).has(digest)):
                return
            inverse = fits.inverse(digest, label, solver)
            projector = PreconditionedProjector(settings.projector, inverse.accumulator)
        normalization = settings.normalization.of_targets()
        passes = session.row_pass(self.rows, model_id, projector=projector, normalization=normalization)
        identity = {**settings.row_fingerprint(model_id, digest, passes.adam), "targets": self.identity}
        spec = settings.target_table(len(self.rows), identity, preconditioned=projector is not None)
        path = target_table_path(self.name, method, table)
        lazy_table = session.workspace.lazy_table(path, spec, {CHECKPOINTS: list(train)})
        session.work(lazy_table, passes, f"Targets {self.name!r}, {label}").fill()

    def _is_there(self, train: AbstractRowTable) -> bool:
        table = self.session.workspace.table(target_table_path(self.name, self.method, train))
        return table is not None and table.complete
