"""Datasets by row: any map-style dataset or DataLoader, of which exactly the rows asked for are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trak_lite._validate import positive_int
from trak_lite.data.batches import flatten_batch, take_rows
from trak_lite.errors import InvalidInputError
from trak_lite.types import Batch

__all__ = ["HeldRows", "Rows", "every_nth", "rows_of", "spread_rows"]

_RowNumbers = np.ndarray[Any, np.dtype[np.int64]]

DEFAULT_BATCH_SIZE = 32
_DIGESTED_ROWS = 1 << 20
"""Row numbers that are digested at a time."""
_WORKER_SETTINGS = ("num_workers", "prefetch_factor", "multiprocessing_context", "timeout")
"""What a loader with workers says of them."""
_NUM_PROBES = 64
"""Samples that stand for a dataset. Of 64, one in ten changed labels escapes once in a thousand times; of 3, mostly."""

_NUM_HELD = 8
"""Samples that are kept of what was loaded."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
"""Digested by their class and repr."""


class Rows:
    """The rows of a dataset in a fixed order: row i is ``dataset[indices[i]]``, whatever any loader yields."""

    def __init__(
        self,
        data: Any,
        *,
        indices: Sequence[int] | None = None,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        name: str | None = None,
        what: str = "the dataset",
    ) -> None:
        """Take the dataset, the collation and the batch size out of what the user gave.

        Args:
            data: A map-style dataset (``__getitem__`` and ``__len__``) or a ``DataLoader`` over one.
            indices: Dataset index of every row; ``None`` takes the whole dataset in order.
            batch_size: Samples per pass; ``None`` takes the loader's, or 32.
            collate: Turns a list of samples into a batch; ``None`` takes the loader's, or torch's default.
            name: Your name for the data. Data of one name count as the same, and no sample is loaded to recognise
                them. ``None`` recognises data by a digest of up to 64 samples (of all, in a ``TensorDataset``) and of
                what a ``collate`` of your own makes of each.
            what: How messages name the data.

        Raises:
            InvalidInputError: If rows would have no stable identity (an iterable dataset, a shuffling loader,
                ``drop_last=True``), the dataset is empty, or an index is out of range.
        """
        self.what, self.name = what, name
        self._given = (data, indices, batch_size, collate)
        if batch_size is not None:
            batch_size = positive_int(batch_size=batch_size)
        self._loading: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}
        self._worker_init: Callable[[int], None] | None = None
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
            self._worker_init = data.worker_init_fn
        else:
            self.dataset = data
        _refuse_unindexed(self.dataset, what)
        self.collate = collate or default_collate
        self.batch_size = batch_size or DEFAULT_BATCH_SIZE
        self.held: HeldRows | None = None
        """A few of the rows that were loaded first; ``None`` before any was."""
        self._size = len(self.dataset)
        self._indices = None if indices is None else _checked_indices(indices, self._size, what)
        if len(self) == 0:
            raise InvalidInputError(f"No rows in {what}. There must be at least one.")

    def __len__(self) -> int:
        """Return the number of rows, as it was when this object was made."""
        return self._size if self._indices is None else len(self._indices)

    def require_same_size(self) -> None:
        """Refuse a dataset that has got another length since this object was made.

        Raises:
            InvalidInputError: If rows are all of the dataset, and it has.
        """
        size = len(self.dataset)
        if self._indices is None and size != self._size:
            raise InvalidInputError(
                f"{self.what} had {self._size} rows when the call began, and {size} now: which rows there are must not "
                "change during a call. Pass a dataset of fixed length, or indices=range(...), and append new rows by "
                "another call: featurize(..., append=True)."
            )

    def numbers(self, rows: _RowNumbers) -> _RowNumbers:
        """Return the rows by which messages name some of them: themselves."""
        return rows

    def prepared(self, batch: Batch, rows: _RowNumbers) -> Batch:
        """Return a batch as the model takes it: as it is."""
        return batch

    def batches(self, plan: Iterable[_RowNumbers]) -> Iterator[tuple[_RowNumbers, Batch]]:
        """Yield every list of rows in the plan with its collated batch; no other row is loaded.

        The plan is drawn as batches are loaded, in this process: with workers a few of them ahead.

        Raises:
            InvalidInputError: If the dataset or the collation raises ``StopIteration``. Every other exception of
                theirs is raised as it is, with a note that names the samples.
        """
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            # What collating its samples gives, without taking them apart and stacking them again.
            for rows in plan:
                chosen = torch.from_numpy(self._in_dataset(rows))
                batch = [tensor[chosen.to(tensor.device)] for tensor in self.dataset.tensors]
                self._hold(rows, batch)
                yield rows, batch
            return
        drawn: deque[_RowNumbers] = deque()

        def dataset_indices() -> Iterator[list[int]]:
            for rows in plan:
                drawn.append(rows)
                yield self._in_dataset(rows).tolist()

        samples = _Samples(self.dataset, self.collate, self._worker_init, self.what)
        loader = DataLoader(
            samples,
            batch_sampler=dataset_indices(),
            collate_fn=_as_it_is,  # samples are collated as they are loaded
            worker_init_fn=samples.init_worker,
            # Or the loader would draw from the caller's random numbers; on the device where it draws.
            generator=torch.Generator(torch.get_default_device()),
            **self._loading,
            **({} if isinstance(plan, list) and len(plan) == 1 else self._workers),
        )
        for batch in loader:
            self._hold(drawn[0], batch)
            yield drawn.popleft(), batch

    def _hold(self, rows: _RowNumbers, batch: Batch) -> None:
        """Keep a copy of a few samples of the first batch that is in order."""
        leaves = flatten_batch(batch)[0] if self.held is None else []
        if leaves and all(len(leaf) == len(rows) for leaf in leaves):
            self.held = HeldRows(self, rows[:_NUM_HELD], batch)

    def identity(self, *, num_rows: int | None = None) -> dict[str, Any]:
        """Return what tells this data from other data, as JSON values.

        No row is loaded if the data have a name. Otherwise the tensors of a ``TensorDataset`` are digested whole. Of
        any other dataset, a subclass of it too, up to 64 samples are, evenly spread, first and last included; so is
        what a collate function of one's own makes of each of these.

        Args:
            num_rows: Look at that many rows only, the first ones: what this gave before the others were appended.

        Raises:
            InvalidInputError: If the dataset has got another length, or its samples have no plain values.
        """
        self.require_same_size()
        count = len(self) if num_rows is None else min(num_rows, len(self))
        order = hashlib.sha256()
        for start in range(0, count, _DIGESTED_ROWS):
            rows = np.arange(start, min(start + _DIGESTED_ROWS, count))
            order.update(self._in_dataset(rows).astype("<i8").tobytes())
        found: dict[str, Any] = {"num_rows": count, "indices": order.hexdigest()}
        if self.name is not None:
            return {**found, "id": self.name}
        if isinstance(self.dataset, TensorDataset):  # cheap enough to be exact
            tensors = self.dataset.tensors
            in_order = self._indices is None
            found["tensors"] = _digest(tuple(t[:num_rows] for t in tensors) if in_order else tensors)
        plain = type(self.dataset) is TensorDataset
        if plain and self.collate is default_collate:
            return found
        probed = np.unique(np.linspace(0, count - 1, _NUM_PROBES).round().astype(np.int64))
        samples = []
        for index in self._in_dataset(probed).tolist():
            with _naming([index], self.what):
                samples.append(self.dataset[index])
        if not plain:
            found["samples"] = _digest(samples)
        if self.collate is not default_collate:
            # One by one: what padding makes of a sample depends on those beside it, and these on the batch size.
            found["collated"] = _digest([self.collate([sample]) for sample in samples])
        return found

    def _in_dataset(self, rows: _RowNumbers) -> _RowNumbers:
        """Return the dataset indices of some rows."""
        return rows if self._indices is None else self._indices[rows]


