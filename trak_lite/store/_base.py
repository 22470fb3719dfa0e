"""Abstract base class of feature stores: trees of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

from numpy.typing import NDArray

from trak_lite.store._columns import TableSpec
from trak_lite.store._exchange import Difference, diff_tables, refuse_conflicts, take_missing
from trak_lite.store._grid import flat_spec
from trak_lite.store._table import AbstractRowTable, opened_for_reading
from trak_lite.store.manifest import Manifest, compare_fingerprints, differing_keys

NEEDED_UNTIL = "needed_until"
"""Attribute of an intermediate table: path of the table computed from it. Once that is complete, this one is unused."""


class AbstractFeatureStore(ABC):
    """A tree of named tables with one manifest.

    A table path consists of ``/``-separated names of ``[A-Za-z0-9._-]{1,64}`` and has at most 200 characters. Examples:
    ``ckpt-0``, ``targets/test/ckpt-0``, ``scores/test``. If the store was opened for reading, methods that change it
    raise a ``ReadOnlyStoreError``.
    """

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Settings that the store was created with."""

    @property
    @abstractmethod
    def path(self) -> str | None:
        """Folder or address of the store; ``None`` for a store in memory."""

    @property
    @abstractmethod
    def writable(self) -> bool:
        """Whether the store is open for writing."""

    @abstractmethod
    def create_table(
        self, path: str, spec: TableSpec, attributes: Mapping[str, Any] | None = None
    ) -> AbstractRowTable:
        """Open a table for writing; create it if it does not exist.

        Args:
            path: Path of the table.
            spec: Shape and fingerprint.
            attributes: JSON values recorded at creation and never compared, such as the origin of a checkpoint.

        Raises:
            ManifestMismatchError: If the table exists with another shape or fingerprint; names every differing key.
        """

    @abstractmethod
    def open_table(self, path: str) -> AbstractRowTable:
        """Open an existing table, for writing if the store is writable.

        Raises:
            MissingStoreError: If there is no such table; names the existing ones.
        """

    @abstractmethod
    def drop_table(self, path: str) -> None:
        """Delete a table and all its rows. Handles that are open on it can no longer put rows.

        The deletion is atomic: if the process is killed, the table either exists completely or not at all.

        Raises:
            MissingStoreError: If there is no such table; names the existing ones.
            BusyError: If another writer holds a chunk of it.
        """

    @abstractmethod
    def grow_table(self, path: str, num_rows: int) -> AbstractRowTable:
        """Append pending rows to a table and return it; done rows stay done.

        A partial last chunk becomes uncommitted and is readable again once its new rows are done. Handles opened
        before the call can no longer put rows. The change is atomic; if the process is killed, repeat the call.

        Args:
            path: Path of the table.
            num_rows: New total number of rows.

        Raises:
            InvalidInputError: If the table has more rows than that.
            MissingStoreError: If there is no such table.
            BusyError: If another writer holds its last chunk.
        """

    @abstractmethod
    def replace_fingerprint(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Replace the fingerprint of the manifest after a change that affects no stored row, such as appended data.

        The replacement is atomic. If several processes call this at once, one succeeds; for the others the call is a
        no-op if they give the same fingerprint.

        Args:
            known: Fingerprint that the caller expects to replace. If the stored one differs, nothing is changed.
            given: The new fingerprint.

        Raises:
            ManifestMismatchError: If the stored fingerprint equals neither ``known`` nor ``given``; names the differing
                keys.
            InvalidInputError: If ``given`` has no JSON form.
        """

    def diff(self, other: AbstractFeatureStore) -> tuple[Difference, ...]:
        """Return the differences between this store and another one; empty if they are equal.

        Compares manifests and table specs key by key, which rows are done, and the contents: committed chunks by
        checksum, uncommitted chunks byte by byte. Attributes are not compared.
        """
        keys = differing_keys(self.manifest.fingerprint, other.manifest.fingerprint)
        differences = [Difference(None, *each) for each in keys]
        ours, theirs = self.table_names(), other.table_names()
        for path in [*ours, *(path for path in theirs if path not in ours)]:
            if path not in ours or path not in theirs:
                states = ("present", "absent")
                differences.append(Difference(path, "table", *(states if path in ours else states[::-1])))
            else:
                differences += diff_tables(path, self.open_table(path), other.open_table(path))
        return tuple(differences)

    def merge(self, parts: Iterable[AbstractFeatureStore]) -> dict[str, int]:
        """Copy the rows that are missing here from other stores, for example from workers without a shared disk.

        Tables that are missing here are created. Each part is checked for conflicts before any of its rows is copied.
        After an interruption, repeat the call; it copies the rows that are still missing.

        Args:
            parts: Stores with the same manifest and the same table specs; they may be unfinished.

        Returns:
            For each table of the parts, the number of rows copied.

        Raises:
            ManifestMismatchError: If manifest, shape or fingerprint differ; names every differing key.
            InvalidInputError: If a row is done in both stores and its bytes differ; names the rows. Nothing is copied
                from that part.
        """
        self._require_writable()
        taken: dict[str, int] = {}
        where = self.path or "the store in memory"
        for part in parts:
            self.manifest.check_same(part.manifest, where=where)
            for path in set(self.table_names()).intersection(part.table_names()):
                ours, theirs = self.open_table(path), part.open_table(path)
                compare_fingerprints(flat_spec(ours.spec), flat_spec(theirs.spec), where=f"{where}:{path}")
                refuse_conflicts(path, ours, theirs, part=part.path or "a store in memory")
            for path in part.table_names():
                theirs = part.open_table(path)
                ours = self.create_table(path, theirs.spec, part.attributes(path))
                taken[path] = taken.get(path, 0) + take_missing(ours, theirs)
        return taken

    @abstractmethod
    def attributes(self, path: str) -> dict[str, Any]:
        """Return the attributes recorded when the table was created."""

    def has_table(self, path: str) -> bool:
        """Return whether there is a table with this path."""
        return path in self.table_names()

    @abstractmethod
    def table_names(self, prefix: str = "") -> list[str]:
        """Return the paths of all tables below ``prefix``, in natural order (``ckpt-2`` before ``ckpt-10``)."""

    def top_table_names(self) -> list[str]:
        """Return the paths of all tables outside of groups, in natural order."""
        return [path for path in self.table_names() if "/" not in path]

    @abstractmethod
    def cached(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the cached array with this name and key, or ``None``."""

    @abstractmethod
    def cache(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Cache a derived array, replacing any array of the same name. Does nothing if the store is read-only."""

    @abstractmethod
    def entry(self, name: str, key: str) -> NDArray[Any] | None:
        """Return the entry with this name and key, or ``None``.

        Raises:
            CorruptStoreError: If the entry is damaged.
        """

    @abstractmethod
    def put_entry(self, name: str, key: str, array: NDArray[Any]) -> None:
        """Store an array that cannot be recomputed, such as a run record or a fit.

        Unlike the cache, entries are always stored next to the rows, also in an object store. An existing entry of the
        same name is replaced. The key identifies what the value was made from: :meth:`entry` returns ``None`` for
        another key.

        Raises:
            InvalidInputError: For a bad name, a key that is too long, or a non-numeric array.
        """

    @abstractmethod
    def entry_names(self, prefix: str = "") -> list[str]:
        """Return the names of all entries below ``prefix``, sorted."""

    @abstractmethod
    def drop_entry(self, name: str) -> None:
        """Delete an entry if it exists."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks. Rows already put are safe."""

    def _require_writable(self) -> None:
        if not self.writable:
            raise opened_for_reading(self.path or "The store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
