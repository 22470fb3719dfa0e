"""TRAK as published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trak_lite.methods.base import AbstractKernelMethod

__all__ = ["TRAK"]


@dataclass(frozen=True, kw_only=True)
class TRAK(AbstractKernelMethod):
    r"""TRAK: the gram matrix :math:`\Phi^\top \Phi` of the train rows, not weighted, not damped, q outside the mean.

    Without damping it needs more train rows than features. ``damping=None`` takes a share of the trace.
    Source: TRAK (arXiv:2303.14186), section 3.
    """

    q: Literal["inside", "outside", "off"] = "outside"
    damping: float | None = 0.0
    layout: Literal["stored", "joint"] = "joint"  # type: ignore[misc]  # a constant of the other methods
    """``"joint"`` takes one matrix for the whole row, of the square of its width, as published; ``"stored"`` one per
    segment of the stored rows."""

    weighting: ClassVar[Literal["none"]] = "none"
