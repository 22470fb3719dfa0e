"""``TRAKer``: the original TRAK's interface over the same rooms, so that porting is a change of import.

The numbers are those of release 0.3.2 (arXiv:2303.14186): features :math:`X = G R / \\sqrt P` with an
unscaled R, kernel :math:`X^\\top X + \\lambda I`, its inverse divided by the mean of its absolute entries,
scores (mean over checkpoints of products) times (mean over checkpoints of q). Sums are accumulated in
float64 where the original uses the storage dtype; steps out of order raise, where the original goes on.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite._batches import batch_size, move_batch, take_rows
from trak_lite._session import resolve_device
from trak_lite._validate import positive_int
from trak_lite.checkpoints import Checkpoint, load_into, weights_digest
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    select_parameters,
)
from trak_lite.modelout_functions import AbstractModelOutput, describe_task, resolve_task
from trak_lite.pipeline import (
    FEATURES,
    SCORES,
    LateTable,
    compute_features,
    feature_table_spec,
    has_kernel,
    kernels_of,
    put_features,
    score_rows,
    score_table_spec,
)
from trak_lite.projectors import AbstractProjector, BasicProjector, ProjectionType
from trak_lite.scoring import KernelSettings, precondition
from trak_lite.store import AbstractRowTable, Manifest
from trak_lite.types import Batch, FeatureLayout, ParameterShapes, num_entries
from trak_lite.workspace import Workspace

__all__ = ["TRAKer"]

logger = logging.getLogger(__name__)


class TRAKer:
    """The original TRAK's six verbs. Open to subclassing, because public code does.

    Deliberate differences: every step out of order, and every mismatch with what is on disk, raises; a
    partly featurized batch resumes; the projection is Rademacher on every device and not bit-equal to the
    original's; save folders of the original are not read.
    """

    def __init__(
        self,
        model: nn.Module,
        task: str | AbstractModelOutput | type[AbstractModelOutput],
        train_set_size: int,
        save_dir: str | PathLike[str] = "./trak_results",
        load_from_save_dir: bool = True,
        device: str | torch.device = "auto",
        gradient_computer: Callable[..., AbstractGradientComputer] = FunctionalGradientComputer,
        projector: AbstractProjector | None = None,
        saver: None = None,
        score_computer: None = None,
        proj_dim: int = 2048,
        logging_level: int = logging.INFO,
        use_half_precision: bool = True,
        proj_max_batch_size: int = 32,
        projector_seed: int = 0,
        grad_wrt: Iterable[str] | None = None,
        lambda_reg: float = 0.0,
    ) -> None:
        """Check the settings and open what is in ``save_dir``, if anything.

        Args:
            model: The module; it is moved nowhere, and holds the loaded checkpoint's weights after a load.
            task: Name, class or instance of a model output function.
            train_set_size: N.
            save_dir: Folder that holds the store.
            load_from_save_dir: Accepted for the original's signature; opening is safe from any process.
            device: ``"auto"`` is where the model is.
            gradient_computer: Class or partial of one.
            projector: A projector of one's own; ``None`` makes a Rademacher one.
            saver: Not supported; the rows are kept in the store.
            score_computer: Not supported; the kernel is solved in float64.
            proj_dim: K; ignored if ``projector`` is given.
            logging_level: Level of this module's logger.
            use_half_precision: Store features in float16, else float32.
            proj_max_batch_size: Accepted for the original's signature.
            projector_seed: Seed of the projection.
            grad_wrt: Names of the parameters to keep; ``None`` keeps all, frozen ones included.
            lambda_reg: Absolute ridge term, in units of a squared feature.

        Raises:
            InvalidInputError: If a setting is not allowed, or a name in ``grad_wrt`` is unknown.
            ManifestMismatchError: If ``save_dir`` holds features of other settings; names every difference.
        """
        for name, value in (("saver", saver), ("score_computer", score_computer)):
            if value is not None:
                raise InvalidInputError(
                    f"{name}={value!r} is not supported: rows are kept in the store and scored in float64. Leave it out."
                )
        del load_from_save_dir, proj_max_batch_size
        logger.setLevel(logging_level)
        self.model = model
        self.task = resolve_task(task)
        self.train_set_size = positive_int(train_set_size=train_set_size)
        self.device = resolve_device(device, model)
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.grad_wrt = grad_wrt
        self.lambda_reg = lambda_reg
        every = [name for name, _ in model.named_parameters()]
        kept = select_parameters(model, every if grad_wrt is None else grad_wrt)
        self.parameters: ParameterShapes = {name: tuple(p.shape) for name, p in kept.items()}
        self.num_params_for_grad = num_entries(self.parameters)
        self.normalize_factor = math.sqrt(self.num_params_for_grad)
        self.projector = projector or BasicProjector(
            grad_dim=self.num_params_for_grad,
            proj_dim=positive_int(proj_dim=proj_dim),
            seed=projector_seed,
            proj_type=ProjectionType.rademacher,
            device=self.device,
        )
        self.proj_dim = self._layout.width
        self.gradient_computer = gradient_computer(
            model=model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=self.device,
            grad_wrt=list(self.parameters),
        )
        self.save_dir = Path(save_dir).absolute()
        self._kernel = KernelSettings(weighting="none", lambda_reg=float(lambda_reg), rescale_inverse=True)
        self._workspace = Workspace(str(self.save_dir / "trak.zarr"))
        self._workspace.open(self._manifest())
        # A notebook builds a second TRAKer over the first: the first must let go of its locks when it is gone.
        self._finalizer = weakref.finalize(self, self._workspace.close)
        self._train: _Cursor | None = None
        self._target: _Cursor | None = None

    def close(self) -> None:
        """Release the store's files and locks; rows put so far are safe."""
        self._finalizer()

    @property
    def _layout(self) -> FeatureLayout:
        return self.projector.layout(self.parameters)

    @property
    def _dtype_name(self) -> str:
        return "float16" if self.dtype == torch.float16 else "float32"

    def _manifest(self) -> Manifest:
        return Manifest(
            {
                "dataset": {"num_rows": self.train_set_size},
                "dtype": self._dtype_name,
                "feature_width": self.proj_dim,
                "layout": self._layout.to_json(),
                "mode": "eval",
                "normalisation": "1/sqrt(P)",
                "parameters": {name: list(shape) for name, shape in self.parameters.items()},
                "projector": self.projector.fingerprint(),
                "task": describe_task(self.task),
            }
        )

    # ---------------------------------------------------------------- featurizing

    def load_checkpoint(self, checkpoint: Mapping[str, Tensor], model_id: int) -> None:
        """Load a state dict and make ready to featurize under ``model_id``; the cursor starts at row 0.

        Args:
            checkpoint: State dict of the model.
            model_id: Id of the checkpoint; an id that was featurized with other weights is refused.

        Raises:
            CheckpointError: If the state dict does not fit the model.
            ManifestMismatchError: If the id was featurized with other weights.
        """
        digest = self._load(checkpoint)
        spec = feature_table_spec(
            self.train_set_size,
            self.proj_dim,
            self._dtype_name,
            {"model_id": _checked_id(model_id), "weights": digest},
        )
        self._train = _Cursor(self._workspace.late_table(f"ckpt-{model_id}", spec), model_id)

    def featurize(
        self,
        batch: Batch,
        inds: Sequence[int] | NDArray[Any] | Tensor | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute and keep the features of a batch; rows that are done already are skipped.

        Args:
            batch: B train samples.
            inds: Train index of every sample; or
            num_samples: B, to write at the cursor and advance it.

        Raises:
            StateError: If no checkpoint is loaded.
            InvalidInputError: If not exactly one of ``inds`` and ``num_samples`` is given, or it does not fit.
        """
        if self._train is None:
            raise StateError("No checkpoint is loaded. Call load_checkpoint(state_dict, model_id=...) first.")
        self._put(self._train, batch, inds, num_samples, "the train data")

    def finalize_features(self, model_ids: Iterable[int] | None = None, del_grads: bool = False) -> None:
        """Check that the ids are complete and make their kernels.

        Args:
            model_ids: Ids to finalize; ``None`` takes all.
            del_grads: Accepted for the original's signature; the rows serve both purposes and are kept.

        Raises:
            StateError: If an id is unknown or not fully featurized.
            SingularKernelError: If a kernel has no inverse (fewer rows than features and ``lambda_reg=0``).
        """
        if del_grads:
            logger.warning("del_grads=True: the same rows are gradients and features here, so they are kept.")
        for model_id in self._known_ids() if model_ids is None else list(model_ids):
            self._complete_train_table(model_id)
            kernels_of(
                self._workspace.store(), f"ckpt-{model_id}", self._kernel, self._layout, device=self.device
            )
        if self._train is not None:
            self._train.position = 0

    # ---------------------------------------------------------------- scoring

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Tensor], model_id: int, num_targets: int
    ) -> None:
        """Load a featurized checkpoint and make ready for the targets of an experiment.

        Args:
            exp_name: Name of the experiment: one set of targets.
            checkpoint: State dict that ``model_id`` was featurized with.
            model_id: Id of the checkpoint.
            num_targets: M.

        Raises:
            StateError: If the id is not fully featurized or not finalized.
            ManifestMismatchError: If the weights differ from the featurized ones, or the experiment has another M.
        """
        train = self._complete_train_table(model_id)
        if not self._is_finalized(model_id):
            raise StateError(
                f"Model id {model_id} is not finalized. Call finalize_features() before scoring."
            )
        digest = self._load(checkpoint)
        fingerprint = {"model_id": _checked_id(model_id), "weights": digest}
        stored = train.spec.fingerprint["weights"]
        if stored != digest:
            raise InvalidInputError(
                f"Model id {model_id} was featurized with other weights (digest {stored[:12]}, given {digest[:12]}). "
                "Pass the state dict that load_checkpoint was given for this id."
            )
        spec = feature_table_spec(
            positive_int(num_targets=num_targets), self.proj_dim, self._dtype_name, fingerprint
        )
        self._refuse_other_size(exp_name, num_targets)
        late = self._workspace.late_table(f"targets/{exp_name}/ckpt-{model_id}", spec)
        self._target = _Cursor(late, model_id)

    def score(
        self,
        batch: Batch,
        inds: Sequence[int] | NDArray[Any] | Tensor | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute and keep the features of a batch of targets; targets that are done already are skipped.

        Args:
            batch: B targets.
            inds: Index of every target; or
            num_samples: B, to write at the cursor and advance it.

        Raises:
            StateError: If no scoring was started.
            InvalidInputError: If not exactly one of ``inds`` and ``num_samples`` is given, or it does not fit.
        """
        if self._target is None:
            raise StateError("No scoring was started. Call start_scoring_checkpoint(...) first.")
        self._put(self._target, batch, inds, num_samples, "the targets")

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> NDArray[np.float32]:
        """Return the scores of an experiment.

        Args:
            exp_name: Name of the experiment.
            model_ids: Ids to average over; ``None`` takes all.
            allow_skip: Leave out ids whose targets are missing, with a warning, instead of raising.

        Returns:
            ``(N, M)`` float32, train rows by targets.

        Raises:
            StateError: If there is no such experiment, or targets of an id are missing.
        """
        ids = self._scorable_ids(
            exp_name, self._known_ids() if model_ids is None else list(model_ids), allow_skip
        )
        store = self._workspace.store()
        train = [self._complete_train_table(model_id) for model_id in ids]
        preconditioned = []
        for model_id in ids:
            kernels = kernels_of(store, f"ckpt-{model_id}", self._kernel, self._layout, device=self.device)
            targets = store.open_table(f"targets/{exp_name}/ckpt-{model_id}").read(FEATURES)
            rows = torch.from_numpy(targets).to(self.device)
            preconditioned.append(precondition(rows, kernels, layout=self._layout).float())
        fingerprint = {
            "kernel": self._kernel.to_json(),
            "model_ids": ids,
            "targets": [
                store.open_table(f"targets/{exp_name}/ckpt-{model_id}").content_key() for model_id in ids
            ],
            "train_rows": [table.content_key() for table in train],
        }
        spec = score_table_spec(self.train_set_size, len(preconditioned[0]), fingerprint)
        # Scores are written once; another set of checkpoints is another result of the same experiment.
        table = store.create_table(f"scores/{exp_name}/{Manifest(fingerprint).digest()[:16]}", spec)
        score_rows(table, train, preconditioned, device=self.device, label=f"Scoring {exp_name!r}")
        self.scores = table.read(SCORES)
        if self._target is not None:
            self._target.position = 0
        return self.scores

    # ---------------------------------------------------------------- the cursor and what it writes

    def _load(self, checkpoint: Mapping[str, Tensor]) -> str:
        """Load a state dict, in eval mode, and return its digest."""
        load_into(self.model, Checkpoint("given", None, lambda: checkpoint))
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        return weights_digest(self.model)

    def _put(
        self,
        cursor: _Cursor,
        batch: Batch,
        inds: Sequence[int] | NDArray[Any] | Tensor | None,
        num_samples: int | None,
        what: str,
    ) -> None:
        rows = cursor.rows(inds, num_samples)
        if batch_size(batch) != len(rows):
            raise InvalidInputError(
                f"The batch holds {batch_size(batch)} samples, but {len(rows)} rows were named. They must agree."
            )
        waiting = np.flatnonzero(np.isin(rows, cursor.table.pending()))
        if len(waiting):
            if len(waiting) < len(rows):
                batch = take_rows(batch, waiting.tolist())
            batch = move_batch(batch, self.device)
            features, terms = compute_features(
                self.gradient_computer, self.projector, batch, model_id=cursor.model_id
            )
            put_features(
                cursor.table,
                rows[waiting],
                features / self.normalize_factor,
                terms,
                self.gradient_computer,
                batch,
                what,
            )
        if num_samples is not None:
            cursor.position += num_samples

    # ---------------------------------------------------------------- ids

    def _known_ids(self) -> list[int]:
        """Return the ids that have rows, ascending."""
        names = self._workspace.store().table_names()
        ids = [int(name.removeprefix("ckpt-")) for name in names if name.startswith("ckpt-")]
        return sorted(ids)

    def _complete_train_table(self, model_id: int) -> AbstractRowTable:
        table = self._workspace.table(f"ckpt-{model_id}")
        if table is None:
            raise StateError(
                f"Model id {model_id} was never featurized. Call load_checkpoint and featurize first."
            )
        if not table.complete:
            raise StateError(
                f"Model id {model_id} has {int(table.done().sum())} of {self.train_set_size} train rows. "
                "Featurize the others before finalizing or scoring."
            )
        return table

    def _is_finalized(self, model_id: int) -> bool:
        return has_kernel(self._workspace.store(), f"ckpt-{model_id}", self._kernel, self._layout)

    def _refuse_other_size(self, exp_name: str, num_targets: int) -> None:
        for path in self._workspace.store().table_names(f"targets/{exp_name}"):
            size = self._workspace.store().open_table(path).spec.num_rows
            if size != num_targets:
                raise InvalidInputError(
                    f"Experiment {exp_name!r} has {size} targets, got num_targets={num_targets}. One experiment is one "
                    "set of targets: use another exp_name for another set."
                )

    def _scorable_ids(self, exp_name: str, ids: list[int], allow_skip: bool) -> list[int]:
        """Return the ids whose targets are complete; raise for the others unless they may be skipped."""
        tables = {model_id: self._workspace.table(f"targets/{exp_name}/ckpt-{model_id}") for model_id in ids}
        if all(table is None for table in tables.values()):
            raise StateError(
                f"There is no experiment {exp_name!r} for ids {ids}. Call start_scoring_checkpoint first."
            )
        missing = [model_id for model_id, table in tables.items() if table is None or not table.complete]
        if missing and not allow_skip:
            raise StateError(
                f"Targets of experiment {exp_name!r} are missing for model ids {missing}. Score them, name the ids to "
                "use in model_ids, or pass allow_skip=True."
            )
        if missing:
            logger.warning(
                "Experiment %r: left out model ids %s, whose targets are missing.", exp_name, missing
            )
        usable = [model_id for model_id in ids if model_id not in missing]
        if not usable:
            raise StateError(f"No model id of experiment {exp_name!r} has all its targets. Score them first.")
        return usable


class _Cursor:
    """Where the next batch goes that names no rows."""

    def __init__(self, table: LateTable, model_id: int) -> None:
        self.table = table
        self.model_id = model_id
        self.position = 0

    def rows(
        self, inds: Sequence[int] | NDArray[Any] | Tensor | None, num_samples: int | None
    ) -> NDArray[np.int64]:
        """Return the rows that a batch goes to."""
        if (inds is None) == (num_samples is None):
            raise InvalidInputError(
                "Exactly one of inds and num_samples must be given, got "
                + ("neither." if inds is None else "both.")
            )
        if num_samples is not None:
            rows = np.arange(self.position, self.position + positive_int(num_samples=num_samples))
        else:
            given = np.asarray(inds).reshape(-1)
            if not np.issubdtype(given.dtype, np.integer):
                raise InvalidInputError(f"inds must be integers, got {given.dtype}.")
            rows = given.astype(np.int64)
        count = self.table.spec.num_rows
        outside = rows[(rows < 0) | (rows >= count)]
        if outside.size:
            raise InvalidInputError(
                f"Rows {outside[:5].tolist()} do not exist: there are rows 0 to {count - 1}. Check the set's size, "
                "and that the cursor was reset by loading the checkpoint."
            )
        return rows


def _checked_id(model_id: int) -> int:
    if isinstance(model_id, bool) or not isinstance(model_id, int) or model_id < 0:
        raise InvalidInputError(f"model_id must be an integer of at least 0, got {model_id!r}.")
    return model_id
