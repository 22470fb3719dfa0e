"""TracIn: products of gradients, weighted by learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trak_lite.methods.base import AbstractMethod, _finite_weights

__all__ = ["TracIn"]


@dataclass(frozen=True, kw_only=True)
class TracIn(AbstractMethod):
    """TracInCP: products of the loss gradient of a train row and the gradient of a target, summed over checkpoints.

    Source: Pruthi et al. (arXiv:2002.08484), section 3.

    Example:
        >>> TracIn(learning_rates=[0.1, 0.01]).weights(2)
        (0.1, 0.01)
    """

    learning_rates: tuple[float, ...] | None = None
    """Learning rate of each checkpoint, in order. ``None`` weighs each checkpoint by 1/C."""
    q: Literal["inside"] = field(init=False, default="inside")
    """``"inside"``, because TracIn uses loss gradients of train rows."""
    checkpoint_weights: None = field(init=False, default=None)
    """None, because the learning rates are the weights."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.learning_rates is not None:
            rates = _finite_weights("learning_rates", self.learning_rates)
            object.__setattr__(self, "learning_rates", rates)

    @property
    def kernel(self) -> None:
        """None."""
        return None

    def weights(self, num_checkpoints: int) -> tuple[float, ...]:
        """Return the learning rate of each checkpoint.

        Raises:
            InvalidInputError: If the number of learning rates is not the number of checkpoints.
        """
        return self._weights("learning_rates", self.learning_rates, num_checkpoints)
