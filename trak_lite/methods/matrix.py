"""Methods whose scores are not products of stored feature rows: replays of training, and averages of methods."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import real_at_least
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.linalg.products import standardised
from trak_lite.methods.base import AbstractMethod, MadeScores, MatrixParts
from trak_lite.methods.registry import Method, as_method
from trak_lite.modelout_functions import AbstractModelOutput


class ReplayableRun(Protocol):
    """A finished :class:`~trak_lite.unrolled.TrainingRun`."""

    @property
    def digest(self) -> str:
        """Digest of the settings and of the trained weights."""

    def require_same(self) -> None:
        """Raise if the training has changed since."""


@dataclass(frozen=True, kw_only=True)
class AbstractMatrixMethod(AbstractMethod):
    """A method that gives a whole matrix of scores. Feature rows are not multiplied, and there is no kernel."""

    q: Literal["off"] = field(init=False, default="off")
    """``"off"``: the scores are derivatives of the loss, or contain q already."""
    checkpoint_weights: None = field(init=False, default=None)
    """None: the checkpoints of the store are not weighted."""

    linear: ClassVar[bool] = False
    multiplies_rows: ClassVar[bool] = False

    kernel = None

    @abstractmethod
    def matrix(self, parts: MatrixParts) -> MadeScores:
        """Return the scores of all train rows for all targets."""


@final
@dataclass(frozen=True, init=False)
class Unrolled(AbstractMatrixMethod):
    """Exact derivatives of targets by the weights of train rows, through the training itself.

    :func:`~trak_lite.unrolled.unrolled` computes them, and :meth:`~trak_lite.Attributor.score` stores their mean over
    runs with the other scores of a target set.
    """

    runs: tuple[ReplayableRun, ...]
    """Finished runs of a :class:`~trak_lite.unrolled.Recipe`; scores are averaged over them."""

    def __init__(self, *runs: ReplayableRun) -> None:
        """Take one or more finished runs.

        Raises:
            InvalidInputError: If there is none, or one is not a run.
        """
        if not runs or not all(hasattr(run, "digest") for run in runs):
            raise InvalidInputError(
                "Unrolled takes finished runs: run = Recipe(...).train(path), then Unrolled(run). A name is not enough."
            )
        object.__setattr__(self, "runs", runs)

    def check(self, task: AbstractModelOutput) -> None:
        """Raise if a training has changed since, because stored scores would not be those of the present one."""
        for run in self.runs:
            run.require_same()

    def matrix(self, parts: MatrixParts) -> MadeScores:
        """Return the mean over the runs."""
        return parts.replays(self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the name and the digests of the runs."""
        return {"name": self.name, "runs": [run.digest for run in self.runs]}


@final
@dataclass(frozen=True, init=False)
class Mean(AbstractMatrixMethod):
    """The mean of the scores of several methods, each column standardised to mean 0 and variance 1 first.

    Methods that err differently predict retraining better together. The scores have no unit.
    """

    methods: tuple[AbstractMethod, ...]
    method_weights: tuple[float, ...]
    """Weight of each method; they sum to 1."""

    def __init__(self, *methods: Method, method_weights: Sequence[float] | None = None) -> None:
        """Take two or more methods or names, and weights, which are divided by their sum; ``None`` weighs all alike.

        Raises:
            InvalidInputError: If there are fewer than two methods, or weights are negative or not one per method.
        """
        if len(methods) < 2:
            raise InvalidInputError(f"Mean takes two or more methods, got {methods!r:.200}.")
        methods = tuple(map(as_method, methods))
        weights = (1.0,) * len(methods) if method_weights is None else method_weights
        try:
            listed = tuple(weights)
        except TypeError:
            listed = ()
        numbers = tuple(real_at_least(0.0, method_weights=weight) for weight in listed)
        if len(numbers) != len(methods) or not sum(numbers):
            raise InvalidInputError(
                f"method_weights must be one per method and not all zero, got {method_weights!r}."
            )
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "method_weights", tuple(number / sum(numbers) for number in numbers))

    def check(self, task: AbstractModelOutput) -> None:
        """Check the task with every method."""
        for method in self.methods:
            method.check(task)

    def check_rows(self, kind: str) -> None:
        """Check the kind of the rows with every method."""
        for method in self.methods:
            method.check_rows(kind)

    def matrix(self, parts: MatrixParts) -> MadeScores:
        """Return the mean over the methods."""
        made = [method.matrix(parts) for method in self.methods]
        smoothness = tuple(value for part in made for value in part.metasmoothness)
        return MadeScores(self.combined([part.scores for part in made]), None, smoothness)

    def combined(self, matrices: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the weighted mean of standardised score matrices, each ``(N, M)``."""
        total = np.zeros(matrices[0].shape)
        for weight, matrix in zip(self.method_weights, matrices, strict=True):
            if np.isnan(matrix).any():
                raise NonFiniteError(
                    "A score is NaN, so columns cannot be standardised. Leave out refine and k."
                )
            total += weight * standardised(matrix)
        return total.astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return the name, the methods and their weights."""
        return {
            "name": self.name,
            "methods": [method.to_json() for method in self.methods],
            "method_weights": list(self.method_weights),
        }
