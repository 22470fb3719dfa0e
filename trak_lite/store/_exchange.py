"""Compare two tables and copy the rows of one into the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import some_of
from trak_lite.errors import InvalidInputError, printable
from trak_lite.store._check_report import row_ranges
from trak_lite.store._grid import flat_spec, shape_to_json
from trak_lite.store._table import AbstractRowTable
from trak_lite.store.manifest import differing_keys


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two stores."""

    table: str | None
    """Path of the table; ``None`` for the manifest."""
    what: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return printable(f"{self.table or 'manifest'}: {self.what}: {self.here} here, {self.there} there")


def diff_tables(path: str, here: AbstractRowTable, there: AbstractRowTable) -> Iterator[Difference]:
    """Yield the differences between two tables; see :meth:`AbstractFeatureStore.diff`."""
    for key, ours, theirs in differing_keys(flat_spec(here.spec), flat_spec(there.spec)):
        yield Difference(path, key, ours, theirs)
    if shape_to_json(here.spec) != shape_to_json(there.spec):
        return  # tables of different shapes cannot be compared row by row
    done = here.done(), there.done()
    for first, second, states in ((*done, ("done", "pending")), (*done[::-1], ("pending", "done"))):
        for rows in row_ranges(first & ~second, first=0):
            yield Difference(path, _text(rows), *states)
    committed = set(here.committed_chunks()) & set(there.committed_chunks())
    for chunk in range(here.num_chunks):
        start, stop = here.chunk_range(chunk)
        if chunk in committed:
            ours, theirs = here.checksums(chunk), there.checksums(chunk)
            for name in (name for name in ours if ours[name] != theirs[name]):
                what = f"{name} in {_text(range(start, stop))} (chunk {chunk})"
                yield Difference(path, what, f"checksum {ours[name]:08x}", f"{theirs[name]:08x}")
        elif (done[0] & done[1])[start:stop].any():
            for rows in _differing_rows(here, there, chunk):
                yield Difference(path, _text(rows), "other bytes", "other bytes")


def refuse_conflicts(path: str, ours: AbstractRowTable, theirs: AbstractRowTable, *, part: str) -> None:
    """Raise InvalidInputError if a row is done in both tables with other bytes; names rows and store (``part``)."""
    both = ours.done() & theirs.done()
    committed = set(ours.committed_chunks()) & set(theirs.committed_chunks())
    conflicts: list[int] = []
    for chunk in range(ours.num_chunks):
        start, stop = ours.chunk_range(chunk)
        same = chunk in committed and ours.checksums(chunk) == theirs.checksums(chunk)
        if both[start:stop].any() and not same:
            conflicts += [row for rows in _differing_rows(ours, theirs, chunk) for row in rows]
    if conflicts:
        raise InvalidInputError(
            f"{path}: rows {some_of(conflicts)} of {part} differ in their bytes from "
            "the same rows of this store. Nothing was copied from that part. Compare how the two were made (versions, "
            "device, data), and leave one of them out."
        )


def take_missing(ours: AbstractRowTable, theirs: AbstractRowTable) -> int:
    """Copy the missing rows chunk by chunk; return their number."""
    missing = theirs.done() & ~ours.done()
    taken = 0
    for chunk in range(ours.num_chunks):
        start, stop = ours.chunk_range(chunk)
        if missing[start:stop].any():
            rows, values = theirs.read_done(chunk)
            wanted = missing[rows]
            ours.put(rows[wanted], {name: array[wanted] for name, array in values.items()})
            taken += int(wanted.sum())
    return taken


def _differing_rows(here: AbstractRowTable, there: AbstractRowTable, chunk: int) -> Iterable[range]:
    """Return the rows of a chunk that are done in both tables and differ in their bytes."""
    (ours, our_values), (theirs, their_values) = here.read_done(chunk), there.read_done(chunk)
    common, at_ours, at_theirs = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    start, stop = here.chunk_range(chunk)
    differs = np.zeros(stop - start, np.bool_)
    for name, array in our_values.items():
        unequal = _bytes(array[at_ours]) != _bytes(their_values[name][at_theirs])
        differs[common - start] |= unequal.any(axis=1)
    return row_ranges(differs, first=start)


def _bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    width = rows.itemsize * int(np.prod(rows.shape[1:]))
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), width)


def _text(rows: range) -> str:
    return f"row {rows.start}" if len(rows) == 1 else f"rows {rows.start} to {rows.stop - 1}"
