"""Gram matrices of feature rows, summed over blocks of rows in one buffer.

Shapes: N train rows, b rows of a block, K feature width, k columns of one segment.
Numerics: float64, or float32 on a device without float64.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

from trak_lite.core.devices import full_float32, to_device, wide_dtype
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.types import FeatureLayout

__all__ = ["GramAccumulator"]

_GRAM_ROWS: Final = 256
"""Rows upcast at a time: enough for a fast matrix product on a CPU, small compared with a chunk."""
_ACCELERATOR_ROWS: Final = 1024
"""Rows per product on an accelerator."""
_PANEL: Final = 256
"""Rows of a product of a matrix with its transpose that are computed at once, up to the diagonal."""


@final
class GramAccumulator:
    r"""Accumulates :math:`H = \sum_i w_i \phi_i \phi_i^\top` for each segment; rows are upcast in one small buffer.

    The result depends on the order of the rows but not on their division into blocks: rows are regrouped before
    they are multiplied, so the result is bitwise the same.

    Example:
        >>> sums = GramAccumulator(FeatureLayout.joint(2), torch.device("cpu"))
        >>> sums.add(torch.eye(2), torch.tensor([4.0, 1.0]))
        >>> sums.result()
        [tensor([[4., 0.],
                [0., 1.]], dtype=torch.float64)]
    """

    def __init__(
        self,
        layout: FeatureLayout,
        device: torch.device,
        *,
        first_row: int = 0,
        num_rows: int | None = None,
    ) -> None:
        """Start at zero.

        Args:
            layout: The segments of a row.
            device: Device of the rows and of the results.
            first_row: The first row's number in messages.
            num_rows: N, if the weighted rows of segments that :func:`keeps_rows` are to be returned instead of their
                gram matrices.
        """
        dtype = wide_dtype(device)
        self._next_row = first_row
        self._layout = layout
        heights = [
            s.width if num_rows is None or not keeps_rows(s.width, num_rows) else num_rows
            for s in layout.segments
        ]
        self._grams = [
            torch.zeros(height, s.width, dtype=dtype, device=device)
            for height, s in zip(heights, layout.segments, strict=True)
        ]
        self._multiplied = 0
        self._rows = _GRAM_ROWS if device.type == "cpu" else _ACCELERATOR_ROWS
        self._buffer = torch.empty(self._rows, layout.width, dtype=dtype, device=device)
        self._filled = 0

    @torch.no_grad()
    def add(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add rows ``(b, K)`` of any floating dtype with weights ``(b,)`` of at least 0; ``None`` for 1 each.

        Raises:
            InvalidInputError: If the rows have a wrong width, device or dtype, or weights are negative or not one per
                row.
            NonFiniteError: If a weight is NaN or infinite.
        """
        check_rows(rows, self._layout)
        roots: Tensor | None = None
        if weights is not None:
            roots = _root_weights(weights, len(rows), self._next_row).to(self._buffer.dtype)
        self._next_row += len(rows)
        if rows.device != self._buffer.device:
            raise InvalidInputError(
                f"The rows are on {rows.device}, the sums on {self._buffer.device}. Move the rows there."
            )
        if roots is not None:
            roots = to_device(roots, rows.device)
        start = 0
        while start < rows.shape[0]:
            stop = min(start + self._rows - self._filled, rows.shape[0])
            part = self._buffer[self._filled : self._filled + stop - start]
            part.copy_(rows[start:stop])
            if roots is not None:
                part.mul_(roots[start:stop, None])
            self._filled += stop - start
            start = stop
            if self._filled == self._rows:
                self._multiply()

    def result(self) -> list[Tensor]:
        """Return a ``(k, k)`` gram matrix per segment; call it once, after the last rows."""
        if self._filled:
            self._multiply()
        for matrix in self._grams:
            if matrix.shape[0] == matrix.shape[1]:
                # Copy what is below the diagonal panels to where it belongs above them.
                for start in range(_PANEL, len(matrix), _PANEL):
                    stop = start + _PANEL
                    matrix[:start, start:stop] = matrix[start:stop, :start].T
        return self._grams

    def _multiply(self) -> None:
        start, self._multiplied = self._multiplied, self._multiplied + self._filled
        for segment, matrix in zip(self._layout.segments, self._grams, strict=True):
            columns = self._buffer[: self._filled, segment.start : segment.stop]
            if len(matrix) < segment.width:
                matrix[start : self._multiplied] = columns
            else:
                _add_lower_product_(matrix, columns.T)
        self._filled = 0


def keeps_rows(width: int, num_rows: int) -> bool:
    """Return whether a kernel of this width is factorised on the side of the rows, because they are few."""
    return 4 * num_rows <= 3 * width


def _add_lower_product_(total: Tensor, rows: Tensor) -> None:
    """Add ``rows @ rows.T`` to ``total``, in panels that end at the diagonal: what is above them is not computed."""
    # On an accelerator one product takes less time than panels of half as many operations.
    panel_rows = _PANEL if rows.device.type == "cpu" else max(len(rows), 1)
    with full_float32(rows.device):
        for start in range(0, len(rows), panel_rows):
            stop = min(start + panel_rows, len(rows))
            total[start:stop, :stop].addmm_(rows[start:stop], rows[:stop].T)


def lower_product(rows: Tensor) -> Tensor:
    """Return a matrix whose lower triangle is that of ``rows @ rows.T``."""
    total = rows.new_zeros(len(rows), len(rows))
    _add_lower_product_(total, rows)
    return total


def _root_weights(weights: Tensor, num_rows: int, first_row: int) -> Tensor:
    """Check the weights and return their square roots, so that H is a product of weighted rows."""
    if weights.dim() != 1 or not weights.is_floating_point():
        raise InvalidInputError(
            f"weights must be a floating tensor (N,), got shape {tuple(weights.shape)} of {weights.dtype}."
        )
    if len(weights) != num_rows:
        raise InvalidInputError(
            f"There are {len(weights)} weights but {num_rows} rows. Give one weight per row, in the order of the rows."
        )
    bad = torch.nonzero(~torch.isfinite(weights)).flatten()
    if len(bad):
        raise NonFiniteError(
            f"{len(bad)} of {len(weights)} weights are NaN or infinite, the first at row {first_row + int(bad[0])}. "
            "Check the loss curvature of these samples, or use weighting='none' (Attributor: "
            "method=TRAK(damping=None, layout='stored'))."
        )
    bad = torch.nonzero(weights < 0).flatten()
    if len(bad):
        raise InvalidInputError(
            f"{len(bad)} of {len(weights)} weights are negative, the first at row {first_row + int(bad[0])} "
            f"({float(weights[bad[0]]):.3g}). A loss that is not convex in the output has no "
            "Gauss-Newton kernel; use weighting='none' (Attributor: method=TRAK(damping=None, layout='stored'))."
        )
    return weights.to(wide_dtype(weights.device)).sqrt()


def check_rows(block: Tensor, layout: FeatureLayout) -> None:
    """Raise if feature rows are not a floating ``(rows, K)`` tensor of the layout's width."""
    if block.dim() != 2 or block.shape[1] != layout.width or not block.is_floating_point():
        raise InvalidInputError(
            f"Feature rows must be a floating tensor (rows, {layout.width}), "
            f"got shape {tuple(block.shape)} of {block.dtype}."
        )
