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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._devices import full_float32, wide_dtype
from trak_lite._random import row_noise
from trak_lite.data.datasets import Rows, spread_rows
from trak_lite.errors import (
    BusyError,
    MissingStoreError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
)
from trak_lite.featurizing.rows import RowPass, RowWork, featurize_rows
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.methods import EKFAC, Fisher
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.parallel.ranks import Ranks
from trak_lite.parallel.sharing import LazyTable, SharedRows, has_free_rows
from trak_lite.run.tables import (
    FEATURES,
    as_tensor,
    feature_table_spec,
    fisher_folder,
    fisher_paths,
)
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, TableSpec
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.types import Batch, FeatureLayout

__all__ = ["FisherFits", "not_fitted", "require_writable", "split_squares"]

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
    """Gram matrices of the checkpoints of a store, fitted with the settings of a method."""

    store: AbstractFeatureStore
    method: Fisher
    """Its fields set the accuracy of the estimate of the Fisher information."""

    def has(self, path: str, layout: FeatureLayout) -> bool:
        """Whether the checkpoint with this table of train rows is fitted."""
        return self._fitted(path, layout) is not None

    def is_left_alone(self, path: str, layout: FeatureLayout) -> bool:
        """Whether the fit of the checkpoint with this table is incomplete, and no process works on the rest."""
        if self.has(path, layout):
            return False
        drawn, gram = fisher_paths(path, self._fingerprint(path, layout))
        try:
            known = self.store.table_names(fisher_folder(path))
            found = {name: self.store.open_table(name) for name in (drawn, gram) if name in known}
            table = found.get(gram, found.get(drawn))
            return table is None or table.complete or has_free_rows(table)
        except (StoreError, StateError):
            # Another process has completed the matrices and dropped the table that they are computed from.
            if not self.has(path, layout):
                raise
            return False

    def grams(self, path: str, layout: FeatureLayout, *, device: torch.device) -> list[Tensor]:
        """Return the gram matrix of the checkpoint with this table of train rows, segment by segment.

        Raises:
            StateError: If it was not fitted with these settings and segments, or train rows were appended since.
        """
        table = self._fitted(path, layout)
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
            for segment in layout.segments
        ]

    def fit(
        self,
        path: str,
        passes: RowPass,
        rows: Rows,
        task: AbstractModelOutput,
        computer: AbstractGradientComputer,
        layout: FeatureLayout,
        *,
        lazy_table: Callable[[str, TableSpec, Mapping[str, Any]], LazyTable],
        label: str,
        progress: bool | None,
        ranks: Ranks,
        wait: bool,
    ) -> None:
        """Fit the checkpoint that is loaded in the model, or the missing part, together with other processes.

        Args:
            path: Table of its train rows.
            passes: Computes them; their normalisation is none, or one that is linear in the gradient.
            rows: The train rows.
            task: Draws the labels.
            computer: Computes the gradients of :func:`fisher_task`.
            layout: Segments of the stored rows.
            lazy_table: Returns a table of the store that is created when its first rows are put.
            label: Label of the progress bar.
            progress: Show the bar; ``None`` shows it on a terminal only.
            ranks: See :func:`~trak_lite.featurizing.rows.featurize_rows`.
            wait: Wait for chunks that other processes hold. ``False`` returns without them.

        Raises:
            NonFiniteError: If a gradient is NaN or infinite; names the rows.
            ReadOnlyStoreError: If the store was opened for reading.
        """
        require_writable(self.store)

        def stop_when_fitted() -> None:
            if self.has(path, layout):
                raise _FittedByOthersError

        fingerprint = self._fingerprint(path, layout)
        drawn_path, gram_path = fisher_paths(path, fingerprint)
        samples = self.samples(rows, task, computer, layout, passes.projector.proj_dim)
        spec = feature_table_spec(len(samples), layout.width, "float32", fingerprint)
        table = lazy_table(drawn_path, spec, {NEEDED_UNTIL: gram_path})
        work = RowWork(table, replace(passes, rows=samples, computer_for=lambda *_: computer), label)
        try:
            with ranks.checking(stop_when_fitted):
                featurize_rows(work, progress=progress, ranks=ranks, wait=wait)
            drawn = self.store.open_table(drawn_path)
            if drawn.complete:
                self._sum_up(gram_path, drawn, layout, len(rows), passes.device, ranks, wait)
        except (_FittedByOthersError, StoreError, StateError):
            # The process that completes the matrices drops the table that they are computed from, while others use it.
            if not self.has(path, layout):
                raise
        self.sweep(path, layout)

    def samples(
        self,
        rows: Rows,
        task: AbstractModelOutput,
        computer: AbstractGradientComputer,
        layout: FeatureLayout,
        proj_dim: int,
    ) -> _DrawnRows:
        """Return the samples of a fit; the arguments are those of :meth:`fit`."""
        chosen, draws = self.method.num_draws(len(rows), layout, proj_dim)
        return _DrawnRows(rows, task, computer, chosen, draws, self.method.seed)

    def sweep(self, path: str, layout: FeatureLayout) -> None:
        """Drop tables that a kill may have left: inputs of a finished fit, and fits to fewer train rows."""
        if not self.store.writable or not self.has(path, layout):
            return
        _, current = fisher_paths(path, self._fingerprint(path, layout))
        for table in self.store.table_names(fisher_folder(path)):
            with contextlib.suppress(
                BusyError, MissingStoreError
            ):  # another process writes or has dropped it
                if (
                    table != current
                    and self.store.open_table(table).spec.fingerprint["fisher"] == self._record
                ):
                    self.store.drop_table(table)

    def _sum_up(
        self,
        path: str,
        drawn: AbstractRowTable,
        layout: FeatureLayout,
        num_rows: int,
        device: torch.device,
        ranks: Ranks,
        wait: bool,
    ) -> None:
        """Fill the table of gram matrices: row i has the products of feature i with the features of its segment."""
        widest = max(segment.width for segment in layout.segments)
        spec = TableSpec(
            layout.width,
            (Column(_GRAM, widest, "float32"),),  # rounds less than the error of the estimate
            _GRAM_ROWS,
            drawn.spec.fingerprint,
        )
        scale = num_rows / drawn.spec.num_rows  # from drawn samples to a sum over the train rows
        table = self.store.create_table(path, spec)
        with SharedRows(table, _GRAM_ROWS, label="Gram matrices", progress=False, ranks=ranks) as work:
            for wanted in (wanted for batches in work.rounds(wait=wait) for wanted in batches):
                found = scale * _gram_rows(drawn, wanted, layout, device)
                work.put(wanted, {_GRAM: found.float().cpu().numpy()})

    @property
    def _record(self) -> dict[str, Any]:
        return {"version": _VERSION, **self.method.fit_json()}

    def _fitted(self, path: str, layout: FeatureLayout) -> AbstractRowTable | None:
        """Return the table of the checkpoint's gram matrices if it is complete."""
        _, name = fisher_paths(path, self._fingerprint(path, layout))
        if name not in self.store.table_names(fisher_folder(path)):
            return None
        table = self.store.open_table(name)
        return table if table.complete else None

    def _fingerprint(self, path: str, layout: FeatureLayout) -> dict[str, Any]:
        return {
            "fisher": self._record,
            "dataset": self.store.manifest.fingerprint.get("dataset", {}),
            "layout": layout.to_json(),
            "weights": self.store.open_table(path).spec.fingerprint["weights"],
        }


