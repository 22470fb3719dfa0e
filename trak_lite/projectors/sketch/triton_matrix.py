"""Sketches of matrices on CUDA: sums of the shifted and signed rows of blocks; see ``triton.py``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from trak_lite.projectors._kernels import as_operation
from trak_lite.projectors._scratch import Scratch, form, in_pieces, scratch_bytes, sum_dtype
from trak_lite.projectors.random.triton_hash import jit, kernel
from trak_lite.projectors.sketch.blocks import BlockHashes

_MATRIX_COLUMNS = 64
_MATRIX_WARPS = 1  # few sums per program: one sum cannot be split, because its order is fixed
_MATRIX_STEPS = ((2, 16), (1, 32))
"""Samples of a program, and rows of the matrix that are read before they are added; the second for few programs."""
_FEW_PROGRAMS = 512
_MOST_BLOCKS = 65535
"""Largest second and third axis of a grid."""
_REGISTERS = {} if torch.version.hip else {"maxnreg": 224}
"""Registers per thread: without this option, NVIDIA's assembler uses fewer registers and delays the reads. AMD's
compiler does not have the option."""


@jit()
def _add_rows(
    total: tl.tensor,
    grads_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    signs_ptr: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    entry_stride: tl.tensor,
    unroll: tl.constexpr,
) -> tl.tensor:
    """Add the next ``unroll`` rows of a list in order, or ``count`` rows if that is less, and return ``total``.

    All rows are read before the first is added, so that many reads run at once; the compiler keeps this order. A list
    holds the number of a row in the high half, and in the low half twice its shift, plus 1 for the sign -1.
    ``grads_ptr`` is ``(block_rows, 1)``, the first entry of the block's columns in row 0 of the matrix; ``columns`` are
    those of the extended sums, ``width`` is that of the block, and ``inside`` masks the lanes that may read.
    """
    listed: tl.tuple = ()
    for ahead in tl.static_range(unroll):
        listed = listed + (tl.load(lists_ptr + ahead, mask=ahead < count, other=0),)  # noqa: RUF005 - no * in Triton
    terms: tl.tuple = ()
    for ahead in tl.static_range(unroll):
        code = listed[ahead].to(tl.uint32)
        positions = columns - (code >> 1).to(tl.int32)
        within = (positions >= 0) & (positions < width)
        signs = tl.load(signs_ptr + positions, mask=within, other=0.0)
        entries = (listed[ahead] >> 32) * row_stride + positions.to(tl.int64) * entry_stride
        read = inside & (ahead < count) & within[None, :]
        grads = tl.load(grads_ptr + entries[None, :], mask=read, other=0.0)
        terms = terms + ((grads, signs * (1.0 - 2.0 * (code & 1).to(tl.float32))),)  # noqa: RUF005
    for ahead in tl.static_range(unroll):
        grads, signs = terms[ahead]
        total += grads.to(total.dtype) * signs.to(total.dtype)[None, :]
    return total


@kernel
def _matrix_sums(
    grads_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    facts_ptr: tl.tensor,
    signs_ptr: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    sample_stride: tl.tensor,
    row_stride: tl.tensor,
    entry_stride: tl.tensor,
    origin: tl.tensor,
    first_part: tl.tensor,
    stop_part: tl.tensor,
    unroll: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    apart: tl.constexpr,
) -> None:
    """Add rows of blocks of the matrix to the extended sums, in the order of their lists.

    The grid is (blocks of columns, blocks of samples). ``sums`` is ``(2, b, K)``: the extended columns below K, and
    those from K on. A program computes the same columns of both halves, so all programs take equally long.

    With ``apart`` the grid has a third axis, the blocks, and ``sums`` is ``(blocks, 2, b, K)``, overwritten.
    """
    if apart:
        first_part += tl.program_id(2)
        stop_part = first_part + 1
        sums_ptr += tl.program_id(2).to(tl.int64) * 2 * num_rows * size
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    samples = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    inside = (samples < num_rows)[:, None] & (columns < size)[None, :]
    sample_ptrs = grads_ptr + (samples.to(tl.int64) * sample_stride - origin)[:, None]
    for half in tl.range(0, 2):
        sum_ptrs = sums_ptr + (half * num_rows + samples).to(tl.int64)[:, None] * size + columns[None, :]
        if apart:
            total = tl.full((block_rows, block_columns), 0.0, sums_ptr.dtype.element_ty)
        else:
            total = tl.load(sum_ptrs, mask=inside, other=0.0)
        part = first_part
        while part < stop_part:
            facts = facts_ptr + part * 4
            bounds = bounds_ptr + tl.load(facts) + half * tl.num_programs(0) + tl.program_id(0)
            index = tl.load(bounds)
            stop = tl.load(bounds + 1)
            part_ptrs = sample_ptrs + tl.load(facts + 1) * entry_stride
            width = tl.load(facts + 2).to(tl.int32)
            part_signs = signs_ptr + tl.load(facts + 3)
            extended = columns + half * size
            while index < stop:
                rows = lists_ptr + index
                total = _add_rows(
                    total,
                    part_ptrs,
                    rows,
                    stop - index,
                    extended,
                    inside,
                    part_signs,
                    width,
                    row_stride,
                    entry_stride,
                    unroll,
                )
                index += unroll
            part += 1
        tl.store(sum_ptrs, total, mask=inside)


@final
class MatrixKernel:
    """Triton implementation of a :class:`~trak_lite.projectors.sketch.matrix.MatrixSketch`."""

    def __init__(self, hashes: BlockHashes, column_signs: Tensor) -> None:
        """Create lists of the rows that have entries in each block of columns of the sums.

        The hash functions are on the CPU, as reading them from a device would wait for it, and the column signs on the
        device of the gradients.
        """
        device = column_signs.device
        self._num_columns = hashes.shape[1]
        self._size = hashes.size
        lists, bounds, facts = _row_lists(hashes)
        self._num_blocks = len(facts)
        self._lists, self._bounds, self._facts = lists.to(device), bounds.to(device), facts.to(device)
        self._signs = column_signs.flatten()

    @torch.no_grad()
    def dense(self, rows: Tensor) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, d_out * d_in)``."""
        dtype = sum_dtype(rows.dtype)
        sums = torch.zeros(2, len(rows), self._size, dtype=dtype, device=rows.device)
        sample_stride, entry_stride = rows.stride()
        strides = (sample_stride, self._num_columns * entry_stride, entry_stride)
        self._add_(sums, rows, strides, (0, self._num_blocks))
        return sums[0] + sums[1]

    @torch.no_grad()
    def formed(self, inputs: Tensor, output_grads: Tensor, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of factored gradients: whole rows of blocks are formed by one product.

        The blocks are summed by programs of their own and then added, so that few samples keep the device busy. The
        features equal those of the dense gradient up to rounding. Inputs are ``(b, T, d_in)``, output gradients
        ``(b, T, d_out)``.
        """
        dtype = sum_dtype(inputs.dtype, output_grads.dtype)
        across = -(-self._num_columns // self._size)
        band = min(self._size, output_grads.shape[2]) * self._num_columns
        budget = scratch_bytes(inputs.device) // dtype.itemsize

        def features(x: Tensor, g: Tensor) -> Tensor:
            step = max(1, budget // (max(1, len(x)) * band))  # rows of blocks that are formed at once
            columns = g.transpose(1, 2)
            parts = []
            for first in range(0, columns.shape[1], step * self._size):
                piece = form(columns[:, first : first + step * self._size], x, scratch)
                start = first // self._size * across
                stop = min(start + step * across, self._num_blocks)
                for block in range(start, stop, _MOST_BLOCKS):
                    count = min(_MOST_BLOCKS, stop - block)
                    sums = torch.empty(count, 2, len(x), self._size, dtype=dtype, device=x.device)
                    origin = first * piece.stride(1)
                    self._add_(sums, piece, piece.stride(), (block, block + count), origin)
                    parts.append(sums.sum((0, 1)))
            return functools.reduce(torch.add, parts)

        return in_pieces(features, inputs, output_grads, budget // band)

    def _add_(
        self, sums: Tensor, grads: Tensor, strides: Sequence[int], parts: tuple[int, int], origin: int = 0
    ) -> None:
        """Add the blocks from the first of ``parts`` to before the second in one launch.

        ``sums`` is ``(2, b, K)``, the extended sums, or ``(blocks, 2, b, K)``, those of each block, overwritten.
        The gradients begin at entry ``origin`` of the matrix, with strides of samples, matrix rows and matrix columns.
        """
        read = [grads, self._lists, self._bounds, self._facts, self._signs]
        numbers = (sums.shape[-2], self._size, *strides, origin, *parts)
        _launch_matrix_sums(sums, read, numbers)


@as_operation
def _launch_matrix_sums(sums: Tensor, read: Sequence[Tensor], numbers: Sequence[int]) -> None:
    apart = sums.dim() == 4
    programs = len(sums) if apart else 1
    num_rows, size = sums.shape[-2:]
    column_blocks = triton.cdiv(size, _MATRIX_COLUMNS)
    many, few = _MATRIX_STEPS
    is_many = column_blocks * triton.cdiv(num_rows, many[0]) * programs >= _FEW_PROGRAMS
    block_rows, unroll = many if is_many else few
    if triton.cdiv(num_rows, block_rows) > _MOST_BLOCKS:
        block_rows, unroll = 32, 1
    grid = (column_blocks, triton.cdiv(num_rows, block_rows), programs)
    grads, *tables = read
    _matrix_sums[grid](
        grads,
        sums,
        *tables,
        *numbers,
        unroll=unroll,
        block_rows=block_rows,
        block_columns=_MATRIX_COLUMNS,
        apart=apart,
        num_warps=_MATRIX_WARPS,
        **_REGISTERS,
    )


def _row_lists(hashes: BlockHashes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of matrix blocks with entries in each block of columns of the extended sums, in order.

    Returns:
        The concatenated lists of all blocks, encoded for :func:`_add_rows`; the start of each list, and the end of the
        last; and for every block its first list, first column, width and first sign.
    """
    (d_out, d_in), size = hashes.shape, hashes.size
    down, across, _ = hashes.shifts.shape
    blocks = torch.arange(down * across, device="cpu")
    first_rows, first_columns = blocks // across * size, blocks % across * size
    widths = (d_in - first_columns).clamp_(max=size)
    shifts, signs = (table.flatten(0, 1)[:, :d_out] for table in (hashes.shifts, hashes.row_signs))

    starts = torch.arange(0, size, _MATRIX_COLUMNS, device="cpu")
    stops = (starts + _MATRIX_COLUMNS).clamp(max=size)
    starts, stops = (torch.cat([side, side + size])[:, None] for side in (starts, stops))
    ends = shifts + widths[:, None]
    has_entries = (shifts[:, None] < stops) & (ends[:, None] > starts)
    has_entries &= (first_rows[:, None] + torch.arange(shifts.shape[1], device="cpu") < d_out)[:, None]
    block, _, row = has_entries.nonzero(as_tuple=True)
    lists = (first_rows[block] + row << 32) + 2 * shifts[block, row] + (signs[block, row] < 0).long()
    counts = has_entries.sum(2).flatten()
    facts = (blocks * len(starts), first_columns, widths, blocks * size)
    return lists, torch.cat([counts.new_zeros(1), counts.cumsum(0)]), torch.stack(facts, 1)
