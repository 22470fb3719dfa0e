"""Functions shared by all stores: the error for pending rows, content digests and the encoding of single arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from trak_lite._validate import parse_json
from trak_lite.errors import IncompleteStoreError
from trak_lite.store._base import AbstractRowTable, TableSpec
from trak_lite.store._checksums import crc32c
from trak_lite.store._grid import spec_to_json
from trak_lite.store._names import path_parts
from trak_lite.store.manifest import canonical_json

__all__ = [
    "ARRAY_SUFFIX",
    "array_file_name",
    "array_name",
    "content_digest",
    "decode_array",
    "encode_array",
    "encoded_size",
    "raise_incomplete",
]

ARRAY_SUFFIX: Final = ".safetensors"


def raise_incomplete(table: AbstractRowTable, chunk: int, *, where: str) -> NoReturn:
    """Raise the error for a chunk that is not committed."""
    first, stop = table.chunk_range(chunk)
    pending = int((~table.done()[first:stop]).sum())
    raise IncompleteStoreError(
        f"Rows {first} to {stop - 1} (chunk {chunk}) of {where} are not complete: "
        f"{pending} of {stop - first} are pending. Featurize them first; pending() lists them."
    )


def content_digest(spec: TableSpec, checksums: Iterable[Mapping[str, int]]) -> str:
    """Return a digest of a complete table.

    Args:
        spec: Its fingerprint is ignored.
        checksums: For each chunk, the CRC-32C of each array, including padding.
    """
    shape = {key: value for key, value in spec_to_json(spec).items() if key != "fingerprint"}
    digest = hashlib.sha256(canonical_json(shape).encode())
    for columns in checksums:
        digest.update(canonical_json(dict(columns)).encode())
    return digest.hexdigest()


def encode_array(name: str, key: str, array: NDArray[Any]) -> bytes:
    """Return the bytes of a safetensors file that holds an array with its name and key.

    The tensor ``about`` is UTF-8 JSON with the name, the key, and the CRC-32C of name, key, dtype, shape and values.
    """
    values = np.asarray(array, order="C")
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    about = {"name": name, "key": key, "crc32c": _array_checksum(name, key, values)}
    text = json.dumps(about).encode()
    return safetensors.numpy.save({"array": values, "about": np.frombuffer(text, np.uint8)})


def decode_array(content: bytes, name: str, key: str | None = None) -> NDArray[Any] | None:
    """Return the array encoded by :func:`encode_array`; ``None`` if it is damaged or has another name or key."""
    try:
        found = safetensors.numpy.load(content)
        about = parse_json(found["about"])
        array: NDArray[Any] = found["array"]
        stored = (about["name"], about["key"], about["crc32c"])
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        return None
    if len(found) != 2 or stored[0] != name or not isinstance(stored[1], str) or key not in (None, stored[1]):
        return None
    return array if _array_checksum(name, stored[1], array) == stored[2] else None


def encoded_size(head: bytes) -> int | None:
    """Return the file size that a safetensors header implies; ``None`` if ``head`` is not such a header."""
    start = 8 + int.from_bytes(head[:8], "little")
    try:
        parts = parse_json(head[8:start])
        return start + int(max(part["data_offsets"][1] for part in parts.values()))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
        return None


def array_file_name(name: str) -> str:
    """Return the file name of an array; unique because no array name contains ``%``."""
    return "%".join(path_parts(name, what="cache")) + ARRAY_SUFFIX


def array_name(file_name: str) -> str:
    """Return the array name of a file name; the inverse of :func:`array_file_name`."""
    return file_name.removesuffix(ARRAY_SUFFIX).replace("%", "/")


def _array_checksum(name: str, key: str, array: NDArray[Any]) -> int:
    what = json.dumps([name, key, array.dtype.str, array.shape]).encode()
    return crc32c(what, np.ascontiguousarray(array))
