"""Products with a Rademacher matrix on CUDA; the kernel draws the signs, and no matrix is stored in memory.

The signs are those of :class:`~trak_lite.projectors.random.hash.RademacherEntries`: entry (i, j) is -1 where bit
``j % 32`` of word (i, j // 32) is set. Sums are float32 without atomic additions, so a repeated call gives the same
bits.

Import this module only for gradients on CUDA, because triton is an optional package.

Shapes: b gradient rows, n entries of a parameter from ``start`` on, K columns (``proj_dim``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trak_lite.projectors._kernels import as_operation
from trak_lite.projectors.random.hash import RademacherEntries, key32, wrap32
from trak_lite.projectors.random.triton_hash import hash_word, jit, rademacher_word, sign_floats

_EXACT_IN_TF32 = frozenset({torch.float16, torch.bfloat16})
"""Gradient dtypes whose values TF32 represents (10 bits of mantissa), as it does signs: tensor cores multiply them
without rounding and add in float32."""

_BLOCK_ROWS = 32
_BLOCK_COLUMNS = 128
_FLOAT64_COLUMNS = 64  # of float64 gradients: with more, registers are spilled
_BLOCK_ENTRIES = 32
_NUM_WARPS = 4
_STEPS = (4, 32, 256)
"""Choices for the number of entry blocks per program. A constant can be pipelined; every choice is compiled."""
_PROGRAMS = 1024  # per block of rows: several per multiprocessor of a large GPU
_MOST_ROWS = 256  # limits the partial sums to 128 MiB


@jit()
def _sign_tile(
    row_words: tl.tensor, words: tl.tensor, block_columns: tl.constexpr, block_entries: tl.constexpr
) -> tl.tensor:
    """Return signs ``(block_columns, block_entries)``: the transposed rows with the given hash words."""
    drawn = rademacher_word(row_words[None, :], words.to(tl.uint32)[:, None])
    shifts = (31 - tl.arange(0, 32)).to(tl.uint32)
    return tl.reshape(sign_floats(drawn[:, None, :], shifts[None, :, None]), (block_columns, block_entries))


@jit(do_not_specialize=["key", "high_key", "start"])
def _signed_product(
    rows_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_entries: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    entry_stride: tl.tensor,
    key: tl.tensor,
    high_key: tl.tensor,
    start: tl.tensor,
    steps: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_entries: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """Add one split of the entries to its partial sums: ``sums[split] += (signs @ rows.T).T``.

    The grid is (blocks of columns, splits, blocks of rows); a split takes ``steps * block_entries`` entries.
    ``start`` holds the low 32 bits of the first entry's index in the matrix.
    """
    split = tl.program_id(1)
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    words = tl.program_id(0) * (block_columns // 32) + tl.arange(0, block_columns // 32)
    rows = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    row_ptrs = rows_ptr + rows.to(tl.int64)[None, :] * row_stride
    sum_ptrs = sums_ptr + (split.to(tl.int64) * num_rows + rows[None, :]) * num_columns + columns[:, None]
    inside = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
    total = tl.load(sum_ptrs, mask=inside, other=0.0)
    for step in tl.range(0, steps):
        entries = (split * steps + step) * block_entries + tl.arange(0, block_entries)
        row_words = hash_word((entries + start).to(tl.uint32), key, high_key)
        signs = _sign_tile(row_words, words, block_columns, block_entries)
        read = (entries < num_entries)[:, None] & (rows < num_rows)[None, :]
        grads = tl.load(row_ptrs + entries.to(tl.int64)[:, None] * entry_stride, mask=read, other=0.0)
        total = tl.dot(signs, grads.to(tl.float32), total, input_precision=precision)
    tl.store(sum_ptrs, total, mask=inside)


@torch.no_grad()
def add_signed_product_(
    total: Tensor, rows: Tensor, key: int, start: int = 0, *, precision: str = "ieee"
) -> None:
    """Add ``rows @ R[start : start + n]`` to ``total``, float32 ``(b, K)``, with R the sign matrix of ``key``.

    The rows ``(b, n)`` have any strides, and are converted to float32. ``precision="tf32"`` rounds them to 10 bits of
    mantissa on the way to the tensor cores. float16 and bfloat16 rows always use these, which do not round them.
    """
    for first in range(0, rows.shape[0], _MOST_ROWS):
        last = first + _MOST_ROWS
        _add_rows_(total[first:last], rows[first:last], key, start, precision)


def _add_rows_(total: Tensor, rows: Tensor, key: int, start: int, precision: str) -> None:
    """Add the product for at most ``_MOST_ROWS`` rows, in launches of limited size."""
    num_entries = rows.shape[1]
    steps, splits = _launch_shape(num_entries, total.shape[1])
    sums = torch.zeros(splits, *total.shape, dtype=torch.float32, device=total.device)
    in_tf32 = precision == "tf32" or rows.dtype in _EXACT_IN_TF32
    done = 0
    while done < num_entries:  # the indices of a launch fit into int32 and have the same high half
        index = start + done
        width = min(num_entries - done, splits * steps * _BLOCK_ENTRIES, (1 << 32) - (index & 0xFFFFFFFF))
        part = rows[:, done : done + width]
        words = wrap32(key), wrap32(key32(key, index >> 32)), wrap32(index)
        _launch_signed_product(sums, [part], (*words, steps, in_tf32))
        done += width
    total.add_(sums.sum(0))


def _launch_shape(num_entries: int, proj_dim: int) -> tuple[int, int]:
    """Return (steps, splits), with enough programs to fill a GPU and not more steps than the entries need."""
    most_splits = max(1, _PROGRAMS // triton.cdiv(proj_dim, _BLOCK_COLUMNS))
    blocks = triton.cdiv(num_entries, _BLOCK_ENTRIES)
    steps = next((steps for steps in _STEPS if steps * most_splits >= blocks), _STEPS[-1])
    return steps, max(1, min(most_splits, triton.cdiv(blocks, steps)))


@as_operation
def _launch_signed_product(sums: Tensor, read: Sequence[Tensor], numbers: Sequence[int]) -> None:
    (rows,) = read
    splits, num_rows, proj_dim = sums.shape
    *words, steps, in_tf32 = numbers
    block_columns = _FLOAT64_COLUMNS if rows.dtype == torch.float64 else _BLOCK_COLUMNS
    grid = (triton.cdiv(proj_dim, block_columns), splits, triton.cdiv(num_rows, _BLOCK_ROWS))
    _signed_product[grid](
        rows,
        sums,
        num_rows,
        rows.shape[1],
        proj_dim,
        *rows.stride(),
        *words,
        steps=steps,
        block_rows=_BLOCK_ROWS,
        block_columns=block_columns,
        block_entries=_BLOCK_ENTRIES,
        precision="tf32" if in_tf32 else "ieee",
        num_warps=_NUM_WARPS,
    )


def are_right(device: torch.device) -> bool:
    """Return whether the kernel draws the signs of the torch operations on a device."""
    num_entries, proj_dim, key = 40, 33, 5
    expected = torch.empty(num_entries, RademacherEntries.width(proj_dim), dtype=torch.float32, device=device)
    RademacherEntries(proj_dim, num_entries, device).draw_(expected, key, 0)
    signs = torch.zeros(num_entries, proj_dim, dtype=torch.float32, device=device)
    add_signed_product_(signs, torch.eye(num_entries, dtype=torch.float32, device=device), key)
    return torch.equal(signs, expected[:, :proj_dim])
