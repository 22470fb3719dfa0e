"""Exact top-k train rows of every target from a stream of score tiles.

Shapes: N train rows, M targets, b rows of a tile, k rows kept per target.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.validate import one_of, positive_int
from trak_lite.errors import InvalidInputError, NonFiniteError, StateError

_FEW: Final = 16
"""Rows that can be among the best are added one by one if they are at most this part of a tile."""


@final
class TopK:
    """Keeps the k most helpful (highest) or most harmful (lowest) train rows of every target.

    The result equals that of a stable sort of the whole ``(N, M)`` matrix: of equal scores the lower row comes
    first. It does not depend on the size or order of the tiles. Memory: ``2 k`` entries per target and
    copies of one tile.

    Example:
        >>> best = TopK(num_targets=1, k=2)
        >>> best.update(0, torch.tensor([[1.0], [3.0]]))
        >>> best.update(2, torch.tensor([[3.0], [2.0]]))
        >>> best.result()
        (tensor([[1, 2]]), tensor([[3., 3.]]))
    """

    def __init__(self, num_targets: int, k: int, *, sign: Literal["helpful", "harmful"] = "helpful") -> None:
        """Keep the best k rows for each of ``num_targets`` targets.

        Raises:
            InvalidInputError: If a number is not a positive integer or the sign is unknown.
        """
        self._num_targets = positive_int(num_targets=num_targets)
        self._k = positive_int(k=k)
        self._factor = 1.0 if one_of(("helpful", "harmful"), sign=sign) == "helpful" else -1.0
        self._seen: list[tuple[int, int]] = []
        self._rows: Tensor | None = None
        self._keys: Tensor | None = None
        self._first_bad: Tensor | None = None
        """Number of the first score that is not finite, counted along the rows, or -1; on an accelerator."""
        self._bad_value = torch.zeros((), device="cpu")

    @torch.no_grad()
    def update(self, first_row: int, block: Tensor) -> None:
        """Add the scores of the train rows ``first_row : first_row + b``.

        Args:
            first_row: Train row of ``block[0]``.
            block: ``(b, M)`` scores; all tiles have the same floating dtype.

        Raises:
            InvalidInputError: If the shape or dtype does not fit, or a row was added before; the state is unchanged.
            NonFiniteError: If a score is NaN or infinite; the state is unchanged. For scores on an accelerator, which
                this call does not wait for, :meth:`result` raises it.
        """
        self._check(first_row, block)
        if block.shape[0] == 0:
            return
        # Adjacent ranges of added rows are merged, so a stream in order needs one entry.
        start, stop = first_row, first_row + block.shape[0]
        touching = [run for run in self._seen if run[1] == start or run[0] == stop]
        self._seen = [run for run in self._seen if run not in touching]
        self._seen.append((min([start, *(a for a, _ in touching)]), max([stop, *(b for _, b in touching)])))
        if self._add_few(first_row, block):
            return
        # Keys are sorted from high to low. Adding 0 turns -0 into 0, so that both are equal on every device.
        keys = block.T.clone(memory_format=torch.contiguous_format).mul_(self._factor).add_(0.0)
        rows, keys = _lowest_rows_of_highest(keys, min(self._k, keys.shape[1]))
        rows += first_row
        if self._rows is not None and self._keys is not None:
            rows, keys = torch.cat([self._rows, rows], 1), torch.cat([self._keys, keys], 1)
        self._rows, self._keys = _best_first(rows, keys, self._k)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return row indices ``(M, k)`` int64 and their scores ``(M, k)``, best first; N columns if k > N.

        Raises:
            StateError: If no row has been added.
            NonFiniteError: If a score on an accelerator was NaN or infinite.
        """
        if self._first_bad is not None and (index := int(self._first_bad)) >= 0:
            raise not_finite(*divmod(index, self._num_targets), float(self._bad_value))
        if self._rows is None or self._keys is None:
            raise StateError("TopK has seen no row. Call update with at least one row of scores first.")
        return self._rows.clone(), self._keys.mul(self._factor).add_(0.0)

    def _add_few(self, first_row: int, block: Tensor) -> bool:
        """Add the rows that reach the present k-th key, if k are kept and few rows do; return whether this was done.

        This reads a tile once, without a copy. On an accelerator it would wait for the number of rows.
        """
        if block.device.type != "cpu" or self._rows is None or self._keys is None:
            return False
        if self._keys.shape[1] < self._k:
            return False
        cut = self._keys[:, -1] * self._factor
        positions, targets = torch.nonzero(block >= cut if self._factor > 0 else block <= cut, as_tuple=True)
        if len(targets) * _FEW > block.numel():
            return False
        if len(targets):
            targets, order = targets.sort(stable=True)
            positions = positions[order]
            counts = torch.bincount(targets, minlength=self._num_targets)
            column = torch.arange(len(targets), device="cpu") - (counts.cumsum(0) - counts)[targets]
            keys = torch.full(
                (self._num_targets, int(counts.max())), -torch.inf, dtype=block.dtype, device="cpu"
            )
            keys[targets, column] = block[positions, targets] * self._factor + 0.0
            rows = torch.zeros(keys.shape, dtype=torch.int64, device="cpu")
            rows[targets, column] = positions + first_row
            rows, keys = torch.cat([self._rows, rows], 1), torch.cat([self._keys, keys], 1)
            self._rows, self._keys = _best_first(rows, keys, self._k)
        return True

    def _check(self, first_row: int, block: Tensor) -> None:
        if block.dim() != 2 or block.shape[1] != self._num_targets or not block.is_floating_point():
            raise InvalidInputError(
                f"Scores must be a floating tensor (rows, {self._num_targets}), "
                f"got shape {tuple(block.shape)} of {block.dtype}."
            )
        if self._keys is not None and block.dtype != self._keys.dtype:
            raise InvalidInputError(
                f"These scores are {block.dtype}, the ones before them {self._keys.dtype}. Give one dtype."
            )
        stop = first_row + block.shape[0]
        for seen_start, seen_stop in self._seen:
            if first_row < seen_stop and seen_start < stop:
                raise InvalidInputError(
                    f"Rows {first_row}:{stop} overlap rows {seen_start}:{seen_stop}, given before. "
                    "Give every row once."
                )
        if first_row < 0:
            raise InvalidInputError(f"first_row must be at least 0, got {first_row}.")
        if block.device.type != "cpu":
            self._note_bad(first_row, block)
        elif not bool(torch.isfinite(block).all()):
            row, target = torch.nonzero(~torch.isfinite(block))[0].tolist()
            raise not_finite(first_row + row, target, float(block[row, target]))

    def _note_bad(self, first_row: int, block: Tensor) -> None:
        """Note the first score that is not finite, without waiting for it."""
        if not block.numel():
            return
        bad = ~torch.isfinite(block).flatten()
        index = bad.int().argmax()
        value = block.flatten().take(index)
        number = torch.where(bad.any(), index + first_row * self._num_targets, -1)
        if self._first_bad is not None:
            earlier = self._first_bad >= 0
            number = torch.where(earlier, self._first_bad, number)
            value = torch.where(earlier, self._bad_value, value)
        self._first_bad, self._bad_value = number, value


