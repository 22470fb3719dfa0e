"""Methods that multiply the gradients of targets by an inverse curvature of the whole network."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, Self

from torch import Tensor

from trak_lite.core.validate import one_of, optional, positive_int, positive_real
from trak_lite.errors import InvalidInputError
from trak_lite.methods.base import AbstractMethod
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.modelout_functions._base import LossModelOutput

_FIT: Final = ("fisher", "correct_eigenvalues", "draws", "seed", "max_rows", "max_side")

_SAMPLED: Final = 0.3
_above_zero = partial(positive_real, "{name} must be above 0, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class AbstractInverseMethod(AbstractMethod):
    """A method that multiplies the gradients of targets by an inverse curvature before they are projected."""

    damping: float = 1.0

    gradient_copies: ClassVar[int] = 2
    absolute = False
    """Whether the damping is the same number for all layers."""
    kernel = None

    @property
    def inverse(self) -> Self:
        """The method itself."""
        return self

    def solve(self, solver: Any, gradients: Tensor) -> Any:
        """Return target gradients ``(m, P)`` multiplied by the inverse, by one of the solver's methods.

        Raises:
            InvalidInputError: If the method defines no solver.
        """
        raise InvalidInputError(
            f"{self.name} is neither EKFAC nor CG nor LiSSA, and no solver is known for it."
        )

    @property
    def reads_rows(self) -> bool:
        """Whether targets are multiplied with the help of the train rows, beside the stored fit."""
        return False

    @property
    def kronecker_share(self) -> float | None:
        """Share of the EK-FAC in a curvature that gradients are a part of, too; ``None`` if they are not."""
        return None

    @property
    def product_draws(self) -> int | None:
        """Labels drawn per row for products with the curvature; ``None`` computes these exactly."""
        return None

    @property
    @abstractmethod
    def ekfac(self) -> EKFAC:
        """The EK-FAC whose fit the method uses."""

    def check(self, task: AbstractModelOutput) -> None:
        """Raise if the task does not support the fit."""
        self.ekfac.fitted_to(task)

    def check_rows(self, kind: str) -> None:
        """Raise if rows are changed by Adam's state, because the curvature is that of plain gradients."""
        if kind in ("adam", "adam_update"):
            raise InvalidInputError(
                f"The rows were made with normalize={kind!r}, and {self.name} needs plain gradients. Use another "
                "method or another path with normalize='none'."
            )

    def target_json(self) -> dict[str, Any]:
        """Return the fields that the features of targets depend on, as JSON values."""
        scored = ("q", "checkpoint_weights")
        return {name: value for name, value in self.to_json().items() if name not in scored}


