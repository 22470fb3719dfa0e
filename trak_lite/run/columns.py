"""Stored columns of the train data: a label per row and name, beside the rows that they describe.

Each column is one entry of the store, so that processes which store columns of different names at once lose none. Its
key is the identity of the train data. Columns of other data, or of data that were appended to since, are therefore not
found.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trak_lite.core.json_text import digest_of, parse_json
from trak_lite.data.columns import MOST_TEXT_BYTES, Column, short_texts, size_of_texts
from trak_lite.errors import CorruptStoreError, InvalidInputError
from trak_lite.run.tables import COLUMNS, column_path, num_train_rows
from trak_lite.store import AbstractFeatureStore

logger = logging.getLogger(__name__)

_NAME, _LABELS, _PLACES = "name", "labels", "places"
_NUMBERS: Final[dict[str, Any]] = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}
"""Dtypes of stored labels by kind. ``uint8`` is that of texts."""


def store_columns(store: AbstractFeatureStore, columns: Mapping[str, Column]) -> None:
    """Store columns of the train rows. A column of the same name is replaced; damaged ones are removed."""
    num_rows = num_train_rows(store.manifest)
    wrong = {name: len(column.places) for name, column in columns.items() if len(column.places) != num_rows}
    if wrong:
        raise InvalidInputError(
            f"The store has {num_rows} train rows, and these columns have other numbers of values: {wrong}."
        )
    contents = {name: _content(name, column) for name, column in columns.items()}
    for path in store.entry_names(COLUMNS):
        try:
            _stored(store, path)
        except CorruptStoreError as error:
            logger.warning("A column is removed. %s", error)
            store.drop_entry(path)
    for name, content in contents.items():
        stored = store.entry(column_path(name), _key(store))
        if stored is None or not np.array_equal(stored, content):
            store.put_entry(column_path(name), _key(store), content)


def stored_columns(store: AbstractFeatureStore) -> dict[str, Column]:
    """Return the stored columns of the present train rows by name, sorted."""
    columns: dict[str, Column] = {}
    for path in store.entry_names(COLUMNS):
        columns |= _stored(store, path)
    return dict(sorted(columns.items()))


def _stored(store: AbstractFeatureStore, path: str) -> dict[str, Column]:
    """Return the column of an entry by its name, or nothing if it is of other train data."""
    entry = store.entry(path, _key(store))
    if entry is None:
        return {}
    try:
        arrays = load(np.asarray(entry, np.uint8).tobytes())
        return _column(arrays, path, num_train_rows(store.manifest))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptStoreError(
            f"A column of the train data in {store.path} cannot be read ({error!r:.200}). Store the columns again: "
            "featurize(data, columns=...)."
        ) from error


def _column(arrays: Mapping[str, NDArray[Any]], path: str, num_rows: int) -> dict[str, Column]:
    """Return the stored column of an entry by its name; raise ``ValueError`` if it contradicts itself."""
    name, labels, positions = parse_json(arrays[_NAME].tobytes()), arrays[_LABELS], arrays[_PLACES]
    if not isinstance(name, str) or column_path(name) != path:
        raise ValueError("the name of another column")
    if labels.dtype == np.uint8:
        texts = parse_json(labels.tobytes())
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("labels that are not text")
        _check_size(texts)
        labels = short_texts(np.array(texts, object))
    elif labels.dtype not in _NUMBERS.values():
        raise ValueError(f"labels of type {labels.dtype}")
    right = labels.ndim == 1 and positions.dtype == np.uint32 and positions.shape == (num_rows,)
    if not right or positions.max(initial=0) >= len(labels):
        raise ValueError("labels that are not those of the rows")
    return {name: Column(labels, positions.astype(np.int64))}


def _content(name: str, column: Column) -> NDArray[np.uint8]:
    """Return a column as the bytes of its entry."""
    # Booleans as such, numbers as int64, uint64 or float64, and others as texts.
    kind, labels = column.labels.dtype.kind, column.labels
    try:
        if kind in _NUMBERS:
            labels = labels.astype(_NUMBERS[kind])
        else:
            _check_size(column.texts)
            labels = _as_bytes(column.texts)
        arrays = {_NAME: _as_bytes(name), _LABELS: labels, _PLACES: column.places.astype(np.uint32)}
    except ValueError as error:
        raise InvalidInputError(
            f"The column {name!r:.80} has too many or too long texts to be stored ({error}). Leave it out, or pass "
            "a mask or labels to the call that needs it."
        ) from error
    return np.frombuffer(save(arrays), np.uint8).copy()


def _check_size(texts: list[str]) -> None:
    """Raise ``ValueError`` if an array of the texts, in which each has the longest one's length, is too large."""
    size = size_of_texts(texts)
    if size > MOST_TEXT_BYTES:
        raise ValueError(f"{size} bytes, expected at most {MOST_TEXT_BYTES}")


def _as_bytes(value: str | list[str]) -> NDArray[np.uint8]:
    """Return texts as JSON; raise ``ValueError`` if they are too long to be read again."""
    content = json.dumps(value).encode()
    parse_json(content)
    return np.frombuffer(content, np.uint8)


def _key(store: AbstractFeatureStore) -> str:
    return digest_of({"dataset": store.manifest.fingerprint.get("dataset", {})})