def rows_of(
    data: Any,
    *,
    what: str,
    batch_size: int | None = None,
    collate: Callable[[list[Any]], Batch] | None = None,
) -> Rows:
    """Return the rows of what a user gave for data, as they are now.

    Args:
        data: A dataset, a ``DataLoader`` or :class:`Rows` of one.
        what: How messages name the data.
        batch_size: Samples per pass, where neither ``Rows`` nor a loader says.
        collate: Turns samples into a batch, where ``Rows`` does not say.
    """
    given, indices, own_size, own_collate = (
        data._given if isinstance(data, Rows) else (data, None, None, None)
    )
    if own_size is None and not isinstance(given, DataLoader):
        own_size = batch_size
    return Rows(
        given,
        indices=indices,
        batch_size=own_size,
        collate=own_collate or collate,
        name=data.name if isinstance(data, Rows) else None,
        what=what,
    )


class _Samples(Dataset[Any]):
    """A user's dataset and collation as torch's loader calls them: what they raise names the samples."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Batch],
        worker_init: Callable[[int], None] | None,
        what: str,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._worker_init = worker_init
        self._what = what

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the collated batch of some samples."""
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is None:
            samples = [self._sample(index) for index in indices]
        else:
            with _naming(indices, self._what):
                samples = fetch(indices)
        with _naming(indices, self._what):
            return self._collate(samples)

    def init_worker(self, worker: int) -> None:
        """Prepare a worker process as the user's loader does, with the user's dataset in its worker info."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self._dataset)  # a WorkerInfo is frozen, and holds this object
        if self._worker_init is not None:
            with _naming([], self._what):
                self._worker_init(worker)

    def _sample(self, index: int) -> Any:
        with _naming([index], self._what):
            return self._dataset[index]


@contextmanager
def _naming(indices: Sequence[int], what: str) -> Iterator[None]:
    """Name the samples in what loading them raises; ``StopIteration`` becomes an ``InvalidInputError``.

    A ``for`` loop over a loader takes a ``StopIteration`` out of a dataset for the end of the data.
    """
    samples = f"sample {indices[0]}" if len(indices) == 1 else f"samples {', '.join(map(str, indices))}"
    doing = f"loading {samples} of {what}" if indices else f"a worker was prepared to load {what}"
    try:
        yield
    except StopIteration as error:
        raise InvalidInputError(
            f"StopIteration was raised while {doing}. An exhausted next(...) in the dataset raises it: give next() "
            "a default, or raise an error that says what is missing."
        ) from error
    except Exception as error:
        error.add_note(f"Raised while {doing}.")
        raise


def _as_it_is(batch: Batch) -> Batch:
    return batch


def spread_rows(num_rows: int, most: int | None) -> _RowNumbers:
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


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _digest_value(value, digest)
    return digest.hexdigest()


def _digest_value(value: Any, digest: hashlib._Hash) -> None:
    """Add a value to a digest, such that no two values add the same bytes.

    Tensors and arrays count by dtype, shape and bytes, containers by what they hold, in order, the rest by class and
    repr. What is added is a kind, and the number or the lengths of what belongs to it.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        _add(digest, "array", f"{value.shape}{value.dtype}".encode())
        value = value.tolist()
    elif isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        _add(digest, "tensor", f"{tuple(flat.shape)}{flat.dtype}".encode())
        if flat.numel():
            digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        _add(digest, "mapping", f"{len(value)}".encode())
        for key, item in value.items():
            _digest_value(key if isinstance(key, _PLAIN) else repr(key), digest)
            _digest_value(item, digest)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        _add(digest, "dataclass", f"{len(fields)}".encode())
        for item in fields:
            _digest_value(item.name, digest)
            _digest_value(getattr(value, item.name), digest)
    elif isinstance(value, tuple | list):
        _add(digest, "sequence", f"{len(value)}".encode())
        for item in value:
            _digest_value(item, digest)
    elif isinstance(value, _PLAIN):
        _add(digest, type(value).__name__, repr(value).encode())
    else:
        # An image object or the like: its array says what it shows, its repr would name its address.
        array = np.asarray(value)
        if array.dtype == object:
            raise InvalidInputError(
                f"Cannot tell one {type(value).__name__} from another, so the dataset cannot be recognised on "
                "resume. Pass Rows(data, name='a name of your own for this data')."
            )
        _digest_value(array, digest)


