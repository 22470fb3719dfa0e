"""Entries of dense random matrices, computed from the hash with torch integer operations.

Entry (i, j) of the matrix of a parameter depends only on (seed, model_id, parameter name, i, j), so a matrix
with more rows or columns begins with the same numbers. Every entry is exact or rounded once, so CPU and CUDA
give the same bits.

Shapes: n rows of a block (gradient entries), K columns (``proj_dim``).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import empty_buffer
from trak_lite.projectors.random.hash import Stream, hash_words_, mix32_, wrap32

__all__ = ["AbstractEntries", "GaussianEntries", "RademacherEntries", "normal_quantiles"]

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
        """Write rows ``start, start + 1, ...`` of the matrix of ``key``.

        Args:
            out: Contiguous float32 ``(n, width)``, n at most the ``num_rows`` of the constructor.
            key: Key of the parameter, from :func:`~trak_lite.projectors.random.hash.parameter_key`.
            start: Index of the first row.

        Returns:
            ``out``.
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
        second = words.view(
            torch.float32
        )  # both halves are read, so the memory of the words can be overwritten
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
