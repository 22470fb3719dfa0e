"""Which gradient computer a model gets when nobody names one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trak_lite.data.batches import batch_size, take_rows
from trak_lite.errors import MODEL_FAILURES, InvalidInputError, UnsupportedModelError, refuse_machine_failure
from trak_lite.gradient_computers._base import AbstractGradientComputer, ParameterChoice, select_parameters
from trak_lite.gradient_computers.functional import FunctionalGradientComputer
from trak_lite.gradient_computers.hooks.computer import HookGradientComputer
from trak_lite.gradient_computers.iterative import IterativeGradientComputer
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import Batch

__all__ = ["ChosenComputer", "choose_gradient_computer"]

logger = logging.getLogger(__name__)

_FASTEST_FIRST = {
    "hook": HookGradientComputer,
    "functional": FunctionalGradientComputer,
    "iterative": IterativeGradientComputer,
}


class ChosenComputer(NamedTuple):
    """What was chosen for a model."""

    name: str
    """A name in ``GRADIENT_COMPUTERS``."""
    reason: str
    """Why, and what was found against faster ones."""
    computer: AbstractGradientComputer
    """One that keeps what it learned about the model from the samples that it was tried on."""


def choose_gradient_computer(
    model: torch.nn.Module,
    task: AbstractModelOutput,
    batch: Batch,
    grad_wrt: ParameterChoice | None = None,
    *,
    autocast_dtype: torch.dtype | None = None,
) -> ChosenComputer:
    """Return the fastest gradient computer that is exact for this model, and why.

    Each is tried on three samples, the gradients of which its self-check compares, until one passes.

    Args:
        model: The module, in the mode and with the weights that it will be used with.
        task: Model output function.
        batch: At least one sample, on the model's device.
        grad_wrt: What to keep gradients for (:func:`select_parameters`); ``None``: what requires grad.
        autocast_dtype: Passed to the computer.

    Returns:
        Its name, the reason, and the computer itself.

    Raises:
        InvalidInputError: If the batch, or what the output function returns, has the wrong form.
        UnsupportedModelError: If every computer refuses the model; says why each of them does.
    """
    names = list(select_parameters(model, grad_wrt))
    few = take_rows(batch, slice(0, min(3, batch_size(batch))))
    errors: dict[str, Exception] = {}
    for name, kind in _FASTEST_FIRST.items():
        computer = kind(model, task, grad_wrt=names, autocast_dtype=autocast_dtype)
        error = _failure(computer, few)
        if error is None:
            return _decided(name, _reasons(errors) or "every kept parameter is covered", computer)
        errors[name] = error
    # A model that never runs has an error of its own, which is to be shown as it is.
    own = [error for error in errors.values() if not isinstance(error, UnsupportedModelError)]
    if own and own[-1] is errors["iterative"]:
        raise own[0] from own[-1]
    raise UnsupportedModelError(f"No gradient computer is exact for this model. {_reasons(errors)}")


def _reasons(errors: Mapping[str, Exception]) -> str:
    """Return why each of some computers was refused; an error that does not say so itself comes with its type."""
    return " ".join(
        f"{name}: {error}"
        if isinstance(error, UnsupportedModelError)
        else f"{name}: {type(error).__name__}: {error}"
        for name, error in errors.items()
    )


def _failure(computer: AbstractGradientComputer, few: Batch) -> Exception | None:
    """Return why a computer cannot stream these samples, or ``None`` where it can."""
    try:
        computer.stream_gradients(few, lambda _: None)
    except InvalidInputError:
        raise
    except (UnsupportedModelError, *MODEL_FAILURES) as error:
        refuse_machine_failure(error)
        return error
    return None


def _decided(name: str, reason: str, computer: AbstractGradientComputer) -> ChosenComputer:
    logger.info("gradient_computer='auto' is %r: %s", name, reason)
    return ChosenComputer(name, reason, computer)
