"""Where one attributor keeps its store: opened and compared when needed, created by the first good rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from trak_lite.errors import (
    BusyError,
    HeldHereError,
    ManifestMismatchError,
    MissingStoreError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
)
from trak_lite.parallel.sharing import LazyTable, Patience
from trak_lite.run.tables import checkpoint_tables, model_id_of, num_train_rows
from trak_lite.store import (
    AbstractFeatureStore,
    AbstractRowTable,
    Manifest,
    MemoryFeatureStore,
    RemotePlace,
    TableSpec,
    create_store,
    open_store,
)
from trak_lite.store.manifest import compare_fingerprints

__all__ = ["FirstRows", "Workspace", "naming_dropped"]

logger = logging.getLogger(__name__)

FirstRows = Callable[[int], Mapping[str, Any]]
"""Gives the identity of the first rows of a data set, from their number."""


class Workspace:
    """A store on disk, in an object store or in memory, that may not exist yet."""

    def __init__(self, path: str | RemotePlace | None) -> None:
        """Remember where the store is.

        Args:
            path: Folder of the store, or its place in an object store; ``None`` keeps it in memory, for the
                life of this object.
        """
        self.path = path
        self.place = os.path.abspath(path) if isinstance(path, str) else path
        """The same wherever the current folder is at a later call; messages name the path as it was given."""
        self._memory: MemoryFeatureStore | None = None
        self._store: AbstractFeatureStore | None = None
        self._manifest = Manifest({})

    @contextmanager
    def opened(self, manifest: Manifest, *, appended_to: FirstRows | None = None) -> Iterator[Self]:
        """Hold the store open for writing inside the block, and tell a Ctrl-C how to continue; see :meth:`open`."""
        self.open(manifest, appended_to=appended_to)
        try:
            yield self
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(self._how_to_continue())
            raise
        finally:
            self.close()

    def open(self, manifest: Manifest, *, appended_to: FirstRows | None = None) -> None:
        """Open the store for writing, if there is one, and compare its manifest.

        Args:
            manifest: The settings in force.
            appended_to: Identity of the first rows of the data. Where the store has fewer rows, and they are these, the
                data in the manifest is replaced, and each table grows when it is opened for writing.

        Raises:
            ManifestMismatchError: If the store was made with other settings; names every difference.
        """
        self._manifest = manifest
        self._store = self._open()
        if self._store is None:
            return
        try:
            if appended_to is not None:
                self._take_up_appended_rows(self._store, appended_to)
            self._compare(self._store.manifest)
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        """Release the store's files and locks; rows put so far are safe."""
        store, self._store = self._store, None
        if store is not None:
            self._release(store)

    def table(self, path: str) -> AbstractRowTable | None:
        """Return a table of the open store, or ``None`` if it does not exist yet."""
        if self._store is None or path not in self._store.table_names():
            return None
        return self._store.open_table(path)

    @property
    def exists(self) -> bool:
        """Whether there is a store, and it is open."""
        return self._store is not None

    def store(self) -> AbstractFeatureStore:
        """Return the open store.

        Raises:
            StateError: If there is none yet.
        """
        if self._store is None:
            raise StateError(
                f"There is no store at {self.path}. Call featurize(train_data, ...) first."
                if self.path is not None
                else "No train row has been featurized yet. Call featurize(train_data, ...) first."
            )
        return self._store

    def reader(self) -> AbstractFeatureStore:
        """Return the store, opened for reading.

        Raises:
            StateError: If nothing was featurized into memory yet.
            MissingStoreError: If there is no store at the path.
        """
        if self.place is not None:
            return open_store(self.place, "r")
        if self._memory is None:
            raise StateError("No train row has been featurized yet. Call featurize(train_data, ...) first.")
        return self._memory

    @contextmanager
    def reading(self) -> Iterator[AbstractFeatureStore]:
        """Hold the store open for reading inside the block; see :meth:`reader`."""
        store = self.reader()
        try:
            yield store
        finally:
            self._release(store)

    def model_id(self, digest: str) -> int:
        """Return the id of the checkpoint with these weights, a fresh one if they are new."""
        known = {} if self._store is None else checkpoint_tables(self._store)
        if digest in known:
            return model_id_of(known[digest])
        return max((model_id_of(path) for path in known.values()), default=-1) + 1

    def lazy_table(
        self,
        path: str,
        spec: TableSpec,
        attributes: Mapping[str, Any] | None = None,
    ) -> LazyTable:
        """Return a table that is created, with the store if need be, when its first rows are put.

        Raises:
            ManifestMismatchError: If it exists with another shape or fingerprint.
        """
        existing = self.table(path)
        if existing is not None:
            compare_fingerprints(existing.spec.fingerprint, spec.fingerprint, where=f"{self.path}:{path}")
            if existing.spec.num_rows > spec.num_rows:
                raise StateError(
                    f"{self.path}:{path} has {existing.spec.num_rows} rows by now, and the data {spec.num_rows}: "
                    "another process has appended rows meanwhile. Call again with the longer data."
                )
            if existing.spec.num_rows < spec.num_rows:
                existing = _grown(self.store(), path, spec.num_rows)
            return LazyTable(existing.spec, existing, lambda: existing)

        def create() -> AbstractRowTable:
            if self._store is None:
                self._store = self._create()
            return self._store.create_table(path, spec, attributes)

        def find() -> AbstractRowTable | None:
            if self._store is None:
                self.open(self._manifest)
            return self.table(path)

        return LazyTable(spec, None, create, find)

    def _how_to_continue(self) -> str:
        """Return what a Ctrl-C is told about what was done before it."""
        if self.path is None:
            return "Nothing is on disk, because there is no path. With path=..., the same call again would continue."
        return f"What was done is safe in {self.path}. Make the same call again: it continues where this one stopped."

    def _open(self) -> AbstractFeatureStore | None:
        if self.place is None:
            return self._memory
        try:
            return open_store(self.place, "r+")
        except MissingStoreError:
            return None
        except ReadOnlyStoreError:
            return open_store(self.place, "r")

    def _release(self, store: AbstractFeatureStore) -> None:
        if store is not self._memory:  # which nothing could open again
            store.close()

    def _create(self) -> AbstractFeatureStore:
        if self.place is None:
            self._memory = MemoryFeatureStore(self._manifest)
            return self._memory
        return create_store(self.place, self._manifest)

    def _take_up_appended_rows(self, store: AbstractFeatureStore, first_rows: FirstRows) -> None:
        """Note the data in the manifest if the stored rows are its first ones and every setting is the same."""
        stored, given = store.manifest.fingerprint, self._manifest.fingerprint
        num_rows = num_train_rows(store.manifest)
        if not 0 < num_rows < given["dataset"]["num_rows"]:
            return
        compare_fingerprints(
            stored,
            {**given, "dataset": dict(first_rows(num_rows))},
            where=str(self.path or "the store in memory"),
            remedy="Rows are appended to the very data, in the very order, that was featurized with these settings.",
        )
        store.replace_fingerprint(stored, given)
        logger.info(
            "%d rows were appended to the %d train rows.", given["dataset"]["num_rows"] - num_rows, num_rows
        )

    def _compare(self, stored: Manifest) -> None:
        """Compare the given settings with the stored ones; without a dataset, only the settings."""
        given = self._manifest.fingerprint
        compared = {
            key: value for key, value in stored.fingerprint.items() if "dataset" in given or key != "dataset"
        }
        try:
            compare_fingerprints(compared, given, where=str(self.path or "the store in memory"))
        except ManifestMismatchError as error:
            if "dataset." in str(error) and "dataset.num_rows" not in str(error):
                raise ManifestMismatchError(
                    f"{error} If its samples are drawn anew at each access (augmentation, noise, a random mask), "
                    "switch that off, or seed it with the index of the row. If it is the same data whose bytes differ "
                    "from one machine to the next (another decoder), pass Rows(data, name=...) at every call."
                ) from None
            longer = 0 < num_train_rows(stored) < num_train_rows(self._manifest)
            if longer and "indices" in given["dataset"]:  # the Attributor's
                raise ManifestMismatchError(
                    f"{error} If rows were appended to the same data, pass append=True."
                ) from None
            raise


@contextmanager
def naming_dropped(store: AbstractFeatureStore) -> Iterator[dict[str, str]]:
    """Context manager that names the checkpoints that another process drops while the block reads their rows.

    Yields:
        Paths of the train tables by the digest of the checkpoint's weights.

    Raises:
        StateError: If the block failed, and checkpoints are not in the store any more that were in it before.
    """
    known = checkpoint_tables(store)
    try:
        yield known
    except (StoreError, KeyError) as error:
        gone = sorted(set(known.values()) - set(checkpoint_tables(store).values()), key=model_id_of)
        if not gone:
            raise
        raise StateError(
            f"Another process has dropped {', '.join(gone)} while its rows were read. Make the same call again: it "
            "takes the checkpoints that are left."
        ) from error


def _grown(store: AbstractFeatureStore, path: str, num_rows: int) -> AbstractRowTable:
    """Give a table more rows, and wait for whoever still fills its last chunk or grows it at this moment."""
    patience = Patience()
    while True:
        try:
            return store.grow_table(path, num_rows)
        except HeldHereError:
            raise
        except BusyError as error:
            patience.wait("to append rows", partial(str, error))
