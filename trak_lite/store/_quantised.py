"""Quantisation of rows to small integers with one float32 scale per row, for ``int8`` and ``int4`` columns.

A row x is stored as integers q and a scale s, and read as ``q * s``. The scale is ``max|x| / 127`` (int4: ``/ 7``) with
the last 8 of its 24 significand bits cleared, and q is ``x / s`` rounded half to even. Clearing the bits shifts the
largest entry by at most 0.004 s. It gives three exact guarantees:

- ``q * s`` is exact in float32, independent of implementation and order of operations.
- ``|x - q * s| <= s / 2``.
- Quantising rows that were read gives the same bytes again.

Rows whose scale would be below the smallest normal float32 (``max|x|`` below 1.5e-36; 8.2e-38 in int4) are stored as
zero, with a scale of zero.

int4 packs two entries per byte: entry 2j of a row is the low half of byte j, entry 2j + 1 the high half, each plus 8.
For odd widths, the unused high half of the last byte is 8, which decodes to zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTISATION = 1
"""Version of the quantisation; part of the fingerprints of quantised columns."""

QUANTISED = {"int8": 127, "int4": 7}
"""Largest integer of each dtype; the smallest is its negative."""

# 16 significant bits; the product with an 8-bit integer fits into the 24 bits of float32
_SCALE_BITS = np.uint32(0xFFFFFF00)
_OFFSET = 8
_BYTES = np.arange(256)
_PAIRS = ((_BYTES & 15) - _OFFSET + 1j * ((_BYTES >> 4) - _OFFSET)).astype(np.complex64)
"""Both entries of each byte value as a complex number, so that one table look-up gives two adjacent float32."""


def quantise(rows: NDArray[Any], dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Quantise finite float32 rows ``(b, K)`` to integers and scales ``(b,)`` float32.

    The integers are ``(b, K)`` int8, or ``(b, ceil(K / 2))`` uint8 for int4.

    Example:
        >>> quantise(np.array([[7.0, -2.4, 0.6]], np.float32), "int8")[0]
        array([[127, -44,  11]], dtype=int8)
        >>> [f"{byte:08b}" for byte in quantise(np.array([[7.0, -2.4, 0.6]], np.float32), "int4")[0][0]]
        ['01101111', '10001001']
    """
    scales = np.abs(rows).max(axis=1) / np.float32(QUANTISED[dtype])
    scales = (scales.view(np.uint32) & _SCALE_BITS).view(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 0
    numbers: NDArray[Any] = rows / np.where(scales > 0, scales, np.float32(np.inf))[:, None]
    np.rint(numbers, out=numbers)
    if dtype == "int8":
        return numbers.astype(np.int8), scales
    halves = np.full((len(numbers), numbers.shape[1] + numbers.shape[1] % 2), _OFFSET, np.uint8)
    halves[:, : numbers.shape[1]] = numbers + _OFFSET
    return halves[:, ::2] | halves[:, 1::2] << 4, scales


def dequantise(
    numbers: NDArray[Any], scales: NDArray[Any], dtype: str, width: int, out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Dequantise what :func:`quantise` returns to rows of ``width`` entries; return them, a view of ``out``.

    ``out`` is C-contiguous, with at least b rows of K entries; for int4, K rounded up to an even number.

    Example:
        >>> packed, scales = quantise(np.array([[7.0, -2.4, 0.6]], np.float32), "int4")
        >>> dequantise(packed, scales, "int4", 3, np.empty((1, 4), np.float32))
        array([[ 7., -2.,  1.]], dtype=float32)
    """
    filled = out[: len(numbers)]
    if dtype == "int8":
        np.multiply(numbers, scales[:, None], out=filled)
    else:
        # mode="raise" would write to a temporary copy first
        np.take(_PAIRS, numbers, out=filled.view(np.complex64), mode="clip")
        filled *= scales[:, None]
    return filled[:, :width]
