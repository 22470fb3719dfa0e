"""Blocks of a matrix sketch, and operations on all blocks of a matrix at once.

On an accelerator every operation is a launch of some microseconds, so a loop over blocks, positions or rows costs more
than the arithmetic. The functions of :class:`AllBlocks` use a fixed number of operations for any number of blocks. The
order of their sums is not part of the definition: features of the same gradient agree up to rounding.

Shapes: b rows (samples), T positions, K columns, n blocks of at most K x K of a matrix ``(d_out, d_in)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import empty_buffer, scratch_bytes, sum_dtype
from trak_lite.types import FactoredBlock, LookupBlock

__all__ = ["AllBlocks", "Block", "fourier_takes_less_time", "moved"]


@dataclass(frozen=True, slots=True)
class Block:
    """Part of the matrix, R rows and w columns, with its own hash functions."""

    rows: slice
    columns: slice
    shifts: Tensor
    """``(R,)`` bucket of every row's first column."""
    row_signs: Tensor
    """``(R,)`` float32."""
    column_signs: Tensor
    """``(w,)`` float32."""
    starts: list[int]
    """``shifts`` as a list."""
    signs: list[float]
    """``row_signs`` as a list."""
    number: int
    """Unique number of the block among all parameters."""

    @property
    def width(self) -> int:
        """Number of columns w."""
        width: int = self.columns.stop - self.columns.start
        return width


def moved(blocks: Sequence[Block], device: torch.device) -> list[Block]:
    """Return blocks with their tensors on another device, moved in three copies."""
    shifts, row_signs, column_signs = (
        torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
        for parts in (
            [block.shifts for block in blocks],
            [block.row_signs for block in blocks],
            [block.column_signs for block in blocks],
        )
    )
    return [
        replace(block, shifts=shifts[i], row_signs=row_signs[i], column_signs=column_signs[i])
        for i, block in enumerate(blocks)
    ]


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
        # Taken before they are converted: a factor can be much larger than what these blocks take of it.
        entries = (
            factor.index_select(2, index.flatten()).view(*factor.shape[:2], *index.shape).transpose(1, 2)
        )
        signed = torch.empty(entries.shape, dtype=dtype, device=factor.device)
        return torch.mul(entries, signs.unsqueeze(1), out=signed)


