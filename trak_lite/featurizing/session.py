"""Sessions, in which one call loads checkpoints into a borrowed model and makes passes over train rows and targets."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from trak_lite.core.devices import without_autocast
from trak_lite.core.normalization import Normalization
from trak_lite.core.progress import Stages
from trak_lite.core.ranks import Ranks, joined_ranks
from trak_lite.core.validate import positive_int, some_of
from trak_lite.data.batches import default_batch_size, move_batch
from trak_lite.data.datasets import HeldRows, RowNumbers, Rows, rows_of
from trak_lite.data.loading import Collate
from trak_lite.errors import (
    CheckpointError,
    ManifestMismatchError,
    StateError,
    refuse_machine_failure,
)
from trak_lite.featurizing.passes import RowPass, compute_features
from trak_lite.featurizing.row_checks import LostModules, SampleRows, naming_rows
from trak_lite.featurizing.rows import RowWork
from trak_lite.featurizing.settings import AttributorSettings, Task
from trak_lite.featurizing.stored_settings import refuse_other_settings
from trak_lite.gradient_computers import GRADIENT_COMPUTERS, AbstractGradientComputer
from trak_lite.gradient_computers.randomness import refusing_changes
from trak_lite.gradient_computers.streaming import AbstractStreamingComputer
from trak_lite.modelout_functions import AbstractModelOutput, QuestionsModelOutput
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.models._adapters import parameter_versions
from trak_lite.models.borrowing import BorrowedModel, borrow_model, turn_of_thread
from trak_lite.models.checkpoints import (
    Checkpoint,
    CheckpointSource,
    iterate_checkpoints,
    noted_checkpoint,
    weights_digest,
)
from trak_lite.models.loading import shares_memory
from trak_lite.models.optimizers import AdamStates, adam_states
from trak_lite.models.sharded import lockstep_of
from trak_lite.projectors import AbstractProjector
from trak_lite.run.tables import (
    GRADIENT_NORM,
    checkpoint_ids,
    model_id_of,
    table_path,
)
from trak_lite.run.workspace import FirstRows, Workspace
from trak_lite.store import AbstractFeatureStore, AbstractRowTable
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.store.sharing import LazyTable
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

TrainTables: TypeAlias = Mapping[str, AbstractRowTable]
"""Tables of the train rows by the digest of the checkpoint's weights."""
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
    collate: Collate | None
    batch_size: int | None
    progress: bool | None
    distributed: bool | None
    sources: list[KnownSource] = field(default_factory=list)
    """Featurized checkpoints. Weights are searched here first, then at the sources recorded in the store."""
    featurized: set[str] = field(default_factory=set)
    """Digests of the weights that ``featurize`` has loaded."""
    last: Sequence[str] = ()
    """Those of its last call, in order."""
    is_resumed: bool = False
    """Whether the model is in a resumed training, which may replace files that it saved before."""
    train: Rows | None = None
    """The train data of the last ``featurize``, for methods that are fitted to them."""
    question: str = ""
    """Name of the question that all targets ask; empty if their task is that of the train rows."""
    computers: dict[str, AbstractGradientComputer] | None = None
    """Gradient computers by the digest of the weights that their plans and self-checks hold for, to be used again by
    later sessions; ``None`` makes a computer for every session and checkpoint."""
    capturing: tuple[AbstractGradientComputer | None, int] = (None, 0)
    """The gradient computer of captures, and how many batches it had."""

    def rows(self, data: Any, what: str, batch_size: int | None = None) -> Rows:
        """Return the rows of a user's data; ``what`` is their name in messages, ``batch_size`` replaces their own."""
        rows = rows_of(data, what=what, batch_size=self.batch_size, collate=self.collate)
        if batch_size is not None:
            rows.batch_size = positive_int(batch_size=batch_size)
        elif not rows.has_batch_size:
            rows.batch_size = default_batch_size(self.model, len(rows))
        return rows

    def asking(self, task: Task | None) -> Run:
        """Return this run with another task for targets; ``None`` returns this run."""
        if task is None:
            return self
        asked = copy.copy(self)
        asked.settings, asked.question = self.settings.asking(task)
        asked.computers = None if self.computers is None else {}  # those of this run evaluate its own task
        return asked

    def targets(self, data: Any, batch_size: int | None = None) -> Rows:
        """Return the targets in a user's data, as the task of the settings evaluates them; see :meth:`rows`."""
        task = self.settings.task
        if isinstance(task, QuestionsModelOutput):
            task.know_model(self.model)  # attributors of other models may have the same questions
        rows = self.rows(data, "the targets", batch_size)
        if not self.question or not isinstance(task, QuestionsModelOutput):
            return rows
        asked = task.ask(self.question, rows)
        asked.what, asked.batch_size, asked.has_batch_size = rows.what, rows.batch_size, rows.has_batch_size
        return asked

    @property
    def target_task(self) -> AbstractModelOutput:
        """The task that defines f of targets that are no question of their own."""
        task = self.settings.task
        if self.question and isinstance(task, QuestionsModelOutput):
            return task.questions[self.question]
        return task

    def target_identity(self, targets: Rows) -> dict[str, Any]:
        """Return JSON values that identify targets, and their task if it is not that of the train rows."""
        return {**targets.identity(), **self.asked_task()}

    def asked_task(self) -> dict[str, Any]:
        """Return ``{"task": description}`` if the task of targets is not that of the train rows, else ``{}``."""
        return {"task": describe_task(self.target_task, self.model)} if self.question else {}

    def computer_for(self, batch: Batch, rows: RowNumbers, what: str) -> AbstractGradientComputer:
        """Return a gradient computer with the model's present weights. The first batch of all may decide ``"auto"``."""
        settings = self.settings
        if not settings.computer_is_chosen:
            with naming_rows(self.model, settings.task, batch, rows, what), refusing_changes(self.model):
                return settings.choose_computer(batch)
        computer = settings.computer()
        computer.load_model_params(self.model)
        return computer

    def joined(self, call: str) -> AbstractContextManager[Ranks]:
        """Return the context of a call of all ranks; with a store in memory, of each rank alone."""
        place = self.workspace.place
        return joined_ranks(f"{call} ({place})", distributed=False if place is None else self.distributed)

    @contextmanager
    def session(
        self,
        dataset: Mapping[str, Any] | None = None,
        *,
        ranks: Ranks | None = None,
        appended_to: FirstRows | None = None,
        train: Rows | HeldRows | None = None,
    ) -> Iterator[FeaturizingSession]:
        """Open the store for writing and borrow the model, inside the block; see :meth:`Workspace.open`.

        ``dataset`` are JSON values that identify the train data; ``None`` uses those of the store. With ``train``, the
        train rows or some, a few stored rows of every loaded checkpoint are computed again and compared.
        """
        manifest, ranks = self.settings.manifest(dataset), ranks or Ranks()
        refuse_other_settings(manifest.fingerprint, ranks)
        try:
            with (
                turn_of_thread(self.model),  # of which two would close each other's store
                self.workspace.opened(manifest, appended_to=appended_to),
                borrow_model(self.model, self.settings.device) as borrowed,
                without_autocast(self.settings.device),
                torch.inference_mode(False),
            ):
                if self.workspace.exists:
                    self.settings.recall_computer(self.workspace.store().manifest)
                yield FeaturizingSession(self, borrowed, ranks=ranks, train=train)
        except (MemoryError, OSError, RuntimeError) as error:
            refuse_machine_failure(error)
            raise


