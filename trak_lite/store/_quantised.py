"""Rows as small integers with one float32 scale each: the numbers of ``int8`` and ``int4`` columns.

A row x is stored as integers q and a scale s, and read as ``q * s``. The scale is ``max|x| / 127`` (int4: ``/ 7``) with
the last 8 of its 24 bits cleared, and q is ``x / s`` rounded half to even. Clearing costs nothing that can be seen
(the largest entry is off by 0.004 s) and buys three laws, which hold without a tolerance: ``q * s`` is exact in
float32, whoever computes it and in whatever order; ``|x - q * s| <= s / 2``; and rows that were read are stored again
as the same bytes. Rows whose scale would be no normal float32 (``max|x|`` below 1.5e-36; 8.2e-38 in int4) are zero,
with a scale of zero.

int4 is packed two per byte: entry 2j of a row is the low half of byte j, entry 2j + 1 the high half, each plus 8. What
is left over in the last byte of a row of odd width stands for zero, an 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUANTISATION", "QUANTISED", "dequantise", "quantise"]

QUANTISATION = 1
"""Version of how rows become integers; part of every fingerprint that depends on it."""

QUANTISED = {"int8": 127, "int4": 7}
"""The largest integer of each dtype; the smallest is its negative."""

_SCALE_BITS = np.uint32(0xFFFFFF00)  # 16 significant bits: times an integer of up to 8 bits, exact in 24
_OFFSET = 8
_BYTES = np.arange(256)
_PAIRS = ((_BYTES & 15) - _OFFSET + 1j * ((_BYTES >> 4) - _OFFSET)).astype(np.complex64)
"""Both entries of every byte, as a complex number: one look-up gives two neighbouring float32."""


def quantise(rows: NDArray[Any], dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return integers and scales of rows.

    Args:
        rows: ``(b, K)`` float32, finite.
        dtype: ``"int8"`` or ``"int4"``.

    Returns:
        ``(b, K)`` int8, or ``(b, ceil(K / 2))`` uint8 for int4; and ``(b,)`` float32.

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
    return (numbers.astype(np.int8) if dtype == "int8" else _packed(numbers)), scales


def dequantise(
    numbers: NDArray[Any], scales: NDArray[Any], dtype: str, width: int, out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the rows that integers and scales stand for.

    Args:
        numbers: ``(b, K)`` int8, or ``(b, ceil(K / 2))`` uint8 for int4.
        scales: ``(b,)``.
        dtype: ``"int8"`` or ``"int4"``.
        width: K.
        out: C-contiguous, at least b rows of K entries; for int4 K rounded up to an even number.

    Returns:
        ``(b, K)``, a part of ``out``.

    Example:
        >>> packed, scales = quantise(np.array([[7.0, -2.4, 0.6]], np.float32), "int4")
        >>> dequantise(packed, scales, "int4", 3, np.empty((1, 4), np.float32))
        array([[ 7., -2.,  1.]], dtype=float32)
    """
    filled = out[: len(numbers)]
    if dtype == "int8":
        np.multiply(numbers, scales[:, None], out=filled)
    else:
        np.take(
            _PAIRS, numbers, out=filled.view(np.complex64), mode="clip"
        )  # "raise" would fill a copy first
        filled *= scales[:, None]
    return filled[:, :width]


def _packed(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    halves = np.full((len(numbers), numbers.shape[1] + numbers.shape[1] % 2), _OFFSET, np.uint8)
    halves[:, : numbers.shape[1]] = numbers + _OFFSET
    packed: NDArray[np.uint8] = halves[:, ::2] | halves[:, 1::2] << 4
    return packed