@final
class _FittedByOthersError(Exception):
    """Another process has completed the matrices, so this process need not continue."""


@final
class _DrawnRows:
    """The n samples of a fit: train rows with drawn labels, each train row as often as the method needs."""

    def __init__(
        self,
        rows: Rows,
        task: AbstractModelOutput,
        computer: AbstractGradientComputer,
        chosen: int,
        draws: int,
        seed: int,
    ) -> None:
        self.what, self.batch_size = rows.what, rows.batch_size
        self._rows, self._task, self._computer = rows, task, computer
        self._chosen = spread_rows(len(rows), chosen)
        self._draws, self._seed = draws, seed

    def __len__(self) -> int:
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
        return self._task.sample_labels(ModelCall(self._computer.model), batch, noise)


@torch.no_grad()
def _gram_rows(
    drawn: AbstractRowTable, wanted: NDArray[np.int64], layout: FeatureLayout, device: torch.device
) -> Tensor:
    """Return rows of the gram matrices of drawn features, ``(b, k)``; k of the widest segment, others end in zeros."""
    widest = max(segment.width for segment in layout.segments)
    rows = torch.zeros(len(wanted), widest, dtype=wide_dtype(device), device=device)
    for segment in layout.segments:
        places = np.flatnonzero((wanted >= segment.start) & (wanted < segment.stop))
        if not len(places):
            continue
        columns = torch.from_numpy(wanted[places] - segment.start).to(device)
        total = rows[places[0] : places[-1] + 1, : segment.width]
        for _, block in drawn.blocks(FEATURES):
            for start in range(0, len(block), _PRODUCT_ROWS):
                part = as_tensor(block[start : start + _PRODUCT_ROWS, segment.start : segment.stop], device)
                with full_float32(device):
                    total += part[:, columns].T @ part
    return rows


def split_squares(flat: NDArray[Any], layout: FeatureLayout, *, device: torch.device) -> list[Tensor]:
    """Return the square matrices of all segments from one flat array that holds them in order."""
    sizes = [segment.width**2 for segment in layout.segments]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [
        torch.from_numpy(part.reshape(segment.width, segment.width).copy()).to(device)
        for part, segment in zip(parts, layout.segments, strict=True)
    ]
