"""A counter-based 32-bit hash: random words as a function of a key and an index.

Every random number of a projection is ``h(key, i)`` for a key made of (seed, model_id, parameter name,
stream) and a local index i. So any entry can be drawn in any order and on any device with the same bits.
``torch.Generator`` does not allow this: its CPU and CUDA streams differ, and a longer draw changes the rest.

The mixer is a two-round multiply-xorshift finaliser. torch has no arithmetic on ``uint32``, so words are stored
in int32 tensors: multiplication and addition wrap, and a logical right shift is an arithmetic one plus a mask.

Entry (i, j) of the dense random matrix of a parameter depends only on (seed, model_id, parameter name, i, j), so a
matrix with more rows or columns begins with the same numbers. Every entry is exact or rounded once, so CPU and CUDA
give the same bits.

Shapes: n rows of a block (gradient entries), K columns (``proj_dim``).
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import IntEnum
from typing import ClassVar, final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import empty_buffer

_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_WORD = 0xFFFFFFFF
_FIRST_KEY = 0x9E3779B9
_KEY_STEP = 0x85EBCA6B


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
    """Scramble int32 words of any shape in place and return them; ``scratch`` of the same shape is overwritten."""
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
    key = _FIRST_KEY
    for number in numbers:
        for word in _words(number):
            key = mix32(key ^ word) ^ (key * _KEY_STEP & _WORD)
    return key


def key_grid(key: int, rows: int, columns: int) -> Tensor:
    """Return int32 keys ``(rows, columns)``: of ``key32(*numbers)``, those of ``(i, j)`` are ``key32(*numbers, i, j)``.

    Example:
        >>> key_grid(key32(0, 5), 1, 1).item() == wrap32(key32(0, 5, 0, 0))
        True
    """
    i, j = (torch.arange(count, dtype=torch.int32, device="cpu") for count in (rows, columns))
    keys = torch.tensor([[wrap32(key)]], dtype=torch.int32, device="cpu")
    return _folded(_folded(keys, i[:, None]), j[None, :])


def _folded(keys: Tensor, numbers: Tensor) -> Tensor:
    """Fold numbers, given as int32 words, to int32 keys, as :func:`key32` does."""
    for word in (numbers, torch.zeros_like(numbers)):  # the high word of each number is 0
        keys = mix32_(keys ^ word).bitwise_xor_(keys * wrap32(_KEY_STEP))
    return keys


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
    """Return the key of one parameter's random words, for any integer as seed.

    The 64-bit BLAKE2b digest of the name enters the key. Each stream is independent, and so are its ``parts``.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return key32(seed, model_id, int.from_bytes(digest, "little"), int(stream), *parts)


