"""What the ``zarr.json`` files say: read with care, because everything else is trusted after them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from trak_lite._validate import parse_json
from trak_lite.errors import CorruptStoreError, ManifestMismatchError
from trak_lite.store._base import TableSpec
from trak_lite.store._columns import StoredArray
from trak_lite.store._files import named_errors, read_file
from trak_lite.store._folders import names_in
from trak_lite.store._grid import spec_from_json
from trak_lite.store.manifest import FORMAT, Manifest

__all__ = [
    "GROWS_TO",
    "attributes_from_json",
    "check_array",
    "check_array_document",
    "manifest_from_json",
    "misnamed",
    "own_attributes",
    "parse_zarr_json",
    "read_attributes",
    "read_zarr_json",
    "refuse_lost",
    "refuse_misnamed",
    "refuse_swapped",
    "refuse_undescribed",
    "sizes_under_way",
]

GROWS_TO = "grows_to"
_MOST_BYTES = 64 << 20
_RESTORE = "Restore the file from a backup, or use another path."


def read_attributes(folder: str) -> dict[str, Any] | None:
    """Return what a zarr group records under ``trak_lite``, ``None`` where the folder holds no ``zarr.json``.

    Raises:
        CorruptStoreError: If the file is not the JSON of a zarr group.
    """
    document = read_zarr_json(folder)
    return None if document is None else own_attributes(document, folder)


def own_attributes(document: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return what the ``zarr.json`` of a group records under ``trak_lite``.

    Raises:
        CorruptStoreError: If it is not the JSON of a zarr group.
    """
    attributes = document.get("attributes", {})
    own = attributes.get("trak_lite", {}) if isinstance(attributes, dict) else None
    if document.get("node_type") != "group" or not isinstance(own, dict):
        raise CorruptStoreError(
            f"{folder}/zarr.json does not describe a zarr group with trak_lite's attributes. "
            "Restore the file from a backup, or use another path."
        )
    return own


def manifest_from_json(record: Mapping[str, Any], root: str) -> Manifest:
    """Return the manifest that a store's ``zarr.json`` records.

    Raises:
        ManifestMismatchError: If a newer version of trak_lite made the store.
        CorruptStoreError: If something else stands there.
    """
    version = record.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ManifestMismatchError(
            f"{root} has the format {version}, this version of trak_lite reads up to {FORMAT}. "
            "Install a newer trak_lite."
        )
    fingerprint, made_with = record.get("fingerprint"), record.get("made_with", {})
    if version != FORMAT or not isinstance(fingerprint, dict) or not isinstance(made_with, dict):
        raise CorruptStoreError(
            f"{root}/zarr.json does not describe a trak_lite store: format is {version!r}, fingerprint is "
            f"{type(fingerprint).__name__}. Restore the file from a backup, or use another path."
        )
    return Manifest(fingerprint, made_with, version)


