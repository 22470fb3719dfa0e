"""The ``zarr.json`` documents of a store: writing them, reading and validating them, and the identity of a table.

The store writes these documents itself, so that a document read can be compared with the expected one. The document of
an array follows from the record of its table. The records of tables and of the store (``attributes.trak_lite`` of their
groups) contain a checksum. Plain zarr can read the documents; keys that other tools add elsewhere are ignored.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trak_lite.core.files import write_file
from trak_lite.core.json_text import canonical_json, digest_of, parse_json
from trak_lite.core.validate import some_of
from trak_lite.errors import CorruptStoreError, ManifestMismatchError
from trak_lite.store._columns import StoredArray, TableSpec, dtype_fingerprint
from trak_lite.store._grid import spec_from_json, spec_to_json
from trak_lite.store.manifest import FORMAT, Manifest, StoredValues

CHECKSUM = "checksum"
DROPPED = "dropped"
"""Key of the record that replaces that of a table while its objects are deleted."""
GROWS_TO = "grows_to"
_RECORDED = {"format": int, "fingerprint": dict, "made_with": dict, "origin": str, "id": str}
_NOT_IDENTITY = {"num_rows", GROWS_TO, "attributes", CHECKSUM}
"""Keys of a table's record that may change without changing any row."""
_RESTORE = "Restore the file from a backup, or use another path."


def store_identifier(record: Mapping[str, Any]) -> str:
    """Return the identifier in the record of a store; the first ones that were written have their origin instead."""
    return str(record.get("id", record["origin"]))


def record_checksum(record: Mapping[str, Any]) -> str:
    """Return the checksum of a record: 32 hex digits over its canonical JSON without the checksum."""
    return digest_of({key: value for key, value in record.items() if key != CHECKSUM})[:32]


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the record with its checksum."""
    return {**record, CHECKSUM: record_checksum(record)}


def identity_of(record: Mapping[str, Any]) -> str:
    """Return the identity of the table with this record: 32 hex digits.

    It covers the path, the origin of the store, the fingerprint, the columns and the number of rows per chunk. It does
    not cover the number of rows, which may grow.
    """
    return digest_of({key: value for key, value in record.items() if key not in _NOT_IDENTITY})[:32]


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
    record = {"table": path, "store": origin, **spec_to_json(spec), "attributes": dict(attributes)}
    return {**arrays, "": group_document(sealed(record))}


def group_document(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a group with this record, which is empty for a group of tables."""
    return {"attributes": {"trak_lite": dict(record)}, "zarr_format": 3, "node_type": "group"}


