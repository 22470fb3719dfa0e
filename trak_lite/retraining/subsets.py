"""Retrains models on subsets of the train rows, as ground truth for attribution scores.

Shapes: N train rows, S subsets, R seeds, M targets.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trak_lite.core.validate import positive_int
from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    InvalidInputError,
    ManifestMismatchError,
    StateError,
    UnsupportedModelError,
)
from trak_lite.evaluation import seed_noise_ceiling
from trak_lite.evaluation.datamodeling import NoiseCeiling
from trak_lite.retraining.plans import (
    OUTPUTS,
    Job,
    OutputFunction,
    Plan,
    TrainFunction,
    retraining_plan,
    seed_step,
)
from trak_lite.run.repeats import compare, conditions, done_rows
from trak_lite.run.tables import retrained_path
from trak_lite.run.workspace import Workspace
from trak_lite.store import Manifest, RemotePlace
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.store.remote.place import resolve_place
from trak_lite.store.sharing import LazyTable, SharedRows
from trak_lite.unrolled import SubsetTraining

logger = logging.getLogger(__name__)

_REPETITIONS_AT_ONCE = 20
_CONDITIONS = "conditions"


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
    compared: str = ""
    """How stored outputs were compared with the present training, and which were used; empty without any."""

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
    after a kill. It first repeats one stored training per seed and compares the outputs, because not everything that a
    training depends on can be followed; ``compared`` says how they agree.

    Args:
        train_fn: ``train_fn(indices, seed)`` trains from scratch on these rows and returns a state dict or a module.
        masks: ``(S, N)``, for example from :func:`~trak_lite.evaluation.subset_masks`.
        output_fn: Converts the result of ``train_fn`` into M numbers: the model output of every target. Use the
            attributed model output function.
        path: Folder for the results, or their address in an object store; ``None`` keeps them in memory.
        seeds: Passed to ``train_fn``. Two or more average the noise of training and allow its estimation.
        train_id: A name for this version of both functions, instead of their source code (which changes even with a
            comment). Stored outputs of this name are returned without repeating a training: change it with them.
        progress: Show a bar; ``None`` shows it on a terminal only.

    Returns:
        Outputs ``(S, R, M)``.

    Raises:
        InvalidInputError: If masks or seeds cannot be used, or outputs change in number.
        RetrainingError: If a training fails; names subset and seed. What was trained before stays.
        NonFiniteError: If an output is NaN or infinite; names subset and seed.
        ManifestMismatchError: If other masks, seeds or functions were used at this path, or a repeated training has
            other outputs.

    Example:
        >>> import numpy as np
        >>> values = np.array([1.0, 2.0, 4.0])
        >>> masks = np.array([[True, True, False], [False, True, True]])
        >>> retrain(lambda rows, seed: values[rows].sum() + seed, masks, lambda model: [model]).mean.tolist()
        [[3.5], [6.5]]
    """
    return _filled(path, retraining_plan(train_fn, masks, output_fn, seeds, train_id, progress))


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
    plan = retraining_plan(training, masks, output_fn, seeds, train_id, progress)
    return _filled(path, replace(plan, at_once=positive_int(models_at_once=models_at_once)))


def retrain_run(
    training: SubsetTraining,
    masks: ArrayLike,
    output_fn: OutputFunction,
    *,
    path: PathLike[str] | None,
    digest: str,
) -> Retrained:
    """Repeat a run without some rows, as :func:`retrain_many`, or one by one if its model does not allow this.

    ``digest`` identifies the results. Stored ones are compared with a repetition, unless the recipe has a ``train_id``.
    """
    recipe = training.recipe
    plan = retraining_plan(training, masks, output_fn, (recipe.seed,), digest, None)
    plan = replace(plan, train_id=recipe.train_id)
    try:
        return _filled(path, replace(plan, at_once=_REPETITIONS_AT_ONCE))
    except UnsupportedModelError as error:
        logger.info("%s They are trained one after the other.", error)
    return _filled(path, plan)


