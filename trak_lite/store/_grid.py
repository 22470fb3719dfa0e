"""Chunk grid of a table: spec validation, chunk size, and the mapping of rows to chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trak_lite.core.json_text import canonical_json, check_depth
from trak_lite.core.validate import one_of, positive_int
from trak_lite.errors import CorruptStoreError, InvalidInputError
from trak_lite.store._columns import DTYPES, Column, TableSpec, dtype_fingerprint
from trak_lite.store._names import check_name
from trak_lite.store.manifest import Manifest, StoredValues

_CHUNK_BYTES = 64 << 20
_FEWEST_CHUNK_ROWS = 32
_FEWEST_ROWS_PER_COMMIT = 256  # a commit waits for the disk three times
CHEAP_CHUNK_BYTES = 1 << 20
_CHUNKS_OF_A_SMALL_TABLE = 64
_MOST_ROWS = 1 << 32
_MOST_CHUNK_ROWS = 1 << 26  # lists of this length and of _MOST_ROWS are held in memory
_MOST_CHUNK_BYTES = 1 << 46  # limit of memory mapping
_DEEPEST = 96  # zarr adds a few levels


def chunk_rows_for(num_rows: int, row_bytes: int, *, cheap: bool = False) -> int:
    """Return the number of rows per chunk: a power of two, at least 32, for chunks of about 64 MiB of the widest array.

    Small tables have smaller chunks, but of at least 256 rows if the table has as many and 64 MiB hold as many, so
    that a batch does not span the end of a chunk. Chunks of rows that are ``cheap`` to compute again have at least
    1 MiB, or all rows. The batch size and the number of processes may change when a run resumes, so neither counts.

    Example:
        >>> chunk_rows_for(1_000_000, 8192), chunk_rows_for(50_000, 8192), chunk_rows_for(100, 8192)
        (8192, 1024, 128)
    """
    positive_int(num_rows=num_rows)
    positive_int(row_bytes=row_bytes)
    by_size = 1 << max(_CHUNK_BYTES // row_bytes, 1).bit_length() - 1
    by_count = 1 << (-(-num_rows // _CHUNKS_OF_A_SMALL_TABLE) - 1).bit_length()
    fewest = _FEWEST_ROWS_PER_COMMIT
    if cheap:
        fewest = max(fewest, 1 << (CHEAP_CHUNK_BYTES // row_bytes).bit_length() >> 1)
    fewest = min(fewest, 1 << (num_rows - 1).bit_length())
    return max(min(by_size, max(by_count, fewest)), _FEWEST_CHUNK_ROWS)


def stored_bytes(table: TableSpec) -> int:
    """Return the bytes of a finished table, whose last chunk is as large as the others."""
    return -(-table.num_rows // table.chunk_rows) * table.chunk_rows * table.row_bytes


def plain_json(value: Any, *, what: str) -> Any:
    """Return the value after a JSON round trip (tuples become lists); raise InvalidInputError if it has none."""
    try:
        plain = json.loads(canonical_json(value))
        check_depth(plain, deepest=_DEEPEST)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{what} must consist of JSON values (strings, finite numbers, booleans, None, lists, mappings): {error}. "
            "Convert the others."
        ) from error
    return plain


def plain_manifest(manifest: Manifest) -> Manifest:
    """Return a manifest after a JSON round trip; see :func:`plain_json`."""
    fingerprint = plain_json(dict(manifest.fingerprint), what="The manifest's fingerprint")
    made_with = plain_json(dict(manifest.made_with), what="The manifest's made_with")
    return Manifest(fingerprint, made_with, manifest.format)


def check_spec(spec: TableSpec) -> TableSpec:
    """Return a valid spec with its fingerprint in plain JSON; InvalidInputError for a wrong size, name or dtype."""
    positive_int(num_rows=spec.num_rows)
    positive_int(chunk_rows=spec.chunk_rows)
    _refuse_endless("num_rows", spec.num_rows, _MOST_ROWS)
    _refuse_endless("chunk_rows", spec.chunk_rows, _MOST_CHUNK_ROWS)
    for column in spec.columns:
        _check_column(column)
    names = [array.name for array in spec.arrays]
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(
            f"A table needs one or more columns, and arrays of different names for them, got {names}. Rename a column."
        )
    for column in spec.columns:
        _refuse_endless("bytes of a chunk", spec.chunk_rows * column.row_bytes, _MOST_CHUNK_BYTES)
    fingerprint = plain_json(dict(spec.fingerprint), what="A table's fingerprint")
    return replace(spec, columns=tuple(spec.columns), fingerprint=fingerprint)


def _check_column(column: Column) -> None:
    one_of(DTYPES, dtype=column.dtype)
    if column.width is not None:
        positive_int(width=column.width)
    elif column.quantised:
        raise InvalidInputError(
            f"{column.name} has one number per row, and {column.dtype} would store a scale for each. Use float32."
        )
    check_name(column.name, what="column")
    for array in column.arrays:
        check_name(array.name, what="array")


def _refuse_endless(what: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidInputError(
            f"A table can have {what} up to {most}, got {number}. Split it into several tables."
        )


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    """Return the JSON form of a spec, as stored in the table's ``zarr.json``."""
    return {
        "num_rows": spec.num_rows,
        "chunk_rows": spec.chunk_rows,
        "columns": [{"name": c.name, "width": c.width, **dtype_fingerprint(c.dtype)} for c in spec.columns],
        "fingerprint": dict(spec.fingerprint),
    }