@final
@dataclass(eq=False)
class AllBlocks:
    """Sketches of factors and of table rows, computed for all blocks of a matrix together."""

    _shape: tuple[int, int]
    """``(d_out, d_in)``."""
    _size: int
    """K."""
    _blocks: Sequence[Block]
    """Row by row, with their tensors on the device of the gradients."""

    @property
    def _across(self) -> int:
        return -(-self._shape[1] // self._size)

    def convolved(self, block: FactoredBlock) -> Tensor:
        """Return features ``(b, K)`` of factors by Fourier transforms."""
        size = self._size

        def spectrum(rows: slice, blocks: slice, dtype: torch.dtype) -> Tensor:
            g = torch.fft.rfft(self._outputs.taken(block.output_grads[rows], blocks, dtype))
            x = torch.fft.rfft(self._inputs.taken(block.inputs[rows], blocks, dtype))
            product: Tensor = g.mul_(x)
            return product.sum((1, 2))

        positions = block.inputs.shape[1]
        if positions == 0:  # some FFT backends fail for empty input
            return self._zeros(block)
        return self._summed(block, size * positions, spectrum, lambda total: torch.fft.irfft(total, n=size))

    def formed(self, block: FactoredBlock) -> Tensor:
        """Return features ``(b, K)`` of factors by forming every block with its rows in the order of their buckets.

        A row of a block has K + 1 columns, the last of them zero. In memory, entry (s, j) of bucket s is the entry
        ``s (K + 1) + j = s K + (s + j)``, so the same memory cut into rows of K has it in column ``(s + j) mod K``.
        """
        size = self._size

        def whole(rows: slice, blocks: slice, dtype: torch.dtype) -> Tensor:
            g = self._outputs.taken(block.output_grads[rows], blocks, dtype).flatten(0, 1)
            x = self._padded.taken(block.inputs[rows], blocks, dtype).flatten(0, 1)
            entries = empty_buffer(len(g), size, size + 1, dtype=dtype, device=g.device)
            torch.bmm(g.transpose(1, 2), x, out=entries)  # with out=, autocast does not change the dtype
            return entries.view(len(block.inputs[rows]), -1, size).sum(1)

        return self._summed(block, size * (size + 1 + 2 * block.inputs.shape[1]), whole, lambda total: total)

    def looked_up(self, block: LookupBlock) -> Tensor:
        """Return features ``(b, K)`` of gradients of table rows."""
        dtype, size = sum_dtype(block.values.dtype), self._size
        shifts, row_signs, column_signs = self._tables
        columns = torch.arange(size, device=block.values.device)
        step = max(
            1, self._budget(block.values, dtype) // max(1, block.rows.shape[1] * column_signs[0].numel())
        )
        features = []
        for rows, values in zip(torch.split(block.rows, step), torch.split(block.values, step), strict=True):
            wide = torch.nn.functional.pad(values.to(dtype), (0, self._across * size - self._shape[1]))
            wide = wide.view(*rows.shape, self._across, size) * column_signs[rows // size].to(dtype)
            wide *= row_signs[rows].to(dtype).unsqueeze(3)
            places = (columns - shifts[rows].unsqueeze(3)).remainder_(size)
            features.append(wide.gather(3, places).sum((1, 2)))
        return torch.cat(features) if len(features) > 1 else features[0]

    def _summed(
        self,
        block: FactoredBlock,
        entries: int,
        compute: Callable[[slice, slice, torch.dtype], Tensor],
        finish: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the features of some samples after each other, and of some blocks after each other.

        Args:
            block: The factors.
            entries: Memory for one sample and block, in numbers.
            compute: Computes the sum over some blocks of some samples.
            finish: Makes features of the sum over all blocks.
        """
        dtype = sum_dtype(block.inputs.dtype, block.output_grads.dtype)
        count, num_blocks = len(block.inputs), len(self._blocks)
        fitting = max(1, self._budget(block.inputs, dtype) // max(1, entries))
        samples = max(1, min(count, fitting))
        step = max(1, fitting // samples)
        features = []
        for first in range(0, count, samples):
            rows = slice(first, first + samples)
            parts = (compute(rows, part, dtype) for part in _pieces(num_blocks, step))
            features.append(finish(functools.reduce(torch.add, parts)))
        if not features:
            return self._zeros(block)
        return torch.cat(features) if len(features) > 1 else features[0]

    def _zeros(self, block: FactoredBlock) -> Tensor:
        dtype = sum_dtype(block.inputs.dtype, block.output_grads.dtype)
        return torch.zeros(len(block.inputs), self._size, dtype=dtype, device=block.inputs.device)

    def _budget(self, values: Tensor, dtype: torch.dtype) -> int:
        """Return how many numbers one intermediate result may have; a few exist at once."""
        return scratch_bytes(values.device) // (4 * dtype.itemsize)

    @functools.cached_property
    def _outputs(self) -> _Side:
        """Row of the matrix in every bucket of every block."""
        shape = len(self._blocks), self._size
        index, signs = torch.zeros(shape, dtype=torch.int64, device="cpu"), torch.zeros(shape, device="cpu")
        for number, block in enumerate(self._blocks):
            places = torch.tensor(block.starts, device="cpu")
            index[number, places] = torch.arange(block.rows.start, block.rows.stop, device="cpu")
            signs[number, places] = torch.tensor(block.signs, device="cpu")
        return self._side(index, signs)

    @functools.cached_property
    def _inputs(self) -> _Side:
        """Columns of every block."""
        return self._column_side(self._size)

    @functools.cached_property
    def _padded(self) -> _Side:
        """Columns of every block, and one that is zero."""
        return self._column_side(self._size + 1)

    def _column_side(self, length: int) -> _Side:
        first = torch.tensor([block.columns.start for block in self._blocks], device="cpu")
        index = (first[:, None] + torch.arange(length, device="cpu")).clamp_(max=self._shape[1] - 1)
        signs = [torch.nn.functional.pad(b.column_signs, (0, length - b.width)) for b in self._blocks]
        return self._side(index, torch.stack(signs))

    def _side(self, index: Tensor, signs: Tensor) -> _Side:
        device = self._blocks[0].shifts.device
        return _Side(index.to(device), signs.to(device))

    @functools.cached_property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Shifts and row signs ``(d_out, across)``, and column signs ``(down, across, K)`` with zeros at the end."""
        by_column = [self._blocks[first :: self._across] for first in range(self._across)]
        shifts = torch.stack([torch.cat([part.shifts for part in parts]) for parts in by_column], 1)
        signs = torch.stack([torch.cat([part.row_signs for part in parts]) for parts in by_column], 1)
        return shifts, signs, self._inputs.signs.view(-1, self._across, self._size)


def _pieces(count: int, step: int) -> Iterator[slice]:
    return (slice(first, first + step) for first in range(0, count, step))


# Estimates for a GPU of the H100's class, from flops and bytes; nothing was measured. Only their ratios matter.
_BYTES = 2400.0  # bytes that are read or written per nanosecond
_FLOPS = 50_000.0  # float32 operations of a matrix product per nanosecond
_FLOPS_OF_HALVES = 400_000.0  # operations of a product of factors of 16 bits
_LAUNCH = 5000.0  # nanoseconds of a launch
_FOURIER_LAUNCHES, _KERNEL_LAUNCHES, _FORM_LAUNCHES = 9, 3, 6
"""Launches of :meth:`AllBlocks.convolved`, of the Triton kernel and of :meth:`AllBlocks.formed`, for all samples."""


def fourier_takes_less_time(
    shape: tuple[int, int],
    positions: int,
    *,
    proj_dim: int,
    samples: int,
    triton: bool = True,
    halves: bool = False,
) -> bool:
    """Return whether Fourier transforms are faster than forming the gradients on an accelerator.

    Args:
        shape: ``(d_out, d_in)``.
        positions: T.
        proj_dim: K.
        samples: b. The fewer there are, the more a launch counts.
        triton: Formed gradients are summed by the Triton kernel: else by :meth:`AllBlocks.formed`.
        halves: Gradients are formed by products of factors of 16 bits.

    Example:
        >>> [fourier_takes_less_time((3072, 768), 64, proj_dim=2048, samples=samples) for samples in (2, 32)]
        [False, True]
    """
    d_out, d_in = shape
    blocks = -(-d_out // proj_dim) * -(-d_in // proj_dim)
    entries = d_out * d_in if triton else blocks * proj_dim * (proj_dim + 1)
    taken = blocks * positions * proj_dim  # entries of one factor, for all blocks
    form = entries * (8 / _BYTES + 2 * positions / (_FLOPS_OF_HALVES if halves and triton else _FLOPS))
    if not triton:
        form += 40 * taken / _BYTES
    more_launches = _FOURIER_LAUNCHES - (_KERNEL_LAUNCHES if triton else _FORM_LAUNCHES)
    return samples * 64 * taken / _BYTES + more_launches * _LAUNCH < samples * form