def retrain_into(workspace: Workspace, group: str, plan: Plan, *, others: bool = False) -> Retrained:
    """Train as :func:`retrain` does, and write to a table of an open store that other trainings may share.

    In a group, each combination of masks, seeds, functions and settings of the plan has its own table. It begins with
    the outputs of another one that has the first of its masks and seeds. With ``others``, the seeds are those of the
    first subset, and every further one has the next, which no other has.
    """
    if others:
        step = seed_step(plan.seeds)
        plan = replace(plan, fingerprint={**plan.fingerprint, "seeds_step": step}, step=step)
    table_names = workspace.store().table_names(group) if workspace.exists else []
    number, compared = 0, ""
    while (path := retrained_path(group, plan.fingerprint, number)) in table_names:
        is_same, compared = _compared(workspace, path, plan)
        if is_same:
            break
        compared += " All models are trained again."
        logger.info(compared)
        number += 1
    if number == 0:
        reused = _reuse(workspace, [name for name in table_names if name != path], path, plan)
        compared = compared or reused
    return _fill(workspace, path, plan, compared)


def _reuse(workspace: Workspace, table_names: Iterable[str], path: str, plan: Plan) -> str:
    """Copy outputs that are missing from a stored plan that is part of this one, and return how they were compared."""
    begun, parts = workspace.table(path), []
    missing = np.ones(plan.num_rows, np.bool_) if begun is None else ~begun.done()

    def rows_here(part: Plan, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        subsets, seeds = np.divmod(rows, len(part.seeds))
        return subsets * len(plan.seeds) + seeds

    for name in table_names if missing.any() else ():
        try:
            table = workspace.table(name)
            part = None if table is None else plan.part(table.spec.fingerprint)
            if table is not None and part is not None:
                count = int(missing[rows_here(part, np.flatnonzero(table.done()))].sum())
                parts += [(count, name, table, part)] if count else []
        except CorruptStoreError as error:  # a check of the store finds it
            logger.info("Outputs of other retrainings cannot be read: %s", error)
    compared = ""
    for _, name, table, part in sorted(parts, key=lambda entry: -entry[0]):
        is_same, compared = _compared(workspace, name, part)
        if not is_same:
            compared += " All models are trained again."
            continue
        made = {_CONDITIONS: workspace.store().attributes(name).get(_CONDITIONS)}
        lazy = workspace.lazy_table(path, plan.spec(table.column(OUTPUTS).width or 1), made)
        for chunk in range(table.num_chunks):
            done, values = table.read_done(chunk)
            rows = rows_here(part, done)
            new = missing[rows]
            try:
                if new.any():
                    lazy.put(rows[new], {column: value[new] for column, value in values.items()})
            except (BusyError, StateError) as error:
                logger.info("Did not copy outputs, because another process has them: %s", error)
        break
    return compared


def _filled(path: str | PathLike[str] | RemotePlace | None, plan: Plan) -> Retrained:
    """Return the outputs of a store that holds one training, and train what is missing."""
    workspace = Workspace(None if path is None else resolve_place(path))
    with workspace.opened(Manifest({"kind": "retraining"})):
        is_same, compared = _compared(workspace, OUTPUTS, plan)
        if not is_same:
            raise ManifestMismatchError(
                f"{compared} Undo the change, or retrain under another path or train_id."
            )
        return _fill(workspace, OUTPUTS, plan, compared)


def _compared(workspace: Workspace, path: str, plan: Plan) -> tuple[bool, str]:
    """Return whether stored outputs are those of this training, and how this is known; no text without stored ones."""
    table = workspace.table(path)
    if table is None:
        return True, ""
    where = f"{workspace.name}:{path}"
    compare_fingerprints(
        table.spec.fingerprint,
        plan.fingerprint,
        where=where,
        remedy="Retrain with the same masks, seeds and functions, or under another path.",
    )
    if plan.train_id is not None:
        return (
            True,
            f"Stored outputs with the train_id {plan.train_id!r} were used; no training was repeated.",
        )
    ranges = [np.arange(*table.chunk_range(chunk)) for chunk in table.committed_chunks()]
    committed = np.concatenate([np.empty(0, np.int64), *ranges])
    by_seed = [committed[committed % len(plan.seeds) == index] for index in range(len(plan.seeds))]
    # A committed row for every seed, of another subset for each if possible.
    chosen = [rows[index % len(rows)] for index, rows in enumerate(by_seed) if len(rows)]
    stored = done_rows(table, np.array(chosen, np.int64) if chosen else None)
    if stored is None:
        return True, ""
    done, values = stored
    made = workspace.store().attributes(path).get(_CONDITIONS)
    jobs, farthest = [], 0.0
    for row, outputs in zip(done[: len(plan.seeds)].tolist(), values[OUTPUTS], strict=False):
        outcome = compare(outputs, functools.partial(plan.again, row), _distance, exact=False)
        # Other processes, perhaps on other machines, may have trained the rows after the first. Conditions are those
        # after the repetition: the GPU is known when a training has used it.
        outcome = replace(outcome, exact=row == 0 and made == conditions(models_at_once=1))
        job = str(next(plan.jobs([row])))
        if outcome.is_random:
            warnings.warn(
                "The training is not deterministic: two runs with the same rows and seed give different outputs (for "
                f"{job} they differ by {outcome.noise:.2g} of their spread). So a change of the training that is not "
                f"much larger than this is not noticed in the outputs in {where}. Seed all random numbers of the "
                "training.",
                RuntimeWarning,
                stacklevel=5,
            )
        if not outcome.is_same:
            return False, (
                f"{where} holds outputs of another training: repeated for {job}, it gives outputs that differ by "
                f"{outcome.apart:.2g} of their spread."
            )
        jobs.append(job)
        farthest = max(farthest, outcome.apart)
    compared = (
        f"Stored outputs were used. Trained again, to compare: {'; '.join(jobs)}; outputs differ by {farthest:.2g} "
        "of their spread."
    )
    logger.info(compared)
    return True, compared


def _distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the distance of two outputs relative to their spread over targets, or to their norm if constant."""
    if one.shape != other.shape:
        return float("inf")
    first, second = one.astype(np.float64), other.astype(np.float64)
    size = float(np.linalg.norm(second - second.mean())) or float(np.linalg.norm(second)) or 1.0
    return float(np.linalg.norm(first - second)) / size


def _begun(workspace: Workspace, path: str, plan: Plan) -> LazyTable:
    """Train the first models, whose outputs give the number of targets, and return the table with them."""
    lazy: LazyTable | None = None
    for job, outputs in plan.train(range(min(plan.at_once or 1, plan.num_rows))):
        if lazy is None:
            made = {_CONDITIONS: conditions(models_at_once=plan.at_once or 1)}
            lazy = workspace.lazy_table(path, plan.spec(len(outputs)), made)
        _require_width(lazy, job, outputs)
        try:
            lazy.put(np.array([job.row]), {OUTPUTS: outputs[None]})
        except (BusyError, StateError) as error:
            logger.info("Discarded the outputs of a training, because another process has them: %s", error)
    assert lazy is not None  # a plan has at least one model
    return lazy


def _require_width(lazy: LazyTable, job: Job, outputs: NDArray[np.float64]) -> None:
    width = lazy.spec.columns[0].width
    if len(outputs) != width:
        raise InvalidInputError(
            f"output_fn returned {len(outputs)} numbers for {job}, and {width} before. Return one per target."
        )


def _fill(workspace: Workspace, path: str, plan: Plan, compared: str) -> Retrained:
    """Train the pending models of the table, together with other processes; outputs are put after each training."""
    table = workspace.table(path)
    lazy = _begun(workspace, path, plan) if table is None else workspace.lazy_table(path, table.spec)
    with SharedRows(lazy, 1, label="Retraining", progress=plan.progress, unit="model") as work:
        for batches in work.rounds():
            wanted = (int(row) for rows in batches for row in rows)
            for job, outputs in plan.train(wanted):
                _require_width(lazy, job, outputs)
                work.put(np.array([job.row]), {OUTPUTS: outputs[None]})
    table = workspace.table(path)
    assert table is not None  # a plan has at least one model
    shape = (len(plan.masks), len(plan.seeds), -1)
    return Retrained(table.read(OUTPUTS).reshape(shape), plan.masks, plan.seeds, compared)
