"""Table in an object store. Rows are staged on a local disk; complete chunks are uploaded."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    IncompleteStoreError,
    StateError,
    StoreError,
)
from trak_lite.store._base import AbstractRowTable
from trak_lite.store._checksums import crc32c
from trak_lite.store._failpoints import failpoint
from trak_lite.store._values import check_block
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.files import file_size, map_file, named_errors, remove_file
from trak_lite.store.disk.recorded import RecordedRowTable
from trak_lite.store.disk.records import CommitRecord
from trak_lite.store.disk.staging import StagedChunk
from trak_lite.store.remote.index import RemoteIndex
from trak_lite.store.remote.objects import AbstractObjects

__all__ = ["RemoteRowTable"]

logger = logging.getLogger(__name__)

_KEPT_BYTES = 256 << 20


@final
class RemoteRowTable(RecordedRowTable):
    """Rows of one table of a :class:`~trak_lite.store.RemoteFeatureStore`.

    A row is done if it is committed in the object store or staged on this machine. Chunks that an earlier run has
    completed and not uploaded are uploaded when a writer opens the table.
    """

    def __init__(
        self,
        objects: AbstractObjects,
        files: TableFiles,
        *,
        staging: TableFiles,
        staged: Callable[[], AbstractRowTable | None],
        writable: bool,
        check: bool,
    ) -> None:
        super().__init__(files, writable=writable)
        self._objects = objects
        self._staging = staging
        self._find_staged = staged
        self._own: AbstractRowTable | None = None
        self._check = check
        self._index: RemoteIndex = RemoteIndex(objects, files)
        self._asked: set[int] = set()
        self._fetched: OrderedDict[tuple[str, int, int], NDArray[Any]] = OrderedDict()
        self._index.refresh()
        if writable:
            self._recover()

    def put(
        self, rows: int | Sequence[int] | NDArray[np.integer], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Stage rows and upload complete chunks; see :meth:`AbstractRowTable.put`.

        Raises:
            StoreError: If the upload of a complete chunk fails. Its rows are done and remain staged; the upload is
                repeated when the table is next opened for writing.
        """
        self._require_writable()
        chunks = sorted(check_block(rows, values, self.spec).runs)
        for chunk in chunks:
            self._refuse_committed(chunk)
        self._local().put(rows, values)
        for chunk in chunks:
            if _is_complete(self._staging, chunk):
                self._publish(chunk)

    @contextlib.contextmanager
    def claim(self, chunk: int) -> Iterator[NDArray[np.int64]]:
        """Lock a chunk against other processes of this machine; see :meth:`AbstractRowTable.claim`.

        The lock does not affect other machines. If two machines fill the same chunk, the first commit wins.
        """
        self._require_writable()
        self.chunk_range(chunk)
        with self._local().claim(chunk) as pending:
            # Check under the lock: other processes of this machine cannot commit the chunk from here on.
            committed = self._index.is_committed(chunk)
            self._asked.add(chunk)
            if not committed and _is_complete(self._staging, chunk):
                self._publish(chunk)
            yield pending[:0] if committed else pending
        if committed:
            _remove_chunk(self._staging, chunk)

    def done(self) -> NDArray[np.bool_]:
        """Return a mask of the done rows, ``(num_rows,)``: committed in the object store or staged on this machine."""
        staged = self._staged()
        mask = np.zeros(self.spec.num_rows, np.bool_) if staged is None else staged.done()
        # Read the index after the stage: a chunk that is uploaded and unstaged in between is then found in the index.
        self._index.refresh()
        return self._mark_committed(mask)

    def read_done(self, chunk: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return the done rows of a chunk and their values; see :meth:`AbstractRowTable.read_done`."""
        self.chunk_range(chunk)
        staged = self._staged()
        if chunk not in self._index.committed and staged is not None:
            try:
                rows, values = staged.read_done(chunk)
                if len(rows):
                    return rows, values
            except StoreError:
                # Unless another process of this machine has uploaded and unstaged the chunk meanwhile.
                if not self._index.is_committed(chunk):
                    raise
        if not self._index.is_committed(chunk):
            return np.empty(0, np.int64), {c.name: self._empty(c.name, 0) for c in self.spec.columns}
        return self._committed_rows(chunk)

    def close(self) -> None:
        """Close the table for writing and release downloaded chunks."""
        self._closed = True
        self._fetched.clear()

    def _staged(self) -> AbstractRowTable | None:
        """Return the local table, or ``None``; only a writer remembers it."""
        if self._own is not None:
            return self._own
        found = self._find_staged()
        if self._writable:
            self._own = found
        return found

    def _local(self) -> AbstractRowTable:
        """Return the local table; raise if there is none."""
        table = self._staged()
        if table is None:
            raise StateError(f"{self._staging.folder}: the staging folder was removed. Open the store again.")
        return table

    def _refuse_committed(self, chunk: int) -> None:
        """Raise if a chunk is committed; sends at most one query per chunk."""
        committed = chunk in self._index.committed
        if not committed and chunk not in self._asked:
            committed = self._index.is_committed(chunk)
            self._asked.add(chunk)
        if committed:
            raise self._is_done(chunk)

    def _publish(self, chunk: int) -> None:
        """Upload a complete chunk from the staging folder, then remove it from the folder."""
        try:
            contents = _staged_contents(self._staging, self._local(), chunk)
        except StoreError:
            if self._index.is_committed(chunk):
                return  # another process of this machine has uploaded and unstaged it
            raise
        try:
            self._index.publish(chunk, contents)
        except BusyError:
            _remove_chunk(self._staging, chunk)
            raise
        _remove_chunk(self._staging, chunk)

    def _recover(self) -> None:
        """Upload chunks that a killed writer completed; remove staged chunks that are already committed."""
        self._local()  # opening it commits complete staged chunks locally
        complete = set.intersection(*(column.list_visible() for column in self._staging.columns))
        for chunk in sorted(complete):
            try:
                self._publish(chunk)
            except BusyError as error:
                logger.warning("Staged rows were dropped. %s", error)
        for chunk in self._staging.staged_chunks() & self._index.committed.keys():
            _remove_chunk(self._staging, chunk)

    def _newest_record(self, chunk: int) -> CommitRecord | None:
        self._index.refresh()
        return self._index.committed.get(chunk)

    def _array(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        key = column.name, record.chunk, record.generation
        if key not in self._fetched:
            self._fetched[key] = self._fetch(column, record)
            while len(self._fetched) > 1 and sum(a.nbytes for a in self._fetched.values()) > _KEPT_BYTES:
                self._fetched.popitem(last=False)
        self._fetched.move_to_end(key)
        return self._fetched[key].view()  # so that flags set by the caller do not affect the cache

    def _fetch(self, column: ColumnFiles, record: CommitRecord) -> NDArray[Any]:
        chunk, (size, checksum) = record.chunk, record.columns[column.name]
        where = f"{column.visible(chunk)}, {self._files.describe(chunk)}"
        content = self._objects.get(column.visible(chunk))
        if content is None:
            raise IncompleteStoreError(
                f"{where}: the object was removed after it was committed, so the rows are pending. "
                "Run again to compute them."
            )
        if len(content) != size or (self._check and crc32c(content) != checksum):
            raise CorruptStoreError(
                f"{where}: {len(content)} bytes with the checksum {crc32c(content):08x}, the commit record says {size} "
                f"and {checksum:08x}. Its writer ({record.writer or 'unnamed'}) may still be replacing a leftover: "
                f"wait if it runs. {self._index.remedy(chunk)}"
            )
        array = np.frombuffer(content, column.dtype).reshape(column.shape)
        return array[: self._files.rows_in(chunk)]


def _is_complete(files: TableFiles, chunk: int) -> bool:
    """Return whether a chunk of a staging folder is complete."""
    return all(file_size(column.visible(chunk)) is not None for column in files.columns)


def _staged_contents(files: TableFiles, table: AbstractRowTable, chunk: int) -> list[NDArray[Any]]:
    """Return the bytes of each stored array of a complete chunk, after checking them against the commit record.

    Raises:
        CorruptStoreError: If a checksum differs.
    """
    recorded = table.checksums(chunk)
    contents = []
    for column in files.columns:
        path = column.visible(chunk)
        with named_errors("Reading", path):
            content = map_file(path, column.chunk_bytes)
        if crc32c(content) != recorded[column.name]:
            raise CorruptStoreError(
                f"{path} changed after it was written: its checksum is {crc32c(content):08x}, recorded "
                f"{recorded[column.name]:08x}. It was not put anywhere. Remove it, check the disk, and run again."
            )
        contents.append(content)
    return contents


def _remove_chunk(files: TableFiles, chunk: int) -> None:
    """Delete the staged files of a chunk that is committed remotely.

    If another process holds the chunk, nothing is deleted; that process detects the commit when it uploads the chunk.
    """
    with named_errors("Removing staged files of", files.describe(chunk)):
        try:
            stage = StagedChunk.lock(files, chunk)
        except BusyError as error:
            logger.info("Not removed here, because another writer has it: %s", error)
            return
        try:
            for column in files.columns:
                for path in (column.visible(chunk), column.staged(chunk)):
                    if file_size(path) is not None:
                        remove_file(path)
                        failpoint("staged_file_removed")
            stage.discard_log()
        finally:
            stage.close()
