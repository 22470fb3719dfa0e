r"""CountSketch of a matrix; a matrix that is given as factors is not formed.

The matrix ``(d_out, d_in)`` is cut into blocks of at most K x K. Within a block, entry (i, j) has the bucket
:math:`(h(i) + j) \bmod K` and the sign :math:`r(i) c(j)`, where h is a random injective map of the block's rows to the
buckets and r, c are random signs; every block has its own h, r and c. So a row of the matrix is added to K numbers as
one contiguous piece. For a sum of outer products :math:`\sum_t g_t \otimes x_t` the sketch is a sum of circular
convolutions of two sketches (TensorSketch: Pham and Pagh, KDD 2013), computed by Fourier transforms in
:math:`O(K \log K)`.

Two entries of one row or one column of a block never collide, any other two entries of a block collide with
probability 1/(K - 1), and entries of different blocks with probability 1/K. Inner products are unbiased, with at most
about the variance of the CountSketch of a vector. Because h is injective, no two rows overlap in all columns; in the
original construction such overlaps multiply the variance by up to 1 + cos^2 of the inputs. A remainder of this effect
exists for even K: entries in columns exactly K/2 apart collide in pairs. For a squared norm the entries that never
collide outweigh it, and the variance is at most K/(K - 1) times that of a vector.

Shapes: b rows (samples), T positions, K columns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, final

import torch
from torch import Tensor

from trak_lite.projectors._scratch import (
    Scratch,
    form,
    in_pieces,
    multiplies_halves,
    scratch_bytes,
    sum_dtype,
)
from trak_lite.projectors.random.hash import Stream, hash_permutation, hash_signs
from trak_lite.projectors.sketch.base import AbstractSketch, Keys, form_tables, triton_kernels
from trak_lite.projectors.sketch.blocks import AllBlocks, Block, convolved, fourier_takes_less_time, moved
from trak_lite.types import FactoredBlock, LookupBlock

if TYPE_CHECKING:
    from trak_lite.projectors.sketch.triton import MatrixKernel

__all__ = ["FactorMethod", "MatrixSketch", "fourier_is_cheaper"]

FactorMethod: TypeAlias = Literal["auto", "form", "fourier"]
"""Method for gradients given as factors: form a few rows at a time, or use Fourier transforms."""


_FEWEST_ROWS = 128
_NUMBERS = itertools.count()


@final
class MatrixSketch(AbstractSketch):
    """Sketch of a matrix parameter; the weight of a convolution is reshaped to ``(out_channels, -1)``."""

    def __init__(
        self,
        shape: tuple[int, ...],
        proj_dim: int,
        keys: Keys,
        *,
        device: torch.device,
        method: FactorMethod = "auto",
    ) -> None:
        """Draw the hash functions.

        Args:
            shape: Shape of the parameter.
            proj_dim: K.
            keys: Hash keys of this parameter.
            device: Device of the gradients.
            method: How factors are sketched; ``"auto"`` uses the cheaper method for the number of positions.
        """
        self.shape = (shape[0], math.prod(shape[1:]))
        self._proj_dim = proj_dim
        self._method = method
        drawn = [
            self._draw(row, column, keys)
            for row in range(-(-self.shape[0] // proj_dim))
            for column in range(-(-self.shape[1] // proj_dim))
        ]
        self._blocks = drawn if device.type == "cpu" else moved(drawn, device)
        self._most_columns = min(self.shape[1], proj_dim)
        self._kernel: MatrixKernel | None = None

    def dense(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, d_out * d_in)``."""
        kernels = triton_kernels(rows)
        if kernels is not None:
            return self._made_by(kernels).dense(rows)
        dtype = sum_dtype(rows.dtype)
        total = self._zeros(scratch, len(rows), dtype, rows.device)
        matrices = rows.view(len(rows), *self.shape)
        for block in self._blocks:
            signs = block.column_signs.to(dtype)
            places = scratch.views(block.number, total, block.starts, block.width)
            by_row = matrices[:, block.rows, block.columns].to(dtype).unbind(1)
            if rows.device.type == "cpu":  # an ordered loop without Python overhead: places overlap
                torch._foreach_addcmul_(places, by_row, [signs] * len(by_row), block.signs)
                continue
            for place, row, sign in zip(places, by_row, block.signs, strict=True):
                place.addcmul_(row, signs, value=sign)
        return self._wrapped(total)

    def factored(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradients in factors."""
        kernels = triton_kernels(block.inputs)
        if self._uses_fourier(block, triton=kernels is not None):
            size, budget = self._proj_dim, scratch_bytes(block.inputs.device)
            if block.inputs.device.type == "cpu":
                return convolved(block, size, self._spectra, budget * 8)
            return convolved(block, size, self._at_once.spectra, budget // 4)
        if kernels is None:
            return self._formed(block, scratch)
        return self._made_by(kernels).formed(block.inputs, block.output_grads, scratch)

    def _uses_fourier(self, block: FactoredBlock, *, triton: bool) -> bool:
        """Return whether factors are sketched by Fourier transforms.

        On an accelerator gradients are formed for the Triton kernel only, where a band of rows fits in memory.
        """
        positions, size = block.inputs.shape[1], self._proj_dim
        device = block.inputs.device
        if device.type != "cpu":
            row_bytes = self.shape[1] * sum_dtype(block.inputs.dtype, block.output_grads.dtype).itemsize
            if not triton or min(self.shape[0], size) * row_bytes > scratch_bytes(device):
                return True
        if self._method != "auto":
            return self._method == "fourier"
        if device.type == "cpu":
            return fourier_is_cheaper(self.shape, positions, proj_dim=size)
        samples, halves = len(block.inputs), multiplies_halves(block.output_grads, block.inputs)
        return fourier_takes_less_time(self.shape, positions, proj_dim=size, samples=samples, halves=halves)

    @functools.cached_property
    def _at_once(self) -> AllBlocks:
        """Operations on all blocks together, for accelerators."""
        return AllBlocks(self.shape, self._proj_dim, self._blocks)

    def looked_up(self, block: LookupBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradients of table rows; on a CPU, added position by position."""
        count, positions = block.rows.shape
        if block.values.device.type != "cpu" and positions:
            return self._at_once.looked_up(block)
        if positions >= self.shape[0]:
            return form_tables(self, block, scratch)
        dtype = sum_dtype(block.values.dtype)
        total = self._zeros(scratch, count, dtype, block.values.device)
        step = max(1, scratch_bytes(total.device) // (dtype.itemsize * max(1, count) * self._most_columns))
        for parts, shifts, row_signs, column_signs in self._tables:
            steps = torch.arange(parts[0].width, device=total.device)
            for first in range(0, positions, step):
                rows = block.rows[:, first : first + step]
                values = block.values[:, first : first + step, parts[0].columns].to(dtype)
                values = values * row_signs[rows].to(dtype).unsqueeze(2)
                values = values * column_signs[rows // self._proj_dim].to(dtype)
                places = shifts[rows].unsqueeze(2) + steps
                # Add one position at a time: within a position no two entries collide, so the order is fixed.
                for place, value in zip(places.unbind(1), values.unbind(1), strict=True):
                    total.scatter_add_(1, place, value)
        return self._wrapped(total)

    def adjoint(self, features: Tensor) -> Tensor:
        """Return the transposed map applied to feature rows ``(m, K)``, ``(m, d_out * d_in)``."""
        found = features.new_empty(len(features), *self.shape)
        for block in self._blocks:
            columns = torch.arange(block.width, device=features.device)
            places = (block.shifts.unsqueeze(1) + columns).remainder_(self._proj_dim)
            signs = block.row_signs.unsqueeze(1) * block.column_signs
            found[:, block.rows, block.columns] = features[:, places] * signs.to(features.dtype)
        return found.flatten(1)

    @functools.cached_property
    def _tables(self) -> list[tuple[list[Block], Tensor, Tensor, Tensor]]:
        """Blocks with the same columns, in row order, with their shifts, row signs and column signs."""
        across = -(-self.shape[1] // self._proj_dim)
        return [
            (
                parts := self._blocks[first::across],
                torch.cat([part.shifts for part in parts]),
                torch.cat([part.row_signs for part in parts]),
                torch.stack([part.column_signs for part in parts]),
            )
            for first in range(across)
        ]

    def _formed(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Form some rows of the matrix for some samples, in memory that fits into the cache, and add them."""
        budget = scratch_bytes(block.inputs.device) // block.inputs.element_size()
        columns = max(1, self._most_columns)
        # With fewer rows, the inputs are read too often.
        step = max(_FEWEST_ROWS, budget // (max(1, len(block.inputs)) * columns))

        def features(inputs: Tensor, output_grads: Tensor) -> Tensor:
            dtype = sum_dtype(inputs.dtype, output_grads.dtype)
            total = self._zeros(scratch, len(inputs), dtype, inputs.device)
            for part in self._blocks:
                x, g = self._signed(part, inputs, output_grads, dtype)
                by_row = g.transpose(1, 2)
                places = scratch.views(part.number, total, part.starts, part.width)
                for first in range(0, by_row.shape[1], step):
                    formed = form(by_row[:, first : first + step], x, scratch)
                    # An ordered loop without Python overhead: places overlap.
                    torch._foreach_add_(places[first : first + step], formed.unbind(1))
            return self._wrapped(total)

        num_samples = budget // (min(step, self.shape[0]) * columns)
        return in_pieces(features, block.inputs, block.output_grads, num_samples)

    def _made_by(self, kernels: ModuleType) -> MatrixKernel:
        """Return the kernel of this sketch, created at the first call."""
        if self._kernel is None:
            self._kernel = kernels.MatrixKernel(self.shape[1], self._proj_dim, self._blocks)
        return self._kernel

    def _spectra(self, inputs: Tensor, output_grads: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the Fourier transforms ``(b, K // 2 + 1)`` of the features of every block."""
        for part in self._blocks:
            x, g = self._signed(part, inputs, output_grads, dtype)
            spread = g.new_zeros(*g.shape[:2], self._proj_dim).index_copy_(2, part.shifts, g)
            yield (torch.fft.rfft(spread) * torch.fft.rfft(x, n=self._proj_dim)).sum(1)

    @staticmethod
    def _signed(
        part: Block, inputs: Tensor, output_grads: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return a block's columns ``(b, T, w)`` and rows ``(b, T, R)`` with their signs."""
        x = inputs[:, :, part.columns].to(dtype) * part.column_signs.to(dtype)
        g = output_grads[:, :, part.rows].to(dtype) * part.row_signs.to(dtype)
        return x, g

    def _zeros(self, scratch: Scratch, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros ``(b, K + w - 1)``, wide enough that no row of the matrix wraps around."""
        width = self._proj_dim + self._most_columns - 1
        return scratch.get("sum", (count, width), dtype, device).zero_()

    def _wrapped(self, extended: Tensor) -> Tensor:
        """Add the columns from K on to the first columns: ``(b, K)``."""
        size = self._proj_dim
        features = extended[:, :size].clone()
        features[:, : extended.shape[1] - size] += extended[:, size:]
        return features

    def _draw(self, row: int, column: int, keys: Keys) -> Block:
        size, host = self._proj_dim, torch.device("cpu")
        rows = slice(row * size, min((row + 1) * size, self.shape[0]))
        columns = slice(column * size, min((column + 1) * size, self.shape[1]))
        height, width = rows.stop - rows.start, columns.stop - columns.start
        shifts = hash_permutation(keys(Stream.ROW_SHIFT, row, column), size)[:height]
        row_signs = hash_signs(keys(Stream.ROW_SIGN, row, column), 0, height, device=host)
        return Block(
            rows=rows,
            columns=columns,
            shifts=shifts,
            row_signs=row_signs,
            column_signs=hash_signs(keys(Stream.COLUMN_SIGN, row, column), 0, width, device=host),
            starts=shifts.tolist(),
            signs=row_signs.tolist(),
            number=next(_NUMBERS),
        )


# Nanoseconds on one CPU thread, measured by benchmarks/bench_projection.py; only their ratios matter.
_PRODUCT = 0.01  # one multiplication and addition when an entry is formed
_ADDITION = 0.15  # adding an entry to its place
_ROW = 1500.0  # adding a row of any length, for all samples of a batch of 32
_TRANSFORM = 0.2  # one Fourier transform per K log2(K), including its memory traffic


def fourier_is_cheaper(shape: tuple[int, int], positions: int, *, proj_dim: int) -> bool:
    """Return whether Fourier transforms are faster than forming the gradient, for the sketch of one sample.

    Args:
        shape: ``(d_out, d_in)``.
        positions: T.
        proj_dim: K.

    Example:
        >>> fourier_is_cheaper((1024, 1024), 1, proj_dim=2048), fourier_is_cheaper((768, 192), 64, proj_dim=2048)
        (True, False)
    """
    d_out, d_in = shape
    row_blocks, column_blocks = -(-d_out // proj_dim), -(-d_in // proj_dim)
    form = d_out * d_in * (2 * positions * _PRODUCT + _ADDITION) + d_out * column_blocks * _ROW / 32
    transforms = 1 + 2 * positions * row_blocks * column_blocks
    return transforms * _TRANSFORM * proj_dim * max(1.0, math.log2(proj_dim)) < form
