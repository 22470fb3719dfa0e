"""GaussNewton: the curvature of the training loss, from the train rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trak_lite.errors import InvalidInputError
from trak_lite.methods.base import AbstractKernelMethod
from trak_lite.modelout_functions import AbstractModelOutput

__all__ = ["GaussNewton"]


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
            raise InvalidInputError(
                f"GaussNewton needs a loss that is curved in f, but the loss of {type(task).__name__} is linear in it: "
                "every weight would be zero. Use method='Fisher' or 'TRAK'."
            )
