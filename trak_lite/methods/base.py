"""Base classes of attribution methods, which compute scores from stored feature rows."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.json_text import shown
from trak_lite.core.validate import one_of, optional, real_at_least
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.kernel import KernelSettings
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import FeatureLayout


class MadeScores(NamedTuple):
    """Scores of one target set in memory."""

    scores: NDArray[np.float32]
    """``(N, M)``."""
    errors: NDArray[np.float32] | None = None
    """Their standard errors over runs, if they are a mean over runs."""
    metasmoothness: tuple[float, ...] = ()
    """Of every replayed run."""


class MatrixParts(Protocol):
    """Computes what the scores of one target set are made of."""

    def products(self, method: AbstractMethod) -> MadeScores:
        """Return the scores of a method that multiplies stored rows."""

    def replays(self, runs: Sequence[Any]) -> MadeScores:
        """Return the mean of the derivatives through finished :class:`~trak_lite.unrolled.TrainingRun` objects."""


Check: TypeAlias = Callable[..., Any]
"""Returns its one keyword value, or raises."""
_LONGEST_REPR: Final = 1000
CHECK_LAYOUT: Final = partial(one_of, ("stored", "joint"))


def _finite_weights(**named: Any) -> tuple[float, ...]:
    """Return the one keyword value as floats; raise if one is not finite or all are zero."""
    ((field, weights),) = named.items()
    try:
        values = tuple(float(weight) for weight in weights)
    except (TypeError, ValueError):
        values = ()
    if not values or not all(map(math.isfinite, values)) or not any(values):
        raise InvalidInputError(
            f"{field} must be finite numbers that are not all zero, one per checkpoint, got {weights!r}."
        )
    return values


@dataclass(frozen=True, kw_only=True)
class AbstractMethod(ABC):
    r"""Defines how scores are computed from stored feature rows. A subclass is a frozen dataclass of its settings.

    With :math:`\phi` the features of train row i, t those of target j, :math:`a_c` the weight of checkpoint c and
    :math:`H_c` its kernel, the score is :math:`\sum_c a_c \, \phi_{c,i}^\top (H_c + \lambda_c I)^{-1} t_{c,j}`,
    multiplied by q as set by :attr:`q`. If :attr:`kernel` is ``None``, the inverse is omitted.

    Raises:
        InvalidInputError: If a field has an invalid value.
    """

    q: Literal["inside", "outside", "off"] = "inside"
    """Where the out-to-loss gradient q of a train row multiplies its scores. ``"inside"``: each summand of the sum over
    checkpoints, by the q of that checkpoint. ``"outside"``: the sum, by the mean q over checkpoints (TRAK section 3.3).
    ``"off"``: nowhere."""
    checkpoint_weights: tuple[float, ...] | None = None
    """Weight of each checkpoint, in order. ``None`` weighs each checkpoint by 1/C. Weights may be negative: with
    ``q="inside"``, ``(1, -1)`` subtracts the scores of a base model."""

    layout: ClassVar[Any] = "stored"
    version: ClassVar[int] = 1
    """Part of the method's identity in a store. Increase it when you change the code of a method: scores are found by
    the fields and the version, not by the code."""
    linear: ClassVar[bool] = True
    """Whether the scores are linear in the train row's features. Token scores require it."""
    gradient_copies: ClassVar[int] = 1
    """How often unprojected gradients of targets are in memory, with the vectors of a solver."""
    multiplies_rows: ClassVar[bool] = True
    """Whether scores are products of stored rows, so that some can be computed without the others."""

    _checks: ClassVar[Mapping[str, Check]] = {
        "q": partial(one_of, ("inside", "outside", "off")),
        "checkpoint_weights": optional(_finite_weights),
    }
    """Checks of fields, besides those of the bases."""
    _field_of_weights: ClassVar[str] = "checkpoint_weights"

    def __post_init__(self) -> None:
        for cls in reversed(type(self).__mro__):
            for name, check in vars(cls).get("_checks", {}).items():
                object.__setattr__(self, name, check(**{name: getattr(self, name)}))

    def __str__(self) -> str:
        """Return the ``repr``; if it is long, the class and its fields, and of a long field the first values."""
        if len(text := repr(self)) <= _LONGEST_REPR:
            return text
        texts = (f"{field.name}={shown(getattr(self, field.name))}" for field in fields(self) if field.repr)
        return f"{self.name}({', '.join(texts)})"

    @property
    @abstractmethod
    def kernel(self) -> KernelSettings | None:
        """The matrix whose inverse multiplies the targets; ``None`` for a method without a kernel."""

    @property
    def fisher_fit(self) -> Any:
        """The :class:`Fisher` whose fit to the train rows is the kernel; ``None`` without one."""
        return None

    @property
    def inverse(self) -> Any:
        """The :class:`AbstractInverseMethod` that multiplies targets before they are projected, if any."""
        return None

    @property
    def transforms_rows(self) -> bool:
        """Whether the method changes rows before the product."""
        cls = type(self)
        return (
            cls.transform is not AbstractMethod.transform
            or cls.transform_targets is not AbstractMethod.transform_targets
        )

    @property
    def name(self) -> str:
        """Name of the class, used in configs, on the command line and in a store's manifest."""
        return type(self).__name__

    def transform(self, rows: Tensor, layout: FeatureLayout) -> Tensor:
        """Return transformed feature rows, which replace ``rows`` in the products, ``(b, K) -> (b, K)``.

        Called on train rows, and on targets unless :meth:`transform_targets` is overridden, only if :attr:`kernel` is
        ``None``. The default returns ``rows``.

        Args:
            rows: Features of train rows or of targets, any float dtype: a copy, which may be changed in place.
            layout: Segments of a row.
        """
        return rows

    def transform_targets(self, rows: Tensor, layout: FeatureLayout) -> Tensor:
        """Return transformed target rows, which replace ``rows`` in the products, ``(m, K) -> (m, K)``.

        Called only if :attr:`kernel` is ``None``. The default calls :meth:`transform`. Override it for a method that
        transforms train rows and targets differently.
        """
        return self.transform(rows, layout)

    def unit_scope(self, layout: FeatureLayout) -> Literal["module", "global"] | None:
        """Return what is divided by its norm if gradients are not projected: every module, or the whole gradient.

        ``None``, the default, divides nothing. A method that overrides :meth:`transform` needs projected rows
        otherwise.
        """
        return None

    def matrix(self, parts: MatrixParts) -> MadeScores:
        """Return the scores of all train rows for all targets; by default the products of stored rows."""
        return parts.products(self)

    def check(self, task: AbstractModelOutput) -> None:
        """Raise :class:`~trak_lite.errors.InvalidInputError` if the task lacks what the method needs."""
        del task

    def check_rows(self, kind: str) -> None:
        """Raise :class:`~trak_lite.errors.InvalidInputError` if the method cannot be used with rows of a kind.

        Args:
            kind: The kind of the attributor's ``normalize`` (:class:`~trak_lite.Normalization`).
        """
        if kind == "adam_update" and (self.kernel is not None or self.q != "off"):
            raise InvalidInputError(
                f"The train rows are Adam updates of the loss (normalize='adam_update'), and {self.name} with "
                f"q={self.q!r} needs gradients of f. Use LESS, GradCos(layout='joint') or GradDot(q='off'), or "
                "featurize into another path with normalize='none' or 'adam'."
            )

    def decided(self, layout: FeatureLayout) -> Self:
        """Return the method with the defaults that depend on the row layout resolved."""
        if self.layout == "joint" and len(layout.segments) == 1:
            # Both layouts give the same scores here, so they must have the same path in the store. Only subclasses
            # with a layout field can have the layout "joint".
            return replace(self, layout="stored")  # type: ignore[call-arg]
        return self

    def layout_of(self, layout: FeatureLayout) -> FeatureLayout:
        """Return the layout that the method uses for rows of the stored layout: as stored, or one joint segment."""
        return FeatureLayout.joint(layout.width) if self.layout == "joint" else layout

    def weights(self, num_checkpoints: int) -> tuple[float, ...]:
        """Return the weight of each checkpoint: ``checkpoint_weights``, or ``learning_rates``; 1/C if it is ``None``.

        Raises:
            InvalidInputError: If the number of weights is not the number of checkpoints.
        """
        weights = getattr(self, self._field_of_weights)
        if weights is None:
            return (1.0 / num_checkpoints,) * num_checkpoints
        if len(weights) != num_checkpoints:
            raise InvalidInputError(
                f"{self._field_of_weights} has {len(weights)} numbers, but {num_checkpoints} checkpoints are scored. "
                "Give one per checkpoint, in their order, or name the checkpoints: score(..., checkpoints=[...]). "
                "Checkpoints with equal weights are one: give the sum of their numbers."
            )
        return tuple(weights)

    def to_json(self) -> dict[str, Any]:
        """Return the name and the fields as JSON values: the identity of the method in a store.

        Raises:
            InvalidInputError: If a field of an own class has no such value; names the field.
        """
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        for name, value in plain.items():
            try:
                plain[name] = json.loads(json.dumps(value, allow_nan=False))  # as a store returns it
            except (TypeError, ValueError) as error:
                raise InvalidInputError(
                    f"{self.name}.{name} must be a text, a finite number, True, False, None, or a tuple of these, "
                    f"because it identifies the scores in a store: {error}, got {value!r:.100}. Keep an array as an "
                    "entry of the store, whose name and key are fields."
                ) from error
        version = {} if self.version == 1 else {"version": self.version}
        return {"name": self.name, **version, **plain}


