"""Scores from feature rows, one block of train rows at a time.

Implements the last step of section 3.2 of Park et al. (arXiv:2303.14186) as one matrix product with targets that
have been multiplied by (H + lambda I)^-1. Other scores from the same rows: gradient dot product (TracIn,
arXiv:2002.08484) of the targets themselves, cosine of unit rows, self-influence.

Shapes: b train rows of a block, M targets, K feature width.
Numerics: products accumulate in float32, or in float64 if one side is float64; never in float16. A block of a
narrower dtype is upcast some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import full_float32, wide_dtype
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.gram import check_rows
from trak_lite.linalg.kernel import SegmentKernel, check_widths
from trak_lite.types import FeatureLayout

_TILE_ROWS: Final = 256
"""Rows upcast at a time on a CPU, whose cache they fit into."""
_TILE_BYTES: Final = 1 << 26
"""Upcast rows on other devices, where a launch takes longer than the product of few rows."""
_SMALL_LAMBDA: Final = 1e-2
"""Smallest lambda for products in float32, as a share of the mean of the eigenvalues that can be above zero."""


def product_dtype(
    lambdas: Iterable[float | None], trace: float, *, rank: int, device: torch.device
) -> torch.dtype:
    """Return the dtype that targets are rounded to before their products with rows: float32, or the widest.

    If the rows do not span the features, a target has a part that is orthogonal to all of them, and that
    (H + lambda I)^-1 divides by lambda; and if they nearly do not, one that it divides by a small eigenvalue. For a
    small lambda, or none, the rounding of this part to float32 may be larger than the scores. ``None`` is the default
    lambda, which is never small.

    Args:
        lambdas: In the unit of the trace.
        trace: Sum of the eigenvalues.
        rank: How many eigenvalues can be above zero.
        device: Device of the products.
    """
    small = any(value is not None and value * rank < _SMALL_LAMBDA * trace for value in lambdas)
    return wide_dtype(device) if small else torch.float32


@torch.no_grad()
def score_block(
    train: Tensor,
    preconditioned: Tensor,
    *,
    out: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Return ``train @ preconditioned.T``: the score of every train row for every target.

    Args:
        train: ``(b, K)`` train features of any floating dtype.
        preconditioned: ``(M, K)`` targets from :func:`~trak_lite.linalg.precondition`, on the same device.
            Cast them to float32 once to score in float32.
        out: ``(b, M)`` float32 or float64 tensor that the scores are added to, for the sum over checkpoints.
        row_weights: ``(b,)`` factors of the train rows (such as q of one checkpoint).

    Returns:
        ``(b, M)``: ``out`` if given, else a new tensor in the product's accumulation dtype.

    Raises:
        InvalidInputError: If shapes, devices or dtypes do not fit.
    """
    fits = train.dim() == preconditioned.dim() == 2 and train.shape[1] == preconditioned.shape[1]
    if not (fits and train.is_floating_point() and preconditioned.is_floating_point()):
        raise InvalidInputError(
            "Train rows and targets must be floating tensors (b, K) and (M, K) of one width, got "
            f"{tuple(train.shape)} of {train.dtype} and {tuple(preconditioned.shape)} of {preconditioned.dtype}."
        )
    if train.device != preconditioned.device:
        raise InvalidInputError(
            f"Train rows are on {train.device} and targets on {preconditioned.device}. Move both to one device."
        )
    if row_weights is not None and row_weights.shape != train.shape[:1]:
        raise InvalidInputError(
            f"row_weights must have one number for each of the {train.shape[0]} train rows, got shape "
            f"{tuple(row_weights.shape)}."
        )
    dtype = torch.promote_types(torch.promote_types(train.dtype, preconditioned.dtype), torch.float32)
    shape = (train.shape[0], preconditioned.shape[0])
    if out is None:
        out = torch.zeros(shape, dtype=dtype, device=train.device)
    elif (
        tuple(out.shape) != shape
        or out.dtype not in (torch.float32, torch.float64)
        or out.device != train.device
    ):
        raise InvalidInputError(
            f"out must be a float32 or float64 tensor {shape} on {train.device}, "
            f"got {tuple(out.shape)} of {out.dtype} on {out.device}."
        )
    columns = preconditioned.to(dtype).T
    with full_float32(train.device):
        for start, rows in _upcast_rows(train, dtype):
            tile = out[start : start + rows.shape[0]]
            if row_weights is not None:
                rows = rows * row_weights[start : start + rows.shape[0], None].to(rows)
            if out.dtype == dtype:
                tile.addmm_(rows, columns)
            else:
                tile.add_(rows @ columns)
    return out


