"""Arrays as small PNG images, with zlib alone."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import InvalidInputError, NonFiniteError

__all__ = ["as_pixels", "data_uri", "shrunk"]

_COLOUR_TYPES: Final = {1: 0, 3: 2, 4: 6}  # channels -> PNG colour type: grey, RGB, RGBA


def as_pixels(array: NDArray[Any], what: str) -> NDArray[np.uint8]:
    """Return an image as bytes ``(H, W, channels)``.

    Bytes stay as they are; booleans become black and white; other numbers are taken as brightness from 0 to 1 if they
    all lie there, as 0 to 255 if they are whole numbers that lie there, and are stretched to the image's own range
    otherwise (normalised inputs).

    Args:
        array: ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels; the last axis is tried first.
        what: How messages name it.

    Raises:
        InvalidInputError: If it has another shape, or does not hold real numbers.
        NonFiniteError: If a value is NaN or infinite.
    """
    image = _channels_last(array, what)
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind not in "buif":
        raise InvalidInputError(f"The image of {what} holds {image.dtype}. Expected real numbers.")
    values = image.astype(np.float64)
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"The image of {what} has a value that is NaN or infinite. Replace it in render."
        )
    low, high = float(values.min()), float(values.max())
    if image.dtype.kind in "ui" and low >= 0 and 1 < high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scale = 255.0 / (high - low) if high > low else 0.0
    return np.rint((values - low) * scale).astype(np.uint8)


def shrunk(pixels: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Return the image with at most ``most`` pixels a side, by means over square blocks."""
    step = -(-max(pixels.shape[:2]) // most)
    if step <= 1:
        return pixels
    total = pixels.astype(np.float64)
    counts = np.ones(pixels.shape[:2])
    for axis in (0, 1):
        starts = np.arange(0, pixels.shape[axis], step)
        total, counts = np.add.reduceat(total, starts, axis), np.add.reduceat(counts, starts, axis)
    return np.rint(total / counts[:, :, None]).astype(np.uint8)


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Return an image ``(H, W, channels)`` as a data URI of a PNG."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # filter 0 before every line
    body = zlib.compress(lines.tobytes(), 9)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*part) for part in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    )
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _channels_last(array: NDArray[Any], what: str) -> NDArray[Any]:
    if array.size and array.ndim == 2:
        return array[:, :, None]
    if array.size and array.ndim == 3 and array.shape[2] in _COLOUR_TYPES:
        return array
    if array.size and array.ndim == 3 and array.shape[0] in _COLOUR_TYPES:
        return np.moveaxis(array, 0, 2)
    raise InvalidInputError(
        f"The image of {what} has shape {array.shape}. Expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels."
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
