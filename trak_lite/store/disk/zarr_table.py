"""Table on disk. Rows are written to staged chunks; a complete chunk becomes a chunk of the zarr arrays."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import BusyError, HeldHereError, StateError
from trak_lite.store._columns import StoredRows
from trak_lite.store._grid import Run
from trak_lite.store._values import RowBlock, check_block, short_list
from trak_lite.store.disk.chunk_files import ChunkIndex, ColumnFiles, TableFiles
from trak_lite.store.disk.chunk_maps import ChunkMaps
from trak_lite.store.disk.files import named_errors
from trak_lite.store.disk.recorded import RecordedRowTable
from trak_lite.store.disk.records import CommitLog, CommitRecord
from trak_lite.store.disk.staging import Progress, StagedChunk, StagedRows

__all__ = ["ZarrRowTable"]

logger = logging.getLogger(__name__)

_OPEN_CHUNKS = 32  # maximum number of open staged chunks; each holds a lock and one file per column


@final
class ZarrRowTable(RecordedRowTable):
    """Rows of one table of a :class:`~trak_lite.store.ZarrFeatureStore`.

    Each call of ``done``, ``pending`` or ``committed_chunks`` sees the commits of other processes. Reading looks for
    new commits only if the requested chunk is not known to be committed.
    """

    def __init__(
        self, files: TableFiles, *, writable: bool, check: bool = True, mapped: bool | None = None
    ) -> None:
        super().__init__(files, writable=writable)
        self._index: ChunkIndex = ChunkIndex(self._files)
        self._maps = ChunkMaps(self._files, self._index, check=check, mapped=mapped)
        self._log = CommitLog(self._files.commits)
        self._staged: OrderedDict[int, StagedChunk] = OrderedDict()
        self._claimed: set[int] = set()
        self._known: dict[int, Progress] = {}
        self._index.refresh()
        if writable:
            self._files.make_folders()
            self._recover()
            _TABLES.add(self)

    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Write rows; see :meth:`AbstractRowTable.put`.

        Disk space for all staged files is reserved before the first byte is written, so a full disk fails the whole
        call. After a later failure, the rows of the current chunk are pending and those of earlier chunks are done.
        """
        self._require_writable()
        block = check_block(rows, values, self.spec)
        with named_errors("Writing rows to", self._files.folder):
            for chunk in block.runs.keys() & self._index.committed.keys():
                raise self._is_done(chunk)
            for chunk, runs in block.runs.items():
                self._refuse_done(self._stage(chunk), runs)
            for chunk, runs in block.runs.items():
                self._write(self._stage(chunk), runs, block)

    @contextlib.contextmanager
    def claim(self, chunk: int) -> Iterator[NDArray[np.int64]]:
        """Lock a chunk until the context exits; see :meth:`AbstractRowTable.claim`."""
        self._require_writable()
        first, _ = self.chunk_range(chunk)
        if chunk in self._claimed:
            raise HeldHereError(
                f"{self._files.describe(chunk)}: claimed already through this table. Claim it once."
            )
        with named_errors("Claiming", self._files.describe(chunk)):
            pending = self._claim(chunk)
        try:
            yield np.flatnonzero(pending) + first
        finally:
            self._claimed.discard(chunk)
            if chunk in self._staged:
                self._release(chunk)

    def done(self) -> NDArray[np.bool_]:
        """Return a mask of the done rows, ``(num_rows,)``."""
        mask = self._files.marks()
        # Read the stage before the index: a chunk that is committed in between is then found in the index.
        staged = self._files.staged_chunks() - self._index.committed.keys()
        self._mark_staged(mask, staged)
        self._refresh()
        # Read both again: the last chunk of a grown table may just have been moved back to the stage.
        late = self._index.outgrown | self._files.staged_chunks()
        late -= staged | self._index.committed.keys()
        self._mark_staged(mask, late)
        if late:
            self._refresh()
        return self._mark_committed(mask)

    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the done rows of a chunk and their values; see :meth:`AbstractRowTable.read_done`."""
        first, _ = self.chunk_range(chunk)
        if chunk not in self._index.committed:
            # stage before index, as in done()
            with named_errors("Reading staged rows in", self._files.stage):
                staged = StagedRows(self._files, chunk)
                done = staged.done(self._index.outgrown_record(chunk))
                values = staged.values(done)
            self._index.refresh()
            if chunk not in self._index.committed:
                rows = {
                    column.name: StoredRows(column, tuple(values[a.name] for a in column.arrays)).decode()
                    for column in self.spec.columns
                }
                return np.flatnonzero(done) + first, rows
        return self._committed_rows(chunk)

    def close(self) -> None:
        """Release locks and files. Rows already put are safe, and reading remains possible."""
        self._closed = True
        self.give_up_locks()
        self._maps.clear()

    def forget(self) -> None:
        """Release locks and maps and forget the progress of staged chunks, because a repair may change them."""
        self.give_up_locks()
        self._known.clear()
        self._maps.clear()

    def give_up_locks(self) -> None:
        """Close the staged chunks and the commit log; the next put reopens them."""
        while self._staged:
            self._release(next(iter(self._staged)))
        self._claimed.clear()
        self._log.close()

    def _array(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        return self._maps.get(column, record)

    def _newest_record(self, chunk: int) -> CommitRecord | None:
        newer, visible = self._index.look_at(chunk)
        if newer is None or len(visible) < len(self._files.columns):
            return None
        self._index.add(newer)
        return newer

    def _stage(self, chunk: int) -> StagedChunk:
        """Return a staged chunk ready for writing; close the oldest one if too many are open."""
        if chunk not in self._staged:
            stage = self._take(chunk)
            if stage is None:
                raise self._is_done(chunk)
            self._staged[chunk] = stage
            unclaimed = [other for other in self._staged if other != chunk and other not in self._claimed]
            if len(self._staged) > _OPEN_CHUNKS and unclaimed:
                self._release(unclaimed[0])
        self._staged.move_to_end(chunk)
        return self._staged[chunk]

    def _claim(self, chunk: int) -> NDArray[np.bool_]:
        """Lock a chunk and keep it open; return a mask of its pending rows."""
        stage = self._staged.get(chunk) or self._take(chunk)
        if stage is None:
            return np.zeros(0, np.bool_)
        self._staged[chunk] = stage
        if stage.complete:  # its writer was killed between the last row and the commit
            try:
                self._commit(stage)
            except BaseException:
                self._abandon(stage)
                raise
        else:
            self._claimed.add(chunk)
        return ~stage.done

    def _take(self, chunk: int, *, roll_forward: bool = False) -> StagedChunk | None:
        """Lock a chunk and recover what a killed writer left; return ``None`` if it is committed."""
        stage = StagedChunk.lock(self._files, chunk)
        try:
            self._refuse_grown(chunk)
            record, visible = self._index.look_at(chunk)
            outgrown = self._index.outgrown_record(chunk)
            if outgrown is not None:
                stage.note_committed(outgrown, visible)
                roll_forward = True
            elif len(visible) == len(self._files.columns):
                stage.discard_log()
                return None
            stage.take_back(visible)
            stage.prepare(record, self._known.pop(chunk, None), roll_forward=roll_forward)
        except BaseException:
            stage.close()
            raise
        return stage

    def _refuse_grown(self, chunk: int) -> None:
        """Raise if the locked chunk has grown since the table was opened: padding would overwrite the new rows."""
        rows = self._files.rows_in(chunk)
        if rows < self.spec.chunk_rows and self._files.rows_on_disk(chunk) > rows:
            raise StateError(
                f"{self._files.folder} has grown since it was opened. Open it again to put rows."
            )

    def _release(self, chunk: int) -> None:
        stage = self._staged.pop(chunk)
        self._known[chunk] = stage.progress
        stage.close()

    def _refuse_done(self, stage: StagedChunk, runs: Sequence[Run]) -> None:
        for run in runs:
            if stage.done[run.rows].any():
                first = stage.chunk * self.spec.chunk_rows + run.start
                done = (np.flatnonzero(stage.done[run.rows]) + first).tolist()
                raise StateError(
                    f"Rows {short_list(done)} of {self._files.folder} are done already. "
                    "Put pending rows only; pending() lists them."
                )

    def _write(self, stage: StagedChunk, runs: Sequence[Run], block: RowBlock) -> None:
        log_size = stage.log_size
        try:
            for run in runs:
                stage.write(run.start, [array[run.source] for array in block.arrays])
            if stage.complete:
                self._commit(stage)
        except BaseException:
            stage.forget(log_size, runs)
            self._abandon(stage)
            raise

    def _abandon(self, stage: StagedChunk) -> None:
        """Close a chunk after a failure; the next put locks and recovers it."""
        stage.close()
        self._staged.pop(stage.chunk, None)

    def _commit(self, stage: StagedChunk) -> None:
        self._index.add(stage.commit(self._log))
        self._staged.pop(stage.chunk, None)
        self._close_finished_log()

    def _refresh(self) -> None:
        super()._refresh()
        self._close_finished_log()

    def _close_finished_log(self) -> None:
        """Close the commit log of a complete table, so that it does not keep a file descriptor open."""
        if len(self._index.committed) >= self._files.num_chunks:
            self._log.close()

    def _mark_staged(self, mask: NDArray[np.bool_], chunks: Iterable[int]) -> None:
        for chunk in chunks:
            first, stop = self.chunk_range(chunk)
            mask[first:stop] = self._staged_rows(chunk, self._index.outgrown_record(chunk))

    def _staged_rows(self, chunk: int, record: CommitRecord | None) -> NDArray[np.bool_]:
        if chunk in self._staged:
            return self._staged[chunk].done
        with named_errors("Reading staged rows in", self._files.stage):
            return StagedRows(self._files, chunk).done(record)

    def _recover(self) -> None:
        """Commit complete chunks that killed writers left uncommitted; remove row logs of committed chunks."""
        for chunk in sorted(self._files.staged_chunks() | self._index.half_visible):
            # no lock here, so that a running writer does not find the chunk busy
            if chunk in self._index.committed or self._staged_rows(chunk, self._index.record(chunk)).all():
                with named_errors("Recovering", self._files.describe(chunk)):
                    self._finish(chunk)

    def _finish(self, chunk: int) -> None:
        try:
            stage = self._take(chunk, roll_forward=True)
        except BusyError as error:
            logger.info("Not written here, because another writer has it: %s", error)
            return
        if stage is None:
            return
        try:
            if stage.complete:
                self._commit(stage)
        finally:
            stage.close()


_TABLES: weakref.WeakSet[ZarrRowTable] = weakref.WeakSet()


def _give_up_inherited_locks() -> None:
    """Release the parent's locks in a forked child process, such as a data loader worker."""
    for table in _TABLES:
        table.give_up_locks()


os.register_at_fork(after_in_child=_give_up_inherited_locks)
