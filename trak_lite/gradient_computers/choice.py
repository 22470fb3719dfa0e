"""Which gradient computer a model gets when nobody names one."""

from __future__ import annotations

import logging

import torch

from trak_lite._batches import batch_size, take_rows
from trak_lite.errors import MODEL_FAILURES, InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers._base import AbstractGradientComputer, ParameterChoice, select_parameters
from trak_lite.gradient_computers.functional import FunctionalGradientComputer
from trak_lite.gradient_computers.hooks import HookGradientComputer
from trak_lite.gradient_computers.iterative import IterativeGradientComputer
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import Batch

__all__ = ["choose_gradient_computer"]

logger = logging.getLogger(__name__)


def choose_gradient_computer(
    model: torch.nn.Module,
    task: AbstractModelOutput,
    batch: Batch,
    grad_wrt: ParameterChoice | None = None,
    *,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[str, str]:
    """Return the fastest gradient computer that is exact for this model, and why.

    The hook and the functional computer are tried on three samples; the iterative one needs only autograd.

    Args:
        model: The module, in the mode and with the weights that it will be used with.
        task: Model output function.
        batch: At least one sample, on the model's device.
        grad_wrt: What to keep gradients for (:func:`select_parameters`); ``None``: what requires grad.
        autocast_dtype: Passed to the computer.

    Returns:
        A name in ``GRADIENT_COMPUTERS`` and one sentence for the log.

    Raises:
        InvalidInputError: If the batch, or what the output function returns, has the wrong form.
    """
    names = list(select_parameters(model, grad_wrt))
    few = take_rows(batch, slice(0, min(3, batch_size(batch))))
    computers: dict[str, AbstractGradientComputer] = {
        "hook": HookGradientComputer(model, task, grad_wrt=names, autocast_dtype=autocast_dtype),
        "functional": FunctionalGradientComputer(model, task, grad_wrt=names, autocast_dtype=autocast_dtype),
    }
    refusals: list[str] = []
    failure: Exception | None = None
    for name, computer in computers.items():
        try:
            computer.stream_gradients(few, lambda _: None)
        except UnsupportedModelError as error:
            refusals.append(f"{name}: {error}")
        except InvalidInputError:
            raise
        except MODEL_FAILURES as error:  # such as a model that takes one sample at a time
            refusals.append(f"{name}: {type(error).__name__}: {error}")
            failure = failure or error
        else:
            return _decided(name, refusals or ["every kept parameter is covered"])
    if failure is not None:
        _raise_unless_alone(IterativeGradientComputer(model, task, grad_wrt=names), few, failure)
    return _decided("iterative", refusals)


def _raise_unless_alone(last: AbstractGradientComputer, few: Batch, failure: Exception) -> None:
    """Raise the model's own error unless it runs on one sample at a time."""
    try:
        last.stream_gradients(few, lambda _: None)
    except MODEL_FAILURES as error:
        raise failure from error


def _decided(name: str, reasons: list[str]) -> tuple[str, str]:
    reason = " ".join(reasons)
    logger.info("gradient_computer='auto' is %r: %s", name, reason)
    return name, reason
