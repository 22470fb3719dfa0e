"""Random numbers that belong to a row, not to the batch that it came in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.modelout_functions import UniformNoise

__all__ = ["row_noise"]

_HALF_STEP = 2.0**-54  # numpy's numbers are multiples of 2^-53, zero included


def row_noise(rows: NDArray[np.int64], *, seed: int, draw: int) -> UniformNoise:
    """Return a source of uniform numbers in (0, 1) for these rows.

    Those of a row are the first ones of its own stream (Philox), so a longer shape continues a shorter one.

    Args:
        rows: ``(B,)`` numbers of the rows.
        seed: Seed of all rows.
        draw: Which of several draws for the same rows.

    Example:
        >>> one, both = (row_noise(np.array(rows), seed=0, draw=0)((2,)) for rows in ([7], [3, 7]))
        >>> bool((one[0] == both[1]).all())
        True
    """

    def noise(shape: Sequence[int]) -> Tensor:
        count = math.prod(shape)
        numbers = np.empty((len(rows), count))
        for place, row in enumerate(rows):
            stream = np.random.Philox(key=[seed & (2**64 - 1), int(row)], counter=[0, draw, 0, 0])
            np.random.Generator(stream).random(out=numbers[place])
        return torch.from_numpy(numbers + _HALF_STEP).reshape(len(rows), *shape)

    return noise
