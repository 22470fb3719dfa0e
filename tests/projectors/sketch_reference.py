"""CountSketch written again from its definition, one entry at a time, in plain Python integers and NumPy."""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
from projection_reference import key_of, word_at

TILE_OFFSET, TILE_SIGN, FOLD_OFFSET, FOLD_SIGN, ROW_SHIFT, ROW_SIGN, COLUMN_SIGN = range(3, 10)


def stream_key(seed: int, model_id: int, name: str, stream: int, *parts: int) -> int:
    digest = hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest()
    return key_of(seed, model_id, int.from_bytes(digest, "little"), stream, *parts)


def signs(key: int, count: int) -> np.ndarray:
    """Bit ``i % 32`` of word ``i // 32``, set for -1."""
    words = np.array([word_at(key, i) for i in range(-(-count // 32))], dtype=np.uint64)
    bits = words[:, None] >> np.arange(32, dtype=np.uint64) & np.uint64(1)
    return 1.0 - 2.0 * bits.reshape(-1)[:count].astype(float)


def offsets(key: int, count: int, size: int) -> list[int]:
    return [word_at(key, i) * size // 2**32 for i in range(count)]


def permutation(key: int, size: int) -> list[int]:
    words = [word_at(key, i) for i in range(size)]
    return sorted(range(size), key=lambda i: words[i])


def vector_entries(num_entries: int, proj_dim: int, key) -> tuple[np.ndarray, np.ndarray]:
    """Bucket and sign of every entry: tiles on a ring, the ring folded to K numbers."""
    blocks = min(max(1, 32768 // proj_dim), max(1, math.ceil(num_entries / proj_dim)))
    width = blocks * proj_dim
    starts = offsets(key(TILE_OFFSET), math.ceil(num_entries / width), width)
    fold_offsets = offsets(key(FOLD_OFFSET), blocks, proj_dim)
    fold_signs = signs(key(FOLD_SIGN), width)
    sign = signs(key(TILE_SIGN), num_entries)
    bucket = np.zeros(num_entries, dtype=int)
    for tile, start in enumerate(starts):
        here = np.arange(tile * width, min((tile + 1) * width, num_entries))
        place = (here - tile * width + start) % width
        if blocks > 1:
            sign[here] *= fold_signs[place]
            place = (place + np.array(fold_offsets)[place // proj_dim]) % proj_dim
        bucket[here] = place
    return bucket, sign


def matrix_entries(d_out: int, d_in: int, proj_dim: int, key) -> tuple[np.ndarray, np.ndarray]:
    """Bucket and sign of every entry: blocks of at most K x K, each with a permutation and two rows of signs."""

    @functools.cache
    def block(*place: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        shifts = permutation(key(ROW_SHIFT, *place), proj_dim)
        return shifts, signs(key(ROW_SIGN, *place), proj_dim), signs(key(COLUMN_SIGN, *place), proj_dim)

    bucket, sign = np.zeros((d_out, d_in), dtype=int), np.zeros((d_out, d_in))
    for i in range(d_out):
        for j in range(d_in):
            shifts, rows, columns = block(i // proj_dim, j // proj_dim)
            bucket[i, j] = (shifts[i % proj_dim] + j % proj_dim) % proj_dim
            sign[i, j] = rows[i % proj_dim] * columns[j % proj_dim]
    return bucket.ravel(), sign.ravel()


def entries(shape: tuple[int, ...], proj_dim: int, key) -> tuple[np.ndarray, np.ndarray]:
    """Bucket and sign of every entry of one copy; a matrix has two rows and 64 columns or more."""
    d_in = math.prod(shape[1:])
    if len(shape) >= 2 and shape[0] >= 2 and d_in >= 64:
        return matrix_entries(shape[0], d_in, proj_dim, key)
    return vector_entries(math.prod(shape), proj_dim, key)


def features(
    rows: np.ndarray,
    shape: tuple[int, ...],
    proj_dim: int,
    *,
    seed: int = 0,
    model_id: int = 0,
    name: str = "",
    copies: int = 1,
) -> np.ndarray:
    """Features ``(B, K)`` of gradient rows ``(B, P)`` of one parameter."""
    total = np.zeros((proj_dim, len(rows)))
    for copy in range(copies):

        def key(stream: int, *parts: int, copy: int = copy) -> int:
            return stream_key(seed, model_id, name, stream, copy, *parts)

        bucket, sign = entries(shape, proj_dim, key)
        np.add.at(total, bucket, (rows * sign).T)
    return total.T / math.sqrt(copies)


def law(x: np.ndarray, y: np.ndarray, proj_dim: int, *, copies: int = 1) -> float:
    """Variance of <phi x, phi y> for ``copies`` hashed buckets and signs of every entry."""
    dot, products = np.sum(x * y), np.sum(x**2 * y**2)
    return float((np.sum(x**2) * np.sum(y**2) + dot**2 - 2 * products / copies) / proj_dim)


def _variance(x: np.ndarray, y: np.ndarray, chance: np.ndarray) -> float:
    """Sum over pairs of the chance to meet times (x_i y_j + x_j y_i)^2, for independent signs."""
    a, b = x.ravel(), y.ravel()
    return float(a**2 @ chance @ b**2 + (a * b) @ chance @ (a * b))


def vector_law(x: np.ndarray, y: np.ndarray, proj_dim: int, *, copies: int = 1) -> float:
    """Variance of <phi x, phi y> for vectors of one tile: entries in one block of the ring never meet."""
    within = _variance(x, y, _vector_chance(x.size, proj_dim))
    between = (
        np.sum(x**2) * np.sum(y**2) + np.sum(x * y) ** 2
    ) / proj_dim  # of two copies, whatever the entries
    return float((within + (copies - 1) * between) / copies)


@functools.cache
def _vector_chance(size: int, proj_dim: int) -> np.ndarray:
    width = min(max(1, 32768 // proj_dim), math.ceil(size / proj_dim)) * proj_dim
    apart = np.abs(np.arange(size)[:, None] - np.arange(size))
    return np.minimum(1, np.minimum(apart, width - apart) / proj_dim) / proj_dim


def matrix_law(x: np.ndarray, y: np.ndarray, proj_dim: int) -> float:
    """Variance of <phi x, phi y> for matrices: entries of one block's row or column never meet."""
    return _variance(x, y, _matrix_chance(*x.shape, proj_dim)) + _meeting_in_twos(x, y, proj_dim)


@functools.cache
def _matrix_chance(d_out: int, d_in: int, proj_dim: int) -> np.ndarray:
    row, column = (axis.ravel() for axis in np.indices((d_out, d_in)))
    apart = (row[:, None] != row) & (column[:, None] != column)
    block = row // proj_dim * d_in + column // proj_dim
    return np.where(block[:, None] == block, apart / max(1, proj_dim - 1), 1 / proj_dim)


def _meeting_in_twos(x: np.ndarray, y: np.ndarray, proj_dim: int) -> float:
    """(i, j) and (k, l) meet exactly if (i, l) and (k, j) do, with the same sign, where l = j + K/2."""
    total, half = 0.0, proj_dim // 2
    for j in range(x.shape[1] - half if proj_dim % 2 == 0 else 0):
        if j % proj_dim >= half:
            continue  # j + K/2 is in the next block
        for first in range(0, len(x), proj_dim):
            x_j, x_l, y_j, y_l = (m[first : first + proj_dim, c] for m in (x, y) for c in (j, j + half))
            weight = np.outer(x_j, y_l) + np.outer(y_j, x_l)
            np.fill_diagonal(weight, 0)
            total += np.sum(weight * weight.T) / (proj_dim - 1)
    return float(total)
