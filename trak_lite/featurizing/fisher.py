r"""The Fisher information of a checkpoint in feature space: a kernel for losses with several outputs per sample.

For one label per sample, the curvature w of the loss in f gives the Gauss-Newton matrix. A language model predicts one
label per token: f is a sum over tokens, and no weight of the gradient of the sum gives the curvature
:math:`\sum_t \nabla f_t (\cdot) \nabla f_t^\top` of the single tokens. Labels drawn from the model give it. With g the
gradient of their log-likelihood, :math:`E[g g^\top]` is the Fisher information, which for these losses is the
Gauss-Newton matrix (Martens, arXiv:1412.1193, section 9), because the labels of the tokens are independent given the
text. A fit projects some thousands of these gradients, as train rows are projected, into a table of the store. It then
writes their gram matrices into a second table and drops the first. Both tables are filled chunk by chunk, by any number
of processes, and continue after a kill.

Shapes: N train rows, n drawn samples, K feature width, k columns of one segment.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite._devices import full_float32, wide_dtype
from trak_lite._random import row_noise
from trak_lite.data.datasets import Rows, spread_rows
from trak_lite.errors import BusyError, MissingStoreError, ReadOnlyStoreError, StateError, StoreError
from trak_lite.featurizing.rows import RowWork
from trak_lite.methods import EKFAC, Fisher
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.parallel.sharing import SharedRows, has_free_rows
from trak_lite.run.tables import FEATURES, as_tensor, feature_table_spec, fisher_folder, fisher_paths
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, TableSpec
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.types import Batch, FeatureLayout, Segment

__all__ = ["DrawnRows", "FisherFits", "not_fitted", "require_writable", "split_squares"]

_VERSION = 2
_GRAM = "gram"
_GRAM_ROWS = 512
"""Rows of the gram matrices that are computed at once; a process claims this many."""
_PRODUCT_ROWS = 1024
"""Samples per float32 product; the products are summed in float64."""


def require_writable(store: AbstractFeatureStore) -> None:
    """Raise if a fit cannot be stored.

    Raises:
        ReadOnlyStoreError: If the store was opened for reading.
    """
    if not store.writable:
        raise ReadOnlyStoreError(
            f"The store at {store.path} is open for reading only, and a fit must be stored. Make it writable."
        )


def not_fitted(what: str, method: Fisher | EKFAC) -> StateError:
    """Return the error of a fit that is read before it is made."""
    return StateError(
        f"The {what} is not fitted with the settings {method.fit_json()} on the present train rows. Call "
        "score(targets, method=...) with this method, which fits it."
    )


@final
@dataclass(frozen=True, slots=True)
class FisherFits:
    """Gram matrices of the checkpoints of a store, fitted with the settings of a method.

    A checkpoint is named by the path of its table of train rows.
    """

    store: AbstractFeatureStore
    method: Fisher
    """Its fields set the accuracy of the estimate of the Fisher information."""
    layout: FeatureLayout
    """Segments of the stored rows."""

    def has(self, path: str) -> bool:
        """Whether the checkpoint is fitted."""
        return self._fitted(path) is not None

    def is_left_alone(self, path: str) -> bool:
        """Whether the fit of the checkpoint is incomplete, and no process works on the rest."""
        if self.has(path):
            return False
        try:
            known = self.store.table_names(fisher_folder(path))
            drawn, gram = (
                self.store.open_table(name) if name in known else None
                for name in fisher_paths(path, self._fingerprint(path))
            )
            table = gram or drawn
            return table is None or table.complete or has_free_rows(table)
        except (StoreError, StateError):
            # Another process has completed the matrices and dropped the table that they are computed from.
            if not self.has(path):
                raise
            return False

    def grams(self, path: str, *, device: torch.device) -> list[Tensor]:
        """Return the gram matrix of the checkpoint, segment by segment.

        Raises:
            StateError: If it was not fitted with these settings and segments, or train rows were appended since.
        """
        table = self._fitted(path)
        if table is None:
            raise not_fitted(f"Fisher information of {path}", self.method)
        dtype = wide_dtype(device)
        return [
            torch.cat(
                [
                    as_tensor(rows[:, : segment.width], device).to(dtype)
                    for _, rows in table.blocks(_GRAM, segment.start, segment.stop)
                ]
            )
            for segment in self.layout.segments
        ]

    def drawn_table(self, path: str, num_samples: int) -> tuple[str, TableSpec, dict[str, str]]:
        """Return the path, spec and attributes of the table of the drawn rows of a fit."""
        fingerprint = self._fingerprint(path)
        drawn, gram = fisher_paths(path, fingerprint)
        spec = feature_table_spec(num_samples, self.layout.width, "float32", fingerprint)
        return drawn, spec, {NEEDED_UNTIL: gram}

    def fit(self, path: str, drawn: RowWork, num_rows: int, *, wait: bool) -> None:
        """Fit the checkpoint that is loaded in the model, or the missing part, together with other processes.

        Args:
            path: Its table of train rows.
            drawn: Fills :meth:`drawn_table` with the features of :class:`DrawnRows`; their normalisation is none, or
                one that is linear in the gradient.
            num_rows: N.
            wait: Wait for chunks that other processes hold. ``False`` returns without them.

        Raises:
            NonFiniteError: If a gradient is NaN or infinite; names the rows.
            ReadOnlyStoreError: If the store was opened for reading.
        """
        require_writable(self.store)

        def stop_when_fitted() -> None:
            if self.has(path):
                raise _FittedByOthersError

        try:
            with drawn.ranks.checking(stop_when_fitted):
                drawn.fill(wait=wait)
            drawn_path, gram_path = fisher_paths(path, self._fingerprint(path))
            table = self.store.open_table(drawn_path)
            if table.complete:
                self._sum_up(gram_path, table, num_rows, drawn, wait=wait)
        except (_FittedByOthersError, StoreError, StateError):
            # The process that completes the matrices drops the table that they are computed from, while others use it.
            if not self.has(path):
                raise
        self.sweep(path)

    def sweep(self, path: str) -> None:
        """Drop tables that a kill may have left: inputs of a finished fit, and fits to fewer train rows."""
        if not self.store.writable or not self.has(path):
            return
        _, current = fisher_paths(path, self._fingerprint(path))
        for name in self.store.table_names(fisher_folder(path)):
            # Another process may write it or have dropped it.
            with contextlib.suppress(BusyError, MissingStoreError):
                record = self.store.open_table(name).spec.fingerprint["fisher"]
                if name != current and record == self._record:
                    self.store.drop_table(name)

    @torch.no_grad()
    def _sum_up(
        self, path: str, drawn: AbstractRowTable, num_rows: int, work: RowWork, *, wait: bool
    ) -> None:
        """Fill the table of gram matrices: row i has the products of feature i with the features of its segment.

        Rows of narrower segments than the widest end in zeros.
        """
        widest = max(segment.width for segment in self.layout.segments)
        spec = TableSpec(
            self.layout.width,
            (Column(_GRAM, widest, "float32"),),  # rounds less than the error of the estimate
            _GRAM_ROWS,
            drawn.spec.fingerprint,
        )
        scale = num_rows / drawn.spec.num_rows  # from drawn samples to a sum over the train rows
        device = work.passes.device
        table = self.store.create_table(path, spec)
        with SharedRows(table, _GRAM_ROWS, label="Gram matrices", progress=False, ranks=work.ranks) as shared:
            for wanted in (wanted for batches in shared.rounds(wait=wait) for wanted in batches):
                rows = torch.zeros(len(wanted), widest, dtype=wide_dtype(device), device=device)
                for segment in self.layout.segments:
                    self._add_products(rows, wanted, drawn, segment)
                shared.put(wanted, {_GRAM: (scale * rows).float().cpu().numpy()})

    def _add_products(
        self, rows: Tensor, wanted: NDArray[np.int64], drawn: AbstractRowTable, segment: Segment
    ) -> None:
        """Add the rows of a segment's gram matrix of drawn features that are among ``wanted`` to ``rows``."""
        places = np.flatnonzero((wanted >= segment.start) & (wanted < segment.stop))
        if not len(places):
            return
        device = rows.device
        columns = torch.from_numpy(wanted[places] - segment.start).to(device)
        total = rows[places[0] : places[-1] + 1, : segment.width]
        for _, block in drawn.blocks(FEATURES):
            for start in range(0, len(block), _PRODUCT_ROWS):
                part = as_tensor(block[start : start + _PRODUCT_ROWS, segment.start : segment.stop], device)
                with full_float32(device):
                    total += part[:, columns].T @ part

    @property
    def _record(self) -> dict[str, Any]:
        return {"version": _VERSION, **self.method.fit_json()}

    def _fitted(self, path: str) -> AbstractRowTable | None:
        """Return the table of the checkpoint's gram matrices if it is complete."""
        _, name = fisher_paths(path, self._fingerprint(path))
        if name not in self.store.table_names(fisher_folder(path)):
            return None
        table = self.store.open_table(name)
        return table if table.complete else None

    def _fingerprint(self, path: str) -> dict[str, Any]:
        return {
            "fisher": self._record,
            "dataset": self.store.manifest.fingerprint.get("dataset", {}),
            "layout": self.layout.to_json(),
            "weights": self.store.open_table(path).spec.fingerprint["weights"],
        }


