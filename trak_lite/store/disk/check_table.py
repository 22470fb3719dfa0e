"""Check and repair of one table of a disk store: which rows are done, and which files are damaged.

A check takes no lock and writes nothing. Checksums of chunk files are computed by reading, not mapping: a file that
shrinks or cannot be read must give a finding, but with a map it would kill the process.

A repair sets damaged chunks aside, so that their rows become pending; nothing is deleted. For each damaged chunk, its
files are moved to a new folder under ``.set-aside/`` of the first column, under the lock of the chunk. If some rows of
its row log are undamaged, the log is replaced by one that holds these rows. If the repair is killed at any step, a
writer can still resume, and a second repair finishes it.
"""

from __future__ import annotations

import functools
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    file_size,
    named_errors,
    open_file,
    rename,
    replace_file,
    sync_folder,
    write_file,
)
from trak_lite.core.folders import make_folders, names_in
from trak_lite.errors import BusyError, CorruptStoreError, StoreError
from trak_lite.store._check_report import AGAIN, Finding, SetAside, Tally, row_ranges
from trak_lite.store.disk.chunk_files import COMMITS, SET_ASIDE, STAGE, ColumnFiles, TableFiles
from trak_lite.store.disk.records import CommitLogs, CommitRecord, holder_lives
from trak_lite.store.disk.staging import StagedChunk, StagedRows

_PIECE = 1 << 20

NOT_OURS = "remove it if it is not needed"
_METADATA = "zarr.json"
_REPAIR = f"check with --repair, then {AGAIN}"
_UNRECORDED = "no commit record: not written by trak_lite, or a commit log is damaged"
_FINISH = "nothing: the next writer finishes it"


@dataclass(frozen=True, slots=True)
class _ChunkState:
    """Result of checking a chunk."""

    findings: tuple[Finding, ...]
    done: NDArray[np.bool_]
    """Rows of the chunk that are done, ``(rows,)``."""
    committed: bool
    """Whether the bytes of every column match the commit record."""

    @property
    def damaged(self) -> bool:
        """Whether there is a finding of level ``damage``."""
        return any(finding.level == "damage" for finding in self.findings)


