"""Read-only, lock-free check of single chunks: which rows are done and which files are damaged.

Checksums of chunk files are computed by reading, not mapping: a file that shrinks or cannot be read must give a
finding, but with a map it would kill the process.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import StoreError
from trak_lite.store._check_report import Finding, row_ranges
from trak_lite.store._checksums import crc32c
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.files import file_size, named_errors, open_file
from trak_lite.store.disk.records import CommitLogs, CommitRecord, holder_lives
from trak_lite.store.disk.staging import StagedRows

_PIECE = 1 << 20

REPAIR = "check with --repair, then featurize again"
AGAIN = "featurize again: these rows are pending"
_UNRECORDED = "no commit record: not written by trak_lite, or a commit log is damaged"
_FINISH = "nothing: the next writer finishes it"


@dataclass(frozen=True, slots=True)
class ChunkState:
    """Result of checking a chunk."""

    findings: tuple[Finding, ...]
    done: NDArray[np.bool_]
    """Rows of the chunk that are done, ``(rows,)``."""
    visible: bool
    """Whether every column has its final name."""
    bytes: int = 0
    """Number of bytes compared with the commit record."""

    @property
    def damaged(self) -> bool:
        """Whether there is a finding of level ``damage``."""
        return any(finding.level == "damage" for finding in self.findings)


def stored_checksum(path: str, size: int) -> int:
    """Return the CRC-32C of the first ``size`` bytes of a file, read in pieces."""
    checksum, left = 0, size
    with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        while left and (piece := file.read(min(left, _PIECE))):
            checksum = crc32c(piece, start=checksum)
            left -= len(piece)
    return checksum


@final
@dataclass(frozen=True, slots=True)
class ChunkLook:
    """Checks single chunks of a table, whose logs are polled after its folders were listed."""

    _table: str
    _files: TableFiles
    _logs: CommitLogs

    def settled(self, chunk: int) -> ChunkState:
        """Return the state of a chunk that a writer may be changing.

        A check is repeated if the chunk was committed or moved back to the stage meanwhile. Findings are reported only
        if two consecutive checks agree.
        """
        found: tuple[Finding, ...] | None = None
        while True:
            before = self._names(chunk)
            state = self.state(chunk)
            # A chunk that is committed during the check could seem to have neither a row log nor a visible file.
            same = self._names(chunk) == before
            if same and state.findings in ((), found):
                return state
            found = state.findings if same else None
            self._logs.poll_each()

    def state(self, chunk: int) -> ChunkState:
        """Return the state of a chunk at this moment."""
        visible = [column for column in self._files.columns if os.path.lexists(column.visible(chunk))]
        record = self._logs.latest.get(chunk)
        try:
            with named_errors("Reading", self._files.describe(chunk)):
                for path in self._files.staged_paths(chunk):
                    file_size(path, alone=True)  # raises if it is not a plain file of its own
                outgrown = record is not None and 0 < record.rows < self._files.rows_in(chunk)
                if len(visible) == len(self._files.columns) and not outgrown:
                    return self._visible_state(chunk, record)
                return self._staged_state(chunk, record, visible)
        except StoreError as error:
            none = np.zeros(self._files.rows_in(chunk), np.bool_)
            return ChunkState((self._damage(chunk, str(error)),), none, visible=False)

    def _names(self, chunk: int) -> list[bool]:
        """Return for each file of a chunk whether it has its final name, and whether there is a row log."""
        paths = [*(column.visible(chunk) for column in self._files.columns), self._files.row_log(chunk)]
        return [os.path.lexists(path) for path in paths]

    def _visible_state(self, chunk: int, record: CommitRecord | None) -> ChunkState:
        none = np.zeros(self._files.rows_in(chunk), np.bool_)
        if record is None:
            return ChunkState((self._damage(chunk, _UNRECORDED),), none, visible=True)
        known = len(none) if record.rows <= len(none) else self._files.rows_on_disk(chunk)
        if not 0 < record.rows <= known:
            text = f"committed with {record.rows} rows, the chunk has {len(none)}"
            return ChunkState((self._damage(chunk, text),), none, visible=True)
        problems = {column.name: self._problem(column, record) for column in self._files.columns}
        findings = [self._damage(chunk, text, column=name) for name, text in problems.items() if text]
        if findings:
            return ChunkState(tuple(findings), none, visible=True)
        left = [path for path in self._files.staged_paths(chunk) if os.path.lexists(path)]
        if left and not holder_lives(self._files.row_log(chunk)):
            names = ", ".join(os.path.basename(path) for path in left)
            findings.append(self._note(chunk, f"committed; {names} still in the stage", _FINISH))
        size = sum(column.chunk_bytes for column in self._files.columns)
        return ChunkState(tuple(findings), ~none, visible=True, bytes=size)

    def _problem(self, column: ColumnFiles, record: CommitRecord) -> str | None:
        """Return how the file of a column contradicts the commit record, or ``None``."""
        path = column.visible(record.chunk)
        try:
            with named_errors("Reading", path):
                seen = file_size(path)
                if seen is None:
                    return "removed during the check"
                checksum = functools.partial(stored_checksum, path, seen)
                return record.problem(column.name, seen, column.chunk_bytes, checksum)
        except StoreError as error:
            return str(error)

    def _staged_state(
        self, chunk: int, record: CommitRecord | None, visible: list[ColumnFiles]
    ) -> ChunkState:
        staged = StagedRows(self._files, chunk)
        done, named = staged.done(), staged.named()
        if visible and record is not None:
            named[: record.rows] = True
        missing = [column.name for column in self._files.columns if column not in visible]
        lost = "the row log does not hold them"
        if visible and missing:
            lost = f"no file of the columns {', '.join(missing)}, and {lost}"
        findings = [
            self._damage(chunk, lost, rows=rows)
            for rows in row_ranges(named & ~done, first=chunk * self._files.spec.chunk_rows)
        ]
        broken = 0 if done.all() else staged.damaged
        if broken:
            text = f"{broken} bytes of the row log are damaged: their rows are pending"
            findings.append(self._damage(chunk, text))
        if visible and record is None and not findings:
            findings.append(self._damage(chunk, _UNRECORDED))
        if not findings and visible and missing and not holder_lives(self._files.row_log(chunk)):
            names = ", ".join(column.name for column in visible)
            text = f"commit interrupted, or under way elsewhere: only {names} visible"
            findings.append(self._note(chunk, text, _FINISH))
        left = any(map(os.path.lexists, self._files.staged_paths(chunk)))
        if not findings and record is not None and not visible and not left:
            findings.append(self._note(chunk, "committed once; its files were set aside or removed", AGAIN))
        return ChunkState(tuple(findings), done, visible=False)

    def _damage(
        self, chunk: int, text: str, *, column: str | None = None, rows: range | None = None
    ) -> Finding:
        where = self._files.rows_of(chunk) if rows is None else rows
        return Finding("damage", self._table, text, REPAIR, chunk, where, column)

    def _note(self, chunk: int, text: str, next_step: str) -> Finding:
        return Finding("note", self._table, text, next_step, chunk, self._files.rows_of(chunk))
