"""Trains many small models at once, with stacked weights and one vmapped pass.

Retraining on subsets trains one architecture many times. For small models most of the time is overhead per operation,
which stacked models share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from trak_lite._validate import one_of, positive_int, real_at_least
from trak_lite.errors import MODEL_FAILURES, InvalidInputError, UnsupportedModelError, refuse_machine_failure

__all__ = ["VectorisedTraining"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class VectorisedTraining:
    """A training recipe that trains one model in a plain loop, or many models side by side.

    An instance is a ``train_fn`` for :func:`~trak_lite.retraining.retrain`.
    :func:`~trak_lite.retraining.retrain_many` runs the same recipe for several subsets and seeds at once. Both use the
    same initial weights and the same batches, and agree up to rounding.

    The seed determines the initial weights (torch's generator is seeded before ``build_model``) and the order of rows.
    Each epoch visits the subset in a new order; the last batch may be smaller.

    Raises:
        InvalidInputError: If a setting is out of range, or inputs and labels differ in length.
    """

    build_model: Callable[[int], nn.Module]
    """Returns a new model for a seed."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of a batch from ``model(inputs)`` and labels."""
    inputs: Tensor
    """``(N, ...)``, on the device to train on."""
    labels: Tensor
    """``(N, ...)``, on the same device."""
    epochs: int
    """Passes over the subset."""
    batch_size: int
    """Rows per step and model."""
    lr: float
    """Learning rate."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of torch; it updates every weight separately, so stacked models do not interact."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """L2 penalty."""

    def __post_init__(self) -> None:
        """Raise if a setting is out of range."""
        positive_int(epochs=self.epochs)
        positive_int(batch_size=self.batch_size)
        real_at_least(0.0, lr=self.lr)
        real_at_least(0.0, momentum=self.momentum)
        real_at_least(0.0, weight_decay=self.weight_decay)
        if one_of(("sgd", "adam"), optimizer=self.optimizer) == "adam" and self.momentum:
            raise InvalidInputError(
                f"momentum={self.momentum} is a setting of SGD. Leave it out for optimizer='adam'."
            )
        if len(self.inputs) != len(self.labels):
            raise InvalidInputError(
                f"inputs have {len(self.inputs)} rows and labels {len(self.labels)}. Give one label per input."
            )

    def __call__(self, indices: NDArray[np.int64], seed: int) -> nn.Module:
        """Train one model on some rows.

        Args:
            indices: Rows to train on.
            seed: Seed of the weights and of the order.

        Returns:
            The model, in eval mode.
        """
        model = self._fresh_model(seed)
        optimizer = self._optimizer([p for p in model.parameters() if p.requires_grad])
        rows = self._tensor(indices)
        for positions in self._batches(len(rows), seed):
            batch = rows[positions.to(rows.device)]
            optimizer.zero_grad()
            self.loss(model(self.inputs[batch]), self.labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model.eval()

    def train_many(self, subsets: Sequence[NDArray[np.int64]], seeds: Sequence[int]) -> list[nn.Module]:
        """Train one model per subset and seed, all of them side by side.

        Every step gathers one batch per model. The memory holds all models, their gradients and optimizer states,
        and the activations of all batches.

        Args:
            subsets: Rows of each model; all subsets have one size.
            seeds: Seed of each model.

        Returns:
            The models, in eval mode.

        Raises:
            InvalidInputError: If subsets differ in size, or are not one per seed.
            UnsupportedModelError: If the model cannot be stacked: it draws random numbers (dropout), keeps running
                statistics (batch normalisation), or uses an operation that ``vmap`` does not support.
        """
        sizes = {len(indices) for indices in subsets}
        if len(sizes) != 1 or len(subsets) != len(seeds):
            raise InvalidInputError(
                f"Models trained side by side need one seed each and subsets of one size, got {len(subsets)} subsets "
                f"of sizes {sorted(sizes)[:5]} and {len(seeds)} seeds."
            )
        models = [self._fresh_model(seed) for seed in seeds]
        _refuse_unstackable(models[0])
        parameters, buffers = stack_module_state(models)
        optimizer = self._optimizer([p for p in parameters.values() if p.requires_grad])
        rows = torch.stack([self._tensor(indices) for indices in subsets])
        orders = [self._batches(rows.shape[1], seed) for seed in seeds]
        for positions in zip(*orders, strict=True):
            batch = rows.gather(1, torch.stack(positions).to(rows.device))
            optimizer.zero_grad()
            self._losses(models[0], parameters, buffers, batch).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        _give_back(models, parameters)
        return [model.eval() for model in models]

    def _losses(
        self, base: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], batch: Tensor
    ) -> Tensor:
        """Return the loss of every model, ``(models,)``, each on its own rows of ``batch``."""

        def loss_of(
            weights: dict[str, Any], states: dict[str, Any], inputs: Tensor, labels: Tensor
        ) -> Tensor:
            return self.loss(functional_call(base, (weights, states), (inputs,)), labels)

        try:
            losses: Tensor = vmap(loss_of)(parameters, buffers, self.inputs[batch], self.labels[batch])
        except MODEL_FAILURES as error:
            refuse_machine_failure(error)
            raise UnsupportedModelError(
                f"{type(base).__name__} and its loss cannot be trained side by side "
                f"({type(error).__name__}: {error}). Train one by one: retrain(training, masks, output_fn)."
            ) from error
        return losses

    def _fresh_model(self, seed: int) -> nn.Module:
        """Return a new model in train mode; the state of torch's generator is restored."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build_model(seed)
        return model.to(self.inputs.device).train()

    def _optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def _batches(self, size: int, seed: int) -> Iterator[Tensor]:
        """Yield the positions of each step's batch in a subset of ``size`` rows."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            yield from torch.split(torch.randperm(size, generator=generator, device="cpu"), self.batch_size)

    def _tensor(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(np.asarray(indices, dtype=np.int64), device=self.inputs.device)


def _refuse_unstackable(model: nn.Module) -> None:
    """Refuse modules whose training pass draws random numbers or changes buffers."""
    for name, module in model.named_modules():
        random = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        changing = isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
        if random or changing:
            what = "draws random numbers" if random else "keeps running statistics"
            raise UnsupportedModelError(
                f"{name or 'The model'} ({type(module).__name__}) {what} in training, which stacked models do not "
                "support. Train one by one: retrain(training, masks, output_fn)."
            )


@torch.no_grad()
def _give_back(models: Sequence[nn.Module], parameters: dict[str, Any]) -> None:
    """Copy the trained weights into their models."""
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name][number])
