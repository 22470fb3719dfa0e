"""The native facade: featurize a train set, score targets, and the one place that names the defaults."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from os import PathLike
from typing import Any, Literal, Self, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trak_lite._validate import positive_int
from trak_lite.data.datasets import HeldRows, Rows
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.evaluation import Verdict, subset_masks
from trak_lite.featurizing.fisher import FisherSettings
from trak_lite.featurizing.kronecker import KroneckerSettings
from trak_lite.featurizing.session import (
    FeaturizingSession,
    KnownSource,
    featurizing,
    marking_last,
    stored_norms,
)
from trak_lite.gradient_computers import Normalization, ParameterChoice
from trak_lite.models.checkpoints import CheckpointSource, iterate_checkpoints
from trak_lite.models.sharded import refuse_sharded
from trak_lite.parallel.ranks import AbstractRanks, OneRank, joined_ranks
from trak_lite.projectors import AbstractProjector
from trak_lite.retraining import TrainFunction, retrain_into
from trak_lite.retraining.verify import (
    calibrated_scores,
    check_budget,
    judge,
    keep_predictions,
    target_outputs,
)
from trak_lite.run.score_settings import ScoredKernel, ScoreView
from trak_lite.run.settings import AttributorSettings, GradientComputerFactory, Task, stored_arguments
from trak_lite.run.tables import complete_tables, drop_checkpoint
from trak_lite.run.workspace import FirstRows, Workspace, naming_dropped
from trak_lite.scoring.kept_scores import KeptScores
from trak_lite.scoring.matrix import DampingPath
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.stored import ScoreResult, drop_scores, keep_verdict
from trak_lite.scoring.tokens import token_scores
from trak_lite.store import AbstractFeatureStore, RemotePlace, check_name, open_store, resolve_place
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.types import Batch, FeatureLayout

__all__ = ["Attributor", "FeaturizeSummary"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeaturizeSummary:
    """What a call of :meth:`Attributor.featurize` did."""

    checkpoints: tuple[str, ...]
    """Names of the checkpoints, in order."""
    rows_written: int
    """Rows featurized by this call, over all checkpoints."""
    rows_found: int
    """Rows that were in the store already or came there by other processes, over all checkpoints."""


class Attributor:
    """Answers "which training examples made the model say this?" for a trained model.

    Featurize the train set once for every checkpoint, then score any number of target sets. Both resume: a
    run that was killed continues at the first row that is not on disk. The model is borrowed: weights, mode,
    flags and device are given back after every call.

    Source: TRAK (arXiv:2303.14186), with damping and curvature weights; every choice left to ``"auto"`` is
    made when the object is built, logged, and written into the store.

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
        normalize: Literal["none", "unit"] | Normalization = "none",
        store_norms: bool = False,
        projector: str | AbstractProjector = "auto",
        layout: Literal["auto", "joint", "module"] = "auto",
        kernel: Literal["auto", "curvature", "fisher", "trak"] = "auto",
        damping: float | Literal["auto"] = "auto",
        collate: Callable[[list[Any]], Batch] | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
        distributed: bool | None = None,
    ) -> None:
        """Check and decide every setting; nothing is written yet.

        Args:
            model: The trained module. It is used in eval mode and given back as it was.
            task: Name of a model output function, one of one's own, or a callable ``f(model_call, batch) -> (B,)``.
            path: Folder of the store (``runs/digits.zarr``), its address in an object store
                (``s3://bucket/digits.zarr``, a store of obstore's, a :class:`~trak_lite.store.RemotePlace`); ``None``
                keeps everything in memory.
            proj_dim: K, numbers per stored row, or per module of it (see ``layout``); more is more exact and costs disk
                and time. ``"auto"`` takes 2048, or less where the modules are more than 16 (32,768 numbers per row).
            seed: Seed of the projection.
            device: ``"auto"`` runs where the model is.
            dtype: Stored dtype of the train rows' features. ``"int8"`` and ``"int4"`` take a half and a quarter of the
                disk of ``"float16"``: integers, with a float32 scale for every row (see :attr:`row_bytes`); targets
                are then kept in float32.
            grad_wrt: Names, patterns (``"layers.*"``) or module classes of the parameters to attribute through;
                ``None`` takes all that require grad.
            gradient_computer: ``"hook"``, ``"functional"``, ``"iterative"``, or a class or partial of one; ``"auto"``
                takes the first of these that is exact for the model, decided by its first samples.
            normalize: What the gradients of train rows and targets are divided by: ``"unit"`` by their norms,
                ``clip(C)`` where that is above C by what brings it down to C, ``clip(C, scope="module")`` module by
                module; q and w stay as they are.
            store_norms: Keep the norms of the train rows' gradients, not normalised, for :meth:`gradient_norms`; costs
                up to a tenth of the time.
            projector: ``"auto"`` (``"countsketch"``), another name in ``trak_lite.projectors.PROJECTORS``, or an
                instance.
            layout: ``"module"`` gives every module K features and a kernel of its own, ``"joint"`` adds up the features
                of all parameters, as TRAK does; ``"auto"`` takes the former, but for a projector of one's own.
            kernel: ``"curvature"`` weighs train rows by their loss curvature, ``"fisher"`` takes the curvature from
                labels that the model draws (8 K further gradients per checkpoint in :meth:`featurize`, 32 per train row
                at most), ``"trak"`` neither; ``"auto"`` takes the first of these that the task has, ``"fisher"``
                where f is a log-likelihood, or a sum over tokens or labels (and K at most 4096).
            damping: Lambda in units of the kernel's mean eigenvalue; ``"auto"`` takes 1/2048 of the trace
                (``"fisher"``: 1/16,384).
            collate: Turns a list of samples into a batch, where torch's default does not fit.
            batch_size: Samples per pass where neither a call nor a DataLoader says; ``None`` is 32.
            progress: Show progress bars; ``None`` shows them on a terminal only. Ranks above 0 show none.
            distributed: Make every call together with the other ranks of a script that was started by torchrun, or that
                has a ``torch.distributed`` process group: ``None`` does so where there are any. ``False`` is for calls
                that only some ranks make.

        Raises:
            InvalidInputError: If a setting is not among the allowed ones, or a name in ``grad_wrt`` is unknown.
            UnknownTaskError: If the task is unknown.
        """
        self.model = model
        self.path = None if path is None else resolve_place(path)
        self._settings = AttributorSettings(
            model,
            task,
            proj_dim=proj_dim,
            seed=seed,
            device=device,
            dtype=dtype,
            grad_wrt=grad_wrt,
            gradient_computer=gradient_computer,
            normalize=normalize,
            store_norms=store_norms,
            projector=projector,
            layout=layout,
            kernel=kernel,
            damping=damping,
        )
        self.task, self.device, self.dtype = self._settings.task, self._settings.device, self._settings.dtype
        self.parameters, self.projector = self._settings.parameters, self._settings.projector
        self.normalization, self.kernel = self._settings.normalization, self._settings.kernel
        self._collate = collate
        self._batch_size = None if batch_size is None else positive_int(batch_size=batch_size)
        self._progress = progress
        self._distributed = distributed
        self._sources: list[KnownSource] = []
        self._train: HeldRows | None = None
        """A few train rows, as they were last given: they are computed again when targets are scored."""
        self._workspace = Workspace(self.path)
        self._kept = KeptScores(self._workspace, self._settings)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str] | RemotePlace,
        model: nn.Module,
        task: Task | None = None,
        **overrides: Any,
    ) -> Self:
        """Continue with a store: every setting comes from its manifest.

        Args:
            path: Folder of the store, or its address in an object store.
            model: A module of the architecture that the store was made with.
            task: Needed only where the store was made with a model output function of one's own.
            **overrides: Arguments of the constructor that cannot be stored (a projector or gradient computer of
                one's own, ``collate``, ``device``, ``progress``) or that may change (``kernel``, ``damping``;
                another kernel than the store's takes its own default damping where none is given).

        Raises:
            MissingStoreError: If there is no store at the path.
            InvalidInputError: If a setting of one's own is needed and was not passed.
        """
        place = resolve_place(path)
        with open_store(place) as store:
            manifest = store.manifest
        found, arguments = stored_arguments(manifest, task, overrides, where=str(place))
        return cls(model, found, place, **arguments)

    @property
    def layout(self) -> FeatureLayout:
        """Segments of a feature row."""
        return self._settings.layout

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of one train row of one checkpoint: its features, q and w, and its norm if that is kept."""
        return self._settings.train_table(1, {}).row_bytes

    def featurize(
        self,
        data: Any,
        checkpoints: CheckpointSource = None,
        *,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        dataset_id: str | None = None,
        append: bool = False,
    ) -> FeaturizeSummary:
        """Compute and keep the features of every train row for every checkpoint.

        Rows that are in the store already are not computed, and not loaded from the dataset, but for up to eight of
        each checkpoint: they are compared with what is stored, so that a change of data, model or code is noticed
        whatever its cause. Checkpoints are recognised by their weights, so later calls may add some.

        Any number of processes may do this at the same time on the same path: they share the rows chunk by chunk,
        take over what a killed one left, and all return when every row is there. Under torchrun an error of one of them
        ends the others.

        Args:
            data: A map-style dataset, or a DataLoader that reads one in order.
            checkpoints: ``None`` for the model as it is, a state dict, a path to a file or folder, or an iterable
                of these. Checkpoints of one run, 4 to 10 of them, are the cheapest way to better scores.
            checkpoint_loader: Turns an item of ``checkpoints`` into a state dict, where it is none of these.
            indices: Dataset index of every row, to select and order rows.
            batch_size: Samples per pass; ``None`` takes the loader's, or the attributor's.
            dataset_id: The user's own name for the data, instead of a digest of up to 64 of its samples (of all, in
                a ``TensorDataset``) and of what a collate function of one's own makes of each.
            append: The data may have more rows than the store: if it begins with the stored ones, as far as the
                digest or ``dataset_id`` tells, the rest is appended. From then on the store is that of the longer data:
                each of its checkpoints has to be featurized again, for the new rows, before the next scoring.

        Returns:
            What was written by this call, and what was found or written by other processes.

        Raises:
            InvalidInputError: If the data, a batch or a checkpoint is not what is expected.
            NonFiniteError: If a value of a row is NaN or infinite; names the rows.
            ManifestMismatchError: If the store holds other settings or other data; names every difference. Or if stored
                rows do not come out as they are stored; names the first, and each quantity that differs.
            StoreError: If the store cannot be read or written.
            RankError: If another rank of a distributed run failed, or does something else.
        """
        rows = self._rows(data, indices, batch_size, "the train data")
        names: list[str] = []
        written = 0
        once = isinstance(checkpoints, Iterator)
        appended_to = (lambda num_rows: rows.identity(dataset_id, num_rows=num_rows)) if append else None
        with (
            self._joined("featurize") as ranks,
            self._session(rows.identity(dataset_id), appended_to, ranks=ranks) as session,
        ):
            found = iterate_checkpoints(checkpoints, checkpoint_loader)
            # What comes from an iterator is not held any longer than it has to be.
            for checkpoint, wait in zip(found, repeat(True)) if once else marking_last(found):
                written += session.featurize(checkpoint, rows, wait=wait)
                names.append(checkpoint.name)
            written += session.finish(rows)
        if not names:
            raise InvalidInputError(
                "checkpoints is empty. Pass at least one, or leave it out for the model as it is."
            )
        self._train = rows.held
        if not once:
            self._sources.append((checkpoints, checkpoint_loader))
        rows_found = len(names) * len(rows) - written
        logger.info("Featurized %d rows, found %d, for checkpoints %s.", written, rows_found, names)
        return FeaturizeSummary(tuple(names), written, rows_found)

    def score(
        self,
        data: Any,
        name: str = "targets",
        *,
        kernel: ScoredKernel | None = None,
        damping: float | None = None,
        layout: Literal["stored", "joint"] = "stored",
        q: Literal["outside", "inside", "off"] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        dense: bool = True,
        k: int | None = None,
        checkpoints: CheckpointSource = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        dataset_id: str | None = None,
    ) -> Scores:
        """Score every train row for every target.

        The result is kept under ``name``: the same call again returns it, or resumes it after a kill. Another kernel,
        damping, layout, q or weighting reads the same stored rows of train set and targets, whose gradients are not
        computed again, and is kept beside the first one.

        Args:
            data: The targets: a map-style dataset, or a DataLoader that reads one in order.
            name: Name of the target set.
            kernel: ``"curvature"``, ``"fisher"`` (needs :meth:`fit_curvature` if it is not the attributor's),
                ``"trak"`` (not weighted), ``"dot"`` (the product of gradients: no kernel), ``"cosine"``, or
                ``"ekfac"``, which needs :meth:`fit_curvature` and takes the targets' gradients anew; ``None`` is the
                attributor's.
            damping: Lambda in units of the kernel's mean eigenvalue (``"ekfac"``: that of every layer's curvature);
                ``None`` is the default.
            layout: ``"joint"`` takes rows with a segment per module under one kernel, of the square of their width.
            q: Multiply the scores of a train row by its mean q over checkpoints (``"outside"``), the part of each
                checkpoint by its own (``"inside"``), or by nothing (``"off"``); ``None`` is ``"outside"`` for
                ``kernel="trak"``, as published, else ``"inside"``.
            checkpoint_weights: Factor of each checkpoint, in order, in place of 1/C: the learning rates for TracIn
                (with ``kernel="dot", q="inside"``), ``(1, -1)`` to subtract a base model (which wants ``q="off"`` or
                ``"inside"``, as the mean q is not subtracted).
            dense: Keep the ``(N, M)`` matrix on disk; without it scores are computed from the stored rows when asked.
            k: Without the matrix, find and keep this many most helpful and most harmful rows of every target now.
            checkpoints: The checkpoints to use, all of them featurized; ``None`` uses every one in the store.
            checkpoint_loader: As in :meth:`featurize`.
            indices: Dataset index of every target, to select and order targets.
            batch_size: As in :meth:`featurize`.
            dataset_id: The user's own name for the targets, as in :meth:`featurize`.

        Returns:
            Scores ``(N, M)``.

        Raises:
            InvalidInputError: If a setting is unknown or does not fit the checkpoints.
            StateError: If train rows are pending, or the weights of a checkpoint are not to be found.
            ManifestMismatchError: If other targets or checkpoints were scored under this name, or stored rows of
                targets or train data do not come out as they are stored: the data or the model were changed.
            SingularKernelError: If the kernel has no inverse at the damping in force.
            RankError: If another rank of a distributed run failed, or does something else.
        """
        check_name(name, what="target set")
        settings = self._settings.score_settings(
            kernel=kernel, damping=damping, layout=layout, q=q, checkpoint_weights=checkpoint_weights
        )
        if k is not None and positive_int(k=k) and dense:
            raise InvalidInputError(f"k={k} is for dense=False; dense scores answer top(k) for any k.")
        targets = self._rows(data, indices, batch_size, "the targets")
        with (
            self._joined(f"score {name!r}") as ranks,
            self._session(ranks=ranks, train=self._train) as session,
            naming_dropped(session.store),
        ):
            identity = session.target_identity(targets.identity(dataset_id), settings)
            features = session.targets(targets, name, settings, identity)
            used: list[str] | None = None
            if checkpoints is not None:
                used = [features.add(c) for c in iterate_checkpoints(checkpoints, checkpoint_loader)]
            train = complete_tables(session.store, used)
            base = self._settings.default_scores
            result = ScoreResult(session.store, train, name, settings, base, identity, len(targets))
            settings.weights(len(train))
            ranks.agree("scores to make (digest of rows, targets and settings)", result.digest())
            said = ranks.told("whether they are there", lambda: str(dense and result.is_finished()))
            finished = session.agreed(said == "True")
            if not finished:
                features.find(train, session.candidates)
            features.compare(train, session.candidates)
            source = self._kept.source(session.store, list(train.values()), name, settings, ranks=ranks)
            if dense and not finished:
                result.fill(source, device=self.device, progress=self._progress, watch=ranks.watch)
            kept = None if k is None else result.both_ends(source, k, ranks=ranks)
        if dense:
            return self.scores(name, **settings.view())
        return self._kept.streamed(name, settings, list(train), kept)

    def fit_curvature(
        self,
        data: Any,
        checkpoints: CheckpointSource = None,
        *,
        settings: KroneckerSettings | FisherSettings | None = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        dataset_id: str | None = None,
    ) -> None:
        """Fit the curvature of checkpoints: Kronecker-factored (EK-FAC), or the Fisher information of the features.

        The first is for ``score(..., kernel="ekfac")`` and takes two passes over the train rows, and the eigenvectors
        of every layer's sides once. The second is for ``kernel="fisher"``; :meth:`featurize` fits it where that is the
        attributor's kernel. A checkpoint that was fitted with these settings is not fitted again; a fit with others
        takes its place.

        Args:
            data: The train data, as given to :meth:`featurize`.
            checkpoints: The checkpoints to fit, all of them featurized; ``None`` fits every one in the store.
            settings: Which curvature: a :class:`~trak_lite.featurizing.kronecker.KroneckerSettings`, by default of the
                true Fisher information where the task can draw labels, or a
                :class:`~trak_lite.featurizing.fisher.FisherSettings`.
            checkpoint_loader: As in :meth:`featurize`.
            indices: Dataset index of every row, as in :meth:`featurize`.
            batch_size: As in :meth:`featurize`.
            dataset_id: As in :meth:`featurize`.

        Raises:
            InvalidInputError: If the task does not have what the settings ask for, or a batch is not what it expects.
            UnsupportedModelError: If hooks cannot differentiate the model.
            StateError: If a checkpoint is not in the store, or its weights are not to be found.
            ManifestMismatchError: If the store holds other settings or other data.
            ReadOnlyStoreError: If the store cannot be written.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> _ = torch.manual_seed(0)
            >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
            >>> attributor = Attributor(nn.Linear(4, 2), "image_classification", None, proj_dim=8)
            >>> _ = attributor.featurize(data)
            >>> attributor.fit_curvature(data)
            >>> attributor.score(data, name="itself", kernel="ekfac").shape
            (20, 20)
        """
        rows = self._rows(data, indices, batch_size, "the train data")
        named = None if checkpoints is None else iterate_checkpoints(checkpoints, checkpoint_loader)
        with (
            self._joined("fit_curvature") as ranks,
            self._session(identity := rows.identity(dataset_id), ranks=ranks, train=rows) as session,
        ):
            session.fit_curvature(rows, identity, settings or KroneckerSettings(), named)

    def scores(self, name: str = "targets", *, dense: bool = True, **view: Unpack[ScoreView]) -> Scores:
        """Return the scores of a target set from the store, without the data and without a gradient.

        Args:
            name: Name of the target set.
            dense: Return the matrix that was kept; ``False`` computes scores from the stored rows when they are asked
                for, which must be there for every checkpoint that the targets were featurized with.
            **view: ``kernel``, ``damping``, ``layout``, ``q``, ``checkpoint_weights``, as in :meth:`score`.

        Raises:
            InvalidInputError: If a setting is unknown or does not fit the checkpoints.
            StateError: If they were never computed, or not finished.
        """
        check_name(name, what="target set")
        settings = self._settings.score_settings(**view)
        return self._kept.stored(name, settings) if dense else self._kept.streamed(name, settings)

    def damping_path(
        self,
        data: Any,
        dampings: Sequence[float],
        *,
        name: str = "targets",
        **view: Unpack[ScoreView],
    ) -> DampingPath:
        """Return the scores of a target set at several dampings, from one eigendecomposition per checkpoint.

        Args:
            data: Name of a target set that was scored, or the targets.
            dampings: Lambdas in units of the kernel's mean eigenvalue.
            name: Name of the target set, where ``data`` are the targets.
            **view: ``kernel``, ``layout``, ``q``, ``checkpoint_weights``, as in :meth:`score`.

        Raises:
            InvalidInputError: If a damping is negative, or the view has no kernel.
            StateError: As :meth:`score`, or if there is no such target set.
            SingularKernelError: If a kernel has no inverse at a damping.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> _ = torch.manual_seed(0)
            >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
            >>> attributor = Attributor(nn.Linear(4, 2), "image_classification", None, proj_dim=8)
            >>> _ = attributor.featurize(data)
            >>> attributor.damping_path(data, [0.1, 1, 10]).shape
            (3, 20, 20)
        """
        if isinstance(data, str):
            return self.scores(data, dense=False, **view).path(dampings)
        return self.score(data, name, dense=False, **view).path(dampings)

    def verify(
        self,
        train_fn: TrainFunction,
        data: Any,
        name: str = "targets",
        *,
        budget: int = 10,
        seeds: Sequence[int] = (0,),
        alpha: float = 0.5,
        strata: ArrayLike | None = None,
        subset_seed: int = 0,
        calibrate: bool = False,
        texts: tuple[Sequence[Any], Sequence[Any]] | None = None,
        confidence: float = 0.95,
        train_id: str | None = None,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        dataset_id: str | None = None,
        **view: Unpack[ScoreView],
    ) -> Verdict:
        """Test finished scores against models that are retrained on random subsets of the train rows.

        Reported is the linear datamodeling score (LDS): how well summed scores rank the retrained models' outputs of a
        target, beside methods that cost next to nothing. The verdict is kept with the scores and printed with them.
        Every retraining is kept in the store, so the same call continues after a kill, and verifying other scores of
        the same targets (another ``view``, ``calibrate=True``) trains nothing again. Another process first repeats one
        of them, to see that the training is the same, and several processes share them. Of several ranks the first one
        trains.

        Args:
            train_fn: ``train_fn(rows, seed)`` trains from scratch on these train rows, numbered as in ``scores``, and
                returns a module of the attributed architecture or its state dict.
            data: The targets that were scored under ``name``.
            name: Name of the target set.
            budget: Random subsets; each is trained on once per seed.
            seeds: Passed on to ``train_fn``. One more subset says more than a second seed, but two tell the ceiling.
            alpha: Share of the train rows in a subset.
            strata: ``(N,)`` group of each train row, of which every subset keeps the same share.
            subset_seed: Seed of the subsets.
            calibrate: Fit the weights of checkpoint x module x damping x view on every other subset. They are kept for
                :meth:`calibrated_scores` only if they are better on the others beyond doubt.
            texts: Train texts and target texts (or their tokens) for the BM25 baseline.
            confidence: Nominal coverage of the intervals.
            train_id: The user's own name for the training, instead of the source of ``train_fn`` and what it carries.
            indices: Dataset index of every target, as in :meth:`score`.
            batch_size: Targets per pass; ``None`` takes the loader's, or 32.
            dataset_id: The user's own name for the targets, as in :meth:`score`.
            **view: ``kernel``, ``damping``, ``layout``, ``q``, ``checkpoint_weights`` of the scores.

        Raises:
            InvalidInputError: If the budget is too small, texts or strata do not fit, or scores without a kernel are to
                be calibrated.
            StateError: If the scores were never computed.
            ManifestMismatchError: If ``data`` are not the targets that were scored, or ``train_id`` names another
                training.
            RetrainingError: If a training fails; names subset and seed.
            UnsupportedModelError: If the model is sharded.
        """
        refuse_sharded(self.model, "verify", "Verify with a whole model of the same store")
        check_budget(budget, calibrate=calibrate)
        targets = self._rows(data, indices, batch_size, "the targets")

        def decide() -> str:
            identity = targets.identity(dataset_id)
            scores = self.scores(name, **view)
            path = self._kept.path(name, self._settings.score_settings(**view))
            with self._workspace.opened(self._settings.manifest(None)) as workspace:
                scored = dict(workspace.store().open_table(path).spec.fingerprint["targets"])
                scored.pop("curvature", None)  # belongs to the scores, not to the data
                compare_fingerprints(
                    {"targets": scored},
                    {"targets": identity},
                    where=path,
                    remedy="Pass the targets that were scored under this name.",
                )
                rows = self._kept.rows(workspace.store(), path, name)
                if calibrate:
                    rows.require_kernel()
                retrained = retrain_into(
                    workspace,
                    f"retrains/{name}",
                    train_fn,
                    subset_masks(len(scores), budget, alpha=alpha, seed=subset_seed, strata=strata),
                    partial(target_outputs, self.model, self.task, targets, self.device),
                    seeds=seeds,
                    train_id=train_id,
                    progress=self._progress,
                    settings={"targets": identity},
                )
                verdict = judge(
                    scores, rows, retrained, calibrate=calibrate, texts=texts, confidence=confidence
                )
                keep_verdict(workspace.store(), path, verdict)
                keep_predictions(workspace.store(), path, scores, retrained)
            return json.dumps(verdict.to_json())

        # Ranks other than the first one wait for it, and are told.
        with self._joined(f"verify {name!r}") as ranks:
            return Verdict.from_json(json.loads(ranks.told("the verdict", decide, takes_long=True)))

    def calibrated_scores(self, name: str = "targets", **view: Unpack[ScoreView]) -> NDArray[np.float32]:
        """Return the scores of the calibrated kernel that :meth:`verify` found and kept, ``(N, M)``.

        Args:
            name: Name of the target set.
            **view: As it was given to :meth:`verify`.

        Raises:
            StateError: If the scores were not verified with ``calibrate=True``, or the calibrated kernel was no better.
        """
        verdict = self.scores(name, **view).verdict
        if verdict is None or verdict.calibration is None:
            raise StateError(
                f"The scores {name!r} were not calibrated. Call verify(train_fn, data, {name!r}, calibrate=True)."
            )
        path = self._kept.path(name, self._settings.score_settings(**view))
        with self._workspace.reading() as store:
            return calibrated_scores(self._kept.rows(store, path, name), verdict.calibration)

    def token_scores(
        self,
        scores: Scores,
        data: Any,
        rows: Sequence[int],
        *,
        targets: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        dataset_id: str | None = None,
    ) -> dict[int, NDArray[np.float32]]:
        """Return what every token of some train rows adds to their scores, where the task is a causal language model.

        f of a train row is a sum over its predicted tokens, so its gradient, its features and its scores are too: the
        numbers of a row add up to its score, but for the rounding of stored features. A row of T predicted tokens
        costs as much as featurizing T rows. Nothing is kept.

        Args:
            scores: Scores of this attributor.
            data: The train data, as given to :meth:`featurize`.
            rows: Train rows.
            targets: Targets; ``None`` takes all of them.
            indices: As in :meth:`featurize`.
            batch_size: Tokens per pass; ``None`` takes the loader's, or 32.
            dataset_id: As in :meth:`featurize`.

        Returns:
            For each row ``(T, targets)``: position t is that of ``labels[t]``; 0 where nothing is predicted.

        Raises:
            InvalidInputError: If the task is no causal language model, rows are divided by norms, or a row or target
                is not there.
            StateError: If the weights of a checkpoint are not to be found.
            ManifestMismatchError: If ``data`` are not the train data.
        """
        train = self._rows(data, indices, batch_size, "the train data")
        with self._session(train.identity(dataset_id), train=train) as session:
            return token_scores(session, self._settings, scores, train, rows=rows, targets=targets)

    def gradient_norms(self) -> NDArray[np.float32]:
        """Return the norms of the train rows' gradients as they were before any normalisation, from the store.

        Returns:
            Euclidean norms over all kept parameters, ``(C, N)``, checkpoints in the order they were first featurized.

        Raises:
            StateError: If rows are pending, or the store was made without norms.

        Example:
            Clip the tenth of the gradients that is longest:

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
        with self._workspace.reading() as store:
            return stored_norms(store)

    def drop_checkpoint(self, name: str) -> None:
        """Remove the rows of a checkpoint from the store, for good: those of the train data and of all targets.

        Scores that were computed with it can no longer be opened; :meth:`drop_scores` removes them. Of several ranks
        the first one does it, when all have come.

        Args:
            name: As in :attr:`FeaturizeSummary.checkpoints`, or the name of its table in the store: ``"ckpt-0"``.

        Raises:
            StateError: If nothing was featurized yet.
            InvalidInputError: If no checkpoint, or more than one, is called that.
            BusyError: If another process writes rows of it.
        """
        self._drop(f"drop_checkpoint {name!r}", lambda store: drop_checkpoint(store, name))

    def drop_scores(self, name: str = "targets") -> None:
        """Remove the scores of a target set, made in whatever way, for good; the features of the targets stay.

        Of several ranks the first one does it, when all have come.

        Raises:
            StateError: If nothing was featurized yet, or there are no such scores.
            BusyError: If another process computes them at this moment.
        """
        check_name(name, what="target set")
        self._drop(f"drop_scores {name!r}", lambda store: drop_scores(store, name))

    def _drop(self, call: str, drop: Callable[[AbstractFeatureStore], None]) -> None:
        """Remove something from the store: of several ranks the first one does, when all have come."""

        def dropped() -> None:
            with self._workspace.opened(self._settings.manifest(None)) as workspace:
                drop(workspace.store())

        with self._joined(call) as ranks:
            ranks.once("what is dropped", dropped)

    def _rows(self, data: Any, indices: Sequence[int] | None, batch_size: int | None, what: str) -> Rows:
        if batch_size is None and not isinstance(data, DataLoader):
            batch_size = self._batch_size
        size = None if batch_size is None else positive_int(batch_size=batch_size)
        return Rows(data, indices=indices, batch_size=size, collate=self._collate, what=what)

    def _joined(self, call: str) -> AbstractContextManager[AbstractRanks]:
        """Make a call together with the other ranks, which make the same one; a store in memory is each one's own."""
        return joined_ranks(
            f"{call} ({self.path})", distributed=False if self.path is None else self._distributed
        )

    def _session(
        self,
        dataset: Mapping[str, Any] | None = None,
        appended_to: FirstRows | None = None,
        *,
        ranks: AbstractRanks | None = None,
        train: Rows | HeldRows | None = None,
    ) -> AbstractContextManager[FeaturizingSession]:
        """Hold the store, compared with these settings and this data, and the model."""
        return featurizing(
            self.model,
            self._settings,
            self._workspace,
            dataset=dataset,
            sources=self._sources,
            progress=self._progress,
            ranks=ranks or OneRank(),
            appended_to=appended_to,
            train=train,
        )