@final
class _FittedByOthersError(Exception):
    """Another process has completed the matrices, so this process need not continue."""


@final
class DrawnRows:
    """The n samples of a fit: train rows with drawn labels, each train row as often as the method needs."""

    def __init__(
        self, rows: Rows, task: AbstractModelOutput, model: nn.Module, chosen: int, draws: int, seed: int
    ) -> None:
        """Choose the rows, and draw labels of each so often; ``task`` draws them from ``model``."""
        self.what, self.batch_size = rows.what, rows.batch_size
        self._rows, self._task, self._model, self._seed = rows, task, model, seed
        self._chosen, self._draws = spread_rows(len(rows), chosen), draws

    def __len__(self) -> int:
        """Return n."""
        return self._draws * len(self._chosen)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the train rows of some drawn samples."""
        return self._chosen[rows % len(self._chosen)]

    def batches(self, plan: Iterable[NDArray[np.int64]]) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield every list of rows in the plan with its batch; labels are those of the data."""
        planned: deque[NDArray[np.int64]] = deque()

        def train_rows() -> Iterator[NDArray[np.int64]]:
            for wanted in plan:
                planned.append(wanted)
                yield self.numbers(wanted)

        # A plan that is a list stays a list, so that one batch starts no worker.
        loaded = self._rows.batches([*train_rows()] if isinstance(plan, list) else train_rows())
        for _, batch in loaded:
            yield planned.popleft(), batch

    @torch.no_grad()
    def prepared(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        """Return the batch with labels drawn from the model."""
        noise = row_noise(self.numbers(rows), seed=self._seed, draw=rows // len(self._chosen))
        return self._task.sample_labels(ModelCall(self._model), batch, noise)


def split_squares(flat: NDArray[Any], layout: FeatureLayout, *, device: torch.device) -> list[Tensor]:
    """Return the square matrices of all segments from one flat array that holds them in order."""
    sizes = [segment.width**2 for segment in layout.segments]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [
        torch.from_numpy(part.reshape(segment.width, segment.width).copy()).to(device)
        for part, segment in zip(parts, layout.segments, strict=True)
    ]
