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

from trak_lite.projectors._scratch import in_pieces, scratch_bytes, sum_dtype
from trak_lite.types import FactoredBlock, LookupBlock

__all__ = ["AllBlocks", "Block", "convolved", "fourier_takes_less_time", "moved"]


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

    def spectra(self, inputs: Tensor, output_grads: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield sums over some blocks of the Fourier transforms ``(b, K // 2 + 1)`` of factors' features."""
        entries = inputs.shape[0] * inputs.shape[1] * self._size  # of one factor, for one block
        step = max(1, self._budget(inputs, dtype) // max(1, entries))
        for first in range(0, len(self._blocks), step):
            blocks = slice(first, first + step)
            g = torch.fft.rfft(self._outputs.taken(output_grads, blocks, dtype))
            x = torch.fft.rfft(self._inputs.taken(inputs, blocks, dtype))
            yield g.mul_(x).sum((1, 2))

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
        first = torch.tensor([block.columns.start for block in self._blocks], device="cpu")
        index = (first[:, None] + torch.arange(self._size, device="cpu")).clamp_(max=self._shape[1] - 1)
        signs = [torch.nn.functional.pad(b.column_signs, (0, self._size - b.width)) for b in self._blocks]
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


def convolved(
    block: FactoredBlock,
    size: int,
    spectra: Callable[[Tensor, Tensor, torch.dtype], Iterator[Tensor]],
    budget: int,
) -> Tensor:
    """Return features ``(b, K)`` of factors by Fourier transforms.

    Args:
        block: The factors.
        size: K.
        spectra: Yields parts of the sum of features' Fourier transforms, for inputs, output gradients, a dtype.
        budget: Bytes of one factor's entries for all positions of some samples, of one block.
    """
    count, positions, _ = block.inputs.shape
    dtype = sum_dtype(block.inputs.dtype, block.output_grads.dtype)
    if positions == 0 or count == 0:  # some FFT backends fail for empty input
        return torch.zeros(count, size, dtype=dtype, device=block.inputs.device)

    def features(inputs: Tensor, output_grads: Tensor) -> Tensor:
        total = functools.reduce(torch.add, spectra(inputs, output_grads, dtype))
        made: Tensor = torch.fft.irfft(total, n=size)
        return made

    return in_pieces(
        features, block.inputs, block.output_grads, budget // (dtype.itemsize * size * positions)
    )


# Estimates for a GPU of the H100's class, from flops and bytes; only their ratios matter.
_BYTES = 2400.0  # bytes that are read or written per nanosecond
_FLOPS = 50_000.0  # float32 operations of a matrix product per nanosecond
_FLOPS_OF_HALVES = 400_000.0  # operations of a product of factors of 16 bits
_MORE_LAUNCHES = 6 * 5000.0  # nanoseconds: 9 launches for Fourier transforms, 3 for the Triton kernel


def fourier_takes_less_time(
    shape: tuple[int, int], positions: int, *, proj_dim: int, samples: int, halves: bool = False
) -> bool:
    """Return whether Fourier transforms are faster than the Triton kernel, which needs formed gradients.

    Args:
        shape: ``(d_out, d_in)``.
        positions: T.
        proj_dim: K.
        samples: b. The fewer there are, the more a launch counts.
        halves: Gradients are formed by products of factors of 16 bits.

    Example:
        >>> [fourier_takes_less_time((3072, 768), 64, proj_dim=2048, samples=samples) for samples in (2, 32)]
        [False, True]
    """
    d_out, d_in = shape
    form = d_out * d_in * (8 / _BYTES + 2 * positions / (_FLOPS_OF_HALVES if halves else _FLOPS))
    blocks = -(-d_out // proj_dim) * -(-d_in // proj_dim)
    transform = blocks * positions * proj_dim * 64 / _BYTES
    return samples * transform + _MORE_LAUNCHES < samples * form
