"""The ``Recipe`` class: a training whose result is a function of the weights of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import final

from numpy.typing import ArrayLike

from trak_lite.unrolled.program import TrainingSettings
from trak_lite.unrolled.runs import Spacing, SubsetTraining, TrainingRun, train

__all__ = ["Recipe"]


@final
@dataclass(frozen=True, eq=False)
class Recipe(TrainingSettings):
    r"""A training whose result is a function of the weights of its rows.

    One step takes the gradient of :math:`\frac1B \sum_i w_i L_i` over the rows of a batch, where B counts the rows of
    weight zero too. Initial weights, order of rows and dropout masks are pure functions of the seed, so the same run
    can be repeated with other row weights: this is what :func:`~trak_lite.unrolled.unrolled` differentiates.

    The model is trained in the mode in which ``model_fn`` returns it. Dropout draws its masks from the seed. A batch
    norm that updates running statistics is refused; use it in eval mode, or another normalisation.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.nn.functional import cross_entropy
        >>> from torch.utils.data import TensorDataset
        >>> from trak_lite.unrolled import SGD, Recipe
        >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
        >>> def loss(model, batch):
        ...     return cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> recipe = Recipe(lambda seed: nn.Linear(4, 2), loss, data, SGD(lr=0.1), batch_size=10, epochs=3)
        >>> recipe.num_steps
        6
    """

    def train(
        self,
        path: str | PathLike[str] | None = None,
        *,
        checkpoints: Spacing = "sqrt",
        interval: int | None = None,
        weights: ArrayLike | None = None,
        progress: bool | None = None,
    ) -> TrainingRun:
        """Train, and store the states that a replay starts from.

        The same call again continues after a kill at the last stored state, with the same bits, and returns the run if
        it is finished. It first repeats the first and the last stored segment, to check that the training is unchanged.

        Args:
            path: Folder of the run; ``None`` keeps the states in memory.
            checkpoints: Which states are stored: ``"sqrt"``, every sqrt(T)-th of T steps; ``"log"``, those 1, 2, 4, ...
                steps before the end; ``"all"``. Fewer states take less disk, and more time in a replay.
            interval: Store every ``interval``-th state instead.
            weights: Row weights ``(N,)``; ``None`` is 1 for every row.
            progress: Show a bar; ``None`` shows it on a terminal only.

        Returns:
            The finished run.

        Raises:
            InvalidInputError: If an argument is invalid, or the loss does not return one number per row.
            UnsupportedModelError: If the training cannot be repeated (batch statistics, other random numbers).
            NonFiniteError: If a parameter becomes NaN or infinite; names the step.
            ManifestMismatchError: If another training is stored at the path; names every difference of settings, or the
                steps that lead to other weights when they are repeated.
        """
        return train(
            self, path, checkpoints=checkpoints, interval=interval, weights=weights, progress=progress
        )

    @property
    def train_fn(self) -> SubsetTraining:
        """A ``train_fn(rows, seed)`` for :func:`~trak_lite.verify` and ``retrain_many``: trains on the subset alone."""
        return SubsetTraining(self, keep_order=False)
