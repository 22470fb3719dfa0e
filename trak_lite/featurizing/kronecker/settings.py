"""What a Kronecker-factored curvature is fitted to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from trak_lite._validate import one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import AbstractModelOutput, LossModelOutput

__all__ = ["KroneckerSettings"]

_FISHERS = ("auto", "sampled", "empirical", "curvature")
_DEFAULT_MAX_SIDE = 16384


@dataclass(frozen=True, slots=True)
class KroneckerSettings:
    """Which curvature is approximated, and how closely.

    Example:
        >>> KroneckerSettings(fisher="sampled").to_json()["fisher"]
        'sampled'
    """

    fisher: Literal["auto", "sampled", "empirical", "curvature"] = "auto"
    r"""``"sampled"``: the Fisher information, with labels drawn from the model, which is the Gauss-Newton matrix of the
    training loss over all the model's outputs. ``"empirical"``: the labels of the data. ``"curvature"``: the
    Gauss-Newton matrix of the loss as a function of f alone, :math:`\sum w \nabla f \nabla f^\top`, which is the same
    where the model has one output. ``"auto"`` takes the first of ``"sampled"``, ``"curvature"``, ``"empirical"`` that
    the task has.
    """
    correct_eigenvalues: bool = True
    """EK-FAC: the eigenvalues are the second moments of the gradients in the eigenbasis, for one more pass over the
    rows. ``False``: K-FAC, the products of the factors' eigenvalues."""
    draws: int = 1
    """Labels drawn per row, each for one pass."""
    seed: int = 0
    """Seed of the draws, which depend on it and on a row's number alone."""
    max_rows: int | None = None
    """Rows to fit on, evenly spread; ``None`` for all."""
    max_side: int = _DEFAULT_MAX_SIDE
    """Longest side of a matrix that is decomposed; a longer one (a vocabulary) keeps its own coordinates."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can be fitted with."""
        one_of(_FISHERS, fisher=self.fisher)
        positive_int(draws=self.draws)
        positive_int(max_side=self.max_side)
        if self.max_rows is not None:
            positive_int(max_rows=self.max_rows)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    def decided(self, task: AbstractModelOutput) -> KroneckerSettings:
        """Return the settings with ``"auto"`` decided for a task.

        Raises:
            InvalidInputError: If the task does not have what ``fisher`` asks for.
        """
        fisher = self.fisher
        if fisher == "auto":
            fisher = "sampled" if task.can_sample else "curvature" if task.has_curvature else "empirical"
        if fisher == "sampled" and not task.can_sample:
            raise InvalidInputError(
                f"fisher='sampled' draws labels from the model, and {type(task).__name__} does not say how they are "
                "distributed. Use fisher='empirical', or define sample_labels."
            )
        if fisher == "curvature" and not task.has_curvature:
            raise InvalidInputError(
                f"fisher='curvature' needs a loss that is curved in f, but the loss of {type(task).__name__} is linear "
                "in it: the matrix would be zero. Use fisher='empirical'."
            )
        draws = self.draws if fisher == "sampled" else 1
        kept = {**self.to_json(), "fisher": fisher, "draws": draws}
        return KroneckerSettings(**kept)

    def loss_of(self, task: AbstractModelOutput) -> LossModelOutput:
        """Return the output whose gradients, squared, add up to the curvature."""
        return LossModelOutput(
            task, weight="loss_curvature" if self.fisher == "curvature" else "out_to_loss_grad"
        )