def hash_words_(out: Tensor, key: int, start: int = 0, *, scratch: Tensor | None = None) -> Tensor:
    """Write the words ``h(key, start), h(key, start + 1), ...`` into ``out``.

    ``h(key, i) = mix(mix(low32(i) ^ key32(key, high32(i))) + key)``, with i below ``2**63``.

    Args:
        out: Contiguous int32 ``(n,)``, which is returned.
        key: A 32-bit key.
        start: Index of the first word.
        scratch: int32 ``(n,)`` that is overwritten; ``None`` allocates one.

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
    return _sign_bits(words)[start - (first << 5) :][:count]


def _sign_bits(words: Tensor) -> Tensor:
    """Return the 32 signs of each int32 word ``(..., n)``, float32 ``(..., 32 n)``."""
    shifts = torch.arange(31, -1, -1, dtype=torch.int32, device=words.device)
    bits = words.unsqueeze(-1) << shifts  # moves the chosen bit to the sign bit of a float32 1.0
    bits.bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE)
    return bits.view(torch.float32).flatten(-2)


def hash_offsets(key: int, count: int, *, size: int) -> list[int]:
    """Return ``floor(h(key, i) * size / 2**32)`` for ``i = 0 .. count - 1``: numbers in ``[0, size)``."""
    words = hash_words_(torch.empty(count, dtype=torch.int32, device="cpu"), key).tolist()
    return [((word & _WORD) * size) >> 32 for word in words]


def sign_table(keys: Tensor, count: int) -> Tensor:
    """Return the first signs of every key, float32 ``(..., count)`` for int32 keys ``(...)``, as :func:`hash_signs`."""
    return _sign_bits(_word_table(keys, count + 31 >> 5))[..., :count]


def hash_permutations(keys: Tensor, size: int) -> Tensor:
    """Return a permutation of ``0 .. size - 1`` for every key: the order of its first words, which are unsigned.

    It is int64 ``(..., size)`` for int32 keys ``(...)``.

    Example:
        >>> hash_permutations(key_grid(key32(0, 5), 1, 1), 3).tolist()
        [[[0, 1, 2]]]
    """
    return torch.argsort(_word_table(keys, size).to(torch.int64) & _WORD, stable=True)


def _word_table(keys: Tensor, count: int) -> Tensor:
    """Return the first words of every key, int32 ``(..., count)``, as :func:`hash_words_`."""
    zero = torch.zeros((), dtype=torch.int32, device=keys.device)
    high_keys = _folded(_folded(torch.full_like(keys, wrap32(_FIRST_KEY)), keys), zero)
    words = torch.arange(count, dtype=torch.int32, device=keys.device) ^ high_keys.unsqueeze(-1)
    return mix32_(mix32_(words).add_(keys.unsqueeze(-1)))


_COLUMN_STEP = 0x9E3779B1  # odd, so the column words are distinct
_SIGN_BIT = wrap32(0x80000000)
_ONE = 0x3F800000  # 1.0 as float32 bits


class AbstractEntries(ABC):
    """Draws rows of a matrix whose entries have mean 0 and variance 1. An instance has its own scratch memory."""

    kind: ClassVar[str]
    """Name of the distribution in the store's manifest."""
    stream: ClassVar[Stream]
    columns_per_word: ClassVar[int]
    constant_bytes: ClassVar[int]
    """Bytes of tables that do not depend on the size of the matrix."""

    def __init__(self, proj_dim: int, num_rows: int, device: torch.device) -> None:
        """Allocate scratch for blocks of at most ``num_rows`` rows on ``device``."""
        num_words = self.words_per_row(proj_dim)
        empty = functools.partial(empty_buffer, dtype=torch.int32, device=device)
        self._rows, self._row_scratch = empty(num_rows), empty(num_rows)
        self._words, self._scratch = empty(num_rows, num_words), empty(num_rows, num_words)
        self._columns = empty(num_words)
        torch.arange(num_words, out=self._columns, device=device)
        mix32_(self._columns.mul_(wrap32(_COLUMN_STEP)), self._scratch[0])

    @classmethod
    def words_per_row(cls, proj_dim: int) -> int:
        """Return the number of hash words per row."""
        return -(-proj_dim // cls.columns_per_word)

    @classmethod
    def width(cls, proj_dim: int) -> int:
        """Return the number of columns that are drawn: K, rounded up to full words."""
        return cls.columns_per_word * cls.words_per_row(proj_dim)

    @classmethod
    def scratch_bytes(cls, proj_dim: int, num_rows: int) -> int:
        """Return the bytes of scratch memory and tables of an instance."""
        num_words = cls.words_per_row(proj_dim)
        return 4 * (2 * num_rows * (num_words + 1) + num_words) + cls.constant_bytes

    @abstractmethod
    def draw_(self, out: Tensor, key: int, start: int) -> Tensor:
        """Write rows ``start, start + 1, ...`` of the matrix of ``key`` into ``out`` and return it.

        ``out`` is contiguous float32 ``(n, width)``, n at most the ``num_rows`` of the constructor.
        """

    def _draw_words(self, num_rows: int, key: int, start: int) -> Tensor:
        """Return words ``(n, words_per_row)``: ``mix(h(key, i) ^ mix(column_step * j))``."""
        rows = hash_words_(self._rows[:num_rows], key, start, scratch=self._row_scratch[:num_rows])
        words = self._words[:num_rows]
        torch.bitwise_xor(rows[:, None], self._columns[None, :], out=words)
        return mix32_(words, self._scratch[:num_rows])


@final
class RademacherEntries(AbstractEntries):
    """Entries +1 or -1: entry (i, j) is -1 where bit ``j % 32`` of word ``(i, j // 32)`` is set."""

    kind = "rademacher"
    stream = Stream.RADEMACHER
    columns_per_word = 32
    constant_bytes = 4 * 32

    def __init__(self, proj_dim: int, num_rows: int, device: torch.device) -> None:
        super().__init__(proj_dim, num_rows, device)
        self._shifts = empty_buffer(32, dtype=torch.int32, device=device)
        torch.arange(31, -1, -1, out=self._shifts, device=device)

    def draw_(self, out: Tensor, key: int, start: int) -> Tensor:
        """Write rows of signs; see :meth:`AbstractEntries.draw_`."""
        words = self._draw_words(out.shape[0], key, start)
        bits = out.view(torch.int32).view(*words.shape, 32)
        # Move the chosen bit to the sign bit of a float32 1.0.
        torch.bitwise_left_shift(words[:, :, None], self._shifts, out=bits)
        bits.bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE)
        return out


