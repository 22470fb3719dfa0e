"""Rows of one table: those of unfinished chunks are in row logs on a local disk, complete chunks are published.

Where chunks are published, and how they are read, is up to :class:`PublishedChunks`: those of a folder, or those of an
object store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import named_errors, zeros
from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    HeldHereError,
    IncompleteStoreError,
    StateError,
    StoreError,
)
from trak_lite.store._columns import Column, StoredRows, TableSpec
from trak_lite.store._grid import Run
from trak_lite.store._table import AbstractRowTable, opened_for_reading
from trak_lite.store._values import RowBlock, check_block
from trak_lite.store.disk.chunk_files import TableFiles
from trak_lite.store.disk.chunks import PublishedChunks
from trak_lite.store.disk.records import CommitRecord
from trak_lite.store.disk.staging import StagedChunk, StagedRows

logger = logging.getLogger(__name__)

_OPEN_CHUNKS = 32  # maximum number of open row logs; each holds a lock and a file


@final
class RowTable(AbstractRowTable):
    """Rows of one table of a store on a disk or in an object store.

    Each call of ``done``, ``pending`` or ``committed_chunks`` sees the commits of other processes. Reading looks for
    new commits only if the requested chunk is not known to be committed. In an object store, unfinished chunks and
    locks are those of this machine; if two machines fill the same chunk, the first commit wins.
    """

    def __init__(self, files: TableFiles, chunks: PublishedChunks, *, writable: bool) -> None:
        self._files = files
        self._chunks = chunks
        self._writable = writable
        self._closed = False
        self._staged: OrderedDict[int, StagedChunk] = OrderedDict()
        self._claimed: set[int] = set()
        self._known: dict[int, StagedChunk] = {}
        self._chunks.refresh()
        if writable:
            for chunk in sorted(files.staged_chunks()):
                # no lock here, so that a running writer does not find the chunk busy
                if chunk in chunks.committed or self._staged_rows(chunk).all():
                    with named_errors("Recovering", files.describe(chunk)):
                        self._finish(chunk)
            _TABLES.add(self)

    @property
    def spec(self) -> TableSpec:
        """Shape, columns and fingerprint of the table."""
        return self._files.spec

    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Write rows; see :meth:`AbstractRowTable.put`.

        Disk space for all rows is reserved before the first byte is written, so a full disk fails the whole call.
        After a later failure, the rows of the current chunk are pending and those of earlier chunks are done. If an
        upload fails, a :class:`StoreError` is raised and the rows are done: opening the table for writing repeats it.
        """
        self._require_writable()
        block = check_block(rows, values, self.spec)
        with named_errors("Writing rows to", self._files.where):
            for chunk in block.runs.keys() & self._chunks.committed.keys():
                raise self._is_done(chunk)
            for chunk, runs in block.runs.items():
                done = self._stage(chunk).done
                for run in runs:
                    if done[run.rows].any():
                        first = chunk * self.spec.chunk_rows + run.start
                        raise self._are_done(np.flatnonzero(done[run.rows]) + first)
            if len(block.runs) > 1:  # what fails in the only chunk changes nothing anyway
                self._reserve(block)
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
        rows = self.spec.num_rows
        what = f"A list of the {rows} rows of {self._files.folder}"
        mask = zeros(rows, what=what, besides=8 * rows).view(np.bool_)
        while True:
            # Read the logs before the index: a chunk that is committed in between is then found in the index.
            staged, committed = self._files.staged_chunks(), set(self._chunks.committed)
            for chunk in staged - committed:
                mask[slice(*self.chunk_range(chunk))] |= self._staged_rows(chunk)
            self._chunks.refresh()
            late = self._files.staged_chunks() - staged - committed
            if self.num_chunks - 1 not in late and committed <= self._chunks.committed.keys():
                break
            # Otherwise the table has grown meanwhile, and its last chunk is being filled up: look again. Other chunks
            # never go from the index to the logs, so new ones are no reason to: writers may begin some all the time.
        for chunk in self._chunks.committed:
            mask[slice(*self.chunk_range(chunk))] = True
        return mask

    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the done rows of a chunk and their values; see :meth:`AbstractRowTable.read_done`."""
        first, stop = self.chunk_range(chunk)
        if chunk not in self._chunks.committed:
            # log before index, as in done()
            with named_errors("Reading rows in", self._files.stage):
                done, pieces = StagedRows(self._files, chunk).pieces()
            self._chunks.refresh()
        if chunk in self._chunks.committed:
            columns = self.spec.columns
            return np.arange(first, stop), {c.name: self.read_chunk(chunk, c.name).copy() for c in columns}
        stored = {
            column.name: np.concatenate([np.empty(0, np.uint8), *parts]).view(column.dtype)
            for column, parts in zip(self._files.columns, pieces, strict=True)
        }
        count = int(done.sum())
        values = {
            column.name: StoredRows(
                column, tuple(stored[array.name].reshape(array.shape(count)) for array in column.arrays)
            ).decode()
            for column in self.spec.columns
        }
        return np.flatnonzero(done) + first, values

    def committed_chunks(self) -> list[int]:
        """Return the chunks that are complete and readable, ascending."""
        self._chunks.refresh()
        return sorted(self._chunks.committed)

    def stored_chunk(self, chunk: int, column: str) -> StoredRows:
        """Return the rows of a committed chunk; see :meth:`AbstractRowTable.stored_chunk`.

        On a disk they are memory-mapped; of an object store, the chunk is downloaded. The arrays are read-only. Their
        pages are private, so the file cannot change even if a caller marks an array writable (as torch requires for
        arrays that it shares).
        """
        schema, record = self.column(column), self._record_of(chunk)
        try:
            return self._stored_rows(schema, record)
        except (CorruptStoreError, IncompleteStoreError) as error:
            newer = self._chunks.look_at(chunk)
            if newer is None and isinstance(error, CorruptStoreError):
                # No damage: the table has grown, and a writer is replacing the files of its last chunk.
                self._raise_incomplete(chunk)
            if newer is None or newer == record:
                raise
            return self._stored_rows(schema, newer)  # set aside by a repair or removed, and committed again

    def checksums(self, chunk: int) -> dict[str, int]:
        """Return the CRC-32C of each array of a committed chunk from its commit record."""
        return {name: checksum for name, (_, checksum) in self._record_of(chunk).columns.items()}

    @property
    def _where(self) -> str:
        return self._files.where

    def close(self) -> None:
        """Release locks and files. Rows already put are safe, and reading remains possible."""
        self._closed = True
        self.give_up_locks()

    def give_up_locks(self) -> None:
        """Close the row logs, the commit log and all chunks; the next call reopens and reads them."""
        while self._staged:
            self._staged.popitem()[1].close()
        self._known.clear()
        self._claimed.clear()
        self._chunks.close()

    def _stored_rows(self, column: Column, record: CommitRecord) -> StoredRows:
        files = self._files.by_column[column.name]
        return StoredRows(column, tuple(self._chunks.get(each, record) for each in files))

    def _record_of(self, chunk: int) -> CommitRecord:
        self.chunk_range(chunk)
        if chunk not in self._chunks.committed:
            self._chunks.refresh()
        record = self._chunks.committed.get(chunk)
        if record is None:
            self._raise_incomplete(chunk)
        return record

    def _stage(self, chunk: int) -> StagedChunk:
        """Return the row log of a chunk, ready for writing; close the oldest one if too many are open."""
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
        held = self._staged.get(chunk)
        stage = held or self._take(chunk)
        if stage is None:
            return np.zeros(0, np.bool_)
        self._staged[chunk] = stage
        try:
            # by another machine: it has no lock here
            if held is not None and self._chunks.look_at(chunk) is not None:
                stage.discard_log()
                del self._staged[chunk]
                return np.zeros(0, np.bool_)
            if stage.complete:  # its writer was killed between the last row and the commit
                self._commit(stage)
            else:
                self._claimed.add(chunk)
        except BaseException:
            self._abandon(stage)
            raise
        return ~stage.done

    def _take(self, chunk: int, *, finish: bool = False) -> StagedChunk | None:
        """Lock a chunk and read what a killed writer left; return ``None`` if it is committed.

        Args:
            chunk: Index of the chunk.
            finish: Whether to return also a chunk that an interrupted publication may have left half published.
        """
        stage = StagedChunk.lock(self._files, chunk)
        try:
            committed = self._chunks.look_at(chunk, locked=True) is not None
            if not committed or (finish and self._chunks.keeps_rows):
                stage.prepare(self._known.pop(chunk, None))
            if committed and not stage.complete:
                if stage.is_left:  # the rows must not go before the names of their files are on the disk
                    self._chunks.sync()
                stage.discard_log()
                return None
        except BaseException:
            stage.close()
            raise
        return stage

    def _release(self, chunk: int) -> None:
        self._known[chunk] = self._staged.pop(chunk)
        self._known[chunk].close()

    def _reserve(self, block: RowBlock) -> None:
        """Reserve disk space for all rows; if there is too little, free what was taken."""
        try:
            for chunk, runs in block.runs.items():
                self._stage(chunk).reserve(_rows(runs).stop - _rows(runs).start, len(runs))
        except (OSError, StoreError):
            for chunk in block.runs:
                try:
                    self._free(chunk)
                except (OSError, StoreError) as error:  # another writer has it by now, and frees it
                    logger.info("%s: disk space stays reserved. %s", self._files.describe(chunk), error)
            raise

    def _free(self, chunk: int) -> None:
        """Free the disk space that was reserved in the row log of a chunk; delete a log without rows."""
        stage = self._stage(chunk)  # may have been closed, because more chunks than stay open were reserved
        stage.forget(stage.log_size, ())
        if chunk not in self._claimed and not stage.done.any():
            del self._staged[chunk]
            stage.discard_log()

    def _write(self, stage: StagedChunk, runs: Sequence[Run], block: RowBlock) -> None:
        log_size = stage.log_size
        try:
            arrays = [array[_rows(runs)] for array in block.arrays]
            stage.write([(run.rows.start, run.rows.stop - run.rows.start) for run in runs], arrays)
            if stage.complete:
                self._commit(stage)
        except BaseException as error:
            if not (stage.complete and self._chunks.keeps_rows):
                # Frames of a failed commit hold maps of the log; to show what is cut off now would kill the process.
                traceback.clear_frames(error.__traceback__)
                stage.forget(log_size, runs)
            self._abandon(stage)
            raise

    def _abandon(self, stage: StagedChunk) -> None:
        """Close a chunk after a failure; the next put locks it and reads its log."""
        stage.close()
        self._staged.pop(stage.chunk, None)

    def _commit(self, stage: StagedChunk) -> None:
        try:
            self._chunks.publish(stage.chunk, stage.contents())
        except BusyError:  # another machine has committed it with other bytes
            stage.discard_log()
            raise
        stage.discard_log()
        failpoint("chunk_settled")
        self._staged.pop(stage.chunk, None)

    def _staged_rows(self, chunk: int) -> NDArray[np.bool_]:
        if chunk in self._staged:
            return self._staged[chunk].done
        with named_errors("Reading rows in", self._files.stage):
            return StagedRows(self._files, chunk).done()

    def _finish(self, chunk: int) -> None:
        """Commit a complete chunk that a killed writer left, or remove the row log of a committed one."""
        try:
            stage = self._take(chunk, finish=True)
            if stage is None:
                return
            try:
                if stage.complete:
                    self._commit(stage)
            finally:
                stage.close()
        except BusyError as error:
            logger.info("Not written here, because another writer has it: %s", error)

    def _is_done(self, chunk: int) -> StateError:
        return StateError(
            f"{self._files.describe(chunk)} are done already. Put pending rows only; pending() lists them."
        )

    def _require_writable(self) -> None:
        where = self._files.where
        if not self._writable:
            raise opened_for_reading(where)
        if self._closed:
            raise StateError(
                f"{where}: the store was closed, or the table dropped. Open it again to put rows."
            )


def _rows(runs: Sequence[Run]) -> slice:
    """Return the place of the rows of a chunk in the given values, which are in the order of the runs."""
    return slice(runs[0].source.start, runs[-1].source.stop)


_TABLES: weakref.WeakSet[RowTable] = weakref.WeakSet()


def _give_up_inherited_locks() -> None:
    """Release the parent's locks in a forked child process, such as a data loader worker."""
    for table in _TABLES:
        table.give_up_locks()


os.register_at_fork(after_in_child=_give_up_inherited_locks)
