"""Borrowing the caller's model: it comes back as it was, also after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError

__all__ = ["borrow_model", "model_device", "resolve_device"]


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU for a model that has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def resolve_device(device: str | torch.device, model: nn.Module) -> torch.device:
    """Return the device to run on; ``"auto"`` is where the model is.

    Raises:
        InvalidInputError: If the device is unknown or not available.
    """
    if device == "auto":
        return model_device(model)
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"Unknown device {device!r}. Use 'auto', 'cpu', 'cuda' or 'cuda:N'."
        ) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"device={str(device)!r} was asked for, but torch sees no CUDA GPU. Use 'cpu' or 'auto'."
        )
    return resolved


@contextmanager
def borrow_model(model: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Put a model in eval mode on ``device``; give weights, buffers, modes, flags and device back on exit.

    The values are kept on the CPU meanwhile: one more copy of the model.

    Yields:
        The model's own parameters and buffers by name, as they were.
    """
    home = model_device(model)
    saved = {name: tensor.detach().cpu().clone() for name, tensor in _tensors(model).items()}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.to(device)
        model.eval()
        yield saved
    finally:
        if home != device:
            model.to(home)
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                if name in saved:  # a buffer that the forward pass made was not there before
                    tensor.copy_(saved[name])
        for p, flag in flags:
            p.requires_grad_(flag)
        for module, training in modes:
            module.training = training


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
