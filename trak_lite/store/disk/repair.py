"""Repair of a disk store: damaged chunks are set aside, so that their rows become pending; nothing is deleted.

For each damaged chunk, its files are moved to a new folder under ``.set-aside/`` of the first column, under the lock of
the chunk. If some rows of its row log are undamaged, the log is replaced by one that holds these rows. If the repair is
killed at any step, a writer can still resume, and a second repair finishes it.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from typing import final

from trak_lite.errors import BusyError, CorruptStoreError, ReadOnlyStoreError
from trak_lite.store._check_report import Finding, Report, SetAside, row_ranges
from trak_lite.store._failpoints import failpoint
from trak_lite.store.disk.check import DiskLook, TableLook
from trak_lite.store.disk.check_chunk import ChunkLook, ChunkState
from trak_lite.store.disk.chunk_files import SET_ASIDE
from trak_lite.store.disk.entries import ENTRIES, entry_files
from trak_lite.store.disk.files import file_size, named_errors, new_file, rename, sync_folder, write_file
from trak_lite.store.disk.folders import make_folders
from trak_lite.store.disk.listing import TableList
from trak_lite.store.disk.records import CommitLogs
from trak_lite.store.disk.staging import StagedChunk, StagedRows


def repair_list(root: str, look: DiskLook) -> list[SetAside]:
    """Set aside damaged entries of the list of tables, those of lost tables and wrong arrays; return them."""
    tables, entries = TableList(root), look.store_entries()
    with named_errors("Repairing the list of tables in", root):
        if look.list_damaged:
            tables.make()
        # Whether an entry belongs to the store is known only with the store's own metadata.
        wrong = [] if look.record is None else [name for name in look.wrong_entries if not entries.bind(name)]
        aside = [*look.entries, *(f"{ENTRIES}/{name}" for name in wrong)]
        if not aside:
            return []
        folder = f"{tables.folder}/{SET_ASIDE}/{_stamp('tables')}"
        make_folders(folder)
        tables.set_aside(aside, folder)
        for name in wrong:
            with contextlib.suppress(FileNotFoundError):  # removed without the store
                file = entry_files(name)[0]
                rename(f"{root}/{file}", f"{folder}/{os.path.basename(file)}")
    return [SetAside(path, None, (), folder) for path in aside]


@final
class TableRepair:
    """Repairs one table by making its damaged rows pending."""

    def __init__(self, path: str, look: TableLook) -> None:
        self.set_aside: list[SetAside] = []
        self.busy: list[Finding] = []
        """Notes on chunks that were skipped because a writer holds them."""
        self._path = path
        self._look = look
        self._files = look.files

    def run(self) -> None:
        """Set aside the damaged chunks and foreign files that the check found and that are still damaged."""
        with named_errors("Setting aside files of", self._files.folder):
            if self._look.strangers:
                self._move(self._look.strangers, None, ())
                self._look = TableLook(self._path, self._files)
                self._look.findings()  # moving a commit log may leave chunks without a record
            for chunk in sorted(self._look.damaged):
                self._repair(chunk)

    def _repair(self, chunk: int) -> None:
        log, *staged = self._files.staged_paths(chunk)
        visible = [column.visible(chunk) for column in self._files.columns]
        paths = [*visible, *staged, log]
        strange = [path for path in paths if _is_no_file(path, alone=path not in visible)]
        self._move(strange, chunk, (self._files.rows_of(chunk),))
        try:
            stage = StagedChunk.lock(self._files, chunk)
        except BusyError as error:
            text = f"left alone: {error}"
            self.busy.append(Finding("note", self._path, text, "repair again later", chunk))
            return
        try:
            self._repair_locked(chunk, stage, paths)
        finally:
            stage.close()

    def _repair_locked(self, chunk: int, stage: StagedChunk, paths: Sequence[str]) -> None:
        logs = CommitLogs(self._files.commits, self._files.identity)
        logs.poll_each()
        look = ChunkLook(self._path, self._files, logs)
        state = look.state(chunk)
        if not state.damaged:
            if not file_size(self._files.row_log(chunk)):
                stage.discard_log()  # created by the lock
        elif state.done.any():
            self._keep_sound_rows(chunk, state)
        else:
            # move the row log last, because it is the lock file of the chunk
            made_by_locking = not file_size(self._files.row_log(chunk))
            self._move(paths[: -1 if made_by_locking else None], chunk, (self._files.rows_of(chunk),))
            if made_by_locking:
                stage.discard_log()

    def _keep_sound_rows(self, chunk: int, state: ChunkState) -> None:
        """Replace the row log by one that holds only the undamaged rows; the old one is set aside."""
        visible = [column.visible(chunk) for column in self._files.columns]
        self._move(visible, chunk, ())
        log = self._files.row_log(chunk)
        pending = row_ranges(~state.done, first=self._files.rows_of(chunk).start)
        folder = self._new_folder(chunk)
        staged = StagedRows(self._files, chunk)
        write_file(f"{folder}/{os.path.basename(log)}", staged.copy(sound=False))
        fresh = f"{folder}/sound-{os.path.basename(log)}"
        with new_file(fresh, staged.copy(sound=True)):
            failpoint("log_copied")
            # A new inode under the same name makes other processes discard what they remember of the old log.
            rename(fresh, log)
        failpoint("log_replaced")
        self.set_aside.append(SetAside(self._path, chunk, tuple(pending), folder))

    def _move(self, paths: Sequence[str], chunk: int | None, rows: tuple[range, ...]) -> None:
        """Move the existing files among ``paths`` to a new folder."""
        found = [path for path in paths if os.path.lexists(path)]
        if not found:
            return
        folder = self._new_folder(chunk)
        for path in found:
            rename(path, f"{folder}/{os.path.basename(os.path.dirname(path))}-{os.path.basename(path)}")
            failpoint("file_set_aside")
        for changed in {folder, *map(os.path.dirname, found)}:
            sync_folder(changed)
        self.set_aside.append(SetAside(self._path, chunk, rows, folder))

    def _new_folder(self, chunk: int | None) -> str:
        folder = f"{self._files.set_aside}/{_stamp('strangers' if chunk is None else f'chunk-{chunk}')}"
        make_folders(folder)
        return folder


def _stamp(what: str) -> str:
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{what}-{uuid.uuid4().hex[:8]}"


def _is_no_file(path: str, *, alone: bool) -> bool:
    try:
        file_size(path, alone=alone)
    except CorruptStoreError:
        return True
    return False


def check_folder(folder: str | os.PathLike[str], *, repair: bool) -> Report:
    """Check and optionally repair a disk store; see :func:`~trak_lite.store.check_store`."""
    root = os.path.realpath(folder)
    look = DiskLook(root)
    if not repair:
        return Report(root, tuple(look.findings), look.tally)
    if not os.access(root, os.W_OK | os.X_OK):
        raise ReadOnlyStoreError(
            f"{root} cannot be written, so nothing was repaired. Make the folder writable."
        )
    repairs = [TableRepair(table, found) for table, found in look.tables.items()]
    moved = repair_list(root, look)
    for each in repairs:
        each.run()
    busy = [finding for each in repairs for finding in each.busy]
    moved += [part for each in repairs for part in each.set_aside]
    if moved or look.list_damaged or look.wrong_entries:
        look = DiskLook(root)
    return Report(root, (*look.findings, *busy), look.tally, tuple(moved))
