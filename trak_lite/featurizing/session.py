"""One call's hold on a store and on the model: train rows, targets and curvatures, checkpoint by checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.data.batches import move_batch
from trak_lite.data.datasets import HeldRows, Rows
from trak_lite.errors import ManifestMismatchError, StateError, refuse_machine_failure
from trak_lite.featurizing.diagnosis import naming_rows
from trak_lite.featurizing.fisher import FisherFits, FisherSettings
from trak_lite.featurizing.kronecker import KroneckerSettings, PreconditionedProjector, Preconditioner
from trak_lite.featurizing.kronecker_fits import CurvatureFits
from trak_lite.featurizing.rows import check_rows, compute_features, featurize_rows
from trak_lite.featurizing.target_session import TargetSession, visit_checkpoints
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.models.borrowing import borrow_model
from trak_lite.models.checkpoints import (
    Checkpoint,
    CheckpointSource,
    iterate_checkpoints,
    load_into,
    noted_checkpoint,
    weights_digest,
)
from trak_lite.models.sharded import Lockstep, refuse_sharded
from trak_lite.parallel.ranks import AbstractRanks
from trak_lite.parallel.sharing import LateTable, Patience, has_free_rows, holder_of
from trak_lite.projectors import AbstractProjector
from trak_lite.run.score_settings import ScoreSettings
from trak_lite.run.settings import AttributorSettings
from trak_lite.run.tables import GRADIENT_NORM, checkpoint_tables, complete_tables, target_folder
from trak_lite.run.workspace import FirstRows, Workspace
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, TableSpec
from trak_lite.types import Batch

__all__ = ["FeaturizingSession", "KnownSource", "featurizing", "marking_last", "stored_norms"]

logger = logging.getLogger(__name__)

KnownSource: TypeAlias = tuple[CheckpointSource, Callable[[Any], Mapping[str, Tensor]] | None]
"""Checkpoints that were featurized, and what turns one of them into a state dict."""


@contextmanager
def featurizing(
    model: nn.Module,
    settings: AttributorSettings,
    workspace: Workspace,
    *,
    dataset: Mapping[str, Any] | None,
    sources: Iterable[KnownSource],
    progress: bool | None,
    ranks: AbstractRanks,
    appended_to: FirstRows | None = None,
    train: Rows | HeldRows | None = None,
) -> Iterator[FeaturizingSession]:
    """Hold a store open for writing and a model borrowed, inside the block.

    Args:
        model: Comes back as it was.
        settings: What rows are made with.
        workspace: Where the store is.
        dataset: What the train data are recognised by; ``None`` takes those of the store.
        sources: Where to look for weights, besides what the store knows.
        progress: Show progress bars; ``None`` shows them on a terminal only.
        ranks: Those that do the same at this moment.
        appended_to: See :meth:`~trak_lite.run.workspace.Workspace.open`.
        train: The train rows, or a few of them, where they are at hand: stored ones are computed again with every
            checkpoint that is loaded, and compared.

    Raises:
        ManifestMismatchError: If the store was made with other settings; names every difference.
        ShortageError: If memory or threads are used up.
        WorkerLostError: If a process that loads samples was lost.
    """
    try:
        with (
            workspace.opened(settings.manifest(dataset), appended_to=appended_to) as opened,
            borrow_model(model, settings.device) as own,
        ):
            yield FeaturizingSession(
                model, settings, opened, own=own, sources=sources, progress=progress, ranks=ranks, train=train
            )
    except (MemoryError, OSError, RuntimeError) as error:
        refuse_machine_failure(error)
        raise


@final
class FeaturizingSession:
    """Computes what an open store lacks, with a borrowed model."""

    def __init__(
        self,
        model: nn.Module,
        settings: AttributorSettings,
        workspace: Workspace,
        *,
        own: Mapping[str, Tensor],
        sources: Iterable[KnownSource],
        progress: bool | None,
        ranks: AbstractRanks,
        train: Rows | HeldRows | None,
    ) -> None:
        """Hold what :func:`featurizing` opened and borrowed; ``own`` are the model's weights as they were."""
        self._train = train
        self._model = model
        self._settings = settings
        self._workspace = workspace
        self._own = own
        self._sources = sources
        self._progress = progress
        self._ranks = ranks
        self._unfinished: list[tuple[Checkpoint, str]] = []
        self._is_first = True
        self._lockstep = Lockstep.of(model)

    @property
    def store(self) -> AbstractFeatureStore:
        """The open store.

        Raises:
            StateError: If there is none yet.
        """
        return self._workspace.store()

    def agreed(self, flag: bool) -> bool:
        """Return whether all ranks of a sharded model say so, as what they do next has to be the same."""
        return self._lockstep.all(flag)

    def featurize(self, checkpoint: Checkpoint, rows: Rows, *, wait: bool) -> int:
        """Load a checkpoint and featurize the train rows that it lacks; return how many this process wrote.

        Args:
            checkpoint: The checkpoint.
            rows: The train rows.
            wait: Return when every row is there; otherwise, and where rows of earlier ones are left, leave to others
                what they hold, for :meth:`finish`.
        """
        digest = self._load(checkpoint)
        # Until rank 0 has said what the first one is, nobody writes rows of another model.
        what = f"checkpoint {checkpoint.name!r} (digest of its weights)"
        self._ranks.agree(what, digest, with_rank_0=self._is_first)
        self._is_first = False
        self._warn_of_namesakes(checkpoint, digest)
        return self._featurize_train(checkpoint, digest, rows, wait=wait)

    def _warn_of_namesakes(self, checkpoint: Checkpoint, digest: str) -> None:
        """Say that other weights of the same name are in the store: scores would be made with both.

        State dicts in a list have no names but their numbers.
        """
        if not self._workspace.exists or (checkpoint.source is None and checkpoint.load is not None):
            return
        known = checkpoint_tables(self.store)
        others = [
            path for path in known.values() if self.store.attributes(path).get("name") == checkpoint.name
        ]
        if digest not in known and others:
            warnings.warn(
                f"The store has other weights under the name {checkpoint.name!r} already ({', '.join(others)}), and "
                "scores are made with all checkpoints in it. Leave them out with score(..., checkpoints=...), or "
                f"remove them: drop_checkpoint({others[0]!r}).",
                UserWarning,
                stacklevel=4,
            )

    def _featurize_train(self, checkpoint: Checkpoint, digest: str, rows: Rows, *, wait: bool) -> int:
        """Featurize the train rows of the checkpoint that is loaded, and fit its kernel; see :meth:`featurize`."""
        # What one rank of a sharded model leaves to others, it leaves to itself. Others are not waited for here while
        # there are rows of another checkpoint that they may leave.
        wait = (wait and not self._unfinished) or not self._lockstep.is_alone
        if self._settings.kernel.weighting == "fisher" and self._workspace.exists:
            known = digest in checkpoint_tables(self.store)
            if known and not self._has_fisher(digest):
                FisherFits(self.store).require_writable()
        written = self._featurize_loaded(checkpoint, digest, rows, wait=wait)
        if self._settings.kernel.weighting == "fisher":
            fits = FisherFits(self.store)
            if not fits.is_begun():
                fits.begin(FisherSettings())
            self._fit_fisher(digest, checkpoint.name, rows, wait=wait)
        if not self._is_featurized(digest):
            self._unfinished.append((checkpoint, digest))
        return written

    def finish(self, rows: Rows) -> int:
        """Wait for what others held when :meth:`featurize` passed by, and take over what they leave.

        Weights are loaded again only for rows that nobody works on any more.

        Returns:
            Number of rows that this process wrote.
        """
        written, patience = 0, Patience()
        while self._unfinished:
            unfinished, self._unfinished = self._unfinished, []
            for checkpoint, digest in unfinished:
                if self._is_left_alone(digest):
                    # Each rank takes up others, in an order of its own: there is nothing to agree on by name.
                    written += self._featurize_train(checkpoint, self._load(checkpoint), rows, wait=False)
                    patience.reset()
                elif not self._is_featurized(digest):
                    self._unfinished.append((checkpoint, digest))
            if self._unfinished:
                self._ranks.watch()
                patience.wait(f"for rows of {len(self._unfinished)} checkpoints", self._holders)
        return written

    def _holders(self) -> str:
        """Return who holds rows of the first checkpoint that is not finished."""
        path = self._path(self._unfinished[0][1])
        return holder_of(self.store.open_table(path)) or f"others work on {path}, at what is not rows of it."

    def _is_featurized(self, digest: str) -> bool:
        """Whether all is there that featurizing a checkpoint makes."""
        table = self.store.open_table(self._path(digest))
        return table.complete and (self._settings.kernel.weighting != "fisher" or self._has_fisher(digest))

    def _is_left_alone(self, digest: str) -> bool:
        """Whether there is something to do for a checkpoint that nobody does."""
        path = self._path(digest)
        if has_free_rows(self.store.open_table(path)):
            return True
        fisher = self._settings.kernel.weighting == "fisher"
        return fisher and FisherFits(self.store).is_left_alone(path, self._settings.layout)

    def _path(self, digest: str) -> str:
        """Return the table of a checkpoint that is being featurized."""
        path = checkpoint_tables(self.store).get(digest)
        if path is None:
            raise StateError(
                f"The checkpoint with weights {digest[:12]} is not in the store any more: another process has dropped "
                "it while its rows were featurized. Call featurize(...) again."
            )
        return path

    def target_identity(self, identity: Mapping[str, Any], settings: ScoreSettings) -> dict[str, Any]:
        """Return what a target set is recognised by, from what its data are: its curvature belongs to it.

        Raises:
            StateError: If the scores need a curvature and none was fitted.
        """
        if settings.kernel == "fisher":
            FisherFits(self.store).record()  # or the targets would be featurized in vain
        if settings.kernel != "ekfac":
            return dict(identity)
        return {**identity, "curvature": self._fits().record()}

    def targets(
        self, rows: Rows, name: str, settings: ScoreSettings, identity: Mapping[str, Any]
    ) -> TargetSession:
        """Return what computes the features of a target set.

        Args:
            rows: The targets.
            name: Name of the target set.
            settings: How scores are to be made, which says which features are needed.
            identity: What the target set is recognised by.
        """
        preconditioned = settings.kernel == "ekfac"

        def spec(model_id: int, digest: str) -> TableSpec:
            fingerprint = {
                **self._settings.row_fingerprint(model_id, digest),
                "targets": dict(identity),
            }
            return self._settings.target_table(len(rows), fingerprint, preconditioned=preconditioned)

        return TargetSession(
            self._workspace,
            rows,
            name=name,
            folder=target_folder(name, settings),
            identity=identity,
            load=self._load,
            spec=spec,
            check=self._check_train,
            agreed=self.agreed,
            featurize=partial(self._precondition, settings.damping or 0.0)
            if preconditioned
            else self._featurize,
        )

    def fit_curvature(
        self,
        rows: Rows,
        identity: Mapping[str, Any],
        settings: KroneckerSettings | FisherSettings,
        checkpoints: Iterator[Checkpoint] | None,
    ) -> None:
        """Fit the curvature of checkpoints, or what is missing of it.

        Args:
            rows: The train rows.
            identity: What they are recognised by.
            settings: Which curvature.
            checkpoints: Those to fit; ``None`` fits every one in the store, from wherever its weights are to be found.

        Raises:
            StateError: If a checkpoint is not in the store, or its weights are not to be found.
            ReadOnlyStoreError: If the store cannot be written.
            UnsupportedModelError: If the curvature is Kronecker-factored, and the model sharded.
        """
        fit, has = self._fitting(rows, identity, settings)
        if checkpoints is not None:
            for checkpoint in checkpoints:
                digest = self._load(checkpoint)
                complete_tables(self.store, [digest])
                self._check_train(digest)
                fit(digest, checkpoint.name)
            return

        def fit_checked(digest: str, label: str) -> None:
            self._check_train(digest)
            fit(digest, label)

        waiting = [digest for digest in checkpoint_tables(self.store) if not self.agreed(has(digest))]
        visit_checkpoints(
            self.store, waiting, self.candidates, self._load, fit_checked, purpose="to fit a curvature"
        )

    def _fitting(
        self, rows: Rows, identity: Mapping[str, Any], settings: KroneckerSettings | FisherSettings
    ) -> tuple[Callable[[str, str], None], Callable[[str], bool]]:
        """Return what fits the checkpoint that is loaded, from its digest and name, and whether one is fitted."""
        if isinstance(settings, FisherSettings):
            self._settings.check_kernel("fisher")
            FisherFits(self.store).begin(settings)
            return lambda digest, label: self._fit_fisher(digest, label, rows), self._has_fisher
        refuse_sharded(self._model, "fit_curvature", "Use settings=FisherSettings(), or fit a whole model")
        fits = self._fits()
        fits.begin(settings, self._settings.task, identity)

        def fit(digest: str, label: str) -> None:
            fits.fit(
                digest,
                self._settings.task,
                rows,
                device=self._settings.device,
                label=f"Fitting the curvature of {label}",
                progress=self._progress,
            )

        return fit, fits.has

    def _has_fisher(self, digest: str) -> bool:
        return FisherFits(self.store).has(self._path(digest), self._settings.layout)

    def _fit_fisher(self, digest: str, label: str, rows: Rows, *, wait: bool = True) -> None:
        """Fit the Fisher information of the checkpoint that is loaded, if it is not there yet."""
        if self.agreed(self._has_fisher(digest)):
            FisherFits(self.store).sweep(self._path(digest), self._settings.layout)
            return
        settings = self._settings
        if not settings.computer_is_chosen:
            numbers, batch = next(rows.batches([np.arange(min(rows.batch_size, len(rows)))]))
            self._computers(rows.what)(move_batch(batch, settings.device), numbers)
        computer = settings.fisher_computer()
        computer.load_model_params(self._model)
        FisherFits(self.store).fit(
            checkpoint_tables(self.store)[digest],
            settings.task,
            computer,
            settings.projector,
            rows,
            layout=settings.layout,
            model_id=self._workspace.model_id(digest),
            device=settings.device,
            label=f"Fitting the Fisher information of {label}",
            progress=self._progress,
            watch=self._ranks.watch,
            wait=wait,
            leads=partial(self._ranks.comes_first, f"drawn labels of {digest}"),
        )

    def candidates(self, store: AbstractFeatureStore, needed: Iterable[str]) -> Iterator[Checkpoint]:
        """Yield checkpoints that may hold the needed weights: from featurize, from disk, the model's own."""
        for source in self._sources:
            yield from iterate_checkpoints(*source)
        tables = checkpoint_tables(store)
        for digest in sorted(needed):
            noted = noted_checkpoint(store.attributes(tables[digest]).get("source"))
            if noted is not None:
                yield noted
        yield from iterate_checkpoints(None)

    def visit(self, digests: Iterable[str], visit: Callable[[str], None], *, purpose: str) -> None:
        """Load checkpoints of the store one by one and call ``visit`` with the digest of each.

        Raises:
            StateError: If the weights of a checkpoint are not to be found; says that they are needed for ``purpose``.
        """

        def visit_checked(digest: str, _: str) -> None:
            self._check_train(digest)
            visit(digest)

        visit_checkpoints(self.store, digests, self.candidates, self._load, visit_checked, purpose=purpose)

    def features(self, batch: Batch, rows: NDArray[np.int64], *, model_id: int, what: str) -> Tensor:
        """Return the features ``(B, K)`` of a batch from the checkpoint that is loaded; nothing is kept.

        Args:
            batch: B samples.
            rows: ``(B,)`` their rows in the dataset, for messages.
            model_id: The checkpoint.
            what: How messages name the dataset.
        """
        moved = move_batch(batch, self._settings.device)
        computer = self._computers(what)(moved, rows)
        projector = self._settings.projector
        return compute_features(computer, projector, moved, model_id=model_id, rows=rows, what=what)[0]

    def _check_train(self, digest: str) -> None:
        """Compute a few train rows of the checkpoint that is loaded again, where the train data are at hand.

        Raises:
            ManifestMismatchError: If they are not what is stored.
        """
        path = checkpoint_tables(self.store).get(digest)
        if self._train is None or path is None:
            return
        table = self.store.open_table(path)
        if len(self._train) != table.spec.num_rows:  # rows were appended since, by another process
            return
        check_rows(
            LateTable(table.spec, table, lambda: table),
            self._train,
            self._train.held if isinstance(self._train, HeldRows) else None,
            self._computers(self._train.what),
            self._settings.projector,
            model_id=self._workspace.model_id(digest),
            device=self._settings.device,
            label=path,
            normalization=self._settings.normalization,
            lockstep=self._lockstep,
        )

    def _load(self, checkpoint: Checkpoint) -> str:
        """Load a checkpoint, let the task prepare for it, and return the digest of its weights."""
        load_into(self._model, checkpoint, self._own)
        self._settings.task.prepare(self._model)
        return weights_digest(self._model)

    def _featurize_loaded(self, checkpoint: Checkpoint, digest: str, rows: Rows, *, wait: bool) -> int:
        """Featurize the train rows of the checkpoint that is loaded; return how many this process wrote."""
        model_id = self._workspace.model_id(digest)
        table = self._workspace.late_table(
            f"ckpt-{model_id}",
            self._settings.train_table(len(rows), self._settings.row_fingerprint(model_id, digest)),
            {"name": checkpoint.name, "source": checkpoint.source},
        )
        try:
            return self._featurize(table, rows, model_id, f"Featurizing {checkpoint.name}", wait=wait)
        except ManifestMismatchError:
            if self._workspace.model_id(digest) == model_id:
                raise
        # Another process gave the number to another checkpoint just now, and the projection depends on it.
        return self._featurize_loaded(checkpoint, digest, rows, wait=wait)

    def _precondition(self, damping: float, table: LateTable, rows: Rows, model_id: int, label: str) -> int:
        """Fill a table with targets behind the curvature of the checkpoint that is loaded."""
        curvature = self._fits().curvature(table.spec.fingerprint["weights"], self._settings.device)
        inverse = Preconditioner(curvature, damping=damping)
        projector = PreconditionedProjector(self._settings.projector, inverse)
        return self._featurize(table, rows, model_id, label, projector)

    def _featurize(
        self,
        table: LateTable,
        rows: Rows,
        model_id: int,
        label: str,
        projector: AbstractProjector | None = None,
        *,
        wait: bool = True,
    ) -> int:
        """Fill a table from the checkpoint that is loaded; return how many rows this process wrote."""
        settings = self._settings
        return featurize_rows(
            table,
            rows,
            self._computers(rows.what),
            settings.projector if projector is None else projector,
            model_id=model_id,
            device=settings.device,
            label=label,
            normalization=settings.normalization,
            progress=self._progress,
            watch=self._ranks.watch,
            wait=wait,
            leads=partial(self._ranks.comes_first, label),
            lockstep=self._lockstep,
        )

    def _computers(self, what: str) -> Callable[[Batch, NDArray[np.int64]], AbstractGradientComputer]:
        """Return what gives the gradient computer of a batch, the first of which may decide on it."""
        settings = self._settings
        found: list[AbstractGradientComputer] = []

        def computer_for(batch: Batch, wanted: NDArray[np.int64]) -> AbstractGradientComputer:
            if not found and not settings.computer_is_chosen:
                with naming_rows(self._model, settings.task, batch, wanted, what):
                    found.append(settings.choose_computer(batch))
            elif not found:
                found.append(settings.computer())
                found[0].load_model_params(self._model)
            return found[0]

        return computer_for

    def _fits(self) -> CurvatureFits:
        return CurvatureFits(self.store, self._model, self._settings.parameters)


def marking_last(checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Checkpoint, bool]]:
    """Yield checkpoints, and whether each is the last one."""
    following = iter(checkpoints)
    checkpoint = next(following, None)
    while checkpoint is not None:
        later = next(following, None)
        yield checkpoint, later is None
        checkpoint = later


def stored_norms(store: AbstractFeatureStore) -> NDArray[np.float32]:
    """Return the norms ``(C, N)`` that stand beside the features of every checkpoint.

    Raises:
        StateError: If rows are pending, or the store was made without norms.
    """
    return np.stack([_norms_of(table) for table in complete_tables(store, None).values()])


def _norms_of(table: AbstractRowTable) -> NDArray[np.float32]:
    if GRADIENT_NORM not in [column.name for column in table.spec.columns]:
        raise StateError(
            f"ckpt-{table.spec.fingerprint['model_id']} has no gradient norms: it was featurized with "
            "store_norms=False. Featurize into another path with store_norms=True."
        )
    return table.read(GRADIENT_NORM)
