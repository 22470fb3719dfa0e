"""Retrains models on subsets of the train rows, as ground truth for attribution scores.

Shapes: N train rows, S subsets, R seeds, M targets.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from trak_lite._validate import positive_int
from trak_lite.data.batches import move_batch, rows_in_batches
from trak_lite.data.datasets import Rows
from trak_lite.errors import (
    MODEL_FAILURES,
    BusyError,
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    RetrainingError,
    StateError,
    UnsupportedModelError,
)
from trak_lite.evaluation import seed_noise_ceiling
from trak_lite.evaluation.datamodeling import NoiseCeiling
from trak_lite.featurizing.row_checks import done_rows
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.parallel.sharing import LazyTable, SharedRows
from trak_lite.run.sources import carried_values, describe_source
from trak_lite.run.tables import retrained_path
from trak_lite.run.workspace import Workspace
from trak_lite.store import Column, Manifest, RemotePlace, TableSpec
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.store.remote.place import resolve_place
from trak_lite.unrolled import SubsetTraining

__all__ = ["OutputFunction", "Retrained", "TrainFunction", "retrain", "retrain_into", "retrain_many"]

logger = logging.getLogger(__name__)

TrainFunction: TypeAlias = Callable[[NDArray[np.int64], int], Any]
"""``train_fn(indices, seed)``: trains on these rows and returns the argument of ``output_fn``, such as a module."""
OutputFunction: TypeAlias = Callable[[Any], Tensor | ArrayLike]
"""``output_fn(trained)``: M numbers, the model output of every target."""

OUTPUTS = "outputs"
_MOST_CHUNKS = 1024
_SAME_TRAINING = 1e-2
"""Tolerance of a repeated training, relative to the spread of outputs: rounding errors grow with every step."""
_VALUES = "carried values"
_confirmed: dict[tuple[str, str], dict[str, str]] = {}
"""By table: values carried by the functions when this process trained into it or repeated one of its trainings."""
_FAILURES = (*MODEL_FAILURES, OSError, ArithmeticError, AssertionError)
"""Exceptions that are treated as failures of the user's training."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Retrained:
    """Outputs of models that were trained on subsets."""

    outputs: NDArray[np.float32]
    """``(S, R, M)``."""
    masks: NDArray[np.bool_]
    """``(S, N)`` rows of each subset."""
    seeds: tuple[int, ...]
    """The R seeds."""

    @property
    def mean(self) -> NDArray[np.float64]:
        """``(S, M)`` mean over seeds, which scores are compared with."""
        mean: NDArray[np.float64] = self.outputs.mean(axis=1, dtype=np.float64)
        return mean

    def noise_ceiling(self) -> NoiseCeiling:
        """Return the LDS that a perfect method would reach, given the noise between seeds.

        Raises:
            InvalidInputError: If there is only one seed.
        """
        return seed_noise_ceiling(self.outputs)


