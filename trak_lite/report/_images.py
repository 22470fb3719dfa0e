"""Images of rows as PNG; Pillow encodes them."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._validate import require_packages
from trak_lite.errors import InvalidInputError, NonFiniteError

__all__ = ["encoded", "image_array"]

_CHANNELS: Final = (1, 3, 4)
_STORED_SIDE: Final = 160
"""Most pixels of a side in the page."""
_SHOWN_SIDE: Final = 96
"""Longer side in the page, in CSS pixels."""
_COARSE_SIDE: Final = 48
"""Images with fewer pixels are displayed without smoothing."""


def image_array(content: Any) -> NDArray[Any] | None:
    """Return the array of a tensor, an array or a Pillow image, ``None`` for other content."""
    if isinstance(content, Tensor):
        plain = content.detach().cpu()
        return (plain.float() if plain.is_floating_point() else plain).numpy()
    if isinstance(content, np.ndarray):
        return content
    pillow = sys.modules.get("PIL.Image")  # a Pillow image exists only if Pillow is imported
    if pillow is not None and isinstance(content, pillow.Image):
        return np.asarray(content.convert("RGBA" if "A" in content.getbands() else "RGB"))
    return None


def encoded(array: NDArray[Any], what: str) -> dict[str, Any]:
    """Return an image as the attributes of an ``img`` element, reduced to means over blocks of pixels if it is large.

    uint8 stays as it is, booleans become black and white. Other values are scaled from [0, 1] if all lie there, from
    [0, 255] if they are integers that lie there, and from their own range otherwise (normalised inputs).

    Args:
        array: ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels; the last axis is tried first.
        what: Name of the row in messages, and the alternative text.

    Raises:
        InvalidInputError: If it has another shape, or its values are not real numbers.
        NonFiniteError: If a value is NaN or infinite.
        MissingPackageError: If Pillow is not installed.
    """
    require_packages("PIL", extra="report")
    from PIL.Image import fromarray

    image = fromarray(_bytes_of(_channels_last(array, what), what))
    step = -(-max(image.size) // _STORED_SIDE)
    if step > 1:
        image = image.reduce(step)
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    longest = max(image.size)
    width, height = (max(1, round(_SHOWN_SIDE * side / longest)) for side in image.size)
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
    return {"src": uri, "alt": what, "width": width, "height": height, "coarse": longest < _COARSE_SIDE}


def _channels_last(array: NDArray[Any], what: str) -> NDArray[Any]:
    """Return an image as ``(H, W)`` for one channel, else ``(H, W, C)``."""
    image = array
    if array.ndim == 3 and array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        image = np.moveaxis(array, 0, 2)
    if not array.size or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in _CHANNELS):
        raise InvalidInputError(
            f"The image of {what} has shape {array.shape}. Expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 "
            "channels."
        )
    return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image


def _bytes_of(image: NDArray[Any], what: str) -> NDArray[np.uint8]:
    """Return an image as contiguous uint8."""
    if image.dtype.kind not in "buif":
        raise InvalidInputError(f"The image of {what} has dtype {image.dtype}. Expected real numbers.")
    if image.dtype == np.uint8:
        return np.ascontiguousarray(image)
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
    return np.rint((values - low) * scale).astype(np.uint8, order="C")
