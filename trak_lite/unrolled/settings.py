"""The settings of a training: its model, loss, data and optimizer, the order of its steps, and its fingerprint.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import forked_rng
from trak_lite.core.fingerprint import describe_source
from trak_lite.core.json_text import canonical_json
from trak_lite.core.validate import integer, positive_int, real_at_least
from trak_lite.data.batches import rows_in_batches
from trak_lite.data.datasets import Rows, rows_of
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import ModelCall
from trak_lite.models.checkpoints import weights_digest
from trak_lite.run.repeats import conditions
from trak_lite.types import Batch, ParameterChoice
from trak_lite.unrolled.optimizers import AbstractOptimizer

RowLoss: TypeAlias = Callable[[ModelCall, Batch], Tensor]
"""``loss(model, batch) -> (B,)``, the loss of every row; ``model(...)`` is the forward pass."""
_SETTINGS = (type(None), bool, int, float, str, tuple, FunctionType, BuiltinFunctionType)
"""Types of a module's attributes that identify it, such as ``p`` of dropout and the mode."""


@dataclass(frozen=True, eq=False)
class TrainingSettings:
    """The fields of :class:`~trak_lite.unrolled.Recipe`, and what follows from them: number and order of the steps."""

    model_fn: Callable[[int], nn.Module]
    """Returns a new model for a seed. Torch's generator is seeded before the call."""
    loss: RowLoss
    """``loss(model, batch) -> (B,)``: the loss of every row, where ``model(...)`` is the forward pass."""
    data: Any
    """The train data: a map-style dataset, a DataLoader that reads one in order, or :class:`~trak_lite.Rows`."""
    optimizer: AbstractOptimizer
    """:class:`SGD`, :class:`Adam` or :class:`AdamW` of this package."""
    _: KW_ONLY
    batch_size: int
    """Rows per step."""
    epochs: int | None = None
    """Passes over the rows. Give this or ``steps``."""
    steps: int | None = None
    """Number of steps."""
    schedule: Callable[[int], float] | None = None
    """Factor of the learning rate at a step, from 0, as for torch's ``LambdaLR``; ``None`` is 1."""
    clip_norm: float | None = None
    """Scale gradients with a larger norm down to this norm, as ``torch.nn.utils.clip_grad_norm_`` does."""
    accumulate: int = 1
    """Parts that a batch is divided into to save memory; their gradients are summed."""
    grad_wrt: ParameterChoice | None = None
    """Parameters to train: names, patterns or module classes; ``None`` trains those that require grad."""
    seed: int = 0
    """Seed of initial weights, order and dropout."""
    train_id: str | None = None
    """A name for this version of the training. Stored states and scores of this name are returned without repeating
    steps: change it with everything that the training depends on."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise InvalidInputError(
                f"Give either epochs or steps, got epochs={self.epochs}, steps={self.steps}."
            )
        counts = ("batch_size", "accumulate", "steps" if self.epochs is None else "epochs")
        for name, check in {**dict.fromkeys(counts, positive_int), "seed": integer}.items():
            object.__setattr__(self, name, check(**{name: getattr(self, name)}))
        if not (self.schedule is None or callable(self.schedule)):
            raise InvalidInputError(
                f"schedule must be a function of the step, from 0, got {type(self.schedule).__name__}. For a list of "
                "factors give schedule=lambda step: factors[step]."
            )
        if self.clip_norm is not None and real_at_least(0.0, clip_norm=self.clip_norm) == 0:
            raise InvalidInputError("clip_norm must be above 0; None does not clip.")
        if not isinstance(self.optimizer, AbstractOptimizer):
            raise InvalidInputError(
                f"optimizer must be an SGD, Adam or AdamW of trak_lite.unrolled, got {type(self.optimizer).__name__}. "
                "Optimizers of torch cannot be differentiated."
            )

    @cached_property
    def rows(self) -> Rows:
        """The train rows."""
        return rows_of(self.data, what="the train data")

    def identity(self) -> dict[str, Any]:
        """Return JSON values of everything that a training on a subset depends on, except its seed and rows."""
        trained = [self.grad_wrt] if isinstance(self.grad_wrt, str | type) else self.grad_wrt
        return {
            **self.common_identity(),
            "model_fn": describe_source(self.model_fn),
            "epochs": self.epochs,
            "steps": self.steps,
            "grad_wrt": None if trained is None else sorted(map(str, trained)),
        }

    def common_identity(self) -> dict[str, Any]:
        """Return JSON values of what a training depends on, without its models and the number of its steps."""
        return {
            "loss": describe_source(self.loss),
            "data": self.rows.identity(),
            "optimizer": {**self.optimizer.to_json(), "class": describe_source(type(self.optimizer))},
            "schedule": describe_source(self.schedule),
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "clip_norm": self.clip_norm,
            **({} if self.train_id is None else {"train_id": self.train_id}),
        }

    @property
    def num_steps(self) -> int:
        """Number of steps of a training on all rows."""
        return self.steps_for(len(self.rows))

    def steps_for(self, num_rows: int) -> int:
        """Return the number of steps of a training on some rows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # checked in __post_init__
        return self.epochs * math.ceil(num_rows / self.batch_size)

    def order(self, number: int, *, num_rows: int, seed: int) -> NDArray[np.int64]:
        """Return the positions ``(b,)`` among the rows that step ``number`` uses. The last batch may be smaller."""
        return next(self.orders(num_rows=num_rows, seed=seed, first=number))

    def orders(self, *, num_rows: int, seed: int, first: int = 0) -> Iterator[NDArray[np.int64]]:
        """Yield :meth:`order` of all steps from ``first`` on, without end; each epoch is permuted once."""
        start, step = divmod(first, math.ceil(num_rows / self.batch_size))
        for epoch in itertools.count(start):
            generator = np.random.default_rng((int(seed) % (1 << 64), epoch))  # negative seeds as in torch
            permutation = generator.permutation(num_rows)
            parts = rows_in_batches(permutation, self.batch_size)
            yield from parts[step:]
            step = 0

    def model(self, seed: int) -> nn.Module:
        """Return a new model with the initial weights of a seed; the state of torch's generator is restored."""
        with forked_rng():
            torch.manual_seed(seed)
            return self.model_fn(seed)


