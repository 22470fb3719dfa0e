"""Sketches of single parameters on CUDA, bitwise equal to the torch operations; gradients are read once.

A term is a gradient entry times +1 or -1, which is exact, so the bits depend only on the order of additions. Every sum
here adds the same terms in the same order as the torch operations of ``vector.py`` and ``matrix.py``, in one program,
without atomic additions. A lane without a term adds zero. Gradients in factors are the exception: they are formed by
products and their blocks are added in another order, so their features are equal up to rounding.

Import this module only for gradients on CUDA, because triton is an optional package.

Shapes: b gradient rows (samples), n entries of a parameter, K columns (``proj_dim``).
Numerics: float64 gradients are summed in float64, all others in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from trak_lite.projectors._kernels import as_operation
from trak_lite.projectors._scratch import Scratch, form, in_pieces, scratch_bytes, sum_dtype
from trak_lite.projectors.random.hash import hash_signs, key32, wrap32
from trak_lite.projectors.random.triton_hash import hash_word, jit, sign_floats
from trak_lite.projectors.sketch.blocks import BlockHashes

_TILE_ROWS = 32
_TILE_COLUMNS = 128
_TILE_WARPS = 4  # with twice the rows and as many warps, registers are spilled
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
_WORD_ENTRIES = 37  # log2 of the number of entries with one high half of the index of their sign words


def _kernel(function: Callable[..., None]) -> Any:
    """Compile one variant for all numbers; only the stride of entries selects another one, for entries in a row."""
    names = [name for name, kind in function.__annotations__.items() if kind == "tl.tensor"]
    numbers = [name for name in names if not name.endswith("_ptr") and name != "entry_stride"]
    return jit(do_not_specialize=numbers)(function)


# ---- vectors


@jit()
def _entry_signs(
    entries: tl.tensor, key: tl.tensor, high_key: tl.tensor, next_high_key: tl.tensor, crossing: tl.tensor
) -> tl.tensor:
    """Return the signs of entries (int64), as ``hash_signs``; entries from ``crossing`` on have the next high key."""
    high_keys = tl.where(entries < crossing, high_key, next_high_key)
    words = hash_word((entries >> 5).to(tl.uint32), key, high_keys)
    return sign_floats(words, (31 - (entries & 31)).to(tl.uint32))


@_kernel
def _ring_sums(
    rows_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_entries: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    entry_stride: tl.tensor,
    first_tile: tl.tensor,
    num_tiles: tl.tensor,
    segment_tiles: tl.tensor,
    key: tl.tensor,
    high_key: tl.tensor,
    next_high_key: tl.tensor,
    crossing: tl.tensor,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Write ``sums[segment]``: the sum of the segment's tiles in order, each rotated by its offset and signed.

    The grid is (blocks of the ring's columns, segments, blocks of rows). ``offsets`` and ``num_tiles`` belong to the
    launch; its first tile is tile ``first_tile`` of the vector.
    """
    segment = tl.program_id(1)
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    rows = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    row_ptrs = rows_ptr + rows.to(tl.int64)[:, None] * row_stride
    total = tl.full((block_rows, block_columns), 0.0, sums_ptr.dtype.element_ty)
    tile = segment * segment_tiles
    stop = tl.minimum(tile + segment_tiles, num_tiles)
    while tile < stop:
        positions = columns - tl.load(offsets_ptr + tile)
        positions = tl.where(positions < 0, positions + width, positions)
        # Without this hint, Triton makes rows the fastest axis: reads are scattered, and every sign is hashed for every
        # row. The hint is wrong where the ring wraps, but harmless: the alignment is unknown, so no read is widened.
        entries = tl.max_contiguous((first_tile.to(tl.int64) + tile) * width + positions, block_columns)
        signs = _entry_signs(entries, key, high_key, next_high_key, crossing)
        read = (rows < num_rows)[:, None] & ((columns < width) & (entries < num_entries))[None, :]
        grads = tl.load(row_ptrs + entries[None, :] * entry_stride, mask=read, other=0.0)
        total += grads.to(total.dtype) * signs.to(total.dtype)[None, :]
        tile += 1
    sum_rows = (segment.to(tl.int64) * num_rows + rows)[:, None] * width
    tl.store(
        sums_ptr + sum_rows + columns[None, :],
        total,
        mask=(rows < num_rows)[:, None] & (columns < width)[None, :],
    )


