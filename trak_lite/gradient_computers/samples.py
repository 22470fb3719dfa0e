"""The numbers by which the gradients of some samples are compared, collected from the blocks of a batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from trak_lite.core.devices import wide_dtype
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.types import BlockSink, GradientBlock

_MOST_ENTRIES = 1 << 20
"""Entries of the dense gradients of one parameter that are formed at a time; one sample is always allowed."""
WIDTH: Final = 1 << 12
"""Largest number of numbers for the gradient of one parameter."""
_PIECE, _STEP = 1 << 18, 40503


class Samples:
    """Collects from the streamed blocks the numbers by which some samples' gradients are compared.

    For a gradient with more than 4096 entries, these are 4096 sums of its entries with random signs. The sums are
    linear in the gradient, and they give the norm of a difference to within 2 %.
    """

    def __init__(self, positions: Sequence[int], kept: Kept, start: int = 0) -> None:
        """Prepare for the samples at these positions; ``start`` is the ``start`` of the block of position 0."""
        self.positions = list(positions)
        self._start, self._sizes = start, {name: p.numel() for name, p in kept.items()}
        widths = [min(size, WIDTH) for size in self._sizes.values()]
        device = next(iter(kept.values())).device
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # One allocation: many small ones would fragment the memory that large gradients reuse.
            held = torch.zeros(len(positions), sum(widths), dtype=wide_dtype(device), device=device)
            self._of = dict(zip(kept, torch.split(held, widths, 1), strict=True))

    def sums(self, kept: Iterable[str]) -> Tensor:
        """Return the numbers ``(len(positions), W)`` of some parameters, in order."""
        with torch._C.DisableTorchFunction():
            return torch.cat([self._of[name] for name in kept], 1)

    def passing(self, sink: BlockSink) -> BlockSink:
        """Return a sink that collects from each block and passes it to ``sink``."""
        if not self.positions:
            return sink

        def take(block: GradientBlock) -> None:
            first, end = block.start - self._start, block.start - self._start + block.num_samples
            rows = [row for row, at in enumerate(self.positions) if first <= at < end]
            step = max(1, _MOST_ENTRIES // self._sizes[block.name])
            for some in (rows[i : i + step] for i in range(0, len(rows), step)):
                with torch._C.DisableTorchFunction():
                    part = block.samples([self.positions[row] - first for row in some])
                    self.add(some, block.name, part.dense())
            sink(block)

        return take

    def add(self, rows: slice | Sequence[int], name: str, grads: Tensor) -> None:
        """Store a parameter's flat gradients ``(b, P)`` for the samples at the indices ``rows`` of ``positions``."""
        with torch.no_grad():
            self._of[name][rows] = _sums(grads)


def _sums(rows: Tensor) -> Tensor:
    """Return the entries of gradients ``(b, P)`` or, if P is above 4096, 4096 sums of them with random signs."""
    wide = wide_dtype(rows.device)
    if rows.shape[1] <= WIDTH:
        return rows.to(wide)
    total = torch.zeros(len(rows), WIDTH, dtype=wide, device=rows.device)
    signs = _signs(rows.device)
    for number, piece in enumerate(torch.split(rows, _PIECE, 1)):
        start = number * _STEP % _PIECE
        signed = piece * signs[start : start + piece.shape[1]]
        if rest := -piece.shape[1] % WIDTH:
            signed = nn.functional.pad(signed, (0, rest))
        # A sum of more than 64 numbers takes three times as long.
        total += signed.view(len(rows), -1, WIDTH).sum(1)
    return total


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return random signs; each piece of a gradient uses another section of them."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(2, (2 * _PIECE,), generator=generator, dtype=torch.float32, device="cpu")
    return (2 * drawn - 1).to(device)