@final
class TableLook:
    """Check of one table, and its repair."""

    def __init__(self, path: str, files: TableFiles) -> None:
        self.files = files
        self.tally = Tally(tables=1, pending_rows=files.spec.num_rows)
        self.damaged: list[int] = []
        """The damaged chunks, ascending."""
        self.strangers: list[str] = []
        """Files of chunks outside the grid, and commit logs that are unreadable or contain foreign records."""
        self.set_aside: list[SetAside] = []
        self.busy: list[Finding] = []
        """Notes on chunks that a repair has skipped because a writer holds them."""
        self.path = path
        self._logs = CommitLogs(files.commits, files.identity)

    def findings(self) -> list[Finding]:
        """Check the table once and return all findings. Lists the folders before reading the logs, as readers do."""
        findings: list[Finding] = []
        chunks: set[int] = set()
        try:
            for column in self.files.columns:
                findings += self._column(column, chunks)
            findings += self._stage(chunks)
            findings += self._commit_logs()
        except StoreError as error:
            return [*findings, Finding("damage", self.path, str(error), "put the folder back, readable")]
        chunks |= {chunk for chunk in self._logs.latest if 0 <= chunk < self.files.num_chunks}
        size = sum(column.chunk_bytes for column in self.files.columns)
        for chunk in sorted(chunks):
            state = self._settled(chunk)
            findings += state.findings
            rows = int(state.done.sum())
            self.tally.add(Tally(0, state.committed, size * state.committed, rows, -rows))
            if state.damaged:
                self.damaged.append(chunk)
        return findings

    def _column(self, column: ColumnFiles, chunks: set[int]) -> Iterator[Finding]:
        reserved = {_METADATA, STAGE, COMMITS, SET_ASIDE} if column is self.files.columns[0] else {_METADATA}
        for name in sorted(set(names_in(column.folder)) - reserved):
            chunk = column.chunk_of(name)
            if chunk is None:
                yield Finding("note", self.path, f"{name!r} is not a chunk", NOT_OURS, column=column.name)
            elif chunk < self.files.num_chunks:
                chunks.add(chunk)
            elif not self.files.rows_on_disk(chunk):  # otherwise the table has grown during the check
                self.strangers.append(column.visible(chunk))
                text = f"{name}: the table has {self.files.num_chunks} chunks"
                yield Finding("damage", self.path, text, _REPAIR, column=column.name, chunk=chunk)

    def _stage(self, chunks: set[int]) -> Iterator[Finding]:
        for name in sorted(names_in(self.files.stage)):
            number = re.match(r"[0-9]{1,18}", name)
            chunk = -1 if number is None else int(number[0])
            staged = [os.path.basename(path) for path in self.files.staged_paths(chunk)]
            if name in staged and chunk < self.files.num_chunks:
                chunks.add(chunk)
            else:
                yield Finding("note", self.path, f"{STAGE}/{name!r} belongs to no chunk", NOT_OURS)

    def _commit_logs(self) -> Iterator[Finding]:
        for name in sorted(names_in(self.files.commits)):
            if not name.endswith(".log"):
                yield Finding("note", self.path, f"{COMMITS}/{name!r} is not a commit log", NOT_OURS)
        for name, error in self._logs.poll_each().items():
            self.strangers.append(f"{self.files.commits}/{name}")
            yield Finding("damage", self.path, str(error), _REPAIR)
        for name, lines in self._logs.foreign.items():
            self.strangers.append(f"{self.files.commits}/{name}")
            yield Finding(
                "damage", self.path, f"commit log {name}: {lines} records of another table", _REPAIR
            )
        for name, lines in self._logs.damaged.items():
            text = f"commit log {name}: {lines} of its lines do not match their checksum"
            yield Finding(
                "note", self.path, text, "nothing: a chunk without its record is reported separately"
            )

    def _settled(self, chunk: int) -> _ChunkState:
        """Return the state of a chunk that a writer may be changing.

        A check is repeated if the chunk was committed or moved back to the stage meanwhile. Findings are reported only
        if two consecutive checks agree.
        """
        findings: tuple[Finding, ...] | None = None
        while True:
            before = self._names_of(chunk)
            state = self._state(chunk)
            # A chunk that is committed during the check could seem to have neither a row log nor a visible file.
            same = self._names_of(chunk) == before
            if same and state.findings in ((), findings):
                return state
            findings = state.findings if same else None
            self._logs.poll_each()

    def _state(self, chunk: int) -> _ChunkState:
        """Return the state of a chunk at this moment."""
        visible = [column for column in self.files.columns if os.path.lexists(column.visible(chunk))]
        record = self._logs.latest.get(chunk)
        try:
            with named_errors("Reading", self.files.describe(chunk)):
                for path in self.files.staged_paths(chunk):
                    file_size(path, alone=True)  # raises if it is not a plain file of its own
                outgrown = record is not None and 0 < record.rows < self.files.rows_in(chunk)
                if len(visible) == len(self.files.columns) and not outgrown:
                    return self._visible_state(chunk, record)
                return self._staged_state(chunk, record, visible)
        except StoreError as error:
            none = np.zeros(self.files.rows_in(chunk), np.bool_)
            return _ChunkState((self._damage(chunk, str(error)),), none, committed=False)

    def _names_of(self, chunk: int) -> list[bool]:
        """Return for each file of a chunk whether it has its final name, and whether there is a row log."""
        paths = [*(column.visible(chunk) for column in self.files.columns), self.files.row_log(chunk)]
        return [os.path.lexists(path) for path in paths]

    def _visible_state(self, chunk: int, record: CommitRecord | None) -> _ChunkState:
        done = np.zeros(self.files.rows_in(chunk), np.bool_)
        if findings := self._contradictions(chunk, record):
            return _ChunkState(tuple(findings), done, committed=False)
        left = [path for path in self.files.staged_paths(chunk) if os.path.lexists(path)]
        if left and not holder_lives(self.files.row_log(chunk)):
            names = ", ".join(os.path.basename(path) for path in left)
            findings.append(self._note(chunk, f"committed; {names} still in the stage", _FINISH))
        return _ChunkState(tuple(findings), ~done, committed=True)

    def _contradictions(self, chunk: int, record: CommitRecord | None) -> list[Finding]:
        if record is None:
            return [self._damage(chunk, _UNRECORDED)]
        rows = self.files.rows_in(chunk)
        limit = rows if record.rows <= rows else self.files.rows_on_disk(chunk)
        if not 0 < record.rows <= limit:
            return [self._damage(chunk, f"committed with {record.rows} rows, the chunk has {rows}")]
        problems = {column.name: self._problem(column, record) for column in self.files.columns}
        return [self._damage(chunk, text, column=name) for name, text in problems.items() if text]

    def _problem(self, column: ColumnFiles, record: CommitRecord) -> str | None:
        """Return how the file of a column contradicts the commit record, or ``None``."""
        path = column.visible(record.chunk)
        try:
            with named_errors("Reading", path):
                size = file_size(path)
                if size is None:
                    return "removed during the check"
                checksum = functools.partial(_stored_checksum, path, size)
                return record.problem(column.name, size, column.chunk_bytes, checksum)
        except StoreError as error:
            return str(error)

    def _staged_state(
        self, chunk: int, record: CommitRecord | None, visible: list[ColumnFiles]
    ) -> _ChunkState:
        staged = StagedRows(self.files, chunk)
        done, named = staged.done(), staged.named()
        if visible and record is not None:
            named[: record.rows] = True
        missing = [column.name for column in self.files.columns if column not in visible]
        lost = "the row log does not hold them"
        if visible and missing:
            lost = f"no file of the columns {', '.join(missing)}, and {lost}"
        findings = [
            self._damage(chunk, lost, rows=rows)
            for rows in row_ranges(named & ~done, first=chunk * self.files.spec.chunk_rows)
        ]
        broken = 0 if done.all() else staged.damaged
        if broken:
            text = f"{broken} bytes of the row log are damaged: their rows are pending"
            findings.append(self._damage(chunk, text))
        if visible and record is None and not findings:
            findings.append(self._damage(chunk, _UNRECORDED))
        if not findings and visible and missing and not holder_lives(self.files.row_log(chunk)):
            names = ", ".join(column.name for column in visible)
            text = f"commit interrupted, or under way elsewhere: only {names} visible"
            findings.append(self._note(chunk, text, _FINISH))
        left = any(map(os.path.lexists, self.files.staged_paths(chunk)))
        if not findings and record is not None and not visible and not left:
            findings.append(self._note(chunk, "committed once; its files were set aside or removed", AGAIN))
        return _ChunkState(tuple(findings), done, committed=False)

    def _damage(
        self, chunk: int, text: str, *, column: str | None = None, rows: range | None = None
    ) -> Finding:
        where = self.files.rows_of(chunk) if rows is None else rows
        return Finding("damage", self.path, text, _REPAIR, chunk, where, column)

    def _note(self, chunk: int, text: str, next_step: str) -> Finding:
        return Finding("note", self.path, text, next_step, chunk, self.files.rows_of(chunk))

    def repair(self) -> None:
        """Set aside the damaged chunks and foreign files that the check found and that are still damaged."""
        with named_errors("Setting aside files of", self.files.folder):
            damaged = self.damaged
            if self.strangers:
                self._move(self.strangers, None, ())
                look = TableLook(self.path, self.files)
                look.findings()  # moving a commit log may leave chunks without a record
                damaged = look.damaged
            for chunk in damaged:
                self._repair(chunk)

    def _repair(self, chunk: int) -> None:
        log, *staged = self.files.staged_paths(chunk)
        visible = [column.visible(chunk) for column in self.files.columns]
        paths = [*visible, *staged, log]
        strange = [path for path in paths if _is_no_file(path, alone=path not in visible)]
        self._move(strange, chunk, (self.files.rows_of(chunk),))
        try:
            stage = StagedChunk.lock(self.files, chunk)
        except BusyError as error:
            text = f"left alone: {error}"
            self.busy.append(Finding("note", self.path, text, "repair again later", chunk))
            return
        try:
            self._repair_locked(chunk, stage, paths)
        finally:
            stage.close()

    def _repair_locked(self, chunk: int, stage: StagedChunk, paths: Sequence[str]) -> None:
        look = TableLook(self.path, self.files)
        look._logs.poll_each()
        state = look._state(chunk)
        if not state.damaged:
            if not file_size(self.files.row_log(chunk)):
                stage.discard_log()  # created by the lock
        elif state.done.any():
            self._keep_sound_rows(chunk, state)
        else:
            # move the row log last, because it is the lock file of the chunk
            made_by_locking = not file_size(self.files.row_log(chunk))
            self._move(paths[: -1 if made_by_locking else None], chunk, (self.files.rows_of(chunk),))
            if made_by_locking:
                stage.discard_log()

    def _keep_sound_rows(self, chunk: int, state: _ChunkState) -> None:
        """Replace the row log by one that holds only the undamaged rows; the old one is set aside."""
        visible = [column.visible(chunk) for column in self.files.columns]
        self._move(visible, chunk, ())
        log = self.files.row_log(chunk)
        pending = row_ranges(~state.done, first=self.files.rows_of(chunk).start)
        folder = self._new_folder(chunk)
        staged = StagedRows(self.files, chunk)
        write_file(f"{folder}/{os.path.basename(log)}", staged.copy(sound=False))
        fresh = f"{folder}/sound-{os.path.basename(log)}"
        # A new inode under the same name makes other processes discard what they remember of the old log.
        replace_file(log, staged.copy(sound=True), scratch=fresh, step="log_copied")
        failpoint("log_replaced")
        self.set_aside.append(SetAside(self.path, chunk, tuple(pending), folder))

    def _move(self, paths: Sequence[str], chunk: int | None, rows: tuple[range, ...]) -> None:
        """Move the existing files among ``paths`` to a new folder."""
        sources = [path for path in paths if os.path.lexists(path)]
        if not sources:
            return
        folder = self._new_folder(chunk)
        for path in sources:
            rename(path, f"{folder}/{os.path.basename(os.path.dirname(path))}-{os.path.basename(path)}")
            failpoint("file_set_aside")
        for changed in {folder, *map(os.path.dirname, sources)}:
            sync_folder(changed)
        self.set_aside.append(SetAside(self.path, chunk, rows, folder))

    def _new_folder(self, chunk: int | None) -> str:
        folder = (
            f"{self.files.set_aside}/{set_aside_name('strangers' if chunk is None else f'chunk-{chunk}')}"
        )
        make_folders(folder)
        return folder


def _stored_checksum(path: str, size: int) -> int:
    """Return the CRC-32C of the first ``size`` bytes of a file, read in pieces."""
    checksum, left = 0, size
    with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        while left and (piece := file.read(min(left, _PIECE))):
            checksum = crc32c(piece, start=checksum)
            left -= len(piece)
    return checksum


def set_aside_name(what: str) -> str:
    """Return a new name for a folder of files that are set aside."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{what}-{uuid.uuid4().hex[:8]}"


def _is_no_file(path: str, *, alone: bool) -> bool:
    try:
        file_size(path, alone=alone)
    except CorruptStoreError:
        return True
    return False
