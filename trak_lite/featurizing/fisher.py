r"""The Fisher information of a checkpoint in the space of its features: a kernel for losses of many outputs.

The curvature w of a sample's loss as a function of f alone is all there is to know where the model predicts one label
per sample. A language model predicts one per token: the gradients of the tokens are added up in f, and no weight of the
sum gives back the curvature :math:`\sum_t \nabla f_t (\cdot) \nabla f_t^\top` that each of them has. Labels that
the model draws itself do: :math:`E[g g^\top]` of the gradient g of their log-likelihood is the Fisher information,
which for these losses is the Gauss-Newton matrix (Martens, arXiv:1412.1193, section 9), as the tokens' labels are
independent given the text. So some thousands of these gradients are projected as the train rows are, into a table of
the store, and then their gram matrices into another one, after which the first is dropped. Both are filled as every
table is: chunk by chunk, by as many processes as there are, continuing after a kill.

Shapes: N train rows, n drawn samples, K feature width, k columns of one segment.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._devices import full_float32
from trak_lite.data.datasets import Rows, spread_rows
from trak_lite.errors import (
    BusyError,
    MissingStoreError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
)
from trak_lite.featurizing.kronecker.noise import row_noise
from trak_lite.featurizing.rows import featurize_rows
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.gradient_computers.normalization import Normalization
from trak_lite.linalg.kernel import accumulation_dtype
from trak_lite.methods import Fisher
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models.sharded import Lockstep
from trak_lite.parallel.sharing import LazyTable, SharedRows, always, has_free_rows, unwatched
from trak_lite.projectors import AbstractProjector
from trak_lite.run.tables import FEATURES, as_tensor, feature_table_spec, fisher_folder
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, Manifest, TableSpec
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.types import Batch, FeatureLayout

__all__ = ["FisherFits", "split_squares"]

_VERSION = 2
_GRAM = "gram"
_GRAM_ROWS = 512
"""Rows of the gram matrices that are made at once: the share that a process takes."""
_PRODUCT_ROWS = 1024
"""Samples whose float32 products are added up in float64 at once."""


@final
class FisherFits:
    """The gram matrices of one store's checkpoints, fitted as a method says."""

    def __init__(self, store: AbstractFeatureStore, method: Fisher) -> None:
        """Hold where they are stored.

        Args:
            store: The store, open.
            method: Its fields say how closely the Fisher information is estimated.
        """
        self._store = store
        self._method = method

    def has(self, path: str, layout: FeatureLayout) -> bool:
        """Whether the checkpoint with this table is fitted."""
        return self._fitted(path, layout) is not None

    def is_left_alone(self, path: str, layout: FeatureLayout) -> bool:
        """Whether the checkpoint with this table is not fitted, and something of it that nobody does."""
        if self.has(path, layout):
            return False
        folder = _folder(path, self._fingerprint(path, layout))
        try:
            found = {name: self._store.open_table(name) for name in self._store.table_names(folder)}
            table = found.get(f"{folder}/gram", found.get(f"{folder}/drawn"))
            return table is None or table.complete or has_free_rows(table)
        except (StoreError, StateError):
            # Others have dropped what the matrices are made of, as they are complete since.
            if not self.has(path, layout):
                raise
            return False

    def grams(self, path: str, layout: FeatureLayout, *, device: torch.device) -> list[Tensor]:
        """Return the gram matrix of one checkpoint, segment by segment.

        Args:
            path: Table of its train rows.
            layout: Segments of the stored rows.
            device: Where to put them.

        Raises:
            StateError: If it was not fitted with these settings and segments, or train rows were appended since.
        """
        table = self._fitted(path, layout)
        if table is None:
            raise StateError(
                f"The Fisher information of {path} was not fitted with {self._method.fit_json()} on the train rows "
                "that there are by now. Call score(targets, method=...) with this method, which fits it."
            )
        dtype = accumulation_dtype(device)
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
        task: AbstractModelOutput,
        computer: AbstractGradientComputer,
        projector: AbstractProjector,
        rows: Rows,
        *,
        layout: FeatureLayout,
        model_id: int,
        device: torch.device,
        label: str,
        progress: bool | None,
        watch: Callable[[], None] = unwatched,
        wait: bool = True,
        leads: Callable[[], bool] = always,
    ) -> None:
        """Fit the checkpoint that the model holds, or what is missing of it, together with whoever else does.

        Args:
            path: Table of its train rows.
            task: Draws the labels.
            computer: Gives the gradients of :func:`fisher_task`.
            projector: What the train rows were projected with.
            rows: The train rows.
            layout: Segments of the stored rows.
            model_id: The checkpoint's number, which the projection depends on.
            device: Where the model is.
            label: What the progress bar is called.
            progress: Show the bar; ``None`` shows it on a terminal only.
            watch: See :class:`~trak_lite.parallel.sharing.SharedRows`.
            wait: Otherwise leave to others what they hold, and return.
            leads: See :class:`~trak_lite.parallel.sharing.SharedRows`.

        Raises:
            NonFiniteError: If a gradient is NaN or infinite; names the rows.
            ReadOnlyStoreError: If the store was opened for reading.
        """
        self.require_writable()

        def watching() -> None:
            watch()
            if self._fitted(path, layout) is not None:
                raise _FittedByOthersError

        fingerprint = self._fingerprint(path, layout)
        folder = _folder(path, fingerprint)
        samples = _DrawnRows(rows, task, computer, self._method, layout)
        spec = feature_table_spec(len(samples), layout.width, "float32", fingerprint)
        try:
            featurize_rows(
                self._late(f"{folder}/drawn", spec, {NEEDED_UNTIL: f"{folder}/{_GRAM}"}),
                samples,
                lambda *_: computer,
                projector,
                model_id=model_id,
                device=device,
                label=label,
                normalization=Normalization(),
                progress=progress,
                watch=watching,
                wait=wait,
                leads=leads,
                lockstep=Lockstep.of(computer.model),
            )
            drawn = self._store.open_table(f"{folder}/drawn")
            if drawn.complete:
                self._sum_up(
                    f"{folder}/gram", drawn, layout, len(rows), device=device, watch=watch, wait=wait
                )
        except (_FittedByOthersError, StoreError, StateError):
            # The process that completes the matrices drops the table they are computed from, also from under others.
            if self._fitted(path, layout) is None:
                raise
        self.sweep(path, layout)

    def sweep(self, path: str, layout: FeatureLayout) -> None:
        """Drop what a finished fit was computed from, and fits to fewer train rows: a kill may have left them."""
        if not self._store.writable or not self.has(path, layout):
            return
        kept = f"{_folder(path, self._fingerprint(path, layout))}/{_GRAM}"
        for table in self._store.table_names(fisher_folder(path)):
            with contextlib.suppress(BusyError, MissingStoreError):  # others write it, or have dropped it
                if table != kept and self._store.open_table(table).spec.fingerprint["fisher"] == self._record:
                    self._store.drop_table(table)

    def _sum_up(
        self,
        path: str,
        drawn: AbstractRowTable,
        layout: FeatureLayout,
        num_rows: int,
        *,
        device: torch.device,
        watch: Callable[[], None],
        wait: bool,
    ) -> None:
        """Fill the table of the gram matrices: row i is what feature i has in common with those of its segment."""
        widest = max(segment.width for segment in layout.segments)
        spec = TableSpec(
            layout.width,
            (Column(_GRAM, widest, "float32"),),  # holds an estimate well below its own error
            _GRAM_ROWS,
            drawn.spec.fingerprint,
        )
        scale = num_rows / drawn.spec.num_rows  # a sum over the train rows
        table = self._store.create_table(path, spec)
        with SharedRows(table, _GRAM_ROWS, label="Gram matrices", progress=False, watch=watch) as work:
            for wanted in (wanted for batches in work.rounds(wait=wait) for wanted in batches):
                found = scale * _gram_rows(drawn, wanted, layout, device)
                work.put(wanted, {_GRAM: found.float().cpu().numpy()})

    def _late(self, path: str, spec: TableSpec, attributes: Mapping[str, Any]) -> LazyTable:
        """Return a table that is created when its first rows are put."""

        def find() -> AbstractRowTable | None:
            return (
                self._store.open_table(path)
                if path in self._store.table_names(path.rpartition("/")[0])
                else None
            )

        return LazyTable(spec, find(), lambda: self._store.create_table(path, spec, attributes), find)

    def require_writable(self) -> None:
        """Refuse a store that a fit could not be kept in.

        Raises:
            ReadOnlyStoreError: If the store was opened for reading.
        """
        if not self._store.writable:
            raise ReadOnlyStoreError(
                f"The store at {self._store.path} was opened for reading, so a fit could not be kept. Make it writable."
            )

    @property
    def _record(self) -> dict[str, Any]:
        return {"version": _VERSION, **self._method.fit_json()}

    def _fitted(self, path: str, layout: FeatureLayout) -> AbstractRowTable | None:
        """Return the table of the checkpoint's gram matrices if it is complete."""
        name = f"{_folder(path, self._fingerprint(path, layout))}/gram"
        if name not in self._store.table_names(fisher_folder(path)):
            return None
        table = self._store.open_table(name)
        return table if table.complete else None

    def _fingerprint(self, path: str, layout: FeatureLayout) -> dict[str, Any]:
        return {
            "fisher": self._record,
            "dataset": self._store.manifest.fingerprint.get("dataset", {}),
            "layout": layout.to_json(),
            "weights": self._store.open_table(path).spec.fingerprint["weights"],
        }