@final
@dataclass(frozen=True, slots=True)
class _Job:
    """One model to train."""

    row: int
    subset: int
    seed: int
    indices: NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All models of a retraining, and the fingerprint of its results."""

    masks: NDArray[np.bool_]
    seeds: tuple[int, ...]
    fingerprint: dict[str, Any]
    train_id: str | None
    functions: tuple[Any, Any]
    """``train_fn`` and ``output_fn``."""

    def values(self) -> dict[str, str]:
        """Return the current captured values of the functions; empty if the user passed ``train_id``."""
        return {} if self.train_id is not None else carried_values(*self.functions)

    @property
    def num_rows(self) -> int:
        """Number of models to train: S times R."""
        return len(self.masks) * len(self.seeds)

    def jobs(self, rows: Iterable[int]) -> Iterator[_Job]:
        """Yield the models of some rows of the table."""
        for row in rows:
            subset, place = divmod(row, len(self.seeds))
            yield _Job(row, subset, self.seeds[place], np.flatnonzero(self.masks[subset]))

    def spec(self, num_targets: int) -> TableSpec:
        """Return the spec of the table of outputs: row = subset * R + index of the seed."""
        columns = (Column(OUTPUTS, num_targets, "float32"),)
        # Processes claim whole chunks: use one model per chunk, unless that makes too many files.
        return TableSpec(self.num_rows, columns, -(-self.num_rows // _MOST_CHUNKS), self.fingerprint)


_Trained: TypeAlias = tuple[_Job, NDArray[np.float64]]
_Run: TypeAlias = Callable[[Iterable[_Job]], Iterator[_Trained]]
"""Trains models, and yields each with its outputs."""


def outputs_of_model(model: nn.Module, task: AbstractModelOutput, rows: Rows, device: torch.device) -> Tensor:
    """Return f of every target, ``(M,)`` float64, for a model in eval mode."""
    task.prepare(model)
    plan = rows_in_batches(np.arange(len(rows)), rows.batch_size)
    with torch.no_grad():
        found = [
            task.evaluate(ModelCall(model), move_batch(batch, device)).output.cpu().double()
            for _, batch in rows.batches(plan)
        ]
    return torch.cat(found)


def retrain(
    train_fn: TrainFunction,
    masks: ArrayLike,
    output_fn: OutputFunction,
    *,
    path: str | PathLike[str] | RemotePlace | None = None,
    seeds: Sequence[int] = (0, 1),
    train_id: str | None = None,
    progress: bool | None = None,
) -> Retrained:
    """Train a model on every subset with every seed, and store its outputs for the targets.

    The outputs of every model are stored before the next one is trained. The same call again returns them, or resumes
    after a kill.

    Args:
        train_fn: ``train_fn(indices, seed)`` trains from scratch on these rows and returns a state dict or a module.
        masks: ``(S, N)``, for example from :func:`~trak_lite.evaluation.subset_masks`.
        output_fn: Converts the result of ``train_fn`` into M numbers: the model output of every target. Use the
            attributed model output function.
        path: Folder for the results, or their address in an object store; ``None`` keeps them in memory.
        seeds: Passed to ``train_fn``. Two or more average the noise of training and allow its estimation.
        train_id: A name that identifies training and outputs, instead of the source code of both functions (which
            changes even with a comment).
        progress: Show a bar; ``None`` shows it on a terminal only.

    Returns:
        Outputs ``(S, R, M)``.

    Raises:
        InvalidInputError: If masks or seeds cannot be used, or outputs change in number.
        RetrainingError: If a training fails; names subset and seed. What was trained before stays.
        NonFiniteError: If an output is NaN or infinite; names subset and seed.
        ManifestMismatchError: If other masks, seeds or functions were used at this path.

    Example:
        >>> import numpy as np
        >>> values = np.array([1.0, 2.0, 4.0])
        >>> masks = np.array([[True, True, False], [False, True, True]])
        >>> retrain(lambda rows, seed: values[rows].sum() + seed, masks, lambda model: [model]).mean.tolist()
        [[3.5], [6.5]]
    """
    plan = _plan(train_fn, masks, output_fn, seeds, train_id)
    workspace = Workspace(None if path is None else resolve_place(path))
    with workspace.opened(Manifest({"kind": "retraining"})):
        _refuse_other_training(workspace, OUTPUTS, plan, lambda jobs: _one_by_one(jobs, train_fn, output_fn))
        return _fill(workspace, OUTPUTS, plan, lambda jobs: _one_by_one(jobs, train_fn, output_fn), progress)


def retrain_many(
    training: SubsetTraining,
    masks: ArrayLike,
    output_fn: OutputFunction,
    *,
    models_at_once: int = 16,
    path: str | PathLike[str] | RemotePlace | None = None,
    seeds: Sequence[int] = (0, 1),
    train_id: str | None = None,
    progress: bool | None = None,
) -> Retrained:
    """Train as :func:`retrain` does, with many small models at once.

    Outputs agree with ``retrain(training, ...)`` up to rounding, and each of the two functions continues the work of
    the other.

    Args:
        training: ``Recipe(...).train_fn``.
        masks: ``(S, N)``; subsets of one size are trained together.
        output_fn: Converts a trained module, in eval mode, into M numbers.
        models_at_once: Number of models that are trained side by side; a kill loses all of them.
        path: Folder for the results, or their address in an object store; ``None`` keeps them in memory.
        seeds: Seeds of weights and order.
        train_id: As in :func:`retrain`.
        progress: Show a bar; ``None`` shows it on a terminal only.

    Raises:
        UnsupportedModelError: If ``vmap`` does not support the model, or its training cannot be repeated.
        RetrainingError: If a training fails; names subsets and seeds.
        NonFiniteError: If an output is NaN or infinite; names subset and seed.
        ManifestMismatchError: If other masks, seeds or functions were used at this path.
    """
    positive_int(models_at_once=models_at_once)
    workspace = Workspace(None if path is None else resolve_place(path))
    plan = _plan(training, masks, output_fn, seeds, train_id)

    def run(jobs: Iterable[_Job]) -> Iterator[_Trained]:
        return _side_by_side(list(jobs), training, output_fn, models_at_once)

    with workspace.opened(Manifest({"kind": "retraining"})):
        _refuse_other_training(workspace, OUTPUTS, plan, run)
        return _fill(workspace, OUTPUTS, plan, run, progress, at_once=models_at_once)


def retrain_into(
    workspace: Workspace,
    group: str,
    train_fn: TrainFunction,
    masks: ArrayLike,
    output_fn: OutputFunction,
    *,
    seeds: Sequence[int],
    train_id: str | None,
    progress: bool | None,
    settings: Mapping[str, Any],
) -> Retrained:
    """Train as :func:`retrain` does, and write to a table of an open store that other trainings may share.

    Args:
        workspace: Open for writing.
        group: Group of tables; each combination of masks, seeds and functions has its own table.
        train_fn: As in :func:`retrain`.
        masks: ``(S, N)``.
        output_fn: As in :func:`retrain`.
        seeds: As in :func:`retrain`.
        train_id: As in :func:`retrain`.
        progress: As in :func:`retrain`.
        settings: Further JSON values that identify the results.
    """
    plan = _plan(train_fn, masks, output_fn, seeds, train_id, settings)

    def run(jobs: Iterable[_Job]) -> Iterator[_Trained]:
        return _one_by_one(jobs, train_fn, output_fn)

    return _fill(workspace, _own_table(workspace, group, plan, run), plan, run, progress)


def _plan(
    train_fn: Any,
    masks: ArrayLike,
    output_fn: OutputFunction,
    seeds: Sequence[int],
    train_id: str | None,
    settings: Mapping[str, Any] | None = None,
) -> _Plan:
    """Check masks and seeds, and describe the training."""
    array = np.asarray(masks)
    if array.dtype != np.bool_ or array.ndim != 2 or not array.size or not array.any(axis=1).all():
        raise InvalidInputError(
            f"masks must be a boolean matrix (subsets, train rows) without an empty subset, got {array.dtype} of "
            f"shape {array.shape}. Make them with trak_lite.evaluation.subset_masks."
        )
    numbers = tuple(int(seed) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise InvalidInputError(f"seeds must be one or more different integers, got {tuple(seeds)}.")
    try:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            inspect.signature(train_fn).bind(np.arange(1), 0)
    except TypeError as error:
        raise InvalidInputError(
            f"train_fn cannot be called as train_fn(indices, seed): {error}. Expected a function of the rows to train "
            "on and a seed, which returns the trained module or its state dict."
        ) from error
    training = {"id": train_id}
    if train_id is None:
        training = {"train_fn": describe_source(train_fn), "output_fn": describe_source(output_fn)}
    fingerprint = {
        "masks": hashlib.sha256(np.packbits(array, axis=1).tobytes()).hexdigest(),
        "num_subsets": len(array),
        "num_train_rows": array.shape[1],
        "seeds": list(numbers),
        "training": training,
        **(settings or {}),
    }
    return _Plan(array, numbers, fingerprint, train_id, (train_fn, output_fn))


def _own_table(workspace: Workspace, group: str, plan: _Plan, run: _Run) -> str:
    """Return the path of this training's table: of an existing one, or of a new one.

    Raises:
        ManifestMismatchError: If ``train_id`` names another training.
    """
    known = workspace.store().table_names(group) if workspace.exists else []
    number = 0
    while (path := retrained_path(group, plan.fingerprint, number)) in known:
        why = _why_another(workspace, path, plan, run)
        if why is None:
            return path
        if plan.train_id is not None:
            raise ManifestMismatchError(why)
        logger.info("%s The models are trained again.", why)
        number += 1
    return path


def _refuse_other_training(workspace: Workspace, path: str, plan: _Plan, run: _Run) -> None:
    """Raise if a table belongs to another training.

    Raises:
        ManifestMismatchError: If it does; names what differs.
    """
    why = _why_another(workspace, path, plan, run)
    if why is not None:
        raise ManifestMismatchError(why)


def _why_another(workspace: Workspace, path: str, plan: _Plan, run: _Run) -> str | None:
    """Return why a table belongs to another training; ``None`` if it belongs to this one or does not exist.

    One of its trainings is repeated if another process has filled the table or captured values have changed.

    Raises:
        ManifestMismatchError: If the table was made with other masks, seeds or functions.
    """
    table = workspace.table(path)
    if table is None:
        return None
    where = f"{workspace.path or 'memory'}:{path}"
    compare_fingerprints(
        table.spec.fingerprint,
        plan.fingerprint,
        where=where,
        remedy="Retrain with the same masks, seeds and functions, or under another path.",
    )
    values, place = plan.values(), (str(workspace.place), path)
    stored_values = workspace.store().attributes(path).get(_VALUES, {})
    own = stored_values if workspace.place is None else _confirmed.get(place)
    if own is not None and not _differing(own, values):
        return None
    changed = _differing(stored_values, values)
    stored = done_rows(table)
    if stored is None:
        return None
    row = int(stored.rows[0])
    outputs = np.asarray(stored.values[OUTPUTS][0], np.float64)
    one = _repeated(plan, row, run)
    if not _is_same(one, outputs):
        job = next(plan.jobs([row]))
        message = (
            f"{where} holds outputs of another training: repeated for {_place(job)}, it gives outputs that differ by "
            f"{_distance(one, outputs):.2g} of their spread"
            f"{f' ({len(changed)} captured values have changed: {_short(changed)})' if changed else ''}. Undo the "
            "change, or retrain under another path or train_id."
        )
        if changed or _is_same(_repeated(plan, row, run), one):
            return message
        warnings.warn(
            f"The training is not deterministic: two runs with the same rows and seed give different outputs (for "
            f"{_place(job)} they differ by {_distance(one, outputs):.2g} of their spread). So it cannot be checked "
            f"that the outputs in {where} belong to this training. Seed all random numbers of the training.",
            RuntimeWarning,
            stacklevel=5,
        )
    _confirmed[place] = _unchanged(values, plan.values())
    return None


def _repeated(plan: _Plan, row: int, run: _Run) -> NDArray[np.float64]:
    """Train the model of one row again and return its outputs."""
    ((_, outputs),) = run(plan.jobs([row]))
    return outputs


def _is_same(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    return one.shape == other.shape and _distance(one, other) <= _SAME_TRAINING


def _distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the distance of two outputs relative to their spread over targets, or to their norm if constant."""
    if one.shape != other.shape:
        return float("inf")
    size = float(np.linalg.norm(other - other.mean())) or float(np.linalg.norm(other)) or 1.0
    return float(np.linalg.norm(one - other)) / size


