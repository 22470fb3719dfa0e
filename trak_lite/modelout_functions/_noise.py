"""Random numbers that are a pure function of a seed per row, also under ``torch.func`` transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["seeded_normals", "seeded_uniforms"]


def _signed(number: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number


_STEP = _signed(0x9E3779B97F4A7C15)
"""The constants are SplitMix64's, as int64, because torch multiplies no uint64."""
_FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_BITS = 23  # (k + 1/2) / 2^23 is exact in float32, and below 1


def seeded_uniforms(seeds: Tensor, shape: Sequence[int], *, stream: int) -> Tensor:
    """Return uniform numbers in (0, 1), the same for a seed in every batch, on every device and under transforms.

    Numbers are those of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    A longer shape continues a shorter one.

    Args:
        seeds: ``(B,)`` int64.
        shape: Shape of the numbers of a row.
        stream: Number of the stream; those of a seed are independent.

    Returns:
        float32 ``(B, *shape)``.

    Example:
        >>> one, both = (seeded_uniforms(torch.tensor(seeds), (2,), stream=0) for seeds in ([7], [3, 7]))
        >>> bool((one[0] == both[1]).all())
        True
    """
    starts = _mixed(_mixed(seeds + _STEP) + _signed((stream + 1) * _STEP % 2**64))
    places = torch.arange(1, math.prod(shape) + 1, device=seeds.device, dtype=torch.int64) * _STEP
    bits = _shifted(_mixed(starts.unsqueeze(1) + places), 64 - _BITS)
    uniform: Tensor = (bits.float() + 0.5) / 2**_BITS
    return uniform.reshape(seeds.shape[0], *shape)


def seeded_normals(seeds: Tensor, shape: Sequence[int], *, stream: int) -> Tensor:
    """Return numbers of a unit Gaussian: those of :func:`seeded_uniforms`, transformed.

    Example:
        >>> seeded_normals(torch.tensor([5]), (3,), stream=1).shape
        torch.Size([1, 3])
    """
    normals: Tensor = torch.special.ndtri(seeded_uniforms(seeds, shape, stream=stream))
    return normals


def _mixed(numbers: Tensor) -> Tensor:
    """Return SplitMix64's mix of 64-bit numbers; products wrap around."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FACTORS[0]
    numbers = (numbers ^ _shifted(numbers, 27)) * _FACTORS[1]
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Return a logical shift to the right, as int64 has only one that copies the sign."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)
