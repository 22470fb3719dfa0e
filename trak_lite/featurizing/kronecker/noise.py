"""Random numbers that depend on the row, not on its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.modelout_functions._base import UniformNoise

__all__ = ["row_noise"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_HALF_STEP = 2.0**-54  # the numbers are multiples of 2^-53, zero included


def row_noise(rows: NDArray[np.int64], *, seed: int, draw: int | NDArray[np.int64]) -> UniformNoise:
    """Return a source of uniform numbers in (0, 1) for these rows.

    Each row has its own stream (SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    2014) and gets the first numbers of it, so a longer shape continues a shorter one.

    Args:
        rows: ``(B,)`` numbers of the rows.
        seed: Seed of all rows.
        draw: Number of the draw, for repeated draws of the same rows: one for all rows, or one per row ``(B,)``.

    Example:
        >>> one, both = (row_noise(np.array(rows), seed=0, draw=0)((2,)) for rows in ([7], [3, 7]))
        >>> bool((one[0] == both[1]).all())
        True
    """
    start = _mixed(np.array([seed & (2**64 - 1)], dtype=np.uint64) + _STEP)
    start = _mixed(start + (np.atleast_1d(draw) + 1).astype(np.uint64) * _STEP)
    streams = _mixed(start + (rows.astype(np.uint64) + np.uint64(1)) * _STEP)

    def noise(shape: Sequence[int]) -> Tensor:
        places = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * _STEP
        bits = _mixed(streams[:, None] + places) >> np.uint64(11)
        return torch.from_numpy(bits * 2.0**-53 + _HALF_STEP).reshape(len(rows), *shape)

    return noise


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's mix of 64-bit numbers; products wrap around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
