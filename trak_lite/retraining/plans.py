"""Which models a retraining trains, with which rows and seeds, and how; nothing is stored.

Shapes: N train rows, S subsets, R seeds, M targets.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from trak_lite.core.fingerprint import describe_source
from trak_lite.errors import InvalidInputError, NonFiniteError, RetrainingError, UnsupportedModelError
from trak_lite.store import Column, TableSpec

TrainFunction: TypeAlias = Callable[[NDArray[np.int64], int], Any]
"""``train_fn(indices, seed)``: trains on these rows and returns the argument of ``output_fn``, such as a module."""
OutputFunction: TypeAlias = Callable[[Any], Tensor | ArrayLike]
"""``output_fn(trained)``: M numbers, the model output of every target."""

OUTPUTS = "outputs"
_MOST_CHUNKS = 1024


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One model to train."""

    row: int
    subset: int
    seed: int
    indices: NDArray[np.int64]

    def __str__(self) -> str:
        return f"subset {self.subset}, seed {self.seed} ({len(self.indices)} rows)"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
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

    def part(self, fingerprint: Mapping[str, Any]) -> Plan | None:
        """Return the plan that has this fingerprint if it is one of the first of these subsets and seeds."""
        count, seeds = fingerprint.get("num_subsets"), fingerprint.get("seeds")
        if count not in range(len(self.masks) + 1) or not isinstance(seeds, list):
            return None
        plan = replace(self, masks=self.masks[:count], seeds=self.seeds[: len(seeds)])
        described = {**self.fingerprint, **_described(plan.masks, plan.seeds)}
        return replace(plan, fingerprint=described) if described == fingerprint else None

    def jobs(self, rows: Iterable[int]) -> Iterator[Job]:
        """Yield the models of some rows of the table."""
        for row in rows:
            subset, index = divmod(row, len(self.seeds))
            seed = self.seeds[index] + self.step * subset
            yield Job(row, subset, seed, np.flatnonzero(self.masks[subset]))

    def spec(self, num_targets: int) -> TableSpec:
        """Return the spec of the table of outputs: row = subset * R + index of the seed."""
        columns = (Column(OUTPUTS, num_targets, "float32"),)
        # Processes claim whole chunks: use one model per chunk, unless that makes too many files.
        return TableSpec(self.num_rows, columns, -(-self.num_rows // _MOST_CHUNKS), self.fingerprint)

    def train(self, rows: Iterable[int]) -> Iterator[tuple[Job, NDArray[np.float64]]]:
        """Train the models of some rows of the table, and yield their outputs."""
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

    def _groups(self, jobs: Iterable[Job]) -> Iterable[list[Job]]:
        """Return models that are trained together: their subsets have one size."""
        if self.at_once is None:
            return ([job] for job in jobs)  # a job is drawn, and claimed, when the one before is trained
        by_size: dict[int, list[Job]] = {}
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


def retraining_plan(
    train_fn: Any,
    masks: ArrayLike,
    output_fn: OutputFunction,
    seeds: Sequence[int],
    train_id: str | None,
    progress: bool | None,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
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
    return Plan(array, numbers, fingerprint, train_id, train_fn, output_fn, progress)


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


def _checked(outputs: Tensor | ArrayLike, job: Job) -> NDArray[np.float64]:
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


def _failed(jobs: list[Job], error: BaseException) -> RetrainingError:
    where = "; ".join(map(str, jobs))
    return RetrainingError(
        f"Training for {where} failed ({type(error).__name__}: {error}). The outputs of finished trainings are stored. "
        "Make the same call again to continue."
    )