@dataclass(frozen=True, kw_only=True)
class AbstractLearningRateMethod(AbstractMethod):
    """A method without a kernel that weighs checkpoints by their learning rates."""

    learning_rates: tuple[float, ...] | None = None
    """Learning rate of each checkpoint, in order. ``None`` weighs each checkpoint by 1/C."""
    checkpoint_weights: None = field(init=False, default=None)
    """None, because the learning rates are the weights."""

    _checks: ClassVar = {"learning_rates": optional(_finite_weights)}
    _field_of_weights: ClassVar[str] = "learning_rates"
    kernel = None


@dataclass(frozen=True, kw_only=True)
class AbstractKernelMethod(AbstractMethod):
    """A method that multiplies targets by the inverse of a damped matrix in feature space."""

    q: Literal["inside", "outside", "off"] = "outside"
    damping: float | None = None
    """Lambda in units of the mean eigenvalue of a segment's kernel, at least 0. ``None`` sets the lambda of each
    segment to a share of the root mean square of its eigenvalues; see
    :data:`~trak_lite.linalg.kernel.DEFAULT_SHARES`."""

    weighting: ClassVar[Literal["curvature", "none", "fisher"]]
    """Weighting of the kernel matrix; see :class:`~trak_lite.linalg.kernel.KernelSettings`."""
    _checks: ClassVar = {"damping": optional(partial(real_at_least, 0.0)), "layout": CHECK_LAYOUT}

    @property
    def kernel(self) -> KernelSettings:
        """The matrix whose inverse multiplies the targets."""
        return KernelSettings(weighting=self.weighting, damping=self.damping)
