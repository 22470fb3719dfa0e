"""Optimizers as pure functions of parameters, state and gradient, with the update rules of ``torch.optim``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from trak_lite.core.validate import real_at_least
from trak_lite.errors import InvalidInputError

Named: TypeAlias = dict[str, Tensor]


class State(NamedTuple):
    """Everything that a training step reads and replaces."""

    parameters: Named
    """The trained parameters by name."""
    slots: dict[str, Named]
    """The optimizer's running averages: for each, one tensor per parameter, of the parameter's shape."""


@dataclass(frozen=True)
class AbstractOptimizer(ABC):
    """An optimizer whose step is a differentiable function. A subclass is a frozen dataclass of its settings.

    The learning rate comes first, ``SGD(0.1, momentum=0.9)``; the other settings have names.

    Raises:
        InvalidInputError: If a setting is out of range.
    """

    lr: float
    """Learning rate; the recipe's schedule multiplies it."""
    _: KW_ONLY
    weight_decay: float = 0.0
    """Weight decay, as in ``torch.optim``: an L2 penalty, for AdamW decoupled."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the running averages, which start at zero."""
    elementwise: ClassVar[bool] = False
    """Whether :meth:`update` treats every weight on its own, so that stacked parameters need no ``vmap``."""

    def __post_init__(self) -> None:
        real_at_least(0.0, lr=self.lr)
        real_at_least(0.0, weight_decay=self.weight_decay)

    def start(self, parameters: Named) -> State:
        """Return the state before the first step."""
        names = self.active_slots
        slots = {slot: {name: torch.zeros_like(p) for name, p in parameters.items()} for slot in names}
        return State(parameters, slots)

    @property
    def active_slots(self) -> tuple[str, ...]:
        """The running averages that these settings use."""
        return self.slots

    def step(self, state: State, gradients: Named, *, factor: float, number: int) -> State:
        """Return the state after one step.

        Args:
            state: Parameters and running averages.
            gradients: Gradient of the mean loss of the batch, by parameter.
            factor: Multiplies the learning rate.
            number: Number of the step, from 0.
        """
        parameters: Named = {}
        slots: dict[str, Named] = {name: {} for name in self.active_slots}
        update = partial(self.update, lr=self.lr * factor, number=number)
        for name, parameter in state.parameters.items():
            before = {slot: values[name] for slot, values in state.slots.items()}
            parameters[name], after = update(parameter, gradients[name], before)
            for slot, value in after.items():
                slots[slot][name] = value
        return State(parameters, slots)

    @abstractmethod
    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, lr: float, number: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a parameter and its running averages after one step, as a pure function without in-place changes.

        Args:
            parameter: The parameter.
            gradient: Its gradient.
            slots: Its running averages.
            lr: Learning rate of this step.
            number: Number of the step, from 0.
        """

    def to_json(self) -> dict[str, Any]:
        """Return name and settings as JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"name": type(self).__name__, **plain}


@dataclass(frozen=True, kw_only=True)
class SGD(AbstractOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD`` without dampening."""

    momentum: float = 0.0
    """Momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        real_at_least(0.0, momentum=self.momentum)
        if self.nesterov and not self.momentum:
            raise InvalidInputError(
                "nesterov=True needs momentum above 0. Set momentum, or leave nesterov out."
            )

    @property
    def active_slots(self) -> tuple[str, ...]:
        """The momentum, if there is one."""
        return self.slots if self.momentum else ()

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, lr: float, number: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a parameter and its momentum after one step; see :meth:`AbstractOptimizer.update`."""
        direction = gradient.add(parameter, alpha=self.weight_decay) if self.weight_decay else gradient
        if not self.momentum:
            return parameter.add(direction, alpha=-lr), {}
        momentum = direction.add(slots["momentum"], alpha=self.momentum)
        step = direction.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        return parameter.add(step, alpha=-lr), {"momentum": momentum}


@dataclass(frozen=True, kw_only=True)
class Adam(AbstractOptimizer):
    r"""Adam (Kingma and Ba, arXiv:1412.6980) with a term under the root, as in Optax.

    The update is :math:`\mathrm{lr} \cdot \hat m / (\sqrt{\hat v + \epsilon_\text{root}} + \epsilon)`. With
    ``eps_root=0`` it is that of ``torch.optim.Adam``, whose derivative is infinite where :math:`\hat v` is zero.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root."""
    eps_root: float = 1e-8
    """Added under the root. Makes the training differentiable where gradients are zero; larger is smoother."""

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    elementwise: ClassVar[bool] = True
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        betas = tuple(real_at_least(0.0, betas=beta) for beta in self.betas)
        if len(betas) != 2 or max(betas) >= 1:
            raise InvalidInputError(
                f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}."
            )
        object.__setattr__(self, "betas", betas)
        real_at_least(0.0, eps=self.eps)
        real_at_least(0.0, eps_root=self.eps_root)

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, lr: float, number: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a parameter and its two averages after one step; see :meth:`AbstractOptimizer.update`."""
        first, second = self.betas
        if self.weight_decay and not self.decoupled:
            gradient = gradient.add(parameter, alpha=self.weight_decay)
        mean = slots["exp_avg"].lerp(gradient, 1 - first)
        square = (second * slots["exp_avg_sq"]).addcmul(gradient, gradient, value=1 - second)
        corrected = square / (1 - second ** (number + 1))
        root = (corrected + self.eps_root if self.eps_root else corrected).sqrt()
        if self.weight_decay and self.decoupled:
            parameter = parameter * (1 - lr * self.weight_decay)
        step = -lr / (1 - first ** (number + 1))
        return parameter.addcdiv(mean, root + self.eps, value=step), {"exp_avg": mean, "exp_avg_sq": square}


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), as ``torch.optim.AdamW``."""

    weight_decay: float = 0.01

    decoupled: ClassVar[bool] = True