def not_finite(row: int, target: int, value: float) -> NonFiniteError:
    """Return the error for a score that is not finite."""
    return NonFiniteError(
        f"The score of train row {row} for target {target} is {value}. "
        "Scores must be finite to be ranked; check the features and the kernel."
    )


def _lowest_rows_of_highest(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return rows and keys, each ``(M, k)``, of the k highest of ``(M, b)`` keys, ascending by row.

    Of keys tied at the cut, the lowest rows. ``torch.topk`` does not define which of equal entries it returns, but its
    values are well-defined: the k-th value is the cut, and keys equal to it are taken in row order.
    """
    cut = keys.topk(k, dim=1).values[:, -1:]
    above = keys > cut
    tied = keys == cut
    room = k - above.sum(1, keepdim=True)
    selected = above | (tied & (tied.cumsum(1, dtype=torch.int32) <= room))
    if keys.device.type == "cpu":
        rows = selected.nonzero()[:, 1].reshape(keys.shape[0], k)
    else:  # nonzero would wait for the number of entries, which is known
        slots = selected.cumsum(1).sub_(1).masked_fill_(~selected, k)
        columns = torch.arange(keys.shape[1], device=keys.device).expand_as(slots)
        rows = slots.new_zeros(keys.shape[0], k + 1).scatter_(1, slots, columns)[:, :k]
    return rows, keys.gather(1, rows)


def _best_first(rows: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort by key from high to low, equal keys by row, and keep k."""
    rows, by_row = rows.sort(dim=1)
    keys, by_key = keys.gather(1, by_row).sort(dim=1, descending=True, stable=True)
    return rows.gather(1, by_key)[:, :k].contiguous(), keys[:, :k].contiguous()


class TopRows(NamedTuple):
    """The strongest train rows, strongest first."""

    indices: NDArray[np.int64]
    """Train row numbers, ``(k,)`` for one target or ``(M, k)`` for all."""
    scores: NDArray[np.float32]
    """Their scores, of the same shape."""
