"""Methods of stored rows: with the inverse of a matrix in feature space, or products and cosines without a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from trak_lite.core.validate import positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.products import unit_rows, unit_segments
from trak_lite.methods.base import (
    CHECK_LAYOUT,
    AbstractKernelMethod,
    AbstractLearningRateMethod,
    AbstractMethod,
)
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.modelout_functions._base import fisher_task
from trak_lite.types import FeatureLayout


@dataclass(frozen=True, kw_only=True)
class GaussNewton(AbstractKernelMethod):
    r"""Influence with the Gauss-Newton matrix :math:`H = \sum_i w_i \phi_i \phi_i^\top` of the training loss.

    w is the second derivative of a row's loss with respect to f. The method needs only the stored rows.
    Source: TRAK (arXiv:2303.14186), the derivation in section 3.2, without dropping the weights.
    """

    layout: Literal["stored", "joint"] = "stored"  # type: ignore[misc]  # a constant of the other methods
    """``"stored"`` uses one matrix per segment of the stored rows. ``"joint"`` uses one matrix for the whole row, with
    the square of its width as size."""

    weighting: ClassVar[Literal["curvature"]] = "curvature"

    def check(self, task: AbstractModelOutput) -> None:
        """Raise if the loss is linear in f."""
        if not task.has_curvature:
            others = "'Fisher' or 'TRAK'" if task.can_sample else "'TRAK'"
            raise InvalidInputError(
                f"GaussNewton needs a loss that is curved in f, but the loss of {type(task).__name__} is linear in it: "
                f"every weight would be zero. Use method={others}."
            )


@dataclass(frozen=True, kw_only=True)
class Fisher(AbstractKernelMethod):
    """Influence with the Fisher information of the model's predictions, in feature space.

    Use it for losses with many outputs per sample, such as a language model's. There the Fisher information is the
    Gauss-Newton matrix over all outputs (Martens, arXiv:1412.1193, section 9), which no weighting of the rows can
    express. It is fitted once per checkpoint to gradients for labels drawn from the model:
    by :meth:`~trak_lite.Attributor.featurize` if this is the attributor's method, otherwise by the first ``score``.
    Processes share the fit, and it resumes after a kill.
    """

    samples_per_feature: int = 4
    """Gradients for drawn labels per feature of K, the number of features per module. A matrix of k features needs
    several times k gradients, whatever the number of train rows. On the language model ``python_lm`` of
    ``benchmarks/lds`` 1.2, 2.3 and 4.1 gradients per feature gave an LDS of .676, .704 and .709; on ``topics_lm``
    (last checkpoint) 2 and 4 gave .538 and .555."""
    max_draws: int = 32
    """Maximum number of labels drawn per train row."""
    seed: int = 0
    """Seed of the draws. The draws of a row depend only on the seed and the row number."""

    weighting: ClassVar[Literal["fisher"]] = "fisher"
    _checks: ClassVar = {"samples_per_feature": positive_int, "max_draws": positive_int}

    @property
    def fisher_fit(self) -> Fisher:
        """The method itself."""
        return self

    def check(self, task: AbstractModelOutput) -> None:
        """Raise if the task cannot draw labels."""
        fisher_task(task)

    def num_samples(self, layout: FeatureLayout, proj_dim: int) -> int:
        """Return the number of gradients for drawn labels to compute; ``max_draws`` may limit it.

        It does not fall if small modules are stored whole in fewer than ``proj_dim`` features: small eigenvalues of
        narrow segments need as many gradients.
        """
        return self.samples_per_feature * max(proj_dim, *(segment.width for segment in layout.segments))

    def num_draws(self, num_rows: int, layout: FeatureLayout, proj_dim: int) -> tuple[int, int]:
        """Return how many of N train rows a fit uses, and how many gradients of each it computes."""
        number = self.num_samples(layout, proj_dim)
        chosen = min(num_rows, number)
        return chosen, min(math.ceil(number / chosen), self.max_draws)

    def fit_json(self) -> dict[str, Any]:
        """Return the fields that the fit depends on, as JSON values."""
        return {name: getattr(self, name) for name in ("samples_per_feature", "max_draws", "seed")}


@dataclass(frozen=True, kw_only=True)
class TRAK(AbstractKernelMethod):
    r"""TRAK: the unweighted, undamped gram matrix :math:`\Phi^\top \Phi` of the train rows, with q outside the mean.

    Without damping it needs more train rows than features. ``damping=None`` uses the default damping.
    Source: TRAK (arXiv:2303.14186), section 3.
    """

    damping: float | None = 0.0
    layout: Literal["stored", "joint"] = "joint"  # type: ignore[misc]  # a constant of the other methods
    """``"joint"`` uses one matrix for the whole row, with the square of its width as size, as published. ``"stored"``
    uses one matrix per segment of the stored rows."""

    weighting: ClassVar[Literal["none"]] = "none"


@dataclass(frozen=True, kw_only=True)
class GradDot(AbstractMethod):
    """The inner product of the gradients of train row and target, without a kernel, averaged over checkpoints.

    Source: Charpiat et al. (arXiv:2102.13620), section 3.
    """

    kernel = None


@dataclass(frozen=True, kw_only=True)
class GradCos(AbstractMethod):
    """The cosine of the gradients of train row and target, summed over segments and averaged over checkpoints.

    A zero segment contributes 0.
    Source: Charpiat et al. (arXiv:2102.13620), section 3.
    """

    q: Literal["inside", "outside", "off"] = "off"
    layout: Literal["stored", "joint"] = "stored"  # type: ignore[misc]  # a constant of the other methods
    """``"stored"`` sums the cosines over the segments of the stored rows. ``"joint"`` uses the cosine of whole rows."""

    linear: ClassVar[bool] = False
    _checks: ClassVar = {"layout": CHECK_LAYOUT}
    kernel = None

    def transform(self, rows: Tensor, layout: FeatureLayout) -> Tensor:
        """Return the rows with every segment scaled to norm 1."""
        return unit_segments(rows, layout=layout)

    def unit_scope(self, layout: FeatureLayout) -> Literal["module", "global"]:
        """Return the segments whose cosines are summed; see :meth:`AbstractMethod.unit_scope`."""
        return "global" if len(self.layout_of(layout).segments) == 1 else "module"


@dataclass(frozen=True, kw_only=True)
class TracIn(AbstractLearningRateMethod):
    """TracInCP: products of the loss gradient of a train row and the gradient of a target, summed over checkpoints.

    Source: Pruthi et al. (arXiv:2002.08484), section 3.

    Example:
        >>> TracIn(learning_rates=[0.1, 0.01]).weights(2)
        (0.1, 0.01)
    """

    q: Literal["inside"] = field(init=False, default="inside")
    """``"inside"``, because TracIn uses loss gradients of train rows."""


@dataclass(frozen=True, kw_only=True)
class LESS(AbstractLearningRateMethod):
    r"""LESS: the cosine of a train row's Adam update and a target's gradient, summed over checkpoints.

    The train rows have to be Adam updates: ``Attributor(..., normalize="adam_update")``. The score is
    :math:`\sum_c \eta_c \cos(-\Gamma(z_i, \theta_c), \nabla f(z_j, \theta_c))`, where a step of Adam on the loss of
    row i changes the weights by :math:`-\eta \Gamma`. It equals the published score, which has loss gradients on both
    sides, if the q of the target is positive (classification and language modelling). If q is negative (a regression
    whose prediction is too high), the sign differs: positive still means that the row raises f.
    Source: Xia et al. (arXiv:2402.04333), sections 4.1 and 4.2, with the bias corrections and the epsilon of
    ``torch.optim.Adam``. The paper averages the gradients of the targets of a task before the cosine, and its learning
    rate of a checkpoint is the mean over the epoch.
    """

    q: Literal["off"] = field(init=False, default="off")
    """``"off"``, because the rows are updates of the loss."""

    linear: ClassVar[bool] = False

    def check_rows(self, kind: str) -> None:
        """Raise if the train rows are not Adam updates."""
        if kind != "adam_update":
            raise InvalidInputError(
                f"LESS needs train rows that are Adam updates, and these were made with normalize={kind!r}. Featurize "
                "into another path with Attributor(..., normalize='adam_update'), from checkpoints with the state of "
                "the optimizer. For cosines of plain gradients use GradCos."
            )

    def layout_of(self, layout: FeatureLayout) -> FeatureLayout:
        """Return one segment: the cosine is that of whole rows."""
        return FeatureLayout.joint(layout.width)

    def transform(self, rows: Tensor, layout: FeatureLayout) -> Tensor:
        """Return the rows scaled to norm 1."""
        return unit_rows(rows)