def _add(digest: hashlib._Hash, kind: str, text: bytes) -> None:
    """Add a text and its kind, with their lengths in front."""
    for part in (kind.encode(), text):
        digest.update(len(part).to_bytes(8, "big") + part)


@final
class HeldRows:
    """A few rows of a dataset, loaded: they stay as they are when the dataset is changed, closed or gone."""

    def __init__(self, rows: Rows, held: _RowNumbers, batch: Batch) -> None:
        """Hold copies of some samples of a collated batch.

        Args:
            rows: Where the batch is from.
            held: ``(n,)`` the first rows of the batch, no more than a batch of ``rows``.
            batch: What these and others were collated to.
        """
        self.what, self.batch_size = rows.what, len(held)
        self.held = held
        """Their numbers."""
        self._num_rows = len(rows)
        self._batch = take_rows(batch, list(range(len(held))))

    def __len__(self) -> int:
        """Return the number of rows of the whole dataset."""
        return self._num_rows

    def numbers(self, rows: _RowNumbers) -> _RowNumbers:
        """Return the rows by which messages name some of them: themselves."""
        return rows

    def prepared(self, batch: Batch, rows: _RowNumbers) -> Batch:
        """Return a batch as the model takes it: as it is."""
        return batch

    def batches(self, plan: Iterable[_RowNumbers]) -> Iterator[tuple[_RowNumbers, Batch]]:
        """Yield every list of rows in the plan, all of them held, with a copy of what they were collated to."""
        places = {row: place for place, row in enumerate(self.held.tolist())}
        for rows in plan:
            yield rows, take_rows(self._batch, [places[row] for row in rows.tolist()])


def every_nth(count: int, most: int) -> slice:
    """Return a slice of at most ``most`` of ``count`` things, evenly spaced from the first one."""
    return slice(None, None, -(-count // most))