def rate_factor(recipe: TrainingSettings, number: int) -> float:
    """Return the factor of the learning rate at a step."""
    factor = 1.0 if recipe.schedule is None else recipe.schedule(number)
    try:
        return float(factor)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"schedule({number}) returned {factor!r:.100}. Return a number: the factor of the learning rate at a step."
        ) from error


def run_fingerprint(
    recipe: TrainingSettings, model: nn.Module, trained: Sequence[str], weights: Tensor
) -> dict[str, Any]:
    """Return JSON values of everything that the training depends on."""
    ones = bool((weights == 1).all())
    return {
        **recipe.common_identity(),
        "weights": weights_digest(model),
        "steps": recipe.num_steps,
        "trained": list(trained),
        "modules": _modules_digest(model),
        "seed": recipe.seed,
        "row_weights": None if ones else hashlib.sha256(weights.cpu().double().numpy().tobytes()).hexdigest(),
    }


def made_by(recipe: TrainingSettings) -> dict[str, Any]:
    """Return JSON values that are stored with a run beside its fingerprint: what tells later changes."""
    numbers = range(0 if recipe.schedule is None else recipe.num_steps)
    factors = [rate_factor(recipe, number) for number in numbers]
    return {"schedule": hashlib.sha256(np.array(factors).tobytes()).hexdigest(), "conditions": conditions()}


def _modules_digest(model: nn.Module) -> str:
    """Return the SHA-256 of classes, modes and plain settings of all modules, which weights do not tell apart."""
    classes = {cls: describe_source(cls) for cls in set(map(type, model.modules()))}
    described = []
    for name, module in model.named_modules():
        settings = {
            key: describe_source(value)
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, _SETTINGS)
        }
        described.append([name, classes[type(module)], settings])
    return hashlib.sha256(canonical_json(described).encode()).hexdigest()
