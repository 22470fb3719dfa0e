"""The native facade: featurize a train set, score targets, and the one place that picks defaults."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from trak_lite._session import borrow_model, resolve_device
from trak_lite._validate import one_of, positive_int
from trak_lite._version import __version__
from trak_lite.checkpoints import (
    Checkpoint,
    CheckpointSource,
    iterate_checkpoints,
    load_into,
    weights_digest,
)
from trak_lite.curvature_fits import CurvatureFits
from trak_lite.datasets import Rows
from trak_lite.diagnosis import naming_rows
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError
from trak_lite.evaluation import Verdict, subset_masks
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    Normalization,
    ParameterChoice,
    as_normalization,
    choose_gradient_computer,
    select_parameters,
)
from trak_lite.kronecker import KroneckerSettings, PreconditionedProjector, Preconditioner
from trak_lite.modelout_functions import AbstractModelOutput, describe_task, resolve_task
from trak_lite.pipeline import (
    GRADIENT_NORM,
    feature_table_spec,
    featurize_rows,
    target_table_spec,
)
from trak_lite.projectors import AbstractProjector, projector_name, select_projector
from trak_lite.retraining import TrainFunction, retrain_into
from trak_lite.score_matrix import AbstractScoreMatrix, DampingPath, StoredMatrix, StreamedMatrix
from trak_lite.score_result import ScoreResult, drop_scores, finished_scores, scorable_tables, score_path
from trak_lite.score_source import ScoreSource, target_folder
from trak_lite.scores import Scores
from trak_lite.scoring import DEFAULT_DAMPING, KernelSettings, ScoreSettings, ScoreView
from trak_lite.sharing import LateTable
from trak_lite.store import (
    DTYPES,
    AbstractFeatureStore,
    AbstractRowTable,
    Manifest,
    RemotePlace,
    check_name,
    dtype_fingerprint,
    open_store,
    resolve_place,
)
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.target_session import TargetSession, visit_checkpoints
from trak_lite.types import Batch, FeatureLayout, ParameterShapes, num_entries
from trak_lite.verification import (
    ScoredRows,
    calibrated_scores,
    check_budget,
    judge,
    keep_verdict,
    kept_verdict,
    target_outputs,
)
from trak_lite.workspace import Workspace, checkpoint_tables, complete_tables, drop_checkpoint

__all__ = ["Attributor", "FeaturizeSummary"]

logger = logging.getLogger(__name__)

GradientComputerFactory = Callable[..., AbstractGradientComputer]


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
        task: str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Tensor],
        path: str | PathLike[str] | RemotePlace | None,
        *,
        proj_dim: int = 2048,
        seed: int = 0,
        device: str | torch.device = "auto",
        dtype: Literal["float32", "float16", "int8", "int4"] = "float16",
        grad_wrt: ParameterChoice | None = None,
        gradient_computer: str | GradientComputerFactory = "auto",
        normalize: Literal["none", "unit"] | Normalization = "none",
        store_norms: bool = False,
        projector: str | AbstractProjector = "auto",
        layout: Literal["auto", "joint", "module"] = "auto",
        kernel: Literal["auto", "curvature", "trak"] = "auto",
        damping: float | Literal["auto"] = "auto",
        collate: Callable[[list[Any]], Batch] | None = None,
        progress: bool | None = None,
    ) -> None:
        """Check and decide every setting; nothing is written yet.

        Args:
            model: The trained module. It is used in eval mode and given back as it was.
            task: Name of a model output function, one of one's own, or a callable ``f(model_call, batch) -> (B,)``.
            path: Folder of the store (``runs/digits.zarr``), its address in an object store
                (``s3://bucket/digits.zarr``, a store of obstore's, a :class:`~trak_lite.store.RemotePlace`); ``None``
                keeps everything in memory.
            proj_dim: K, numbers per stored row; more is more exact and costs disk and time.
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
            layout: ``"joint"`` adds up the features of all parameters, ``"module"`` gives every module K features and
                a kernel of its own; ``"auto"`` is joint but for ``"two_sided"``.
            kernel: ``"curvature"`` weighs train rows by their loss curvature, ``"trak"`` does not; ``"auto"`` takes
                the former where the task has curvature.
            damping: Lambda in units of the kernel's mean eigenvalue.
            collate: Turns a list of samples into a batch, where torch's default does not fit.
            progress: Show progress bars; ``None`` shows them on a terminal only.

        Raises:
            InvalidInputError: If a setting is not among the allowed ones, or a name in ``grad_wrt`` is unknown.
            UnknownTaskError: If the task is unknown.
        """
        self.model = model
        self.task = resolve_task(task)
        self.path = None if path is None else resolve_place(path)
        self.dtype = one_of(DTYPES, dtype=dtype)
        self.device = resolve_device(device, model)
        self.parameters: ParameterShapes = {
            name: tuple(p.shape) for name, p in select_parameters(model, grad_wrt).items()
        }
        self.projector = select_projector(
            projector,
            proj_dim=positive_int(proj_dim=proj_dim),
            seed=seed,
            device=self.device,
            layout=layout,
        )
        computer_name, self._make_computer = _decide_computer(gradient_computer)
        self.normalization = as_normalization(normalize)
        self.kernel = _decide_kernel(kernel, damping, self.task)
        self._store_norms = store_norms
        self._collate = collate
        self._progress = progress
        self._sources: list[tuple[CheckpointSource, Any]] = []
        self._workspace = Workspace(self.path)
        self._settings = {  # None stands for what only the user can give again
            "task": self.task.name or None,
            "proj_dim": self.projector.proj_dim or self.layout.width,
            "seed": int(self.projector.seed),
            "dtype": self.dtype,
            "gradient_computer": computer_name,
            "normalize": self.normalization.to_json(),
            "store_norms": store_norms,
            "projector": projector_name(projector),
            "layout": layout,
            "kernel": "curvature" if self.kernel.weighting == "curvature" else "trak",
            "damping": self.kernel.damping,
        }
        self._made_with: dict[str, Any] = {**_versions(self.device), "settings": self._settings}
        logger.info(
            "Settings: %d parameters in %d tensors, %s, rows of %d numbers.",
            num_entries(self.parameters),
            len(self.parameters),
            self._settings,
            self.layout.width,
        )

    @classmethod
    def open(
        cls,
        path: str | PathLike[str] | RemotePlace,
        model: nn.Module,
        task: str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Tensor] | None = None,
        **overrides: Any,
    ) -> Self:
        """Continue with a store: every setting comes from its manifest.

        Args:
            path: Folder of the store, or its address in an object store.
            model: A module of the architecture that the store was made with.
            task: Needed only where the store was made with a model output function of one's own.
            **overrides: Arguments of the constructor that cannot be stored (a projector or gradient computer of
                one's own, ``collate``, ``device``, ``progress``) or that may change (``kernel``, ``damping``).

        Raises:
            MissingStoreError: If there is no store at the path.
            InvalidInputError: If a setting of one's own is needed and was not passed.
        """
        place = resolve_place(path)
        with open_store(place) as store:
            manifest = store.manifest
        settings = dict(manifest.made_with.get("settings", {}))
        settings["grad_wrt"] = list(manifest.fingerprint["parameters"])
        # Stores of older versions say nothing of it, and hold gradients as they are.
        settings["normalize"] = Normalization(**settings.get("normalize", {}))
        settings.update(overrides)
        stored_task = settings.pop("task", None)
        needed = [name for name, value in settings.items() if value is None]
        if task is None and stored_task is None:
            needed.append("task")
        if needed:
            raise InvalidInputError(
                f"{place} was made with {needed} of the user's own, which a store cannot keep. Pass "
                f"{', '.join(f'{name}=...' for name in needed)} to Attributor.open."
            )
        return cls(model, stored_task if task is None else task, place, **settings)

    @property
    def layout(self) -> FeatureLayout:
        """Segments of a feature row."""
        return self.projector.layout(self.parameters)

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of one train row of one checkpoint: its features, q and w, and its norm if that is kept."""
        return feature_table_spec(1, self.layout.width, self.dtype, {}, norms=self._store_norms).row_bytes

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

        Rows that are in the store already are not computed, and not loaded from the dataset. Checkpoints are
        recognised by their weights, so later calls may add some.

        Any number of processes may do this at the same time on the same path: they share the rows chunk by chunk,
        take over what a killed one left, and all return when every row is there.

        Args:
            data: A map-style dataset, or a DataLoader that reads one in order.
            checkpoints: ``None`` for the model as it is, a state dict, a path to a file or folder, or an iterable
                of these. Checkpoints of one run, 4 to 10 of them, are the cheapest way to better scores.
            checkpoint_loader: Turns an item of ``checkpoints`` into a state dict, where it is none of these.
            indices: Dataset index of every row, to select and order rows.
            batch_size: Samples per pass; ``None`` takes the loader's, or 32.
            dataset_id: The user's own name for the data, instead of a digest of up to 64 of its samples (of all, in
                a ``TensorDataset``); then no sample is loaded to recognise it.
            append: The data may have more rows than the store: if it begins with the stored ones, as far as the
                digest or ``dataset_id`` tells, the rest is appended. From then on the store is that of the longer data:
                each of its checkpoints has to be featurized again, for the new rows, before the next scoring.

        Returns:
            What was written by this call, and what was found or written by other processes.

        Raises:
            InvalidInputError: If the data, a batch or a checkpoint is not what is expected.
            NonFiniteError: If a value of a row is NaN or infinite; names the rows.
            ManifestMismatchError: If the store holds other settings or other data; names every difference.
            StoreError: If the store cannot be read or written.
        """
        rows = self._rows(data, indices, batch_size, "the train data")
        identity = rows.identity(dataset_id)
        names: list[str] = []
        written = 0
        appended_to = partial(_first_rows, rows, dataset_id) if append else None
        with (
            self._workspace.opened(self._manifest(identity), appended_to=appended_to) as workspace,
            borrow_model(self.model, self.device) as own,
        ):
            for checkpoint in iterate_checkpoints(checkpoints, checkpoint_loader):
                digest = self._load(checkpoint, own)
                written += self._featurize_checkpoint(workspace, checkpoint, digest, rows)
                names.append(checkpoint.name)
        if not names:
            raise InvalidInputError(
                "checkpoints is empty. Pass at least one, or leave it out for the model as it is."
            )
        if not isinstance(checkpoints, Iterator):
            self._sources.append((checkpoints, checkpoint_loader))
        found = len(names) * len(rows) - written
        logger.info("Featurized %d rows, found %d, for checkpoints %s.", written, found, names)
        return FeaturizeSummary(tuple(names), written, found)

    def score(
        self,
        data: Any,
        name: str = "targets",
        *,
        kernel: Literal["curvature", "trak", "dot", "cosine", "ekfac"] | None = None,
        damping: float | None = None,
        layout: Literal["stored", "joint"] = "stored",
        q: Literal["outside", "inside", "off"] = "outside",
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
            kernel: ``"curvature"``, ``"trak"`` (not weighted), ``"dot"`` (the product of gradients: no kernel),
                ``"cosine"``, or ``"ekfac"``, which needs :meth:`fit_curvature` and takes the targets' gradients anew;
                ``None`` is the attributor's.
            damping: Lambda in units of the kernel's mean eigenvalue (``"ekfac"``: that of every layer's curvature);
                ``None`` is the attributor's.
            layout: ``"joint"`` takes rows with a segment per module under one kernel, of the square of their width.
            q: Multiply the scores of a train row by its mean q over checkpoints (``"outside"``), the part of each
                checkpoint by its own (``"inside"``), or by nothing (``"off"``).
            checkpoint_weights: Factor of each checkpoint, in order, in place of 1/C: the learning rates for TracIn
                (with ``kernel="dot", q="inside"``), ``(1, -1)`` to subtract a base model (which wants ``q="off"`` or
                ``"inside"``, as the mean q is not subtracted).
            dense: Keep the ``(N, M)`` matrix on disk; without it scores are computed from the stored rows when asked.
            k: Without the matrix, find and keep this many most helpful and most harmful rows of every target now.
            checkpoints: The checkpoints to use, all of them featurized; ``None`` uses every one in the store.
            checkpoint_loader: As in :meth:`featurize`.
            indices: Dataset index of every target, to select and order targets.
            batch_size: Samples per pass; ``None`` takes the loader's, or 32.
            dataset_id: The user's own name for the targets, as in :meth:`featurize`.

        Returns:
            Scores ``(N, M)``.

        Raises:
            InvalidInputError: If a setting is unknown or does not fit the checkpoints.
            StateError: If train rows are pending, or the weights of a checkpoint are not to be found.
            ManifestMismatchError: If other targets or checkpoints were scored under this name.
            SingularKernelError: If the kernel has no inverse at the damping in force.
        """
        check_name(name, what="target set")
        settings = self._score_settings(
            kernel=kernel, damping=damping, layout=layout, q=q, checkpoint_weights=checkpoint_weights
        )
        if k is not None and positive_int(k=k) and dense:
            raise InvalidInputError(f"k={k} is for dense=False; dense scores answer top(k) for any k.")
        targets = self._rows(data, indices, batch_size, "the targets")
        identity = targets.identity(dataset_id)
        with (
            self._workspace.opened(self._manifest(None)) as workspace,
            borrow_model(self.model, self.device) as own,
        ):
            if settings.kernel == "ekfac":
                identity = {**identity, "curvature": self._fits(workspace.store()).record()}
            session = self._target_session(workspace, targets, name, settings, identity, own)
            used: list[str] | None = None
            if checkpoints is not None:
                used = [session.add(c) for c in iterate_checkpoints(checkpoints, checkpoint_loader)]
            train = complete_tables(workspace.store(), used)
            result = ScoreResult(
                workspace.store(), train, name, settings, self._base_settings, identity, len(targets)
            )
            settings.weights(len(train))
            if not (dense and result.is_finished()):
                session.find(train, self._candidates)
            source = self._source(workspace.store(), list(train.values()), name, settings)
            if dense:
                result.fill(source, device=self.device, progress=self._progress)
            kept = None if k is None else result.both_ends(source, k)
        if dense:
            return self.scores(name, **settings.view())
        return self._streamed(name, settings, list(train), kept)

    def fit_curvature(
        self,
        data: Any,
        checkpoints: CheckpointSource = None,
        *,
        settings: KroneckerSettings | None = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        dataset_id: str | None = None,
    ) -> None:
        """Fit the Kronecker-factored curvature (EK-FAC) of checkpoints, for ``score(..., kernel="ekfac")``.

        Takes two passes over the train rows, and the eigenvectors of every layer's sides once. A checkpoint that was
        fitted with these settings is not fitted again; a fit with others takes its place.

        Args:
            data: The train data, as given to :meth:`featurize`.
            checkpoints: The checkpoints to fit, all of them featurized; ``None`` fits every one in the store.
            settings: Which curvature; by default the true Fisher information where the task can draw labels.
            checkpoint_loader: As in :meth:`featurize`.
            indices: Dataset index of every row, as in :meth:`featurize`.
            batch_size: Samples per pass; ``None`` takes the loader's, or 32.
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
        identity = rows.identity(dataset_id)
        with (
            self._workspace.opened(self._manifest(identity)) as workspace,
            borrow_model(self.model, self.device) as own,
        ):
            store = workspace.store()
            fits = self._fits(store)
            fits.begin(settings or KroneckerSettings(), self.task, identity)

            def fit(digest: str, label: str) -> None:
                fits.fit(
                    digest,
                    self.task,
                    rows,
                    device=self.device,
                    label=f"Fitting the curvature of {label}",
                    progress=self._progress,
                )

            if checkpoints is not None:
                for checkpoint in iterate_checkpoints(checkpoints, checkpoint_loader):
                    digest = self._load(checkpoint, own)
                    complete_tables(store, [digest])
                    fit(digest, checkpoint.name)
                return
            visit_checkpoints(
                store,
                [digest for digest in checkpoint_tables(store) if not fits.has(digest)],
                self._candidates,
                lambda checkpoint: self._load(checkpoint, own),
                fit,
                purpose="to fit a curvature",
            )

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
        settings = self._score_settings(**view)
        if not dense:
            return self._streamed(name, settings, None, None)
        store = self._workspace.reader()
        table = finished_scores(store, name, settings, self._base_settings)
        stored = ScoreSettings.from_fingerprint(table.spec.fingerprint)
        train = list(complete_tables(store, list(table.spec.fingerprint["checkpoints"])).values())
        path = score_path(name, settings, self._base_settings)
        return self._scores(
            store, name, stored, train, StoredMatrix(table), path, partial(kept_verdict, store, path)
        )

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
        the same targets (another ``view``, ``calibrate=True``) trains nothing again.

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
            train_id: The user's own name for the training, instead of the source of ``train_fn``.
            indices: Dataset index of every target, as in :meth:`score`.
            batch_size: Targets per pass; ``None`` takes the loader's, or 32.
            dataset_id: The user's own name for the targets, as in :meth:`score`.
            **view: ``kernel``, ``damping``, ``layout``, ``q``, ``checkpoint_weights`` of the scores.

        Raises:
            InvalidInputError: If the budget is too small, texts or strata do not fit, or scores without a kernel are to
                be calibrated.
            StateError: If the scores were never computed.
            ManifestMismatchError: If ``data`` are not the targets that were scored.
            RetrainingError: If a training fails; names subset and seed.
        """
        check_budget(budget, calibrate=calibrate)
        targets = self._rows(data, indices, batch_size, "the targets")
        identity = targets.identity(dataset_id)
        scores = self.scores(name, **view)
        settings = self._score_settings(**view)
        path = score_path(name, settings, self._base_settings)
        with self._workspace.opened(self._manifest(None)) as workspace:
            table = workspace.store().open_table(path)
            compare_fingerprints(
                {"targets": table.spec.fingerprint["targets"]},
                {"targets": identity},
                where=path,
                remedy="Pass the targets that were scored under this name.",
            )
            rows = self._scored_rows(workspace.store(), table, name)
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
            verdict = judge(scores, rows, retrained, calibrate=calibrate, texts=texts, confidence=confidence)
            keep_verdict(workspace.store(), path, verdict)
        return verdict

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
        path = score_path(name, self._score_settings(**view), self._base_settings)
        with self._workspace.reading() as store:
            return calibrated_scores(
                self._scored_rows(store, store.open_table(path), name), verdict.calibration
            )

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
            tables = complete_tables(store, None).values()
            return np.stack([_stored_norms(table) for table in tables])

    def drop_checkpoint(self, name: str) -> None:
        """Remove the rows of a checkpoint from the store, for good: those of the train data and of all targets.

        Scores that were computed with it can no longer be opened; :meth:`drop_scores` removes them.

        Args:
            name: As in :attr:`FeaturizeSummary.checkpoints`, or the name of its table in the store: ``"ckpt-0"``.

        Raises:
            StateError: If nothing was featurized yet.
            InvalidInputError: If no checkpoint, or more than one, is called that.
            BusyError: If another process writes rows of it.
        """
        with self._workspace.opened(self._manifest(None)) as workspace:
            drop_checkpoint(workspace.store(), name)

    def drop_scores(self, name: str = "targets") -> None:
        """Remove the scores of a target set, made in whatever way, for good; the features of the targets stay.

        Raises:
            StateError: If nothing was featurized yet, or there are no such scores.
            BusyError: If another process computes them at this moment.
        """
        with self._workspace.opened(self._manifest(None)) as workspace:
            drop_scores(workspace.store(), check_name(name, what="target set"))

    # ---------------------------------------------------------------- featurizing

    def _rows(self, data: Any, indices: Sequence[int] | None, batch_size: int | None, what: str) -> Rows:
        size = None if batch_size is None else positive_int(batch_size=batch_size)
        return Rows(data, indices=indices, batch_size=size, collate=self._collate, what=what)

    def _load(self, checkpoint: Checkpoint, own: Mapping[str, Tensor]) -> str:
        """Load a checkpoint, let the task prepare for it, and return the digest of its weights."""
        load_into(self.model, checkpoint, own)
        self.task.prepare(self.model)
        return weights_digest(self.model)

    def _featurize_checkpoint(
        self, workspace: Workspace, checkpoint: Checkpoint, digest: str, rows: Rows
    ) -> int:
        """Featurize the train rows of the checkpoint that is loaded; return how many this process wrote."""
        model_id = workspace.model_id(digest)
        fingerprint = self._row_fingerprint(model_id, digest)
        table = workspace.late_table(
            f"ckpt-{model_id}",
            feature_table_spec(
                len(rows), self.layout.width, self.dtype, fingerprint, norms=self._store_norms
            ),
            {"name": checkpoint.name, "source": checkpoint.source},
        )
        try:
            return self._featurize(table, rows, model_id, f"Featurizing {checkpoint.name}")
        except ManifestMismatchError:
            if workspace.model_id(digest) == model_id:
                raise
        # Another process gave the number to another checkpoint just now, and the projection depends on it.
        return self._featurize_checkpoint(workspace, checkpoint, digest, rows)

    def _row_fingerprint(self, model_id: int, digest: str) -> dict[str, Any]:
        """Return what determines a checkpoint's rows: its weights, and the task's state if it has any."""
        state = self.task.state_digest()
        fingerprint = {"model_id": model_id, "weights": digest}
        return fingerprint if state is None else {**fingerprint, "task_state": state}

    def _featurize(
        self,
        table: LateTable,
        rows: Rows,
        model_id: int,
        label: str,
        projector: AbstractProjector | None = None,
    ) -> int:
        found: list[AbstractGradientComputer] = []

        def computer_for(batch: Batch, wanted: NDArray[np.int64]) -> AbstractGradientComputer:
            if not found and self._make_computer is None:
                with naming_rows(self.model, self.task, batch, wanted, rows.what):
                    found.append(self._choose_computer(batch))
            elif not found:
                found.append(self._computer())
                found[0].load_model_params(self.model)
            return found[0]

        return featurize_rows(
            table,
            rows,
            computer_for,
            self.projector if projector is None else projector,
            model_id=model_id,
            device=self.device,
            label=label,
            normalization=self.normalization,
            progress=self._progress,
        )

    def _choose_computer(self, batch: Batch) -> AbstractGradientComputer:
        """Decide ``gradient_computer="auto"`` by trying the first samples; return the one that was tried."""
        name, reason, computer = choose_gradient_computer(self.model, self.task, batch, list(self.parameters))
        self._make_computer = GRADIENT_COMPUTERS[name]
        # The manifest of a store not yet made refers to both.
        self._settings["gradient_computer"] = name
        self._made_with["gradient_computer_reason"] = reason
        return computer

    def _computer(self) -> AbstractGradientComputer:
        return (self._make_computer or FunctionalGradientComputer)(
            model=self.model,
            task=self.task,
            grad_dim=num_entries(self.parameters),
            dtype=None,
            device=self.device,
            grad_wrt=list(self.parameters),
        )

    # ---------------------------------------------------------------- scoring

    @property
    def _base_settings(self) -> ScoreSettings:
        """Return how scores are made where a call does not say otherwise."""
        name: Literal["curvature", "trak"] = "curvature" if self.kernel.weighting == "curvature" else "trak"
        return ScoreSettings(kernel=name, damping=self.kernel.damping)

    def _score_settings(self, **view: Unpack[ScoreView]) -> ScoreSettings:
        """Return the settings of one call, with the attributor's where it leaves them open."""
        base = self._base_settings
        kernel = view.get("kernel") or base.kernel
        damping = view.get("damping")
        if kernel in ("curvature", "trak"):
            damping = base.damping if damping is None else damping
            _decide_kernel(kernel, DEFAULT_DAMPING if damping is None else damping, self.task)
        layout = "stored" if len(self.layout.segments) == 1 else view.get("layout", "stored")
        return ScoreSettings(
            kernel=kernel,
            damping=damping,
            layout=layout,
            q=view.get("q", "outside"),
            checkpoint_weights=view.get("checkpoint_weights"),
        )

    def _source(
        self,
        store: AbstractFeatureStore,
        train: Sequence[AbstractRowTable],
        name: str,
        settings: ScoreSettings,
    ) -> ScoreSource:
        return ScoreSource(store, train, name, settings, layout=self.layout, device=self.device)

    def _scored_rows(self, store: AbstractFeatureStore, table: AbstractRowTable, name: str) -> ScoredRows:
        """Return the stored rows behind a table of scores."""
        settings = ScoreSettings.from_fingerprint(table.spec.fingerprint)
        return ScoredRows(
            store=store,
            train=complete_tables(store, list(table.spec.fingerprint["checkpoints"])),
            name=name,
            settings=settings,
            layout=self.layout if settings.layout == "stored" else FeatureLayout.joint(self.layout.width),
            device=self.device,
        )

    def _streamed(
        self,
        name: str,
        settings: ScoreSettings,
        digests: list[str] | None,
        kept: NDArray[np.float64] | None,
    ) -> Scores:
        """Return scores that are computed when asked, of the checkpoints that the targets were featurized with."""
        store = self._workspace.reader()
        train = scorable_tables(store, name, settings, digests)
        matrix = StreamedMatrix(self._source(store, train, name, settings), kept)
        return self._scores(store, name, settings, train, matrix, target_folder(name, settings))

    def _scores(
        self,
        store: AbstractFeatureStore,
        name: str,
        settings: ScoreSettings,
        train: Sequence[AbstractRowTable],
        matrix: AbstractScoreMatrix,
        path: str,
        verdict: Callable[[], Verdict | None] = lambda: None,
    ) -> Scores:
        return Scores(
            matrix,
            self._source(store, train, name, settings),
            name=name,
            settings={"checkpoints": len(train), "proj_dim": self.layout.width, **settings.to_json()},
            where=None if self.path is None else f"{self.path}:{path}",
            verdict=verdict,
        )

    def _target_session(
        self,
        workspace: Workspace,
        targets: Rows,
        name: str,
        settings: ScoreSettings,
        identity: Mapping[str, Any],
        own: Mapping[str, Tensor],
    ) -> TargetSession:
        """Return what computes the features of a target set, with the model of this attributor."""
        preconditioned = settings.kernel == "ekfac"

        def featurize(table: LateTable, rows: Rows, model_id: int, label: str) -> int:
            if not preconditioned:
                return self._featurize(table, rows, model_id, label)
            fits, digest = self._fits(workspace.store()), table.spec.fingerprint["weights"]
            inverse = Preconditioner(fits.curvature(digest, self.device), damping=settings.damping or 0.0)
            return self._featurize(
                table, rows, model_id, label, PreconditionedProjector(self.projector, inverse)
            )

        return TargetSession(
            workspace,
            targets,
            name=name,
            folder=target_folder(name, settings),
            identity=identity,
            load=lambda checkpoint: self._load(checkpoint, own),
            spec=lambda model_id, digest: target_table_spec(
                len(targets),
                self.layout.width,
                "float32" if preconditioned else self.dtype,  # an inverse curvature is beyond float16's range
                {**self._row_fingerprint(model_id, digest), "targets": dict(identity)},
            ),
            featurize=featurize,
        )

    def _fits(self, store: AbstractFeatureStore) -> CurvatureFits:
        return CurvatureFits(store, self.model, self.parameters)

    def _candidates(self, store: AbstractFeatureStore, needed: Iterable[str]) -> Iterator[Checkpoint]:
        """Yield checkpoints that may hold the needed weights: from featurize, from disk, the model's own."""
        for source in self._sources:
            yield from iterate_checkpoints(*source)
        tables = checkpoint_tables(store)
        for digest in list(needed):
            path = store.attributes(tables[digest]).get("source")
            if path is not None and Path(path).is_file():
                yield from iterate_checkpoints(path)
        yield from iterate_checkpoints(None)

    # ---------------------------------------------------------------- settings

    def _gradient_fingerprint(self) -> dict[str, Any]:
        """Return what determines the gradients: the computer's settings, and how they are normalised."""
        computed, normalized = self._computer().fingerprint(), self.normalization.fingerprint()
        if computed.keys() & normalized.keys():
            raise InvalidInputError(
                f"The gradient computer normalises already ({computed['normalization']}), and normalize="
                f"{normalized['normalization']} would do it again. Leave out one of the two."
            )
        return {**computed, **normalized}

    def _manifest(self, dataset: Mapping[str, Any] | None) -> Manifest:
        """Return the manifest of these settings; without a dataset, only what the settings determine."""
        fingerprint: dict[str, Any] = {
            **dtype_fingerprint(self.dtype),
            "feature_width": self.layout.width,
            "gradients": self._gradient_fingerprint(),
            "layout": self.layout.to_json(),
            "mode": "eval",
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "projector": self.projector.fingerprint(),
            "task": describe_task(self.task),
        }
        if dataset is not None:
            fingerprint["dataset"] = dict(dataset)
        return Manifest(fingerprint, self._made_with)


def _decide_computer(
    choice: str | GradientComputerFactory,
) -> tuple[str | None, GradientComputerFactory | None]:
    """Return the gradient computer's name and how to make one.

    The name is ``None`` for one of the user's own; how to make it is ``None`` until the first samples decide.
    """
    if callable(choice):
        return None, choice
    name = one_of(("auto", *GRADIENT_COMPUTERS), gradient_computer=choice)
    return name, None if name == "auto" else GRADIENT_COMPUTERS[name]


def _decide_kernel(kernel: str, damping: float | str, task: AbstractModelOutput) -> KernelSettings:
    """Return the kernel settings with every ``"auto"`` decided."""
    name = one_of(("auto", "curvature", "trak"), kernel=kernel)
    if name == "curvature" and not task.has_curvature:
        raise InvalidInputError(
            f"kernel='curvature' needs a loss that is curved in f, but the loss of {type(task).__name__} is linear in "
            "it: every weight would be zero. Use kernel='trak'."
        )
    curved = name == "curvature" or (name == "auto" and task.has_curvature)
    lam = DEFAULT_DAMPING if damping == "auto" else damping
    return KernelSettings(weighting="curvature" if curved else "none", damping=lam)  # type: ignore[arg-type]


def _versions(device: torch.device) -> dict[str, Any]:
    return {
        "trak_lite": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": str(device),
    }


def _stored_norms(table: AbstractRowTable) -> NDArray[np.float32]:
    """Return the norms ``(N,)`` that stand beside a checkpoint's features."""
    if GRADIENT_NORM not in [column.name for column in table.spec.columns]:
        raise StateError(
            f"ckpt-{table.spec.fingerprint['model_id']} has no gradient norms: it was featurized with "
            "store_norms=False. Featurize into another path with store_norms=True."
        )
    return table.read(GRADIENT_NORM)


def _first_rows(rows: Rows, dataset_id: str | None, num_rows: int) -> dict[str, Any]:
    """Return the identity of the first rows of the data."""
    return rows.identity(dataset_id, num_rows=num_rows)