@dataclass(frozen=True, kw_only=True)
class EKFAC(AbstractInverseMethod):
    """Influence functions with the eigenvalue-corrected Kronecker-factored curvature of every layer.

    The gradients of the targets are multiplied by the inverse curvature before they are projected, so each target set
    is featurized again for this method. The first ``score`` with this method fits the curvature to the train rows: two
    passes over the train rows per checkpoint, and one eigendecomposition for each side of every layer. The fit resumes
    after a kill.
    Source: Grosse et al. (arXiv:2308.03296), section 2; George et al. (arXiv:1806.03884).
    """

    damping: float = 1.0
    """Lambda in units of the mean eigenvalue of a layer's curvature, above 0.

    Grosse et al. and kronfluence use 0.1, without a projection. The inverse amplifies directions of low curvature,
    which the projection to K features preserves worst (``benchmarks/ekfac_parity.py``). Without a projection the linear
    datamodeling scores on 512 digits at 0.1 and 1 were .410 and .433 (CNN: .437 and .416)."""
    fisher: Literal["auto", "sampled", "empirical", "curvature"] = "auto"
    r"""Matrix to fit. ``"sampled"``: the Fisher information with labels drawn from the model, which is the Gauss-Newton
    matrix of the training loss over all model outputs. ``"empirical"``: the empirical Fisher, with the labels of the
    data. ``"curvature"``: the Gauss-Newton matrix of the loss as a function of f alone,
    :math:`\sum w \nabla f \nabla f^\top`, which equals ``"sampled"`` if the model has one output. ``"auto"`` uses the
    first of ``"sampled"``, ``"curvature"``, ``"empirical"`` that the task supports."""
    correct_eigenvalues: bool = True
    """``True`` is EK-FAC: the eigenvalues are the second moments of the gradients in the eigenbasis, which takes one
    more pass over the rows. ``False`` is K-FAC: they are the products of the factors' eigenvalues."""
    draws: int = 1
    """Labels drawn per row. Each draw takes one pass."""
    seed: int = 0
    """Seed of the draws. The draws of a row depend only on the seed and the row number."""
    max_rows: int | None = None
    """Number of evenly spaced train rows to fit on; ``None`` uses all."""
    max_side: int = 16384
    """Longest side to decompose. A longer one (a vocabulary) is not rotated into an eigenbasis."""
    samples: int | None = None
    r"""Number n of gradients for drawn labels, spread over the train rows, that enter the curvature as they are. It is
    rounded down to a multiple of N if it is above N.

    With the EK-FAC matrix K and the sampled loss gradients g, the curvature is
    :math:`(1 - s) K + s \frac{N}{n} \sum g g^\top` with s = 0.3. Its inverse is exact (Woodbury identity). The
    gradients include what the factors leave out: positions of a text, or layers, that depend on each other. They are
    computed for every checkpoint and every part of the targets, and take n P numbers in memory."""

    _checks: ClassVar = {
        "damping": partial(
            positive_real,
            "EKFAC(damping=0) would divide by zero wherever no train row has curvature. Use a number above 0 (the "
            "default is 1).",
        ),
        "fisher": partial(one_of, ("auto", "sampled", "empirical", "curvature")),
        "draws": positive_int,
        "max_side": positive_int,
        "max_rows": optional(positive_int),
        "samples": optional(positive_int),
    }

    @property
    def reads_rows(self) -> bool:
        """Whether there are ``samples``."""
        return self.samples is not None

    @property
    def kronecker_share(self) -> float | None:
        """1 - s, if there are ``samples``."""
        return 1 - _SAMPLED if self.samples else None

    @property
    def ekfac(self) -> EKFAC:
        """The method itself."""
        return self

    def fitted_to(self, task: AbstractModelOutput) -> EKFAC:
        """Return the method with ``fisher="auto"`` resolved for a task.

        Raises:
            InvalidInputError: If the task does not support ``fisher``.
        """
        fisher = self.fisher
        if fisher == "auto":
            fisher = "sampled" if task.can_sample else "curvature" if task.has_curvature else "empirical"
        if fisher == "sampled" and not task.can_sample:
            raise InvalidInputError(
                f"fisher='sampled' draws labels from the model, and {type(task).__name__} does not define their "
                "distribution. Use fisher='empirical', or define sample_labels."
            )
        if fisher == "curvature" and not task.has_curvature:
            raise InvalidInputError(
                f"fisher='curvature' needs a loss that is curved in f, but the loss of {type(task).__name__} is linear "
                "in it: the matrix would be zero. Use fisher='empirical'."
            )
        if self.samples and fisher != "sampled":
            raise InvalidInputError(
                f"samples={self.samples} are gradients for drawn labels, and {type(task).__name__} is fitted with "
                f"fisher={fisher!r}, which draws none. Use samples=None."
            )
        return replace(self, fisher=fisher, draws=self.draws if fisher == "sampled" else 1)

    def loss_of(self, task: AbstractModelOutput) -> LossModelOutput:
        """Return the model output whose summed gradient outer products are the curvature."""
        return LossModelOutput(
            task, weight="loss_curvature" if self.fisher == "curvature" else "out_to_loss_grad"
        )

    def solve(self, solver: Any, gradients: Tensor) -> Any:
        """Multiply by the inverse; see :meth:`AbstractInverseMethod.solve`."""
        return solver.with_samples(self, gradients) if self.samples else solver.precondition(gradients)

    def fit_json(self) -> dict[str, Any]:
        """Return the fields that the fit depends on, as JSON values."""
        return {name: getattr(self, name) for name in _FIT}

    def to_json(self) -> dict[str, Any]:
        """Return the name and the fields; ``samples`` only if there are some, as in stores from before this field."""
        values = super().to_json()
        if not self.samples:
            del values["samples"]
        return values

    def target_json(self) -> dict[str, Any]:
        """Return the fields that the features of targets depend on, as JSON values."""
        samples = {"samples": self.samples} if self.samples else {}
        return {"damping": self.damping, **self.fit_json(), **samples}