@final
class FeaturizingSession:
    """An open store and a borrowed model: loads checkpoints, finds those of the store, and makes passes over rows."""

    def __init__(
        self, run: Run, borrowed: BorrowedModel, *, ranks: Ranks, train: Rows | HeldRows | None
    ) -> None:
        self.run, self.model, self.settings, self.workspace = run, run.model, run.settings, run.workspace
        self.ranks = ranks
        ranks.lockstep = lockstep_of(run.model)
        self._borrowed, self._train = borrowed, train
        self._origins: dict[str, dict[str, Any]] = {}
        """Name and source of the checkpoints of the store, by weights digest."""
        self._loss = LostModules(self.settings.modules)
        self._computer: AbstractGradientComputer | None = None
        """Of the loaded checkpoint. Its plans and self-checks hold for train rows and targets alike."""
        self._loaded: Checkpoint | None = None
        self._source: Checkpoint | None = None
        self._digest, self._versions = "", dict[str, int | None]()
        self._adam: AdamStates | None = None

    @property
    def store(self) -> AbstractFeatureStore:
        """The open store."""
        return self.workspace.store()

    def agreed(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on all ranks of a sharded model, which must take the same branch."""
        return not self.ranks.lockstep.any(not flag)

    def refuse_replaced(
        self, checkpoint: Checkpoint, digest: str, known: TrainTables, *, remedy: str, warns: bool = False
    ) -> None:
        """Raise if the store has other weights of the same file, or of the model itself: scores would mix both.

        If this attributor featurized them, or the training is resumed, the model is being trained: at most warn.
        State dicts are exempt, because they are named by their position only.
        """
        featurized, source = self.run.featurized, checkpoint.source
        if digest in known or (source is None and checkpoint.load is not None):
            return
        same = {"name": checkpoint.name, "source": None} if source is None else {"source": source}
        others = {}
        for other, table in known.items():
            if other not in self._origins:
                self._origins[other] = {"source": None, **self.store.attributes(table_path(table))}
            if same.items() <= self._origins[other].items():
                others[table_path(table)] = other
        if not others:
            return
        first, other = next(iter(others.items()))
        name = self._origins[other].get("name")
        message = (
            f"The store has other weights of {source or 'the model itself'} already ({', '.join(others)}, featurized "
            f"as {name!r}), and scores are made with all checkpoints in it. For a retrained model use another path, or "
            f"remove the old weights: drop_checkpoint({first!r}). {remedy}"
        )
        if not featurized.issuperset(others.values()) and not self.run.is_resumed:
            raise ManifestMismatchError(message)
        if warns:
            warnings.warn(message, UserWarning, stacklevel=4)

    # ---------------------------------------------------------------- train rows and checkpoints

    def train_rows(self, need: str) -> Rows:
        """Return the train data of the last ``featurize``; ``need`` begins the message without them."""
        rows = self.run.train
        if rows is None:
            raise StateError(
                f"{need} the train data, which are not known here. Call featurize(train_data, ...) first: it finds the "
                "rows that are stored, and computes none of them again. Then make the same call."
            )
        stored = self.store.manifest.fingerprint.get("dataset", {})
        compare_fingerprints(
            {"dataset": stored},
            {"dataset": rows.identity()},
            where=self.workspace.name,
            remedy=f"{need} the train data of the store. Call featurize(train_data, ...) with them first.",
        )
        return rows

    def loaded(self, train: TrainTables, unread: list[Exception]) -> Iterator[tuple[Checkpoint, str]]:
        """Load checkpoints that may have the weights of some train tables; yield each with the digest of its weights.

        They are those of featurize, then those noted in the store, then the model's own weights. Those that cannot be
        read, such as files that were removed since, are left out; ``unread`` receives their errors.
        """

        def candidates() -> Iterator[Checkpoint]:
            for source in self.run.sources:
                yield from iterate_checkpoints(*source, lacking=unread)
            for digest in sorted(train):
                noted = noted_checkpoint(self.store.attributes(table_path(train[digest])).get("source"))
                if noted is not None:
                    yield noted
            yield from iterate_checkpoints(None)

        for checkpoint in candidates():
            try:
                digest = self.load(checkpoint)
            except (CheckpointError, FileNotFoundError) as error:  # the latter of a user's loader
                logger.info("The checkpoint %s cannot be read: %s", checkpoint.name, error)
                unread.append(error)
            else:
                yield checkpoint, digest

    def visit(
        self, train: TrainTables, visit: Callable[[str, str], None], *, purpose: str, units: int = 0
    ) -> None:
        """Load checkpoints of the store one by one and call ``visit`` with the digest and the name of each.

        Each takes so many ``units`` of progress; 0 if that is not known. The error for weights that are not found names
        the ``purpose``.
        """
        waiting, unread = set(train), list[Exception]()

        def needed() -> Iterator[Checkpoint]:
            for checkpoint, digest in self.loaded(train, unread) if waiting else ():
                if digest in waiting:
                    yield checkpoint
                if not waiting:
                    return

        with Stages.of(len(waiting), units) as stages:
            for checkpoint in stages.each(needed()):
                digest = self._digest
                self.check_train(train[digest])
                visit(digest, checkpoint.name)
                waiting.remove(digest)
        if waiting:
            paths = sorted(table_path(train[digest]) for digest in waiting)
            lacking = {path: self.store.attributes(path) for path in paths}
            named = some_of(f"{path} (featurized as {made.get('name')!r})" for path, made in lacking.items())
            moved = any(made.get("name") == "current" and not made.get("source") for made in lacking.values())
            changed = " The model had those of 'current' when it was featurized, and has others now." * moved
            cause = f" One of these cannot be read: {str(unread[0]).rstrip('.')}." if unread else ""
            raise StateError(
                f"Of the {len(checkpoint_ids(self.store))} checkpoints in the store, the weights of {named} are "
                f"needed {purpose}, but none of the known sources has them.{changed}{cause} Pass the checkpoints to "
                "use to this call, "
                "checkpoints=..., or all of them to featurize. If these are of another training, remove them from the "
                f"store, drop_checkpoint({paths[0]!r}), or use another path."
            ) from (unread[0] if unread else None)

    def load(self, checkpoint: Checkpoint) -> str:
        """Load a checkpoint, let the task prepare for it, and return the digest of its weights."""
        if self._loaded is not None:
            self._refuse_untouched(checkpoint, self._loaded)
        self._source, source = None, checkpoint  # frees what the loader returned for the last one
        if checkpoint.has_loader and checkpoint.load and self.settings.normalization.reads_optimizer:
            source = replace(checkpoint, load=cache(checkpoint.load))  # another call may train once more
        self._borrowed.load(source)
        self._loaded, self._source, self._adam = checkpoint, source, None
        self.settings.task.prepare(self.model)
        self._digest, self._versions = weights_digest(self.model), parameter_versions(self.model)
        computer, held = self._computer, self.run.computers
        is_own = type(computer) in GRADIENT_COMPUTERS.values()  # others may hold copies of the weights
        if held is None and is_own and isinstance(computer, AbstractStreamingComputer):
            computer.renew()
        else:
            self._computer = (held or {}).get(self._digest)
        return self._digest

    def _refuse_untouched(self, checkpoint: Checkpoint, last: Checkpoint) -> None:
        """Raise if an iterator yields tensors of the model, in which nothing has changed since another was loaded.

        They may be meant with the model's own values, or with those that a training would have gone on from.
        """
        is_yielded = not (checkpoint.source or checkpoint.is_held or checkpoint.has_loader)
        if not is_yielded or checkpoint.load is None or last.load is None:
            return
        is_own = shares_memory(self.model, checkpoint.load())
        is_untouched = is_own and parameter_versions(self.model) == self._versions
        if self.ranks.lockstep.any(is_untouched) and weights_digest(self.model) == self._digest:
            raise CheckpointError(
                f"Checkpoint {checkpoint.name!r} has tensors of the model, which hold the weights of checkpoint "
                f"{last.name!r}, because that was loaded before. Yield copies that were made before the call, "
                "copy.deepcopy(model.state_dict()), or None for the model's own weights."
            )

    def check_train(self, table: AbstractRowTable) -> None:
        """Compute a few train rows of the loaded checkpoint again and compare, if the train data are available."""
        # Another process may have appended rows.
        if self._train is None or len(self._train) != table.spec.num_rows:
            return
        lazy = LazyTable(table.spec, table, lambda: table)
        held = self._train.held if isinstance(self._train, HeldRows) else None
        self.work(lazy, self.row_pass(self._train, model_id_of(table)), table_path(table)).check(held)

    # ---------------------------------------------------------------- passes

    def work(self, table: LazyTable, passes: RowPass, label: str) -> RowWork:
        """Return the work to fill a table, together with the ranks of the session."""
        return RowWork(
            table,
            replace(passes, with_norms=table.has_column(GRADIENT_NORM)),
            label,
            ranks=self.ranks,
            progress=self.run.progress,
            loss=self._loss,
        )

    def row_pass(
        self,
        rows: SampleRows,
        model_id: int,
        *,
        projector: AbstractProjector | None = None,
        normalization: Normalization | None = None,
    ) -> RowPass:
        """Return a pass of the loaded checkpoint over some rows, by default computed as train rows are."""
        settings = self.settings
        normalization = settings.normalization if normalization is None else normalization
        return RowPass(
            rows,
            partial(self.computer_for, rows.what),
            settings.projector if projector is None else projector,
            model_id=model_id,
            device=settings.device,
            normalization=normalization,
            adam=self.adam_states(normalization),
        )

    def features(self, batch: Batch, rows: RowNumbers, *, model_id: int, what: str) -> Tensor:
        """Return the features ``(B, K)`` of a batch from the loaded checkpoint, without storing them.

        The rows ``(B,)`` of the samples in the dataset ``what`` are for messages.
        """
        moved = move_batch(batch, self.settings.device)
        computer = self.computer_for(what, moved, rows)
        projector = self.settings.projector
        try:
            return compute_features(computer, projector, moved, model_id=model_id, rows=rows, what=what)[0]
        finally:
            computer.confirm(complete=False)  # one batch is no run: the next ones are compared on schedule

    def adam_states(self, normalization: Normalization) -> AdamStates | None:
        """Return the states of Adam that were saved with the loaded checkpoint, if the normalisation needs them."""
        if normalization.reads_optimizer and self._source is not None:
            self._adam = adam_states(self.model, self.settings.parameters, self._source, self.settings.device)
            self._source = None
        return self._adam if normalization.reads_optimizer else None

    def computer_for(self, what: str, batch: Batch, rows: RowNumbers) -> AbstractGradientComputer:
        """Return the gradient computer of the loaded checkpoint."""
        if self._computer is None:
            self._computer = self.run.computer_for(batch, rows, what)
        if self.run.computers is not None:
            self.run.computers[self._digest] = self._computer
        return self._computer
