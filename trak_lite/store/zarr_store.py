"""The store on disk: a zarr v3 hierarchy of uncompressed arrays, written by a commit protocol of its own.

Every chunk file is the raw little-endian C-order block of whole rows, so plain zarr, xarray and ``numpy.memmap`` read
a finished store. zarr writes the metadata; rows never pass through it, because its own writes are not synced, lose
concurrent rows of a chunk and read missing chunks as fill values without a word. zarr is imported when something is
created, because that takes longer than all of this package.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, final

from numpy.typing import NDArray

from trak_lite._validate import one_of
from trak_lite.errors import (
    CorruptStoreError,
    InvalidInputError,
    ReadOnlyStoreError,
    StateError,
)
from trak_lite.store._base import AbstractFeatureStore, AbstractRowTable, Difference, TableSpec
from trak_lite.store._chunk_files import COMMITS, STAGE, TableFiles
from trak_lite.store._columns import Column, StoredArray, dtype_fingerprint
from trak_lite.store._derived import CACHE, DerivedArrays, check_derived
from trak_lite.store._dropping import drop_folder, is_dropped, remove_dropped, stage_locked
from trak_lite.store._exchange import diff_stores, merge_stores
from trak_lite.store._files import named_errors
from trak_lite.store._folders import make_folders, publish_folder, refuse_links, scratch_folder
from trak_lite.store._grid import (
    check_spec,
    compare_specs,
    grown_spec,
    plain_json,
    spec_from_json,
    spec_to_json,
)
from trak_lite.store._growing import changed_metadata, grow
from trak_lite.store._metadata import (
    attributes_from_json,
    check_array,
    manifest_from_json,
    read_attributes,
    refuse_lost,
    refuse_misnamed,
    refuse_swapped,
    refuse_undescribed,
    sizes_under_way,
)
from trak_lite.store._names import is_name, natural_order, path_parts
from trak_lite.store._refusals import group_of_tables, inside_a_table, missing_table
from trak_lite.store._verify import missing_store
from trak_lite.store._zarr_table import ZarrRowTable
from trak_lite.store.manifest import FORMAT, Manifest, replaced_fingerprint
from trak_lite.store.verification import Report, verify_store

if TYPE_CHECKING:
    import zarr

__all__ = ["ZarrFeatureStore"]

logger = logging.getLogger(__name__)

Verify = Literal["first_touch", "never"]
"""When the checksum of a chunk is compared with its commit record."""

MapFiles = Literal["auto", "always", "never"]
"""Whether the files of chunks are mapped or read."""


@final
class ZarrFeatureStore(AbstractFeatureStore):
    """Tables of feature rows under one folder; use :meth:`create` and :meth:`open`.

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
        *,
        writable: bool,
        verify: Verify = "first_touch",
        mapping: MapFiles = "auto",
    ) -> None:
        self._root = root
        self._verify = verify
        self._mapped = {"auto": None, "always": True, "never": False}[mapping]
        self._manifest = manifest
        self._writable = writable
        self._closed = False
        self._tables: dict[str, ZarrRowTable] = {}
        self._derived = DerivedArrays(f"{root}/{CACHE}")

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: Manifest) -> Self:
        """Make a store, or open the one that is there for writing if it was made with the same settings.

        Of several processes that create at once, one makes the store and the others open it.

        Args:
            path: Folder of the store; absent or empty, or a store. A symbolic link here is followed once.
            manifest: Its fingerprint is compared key by key with the stored one.

        Raises:
            ManifestMismatchError: If the store was made with other settings; names every differing key.
            CorruptStoreError: If something else is in the folder, or the stored metadata is damaged.
            ReadOnlyStoreError: If the folder cannot be written.
        """
        if manifest.format != FORMAT:
            raise InvalidInputError(f"This version writes format {FORMAT}, got {manifest.format}.")
        root = os.path.realpath(os.fspath(path))
        attributes = {
            "format": FORMAT,
            "fingerprint": plain_json(dict(manifest.fingerprint), what="The manifest's fingerprint"),
            "made_with": plain_json(dict(manifest.made_with), what="The manifest's made_with"),
        }
        with named_errors("Creating", root):
            if read_attributes(root) is None:
                _refuse_occupied(root)
                make_folders(os.path.dirname(root))
                _publish_group(root, attributes)
        store = cls.open(root, "r+")
        store.manifest.check_same(manifest, where=root)
        if store.manifest.made_with != attributes["made_with"]:
            logger.warning(
                "%s was made with %s, this is %s.", root, store.manifest.made_with, manifest.made_with
            )
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "r+"] = "r",
        *,
        verify: Verify = "first_touch",
        mapping: MapFiles = "auto",
    ) -> Self:
        """Open an existing store.

        Args:
            path: Folder of the store.
            mode: ``"r"`` writes nothing, takes no lock and works beside a writer; ``"r+"`` is for writing.
            verify: ``"first_touch"`` compares the checksum of each chunk when this store first reads it, one pass
                over its bytes; ``"never"`` trusts the bytes (right after :meth:`verify`, say). Sizes are always
                compared.
            mapping: ``"auto"`` maps the files of chunks, and reads them where they are on a network file system,
                where an I/O error on a map would kill the process; ``"always"`` maps and ``"never"`` reads them
                everywhere.

        Raises:
            MissingStoreError: If there is no store.
            ManifestMismatchError: If a newer version of trak_lite made it.
            CorruptStoreError: If its metadata is damaged.
            ReadOnlyStoreError: If it is to be written and its folder cannot be.
        """
        one_of(("r", "r+"), mode=mode)
        one_of(("first_touch", "never"), verify=verify)
        one_of(("auto", "always", "never"), mapping=mapping)
        root = os.path.realpath(os.fspath(path))
        record = read_attributes(root)
        if record is None:
            raise missing_store(root)
        manifest = manifest_from_json(record, root)
        if mode == "r+" and not os.access(root, os.W_OK | os.X_OK):
            raise ReadOnlyStoreError(
                f"{root} cannot be written. "
                "Make the folder writable, open the store with mode='r', or use another path."
            )
        return cls(root, manifest, writable=mode == "r+", verify=verify, mapping=mapping)

    @property
    def manifest(self) -> Manifest:
        """The settings that the store was made with."""
        return self._manifest

    @property
    def path(self) -> str:
        """Folder of the store, with no link in it."""
        return self._root

    @property
    def writable(self) -> bool:
        """Whether tables can be created and rows put."""
        return self._writable

    def create_table(
        self, path: str, spec: TableSpec, attributes: Mapping[str, Any] | None = None
    ) -> AbstractRowTable:
        """Open a table for writing, and create it first where it does not exist."""
        self._require_writable()
        parts = path_parts(path, what="table")
        spec = check_spec(spec)
        noted = plain_json(dict(attributes or {}), what="A table's attributes")
        if self._table_record(parts) is None:
            with named_errors("Creating", f"{self._root}/{path}"):
                self._make_parents(parts)
                _publish_table(f"{self._root}/{path}", spec, noted)
        table = self._open(path)
        compare_specs(table.spec, spec, where=f"{self._root}/{path}")
        return table

    def open_table(self, path: str) -> AbstractRowTable:
        """Open an existing table, for writing if the store is writable."""
        return self._open(path)

    def drop_table(self, path: str) -> None:
        """Remove a table and all its rows, for good; see :meth:`AbstractFeatureStore.drop_table`.

        The folder is renamed first and removed then. Where that was interrupted, dropping the table again removes
        the rest.
        """
        self._require_writable()
        parts = path_parts(path, what="table")
        folder = f"{self._root}/{path}"
        with named_errors("Dropping", folder):
            if self._table_record(parts) is not None:
                if path in self._tables:
                    self._tables[path].give_up_locks()
                with stage_locked(folder):
                    drop_folder(folder)
                if path in self._tables:
                    self._tables.pop(path).close()
            elif not is_dropped(folder):
                self._require_table(path)
            remove_dropped(folder)

    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Give a table more rows; see :meth:`AbstractFeatureStore.grow_table`."""
        self._require_writable()
        self._open(path)  # which looks at its folders and arrays
        folder, record = f"{self._root}/{path}", self._require_table(path)
        spec = spec_from_json(record, where=f"{folder}/zarr.json")
        if grown_spec(spec, num_rows) == self._tables[path].spec and not sizes_under_way(record):
            return self._tables[path]
        self._tables.pop(path).close()
        if grown_spec(spec, num_rows) != spec or sizes_under_way(record):
            with named_errors("Growing", folder):
                grow(TableFiles(folder, spec, root=self._root), num_rows)
        return self._open(path)

    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Give the manifest another fingerprint; see :meth:`AbstractFeatureStore.replace_fingerprint`."""
        self._require_writable()
        given = plain_json(dict(given), what="The manifest's fingerprint")
        with named_errors("Changing", f"{self._root}/zarr.json"), changed_metadata(self._root) as document:
            stored = manifest_from_json(read_attributes(self._root) or {}, self._root)
            manifest = replaced_fingerprint(stored, known, given, where=self._root)
            document["attributes"]["trak_lite"]["fingerprint"] = given
        self._manifest = manifest

    def diff(self, other: AbstractFeatureStore) -> tuple[Difference, ...]:
        """Return what differs between this store and another one."""
        return diff_stores(self, other)

    def merge(self, parts: Iterable[AbstractFeatureStore]) -> dict[str, int]:
        """Put the rows that this store misses and others have."""
        self._require_writable()
        return merge_stores(self, parts)

    def attributes(self, path: str) -> dict[str, Any]:
        """Return what was recorded beside a table when it was created."""
        return attributes_from_json(self._require_table(path), where=f"{self._root}/{path}/zarr.json")

    def table_names(self, prefix: str = "") -> list[str]:
        """Return the paths of all tables inside the group ``prefix``, in natural order."""
        parts = path_parts(prefix, what="table") if prefix else ()
        return sorted(self._tables_below(parts), key=natural_order)

    def cached(self, name: str, key: str) -> NDArray[Any] | None:
        """Return a derived array that was kept under this name and key, or ``None``; it is mapped, not read."""
        refuse_links(self._root, (CACHE,))
        return self._derived.get(name, key)

    def cache(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Keep a derived array; a later one under the same name replaces it."""
        check_derived(name, key, array)
        if not self._writable:
            return
        refuse_links(self._root, (CACHE,))
        with named_errors("Keeping a derived array in", self._root):
            if not os.path.isdir(f"{self._root}/{CACHE}"):
                _publish_cache(f"{self._root}/{CACHE}")
        self._derived.put(name, key, array)

    def verify(self, *, repair: bool = False) -> Report:
        """Compare every byte of the store with its records; see :func:`~trak_lite.store.verify_store`.

        Args:
            repair: Whether to set damaged chunks aside, so that their rows are pending.

        Raises:
            ReadOnlyStoreError: If it is to be repaired and was opened for reading.
        """
        if not repair:
            return verify_store(self._root)
        self._require_writable()
        for table in self._tables.values():
            table.forget()
        return verify_store(self._root, repair=True)

    def close(self) -> None:
        """Release files and locks; rows put so far are safe."""
        self._closed = True
        for table in self._tables.values():
            table.close()

    def _require_writable(self) -> None:
        if not self._writable:
            raise ReadOnlyStoreError(f"{self._root} was opened for reading. Open it with mode='r+'.")
        if self._closed:
            raise StateError(f"{self._root} was closed. Open it again.")

    def _open(self, path: str) -> ZarrRowTable:
        """Open a table once: a second one in this process would find the chunks of the first one locked."""
        if path not in self._tables:
            record = self._require_table(path)
            folder = f"{self._root}/{path}"
            spec = spec_from_json(record, where=f"{folder}/zarr.json")
            refuse_undescribed(folder, spec)
            for array in spec.arrays:
                refuse_links(folder, (array.name,))
                check_array(folder, array, spec, under_way=sizes_under_way(record))
            refuse_links(f"{folder}/{spec.columns[0].name}", (STAGE,))
            refuse_links(f"{folder}/{spec.columns[0].name}", (COMMITS,))
            self._tables[path] = ZarrRowTable(
                TableFiles(folder, spec, root=self._root),
                writable=self._writable and not self._closed,
                check=self._verify == "first_touch",
                mapped=self._mapped,
            )
        return self._tables[path]

    def _require_table(self, path: str) -> dict[str, Any]:
        record = self._table_record(path_parts(path, what="table"))
        if record is None:
            raise missing_table(path, where=self._root, tables=self.table_names())
        return record

    def _table_record(self, parts: tuple[str, ...]) -> dict[str, Any] | None:
        """Return what a table's ``zarr.json`` says; ``None`` if there is no table of that name.

        Raises:
            InvalidInputError: If a part of the path is a table, or the path is a group of tables.
            CorruptStoreError: If one of them is so by its metadata alone.
        """
        refuse_links(self._root, parts)
        for depth in range(1, len(parts)):
            folder = os.path.join(self._root, *parts[:depth])
            record = read_attributes(folder)
            if record is not None and "columns" in record:
                refuse_swapped(folder, record)
                raise inside_a_table("/".join(parts), above="/".join(parts[:depth]))
        record = read_attributes(os.path.join(self._root, *parts))
        if record is not None and "columns" not in record:
            refuse_swapped(os.path.join(self._root, *parts), record)
            path = "/".join(parts)
            raise group_of_tables(path, tables=self.table_names(path))
        return record

    def _make_parents(self, parts: tuple[str, ...]) -> None:
        for depth in range(1, len(parts)):
            folder = os.path.join(self._root, *parts[:depth])
            if read_attributes(folder) is None:
                _publish_group(folder, {})

    def _tables_below(self, parts: tuple[str, ...]) -> list[str]:
        refuse_links(self._root, parts)
        folder = os.path.join(self._root, *parts)
        if not os.path.isdir(folder):
            return []
        found: list[str] = []
        with named_errors("Listing", folder), os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
        for name in names:
            refuse_links(folder, (name,))
            if not is_name(name):
                refuse_misnamed(os.path.join(folder, name))
                continue
            record = read_attributes(os.path.join(folder, name))
            if record is not None and "columns" in record:
                found.append("/".join((*parts, name)))
            elif record is not None:
                if record:
                    refuse_swapped(os.path.join(folder, name), record)
                found.extend(self._tables_below((*parts, name)))
            else:
                refuse_lost(os.path.join(folder, name))
        return found


def _refuse_occupied(root: str) -> None:
    occupied = os.path.lexists(root) and (not os.path.isdir(root) or os.listdir(root))
    if (
        occupied and read_attributes(root) is None
    ):  # looked at again: another process may just have created the store
        raise CorruptStoreError(
            f"{root} exists and is not a store: it has no zarr.json. Nothing was written. "
            "Use another path, or remove it."
        )


def _publish_group(folder: str, attributes: Mapping[str, Any]) -> None:
    import zarr.storage

    with scratch_folder(folder) as scratch:
        zarr.create_group(zarr.storage.LocalStore(scratch), attributes={"trak_lite": dict(attributes)})
        publish_folder(scratch, folder)


def _publish_table(folder: str, spec: TableSpec, attributes: Mapping[str, Any]) -> None:
    import zarr.storage

    record = {**spec_to_json(spec), "attributes": dict(attributes)}
    with scratch_folder(folder) as scratch:
        group = zarr.create_group(zarr.storage.LocalStore(scratch), attributes={"trak_lite": record})
        for column in spec.columns:
            for array in column.arrays:
                _create_array(group, array, spec, _how_to_read(column) if array.name == column.name else {})
        for name in (STAGE, COMMITS):
            os.mkdir(os.path.join(scratch, spec.columns[0].name, name))
        publish_folder(scratch, folder)


def _create_array(
    group: zarr.Group, array: StoredArray, spec: TableSpec, attributes: Mapping[str, Any]
) -> None:
    group.create_array(
        array.name,
        shape=array.shape(spec.num_rows),
        chunks=array.shape(spec.chunk_rows),
        dtype=array.stored_dtype,
        compressors=None,
        filters=None,
        fill_value=array.fill,  # an unguarded reader sees NaN (quantised: by the scale), never plausible zeros
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=("row",) if array.width is None else ("row", f"{array.name}_dim"),
        attributes=dict(attributes),
    )


def _how_to_read(column: Column) -> dict[str, Any]:
    """Return the attributes that tell a reader of a quantised array what its integers stand for."""
    if not column.quantised:
        return {}
    note = "NumPy lines that make float32 rows; group is the zarr group that this array is in"
    return {"trak_lite": {**dtype_fingerprint(column.dtype), "to_float32": list(column.recipe), "note": note}}


def _publish_cache(folder: str) -> None:
    """Make the folder of derived arrays; as an (empty) array, because zarr's tools do not look inside one."""
    import zarr.storage

    with scratch_folder(folder) as scratch:
        zarr.create_array(
            zarr.storage.LocalStore(scratch), shape=(0,), dtype="uint8", dimension_names=("cache",)
        )
        publish_folder(scratch, folder)
