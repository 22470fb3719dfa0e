"""TracIn: products of gradients, weighted by learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trak_lite.methods.base import AbstractLearningRateMethod

__all__ = ["TracIn"]


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
