"""Matrices of the projectors, written again from their definitions in plain Python integers and NumPy."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping

import numpy as np

WORD = 2**32
TILE_OFFSET, TILE_SIGN, FOLD_OFFSET, FOLD_SIGN, ROW_SHIFT, ROW_SIGN, COLUMN_SIGN = range(3, 10)
DENSE = {"rademacher": 1, "gaussian": 2}
TWO_SIDED_IN, TWO_SIDED_OUT = 16, 17
MASK, CHOICE, BUCKET, SIGN = 18, 1, 2, 3
Shapes = Mapping[str, tuple[int, ...]]


# ---- the hash


def mix(word: int) -> int:
    word %= WORD
    word = (word ^ (word >> 16)) * 0x21F0AAAD % WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 % WORD
    return word ^ (word >> 15)


def fold(words: Iterable[int], key: int = 0x9E3779B9) -> int:
    for word in words:
        key = mix(key ^ word) ^ (key * 0x85EBCA6B % WORD)
    return key


def key_of(*numbers: int) -> int:
    """Fold numbers of 64 bits."""
    return fold([part for number in numbers for part in (number % WORD, number // WORD)])


def stream_key(seed: int, model_id: int, name: str, stream: int, *parts: int) -> int:
    digest = hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest()
    return key_of(seed, model_id, int.from_bytes(digest, "little"), stream, *parts)


def word_at(key: int, index: int) -> int:
    return mix(mix((index % WORD) ^ key_of(key, index // WORD)) + key)


def matrix_word(key: int, row: int, column: int) -> int:
    return mix(word_at(key, row) ^ mix(column * 0x9E3779B1))


def signs(key: int, count: int) -> np.ndarray:
    """Bit ``i % 32`` of word ``i // 32``, set for -1."""
    words = np.array([word_at(key, i) for i in range(-(-count // 32))], dtype=np.uint64)
    bits = words[:, None] >> np.arange(32, dtype=np.uint64) & np.uint64(1)
    return 1.0 - 2.0 * bits.reshape(-1)[:count].astype(float)


def offsets(key: int, count: int, size: int) -> list[int]:
    return [word_at(key, i) * size // 2**32 for i in range(count)]


# ---- dense matrices


@functools.cache
def quantiles() -> list[int]:
    normal = statistics.NormalDist()
    return [round(normal.inv_cdf((a + 0.5) / 2**16) * 2**16) for a in range(2**16)]


@functools.cache
def normal_scale() -> np.float32:
    return np.float32(1 / math.sqrt(2 * sum(q * q for q in quantiles()) / 2**16))


def entry(kind: str, key: int, row: int, column: int) -> float:
    """One entry, unscaled."""
    if kind == "rademacher":
        return -1.0 if matrix_word(key, row, column // 32) >> (column % 32) & 1 else 1.0
    word = matrix_word(key, row, column)
    return float(np.float32(quantiles()[word % 2**16] + quantiles()[word // 2**16]) * normal_scale())


def matrix(kind: str, shape: tuple[int, int], key: int) -> np.ndarray:
    """The unscaled float64 matrix of one parameter."""
    rows, columns = shape
    return np.array([[entry(kind, key, i, j) for j in range(columns)] for i in range(rows)]).reshape(shape)


def dense(kind: str, shapes: Shapes, proj_dim: int, *, seed: int, model_id: int) -> np.ndarray:
    """All rows of a dense matrix, scaled."""
    keys = {name: stream_key(seed, model_id, name, DENSE[kind]) for name in shapes}
    parts = [matrix(kind, (math.prod(shape), proj_dim), keys[name]) for name, shape in shapes.items()]
    return np.concatenate(parts) / math.sqrt(proj_dim)


def two_sided(kind: str, shapes: Shapes, k: int, *, seed: int, model_id: int) -> np.ndarray:
    """A Kronecker product per matrix; what is no matrix is sketched to as many features as a matrix has."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1 and math.prod(shape)}
    rest = {name: shape for name, shape in shapes.items() if name not in matrices}
    found = {}
    for name, shape in matrices.items():
        sizes = (TWO_SIDED_OUT, shape[0]), (TWO_SIDED_IN, math.prod(shape[1:]))
        sides = [
            np.eye(size)
            if k >= size
            else matrix(kind, (size, k), stream_key(seed, model_id, name, stream)) / math.sqrt(k)
            for stream, size in sizes
        ]
        found[name] = np.kron(*sides)
    found["rest"] = countsketch(rest, k * k, seed=seed, model_id=model_id)
    columns = np.cumsum([0, *(part.shape[1] for part in found.values())])
    whole, first = np.zeros((sum(map(math.prod, shapes.values())), columns[-1])), 0
    start = dict(zip(found, columns, strict=False))
    for name, shape in shapes.items():
        size = math.prod(shape)
        part = found[name] if name in matrices else found["rest"][:size]
        if name not in matrices:
            found["rest"] = found["rest"][size:]
        place = start[name if name in matrices else "rest"]
        whole[first : first + size, place : place + part.shape[1]] = part
        first += size
    return whole


# ---- CountSketch


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
        words = [word_at(key(ROW_SHIFT, *place), i) for i in range(proj_dim)]
        shifts = sorted(range(proj_dim), key=lambda i: words[i])
        return shifts, signs(key(ROW_SIGN, *place), proj_dim), signs(key(COLUMN_SIGN, *place), proj_dim)

    bucket, sign = np.zeros((d_out, d_in), dtype=int), np.zeros((d_out, d_in))
    for i in range(d_out):
        for j in range(d_in):
            shifts, rows, columns = block(i // proj_dim, j // proj_dim)
            bucket[i, j] = (shifts[i % proj_dim] + j % proj_dim) % proj_dim
            sign[i, j] = rows[i % proj_dim] * columns[j % proj_dim]
    return bucket.ravel(), sign.ravel()


def sketch(rows, shape, k, *, seed=0, model_id=0, name="", copies=1):
    """Features ``(B, K)`` of gradient rows ``(B, P)`` of one parameter.

    A parameter with two rows and 64 columns, or more, is sketched as a matrix.
    """
    total, d_in = np.zeros((k, len(rows))), math.prod(shape[1:])
    for copy in range(copies):

        def key(stream: int, *parts: int, copy: int = copy) -> int:
            return stream_key(seed, model_id, name, stream, copy, *parts)

        is_matrix = len(shape) >= 2 and shape[0] >= 2 and d_in >= 64
        bucket, sign = (
            matrix_entries(shape[0], d_in, k, key) if is_matrix else vector_entries(math.prod(shape), k, key)
        )
        np.add.at(total, bucket, (rows * sign).T)
    return total.T / math.sqrt(copies)


def countsketch(shapes: Shapes, k: int, **settings) -> np.ndarray:
    """The whole matrix of a sketch."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    parts = [sketch(np.eye(sizes[name]), shapes[name], k, name=name, **settings) for name in shapes]
    return np.concatenate([np.zeros((0, k)), *parts])


# ---- masks


def mask_key(seed: int, model_id: int, name: str, part: int) -> int:
    """The key of a stream and one more number, folded again."""
    return fold((part, 0), stream_key(seed, model_id, name, MASK))


def mask(shapes, k, mask_dim=None, *, seed, model_id, segment="joint"):
    """All entries sorted by their words, the first of them kept, and with ``mask_dim`` sketched to k features."""
    places = [(name, i) for name, shape in shapes.items() for i in range(math.prod(shape))]
    words = {p: word_at(mask_key(seed, model_id, p[0], CHOICE), p[1]) for p in places}
    kept = sorted(places, key=words.__getitem__)[: mask_dim or k]
    whole = np.zeros((len(places), min(k, len(places))))
    folded = len(kept) > whole.shape[1]
    bucket, sign = range(len(kept)), np.ones(len(kept))
    if folded:
        bucket = offsets(mask_key(seed, model_id, segment, BUCKET), len(kept), whole.shape[1])
        sign = signs(mask_key(seed, model_id, segment, SIGN), len(kept))
    for number, place in enumerate(kept):
        whole[places.index(place), bucket[number]] = sign[number] * math.sqrt(len(places) / len(kept))
    return whole


def by_module(make: Callable[..., np.ndarray], shapes: Shapes, *sizes: int, **settings: int) -> np.ndarray:
    """A block for each module, one after the other."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = shape
    blocks = {
        module: make(own, *sizes, segment=module, **settings)
        for module, own in modules.items()
        if sum(map(math.prod, own.values()))
    }
    whole, column = {name: [] for name in shapes}, 0
    width = sum(block.shape[1] for block in blocks.values())
    for module, block in blocks.items():
        rows = np.zeros((len(block), width))
        rows[:, column : column + block.shape[1]] = block
        column += block.shape[1]
        for name, shape in modules[module].items():
            whole[name], rows = rows[: math.prod(shape)], rows[math.prod(shape) :]
    return np.concatenate([np.reshape(part, (-1, width)) for part in whole.values()])