@dataclass(frozen=True, kw_only=True)
class AbstractIterativeMethod(AbstractInverseMethod):
    """A method that solves with the Gauss-Newton matrix of the training loss itself."""

    damping: float = 1.0
    """Lambda, above 0. In units of the mean eigenvalue of a layer's curvature, as in :class:`EKFAC`; with ``absolute``,
    in units of the summed training loss."""
    absolute: bool = False
    """Whether the damping is the same number for all layers. If training minimised the mean loss with weight decay c
    (:math:`c \\lVert\\theta\\rVert^2 / 2`), it is N c."""
    draws: int | None = None
    """``None`` computes the products exactly. A number D estimates H by the gradients for D labels per row that are
    drawn from the model: an iteration is then D passes of per-sample gradients for all targets together, whatever their
    number. Use it for language models, where exact products take minutes per target."""
    seed: int = 0
    """Seed of all drawn labels, and of drawn rows."""

    reads_rows = True
    _checks: ClassVar = {"damping": _above_zero, "draws": optional(positive_int)}

    @property
    def product_draws(self) -> int | None:
        """The field ``draws``."""
        return self.draws

    @property
    def ekfac(self) -> EKFAC:
        """The EK-FAC whose mean eigenvalues are the units of the damping, and whose inverse preconditions."""
        return EKFAC(seed=self.seed, fisher="auto" if self.draws is None else "sampled")


@dataclass(frozen=True, kw_only=True)
class CG(AbstractIterativeMethod):
    r"""Influence functions with the Gauss-Newton matrix of the training loss, without approximating its structure.

    Solves :math:`(H + \Lambda) x = g` for the gradient g of every target by conjugate gradients. H is
    :math:`\sum_i J_i^\top \nabla^2_{out} L_i J_i` over the train rows i, with the Jacobian J of all model outputs and
    the Hessian of the loss in these outputs. Its products with vectors are exact and need no matrix: one forward-mode
    and one reverse-mode pass over the train rows per iteration and target. The inverse of :class:`EKFAC`, which is
    fitted first, is the preconditioner. The iterations and the residual of every target are in
    ``scores.convergence`` (of ``stream_scores`` and ``refine``) and in the log; a warning names what did not converge.

    :math:`\Lambda` is diagonal, with one number per layer as in EKFAC, unless ``absolute`` is set.
    Source: Martens (arXiv:1412.1193), section 8, for the products and the preconditioned solver.
    """

    max_iterations: int = 50
    """Largest number of iterations per target."""
    tolerance: float = 1e-2
    """The iteration of a target ends when the norm of its residual is at most this share of the norm of g."""
    max_rows: int | None = None
    """Number of evenly spaced train rows that H is computed from, scaled to all; ``None`` uses all."""

    gradient_copies: ClassVar[int] = 7
    _checks: ClassVar = {
        "tolerance": _above_zero,
        "max_iterations": positive_int,
        "max_rows": optional(positive_int),
    }

    def solve(self, solver: Any, gradients: Tensor) -> Any:
        """Solve by conjugate gradients; see :meth:`AbstractInverseMethod.solve`."""
        return solver.conjugate_gradients(self, gradients)


@dataclass(frozen=True, kw_only=True)
class LiSSA(AbstractIterativeMethod):
    r"""Influence functions with the Gauss-Newton matrix of the training loss, by a stochastic Neumann series.

    Iterates :math:`x \leftarrow x + (g - (H_t + \Lambda) x) / s` with H and :math:`\Lambda` as in :class:`CG`, where
    :math:`H_t` is an unbiased estimate of H from ``rows`` train rows drawn in step t, and averages over ``repeats``.
    :class:`CG` needs fewer passes over the train rows where its products are affordable.
    Source: Agarwal et al. (arXiv:1602.03943), section 3; Koh and Liang (arXiv:1703.04730), section 3, for influence.
    """

    depth: int = 200
    """Number of steps."""
    rows: int = 64
    """Train rows drawn per step, without replacement; all rows if there are fewer."""
    repeats: int = 1
    """Number of independent runs that are averaged."""
    scale: float | None = None
    """s, above half of the largest eigenvalue of H + Lambda, or the series diverges. ``None`` uses 1.5 times an
    estimate of the largest eigenvalue by 10 power iterations over all train rows."""

    gradient_copies: ClassVar[int] = 4
    _checks: ClassVar = {
        "depth": positive_int,
        "rows": positive_int,
        "repeats": positive_int,
        "scale": optional(_above_zero),
    }

    def solve(self, solver: Any, gradients: Tensor) -> Any:
        """Sum the series; see :meth:`AbstractInverseMethod.solve`."""
        return solver.neumann_series(self, gradients)