def _folder(path: str, fingerprint: Mapping[str, Any]) -> str:
    """Return the group of tables of a fit; that of another one is another one."""
    return f"{fisher_folder(path)}/{Manifest(fingerprint).digest()[:16]}"


@final
class _FittedByOthersError(Exception):
    """The matrices are complete, and what this process was about to compute is not needed any more."""


@final
class _DrawnRows:
    """The train rows that labels are drawn for, each as often as is needed: n rows, made when they are asked for."""

    def __init__(
        self,
        rows: Rows,
        task: AbstractModelOutput,
        computer: AbstractGradientComputer,
        method: Fisher,
        layout: FeatureLayout,
    ) -> None:
        self.what, self.batch_size = rows.what, rows.batch_size
        self._rows, self._task, self._computer = rows, task, computer
        self._chosen = spread_rows(len(rows), method.num_samples(layout))
        self._seed = method.seed
        self._draws = min(math.ceil(method.num_samples(layout) / len(self._chosen)), method.max_draws)

    def __len__(self) -> int:
        return self._draws * len(self._chosen)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the train rows that drawn ones are of."""
        return self._chosen[rows % len(self._chosen)]

    def batches(self, plan: Iterable[NDArray[np.int64]]) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield every list of rows in the plan with its batch, which has the labels that it was given."""
        planned: deque[NDArray[np.int64]] = deque()

        def train_rows() -> Iterator[NDArray[np.int64]]:
            for wanted in plan:
                planned.append(wanted)
                yield self.numbers(wanted)

        # A plan of one batch stays one: no worker is started for it.
        loaded = self._rows.batches([*train_rows()] if isinstance(plan, list) else train_rows())
        for _, batch in loaded:
            yield planned.popleft(), batch

    @torch.no_grad()
    def prepared(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        """Return the batch with labels that the model draws."""
        noise = row_noise(self.numbers(rows), seed=self._seed, draw=rows // len(self._chosen))
        return self._task.sample_labels(ModelCall(self._computer.model), batch, noise)


@torch.no_grad()
def _gram_rows(
    drawn: AbstractRowTable, wanted: NDArray[np.int64], layout: FeatureLayout, device: torch.device
) -> Tensor:
    """Return rows of the gram matrices of drawn features, ``(b, k)`` with the k of the widest, zeros beyond its own."""
    widest = max(segment.width for segment in layout.segments)
    rows = torch.zeros(len(wanted), widest, dtype=accumulation_dtype(device), device=device)
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
    """Return the square matrices of all segments that follow each other in one array."""
    sizes = [segment.width**2 for segment in layout.segments]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [
        torch.from_numpy(part.reshape(segment.width, segment.width).copy()).to(device)
        for part, segment in zip(parts, layout.segments, strict=True)
    ]
