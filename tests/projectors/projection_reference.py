"""Dense matrices of the projectors, written again in plain Python integers and NumPy, one entry at a time."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics

import numpy as np

WORD = 2**32


def mix(word: int) -> int:
    word %= WORD
    word = (word ^ (word >> 16)) * 0x21F0AAAD % WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 % WORD
    return word ^ (word >> 15)


def fold(words: list[int]) -> int:
    key = 0x9E3779B9
    for word in words:
        key = mix(key ^ word) ^ (key * 0x85EBCA6B % WORD)
    return key


def key_of(*numbers: int) -> int:
    """Fold numbers of 64 bits."""
    return fold([part for number in numbers for part in (number % WORD, number // WORD)])


def stream_key(seed: int, model_id: int, name: str, stream: int) -> int:
    digest = hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest()
    return key_of(seed, model_id, sum(byte << (8 * i) for i, byte in enumerate(digest)), stream)


def word_at(key: int, index: int) -> int:
    return mix(mix((index % WORD) ^ key_of(key, index // WORD)) + key)


def matrix_word(key: int, row: int, column: int) -> int:
    return mix(word_at(key, row) ^ mix(column * 0x9E3779B1))


@functools.cache
def quantiles() -> list[int]:
    normal = statistics.NormalDist()
    return [round(normal.inv_cdf((a + 0.5) / 2**16) * 2**16) for a in range(2**16)]


@functools.cache
def normal_scale() -> np.float32:
    return np.float32(1 / math.sqrt(2 * sum(q * q for q in quantiles()) / 2**16))


def entry(kind: str, seed: int, model_id: int, name: str, row: int, column: int) -> float:
    """One entry, unscaled."""
    if kind == "rademacher":
        word = matrix_word(stream_key(seed, model_id, name, 1), row, column // 32)
        return -1.0 if word >> (column % 32) & 1 else 1.0
    word = matrix_word(stream_key(seed, model_id, name, 2), row, column)
    return float(np.float32(quantiles()[word % 2**16] + quantiles()[word // 2**16]) * normal_scale())


def matrix(kind: str, shape: tuple[int, int], *, seed: int, model_id: int, name: str) -> np.ndarray:
    """The unscaled float64 matrix of one parameter."""
    return np.array(
        [[entry(kind, seed, model_id, name, i, j) for j in range(shape[1])] for i in range(shape[0])]
    ).reshape(shape)
