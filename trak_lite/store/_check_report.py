"""Report of a store check: findings with their location, description and next step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.validate import some_of
from trak_lite.errors import printable

AGAIN = "make the call that computes the rows again: featurize, or score (targets and fits: dense=False)"
"""Next step for pending rows of any table; a score finds stored scores, and computes nothing that only others need."""
_MOST_SHOWN = 100
_LONGEST = 600  # characters of a cell
_TITLES = ("level", "table", "chunk", "rows", "column", "finding", "next step")


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem found by a store check."""

    level: Literal["damage", "note"]
    """``damage``: rows or metadata are unusable. ``note``: harmless, such as a leftover file."""
    table: str | None
    """Path of the table; ``None`` if the finding concerns no table."""
    finding: str
    next_step: str
    chunk: int | None = None
    rows: range | None = None
    """Affected rows of the table."""
    column: str | None = None


@dataclass(frozen=True, slots=True)
class SetAside:
    """Files that a repair moved away, or a row log that it replaced."""

    table: str
    chunk: int | None
    rows: tuple[range, ...]
    """Rows of the chunk that are pending after the repair."""
    folder: str
    """Folder that now holds the files; stores never read it."""


@dataclass(slots=True)
class Tally:
    """Number of tables, chunks, bytes and rows checked."""

    tables: int = 0
    chunks: int = 0
    """Committed chunks whose bytes all match their commit record."""
    bytes: int = 0
    done_rows: int = 0
    pending_rows: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of another tally to this one."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a store check; ``str`` formats it as a table.

    Example:
        >>> finding = Finding("damage", "ckpt-0", "5 bytes, expected 16", "repair", 1, range(4, 8), "q")
        >>> print(Report("run.zarr", (finding,), Tally(1, 2, 32, 8, 0)))
        level   table   chunk  rows    column  finding               next step
        damage  ckpt-0  1      4 to 7  q       5 bytes, expected 16  repair
        run.zarr: 1 damage, 0 notes; 1 table, 8 rows done, 0 pending, 2 chunks of 32 bytes compared.
        >>> print(Report("run.zarr", (), Tally(1, 2, 32, 8, 0)))
        run.zarr: sound; 1 table, 8 rows done, 0 pending, 2 chunks of 32 bytes compared.
    """

    path: str
    findings: tuple[Finding, ...]
    tally: Tally
    set_aside: tuple[SetAside, ...] = field(default=())
    """Files that a repair has renamed, with their new paths."""

    @property
    def ok(self) -> bool:
        """Whether there is no damage; notes and pending rows are ignored."""
        return not any(finding.level == "damage" for finding in self.findings)

    def __str__(self) -> str:
        """Return the findings as an aligned table, the files set aside, and a summary line; of each 100 at most."""
        shown = list(self.findings)
        if len(shown) > _MOST_SHOWN:
            shown.sort(key=lambda finding: finding.level)  # damage before notes
        lines = _aligned([_TITLES, *map(_cells, shown[:_MOST_SHOWN])]) if shown else []
        if len(shown) > _MOST_SHOWN:
            lines.append(
                f"and {len(shown) - _MOST_SHOWN} more findings, which check_store(path).findings lists"
            )
        moved = self.set_aside[:_MOST_SHOWN]
        lines += [f"set aside: {_place(each)} is in {each.folder}" for each in moved]
        if len(self.set_aside) > _MOST_SHOWN:
            lines.append(f"set aside: {len(self.set_aside) - _MOST_SHOWN} more")
        damaged = sum(finding.level == "damage" for finding in self.findings)
        verdict = f"{damaged} damage" if damaged else "sound"
        if self.findings:
            verdict += f", {_count(len(self.findings) - damaged, 'note')}"
        tally = self.tally
        lines.append(
            f"{self.path}: {verdict}; {_count(tally.tables, 'table')}, {tally.done_rows} rows done, "
            f"{tally.pending_rows} pending, {_count(tally.chunks, 'chunk')} of {tally.bytes} bytes compared."
        )
        return printable("\n".join(lines))


def row_ranges(rows: NDArray[np.bool_], *, first: int) -> Iterable[range]:
    """Return the runs of true values in a mask as row ranges; the first entry is row ``first``.

    Example:
        >>> list(row_ranges(np.array([True, True, False, True]), first=4))
        [range(4, 6), range(7, 8)]
    """
    edges = np.flatnonzero(np.diff(rows.astype(np.int8), prepend=0, append=0)) + first
    return itertools.starmap(range, edges.reshape(-1, 2).tolist())


def _cells(finding: Finding) -> tuple[str, ...]:
    chunk = "-" if finding.chunk is None else str(finding.chunk)
    table, column = finding.table or "-", finding.column or "-"
    texts = (table, chunk, _rows(finding.rows), column, finding.finding, finding.next_step)
    plain = [printable(text).replace("\n", "\\n") for text in texts]
    return finding.level, *(t if len(t) <= _LONGEST else f"{t[: _LONGEST - 3]}..." for t in plain)


def _rows(rows: range | None) -> str:
    if rows is None:
        return "-"
    return str(rows.start) if len(rows) == 1 else f"{rows.start} to {rows.stop - 1}"


def _place(moved: SetAside) -> str:
    chunk = "a file of no chunk" if moved.chunk is None else f"chunk {moved.chunk}"
    rows = f" (rows {some_of(map(_rows, moved.rows))} are pending)" if moved.rows else ""
    return f"{chunk}{rows} of {moved.table}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
