"""The published chunks of a table in an object store, and the commit protocol.

Objects have the same names as the files of a local store. Each commit record is a separate object,
``.commits/c.<chunk>.<generation>.log``. A finished store can be copied between a disk and an object store.

To commit a chunk, a writer creates the column objects that do not exist, then creates the commit record. The writer
whose record is created owns the chunk. Only the owner may replace column objects: after creating the record, it
replaces objects that a killed writer left. A writer that loses never modifies objects of the owner. A chunk is
committed when its record and all its column objects exist.

Known limitation: if the owner is killed while it replaces leftover objects, the checksum of the chunk is wrong. Readers
and ``check`` report this. The owner's next run finishes the commit from its staging folder. If that folder is lost,
remove the reported objects; the rows then become pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from trak_lite.core.checksums import crc32c
from trak_lite.core.failpoints import failpoint
from trak_lite.errors import BusyError, CorruptStoreError, IncompleteStoreError
from trak_lite.store.disk.chunk_files import ColumnFiles, TableFiles
from trak_lite.store.disk.chunks import Contents, PublishedChunks
from trak_lite.store.disk.records import CommitRecord, holder_line
from trak_lite.store.remote.objects import AbstractObjects


@final
class ObjectChunks(PublishedChunks):
    """Committed chunks of a table in an object store, downloaded."""

    keeps_rows = True

    def __init__(self, objects: AbstractObjects, files: TableFiles, *, check: bool) -> None:
        super().__init__(files, {}, check=check)
        self._objects = objects
        self._read: dict[str, int] = {}

    def refresh(self) -> None:
        """List the table's objects and read new records; CorruptStoreError if a size differs from its record."""
        sizes = self._objects.sizes(self._files.folder)
        start = f"{self._files.commits}/"
        logs = [
            key
            for key, size in sizes.items()
            if key.startswith(start) and key.endswith(".log") and self._read.get(key) != size
        ]
        for key, text in self._objects.get_many(logs).items():
            for record in decode_log(text or b"")[0]:
                self._refuse_foreign(record, key)
                self._note(record)
            self._read[key] = sizes[key]
        self.committed = {
            chunk: record for chunk, record in self._latest.items() if self._is_there(record, sizes)
        }

    def look_at(self, chunk: int, *, locked: bool = False) -> CommitRecord | None:
        """Return the commit record of a chunk; see :meth:`PublishedChunks.look_at`. No table grows here.

        If it is not, this costs one request and no listing.
        """
        is_new = chunk not in self.committed
        if not is_new or self._objects.get(self._log_key(chunk, self._next_generation(chunk))) is not None:
            self.refresh()
        return self.committed.get(chunk)

    def publish(self, chunk: int, pieces: Contents) -> None:
        """Upload the columns of a complete chunk and commit it, unless another writer has committed other bytes."""
        contents = [np.concatenate(parts) for parts in pieces]
        record = self._record_of(chunk, pieces)
        committed = self.committed.get(chunk)
        if committed is not None and committed.columns != record.columns:
            raise self._lost(committed)
        leftovers = []
        for column, content in zip(self._files.columns, contents, strict=True):
            key = column.visible(chunk)
            if not self._objects.create(key, content.data):
                stored = self._objects.get(key)
                if stored is None or (len(stored), crc32c(stored)) != record.columns[column.name]:
                    leftovers.append((key, content))
            failpoint("object_put")
        self._win(record)
        failpoint("commit_put")
        for key, content in leftovers:
            self._objects.put(key, content.data)
            failpoint("leftover_replaced")
        self._note(record)
        self.committed[chunk] = record

    def sync(self) -> None:
        """Do nothing: an object that was created is kept."""

    def remedy(self, chunk: int) -> str:
        """Return instructions for repairing a damaged chunk."""
        keys = ", ".join(column.visible(chunk) for column in self._files.columns)
        return f"Remove {keys} below {self._files.root}: the rows become pending, and running again computes them."

    def _is_there(self, record: CommitRecord, sizes: Mapping[str, int]) -> bool:
        if not 0 <= record.chunk < self._files.num_chunks:
            return False  # not a chunk of this table; check reports it
        column_sizes = {c.name: sizes.get(c.visible(record.chunk)) for c in self._files.columns}
        if None in column_sizes.values():
            return False
        is_counted = record.rows == self._files.rows_in(record.chunk)
        self._require_sizes(record, column_sizes, is_counted=is_counted)
        return True

    def _record_of(self, chunk: int, contents: Contents) -> CommitRecord:
        """Return the record of a chunk that is about to be committed; again the last one if the bytes are the same."""
        record, latest = super()._record_of(chunk, contents), self._latest.get(chunk)
        same = latest is not None and latest.columns == record.columns
        generation = latest.generation if latest is not None and same else record.generation
        writer = holder_line().decode("ascii", "replace").strip()
        return replace(record, generation=generation, writer=writer)

    def _win(self, record: CommitRecord) -> None:
        """Create the commit record; raise if a different one exists."""
        key = self._log_key(record.chunk, record.generation)
        if self._objects.create(key, record.encode()):
            return
        records = decode_log(self._objects.get(key) or b"")[0]
        if not records:
            raise CorruptStoreError(
                f"{self._files.root}/{key} is not a commit record. Remove it, then run again: the rows are still "
                "staged."
            )
        self._refuse_foreign(records[0], key)
        if records[0].columns != record.columns:
            raise self._lost(records[0])

    def _refuse_foreign(self, record: CommitRecord, key: str) -> None:
        if record.table != self._files.identity:
            raise CorruptStoreError(
                f"{self._files.root}/{key} is a commit record of another table: objects were exchanged or copied. Put "
                "the right ones back, or remove the objects of this table: the rows become pending, and running again "
                "computes them."
            )

    def _lost(self, winner: CommitRecord) -> BusyError:
        return BusyError(
            f"Another writer ({winner.writer or 'unnamed'}) has committed {self._files.describe(winner.chunk)} "
            "with other bytes. Its rows stay, and the rows of this writer were discarded. Run again for the rows that "
            "are still pending, or give the writers different rows."
        )

    def _log_key(self, chunk: int, generation: int) -> str:
        return f"{self._files.commits}/c.{chunk}.{generation}.log"

    def _note(self, record: CommitRecord) -> None:
        latest = self._latest.get(record.chunk)
        if latest is None or latest.generation < record.generation:
            self._latest[record.chunk] = record

    def _load(
        self, column: ColumnFiles, record: CommitRecord, key: tuple[str, int, int]
    ) -> NDArray[np.uint8]:
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
                f"wait if it runs. {self.remedy(chunk)}"
            )
        return np.frombuffer(content, np.uint8)


def decode_log(text: bytes) -> tuple[list[CommitRecord], int]:
    """Return the records of a commit log and the number of invalid lines."""
    decoded = [CommitRecord.decode(line) for line in text.splitlines()]
    records = [record for record in decoded if record is not None]
    return records, len(decoded) - len(records)
