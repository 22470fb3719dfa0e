"""Digests of samples, by which a dataset is recognised."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trak_lite.core.fingerprint import tensor_bytes
from trak_lite.data.batches import is_sparse
from trak_lite.errors import InvalidInputError

_PLAIN = (str, bytes, int, float, complex, bool, type(None), date, timedelta)
"""Types hashed by class and repr."""


def digest(value: Any) -> str:
    """Return a digest of a value of any class, in hex."""
    added = hashlib.sha256()
    _digest_value(value, added)
    return added.hexdigest()


def _digest_value(value: Any, digest: hashlib._Hash) -> None:
    """Add a value to a digest, such that different values add different bytes.

    Tensors and arrays are hashed by dtype, shape and bytes, containers by their items in order, other values by class
    and repr. Each entry is prefixed with its kind and its number of items or lengths.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        _add(digest, "array", f"{value.shape}{value.dtype}".encode())
        value = value.tolist()
    elif isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor) and value.is_meta:
        raise InvalidInputError(
            "The data hold tensors on the meta device, which have no values. Load the values."
        )
    if is_sparse(value):
        _add(digest, "sparse", str(value.layout).encode())
        value = value.to_dense()
    if isinstance(value, Tensor):
        _add(digest, "tensor", f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(tensor_bytes(value))
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
        # E.g. an image object: hash its array, because its repr contains a memory address.
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # it has entries, of different shapes
            array = np.empty(0, object)
        if array.dtype == object:
            raise InvalidInputError(
                f"Cannot compute a digest of a {type(value).__name__}, so the dataset cannot be recognised on resume. "
                "Pass Rows(data, name='a unique name of this data')."
            )
        _digest_value(array, digest)


def _add(digest: hashlib._Hash, kind: str, text: bytes) -> None:
    """Add a text and its kind, each prefixed with its length."""
    for part in (kind.encode(), text):
        digest.update(len(part).to_bytes(8, "big") + part)
