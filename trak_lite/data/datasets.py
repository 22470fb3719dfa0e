"""Row access to map-style datasets and DataLoaders: only the requested rows are loaded."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from trak_lite.core.validate import positive_int, require_function, row_numbers, some_of
from trak_lite.data.batches import (
    DEFAULT_BATCH_SIZE,
    flatten_batch,
    move_batch,
    rows_in_batches,
    take_rows,
)
from trak_lite.data.digests import digest
from trak_lite.data.loading import NUM_HELD, Collate, Samples, collated_alone, loaded
from trak_lite.errors import InvalidInputError
from trak_lite.types import Batch

RowNumbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Numbers of rows, ``(n,)``."""
_DIGESTED_ROWS = 1 << 20
"""Row numbers hashed at a time."""
_WORKER_SETTINGS = ("num_workers", "prefetch_factor", "multiprocessing_context", "timeout")
"""Worker settings copied from the user's loader."""
_NUM_PROBES = 64
"""Samples hashed to recognise a dataset. 64 probes miss a 10 % label change with probability 0.1 %."""
_MOST_COLUMNS = 4
"""A list of more arrays is a dataset of samples, also if all have one length."""


class _AsTheyAre:
    """Samples with their own row numbers, which need no preparation by the model."""

    __slots__ = ()

    def numbers(self, rows: RowNumbers) -> RowNumbers:
        return rows

    def prepared(self, batch: Batch, rows: RowNumbers) -> Batch:
        return batch


