"""TRAK as published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trak_lite.methods.base import AbstractKernelMethod

__all__ = ["TRAK"]


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
