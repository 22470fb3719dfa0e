"""Opens the store of an attributor, compares its settings, and creates it with the first valid rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self

from trak_lite.core.json_text import digest_of
from trak_lite.core.validate import some_of
from trak_lite.errors import (
    BusyError,
    HeldHereError,
    ManifestMismatchError,
    MissingStoreError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
)
from trak_lite.run.tables import (
    CAPTURED,
    capture_tables,
    checkpoint_ids,
    checkpoint_path,
    checkpoint_tables,
    model_id_of,
    num_train_rows,
    table_path,
)
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
from trak_lite.store.manifest import compare_fingerprints, differing_keys
from trak_lite.store.sharing import LazyTable, Patience

logger = logging.getLogger(__name__)

_OF_CAPTURED: Final = (
    "This value, which f captures, is another one here, or its description differs from process to process, as that "
    "of an object with a list that was made from a set. Use another path. If it is the same value, let f capture the "
    "tensors and numbers that it needs of it, or derive the task from AbstractModelOutput and return these from "
    "settings()."
)
FirstRows = Callable[[int], Mapping[str, Any]]
"""Returns the identity of the first rows of a dataset, given their number."""


class Workspace:
    """A store on disk, in an object store or in memory; it may not exist yet."""

    def __init__(self, path: str | RemotePlace | None) -> None:
        """Take a folder or a place in an object store, which is not opened; ``None`` keeps the store in memory."""
        self.path = path
        self.place = os.path.abspath(path) if isinstance(path, str) else path
        """Absolute path, so a later change of the current folder has no effect; messages use ``path``."""
        self._memory: MemoryFeatureStore | None = None
        self._store: AbstractFeatureStore | None = None
        self._manifest = Manifest({})

    @property
    def name(self) -> str:
        """The store in messages."""
        return str(self.path or "the store in memory")

    def holds_other_data(self, dataset: Mapping[str, Any]) -> bool:
        """Return whether the store is in memory and was made for train data with another identity."""
        if self._memory is None:
            return False
        stored = self._memory.manifest.fingerprint.get("dataset", {})
        return digest_of(stored) != digest_of(dataset)

    @contextmanager
    def opened(self, manifest: Manifest, *, appended_to: FirstRows | None = None) -> Iterator[Self]:
        """Open the store for writing in the block, and add to a Ctrl-C how to continue; see :meth:`open`."""
        self.open(manifest, appended_to=appended_to)
        try:
            yield self
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(
                "Nothing was stored on disk, because no path was given. Pass path=... to be able to continue."
                if self.path is None
                else f"Finished work is stored in {self.path}. Make the same call again to continue."
            )
            raise
        finally:
            self.close()

    def open(self, manifest: Manifest, *, appended_to: FirstRows | None = None) -> None:
        """Open the store for writing, if there is one, and compare its manifest with that of the present settings.

        If the data begin with the rows of the store, whose identity ``appended_to`` returns, the manifest is updated to
        the longer data, and each table grows when it is opened for writing.
        """
        self._manifest = manifest
        self._store = self._open()
        if self._store is None:
            return
        try:
            if appended_to is not None:
                self._take_up_appended_rows(self._store, appended_to)
            self.compare(self._store.manifest, manifest)
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        """Release the files and locks of the store; rows that were put stay."""
        store, self._store = self._store, None
        if store is not None:
            self._release(store)

    def table(self, path: str) -> AbstractRowTable | None:
        """Return a table of the open store, or ``None`` if it does not exist yet."""
        if self._store is None or not self._store.has_table(path):
            return None
        try:
            return self._store.open_table(path)
        except MissingStoreError:
            if self._store.has_table(path):  # otherwise another process has dropped it meanwhile
                raise
            return None

    @property
    def exists(self) -> bool:
        """Whether the store exists and is open."""
        return self._store is not None

    def store(self) -> AbstractFeatureStore:
        """Return the open store."""
        if self._store is None:
            raise StateError(
                f"There is no store at {self.path}. Call featurize(train_data, ...) first."
                if self.path is not None
                else "No train row has been featurized yet. Call featurize(train_data, ...) first."
            )
        return self._store

    def created(self) -> AbstractFeatureStore:
        """Return the open store; create it if it does not exist yet."""
        if self._store is None:
            if self.place is None:
                self._store = self._memory = MemoryFeatureStore(self._manifest)
            else:
                self._store = create_store(self.place, self._manifest)
        return self._store

    def reader(self) -> AbstractFeatureStore:
        """Return the store, opened for reading."""
        if self.place is not None:
            return open_store(self.place, "r")
        if self._memory is None:
            raise StateError("No train row has been featurized yet. Call featurize(train_data, ...) first.")
        return self._memory

    @contextmanager
    def reading(self) -> Iterator[AbstractFeatureStore]:
        """Open the store for reading in the block; see :meth:`reader`."""
        store = self.reader()
        try:
            yield store
        finally:
            self._release(store)

    def lazy_table(
        self, path: str, spec: TableSpec, attributes: Mapping[str, Any] | None = None
    ) -> LazyTable:
        """Return a table that is created when its first rows are put, with the store if it does not exist."""
        existing = self.table(path)
        if existing is not None:
            compare_fingerprints(existing.spec.fingerprint, spec.fingerprint, where=f"{self.name}:{path}")
            if existing.spec.num_rows > spec.num_rows:
                raise StateError(
                    f"{self.name}:{path} has {existing.spec.num_rows} rows, and the data has {spec.num_rows}: another "
                    "process has appended rows. Call again with the longer data."
                )
            if existing.spec.num_rows < spec.num_rows:
                existing = _grown(self.store(), path, spec.num_rows)
            return LazyTable(existing.spec, existing, lambda: existing)

        def find() -> AbstractRowTable | None:
            if self._store is None:
                self.open(self._manifest)
            return self.table(path)

        return LazyTable(spec, None, lambda: self.created().create_table(path, spec, attributes), find)

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
        if store is not self._memory:  # a closed store in memory cannot be opened again
            store.close()

    def _take_up_appended_rows(self, store: AbstractFeatureStore, first_rows: FirstRows) -> None:
        """Update the manifest to the longer data if its first rows are the stored ones and all settings agree."""
        stored, fingerprint = store.manifest.fingerprint, self._manifest.fingerprint
        num_rows = num_train_rows(store.manifest)
        if not 0 < num_rows < fingerprint["dataset"]["num_rows"]:
            return
        compare_fingerprints(
            stored,
            {**fingerprint, "dataset": dict(first_rows(num_rows))},
            where=self.name,
            remedy="Rows can only be appended to the same data in the same order, featurized with the same settings.",
        )
        captured = [
            *(table_path(t) for t in checkpoint_tables(store).values() if CAPTURED in t.spec.fingerprint),
            *capture_tables(store).values(),
        ]
        if captured:
            raise ManifestMismatchError(
                f"The rows {some_of(captured)} were captured in a training, whose steps with appended rows have not "
                "been made. Featurize the longer data into another path."
            )
        store.replace_fingerprint(stored, fingerprint)
        added = fingerprint["dataset"]["num_rows"] - num_rows
        logger.info("Appended %d rows to the %d train rows.", added, num_rows)

    def compare(self, stored: Manifest, manifest: Manifest) -> None:
        """Raise if a manifest differs from that of the store; without a dataset, only its settings are compared."""
        fingerprint, compared = manifest.fingerprint, dict(stored.fingerprint)
        if "dataset" not in fingerprint:
            compared.pop("dataset", None)
        differing = {key: values for key, *values in differing_keys(compared, fingerprint)}
        if not differing:
            return
        is_captured = all(
            key.startswith("task.function.") and not key.endswith((".source", ".callable"))
            for key in differing
        )
        remedy = {"remedy": _OF_CAPTURED} if is_captured else {}
        try:
            compare_fingerprints(compared, fingerprint, where=self.name, **remedy)
        except ManifestMismatchError as error:
            hint = ""
            if "dataset.num_rows" in differing:
                longer = 0 < num_train_rows(stored) < num_train_rows(manifest)
                if longer and "indices" in fingerprint["dataset"]:  # only the Attributor can append rows
                    hint = " If rows were appended to the same data, pass append=True."
            elif any(key.startswith("dataset.") for key in differing):
                hint = (
                    " If the samples change from one access to the next (augmentation, noise, a random mask), switch "
                    "the randomness off, or seed it with the index of the row. If it is the same data with other bytes "
                    "on another machine (another decoder), pass Rows(data, name=...) at every call."
                )
            cause = _cause(differing) or _other_settings(stored, manifest)
            raise ManifestMismatchError(f"{cause}{error}{hint}") from None


def _cause(differing: Mapping[str, Sequence[Any]]) -> str:
    """Return a sentence on what differs, for keys that are digests or follow from others; else ``""``."""
    data = [key for key in differing if key.startswith("dataset.")]
    if any(key.startswith("parameters.") for key in differing):
        return "The rows are of another model (or of other parameters of it, grad_wrt): use another path. "
    if data == ["dataset.indices"]:
        return "The rows are of the same dataset in another order, or of others of its samples. "
    if data == ["dataset.collated"]:
        return "The collate function makes other batches of the same samples. "
    there, here = differing.get("dataset.num_rows", (None, None))
    if isinstance(there, int) and isinstance(here, int):
        return f"The data have {'more' if here > there else 'fewer'} rows than those of the store. "
    return "The rows are of other samples, or of the same ones in another order. " if data else ""


def _shown_setting(name: str, settings: Mapping[str, Any], manifest: Manifest) -> str:
    """Return a setting as text; of a task without a name, which is a function, the name of the function."""
    task = manifest.fingerprint.get("task")
    if name == "task" and settings[name] is None and isinstance(task, Mapping):
        function = task.get("function")
        function_name = function.get("callable") if isinstance(function, Mapping) else None
        return "a function" if function_name is None else f"the function {function_name!s:.80}"
    return f"{settings[name]!r:.80}"


def _other_settings(stored: Manifest, requested: Manifest) -> str:
    """Return a sentence on the arguments of the attributor that differ; the fingerprint names what follows from them.

    The method is left out: rows do not depend on it.
    """
    there, here = stored.made_with.get("settings"), requested.made_with.get("settings")
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return ""
    shared = {name for name in there.keys() & here.keys() if name not in ("method", "gradient_computer")}
    other = [
        f"{name}={_shown_setting(name, there, stored)}, not {_shown_setting(name, here, requested)}"
        for name in sorted(shared)
        if there[name] != here[name]
    ]
    return f"The rows were made with {'; '.join(other)}. " if other else ""


@contextmanager
def naming_dropped(store: AbstractFeatureStore) -> Iterator[dict[str, AbstractRowTable]]:
    """Yield the train tables by weights digest; an error in the block names checkpoints that were dropped meanwhile."""
    tables = checkpoint_tables(store)
    try:
        yield tables
    except (StoreError, KeyError) as error:
        gone = sorted(set(map(model_id_of, tables.values())).difference(checkpoint_ids(store)))
        if not gone:
            raise
        raise StateError(
            f"Another process has dropped {', '.join(map(checkpoint_path, gone))} while its rows were read. Make the "
            "same call again to use the other checkpoints."
        ) from error


def _grown(store: AbstractFeatureStore, path: str, num_rows: int) -> AbstractRowTable:
    """Grow a table; wait while another process writes its last chunk or grows it."""
    patience = Patience()
    while True:
        try:
            return store.grow_table(path, num_rows)
        except HeldHereError:
            raise
        except BusyError as error:
            patience.wait("to append rows", partial(str, error))
