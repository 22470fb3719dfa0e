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
from dataclasses import dataclass
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
from trak_lite.projectors.random.hash import Stream, hash_permutations, key_grid, sign_table
from trak_lite.projectors.sketch.base import Keys, form_tables, triton_kernels
from trak_lite.projectors.sketch.blocks import BlockHashes, fourier_takes_less_time
from trak_lite.types import FactoredBlock, LookupBlock

if TYPE_CHECKING:
    from trak_lite.projectors.sketch.triton_matrix import MatrixKernel

FactorMethod: TypeAlias = Literal["auto", "form", "fourier"]
"""Method for gradients given as factors: form a few rows at a time, or use Fourier transforms."""


_FEWEST_ROWS = 128
_NUMBERS = itertools.count()


@final
class MatrixSketch:
    """Sketch of a matrix parameter; the weight of a convolution is reshaped to ``(out_channels, -1)``.

    Features are summed in float32, or in float64 for float64 gradients.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        proj_dim: int,
        keys: Keys,
        *,
        device: torch.device,
        method: FactorMethod = "auto",
    ) -> None:
        """Draw the hash functions of a parameter; ``method`` says how gradients in factors are sketched."""
        self.shape = (shape[0], math.prod(shape[1:]))
        self._proj_dim = proj_dim
        self._method = method
        self._most_columns = min(self.shape[1], proj_dim)
        self._drawn = _drawn(self.shape, proj_dim, keys)  # on the CPU: lists are made from it
        self._hashes = self._drawn if device.type == "cpu" else self._drawn.to(device)
        self._slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._kernel: MatrixKernel | None = None

    def dense(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradient rows ``(b, d_out * d_in)``."""
        kernels = triton_kernels(rows)
        if kernels is not None:
            return self._made_by(kernels).dense(rows)
        many = has_many_pieces(self.shape, self._proj_dim) and rows.device.type == "cpu"
        if many and len(rows) * self._proj_dim**2 < _FEW_NUMBERS:
            return self._dense_pieces(rows, scratch)
        total = self._zeros(scratch, len(rows), sum_dtype(rows.dtype), rows.device)
        matrices = rows.view(len(rows), *self.shape)
        for first in range(0, self.shape[0], self._proj_dim):
            self._add_rows(total, matrices[:, first : first + self._proj_dim], first, scratch)
        return self._wrapped(total)

    def factored(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradients in factors."""
        kernels = triton_kernels(block.inputs)
        if self._uses_fourier(block, triton=kernels is not None):
            return self._hashes.convolved(block)
        if kernels is not None:
            return self._made_by(kernels).formed(block.inputs, block.output_grads, scratch)
        formed = self._formed_pieces if has_many_pieces(self.shape, self._proj_dim) else self._formed
        return formed(block, scratch)

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

    def looked_up(self, block: LookupBlock, scratch: Scratch) -> Tensor:
        """Return features ``(b, K)`` of gradients of table rows; on a CPU, added position by position."""
        count, positions = block.rows.shape
        if block.values.device.type != "cpu" and positions:
            return self._hashes.looked_up(block)
        if positions >= self.shape[0]:
            return form_tables(self.dense, block, scratch)
        dtype, size = sum_dtype(block.values.dtype), self._proj_dim
        total = self._zeros(scratch, count, dtype, block.values.device)
        step = max(1, scratch_bytes(total.device) // (dtype.itemsize * max(1, count) * self._most_columns))
        shifts, row_signs = self._hashes.by_row
        for column, first_column in enumerate(range(0, self.shape[1], size)):
            columns = slice(first_column, min(first_column + size, self.shape[1]))
            steps = torch.arange(columns.stop - first_column, device=total.device)
            column_signs = self._hashes.column_signs[:, column, : len(steps)]
            for first in range(0, positions, step):
                rows = block.rows[:, first : first + step]
                values = block.values[:, first : first + step, columns].to(dtype)
                values = values * row_signs[rows, column].to(dtype).unsqueeze(2)
                values = values * column_signs[rows // size].to(dtype)
                buckets = shifts[rows, column].unsqueeze(2) + steps
                # Add one position at a time: within a position no two entries collide, so the order is fixed.
                for bucket, value in zip(buckets.unbind(1), values.unbind(1), strict=True):
                    total.scatter_add_(1, bucket, value)
        return self._wrapped(total)

    def adjoint(self, features: Tensor) -> Tensor:
        """Return the transposed map applied to feature rows ``(m, K)``, ``(m, d_out * d_in)``."""
        size = self._proj_dim
        matrices = features.new_empty(len(features), *self.shape)
        columns = torch.arange(size, device=features.device)
        for number in range(len(self._hashes.shifts)):
            rows = matrices[:, number * size : (number + 1) * size]
            tables = self._hashes.shifts[number], self._hashes.row_signs[number]
            shifts, row_signs = (table.T[: rows.shape[1], :, None] for table in tables)
            buckets = (shifts + columns).remainder_(size).flatten(1)[:, : self.shape[1]]
            signs = (row_signs * self._hashes.column_signs[number]).flatten(1)[:, : self.shape[1]]
            rows.copy_(features[:, buckets] * signs.to(features.dtype))
        return matrices.flatten(1)

    @functools.cached_property
    def _lists(self) -> list[list[_Block]]:
        """Shifts and signs of the rows of every block as lists, by row of blocks."""
        drawn, lists = self._drawn, []
        for number, column_signs in enumerate(self._hashes.column_signs):
            height = min(self._proj_dim, self.shape[0] - number * self._proj_dim)
            shifts, row_signs = (
                table[number, :, :height].tolist() for table in (drawn.shifts, drawn.row_signs)
            )
            blocks = zip(shifts, row_signs, column_signs, strict=True)
            lists.append([_Block(*block, next(_NUMBERS)) for block in blocks])
        return lists

    def _add_rows(self, total: Tensor, rows: Tensor, first: int, scratch: Scratch) -> None:
        """Add consecutive rows ``(b, r, d_in)`` of one row of blocks, from row ``first`` of the matrix on, by blocks.

        ``total`` is ``(b, K + w - 1)`` from :meth:`_zeros`, and part of ``scratch``.
        """
        number, start = divmod(first, self._proj_dim)
        some = slice(start, start + rows.shape[1])
        windows: list[Tensor] = []
        entries: list[Tensor] = []
        column_signs: list[Tensor] = []
        row_signs: list[float] = []
        parts = torch.split(rows.to(total.dtype), self._proj_dim, 2)
        for block, part in zip(self._lists[number], parts, strict=True):
            windows += scratch.views(block.number, total, block.starts, part.shape[2])[some]
            entries += part.unbind(1)
            column_signs += [block.column_signs[: part.shape[2]].to(total.dtype)] * part.shape[1]
            row_signs += block.row_signs[some]
        if total.device.type == "cpu":  # an ordered loop without Python overhead: windows overlap
            torch._foreach_addcmul_(windows, entries, column_signs, row_signs)
            return
        for window, row, signs, sign in zip(windows, entries, column_signs, row_signs, strict=True):
            window.addcmul_(row, signs, value=sign)

    def _dense_pieces(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Add pieces of K entries, each from a row of 2K numbers that are 0 beside it: the bits are those of rows.

        The number of operations does not depend on the number of blocks.
        """
        (d_out, d_in), size, dtype = self.shape, self._proj_dim, sum_dtype(rows.dtype)
        shifts, signs = self._signed_rows(0, d_out)
        count, wide = shifts.numel(), shifts.shape[1] * size
        columns = shifts.flatten()[:, None] + torch.arange(size, device=rows.device)
        step = max(1, scratch_bytes(rows.device) // max(1, 4 * dtype.itemsize * count * size))
        features = []
        for some in torch.split(rows, step):
            entries = scratch.get("entries", (len(some), d_out, wide), dtype, rows.device)
            torch.mul(some.view(len(some), d_out, d_in), signs[:, :d_in].to(dtype), out=entries[:, :, :d_in])
            entries[:, :, d_in:] = 0
            alone = scratch.get("pieces", (len(some), count, 2 * size), dtype, rows.device).zero_()
            alone.scatter_(2, columns.expand(len(some), -1, -1), entries.view(len(some), count, size))
            starts = torch.arange(len(some), dtype=torch.int32, device=rows.device) * count
            index = (starts[:, None] + self._order).flatten()
            sums = torch.embedding_bag(alone.view(-1, 2 * size), index, starts)[0]
            features.append(sums[:, :size] + sums[:, size:])
        return torch.cat(features)

    @functools.cached_property
    def _order(self) -> Tensor:
        """Numbers of all pieces in the order of their blocks, int32; piece ``j`` of row ``i`` is ``i * across + j``."""
        across = self._hashes.shifts.shape[1]
        pieces = torch.arange(self.shape[0] * across, dtype=torch.int32, device=self._hashes.shifts.device)
        return torch.cat([band.T.flatten() for band in torch.split(pieces.view(-1, across), self._proj_dim)])

    def _signed_rows(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the shifts ``(r, across)`` of some rows and the signs ``(r, across * K)`` of their entries."""
        shifts, row_signs = (table[first:stop] for table in self._hashes.by_row)
        rows = torch.arange(first, stop, device=shifts.device) // self._proj_dim
        signs = self._hashes.column_signs[rows] * row_signs.unsqueeze(2)
        return shifts, signs.flatten(1)

    def _formed(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Form some rows of the matrix for some samples, in memory that fits into the cache, and add them."""
        budget = scratch_bytes(block.inputs.device) // block.inputs.element_size()
        # With fewer rows, the inputs are read too often.
        step = max(_FEWEST_ROWS, budget // max(1, len(block.inputs) * self.shape[1]))

        def features(inputs: Tensor, output_grads: Tensor) -> Tensor:
            total = self._zeros(
                scratch, len(inputs), sum_dtype(inputs.dtype, output_grads.dtype), inputs.device
            )
            by_row = output_grads.transpose(1, 2)
            for first in range(0, self.shape[0], self._proj_dim):
                band = by_row[:, first : first + self._proj_dim]
                for start in range(0, band.shape[1], step):
                    formed = form(band[:, start : start + step], inputs, scratch)
                    self._add_rows(total, formed, first + start, scratch)
            return self._wrapped(total)

        num_samples = budget // max(1, min(step, self._proj_dim, self.shape[0]) * self.shape[1])
        return in_pieces(features, block.inputs, block.output_grads, num_samples)

    def _formed_pieces(self, block: FactoredBlock, scratch: Scratch) -> Tensor:
        """Form some rows of the matrix for some samples, add their pieces of K entries by shift, and then the shifts.

        The time does not depend on the number of blocks.
        """
        size = self._proj_dim
        across = self._hashes.shifts.shape[1]
        budget = scratch_bytes(block.inputs.device) // block.inputs.element_size()
        step = max(_FEWEST_ROWS, budget // max(1, len(block.inputs) * across * size))

        def features(inputs: Tensor, output_grads: Tensor) -> Tensor:
            count, by_row = len(inputs), output_grads.transpose(1, 2)
            wide = torch.nn.functional.pad(inputs, (0, across * size - self.shape[1]))
            sums = []
            for first in range(0, self.shape[0], step):
                formed = form(by_row[:, first : first + step], wide, scratch)
                _, signs = self._signed_rows(first, first + formed.shape[1])
                formed.mul_(signs.to(formed.dtype))
                order, begins = self._pieces_by_shift(first, formed.shape[1])
                starts = torch.arange(count, dtype=torch.int32, device=formed.device)[:, None] * len(order)
                index, offsets = (starts + order).flatten(), (starts + begins).flatten()
                pieces = formed.view(count * len(order), size)
                sums.append(torch.embedding_bag(pieces, index, offsets)[0])
            by_shift = functools.reduce(torch.add, sums).view(count, size, size)
            # Column j of shift h belongs to feature (h + j) mod K: its column if rows of K + 1 are read as rows of K.
            return torch.nn.functional.pad(by_shift, (0, 1)).view(count, size + 1, size).sum(1)

        num_samples = budget // (min(step, self.shape[0]) * across * size)
        return in_pieces(features, block.inputs, block.output_grads, num_samples)

    def _pieces_by_shift(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the pieces of K entries of some rows in the order of their shifts, and where each shift begins.

        They are int32 ``(count * across,)`` and ``(K,)``, for ``count`` rows from row ``first`` on.
        """
        if (first, count) not in self._slots:
            shifts = self._hashes.by_row[0][first : first + count].flatten()
            counts = torch.bincount(shifts, minlength=self._proj_dim)
            slots = torch.argsort(shifts, stable=True), counts.cumsum(0) - counts
            self._slots[first, count] = slots[0].int(), slots[1].int()
        return self._slots[first, count]

    def _made_by(self, kernels: ModuleType) -> MatrixKernel:
        if self._kernel is None:
            self._kernel = kernels.MatrixKernel(self._drawn, self._hashes.column_signs)
        return self._kernel

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


@dataclass(frozen=True, slots=True)
class _Block:
    """Hash functions of one block, for a loop over its rows."""

    starts: list[int]
    """Bucket of every row's first column."""
    row_signs: list[float]
    column_signs: Tensor
    """``(K,)`` float32."""
    number: int
    """Unique number of the block among all parameters."""


def _drawn(shape: tuple[int, int], size: int, keys: Keys) -> BlockHashes:
    """Draw the hash functions of all blocks, on the CPU."""
    grid = -(-shape[0] // size), -(-shape[1] // size)
    inside = torch.arange(grid[1] * size, device="cpu").view(grid[1], size) < shape[1]
    shifts = hash_permutations(key_grid(keys(Stream.ROW_SHIFT), *grid), size)
    row_signs, column_signs = (
        sign_table(key_grid(keys(stream), *grid), size) for stream in (Stream.ROW_SIGN, Stream.COLUMN_SIGN)
    )
    return BlockHashes(shape, size, shifts, row_signs, column_signs * inside)


_MANY_PIECES = 2
_FEW_NUMBERS = (
    80_000  # b K K, up to which pieces take less time than rows: 19 samples for K = 64, 1 for K = 256
)

# Nanoseconds on one CPU thread, measured by benchmarks/bench_projection.py; only their ratios matter.
_PRODUCT = 0.01  # one multiplication and addition when an entry is formed
_ADDITION = 0.15  # adding an entry to its place
_ROW = 1500.0  # adding a row of any length, for all samples of a batch of 32
_TRANSFORM = 0.2  # one Fourier transform per K log2(K), including its memory traffic
_PIECES = 0.6  # adding an entry as a part of a piece
_TRANSFORMED = 2.2  # an entry of one factor for one block, of transforms of some entries


def has_many_pieces(shape: tuple[int, int], proj_dim: int) -> bool:
    """Return whether a matrix ``(d_out, d_in)`` is so much larger than K x K that rows take more time than pieces."""
    return shape[1] >= proj_dim and shape[0] * shape[1] >= _MANY_PIECES * proj_dim**2


def fourier_is_cheaper(shape: tuple[int, int], positions: int, *, proj_dim: int) -> bool:
    """Return whether Fourier transforms are faster than forming the gradient ``(d_out, d_in)``, for one sample.

    Example:
        >>> fourier_is_cheaper((1024, 1024), 1, proj_dim=2048), fourier_is_cheaper((768, 192), 64, proj_dim=2048)
        (True, False)
    """
    d_out, d_in = shape
    row_blocks, column_blocks = -(-d_out // proj_dim), -(-d_in // proj_dim)
    factors = 2 * positions * row_blocks * column_blocks
    if has_many_pieces(shape, proj_dim):
        entries = d_out * column_blocks * proj_dim
        return factors * proj_dim * _TRANSFORMED < entries * (2 * positions * _PRODUCT + _PIECES)
    form = d_out * d_in * (2 * positions * _PRODUCT + _ADDITION) + d_out * column_blocks * _ROW / 32
    return (1 + factors) * _TRANSFORM * proj_dim * max(1.0, math.log2(proj_dim)) < form
