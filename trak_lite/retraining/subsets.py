"""Retrains models on subsets of the train rows, as ground truth for attribution scores.

Shapes: N train rows, S subsets, R seeds, M targets.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from trak_lite.core.fingerprint import describe_source
from trak_lite.core.validate import positive_int
from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
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
from trak_lite.parallel.sharing import LazyTable, SharedRows
from trak_lite.run.repeats import compare, conditions
from trak_lite.run.tables import retrained_path
from trak_lite.run.workspace import Workspace
from trak_lite.store import Column, Manifest, RemotePlace, TableSpec
from trak_lite.store.manifest import compare_fingerprints
from trak_lite.store.remote.place import resolve_place
from trak_lite.unrolled import SubsetTraining

logger = logging.getLogger(__name__)

TrainFunction: TypeAlias = Callable[[NDArray[np.int64], int], Any]
"""``train_fn(indices, seed)``: trains on these rows and returns the argument of ``output_fn``, such as a module."""
OutputFunction: TypeAlias = Callable[[Any], Tensor | ArrayLike]
"""``output_fn(trained)``: M numbers, the model output of every target."""

OUTPUTS = "outputs"
_MOST_CHUNKS = 1024
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


@final
@dataclass(frozen=True, slots=True)
class _Job:
    row: int
    subset: int
    seed: int
    indices: NDArray[np.int64]

    def __str__(self) -> str:
        return f"subset {self.subset}, seed {self.seed} ({len(self.indices)} rows)"


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All models of a retraining, how they are trained, and the fingerprint of its results."""

    masks: NDArray[np.bool_]
    seeds: tuple[int, ...]
    fingerprint: dict[str, Any]
    train_id: str | None
    train_fn: Any
    """A function, or what trains several models side by side."""
    output_fn: OutputFunction
    progress: bool | None
    step: int = 0
    """Added to the seeds for every further subset."""
    at_once: int | None = None
    """Number of models that are trained side by side; ``None`` trains one after the other."""
    repeated: dict[tuple[int, int, int], NDArray[np.float32]] = field(default_factory=dict)
    """Outputs of models that were trained again, also those of parts of this plan: they have the same models."""

    @property
    def num_rows(self) -> int:
        """Number of models to train: S times R."""
        return len(self.masks) * len(self.seeds)

    def part(self, fingerprint: Mapping[str, Any]) -> _Plan | None:
        """Return the plan that has this fingerprint if it is one of the first of these subsets and seeds."""
        count, seeds = fingerprint.get("num_subsets"), fingerprint.get("seeds")
        if count not in range(len(self.masks) + 1) or not isinstance(seeds, list):
            return None
        plan = replace(self, masks=self.masks[:count], seeds=self.seeds[: len(seeds)])
        described = {**self.fingerprint, **_described(plan.masks, plan.seeds)}
        return replace(plan, fingerprint=described) if described == fingerprint else None

    def jobs(self, rows: Iterable[int]) -> Iterator[_Job]:
        for row in rows:
            subset, index = divmod(row, len(self.seeds))
            seed = self.seeds[index] + self.step * subset
            yield _Job(row, subset, seed, np.flatnonzero(self.masks[subset]))

    def spec(self, num_targets: int) -> TableSpec:
        """Return the spec of the table of outputs: row = subset * R + index of the seed."""
        columns = (Column(OUTPUTS, num_targets, "float32"),)
        # Processes claim whole chunks: use one model per chunk, unless that makes too many files.
        return TableSpec(self.num_rows, columns, -(-self.num_rows // _MOST_CHUNKS), self.fingerprint)

    def train(self, rows: Iterable[int]) -> Iterator[tuple[_Job, NDArray[np.float64]]]:
        for group in self._groups(self.jobs(rows)):
            subsets, seeds = [job.indices for job in group], [job.seed for job in group]
            try:
                models = (
                    [
                        self.train_fn(*pair) for pair in zip(subsets, seeds, strict=True)
                    ]  # map() ends at StopIteration
                    if self.at_once is None
                    else self.train_fn.train_many(subsets, seeds)
                )
            except Exception as error:
                if self.at_once is not None and isinstance(error, UnsupportedModelError):
                    raise
                raise _failed(group, error) from error
            for job, model in zip(group, models, strict=True):
                if model is None:
                    raise InvalidInputError(
                        "train_fn returned None. Return the trained module or its state dict."
                    )
                try:
                    outputs = self.output_fn(model)
                except Exception as error:
                    raise _failed([job], error) from error
                yield job, _checked(outputs, job)

    def _groups(self, jobs: Iterable[_Job]) -> Iterable[list[_Job]]:
        """Return models that are trained together: their subsets have one size."""
        if self.at_once is None:
            return ([job] for job in jobs)  # a job is drawn, and claimed, when the one before is trained
        by_size: dict[int, list[_Job]] = {}
        for job in jobs:
            by_size.setdefault(len(job.indices), []).append(job)
        return [
            same[start : start + self.at_once]
            for same in by_size.values()
            for start in range(0, len(same), self.at_once)
        ]

    def again(self, row: int, number: int) -> NDArray[np.float32]:
        """Return the outputs of a row of the table, trained again for the first (0) or the second time (1)."""
        job = next(self.jobs([row]))
        key = job.subset, job.seed, number
        if key not in self.repeated:
            ((_, outputs),) = self.train([row])
            self.repeated[key] = outputs.astype(np.float32)
        return self.repeated[key]


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


def retrain_into(workspace: Workspace, group: str, plan: _Plan, *, others: bool = False) -> Retrained:
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


def _reuse(workspace: Workspace, table_names: Iterable[str], path: str, plan: _Plan) -> str:
    """Copy outputs that are missing from a stored plan that is part of this one, and return how they were compared."""
    begun, parts = workspace.table(path), []
    missing = np.ones(plan.num_rows, np.bool_) if begun is None else ~begun.done()

    def rows_here(part: _Plan, rows: NDArray[np.int64]) -> NDArray[np.int64]:
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


def retraining_plan(
    train_fn: Any,
    masks: ArrayLike,
    output_fn: OutputFunction,
    seeds: Sequence[int],
    train_id: str | None,
    progress: bool | None,
    settings: Mapping[str, Any] | None = None,
) -> _Plan:
    """Check masks and seeds, and describe the training of one model after the other.

    The fingerprint of the results contains ``settings``, JSON values.
    """
    array = np.asarray(masks)
    if array.dtype != np.bool_ or array.ndim != 2 or not array.size or not array.any(axis=1).all():
        raise InvalidInputError(
            f"masks must be a boolean matrix (subsets, train rows) without an empty subset, got {array.dtype} of "
            f"shape {array.shape}. Make them with trak_lite.evaluation.subset_masks."
        )
    numbers = seed_numbers(seeds=seeds)
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
        **_described(array, numbers),
        "num_train_rows": array.shape[1],
        "training": training,
        **(settings or {}),
    }
    return _Plan(array, numbers, fingerprint, train_id, train_fn, output_fn, progress)


def seed_numbers(fewest: int = 1, **named: Sequence[int]) -> tuple[int, ...]:
    """Return the one keyword value as different integers, at least ``fewest``."""
    ((name, seeds),) = named.items()
    numbers: tuple[int, ...] = ()
    with contextlib.suppress(TypeError):
        numbers = tuple(int(operator.index(seed)) for seed in seeds)
    if len(numbers) < fewest or len(set(numbers)) < len(numbers):
        raise InvalidInputError(
            f"{name} must be {'one' if fewest == 1 else fewest} or more different integers, such as (0, 1), got "
            f"{seeds!r:.100}."
        )
    return numbers


def seed_step(seeds: Sequence[int]) -> int:
    """Return what is added to seeds for every further subset, so that no two subsets share one."""
    return max(seeds) - min(seeds) + 1


def _described(masks: NDArray[np.bool_], seeds: Sequence[int]) -> dict[str, Any]:
    digest = hashlib.sha256(np.packbits(masks, axis=1).tobytes()).hexdigest()
    return {"masks": digest, "num_subsets": len(masks), "seeds": list(seeds)}


def _filled(path: str | PathLike[str] | RemotePlace | None, plan: _Plan) -> Retrained:
    """Return the outputs of a store that holds one training, and train what is missing."""
    workspace = Workspace(None if path is None else resolve_place(path))
    with workspace.opened(Manifest({"kind": "retraining"})):
        is_same, compared = _compared(workspace, OUTPUTS, plan)
        if not is_same:
            raise ManifestMismatchError(
                f"{compared} Undo the change, or retrain under another path or train_id."
            )
        return _fill(workspace, OUTPUTS, plan, compared)


def _compared(workspace: Workspace, path: str, plan: _Plan) -> tuple[bool, str]:
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


def _begun(workspace: Workspace, path: str, plan: _Plan) -> LazyTable:
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


def _require_width(lazy: LazyTable, job: _Job, outputs: NDArray[np.float64]) -> None:
    width = lazy.spec.columns[0].width
    if len(outputs) != width:
        raise InvalidInputError(
            f"output_fn returned {len(outputs)} numbers for {job}, and {width} before. Return one per target."
        )


def _fill(workspace: Workspace, path: str, plan: _Plan, compared: str) -> Retrained:
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


def _checked(outputs: Tensor | ArrayLike, job: _Job) -> NDArray[np.float64]:
    """Return finite outputs ``(M,)``."""
    plain = outputs.detach().cpu().double().numpy() if isinstance(outputs, Tensor) else outputs
    values = np.asarray(plain, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise InvalidInputError(
            f"output_fn returned shape {values.shape} for {job}. Expected one number per target, (M,)."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise NonFiniteError(
            f"{len(bad)} of {len(values)} outputs are NaN or infinite for {job}, the first for target "
            f"{bad[0]}. The training may have diverged; lower its learning rate."
        )
    return values


def _failed(jobs: list[_Job], error: BaseException) -> RetrainingError:
    where = "; ".join(map(str, jobs))
    return RetrainingError(
        f"Training for {where} failed ({type(error).__name__}: {error}). The outputs of finished trainings are stored. "
        "Make the same call again to continue."
    )
