"""Datasets by row: any map-style dataset or DataLoader, of which exactly the rows asked for are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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

from trak_lite.errors import InvalidInputError
from trak_lite.types import Batch

__all__ = ["Rows", "evenly_spread"]

_RowNumbers = np.ndarray[Any, np.dtype[np.int64]]

DEFAULT_BATCH_SIZE = 32
_DIGESTED_ROWS = 1 << 20
"""Row numbers that are digested at a time."""
_WORKER_SETTINGS = ("num_workers", "prefetch_factor", "worker_init_fn", "multiprocessing_context", "timeout")
"""What a loader with workers says of them."""
_NUM_PROBES = 64
"""Samples that stand for a dataset. Of 64, one in ten changed labels escapes once in a thousand times; of 3, mostly."""


class Rows:
    """The rows of a dataset in a fixed order: row i is ``dataset[indices[i]]``, whatever any loader yields."""

    def __init__(
        self,
        data: Any,
        *,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        what: str = "the dataset",
    ) -> None:
        """Take the dataset, the collation and the batch size out of what the user gave.

        Args:
            data: A map-style dataset (``__getitem__`` and ``__len__``) or a ``DataLoader`` over one.
            indices: Dataset index of every row; ``None`` takes the whole dataset in order.
            batch_size: Samples per batch; ``None`` takes the loader's, or 32.
            collate: Turns a list of samples into a batch; ``None`` takes the loader's, or torch's default.
            what: How messages name the data.

        Raises:
            InvalidInputError: If rows would have no stable identity (an iterable dataset, a shuffling loader,
                ``drop_last=True``), the dataset is empty, or an index is out of range.
        """
        self.what = what
        self._loading: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}
        if isinstance(data, DataLoader):
            _refuse_unordered(data, indices, what)
            self.dataset: Any = data.dataset
            batch_size = batch_size or data.batch_size
            collate = collate or data.collate_fn
            # Not the generator, from which the seeds of the workers would be drawn; nor persistent_workers, which is
            # for a loader that is read twice; nor in_order=False, as a batch is known by its turn.
            self._loading = {"pin_memory": data.pin_memory and torch.accelerator.is_available()}
            if data.num_workers:
                self._workers = {name: getattr(data, name) for name in _WORKER_SETTINGS}
        else:
            self.dataset = data
        _refuse_unindexed(self.dataset, what)
        self.collate = collate or default_collate
        self.batch_size = batch_size or DEFAULT_BATCH_SIZE
        self._indices = None if indices is None else _checked_indices(indices, len(self.dataset), what)
        if len(self) == 0:
            raise InvalidInputError(f"No rows in {what}. There must be at least one.")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset) if self._indices is None else len(self._indices)

    def numbers(self, rows: _RowNumbers) -> _RowNumbers:
        """Return the rows by which messages name some of them: themselves."""
        return rows

    def prepared(self, batch: Batch, rows: _RowNumbers) -> Batch:
        """Return a batch as the model takes it: as it is."""
        return batch

    def batches(self, plan: Iterable[_RowNumbers]) -> Iterator[tuple[_RowNumbers, Batch]]:
        """Yield every list of rows in the plan with its collated batch; no other row is loaded.

        The plan is drawn as batches are loaded, in this process: with workers a few of them ahead.
        """
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            # What collating its samples gives, without taking them apart and stacking them again.
            for rows in plan:
                chosen = torch.from_numpy(self._in_dataset(rows))
                yield rows, [tensor[chosen.to(tensor.device)] for tensor in self.dataset.tensors]
            return
        drawn: deque[_RowNumbers] = deque()

        def dataset_indices() -> Iterator[list[int]]:
            for rows in plan:
                drawn.append(rows)
                yield self._in_dataset(rows).tolist()

        loader = DataLoader(
            self.dataset,
            batch_sampler=dataset_indices(),
            collate_fn=self.collate,
            # Or the loader would draw from the caller's random numbers; on the device where it draws.
            generator=torch.Generator(torch.get_default_device()),
            **self._loading,
            **({} if isinstance(plan, list) and len(plan) == 1 else self._workers),
        )
        for batch in loader:
            yield drawn.popleft(), batch

    def identity(self, dataset_id: str | None, *, num_rows: int | None = None) -> dict[str, Any]:
        """Return what tells this data from other data, as JSON values.

        Args:
            dataset_id: The user's own name for the data; no row is loaded then.
                Otherwise the tensors of a ``TensorDataset`` are digested whole, and of any other dataset up to 64
                samples, evenly spread, first and last included.
            num_rows: Look at that many rows only, the first ones: what this gave before the others were appended.
        """
        count = len(self) if num_rows is None else min(num_rows, len(self))
        order = hashlib.sha256()
        for start in range(0, count, _DIGESTED_ROWS):
            rows = np.arange(start, min(start + _DIGESTED_ROWS, count))
            order.update(self._in_dataset(rows).astype("<i8").tobytes())
        whole = {"num_rows": count, "indices": order.hexdigest()}
        if dataset_id is not None:
            return {**whole, "id": dataset_id}
        digest = hashlib.sha256()
        if isinstance(self.dataset, TensorDataset):  # cheap enough to be exact
            tensors = self.dataset.tensors
            in_order = self._indices is None
            _digest_value(tuple(t[:num_rows] for t in tensors) if in_order else tensors, digest)
            return {**whole, "digest": digest.hexdigest()}
        probed = np.unique(np.linspace(0, count - 1, _NUM_PROBES).round().astype(np.int64))
        for index in self._in_dataset(probed).tolist():
            _digest_value(self.dataset[index], digest)
        return {**whole, "probe_digest": digest.hexdigest()}

    def _in_dataset(self, rows: _RowNumbers) -> _RowNumbers:
        """Return the dataset indices of some rows."""
        return rows if self._indices is None else self._indices[rows]


def evenly_spread(num_rows: int, most: int | None) -> _RowNumbers:
    """Return at most ``most`` of ``num_rows`` rows (``None``: all), evenly spread, the first one among them."""
    count = num_rows if most is None else min(most, num_rows)
    return np.arange(count, dtype=np.int64) * num_rows // count


def _refuse_unordered(loader: DataLoader[Any], indices: Sequence[int] | None, what: str) -> None:
    if loader.batch_sampler is None:
        raise InvalidInputError(
            f"The loader of {what} has batching switched off (batch_size=None), so rows cannot be told apart. "
            "Pass its dataset instead."
        )
    if indices is not None:
        return
    sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
    in_order = isinstance(sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    if not in_order or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
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
            f"{what} is an IterableDataset, whose rows have no index to be identified by. Pass a map-style dataset."
        )
    if isinstance(dataset, Tensor | Mapping) or (
        isinstance(dataset, tuple) and any(isinstance(part, Tensor) for part in dataset)
    ):
        raise InvalidInputError(
            f"{what} is a {type(dataset).__name__} of tensors, not a dataset of samples. "
            "Wrap it: torch.utils.data.TensorDataset(inputs, labels)."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InvalidInputError(
            f"{what} is a {type(dataset).__name__} without __getitem__ and __len__. Pass a map-style dataset or a "
            "DataLoader over one."
        )


def _checked_indices(indices: Sequence[int], size: int, what: str) -> _RowNumbers:
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise InvalidInputError(
            f"indices must be a list of integers, got shape {given.shape} of {given.dtype}."
        )
    outside = given[(given < 0) | (given >= size)]
    if outside.size:
        raise InvalidInputError(
            f"indices of {what} hold {outside[:5].tolist()}, but it has rows 0 to {size - 1}. Use indices inside it."
        )
    return given.astype(np.int64)


def _digest_value(value: Any, digest: hashlib._Hash) -> None:
    """Add a sample's contents to a digest: tensors and arrays by bytes, containers in order, the rest by repr."""
    if isinstance(value, np.ndarray):
        value = (
            torch.from_numpy(np.ascontiguousarray(value)) if value.dtype.kind in "biuf" else value.tolist()
        )
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        digest.update(f"{tuple(flat.shape)}{flat.dtype}".encode())
        if flat.numel():
            digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _digest_value(value[key], digest)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            digest.update(item.name.encode())
            _digest_value(getattr(value, item.name), digest)
    elif isinstance(value, tuple | list):
        digest.update(f"{len(value)}".encode())
        for item in value:
            _digest_value(item, digest)
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(repr(value).encode())
    else:
        # An image object or the like: its array says what it shows, its repr would name its address.
        array = np.asarray(value)
        if array.dtype == object:
            raise InvalidInputError(
                f"Cannot tell one {type(value).__name__} from another, so the dataset cannot be recognised on "
                "resume. Pass dataset_id='a name of your own for this data'."
            )
        _digest_value(array, digest)