def attributes_from_json(record: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return what a table's ``zarr.json`` records beside its shape.

    Raises:
        CorruptStoreError: If something else stands there.
    """
    found = record.get("attributes", {})
    if not isinstance(found, dict):
        raise CorruptStoreError(
            f"{where} records {type(found).__name__} as attributes, expected a mapping. {_RESTORE}"
        )
    return dict(found)


def refuse_swapped(folder: str, record: Mapping[str, Any]) -> None:
    """Raise if a folder is not what its ``zarr.json`` says: a table with its arrays, or a group of tables.

    Raises:
        CorruptStoreError: If it holds something else.
    """
    path = f"{folder}/zarr.json"
    inside = {
        name: read_zarr_json(f"{folder}/{name}") for name in names_in(folder) if not name.startswith(".")
    }
    kinds = {
        name: str(document.get("node_type")) for name, document in inside.items() if document is not None
    }
    if "columns" in record:
        arrays = {array.name for array in spec_from_json(record, where=path).arrays}
        said, fits = "a table", arrays <= kinds.keys() and "group" not in kinds.values()
    else:
        said, fits = "a group of tables", not record and "array" not in kinds.values()
    if not fits:
        raise CorruptStoreError(
            f"{path} describes {said}, and the folder holds {kinds or 'nothing'}. {_RESTORE}"
        )


def refuse_undescribed(folder: str, spec: TableSpec) -> None:
    """Raise if a table's folder holds an array that its ``zarr.json`` does not name: it has lost a column.

    Raises:
        CorruptStoreError: Names the arrays. Its chunks are sound, and must not be judged by what is left.
    """
    others = set(names_in(folder)) - {array.name for array in spec.arrays}
    arrays = sorted(name for name in others if os.path.lexists(f"{folder}/{name}/zarr.json"))
    if arrays:
        raise CorruptStoreError(
            f"{folder}/zarr.json does not name the arrays {arrays} that are in the folder. {_RESTORE}"
        )


def refuse_lost(folder: str) -> None:
    """Raise if a folder without a ``zarr.json`` holds what had one above it: tables would be missed without a word.

    Raises:
        CorruptStoreError: If something in it has a ``zarr.json``.
    """
    if any(os.path.lexists(f"{folder}/{name}/zarr.json") for name in names_in(folder)):
        raise CorruptStoreError(
            f"{folder}/zarr.json is missing, and there are tables or arrays in the folder. {_RESTORE}"
        )


def refuse_misnamed(folder: str) -> None:
    """Raise if a folder whose name no table can have holds a ``zarr.json``: its rows would be missed without a word.

    Raises:
        CorruptStoreError: If it does.
    """
    if os.path.lexists(f"{folder}/zarr.json"):
        raise misnamed(folder)


def misnamed(folder: str) -> CorruptStoreError:
    """Return the error of a table or group that has a name which none can have."""
    return CorruptStoreError(
        f"{folder} holds a zarr.json, and no table or group can have the name {os.path.basename(folder)!r}. Give it "
        "the name that it had, or move it out of the store."
    )


def sizes_under_way(record: Mapping[str, Any]) -> list[int]:
    """Return the numbers of rows to which the growing of a table was begun and not finished."""
    sizes = record.get(GROWS_TO, [])
    return [size for size in sizes if isinstance(size, int)] if isinstance(sizes, list) else []


def check_array(folder: str, array: StoredArray, spec: TableSpec, *, under_way: Sequence[int] = ()) -> None:
    """Raise unless an array is laid out as the table says: sizes are known before anything is mapped.

    Args:
        folder: Of the table.
        array: One of the table's.
        spec: Shape of the table.
        under_way: Numbers of rows that the array may have instead; see :func:`sizes_under_way`.

    Raises:
        CorruptStoreError: Names every differing key.
    """
    found = read_zarr_json(f"{folder}/{array.name}")
    check_array_document(found, folder, array, spec, under_way=under_way)


def check_array_document(
    found: Mapping[str, Any] | None,
    folder: str,
    array: StoredArray,
    spec: TableSpec,
    *,
    under_way: Sequence[int] = (),
) -> None:
    """Raise unless the ``zarr.json`` of an array says what the table says; see :func:`check_array`.

    Raises:
        CorruptStoreError: Names every differing key.
    """
    path = f"{folder}/{array.name}/zarr.json"
    if found is None:
        raise CorruptStoreError(f"{path} is missing. Restore it from a backup, or use another path.")
    shapes = [list(array.shape(rows)) for rows in (spec.num_rows, *under_way)]
    one_byte = array.stored_dtype.itemsize == 1  # has no byte order
    expected = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": next((shape for shape in shapes if shape == found.get("shape")), shapes[0]),
        "data_type": array.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(array.shape(spec.chunk_rows))},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", **({} if one_byte else {"configuration": {"endian": "little"}})}],
        "fill_value": "NaN" if math.isnan(array.fill) else array.fill,
    }
    differing = [key for key, value in expected.items() if found.get(key) != value]
    if differing:
        raise CorruptStoreError(
            f"{path} contradicts its table: "
            + "; ".join(f"{key} is {found.get(key)!r}, expected {expected[key]!r}" for key in differing)
            + ". Restore the file from a backup, or use another path."
        )


def read_zarr_json(folder: str) -> dict[str, Any] | None:
    """Return the ``zarr.json`` of a folder, ``None`` where there is none.

    Raises:
        CorruptStoreError: If it is not a JSON object.
    """
    path = os.path.join(folder, "zarr.json")
    with named_errors("Reading", path):
        try:
            text = read_file(path, most=_MOST_BYTES, remedy="Restore it from a backup, or use another path.")
        except (FileNotFoundError, NotADirectoryError):
            return None
    return parse_zarr_json(text, path)


def parse_zarr_json(text: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object that a ``zarr.json`` holds.

    Raises:
        CorruptStoreError: If it is not a JSON object.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise CorruptStoreError(
            f"{path} is not JSON ({error}). It was damaged after it was written; it is not made anew over the rows. "
            "Restore the file from a backup, or use another path."
        ) from error
    if not isinstance(document, dict):
        raise CorruptStoreError(
            f"{path} holds {type(document).__name__}, expected a JSON object. Restore it from a backup."
        )
    return document
