"""The ``zarr.json`` documents that a store writes, and the identity of a table.

The store writes these documents itself, so that a document read can be compared with the expected one. The document of
an array follows from the record of its table. The records of tables and of the store (``attributes.trak_lite`` of their
groups) contain a checksum. Plain zarr can read the documents; keys that other tools add elsewhere are ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from trak_lite.store._base import TableSpec
from trak_lite.store._columns import Column, StoredArray, dtype_fingerprint
from trak_lite.store._grid import spec_to_json
from trak_lite.store.manifest import FORMAT, Manifest, canonical_json

__all__ = [
    "CHECKSUM",
    "DROPPED",
    "GROWS_TO",
    "array_document",
    "encode_document",
    "group_document",
    "hidden_document",
    "identity_of",
    "record_checksum",
    "sealed",
    "store_record",
    "table_documents",
    "table_identity",
]

CHECKSUM = "checksum"
DROPPED = "dropped"
"""Key of the record that replaces that of a table while its objects are deleted."""
GROWS_TO = "grows_to"
_NOT_IDENTITY = {"num_rows", GROWS_TO, "attributes", CHECKSUM}
"""Keys of a table's record that may change without changing any row."""


def record_checksum(record: Mapping[str, Any]) -> str:
    """Return the checksum of a record: 32 hex digits over its canonical JSON without the checksum.

    Example:
        >>> record_checksum({"a": 1, "checksum": "x"}) == record_checksum({"a": 1})
        True
    """
    return _digest({key: value for key, value in record.items() if key != CHECKSUM})


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the record with its checksum."""
    return {**record, CHECKSUM: record_checksum(record)}


def identity_of(record: Mapping[str, Any]) -> str:
    """Return the identity of the table with this record: 32 hex digits.

    It covers the path, the origin of the store, the fingerprint, the columns and the number of rows per chunk. It does
    not cover the number of rows, which may grow.
    """
    return _digest({key: value for key, value in record.items() if key not in _NOT_IDENTITY})


def table_identity(path: str, origin: str, spec: TableSpec) -> str:
    """Return the identity of a table; see :func:`identity_of`.

    Args:
        path: Path of the table.
        origin: Origin of the store; see :func:`store_record`.
        spec: Shape and fingerprint of the table.
    """
    return identity_of(_bare_record(path, origin, spec))


def store_record(manifest: Manifest) -> dict[str, Any]:
    """Return the record of a new store.

    Its ``origin`` is the digest of the fingerprint that the store was created with, recorded in every table. Its ``id``
    is recorded in every entry, because stores of the same fingerprint have different verdicts and columns.
    """
    return sealed(
        {
            "format": FORMAT,
            "fingerprint": dict(manifest.fingerprint),
            "made_with": dict(manifest.made_with),
            "origin": manifest.digest(),
            "id": uuid.uuid4().hex,
        }
    )


def table_documents(
    path: str, origin: str, spec: TableSpec, attributes: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the documents of a table by subfolder; the table's own (``""``) is last."""
    arrays = {array.name: array_document(array, spec) for array in spec.arrays}
    record = sealed({**_bare_record(path, origin, spec), "attributes": dict(attributes)})
    return {**arrays, "": group_document(record)}


def group_document(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a group with this record, which is empty for a group of tables."""
    return {"attributes": {"trak_lite": dict(record)}, "zarr_format": 3, "node_type": "group"}


def array_document(array: StoredArray, spec: TableSpec) -> dict[str, Any]:
    """Return the document of an array of a table."""
    column = next((column for column in spec.columns if column.name == array.name), None)  # None for scales
    return {
        **_array(array.dtype, array.shape(spec.num_rows), array.shape(spec.chunk_rows), "."),
        # plain zarr reads missing rows as NaN (quantised: via the scale), never as plausible zeros
        "fill_value": "NaN" if math.isnan(array.fill) else array.fill,
        "attributes": {} if column is None else _how_to_read(column),
        "dimension_names": ["row"] if array.width is None else ["row", f"{array.name}_dim"],
    }


def hidden_document(name: str) -> dict[str, Any]:
    """Return the document of an empty array, which keeps zarr tools from listing the folder."""
    return {**_array("uint8", (0,), (1,), "/"), "dimension_names": [name]}


def _array(dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...], separator: str) -> dict[str, Any]:
    one_byte = np.dtype(dtype).itemsize == 1  # a one-byte dtype has no byte order
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", **({} if one_byte else {"configuration": {"endian": "little"}})}],
        "attributes": {},
        "dimension_names": [],
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return a document as the bytes of a ``zarr.json``."""
    return json.dumps(document, indent=2).encode()


def _bare_record(path: str, origin: str, spec: TableSpec) -> dict[str, Any]:
    return {"table": path, "store": origin, **spec_to_json(spec)}


def _how_to_read(column: Column) -> dict[str, Any]:
    """Return the attributes that explain how to decode a quantised array; empty if not quantised."""
    if not column.quantised:
        return {}
    note = "NumPy lines that make float32 rows; group is the zarr group that this array is in"
    return {"trak_lite": {**dtype_fingerprint(column.dtype), "to_float32": list(column.recipe), "note": note}}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()[:32]
