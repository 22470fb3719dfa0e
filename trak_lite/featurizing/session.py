"""Sessions, in which one call featurizes train rows and targets and fits curvatures, checkpoint by checkpoint."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite._devices import one_behind
from trak_lite._progress import Stages, announce
from trak_lite._validate import positive_int, some_of
from trak_lite.data.batches import move_batch
from trak_lite.data.datasets import HeldRows, Rows, rows_of
from trak_lite.errors import CheckpointError, ManifestMismatchError, StateError, refuse_machine_failure
from trak_lite.featurizing.diagnosis import naming_rows
from trak_lite.featurizing.fisher import FisherFits, require_writable
from trak_lite.featurizing.gauss_newton import CurvatureProducts
from trak_lite.featurizing.inverse import InverseCurvature, Solution
from trak_lite.featurizing.kronecker.precondition import PreconditionedProjector, Preconditioner
from trak_lite.featurizing.kronecker_fits import KroneckerFits
from trak_lite.featurizing.rows import (
    HostRows,
    RowPass,
    RowWork,
    SampleRows,
    compute_features,
    featurize_rows,
)
from trak_lite.featurizing.unprojected import GradientPass
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.normalization import Normalization
from trak_lite.methods import CG, EKFAC, AbstractInverseMethod, AbstractMethod, Fisher, LiSSA
from trak_lite.modelout_functions import AbstractModelOutput, QuestionsModelOutput
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.models.borrowing import borrow_model
from trak_lite.models.checkpoints import (
    Checkpoint,
    CheckpointSource,
    iterate_checkpoints,
    load_into,
    noted_checkpoint,
    weights_digest,
)
from trak_lite.models.optimizers import AdamStates, adam_states
from trak_lite.models.sharded import Lockstep, refuse_sharded
from trak_lite.parallel.ranks import Ranks, joined_ranks
from trak_lite.parallel.sharing import LazyTable, Patience, has_free_rows, holder_of
from trak_lite.projectors import AbstractProjector
from trak_lite.run.settings import AttributorSettings, Task
from trak_lite.run.tables import (
    GRADIENT_NORM,
    checkpoint_path,
    checkpoint_tables,
    complete_tables,
    feature_table_spec,
    table_path,
    target_table_path,
)
from trak_lite.run.workspace import FirstRows, Workspace
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.types import Batch

__all__ = ["FeaturizingSession", "KnownSource", "Run", "TargetSet", "marking_last", "stored_norms"]

logger = logging.getLogger(__name__)

KnownSource: TypeAlias = tuple[CheckpointSource, Callable[[Any], Mapping[str, Tensor]] | None]
"""Checkpoints that were featurized, and the function that turns one of them into a state dict."""


@final
@dataclass(eq=False, repr=False)
class Run:
    """A model, its settings and its store, shared by all calls on one attributor and its scores.

    The fields up to ``distributed`` are the arguments of :class:`~trak_lite.Attributor`.
    """

    model: nn.Module
    settings: AttributorSettings
    workspace: Workspace
    _: KW_ONLY
    collate: Callable[[list[Any]], Batch] | None
    batch_size: int | None
    progress: bool | None
    distributed: bool | None
    sources: list[KnownSource] = field(default_factory=list)
    """Featurized checkpoints. Weights are searched here first, then at the sources recorded in the store."""
    featurized: set[str] = field(default_factory=set)
    """Digests of the weights that ``featurize`` has loaded."""
    is_resumed: bool = False
    """Whether the model is in a resumed training, which may replace files that it saved before."""
    train: Rows | None = None
    """The train data of the last ``featurize``, for methods that are fitted to them."""
    question: str = ""
    """Name of the question that all targets ask; empty if their task is that of the train rows."""
    computers: dict[str, AbstractGradientComputer] | None = None
    """Gradient computers by the digest of the weights that their plans and self-checks hold for, to be used again by
    later sessions; ``None`` makes a computer for every session and checkpoint."""

    def rows(self, data: Any, what: str, batch_size: int | None = None) -> Rows:
        """Return the rows of a user's data; ``what`` is their name in messages, ``batch_size`` replaces their own."""
        found = rows_of(data, what=what, batch_size=self.batch_size, collate=self.collate)
        if batch_size is not None:
            found.batch_size = positive_int(batch_size=batch_size)
        return found

    def asking(self, task: Task | None) -> Run:
        """Return this run with another task for targets; ``None`` returns this run.

        Raises:
            UnknownTaskError: If the task is unknown.
        """
        if task is None:
            return self
        asked = copy.copy(self)
        asked.settings, asked.question = self.settings.asking(task)
        asked.computers = None if self.computers is None else {}  # those of this run evaluate its own task
        return asked

    def targets(self, data: Any, batch_size: int | None = None) -> Rows:
        """Return the targets in a user's data, as the task of the settings evaluates them; see :meth:`rows`."""
        rows, task = self.rows(data, "the targets", batch_size), self.settings.task
        if not self.question or not isinstance(task, QuestionsModelOutput):
            return rows
        asked = task.ask(self.question, rows)
        asked.what = rows.what
        return asked

    @property
    def target_task(self) -> AbstractModelOutput:
        """The task that defines f of targets that are no question of their own."""
        task = self.settings.task
        return (
            task.questions[self.question]
            if isinstance(task, QuestionsModelOutput) and self.question
            else task
        )

    def target_identity(self, targets: Rows) -> dict[str, Any]:
        """Return JSON values that identify targets, and their task if it is not that of the train rows."""
        return {**targets.identity(), **self.asked_task()}

    def asked_task(self) -> dict[str, Any]:
        """Return ``{"task": description}`` if the task of targets is not that of the train rows, else ``{}``."""
        return {"task": describe_task(self.target_task)} if self.question else {}

    def joined(self, call: str) -> AbstractContextManager[Ranks]:
        """Return the context of a call of all ranks. With a store in memory, each rank works alone."""
        path = self.workspace.path
        return joined_ranks(f"{call} ({path})", distributed=False if path is None else self.distributed)

    @contextmanager
    def session(
        self,
        dataset: Mapping[str, Any] | None = None,
        *,
        ranks: Ranks | None = None,
        appended_to: FirstRows | None = None,
        train: Rows | HeldRows | None = None,
    ) -> Iterator[FeaturizingSession]:
        """Open the store for writing and borrow the model, inside the block.

        Args:
            dataset: JSON values that identify the train data; ``None`` uses those of the store.
            ranks: The ranks that make the same call.
            appended_to: See :meth:`~trak_lite.run.workspace.Workspace.open`.
            train: The train rows or a few of them, if available. For every loaded checkpoint, a few stored rows are
                computed again and compared.

        Raises:
            ManifestMismatchError: If the store was made with other settings; names every difference.
            ShortageError: If the machine runs out of memory or threads.
            WorkerLostError: If a process that loads samples was lost.
        """
        manifest = self.settings.manifest(dataset)
        try:
            with (
                self.workspace.opened(manifest, appended_to=appended_to),
                borrow_model(self.model, self.settings.device) as own,
            ):
                yield FeaturizingSession(self, own=own, ranks=ranks or Ranks(), train=train)
        except (MemoryError, OSError, RuntimeError) as error:
            refuse_machine_failure(error)
            raise


