"""Trains a recipe on subsets of its rows, one model alone or several side by side; nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trak_lite.core.validate import row_numbers
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.unrolled.optimizers import State
from trak_lite.unrolled.program import Program, naming_failures, repeatable
from trak_lite.unrolled.settings import TrainingSettings

_ONE_BY_ONE = " Train one by one: retrain(recipe.train_fn, masks, output_fn)."


@final
@dataclass(frozen=True)
class SubsetTraining:
    """Trains a recipe on subsets of the rows; a ``train_fn`` of :func:`~trak_lite.retraining.retrain`.

    ``retrain_many`` calls :meth:`train_many` to train several models side by side.
    """

    recipe: TrainingSettings
    """The training."""
    keep_order: bool
    """Keep batches and order of the whole training, and give rows outside the subset the weight 0. Otherwise train on
    the subset alone, in an order of its own."""
    row_weights: Tensor | None = None
    """Weights ``(N,)`` of the rows inside a subset; ``None`` is 1."""

    def __call__(self, rows: NDArray[np.int64], seed: int) -> nn.Module:
        """Return the model trained on some rows, in eval mode.

        Raises:
            InvalidInputError: If the rows are not numbers of train rows, or there is none.
            UnsupportedModelError: If the training cannot be repeated, or the model or the loss fails.
            NonFiniteError: If a parameter becomes NaN or infinite.
        """
        subset = self._checked(rows)
        weights = self._weights([subset])[0]
        trained_on = np.arange(len(weights)) if self.keep_order else subset
        return trained_alone(self.recipe, weights, trained_on, seed)

    def train_many(self, subsets: Sequence[NDArray[np.int64]], seeds: Sequence[int]) -> list[nn.Module]:
        """Return one trained model per subset and seed, in eval mode; all subsets have one size.

        Raises:
            InvalidInputError: If subsets differ in size, are not one per seed, or hold other numbers than train rows.
            UnsupportedModelError: If ``vmap`` does not support an operation of the model.
            NonFiniteError: If a parameter becomes NaN or infinite; names the model.
        """
        sizes = {len(rows) for rows in subsets}
        if len(sizes) != 1 or len(subsets) != len(seeds):
            raise InvalidInputError(
                f"Models trained side by side need one seed each and subsets of one size, got {len(subsets)} subsets "
                f"of sizes {sorted(sizes)[:5]} and {len(seeds)} seeds."
            )
        chosen = [self._checked(rows) for rows in subsets]
        weights = self._weights(chosen)
        everything = [np.arange(weights.shape[1])] * len(seeds)
        return trained_side_by_side(self.recipe, weights, everything if self.keep_order else chosen, seeds)

    def _checked(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        indices = row_numbers(len(self.recipe.rows), self.recipe.rows.what, indices=rows)
        if not len(indices):
            raise InvalidInputError("There is no row to train on. Give the number of at least one train row.")
        return indices

    def _weights(self, subsets: Sequence[NDArray[np.int64]]) -> Tensor:
        """Return the weights of the rows of each subset and 0 for the others, ``(R, N)``."""
        ones = torch.ones(len(self.recipe.rows), device="cpu")
        used = ones if self.row_weights is None else self.row_weights.cpu()
        weights = used.new_zeros(len(subsets), len(used))
        for index, subset in enumerate(subsets):
            rows = torch.from_numpy(subset)
            weights[index, rows] = used[rows]
        return weights


def trained_side_by_side(
    recipe: TrainingSettings, weights: Tensor, subsets: Sequence[NDArray[np.int64]], seeds: Sequence[int]
) -> list[nn.Module]:
    """Return R models trained on subsets of one size, with vmapped steps."""
    models = [recipe.model(seed) for seed in seeds]
    program = Program(recipe, models[0])
    starts = [program.start(model) for model in models]
    states, frozen = tree_map(lambda *tensors: torch.stack(tensors), *starts)
    numbers, weights = torch.tensor(list(seeds), device=program.device), weights.to(program.device)
    size = len(subsets[0])
    with repeatable(program.device):
        some = recipe.order(0, num_rows=size, seed=seeds[0])
        program.check(starts[0][0], starts[0][1], program.parts(subsets[0][some])[0])
        orders = [recipe.orders(num_rows=size, seed=seed) for seed in seeds]
        for number, positions in zip(range(recipe.steps_for(size)), zip(*orders, strict=True), strict=False):
            rows = np.stack([subset[where] for subset, where in zip(subsets, positions, strict=True)])
            parts = program.parts(rows)
            with naming_failures(models[0], "train several models side by side of", _ONE_BY_ONE):
                states = program.step(states, frozen, parts, weights, number, numbers)
    finals = [tree_map(partial(Tensor.select, dim=0, index=index), states) for index in range(len(seeds))]
    for index, state in enumerate(finals):
        refuse_non_finite(state, recipe.steps_for(size) - 1, f" of model {index + 1} of {len(seeds)}")
    return [trained_model(recipe, *one) for one in zip(seeds, models, finals, strict=True)]


def trained_alone(
    recipe: TrainingSettings, weights: Tensor, subset: NDArray[np.int64], seed: int
) -> nn.Module:
    """Return a model trained on some rows, with row weights ``(N,)``; nothing is stored."""
    model = recipe.model(seed)
    program = Program(recipe, model)
    state, frozen = program.start(model)
    weights = weights.to(program.device)
    with repeatable(program.device):
        orders = recipe.orders(num_rows=len(subset), seed=seed)
        for number, positions in zip(range(recipe.steps_for(len(subset))), orders, strict=False):
            parts = program.parts(subset[positions])
            if number == 0:
                program.check(state, frozen, parts[0])
            with naming_failures(model, "train"):
                state = program.step(state, frozen, parts, weights, number, seed)
    refuse_non_finite(state, recipe.steps_for(len(subset)) - 1)
    return trained_model(recipe, seed, model, state)


def trained_model(recipe: TrainingSettings, seed: int, first: nn.Module, state: State) -> nn.Module:
    """Return another model of the same seed as ``first`` with the trained parameters of a state, in eval mode."""
    model = recipe.model(seed)
    ids = {id(thing) for thing in (*first.modules(), *first.parameters())}
    for name, thing in (*model.named_modules(), *model.named_parameters()):
        if id(thing) in ids:
            raise InvalidInputError(
                f"model_fn returned two models that share {name or 'the whole model'} ({type(thing).__name__}), so "
                "training one would change the other. Build a new model in every call, or copy the one you have: "
                "lambda seed: copy.deepcopy(model)."
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in state.parameters:
                parameter.copy_(state.parameters[name])
    return model.eval()


def non_finite(state: State) -> str | None:
    """Return the name of a parameter that is NaN or infinite, if there is one."""
    return next((name for name, value in state.parameters.items() if not bool(value.isfinite().all())), None)


def refuse_non_finite(state: State, number: int, whose: str = "") -> None:
    """Raise if a parameter is NaN or infinite after step ``number``; ``whose`` model follows its name."""
    name = non_finite(state)
    if name is not None:
        raise NonFiniteError(
            f"{name}{whose} is NaN or infinite after step {number}, counted from 0. Lower the learning rate, or "
            "clip gradients (clip_norm)."
        )
