"""Rows that a user computes batch by batch: which of a checkpoint are pending, and which a batch has.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.validate import positive_int
from trak_lite.data.batches import flatten_batch
from trak_lite.data.column_marks import ColumnMarks
from trak_lite.errors import AssertedInputError, InvalidInputError
from trak_lite.run.repeats import PROBED_ROWS
from trak_lite.store import AbstractRowTable, TableSpec
from trak_lite.store.sharing import LazyTable
from trak_lite.types import Batch

RowIndices: TypeAlias = Sequence[int] | NDArray[Any] | Tensor
"""Row numbers of the samples of a batch: distinct integers in any order."""

SAMPLE_KEYS = "sample_keys"


@final
class Cursor:
    """The rows of one checkpoint: which are pending, and the row of the next batch without ``inds``."""

    def __init__(self, path: str, spec: TableSpec, label: str) -> None:
        self.path = path
        self.spec = spec
        """Without the state of the task, which may change until the first batch."""
        self.label = label
        self.marks = ColumnMarks()
        self.position = 0
        self.table: LazyTable | None = None
        self.state: str | None = None
        self.waiting: NDArray[np.bool_] = np.ones(spec.num_rows, np.bool_)
        self.num_revisited = 0
        """Batches with done rows so far."""
        self._keys: NDArray[np.float32] = np.full(spec.num_rows, np.nan, np.float32)

    def done_rows(
        self, table: AbstractRowTable | None, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]] | None:
        """Return a few done rows of the batches 0, 1, 2, 4, 8, ... that have some, from one chunk; else ``None``."""
        done, number = rows[~self.waiting[rows]], self.num_revisited
        if number & (number - 1) or table is None or not len(done):
            return None
        stored, values = table.read_done(int(done[0]) // self.spec.chunk_rows)
        chosen = np.flatnonzero(np.isin(stored, done))[:PROBED_ROWS]
        some = {name: column[chosen] for name, column in values.items()}
        return (stored[chosen], some) if len(chosen) else None

    def rows(self, inds: RowIndices | None, num_samples: int | None, batch_rows: int) -> NDArray[np.int64]:
        """Return the rows of a batch: those that are named, or the next ones."""
        if (inds is None) == (num_samples is None):
            raise AssertedInputError(  # the message is the original's, because scripts match it
                "Exactly one of num_samples and inds should be specified, got "
                + ("neither." if inds is None else "both.")
            )
        if inds is None:
            rows = self.position + np.arange(positive_int(num_samples=num_samples))
        else:
            rows = np.asarray(inds.cpu() if isinstance(inds, Tensor) else inds).reshape(-1)
            if not np.issubdtype(rows.dtype, np.integer):
                raise InvalidInputError(f"inds must be integers, got {rows.dtype}.")
            rows = rows.astype(np.int64)
        if len(rows) != batch_rows:
            argument = f"num_samples is {len(rows)}" if inds is None else f"inds has {len(rows)} rows"
            raise InvalidInputError(
                f"The batch has {batch_rows} samples, but {argument}. "
                + (f"Pass num_samples={batch_rows}." if inds is None else "Give one row per sample.")
            )
        outside = rows[(rows < 0) | (rows >= self.spec.num_rows)]
        if outside.size:
            raise InvalidInputError(
                f"Rows {outside[:5].tolist()} of {self.label} do not exist: there are rows 0 to "
                f"{self.spec.num_rows - 1}. Check the number of rows. To start again at row 0, load the checkpoint."
            )
        values, counts = np.unique(rows, return_counts=True)
        if len(values) < len(rows):
            raise InvalidInputError(
                f"Rows {values[counts > 1][:5].tolist()} are given more than once. Give each row once."
            )
        return rows

    def refuse_other_samples(
        self, table: AbstractRowTable | None, rows: NDArray[np.int64], keys: NDArray[np.float32]
    ) -> None:
        """Raise if complete stored targets were computed from other samples than those seen so far."""
        all_keys = self._keys.copy()
        all_keys[rows] = keys
        there = table.read(SAMPLE_KEYS) if table is not None and table.complete else all_keys
        differing = np.flatnonzero(~np.isnan(all_keys) & (all_keys != there)).tolist()
        if differing:
            raise InvalidInputError(
                f"Rows {differing[:5]} of {self.label} were scored before with other samples. One experiment is one "
                "set of targets: use another exp_name for another set. If it is the same set and its samples change "
                "from one access to the next (augmentation, noise), switch the randomness off."
            )
        self._keys = all_keys


def refuse_other_targets(exp_name: str, targets: Mapping[int, AbstractRowTable]) -> None:
    """Raise if the complete targets of an experiment, by model id, are not the same samples in the same order."""
    (first, table), *others = targets.items()
    keys = table.read(SAMPLE_KEYS)
    for model_id, other in others:
        differing = np.flatnonzero(other.read(SAMPLE_KEYS) != keys).tolist()
        if differing:
            raise InvalidInputError(
                f"Targets {differing[:5]} of experiment {exp_name!r} are other samples for model id {model_id} than "
                f"for {first}, or padded to other lengths. Scores are means over model ids: score the same batches of "
                "targets for each (no shuffling, no augmentation), under another exp_name."
            )


def sample_keys(batch: Batch) -> NDArray[np.float32]:
    """Return 24 bits of the checksum of every sample ``(B,)``; float32 holds them exactly."""
    leaves, _ = flatten_batch(batch)
    arrays = [leaf.detach().cpu().contiguous().reshape(len(leaf), *leaf.shape[1:], 1) for leaf in leaves]
    keys = [0] * len(leaves[0])
    for array in arrays:
        rows = array.view(torch.uint8).numpy()
        keys = [zlib.crc32(row.tobytes(), key) for row, key in zip(rows, keys, strict=True)]
    return np.array([key & 0xFFFFFF for key in keys], np.float32)
