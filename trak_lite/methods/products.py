"""Methods without a kernel: products and cosines of gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.linalg.products import unit_segments
from trak_lite.methods.base import CHECK_LAYOUT, AbstractLearningRateMethod, AbstractMethod
from trak_lite.types import FeatureLayout


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
        return unit_segments(rows, layout=FeatureLayout.joint(layout.width))
