"""Choice between Triton kernels, which are an optional package, and torch operations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType

import torch

__all__ = ["usable_kernels"]

logger = logging.getLogger(__name__)


@functools.cache
def usable_kernels(load: Callable[[], ModuleType], users: str, device: torch.device) -> ModuleType | None:
    """Return the module that ``load`` imports; if it cannot be used, log one warning about its users instead."""
    try:
        kernels = load()
    except ImportError as error:
        reason: str | None = f"triton cannot be imported ({error})"
    else:
        reason = kernels.why_unusable(device)
        if reason is None:
            return kernels
    logger.warning(
        "%s on %s use torch operations instead of the Triton kernels: %s. "
        "The features are the same, but the projection is slower.",
        users,
        device,
        reason,
    )
    return None
