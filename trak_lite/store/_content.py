"""Encoding of single arrays, cached or stored as entries, with a checksum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from trak_lite._validate import parse_json
from trak_lite.store._checksums import crc32c
from trak_lite.store._names import path_parts

__all__ = ["ARRAY_SUFFIX", "DecodedArray", "array_file_name", "decode_array", "encode_array", "encoded_size"]

ARRAY_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class DecodedArray:
    """The content of a file that :func:`encode_array` made."""

    array: NDArray[Any]
    key: str
    bound: tuple[str, ...]
    """Identifier of the store and version of an entry; empty for a cached array."""


def encode_array(name: str, key: str, array: NDArray[Any], bound: tuple[str, ...] = ()) -> bytes:
    """Return the bytes of a safetensors file that holds an array with its name and key, and what it is bound to.

    The tensor ``about`` is UTF-8 JSON with these, and the CRC-32C of them and of dtype, shape and values.
    """
    values = np.asarray(array, order="C")
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    about = {"name": name, "key": key, "crc32c": _array_checksum(name, key, values, bound)}
    text = json.dumps({**about, **({"bound": bound} if bound else {})}).encode()
    return safetensors.numpy.save({"array": values, "about": np.frombuffer(text, np.uint8)})


def decode_array(content: bytes, name: str) -> DecodedArray | None:
    """Return the content of a file of :func:`encode_array`; ``None`` if it is damaged or has another name."""
    try:
        found = safetensors.numpy.load(content)
        about = parse_json(found["about"])
        array, key, bound = found["array"], about["key"], tuple(about.get("bound", ()))
        right = (about["name"], len(found), len(bound)) in ((name, 2, 0), (name, 2, 2))
        if right and all(isinstance(text, str) for text in (key, *bound)):
            right = _array_checksum(name, key, array, bound) == about["crc32c"]
            return DecodedArray(array, key, bound) if right else None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None


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


def _array_checksum(name: str, key: str, array: NDArray[Any], bound: tuple[str, ...]) -> int:
    what = json.dumps([name, key, array.dtype.str, array.shape, *bound]).encode()
    return crc32c(what, np.ascontiguousarray(array))
