"""CRC-32C of arrays, used for row records, commit records, chunks and cached arrays."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

# google_crc32c holds the GIL for a whole call; short pieces let other threads run.
_PIECE = 1 << 20


def crc32c(*pieces: NDArray[Any] | bytes, start: int = 0) -> int:
    """Return the CRC-32C of the concatenation of C-contiguous arrays or byte strings, after data of checksum ``start``.

    Example:
        >>> hex(crc32c(b"123456789")), crc32c(b"12345", b"6789") == crc32c(b"123456789")
        ('0xe3069283', True)
    """
    checksum = start
    for piece in pieces:
        flat = piece if isinstance(piece, bytes) else piece.reshape(-1).view(np.uint8)
        for offset in range(0, len(flat), _PIECE):
            checksum = google_crc32c.extend(checksum, flat[offset : offset + _PIECE])
    return checksum
