"""The ``Attributor`` class: featurize a train set and score targets. Its constructor defines all defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from os import PathLike
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import undisturbed
from trak_lite.core.normalization import Normalization, NormalizationKind
from trak_lite.core.notebook import notebook_table
from trak_lite.core.progress import Stages
from trak_lite.core.validate import flag, positive_int, real_at_least, require_function
from trak_lite.data.columns import columns_of
from trak_lite.data.datasets import Rows
from trak_lite.data.digests import digest
from trak_lite.errors import InvalidInputError, MissingStoreError, StateError, StoreError, printable
from trak_lite.featurizing.capture import Capture
from trak_lite.featurizing.fits import MethodFits
from trak_lite.featurizing.session import Run
from trak_lite.featurizing.settings import AttributorSettings, GradientComputerFactory, ProjectorChoice, Task
from trak_lite.featurizing.stored_settings import refuse_other_model, stored_arguments
from trak_lite.featurizing.train_work import TrainWork, marking_last
from trak_lite.methods import EKFAC, AbstractMethod, Method
from trak_lite.methods.base import MadeScores
from trak_lite.models.checkpoints import CheckpointSource, count_checkpoints, iterate_checkpoints
from trak_lite.run import tables
from trak_lite.run.columns import store_columns
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.plan import Plan
from trak_lite.scoring.planning import planned
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.stored import drop_scores, matrix_scores, scoring_session, stored_scores
from trak_lite.scoring.unprojected import (
    MAX_BYTES,
    Refine,
    refined_scores,
    scores_of_stream,
    unprojected_scored_by,
)
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store
from trak_lite.store._names import check_name
from trak_lite.store.remote.place import resolve_place
from trak_lite.types import Batch, FeatureLayout, ParameterChoice
from trak_lite.unrolled import TrainingRun, unrolled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeaturizeSummary:
    """Result of a call of :meth:`Attributor.featurize`."""

    checkpoints: tuple[str, ...]
    """Names of the checkpoints in the store, in order: those of the calls that first featurized their weights."""
    rows_written: int
    """Rows featurized by this call, over all checkpoints."""
    rows_found: int
    """Rows that were already in the store or that other processes wrote, over all checkpoints."""
    other_checkpoints: int = 0
    """Checkpoints of earlier calls in the store. Scores use these too, without ``checkpoints=``."""


class Attributor:
    """Answers "which training examples made the model say this?" for a trained model.

    Featurize the train set once per checkpoint, then score any number of target sets. Both steps resume: after a
    kill, the next call continues at the first row that is not on disk. Every call restores the model's weights,
    mode, flags and device before it returns.

    The constructor resolves every ``"auto"`` setting, logs its value, and writes it into the store.

    Source: TRAK (arXiv:2303.14186), with damping and curvature weights.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
        >>> attributor = Attributor(nn.Linear(4, 2), "image_classification", None, proj_dim=8)
        >>> attributor.featurize(data).rows_written
        20
        >>> attributor.score(data, name="itself").shape
        (20, 20)
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        path: str | PathLike[str] | RemotePlace | None,
        *,
        proj_dim: int | Literal["auto"] = "auto",
        seed: int = 0,
        device: str | torch.device = "auto",
        dtype: Literal["float32", "float16", "int8", "int4"] = "float16",
        grad_wrt: ParameterChoice | None = None,
        gradient_computer: str | GradientComputerFactory = "auto",
        float32_products: Literal["ieee", "tf32"] = "ieee",
        normalize: NormalizationKind | Normalization = "none",
        store_norms: bool = False,
        projector: ProjectorChoice = "auto",
        layout: Literal["auto", "joint", "module"] = "auto",
        method: Method = "auto",
        collate: Callable[[list[Any]], Batch] | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
        distributed: bool | None = None,
    ) -> None:
        """Check and resolve every setting. Nothing is written yet.

        Args:
            model: The trained module. It runs in eval mode and is restored after every call. Threads that use it take
                turns.
            task: Name of a model output function, a custom one, or a callable ``f(model_call, batch) -> (B,)``.
            path: Folder of the store (``runs/digits.zarr``), or its address in an object store: a URL
                (``s3://bucket/digits.zarr``), an obstore store or a :class:`~trak_lite.store.RemotePlace`. ``None``
                keeps everything in memory.
            proj_dim: K, the number of features per stored row, or per module of a row (see ``layout``). A larger K is
                more exact and costs disk and time. ``"auto"`` uses 2048, or less for models with more than 16 modules
                (at most 32,768 features per row).
            seed: Seed of the projection.
            device: ``"auto"`` uses the model's device.
            dtype: Stored dtype of the train rows' features. ``"int8"`` and ``"int4"`` take a half and a quarter of the
                disk of ``"float16"``: they store integers and one float32 scale per row (see :attr:`row_bytes`).
                Target features are then stored in float32.
            grad_wrt: Names, patterns (``"layers.*"``) or module classes of the parameters to differentiate;
                ``None`` selects all parameters that require grad; of a PEFT model that was loaded for inference, also
                those of its adapter.
            gradient_computer: ``"hook"``, ``"functional"``, ``"iterative"``, or a class or partial of one. ``"auto"``
                uses the first of these that is exact for the model on its first samples; if the store at the path
                records one, it is tried first.
            float32_products: How products of the passes of the model, of its gradients and of their projection are
                computed in float32 models. ``"ieee"`` uses full precision, whatever torch's settings are. ``"tf32"``
                lets a GPU with TF32 round the factors to 10 bits of mantissa. No effect on the CPU.
            normalize: Scaling of the gradients of train rows and targets. ``"unit"`` divides each by its norm.
                ``clip(C)`` scales gradients with a norm above C down to norm C; ``clip(C, scope="module")`` does so
                per module. ``"adam"`` scales every entry by Adam's second moment. ``"adam_update"`` makes train rows of
                Adam updates, for :class:`~trak_lite.methods.LESS`. Both read the optimizer state that was saved with
                each checkpoint. q and w are not scaled.
            store_norms: Store the norms of the unnormalised train gradients for :meth:`gradient_norms`. Takes up to
                10 % more time.
            projector: ``"auto"`` (``"countsketch"``), another name in ``trak_lite.projectors.PROJECTORS``, or an
                instance.
            layout: ``"module"`` stores K features per module. ``"joint"`` sums the features over all parameters, as
                TRAK does. ``"auto"`` is ``"module"``, except for a custom projector.
            method: Default method of :meth:`score`: a method of :mod:`trak_lite.methods` or its name. ``"auto"`` uses
                the first of these that the task supports: ``"GaussNewton"``, ``"Fisher"`` (if f is a log-likelihood,
                or a sum over tokens or labels, and K is at most 4096), ``TRAK`` with the default damping. ``"Fisher"``
                computes 4 K more gradients per checkpoint in :meth:`featurize`, at most 32 per train row.
            collate: Turns a list of samples into a batch. :class:`~trak_lite.Rows` can override it.
            batch_size: Samples per pass, unless ``Rows`` or a DataLoader sets it; ``None`` is 32, and up to 256 for
                a perceptron (linear layers and normalisations) with 4 batches or more.
            progress: Show progress bars; ``None`` shows them on a terminal, and elsewhere writes a line a minute to the
                log, or to standard error if the log does not show messages of level INFO. Ranks above 0 show none.
            distributed: Make every call a collective one of all ranks. ``None`` does so if the script was started by
                torchrun or has a ``torch.distributed`` process group. Use ``False`` for calls that only some ranks
                make.

        Raises:
            InvalidInputError: If a setting is not among the allowed ones, or a name in ``grad_wrt`` is unknown.
            UnknownTaskError: If the task is unknown.
        """
        self.model = model
        self.path = None if path is None else resolve_place(path)
        settings = AttributorSettings(
            model,
            task,
            proj_dim=proj_dim,
            seed=seed,
            device=device,
            dtype=dtype,
            grad_wrt=grad_wrt,
            gradient_computer=gradient_computer,
            float32_products=float32_products,
            normalize=normalize,
            store_norms=store_norms,
            projector=projector,
            layout=layout,
            method=method,
        )
        self._settings = settings
        self.task, self.device, self.dtype = settings.task, settings.device, settings.dtype
        self.parameters, self.projector = settings.parameters, settings.projector
        self.normalization, self.method = settings.normalization, settings.method
        self._workspace = Workspace(self.path)
        require_function(collate=collate)
        self._run = Run(
            model,
            settings,
            self._workspace,
            collate=collate,
            batch_size=None if batch_size is None else positive_int(batch_size=batch_size),
            progress=progress,
            distributed=None if distributed is None else flag(distributed=distributed),
        )

    @classmethod
    def open(
        cls,
        path: str | PathLike[str] | RemotePlace,
        model: nn.Module,
        task: Task | None = None,
        **overrides: Any,
    ) -> Self:
        """Return an attributor for an existing store, with the settings of its manifest.

        Args:
            path: Folder of the store, or its address in an object store.
            model: A module of the architecture that the store was made with.
            task: Required only if the store was made with a custom model output function.
            **overrides: Arguments of the constructor that cannot be stored (a custom projector or gradient computer,
                ``collate``, ``device``, ``progress``) or that may change (``method``). ``None`` is as leaving one out.

        Raises:
            MissingStoreError: If there is no store at the path.
            ManifestMismatchError: If the model lacks parameters.
            InvalidInputError: If the store was made with a custom object that was not passed.
        """
        location = resolve_place(path)
        with open_store(location) as store:
            manifest = store.manifest
        resolved_task, arguments = stored_arguments(manifest, task, overrides, where=str(location))
        if overrides.get("grad_wrt") is None and isinstance(model, nn.Module):
            refuse_other_model(model, arguments["grad_wrt"], where=str(location))
        return cls(model, resolved_task, location, **arguments)

    def __repr__(self) -> str:
        lines = "".join(f"\n  {name}: {text}" for name, text in self._shown().items())
        return printable(f"Attributor of {type(self.model).__name__}{lines}")

    def _repr_html_(self) -> str:
        return notebook_table(f"Attributor of {type(self.model).__name__}", settings=self._shown())

    def _shown(self) -> dict[str, str]:
        """Return the settings and the content of the store, as texts by name; an object store is not asked."""
        location = "memory" if self.path is None else str(self.path)
        if isinstance(self.path, RemotePlace):
            return {**self._settings.shown(), "store": location}
        try:
            with self._workspace.reading() as store:
                content = tables.stored_content(store)
        except (MissingStoreError, StateError):
            content = "no row yet, call featurize(data)"
        except StoreError as error:
            content = str(error)
        return {**self._settings.shown(), "store": f"{location}: {content}"}

    @property
    def layout(self) -> FeatureLayout:
        """Segments of a feature row."""
        return self._settings.layout

    @property
    def row_bytes(self) -> int:
        """Bytes on disk per train row and checkpoint: features, q, w, and the gradient norm if it is stored."""
        return self._settings.train_table(1, {}).row_bytes

    def featurize(
        self,
        data: Any,
        checkpoints: CheckpointSource = None,
        *,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        append: bool = False,
        columns: Any = None,
        batch_size: int | None = None,
    ) -> FeaturizeSummary:
        """Compute and store the features of every train row for every checkpoint.

        Rows that are already in the store are neither loaded nor computed. The exception is up to eight rows per
        checkpoint: they are computed again and compared with the stored ones, to detect changes of data, model or
        code. Checkpoints are identified by their weights, so later calls may add more.

        Any number of processes may call this at the same time with the same path. They divide the rows by chunks,
        finish the chunks of killed processes, and return when every row is stored. Under torchrun an error of one
        rank ends the others.

        Args:
            data: A map-style dataset, a DataLoader that reads one in order, or :class:`~trak_lite.Rows` of one, which
                select and order rows and set the batch size. If its rows hold several texts, pass
                :class:`~trak_lite.Documents` of it. The attributor holds it until the next call, for methods that are
                fitted to the train data.
            checkpoints: ``None`` for the model's current weights, a state dict (alone, or under ``"model"`` beside an
                ``"optimizer"``), a path to a file or folder, or an iterable of these. Using 4 to 10 checkpoints of one
                run is the cheapest way to better scores.
            checkpoint_loader: Turns an item of ``checkpoints`` of any other type into a state dict. The model has its
                own weights whenever it is called, also after it has loaded others into the model. A training that goes
                on from one checkpoint to the next is a generator.
            append: Accept data with more rows than the store. If the data begins with the stored rows, according to
                the digest or the name of ``Rows``, the remaining rows are appended. All checkpoints of the store must
                then be featurized with the longer data before the next scoring.
            columns: Values of each train row by name (its source, date, licence, weight): a mapping of names to N
                values, a pandas frame or a ``datasets.Dataset``, in the order of the rows. They are stored beside the
                rows, for filters, weights and group sums of scores (:meth:`Scores.top`, :meth:`Scores.group`). Columns
                of other names stay. After ``append=True``, all columns have to be given again.
            batch_size: Samples per pass of this call; ``None`` is that of the data or of the attributor.

        Returns:
            The numbers of rows that this call wrote, and that it found or other processes wrote.

        Raises:
            InvalidInputError: If the data, a batch, a checkpoint or a column has the wrong type, shape or length. Or if
                the model lets :class:`~trak_lite.Documents` of a packed row see each other.
            CheckpointError: If ``normalize`` needs the state of Adam, and a checkpoint has none; names the places that
                were searched.
            NonFiniteError: If a value of a row is NaN or infinite; names the rows.
            ManifestMismatchError: If the store has other settings or other data; names every difference. If recomputed
                rows differ from the stored ones; names the first row, and each quantity that differs. Or if another
                attributor has featurized other weights of the same file, or of the model itself.
            StoreError: If the store cannot be read or written.
            RankError: If another rank of a distributed run failed, or makes another call.
        """
        rows = self._run.rows(data, "the train data", batch_size)
        labelled = {} if columns is None else columns_of(columns, len(rows), "columns")
        written = 0
        once = isinstance(checkpoints, Iterator)
        grows = flag(append=append)
        appended_to = (lambda num_rows: rows.identity(num_rows=num_rows)) if grows else None
        call = f"featurize with columns {', '.join(sorted(labelled))}" if labelled else "featurize"
        with (
            self._run.joined(call) as ranks,
            self._run.session(rows.identity(), appended_to=appended_to, ranks=ranks) as session,
        ):
            if labelled and ranks.size > 1:
                ranks.agree("columns (digest of their values)", digest(labelled))
            work = TrainWork(session)
            checkpoint_iter = iterate_checkpoints(checkpoints, checkpoint_loader)
            # Wait until each checkpoint of an iterator is complete, so that finish() does not hold it in memory.
            each = zip(checkpoint_iter, repeat(True)) if once else marking_last(checkpoint_iter)
            count = count_checkpoints(checkpoints, checkpoint_loader)
            with Stages.of(count, len(rows) + self._settings.num_fit_rows(len(rows))) as stages:
                for checkpoint, wait in stages.each(each):
                    written += work.featurize(checkpoint, rows, wait=wait)
                written += work.finish(rows)
            if not work.loaded:
                raise InvalidInputError(
                    "checkpoints is empty. Pass at least one, or leave it out to use the present weights of the model."
                )
            if labelled:
                ranks.broadcast("the columns", lambda: store_columns(session.store, labelled))
            # Equal weights are one checkpoint.
            others = max(len(tables.checkpoint_ids(session.store)) - len(set(work.loaded)), 0)
        self._run.train, self._run.last = rows, work.loaded
        if not once:
            self._run.sources.append((checkpoints, checkpoint_loader))
        rows_found = len(work.names) * len(rows) - written
        logger.info(
            "Featurized %d rows and found %d stored rows, for checkpoints %s.",
            written,
            rows_found,
            work.names,
        )
        return FeaturizeSummary(tuple(work.names), written, rows_found, others)

    @contextmanager
    def capture(
        self,
        data: Any,
        name: str,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        folder: str | PathLike[str] | None = None,
        resume: bool = False,
    ) -> Iterator[Capture]:
        """Featurize the train data while a training passes over them (an epoch), as one checkpoint.

        Before each step, call what the block gets with the batch and the positions of its samples::

            with attributor.capture(train, "epoch-3", optimizer=optimizer, folder="runs/weights") as capture:
                for (x, y), rows in loader:  # of StackDataset(train, range(len(train)))
                    capture((x, y), rows)
                    loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        The row of a sample is that of :meth:`featurize` with the weights before its step. Each batch gets a pass of its
        own in eval mode, which costs as much as in ``featurize``, and the training keeps its bits. At the end rows that
        no step has visited are computed, and all become one checkpoint of the store, whose targets have the weights at
        the end. Stored rows of a capture are not compared with recomputed ones.

        Args:
            data: The train data, as in :meth:`featurize`.
            name: Name of the checkpoint.
            optimizer: Its state is saved beside the weights. ``normalize="adam"`` and ``"adam_update"`` read its state
                before each step.
            folder: Folder in which the checkpoint is saved at the end, as ``NAME.pt``. Without it, save the weights
                yourself and pass them to :meth:`score`.
            resume: Continue with the stored rows of this name, if there are some: the training goes on after a kill.
                Rows are written when 64 MiB of them are there, and by ``capture.flush()``.

        Raises:
            InvalidInputError: If the data have no fixed order, the process is one of several ranks, the model is on
                another device, the optimizer is missing or none, or the folder cannot be written.
            UnsupportedModelError: If the model is sharded.
            StateError: If rows of this name are stored, and ``resume`` is false.
            ManifestMismatchError: If the store was made with other settings or data, or at the end has other rows of
                the same weights, or the training changes what the task reads.
        """
        rows = self._run.rows(data, "the train data")
        capture = Capture(self._run, rows, name, optimizer, folder, resume=flag(resume=resume))
        try:
            yield capture
        except BaseException:
            capture.end()
            raise
        # An iterator, so that the checkpoint, whose weights change in the training, is not searched later.
        checkpoint = iter([capture.finish()])
        with undisturbed():
            self.featurize(data, checkpoint)

    def plan(
        self,
        data: Any,
        targets: Any = None,
        *,
        checkpoints: CheckpointSource = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
    ) -> Plan:
        """Measure on a few batches what :meth:`featurize` and :meth:`score` with the default method will take.

        A trial takes a few seconds. It computes rows of the first checkpoint with several batch sizes, and writes them
        to a folder beside the store, which is removed. Nothing else changes.

        Args:
            data: The train data, as in :meth:`featurize`.
            targets: The targets, as in :meth:`score`; ``None`` leaves scoring out.
            checkpoints: As in :meth:`featurize`, but no iterator: their number counts, and the first is loaded.
            checkpoint_loader: As in :meth:`featurize`.

        Returns:
            The gradient computer with its reason, features and bytes per row, time with its spread, disk and peak
            memory by step, and advice: what does not fit and which setting would, and which batch size is faster.
            Memory is that of batches of one shape, beyond what is in use before; rows of other lengths need more.

        Raises:
            InvalidInputError: If the data are invalid, or the checkpoints cannot be counted.
            CheckpointError: If a checkpoint is missing.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> _ = torch.manual_seed(0)
            >>> data = TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
            >>> plan = Attributor(nn.Linear(4, 2), "image_classification", None, proj_dim=8).plan(data, data)
            >>> plan.disk["rows"], plan.settings["gradients"]
            (3072, 'hook (every kept parameter is covered)')
        """
        count = count_checkpoints(checkpoints, checkpoint_loader)
        if not count:
            raise InvalidInputError(
                "plan counts the checkpoints, and these would have to be made for it. Pass a list, a folder, or one."
            )
        first = next(iter(iterate_checkpoints(checkpoints, checkpoint_loader)))
        asked = None if targets is None else self._run.targets(targets)
        return planned(self._run, self._run.rows(data, "the train data"), asked, first, count)

    def score(
        self,
        data: Any,
        name: str = "targets",
        *,
        method: Method | None = None,
        dense: bool = True,
        k: int | None = None,
        recall: float | None = None,
        refine: Refine | None = None,
        task: Task | None = None,
        checkpoints: CheckpointSource = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        batch_size: int | None = None,
    ) -> Scores:
        """Score every train row for every target.

        The scores are stored under ``name``: the same call again returns them, or resumes after a kill. Scores of
        other methods are stored separately. They use the same stored rows of train set and targets, without new
        gradients (except for the targets of ``EKFAC``, ``CG`` and ``LiSSA``). The first call with a method that must
        be fitted to the train data fits it.

        Args:
            data: The targets: a map-style dataset, a DataLoader that reads one in order, or :class:`~trak_lite.Rows`
                of one.
            name: Name of the target set.
            method: A method of :mod:`trak_lite.methods`, its name, or its name and fields
                (``{"name": "TracIn", "learning_rates": [0.1, 0.05]}``); ``None`` is the attributor's method.
            dense: Store the ``(N, M)`` matrix on disk. ``False`` computes scores from the stored rows on access.
            k: With ``dense=False``, find and store the k most helpful and k most harmful rows of every target.
            recall: With ``k``, let an index find these rows if it finds at least this share of them (such as 0.99) in
                expectation. The first call builds the index, which the store keeps. A call scores all rows for some
                targets of the set, and measures what the index would have found, until these suffice for a lower bound
                of the recall (95 % confidence): 0.96 takes 128 targets, 0.99 takes 512. A set without so many gets
                exact rows. ``Scores.settings`` has the recall, its bound, and the numbers of measured targets and of
                candidates.
            refine: Score the candidates of every target again by their unprojected gradients, and return these scores
                (in memory, NaN for all other rows). The scores of the stored rows find the candidates; only
                these are cached. Needs the train data: call :meth:`featurize` first.
            task: Model output function of the targets: the scores are the effect of a train row on this output of the
                model (``"answer_difference"``, an activation, a function ``f(model_call, batch)``). The train rows stay
                those of the attributor's task. ``None`` is the attributor's task. Target sets of different tasks need
                different names.
            checkpoints: The checkpoints to use. All must be featurized. ``None`` uses all checkpoints of the store.
            checkpoint_loader: As in :meth:`featurize`.
            batch_size: As in :meth:`featurize`.

        Returns:
            Scores ``(N, M)``.

        Raises:
            InvalidInputError: If a setting is unknown or does not fit the checkpoints.
            StateError: If train rows are pending, the weights of a checkpoint cannot be found, or the method has to
                be fitted and this attributor has not featurized the train data.
            ManifestMismatchError: If other targets or checkpoints were scored under this name, or recomputed rows of
                targets, or of copies of train data, differ from the stored ones because the targets or the model
                changed. Or if a file, or the model itself, has other weights than another attributor featurized.
            SingularKernelError: If the kernel is singular at the method's damping.
            RankError: If another rank of a distributed run failed, or makes another call.
        """
        chosen, run, dense, k = self._asked(
            name, method=method, dense=dense, k=k, recall=recall, refine=refine, task=task
        )
        if not chosen.multiplies_rows:
            if isinstance(checkpoints, Iterator):  # the parts of the method read them too
                checkpoints = list(checkpoints)
            more: dict[str, Any] = {"checkpoints": checkpoints, "checkpoint_loader": checkpoint_loader}
            score = partial(self.score, data, name, task=task, batch_size=batch_size, **more)
            targets = run.targets(data, batch_size)  # first: it identifies questions
            parts = _Parts(run, run.rows(data, "the targets", batch_size), name, score)
            return matrix_scores(run, targets, name, chosen, (checkpoints, checkpoint_loader), parts)
        targets = run.targets(data, batch_size)
        source = checkpoints, checkpoint_loader
        weighing = (
            [chosen] if refine is None else [chosen, unprojected_scored_by(self._settings, refine.method)]
        )
        asked = {"dense": dense, "k": k, "recall": None if recall is None else float(recall)}
        with scoring_session(run, targets, name, weighing, source, **asked) as (target_set, train, result):
            session, ranks = target_set.session, result.source.ranks
            is_there = ranks.broadcast("whether they are there", lambda: dense and result.is_finished())
            finished = session.agreed(is_there)
            if not finished:
                MethodFits(session).fit(chosen, train)
                target_set.find(train)
            target_set.compare(train)
            if dense and not finished:
                result.fill(progress=run.progress)
            ends, shown = (None, {}) if k is None else result.top_and_bottom(k, recall)
            if refine is not None and ends is not None:
                return refined_scores(session, train, targets, name, refine, ends)
            return result.scores(run, dense=dense, ends=ends, shown=shown)

    def _asked(
        self,
        name: str,
        *,
        method: Method | None,
        dense: bool,
        k: int | None,
        recall: float | None,
        refine: Refine | None = None,
        task: Task | None,
    ) -> tuple[AbstractMethod, Run, bool, int | None]:
        """Check the arguments of :meth:`score`; return its method and run, ``dense``, and the rows kept per target."""
        check_name(name, what="target set")
        chosen, run, dense = self._settings.scored_by(method), self._run.asking(task), flag(dense=dense)
        if refine is not None and not isinstance(refine, Refine):
            raise InvalidInputError(f"refine must be a Refine(candidates=...), got {refine!r:.100}.")
        if recall is not None and (k is None or dense or not 0.0 < real_at_least(0.0, recall=recall) < 1.0):
            raise InvalidInputError(
                f"recall={recall} must be above 0 and below 1, and needs dense=False and k. Leave recall out for the "
                "exact rows."
            )
        if not chosen.multiplies_rows and (k is not None or refine is not None or not dense):
            raise InvalidInputError(
                f"{chosen.name} scores are stored whole. Leave out k, refine and dense=False."
            )
        if refine is not None:
            if k is not None:
                raise InvalidInputError(
                    f"k={k} and refine were given. Leave k out: refine sets the candidates."
                )
            return chosen, run, False, refine.candidates
        k = None if k is None else positive_int(k=k)
        if k is not None and dense:
            raise InvalidInputError(
                f"k={k} needs dense=False. Leave k out: dense scores support top(k) for any k."
            )
        return chosen, run, dense, k

    def stream_scores(
        self,
        train: Any,
        targets: Any,
        *,
        method: Method | None = None,
        k: int | None = None,
        task: Task | None = None,
        checkpoints: CheckpointSource = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Scores:
        """Score every train row for every target by unprojected gradients, without storing rows.

        Use it for one-off questions, and for models whose rows would not fit. For each checkpoint the gradients of the
        targets are computed and multiplied by the inverse curvature, and one pass over the train rows computes the
        products. Projector, ``proj_dim`` and ``dtype`` of the attributor have no effect. A curvature that has to be
        fitted is stored as by :meth:`score`; nothing else is stored. In a distributed run each rank computes all
        scores.

        Args:
            train: The train data, in a form that :meth:`featurize` takes.
            targets: The targets, in the same form.
            method: ``EKFAC``, ``CG``, ``LiSSA``, ``TracIn``, ``GradDot`` or ``GradCos``, or a custom method without a
                kernel and a transform; ``None`` is ``EKFAC`` with its default settings.
            k: Keep only the k most helpful and the k most harmful rows of every target. All other entries of the result
                are NaN, and it takes ``4 k`` numbers per target instead of N.
            task: Model output function of the targets, as in :meth:`score`.
            checkpoints: As in :meth:`featurize`; present weights of which a store with rows has none are a warning. An
                iterator is read to its end before the first checkpoint is loaded: a state dict that it changes and
                yields again must be a copy. All are loaded once before the first pass: equal weights count as one
                checkpoint, as in :meth:`score`.
            checkpoint_loader: As in :meth:`featurize`.
            max_bytes: Memory for the gradients of targets and for the scores before they are reduced to k rows, in
                bytes. If more targets are given than fit, the train rows are read once for each part of the targets.

        Returns:
            Scores ``(N, M)`` in memory. Scores of :class:`~trak_lite.methods.EKFAC` equal those of :meth:`score` with
            ``projector="none"`` and ``dtype="float32"`` up to rounding. Standard errors, self-influence and
            :func:`~trak_lite.verify` need stored rows.

        Raises:
            InvalidInputError: If a setting is unknown or does not fit the checkpoints, or the method needs stored rows.
            NonFiniteError: If f, q, w, a gradient or a score is NaN or infinite; names the rows.
            ManifestMismatchError: If a curvature has to be fitted, and the store at the path has other settings or
                other train data.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> from trak_lite import methods
            >>> _ = torch.manual_seed(0)
            >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
            >>> attributor = Attributor(nn.Linear(4, 2), "image_classification", None)
            >>> attributor.stream_scores(data, data, method=methods.GradDot(), k=3).top(3).indices.shape
            (20, 3)
        """
        chosen = unprojected_scored_by(self._settings, EKFAC() if method is None else method)
        k = None if k is None else positive_int(k=k)
        if isinstance(checkpoints, Iterator):  # the list shows if its state dicts are one and the same
            checkpoints = list(checkpoints)
        checkpoint_list = list(iterate_checkpoints(checkpoints, checkpoint_loader))
        if not checkpoint_list:
            raise InvalidInputError(
                "checkpoints is empty. Pass at least one, or leave it out to use the present weights of the model."
            )
        run = self._run.asking(task)
        return scores_of_stream(
            run,
            run.rows(train, "the train data"),
            run.targets(targets),
            chosen,
            checkpoint_list,
            k=k,
            max_bytes=positive_int(max_bytes=max_bytes),
        )

    def scores(
        self,
        name: str = "targets",
        *,
        method: Method | None = None,
        dense: bool = True,
        task: Task | None = None,
    ) -> Scores:
        """Return the scores of a target set from the store, without the data and without computing gradients.

        Args:
            name: Name of the target set.
            method: As in :meth:`score`.
            dense: Return the stored matrix. ``False`` computes scores from the stored rows on access. The rows must be
                complete for every checkpoint that the targets were featurized with, also by a :meth:`score` that broke
                off. Of ``checkpoints`` that such a call was given, only those that it had begun count.
            task: As in :meth:`score`; needed only for calls that compute f of targets, such as
                :func:`~trak_lite.verify`.

        Raises:
            InvalidInputError: If the method is unknown or does not fit the checkpoints.
            StateError: If the scores were never computed, or are not finished; with ``dense=False``, if the features of
                the targets lack rows of a checkpoint.
            ManifestMismatchError: If the store has other settings, or the scores are of the default method of another
                attributor, or of another task; with ``dense=False`` also if the targets are not the same at every
                checkpoint.
        """
        check_name(name, what="target set")
        run, chosen = self._run.asking(task), self._settings.scored_by(method)
        dense = flag(dense=dense)
        return stored_scores(self._workspace, self._settings, name, chosen, dense=dense, run=run)

    def gradient_norms(self) -> NDArray[np.float32]:
        """Return the stored norms of the train rows' gradients before normalisation.

        Returns:
            Euclidean norms over all selected parameters, ``(C, N)``. Checkpoints are in the order in which they were
            first featurized.

        Raises:
            StateError: If rows are pending, or the store was made without norms.
            ManifestMismatchError: If the store has other settings.

        Example:
            Clip the 10 % of the gradients with the largest norms:

            >>> from torch.utils.data import TensorDataset
            >>> from trak_lite import clip, clipping_threshold
            >>> _ = torch.manual_seed(0)
            >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
            >>> model = nn.Linear(4, 2)
            >>> plain = Attributor(model, "image_classification", None, proj_dim=8, store_norms=True)
            >>> _ = plain.featurize(data)
            >>> threshold = clipping_threshold(plain.gradient_norms(), quantile=0.9)
            >>> clipped = Attributor(model, "image_classification", None, proj_dim=8, normalize=clip(threshold))
            >>> clipped.featurize(data).rows_written
            20
        """
        return self._train_column(tables.GRADIENT_NORM)

    def label_suspicion(self) -> NDArray[np.float32]:
        """Return how suspect the label of each train row is: the mean of abs(q) over the stored checkpoints.

        q is the negative derivative of the loss with respect to the model output, for classification 1 minus the
        probability of the label. A model learns wrong labels last, so that their q is large along the training, above
        all at early checkpoints. No target and no further pass is needed. ``benchmarks/results/wrong_labels.json``
        compares it with self-influence and with cleanlab. Compare EL2N, the norm of the error early in training (Paul
        et al. 2021, section 2.2).

        Returns:
            ``(N,)``, larger is more suspect.

        Raises:
            StateError: If rows are pending, or if q is the same for all rows, as where f is the loss.
            ManifestMismatchError: If the store has other settings.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> _ = torch.manual_seed(0)
            >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
            >>> attributor = Attributor(nn.Linear(4, 2), "image_classification", None, proj_dim=8)
            >>> _ = attributor.featurize(data)
            >>> suspects = attributor.label_suspicion().argsort()[::-1][:3]
        """
        errors: NDArray[np.float64] = np.abs(self._train_column(tables.OUT_TO_LOSS)).mean(0, np.float64)
        if len(errors) > 1 and np.ptp(errors) == 0:
            why = "the model gives all rows the same error. Look at its weights: is it trained?"
            if not self.task.has_curvature:
                why = "the model output of the task is its loss. Rank the rows by scores.self_influence()."
            raise StateError(f"Every row has the same q, because {why}")
        return errors.astype(np.float32)

    def _train_column(self, name: str) -> NDArray[np.float32]:
        """Return a stored number of each train row for each checkpoint, ``(C, N)``."""
        columns = []
        with self._workspace.reading() as store:
            self._workspace.compare(store.manifest, self._settings.manifest(None))
            for table in tables.complete_tables(store, None).values():
                if name not in [column.name for column in table.spec.columns]:
                    raise StateError(
                        f"{tables.table_path(table)} has no gradient norms: it was featurized with store_norms=False. "
                        "Featurize into another path with store_norms=True."
                    )
                columns.append(table.read(name))
        return np.stack(columns)

    def drop_checkpoint(self, name: str) -> None:
        """Permanently remove the rows of a checkpoint from the store: those of the train data and of all targets.

        Scores that were computed with the checkpoint can no longer be opened; :meth:`drop_scores` removes them. In a
        distributed run rank 0 removes the rows, after all ranks have made the call.

        Args:
            name: As in :attr:`FeaturizeSummary.checkpoints`, or the name of its table in the store: ``"ckpt-0"``. A
                capture that is not finished is removed by its name or its table, which messages name.

        Raises:
            StateError: If nothing was featurized yet.
            InvalidInputError: If no checkpoint, or more than one, has this name.
            BusyError: If another process is writing rows of the checkpoint.
        """
        self._drop(f"drop_checkpoint {name!r}", lambda store: tables.drop_checkpoint(store, name))

    def drop_scores(self, name: str = "targets", *, features: bool = False) -> None:
        """Permanently remove the scores of a target set, of all methods.

        Scores that are held compute nothing from features of other targets that take the name later: that is a
        StateError. In a distributed run rank 0 removes them, after all ranks have made the call.

        Args:
            name: Name of the target set.
            features: Also remove the features of the targets, so that nothing of the set remains. By default they
                remain, and other scores of the same targets need no new gradients.

        Raises:
            StateError: If nothing was featurized yet, or there are no such scores (with ``features``, also no such
                features).
            BusyError: If another process is computing them.
        """
        check_name(name, what="target set")
        self._drop(f"drop_scores {name!r}", lambda store: drop_scores(store, name, features=features))

    def _drop(self, call: str, drop: Callable[[AbstractFeatureStore], None]) -> None:
        """Call ``drop`` on the store, on rank 0 only, after all ranks have made the call."""

        def dropped() -> None:
            with self._workspace.opened(self._settings.manifest(None)) as workspace:
                drop(workspace.store())

        with self._run.joined(call) as ranks:
            ranks.broadcast("what is dropped", dropped)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What the scores of methods that give a whole matrix are made of; see :class:`MatrixParts`."""

    run: Run
    targets: Rows
    name: str
    score: Callable[..., Scores]
    """:meth:`Attributor.score` of the targets."""

    def products(self, method: AbstractMethod) -> MadeScores:
        return MadeScores(self.score(method=method).numpy())

    def replays(self, runs: Sequence[TrainingRun]) -> MadeScores:
        with self.run.workspace.reading() as store:
            dataset = store.manifest.fingerprint.get("dataset", {})
        for one in runs:
            one.require_train_rows(dataset)
        smoothness = tuple(round(one.metasmoothness(), 4) for one in runs)
        scores = unrolled(
            runs, self.targets, self.run.target_task, name=self.name, progress=self.run.progress
        )
        errors = scores.standard_error() if len(runs) > 1 else None
        return MadeScores(scores.numpy(), errors, smoothness)
