"""What every implementation of a table says the same way: pending rows, the digest of the contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NoReturn

from trak_lite.errors import IncompleteStoreError
from trak_lite.store._base import AbstractRowTable, TableSpec
from trak_lite.store._grid import spec_to_json
from trak_lite.store.manifest import canonical_json

__all__ = ["content_digest", "raise_incomplete"]


def raise_incomplete(table: AbstractRowTable, chunk: int, *, where: str) -> NoReturn:
    """Raise the error of a chunk that cannot be read yet."""
    first, stop = table.chunk_range(chunk)
    pending = int((~table.done()[first:stop]).sum())
    raise IncompleteStoreError(
        f"Rows {first} to {stop - 1} (chunk {chunk}) of {where} are not complete: "
        f"{pending} of {stop - first} are pending. Featurize them first; pending() lists them."
    )


def content_digest(spec: TableSpec, checksums: Iterable[Mapping[str, int]]) -> str:
    """Return a digest of a complete table: its shape and the CRC-32C of every column of every chunk, padded."""
    shape = {key: value for key, value in spec_to_json(spec).items() if key != "fingerprint"}
    digest = hashlib.sha256(canonical_json(shape).encode())
    for columns in checksums:
        digest.update(canonical_json(dict(columns)).encode())
    return digest.hexdigest()
