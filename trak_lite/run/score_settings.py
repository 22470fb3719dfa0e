"""What a score is made of: kernel, q, checkpoints' weights, segments, as plain values for a result's record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, TypeAlias, TypedDict, final, get_args

from trak_lite._validate import one_of, real_at_least
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.kernel import DEFAULT_DAMPING, KernelSettings

__all__ = ["DEFAULT_KRONECKER_DAMPING", "ScoreSettings", "ScoreView", "ScoredKernel"]

ScoredKernel: TypeAlias = Literal["curvature", "fisher", "trak", "dot", "cosine", "ekfac"]
"""Names of kernels."""

DEFAULT_KRONECKER_DAMPING: Final = 1.0
"""Lambda in units of the mean eigenvalue of a layer's curvature.

Grosse et al. (arXiv:2308.03296) and kronfluence take 0.1, without a projection. The inverse enlarges directions of
little curvature, of which rows that were projected to K numbers know least: on 512 digits the scores of rows of
K = 2048 have a correlation of .25 with those of whole gradients at 0.1, .61 at 1 and .90 at 10 (CNN: .53, .83, .96;
``benchmarks/ekfac_parity.py``). Without a projection the design study's linear datamodeling scores at 0.1 and 1 were
.410 and .433 (CNN: .437 and .416).
"""


class ScoreView(TypedDict, total=False):
    """The settings that may differ from call to call, as keywords; see :class:`ScoreSettings`."""

    kernel: ScoredKernel | None
    damping: float | None
    layout: Literal["stored", "joint"]
    q: Literal["outside", "inside", "off"] | None
    checkpoint_weights: Any


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    r"""Everything that turns stored rows into scores.

    The score of train row i for target j over checkpoints c and segments s, with t the targets behind the kernel:
    :math:`\sum_c a_c \sum_s \phi_{c,i,s}^\top t_{c,j,s}`, times q.

    Raises:
        InvalidInputError: If a value is unknown, of the wrong type or out of range.

    Example:
        TracIn (arXiv:2002.08484), with the learning rates of two checkpoints:

        >>> ScoreSettings(kernel="dot", q="inside", checkpoint_weights=(0.1, 0.01)).to_json()["damping"] is None
        True
    """

    kernel: ScoredKernel = "curvature"
    """``"curvature"`` weighs train rows by their loss curvature, ``"fisher"`` has the Fisher information of the model's
    own predictions for a kernel, ``"trak"`` the plain gram of the train rows, ``"dot"`` has no kernel,
    ``"cosine"`` none either, and divides rows and targets by their norms, segment by segment. ``"ekfac"`` takes targets
    that were multiplied with the inverse of a Kronecker-factored curvature before they were projected."""
    damping: float | None = None
    """Lambda in mean eigenvalues (``"ekfac"``: of a layer's curvature); ``None`` is 1, and stays ``None`` where there
    is nothing to damp. An attributor that is given none passes on a share of the trace, except for ``"ekfac"``."""
    layout: Literal["stored", "joint"] = "stored"
    """``"stored"`` gives each segment of the stored rows a kernel of its own, ``"joint"`` one to the whole row."""
    q: Literal["outside", "inside", "off"] = "inside"
    """``"outside"`` multiplies a row's scores by its mean q over checkpoints, ``"inside"`` each checkpoint's part by
    the q of that checkpoint, ``"off"`` by nothing."""
    checkpoint_weights: tuple[float, ...] | None = None
    """a, one per checkpoint in order; any sign (``(1, -1)`` subtracts a base model); ``None`` is 1/C each."""

    def __post_init__(self) -> None:
        """Refuse values that no score can be made with."""
        one_of(get_args(ScoredKernel), kernel=self.kernel)
        one_of(("stored", "joint"), layout=self.layout)
        one_of(("outside", "inside", "off"), q=self.q)
        object.__setattr__(self, "damping", self._checked_damping())
        if self.checkpoint_weights is not None:
            object.__setattr__(self, "checkpoint_weights", _checked_weights(self.checkpoint_weights))

    @property
    def kernel_settings(self) -> KernelSettings | None:
        """Settings of the kernel; ``None`` where rows and targets meet without one."""
        if self.kernel not in _WEIGHTINGS:
            return None
        damping = DEFAULT_DAMPING if self.damping is None else self.damping
        return KernelSettings(weighting=_WEIGHTINGS[self.kernel], damping=damping)

    def weights(self, num_checkpoints: int) -> tuple[float, ...]:
        """Return a, one per checkpoint.

        Raises:
            InvalidInputError: If the weights are not as many as the checkpoints.
        """
        if self.checkpoint_weights is None:
            return (1.0 / num_checkpoints,) * num_checkpoints
        if len(self.checkpoint_weights) != num_checkpoints:
            raise InvalidInputError(
                f"checkpoint_weights has {len(self.checkpoint_weights)} numbers, but {num_checkpoints} checkpoints are "
                "scored. Give one per checkpoint, in their order, or name the checkpoints: checkpoints=[...]."
            )
        return self.checkpoint_weights

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        weights = self.checkpoint_weights
        return {**asdict(self), "checkpoint_weights": None if weights is None else list(weights)}

    def view(self) -> ScoreView:
        """Return the settings as the keywords of a call."""
        return ScoreView(
            kernel=self.kernel,
            damping=self.damping,
            layout=self.layout,
            q=self.q,
            checkpoint_weights=self.checkpoint_weights,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return what a table of scores is compared by.

        Settings that do not differ from those of tables that are older than they are left out.
        """
        kernel = self.kernel_settings
        view = {name: self.to_json()[name] for name in _VIEW if getattr(self, name) != getattr(_PLAIN, name)}
        return {
            "kernel": self._named_kernel() if kernel is None else kernel.to_json(),
            **({"view": view} if view else {}),
        }

    @classmethod
    def from_fingerprint(cls, fingerprint: Mapping[str, Any]) -> Self:
        """Read what :meth:`fingerprint` wrote."""
        kernel, view = fingerprint["kernel"], {"q": _PLAIN.q, **fingerprint.get("view", {})}
        if "name" in kernel:
            return cls(kernel=kernel["name"], damping=kernel.get("damping"), **view)
        settings = KernelSettings.from_json(kernel)
        name = next(name for name, weighting in _WEIGHTINGS.items() if weighting == settings.weighting)
        return cls(kernel=name, damping=settings.damping, **view)

    def _named_kernel(self) -> dict[str, Any]:
        damping = {} if self.damping is None else {"damping": self.damping}
        return {"name": self.kernel, **damping}

    def _checked_damping(self) -> float | None:
        if self.kernel == "ekfac":
            return DEFAULT_KRONECKER_DAMPING if self.damping is None else _above_zero(self.damping)
        kernel = self.kernel_settings
        if kernel is not None:
            return kernel.damping
        if self.damping is not None:
            raise InvalidInputError(
                f"damping={self.damping!r} was given, but kernel={self.kernel!r} has nothing to damp. Leave it out, or "
                "use kernel='curvature', 'fisher', 'trak' or 'ekfac'."
            )
        return None


_WEIGHTINGS: Final[Mapping[ScoredKernel, Literal["curvature", "none", "fisher"]]] = {
    "curvature": "curvature",
    "fisher": "fisher",
    "trak": "none",
}
_PLAIN = ScoreSettings(q="outside")  # as tables were made that say nothing of a view
_VIEW = tuple(field.name for field in fields(ScoreSettings) if field.name not in ("kernel", "damping"))


def _above_zero(damping: float) -> float:
    """Return a damping that a Kronecker-factored curvature can be inverted with."""
    number = real_at_least(0.0, damping=damping)
    if number == 0.0:
        raise InvalidInputError(
            "damping=0 with kernel='ekfac' would divide by zero wherever no train row has curvature. Use a number "
            f"above 0 (the default is {DEFAULT_KRONECKER_DAMPING:g})."
        )
    return number


def _checked_weights(weights: Any) -> tuple[float, ...]:
    """Return finite floats that are not all zero."""
    try:
        values = tuple(float(weight) for weight in weights)
    except (TypeError, ValueError):
        values = ()
    if not values or not all(map(math.isfinite, values)) or not any(values):
        raise InvalidInputError(
            f"checkpoint_weights must be finite numbers that are not all zero, one per checkpoint, got {weights!r}."
        )
    return values
