"""Sketches of vectors on CUDA: a ring of rotated and signed tiles, folded to the features; see ``triton.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from trak_lite.projectors._kernels import as_operation
from trak_lite.projectors._scratch import scratch_bytes, sum_dtype
from trak_lite.projectors.random.hash import key32, wrap32
from trak_lite.projectors.random.triton_hash import hash_word, jit, kernel, sign_floats

_TILE_ROWS = 32
_TILE_COLUMNS = 128
_TILE_WARPS = 4  # with twice the rows and as many warps, registers are spilled
_WORD_ENTRIES = 37  # log2 of the number of entries with one high half of the index of their sign words


@jit()
def _entry_signs(
    entries: tl.tensor, key: tl.tensor, high_key: tl.tensor, next_high_key: tl.tensor, crossing: tl.tensor
) -> tl.tensor:
    """Return the signs of entries (int64), as ``hash_signs``; entries from ``crossing`` on have the next high key."""
    high_keys = tl.where(entries < crossing, high_key, next_high_key)
    words = hash_word((entries >> 5).to(tl.uint32), key, high_keys)
    return sign_floats(words, (31 - (entries & 31)).to(tl.uint32))


@kernel
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


@kernel
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
