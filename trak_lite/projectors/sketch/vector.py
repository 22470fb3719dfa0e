"""CountSketch of a vector by contiguous tiles at hashed offsets of a ring.

The vector is cut into tiles of W = mK entries, with m = 32768 // K, at most the number of blocks of K entries in the
vector, and at least 1. Tile t is rotated by a hashed offset and added to a ring of W numbers, each entry with its own
sign. At the end, if m > 1, the m blocks of the ring are rotated by hashed offsets, get new signs, and are added to K
numbers. Two entries of different tiles collide with probability 1/K, two entries of one tile with at most this
probability. The variance is that of a sketch with a hashed bucket per entry (Charikar et al. 2002; sparse JL, Kane and
Nelson, arXiv:1012.1577), but memory is read and written in order, without a table of indices or atomic additions.

Shapes: b rows, n entries, K columns.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import Scratch, form, in_pieces, scratch_bytes, sum_dtype
from trak_lite.projectors.random.hash import Stream, hash_offsets, hash_signs
from trak_lite.projectors.sketch.base import Keys, form_tables, triton_kernels
from trak_lite.types import FactoredBlock, LookupBlock

if TYPE_CHECKING:
    from trak_lite.projectors.sketch.triton_vector import VectorKernel

_WIDE = 32768
_SMALL = 256  # features for which an operation on a CPU takes longer to start than to run
_SEGMENT = 64
"""Number of tiles per segment: tiles are summed in order, then the segments. Part of the definition."""


@final
class VectorSketch:
    """Sketch of a parameter that is not a matrix or is a small matrix.

    Features are summed in float32, or in float64 for float64 gradients.
    """

    def __init__(self, num_entries: int, proj_dim: int, keys: Keys, *, device: torch.device) -> None:
        """Draw the offsets for a parameter on a device; signs are drawn when they are needed."""
        self._proj_dim = proj_dim
        self._num_entries = num_entries
        blocks = min(max(1, _WIDE // proj_dim), -(-num_entries // proj_dim) or 1)
        self._width = blocks * proj_dim
        num_tiles = -(-num_entries // self._width)
        self._offsets = hash_offsets(keys(Stream.TILE_OFFSET), num_tiles, size=self._width)
        self._sign_key = keys(Stream.TILE_SIGN)
        self._device = device
        self._fold_offsets = hash_offsets(keys(Stream.FOLD_OFFSET), blocks, size=proj_dim)
        self._fold_key = keys(Stream.FOLD_SIGN)
        self._kernel: VectorKernel | None = None

    def dense(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, n)``."""
        kernels = triton_kernels(rows)
        if kernels is not None:
            return self._made_by(kernels)(rows)
        dtype = sum_dtype(rows.dtype)
        ring = torch.zeros(len(rows), self._width, dtype=dtype, device=rows.device)
        for first in range(0, len(self._offsets), _SEGMENT):
            signs = (self._signs if len(self._offsets) <= _SEGMENT else self._draw_signs(first)).to(dtype)
            if first == 0:
                self._add_tiles(ring, rows, signs, first)
                continue
            segment = scratch.get("segment", tuple(ring.shape), dtype, rows.device).zero_()
            self._add_tiles(segment, rows, signs, first)
            ring += segment
        return self._folded(ring)

    def factored(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of factored gradients, which are formed for a few samples at a time."""
        dtype = sum_dtype(block.inputs.dtype, block.output_grads.dtype)

        def features(x: Tensor, g: Tensor) -> Tensor:
            return self.dense(form(g.to(dtype).transpose(1, 2), x.to(dtype), scratch).flatten(1), scratch)

        num_samples = scratch_bytes(block.inputs.device) // max(1, dtype.itemsize * self._num_entries)
        return in_pieces(features, block.inputs, block.output_grads, num_samples)

    def looked_up(self, block: LookupBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradients of table rows, which are formed for a few samples at a time."""
        return form_tables(self.dense, block, scratch)

    def adjoint(self, features: Tensor) -> Tensor:
        """Return the transposed map applied to feature rows ``(m, K)``, ``(m, n)``."""
        ring = features
        if len(self._fold_offsets) > 1:  # the transpose of _folded
            blocks = [features.roll(-offset, 1) for offset in self._fold_offsets]
            ring = torch.cat(blocks, 1) * self._fold_signs.to(features.dtype)
        tiles = [ring[:, :0]]  # a parameter may be empty
        for tile, offset in enumerate(self._offsets):
            start = tile * self._width
            length = min(self._width, self._num_entries - start)
            tiles.append(ring.roll(-offset, 1)[:, :length])
        signs = hash_signs(self._sign_key, 0, self._num_entries, device=self._device)
        return torch.cat(tiles, 1) * signs.to(features.dtype)

    def _made_by(self, kernels: ModuleType) -> VectorKernel:
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
        """Add the segment that begins with tile ``first`` to a ring ``(b, W)``."""
        width = self._width
        for tile in range(first, min(first + _SEGMENT, len(self._offsets))):
            offset = self._offsets[tile]
            entries = rows[:, tile * width : (tile + 1) * width].to(ring.dtype)
            sign = signs[(tile - first) * width : (tile - first + 1) * width]
            head = min(entries.shape[1], width - offset)
            ring[:, offset : offset + head].addcmul_(entries[:, :head], sign[:head])
            if head < entries.shape[1]:
                ring[:, : entries.shape[1] - head].addcmul_(entries[:, head:], sign[head:])

    @functools.cached_property
    def _signs(self) -> Tensor:
        return self._draw_signs(0)

    @functools.cached_property
    def _fold_signs(self) -> Tensor:
        return hash_signs(self._fold_key, 0, self._width, device=self._device)

    @functools.cached_property
    def _fold_index(self) -> Tensor:
        """Entry of the ring that every block adds to every feature, ``(W,)``."""
        size = self._proj_dim
        columns = torch.arange(size, device="cpu")
        index = [u * size + (columns - offset) % size for u, offset in enumerate(self._fold_offsets)]
        return torch.cat(index).to(self._device)

    def _draw_signs(self, first: int) -> Tensor:
        start = first * self._width
        count = min(_SEGMENT * self._width, self._num_entries - start)
        return hash_signs(self._sign_key, start, count, device=self._device)

    def _folded(self, ring: Tensor) -> Tensor:
        size = self._proj_dim
        if len(self._fold_offsets) == 1:
            return ring
        ring *= self._fold_signs.to(ring.dtype)
        if ring.device.type != "cpu" or size < _SMALL:  # half the operations
            blocks = ring.gather(1, self._fold_index.expand(len(ring), -1))
            return functools.reduce(torch.add, torch.split(blocks, size, 1))
        features = torch.zeros(len(ring), size, dtype=ring.dtype, device=ring.device)
        for index, offset in enumerate(self._fold_offsets):
            block = ring[:, index * size : (index + 1) * size]
            features[:, offset:] += block[:, : size - offset]
            if offset:
                features[:, :offset] += block[:, size - offset :]
        return features
