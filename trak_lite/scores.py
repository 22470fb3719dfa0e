"""Scores: the (N, M) result, left on disk until somebody looks at a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trak_lite._validate import one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.score_tiles import SCORES
from trak_lite.scoring import TopK
from trak_lite.store import AbstractRowTable

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["Scores", "TopRows"]


class TopRows(NamedTuple):
    """The strongest train rows, strongest first."""

    indices: NDArray[np.int64]
    """Train row numbers, ``(k,)`` for one target or ``(M, k)`` for all."""
    scores: NDArray[np.float32]
    """Their scores, of the same shape."""


class Scores:
    """Attribution scores of N train rows for M targets, read from disk as they are asked for.

    Entry (i, j) says how much train row i raises the model output of target j: positive is helpful, negative
    is harmful. Rows are train rows, columns are targets.
    """

    def __init__(
        self,
        table: AbstractRowTable,
        *,
        name: str,
        settings: dict[str, Any],
        self_influence: Callable[[], NDArray[np.float32]],
        where: str | None,
    ) -> None:
        """Hold a complete score table.

        Args:
            table: Column ``scores`` of shape ``(N, M)``.
            name: Name of the target set.
            settings: How the scores were made.
            self_influence: Computes the score of every train row for itself.
            where: Path of the store, ``None`` in memory.
        """
        self._table = table
        self._self_influence = self_influence
        self._where = where
        self.name = name
        self.settings = settings

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, M)``: train rows, targets."""
        width = self._table.spec.columns[0].width
        return self._table.spec.num_rows, 0 if width is None else width

    def __len__(self) -> int:
        """Return the number of train rows."""
        return self.shape[0]

    def __repr__(self) -> str:
        """Return sizes, settings and place on a few lines."""
        num_rows, num_targets = self.shape
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return (
            f"Scores({self.name!r}: {num_rows} train rows x {num_targets} targets)\n"
            f"  made with {settings}\n"
            f"  kept in {self._where or 'memory'}"
        )

    def top(
        self, k: int, *, target: int | None = None, sign: Literal["helpful", "harmful"] = "helpful"
    ) -> TopRows:
        """Return the k most helpful (or harmful) train rows.

        Args:
            k: Rows to return; all N if there are fewer.
            target: One target; ``None`` answers for all of them.
            sign: ``"helpful"`` takes the largest scores, ``"harmful"`` the smallest.

        Returns:
            Indices and scores, ``(k,)`` for one target or ``(M, k)`` for all; equal scores by lower row first.

        Raises:
            InvalidInputError: If ``k`` or ``sign`` is unknown, or there is no such target.
        """
        positive_int(k=k)
        one_of(("helpful", "harmful"), sign=sign)
        columns = slice(None) if target is None else slice(self._target(target), self._target(target) + 1)
        best = TopK(self.shape[1] if target is None else 1, k, sign=sign)
        for start, rows in self._table.chunks(SCORES):
            best.update(start, torch.from_numpy(np.array(rows[:, columns])))
        indices, values = (tensor.numpy() for tensor in best.result())
        return TopRows(indices, values) if target is None else TopRows(indices[0], values[0])

    def _target(self, target: int) -> int:
        count = self.shape[1]
        if (
            isinstance(target, bool)
            or not isinstance(target, int | np.integer)
            or not -count <= target < count
        ):
            raise InvalidInputError(
                f"There is no target {target}: {self.name!r} has targets 0 to {count - 1}."
            )
        return int(target) % count

    def numpy(self) -> NDArray[np.float32]:
        """Return all scores as one new float32 array ``(N, M)``."""
        return self._table.read(SCORES)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Let ``np.asarray(scores)`` read all scores."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def rows(self, indices: list[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of some train rows, ``(len(indices), M)``."""
        return self._table.read_rows(SCORES, indices)

    def self_influence(self) -> NDArray[np.float32]:
        r"""Return the score of every train row for itself, ``(N,)`` float32.

        :math:`\frac1C\sum_c \phi_i^\top (H_c + \lambda I)^{-1} \phi_i \cdot \frac1C\sum_c q_{c,i}`: large where the
        model needed the row itself to fit it, as for a wrong label.
        """
        return self._self_influence()

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with train rows as index and targets as columns (needs pandas)."""
        import pandas as pd

        num_rows, num_targets = self.shape
        return pd.DataFrame(
            self.numpy(),
            index=pd.RangeIndex(num_rows, name="train_row"),
            columns=pd.RangeIndex(num_targets, name="target"),
        )

    def to_xarray(self) -> xr.DataArray:
        """Return a DataArray with dimensions ``train_row`` and ``target`` and the settings as attributes."""
        import xarray as xr

        num_rows, num_targets = self.shape
        return xr.DataArray(
            self.numpy(),
            dims=("train_row", "target"),
            coords={"train_row": np.arange(num_rows), "target": np.arange(num_targets)},
            name=self.name,
            attrs={key: str(value) for key, value in self.settings.items()},
        )
