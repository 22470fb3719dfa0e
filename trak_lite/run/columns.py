"""Stored columns of the train data: a label per row and name, beside the rows that they describe.

The columns are one entry of the store, whose key is the identity of the train data. Columns of other data, or of data
that were appended to since, are therefore not found.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trak_lite._validate import parse_json
from trak_lite.data.columns import Column
from trak_lite.errors import CorruptStoreError, InvalidInputError
from trak_lite.run.tables import COLUMNS, num_train_rows
from trak_lite.store import AbstractFeatureStore, Manifest

__all__ = ["store_columns", "stored_columns"]

logger = logging.getLogger(__name__)

_NAMES = "names"


def store_columns(store: AbstractFeatureStore, columns: Mapping[str, Column]) -> None:
    """Store columns of the train rows. A column of the same name is replaced, others stay unless they are damaged.

    Raises:
        InvalidInputError: If a column does not have one label per train row.
        ReadOnlyStoreError: If the store was opened for reading.
    """
    num_rows = num_train_rows(store.manifest)
    wrong = {name: len(column.places) for name, column in columns.items() if len(column.places) != num_rows}
    if wrong:
        raise InvalidInputError(
            f"The store has {num_rows} train rows, and these columns have other numbers of values: {wrong}."
        )
    try:
        known = stored_columns(store)
    except CorruptStoreError as error:
        logger.warning("All stored columns are replaced. %s", error)
        known = {}
    if all(name in known and _are_equal(known[name], column) for name, column in columns.items()):
        return
    found = {**known, **columns}
    arrays = {_NAMES: _as_bytes(list(found))}
    for number, (name, column) in enumerate(found.items()):
        labels = _plain(column.labels)
        try:
            arrays[f"labels-{number}"] = labels if labels.dtype.kind != "U" else _as_bytes(labels.tolist())
        except ValueError as error:
            raise InvalidInputError(
                f"The column {name!r} has too many or too long texts to be stored ({error}). Leave it out, or pass "
                "a mask or labels to the call that needs it."
            ) from error
        arrays[f"places-{number}"] = column.places.astype(np.uint32)
    store.put_entry(COLUMNS, _key(store), np.frombuffer(save(arrays), np.uint8).copy())


def stored_columns(store: AbstractFeatureStore) -> dict[str, Column]:
    """Return the stored columns of the present train rows by name.

    Raises:
        CorruptStoreError: If the stored entry does not hold columns of the train rows.
    """
    entry = store.entry(COLUMNS, _key(store))
    if entry is None:
        return {}
    try:
        arrays = load(np.asarray(entry, np.uint8).tobytes())
        names = parse_json(arrays[_NAMES].tobytes())
        num_rows = num_train_rows(store.manifest)
        found = {str(name): _column(arrays, number, num_rows) for number, name in enumerate(names)}
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptStoreError(
            f"The columns of the train data in {store.path} cannot be read ({error!r:.200}). Store them again: "
            "featurize(data, columns=...)."
        ) from error
    return found


def _column(arrays: Mapping[str, NDArray[Any]], number: int, num_rows: int) -> Column:
    """Return a stored column; raise ``ValueError`` if it contradicts itself."""
    labels, places = arrays[f"labels-{number}"], arrays[f"places-{number}"].astype(np.int64)
    if labels.dtype == np.uint8:
        texts = parse_json(labels.tobytes())
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("labels that are not text")
        labels = np.array(texts, np.str_)
    if labels.ndim != 1 or places.shape != (num_rows,) or places.max(initial=0) >= len(labels):
        raise ValueError("labels that are not those of the rows")
    return Column(labels, places)


def _are_equal(known: Column, given: Column) -> bool:
    """Return whether a stored column has the values of a given one, so that nothing has to be written."""
    labels = _plain(given.labels)
    same = known.labels.dtype.kind == labels.dtype.kind and np.array_equal(known.labels, labels)
    return same and np.array_equal(known.places, given.places)


def _plain(labels: NDArray[Any]) -> NDArray[Any]:
    """Return booleans as such, numbers as int64, uint64 or float64 (uint8 is that of texts), and others as text."""
    kinds: dict[str, Any] = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}
    kind = labels.dtype.kind
    return labels.astype(kinds[kind]) if kind in kinds else np.array([str(label) for label in labels])


def _as_bytes(texts: list[str]) -> NDArray[np.uint8]:
    """Return texts as JSON; raise ``ValueError`` if they are too long to be read again."""
    content = json.dumps(texts).encode()
    parse_json(content)
    return np.frombuffer(content, np.uint8)


def _key(store: AbstractFeatureStore) -> str:
    """Return a key that identifies the train data."""
    return Manifest({"dataset": store.manifest.fingerprint.get("dataset", {})}).digest()