@dataclass(slots=True)
class TargetSet:
    """A target set that is being featurized."""

    rows: Rows
    name: str
    method: AbstractMethod
    """The method of the scores. It determines which features are needed."""
    identity: Mapping[str, Any]
    """JSON values that identify the targets."""
    is_compared: bool = False
    """Whether stored rows were computed again and compared."""


@final
class FeaturizingSession:
    """Computes the missing rows and fits of an open store, with a borrowed model."""

    def __init__(
        self,
        run: Run,
        *,
        own: Mapping[str, Tensor],
        ranks: Ranks,
        train: Rows | HeldRows | None,
    ) -> None:
        """Store the arguments; ``own`` are the model's original weights. Call :meth:`Run.session` instead."""
        self._run = run
        self.model, self._settings, self._workspace = run.model, run.settings, run.workspace
        self._progress = run.progress
        self._train = train
        self._own = own
        self._ranks = ranks
        ranks.lockstep = Lockstep.of(run.model)
        self._unfinished: list[tuple[Checkpoint, str]] = []
        self._is_first, self._is_announced = True, False
        self._computer: AbstractGradientComputer | None = None
        """Of the loaded checkpoint. Its plans and self-checks hold for train rows and targets alike."""
        self._loaded: Checkpoint | None = None
        self._digest = ""
        self._adam: AdamStates | None = None

    @property
    def store(self) -> AbstractFeatureStore:
        """The open store.

        Raises:
            StateError: If the store does not exist yet.
        """
        return self._workspace.store()

    def agreed(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on all ranks of a sharded model, which must take the same branch."""
        return self._ranks.lockstep.all(flag)

    def featurize(self, checkpoint: Checkpoint, rows: Rows, *, wait: bool) -> int:
        """Load a checkpoint and featurize its missing train rows; return the number of rows this process wrote.

        Without ``wait``, or if earlier checkpoints are unfinished, chunks that other processes hold are left to
        :meth:`finish`.
        """
        digest = self.load(checkpoint)
        # Compare the first checkpoint on all ranks before writing, so that no rank writes rows of another model.
        what = f"checkpoint {checkpoint.name!r} (digest of its weights)"
        self._ranks.agree(what, digest, wait=self._is_first)
        self._is_first = False
        self._refuse_replaced(checkpoint, digest)
        return self._featurize_train(checkpoint, digest, rows, wait=wait)

    def _refuse_replaced(self, checkpoint: Checkpoint, digest: str) -> None:
        """Raise if the store has other weights of the same file, or of the model itself: scores would mix both.

        If this attributor featurized them, or the training is resumed, the model is being trained: it only warns.
        State dicts are exempt, because they are named by their position only.
        """
        own = self._run.featurized
        own.add(digest)
        if not self._workspace.exists or (checkpoint.source is None and checkpoint.load is not None):
            return
        known = checkpoint_tables(self.store)
        same = {"name": checkpoint.name, "source": checkpoint.source}
        others = {
            known[other]: other in own
            for other in known
            if same.items() <= {"source": None, **self.store.attributes(known[other])}.items()
        }
        if digest in known or not others:
            return
        first = next(iter(others))
        message = (
            f"The store has other weights of {checkpoint.source or 'the model itself'} already ({', '.join(others)}, "
            f"featurized as {checkpoint.name!r}), and scores are made with all checkpoints in it. For a retrained "
            f"model use another path, or remove the old weights: drop_checkpoint({first!r}). To keep both as "
            "checkpoints of one run, pass the weights: featurize(data, model.state_dict())."
        )
        if not all(others.values()) and not self._run.is_resumed:
            raise ManifestMismatchError(message)
        warnings.warn(message, UserWarning, stacklevel=4)

    def _featurize_train(self, checkpoint: Checkpoint, digest: str, rows: Rows, *, wait: bool) -> int:
        """Featurize the train rows of the loaded checkpoint, and fit its kernel; see :meth:`featurize`."""
        # Do not wait here while earlier checkpoints are unfinished: their rows may become free. The ranks of a
        # sharded model work in lockstep on the same rows, so they always wait.
        wait = (wait and not self._unfinished) or not self._ranks.lockstep.is_alone
        method = self._settings.method
        if isinstance(method, Fisher):
            known = self._workspace.exists and digest in checkpoint_tables(self.store)
            fitted = known and self._is_fitted(digest, method)
            if known and not fitted:
                require_writable(self.store)
            if not fitted and not self._is_announced:
                self._announce_fit(rows)
        written = self._featurize_loaded(checkpoint, digest, rows, wait=wait)
        if isinstance(method, Fisher):
            self._fit_fisher(digest, checkpoint.name, rows, method, wait=wait)
        if not self._is_featurized(digest):
            self._unfinished.append((checkpoint, digest))
        return written

    def trial(
        self, checkpoint: Checkpoint, rows: Rows, plan: Iterable[NDArray[np.int64]], *, of_fit: bool
    ) -> Iterator[None]:
        """Compute batches as :meth:`featurize` does in a run of all rows, and write them; yield after each.

        Args:
            checkpoint: The weights.
            rows: The train rows.
            plan: The rows of each batch; with ``of_fit`` the samples of the fit of Fisher.
            of_fit: Compute gradients for the fit of Fisher instead of rows.
        """
        digest, settings = self.load(checkpoint), self._settings
        adam = self._adam_states(settings.normalization)
        spec = settings.train_table(len(rows), settings.row_fingerprint(0, digest, adam))
        passes = self._pass(rows, 0, with_norms=any(c.name == GRADIENT_NORM for c in spec.columns))
        if of_fit and isinstance(settings.method, Fisher):
            computer, fits = (
                settings.fisher_computer(),
                FisherFits(self._workspace.created(), settings.method),
            )
            computer.load_model_params(self.model)
            samples = fits.samples(
                rows, settings.task, computer, settings.layout, settings.projector.proj_dim
            )
            spec = feature_table_spec(len(samples), settings.layout.width, "float32", {})
            passes = replace(passes, rows=samples, computer_for=lambda *_: computer)
        table = self._workspace.lazy_table("trial", spec)
        stream = passes.stream(plan, lambda: spec.num_rows)
        for wanted, copied in one_behind((wanted, HostRows(found, spec)) for wanted, found in stream):
            copied.put(table, wanted, rows.what)
            yield

    def _announce_fit(self, rows: Rows) -> None:
        """Say once what the fit of the method costs, before the rows: it may take longer than they do."""
        number, self._is_announced = self._settings.num_fit_rows(len(rows)), True
        announce(
            f"{len(rows):,} rows per checkpoint, and then the fit of {self._settings.method.name}: {number:,} "
            f"gradients, {number / len(rows):.1f} times as many as rows.",
            self._progress,
        )

    def finish(self, rows: Rows) -> int:
        """Wait for the rows that other processes held during :meth:`featurize`, and compute those they abandoned.

        Weights are loaded again only for rows that no process holds.

        Returns:
            Number of rows that this process wrote.
        """
        written, patience = 0, Patience()
        while self._unfinished:
            unfinished, self._unfinished = self._unfinished, []
            for checkpoint, digest in unfinished:
                if self._is_left_alone(digest):
                    # No ranks.agree here: the ranks take over different checkpoints in different orders.
                    written += self._featurize_train(checkpoint, self.load(checkpoint), rows, wait=False)
                    patience.reset()
                elif not self._is_featurized(digest):
                    self._unfinished.append((checkpoint, digest))
            if self._unfinished:
                self._ranks.watch()
                patience.wait(f"for rows of {len(self._unfinished)} checkpoints", self._holders)
        return written

    def _holders(self) -> str:
        """Return the holder of rows of the first unfinished checkpoint."""
        path = self._path(self._unfinished[0][1])
        return (
            holder_of(self.store.open_table(path)) or f"another process works on the curvature fit of {path}."
        )

    def _is_featurized(self, digest: str) -> bool:
        """Return whether all rows of a checkpoint, and its Fisher fit if needed, are complete."""
        table = self.store.open_table(self._path(digest))
        method = self._settings.method
        return table.complete and (not isinstance(method, Fisher) or self._is_fitted(digest, method))

    def _is_left_alone(self, digest: str) -> bool:
        """Return whether a checkpoint has unfinished work that no process holds."""
        path = self._path(digest)
        if has_free_rows(self.store.open_table(path)):
            return True
        method = self._settings.method
        if not isinstance(method, Fisher):
            return False
        return FisherFits(self.store, method).is_left_alone(path, self._settings.layout)

    def _path(self, digest: str) -> str:
        """Return the table of a checkpoint that is being featurized."""
        path = checkpoint_tables(self.store).get(digest)
        if path is None:
            raise StateError(
                f"The checkpoint with weights {digest[:12]} is not in the store any more: another process has dropped "
                "it while its rows were featurized. Call featurize(...) again."
            )
        return path

    def target_set(self, rows: Rows, name: str, method: AbstractMethod) -> TargetSet:
        """Return a target set. If the method uses a curvature fit, its identity includes the fit."""
        identity = self._run.target_identity(rows)
        if isinstance(method, AbstractInverseMethod):
            identity["curvature"] = self._kronecker_fits(method).record()
        return TargetSet(rows, name, method, identity)

    def add_targets(self, targets: TargetSet, checkpoint: Checkpoint) -> str:
        """Load a checkpoint and compute its missing target features; return the digest of its weights.

        Raises:
            StateError: If the checkpoint's train rows are not featurized.
        """
        digest = self.load(checkpoint)
        train = complete_tables(self.store, [digest])
        self._check_train(train[digest])
        self._fill_targets(targets, train, digest, checkpoint.name)
        return digest

    def find_targets(self, targets: TargetSet, train: Mapping[str, AbstractRowTable]) -> None:
        """Compute the missing target features of all checkpoints, from any known source of their weights.

        Raises:
            StateError: If the weights of a checkpoint cannot be found.
        """
        waiting = {
            digest: table
            for digest, table in train.items()
            if not self.agreed(self._has_targets(targets, table))
        }
        self.visit_named(waiting, partial(self._fill_targets, targets, train), purpose="to score new targets")

    def compare_targets(self, targets: TargetSet, train: Mapping[str, AbstractRowTable]) -> None:
        """Compute a few stored targets again, with the first checkpoint whose weights are available, and compare.

        This detects changes of the targets or the model. It does nothing if stored targets were already compared, or
        if no weights are available.

        Raises:
            ManifestMismatchError: If they differ from the stored ones.
        """
        if targets.is_compared or isinstance(targets.method, CG | LiSSA):  # see _fill_targets
            return
        there = {digest for digest, table in train.items() if self.agreed(self._has_targets(targets, table))}
        if not there:
            return
        try:
            for checkpoint in self._candidates(there):
                digest = self.load(checkpoint)
                if digest in there:
                    self._check_train(train[digest])
                    self._fill_targets(targets, train, digest, checkpoint.name)
                    return
        except CheckpointError as error:  # a missing file, needed for this comparison only
            logger.info("Stored targets are not compared: %s", error)

    def _fill_targets(
        self, targets: TargetSet, train: Mapping[str, AbstractRowTable], digest: str, label: str
    ) -> None:
        """Compute the missing target features of the loaded checkpoint, and compare a few of the stored ones.

        Stored ones are not compared if the curvature that they were multiplied by is no longer stored, because another
        fit has replaced it; nor those of an iterative solver, which agree to its tolerance only and cost passes over
        the train rows.
        """
        targets.is_compared = True
        model_id = int(train[digest].spec.fingerprint["model_id"])
        method, identity = targets.method, dict(targets.identity)
        if (
            isinstance(method, AbstractInverseMethod)
            and self._has_targets(targets, train[digest])
            and (isinstance(method, CG | LiSSA) or not self._kronecker_fits(method).has(digest))
        ):
            return
        settings = self._settings
        normalization = settings.normalization.of_targets()
        adam = self._adam_states(normalization)
        spec = settings.target_table(
            len(targets.rows),
            {**settings.row_fingerprint(model_id, digest, adam), "targets": identity},
            preconditioned=isinstance(method, AbstractInverseMethod),
        )
        table = self._workspace.lazy_table(target_table_path(targets.name, method, train[digest]), spec)
        projector = settings.projector
        if isinstance(method, AbstractInverseMethod):
            inverse: Preconditioner | InverseCurvature
            if isinstance(method, EKFAC):
                inverse = self._preconditioner(digest, label, method)
            else:
                rows = self.train_rows(f"{method.name} has to be fitted to")
                inverse = self._inverse(digest, label, method, rows)
            projector = PreconditionedProjector(projector, inverse)
        passes = self._pass(targets.rows, model_id, projector=projector, normalization=normalization)
        work = RowWork(table, passes, f"Targets {targets.name!r}, {label}")
        featurize_rows(work, progress=self._progress, ranks=self._ranks)

    def _has_targets(self, targets: TargetSet, train: AbstractRowTable) -> bool:
        """Return whether all target features of the checkpoint of this train table are stored."""
        path = target_table_path(targets.name, targets.method, train)
        table = self._workspace.table(path)
        if table is None:
            return False
        compare_fingerprints(
            {"targets": dict(table.spec.fingerprint["targets"])},
            {"targets": dict(targets.identity)},
            where=path,
            remedy="Score other targets under another name.",
        )
        return table.complete

    def fit(self, method: AbstractMethod, train: Mapping[str, AbstractRowTable]) -> None:
        """Fit the method's kernel for each of these checkpoints, if the method needs a fit before scoring.

        The curvature of :class:`~trak_lite.methods.EKFAC` is fitted when targets are featurized instead.

        Raises:
            StateError: If a fit is missing, and the train data or the weights of a checkpoint are not known.
            ReadOnlyStoreError: If the store cannot be written.
        """
        if not isinstance(method, Fisher):
            return
        fits, layout = FisherFits(self.store, method), self._settings.layout
        waiting = {
            digest: table
            for digest, table in train.items()
            if not self.agreed(fits.has(table_path(table), layout))
        }
        if not waiting:
            return
        rows = self.train_rows(f"{method.name} has to be fitted to")
        self.visit_named(
            waiting,
            lambda digest, label: self._fit_fisher(digest, label, rows, method),
            purpose="to fit the Fisher information",
        )

    def train_rows(self, need: str) -> Rows:
        """Return the train data of the last ``featurize``; ``need`` begins the message without them.

        Raises:
            StateError: If they are not known.
            ManifestMismatchError: If they are not those of the store.
        """
        rows = self._run.train
        if rows is None:
            raise StateError(
                f"{need} the train data, which are not known here. Call featurize(train_data, ...) first: it finds the "
                "rows that are stored, and computes none of them again. Then make the same call."
            )
        stored = self.store.manifest.fingerprint.get("dataset", {})
        compare_fingerprints(
            {"dataset": stored},
            {"dataset": rows.identity()},
            where=str(self._workspace.path),
            remedy=f"{need} the train data of the store. Call featurize(train_data, ...) with them first.",
        )
        return rows

    def _is_fitted(self, digest: str, method: Fisher) -> bool:
        return FisherFits(self.store, method).has(self._path(digest), self._settings.layout)

    def _fit_fisher(self, digest: str, label: str, rows: Rows, method: Fisher, *, wait: bool = True) -> None:
        """Fit the Fisher information of the loaded checkpoint, if it is not stored yet."""
        fits, settings = FisherFits(self.store, method), self._settings
        if self.agreed(self._is_fitted(digest, method)):
            fits.sweep(self._path(digest), settings.layout)
            return
        if not settings.computer_is_chosen:
            numbers, batch = next(rows.moved(np.arange(min(rows.batch_size, len(rows))), settings.device))
            self._computers(rows.what)(batch, numbers)
        computer = settings.fisher_computer()
        computer.load_model_params(self.model)
        fits.fit(
            checkpoint_tables(self.store)[digest],
            self._pass(rows, self._workspace.model_id(digest)),
            rows,
            settings.task,
            computer,
            settings.layout,
            lazy_table=self._workspace.lazy_table,
            label=f"Fitting the Fisher information of {label}",
            progress=self._progress,
            ranks=self._ranks,
            wait=wait,
        )

    def _preconditioner(
        self, digest: str, label: str, method: AbstractInverseMethod, rows: Rows | None = None
    ) -> Preconditioner:
        """Return the inverse of a method's EK-FAC at the loaded checkpoint; fit it if it is not stored yet.

        ``rows`` are the train rows; ``None`` uses those of the last ``featurize``.
        """
        fits, device = self._kronecker_fits(method), self._settings.device
        if not fits.has(digest):
            refuse_sharded(
                self.model, f"method={method.name!r}", "Use method='Fisher', or score with a whole model"
            )
            rows = self.train_rows(f"{method.name} has to be fitted to") if rows is None else rows
            fits.fit(digest, rows, device, label=f"Fitting the curvature of {label}", progress=self._progress)
        absolute = isinstance(method, CG | LiSSA) and method.absolute
        return Preconditioner(fits.curvature(digest, device), damping=method.damping, absolute=absolute)

    def _kronecker_fits(self, method: AbstractInverseMethod) -> KroneckerFits:
        settings = self._settings
        fitted = method.ekfac.fitted_to(settings.task)
        return KroneckerFits(self.store, self.model, list(settings.parameters), fitted, settings.task)

    def _inverse(
        self, digest: str, label: str, method: AbstractInverseMethod, rows: Rows
    ) -> InverseCurvature:
        settings = self._settings
        products = CurvatureProducts(
            self.model,
            settings.task,
            rows,
            settings.parameters,
            draws=method.draws if isinstance(method, CG | LiSSA) else None,
            seed=method.ekfac.seed,
            device=settings.device,
        )
        return InverseCurvature(method, self._preconditioner(digest, label, method, rows), products, label)

    def _candidates(self, needed: Iterable[str]) -> Iterator[Checkpoint]:
        """Yield checkpoints that may have the needed weights: from featurize, from disk, then the model's own."""
        for source in self._run.sources:
            yield from iterate_checkpoints(*source)
        tables = checkpoint_tables(self.store)
        for digest in sorted(needed):
            noted = noted_checkpoint(self.store.attributes(tables[digest]).get("source"))
            if noted is not None:
                yield noted
        yield from iterate_checkpoints(None)

    def visit(
        self, train: Mapping[str, AbstractRowTable], visit: Callable[[str], None], *, purpose: str
    ) -> None:
        """Call ``visit`` with the digest of each checkpoint only; otherwise as :meth:`visit_named`."""
        self.visit_named(train, lambda digest, _: visit(digest), purpose=purpose)

    def visit_named(
        self, train: Mapping[str, AbstractRowTable], visit: Callable[[str, str], None], *, purpose: str
    ) -> None:
        """Load checkpoints of the store one by one and call ``visit`` with the digest and the name of each.

        Args:
            train: Tables of the train rows by the digest of the checkpoint's weights.
            visit: Called while the checkpoint is loaded.
            purpose: What the weights are needed for, for the message.

        Raises:
            StateError: If the weights of a checkpoint cannot be found; the message contains ``purpose``.
        """
        waiting = set(train)

        def needed() -> Iterator[Checkpoint]:
            for checkpoint in self._candidates(set(waiting)):
                if not waiting:
                    return
                if self.load(checkpoint) in waiting:
                    yield checkpoint

        with Stages.of(len(waiting)) as stages:
            for checkpoint in stages.each(needed()):
                digest = self._digest
                self._check_train(train[digest])
                visit(digest, checkpoint.name)
                waiting.remove(digest)
        if waiting:
            paths = checkpoint_tables(self.store)
            lacking = {
                path: self.store.attributes(path).get("name")
                for path in sorted(paths[digest] for digest in waiting)
            }
            named = some_of(f"{path} (featurized as {name!r})" for path, name in lacking.items())
            raise StateError(
                f"The store has {len(paths)} checkpoints, and the weights of {named} are needed {purpose}, but none of "
                "the known sources has them. Pass the checkpoints to use to this call, checkpoints=..., or all of them "
                "to featurize. If these are of another training, remove them from the store, "
                f"drop_checkpoint({next(iter(lacking))!r}), or use another path."
            )

    def gradient_pass(self, rows: Rows, *, normalization: Normalization | None = None) -> GradientPass:
        """Return the gradients of some data at the loaded checkpoint, of which nothing is stored."""
        return GradientPass(self._pass(rows, 0, normalization=normalization), self._settings.parameters)

    def solved(
        self, gradients: Tensor, method: AbstractMethod, digest: str, label: str, rows: Rows
    ) -> Solution:
        """Return unprojected target gradients ``(m, P)`` multiplied by the method's inverse curvature, if it has one.

        The curvature is that of the loaded checkpoint on the train rows; it is fitted and stored if it is not there
        yet, which creates the store if needed.
        """
        if not isinstance(method, AbstractInverseMethod):
            return Solution(gradients, None)
        self._workspace.created()
        return self._inverse(digest, label, method, rows).solve(gradients)

    def features(self, batch: Batch, rows: NDArray[np.int64], *, model_id: int, what: str) -> Tensor:
        """Return the features ``(B, K)`` of a batch from the loaded checkpoint, without storing them.

        The rows ``(B,)`` of the samples in the dataset ``what`` are for messages.
        """
        moved = move_batch(batch, self._settings.device)
        computer = self._computers(what)(moved, rows)
        projector = self._settings.projector
        try:
            return compute_features(computer, projector, moved, model_id=model_id, rows=rows, what=what)[0]
        finally:
            computer.confirm(complete=False)  # one batch is no run: the next ones are compared on schedule

    def _check_train(self, table: AbstractRowTable) -> None:
        """Compute a few train rows of the loaded checkpoint again and compare, if the train data are available.

        Raises:
            ManifestMismatchError: If they differ from the stored ones.
        """
        if self._train is None:
            return
        if len(self._train) != table.spec.num_rows:  # another process has appended rows
            return
        model_id, known = int(table.spec.fingerprint["model_id"]), LazyTable(table.spec, table, lambda: table)
        passes = self._pass(self._train, model_id, with_norms=known.has_column(GRADIENT_NORM))
        RowWork(known, passes, table_path(table)).check(
            self._ranks, self._train.held if isinstance(self._train, HeldRows) else None
        )

    def load(self, checkpoint: Checkpoint) -> str:
        """Load a checkpoint, let the task prepare for it, and return the digest of its weights."""
        load_into(self.model, checkpoint, self._own)
        self._loaded, self._adam = checkpoint, None
        self._settings.task.prepare(self.model)
        self._digest = weights_digest(self.model)
        self._computer = (self._run.computers or {}).get(self._digest)
        return self._digest

    def _adam_states(self, normalization: Normalization) -> AdamStates | None:
        """Return the states of Adam that were saved with the loaded checkpoint, if the normalisation needs them."""
        if not normalization.reads_optimizer or self._loaded is None:
            return None
        if self._adam is None:
            settings = self._settings
            self._adam = adam_states(self.model, settings.parameters, self._loaded, settings.device)
        return self._adam

    def _featurize_loaded(self, checkpoint: Checkpoint, digest: str, rows: Rows, *, wait: bool) -> int:
        """Featurize the train rows of the loaded checkpoint; return the number of rows this process wrote."""
        model_id = self._workspace.model_id(digest)
        adam = self._adam_states(self._settings.normalization)
        table = self._workspace.lazy_table(
            checkpoint_path(model_id),
            self._settings.train_table(len(rows), self._settings.row_fingerprint(model_id, digest, adam)),
            {"name": checkpoint.name, "source": checkpoint.source},
        )
        try:
            passes = self._pass(rows, model_id, with_norms=table.has_column(GRADIENT_NORM))
            work = RowWork(table, passes, f"Featurizing {checkpoint.name}")
            return featurize_rows(work, progress=self._progress, ranks=self._ranks, wait=wait)
        except ManifestMismatchError:
            if self._workspace.model_id(digest) == model_id:
                raise
        # Another process has just used this model_id for another checkpoint. Retry with a new model_id, because the
        # projection depends on it.
        return self._featurize_loaded(checkpoint, digest, rows, wait=wait)

    def _pass(
        self,
        rows: SampleRows,
        model_id: int,
        *,
        projector: AbstractProjector | None = None,
        normalization: Normalization | None = None,
        with_norms: bool = False,
    ) -> RowPass:
        """Return a pass of the loaded checkpoint over some rows, by default computed as train rows are."""
        settings = self._settings
        normalization = settings.normalization if normalization is None else normalization
        return RowPass(
            rows,
            self._computers(rows.what),
            settings.projector if projector is None else projector,
            model_id=model_id,
            device=settings.device,
            normalization=normalization,
            adam=self._adam_states(normalization),
            with_norms=with_norms,
        )

    def _computers(self, what: str) -> Callable[[Batch, NDArray[np.int64]], AbstractGradientComputer]:
        """Return a function that returns the gradient computer of the loaded checkpoint.

        The first batch may decide ``"auto"``.
        """
        settings = self._settings

        def computer_for(batch: Batch, wanted: NDArray[np.int64]) -> AbstractGradientComputer:
            if self._computer is None and not settings.computer_is_chosen:
                with naming_rows(self.model, settings.task, batch, wanted, what):
                    self._computer = settings.choose_computer(batch)
            elif self._computer is None:
                self._computer = settings.computer()
                self._computer.load_model_params(self.model)
            if self._run.computers is not None:
                self._run.computers[self._digest] = self._computer
            return self._computer

        return computer_for


def marking_last(checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Checkpoint, bool]]:
    """Yield ``(checkpoint, whether it is the last one)``."""
    following = iter(checkpoints)
    checkpoint = next(following, None)
    while checkpoint is not None:
        later = next(following, None)
        yield checkpoint, later is None
        checkpoint = later


def stored_norms(store: AbstractFeatureStore) -> NDArray[np.float32]:
    """Return the stored gradient norms of all checkpoints, ``(C, N)``.

    Raises:
        StateError: If rows are pending, or the store was made without norms.
    """
    norms = []
    for table in complete_tables(store, None).values():
        if GRADIENT_NORM not in [column.name for column in table.spec.columns]:
            raise StateError(
                f"{table_path(table)} has no gradient norms: it was featurized with "
                "store_norms=False. Featurize into another path with store_norms=True."
            )
        norms.append(table.read(GRADIENT_NORM))
    return np.stack(norms)