def array_document(array: StoredArray, spec: TableSpec) -> dict[str, Any]:
    """Return the document of an array of a table."""
    column = next((column for column in spec.columns if column.name == array.name), None)  # None for scales
    attributes: dict[str, Any] = {}
    if column is not None and column.quantised:
        note = "NumPy lines that make float32 rows; group is the zarr group that this array is in"
        decoding = {**dtype_fingerprint(column.dtype), "to_float32": list(column.recipe), "note": note}
        attributes["trak_lite"] = decoding
    return {
        **_array(array.dtype, array.shape(spec.num_rows), array.shape(spec.chunk_rows), "."),
        # plain zarr reads missing rows as NaN (quantised: via the scale), never as plausible zeros
        "fill_value": "NaN" if math.isnan(array.fill) else array.fill,
        "attributes": attributes,
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


def own_attributes(document: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the ``trak_lite`` attributes of a group's document (a group of tables: empty), whose checksum is right."""
    attributes = document.get("attributes")
    record = attributes.get("trak_lite") if isinstance(attributes, dict) else None
    kind = document.get("zarr_format"), document.get("node_type")
    if kind != (3, "group") or not isinstance(record, dict):
        raise CorruptStoreError(
            f"{folder}/zarr.json does not describe a zarr group with trak_lite's attributes. {_RESTORE}"
        )
    other_format = (
        "columns" not in record and type(record.get("format")) is int and record["format"] != FORMAT
    )
    if record and not other_format and record.get(CHECKSUM) != record_checksum(record):
        raise CorruptStoreError(
            f"{folder}/zarr.json does not match its checksum: it was changed after it was written. {_RESTORE}"
        )
    return record


def manifest_from_json(record: Mapping[str, Any], root: str) -> Manifest:
    """Return the manifest in a store's ``zarr.json``; ManifestMismatchError if it has the format of another version."""
    version = record.get("format")
    if type(version) is int and version != FORMAT:
        raise ManifestMismatchError(
            f"{root} has the format {version}, this version of trak_lite reads the format {FORMAT}. "
            + (
                "Install a newer trak_lite."
                if version > FORMAT
                else "Featurize again into another path, or use the version that made it."
            )
        )
    wrong = [
        f"{key} is {record[key]!r:.50}" if key in record else f"{key} is missing"
        for key, kind in _RECORDED.items()
        if type(record.get(key)) is not kind and (key != "id" or key in record)
    ]
    if wrong:
        raise CorruptStoreError(
            f"{root}/zarr.json does not describe a trak_lite store: {', '.join(wrong)}. {_RESTORE}"
        )
    where = f"{root}/zarr.json"
    fingerprint, made_with = (StoredValues(record[key], where=where) for key in ("fingerprint", "made_with"))
    return Manifest(fingerprint, made_with)


def attributes_from_json(record: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the table attributes in the record of a table; CorruptStoreError if they are not a mapping."""
    attributes = record.get("attributes", {})
    if not isinstance(attributes, dict):
        raise CorruptStoreError(
            f"{where} records {type(attributes).__name__} as attributes, expected a mapping. {_RESTORE}"
        )
    return dict(attributes)


def table_from_json(record: Mapping[str, Any], path: str, origin: str, *, where: str) -> TableSpec:
    """Return the spec in the record of a table, read from ``where``; CorruptStoreError if it is of another table."""
    if (record.get("table"), record.get("store")) != (path, origin):
        other = "another store" if record.get("table") == path else repr(record.get("table"))
        raise CorruptStoreError(
            f"{where} describes the table of {other}: folders or files were exchanged, renamed or copied. Move the "
            "folder back to where it was; if it was copied from elsewhere, remove it."
        )
    return spec_from_json(record, where=where)


def refuse_undescribed(folder: str, arrays: Sequence[str]) -> None:
    """Raise CorruptStoreError if a table's folder holds arrays that its ``zarr.json`` does not name.

    Their chunks may be valid; they must not be checked against this spec.
    """
    if arrays:
        names = some_of(map(repr, sorted(arrays)))
        raise CorruptStoreError(
            f"{folder}/zarr.json does not name the arrays [{names}] that are in the folder. {_RESTORE}"
        )


def misnamed(folder: str) -> CorruptStoreError:
    """Return the error for a table or group with an invalid name."""
    return CorruptStoreError(
        f"{folder} holds a zarr.json, and no table or group can have the name {os.path.basename(folder)!r}. Give it "
        "the name that it had, or move it out of the store."
    )


def sizes_under_way(record: Mapping[str, Any]) -> list[int]:
    """Return the target row counts of unfinished ``grow_table`` calls."""
    sizes = record.get(GROWS_TO, [])
    return [size for size in sizes if isinstance(size, int)] if isinstance(sizes, list) else []


def check_array(
    document: Mapping[str, Any] | None,
    folder: str,
    array: StoredArray,
    spec: TableSpec,
    *,
    under_way: Sequence[int] = (),
) -> None:
    """Raise unless the ``zarr.json`` of an array equals what the store would write; sizes are relied on when mapping.

    Keys and attributes added by other tools are ignored. Row counts that are ``under_way`` are allowed too; see
    :func:`sizes_under_way`. A missing document (``None``) and every differing key are named in a CorruptStoreError.
    """
    path = f"{folder}/{array.name}/zarr.json"
    if document is None:
        raise CorruptStoreError(f"{path} is missing. Restore it from a backup, or use another path.")
    expected = array_document(array, spec)
    shapes = [list(array.shape(rows)) for rows in (spec.num_rows, *under_way)]
    expected["shape"] = next((shape for shape in shapes if shape == document.get("shape")), shapes[0])
    record = expected.pop("attributes").get("trak_lite")
    differing = _differing(expected, document)
    attributes = document.get("attributes")
    if not isinstance(attributes, dict):
        differing.append(f"attributes is {attributes!r:.100}, expected a mapping")
    elif not _same(record, attributes.get("trak_lite")):
        differing.append(f"attributes.trak_lite is {attributes.get('trak_lite')!r:.100}, expected {record!r}")
    if differing:
        raise CorruptStoreError(f"{path} contradicts its table: {'; '.join(differing)}. {_RESTORE}")


def check_hidden(document: Mapping[str, Any] | None, folder: str) -> None:
    """Raise CorruptStoreError unless the ``zarr.json`` of a hidden folder is what the store would write."""
    expected = hidden_document(os.path.basename(folder).removeprefix("."))
    differing = ["it is missing"] if document is None else _differing(expected, document)
    if differing:
        raise CorruptStoreError(f"{folder}/zarr.json is not as it was written: {'; '.join(differing)}.")


def _differing(expected: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    # zarr refuses a document with other keys, unless their values say that they need not be understood.
    strange = [
        f"{key!r:.100} is not a key of such a file"
        for key, value in document.items()
        if key not in {*expected, "attributes"}
        and not (isinstance(value, dict) and value.get("must_understand") is False)
    ]
    if not strange and _same(expected, {key: document.get(key) for key in expected}):
        return []
    return strange[:10] + [
        f"{key} is {document.get(key)!r:.100}, expected {value!r}"
        for key, value in expected.items()
        if not _same(value, document.get(key))
    ]


def _same(expected: Any, actual: Any) -> bool:
    """Return whether two JSON values are equal; unlike ``==``, distinguishes 1, 1.0 and true."""
    return canonical_json(expected) == canonical_json(actual)


def read_document(get: Callable[[str], bytes | None], folder: str, *, where: str) -> dict[str, Any] | None:
    """Return the ``zarr.json`` of a folder of a store, in which ``get`` reads files; ``None`` without one."""
    key = f"{folder}/zarr.json".lstrip("/")
    text = get(key)
    return None if text is None else parse_zarr_json(text, f"{where}/{key}")


def read_record(get: Callable[[str], bytes | None], folder: str, *, where: str) -> dict[str, Any] | None:
    """Return the record in the ``zarr.json`` of a group, of a table, or (``""``) of the store; ``None`` without one."""
    document = read_document(get, folder, where=where)
    return None if document is None else own_attributes(document, f"{where}/{folder}".rstrip("/"))


def parse_zarr_json(text: bytes, path: str) -> dict[str, Any]:
    """Parse the text of a ``zarr.json``; raise CorruptStoreError if it is not a JSON object."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise CorruptStoreError(
            f"{path} is not JSON ({error}). It was damaged after it was written, and is not created again, because "
            "there are rows. Restore the file from a backup, or use another path."
        ) from error
    if not isinstance(document, dict):
        raise CorruptStoreError(
            f"{path} holds {type(document).__name__}, expected a JSON object. Restore it from a backup."
        )
    return document


def write_document(folder: str, document: Mapping[str, Any]) -> None:
    """Write the ``zarr.json`` of a scratch folder, which :func:`~trak_lite.core.folders.publish_folder` syncs."""
    write_file(f"{folder}/zarr.json", encode_document(document))