@final
class GaussianEntries(AbstractEntries):
    """Normal entries: the scaled sum of two table quantiles, indexed by the 16-bit halves of word (i, j).

    The logarithm and cosine of the usual transforms round differently on CPU and CUDA. Here the quantiles are
    integers, their sum is exact in float32, and one multiplication scales the variance to 1. The largest
    entry is 6.1.
    """

    kind = "gaussian"
    stream = Stream.GAUSSIAN
    columns_per_word = 1
    constant_bytes = 4 * (1 << 16)

    def __init__(self, proj_dim: int, num_rows: int, device: torch.device) -> None:
        super().__init__(proj_dim, num_rows, device)
        self._quantiles = empty_buffer(1 << 16, dtype=torch.float32, device=device)
        self._quantiles.copy_(normal_quantiles())

    def draw_(self, out: Tensor, key: int, start: int) -> Tensor:
        """Write rows of normal numbers; see :meth:`AbstractEntries.draw_`."""
        words = self._draw_words(out.shape[0], key, start)
        half = self._scratch[: out.shape[0]]
        torch.bitwise_and(words, 0xFFFF, out=half)
        torch.index_select(self._quantiles, 0, half.view(-1), out=out.view(-1))
        torch.bitwise_right_shift(words, 16, out=half)
        half.bitwise_and_(0xFFFF)
        # both halves are read, so the memory of the words can be overwritten
        second = words.view(torch.float32)
        torch.index_select(self._quantiles, 0, half.view(-1), out=second.view(-1))
        return out.add_(second).mul_(_quantile_scale())


@functools.cache
def normal_quantiles() -> Tensor:
    """Return ``round(2**16 * quantile((a + 1/2) / 2**16))`` for ``a = 0 .. 2**16 - 1`` as int32.

    No value is within 1e-6 of a rounding boundary, and the error in double precision is at most 1e-10, so every
    implementation of the normal quantile gives the same integers.
    """
    with torch.inference_mode(False):
        lower = (torch.arange(1 << 15, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
        half = (torch.special.ndtri(lower) * (1 << 16)).round().to(torch.int32)
        return torch.cat([half, -half.flip(0)])


@functools.cache
def _quantile_scale() -> float:
    """Return the float32 number that gives the sum of two table entries variance 1."""
    mean_square = int(normal_quantiles().to(torch.int64).square().sum()) / (1 << 16)
    return torch.tensor(1 / math.sqrt(2 * mean_square), dtype=torch.float32, device="cpu").item()
