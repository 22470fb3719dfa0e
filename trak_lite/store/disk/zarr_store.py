"""Feature store on disk: a zarr v3 hierarchy of uncompressed arrays, written by a crash-safe commit protocol.

Each chunk file is a raw little-endian C-order block of whole rows, so plain zarr, xarray and ``numpy.memmap`` can
read a finished store. The store does not write through zarr, because zarr does not sync its writes, loses rows that
are written concurrently to one chunk, and silently reads missing chunks as fill values.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, final

import numpy as np

from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import (
    READING_NEEDS_LESS,
    locked_file,
    make_folder,
    named_errors,
    replace_file,
    stamp,
)
from trak_lite.core.folders import (
    make_folders,
    names_in,
    publish_folder,
    scratch_folder,
)
from trak_lite.core.validate import one_of
from trak_lite.errors import (
    BusyError,
    CorruptStoreError,
    InvalidInputError,
    MissingStoreError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
)
from trak_lite.store._check_report import Report
from trak_lite.store._columns import TableSpec
from trak_lite.store._grid import grown_spec, plain_json, plain_manifest
from trak_lite.store._names import path_parts
from trak_lite.store._table import AbstractRowTable
from trak_lite.store.disk.check import check_folder, lost_metadata, missing_store
from trak_lite.store.disk.chunk_files import COMMITS, STAGE, TableFiles
from trak_lite.store.disk.chunks import FolderChunks
from trak_lite.store.disk.documents import (
    CHECKSUM,
    GROWS_TO,
    check_array,
    encode_document,
    group_document,
    hidden_document,
    identity_of,
    manifest_from_json,
    read_document,
    read_record,
    refuse_undescribed,
    sealed,
    sizes_under_way,
    store_record,
    table_documents,
    write_document,
)
from trak_lite.store.disk.entries import HiddenFiles
from trak_lite.store.disk.listing import TABLES, TableList
from trak_lite.store.disk.recorded import RecordedFeatureStore
from trak_lite.store.disk.row_table import RowTable
from trak_lite.store.disk.staging import StagedChunk, logs_locked
from trak_lite.store.manifest import FORMAT, Manifest, replaced_fingerprint

CheckChunks = Literal["first_touch", "never"]
"""When chunk checksums are compared with the commit records."""

MapFiles = Literal["auto", "always", "never"]
"""Whether chunk files are memory-mapped or read."""


@final
class ZarrFeatureStore(RecordedFeatureStore):
    """Feature store in a local folder. Use :meth:`create` or :meth:`open` to construct it.

    Example:
        >>> import tempfile, numpy as np
        >>> from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore
        >>> spec = TableSpec(num_rows=3, columns=(Column("features", 2, "float16"),), chunk_rows=32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ZarrFeatureStore.create(f"{folder}/run.zarr", Manifest({"seed": 0})) as store:
        ...         table = store.create_table("ckpt-0", spec)
        ...         table.put(0, {"features": np.ones((2, 2))})
        ...         pending = table.pending().tolist()
        ...         table.put([2], {"features": np.zeros((1, 2))})
        ...         pending, table.read("features")[:, 0].tolist()
        ([2], [1.0, 1.0, 0.0])
    """

    def __init__(
        self,
        root: str,
        manifest: Manifest,
        record: Mapping[str, Any],
        *,
        writable: bool,
        check: CheckChunks = "first_touch",
        mapping: MapFiles = "auto",
    ) -> None:
        self._root = root
        self._list = TableList(root)
        files = HiddenFiles(root)
        super().__init__(
            root, manifest, record, files, cache=files, writable=writable, lock=self._list.locked
        )
        self._check = check
        self._mapped = {"auto": None, "always": True, "never": False}[mapping]

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: Manifest) -> Self:
        """Create a store, or open an existing one with the same settings for writing.

        If several processes call this at once, one creates the store and the others open it.

        Args:
            path: Folder of the store: absent, empty, or an existing store. Symbolic links in this path are resolved.
            manifest: Settings; the fingerprint is compared key by key with that of an existing store.

        Raises:
            ManifestMismatchError: If the store was created with other settings; names every differing key.
            CorruptStoreError: If the folder is not empty and not a store, or the stored metadata is damaged.
            ReadOnlyStoreError: If the folder cannot be written.
        """
        if manifest.format != FORMAT:
            raise InvalidInputError(f"This version writes format {FORMAT}, got {manifest.format}.")
        root, manifest = os.path.realpath(os.fspath(path)), plain_manifest(manifest)
        with named_errors("Creating", root):
            if read_record(HiddenFiles(root).get, "", where=root) is None:
                _refuse_occupied(root)
                make_folders(os.path.dirname(root))
                with scratch_folder(root) as scratch:
                    make_folder(f"{scratch}/{TABLES}")
                    write_document(f"{scratch}/{TABLES}", hidden_document("tables"))
                    write_document(scratch, group_document(store_record(manifest)))
                    publish_folder(scratch, root)
        return cls.open(root, "r+")._made_with(manifest)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "r+"] = "r",
        *,
        check: CheckChunks = "first_touch",
        mapping: MapFiles = "auto",
    ) -> Self:
        """Open an existing store.

        Args:
            path: Folder of the store.
            mode: ``"r"`` for reading: writes nothing, takes no lock, and works while another process writes.
                ``"r+"`` for reading and writing.
            check: ``"first_touch"`` compares the checksum of each chunk when it is first read, at the cost of one pass
                over its bytes. ``"never"`` compares only sizes, for example right after :meth:`check`.
            mapping: ``"auto"`` memory-maps chunk files on local file systems and reads them on network file systems,
                where an I/O error on a map would kill the process. ``"always"`` always maps, ``"never"`` always reads.

        Raises:
            MissingStoreError: If there is no store.
            ManifestMismatchError: If the store has the format of another trak_lite version.
            CorruptStoreError: If its metadata is damaged.
            ReadOnlyStoreError: If ``mode`` is ``"r+"`` and the folder is not writable.
        """
        one_of(("r", "r+"), mode=mode)
        one_of(("first_touch", "never"), check=check)
        one_of(("auto", "always", "never"), mapping=mapping)
        root = os.path.realpath(os.fspath(path))
        record = read_record(HiddenFiles(root).get, "", where=root)
        if record is None:
            raise missing_store(root)
        manifest = manifest_from_json(record, root)
        if mode == "r+" and not os.access(root, os.W_OK | os.X_OK):
            raise ReadOnlyStoreError(f"{root} cannot be written. {READING_NEEDS_LESS}")
        writable = mode == "r+"
        store = cls(root, manifest, record, writable=writable, check=check, mapping=mapping)
        store._list.require()
        if writable:
            with named_errors("Removing incomplete tables in", root):
                store._list.sweep()
        return store

    def _created(self, path: str, spec: TableSpec, attributes: Mapping[str, Any]) -> RowTable:
        documents = table_documents(path, self._origin, spec, attributes)
        while True:
            if self._table_record(path) is None:
                if path in self._tables:  # dropped by another process
                    self._tables.pop(path).close()
                with named_errors("Creating", f"{self._root}/{path}"):
                    parts = path.split("/")
                    for above in ("/".join(parts[:depth]) for depth in range(1, len(parts))):
                        if not self._has_document(above):
                            self._publish(above, {"": group_document({})})
                    try:
                        self._publish(path, documents, spec.columns[0].name)
                    except FileNotFoundError:
                        if os.path.isdir(f"{self._root}/{os.path.dirname(path)}"):
                            raise
                        continue  # another process has just dropped the last table of the group
            try:
                return self.open_table(path)
            except MissingStoreError:
                if os.path.lexists(f"{self._root}/{path}"):  # the path is not a table
                    raise
                # otherwise another process has just dropped it: create it again

    def drop_table(self, path: str) -> None:
        """Delete a table and all its rows; see :meth:`AbstractFeatureStore.drop_table`.

        The folder is first renamed, then removed. After an interruption, calling this again removes the rest.
        """
        self._require_writable()
        parts = path_parts(path, what="table")
        folder = f"{self._root}/{path}"
        with named_errors("Dropping", folder):
            if self._table_record(path) is not None:
                if path in self._tables:
                    self._tables[path].give_up_locks()
                with logs_locked(self._stages(path), where=folder):
                    self._list.drop(path)
                if path in self._tables:
                    self._tables.pop(path).close()
            elif self._list.dropped(path):
                self._list.drop(path)
            else:
                self._require_table(path)
            self._list.remove_dropped(path)
            if len(parts) > 2:  # the group of one target set
                self._list.drop_group(os.path.dirname(path))

    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Append pending rows to a table; see :meth:`AbstractFeatureStore.grow_table`."""
        self._require_writable()
        self.open_table(path)  # validates its folders and arrays
        folder, record = f"{self._root}/{path}", self._require_table(path)
        spec = self._spec(record, path)
        if grown_spec(spec, num_rows) == self._tables[path].spec and not sizes_under_way(record):
            return self._tables[path]
        self._tables.pop(path).close()
        if grown_spec(spec, num_rows) != spec or sizes_under_way(record):
            with named_errors("Growing", folder):
                _grow(self._table_files(path, record), num_rows)
        return self.open_table(path)

    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Replace the fingerprint of the manifest; see :meth:`AbstractFeatureStore.replace_fingerprint`."""
        self._require_writable()
        given = plain_json(dict(given), what="The manifest's fingerprint")
        path = f"{self._root}/zarr.json"
        with named_errors("Changing", path), locked_file(path), _changed(self._root, self._root) as group:
            stored = manifest_from_json(self._group("") or {}, self._root)
            manifest = replaced_fingerprint(stored, known, given, where=self._root)
            group["attributes"]["trak_lite"]["fingerprint"] = given
        self._manifest = manifest

    def _make_hidden(self, folder: str) -> None:
        """Create a folder that zarr tools do not list, if it does not exist."""
        with named_errors("Storing an array in", self._root):
            if not os.path.isdir(f"{self._root}/{folder}"):
                self._publish(folder, {"": hidden_document(folder.removeprefix("."))})

    def check(self, *, repair: bool = False) -> Report:
        """Compare rows, records and metadata with their checksums; see :func:`~trak_lite.store.check_store`.

        Args:
            repair: Whether to set damaged chunks aside; the store must be open for writing.
        """
        if repair:
            self._require_writable()
            for table in self._tables.values():
                table.give_up_locks()
        return check_folder(self._root, repair=repair)

    def open_table(self, path: str) -> RowTable:
        """Open an existing table, at most once: a second handle would find chunks locked by the first one."""
        while path not in self._tables:
            record = self._require_table(path)
            state = stamp(f"{self._root}/{path}")
            try:
                self._tables[path] = self._opened(path, record)
            except (StateError, StoreError, FileNotFoundError):
                if self._require_table(path) == record and stamp(f"{self._root}/{path}") == state:
                    raise  # otherwise the table grew or was replaced while it was being opened: try again
        return self._tables[path]

    def _opened(self, path: str, record: Mapping[str, Any]) -> RowTable:
        folder, spec = f"{self._root}/{path}", self._spec(record, path)
        self._require_listed(path, identity_of(record))
        others = set(names_in(folder)) - {array.name for array in spec.arrays}
        refuse_undescribed(folder, [n for n in others if os.path.lexists(f"{folder}/{n}/zarr.json")])
        for array in spec.arrays:
            document = read_document(self._files.get, f"{path}/{array.name}", where=self._root)
            check_array(document, folder, array, spec, under_way=sizes_under_way(record))
        files = self._table_files(path, record)
        if self.writable:
            files.make_folders()
        chunks = FolderChunks(files, check=self._check == "first_touch", mapped=self._mapped)
        return RowTable(files, chunks, writable=self.writable)

    def _table_files(self, path: str, record: Mapping[str, Any]) -> TableFiles:
        spec, identity = self._spec(record, path), identity_of(record)
        return TableFiles(f"{self._root}/{path}", spec, root=self._root, identity=identity)

    def _stages(self, path: str) -> list[str]:
        """Return the folders that may hold row logs of a table, whose metadata may be damaged."""
        columns = (f"{self._root}/{path}/{name}" for name in names_in(f"{self._root}/{path}"))
        stages = (f"{column}/{STAGE}" for column in columns if not os.path.islink(column))
        return [stage for stage in stages if os.path.isdir(stage)]

    def _require_listed(self, path: str, identity: str) -> None:
        """Check a table against the list of tables; add it if an interrupted creation left it unlisted.

        It is a CorruptStoreError if the list has another one, and a MissingStoreError if it was dropped meanwhile.
        """
        listed = self._list.identity(path)
        if listed == identity:
            return
        with named_errors("Listing", f"{self._root}/{path}"):
            added = listed is None and (not self._writable or self._list.add(path, identity))
        if added:
            return
        now = identity_of(self._require_table(path))
        if now == identity and self._list.identity(path) == listed:
            raise CorruptStoreError(
                f"{self._root}/{path} is another table than the one that the store lists under this path: it was "
                "replaced by one of other rows or another shape. Put the right folder back from a backup, or remove "
                "this one and call check_store(path, repair=True)."
            )

    def _is_surely_there(self, path: str) -> bool:
        return os.path.lexists(f"{self._root}/{path}/zarr.json")  # the folder of a dropped table is renamed

    def _is_lost(self, path: str) -> bool:
        return bool(self._list.lost([path]))

    def _publish(
        self, path: str, documents: Mapping[str, Mapping[str, Any]], first: str | None = None
    ) -> None:
        """Atomically create a folder with documents by subfolder, if it does not exist.

        In a table, ``first`` is the folder of its first column, which holds commit records and staged rows.
        """
        with self._list.scratch() as scratch:
            for name, document in documents.items():
                if name:
                    make_folder(f"{scratch}/{name}")
                write_document(f"{scratch}/{name}", document)
            for name in (STAGE, COMMITS) if first is not None else ():
                make_folder(f"{scratch}/{first}/{name}")
            publish_folder(scratch, f"{self._root}/{path}")


def _refuse_occupied(root: str) -> None:
    occupied = os.path.lexists(root) and (not os.path.isdir(root) or os.listdir(root))
    # checked again: another process may just have created the store
    if occupied and read_record(HiddenFiles(root).get, "", where=root) is None:
        if os.path.isdir(f"{root}/{TABLES}"):
            raise CorruptStoreError(lost_metadata(root))
        raise CorruptStoreError(
            f"{root} exists and is not a store: it has no zarr.json. Nothing was written. "
            "Use another path, or remove it."
        )


def _grow(files: TableFiles, num_rows: int) -> None:
    """Append pending rows to a table by replacing its metadata, holding the lock of its last chunk.

    The rows of a partial last chunk that is committed are first copied to its row log: with more rows it is not
    committed any more, and its rows are done by the log. Then three steps: record the target size in the table's
    ``zarr.json``, resize the arrays, and set the new size in the table's ``zarr.json``, which is authoritative. If the
    process is killed in between, the table has the old size; arrays may have either.
    """
    last = files.num_chunks - 1
    lock = StagedChunk.lock(files, last)
    try:
        if files.record().get("num_rows") != files.spec.num_rows:
            raise BusyError(
                f"{files.folder} has another number of rows now, because another writer has grown it. Open it again, "
                "then grow it."
            )
        lock.prepare()
        _log_last_rows(files, lock)
        failpoint("last_rows_logged")
        with _changed(files.folder, files.commits) as group:
            record = group["attributes"]["trak_lite"]
            record[GROWS_TO] = sorted({*sizes_under_way(record), num_rows})
        failpoint("growth_announced")
        for column in files.columns:
            with _changed(f"{files.folder}/{column.name}", files.commits) as array:
                array["shape"] = [num_rows, *array["shape"][1:]]
            failpoint("array_grown")
        with _changed(files.folder, files.commits) as group:
            record = group["attributes"]["trak_lite"]
            record["num_rows"] = num_rows
            del record[GROWS_TO]
        failpoint("table_grown")
        if not lock.done.any():
            lock.discard_log()  # created by the lock
    finally:
        lock.close()


def _log_last_rows(files: TableFiles, last: StagedChunk) -> None:
    """Copy the rows of the locked last chunk to its row log, if it is committed and not full."""
    chunks = FolderChunks(files)
    record = chunks.look_at(last.chunk)
    if record is None or len(last.done) == files.spec.chunk_rows:
        return
    if not last.complete:  # otherwise a killed call has copied them
        arrays = [np.ascontiguousarray(chunks.get(column, record)) for column in files.columns]
        last.write([(0, len(last.done))], arrays)
    last.sync()  # so that committed rows still survive a power cut


@contextlib.contextmanager
def _changed(folder: str, scratch_folder: str) -> Iterator[dict[str, Any]]:
    """Yield the ``zarr.json`` of a folder for modification; replace the file when the context exits."""
    path, scratch = f"{folder}/zarr.json", f"{scratch_folder}/.zarr.json.new-{uuid.uuid4().hex}"
    document = read_document(HiddenFiles(folder).get, "", where=folder)
    if document is None:
        raise CorruptStoreError(f"{path} is missing. Restore it from a backup, or use another path.")
    yield document
    record = document["attributes"].get("trak_lite", {})
    if CHECKSUM in record:
        document["attributes"]["trak_lite"] = sealed(record)
    replace_file(path, encode_document(document), scratch=scratch)
