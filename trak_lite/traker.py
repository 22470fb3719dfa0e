r"""``TRAKer``: the interface of the original TRAK package. To port code, change the import.

The formulas are those of release 0.3.2 (arXiv:2303.14186): features :math:`X = G R / \sqrt P` with an
unscaled R, kernel :math:`X^\top X + \lambda I`, its inverse divided by the mean of its absolute entries,
scores (mean over checkpoints of products) times (mean over checkpoints of q). Sums are accumulated in
float64, where the original uses the storage dtype. Steps out of order raise, where the original continues.

Shapes: N train rows, M targets, B samples of a batch, P parameters that gradients are kept for, K ``proj_dim``.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import without_autocast
from trak_lite.core.folders import whole_file
from trak_lite.core.normalization import Normalization
from trak_lite.core.validate import integer_at_least, positive_int, real_at_least
from trak_lite.core.version import __version__
from trak_lite.data.batches import batch_size, move_batch, take_rows
from trak_lite.data.datasets import HeldRows
from trak_lite.errors import (
    BusyError,
    HeldHereError,
    InvalidInputError,
    ManifestMismatchError,
    StateError,
    UnknownExperimentError,
    UnsupportedModelError,
)
from trak_lite.featurizing.cursor import (
    SAMPLE_KEYS,
    Cursor,
    RowIndices,
    refuse_other_targets,
    sample_keys,
)
from trak_lite.featurizing.passes import RowPass
from trak_lite.featurizing.rows import HostRows, RowWork
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    choose_gradient_computer,
    select_parameters,
)
from trak_lite.gradient_computers.choice import require_computer
from trak_lite.gradient_computers.parameters import is_quantised
from trak_lite.gradient_computers.self_check import SelfCheckError
from trak_lite.linalg.kernel import KernelSettings, SegmentKernel, precondition
from trak_lite.linalg.products import product_dtype
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.models._adapters import changed_parameters, parameter_versions
from trak_lite.models.borrowing import model_device, refuse_without_values, resolve_device
from trak_lite.models.checkpoints import Checkpoint, weights_digest
from trak_lite.models.loading import load_into
from trak_lite.models.sharded import refuse_sharded
from trak_lite.projectors import AbstractProjector, BasicProjector, ProjectionType
from trak_lite.run import tables
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.grams import Grams
from trak_lite.scoring.tiles import ScoreTerm, score_rows
from trak_lite.store import AbstractRowTable, Column, Manifest, TableSpec
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.store.sharing import LazyTable
from trak_lite.types import Batch, FeatureLayout, ParameterShapes, num_entries

logger = logging.getLogger(__name__)


class TRAKer:
    """The constructor and the six main methods of the original TRAK. Subclassing is supported.

    As in the original, loading a checkpoint puts the model in eval mode and leaves the weights in it.

    Differences: every step out of order, and every mismatch with stored data, raises. A partly featurized batch
    resumes. Scored targets cannot be overwritten. The projection is Rademacher on every device and not bitwise equal
    to the original's. Scores are float32. ``saver``, ``score_computer`` and save folders of the original are not
    supported.
    """

    def __init__(
        self,
        model: nn.Module,
        task: str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Tensor],
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
        """Check the settings and open the store in ``save_dir`` if it exists. Nothing is written yet.

        Args:
            model: The module. It is not moved; batches are moved to its device.
            task: Name, class or instance of a model output function, or a function ``f(model_call, batch)``.
            train_set_size: N.
            save_dir: Folder of the store.
            load_from_save_dir: Accepted for the original's signature; opening is safe from any process.
            device: Device of projections and kernels; ``"auto"`` is the model's device.
            gradient_computer: Class or partial of one. If ``vmap`` cannot transform the model, another one replaces
                ``FunctionalGradientComputer``, with a warning.
            projector: A custom projector; ``None`` creates a Rademacher one.
            saver: Not supported; the rows are stored in the store.
            score_computer: Not supported; the kernel is solved in float64.
            proj_dim: K; not used if ``projector`` is given.
            logging_level: Level of this module's logger.
            use_half_precision: Store features in float16, else float32.
            proj_max_batch_size: Accepted for the original's signature; batches of any size are projected.
            projector_seed: Seed of the projection; not used if ``projector`` is given.
            grad_wrt: Names of the parameters to differentiate, in any order; ``None`` selects all, including frozen
                ones, without integers (bitsandbytes) and those in wrappers of tensors (torchao): they have no gradient.
            lambda_reg: Absolute ridge term, in units of a squared feature.

        Raises:
            InvalidInputError: If a setting is not allowed, or a name in ``grad_wrt`` is unknown.
            ManifestMismatchError: If ``save_dir`` has features of other settings; names every difference.
            UnsupportedModelError: If the model is sharded.
        """
        for name, value in (("saver", saver), ("score_computer", score_computer)):
            if value is not None:
                raise InvalidInputError(
                    f"{name}={value!r} is not supported: rows are stored in the store and scored in float64. Leave it "
                    "out."
                )
        refuse_without_values(model)
        self.device = resolve_device(device, model)
        refuse_sharded(model, "TRAKer", "Use Attributor(gradient_computer='hook')")
        logger.setLevel(logging_level)
        self.model = model
        self.task = resolve_task(task)
        self.train_set_size = positive_int(train_set_size=train_set_size)
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.lambda_reg = real_at_least(0.0, lambda_reg=lambda_reg)
        self.load_from_save_dir = load_from_save_dir
        names = grad_wrt
        if grad_wrt is None:
            names = [name for name, p in model.named_parameters() if not is_quantised(p)]
        kept = select_parameters(model, names)  # in model order; without names also those that are frozen
        self.parameters: ParameterShapes = {name: tuple(p.shape) for name, p in kept.items()}
        self.grad_wrt = None if grad_wrt is None else list(self.parameters)
        self.num_params_for_grad = num_entries(self.parameters)
        self.normalize_factor = math.sqrt(self.num_params_for_grad)
        self.proj_seed = projector_seed
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        self.proj_dim = self._layout.width
        self.gradient_computer = self._make_computer(gradient_computer)
        self.save_dir = Path(save_dir).absolute()
        self._kernel = KernelSettings(weighting="none", lambda_reg=self.lambda_reg, rescale_inverse=True)
        self._digest: str | None = None
        """Digest of the weights that were loaded."""
        self._versions: dict[str, int | None] = {}
        """Autograd's counters of what is written to them, which tell changes without reading a weight."""
        self._train: Cursor | None = None
        self._target: Cursor | None = None
        self._warned: set[int] = set()
        """Model ids whose kernel has no inverse, of which the log tells."""
        self._workspace = Workspace(str(self.save_dir / "trak.zarr"))
        # Release the locks on garbage collection: notebooks create a second TRAKer under the same variable name.
        self._closer = weakref.finalize(self, self._workspace.close)
        self._workspace.open(self._manifest())

    def init_projector(
        self, projector: AbstractProjector | None, proj_dim: int, proj_max_batch_size: int
    ) -> None:
        """Set ``self.projector``. A subclass may override the default.

        Args:
            projector: The projector that was passed to the constructor.
            proj_dim: K.
            proj_max_batch_size: Accepted for the original's signature.

        Raises:
            InvalidInputError: If ``projector`` is not an ``AbstractProjector`` or ``proj_dim`` is below 1.
        """
        if projector is not None and not isinstance(projector, AbstractProjector):
            raise InvalidInputError(
                f"projector is a {_type_name(projector)}, expected an instance of a subclass of "
                "trak_lite.projectors.AbstractProjector. Derive it from that class; its methods need no change."
            )
        if projector is None:
            projector = BasicProjector(
                grad_dim=self.num_params_for_grad,
                proj_dim=positive_int(proj_dim=proj_dim),
                seed=self.proj_seed,
                proj_type=ProjectionType.rademacher,
                device=self.device,
            )
        self.projector = projector

    def close(self) -> None:
        """Release the store's files and locks permanently. Rows written so far remain stored."""
        self._closer()

    # ---------------------------------------------------------------- featurizing

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Tensor],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Load a state dict and prepare to featurize under ``model_id``; the cursor starts at row 0.

        Args:
            checkpoint: State dict of the model.
            model_id: Id of the checkpoint, at least 0. An id with rows continues with its pending rows.
            _allow_featurizing_already_registered: Accepted for the original's signature.

        Raises:
            CheckpointError: If the state dict does not fit the model; nothing is loaded then.
            ManifestMismatchError: If the id was featurized with other weights.
            InvalidInputError: If the id is not an integer of at least 0.
            StateError: If this object was closed.
        """
        self._require_open()
        self._train = None  # an error must not leave the cursor of another checkpoint
        model_id = integer_at_least(0, model_id=model_id)
        digest = self._load(checkpoint)
        existing = self._workspace.table(tables.checkpoint_path(model_id))
        if existing is not None:
            _refuse_other_weights(model_id, existing, digest)
        spec = self._feature_spec(self.train_set_size, model_id, digest)
        self._train = Cursor(tables.checkpoint_path(model_id), spec, f"the train data (model id {model_id})")

    def featurize(self, batch: Batch, inds: RowIndices | None = None, num_samples: int | None = None) -> None:
        """Compute and store the features of a batch; rows that are done already are skipped.

        Args:
            batch: B train samples.
            inds: Train index of every sample; or
            num_samples: B, to write at the cursor and advance it.

        Raises:
            StateError: If no checkpoint is loaded, or the model was changed since.
            InvalidInputError: If not exactly one of ``inds`` and ``num_samples`` is given, or it does not fit.
            ManifestMismatchError: If rows of this id were made with another state of the task (negatives).
            NonFiniteError: If f, q or a feature is NaN or infinite; names the rows.
            PrecisionError: If float16 cannot hold a row; names the rows.
            BusyError: If another process, or another rank of torchrun, featurizes rows of the same id.
        """
        if self._train is None:
            # The message is the original's, because scripts match it.
            raise StateError(
                "No checkpoint is loaded. Load a checkpoint using traker.load_checkpoint before featurizing."
            )
        self._put(self._train, batch, inds, num_samples)

    def finalize_features(self, model_ids: Iterable[int] | None = None, del_grads: bool = False) -> None:
        """Check that the ids are complete and compute their kernels; may be called again.

        Args:
            model_ids: Ids to finalize; ``None`` takes all that have rows.
            del_grads: Accepted for the original's signature. Gradients and features are the same rows, which stay.

        Raises:
            StateError: If an id was never featurized or not fully, or this object was closed.
            SingularKernelError: If all features of an id are zero. A kernel that has no inverse for another reason
                (fewer rows than features and ``lambda_reg=0``) is replaced by its pseudo-inverse, with a warning.
        """
        self._require_open()
        if del_grads:
            logger.warning(
                "del_grads=True has no effect: the features are the stored gradients, so the rows stay."
            )
        ids = self._ids(model_ids)
        for model_id in ids:
            self._train_table(model_id)
        for _ in self._kernels(ids):  # which are stored
            pass
        if self._train is not None:
            self._train.position = 0

    # ---------------------------------------------------------------- scoring

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Tensor], model_id: int, num_targets: int
    ) -> None:
        """Load a featurized checkpoint and prepare for the targets of an experiment; the cursor starts at 0.

        Args:
            exp_name: Name of the experiment: one set of targets.
            checkpoint: State dict that ``model_id`` was featurized with.
            model_id: Id of the checkpoint.
            num_targets: M.

        Raises:
            StateError: If the id is not fully featurized or not finalized, or this object was closed.
            ManifestMismatchError: If the weights differ from the featurized ones.
            InvalidInputError: If the name or a number is not allowed, or the experiment has another M.
            CheckpointError: If the state dict does not fit the model; nothing is loaded then.
        """
        self._require_open()
        self._target = None
        model_id, num_targets = integer_at_least(0, model_id=model_id), positive_int(num_targets=num_targets)
        train = self._train_table(model_id)
        if not self._grams().are_stored(train):
            raise StateError(
                f"Model id {model_id} is not finalized. Call finalize_features() before scoring."
            )
        for path in self._workspace.store().table_names(tables.plain_target_folder(_name(exp_name))):
            size = self._workspace.store().open_table(path).spec.num_rows
            if size != num_targets:
                raise InvalidInputError(
                    f"Experiment {exp_name!r} has {size} targets, got num_targets={num_targets}. One experiment is one "
                    "set of targets: use another exp_name for another set."
                )
        digest = self._load(checkpoint)
        _refuse_other_weights(model_id, train, digest)
        spec = self._feature_spec(num_targets, model_id, digest)
        spec = replace(spec, columns=(*spec.columns, Column(SAMPLE_KEYS, None, "float32")))
        label = f"the targets of {exp_name!r} (model id {model_id})"
        self._target = Cursor(tables.target_path(exp_name, model_id), spec, label)

    def score(self, batch: Batch, inds: RowIndices | None = None, num_samples: int | None = None) -> None:
        """Compute and store the features of a batch of targets; targets that are done already are skipped.

        Args:
            batch: B targets.
            inds: Index of every target; or
            num_samples: B, to write at the cursor and advance it.

        Raises:
            StateError: If no scoring was started, or the model was changed since.
            InvalidInputError: If not exactly one of ``inds`` and ``num_samples`` is given, or it does not fit, or
                other samples were scored under these indices before.
            ManifestMismatchError: If the train rows were made with another state of the task (negatives).
            NonFiniteError: If f, q or a feature is NaN or infinite; names the rows.
            PrecisionError: If float16 cannot hold a row; names the rows.
        """
        if self._target is None:
            raise StateError("No scoring was started. Call start_scoring_checkpoint(...) first.")
        self._put(self._target, batch, inds, num_samples)

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> NDArray[np.float32]:
        """Return the scores of an experiment; calling it again returns them again.

        They are also written to ``save_dir/scores/<exp_name>.mmap``, as by the original: ``numpy.load`` reads it.

        Args:
            exp_name: Name of the experiment.
            model_ids: Ids to average over; ``None`` takes all that have rows.
            allow_skip: Leave out ids whose targets are missing, with a warning, instead of raising.

        Returns:
            ``(N, M)`` float32, train rows by targets.

        Raises:
            UnknownExperimentError: If there is no such experiment.
            StateError: If targets of an id are missing.
            InvalidInputError: If the targets of two ids are other samples, or the same in another order.
            SingularKernelError: If all features of an id are zero.
        """
        self._require_open()
        ids = self._ids(model_ids)
        ids = self._scorable_ids(_name(exp_name), ids, allow_skip)
        store = self._workspace.store()
        train = [self._train_table(model_id) for model_id in ids]
        targets = [store.open_table(tables.target_path(exp_name, model_id)) for model_id in ids]
        refuse_other_targets(exp_name, dict(zip(ids, targets, strict=True)))
        fingerprint = {
            "kernel": self._kernel.to_json(),
            "model_ids": ids,
            "targets": [table.content_key() for table in targets],
            "train_rows": [table.content_key() for table in train],
        }
        # Rows are written once, so another choice of checkpoints or lambda needs another path.
        table_path = tables.first_score_path(exp_name, identity=fingerprint)
        spec = tables.score_table_spec(self.train_set_size, targets[0].spec.num_rows, fingerprint)
        scores = self._workspace.table(table_path) or store.create_table(table_path, spec)
        if not scores.complete:
            terms = []
            for kernels, rows, table in zip(self._kernels(ids), train, targets, strict=True):
                features = torch.from_numpy(table.read(tables.FEATURES)).to(self.device)
                solved = precondition(features, kernels, layout=self._layout)
                terms.append(ScoreTerm(rows, solved.to(self._product_dtype(kernels)) / len(ids)))
            with self._locks_for_success_only():
                score_rows(scores, terms, label=f"Scoring {exp_name!r}")
        self.scores = scores.read(tables.SCORES)
        if store.writable:  # scripts of the original open this file
            path = (self.save_dir / "scores").resolve() / f"{exp_name}.mmap"
            with whole_file(path) as partial, partial.open("wb") as file:
                np.save(file, self.scores)
        if self._target is not None:
            self._target.position = 0
        return self.scores

    # ---------------------------------------------------------------- settings

    @property
    def _layout(self) -> FeatureLayout:
        return self.projector.layout(self.parameters)

    def _make_computer(self, factory: Callable[..., AbstractGradientComputer]) -> AbstractGradientComputer:
        names = list(self.parameters)
        if isinstance(made := getattr(factory, "func", factory), type):
            require_computer(made)
        computer = factory(
            model=self.model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=self.device,
            grad_wrt=names,
        )
        require_computer(computer)
        # the original's base class does not take it, so a subclass cannot pass it on
        if computer.grad_wrt is None:
            computer.grad_wrt = names
        return computer

    def _manifest(self) -> Manifest:
        settings = {
            "dataset": {"num_rows": self.train_set_size},
            "dtype": str(self.dtype).removeprefix("torch."),
            "feature_width": self.proj_dim,
            "layout": self._layout.to_json(),
            "mode": "eval",
            "normalisation": "1/sqrt(P)",
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "projector": self.projector.fingerprint(),
            "task": describe_task(self.task, self.model),
        }
        return Manifest(settings, {"trak_lite": __version__, "torch": torch.__version__})

    def _feature_spec(self, num_rows: int, model_id: int, digest: str) -> TableSpec:
        fingerprint = {"model_id": model_id, "weights": digest}
        dtype = str(self.dtype).removeprefix("torch.")
        return tables.feature_table_spec(num_rows, self.proj_dim, dtype, fingerprint)

    # ---------------------------------------------------------------- the model

    def _load(self, checkpoint: Mapping[str, Tensor]) -> str:
        """Load a state dict, put the model in eval mode, and return the digest of its weights."""
        load_into(self.model, Checkpoint("given", None, lambda: checkpoint))
        self.model.eval()
        self.task.prepare(self.model)
        self.gradient_computer.load_model_params(self.model)
        self._digest, self._versions = weights_digest(self.model), parameter_versions(self.model)
        return self._digest

    def _refuse_changed_model(self, cursor: Cursor) -> None:
        if self._digest != cursor.spec.fingerprint["weights"]:
            raise StateError(
                f"The model has the weights of another checkpoint, not those for {cursor.label}. Load that checkpoint "
                "again (load_checkpoint or start_scoring_checkpoint)."
            )
        names = {name for name, _ in self.model.named_parameters()}
        if names != self._versions.keys() or changed_parameters(self.model, self._versions):
            raise StateError(
                "The weights of the model have changed since the checkpoint was loaded. Load the checkpoint again."
            )
        if any(module.training for module in self.model.modules()):
            raise StateError(
                "The model is in train mode, but rows must be computed in eval mode. Call model.eval(), or load the "
                "checkpoint again, which sets eval mode."
            )

    # ---------------------------------------------------------------- rows

    def _put(self, cursor: Cursor, batch: Batch, inds: RowIndices | None, num_samples: int | None) -> None:
        """Write the pending rows of a batch, and advance the cursor if the rows were not named."""
        self._require_open()
        self._refuse_changed_model(cursor)
        batch = cursor.marks.marked(batch)
        rows = cursor.rows(inds, num_samples, batch_size(batch))
        with self._locks_for_success_only(), without_autocast(self.device), torch.inference_mode(False):
            table = self._attached(cursor)
            try:
                self._write(cursor, table, batch, rows)
            except UnsupportedModelError as error:
                self._replace_computer(batch, error)
                self._write(cursor, table, batch, rows)
        if inds is None:
            cursor.position += len(rows)

    def _attached(self, cursor: Cursor) -> LazyTable:
        """Return the cursor's table for the present state of the task; negatives may be set after loading."""
        state = self.task.state_digest()
        if cursor.table is not None and cursor.state == state:
            return cursor.table
        fingerprint = dict(cursor.spec.fingerprint)
        if state is not None:
            fingerprint["task_state"] = state
        if cursor is self._target:
            train = self._train_table(fingerprint["model_id"]).spec.fingerprint
            compare_fingerprints(train, fingerprint, where=f"Model id {fingerprint['model_id']}")
        table = self._workspace.lazy_table(cursor.path, replace(cursor.spec, fingerprint=fingerprint))
        cursor.table, cursor.state = table, state
        cursor.waiting[:] = False
        cursor.waiting[table.pending()] = True
        return table

    def _write(self, cursor: Cursor, table: LazyTable, batch: Batch, rows: NDArray[np.int64]) -> None:
        """Write the pending rows of a batch, and compare a few of its done rows with the stored ones."""
        keys = sample_keys(batch) if cursor is self._target else None
        if keys is not None:
            cursor.refuse_other_samples(table.table, rows, keys)
        passes = RowPass(
            HeldRows(cursor.label, rows, batch, cursor.spec.num_rows),
            lambda *_: self.gradient_computer,
            self.projector,
            model_id=int(cursor.spec.fingerprint["model_id"]),
            device=model_device(self.model),
            normalization=Normalization(),
            divisor=self.normalize_factor,
        )
        # The samples of targets are compared above.
        stored = None if keys is not None and cursor.num_revisited else cursor.done_rows(table.table, rows)
        if stored is not None:
            remedy = "use another save_dir (for targets: another exp_name)"
            RowWork(table, passes, cursor.path, remedy=remedy).compare_with(*stored)
        pending = cursor.waiting[rows]
        cursor.num_revisited += not pending.all()
        if not pending.any():
            return
        waiting = rows[pending]
        part = batch if pending.all() else take_rows(batch, np.flatnonzero(pending).tolist())
        computed = passes.compute(waiting, part, int(cursor.waiting.sum()) / len(waiting) - 1)
        if keys is not None:
            computed = replace(computed, more={SAMPLE_KEYS: torch.from_numpy(keys[pending])})
        try:
            HostRows(computed, table.spec).put(table.put)
        except HeldHereError:
            raise
        except BusyError as error:
            raise BusyError(
                f"{error} TRAKer does not divide the rows of {cursor.label} among processes or ranks of torchrun: give "
                "each other model ids, or use Attributor, whose ranks share the rows."
            ) from error
        cursor.waiting[waiting] = False
        if keys is not None:
            cursor.refuse_other_samples(table.table, rows, keys)
        if not cursor.waiting.any():
            self.gradient_computer.confirm()

    def _replace_computer(self, batch: Batch, error: UnsupportedModelError) -> None:
        """Use another gradient computer from now on, or raise the error: vmap does not support every model."""
        computer = self.gradient_computer
        if isinstance(error, SelfCheckError) or type(computer) is not FunctionalGradientComputer:
            raise error
        chosen = choose_gradient_computer(
            self.model,
            self.task,
            move_batch(batch, model_device(self.model)),
            list(self.parameters),
            autocast_dtype=computer.autocast_dtype,
            float32_products=computer.float32_products,
        ).computer
        logger.warning("Using %s instead, which is exact for this model. %s", type(chosen).__name__, error)
        self.gradient_computer = chosen

    @contextmanager
    def _locks_for_success_only(self) -> Iterator[None]:
        """Release all locks on an error, because its traceback keeps this object alive (Ctrl-C in a notebook)."""
        try:
            yield
        except BaseException:
            self._workspace.close()
            for cursor in (self._train, self._target):
                if cursor is not None:
                    cursor.table = None
            self._workspace.open(self._manifest())
            raise

    def _require_open(self) -> None:
        if not self._closer.alive:
            raise StateError("This TRAKer was closed. Create another one with the same save_dir to continue.")

    # ---------------------------------------------------------------- ids

    def _ids(self, model_ids: Iterable[int] | None) -> list[int]:
        if model_ids is not None:
            return [integer_at_least(0, model_id=model_id) for model_id in model_ids]
        return tables.checkpoint_ids(self._workspace.store())

    def _train_table(self, model_id: int) -> AbstractRowTable:
        """Return the complete train rows of an id."""
        table = self._workspace.table(tables.checkpoint_path(model_id))
        if table is None:
            raise StateError(
                f"Model id {model_id} was never featurized. Call load_checkpoint and featurize first."
            )
        if not table.complete:
            raise StateError(
                f"Model id {model_id} has {int(table.done().sum())} of {self.train_set_size} train rows. "
                "Featurize the other rows before finalizing or scoring."
            )
        return table

    def _scorable_ids(self, exp_name: str, ids: list[int], allow_skip: bool) -> list[int]:
        """Return the ids whose targets are complete; raise for the others unless they may be skipped."""
        targets = {
            model_id: self._workspace.table(tables.target_path(exp_name, model_id)) for model_id in ids
        }
        if not any(targets.values()):
            raise UnknownExperimentError(
                f"There is no experiment {exp_name!r} for model ids {ids}. Call start_scoring_checkpoint and score."
            )
        usable = [model_id for model_id, table in targets.items() if table is not None and table.complete]
        missing = [model_id for model_id in targets if model_id not in usable]
        if missing and not (allow_skip and usable):
            raise StateError(
                f"Targets of experiment {exp_name!r} are missing for model ids {missing}. Score them, or name the ids "
                "to use in model_ids, or leave them out with allow_skip=True if others are complete."
            )
        if missing:
            logger.warning(
                "Experiment %r: left out model ids %s, whose targets are missing.", exp_name, missing
            )
        return usable

    def _grams(self) -> Grams:
        return Grams(self._workspace.store(), self._kernel, self._layout, self.device, stores_all=True)

    def _product_dtype(self, kernels: Iterable[SegmentKernel]) -> torch.dtype:
        """Return the dtype of targets that were multiplied by the inverses of the kernels."""
        if not self.lambda_reg:
            return torch.float32
        rank = min(self.train_set_size, self.proj_dim)
        traces = (float(k.factor.square().sum()) - k.width * k.lambda_reg for k in kernels)
        return product_dtype([self.lambda_reg], max(traces), rank=rank, device=self.device)

    def _kernels(self, ids: Iterable[int]) -> Iterator[list[SegmentKernel]]:
        """Yield the kernels of every id, one per segment; at the end warn of pseudo-inverses, once per id."""
        ranks: dict[int, int] = {}
        for model_id in ids:
            kernels = self._grams().kernels(self._train_table(model_id), allow_singular=True)
            if model_id not in self._warned and any(kernel.is_pseudo_inverse for kernel in kernels):
                ranks[model_id] = sum(kernel.factor.shape[1] for kernel in kernels if kernel.multiplier)
            yield kernels
        self._warned.update(ranks)
        if ranks:
            logger.warning(
                "The kernels of model ids %s have no inverse at lambda_reg=%g: ranks %s, of %d features from %d train "
                "rows. Their pseudo-inverses are used. For better scores set lambda_reg > 0 (in units of a squared "
                "feature), or proj_dim well below the number of train rows.",
                list(ranks),
                self.lambda_reg,
                list(ranks.values()),
                self.proj_dim,
                self.train_set_size,
            )


def _refuse_other_weights(model_id: int, table: AbstractRowTable, digest: str) -> None:
    stored = str(table.spec.fingerprint["weights"])
    if stored != digest:
        raise ManifestMismatchError(
            f"Model id {model_id} was featurized with other weights: the stored digest is {stored[:12]}, the given one "
            f"{digest[:12]}. Pass the checkpoint that the id was featurized with, or another model_id."
        )


def _name(exp_name: str) -> str:
    """Return the name of an experiment; the store checks its characters."""
    if not isinstance(exp_name, str) or "/" in exp_name:
        raise InvalidInputError(f"exp_name must be a string without '/', got {exp_name!r}.")
    return exp_name


def _type_name(value: object) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