def _unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the values that a training does not change; the others are, for example, its counters."""
    return {name: value for name, value in before.items() if after.get(name) == value}


def _differing(stored: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    return [name for name, value in stored.items() if given.get(name) != value]


def _short(names: Sequence[str]) -> str:
    shown = [name.partition(".")[2] or name for name in names[:3]]
    return ", ".join(shown) + (", ..." if len(names) > 3 else "")


def _begun(workspace: Workspace, path: str, plan: _Plan, run: _Run, at_once: int) -> LazyTable:
    """Train the first models, whose outputs give the number of targets, and return the table with them."""
    before = plan.values()
    first = range(min(at_once, plan.num_rows))
    lazy: LazyTable | None = None
    for job, outputs in run(plan.jobs(first)):
        if lazy is None:
            stable = _unchanged(before, plan.values())
            lazy = workspace.lazy_table(path, plan.spec(len(outputs)), {_VALUES: stable})
        _require_width(lazy, job, outputs)
        try:
            lazy.put(np.array([job.row]), {OUTPUTS: outputs[None]})
        except (BusyError, StateError) as error:
            logger.info("Discarded the outputs of a training, because another process has them: %s", error)
        else:
            _confirmed[(str(workspace.place), path)] = stable
    assert lazy is not None  # a plan has at least one model
    return lazy


def _require_width(lazy: LazyTable, job: _Job, outputs: NDArray[np.float64]) -> None:
    width = lazy.spec.columns[0].width
    if len(outputs) != width:
        raise InvalidInputError(
            f"output_fn returned {len(outputs)} numbers for {_place(job)}, and {width} before. Return one per target."
        )


def _fill(
    workspace: Workspace, path: str, plan: _Plan, run: _Run, progress: bool | None, *, at_once: int = 1
) -> Retrained:
    """Train the pending models of the table, together with other processes; outputs are put after each training."""
    table = workspace.table(path)
    lazy = (
        _begun(workspace, path, plan, run, at_once)
        if table is None
        else workspace.lazy_table(path, table.spec)
    )
    with SharedRows(lazy, 1, label="Retraining", progress=progress, unit="model") as work:
        for batches in work.rounds():
            wanted = (int(row) for rows in batches for row in rows)
            for job, outputs in run(plan.jobs(wanted)):
                _require_width(lazy, job, outputs)
                work.put(np.array([job.row]), {OUTPUTS: outputs[None]})
    table = workspace.table(path)
    assert table is not None  # a plan has at least one model
    shape = (len(plan.masks), len(plan.seeds), -1)
    return Retrained(table.read(OUTPUTS).reshape(shape), plan.masks, plan.seeds)


def _one_by_one(
    jobs: Iterable[_Job], train_fn: TrainFunction, output_fn: OutputFunction
) -> Iterator[_Trained]:
    for job in jobs:
        try:
            trained = train_fn(job.indices, job.seed)
            outputs = () if trained is None else output_fn(trained)
        except _FAILURES as error:
            raise _failed(_place(job), error) from error
        if trained is None:
            raise InvalidInputError("train_fn returned None. Return the trained module or its state dict.")
        yield job, _checked(outputs, job)


def _side_by_side(
    jobs: Sequence[_Job], training: SubsetTraining, output_fn: OutputFunction, models_at_once: int
) -> Iterator[_Trained]:
    by_size: dict[int, list[_Job]] = {}
    for job in jobs:
        by_size.setdefault(len(job.indices), []).append(job)
    groups = [
        same[start : start + models_at_once]
        for same in by_size.values()
        for start in range(0, len(same), models_at_once)
    ]
    for group in groups:
        try:
            models = training.train_many([job.indices for job in group], [job.seed for job in group])
        except UnsupportedModelError:
            raise
        except _FAILURES as error:
            raise _failed("; ".join(map(_place, group)), error) from error
        for job, model in zip(group, models, strict=True):
            try:
                outputs = output_fn(model)
            except _FAILURES as error:
                raise _failed(_place(job), error) from error
            yield job, _checked(outputs, job)


def _checked(outputs: Tensor | ArrayLike, job: _Job) -> NDArray[np.float64]:
    """Return finite outputs ``(M,)``."""
    plain = outputs.detach().cpu().double().numpy() if isinstance(outputs, Tensor) else outputs
    values = np.asarray(plain, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise InvalidInputError(
            f"output_fn returned shape {values.shape} for {_place(job)}. Expected one number per target, (M,)."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise NonFiniteError(
            f"{len(bad)} of {len(values)} outputs are NaN or infinite for {_place(job)}, the first for target "
            f"{bad[0]}. The training may have diverged; lower its learning rate."
        )
    return values


def _failed(where: str, error: BaseException) -> RetrainingError:
    return RetrainingError(
        f"Training for {where} failed ({type(error).__name__}: {error}). The outputs of finished trainings are stored. "
        "Make the same call again to continue."
    )


def _place(job: _Job) -> str:
    return f"subset {job.subset}, seed {job.seed} ({len(job.indices)} rows)"
