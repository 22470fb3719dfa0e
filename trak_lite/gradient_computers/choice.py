"""Automatic choice of the gradient computer (``gradient_computer="auto"``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trak_lite.core.devices import Float32Products
from trak_lite.data.batches import batch_size, take_rows
from trak_lite.errors import InvalidInputError, UnsupportedModelError, refuse_machine_failure
from trak_lite.gradient_computers._base import AbstractGradientComputer, refusal
from trak_lite.gradient_computers.functional import FunctionalGradientComputer
from trak_lite.gradient_computers.hooks.computer import HookGradientComputer
from trak_lite.gradient_computers.iterative import IterativeGradientComputer
from trak_lite.gradient_computers.parameters import select_parameters
from trak_lite.gradient_computers.randomness import ChangedParametersError
from trak_lite.gradient_computers.streaming import AbstractStreamingComputer
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import Batch, ParameterChoice

logger = logging.getLogger(__name__)

GRADIENT_COMPUTERS: dict[str, type[AbstractStreamingComputer]] = {
    "hook": HookGradientComputer,
    "functional": FunctionalGradientComputer,
    "iterative": IterativeGradientComputer,
}
"""Gradient computer classes by their ``gradient_computer="..."`` name, from fastest to slowest."""


class ChosenComputer(NamedTuple):
    """The gradient computer chosen for a model, and the reason."""

    name: str
    """A name in ``GRADIENT_COMPUTERS``."""
    reason: str
    """Why it was chosen, and why each faster computer was rejected."""
    computer: AbstractGradientComputer
    """The computer that passed the trial; it keeps what it recorded about the model during the trial."""


def choose_gradient_computer(
    model: torch.nn.Module,
    task: AbstractModelOutput,
    batch: Batch,
    grad_wrt: ParameterChoice | None = None,
    *,
    autocast_dtype: torch.dtype | None = None,
    float32_products: Float32Products = "ieee",
    known: tuple[str, str] | None = None,
) -> ChosenComputer:
    """Return the fastest gradient computer that is exact for this model, and the reason for the choice.

    Computers are tried from fastest to slowest on up to three samples, until one passes its self-check. A known one is
    tried before the others.

    Args:
        model: The module, in its final train/eval mode and with its final weights.
        task: Model output function.
        batch: At least one sample, on the model's device.
        grad_wrt: Parameters to keep (:func:`select_parameters`); ``None`` keeps those that require grad.
        autocast_dtype: Passed to the computer.
        float32_products: Passed to the computer.
        known: Name of the computer of an earlier run of this model, and the reason to use it again.

    Returns:
        The computer's name, the reason, and the computer.

    Raises:
        InvalidInputError: If the batch or the output function's result has the wrong form.
        UnsupportedModelError: If every computer refuses the model; the message has the reason of each.
    """
    names = list(select_parameters(model, grad_wrt))
    few = take_rows(batch, slice(0, min(3, batch_size(batch))))
    errors: dict[str, Exception] = {}
    first, why = known or (None, "")
    for name in sorted(GRADIENT_COMPUTERS, key=lambda name: name != first):
        computer = GRADIENT_COMPUTERS[name](
            model, task, grad_wrt=names, autocast_dtype=autocast_dtype, float32_products=float32_products
        )
        try:
            computer.stream_gradients(few, lambda _: None)
            computer.look_at_halves(batch)
        except (InvalidInputError, ChangedParametersError):
            raise
        except Exception as error:  # of the model's code; named in the reason, and raised if all fail
            refuse_machine_failure(error)
            errors[name] = error
            continue
        reason = _reasons(errors) or (why if name == first else "every kept parameter is covered")
        logger.info("gradient_computer='auto' selects %r: %s", name, reason)
        return ChosenComputer(name, reason, computer)
    # If the model itself cannot run, raise its own error unchanged.
    failures = [error for error in errors.values() if not isinstance(error, UnsupportedModelError)]
    if errors["iterative"] in failures:
        raise failures[0] from errors["iterative"]
    if len(set(map(str, errors.values()))) == 1:
        raise errors["iterative"]
    # The slowest computer asks least of a model: what it refuses is the cause.
    reasons = _reasons({name: errors[name] for name in reversed(GRADIENT_COMPUTERS)})
    raise UnsupportedModelError(
        f"No gradient computer is exact for this model. {reasons} Change the model there, or leave out of grad_wrt the "
        "parameters that it uses there."
    )


def _reasons(errors: Mapping[str, Exception]) -> str:
    """Return why each computer was refused; the type is added for errors not raised by this package's checks."""
    return " ".join(
        f"{name}: {refusal(error)}"
        if isinstance(error, UnsupportedModelError)
        else f"{name}: {type(error).__name__}: {error}"
        for name, error in errors.items()
    )


def require_computer(made: object) -> None:
    """Raise InvalidInputError if a class, or what a function of the user made, is no gradient computer."""
    kind = made if isinstance(made, type) else type(made)
    if not issubclass(kind, AbstractGradientComputer):
        what = f"is the class {kind.__name__}" if kind is made else f"returned a {kind.__name__}"
        raise InvalidInputError(
            f"gradient_computer {what}, expected a subclass of "
            "trak_lite.gradient_computers.AbstractGradientComputer, a partial of one, or a function that returns an "
            "instance. Derive it from that class; its methods need no change."
        )
