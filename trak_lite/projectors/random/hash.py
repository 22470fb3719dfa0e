"""A counter-based 32-bit hash: random words as a function of a key and an index.

Every random number of a projection is ``h(key, i)`` for a key made of (seed, model_id, parameter name,
stream) and a local index i. So any entry can be drawn in any order and on any device with the same bits.
``torch.Generator`` does not allow this: its CPU and CUDA streams differ, and a longer draw changes the rest.

The mixer is a two-round multiply-xorshift finaliser. torch has no arithmetic on ``uint32``, so words are stored
in int32 tensors: multiplication and addition wrap, and a logical right shift is an arithmetic one plus a mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

__all__ = [
    "Stream",
    "hash_offsets",
    "hash_permutation",
    "hash_signs",
    "hash_words_",
    "key32",
    "mix32",
    "mix32_",
    "parameter_key",
    "wrap32",
]

_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_WORD = 0xFFFFFFFF


class Stream(IntEnum):
    """Use of the words of a key; different uses for one parameter have different words."""

    RADEMACHER = 1
    GAUSSIAN = 2
    TILE_OFFSET = 3
    TILE_SIGN = 4
    FOLD_OFFSET = 5
    FOLD_SIGN = 6
    ROW_SHIFT = 7
    ROW_SIGN = 8
    COLUMN_SIGN = 9
    TWO_SIDED_IN = 16
    TWO_SIDED_OUT = 17
    MASK = 18


def wrap32(value: int) -> int:
    """Return the int32 that has the low 32 bits of ``value``.

    Example:
        >>> wrap32(0xFFFFFFFF)
        -1
    """
    return ((value + 0x80000000) & _WORD) - 0x80000000


def mix32(word: int) -> int:
    """Scramble one 32-bit word (a bijection); :func:`mix32_` does the same to a tensor."""
    word ^= word >> 16
    word = word * _MULTIPLIERS[0] & _WORD
    word ^= word >> 15
    word = word * _MULTIPLIERS[1] & _WORD
    return word ^ word >> 15


def mix32_(words: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Scramble 32-bit words in place.

    Args:
        words: int32 tensor of any shape.
        scratch: int32 tensor of the same shape that is overwritten; ``None`` allocates one.

    Returns:
        ``words``.
    """
    scratch = torch.empty_like(words) if scratch is None else scratch
    for shift, multiplier in ((16, _MULTIPLIERS[0]), (15, _MULTIPLIERS[1]), (15, None)):
        torch.bitwise_right_shift(words, shift, out=scratch)
        scratch.bitwise_and_(_WORD >> shift)  # the shift is arithmetic: drop the copies of the sign bit
        words.bitwise_xor_(scratch)
        if multiplier is not None:
            words.mul_(wrap32(multiplier))
    return words


def key32(*numbers: int) -> int:
    """Fold integers of any size and sign to a 32-bit key.

    Numbers in ``[0, 2**64)`` contribute two words each; any other contributes all words of its two's
    complement and a marker, so that -1, ``2**64 - 1`` and ``2**64`` give unrelated keys.

    Example:
        >>> hex(key32(0, 5, 0, 0))
        '0xdac49fe8'
    """
    key = 0x9E3779B9
    for number in numbers:
        for word in _words(number):
            key = mix32(key ^ word) ^ (key * 0x85EBCA6B & _WORD)
    return key


def _words(number: int) -> Iterator[int]:
    """Yield the 32-bit words of an integer, least significant first."""
    if 0 <= number < 1 << 64:
        yield number & _WORD
        yield number >> 32
        return
    count = max(3, number.bit_length() // 32 + 1)  # the two's complement has a sign bit more than bit_length
    for position in range(count):
        yield number >> 32 * position & _WORD
    yield 0xC0000000 + count


def parameter_key(seed: int, model_id: int, name: str, stream: Stream, *parts: int) -> int:
    """Return the key of one parameter's random words.

    Args:
        seed: Any Python integer.
        model_id: The checkpoint.
        name: The parameter's canonical name; its 64-bit BLAKE2b digest enters the key.
        stream: Purpose of the numbers; each purpose has an independent stream.
        *parts: Further numbers, for several uses of one stream.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return key32(seed, model_id, int.from_bytes(digest, "little"), int(stream), *parts)


def hash_words_(out: Tensor, key: int, start: int = 0, *, scratch: Tensor | None = None) -> Tensor:
    """Write the words ``h(key, start), h(key, start + 1), ...`` into ``out``.

    ``h(key, i) = mix(mix(low32(i) ^ key32(key, high32(i))) + key)``, with i below ``2**63``.

    Args:
        out: Contiguous int32 tensor of shape ``(n,)``.
        key: A 32-bit key.
        start: Index of the first word.
        scratch: int32 tensor of shape ``(n,)`` that is overwritten; ``None`` allocates one.

    Returns:
        ``out``.

    Example:
        >>> hash_words_(torch.empty(3, dtype=torch.int32), key32(0, 5, 0, 0)).tolist()
        [942864607, 1385279884, -1488536656]
    """
    scratch = torch.empty_like(out) if scratch is None else scratch
    torch.arange(out.shape[0], out=out, device=out.device)
    done = 0
    while done < out.shape[0]:  # the high half of the index changes every 2**32 words
        index = start + done
        count = min(out.shape[0] - done, (1 << 32) - (index & _WORD))
        words, spare = out[done : done + count], scratch[done : done + count]
        words.add_(wrap32(start))
        words.bitwise_xor_(wrap32(key32(key, index >> 32)))
        mix32_(words, spare)
        words.add_(wrap32(key))
        mix32_(words, spare)
        done += count
    return out


def hash_signs(key: int, start: int, count: int, *, device: torch.device) -> Tensor:
    """Return signs ``start .. start + count - 1`` of a key, ``(count,)`` float32.

    Sign i is -1 where bit ``i % 32`` of word ``i // 32`` is set.

    Example:
        >>> hash_signs(key32(0, 5, 0, 0), 0, 4, device=torch.device("cpu")).tolist()
        [-1.0, -1.0, -1.0, -1.0]
    """
    first, last = start >> 5, start + count + 31 >> 5
    words = hash_words_(torch.empty(last - first, dtype=torch.int32, device=device), key, first)
    shifts = torch.arange(31, -1, -1, dtype=torch.int32, device=device)
    bits = words[:, None] << shifts  # moves the chosen bit to the sign bit of a float32 1.0
    bits.bitwise_and_(wrap32(0x80000000)).bitwise_or_(0x3F800000)
    return bits.view(torch.float32).reshape(-1)[start - (first << 5) :][:count]


def hash_offsets(key: int, start: int, count: int, *, size: int) -> list[int]:
    """Return ``floor(h(key, i) * size / 2**32)`` for ``i = start .. start + count - 1``: numbers in ``[0, size)``."""
    words = hash_words_(torch.empty(count, dtype=torch.int32, device="cpu"), key, start).tolist()
    return [((word & _WORD) * size) >> 32 for word in words]


def hash_permutation(key: int, size: int) -> Tensor:
    """Return a permutation of ``0 .. size - 1`` on the CPU: the order of ``h(key, 0) .. h(key, size - 1)``, unsigned.

    Example:
        >>> hash_permutation(key32(0, 5, 0, 0), 3).tolist()
        [0, 1, 2]
    """
    words = hash_words_(torch.empty(size, dtype=torch.int32, device="cpu"), key)
    return torch.argsort(words.to(torch.int64) & _WORD, stable=True)
