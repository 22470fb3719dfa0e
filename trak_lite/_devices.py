"""What devices can and cannot do, asked in one place."""

from __future__ import annotations

import functools

import torch

__all__ = ["wide_dtype"]


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype that a device computes in: float64, or float32 where it has no float64.

    Example:
        >>> wide_dtype(torch.device("cpu")), wide_dtype(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    if device.type in ("cpu", "cuda", "meta"):
        return torch.float64
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):  # TypeError: mps; RuntimeError: GPUs of other makers without the unit
        return torch.float32
    return torch.float64