@torch.no_grad()
def self_scores(train: Tensor, kernels: Sequence[SegmentKernel], *, layout: FeatureLayout) -> Tensor:
    r"""Return :math:`\sum_s \phi_s^\top (H_s + \lambda_s I)^{-1} \phi_s` of every train row.

    No (N, N) matrix is formed.

    Args:
        train: ``(b, K)`` train features of any floating dtype.
        kernels: One kernel per segment.
        layout: The segments.

    Returns:
        ``(b,)`` in the kernels' dtype, at least 0.

    Raises:
        InvalidInputError: If rows or kernels do not fit the layout.
    """
    check_rows(train, layout)
    check_widths([kernel.width for kernel in kernels], layout)
    like = kernels[0].factor
    scores = torch.zeros(train.shape[0], dtype=like.dtype, device=like.device)
    step = _tile_rows(train, like.dtype)
    for start in range(0, train.shape[0], step):
        rows = train[start : start + step]
        for segment, kernel in zip(layout.segments, kernels, strict=True):
            scores[start : start + step] += kernel.quadratic_form(rows[:, segment.start : segment.stop])
    return scores


@torch.no_grad()
def unit_segments(rows: Tensor, *, layout: FeatureLayout) -> Tensor:
    """Return rows with each segment scaled to norm 1; a zero segment, or one of subnormal numbers, becomes zero.

    Args:
        rows: ``(b, K)`` of any floating dtype.
        layout: The segments.

    Returns:
        A new ``(b, K)`` tensor, float32 or wider. The dot product of two such rows is the sum of their segments'
        cosines.

    Raises:
        InvalidInputError: If the rows are not of the layout's width.
    """
    check_rows(rows, layout)
    return torch.cat([unit_rows(rows[:, s.start : s.stop]) for s in layout.segments], dim=1)


def standardised(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return a matrix with mean 0 and standard deviation 1 in every column; constant columns are 0.

    Example:
        >>> standardised(np.array([[1.0, 5.0], [3.0, 5.0]])).tolist()
        [[-1.0, 0.0], [1.0, 0.0]]
    """
    centred = np.asarray(values, np.float64) - np.mean(values, axis=0, dtype=np.float64)
    spread = centred.std(axis=0)
    return centred / np.where(spread > 0, spread, 1.0)


def _upcast_rows(block: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first row, rows)`` in ``dtype``: the block itself, or pieces in one reused buffer."""
    if block.dtype == dtype:
        yield 0, block
        return
    step = _tile_rows(block, dtype)
    buffer = torch.empty(min(step, block.shape[0]), block.shape[1], dtype=dtype, device=block.device)
    for start in range(0, block.shape[0], step):
        piece = block[start : start + step]
        rows = buffer[: piece.shape[0]]
        rows.copy_(piece)
        yield start, rows


def _tile_rows(block: Tensor, dtype: torch.dtype) -> int:
    """Return how many rows of a block are upcast at a time."""
    if block.device.type == "cpu":
        return _TILE_ROWS
    return max(_TILE_ROWS, _TILE_BYTES // (dtype.itemsize * max(1, block.shape[1])))


@torch.no_grad()
def unit_rows(rows: Tensor) -> Tensor:
    """Return rows ``(b, k)`` of norm 1, float32 or wider.

    Zero rows stay zero, and subnormal ones, whose direction is rounding, become zero.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    # Divide by the largest entry first, so that no square under- or overflows.
    largest = rows.abs().amax(dim=1, keepdim=True)
    scaled = rows / largest.masked_fill(largest < torch.finfo(rows.dtype).tiny, torch.inf)
    norms = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    unit: Tensor = scaled / norms.masked_fill(norms == 0, 1.0)
    return unit
