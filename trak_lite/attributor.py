"""The native facade: featurize a train set, score targets, and the one place that names the defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from os import PathLike
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite._validate import positive_int
from trak_lite.data.datasets import HeldRows
from trak_lite.errors import InvalidInputError
from trak_lite.featurizing.session import Run, marking_last, stored_norms
from trak_lite.gradient_computers._base import ParameterChoice
from trak_lite.gradient_computers.normalization import Normalization
from trak_lite.methods import Method
from trak_lite.models.checkpoints import CheckpointSource, iterate_checkpoints
from trak_lite.projectors import AbstractProjector
from trak_lite.run.settings import AttributorSettings, GradientComputerFactory, Task, stored_arguments
from trak_lite.run.tables import complete_tables, drop_checkpoint
from trak_lite.run.workspace import Workspace, naming_dropped
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.stored import ScoreResult, drop_scores, score_source, stored_scores, streamed_scores
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store
from trak_lite.store._names import check_name
from trak_lite.store.remote.place import resolve_place
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
        method: Method = "auto",
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
            layout: ``"module"`` gives every module K features of its own, ``"joint"`` adds up the features of all
                parameters, as TRAK does; ``"auto"`` takes the former, but for a projector of one's own.
            method: How stored rows become scores where :meth:`score` does not say: a method of
                :mod:`trak_lite.methods` or its name. ``"auto"`` takes the first of ``"GaussNewton"``, ``"Fisher"``
                (where f is a log-likelihood, or a sum over tokens or labels, and K at most 4096) and ``TRAK`` with the
                default damping that the task has all for. ``"Fisher"`` takes 4 K further gradients per checkpoint in
                :meth:`featurize`, 32 per train row at most.
            collate: Turns a list of samples into a batch, where :class:`~trak_lite.Rows` does not say.
            batch_size: Samples per pass, where neither ``Rows`` nor a DataLoader says; ``None`` is 32.
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
        settings = AttributorSettings(
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
            method=method,
        )
        self._settings = settings
        self.task, self.device, self.dtype = settings.task, settings.device, settings.dtype
        self.parameters, self.projector = settings.parameters, settings.projector
        self.normalization, self.method = settings.normalization, settings.method
        self._workspace = Workspace(self.path)
        self._run = Run(
            model,
            settings,
            self._workspace,
            collate=collate,
            batch_size=None if batch_size is None else positive_int(batch_size=batch_size),
            progress=progress,
            distributed=distributed,
        )
        self._held: HeldRows | None = None
        """A few train rows, as they were last given: they are computed again when targets are scored."""

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
                one's own, ``collate``, ``device``, ``progress``) or that may change (``method``).

        Raises:
            MissingStoreError: If there is no store at the path.
            ManifestMismatchError: If an older version of trak_lite wrote the store.
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
            data: A map-style dataset, a DataLoader that reads one in order, or :class:`~trak_lite.Rows` of one, which
                select and order rows and set the batch size. It is held until the next call, for methods that are
                fitted to it.
            checkpoints: ``None`` for the model as it is, a state dict, a path to a file or folder, or an iterable
                of these. Checkpoints of one run, 4 to 10 of them, are the cheapest way to better scores.
            checkpoint_loader: Turns an item of ``checkpoints`` into a state dict, where it is none of these.
            append: The data may have more rows than the store: if it begins with the stored ones, as far as the
                digest or the name of ``Rows`` tells, the rest is appended. From then on the store is that of the longer
                data: each of its checkpoints has to be featurized again, for the new rows, before the next scoring.

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
        rows = self._run.rows(data, "the train data")
        names: list[str] = []
        written = 0
        once = isinstance(checkpoints, Iterator)
        appended_to = (lambda num_rows: rows.identity(num_rows=num_rows)) if append else None
        with (
            self._run.joined("featurize") as ranks,
            self._run.session(rows.identity(), appended_to=appended_to, ranks=ranks) as session,
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
        self._held, self._run.train = rows.held, rows
        if not once:
            self._run.sources.append((checkpoints, checkpoint_loader))
        rows_found = len(names) * len(rows) - written
        logger.info("Featurized %d rows, found %d, for checkpoints %s.", written, rows_found, names)
        return FeaturizeSummary(tuple(names), written, rows_found)

    def score(
        self,
        data: Any,
        name: str = "targets",
        *,
        method: Method | None = None,
        dense: bool = True,
        k: int | None = None,
        checkpoints: CheckpointSource = None,
        checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
    ) -> Scores:
        """Score every train row for every target.

        The result is kept under ``name``: the same call again returns it, or resumes it after a kill. Another
        method reads the same stored rows of train set and targets, whose gradients are not computed again (but for the
        targets of :class:`~trak_lite.methods.EKFAC`), and is kept beside the first one. What a method needs to have
        fitted to the train data is fitted by the first call with it.

        Args:
            data: The targets: a map-style dataset, a DataLoader that reads one in order, or :class:`~trak_lite.Rows`
                of one.
            name: Name of the target set.
            method: A method of :mod:`trak_lite.methods`, its name, or its name and fields
                (``{"name": "TracIn", "learning_rates": [0.1, 0.05]}``); ``None`` is the attributor's.
            dense: Keep the ``(N, M)`` matrix on disk; without it scores are computed from the stored rows when asked.
            k: Without the matrix, find and keep this many most helpful and most harmful rows of every target now.
            checkpoints: The checkpoints to use, all of them featurized; ``None`` uses every one in the store.
            checkpoint_loader: As in :meth:`featurize`.

        Returns:
            Scores ``(N, M)``.

        Raises:
            InvalidInputError: If a setting is unknown or does not fit the checkpoints.
            StateError: If train rows are pending, the weights of a checkpoint are not to be found, or the method has to
                be fitted and this attributor was not given the train data.
            ManifestMismatchError: If other targets or checkpoints were scored under this name, or stored rows of
                targets or train data do not come out as they are stored: the data or the model were changed.
            SingularKernelError: If the kernel has no inverse at the damping in force.
            RankError: If another rank of a distributed run failed, or does something else.
        """
        check_name(name, what="target set")
        chosen = self._settings.scored_by(method)
        if k is not None and positive_int(k=k) and dense:
            raise InvalidInputError(f"k={k} is for dense=False; dense scores answer top(k) for any k.")
        targets = self._run.rows(data, "the targets")
        with (
            self._run.joined(f"score {name!r}") as ranks,
            self._run.session(ranks=ranks, train=self._held) as session,
            naming_dropped(session.store),
        ):
            target_set = session.target_set(targets, name, chosen)
            used: list[str] | None = None
            if checkpoints is not None:
                found = iterate_checkpoints(checkpoints, checkpoint_loader)
                used = [session.add_targets(target_set, checkpoint) for checkpoint in found]
            train = complete_tables(session.store, used)
            result = ScoreResult(
                session.store, train, name, chosen, self.method, target_set.identity, len(targets)
            )
            chosen.weights(len(train))
            ranks.agree("scores to make (digest of rows, targets and settings)", result.digest())
            said = ranks.broadcast("whether they are there", lambda: str(dense and result.is_finished()))
            finished = session.agreed(said == "True")
            if not finished:
                session.fit(chosen, train)
                session.find_targets(target_set, train)
            session.compare_targets(target_set, train)
            source = score_source(
                session.store, list(train.values()), name, chosen, self._settings, ranks=ranks
            )
            if dense and not finished:
                result.fill(source, device=self.device, progress=self._run.progress, watch=ranks.watch)
            ends = None if k is None else result.top_and_bottom(source, k, ranks=ranks)
        if dense:
            return stored_scores(self._workspace, self._settings, name, chosen, run=self._run)
        return streamed_scores(
            self._workspace, self._settings, name, chosen, list(train), ends, run=self._run
        )

    def scores(self, name: str = "targets", *, method: Method | None = None, dense: bool = True) -> Scores:
        """Return the scores of a target set from the store, without the data and without a gradient.

        Args:
            name: Name of the target set.
            method: As in :meth:`score`.
            dense: Return the matrix that was kept; ``False`` computes scores from the stored rows when they are asked
                for, which must be there for every checkpoint that the targets were featurized with.

        Raises:
            InvalidInputError: If the method is unknown or does not fit the checkpoints.
            StateError: If they were never computed, or not finished.
            ManifestMismatchError: If they were made by an attributor with another method.
        """
        check_name(name, what="target set")
        read = stored_scores if dense else streamed_scores
        return read(self._workspace, self._settings, name, self._settings.scored_by(method), run=self._run)

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

        with self._run.joined(call) as ranks:
            ranks.once("what is dropped", dropped)
