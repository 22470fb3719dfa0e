"""GradCos: cosines of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from trak_lite._validate import one_of
from trak_lite.linalg.products import unit_segments
from trak_lite.methods.base import AbstractMethod
from trak_lite.types import FeatureLayout

__all__ = ["GradCos"]


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

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        one_of(("stored", "joint"), layout=self.layout)

    kernel = None

    def transform(self, rows: Tensor, layout: FeatureLayout) -> Tensor:
        """Return the rows with every segment scaled to norm 1."""
        return unit_segments(rows, layout=layout)
