"""Random numbers that are a pure function of a seed per row: the same in every batch, order, process and device.

Source: SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014). Words are int64,
because torch multiplies no uint64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64 - 1
_BITS = 23  # (k + 1/2) / 2^23 is exact in float32, and below 1


def _signed(number: int) -> int:
    """Return the int64 with the low 64 bits of a number."""
    return (number + 2**63 & _WORD) - 2**63


STEP = _signed(0x9E3779B97F4A7C15)
"""Distance of two positions of a stream."""
_SIGNED_FACTORS = tuple(map(_signed, _FACTORS))


def mixed(numbers: Tensor) -> Tensor:
    """Return SplitMix64's mix of int64 numbers; products wrap around."""
    numbers = (numbers ^ shifted(numbers, 30)) * _SIGNED_FACTORS[0]
    numbers = (numbers ^ shifted(numbers, 27)) * _SIGNED_FACTORS[1]
    return numbers ^ shifted(numbers, 31)


def mixed_int(number: int) -> int:
    """Return :func:`mixed` of one number, quicker than with a tensor."""
    number &= _WORD
    number = (number ^ number >> 30) * _FACTORS[0] & _WORD
    number = (number ^ number >> 27) * _FACTORS[1] & _WORD
    return _signed(number ^ number >> 31)


def shifted(numbers: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right, as int64 has only one that copies the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def row_noise(
    rows: NDArray[np.int64], *, seed: int, draw: int | NDArray[np.int64]
) -> Callable[[Sequence[int]], Tensor]:
    """Return a source of uniform float64 numbers in (0, 1) for the rows of these numbers ``(B,)``.

    Each row has its own stream and gets the first numbers of it, so a longer shape continues a shorter one. ``draw`` is
    the number of the draw, for repeated draws of the same rows: one for all rows, or one per row ``(B,)``.

    Example:
        >>> one, both = (row_noise(np.array(rows), seed=0, draw=0)((2,)) for rows in ([7], [3, 7]))
        >>> bool((one[0] == both[1]).all())
        True
    """
    starts = mixed(mixed_int(seed + STEP) + (torch.from_numpy(np.atleast_1d(draw)) + 1) * STEP)
    streams = mixed(starts + (torch.from_numpy(rows) + 1) * STEP)

    def noise(shape: Sequence[int]) -> Tensor:
        bits = shifted(_stream(streams, shape), 11)
        return (bits.double() * 2.0**-53 + 2.0**-54).reshape(len(rows), *shape)

    return noise


def seeded_uniforms(seeds: Tensor, shape: Sequence[int], *, stream: int) -> Tensor:
    """Return uniform numbers in (0, 1), the same for a seed in every batch, on every device and under transforms.

    Seeds are int64 ``(B,)``, the result is float32 ``(B, *shape)``. A longer shape continues a shorter one. The streams
    of a seed are independent.

    Example:
        >>> one, both = (seeded_uniforms(torch.tensor(seeds), (2,), stream=0) for seeds in ([7], [3, 7]))
        >>> bool((one[0] == both[1]).all())
        True
    """
    starts = mixed(mixed(seeds + STEP) + _signed((stream + 1) * STEP))
    uniform: Tensor = (shifted(_stream(starts, shape), 64 - _BITS).float() + 0.5) / 2**_BITS
    return uniform.reshape(seeds.shape[0], *shape)


def seeded_normals(seeds: Tensor, shape: Sequence[int], *, stream: int) -> Tensor:
    """Return numbers of a unit Gaussian: those of :func:`seeded_uniforms`, transformed."""
    normals: Tensor = torch.special.ndtri(seeded_uniforms(seeds, shape, stream=stream))
    return normals


def _stream(starts: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first words ``(B, n)`` of the streams that begin at these numbers ``(B,)``."""
    positions = torch.arange(1, math.prod(shape) + 1, device=starts.device, dtype=torch.int64)
    return mixed(starts.unsqueeze(1) + positions * STEP)