def shape_to_json(spec: TableSpec) -> dict[str, Any]:
    """Return the JSON form of a spec without its fingerprint."""
    return {key: value for key, value in spec_to_json(spec).items() if key != "fingerprint"}


def spec_from_json(record: Mapping[str, Any], *, where: str) -> TableSpec:
    """Return the spec in a record of :func:`spec_to_json`; CorruptStoreError if there is none, or an unknown one."""
    try:
        fingerprint = dict(record["fingerprint"].items())
        columns = tuple(map(_column_from_json, record["columns"]))
        spec = check_spec(TableSpec(record["num_rows"], columns, record["chunk_rows"], fingerprint))
        return replace(spec, fingerprint=StoredValues(spec.fingerprint, where=where))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStoreError(
            f"{where} does not describe a table ({type(error).__name__}: {error}). Expected num_rows, chunk_rows, "
            "columns and fingerprint as trak_lite wrote them. Restore the file from a backup, or use another path."
        ) from error


def _column_from_json(record: Mapping[str, Any]) -> Column:
    column = Column(record["name"], record["width"], record["dtype"])
    expected, recorded = dtype_fingerprint(column.dtype).get("quantisation"), record.get("quantisation")
    if recorded != expected:
        raise InvalidInputError(
            f"the quantisation of {column.name} is {recorded!r}, this version of trak_lite expects {expected!r}"
        )
    return column


def grown_spec(spec: TableSpec, num_rows: int) -> TableSpec:
    """Return the spec of a table with more rows; raise InvalidInputError if it has more than ``num_rows``."""
    positive_int(num_rows=num_rows)
    if num_rows < spec.num_rows:
        raise InvalidInputError(
            f"A table cannot shrink: it has {spec.num_rows} rows, got num_rows={num_rows}. Create another table."
        )
    return replace(spec, num_rows=num_rows)


def flat_spec(spec: TableSpec) -> dict[str, Any]:
    """Return shape and fingerprint of a spec as one mapping, for comparison key by key."""
    return {**{f"table {key}": value for key, value in shape_to_json(spec).items()}, **spec.fingerprint}


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows inside one chunk."""

    chunk: int
    start: int
    """First row, counted inside the chunk."""
    source: slice
    """Position of the rows in the given values."""

    @property
    def rows(self) -> slice:
        """The rows, counted inside the chunk."""
        return slice(self.start, self.start + self.source.stop - self.source.start)


def contiguous_runs(first: int, count: int, chunk_rows: int, *, offset: int = 0) -> Iterator[Run]:
    """Split the rows ``first:first + count`` at chunk boundaries.

    Example:
        >>> [(run.chunk, run.start, run.source) for run in contiguous_runs(3, 4, 5)]
        [(0, 3, slice(0, 2, None)), (1, 0, slice(2, 4, None))]
    """
    taken = 0
    while taken < count:
        chunk, start = divmod(first + taken, chunk_rows)
        here = min(chunk_rows - start, count - taken)
        yield Run(chunk, start, slice(offset + taken, offset + taken + here))
        taken += here
