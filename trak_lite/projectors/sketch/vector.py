"""CountSketch of a vector whose buckets are contiguous tiles at hashed offsets of a ring.

The vector is cut in tiles of W = mK entries, m = 32768 // K, or as many as it fills if that is less, and at least 1.
Tile t is added to a ring of W numbers, rotated by a hashed offset, each entry with its own sign; at the end the m
blocks of the ring, if there are several, are added to K numbers, rotated by hashed offsets and signed anew. Two entries
of different tiles meet with probability 1/K, two of one tile at most with that. Compared with a hashed bucket per entry
(Charikar et al. 2002; sparse JL, Kane and Nelson, arXiv:1012.1577) the variance is the same, and memory is read and
written in order: no table of indices, no atomic additions.

Shapes: b rows, n entries, K columns.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import Scratch, form, scratch_bytes, sum_dtype
from trak_lite.projectors.random.hash import Stream, hash_offsets, hash_signs
from trak_lite.projectors.sketch.base import AbstractSketch, Keys, form_tables, triton_kernels
from trak_lite.types import FactoredBlock, LookupBlock

if TYPE_CHECKING:
    from trak_lite.projectors.sketch.triton import VectorKernel

__all__ = ["VectorSketch"]

_WIDE = 32768
_SEGMENT = 64
"""Tiles that are added one after the other; the sums of segments are added after that. Part of the definition."""


@final
class VectorSketch(AbstractSketch):
    """Sketch of a parameter that is no matrix, or a small one."""

    def __init__(self, num_entries: int, proj_dim: int, keys: Keys, *, device: torch.device) -> None:
        """Draw offsets; signs are drawn when a tile comes.

        Args:
            num_entries: n.
            proj_dim: K.
            keys: Of this parameter.
            device: Where the gradients are.
        """
        self._proj_dim = proj_dim
        self._num_entries = num_entries
        blocks = min(max(1, _WIDE // proj_dim), -(-num_entries // proj_dim) or 1)
        self._width = blocks * proj_dim
        num_tiles = -(-num_entries // self._width)
        self._offsets = hash_offsets(keys(Stream.TILE_OFFSET), 0, num_tiles, size=self._width)
        self._sign_key = keys(Stream.TILE_SIGN)
        self._device = device
        self._fold_offsets = hash_offsets(keys(Stream.FOLD_OFFSET), 0, blocks, size=proj_dim)
        self._fold_key = keys(Stream.FOLD_SIGN)
        self._fold_signs = hash_signs(self._fold_key, 0, self._width, device=device)
        self._signs = self._draw_signs(0) if num_tiles <= _SEGMENT else None
        self._kernel: VectorKernel | None = None

    def dense(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, n)``."""
        kernels = triton_kernels(rows)
        if kernels is not None:
            return self._made_by(kernels)(rows)
        dtype = sum_dtype(rows.dtype)
        ring = torch.zeros(len(rows), self._width, dtype=dtype, device=rows.device)
        for first in range(0, len(self._offsets), _SEGMENT):
            signs = (self._draw_signs(first) if self._signs is None else self._signs).to(dtype)
            if first == 0:
                self._add_tiles(ring, rows, signs, first)
                continue
            segment = scratch.get("segment", tuple(ring.shape), dtype, rows.device).zero_()
            self._add_tiles(segment, rows, signs, first)
            ring += segment
        return self._folded(ring)

    def factored(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradients that are formed a few samples at a time."""
        dtype = sum_dtype(block.inputs.dtype, block.output_grads.dtype)
        step = max(1, scratch_bytes(block.inputs.device) // max(1, dtype.itemsize * self._num_entries))
        parts = [
            self.dense(form(g.to(dtype).transpose(1, 2), x.to(dtype), scratch).flatten(1), scratch)
            for x, g in zip(
                torch.split(block.inputs, step), torch.split(block.output_grads, step), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def looked_up(self, block: LookupBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of tables that are formed a few samples at a time."""
        return form_tables(self, block, scratch)

    def _made_by(self, kernels: ModuleType) -> VectorKernel:
        """Return the kernel of this sketch, made at the first call."""
        if self._kernel is None:
            self._kernel = kernels.VectorKernel(
                width=self._width,
                segment=_SEGMENT,
                offsets=self._offsets,
                sign_key=self._sign_key,
                fold_offsets=self._fold_offsets,
                fold_key=self._fold_key,
                device=self._device,
            )
        return self._kernel

    def _add_tiles(self, ring: Tensor, rows: Tensor, signs: Tensor, first: int) -> None:
        """Add a segment, whose first tile is ``first``, to a ring ``(b, W)``."""
        width = self._width
        for tile in range(first, min(first + _SEGMENT, len(self._offsets))):
            offset = self._offsets[tile]
            entries = rows[:, tile * width : (tile + 1) * width].to(ring.dtype)
            sign = signs[(tile - first) * width : (tile - first + 1) * width]
            head = min(entries.shape[1], width - offset)
            ring[:, offset : offset + head].addcmul_(entries[:, :head], sign[:head])
            if head < entries.shape[1]:
                ring[:, : entries.shape[1] - head].addcmul_(entries[:, head:], sign[head:])

    def _draw_signs(self, first: int) -> Tensor:
        start = first * self._width
        count = min(_SEGMENT * self._width, self._num_entries - start)
        return hash_signs(self._sign_key, start, count, device=self._device)

    def _folded(self, ring: Tensor) -> Tensor:
        size = self._proj_dim
        if len(self._fold_offsets) == 1:
            return ring
        features = torch.zeros(len(ring), size, dtype=ring.dtype, device=ring.device)
        ring *= self._fold_signs.to(ring.dtype)
        for place, offset in enumerate(self._fold_offsets):
            block = ring[:, place * size : (place + 1) * size]
            features[:, offset:] += block[:, : size - offset]
            if offset:
                features[:, :offset] += block[:, size - offset :]
        return features