@_kernel
def _tile_sums(
    rows_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    fold_offsets_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_entries: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    entry_stride: tl.tensor,
    offset: tl.tensor,
    blocks: tl.tensor,
    key: tl.tensor,
    high_key: tl.tensor,
    fold_key: tl.tensor,
    fold_high_key: tl.tensor,
    crossing: tl.tensor,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Write the features of vectors of one tile: the ring's blocks in order, each rotated and signed, without a ring.

    The grid is (blocks of the features' columns, blocks of rows).
    """
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    row_ptrs = rows_ptr + rows.to(tl.int64)[:, None] * row_stride
    total = tl.full((block_rows, block_columns), 0.0, sums_ptr.dtype.element_ty)
    block = 0
    while block < blocks:
        within = columns - tl.load(fold_offsets_ptr + block)
        within = tl.where(within < 0, within + size, within)
        positions = block * size + within
        entries = positions - offset
        entries = tl.where(entries < 0, entries + width, entries)
        entries = tl.max_contiguous(entries, block_columns).to(tl.int64)  # see _ring_sums
        signs = _entry_signs(entries, key, high_key, high_key, crossing)
        signs *= _entry_signs(positions.to(tl.int64), fold_key, fold_high_key, fold_high_key, crossing)
        read = (rows < num_rows)[:, None] & ((columns < size) & (entries < num_entries))[None, :]
        grads = tl.load(row_ptrs + entries[None, :] * entry_stride, mask=read, other=0.0)
        total += grads.to(total.dtype) * signs.to(total.dtype)[None, :]
        block += 1
    tl.store(
        sums_ptr + rows.to(tl.int64)[:, None] * size + columns[None, :],
        total,
        mask=(rows < num_rows)[:, None] & (columns < size)[None, :],
    )


@final
@dataclass(eq=False)
class VectorKernel:
    """Triton implementation of a :class:`~trak_lite.projectors.sketch.vector.VectorSketch`."""

    width: int
    """W, length of the ring and of a tile."""
    segment: int
    """Number of tiles per segment."""
    offsets: Sequence[int]
    """Offset of every tile."""
    sign_key: int
    """Key of the signs of the entries."""
    fold_offsets: Sequence[int]
    """Offset of every block of K numbers of the ring."""
    fold_key: int
    """Key of the signs of the ring."""
    device: torch.device

    def __post_init__(self) -> None:
        """Copy the offsets to the device."""
        self._offsets, self._fold_offsets = (
            torch.tensor(offsets, dtype=torch.int32, device=self.device)
            for offsets in (self.offsets, self.fold_offsets)
        )

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, n)`` with any strides."""
        blocks = len(self._fold_offsets)
        if len(self.offsets) == 1 and blocks > 1:
            return self._one_tile(rows, self.offsets[0])
        ring = self._ring(rows)
        if blocks == 1:
            return ring
        folded = ring.new_empty(1, len(ring), self.width // blocks)
        ring_sums(folded, ring, self._fold_offsets, self.fold_key, segment=blocks)
        return folded[0]

    def _one_tile(self, rows: Tensor, offset: int) -> Tensor:
        """Return the features of vectors that are one tile, in one launch; the bits are those of two."""
        blocks = len(self._fold_offsets)
        size = self.width // blocks
        sums = torch.empty(len(rows), size, dtype=sum_dtype(rows.dtype), device=rows.device)
        numbers = (
            *(*rows.shape, self.width, size, *rows.stride(), offset, blocks),
            *(wrap32(self.sign_key), wrap32(key32(self.sign_key, 0))),
            *(wrap32(self.fold_key), wrap32(key32(self.fold_key, 0))),
            1 << _WORD_ENTRIES,
        )
        _launch_tile_sums(sums, [rows, self._fold_offsets], numbers)
        return sums

    def _ring(self, rows: Tensor) -> Tensor:
        """Return the ring ``(b, W)``: the sum of all segments in order."""
        shape, dtype = (len(rows), self.width), sum_dtype(rows.dtype)
        row_bytes = max(1, len(rows)) * self.width * dtype.itemsize
        step = self.segment * max(1, scratch_bytes(rows.device) // row_bytes)
        ring: Tensor | None = None
        for first in range(0, len(self._offsets), step):
            offsets = self._offsets[first : first + step]
            segments = -(-len(offsets) // self.segment)
            sums = torch.empty(segments, *shape, dtype=dtype, device=rows.device)
            ring_sums(sums, rows, offsets, self.sign_key, first=first, segment=self.segment)
            for segment in sums:
                ring = segment if ring is None else ring + segment
        return torch.zeros(shape, dtype=dtype, device=rows.device) if ring is None else ring


def ring_sums(sums: Tensor, rows: Tensor, offsets: Tensor, key: int, *, segment: int, first: int = 0) -> None:
    """Write sums of rotated and signed tiles in one launch, which must have fewer than ``2**37`` entries.

    ``sums`` is ``(segments, b, W)``, contiguous, and overwritten. ``segment`` tiles of the rows ``(b, n)``, which have
    any strides, are a segment. The int32 ``offsets`` are those of the tiles of W entries from tile ``first`` on.
    """
    num_rows, width = sums.shape[1:]
    high = first * width >> _WORD_ENTRIES
    numbers = (
        *(num_rows, rows.shape[1], width, *rows.stride(), first, len(offsets), segment),
        *(wrap32(key), wrap32(key32(key, high)), wrap32(key32(key, high + 1)), high + 1 << _WORD_ENTRIES),
    )
    _launch_ring_sums(sums, [rows, offsets], numbers)


@as_operation
def _launch_ring_sums(sums: Tensor, read: Sequence[Tensor], numbers: Sequence[int]) -> None:
    segments, num_rows, width = sums.shape
    grid = (triton.cdiv(width, _TILE_COLUMNS), segments, triton.cdiv(num_rows, _TILE_ROWS))
    rows, offsets = read
    _ring_sums[grid](rows, sums, offsets, *numbers, **_tile())


@as_operation
def _launch_tile_sums(sums: Tensor, read: Sequence[Tensor], numbers: Sequence[int]) -> None:
    grid = (triton.cdiv(sums.shape[1], _TILE_COLUMNS), triton.cdiv(len(sums), _TILE_ROWS))
    rows, fold_offsets = read
    _tile_sums[grid](rows, sums, fold_offsets, *numbers, **_tile())


def _tile() -> dict[str, int]:
    return {"block_rows": _TILE_ROWS, "block_columns": _TILE_COLUMNS, "num_warps": _TILE_WARPS}


# ---- matrices


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


@_kernel
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


# ---- both


def are_right(device: torch.device) -> bool:
    """Return whether the kernels give the features of the torch operations on a device."""
    # Row i of the identity selects entry i of a vector or matrix.
    return all(
        torch.equal(sketch(torch.eye(len(expected), dtype=torch.float32, device=device)).cpu(), expected)
        for sketch, expected in _expected_entries(device)
    )


def _expected_entries(device: torch.device) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Yield sketches, and the matrix of each: vectors of two segments and of one folded tile, a matrix of one block."""
    host = torch.device("cpu")

    def matrix(buckets: Tensor, signs: Tensor, size: int) -> Tensor:
        expected = torch.zeros(len(buckets), size, dtype=torch.float32, device=host)
        expected[torch.arange(len(buckets), device=host), buckets] = signs
        return expected

    def vector(offsets: list[int], folds: list[int], segment: int) -> VectorKernel:
        keys = {"sign_key": 5, "fold_key": 6}
        return VectorKernel(
            width=8, segment=segment, offsets=offsets, fold_offsets=folds, device=device, **keys
        )

    entries, offsets = torch.arange(20, device=host), torch.tensor([3, 0, 7], device=host)
    buckets = (entries + offsets[entries // 8]) % 8
    yield vector(offsets.tolist(), [0], 2), matrix(buckets, hash_signs(5, 0, 20, device=host), 8)

    folds = torch.tensor([1, 2], device=host)
    positions = (entries[:6] + 3) % 8
    signs = hash_signs(5, 0, 6, device=host) * hash_signs(6, 0, 8, device=host)[positions]
    yield vector([3], folds.tolist(), 1), matrix((positions % 4 + folds[positions // 4]) % 4, signs, 4)

    shifts, signs = torch.tensor([66, 2, 69], device=host), hash_signs(5, 0, 70, device=host)
    tables = (torch.arange(70, device=host), signs, torch.where(torch.arange(70, device=host) < 5, signs, 0))
    tables[0][:3] = shifts
    hashes = BlockHashes((3, 5), 70, *(table.view(1, 1, 70) for table in tables))
    rows, columns = entries[:15] // 5, entries[:15] % 5
    expected = matrix((shifts[rows] + columns) % 70, signs[rows] * signs[columns], 70)
    yield MatrixKernel(hashes, hashes.column_signs.to(device)).dense, expected