class Rows(_AsTheyAre):
    """The rows of a dataset in a fixed order: row i is ``dataset[indices[i]]``, independent of any loader's order."""

    def __init__(
        self,
        data: Any,
        *,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        collate: Collate | None = None,
        name: str | None = None,
        what: str = "the dataset",
    ) -> None:
        """Read dataset, collate function and batch size from the data.

        Args:
            data: A map-style dataset (``__getitem__`` and ``__len__``) or a ``DataLoader`` over one.
            indices: Dataset index of every row; ``None`` uses the whole dataset in order.
            batch_size: Samples per pass; ``None`` uses the loader's, or 32.
            collate: Turns a list of samples into a batch; ``None`` uses the loader's, or torch's default.
            name: Name that identifies the data. Data with the same name are treated as the same, and no sample is
                loaded to compare them. With ``None``, data are identified by a digest of up to 64 samples (of all
                samples in a ``TensorDataset``) and, for a custom ``collate``, of each sample collated on its own.
            what: Name of the data in messages.

        Raises:
            InvalidInputError: If rows have no stable index (an iterable dataset, a shuffling loader,
                ``drop_last=True``), the dataset is empty, or an index is out of range.
        """
        self.what, self.name = what, name
        self._given = (data, indices, batch_size, collate)
        if batch_size is not None:
            batch_size = positive_int(batch_size=batch_size)
        require_function(collate=collate)
        self._loading: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}
        self._worker_init: Callable[[int], None] | None = None
        if isinstance(data, DataLoader):
            # First, because the sampler of an IterableDataset would be blamed otherwise.
            _refuse_unindexed(data.dataset, what)
            _refuse_unordered(data, indices, what)
            self.dataset: Any = data.dataset
            batch_size = batch_size or data.batch_size
            collate = data.collate_fn if collate is None else collate
            # Not copied: generator, because worker seeds would be drawn from it; persistent_workers, because our
            # loader is read once; in_order=False, because batches are matched to their rows by order.
            self._loading = {"pin_memory": data.pin_memory and torch.accelerator.is_available()}
            if data.num_workers:
                self._workers = {name: getattr(data, name) for name in _WORKER_SETTINGS}
            self._worker_init = data.worker_init_fn
        else:
            self.dataset = data
        _refuse_unindexed(self.dataset, what)
        self.collate = default_collate if collate is None else collate
        self._samples = Samples(self.dataset, self.collate, self._worker_init, what)
        self.has_batch_size = batch_size is not None
        """Whether the user or a loader has set the batch size."""
        self.batch_size = batch_size or DEFAULT_BATCH_SIZE
        self.held: HeldRows | None = None
        """A few rows of the first loaded batch; ``None`` before a batch is loaded."""
        self.may_pad = self.collate is not default_collate
        """Whether f of a sample may depend on the padding of its batch, as no padded sample was looked at."""
        self._num_computed = 0
        self.may_be_zero = True
        """Whether the user is to be told if all computed rows are zero; once per call."""
        self._size = len(self.dataset)
        self._indices = None if indices is None else row_numbers(self._size, what, indices=indices)
        if len(self) == 0:
            raise InvalidInputError(f"No rows in {what}. There must be at least one.")

    def __len__(self) -> int:
        """Return the number of rows at construction."""
        return self._size if self._indices is None else len(self._indices)

    @property
    def indices(self) -> RowNumbers:
        """Dataset index of every row, ``(N,)`` int64."""
        return self._in_dataset(np.arange(len(self)))

    def is_to_look_at(self) -> bool:
        """Count a batch; return whether it is number 1, 2, 4, ..., whose padding and texts are looked at."""
        self._num_computed += 1
        return self._num_computed & (self._num_computed - 1) == 0

    def require_same_size(self) -> None:
        """Check that the dataset's length has not changed since construction.

        Raises:
            InvalidInputError: If ``indices`` is ``None`` and the length has changed.
        """
        size = len(self.dataset)
        if self._indices is None and size != self._size:
            raise InvalidInputError(
                f"{self.what} had {self._size} rows when the call began, and has {size} now, but the rows must not "
                "change during a call. Pass a dataset of fixed length, such as torch.utils.data.Subset(data, range(n)) "
                "or a TensorDataset of the first rows, and append new rows by another call: "
                "featurize(..., append=True)."
            )

    def batches(self, plan: Iterable[RowNumbers]) -> Iterator[tuple[RowNumbers, Batch]]:
        """Yield each list of rows in the plan with its collated batch; no other row is loaded.

        The plan is consumed lazily in this process; with workers, a few batches ahead.

        Raises:
            InvalidInputError: If the dataset or the collate function raises ``StopIteration``. Their other exceptions
                propagate unchanged, with a note that names the samples.
        """
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            # Same result as collating single samples, without splitting and stacking.
            for rows in plan:
                chosen = torch.from_numpy(self._in_dataset(rows))
                batch = [tensor[chosen.to(tensor.device)] for tensor in self.dataset.tensors]
                self._hold(rows, batch)
                yield rows, batch
            return
        drawn: deque[RowNumbers] = deque()

        def dataset_indices() -> Iterator[list[int]]:
            for rows in plan:
                drawn.append(rows)
                yield self._in_dataset(rows).tolist()

        self._samples.what = self.what
        loader = DataLoader(
            self._samples,
            batch_sampler=dataset_indices(),
            collate_fn=_as_it_is,  # Samples.__getitems__ has collated them
            worker_init_fn=self._samples.init_worker,
            generator=torch.Generator("cpu"),  # or the loader would advance the caller's RNG
            **self._loading,
            **({} if isinstance(plan, list) and len(plan) == 1 else self._workers),
        )
        with torch.device("cpu"):  # whose default device the generator must be on
            loading = iter(loader)
        try:
            for batch in loading:
                self._hold(drawn[0], batch)
                yield drawn.popleft(), batch
        finally:
            # The traceback of an error holds it in a cycle, whose collection waits up to 5 s for each worker.
            getattr(loading, "_shutdown_workers", lambda: None)()

    def moved(self, wanted: RowNumbers, device: torch.device) -> Iterator[tuple[RowNumbers, Batch]]:
        """Yield some rows in batches, each with its batch on a device; see :meth:`batches`."""
        for rows, batch in self.batches(rows_in_batches(wanted, self.batch_size)):
            yield rows, move_batch(batch, device)

    def _hold(self, rows: RowNumbers, batch: Batch) -> None:
        """Keep a copy of a few samples of the first batch whose tensors all have one entry per row."""
        leaves = flatten_batch(batch)[0] if self.held is None else []
        if leaves and all(len(leaf) == len(rows) for leaf in leaves):
            held = rows[:NUM_HELD]
            self.held = HeldRows(self.what, held, take_rows(batch, list(range(len(held)))), len(self))

    def identity(self, *, num_rows: int | None = None) -> dict[str, Any]:
        """Return JSON values that identify the data.

        No row is loaded if the data have a name. Otherwise all tensors of a ``TensorDataset`` are hashed. Of any other
        dataset (including subclasses of ``TensorDataset``) up to 64 evenly spaced samples are hashed, first and last
        included. With a custom collate function, each of these samples is also collated on its own and hashed.

        Args:
            num_rows: Use only the first ``num_rows`` rows: the result is that before the other rows were appended.

        Raises:
            InvalidInputError: If the dataset's length has changed, or a sample's values cannot be hashed.
        """
        self.require_same_size()
        count = len(self) if num_rows is None else min(num_rows, len(self))
        order = hashlib.sha256()
        for start in range(0, count, _DIGESTED_ROWS):
            rows = np.arange(start, min(start + _DIGESTED_ROWS, count))
            order.update(self._in_dataset(rows).astype("<i8").tobytes())
        identity: dict[str, Any] = {"num_rows": count, "indices": order.hexdigest()}
        if self.name is not None:
            return {**identity, "id": self.name}
        if isinstance(self.dataset, TensorDataset):  # cheap enough to be exact
            tensors = self.dataset.tensors
            in_order = self._indices is None
            identity["tensors"] = digest(tuple(t[:num_rows] for t in tensors) if in_order else tensors)
        plain = type(self.dataset) is TensorDataset
        if plain and self.collate is default_collate:
            return identity
        probed = np.unique(np.linspace(0, count - 1, _NUM_PROBES).round().astype(np.int64))
        numbers = self._in_dataset(probed).tolist()
        samples = loaded(self.dataset, numbers, self.what)
        if not plain:
            identity["samples"] = digest(samples)
        if self.collate is not default_collate:
            # Collate one by one: padding depends on the other samples of a batch, and these on the batch size.
            identity["collated"] = digest(collated_alone(self.collate, samples, numbers, self.what))
        return identity

    def _in_dataset(self, rows: RowNumbers) -> RowNumbers:
        return rows if self._indices is None else self._indices[rows]


