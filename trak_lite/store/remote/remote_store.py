"""Feature store in an object store, with the layout of the disk store; each chunk file is one object.

Rows of unfinished chunks are in row logs on a local disk; see ``index`` for the commit protocol. The zarr metadata is
the same as on disk, so plain zarr can read a finished store through its FsspecStore or ObjectStore.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, final

from trak_lite.core.failpoints import failpoint
from trak_lite.core.files import locked_file, named_errors, open_file, remove_tree
from trak_lite.core.folders import make_folders
from trak_lite.core.validate import one_of
from trak_lite.errors import CorruptStoreError, UnsupportedStoreError
from trak_lite.store._check_report import Report
from trak_lite.store._columns import TableSpec
from trak_lite.store._grid import plain_manifest
from trak_lite.store._table import AbstractRowTable
from trak_lite.store.disk.check import lost_metadata, missing_store
from trak_lite.store.disk.chunk_files import TableFiles
from trak_lite.store.disk.documents import (
    DROPPED,
    check_array,
    encode_document,
    group_document,
    hidden_document,
    identity_of,
    manifest_from_json,
    read_document,
    read_record,
    sealed,
    store_record,
    table_documents,
)
from trak_lite.store.disk.entries import CACHE, HiddenFiles
from trak_lite.store.disk.listing import TABLES, decode_entry, encode_entry, entry_name
from trak_lite.store.disk.recorded import RecordedFeatureStore
from trak_lite.store.disk.row_table import RowTable
from trak_lite.store.disk.staging import logs_locked
from trak_lite.store.disk.zarr_store import CheckChunks
from trak_lite.store.manifest import Manifest
from trak_lite.store.remote.check import check_remote
from trak_lite.store.remote.index import ObjectChunks
from trak_lite.store.remote.objects import AbstractObjects, require_exclusive
from trak_lite.store.remote.place import RemotePlace

_METADATA = "zarr.json"


@final
class RemoteFeatureStore(RecordedFeatureStore):
    """Feature store in an object store. Use :meth:`create` or :meth:`open` to construct it.

    Several machines may write to one store. If two compute the same chunk, the first commit wins. Cached arrays are
    stored in the staging folder of each machine.

    Example:
        >>> import tempfile, numpy as np
        >>> from trak_lite.store import Column, Manifest, RemotePlace, TableSpec
        >>> from trak_lite.store.remote.remote_store import RemoteFeatureStore
        >>> spec = TableSpec(num_rows=3, columns=(Column("features", 2, "float16"),), chunk_rows=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     place = RemotePlace("memory://example.zarr", staging=folder)
        ...     with RemoteFeatureStore.create(place, Manifest({"seed": 0})) as store:
        ...         table = store.create_table("ckpt-0", spec)
        ...         table.put(0, {"features": np.ones((2, 2))})
        ...         table.committed_chunks(), table.pending().tolist()
        ([0], [2])
    """

    def __init__(
        self,
        place: RemotePlace,
        manifest: Manifest,
        record: Mapping[str, Any],
        *,
        writable: bool,
        check: CheckChunks = "first_touch",
    ) -> None:
        self._objects: AbstractObjects = place.objects
        self._check = check
        self._staging = place.staging_root(manifest)
        cache = HiddenFiles(self._staging)
        super().__init__(place.url, manifest, record, place.objects, cache=cache, writable=writable)
        if writable:
            with named_errors("Making", self._staging):
                make_folders(f"{self._staging}/{CACHE}")

    @classmethod
    def create(cls, where: object, manifest: Manifest) -> Self:
        """Create a store, or open an existing one with the same settings; see :meth:`ZarrFeatureStore.create`.

        ``where`` is a :class:`~trak_lite.store.RemotePlace`, or its first argument. An object store without conditional
        creation of objects is an UnsupportedStoreError.
        """
        place, manifest = _as_place(where), plain_manifest(manifest)
        if read_record(place.objects.get, "", where=place.url) is None:
            require_exclusive(place.objects)
            _refuse_occupied(place.objects)
            place.objects.create(f"{TABLES}/{_METADATA}", encode_document(hidden_document("tables")))
            place.objects.create(_METADATA, encode_document(group_document(store_record(manifest))))
        return cls.open(place, "r+")._made_with(manifest)

    @classmethod
    def open(
        cls, where: object, mode: Literal["r", "r+"] = "r", *, check: CheckChunks = "first_touch"
    ) -> Self:
        """Open an existing store; see :meth:`ZarrFeatureStore.open`.

        ``where`` is a :class:`~trak_lite.store.RemotePlace`, or its first argument. Unless ``check`` is ``"never"``,
        the checksum of each chunk is compared whenever it is fetched. For writing, an object store without conditional
        creation of objects is an UnsupportedStoreError.
        """
        one_of(("r", "r+"), mode=mode)
        one_of(("first_touch", "never"), check=check)
        place = _as_place(where)
        record = read_record(place.objects.get, "", where=place.url)
        if record is None:
            raise missing_store(place.url)
        manifest = manifest_from_json(record, place.url)
        if place.objects.get(f"{TABLES}/{_METADATA}") is None:
            raise CorruptStoreError(
                f"{place.url}/{TABLES}/{_METADATA} is missing: the list of the store's tables. Restore what is below "
                f"{TABLES} from a backup."
            )
        if mode == "r+":
            require_exclusive(place.objects)
        return cls(place, manifest, record, writable=mode == "r+", check=check)

    def _created(self, path: str, spec: TableSpec, attributes: Mapping[str, Any]) -> RowTable:
        if self._table_record(path) is None:
            with self._staging_locked():
                # checked again: another process of this machine may just have created it
                if self._table_record(path) is None:
                    self._finish_dropping(path)
                    self._drop_staged(path)  # staged rows of a dropped table must not reappear
                    self._put_documents(path, spec, attributes)
        return self.open_table(path)

    def drop_table(self, path: str) -> None:
        """Delete a table and all its rows; see :meth:`AbstractFeatureStore.drop_table`.

        A partly deleted table does not exist any more; creating it again first completes the deletion. Writers on other
        machines are not detected: stop them first.
        """
        self._require_writable()
        self._require_table(path)
        with self._staging_locked():
            self._require_table(path)
            mark = group_document(sealed({DROPPED: True}))
            self._objects.put(f"{path}/{_METADATA}", encode_document(mark))
            if path in self._tables:
                self._tables.pop(path).close()
            self._finish_dropping(path)
            self._drop_staged(path)

    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Return the table if it has ``num_rows`` rows; it cannot grow in an object store (UnsupportedStoreError)."""
        self._require_writable()
        table = self.open_table(path)
        if table.spec.num_rows == num_rows:
            return table
        raise UnsupportedStoreError(
            f"{self.path}/{path} has {table.spec.num_rows} rows and cannot grow to {num_rows} in an object store. Copy "
            "the store to a local disk, grow it there and copy it back, or create another table."
        )

    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Raise UnsupportedStoreError: the manifest in an object store cannot change."""
        self._require_writable()
        raise UnsupportedStoreError(
            f"{self.path}: in an object store the settings cannot change, and rows cannot be appended to the data. "
            "Copy the store to a local disk, append the rows there and copy it back, or featurize into another path."
        )

    def check(self, *, repair: bool = False) -> Report:
        """Fetch every chunk and compare it with its commit record; see :func:`~trak_lite.store.check_store`."""
        return check_remote(self._objects, repair=repair)

    def _stage(self, path: str) -> str:
        """Return the folder on this machine that holds the row logs of a table."""
        return f"{self._staging}/{entry_name(path)}"

    def _drop_staged(self, path: str) -> None:
        """Delete the rows of a table that are staged on this machine."""
        stage = self._stage(path)
        with named_errors("Dropping", stage), logs_locked([stage], where=f"{self.path}/{path}"):
            if os.path.lexists(stage):
                remove_tree(stage)

    def open_table(self, path: str) -> RowTable:
        """Return the table, opened at most once, for writing if the store is writable."""
        if path not in self._tables:
            record = self._require_table(path)
            where, spec, identity = f"{self.path}/{path}", self._spec(record, path), identity_of(record)
            self._require_listed(path, identity)
            texts = self._objects.get_many(f"{path}/{array.name}/{_METADATA}" for array in spec.arrays)
            for array in spec.arrays:
                document = read_document(texts.get, f"{path}/{array.name}", where=self.path)
                check_array(document, where, array, spec)
            files = TableFiles(path, spec, root=self.path, identity=identity, stage=self._stage(path))
            if self.writable:
                with named_errors("Making", files.stage):
                    make_folders(files.stage)
            chunks = ObjectChunks(self._objects, files, check=self._check == "first_touch")
            self._tables[path] = RowTable(files, chunks, writable=self.writable)
        return self._tables[path]

    def _group(self, path: str) -> dict[str, Any] | None:
        record = super()._group(path)
        return None if record is None or DROPPED in record else record

    def _put_documents(self, path: str, spec: TableSpec, attributes: Mapping[str, Any]) -> None:
        """Create the ``zarr.json`` documents of the parent groups, the arrays, and, last, the table itself."""
        parts = path.split("/")
        above = {"/".join(parts[:depth]): group_document({}) for depth in range(1, len(parts))}
        documents = table_documents(path, self._origin, spec, attributes)
        by_folder = {f"{path}/{name}".rstrip("/"): document for name, document in documents.items()}
        for folder, document in {**above, **by_folder}.items():
            self._objects.create(f"{folder}/{_METADATA}", encode_document(document))
        failpoint("table_put")

    def _require_listed(self, path: str, identity: str) -> None:
        """Check a table against the list of tables; add it if an interrupted creation left it unlisted."""
        entry = _entry(path)
        text = self._objects.get(entry)
        if text is None:
            if self._writable:
                self._objects.create(entry, encode_entry(path, identity))
        elif decode_entry(text, path, where=f"{self.path}/{entry}") != identity:
            raise CorruptStoreError(
                f"{self.path}/{path} is another table than the one that the store lists under this path: it was "
                "replaced by one of other rows or another shape. Put the right objects back from a backup, or remove "
                f"them and {entry}."
            )

    def _is_lost(self, path: str) -> bool:
        # twice, because others may be dropping it
        return all(self._is_listed(path) and not self._has_document(path) for _ in range(2))

    @contextlib.contextmanager
    def _staging_locked(self) -> Iterator[None]:
        """Hold this machine's lock for creating and dropping tables, in the object store and in the staging folder."""
        path = f"{self._staging}.lock"
        with named_errors("Locking", path):
            os.close(open_file(path, os.O_RDWR | os.O_CREAT))
            with locked_file(path):
                yield

    def _finish_dropping(self, path: str) -> None:
        """Delete the objects of a table that is marked as dropped; the mark itself last."""
        if DROPPED in (super()._group(path) or {}):
            self._objects.delete(_entry(path))
            mark = f"{path}/{_METADATA}"
            for key in self._objects.sizes(path):
                if key != mark:
                    self._objects.delete(key)
            self._objects.delete(mark)


def _as_place(where: object) -> RemotePlace:
    return where if isinstance(where, RemotePlace) else RemotePlace(where)


def _entry(path: str) -> str:
    """Return the key of a table's entry in the list."""
    return f"{TABLES}/{entry_name(path)}"


def _refuse_occupied(objects: AbstractObjects) -> None:
    occupied = objects.folders("")
    if occupied == [TABLES] and list(objects.sizes(TABLES)) == [f"{TABLES}/{_METADATA}"]:
        return  # left by a creation that was killed or is still running
    # checked again: another process may just have created the store
    if occupied and objects.get(_METADATA) is None:
        if TABLES in occupied:
            raise CorruptStoreError(lost_metadata(objects.url))
        raise CorruptStoreError(
            f"{objects.url} contains {occupied[:5]} and is not a store: it has no zarr.json. Nothing was stored there. "
            "Use another address, or remove these objects."
        )
