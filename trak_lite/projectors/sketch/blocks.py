"""Hash functions of the blocks of a matrix sketch, and operations on all blocks of a matrix at once.

A loop over blocks, positions or rows takes longer than the arithmetic: on an accelerator, where every operation is a
launch of some microseconds, and on a CPU for small K. The methods of :class:`BlockHashes` use a fixed number of
operations for any number of blocks. The order of their sums is not part of the definition: features of the same
gradient agree up to rounding.

Shapes: b rows (samples), T positions, K columns, n blocks of at most K x K of a matrix ``(d_out, d_in)``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import in_pieces, scratch_bytes, sum_dtype
from trak_lite.types import FactoredBlock, LookupBlock


@dataclass(frozen=True, slots=True)
class _Side:
    """Entries of one factor that every block takes, in the order of its buckets or columns."""

    index: Tensor
    """``(n, L)`` int64 rows or columns of the matrix; 0 where there is none."""
    signs: Tensor
    """``(n, L)`` float32; 0 where there is none."""

    def taken(self, factor: Tensor, blocks: slice, dtype: torch.dtype) -> Tensor:
        """Return signed entries ``(b, m, T, L)`` of a factor ``(b, T, d)`` for m blocks."""
        index, signs = self.index[blocks], self.signs[blocks].to(dtype)
        # Taken before they are converted: a factor can be much larger than what these blocks take of it. On a CPU
        # gather takes a fifth of the time of index_select.
        chosen = factor.gather(2, index.flatten().expand(*factor.shape[:2], -1))
        entries = chosen.view(*factor.shape[:2], *index.shape).transpose(1, 2)
        signed = torch.empty(entries.shape, dtype=dtype, device=factor.device)
        return torch.mul(entries, signs.unsqueeze(1), out=signed)


@final
@dataclass(frozen=True)
class BlockHashes:
    """Hash functions of all blocks of a matrix; ``down x across`` blocks of K x K, the last ones may be smaller."""

    shape: tuple[int, int]
    """``(d_out, d_in)``."""
    size: int
    """K."""
    shifts: Tensor
    """``(down, across, K)`` int64, a permutation of the buckets for every block: of the first column of its rows."""
    row_signs: Tensor
    """``(down, across, K)`` float32; without meaning beyond the matrix, as the shifts."""
    column_signs: Tensor
    """``(down, across, K)`` float32; 0 beyond the matrix."""

    def to(self, device: torch.device) -> BlockHashes:
        """Return the hash functions on a device."""
        tables = (table.to(device) for table in (self.shifts, self.row_signs, self.column_signs))
        return BlockHashes(self.shape, self.size, *tables)

    @functools.cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """The shift and the sign of every row of the matrix in every block of columns, ``(d_out, across)``."""
        tables = (table.transpose(1, 2).flatten(0, 1) for table in (self.shifts, self.row_signs))
        shifts, signs = (table[: self.shape[0]] for table in tables)
        return shifts, signs

    def convolved(self, block: FactoredBlock) -> Tensor:
        """Return features ``(b, K)`` of gradients in factors by Fourier transforms."""
        count, positions, _ = block.inputs.shape
        dtype, device = sum_dtype(block.inputs.dtype, block.output_grads.dtype), block.inputs.device
        if positions == 0 or count == 0:  # some FFT backends fail for empty input
            return torch.zeros(count, self.size, dtype=dtype, device=device)

        def features(inputs: Tensor, output_grads: Tensor) -> Tensor:
            total = functools.reduce(torch.add, self._spectra(inputs, output_grads, dtype))
            made: Tensor = torch.fft.irfft(total, n=self.size)
            return made

        entry_bytes = dtype.itemsize * self.size * positions  # of one factor of a sample, for one block
        return in_pieces(
            features, block.inputs, block.output_grads, scratch_bytes(device) // 4 // entry_bytes
        )

    def _spectra(self, inputs: Tensor, output_grads: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield sums over some blocks of the Fourier transforms ``(b, K // 2 + 1)`` of factors' features."""
        entries = inputs.shape[0] * inputs.shape[1] * self.size  # of one factor, for one block
        step = max(1, _budget(inputs, dtype) // max(1, entries))
        for first in range(0, len(self._outputs.index), step):
            blocks = slice(first, first + step)
            g = torch.fft.rfft(self._outputs.taken(output_grads, blocks, dtype))
            x = torch.fft.rfft(self._inputs.taken(inputs, blocks, dtype))
            yield g.mul_(x).sum((1, 2))

    def looked_up(self, block: LookupBlock) -> Tensor:
        """Return features ``(b, K)`` of gradients of table rows."""
        dtype, size = sum_dtype(block.values.dtype), self.size
        shifts, row_signs = self.by_row
        across = self.column_signs.shape[1]
        columns = torch.arange(size, device=block.values.device)

        def features(rows: Tensor, values: Tensor) -> Tensor:
            wide = torch.nn.functional.pad(values.to(dtype), (0, across * size - self.shape[1]))
            wide = wide.view(*rows.shape, across, size) * self.column_signs[rows // size].to(dtype)
            wide *= row_signs[rows].to(dtype).unsqueeze(3)
            index = (columns - shifts[rows].unsqueeze(3)).remainder_(size)
            return wide.gather(3, index).sum((1, 2))

        numbers = max(1, block.rows.shape[1] * across * size)  # of a sample
        return in_pieces(features, block.rows, block.values, _budget(block.values, dtype) // numbers)

    @functools.cached_property
    def _outputs(self) -> _Side:
        """Row of the matrix in every bucket of every block."""
        within = torch.argsort(self.shifts)  # the inverse permutations
        first = torch.arange(len(within), device=within.device) * self.size
        rows = within + first[:, None, None]
        signs = self.row_signs.gather(2, within) * (rows < self.shape[0])
        return _Side(rows.clamp_(max=self.shape[0] - 1).flatten(0, 1), signs.flatten(0, 1))

    @functools.cached_property
    def _inputs(self) -> _Side:
        """Columns of every block."""
        signs = self.column_signs.flatten(0, 1)
        columns = torch.arange(self.shifts[0].numel(), device=signs.device)
        index = columns.clamp_(max=self.shape[1] - 1).view(-1, self.size)
        return _Side(index.repeat(len(self.shifts), 1), signs)


def _budget(values: Tensor, dtype: torch.dtype) -> int:
    """Return how many numbers one intermediate result may have; a few exist at once."""
    return scratch_bytes(values.device) // (4 * dtype.itemsize)


# Estimates for a GPU of the H100's class, from flops and bytes; only their ratios matter.
_BYTES = 2400.0  # bytes that are read or written per nanosecond
_FLOPS = 50_000.0  # float32 operations of a matrix product per nanosecond
_FLOPS_OF_HALVES = 400_000.0  # operations of a product of factors of 16 bits
_MORE_LAUNCHES = 6 * 5000.0  # nanoseconds: 9 launches for Fourier transforms, 3 for the Triton kernel


def fourier_takes_less_time(
    shape: tuple[int, int], positions: int, *, proj_dim: int, samples: int, halves: bool = False
) -> bool:
    """Return whether Fourier transforms are faster than the Triton kernel, which needs formed gradients.

    The matrix has the shape ``(d_out, d_in)``. The fewer samples there are, the more a launch counts. With ``halves``
    gradients are formed by products of factors of 16 bits.

    Example:
        >>> [fourier_takes_less_time((3072, 768), 64, proj_dim=2048, samples=samples) for samples in (2, 32)]
        [False, True]
    """
    d_out, d_in = shape
    form = d_out * d_in * (8 / _BYTES + 2 * positions / (_FLOPS_OF_HALVES if halves else _FLOPS))
    blocks = -(-d_out // proj_dim) * -(-d_in // proj_dim)
    transform = blocks * positions * proj_dim * 64 / _BYTES
    return samples * transform + _MORE_LAUNCHES < samples * form