def rows_of(data: Any, *, what: str, batch_size: int | None = None, collate: Collate | None = None) -> Rows:
    """Return new :class:`Rows` of a dataset, a ``DataLoader`` or :class:`Rows`, with its current length.

    ``batch_size`` and ``collate`` count where the data define none.
    """
    is_rows = isinstance(data, Rows)
    source, indices, own_size, own_collate = data._given if is_rows else (data, None, None, None)
    if own_size is None and not isinstance(source, DataLoader):
        own_size = batch_size
    return Rows(
        source,
        indices=indices,
        batch_size=own_size,
        collate=collate if own_collate is None else own_collate,
        name=data.name if is_rows else None,
        what=what,
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch


def spread_rows(num_rows: int, most: int | None) -> RowNumbers:
    """Return at most ``most`` of ``num_rows`` rows (``None``: all), evenly spaced and starting with row 0."""
    count = num_rows if most is None else min(most, num_rows)
    return np.arange(count, dtype=np.int64) * num_rows // count


def _refuse_unordered(loader: DataLoader[Any], indices: Sequence[int] | None, what: str) -> None:
    if loader.batch_sampler is None:
        raise InvalidInputError(
            f"The loader of {what} has batching switched off (batch_size=None), so its rows cannot be numbered. Pass "
            "its dataset instead."
        )
    if indices is not None:
        return
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
    size = len(loader.dataset)  # type: ignore[arg-type]
    # Not of subclasses, which may have an order of their own.
    in_order = type(sampler) is SequentialSampler or (type(sampler) is range and sampler == range(size))
    if not in_order or len(sampler) != size or type(loader.batch_sampler) is not BatchSampler:
        raise InvalidInputError(
            f"The loader of {what} does not read the dataset in order (sampler: {type(sampler).__name__}). A row is "
            "identified by its index in the dataset: pass the dataset, a loader with shuffle=False, or indices=... "
            "to select and order rows."
        )
    if loader.drop_last:
        raise InvalidInputError(
            f"The loader of {what} has drop_last=True and would leave rows out. Use drop_last=False, pass the "
            "dataset, or select rows with indices=...."
        )


def _refuse_unindexed(dataset: Any, what: str) -> None:
    if isinstance(dataset, IterableDataset):
        raise InvalidInputError(
            f"{what} is an IterableDataset, whose rows have no index. Pass a map-style dataset."
        )
    is_frame = type(dataset).__module__.partition(".")[0] in ("pandas", "polars")
    if is_frame or isinstance(dataset, Tensor | Mapping) or _are_columns(dataset):
        if isinstance(dataset, Mapping) and not any(
            isinstance(part, Tensor | np.ndarray | list) for part in dataset.values()
        ):
            raise InvalidInputError(
                f"{what} is a {type(dataset).__name__} with the keys {some_of(map(repr, dataset))}, not a dataset of "
                "samples. Of several datasets pass one, such as data['train']. Put a single sample into a list."
            )
        parts = dataset if isinstance(dataset, tuple | list) else ()
        of = "arrays" if any(isinstance(part, np.ndarray) for part in parts) else "tensors"
        wrapped = "torch.as_tensor(inputs), torch.as_tensor(labels)"
        if is_frame:
            wrapped = "torch.tensor(frame[inputs].to_numpy()), torch.tensor(frame[label].to_numpy())"
        raise InvalidInputError(
            f"{what} is a {type(dataset).__name__}{'' if is_frame else f' of {of}'}, not a dataset of samples. "
            f"Wrap it: torch.utils.data.TensorDataset({wrapped}), inputs in the dtype of the model."
            f"{' If it is a single sample, put it into a list: [sample].' if isinstance(dataset, Mapping) else ''}"
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InvalidInputError(
            f"{what} is a {type(dataset).__name__} without __getitem__ and __len__. Pass a map-style dataset or a "
            "DataLoader over one."
        )


def _are_columns(dataset: Any) -> bool:
    """Return whether this is ``(X, y)``: a tuple with tensors, or some arrays of one length and different shapes."""
    if not isinstance(dataset, tuple | list):
        return False
    if isinstance(dataset, tuple) and any(isinstance(part, Tensor) for part in dataset):
        return True
    shapes = {tuple(part.shape) for part in dataset if isinstance(part, Tensor | np.ndarray) and part.ndim}
    # A list may hold a few samples, such as sounds of different lengths: then no part has the shape of labels.
    if isinstance(dataset, list) and not any(shape[1:] in ((), (1,)) for shape in shapes):
        return False
    return 1 < len(shapes) == len(dataset) <= _MOST_COLUMNS and len({shape[0] for shape in shapes}) == 1


@final
@dataclass(frozen=True, slots=True, eq=False)
class HeldRows(_AsTheyAre):
    """A few loaded rows of a dataset; later changes to the dataset do not affect them if their batch is a copy."""

    what: str
    """Name of the dataset in messages."""
    held: RowNumbers
    """``(n,)`` row numbers."""
    batch: Batch
    """Their collated batch."""
    num_rows: int
    """Number of rows of the whole dataset."""

    @property
    def batch_size(self) -> int:
        """Number of held rows."""
        return len(self.held)

    def __len__(self) -> int:
        return self.num_rows

    def batches(self, plan: Iterable[RowNumbers]) -> Iterator[tuple[RowNumbers, Batch]]:
        """Yield each list of rows in the plan with a copy of its samples; all rows must be held."""
        position_of = {row: position for position, row in enumerate(self.held.tolist())}
        for rows in plan:
            yield rows, take_rows(self.batch, [position_of[row] for row in rows.tolist()])


def every_nth(count: int, most: int) -> slice:
    """Return a slice that selects at most ``most`` of ``count`` items, evenly spaced from the first."""
    return slice(None, None, -(-count // most))
